//! Walks of a linked list whose nodes are at a server, from random nodes on: what it costs to follow pointers in far memory.
//!
//! The walk is the function `bench.list`, at the client or at the server (`--peer client:URL`, `server:URL`, `auto:URL`; `unbatched:URL`: at the client,
//! each access sent by itself; `shipped:URL`: as WebAssembly in a sandbox there), or what a
//! remote procedure call would be: a handler that walks a list of its own and does nothing else (`loopback:`), or gRPC (`grpc:`).

#[cfg(feature = "grpc")]
mod grpc;
mod handler;
mod plain;
mod shift;
mod unbatched;

pub(crate) use plain::run as run_plain;
pub(crate) use shift::run as run_shift;

use crate::latency::Load;
use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Context, Result, anyhow, bail, ensure};
use farfield_bench_functions::{List, ListStart};
use farfield_core::PageId;
use farfield_pool::{Backend, Buffer, LaneRequest, Op, PoolBuilder, Priority};
use farfield_sandbox::Code;
use farfield_wic::{Caller, Summary, Where};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use unbatched::Unbatched;

/// Of which the first two words are used: nodes do not share a cache line.
const NODE_BYTES: u64 = 64;
const PAGE_BYTES: u64 = 4096;
const DEADLINE: Duration = Duration::from_secs(30);
/// Pages stored at a time.
const FILL_PAGES: u64 = 64;

/// A ring of nodes, each far from the next.
#[derive(Clone, Copy)]
struct Ring {
    nodes: u64,
    seed: u64,
}

impl Ring {
    fn of(options: &Options) -> Result<Ring> {
        let ring = Ring { nodes: options.data_bytes() / NODE_BYTES, seed: options.seed };
        ensure!(ring.nodes.is_power_of_two(), "--data-mib must be a power of two");
        ensure!((1..=10_000).contains(&options.nodes), "--nodes must be 1 to 10000");
        Ok(ring)
    }

    /// Where the node is that comes as number `number`. Odd factors reach every place of a power of two once.
    fn place(self, number: u64) -> u64 {
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % self.nodes
    }

    fn value(self, number: u64) -> u64 {
        mix((number % self.nodes) ^ self.seed)
    }

    /// Next node and value, in the order of the places.
    fn written(self) -> Vec<(u64, u64)> {
        let mut written = vec![(0, 0); self.nodes as usize];
        for number in 0..self.nodes {
            written[self.place(number) as usize] = (self.place(number + 1) * NODE_BYTES, self.value(number));
        }
        written
    }

    /// The walk of so many nodes from the one on that comes as this number.
    fn start(self, first: u64, nodes: u64) -> ListStart {
        ListStart { node: self.place(first) * NODE_BYTES, hops: (nodes - 1) as u32 }
    }

    /// How many of the walks from these on did not end at these values.
    fn wrong(self, firsts: &[u64], nodes: u64, values: &[u64]) -> Result<u64> {
        ensure!(values.len() == firsts.len(), "the peer left walks without an answer");
        let pairs = firsts.iter().zip(values);
        Ok(pairs.filter(|(first, value)| self.value(**first + nodes - 1) != **value).count() as u64)
    }

    /// What there is to say of all words in its region.
    fn words(self) -> Summary {
        let words = || self.written().into_iter().flat_map(|(next, value)| [next, value]);
        let sum = words().map(u128::from).sum();
        // Those of a node that are not used are zeros.
        Summary { count: self.nodes * NODE_BYTES / 8, sum, min: 0, max: words().max().unwrap_or(0) }
    }
}

/// Somebody who walks.
trait Walker {
    fn fill(&mut self, ring: Ring) -> Result<()>;
    /// The values where these walks end: as many side by side as there are.
    fn walk(&mut self, starts: &[ListStart], values: &mut Vec<u64>) -> Result<()>;
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    ensure!((1..=256).contains(&options.in_flight), "--in-flight must be 1 to 256");
    let ring = Ring::of(options)?;
    let peer = options.peer.as_deref().context("--peer is missing")?;
    let mut walker: Box<dyn Walker> = match peer.split_once(':') {
        Some(("loopback", "")) => Box::new(handler::Handler::new()?),
        #[cfg(feature = "grpc")]
        Some(("grpc", "")) => Box::new(grpc::Grpc::default()),
        Some(("client", url)) => Box::new(Called::new(open(url, options)?, Where::Client, None)),
        Some(("unbatched", url)) => {
            Box::new(Called::new(Arc::new(Unbatched(open(url, options)?)), Where::Client, None))
        }
        Some(("server", url)) => Box::new(Called::new(open(url, options)?, Where::Server, None)),
        Some(("auto", url)) => Box::new(Called::new(open(url, options)?, Where::Auto, None)),
        Some(("shipped", url)) => {
            let path = std::env::var_os("FARFIELD_GUEST").context("set FARFIELD_GUEST to farfield_guest.wasm")?;
            Box::new(Called::new(open(url, options)?, Where::Server, Some(Code::load(path)?)))
        }
        _ => bail!(
            "--peer must be loopback:, grpc:, client:URL, unbatched:URL, server:URL, auto:URL or shipped:URL, not {peer}"
        ),
    };
    let mut outcome = Outcome::new();
    outcome.phase("fill", ring.nodes, || walker.fill(ring))?;
    let mut random = Random::new(options.seed);
    let firsts: Vec<u64> = (0..options.ops).map(|_| random.below(ring.nodes)).collect();
    let starts: Vec<_> = firsts.iter().map(|first| ring.start(*first, options.nodes)).collect();
    let mut values = Vec::with_capacity(starts.len());
    let early = options.ops / 8; // What is opened late is open then.
    let mut walk = |walks: Range<u64>, values: &mut Vec<u64>| {
        walker.walk(&starts[walks.start as usize..walks.end as usize], values)
    };
    if options.rate_per_s > 0 {
        let load = Load::of(options);
        load.with_ops(early).serve(|walks| walk(walks, &mut values))?;
        values.clear();
        load.timed(&mut outcome, "walk", |walks| walk(walks, &mut values))?;
    } else {
        let mut pass = |ops: u64, values: &mut Vec<u64>| {
            let mut rows = (0..ops).step_by(options.in_flight as usize);
            rows.try_for_each(|first| walk(first..ops.min(first + options.in_flight), values))
        };
        pass(early, &mut values)?;
        values.clear();
        outcome.phase("walk", options.ops, || pass(options.ops, &mut values))?;
    }
    let wrong = ring.wrong(&firsts, options.nodes, &values)?;
    let sum = values.iter().fold(0u64, |sum, value| sum.wrapping_add(*value));
    outcome.checked(sum, wrong);
    Ok(outcome)
}

/// The function, called.
struct Called {
    backend: Arc<dyn Backend>,
    caller: Caller,
    place: Where,
    /// What is shipped, if the server does not have the function.
    code: Option<Code>,
}

/// A region for the ring.
fn open(url: &str, options: &Options) -> Result<Arc<dyn Backend>> {
    let pages = options.data_bytes() / PAGE_BYTES;
    Ok(PoolBuilder::new().url(url).client_name("farfield-work").pages(pages).open()?)
}

impl Called {
    fn new(backend: Arc<dyn Backend>, place: Where, code: Option<Code>) -> Called {
        Called { caller: Caller::new(backend.clone()), backend, place, code }
    }
}

impl Walker for Called {
    fn fill(&mut self, ring: Ring) -> Result<()> {
        let mut lane = self.backend.open_lane()?;
        let mut done = Vec::with_capacity(1);
        for (index, nodes) in ring.written().chunks((FILL_PAGES * PAGE_BYTES / NODE_BYTES) as usize).enumerate() {
            let mut buffer = Buffer::new(nodes.len() * NODE_BYTES as usize / PAGE_BYTES as usize);
            for (bytes, (next, value)) in buffer.bytes_mut().chunks_exact_mut(NODE_BYTES as usize).zip(nodes) {
                bytes[..8].copy_from_slice(&next.to_le_bytes());
                bytes[8..16].copy_from_slice(&value.to_le_bytes());
            }
            buffer.seal();
            let op = Op::Write { page: PageId(index as u64 * FILL_PAGES), buffer };
            let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: DEADLINE, op };
            lane.submit(request).map_err(|_| anyhow!("the lane is full"))?;
            while lane.poll(&mut done) == 0 {
                lane.wait(DEADLINE);
            }
            done.drain(..).try_for_each(|completion| completion.result)?;
        }
        Ok(())
    }

    fn walk(&mut self, starts: &[ListStart], values: &mut Vec<u64>) -> Result<()> {
        if let Some(code) = &self.code {
            for end in code.calls::<List>(&mut self.caller, starts.to_vec()).within(DEADLINE).run() {
                values.push(end?.value);
            }
            return Ok(());
        }
        for end in self.caller.calls::<List>(starts.to_vec()).at(self.place).within(DEADLINE).run() {
            values.push(end?.value);
        }
        Ok(())
    }
}
