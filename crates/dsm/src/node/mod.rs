//! A node: a process that keeps a part of shared memory, and runs tasks.
#![allow(unsafe_code, reason = "objects are borrowed and dropped")]

mod builder;
mod door;
mod frees;
mod here;
mod peers;

use crate::arena::ShareArena;
use crate::copies::{CopyCache, ObjectCopy};
use crate::message::{CodeRef, LOAN_BYTES, ShareMessage, TaskOutcome, VALUE_BYTES_MAX};
use crate::stats::{Counters, NodeStats, count};
use crate::task::code::{ShippedCode, Value};
use crate::task::{OpenJoins, QueuedTask, TaskEnd, UsedLoan, Workers};
use crate::{JoinError, ShareError};
pub(crate) use builder::Running;
pub use builder::{NodeBuilder, run};
use core::any::Any;
use core::cell::RefCell;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
pub(crate) use door::Door;
use farfield_core::dsm::{Colour, OwnerWord, Partition};
use frees::Frees;
pub use here::Here;
pub(crate) use peers::Peers;
use std::collections::HashMap;
use std::sync::{Arc, RwLock, Weak};

/// Longest time for which an answer of another node is waited for.
pub(crate) const WITHIN: Duration = Duration::from_secs(10);

/// Position of the lender's number in the number of a loan.
const LOAN_SHIFT: u32 = 48;

/// Number of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u16);

impl core::fmt::Display for NodeId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl NodeId {
    /// Returns the node that has made a loan of this number.
    pub(crate) fn of_loan(number: u64) -> NodeId {
        NodeId((number >> LOAN_SHIFT) as u16)
    }

    pub(crate) fn of(word: OwnerWord) -> NodeId {
        NodeId(word.partition().number())
    }
}

/// What a mutable borrow may do with the block that its object is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockRights {
    /// Write to it, and free it when the object moves.
    Owner,
    /// Write to it. It stays when the object moves.
    Writer,
    /// Read it: the object moves.
    Reader,
}

thread_local! {
    /// Node whose task runs in this thread, and whether the thread is a worker of it.
    static CURRENT: RefCell<Option<(Arc<ShareNode>, bool)>> = const { RefCell::new(None) };
}

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
    let of_thread = CURRENT.with_borrow(|current| current.as_ref().map(|(node, _)| node.clone()));
    let node = of_thread.or_else(|| OF_PROCESS.read().ok()?.upgrade());
    // After its program has ended there is no shared memory any more.
    if let Some(node) = node {
        node.free(word, destructor);
    }
}

/// A running node.
pub(crate) struct ShareNode {
    pub(crate) id: NodeId,
    /// What the words of objects of this node have in common. It has no flags.
    tag: u64,
    near_bytes: u64,
    arena: ShareArena,
    copies: CopyCache,
    pub(crate) peers: Peers,
    joins: OpenJoins,
    pub(crate) workers: Workers,
    frees: Frees,
    pub(crate) counters: Counters,
    /// Mutable loans that tasks of this node have made.
    loans: AtomicU64,
    this: Weak<ShareNode>,
}

impl ShareNode {
    pub(crate) fn new(id: NodeId, config: &NodeBuilder, peers: Peers) -> std::io::Result<Arc<ShareNode>> {
        let partition = Partition::new(id.0).ok_or(std::io::ErrorKind::InvalidInput)?;
        let arena = ShareArena::new(partition, config.near_bytes)?;
        let node = Arc::new_cyclic(|this| ShareNode {
            id,
            tag: OwnerWord::new(partition, OwnerWord::ALIGN, Colour(0)).map_or(0, OwnerWord::bits)
                & OwnerWord::PARTITION_MASK,
            near_bytes: config.near_bytes,
            arena,
            copies: CopyCache::default(),
            peers,
            joins: OpenJoins::default(),
            workers: Workers::new(config.workers),
            frees: Frees::default(),
            counters: Counters::default(),
            loans: AtomicU64::new(0),
            this: this.clone(),
        });
        node.frees.start(&node)?;
        Ok(node)
    }

    /// Returns the node as others hold it; `None` while it ends.
    pub(crate) fn shared(&self) -> Option<Arc<ShareNode>> {
        self.this.upgrade()
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
        self.counters.stats(self.arena.used_bytes(), self.copies.bytes())
    }

    /// Ends what waits for other nodes.
    pub(crate) fn lose(&self, node: NodeId) {
        self.peers.lose(node);
        self.joins.lose(node);
    }

    fn is_here(&self, word: OwnerWord) -> bool {
        word.bits() & OwnerWord::PARTITION_MASK == self.tag
    }

    /// Returns a number for a loan that no other node and no other loan has.
    pub(crate) fn next_loan(&self) -> u64 {
        u64::from(self.id.0) << LOAN_SHIFT | self.loans.fetch_add(1, Relaxed)
    }

    /// Takes a block for a new object, and copies of others out of its way.
    fn take(&self, bytes: u64) -> Result<OwnerWord, ShareError> {
        if bytes > VALUE_BYTES_MAX as u64 {
            return Err(ShareError::TooLarge { bytes, limit_bytes: VALUE_BYTES_MAX as u64 });
        }
        let word = self.arena.take(bytes, self.near_bytes)?;
        self.copies.shrink(self.near_bytes.saturating_sub(self.arena.used_bytes()));
        Ok(word)
    }

    /// Stores a new object of these bytes. Returns its owner's word.
    pub(crate) fn store(&self, bytes: &[u8]) -> Result<OwnerWord, ShareError> {
        let word = self.take(bytes.len() as u64)?;
        // SAFETY: a new block of that size, which nobody else knows.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.arena.address(word), bytes.len()) };
        Ok(word)
    }

    /// Returns a copy of another node's object. Waits for that node if there is none.
    fn copy_of(&self, word: OwnerWord, bytes: usize) -> Result<Arc<ObjectCopy>, ShareError> {
        if let Some(copy) = self.copies.get(word) {
            return Ok(copy);
        }
        let held_bytes = self.copies.held_bytes();
        if held_bytes > self.near_bytes {
            return Err(ShareError::ScopeTooLong { held_bytes });
        }
        let bytes = self.fetch(word, bytes)?;
        let limit_bytes = self.near_bytes.saturating_sub(self.arena.used_bytes());
        Ok(self.copies.insert(word, &bytes, limit_bytes))
    }

    /// Brings an object to a new block of this node. Returns its new word and its address.
    #[cold]
    fn bring(&self, word: OwnerWord, bytes: usize, rights: BlockRights) -> Result<(OwnerWord, *mut u8), ShareError> {
        let contents = self.contents(word, bytes)?;
        let new = self.store(&contents)?;
        count(&self.counters.moved_objects, 1);
        // The object is there no longer, but is not dropped: it is here.
        if rights == BlockRights::Owner {
            self.free(word, None);
        }
        Ok((new, self.arena.address(new)))
    }

    /// Returns the bytes of an object, wherever it is.
    pub(crate) fn contents(&self, word: OwnerWord, bytes: usize) -> Result<Vec<u8>, ShareError> {
        if !self.is_here(word) {
            return self.fetch(word, bytes);
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
        let found = self.peers.fetch(self, NodeId::of(word), word, bytes)?;
        if found.len() == bytes { Ok(found) } else { Err(ShareError::Stale { node: NodeId::of(word) }) }
    }

    /// Frees an object that has no owner any more, here or at its node.
    pub(crate) fn free(&self, word: OwnerWord, destructor: Option<ShippedCode>) {
        if word.is_lost() {
            count(&self.counters.orphans, 1);
        } else if self.is_here(word) && destructor.is_none() {
            self.free_block(word);
        } else {
            self.frees.put(word, destructor);
        }
    }

    /// Drops an object of this node and frees its block.
    pub(crate) fn drop_here(self: &Arc<ShareNode>, word: OwnerWord, destructor: Option<ShippedCode>) {
        if let Some(destructor) = destructor {
            // SAFETY: its owner is gone, so nobody borrows it; owners have the destructor of their
            // type.
            within(self, false, || unsafe { destructor.drop_at(self.arena.address(word)) });
        }
        self.free_block(word);
    }

    fn free_block(&self, word: OwnerWord) {
        if self.arena.free(word).is_err() {
            count(&self.counters.late_frees, 1);
        }
    }

    /// Returns whether an object of this version may be here: whoever frees it late or twice is not
    /// believed.
    pub(crate) fn may_hold(&self, word: OwnerWord) -> bool {
        self.is_here(word) && self.arena.read(word, 0, &mut Vec::new())
    }

    /// Reads an object for another node.
    pub(crate) fn read_for(&self, word: OwnerWord, bytes: u64) -> Option<Vec<u8>> {
        let mut contents = Vec::new();
        self.arena.read(word, bytes, &mut contents).then_some(contents)
    }

    /// Starts a task, here or elsewhere, whose arguments are these bytes. `is_undone` is set if the
    /// arguments are still the caller's.
    pub(crate) fn spawn(
        self: &Arc<ShareNode>,
        to: NodeId,
        body: ShippedCode,
        arguments: Vec<u8>,
    ) -> Result<Arc<crate::task::Waiting>, (ShareError, Option<Vec<u8>>)> {
        let (number, waiting) = self.joins.expect(to, body);
        if to == self.id {
            self.workers.submit(self, QueuedTask { origin: self.id, number, body, arguments });
            return Ok(waiting);
        }
        count(&self.counters.spawns, 1);
        let message = ShareMessage::Spawn { task: number, body: body.reference(), arguments: &arguments };
        match self.peers.tell(self, to, message) {
            Ok(()) => Ok(waiting),
            Err(error) => {
                self.joins.take(number);
                // Where nobody answers, the task may run all the same: it has the arguments.
                let is_undone = !matches!(error, ShareError::Silent { .. });
                Err((error, is_undone.then_some(arguments)))
            }
        }
    }

    /// Runs a task and says how it ended to the node that waits.
    pub(crate) fn run_task(self: &Arc<ShareNode>, task: QueuedTask) {
        let QueuedTask { origin, number, body, arguments } = task;
        let (ended, loans) = within(self, true, || {
            let here = Here::enter(self);
            // SAFETY: the bytes of the arguments of a task of this code, which runs once.
            let ended = unsafe { body.run(&here, &arguments) };
            (ended, here.take_loans())
        });
        self.end_task(origin, number, ended.map_err(|panic| text_of(&*panic)), &loans);
    }

    /// Ends a task that cannot be run.
    pub(crate) fn refuse_task(self: &Arc<ShareNode>, task: QueuedTask, error: &std::io::Error) {
        let message = format!("node {} cannot start a thread: {error}", self.id);
        self.end_task(task.origin, task.number, Err(message), &HashMap::new());
    }

    fn end_task(
        self: &Arc<ShareNode>,
        origin: NodeId,
        number: u64,
        ended: Result<Value, String>,
        used: &HashMap<u64, Option<UsedLoan>>,
    ) {
        let bits = |used: Option<UsedLoan>| used.map_or((0, 0), |used| (used.word.bits(), used.left.bits()));
        let loans = used.iter().map(|(number, used)| {
            let (word, left) = bits(*used);
            (*number, word, left)
        });
        let loans: Vec<_> = loans.collect();
        if origin == self.id {
            if let Some(waiting) = self.joins.take(number) {
                waiting.put(TaskEnd { result: ended.map_err(|message| JoinError::Panicked { message }), loans });
            }
            return;
        }
        count(&self.counters.results, 1);
        let room = VALUE_BYTES_MAX - (loans.len() * LOAN_BYTES).min(VALUE_BYTES_MAX);
        let tell = |outcome: TaskOutcome<'_>| {
            // Only the first of them counts, so it can be said again to a node that was silent.
            let told = loop {
                let message = ShareMessage::Ended { task: number, outcome, loans: loans.clone() };
                match self.peers.tell(self, origin, message) {
                    Err(ShareError::Silent { .. }) => {}
                    told => break told,
                }
            };
            if matches!(told, Err(ShareError::NodeLost { .. })) {
                // The lender is dead, and what it has lent is nobody's.
                let moved = used.values().flatten().filter(|used| used.is_moved() && self.is_here(used.word));
                moved.for_each(|used| self.free(used.word, None));
            }
            told
        };
        match ended {
            Err(mut message) => {
                let end = (0..=message.len().min(room)).rfind(|end| message.is_char_boundary(*end));
                message.truncate(end.unwrap_or(0));
                // Nobody waits any more if that node is gone.
                let _ = tell(TaskOutcome::Panicked(&message));
            }
            Ok(value) if value.len() > room => {
                let _ = tell(TaskOutcome::TooLarge(value.len() as u64));
                within(self, true, || drop(value));
            }
            Ok(value) => {
                let code = value.code();
                let bytes = value.into_bytes();
                match tell(TaskOutcome::Returned(&bytes)) {
                    Ok(()) => {}
                    // SAFETY: the bytes of the result, which nobody has.
                    Err(_) => within(self, true, || drop(unsafe { Value::from_bytes(bytes, code) })),
                }
            }
        }
    }

    /// Takes the end of a task from the node that has run it.
    pub(crate) fn task_ended(self: &Arc<ShareNode>, task: u64, outcome: TaskOutcome<'_>, loans: Vec<(u64, u64, u64)>) {
        let Some(waiting) = self.joins.take(task) else { return };
        let result = match outcome {
            // SAFETY: the bytes of the result of that task, which its node has no longer.
            TaskOutcome::Returned(bytes) => Ok(unsafe { Value::from_bytes(bytes.to_vec(), waiting.code()) }),
            TaskOutcome::Panicked(message) => Err(JoinError::Panicked { message: message.to_owned() }),
            TaskOutcome::TooLarge(bytes) => {
                Err(ShareError::TooLarge { bytes, limit_bytes: VALUE_BYTES_MAX as u64 }.into())
            }
        };
        waiting.put(TaskEnd { result, loans });
    }

    /// Takes a task from another node.
    pub(crate) fn submit(self: &Arc<ShareNode>, origin: NodeId, number: u64, body: CodeRef, arguments: &[u8]) -> bool {
        let Some(body) = ShippedCode::find(body).filter(|body| body.description.argument_bytes == arguments.len())
        else {
            return false;
        };
        self.workers.submit(self, QueuedTask { origin, number, body, arguments: arguments.to_vec() });
        true
    }
}

/// Returns what a panic says.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("something that is no text").to_owned()
}
