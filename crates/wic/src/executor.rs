//! The executor: runs functions at one place, in turns, on one thread.
//!
//! Futures lie in slots that the caller provides, one after the other. The state of their tasks is
//! in a table that the thread keeps, so a call allocates nothing. In a sweep, each task that can go
//! on is polled once. Then the host submits all their requests at once. There are no wakers: a
//! place knows which task runs, and tells which task may go on after an event.
//!
//! Every access takes steps. A task gets a slice of them. When the slice is used up, accesses do
//! not complete any more, so that the task returns to this executor, which checks its budget and
//! time. So no function can go on by ignoring an error: it is dropped.
//!
//! The tests guard against two dangers: a function that never ends and keeps others from going on,
//! and a wait that never ends.

use crate::{Fault, Stop};
use core::cell::{Cell, RefCell};
use core::future::{Future, poll_fn};
use core::ops::DerefMut;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use slab::Slab;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Steps that a task may take before the others have their turn: about 0.2 ms at a server.
const SLICE: u64 = 1024;
/// Number of bytes that cost a step, in addition to the step of the access itself.
const BYTES_PER_STEP: usize = 4096;

/// Limits of a function in steps and time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Budget {
    /// Most steps: one for each access, and one for each whole 4 KiB of it.
    pub steps_max: u64,
    /// Deadline of the function.
    pub until: Option<Instant>,
}

/// Step counter of the running task, by which a place knows which task runs.
pub(crate) struct StepMeter {
    task: Cell<u32>,
    left: Cell<u64>,
    is_spent: Cell<bool>,
    has_yielded: Cell<bool>,
    sleeps_until: Cell<Option<Instant>>,
    /// Position in the line of a lock in which the task waits while it sleeps.
    wait_ticket: Cell<Option<WaitTicket>>,
    /// Whether the task goes on because its turn may have come.
    is_notified: Cell<bool>,
    /// Locks that were given back here since the last sweep.
    freed: RefCell<Vec<u64>>,
    began: Cell<Option<Instant>>,
    until: Cell<Option<Instant>>,
}

/// A position in the line of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WaitTicket {
    /// Offset of the lock.
    pub(crate) lock: u64,
    pub(crate) ticket: u32,
}

impl WaitTicket {
    /// Compares tickets as serial numbers, which wrap around.
    fn is_before(self, other: WaitTicket) -> bool {
        (self.ticket.wrapping_sub(other.ticket) as i32) < 0
    }
}

impl StepMeter {
    pub(crate) fn new() -> StepMeter {
        StepMeter {
            task: Cell::new(0),
            left: Cell::new(0),
            is_spent: Cell::new(false),
            has_yielded: Cell::new(false),
            sleeps_until: Cell::new(None),
            wait_ticket: Cell::new(None),
            is_notified: Cell::new(false),
            freed: RefCell::default(),
            began: Cell::new(None),
            until: Cell::new(None),
        }
    }

    /// Returns the number of the task that runs.
    pub(crate) fn task(&self) -> u32 {
        self.task.get()
    }

    /// Returns the time since the task began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.get().map_or(Duration::ZERO, |began| began.elapsed())
    }

    /// Returns the time that the task has left.
    pub(crate) fn time_left(&self) -> Duration {
        self.until.get().map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
    }

    fn enter(&self, task: u32, slice: u64, began: Instant, until: Option<Instant>, is_notified: bool) {
        self.task.set(task);
        self.wait_ticket.set(None);
        self.is_notified.set(is_notified);
        self.left.set(slice);
        self.is_spent.set(false);
        self.has_yielded.set(false);
        self.sleeps_until.set(None);
        self.began.set(Some(began));
        self.until.set(until);
    }

    /// Takes the steps of an access to this many bytes. Never completes when the slice is used up.
    pub(crate) fn step(&self, bytes: usize) -> impl Future<Output = ()> + '_ {
        let steps = 1 + (bytes / BYTES_PER_STEP) as u64;
        poll_fn(move |_| match self.left.get().checked_sub(steps) {
            Some(left) => {
                self.left.set(left);
                Poll::Ready(())
            }
            None => {
                self.is_spent.set(true);
                Poll::Pending
            }
        })
    }

    /// Lets the other tasks have their turn.
    pub(crate) fn yield_now(&self) -> impl Future<Output = ()> + '_ {
        let mut yielded = false;
        poll_fn(move |_| {
            if core::mem::replace(&mut yielded, true) {
                return Poll::Ready(());
            }
            self.has_yielded.set(true);
            Poll::Pending
        })
    }

    /// Lets the other tasks go on for this time. A task in a line goes on earlier when its turn may
    /// have come.
    pub(crate) fn sleep_for(&self, time: Duration, ticket: Option<WaitTicket>) -> impl Future<Output = ()> + '_ {
        let until = Instant::now().checked_add(time);
        poll_fn(move |_| match until.filter(|until| Instant::now() < *until) {
            None => Poll::Ready(()),
            Some(_) if self.is_notified.take() => Poll::Ready(()),
            wake_at => {
                self.sleeps_until.set(wake_at);
                self.wait_ticket.set(ticket);
                Poll::Pending
            }
        })
    }

    /// Notes that a lock was given back here, so that the task whose turn it is need not wait until
    /// it looks again.
    pub(crate) fn free(&self, lock: u64) {
        let mut freed = self.freed.borrow_mut();
        if freed.last() != Some(&lock) {
            freed.push(lock);
        }
    }

    fn next_freed(&self) -> Option<u64> {
        self.freed.borrow_mut().pop()
    }
}

/// Shortest sleep: a shorter one costs more than another sweep.
pub(crate) const SLEEP_MIN: Duration = Duration::from_micros(20);

/// A place, as its executor sees it.
pub(crate) trait ExecutorHost {
    /// Whether a panic of a function is caught, and ends that function only.
    const CATCHES: bool;

    fn meter(&self) -> &StepMeter;

    /// Submits the requests of the tasks, and adds those that can go on to `ready`. If no task can,
    /// it may wait for one, for at most `may_wait`. Returns false if nothing is under way.
    fn turn(&self, ready: &mut VecDeque<u32>, may_wait: Option<Duration>) -> bool;

    /// Sleeps while nothing is under way and no task can go on for this time.
    fn sleep(&self, time: Duration) {
        if time < SLEEP_MIN { std::thread::yield_now() } else { std::thread::sleep(time) }
    }
}

/// A function about to run.
pub(crate) struct NewTask<F> {
    pub(crate) id: usize,
    pub(crate) future: F,
    pub(crate) budget: Budget,
}

/// State of the task in a slot.
struct TaskRecord {
    id: usize,
    budget: Budget,
    steps: u64,
    began: Instant,
    /// Whether it waited for an event, so that time has passed.
    waited: bool,
    is_notified: bool,
}

/// A task that goes on when its time or its turn comes.
struct SleepingTask {
    until: Instant,
    task: u32,
    wait_ticket: Option<WaitTicket>,
}

/// Tables of an executor. Tasks have the numbers of their slots.
#[derive(Default)]
struct TaskTable {
    tasks: Slab<TaskRecord>,
    ready: VecDeque<u32>,
    sleeping: Vec<SleepingTask>,
}

thread_local! {
    /// Tables of the last executor of this thread, empty.
    static TASK_TABLE: Cell<TaskTable> = Cell::default();
}

/// Runs the functions that `next` returns until it returns `None`, as many at a time as there are
/// slots. Calls `end` for each with its result and its number of steps.
pub(crate) fn run<H: ExecutorHost, F: Future<Output = Result<A, Fault>>, A>(
    host: &H,
    slots: &mut [Pin<impl DerefMut<Target = Option<F>>>],
    next: impl FnMut() -> Option<NewTask<F>>,
    mut end: impl FnMut(usize, Result<A, Stop>, u64),
) {
    let TaskTable { mut tasks, mut ready, mut sleeping } = TASK_TABLE.take();
    let mut starts = core::iter::from_fn(next).fuse().peekable();
    // Whether there are more is checked before the clock is read, which costs as much as a fifth of
    // an access.
    while !tasks.is_empty() || (!slots.is_empty() && starts.peek().is_some()) {
        // Events of one sweep count as simultaneous.
        let now = Instant::now();
        wake(&mut sleeping, &mut ready, now);
        while tasks.len() < slots.len()
            && let Some(NewTask { id, future, budget }) = starts.next()
        {
            let task = TaskRecord { id, budget, steps: 0, began: now, waited: false, is_notified: false };
            // Below `slots.len()`: a number is new only if all others are taken.
            let index = tasks.insert(task);
            slots[index].set(Some(future));
            ready.push_back(index as u32);
        }
        if ready.is_empty() && !tasks.is_empty() {
            if let Some(until) = sleeping.iter().map(|sleeping| sleeping.until).min() {
                let time = until.saturating_duration_since(now);
                if !host.turn(&mut ready, Some(time)) && ready.is_empty() && !time.is_zero() {
                    host.sleep(time);
                }
                continue;
            }
            if !host.turn(&mut ready, Some(Duration::MAX)) && ready.is_empty() {
                // They wait for something that this place does not provide, and nobody will ever
                // wake them.
                for (index, task) in tasks.iter() {
                    vacate::<H, _>(&mut slots[index]);
                    end(task.id, Err(Stop::Stuck), task.steps);
                }
                tasks.clear();
            }
            continue;
        }
        for _ in 0..ready.len() {
            let Some(index) = ready.pop_front() else { break };
            // A task that has ended may have been made ready once more.
            let (slot, Some(task)) = (&mut slots[index as usize], tasks.get_mut(index as usize)) else { continue };
            let Some(verdict) = resume(host, slot.as_mut().as_pin_mut(), task, index, now) else { continue };
            match verdict {
                PollOutcome::Yielded => ready.push_back(index),
                PollOutcome::Blocked => {}
                PollOutcome::Sleeping(until) => {
                    sleeping.push(SleepingTask { until, task: index, wait_ticket: host.meter().wait_ticket.get() })
                }
                PollOutcome::Completed(result) => {
                    vacate::<H, _>(slot);
                    let TaskRecord { id, steps, .. } = tasks.remove(index as usize);
                    end(id, result, steps);
                }
            }
        }
        host.turn(&mut ready, None);
        while let Some(lock) = host.meter().next_freed() {
            if let Some(index) = take_first(&mut sleeping, lock) {
                tasks[index as usize].is_notified = true;
                ready.push_back(index);
            }
        }
    }
    tasks.clear();
    ready.clear();
    sleeping.clear();
    TASK_TABLE.set(TaskTable { tasks, ready, sleeping });
}

/// Drops the future of a task that has ended.
fn vacate<H: ExecutorHost, F>(slot: &mut Pin<impl DerefMut<Target = Option<F>>>) {
    match H::CATCHES {
        // The result is known, and destructors do not change it.
        true => drop(catch_unwind(AssertUnwindSafe(|| slot.set(None)))),
        false => slot.set(None),
    }
}

/// Makes those tasks ready that have slept long enough.
fn wake(sleeping: &mut Vec<SleepingTask>, ready: &mut VecDeque<u32>, now: Instant) {
    ready.extend(sleeping.extract_if(.., |sleeping| sleeping.until <= now).map(|sleeping| sleeping.task));
}

/// Removes the task that is first in the line of a lock, and returns it. Tasks before it at other
/// places, or that have given up, it notices when it looks at the lock.
fn take_first(sleeping: &mut Vec<SleepingTask>, lock: u64) -> Option<u32> {
    let line = sleeping.iter().enumerate().filter_map(|(index, sleeping)| Some((index, sleeping.wait_ticket?)));
    let line = line.filter(|(_, ticket)| ticket.lock == lock);
    let (first, _) = line.reduce(|one, other| if other.1.is_before(one.1) { other } else { one })?;
    Some(sleeping.swap_remove(first).task)
}

enum PollOutcome<A> {
    Yielded,
    Blocked,
    Sleeping(Instant),
    Completed(Result<A, Stop>),
}

/// Polls a task once; `None` if it has ended already.
fn resume<H: ExecutorHost, F: Future<Output = Result<A, Fault>>, A>(
    host: &H,
    future: Option<Pin<&mut F>>,
    task: &mut TaskRecord,
    index: u32,
    now: Instant,
) -> Option<PollOutcome<A>> {
    let slice = SLICE.min(task.budget.steps_max - task.steps);
    let meter = host.meter();
    let mut future = future?;
    if core::mem::take(&mut task.waited) && is_over(task.budget.until, now) {
        return Some(PollOutcome::Completed(Err(Stop::TimedOut)));
    }
    meter.enter(index, slice, task.began, task.budget.until, core::mem::take(&mut task.is_notified));
    let mut poll = || future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    let polled = match H::CATCHES {
        true => catch_unwind(AssertUnwindSafe(poll)),
        false => Ok(poll()),
    };
    task.steps += slice - meter.left.get();
    Some(match polled {
        Err(_) => PollOutcome::Completed(Err(Stop::Panicked)),
        Ok(Poll::Ready(result)) => PollOutcome::Completed(result.map_err(Stop::Fault)),
        Ok(Poll::Pending) if meter.is_spent.get() => {
            // The rest of a slice that is too small for an access is lost.
            task.steps += meter.left.get();
            if task.steps >= task.budget.steps_max {
                PollOutcome::Completed(Err(Stop::Overrun { steps: task.steps }))
            } else if is_over(task.budget.until, now) {
                PollOutcome::Completed(Err(Stop::TimedOut))
            } else {
                PollOutcome::Yielded
            }
        }
        Ok(Poll::Pending) if meter.has_yielded.get() && is_over(task.budget.until, now) => {
            PollOutcome::Completed(Err(Stop::TimedOut))
        }
        Ok(Poll::Pending) if meter.has_yielded.get() => PollOutcome::Yielded,
        Ok(Poll::Pending) => {
            task.waited = true;
            match meter.sleeps_until.get() {
                Some(until) => PollOutcome::Sleeping(task.budget.until.map_or(until, |end| end.min(until))),
                None => PollOutcome::Blocked,
            }
        }
    })
}

fn is_over(until: Option<Instant>, now: Instant) -> bool {
    until.is_some_and(|until| now >= until)
}
