//! Dropping a map, whose buckets and entries may be far.

use super::Body;
use super::item::{EntryLayout, Item};
use crate::heap::{HeapInner, Panics, Scope, SlotWord, Teardown, drop_collection, drop_far_with};

/// A map that is dropped, up to a bucket. The rest is dropped later.
pub(super) struct MapTeardown<K: Item + ?Sized, V: Item + ?Sized> {
    body: Body<K, V>,
    bucket: u32,
    /// Entries that are still in the index.
    left: u64,
    /// Entries to drop: taken out of the index, or retired before.
    slots: Vec<SlotWord>,
}

impl<K: Item + ?Sized, V: Item + ?Sized> MapTeardown<K, V> {
    /// Drops everything, or what can be dropped now, and the rest when a scope ends.
    pub(super) fn drop_now(mut body: Body<K, V>, entries: u64) {
        let slots = body.retired.take_all();
        let core: *const HeapInner = body.heap_ref.core();
        // SAFETY: its `heap_ref` keeps the heap.
        unsafe { drop_collection(core, Box::new(MapTeardown { body, bucket: 0, left: entries, slots })) };
    }
}

impl<K: Item + ?Sized, V: Item + ?Sized> Teardown for MapTeardown<K, V> {
    fn tear_down(&mut self, finally: bool, panics: &mut Panics) -> bool {
        let core = self.body.heap_ref.core();
        loop {
            for slot in self.slots.drain(..) {
                // SAFETY: an entry of this map, which nobody uses any more.
                panics.catch(|| unsafe { drop_entry::<K, V>(core, slot) });
            }
            if self.bucket == self.body.table.count() {
                break;
            }
            let found = {
                // No scope of ours is open while destructors run.
                let scope = Scope::new(core);
                let position = self.bucket.reverse_bits();
                scope.with_room(|| self.body.table.entries_at(&scope, position, &mut self.slots))
            };
            match found {
                Ok(_) => self.left = self.left.saturating_sub(self.slots.len() as u64),
                Err(error) if finally || core.is_lost(error) => self.slots.clear(),
                Err(_) => {
                    self.slots.clear();
                    return false;
                }
            }
            self.bucket += 1;
        }
        // Entries of lost buckets cannot be found.
        core.lose_values(self.left as usize);
        self.body.table.clear(core);
        true
    }
}

/// Drops an entry, now or when there is room.
///
/// # Safety
/// The slot is that of an entry of a map of these types, which nobody uses any more.
pub(super) unsafe fn drop_entry<K: Item + ?Sized, V: Item + ?Sized>(core: &HeapInner, slot: SlotWord) {
    let (page, card) = slot.parts(core);
    // SAFETY: passed on to the caller.
    unsafe { drop_far_with(core, page, card, EntryLayout::<K, V>::tear_down_entry) };
}
