//! Waits of the threads that serve other nodes: for locks that are mostly given back at once.

use std::time::{Duration, Instant};

/// Time for which a body that is applied waits for its lock, where no task waits for that: others who have it mostly
/// apply bodies, too, which are short. A body that is refused comes again with a task, by two messages more.
pub const APPLY_WAIT: Duration = Duration::from_micros(20);

/// Number of polls before the processor is offered to others, one of whom may have the lock.
const POLLS: u32 = 64;

/// Wait for about [`APPLY_WAIT`].
#[derive(Default)]
pub(super) struct ShortWait {
    polls: u32,
    until: Option<Instant>,
}

impl ShortWait {
    /// Waits a little. Returns `false` when the time is over.
    pub(super) fn goes_on(&mut self) -> bool {
        self.polls += 1;
        if self.polls < POLLS {
            core::hint::spin_loop();
            return true;
        }
        std::thread::yield_now();
        let now = Instant::now();
        now < *self.until.get_or_insert(now + APPLY_WAIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_over_when_its_time_is() {
        let (mut wait, began) = (ShortWait::default(), Instant::now());
        while wait.goes_on() {}
        assert!(began.elapsed() >= APPLY_WAIT && wait.polls >= POLLS);
        assert!(!wait.goes_on());
    }
}
