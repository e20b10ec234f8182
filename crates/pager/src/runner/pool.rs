//! Moves a running job to another pool, and tells how far it is.

use super::{ControlBlock, JobRefusal, RunnerBlock};
use crate::config::TEXT_BYTES;
use crate::control::{ProcessSlot, SLOTS, believed_pages};
use farfield_pool::{Protection, ScrubStats};
use std::sync::atomic::Ordering;

/// Pool that a job has, and progress of its processes on the way there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolStatus {
    /// Number of the pool among those that the job had: 0 for the one that it began with.
    pub epoch: u32,
    /// Number of times that the job has moved to another pool by itself.
    pub moves: u32,
    /// URLs of the pool.
    pub urls: Vec<String>,
    /// URLs of the pool before; empty if there was none.
    pub before: Vec<String>,
    /// Processes that still move to the pool.
    pub moving: Vec<MovingProcess>,
    /// Processes for which a part of their pool does not answer, or lacks something.
    pub degraded: Vec<u32>,
    /// Processes whose pool has a scrub, and what the scrub has done.
    pub scrubbed: Vec<(u32, ScrubStats)>,
    /// Processes whose pool protects what it holds, and how well.
    pub protection: Vec<(u32, Protection)>,
    /// Reason why the pool of the last switch was given up; empty if it was not.
    pub reason: String,
    /// Reason why the job has moved there by itself; empty if a person has told it to, or if it
    /// began there.
    pub cause: String,
}

/// A process on the way to another pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovingProcess {
    /// Process id as the runner sees it.
    pub pid: u32,
    /// Pages that the process has or had far, rounded up; 0 if it has not begun.
    pub pages: u64,
    /// Pages out of `pages` that were moved already.
    pub moved_pages: u64,
}

impl PoolStatus {
    /// Reads the status of a job.
    pub fn read(control: &ControlBlock) -> PoolStatus {
        let config = control.config();
        let (epoch, urls, _) = config.pool();
        let before = if epoch == 0 { Vec::new() } else { config.pools[epoch.wrapping_sub(1) as usize % 2].read().0 };
        let armed = armed(control);
        let moving = armed.clone().filter(|(_, slot)| slot.pool_epoch.load(Ordering::SeqCst) != epoch);
        let moving = moving.map(|(pid, slot)| {
            let [pages, moved_pages] = [&slot.pool_pages, &slot.pool_moved_pages].map(believed_pages);
            MovingProcess { pid, pages, moved_pages }
        });
        let scrubbed = armed.clone().filter_map(|(pid, slot)| Some((pid, slot.scrubbed()?))).collect();
        let protection = armed.clone().filter_map(|(pid, slot)| Some((pid, slot.protection()?))).collect();
        let degraded = armed.filter(|(_, slot)| slot.pool_degraded.load(Ordering::Relaxed) != 0);
        let degraded = degraded.map(|(pid, _)| pid).collect();
        let reason = config.pool_reason.line();
        let is_its_own = config.pool_cause_epoch.load(Ordering::Acquire) == epoch;
        let cause = if is_its_own { config.pool_cause.line() } else { String::new() };
        let moves = config.pool_moves.load(Ordering::Relaxed);
        PoolStatus {
            epoch,
            moves,
            urls,
            before,
            moving: moving.collect(),
            degraded,
            scrubbed,
            protection,
            reason,
            cause,
        }
    }
}

/// Returns the processes whose faults are ours, with their slots.
fn armed(control: &ControlBlock) -> impl Iterator<Item = (u32, &ProcessSlot)> + Clone {
    let taken = (control.processes.load(Ordering::Acquire) as usize).min(SLOTS);
    control.slots[..taken].iter().filter_map(|slot| {
        let pid = slot.process();
        (pid != 0 && slot.state.load(Ordering::Acquire) != 0).then_some((pid, slot))
    })
}

/// Gives the job another pool from now on, which was tried out before, and returns its number.
/// `cause` says why, if nobody has asked for it. Fails if a text is too long, if the job still
/// moves, or if it has this pool already.
pub(super) fn begin_switch(
    control: &RunnerBlock,
    urls: &[String],
    token: &[u8],
    cause: &str,
) -> Result<u32, JobRefusal> {
    let refuse = |reason: &str| JobRefusal::Pool { reason: reason.to_owned() };
    let text = urls.join("\n");
    if text.len() > TEXT_BYTES || token.len() > TEXT_BYTES {
        return Err(refuse("the URL, and the token, can have at most 4096 bytes"));
    }
    let status = PoolStatus::read(control);
    if !status.moving.is_empty() {
        return Err(refuse("the job is still moving to another pool: wait until it has moved, or cancel the switch"));
    }
    if status.urls == urls {
        return Err(refuse("the job has this pool already"));
    }
    let (config, next) = (control.config(), status.epoch.wrapping_add(1));
    config.pools[next as usize % 2].write(text.as_bytes(), token);
    config.pool_reason.write(b"");
    config.pool_cause.write(cause.as_bytes());
    config.pool_cause_epoch.store(next, Ordering::Release);
    config.pool_epoch.store(next, Ordering::SeqCst);
    Ok(next)
}

/// Gives the last switch up: the job shall have the pool that it had before. Processes that have
/// moved come back, the others stay. Returns the new number of that pool.
pub(super) fn give_up(control: &RunnerBlock, why: &str) -> u32 {
    let config = control.config();
    let next = config.pool_epoch.load(Ordering::SeqCst).wrapping_add(1);
    config.pool_epoch.store(next, Ordering::SeqCst);
    config.pool_reason.write(why.as_bytes());
    next
}

/// Gives the last switch up if a process reports that it could not move.
pub(super) fn look_for_failures(control: &RunnerBlock) {
    let epoch = control.config().pool_epoch.load(Ordering::SeqCst);
    let has_failed = |slot: &ProcessSlot| {
        slot.pool_failed.load(Ordering::Acquire) == epoch && slot.pool_epoch.load(Ordering::SeqCst) != epoch
    };
    // Number 0 is the pool with which the job began.
    if let Some((_, slot)) = armed(control).find(|(_, slot)| epoch != 0 && has_failed(slot)) {
        give_up(control, &slot.pool_failure.line());
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a process that decides for the others, or one that is left behind.
    use super::*;
    use crate::config::Capture;
    use crate::control::FaultMode;
    use crate::runner::{Settings, create_control};

    #[test]
    fn a_process_that_cannot_move_takes_the_job_back_and_others_cannot() {
        let settings = Settings {
            near_limit_bytes: 1 << 30,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls: vec!["tcp://127.0.0.1:1".into()],
            token: vec![],
        };
        let control = create_control(&settings).unwrap();
        let slot = control.take_slot(7, 1007).unwrap();
        slot.state.store(1, Ordering::Relaxed);
        let second = ["tcp://127.0.0.1:2".to_owned()];
        look_for_failures(&control);
        assert_eq!(begin_switch(&control, &second, b"x", "").unwrap(), 1);
        assert!(begin_switch(&control, &["ssd:/tmp".to_owned()], b"", "").is_err(), "it is on the way");
        look_for_failures(&control);
        // Of a switch that is over.
        slot.fail_pool(5, b"old");
        look_for_failures(&control);
        assert_eq!(control.config().pool(), (1, second.to_vec(), b"x".to_vec()));
        slot.fail_pool(1, b"it is\x1b full");
        look_for_failures(&control);
        let status = PoolStatus::read(&control);
        assert_eq!((status.epoch, status.urls, status.reason.as_str()), (2, settings.urls, "it is? full"));
        look_for_failures(&control);
        slot.pool_epoch.store(2, Ordering::Relaxed);
        // It says so of a pool that it has: too late.
        assert_eq!(begin_switch(&control, &second, b"", "").unwrap(), 3);
        slot.pool_epoch.store(3, Ordering::Relaxed);
        slot.fail_pool(3, b"late");
        look_for_failures(&control);
        assert_eq!(PoolStatus::read(&control).epoch, 3);
    }
}
