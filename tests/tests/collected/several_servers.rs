//! Several servers share the pages of a collected heap, and each traces and moves the objects that it has.
//!
//! Danger: an object that a server looks for at the place of another one's; a fresh page that another server has; a member that
//! cannot, fails, dies or lies, and takes live objects with it, or makes the collector ask for ever.

use crate::common::{MIB, far_heap_at, is_deep, seed};
use crate::counters::{Counter, Counters, sparse_heap_at};
use crate::graph::{Cycles, Size, run_in};
use crate::held::{Held, hold};
use crate::{serve, ways};
use farfield::{FarError, Heap};
use farfield_gc::{BrokenRule, FarObject, FarTracing, GcBuilder, GcError, GcHeap, GcStats, Mutator, Ref};
use farfield_server::Server;
use farfield_wic::evacuate::{Evacuate, Evacuated, EvacuationBatch};
use farfield_wic::trace::{ElsewhereObject, ObjectPlace, Trace, Traced, Tracing};
use farfield_wic::{Fault, Function, Place, Registry};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const OBJECTS: usize = 30_000;
const LIVE: usize = OBJECTS / 10;
/// Size of regions in most tests, so that there are some at each server.
const REGION: u64 = 256 << 10;

/// What the server of this number has traced, named as another one's, and copied.
static COUNTS: [[AtomicU64; 3]; 3] = [const { [const { AtomicU64::new(0) }; 3] }; 3];

struct Counted<const SERVER: usize, F>(F);

impl<const SERVER: usize> Function for Counted<SERVER, Trace> {
    const NAME: &'static str = Trace::NAME;
    const VERSION: u32 = Trace::VERSION;
    const ONLY_READS: bool = true;
    type Argument = Tracing;
    type Answer = Traced;

    async fn run<P: Place>(place: &P, tracing: Tracing) -> Result<Traced, Fault> {
        let answer = Trace::run(place, tracing).await?;
        COUNTS[SERVER][0].fetch_add(answer.objects.len() as u64, Ordering::Relaxed);
        COUNTS[SERVER][1].fetch_add(answer.elsewhere.len() as u64, Ordering::Relaxed);
        Ok(answer)
    }
}

impl<const SERVER: usize> Function for Counted<SERVER, Evacuate> {
    const NAME: &'static str = Evacuate::NAME;
    const VERSION: u32 = Evacuate::VERSION;
    type Argument = EvacuationBatch;
    type Answer = Evacuated;

    async fn run<P: Place>(place: &P, batch: EvacuationBatch) -> Result<Evacuated, Fault> {
        let answer = Evacuate::run(place, batch).await?;
        COUNTS[SERVER][2].fetch_add(answer.objects.len() as u64, Ordering::Relaxed);
        Ok(answer)
    }
}

fn counted<const SERVER: usize>() -> Server {
    serve(Registry::new().with::<Counted<SERVER, Trace>>().with::<Counted<SERVER, Evacuate>>())
}

fn builder(heap: &Heap, region: u64) -> GcBuilder<'_> {
    let builder = GcHeap::in_heap(heap).limit(24 * MIB).region(region).far_tracing(FarTracing::Servers);
    builder.broken(BrokenRule::ServersAreFaster).evacuate_at_servers(true)
}

/// A heap of which one object in ten lives, evenly spread. What leads to neighbours lies apart.
fn scattered_heap(builder: GcBuilder<'_>) -> (GcHeap, Counters) {
    sparse_heap_at(builder, OBJECTS, slot)
}

fn slot(at: usize) -> usize {
    at * 1021 % LIVE
}

/// Compares what is left with what there was, and ends the heap.
fn check(heap: &Heap, gc: GcHeap, all: Counters) {
    let verified = gc.verify().unwrap();
    assert_eq!(verified.objects, verified.allocated);
    let mut m = gc.enter();
    (0..LIVE).for_each(|at| assert_eq!(all.with(&mut m, slot(at), Counter::value), at as u64 * 10 + 9));
    drop(m);
    drop((all, gc));
    heap.verify();
}

/// Collects twice. How objects were looked at is said of the first collection, after which few are far.
fn collect_twice(pool: &str, region: u64) -> GcStats {
    let heap = far_heap_at(pool, 1);
    let (gc, all) = scattered_heap(builder(&heap, region));
    gc.collect().unwrap();
    let first = gc.stats();
    gc.collect().unwrap();
    let mut stats = gc.stats();
    (stats.traced_at_servers, stats.read_pages) = (first.traced_at_servers, first.read_pages);
    println!("{pool}: {stats:?}");
    check(&heap, gc, all);
    stats
}

#[test]
fn each_server_traces_and_moves_what_it_has() {
    let servers = [counted::<0>(), counted::<1>(), counted::<2>()];
    let [[one, _], [two, two_shm], [_, three]] = servers.each_ref().map(ways);
    for (pool, servers, region) in [
        (format!("stripe({one},{two})?group=256K"), 2, REGION),
        (format!("stripe({one},{two_shm},{three})"), 3, 64 << 10),
        // Groups of several regions, and a mirror as a member.
        (format!("stripe(mirror({one},{two}),{three})?group=512K"), 3, REGION),
    ] {
        let stats = collect_twice(&pool, region);
        let counts = COUNTS.each_ref().map(|counts| counts.each_ref().map(|count| count.swap(0, Ordering::Relaxed)));
        println!("{counts:?}");
        assert!(stats.traced_at_servers > LIVE as u64 / 4 && stats.moved_at_servers > LIVE as u64 / 4, "{stats:?}");
        assert_eq!((stats.moves_given_up, stats.server_moves_given_up), (0, 0));
        // Either member of a mirror may be the one that is asked.
        let is_mirror = pool.contains("mirror");
        let of_counts = |index: usize| counts.iter().filter(|counts| counts[index] > 100).count();
        assert!(of_counts(0) >= servers - usize::from(is_mirror) && of_counts(2) == servers, "{pool}: {counts:?}");
        assert!(counts.iter().any(|counts| counts[1] > 0), "entries lead from one to another: {counts:?}");
    }
}

#[test]
fn graphs_are_what_their_models_are_over_several_servers() {
    let servers = [serve(Registry::standard()), serve(Registry::standard()), serve(Registry::standard())];
    let [[_, one], [two, shm], [_, three]] = servers.each_ref().map(ways);
    let operations = if is_deep() { 500_000 } else { 18_000 };
    for pool in [format!("stripe({one},{shm})?group=1M"), format!("stripe({one},{two},{three})?group=4M")] {
        let cycles = Cycles { tracing: FarTracing::Servers, evacuate_at_servers: true };
        let stats = run_in(far_heap_at(&pool, 1), cycles, 2, Size { roots: 1500, bytes: 1500 }, 2, operations);
        assert!(stats.moves_given_up == 0 && stats.server_moves_given_up <= stats.collections, "{pool}");
        assert!(stats.flushed_pages > 100 && stats.moved_at_servers > 500, "{pool}: {stats:?}");
    }
}

/// Objects are traced where they are, whatever the groups are; regions of several servers are emptied by the collector.
#[test]
fn regions_that_several_servers_share_are_not_emptied_by_them() {
    let servers = [serve(Registry::standard()), serve(Registry::standard())];
    let [[one, _], [two, _]] = servers.each_ref().map(ways);
    let stats = collect_twice(&format!("stripe({one},{two})?group=512K"), MIB);
    assert_eq!((stats.moved_at_servers, stats.server_moves_given_up, stats.moves_given_up), (0, 0, 0));
    assert!(stats.traced_at_servers > LIVE as u64 / 4 && stats.moved_objects > LIVE as u64 / 2, "{stats:?}");
}

/// Questions that were answered late.
static LATE: AtomicU64 = AtomicU64::new(0);

/// Answers late, each time.
struct Late<F>(F);

impl Function for Late<Trace> {
    const NAME: &'static str = Trace::NAME;
    const VERSION: u32 = Trace::VERSION;
    const ONLY_READS: bool = true;
    type Argument = Tracing;
    type Answer = Traced;

    async fn run<P: Place>(place: &P, tracing: Tracing) -> Result<Traced, Fault> {
        LATE.fetch_add(1, Ordering::Relaxed);
        place.pause(Duration::from_millis(1)).await;
        Trace::run(place, tracing).await
    }
}

const LINKS: usize = 6000;

#[derive(FarObject)]
struct Link {
    next: Ref<Link>,
    rest: [u64; 60],
}

/// Collects a ring in no order, which lives and then dies as a whole. No two of its objects can be looked at at the same time.
fn collect_ring(pool: &str) -> GcStats {
    let heap = far_heap_at(pool, 1);
    let gc = builder(&heap, REGION).build().unwrap();
    let mut m = gc.enter();
    let links = m.root(m.alloc_array(LINKS, |_| Ref::<Link>::null()).unwrap());
    for at in 0..LINKS {
        let make = |m: &Mutator<'_>| {
            m.get(&links)?[at].store(m, Some(m.alloc(Link { next: Ref::null(), rest: [at as u64; 60] })?));
            Ok(())
        };
        m.with_room(make).unwrap();
        m.safepoint().unwrap();
    }
    let mut order: Vec<usize> = (0..LINKS).collect();
    fastrand::Rng::with_seed(seed()).shuffle(&mut order);
    for (from, to) in order.iter().zip(order.iter().cycle().skip(1)) {
        let connect = |m: &Mutator<'_>| {
            let links = m.get(&links)?;
            links[*from].load(m)?.expect("each is set").next.copy_from(m, &links[*to]);
            Ok(())
        };
        m.with_room(connect).unwrap();
        m.safepoint().unwrap();
    }
    let mut at = m.with_room(|m| Ok(m.root(m.get(&links)?[order[0]].load(m)?.expect("each is set")))).unwrap();
    drop(links);
    m.collect().unwrap();
    let stats = gc.stats();
    println!("{pool}: {stats:?}");
    assert_eq!(stats.live_objects, LINKS as u64);
    for number in &order {
        let next = |m: &Mutator<'_>| {
            let link = m.get(&at)?;
            assert_eq!(link.rest, [*number as u64; 60]);
            Ok(m.root(link.next.load(m)?.expect("a ring has no end")))
        };
        at = m.with_room(next).unwrap();
        m.safepoint().unwrap();
    }
    drop(at);
    m.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 0);
    drop(m);
    gc.verify().unwrap();
    drop(gc);
    heap.verify();
    stats
}

#[test]
fn a_server_goes_along_a_chain_that_costs_a_read_for_each_object() {
    let server = serve(Registry::standard());
    let stats = collect_ring(&ways(&server)[0]);
    assert!(stats.traced_at_servers > LINKS as u64 / 2 && stats.read_pages < LINKS as u64 / 4, "{stats:?}");
}

#[test]
fn a_chain_leads_from_server_to_server_and_one_of_them_is_slow() {
    let servers =
        [serve(Registry::standard()), serve(Registry::new().with::<Late<Trace>>()), serve(Registry::standard())];
    let [[one, _], [two, _], [_, three]] = servers.each_ref().map(ways);
    let stats = collect_ring(&format!("stripe({one},{two},{three})?group=256K"));
    let late = LATE.load(Ordering::Relaxed);
    assert!(stats.traced_at_servers > LINKS as u64 / 4 && late > LINKS as u64 / 20, "{late} late answers, {stats:?}");
}

/// Fails whenever there is something to do.
struct Failing<F>(F);

impl Function for Failing<Trace> {
    const NAME: &'static str = Trace::NAME;
    const VERSION: u32 = Trace::VERSION;
    const ONLY_READS: bool = true;
    type Argument = Tracing;
    type Answer = Traced;

    async fn run<P: Place>(place: &P, tracing: Tracing) -> Result<Traced, Fault> {
        if tracing.objects.is_empty() { Trace::run(place, tracing).await } else { Err(Fault::Internal) }
    }
}

impl Function for Failing<Evacuate> {
    const NAME: &'static str = Evacuate::NAME;
    const VERSION: u32 = Evacuate::VERSION;
    type Argument = EvacuationBatch;
    type Answer = Evacuated;

    async fn run<P: Place>(_: &P, _: EvacuationBatch) -> Result<Evacuated, Fault> {
        Err(Fault::Internal)
    }
}

#[test]
fn a_member_that_cannot_or_fails_leaves_its_objects_to_the_collector() {
    let good = serve(Registry::standard());
    let failing = serve(Registry::new().with::<Failing<Trace>>().with::<Failing<Evacuate>>());
    let old = serve(Registry::new());
    let [[good, _], [failing, _], [old, _]] = [&good, &failing, &old].map(ways);
    let stats = collect_twice(&format!("stripe({good},{failing})?group=256K"), REGION);
    assert!(stats.moved_at_servers > 0 && stats.server_moves_given_up > 0 && stats.moves_given_up == 0, "{stats:?}");
    assert!(stats.moved_objects > LIVE as u64 / 2 && stats.read_pages > 0, "{stats:?}");
    let stats = collect_twice(&format!("stripe({good},{old})?group=256K"), REGION);
    assert!(stats.traced_at_servers == 0 && stats.moves_given_up == 0, "{stats:?}");
    assert!(stats.moved_objects > LIVE as u64 / 2, "{stats:?}");
}

#[test]
fn a_member_that_dies_while_it_traces_ends_the_collection_with_an_error() {
    let (good, slow) = (serve(Registry::standard()), serve(Registry::new().with::<Held<Trace>>()));
    let [[good_url, _], [slow_url, _]] = [&good, &slow].map(ways);
    let heap = far_heap_at(&format!("stripe({good_url},{slow_url})?group=256K"), 1);
    let (gc, _all) = scattered_heap(builder(&heap, REGION));
    let used = gc.stats().used_bytes;
    // The member answers no more.
    let (_holding, asked) = hold();
    std::thread::scope(|threads| {
        let collecting = threads.spawn(|| gc.collect());
        asked.recv_timeout(Duration::from_secs(60)).expect("the member is asked");
        drop(slow);
        let error = collecting.join().unwrap().expect_err("its objects are lost");
        assert!(matches!(error, GcError::Far(FarError::Pool(_))), "{error}");
    });
    let stats = gc.stats();
    assert_eq!((stats.collections, stats.given_up, stats.used_bytes), (0, 1, used), "nothing is freed");
}

/// Copies, and answers much later.
struct SlowCopier;

impl Function for SlowCopier {
    const NAME: &'static str = Evacuate::NAME;
    const VERSION: u32 = Evacuate::VERSION;
    type Argument = EvacuationBatch;
    type Answer = Evacuated;

    async fn run<P: Place>(place: &P, batch: EvacuationBatch) -> Result<Evacuated, Fault> {
        let answer = Evacuate::run(place, batch).await?;
        place.pause(Duration::from_secs(600)).await;
        Ok(answer)
    }
}

/// Its fresh pages are never used again, and those of the other member are.
#[test]
fn a_member_that_copies_too_late_has_moved_nothing_and_the_other_has() {
    let (good, slow) = (serve(Registry::standard()), serve(Registry::new().with::<SlowCopier>()));
    let [[good_url, _], [slow_url, _]] = [&good, &slow].map(ways);
    let pool = format!("stripe({slow_url},{good_url})?group=256K");
    let heap = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).paranoid(true).pool(pool);
    let heap = heap.patience(Duration::from_millis(1500)).build().unwrap();
    let (gc, all) = scattered_heap(builder(&heap, REGION));
    gc.collect().unwrap();
    let stats = gc.stats();
    println!("{stats:?}");
    assert_eq!((stats.moves_given_up, stats.traced_at_servers), (0, 0));
    assert!(
        stats.server_moves_given_up > 0 && stats.moved_at_servers > 0 && stats.moved_objects > LIVE as u64 / 2,
        "{stats:?}"
    );
    check(&heap, gc, all);
}

/// Says of objects that they lie elsewhere, in one of several ways.
struct Liar<const LIE: u8>;

impl<const LIE: u8> Function for Liar<LIE> {
    const NAME: &'static str = Trace::NAME;
    const VERSION: u32 = Trace::VERSION;
    const ONLY_READS: bool = true;
    type Argument = Tracing;
    type Answer = Traced;

    async fn run<P: Place>(place: &P, tracing: Tracing) -> Result<Traced, Fault> {
        let asked = tracing.objects.clone();
        let mut answer = Trace::run(place, tracing).await?;
        let away = |page| move |entry| ElsewhereObject { entry, place: ObjectPlace { page, card: 255 } };
        let tried = asked.len() as u32;
        match LIE {
            // They lie at the end of the first page, or in none, whoever is asked for them, and where.
            0 | 1 => {
                let elsewhere = asked.iter().map(|asked| asked.entry).map(away(u32::MAX * u32::from(LIE))).collect();
                answer = Traced { tried, elsewhere, ..Traced::default() };
            }
            // Nothing was tried, or more than was asked for, and nothing found.
            2 => answer = Traced::default(),
            3 => answer = Traced { tried: u32::MAX, ..Traced::default() },
            // There are others, of entries that nobody has.
            4 => answer.elsewhere.extend([u32::MAX, u32::MAX / 2, 1 << 20].map(away(7))),
            _ => answer.elsewhere.iter_mut().for_each(|other| other.place.card ^= 1),
        }
        Ok(answer)
    }
}

fn name_wrongly<const LIE: u8>() {
    let servers = [serve(Registry::new().with::<Liar<LIE>>()), serve(Registry::new().with::<Liar<LIE>>())];
    let [[one, _], [two, _]] = servers.each_ref().map(ways);
    let heap = far_heap_at(&format!("stripe({one},{two})?group=256K"), 1);
    let (gc, all) = scattered_heap(builder(&heap, REGION).evacuate_at_servers(false));
    let used = gc.stats().used_bytes;
    match gc.collect() {
        Ok(()) => check(&heap, gc, all),
        // Nothing of the entry lies where the server says, and servers were not asked any more.
        Err(error) => {
            assert!(matches!(error, GcError::Damaged { .. }) && matches!(LIE, 0 | 5), "lie {LIE}: {error}");
            assert_eq!((gc.stats().collections, gc.stats().used_bytes), (0, used));
        }
    }
}

#[test]
fn servers_that_name_wrong_places_free_nothing_that_lives() {
    name_wrongly::<0>();
    name_wrongly::<1>();
    name_wrongly::<2>();
    name_wrongly::<3>();
    name_wrongly::<4>();
    name_wrongly::<5>();
}
