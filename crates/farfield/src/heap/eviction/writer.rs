//! The evictor's lane, and requests on their way there: writes of pages that leave, discards, and
//! reads.

use super::HeapInner;
use super::TransferUnit;
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::FrameId;
use farfield_os::process::now_ns;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use std::time::Instant;

pub(super) struct EvictionWriter {
    lane: Option<Box<dyn Lane>>,
    /// Free buffers of one page each.
    buffers: Vec<Buffer>,
    done: Vec<Completion>,
    /// Requests that were begun since all had ended last; tags in the lane are indices here.
    under_way: Vec<EvictionRequest>,
    /// Maximum number of pages under way.
    batch: usize,
}

/// A unit whose copy is written, or pages that are discarded.
pub(super) struct EvictionRequest {
    pub(super) unit: TransferUnit,
    pub(super) frame: FrameId,
    /// The first error.
    pub(super) result: Result<(), PoolError>,
}

impl EvictionWriter {
    pub(super) fn new(batch: usize) -> EvictionWriter {
        EvictionWriter {
            lane: None,
            buffers: Vec::new(),
            done: Vec::with_capacity(batch),
            under_way: Vec::with_capacity(batch),
            batch,
        }
    }

    /// Returns the number of requests that nobody has taken out yet.
    pub(super) fn count(&self) -> usize {
        self.under_way.len()
    }

    /// Opens the lane if it is closed.
    pub(super) fn open(&mut self, core: &HeapInner) -> Result<(), PoolError> {
        if self.lane.is_none() {
            self.lane = Some(core.backend.open_lane()?);
        }
        Ok(())
    }

    /// Checks whether there is room for so many copies.
    pub(super) fn has_room(&self, pages: usize) -> bool {
        self.lane.as_ref().map_or(0, |lane| lane.in_flight()) + pages <= self.batch
    }

    /// Writes the pages at `indices` of a unit which we have claimed and which begins in this
    /// frame. The lane is open.
    pub(super) fn write(
        &mut self,
        core: &HeapInner,
        unit: TransferUnit,
        frame: FrameId,
        indices: impl Iterator<Item = u32>,
    ) {
        let tag = self.begin(core, unit, frame);
        for index in indices {
            let mut buffer = self.buffers.pop().unwrap_or_else(|| Buffer::new(1));
            let source = core.frames.address(FrameId(frame.0 + index));
            crate::heap::launder(source);
            // SAFETY: the frame is part of a Claimed unit, of which we are the owner: no scope
            // refers to it, and a thread that wants it waits. So nobody writes it.
            unsafe { buffer.bytes_mut().as_mut_ptr().copy_from_nonoverlapping(source, PAGE_BYTES) };
            buffer.seal();
            let page = unit.page + index;
            core.checksums.note(page, buffer.sums()[0], buffer.page(0));
            self.submit(core, tag, Op::Write { page: PageId(page.into()), buffer });
        }
    }

    /// Writes copies of those pages of a unit that differ from their far copies, while it stays in
    /// this frame and others change its words, as atomics. If it `was_clean`, pages whose checksums are those of their
    /// far copies do not. Returns the number of pages. The lane is open.
    pub(super) fn write_copies(
        &mut self,
        core: &HeapInner,
        unit: TransferUnit,
        frame: FrameId,
        was_clean: bool,
    ) -> u64 {
        let (mut written, mut tag) = (0, None);
        for index in 0..unit.pages {
            let mut buffer = self.buffers.pop().unwrap_or_else(|| Buffer::new(1));
            let frame = FrameId(frame.0 + index);
            // SAFETY: a frame of the arena, whose page stays in it while the evictor is locked, or is
            // released; its words are changed as atomics only, which our caller ensures.
            unsafe { crate::heap::copy_words(core.frames.address(frame), buffer.bytes_mut()) };
            buffer.seal();
            let info = &core.frames.infos[frame.0];
            let sum = buffer.sums()[0];
            if was_clean && info.sum() == sum {
                self.buffers.push(buffer);
                continue;
            }
            info.set_sum(sum);
            core.checksums.note(unit.page + index, sum, buffer.page(0));
            let tag = *tag.get_or_insert_with(|| self.begin(core, unit, FrameId(frame.0 - index)));
            // The near budget has so many buffers; a lane that is stuck is told apart below.
            let until = Instant::now() + core.patience;
            while !self.has_room(1) && Instant::now() < until {
                self.collect(Duration::from_millis(1));
            }
            self.submit(core, tag, Op::Write { page: PageId(u64::from(unit.page + index)), buffer });
            written += 1;
        }
        written
    }

    /// Discards the pool's copies of these pages. The lane is open.
    pub(super) fn discard(&mut self, core: &HeapInner, pages: TransferUnit) {
        let tag = self.begin(core, pages, FrameId(0));
        let op = Op::Discard { page: PageId(u64::from(pages.page)), count: u64::from(pages.pages) };
        self.submit(core, tag, op);
    }

    fn begin(&mut self, core: &HeapInner, unit: TransferUnit, frame: FrameId) -> u64 {
        // The time of a request that was never answered stays until one is.
        if core.evictor.asked_ns.load(Ordering::Relaxed) == 0 {
            core.evictor.asked_ns.store(now_ns(), Ordering::Relaxed);
        }
        self.under_way.push(EvictionRequest { unit, frame, result: Ok(()) });
        self.under_way.len() as u64 - 1
    }

    /// Submits a request; polls a full lane until it has room.
    fn submit(&mut self, core: &HeapInner, tag: u64, op: Op) {
        let mut request = LaneRequest { tag, priority: Priority::Background, deadline: core.patience, op };
        let until = Instant::now() + core.patience;
        loop {
            let Some(lane) = &mut self.lane else { unreachable!("the lane was opened first") };
            match lane.submit(request) {
                Ok(()) => return,
                Err(back) => request = back,
            }
            if Instant::now() > until {
                self.under_way[tag as usize].result = Err(PoolError::TimedOut { server: 0, after: core.patience });
                return;
            }
            self.collect(Duration::from_millis(1));
        }
    }

    /// Takes completions and stores their results.
    fn collect(&mut self, wait: Duration) {
        self.poll(wait);
        for completion in self.done.drain(..) {
            if let Some(request) = self.under_way.get_mut(completion.tag as usize) {
                request.result = request.result.and(completion.result);
            }
            self.buffers.extend(completion.buffer);
        }
    }

    /// Moves completions to `done`; waits at most for `wait` if there are none.
    fn poll(&mut self, wait: Duration) {
        let Some(lane) = &mut self.lane else { return };
        if lane.poll(&mut self.done) == 0 {
            lane.wait(wait);
            lane.poll(&mut self.done);
        }
    }

    /// Lets the lane take answers that nobody waits for. A member of a mirror that was late is used
    /// again, and given what it lacks, when it has answered.
    pub(super) fn take_answers(&mut self) {
        if self.lane.as_ref().is_some_and(|lane| lane.in_flight() == 0) {
            self.collect(Duration::ZERO);
        }
    }

    /// Waits until all requests have ended, and takes them out. The lane's deadlines ensure that
    /// this ends.
    pub(super) fn finish(&mut self, core: &HeapInner) -> (Result<(), PoolError>, Vec<EvictionRequest>) {
        let until = Instant::now() + core.patience * 2;
        let mut waited = Ok(());
        while waited.is_ok() && self.lane.as_ref().is_some_and(|lane| lane.in_flight() > 0) {
            self.collect(core.patience);
            waited = self.in_time(core, until);
        }
        let is_silent = |request: &EvictionRequest| matches!(request.result, Err(PoolError::TimedOut { .. }));
        if waited.is_ok() && !self.under_way.iter().any(is_silent) {
            core.evictor.asked_ns.store(0, Ordering::Relaxed);
        }
        self.buffers.truncate(self.batch);
        (waited, self.under_way.drain(..).collect())
    }

    /// Waits until all requests have ended, and returns the first error.
    pub(super) fn finish_all(&mut self, core: &HeapInner) -> Result<(), PoolError> {
        let (waited, requests) = self.finish(core);
        requests.into_iter().fold(waited, |result, request| result.and(request.result))
    }

    /// Reads pages, and gives `take` those that could be read and are what was written. The lane is
    /// open, and nothing else is under way.
    pub(super) fn read(
        &mut self,
        core: &HeapInner,
        pages: &[u32],
        mut take: impl FnMut(u32, &[u8]),
    ) -> Result<(), PoolError> {
        let until = Instant::now() + core.patience * 2;
        let (mut asked, mut ended) = (0, 0);
        while ended < pages.len() {
            let Some(lane) = &mut self.lane else { unreachable!("the lane was opened first") };
            while asked < pages.len() {
                let buffer = self.buffers.pop().unwrap_or_else(|| Buffer::new(1));
                let op = Op::Read { page: PageId(u64::from(pages[asked])), buffer };
                let (tag, deadline) = (asked as u64, core.patience);
                match lane.submit(LaneRequest { tag, priority: Priority::Background, deadline, op }) {
                    Ok(()) => asked += 1,
                    Err(_) => break,
                }
            }
            self.poll(core.patience);
            for completion in self.done.drain(..) {
                ended += 1;
                if let (Ok(()), Some(buffer)) = (completion.result, completion.buffer) {
                    let page = pages[completion.tag as usize];
                    if core.check_far(page, buffer.sums()[0], buffer.page(0)).is_ok() {
                        take(page, buffer.page(0));
                    }
                    self.buffers.push(buffer);
                }
            }
            self.in_time(core, until)?;
        }
        Ok(())
    }

    /// Closes a lane that forgets requests, because it is of no use. A new one is opened next time.
    fn in_time(&mut self, core: &HeapInner, until: Instant) -> Result<(), PoolError> {
        if Instant::now() <= until {
            return Ok(());
        }
        self.lane = None;
        Err(PoolError::TimedOut { server: 0, after: core.patience * 2 })
    }
}
