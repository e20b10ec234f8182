//! Whatever goes wrong is a value or a clear panic, and the heap goes on.

use crate::common::{MIB, far_heap, heaps};
use farfield::{BuildError, FarBox, FarError, Heap, PoolError};
use farfield_gc::{BrokenRule, Bytes, FarObject, GcError, GcHeap, Ref, Root};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;

#[derive(FarObject, Default)]
struct Node {
    next: Ref<Node>,
    bytes: Ref<Bytes>,
}

fn message(panic: &(dyn core::any::Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or_default()
}

#[test]
fn live_data_above_the_limit_is_refused_and_what_is_dropped_makes_room() {
    let (heap, gc) = heaps(1, 4);
    let mut m = gc.enter();
    let mut roots = Vec::new();
    let error = loop {
        match m.alloc([1u64; 100]) {
            Ok(object) => roots.push(m.root(object)),
            Err(refused) => {
                assert_eq!(refused.value, [1; 100]);
                assert!(matches!(refused.error, GcError::SafepointDue | GcError::Far(FarError::NearFull)));
                if let Err(error) = m.safepoint() {
                    break error;
                }
            }
        }
    };
    assert!(
        matches!(error, GcError::HeapFull { limit_bytes: 0x40_0000, live_bytes } if live_bytes > 3 << 20),
        "{error}"
    );
    assert!(error.to_string().contains("raise the limit"));
    // 4 MiB of objects of 808 bytes, five in a page.
    assert!((4500..5200).contains(&roots.len()), "{}", roots.len());
    let stats = gc.stats();
    assert!(stats.used_bytes <= 4 * MIB);
    assert!(stats.stalls > 0 && stats.longest_stall <= stats.stalled && !stats.longest_stall.is_zero());
    for root in roots.drain(..).step_by(3) {
        assert_eq!(m.get(&root).unwrap()[99], 1);
        m.blocking(|| ());
    }
    m.safepoint().unwrap();
    m.alloc([1u64; 100]).unwrap();
    drop(m);
    gc.verify().unwrap();
    drop(gc);
    heap.verify();
}

#[test]
fn a_collection_that_a_waker_ends_is_an_error_and_changes_nothing() {
    let heap = far_heap(1);
    let gc = GcHeap::in_heap(&heap).limit(4 << 20).broken(BrokenRule::WakersReturn).build().unwrap();
    let mut m = gc.enter();
    let roots: Vec<_> = (0..1_000u64).map(|number| m.root(m.alloc([number; 8]).unwrap())).collect();
    for given_up in 1..4 {
        assert_eq!(m.collect(), Err(GcError::Panicked));
        let stats = gc.stats();
        assert_eq!((stats.given_up, stats.collections, stats.freed_pages), (given_up, 0, 0));
    }
    for (number, root) in (0..).zip(&roots) {
        m.blocking(|| ());
        assert_eq!(m.get(root).unwrap()[7], number);
    }
    // Who needs the room of what is dead is told.
    let error = loop {
        if m.alloc([0u64; 100]).is_err()
            && let Err(error) = m.safepoint()
        {
            break error;
        }
    };
    assert_eq!(error, GcError::Panicked);
    drop((roots, m));
    gc.verify().unwrap();
    drop(gc);
    heap.verify();
}

#[test]
fn objects_that_can_never_be_are_refused() {
    let (_heap, gc) = heaps(1, 4);
    let mut m = gc.enter();
    assert_eq!(m.alloc_copy(&vec![0u8; 5 << 20]).err(), Some(GcError::TooLarge { bytes: (5 << 20) + 16 }));
    // Below the limit, and more than near memory.
    let refused = m.alloc_copy(&vec![0u8; 2 << 20]).err();
    assert!(matches!(refused, Some(GcError::Far(FarError::TooLarge { .. }))), "{refused:?}");
    m.safepoint().unwrap();
    // Too many references for a description.
    #[derive(FarObject)]
    struct Wide {
        refs: [Ref<Node>; 5000],
    }
    let wide = Box::new(Wide { refs: [const { Ref::null() }; 5000] });
    let refused = m.alloc(*wide).err().unwrap();
    assert!(matches!(refused.error, GcError::Type { .. }), "{:?}", refused.error);
    assert_eq!(refused.value.refs.len(), 5000);
    m.alloc(1u64).unwrap();
}

#[test]
fn a_large_object_at_the_limit_has_room_after_a_safepoint() {
    let (_heap, gc) = heaps(2, 4);
    let mut m = gc.enter();
    for round in 0..200u32 {
        let bytes = vec![round as u8; 100_000];
        let kept = m.alloc_copy(&bytes);
        match kept {
            Ok(_) => {}
            Err(GcError::SafepointDue) => {
                m.safepoint().unwrap();
                m.alloc_copy(&bytes).unwrap();
            }
            Err(error) => {
                assert_eq!(error, GcError::Far(FarError::NearFull));
                m.safepoint().unwrap();
            }
        }
    }
    assert!(gc.stats().collections > 2);
}

#[test]
fn settings_out_of_bounds_are_refused() {
    let heap = far_heap(1);
    let argument = |result: Result<GcHeap, BuildError>| matches!(result, Err(BuildError::Argument(_)));
    assert!(argument(GcHeap::in_heap(&heap).limit(4096).build()));
    assert!(argument(GcHeap::in_heap(&heap).limit(2 << 30).build()));
    assert!(argument(GcHeap::in_heap(&heap).limit(4 << 20).region(100_000).build()));
    // Near memory has no room for the tables.
    let huge = Heap::builder().near(MIB).near_max(MIB).far(1 << 40).build().unwrap();
    let refused = GcHeap::in_heap(&huge).limit(1 << 40).build();
    assert!(matches!(refused, Err(BuildError::Far(FarError::TablesFull { .. }))), "{refused:?}");
    // Nothing that failed has taken the heap.
    GcHeap::in_heap(&heap).limit(4 << 20).region(64 << 10).build().unwrap();
    GcHeap::in_heap(&huge).limit(4 << 20).region(16 << 20).build().unwrap();
}

#[test]
fn a_thread_that_reaches_no_safepoint_is_named_and_the_collection_given_up() {
    let (_heap, gc) = heaps(1, 4);
    let mut m = gc.enter();
    let root = m.root(m.alloc([7u64; 8]).unwrap());
    std::thread::scope(|threads| {
        let (ready, is_ready) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let gc = &gc;
        let slow = std::thread::Builder::new().name("never-stops".to_owned());
        slow.spawn_scoped(threads, move || {
            let _m = gc.enter();
            ready.send(()).unwrap();
            ended.recv().unwrap();
        })
        .unwrap();
        is_ready.recv().unwrap();
        assert_eq!(m.collect(), Err(GcError::NoSafepoint { thread: "never-stops".to_owned() }));
        assert_eq!((gc.stats().collections, gc.stats().given_up), (0, 1));
        // The heap goes on, up to its limit.
        assert_eq!(m.get(&root).unwrap()[7], 7);
        m.safepoint().unwrap();
        end.send(()).unwrap();
    });
    m.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 1);
}

#[test]
fn a_forgotten_mutator_frees_nothing_and_breaks_nothing() {
    let (heap, gc) = heaps(1, 4);
    let root = {
        let m = gc.enter();
        let root = m.root(m.alloc([3u64; 4]).unwrap());
        core::mem::forget(m);
        root
    };
    assert!(matches!(gc.collect(), Err(GcError::NoSafepoint { .. })));
    let m = gc.enter();
    assert_eq!(m.get(&root).unwrap()[3], 3);
    m.alloc(1u64).unwrap();
    drop(m);
    drop((root, gc));
    // Its scope holds the far heap's memory, not its space.
    GcHeap::in_heap(&heap).limit(4 * MIB).build().unwrap();
}

#[test]
fn panics_anywhere_leave_a_heap() {
    let (heap, gc) = heaps(1, 8);
    let mut m = gc.enter();
    let root = m.root(m.alloc(Node::default()).unwrap());
    for round in 0..50 {
        let array = catch_unwind(AssertUnwindSafe(|| {
            m.alloc_array(400, |at| {
                // Others allocate in the middle of it.
                let inner = m.alloc(Node::default()).unwrap();
                m.get(&root).unwrap().next.store(&m, Some(inner));
                assert!(at < 300 + round, "in the middle");
                Ref::<Node>::null()
            })
            .map(|array| array.len())
        }));
        assert!(array.is_err());
        m.safepoint().unwrap();
    }
    let caught = catch_unwind(AssertUnwindSafe(|| m.blocking(|| panic!("while it waits"))));
    assert!(caught.is_err());
    m.collect().unwrap();
    // The root, and what it leads to.
    assert_eq!(gc.stats().live_objects, 2);
    let outside = catch_unwind(AssertUnwindSafe(|| {
        let _inner = gc.enter();
        panic!("with a mutator");
    }));
    assert!(outside.is_err());
    m.collect().unwrap();
    drop(m);
    gc.verify().unwrap();
    drop((root, gc));
    heap.verify();
}

#[test]
fn references_of_another_heap_are_refused() {
    let (_first_heap, first) = heaps(1, 4);
    let (_second_heap, second) = heaps(1, 4);
    let (a, b) = (first.enter(), second.enter());
    let (in_a, in_b) = (a.alloc(Node::default()).unwrap(), b.alloc(Node::default()).unwrap());
    in_a.next.store(&a, Some(in_a));
    assert_eq!(in_a.next.load(&b).err(), Some(GcError::OtherHeap));
    assert_eq!(b.get(&a.root(in_a)).err(), Some(GcError::OtherHeap));
    let refused = |action: &dyn Fn()| {
        let panic = catch_unwind(AssertUnwindSafe(action)).expect_err("another heap");
        assert!(message(&*panic).contains("another heap"), "{}", message(&*panic));
    };
    refused(&|| in_a.next.store(&a, Some(in_b)));
    refused(&|| in_a.next.store(&b, Some(in_b)));
    refused(&|| in_a.next.store(&b, None));
    refused(&|| drop(b.root(in_a)));
    refused(&|| b.root(in_b).set(in_a));
    refused(&|| drop(in_a.next.swap(&b, None)));
    assert!(in_a.next.load(&a).unwrap().unwrap().is(in_a));
}

/// Where the collector does not look, nothing that it frees is remembered.
#[test]
fn references_outside_of_objects_cannot_be_set() {
    let (heap, gc) = heaps(1, 4);
    let m = gc.enter();
    let target = m.alloc(Node::default()).unwrap();
    let refused = |action: &dyn Fn()| {
        let panic = catch_unwind(AssertUnwindSafe(action)).expect_err("outside");
        assert!(message(&*panic).contains("outside of a collected heap"), "{}", message(&*panic));
    };
    let on_stack = Node::default();
    refused(&|| on_stack.next.store(&m, Some(target)));
    // In the same arena, and in no collected object.
    let elsewhere: FarBox<Ref<Node>> = heap.alloc(Ref::null()).unwrap();
    let scope = heap.enter();
    let elsewhere = elsewhere.get(&scope).unwrap();
    refused(&|| elsewhere.store(&m, Some(target)));
    refused(&|| assert!(!elsewhere.compare_exchange(&m, None, Some(target))));
    assert!(elsewhere.load(&m).unwrap().is_none());
}

#[test]
fn scopes_that_hold_too_much_get_an_error_and_go_on_after_a_safepoint() {
    let (_heap, gc) = heaps(1, 16);
    let mut m = gc.enter();
    let mut roots = Vec::new();
    let mut held = 0;
    // Not so many that a collection is due, which would hold near memory, too.
    for _ in 0..1800 {
        match m.alloc_copy(&[5u8; 3000]) {
            Ok(object) => {
                held += 1;
                roots.push(m.root(object));
            }
            Err(error) => {
                assert_eq!(error, GcError::Far(FarError::NearFull));
                // A scope can hold a sixteenth of near memory.
                assert!(held >= 14, "{held}");
                held = 0;
                m.safepoint().unwrap();
            }
        }
    }
    assert!(roots.len() > 1500);
    for root in &roots {
        assert_eq!(m.with_room(|m| Ok(m.get(root)?[2999])).unwrap(), 5);
        m.safepoint().unwrap();
    }
}

/// A list of nodes with 900 bytes each, and its head; ends early when the pool fails.
fn fill(gc: &GcHeap, len: usize) -> Result<Root<Node>, GcError> {
    let mut m = gc.enter();
    let mut head = m.root(m.alloc(Node::default())?);
    for _ in 1..len {
        m.safepoint()?;
        let node = m.alloc(Node::default())?;
        node.bytes.store(&m, Some(m.alloc_copy(&[9; 900])?));
        node.next.store(&m, Some(m.get(&head)?));
        head.set(node);
    }
    Ok(head)
}

fn is_pool_error(error: &GcError) -> bool {
    use PoolError::{Corrupt, PoolFull, ServerGone};
    matches!(error, GcError::Far(FarError::Pool(ServerGone { .. } | Corrupt { .. } | PoolFull { .. })))
}

#[test]
fn a_pool_that_fails_gives_errors_and_no_collection_frees_anything() {
    let mut failed = [0; 3];
    for faults in ["die=1", "die=300", "die=900", "die=1500", "die=2500", "full=400", "corrupt=0.0005", "swap=0.005"] {
        let builder = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).paranoid(true);
        let heap = builder.pool(format!("fault:{faults}@ram:")).build().unwrap();
        let gc = GcHeap::in_heap(&heap).limit(16 * MIB).build().unwrap();
        let head = match fill(&gc, 3000) {
            Ok(head) => head,
            Err(error) => {
                assert!(is_pool_error(&error), "{faults}: {error}");
                failed[0] += 1;
                continue;
            }
        };
        let used = gc.stats().used_bytes;
        for _ in 0..4 {
            match gc.collect() {
                Ok(()) => assert_eq!(gc.stats().live_objects, 5999),
                Err(error) => {
                    assert!(is_pool_error(&error), "{faults}: {error}");
                    // Only what mutators had reserved is given back.
                    assert!(gc.stats().used_bytes + (64 << 12) >= used);
                    failed[1] += 1;
                }
            }
        }
        // The list is what it was, as far as it can be read.
        let mut m = gc.enter();
        let (mut at, mut seen) = (head, 1);
        let error = loop {
            let next = m.get(&at).and_then(|node| match node.next.load(&m)? {
                Some(next) => {
                    assert_eq!(node.bytes.load(&m)?.as_deref(), Some(&[9; 900][..]));
                    Ok(Some(m.root(next)))
                }
                None => Ok(None),
            });
            match next {
                Ok(Some(next)) => at = next,
                Ok(None) => break None,
                Err(error) => break Some(error),
            }
            seen += 1;
            if let Err(error) = m.safepoint() {
                break Some(error);
            }
        };
        match error {
            Some(error) => {
                assert!(is_pool_error(&error), "{faults}: {error}");
                failed[2] += 1;
            }
            None => assert_eq!(seen, 3000),
        }
    }
    println!("failed while filled, collected and walked: {failed:?}");
    assert!(failed[0] > 0 && failed[1] > 0, "{failed:?}");
}

#[test]
fn a_collected_heap_outlives_the_value_that_it_was_made_in() {
    let (heap, gc) = heaps(1, 16);
    let head = fill(&gc, 3000).unwrap();
    drop(heap);
    let more = fill(&gc, 3000).unwrap();
    gc.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 2 * 5999);
    drop(gc);
    drop((head, more));
}
