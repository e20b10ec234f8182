//! Predicts how many pages would have to come back with a given near size, without having seen a
//! single access.
//!
//! In an epoch, accessed bits gather from one moment on. After the time τ they say how much was
//! used within τ: the working set W(τ). A memory that keeps what was used last and has room for
//! W(τ) misses W'(τ) times per second, because what the working set grows by in the next moment was
//! not in it (Denning, 1968). So the slope of W where it reaches the near size is the rate of
//! misses there. Growth because memory is new is no miss. And new memory was used once, so it is
//! unknown whether it is used again: for epochs in which that is much, the others speak.

use super::{Observation, epoch_ends};
use crate::cast::saturating_u64;
use crate::geometry::PAGE_BYTES;
use alloc::vec::Vec;

/// Samples of one epoch.
#[derive(Clone, Debug, PartialEq)]
struct Epoch {
    /// Time at which the epoch ends.
    at_ms: u64,
    /// Resident bytes when the bits were cleared: what exceeds them is new.
    resident: f64,
    /// Samples of the epoch: time since the bits were cleared, bytes used, bytes resident.
    looks: Vec<WorkingSetSample>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct WorkingSetSample {
    since_ms: f64,
    used: f64,
    resident: f64,
}

/// New memory as a part of all that was used, above which an epoch does not say what is used again.
const NEW_MAX: f64 = 0.1;
/// Greatest part of the run for which other epochs may have to speak.
const SILENT_MAX: f64 = 0.5;

/// Statement of an epoch about a near size.
enum MissRateEstimate {
    /// Miss rate in bytes per millisecond.
    Rate(f64),
    /// Lower bound of the miss rate.
    AtLeast(f64),
    /// Nothing, because what was used was new.
    Nothing,
}

/// Working sets over a run.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkingSet {
    epochs: Vec<Epoch>,
}

/// Frequency of misses: how often far memory is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MissRate {
    /// Misses over the whole run, in pages.
    pub misses: f64,
    /// Part of the run in which the near size was below the least working set seen. There the
    /// figure is a lower bound, and the truth may be any amount above.
    pub unknown_share: f64,
}

impl WorkingSet {
    /// Computes the working sets of anonymous memory.
    pub fn of(observation: &Observation) -> WorkingSet {
        let samples = &observation.samples;
        // Bits are cleared right after the last look of an epoch.
        let mut resident = 0.0;
        let mut epoch = |end: &super::Sample| {
            let looks = samples.iter().filter(|sample| sample.epoch == end.epoch && sample.since_ms > 0);
            let look = |sample: &super::Sample| WorkingSetSample {
                since_ms: sample.since_ms as f64,
                used: sample.anonymous_used_bytes as f64,
                resident: sample.anonymous_bytes as f64,
            };
            let before = core::mem::replace(&mut resident, end.anonymous_bytes as f64);
            Epoch { at_ms: end.at_ms, resident: before, looks: looks.map(look).collect() }
        };
        WorkingSet { epochs: epoch_ends(samples).map(&mut epoch).filter(|epoch| !epoch.looks.is_empty()).collect() }
    }

    /// Returns the bytes that nine of ten epochs used within their first look, and the greatest
    /// length of such a look in ms.
    pub fn hot(&self) -> (u64, u64) {
        // The first epoch has seen everything that was made; it is used only where there is no
        // other.
        let epochs = if self.epochs.len() > 1 { &self.epochs[1..] } else { &self.epochs };
        let used = |epoch: &Epoch| {
            let new = if self.epochs.len() > 1 { (epoch.looks[0].resident - epoch.resident).max(0.0) } else { 0.0 };
            saturating_u64(epoch.looks[0].used - new)
        };
        let mut first: Vec<(u64, u64)> =
            epochs.iter().map(|epoch| (used(epoch), saturating_u64(epoch.looks[0].since_ms))).collect();
        first.sort_unstable();
        let within = first.iter().map(|look| look.1).max().unwrap_or(0);
        first.get((first.len() * 9).saturating_sub(1) / 10).map_or((0, 0), |look| (look.0, within))
    }

    /// Returns the number of pages that are needed again after they have left, with `near_bytes`
    /// near.
    pub fn misses(&self, near_bytes: u64) -> MissRate {
        let (mut bytes, mut unknown_ms, mut silent_ms, mut before_ms) = (0.0, 0, 0, 0);
        for epoch in &self.epochs {
            let time_ms = epoch.at_ms - before_ms;
            before_ms = epoch.at_ms;
            match epoch.estimate(near_bytes as f64) {
                MissRateEstimate::Rate(rate) => bytes += rate * time_ms as f64,
                MissRateEstimate::AtLeast(rate) => {
                    bytes += rate * time_ms as f64;
                    unknown_ms += time_ms;
                }
                MissRateEstimate::Nothing => silent_ms += time_ms,
            }
        }
        let all_ms = before_ms.max(1) as f64;
        let said = 1.0 - silent_ms as f64 / all_ms;
        if said < 1.0 - SILENT_MAX {
            return MissRate { misses: 0.0, unknown_share: 1.0 };
        }
        MissRate { misses: bytes / said / PAGE_BYTES as f64, unknown_share: unknown_ms as f64 / all_ms / said }
    }
}

impl Epoch {
    fn estimate(&self, near: f64) -> MissRateEstimate {
        let mut before = WorkingSetSample { since_ms: 0.0, used: 0.0, resident: self.resident };
        let mut slope = 0.0;
        for (index, look) in self.looks.iter().enumerate() {
            // Memory that came to be meanwhile is not missed.
            let used = look.used - before.used - (look.resident - before.resident).max(0.0);
            slope = (used / (look.since_ms - before.since_ms).max(1.0)).max(0.0);
            if look.used > near {
                let new = (look.resident - self.resident).max(0.0);
                return match index {
                    _ if new > look.used * NEW_MAX => MissRateEstimate::Nothing,
                    0 => MissRateEstimate::AtLeast(slope),
                    _ => MissRateEstimate::Rate(slope),
                };
            }
            before = *look;
        }
        // No look was long enough to see so much used. What is used more rarely is less: none when
        // all fits.
        let left = ((before.resident - near) / (before.resident - before.used).max(1.0)).clamp(0.0, 1.0);
        MissRateEstimate::Rate(slope * left)
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a prediction without faults for a program that will thrash.
    use super::super::Sample;
    use super::*;
    use alloc::vec;

    const MIB: u64 = 1 << 20;

    /// Epochs of ten looks, 100 ms apart, of a program whose use within a time is known.
    fn observation(epochs: u32, resident: u64, used: impl Fn(u64) -> u64) -> Observation {
        let mut samples = Vec::new();
        for epoch in 0..epochs {
            for look in 1..=10 {
                samples.push(Sample {
                    at_ms: (u64::from(epoch) * 10 + look) * 100,
                    epoch,
                    since_ms: look * 100,
                    anonymous_bytes: resident,
                    anonymous_used_bytes: used(look * 100),
                    ..Sample::default()
                });
            }
        }
        Observation { samples, ..Observation::default() }
    }

    fn misses(observation: &Observation, near: u64) -> MissRate {
        WorkingSet::of(observation).misses(near)
    }

    #[test]
    fn a_loop_over_more_than_is_near_misses_every_page() {
        // 100 MiB per second, over 100 MiB, for ten seconds.
        let run = observation(10, 100 * MIB, |ms| (100 * MIB * ms / 1000).min(100 * MIB));
        let all = misses(&run, 50 * MIB);
        assert_eq!((all.misses, all.unknown_share), (10.0 * 25_600.0, 0.0));
        assert_eq!(misses(&run, 100 * MIB).misses, 0.0);
        assert_eq!(misses(&run, 90 * MIB).misses, all.misses, "a little is as bad as much");
    }

    #[test]
    fn a_hot_part_that_is_near_misses_nothing() {
        let run = observation(10, 100 * MIB, |_| 20 * MIB);
        assert_eq!(misses(&run, 20 * MIB).misses, 0.0);
        let below = misses(&run, 10 * MIB);
        assert_eq!(below.unknown_share, 1.0, "within 100 ms all of it is used, how often nobody knows");
        assert!(below.misses >= 20.0 * 256.0);
    }

    #[test]
    fn new_memory_is_not_missed() {
        let mut run = observation(1, 0, |ms| 100 * MIB * ms / 1000);
        for sample in &mut run.samples {
            sample.anonymous_bytes = sample.anonymous_used_bytes;
        }
        assert_eq!(misses(&run, 50 * MIB), MissRate { misses: 0.0, unknown_share: 1.0 }, "nor seen to be used again");
        assert_eq!(misses(&run, 100 * MIB), MissRate::default());
    }

    #[test]
    fn misses_of_new_memory_are_estimated_from_other_epochs() {
        // A loop over 100 MiB, 100 MiB per second; all of it comes to be in the first of so many seconds.
        let run = |epochs: u32| {
            let mut run = observation(epochs, 100 * MIB, |ms| 100 * MIB * ms / 1000);
            run.samples[..10].iter_mut().for_each(|sample| sample.anonymous_bytes = sample.anonymous_used_bytes);
            misses(&run, 50 * MIB)
        };
        assert_eq!(run(1).unknown_share, 1.0);
        assert_eq!(run(2), MissRate { misses: 2.0 * 25_600.0, unknown_share: 0.0 });
        assert_eq!(run(10), MissRate { misses: 10.0 * 25_600.0, unknown_share: 0.0 });
    }

    #[test]
    fn more_near_never_misses_more_where_working_sets_grow_slower_and_slower() {
        // What random use looks like: 1 - 2^-t of it is used after t.
        let part = |ms: u64| 1.0 - 1.0 / (1.0 + ms as f64 / 200.0);
        let run = observation(5, 200 * MIB, |ms| (200.0 * MIB as f64 * part(ms)) as u64);
        let rates: Vec<f64> = (0..=200).map(|near| misses(&run, near * MIB).misses).collect();
        assert!(rates.windows(2).all(|pair| pair[0] >= pair[1]), "{rates:?}");
        assert!(rates[0] > 0.0 && rates[200] == 0.0);
    }

    #[test]
    fn hot_is_what_most_epochs_use_at_once() {
        let mut run = observation(10, 100 * MIB, |ms| ms * MIB / 100);
        assert_eq!(WorkingSet::of(&run).hot(), (MIB, 100));
        run.samples[0].anonymous_used_bytes = 90 * MIB;
        assert_eq!(WorkingSet::of(&run).hot(), (MIB, 100), "what was made is not what is used");
        for run in [observation(11, 100 * MIB, |ms| ms * MIB / 100), observation(1, 100 * MIB, |ms| ms * MIB / 100)] {
            assert_eq!(WorkingSet::of(&run).hot(), (MIB, 100));
        }
        let mut run = observation(3, 100 * MIB, |ms| ms * MIB / 100);
        for sample in &mut run.samples[10..] {
            (sample.anonymous_bytes, sample.anonymous_used_bytes) = (150 * MIB, sample.anonymous_used_bytes + 50 * MIB);
        }
        run.samples[20..].iter_mut().for_each(|sample| sample.anonymous_used_bytes -= 50 * MIB);
        assert_eq!(WorkingSet::of(&run).hot(), (MIB, 100), "what is new is not what is used");
        let mut run = observation(11, 100 * MIB, |ms| ms * MIB / 100);
        run.samples[50].anonymous_used_bytes = 90 * MIB;
        assert_eq!(WorkingSet::of(&run).hot(), (MIB, 100), "one of ten does not count");
        assert_eq!(WorkingSet::of(&Observation::default()).hot(), (0, 0));
        assert_eq!(misses(&Observation { samples: vec![], ..run }, 1).misses, 0.0);
    }
}
