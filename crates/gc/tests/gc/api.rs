//! Objects are what was put into them, wherever they are, and live exactly as long as something leads to them.

use crate::common::{MIB, assert_in_budget, far_heap, heaps};
use farfield_gc::{Atom, Bytes, FarObject, GcHeap, Mutator, Ref, WeakRef};

#[derive(FarObject, Default)]
struct Node {
    id: u64,
    count: Atom<u32>,
    next: Ref<Node>,
    back: WeakRef<Node>,
    bytes: Ref<Bytes>,
}

#[derive(FarObject, Clone, Copy, PartialEq, Debug)]
enum Kind {
    #[expect(dead_code, reason = "a number that is not 0 is to come back")]
    Source,
    Derived,
}

/// References at odd places: in an array, in a struct inside of it, and behind small fields.
#[derive(FarObject)]
struct Nested<T> {
    small: u8,
    pairs: [Pair<T>; 3],
    kind: Kind,
    flag: bool,
}

#[derive(FarObject)]
struct Pair<T>(u32, Ref<T>, WeakRef<T>);

impl<T> Default for Pair<T> {
    fn default() -> Pair<T> {
        Pair(0, Ref::null(), WeakRef::null())
    }
}

fn node(id: u64) -> Node {
    Node { id, ..Node::default() }
}

#[test]
fn objects_that_are_loaded_together_are_read_together() {
    let (heap, gc) = heaps(4, 64);
    let mut m = gc.enter();
    const LEN: usize = 20_000;
    let table = m.root(m.alloc_array(LEN / 500, |_| Ref::<[Ref<Node>]>::null()).unwrap());
    for first in (0..LEN).step_by(500) {
        m.safepoint_for(1 << 20).unwrap();
        let chunk = m.root(m.alloc_array(500, |_| Ref::<Node>::null()).unwrap());
        m.get(&table).unwrap()[first / 500].store(&m, Some(m.get(&chunk).unwrap()));
        for at in 0..500 {
            let object = m.alloc(node((first + at) as u64)).unwrap();
            object.bytes.store(&m, Some(m.alloc_copy(&[1; 1000]).unwrap()));
            m.get(&chunk).unwrap()[at].store(&m, Some(object));
            m.safepoint().unwrap();
        }
    }
    let before = heap.stats();
    for chunk in 0..LEN / 500 {
        let nodes = m.get(&table).unwrap()[chunk].load(&m).unwrap().unwrap();
        let some: Vec<&Ref<Node>> = nodes.iter().step_by(25).collect();
        let found = m.load_many(&some).unwrap();
        for (at, object) in found.iter().enumerate() {
            assert_eq!(object.unwrap().id, (chunk * 500 + at * 25) as u64);
        }
        m.safepoint().unwrap();
    }
    let stats = heap.stats();
    let (reads, ahead) = (stats.misses - before.misses, stats.prefetches - before.prefetches);
    println!("{reads} misses, {ahead} prefetches");
    assert!(ahead > 10 * LEN as u64 / 500, "{ahead} prefetches, {reads} misses");
    // Nothing leads out of a loose reference.
    assert_eq!(m.prefetch([&Ref::<Node>::null()]), 0);
}

#[test]
fn a_list_that_is_mostly_far_is_walked_and_collected() {
    let (heap, gc) = heaps(1, 32);
    let mut m = gc.enter();
    const LEN: u64 = 60_000;
    let mut head = None;
    for id in 0..LEN {
        let object = m.alloc(node(id)).unwrap();
        if let Some(head) = &head {
            object.next.store(&m, Some(m.get(head).unwrap()));
        }
        object.count.fetch_add(id as u32);
        head = Some(m.root(object));
        m.safepoint().unwrap();
    }
    let mut head = head.unwrap();
    m.collect().unwrap();
    assert_eq!(gc.stats().live_objects, LEN);
    assert_eq!(gc.stats().roots, 1);
    let walk = head.clone();
    let mut at = walk;
    for id in (0..LEN).rev() {
        let next = {
            let object = m.get(&at).unwrap();
            assert_eq!((object.id, object.count.get()), (id, id as u32));
            object.next.load(&m).unwrap().map(|next| m.root(next))
        };
        if id == LEN / 2 {
            head = at.clone();
        }
        m.safepoint().unwrap();
        match next {
            Some(next) => at = next,
            None => assert_eq!(id, 0),
        }
    }
    drop(at);
    m.collect().unwrap();
    let stats = gc.stats();
    assert_eq!(stats.live_objects, LEN / 2 + 1);
    assert!(stats.freed_pages > 300, "{stats:?}");
    drop(m);
    let verified = gc.verify().unwrap();
    assert_eq!((verified.objects, verified.allocated), (LEN / 2 + 1, LEN / 2 + 1));
    drop(head);
    gc.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 0);
    assert_in_budget(&heap);
    drop(gc);
    heap.verify();
}

#[test]
fn cycles_die_and_weak_references_to_them_end() {
    let (_heap, gc) = heaps(2, 4);
    let mut m = gc.enter();
    let (keeper, other) = {
        let (keeper, first, second) = (m.alloc(node(0)).unwrap(), m.alloc(node(1)).unwrap(), m.alloc(node(2)).unwrap());
        first.next.store(&m, Some(second));
        second.next.store(&m, Some(first));
        second.bytes.store(&m, Some(m.alloc_copy(b"gone").unwrap()));
        keeper.back.store(&m, Some(first)).unwrap();
        (m.root(keeper), m.root(second))
    };
    m.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 4);
    {
        let first = m.get(&keeper).unwrap().back.load(&m).unwrap().unwrap();
        assert_eq!(first.id, 1);
        assert!(first.next.load(&m).unwrap().unwrap().is(m.get(&other).unwrap()));
    }
    drop(other);
    m.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 1);
    assert!(m.get(&keeper).unwrap().back.load(&m).unwrap().is_none());
    // The entries of the dead are used again, and no old weak reference finds the new objects.
    for round in 0..3000 {
        let object = m.alloc(node(round)).unwrap();
        assert!(m.get(&keeper).unwrap().back.load(&m).unwrap().is_none());
        m.get(&keeper).unwrap().next.store(&m, Some(object));
        if round % 100 == 0 {
            m.collect().unwrap();
        }
    }
}

/// Pages of entries are given back with those of objects, and the entries that come in their place are not found by old weak references.
#[test]
fn entries_of_the_dead_take_no_memory() {
    const WEAK: usize = 2000;
    let (heap, gc) = heaps(1, 16);
    let mut m = gc.enter();
    let weak = m.with_room(|m| Ok(m.root(m.alloc_array(WEAK, |_| WeakRef::<[u64; 3]>::null())?))).unwrap();
    m.collect().unwrap();
    // The mutator has pages in reserve from now on.
    m.safepoint().unwrap();
    let at_rest = gc.stats().used_bytes;
    for round in 0..4 {
        let table = m.with_room(|m| Ok(m.root(m.alloc_array(100, |_| Ref::<[Ref<[u64; 3]>]>::null())?))).unwrap();
        for chunk in 0..100 {
            let fill = |m: &Mutator<'_>| {
                let (objects, weak) = (m.alloc_array(400, |_| Ref::null())?, m.get(&weak)?);
                for at in 0..400 {
                    let object = m.alloc([round; 3])?;
                    objects[at].store(m, Some(object));
                    if chunk * 400 + at < WEAK {
                        weak[chunk * 400 + at].store(m, Some(object))?;
                    }
                }
                m.get(&table)?[chunk].store(m, Some(objects));
                Ok(())
            };
            m.with_room(fill).unwrap();
            m.safepoint().unwrap();
        }
        let found = |m: &mut Mutator<'_>, at: usize| {
            let found = m.with_room(|m| Ok(m.get(&weak)?[at].load(m)?.map(|object| object[2]))).unwrap();
            m.safepoint().unwrap();
            found
        };
        (0..WEAK).for_each(|at| assert_eq!(found(&mut m, at), Some(round)));
        assert!(gc.stats().used_bytes > at_rest + 40_000 * 40, "{:?}", gc.stats());
        drop(table);
        m.collect().unwrap();
        assert!(gc.stats().used_bytes <= at_rest + 4 * 4096, "{at_rest}, {:?}", gc.stats());
        (0..WEAK).for_each(|at| assert_eq!(found(&mut m, at), None));
    }
    drop((m, weak));
    gc.verify().unwrap();
    drop(gc);
    heap.verify();
}

#[test]
fn references_are_found_wherever_a_type_has_them() {
    let (_heap, gc) = heaps(2, 4);
    let mut m = gc.enter();
    let root = {
        let value = Nested { small: 7, pairs: Default::default(), kind: Kind::Derived, flag: true };
        let object = m.alloc(value).unwrap();
        for (at, pair) in object.pairs.iter().enumerate() {
            let target = m.alloc(at as u64).unwrap();
            pair.1.store(&m, Some(target));
            pair.2.store(&m, Some(target)).unwrap();
        }
        m.root(object)
    };
    let array = {
        let array = m.alloc_array(1000, |_| Pair::<u64>::default()).unwrap();
        for (at, pair) in array.iter().enumerate() {
            pair.1.store(&m, Some(m.alloc(1000 + at as u64).unwrap()));
        }
        m.root(array)
    };
    m.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 1 + 3 + 1 + 1000);
    {
        let object = m.get(&root).unwrap();
        assert_eq!((object.small, object.kind, object.flag), (7, Kind::Derived, true));
        for (at, pair) in object.pairs.iter().enumerate() {
            assert_eq!((*pair.1.load(&m).unwrap().unwrap(), pair.0), (at as u64, 0));
            assert!(pair.2.load(&m).unwrap().unwrap().is(pair.1.load(&m).unwrap().unwrap()));
        }
        assert_eq!(m.get(&array).unwrap().len(), 1000);
        for (at, pair) in m.get(&array).unwrap().iter().enumerate() {
            assert_eq!(*pair.1.load(&m).unwrap().unwrap(), 1000 + at as u64);
        }
        let pair = &object.pairs[1];
        let (one, two) = (pair.1.load(&m).unwrap(), object.pairs[2].1.load(&m).unwrap());
        assert!(!pair.1.compare_exchange(&m, two, None));
        assert!(pair.1.compare_exchange(&m, one, two));
        assert_eq!(pair.1.swap(&m, None).unwrap().as_deref(), Some(&2));
        assert!(pair.1.is_null() && pair.1.swap(&m, one).unwrap().is_none());
    }
    m.safepoint().unwrap();
    drop(m);
    gc.verify().unwrap();
}

#[test]
fn objects_of_every_size_come_back() {
    let (heap, gc) = heaps(2, 64);
    let mut m = gc.enter();
    let sizes = [0, 1, 15, 16, 17, 100, 2031, 2032, 2033, 4079, 4080, 4081, 10_000, 65_536, 90_000];
    let mut roots = Vec::new();
    for round in 0..40u8 {
        for size in sizes {
            m.safepoint_for(size + 64).unwrap();
            let bytes: Vec<u8> = (0..size).map(|at| (at as u8).wrapping_mul(3) ^ round).collect();
            let object = m.alloc_copy(&bytes).unwrap();
            roots.push((m.root(object), bytes));
        }
    }
    m.collect().unwrap();
    for keep in [2, 3] {
        for (root, bytes) in &roots {
            assert_eq!(&m.get(root).unwrap()[..], &bytes[..]);
            m.safepoint().unwrap();
        }
        let mut at = 0;
        roots.retain(|_| {
            at += 1;
            at % keep == 0
        });
        m.collect().unwrap();
        assert_eq!(gc.stats().live_objects, roots.len() as u64);
    }
    drop(m);
    assert_eq!(gc.verify().unwrap().objects, roots.len() as u64);
    roots.clear();
    gc.collect().unwrap();
    let stats = gc.stats();
    // Pages of entries stay.
    assert!(stats.live_objects == 0 && stats.used_bytes <= 4 * 4096, "{stats:?}");
    drop(gc);
    heap.verify();
}

#[test]
fn roots_outlive_their_heap_and_another_can_follow() {
    let heap = far_heap(2);
    let gc = GcHeap::in_heap(&heap).limit(4 * MIB).build().unwrap();
    let root = {
        let m = gc.enter();
        m.root(m.alloc(1u64).unwrap())
    };
    assert!(GcHeap::in_heap(&heap).build().is_err());
    drop(gc);
    // The root still keeps the heap's memory.
    assert!(GcHeap::in_heap(&heap).build().is_err());
    drop(root);
    let gc = GcHeap::in_heap(&heap).limit(4 * MIB).build().unwrap();
    let m = gc.enter();
    assert_eq!(*m.alloc(2u64).unwrap(), 2);
    drop(m);
    drop(gc);
    heap.verify();
}

#[test]
fn threads_share_objects_and_wait_for_each_other() {
    let (heap, gc) = heaps(2, 4);
    let shared = {
        let m = gc.enter();
        m.root(m.alloc_array(64, |_| Ref::<Node>::null()).unwrap())
    };
    std::thread::scope(|threads| {
        for thread in 0..4u64 {
            let (gc, shared) = (&gc, shared.clone());
            threads.spawn(move || {
                let mut m = gc.enter();
                for round in 0..4000u64 {
                    {
                        let object = m.alloc(node(thread << 32 | round)).unwrap();
                        object.bytes.store(&m, Some(m.alloc_copy(&[thread as u8; 500]).unwrap()));
                        let array = m.get(&shared).unwrap();
                        let slot = &array[(round * 7 + thread) as usize % 64];
                        if let Some(before) = slot.swap(&m, Some(object)).unwrap() {
                            let bytes = before.bytes.load(&m).unwrap().unwrap();
                            assert_eq!(&bytes[..], &[(before.id >> 32) as u8; 500][..]);
                        }
                    }
                    m.safepoint().unwrap();
                    if round % 1000 == 0 {
                        m.blocking(std::thread::yield_now);
                    }
                }
            });
        }
    });
    let stats = gc.stats();
    assert!(stats.collections > 0 && stats.given_up == 0, "{stats:?}");
    gc.collect().unwrap();
    let verified = gc.verify().unwrap();
    assert_eq!((verified.objects, verified.allocated), (1 + 2 * 64, 1 + 2 * 64));
    drop((shared, gc));
    heap.verify();
}
