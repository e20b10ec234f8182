//! The place at the client: each access is an operation on a lane of the pool.
//!
//! What all tasks ask for in a sweep goes to the lane together, and the lane sends it at once. Buffers belong to the lane while an
//! operation is in flight, then to the place: when a task is dropped that waits for one, its operation is marked as given up, and the buffer
//! is used again when it comes back. So nothing is ever written into a future.
//!
//! The lane moves pages. A range inside one page is read as a part of it; a write reads what it does not cover. Writes of a place are one
//! after the other, so tasks do not lose each other's bytes.

use crate::crew::{Host, Meter};
use crate::place::check;
use crate::{Fault, Place, RANGE_BYTES_MAX};
use core::cell::{Cell, RefCell};
use core::future::{Future, poll_fn};
use core::ops::Deref;
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Buffer, Completion, Lane, Op, PagePart, PoolError, Priority, Request};
use std::collections::VecDeque;

/// Pages of the longest range, wherever it begins.
const RUN_PAGES_MAX: usize = RANGE_BYTES_MAX / PAGE_BYTES + 1;
/// No operation is given longer, so that a wait without a limit ends some day.
const OP_DEADLINE_MAX: Duration = Duration::from_secs(60);
/// Completions collected at a time.
const COLLECTED_MAX: usize = 256;

enum Operation {
    /// Nobody's.
    Free,
    /// In flight, or about to be.
    Waits { task: u32 },
    /// Ended, and not yet looked at.
    Ended(Result<(), PoolError>, Option<Buffer>),
    /// In flight, and wanted by nobody.
    GivenUp,
}

struct State {
    lane: Box<dyn Lane>,
    operations: Vec<Operation>,
    free: Vec<u32>,
    /// What the lane had no room for.
    queued: VecDeque<Request>,
    in_flight: usize,
    done: Vec<Completion>,
    /// Buffers of one page, and of [`RUN_PAGES_MAX`], that nobody uses.
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
        let shelf = if buffer.capacity() == 1 { &mut self.small } else { &mut self.large };
        shelf.push(buffer);
    }

    fn collect(&mut self, ready: &mut VecDeque<u32>) {
        for Completion { tag, result, buffer } in self.done.drain(..) {
            self.in_flight -= 1;
            let operation = &mut self.operations[tag as usize];
            match *operation {
                Operation::Waits { task } => {
                    *operation = Operation::Ended(result, buffer);
                    ready.push_back(task);
                }
                Operation::GivenUp => {
                    *operation = Operation::Free;
                    self.free.push(tag as u32);
                    if let Some(buffer) = buffer {
                        let shelf = if buffer.capacity() == 1 { &mut self.small } else { &mut self.large };
                        shelf.push(buffer);
                    }
                }
                Operation::Free | Operation::Ended(..) => unreachable!("an operation ends once"),
            }
        }
    }
}

/// A place that has a lane to the memory.
pub(crate) struct ClientPlace {
    state: RefCell<State>,
    meter: Meter,
    region_bytes: u64,
    is_writing: Cell<bool>,
    /// Tasks that wait until nobody writes.
    writers: RefCell<Vec<u32>>,
    /// Tasks that can go on since somebody stopped writing.
    released: RefCell<Vec<u32>>,
}

impl ClientPlace {
    pub(crate) fn new(lane: Box<dyn Lane>, pages: u64) -> ClientPlace {
        ClientPlace {
            state: RefCell::new(State {
                lane,
                operations: Vec::new(),
                free: Vec::new(),
                queued: VecDeque::new(),
                in_flight: 0,
                done: Vec::with_capacity(COLLECTED_MAX),
                small: Vec::new(),
                large: Vec::new(),
            }),
            meter: Meter::new(),
            region_bytes: PageId(pages).offset(),
            is_writing: Cell::new(false),
            writers: RefCell::default(),
            released: RefCell::default(),
        }
    }

    /// Begins an operation for the task that runs.
    fn submit(&self, op: Op) -> Transfer<'_> {
        let deadline = self.meter.time_left().min(OP_DEADLINE_MAX);
        let task = self.meter.task();
        let mut state = self.state.borrow_mut();
        let waits = Operation::Waits { task };
        let index = match state.free.pop() {
            Some(index) => {
                state.operations[index as usize] = waits;
                index
            }
            None => {
                state.operations.push(waits);
                state.operations.len() as u32 - 1
            }
        };
        state.in_flight += 1;
        let request = Request { tag: u64::from(index), priority: Priority::Demand, deadline, op };
        let refused = match state.queued.is_empty() {
            true => state.lane.submit(request).err(),
            false => Some(request),
        };
        state.queued.extend(refused);
        Transfer { place: self, index: Some(index) }
    }

    /// Begins to read a range that is inside the region; what arrives covers it.
    fn begin_read(&self, offset: u64, len: usize) -> Reading<'_> {
        let page = PageId::containing(offset);
        let skip = (offset - page.offset()) as usize;
        let pages = (skip + len).div_ceil(PAGE_BYTES).max(1);
        let buffer = self.state.borrow_mut().buffer(pages);
        let op = match PagePart::new(skip, len) {
            Some(part) if pages == 1 => Op::ReadPart { page, part, buffer },
            _ => Op::Read { page, buffer },
        };
        Reading { transfer: self.submit(op), skip, len }
    }

    /// Waits until nobody writes, and writes.
    async fn lock(&self) -> Writing<'_> {
        poll_fn(|_| match self.is_writing.replace(true) {
            false => Poll::Ready(Writing(self)),
            true => {
                self.writers.borrow_mut().push(self.meter.task());
                Poll::Pending
            }
        })
        .await
    }
}

/// Somebody writes.
struct Writing<'p>(&'p ClientPlace);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.is_writing.set(false);
        self.0.released.borrow_mut().append(&mut self.0.writers.borrow_mut());
    }
}

/// An operation that somebody waits for.
struct Transfer<'p> {
    place: &'p ClientPlace,
    /// `None`: it has ended.
    index: Option<u32>,
}

impl<'p> Future for Transfer<'p> {
    type Output = Result<Page<'p>, Fault>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let place = self.place;
        let Some(index) = self.index else { return Poll::Pending };
        let mut state = place.state.borrow_mut();
        let operation = &mut state.operations[index as usize];
        if let Operation::Waits { task } = operation {
            // It may be another one by now.
            *task = place.meter.task();
            return Poll::Pending;
        }
        let Operation::Ended(result, buffer) = core::mem::replace(operation, Operation::Free) else {
            unreachable!("who waits has not given up");
        };
        state.free.push(index);
        self.index = None;
        drop(state);
        let page = Page { buffer, place };
        Poll::Ready(result.map(|()| page).map_err(Fault::from))
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        let Some(index) = self.index else { return };
        let mut state = self.place.state.borrow_mut();
        match core::mem::replace(&mut state.operations[index as usize], Operation::GivenUp) {
            Operation::Ended(_, buffer) => {
                state.operations[index as usize] = Operation::Free;
                state.free.push(index);
                buffer.into_iter().for_each(|buffer| state.keep(buffer));
            }
            Operation::Waits { .. } => {}
            Operation::Free | Operation::GivenUp => unreachable!("who waits has not given up"),
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

/// A read that somebody waits for.
struct Reading<'p> {
    transfer: Transfer<'p>,
    skip: usize,
    len: usize,
}

impl<'p> Reading<'p> {
    async fn end(self) -> Result<Lent<'p>, Fault> {
        let (skip, len) = (self.skip, self.len);
        Ok(Lent { page: self.transfer.await?, skip, len })
    }
}

/// Bytes in a buffer of the place.
pub(crate) struct Lent<'p> {
    page: Page<'p>,
    skip: usize,
    len: usize,
}

impl Deref for Lent<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.page.bytes()[self.skip..self.skip + self.len]
    }
}

impl Place for ClientPlace {
    type Bytes<'p> = Lent<'p>;

    fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    async fn read<const N: usize>(&self, offset: u64) -> Result<[u8; N], Fault> {
        let lent = self.read_range(offset, N).await?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&lent);
        Ok(bytes)
    }

    async fn read_range(&self, offset: u64, len: usize) -> Result<Lent<'_>, Fault> {
        self.meter.step(len).await;
        check(self.region_bytes, offset, len)?;
        if len == 0 {
            return Ok(Lent { page: Page { buffer: None, place: self }, skip: 0, len });
        }
        self.begin_read(offset, len).end().await
    }

    async fn read_many<const N: usize>(&self, offsets: &[u64], into: &mut [[u8; N]]) -> Result<(), Fault> {
        let mut under_way = Vec::with_capacity(offsets.len());
        for offset in offsets.iter().take(into.len()) {
            self.meter.step(N).await;
            check(self.region_bytes, *offset, N)?;
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
        check(self.region_bytes, offset, bytes.len())?;
        let _writing = self.lock().await;
        let mut rest = bytes;
        let mut at = offset;
        while !rest.is_empty() {
            let page = PageId::containing(at);
            let skip = (at - page.offset()) as usize;
            let (now, later) = rest.split_at(rest.len().min(PAGE_BYTES - skip));
            let mut buffer = match now.len() {
                PAGE_BYTES => self.state.borrow_mut().buffer(1),
                _ => {
                    let buffer = self.state.borrow_mut().buffer(1);
                    let mut old = self.submit(Op::Read { page, buffer }).await?;
                    old.buffer.take().unwrap_or_else(|| Buffer::new(1))
                }
            };
            buffer.page_mut(0)[skip..skip + now.len()].copy_from_slice(now);
            buffer.seal();
            self.submit(Op::Write { page, buffer }).await?;
            (rest, at) = (later, at + now.len() as u64);
        }
        Ok(())
    }

    fn now(&self) -> Duration {
        self.meter.elapsed()
    }

    async fn yield_now(&self) {
        self.meter.step(0).await;
        self.meter.give_way().await;
    }
}

impl Host for ClientPlace {
    const CATCHES: bool = false;

    fn meter(&self) -> &Meter {
        &self.meter
    }

    fn turn(&self, ready: &mut VecDeque<u32>, may_wait: bool) -> bool {
        ready.extend(self.released.borrow_mut().drain(..));
        let state = &mut *self.state.borrow_mut();
        while let Some(request) = state.queued.pop_front() {
            if let Err(request) = state.lane.submit(request) {
                state.queued.push_front(request);
                break;
            }
        }
        let was_under_way = state.in_flight > 0;
        if was_under_way && state.lane.poll(&mut state.done) == 0 && may_wait && ready.is_empty() {
            state.lane.wait(OP_DEADLINE_MAX);
            state.lane.poll(&mut state.done);
        }
        state.collect(ready);
        was_under_way
    }
}
