//! `plain`: what it costs that a walk is a function that runs anywhere. The ring lies in the memory of this program, without pages and checksums,
//! and both read it by the same calls of a `dyn Memory`, are given arguments as bytes and answer with bytes:
//!
//! - `--peer loop:` decodes the argument of each walk, walks in a loop, and encodes the answer;
//! - `--peer function:` has the functions of a server do so: `bench.list` is found by its name and runs in the server's place, `--in-flight` calls a row.
//!   A call alone runs to completion; those of a row announce what they read next and take turns.

use super::{NODE_BYTES, Ring};
use crate::random::Random;
use crate::{Options, Outcome};
use anyhow::{Context, Result, anyhow, bail, ensure};
use farfield_bench_functions::{List, ListEnd, ListStart, with_workloads};
use farfield_os::memory::load_ahead;
use farfield_os::process;
use farfield_wic::{Budget, Fault, Function, Memory, Registry, Stop, Task};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes of a region, and nothing else.
struct Plain(Vec<u8>);

impl Memory for Plain {
    fn region_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        let bytes = self.0.get(offset as usize..).and_then(|bytes| bytes.get(..into.len()));
        into.copy_from_slice(bytes.ok_or(Fault::OutOfRange { offset })?);
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), Fault> {
        Err(Fault::Internal) // Nobody does.
    }

    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
        work()
    }

    fn clock(&self) -> u64 {
        process::now_ns()
    }

    fn announce(&self, ranges: &mut dyn Iterator<Item = (u64, usize)>) {
        for (offset, _) in ranges {
            load_ahead(self.0.as_ptr().wrapping_add(offset as usize));
        }
    }
}

/// Who walks, given arguments as bytes: says the bytes of each answer, by its number in the row.
trait Bytes {
    fn walk(&mut self, memory: &dyn Memory, row: &[Task<'_>], ended: &mut dyn FnMut(usize, &[u8])) -> Result<()>;
}

/// A loop.
struct Loop;

impl Bytes for Loop {
    fn walk(&mut self, memory: &dyn Memory, row: &[Task<'_>], ended: &mut dyn FnMut(usize, &[u8])) -> Result<()> {
        let mut answer = [0; 64];
        for (index, task) in row.iter().enumerate() {
            let (start, rest) = postcard::take_from_bytes::<ListStart>(task.argument)?;
            ensure!(rest.is_empty(), "an argument has bytes left");
            ended(index, postcard::to_slice(&follow(memory, start)?, &mut answer)?);
        }
        Ok(())
    }
}

fn follow(memory: &dyn Memory, start: ListStart) -> Result<ListEnd, Fault> {
    let (mut node, mut hops) = (start.node, 0);
    loop {
        let mut words = [0; List::NODE_BYTES];
        if node.checked_add(List::NODE_BYTES as u64).is_none_or(|end| end > memory.region_bytes()) {
            return Err(Fault::OutOfRange { offset: node });
        }
        memory.read(node, &mut words)?;
        let ([next, value], _) = words.as_chunks::<8>() else { unreachable!("a node is two words") };
        let (next, value) = (u64::from_le_bytes(*next), u64::from_le_bytes(*value));
        if hops == start.hops || next == List::END {
            return Ok(ListEnd { node, value, hops });
        }
        (node, hops) = (next, hops + 1);
    }
}

impl Bytes for Registry {
    fn walk(&mut self, memory: &dyn Memory, row: &[Task<'_>], ended: &mut dyn FnMut(usize, &[u8])) -> Result<()> {
        let mut stopped = None;
        self.run(List::NAME, List::VERSION, memory, row, &mut |index, answer: Result<&[u8], Stop>, _| match answer {
            Ok(answer) => ended(index, answer),
            Err(stop) => stopped = Some(stop),
        })
        .map_err(|unknown| anyhow!("no such function: {unknown:?}"))?;
        stopped.map_or(Ok(()), |stop| bail!("a walk was stopped: {stop:?}"))
    }
}

/// An argument, encoded.
struct Argument {
    bytes: [u8; 23],
    len: u8,
}

impl Argument {
    fn new(start: ListStart) -> Result<Argument> {
        let mut bytes = [0; 23];
        let len = postcard::to_slice(&start, &mut bytes)?.len() as u8;
        Ok(Argument { bytes, len })
    }

    fn task(&self, budget: Budget) -> Task<'_> {
        Task { argument: &self.bytes[..usize::from(self.len)], budget }
    }
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    ensure!((1..=256).contains(&options.in_flight), "--in-flight must be 1 to 256");
    let ring = Ring::of(options)?;
    let mut walker: Box<dyn Bytes> = match options.peer.as_deref().context("--peer is missing")? {
        "loop:" => Box::new(Loop),
        "function:" => Box::new(with_workloads(Registry::standard())),
        peer => bail!("--peer must be loop: or function:, not {peer}"),
    };
    let mut outcome = Outcome::new();
    let memory = outcome.phase("fill", ring.nodes, || {
        let mut bytes = vec![0; (ring.nodes * NODE_BYTES) as usize];
        for (node, (next, value)) in bytes.as_chunks_mut::<{ NODE_BYTES as usize }>().0.iter_mut().zip(ring.written()) {
            node[..8].copy_from_slice(&next.to_le_bytes());
            node[8..16].copy_from_slice(&value.to_le_bytes());
        }
        Plain(bytes)
    });
    let mut random = Random::new(options.seed);
    let firsts: Vec<u64> = (0..options.ops).map(|_| random.below(ring.nodes)).collect();
    let arguments = firsts.iter().map(|first| Argument::new(ring.start(*first, options.nodes)));
    let arguments: Vec<Argument> = arguments.collect::<Result<_>>()?;
    let until = Instant::now().checked_add(Duration::from_secs(3600));
    let budget = Budget { steps_max: 1 << 20, until };
    let mut values = vec![0; firsts.len()];
    let mut pass = |arguments: &[Argument]| -> Result<()> {
        let mut row = Vec::with_capacity(options.in_flight as usize);
        for (arguments, values) in
            arguments.chunks(options.in_flight as usize).zip(values.chunks_mut(options.in_flight as usize))
        {
            row.clear();
            row.extend(arguments.iter().map(|argument| argument.task(budget)));
            // Nobody knows at compile time whose memory it is.
            walker.walk(black_box(&memory), &row, &mut |index, answer| {
                values[index] = postcard::from_bytes(answer).map_or(0, |end: ListEnd| end.value);
            })?;
        }
        Ok(())
    };
    pass(&arguments[..arguments.len() / 8])?;
    outcome.phase("walk", options.ops, || pass(&arguments))?;
    let errors = ring.wrong(&firsts, options.nodes, &values)?;
    outcome.checked(values.iter().fold(0, |sum: u64, value| sum.wrapping_add(*value)), errors);
    Ok(outcome)
}
