//! What an element costs that `ff.take.8` puts in its place at the server: columns from a few MiB to some hundred, indices at random.
//!
//! `cargo run --release -p farfield-server --example take_speed`

use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, LaneRequest, Op, PoolBuilder, Priority};
use farfield_server::{Config, Server};
use farfield_wic::columns::{Indices, Take, Taken};
use farfield_wic::{Caller, Range, Where};
use std::time::{Duration, Instant};

const PER_PAGE: u64 = PAGE_BYTES as u64 / 8;
/// Words of the largest column.
const WORDS: u64 = 256 << 20 >> 3;
/// Elements of a call, as `FarVec::take` cuts them.
const CALL: u64 = 128 * 1024;
/// As many as an argument has room for.
const NEAR: usize = 16 * 1024;
const CALLS: u64 = 4;
const ROUNDS: u64 = 8;
const DEADLINE: Duration = Duration::from_secs(10);

// Where each lies, in pages: the column, indices, what is made.
const INDICES: u64 = WORDS / PER_PAGE;
const MADE: u64 = INDICES + CALLS * CALL / PER_PAGE;
const PAGES: u64 = MADE + CALLS * CALL / PER_PAGE;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = Server::start(Config { listen: vec!["tcp://127.0.0.1:0".parse()?], ..Config::default() })?;
    let backend = PoolBuilder::new().url(&server.endpoints()[0]).pages(PAGES).client_name("take_speed").open()?;
    store(&*backend, 0, WORDS, |word| word * word);
    let mut caller = Caller::new(backend.clone());
    println!("{:>10} {:>16} {:>16}", "column", "indices near", "indices far");
    for words in [1 << 20, 8 << 20, WORDS] {
        let mut random = fastrand::Rng::with_seed(words);
        let mut index = move |_| random.u64(..words);
        let mut took = [Duration::ZERO; 2];
        for _ in 0..ROUNDS {
            let indices: Vec<u64> = (0..CALLS * CALL).map(&mut index).collect();
            store(&*backend, INDICES, CALLS * CALL, |at| indices[at as usize]);
            for (took, is_far) in took.iter_mut().zip([false, true]) {
                let taken = |call: u64| Taken {
                    from: vec![Range { offset: 0, count: words }],
                    indices: vec![match is_far {
                        true => Indices::There(range(INDICES, call, CALL)),
                        false => Indices::These(indices[(call * CALL) as usize..][..NEAR].to_vec()),
                    }],
                    to: vec![range(MADE, call, CALL / PER_PAGE)],
                };
                let start = Instant::now();
                let answers = caller.calls::<Take<8>>((0..CALLS).map(taken).collect()).at(Where::Server).run();
                *took += start.elapsed();
                answers.into_iter().try_for_each(|answer| answer.map(|outside| assert_eq!(outside, None)))?;
            }
        }
        let each = |took: Duration, all: u64| took.as_secs_f64() * 1e9 / (ROUNDS * all) as f64;
        let [near, far] = [each(took[0], CALLS * NEAR as u64), each(took[1], CALLS * CALL)];
        println!("{:>6} MiB {near:>13.0} ns {far:>13.0} ns", words >> 17);
    }
    Ok(())
}

/// The place of a call's share behind a page; counts are of words or of pages.
fn range(page: u64, call: u64, count: u64) -> Range {
    Range { offset: page * PAGE_BYTES as u64 + call * CALL * 8, count }
}

fn store(backend: &dyn Backend, page: u64, words: u64, word: impl Fn(u64) -> u64) {
    let mut lane = backend.open_lane().expect("a lane");
    let mut done = Vec::with_capacity(1);
    for first in (0..words / PER_PAGE).step_by(64) {
        let mut buffer = Buffer::new(64);
        for (bytes, number) in buffer.bytes_mut().chunks_exact_mut(8).zip(first * PER_PAGE..) {
            bytes.copy_from_slice(&word(number).to_le_bytes());
        }
        buffer.seal();
        let op = Op::Write { page: PageId(page + first), buffer };
        lane.submit(LaneRequest { tag: 0, priority: Priority::Background, deadline: DEADLINE, op }).expect("room");
        while lane.poll(&mut done) == 0 {
            lane.wait(DEADLINE);
        }
        done.drain(..).for_each(|ended| ended.result.expect("stored"));
    }
}
