//! Objects of nodes that are gone, which this node keeps since: what was in their backups.
//!
//! They are read, moved away and dropped, but no owner writes to one here: a mutable borrow brings it to a
//! block of the borrower's node. So no new version is made in a partition that was promoted, and its words
//! are never used again. Atomic numbers and values under locks stay and are changed.
#![allow(unsafe_code, reason = "objects are read where they lie")]

use super::{AtomicStep, NodeId, ShareNode, within};
use crate::ShareError;
use crate::stats::count;
use crate::task::code::ShippedCode;
use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use farfield_core::dsm::{BackupImage, OwnerWord};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Objects of other partitions.
#[derive(Default)]
pub(super) struct PromotedObjects {
    table: Mutex<PromotedTable>,
    /// Backups that were read for the next view. They are kept here from then on, if it says so.
    prepared: Mutex<HashMap<NodeId, BackupImage>>,
}

#[derive(Default)]
struct PromotedTable {
    /// Objects by partition and offset.
    objects: HashMap<(u16, u64), PromotedObject>,
    /// Bytes of all of them.
    bytes: u64,
}

struct PromotedObject {
    word: OwnerWord,
    /// Contents, aligned as in a block.
    contents: Vec<u128>,
    bytes: usize,
    /// Whether these are the bytes of a group, as it travels.
    is_group: bool,
}

/// Nodes that keep the partitions of the program, by the numbers of those that were started with them.
pub(super) struct PartitionHosts(Box<[AtomicU16]>);

impl PartitionHosts {
    pub(super) fn new(nodes: u16) -> PartitionHosts {
        PartitionHosts((0..nodes).map(AtomicU16::new).collect())
    }
}

fn key(word: OwnerWord) -> (u16, u64) {
    (word.partition().number(), word.offset())
}

impl PromotedObject {
    fn new(word: OwnerWord, contents: &[u8]) -> PromotedObject {
        let mut aligned = vec![0u128; contents.len().div_ceil(size_of::<u128>()).max(1)];
        // SAFETY: room for so many bytes.
        unsafe { core::ptr::copy_nonoverlapping(contents.as_ptr(), aligned.as_mut_ptr().cast(), contents.len()) };
        PromotedObject { word, contents: aligned, bytes: contents.len(), is_group: false }
    }

    fn as_bytes(&self) -> &[u8] {
        // SAFETY: so many bytes were written.
        unsafe { core::slice::from_raw_parts(self.contents.as_ptr().cast(), self.bytes) }
    }
}

impl PromotedTable {
    fn insert(&mut self, word: OwnerWord, contents: &[u8]) {
        self.bytes += contents.len() as u64;
        self.objects.insert(key(word), PromotedObject::new(word, contents));
    }
}

impl PromotedObjects {
    fn lock(&self) -> MutexGuard<'_, PromotedTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prepared(&self) -> MutexGuard<'_, HashMap<NodeId, BackupImage>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of objects, and their bytes.
    pub(super) fn count(&self) -> (u64, u64) {
        let table = self.lock();
        (table.objects.len() as u64, table.bytes)
    }

    /// Calls `action` with an object, if this very version of it is here.
    fn with<R>(&self, word: OwnerWord, action: impl FnOnce(&mut PromotedObject) -> R) -> Option<R> {
        self.lock().objects.get_mut(&key(word)).filter(|object| object.word == word).map(action)
    }

    /// Takes an object out, if this very version of it is here.
    fn take(&self, word: OwnerWord) -> Option<PromotedObject> {
        let mut table = self.lock();
        table.objects.get(&key(word)).filter(|object| object.word == word)?;
        let object = table.objects.remove(&key(word))?;
        table.bytes -= object.bytes as u64;
        Some(object)
    }
}

impl ShareNode {
    /// Returns the node that keeps the object of this word now.
    pub(crate) fn host_of(&self, word: OwnerWord) -> NodeId {
        let home = self.home_of(word);
        self.hosts.0.get(usize::from(home.0)).map_or(home, |host| NodeId(host.load(Ordering::Acquire)))
    }

    /// Returns whether an object's node is gone and another one keeps what it had stored.
    pub(crate) fn is_promoted(&self, word: OwnerWord) -> bool {
        self.host_of(word) != self.home_of(word)
    }

    /// Records which node keeps the partition of one that is gone.
    pub(crate) fn set_host(&self, of: NodeId, host: NodeId) {
        if let Some(entry) = self.hosts.0.get(usize::from(of.0)) {
            entry.store(host.0, Ordering::Release);
        }
    }

    /// Prepares to keep the objects of a node that is gone, from the view on that says so.
    #[cfg(feature = "etcd")]
    pub(crate) fn prepare_promotion(&self, node: NodeId, image: BackupImage) {
        self.promoted.prepared().insert(node, image);
    }

    /// Keeps what was prepared, if this node is the host of one that is gone; forgets it otherwise.
    pub(super) fn end_promotion(&self, node: NodeId, host: Option<NodeId>) {
        let image = self.promoted.prepared().remove(&node);
        if let Some(image) = image.filter(|_| host == Some(self.id)) {
            self.promote(node, image);
        }
    }

    /// Keeps the objects of a node that is gone. Nobody asks for them before its loss is known.
    pub(crate) fn promote(&self, node: NodeId, image: BackupImage) {
        let mut table = self.promoted.lock();
        for (word, contents) in image.objects.into_values().filter(|(word, _)| self.home_of(*word) == node) {
            table.insert(word, &contents);
        }
        for (word, contents) in image.groups.into_values().filter(|(word, _)| self.home_of(*word) == node) {
            table.bytes += contents.len() as u64;
            table.objects.insert(key(word), PromotedObject { is_group: true, ..PromotedObject::new(word, &contents) });
        }
        drop(table);
        for (word, lock) in image.locks.into_values().filter(|(word, _)| self.home_of(*word) == node) {
            self.promote_lock(node, word, lock);
        }
        let mut messages: HashMap<OwnerWord, Vec<_>> = HashMap::new();
        for (word, message) in image.messages.into_values().filter(|(word, _)| self.home_of(*word) == node) {
            messages.entry(message.channel).or_default().push((word, message));
        }
        for (word, channel) in image.channels.into_values().filter(|(word, _)| self.home_of(*word) == node) {
            self.promote_channel(node, word, channel, messages.remove(&word).unwrap_or_default());
        }
    }

    /// Keeps a value of another partition that is under a lock, or in a channel.
    pub(super) fn keep_promoted(&self, word: OwnerWord, value: &[u8]) {
        self.promoted.lock().insert(word, value);
    }

    /// Forgets a value that was received. Its receiver owns what it owns.
    pub(super) fn forget_promoted(&self, word: OwnerWord) {
        self.promoted.take(word);
    }

    /// Overwrites the value under a promoted lock.
    pub(super) fn write_promoted(&self, word: OwnerWord, value: &[u8]) {
        self.promoted.with(word, |object| *object = PromotedObject::new(word, value));
    }

    /// Reads bytes of a promoted object. Returns `None` if this version of it is not here.
    pub(super) fn read_promoted(&self, word: OwnerWord, offset: u64, bytes: u64) -> Option<Vec<u8>> {
        let end = offset.checked_add(bytes)?;
        let range = usize::try_from(offset).ok()?..usize::try_from(end).ok()?;
        self.promoted.with(word, |object| object.as_bytes().get(range).map(<[u8]>::to_vec)).flatten()
    }

    /// Reads a promoted group. Returns `None` if this version of it is not here.
    pub(super) fn read_promoted_group(&self, word: OwnerWord) -> Option<Vec<u8>> {
        self.promoted.with(word, |object| object.is_group.then(|| object.as_bytes().to_vec())).flatten()
    }

    /// Returns whether this version of a promoted object is here.
    pub(super) fn holds_promoted(&self, word: OwnerWord) -> bool {
        self.promoted.with(word, |_| ()).is_some()
    }

    /// Makes a step of a promoted number.
    pub(super) fn step_promoted(&self, word: OwnerWord, step: AtomicStep) -> Option<u64> {
        let step = |object: &mut PromotedObject| {
            // SAFETY: memory of 16 bytes or more, aligned, which is used under a lock.
            step.apply(unsafe { AtomicU64::from_ptr(object.contents.as_mut_ptr().cast()) })
        };
        self.promoted.with(word, |object| (object.bytes == size_of::<u64>()).then(|| step(object))).flatten()
    }

    /// Drops a promoted object, once.
    pub(super) fn drop_promoted(self: &Arc<ShareNode>, word: OwnerWord, destructor: Option<ShippedCode>) {
        let object = self.promoted.take(word);
        match (object, destructor) {
            (Some(group), Some(destructor)) if group.is_group => self.drop_promoted_group(&group, destructor),
            (Some(mut object), Some(destructor)) if destructor.dropped_bytes() <= object.bytes => {
                // SAFETY: its owner is gone, so nobody borrows it; owners have the destructor of their type.
                within(self, false, || unsafe { destructor.drop_at(object.contents.as_mut_ptr().cast()) });
            }
            (Some(_), _) => {}
            // It was not in the backup: what it owns stays.
            (None, _) => count(&self.counters.orphans, 1),
        }
    }

    /// Drops a promoted group. It is dropped where its members have addresses: among the objects of this node.
    fn drop_promoted_group(&self, group: &PromotedObject, destructor: ShippedCode) {
        // What frees the members of a group that was moved has nothing to do here.
        let Some(root) = destructor.member_type() else { return };
        // SAFETY: the bytes of a group; its owner has the destructor of its type.
        match unsafe { self.place_group(group.as_bytes(), root) } {
            Ok(Some(word)) => self.outbox.free(self.id, word, Some(destructor)),
            // There is no room: what it owns stays.
            Ok(None) | Err(_) => count(&self.counters.orphans, 1),
        }
    }

    /// Returns the error of an access to an object whose node is gone.
    pub(super) fn lost_with_home(&self, word: OwnerWord) -> ShareError {
        ShareError::NodeLost { node: self.home_of(word) }
    }
}
