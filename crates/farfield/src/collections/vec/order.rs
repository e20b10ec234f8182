//! Sorting elements in place, and binary search.

use super::FarVec;
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};
use core::cmp::Ordering;
use fastrand::Rng;

impl<T: Send + 'static> FarVec<T> {
    /// Sorts the elements, without keeping the order of equal ones. Renews the scope on the way.
    ///
    /// Quicksort between far pages, in place. A part that fits in near memory is brought near once.
    /// Before that, each halving of the parts reads and writes everything once. If it fails, all
    /// elements are there, in some order.
    ///
    /// ```
    /// # use farfield::{FarVec, Heap};
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// # let mut scope = heap.enter();
    /// let mut numbers = FarVec::new();
    /// numbers.extend(&scope, [3, 1, 2])?;
    /// numbers.sort_unstable(&mut scope)?;
    /// assert_eq!(numbers.binary_search(&scope, &3)?, Ok(2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sort_unstable(&mut self, scope: &mut Scope<'_>) -> Result<(), FarError>
    where
        T: Ord,
    {
        self.sort_unstable_by(scope, T::cmp)
    }

    /// Sorts the elements by a key: see [`FarVec::sort_unstable`].
    pub fn sort_unstable_by_key<K: Ord>(
        &mut self,
        scope: &mut Scope<'_>,
        mut key: impl FnMut(&T) -> K,
    ) -> Result<(), FarError> {
        self.sort_unstable_by(scope, |one, other| key(one).cmp(&key(other)))
    }

    /// Sorts the elements in the order that `compare` defines: see [`FarVec::sort_unstable`].
    pub fn sort_unstable_by(
        &mut self,
        scope: &mut Scope<'_>,
        mut compare: impl FnMut(&T, &T) -> Ordering,
    ) -> Result<(), FarError> {
        scope.renew();
        let _patient = scope.allow_blocking();
        let mut random = Rng::with_seed(self.len as u64);
        let mut parts = vec![(0, self.len)];
        while let Some((start, end)) = parts.pop() {
            if end - start < 2 {
                continue;
            }
            if start / Self::PER_UNIT == (end - 1) / Self::PER_UNIT {
                self.sort_unit(scope, start, end, &mut compare)?;
                continue;
            }
            self.choose_pivot(scope, start, end, &mut random, &mut compare)?;
            let middle = self.partition(scope, start, end, &mut compare)?;
            let (before, after) = ((start, middle), (middle + 1, end));
            // The smaller part first: so there are never more parts than bits in the length.
            let before_is_smaller = middle - start < end - middle;
            parts.extend(if before_is_smaller { [after, before] } else { [before, after] });
        }
        Ok(())
    }

    /// Sorts elements of one unit.
    fn sort_unit(
        &mut self,
        scope: &Scope<'_>,
        start: usize,
        end: usize,
        compare: &mut impl FnMut(&T, &T) -> Ordering,
    ) -> Result<(), FarError> {
        let _held = scope.hold();
        let first = self.element(scope, start, AccessMode::Write)?;
        // SAFETY: elements of one unit lie side by side, near as long as the scope is held, and
        // ours alone (`&mut self`).
        unsafe { core::slice::from_raw_parts_mut(first, end - start) }.sort_unstable_by(compare);
        Ok(())
    }

    /// Brings the median of three random elements to the start, so that no input order is a bad
    /// one.
    fn choose_pivot(
        &mut self,
        scope: &Scope<'_>,
        start: usize,
        end: usize,
        random: &mut Rng,
        compare: &mut impl FnMut(&T, &T) -> Ordering,
    ) -> Result<(), FarError> {
        let three = [(); 3].map(|()| random.usize(start..end));
        let median = {
            let _held = scope.hold();
            let near = three.map(|index| self.element(scope, index, AccessMode::Read));
            let mut less = |one: usize, other: usize| -> Result<bool, FarError> {
                // SAFETY: elements, near as long as the scope is held; nobody changes them.
                Ok(unsafe { compare(&*near[one]?, &*near[other]?) }.is_lt())
            };
            let (low, high) = if less(1, 0)? { (1, 0) } else { (0, 1) };
            match () {
                () if less(2, low)? => low,
                () if less(high, 2)? => high,
                () => 2,
            }
        };
        self.swap(scope, start, three[median])
    }

    /// Partitions the elements around the first one: smaller ones before it, larger ones behind it.
    /// Returns its new index.
    fn partition(
        &mut self,
        scope: &Scope<'_>,
        start: usize,
        end: usize,
        compare: &mut impl FnMut(&T, &T) -> Ordering,
    ) -> Result<usize, FarError> {
        // Elements before `low` are not greater, elements from `high` on are not less.
        let (mut low, mut high) = (start + 1, end);
        while low < high {
            let _held = scope.hold();
            let pivot = self.element(scope, start, AccessMode::Read)?;
            let low_end = (low - low % Self::PER_UNIT + Self::PER_UNIT).min(high);
            let high_start = (high - 1 - (high - 1) % Self::PER_UNIT).max(low);
            let mut one = self.element(scope, low, AccessMode::Write)?;
            let mut other = self.element(scope, high - 1, AccessMode::Write)?;
            // SAFETY: three elements, each in a unit that is near as long as the scope is held, and
            // ours alone. `one` and `other` stay in their units: at least one element is left in
            // each when they move. References end before elements are swapped.
            unsafe {
                loop {
                    while low < low_end.min(high) && compare(&*one, &*pivot).is_lt() {
                        (one, low) = (one.wrapping_add(1), low + 1);
                    }
                    if low >= low_end.min(high) {
                        break;
                    }
                    while high > high_start.max(low) && compare(&*pivot, &*other).is_lt() {
                        (other, high) = (other.wrapping_sub(1), high - 1);
                    }
                    if high <= high_start.max(low) {
                        break;
                    }
                    if high - low > 1 {
                        one.swap(other);
                        (other, high) = (other.wrapping_sub(1), high - 1);
                    }
                    (one, low) = (one.wrapping_add(1), low + 1);
                    if low >= low_end.min(high) || high <= high_start {
                        break;
                    }
                }
            }
        }
        self.swap(scope, start, low - 1)?;
        Ok(low - 1)
    }

    /// Searches a sorted vector. Returns the index of the element, or the index at which it could
    /// be inserted, like std.
    pub fn binary_search(&self, scope: &Scope<'_>, value: &T) -> Result<Result<usize, usize>, FarError>
    where
        T: Ord,
    {
        self.binary_search_by(scope, |element| element.cmp(value))
    }

    /// Searches a vector that is sorted by this key: see [`FarVec::binary_search`].
    pub fn binary_search_by_key<K: Ord>(
        &self,
        scope: &Scope<'_>,
        value: &K,
        mut key: impl FnMut(&T) -> K,
    ) -> Result<Result<usize, usize>, FarError> {
        self.binary_search_by(scope, |element| key(element).cmp(value))
    }

    /// Searches a sorted vector with `compare`, which compares an element with the one that is
    /// searched for: see [`FarVec::binary_search`].
    pub fn binary_search_by(
        &self,
        scope: &Scope<'_>,
        mut compare: impl FnMut(&T) -> Ordering,
    ) -> Result<Result<usize, usize>, FarError> {
        let (mut low, mut high) = (0, self.len);
        while low < high {
            let middle = low.midpoint(high);
            // One element at a time, unless the scope has given references out.
            let _held = scope.hold();
            let element = self.element(scope, middle, AccessMode::Read)?;
            // SAFETY: as in `get`; near as long as the scope is held.
            match unsafe { compare(&*element) } {
                Ordering::Less => low = middle + 1,
                Ordering::Equal => return Ok(Ok(middle)),
                Ordering::Greater => high = middle,
            }
        }
        Ok(Err(low))
    }

    /// Checks whether an element equals `value`. Scans the elements in order, and renews the scope
    /// on the way.
    pub fn contains(&self, scope: &mut Scope<'_>, value: &T) -> Result<bool, FarError>
    where
        T: PartialEq,
    {
        let mut scan = self.scan(scope);
        while let Some(chunk) = scan.next_chunk()? {
            if chunk.contains(value) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
