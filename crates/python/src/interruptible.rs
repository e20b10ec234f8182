//! Operations that ^C ends.

use farfield_frame::{FrameError, cancellable};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

/// How often a waiting thread lets Python run its signal handlers.
const SIGNALS_EVERY: Duration = Duration::from_millis(20);

/// Runs an operation on frames without the interpreter's lock. If a handler of a signal raises an
/// exception meanwhile, as that of ^C does, it is returned at once; the operation ends at its next
/// chunk, on its own thread, and what it made is dropped.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    operation: impl FnOnce() -> Result<T, FrameError> + Send + 'static,
) -> PyResult<T> {
    run(py, operation)?.map_err(crate::errors::of_frame)
}

/// Runs any operation as [`interruptible`] does, and returns its result.
pub(crate) fn run<T: Send + 'static>(py: Python<'_>, operation: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let is_cancelled = Arc::new(AtomicBool::new(false));
    let flag = is_cancelled.clone();
    let (sender, mut receiver) = sync_channel(1);
    let body = move || {
        // Nobody receives after ^C.
        let _ = sender.send(cancellable(&flag, operation));
    };
    let thread = thread::Builder::new().name("farfield frame".into()).spawn(body).map_err(PyOSError::new_err)?;
    loop {
        let received;
        (receiver, received) = py.detach(move || {
            let received = receiver.recv_timeout(SIGNALS_EVERY);
            (receiver, received)
        });
        match received {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| is_cancelled.store(true, Ordering::Relaxed))?
            }
            Err(RecvTimeoutError::Disconnected) => match py.detach(|| thread.join()) {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("the thread sends, or panics"),
            },
        }
    }
}
