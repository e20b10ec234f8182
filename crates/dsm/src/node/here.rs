//! Scope at a node: what a task borrows shared objects in.

use super::{ShareNode, WantedObject};
use crate::arena::lock_word;
use crate::copies::{CopyFlight, CopyLookup, ObjectCopy, ScopeCopies};
use crate::message::{LockEnd, LockedType};
use crate::task::UsedLoan;
use crate::thin;
use crate::{DBox, Far, FarGroup, NodeId, NodeStats, Object, ShareError, TBox, TaskHandle};
use core::cell::{Cell, RefCell};
use core::marker::PhantomData;
use core::task::{Poll, Waker};
use farfield_core::dsm::{BlockRights, BorrowRoot, OwnerWord};
use farfield_core::lock::LockMode;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;

/// The node where code runs, and a scope in which it borrows shared objects.
///
/// References to copies of other nodes' objects are valid as long as the scope, which keeps what it
/// has read. It belongs to one thread.
pub struct Here<'n> {
    node: &'n Arc<ShareNode>,
    /// Common part of the words of objects of this node, and place of these objects.
    tag: u64,
    /// Equals `tag` if objects are written to without a look at the backup; otherwise no word has it.
    write_tag: u64,
    base: *mut u8,
    /// Copies that were read in this scope. References to them may be in use.
    copies: ScopeCopies,
    /// Mutable loans that the task has used, by number; `None` if the object is lost. All scopes of the
    /// task share them.
    loans: Rc<RefCell<HashMap<u64, Option<UsedLoan>>>>,
    /// Locks that the task holds. All scopes of the task share them.
    locks: Rc<RefCell<HeldLocks>>,
    /// Number in the task of the last lock that it held when it lent something. All scopes of the task share it.
    lent_with: Rc<Cell<u64>>,
    /// Roots of what the task was lent.
    roots: Arc<[BorrowRoot]>,
}

/// Returns what a node asks for that wants to read an object.
fn wanted<T: Object + ?Sized>(word: OwnerWord, extent: T::Extent) -> WantedObject {
    WantedObject { word, bytes: T::bytes(extent), group: T::group() }
}

/// A lock that a task holds.
#[derive(Clone, Copy)]
pub(crate) struct HeldLock {
    pub(crate) word: OwnerWord,
    /// Number of the holding at its home.
    pub(crate) number: u64,
    /// Whether the value is used in place.
    pub(crate) is_here: bool,
    /// Whether the task may lend what the value owns, as a reader.
    pub(crate) may_lend: bool,
    /// Says what the home has to know of the value.
    pub(crate) locked: fn(&ShareNode) -> LockedType,
}

/// Locks that a task holds, by their numbers in the task: locks that are taken later have greater ones.
#[derive(Default)]
struct HeldLocks {
    last: u64,
    held: Vec<(u64, HeldLock)>,
}

impl core::fmt::Debug for Here<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Here(node {})", self.node.id)
    }
}

impl<'n> Here<'n> {
    /// Begins the scope of a task that was lent nothing.
    pub(crate) fn at(node: &'n Arc<ShareNode>) -> Here<'n> {
        Here::of_task(node, Arc::default())
    }

    /// Begins the scope of a task that was lent something of these roots.
    pub(crate) fn of_task(node: &'n Arc<ShareNode>, roots: Arc<[BorrowRoot]>) -> Here<'n> {
        Here {
            node,
            tag: node.tag(),
            write_tag: if node.has_backup() { u64::MAX } else { node.tag() },
            base: node.base(),
            copies: ScopeCopies::default(),
            loans: Rc::default(),
            locks: Rc::default(),
            lent_with: Rc::default(),
            roots,
        }
    }

    /// Begins a scope within this one. What is read in it is kept as long as it only.
    pub fn enter(&self) -> Here<'_> {
        let (loans, locks, roots) = (self.loans.clone(), self.locks.clone(), self.roots.clone());
        let lent_with = self.lent_with.clone();
        Here { copies: ScopeCopies::default(), loans, locks, lent_with, roots, ..*self }
    }

    /// Returns the number of the view: so many nodes are gone, as far as this one knows.
    pub fn view(&self) -> u32 {
        self.node.peers.view()
    }

    pub(crate) fn node(&self) -> &Arc<ShareNode> {
        self.node
    }

    /// Returns the address of the object if it is at this node.
    #[inline]
    pub(crate) fn address(&self, word: OwnerWord) -> Option<*mut u8> {
        (word.bits() & OwnerWord::PARTITION_MASK == self.tag).then(|| self.base.wrapping_add(word.offset() as usize))
    }

    /// Returns the object for readers, here or in a copy. It is valid as long as the object's owner is
    /// borrowed and the scope is open. Waits for the object's node if there is no copy.
    #[inline]
    pub(crate) fn reading<T: Object + ?Sized>(
        &self,
        word: OwnerWord,
        extent: T::Extent,
    ) -> Result<*const T, ShareError> {
        let address = match self.address(word) {
            Some(address) => address,
            None if T::IS_GROUP => self.copy_of(wanted::<T>(word, extent))?.cast_mut(),
            None => self.reading_elsewhere(word, T::bytes(extent))?.cast_mut(),
        };
        Ok(T::at(address, extent))
    }

    /// Returns the address of another node's object. Kept out of what is compiled into each use.
    #[inline(never)]
    fn reading_elsewhere(&self, word: OwnerWord, bytes: usize) -> Result<*const u8, ShareError> {
        match self.node.in_place(word) {
            Some(address) => Ok(address),
            None => self.copy_of(WantedObject { word, bytes, group: None }),
        }
    }

    #[cold]
    fn copy_of(&self, wanted: WantedObject) -> Result<*const u8, ShareError> {
        match self.find(wanted) {
            Some(address) => Ok(address),
            None => Ok(self.keep(wanted, self.node.copy_of(wanted)?)),
        }
    }

    /// Returns the address of another node's object, if this scope has a copy or it is read in place.
    fn find(&self, wanted: WantedObject) -> Option<*const u8> {
        if let Some(address) = self.copies.with(wanted.key(), |copy| copy.address()) {
            return Some(address);
        }
        // The addresses of tied objects are those of another process there.
        if wanted.group.is_none() { self.node.map_in_place(wanted.word) } else { None }
    }

    /// Keeps a copy as long as the scope. Returns its address.
    fn keep(&self, wanted: WantedObject, copy: Arc<ObjectCopy>) -> *const u8 {
        let address = copy.address();
        self.copies.keep(wanted.key(), copy);
        address
    }

    /// Starts to fetch a copy of an object, if it needs one and there is none. Does not wait.
    pub(crate) fn prefetch<T: Object + ?Sized>(&self, word: OwnerWord, extent: T::Extent) {
        let wanted = wanted::<T>(word, extent);
        if self.address(word).is_none() && self.find(wanted).is_none() {
            // Whoever reads it is told if that fails.
            self.node.start_copy(wanted);
        }
    }

    /// Returns the object for readers as soon as it is there, as [`Here::reading`] does.
    pub(crate) fn poll_reading<T: Object + ?Sized>(
        &self,
        word: OwnerWord,
        extent: T::Extent,
        flight: &mut Option<Arc<CopyFlight>>,
        waker: &Waker,
    ) -> Poll<Result<*const T, ShareError>> {
        let wanted = wanted::<T>(word, extent);
        let object = |address: *const u8| T::at(address.cast_mut(), extent).cast_const();
        let there = self.address(word).map(<*mut u8>::cast_const).or_else(|| self.find(wanted));
        if let Some(address) = there {
            return Poll::Ready(Ok(object(address)));
        }
        let flight = match flight {
            Some(flight) => flight,
            None => match self.node.start_copy(wanted) {
                CopyLookup::Found(copy) => return Poll::Ready(Ok(object(self.keep(wanted, copy)))),
                CopyLookup::Flying(new) | CopyLookup::New(new) => flight.insert(new),
            },
        };
        flight.poll(waker).map(|landed| Ok(object(self.keep(wanted, landed?))))
    }

    /// Returns the object for readers, with its copy if it is one. Waits as [`Here::reading`] does.
    pub(crate) fn pinning<T: Object + ?Sized>(
        &self,
        word: OwnerWord,
        extent: T::Extent,
    ) -> Result<(*const T, Option<Arc<ObjectCopy>>), ShareError> {
        let wanted = wanted::<T>(word, extent);
        let kept = self.copies.with(wanted.key(), Arc::clone);
        let (address, copy) = match (self.address(word), kept) {
            (Some(address), _) => (address.cast_const(), None),
            (None, Some(copy)) => (copy.address(), Some(copy)),
            (None, None) => match self.find(wanted) {
                Some(address) => (address, None),
                None => {
                    let copy = self.node.copy_of(wanted)?;
                    (copy.address(), Some(copy))
                }
            },
        };
        Ok((T::at(address.cast_mut(), extent), copy))
    }

    /// Prepares a mutable borrow: brings the object here, if it is elsewhere or may not stay where it
    /// is. Returns it and the word of its new version. The owner must have that before the object is
    /// written to, so nothing is left to do when the borrow ends.
    #[inline]
    pub(crate) fn writing<T: Object + ?Sized>(
        &self,
        word: OwnerWord,
        extent: T::Extent,
        rights: BlockRights,
    ) -> Result<(OwnerWord, *mut T), ShareError> {
        if T::IS_GROUP
            && let Some(group) = T::group()
        {
            let (word, address) = self.node.write_group(word, &group, rights)?;
            return Ok((word, T::at(address, extent)));
        }
        if rights.may_write()
            && let (Some(address), Some(next)) = (self.writing_address(word), word.next_version())
        {
            return Ok((next, T::at(address, extent)));
        }
        let (word, address) = self.writing_slowly(word, T::bytes(extent), rights)?;
        Ok((word, T::at(address, extent)))
    }

    /// Returns the address of the object if it is at this node, and no backup has to know that it changes.
    #[inline]
    pub(crate) fn writing_address(&self, word: OwnerWord) -> Option<*mut u8> {
        let is_here = word.bits() & OwnerWord::PARTITION_MASK == self.write_tag;
        is_here.then(|| self.base.wrapping_add(word.offset() as usize))
    }

    /// Prepares a mutable borrow of an object that moves here, or is in this node's backup.
    #[cold]
    fn writing_slowly(
        &self,
        word: OwnerWord,
        bytes: usize,
        rights: BlockRights,
    ) -> Result<(OwnerWord, *mut u8), ShareError> {
        let in_place = if rights.may_write() { self.node.write_in_place(word) } else { None };
        in_place.map_or_else(|| self.node.bring(word, bytes, bytes, rights), Ok)
    }

    /// Records what has become of a mutable loan in this task.
    pub(crate) fn record_loan(&self, number: u64, used: UsedLoan) {
        self.loans.borrow_mut().insert(number, Some(used));
    }

    /// Records that the object of a mutable loan is lost.
    pub(crate) fn lose_loan(&self, number: u64) {
        self.loans.borrow_mut().insert(number, None);
    }

    /// Returns what has become of a loan, and forgets it.
    pub(crate) fn take_loan(&self, number: u64) -> Option<UsedLoan> {
        self.loans.borrow_mut().remove(&number).flatten()
    }

    /// Returns what has become of all loans that the task has used.
    pub(crate) fn take_loans(&self) -> HashMap<u64, Option<UsedLoan>> {
        self.loans.take()
    }

    /// Takes a lock of this node that is thin, and free for this mode. Returns the address of its value.
    #[inline]
    pub(crate) fn take_thin(&self, word: OwnerWord, mode: LockMode) -> Option<*mut u8> {
        // A backup has to know the holders.
        let address = self.writing_address(word)?;
        // SAFETY: the word of a lock that was made here names a block of the arena, which is there as long as the node.
        thin::take(unsafe { lock_word(address) }, word.colour(), mode).then_some(address)
    }

    /// Gives a lock of this node back that was taken while it was thin. Returns `false` if its holders are in the
    /// table since.
    #[inline]
    pub(crate) fn release_thin(&self, word: OwnerWord, mode: LockMode) -> bool {
        let Some(address) = self.writing_address(word) else { return false };
        // SAFETY: as for `take_thin`.
        thin::release(unsafe { lock_word(address) }, mode)
    }

    /// Records that the task holds a lock. Returns its number in the task.
    #[inline]
    pub(crate) fn record_lock(&self, held: HeldLock) -> u64 {
        let mut locks = self.locks.borrow_mut();
        locks.last += 1;
        let number = locks.last;
        locks.held.push((number, held));
        number
    }

    /// Records that the task does not hold a lock any more.
    #[inline]
    pub(crate) fn forget_lock(&self, number: u64) {
        let held = &mut self.locks.borrow_mut().held;
        match held.last() {
            Some((last, _)) if *last == number => held.truncate(held.len() - 1),
            _ => held.retain(|(other, _)| *other != number),
        }
    }

    /// Records that the task lends something: it may lie under the locks that the task holds now.
    pub(crate) fn note_loan(&self) {
        if let Some((last, _)) = self.locks.borrow().held.last() {
            self.lent_with.set(self.lent_with.get().max(*last));
        }
    }

    /// Returns whether the task may have been lent something of what a lock owns.
    pub(crate) fn may_borrow_under(&self, lock: OwnerWord) -> bool {
        self.roots.contains(&BorrowRoot::of_lock(lock))
    }

    /// Returns the root of what a task is lent that this one starts in a scope, and all roots that this may have: of
    /// locks, those that this task held when it lent something last, and has still. Nothing can have been lent of what
    /// a lock owns that was taken since, so nobody who waits for its borrowers waits for the task.
    pub(crate) fn lend(&self) -> (BorrowRoot, Arc<[BorrowRoot]>) {
        let root = self.node.next_root();
        let locks = self.locks.borrow();
        let read = locks.held.iter().filter(|(number, held)| held.may_lend && *number <= self.lent_with.get());
        let read = read.map(|(_, held)| BorrowRoot::of_lock(held.word));
        let all: BTreeSet<BorrowRoot> = self.roots.iter().copied().chain(read).chain([root]).collect();
        (root, all.into_iter().collect())
    }

    /// Gives back the locks whose guards were forgotten.
    pub(crate) fn leave_locks(&self) {
        for (_, held) in core::mem::take(&mut self.locks.borrow_mut().held) {
            let forgotten = if held.is_here { LockEnd::Panicked(None) } else { LockEnd::Abandoned };
            self.node.unlock(held.word, held.number, forgotten, (held.locked)(self.node));
        }
    }

    /// Returns the number of this node.
    pub fn id(&self) -> NodeId {
        self.node.id
    }

    /// Returns the numbers of all nodes that the program was started with, in order. Some may be
    /// gone.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = NodeId> + DoubleEndedIterator + Clone + use<> {
        (0..self.node.peers.count()).map(NodeId)
    }

    /// Returns the counts of this node.
    pub fn stats(&self) -> NodeStats {
        self.node.stats()
    }

    /// Begins this scope anew: nothing that was borrowed in it is borrowed any more. A task renews a
    /// scope of its own ([`Here::enter`]).
    pub fn renew(&mut self) {
        self.copies.clear();
    }

    /// Stores a value at this node. Fails if the node's near memory is full of objects, or if the
    /// value is too large.
    pub fn alloc<T: FarGroup>(&self, value: T) -> Result<DBox<T>, ShareError> {
        DBox::new(self, value)
    }

    /// Starts a task where there is room for it and returns at once: at this node, at another one, or
    /// later at the first that has room. `body` runs there with the arguments, which it owns; it captures
    /// nothing. A task that has begun stays where it is, and one whose arguments are too large for a
    /// message stays at this node.
    ///
    /// Fails if the node to which the task was sent is silent, or gone since, as [`Here::spawn_to`] does.
    pub fn spawn<F, A, R>(&self, arguments: A, body: F) -> Result<TaskHandle<R>, ShareError>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy + 'static,
        A: Far,
        R: Far,
    {
        match self.node.spawn_anywhere(arguments, body, None) {
            Ok(waiting) => Ok(TaskHandle { waiting, result: PhantomData }),
            Err(not_started) => Err(not_started.error),
        }
    }

    /// Stores a value at this node that is tied to its owner: it comes with the object into which its
    /// owner is put. Fails as [`Here::alloc`] does.
    pub fn tie<T: FarGroup>(&self, value: T) -> Result<TBox<T>, ShareError> {
        TBox::new(self, value)
    }

    /// Starts a task at a node and returns at once. `body` runs there with the arguments, which it
    /// owns; it captures nothing.
    ///
    /// Waits until the node has the task. Fails if the node is gone, or if the arguments take more
    /// than some 64 KB. The task may run all the same if the node is `Silent`, or gone since: then its
    /// arguments are nobody's.
    pub fn spawn_to<F, A, R>(&self, node: NodeId, arguments: A, body: F) -> Result<TaskHandle<R>, ShareError>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy + 'static,
        A: Far,
        R: Far,
    {
        match self.node.spawn(node, arguments, body, None) {
            Ok(waiting) => Ok(TaskHandle { waiting, result: PhantomData }),
            Err(not_started) => Err(not_started.error),
        }
    }
}
