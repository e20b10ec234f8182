//! `FarArc` is an `Arc`, wherever its value is. Dangers: a value that is dropped while it has owners, or by none of them, or by two; counts
//! of one value that are taken for those of another.

use crate::common::twin::steps;
use crate::common::{MIB, Rng, assert_in_budget, builder, heap, is_deep, little_percent, seed};
use farfield::{FarArc, FarBox, FarError, FarVec, Heap};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Counts how many exist; its twin is the same number in an `Arc`.
pub(crate) struct Counted {
    alive: Arc<AtomicI64>,
    pub(crate) number: u64,
    #[allow(dead_code, reason = "makes it larger")]
    pub(crate) rest: [u64; 22],
}

impl Counted {
    pub(crate) fn new(alive: &Arc<AtomicI64>, number: u64) -> Counted {
        alive.fetch_add(1, Ordering::Relaxed);
        Counted { alive: alive.clone(), number, rest: [number; 22] }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(self.rest, [self.number; 22]);
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(crate) fn sent_and_shared<T: Send + Sync>(value: T) -> T {
    value
}

#[test]
fn the_last_owner_drops_the_value() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let mut one = sent_and_shared(heap.alloc_shared(Counted::new(&alive, 5)).unwrap());
    assert_eq!(one.owners(), 1);
    one.get_mut(&heap.enter()).unwrap().unwrap().number = 22;
    one.get_mut(&heap.enter()).unwrap().unwrap().rest = [22; 22];
    let two = one.clone();
    assert!(one.get_mut(&heap.enter()).unwrap().is_none());
    assert!(one.ptr_eq(&two) && one.owners() == 2);
    let one = one.into_box().unwrap_err();
    drop(one);
    assert_eq!((alive.load(Ordering::Relaxed), two.owners()), (1, 1));
    assert_eq!(two.read(|value| value.number), Ok(22));
    let owned: FarBox<Counted> = two.into_box().unwrap();
    let again = FarArc::from(owned);
    let third = again.clone();
    drop((again, third));
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    heap.verify();
}

/// Neighbours in a page are different values.
#[test]
fn counts_of_neighbours_are_separate() {
    let heap = heap(1);
    let all: Vec<_> = (0..500u64).map(|value| heap.alloc_shared(value % 7).unwrap()).collect();
    let clones: Vec<_> = all.iter().enumerate().map(|(index, one)| vec![one.clone(); index % 5]).collect();
    for (index, one) in all.iter().enumerate() {
        assert_eq!(one.owners(), 1 + index as u64 % 5);
        assert!(all.iter().enumerate().all(|(other, two)| one.ptr_eq(two) == (index == other)));
    }
    drop(all);
    assert!(clones.iter().enumerate().all(|(index, more)| more.iter().all(|one| one.owners() == index as u64 % 5)));
    drop(clones);
    heap.verify();
}

#[test]
fn owners_are_far_too() {
    struct Word {
        text: [u64; 16],
        style: FarArc<Counted>,
        next: Option<FarBox<Word>>,
    }
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let styles: Vec<_> = (0..300).map(|n| heap.alloc_shared(Counted::new(&alive, n)).unwrap()).collect();
    let mut random = Rng::with_seed(seed());
    let mut expected = vec![1u64; 300];
    let mut chains: Vec<FarBox<Word>> = Vec::new();
    for _ in 0..200 {
        let mut head = None;
        for text in 0..80 {
            let style = random.usize(..styles.len());
            expected[style] += 1;
            head = Some(heap.alloc(Word { text: [text; 16], style: styles[style].clone(), next: head }).unwrap());
        }
        chains.extend(head);
    }
    assert!(heap.stats().written_pages > 100, "{:?}", heap.stats());
    assert!(styles.iter().zip(&expected).all(|(style, expected)| style.owners() == *expected));
    for chain in &chains {
        let mut scope = heap.enter();
        let mut word = chain;
        let mut text = 80;
        let mut sum = 0;
        {
            let scope = &scope;
            loop {
                let here = word.get(scope).unwrap();
                text -= 1;
                assert_eq!(here.text, [text; 16]);
                sum += here.style.get(scope).unwrap().rest[21];
                match &here.next {
                    Some(next) => word = next,
                    None => break,
                }
            }
        }
        assert!(text == 0 && sum > 0);
        scope.renew();
    }
    drop(styles);
    let kept = expected.iter().filter(|owners| **owners > 1).count() as i64;
    assert_eq!(alive.load(Ordering::Relaxed), kept);
    drop(chains);
    assert_eq!((alive.load(Ordering::Relaxed), heap.stats().lost_values), (0, 0));
    heap.verify();
}

#[test]
fn owners_outlive_their_heap_and_end_in_any_thread() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let owners: Vec<_> = (0..4000).map(|n| heap.alloc_shared(Counted::new(&alive, n)).unwrap()).collect();
    let others = owners.clone();
    drop(heap);
    std::thread::scope(|threads| {
        threads.spawn(move || drop(owners));
        threads.spawn(move || drop(others));
    });
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

/// Owners of a few values, made and dropped by threads at the same time; what they did to the value is seen by the last.
#[test]
fn threads_share() {
    let heap = heap(1);
    let alive = Arc::new(AtomicI64::new(0));
    struct Tally {
        used: AtomicU64,
        counted: Counted,
    }
    let expected: u64 = std::thread::scope(|threads| {
        let (heap, alive) = (&heap, &alive);
        let values: Vec<FarArc<Tally>> = (0..8)
            .map(|n| heap.alloc_shared(Tally { used: AtomicU64::new(0), counted: Counted::new(alive, n) }).unwrap())
            .collect();
        let sums = Arc::new(AtomicU64::new(0));
        let work = |thread: u64| {
            let (mut own, sums) = (values.clone(), sums.clone());
            let seed = seed();
            move || {
                let mut random = Rng::with_seed(seed ^ thread << 32);
                let mut used = 0;
                for step in 0..4_000u64 {
                    let index = random.usize(..own.len());
                    match random.usize(..4) {
                        0 => own.push(own[index].clone()),
                        1 if own.len() > 4 => drop(own.swap_remove(index)),
                        2 => {
                            heap.alloc([step; 128]).unwrap();
                        }
                        _ => {
                            own[index].read(|value| value.used.fetch_add(1, Ordering::Relaxed)).unwrap();
                            used += 1;
                        }
                    }
                }
                sums.fetch_add(used, Ordering::Relaxed);
                // Whoever is the last one of a value takes it out.
                let mut seen = 0;
                for owner in own {
                    if let Ok(last) = owner.into_box() {
                        let tally = last.into_inner().map_err(|(_, error)| error).unwrap();
                        assert!(tally.counted.number < 8);
                        seen += tally.used.into_inner();
                    }
                }
                seen
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| threads.spawn(work(thread))).collect();
        let mut seen: u64 = 0;
        let mut rest = values;
        for thread in threads {
            seen += thread.join().unwrap();
        }
        for owner in rest.drain(..) {
            let last = owner.into_box().map_err(|_| "another owner").unwrap();
            seen += last.read(|tally| tally.used.load(Ordering::Relaxed)).unwrap();
        }
        assert_eq!(seen, sums.load(Ordering::Relaxed), "each use is counted once");
        seen
    });
    assert!(expected > 1_000);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    heap.verify();
}

#[test]
fn counts_are_in_the_budget_and_go() {
    let heap = heap(4);
    let values: Vec<_> = (0..10_000u64).map(|n| heap.alloc_shared(n).unwrap()).collect();
    let before = heap.stats().table_bytes;
    let others = values.clone();
    let tables = heap.stats().table_bytes - before;
    assert!((10_000 * 17..10_000 * 80).contains(&tables), "{tables}");
    assert_in_budget(&heap);
    drop(others);
    assert!(heap.stats().table_bytes < before + 20_000, "{:?}", heap.stats());
    heap.verify();
}

/// AIFM's shared pointers: copies and originals read the same, after everything has left and come back; also as a batch, a task, a pin.
#[test]
fn every_owner_reads_the_same() {
    let heap = heap(1);
    let values: Vec<_> = (0..3000u64).map(|n| heap.alloc_shared([n; 128]).unwrap()).collect();
    let copies = values.clone();
    let executor = farfield::task::Executor::new(&heap);
    for (index, (one, two)) in values.iter().zip(&copies).enumerate() {
        let scope = heap.enter();
        assert_eq!(one.get(&scope).unwrap(), &[index as u64; 128]);
        assert_eq!(two.get_once(&scope).unwrap(), &[index as u64; 128]);
        drop(scope);
        let far = (index * 7919) % values.len();
        executor.block_on(async {
            let scope = heap.enter();
            assert_eq!(copies[far].fetch(&scope).await.unwrap()[127], far as u64);
            assert_eq!(values[far].fetch_pinned().await.unwrap()[0], far as u64);
        });
        let pinned = two.pin().unwrap();
        heap.prefetch(&copies[far..far + 1]);
        assert_eq!(pinned[64], index as u64);
    }
    let scope = heap.enter();
    let batch = heap.get_many(&scope, &copies[100..116]).unwrap();
    assert!(batch.into_iter().zip(100..).all(|(value, index)| value[5] == index));
    drop(scope);
    drop((values, executor));
    assert!(copies.iter().all(|copy| copy.owners() == 1));
    heap.verify();
}

/// Rng steps against `Arc`, at this near share: owners in a near table, in a far vector, and in far boxes.
fn random_steps(near_percent: u64) {
    let mut random = Rng::with_seed(seed() ^ near_percent << 40);
    let bytes = (MIB * 100 / near_percent).max(6 * MIB);
    // What is known of shared values is near, and a long history shares most of them.
    let least = if is_deep() { 2 * MIB } else { MIB };
    let near = (bytes * near_percent / 100).max(least);
    let heap: Heap = builder().near(near).near_max(near).far(1 << 30).paranoid(true).build().unwrap();
    let alive = Arc::new(AtomicI64::new(0));
    let slots = (bytes / 256) as usize;
    let mut twins: Vec<Option<Arc<u64>>> = Vec::new();
    let mut table: Vec<Option<FarArc<Counted>>> = Vec::new();
    for index in 0..slots as u64 {
        table.push(Some(heap.alloc_shared(Counted::new(&alive, index)).unwrap()));
        twins.push(Some(Arc::new(index)));
    }
    let mut shelf: FarVec<FarBox<FarArc<Counted>>> = FarVec::new();
    let mut shelf_twin: Vec<Arc<u64>> = Vec::new();
    for step in 0..steps(4_000) {
        let (index, other) = (random.usize(..slots), random.usize(..slots));
        match random.usize(..8) {
            0 => {
                table[index] = table[other].clone();
                twins[index] = twins[other].clone();
            }
            1 => {
                table[index] = Some(heap.alloc_shared(Counted::new(&alive, step)).unwrap());
                twins[index] = Some(Arc::new(step));
            }
            2 => {
                table[index] = None;
                twins[index] = None;
            }
            3 => {
                let (Some(one), Some(twin)) = (&table[index], &twins[index]) else { continue };
                let far = heap.alloc(one.clone()).unwrap();
                shelf.push(&heap.enter(), far).unwrap();
                shelf_twin.push(twin.clone());
            }
            4 => {
                let taken = shelf.pop(&heap.enter()).unwrap();
                let taken = taken.map(|taken| taken.into_inner().map_err(|(_, error)| error).unwrap());
                let twin = shelf_twin.pop();
                assert_eq!(
                    taken.as_ref().map(FarArc::owners),
                    twin.as_ref().map(|twin| Arc::strong_count(twin) as u64)
                );
            }
            5 => {
                let (Some(one), Some(twin)) = (&mut table[index], &mut twins[index]) else { continue };
                let scope = heap.enter();
                let value = one.get_mut(&scope).unwrap();
                let twin = Arc::get_mut(twin);
                assert_eq!(value.is_some(), twin.is_some());
                if let (Some(value), Some(twin)) = (value, twin) {
                    *twin = step;
                    (value.number, value.rest) = (step, [step; 22]);
                }
            }
            6 => {
                let (Some(one), Some(twin)) = (table[index].take(), twins[index].take()) else { continue };
                assert_eq!(one.owners(), Arc::strong_count(&twin) as u64);
                match (one.into_box(), Arc::try_unwrap(twin)) {
                    (Ok(far), Ok(number)) => {
                        assert_eq!(far.into_inner().map_err(|(_, error)| error).unwrap().number, number)
                    }
                    (Err(far), Err(twin)) => (table[other], twins[other]) = (Some(far), Some(twin)),
                    _ => panic!("one says it is the last"),
                }
            }
            _ => {
                let scope = heap.enter();
                let seen = table[index].as_ref().map(|one| one.get(&scope).map(|value| value.number));
                assert_eq!(seen, twins[index].as_ref().map(|twin| Ok::<_, FarError>(**twin)));
            }
        }
    }
    let mut different: Vec<*const u64> = twins.iter().flatten().chain(&shelf_twin).map(Arc::as_ptr).collect();
    different.sort_unstable();
    different.dedup();
    assert_eq!(alive.load(Ordering::Relaxed), different.len() as i64);
    assert_in_budget(&heap);
    heap.verify();
    drop((table, shelf));
    assert_eq!((alive.load(Ordering::Relaxed), heap.stats().lost_values), (0, 0));
    heap.verify();
}

#[test]
fn random_steps_with_everything_near() {
    random_steps(100);
}

#[test]
fn random_steps_with_a_quarter_near() {
    random_steps(25);
}

#[test]
fn random_steps_with_half_near() {
    random_steps(50);
}

#[test]
fn random_steps_with_a_tenth_near() {
    random_steps(10);
}

#[test]
fn random_steps_with_little_near() {
    random_steps(little_percent());
}
