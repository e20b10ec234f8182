//! Objects of nodes that are gone, which this node keeps since: what was in their backups.
//!
//! They are read, moved away and dropped, but no owner writes to one here: a mutable borrow brings it to a
//! block of the borrower's node. So no new version is made in a partition that was promoted, and its words
//! are never used again. Atomic numbers and values under locks stay and are changed.
//!
//! The backups of those nodes stay as they are. This node says in its own backup what changes, so that the next one
//! can keep the same objects (`super::backup`).
#![allow(unsafe_code, reason = "objects are read where they lie")]

use super::{AtomicStep, NodeId, ShareNode, within};
use crate::ShareError;
use crate::stats::count;
use crate::task::code::ShippedCode;
use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use farfield_core::dsm::{BackupImage, BlockKey, OwnerWord};
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
    objects: HashMap<BlockKey, PromotedObject>,
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
    fn insert(&mut self, object: PromotedObject) {
        self.bytes += object.bytes as u64;
        self.objects.insert(object.word.block(), object);
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
        self.lock().objects.get_mut(&word.block()).filter(|object| object.word == word).map(action)
    }

    /// Takes an object out, if this very version of it is here.
    fn take(&self, word: OwnerWord) -> Option<PromotedObject> {
        let mut table = self.lock();
        table.objects.get(&word.block()).filter(|object| object.word == word)?;
        let object = table.objects.remove(&word.block())?;
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

    /// Records which node keeps what one that is gone had kept: its own partition, and those of nodes lost before. If
    /// none does, these are lost.
    pub(crate) fn set_host(&self, of: NodeId, host: Option<NodeId>) {
        for (home, entry) in self.hosts.0.iter().enumerate() {
            if entry.load(Ordering::Acquire) == of.0 {
                entry.store(host.map_or(home as u16, |host| host.0), Ordering::Release);
            }
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

    /// Keeps what a node had stored that is gone: its own objects, and those that it had kept. Nobody asks for them
    /// before its loss is known.
    pub(crate) fn promote(&self, node: NodeId, mut image: BackupImage) {
        image.retain(|word| {
            let home = self.home_of(word);
            home == node || self.peers.is_lost(home)
        });
        let mut table = self.promoted.lock();
        for (word, contents) in image.objects.into_values() {
            table.insert(PromotedObject::new(word, &contents));
        }
        for (word, contents) in image.groups.into_values() {
            table.insert(PromotedObject { is_group: true, ..PromotedObject::new(word, &contents) });
        }
        drop(table);
        for (word, lock) in image.locks.into_values() {
            self.promote_lock(node, word, lock);
        }
        let mut messages: HashMap<OwnerWord, Vec<_>> = HashMap::new();
        for (word, message) in image.messages.into_values() {
            messages.entry(message.channel).or_default().push((word, message));
        }
        for (word, channel) in image.channels.into_values() {
            self.promote_channel(node, word, channel, messages.remove(&word).unwrap_or_default());
        }
    }

    /// Keeps a value of another partition that is under a lock, or in a channel.
    pub(super) fn keep_promoted(&self, word: OwnerWord, value: &[u8]) {
        self.promoted.lock().insert(PromotedObject::new(word, value));
    }

    /// Forgets a value that was received. Its receiver owns what it owns.
    pub(super) fn forget_promoted(&self, word: OwnerWord) {
        self.take_promoted(word);
    }

    /// Takes a promoted object out, if this very version of it is here. Whoever keeps the others next has it no more.
    fn take_promoted(&self, word: OwnerWord) -> Option<PromotedObject> {
        self.forget_stored(word);
        self.promoted.take(word)
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
        match (self.take_promoted(word), destructor) {
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

#[cfg(all(test, not(feature = "model")))]
mod tests {
    //! Guards against what a host has changed and nobody finds after its death, and against what is there twice.
    use super::*;
    use crate::NodeBuilder;
    use crate::backup::BackupAccess;
    use crate::message::{LockEnd, LockedType, ShareMessage, ShareReply, WaitAnswer};
    use crate::node::{NodeBackup, Peers};
    use farfield_core::dsm::{Colour, LossCause, Partition, StoredChannel, StoredLock, StoredMessage, ViewChange};
    use farfield_core::lock::LockMode;
    use farfield_server::{Config, Server};
    use std::borrow::Cow;
    use std::collections::{BTreeMap, VecDeque};

    /// Asks for everything, and outlives all others.
    const ASKER: NodeId = NodeId(1);
    const LOCKED: LockedType = LockedType { bytes: 8, owns_others: false, destructor: None };

    fn word(block: u64) -> OwnerWord {
        OwnerWord::new(Partition::new(4).unwrap(), 64 * block, Colour(3)).unwrap()
    }

    fn lock_word() -> OwnerWord {
        word(1)
    }

    fn number_word() -> OwnerWord {
        word(2)
    }

    fn channel_word() -> OwnerWord {
        word(3)
    }

    /// What was in the backup of node 4, as it should be after all changes.
    #[derive(PartialEq, Eq, Debug)]
    struct Expected {
        value: u8,
        number: u64,
        objects: BTreeMap<BlockKey, Vec<u8>>,
        queue: VecDeque<u8>,
    }

    impl Expected {
        fn new() -> (Expected, BackupImage) {
            let mut image = BackupImage::default();
            let lock = StoredLock { value: vec![5; 8], ..StoredLock::default() };
            image.locks.insert(lock_word().block(), (lock_word(), lock));
            image.objects.insert(number_word().block(), (number_word(), 7u64.to_ne_bytes().to_vec()));
            let channel = StoredChannel {
                bound: 8,
                value_bytes: 1,
                has_senders: true,
                has_receiver: true,
                ..StoredChannel::default()
            };
            image.channels.insert(channel_word().block(), (channel_word(), channel));
            for block in 10..16 {
                image.objects.insert(word(block).block(), (word(block), vec![block as u8; 20]));
                let message = StoredMessage { channel: channel_word(), position: 40 - block, value: vec![block as u8] };
                image.messages.insert(word(10 + block).block(), (word(10 + block), message));
            }
            let objects = (10..16).map(|block| (word(block).block(), vec![block as u8; 20])).collect();
            (Expected { value: 5, number: 7, objects, queue: (10..16).rev().collect() }, image)
        }

        fn of(image: &BackupImage) -> Expected {
            let (_, channel) = &image.channels[&channel_word().block()];
            let received: Vec<_> = channel.received().collect();
            let ready = image.messages.values().filter(|(word, _)| !received.contains(word));
            let queue: BTreeMap<u64, u8> = ready.map(|(_, message)| (message.position, message.value[0])).collect();
            let mut objects: BTreeMap<_, _> =
                image.objects.iter().map(|(block, (_, contents))| (*block, contents.clone())).collect();
            let number = objects.remove(&number_word().block()).unwrap();
            Expected {
                value: image.locks[&lock_word().block()].1.value[0],
                number: u64::from_ne_bytes(number.try_into().unwrap()),
                objects,
                queue: queue.into_values().collect(),
            }
        }

        /// Changes something. The last step waits until all is stored.
        fn change(&mut self, node: &Arc<ShareNode>, random: &mut fastrand::Rng, ticket: u64, is_last: bool) {
            let channel = channel_word().bits();
            let ask = |message| {
                let reply = node.serve_shared(ASKER, message);
                node.commit().unwrap();
                reply
            };
            match if is_last { 0 } else { random.u8(0..5) } {
                0 => {
                    let (word, mode) = (lock_word().bits(), LockMode::Exclusive);
                    let wish =
                        ShareMessage::Lock { word, ticket, mode, may_wait: false, may_borrow: false, locked: LOCKED };
                    let Some(ShareReply::Answer(WaitAnswer::Granted { value, was_left: false })) = ask(wish) else {
                        panic!("nobody has it")
                    };
                    assert_eq!(value, [self.value; 8]);
                    self.value = random.u8(..);
                    let end = LockEnd::Released(Some(vec![self.value; 8]));
                    ask(ShareMessage::Unlock { word, ticket, end });
                }
                1 => {
                    let step = AtomicStep::Add(random.u64(..9));
                    let made = ask(ShareMessage::Atomic { word: number_word().bits(), step });
                    assert!(matches!(made, Some(ShareReply::Number(before)) if before == self.number));
                    let AtomicStep::Add(more) = step else { unreachable!() };
                    self.number += more;
                }
                2 => {
                    let Some(block) = self.objects.keys().next().copied() else { return };
                    self.objects.remove(&block);
                    let moved = (10..16).map(word).find(|word| word.block() == block).unwrap();
                    node.drop_here(moved, None);
                    node.commit().unwrap();
                }
                3 => {
                    let sent = ShareMessage::Send {
                        word: channel,
                        ticket,
                        settled: ticket,
                        may_wait: false,
                        value: Cow::Owned(vec![ticket as u8]),
                    };
                    match ask(sent) {
                        Some(ShareReply::Answer(WaitAnswer::Sent)) => self.queue.push_back(ticket as u8),
                        Some(ShareReply::Answer(WaitAnswer::Busy)) => assert_eq!(self.queue.len(), 8),
                        other => panic!("{other:?}"),
                    }
                }
                _ => {
                    let wish = ShareMessage::Receive { word: channel, ticket, settled: ticket, may_wait: false };
                    match ask(wish) {
                        Some(ShareReply::Answer(WaitAnswer::Received(value))) => {
                            assert_eq!(self.queue.pop_front(), Some(value[0]));
                        }
                        Some(ShareReply::Answer(WaitAnswer::Busy)) => assert!(self.queue.is_empty()),
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }

    /// The objects of node 4 are kept by node 3, then 2, then 0, each of which changes some and dies.
    #[test]
    fn what_is_kept_of_a_dead_node_is_found_after_each_host() {
        let server = Server::start(Config {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            functions: farfield_wic::Registry::standard(),
            ..Config::default()
        });
        let server = server.unwrap();
        for seed in 0..12 {
            let random = &mut fastrand::Rng::with_seed(seed);
            let (mut expected, first) = Expected::new();
            let (mut image, mut dead, mut ticket) = (first, NodeId(4), 0);
            let mut sessions = Vec::new();
            for host in [3, 2, 0].map(NodeId) {
                // Halves of four pages: after some batches a checkpoint follows. Values that are sent lie among the
                // host's own objects.
                let (access, kept) = BackupAccess::create(&server.endpoints()[0], "", 4096).unwrap();
                sessions.push(kept);
                let backup = NodeBackup::new(access.open().unwrap()).unwrap();
                let peers = Peers::new(5, 7, String::new());
                let node = ShareNode::new(host, 0, &NodeBuilder::new().near(1 << 20), peers, Some(backup)).unwrap();
                let gone = [4, 3, 2].into_iter().map(NodeId).filter(|gone| gone.0 > dead.0);
                let expel = |gone: NodeId, host| {
                    node.expel(ViewChange { node: gone.0, host, cause: LossCause::Ended });
                };
                gone.for_each(|gone| expel(gone, Some(gone.0 - 1)));
                node.promote(dead, image.clone());
                expel(dead, Some(host.0));
                assert_eq!((node.host_of(word(1)), node.is_promoted(word(1))), (host, true));
                let steps = random.u64(1..30);
                for step in 0..steps {
                    ticket += 1;
                    expected.change(&node, random, ticket, step + 1 == steps);
                }
                image = access.open().unwrap().take_over(&image).unwrap();
                assert_eq!(Expected::of(&image), expected, "seed {seed}, host {host}, {steps} steps");
                dead = host;
            }
        }
    }

    #[test]
    fn what_a_host_had_kept_goes_where_its_own_objects_go() {
        let peers = Peers::new(5, 7, String::new());
        let node = ShareNode::new(ASKER, 0, &NodeBuilder::new().near(1 << 20), peers, None).unwrap();
        let of = |partition| OwnerWord::new(Partition::new(partition).unwrap(), 64, Colour(0)).unwrap();
        let hosts = |node: &ShareNode| [0, 1, 2, 3, 4].map(|partition| node.host_of(of(partition)).0);
        for (gone, host, expected) in [
            (4, Some(3), [0, 1, 2, 3, 3]),
            (2, Some(0), [0, 1, 0, 3, 3]),
            (3, Some(0), [0, 1, 0, 0, 0]),
            // Without its backup nobody knows what has become of the others' objects.
            (0, None, [0, 1, 2, 3, 4]),
        ] {
            node.expel(ViewChange { node: gone, host, cause: LossCause::Ended });
            assert_eq!(hosts(&node), expected, "{gone}");
        }
        assert!(!node.is_promoted(of(4)) && node.peers.is_lost(NodeId(4)));
    }
}
