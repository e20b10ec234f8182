//! Collected heaps whose objects memory servers move. The servers are in this process, so that they can have any functions.
//!
//! Graphs and counters are those of the tests of `farfield-gc`, which know no server.

mod at_servers;
#[allow(unused, reason = "the tests of the crate use the rest")]
#[path = "../../../crates/gc/tests/gc/common.rs"]
mod common;
#[path = "../../../crates/gc/tests/gc/counters.rs"]
mod counters;
#[path = "../../../crates/gc/tests/gc/graph.rs"]
mod graph;
mod held;
mod several_servers;
mod switches;

use farfield_server::{Config, Server};
use farfield_wic::Registry;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A memory server with these functions.
fn serve(functions: Registry) -> Server {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let socket = format!("unix:@farfield-gc-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let listen = vec!["tcp://127.0.0.1:0".parse().unwrap(), socket.parse().unwrap()];
    Server::start(Config { listen, functions, ..Config::default() }).unwrap()
}

/// The ways to a server: its socket across TCP, and its memory.
fn ways(server: &Server) -> [String; 2] {
    let [tcp, unix] = server.endpoints() else { panic!("it listens at two") };
    [tcp.clone(), unix.replacen("unix:", "shm:", 1)]
}
