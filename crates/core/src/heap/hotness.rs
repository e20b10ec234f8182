//! Hotness: by which uses the evacuator keeps an object near when its page is about to leave.
//!
//! The rules differ in what a handle remembers (Atlas, Figure 11, compares them). [`Hotness::Mark`]
//! is the default of every heap; the others are there to compare with it.
//!
//! | rule | remembers | hot | when the evacuator has looked |
//! |---|---|---|---|
//! | `Mark` | that it was used again after it came | marked | the mark is gone |
//! | `Count` | how often that was, up to three | at least one | one less |
//! | `Recency` | when it was used last | not long ago | unchanged |
//!
//! Time is counted in departures, as for everything in a heap that has to do with age: it stands
//! still while nothing leaves.

use super::Handle;
use crate::cast::{low_u16, u16_of};

/// Rule by which an object of the object and hybrid plane stays near while others leave.
/// Experimental, for comparisons; chosen with `Builder::hotness`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Hotness {
    /// A mark, set by the first use after the one for which the object came, and cleared when the
    /// evacuator looks at it. It is Atlas's access bit: CLOCK for objects. A use of a marked object
    /// costs nothing.
    #[default]
    Mark,
    /// A counter of two bits: an object that was used three times stays for three looks. Costs a
    /// write for each of the first three uses.
    Count,
    /// Approximate LRU: a stamp of sixteen bits in the handle instead of a list. An object is hot
    /// if it was used since half of near memory left. Each dereference reads the clock, and one in
    /// a while writes the stamp. CacheLib does the same: its list is not touched again for a while
    /// either.
    Recency,
}

/// A moment, counted as how much has left, in parts of near memory. Never 0, which means long ago.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp(u16);

/// Number of moments that pass while all of near memory leaves once.
pub const STAMPS_PER_TURN: u32 = 64;
/// Moments after its last use from which on an object is not hot any more.
const RECENT: u16 = u16_of(STAMPS_PER_TURN as usize / 2);
const USES_MAX: u32 = 3;

impl Stamp {
    /// Creates the stamp after `moments` moments, modulo the 16-bit range.
    pub fn after(moments: u64) -> Stamp {
        Stamp(low_u16(moments % u64::from(u16::MAX)) + 1)
    }

    /// Returns the stamp as a number that is not 0.
    pub fn number(self) -> u16 {
        self.0
    }

    /// Returns the moments that passed since a handle's stamp; `None` if it has none.
    fn since(self, then: u16) -> Option<u16> {
        let now = self.0 - 1;
        let ago = |then: u16| if now >= then { now - then } else { now + (u16::MAX - then) };
        then.checked_sub(1).map(ago)
    }
}

impl Hotness {
    /// Returns the handle of an object after this use. `brought`: the object came for this use.
    pub fn used(self, handle: Handle, now: Stamp, brought: bool) -> Handle {
        match self {
            Hotness::Mark if brought => handle,
            Hotness::Mark => Handle(handle.0 | Handle::HOT),
            Hotness::Count if brought => handle,
            Hotness::Count => match handle.uses() + 1 {
                // More uses would not be counted, so from here on a use costs nothing.
                USES_MAX.. => Handle(handle.with_uses(USES_MAX).0 | Handle::HOT),
                uses => handle.with_uses(uses),
            },
            Hotness::Recency => handle.with_stamp(now.number()),
        }
    }

    /// Checks whether the object stays near.
    pub fn is_hot(self, handle: Handle, now: Stamp) -> bool {
        match self {
            Hotness::Mark => handle.is_hot(),
            Hotness::Count => handle.uses() > 0,
            Hotness::Recency => now.since(handle.stamp()).is_some_and(|moments| moments < RECENT),
        }
    }

    /// Returns the handle after the evacuator has looked at it.
    pub fn looked_at(self, handle: Handle) -> Handle {
        match self {
            Hotness::Mark => Handle(handle.0 & !Handle::HOT),
            Hotness::Count => Handle(handle.with_uses(handle.uses().saturating_sub(1)).0 & !Handle::HOT),
            Hotness::Recency => handle,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against objects that stay for ever, and rules that change where an object is.
    use super::*;

    const RULES: [Hotness; 3] = [Hotness::Mark, Hotness::Count, Hotness::Recency];

    /// How often the evacuator, who looks each half turn, finds an object hot that was used so often.
    fn looks(rule: Hotness, uses: u32, start: u64) -> u32 {
        let mut handle = Handle::settle(7, 3);
        let mut now = start;
        for _ in 0..uses {
            handle = rule.used(handle, Stamp::after(now), false);
        }
        let mut looks = 0;
        loop {
            now += u64::from(STAMPS_PER_TURN / 2) - 1;
            if !rule.is_hot(handle, Stamp::after(now)) {
                return looks;
            }
            looks += 1;
            assert!(looks < 10, "{rule:?}: it stays for ever");
            handle = rule.looked_at(handle);
        }
    }

    #[test]
    fn used_objects_stay_hot_for_a_while() {
        for start in [0, 5, 65_500, 65_534, 65_535, 65_536, 1 << 40] {
            let stays = |rule| [0, 1, 2, 3, 9].map(|uses| looks(rule, uses, start));
            assert_eq!(stays(Hotness::Mark), [0, 1, 1, 1, 1]);
            assert_eq!(stays(Hotness::Count), [0, 1, 2, 3, 3]);
            assert_eq!(stays(Hotness::Recency), [0, 1, 1, 1, 1], "from {start}");
        }
    }

    #[test]
    fn the_use_for_which_it_came_is_no_sign_but_of_when() {
        let (handle, now) = (Handle::settle(7, 3), Stamp::after(9));
        for rule in RULES {
            let hot = rule.is_hot(rule.used(handle, now, true), now);
            assert_eq!(hot, rule == Hotness::Recency, "{rule:?}");
        }
    }

    #[test]
    fn only_what_is_remembered_changes() {
        for rule in RULES {
            for start in [Handle::settle(7, 3), Handle(Handle::settle(u32::MAX, 255).0 | Handle::USED)] {
                let mut handle = start;
                for moment in 0..5 {
                    handle = rule.used(handle, Stamp::after(moment * 16_000), false);
                    assert_eq!(handle.0 & !Handle::HEAT, start.0 & !Handle::HEAT, "{rule:?}");
                    assert_eq!(handle.location(), start.location());
                    let moved = handle.evacuated(9, 1);
                    assert!(moved.is_at(9, 1) && !moved.is_hot() && moved.is_used() == handle.is_used());
                    assert_eq!((moved.uses(), moved.stamp()), (handle.uses(), handle.stamp()));
                    assert_eq!((handle.moved(9, 1).uses(), handle.moved(9, 1).stamp()), (0, 0), "it starts anew");
                }
            }
        }
    }
}
