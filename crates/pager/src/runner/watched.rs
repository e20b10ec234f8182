//! A running job as the agent of its node sees it: from outside, without believing what processes
//! of the job say.

use super::block::Requests;
use super::{ControlBlock, JobTotals, NearStatus, budget, offer_near, processes, sys};
use crate::control::believed;
use farfield_core::policy::cluster::JobClaim;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Maximum number of processes that are looked at for one job. A job with more counts as these.
const PROCESSES_MAX: usize = 1 << 16;

/// Processor time below which a job did too little for a slowdown.
pub(super) const BUSY_NS_MIN: f64 = 2e8;

/// What a job had done at an earlier look, for [`WatchedJob::slowdown_since`].
#[derive(Debug, Default)]
pub struct JobActivity {
    totals: Option<JobTotals>,
    /// Processor time of each process in nanoseconds.
    busy: BTreeMap<u32, u64>,
}

/// Running job, watched from outside.
pub struct WatchedJob {
    runner: u32,
    /// Descriptor that is readable when the runner has ended.
    pidfd: OwnedFd,
    control: ControlBlock,
    /// Block in which budgets are offered: proof that the process is a runner that this user may command.
    requests: (File, Requests),
}

impl WatchedJob {
    /// Watches the job whose runner is process `runner`. Fails if the process is no runner of this
    /// release, or if this user may not change its budget.
    pub fn open(runner: u32) -> io::Result<WatchedJob> {
        // The descriptor comes first: what is opened afterwards belongs to this very process, or
        // the process has ended and the descriptor says so.
        let pidfd = sys::pidfd(runner)?;
        let path = super::block::runner_path(runner)?;
        let path = path.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "not a `farfield run`"))?;
        let control = ControlBlock::open(&path)?;
        let requests = control.open_requests()?;
        Ok(WatchedJob { runner, pidfd, control, requests })
    }

    /// Finds all jobs that the agent at `socket` has admitted and that still run.
    pub fn find_admitted(socket: &str) -> Vec<WatchedJob> {
        let jobs = processes().filter_map(|pid| WatchedJob::open(pid).ok());
        jobs.filter(|job| job.agent() == socket && job.is_admitted() && !job.has_ended()).collect()
    }

    /// Returns the process id of the runner.
    pub fn runner(&self) -> u32 {
        self.runner
    }

    /// Checks whether the runner has ended.
    pub fn has_ended(&self) -> bool {
        let mut ready = Vec::new();
        sys::poll(&[self.pidfd.as_raw_fd()], Duration::ZERO, &mut ready);
        ready == [true]
    }

    /// Returns the socket of the agent that decides the budget of the job, as its runner says.
    pub fn agent(&self) -> String {
        self.control.config().agent.line()
    }

    /// Returns whether the job has been admitted, as its runner says.
    pub fn is_admitted(&self) -> bool {
        self.control.config().is_admitted.load(Ordering::Acquire) != 0
    }

    /// Returns the claim of the job, if its runner has written one that can be read.
    pub fn claim(&self) -> Option<JobClaim> {
        serde_json::from_str(&self.control.config().claim.line()).ok()
    }

    /// Returns the budget of the job and what it has of it, as its runner and its processes say.
    pub fn status(&self) -> NearStatus {
        NearStatus::read(&self.control)
    }

    /// Offers the job this much near memory at most.
    pub fn offer(&self, bytes: u64) -> Result<(), super::JobRefusal> {
        offer_near(&self.control, bytes)
    }

    /// Returns the budget that the job was offered last, in bytes, whoever offered it.
    pub fn told_bytes(&self) -> u64 {
        self.requests.1.near_offer_bytes.load(Ordering::Acquire)
    }

    /// Returns the memory of the job that is stored far, in bytes, as its processes count it.
    pub fn far_bytes(&self) -> u64 {
        believed(&self.control.far_bytes).max(0) as u64
    }

    /// Measures the near memory of the job in bytes: anonymous memory of all processes that descend
    /// from its runner, without its private server. Memory that processes share after a fork is
    /// counted once if more than `enough_bytes` would be counted otherwise, which takes longer.
    pub fn resident_bytes(&self, tree: &ProcessTree, enough_bytes: u64) -> u64 {
        let pids = self.descendants(tree);
        let bytes: u64 = pids.iter().map(|pid| field(*pid, "status", "RssAnon:").unwrap_or(0)).sum();
        if bytes <= enough_bytes {
            return bytes;
        }
        let shared_once =
            |pid: &u32| field(*pid, "smaps_rollup", "Pss_Anon:").or_else(|| field(*pid, "status", "RssAnon:"));
        pids.iter().filter_map(shared_once).sum()
    }
}

impl WatchedJob {
    fn descendants(&self, tree: &ProcessTree) -> Vec<u32> {
        tree.descendants(self.runner, self.control.config().server_pid.load(Ordering::Relaxed))
    }

    /// Measures how many times as long the job has taken since an earlier look as it would have without
    /// faults: their times as its processes count them, and the processor time of these processes as
    /// the kernel does. `None` at the first look, and if the job did too little.
    pub fn slowdown_since(&self, before: &mut JobActivity, tree: &ProcessTree) -> Option<f64> {
        let time_of = |pid: u32| Some((pid, u64::try_from(sys::processor_time(pid)?.as_nanos()).ok()?));
        let busy: BTreeMap<u32, u64> = self.descendants(tree).into_iter().filter_map(time_of).collect();
        let totals = JobTotals::read(&self.control);
        let busy_ns = busy.iter().map(|(pid, ns)| ns.saturating_sub(*before.busy.get(pid).unwrap_or(&0))).sum();
        let window = before.totals.as_ref().map(|before| budget::window(&totals, Some(before), busy_ns));
        *before = JobActivity { totals: Some(totals), busy };
        window.filter(|window| window.busy_ns >= BUSY_NS_MIN).map(|window| window.slowdown())
    }
}

/// Returns a field of a file in `/proc/PID` that is in kB, in bytes; `None` if the process is gone.
fn field(pid: u32, file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Processes of this machine with their parents, at one moment.
#[derive(Debug)]
pub struct ProcessTree {
    children: BTreeMap<u32, Vec<u32>>,
}

impl ProcessTree {
    /// Asks the kernel for the parent of every process.
    pub fn read() -> ProcessTree {
        let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for pid in processes() {
            if let Some(parent) = sys::parent(pid) {
                children.entry(parent).or_default().push(pid);
            }
        }
        ProcessTree { children }
    }

    /// Returns the processes that descend from `root`, without itself and without `except` and what
    /// descends from it.
    fn descendants(&self, root: u32, except: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut open = vec![root];
        while let Some(parent) = open.pop() {
            for &child in self.children.get(&parent).into_iter().flatten().filter(|child| **child != except) {
                found.push(child);
                open.push(child);
            }
            if found.len() >= PROCESSES_MAX {
                break;
            }
        }
        found
    }
}

/// Returns the socket of the agent of this node: that of this user, `/run/farfield/agent.sock` for
/// root.
pub fn agent_socket() -> PathBuf {
    match (farfield_os::serving::effective_uid(), std::env::var_os("XDG_RUNTIME_DIR")) {
        (0, _) => PathBuf::from("/run/farfield/agent.sock"),
        (_, Some(folder)) => PathBuf::from(folder).join("farfield-agent.sock"),
        (uid, None) => PathBuf::from(format!("/tmp/farfield-agent-{uid}.sock")),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a job whose memory is not seen, and one that is billed for a stranger's.
    use super::*;
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    fn tree(parents: &[(u32, u32)]) -> ProcessTree {
        let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (child, parent) in parents {
            children.entry(*parent).or_default().push(*child);
        }
        ProcessTree { children }
    }

    #[test]
    fn descendants_are_those_of_the_runner_without_its_server() {
        let tree = tree(&[(2, 1), (10, 2), (11, 2), (12, 11), (13, 12), (14, 10), (20, 1), (21, 20)]);
        let mut found = tree.descendants(2, 10);
        found.sort_unstable();
        assert_eq!(found, [11, 12, 13]);
        assert!(tree.descendants(99, 0).is_empty());
        // A list that was read while processes came and went may have a circle in it.
        let circle = self::tree(&[(2, 3), (3, 2)]);
        assert!(circle.descendants(2, 0).len() >= PROCESSES_MAX);
    }

    #[test]
    fn the_memory_of_a_child_is_seen_from_outside() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // While it starts it grows between one look and the next. Whoever has answered waits.
        child.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let tree = ProcessTree::read();
        assert!(tree.descendants(std::process::id(), 0).contains(&child.id()));
        let [resident, shared_once] = [("status", "RssAnon:"), ("smaps_rollup", "Pss_Anon:")]
            .map(|(file, name)| field(child.id(), file, name).unwrap());
        assert!(resident > 0 && shared_once <= resident, "{resident} {shared_once}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(field(child.id(), "status", "RssAnon:"), None);
    }

    #[test]
    fn a_process_that_is_no_runner_is_not_watched() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        assert_eq!(WatchedJob::open(child.id()).err().unwrap().kind(), io::ErrorKind::NotFound);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(WatchedJob::open(child.id()).is_err());
    }
}
