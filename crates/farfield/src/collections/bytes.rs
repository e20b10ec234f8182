//! `FarBytes`: bytes in one piece.

use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope, SlotCell, SlotWord, StreamingHint, drop_and_free};
use core::mem::take;
use core::ops::Range;
use std::alloc::Layout;

/// A `Vec<u8>` whose bytes are near or far, and always in one piece: they are fetched and evicted
/// together, and a reference is to all of them. For many bytes of which a part is used at a time,
/// [`FarVec<u8>`](super::FarVec) is better. To grow, the old and the new piece are near at once,
/// and must not exceed half of the near memory together.
///
/// ```
/// use farfield::{FarBytes, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let scope = heap.enter();
/// let mut bytes = FarBytes::copy_of(&scope, b"far ")?;
/// bytes.extend_from_slice(&scope, b"away")?;
/// assert_eq!(bytes.get(&scope)?, b"far away");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Near memory: 24 bytes. Without bytes it owns no far memory.
pub struct FarBytes {
    /// The far object with the bytes; nothing, if `room` is 0.
    pub(super) cell: SlotCell,
    pub(super) len: usize,
    /// Size of the object in bytes.
    room: usize,
}

impl FarBytes {
    /// Makes an empty one, which owns no far memory.
    pub const fn new() -> FarBytes {
        FarBytes { cell: SlotCell::nothing(), len: 0, room: 0 }
    }

    /// Copies these bytes into far memory.
    pub fn copy_of(scope: &Scope<'_>, bytes: &[u8]) -> Result<FarBytes, FarError> {
        let mut copy = FarBytes::new();
        copy.extend_from_slice(scope, bytes)?;
        Ok(copy)
    }

    /// Opens a scope of the heap of the bytes, if there are any.
    #[cfg(feature = "serde")]
    pub(super) fn enter(&self) -> Option<Scope<'_>> {
        self.place().map(|(core, _)| Scope::new(core))
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the bytes, which is valid as long as the scope lasts.
    fn address(&self, scope: &Scope<'_>, slot: SlotWord, mode: AccessMode) -> Result<*mut u8, FarError> {
        let address = scope.with_room(|| self.cell.address(scope, slot, mode))?;
        scope.mark_used();
        Ok(address)
    }

    /// Returns the bytes, and brings them near if they are far.
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&[]) };
        let address = self.address(scope, slot, AccessMode::Read)?;
        // SAFETY: the first `len` bytes of the object are initialised; it became near after the
        // scope began and stays until it ends; the slice borrows the scope and `self`, so that
        // nobody changes or frees them.
        Ok(unsafe { core::slice::from_raw_parts(address, self.len) })
    }

    /// Returns the bytes like [`FarBytes::get`], for a task: other tasks run while they are
    /// fetched.
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        scope.retry(|| self.get(scope)).await
    }

    /// Returns the bytes like [`FarBytes::get`], with the hint that they will not be used again
    /// soon. If they have to be brought near, they are evicted first.
    pub fn get_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&[]) };
        scope.run_streaming(|hint| {
            slot.note(hint, scope);
            self.get(scope)
        })
    }

    /// Returns the bytes like [`FarBytes::get_once`], for a task: other tasks run while they are
    /// fetched.
    pub async fn fetch_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&[]) };
        let look = async |hint: &StreamingHint| {
            slot.note(hint, scope);
            self.fetch(scope).await
        };
        scope.fetch_streaming(look).await
    }

    /// Begins to bring the bytes near, and does not wait: see [`Heap::prefetch`](crate::Heap::prefetch).
    pub fn prefetch(&self) {
        if let Some((core, slot)) = self.place() {
            core.prefetch(core.record(), [slot.parts(core).0]);
        }
    }

    /// Marks the bytes as not needed soon: they are evicted before others.
    pub fn cold(&self) {
        if let Some((core, slot)) = self.place() {
            slot.mark_cold(core);
        }
    }

    /// Returns the heap and the slot of the bytes, if there are any.
    fn place(&self) -> Option<(&HeapInner, SlotWord)> {
        // SAFETY: our object keeps the heap.
        self.cell.load().map(|slot| (unsafe { &*slot.heap() }, slot))
    }

    /// Returns the bytes, to be changed.
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<&'a mut [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&mut []) };
        let address = self.address(scope, slot, AccessMode::Write)?;
        // SAFETY: as in `get`, and `&mut self` makes it exclusive.
        Ok(unsafe { core::slice::from_raw_parts_mut(address, self.len) })
    }

    /// Calls `look` with the bytes. The scope keeps nothing for it afterwards.
    pub(super) fn read<R>(&self, scope: &Scope<'_>, look: impl FnOnce(&[u8]) -> R) -> Result<R, FarError> {
        let Some(slot) = self.cell.load() else { return Ok(look(&[])) };
        let _brief = scope.begin_transient();
        let address = scope.with_room(|| self.cell.address(scope, slot, AccessMode::Read))?;
        // SAFETY: as in `get`; nothing in `look` renews the scope.
        Ok(look(unsafe { core::slice::from_raw_parts(address, self.len) }))
    }

    /// Calls `change` with the bytes, if there are any. The scope keeps nothing for it afterwards.
    fn change(&mut self, scope: &Scope<'_>, change: impl FnOnce(&mut [u8])) -> Result<(), FarError> {
        if let Some(slot) = self.cell.load() {
            let _brief = scope.begin_transient();
            let address = scope.with_room(|| self.cell.address(scope, slot, AccessMode::Write))?;
            // SAFETY: as in `read`, and `&mut self` makes it exclusive.
            change(unsafe { core::slice::from_raw_parts_mut(address, self.len) });
        }
        Ok(())
    }

    /// Appends bytes at the end.
    pub fn extend_from_slice(&mut self, scope: &Scope<'_>, bytes: &[u8]) -> Result<(), FarError> {
        let len = self.len.checked_add(bytes.len()).ok_or(FarError::TooLarge { bytes: u64::MAX })?;
        let _brief = scope.begin_transient();
        let target = match self.cell.load() {
            _ if len > self.room => self.grow(scope, len)?,
            Some(slot) => scope.with_room(|| self.cell.address(scope, slot, AccessMode::Write))?,
            None => return Ok(()),
        };
        // SAFETY: `len` bytes fit into the object, which is near, dirty and ours alone; `bytes` may
        // be far bytes too, but not ours.
        unsafe { target.add(self.len).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.len = len;
        Ok(())
    }

    /// Appends a byte at the end.
    pub fn push(&mut self, scope: &Scope<'_>, byte: u8) -> Result<(), FarError> {
        self.extend_from_slice(scope, &[byte])
    }

    /// Takes the last byte off, if there is one.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<u8>, FarError> {
        let last = self.read(scope, |bytes| bytes.last().copied())?;
        self.truncate(self.len.saturating_sub(1));
        Ok(last)
    }

    /// Inserts bytes before the one with this index; those from there on move.
    ///
    /// # Panics
    /// If the index is beyond the end.
    pub(super) fn insert_slice(&mut self, scope: &Scope<'_>, index: usize, bytes: &[u8]) -> Result<(), FarError> {
        let len = self.len;
        self.extend_from_slice(scope, bytes)?;
        let moved = self.change(scope, |all| all[index..].rotate_right(bytes.len()));
        if moved.is_err() {
            self.len = len;
        }
        moved
    }

    /// Removes a range of bytes; those behind it move.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub(super) fn cut(&mut self, scope: &Scope<'_>, range: Range<usize>) -> Result<(), FarError> {
        let (start, count) = (range.start, range.len());
        self.change(scope, |all| all.copy_within(range.end.., start))?;
        self.truncate(self.len - count);
        Ok(())
    }

    /// Moves into an object with room for `len` bytes, or for twice as many as now. Returns its
    /// address.
    fn grow(&mut self, scope: &Scope<'_>, len: usize) -> Result<*mut u8, FarError> {
        match self.move_into(scope, len.max(self.room.saturating_mul(2))) {
            Err(FarError::TooLarge { .. }) => self.move_into(scope, len),
            other => other,
        }
    }

    fn move_into(&mut self, scope: &Scope<'_>, room: usize) -> Result<*mut u8, FarError> {
        let both = self.room as u64 + room as u64;
        let layout = Layout::from_size_align(room, 1).ok().filter(|_| both <= scope.core.frames.bytes() / 2);
        let layout = layout.ok_or(FarError::TooLarge { bytes: both })?;
        let old = self.cell.load();
        let (new, target) = scope.with_room(|| {
            let Some(old) = old else { return SlotWord::make(scope, layout) };
            // Nothing here renews the scope, so the old bytes are still there when the new object is made.
            let source = self.cell.address(scope, old, AccessMode::Read)?;
            // SAFETY: `len` initialised bytes, into an object with more room.
            let copy = |target: *mut u8| unsafe { target.copy_from_nonoverlapping(source, self.len) };
            // SAFETY: the object is ours, and `&mut self` keeps others from it; it is near, as we have just seen.
            if let Some(moved) = unsafe { old.moved(scope, layout, copy) }? {
                return Ok(moved);
            }
            let (new, target) = SlotWord::make(scope, layout)?;
            copy(target);
            Ok((new, target))
        })?;
        self.cell.store(new.word());
        self.room = new.room(scope.core, layout);
        new.mark(scope);
        if let Some(old) = old
            && !new.is(old, scope.core)
        {
            // SAFETY: ours, and named by nobody any more; the new object keeps the heap.
            unsafe { old.free(scope.core) };
        }
        Ok(target)
    }

    /// Shortens to the first `len` bytes, if there are more. Without bytes left, the far memory is
    /// given back.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        if self.len == 0 {
            drop(take(self));
        }
    }

    /// Removes all bytes, and gives their far memory back.
    pub fn clear(&mut self) {
        self.truncate(0);
    }
}

impl Default for FarBytes {
    fn default() -> FarBytes {
        FarBytes::new()
    }
}

impl Drop for FarBytes {
    fn drop(&mut self) {
        let Some(slot) = self.cell.load() else { return };
        let core = slot.heap();
        // SAFETY: our object keeps the heap.
        let (page, card) = slot.parts(unsafe { &*core });
        // SAFETY: the object is ours, and nobody uses it any more. Without a destructor nothing can fail.
        let freed = unsafe { drop_and_free(core, page, card, None::<fn(*mut u8)>) };
        debug_assert_eq!(freed, Ok(()));
    }
}

impl core::fmt::Debug for FarBytes {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarBytes(len {})", self.len)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against bytes that are lost when their object moves, room that nobody uses, and
    //! handles that are given up for nothing.
    use super::*;
    use crate::{Heap, Plane};

    #[test]
    fn growing_bytes_use_all_of_their_object_and_keep_their_handle() {
        for (plane, rooms) in [
            (Plane::Page, [96, 192, 400, 816, 2048, 4096]),
            (Plane::Object, [96, 192, 400, 800, 2048, 4096]),
            (Plane::Hybrid, [96, 192, 400, 800, 2048, 4096]),
        ] {
            let heap = Heap::builder().near(4 << 20).near_max(4 << 20).plane(plane).build().unwrap();
            let scope = heap.enter();
            let mut bytes = FarBytes::copy_of(&scope, &[0; 96]).unwrap();
            let number = |bytes: &FarBytes| bytes.cell.load().unwrap().parts(heap.core()).0;
            let first = number(&bytes);
            for (step, room) in rooms.into_iter().enumerate() {
                assert_eq!(bytes.room, room, "{plane:?}");
                if step < 4 && plane != Plane::Page {
                    assert!(number(&bytes) == first && first >= heap.core().pages, "{plane:?}, {room} bytes");
                }
                while bytes.len() <= room {
                    bytes.push(&scope, bytes.len() as u8).unwrap();
                }
            }
            let is_right = |(index, byte): (usize, &u8)| index < 96 || *byte == index as u8;
            assert!(bytes.get(&scope).unwrap().iter().enumerate().all(is_right));
            drop((bytes, scope));
            heap.verify();
        }
    }

    #[test]
    fn bytes_that_grow_while_others_leave_stay_what_they_are() {
        for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
            let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(64 << 20).plane(plane).build().unwrap();
            let mut all: Vec<FarBytes> = (0..700).map(|_| FarBytes::new()).collect();
            for round in 0..60 {
                for (at, bytes) in all.iter_mut().enumerate() {
                    let more = [(at + round) as u8; 61];
                    bytes.extend_from_slice(&heap.enter(), &more[..1 + (at * 7 + round * 13) % 61]).unwrap();
                }
            }
            for (at, bytes) in all.iter().enumerate() {
                let expected: Vec<u8> =
                    (0..60).flat_map(|round| vec![(at + round) as u8; 1 + (at * 7 + round * 13) % 61]).collect();
                assert_eq!(bytes.get(&heap.enter()).unwrap(), expected, "list {at} on {plane:?}");
            }
            heap.verify();
            drop(all);
            heap.verify();
        }
    }
}
