//! How fast a lane to a server on this machine is: one page at a time, and in batches, both ways.
//!
//! `cargo run --release -p farfield-server --example lane_speed [tcp|unix|fabric] [SPIN_MICROSECONDS]`; `fabric` with `--features fabric`

use farfield_core::PageId;
use farfield_pool::{Buffer, Completion, Lane, LaneRequest, Op, PoolBuilder, Priority};
use farfield_server::{Config, Server};
use std::time::{Duration, Instant};

const PAGES: u64 = 64 * 1024;
const DEADLINE: Duration = Duration::from_secs(10);

fn main() {
    let road = std::env::args().nth(1).unwrap_or_else(|| "tcp".to_owned());
    let listen = match road.as_str() {
        "tcp" | "fabric" => "tcp://127.0.0.1:0".to_owned(),
        _ => format!("unix:@farfield-lane-speed-{}", std::process::id()),
    };
    let spin = std::env::args().nth(2).map_or(50, |text| text.parse().expect("microseconds"));
    let spin = Duration::from_micros(spin);
    let listen = vec![listen.parse().expect("a URL")];
    let fabric = (road == "fabric").then(|| "tcp".to_owned());
    let server = Server::start(Config { listen, fabric, spin, ..Config::default() }).expect("a server");
    let before = if road == "fabric" { "fabric:" } else { "" };
    let url = format!("{before}{}", server.endpoints()[0]);
    let backend = PoolBuilder::new().url(url).pages(PAGES).client_name("speed").open().expect("a region");
    let mut lane = backend.open_lane().expect("a lane");
    for (name, write, first_time) in [("write, new", true, true), ("write, again", true, false), ("read", false, false)]
    {
        for (run, depth) in [(1, 1), (1, 64), (16, 8), (64, 4)] {
            if first_time {
                discard(lane.as_mut());
            }
            let (ops, seconds) = work(lane.as_mut(), write, run, depth);
            let per_page = seconds * 1e9 / (ops * run as u64) as f64;
            let per_op = seconds * 1e6 / ops as f64;
            println!("{road} {name:13} run {run:2} depth {depth:2}: {per_op:8.2} µs/op {per_page:8.0} ns/page");
        }
    }
}

fn discard(lane: &mut dyn Lane) {
    let op = Op::Discard { page: PageId(0), count: PAGES };
    lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline: DEADLINE, op }).expect("room");
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {}
}

/// Pages in a scattered order, so that nothing is near by luck. Operations and seconds.
fn work(lane: &mut dyn Lane, write: bool, run: usize, depth: usize) -> (u64, f64) {
    let ops = (PAGES / run as u64).min(40_000);
    let mut free: Vec<Buffer> = (0..depth).map(|_| Buffer::new(run)).collect();
    free.iter_mut().for_each(|buffer| buffer.bytes_mut().fill(7));
    free.iter_mut().for_each(Buffer::seal);
    let mut done: Vec<Completion> = Vec::with_capacity(depth);
    let start = Instant::now();
    let (mut sent, mut ended) = (0, 0);
    while ended < ops {
        while sent < ops
            && let Some(buffer) = free.pop()
        {
            let page = PageId(sent * 40_503 % (PAGES / run as u64) * run as u64);
            let op = if write { Op::Write { page, buffer } } else { Op::Read { page, buffer } };
            lane.submit(LaneRequest { tag: sent, priority: Priority::Demand, deadline: DEADLINE, op }).expect("room");
            sent += 1;
        }
        lane.poll(&mut done);
        for completion in done.drain(..) {
            completion.result.expect("a good end");
            free.push(completion.buffer.expect("the buffer"));
            ended += 1;
        }
    }
    (ops, start.elapsed().as_secs_f64())
}
