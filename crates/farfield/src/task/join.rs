//! End of a task, and the handle that waits for it.

use core::any::Any;
use core::cell::RefCell;
use core::future::{Future, poll_fn};
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// Error of a task that did not end: it panicked, or was dropped together with its executor.
pub struct Panicked(
    /// Payload of the panic, as from [`std::thread::JoinHandle::join`].
    pub Box<dyn Any + Send>,
);

/// Handle of a task: a future of its result. When the handle is dropped, the task goes on.
pub struct JoinHandle<T> {
    end: Rc<RefCell<JoinState<T>>>,
}

struct JoinState<T> {
    result: Option<Result<T, Panicked>>,
    waker: Option<Waker>,
}

/// Part of the task that reports its end to the handle, even if the task is dropped.
struct JoinSender<T>(Rc<RefCell<JoinState<T>>>);

impl<T> JoinSender<T> {
    fn tell(&self, result: Result<T, Panicked>) {
        let waker = {
            let mut end = self.0.borrow_mut();
            if end.result.is_none() {
                end.result = Some(result);
            }
            end.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for JoinSender<T> {
    fn drop(&mut self) {
        // If the count is one, the handle is gone, or has its result already.
        if Rc::strong_count(&self.0) > 1 {
            self.tell(Err(Panicked(Box::new("the task was dropped before it ended"))));
        }
    }
}

/// Makes a task of this future, and its handle. A panic ends the task and nothing else.
pub(super) fn joined<'env, T: 'env>(
    future: impl Future<Output = T> + 'env,
) -> (JoinHandle<T>, Pin<Box<dyn Future<Output = ()> + 'env>>) {
    let end = Rc::new(RefCell::new(JoinState { result: None, waker: None }));
    let sender = JoinSender(end.clone());
    let task = Box::pin(async move {
        let result = {
            let mut future = core::pin::pin!(future);
            let poll = |context: &mut Context<'_>| {
                // The future is not used after a panic, so no code sees it half done.
                match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
                    Ok(Poll::Pending) => Poll::Pending,
                    Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
                    Err(panic) => Poll::Ready(Err(Panicked(panic))),
                }
            };
            poll_fn(poll).await
        };
        sender.tell(result);
    });
    (JoinHandle { end }, task)
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, Panicked>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker().clone();
        let mut end = self.end.borrow_mut();
        if let Some(result) = end.result.take() {
            return Poll::Ready(result);
        }
        let before = end.waker.replace(waker);
        drop(end);
        // Dropping a waker may run code of the user, which may use this handle.
        drop(before);
        Poll::Pending
    }
}

impl<T> core::fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("JoinHandle")
    }
}

impl Panicked {
    /// Returns the message of the panic, or `"no message"`.
    pub fn message(&self) -> &str {
        let text = self.0.downcast_ref::<&str>().copied();
        text.or_else(|| self.0.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
    }
}

impl core::fmt::Debug for Panicked {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Panicked({:?})", self.message())
    }
}

impl core::fmt::Display for Panicked {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "a task did not end: {}", self.message())
    }
}

impl std::error::Error for Panicked {}
