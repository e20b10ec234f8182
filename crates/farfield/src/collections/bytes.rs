//! `FarBytes`: bytes in one piece.

use crate::error::FarError;
use crate::heap::{Core, Once, Scope, Slot, SlotCell, Want, dropped_in_place};
use core::mem::take;
use core::ops::Range;
use std::alloc::Layout;

/// A `Vec<u8>` whose bytes are near or far, and always in one piece: they come and go together, and a reference is to all of them. For many
/// bytes of which a part is used at a time, [`FarVec<u8>`](super::FarVec) is better. Growing them takes what they
/// were and what they become near at once, at most half of the near memory.
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
/// 24 bytes; without bytes it owns no far memory.
pub struct FarBytes {
    /// Nothing, if there is no room.
    cell: SlotCell,
    len: usize,
    /// Bytes of the object.
    room: usize,
}

impl FarBytes {
    /// None.
    pub const fn new() -> FarBytes {
        FarBytes { cell: SlotCell::nothing(), len: 0, room: 0 }
    }

    /// A copy of these.
    pub fn copy_of(scope: &Scope<'_>, bytes: &[u8]) -> Result<FarBytes, FarError> {
        let mut copy = FarBytes::new();
        copy.extend_from_slice(scope, bytes)?;
        Ok(copy)
    }

    /// A scope of their heap, if there are any.
    #[cfg(feature = "serde")]
    pub(super) fn enter(&self) -> Option<Scope<'_>> {
        self.place().map(|(core, _)| Scope::new(core))
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes are, as long as the scope lasts.
    fn address(&self, scope: &Scope<'_>, slot: Slot, want: Want) -> Result<*mut u8, FarError> {
        let address = scope.with_room(|| self.cell.address(scope, slot, want))?;
        scope.mark_used();
        Ok(address)
    }

    /// The bytes.
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&[]) };
        let address = self.address(scope, slot, Want::Read)?;
        // SAFETY: the first `len` bytes of the object are initialised; it became near after the scope began and stays until it ends; the
        // slice borrows the scope and `self`, so that nobody changes or frees them.
        Ok(unsafe { core::slice::from_raw_parts(address, self.len) })
    }

    /// The same, for a task: while they are on their way, others run.
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        scope.retry(|| self.get(scope)).await
    }

    /// As [`FarBytes::get`], for bytes that will not be used again soon: if they have to be brought near, they leave first.
    pub fn get_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&[]) };
        scope.once(|once| {
            slot.note(once, scope);
            self.get(scope)
        })
    }

    /// The same, for a task.
    pub async fn fetch_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&[]) };
        let look = async |once: &Once| {
            slot.note(once, scope);
            self.fetch(scope).await
        };
        scope.fetch_once(look).await
    }

    /// Begins to bring the bytes near, and does not wait: see [`Heap::prefetch`](crate::Heap::prefetch).
    pub fn prefetch(&self) {
        if let Some((core, slot)) = self.place() {
            core.prefetch(core.record(), [slot.parts(core).0]);
        }
    }

    /// The bytes will not be needed soon: they leave before others.
    pub fn cold(&self) {
        if let Some((core, slot)) = self.place() {
            slot.cold(core);
        }
    }

    /// Where they are, if there are any.
    fn place(&self) -> Option<(&Core, Slot)> {
        // SAFETY: our object keeps the heap.
        self.cell.load().map(|slot| (unsafe { &*slot.heap() }, slot))
    }

    /// The bytes, to be changed.
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<&'a mut [u8], FarError> {
        let Some(slot) = self.cell.load() else { return Ok(&mut []) };
        let address = self.address(scope, slot, Want::Write)?;
        // SAFETY: as in `get`, and `&mut self` makes it exclusive.
        Ok(unsafe { core::slice::from_raw_parts_mut(address, self.len) })
    }

    /// Looks at the bytes. The scope keeps nothing for it afterwards.
    pub(super) fn read<R>(&self, scope: &Scope<'_>, look: impl FnOnce(&[u8]) -> R) -> Result<R, FarError> {
        let Some(slot) = self.cell.load() else { return Ok(look(&[])) };
        let address = scope.with_room(|| self.cell.address(scope, slot, Want::Read))?;
        // SAFETY: as in `get`; nothing in `look` renews the scope.
        Ok(look(unsafe { core::slice::from_raw_parts(address, self.len) }))
    }

    /// The same, to change them, if there are any.
    fn change(&mut self, scope: &Scope<'_>, change: impl FnOnce(&mut [u8])) -> Result<(), FarError> {
        if let Some(slot) = self.cell.load() {
            let address = scope.with_room(|| self.cell.address(scope, slot, Want::Write))?;
            // SAFETY: as in `read`, and `&mut self` makes it exclusive.
            change(unsafe { core::slice::from_raw_parts_mut(address, self.len) });
        }
        Ok(())
    }

    /// More bytes, at the end.
    pub fn extend_from_slice(&mut self, scope: &Scope<'_>, bytes: &[u8]) -> Result<(), FarError> {
        let len = self.len.checked_add(bytes.len()).ok_or(FarError::TooLarge { bytes: u64::MAX })?;
        if len > self.room {
            self.grow(scope, len)?;
        }
        if let Some(slot) = self.cell.load() {
            let target = scope.with_room(|| self.cell.address(scope, slot, Want::Write))?;
            // SAFETY: `len` bytes fit into the object, which is near and ours alone; `bytes` may be far bytes too, but not ours.
            unsafe { target.add(self.len).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        self.len = len;
        Ok(())
    }

    /// One byte more, at the end.
    pub fn push(&mut self, scope: &Scope<'_>, byte: u8) -> Result<(), FarError> {
        self.extend_from_slice(scope, &[byte])
    }

    /// Takes the last byte off.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<u8>, FarError> {
        let last = self.read(scope, |bytes| bytes.last().copied())?;
        self.truncate(self.len.saturating_sub(1));
        Ok(last)
    }

    /// More bytes, before the one with this index; those from there on move.
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

    /// Takes some bytes out; those behind them move.
    ///
    /// # Panics
    /// If there are none.
    pub(super) fn cut(&mut self, scope: &Scope<'_>, range: Range<usize>) -> Result<(), FarError> {
        let (start, count) = (range.start, range.len());
        self.change(scope, |all| all.copy_within(range.end.., start))?;
        self.truncate(self.len - count);
        Ok(())
    }

    /// Moves into an object with room for `len` bytes, or twice as many as now.
    fn grow(&mut self, scope: &Scope<'_>, len: usize) -> Result<(), FarError> {
        match self.move_into(scope, len.max(self.room.saturating_mul(2))) {
            Err(FarError::TooLarge { .. }) => self.move_into(scope, len),
            other => other,
        }
    }

    fn move_into(&mut self, scope: &Scope<'_>, room: usize) -> Result<(), FarError> {
        let both = self.room as u64 + room as u64;
        let layout = Layout::from_size_align(room, 1).ok().filter(|_| both <= scope.core.frames.bytes() / 2);
        let layout = layout.ok_or(FarError::TooLarge { bytes: both })?;
        let old = self.cell.load();
        let new = scope.with_room(|| {
            // Nothing here renews the scope, so the old bytes are still there when the new object is made.
            let source = old.map(|old| self.cell.address(scope, old, Want::Read)).transpose()?;
            let (new, target) = Slot::make(scope, layout)?;
            if let Some(source) = source {
                // SAFETY: `len` initialised bytes, into an object with more room.
                unsafe { target.copy_from_nonoverlapping(source, self.len) };
            }
            Ok(new)
        })?;
        self.cell.store(new.word());
        self.room = room;
        if let Some(old) = old {
            // SAFETY: ours, and named by nobody any more; the new object keeps the heap.
            unsafe { old.free(scope.core) };
        }
        Ok(())
    }

    /// Only the first `len` of them.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        if self.len == 0 {
            drop(take(self));
        }
    }

    /// None any more.
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
        let freed = unsafe { dropped_in_place(core, page, card, None::<fn(*mut u8)>) };
        debug_assert_eq!(freed, Ok(()));
    }
}

impl core::fmt::Debug for FarBytes {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarBytes(len {})", self.len)
    }
}
