//! `FarBox` is a `Box`, wherever its value is. Dangers: values mixed up, lost, torn, or dropped never or twice.

use crate::common::{MIB, Rng, assert_in_budget, builder, heap, little_percent, seed};
use farfield::task::Executor;
use farfield::{FarBox, FarError, Heap};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

#[test]
fn a_value_comes_back_as_it_was() {
    let heap = heap(1);
    let mut number = heap.alloc(7u64).unwrap();
    let text = heap.alloc(String::from("far")).unwrap();
    let scope = heap.enter();
    *number.get_mut(&scope).unwrap() += 1;
    assert_eq!((*number.get(&scope).unwrap(), text.get(&scope).unwrap().as_str()), (8, "far"));
    drop(scope);
    assert_eq!(number.into_inner().map_err(|(_, error)| error), Ok(8));
    drop(text);
    heap.verify();
}

/// So many MiB of values of this type through 1 MiB; each is read back twice, in another order.
fn swap<T: Send + Clone + PartialEq + std::fmt::Debug + 'static>(mib: u64, make: impl Fn(u64) -> T) {
    let heap = heap(1);
    let count = mib * MIB / size_of::<T>().max(16) as u64;
    let values: Vec<FarBox<T>> = (0..count).map(|index| heap.alloc(make(index)).unwrap()).collect();
    assert!(heap.stats().written_pages > 128 * mib, "{:?}", heap.stats());
    for stride in [1, 7919] {
        for step in 0..count {
            let index = step * stride % count;
            let scope = heap.enter();
            assert_eq!(*values[index as usize].get(&scope).unwrap(), make(index), "value {index}");
        }
    }
    assert_in_budget(&heap);
    heap.verify();
    drop(values);
    heap.verify();
}

#[test]
fn small_values_swap() {
    swap(3, |index| [index; 8]);
}

#[test]
fn values_of_a_page_swap() {
    swap(12, |index| [index; 512]);
}

#[test]
fn values_of_several_pages_swap() {
    swap(12, |index| [index; 1300]);
}

#[test]
fn values_larger_than_a_segment_swap() {
    swap(12, |index| [index; 16_000]);
}

#[test]
fn odd_sizes_and_alignments_are_kept() {
    #[repr(align(256))]
    #[derive(Clone, PartialEq, Debug)]
    struct Aligned(u8);
    let heap = heap(1);
    let aligned: Vec<_> = (0..100u8).map(|index| heap.alloc(Aligned(index)).unwrap()).collect();
    let bytes: Vec<_> = (0..100u8).map(|index| heap.alloc(index).unwrap()).collect();
    let nothing = heap.alloc(()).unwrap();
    let scope = heap.enter();
    for index in 0..100u8 {
        let value = aligned[index as usize].get(&scope).unwrap();
        assert_eq!(value.0, index);
        assert!((value as *const Aligned as usize).is_multiple_of(256));
        assert_eq!(*bytes[index as usize].get(&scope).unwrap(), index);
    }
    let () = nothing.get(&scope).unwrap();
}

/// Counts how many exist.
struct Counted(Arc<AtomicI64>, #[allow(dead_code, reason = "fills the page")] [u64; 40]);

impl Counted {
    fn new(alive: &Arc<AtomicI64>) -> Counted {
        alive.fetch_add(1, Ordering::Relaxed);
        Counted(alive.clone(), [3; 40])
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(self.1, [3; 40]);
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn destructors_run_once_also_for_what_is_far() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let mut values: Vec<_> = (0..20_000).map(|_| heap.alloc(Counted::new(&alive)).unwrap()).collect();
    assert_eq!(alive.load(Ordering::Relaxed), 20_000);
    drop(values.split_off(5_000));
    assert_eq!(alive.load(Ordering::Relaxed), 5_000);
    let taken = values.pop().unwrap().into_inner().map_err(|(_, error)| error).unwrap();
    assert_eq!(alive.load(Ordering::Relaxed), 5_000, "moved out is not dropped");
    drop(taken);
    drop(values);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    assert_eq!(heap.stats().lost_values, 0);
    heap.verify();
}

#[test]
fn values_outlive_their_heap() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let values: Vec<_> = (0..10_000).map(|_| heap.alloc(Counted::new(&alive)).unwrap()).collect();
    drop(heap);
    let thread = std::thread::spawn(move || drop(values));
    thread.join().unwrap();
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

struct Node {
    value: u64,
    children: [Option<FarBox<Node>>; 2],
}

fn tree(heap: &Heap, depth: u32, value: u64) -> FarBox<Node> {
    let child = |side: u64| (depth > 0).then(|| tree(heap, depth - 1, 2 * value + side));
    let children = [child(0), child(1)];
    heap.alloc(Node { value, children }).unwrap()
}

/// AIFM's embedded pointers: values that own far values, at any depth.
#[test]
fn far_values_own_far_values() {
    let heap = heap(1);
    let depth = 16;
    let mut root = tree(&heap, depth, 1);
    assert!(heap.stats().written_pages > 500, "{:?}", heap.stats());
    let mut random = Rng::with_seed(seed());
    for _ in 0..2_000 {
        // From the root to a leaf, which is changed on the way back in every other walk.
        let scope = heap.enter();
        let (mut node, mut value) = (&mut root, 1);
        for _ in 0..depth {
            let here = node.get_mut(&scope).unwrap();
            assert_eq!(here.value, value);
            let side = random.usize(..2);
            value = 2 * value + side as u64;
            node = here.children[side].as_mut().unwrap();
        }
        assert_eq!(node.get(&scope).unwrap().value, value);
    }
    drop(root);
    assert_eq!(heap.stats().lost_values, 0);
    heap.verify();
}

#[test]
fn long_chains_are_walked_and_dropped() {
    struct Link(u64, Option<FarBox<Link>>);
    let heap = heap(1);
    let mut head: Option<FarBox<Link>> = None;
    let count = 100_000;
    for index in 0..count {
        head = Some(heap.alloc(Link(index, head)).unwrap());
    }
    let mut expected = count;
    while let Some(link) = head {
        let Link(value, next) = link.into_inner().map_err(|(_, error)| error).unwrap();
        expected -= 1;
        assert_eq!(value, expected);
        head = next;
    }
    assert_eq!(expected, 0);
    heap.verify();
}

#[test]
fn a_scope_that_wants_everything_is_told_so_at_once() {
    let heap = heap(1);
    let values: Vec<_> = (0..4000u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
    let started = std::time::Instant::now();
    let mut scope = heap.enter();
    let mut held = 0;
    let error = loop {
        match values[held].get(&scope) {
            Ok(value) => assert_eq!(value[0], held as u64),
            Err(error) => break error,
        }
        held += 1;
    };
    assert_eq!(error, FarError::NearFull);
    // Tables take some of the 256 pages.
    assert!(held >= 24, "a scope can use about an eighth of the near memory: {held} pages");
    assert!(started.elapsed() < Duration::from_secs(5), "no waiting for oneself");
    assert!(scope.renew());
    assert!(values[held].get(&scope).is_ok());
    // What is dropped in a scope that is full is dropped later.
    drop(scope);
    drop(values);
    heap.verify();
}

#[test]
fn destructors_wait_for_the_end_of_a_full_scope() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let pages: Vec<_> = (0..2000u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
    let counted: Vec<_> = (0..20_000).map(|_| heap.alloc(Counted::new(&alive)).unwrap()).collect();
    let scope = heap.enter();
    for page in &pages {
        if page.get(&scope).is_err() {
            break;
        }
    }
    drop(counted);
    assert!(alive.load(Ordering::Relaxed) > 0, "the test needs a full scope");
    drop(scope);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    assert_eq!(heap.stats().lost_values, 0);
    drop(pages);
    heap.verify();
}

#[test]
fn a_forgotten_scope_costs_memory_and_no_hang() {
    let patience = Duration::from_millis(50);
    let heap = builder().near(MIB).near_max(MIB).patience(patience).build().unwrap();
    let value = heap.alloc(5u32).unwrap();
    std::mem::forget(heap.enter());
    let thread = std::thread::scope(|threads| {
        let forget = || {
            let scope = heap.enter();
            let seen = *value.get(&scope).unwrap();
            std::mem::forget(scope);
            seen
        };
        threads.spawn(forget).join().unwrap()
    });
    assert_eq!(thread, 5);
    drop(heap);
    drop(value);
}

/// Whoever waits for a scope that does not end is told so, and by whom it is held; afterwards all goes on.
#[test]
fn a_scope_that_does_not_end_is_reported_to_those_who_wait() {
    let patience = Duration::from_millis(200);
    let heap = builder().near(2 * MIB).near_max(2 * MIB).patience(patience).build().unwrap();
    let values: Vec<_> = (0..1024u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
    let (entered, is_entered) = mpsc::channel();
    let (end, may_end) = mpsc::channel::<()>();
    std::thread::scope(|threads| {
        let (heap, values) = (&heap, &values);
        let holder = threads.spawn(move || {
            let scope = heap.enter();
            assert_eq!(values[0].get(&scope).unwrap()[0], 0);
            entered.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
            let _ = may_end.recv();
            values[0].get(&scope).map(|value| value[0])
        });
        let holder_id = is_entered.recv().unwrap();
        // Each in a scope of its own, so what came near could leave if it were not for the other.
        let read_all = || values.iter().try_for_each(|value| value.get(&heap.enter()).map(drop));
        let error = loop {
            if let Err(error) = read_all() {
                break error;
            }
        };
        assert!(matches!(error, FarError::Stalled { after } if after >= patience), "{error}");
        let stats = heap.stats();
        // Counted from when the evictor first met the scope, which is a moment after somebody began to wait.
        assert!(stats.held_back >= patience / 2, "{:?}", stats.held_back);
        assert!(holder_id.ends_with(stats.held_by.to_string()), "{holder_id:?}");
        let executor = Executor::new(heap);
        let task = executor.block_on(async {
            for value in values {
                value.fetch(&heap.enter()).await?;
            }
            Ok(())
        });
        assert!(matches!(task, Err(FarError::Stalled { .. })), "{task:?}");
        drop(end);
        assert_eq!(holder.join().unwrap(), Ok(0));
        assert_eq!(read_all(), Ok(()));
        executor.block_on(async { values[7].fetch(&heap.enter()).await.map(drop) }).unwrap();
    });
    let stats = heap.stats();
    assert_eq!((stats.held_back, stats.held_by), (Duration::ZERO, 0));
    heap.verify();
}

#[test]
fn heaps_do_not_mix() {
    let (one, two) = (heap(1), heap(1));
    let value = one.alloc(5u32).unwrap();
    let scope = two.enter();
    assert_eq!(value.get(&scope), Err(FarError::OtherHeap));
    drop(scope);
    let scope = one.enter();
    assert_eq!(value.get(&scope), Ok(&5));
}

#[test]
fn values_too_large_are_given_back() {
    // Unoptimised, every move of the value takes stack.
    let thread = std::thread::Builder::new().stack_size(64 << 20).spawn(|| {
        let heap = heap(1);
        let error = heap.alloc([1u8; 1 << 20]).unwrap_err();
        assert_eq!(error.error, FarError::TooLarge { bytes: 1 << 20 });
        assert_eq!(error.value[99], 1);
        heap.verify();
    });
    thread.unwrap().join().unwrap();
}

/// Interior mutability writes through `&T`, which marks nothing: the bytes themselves say that the page changed.
#[test]
fn writes_through_shared_references_are_not_lost() {
    let heap = heap(1);
    let values: Vec<_> = (0..50_000).map(|_| heap.alloc(AtomicI64::new(0)).unwrap()).collect();
    for round in 1..=3 {
        for value in &values {
            let scope = heap.enter();
            assert_eq!(value.get(&scope).unwrap().fetch_add(1, Ordering::Relaxed), round - 1);
        }
    }
    heap.verify();
}

#[test]
fn far_memory_is_used_again() {
    let heap = builder().near(MIB).near_max(MIB).far(256 * MIB).paranoid(true).build().unwrap();
    // Far more in all than there are far addresses, of changing sizes.
    let mut pages_most = 0;
    for round in 0..12u64 {
        let small: Vec<_> = (0..20_000).map(|index| heap.alloc([index ^ round; 16]).unwrap()).collect();
        let large: Vec<_> = (0..100).map(|index| heap.alloc([index ^ round; 16_000]).unwrap()).collect();
        for (index, value) in small.iter().enumerate().step_by(97) {
            let scope = heap.enter();
            assert_eq!(*value.get(&scope).unwrap(), [index as u64 ^ round; 16]);
        }
        for (index, value) in large.iter().enumerate().step_by(9) {
            let scope = heap.enter();
            assert_eq!(value.get(&scope).unwrap()[15_999], index as u64 ^ round);
        }
        pages_most = pages_most.max(heap.stats().pages);
        drop((small, large));
        heap.verify();
    }
    assert!(pages_most * 4096 < 32 * MIB, "{pages_most} pages");
    assert!(heap.stats().discarded_pages > 0, "{:?}", heap.stats());
}

#[test]
fn the_near_budget_changes_while_running() {
    let heap = builder().near(8 * MIB).near_max(16 * MIB).build().unwrap();
    let values: Vec<_> = (0..10_000u64).map(|index| heap.alloc([index; 64]).unwrap()).collect();
    let check = || {
        for (index, value) in values.iter().enumerate() {
            let scope = heap.enter();
            assert_eq!(*value.get(&scope).unwrap(), [index as u64; 64]);
        }
    };
    check();
    assert_eq!(heap.stats().misses, 0, "everything fits: {:?}", heap.stats());
    heap.set_near(2 * MIB);
    check();
    assert_in_budget(&heap);
    heap.set_near(16 * MIB);
    check();
    let misses = heap.stats().misses;
    check();
    assert_eq!(heap.stats().misses, misses, "everything fits again");
    heap.verify();
}

/// Rng steps against `Option<Box<_>>`, one type per thread, at this near share.
fn random_steps(near_percent: u64, threads: u64) {
    let seed = seed();
    let bytes = (MIB * 100 / near_percent).max(10 * MIB);
    let near = (bytes * near_percent / 100).max(MIB);
    let heap = builder().near(near).near_max(near).far(1 << 30).paranoid(true).build().unwrap();
    let slots = (bytes / threads / 200) as usize;
    std::thread::scope(|scope| {
        let start = |thread| {
            let heap = &heap;
            scope.spawn(move || match thread % 3 {
                0 => steps(heap, Rng::with_seed(seed ^ thread << 32), slots * 200 / 80, |value| [value; 10]),
                1 => steps(heap, Rng::with_seed(seed ^ thread << 32), slots, |value| {
                    (value, vec![value; 3], [value; 20])
                }),
                _ => steps(heap, Rng::with_seed(seed ^ thread << 32), slots / 30, |value| [value; 900]),
            })
        };
        let handles: Vec<_> = (0..threads).map(start).collect();
        // Joined one by one: the end of the scope does not wait for what threads do at their very end.
        handles.into_iter().for_each(|handle| handle.join().unwrap());
    });
    assert_in_budget(&heap);
    heap.verify();
    println!("{:?}", heap.stats());
}

fn steps<T: Send + Clone + PartialEq + std::fmt::Debug + 'static>(
    heap: &Heap,
    mut random: Rng,
    slots: usize,
    make: impl Fn(u64) -> T,
) {
    let mut far: Vec<Option<FarBox<T>>> = (0..slots).map(|_| None).collect();
    let mut twin: Vec<Option<u64>> = vec![None; slots];
    for index in 0..slots {
        far[index] = Some(heap.alloc(make(index as u64)).unwrap());
        twin[index] = Some(index as u64);
    }
    for _ in 0..3_000 {
        let index = random.usize(..slots);
        let new = random.u64(..);
        match random.usize(..14) {
            10 => {
                let scope = heap.enter();
                let end = (index + 5).min(slots);
                // Threads whose scopes bring much at the same time share the room for that.
                match heap.get_many(&scope, far[index..end].iter().flatten()) {
                    Ok(values) => assert!(
                        values.into_iter().cloned().eq(twin[index..end].iter().flatten().map(|value| make(*value)))
                    ),
                    Err(error) => assert_eq!(error, FarError::NearFull),
                }
            }
            11 => {
                let Some(value) = &mut far[index] else { continue };
                let before = value.write(|value| core::mem::replace(value, make(new))).unwrap();
                assert_eq!(Some(before), twin[index].replace(new).map(&make));
            }
            12 => {
                let Some(value) = &far[index] else { continue };
                assert_eq!(value.read_once(T::clone).ok(), twin[index].map(&make));
                value.cold();
            }
            13 => {
                let Some(value) = &mut far[index] else { continue };
                *value.pin_mut().unwrap() = make(new);
                twin[index] = Some(new);
                let Some(pinned) = &far[index] else { continue };
                let pinned = pinned.pin().unwrap();
                let from = random.usize(..slots);
                for (value, twin) in far.iter().zip(&twin).skip(from).take(6) {
                    assert_eq!(value.as_ref().map(|value| value.read(T::clone).unwrap()), twin.map(&make));
                }
                assert_eq!(*pinned, make(new));
            }
            0 => {
                far[index] = Some(heap.alloc(make(new)).unwrap());
                twin[index] = Some(new);
            }
            1 => {
                far[index] = None;
                twin[index] = None;
            }
            2 => {
                let taken = far[index].take().map(|value| value.into_inner().map_err(|(_, error)| error).unwrap());
                assert_eq!(taken, twin[index].take().map(&make));
            }
            3 => {
                let other = random.usize(..slots);
                far.swap(index, other);
                twin.swap(index, other);
            }
            4 => {
                heap.prefetch(far[index..].iter().flatten().take(4));
            }
            5..=6 => {
                let scope = heap.enter();
                if let (Some(value), Some(twin)) = (&mut far[index], &mut twin[index]) {
                    *value.get_mut(&scope).unwrap() = make(new);
                    *twin = new;
                }
            }
            _ => {
                let mut scope = heap.enter();
                for index in index..(index + 8).min(slots) {
                    let Some(value) = &far[index] else { continue };
                    // Threads whose scopes bring much at the same time share the room for that.
                    if value.get(&scope) == Err(FarError::NearFull) {
                        assert!(scope.renew());
                    }
                    assert_eq!(Some(value.get(&scope).unwrap()), twin[index].map(&make).as_ref());
                }
            }
        }
    }
    for (far, twin) in far.iter().zip(&twin) {
        let scope = heap.enter();
        assert_eq!(far.as_ref().map(|value| value.get(&scope).unwrap().clone()), twin.map(&make));
    }
}

#[test]
fn random_steps_with_everything_near() {
    random_steps(100, 1);
}

#[test]
fn random_steps_with_a_quarter_near() {
    random_steps(25, 1);
}

#[test]
fn random_steps_with_little_near() {
    random_steps(little_percent(), 1);
}

#[test]
fn random_steps_of_threads_with_a_quarter_near() {
    random_steps(25, 6);
}

#[test]
fn random_steps_of_threads_with_a_tenth_near() {
    random_steps(10, 4);
}
