//! Guards against answers over a mirror that are not those of what was written: from a server that has missed it, or that is lost in the middle of a call.

use crate::common::functions::*;
use crate::common::*;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, Health, Op, PoolBuilder, PoolError};
use farfield_server::{Config, Server};
use farfield_wic::{Aggregate, CallError, Caller, Fault, Function, Place, Range, Registry, Summary, Where};
use fastrand::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Calls that each of two servers has run.
type Counts = [AtomicUsize; 2];

/// [`Aggregate`], counted.
macro_rules! counted {
    ($counts:ident, $first:ident, $second:ident) => {
        static $counts: Counts = [const { AtomicUsize::new(0) }; 2];
        counted!($counts, $first, 0);
        counted!($counts, $second, 1);
    };
    ($counts:ident, $name:ident, $side:literal) => {
        struct $name;
        impl Function for $name {
            const NAME: &'static str = Aggregate::NAME;
            const VERSION: u32 = Aggregate::VERSION;
            type Argument = Range;
            type Answer = Summary;
            async fn run<P: Place>(place: &P, range: Range) -> Result<Summary, Fault> {
                $counts[$side].fetch_add(1, Ordering::Relaxed);
                Aggregate::run(place, range).await
            }
        }
    };
}

fn registry<F: Function>() -> Registry {
    Registry::new().with::<F>().with::<Rests>()
}

function!(
    /// Rests for so many milliseconds.
    Rests: u64 => u64, |place, millis| {
        place.pause(Duration::from_millis(millis)).await;
        Ok(millis)
    }
);

/// The same, and says that it only reads.
struct Dozes;

impl Function for Dozes {
    const NAME: &'static str = Rests::NAME;
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = u64;
    type Answer = u64;
    async fn run<P: Place>(place: &P, millis: u64) -> Result<u64, Fault> {
        Rests::run(place, millis).await
    }
}

fn start(url: &str, functions: Registry) -> Server {
    serve(Config { listen: vec![url.parse().unwrap()], functions, call_within: PATIENCE, ..config() })
}

fn urls(name: &str) -> [String; 2] {
    [0, 1].map(|side| format!("unix:@farfield-{name}-{}-{side}", std::process::id()))
}

fn open_mirror(urls: &[String; 2]) -> Arc<dyn Backend> {
    let url = format!("mirror({})", urls.join(","));
    PoolBuilder::new().url(url).pages(PAGES).deadline(PATIENCE).repair_thread().open().unwrap()
}

fn sum_up(bytes: &[u8], range: Range) -> Summary {
    let words = bytes[range.offset as usize..][..range.count as usize * 8].chunks_exact(8);
    let words: Vec<u64> = words.map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    Summary {
        count: range.count,
        sum: words.iter().map(|word| u128::from(*word)).sum(),
        min: words.iter().copied().min().unwrap_or(u64::MAX),
        max: words.iter().copied().max().unwrap_or(0),
    }
}

fn any_range(dice: &mut Rng) -> Range {
    let first = dice.u64(..BYTES / 8);
    Range { offset: first * 8, count: dice.u64(..BYTES / 8 - first) }
}

/// Changes some pages, there and in the model.
fn change(backend: &dyn Backend, dice: &mut Rng, bytes: &mut [u8]) {
    for _ in 0..1 + dice.u64(..4) {
        let page = dice.u64(..PAGES);
        let own = &mut bytes[page as usize * PAGE_BYTES..][..PAGE_BYTES];
        own.fill(dice.u8(..));
        own[dice.usize(..PAGE_BYTES)] = 1;
        let mut buffer = Buffer::new(1);
        buffer.bytes_mut().copy_from_slice(own);
        buffer.seal();
        operate(backend, Op::Write { page: PageId(page), buffer }).unwrap();
    }
}

counted!(OF_DEATHS, FirstOfDeaths, SecondOfDeaths);

#[test]
fn answers_are_of_what_was_written_while_servers_die_and_come_back() {
    let urls = urls("deaths");
    let begin = |side: usize| match side {
        0 => start(&urls[0], registry::<FirstOfDeaths>()),
        _ => start(&urls[1], registry::<SecondOfDeaths>()),
    };
    let mut servers = [Some(begin(0)), Some(begin(1))];
    let backend = open_mirror(&urls);
    let mut dice = Rng::with_seed(0xDEA7);
    let mut bytes: Vec<u8> = (0..BYTES).map(|_| dice.u8(..)).collect();
    fill(&*backend, &bytes);
    let rounds = AtomicUsize::new(0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let killer = threads.spawn(|| {
            let mut dice = Rng::with_seed(7);
            for death in 0..6 {
                let from = rounds.load(Ordering::Relaxed);
                eventually("all goes on", || rounds.load(Ordering::Relaxed) > from + dice.usize(..20));
                eventually("both hold everything", || backend.health() == Health::Good);
                servers[death % 2] = None;
                std::thread::sleep(Duration::from_millis(dice.u64(..100)));
                servers[death % 2] = Some(begin(death % 2));
            }
            eventually("both hold everything", || backend.health() == Health::Good);
            is_over.store(true, Ordering::Relaxed);
        });
        let mut caller = Caller::new(backend.clone());
        while !is_over.load(Ordering::Relaxed) && !killer.is_finished() {
            change(&*backend, &mut dice, &mut bytes);
            for place in [Where::Server, Where::Auto] {
                let ranges: Vec<Range> = (0..1 + dice.u64(..9)).map(|_| any_range(&mut dice)).collect();
                for (range, found) in ranges.iter().zip(caller.calls::<Aggregate>(ranges.clone()).at(place).run()) {
                    match found {
                        Ok(found) => assert_eq!(found, sum_up(&bytes, *range), "{range:?} {place:?}"),
                        Err(CallError::NotNow) => assert_eq!(place, Where::Server),
                        Err(error) => panic!("{place:?}: {error}"),
                    }
                }
            }
            // Ways that were never used before, too.
            if dice.u64(..4) == 0 {
                caller = Caller::new(backend.clone());
            }
            rounds.fetch_add(1, Ordering::Relaxed);
        }
        killer.join().unwrap();
    });
    let counts: Vec<usize> = OF_DEATHS.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    assert!(counts.iter().all(|count| *count > 10), "the servers have run {counts:?}");
}

counted!(OF_CALM, FirstOfCalm, SecondOfCalm);

#[test]
fn functions_that_only_read_run_at_one_server_of_a_mirror_and_no_others_do() {
    let urls = urls("calm");
    let _servers = [start(&urls[0], registry::<FirstOfCalm>()), start(&urls[1], registry::<SecondOfCalm>())];
    let backend = open_mirror(&urls);
    let mut dice = Rng::with_seed(3);
    let mut bytes: Vec<u8> = (0..BYTES).map(|_| dice.u8(..)).collect();
    fill(&*backend, &bytes);
    for _ in 0..4 {
        let mut caller = Caller::new(backend.clone());
        for _ in 0..25 {
            change(&*backend, &mut dice, &mut bytes);
            let range = any_range(&mut dice);
            assert_eq!(caller.call::<Aggregate>(range).at(Where::Server).run(), Ok(sum_up(&bytes, range)));
        }
        assert_eq!(caller.call::<Rests>(0).at(Where::Server).run(), Err(CallError::Nowhere), "it may write");
        let start = ListStart { node: 0, hops: 1 };
        assert_eq!(caller.call::<List>(start).at(Where::Server).run(), Err(CallError::NoFunction { name: List::NAME }));
    }
    assert_eq!(OF_CALM.each_ref().map(|count| count.load(Ordering::Relaxed)), [50, 50]);
    // Words are not changed at two servers.
    let word = Caller::new(backend).call::<Counts8>(0).run();
    assert_eq!(word, Err(CallError::Fault(Fault::NotHere)));
}

function!(
    Counts8: u64 => u64, |place, offset| { place.fetch_add(offset, 1).await }
);

#[test]
fn a_call_goes_on_at_the_other_server_when_one_is_lost_in_the_middle_of_it() {
    let urls = urls("middle");
    for round in 0..4 {
        let begin = |url: &String| Some(start(url, registry::<Aggregate>()));
        let mut servers = [begin(&urls[0]), begin(&urls[1])];
        let backend = open_mirror(&urls);
        std::thread::scope(|threads| {
            let calls = threads.spawn(|| {
                let mut caller = Caller::new(backend.clone());
                caller.calls::<Dozes>(vec![300; 20]).at(Where::Server).within(PATIENCE).run()
            });
            // At one of the two they are under way; which one nobody knows.
            std::thread::sleep(Duration::from_millis(100));
            servers[round % 2] = None;
            let ended = calls.join().unwrap();
            assert!(ended.iter().all(|end| *end == Ok(300)), "{ended:?}");
        });
        // Nobody is left.
        servers = [None, None];
        let (started, mut caller) = (Instant::now(), Caller::new(backend.clone()));
        let nobody = caller.call::<Dozes>(1).at(Where::Server).run();
        let is_gone =
            matches!(nobody, Err(CallError::NotNow | CallError::Fault(Fault::Lost(PoolError::ServerGone { .. }))));
        assert!(is_gone && started.elapsed() < PATIENCE, "{nobody:?}");
        drop(servers);
    }
}
