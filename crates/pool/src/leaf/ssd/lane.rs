//! Lane to a file: operations are cut into chunks, one transfer each.

use super::Region;
use super::config::SsdIoMode;
use super::depth::{DEPTH_MAX, Depth};
use super::engine::{Arena, Engine};
use crate::contract::backend::hand_over;
use crate::leaf::shadow_store::{NoSpace, READ_TRIES};
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{PageId, checksum};
use farfield_os::process::now_ns;
use farfield_os::ring::{FileTransfer, Ring, TransferDirection};
use farfield_os::{Errno, process};
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations of one lane that may be submitted and not yet collected.
const SLOTS: usize = 256;
/// Most pages in one transfer.
const CHUNK_PAGES: u64 = 16;
/// Time that a waiting lane polls before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Sleep of a lane when only others can give it what it needs.
const SLICE: Duration = Duration::from_micros(200);
/// Time that the last transfers of a lane are waited for.
const FAREWELL: Duration = Duration::from_secs(1);

/// Operation of the caller.
struct SsdOperation {
    tag: u64,
    page: u64,
    way: TransferDirection,
    buffer: Buffer,
    /// Number of pages whose transfer has begun, or that need none.
    begun: u64,
    transfers: u32,
    /// Number of claimed places that are not taken yet; `None` before a write has its places.
    claimed: Option<u64>,
    /// Number of new pages for which room was made and that are not stored yet.
    admitted: u64,
    result: Result<(), PoolError>,
    priority: Priority,
    deadline: Duration,
    deadline_at: u64,
}

/// Transfer of one chunk.
struct SsdTransfer {
    /// Index of the operation; `None` if it was given up.
    operation: Option<usize>,
    way: TransferDirection,
    page: u64,
    count: u64,
    place: u64,
    bounce: usize,
    /// Number of bytes that were transferred already.
    done: usize,
    /// Number of times that this page was read before.
    tries: u32,
    begun_at: u64,
}

/// Lane to the file of a region.
pub(super) struct SsdLane {
    region: Arc<Region>,
    engine: Engine,
    arena: Arena,
    depth: Depth,
    operations: Box<[Option<SsdOperation>]>,
    free_operations: Vec<usize>,
    /// Operations that have not begun with all of their pages.
    demand: VecDeque<usize>,
    background: VecDeque<usize>,
    transfers: Box<[Option<SsdTransfer>]>,
    free_transfers: Vec<usize>,
    ended: VecDeque<Completion>,
    /// Time before which no operation in flight reaches its deadline.
    next_deadline: u64,
    /// Position of the last places that were taken.
    rover: u64,
    zero_sum: u64,
}

impl SsdLane {
    pub(super) fn new(region: Arc<Region>) -> Result<SsdLane, PoolError> {
        let arena = Arena::new().map_err(PoolError::Os)?;
        let calls = Engine::Calls { file: region.medium.file, arrived: None };
        let engine = match region.io {
            SsdIoMode::Calls => calls,
            io => match Ring::open(region.medium.file, DEPTH_MAX as u32) {
                Ok(mut ring) => {
                    // SAFETY: `Drop` ends the ring before the arena goes.
                    unsafe { arena.register(&mut ring) };
                    Engine::Uring(ring)
                }
                Err(errno) if io == SsdIoMode::Uring => return Err(PoolError::Os(errno)),
                Err(_) => calls,
            },
        };
        Ok(SsdLane {
            engine,
            arena,
            depth: Depth::new(),
            operations: std::iter::repeat_with(|| None).take(SLOTS).collect(),
            free_operations: (0..SLOTS).rev().collect(),
            demand: VecDeque::with_capacity(SLOTS),
            background: VecDeque::with_capacity(SLOTS),
            transfers: std::iter::repeat_with(|| None).take(DEPTH_MAX).collect(),
            free_transfers: (0..DEPTH_MAX).rev().collect(),
            ended: VecDeque::with_capacity(SLOTS),
            next_deadline: u64::MAX,
            // Lanes that begin elsewhere rarely want the same places.
            rover: now_ns() >> 8,
            zero_sum: checksum(&[0; PAGE_BYTES]),
            region,
        })
    }

    fn under_way(&self) -> usize {
        DEPTH_MAX - self.free_transfers.len()
    }

    /// Begins operations as far as there is room.
    fn start(&mut self) {
        loop {
            let is_demand = !self.demand.is_empty();
            let queue = if is_demand { &self.demand } else { &self.background };
            let Some(&index) = queue.front() else { break };
            if !self.advance(index) {
                break;
            }
            let queue = if is_demand { &mut self.demand } else { &mut self.background };
            queue.pop_front();
            self.end_if_done(index);
        }
        self.engine.start();
    }

    /// Begins with pages of an operation. Returns whether it has begun with all of them, or has
    /// failed.
    fn advance(&mut self, index: usize) -> bool {
        let Some(mut operation) = self.operations[index].take() else { return true };
        let all = match operation.way {
            TransferDirection::Read => self.advance_read(index, &mut operation),
            TransferDirection::Write => self.advance_write(index, &mut operation),
        };
        self.operations[index] = Some(operation);
        all
    }

    fn advance_read(&mut self, index: usize, operation: &mut SsdOperation) -> bool {
        let count = operation.buffer.pages() as u64;
        while operation.begun < count && operation.result.is_ok() {
            let page = operation.page + operation.begun;
            let Some(place) = self.region.places.get(page) else {
                let at = operation.begun as usize;
                operation.buffer.page_mut(at).fill(0);
                operation.buffer.sums_mut()[at] = self.zero_sum;
                operation.begun += 1;
                continue;
            };
            let most = (count - operation.begun).min(CHUNK_PAGES);
            let run = (1..most).take_while(|&next| self.region.places.get(page + next) == Some(place + next)).count();
            let Some((bounce, count)) = self.bounce(operation.priority, run as u64 + 1) else { return false };
            let chunk = SsdTransfer::new(index, TransferDirection::Read, page, count, place, bounce);
            operation.begun += count;
            operation.transfers += 1;
            self.transfer(chunk);
        }
        true
    }

    fn advance_write(&mut self, index: usize, operation: &mut SsdOperation) -> bool {
        let count = operation.buffer.pages() as u64;
        if operation.claimed.is_none() {
            match self.region.claim(operation.page, count) {
                Ok(new) => (operation.claimed, operation.admitted) = (Some(count), new),
                Err(NoSpace::Busy) => return false,
                Err(NoSpace::Full) => operation.result = Err(self.region.full()),
                Err(NoSpace::Os(errno)) => operation.result = Err(PoolError::Os(errno)),
            }
        }
        while operation.begun < count && operation.result.is_ok() {
            let Some(claimed) = &mut operation.claimed else { break };
            let wanted = (count - operation.begun).min(CHUNK_PAGES);
            let Some((bounce, room)) = self.bounce(operation.priority, wanted) else { return false };
            let (place, taken) = self.region.slots.take(&mut self.rover, room);
            *claimed -= taken;
            self.arena.give(bounce + taken as usize, room - taken);
            for next in 0..taken as usize {
                let at = operation.begun as usize + next;
                self.arena.page(bounce + next).copy_from_slice(operation.buffer.page(at));
                self.region.sum(place + next as u64).store(operation.buffer.sums()[at], Ordering::Relaxed);
            }
            let chunk = SsdTransfer::new(
                index,
                TransferDirection::Write,
                operation.page + operation.begun,
                taken,
                place,
                bounce,
            );
            operation.begun += taken;
            operation.transfers += 1;
            self.transfer(chunk);
        }
        true
    }

    /// Returns memory for a transfer of up to `wanted` pages, if one more may be under way.
    fn bounce(&mut self, priority: Priority, wanted: u64) -> Option<(usize, u64)> {
        let has_room = !self.free_transfers.is_empty() && self.engine.has_room();
        if !has_room || (priority == Priority::Background && self.under_way() >= self.depth.allowed()) {
            return None;
        }
        self.arena.take(wanted)
    }

    fn transfer(&mut self, chunk: SsdTransfer) {
        let index = self.free_transfers.pop().expect("looked at before");
        self.transfers[index] = Some(chunk);
        self.begin(index);
    }

    fn begin(&mut self, index: usize) {
        let Some(chunk) = &self.transfers[index] else { return };
        let transfer = FileTransfer {
            tag: index as u64,
            direction: chunk.way,
            address: self.arena.address(chunk.bounce) + chunk.done,
            len: (chunk.count as usize * PAGE_BYTES - chunk.done) as u32,
            offset: PageId(chunk.place).offset() + chunk.done as u64,
        };
        // SAFETY: the pages were taken from the arena for this chunk, which keeps them until it has
        // ended.
        unsafe { self.engine.begin(transfer) };
    }

    /// Takes one transfer that has arrived, and returns whether there was one. It takes no more,
    /// because each keeps the processor for a while, in which the disk shall have something to do:
    /// new transfers are submitted between two of them.
    fn collect(&mut self) -> bool {
        while let Some((tag, result)) = self.engine.take() {
            let Some(mut chunk) = self.transfers[tag as usize].take() else { continue };
            let left = chunk.count as usize * PAGE_BYTES - chunk.done;
            let again = match result {
                Ok(bytes) if bytes > 0 && bytes < left => {
                    chunk.done += bytes;
                    true
                }
                // A thread that ends takes its transfers with it; others are interrupted.
                Err(Errno(libc::EINTR | libc::EAGAIN | libc::ECANCELED)) => true,
                _ => false,
            };
            if again && chunk.operation.is_some() {
                self.transfers[tag as usize] = Some(chunk);
                self.begin(tag as usize);
                continue;
            }
            self.free_transfers.push(tag as usize);
            self.depth.on_end(chunk.count, now_ns().saturating_sub(chunk.begun_at), self.under_way() + 1);
            self.chunk_ended(&chunk, if again { Err(Errno(libc::ECANCELED)) } else { result });
            return true;
        }
        false
    }

    fn chunk_ended(&mut self, chunk: &SsdTransfer, result: Result<usize, Errno>) {
        let Some(index) = chunk.operation else {
            // The transfer has ended too late: its places will not become pages.
            if chunk.way == TransferDirection::Write {
                self.region.slots.give(chunk.place, chunk.count);
            }
            return self.arena.give(chunk.bounce, chunk.count);
        };
        let Some(mut operation) = self.operations[index].take() else { return };
        operation.transfers -= 1;
        let result = match (chunk.way, result) {
            (TransferDirection::Read, Ok(0)) => Err(self.region.corrupt(chunk.page)),
            // Bytes that the medium cannot give any more are as lost as bytes that it gives
            // wrongly.
            (TransferDirection::Read, Err(Errno(libc::EIO | libc::EILSEQ | libc::ENODATA))) => {
                Err(self.region.corrupt(chunk.page))
            }
            (TransferDirection::Write, Ok(0) | Err(Errno(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))) => {
                Err(self.region.full())
            }
            (_, Err(errno)) => Err(PoolError::Os(errno)),
            (TransferDirection::Read, Ok(_)) => Ok(()),
            (TransferDirection::Write, Ok(_)) => Ok(()),
        };
        match (chunk.way, result) {
            (TransferDirection::Read, Ok(())) => self.arrived(index, &mut operation, chunk),
            (TransferDirection::Write, Ok(())) => {
                self.publish(&mut operation, chunk);
                self.arena.give(chunk.bounce, chunk.count);
            }
            (way, Err(error)) => {
                operation.result = operation.result.and(Err(error));
                if way == TransferDirection::Write {
                    self.region.slots.give(chunk.place, chunk.count);
                }
                self.arena.give(chunk.bounce, chunk.count);
            }
        }
        self.operations[index] = Some(operation);
        self.end_if_done(index);
    }

    /// Checks pages that were read and hands them over.
    fn arrived(&mut self, index: usize, operation: &mut SsdOperation, chunk: &SsdTransfer) {
        let mut again = 0u64;
        for next in 0..chunk.count {
            let at = (chunk.page + next - operation.page) as usize;
            let sum = self.region.sum(chunk.place + next).load(Ordering::Relaxed);
            operation.buffer.page_mut(at).copy_from_slice(self.arena.page(chunk.bounce + next as usize));
            operation.buffer.sums_mut()[at] = sum;
            let is_right = checksum(operation.buffer.page(at)) == sum;
            let is_there = self.region.places.get(chunk.page + next) == Some(chunk.place + next);
            // A page that was written twice meanwhile may have its old place again. So a checksum
            // is wrong only if it stays wrong.
            if !is_there || !is_right && chunk.tries < READ_TRIES {
                again |= 1 << next;
            } else if !is_right {
                operation.result = operation.result.and(Err(self.region.corrupt(chunk.page + next)));
            }
        }
        self.arena.give(chunk.bounce, chunk.count);
        // The page was written or discarded while it was read: now it is elsewhere.
        for next in (0..chunk.count).filter(|next| again >> next & 1 == 1) {
            self.read_again(index, operation, chunk.page + next, chunk.tries + 1);
        }
    }

    fn read_again(&mut self, index: usize, operation: &mut SsdOperation, page: u64, tries: u32) {
        let at = (page - operation.page) as usize;
        let Some(place) = self.region.places.get(page) else {
            operation.buffer.page_mut(at).fill(0);
            operation.buffer.sums_mut()[at] = self.zero_sum;
            return;
        };
        match self.bounce(Priority::Demand, 1) {
            Some((bounce, _)) => {
                operation.transfers += 1;
                self.transfer(SsdTransfer {
                    tries,
                    ..SsdTransfer::new(index, TransferDirection::Read, page, 1, place, bounce)
                });
            }
            None => {
                let reason = "a page was written again and again while it was read";
                operation.result = Err(PoolError::Refused { server: self.region.server, reason });
            }
        }
    }

    /// Makes the places that were written the pages.
    fn publish(&self, operation: &mut SsdOperation, chunk: &SsdTransfer) {
        for next in 0..chunk.count {
            self.region.publish(chunk.page + next, chunk.place + next, &mut operation.admitted);
        }
    }

    fn end_if_done(&mut self, index: usize) {
        let is_done = self.operations[index].as_ref().is_some_and(|operation| {
            let all_begun = operation.begun == operation.buffer.pages() as u64 || operation.result.is_err();
            operation.transfers == 0 && all_begun
        });
        if is_done && let Some(operation) = self.operations[index].take() {
            self.demand.retain(|one| *one != index);
            self.background.retain(|one| *one != index);
            self.end(index, operation);
        }
    }

    fn end(&mut self, index: usize, operation: SsdOperation) {
        self.region.slots.unclaim(operation.claimed.unwrap_or(0));
        self.region.dismiss(operation.admitted);
        self.free_operations.push(index);
        self.ended.push_back(Completion {
            tag: operation.tag,
            result: operation.result,
            buffer: Some(operation.buffer),
        });
    }

    /// Ends operations that are not done at their deadline. Their transfers go on, in the lane's
    /// own memory, and are not reported.
    fn expire(&mut self, now: u64) {
        self.next_deadline = u64::MAX;
        for index in 0..SLOTS {
            match &self.operations[index] {
                Some(operation) if operation.deadline_at <= now => self.give_up(index),
                Some(operation) => self.next_deadline = self.next_deadline.min(operation.deadline_at),
                None => {}
            }
        }
    }

    fn give_up(&mut self, index: usize) {
        let Some(mut operation) = self.operations[index].take() else { return };
        for chunk in self.transfers.iter_mut().flatten().filter(|chunk| chunk.operation == Some(index)) {
            chunk.operation = None;
        }
        self.demand.retain(|one| *one != index);
        self.background.retain(|one| *one != index);
        operation.result = Err(PoolError::TimedOut { server: self.region.server, after: operation.deadline });
        self.end(index, operation);
    }

    fn work(&mut self) {
        loop {
            self.start();
            // With calls, the first operation that ends is handed over before another one is begun.
            if !self.collect() || !self.ended.is_empty() {
                break;
            }
        }
        if self.next_deadline != u64::MAX {
            let now = now_ns();
            if now >= self.next_deadline {
                self.expire(now);
            }
        }
    }
}

impl SsdTransfer {
    fn new(operation: usize, way: TransferDirection, page: u64, count: u64, place: u64, bounce: usize) -> SsdTransfer {
        SsdTransfer {
            operation: Some(operation),
            way,
            page,
            count,
            place,
            bounce,
            done: 0,
            tries: 0,
            begun_at: now_ns(),
        }
    }
}

impl Lane for SsdLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let LaneRequest { tag, priority, deadline, op } = request;
        let (way, page, buffer) = match op {
            Op::Read { page, buffer } | Op::ReadPart { page, buffer, .. } => (TransferDirection::Read, page, buffer),
            Op::Write { page, buffer } => (TransferDirection::Write, page, buffer),
            Op::Discard { page, count } => {
                let result = self.region.discard(page, count);
                self.ended.push_back(Completion { tag, result, buffer: None });
                return Ok(());
            }
        };
        if let Err(error) = self.region.check(page, buffer.pages() as u64) {
            self.ended.push_back(Completion { tag, result: Err(error), buffer: Some(buffer) });
            return Ok(());
        }
        let index = self.free_operations.pop().expect("fewer than SLOTS are in flight");
        let deadline_at = now_ns().saturating_add(deadline.as_nanos().min(u64::MAX.into()) as u64);
        self.next_deadline = self.next_deadline.min(deadline_at);
        self.operations[index] = Some(SsdOperation {
            tag,
            page: page.0,
            way,
            buffer,
            begun: 0,
            transfers: 0,
            claimed: None,
            admitted: 0,
            result: Ok(()),
            priority,
            deadline,
            deadline_at,
        });
        match priority {
            Priority::Demand => self.demand.push_back(index),
            Priority::Background => self.background.push_back(index),
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.ended.is_empty() || !matches!(self.engine, Engine::Calls { .. }) {
            self.work();
        }
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        SLOTS - self.free_operations.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        let limit = now_ns().saturating_add(timeout.as_nanos().min(u64::MAX.into()) as u64);
        let spin_until = limit.min(now_ns() + SPIN.as_nanos() as u64);
        loop {
            self.work();
            let now = now_ns();
            if !self.ended.is_empty() || self.in_flight() == 0 || now >= limit {
                return;
            }
            if now < spin_until {
                core::hint::spin_loop();
                continue;
            }
            let left = Duration::from_nanos(limit.min(self.next_deadline.max(now + 1)) - now);
            match self.under_way() {
                0 => process::sleep(left.min(SLICE)),
                _ => self.engine.wait(left),
            }
        }
    }
}

impl Drop for SsdLane {
    fn drop(&mut self) {
        if self.region.abandoned.load(Ordering::Relaxed) {
            return;
        }
        (0..SLOTS).for_each(|index| self.give_up(index));
        // A place that is still written to must not become another page's.
        let until = now_ns() + FAREWELL.as_nanos() as u64;
        while self.under_way() > 0 && now_ns() < until {
            if !self.collect() {
                self.engine.wait(SLICE);
            }
        }
    }
}
