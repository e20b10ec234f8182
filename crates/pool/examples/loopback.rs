//! Measures a memory server: polled round trips, and throughput with many operations in flight.
//!
//! ```text
//! farfield serve --listen tcp://127.0.0.1:5555 --listen unix:/tmp/farfield.sock &
//! cargo run --release -p farfield-pool --example loopback -- tcp://127.0.0.1:5555 shm:/tmp/farfield.sock
//! ```
//!
//! Each line is one measurement: median, 99th percentile and the spread of five rounds. `FARFIELD_TOKEN` is the token.
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "it runs outside of programs")]

use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PoolBuilder, Priority};
use fastrand::Rng;
use std::time::{Duration, Instant};

const PAGES: u64 = 64 * 1024;
const DEADLINE: Duration = Duration::from_secs(10);
const ROUNDS: usize = 5;

fn main() {
    let urls: Vec<String> = std::env::args().skip(1).collect();
    if urls.is_empty() {
        eprintln!("usage: loopback URL...");
        std::process::exit(2);
    }
    for url in urls {
        if let Err(error) = measure(&url) {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

fn measure(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let token = std::env::var("FARFIELD_TOKEN").unwrap_or_default();
    let backend = PoolBuilder::new().url(url).token(token).client_name("loopback").pages(PAGES).open()?;
    let mut lane = backend.open_lane()?;
    println!("{url}: {PAGES} pages");
    fill(&mut *lane);
    round_trips(&mut *lane, "read 4 KiB", 1, false);
    round_trips(&mut *lane, "write 4 KiB", 1, true);
    round_trips(&mut *lane, "read 64 KiB", 16, false);
    for (pages, depth) in [(1, 32), (1, 128), (16, 16), (64, 16)] {
        throughput(&mut *lane, pages, depth, false);
        throughput(&mut *lane, pages, depth, true);
    }
    mapped(&*backend);
    Ok(())
}

fn buffer(pages: usize) -> Buffer {
    let mut buffer = Buffer::new(pages);
    for (index, word) in buffer.bytes_mut().as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    }
    buffer.seal();
    buffer
}

fn fill(lane: &mut dyn Lane) {
    let mut done: Vec<Completion> = Vec::with_capacity(1);
    let mut spare = Some(buffer(64));
    for page in (0..PAGES).step_by(64) {
        let buffer = spare.take().expect("one buffer goes round");
        let op = Op::Write { page: PageId(page), buffer };
        let request = LaneRequest { tag: 0, priority: Priority::Background, deadline: DEADLINE, op };
        lane.submit(request).expect("an empty lane has room");
        spare = wait_one(lane, &mut done).buffer;
    }
}

fn wait_one(lane: &mut dyn Lane, done: &mut Vec<Completion>) -> Completion {
    while lane.poll(done) == 0 {
        lane.wait(Duration::from_secs(1));
    }
    let completion = done.pop().expect("one");
    completion.result.expect("the operation succeeds");
    completion
}

/// A page of a fixed pseudo-random sequence.
fn next_page(random: &mut Rng, pages: usize) -> PageId {
    PageId(random.u64(..PAGES / pages as u64) * pages as u64)
}

fn round_trips(lane: &mut dyn Lane, what: &str, pages: usize, write: bool) {
    const TIMES: usize = 10_000;
    let mut done = Vec::with_capacity(1);
    let mut spare = Some(buffer(pages));
    let mut random = Rng::with_seed(7);
    let mut medians = Vec::new();
    let mut all = Vec::with_capacity(TIMES * ROUNDS);
    for _ in 0..ROUNDS {
        let mut times = Vec::with_capacity(TIMES);
        for tag in 0..TIMES as u64 {
            let buffer = spare.take().expect("one buffer goes round");
            let page = next_page(&mut random, pages);
            let op = if write { Op::Write { page, buffer } } else { Op::Read { page, buffer } };
            let start = Instant::now();
            let request = LaneRequest { tag, priority: Priority::Demand, deadline: DEADLINE, op };
            lane.submit(request).expect("an empty lane has room");
            let completion = wait_one(lane, &mut done);
            times.push(start.elapsed().as_nanos() as u64);
            spare = completion.buffer;
        }
        times.sort_unstable();
        medians.push(times[TIMES / 2]);
        all.append(&mut times);
    }
    all.sort_unstable();
    medians.sort_unstable();
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    println!(
        "  round trip  {what:<12} median {:6.2} us  p99 {:6.2} us  rounds {:.2}..{:.2}",
        micros(medians[ROUNDS / 2]),
        micros(all[all.len() * 99 / 100]),
        micros(medians[0]),
        micros(medians[ROUNDS - 1]),
    );
}

fn throughput(lane: &mut dyn Lane, pages: usize, depth: usize, write: bool) {
    const ROUND: Duration = Duration::from_millis(200);
    let mut done: Vec<Completion> = Vec::with_capacity(depth);
    let mut spare: Vec<Buffer> = (0..depth).map(|_| buffer(pages)).collect();
    let mut random = Rng::with_seed(11);
    let mut rates = Vec::new();
    for _ in 0..ROUNDS {
        let (start, mut operations) = (Instant::now(), 0u64);
        let mut running = true;
        while running || lane.in_flight() > 0 {
            running = start.elapsed() < ROUND;
            while running && let Some(buffer) = spare.pop() {
                let page = next_page(&mut random, pages);
                let op = if write { Op::Write { page, buffer } } else { Op::Read { page, buffer } };
                let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: DEADLINE, op };
                lane.submit(request).expect("a lane has room for what it is given here");
            }
            if lane.poll(&mut done) == 0 {
                lane.wait(Duration::from_millis(100));
            }
            for completion in done.drain(..) {
                completion.result.expect("the operation succeeds");
                operations += 1;
                spare.extend(completion.buffer);
            }
        }
        rates.push(operations as f64 / start.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    let gigabytes = |rate: f64| rate * (pages * PAGE_BYTES) as f64 / 1e9;
    println!(
        "  throughput  {:<5} {pages:3} pages x {depth:3} in flight: {:9.0} op/s  {:5.2} GB/s  rounds {:.2}..{:.2}",
        if write { "write" } else { "read" },
        rates[ROUNDS / 2],
        gigabytes(rates[ROUNDS / 2]),
        gigabytes(rates[0]),
        gigabytes(rates[ROUNDS - 1]),
    );
}

fn mapped(backend: &dyn Backend) {
    let Some(mapped) = backend.mapped() else { return };
    let (mut random, mut sum) = (Rng::with_seed(13), 0u64);
    const TIMES: u32 = 200_000;
    let start = Instant::now();
    for _ in 0..TIMES {
        let address = mapped.page(next_page(&mut random, 1)).expect("every page was written");
        // SAFETY: a page of the region, which nobody writes or discards now.
        sum += u64::from(unsafe { address.read_volatile() });
    }
    println!(
        "  mapped      first byte of a page: {:.0} ns  (sum {sum})",
        start.elapsed().as_nanos() as f64 / f64::from(TIMES)
    );
}
