//! Shapes and programs on which collectors have been slow or wrong: those of the JDK's stress tests, one list, one array, nothing but
//! garbage, and none. Each runs with every way to look at far objects.
//!
//! Danger: a reference that moves within an array while it is scanned, and is lost; a stack that grows with a list; large objects
//! between whose places no other fits; a cycle that keeps itself alive.

use crate::common::{MIB, Over, far_heap, is_deep, seed};
use farfield_gc::{FarObject, FarTracing, Gc, GcError, GcHeap, Mutator, Ref, Root};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};

const ALL: [FarTracing; 4] = [FarTracing::Frames, FarTracing::Copies, FarTracing::Arrivals, FarTracing::Servers];

/// Objects that are made, or looked at, between two safepoints.
const BATCH: usize = 100;

#[derive(FarObject)]
struct Link {
    number: u64,
    next: Ref<Link>,
}

fn deep_or<T>(deep: T, few: T) -> T {
    if is_deep() { deep } else { few }
}

/// Runs a program in a heap for each way to look at far objects, and checks the heap afterwards.
fn with_each_tracing(near_mib: u64, limit_mib: u64, program: impl Fn(&GcHeap, &mut Rng)) {
    let seed = seed();
    for tracing in ALL {
        println!("{tracing:?}");
        let heap = far_heap(near_mib);
        let gc = GcHeap::in_heap(&heap).limit(limit_mib * MIB).far_tracing(tracing).build().unwrap();
        program(&gc, &mut Rng::with_seed(seed));
        gc.verify().unwrap();
        // Nothing is rooted any more.
        gc.collect().unwrap();
        let stats = gc.stats();
        println!("{stats:?}");
        assert_eq!((stats.live_objects, stats.given_up, stats.moves_given_up), (0, 0, 0), "{tracing:?}");
        assert!(stats.used_bytes <= limit_mib * MIB);
        drop(gc);
        heap.verify();
    }
}

/// Makes a list whose first link has the highest number.
fn list(m: &mut Mutator<'_>, len: usize) -> Root<Link> {
    let mut head: Option<Root<Link>> = None;
    for first in (0..len).step_by(BATCH) {
        let add = |m: &Mutator<'_>| {
            let mut next = head.as_ref().map(|head| m.get(head)).transpose()?;
            for number in first..len.min(first + BATCH) {
                let link = m.alloc(Link { number: number as u64, next: Ref::null() })?;
                link.next.store(m, next);
                next = Some(link);
            }
            Ok(m.root(next.expect("a batch has a link")))
        };
        head = Some(m.with_room(add).unwrap());
        m.safepoint().unwrap();
    }
    head.expect("the list has a link")
}

/// Goes along a list whose numbers fall by one. Returns a root of each batch of links.
fn walk(m: &mut Mutator<'_>, head: &Root<Link>, len: usize) -> Vec<Root<Link>> {
    let mut batches = vec![head.clone()];
    let mut left = len;
    while left > 0 {
        let count = left.min(BATCH);
        let batch = |m: &Mutator<'_>| {
            let mut link = m.get(batches.last().expect("there is one"))?;
            for number in (left - count..left).rev() {
                assert_eq!(link.number, number as u64);
                match link.next.load(m)? {
                    Some(next) => link = next,
                    None => return Ok(None),
                }
            }
            Ok(Some(m.root(link)))
        };
        let next = m.with_room(batch).unwrap();
        m.safepoint().unwrap();
        left -= count;
        assert_eq!(next.is_none(), left == 0, "the list has {len} links");
        batches.extend(next);
    }
    batches
}

#[test]
fn a_list_of_any_length_is_collected() {
    let len = deep_or(8_000_000, 60_000);
    with_each_tracing(deep_or(64, 1), deep_or(512, 6), |gc, _| {
        let mut m = gc.enter();
        let head = list(&mut m, len);
        m.collect().unwrap();
        assert_eq!(gc.stats().live_objects, len as u64);
        let batches = walk(&mut m, &head, len);
        drop(head);
        // The first half is dropped.
        let middle = batches[batches.len() / 2].clone();
        let left = len - batches.len() / 2 * BATCH;
        drop(batches);
        m.collect().unwrap();
        assert_eq!(gc.stats().live_objects, left as u64);
        walk(&mut m, &middle, left);
    });
}

/// Two threads exchange what places of one array lead to, each its own places, and copy parts of it, as `arraycopy` does.
#[test]
fn an_array_is_changed_while_it_is_scanned() {
    let len = deep_or(2_000_000, 50_000);
    with_each_tracing(deep_or(256, 8), deep_or(512, 12), |gc, random| {
        let array = {
            let mut m = gc.enter();
            m.safepoint_for(8 * len + 64).unwrap();
            let array = m.with_room(|m| Ok(m.root(m.alloc_array(len, |_| Ref::<Link>::null())?))).unwrap();
            for first in (0..len).step_by(BATCH) {
                let fill = |m: &Mutator<'_>| {
                    let array = m.get(&array)?;
                    for at in first..len.min(first + BATCH) {
                        array[at].store(m, Some(m.alloc(Link { number: at as u64, next: Ref::null() })?));
                    }
                    Ok(())
                };
                m.with_room(fill).unwrap();
                m.safepoint().unwrap();
            }
            array
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            for thread in 0..2 {
                let (array, is_over, seed) = (&array, &is_over, random.u64(..));
                threads.spawn(move || {
                    let (mut m, mut random) = (gc.enter(), Rng::with_seed(seed));
                    while !is_over.load(Ordering::Relaxed) {
                        let [first, second] = [0; 2].map(|_| 2 * random.usize(..len / 2 - 16) + thread);
                        m.with_room(|m| exchange(m, m.get(array)?, first, second)).unwrap();
                        m.safepoint().unwrap();
                    }
                });
            }
            let over = Over(&is_over);
            for _ in 0..deep_or(20, 4) {
                gc.collect().unwrap();
                assert_eq!(gc.stats().live_objects, 1 + len as u64);
            }
            drop(over);
        });
        let mut m = gc.enter();
        let mut is_seen = vec![false; len];
        for at in 0..len {
            let number = |m: &Mutator<'_>| Ok(m.get(&array)?[at].load(m)?.expect("nothing is lost").number);
            let number = m.with_room(number).unwrap() as usize;
            m.safepoint().unwrap();
            assert!(number % 2 == at % 2 && !std::mem::replace(&mut is_seen[number], true), "{number} at {at}");
        }
    });
}

/// Exchanges what two runs of places lead to: every second place of 32 from each of these on. Nothing is loaded, so it may be far.
fn exchange(m: &Mutator<'_>, array: Gc<'_, [Ref<Link>]>, first: usize, second: usize) -> Result<(), GcError> {
    if first.abs_diff(second) < 32 {
        let removed = array[first].load(m)?;
        array[first].copy_from(m, &array[second]);
        array[second].store(m, removed);
        return Ok(());
    }
    let kept = m.alloc_array(16, |_| Ref::<Link>::null())?;
    for (at, kept) in kept.iter().enumerate() {
        kept.copy_from(m, &array[first + 2 * at]);
        array[first + 2 * at].copy_from(m, &array[second + 2 * at]);
        array[second + 2 * at].copy_from(m, kept);
    }
    Ok(())
}

/// Object with a number in each of its words.
#[derive(FarObject)]
struct Payload {
    words: [u64; 12],
}

/// `TestSieveObjects` and `TestRetainObjects`: a window of objects, of which one is replaced at each step: any one, or the oldest.
#[test]
fn windows_of_objects_are_replaced() {
    const WINDOW: usize = 6000;
    let steps = deep_or(2_000_000, 30_000);
    with_each_tracing(1, 4, |gc, random| {
        let mut m = gc.enter();
        let window = m.with_room(|m| Ok(m.root(m.alloc_array(WINDOW, |_| Ref::<Payload>::null())?))).unwrap();
        let mut expected: Vec<Option<u64>> = vec![None; WINDOW];
        for step in 0..steps {
            let at = if (step / WINDOW).is_multiple_of(2) { step % WINDOW } else { random.usize(..WINDOW) };
            let replace = |m: &Mutator<'_>| {
                let new = m.alloc(Payload { words: [step as u64; 12] })?;
                let place = &m.get(&window)?[at];
                let old = place.load(m)?.map(|old| old.words);
                place.store(m, Some(new));
                Ok(old)
            };
            let old = m.with_room(replace).unwrap();
            assert_eq!(old, expected[at].replace(step as u64).map(|old| [old; 12]));
            m.safepoint().unwrap();
        }
        m.collect().unwrap();
        assert_eq!(gc.stats().live_objects, 1 + WINDOW as u64);
    });
}

/// `TestLotsOfCycles`: rings of links, each of which lives as a whole or not at all.
#[test]
fn rings_die_as_a_whole() {
    const RINGS: usize = 400;
    let steps = deep_or(200_000, 3000);
    with_each_tracing(1, 4, |gc, random| {
        let mut m = gc.enter();
        let rings = m.with_room(|m| Ok(m.root(m.alloc_array(RINGS, |_| Ref::<Link>::null())?))).unwrap();
        let mut lengths = vec![0; RINGS];
        for _ in 0..steps {
            let (at, len) = (random.usize(..RINGS), random.usize(1..60));
            let replace = |m: &Mutator<'_>| {
                let first = m.alloc(Link { number: len as u64, next: Ref::null() })?;
                let mut last = first;
                for number in 1..len {
                    let link = m.alloc(Link { number: number as u64, next: Ref::null() })?;
                    last.next.store(m, Some(link));
                    last = link;
                }
                last.next.store(m, Some(first));
                let old = m.get(&rings)?[at].swap(m, Some(first))?;
                Ok(old.map_or(0, |old| old.number as usize))
            };
            let old = m.with_room(replace).unwrap();
            assert_eq!(old, std::mem::replace(&mut lengths[at], len));
            m.safepoint().unwrap();
        }
        m.collect().unwrap();
        assert_eq!(gc.stats().live_objects, 1 + lengths.iter().sum::<usize>() as u64);
    });
}

/// `TestAllocHumongousFragment`: large objects of any size, which fill half of the heap.
#[test]
fn large_objects_of_any_size_come_and_go() {
    const LIMIT_MIB: u64 = 16;
    let steps = deep_or(100_000, 1500);
    with_each_tracing(4, LIMIT_MIB, |gc, random| {
        let mut m = gc.enter();
        let mut kept: Vec<(Root<[u64]>, u64, usize)> = Vec::new();
        let mut kept_bytes = 0;
        for step in 0..steps {
            let len = 512 << random.usize(..5) | random.usize(..512);
            while kept_bytes + 8 * len as u64 > LIMIT_MIB * MIB / 2 {
                let (object, number, len) = kept.swap_remove(random.usize(..kept.len()));
                let check = |m: &Mutator<'_>| {
                    let object = m.get(&object)?;
                    assert!(object.len() == len && object.iter().all(|word| *word == number));
                    Ok(())
                };
                m.with_room(check).unwrap();
                kept_bytes -= 8 * len as u64;
            }
            m.safepoint_for(8 * len + 64).unwrap();
            let new = m.with_room(|m| Ok(m.root(m.alloc_array(len, |_| step)?))).unwrap();
            kept.push((new, step, len));
            kept_bytes += 8 * len as u64;
        }
    });
}

#[derive(FarObject, Default)]
struct Tree {
    halves: [Ref<Tree>; 2],
}

const HEIGHT: usize = 6;

fn tree<'m>(m: &'m Mutator<'_>, height: usize) -> Result<Gc<'m, Tree>, GcError> {
    let tree = m.alloc(Tree::default())?;
    for half in &tree.halves {
        if height > 1 {
            half.store(m, Some(self::tree(m, height - 1)?));
        }
    }
    Ok(tree)
}

/// `TestGCOld`: trees that live long exchange halves, trees that live short are made between.
#[test]
fn trees_exchange_halves() {
    const TREES: usize = 600;
    let steps = deep_or(400_000, 8000);
    with_each_tracing(1, 4, |gc, random| {
        let mut m = gc.enter();
        let trees = m.with_room(|m| Ok(m.root(m.alloc_array(TREES, |_| Ref::<Tree>::null())?))).unwrap();
        for at in 0..TREES {
            let fill = |m: &Mutator<'_>| {
                m.get(&trees)?[at].store(m, Some(tree(m, HEIGHT)?));
                Ok(())
            };
            m.with_room(fill).unwrap();
            m.safepoint().unwrap();
        }
        for _ in 0..steps {
            let [first, second] = [0; 2].map(|_| random.usize(..TREES));
            let path: Vec<usize> = (0..random.usize(1..HEIGHT)).map(|_| random.usize(..2)).collect();
            let exchange = |m: &Mutator<'_>| {
                tree(m, 3)?;
                let array = m.get(&trees)?;
                let end = |at: usize| {
                    let mut tree = array[at].load(m)?.expect("each is set");
                    for half in &path[1..] {
                        tree = tree.halves[*half].load(m)?.expect("trees have one height");
                    }
                    Ok::<_, GcError>(&Gc::get(tree).halves[path[0]])
                };
                let (first, second) = (end(first)?, end(second)?);
                let removed = first.load(m)?;
                first.copy_from(m, second);
                second.store(m, removed);
                Ok(())
            };
            m.with_room(exchange).unwrap();
            m.safepoint().unwrap();
        }
        m.collect().unwrap();
        assert_eq!(gc.stats().live_objects, (1 + TREES * ((1 << HEIGHT) - 1)) as u64);
    });
}

#[test]
fn nothing_but_garbage_costs_nothing_to_keep_and_no_garbage_frees_nothing() {
    with_each_tracing(1, 4, |gc, _| {
        let mut m = gc.enter();
        for number in 0..deep_or(3_000_000u64, 100_000) {
            m.with_room(|m| m.alloc([number; 30]).map(|_| ()).map_err(GcError::from)).unwrap();
            m.safepoint().unwrap();
        }
        let stats = gc.stats();
        assert!(stats.collections > 4 && stats.moved_objects < 100 * stats.collections, "{stats:?}");
        m.collect().unwrap();
        let before = gc.stats();
        assert_eq!(before.live_objects, 0);
        let head = list(&mut m, 50_000);
        for _ in 0..4 {
            m.collect().unwrap();
            assert_eq!(gc.stats().live_objects, 50_000);
        }
        let moved = gc.stats().moved_objects - before.moved_objects;
        assert!(moved < 1000, "{moved} objects were moved, though all of them live");
        walk(&mut m, &head, 50_000);
    });
}
