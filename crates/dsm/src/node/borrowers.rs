//! Tasks with borrows whose starter is dead.
//!
//! A task of a scope may lend what it was lent to tasks at other nodes. If its node dies, these go on, and have
//! references to what the first lender takes back. So a scope that has lost a task waits until none of them is
//! left. Each node counts the scoped tasks that it was sent, by their senders and by the roots of their borrows, of
//! which the lost task is one. The lender asks all nodes about the dead one and that root. A node that is lost
//! before it has answered may have lent further, so all are asked about that, too. A lock waits in the same way for
//! the borrowers of what its value owns, if a reader of it is dead.

use super::{NodeId, ShareNode, WaitCause};
use crate::ShareError;
use crate::message::{ShareMessage, ShareReply, WaitAnswer};
use crate::task::Borrows;
use farfield_core::dsm::{BorrowRoot, BorrowerCounts};
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
    /// Records that a task has no borrows of another node's task any more, if it had any.
    pub(super) fn end_borrower(&self, sender: NodeId, borrows: &Borrows) {
        let Some(roots) = borrows.as_ref().filter(|_| sender != self.id) else { return };
        let ended = self.borrowers.lock().end(sender.0, roots);
        for ticket in ended {
            self.answer(ticket, WaitAnswer::Ended);
        }
    }

    /// Waits until no living task has borrows of this root that came through tasks of a dead node. Lends the place of
    /// this thread's task meanwhile.
    pub(crate) fn outlast_borrowers(&self, dead: NodeId, root: BorrowRoot) {
        let mut dead = vec![dead];
        let mut asked = 0;
        while let Some(of) = dead.get(asked).copied() {
            asked += 1;
            for node in (0..self.peers.count()).map(NodeId) {
                if !dead.contains(&node) && self.outlast_borrowers_at(node, of, root).is_err() {
                    dead.push(node);
                }
            }
        }
    }

    /// Waits until a node has no task any more with such borrows that a dead one has sent. Fails if the node is gone.
    fn outlast_borrowers_at(&self, node: NodeId, of: NodeId, root: BorrowRoot) -> Result<(), ShareError> {
        loop {
            let (number, slot) = self.waits.expect(node, WaitCause::Task, ());
            let ended = match self
                .at_home(node, ShareMessage::OutlastBorrowers { of: of.0, root: root.bits(), ticket: number })
            {
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
