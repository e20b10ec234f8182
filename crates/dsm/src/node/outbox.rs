//! What a node does later: objects without owners are dropped, and messages that nobody waits for are
//! sent. Each other node has a thread of its own, so one that is silent holds up nobody else.

use super::{NodeId, ShareNode};
use crate::ShareError;
use crate::message::{ShareMessage, WaitAnswer};
use crate::stats::count;
use crate::task::code::ShippedCode;
use farfield_core::dsm::OwnerWord;
use std::collections::HashMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, OnceLock, PoisonError, Weak};

/// Work that nobody waits for.
enum Errand {
    /// An object has lost its owner. It is dropped at its node.
    Free(OwnerWord, Option<ShippedCode>),
    /// A message is said to the node, again and again if it is silent.
    Tell(ShareMessage<'static>),
    /// A task that waits here is given to the node.
    Give,
    /// A message is said to the node once, because it must not be said twice.
    TellOnce(ShareMessage<'static>),
}

#[derive(Default)]
pub(crate) struct Outbox {
    node: OnceLock<Weak<ShareNode>>,
    lanes: Mutex<HashMap<NodeId, Sender<Errand>>>,
}

impl Outbox {
    /// Opens the outbox of a node, whose threads end with it.
    pub(super) fn open(&self, node: Weak<ShareNode>) {
        let _ = self.node.set(node);
    }

    /// Drops an object at its node and frees its block.
    pub(super) fn free(&self, home: NodeId, word: OwnerWord, destructor: Option<ShippedCode>) {
        self.put(home, Errand::Free(word, destructor));
    }

    /// Gives a node a task that waits here.
    pub(super) fn give(&self, node: NodeId) {
        self.put(node, Errand::Give);
    }

    /// Tells a node something that it may hear twice.
    pub(crate) fn tell(&self, node: NodeId, message: ShareMessage<'static>) {
        self.put(node, Errand::Tell(message));
    }

    /// Tells a node something once.
    pub(super) fn tell_once(&self, node: NodeId, message: ShareMessage<'static>) {
        self.put(node, Errand::TellOnce(message));
    }

    fn put(&self, to: NodeId, errand: Errand) {
        let Some(node) = self.node.get() else { return };
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        // A thread is there as long as its lane.
        let errand = match lanes.get(&to) {
            Some(lane) => match lane.send(errand) {
                Ok(()) => return,
                Err(unsent) => unsent.0,
            },
            None => errand,
        };
        let (sender, receiver) = mpsc::channel();
        let _ = sender.send(errand);
        let of_thread = node.clone();
        let thread = std::thread::Builder::new().name("share-outbox".into());
        if thread.spawn(move || run_errands(&of_thread, to, &receiver)).is_ok() {
            lanes.insert(to, sender);
        } else if let Some(node) = node.upgrade() {
            // Without a thread it is left undone, and counted.
            count(&node.counters.orphans, 1);
        }
    }
}

fn run_errands(node: &Weak<ShareNode>, to: NodeId, receiver: &Receiver<Errand>) {
    while let Ok(errand) = receiver.recv() {
        let Some(node) = node.upgrade() else { return };
        let (message, is_repeated) = match errand {
            Errand::Free(word, destructor) if to == node.id => {
                node.drop_here(word, destructor);
                continue;
            }
            Errand::Give => {
                node.give_task(to);
                continue;
            }
            Errand::Free(word, destructor) => {
                count(&node.counters.frees, 1);
                (ShareMessage::Free { word: word.bits(), destructor: destructor.map(ShippedCode::reference) }, true)
            }
            Errand::Tell(message) => (message, true),
            Errand::TellOnce(message) => (message, false),
        };
        let mut may_be_done = false;
        let is_undone = loop {
            match node.peers.tell(&node, to, message.clone()) {
                Ok(()) => break false,
                Err(unanswered) if is_repeated && matches!(unanswered.error, ShareError::Silent { .. }) => {
                    may_be_done |= unanswered.may_have_arrived;
                }
                // The node did it when it was said before.
                Err(unanswered) if may_be_done && matches!(unanswered.error, ShareError::Stale { .. }) => break false,
                // Another node keeps the object or the lock since.
                Err(_) if node.tell_host(to, &message) => break false,
                Err(_) => break true,
            }
        };
        if is_undone && owns_objects(&message) {
            count(&node.counters.orphans, 1);
        }
    }
}

impl ShareNode {
    /// Frees an object, gives a lock back, takes a wish back, or ends a receiver at the node that keeps it now, if that
    /// is another one than it was. Returns whether it is.
    fn tell_host(&self, told: NodeId, message: &ShareMessage<'static>) -> bool {
        let (ShareMessage::Free { word, .. }
        | ShareMessage::Unlock { word, .. }
        | ShareMessage::Withdraw { word, .. }
        | ShareMessage::EndReceiver { word }) = message
        else {
            return false;
        };
        let Some(word) = OwnerWord::from_bits(*word).filter(|word| self.host_of(*word) != told) else { return false };
        match message {
            ShareMessage::Free { destructor, .. } => {
                self.outbox.free(self.host_of(word), word, destructor.and_then(ShippedCode::find));
            }
            ShareMessage::Unlock { ticket, end, .. } => self.give_back(word, *ticket, end.clone()),
            ShareMessage::Withdraw { ticket, .. } => self.withdraw_there(word, *ticket),
            _ => self.end_receiving(word),
        }
        true
    }
}

/// Returns whether objects have no owner if nobody receives the message.
fn owns_objects(message: &ShareMessage<'_>) -> bool {
    match message {
        ShareMessage::Free { .. } | ShareMessage::Share { .. } => true,
        ShareMessage::Answered { answer, .. } => matches!(answer, WaitAnswer::Received(_)),
        _ => false,
    }
}
