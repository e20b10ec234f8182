//! Counts of objects that have no single owner.
//!
//! The home of such an object counts its handles. Handles move from node to node as bytes, so a node
//! does not know how many it has; it knows how many it may still make, or has dropped. A node asks for
//! more before it makes a handle, and gives what is left back later. So the home never counts fewer
//! handles than there are, and counts them exactly once all nodes have been idle for a moment.
//! (Weighted reference counting, with the weights at the nodes instead of in the handles.)

use super::ShareNode;
use super::peers::Unanswered;
use crate::ShareError;
use crate::message::ShareMessage;
use crate::task::code::ShippedCode;
use farfield_core::dsm::OwnerWord;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Time for which a node keeps what it may still make, in case it soon does.
const KEEP_FOR: Duration = Duration::from_millis(5);
/// Most handles that a node asks for at a time.
const GRANT_MAX: u64 = 1 << 10;

/// Handles of objects at this node, over all nodes.
#[derive(Default)]
pub(super) struct HomeCounts(Mutex<HashMap<OwnerWord, HandleCount>>);

struct HandleCount {
    handles: i64,
    /// Destructor of the object.
    destructor: Option<ShippedCode>,
}

/// Handles of other nodes' objects that this node may still make.
#[derive(Default)]
pub(super) struct SpareShares(Arc<SparePool>);

#[derive(Default)]
struct SparePool {
    spares: Mutex<SpareTable>,
    changed: Condvar,
}

#[derive(Default)]
struct SpareTable {
    by_word: HashMap<OwnerWord, SpareHandles>,
    has_thread: bool,
    has_ended: bool,
}

struct SpareHandles {
    handles: u64,
    /// Handles that were asked for last.
    granted: u64,
    is_used: bool,
}

impl SparePool {
    fn lock(&self) -> MutexGuard<'_, SpareTable> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HomeCounts {
    fn lock(&self) -> MutexGuard<'_, HashMap<OwnerWord, HandleCount>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SpareShares {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl ShareNode {
    /// Begins to count the handles of a new object of this node: there is one.
    pub(crate) fn begin_count(&self, word: OwnerWord, destructor: Option<ShippedCode>) {
        self.counts.lock().insert(word, HandleCount { handles: 1, destructor });
    }

    /// Counts more or fewer handles of an object of this node. Returns whether it is counted. Without
    /// handles the object is dropped.
    pub(super) fn count_handles(&self, word: OwnerWord, more: i64) -> bool {
        let mut counts = self.counts.lock();
        let Some(count) = counts.get_mut(&word) else { return false };
        count.handles += more;
        if count.handles <= 0 {
            let destructor = count.destructor;
            counts.remove(&word);
            drop(counts);
            if !self.end_senders(word) {
                self.outbox.free(self.id, word, destructor);
            }
        }
        true
    }

    /// Lets this node make one more handle of an object whose handle is borrowed. Waits for the
    /// object's node if none is spare.
    pub(crate) fn share(&self, word: OwnerWord) -> Result<(), Unanswered> {
        let home = self.home_of(word);
        if self.is_promoted(word) {
            // Nobody counts them any more: the object stays until the program ends.
            return Ok(());
        }
        if home == self.id {
            let is_counted = self.count_handles(word, 1);
            return if is_counted { Ok(()) } else { Err(ShareError::Stale { node: home }.into()) };
        }
        let more = {
            let mut table = self.spares.0.lock();
            match table.by_word.get_mut(&word) {
                Some(spare) if spare.handles > 0 => {
                    spare.handles -= 1;
                    spare.is_used = true;
                    return Ok(());
                }
                Some(spare) => (spare.granted * 2).min(GRANT_MAX),
                None => 1,
            }
        };
        let message = ShareMessage::Share { word: word.bits(), more: more.cast_signed() };
        match self.peers.tell(self, home, message) {
            Err(_) if self.is_promoted(word) => return Ok(()),
            told => told?,
        }
        self.keep_spare(word, more - 1, Some(more));
        Ok(())
    }

    /// Drops a handle. Never waits for another node.
    pub(crate) fn unshare(&self, word: OwnerWord) {
        if self.home_of(word) == self.id {
            self.count_handles(word, -1);
        } else if !self.is_promoted(word) {
            self.keep_spare(word, 1, None);
        }
    }

    fn keep_spare(&self, word: OwnerWord, handles: u64, granted: Option<u64>) {
        let mut table = self.spares.0.lock();
        let spare = table.by_word.entry(word).or_insert(SpareHandles { handles: 0, granted: 1, is_used: true });
        spare.handles += handles;
        spare.granted = granted.unwrap_or(spare.granted);
        spare.is_used = true;
        if !table.has_thread {
            let (pool, node) = (self.spares.0.clone(), self.this.clone());
            let thread = std::thread::Builder::new().name("share-counts".into());
            // Without a thread the next one tries again.
            table.has_thread = thread.spawn(move || give_back(&pool, &node)).is_ok();
        }
        self.spares.0.changed.notify_one();
    }
}

/// Gives spare handles back to their homes that were not used for a while.
fn give_back(pool: &SparePool, node: &Weak<ShareNode>) {
    let mut table = pool.lock();
    while !table.has_ended {
        if table.by_word.is_empty() {
            table = pool.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let ended = pool.changed.wait_timeout_while(table, KEEP_FOR, |table| !table.has_ended);
        table = ended.unwrap_or_else(PoisonError::into_inner).0;
        let idle: Vec<_> =
            table.by_word.extract_if(|_, spare| !core::mem::replace(&mut spare.is_used, false)).collect();
        let Some(node) = node.upgrade() else { return };
        for (word, spare) in idle {
            if spare.handles > 0 {
                let more = -spare.handles.cast_signed();
                // Said twice, it would free what others use.
                node.outbox.tell_once(node.home_of(word), ShareMessage::Share { word: word.bits(), more });
            }
        }
    }
}
