//! Use of memory over time, in bounded space.
//!
//! A series has at most [`BINS`] bins of equal width. When a sample lies beyond the last, each two
//! neighbours become one. A bin has the largest of its samples, so that a job never counts with less
//! than it used.

use super::super::UsageStep;

/// Most bins of a series.
const BINS: usize = 64;
/// Amounts that are told apart, as parts of what a job asked for. Use is rounded up to the next.
pub(super) const LEVELS: u32 = 16;

/// Series of amounts at rising times.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageSeries {
    /// Distance of samples, and the times of the first and the last.
    every_s: f64,
    first_s: f64,
    last_s: f64,
    width_s: f64,
    /// Largest sample of each bin; NaN where none is.
    bins: Vec<f64>,
    sum: f64,
    samples: u64,
}

impl UsageSeries {
    /// Makes a series of samples that are about `every_s` seconds apart.
    pub(super) fn new(every_s: f64) -> UsageSeries {
        UsageSeries { every_s, first_s: 0.0, last_s: 0.0, width_s: every_s, bins: Vec::new(), sum: 0.0, samples: 0 }
    }

    /// Adds a sample. Returns false, and adds nothing, if its time is before that of the last.
    pub(super) fn push(&mut self, at_s: f64, amount: f64) -> bool {
        if self.samples == 0 {
            self.first_s = at_s;
        } else if at_s < self.last_s {
            return false;
        }
        self.last_s = at_s;
        self.sum += amount;
        self.samples += 1;
        while self.bin_of(at_s) >= BINS {
            let pairs = self.bins.chunks(2).map(|pair| pair.iter().fold(f64::NAN, |most, amount| most.max(*amount)));
            self.bins = pairs.collect();
            self.width_s *= 2.0;
        }
        let bin = self.bin_of(at_s);
        self.bins.resize(self.bins.len().max(bin + 1), f64::NAN);
        self.bins[bin] = self.bins[bin].max(amount);
        true
    }

    fn bin_of(&self, at_s: f64) -> usize {
        // A number beyond the range becomes the largest.
        ((at_s - self.first_s) / self.width_s) as usize
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the mean of the samples.
    pub fn mean(&self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.sum / self.samples as f64 }
    }

    /// Returns the time of the first sample in seconds.
    pub(super) fn first_s(&self) -> f64 {
        self.first_s
    }

    /// Returns the seconds from the first sample to the end of the last.
    pub(super) fn span_s(&self) -> f64 {
        self.last_s - self.first_s + self.every_s
    }

    /// Returns the steps of a job that asked for `memory_bytes`, of which `limit` in this series is
    /// all. The series is stretched over the whole of the job.
    pub(super) fn steps(&self, limit: f64, memory_bytes: u64) -> Vec<UsageStep> {
        let mut steps: Vec<UsageStep> = Vec::new();
        // The first bin has the first sample.
        let mut level = 1;
        for (bin, &amount) in self.bins.iter().enumerate() {
            if !amount.is_nan() {
                level = ((amount / limit * f64::from(LEVELS)).ceil() as u32).clamp(1, LEVELS);
            }
            let part = u128::from(memory_bytes) * u128::from(level) / u128::from(LEVELS);
            let memory_bytes = u64::try_from(part).unwrap_or(memory_bytes).max(1);
            if steps.last().is_none_or(|last| last.memory_bytes != memory_bytes) {
                steps.push(UsageStep { from: bin as f64 * self.width_s / self.span_s(), memory_bytes });
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a job that counts with less than it used, and against series without a bound.
    use super::*;

    #[test]
    fn steps_follow_the_samples() {
        let mut series = UsageSeries::new(10.0);
        for (at_s, amount) in [(100.0, 1.0), (110.0, 1.0), (120.0, 9.0), (140.0, 16.0)] {
            assert!(series.push(at_s, amount));
        }
        assert!(!series.push(139.0, 5.0), "time goes back");
        let step = |from, memory_bytes| UsageStep { from, memory_bytes };
        assert_eq!(series.steps(16.0, 1600), [step(0.0, 100), step(0.4, 900), step(0.8, 1600)]);
        assert_eq!((series.samples(), series.mean(), series.span_s()), (4, 6.75, 50.0));
        assert_eq!(series.steps(1.0, 1600), [step(0.0, 1600)], "more than it asked for counts as all");
        assert_eq!(series.steps(f64::INFINITY, 7), [step(0.0, 1)]);
    }

    #[test]
    fn long_series_keep_their_peaks_and_few_bins() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut series = UsageSeries::new(1.0);
            let mut samples = Vec::new();
            let mut at_s = 1e9;
            for _ in 0..5000 {
                samples.push((at_s, random.f64()));
                assert!(series.push(at_s, samples[samples.len() - 1].1));
                at_s += if random.u8(..50) == 0 { 1e3 * random.f64() } else { random.f64() };
            }
            assert!(series.bins.len() <= BINS);
            let steps = series.steps(1.0, 1 << 40);
            for (at_s, amount) in samples {
                let part = (at_s - series.first_s()) / series.span_s();
                let step = steps.iter().rev().find(|step| step.from <= part + 1e-9).unwrap();
                let next = steps.iter().find(|step| step.from > part + 1e-9);
                let counted = step.memory_bytes.max(next.map_or(0, |next| next.memory_bytes));
                assert!(counted as f64 >= amount * (1u64 << 40) as f64, "seed {seed}, {at_s}");
            }
        }
        let mut far_away = UsageSeries::new(1.0);
        assert!(far_away.push(0.0, 1.0) && far_away.push(1e12, 2.0));
        assert!(far_away.bins.len() <= BINS);
    }
}
