//! One function three ways: at the client, built into the server, and shipped to it as WebAssembly: the same answers, and what each took.
//!
//! ```text
//! rustup target add wasm32-unknown-unknown
//! cargo build --profile guest --target wasm32-unknown-unknown -p farfield-guest
//! cargo run --release -p farfield-guest --example shipped -- target/wasm32-unknown-unknown/guest/farfield_guest.wasm
//! ```

use farfield_bench_functions::{List, ListStart, with_workloads};
use farfield_pool::PoolBuilder;
use farfield_sandbox::{Code, with_sandbox};
use farfield_server::{Config, Server};
use farfield_wic::{Caller, Fault, Function, Place, Range, Registry, Totals, Wanted, Where};
use std::ops::Bound::Unbounded;
use std::time::Instant;

const PAGES: u64 = 4096;
const NODES: u64 = PAGES * 4096 / 64;
const CALLS: u64 = 2000;

/// Writes a list whose nodes lie 64 bytes apart, scattered; from one offset on.
struct Write;

impl Function for Write {
    const NAME: &'static str = "example.write";
    const VERSION: u32 = 1;
    type Argument = u64;
    type Answer = ();

    async fn run<P: Place>(place: &P, page: u64) -> Result<(), Fault> {
        let mut bytes = [0; 4096];
        for (index, node) in bytes.as_chunks_mut::<64>().0.iter_mut().enumerate() {
            let number = page * 64 + index as u64;
            node[..8].copy_from_slice(&scattered(number + 1).to_le_bytes());
            node[8..16].copy_from_slice(&number.to_le_bytes());
        }
        place.write(page * 4096, &bytes).await
    }
}

fn scattered(number: u64) -> u64 {
    number.wrapping_mul(40_503) % NODES * 64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("the path of a guest, farfield_guest.wasm, is wanted; see the head of this example")?;
    let code = Code::load(&path)?;
    let functions = with_sandbox(with_workloads(Registry::standard()));
    let server = Server::start(Config { listen: vec!["tcp://127.0.0.1:0".parse()?], functions, ..Config::default() })?;
    let mut caller =
        Caller::new(PoolBuilder::new().url(&server.endpoints()[0]).pages(PAGES).client_name("shipped").open()?);
    caller.calls::<Write>((0..PAGES).collect()).at(Where::Client).run().into_iter().collect::<Result<Vec<_>, _>>()?;

    println!("{code:?}");
    println!("{:<24} {:>12} {:>12} {:>12}", "µs for each call", "client", "native", "shipped");
    for hops in [0, 1, 16, 256] {
        let start = |call: u64| ListStart { node: scattered(call * 31), hops };
        let client = timed(|call| caller.call::<List>(start(call)).at(Where::Client).run().map(|end| end.value))?;
        let native = timed(|call| caller.call::<List>(start(call)).at(Where::Server).run().map(|end| end.value))?;
        let shipped = timed(|call| code.call::<List>(&mut caller, start(call)).run().map(|end| end.value))?;
        assert!(client.1 == native.1 && client.1 == shipped.1, "a function answers the same wherever it runs");
        println!("{:<24} {:>12.1} {:>12.1} {:>12.1}", format!("list, {hops} hops"), client.0, native.0, shipped.0);
    }
    for count in [512, 8192, 65536] {
        let wanted = |call: u64| Wanted::<u64> {
            pieces: vec![Range { offset: call % 8 * 8, count }],
            values: (Unbounded, Unbounded),
        };
        let client =
            timed(|call| caller.call::<Totals<u64>>(wanted(call)).at(Where::Client).run().map(|part| part.sum()))?;
        let native =
            timed(|call| caller.call::<Totals<u64>>(wanted(call)).at(Where::Server).run().map(|part| part.sum()))?;
        let shipped = timed(|call| code.call::<Totals<u64>>(&mut caller, wanted(call)).run().map(|part| part.sum()))?;
        assert!(client.1 == native.1 && client.1 == shipped.1, "a function answers the same wherever it runs");
        println!("{:<24} {:>12.1} {:>12.1} {:>12.1}", format!("sum of {count} words"), client.0, native.0, shipped.0);
    }
    Ok(())
}

/// What calls take, one after the other, and what they answer.
fn timed<A, E>(mut call: impl FnMut(u64) -> Result<A, E>) -> Result<(f64, Vec<A>), E> {
    call(0)?;
    let started = Instant::now();
    let answers = (0..CALLS).map(call).collect::<Result<Vec<_>, E>>()?;
    Ok((started.elapsed().as_secs_f64() * 1e6 / CALLS as f64, answers))
}
