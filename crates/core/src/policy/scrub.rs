//! Pace of a scrub: every place is looked at once in a *period*, evenly spread.
//!
//! *On time* is the moment at which a scrub without delays would have looked at what this one has
//! looked at. Each place moves it by an equal share of the period. The next run is due when it ends
//! on time. After a pause (the program was stopped, a member was slow) a run is worth half of its
//! time until the scrub has caught up: twice as fast as usual, and never a burst. What is missed by
//! more than a period is not made up for.

use crate::cast::nanos;
use crate::time::Moment;
use core::time::Duration;

/// Factor by which a scrub that is behind goes faster.
const CATCH_UP: u32 = 2;

/// Progress and pace of a scrub.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScrubPace {
    /// Time in which everything is looked at once.
    pub period: Duration,
    /// Moment at which a scrub without delays would have got as far as this one.
    pub on_time: Moment,
    /// Moment before which nothing is due, however late the scrub is.
    pub not_before: Moment,
}

impl ScrubPace {
    /// Greatest number of places that are looked at together.
    pub const RUN: u64 = 16;

    /// Begins a scrub now: the first run is due when its share of the period has passed.
    pub fn new(period: Duration, now: Moment) -> ScrubPace {
        assert!(!period.is_zero());
        ScrubPace { period, on_time: now, not_before: now }
    }

    /// Returns when the next run of a scrub over `all` places is due.
    pub fn next_at(&self, all: u64) -> Moment {
        match all {
            0 => Moment::NEVER,
            _ => self.on_time.after(self.worth(all.min(Self::RUN), all)).max(self.not_before),
        }
    }

    /// Returns how many of `all` places should be looked at now; 0: none is due.
    pub fn due(&self, all: u64, now: Moment) -> u64 {
        if now >= self.next_at(all) { all.min(Self::RUN) } else { 0 }
    }

    /// Returns the pace after `places` of `all` places were looked at.
    pub fn looked(self, places: u64, all: u64, now: Moment) -> ScrubPace {
        let (worth, period) = (self.worth(places, all), self.worth(1, 1));
        let oldest = Moment(now.0.saturating_sub(nanos(period)));
        let on_time = self.on_time.max(oldest).after(worth);
        ScrubPace { on_time, not_before: now.after(worth / CATCH_UP), ..self }
    }

    /// Returns the pace when nothing is stored: no time passes.
    pub fn idle(self, now: Moment) -> ScrubPace {
        ScrubPace { on_time: now, not_before: now, ..self }
    }

    /// Returns the share of the period that `places` of `all` places have.
    fn worth(&self, places: u64, all: u64) -> Duration {
        let share = self.period.as_nanos().saturating_mul(places.into()) / u128::from(all.max(1));
        Duration::from_nanos(u64::try_from(share).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a place that is never looked at; a scrub that does nothing for hours, or everything at once.
    use super::*;
    use alloc::vec::Vec;

    /// A scrub of `all` places whose driver looks at the clock every `tick`, as long as `is_awake`
    /// says so: when it looked, and at how many places.
    fn drive(all: u64, period: u64, tick: u64, end: u64, is_awake: impl Fn(u64) -> bool) -> Vec<(u64, u64)> {
        let mut pace = ScrubPace::new(Duration::from_nanos(period), Moment(0));
        let mut looks = Vec::new();
        for now in (0..end).step_by(tick as usize).filter(|now| is_awake(*now)) {
            let due = pace.due(all, Moment(now));
            if due > 0 {
                looks.push((now, due));
                pace = pace.looked(due, all, Moment(now));
                assert_eq!(pace.due(all, Moment(now)), 0, "one run at a time");
            }
        }
        looks
    }

    fn places(looks: &[(u64, u64)]) -> u64 {
        looks.iter().map(|(_, places)| places).sum()
    }

    #[test]
    fn each_page_is_scrubbed_once_a_period_at_an_even_rate() {
        for all in (1..200).chain([1000, 1 << 20]) {
            let period = all * 60;
            let run = all.min(ScrubPace::RUN);
            for tick in [1, 7, 30] {
                let end = (2 * period + 1).min(100_000);
                let looks = drive(all, period, tick, end, |_| true);
                for (number, (at, _)) in looks.iter().enumerate() {
                    // Each run ends when a scrub without delays would have ended it.
                    let ideal = (number as u64 + 1) * run * 60;
                    assert!((ideal..=ideal + 2 * tick).contains(at), "{all} places: {at} instead of {ideal}");
                }
                let ideal = (end - 1) / 60;
                assert!((ideal.saturating_sub(run + 2)..=ideal).contains(&places(&looks)), "{all} places");
            }
        }
    }

    #[test]
    fn scrubbing_catches_up_after_a_pause_without_a_burst() {
        let (all, period) = (1000, 60_000);
        for pause in [1_000, 10_000, 59_000] {
            let looks = drive(all, period, 1, 4 * period, |now| !(5_000..5_000 + pause).contains(&now));
            let share = ScrubPace::RUN * 60;
            for pair in looks.windows(2) {
                assert!(pair[1].0 - pair[0].0 >= share / 2, "{pair:?}");
            }
            assert!(places(&looks) >= 4 * all - 2 * ScrubPace::RUN, "pause {pause}: {} places", places(&looks));
            let steady: Vec<_> = looks.iter().filter(|(at, _)| *at > 5_000 + 2 * pause + 2 * share).collect();
            assert!(steady.windows(2).all(|pair| pair[1].0 - pair[0].0 >= share - 1), "it is on time again");
        }
    }

    #[test]
    fn a_long_pause_is_not_made_up_for() {
        let (all, period) = (1000, 60_000);
        let looks = drive(all, period, 1, 40 * period, |now| !(1..30 * period).contains(&now));
        // In the ten periods that are left: theirs, and one that was missed.
        assert!((10 * all..=11 * all).contains(&places(&looks)), "{}", places(&looks));
    }

    #[test]
    fn an_empty_region_has_no_page_due() {
        let pace = ScrubPace::new(Duration::from_nanos(600), Moment(0));
        assert_eq!((pace.due(0, Moment(u64::MAX - 1)), pace.next_at(0)), (0, Moment::NEVER));
        // What is written after a long time has its time, too.
        let pace = pace.idle(Moment(10_000));
        assert_eq!((pace.due(3, Moment(10_599)), pace.due(3, Moment(10_600))), (0, 3));
        assert_eq!(pace.due(40, Moment(10_240)), ScrubPace::RUN);
    }

    #[test]
    fn long_periods_and_many_places_do_not_overflow() {
        let pace = ScrubPace::new(Duration::MAX, Moment(5));
        assert_eq!(pace.looked(u64::MAX, 1, Moment(9)).next_at(7), Moment::NEVER);
        let day = ScrubPace::new(Duration::from_secs(86_400), Moment(0));
        assert_eq!(day.next_at(1 << 40), Moment((86_400 * 1_000_000_000 * 16) >> 40));
    }
}
