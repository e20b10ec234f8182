//! Fetching units and objects, with or without waiting for them.
//!
//! A fetch begins when a unit's page becomes Loading, or an object's handle Moving, and a flight
//! of the thread's lane owns it. It ends with `HeapInner::land`, in any thread that polls the lane:
//! the lane's own at its next miss, or any thread that waits for something (`help`).
//!
//! Numbers are those within the heap: of a page, or above all pages of a handle.

use super::io::{FetchFlight, FetchLane};
use super::segments::TransferUnit;
use super::threads::ThreadState;
use super::{Backoff, HeapInner};
use crate::error::FarError;
use core::sync::atomic::Ordering;
use core::task::Waker;
use core::time::Duration;
use farfield_core::heap::FrameId;
use farfield_core::heap::fault::{FetchIntent, land_page};
use farfield_pool::{Buffer, PoolError, Priority};
use std::sync::{MutexGuard, PoisonError, TryLockError};

impl HeapInner {
    /// Starts prefetches, which own their pages and handles. Returns how many have begun.
    pub(crate) fn launch_ahead(&self, record: &ThreadState, flights: Vec<FetchFlight>) -> u32 {
        if flights.is_empty() {
            return 0;
        }
        let started = flights.len() as u32;
        match self.open_io(record) {
            Ok(mut guard) => {
                if let Some(io) = guard.as_mut() {
                    for flight in flights {
                        io.launch(self, flight, Priority::Background);
                    }
                    io.collect(self);
                }
                self.close_io(record, guard);
                started
            }
            Err(error) => {
                flights.into_iter().for_each(|flight| self.fail(flight, error));
                0
            }
        }
    }

    /// Runs a flight, which owns its page or handle, and waits for it.
    pub(crate) fn fetch(&self, record: &ThreadState, flight: FetchFlight) -> Result<(), FarError> {
        self.fetch_all(record, [flight])
    }

    /// Runs these flights, which own their pages and handles, and waits for all of them.
    pub(crate) fn fetch_all(
        &self,
        record: &ThreadState,
        flights: impl IntoIterator<Item = FetchFlight>,
    ) -> Result<(), FarError> {
        let flights = flights.into_iter();
        let mut guard = match self.open_io(record) {
            Ok(guard) => guard,
            Err(error) => {
                flights.for_each(|flight| self.fail(flight, error));
                return Err(error.into());
            }
        };
        let Some(io) = guard.as_mut() else { unreachable!("the lane was just opened") };
        flights.for_each(|flight| io.launch_awaited(self, flight));
        record.in_flight.store(io.in_flight() as u32, Ordering::Release);
        record.waits_for_pool.store(true, Ordering::Relaxed);
        let outcome = io.wait_for_awaited(self);
        record.waits_for_pool.store(false, Ordering::Relaxed);
        self.end_wait(record, guard, outcome)
    }

    /// Starts a flight, which owns its page or handle, for a task that waits.
    pub(crate) fn begin(&self, record: &ThreadState, flight: FetchFlight) {
        match self.open_io(record) {
            Ok(mut guard) => {
                if let Some(io) = guard.as_mut() {
                    io.launch(self, flight, Priority::Demand);
                }
                self.close_io(record, guard);
            }
            Err(error) => self.fail(flight, error),
        }
    }

    /// Gives a prefetch demand priority because a task waits for it, if it is on the thread's own
    /// lane.
    pub(crate) fn promote_to_demand(&self, record: &ThreadState, number: u32) {
        if let Ok(mut guard) = self.open_io(record) {
            match guard.as_mut() {
                Some(io) if io.has(self, number) => io.promote_to_demand(self, number),
                _ => record.waits_for_others.set(true),
            }
            self.close_io(record, guard);
        }
    }

    /// Ensures that the lane of this thread is polled while a task waits.
    pub(crate) fn attend(&self) {
        if !crate::task::is_polled(self.serial) {
            self.poller.ring(self);
        }
    }

    /// Waits until something has arrived on this thread's lane, at most for `most`, and lands it.
    /// False if nothing is under way.
    pub(crate) fn wait_for_any(&self, record: &ThreadState, most: Duration) -> bool {
        let mut guard = record.io.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(io) = guard.as_mut().filter(|io| io.in_flight() > 0) else { return false };
        if io.collect(self) == 0 {
            io.wait(most);
            io.collect(self);
        }
        self.close_io(record, guard);
        true
    }

    /// Fails a flight that did not even begin.
    fn fail(&self, flight: FetchFlight, error: PoolError) {
        if self.land(flight, Err(error), None) {
            self.wake_tasks(vec![(flight.number(self), Err(error))]);
        }
    }

    /// Lets go of a lane that the thread has waited for. If `outcome` is `None`, the lane has
    /// forgotten a request, and is given up.
    fn end_wait(
        &self,
        record: &ThreadState,
        mut guard: MutexGuard<'_, Option<FetchLane>>,
        outcome: Option<Result<(), PoolError>>,
    ) -> Result<(), FarError> {
        let forgotten = if outcome.is_none() { guard.take() } else { None };
        let wanted = forgotten.map(|io| io.abandon(self));
        self.close_io(record, guard);
        self.wake_tasks(wanted.unwrap_or_default());
        outcome.ok_or(FarError::Stalled { after: self.patience * 2 })?.map_err(FarError::Pool)
    }

    /// Locks the thread's lane, and opens it if needed. The thread itself holds it while it reads;
    /// others hold it for a look.
    fn open_io<'a>(&self, record: &'a ThreadState) -> Result<MutexGuard<'a, Option<FetchLane>>, PoolError> {
        let mut io = record.io.lock().unwrap_or_else(PoisonError::into_inner);
        if io.is_none() {
            *io = Some(FetchLane::new(&*self.backend, self.patience)?);
        }
        Ok(io)
    }

    /// Unlocks a lane, publishes its statistics, and wakes the tasks that wait for what has landed
    /// there.
    fn close_io(&self, record: &ThreadState, mut guard: MutexGuard<'_, Option<FetchLane>>) {
        let in_flight = guard.as_ref().map_or(0, FetchLane::in_flight);
        record.in_flight.store(in_flight as u32, Ordering::Release);
        let buffer_bytes = guard.as_ref().map_or(0, FetchLane::more_bytes);
        let grown = record.buffer_bytes.load(Ordering::Relaxed) != buffer_bytes;
        record.buffer_bytes.store(buffer_bytes, Ordering::Relaxed);
        let (depth, answer_ns) = guard.as_ref().map_or((0, 0), FetchLane::link);
        record.prefetch_depth.store(depth, Ordering::Relaxed);
        record.answer_ns.store(answer_ns, Ordering::Relaxed);
        let wanted = guard.as_mut().map(|io| core::mem::take(&mut io.wanted));
        drop(guard);
        if grown {
            self.fit();
        }
        self.wake_tasks(wanted.unwrap_or_default());
    }

    /// Wakes the tasks that wait for these numbers.
    pub(crate) fn wake_tasks(&self, wanted: Vec<(u32, Result<(), PoolError>)>) {
        let mut wakers = Vec::with_capacity(wanted.len());
        for (number, result) in wanted {
            self.waiters.end(number, result.map_err(FarError::Pool), &mut wakers);
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends a flight; `buffer` has an object's page. True if tasks wait for it, which must be told.
    pub(crate) fn land(&self, flight: FetchFlight, result: Result<(), PoolError>, buffer: Option<&Buffer>) -> bool {
        match flight {
            FetchFlight::Unit { unit, frame, intent } => self.land_unit(unit, frame, intent, result),
            FetchFlight::Object(flight) => {
                let bytes = buffer.filter(|_| result.is_ok()).map(|buffer| &buffer.page(0)[flight.part().1.range()]);
                self.land_object(flight, bytes)
            }
        }
    }

    fn land_unit(
        &self,
        unit: TransferUnit,
        frame: FrameId,
        intent: FetchIntent,
        result: Result<(), PoolError>,
    ) -> bool {
        match result {
            Ok(()) => self.frames.infos[frame.0].moved_in(unit.page),
            Err(_) => self.frames.put(frame, unit.pages),
        }
        let wanted = land_page(self, unit.page, result.is_ok().then_some(frame), intent);
        self.land_log_page(unit.page, result.is_ok());
        wanted
    }

    /// Lands what has arrived on any lane, for a thread that waits, perhaps for `number`.
    pub(crate) fn help(&self, record: &ThreadState, number: Option<u32>) {
        if record.in_flight.load(Ordering::Relaxed) > 0 {
            self.look(record, number);
        }
        for other in self.threads.in_flight() {
            if !core::ptr::eq(&*other, record) {
                self.look(&other, number);
            }
        }
    }

    /// Lands what has arrived on any lane. Returns the number of flights that have not landed.
    pub(crate) fn help_all(&self) -> u32 {
        let records = self.threads.in_flight();
        records.iter().for_each(|record| self.look(record, None));
        records.iter().map(|record| record.in_flight.load(Ordering::Acquire)).sum()
    }

    /// Waits until nothing is in flight. The lanes' deadlines ensure that this ends.
    pub(crate) fn land_all(&self) {
        let mut backoff = Backoff::new(self.patience * 2);
        while self.help_all() > 0 && backoff.wait().is_ok() {}
    }

    /// Lands what has arrived on a lane, and gives demand priority to the flight of `wanted` there.
    /// Does nothing if another thread holds the lane.
    pub(crate) fn look(&self, record: &ThreadState, wanted: Option<u32>) {
        let mut guard = match record.io.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let Some(io) = guard.as_mut() else { return };
        if let Some(number) = wanted {
            io.promote_to_demand(self, number);
        }
        io.collect(self);
        self.close_io(record, guard);
    }
}
