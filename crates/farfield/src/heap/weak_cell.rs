//! Near part of a value that weak pointers lead to: where the value is, and how many owners it has.
//!
//! The table of owners has the cell as long as the value lives, and weak pointers have it weakly.
//! So the value's far space is free as soon as its last owner has gone, and a weak pointer keeps
//! neither far space nor the heap.

use core::num::NonZeroU32;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The count of owners of a value, and the halves of a slot word that leads to it.
pub(crate) struct WeakCell {
    /// Number of owners. 0 before the value is made, and when it has none any more, for ever.
    owners: AtomicU64,
    /// The lower half, a guess as in any slot word.
    place: AtomicU32,
    /// The upper half. 0 before the value is made.
    number: AtomicU32,
}

impl WeakCell {
    /// Makes the cell of a value that is not made yet. It has no owner.
    pub(crate) fn unborn() -> WeakCell {
        WeakCell { owners: AtomicU64::new(0), place: AtomicU32::new(0), number: AtomicU32::new(0) }
    }

    /// Notes that the value is made, and has this many owners.
    pub(super) fn begin(&self, (place, number): (u32, NonZeroU32), owners: u64) {
        assert_eq!(self.number.swap(number.get(), Ordering::Relaxed), 0, "a cell is of one value");
        self.place.store(place, Ordering::Relaxed);
        // Release: whoever sees an owner sees the halves, and the value.
        self.owners.store(owners, Ordering::Release);
    }

    /// Adds an owner if there is one. Returns the halves of its slot word. The value, and so its
    /// heap, exists until the new owner is removed.
    pub(crate) fn upgrade(&self) -> Option<(u32, NonZeroU32)> {
        let more = |owners: u64| (owners > 0).then_some(owners + 1);
        // Acquire: `begin`.
        self.owners.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        let number = NonZeroU32::new(self.number.load(Ordering::Relaxed));
        number.map(|number| (self.place.load(Ordering::Relaxed), number))
    }

    /// Returns the number of owners.
    pub(crate) fn owners(&self) -> u64 {
        self.owners.load(Ordering::Relaxed)
    }

    /// Returns the number of owners, which nobody changes meanwhile.
    pub(super) fn owners_mut(&mut self) -> u64 {
        *self.owners.get_mut()
    }

    /// Adds an owner. The caller is one already.
    pub(super) fn add_owner(&self) {
        self.owners.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes an owner. True if it was the last one.
    pub(super) fn remove_owner(&self) -> bool {
        self.owners.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Removes the owner, if there is only one.
    pub(super) fn end_only_owner(&self) -> bool {
        self.owners.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}
