//! Counters in random places of a heap, which are replaced now and then. Tests of servers, which are elsewhere, share them.

use crate::common::MIB;
use farfield_gc::{Atom, BrokenRule, FarObject, GcBuilder, GcHeap, GcStats, Mutator, Ref, Root};
use fastrand::Rng;

#[derive(FarObject, Default)]
pub(crate) struct Counter {
    count: Atom<u64>,
    /// Makes the object as large as a cache line.
    rest: [u64; 6],
}

impl Counter {
    pub(crate) fn value(&self) -> u64 {
        assert_eq!(self.rest, [0; 6]);
        self.count.get()
    }
}

/// Counters, in arrays that each fit into a page.
pub(crate) struct Counters(Vec<Root<[Ref<Counter>]>>);

const EACH: usize = 128;

impl Counters {
    pub(crate) fn new(m: &mut Mutator<'_>, len: usize) -> Counters {
        let mut array = || m.with_room(|m| Ok(m.root(m.alloc_array(EACH, |_| Ref::null())?))).unwrap();
        Counters((0..len.div_ceil(EACH)).map(|_| array()).collect())
    }

    /// Calls `action` with the place of a counter, which is set.
    pub(crate) fn with<R>(&self, m: &mut Mutator<'_>, at: usize, action: impl Fn(&Counter) -> R) -> R {
        let counter = |m: &Mutator<'_>| {
            let found = m.get(&self.0[at / EACH])?[at % EACH].load(m)?;
            Ok(action(&found.expect("each is set")))
        };
        let result = m.with_room(counter).unwrap();
        m.safepoint().unwrap();
        result
    }

    /// Puts a new counter into a place, which begins with this count.
    pub(crate) fn replace(&self, m: &mut Mutator<'_>, at: usize, count: u64) {
        let make = |m: &Mutator<'_>| {
            let counter = m.alloc(Counter { count: Atom::new(count), ..Counter::default() })?;
            m.get(&self.0[at / EACH])?[at % EACH].store(m, Some(counter));
            Ok(())
        };
        m.with_room(make).unwrap();
        m.safepoint().unwrap();
    }
}

const COUNTERS: usize = 16_000;

/// Counts in random places, beside another thread that does so elsewhere, and a collector that does not rest. Returns the number of
/// counts that are wrong at the end.
pub(crate) fn count_in(
    mut builder: GcBuilder<'_>,
    broken: Option<BrokenRule>,
    seed: u64,
    steps: usize,
) -> (usize, GcStats) {
    if let Some(rule) = broken {
        builder = builder.broken(rule);
    }
    let gc = builder.limit(24 * MIB).build().unwrap();
    let wrong = std::thread::scope(|threads| {
        let work = |thread: u64| {
            let gc = &gc;
            threads.spawn(move || {
                let (mut m, mut random) = (gc.enter(), Rng::with_seed(seed * 10 + thread));
                let (all, mut expected) = (Counters::new(&mut m, COUNTERS), vec![0; COUNTERS]);
                (0..COUNTERS).for_each(|at| all.replace(&mut m, at, 0));
                for _ in 0..steps {
                    let at = random.usize(..COUNTERS);
                    if random.usize(..4) == 0 {
                        all.replace(&mut m, at, expected[at]);
                    }
                    all.with(&mut m, at, |counter| counter.count.fetch_add(1));
                    expected[at] += 1;
                }
                let is_wrong = |at: &usize| all.with(&mut m, *at, Counter::value) != expected[*at];
                (0..COUNTERS).filter(is_wrong).count()
            })
        };
        let workers = [work(1), work(2)];
        while workers.iter().any(|worker| !worker.is_finished()) {
            gc.collect().unwrap();
        }
        workers.map(|worker| worker.join().unwrap()).iter().sum::<usize>()
    });
    gc.verify().unwrap();
    let stats = gc.stats();
    println!("{stats:?}");
    (wrong, stats)
}

/// A heap of which one object in ten lives, evenly spread.
pub(crate) fn sparse_heap(builder: GcBuilder<'_>, objects: usize) -> (GcHeap, Counters) {
    sparse_heap_at(builder, objects, |at| at)
}

/// A heap as [`sparse_heap`] makes it, whose objects are kept in other slots.
pub(crate) fn sparse_heap_at(
    builder: GcBuilder<'_>,
    objects: usize,
    slot: impl Fn(usize) -> usize,
) -> (GcHeap, Counters) {
    let gc = builder.build().unwrap();
    let mut m = gc.enter();
    let all = Counters::new(&mut m, objects / 10);
    (0..objects).for_each(|at| all.replace(&mut m, slot(at / 10), at as u64));
    drop(m);
    (gc, all)
}
