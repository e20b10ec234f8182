//! Pages in a pool, read or written in random order through one lane that keeps many operations on their way: what a place of far memory
//! gives, with nothing above it.

use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Context, Result, anyhow, ensure};
use farfield_core::PageId;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PoolBuilder, Priority};
use std::sync::Arc;
use std::time::Duration;

const PAGE_BYTES: u64 = 4096;
const WORD_BYTES: usize = 8;
const DEADLINE: Duration = Duration::from_secs(10);
/// Pages of one operation at most, and of each while the pool is filled.
const RUN_MAX: u64 = 64;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    ensure!((1..=256).contains(&options.in_flight), "--in-flight must be 1 to 256");
    let run = options.object_bytes / PAGE_BYTES;
    let is_whole = options.object_bytes.is_multiple_of(PAGE_BYTES) && (1..=RUN_MAX).contains(&run);
    ensure!(is_whole, "--object-bytes must be 1 to {RUN_MAX} pages of {PAGE_BYTES}");
    let url = options.peer.as_deref().context("--peer is missing")?;
    let pages = options.data_bytes() / PAGE_BYTES;
    let backend = PoolBuilder::new().url(url).client_name("farfield-work").pages(pages).open()?;
    let mut place = Place {
        lane: backend.open_lane()?,
        _backend: backend,
        done: Vec::with_capacity(options.in_flight as usize),
        seed: options.seed,
    };
    let mut outcome = Outcome::new();
    outcome.phase("fill", pages, || place.fill(pages))?;
    let (mut sum, mut errors) = (0, 0);
    let buffers: Vec<Buffer> = (0..options.in_flight).map(|_| Buffer::new(run as usize)).collect();
    let mut random = Random::new(options.seed);
    // Whole runs, as others address a disk by blocks.
    let places = std::iter::repeat_with(|| random.below(pages / run) * run);
    let ops: Vec<(u64, bool)> = places.zip(0..options.ops).map(|(page, op)| (page, is_write(options, op))).collect();
    outcome.phase("move", options.ops, || place.pass(&ops, buffers, &mut sum, &mut errors))?;
    outcome.checked(sum, errors);
    Ok(outcome)
}

/// So many percent are writes, evenly.
fn is_write(options: &Options, op: u64) -> bool {
    op * options.write_percent / 100 != (op + 1) * options.write_percent / 100
}

struct Place {
    lane: Box<dyn Lane>,
    /// Lives as long as its lane.
    _backend: Arc<dyn Backend>,
    done: Vec<Completion>,
    seed: u64,
}

impl Place {
    /// A page begins with its number and ends with what follows from it; between them is noise, written once for each buffer.
    fn mark(&self, first: u64, buffer: &mut Buffer) {
        for (page, bytes) in (first..).zip(buffer.bytes_mut().chunks_exact_mut(PAGE_BYTES as usize)) {
            bytes[..WORD_BYTES].copy_from_slice(&page.to_le_bytes());
            bytes[PAGE_BYTES as usize - WORD_BYTES..].copy_from_slice(&mix(page ^ self.seed).to_le_bytes());
        }
        buffer.seal();
    }

    fn submit(&mut self, tag: u64, op: Op) -> Result<()> {
        let request = LaneRequest { tag, priority: Priority::Demand, deadline: DEADLINE, op };
        self.lane.submit(request).map_err(|_| anyhow!("the lane is full"))
    }

    /// Something has ended then.
    fn wait(&mut self) {
        while self.lane.poll(&mut self.done) == 0 {
            self.lane.wait(DEADLINE);
        }
    }

    fn fill(&mut self, pages: u64) -> Result<()> {
        let mut noise = Random::new(self.seed ^ 1);
        for first in (0..pages).step_by(RUN_MAX as usize) {
            let mut buffer = Buffer::new(RUN_MAX.min(pages - first) as usize);
            for word in buffer.bytes_mut().chunks_exact_mut(WORD_BYTES) {
                word.copy_from_slice(&noise.next().to_le_bytes());
            }
            self.mark(first, &mut buffer);
            self.submit(first, Op::Write { page: PageId(first), buffer })?;
            self.wait();
            self.done.drain(..).try_for_each(|completion| completion.result)?;
        }
        Ok(())
    }

    /// Reads or writes at these places, as many at a time as there are buffers.
    fn pass(&mut self, ops: &[(u64, bool)], buffers: Vec<Buffer>, sum: &mut u64, errors: &mut u64) -> Result<()> {
        let (mut free, count) = (buffers, ops.len());
        let (mut next, mut ended) = (0, 0);
        while ended < count {
            while next < count
                && let Some(mut buffer) = free.pop()
            {
                let (first, is_write) = ops[next];
                if is_write {
                    self.mark(first, &mut buffer);
                }
                let page = PageId(first);
                let op = if is_write { Op::Write { page, buffer } } else { Op::Read { page, buffer } };
                self.submit(next as u64, op)?;
                next += 1;
            }
            self.wait();
            for completion in self.done.drain(..) {
                completion.result?;
                let buffer = completion.buffer.context("a buffer comes back")?;
                let (first, is_write) = ops[completion.tag as usize];
                for (at, page) in (first..first + buffer.pages() as u64).enumerate() {
                    if is_write {
                        break;
                    }
                    let bytes = buffer.page(at);
                    let word = |from: usize| bytes[from..from + WORD_BYTES].try_into().map_or(0, u64::from_le_bytes);
                    *errors += u64::from(word(0) != page);
                    *sum = sum.wrapping_add(word(PAGE_BYTES as usize - WORD_BYTES));
                }
                free.push(buffer);
                ended += 1;
            }
        }
        Ok(())
    }
}
