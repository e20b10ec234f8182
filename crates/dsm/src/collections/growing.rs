//! A slice in one block, at whose end values are appended.
//!
//! Who appends writes behind the values that are there, so nobody who has read those has read
//! anything else than what is there now: the owner's word stays, and word and length together name a
//! version. All other changes are mutable borrows, which change the word.
#![allow(unsafe_code, reason = "values are written behind the end of slices")]

use crate::{DBox, Far, FarGroup, Here, OwnedObject, Portable, ShareError};
use core::mem::size_of;
use farfield_core::dsm::BlockRights;

/// Values for which the first block has room.
const FIRST_CAPACITY: usize = 4;

/// Owner of a slice at whose end values are appended.
pub(super) struct GrowingSlice<T: Far> {
    slice: Option<DBox<[T]>>,
    /// Number of values for which the block has room. It may have more.
    capacity: usize,
}

// SAFETY: an owner and a number.
unsafe impl<T: Far> Portable for GrowingSlice<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for GrowingSlice<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.slice.visit_owned(visit);
    }
}
// SAFETY: as above.
unsafe impl<T: Far> Far for GrowingSlice<T> {}

impl<T: Far> GrowingSlice<T> {
    pub(super) const fn new() -> GrowingSlice<T> {
        GrowingSlice { slice: None, capacity: 0 }
    }

    /// Returns the owner of values that are there already.
    pub(super) fn of(slice: Option<DBox<[T]>>) -> GrowingSlice<T> {
        GrowingSlice { capacity: slice.as_ref().map_or(0, DBox::len), slice }
    }

    pub(super) fn len(&self) -> usize {
        self.slice.as_ref().map_or(0, DBox::len)
    }

    /// Returns the owner of the values, if there are any.
    pub(super) fn owner(&self) -> Option<&DBox<[T]>> {
        self.slice.as_ref().filter(|slice| !slice.is_empty())
    }

    /// Returns the owner of the values, which may be elsewhere when it is used no longer.
    pub(super) fn owner_mut(&mut self) -> Option<&mut DBox<[T]>> {
        self.capacity = self.len();
        self.slice.as_mut().filter(|slice| !slice.is_empty())
    }

    /// Gives the values away.
    pub(super) fn take(&mut self) -> Option<DBox<[T]>> {
        core::mem::replace(self, GrowingSlice::new()).slice
    }

    pub(super) fn get<'a>(&'a self, here: &'a Here<'_>) -> Result<&'a [T], ShareError> {
        self.slice.as_ref().map_or(Ok(&[]), |slice| slice.get(here))
    }

    pub(super) fn get_mut<'a>(&'a mut self, here: &'a Here<'_>) -> Result<&'a mut [T], ShareError> {
        let Some(slice) = &mut self.slice else { return Ok(&mut []) };
        let (word, values) = here.writing::<[T]>(slice.word, slice.extent, BlockRights::Owner)?;
        if !word.is_same_block(slice.word) {
            self.capacity = slice.extent;
        }
        slice.word = word;
        // SAFETY: as for `DBox::get_mut`.
        Ok(unsafe { &mut *values })
    }

    /// Makes room for more values behind the last one, at this node. A block is twice as large as the one
    /// before, but has room for `most` values at most, if that is enough.
    fn reserve(&mut self, here: &Here<'_>, more: usize, most: usize) -> Result<*mut T, ShareError> {
        let len = self.len();
        let needed = len + more;
        if let Some(slice) = &self.slice
            && needed <= self.capacity
            && let Some(address) = here.address(slice.word)
        {
            return Ok(address.cast::<T>().wrapping_add(len));
        }
        let capacity = (len * 2).max(FIRST_CAPACITY).min(most).max(needed);
        let room = capacity.saturating_mul(size_of::<T>());
        let (word, address) = match &self.slice {
            Some(slice) => here.node().bring(slice.word, len * size_of::<T>(), room, BlockRights::Owner)?,
            None => {
                let word = here.node().take(room as u64)?;
                (word, here.node().address_of(word))
            }
        };
        // The block before is free already, or will be: its values are here.
        if let Some(before) = self.slice.take() {
            before.into_word();
        }
        (self.slice, self.capacity) = (Some(DBox::of_word(word, len)), capacity);
        Ok(address.cast::<T>().wrapping_add(len))
    }

    /// Makes room for one more value.
    pub(super) fn reserve_one(&mut self, here: &Here<'_>, most: usize) -> Result<(), ShareError> {
        self.reserve(here, 1, most).map(drop)
    }

    /// Appends a value. On an error it is dropped.
    pub(super) fn push(&mut self, here: &Here<'_>, value: T, most: usize) -> Result<(), ShareError> {
        let end = self.reserve(here, 1, most)?;
        // SAFETY: room for a value, aligned, behind those that others may read.
        unsafe { end.write(value) };
        self.lengthen(1);
        Ok(())
    }

    /// Appends copies of values.
    pub(super) fn push_slice(&mut self, here: &Here<'_>, values: &[T], most: usize) -> Result<(), ShareError>
    where
        T: Copy,
    {
        let end = self.reserve(here, values.len(), most)?;
        // SAFETY: as for `push`, for so many values. They lie elsewhere: nobody borrows what is behind the
        // end.
        unsafe { core::ptr::copy_nonoverlapping(values.as_ptr(), end, values.len()) };
        self.lengthen(values.len());
        Ok(())
    }

    fn lengthen(&mut self, more: usize) {
        if let Some(slice) = &mut self.slice {
            slice.extent += more;
        }
    }

    /// Takes the last value out.
    pub(super) fn pop(&mut self, here: &Here<'_>) -> Result<Option<T>, ShareError> {
        let Some(last) = self.get_mut(here)?.last_mut() else { return Ok(None) };
        // SAFETY: the slice ends before it from now on.
        let value = unsafe { core::ptr::read(last) };
        if let Some(slice) = &mut self.slice {
            slice.extent -= 1;
        }
        Ok(Some(value))
    }

    /// Drops all but the first values, at this node.
    pub(super) fn truncate(&mut self, here: &Here<'_>, len: usize) -> Result<(), ShareError> {
        if len >= self.len() {
            return Ok(());
        }
        let gone = &raw mut self.get_mut(here)?[len..];
        // Whatever their destructors do, they are dropped once.
        if let Some(slice) = &mut self.slice {
            slice.extent = len;
        }
        // SAFETY: values of this slice, which ends before them now.
        unsafe { gone.drop_in_place() };
        Ok(())
    }
}
