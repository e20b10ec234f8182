//! Finds the process that a slot stands for.
//!
//! The contents of a slot were written by a process. That process may be in a pid namespace of its
//! own, where numbers mean other processes than here, or it may lie. So the runner looks for the
//! process that *is* it, by an identity that the kernel gives, and sends signals only to its own
//! descendants.

use super::sys;
use farfield_os::process::{UNKNOWN_IDENTITY, identity_of, inner_pid, start_ticks};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Maximum number of ancestors that are looked at.
const DEPTH_MAX: usize = 1000;
/// Number of times that a line of ancestors is walked: one of them may end meanwhile, and its
/// children get another parent.
const WALKS: usize = 4;

/// Process that has a slot.
pub(super) struct JobProcess {
    /// Process id here.
    pid: u32,
    /// Start time in clock ticks; tells the process apart if there is no descriptor.
    start: Option<u64>,
    /// Descriptor that is readable when the process has ended; `None` if there was no descriptor
    /// left.
    pidfd: Option<OwnedFd>,
    is_descendant: bool,
}

impl JobProcess {
    /// Returns the process with this number here if it has this identity. Without an identity, it
    /// must be a descendant that has the same number inside and is not `known` yet.
    pub(super) fn by_number(pid: u32, identity: u64, known: impl Fn(u32) -> bool) -> Option<JobProcess> {
        JobProcess::open(pid, pid, identity, known)
    }

    /// Returns the process `number` here if it calls itself `pid` and has this identity.
    fn open(number: u32, pid: u32, identity: u64, known: impl Fn(u32) -> bool) -> Option<JobProcess> {
        let pidfd = match sys::pidfd(number) {
            Ok(pidfd) => Some(pidfd),
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => None,
            Err(_) => return None,
        };
        let is_anonymous = identity == UNKNOWN_IDENTITY;
        let is_named = if is_anonymous {
            inner_pid(&number) == Some(pid) && !known(number)
        } else {
            identity_of(number, pidfd.as_ref().map(AsRawFd::as_raw_fd)) == Some(identity)
        };
        if !is_named {
            return None;
        }
        let member =
            JobProcess { pid: number, start: start_ticks(&number), pidfd, is_descendant: is_descendant(number) };
        ((member.is_descendant || !is_anonymous) && !member.is_dead()).then_some(member)
    }

    /// Returns the process id here.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns a descriptor that is readable when the process has ended, if there is one.
    pub(super) fn pidfd(&self) -> Option<i32> {
        self.pidfd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Checks whether the process has ended. A zombie has: it has no memory any more.
    pub(super) fn is_dead(&self) -> bool {
        match &self.pidfd {
            Some(pidfd) => {
                let mut ready = Vec::new();
                sys::poll(&[pidfd.as_raw_fd()], core::time::Duration::ZERO, &mut ready);
                ready == [true]
            }
            None => matches!(sys::state(self.pid), None | Some(b'Z' | b'X')) || start_ticks(&self.pid) != self.start,
        }
    }

    /// Sends the process a signal. Fails with EPERM if it does not descend from this process.
    pub(super) fn signal(&self, signal: i32) -> io::Result<()> {
        match &self.pidfd {
            _ if !self.is_descendant => Err(io::Error::from_raw_os_error(libc::EPERM)),
            Some(pidfd) => sys::pidfd_signal(pidfd, signal),
            None if self.is_dead() => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            None => sys::kill(self.pid, signal),
        }
    }
}

/// Processes of this machine at one moment. Processes in other pid namespaces have other numbers
/// here than there.
pub(super) struct Listing(Vec<ListedProcess>);

struct ListedProcess {
    number: u32,
    inner: Option<u32>,
    identity: Option<u64>,
}

impl Listing {
    /// Asks the kernel about every process, which takes milliseconds.
    pub(super) fn make() -> Listing {
        let list = |number: u32| {
            let pidfd = sys::pidfd(number).ok();
            let identity = identity_of(number, pidfd.as_ref().map(AsRawFd::as_raw_fd));
            ListedProcess { number, inner: inner_pid(&number), identity }
        };
        Listing(super::processes().map(list).collect())
    }

    /// Finds the process that calls itself `pid` and has this identity. Without an identity, finds
    /// a descendant that calls itself `pid` and is not `known` yet. `None`: the process had ended
    /// when the listing was made.
    pub(super) fn find(&self, pid: u32, identity: u64, known: impl Fn(u32) -> bool) -> Option<JobProcess> {
        let may_be = |listed: &&ListedProcess| match identity {
            UNKNOWN_IDENTITY => listed.inner == Some(pid),
            identity => listed.identity == Some(identity),
        };
        self.0.iter().filter(may_be).find_map(|listed| JobProcess::open(listed.number, pid, identity, &known))
    }
}

/// Checks whether a process descends from this one. As a subreaper this process keeps all
/// descendants, whichever of them ends.
fn is_descendant(pid: u32) -> bool {
    let own = std::process::id();
    let reaches_us = || {
        let mut at = pid;
        for _ in 0..DEPTH_MAX {
            match sys::parent(at) {
                Some(parent) if parent == own => return true,
                Some(parent) if parent > 1 => at = parent,
                _ => return false,
            }
        }
        false
    };
    (0..WALKS).any(|_| reaches_us())
}

#[cfg(test)]
mod tests {
    //! Danger: a signal for a process that has nothing to do with the job.
    use super::*;
    use farfield_os::process::identity;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    fn cat() -> std::process::Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    }

    fn find(pid: u32, identity: u64, known: impl Fn(u32) -> bool) -> Option<JobProcess> {
        let listed = Listing::make().find(pid, identity, &known);
        let by_number = JobProcess::by_number(pid, identity, known);
        assert!(by_number.is_none() || listed.is_some(), "what is found by its number is in the list too");
        listed
    }

    fn identity_here(pid: u32) -> u64 {
        let pidfd = sys::pidfd(pid).unwrap();
        identity_of(pid, Some(pidfd.as_raw_fd())).unwrap()
    }

    #[test]
    fn a_slot_that_names_a_stranger_gets_no_signal_sent() {
        // Number 1 of some pid namespace: here it is somebody else.
        assert!(find(1, identity_here(std::process::id()) + (1 << 40), |_| false).is_none());
        // Somebody who lies, and knows the identity.
        let stranger = find(1, identity_here(1), |_| false).unwrap();
        assert!(!stranger.is_descendant && !stranger.is_dead());
        assert_eq!(stranger.signal(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        // This process itself is no descendant of itself.
        let own = find(std::process::id(), identity(), |_| false).unwrap();
        assert!(own.signal(0).is_err());
    }

    #[test]
    fn a_process_is_found_by_what_it_is_and_not_by_its_number() {
        let mut child = cat();
        let member = find(1, identity_here(child.id()), |_| false).unwrap();
        assert_eq!((member.pid(), member.is_descendant), (child.id(), true));
        member.signal(libc::SIGTERM).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
        assert!(member.is_dead());
        assert!(find(child.id(), UNKNOWN_IDENTITY, |_| false).is_none());
    }

    #[test]
    fn without_an_identity_each_descendant_is_taken_once() {
        let mut child = cat();
        assert!(find(child.id(), UNKNOWN_IDENTITY, |_| false).is_some());
        assert!(find(child.id(), UNKNOWN_IDENTITY, |pid| pid == child.id()).is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_living_and_the_dead_are_told_apart_without_a_descriptor() {
        let mut child = cat();
        let mut member = find(child.id(), identity_here(child.id()), |_| false).unwrap();
        let pidfd = member.pidfd.take().unwrap();
        assert!(!member.is_dead());
        member.start = member.start.map(|start| start + 1);
        assert!(member.is_dead(), "another process has its number now");
        member.start = member.start.map(|start| start - 1);
        child.kill().unwrap();
        sys::poll(&[pidfd.as_raw_fd()], core::time::Duration::from_secs(10), &mut Vec::new());
        assert!(member.is_dead(), "zombie");
        assert!(member.signal(libc::SIGTERM).is_err());
        child.wait().unwrap();
        assert!(member.is_dead());
    }
}
