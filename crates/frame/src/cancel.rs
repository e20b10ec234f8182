//! Operations that another thread can cancel.

use crate::error::FrameError;
use std::cell::RefCell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

thread_local! {
    static FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Runs an operation on frames that another thread cancels by setting `flag`. The operation looks at
/// the flag before each chunk of a column that it reads or makes, so within milliseconds unless the
/// pool is slow. It then returns [`FrameError::Cancelled`] and has changed nothing.
///
/// ```
/// use farfield::Heap;
/// use farfield_frame::{FarFrame, FrameError, cancellable};
/// use std::sync::Arc;
/// use std::sync::atomic::AtomicBool;
///
/// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
/// let flag = Arc::new(AtomicBool::new(true));
/// let trips = cancellable(&flag, || FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\n"));
/// assert!(matches!(trips, Err(FrameError::Cancelled)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn cancellable<T>(flag: &Arc<AtomicBool>, operation: impl FnOnce() -> T) -> T {
    /// Puts the flag of the operation around this one back, also after a panic.
    struct Outer(Option<Arc<AtomicBool>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            FLAG.replace(self.0.take());
        }
    }
    let _outer = Outer(FLAG.replace(Some(flag.clone())));
    operation()
}

/// Returns a function that makes the thread that calls it a part of this thread's operation, for as
/// long as that thread lives: what cancels the operation ends what the other thread does with frames.
/// It is for the threads of a runtime that answers a query.
pub fn share_cancellation() -> impl Fn() + Clone + Send + Sync + 'static {
    let flag = FLAG.with_borrow(Clone::clone);
    move || drop(FLAG.replace(flag.clone()))
}

/// Interval at which a thread that waits looks whether its operation was cancelled.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Runs a future to its end on this thread. If the operation of this thread is cancelled meanwhile,
/// it drops the future and returns [`FrameError::Cancelled`] within 20 ms, or when the future gives
/// its turn back.
pub fn block_on<T>(future: impl Future<Output = T>) -> Result<T, FrameError> {
    struct UnparkWaker(Thread);
    impl Wake for UnparkWaker {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(UnparkWaker(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        check()?;
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Ok(value);
        }
        thread::park_timeout(LOOK_EVERY);
    }
}

/// Returns an error if the operation of this thread was cancelled.
pub(crate) fn check() -> Result<(), FrameError> {
    let is_cancelled = |flag: &Option<Arc<AtomicBool>>| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed));
    if FLAG.with_borrow(is_cancelled) { Err(FrameError::Cancelled) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    //! Danger: a query that goes on after ^C, in a thread of its own or while nobody reads a frame.
    use super::*;
    use std::future::{pending, poll_fn};
    use std::sync::mpsc::channel;

    #[test]
    fn a_future_that_never_ends_is_dropped_when_it_is_cancelled() {
        let (flag, held) = (Arc::new(AtomicBool::new(false)), Arc::new(()));
        let (began, waits) = channel();
        let query = {
            let held = held.clone();
            async move {
                began.send(()).unwrap();
                pending::<()>().await;
                drop(held);
            }
        };
        let asking = thread::spawn({
            let flag = flag.clone();
            move || cancellable(&flag, || block_on(query))
        });
        waits.recv().unwrap();
        assert_eq!(Arc::strong_count(&held), 2);
        flag.store(true, Ordering::Relaxed);
        assert!(matches!(asking.join().unwrap(), Err(FrameError::Cancelled)));
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn a_future_is_polled_again_when_it_is_woken() {
        let mut turns = 0;
        let counted = poll_fn(|context| {
            turns += 1;
            context.waker().wake_by_ref();
            if turns < 1000 { Poll::Pending } else { Poll::Ready(turns) }
        });
        let started = std::time::Instant::now();
        assert_eq!(block_on(counted).unwrap(), 1000);
        assert!(started.elapsed() < 1000 * LOOK_EVERY / 2, "it waited for the clock");
    }

    #[test]
    fn threads_that_share_a_cancellation_end_with_the_operation() {
        let flag = Arc::new(AtomicBool::new(false));
        let joins = cancellable(&flag, share_cancellation);
        let found = |joins: Option<&(dyn Fn() + Sync)>| {
            thread::scope(|scope| {
                scope.spawn(|| joins.map(|join| join()).map_or_else(check, |()| check())).join().unwrap()
            })
        };
        assert!(found(Some(&joins)).is_ok());
        flag.store(true, Ordering::Relaxed);
        assert!(matches!(found(Some(&joins)), Err(FrameError::Cancelled)));
        assert!(found(None).is_ok(), "another thread is no part of it");
    }
}
