//! The members of the pool that talk to a server are backends: over TCP, in shared memory, and striped over several.

use farfield_pool::{PoolBuilder, conformance};
use farfield_server::{Config, Server};

fn serve(listen: &str) -> Server {
    let config = Config { listen: vec![listen.parse().unwrap()], ..Config::default() };
    Server::start(config).unwrap()
}

#[test]
fn tcp_is_a_backend() {
    let server = serve("tcp://127.0.0.1:0");
    conformance::run(&PoolBuilder::new().url(&server.endpoints()[0]));
}

#[test]
fn shared_memory_is_a_backend() {
    let server = serve(&format!("unix:@farfield-conformance-{}", std::process::id()));
    conformance::run(&PoolBuilder::new().url(&server.endpoints()[0]));
}

#[test]
fn tcp_reports_the_death_of_its_server() {
    let server = serve("tcp://127.0.0.1:0");
    let builder = PoolBuilder::new().url(&server.endpoints()[0]);
    conformance::death(&builder, || drop(server));
}

#[test]
fn shared_memory_reports_the_death_of_its_server() {
    let server = serve(&format!("unix:@farfield-death-{}", std::process::id()));
    let builder = PoolBuilder::new().url(&server.endpoints()[0]);
    conformance::death(&builder, || drop(server));
}

#[test]
fn a_stripe_over_two_servers_is_a_backend() {
    let servers = [serve("tcp://127.0.0.1:0"), serve(&format!("unix:@farfield-stripe-{}", std::process::id()))];
    conformance::run(&PoolBuilder::new().urls(servers.iter().map(|server| server.endpoints()[0].clone())));
}
