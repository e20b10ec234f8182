//! How long a lane polls while it waits, before it sleeps.
//!
//! A wake-up costs several times a polled round trip, so a wait polls at first. It does so once for what
//! is on its way: where threads wait for a processor, one that polls again and again keeps it from the
//! server that would answer.

use core::time::Duration;
use farfield_os::process;

/// Time that a wait polls.
const POLL_FOR: Duration = Duration::from_micros(50);
/// Time after which it yields the core between two polls. This is longer than a round trip takes: perhaps
/// the server waits for this very core.
const YIELD_AFTER: Duration = Duration::from_micros(12);

/// Whether a lane that waits still polls.
#[derive(Default)]
pub(crate) struct Polling {
    /// A wait has polled in vain, and nothing was submitted and no wait has found anything since.
    is_over: bool,
}

impl Polling {
    /// Lets the next wait poll: something was submitted, or was found.
    pub(crate) fn renew(&mut self) {
        self.is_over = false;
    }

    /// Tells whether a wait that has begun at `start` polls again `now`, rather than to sleep; times are in
    /// ns. May yield the core before.
    pub(crate) fn goes_on(&mut self, start: u64, now: u64) -> bool {
        let waited = Duration::from_nanos(now.saturating_sub(start));
        self.is_over |= waited >= POLL_FOR;
        if !self.is_over && waited > YIELD_AFTER {
            process::yield_now();
        }
        !self.is_over
    }
}

#[cfg(test)]
mod tests {
    //! Guards against waits that sleep although an answer is near, and that poll although none comes.
    use super::*;

    #[test]
    fn a_wait_polls_once_for_what_is_on_its_way() {
        let mut polling = Polling::default();
        assert!(polling.goes_on(1000, 1000) && polling.goes_on(1000, 30_000) && polling.goes_on(1000, 50_999));
        assert!(!polling.goes_on(1000, 51_000));
        assert!(!polling.goes_on(200_000, 200_000), "the next wait sleeps at once");
        polling.renew();
        assert!(polling.goes_on(400_000, 400_000) && polling.goes_on(500_000, 500_000));
        assert!(!polling.goes_on(500_000, 550_000));
    }
}
