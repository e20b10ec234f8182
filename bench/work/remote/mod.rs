//! Objects of 64 bytes at a server across TCP, asked for at random by one thread that keeps many gets on their way: what an object
//! costs that is not here.
//!
//! The server is a Farfield memory server, Redis, or a loop that does nothing but answer (`--peer`); or the objects are in a
//! `FarFlatMap` of a far heap whose near memory holds few of them. All keep the same number of gets on their way.

mod flat_map;
mod lane;
mod loopback;
mod redis;

use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_since};
use anyhow::{Context, Result, bail, ensure};
use farfield::Heap;

const WORDS: usize = 8;
const OBJECT_BYTES: usize = WORDS * 8;
type Object = [u64; WORDS];

/// Somebody far who keeps objects.
trait Peer {
    /// Stores objects `0..count`.
    fn fill(&mut self, count: u64, seed: u64) -> Result<()>;
    /// Gets what `gets` asks for.
    fn get(&mut self, gets: &mut Gets) -> Result<()>;
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    ensure!((1..=256).contains(&options.in_flight), "--in-flight must be 1 to 256");
    let count = options.data_bytes() / OBJECT_BYTES as u64;
    let heap = options.heap_with(0, options.data_bytes() * 3)?;
    let mut peer = peer(options, heap.as_ref())?;
    let mut outcome = Outcome::new();
    outcome.phase("fill", count, || peer.fill(count, options.seed))?;
    peer.get(&mut Gets::new(options, count, options.ops / 8))?; // What is opened late is open now.
    let before = heap.as_ref().map(Heap::stats);
    let mut gets = Gets::new(options, count, options.ops);
    outcome.phase("get", options.ops, || peer.get(&mut gets))?;
    ensure!(gets.left == 0 && gets.waiting == 0, "the peer left gets without an answer");
    if let (Some(heap), Some(before)) = (&heap, &before) {
        figures_since(&mut outcome, before, &heap.stats(), options.ops, 0);
    }
    outcome.checked(gets.sum, gets.errors);
    Ok(outcome)
}

/// Returns who keeps the objects: a map of the heap, if there is one.
fn peer<'h>(options: &Options, heap: Option<&'h Heap>) -> Result<Box<dyn Peer + 'h>> {
    if let Some(heap) = heap {
        return Ok(Box::new(flat_map::FlatMap::new(heap, options.in_flight)));
    }
    let peer = options.peer.as_deref().context("--peer is missing")?;
    Ok(match peer.split_once(':') {
        Some(("loopback", "")) => Box::new(loopback::Loopback::new(options.in_flight)?),
        Some(("redis", address)) => Box::new(redis::Redis::connect(address, options.in_flight)?),
        Some(("tcp", _)) => Box::new(lane::LanePeer::open(peer, options)?),
        _ => bail!("--peer must be loopback:, redis:HOST:PORT or tcp://HOST:PORT, not {peer}"),
    })
}

fn object(number: u64, seed: u64) -> Object {
    let mut object = [number; WORDS];
    object[WORDS - 1] = mix(number ^ seed);
    object
}

fn bytes_of(object: &Object) -> [u8; OBJECT_BYTES] {
    let mut bytes = [0; OBJECT_BYTES];
    for (part, word) in bytes.chunks_exact_mut(8).zip(object) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// What is still to be asked for, and what came.
struct Gets {
    random: Random,
    count: u64,
    left: u64,
    /// Asked for and not here.
    waiting: u64,
    sum: u64,
    errors: u64,
}

impl Gets {
    fn new(options: &Options, count: u64, ops: u64) -> Gets {
        Gets { random: Random::new(options.seed), count, left: ops, waiting: 0, sum: 0, errors: 0 }
    }

    /// The number of an object to ask for; `None` when all have been.
    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        self.waiting += 1;
        Some(self.random.below(self.count))
    }

    /// The answer to `next`'s `number`.
    fn arrived(&mut self, number: u64, bytes: &[u8]) {
        self.waiting -= 1;
        let word = |at: usize| bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map(u64::from_le_bytes);
        self.errors += u64::from(word(0) != Some(number));
        self.sum = self.sum.wrapping_add(word(OBJECT_BYTES - 8).unwrap_or(0));
    }
}
