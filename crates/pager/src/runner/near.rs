//! Near budget of a running job, seen and changed from outside.
//!
//! Somebody outside (a person, or the agent of the node) stores an *offer* in the runner's request
//! block, which the kernel opens to the runner's own user and root. The runner alone writes the
//! budget: the offer, or less while the job needs less (`--auto`). An offer is a state and not a
//! request, so nobody waits for a runner that is stopped.

use super::budget::BudgetDriver;
use super::{ByteSize, ControlBlock, JobRefusal, RunnerBlock};
use crate::control::{BYTES_MAX, believed};
use std::io;
use std::sync::atomic::Ordering;

/// Near budget of a job, and what the job has of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct NearStatus {
    /// Near memory in use, in bytes, as the processes of the job count it.
    pub near_bytes: u64,
    /// Budget.
    pub near_limit_bytes: u64,
    /// Most that the budget may be.
    pub near_offer_bytes: u64,
    /// Least that may be offered.
    pub near_least_bytes: u64,
}

impl NearStatus {
    /// Reads the status of a job.
    pub fn read(control: &ControlBlock) -> NearStatus {
        let config = control.config();
        NearStatus {
            near_bytes: believed(&control.near_bytes).max(0) as u64,
            near_limit_bytes: config.near_limit() as u64,
            near_offer_bytes: config.near_offer_bytes.load(Ordering::Acquire),
            near_least_bytes: config.near_least_bytes.load(Ordering::Relaxed),
        }
    }

    /// Tells whether the job has been given the budget that was offered, and keeps it.
    pub fn holds(&self, offer_bytes: u64) -> bool {
        self.near_offer_bytes == offer_bytes && self.near_bytes <= self.near_limit_bytes
    }
}

/// Offers a running job this much near memory at most. Does not wait: the runner takes the offer at
/// its next look, twenty times a second. Refuses less than the job can run with.
pub fn offer_near(control: &ControlBlock, bytes: u64) -> Result<(), JobRefusal> {
    let least_bytes = control.config().near_least_bytes.load(Ordering::Relaxed);
    if bytes < least_bytes {
        return Err(JobRefusal::NearBelowLeast { bytes, least_bytes });
    }
    let refusal = |reason: &str| JobRefusal::Pool { reason: reason.to_owned() };
    let (_file, requests) = control.open_requests().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            refusal("only the user of the job's `farfield run`, and root, may change its near budget")
        }
        io::ErrorKind::NotFound => refusal("the job has ended"),
        _ => JobRefusal::Os { what: "request block", error },
    })?;
    requests.near_offer_bytes.store(bytes.min(BYTES_MAX as u64), Ordering::Release);
    Ok(())
}

/// Puts the last offer into force if it is not yet. Only the runner calls this. Offers below the
/// least count as the least: whoever stores words into the block need not have asked.
pub(super) fn take_offer(control: &RunnerBlock, driver: Option<&mut BudgetDriver>) {
    let asked = control.requests().near_offer_bytes.load(Ordering::Acquire);
    let config = control.config();
    let offer = asked.max(config.near_least_bytes.load(Ordering::Relaxed)).min(BYTES_MAX as u64);
    if asked == 0 || offer == config.near_offer_bytes.load(Ordering::Relaxed) {
        return;
    }
    let limit = driver.map_or(offer, |driver| driver.limit_to(offer));
    config.near_limit_bytes.store(limit, Ordering::Relaxed);
    // Stored last: who sees the offer in force sees the budget that follows from it.
    config.near_offer_bytes.store(offer, Ordering::Release);
}

impl core::fmt::Display for NearStatus {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let NearStatus { near_bytes, near_limit_bytes, near_offer_bytes, near_least_bytes } = *self;
        let [near, limit, offer, least] =
            [near_bytes, near_limit_bytes, near_offer_bytes, near_least_bytes].map(ByteSize);
        write!(f, "near {near} of {limit}, offered {offer}, least {least}")
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a budget that a stranger changes, that falls below what the job can run with, or that two parties write.
    use super::*;
    use crate::config::Capture;
    use crate::control::FaultMode;
    use crate::runner::{Settings, SloOptions, create_control, machine};
    use farfield_core::policy::budget_controller::Cadence;

    const MIB: u64 = 1 << 20;

    fn job() -> RunnerBlock {
        let settings = Settings {
            near_limit_bytes: 256 * MIB,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls: vec![],
            token: vec![],
        };
        create_control(&settings).unwrap()
    }

    #[test]
    fn an_offer_becomes_the_budget_and_no_more_than_the_job_wants() {
        let control = job();
        let outside = ControlBlock::open(control.path()).unwrap();
        take_offer(&control, None);
        let status = NearStatus::read(&outside);
        assert_eq!((status.near_limit_bytes, status.near_offer_bytes), (256 * MIB, 256 * MIB), "nothing was offered");
        offer_near(&outside, 128 * MIB).unwrap();
        assert!(!NearStatus::read(&outside).holds(128 * MIB), "the runner has not looked");
        take_offer(&control, None);
        assert!(NearStatus::read(&outside).holds(128 * MIB));
        assert_eq!(control.config().near_limit(), 128 << 20);
        offer_near(&outside, 400 * MIB).unwrap();
        take_offer(&control, None);
        assert_eq!(control.config().near_limit(), 400 << 20, "more than it began with");
        // A job that wants less itself gets no more than that.
        let hold =
            SloOptions { slo: 1.4, cadence: Cadence::EventDriven, near_start_bytes: 100 * MIB, is_compared: true };
        let mut driver = BudgetDriver::new(&hold, 256 * MIB);
        offer_near(&outside, 200 * MIB).unwrap();
        take_offer(&control, Some(&mut driver));
        let status = NearStatus::read(&outside);
        assert_eq!((status.near_limit_bytes, status.near_offer_bytes), (100 * MIB, 200 * MIB));
        offer_near(&outside, 50 * MIB).unwrap();
        take_offer(&control, Some(&mut driver));
        assert_eq!((control.config().near_limit(), driver.near_bytes()), (50 << 20, 50 * MIB));
    }

    #[test]
    fn less_than_the_least_is_refused_and_never_in_force() {
        let control = job();
        let outside = ControlBlock::open(control.path()).unwrap();
        let refused = offer_near(&outside, 8 * MIB).unwrap_err().to_string();
        assert!(refused.contains("8.0 MiB") && refused.contains("16.0 MiB"), "{refused}");
        control.config().near_least_bytes.store(64 * MIB, Ordering::Relaxed);
        let refused = offer_near(&outside, 32 * MIB).unwrap_err().to_string();
        assert!(refused.contains("64.0 MiB"), "{refused}");
        // Who stores the word by other means has the same limits.
        for (stored, in_force) in [(1, 64 * MIB), (u64::MAX, BYTES_MAX as u64)] {
            control.requests().near_offer_bytes.store(stored, Ordering::Relaxed);
            take_offer(&control, None);
            assert_eq!(NearStatus::read(&outside).near_limit_bytes, in_force);
        }
        assert_eq!(machine::NEAR_BYTES_MIN, 16 * MIB);
    }
}
