//! The executor: one thread, its tasks, and the lane that it polls when it has nothing else to do.

use super::join::{JoinHandle, joined};
use crate::Heap;
use crate::heap::HeapInner;
use core::cell::{Cell, RefCell};
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::{AtomicBool, Ordering};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use slab::Slab;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Wake;
use std::thread::Thread;

/// Runs tasks on one thread. While some wait for far values, others run; when all wait, the thread
/// polls the heap's pool.
///
/// Tasks may borrow anything that lives as long as the executor. They may hold scopes, and
/// references from them, while they wait: a scope belongs to its thread, and so does every task
/// that holds one. A scope costs the other threads as much as ever: pages that became cold after it
/// began stay near until it ends. So a task opens its scope late, and renews or closes it early.
///
/// ```
/// use farfield::{FarBox, Heap, task::Executor};
///
/// let heap = Heap::builder().near(4 << 20).build()?;
/// let values: Vec<FarBox<u64>> = (0..100).map(|n| heap.alloc(n)).collect::<Result<_, _>>()?;
/// let executor = Executor::new(&heap);
/// let sum = executor.block_on(async {
///     let tasks: Vec<_> = values.iter().map(|value| executor.spawn(async {
///         let scope = heap.enter();
///         value.fetch(&scope).await.copied()
///     })).collect();
///     let mut sum = 0;
///     for task in tasks {
///         sum += task.await??;
///     }
///     Ok::<u64, Box<dyn std::error::Error>>(sum)
/// })?;
/// assert_eq!(sum, 4950);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Executor<'env> {
    core: &'env HeapInner,
    tasks: RefCell<Slab<ExecutorTask<'env>>>,
    queue: Arc<RunQueue>,
    spawn_queue: Rc<SpawnQueue>,
}

type BoxedTask<'env> = Pin<Box<dyn Future<Output = ()> + 'env>>;

struct ExecutorTask<'env> {
    /// `None` while it runs.
    future: Option<BoxedTask<'env>>,
    waker: Arc<TaskWaker>,
    /// Whether the task was woken while it ran.
    again: bool,
}

/// Tasks made by [`spawn`], which the executor has not taken over yet.
#[derive(Default)]
struct SpawnQueue(RefCell<Vec<BoxedTask<'static>>>);

/// Run queue: numbers of the tasks to run.
struct RunQueue {
    woken: Mutex<VecDeque<u32>>,
    parked: AtomicBool,
    thread: Thread,
}

struct TaskWaker {
    number: u32,
    queued: AtomicBool,
    queue: Arc<RunQueue>,
}

/// Waker of the future of a `block_on`.
struct RootWaker {
    woken: AtomicBool,
    queue: Arc<RunQueue>,
}

/// Most tasks that run before the lane is polled.
const BATCH: usize = 64;
/// Longest sleep in the lane, and so the longest delay of a wake-up by another thread meanwhile.
const LANE_WAIT: Duration = Duration::from_millis(1);
/// Longest sleep while other threads bring what tasks of this thread wait for.
const OTHERS_WAIT: Duration = Duration::from_micros(50);

thread_local! {
    /// Serial number of the heap whose lane this thread polls now; 0: none.
    static POLLED: Cell<u64> = const { Cell::new(0) };
    /// The executor that runs on this thread now.
    static CURRENT: RefCell<Option<Rc<SpawnQueue>>> = const { RefCell::new(None) };
}

/// Checks whether an executor of this thread polls the lane of this heap.
pub(crate) fn is_polled(serial: u64) -> bool {
    POLLED.get() == serial
}

/// Makes a task of the executor that runs this code. The task may borrow nothing;
/// [`Executor::spawn`] makes tasks that do.
///
/// # Panics
/// Panics outside of an executor, as `tokio::spawn` does.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let current = CURRENT.with_borrow(Clone::clone).expect("spawn is for code that runs in an executor");
    let (handle, task) = joined(future);
    current.0.borrow_mut().push(task);
    handle
}

/// Guard that marks the thread as running an executor; the outer one is back afterwards.
struct ExecutorGuard {
    polled: u64,
    current: Option<Rc<SpawnQueue>>,
}

impl ExecutorGuard {
    fn new(executor: &Executor<'_>) -> ExecutorGuard {
        let current = CURRENT.replace(Some(executor.spawn_queue.clone()));
        ExecutorGuard { polled: POLLED.replace(executor.core.serial), current }
    }
}

impl Drop for ExecutorGuard {
    fn drop(&mut self) {
        POLLED.set(self.polled);
        CURRENT.set(self.current.take());
    }
}

impl<'env> Executor<'env> {
    /// Makes an executor of this thread, for tasks that use this heap. They may use other heaps
    /// too, but far values there are polled for by a thread of that heap, which takes longer.
    pub fn new(heap: &'env Heap) -> Executor<'env> {
        Executor::of(heap.core())
    }

    pub(crate) fn of(core: &'env HeapInner) -> Executor<'env> {
        let queue =
            RunQueue { woken: Mutex::default(), parked: AtomicBool::new(false), thread: std::thread::current() };
        Executor { core, tasks: RefCell::default(), queue: Arc::new(queue), spawn_queue: Rc::default() }
    }

    /// Makes a task; it begins when the executor runs.
    pub fn spawn<T: 'env>(&self, future: impl Future<Output = T> + 'env) -> JoinHandle<T> {
        let (handle, task) = joined(future);
        self.add(task);
        handle
    }

    fn add(&self, future: BoxedTask<'env>) {
        let mut tasks = self.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let number = entry.key() as u32;
        let waker = Arc::new(TaskWaker { number, queued: AtomicBool::new(true), queue: self.queue.clone() });
        entry.insert(ExecutorTask { future: Some(future), waker, again: false });
        self.queue.lock().push_back(number);
    }

    /// Runs all tasks until this future has ended, and returns its result. Tasks that have not
    /// ended go on with the next call.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let _running = ExecutorGuard::new(self);
        let mut future = core::pin::pin!(future);
        let root = Arc::new(RootWaker { woken: AtomicBool::new(true), queue: self.queue.clone() });
        let waker = Waker::from(root.clone());
        loop {
            if root.woken.swap(false, Ordering::AcqRel)
                && let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker))
            {
                return value;
            }
            if !self.turn() && !root.woken.load(Ordering::Acquire) {
                self.idle(|| root.woken.load(Ordering::SeqCst));
            }
        }
    }

    /// Runs tasks until all of them have ended.
    pub fn run(&self) {
        let _running = ExecutorGuard::new(self);
        while !self.is_empty() {
            if !self.turn() {
                self.idle(|| false);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.tasks.borrow().is_empty() && self.spawn_queue.0.borrow().is_empty()
    }

    /// Runs the tasks that are ready, then polls the lane. Returns false if no task was ready.
    fn turn(&self) -> bool {
        for task in self.spawn_queue.0.take() {
            self.add(task);
        }
        let mut ran = 0;
        while ran < BATCH
            && let Some(number) = self.queue.pop()
        {
            self.run_task(number);
            ran += 1;
        }
        let record = self.core.record();
        if ran > 0 && record.in_flight.load(Ordering::Relaxed) > 0 {
            // Sends the requests of the tasks, and lands what has arrived.
            self.core.look(record, None);
        }
        ran > 0
    }

    fn run_task(&self, number: u32) {
        let (mut future, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            // The task has ended, and was woken late.
            let Some(task) = tasks.get_mut(number as usize) else { return };
            let Some(future) = task.future.take() else {
                task.again = true;
                return;
            };
            (future, task.waker.clone())
        };
        waker.queued.store(false, Ordering::SeqCst);
        let waker = Waker::from(waker);
        // Panics of the task itself are caught inside (`joined`); these come from destructors.
        let poll = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut Context::from_waker(&waker))));
        if matches!(poll, Ok(Poll::Pending)) {
            let mut tasks = self.tasks.borrow_mut();
            if let Some(task) = tasks.get_mut(number as usize) {
                task.future = Some(future);
                if core::mem::take(&mut task.again) {
                    self.queue.lock().push_back(number);
                }
            }
            return;
        }
        let ended = self.tasks.borrow_mut().remove(number as usize);
        drop(ended);
        let _ = catch_unwind(AssertUnwindSafe(|| drop(future)));
    }

    /// Sleeps until a task can go on, or `woken` returns true.
    fn idle(&self, woken: impl Fn() -> bool) {
        let (core, record) = (self.core, self.core.record());
        let others = record.waits_for_others.get();
        if core.wait_for_any(record, if others { OTHERS_WAIT } else { LANE_WAIT }) || others {
            if others {
                // The other threads may be busy with something else.
                let in_flight = core.help_all();
                record.waits_for_others.set(in_flight > 0);
                self.queue.park(woken, Some(Duration::from_micros(1)).filter(|_| in_flight > 0));
            }
            return;
        }
        self.queue.park(woken, None);
    }
}

impl Drop for Executor<'_> {
    fn drop(&mut self) {
        // Outside of the cell, because destructors of the tasks may spawn or wake.
        let tasks = self.tasks.take();
        for (_, task) in tasks {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(task)));
        }
    }
}

impl core::fmt::Debug for Executor<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Executor({} tasks)", self.tasks.borrow().len())
    }
}

impl RunQueue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<u32>> {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop(&self) -> Option<u32> {
        self.lock().pop_front()
    }

    /// Sleeps until a task is woken, or `woken` returns true.
    fn park(&self, woken: impl Fn() -> bool, most: Option<Duration>) {
        self.parked.store(true, Ordering::SeqCst);
        // Under the lock: a thread that pushes later sees that we are parked.
        let empty = self.lock().is_empty();
        if empty && !woken() {
            match most {
                Some(most) => std::thread::park_timeout(most),
                None => std::thread::park(),
            }
        }
        self.parked.store(false, Ordering::SeqCst);
    }

    fn unpark(&self) {
        if self.parked.load(Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.queue.lock().push_back(self.number);
            self.queue.unpark();
        }
    }
}

impl Wake for RootWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.queue.unpark();
    }
}
