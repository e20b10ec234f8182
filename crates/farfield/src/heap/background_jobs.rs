//! Background jobs of tasks that wait without a thread. The reclaimer runs them, a step each time
//! it looks, because it waits for scopes and for the pool anyway.

use super::write_back::WriteBack;
use super::{FarRange, HeapInner};
use crate::error::FarError;
use core::future::poll_fn;
use core::task::{Poll, Waker};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Jobs that have not ended.
#[derive(Default)]
pub(super) struct BackgroundJobs(Mutex<Vec<BackgroundJob>>);

struct BackgroundJob {
    work: WriteBack,
    since: Instant,
    promise: Arc<JobPromise>,
}

/// State of a job that task and reclaimer share. When the task has given it up, the reclaimer has
/// the only reference.
#[derive(Default)]
struct JobPromise(Mutex<JobPromiseState>);

#[derive(Default)]
struct JobPromiseState {
    result: Option<Result<(), FarError>>,
    waker: Option<Waker>,
}

impl JobPromise {
    fn lock(&self) -> MutexGuard<'_, JobPromiseState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result and wakes the task.
    fn tell(&self, result: Result<(), FarError>) {
        let waker = {
            let mut answer = self.lock();
            answer.result = Some(result);
            answer.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl BackgroundJobs {
    fn lock(&self) -> MutexGuard<'_, Vec<BackgroundJob>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether there are jobs.
    pub(super) fn has_jobs(&self) -> bool {
        !self.lock().is_empty()
    }
}

impl BackgroundJob {
    /// Runs a step of the job. Returns its result, if it has ended or its task has given it up.
    fn step(&mut self, core: &HeapInner) -> Option<Result<(), FarError>> {
        if Arc::strong_count(&self.promise) == 1 {
            return Some(Ok(()));
        }
        match self.work.step(core) {
            Ok(true) => Some(Ok(())),
            Ok(false) => {
                let after = self.since.elapsed();
                (after > core.patience).then_some(Err(FarError::Stalled { after }))
            }
            Err(error) => Some(Err(error)),
        }
    }
}

impl HeapInner {
    /// Writes ranges back as [`HeapInner::write_back`] does, for a task: the reclaimer does the
    /// work.
    pub(crate) async fn await_write_back(&self, ranges: impl IntoIterator<Item = FarRange>) -> Result<(), FarError> {
        let promise = Arc::new(JobPromise::default());
        let job = BackgroundJob { work: WriteBack::new(self, ranges), since: Instant::now(), promise: promise.clone() };
        self.background_jobs.lock().push(job);
        self.reclaimer.ring();
        poll_fn(|context| {
            let mut answer = promise.lock();
            if let Some(result) = answer.result.take() {
                return Poll::Ready(result);
            }
            answer.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Runs a step of each job.
    pub(super) fn run_background_jobs(&self) {
        // Tasks are woken without the lock, and may add jobs.
        let jobs = core::mem::take(&mut *self.background_jobs.lock());
        for mut job in jobs {
            match job.step(self) {
                None => self.background_jobs.lock().push(job),
                Some(result) => {
                    job.work.end(self);
                    job.promise.tell(result);
                }
            }
        }
    }
}
