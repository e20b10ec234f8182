//! The conformance test of collections: a far one and its std twin take the same random steps, with little to everything near.
//!
//! Dangers: elements mixed up, lost, torn, or dropped never or twice; near memory beyond the budget.

use super::{MIB, Rng, assert_in_budget, builder, is_deep, seed};
use farfield::{Heap, Stats};

/// A far collection and its twin.
pub(crate) trait Twin: Sized {
    /// Both with about so many bytes of elements.
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Self;
    /// One random operation on both, in a scope of its own, with equal results. The size should not drift far away.
    fn step(&mut self, heap: &Heap, random: &mut Rng);
    /// Every element of one is in the other.
    fn compare(&self, heap: &Heap);
}

/// Steps of a test; a hundred times as many with `FARFIELD_DEEP=1`.
pub(crate) fn steps(few: u64) -> u64 {
    if is_deep() { few * 100 } else { few }
}

/// Elements of a test that looks at whole collections; eight times as many with `FARFIELD_DEEP=1`.
pub(crate) fn elements(few: usize) -> usize {
    if is_deep() { few * 8 } else { few }
}

/// How often the heap is looked at in each half of the steps, whatever the evictor and prefetches are doing.
fn looks() -> u64 {
    if is_deep() { 8 } else { 2 }
}

/// So many random steps with this share of the elements near.
pub(crate) fn random_steps<T: Twin>(near_percent: u64, few: u64) -> Stats {
    let mut random = Rng::with_seed(seed() ^ near_percent << 32);
    // The smallest heap has 1 MiB near.
    let bytes = (MIB * 100 / near_percent).max(4 * MIB);
    let near = if near_percent < 100 { bytes * near_percent / 100 } else { bytes * 4 };
    // What long histories hold grows, and they leave holes, whose tables are near too.
    let near = if is_deep() { near * 2 } else { near };
    let heap = builder().near(near).near_max(near).far(1 << 30).paranoid(true).build().unwrap();
    let mut twin = T::filled(&heap, bytes, &mut random);
    for _ in 0..2 {
        for _ in 0..looks() {
            for _ in 0..steps(few) / 2 / looks() {
                twin.step(&heap, &mut random);
            }
            assert_in_budget(&heap);
            heap.verify();
        }
        twin.compare(&heap);
    }
    let stats = heap.stats();
    assert_in_budget(&heap);
    assert_eq!(stats.misses > 0, near_percent < 100, "{stats:?}");
    drop(twin);
    heap.verify();
    assert_eq!(heap.stats().lost_values, 0);
    println!("{stats:?}");
    stats
}

/// Four threads take random steps in one heap, each with a collection of its own and a quarter of it near.
pub(crate) fn random_steps_of_threads<T: Twin>(few: u64) {
    let seed = seed();
    let near = 4 * MIB;
    let heap = builder().near(near).near_max(near).far(1 << 30).paranoid(true).build().unwrap();
    std::thread::scope(|threads| {
        let take_steps = |thread: u64| {
            let heap = &heap;
            move || {
                let mut random = Rng::with_seed(seed ^ thread << 48);
                let mut twin = T::filled(heap, near, &mut random);
                for _ in 0..steps(few) / 4 {
                    twin.step(heap, &mut random);
                }
                twin.compare(heap);
            }
        };
        // Joined, so that what they give back when they end is back.
        let all = [1, 2, 3, 4].map(|thread| threads.spawn(take_steps(thread)));
        all.into_iter().for_each(|thread| thread.join().unwrap());
    });
    heap.verify();
    let stats = heap.stats();
    assert_in_budget(&heap);
    assert!(stats.misses > 0 && stats.lost_values == 0, "{stats:?}");
}

/// A module of tests, one per near share, and one with threads: `twins!(name, Type, steps)`.
macro_rules! twins {
    ($name:ident, $twin:ty, $steps:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn little_near() {
                $crate::common::twin::random_steps::<$twin>($crate::common::little_percent(), $steps);
            }

            #[test]
            fn a_tenth_near() {
                $crate::common::twin::random_steps::<$twin>(10, $steps);
            }

            #[test]
            fn a_quarter_near() {
                $crate::common::twin::random_steps::<$twin>(25, $steps);
            }

            #[test]
            fn half_near() {
                $crate::common::twin::random_steps::<$twin>(50, $steps);
            }

            #[test]
            fn four_threads() {
                $crate::common::twin::random_steps_of_threads::<$twin>($steps);
            }

            #[test]
            fn everything_near() {
                $crate::common::twin::random_steps::<$twin>(100, $steps);
            }
        }
    };
}
pub(crate) use twins;
