//! Another pool for a job that runs.

use super::{ControlBlock, Refusal, far};
use crate::control::{SLOTS, TEXT_BYTES, read_text, write_text};
use farfield_pool::{Protection, Scrubbed};
use std::sync::atomic::{AtomicU64, Ordering};

/// Which pool a job has, and how far its processes are on the way there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolStatus {
    /// Its number among the pools that the job had: 0 for the one that it began with.
    pub epoch: u32,
    /// How often the job has moved to another pool by itself.
    pub moves: u32,
    /// Its URLs.
    pub urls: Vec<String>,
    /// Those of the one before.
    pub before: Vec<String>,
    /// Processes that still move there.
    pub moving: Vec<MovingProcess>,
    /// Processes for which a part of their pool does not answer, or lacks something.
    pub degraded: Vec<u32>,
    /// Processes whose pool has a scrub, and what that has done.
    pub scrubbed: Vec<(u32, Scrubbed)>,
    /// Processes whose pool protects what it holds, and how well.
    pub protection: Vec<(u32, Protection)>,
    /// Why the pool of the last switch was given up; empty if it was not.
    pub reason: String,
    /// Why the job has moved there by itself; empty if somebody has told it to, or it began there.
    pub cause: String,
}

/// A process on the way to another pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovingProcess {
    /// Which.
    pub pid: u32,
    /// Pages that it has far or had, rounded up; 0 if it has not begun.
    pub pages: u64,
    /// Of these, those that were moved.
    pub moved_pages: u64,
}

impl PoolStatus {
    /// Of a job.
    pub fn read(control: &ControlBlock) -> PoolStatus {
        let (epoch, urls, _) = control.pool();
        let before = if epoch == 0 { Vec::new() } else { control.pools[epoch.wrapping_sub(1) as usize % 2].read().0 };
        let taken = (control.processes.load(Ordering::Acquire) as usize).min(SLOTS);
        let armed = control.slots[..taken].iter().filter_map(|slot| {
            let pid = slot.process();
            (pid != 0 && slot.state.load(Ordering::Acquire) != 0).then_some((pid, slot))
        });
        let moving = armed.clone().filter(|(_, slot)| slot.pool_epoch.load(Ordering::SeqCst) != epoch);
        let moving = moving.map(|(pid, slot)| {
            let [pages, moved_pages] =
                [&slot.pool_pages, &slot.pool_moved_pages].map(|pages| pages.load(Ordering::Relaxed));
            MovingProcess { pid, pages, moved_pages }
        });
        let scrubbed = armed.clone().filter_map(|(pid, slot)| Some((pid, slot.scrubbed()?))).collect();
        let protection = armed.clone().filter_map(|(pid, slot)| Some((pid, slot.protection()?))).collect();
        let degraded = armed.filter(|(_, slot)| slot.pool_degraded.load(Ordering::Relaxed) != 0);
        let degraded = degraded.map(|(pid, _)| pid).collect();
        let text =
            |words: &[AtomicU64], length| String::from_utf8_lossy(read_text(words, length, &mut [0; 512])).into_owned();
        let reason = text(&control.pool_reason, &control.pool_reason_len);
        let is_its_own = control.pool_cause_epoch.load(Ordering::Acquire) == epoch;
        let cause = if is_its_own { text(&control.pool_cause, &control.pool_cause_len) } else { String::new() };
        let moves = control.pool_moves.load(Ordering::Relaxed);
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

/// The job shall have this pool from now on: that with which it `began`, or one that is looked at first. The number of the new pool.
pub fn switch_pool(control: &ControlBlock, url: Option<&str>, token: &[u8]) -> Result<u32, Refusal> {
    switch_pool_because(control, url, token, "")
}

/// The same; `cause` says why, if nobody has asked for it.
pub(super) fn switch_pool_because(
    control: &ControlBlock,
    url: Option<&str>,
    token: &[u8],
    cause: &str,
) -> Result<u32, Refusal> {
    let refuse = |reason: &str| Refusal::Pool { reason: reason.to_owned() };
    let (urls, token) = match url {
        Some(url) => (far::resolve(&[url.to_owned()])?, token.to_vec()),
        None => first(control),
    };
    let text = urls.join("\n");
    if text.len() > TEXT_BYTES || token.len() > TEXT_BYTES {
        return Err(refuse("the URL, and the token, can have at most 4096 bytes"));
    }
    far::check(&urls, &token)?;
    let Some(_turn) = Turn::take(control) else {
        return Err(refuse("somebody else is giving the job another pool in this moment: try again"));
    };
    let status = PoolStatus::read(control);
    if !status.moving.is_empty() {
        return Err(refuse("the job is still on the way to another pool: wait for it, or cancel that"));
    }
    if status.urls == urls {
        return Err(refuse("the job has this pool already"));
    }
    let next = status.epoch.wrapping_add(1);
    control.pools[next as usize % 2].write(text.as_bytes(), &token);
    write_text(&control.pool_reason, &control.pool_reason_len, b"");
    let cause = &cause.as_bytes()[..cause.len().min(control.pool_cause.len() * 8)];
    write_text(&control.pool_cause, &control.pool_cause_len, cause);
    control.pool_cause_epoch.store(next, Ordering::Release);
    // A process that gave up the last one could only have done so while it moved.
    control.pool_epoch.store(next, Ordering::SeqCst);
    Ok(next)
}

/// The right to change the pool of a job. Who has died has none.
struct Turn<'a>(&'a ControlBlock);

impl Turn<'_> {
    fn take(control: &ControlBlock) -> Option<Turn<'_>> {
        let holder = control.pool_writer.load(Ordering::Acquire);
        if holder != 0 && std::path::Path::new(&format!("/proc/{holder}")).exists() {
            return None;
        }
        let me = std::process::id();
        let taken = control.pool_writer.compare_exchange(holder, me, Ordering::AcqRel, Ordering::Relaxed);
        taken.ok().map(|_| Turn(control))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.pool_writer.store(0, Ordering::Release);
    }
}

/// What the job began with.
fn first(control: &ControlBlock) -> (Vec<String>, Vec<u8>) {
    let (mut urls, mut token) = ([0; TEXT_BYTES], [0; TEXT_BYTES]);
    let urls = String::from_utf8_lossy(read_text(&control.urls, &control.urls_len, &mut urls)).into_owned();
    let token = read_text(&control.token, &control.token_len, &mut token).to_vec();
    (urls.lines().map(str::to_owned).collect(), token)
}

/// Those that have moved come back, the others stay. `false`: everybody is there already, or came back.
pub fn cancel_switch(control: &ControlBlock) -> bool {
    let status = PoolStatus::read(control);
    !status.moving.is_empty() && control.give_up_pool(status.epoch, b"it was cancelled")
}
