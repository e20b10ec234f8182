//! How tests run: their seed, their tier, and their end. Those of the collected heap have it, too.

use std::sync::atomic::{AtomicBool, Ordering};

/// `FARFIELD_SEED`, or a fixed one; printed, so that a failure can be repeated.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("seed {seed} (FARFIELD_SEED={seed})");
    seed
}

/// Is it the deep tier that runs?
pub(crate) fn is_deep() -> bool {
    std::env::var("FARFIELD_DEEP").is_ok_and(|deep| deep == "1")
}

/// Says that it is over when it is dropped, also by a test that fails: other threads wait for that.
pub(crate) struct Over<'a>(pub(crate) &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
