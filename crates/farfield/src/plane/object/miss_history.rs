//! Decides whether the values of a class are better off without handles.
//!
//! A handle lets a value move, which sorts the wanted values from the others. Where pages come
//! whole anyway there is nothing to sort, and handles only cost room and an extra read. So when at
//! least half of the misses of a class bring whole pages, its new values are made as on the page
//! plane. Values that have handles keep them. One page of values in sixteen still gets handles, so
//! that a change in the behaviour of the values is noticed.

use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::heap::{IngressPath, LogClass};

/// Recent misses of one class, by path, and the number of values made since without a handle. The
/// counts are approximate: threads do not synchronise here.
#[derive(Default)]
pub(super) struct MissHistory {
    by_page: AtomicU32,
    by_object: AtomicU32,
    made: AtomicU32,
}

/// Least number of misses from which anything is concluded.
const LEAST: u32 = 512;
/// Number of misses by one path at which both counts are halved.
const MOST: u32 = 4096;
/// Number of pages of values of which one gets handles all the same.
const TRY_EVERY: u32 = 16;

impl MissHistory {
    /// Counts a miss of a value with a handle, which comes by this path.
    pub(super) fn missed(&self, path: IngressPath) {
        let (one, other) = match path {
            IngressPath::Page => (&self.by_page, &self.by_object),
            IngressPath::Object => (&self.by_object, &self.by_page),
        };
        let now = one.fetch_add(1, Ordering::Relaxed) + 1;
        if now >= MOST {
            one.store(now / 2, Ordering::Relaxed);
            other.store(other.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
    }

    /// Checks whether most new values of this class are made without handles.
    pub(super) fn skips_handles(&self) -> bool {
        let (by_page, by_object) = (self.by_page.load(Ordering::Relaxed), self.by_object.load(Ordering::Relaxed));
        by_page + by_object >= LEAST && by_page >= by_object
    }

    /// Decides whether a new value of this class is made without a handle.
    pub(super) fn should_skip_handle(&self, class: LogClass) -> bool {
        if !self.skips_handles() {
            return false;
        }
        let made = self.made.fetch_add(1, Ordering::Relaxed);
        !(made / class.capacity()).is_multiple_of(TRY_EVERY)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against classes that never change, or by chance.
    use super::*;
    use crate::ptr::Follow;
    use crate::{FarBox, Heap, Plane};

    fn without(history: &MissHistory, class: LogClass) -> usize {
        (0..TRY_EVERY * class.capacity()).filter(|_| history.should_skip_handle(class)).count()
    }

    #[test]
    fn values_whose_pages_come_whole_have_no_handles_but_some() {
        let class = LogClass::of(64, 8).unwrap();
        let history = MissHistory::default();
        (1..LEAST).for_each(|_| history.missed(IngressPath::Page));
        assert_eq!(without(&history, class), 0, "too little is known");
        history.missed(IngressPath::Page);
        assert_eq!(without(&history, class), 15 * class.capacity() as usize);
    }

    #[test]
    fn old_misses_do_not_count() {
        let class = LogClass::of(64, 8).unwrap();
        let history = MissHistory::default();
        (0..100 * MOST).for_each(|_| history.missed(IngressPath::Page));
        assert!(without(&history, class) > 0);
        (0..2 * MOST).for_each(|_| history.missed(IngressPath::Object));
        assert_eq!(without(&history, class), 0);
        (0..2 * MOST).for_each(|_| history.missed(IngressPath::Page));
        assert!(without(&history, class) > 0);
    }
    #[test]
    fn programs_that_read_everything_in_turn_come_to_have_no_handles() {
        for (plane, expected) in [(Plane::Hybrid, true), (Plane::Object, false)] {
            let heap = Heap::builder().near(2 << 20).near_max(2 << 20).plane(plane).alone_above(0).build().unwrap();
            let make = |index: u64| heap.alloc([index; 8]).unwrap();
            let mut values: Vec<FarBox<[u64; 8]>> = (0..60_000).map(make).collect();
            let check = |values: &[FarBox<[u64; 8]>]| {
                let is_right =
                    |(index, value): (usize, &FarBox<[u64; 8]>)| value.get(&heap.enter()).unwrap()[0] == index as u64;
                assert!(values.iter().enumerate().all(is_right));
            };
            (0..4).for_each(|_| check(&values));
            values.extend((60_000..70_000).map(make));
            let has_handle =
                |value: &&FarBox<[u64; 8]>| value.pointer().number_in(heap.core()).unwrap() >= heap.core().pages;
            assert_eq!(values[..60_000].iter().filter(has_handle).count(), 60_000);
            let later = values[60_000..].iter().filter(has_handle).count();
            assert_eq!(later < 2_000, expected, "{later} of 10000 on {plane:?}");
            check(&values);
            heap.verify();
        }
    }
}
