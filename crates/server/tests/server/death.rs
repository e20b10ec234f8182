//! Guards against memory that outlives the process it was kept for: real processes, killed without a chance to say so.

use crate::common::*;
use farfield_core::PageId;
use farfield_pool::{Buffer, LaneRequest, Op, PoolBuilder, Priority};
use farfield_server::Config;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ENV_URL: &str = "FARFIELD_TEST_URL";
const PAGES: usize = 2048;

/// Not a test: what the killed process does. It stores 8 MiB, says so and waits to die.
#[test]
#[ignore = "started by the tests of this file, in a process of its own"]
fn client_that_waits_to_be_killed() {
    let Ok(url) = std::env::var(ENV_URL) else { return };
    let backend = PoolBuilder::new().url(url).pages(1 << 20).client_name("doomed").open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let mut done = Vec::with_capacity(64);
    for first in (0..PAGES).step_by(64) {
        let mut buffer = Buffer::new(64);
        buffer.bytes_mut().fill(first as u8 | 1);
        buffer.seal();
        let op = Op::Write { page: PageId(first as u64), buffer };
        lane.submit(LaneRequest { tag: 1, priority: Priority::Background, deadline: PATIENCE, op }).unwrap();
        while lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_millis(100));
        }
        done.drain(..).for_each(|completion| completion.result.unwrap());
    }
    println!("stored");
    std::thread::park_timeout(PATIENCE * 3);
}

/// A client process that has stored its 8 MiB.
fn doomed(url: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "death::client_that_waits_to_be_killed", "--ignored", "--nocapture"])
        .env(ENV_URL, url)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("stored")), "the client did not get that far");
    child
}

fn a_killed_client_is_forgotten(pick: fn(&farfield_server::Server) -> &str) {
    let lease = Duration::from_millis(300);
    let server = serve(Config { lease, ..config() });
    let (mut first, mut second) = (doomed(pick(&server)), doomed(pick(&server)));
    let stat = server.stat();
    assert_eq!((stat.sessions, stat.regions), (2, 2));
    assert_eq!(stat.used_pages, 2 * PAGES as u64);
    // The lease begins when the server sees the end, and that is after this.
    let killed = Instant::now();
    first.kill().unwrap();
    first.wait().unwrap();
    eventually("the first is forgotten", || server.stat().sessions == 1);
    assert!(killed.elapsed() >= lease, "not before the lease is over");
    assert_eq!(server.stat().used_pages, PAGES as u64);
    second.kill().unwrap();
    second.wait().unwrap();
    eventually("the second is forgotten", || server.stat().sessions == 0);
    let stat = server.stat();
    assert_eq!((stat.regions, stat.used_pages, stat.reserved_pages), (0, 0, 0));
    eventually("the last connection is over", || server.stat().connections == 0);
}

#[test]
fn a_killed_client_on_tcp_is_forgotten() {
    a_killed_client_is_forgotten(tcp);
}

#[test]
fn a_killed_client_with_mapped_memory_is_forgotten() {
    a_killed_client_is_forgotten(unix);
}
