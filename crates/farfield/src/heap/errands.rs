//! What tasks have the heap do while they wait without a thread: the reclaimer does it, a step each time it looks, because it waits for scopes
//! anyway, and for the pool.

use super::write_back::WriteBack;
use super::{Core, FarRange};
use crate::error::FarError;
use core::future::poll_fn;
use core::task::{Poll, Waker};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Those that have not ended.
#[derive(Default)]
pub(super) struct Errands(Mutex<Vec<Errand>>);

struct Errand {
    work: WriteBack,
    since: Instant,
    order: Arc<Order>,
}

/// What the task and the reclaimer know of an errand. When the task has given it up, the reclaimer has the only one.
#[derive(Default)]
struct Order(Mutex<Answer>);

#[derive(Default)]
struct Answer {
    result: Option<Result<(), FarError>>,
    waker: Option<Waker>,
}

impl Order {
    fn lock(&self) -> MutexGuard<'_, Answer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It has ended.
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

impl Errands {
    fn lock(&self) -> MutexGuard<'_, Vec<Errand>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Are there any?
    pub(super) fn are_left(&self) -> bool {
        !self.lock().is_empty()
    }
}

impl Errand {
    /// A step further; how it ended, if it did.
    fn step(&mut self, core: &Core) -> Option<Result<(), FarError>> {
        if Arc::strong_count(&self.order) == 1 {
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

impl Core {
    /// Writes back as [`Core::write_back`] does, for a task.
    pub(super) async fn have_written_back(&self, ranges: impl IntoIterator<Item = FarRange>) -> Result<(), FarError> {
        let order = Arc::new(Order::default());
        let errand = Errand { work: WriteBack::new(self, ranges), since: Instant::now(), order: order.clone() };
        self.errands.lock().push(errand);
        self.reclaimer.ring();
        poll_fn(|context| {
            let mut answer = order.lock();
            if let Some(result) = answer.result.take() {
                return Poll::Ready(result);
            }
            answer.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// A step further with each of them.
    pub(super) fn run_errands(&self) {
        // Tasks are woken without the lock, and may have others.
        let errands = core::mem::take(&mut *self.errands.lock());
        for mut errand in errands {
            match errand.step(self) {
                None => self.errands.lock().push(errand),
                Some(result) => {
                    errand.work.end(self);
                    errand.order.tell(result);
                }
            }
        }
    }
}
