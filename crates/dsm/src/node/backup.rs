//! Backup of this node's objects: what is stored at a memory server before a message has an effect
//! elsewhere.
//!
//! Only what others can come to own must survive: what a message hands over, with all that it owns. So
//! these objects are *staged* where the message is made, and every message waits until what was staged
//! counts (output commit; one batch for all who wait). Ownership says that nobody writes to them meanwhile.
//! An object that was stored and not changed since is not looked at again, nor is what it owns: whoever
//! changes that has to change the object, too, because the word is in it.
//!
//! Atomic numbers change without an owner. Each step notes its number, and the next message, of whatever
//! kind, takes it along. So does each change of a lock that others know: the backup has the lock's value as it
//! was released last, and its holders ([`StoredLock`]). What the value owns is staged with it, unless somebody
//! may be writing to that. Channels are noted in the same way, and their values as they are accepted.
//!
//! A group is an object with all that is tied to it, in one version.
//!
//! What this node keeps of nodes that are gone stays in their backups, which do not change any more. Its own backup
//! says what has changed of that: numbers, locks, channels, and what is there no longer.
#![allow(unsafe_code, reason = "objects are read where they lie")]

use super::groups::{group_contents, visit_group};
use super::{AtomicStep, ShareNode};
use crate::backup::{BackupAccess, BackupError, BackupRegion, LostReplica, Replica, ReplicaAccess};
use crate::member::ReplicaVerdict;
use crate::object::ObjectContents;
use crate::ptr::MemberType;
use crate::stats::count;
use crate::task::code::ShippedCode;
use crate::{OwnedObject, ShareError};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use farfield_core::dsm::{
    BackupBatch, BackupLog, BatchPlace, BlockKey, OwnerWord, StoredChannel, StoredLock, StoredMessage,
};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of a batch of frees only that are stored although nobody waits.
const FREES_BYTES_MAX: u64 = 1 << 20;

/// Backup of a node.
pub(crate) struct NodeBackup {
    state: Mutex<BackupState>,
    changed: Condvar,
}

struct BackupState {
    /// Stored versions that are the objects' contents still. Promoted objects are among them if they were changed.
    stored: HashMap<BlockKey, StoredObject>,
    /// Numbers that have changed since they were stored, and values of channels that were not stored yet.
    changed: HashMap<BlockKey, StoredObject>,
    /// Locks that this node keeps, and those that have changed since they were stored.
    locks: HashMap<BlockKey, KnownLock>,
    changed_locks: HashSet<BlockKey>,
    /// Channels in the same way.
    channels: HashMap<BlockKey, KnownChannel>,
    changed_channels: HashSet<BlockKey>,
    /// Values in all channels, and those that were received and may be asked for again.
    messages: HashMap<BlockKey, StoredObject>,
    /// Promoted objects that are not here any more. The backups of their nodes have them, so each checkpoint says so.
    left: HashMap<BlockKey, OwnerWord>,
    /// Position of the next value, in all channels.
    position: u64,
    /// Batch that is being collected, its number here, and the entries in it that somebody waits for.
    batch: BackupBatch,
    collecting: u64,
    staged: u64,
    /// Number of the last batch that counts.
    done: u64,
    /// Number of memory servers that kept the backup at first, and the numbers of those that do not.
    replicas: usize,
    lost_replicas: BTreeSet<u8>,
    /// Right to write a batch: taken by one thread at a time.
    writer: Option<BackupWriter>,
    /// Why nothing is stored any more.
    ended: Option<BackupEnd>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BackupEnd {
    /// Whoever would take the backup over knows that it is of no use.
    Lost,
    /// The objects of this node are kept by another one now.
    TakenOver,
}

#[derive(Clone, Copy)]
struct StoredObject {
    word: OwnerWord,
    bytes: usize,
    kind: StoredKind,
}

#[derive(Clone, Copy)]
enum StoredKind {
    Values,
    /// An object of this type, with all that is tied to it.
    Group(MemberType),
    Number,
    /// A value of a channel.
    Message {
        channel: OwnerWord,
        position: u64,
    },
}

impl StoredObject {
    /// Reads the contents of the object. Returns `None` if this version of it is not there.
    fn contents(&self, node: &ShareNode) -> Option<Vec<u8>> {
        if !node.is_here(self.word) {
            return node.read_promoted(self.word, 0, self.bytes as u64);
        }
        let arena = &node.arena;
        if let StoredKind::Group(root) = self.kind {
            // SAFETY: it was staged as a group that begins with an object of this type.
            return unsafe { group_contents(arena, self.word, root) };
        }
        if matches!(self.kind, StoredKind::Number) {
            let number = arena.with_object(self.word, size_of::<u64>() as u64, |address| {
                // SAFETY: an atomic number of this node, which is not freed meanwhile.
                unsafe { AtomicU64::from_ptr(address.cast()) }.load(SeqCst)
            });
            return number.map(|number| number.to_ne_bytes().to_vec());
        }
        let mut contents = Vec::with_capacity(self.bytes);
        arena.read(self.word, self.bytes as u64, &mut contents).then_some(contents)
    }

    /// Adds the object to a batch. Returns whether it is there.
    fn put_into(&self, batch: &mut BackupBatch, node: &ShareNode) -> bool {
        let Some(contents) = self.contents(node) else { return false };
        match self.kind {
            StoredKind::Message { channel, position } => {
                batch.put_message(self.word, &StoredMessage { channel, position, value: contents });
            }
            StoredKind::Group(_) => batch.put_group(self.word, &contents),
            StoredKind::Values | StoredKind::Number => batch.put(self.word, &contents),
        }
        true
    }
}

/// Channel that this node keeps, as others may find it.
struct KnownChannel {
    word: OwnerWord,
    state: StoredChannel,
    /// Whether others may know the channel, so that it is stored.
    is_shared: bool,
}

/// Lock that this node keeps, as others may find it.
struct KnownLock {
    word: OwnerWord,
    state: StoredLock,
    /// Code that says what the value owns. Whoever gives back a lock of a node that is gone stages that itself.
    destructor: Option<ShippedCode>,
    /// Whether others may know the lock, so that it is stored.
    is_shared: bool,
}

impl KnownLock {
    /// Returns the objects that the value owns, if nobody writes to them.
    fn owned(&self) -> Vec<OwnedObject> {
        let destructor = self.destructor.filter(|_| !self.state.is_written() && !self.state.is_lost);
        // SAFETY: the bytes of a value of the lock, which is forgotten here before the value is dropped.
        destructor.map_or_else(Vec::new, |destructor| unsafe { destructor.owned_by(&self.state.value, false) })
    }
}

struct BackupWriter {
    region: BackupRegion,
    log: BackupLog,
}

impl NodeBackup {
    /// Begins the backup of a node in a region.
    pub(crate) fn new(mut region: BackupRegion) -> Result<NodeBackup, BackupError> {
        let log = BackupLog::new(region.layout(), region.commit_word()?);
        let replicas = region.replicas();
        let state = BackupState {
            stored: HashMap::new(),
            changed: HashMap::new(),
            locks: HashMap::new(),
            changed_locks: HashSet::new(),
            channels: HashMap::new(),
            changed_channels: HashSet::new(),
            messages: HashMap::new(),
            left: HashMap::new(),
            position: 0,
            batch: BackupBatch::default(),
            collecting: 1,
            staged: 0,
            done: 0,
            replicas,
            lost_replicas: BTreeSet::new(),
            writer: Some(BackupWriter { region, log }),
            ended: None,
        };
        Ok(NodeBackup { state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, BackupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BackupState {
    /// Adds an object that this node keeps to the batch. Returns whether it is there.
    fn put(&mut self, node: &ShareNode, stored: StoredObject) -> bool {
        let is_there = stored.put_into(&mut self.batch, node);
        if is_there {
            self.stored.insert(stored.word.block(), stored);
            self.staged += 1;
        }
        is_there
    }

    fn stage(&mut self, node: &ShareNode, owned: Vec<OwnedObject>) {
        let mut left = owned;
        while let Some(OwnedObject { word, bytes, count, contents }) = left.pop() {
            match contents {
                ObjectContents::Locked => self.share_lock(word),
                ObjectContents::Channel => self.share_channel(word),
                ObjectContents::Values(_) | ObjectContents::Number | ObjectContents::Group(_) => {}
            }
            let is_stored = |stored: &StoredObject| stored.word == word && stored.bytes == bytes;
            // Objects of other nodes are in the backups of these.
            if !node.is_here(word)
                || matches!(contents, ObjectContents::Locked | ObjectContents::Channel)
                || self.stored.get(&word.block()).is_some_and(is_stored)
            {
                continue;
            }
            let kind = match contents {
                ObjectContents::Number => StoredKind::Number,
                ObjectContents::Group(root) => StoredKind::Group(root()),
                _ => StoredKind::Values,
            };
            if !self.put(node, StoredObject { word, bytes, kind }) {
                continue;
            }
            match contents {
                // SAFETY: so many values of the object, which is there; whoever stages it owns it.
                ObjectContents::Values(visit) => unsafe {
                    visit(node.arena.address(word), count, &mut |owned| left.push(owned));
                },
                // SAFETY: a group that begins with an object of this type.
                ObjectContents::Group(root) => unsafe {
                    visit_group(&node.arena, word, root(), |owned| left.push(owned))
                },
                _ => {}
            }
        }
    }

    /// Records that others may know a lock from now on.
    fn share_lock(&mut self, word: OwnerWord) {
        let lock = self.locks.get_mut(&word.block()).filter(|lock| lock.word == word);
        if let Some(lock) = lock
            && !core::mem::replace(&mut lock.is_shared, true)
        {
            self.changed_locks.insert(word.block());
        }
    }

    /// Records that others may know a channel from now on.
    fn share_channel(&mut self, word: OwnerWord) {
        let channel = self.channels.get_mut(&word.block());
        let Some(channel) = channel.filter(|channel| channel.word == word) else { return };
        if !core::mem::replace(&mut channel.is_shared, true) {
            self.changed_channels.insert(word.block());
            let is_of =
                |stored: &StoredObject| matches!(stored.kind, StoredKind::Message { channel, .. } if channel == word);
            self.changed.extend(self.messages.iter().filter(|(_, stored)| is_of(stored)));
        }
    }

    /// Adds what has changed without an owner, as it is now. A batch that is taken right afterwards
    /// shows one moment of the node: whoever may write to what a lock owns is the lock's holder in it.
    fn stage_changes(&mut self, node: &ShareNode) {
        for stored in core::mem::take(&mut self.changed).into_values() {
            self.put(node, stored);
        }
        for block in core::mem::take(&mut self.changed_channels) {
            if let Some(channel) = self.channels.get(&block) {
                self.batch.put_channel(channel.word, &channel.state);
                self.staged += 1;
            }
        }
        // What a lock owns may own locks.
        while let Some(block) = self.changed_locks.iter().next().copied() {
            self.changed_locks.remove(&block);
            let Some(lock) = self.locks.get(&block) else { continue };
            let owned = lock.owned();
            self.batch.put_lock(lock.word, &lock.state);
            self.staged += 1;
            self.stage(node, owned);
        }
        // It may own channels, too.
        if !self.changed_channels.is_empty() {
            self.stage_changes(node);
        }
    }

    /// Forgets the contents of an object that is changed or freed now. Returns whether it was a value of a channel.
    fn forget(&mut self, word: OwnerWord) -> bool {
        // Whoever frees an object late does not mean a later one in its block.
        let is_meant = |stored: &StoredObject| stored.word.colour() <= word.colour();
        let is_received = self.messages.get(&word.block()).is_some_and(is_meant);
        for known in [&mut self.changed, &mut self.messages] {
            if known.get(&word.block()).is_some_and(is_meant) {
                known.remove(&word.block());
            }
        }
        if self.channels.get(&word.block()).is_some_and(|channel| channel.word.colour() <= word.colour()) {
            self.changed_channels.remove(&word.block());
            if self.channels.remove(&word.block()).is_some_and(|channel| channel.is_shared) {
                self.batch.free(word);
            }
        }
        if self.stored.get(&word.block()).is_some_and(is_meant) {
            self.stored.remove(&word.block());
            self.batch.free(word);
            // Whoever is told what follows from that is told after it is stored: the value would arrive again.
            self.staged += u64::from(is_received);
        }
        if self.locks.get(&word.block()).is_some_and(|lock| lock.word.colour() <= word.colour()) {
            self.changed_locks.remove(&word.block());
            if self.locks.remove(&word.block()).is_some_and(|lock| lock.is_shared) {
                self.batch.free(word);
            }
        }
        is_received
    }

    /// Forgets a promoted object, which is there no longer: it was moved, dropped or received.
    fn leave(&mut self, word: OwnerWord) {
        let is_received = self.forget(word);
        // Nobody takes a batch of a backup that has ended.
        if self.ended.is_none() && self.left.insert(word.block(), word).is_none() {
            self.batch.free(word);
            self.staged += u64::from(is_received);
        }
    }

    /// Takes the batch to be written.
    fn take_batch(&mut self) -> BackupBatch {
        self.collecting += 1;
        self.staged = 0;
        core::mem::take(&mut self.batch)
    }

    /// Makes a batch of all objects, locks and channels, and of what is there no longer.
    fn all(&self, node: &ShareNode) -> BackupBatch {
        let mut all = BackupBatch::default();
        for stored in self.stored.values() {
            stored.put_into(&mut all, node);
        }
        self.left.values().for_each(|word| all.free(*word));
        for channel in self.channels.values().filter(|channel| channel.is_shared) {
            all.put_channel(channel.word, &channel.state);
        }
        for lock in self.locks.values().filter(|lock| lock.is_shared) {
            all.put_lock(lock.word, &lock.state);
        }
        all
    }
}

impl ShareNode {
    /// Returns whether the node has a backup.
    pub(crate) fn has_backup(&self) -> bool {
        self.backup.is_some()
    }

    /// Returns whether other nodes may have backups, so that they are told what values own.
    pub(crate) fn keeps_backups(&self) -> bool {
        self.keeps_backups
    }

    /// Returns how many bytes wait to be stored, how many memory servers have what is stored, and how many did at
    /// first; `None` without a backup.
    pub(super) fn backup_lag(&self) -> Option<(u64, usize, usize)> {
        let state = self.backup.as_ref()?.lock();
        let bytes = if state.staged > 0 { state.batch.len() } else { 0 };
        let left = state.replicas - state.lost_replicas.len();
        Some((bytes, if state.ended.is_none() { left } else { 0 }, state.replicas))
    }

    /// Sees to it that the next message leaves when these objects, and all that they own, are stored. They
    /// are borrowed by the caller, or owned.
    pub(crate) fn stage(&self, owned: impl FnOnce() -> Vec<OwnedObject>) {
        if let Some(backup) = &self.backup {
            let owned = owned();
            if owned.is_empty() {
                return;
            }
            let mut state = backup.lock();
            // Nobody takes a batch of a backup that has ended.
            if state.ended.is_none() {
                state.stage(self, owned);
            }
        }
    }

    /// Records that an object that this node keeps is changed, freed or not here any more from now on.
    pub(crate) fn forget_stored(&self, word: OwnerWord) {
        let Some(backup) = &self.backup else { return };
        if self.is_here(word) {
            backup.lock().forget(word);
        } else if self.holds_promoted(word) {
            backup.lock().leave(word);
        }
    }

    /// Records the state of a lock of a node that is gone. Its own backup holds what the value was.
    pub(super) fn keep_stored_lock(&self, word: OwnerWord, state: StoredLock) {
        let Some(mut backup) = self.backup.as_ref().map(NodeBackup::lock) else { return };
        if backup.ended.is_none() {
            backup.locks.insert(word.block(), KnownLock { word, state, destructor: None, is_shared: true });
        }
    }

    /// Records the state of a channel of a node that is gone, and its values. Those that come stand behind them.
    pub(super) fn keep_stored_channel(
        &self,
        word: OwnerWord,
        state: StoredChannel,
        messages: &[(OwnerWord, StoredMessage)],
    ) {
        let Some(mut backup) = self.backup.as_ref().map(NodeBackup::lock) else { return };
        if backup.ended.is_some() {
            return;
        }
        backup.channels.insert(word.block(), KnownChannel { word, state, is_shared: true });
        for (value, StoredMessage { channel, position, value: contents }) in messages {
            let kind = StoredKind::Message { channel: *channel, position: *position };
            backup.messages.insert(value.block(), StoredObject { word: *value, bytes: contents.len(), kind });
            backup.position = backup.position.max(position + 1);
        }
    }

    /// Begins a lock of this node, whose value has so many bytes.
    pub(crate) fn begin_lock(&self, word: OwnerWord, bytes: usize, destructor: Option<ShippedCode>) {
        let Some(backup) = &self.backup else {
            // Nobody has to know who holds it.
            self.arena.begin_thin(word);
            return;
        };
        let mut value = Vec::with_capacity(bytes);
        self.arena.read(word, bytes as u64, &mut value);
        let state = StoredLock { value, owns_others: destructor.is_some(), ..StoredLock::default() };
        let mut backup = backup.lock();
        if backup.ended.is_none() {
            backup.locks.insert(word.block(), KnownLock { word, state, destructor, is_shared: false });
        }
    }

    /// Begins a channel of this node.
    pub(super) fn begin_stored_channel(&self, word: OwnerWord, state: StoredChannel) {
        let Some(mut backup) = self.backup.as_ref().map(NodeBackup::lock) else { return };
        if backup.ended.is_none() {
            backup.channels.insert(word.block(), KnownChannel { word, state, is_shared: false });
        }
    }

    /// Records the state of a channel that this node keeps, before anybody is told of a change. A channel that another
    /// node has asked is known to others.
    pub(super) fn note_channel(&self, word: OwnerWord, state: &StoredChannel, is_asked: bool) {
        let Some(mut backup) = self.backup.as_ref().map(NodeBackup::lock) else { return };
        if is_asked {
            backup.share_channel(word);
        }
        let Some(channel) = backup.channels.get_mut(&word.block()).filter(|channel| channel.word == word) else {
            return;
        };
        if channel.state != *state {
            channel.state.clone_from(state);
            if channel.is_shared {
                backup.changed_channels.insert(word.block());
            }
        }
    }

    /// Records that a value was accepted into a channel that this node keeps, behind all others; or was received, and
    /// may be asked for again.
    pub(super) fn note_message(&self, channel: OwnerWord, word: OwnerWord, bytes: u64) {
        let Some(mut backup) = self.backup.as_ref().map(NodeBackup::lock) else { return };
        let Some(known) = backup.channels.get(&channel.block()).filter(|known| known.word == channel) else { return };
        let is_shared = known.is_shared;
        if backup.messages.get(&word.block()).is_some_and(|stored| stored.word == word) {
            return;
        }
        let kind = StoredKind::Message { channel, position: backup.position };
        backup.position += 1;
        let stored = StoredObject { word, bytes: bytes as usize, kind };
        backup.messages.insert(word.block(), stored);
        if is_shared {
            backup.changed.insert(word.block(), stored);
        }
    }

    /// Records a change of a lock that this node keeps, before anybody is told of it. `note` returns whether there is
    /// one. A lock that another node holds is known to others.
    pub(super) fn note_lock(&self, word: OwnerWord, note: impl FnOnce(&mut StoredLock) -> bool) {
        let Some(mut backup) = self.backup.as_ref().map(NodeBackup::lock) else { return };
        let Some(lock) = backup.locks.get_mut(&word.block()).filter(|lock| lock.word == word) else { return };
        let is_changed = note(&mut lock.state);
        lock.is_shared |= lock.state.holders.iter().any(|(ticket, _)| ticket.node != self.id.0);
        if is_changed && lock.is_shared {
            backup.changed_locks.insert(word.block());
        }
    }

    /// Makes a step of an atomic number that this node keeps. Whatever is told afterwards, by whoever has seen the
    /// step, is told after it is stored.
    pub(crate) fn step_number(&self, word: OwnerWord, step: AtomicStep) -> Option<u64> {
        let is_here = self.is_here(word);
        let mut state = self.backup.as_ref().filter(|_| step != AtomicStep::Load).map(NodeBackup::lock);
        let before = if is_here {
            self.arena.with_object(word, size_of::<u64>() as u64, |address| {
                // SAFETY: a block of that size, aligned to 16 bytes, which is not freed meanwhile; a word that
                // is asked for as a number's is the one of a number, because all nodes run this build.
                step.apply(unsafe { AtomicU64::from_ptr(address.cast()) })
            })
        } else {
            self.step_promoted(word, step)
        }?;
        // What was promoted is in the backup of its node.
        if let Some(state) = state.as_mut().filter(|state| state.ended.is_none())
            && (!is_here || state.stored.contains_key(&word.block()))
        {
            let stored = StoredObject { word, bytes: size_of::<u64>(), kind: StoredKind::Number };
            state.changed.insert(word.block(), stored);
        }
        Some(before)
    }

    /// Waits until all is stored that was staged before. A message leaves afterwards. Fails if another node
    /// keeps the objects of this one.
    pub(crate) fn commit(&self) -> Result<(), ShareError> {
        let Some(backup) = &self.backup else { return Ok(()) };
        let mut state = backup.lock();
        state.stage_changes(self);
        let is_wanted = state.staged > 0 || state.batch.len() > FREES_BYTES_MAX;
        let wanted = if is_wanted { state.collecting } else { state.collecting - 1 };
        loop {
            match state.ended {
                Some(BackupEnd::TakenOver) => return Err(ShareError::Expelled { expulsion: None }),
                Some(BackupEnd::Lost) => return Ok(()),
                None if state.done >= wanted => return Ok(()),
                None => {}
            }
            let Some(writer) = state.writer.take() else {
                state = backup.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.stage_changes(self);
            let (number, batch) = (state.collecting, state.take_batch());
            let (mut batch, place) = match writer.log.append(&batch) {
                Some(place) => (batch, Some(place)),
                None => {
                    let all = state.all(self);
                    let place = writer.log.checkpoint(&all);
                    (all, place)
                }
            };
            drop(state);
            state = self.write_batch(backup, writer, number, &mut batch, place, None);
        }
    }

    /// Writes a batch, with the right to do that, and gives the right back. A replica that was added is used from now
    /// on, if it has the batch, and whoever would take the backup over knows of it.
    fn write_batch<'b>(
        &self,
        backup: &'b NodeBackup,
        mut writer: BackupWriter,
        number: u64,
        batch: &mut BackupBatch,
        place: Option<BatchPlace>,
        added: Option<(u8, ReplicaAccess)>,
    ) -> MutexGuard<'b, BackupState> {
        let written = match place {
            Some(place) => writer.region.write(writer.log.commit(), batch, place).and_then(|()| {
                count(&self.counters.backup_batches, 1);
                count(&self.counters.backup_bytes, batch.len());
                writer.log.advance(place).map_or(Ok(()), |unused| writer.region.discard(unused))
            }),
            None => Err(BackupError::TooSmall),
        };
        let lost = writer.region.take_lost();
        let mut restored = None;
        let end = match written {
            Ok(()) => self.go_on_without(&lost).or_else(|| {
                let (added, access) = added.filter(|(added, _)| writer.region.has(*added))?;
                match self.authority().restore_backup(self, added, access) {
                    ReplicaVerdict::Used => restored = Some(added),
                    ReplicaVerdict::Unused => writer.region.remove(added),
                    ReplicaVerdict::TakenOver => return Some(BackupEnd::TakenOver),
                }
                None
            }),
            Err(error) => Some(self.end_backup(&error)),
        };
        let mut state = backup.lock();
        state.lost_replicas.extend(lost.iter().map(|lost| lost.number));
        if let Some(restored) = restored {
            state.lost_replicas.remove(&restored);
        }
        state.writer = Some(writer);
        state.done = number;
        if end.is_some() {
            state.ended = end;
            (state.stored, state.changed, state.messages) = Default::default();
            (state.locks, state.channels, state.left) = Default::default();
        }
        backup.changed.notify_all();
        state
    }

    /// Uses memory servers again that were given up and can be reached, or others in their places. Waits for them.
    pub(super) fn restore_replicas(&self, access: &BackupAccess) {
        let Some(backup) = &self.backup else { return };
        let lost: Vec<u8> = {
            let state = backup.lock();
            if state.ended.is_none() { state.lost_replicas.iter().copied().collect() } else { Vec::new() }
        };
        for number in lost {
            if let Ok((replica, access)) = access.replace(number) {
                self.restore_replica(backup, replica, access);
            }
        }
    }

    /// Adds a new replica, which gets all objects.
    fn restore_replica(&self, backup: &NodeBackup, replica: Replica, access: ReplicaAccess) {
        let mut state = backup.lock();
        let mut writer = loop {
            if state.ended.is_some() {
                return;
            }
            match state.writer.take() {
                Some(writer) => break writer,
                None => state = backup.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(state);
        let added = replica.number();
        // What fails here fails at the new region: nothing has changed.
        let is_added = writer.region.add(replica, writer.log.commit()).is_ok();
        let mut state = backup.lock();
        if !is_added {
            state.writer = Some(writer);
            backup.changed.notify_all();
            return;
        }
        state.stage_changes(self);
        let (number, _) = (state.collecting, state.take_batch());
        let mut all = state.all(self);
        let place = writer.log.checkpoint(&all);
        drop(state);
        let state = self.write_batch(backup, writer, number, &mut all, place, Some((added, access)));
        let is_restored = !state.lost_replicas.contains(&added) && state.ended.is_none();
        drop(state);
        if is_restored {
            crate::member::say(&format!("node {}: memory server {added} keeps its backup again", self.id));
        }
    }

    /// Ends the backup after an error, and has that known before any other message leaves: what is stored is older than
    /// what others will know.
    fn end_backup(&self, error: &BackupError) -> BackupEnd {
        if matches!(error, BackupError::Fenced) {
            self.first.expelled(None);
            return BackupEnd::TakenOver;
        }
        crate::member::say(&format!("node {}: its backup is lost, and it goes on without: {error}", self.id));
        self.say_lost(None).unwrap_or(BackupEnd::Lost)
    }

    /// Goes on without the replicas that have failed. Whoever would take the backup over knows before any message
    /// leaves that follows from what they have not stored. Returns why the backup ends, if it does.
    fn go_on_without(&self, lost: &[LostReplica]) -> Option<BackupEnd> {
        lost.iter().find_map(|LostReplica { number, url, error }| {
            let node = self.id;
            crate::member::say(&format!("node {node}: its backup goes on without {url}: {error}"));
            self.say_lost(Some(*number))
        })
    }

    /// Says that a replica of the backup is of no use, or all of it, and waits until that is known. Returns why the
    /// backup ends, if somebody takes it over already.
    fn say_lost(&self, replica: Option<u8>) -> Option<BackupEnd> {
        (!self.authority().lose_backup(self, replica)).then_some(BackupEnd::TakenOver)
    }
}
