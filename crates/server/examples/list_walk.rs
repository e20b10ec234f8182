//! One function, at the client and at the server: the same answers, and what each took.
//!
//! `cargo run --release -p farfield-server --example list_walk`

use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, LaneRequest, Op, PoolBuilder, Priority};
use farfield_server::{Config, Server};
use farfield_wic::{Caller, Fault, Function, Place, Registry, Where};
use std::time::{Duration, Instant};

const PAGES: u64 = 16 * 1024;
const NODES: u64 = PAGES * PAGE_BYTES as u64 / 64;
const WALKS: u64 = 2000;
const DEADLINE: Duration = Duration::from_secs(10);

/// Walks a linked list from a node on, `hops` nodes far. The server must have this function too.
struct Walk;

impl Function for Walk {
    const NAME: &'static str = "example.walk";
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    /// Offset of the first node, and hops.
    type Argument = (u64, u32);
    /// Value of the last node.
    type Answer = u64;

    async fn run<P: Place>(place: &P, (mut node, hops): (u64, u32)) -> Result<u64, Fault> {
        for _ in 0..hops {
            node = place.read_u64(node).await?;
        }
        place.read_u64(node + 8).await
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // In life this is another machine: a program that starts a server with its functions, or `farfield serve` with the standard ones.
    let functions = Registry::standard().with::<Walk>();
    let server = Server::start(Config { listen: vec!["tcp://127.0.0.1:0".parse()?], functions, ..Config::default() })?;
    let backend = PoolBuilder::new().url(&server.endpoints()[0]).pages(PAGES).client_name("list_walk").open()?;
    write_list(&*backend);

    let mut caller = Caller::new(backend);
    println!("{:>5} {:>18} {:>18} {:>22}", "hops", "client, each alone", "server, each alone", "server, 64 at a time");
    for hops in [1, 2, 4, 8, 16] {
        let starts: Vec<_> = (0..WALKS).map(|walk| (scattered(walk * 31), hops)).collect();
        let (here, client) = timed(|| one_by_one(&mut caller, &starts, Where::Client));
        let (there, server) = timed(|| one_by_one(&mut caller, &starts, Where::Server));
        let (together, batched) = timed(|| {
            let rows = starts.chunks(64).map(|row| caller.calls::<Walk>(row.to_vec()).at(Where::Server).run());
            rows.flatten().collect::<Result<Vec<_>, _>>().expect("answers")
        });
        assert!(here == there && here == together, "a function answers the same wherever it runs");
        println!("{hops:>5} {client:>15.2} µs {server:>15.2} µs {batched:>19.2} µs");
    }
    for walk in 0..WALKS {
        caller.call::<Walk>((scattered(walk), 16)).at(Where::Auto).run()?;
    }
    caller.choices().for_each(|(name, choice)| println!("{name} {choice}"));
    Ok(())
}

fn one_by_one(caller: &mut Caller, starts: &[(u64, u32)], place: Where) -> Vec<u64> {
    starts.iter().map(|start| caller.call::<Walk>(*start).at(place).run().expect("an answer")).collect()
}

/// What it gives, and microseconds for each walk.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64() * 1e6 / WALKS as f64)
}

/// Where node `number` of the list lies: neighbours are far from each other.
fn scattered(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % NODES * 64
}

/// A ring through the region: each node names the place that comes after its own in the scattered order.
fn write_list(backend: &dyn Backend) {
    let mut lane = backend.open_lane().expect("a lane");
    let mut done = Vec::with_capacity(1);
    let mut next = vec![0; NODES as usize];
    (0..NODES).for_each(|number| next[(scattered(number) / 64) as usize] = scattered(number + 1));
    for first in (0..PAGES).step_by(64) {
        let mut buffer = Buffer::new(64);
        for (index, node) in buffer.bytes_mut().chunks_exact_mut(64).enumerate() {
            let number = first * (PAGE_BYTES as u64 / 64) + index as u64;
            node[..8].copy_from_slice(&next[number as usize].to_le_bytes());
            node[8..16].copy_from_slice(&(number * number).to_le_bytes());
        }
        buffer.seal();
        let op = Op::Write { page: PageId(first), buffer };
        lane.submit(LaneRequest { tag: 0, priority: Priority::Background, deadline: DEADLINE, op }).expect("room");
        while lane.poll(&mut done) == 0 {
            lane.wait(DEADLINE);
        }
        done.drain(..).for_each(|ended| ended.result.expect("stored"));
    }
}
