//! A Farfield memory server, asked through one lane of the pool: what a far heap's misses of small values are made of.

use super::{Gets, OBJECT_BYTES, Peer, bytes_of, object};
use crate::Options;
use anyhow::{Context, Result, anyhow};
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PagePart, PoolBuilder, Priority};
use std::sync::Arc;
use std::time::Duration;

const PAGE_BYTES: usize = 4096;
const PER_PAGE: u64 = (PAGE_BYTES / OBJECT_BYTES) as u64;
const DEADLINE: Duration = Duration::from_secs(10);
/// Pages stored at a time.
const FILL_PAGES: usize = 64;

pub(super) struct LanePeer {
    /// Lives as long as its lane.
    _backend: Arc<dyn Backend>,
    lane: Box<dyn Lane>,
    buffers: Vec<Buffer>,
    done: Vec<Completion>,
}

impl LanePeer {
    pub(super) fn open(url: &str, options: &Options) -> Result<LanePeer> {
        let pages = options.data_bytes() / PAGE_BYTES as u64;
        let backend = PoolBuilder::new().url(url).client_name("farfield-work").pages(pages).open()?;
        let lane = backend.open_lane()?;
        let buffers = (0..options.in_flight).map(|_| Buffer::new(1)).collect();
        Ok(LanePeer { _backend: backend, lane, buffers, done: Vec::with_capacity(options.in_flight as usize) })
    }

    fn submit(&mut self, tag: u64, op: Op) -> Result<()> {
        let request = LaneRequest { tag, priority: Priority::Demand, deadline: DEADLINE, op };
        self.lane.submit(request).map_err(|_| anyhow!("the lane is full"))
    }
}

impl Peer for LanePeer {
    fn fill(&mut self, count: u64, seed: u64) -> Result<()> {
        let pages = count / PER_PAGE;
        for first in (0..pages).step_by(FILL_PAGES) {
            let mut buffer = Buffer::new(FILL_PAGES.min((pages - first) as usize));
            for (number, bytes) in (first * PER_PAGE..).zip(buffer.bytes_mut().chunks_exact_mut(OBJECT_BYTES)) {
                bytes.copy_from_slice(&bytes_of(&object(number, seed)));
            }
            buffer.seal();
            self.submit(first, Op::Write { page: farfield_core::PageId(first), buffer })?;
            while self.lane.poll(&mut self.done) == 0 {
                self.lane.wait(DEADLINE);
            }
            self.done.drain(..).try_for_each(|completion| completion.result)?;
        }
        Ok(())
    }

    fn get(&mut self, gets: &mut Gets) -> Result<()> {
        loop {
            while let Some(buffer) = self.buffers.pop() {
                let Some(number) = gets.next() else {
                    self.buffers.push(buffer);
                    break;
                };
                let part = PagePart::new((number % PER_PAGE) as usize * OBJECT_BYTES, OBJECT_BYTES);
                let part = part.context("an object lies inside its page")?;
                self.submit(number, Op::ReadPart { page: farfield_core::PageId(number / PER_PAGE), part, buffer })?;
            }
            if gets.waiting == 0 {
                return Ok(());
            }
            if self.lane.poll(&mut self.done) == 0 {
                self.lane.wait(DEADLINE);
            }
            for completion in self.done.drain(..) {
                completion.result?;
                let buffer = completion.buffer.context("the buffer of a read comes back")?;
                let start = (completion.tag % PER_PAGE) as usize * OBJECT_BYTES;
                gets.arrived(completion.tag, &buffer.page(0)[start..start + OBJECT_BYTES]);
                self.buffers.push(buffer);
            }
        }
    }
}
