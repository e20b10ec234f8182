//! Waits for a heap to hold to its budget. Tests within the crate and those of the collected heap have this file, too.

use farfield::Heap;
use std::time::{Duration, Instant};

/// The heap holds to its budget. Where its tables have just grown, or the budget is new, the reclaimer frees frames first.
pub(crate) fn assert_in_budget(heap: &Heap) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while heap.stats().near_bytes > heap.stats().near_limit_bytes {
        assert!(Instant::now() < deadline, "{:?}", heap.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}
