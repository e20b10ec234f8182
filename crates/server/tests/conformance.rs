//! The members of the pool that talk to a server are backends: over TCP, and over shared memory.

use farfield_pool::{Opener, conformance};
use farfield_server::{Config, Server};

fn serve(listen: &str) -> Server {
    let config = Config { listen: vec![listen.parse().unwrap()], ..Config::default() };
    Server::start(config).unwrap()
}

#[test]
fn tcp_is_a_backend() {
    let server = serve("tcp://127.0.0.1:0");
    conformance::run(&Opener::new().url(&server.endpoints()[0]));
}

#[test]
fn shared_memory_is_a_backend() {
    let server = serve(&format!("unix:@farfield-conformance-{}", std::process::id()));
    conformance::run(&Opener::new().url(&server.endpoints()[0]));
}
