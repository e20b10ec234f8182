//! Intervals that grow with what a step costs.

use std::time::Duration;

/// Rule for how often something is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepInterval {
    /// Least time between two steps.
    pub(super) least: Duration,
    /// A step takes one in so many parts of the time, at most.
    pub(super) share: u32,
}

impl StepInterval {
    /// Returns the time to wait after a step that took `cost`.
    pub(super) fn after(self, cost: Duration) -> Duration {
        self.least.max(cost.saturating_mul(self.share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costly_steps_are_rare() {
        let pace = StepInterval { least: Duration::from_secs(1), share: 50 };
        assert_eq!(pace.after(Duration::from_millis(1)), Duration::from_secs(1));
        assert_eq!(pace.after(Duration::from_millis(100)), Duration::from_secs(5));
    }
}
