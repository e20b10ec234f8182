//! Objects of far pages are moved by the memory server that has the pages.
//!
//! Danger: a change that is lost because the server has copied what was there before; bytes that go through the client all the same;
//! a server that is not able to, or that answers nonsense, and is believed.

use crate::common::{MIB, far_heap_at, is_deep, seed};
use crate::counters::{Counter, count_in, sparse_heap};
use crate::graph::{Cycles, Size, run_in};
use crate::{serve, ways};
use farfield::{FarError, Heap, PoolError, Verify};
use farfield_gc::{BrokenRule, FarTracing, GcError, GcHeap, GcStats};
use farfield_wic::evacuate::{Evacuate, Evacuated, EvacuatedObject, EvacuatedPage, EvacuationBatch};
use farfield_wic::{Fault, Function, Place, Registry};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

const OBJECTS: usize = 60_000;

/// Collects a heap of which one object in ten lives, and compares what is left.
fn collect_sparse(heap: &Heap, is_on: bool) -> GcStats {
    let (gc, all) = sparse_heap(GcHeap::in_heap(heap).limit(24 * MIB).evacuate_at_servers(is_on), OBJECTS);
    let before = gc.stats();
    gc.collect().unwrap();
    gc.collect().unwrap();
    let (verified, stats) = (gc.verify().unwrap(), gc.stats());
    println!("at servers {is_on}: {verified:?}, before {before:?}, then {stats:?}");
    assert_eq!(verified.objects, verified.allocated);
    let mut m = gc.enter();
    (0..OBJECTS / 10).for_each(|at| assert_eq!(all.with(&mut m, at, Counter::value), at as u64 * 10 + 9));
    drop(m);
    drop((all, gc));
    heap.verify();
    stats
}

#[test]
fn bytes_of_far_objects_do_not_pass_through_the_client() {
    let (server, other) = (serve(Registry::standard()), serve(Registry::standard()));
    let ([tcp, shm], [other, _]) = (ways(&server), ways(&other));
    for way in [tcp.clone(), shm, format!("mirror({tcp},{other})")] {
        let stats = collect_sparse(&far_heap_at(&way, 1), true);
        assert!(stats.moved_at_servers > OBJECTS as u64 / 20, "{way}: {stats:?}");
        assert_eq!((stats.moves_given_up, stats.server_moves_given_up), (0, 0));
        // What would fill less than a page in each collection, and pages that have just left.
        assert!(stats.evacuation_read_pages <= 16 * stats.collections, "{way}: {stats:?}");
        let stats = collect_sparse(&far_heap_at(&way, 1), false);
        assert!(stats.moved_objects > OBJECTS as u64 / 20 && stats.moved_at_servers == 0, "{way}: {stats:?}");
        assert!(stats.evacuation_read_pages > 16 * stats.collections, "{way}: {stats:?}");
    }
}

/// Objects move at the server, and are looked at there if that is faster.
#[test]
fn graphs_are_what_their_models_are_while_servers_move_objects() {
    let server = serve(Registry::standard());
    let operations = if is_deep() { 1_000_000 } else { 30_000 };
    for (way, tracing) in ways(&server).iter().zip([FarTracing::Copies, FarTracing::Servers]) {
        let cycles = Cycles { tracing, evacuate_at_servers: true };
        let size = Size { roots: 1500, bytes: 1500 };
        let stats = run_in(far_heap_at(way, 1), cycles, 4, size, 2, operations);
        // A page that is written while the server reads it can make a call fail.
        assert!(stats.moves_given_up == 0 && stats.server_moves_given_up <= stats.collections, "{way}");
        assert!(stats.moved_at_servers > 500, "{way}: {stats:?}");
    }
}

#[test]
fn no_change_is_lost_while_servers_move_objects() {
    let server = serve(Registry::standard());
    for round in 0..if is_deep() { 50 } else { 1 } {
        for way in ways(&server) {
            let heap = far_heap_at(&way, 1);
            let builder = GcHeap::in_heap(&heap).evacuate_at_servers(true);
            let (wrong, stats) = count_in(builder, None, seed() + round, 20_000);
            assert_eq!((wrong, stats.moves_given_up), (0, 0), "{way}");
            assert!(stats.moved_at_servers > 1000, "{way}: {stats:?}");
            drop(heap);
        }
    }
}

#[test]
fn a_collection_that_believes_what_was_copied_before_loses_changes() {
    let server = serve(Registry::standard());
    let [tcp, _] = ways(&server);
    let is_noticed = (0..10).any(|round| {
        let heap = far_heap_at(&tcp, 1);
        let builder = GcHeap::in_heap(&heap).evacuate_at_servers(true);
        count_in(builder, Some(BrokenRule::CopiesAreCurrent), seed() + round, 20_000).0 > 0
    });
    assert!(is_noticed);
}

#[test]
fn where_no_server_is_asked_the_collector_moves_objects() {
    let (server, other) = (serve(Registry::standard()), serve(Registry::standard()));
    let ([tcp, _], [_, other]) = (ways(&server), ways(&other));
    let stats = collect_sparse(&far_heap_at(&format!("stripe({tcp},{other})"), 1), true);
    assert_eq!((stats.moved_at_servers, stats.server_moves_given_up, stats.moves_given_up), (0, 0, 0));
    assert!(stats.moved_objects > OBJECTS as u64 / 20);
    let keyed = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).pool(tcp).verify(Verify::Keyed).build().unwrap();
    let stats = collect_sparse(&keyed, true);
    assert_eq!((stats.moved_at_servers, stats.server_moves_given_up, stats.moves_given_up), (0, 0, 0));
    assert!(stats.moved_objects > OBJECTS as u64 / 20);
    let old = serve(Registry::new());
    for way in ways(&old) {
        let stats = collect_sparse(&far_heap_at(&way, 1), true);
        assert_eq!((stats.moved_at_servers, stats.moves_given_up), (0, 0));
        assert!(stats.moved_objects > OBJECTS as u64 / 20 && stats.server_moves_given_up <= 1, "{stats:?}");
    }
}

/// Copies, says that it has, and answers much later.
struct Slow;

/// Who hears that one has copied; one test at a time.
static COPIED: Mutex<Option<mpsc::Sender<()>>> = Mutex::new(None);
static ONE_TEST: Mutex<()> = Mutex::new(());

/// Holds the other tests of slow servers off. Sends to the receiver whenever one has copied.
fn hear_slow_servers() -> (MutexGuard<'static, ()>, mpsc::Receiver<()>) {
    let alone = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    let (sender, copied) = mpsc::channel();
    *COPIED.lock().unwrap() = Some(sender);
    (alone, copied)
}

impl Function for Slow {
    const NAME: &'static str = Evacuate::NAME;
    const VERSION: u32 = Evacuate::VERSION;
    type Argument = EvacuationBatch;
    type Answer = Evacuated;

    async fn run<P: Place>(place: &P, batch: EvacuationBatch) -> Result<Evacuated, Fault> {
        let answer = Evacuate::run(place, batch).await?;
        COPIED.lock().unwrap().as_ref().map(|copied| copied.send(()));
        place.pause(Duration::from_secs(600)).await;
        Ok(answer)
    }
}

/// What the server has written is nobody's: nothing leads there, and if it may still write there, the pages are not used again.
#[test]
fn a_server_that_answers_too_late_or_dies_before_has_moved_nothing() {
    for is_killed in [false, true] {
        let (_alone, copied) = hear_slow_servers();
        let server = serve(Registry::new().with::<Slow>());
        let [tcp, _] = ways(&server);
        let heap = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).paranoid(true).pool(tcp);
        let heap = heap.patience(Duration::from_millis(if is_killed { 20_000 } else { 1500 })).build().unwrap();
        let builder = GcHeap::in_heap(&heap).limit(24 * MIB).evacuate_at_servers(true);
        let (gc, all) = sparse_heap(builder, OBJECTS);
        let server = std::thread::scope(|threads| {
            let collecting = threads.spawn(|| gc.collect());
            copied.recv_timeout(Duration::from_secs(60)).expect("the server is asked");
            let server = Some(server).filter(|_| !is_killed);
            collecting.join().unwrap().expect("whether objects move is no matter of the collection");
            server
        });
        let stats = gc.stats();
        println!("killed {is_killed}: {stats:?}");
        assert_eq!((stats.collections, stats.moved_at_servers, stats.server_moves_given_up), (1, 0, 1));
        if server.is_none() {
            let is_gone = |error: &GcError| matches!(error, GcError::Far(FarError::Pool(_)));
            assert!(gc.collect().as_ref().err().is_none_or(is_gone));
            continue;
        }
        assert!(stats.moved_objects > OBJECTS as u64 / 20 && stats.moves_given_up == 0);
        gc.verify().unwrap();
        let mut m = gc.enter();
        (0..OBJECTS / 10).for_each(|at| assert_eq!(all.with(&mut m, at, Counter::value), at as u64 * 10 + 9));
        drop(m);
        drop((all, gc));
        heap.verify();
    }
}

#[test]
fn a_member_that_dies_while_it_copies_leaves_it_to_the_others() {
    let (_alone, copied) = hear_slow_servers();
    let (server, slow) = (serve(Registry::standard()), serve(Registry::new().with::<Slow>()));
    let ([tcp, _], [other, _]) = (ways(&server), ways(&slow));
    let heap = far_heap_at(&format!("mirror({tcp},{other})"), 1);
    let builder = GcHeap::in_heap(&heap).limit(24 * MIB).evacuate_at_servers(true);
    let (gc, all) = sparse_heap(builder, OBJECTS);
    std::thread::scope(|threads| {
        let collecting = threads.spawn(|| gc.collect());
        copied.recv_timeout(Duration::from_secs(60)).expect("both members are asked");
        drop(slow);
        collecting.join().unwrap().expect("a member lives");
    });
    gc.collect().unwrap();
    let stats = gc.stats();
    println!("{stats:?}");
    assert!(stats.moved_objects > OBJECTS as u64 / 20 && stats.moves_given_up == 0, "{stats:?}");
    assert!(stats.moved_at_servers > 0, "what one member has copied counts");
    gc.verify().unwrap();
    let mut m = gc.enter();
    (0..OBJECTS / 10).for_each(|at| assert_eq!(all.with(&mut m, at, Counter::value), at as u64 * 10 + 9));
}

/// Says what is not so, in one of fourteen ways.
struct Liar<const LIE: u8>;

impl<const LIE: u8> Function for Liar<LIE> {
    const NAME: &'static str = Evacuate::NAME;
    const VERSION: u32 = Evacuate::VERSION;
    type Argument = EvacuationBatch;
    type Answer = Evacuated;

    async fn run<P: Place>(place: &P, batch: EvacuationBatch) -> Result<Evacuated, Fault> {
        let (sources, targets) = (batch.sources.len(), batch.targets.len());
        let mut answer = Evacuate::run(place, batch).await?;
        let nothing = EvacuatedPage { sum: 0, objects: 0 };
        match LIE {
            // The pages were others when it read them.
            0 => answer.sources.iter_mut().for_each(|page| page.sum ^= 1),
            // The objects have each other's entries, or entries that nobody has.
            1 => answer.objects.iter_mut().for_each(|object| object.entry ^= 1),
            2 => answer.objects.iter_mut().for_each(|object| object.entry = u32::MAX - object.entry),
            // There are more or fewer objects than pages say, or pages than were asked for.
            3 => answer.objects.push(EvacuatedObject { entry: 1, bytes: 32 }),
            4 => answer.objects.truncate(answer.objects.len() / 2),
            5 => answer.sources.iter_mut().for_each(|page| page.objects = u32::MAX),
            6 => answer.sources.resize(sources + 1, nothing),
            7 => answer.target_sums.resize(targets + 9, 7),
            8 => answer.target_sums.clear(),
            // The objects are longer or shorter than anything can be.
            9 => answer.objects.iter_mut().for_each(|object| object.bytes = 4096),
            10 => answer.objects.iter_mut().for_each(|object| object.bytes = 0),
            11 => answer = Evacuated::default(),
            12 => return Err(Fault::Internal),
            // The fresh pages are others than those that are there.
            LOST_WRITES => answer.target_sums.iter_mut().for_each(|sum| *sum ^= 1),
            _ => panic!("in the middle of it"),
        }
        Ok(answer)
    }
}

/// A lie that is believed at first.
const LOST_WRITES: u8 = 14;

#[test]
fn what_a_server_did_not_write_is_corrupt_and_no_object() {
    let server = serve(Registry::new().with::<Liar<LOST_WRITES>>());
    let [tcp, _] = ways(&server);
    let heap = far_heap_at(&tcp, 1);
    let builder = GcHeap::in_heap(&heap).limit(24 * MIB).evacuate_at_servers(true);
    let (gc, _all) = sparse_heap(builder, OBJECTS);
    gc.collect().unwrap();
    let stats = gc.stats();
    println!("{stats:?}");
    assert!(stats.moved_at_servers > OBJECTS as u64 / 20);
    let is_corrupt = |error| matches!(error, Some(GcError::Far(FarError::Pool(PoolError::Corrupt { .. }))));
    assert!(is_corrupt(gc.verify().err()) && is_corrupt(gc.collect().err()));
    assert_eq!((gc.stats().collections, gc.stats().given_up), (1, 1), "nothing is freed");
}

/// Pages can be emptied although there is no room for as many fresh ones.
#[test]
fn a_heap_full_of_sparse_pages_has_room_after_servers_have_emptied_them() {
    let server = serve(Registry::standard());
    for way in ways(&server) {
        let heap = far_heap_at(&way, 1);
        // Its pages and entries fill the limit.
        let builder = GcHeap::in_heap(&heap).limit(8 * MIB).evacuate_at_servers(true);
        let (gc, all) = sparse_heap(builder, 95_000);
        let (mut m, mut kept) = (gc.enter(), Vec::new());
        for _ in 0..600 {
            kept.push(m.with_room(|m| Ok(m.root(m.alloc_array(500, |at| at as u64)?))).unwrap());
            m.safepoint().unwrap();
        }
        (0..9_500).for_each(|at| assert_eq!(all.with(&mut m, at, Counter::value), at as u64 * 10 + 9));
        drop(m);
        gc.verify().unwrap();
        let stats = gc.stats();
        println!("{way}: {stats:?}");
        assert!(stats.moved_at_servers > 1000 && stats.used_bytes <= 8 * MIB);
    }
}

fn believe_nothing<const LIE: u8>() {
    let server = serve(Registry::new().with::<Liar<LIE>>());
    let [tcp, _] = ways(&server);
    let stats = collect_sparse(&far_heap_at(&tcp, 1), true);
    assert_eq!((stats.moved_at_servers, stats.moves_given_up), (0, 0), "lie {LIE}: {stats:?}");
    // A page that was another one is moved in the next collection.
    assert!(LIE == 0 || stats.moved_objects > OBJECTS as u64 / 20, "lie {LIE}: {stats:?}");
    assert_eq!(stats.server_moves_given_up > 0, LIE >= 3 && LIE != 11, "lie {LIE}: {stats:?}");
}

#[test]
fn servers_that_answer_nonsense_move_nothing() {
    believe_nothing::<0>();
    believe_nothing::<1>();
    believe_nothing::<2>();
    believe_nothing::<3>();
    believe_nothing::<4>();
    believe_nothing::<5>();
    believe_nothing::<6>();
    believe_nothing::<7>();
    believe_nothing::<8>();
    believe_nothing::<9>();
    believe_nothing::<10>();
    believe_nothing::<11>();
    believe_nothing::<12>();
    believe_nothing::<13>();
}
