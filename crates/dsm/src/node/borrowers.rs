//! Tasks with borrows whose starter is dead.
//!
//! A task of a scope may lend what it was lent to tasks at other nodes. If its node dies, these go on, and have
//! references to what the first lender takes back. So a scope that has lost a task waits until none of them is
//! left. Each node counts the scoped tasks that it was sent, by their senders. The lender asks all nodes about the
//! dead one. A node that is lost before it has answered may have lent further, so all are asked about that, too.

use super::{NodeId, ShareNode, WaitCause};
use crate::ShareError;
use crate::message::{ShareMessage, ShareReply, WaitAnswer};
use farfield_core::dsm::HomeTicket;
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Scoped tasks of other nodes' tasks that are at this node.
#[derive(Default)]
pub(crate) struct Borrowers(Mutex<BorrowerTable>);

#[derive(Default)]
struct BorrowerTable {
    /// Number of tasks, by the node that has sent them.
    counts: HashMap<NodeId, usize>,
    /// Dead nodes, of which no task is taken any more.
    closed: HashSet<NodeId>,
    /// Waits for the end of all tasks that a dead node has sent.
    waits: Vec<(NodeId, HomeTicket)>,
}

impl Borrowers {
    fn lock(&self) -> MutexGuard<'_, BorrowerTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a task that a node has sent. Returns false if that is known to be dead: it is not taken.
    pub(super) fn admit(&self, sender: NodeId) -> bool {
        let mut table = self.lock();
        let is_open = !table.closed.contains(&sender);
        if is_open {
            *table.counts.entry(sender).or_default() += 1;
        }
        is_open
    }

    /// Records that a task has ended. Returns the waits that are over.
    pub(super) fn end(&self, sender: NodeId) -> Vec<HomeTicket> {
        let mut table = self.lock();
        let left = table.counts.get_mut(&sender).map_or(0, |count| {
            *count = count.saturating_sub(1);
            *count
        });
        if left > 0 {
            return Vec::new();
        }
        table.counts.remove(&sender);
        table.waits.extract_if(.., |(of, _)| *of == sender).map(|(_, ticket)| ticket).collect()
    }

    /// Takes no task of a dead node from now on. Returns whether there is none; otherwise the ticket waits.
    pub(super) fn close(&self, dead: NodeId, ticket: HomeTicket) -> bool {
        let mut table = self.lock();
        table.closed.insert(dead);
        let is_none = !table.counts.contains_key(&dead);
        if !is_none {
            table.waits.push((dead, ticket));
        }
        is_none
    }
}

impl ShareNode {
    /// Records that a scoped task of another node has no borrows any more.
    pub(super) fn end_borrower(&self, sender: NodeId) {
        for ticket in self.borrowers.end(sender) {
            self.answer(ticket, WaitAnswer::Ended);
        }
    }

    /// Waits until no living task has borrows that came through tasks of a dead node. Lends the place of this
    /// thread's task meanwhile.
    pub(crate) fn outlast_borrowers(&self, dead: NodeId) {
        let mut dead = vec![dead];
        let mut asked = 0;
        while let Some(of) = dead.get(asked).copied() {
            asked += 1;
            for node in (0..self.peers.count()).map(NodeId) {
                if !dead.contains(&node) && self.outlast_borrowers_at(node, of).is_err() {
                    dead.push(node);
                }
            }
        }
    }

    /// Waits until a node has no scoped task any more that a dead one has sent. Fails if the node is gone.
    fn outlast_borrowers_at(&self, node: NodeId, of: NodeId) -> Result<(), ShareError> {
        loop {
            let (number, slot) = self.waits.expect(node, WaitCause::Task, ());
            let ended = match self.at_home(node, ShareMessage::OutlastBorrowers { of: of.0, ticket: number }) {
                Ok(ShareReply::Waits) => slot.wait(self).0.map(drop),
                Ok(_) => Ok(()),
                Err(unanswered) => Err(unanswered.error),
            };
            self.waits.take(number);
            match ended {
                Err(ShareError::Silent { .. }) => {}
                ended => return ended,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_node_s_tasks_are_counted_until_the_last_one_ends_and_no_more_are_taken() {
        let (borrowers, dead, other) = (Borrowers::default(), NodeId(1), NodeId(2));
        let ticket = |number| HomeTicket { node: 0, number };
        assert!(borrowers.admit(dead) && borrowers.admit(dead) && borrowers.admit(other));
        assert!(!borrowers.close(dead, ticket(1)) && !borrowers.close(dead, ticket(2)));
        assert!(!borrowers.admit(dead), "it would not be waited for");
        assert_eq!((borrowers.end(dead), borrowers.end(other)), (vec![], vec![]));
        assert_eq!(borrowers.end(dead), [ticket(1), ticket(2)]);
        assert!(borrowers.close(dead, ticket(3)) && !borrowers.admit(dead));
        assert!(borrowers.admit(other) && !borrowers.close(other, ticket(4)));
        assert_eq!(borrowers.end(other), [ticket(4)]);
    }
}
