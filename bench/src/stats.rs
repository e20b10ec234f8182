//! Median and spread of a few samples.
//!
//! Few, because a run of a far-memory experiment takes seconds: so the median, the extremes, and no distribution is
//! assumed.

use serde::{Deserialize, Serialize};

/// What is kept of a list of samples, besides the list.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The middle sample, or the mean of the two in the middle.
    pub median: f64,
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// (max - min) / median.
    pub spread: f64,
}

/// Summary of `samples`; `None` if there are none or one is not a number.
pub fn summary(samples: &[f64]) -> Option<Summary> {
    if samples.is_empty() || samples.iter().any(|s| !s.is_finite()) {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (sorted[0], sorted[sorted.len() - 1]);
    let half = sorted.len() / 2;
    let median = if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 };
    let spread = if median == 0.0 { 0.0 } else { (max - min) / median };
    Some(Summary { median, min, max, spread })
}

/// Ratio of two lists of samples taken in turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Median of `of` over median of `to`.
    pub ratio: f64,
    /// Smallest ratio of a pair taken one after the other.
    pub low: f64,
    /// Largest ratio of such a pair.
    pub high: f64,
}

/// How much `of` takes of `to`. Low and high come from the pairs, so that drift of the machine cancels.
pub fn ratio(of: &[f64], to: &[f64]) -> Option<Ratio> {
    let (mine, theirs) = (summary(of)?, summary(to)?);
    if theirs.min <= 0.0 {
        return None;
    }
    let pairs: Vec<f64> = of.iter().zip(to).map(|(a, b)| a / b).collect();
    let pairs = summary(&pairs)?;
    Some(Ratio { ratio: mine.median / theirs.median, low: pairs.min, high: pairs.max })
}

/// Compares what `of` takes more than `base` with what `to` takes more than it. `None` unless `to` takes more each time.
pub fn excess(of: &[f64], to: &[f64], base: &[f64]) -> Option<Ratio> {
    let over = |times: &[f64]| times.iter().zip(base).map(|(time, base)| time - base).collect::<Vec<_>>();
    ratio(&over(of), &over(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_single_lists() {
        let median = |samples: &[f64]| summary(samples).unwrap().median;
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn spread_is_relative_to_the_median() {
        let s = summary(&[10.0, 8.0, 14.0]).unwrap();
        assert_eq!((s.min, s.max), (8.0, 14.0));
        assert!((s.spread - 0.6).abs() < 1e-12);
    }

    #[test]
    fn no_samples_or_no_number_is_no_summary() {
        assert_eq!(summary(&[]), None);
        assert_eq!(summary(&[1.0, f64::NAN]), None);
        assert_eq!(ratio(&[1.0], &[0.0]), None);
        assert_eq!(ratio(&[1.0], &[]), None);
    }

    #[test]
    fn an_excess_leaves_out_what_the_program_takes_alone() {
        let check = |of: &[f64], expected: Option<f64>| {
            assert_eq!(excess(of, &[140.0, 160.0, 180.0], &[80.0, 80.0, 100.0]).map(|r| r.ratio), expected, "{of:?}");
        };
        check(&[100.0, 100.0, 120.0], Some(0.25));
        check(&[80.0, 80.0, 90.0], Some(0.0));
        assert_eq!(excess(&[2.0, 2.0], &[3.0, 1.0], &[1.0, 1.0]), None, "nothing to compare with, once");
        let paired = excess(&[20.0, 40.0], &[30.0, 60.0], &[10.0, 20.0]).unwrap();
        assert_eq!((paired.ratio, paired.low, paired.high), (0.5, 0.5, 0.5));
    }

    #[test]
    fn drift_that_hits_both_alike_leaves_the_pairs_alike() {
        // The machine gets twice as slow half way; each pair still says one half.
        let r = ratio(&[1.0, 2.0, 2.0], &[2.0, 4.0, 4.0]).unwrap();
        assert_eq!(r, Ratio { ratio: 0.5, low: 0.5, high: 0.5 });
    }
}
