//! Search for the least near budget with which a program is fast enough: which size to try next.
//!
//! More near memory never makes a program slower, so a binary search is enough, between the largest
//! size that was too slow and the least that was not. It halves the ratio, not the distance: the
//! answer is wanted to a relative precision, however little of the program's memory it is.

use crate::geometry::PAGE_BYTES;

/// Bounds and precision of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetSearch {
    /// Least budget that can be tried, in bytes.
    pub least: u64,
    /// Budget known to be fast enough without a try: all that the program has, in bytes.
    pub most: u64,
    /// Relative distance from the answer that is close enough.
    pub precision: f64,
}

impl BudgetSearch {
    /// Returns the size to try after `tried`: all tries so far, each with whether it was fast
    /// enough. `None`: the least is known.
    pub fn next(&self, tried: &[(u64, bool)]) -> Option<u64> {
        let sizes = |was_fast: bool| tried.iter().filter(move |size| size.1 == was_fast).map(|size| size.0);
        let fast = sizes(true).min().unwrap_or(self.most);
        let slow = sizes(false).filter(|size| *size < fast).max();
        let below = slow.unwrap_or(self.least);
        let half = u64::try_from((u128::from(below) * u128::from(fast)).isqrt()).unwrap_or(fast);
        let half = half.max(below.saturating_add(1)).next_multiple_of(PAGE_BYTES as u64);
        let apart = fast.saturating_sub(below);
        if half < fast && apart as f64 > fast as f64 * self.precision {
            return Some(half);
        }
        // Nothing was too slow: the least has not been tried, unless it was the last.
        (slow.is_none() && self.least < fast).then_some(self.least)
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a search that never ends, or ends at a size that is too slow.
    use super::*;
    use alloc::vec::Vec;

    const MIB: u64 = 1 << 20;

    /// All that is tried until it is known from which size on it is fast enough.
    fn tries(seek: BudgetSearch, enough: u64) -> Vec<(u64, bool)> {
        let mut tried = Vec::new();
        while let Some(size) = seek.next(&tried) {
            assert!((seek.least..seek.most).contains(&size) && !tried.iter().any(|known| known.0 == size), "{tried:?}");
            tried.push((size, size >= enough));
        }
        tried
    }

    #[test]
    fn the_least_size_is_found_to_a_part_of_it_in_few_tries() {
        for peak in [17, 64, 256, 10_240] {
            let seek = BudgetSearch { least: 16 * MIB, most: peak * MIB, precision: 0.05 };
            for enough in (0..=peak + 1).step_by((peak / 60).max(1) as usize) {
                let tried = tries(seek, enough * MIB);
                let found = tried.iter().filter(|size| size.1).map(|size| size.0).min().unwrap_or(seek.most);
                let least = (enough * MIB).clamp(seek.least, seek.most);
                assert!(found >= least && found as f64 * 0.95 <= least as f64, "{peak} {enough}: {found}");
                assert!(tried.len() <= if peak > 1024 { 8 } else { 7 }, "{tried:?}");
            }
        }
    }

    #[test]
    fn a_program_as_small_as_the_least_size_is_not_tried() {
        let seek = |most: u64, precision: f64| BudgetSearch { least: 16 * MIB, most, precision };
        assert!(tries(seek(MIB, 0.0), 0).is_empty() && tries(seek(16 * MIB, 0.0), 0).is_empty());
        assert_eq!(tries(seek(16 * MIB + 1, 0.05), 0), [(16 * MIB, true)]);
        assert!(tries(seek(18 * MIB, 0.0), 17 * MIB).contains(&(17 * MIB, true)), "to a page");
    }

    #[test]
    fn one_that_is_too_slow_above_one_that_is_not_is_chance() {
        let seek = BudgetSearch { least: 16 * MIB, most: 256 * MIB, precision: 0.05 };
        let next = seek.next(&[(200 * MIB, false), (100 * MIB, true), (81 * MIB, false)]);
        assert_eq!(next, Some(90 * MIB));
    }
}
