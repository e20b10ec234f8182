//! Guards against servers that are back, at the URL of one that was lost, and are believed to hold what that one held: also by the snapshots that are made then.

use crate::common::*;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, Health, Lane, LaneRequest, Op, PoolBuilder, Priority, SwitchBackend};
use farfield_server::{Config, Server};
use std::time::Duration;

const PAGES: u64 = 300;

fn start(url: &str) -> Server {
    serve(Config { listen: vec![url.parse().unwrap()], ..config() })
}

fn ask(lane: &mut dyn Lane, op: Op) -> Buffer {
    lane.submit(LaneRequest { tag: 1, priority: Priority::Demand, deadline: PATIENCE, op }).unwrap();
    let mut done = Vec::with_capacity(4);
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(10));
    }
    let completion = done.pop().unwrap();
    completion.result.unwrap();
    completion.buffer.unwrap()
}

/// All pages are of this version.
fn write(lane: &mut dyn Lane, version: u8) {
    for page in 0..PAGES {
        let mut buffer = Buffer::new(1);
        buffer.bytes_mut().fill(version ^ page as u8);
        buffer.seal();
        ask(lane, Op::Write { page: PageId(page), buffer });
    }
}

fn check(backend: &dyn Backend, version: u8, context: &str) {
    let mut lane = backend.open_lane().unwrap();
    for page in 0..PAGES {
        let buffer = ask(&mut *lane, Op::Read { page: PageId(page), buffer: Buffer::new(1) });
        assert_eq!(buffer.bytes(), [version ^ page as u8; PAGE_BYTES], "page {page}, {context}");
    }
}

/// Servers with their URLs, and how the pool of them is opened.
fn pool(name: &str, made: &str, servers: usize) -> (Vec<String>, Vec<Option<Server>>, PoolBuilder) {
    let url = |number| format!("unix:@farfield-{name}-{}-{made}{number}", std::process::id());
    let urls: Vec<String> = (0..servers).map(url).collect();
    let running = urls.iter().map(|url| Some(start(url))).collect();
    let code = if made == "ec" { "2,1," } else { "" };
    let builder = PoolBuilder::new().url(format!("{made}({code}{})", urls.join(","))).pages(PAGES).repair_thread();
    (urls, running, builder)
}

fn are_there_again_and_in_snapshots(made: &str, servers: usize) {
    let (urls, mut running, builder) = pool("rejoin", made, servers);
    let backend = builder.open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    for round in 0..4 {
        let (server, context) = (round % servers, format!("{made}, round {round}"));
        write(&mut *lane, 2 * round as u8);
        running[server] = None;
        eventually("the death is noticed", || {
            write(&mut *lane, 2 * round as u8 + 1);
            backend.health() == Health::Degraded
        });
        write(&mut *lane, 2 * round as u8 + 1);
        running[server] = Some(start(&urls[server]));
        eventually("all servers hold everything", || {
            lane.poll(&mut Vec::new());
            backend.health() == Health::Good
        });
        check(&*backend, 2 * round as u8 + 1, &context);
        let claimed = builder.clone().degraded().claim(&backend.clone_region().unwrap()).unwrap();
        // The snapshot is what the other one was, whatever is written here, and whichever of its servers is asked; so is its own.
        write(&mut *lane, 200);
        let again = builder.clone().degraded().claim(&claimed.clone_region().unwrap()).unwrap();
        eventually("the snapshots have what they need", || {
            [&claimed, &again].iter().all(|snapshot| snapshot.health() == Health::Good)
        });
        for _ in 0..3 {
            check(&*claimed, 2 * round as u8 + 1, &context);
            check(&*again, 2 * round as u8 + 1, &context);
        }
    }
    // One that came back is lost again, and the snapshot is made without it.
    running[3 % servers] = None;
    eventually("the death is noticed", || {
        write(&mut *lane, 99);
        backend.health() == Health::Degraded
    });
    let claimed = builder.clone().degraded().claim(&backend.clone_region().unwrap()).unwrap();
    check(&*claimed, 99, made);
}

#[test]
fn servers_of_a_mirror_are_there_again_and_in_snapshots() {
    are_there_again_and_in_snapshots("mirror", 2);
}

#[test]
fn servers_of_an_erasure_code_are_there_again_and_in_snapshots() {
    are_there_again_and_in_snapshots("ec", 3);
}

/// A snapshot, as the child of a fork has one, outlives more servers than it could lose at a time.
fn protect_snapshots(made: &str, servers: usize) {
    let (urls, mut running, builder) = pool("heir", made, servers);
    let parent = SwitchBackend::new(builder.open().unwrap()).unwrap();
    write(&mut *parent.open_lane().unwrap(), 1);
    let mut heir =
        builder.clone().degraded().claim_with(&parent.clone_region().unwrap(), &parent.snapshot_contents()).unwrap();
    let mut lane = heir.open_lane().unwrap();
    for server in 0..servers {
        let context = format!("{made}, server {server}");
        running[server] = None;
        // Nobody asks for anything.
        eventually("the death is noticed", || heir.health() == Health::Degraded);
        running[server] = Some(start(&urls[server]));
        eventually("all servers hold everything", || {
            lane.poll(&mut Vec::new());
            heir.health() == Health::Good
        });
        check(&*heir, 1, &context);
        // Snapshots of it know where everything is, too.
        let ticket = heir.clone_region().unwrap();
        heir = builder.clone().degraded().claim_with(&ticket, &parent.snapshot_contents()).unwrap();
        lane = heir.open_lane().unwrap();
        check(&*heir, 1, &context);
    }
}

#[test]
fn snapshots_of_a_mirror_are_protected_again() {
    protect_snapshots("mirror", 2);
}

#[test]
fn snapshots_of_an_erasure_code_are_protected_again() {
    protect_snapshots("ec", 3);
}
