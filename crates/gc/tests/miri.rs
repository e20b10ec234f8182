//! A small history for Miri: `MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" cargo +nightly miri test -p farfield-gc --test miri`.
//! Runs everywhere else too. Danger: undefined behaviour that happens to work, between mutators and the collector.

use farfield::Heap;
use farfield_gc::collections::{AppendLog, OrderedMap, TrieMap};
use farfield_gc::{AnyObject, Atom, FarObject, GcHeap, Mutator, Ref, WeakRef};
use std::ops::Bound;
use std::time::Duration;

#[derive(FarObject, Default)]
struct Node {
    id: u32,
    visits: Atom<u32>,
    next: Ref<Node>,
    numbers: Ref<[u64]>,
    back: WeakRef<Node>,
}

fn heaps(near: u64) -> (Heap, GcHeap) {
    let builder = Heap::builder().near(near).near_max(near).far(1 << 28);
    let heap = builder.patience(Duration::from_secs(3600)).build().unwrap();
    let gc = GcHeap::in_heap(&heap).limit(8 << 20).build().unwrap();
    (heap, gc)
}

#[test]
fn a_small_graph_is_changed_and_collected() {
    let (near, count) = if cfg!(miri) { (1 << 18, 24) } else { (1 << 20, 600) };
    let (heap, gc) = heaps(near);
    let mut m = gc.enter();
    let table = m.root(m.alloc_array(count, |_| Ref::<Node>::null()).unwrap());
    for id in 0..count {
        m.safepoint_for(4096).unwrap();
        let node = m.alloc(Node { id: id as u32, ..Node::default() }).unwrap();
        // More than half of a page: they do not fit into near memory.
        node.numbers.store(&m, Some(m.alloc_array(400, |at| at as u64 + id as u64).unwrap()));
        let nodes = m.get(&table).unwrap();
        if let Some(before) = id.checked_sub(1) {
            let before = nodes[before].load(&m).unwrap();
            node.next.store(&m, before);
            node.back.store(&m, before).unwrap();
        }
        nodes[id].store(&m, Some(node));
    }
    std::thread::scope(|threads| {
        let collected = threads.spawn(|| gc.collect());
        let mut at = 0;
        // Each node is taken out of the table and put back, while the collector goes through it.
        while gc.stats().collections == 0 {
            {
                let nodes = m.get(&table).unwrap();
                let node = nodes[at % count].swap(&m, None).unwrap().expect("each is there");
                assert_eq!(node.numbers.load(&m).unwrap().expect("it was set")[399], 399 + u64::from(node.id));
                node.visits.fetch_add(1);
                assert!(nodes[at % count].compare_exchange(&m, None, Some(node)));
            }
            at += 1;
            m.safepoint().unwrap();
        }
        drop(m);
        collected.join().unwrap().unwrap();
    });
    assert_eq!(gc.stats().live_objects, 2 * count as u64 + 1);
    let m = gc.enter();
    // The first one is kept by the second one, and the last one by nobody.
    let last = {
        let nodes = m.get(&table).unwrap();
        (0..count).for_each(|at| {
            if at != 1 {
                nodes[at].store(&m, None)
            }
        });
        nodes[1].load(&m).unwrap().expect("it was kept").back.load(&m).unwrap().map(|node| node.id)
    };
    assert_eq!(last, Some(0));
    drop(m);
    gc.collect().unwrap();
    assert_eq!(gc.verify().unwrap().objects, 5);
    assert_eq!(gc.stats().live_objects, 5);
    drop((table, gc));
    heap.verify();
}

#[derive(FarObject)]
struct Shelf {
    names: TrieMap<Ref<str>, Ref<AnyObject>>,
    numbers: OrderedMap<u64, WeakRef<str>>,
    log: AppendLog<str>,
}

#[test]
fn collections_are_changed_by_two_threads_and_collected() {
    let (near, count) = if cfg!(miri) { (1 << 18, 20) } else { (1 << 20, 500) };
    let (_heap, gc) = heaps(near);
    let shelf = Shelf { names: TrieMap::new(), numbers: OrderedMap::new(), log: AppendLog::new() };
    let shelf = {
        let m = gc.enter();
        m.root(m.alloc(shelf).unwrap())
    };
    std::thread::scope(|threads| {
        for me in 0..2 {
            let (gc, shelf) = (&gc, &shelf);
            threads.spawn(move || {
                let mut m = gc.enter();
                for number in (me..count).step_by(2) {
                    let name = format!("name {}", number / 4);
                    let change = |m: &Mutator<'_>| {
                        let (shelf, text) = (m.get(shelf)?, m.alloc_str(&name)?);
                        shelf.names.insert(m, &name, text.as_any())?;
                        shelf.numbers.insert(m, number, text)?;
                        Ok(())
                    };
                    m.with_room(change).unwrap();
                    m.with_room(|m| m.get(shelf)?.log.push(m, m.alloc_str(&name)?)).unwrap();
                    if number % 3 == 0 {
                        m.with_room(|m| m.get(shelf)?.numbers.remove(m, &number)).unwrap();
                    }
                    m.safepoint().unwrap();
                }
            });
        }
        // Interpreted, a thread may take longer than a second from one safepoint to the next.
        threads.spawn(|| assert!(gc.collect().is_ok() || cfg!(miri)));
    });
    gc.collect().unwrap();
    let mut m = gc.enter();
    m.with_room(|m| m.get(&shelf)?.log.trim(m, count / 2)).unwrap();
    let shelf = m.get(&shelf).unwrap();
    assert_eq!((shelf.names.len(), shelf.log.len()), (count.div_ceil(4), count));
    let named = shelf.names.get(&m, "name 1").unwrap().unwrap();
    assert!(named.downcast::<str>(&m).is_some_and(|name| &*name == "name 1") && named.downcast::<[u8]>(&m).is_none());
    // Only the last text of each name has more than a weak reference.
    let numbers = shelf.numbers.range(&m, Bound::Unbounded, usize::MAX).unwrap();
    assert!(!numbers.is_empty() && numbers.len() as u64 <= count.div_ceil(4));
    assert!(numbers.iter().all(|(number, text)| **text == *format!("name {}", number / 4)));
}
