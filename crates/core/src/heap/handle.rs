//! The handle: where one small object of the object plane is, as one atomic 64-bit word that never moves.
//!
//! ```text
//!  63              32 31       16 15    8 7     0
//! +------------------+-----------+-------+-------+
//! | page             | stamp     | card  | flags |
//! +------------------+-----------+-------+-------+
//! ```
//!
//! ```text
//!            settle                 lock                      moved
//!   Free ───────────────▶ Here ◀───────────────▶ Moving ─────────────────▶ Here, elsewhere
//!    ▲                     │ │      unlock
//!    └─────── freed ───────┘ └── moved, by whoever owns the page
//! ```
//!
//! A slot names the handle and not the place. So objects move while slots lie anywhere, far or
//! near, and slots are moved themselves. Two parties move objects. A thread that misses, or fetches
//! ahead, *locks* the handle while the object's bytes are on their way, because its page is Far and
//! has no owner. Others wait, and a task that waits sets a mark (*wanted*). The evacuator owns the
//! page (Copying), so it needs no lock: one compare-exchange decides whether it was first or the
//! object's end was.
//!
//! Two flags are a counter of uses. The counter and the stamp are 0 unless a rule of hotness needs
//! them (`hotness.rs`).
//!
//! A Free handle has the number of the next free one in place of its page.

use crate::cast::{low_u8, low_u16, low_u32};

/// Location of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectLocation {
    /// Nowhere: the object does not exist.
    Nowhere,
    /// In this page, from this card on.
    At {
        /// Page within the heap.
        page: u32,
        /// Card within the page.
        card: u8,
    },
    /// On its way to near memory: look again soon.
    Moving,
}

/// Word of one object of the object plane: its handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle(pub u64);

const LIVE: u64 = 1;
const MOVING: u64 = 1 << 1;
const HOT: u64 = 1 << 2;
const WANTED: u64 = 1 << 3;
const AHEAD: u64 = 1 << 4;
const USED: u64 = 1 << 5;
const USES_SHIFT: u32 = 6;
const USES: u64 = 3 << USES_SHIFT;
const STAMP_SHIFT: u32 = 16;
const STAMP: u64 = 0xFFFF << STAMP_SHIFT;

impl Handle {
    /// Handle in fresh memory: free, and the last in its list.
    pub const FRESH: Handle = Handle(0);

    /// Mark that the next user of the object sets with one `fetch_or`, unless it is set. The
    /// evacuator clears it. As long as it is set, uses leave no trace.
    pub const HOT: u64 = HOT;

    /// All bits by which an object can be hot.
    pub const HEAT: u64 = HOT | USES | STAMP;

    /// Mark of an object that was used in the page where it is, since that page came near. Set
    /// together with the other marks, and cleared when the page leaves.
    pub const USED: u64 = USED;

    /// Mark of an object that came before anybody needed it; its first user clears it with one
    /// `fetch_and`.
    pub const AHEAD: u64 = AHEAD;

    /// Creates a free handle that precedes `next` in its list.
    pub fn free(next: Option<u32>) -> Handle {
        Handle(u64::from(next.map_or(0, |next| next + 1)) << 32)
    }

    /// Returns the free handle that follows this free one.
    pub fn next_free(self) -> Option<u32> {
        debug_assert!(self.location() == ObjectLocation::Nowhere);
        ((self.0 >> 32) as u32).checked_sub(1)
    }

    /// Creates the handle of an object that is there, new or because it is needed.
    pub fn settle(page: u32, card: u8) -> Handle {
        Handle(u64::from(page) << 32 | u64::from(card) << 8 | LIVE | USED)
    }

    /// Returns where the object is.
    #[inline]
    pub fn location(self) -> ObjectLocation {
        match self.0 & (LIVE | MOVING) {
            LIVE => ObjectLocation::At { page: low_u32(self.0 >> 32), card: low_u8(self.0 >> 8) },
            0 => ObjectLocation::Nowhere,
            _ => ObjectLocation::Moving,
        }
    }

    /// Checks whether the object is in this page and not being moved.
    pub fn is_in(self, page: u32) -> bool {
        matches!(self.location(), ObjectLocation::At { page: there, .. } if there == page)
    }

    /// Checks whether the object is in this page, from this card on, and not being moved.
    pub fn is_at(self, page: u32, card: u8) -> bool {
        self.location() == ObjectLocation::At { page, card }
    }

    /// Checks whether the object was used again since it came where it is, or since the mark was
    /// cleared.
    #[inline]
    pub fn is_hot(self) -> bool {
        self.0 & HOT != 0
    }

    /// Returns the number of uses that were counted.
    pub fn uses(self) -> u32 {
        ((self.0 & USES) >> USES_SHIFT) as u32
    }

    /// Returns the handle with this number of uses, at most three.
    pub fn with_uses(self, uses: u32) -> Handle {
        assert!(uses <= 3);
        Handle(self.0 & !USES | u64::from(uses) << USES_SHIFT)
    }

    /// Returns when the object was used last, as its user noted it; 0: never noted.
    pub fn stamp(self) -> u16 {
        low_u16(self.0 >> STAMP_SHIFT)
    }

    /// Returns the handle with this stamp.
    pub fn with_stamp(self, stamp: u16) -> Handle {
        Handle(self.0 & !STAMP | u64::from(stamp) << STAMP_SHIFT)
    }

    /// Checks whether the object was used in the page where it is, since that page came near.
    pub fn is_used(self) -> bool {
        self.0 & USED != 0
    }

    /// Checks whether the object came before anybody needed it, and has not been used since.
    #[inline]
    pub fn is_ahead(self) -> bool {
        self.0 & AHEAD != 0
    }

    /// Checks whether a task waits for the end of the move.
    pub fn is_wanted(self) -> bool {
        self.0 & WANTED != 0
    }

    /// Locks the object for the caller, who brings it near. `None` if it cannot be taken now.
    pub fn lock(self) -> Option<Handle> {
        matches!(self.location(), ObjectLocation::At { .. }).then_some(Handle(self.0 & !AHEAD | MOVING))
    }

    /// Marks that a task waits for the moving object, and is to be told. `None` if the object is
    /// not moving.
    pub fn want(self) -> Option<Handle> {
        (self.location() == ObjectLocation::Moving).then_some(Handle(self.0 | WANTED))
    }

    /// Unlocks the object, which the caller leaves where it was.
    pub fn unlock(self) -> Handle {
        assert!(self.location() == ObjectLocation::Moving);
        Handle(self.0 & !(MOVING | WANTED))
    }

    /// Returns the handle of the object at its new place, needed there, and not hot before it is
    /// used again.
    pub fn moved(self, page: u32, card: u8) -> Handle {
        assert!(self.location() != ObjectLocation::Nowhere);
        Handle::settle(page, card)
    }

    /// Returns the handle of the object at its new place, before anybody needs it there.
    pub fn moved_ahead(self, page: u32, card: u8) -> Handle {
        Handle(self.moved(page, card).0 & !USED | AHEAD)
    }

    /// Returns the handle of the object at its new place after evacuation. It keeps whether it was
    /// used, how often, and when.
    pub fn evacuated(self, page: u32, card: u8) -> Handle {
        Handle(self.moved(page, card).0 & !USED | self.0 & (USED | USES | STAMP))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against handles that two parties read differently. Exhaustive over everything
    //! reachable between corner places.
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    const PLACES: [(u32, u8); 4] = [(0, 0), (1, 255), (u32::MAX, 0), (77, 3)];

    fn next(handle: Handle) -> Vec<Handle> {
        let mut next = vec![
            Handle(handle.0 & !(Handle::HOT | Handle::USED)),
            Handle(handle.0 & !Handle::HOT),
            Handle(handle.0 & !Handle::AHEAD),
        ];
        next.extend(handle.lock());
        next.extend(handle.want());
        match handle.location() {
            ObjectLocation::Nowhere => next.extend(PLACES.map(|(page, card)| Handle::settle(page, card))),
            ObjectLocation::At { .. } => {
                next.extend([Handle(handle.0 | Handle::HOT | Handle::USED), Handle(handle.0 | Handle::USED)]);
                next.extend([Handle::free(None), Handle::free(Some(u32::MAX - 1))]);
                next.extend(PLACES.map(|(page, card)| handle.evacuated(page, card)));
            }
            ObjectLocation::Moving => {
                next.push(handle.unlock());
                next.extend(PLACES.map(|(page, card)| handle.moved(page, card)));
                next.extend(PLACES.map(|(page, card)| handle.moved_ahead(page, card)));
            }
        }
        next
    }

    fn reachable() -> Vec<Handle> {
        crate::words::reachable(Handle::FRESH, next)
    }

    #[test]
    fn every_reachable_handle_says_one_thing() {
        let handles = reachable();
        // Two free ones; each place not used, used, or hot, too; there, there ahead of need,
        // locked, or locked and wanted.
        assert_eq!(handles.len(), 2 + PLACES.len() * 3 * 4, "{handles:?}");
        for handle in handles {
            let there = PLACES.iter().filter(|(page, card)| handle.is_at(*page, *card)).count();
            assert_eq!(there, usize::from(matches!(handle.location(), ObjectLocation::At { .. })), "{handle:?}");
            assert_eq!(Handle(handle.0 & !Handle::HOT).location(), handle.location());
        }
    }

    #[test]
    fn a_moving_object_cannot_be_claimed_and_a_cancelled_move_changes_nothing() {
        for handle in reachable() {
            let Some(locked) = handle.lock() else {
                assert!(!matches!(handle.location(), ObjectLocation::At { .. }));
                continue;
            };
            assert_eq!(locked.location(), ObjectLocation::Moving);
            assert_eq!(locked.lock(), None);
            // That it came ahead of need is over.
            assert_eq!(locked.unlock(), Handle(handle.0 & !Handle::AHEAD));
            let wanted = locked.want().unwrap();
            assert!(wanted.is_wanted() && wanted.unlock() == locked.unlock());
            assert_eq!(handle.want(), None);
            // A mark that comes late does not unlock it, and does not say where it is.
            assert_eq!(Handle(locked.0 | Handle::HOT).location(), ObjectLocation::Moving);
        }
    }

    #[test]
    fn a_moved_object_is_at_its_new_location() {
        for handle in reachable().into_iter().filter(|handle| handle.location() != ObjectLocation::Nowhere) {
            for (page, card) in PLACES {
                let moved = handle.moved(page, card);
                assert!(moved.is_at(page, card) && !moved.is_hot() && !moved.is_ahead() && !moved.is_wanted());
                let ahead = handle.moved_ahead(page, card);
                assert!(
                    ahead.is_ahead() && Handle(ahead.0 & !Handle::AHEAD | Handle::USED) == moved && !ahead.is_used()
                );
                let evacuated = handle.evacuated(page, card);
                assert!(evacuated.is_at(page, card) && !evacuated.is_hot() && evacuated.is_used() == handle.is_used());
            }
        }
    }

    #[test]
    fn free_handles_are_a_list() {
        for next in [None, Some(0), Some(9), Some(u32::MAX - 1)] {
            assert_eq!(Handle::free(next).next_free(), next);
        }
        assert_eq!(Handle::FRESH, Handle::free(None));
    }
}
