//! A memory server in the process of a test, with the functions of the test, and heaps at it.

use crate::PATIENCE;
use farfield::{Heap, Plane};
use farfield_server::{Config, Server};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Starts a server of this process. Returns it, and where it is found: across TCP, a socket, and shared memory.
pub fn serve_here(config: Config) -> (Server, [String; 3]) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("farfield-test-{}-{}.sock", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let unix = format!("unix:{}", std::env::temp_dir().join(name).display());
    let listen = vec!["tcp://127.0.0.1:0".parse().expect("an address"), unix.parse().expect("an address")];
    let server = Server::start(Config { listen, ..config }).expect("both are free");
    let urls = [server.endpoints()[0].clone(), unix.clone(), unix.replacen("unix:", "shm:", 1)];
    (server, urls)
}

/// Makes a heap with so much near memory, and no more later.
pub fn heap_at(url: &str, plane: Plane, near: u64) -> Heap {
    let builder = Heap::builder().near(near).near_max(near).far(1 << 30).plane(plane);
    builder.pool(url).patience(PATIENCE).build().expect("the server accepts")
}
