//! Guards against code whose answer depends on where it runs, against functions that take a server or a client with them, and against calls
//! that never end.

use crate::common::functions::*;
use crate::common::*;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{
    CallBody, ErrorCode, HEADER_BYTES, Hello, MessageHeader, MessageKind, Reply, Request, features,
};
use farfield_core::{PageId, RegionId};
use farfield_pool::{Backend, Buffer, Op, PoolError};
use farfield_server::{Config, Server};
use farfield_wic::{
    Aggregate, CallError, Caller, Fault, Function, Place, RANGE_BYTES_MAX, Range, Registry, Sim, Stop, Summary, Where,
};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use std::future::{Future, pending};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

function!(
    /// Never ends, and does not listen to what accesses report.
    Endless: u64 => u64, |place, offset| {
        loop {
            let _ = place.read_u64(offset).await;
        }
    }
);

function!(
    /// Never ends, and accesses nothing.
    Idle: () => u64, |place, _nothing| {
        loop {
            place.yield_now().await;
        }
    }
);

function!(
    /// Waits for what never comes.
    Stray: () => u64, |_place, _nothing| {
        pending().await
    }
);

function!(
    Panics: u64 => u64, |place, offset| {
        assert!(place.read_u64(offset).await? == u64::MAX, "as it shall");
        Ok(0)
    }
);

function!(
    /// So many bytes, one after the other.
    Long: u32 => Vec<u8>, |_place, len| { Ok(vec![7; len as usize]) }
);

function!(
    Increment: u64 => u64, |place, offset| {
        let word = place.read_u64(offset).await?;
        place.write_u64(offset, word + 1).await?;
        Ok(word)
    }
);

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Move {
    from: u64,
    to: u64,
    len: u32,
}

function!(
    /// Copies a range, and says what was at its place in the words where it begins and ends.
    Copy: Move => [u64; 2], |place, given| {
        let Move { from, to, len } = given;
        let mut ends = [[0; 8]; 2];
        place.read_many(&[to, (to + u64::from(len)).saturating_sub(8)], &mut ends).await?;
        let bytes = place.read_range(from, len as usize).await?;
        place.write(to, &bytes).await?;
        Ok(ends.map(u64::from_le_bytes))
    }
);

fn registry() -> Registry {
    Registry::standard()
        .with::<List>()
        .with::<Endless>()
        .with::<Idle>()
        .with::<Stray>()
        .with::<Panics>()
        .with::<Long>()
        .with::<Increment>()
        .with::<Copy>()
        .with::<Sometimes>()
}

fn server() -> Server {
    serve(Config { functions: registry(), ..config() })
}

/// What a list is, without any of ours.
fn walk(bytes: &[u8], start: ListStart) -> Result<ListEnd, Fault> {
    let (mut node, mut hops) = (start.node, 0);
    loop {
        let pair = word(bytes, node).zip(word(bytes, node.saturating_add(8)));
        let (next, value) = pair.ok_or(Fault::OutOfRange { offset: node })?;
        if hops == start.hops || next == List::END {
            return Ok(ListEnd { node, value, hops });
        }
        (node, hops) = (next, hops + 1);
    }
}

fn sum_up(bytes: &[u8], range: Range) -> Result<Summary, Fault> {
    let outside = Fault::OutOfRange { offset: range.offset };
    let end = range.count.checked_mul(8).and_then(|len| range.offset.checked_add(len)).ok_or(outside)?;
    let words = bytes.get(range.offset as usize..end as usize).ok_or(outside)?.chunks_exact(8);
    let words: Vec<u64> = words.map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    Ok(Summary {
        count: range.count,
        sum: words.iter().map(|word| u128::from(*word)).sum(),
        min: words.iter().copied().min().unwrap_or(u64::MAX),
        max: words.iter().copied().max().unwrap_or(0),
    })
}

/// Noise, with lists of all lengths in it: some end, some are rings, some lead out of the region.
fn region_of_lists(dice: &mut Rng) -> (Vec<u8>, Vec<u64>) {
    let mut bytes: Vec<u8> = (0..BYTES).map(|_| dice.u8(..)).collect();
    // Pages that were never written are as good as others.
    bytes[5 * PAGE_BYTES..7 * PAGE_BYTES].fill(0);
    let mut heads = Vec::new();
    for _ in 0..40 {
        let nodes: Vec<u64> = (0..1 + dice.u64(..20)).map(|_| dice.u64(..BYTES - 16)).collect();
        let last = [List::END, nodes[0], BYTES - 8, u64::MAX - 3][dice.usize(..4)];
        for (node, next) in nodes.iter().zip(nodes[1..].iter().chain([&last])) {
            put(&mut bytes, *node, *next);
        }
        heads.push(nodes[0]);
    }
    (bytes, heads)
}

fn at_client<T>(result: Result<T, Fault>) -> Result<T, CallError> {
    result.map_err(CallError::Fault)
}

fn answers_are_the_same(url: &str, seed: u64) {
    println!("seed {seed}");
    let mut dice = Rng::with_seed(seed);
    let backend = open(url);
    let (bytes, heads) = region_of_lists(&mut dice);
    fill(&*backend, &bytes);
    let sim = Sim::new(seed, bytes.clone());
    let mut caller = Caller::new(backend);
    let walks: Vec<_> =
        (0..200).map(|_| ListStart { node: heads[dice.usize(..heads.len())], hops: dice.u32(..40) }).collect();
    let walked: Vec<_> = walks.iter().map(|start| walk(&bytes, *start)).collect();
    assert!(walked.iter().any(Result::is_ok) && walked.iter().any(Result::is_err), "there is something to see");
    let ranges: Vec<_> = (0..60)
        .map(|_| {
            let offset = dice.u64(..BYTES + 9);
            let left = BYTES.saturating_sub(offset) / 8;
            let count = [0, 1, dice.u64(..600), left, left + 1, u64::MAX / 8, u64::MAX][dice.usize(..7)];
            Range { offset, count }
        })
        .collect();
    let summed: Vec<_> = ranges.iter().map(|range| sum_up(&bytes, *range)).collect();
    assert!(summed.iter().any(Result::is_ok) && summed.iter().any(Result::is_err), "there is something to see");
    for place in EVERYWHERE {
        let wanted: Vec<_> = walked.iter().map(|result| at_client(*result)).collect();
        assert_eq!(caller.calls::<List>(walks.clone()).at(place).run(), wanted, "together, {place:?}");
        for (start, wanted) in walks.iter().zip(&wanted).take(40) {
            assert_eq!(&caller.call::<List>(*start).at(place).run(), wanted, "{start:?} {place:?}");
        }
        let wanted: Vec<_> = summed.iter().map(|result| at_client(*result)).collect();
        assert_eq!(caller.calls::<Aggregate>(ranges.clone()).at(place).run(), wanted, "{place:?}");
    }
    let stopped = |results: &[Result<ListEnd, Fault>]| -> Vec<_> {
        results.iter().map(|result| result.map_err(Stop::Fault)).collect()
    };
    assert_eq!(sim.run::<List>(walks), stopped(&walked));
    let summed: Vec<_> = summed.iter().map(|result| result.map_err(Stop::Fault)).collect();
    assert_eq!(sim.run::<Aggregate>(ranges), summed);
}

#[test]
fn answers_are_the_same_wherever_a_function_runs() {
    let server = server();
    for seed in 1..=4 {
        answers_are_the_same(tcp(&server), seed);
        answers_are_the_same(unix(&server), seed + 100);
    }
}

#[test]
fn functions_write_the_same_bytes_at_client_and_server() {
    let server = server();
    let mut dice = Rng::with_seed(0xc0_4e);
    for url in [tcp(&server), unix(&server)] {
        let backend = open(url);
        let mut model: Vec<u8> = (0..BYTES).map(|_| dice.u8(..)).collect();
        fill(&*backend, &model);
        let mut caller = Caller::new(backend.clone());
        for step in 0..120 {
            let len = [dice.u64(..64), dice.u64(..9000), RANGE_BYTES_MAX as u64, 4096][dice.usize(..4)];
            let align = if dice.u64(..2) == 0 { !0xFFF } else { !0 };
            let (from, to) = (dice.u64(..BYTES + 8 - len) & align, dice.u64(..BYTES + 8 - len) & align);
            let given = Move { from, to, len: len as u32 };
            let ends = [to, (to + len).saturating_sub(8)].map(|offset| word(&model, offset).ok_or(offset));
            let source = (from + len <= BYTES).then(|| model[from as usize..][..len as usize].to_vec());
            let wanted = match (ends, source) {
                ([Err(offset), _] | [_, Err(offset)], _) => Err(Fault::OutOfRange { offset }),
                (_, None) => Err(Fault::OutOfRange { offset: from }),
                ([Ok(first), Ok(last)], Some(source)) if to + len <= BYTES => {
                    model[to as usize..][..len as usize].copy_from_slice(&source);
                    Ok([first, last])
                }
                _ => Err(Fault::OutOfRange { offset: to }),
            };
            // Each place sees what the other wrote.
            let place = EVERYWHERE[dice.usize(..2)];
            let answer = caller.call::<Copy>(given).at(place).run();
            assert_eq!(answer, at_client(wanted), "step {step}: {given:?} {place:?}");
        }
        assert!(contents(&*backend) == model);
        let given = Move { from: 0, to: 0, len: RANGE_BYTES_MAX as u32 + 1 };
        for place in EVERYWHERE {
            let too_long = CallError::Fault(Fault::TooLong { bytes: RANGE_BYTES_MAX as u64 + 1 });
            assert_eq!(caller.call::<Copy>(given).at(place).run(), Err(too_long));
        }
    }
}

#[test]
fn functions_at_the_server_do_not_lose_each_others_bytes() {
    const TIMES: usize = 200;
    let server = server();
    let backend = open(tcp(&server));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let mut caller = Caller::new(backend.clone());
            scope.spawn(move || {
                for _ in 0..TIMES {
                    // One word each, all in one page.
                    caller.call::<Increment>(thread * 8).at(Where::Server).run().unwrap();
                }
            });
        }
    });
    let bytes = contents(&*backend);
    (0..4).for_each(|thread| assert_eq!(word(&bytes, thread * 8), Some(TIMES as u64)));
    // At the client, side by side in one page.
    let mut caller = Caller::new(backend.clone());
    let words: Vec<u64> = (0..50).map(|index| PAGE_BYTES as u64 + index * 8).collect();
    caller.calls::<Increment>(words.clone()).run().into_iter().for_each(|answer| assert_eq!(answer, Ok(0)));
    let bytes = contents(&*backend);
    words.iter().for_each(|offset| assert_eq!(word(&bytes, *offset), Some(1), "{offset}"));
}

#[test]
fn a_function_that_is_missing_or_another_is_named() {
    function!(Missing: u64 => u64, |_place, given| { Ok(given) });
    struct Newer;
    impl Function for Newer {
        const NAME: &'static str = List::NAME;
        const VERSION: u32 = 9;
        type Argument = u64;
        type Answer = u64;
        async fn run<P: Place>(_: &P, given: u64) -> Result<u64, Fault> {
            Ok(given)
        }
    }
    let server = server();
    let mut caller = Caller::new(open(tcp(&server)));
    assert_eq!(caller.call::<Missing>(1).at(Where::Server).run(), Err(CallError::NoFunction { name: "Missing" }));
    let other = CallError::OtherVersion { name: List::NAME, ours: 9, theirs: 1 };
    assert_eq!(caller.call::<Newer>(1).at(Where::Server).run(), Err(other));
    assert_eq!(caller.call::<Missing>(1).run(), Ok(1), "it is here");
    let start = ListStart { node: 0, hops: 0 };
    assert!(caller.call::<List>(start).at(Where::Server).run().is_ok(), "the connection goes on");
}

/// A ring of nodes, each on a page of its own.
fn ring() -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    for page in 0..PAGES {
        put(&mut bytes, PageId(page).offset(), PageId((page + 37) % PAGES).offset());
        put(&mut bytes, PageId(page).offset() + 8, page);
    }
    bytes
}

#[test]
fn auto_takes_long_walks_to_the_server_and_says_why() {
    let server = server();
    let backend = open(tcp(&server));
    let bytes = ring();
    fill(&*backend, &bytes);
    let mut caller = Caller::new(backend);
    for node in 0..300 {
        let start = ListStart { node: PageId(node % PAGES).offset(), hops: 200 };
        assert_eq!(caller.call::<List>(start).at(Where::Auto).run(), at_client(walk(&bytes, start)));
    }
    let (name, choice) = caller.choices().next().unwrap();
    let [here, there] = choice.calls;
    assert!(name == List::NAME && here >= 1 && there > 250, "{choice}");
    assert_eq!(choice.steps_thousandths, Some(201_000), "the server counts as the client does");
    assert!(choice.to_string().starts_with("at the server"), "{choice}");
}

#[test]
fn calls_that_a_server_pushes_back_go_on_at_the_client() {
    let server = serve(Config { call_steps_max: 50, functions: registry(), ..config() });
    let backend = open(tcp(&server));
    let bytes = ring();
    fill(&*backend, &bytes);
    let mut caller = Caller::new(backend);
    let start = ListStart { node: 0, hops: 60 };
    assert_eq!(caller.call::<List>(start).at(Where::Server).run(), Err(CallError::Overrun { steps: 50 }));
    for _ in 0..5 {
        assert_eq!(caller.call::<List>(start).at(Where::Auto).run(), at_client(walk(&bytes, start)));
    }
    // Nobody said that this one may run again.
    assert_eq!(caller.call::<Endless>(0).at(Where::Auto).run(), Err(CallError::Overrun { steps: 50 }));
}

#[test]
fn calls_run_at_the_client_if_no_server_runs_code() {
    // As one of before there were calls: it offers none.
    let old = serve(config_without_functions());
    for backend in [open(tcp(&old)), open(unix(&old)), open("ram:")] {
        let mut caller = Caller::new(backend);
        let start = ListStart { node: 16, hops: 3 };
        assert_eq!(caller.call::<List>(start).at(Where::Server).run(), Err(CallError::Nowhere));
        assert_eq!(caller.call::<List>(start).run(), Ok(ListEnd { node: 0, value: 0, hops: 3 }));
    }
    // And one that does not read the client's features at all.
    let (mut client, greeting) = Client::open(tcp(&old), &Hello { features: u64::MAX, ..hello("", None) });
    assert_eq!(greeting.unwrap().features & features::CALL, 0);
    let region = client.create(PAGES).unwrap();
    let call = CallBody { name: List::NAME, version: 1, argument: &[0, 0] };
    let request = Request::Call { region, steps_max: 0, call };
    assert_eq!(client.ask(request), Err(ErrorCode::NoFunction));
    assert_eq!(client.ask(Request::Ping), Ok(Reply::Done));
}

fn config_without_functions() -> Config {
    Config { functions: Registry::new(), ..config() }
}

/// A call of it ends with one of these, soon, wherever it runs.
fn is_ended<F: Function>(server: &Server, argument: impl Fn() -> F::Argument, wanted: fn(&CallError) -> bool) {
    for url in [tcp(server), unix(server)] {
        let mut caller = Caller::new(open(url));
        for place in EVERYWHERE {
            for (steps, within) in [(300, PATIENCE), (u64::MAX, Duration::from_millis(150))] {
                let started = Instant::now();
                let error = caller.call::<F>(argument()).at(place).steps(steps).within(within).run().err().unwrap();
                assert!(wanted(&error), "{error:?} {place:?} of {steps} steps within {within:?}");
                assert!(started.elapsed() < PATIENCE, "not in time");
            }
            let start = ListStart { node: 0, hops: 0 };
            assert!(caller.call::<List>(start).at(place).run().is_ok(), "the channel goes on");
        }
    }
}

#[test]
fn a_function_that_never_ends_is_ended() {
    let server = server();
    let ended = |error: &CallError| matches!(error, CallError::Overrun { .. } | CallError::TimedOut { .. });
    is_ended::<Endless>(&server, || 8, ended);
    // Nor does it help not to listen to errors.
    is_ended::<Endless>(&server, || BYTES, ended);
    is_ended::<Idle>(&server, || (), ended);
    is_ended::<Stray>(&server, || (), |error| *error == CallError::Stuck);
}

#[test]
fn a_server_limits_steps_and_time_whatever_clients_say() {
    let limits =
        |steps, within| Config { call_steps_max: steps, call_within: within, functions: registry(), ..config() };
    let server = serve(limits(3000, PATIENCE));
    let mut caller = Caller::new(open(tcp(&server)));
    let endless = caller.call::<Endless>(0).at(Where::Server).steps(u64::MAX).run();
    assert_eq!(endless, Err(CallError::Overrun { steps: 3000 }));
    let server = serve(limits(u64::MAX, Duration::from_millis(50)));
    let mut caller = Caller::new(open(tcp(&server)));
    let endless = caller.call::<Endless>(0).at(Where::Server).steps(u64::MAX).within(PATIENCE * 2).run();
    assert_eq!(endless, Err(CallError::TimedOut { after: PATIENCE * 2 }));
}

#[test]
fn a_function_that_never_ends_keeps_nobody_else_waiting() {
    let server = serve(Config { call_steps_max: u64::MAX, call_within: PATIENCE, functions: registry(), ..config() });
    let backend = open(tcp(&server));
    let mut caller = Caller::new(backend.clone());
    let busy = std::thread::spawn(move || {
        let within = Duration::from_millis(400);
        caller.call::<Endless>(0).at(Where::Server).steps(u64::MAX).within(within).run()
    });
    // Neither pages of the same session, nor others in the same row.
    let mut times = 0;
    while !busy.is_finished() {
        operate(&*backend, Op::Read { page: PageId(3), buffer: Buffer::new(1) }).unwrap();
        times += 1;
    }
    assert!(matches!(busy.join().unwrap(), Err(CallError::TimedOut { .. })));
    assert!(times > 1, "pages come while it runs");
    for place in EVERYWHERE {
        let mut caller = Caller::new(backend.clone());
        let ends = caller.calls::<Sometimes>((0..40).collect()).at(place).steps(100).run();
        for (index, end) in ends.into_iter().enumerate() {
            match index % 5 {
                0 => assert_eq!(end, Err(CallError::Overrun { steps: 100 }), "{place:?}"),
                _ => assert_eq!(end, Ok(index as u64), "{place:?}"),
            }
        }
    }
}

/// Functions at work now, and most at a time.
static AT_WORK: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

function!(
    /// Waits until the word is the given number, without sleeping; then makes it one less.
    Countdown: u64 => u64, |place, given| {
        loop {
            AT_WORK[1].fetch_max(AT_WORK[0].fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            AT_WORK[0].fetch_sub(1, Ordering::SeqCst);
            if place.compare_exchange(0, given, given.wrapping_sub(1)).await? == given {
                return Ok(given);
            }
        }
    }
);

#[test]
fn functions_that_wait_for_each_other_go_on_and_take_no_more_processors_than_there_are() {
    let processors = std::thread::available_parallelism().unwrap().get().max(2);
    let functions = Registry::standard().with::<Countdown>();
    let server = serve(Config { call_steps_max: u64::MAX, call_within: PATIENCE, functions, ..config() });
    let backend = open(tcp(&server));
    let last = 4 * processors as u64;
    set_first_word(&*backend, last);
    std::thread::scope(|scope| {
        // Who must wait for all others comes first.
        for number in 0..=last {
            let mut caller = Caller::new(backend.clone());
            let mut call =
                move || caller.call::<Countdown>(number).at(Where::Server).steps(u64::MAX).within(PATIENCE).run();
            scope.spawn(move || assert_eq!(call(), Ok(number)));
        }
    });
    assert!(AT_WORK[1].load(Ordering::SeqCst) <= processors, "the only client has all of them");
}

/// Makes the first word of the region this one.
fn set_first_word(backend: &dyn Backend, value: u64) {
    let mut bytes = vec![0; PAGE_BYTES];
    put(&mut bytes, 0, value);
    fill(backend, &bytes);
}

function!(
    /// One of five never ends.
    Sometimes: u64 => u64, |place, given| {
        loop {
            place.read_u64(given).await?;
            if !given.is_multiple_of(5) {
                return Ok(given);
            }
        }
    }
);

#[test]
fn a_function_that_panics_takes_nobody_with_it() {
    let server = server();
    let mut caller = Caller::new(open(tcp(&server)));
    assert_eq!(caller.call::<Panics>(0).at(Where::Server).run(), Err(CallError::Panicked));
    let both = caller.calls::<Panics>(vec![0, BYTES, 0]).at(Where::Server).run();
    let outside = CallError::Fault(Fault::OutOfRange { offset: BYTES });
    assert_eq!(both, [Err(CallError::Panicked), Err(outside), Err(CallError::Panicked)]);
    assert_eq!(caller.call::<Increment>(0).at(Where::Server).run(), Ok(0), "the channel goes on");
    assert_eq!(server.stat().sessions, 1);
}

/// Where the code of a function beside its future panics, if it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Trap {
    Nowhere,
    Reading,
    Beginning,
    Ending,
    Writing,
}

/// As a trap, whose bytes are a trap's, too.
#[derive(Clone, PartialEq, Debug)]
struct Trapped(Trap, bool);

impl Serialize for Trapped {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert!(!self.1 || self.0 != Trap::Writing, "when its answer is written");
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Trapped {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Trapped, D::Error> {
        let trap = Trap::deserialize(deserializer)?;
        assert!(trap != Trap::Reading, "when its argument is read");
        Ok(Trapped(trap, true))
    }
}

struct Traps;

impl Function for Traps {
    const NAME: &'static str = "Traps";
    const VERSION: u32 = 1;
    type Argument = Trapped;
    type Answer = Trapped;

    fn run<P: Place>(place: &P, given: Trapped) -> impl Future<Output = Result<Trapped, Fault>> {
        /// Is dropped when the function has ended.
        struct Whole<F>(Pin<Box<F>>, Trap);
        impl<F: Future> Future for Whole<F> {
            type Output = F::Output;
            fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
                self.0.as_mut().poll(context)
            }
        }
        impl<F> Drop for Whole<F> {
            fn drop(&mut self) {
                assert!(self.1 != Trap::Ending, "when it is dropped");
            }
        }
        assert!(given.0 != Trap::Beginning, "when it begins");
        let trap = given.0;
        Whole(Box::pin(async move { place.read_u64(0).await.map(|_| given) }), trap)
    }
}

#[test]
fn no_code_of_a_function_takes_a_server_with_it() {
    let server = serve(Config { functions: registry().with::<Traps>(), ..config() });
    let mut caller = Caller::new(open(tcp(&server)));
    for traps in [
        vec![Trap::Reading],
        vec![Trap::Beginning, Trap::Nowhere, Trap::Writing, Trap::Reading],
        vec![Trap::Writing, Trap::Ending],
    ] {
        let given = traps.iter().map(|trap| Trapped(*trap, false)).collect();
        let answers = caller.calls::<Traps>(given).at(Where::Server).run();
        for (trap, answer) in traps.into_iter().zip(answers) {
            match trap {
                Trap::Nowhere | Trap::Ending => assert_eq!(answer, Ok(Trapped(trap, true))),
                _ => assert_eq!(answer, Err(CallError::Panicked), "{trap:?}"),
            }
        }
    }
    assert_eq!(caller.call::<Increment>(0).at(Where::Server).run(), Ok(0), "the channel goes on");
    assert_eq!(server.stat().sessions, 1);
}

/// What panics here is the caller's to catch; the next call finds everything in order.
#[test]
fn a_function_that_panics_at_the_client_leaves_its_caller_usable() {
    let server = server();
    let mut caller = Caller::new(open(tcp(&server)));
    for _ in 0..3 {
        let mut many = || caller.calls::<Panics>(vec![0; 40]).at(Where::Client).run();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut many)).is_err());
        let ones = caller.calls::<Increment>(vec![0; 40]).at(Where::Client).run();
        assert!(ones.iter().all(Result::is_ok), "{ones:?}");
    }
}

#[test]
fn an_overlong_argument_or_answer_is_an_error() {
    let server = server();
    let mut caller = Caller::new(open(tcp(&server)));
    let most = CallBody::ANSWER_BYTES_MAX as u32;
    for len in [0, 1, 127, 128, most - 3] {
        assert_eq!(caller.call::<Long>(len).at(Where::Server).run(), Ok(vec![7; len as usize]), "{len}");
    }
    for len in [most - 2, most, u32::MAX / 64] {
        assert_eq!(caller.call::<Long>(len).at(Where::Server).run(), Err(CallError::AnswerTooLong), "{len}");
    }
    // More than a connection keeps of answers.
    let many = caller.calls::<Long>(vec![most - 3; 100]).at(Where::Server).run();
    assert!(many.iter().all(|answer| answer.as_ref().is_ok_and(|bytes| bytes.len() == most as usize - 3)));
    function!(Wide: Vec<u8> => u64, |_place, given| { Ok(given.len() as u64) });
    let calls = caller.calls::<Wide>(vec![vec![0; CallBody::ARGUMENT_BYTES_MAX], vec![0; 9]]).at(Where::Server).run();
    let too_long = CallError::ArgumentTooLong { bytes: most as u64 + 3 };
    assert_eq!(calls, [Err(too_long), Err(CallError::NoFunction { name: "Wide" })]);
    assert!(too_long.to_string().contains("Where::Auto"), "{too_long}");
}

/// An argument or an answer that a server has no room for, of a function that may run again.
struct Copies;

impl Function for Copies {
    const NAME: &'static str = "Copies";
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = (Vec<u8>, u32);
    type Answer = Vec<u8>;

    async fn run<P: Place>(_: &P, (bytes, copies): (Vec<u8>, u32)) -> Result<Vec<u8>, Fault> {
        Ok(bytes.repeat(copies as usize))
    }
}

#[test]
fn calls_too_long_for_a_server_run_at_the_client() {
    let server = serve(Config { functions: registry().with::<Copies>(), ..config() });
    let mut caller = Caller::new(open(tcp(&server)));
    let most = CallBody::ANSWER_BYTES_MAX;
    for (bytes, copies) in [(100, 10), (most + 1, 0), (most + 1, 1), (7, most as u32), (16 << 20, 1)] {
        let given = (vec![7u8; bytes], copies);
        let expected = Ok(vec![7u8; bytes * copies as usize]);
        for place in [Where::Client, Where::Auto] {
            // More often than it takes to try the other side.
            for _ in 0..if bytes > 1000 { 5 } else { 100 } {
                let answer = caller.call::<Copies>(given.clone()).at(place).run();
                assert!(
                    answer == expected,
                    "{bytes} bytes {copies} times, {place:?}: {:?}",
                    answer.map(|all| all.len())
                );
            }
        }
    }
    // Some of many.
    let many = [(9, 1), (most + 1, 1), (9, 2), (most, 2)].map(|(bytes, copies)| (vec![7u8; bytes], copies));
    let answers = caller.calls::<Copies>(many.to_vec()).at(Where::Auto).run();
    let lengths: Vec<_> = answers.into_iter().map(|answer| answer.map(|bytes| bytes.len())).collect();
    assert_eq!(lengths, [Ok(9), Ok(most + 1), Ok(18), Ok(2 * most)]);
    // Nobody said that this one may run again: it has run, and its answer is lost.
    let long = caller.calls::<Long>(vec![most as u32; 40]).at(Where::Auto).run();
    assert!(long.iter().all(|end| end == &Err(CallError::AnswerTooLong) || end == &Ok(vec![7; most])));
}

#[test]
fn lying_requests_are_refused() {
    let server = server();
    let (mut client, greeting) = Client::open(tcp(&server), &Hello { features: features::CALL, ..hello("", None) });
    assert_eq!(greeting.unwrap().features, features::CALL);
    let region = client.create(PAGES).unwrap();
    let mut ask = |region, name, argument: &[u8]| {
        client.ask(Request::Call { region, steps_max: 0, call: CallBody { name, version: 1, argument } })
    };
    assert_eq!(ask(region, List::NAME, &[0, 1]), Ok(Reply::Answer { steps: 2 }));
    assert_eq!(ask(region, List::NAME, &[0]), Err(ErrorCode::BadRequest), "too short");
    assert_eq!(ask(region, List::NAME, &[0, 1, 0]), Err(ErrorCode::BadRequest), "too long");
    assert_eq!(ask(region, List::NAME, &[0xFF; 40]), Err(ErrorCode::BadRequest), "no number");
    assert_eq!(ask(region, "ff.lis", &[0, 1]), Err(ErrorCode::NoFunction));
    assert_eq!(ask(RegionId(region.0 + 1), List::NAME, &[0, 1]), Err(ErrorCode::UnknownRegion));
    // Another client's region is none.
    let mut other = Client::new(tcp(&server));
    let call = CallBody { name: List::NAME, version: 1, argument: &[0, 1] };
    assert_eq!(other.ask(Request::Call { region, steps_max: 0, call }), Err(ErrorCode::UnknownRegion));
    // What is no call ends the connection.
    let long = [b'a'; 80];
    let bodies: [Vec<u8>; 5] = [
        vec![],
        vec![1, 0, 0, 0, 0, 0],
        vec![1, 0, 0, 0, 3, 0, b'f'],
        vec![1, 0, 0, 0, 2, 0, 0xC3, 0x28],
        [&[1, 0, 0, 0, 80, 0], &long[..]].concat(),
    ];
    for body in bodies {
        let mut client = Client::new(tcp(&server));
        let head = MessageHeader {
            kind: MessageKind::Call as u8,
            body: body.len() as u32,
            region: region.0,
            ..MessageHeader::default()
        };
        client.send(&[&head.encode()[..], &body].concat());
        client.expect_close();
    }
}

/// Passes bytes on between one client and the server, and cuts the connection of the calls after so many of one direction.
struct Cutter {
    url: String,
}

impl Cutter {
    /// The third connection is the one of the calls: control and a lane come before.
    const CALLS: usize = 2;

    fn new(server: &str, asked_max: usize, answered_max: usize) -> Cutter {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("tcp://{}", listener.local_addr().unwrap());
        let server = server.strip_prefix("tcp://").unwrap().to_owned();
        std::thread::spawn(move || {
            for (number, near) in listener.incoming().enumerate() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(&server)) else { return };
                let limits = if number == Self::CALLS { [asked_max, answered_max] } else { [usize::MAX; 2] };
                let ends =
                    [(&near, &far), (&far, &near)].map(|(a, b)| (a.try_clone().unwrap(), b.try_clone().unwrap()));
                for ((from, to), limit) in ends.into_iter().zip(limits) {
                    std::thread::spawn(move || pass(from, to, limit));
                }
            }
        });
        Cutter { url }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, mut limit: usize) {
    let mut bytes = [0; 4096];
    while limit > 0 {
        let most = bytes.len().min(limit);
        match from.read(&mut bytes[..most]) {
            Ok(0) | Err(_) => break,
            Ok(count) => {
                limit -= count;
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        }
    }
    let _ = (from.shutdown(std::net::Shutdown::Both), to.shutdown(std::net::Shutdown::Both));
}

#[test]
fn connections_may_be_cut_at_any_byte() {
    let server = server();
    let welcome = HEADER_BYTES + 48;
    let greeting = HEADER_BYTES + 40 + "calls".len();
    // Somewhere in the handshake, in the request, in the answer.
    let of_request = (0..56).step_by(7).map(|more| (greeting + more, usize::MAX));
    let of_answer = (0..44).step_by(5).map(|more| (usize::MAX, welcome + more));
    for (asked, answered) in of_request.chain(of_answer).chain([(30, usize::MAX), (usize::MAX, 50)]) {
        let cutter = Cutter::new(tcp(&server), asked, answered);
        let backend = open(&cutter.url);
        fill(&*backend, &vec![0; PAGE_BYTES]);
        let mut caller = Caller::new(backend);
        let started = Instant::now();
        let answer = caller.call::<Increment>(0).at(Where::Server).within(PATIENCE).run();
        let lost = matches!(answer, Err(CallError::Fault(Fault::Lost(PoolError::ServerGone { .. }))));
        assert!(lost, "{answer:?} after {asked} and {answered} bytes");
        assert!(started.elapsed() < PATIENCE);
        // It is not sent again by itself, and a channel that is dead says so. What was never one may be opened anew.
        let again = caller.call::<Increment>(0).at(Where::Server).run();
        let was_open = asked > greeting && answered > welcome;
        let is_dead = matches!(again, Err(CallError::Fault(Fault::Lost(_))));
        assert!(is_dead || !was_open && again == Ok(0), "{again:?} after {asked} and {answered} bytes");
    }
}

/// Not a test: the server that is killed.
#[test]
#[ignore = "started by the tests of this file, in a process of its own"]
fn server_that_waits_to_be_killed() {
    if std::env::var_os(ENV_DOOMED).is_none() {
        return;
    }
    let server = serve(Config { call_steps_max: u64::MAX, call_within: PATIENCE, functions: registry(), ..config() });
    println!("serving {} {} .", tcp(&server), unix(&server));
    std::thread::park_timeout(PATIENCE * 3);
}

const ENV_DOOMED: &str = "FARFIELD_TEST_DOOMED_SERVER";

#[test]
fn a_server_that_is_killed_is_said_in_time() {
    for url in 0..2 {
        let mut server = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "calls::server_that_waits_to_be_killed", "--ignored", "--nocapture"])
            .env(ENV_DOOMED, "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
        let urls = lines.find_map(|line| line.split_once("serving ").map(|(_, urls)| urls.to_owned())).unwrap();
        let backend = open(urls.split(' ').nth(url).unwrap());
        let (says, hears) = std::sync::mpsc::channel();
        let callers = EVERYWHERE.map(|place| {
            let (mut caller, says) = (Caller::new(backend.clone()), says.clone());
            std::thread::spawn(move || {
                caller.call::<Aggregate>(Range { offset: 0, count: 1 }).at(place).run().unwrap();
                says.send(()).unwrap();
                // Who does not listen to what accesses report runs until its time is over.
                let within = if place == Where::Client { Duration::from_secs(2) } else { PATIENCE * 2 };
                caller.calls::<Endless>(vec![0; 5]).at(place).steps(u64::MAX).within(within).run()
            })
        });
        EVERYWHERE.iter().for_each(|_| hears.recv_timeout(PATIENCE).unwrap());
        let killed = Instant::now();
        server.kill().unwrap();
        server.wait().unwrap();
        let [here, there] = callers.map(|caller| caller.join().unwrap());
        let gone = |end: &Result<u64, CallError>| {
            matches!(end, Err(CallError::Fault(Fault::Lost(PoolError::ServerGone { .. }))))
        };
        assert!(there.iter().all(gone), "{there:?}");
        assert!(here.iter().all(|end| matches!(end, Err(CallError::TimedOut { .. }))), "{here:?}");
        assert!(killed.elapsed() < PATIENCE);
    }
}
