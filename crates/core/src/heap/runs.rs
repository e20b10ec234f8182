//! Free runs: the free numbers of a range, for callers that need neighbouring ones.
//!
//! First fit, lowest first, so that used numbers gather at the low end and tables stay short.

use alloc::collections::BTreeMap;

/// A set of free numbers, kept as maximal runs.
#[derive(Clone, Debug, Default)]
pub struct FreeRuns {
    /// First number of a run → its length.
    free: BTreeMap<u32, u32>,
    total: u64,
}

impl FreeRuns {
    /// Creates an empty set: nothing is free.
    pub const fn new() -> FreeRuns {
        FreeRuns { free: BTreeMap::new(), total: 0 }
    }

    /// Returns the count of free numbers.
    pub fn len(&self) -> u64 {
        self.total
    }

    /// Checks whether nothing is free.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Takes `count` neighbouring numbers out of the set; returns the first of them.
    pub fn take(&mut self, count: u32) -> Option<u32> {
        self.take_below(u32::MAX, count)
    }

    /// Takes `count` neighbouring numbers below `end` out of the set; returns the first of them.
    pub fn take_below(&mut self, end: u32, count: u32) -> Option<u32> {
        self.take_at(end, count, Some)
    }

    /// Takes `count` neighbouring numbers below `end` out of the set, and returns the first of them.
    /// `next` returns the least number, not below another one, with which they may begin.
    pub fn take_at(&mut self, end: u32, count: u32, next: impl Fn(u32) -> Option<u32>) -> Option<u32> {
        assert!(count > 0);
        let place = |(first, length): (&u32, &u32)| {
            let at = next(*first)?;
            assert!(at >= *first);
            let is_free = at.checked_add(count)? <= (first + length).min(end);
            is_free.then_some((*first, *length, at))
        };
        let (first, length, at) = self.free.range(..end).find_map(place)?;
        self.free.remove(&first);
        if at > first {
            self.free.insert(first, at - first);
        }
        let (taken_end, free_end) = (at + count, first + length);
        if free_end > taken_end {
            self.free.insert(taken_end, free_end - taken_end);
        }
        self.total -= u64::from(count);
        Some(at)
    }

    /// Takes up to `count` neighbouring numbers out of the highest run; returns the first of them
    /// and how many.
    pub fn take_last(&mut self, count: u32) -> Option<(u32, u32)> {
        assert!(count > 0);
        let (first, length) = self.free.pop_last()?;
        let taken = count.min(length);
        if length > taken {
            self.free.insert(first, length - taken);
        }
        self.total -= u64::from(taken);
        Some((first + length - taken, taken))
    }

    /// Puts `count` numbers from `first` on back. They must not be free.
    pub fn put(&mut self, first: u32, count: u32) {
        assert!(count > 0);
        let end = first.checked_add(count).expect("numbers of 32 bits");
        let (mut first, mut count) = (first, count);
        self.total += u64::from(count);
        if let Some((&before, &length)) = self.free.range(..first).next_back() {
            assert!(before + length <= first, "freed twice");
            if before + length == first {
                self.free.remove(&before);
                (first, count) = (before, count + length);
            }
        }
        if let Some((&after, &length)) = self.free.range(first..).next() {
            assert!(after >= end, "freed twice");
            if after == end {
                self.free.remove(&after);
                count += length;
            }
        }
        self.free.insert(first, count);
    }

    /// Checks whether `number` is free.
    pub fn contains(&self, number: u32) -> bool {
        self.free.range(..=number).next_back().is_some_and(|(first, length)| number - first < *length)
    }

    /// Iterates over the runs as first number and length, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.free.iter().map(|(first, length)| (*first, *length))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a number that two parties own.
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_bitmap(
            step in 1u32..5,
            offset in 0u32..5,
            steps in proptest::collection::vec((1u32..9, 1u32..120, any::<bool>()), 1..200),
        ) {
            let mut runs = FreeRuns::new();
            runs.put(0, 100);
            let mut free = [true; 100];
            let mut taken: Vec<(u32, u32)> = Vec::new();
            // Runs of four begin at such numbers only.
            let may_begin = |count: u32, first: u32| count != 4 || first >= offset && (first - offset).is_multiple_of(step);
            for (count, end, take) in steps {
                if take {
                    let below = &free[..free.len().min(end as usize)];
                    let mut windows = below.windows(count as usize).enumerate();
                    let fits = windows.position(|(at, w)| may_begin(count, at as u32) && w.iter().all(|f| *f));
                    let got = match count {
                        4 => runs.take_at(end, count, |from| (from..).find(|first| may_begin(count, *first))),
                        _ => runs.take_below(end, count),
                    };
                    prop_assert_eq!(got.map(|first| first as usize), fits, "first fit");
                    if let Some(first) = got {
                        free[first as usize..][..count as usize].fill(false);
                        taken.push((first, count));
                    }
                } else if !taken.is_empty() {
                    let (first, count) = taken.swap_remove(count as usize % taken.len());
                    runs.put(first, count);
                    free[first as usize..][..count as usize].fill(true);
                }
                prop_assert_eq!(runs.len() as usize, free.iter().filter(|f| **f).count());
                for (number, is_free) in free.iter().enumerate() {
                    prop_assert_eq!(runs.contains(number as u32), *is_free);
                }
                let ends: Vec<_> = runs.iter().collect();
                prop_assert!(ends.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "runs are maximal");
            }
        }
    }

    #[test]
    fn the_highest_go_first_when_asked() {
        let mut runs = FreeRuns::new();
        assert_eq!(runs.take_last(1), None);
        runs.put(0, 4);
        runs.put(10, 6);
        assert_eq!(runs.take_last(4), Some((12, 4)));
        assert_eq!(runs.take_last(4), Some((10, 2)));
        assert_eq!(runs.take_last(4), Some((0, 4)));
        assert!(runs.is_empty());
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn putting_back_twice_is_noticed() {
        let mut runs = FreeRuns::new();
        runs.put(4, 4);
        runs.put(6, 1);
    }
}
