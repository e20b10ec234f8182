//! The driver of a task: a future that leaves a waker and lets others run.

use super::{AccessFault, FaultStep, FetchTarget};
use crate::error::FarError;
use crate::heap::{
    AccessMode, FetchFlight, HeapInner, ReclaimRound, ReclaimTurn, Scope, ThreadState, WaiterTicket, Watermark, count,
};
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, ready};
use farfield_core::heap::fault::{want_object, want_page};
use farfield_core::heap::{FrameId, SlotHint};
use std::time::Instant;

/// Future that ends when a page or object is near; it stays so until the scope ends or is renewed.
///
/// Yields the place of the object, or of the start of the page. If the future is dropped, nobody
/// waits any more, but the page or object still arrives.
pub(crate) struct FaultFuture<'a> {
    core: &'a HeapInner,
    scope: &'a Scope<'a>,
    fault: AccessFault,
    /// True if the scope counts this as awaiting something.
    awaits: bool,
    wait: FaultState,
}

/// State of a wait that does not depend on the scope.
#[derive(Default)]
pub(super) struct FaultState {
    ticket: Option<WaiterTicket>,
    /// Number of frames that must become free; 0 if there was room. If not 0, the scope is marked
    /// as hungry.
    goal: u32,
    /// Place in the queue of tasks that wait for room.
    turn: Option<ReclaimTurn>,
    /// Time when the first wait that is not for a flight began: flights have deadlines of their
    /// own.
    since: Option<Instant>,
}

impl FaultState {
    /// Ends the wait.
    pub(super) fn stop(&mut self, core: &HeapInner) {
        if let Some(ticket) = self.ticket.take() {
            core.waiters.forget(ticket);
        }
        self.leave_queue(core);
    }

    /// Leaves the queue for room, because no more room is needed.
    fn leave_queue(&mut self, core: &HeapInner) {
        // If it was woken, that wake-up is for another task.
        if let Some(turn) = self.turn.take()
            && !core.waiters.leave_room(turn)
            && core.waiters.has_frame_waiters()
        {
            core.reclaimer.ring();
        }
    }
}

impl HeapInner {
    /// Marks the flight of this number, of a page or a handle, as wanted, so that a task is told
    /// when it lands; false if it is not on its way.
    fn want(&self, number: u32) -> bool {
        match number.checked_sub(self.pages) {
            Some(object) => want_object(self, object),
            None => want_page(self, number),
        }
    }
}

/// Flight that begins when this is dropped, also if a task's waker panics: nobody else can begin it.
struct BeginOnDrop<'a> {
    core: &'a HeapInner,
    record: &'a ThreadState,
    flight: Option<FetchFlight>,
}

impl Drop for BeginOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.core.begin(self.record, flight);
        }
    }
}

impl<'a> FaultFuture<'a> {
    pub(crate) fn new(scope: &'a Scope<'a>, number: u32, mode: AccessMode) -> FaultFuture<'a> {
        FaultFuture::resume(scope, AccessFault::of_task(number, mode), FaultState::default())
    }

    /// Resumes a wait that another future began, in a scope that has ended.
    pub(super) fn resume(scope: &'a Scope<'_>, fault: AccessFault, wait: FaultState) -> FaultFuture<'a> {
        if wait.goal > 0 {
            scope.record.set_hungry(scope.open, true);
        }
        FaultFuture { core: scope.core, scope, fault, awaits: false, wait }
    }

    /// Suspends the wait because the scope ends.
    pub(super) fn suspend(mut self) -> (AccessFault, FaultState) {
        let wait = core::mem::take(&mut self.wait);
        self.wait.goal = wait.goal;
        (self.fault, wait)
    }

    /// Checks whether it waits for free frames.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.wait.goal > 0
    }

    /// Waits for something that is about to happen; fails with [`FarError::Stalled`] when the
    /// heap's patience is over.
    fn still<T>(&mut self) -> Poll<Result<T, FarError>> {
        let after = self.wait.since.get_or_insert_with(Instant::now).elapsed();
        if after > self.core.patience { Poll::Ready(Err(self.core.stalled(after))) } else { Poll::Pending }
    }

    /// Serves the fault until its value is near, or the task must wait.
    fn serve(&mut self, context: &mut Context<'_>) -> Poll<Result<SlotHint, FarError>> {
        let (core, record) = (self.core, self.scope.record);
        let mut step = self.fault.look(core, record);
        loop {
            step = match step {
                FaultStep::Done(place) => return Poll::Ready(Ok(place)),
                FaultStep::WaitFor(number) => {
                    // What was seen may have landed, and its waiters may have been told.
                    if self.wait(number, context, || core.want(number)) {
                        core.promote_to_demand(record, number);
                        core.attend();
                        return Poll::Pending;
                    }
                    self.fault.look(core, record)
                }
                FaultStep::Retry => {
                    context.waker().wake_by_ref();
                    return self.still();
                }
                FaultStep::Far(target) => self.fault.begin(core, record, target, None)?,
                FaultStep::NeedFrames(target) => {
                    let frame = ready!(self.take_wanted_frames(target, context))?;
                    self.fault.begin(core, record, target, Some(frame))?
                }
                FaultStep::Submit(flight) => {
                    // It was marked as wanted when it was taken, and nobody lands it before it begins.
                    let number = flight.number(core);
                    let begins = BeginOnDrop { core, record, flight: Some(flight) };
                    assert!(self.wait(number, context, || true));
                    drop(begins);
                    core.attend();
                    return Poll::Pending;
                }
                FaultStep::Make(_) => unreachable!("a task makes nothing"),
            };
        }
    }

    /// Waits for the flight of this number, if `mark` says that it is under way and has been marked
    /// as wanted.
    fn wait(&mut self, number: u32, context: &mut Context<'_>, mark: impl FnOnce() -> bool) -> bool {
        // The page or object that it waited for until now keeps nothing near.
        if !self.scope.open.keeps() {
            self.scope.record.renew(&self.core.epoch, self.scope.open);
        }
        self.wait.ticket = self.core.waiters.wait(number, context.waker(), mark);
        let waits = self.wait.ticket.is_some();
        if waits {
            self.stop_hunger();
            if !core::mem::replace(&mut self.awaits, true) {
                let awaited = &self.scope.open.awaited;
                awaited.set(awaited.get() + 1);
            }
        }
        waits
    }

    /// Takes frames as [`HeapInner::take_wanted_frames`] does, for a task.
    fn take_wanted_frames(
        &mut self,
        target: FetchTarget,
        context: &mut Context<'_>,
    ) -> Poll<Result<FrameId, FarError>> {
        let (pages, is_clean) = (target.frames(), target.stays_clean(self.fault.mode));
        self.take_frames(pages, context).map(|frames| match frames {
            Err(error) if is_clean => self.core.take_to_read(self.scope.record, pages, false, error),
            frames => frames,
        })
    }

    /// Takes frames as [`HeapInner::take_frames`] does, for a task: others run while it waits.
    fn take_frames(&mut self, pages: u32, context: &mut Context<'_>) -> Poll<Result<FrameId, FarError>> {
        let (core, record, open) = (self.core, self.scope.record, self.scope.open);
        // First come, first served.
        let before = core.admission.waiting();
        if (self.wait.goal > 0 || !core.waiters.has_frame_waiters())
            && let Some(frame) = core.frames.take(pages, Watermark::Queued(before))
        {
            if core.frames.room() < core.reserve().low {
                core.reclaimer.wake();
            }
            return Poll::Ready(Ok(frame));
        }
        core.check_size(pages)?;
        let is_first = self.wait.goal == 0;
        if is_first {
            count(&record.counters.throttled);
            record.set_hungry(open, true);
            self.wait.goal = core.first_goal(pages);
        }
        // Runs the evictor itself, unless others came first: the reclaimer may be waiting for the
        // scope that we are in.
        if !is_first || !core.waiters.has_frame_waiters() {
            // Others of the same thread may go on and make room, as long as they have not looked
            // for any.
            let is_own = |epoch| !is_first && waits_for_itself(self.scope, epoch);
            match core.make_frames(record, pages, &mut self.wait.goal, before, is_own)? {
                ReclaimRound::Frame(frame) => return Poll::Ready(Ok(frame)),
                ReclaimRound::OwnScope => {
                    return Poll::Ready(core.frames.take(pages, Watermark::Emergency).ok_or(FarError::NearFull));
                }
                _ => {}
            }
        }
        let since = *self.wait.since.get_or_insert_with(Instant::now);
        self.wait.turn = Some(core.waiters.wait_for_room(self.wait.turn, context.waker(), since));
        // After that: at the end of its next round the reclaimer wakes the tasks that wait.
        core.reclaimer.ring();
        self.still()
    }

    fn stop_waiting(&mut self) {
        self.wait.stop(self.core);
        self.stop_hunger();
        let open = self.scope.open;
        if core::mem::take(&mut self.awaits) {
            open.awaited.set(open.awaited.get() - 1);
        }
    }

    /// Ends the wait for room, because there is some or none is needed.
    fn stop_hunger(&mut self) {
        self.wait.leave_queue(self.core);
        if core::mem::take(&mut self.wait.goal) > 0 {
            self.scope.record.set_hungry(self.scope.open, false);
        }
    }
}

/// Checks whether this thread would wait for itself (a deadlock).
///
/// All that could leave since this epoch waits for scopes of the thread, this one among them, and
/// all their tasks wait for room.
fn waits_for_itself(scope: &Scope<'_>, epoch: u64) -> bool {
    let open = scope.open;
    open.is_used() && open.began() <= epoch && !scope.record.keeps_and_goes_on(epoch)
}

impl Future for FaultFuture<'_> {
    type Output = Result<SlotHint, FarError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Some(ticket) = this.wait.ticket.take() {
            match this.core.waiters.look(ticket, context.waker()) {
                Ok(result) => result?,
                Err(ticket) => {
                    this.wait.ticket = Some(ticket);
                    return Poll::Pending;
                }
            }
        }
        let answer = this.serve(context);
        if answer.is_ready() {
            this.stop_waiting();
        }
        answer
    }
}

impl Drop for FaultFuture<'_> {
    fn drop(&mut self) {
        self.stop_waiting();
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a task that counts as one that waits for room when it does not: others
    //! believe that nobody goes on, and stay behind it. And against work for each task that is as
    //! much as there are tasks.
    use super::*;
    use crate::Heap;
    use crate::heap::{EvictionOutcome, EvictionUrgency};
    use core::sync::atomic::Ordering;
    use core::task::Waker;
    use farfield_core::heap::{FrameWord, State};

    fn far_page(core: &HeapInner) -> u32 {
        let is_far = |page: &u32| FrameWord(core.words[*page].load(Ordering::Acquire)).state() == State::Far;
        (0..core.segments.high_page()).find(is_far).unwrap()
    }

    const TASKS: usize = 4000;

    /// Thousands of tasks wait for room, of which one in so many holds something, behind an older
    /// scope. How many scopes they look at.
    fn looks_of_many(heap: &Heap, one_in: usize) -> u64 {
        let core = heap.core();
        // Until nothing can leave but what the older scope holds back.
        let mut frames = Vec::new();
        let mut outcome = None;
        while !matches!(outcome, Some(EvictionOutcome::Blocked(_))) {
            frames.extend(core::iter::from_fn(|| core.frames.take(1, Watermark::Normal)));
            outcome = core.evictor.try_run(core, core.frames.spare() + 1, EvictionUrgency::Demand).transpose().unwrap();
        }
        let scopes: Vec<_> = (0..TASKS).map(|_| heap.enter()).collect();
        scopes.iter().step_by(one_in).skip(1).for_each(|scope| scope.open.used.set(true));
        let page = far_page(core);
        let mut context = Context::from_waker(Waker::noop());
        let mut faults: Vec<_> =
            scopes.iter().map(|scope| Box::pin(FaultFuture::new(scope, page, AccessMode::Read))).collect();
        for _ in 0..4 {
            for fault in &mut faults {
                assert!(fault.as_mut().poll(&mut context).is_pending());
                assert!(fault.waits_for_room());
                // Somebody else cools a batch.
                core.next_epoch();
            }
        }
        frames.into_iter().for_each(|frame| core.frames.put(frame, 1));
        scopes[0].record.looks()
    }

    #[test]
    fn thousands_that_wait_for_room_look_at_few_others_each() {
        for (is_own, one_in) in [(true, TASKS), (true, 10), (false, TASKS), (false, 10)] {
            let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
            let values: Vec<_> = (0..512u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
            heap.core().reclaimer.stop();
            let oldest = heap.enter();
            values[0].get(&oldest).unwrap();
            let looks = if is_own {
                looks_of_many(&heap, one_in)
            } else {
                std::thread::scope(|threads| threads.spawn(|| looks_of_many(&heap, one_in)).join().unwrap())
            };
            assert!(looks < 4 * TASKS as u64 * 100, "{is_own}, {one_in}: {looks} scopes were looked at");
            drop(oldest);
            drop(values);
            heap.verify();
        }
    }

    #[test]
    fn who_waits_for_a_flight_does_not_wait_for_room() {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
        let values: Vec<_> = (0..512u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        let core = heap.core();
        core.evictor.paused(|| {
            let page = far_page(core);
            let mut frames: Vec<_> = core::iter::from_fn(|| core.frames.take(1, Watermark::Emergency)).collect();
            let scope = heap.enter();
            let mut fault = core::pin::pin!(FaultFuture::new(&scope, page, AccessMode::Read));
            let mut context = Context::from_waker(Waker::noop());
            assert!(fault.as_mut().poll(&mut context).is_pending());
            assert!(fault.waits_for_room());
            assert!(scope.open.is_hungry());
            frames.drain(..core.first_goal(1) as usize).for_each(|frame| core.frames.put(frame, 1));
            assert!(fault.as_mut().poll(&mut context).is_pending());
            assert!(!fault.waits_for_room() && !core.waiters.has_frame_waiters());
            assert!(!scope.open.is_hungry());
            frames.into_iter().for_each(|frame| core.frames.put(frame, 1));
        });
        drop(values);
        heap.verify();
    }
}
