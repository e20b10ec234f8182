//! Checks of the distance to far memory.

use super::CheckResult;
use anyhow::{Context, ensure};
use farfield_core::PageId;
use farfield_pager::runner::{self, Latency};
use farfield_pool::{Buffer, Lane, LaneRequest, Op, Priority};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Round trips of a measurement, after as many to warm up.
const ROUND_TRIPS: usize = 500;
/// Longest time for one measured operation, and for all loopback round trips.
const DEADLINE: Duration = Duration::from_secs(3);
/// Median of polled loopback round trips above which something is wrong. A small virtual machine
/// takes 7 µs.
const LOOPBACK_SLOW: Duration = Duration::from_micros(100);

pub(super) fn loopback() -> CheckResult {
    let name = "loopback round trip";
    match measure_loopback() {
        Ok(median) if median > LOOPBACK_SLOW => CheckResult::warn(
            name,
            format!("{} (TCP, polled)", latency(median)),
            "slow: too few processors, a busy machine, or a firewall that filters loopback traffic",
        ),
        Ok(median) => CheckResult::ok(name, format!("{} (TCP, polled)", latency(median))),
        Err(error) => CheckResult::warn(name, error.to_string(), "let this user listen and connect on 127.0.0.1"),
    }
}

/// Connects to a memory server, stores a page and reads it back many times.
pub(super) fn server(url: &str, token: &[u8]) -> CheckResult {
    let name = "memory server";
    match measure_server(url, token) {
        Ok(median) => CheckResult::ok(name, format!("{url}: a page comes back in {}", latency(median))),
        Err(error) => CheckResult::fail(
            name,
            format!("{url}: {error}"),
            "start `farfield serve` there, let this machine through its firewall, give its token with --token-file",
        ),
    }
}

/// Returns the median time of reading one page.
fn measure_server(url: &str, token: &[u8]) -> anyhow::Result<Duration> {
    let urls = farfield_pool::resolve_urls(&[url])?;
    let backend = runner::pool_builder(&urls, token)?.pages(1).open()?;
    let mut lane = backend.open_lane()?;
    let mut buffer = Buffer::new(1);
    buffer.bytes_mut().fill(7);
    buffer.seal();
    let mut buffer = finish(&mut *lane, Op::Write { page: PageId(0), buffer })?;
    let mut times = Vec::with_capacity(2 * ROUND_TRIPS);
    for _ in 0..2 * ROUND_TRIPS {
        let start = Instant::now();
        buffer.bytes_mut().fill(0);
        buffer = finish(&mut *lane, Op::Read { page: PageId(0), buffer })?;
        times.push(start.elapsed());
        ensure!(buffer.bytes().iter().all(|&byte| byte == 7), "a page came back with the wrong bytes");
    }
    Ok(median(&mut times[ROUND_TRIPS..]))
}

/// Submits one operation and waits for its end. Returns its buffer.
fn finish(lane: &mut dyn Lane, op: Op) -> anyhow::Result<Buffer> {
    let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: DEADLINE, op };
    ensure!(lane.submit(request).is_ok(), "a lane without work takes no work");
    let mut done = Vec::with_capacity(1);
    let until = Instant::now() + 2 * DEADLINE;
    while lane.poll(&mut done) == 0 {
        ensure!(Instant::now() < until, "no answer within {:?}", 2 * DEADLINE);
        lane.wait(DEADLINE);
    }
    let completion = done.remove(0);
    completion.result?;
    completion.buffer.context("the buffer of a read or write comes back")
}

fn latency(duration: Duration) -> Latency {
    Latency(Some(duration.as_nanos() as u64))
}

/// Returns the median of polled round trips of 64 bytes.
fn measure_loopback() -> std::io::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    let deadline = Instant::now() + DEADLINE;
    let echo = std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while receive(&mut server, &mut bytes, deadline).and_then(|()| server.write_all(&bytes)).is_ok() {}
    });
    let mut times = Vec::with_capacity(2 * ROUND_TRIPS);
    let mut bytes = [7; 64];
    for _ in 0..2 * ROUND_TRIPS {
        let start = Instant::now();
        client.write_all(&bytes)?;
        receive(&mut client, &mut bytes, deadline)?;
        times.push(start.elapsed());
    }
    drop(client);
    let _ = echo.join();
    Ok(median(&mut times[ROUND_TRIPS..]))
}

fn receive(stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    let mut filled = 0;
    let mut polls = 0u32;
    while filled < bytes.len() {
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled += read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                polls = polls.wrapping_add(1);
                if polls.is_multiple_of(1024) {
                    // The other thread may need this processor.
                    std::thread::yield_now();
                    if Instant::now() > deadline {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
