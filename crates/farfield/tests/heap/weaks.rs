//! `FarWeak` is a `Weak`, wherever its value is. Dangers: an owner of a value that has been dropped; a value that its weak pointers keep;
//! a weak pointer that leads to the next value in the same place; a weak pointer that needs a heap which is gone.

use crate::arcs::{Counted, sent_and_shared};
use crate::common::twin::steps;
use crate::common::{MIB, Rng, assert_in_budget, builder, heap, is_deep, little_percent, seed};
use farfield::{FarArc, FarBox, FarError, FarVec, FarWeak, Heap};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

fn number(owner: Option<FarArc<Counted>>) -> Option<u64> {
    owner.map(|owner| owner.read(|value| value.number).unwrap())
}

#[test]
fn the_last_owner_drops_the_value_and_frees_its_place() {
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let one = heap.alloc_shared(Counted::new(&alive, 5)).unwrap();
    let weak = sent_and_shared(one.downgrade());
    let more = [weak.clone(), one.downgrade()];
    assert_eq!((one.owners(), one.weak_count(), weak.owners(), weak.weak_count()), (1, 3, 1, 3));
    assert!(more.iter().all(|other| other.ptr_eq(&weak)));
    let two = weak.upgrade().unwrap();
    assert!(two.ptr_eq(&one) && two.owners() == 2);
    drop(one);
    assert_eq!((number(weak.upgrade()), alive.load(Ordering::Relaxed)), (Some(5), 1));
    drop(two);
    assert_eq!((number(weak.upgrade()), alive.load(Ordering::Relaxed)), (None, 0));
    assert_eq!((weak.owners(), weak.weak_count()), (0, 0));
    // The next values lie where this one was, and the pointers still lead nowhere.
    let others: Vec<_> = (0..200).map(|n| heap.alloc_shared(Counted::new(&alive, n)).unwrap()).collect();
    let to_others: Vec<_> = others.iter().map(FarArc::downgrade).collect();
    assert!(weak.upgrade().is_none() && more.iter().all(|weak| weak.upgrade().is_none()));
    assert!(to_others.iter().all(|other| !other.ptr_eq(&weak)));
    assert!(to_others.iter().zip(0..).all(|(other, n)| number(other.upgrade()) == Some(n)));
    heap.verify();
    drop(others);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    heap.verify();
}

#[test]
fn pointers_to_nothing_take_nothing() {
    let heap = heap(1);
    let before = heap.stats().table_bytes;
    let nothing: Vec<FarWeak<u64>> = vec![FarWeak::new(); 1000];
    assert!(nothing[0].upgrade().is_none() && nothing[0].owners() == 0 && nothing[0].weak_count() == 0);
    assert!(nothing[1].ptr_eq(&FarWeak::default()));
    let value = heap.alloc_shared(7u64).unwrap();
    assert!(!value.downgrade().ptr_eq(&nothing[0]));
    drop(value);
    assert!(heap.stats().table_bytes - before < 100_000);
}

/// As `Arc::get_mut` and `Arc::try_unwrap`.
#[test]
fn weak_pointers_forbid_changes_and_let_a_box_be_made() {
    let heap = heap(1);
    let mut value = heap.alloc_shared(7u64).unwrap();
    let weak = value.downgrade();
    assert_eq!(value.get_mut(&heap.enter()), Ok(None), "somebody could become an owner");
    let more = weak.clone();
    drop(weak);
    assert_eq!(value.get_mut(&heap.enter()), Ok(None));
    let other = more.upgrade().unwrap();
    drop(more);
    assert_eq!(value.get_mut(&heap.enter()), Ok(None), "there is another owner");
    drop(other);
    *value.get_mut(&heap.enter()).unwrap().unwrap() += 1;
    let weak = value.downgrade();
    let other = weak.upgrade().unwrap();
    let value = value.into_box().unwrap_err();
    drop(other);
    let mut owned = value.into_box().unwrap();
    assert!(weak.upgrade().is_none(), "a box has one owner");
    owned.write(|value| *value += 1).unwrap();
    let again = FarArc::from(owned);
    assert!(weak.upgrade().is_none() && again.weak_count() == 0);
    assert_eq!(again.downgrade().upgrade().unwrap().read(|value| *value), Ok(9));
    drop(again);
    heap.verify();
}

#[test]
fn a_value_may_point_to_itself() {
    struct Cyclic {
        me: FarWeak<Cyclic>,
        counted: Counted,
    }
    let alive = Arc::new(AtomicI64::new(0));
    let heap = heap(1);
    let mut outside = None;
    let value = heap
        .alloc_cyclic(|me| {
            assert!(me.upgrade().is_none() && me.owners() == 0 && me.weak_count() == 0, "not made yet");
            outside = Some(me.clone());
            Cyclic { me: me.clone(), counted: Counted::new(&alive, 3) }
        })
        .unwrap_or_else(|error| panic!("{}", error.error));
    let outside = outside.unwrap();
    assert_eq!((value.owners(), value.weak_count()), (1, 2));
    let me = value.read(|value| value.me.upgrade()).unwrap().unwrap();
    assert!(me.ptr_eq(&value) && me.downgrade().ptr_eq(&outside));
    drop(value);
    assert_eq!(outside.upgrade().unwrap().read(|value| value.counted.number), Ok(3));
    drop(me);
    assert!(outside.upgrade().is_none());
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    // If there is no room for the value, the caller has it back, and its pointer leads nowhere.
    struct Large {
        me: FarWeak<Large>,
        #[expect(dead_code, reason = "larger than near memory")]
        filling: [u64; 1 << 17],
    }
    let refuse = || {
        let large = heap.alloc_cyclic(|me| Large { me: me.clone(), filling: [0; 1 << 17] });
        let refused = large.map(drop).unwrap_err();
        assert!(matches!(refused.error, FarError::TooLarge { .. }), "{refused}");
        assert!(refused.value.me.upgrade().is_none());
    };
    std::thread::scope(|threads| {
        std::thread::Builder::new().stack_size(64 << 20).spawn_scoped(threads, refuse).unwrap().join().unwrap();
    });
    heap.verify();
}

/// What a destructor does with pointers to its own value, and to others, on the scope that is open around it.
#[test]
fn destructors_use_weak_pointers() {
    struct Node {
        me: FarWeak<Node>,
        next: FarWeak<Node>,
        counted: Counted,
        heap: Arc<Heap>,
        log: Arc<Mutex<Vec<u64>>>,
        left: Arc<Mutex<Vec<FarWeak<Node>>>>,
    }
    impl Drop for Node {
        fn drop(&mut self) {
            assert!(self.me.upgrade().is_none() && self.me.owners() == 0, "its last owner is gone");
            let scope = self.heap.enter();
            // The neighbour's last owner may be this one.
            if let Some(next) = self.next.upgrade() {
                self.log.lock().unwrap().push(next.get(&scope).unwrap().counted.number);
                self.left.lock().unwrap().push(next.downgrade());
            }
            self.left.lock().unwrap().push(self.me.clone());
            let other = self.heap.alloc_shared([self.counted.number; 64]).unwrap();
            let weak = other.downgrade();
            assert_eq!(weak.upgrade().unwrap().get(&scope).unwrap()[63], self.counted.number);
            drop(other);
            assert!(weak.upgrade().is_none());
        }
    }
    let alive = Arc::new(AtomicI64::new(0));
    let heap = Arc::new(heap(1));
    let (log, left) = (Arc::default(), Arc::default());
    let mut nodes: Vec<FarArc<Node>> = Vec::new();
    for n in 0..3000 {
        let next = nodes.last().map(FarArc::downgrade).unwrap_or_default();
        let make = |me: &FarWeak<Node>| Node {
            me: me.clone(),
            next,
            counted: Counted::new(&alive, n),
            heap: heap.clone(),
            log: Arc::clone(&log),
            left: Arc::clone(&left),
        };
        nodes.push(heap.alloc_cyclic(make).unwrap_or_else(|error| panic!("{}", error.error)));
    }
    let mut random = Rng::with_seed(seed());
    random.shuffle(&mut nodes);
    let mut expected: Vec<u64> = Vec::new();
    let mut gone = vec![false; 3000];
    for node in nodes {
        let scope = heap.enter();
        let n = node.get(&scope).unwrap().counted.number as usize;
        expected.extend(n.checked_sub(1).filter(|next| !gone[*next]).map(|next| next as u64));
        gone[n] = true;
        drop(node);
    }
    assert_eq!(*log.lock().unwrap(), expected);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    assert!(left.lock().unwrap().iter().all(|weak| weak.upgrade().is_none()));
    heap.verify();
}

/// Each node has an owner in the one before and a weak pointer to it.
#[test]
fn a_chain_with_pointers_back_is_dropped_in_a_small_stack() {
    struct Node {
        next: Mutex<Option<FarArc<Node>>>,
        back: FarWeak<Node>,
        #[expect(dead_code, reason = "counts")]
        counted: Counted,
    }
    const LONG: u64 = 20_000;
    let alive = Arc::new(AtomicI64::new(0));
    let heap = builder().near(8 * MIB).near_max(8 * MIB).far(1 << 30).build().unwrap();
    let node = |n, back| {
        let node = Node { next: Mutex::new(None), back, counted: Counted::new(&alive, n) };
        heap.alloc_shared(node).unwrap_or_else(|error| panic!("{}", error.error))
    };
    std::thread::scope(|threads| {
        let work = || {
            let first = node(0, FarWeak::new());
            let mut last = first.clone();
            for n in 1..LONG {
                let next = node(n, last.downgrade());
                last.read(|last| *last.next.lock().unwrap() = Some(next.clone())).unwrap();
                last = next;
            }
            let end = last.downgrade();
            // Back to the beginning by weak pointers alone.
            let mut steps = 0;
            while let Some(back) = last.read(|last| last.back.upgrade()).unwrap() {
                (last, steps) = (back, steps + 1);
            }
            assert_eq!(steps, LONG - 1);
            assert!(last.ptr_eq(&first));
            drop(last);
            assert_eq!(alive.load(Ordering::Relaxed), LONG as i64);
            drop(first);
            assert_eq!(alive.load(Ordering::Relaxed), 0, "all are dropped when the outermost drop returns");
            assert!(end.upgrade().is_none());
        };
        std::thread::Builder::new().stack_size(512 << 10).spawn_scoped(threads, work).unwrap().join().unwrap();
    });
    heap.verify();
}

/// Weak pointers keep no heap: the far addresses of the heaps that are left would not suffice.
#[test]
fn weak_pointers_outlive_heaps_and_do_not_keep_them() {
    let alive = Arc::new(AtomicI64::new(0));
    let mut weak = Vec::new();
    for round in 0..40 {
        let heap = builder().near(MIB).near_max(MIB).far(1 << 40).build().unwrap();
        let owners: Vec<_> = (0..20).map(|n| heap.alloc_shared(Counted::new(&alive, n)).unwrap()).collect();
        weak.extend(owners.iter().map(FarArc::downgrade));
        drop(heap);
        assert_eq!(number(weak[round * 20 + 7].upgrade()), Some(7), "a value keeps its heap");
        let other = weak[round * 20 + 8].upgrade();
        drop(owners);
        assert_eq!(number(other), Some(8));
        assert!(weak.iter().all(|weak| weak.upgrade().is_none()));
    }
    let copies = weak.clone();
    drop(weak);
    assert!(copies.iter().all(|weak| weak.upgrade().is_none() && weak.weak_count() == 0));
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

/// Cells count in the budget, and go: those of values that are gone, and those to which no pointer leads any more.
#[test]
fn cells_are_in_the_budget_and_go() {
    let heap = heap(8);
    let values: Vec<_> = (0..10_000u64).map(|n| heap.alloc_shared(n).unwrap()).collect();
    let before = heap.stats().table_bytes;
    let weak: Vec<_> = values.iter().map(FarArc::downgrade).collect();
    let tables = heap.stats().table_bytes - before;
    assert!((10_000 * 48..10_000 * 180).contains(&tables), "{tables}");
    assert_in_budget(&heap);
    drop(weak);
    // One pointer at a time, each to another value: the table does not grow with their number.
    for round in 0..3 {
        for (value, n) in values.iter().zip(0u64..) {
            assert_eq!(value.downgrade().upgrade().unwrap().read(|value| *value), Ok(n), "round {round}");
        }
        assert!(heap.stats().table_bytes < before + tables + 20_000, "{:?}", heap.stats());
    }
    heap.verify();
    let weak: Vec<_> = values.iter().map(FarArc::downgrade).collect();
    drop(values);
    assert!(heap.stats().table_bytes < before + 40_000, "{:?}", heap.stats());
    assert!(weak.iter().all(|weak| weak.upgrade().is_none()));
    heap.verify();
}

/// Counts move to the cell of a value and back, and none is lost.
#[test]
fn counts_go_to_cells_and_back() {
    let heap = heap(4);
    let values: Vec<_> = (0..2000u64).map(|n| heap.alloc_shared(n).unwrap()).collect();
    let copies: Vec<_> = values.iter().zip(0..).map(|(value, n)| vec![value.clone(); n % 4]).collect();
    for round in 0..4 {
        for (n, value) in values.iter().enumerate() {
            let weak = value.downgrade();
            assert_eq!((weak.owners(), value.owners()), (1 + n as u64 % 4, 1 + n as u64 % 4), "round {round}");
        }
        heap.verify();
    }
    drop(values);
    for (n, copies) in copies.into_iter().enumerate() {
        assert!(copies.iter().all(|copy| copy.owners() == n as u64 % 4));
    }
    heap.verify();
}

/// Threads make owners of weak pointers while others drop the last ones. What a value holds in an `Arc` says whether it lives.
#[test]
fn threads_upgrade_and_drop() {
    struct Shared {
        token: Arc<AtomicBool>,
        filling: [u64; 40],
    }
    impl Drop for Shared {
        fn drop(&mut self) {
            assert!(!self.token.swap(true, Ordering::SeqCst), "dropped once");
        }
    }
    type Slot = Mutex<Option<(FarWeak<Shared>, Weak<AtomicBool>, u64)>>;
    let heap = heap(1);
    let slots: Vec<Slot> = (0..16).map(|_| Mutex::default()).collect();
    let (found, gone) = (AtomicU64::new(0), AtomicU64::new(0));
    let seed = seed();
    std::thread::scope(|threads| {
        let work = |thread: u64| {
            let (heap, slots, found, gone) = (&heap, &slots, &found, &gone);
            move || {
                let mut random = Rng::with_seed(seed ^ thread << 32);
                let mut own: Vec<FarArc<Shared>> = Vec::new();
                for step in 0..6_000u64 {
                    let slot = &slots[random.usize(..slots.len())];
                    match random.usize(..8) {
                        0 => {
                            let token = Arc::new(AtomicBool::new(false));
                            let number = thread << 32 | step;
                            let (weak_token, value) = (Arc::downgrade(&token), Shared { token, filling: [number; 40] });
                            let owner = heap.alloc_shared(value).unwrap_or_else(|error| panic!("{}", error.error));
                            *slot.lock().unwrap() = Some((owner.downgrade(), weak_token, number));
                            own.push(owner);
                        }
                        1 if !own.is_empty() => drop(own.swap_remove(random.usize(..own.len()))),
                        2 if !own.is_empty() => {
                            let owner = own.swap_remove(random.usize(..own.len()));
                            match owner.into_box() {
                                Ok(only) => own.push(FarArc::from(only)),
                                Err(owner) => own.push(owner),
                            }
                        }
                        _ => {
                            let Some((weak, token, number)) = slot.lock().unwrap().clone() else { continue };
                            let was_gone = token.strong_count() == 0;
                            match weak.upgrade() {
                                Some(owner) => {
                                    assert!(!was_gone, "an owner of a value that is gone");
                                    let scope = heap.enter();
                                    let value = owner.get(&scope).unwrap();
                                    assert!(!value.token.load(Ordering::SeqCst) && value.filling == [number; 40]);
                                    drop(scope);
                                    found.fetch_add(1, Ordering::Relaxed);
                                    if own.len() < 40 && random.bool() {
                                        own.push(owner);
                                    }
                                }
                                None => _ = gone.fetch_add(1, Ordering::Relaxed),
                            }
                        }
                    }
                }
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| threads.spawn(work(thread))).collect();
        // Their ends too, in which they give up what they fill: a scope waits for less.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    assert!(found.load(Ordering::Relaxed) > 200 && gone.load(Ordering::Relaxed) > 10, "{found:?} {gone:?}");
    // Values that had to wait for a scope to end are dropped now.
    drop(heap.enter());
    for slot in slots {
        let Some((weak, token, _)) = slot.into_inner().unwrap() else { continue };
        assert!(weak.upgrade().is_none() && token.upgrade().is_none());
    }
    heap.verify();
}

/// Random steps against `Arc` and `Weak`, at this near share: pointers in near tables and in a far vector.
fn random_steps(near_percent: u64) {
    let mut random = Rng::with_seed(seed() ^ near_percent << 40);
    let bytes = (MIB * 100 / near_percent).max(6 * MIB);
    // What is known of shared values is near, and a long history has a pointer to most of them.
    let least = if is_deep() { 4 * MIB } else { 2 * MIB };
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
    // A few, so that many pointers lead to a value that many steps concern.
    let few = slots / 16;
    let mut weak: Vec<FarWeak<Counted>> = vec![FarWeak::new(); few];
    let mut weak_twins: Vec<Weak<u64>> = (0..few).map(|_| Weak::new()).collect();
    let mut shelf: FarVec<FarBox<FarWeak<Counted>>> = FarVec::new();
    let mut shelf_twin: Vec<Weak<u64>> = Vec::new();
    for step in 0..steps(6_000) {
        let (index, other) = (random.usize(..few), random.usize(..few));
        match random.usize(..10) {
            0 => {
                let (Some(one), Some(twin)) = (&table[index], &twins[index]) else { continue };
                (weak[other], weak_twins[other]) = (one.downgrade(), Arc::downgrade(twin));
            }
            1 => {
                (table[index], twins[index]) = (weak[other].upgrade(), weak_twins[other].upgrade());
                assert_eq!(table[index].is_some(), twins[index].is_some());
            }
            2 => {
                table[index] = Some(heap.alloc_shared(Counted::new(&alive, step)).unwrap());
                twins[index] = Some(Arc::new(step));
            }
            3 => (table[index], twins[index]) = (None, None),
            4 => (weak[index], weak_twins[index]) = (weak[other].clone(), weak_twins[other].clone()),
            5 => {
                let far = heap.alloc(weak[index].clone()).unwrap_or_else(|error| panic!("{}", error.error));
                shelf.push(&heap.enter(), far).unwrap_or_else(|error| panic!("{}", error.error));
                shelf_twin.push(weak_twins[index].clone());
            }
            6 => {
                let Some(taken) = shelf.pop(&heap.enter()).unwrap() else { continue };
                weak[index] = taken.into_inner().map_err(|(_, error)| error).unwrap();
                weak_twins[index] = shelf_twin.pop().unwrap();
            }
            7 => {
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
            8 => {
                let (Some(one), Some(twin)) = (table[index].take(), twins[index].take()) else { continue };
                match (one.into_box(), Arc::try_unwrap(twin)) {
                    (Ok(far), Ok(number)) => {
                        assert_eq!(far.into_inner().map_err(|(_, error)| error).unwrap().number, number)
                    }
                    (Err(far), Err(twin)) => (table[other], twins[other]) = (Some(far), Some(twin)),
                    _ => panic!("one says it is the last"),
                }
            }
            _ => {
                assert_eq!(number(weak[index].upgrade()), weak_twins[index].upgrade().map(|twin| *twin));
                let counts = (weak[index].owners(), weak[index].weak_count());
                let expected = (weak_twins[index].strong_count() as u64, weak_twins[index].weak_count() as u64);
                assert_eq!(counts, expected);
                assert_eq!(weak[index].ptr_eq(&weak[other]), weak_twins[index].ptr_eq(&weak_twins[other]));
                if let (Some(one), Some(twin)) = (&table[index], &twins[index]) {
                    let expected = (Arc::strong_count(twin) as u64, Arc::weak_count(twin) as u64);
                    assert_eq!((one.owners(), one.weak_count()), expected);
                }
            }
        }
    }
    let mut different: Vec<*const u64> = twins.iter().flatten().map(Arc::as_ptr).collect();
    different.sort_unstable();
    different.dedup();
    assert_eq!(alive.load(Ordering::Relaxed), different.len() as i64);
    assert!(heap.stats().written_pages > 0 || near_percent == 100);
    assert_in_budget(&heap);
    heap.verify();
    drop(table);
    assert_eq!((alive.load(Ordering::Relaxed), heap.stats().lost_values), (0, 0));
    assert!(weak.iter().all(|weak| weak.upgrade().is_none()));
    drop((weak, shelf));
    heap.verify();
}

#[test]
fn random_steps_with_everything_near() {
    random_steps(100);
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
