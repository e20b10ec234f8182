//! Follows the processes of a job, as their slots show them.

use super::ControlBlock;
use super::job_process::{JobProcess, Listing};
use super::sys;
use crate::control::{BUCKETS, BYTES_MAX, JobAccounts, PagingCounters, SLOTS, believed, quantile_ns};
use core::sync::atomic::Ordering;
use farfield_os::process::UNKNOWN_IDENTITY;
use std::time::{Duration, Instant};

/// Minimum interval between two listings of all processes of the machine. A process that writes
/// nonsense into slots could keep its runner busy with listings.
const LISTING_PERIOD: Duration = Duration::from_millis(250);

/// Process that we have seen in a slot.
struct MonitoredProcess {
    slot: usize,
    process: JobProcess,
}

/// Monitor of the slots of a control block, which frees those of dead processes.
pub(super) struct SlotMonitor {
    monitored: Vec<MonitoredProcess>,
    /// Index in `monitored` plus one, by slot; 0 = not monitored.
    by_slot: Box<[u16; SLOTS]>,
    /// Highest state seen in any slot: the way in which faults are served once memory is short.
    state_max: u32,
    /// Time of the last listing of all processes.
    listed: Option<Instant>,
}

/// Slot that was taken since the last sweep, as it describes itself.
struct NewSlot {
    slot: usize,
    pid: u32,
    /// Identity of the process; 0 if it is not written yet.
    identity: u64,
}

impl SlotMonitor {
    pub(super) fn new() -> SlotMonitor {
        SlotMonitor { monitored: Vec::new(), by_slot: Box::new([0; SLOTS]), state_max: 0, listed: None }
    }

    /// Returns the processes that were alive in slots at the last sweep.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> + '_ {
        self.monitored.iter().map(|monitored| monitored.process.pid())
    }

    /// Sends a signal to the processes alive in slots that descend from this one.
    pub(super) fn signal(&self, signal: i32) {
        for monitored in &self.monitored {
            // The process may have ended.
            let _ = monitored.process.signal(signal);
        }
    }

    /// Returns the way in which faults were served, by the name of the state.
    pub(super) fn serving(&self) -> &'static str {
        state_name(self.state_max)
    }

    /// Adds the descriptors that become readable when a process ends.
    pub(super) fn descriptors(&self, into: &mut Vec<libc::c_int>) {
        into.extend(self.monitored.iter().filter_map(|monitored| monitored.process.pidfd()));
    }

    /// Frees the slots of dead processes, and notes new ones and the peaks.
    pub(super) fn sweep(&mut self, control: &JobAccounts) {
        note_peaks(control);
        // Slots are taken from the front, so none lies beyond the number ever taken.
        let taken = (control.processes.load(Ordering::Acquire) as usize).min(SLOTS);
        let taken = &control.slots[..taken];
        // This comes before the dead are freed: what they leave in their slots is the last word.
        let states = taken.iter().map(|slot| slot.state.load(Ordering::Relaxed));
        self.state_max = states.fold(self.state_max, u32::max);
        self.free_dead(control);
        let mut new_slots: Vec<NewSlot> = Vec::new();
        for (index, slot) in taken.iter().enumerate().filter(|(index, _)| self.by_slot[*index] == 0) {
            let pid = slot.pid.load(Ordering::Acquire);
            if pid != 0 {
                // A process that takes the slot at this moment has not written its identity yet.
                new_slots.push(NewSlot { slot: index, pid, identity: slot.identity.load(Ordering::Acquire) });
            }
        }
        // In nearly all jobs process ids are the same inside and here.
        new_slots.retain(|new_slot| {
            !self.see(control, new_slot, |pid, identity, known| JobProcess::by_number(pid, identity, known))
        });
        if new_slots.is_empty() || self.listed.is_some_and(|at| at.elapsed() < LISTING_PERIOD) {
            return;
        }
        // The listing is made after the slots were read: a process that is not in it has ended.
        let listing = Listing::make();
        self.listed = Some(Instant::now());
        for new_slot in new_slots {
            let slot = &control.slots[new_slot.slot];
            let is_found = self.see(control, &new_slot, |pid, identity, known| listing.find(pid, identity, known));
            // The slot is freed unless the process has written its identity since.
            if !is_found && slot.identity.load(Ordering::Acquire) == new_slot.identity {
                control.free_slot(slot);
            }
        }
    }

    /// Monitors the process of a slot if `find` finds it. Returns whether it did.
    fn see(
        &mut self,
        control: &JobAccounts,
        new_slot: &NewSlot,
        find: impl FnOnce(u32, u64, &dyn Fn(u32) -> bool) -> Option<JobProcess>,
    ) -> bool {
        let is_known = |pid| self.pids().any(|known| known == pid);
        let Some(process) = find(new_slot.pid, new_slot.identity.max(UNKNOWN_IDENTITY), &is_known) else {
            return false;
        };
        if new_slot.identity != 0 {
            control.slots[new_slot.slot].outer_pid.store(process.pid(), Ordering::Release);
            self.monitored.push(MonitoredProcess { slot: new_slot.slot, process });
            self.by_slot[new_slot.slot] = self.monitored.len() as u16;
        }
        true
    }

    fn free_dead(&mut self, control: &JobAccounts) {
        let mut fds = Vec::new();
        self.descriptors(&mut fds);
        let mut ready = Vec::new();
        sys::poll(&fds, Duration::ZERO, &mut ready);
        let mut ready = ready.into_iter();
        let by_slot = &mut self.by_slot;
        self.monitored.retain(|monitored| {
            let dead = match monitored.process.pidfd() {
                Some(_) => ready.next().unwrap_or(false),
                None => monitored.process.is_dead(),
            };
            if dead {
                control.free_slot(&control.slots[monitored.slot]);
                by_slot[monitored.slot] = 0;
            }
            !dead
        });
        for (index, monitored) in self.monitored.iter().enumerate() {
            by_slot[monitored.slot] = index as u16 + 1;
        }
    }
}

/// Notes the largest sizes seen.
fn note_peaks(control: &JobAccounts) {
    let near = believed(&control.near_bytes).max(0) as u64;
    control.near_peak_bytes.fetch_max(near, Ordering::Relaxed);
    let far = believed(&control.far_bytes).max(0) as u64;
    control.far_peak_bytes.fetch_max(far, Ordering::Relaxed);
}

/// Everything that a job has done so far: the ended processes and the living ones.
#[derive(Clone, Debug)]
pub struct JobTotals {
    /// Near budget, in bytes.
    pub near_limit_bytes: u64,
    /// Near bytes now.
    pub near_bytes: u64,
    /// Largest number of near bytes seen.
    pub near_peak_bytes: u64,
    /// Far bytes now.
    pub far_bytes: u64,
    /// Largest number of far bytes seen.
    pub far_peak_bytes: u64,
    /// Processes that ever used far memory.
    pub processes: u32,
    /// Processes in slots now.
    pub processes_alive: u32,
    /// Way in which faults are served: "dormant" while no process was ever short of memory,
    /// "signal" or "thread".
    pub serving: &'static str,
    /// Event counts by name.
    pub counters: Vec<(&'static str, u64)>,
    /// Histogram of fault service times.
    pub fault_ns: [u64; BUCKETS],
}

impl JobTotals {
    /// Reads a control block. Counts of a process that ends at this moment may be missing or
    /// included twice; the next reading is right again.
    pub fn read(control: &ControlBlock) -> JobTotals {
        note_peaks(control);
        let taken = (control.processes.load(Ordering::Acquire) as usize).min(SLOTS);
        let mut totals = JobTotals {
            near_limit_bytes: control.config().near_limit() as u64,
            near_bytes: believed(&control.near_bytes).max(0) as u64,
            near_peak_bytes: control.near_peak_bytes.load(Ordering::Relaxed).min(BYTES_MAX as u64),
            far_bytes: believed(&control.far_bytes).max(0) as u64,
            far_peak_bytes: control.far_peak_bytes.load(Ordering::Relaxed).min(BYTES_MAX as u64),
            processes: control.processes.load(Ordering::Relaxed),
            processes_alive: 0,
            serving: "dormant",
            counters: Vec::new(),
            fault_ns: [0; BUCKETS],
        };
        totals.add(&control.past);
        let mut state_max = 0;
        for slot in &control.slots[..taken] {
            if slot.pid.load(Ordering::Acquire) != 0 {
                totals.processes_alive += 1;
                totals.add(&slot.counters);
                state_max = state_max.max(slot.state.load(Ordering::Relaxed));
            }
        }
        totals.serving = state_name(state_max);
        totals
    }

    fn add(&mut self, counters: &PagingCounters) {
        for (index, (name, value)) in counters.named().into_iter().enumerate() {
            match self.counters.get_mut(index) {
                Some((_, total)) => *total = total.wrapping_add(value),
                None => self.counters.push((name, value)),
            }
        }
        for (total, count) in self.fault_ns.iter_mut().zip(&counters.fault_ns) {
            *total = total.wrapping_add(count.load(Ordering::Relaxed));
        }
    }

    /// Returns the count of that name, or 0.
    pub fn count(&self, name: &str) -> u64 {
        self.counters.iter().find(|(this, _)| *this == name).map_or(0, |(_, value)| *value)
    }

    /// Returns the fault service times since an earlier reading; without one, all of them.
    pub fn fault_ns_since(&self, before: Option<&JobTotals>) -> [u64; BUCKETS] {
        let earlier = |index: usize| before.map_or(0, |before| before.fault_ns[index]);
        std::array::from_fn(|index| self.fault_ns[index].saturating_sub(earlier(index)))
    }

    /// Returns the fault service time, in nanoseconds, that this part of the faults did not exceed,
    /// if there were any.
    pub fn fault_ns_quantile(&self, numerator: u64, denominator: u64) -> Option<u64> {
        quantile_ns(&self.fault_ns, numerator, denominator)
    }
}

/// Returns the name of a slot's state.
pub fn state_name(state: u32) -> &'static str {
    match state {
        0 => "dormant",
        1 => "signal",
        2 => "thread",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    //! Danger: near bytes of a killed process that squeeze the rest of the job for ever.
    use super::*;
    use crate::config::Capture;
    use crate::control::{FaultMode, PAGES_MAX};
    use crate::runner::{RunnerBlock, Settings, create_control};
    use core::sync::atomic::AtomicU64;
    use std::os::fd::AsRawFd;
    use std::process::{Child, Command, Stdio};

    fn control() -> RunnerBlock {
        let settings = Settings {
            near_limit_bytes: 1 << 30,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls: vec![],
            token: vec![],
        };
        create_control(&settings).unwrap()
    }

    fn process() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    fn enter(control: &JobAccounts, pid: u32, near: i64, faults: u64) {
        let pidfd = sys::pidfd(pid).unwrap();
        let identity = farfield_os::process::identity_of(pid, Some(pidfd.as_raw_fd())).unwrap();
        let slot = control.take_slot(pid, identity).unwrap();
        slot.near_bytes.store(near, Ordering::Relaxed);
        control.near_bytes.fetch_add(near, Ordering::Relaxed);
        slot.counters.faults.store(faults, Ordering::Relaxed);
        slot.state.store(1, Ordering::Relaxed);
    }

    #[test]
    fn a_killed_process_gives_its_bytes_back_even_as_a_zombie() {
        let (control, mut monitor) = (control(), SlotMonitor::new());
        let (mut first, mut second) = (process(), process());
        enter(&control, first.id(), 100, 3);
        enter(&control, second.id(), 10, 4);
        monitor.sweep(&control);
        assert_eq!(monitor.pids().count(), 2);
        assert_eq!(JobTotals::read(&control).near_bytes, 110);
        first.kill().unwrap();
        // Not reaped: the descriptor tells that it ended.
        let mut fds = Vec::new();
        monitor.descriptors(&mut fds);
        sys::poll(&fds, Duration::from_secs(10), &mut Vec::new());
        monitor.sweep(&control);
        assert_eq!(monitor.pids().collect::<Vec<_>>(), [second.id()]);
        let totals = JobTotals::read(&control);
        assert_eq!((totals.near_bytes, totals.near_peak_bytes), (10, 110));
        assert_eq!((totals.count("faults"), totals.processes, totals.processes_alive), (7, 2, 1));
        first.wait().unwrap();
        drop(second.stdin.take());
        second.wait().unwrap();
        monitor.sweep(&control);
        let totals = JobTotals::read(&control);
        assert_eq!((totals.near_bytes, totals.count("faults"), totals.processes_alive), (0, 7, 0));
        assert_eq!((totals.serving, monitor.serving()), ("dormant", "signal"), "the monitor remembers");
    }

    #[test]
    fn a_process_that_died_before_it_was_seen_is_counted() {
        let (control, mut monitor) = (control(), SlotMonitor::new());
        let mut child = process();
        enter(&control, child.id(), 100, 3);
        child.kill().unwrap();
        child.wait().unwrap();
        monitor.sweep(&control);
        let totals = JobTotals::read(&control);
        assert_eq!((totals.near_bytes, totals.count("faults"), totals.near_peak_bytes), (0, 3, 100));
        // The slot is free for the next.
        let mut next = process();
        enter(&control, next.id(), 1, 0);
        monitor.sweep(&control);
        assert_eq!(monitor.pids().collect::<Vec<_>>(), [next.id()]);
        next.kill().unwrap();
        next.wait().unwrap();
    }

    /// Writes `value(n)` into the n-th word of the accounts, as every process of the job can.
    fn write_all(control: &JobAccounts, mut value: impl FnMut(usize) -> u64) {
        let start = core::ptr::from_ref(control).cast::<AtomicU64>();
        for word in 0..size_of::<JobAccounts>() / 8 {
            // SAFETY: inside the block, which consists of atomics of four or eight bytes; no other thread uses it.
            unsafe { &*start.add(word) }.store(value(word), Ordering::Relaxed);
        }
    }

    #[test]
    fn accounts_full_of_lies_break_nothing_in_the_runner() {
        let control = control();
        let mut random = fastrand::Rng::with_seed(1);
        for round in 0..24u32 {
            write_all(&control, |_| match round {
                0 => u64::MAX,
                1 => 1 << 63,
                2 => i64::MAX as u64,
                3 => u64::from(u32::MAX) << 32,
                _ => random.u64(..) >> (round * 2),
            });
            let totals = JobTotals::read(&control);
            assert!(totals.near_bytes <= BYTES_MAX as u64 && totals.near_limit_bytes == 1 << 30);
            let report = super::super::report::Report::new(&totals, Duration::from_secs(1));
            assert!(report.summary().lines().count() <= 3 && serde_json::to_string(&report).is_ok());
            assert!(control.failure().is_none_or(|(code, _)| (93..=97).contains(&code)));
            super::super::pool::look_for_failures(&control);
            let status = super::super::PoolStatus::read(&control);
            assert!(!status.reason.chars().any(char::is_control));
            let exposed: u64 = status.protection.iter().map(|(_, it)| it.exposed_pages * 4096).sum();
            let moving: u64 = status.moving.iter().map(|it| it.pages * 4096).sum();
            assert!(exposed.max(moving) <= SLOTS as u64 * PAGES_MAX * 4096);
            let _ages: Vec<_> = status.scrubbed.iter().map(|(_, scrubbed)| scrubbed.turn_age()).collect();
            let mut monitor = SlotMonitor::new();
            (0..2).for_each(|_| monitor.sweep(&control));
        }
    }

    #[test]
    fn a_taken_slot_is_left_alone_until_its_process_is_identified() {
        let (control, mut monitor) = (control(), SlotMonitor::new());
        let mut child = process();
        enter(&control, child.id(), 100, 3);
        let identity = control.slots[0].identity.swap(0, Ordering::Relaxed);
        monitor.sweep(&control);
        assert_eq!((monitor.pids().count(), JobTotals::read(&control).near_bytes), (0, 100));
        control.slots[0].identity.store(identity, Ordering::Relaxed);
        monitor.sweep(&control);
        assert_eq!(monitor.pids().collect::<Vec<_>>(), [child.id()]);
        assert_eq!(control.slots[0].process(), child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        // And one that died before it could say so.
        monitor.sweep(&control);
        let slot = control.take_slot(child.id(), 1 << 40).unwrap();
        slot.identity.store(0, Ordering::Relaxed);
        monitor.sweep(&control);
        assert_eq!(control.slots[0].process(), 0);
    }
}
