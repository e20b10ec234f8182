//! What tests of tasks share.

use farfield::{FarBox, FarError, Heap, PoolError};
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// Lets other tasks run.
pub(crate) async fn yield_now() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Polls a future once; true if it is ready. Then it is given up.
pub(crate) async fn look<F: Future>(future: F) -> bool {
    let mut future = pin!(future);
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_ready())).await
}

/// The value, asked for again as long as answers are lost or corrupt, which `failed` counts.
pub(crate) async fn fetch_until_there<T>(heap: &Heap, value: &FarBox<T>, failed: &Cell<u32>) -> T
where
    T: Copy + Send + Sync + 'static,
{
    loop {
        match value.fetch(&heap.enter()).await {
            Ok(value) => return *value,
            Err(FarError::Pool(PoolError::TimedOut { .. } | PoolError::Corrupt { .. }) | FarError::Stalled { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
        failed.set(failed.get() + 1);
        assert!(failed.get() < 10_000);
    }
}
