//! Noise of trials: what paired runs say about the difference of two purchases.
//!
//! Both purchases are simulated with the same seeds. The gains of the pairs are sorted, and the
//! interval between two of them holds the true median with a confidence of at least 95 %, whatever
//! the distribution (sign test; Hettmansperger and McKean, *Robust Nonparametric Statistical
//! Methods*, section 1.3).

use serde::Serialize;

/// Least number of trials whose noise can be judged: with fewer, even the interval from the least to
/// the largest gain holds the median with less than 95 %.
pub const TRIALS_MIN: usize = 6;

/// Probability with which an interval may miss the median.
const MISS: f64 = 0.05;
/// Gain that is nothing but rounding.
const ROUNDING: f64 = 1e-9;

/// Gain of one purchase over another, as a part: 0.1 is done 10 % sooner.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GainInterval {
    /// Median over the trials.
    pub median: f64,
    /// Lower end of the interval that holds the true median with 95 %.
    pub low: f64,
    /// Upper end of that interval.
    pub high: f64,
}

impl GainInterval {
    /// Computes the gain of runs that took `times_s` over those that took `over_s` with the same
    /// seeds. There are as many of both, at least [`TRIALS_MIN`].
    pub(super) fn of(times_s: &[f64], over_s: &[f64]) -> GainInterval {
        let mut gains: Vec<f64> = times_s.iter().zip(over_s).map(|(time, over)| over / time - 1.0).collect();
        gains.sort_by(f64::total_cmp);
        let (count, rank) = (gains.len(), outer_rank(gains.len()));
        let half = count / 2;
        let median = if count % 2 == 1 { gains[half] } else { f64::midpoint(gains[half - 1], gains[half]) };
        GainInterval { median, low: gains[rank], high: gains[count - 1 - rank] }
    }

    /// Tells whether there is a gain beyond the noise of the trials.
    pub fn is_certain(&self) -> bool {
        self.low > ROUNDING
    }
}

/// Returns how many gains lie outside of the interval at each end: the most whose binomial
/// probability is at most that of a miss.
fn outer_rank(count: usize) -> usize {
    // Logarithms, because half to the power of a thousand is below all numbers.
    let mut log_term = -(count as f64) * std::f64::consts::LN_2;
    let mut tails = 2.0 * log_term.exp();
    let mut rank = 0;
    while rank + 1 < count {
        log_term += ((count - rank) as f64 / (rank + 1) as f64).ln();
        tails += 2.0 * log_term.exp();
        if tails > MISS {
            break;
        }
        rank += 1;
    }
    rank
}

#[cfg(test)]
mod tests {
    //! Guards against chance that is sold as a gain.
    use super::*;
    use crate::sim::SplitMix64;

    #[test]
    fn ranks_are_those_of_the_tables() {
        // Rank d of the interval from the d-th smallest to the d-th largest, less 1.
        for (count, rank) in [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3), (20, 5), (25, 7), (50, 17), (100, 39)]
        {
            assert_eq!(outer_rank(count), rank, "{count} trials");
        }
        let many = outer_rank(10_000);
        assert!((4895..4905).contains(&many), "{many}");
    }

    #[test]
    fn pairs_are_compared_and_not_sums() {
        // Seeds differ by far more than the purchases.
        let over: Vec<f64> = (0..9).map(|seed| 100.0 * f64::from(1 + seed)).collect();
        let times: Vec<f64> = over.iter().map(|time| time / 1.02).collect();
        let gain = GainInterval::of(&times, &over);
        assert!((gain.median - 0.02).abs() < 1e-12 && gain.is_certain(), "{gain:?}");
        assert!(!GainInterval::of(&over, &over).is_certain());
        let loss = GainInterval::of(&over, &times);
        assert!(loss.high < 0.0 && !loss.is_certain());
    }

    #[test]
    fn an_even_number_of_trials_has_its_median_in_the_middle() {
        let gain = GainInterval::of(&[1.0; 6], &[1.1, 1.6, 1.2, 1.5, 1.3, 1.4]);
        assert!((gain.median - 0.35).abs() < 1e-12 && (gain.low - 0.1).abs() < 1e-12, "{gain:?}");
        assert!((gain.high - 0.6).abs() < 1e-12);
    }

    #[test]
    fn chance_is_rarely_called_certain() {
        let mut random = SplitMix64::new(3);
        let mut certain = 0;
        for _ in 0..2000 {
            let mut times = || (0..15).map(|_| 100.0 + random.unit()).collect::<Vec<_>>();
            certain += u32::from(GainInterval::of(&times(), &times()).is_certain());
        }
        // One side of 95 %: at most 2.5 %.
        assert!((10..60).contains(&certain), "{certain} of 2000");
    }
}
