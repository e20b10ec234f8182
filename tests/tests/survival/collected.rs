//! The load of a collected heap: counters that count, and are replaced, while a collector does not rest.

use super::Load;
use farfield::Heap;
use farfield_gc::{Atom, FarObject, GcBuilder, GcError, GcHeap, GcStats, Mutator, Ref, Root};
use farfield_tests::MIB;
use fastrand::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Three times what can be near, with its entry.
const COUNTERS: usize = 24_000;
const EACH: usize = 128;

#[derive(FarObject)]
struct Counter {
    at: u64,
    count: Atom<u64>,
    padding: [u64; 28],
}

/// With `AT_SERVERS`, the members of a mirror move what is far.
pub(crate) struct Graph<const AT_SERVERS: bool> {
    gc: Arc<GcHeap>,
    chunks: Vec<Root<[Ref<Counter>]>>,
    counts: Vec<u64>,
    /// Thread that collects. It returns how often the load was too late at a safepoint.
    collecting: Option<JoinHandle<Result<u64, GcError>>>,
    is_over: Arc<AtomicBool>,
}

impl<const AT_SERVERS: bool> Graph<AT_SERVERS> {
    fn replace(m: &mut Mutator<'_>, chunk: &Root<[Ref<Counter>]>, at: usize, count: u64) {
        m.with_room(|m| {
            let counter = m.alloc(Counter { at: at as u64, count: Atom::new(count), padding: [at as u64; 28] })?;
            m.get(chunk)?[at % EACH].store(m, Some(counter));
            Ok(())
        })
        .expect("a member lives");
    }

    fn check_one(m: &mut Mutator<'_>, chunk: &Root<[Ref<Counter>]>, at: usize, count: u64, add: u64) {
        m.with_room(|m| {
            let counter = m.get(chunk)?[at % EACH].load(m)?.expect("it was set");
            assert!(counter.at == at as u64 && counter.padding == [at as u64; 28], "counter {at}");
            assert_eq!(counter.count.fetch_add(add), count, "counter {at}");
            Ok(())
        })
        .expect("a member lives");
    }
}

impl<const AT_SERVERS: bool> Graph<AT_SERVERS> {
    /// Makes the load of a heap that is built so.
    pub(crate) fn build(builder: GcBuilder<'_>) -> Self {
        let builder = builder.limit(16 * MIB).evacuate_at_servers(AT_SERVERS);
        let gc = Arc::new(builder.build().expect("the heap has none"));
        let mut m = gc.enter();
        let mut chunks = Vec::new();
        for at in 0..COUNTERS {
            if at.is_multiple_of(EACH) {
                let chunk = m.with_room(|m| Ok(m.root(m.alloc_array(EACH, |_| Ref::null())?)));
                chunks.push(chunk.expect("a member lives"));
            }
            Self::replace(&mut m, &chunks[at / EACH], at, 0);
            m.safepoint().expect("a member lives");
        }
        drop(m);
        let is_over = Arc::new(AtomicBool::new(false));
        let (of_thread, until) = (Arc::clone(&gc), Arc::clone(&is_over));
        let collect = move || {
            let mut late = 0;
            while !until.load(Ordering::Relaxed) {
                match of_thread.collect() {
                    Ok(()) => {}
                    // On a busy machine the load can wait for a server for a second. Nothing is lost by that.
                    Err(error @ GcError::NoSafepoint { .. }) => {
                        println!("{error}");
                        late += 1;
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(late)
        };
        let collecting = Some(std::thread::spawn(collect));
        Graph { gc, chunks, counts: vec![0; COUNTERS], collecting, is_over }
    }

    /// Ends the collections, and compares all there is.
    pub(crate) fn compare(mut self) -> GcStats {
        self.is_over.store(true, Ordering::Relaxed);
        let collected = self.collecting.take().map(|thread| thread.join().expect("it only collects"));
        let late = collected.expect("it was started").expect("a member lives");
        self.gc.collect().expect("a member lives");
        let (verified, stats) = (self.gc.verify().expect("a member lives"), self.gc.stats());
        println!("{stats:?}");
        assert_eq!(verified.objects, (COUNTERS + COUNTERS.div_ceil(EACH)) as u64);
        assert!(late > 0 || (stats.given_up, stats.moves_given_up) == (0, 0));
        let mut m = self.gc.enter();
        for (at, count) in self.counts.iter().enumerate() {
            Self::check_one(&mut m, &self.chunks[at / EACH], at, *count, 0);
            m.safepoint().expect("a member lives");
        }
        drop(m);
        stats
    }
}

impl<const AT_SERVERS: bool> Load for Graph<AT_SERVERS> {
    fn new(heap: &Heap) -> Self {
        Graph::build(GcHeap::in_heap(heap))
    }

    fn step(&mut self, _: &Heap, random: &mut Rng) {
        let mut m = self.gc.enter();
        for _ in 0..8 {
            let at = random.usize(..COUNTERS);
            if random.usize(..2) == 0 {
                Self::replace(&mut m, &self.chunks[at / EACH], at, self.counts[at]);
            }
            Self::check_one(&mut m, &self.chunks[at / EACH], at, self.counts[at], 1);
            self.counts[at] += 1;
            m.safepoint().expect("a member lives");
        }
    }

    fn check(self, _: &Heap) {
        let stats = self.compare();
        assert!(stats.collections > 2 && stats.moved_objects > 1000);
        assert_eq!(stats.moved_at_servers > 500, AT_SERVERS);
    }
}

impl<const AT_SERVERS: bool> Drop for Graph<AT_SERVERS> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}
