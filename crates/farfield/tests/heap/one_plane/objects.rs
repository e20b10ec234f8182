//! The object plane: values come near alone, and lie with those that came near with them. What a box promises on every plane is in
//! `boxes.rs`. Dangers: whole pages travel after all, two threads bring one value twice, a value moves under its reader,
//! an error loses a value, handles break the budget.

use crate::common::{MIB, Rng, assert_in_budget, seed};
use farfield::{Builder, FarBox, FarBytes, FarError, FarMap, Heap, Hotness, Plane, PoolError};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

fn builder(near: u64) -> Builder {
    Heap::builder().near(near).near_max(near).far(1 << 30).paranoid(true).plane(Plane::Object)
}

/// So many values of 64 bytes, and then enough large ones that all of them have left.
fn far_values(heap: &Heap, count: u64) -> Vec<FarBox<[u64; 8]>> {
    let values = (0..count).map(|index| heap.alloc([index; 8]).unwrap()).collect();
    let pages = heap.stats().near_limit_bytes / 4096 * 2;
    let ballast: Vec<_> = (0..pages).map(|index| heap.alloc([index; 512]).unwrap()).collect();
    drop(ballast);
    values
}

#[test]
fn only_the_value_travels() {
    let heap = builder(2 * MIB).build().unwrap();
    let values = far_values(&heap, 20_000);
    let before = heap.stats();
    for (index, value) in values.iter().enumerate().step_by(100) {
        let scope = heap.enter();
        assert_eq!(*value.get(&scope).unwrap(), [index as u64; 8]);
    }
    let after = heap.stats();
    assert_eq!(after.misses - before.misses, 200, "one of each page was wanted, and is far");
    assert_eq!(after.fetched_bytes - before.fetched_bytes, 200 * 64);
    drop(values);
    heap.verify();
}

/// The same for entries of a map: nothing of other entries.
#[test]
fn only_the_entry_travels() {
    let heap = builder(2 * MIB).build().unwrap();
    let map: FarMap<u64, [u64; 63]> = FarMap::new(&heap).unwrap();
    for key in 0..10_000 {
        map.insert(&heap.enter(), key, [key; 63]).unwrap();
    }
    drop(far_values(&heap, 1));
    let before = heap.stats();
    for key in (0..10_000).step_by(50) {
        assert_eq!(map.get(&heap.enter(), &key).unwrap(), Some(&[key; 63]));
    }
    let after = heap.stats();
    assert!(after.misses - before.misses >= 190, "{after:?}");
    // An entry of 512 bytes has a place of 512: eight in a page. (One look-up in a million meets an equal hash first.)
    assert_eq!(after.fetched_bytes - before.fetched_bytes, (after.misses - before.misses) * 512);
    assert_in_budget(&heap);
    drop(map);
    heap.verify();
}

/// Pages that are being filled, for each class two by the evacuator, must not stand between all free frames for ever.
#[test]
fn large_values_find_room_among_values_of_all_sizes() {
    let heap = builder(MIB).patience(Duration::from_secs(3)).build().unwrap();
    let mut random = Rng::with_seed(seed());
    let text = [7u8; 1360];
    let mut texts: Vec<_> =
        (0..6_000).map(|_| FarBytes::copy_of(&heap.enter(), &text[..1 + random.usize(..1360)]).unwrap()).collect();
    for _ in 0..20 {
        for step in 0..1_000 {
            let scope = heap.enter();
            let index = random.usize(..if step % 4 == 0 { texts.len() } else { 100 });
            assert!(texts[index].get(&scope).unwrap().iter().all(|byte| *byte == 7));
            if step % 4 == 1 {
                texts[index] = FarBytes::copy_of(&scope, &text[..1 + random.usize(..1360)]).unwrap();
            }
        }
        let large = FarBytes::copy_of(&heap.enter(), &vec![9; 400_000]).unwrap();
        assert!(large.get(&heap.enter()).unwrap().iter().all(|byte| *byte == 9));
    }
    drop(texts);
    heap.verify();
}

/// AIFM's hot objects among cold ones: on the page plane they would need 500 pages of 256.
#[test]
fn values_that_are_used_together_come_to_lie_together() {
    let heap = builder(MIB + MIB / 2).build().unwrap();
    let values = far_values(&heap, 30_000);
    let hot: Vec<_> = values.iter().step_by(60).collect();
    for _ in 0..3 {
        for value in &hot {
            let scope = heap.enter();
            value.get(&scope).unwrap();
        }
    }
    let before = heap.stats().misses;
    for _ in 0..20 {
        for value in &hot {
            let scope = heap.enter();
            value.get(&scope).unwrap();
        }
    }
    assert_eq!(heap.stats().misses, before, "500 values of 64 bytes fit into a few pages");
    drop(values);
    heap.verify();
}

/// Neither displaces what others use.
#[test]
fn values_that_are_used_once_or_called_cold_leave_first() {
    let misses = |heap: &Heap, values: &[FarBox<[u64; 8]>], read: &dyn Fn(&FarBox<[u64; 8]>) -> u64, first: usize| {
        let before = heap.stats().misses;
        for (index, value) in values.iter().enumerate() {
            assert_eq!(read(value), (first + index) as u64);
        }
        heap.stats().misses - before
    };
    let read = |value: &FarBox<[u64; 8]>| value.read(|value| value[7]).unwrap();
    let read_once = |value: &FarBox<[u64; 8]>| value.read_once(|value| value[7]).unwrap();
    let mut displaced = Vec::new();
    for stream in [&read_once as &dyn Fn(&FarBox<[u64; 8]>) -> u64, &read] {
        let heap = builder(3 * MIB).build().unwrap();
        let values = far_values(&heap, 60_000);
        let (kept, others) = values.split_at(4_000);
        // Each was used once since it came, so none is hot.
        assert!(misses(&heap, kept, &read, 0) > 3_900);
        assert!(misses(&heap, others, stream, 4_000) > 50_000);
        displaced.push(misses(&heap, kept, &read, 0));
        // Now they are hot, and most would outlast this; called cold, they do not.
        misses(&heap, kept, &read, 0);
        kept.iter().for_each(FarBox::cold);
        misses(&heap, &others[..35_000], &read, 4_000);
        let cold = misses(&heap, kept, &read, 0);
        assert!(cold > 2_000, "{cold} of 4000 cold ones have left");
        drop(values);
        heap.verify();
    }
    assert!(displaced[0] < 100 && displaced[1] > 3_000, "{displaced:?} displaced by a stream, of 4000");
}

#[test]
fn threads_that_want_one_far_value_get_the_same_one() {
    let heap = builder(2 * MIB).build().unwrap();
    let rounds = 300;
    let values: Vec<FarBox<[AtomicU64; 8]>> = (0..50_000).map(|_| heap.alloc(Default::default()).unwrap()).collect();
    std::thread::scope(|threads| {
        let start = |thread| {
            let (heap, values) = (&heap, &values);
            threads.spawn(move || {
                let mut random = Rng::with_seed(thread);
                // All threads go the same way, so that they meet at far values; and each pushes others out.
                for round in 0..rounds {
                    let ballast: Vec<_> = (0..8).map(|_| heap.alloc([random.u64(..); 512]).unwrap()).collect();
                    for value in values.iter().skip(round * 160 % 49_000).step_by(7).take(60) {
                        let scope = heap.enter();
                        value.get(&scope).unwrap()[3].fetch_add(1, Ordering::Relaxed);
                    }
                    drop(ballast);
                }
            })
        };
        let handles: Vec<_> = (0..4).map(start).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    let sum: u64 = values.iter().map(|value| value.get(&heap.enter()).unwrap()[3].load(Ordering::Relaxed)).sum();
    assert_eq!(sum, 4 * rounds as u64 * 60, "no increment is lost when a value moves");
    assert!(heap.stats().misses > 1000, "{:?}", heap.stats());
    drop(values);
    heap.verify();
}

/// Lowers the near budget. Nobody waits for a frame meanwhile, so the evacuator has time.
fn shrink(heap: &Heap) {
    heap.set_near(2 * MIB + MIB / 2);
    assert_in_budget(heap);
}

/// Values that are left over from full pages: the evacuator brings them together, where bringing them near one by one would be a
/// miss for each.
#[test]
fn objects_left_in_sparse_pages_are_compacted() {
    let heap = builder(6 * MIB).build().unwrap();
    let mut values: Vec<_> = (0..60_000u64).map(|index| heap.alloc([index; 8]).unwrap()).collect();
    assert_eq!(heap.stats().written_pages, 0, "everything is near: {:?}", heap.stats());
    let mut index = 0;
    values.retain(|_| {
        index += 1;
        index % 4 == 0
    });
    let check = || {
        for (index, value) in values.iter().enumerate() {
            let scope = heap.enter();
            assert_eq!(*value.get(&scope).unwrap(), [index as u64 * 4 + 3; 8]);
        }
    };
    check();
    // They lie in 900 pages, and fit into 240.
    shrink(&heap);
    assert_in_budget(&heap);
    check();
    let stats = heap.stats();
    assert!(stats.moved_values > 10_000, "{stats:?}");
    assert!(stats.misses < 5_000, "{stats:?}");
    drop(values);
    heap.verify();
}

/// Hot values among cold ones in the same pages: the cold ones leave, by each rule of what is hot.
#[test]
fn hot_values_stay_when_their_page_leaves() {
    for hotness in [Hotness::Mark, Hotness::Count, Hotness::Recency] {
        let heap = builder(6 * MIB).hotness(hotness).build().unwrap();
        let values: Vec<_> = (0..50_000u64).map(|index| heap.alloc([index; 8]).unwrap()).collect();
        for value in values.iter().step_by(10) {
            value.get(&heap.enter()).unwrap();
        }
        assert_eq!(heap.stats().written_pages, 0, "everything is near: {:?}", heap.stats());
        shrink(&heap);
        let misses = |first: usize| {
            let before = heap.stats().misses;
            for index in (first..50_000).step_by(50) {
                assert_eq!(values[index].get(&heap.enter()).unwrap()[7], index as u64);
            }
            heap.stats().misses - before
        };
        let (hot, cold) = (misses(0), misses(5));
        assert!(
            hot * 2 < cold,
            "{hotness:?}: of 1000 each, {hot} hot ones were missed and {cold} others; {:?}",
            heap.stats()
        );
        drop(values);
        heap.verify();
    }
}

/// A parent that is far and clean goes on finding its children, wherever they have moved.
#[test]
fn children_move_while_parents_are_far() {
    struct Parent([FarBox<[u64; 4]>; 16]);
    let heap = builder(2 * MIB).build().unwrap();
    let mut random = Rng::with_seed(seed());
    let parents: Vec<_> = (0..2_000u64)
        .map(|parent| {
            heap.alloc(Parent(std::array::from_fn(|child| heap.alloc([parent, child as u64, 0, 0]).unwrap()))).unwrap()
        })
        .collect();
    for _ in 0..20_000 {
        let (parent, child) = (random.usize(..2_000), random.usize(..16));
        let scope = heap.enter();
        let found = parents[parent].get(&scope).unwrap().0[child].get(&scope).unwrap();
        assert_eq!(found[..2], [parent as u64, child as u64]);
    }
    assert_in_budget(&heap);
    drop(parents);
    assert_eq!(heap.stats().lost_values, 0);
    heap.verify();
}

#[test]
fn handles_leave_half_of_the_budget_to_values() {
    let heap = builder(MIB).build().unwrap();
    // Handles for all of them would take 1.6 MB.
    let mut values: Vec<_> = (0..200_000u64).map(|index| heap.alloc([index; 2]).unwrap()).collect();
    assert_in_budget(&heap);
    assert!(heap.stats().table_bytes < MIB * 5 / 8, "{:?}", heap.stats());
    for (index, value) in values.iter_mut().enumerate().step_by(333) {
        let scope = heap.enter();
        value.get_mut(&scope).unwrap()[1] += 1;
        assert_eq!(*value.get(&scope).unwrap(), [index as u64, index as u64 + 1]);
    }
    drop(values.split_off(1000));
    let again: Vec<_> = (0..60_000u64).map(|index| heap.alloc([index; 2]).unwrap()).collect();
    assert_in_budget(&heap);
    drop((values, again));
    heap.verify();
}

#[test]
fn an_index_has_room_beside_handles() {
    let heap = builder(4 * MIB).far(1 << 30).build().unwrap();
    let map: FarMap<u64, [u64; 4]> = FarMap::new(&heap).unwrap();
    for number in 0..118_000 {
        map.insert(&heap.enter(), number, [number; 4]).unwrap();
    }
    assert!(map.index_bytes() > 2 * MIB, "{} bytes of index", map.index_bytes());
    for number in (0..118_000).step_by(331) {
        assert_eq!(map.get(&heap.enter(), &number).unwrap(), Some(&[number; 4]));
    }
    assert_in_budget(&heap);
    heap.verify();
}

#[test]
fn far_addresses_are_used_again_and_again() {
    // In all four times what fits; each round leaves a few values behind, so pages die one by one.
    let heap = builder(2 * MIB).far(256 * MIB).build().unwrap();
    let mut kept = Vec::new();
    let mut pages_most = 0;
    for round in 0..30u64 {
        let mut values: Vec<_> = (0..20_000u64).map(|index| heap.alloc([index ^ round; 8]).unwrap()).collect();
        for (index, value) in values.iter().enumerate().step_by(50) {
            let scope = heap.enter();
            assert_eq!(*value.get(&scope).unwrap(), [index as u64 ^ round; 8]);
        }
        kept.push(values.swap_remove(round as usize));
        pages_most = pages_most.max(heap.stats().pages);
    }
    assert!(pages_most * 4096 < 16 * MIB, "{pages_most} pages for 1.3 MB");
    for (round, value) in kept.iter().enumerate() {
        let scope = heap.enter();
        assert_eq!(*value.get(&scope).unwrap(), [0; 8], "value {round} of round {round}");
    }
    drop(kept);
    heap.verify();
}

/// Values leave their far page one by one: without care a far page would be kept for each one or two of them that stayed.
#[test]
fn far_pages_do_not_stay_for_a_few_values_each() {
    let heap = builder(MIB).build().unwrap();
    let mut random = Rng::with_seed(seed());
    let mut values: Vec<_> = (0..40_000u64).map(|index| heap.alloc([index; 8]).unwrap()).collect();
    let full = values.len() as u64 / 60;
    for step in 0..200_000 {
        if step % 1000 == 0 {
            // Merging is the reclaimer's, for whom a busy machine may leave no processor while we never wait.
            std::thread::sleep(Duration::from_millis(2));
        }
        let scope = heap.enter();
        let index = random.usize(..values.len());
        if step % 10 == 0 {
            values[index].get_mut(&scope).unwrap()[7] += 1;
        } else {
            assert_eq!(values[index].get(&scope).unwrap()[..7], [index as u64; 7]);
        }
    }
    let stats = heap.stats();
    assert!(stats.misses > 100_000, "{stats:?}");
    assert!(stats.pages < 3 * full, "{} far pages for values of {full}: {stats:?}", stats.pages);
    assert_in_budget(&heap);
    heap.verify();
    drop(values);
    heap.verify();
}

/// Counts how many exist.
struct Counted(Arc<AtomicI64>, [u64; 7]);

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(self.1[0], self.1[6]);
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A heap over a pool with these faults, with 40 000 values that know their number, or as many as there is room for.
fn faulty(faults: &str, patience: Duration) -> (Heap, Vec<FarBox<Counted>>, Arc<AtomicI64>) {
    let heap = builder(2 * MIB).patience(patience).pool(format!("fault:{faults}@ram:")).build().unwrap();
    let alive = Arc::new(AtomicI64::new(0));
    let mut values = Vec::new();
    for index in 0..40_000 {
        alive.fetch_add(1, Ordering::Relaxed);
        match heap.alloc(Counted(alive.clone(), [index; 7])) {
            Ok(value) => values.push(value),
            Err(error) if matches!(error.error, FarError::Pool(PoolError::ServerGone { .. })) => break,
            Err(error) => panic!("{error:?}"),
        }
    }
    (heap, values, alive)
}

#[test]
fn a_server_that_dies_leaves_what_is_near() {
    for die in [1, 100, 600, 900, 3000] {
        let (heap, values, alive) = faulty(&format!("die={die}"), Duration::from_secs(5));
        let (mut good, mut gone) = (0, 0);
        for (index, value) in values.iter().enumerate() {
            let scope = heap.enter();
            match value.get(&scope) {
                Ok(value) => {
                    assert_eq!(value.1, [index as u64; 7]);
                    good += 1;
                }
                Err(FarError::Pool(PoolError::ServerGone { .. })) => gone += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
        assert!(good >= values.len().min(10_000), "{good} of {} with die={die}", values.len());
        assert_eq!(good + gone, values.len());
        drop(values);
        assert_eq!(alive.load(Ordering::Relaxed), heap.stats().lost_values as i64, "dropped once, or lost and counted");
        heap.verify();
    }
}

#[test]
fn corrupt_parts_are_errors_and_never_values() {
    let (heap, values, alive) = faulty("corrupt=0.2,seed=5", Duration::from_secs(5));
    let (mut corrupt, mut random) = (0, Rng::with_seed(9));
    for _ in 0..4_000 {
        let index = random.usize(..values.len());
        let scope = heap.enter();
        match values[index].get(&scope) {
            Ok(value) => assert_eq!(value.1, [index as u64; 7]),
            Err(FarError::Pool(PoolError::Corrupt { .. })) => corrupt += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(corrupt > 100, "{corrupt}");
    drop(values);
    assert_eq!(alive.load(Ordering::Relaxed), heap.stats().lost_values as i64);
    heap.verify();
}

#[test]
fn lost_answers_are_errors_in_time_and_can_be_asked_again() {
    let heap = builder(MIB).patience(Duration::from_millis(100)).pool("fault:drop=0.02,seed=2@ram:").build().unwrap();
    let mut late = 0;
    let mut values: Vec<FarBox<[u64; 8]>> = Vec::new();
    while values.len() < 20_000 {
        match heap.alloc([values.len() as u64; 8]) {
            Ok(value) => values.push(value),
            Err(error) if is_late(error.error) => late += 1,
            Err(error) => panic!("{error:?}"),
        }
        assert!(late < 1_000);
    }
    let mut random = Rng::with_seed(3);
    for _ in 0..1_000 {
        let index = random.usize(..values.len());
        loop {
            let scope = heap.enter();
            match values[index].get(&scope) {
                Ok(value) => break assert_eq!(*value, [index as u64; 8]),
                Err(error) if is_late(error) => late += 1,
                Err(other) => panic!("{other:?}"),
            }
            assert!(late < 1_000);
        }
    }
    assert!(late > 0, "the test needs lost answers");
    drop(values);
    heap.verify();
}

fn is_late(error: FarError) -> bool {
    matches!(error, FarError::Pool(PoolError::TimedOut { .. }) | FarError::Stalled { .. })
}
