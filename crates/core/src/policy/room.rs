//! Which tier has room, and which of its pages leave for the next one.
//!
//! Nobody says how much fits into a tier: what it holds when it says that it is full is its *limit*. From then on pages leave before it is reached, so that
//! what is written finds room. Those leave that were not written since a clock hand came by last.

use crate::tier_word::TierWord;
use crate::time::Moment;

/// Kept free: one of so many pages that fit, and no more than so many (32 MiB).
const RESERVE_SHARE: u64 = 16;
const RESERVE_MAX: u64 = 8192;

/// What is known of a tier's room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Pages that it has bytes of.
    pub held: u64,
    /// How many there were when it was full; `u64::MAX`: it never was.
    pub limit: u64,
    /// Until then it is believed to be full.
    pub full_until: Moment,
}

impl Room {
    /// Is it worth asking for room for a page more?
    pub fn is_open(self, now: impl FnOnce() -> Moment) -> bool {
        self.held < self.limit || now() >= self.full_until
    }

    /// It has said that it is full, to somebody who wanted to bring so many pages that count as held already.
    pub fn limit_when_full(self, pages: u64) -> u64 {
        self.held.saturating_sub(pages)
    }

    /// So many pages shall leave.
    pub fn to_move(self) -> u64 {
        if self.limit == u64::MAX {
            return 0;
        }
        let reserve = self.limit.div_ceil(RESERVE_SHARE).min(RESERVE_MAX);
        self.held.saturating_sub(self.limit - reserve)
    }
}

/// What the clock hand of a tier does with a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// It is not here, or somebody works on it.
    Pass,
    /// It was written since: it stays until the next time, with this word.
    Spare(TierWord),
    /// It leaves.
    Leave,
}

/// The hand of `tier` comes by.
pub fn look(word: TierWord, tier: usize) -> Look {
    if !word.is_movable(tier) {
        return Look::Pass;
    }
    word.age().map_or(Look::Leave, Look::Spare)
}

#[cfg(test)]
mod tests {
    //! Danger: a tier that is asked in vain again and again, or never again; pages that leave a tier with room, or none that leave a full one.
    use super::*;

    const LATER: Moment = Moment(100);

    fn room(held: u64, limit: u64) -> Room {
        Room { held, limit, full_until: LATER }
    }

    #[test]
    fn a_full_tier_is_asked_again_when_something_left_or_time_passed() {
        let fresh = Room { held: 1 << 40, limit: u64::MAX, full_until: Moment(0) };
        assert!(fresh.is_open(|| Moment(0)));
        let limit = room(1064, u64::MAX).limit_when_full(64);
        assert_eq!(limit, 1000);
        for (held, now, is_open) in [(1000, 99, false), (1000, 100, true), (999, 0, true), (2000, 99, false)] {
            assert_eq!(room(held, limit).is_open(|| Moment(now)), is_open, "{held} pages at {now}");
        }
        assert_eq!(room(3, 0).limit_when_full(9), 0);
    }

    #[test]
    fn pages_leave_before_it_is_full() {
        assert_eq!(room(1 << 40, u64::MAX).to_move(), 0, "nobody knows a limit");
        assert_eq!((room(1600, 1600).to_move(), room(1500, 1600).to_move(), room(1501, 1600).to_move()), (100, 0, 1));
        assert_eq!(room(1 << 30, 1 << 30).to_move(), RESERVE_MAX);
        assert_eq!((room(1, 1).to_move(), room(5, 0).to_move(), room(0, 0).to_move()), (1, 5, 0));
    }

    #[test]
    fn the_hand_spares_what_was_written_since() {
        let written = TierWord::default().begin_write(1).expect("room");
        assert_eq!(look(written, 1), Look::Pass, "it is being written");
        let young = written.end_write(1, true);
        assert_eq!(look(young, 0), Look::Pass);
        let Look::Spare(old) = look(young, 1) else { panic!("young") };
        assert_eq!(look(old, 1), Look::Leave);
        assert_eq!(look(old.claim_move(1, 2).expect("free"), 1), Look::Pass);
    }
}
