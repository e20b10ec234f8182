//! Lane to memory that the processor loads from: submitted operations end at the next polls, demand
//! first.

use super::{MappedStoreError, Region};
use crate::contract::backend::hand_over;
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::process::{self, now_ns};
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations of one lane that may be submitted and not yet collected.
const SLOTS: usize = 256;
/// Sleep of a lane when only others can give it what it needs.
const SLICE: Duration = Duration::from_micros(200);

/// Operation, and the time when it is too late for it.
struct PendingWrite {
    request: LaneRequest,
    at: u64,
}

/// Lane to the mapped memory of a region.
pub(super) struct MappedLane {
    region: Arc<Region>,
    demand: VecDeque<PendingWrite>,
    background: VecDeque<PendingWrite>,
    ended: VecDeque<Completion>,
    /// Position of the last places that were taken.
    rover: u64,
    /// Set if the next write needs places that others have.
    is_stuck: bool,
}

impl MappedLane {
    pub(super) fn new(region: Arc<Region>) -> MappedLane {
        MappedLane {
            region,
            demand: VecDeque::with_capacity(SLOTS),
            background: VecDeque::with_capacity(SLOTS),
            ended: VecDeque::with_capacity(SLOTS),
            // Lanes that begin elsewhere rarely want the same places.
            rover: now_ns() >> 8,
            is_stuck: false,
        }
    }

    fn read(&self, page: PageId, buffer: &mut Buffer) -> Result<(), PoolError> {
        self.region.check(page, buffer.pages() as u64)?;
        if self.region.is_cut() {
            return Err(self.region.corrupt(page.0));
        }
        for index in 0..buffer.pages() {
            let sum = self.region.load(page.0 + index as u64, buffer.page_mut(index))?;
            buffer.sums_mut()[index] = sum;
        }
        Ok(())
    }

    fn write(&mut self, page: PageId, buffer: &Buffer) -> Result<Result<(), MappedStoreError>, PoolError> {
        self.region.check(page, buffer.pages() as u64)?;
        debug_assert_eq!(buffer.bytes().len(), buffer.sums().len() * PAGE_BYTES);
        Ok(self.region.store(page.0, buffer.bytes(), buffer.sums(), &mut self.rover))
    }

    /// Carries an operation out, or gives it back to be tried again.
    fn work_on(&mut self, due: PendingWrite) -> Result<(), PendingWrite> {
        let LaneRequest { tag, priority, deadline, op } = due.request;
        let (result, buffer) = match op {
            // Reading a part saves distance, and here is little of that.
            Op::Read { page, mut buffer } | Op::ReadPart { page, mut buffer, .. } => {
                (self.read(page, &mut buffer), Some(buffer))
            }
            Op::Write { page, buffer } => match self.write(page, &buffer) {
                Ok(Err(MappedStoreError::Busy)) if now_ns() < due.at => {
                    let request = LaneRequest { tag, priority, deadline, op: Op::Write { page, buffer } };
                    self.is_stuck = true;
                    return Err(PendingWrite { request, at: due.at });
                }
                Ok(Err(MappedStoreError::Busy)) => {
                    (Err(PoolError::TimedOut { server: self.region.server, after: deadline }), Some(buffer))
                }
                result => {
                    (result.and_then(|stored| stored.map_err(|error| error.into_pool(&self.region))), Some(buffer))
                }
            },
            Op::Discard { page, count } => (self.region.discard(page, count), None),
        };
        self.ended.push_back(Completion { tag, result, buffer });
        Ok(())
    }
}

impl Lane for MappedLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let queue = match request.priority {
            Priority::Demand => &mut self.demand,
            Priority::Background => &mut self.background,
        };
        let at = now_ns().saturating_add(request.deadline.as_nanos().min(u64::MAX.into()) as u64);
        queue.push_back(PendingWrite { request, at });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.is_stuck = false;
        while let Some(due) = self.demand.pop_front() {
            if let Err(due) = self.work_on(due) {
                self.demand.push_front(due);
                break;
            }
        }
        // A caller that waits for a demand read does not wait for these.
        if self.ended.is_empty()
            && let Some(due) = self.background.pop_front()
            && let Err(due) = self.work_on(due)
        {
            self.background.push_front(due);
        }
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        self.demand.len() + self.background.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        // Submitted operations end at the next polls, unless others have the places that they need.
        if self.is_stuck && self.ended.is_empty() {
            process::sleep(timeout.min(SLICE));
        }
    }
}
