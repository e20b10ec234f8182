//! The place at the client: each access is an operation on a lane of the pool.
//!
//! The operations that all tasks begin in a sweep go to the lane together, and the lane sends them
//! at once. Buffers belong to the lane while an operation is in flight, then to the place. When a
//! task that waits for an operation is dropped, the operation is marked as abandoned, and its
//! buffer is used again when it comes back. So nothing is ever written into a future.
//!
//! The lane moves pages. A range inside one page is read as a part of it. Words and parts of pages
//! are changed by the server (`access_channel.rs`), so no change undoes what somebody else stores
//! beside it. Where there is no such server, a write first reads the rest of its pages. The writes
//! of a place are then one after the other, so that its tasks do not lose each other's bytes.

mod access_channel;
mod operation_table;

use crate::access::{Answer, Ask, BYTES_MAX, Bytes};
use crate::bounds::{check_lock, check_range, check_word};
use crate::executor::{ExecutorHost, StepMeter};
use crate::{Fault, Fence, Place, RANGE_BYTES_MAX};
use access_channel::AccessChannel;
use core::cell::{Cell, RefCell};
use core::future::{Future, poll_fn};
use core::ops::Deref;
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::lock::{self, LockReply};
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PagePart, PoolError, Priority};
use operation_table::OperationTable;
use std::collections::VecDeque;
use std::sync::Arc;

/// Pages of the longest range, wherever it begins.
const RUN_PAGES_MAX: usize = RANGE_BYTES_MAX / PAGE_BYTES + 1;
/// Longest deadline of an operation, so that a wait without a limit ends some day.
const OP_DEADLINE_MAX: Duration = Duration::from_secs(60);
/// Longest wait for the lane while requests of the other channel are in flight, too.
const EITHER_WAIT: Duration = Duration::from_micros(100);
/// Most completions collected at a time.
const COLLECTED_MAX: usize = 256;

struct State {
    lane: Box<dyn Lane>,
    transfers: OperationTable<(Result<(), PoolError>, Option<Buffer>)>,
    /// Operations for which the lane had no room.
    queued: VecDeque<LaneRequest>,
    done: Vec<Completion>,
    accesses: AccessChannel,
    /// Free buffers of one page. The next field has those of [`RUN_PAGES_MAX`] pages.
    small: Vec<Buffer>,
    large: Vec<Buffer>,
}

impl State {
    fn buffer(&mut self, pages: usize) -> Buffer {
        if pages == 1 {
            return self.small.pop().unwrap_or_else(|| Buffer::new(1));
        }
        let mut buffer = self.large.pop().unwrap_or_else(|| Buffer::new(RUN_PAGES_MAX));
        buffer.set_pages(pages);
        buffer
    }

    fn keep(&mut self, buffer: Buffer) {
        let free = if buffer.capacity() == 1 { &mut self.small } else { &mut self.large };
        free.push(buffer);
    }

    fn collect(&mut self, ready: &mut VecDeque<u32>) {
        for Completion { tag, result, buffer } in self.done.drain(..) {
            let unwanted = self.transfers.end(tag as u32, (result, buffer), ready);
            if let Some((_, Some(buffer))) = unwanted {
                let free = if buffer.capacity() == 1 { &mut self.small } else { &mut self.large };
                free.push(buffer);
            }
        }
    }
}

/// A place that has a lane to the memory.
pub(crate) struct ClientPlace {
    state: RefCell<State>,
    meter: StepMeter,
    region_bytes: u64,
    is_writing: Cell<bool>,
    /// Tasks that wait until no task writes.
    writers: RefCell<Vec<u32>>,
    /// Tasks that can go on since a task stopped writing.
    released: RefCell<Vec<u32>>,
}

impl ClientPlace {
    pub(crate) fn new(backend: &Arc<dyn Backend>) -> Result<ClientPlace, PoolError> {
        let lane = backend.open_lane()?;
        Ok(ClientPlace {
            state: RefCell::new(State {
                lane,
                transfers: OperationTable::new(),
                queued: VecDeque::new(),
                done: Vec::with_capacity(COLLECTED_MAX),
                accesses: AccessChannel::new(backend.clone()),
                small: Vec::new(),
                large: Vec::new(),
            }),
            meter: StepMeter::new(),
            region_bytes: PageId(backend.pages()).offset(),
            is_writing: Cell::new(false),
            writers: RefCell::default(),
            released: RefCell::default(),
        })
    }

    /// Returns the time that the running task has left, as the deadline of an operation.
    fn deadline(&self) -> Duration {
        self.meter.time_left().min(OP_DEADLINE_MAX)
    }

    /// Begins an operation for the running task.
    fn submit(&self, op: Op) -> PageTransfer<'_> {
        let deadline = self.deadline();
        let mut state = self.state.borrow_mut();
        let tag = state.transfers.begin(self.meter.task());
        let request = LaneRequest { tag: u64::from(tag), priority: Priority::Demand, deadline, op };
        let refused = match state.queued.is_empty() {
            true => state.lane.submit(request).err(),
            false => Some(request),
        };
        state.queued.extend(refused);
        PageTransfer { place: self, tag: Some(tag) }
    }

    /// Begins to read a range inside the region, with all pages that it touches.
    fn begin_read(&self, offset: u64, len: usize) -> Reading<'_> {
        let page = PageId::containing(offset);
        let skip = (offset - page.offset()) as usize;
        let pages = (skip + len).div_ceil(PAGE_BYTES).max(1);
        let buffer = self.state.borrow_mut().buffer(pages);
        let op = match PagePart::new(skip, len) {
            Some(part) if pages == 1 => Op::ReadPart { page, part, buffer },
            _ => Op::Read { page, buffer },
        };
        Reading { transfer: self.submit(op), offset, skip, len }
    }

    /// Lets the server make an access, and waits for the answer.
    async fn ask(&self, ask: Ask) -> Result<Answer, Fault> {
        let tag = self.state.borrow_mut().accesses.begin(&ask, self.meter.task(), self.deadline())?;
        RemoteAccess { place: self, tag: Some(tag) }.await
    }

    /// Makes an access to a word at the server, and returns the word as it was before.
    async fn ask_word(&self, offset: u64, ask: Ask) -> Result<u64, Fault> {
        self.meter.step(size_of::<u64>()).await;
        check_word(self.region_bytes, offset)?;
        match self.ask(ask).await? {
            Answer::Word(word) => Ok(word),
            _ => Err(Fault::Internal),
        }
    }

    /// Sends the requests for which nobody waits.
    pub(crate) fn flush(&self) {
        self.state.borrow_mut().accesses.flush();
    }

    /// Reads bytes at the server, which sees them while nobody changes them.
    async fn read_at_server(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        let mut at = offset;
        for part in into.chunks_mut(BYTES_MAX) {
            match self.ask(Ask::Read { offset: at, len: part.len() as u32 }).await? {
                Answer::Bytes(Bytes(bytes)) if bytes.len() == part.len() => part.copy_from_slice(&bytes),
                _ => return Err(Fault::Internal),
            }
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Writes a part of a page: at the server, or here if there is no server that can.
    async fn write_part(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        match self.ask(Ask::Write { offset, bytes: Bytes(bytes.to_vec()) }).await {
            Ok(Answer::Done) => return Ok(()),
            Ok(_) => return Err(Fault::Internal),
            Err(Fault::NotHere) => {}
            Err(fault) => return Err(fault),
        }
        let page = PageId::containing(offset);
        let skip = (offset - page.offset()) as usize;
        let buffer = self.state.borrow_mut().buffer(1);
        let mut old = self.submit(Op::Read { page, buffer }).await?;
        let mut buffer = old.buffer.take().unwrap_or_else(|| Buffer::new(1));
        buffer.page_mut(0)[skip..skip + bytes.len()].copy_from_slice(bytes);
        self.write_page(page, buffer).await
    }

    async fn write_page(&self, page: PageId, mut buffer: Buffer) -> Result<(), Fault> {
        buffer.seal();
        self.submit(Op::Write { page, buffer }).await.map(drop)
    }

    /// Waits until no task of this place writes, and begins to write.
    async fn lock(&self) -> WriterGuard<'_> {
        poll_fn(|_| match self.is_writing.replace(true) {
            false => Poll::Ready(WriterGuard(self)),
            true => {
                self.writers.borrow_mut().push(self.meter.task());
                Poll::Pending
            }
        })
        .await
    }
}

/// Guard of the one task that writes.
struct WriterGuard<'p>(&'p ClientPlace);

impl Drop for WriterGuard<'_> {
    fn drop(&mut self) {
        self.0.is_writing.set(false);
        self.0.released.borrow_mut().append(&mut self.0.writers.borrow_mut());
    }
}

/// An operation for which a task waits.
struct PageTransfer<'p> {
    place: &'p ClientPlace,
    /// `None` after its end.
    tag: Option<u32>,
}

impl<'p> Future for PageTransfer<'p> {
    type Output = Result<Page<'p>, Fault>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let place = self.place;
        let Some(tag) = self.tag else { return Poll::Pending };
        let taken = place.state.borrow_mut().transfers.take(tag, place.meter.task());
        let Some((result, buffer)) = taken else { return Poll::Pending };
        self.tag = None;
        let page = Page { buffer, place };
        Poll::Ready(result.map(|()| page).map_err(Fault::from))
    }
}

impl Drop for PageTransfer<'_> {
    fn drop(&mut self) {
        let Some(tag) = self.tag else { return };
        let mut state = self.place.state.borrow_mut();
        if let Some((_, Some(buffer))) = state.transfers.give_up(tag) {
            state.keep(buffer);
        }
    }
}

/// An access of the server for which a task waits.
struct RemoteAccess<'p> {
    place: &'p ClientPlace,
    /// `None` after its end.
    tag: Option<u32>,
}

impl Future for RemoteAccess<'_> {
    type Output = Result<Answer, Fault>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let place = self.place;
        let Some(tag) = self.tag else { return Poll::Pending };
        let mut state = place.state.borrow_mut();
        let Some(answer) = state.accesses.take(tag, place.meter.task()) else { return Poll::Pending };
        self.tag = None;
        Poll::Ready(answer)
    }
}

impl Drop for RemoteAccess<'_> {
    fn drop(&mut self) {
        if let Some(tag) = self.tag {
            self.place.state.borrow_mut().accesses.give_up(tag);
        }
    }
}

/// A buffer that came back with its operation.
struct Page<'p> {
    /// `None` only while it is dropped or taken.
    buffer: Option<Buffer>,
    place: &'p ClientPlace,
}

impl Page<'_> {
    fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], Buffer::bytes)
    }
}

impl Drop for Page<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.place.state.borrow_mut().keep(buffer);
        }
    }
}

/// A read for which a task waits.
struct Reading<'p> {
    transfer: PageTransfer<'p>,
    offset: u64,
    skip: usize,
    len: usize,
}

impl<'p> Reading<'p> {
    async fn end(self) -> Result<PageGuard<'p>, Fault> {
        let Reading { transfer, offset, skip, len } = self;
        let place = transfer.place;
        let corrupt = match transfer.await {
            Ok(page) => return Ok(PageGuard { page, skip, len }),
            Err(fault @ Fault::Corrupt { .. }) => fault,
            Err(fault) => return Err(fault),
        };
        // Perhaps a function at the server was storing the page.
        let buffer = place.state.borrow_mut().buffer((skip + len).div_ceil(PAGE_BYTES));
        let mut page = Page { buffer: Some(buffer), place };
        let bytes = page.buffer.as_mut().map_or(&mut [][..], |buffer| &mut buffer.bytes_mut()[skip..skip + len]);
        match place.read_at_server(offset, bytes).await {
            Ok(()) => Ok(PageGuard { page, skip, len }),
            Err(Fault::NotHere) => Err(corrupt),
            Err(fault) => Err(fault),
        }
    }
}

/// Bytes in a buffer of the place.
pub(crate) struct PageGuard<'p> {
    page: Page<'p>,
    skip: usize,
    len: usize,
}

impl Deref for PageGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.page.bytes()[self.skip..self.skip + self.len]
    }
}

impl Place for ClientPlace {
    type Bytes<'p> = PageGuard<'p>;

    fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    async fn read<const N: usize>(&self, offset: u64) -> Result<[u8; N], Fault> {
        let guard = self.read_range(offset, N).await?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&guard);
        Ok(bytes)
    }

    async fn read_range(&self, offset: u64, len: usize) -> Result<PageGuard<'_>, Fault> {
        self.meter.step(len).await;
        check_range(self.region_bytes, offset, len)?;
        if len == 0 {
            return Ok(PageGuard { page: Page { buffer: None, place: self }, skip: 0, len });
        }
        self.begin_read(offset, len).end().await
    }

    async fn read_many<const N: usize>(&self, offsets: &[u64], into: &mut [[u8; N]]) -> Result<(), Fault> {
        let mut under_way = Vec::with_capacity(offsets.len());
        for offset in offsets.iter().take(into.len()) {
            self.meter.step(N).await;
            check_range(self.region_bytes, *offset, N)?;
            if N > 0 {
                under_way.push(self.begin_read(*offset, N));
            }
        }
        for (reading, bytes) in under_way.into_iter().zip(into) {
            bytes.copy_from_slice(&reading.end().await?);
        }
        Ok(())
    }

    async fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.meter.step(bytes.len()).await;
        check_range(self.region_bytes, offset, bytes.len())?;
        let _writing = self.lock().await;
        let mut rest = bytes;
        let mut at = offset;
        while !rest.is_empty() {
            let page = PageId::containing(at);
            let skip = (at - page.offset()) as usize;
            let (now, later) = rest.split_at(rest.len().min(PAGE_BYTES - skip));
            if now.len() == PAGE_BYTES {
                let mut buffer = self.state.borrow_mut().buffer(1);
                buffer.page_mut(0).copy_from_slice(now);
                self.write_page(page, buffer).await?;
            } else {
                self.write_part(at, now).await?;
            }
            (rest, at) = (later, at + now.len() as u64);
        }
        Ok(())
    }

    async fn compare_exchange(&self, offset: u64, current: u64, new: u64) -> Result<u64, Fault> {
        self.ask_word(offset, Ask::Exchange { offset, current, new }).await
    }

    async fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, Fault> {
        self.ask_word(offset, Ask::Add { offset, add }).await
    }

    async fn write_fenced(&self, fence: Fence, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.meter.step(bytes.len()).await;
        check_range(self.region_bytes, offset, bytes.len())?;
        check_lock(self.region_bytes, fence.lock)?;
        let mut at = offset;
        // An empty range is one piece: whether the lock is still held is checked all the same.
        for part in bytes.chunks(BYTES_MAX).chain(bytes.is_empty().then_some(bytes)) {
            match self.ask(Ask::Fenced { fence, offset: at, bytes: Bytes(part.to_vec()) }).await? {
                Answer::Done => at += part.len() as u64,
                _ => return Err(Fault::Internal),
            }
        }
        Ok(())
    }

    async fn lock_step(&self, lock: u64, ask: lock::LockRequest) -> Result<LockReply, Fault> {
        self.meter.step(lock::LockRecord::BYTES).await;
        check_lock(self.region_bytes, lock)?;
        match self.ask(Ask::Lock { lock, ask }).await? {
            Answer::Lock(reply) => Ok(reply),
            _ => Err(Fault::Internal),
        }
    }

    fn give_back(&self, lock: u64, ask: lock::LockRequest) {
        self.state.borrow_mut().accesses.give_back(lock, ask);
    }

    async fn pause(&self, time: Duration) {
        self.meter.step(0).await;
        if time.is_zero() {
            self.meter.yield_now().await;
        } else {
            self.meter.sleep_for(time, None).await;
        }
    }

    fn now(&self) -> Duration {
        self.meter.elapsed()
    }

    async fn yield_now(&self) {
        self.meter.step(0).await;
        self.meter.yield_now().await;
    }
}

impl ExecutorHost for ClientPlace {
    const CATCHES: bool = false;

    fn meter(&self) -> &StepMeter {
        &self.meter
    }

    fn turn(&self, ready: &mut VecDeque<u32>, may_wait: Option<Duration>) -> bool {
        ready.extend(self.released.borrow_mut().drain(..));
        let state = &mut *self.state.borrow_mut();
        while let Some(request) = state.queued.pop_front() {
            if let Err(request) = state.lane.submit(request) {
                state.queued.push_front(request);
                break;
            }
        }
        let transfers = state.transfers.in_flight();
        let accesses = state.accesses.in_flight();
        if transfers > 0 {
            state.lane.poll(&mut state.done);
        }
        if accesses > 0 {
            state.accesses.turn(ready);
        }
        if let (Some(may_wait), true, true) = (may_wait, ready.is_empty(), state.done.is_empty()) {
            // Nothing can wait for both at once.
            let most = may_wait.min(if transfers > 0 && accesses > 0 { EITHER_WAIT } else { OP_DEADLINE_MAX });
            if transfers > 0 {
                state.lane.wait(most);
                state.lane.poll(&mut state.done);
            }
            if accesses > 0 {
                state.accesses.wait(most);
                state.accesses.turn(ready);
            }
        }
        state.collect(ready);
        transfers + accesses > 0
    }
}
