//! Pages in a pool, read or written in random order through one lane that keeps many operations on their way: what a place of far memory
//! gives, with nothing above it.

use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Context, Result, anyhow, ensure};
use farfield_core::PageId;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PoolBuilder, Priority};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const PAGE_BYTES: u64 = 4096;
const WORD_BYTES: usize = 8;
const DEADLINE: Duration = Duration::from_secs(10);
/// Pages of one operation at most, and of each while the pool is filled.
const RUN_MAX: u64 = 64;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    ensure!((1..=256).contains(&options.in_flight), "--in-flight must be 1 to 256");
    let contents = Contents { seed: options.seed, is_compressible: options.compressible == 1 };
    if let Some(path) = &options.dump {
        return dump(path, options, contents);
    }
    let run = options.object_bytes / PAGE_BYTES;
    let is_whole = options.object_bytes.is_multiple_of(PAGE_BYTES) && (1..=RUN_MAX).contains(&run);
    ensure!(is_whole, "--object-bytes must be 1 to {RUN_MAX} pages of {PAGE_BYTES}");
    let url = options.peer.as_deref().context("--peer is missing")?;
    let pages = options.data_bytes() / PAGE_BYTES;
    let backend = PoolBuilder::new().url(url).client_name("farfield-work").pages(pages).open()?;
    let mut place = Place {
        lane: backend.open_lane()?,
        _backend: backend.clone(),
        done: Vec::with_capacity(options.in_flight as usize),
        contents,
    };
    let mut outcome = Outcome::new();
    outcome.phase("fill", pages, || place.fill(pages))?;
    if let Some(share) = stored_share(&backend.how()) {
        outcome.figure("stored_bytes_per_page", share * PAGE_BYTES as f64);
    }
    let (mut sum, mut errors) = (0, 0);
    let mut noise = Random::new(options.seed ^ 2);
    let buffers: Vec<Buffer> = (0..options.in_flight)
        .map(|index| {
            let mut buffer = Buffer::new(run as usize);
            contents.fill(index * run, &mut noise, buffer.bytes_mut());
            buffer
        })
        .collect();
    let mut random = Random::new(options.seed);
    // Whole runs, as others address a disk by blocks.
    let places = std::iter::repeat_with(|| random.below(pages / run) * run);
    let ops: Vec<(u64, bool)> = places.zip(0..options.ops).map(|(page, op)| (page, is_write(options, op))).collect();
    outcome.phase("move", options.ops, || place.pass(&ops, buffers, &mut sum, &mut errors))?;
    outcome.checked(sum, errors);
    Ok(outcome)
}

/// Returns the part of their bytes that `lz:` takes for its pages, by what it says of itself.
fn stored_share(how: &str) -> Option<f64> {
    let (pages, held) = how.strip_suffix(" MiB")?.split_once(" MiB of pages in ")?;
    let (pages, held): (f64, f64) = (pages.parse().ok()?, held.parse().ok()?);
    (pages > 0.0).then(|| held / pages)
}

/// Writes all pages to a file or a block device, so that another can keep the same ones.
fn dump(path: &Path, options: &Options, contents: Contents) -> Result<Outcome> {
    let pages = options.data_bytes() / PAGE_BYTES;
    let mut noise = Random::new(options.seed ^ 1);
    let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    let mut bytes = vec![0; (RUN_MAX * PAGE_BYTES) as usize];
    let mut outcome = Outcome::new();
    outcome.phase("move", pages, || -> Result<()> {
        for first in (0..pages).step_by(RUN_MAX as usize) {
            let run = &mut bytes[..(RUN_MAX.min(pages - first) * PAGE_BYTES) as usize];
            contents.fill(first, &mut noise, run);
            contents.mark(first, run);
            file.write_all(run)?;
        }
        file.sync_all().context("cannot write all pages")
    })?;
    outcome.checked(0, 0);
    Ok(outcome)
}

/// What pages contain.
#[derive(Clone, Copy)]
struct Contents {
    seed: u64,
    is_compressible: bool,
}

impl Contents {
    /// Fills pages with noise; if they are to pack, with a word of it in four.
    fn fill(self, first: u64, noise: &mut Random, bytes: &mut [u8]) {
        for (page, bytes) in (first..).zip(bytes.chunks_exact_mut(PAGE_BYTES as usize)) {
            for (index, word) in bytes.chunks_exact_mut(WORD_BYTES).enumerate() {
                let is_noise = !self.is_compressible || index.is_multiple_of(4);
                let value = if is_noise { noise.next() } else { page & 0xff };
                word.copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    /// Marks pages: each begins with its number and ends with what follows from it.
    fn mark(self, first: u64, bytes: &mut [u8]) {
        for (page, bytes) in (first..).zip(bytes.chunks_exact_mut(PAGE_BYTES as usize)) {
            bytes[..WORD_BYTES].copy_from_slice(&page.to_le_bytes());
            bytes[PAGE_BYTES as usize - WORD_BYTES..].copy_from_slice(&mix(page ^ self.seed).to_le_bytes());
        }
    }
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
    contents: Contents,
}

impl Place {
    /// Marks the pages of a buffer, whose other contents were written once.
    fn mark(&self, first: u64, buffer: &mut Buffer) {
        self.contents.mark(first, buffer.bytes_mut());
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
        let mut noise = Random::new(self.contents.seed ^ 1);
        for first in (0..pages).step_by(RUN_MAX as usize) {
            let mut buffer = Buffer::new(RUN_MAX.min(pages - first) as usize);
            self.contents.fill(first, &mut noise, buffer.bytes_mut());
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

#[cfg(test)]
mod tests {
    //! Guards against a comparison of pages that do not pack with such that do.
    use super::*;

    #[test]
    fn one_word_in_four_is_noise_where_pages_pack() {
        let check = |is_compressible, words: usize| {
            let contents = Contents { seed: 7, is_compressible };
            let mut bytes = vec![0; 2 * PAGE_BYTES as usize];
            contents.fill(5, &mut Random::new(3), &mut bytes);
            let second = bytes[PAGE_BYTES as usize..].chunks_exact(WORD_BYTES);
            assert_eq!(second.filter(|word| **word != 6u64.to_le_bytes()).count(), words);
        };
        check(false, 512);
        check(true, 128);
    }

    #[test]
    fn what_lz_says_of_itself_is_understood() {
        assert_eq!(stored_share("64.0 MiB of pages in 16.0 MiB"), Some(0.25));
        assert_eq!(stored_share("0.0 MiB of pages in 0.0 MiB"), None);
        assert_eq!(stored_share(""), None);
    }
}
