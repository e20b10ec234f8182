//! Admission to a tier: which tier has room, and which of its pages leave for the next one.
//!
//! The capacity of a tier is not declared: what it holds when it says that it is full is its
//! *limit*. From then on pages leave before the limit is reached, so that writes find room. The
//! pages that leave are those that were not written since a clock hand came by last (CLOCK).

use crate::tier_word::TierWord;
use crate::time::Moment;

/// Reserve that is kept free: one of this many pages that fit, and no more than this many pages (32
/// MiB).
const RESERVE_SHARE: u64 = 16;
const RESERVE_MAX: u64 = 8192;

/// Knowledge about the room in a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierOccupancy {
    /// Number of pages of which the tier has bytes.
    pub held: u64,
    /// Number of pages held when the tier was full; `u64::MAX`: it never was.
    pub limit: u64,
    /// Moment until which the tier is assumed to be full.
    pub full_until: Moment,
}

impl TierOccupancy {
    /// Checks whether it is worth asking for room for one more page.
    pub fn is_open(self, now: impl FnOnce() -> Moment) -> bool {
        self.held < self.limit || now() >= self.full_until
    }

    /// Returns the limit after the tier said that it is full, to a caller that wanted to bring
    /// `pages` pages, which count as held already.
    pub fn limit_when_full(self, pages: u64) -> u64 {
        self.held.saturating_sub(pages)
    }

    /// Returns the number of pages that should leave.
    pub fn to_move(self) -> u64 {
        if self.limit == u64::MAX {
            return 0;
        }
        let reserve = self.limit.div_ceil(RESERVE_SHARE).min(RESERVE_MAX);
        self.held.saturating_sub(self.limit - reserve)
    }
}

/// Action of a tier's clock hand on a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TierClockAction {
    /// Nothing: the page is not here, or is being worked on.
    Pass,
    /// Spare the page until the next time, with this word: it was written since the last one.
    Spare(TierWord),
    /// Move the page away.
    Leave,
}

/// Decides what the clock hand of `tier` does with a page.
pub fn clock_action(word: TierWord, tier: usize) -> TierClockAction {
    if !word.is_movable(tier) {
        return TierClockAction::Pass;
    }
    word.age().map_or(TierClockAction::Leave, TierClockAction::Spare)
}

#[cfg(test)]
mod tests {
    //! Danger: a tier that is asked in vain again and again, or never again; pages that leave a
    //! tier with room, or none that leave a full one.
    use super::*;

    const LATER: Moment = Moment(100);

    fn room(held: u64, limit: u64) -> TierOccupancy {
        TierOccupancy { held, limit, full_until: LATER }
    }

    #[test]
    fn a_full_tier_is_asked_again_when_something_left_or_time_passed() {
        let fresh = TierOccupancy { held: 1 << 40, limit: u64::MAX, full_until: Moment(0) };
        assert!(fresh.is_open(|| Moment(0)));
        let limit = room(1064, u64::MAX).limit_when_full(64);
        assert_eq!(limit, 1000);
        for (held, now, is_open) in [(1000, 99, false), (1000, 100, true), (999, 0, true), (2000, 99, false)] {
            assert_eq!(room(held, limit).is_open(|| Moment(now)), is_open, "{held} pages at {now}");
        }
        assert_eq!(room(3, 0).limit_when_full(9), 0);
    }

    #[test]
    fn pages_leave_before_the_tier_is_full() {
        assert_eq!(room(1 << 40, u64::MAX).to_move(), 0, "nobody knows a limit");
        assert_eq!((room(1600, 1600).to_move(), room(1500, 1600).to_move(), room(1501, 1600).to_move()), (100, 0, 1));
        assert_eq!(room(1 << 30, 1 << 30).to_move(), RESERVE_MAX);
        assert_eq!((room(1, 1).to_move(), room(5, 0).to_move(), room(0, 0).to_move()), (1, 5, 0));
    }

    #[test]
    fn the_hand_spares_what_was_written_since() {
        let written = TierWord::default().begin_write(1).expect("room");
        assert_eq!(clock_action(written, 1), TierClockAction::Pass, "it is being written");
        let young = written.end_write(1, true);
        assert_eq!(clock_action(young, 0), TierClockAction::Pass);
        let TierClockAction::Spare(old) = clock_action(young, 1) else { panic!("young") };
        assert_eq!(clock_action(old, 1), TierClockAction::Leave);
        assert_eq!(clock_action(old.claim_move(1, 2).expect("free"), 1), TierClockAction::Pass);
    }
}
