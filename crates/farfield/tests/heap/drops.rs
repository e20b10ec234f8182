//! Destructors: in a stack that has an end, and all of them though some panic.
//!
//! Danger: a chain of owners that overflows the stack; values that are never dropped because another one panicked; places that stay in use.

use crate::common::{MIB, builder};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use farfield::collections::{FarBTreeMap, FarList, FarMap, FarQueue, FarVec};
use farfield::{FarArc, FarBox, Heap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

fn heap() -> Heap {
    builder().near(2 * MIB).near_max(2 * MIB).far(1 << 30).build().unwrap()
}

/// Far less than a chain of this length would need.
const STACK: usize = 512 << 10;
const LONG: u64 = 30_000;

fn in_a_small_stack(act: impl FnOnce() + Send) {
    std::thread::scope(|threads| {
        std::thread::Builder::new().stack_size(STACK).spawn_scoped(threads, act).unwrap().join().unwrap();
    });
}

/// Counts how often a link was dropped.
struct Link(&'static AtomicU64);

impl Drop for Link {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[test]
fn a_chain_of_boxes_of_any_length_is_dropped() {
    static DROPS: AtomicU64 = AtomicU64::new(0);
    struct Node(#[expect(dead_code)] Option<FarBox<Node>>, #[expect(dead_code)] [u64; 4], #[expect(dead_code)] Link);
    let heap = heap();
    in_a_small_stack(|| {
        let mut head = None;
        for number in 0..LONG {
            head = Some(
                heap.alloc(Node(head, [number; 4], Link(&DROPS))).unwrap_or_else(|error| panic!("{}", error.error)),
            );
        }
        drop(head);
        assert_eq!(DROPS.load(Relaxed), LONG, "all are dropped when the outermost drop returns");
    });
    heap.verify();
}

#[test]
fn a_chain_of_shared_values_of_any_length_is_dropped() {
    static DROPS: AtomicU64 = AtomicU64::new(0);
    struct Node(#[expect(dead_code)] Option<FarArc<Node>>, #[expect(dead_code)] Link);
    let heap = heap();
    in_a_small_stack(|| {
        let mut head = None;
        for _ in 0..LONG {
            let node = heap.alloc_shared(Node(head, Link(&DROPS)));
            head = Some(node.unwrap_or_else(|error| panic!("{}", error.error)));
        }
        let other = head.clone();
        drop(head);
        assert_eq!(DROPS.load(Relaxed), 0);
        drop(other);
        assert_eq!(DROPS.load(Relaxed), LONG);
    });
    heap.verify();
}

#[test]
fn collections_inside_of_each_other_of_any_depth_are_dropped() {
    static DROPS: AtomicU64 = AtomicU64::new(0);
    enum Nest {
        Vec(#[expect(dead_code)] FarVec<Nest>, #[expect(dead_code)] Link),
        List(#[expect(dead_code)] FarList<Nest>, #[expect(dead_code)] Link),
        Tree(#[expect(dead_code)] FarBTreeMap<u64, Nest>, #[expect(dead_code)] Link),
        Large(#[expect(dead_code)] FarBox<([u64; 700], Nest)>, #[expect(dead_code)] Link),
        End(#[expect(dead_code)] Link),
    }
    const DEEP: u64 = 4_000;
    let heap = heap();
    in_a_small_stack(|| {
        let mut nest = Nest::End(Link(&DROPS));
        for number in 0..DEEP {
            let (scope, link) = (heap.enter(), Link(&DROPS));
            nest = match number % 4 {
                0 => {
                    let mut vec = FarVec::new();
                    vec.push(&scope, nest).unwrap();
                    Nest::Vec(vec, link)
                }
                1 => {
                    let mut list = FarList::new();
                    list.push_back(&scope, nest).unwrap();
                    Nest::List(list, link)
                }
                2 => {
                    let mut tree = FarBTreeMap::new();
                    tree.insert(&scope, number, nest).unwrap();
                    Nest::Tree(tree, link)
                }
                _ => Nest::Large(
                    heap.alloc(([number; 700], nest)).unwrap_or_else(|error| panic!("{}", error.error)),
                    link,
                ),
            };
        }
        drop(nest);
        assert_eq!(DROPS.load(Relaxed), DEEP + 1);
    });
    heap.verify();
}

/// As std: siblings in the order of their declaration, however deep they lie.
#[test]
fn deeply_nested_values_are_dropped_in_order() {
    static ORDER: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    struct Noted(u64);
    impl Drop for Noted {
        fn drop(&mut self) {
            ORDER.lock().unwrap().push(self.0);
        }
    }
    struct Node(#[expect(dead_code)] Noted, #[expect(dead_code)] [Option<FarBox<Node>>; 3]);
    fn make(heap: &Heap, number: u64, depth: u32) -> Option<FarBox<Node>> {
        let depth = depth.checked_sub(1)?;
        // A path, at whose end are three.
        let many = if depth == 1 { 3 } else { 1 };
        let child = |side| if side < many { make(heap, number * 10 + side + 1, depth) } else { None };
        let node = Node(Noted(number), [child(0), child(1), child(2)]);
        Some(heap.alloc(node).unwrap_or_else(|error| panic!("{}", error.error)))
    }
    let heap = heap();
    for depth in [3, 20] {
        ORDER.lock().unwrap().clear();
        drop(make(&heap, 0, depth));
        let order = std::mem::take(&mut *ORDER.lock().unwrap());
        assert_eq!(order.len() as u32, depth + 2);
        assert!(order.is_sorted(), "{order:?}");
    }
}

/// One of them panics when it is dropped.
struct Fuse {
    number: u64,
    drops: &'static AtomicU64,
    #[expect(dead_code, reason = "so that values fill pages")]
    filling: [u64; 29],
}

/// The number of the one that panics.
const BROKEN: u64 = 1234;
const COUNT: u64 = 3000;

impl Drop for Fuse {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Relaxed);
        if self.number == BROKEN {
            std::panic::panic_any("a broken fuse");
        }
    }
}

fn fuse(number: u64, drops: &'static AtomicU64) -> Fuse {
    Fuse { number, drops, filling: [number; 29] }
}

/// Drops it, which panics, and counts.
fn breaks<C>(heap: &Heap, drops: &'static AtomicU64, all: C) {
    let what = core::any::type_name::<C>();
    let panic = catch_unwind(AssertUnwindSafe(|| drop(all))).expect_err(what);
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"a broken fuse"), "{what}");
    assert_eq!(drops.swap(0, Relaxed), COUNT, "{what}");
    heap.verify();
}

#[test]
fn all_are_dropped_though_one_panics() {
    static DROPS: AtomicU64 = AtomicU64::new(0);
    let heap = heap();
    let each =
        |mut put: Box<dyn FnMut(u64, Fuse) + '_>| (0..COUNT).for_each(|number| put(number, fuse(number, &DROPS)));

    let mut vec = FarVec::new();
    each(Box::new(|_, fuse| vec.push(&heap.enter(), fuse).unwrap()));
    breaks(&heap, &DROPS, vec);

    let mut list = FarList::new();
    each(Box::new(|_, fuse| list.push_front(&heap.enter(), fuse).unwrap()));
    breaks(&heap, &DROPS, list);

    let mut queue = FarQueue::new();
    each(Box::new(|_, fuse| queue.push(&heap.enter(), fuse).unwrap()));
    breaks(&heap, &DROPS, queue);

    let mut tree = FarBTreeMap::new();
    each(Box::new(|number, fuse| tree.insert(&heap.enter(), number, fuse).map(drop).unwrap()));
    breaks(&heap, &DROPS, tree);

    let map: FarMap<u64, Fuse> = FarMap::new(&heap).unwrap();
    each(Box::new(|number, fuse| map.insert(&heap.enter(), number, fuse).map(drop).unwrap()));
    breaks(&heap, &DROPS, map);

    // An owner of boxes, among them large ones, which are dropped where they lie.
    struct Owner(#[expect(dead_code)] Vec<FarBox<Fuse>>, #[expect(dead_code)] Vec<FarBox<(Fuse, [u64; 700])>>);
    let small = |number| heap.alloc(fuse(number, &DROPS)).unwrap_or_else(|error| panic!("{}", error.error));
    let large =
        |number| heap.alloc((fuse(number, &DROPS), [number; 700])).unwrap_or_else(|error| panic!("{}", error.error));
    for broken_is_large in [false, true] {
        let middle = if broken_is_large { BROKEN } else { BROKEN + 1 };
        let owner = Owner((0..middle).map(small).collect(), (middle..COUNT).map(large).collect());
        breaks(&heap, &DROPS, heap.alloc(owner).unwrap_or_else(|error| panic!("{}", error.error)));
    }
}

/// What a map has retired is dropped when no scope sees it, in the course of another change, which panics then.
#[test]
fn retired_entries_are_dropped_though_one_panics() {
    static DROPS: AtomicU64 = AtomicU64::new(0);
    let heap = heap();
    let map: FarMap<u64, Fuse> = FarMap::new(&heap).unwrap();
    let mut panics = 0;
    for number in 0..COUNT {
        let put = || map.insert(&heap.enter(), number % 10, fuse(number, &DROPS)).map(drop).unwrap();
        panics += u64::from(catch_unwind(AssertUnwindSafe(put)).is_err());
    }
    panics += u64::from(catch_unwind(AssertUnwindSafe(|| drop(map))).is_err());
    assert_eq!((DROPS.load(Relaxed), panics), (COUNT, 1));
    heap.verify();
}

/// The panic goes through all owners, whose other parts are dropped on the way.
#[test]
fn a_chain_is_dropped_though_its_links_panic() {
    static DROPS: AtomicU64 = AtomicU64::new(0);
    struct Node(#[expect(dead_code)] Option<FarBox<Node>>, #[expect(dead_code)] Fuse);
    let heap = heap();
    let mut head = None;
    for number in 0..COUNT {
        head = Some(heap.alloc(Node(head, fuse(number, &DROPS))).unwrap_or_else(|error| panic!("{}", error.error)));
    }
    breaks(&heap, &DROPS, head);
}
