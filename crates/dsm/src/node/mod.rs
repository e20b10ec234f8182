//! A node: a process that keeps a part of shared memory, and runs tasks.
#![allow(unsafe_code, reason = "objects are borrowed and dropped")]

mod arenas;
mod backup;
mod borrowers;
mod builder;
mod channels;
mod door;
mod fetches;
mod groups;
mod here;
mod locks;
mod names;
mod notice;
mod outbox;
mod peers;
mod promoted;
mod shared;
mod shares;
mod tasks;
mod wait_table;
mod waits;

use crate::ShareError;
use crate::arena::ShareArena;
use crate::copies::{CopyCache, ObjectCopy};
use crate::member::{FirstProcess, MemberAuthority, SoloAuthority};
use crate::message::{NodeAddress, ShareMessage};
use crate::stats::{Counters, NodeStats, count};
use crate::task::code::ShippedCode;
use crate::task::{OpenJoins, Workers};
use arenas::PeerArenas;
pub(crate) use backup::NodeBackup;
use borrowers::Borrowers;
pub use builder::{NodeBuilder, run};
pub(crate) use builder::{Running, StartPoint, keep_partitions, take_partitions};
use channels::HomeChannels;
use core::cell::RefCell;
use core::sync::atomic::{AtomicU16, AtomicU64, Ordering::Relaxed};
use core::time::Duration;
pub(crate) use door::Door;
use farfield_core::dsm::{
    BlockRights, BorrowRoot, Colour, LoanNumber, OwnerWord, Partition, ViewChange, WithdrawnTickets,
};
use fetches::FetchThreads;
pub(crate) use fetches::WantedObject;
pub(crate) use groups::GroupType;
pub(crate) use here::HeldLock;
pub use here::Here;
use locks::HomeLocks;
pub(crate) use locks::{LockWish, THIN_NUMBER};
use names::ProgramNames;
use outbox::Outbox;
pub(crate) use peers::{NoPlace, Peers, Unanswered};
use promoted::{PartitionHosts, PromotedObjects};
pub(crate) use shared::AtomicStep;
use shares::{HomeCounts, SpareShares};
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};
pub(crate) use tasks::{NotStarted, caught};
pub(crate) use wait_table::{WaitCause, WaitSlot, WaitTable};
pub(crate) use waits::{HomeAnswer, WaitLimit};
use waits::{OpenTickets, WaitNotes};

/// Longest time for which an answer of another node is waited for.
pub(crate) const WITHIN: Duration = Duration::from_secs(10);

/// Number of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u16);

impl core::fmt::Display for NodeId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl NodeId {
    /// Returns the node that keeps the object of this word, in the program that this process runs.
    pub(crate) fn of(word: OwnerWord) -> NodeId {
        let node = OF_PROCESS.read().ok().and_then(|node| node.upgrade());
        node.map_or_else(|| NodeId::of_home(word), |node| node.host_of(word))
    }

    /// Returns the node that has made the object of this word.
    pub(crate) fn of_home(word: OwnerWord) -> NodeId {
        NodeId::in_program(word, FIRST_PARTITION.load(Relaxed))
    }

    /// Owners of another program's objects get a number that no node has.
    fn in_program(word: OwnerWord, first_partition: u16) -> NodeId {
        NodeId(word.partition().number().wrapping_sub(first_partition))
    }
}

thread_local! {
    /// Node whose task runs in this thread, and whether the thread is a worker of it.
    static CURRENT: RefCell<Option<(Arc<ShareNode>, bool)>> = const { RefCell::new(None) };
}

/// Partition of the first node of the program that this process runs, or ran last.
static FIRST_PARTITION: AtomicU16 = AtomicU16::new(0);

/// Node of this process, for threads that the program has started itself.
static OF_PROCESS: RwLock<Weak<ShareNode>> = RwLock::new(Weak::new());

/// Does something in a thread that belongs to a node.
fn within<T>(node: &Arc<ShareNode>, is_worker: bool, action: impl FnOnce() -> T) -> T {
    struct Restore(Option<(Arc<ShareNode>, bool)>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
    let _restore = Restore(CURRENT.replace(Some((node.clone(), is_worker))));
    action()
}

/// Frees an object whose owner is gone. Never waits for another node.
pub(crate) fn free(word: OwnerWord, destructor: Option<ShippedCode>) {
    with_current(|node| node.free(word, destructor));
}

/// Calls `action` with the node that this thread belongs to, or else with the node of the process.
pub(crate) fn with_current(action: impl FnOnce(&ShareNode)) {
    // While a thread ends, the owners that are its own are dropped, and nobody knows its node.
    let current = CURRENT.try_with(|current| current.borrow().as_ref().map(|(node, _)| node.clone()));
    let of_thread = current.ok().flatten();
    let node = of_thread.or_else(|| OF_PROCESS.read().ok()?.upgrade());
    // After its program has ended there is no shared memory any more.
    if let Some(node) = node {
        action(&node);
    }
}

/// A running node.
pub(crate) struct ShareNode {
    pub(crate) id: NodeId,
    first_partition: u16,
    /// Common part of the words of objects of this node. It has no flags.
    tag: u64,
    near_bytes: u64,
    arena: ShareArena,
    copies: CopyCache,
    fetches: FetchThreads,
    arenas: PeerArenas,
    reads_in_place: bool,
    pub(crate) peers: Peers,
    pub(crate) first: FirstProcess,
    /// Authority on the members, if it is not the first process.
    authority: OnceLock<Arc<dyn MemberAuthority>>,
    joins: OpenJoins,
    borrowers: Borrowers,
    pub(crate) workers: Workers,
    pub(crate) waits: WaitTable<HomeAnswer>,
    wait_notes: WaitNotes,
    pub(crate) tickets: OpenTickets,
    /// Tickets of other nodes that were withdrawn before their requests have arrived.
    withdrawn: Mutex<WithdrawnTickets>,
    pub(crate) outbox: Outbox,
    locks: HomeLocks,
    names: ProgramNames,
    channels: HomeChannels,
    counts: HomeCounts,
    spares: SpareShares,
    backup: Option<NodeBackup>,
    /// Whether nodes of the program have backups.
    keeps_backups: bool,
    promoted: PromotedObjects,
    hosts: PartitionHosts,
    pub(crate) counters: Counters,
    /// Mutable loans that tasks of this node have made.
    loans: AtomicU64,
    /// Scoped tasks that tasks of this node have started.
    roots: AtomicU64,
    this: Weak<ShareNode>,
}

impl ShareNode {
    /// Makes a node, whose partition is so many after the first one of its program. No program of
    /// this process may have used it: owners may outlive their program.
    pub(crate) fn new(
        id: NodeId,
        first_partition: u16,
        config: &NodeBuilder,
        peers: Peers,
        backup: Option<NodeBackup>,
    ) -> std::io::Result<Arc<ShareNode>> {
        let number = first_partition.checked_add(id.0);
        let partition = number.and_then(Partition::new).ok_or(std::io::ErrorKind::InvalidInput)?;
        let arena = ShareArena::new(partition, config.near_bytes)?;
        let node = Arc::new_cyclic(|this| ShareNode {
            id,
            first_partition,
            tag: OwnerWord::new(partition, OwnerWord::ALIGN, Colour(0)).map_or(0, OwnerWord::bits)
                & OwnerWord::PARTITION_MASK,
            near_bytes: config.near_bytes,
            arena,
            copies: CopyCache::default(),
            fetches: FetchThreads::default(),
            arenas: PeerArenas::new(peers.count()),
            keeps_backups: backup.is_some() || config.backup.is_some(),
            backup,
            promoted: PromotedObjects::default(),
            hosts: PartitionHosts::new(peers.count()),
            reads_in_place: config.reads_in_place,
            peers,
            first: FirstProcess::default(),
            authority: OnceLock::new(),
            joins: OpenJoins::default(),
            borrowers: Borrowers::default(),
            workers: Workers::new(config.workers),
            waits: WaitTable::default(),
            wait_notes: WaitNotes::default(),
            tickets: OpenTickets::default(),
            withdrawn: Mutex::default(),
            outbox: Outbox::default(),
            locks: HomeLocks::default(),
            names: ProgramNames::default(),
            channels: HomeChannels::default(),
            counts: HomeCounts::default(),
            spares: SpareShares::default(),
            counters: Counters::default(),
            loans: AtomicU64::new(0),
            roots: AtomicU64::new(0),
            this: this.clone(),
        });
        node.outbox.open(Arc::downgrade(&node));
        Ok(node)
    }

    /// Returns the node as others hold it; `None` while it ends.
    pub(crate) fn shared(&self) -> Option<Arc<ShareNode>> {
        self.this.upgrade()
    }

    /// Returns where others reach this node, which listens at this URL.
    pub(crate) fn address_at(&self, url: String) -> NodeAddress {
        NodeAddress { url, arena: Some(self.arena.published_address()) }
    }

    fn tag(&self) -> u64 {
        self.tag
    }

    fn base(&self) -> *mut u8 {
        self.arena.base()
    }

    /// Returns whether this thread runs a task of the node.
    pub(crate) fn is_worker(&self) -> bool {
        CURRENT.with_borrow(|current| {
            current.as_ref().is_some_and(|(node, is_worker)| *is_worker && core::ptr::eq(&raw const **node, self))
        })
    }

    pub(crate) fn stats(&self) -> NodeStats {
        let backup_servers = self.backup_lag().map_or(0, |(_, left, _)| left as u64);
        self.counters.stats(self.arena.used_bytes(), self.copies.bytes(), backup_servers, self.promoted.count())
    }

    /// Returns the authority on the members.
    pub(crate) fn authority(&self) -> &dyn MemberAuthority {
        self.authority.get().map_or(&SoloAuthority, |authority| &**authority)
    }

    /// Sets the authority on the members instead of the first process.
    #[cfg(feature = "etcd")]
    pub(crate) fn set_authority(&self, authority: Arc<dyn MemberAuthority>) {
        let _ = self.authority.set(authority);
    }

    /// Returns the node that keeps the names: the first one that is not gone.
    pub(crate) fn leader(&self) -> NodeId {
        (0..self.peers.count()).map(NodeId).find(|node| !self.peers.is_lost(*node)).unwrap_or(self.id)
    }

    /// Begins a view without a node, at the first one, and tells all others.
    pub(crate) fn expel(&self, change: ViewChange) {
        let before = self.peers.begin_view(change, |change| self.lose(change));
        self.tell_view(before, change);
    }

    /// Tells all others that a node is gone: what has changed after a view.
    pub(crate) fn tell_view(&self, before: u32, change: ViewChange) {
        let others = (0..self.peers.count()).map(NodeId).filter(|other| *other != self.id);
        for other in others.filter(|other| !self.peers.is_lost(*other)) {
            self.outbox.tell(other, ShareMessage::View { after: before, changes: vec![change] });
        }
    }

    /// Learns who is gone: what has changed after a view.
    pub(crate) fn learn(&self, after: u32, changes: &[ViewChange]) {
        if changes.is_empty() {
            return;
        }
        self.peers.learn(after, changes, |change| self.lose(change));
    }

    /// Ends what waits for a node that is gone.
    fn lose(&self, change: &ViewChange) {
        let node = NodeId(change.node);
        self.end_process(node);
        self.end_promotion(node, change.host.map(NodeId));
        // What is in its memory may be newer than what another node keeps of it.
        self.arenas.lose(node);
        // Whoever is told that the node is gone finds who keeps its objects.
        self.set_host(node, change.host.map(NodeId));
        self.peers.lose(node);
        self.joins.lose(node);
        self.waits.lose(node);
        self.withdrawn().lose(node.0);
        self.names.lose(node);
        self.lose_locks(node.0);
        self.lose_channels(node);
    }

    /// Returns the node that has made the object of this word.
    pub(crate) fn home_of(&self, word: OwnerWord) -> NodeId {
        NodeId::in_program(word, self.first_partition)
    }

    fn is_here(&self, word: OwnerWord) -> bool {
        word.bits() & OwnerWord::PARTITION_MASK == self.tag
    }

    /// Returns a root for what a scoped task is lent.
    pub(crate) fn next_root(&self) -> BorrowRoot {
        BorrowRoot::of_task(self.id.0, self.roots.fetch_add(1, Relaxed))
    }

    /// Returns a number for a loan that no other node and no other loan has.
    pub(crate) fn next_loan(&self) -> LoanNumber {
        LoanNumber::new(self.id.0, self.loans.fetch_add(1, Relaxed))
    }

    /// Takes a block for a new object, and copies of others out of its way.
    pub(crate) fn take(&self, bytes: u64) -> Result<OwnerWord, ShareError> {
        let word = self.arena.take(bytes, self.near_bytes)?;
        self.copies.shrink(self.near_bytes.saturating_sub(self.arena.used_bytes()));
        Ok(word)
    }

    /// Stores a new object of these bytes. Returns its owner's word.
    pub(crate) fn store(&self, bytes: &[u8]) -> Result<OwnerWord, ShareError> {
        let word = self.take(bytes.len() as u64)?;
        self.fill(word, bytes);
        Ok(word)
    }

    /// Writes the first bytes of a new block, which has room for them.
    fn fill(&self, word: OwnerWord, bytes: &[u8]) {
        // SAFETY: a new block, which nobody else knows, with so much room.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.arena.address(word), bytes.len()) };
    }

    /// Returns a copy of another node's object. Waits for that node if there is none.
    fn copy_of(&self, wanted: WantedObject) -> Result<Arc<ObjectCopy>, ShareError> {
        self.copies.get_or_fetch(wanted.key(), || self.fetch_copy(wanted))
    }

    /// Fetches a copy and keeps it.
    fn fetch_copy(&self, wanted: WantedObject) -> Result<Arc<ObjectCopy>, ShareError> {
        let WantedObject { word, bytes, group } = wanted;
        let held_bytes = self.copies.held_bytes();
        if held_bytes > self.near_bytes {
            return Err(ShareError::ScopeTooLong { held_bytes });
        }
        let copy = match group {
            Some(group) => {
                let contents = self.fetch_group(word, &group)?;
                let copy = self.copies.copy(&contents);
                // SAFETY: what has arrived is a group of this type, and nobody else knows the copy.
                let connected = unsafe { groups::connect_copy(&copy, contents.len(), group.root) };
                connected.ok_or(ShareError::Stale { node: self.home_of(word) })?;
                copy
            }
            None => self.copies.copy(&self.fetch(word, bytes)?),
        };
        let limit_bytes = self.near_bytes.saturating_sub(self.arena.used_bytes());
        Ok(self.copies.insert(wanted.key(), copy, limit_bytes))
    }

    /// Brings an object to a new block of this node, which has room for so many bytes. Returns its new
    /// word and its address.
    #[cold]
    pub(crate) fn bring(
        &self,
        word: OwnerWord,
        bytes: usize,
        room: usize,
        rights: BlockRights,
    ) -> Result<(OwnerWord, *mut u8), ShareError> {
        let contents = self.contents(word, bytes)?;
        let new = self.take(room as u64)?;
        self.fill(new, &contents);
        count(&self.counters.moved_objects, 1);
        // The object is there no longer, but is not dropped: it is here.
        if rights.frees_moved() {
            self.free(word, None);
        }
        Ok((new, self.arena.address(new)))
    }

    /// Returns the bytes of an object, wherever it is.
    pub(crate) fn contents(&self, word: OwnerWord, bytes: usize) -> Result<Vec<u8>, ShareError> {
        if !self.is_here(word) {
            let in_place = self.in_place(word).or_else(|| self.map_in_place(word));
            return match in_place {
                // SAFETY: the object lies there, and its owner is borrowed, so nobody writes to it.
                Some(address) => Ok(unsafe { core::slice::from_raw_parts(address, bytes) }.to_vec()),
                None => self.fetch(word, bytes),
            };
        }
        let mut contents = Vec::with_capacity(bytes);
        match self.arena.read(word, bytes as u64, &mut contents) {
            true => Ok(contents),
            false => Err(ShareError::Stale { node: self.id }),
        }
    }

    fn fetch(&self, word: OwnerWord, bytes: usize) -> Result<Vec<u8>, ShareError> {
        if word.is_lost() {
            return Err(ShareError::Lost);
        }
        count(&self.counters.fetches, 1);
        loop {
            let host = self.host_of(word);
            if host == self.id {
                return self.read_promoted(word, 0, bytes as u64).ok_or_else(|| self.lost_with_home(word));
            }
            return match self.peers.fetch(self, host, word, bytes) {
                Ok(found) if found.len() == bytes => Ok(found),
                Ok(_) => Err(ShareError::Stale { node: host }),
                // Another node keeps it since.
                Err(ShareError::NodeLost { .. }) if self.host_of(word) != host => continue,
                // It was not in the backup.
                Err(ShareError::Stale { .. }) if self.is_promoted(word) => Err(self.lost_with_home(word)),
                Err(error) => Err(error),
            };
        }
    }

    /// Frees an object that has no owner any more, here or at its node.
    pub(crate) fn free(&self, word: OwnerWord, destructor: Option<ShippedCode>) {
        if word.is_lost() {
            count(&self.counters.orphans, 1);
        } else if self.is_here(word) && destructor.is_none() {
            self.free_block(word);
        } else {
            self.outbox.free(self.host_of(word), word, destructor);
        }
    }

    /// Frees an object that has no owner any more, in order with what else is said to its node.
    pub(crate) fn free_later(&self, word: OwnerWord, destructor: Option<ShippedCode>) {
        self.outbox.free(self.host_of(word), word, destructor);
    }

    /// Records that a group of this node has this version from now on.
    pub(crate) fn begin_version(&self, word: OwnerWord) {
        self.arena.begin_version(word);
    }

    /// Returns the address of an object of this node.
    pub(crate) fn address_of(&self, word: OwnerWord) -> *mut u8 {
        self.arena.address(word)
    }

    /// Drops an object of this node and frees its block, once.
    pub(crate) fn drop_here(self: &Arc<ShareNode>, word: OwnerWord, destructor: Option<ShippedCode>) {
        if !self.is_here(word) {
            // What was not in the backup is counted.
            if !self.holds_promoted(word) || self.begin_drop(word, destructor) {
                self.drop_promoted(word, destructor);
                self.end_drop(word);
            }
            return;
        }
        if !self.begin_drop(word, destructor) {
            return;
        }
        self.forget_stored(word);
        if let Some(destructor) = destructor {
            self.arena.end_version(word);
            // SAFETY: its owner is gone, so nobody borrows it; owners have the destructor of their
            // type.
            within(self, false, || unsafe { destructor.drop_at(self.arena.address(word)) });
        }
        self.end_drop(word);
    }

    fn free_block(&self, word: OwnerWord) {
        self.forget_stored(word);
        if self.arena.free(word).is_err() {
            count(&self.counters.late_frees, 1);
        }
    }

    /// Prepares an object of this node to be written to in place, if it has another version. Returns that.
    pub(crate) fn write_in_place(&self, word: OwnerWord) -> Option<(OwnerWord, *mut u8)> {
        let next = word.next_version().filter(|_| self.is_here(word))?;
        self.forget_stored(word);
        Some((next, self.arena.address(word)))
    }

    /// Returns whether an object of this version may be here: whoever frees it late or twice is not
    /// believed.
    pub(crate) fn may_hold(&self, word: OwnerWord) -> bool {
        self.is_here(word) && self.arena.read(word, 0, &mut Vec::new())
    }

    /// Reads an object for another node.
    pub(crate) fn read_for(&self, word: OwnerWord, offset: u64, bytes: u64) -> Option<Vec<u8>> {
        if !self.is_here(word) {
            return self.read_promoted(word, offset, bytes);
        }
        let mut contents = Vec::new();
        self.arena.read_part(word, offset, bytes, &mut contents).then_some(contents)
    }
}
