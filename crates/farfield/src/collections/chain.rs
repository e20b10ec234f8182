//! A chain of chunks: the common part of lists, queues and stacks.
//!
//! Elements lie in far chunks of about a page. The links between chunks are in the table of the chain,
//! 24 bytes for each: those of a short chain in the chain itself, those of a longer one near (`table`).
//! So a walk knows the next chunks before it reaches them, in both directions, and fetches
//! them ahead. Links cost no far access.

mod parts;
mod table;

use crate::call::ChunkPlace;
use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, HeapInner, HeapRef, Panics, Scope, SlotCell, SlotWord, Teardown, drop_collection};
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use farfield_core::geometry::PAGE_BYTES;
use std::alloc::Layout;
use table::ChunkTable;

/// Elements in order, in chunks.
pub(super) struct Chain<T: Send + 'static> {
    chunks: ChunkTable,
    /// First of the chunks that are not used, linked by `next`.
    free: u32,
    first: u32,
    last: u32,
    len: usize,
    heap_ref: Option<HeapRef>,
    owns: PhantomData<T>,
}

/// A far chunk, whose elements are `start..start + len`.
pub(crate) struct ChainChunk {
    /// Nothing, if the chunk is not used.
    cell: SlotCell,
    start: u16,
    len: u16,
    previous: u32,
    next: u32,
}

const _: () = assert!(size_of::<ChainChunk>() == 24);

impl ChainChunk {
    /// Makes an entry without a chunk.
    const fn unused(next: u32) -> ChainChunk {
        ChainChunk { cell: SlotCell::nothing(), start: 0, len: 0, previous: NONE, next }
    }

    /// Returns where the chunk's elements are, and the number of the next chunk, if the chunk is used.
    pub(crate) fn place(&self) -> Option<(ChunkPlace, u32)> {
        let slot = self.cell.load()?;
        Some((ChunkPlace { slot, start: self.start, len: self.len }, self.next))
    }

    /// Returns the number of the chunk before this one.
    pub(crate) fn previous(&self) -> Option<usize> {
        (self.previous != NONE).then_some(self.previous as usize)
    }
}

const NONE: u32 = u32::MAX;

/// An element's position: its chunk, and its index there. The position behind the last element is
/// `NOWHERE`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Position {
    chunk: u32,
    index: usize,
}

/// The position behind the last element, which is also the one before the first.
pub(super) const NOWHERE: Position = Position { chunk: NONE, index: 0 };

impl Position {
    /// Checks whether this is an element of another chunk than `other`.
    #[inline]
    pub(super) fn is_in_other_chunk(self, other: Position) -> bool {
        self.chunk != other.chunk && self.chunk != NONE
    }
}

/// An end of the chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChainEnd {
    Front,
    Back,
}

impl ChainEnd {
    fn opposite(self) -> ChainEnd {
        if self == ChainEnd::Front { ChainEnd::Back } else { ChainEnd::Front }
    }
}

impl<T: Send + 'static> Chain<T> {
    /// Elements in a chunk.
    pub(super) const PER_CHUNK: usize = {
        assert!(align_of::<T>() <= PAGE_BYTES, "far values cannot be aligned to more than a page");
        let fit = if size_of::<T>() == 0 { 512 } else { PAGE_BYTES / size_of::<T>() };
        if fit == 0 { 1 } else { fit }
    };

    pub(super) const fn new() -> Chain<T> {
        Chain {
            chunks: ChunkTable::new(),
            free: NONE,
            first: NONE,
            last: NONE,
            len: 0,
            heap_ref: None,
            owns: PhantomData,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the heap of the chain, if it has one.
    #[cfg(feature = "serde")]
    pub(super) fn heap_ref(&self) -> Option<&HeapRef> {
        self.heap_ref.as_ref()
    }

    fn chunk(&self, chunk: u32) -> &ChainChunk {
        &self.chunks.entries()[chunk as usize]
    }

    fn chunk_mut(&mut self, chunk: u32) -> &mut ChainChunk {
        &mut self.chunks.entries_mut()[chunk as usize]
    }

    /// Returns the chunk beside this one, on the side of `end`. For `NONE`, returns the chunk at
    /// the other end.
    fn beside(&self, chunk: u32, end: ChainEnd) -> u32 {
        match (end, chunk) {
            (ChainEnd::Front, NONE) => self.last,
            (ChainEnd::Back, NONE) => self.first,
            (ChainEnd::Front, _) => self.chunk(chunk).previous,
            (ChainEnd::Back, _) => self.chunk(chunk).next,
        }
    }

    /// Returns the position of the first or the last element.
    pub(super) fn end(&self, end: ChainEnd) -> Position {
        self.step(NOWHERE, end.opposite())
    }

    /// Returns the position beside this one, towards that end. Behind the end follows `NOWHERE`,
    /// and behind that the other end.
    #[inline]
    pub(super) fn step(&self, at: Position, towards: ChainEnd) -> Position {
        if at.chunk != NONE {
            let within = match towards {
                ChainEnd::Front => at.index.checked_sub(1),
                ChainEnd::Back => Some(at.index + 1).filter(|index| *index < usize::from(self.chunk(at.chunk).len)),
            };
            if let Some(index) = within {
                return Position { chunk: at.chunk, index };
            }
        }
        let chunk = self.beside(at.chunk, towards);
        // Only the chunk of an empty chain is empty.
        match towards {
            _ if chunk == NONE || self.len == 0 => NOWHERE,
            ChainEnd::Front => Position { chunk, index: usize::from(self.chunk(chunk).len) - 1 },
            ChainEnd::Back => Position { chunk, index: 0 },
        }
    }

    /// Returns the address of the first element of a chunk, which is valid as long as the scope
    /// lasts.
    fn elements(&self, scope: &Scope<'_>, chunk: u32, mode: AccessMode) -> Result<*mut T, FarError> {
        let chunk = self.chunk(chunk);
        let Some(slot) = chunk.cell.load() else { unreachable!("a chunk in the chain exists") };
        let address = chunk.cell.address(scope, slot, mode)?.cast::<T>();
        // SAFETY: a chunk has room for so many.
        Ok(unsafe { address.add(usize::from(chunk.start)) })
    }

    /// Returns the address of an element, which is valid as long as the scope lasts and the chain
    /// is not changed.
    #[inline]
    pub(super) fn address(
        &self,
        scope: &Scope<'_>,
        at: Position,
        mode: AccessMode,
    ) -> Result<Option<*mut T>, FarError> {
        if at.chunk == NONE {
            return Ok(None);
        }
        let address = scope.with_room(|| self.elements(scope, at.chunk, mode))?;
        scope.mark_used();
        assert!(at.index < usize::from(self.chunk(at.chunk).len));
        // SAFETY: the element exists.
        Ok(Some(unsafe { address.add(at.index) }))
    }

    /// Returns the element at a position, if there is one.
    #[inline]
    pub(super) fn get<'a>(&'a self, scope: &'a Scope<'_>, at: Position) -> Result<Option<&'a T>, FarError> {
        let address = self.address(scope, at, AccessMode::Read)?;
        // SAFETY:
        // - initialised: the element exists;
        // - alive: its chunk became near after the scope began, so it keeps its frame until the
        //   scope ends, and `'a` ends before that; it also ends before the chain is changed, which
        //   takes `&mut self`;
        // - shared: a writer has `&mut self`, or writes through interior mutability, which `T`
        //   allows.
        Ok(address.map(|address| unsafe { &*address }))
    }

    /// Returns the element at a position, to be changed, if there is one.
    pub(super) fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>, at: Position) -> Result<Option<&'a mut T>, FarError> {
        let address = self.address(scope, at, AccessMode::Write)?;
        // SAFETY: as in `get`, and `&mut self` makes it exclusive.
        Ok(address.map(|address| unsafe { &mut *address }))
    }

    /// Returns the address of the first element of the chunk at this position, and the number of
    /// its elements.
    pub(super) fn chunk_at(
        &self,
        scope: &Scope<'_>,
        at: Position,
        mode: AccessMode,
    ) -> Result<Option<(*mut T, usize)>, FarError> {
        let first = self.address(scope, Position { index: 0, ..at }, mode)?;
        Ok(first.map(|address| (address, usize::from(self.chunk(at.chunk).len))))
    }

    /// Returns the nearest position in the next chunk, towards that end.
    pub(super) fn next_chunk(&self, at: Position, towards: ChainEnd) -> Position {
        let index = match towards {
            _ if at.chunk == NONE => 0,
            ChainEnd::Front => 0,
            ChainEnd::Back => usize::from(self.chunk(at.chunk).len),
        };
        self.step(Position { index, ..at }, towards)
    }

    /// Begins to bring the chunk of this position near.
    pub(super) fn prefetch(&self, scope: &Scope<'_>, at: Position) {
        if at.chunk != NONE
            && let Some(slot) = self.chunk(at.chunk).cell.load()
        {
            scope.core.prefetch(scope.record, [slot.parts(scope.core).0]);
        }
    }

    /// Adds an empty chunk before this one, or at the end if it is `NONE`, to be filled from
    /// `start`. Returns its number and the address of its first place. The caller fills it.
    fn add_chunk(&mut self, scope: &Scope<'_>, before: u32, start: usize) -> Result<(u32, *mut T), FarError> {
        self.reserve(scope)?;
        let layout = Layout::array::<T>(Self::PER_CHUNK).map_err(|_| FarError::TooLarge { bytes: u64::MAX })?;
        let (slot, address) = SlotWord::make(scope, layout)?;
        let previous = if before == NONE { self.last } else { self.chunk(before).previous };
        let cell = SlotCell::new(slot);
        let number = self.link(ChainChunk { cell, start: start as u16, len: 0, previous, next: before });
        Ok((number, address.cast()))
    }

    /// Links a chunk in between its `previous` and `next`, and returns its number. There must be
    /// near room for it.
    fn link(&mut self, added: ChainChunk) -> u32 {
        let (previous, next) = (added.previous, added.next);
        let number = self.free;
        let number = if number == NONE {
            self.chunks.push(added);
            self.chunks.len() as u32 - 1
        } else {
            self.free = self.chunk(number).next;
            *self.chunk_mut(number) = added;
            number
        };
        *self.link_to(previous, ChainEnd::Back) = number;
        *self.link_to(next, ChainEnd::Front) = number;
        number
    }

    /// Takes a chunk out, with its elements.
    fn unlink(&mut self, number: u32) -> ChainChunk {
        let unused = ChainChunk::unused(self.free);
        let chunk = core::mem::replace(self.chunk_mut(number), unused);
        self.free = number;
        *self.link_to(chunk.previous, ChainEnd::Back) = chunk.next;
        *self.link_to(chunk.next, ChainEnd::Front) = chunk.previous;
        chunk
    }

    /// Returns the link to the neighbour of a chunk on that side, or for `NONE` the link to the
    /// chunk at the other end.
    fn link_to(&mut self, chunk: u32, side: ChainEnd) -> &mut u32 {
        match (side, chunk) {
            (ChainEnd::Back, NONE) => &mut self.first,
            (ChainEnd::Front, NONE) => &mut self.last,
            (ChainEnd::Back, _) => &mut self.chunk_mut(chunk).next,
            (ChainEnd::Front, _) => &mut self.chunk_mut(chunk).previous,
        }
    }

    /// Makes near room for one more chunk.
    fn reserve(&mut self, scope: &Scope<'_>) -> Result<(), FarError> {
        match &self.heap_ref {
            Some(heap_ref) => heap_ref.check(scope)?,
            None => self.heap_ref = Some(HeapRef::of(scope)),
        }
        let more = self.chunks.growth();
        if self.free == NONE && more > 0 {
            if self.chunks.capacity_beside() + more >= NONE as usize {
                return Err(FarError::FarFull);
            }
            let bytes = (more * size_of::<ChainChunk>()) as u64;
            scope.core.charge(bytes)?;
            if !self.chunks.grow(more) {
                scope.core.uncharge(bytes);
                return Err(FarError::TablesFull { bytes });
            }
        }
        Ok(())
    }

    /// Takes an empty chunk out and frees it.
    fn remove_chunk(&mut self, core: &HeapInner, number: u32) {
        let chunk = self.unlink(number);
        assert_eq!(chunk.len, 0, "only empty chunks go");
        if let Some(slot) = chunk.cell.load() {
            // SAFETY: ours, and without elements. Our `heap_ref` keeps the heap.
            unsafe { slot.free(core) };
        }
    }

    /// Adds a value at an end.
    pub(super) fn push(&mut self, scope: &Scope<'_>, end: ChainEnd, value: T) -> Result<(), AllocError<T>> {
        let _brief = scope.begin_transient();
        match scope.with_room(|| self.room_at(scope, end)) {
            Ok((chunk, address)) => {
                let chunk = self.chunk_mut(chunk);
                chunk.len += 1;
                chunk.start -= u16::from(end == ChainEnd::Front);
                self.len += 1;
                // SAFETY: a free place in the chunk beside its elements.
                unsafe { address.write(value) };
                Ok(())
            }
            Err(error) => Err(AllocError { error, value }),
        }
    }

    /// Returns a chunk with a free place at that end of its elements, and the address of the place.
    fn room_at(&mut self, scope: &Scope<'_>, end: ChainEnd) -> Result<(u32, *mut T), FarError> {
        if let Some(heap_ref) = &self.heap_ref {
            heap_ref.check(scope)?;
        }
        let chunk = if end == ChainEnd::Front { self.first } else { self.last };
        if chunk != NONE {
            if self.len == 0 {
                // The last one, empty: it can be filled from either end.
                self.chunk_mut(chunk).start = if end == ChainEnd::Front { Self::PER_CHUNK as u16 } else { 0 };
            }
            let ChainChunk { start, len, .. } = *self.chunk(chunk);
            let (start, len) = (usize::from(start), usize::from(len));
            if if end == ChainEnd::Front { start > 0 } else { start + len < Self::PER_CHUNK } {
                let elements = self.elements(scope, chunk, AccessMode::Write)?;
                // SAFETY: inside the chunk, as was just compared.
                let address = unsafe { if end == ChainEnd::Front { elements.sub(1) } else { elements.add(len) } };
                return Ok((chunk, address));
            }
        }
        if end == ChainEnd::Back {
            return self.add_chunk(scope, NONE, 0);
        }
        let (chunk, address) = self.add_chunk(scope, self.first, Self::PER_CHUNK)?;
        // SAFETY: the chunk's last place.
        Ok((chunk, unsafe { address.add(Self::PER_CHUNK - 1) }))
    }

    /// Takes the element at an end out, if there is one.
    pub(super) fn pop(&mut self, scope: &Scope<'_>, end: ChainEnd) -> Result<Option<T>, FarError> {
        Ok(self.remove(scope, self.end(end))?.map(|(value, _)| value))
    }

    /// Takes the element at an end out, and fetches chunks ahead: for a caller that takes one after
    /// the other.
    pub(super) fn pop_ahead(&mut self, scope: &Scope<'_>, end: ChainEnd) -> Result<Option<T>, FarError> {
        let at = self.end(end);
        let removed = self.remove(scope, at)?;
        let next = self.end(end);
        if next.is_in_other_chunk(at) {
            self.prefetch(scope, self.next_chunk(next, end.opposite()));
        }
        Ok(removed.map(|(value, _)| value))
    }

    /// Takes the element at this position out. Returns the position of the next one, too.
    pub(super) fn remove(&mut self, scope: &Scope<'_>, at: Position) -> Result<Option<(T, Position)>, FarError> {
        if at.chunk == NONE {
            return Ok(None);
        }
        let _brief = scope.begin_transient();
        let elements = scope.with_room(|| self.elements(scope, at.chunk, AccessMode::Write))?;
        let chunk = self.chunk_mut(at.chunk);
        let len = usize::from(chunk.len);
        assert!(at.index < len);
        // SAFETY: the element exists, and is gone afterwards: those behind it move up, or the first place is free.
        let value = unsafe {
            let value = elements.add(at.index).read();
            if at.index > 0 {
                elements.add(at.index).copy_from(elements.add(at.index + 1), len - at.index - 1);
            }
            value
        };
        chunk.start += u16::from(at.index == 0);
        chunk.len -= 1;
        self.len -= 1;
        let chunk = self.chunk(at.chunk);
        let len = usize::from(chunk.len);
        let mut next = if at.index < len { at } else { self.next_chunk(at, ChainEnd::Back) };
        if len == 0 {
            // The last chunk is kept for the next element.
            if self.first != self.last {
                self.remove_chunk(scope.core, at.chunk);
            }
        } else if len * 4 <= Self::PER_CHUNK {
            for number in [chunk.previous, at.chunk] {
                if number != NONE && self.chunk(number).next != NONE {
                    let (gone, end) = (self.chunk(number).next, usize::from(self.chunk(number).len));
                    if self.merge(scope, number) {
                        if next.chunk == gone {
                            next = Position { chunk: number, index: end + next.index };
                        }
                        break;
                    }
                }
            }
        }
        Ok(Some((value, next)))
    }

    /// Moves the elements of the next chunk into this one, if both are near and a quarter stays
    /// free. Returns whether it did.
    fn merge(&mut self, scope: &Scope<'_>, number: u32) -> bool {
        let ChainChunk { start, len, next, .. } = *self.chunk(number);
        let (start, len, more) = (usize::from(start), usize::from(len), usize::from(self.chunk(next).len));
        if (len + more) * 4 > Self::PER_CHUNK * 3 {
            return false;
        }
        let near = |number| self.chunk(number).cell.load().and_then(|slot| slot.address_now(scope));
        let (Some(_), Some(source)) = (near(number), near(next)) else { return false };
        let Ok(elements) = self.elements(scope, number, AccessMode::Write) else { return false };
        // SAFETY: the chunk has room for all of them from its first place on; the next one's are its own from now on.
        unsafe {
            let target = elements.sub(start);
            target.copy_from(elements, len);
            let source = source.cast::<T>().add(usize::from(self.chunk(next).start));
            target.add(len).copy_from_nonoverlapping(source, more);
        }
        let chunk = self.chunk_mut(number);
        (chunk.start, chunk.len) = (0, (len + more) as u16);
        self.chunk_mut(next).len = 0;
        self.remove_chunk(scope.core, next);
        true
    }

    /// Inserts a value before this position, or at the end if it is `NOWHERE`. Returns its
    /// position.
    pub(super) fn insert(&mut self, scope: &Scope<'_>, at: Position, value: T) -> Result<Position, AllocError<T>> {
        if at.chunk == NONE || at == self.end(ChainEnd::Front) {
            let end = if at.chunk == NONE { ChainEnd::Back } else { ChainEnd::Front };
            return self.push(scope, end, value).map(|()| self.end(end));
        }
        let _brief = scope.begin_transient();
        match scope.with_room(|| self.room_inside(scope, at)) {
            Ok((at, address)) => {
                // SAFETY: a free place among the elements of a chunk.
                unsafe { address.write(value) };
                self.chunk_mut(at.chunk).len += 1;
                self.len += 1;
                Ok(at)
            }
            Err(error) => Err(AllocError { error, value }),
        }
    }

    /// Makes a free place before this position. Returns its position and address. The chunk's
    /// length does not count it yet.
    fn room_inside(&mut self, scope: &Scope<'_>, at: Position) -> Result<(Position, *mut T), FarError> {
        if let Some(heap_ref) = &self.heap_ref {
            heap_ref.check(scope)?;
        }
        let elements = self.elements(scope, at.chunk, AccessMode::Write)?;
        let ChainChunk { start, len, .. } = *self.chunk(at.chunk);
        let (start, len) = (usize::from(start), usize::from(len));
        if start + len < Self::PER_CHUNK {
            // SAFETY: one place is free behind the elements.
            unsafe {
                let address = elements.add(at.index);
                address.add(1).copy_from(address, len - at.index);
                return Ok((at, address));
            }
        }
        if start > 0 {
            self.chunk_mut(at.chunk).start -= 1;
            // SAFETY: one place is free before the elements.
            unsafe {
                elements.sub(1).copy_from(elements, at.index);
                return Ok((at, elements.add(at.index).sub(1)));
            }
        }
        // The chunk is full: the elements before the place move to a new chunk, and the value goes
        // to its end.
        let (added, target) = self.part(scope, at, elements)?;
        // SAFETY: a place in a chunk is below its length, so this is inside the new one.
        Ok((Position { chunk: added, index: at.index }, unsafe { target.add(at.index) }))
    }

    /// Moves the elements before a position in its chunk, which is near, to a chunk of their own.
    /// Returns that chunk, and the address of its elements.
    fn part(&mut self, scope: &Scope<'_>, at: Position, elements: *mut T) -> Result<(u32, *mut T), FarError> {
        let (added, target) = self.add_chunk(scope, at.chunk, 0)?;
        // SAFETY: so many elements begin there, and the new chunk is empty; they are that one's from now on.
        unsafe { target.copy_from_nonoverlapping(elements, at.index) };
        let chunk = self.chunk_mut(at.chunk);
        chunk.start += at.index as u16;
        chunk.len -= at.index as u16;
        self.chunk_mut(added).len = at.index as u16;
        Ok((added, target))
    }
}

impl<T: Send + 'static> Drop for Chain<T> {
    fn drop(&mut self) {
        let Some(heap_ref) = &self.heap_ref else { return };
        let core: *const HeapInner = heap_ref.core();
        let teardown = ChainTeardown(ManuallyDrop::new(core::mem::replace(self, Chain::new())));
        // SAFETY: its `heap_ref` keeps the heap.
        unsafe { drop_collection(core, Box::new(teardown)) };
    }
}

/// A dropped chain, whose chunks are not freed yet.
struct ChainTeardown<T: Send + 'static>(ManuallyDrop<Chain<T>>);

impl<T: Send + 'static> Teardown for ChainTeardown<T> {
    fn tear_down(&mut self, finally: bool, panics: &mut Panics) -> bool {
        let chain = &mut *self.0;
        let Some(heap_ref) = chain.heap_ref.take() else { return true };
        let core = heap_ref.core();
        let mut taken: Vec<T> = Vec::with_capacity(Chain::<T>::PER_CHUNK.min(chain.len));
        while chain.first != NONE {
            let number = chain.first;
            let chunk = chain.chunk_mut(number);
            let (start, len) = (usize::from(chunk.start), usize::from(chunk.len));
            if core::mem::needs_drop::<T>() && len > 0 {
                let Some(slot) = chunk.cell.load() else { unreachable!("a chunk in the chain exists") };
                let target = taken.as_mut_ptr();
                // Out of the heap first: destructors must not run in a scope that holds our chunk.
                let copied = core.with_object(slot, |address| {
                    // SAFETY: elements `start..start + len` are there; `taken` is empty and has room for them.
                    unsafe { target.copy_from_nonoverlapping(address.cast::<T>().add(start), len) };
                });
                match copied {
                    Err(error) if !finally && !core.is_lost(error) => {
                        chain.heap_ref = Some(heap_ref);
                        return false;
                    }
                    Err(_) => core.lose_values(len),
                    // SAFETY: just filled, and from here on `taken` owns them.
                    Ok(()) => unsafe { taken.set_len(len) },
                }
            }
            chunk.len = 0;
            chain.len -= len;
            chain.remove_chunk(core, number);
            panics.catch(|| taken.clear());
        }
        core.uncharge((chain.chunks.capacity_beside() * size_of::<ChainChunk>()) as u64);
        chain.chunks = ChunkTable::new();
        true
    }
}
