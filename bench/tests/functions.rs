//! A log and a hash table that callers at the client, at the server and at both change at once.
//! Danger: a word that is lost or is there twice, because two callers held the lock.

use farfield_bench_functions::{Cuckoo, CuckooReply, CuckooRequest, LogRequest, SharedLog, with_workloads};
use farfield_core::PageId;
use farfield_pool::{Backend, Buffer, LaneRequest, Op, PoolBuilder, Priority};
use farfield_server::{Config, Server};
use farfield_wic::{Caller, Registry, Where};
use std::time::Duration;

/// Machines that do much else are slow.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: u64 = 16;
const LOG: u64 = 16384;
const TABLE: u64 = 32768;
/// Words that each caller appends, and keys that it sets.
const TIMES: u64 = 24;

fn contents(backend: &dyn Backend) -> Vec<u8> {
    let mut lane = backend.open_lane().unwrap();
    let op = Op::Read { page: PageId(0), buffer: Buffer::new(PAGES as usize) };
    lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline: PATIENCE, op }).unwrap();
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(PATIENCE);
    }
    let completion = done.remove(0);
    completion.result.unwrap();
    completion.buffer.unwrap().bytes().to_vec()
}

#[test]
fn one_log_and_one_table_serve_both_sides() {
    let socket = format!("@farfield-bench-functions-{}", std::process::id());
    let config = Config {
        listen: vec![format!("unix:{socket}").parse().unwrap()],
        functions: with_workloads(Registry::standard()),
        call_within: PATIENCE,
        call_steps_max: u64::MAX,
        ..Config::default()
    };
    let _server = Server::start(config).unwrap();
    let builder = PoolBuilder::new().url(format!("shm:{socket}")).pages(PAGES).client_name("functions");
    let owner = builder.deadline(PATIENCE).open().unwrap();
    std::thread::scope(|scope| {
        for (thread, place) in [Where::Client, Where::Server, Where::Auto].into_iter().enumerate() {
            let backend = owner.clone();
            scope.spawn(move || {
                let mut caller = Caller::new(backend);
                let ours = |number: u64| 1 + thread as u64 * TIMES + number;
                let append = |number: u64| LogRequest { log: LOG, words_max: 1000, append: Some(ours(number)) };
                let table = |key: u64, put: Option<u64>| CuckooRequest { table: TABLE, buckets: 30, key, put };
                for number in 0..TIMES {
                    let at = caller.call::<SharedLog>(append(number)).at(place).within(PATIENCE).run().unwrap();
                    assert!(at.is_some_and(|at| at >= number && at < 3 * TIMES), "{at:?} {place:?}");
                    let put = table(ours(number), Some(number));
                    let reply = caller.call::<Cuckoo>(put).at(place).within(PATIENCE).run();
                    assert_eq!(reply, Ok(CuckooReply::Value(None)), "{place:?}");
                    let reply = caller.call::<Cuckoo>(table(ours(0), None)).at(place).within(PATIENCE).run();
                    assert_eq!(reply, Ok(CuckooReply::Value(Some(0))), "{place:?}");
                }
            });
        }
    });
    let bytes = contents(&*owner);
    let word = |number: u64| {
        let offset = SharedLog::word(LOG, number).unwrap() as usize;
        u64::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    };
    let mut words: Vec<u64> = (0..3 * TIMES).map(word).collect();
    let last = words.last().copied();
    words.sort_unstable();
    assert_eq!(words, Vec::from_iter(1..=3 * TIMES), "each word is there once");
    let mut caller = Caller::new(owner);
    for place in [Where::Client, Where::Server] {
        let request = LogRequest { log: LOG, words_max: 1000, append: None };
        assert_eq!(caller.call::<SharedLog>(request).at(place).within(PATIENCE).run(), Ok(last));
        for key in 1..=3 * TIMES {
            let request = CuckooRequest { table: TABLE, buckets: 30, key, put: None };
            let value = CuckooReply::Value(Some((key - 1) % TIMES));
            assert_eq!(caller.call::<Cuckoo>(request).at(place).within(PATIENCE).run(), Ok(value), "{key} {place:?}");
        }
    }
}
