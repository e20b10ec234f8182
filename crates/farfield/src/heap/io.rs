//! A lane and its buffer: reading and writing pages, with an end to every wait.

use crate::error::FarError;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, Completion, Lane, Op, PoolError, Priority, Request};
use std::time::Instant;

/// One thread's way to the pool.
pub(crate) struct Io {
    lane: Box<dyn Lane>,
    /// `None` only while it is under way.
    buffer: Option<Buffer>,
    done: Vec<Completion>,
    /// Of the last operation. An answer to an earlier one comes too late for anybody.
    tag: u64,
    deadline: Duration,
}

/// Most pages read at a time.
const READ_PAGES: u32 = 16;

impl Io {
    /// Near memory of one of these, about: most have met pages only.
    pub(crate) const NEAR_BYTES: u64 = PAGE_BYTES as u64;

    pub(crate) fn new(backend: &dyn Backend, deadline: Duration) -> Result<Io, PoolError> {
        let lane = backend.open_lane()?;
        Ok(Io { lane, buffer: Some(Buffer::new(1)), done: Vec::with_capacity(4), tag: 0, deadline })
    }

    /// Reads `count` pages from `page` on. `each` gets them in order, with their checksums.
    pub(crate) fn read(
        &mut self,
        page: u64,
        count: u32,
        mut each: impl FnMut(u32, &[u8], u64),
    ) -> Result<(), FarError> {
        let mut at = 0;
        while at < count {
            let pages = (count - at).min(READ_PAGES) as usize;
            // A buffer that did not come back in time is the lane's for good.
            let mut buffer = self.buffer.take().unwrap_or_else(|| Buffer::new(pages));
            if buffer.capacity() < pages {
                buffer = Buffer::new(READ_PAGES as usize);
            }
            buffer.set_pages(pages);
            let (buffer, result) = self.one(Op::Read { page: PageId(page + u64::from(at)), buffer });
            if let (Ok(()), Some(buffer)) = (&result, &buffer) {
                for index in 0..pages {
                    each(at + index as u32, buffer.page(index), buffer.sums()[index]);
                }
            }
            self.buffer = buffer;
            result?;
            at += pages as u32;
        }
        // Large values are rare; a large buffer is not kept for them.
        self.buffer = self.buffer.take().filter(|buffer| buffer.capacity() == 1).or_else(|| Some(Buffer::new(1)));
        Ok(())
    }

    fn one(&mut self, op: Op) -> (Option<Buffer>, Result<(), FarError>) {
        let started = Instant::now();
        self.tag += 1;
        let request = Request { tag: self.tag, priority: Priority::Demand, deadline: self.deadline, op };
        if let Err(back) = self.lane.submit(request) {
            let buffer = match back.op {
                Op::Read { buffer, .. } | Op::Write { buffer, .. } => Some(buffer),
                Op::Discard { .. } => None,
            };
            return (buffer, Err(FarError::Stalled { after: Duration::ZERO }));
        }
        // The lane keeps the deadline; this is for a lane that does not.
        while started.elapsed() < self.deadline * 2 {
            self.lane.poll(&mut self.done);
            let tag = self.tag;
            if let Some(completion) = self.done.drain(..).find(|completion| completion.tag == tag) {
                return (completion.buffer, completion.result.map_err(FarError::Pool));
            }
            self.lane.wait(self.deadline);
        }
        (None, Err(FarError::Stalled { after: started.elapsed() }))
    }
}
