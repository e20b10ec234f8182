//! What a random read of a page takes, and one of a part of it: `cargo run --release -p farfield-pool --example parts -- URL`.
//!
//! The far side is four times as large as what the reads fill, and both are larger than the processor's caches, as in a heap that misses.

use farfield_core::PageId;
use farfield_os::process::{now_ns, thread_cpu_ns};
use farfield_pool::{Buffer, Completion, Lane, LaneRequest, Op, PagePart, PoolBuilder, Priority};
use std::collections::VecDeque;
use std::time::Duration;

const FAR_PAGES: u64 = 65_536;
const NEAR_PAGES: usize = 16_384;
const READS: u64 = 200_000;

fn main() {
    let url = std::env::args().nth(1).unwrap_or_else(|| "ram:".into());
    let backend = PoolBuilder::new().url(&url).pages(FAR_PAGES).open().expect("the pool opens");
    let mut lane = backend.open_lane().expect("a lane");
    let mut targets: VecDeque<Buffer> = (0..NEAR_PAGES).map(|_| Buffer::new(1)).collect();
    for page in 0..FAR_PAGES {
        let mut buffer = targets.pop_front().expect("a buffer");
        buffer.bytes_mut().fill(page as u8 | 1);
        buffer.seal();
        submit(&mut *lane, page, Op::Write { page: PageId(page), buffer });
        wait_until(&mut *lane, 0, &mut targets);
    }
    println!("{:>12} {:>10} {:>12} {:>12}", "bytes", "in flight", "ns", "cpu ns");
    for round in 0..3 {
        for bytes in [4096, 1024, 256, 64] {
            for in_flight in [1, 32] {
                let (ns, cpu_ns) = measure(&mut *lane, bytes, in_flight, round, &mut targets);
                println!("{bytes:>12} {in_flight:>10} {ns:>12} {cpu_ns:>12}");
            }
        }
    }
}

/// Time and processor time of this thread for one read.
fn measure(
    lane: &mut dyn Lane,
    bytes: usize,
    in_flight: usize,
    seed: u64,
    targets: &mut VecDeque<Buffer>,
) -> (u64, u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let (started, cpu) = (now_ns(), thread_cpu_ns());
    for read in 0..READS {
        let page = PageId(random.u64(..FAR_PAGES));
        let buffer = targets.pop_front().expect("a buffer");
        let op = match bytes {
            4096 => Op::Read { page, buffer },
            _ => {
                let offset = random.usize(..4096 / bytes) * bytes;
                Op::ReadPart { page, part: PagePart::new(offset, bytes).expect("inside a page"), buffer }
            }
        };
        submit(lane, read, op);
        wait_until(lane, in_flight - 1, targets);
    }
    wait_until(lane, 0, targets);
    ((now_ns() - started) / READS, (thread_cpu_ns() - cpu) / READS)
}

fn submit(lane: &mut dyn Lane, tag: u64, op: Op) {
    let deadline = Duration::from_secs(10);
    lane.submit(LaneRequest { tag, priority: Priority::Demand, deadline, op }).expect("room in the lane");
}

/// Until at most so many are in flight.
fn wait_until(lane: &mut dyn Lane, most: usize, targets: &mut VecDeque<Buffer>) {
    let mut done: Vec<Completion> = Vec::with_capacity(64);
    while lane.in_flight() > most || !done.is_empty() {
        for completion in done.drain(..) {
            completion.result.expect("the pool answers");
            targets.extend(completion.buffer);
        }
        if lane.in_flight() > most && lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_secs(10));
        }
    }
}
