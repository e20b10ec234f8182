//! Objects that have lost their owners: they are dropped and freed by a thread of its own, so no
//! `Drop` waits for another node.

use super::ShareNode;
use crate::message::ShareMessage;
use crate::stats::count;
use crate::task::code::ShippedCode;
use farfield_core::dsm::OwnerWord;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// An object without an owner, and the destructor of its type.
struct Orphan(OwnerWord, Option<ShippedCode>);

#[derive(Default)]
pub(super) struct Frees(OnceLock<Mutex<Sender<Orphan>>>);

impl Frees {
    /// Starts the thread. It ends with the node.
    pub(super) fn start(&self, node: &Arc<ShareNode>) -> std::io::Result<()> {
        let (sender, receiver) = mpsc::channel();
        let node = Arc::downgrade(node);
        std::thread::Builder::new().name("share-frees".into()).spawn(move || free_all(&node, &receiver))?;
        let _ = self.0.set(Mutex::new(sender));
        Ok(())
    }

    pub(super) fn put(&self, word: OwnerWord, destructor: Option<ShippedCode>) {
        if let Some(sender) = self.0.get() {
            let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
            // The thread is there as long as the node.
            let _ = sender.send(Orphan(word, destructor));
        }
    }
}

fn free_all(node: &Weak<ShareNode>, receiver: &Receiver<Orphan>) {
    while let Ok(Orphan(word, destructor)) = receiver.recv() {
        let Some(node) = node.upgrade() else { return };
        let home = node.home_of(word);
        if home == node.id {
            node.drop_here(word, destructor);
            continue;
        }
        count(&node.counters.frees, 1);
        let message = ShareMessage::Free { word: word.bits(), destructor: destructor.map(ShippedCode::reference) };
        if node.peers.tell(&node, home, message).is_err() {
            count(&node.counters.orphans, 1);
        }
    }
}
