//! The pool is exchanged while the heap is used. Danger: an old version, a lost value, a thread that hangs.

use crate::common::{MIB, Over, Rng, builder, seed};
use farfield::{BuildError, FarBox, Health, Heap, PoolError, SwitchError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Seconds for a few MiB.
const SLOW: &str = "fault:delay=100ms@ram:";
const LONG: Duration = Duration::from_secs(120);

fn heap(pool: &str) -> Heap {
    builder().near(2 * MIB).near_max(2 * MIB).far(1 << 30).pool(pool).build().unwrap()
}

/// Moves everything to this pool, and waits for it.
fn switch(heap: &Heap, url: &str) -> Result<(), SwitchError> {
    heap.switch_pool(url).unwrap_or_else(|error| panic!("{url}: {error}")).wait(LONG).expect("it ends in time")
}

/// Values of two sizes, each with a word that says what it should be, until it is over.
fn work(heap: &Heap, seed: u64, is_over: &AtomicBool) -> usize {
    let mut random = Rng::with_seed(seed);
    let mut small: Vec<(FarBox<[u64; 8]>, u64)> = Vec::new();
    let mut large: Vec<(FarBox<[u64; 1200]>, u64)> = Vec::new();
    let mut steps = 0;
    while !is_over.load(Ordering::Relaxed) || steps < 2000 {
        steps += 1;
        let word = random.u64(..);
        match random.usize(..8) {
            0 if small.len() < 20_000 => small.push((heap.alloc([word; 8]).unwrap(), word)),
            1 if large.len() < 300 => large.push((heap.alloc([word; 1200]).unwrap(), word)),
            2 if !large.is_empty() => drop(large.swap_remove(random.usize(..large.len()))),
            3 if small.len() > 10_000 => drop(small.swap_remove(random.usize(..small.len()))),
            4 if !large.is_empty() => {
                let index = random.usize(..large.len());
                let (held, known) = &mut large[index];
                let scope = heap.enter();
                let bytes = held.get_mut(&scope).unwrap();
                assert!(bytes.iter().all(|found| found == known), "large value {index}");
                (*bytes, *known) = ([word; 1200], word);
            }
            5 | 6 if !small.is_empty() => {
                let index = random.usize(..small.len());
                let (held, known) = &mut small[index];
                let scope = heap.enter();
                let bytes = held.get_mut(&scope).unwrap();
                assert_eq!(*bytes, [*known; 8], "small value {index}");
                if word.is_multiple_of(2) {
                    (*bytes, *known) = ([word; 8], word);
                }
            }
            _ => {
                for _ in 0..20 {
                    small.push((heap.alloc([word; 8]).unwrap(), word));
                }
            }
        }
    }
    for (held, known) in &small {
        assert_eq!(*held.get(&heap.enter()).unwrap(), [*known; 8]);
    }
    for (held, known) in &large {
        assert!(held.get(&heap.enter()).unwrap().iter().all(|found| found == known));
    }
    steps
}

#[test]
fn values_survive_switches_at_random_moments() {
    let seed = seed();
    let ssd = format!("ssd:{}?size=512M&io=pread", std::env::temp_dir().display());
    let heap = heap("ram:");
    // Enough that a pool which dies or is full soon does so before it holds everything.
    let kept: Vec<_> = (0..3000u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
    let is_over = AtomicBool::new(false);
    let rounds = if std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value == "1") { 20 } else { 1 };
    let steps: usize = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|worker| {
                scope.spawn({
                    let (heap, is_over) = (&heap, &is_over);
                    move || work(heap, seed << 8 | worker, is_over)
                })
            })
            .collect();
        let over = Over(&is_over);
        let mut random = Rng::with_seed(seed);
        for _ in 0..rounds {
            for url in ["lz:?size=1G", &ssd, "mirror(ram:,fault:delay=20us@ram:)", "stripe(ram:,ram:)", "ram:"] {
                assert_eq!(switch(&heap, url), Ok(()), "{url}");
                let failed = switch(&heap, &format!("fault:die={}@ram:", 1 + random.usize(..60)));
                assert!(matches!(failed, Err(SwitchError::New(PoolError::ServerGone { .. }))), "{failed:?}");
                let full = switch(&heap, &format!("fault:full={}@ram:", 1 + random.usize(..30)));
                assert!(matches!(full, Err(SwitchError::New(PoolError::PoolFull { .. }))), "{full:?}");
            }
        }
        drop(over);
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    println!("{steps} steps");
    for (index, value) in kept.iter().enumerate() {
        assert_eq!(*value.get(&heap.enter()).unwrap(), [index as u64; 512]);
    }
    let stats = heap.stats();
    assert_eq!((stats.pool_switches, stats.pool_pages_to_move, heap.health()), (5 * rounds, 0, Health::Good));
    heap.verify();
}

#[test]
fn a_switch_can_be_watched_and_cancelled() {
    let heap = heap("ram:");
    let mut values: Vec<_> = (0..2000u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
    let moving = heap.switch_pool(SLOW).unwrap();
    assert!(matches!(heap.switch_pool("ram:"), Err(BuildError::Argument(_))), "one at a time");
    assert_eq!(moving.wait(Duration::ZERO), None);
    moving.cancel();
    assert_eq!(moving.wait(LONG), Some(Err(SwitchError::Cancelled)));
    assert!(!moving.progress().is_active);
    assert_eq!(heap.stats().pool_switches, 0);
    assert!(matches!(heap.switch_pool("nowhere:"), Err(BuildError::Open(_))));
    for (index, value) in values.iter_mut().enumerate().step_by(97) {
        assert_eq!(*value.get(&heap.enter()).unwrap(), [index as u64; 512]);
    }
    // A heap that ends takes its switch along.
    let last = heap.switch_pool(SLOW).unwrap();
    drop((values, heap));
    assert_eq!(last.wait(LONG), Some(Err(SwitchError::Cancelled)));
}
