//! Counts of a node.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of a node, since it started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct NodeStats {
    /// Messages that this node has sent and that were answered.
    pub messages: u64,
    /// Messages that asked another node for an object.
    pub fetches: u64,
    /// Messages that told another node to free objects.
    pub frees: u64,
    /// Messages that sent a task to another node.
    pub spawns: u64,
    /// Tasks that began to wait at this node and were given to another one.
    pub given_tasks: u64,
    /// Messages that sent the result of a task to another node.
    pub results: u64,
    /// Bytes of the messages and of their answers, without the headers of the transport.
    pub message_bytes: u64,
    /// Objects that came here because they were borrowed mutably.
    pub moved_objects: u64,
    /// Bytes of blocks with objects of this node.
    pub object_bytes: u64,
    /// Bytes of copies of other nodes' objects.
    pub copy_bytes: u64,
    /// Objects that nobody can free any more, because the message to their node failed.
    pub orphans: u64,
    /// Messages to free an object that was not there any more. In safe code there are none.
    pub late_frees: u64,
    /// Batches that this node has stored in its backup.
    pub backup_batches: u64,
    /// Bytes of these batches.
    pub backup_bytes: u64,
    /// Memory servers that keep this node's backup.
    pub backup_servers: u64,
    /// Objects of nodes that are gone, which this node keeps since.
    pub promoted_objects: u64,
    /// Bytes of these objects.
    pub promoted_bytes: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) messages: AtomicU64,
    pub(crate) fetches: AtomicU64,
    pub(crate) frees: AtomicU64,
    pub(crate) spawns: AtomicU64,
    pub(crate) given_tasks: AtomicU64,
    pub(crate) results: AtomicU64,
    pub(crate) message_bytes: AtomicU64,
    pub(crate) moved_objects: AtomicU64,
    pub(crate) orphans: AtomicU64,
    pub(crate) late_frees: AtomicU64,
    pub(crate) backup_batches: AtomicU64,
    pub(crate) backup_bytes: AtomicU64,
}

impl Counters {
    pub(crate) fn stats(
        &self,
        object_bytes: u64,
        copy_bytes: u64,
        backup_servers: u64,
        promoted: (u64, u64),
    ) -> NodeStats {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        NodeStats {
            messages: of(&self.messages),
            fetches: of(&self.fetches),
            frees: of(&self.frees),
            spawns: of(&self.spawns),
            given_tasks: of(&self.given_tasks),
            results: of(&self.results),
            message_bytes: of(&self.message_bytes),
            moved_objects: of(&self.moved_objects),
            object_bytes,
            copy_bytes,
            orphans: of(&self.orphans),
            late_frees: of(&self.late_frees),
            backup_batches: of(&self.backup_batches),
            backup_bytes: of(&self.backup_bytes),
            backup_servers,
            promoted_objects: promoted.0,
            promoted_bytes: promoted.1,
        }
    }
}

pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Relaxed);
}
