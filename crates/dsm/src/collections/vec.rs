//! `DVec`: a vector in chunks, each of which has an owner of its own.
#![allow(unsafe_code, reason = "owners and numbers are far values")]

use super::GrowingSlice;
use crate::task::sealed::{self, OwnerPlace, WordMut};
use crate::{DBox, Far, FarGroup, Here, Mut, NodeId, OwnedObject, Owner, OwnerMut, Portable, ShareError};
use core::mem::size_of;
use farfield_core::dsm::OwnerWord;

/// Size of the chunks of a vector, unless they are asked to be smaller or larger.
const CHUNK_BYTES: usize = 1 << 20;

/// Vector in shared memory, as `Vec` is for one process.
///
/// Its values lie in chunks of the same length, but for the last one. Each chunk is an object with an owner
/// of its own, so chunks can lie at different nodes, and tasks can read or change them at the same time:
/// [`DVec::chunks`] and [`DVec::chunks_mut`] give what a scope can lend. A chunk is at the node that has
/// written to it last.
///
/// The vector itself is a few words, which can be sent to tasks and lie in shared objects. All that is to
/// be written comes to the writer's node first: one value with its chunk.
pub struct DVec<T: Far> {
    /// Chunks that are full.
    full: GrowingSlice<DBox<[T]>>,
    last: GrowingSlice<T>,
    chunk_len: usize,
}

// SAFETY: owners and a number.
unsafe impl<T: Far> Portable for DVec<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for DVec<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.full.visit_owned(visit);
        self.last.visit_owned(visit);
    }
}
// SAFETY: as above.
unsafe impl<T: Far> Far for DVec<T> {}

impl<T: Far> core::fmt::Debug for DVec<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DVec({} values, {} chunks)", self.len(), self.len().div_ceil(self.chunk_len))
    }
}

impl<T: Far> Default for DVec<T> {
    fn default() -> DVec<T> {
        DVec::new()
    }
}

impl<T: Far> DVec<T> {
    /// Returns an empty vector, whose chunks will take up to 1 MiB each, or hold one value.
    pub const fn new() -> DVec<T> {
        let bytes = if size_of::<T>() > 0 { size_of::<T>() } else { 1 };
        DVec::with_chunk(CHUNK_BYTES / bytes)
    }

    /// Returns an empty vector, whose chunks will hold so many values each, and one at least.
    pub const fn with_chunk(values: usize) -> DVec<T> {
        let chunk_len = if values > 0 { values } else { 1 };
        DVec { full: GrowingSlice::new(), last: GrowingSlice::new(), chunk_len }
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.full.len() * self.chunk_len + self.last.len()
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of values of a full chunk.
    pub fn chunk_len(&self) -> usize {
        self.chunk_len
    }

    /// Appends a value at this node: the last chunk comes here, if it is elsewhere and not full. On an
    /// error the value is dropped.
    pub fn push(&mut self, here: &Here<'_>, value: T) -> Result<(), ShareError> {
        self.begin_chunk(here)?;
        self.last.push(here, value, self.chunk_len)
    }

    /// Makes the last chunk one that is not full.
    fn begin_chunk(&mut self, here: &Here<'_>) -> Result<(), ShareError> {
        if self.last.len() == self.chunk_len {
            self.full.reserve_one(here, usize::MAX)?;
            if let Some(chunk) = self.last.take() {
                self.full.push(here, chunk, usize::MAX)?;
            }
        }
        Ok(())
    }

    /// Appends values at this node. On an error those before it stay, and the others are dropped.
    pub fn extend(&mut self, here: &Here<'_>, values: impl IntoIterator<Item = T>) -> Result<(), ShareError> {
        values.into_iter().try_for_each(|value| self.push(here, value))
    }

    /// Appends copies of values at this node, many at a time. On an error those before it stay.
    pub fn extend_from_slice(&mut self, here: &Here<'_>, mut values: &[T]) -> Result<(), ShareError>
    where
        T: Copy,
    {
        while !values.is_empty() {
            self.begin_chunk(here)?;
            let (now, later) = values.split_at(values.len().min(self.chunk_len - self.last.len()));
            self.last.push_slice(here, now, self.chunk_len)?;
            values = later;
        }
        Ok(())
    }

    /// Borrows the value at a position, if there is one; its chunk is read as [`DBox::get`] does.
    pub fn get<'a>(&'a self, here: &'a Here<'_>, index: usize) -> Result<Option<&'a T>, ShareError> {
        let values = self.chunk_values(here, index / self.chunk_len)?;
        Ok(values.and_then(|values| values.get(index % self.chunk_len)))
    }

    /// Borrows the value at a position mutably, if there is one. Its chunk is at this node afterwards.
    /// Who changes many values of a chunk borrows that: [`DVec::chunks_mut`].
    pub fn get_mut<'a>(&'a mut self, here: &'a Here<'_>, index: usize) -> Result<Option<&'a mut T>, ShareError> {
        if index >= self.len() {
            return Ok(None);
        }
        let (chunk, index) = (index / self.chunk_len, index % self.chunk_len);
        let values = match chunk < self.full.len() {
            true => Mut::into_mut(self.full.get_mut(here)?[chunk].get_mut(here)?),
            false => self.last.get_mut(here)?,
        };
        Ok(values.get_mut(index))
    }

    /// Borrows the values of a chunk.
    fn chunk_values<'a>(&'a self, here: &'a Here<'_>, chunk: usize) -> Result<Option<&'a [T]>, ShareError> {
        if chunk < self.full.len() {
            return self.full.get(here)?[chunk].get(here).map(Some);
        }
        if chunk == self.full.len() { self.last.get(here).map(Some) } else { Ok(None) }
    }

    /// Returns the values in order. Each chunk is read when its first value is; the scope keeps copies of
    /// all of them, so a vector that is larger than near memory is read by [`DVec::chunks`]. After an
    /// error there is nothing more.
    pub fn iter<'a>(&'a self, here: &'a Here<'_>) -> DVecIter<'a, T> {
        DVecIter { vec: self, here, values: [].iter(), next_chunk: 0 }
    }

    /// Returns the owner of a chunk, to be read or lent, if there is such a chunk. The value at position `i` is in
    /// chunk `i / chunk_len`.
    pub fn chunk<'a>(&'a self, here: &'a Here<'_>, chunk: usize) -> Result<Option<&'a DBox<[T]>>, ShareError> {
        let full = self.full.get(here)?;
        Ok(full.get(chunk).or_else(|| self.last.owner().filter(|_| chunk == full.len())))
    }

    /// Returns the owners of the chunks in order, to be read or lent.
    pub fn chunks<'a>(
        &'a self,
        here: &'a Here<'_>,
    ) -> Result<impl Iterator<Item = &'a DBox<[T]>> + use<'a, T>, ShareError> {
        Ok(self.full.get(here)?.iter().chain(self.last.owner()))
    }

    /// Returns the chunks in order, to be changed or lent for writing. Their owners are at this node
    /// afterwards, and the chunks where they were.
    pub fn chunks_mut<'a>(
        &'a mut self,
        here: &'a Here<'_>,
    ) -> Result<impl Iterator<Item = ChunkMut<'a, T>> + use<'a, T>, ShareError> {
        let chunks = self.full.get_mut(here)?.iter_mut().chain(self.last.owner_mut());
        Ok(chunks.map(|chunk| ChunkMut { chunk }))
    }

    /// Takes the last value out. Its chunk is at this node afterwards.
    pub fn pop(&mut self, here: &Here<'_>) -> Result<Option<T>, ShareError> {
        if self.last.len() == 0 {
            self.last = GrowingSlice::of(self.full.pop(here)?);
        }
        self.last.pop(here)
    }

    /// Drops all but the first values: whole chunks where they are, values of the new last chunk here.
    /// On an error more of them may be left.
    pub fn truncate(&mut self, here: &Here<'_>, len: usize) -> Result<(), ShareError> {
        if len >= self.len() {
            return Ok(());
        }
        let (full, rest) = (len / self.chunk_len, len % self.chunk_len);
        if full < self.full.len() {
            self.last = GrowingSlice::new();
            self.full.truncate(here, full + 1)?;
            self.last = GrowingSlice::of(self.full.pop(here)?);
        }
        if rest > 0 {
            return self.last.truncate(here, rest);
        }
        self.last = GrowingSlice::new();
        Ok(())
    }

    /// Drops all values, where they are.
    pub fn clear(&mut self) {
        *self = DVec::with_chunk(self.chunk_len);
    }
}

/// Values of a [`DVec`], in order.
pub struct DVecIter<'a, T: Far> {
    vec: &'a DVec<T>,
    here: &'a Here<'a>,
    values: core::slice::Iter<'a, T>,
    next_chunk: usize,
}

impl<T: Far> core::fmt::Debug for DVecIter<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DVecIter(before chunk {})", self.next_chunk)
    }
}

impl<'a, T: Far> Iterator for DVecIter<'a, T> {
    type Item = Result<&'a T, ShareError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(value) = self.values.next() {
                return Some(Ok(value));
            }
            match self.vec.chunk_values(self.here, self.next_chunk) {
                Ok(values) => self.values = values?.iter(),
                Err(error) => {
                    self.next_chunk = usize::MAX;
                    return Some(Err(error));
                }
            }
            self.next_chunk += 1;
            // Who has read two chunks in a row reads the next one, too.
            if self.next_chunk > 1
                && let Some(next) = self.vec.full.get(self.here).ok().and_then(|full| full.get(self.next_chunk))
            {
                next.prefetch(self.here);
            }
        }
    }
}

/// Mutable borrow of the owner of a chunk of a [`DVec`]. The length of the chunk stays as it is.
pub struct ChunkMut<'a, T: Far> {
    chunk: &'a mut DBox<[T]>,
}

impl<T: Far> core::fmt::Debug for ChunkMut<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ChunkMut(at node {}, {} values)", self.home(), self.len())
    }
}

impl<T: Far> ChunkMut<'_, T> {
    /// Returns the node that keeps the chunk now.
    pub fn home(&self) -> NodeId {
        self.chunk.home()
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.chunk.len()
    }

    /// Returns whether there are no values: a chunk has some.
    pub fn is_empty(&self) -> bool {
        self.chunk.is_empty()
    }

    /// Borrows the values, as [`DBox::get`] does.
    pub fn get<'b>(&'b self, here: &'b Here<'_>) -> Result<&'b [T], ShareError> {
        self.chunk.get(here)
    }

    /// Borrows the values mutably, as [`DBox::get_mut`] does. The chunk is at this node afterwards.
    pub fn get_mut<'b>(&'b mut self, here: &'b Here<'_>) -> Result<Mut<'b, [T]>, ShareError> {
        self.chunk.get_mut(here)
    }
}

impl<T: Far> OwnerPlace<[T]> for ChunkMut<'_, T> {
    fn place(&self) -> (OwnerWord, usize) {
        self.chunk.place()
    }
}

impl<T: Far> Owner for ChunkMut<'_, T> {
    type Object = [T];
}

impl<T: Far> WordMut for ChunkMut<'_, T> {
    fn parts(&mut self) -> sealed::Parts {
        self.chunk.parts()
    }
}

impl<T: Far> OwnerMut for ChunkMut<'_, T> {}
