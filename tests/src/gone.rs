//! Questions to a server that ends in the middle of them.

use crate::PATIENCE;
use farfield::{CallError, FarError, Fault, OffloadError};
use farfield_server::Server;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Asks again and again, and ends the server after two answers: the question that is not answered any more says by name that it is gone.
pub fn ask_until_gone(server: Server, what: &str, ask: impl FnMut() -> Result<(), OffloadError> + Send) {
    let end = || {
        server.shutdown(Duration::ZERO);
    };
    ask_until(end, what, ask);
}

/// The same, with a server that `end` ends.
pub fn ask_until(end: impl FnOnce(), what: &str, mut ask: impl FnMut() -> Result<(), OffloadError> + Send) {
    let answers = AtomicUsize::new(0);
    std::thread::scope(|threads| {
        let asker = threads.spawn(|| {
            let started = Instant::now();
            loop {
                if let Err(error) = ask() {
                    break error;
                }
                answers.fetch_add(1, Ordering::Relaxed);
                assert!(started.elapsed() < PATIENCE, "most of it is at a server that is gone");
            }
        });
        while answers.load(Ordering::Relaxed) < 2 && !asker.is_finished() {
            std::thread::yield_now();
        }
        end();
        let error = asker.join().unwrap();
        let is_typed = matches!(
            error,
            OffloadError::Far(FarError::Pool(_)) | OffloadError::Call(CallError::Fault(Fault::Lost(_)))
        );
        assert!(is_typed, "{what}: {error:?}");
    });
}
