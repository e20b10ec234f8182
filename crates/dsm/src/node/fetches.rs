//! Copies that are fetched while nobody waits for them, or while somebody waits who does not block.
//! Each other node has threads of its own, so one that is silent holds up nobody else.

use super::{GroupType, NodeId, ShareNode};
use crate::ShareError;
use crate::copies::{CopyFlight, CopyKey, CopyLookup};
use farfield_core::dsm::OwnerWord;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Most threads that fetch copies from a node at a time.
const THREADS_MAX: usize = 4;
/// Time for which a thread waits for the next copy before it ends.
const IDLE_FOR: Duration = Duration::from_secs(1);

/// Version of an object that is wanted here.
#[derive(Clone, Copy)]
pub(crate) struct WantedObject {
    pub(crate) word: OwnerWord,
    pub(crate) bytes: usize,
    /// Type of the group, if others are tied to the object.
    pub(crate) group: Option<GroupType>,
}

impl WantedObject {
    /// Returns the key of its copy.
    pub(crate) fn key(self) -> CopyKey {
        (self.word, self.bytes)
    }
}

/// Threads that fetch copies from each other node, begun when there are some to fetch.
#[derive(Default)]
pub(super) struct FetchThreads(Mutex<HashMap<NodeId, Arc<FetchQueue>>>);

#[derive(Default)]
struct FetchQueue {
    jobs: Mutex<FetchJobs>,
    changed: Condvar,
}

#[derive(Default)]
struct FetchJobs {
    waiting: VecDeque<(WantedObject, Arc<CopyFlight>)>,
    threads: usize,
    idle: usize,
    has_ended: bool,
}

impl FetchQueue {
    fn lock(&self) -> MutexGuard<'_, FetchJobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches copies until there were none for a while, or the node is gone.
    fn run(&self, node: &Weak<ShareNode>) {
        let mut jobs = self.lock();
        loop {
            if let Some((wanted, flight)) = jobs.waiting.pop_front() {
                drop(jobs);
                if let Some(node) = node.upgrade() {
                    let fetched = node.fetch_copy(wanted);
                    node.copies.land(wanted.key(), &flight, fetched);
                }
                jobs = self.lock();
                continue;
            }
            if jobs.has_ended {
                break;
            }
            jobs.idle += 1;
            let wait = self.changed.wait_timeout(jobs, IDLE_FOR).unwrap_or_else(PoisonError::into_inner);
            jobs = wait.0;
            jobs.idle -= 1;
            if wait.1.timed_out() && jobs.waiting.is_empty() {
                break;
            }
        }
        jobs.threads -= 1;
    }
}

impl Drop for FetchThreads {
    fn drop(&mut self) {
        for queue in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            queue.lock().has_ended = true;
            queue.changed.notify_all();
        }
    }
}

impl ShareNode {
    /// Starts to fetch a copy, if there is none, and does not wait for it.
    pub(crate) fn start_copy(&self, wanted: WantedObject) -> CopyLookup {
        let found = self.copies.look_up(wanted.key());
        let CopyLookup::New(flight) = &found else { return found };
        let home = self.home_of(wanted.word);
        let queue = self.fetches.0.lock().unwrap_or_else(PoisonError::into_inner).entry(home).or_default().clone();
        let mut jobs = queue.lock();
        jobs.waiting.push_back((wanted, flight.clone()));
        if jobs.idle < jobs.waiting.len() && jobs.threads < THREADS_MAX {
            let (queue, node) = (queue.clone(), self.this.clone());
            let thread = std::thread::Builder::new().name("share-fetch".into());
            jobs.threads += usize::from(thread.spawn(move || queue.run(&node)).is_ok());
        }
        // Without a thread nobody would fetch it.
        let refused = if jobs.threads == 0 { jobs.waiting.pop_back() } else { None };
        drop(jobs);
        match refused {
            Some((_, flight)) => {
                self.copies.land(wanted.key(), &flight, Err(ShareError::Refused { node: self.id }));
            }
            None => queue.changed.notify_one(),
        }
        found
    }
}
