//! The worth of near memory at the moment: the number of misses that one page more of it would
//! save.
//!
//! A miss of a value that left a short while ago would not have happened if near memory were a
//! little larger. So each page remembers when it left, by a clock that counts departures. A miss
//! less than an eighth of near memory after the departure is counted as *early*. With an eighth
//! more near memory, there would be that many misses fewer, and each departure would be later. In
//! the time in which all of near memory leaves once, an eighth more of it would save the early
//! misses of that time. The utility is their quotient: misses saved for each page that stays for
//! one such time. A program that reads everything in turn has a utility of 0, however much it
//! misses. A cache that is almost large enough has a high one.

use crate::error::BuildError;
use crate::heap::{ReservedArray, TransferUnit};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The utility, and the counts from which it is computed.
pub(crate) struct MarginalUtility {
    /// Number of pages that left, so far, modulo 2^32.
    clock: AtomicU32,
    /// Clock value at which each page last left.
    left_at: ReservedArray<AtomicU32>,
    /// Number of early misses: those of pages that had left shortly before.
    pub(crate) early: AtomicU64,
    /// Clock value at which the utility was last computed; only the evictor computes it. The next
    /// field is [`MarginalUtility::early`] at that time.
    made_at: AtomicU32,
    early_then: AtomicU64,
    /// The utility, in parts of [`ONE`].
    value: AtomicU32,
}

/// Part of near memory, as a divisor: a miss is early if less than this part has left since.
const SHORTLY: u32 = 8;
/// Number of times that the utility is computed while all of near memory leaves once. Each new
/// measurement weighs one part in as many.
const OFTEN: u32 = 4;
const ONE: u32 = 1 << 8;

impl MarginalUtility {
    pub(super) fn new(pages: u32) -> Result<MarginalUtility, BuildError> {
        Ok(MarginalUtility {
            clock: AtomicU32::new(0),
            left_at: ReservedArray::new(pages as usize)?,
            early: AtomicU64::new(0),
            made_at: AtomicU32::new(0),
            early_then: AtomicU64::new(0),
            value: AtomicU32::new(0),
        })
    }

    /// Returns the number of pages that left, so far, modulo 2^32.
    pub(super) fn clock(&self) -> u32 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Returns the number of misses that one page more of near memory would save in the time in
    /// which all of it leaves once.
    pub(super) fn now(&self) -> f64 {
        f64::from(self.value.load(Ordering::Relaxed)) / f64::from(ONE)
    }

    /// Counts the departure of a unit from a near memory of this many frames, and updates the
    /// utility when it is time.
    pub(super) fn leaves(&self, unit: TransferUnit, frames: u32) {
        let clock = self.clock().wrapping_add(unit.pages);
        self.clock.store(clock, Ordering::Relaxed);
        self.left_at[unit.page].store(clock, Ordering::Relaxed);
        let since = clock.wrapping_sub(self.made_at.load(Ordering::Relaxed));
        if since >= frames / OFTEN {
            self.made_at.store(clock, Ordering::Relaxed);
            let early = self.early.load(Ordering::Relaxed);
            let lately = early - self.early_then.swap(early, Ordering::Relaxed);
            let utility = lately * u64::from(SHORTLY * ONE) / u64::from(since);
            let (before, utility) = (self.value.load(Ordering::Relaxed), utility.min(u64::from(u32::MAX)) as u32);
            self.value.store(before - before / OFTEN + utility / OFTEN, Ordering::Relaxed);
        }
    }

    /// Counts a miss of a value in this page as early if the page left shortly before.
    pub(super) fn missed(&self, page: u32, frames: u32) {
        let left_at = self.left_at[page].load(Ordering::Relaxed);
        // 0: the page never left, or it does not matter.
        if left_at != 0 && self.clock().wrapping_sub(left_at) < frames / SHORTLY {
            self.early.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a utility that has nothing to do with what near memory would save.
    use super::*;

    const FRAMES: u32 = 800;

    /// Pages leave in turn, and come back after `distance` departures, so many of ten.
    fn price_of(distance: u32, tenths: u32) -> f64 {
        let utility = MarginalUtility::new(1 << 16).unwrap();
        for time in 0..8 * FRAMES {
            utility.leaves(TransferUnit { page: time, pages: 1 }, FRAMES);
            if time >= distance && time % 10 < tenths {
                utility.missed(time - distance, FRAMES);
            }
        }
        utility.now()
    }

    #[test]
    fn pages_that_come_back_soon_set_the_value_of_a_frame() {
        let check = |distance, tenths, expected: f64| {
            let found = price_of(distance, tenths);
            assert!((found - expected).abs() < 0.2, "{tenths} tenths after {distance}: {found}, not {expected}");
        };
        // All are missed as soon as they have left: one frame more saves one of each eighth of what leaves.
        check(10, 10, 8.0);
        check(10, 5, 4.0);
        check(FRAMES / SHORTLY - 1, 1, 0.8);
        check(FRAMES / SHORTLY, 10, 0.0);
        check(2 * FRAMES, 10, 0.0);
    }

    #[test]
    fn the_price_falls_when_nothing_comes_back() {
        let utility = MarginalUtility::new(16).unwrap();
        let leave = |missed: bool| {
            for _ in 0..4 * FRAMES {
                utility.leaves(TransferUnit { page: 3, pages: 1 }, FRAMES);
                if missed {
                    utility.missed(3, FRAMES);
                }
            }
            utility.now()
        };
        assert!(leave(true) > 7.0);
        assert!(leave(false) < 1.0);
    }

    #[test]
    fn a_page_that_never_left_does_not_count_as_early() {
        let utility = MarginalUtility::new(16).unwrap();
        utility.missed(5, FRAMES);
        assert_eq!(utility.early.load(Ordering::Relaxed), 0);
    }
}
