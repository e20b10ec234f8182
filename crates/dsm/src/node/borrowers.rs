//! Tasks with borrows whose starter is dead.
//!
//! A task of a scope may lend what it was lent to tasks at other nodes. If its node dies, these go on, and have
//! references to what the first lender takes back. So a scope that has lost a task waits until none of them is
//! left. Each node counts the scoped tasks that it was sent, by their senders. The lender asks all nodes about the
//! dead one. A node that is lost before it has answered may have lent further, so all are asked about that, too.

use super::{NodeId, ShareNode, WaitCause};
use crate::ShareError;
use crate::message::{ShareMessage, ShareReply, WaitAnswer};
use farfield_core::dsm::BorrowerCounts;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Scoped tasks of other nodes' tasks that are at this node.
#[derive(Default)]
pub(super) struct Borrowers(Mutex<BorrowerCounts>);

impl Borrowers {
    pub(super) fn lock(&self) -> MutexGuard<'_, BorrowerCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShareNode {
    /// Records that a scoped task of another node has no borrows any more.
    pub(super) fn end_borrower(&self, sender: NodeId) {
        let ended = self.borrowers.lock().end(sender.0);
        for ticket in ended {
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
