//! Locks: the value stays at its home, and travels to who holds the lock and back.
#![allow(unsafe_code, reason = "values under locks are bytes in blocks")]

use crate::message::{LockEnd, LockedType, ShareMessage, WaitAnswer};
use crate::node::{self, HeldLock, LockWish, ShareNode, THIN_NUMBER, WaitCause, WaitLimit, caught};
use crate::object::owned_by;
use crate::task::code::{ShippedCode, initialise};
use crate::{Far, FarGroup, Here, JoinError, NodeId, OwnedObject, Portable, ShareError};
use core::marker::PhantomData;
use core::mem::{ManuallyDrop, needs_drop, size_of};
use core::ops::{Deref, DerefMut};
use core::time::Duration;
use farfield_core::dsm::OwnerWord;
use farfield_core::lock::LockMode;

/// Value under a reader-writer lock, at its home.
#[repr(transparent)]
struct LockedValue<T: Far> {
    word: OwnerWord,
    value: PhantomData<T>,
}

/// A holding of a lock. It does not end by itself.
struct LockHold<T: Far> {
    word: OwnerWord,
    /// Number of the holding at its home.
    number: u64,
    /// Number of the lock among those that the task has taken.
    in_task: u64,
    mode: LockMode,
    value: *mut T,
    /// The value, if its home is another node.
    brought: Option<Vec<u128>>,
    was_left: bool,
}

impl<T: Far> LockedValue<T> {
    fn new(here: &Here<'_>, value: T) -> Result<LockedValue<T>, ShareError> {
        // A box owns the block in the same way, and drops the value on an error.
        let word = here.alloc(value)?.into_word();
        here.node().begin_lock(word, size_of::<T>(), ShippedCode::of_destructor::<T>(1));
        Ok(LockedValue { word, value: PhantomData })
    }

    fn home(&self) -> NodeId {
        NodeId::of(self.word)
    }

    /// Returns what the home has to know of the value.
    fn locked_type(node: &ShareNode) -> LockedType {
        let destructor = if node.keeps_backups() { ShippedCode::of_destructor::<T>(1) } else { None };
        LockedType {
            bytes: size_of::<T>() as u64,
            owns_others: needs_drop::<T>(),
            destructor: destructor.map(ShippedCode::reference),
        }
    }

    /// Takes the lock. Returns `None` if the time is over.
    #[inline]
    fn hold(&self, here: &Here<'_>, mode: LockMode, limit: WaitLimit) -> Result<Option<LockHold<T>>, ShareError> {
        match self.hold_thin(here, mode) {
            Some(hold) => Ok(Some(hold)),
            None => self.hold_by_table(here, mode, limit),
        }
    }

    /// Takes the lock, however long that takes.
    #[inline]
    fn hold_at_last(&self, here: &Here<'_>, mode: LockMode) -> Result<LockHold<T>, ShareError> {
        match self.hold_thin(here, mode) {
            Some(hold) => Ok(hold),
            None => self.hold_by_table(here, mode, WaitLimit::Unlimited)?.ok_or(ShareError::Lost),
        }
    }

    /// Takes the lock if it is thin, and free for this mode.
    #[inline]
    fn hold_thin(&self, here: &Here<'_>, mode: LockMode) -> Option<LockHold<T>> {
        let value = here.take_thin(self.word, mode)?;
        Some(self.held(here, (THIN_NUMBER, mode), value, None, false))
    }

    /// Records a holding of the lock in the task.
    #[inline]
    fn held(
        &self,
        here: &Here<'_>,
        (number, mode): (u64, LockMode),
        value: *mut u8,
        brought: Option<Vec<u128>>,
        was_left: bool,
    ) -> LockHold<T> {
        let word = self.word;
        let may_lend = mode == LockMode::Shared && needs_drop::<T>();
        let (is_here, locked) = (brought.is_none(), LockedValue::<T>::locked_type);
        let in_task = here.record_lock(HeldLock { word, number, is_here, may_lend, locked });
        LockHold { word, number, in_task, mode, value: value.cast(), brought, was_left }
    }

    /// Takes a lock that is not thin, or that others have.
    #[inline(never)]
    fn hold_by_table(
        &self,
        here: &Here<'_>,
        mode: LockMode,
        limit: WaitLimit,
    ) -> Result<Option<LockHold<T>>, ShareError> {
        let (word, locked) = (self.word, LockedValue::<T>::locked_type(here.node()));
        let (may_wait, may_borrow) = (limit.may_wait(), here.may_borrow_under(word));
        let wish = LockWish { mode, may_wait, may_borrow, is_new: false };
        let (number, answer) = match here.node().ask_lock_here(word, wish, locked) {
            Some(answered) => answered,
            None => LockedValue::<T>::ask_home(here, word, wish, limit, locked)?,
        };
        let (was_left, bytes) = match answer {
            WaitAnswer::Granted { was_left, value } => (was_left, value),
            WaitAnswer::Busy => return Ok(None),
            WaitAnswer::Lost => return Err(ShareError::Lost),
            WaitAnswer::TooMany => return Err(ShareError::too_many_requests(self.home())),
            WaitAnswer::Borrowed(node) => return Err(ShareError::Borrowed { node: NodeId(node) }),
            // It was not in the backup.
            _ if here.node().is_promoted(word) => return Err(ShareError::NodeLost { node: NodeId::of_home(word) }),
            _ => return Err(ShareError::Stale { node: self.home() }),
        };
        let mut brought = None;
        // A lock of a node that is gone is in nobody's arena.
        let is_here = here.node().home_of(word) == here.id();
        let value = if is_here {
            here.node().address_of(word)
        } else {
            if bytes.len() != size_of::<T>() {
                return Err(ShareError::Stale { node: self.home() });
            }
            let buffer = brought.insert(vec![0u128; size_of::<T>().div_ceil(size_of::<u128>())]);
            let address = buffer.as_mut_ptr().cast::<u8>();
            // SAFETY: room for so many bytes.
            unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len()) };
            address
        };
        Ok(Some(self.held(here, (number, mode), value, brought, was_left)))
    }

    /// Asks the lock's home, wherever it is, and waits as long as the limit says. Returns the number of the wait,
    /// and the answer.
    fn ask_home(
        here: &Here<'_>,
        word: OwnerWord,
        wish: LockWish,
        limit: WaitLimit,
        locked: LockedType,
    ) -> Result<(u64, WaitAnswer), ShareError> {
        let LockWish { mode, may_wait, may_borrow, .. } = wish;
        let request = |ticket| ShareMessage::Lock { word: word.bits(), ticket, mode, may_wait, may_borrow, locked };
        here.node().wait_at_home(word, WaitCause::Lock, limit, request).map_err(|unanswered| unanswered.error)
    }

    fn into_inner(self, here: &Here<'_>) -> Result<T, ShareError> {
        // Who held the lock last may be about to bring the value back.
        let hold = self.hold_at_last(here, LockMode::Exclusive)?;
        // SAFETY: the value is held, and nobody uses it afterwards: its owner is gone, and it is not dropped.
        let value = unsafe { hold.value.read() };
        let word = ManuallyDrop::new(self).word;
        // The value has an owner from now on, who may write to what it owns.
        here.node().forget_stored(word);
        node::with_current(|node| node.free_later(word, None));
        hold.end(here, true);
        Ok(value)
    }
}

impl<T: Far> LockHold<T> {
    /// Gives the lock back, with the value if that was written to.
    #[inline]
    fn end(mut self, here: &Here<'_>, is_reader: bool) {
        here.forget_lock(self.in_task);
        let is_panicking = self.mode == LockMode::Exclusive && std::thread::panicking();
        if self.number == THIN_NUMBER && !is_panicking && here.release_thin(self.word, self.mode) {
            return;
        }
        self.end_in_table(here, is_reader);
    }

    /// Gives back a lock that is not thin, or that its writer leaves.
    #[inline(never)]
    fn end_in_table(&mut self, here: &Here<'_>, is_reader: bool) {
        if self.brought.is_some() && !is_reader {
            // SAFETY: the value, which nobody writes to any more.
            here.node().stage(|| owned_by(unsafe { &*self.value }));
        }
        let value = self.brought.take().filter(|_| !is_reader).map(|buffer| {
            let mut bytes = vec![0; size_of::<T>()];
            // SAFETY: the buffer holds so many bytes.
            unsafe { core::ptr::copy_nonoverlapping(buffer.as_ptr().cast::<u8>(), bytes.as_mut_ptr(), bytes.len()) };
            initialise(&mut bytes);
            bytes
        });
        let end = if std::thread::panicking() { LockEnd::Panicked(value) } else { LockEnd::Released(value) };
        here.node().unlock(self.word, self.number, end, LockedValue::<T>::locked_type(here.node()));
    }
}

impl<T: Far> Drop for LockedValue<T> {
    fn drop(&mut self) {
        node::with_current(|node| node.free_later(self.word, ShippedCode::of_destructor::<T>(1)));
    }
}

/// Value that tasks at any node may lock, as `Mutex` is for the threads of one process.
///
/// It is a word of 8 bytes. Tasks share it in a [`DArc`](crate::DArc), or borrow it from an object. The
/// value stays at the node that has made it, or at the first one if that dies and has a backup; it
/// travels to who takes the lock, and back when the guard is dropped. Whoever comes first is served first,
/// of whatever node.
pub struct DMutex<T: Far>(LockedValue<T>);

// SAFETY: a word, which holds no address; the value is owned by it.
unsafe impl<T: Far> Portable for DMutex<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for DMutex<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::locked(self.0.word));
    }
}
// SAFETY: the word never changes.
unsafe impl<T: Far> Far for DMutex<T> {}

impl<T: Far> core::fmt::Debug for DMutex<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DMutex(at node {})", self.home())
    }
}

impl<T: Far> DMutex<T> {
    /// Stores a value at this node, under a lock. Errors are those of [`Here::alloc`].
    pub fn new(here: &Here<'_>, value: T) -> Result<DMutex<T>, ShareError> {
        LockedValue::new(here, value).map(DMutex)
    }

    /// Returns the node that keeps the value.
    pub fn home(&self) -> NodeId {
        self.0.home()
    }

    /// Takes the lock. Waits until all who came before have given it back, and lends the place of the
    /// task meanwhile.
    ///
    /// Fails with `Borrowed` if a reader's node has died and may have lent this task what the value owns, with `Lost`
    /// if a writer's node has died and the value may own objects, and with
    /// `NodeLost` as soon as the value's node is known to be gone and had no backup.
    #[inline]
    pub fn lock<'a>(&'a self, here: &'a Here<'_>) -> Result<DMutexGuard<'a, T>, ShareError> {
        let hold = self.0.hold_at_last(here, LockMode::Exclusive)?;
        Ok(DMutexGuard::new(hold, here))
    }

    /// Takes the lock if nobody has it and nobody waits for it. Waits for the value's node to say so.
    pub fn try_lock<'a>(&'a self, here: &'a Here<'_>) -> Result<Option<DMutexGuard<'a, T>>, ShareError> {
        let hold = self.0.hold(here, LockMode::Exclusive, WaitLimit::None)?;
        Ok(hold.map(|hold| DMutexGuard::new(hold, here)))
    }

    /// Takes the lock as [`DMutex::lock`] does, and gives up after this time.
    pub fn lock_within<'a>(
        &'a self,
        here: &'a Here<'_>,
        within: Duration,
    ) -> Result<Option<DMutexGuard<'a, T>>, ShareError> {
        let hold = self.0.hold(here, LockMode::Exclusive, WaitLimit::Within(within))?;
        Ok(hold.map(|hold| DMutexGuard::new(hold, here)))
    }

    /// Runs a body at the value's node, which holds the lock there: a delegated operation. The value
    /// does not travel, and the body goes on if the caller's node dies.
    ///
    /// `body` captures nothing. Errors are those of a task that was started there.
    pub fn with<A, R, F>(&self, here: &Here<'_>, arguments: A, body: F) -> Result<R, JoinError>
    where
        F: for<'v> FnOnce(&'v mut T, A) -> R + Copy + 'static,
        A: Far,
        R: Far,
    {
        let lock = DMutexRef(self.0.word, PhantomData::<T>);
        let task = here.spawn_to(self.home(), (lock, arguments), move |here, (lock, arguments)| {
            let mutex = ManuallyDrop::new(DMutex(LockedValue { word: lock.0, value: PhantomData::<T> }));
            mutex.lock(here).map(|mut value| body(&mut value, arguments))
        })?;
        Ok(task.join(here)??)
    }

    /// Applies a short body to the value where it is: one message, and no task. If the lock is not free, this is
    /// [`DMutex::with`].
    ///
    /// The body runs in the thread of the value's node that serves the caller, on a stack of 512 KiB. One that works
    /// for long, or waits for other threads, is for `with`: after ten seconds the caller is told that the node is
    /// silent. `body` captures nothing. On an error that leaves open whether it has run, its arguments are nobody's.
    pub fn apply<A, R, F>(&self, here: &Here<'_>, arguments: A, body: F) -> Result<R, JoinError>
    where
        F: for<'v> FnOnce(&'v mut T, A) -> R + Copy + 'static,
        A: Far,
        R: Far,
    {
        if here.node().host_of(self.0.word) == here.id() {
            return caught(|| Ok(body(&mut *self.lock(here)?, arguments)));
        }
        let lock = DMutexRef(self.0.word, PhantomData::<T>);
        let locked = LockedValue::<T>::locked_type(here.node());
        let applied =
            here.node().apply_there(self.0.word, locked, (lock, arguments), move |here, (lock, arguments)| {
                // SAFETY: the node, which has the value in its arena, holds the lock for whoever has sent this body.
                let value = unsafe { &mut *here.node().address_of(lock.0).cast::<T>() };
                body(value, arguments)
            })?;
        match applied {
            Ok(result) => Ok(result),
            Err((_, arguments)) => self.with(here, arguments, body),
        }
    }

    /// Takes the value out of the lock. Waits for who has it.
    pub fn into_inner(self, here: &Here<'_>) -> Result<T, ShareError> {
        self.0.into_inner(here)
    }
}

/// Borrow of a lock that travels to its home.
struct DMutexRef<T>(OwnerWord, PhantomData<T>);

// SAFETY: a word, which owns nothing.
unsafe impl<T: Far> Portable for DMutexRef<T> {}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for DMutexRef<T> {}
// SAFETY: as above.
unsafe impl<T: Far> Far for DMutexRef<T> {}

/// Holds a [`DMutex`], or a [`DRwLock`] for writing. The lock is given back when this is dropped, and
/// nobody waits for that.
///
/// A guard that is forgotten holds the lock until its task ends. The value is then as it was, or is lost if
/// it may own objects and its home is another node.
pub struct DMutexGuard<'a, T: Far> {
    hold: ManuallyDrop<LockHold<T>>,
    here: &'a Here<'a>,
}

impl<'a, T: Far> DMutexGuard<'a, T> {
    fn new(hold: LockHold<T>, here: &'a Here<'_>) -> Self {
        DMutexGuard { hold: ManuallyDrop::new(hold), here }
    }

    /// Returns whether the one who had the lock before panicked, or was gone before it gave the lock
    /// back: the value may be half changed.
    pub fn was_left(&self) -> bool {
        self.hold.was_left
    }
}

impl<T: Far> Deref for DMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value, or the only copy of it, as long as the lock is held.
        unsafe { &*self.hold.value }
    }
}

impl<T: Far> DerefMut for DMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above; nobody else holds the lock.
        unsafe { &mut *self.hold.value }
    }
}

impl<T: Far> Drop for DMutexGuard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once.
        unsafe { ManuallyDrop::take(&mut self.hold) }.end(self.here, false);
    }
}

impl<T: Far + core::fmt::Debug> core::fmt::Debug for DMutexGuard<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        (**self).fmt(f)
    }
}

/// Value that tasks at any node may lock for reading or for writing, as `RwLock` is for the threads of
/// one process. See [`DMutex`].
///
/// Nobody overtakes: a reader who comes after a writer waits for it.
pub struct DRwLock<T: Far>(LockedValue<T>);

// SAFETY: a word, which holds no address; the value is owned by it.
unsafe impl<T: Far> Portable for DRwLock<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for DRwLock<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::locked(self.0.word));
    }
}
// SAFETY: the word never changes.
unsafe impl<T: Far> Far for DRwLock<T> {}

impl<T: Far> core::fmt::Debug for DRwLock<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DRwLock(at node {})", self.home())
    }
}

impl<T: Far> DRwLock<T> {
    /// Stores a value at this node, under a lock. Errors are those of [`Here::alloc`].
    pub fn new(here: &Here<'_>, value: T) -> Result<DRwLock<T>, ShareError> {
        LockedValue::new(here, value).map(DRwLock)
    }

    /// Returns the node that keeps the value.
    pub fn home(&self) -> NodeId {
        self.0.home()
    }

    /// Takes the lock for reading, with others. Waits and fails as [`DMutex::lock`] does.
    #[inline]
    pub fn read<'a>(&'a self, here: &'a Here<'_>) -> Result<DReadGuard<'a, T>, ShareError> {
        let hold = self.0.hold_at_last(here, LockMode::Shared)?;
        Ok(DReadGuard { hold: ManuallyDrop::new(hold), here })
    }

    /// Takes the lock for writing. Waits and fails as [`DMutex::lock`] does.
    #[inline]
    pub fn write<'a>(&'a self, here: &'a Here<'_>) -> Result<DMutexGuard<'a, T>, ShareError> {
        let hold = self.0.hold_at_last(here, LockMode::Exclusive)?;
        Ok(DMutexGuard::new(hold, here))
    }

    /// Takes the value out of the lock. Waits for who has it.
    pub fn into_inner(self, here: &Here<'_>) -> Result<T, ShareError> {
        self.0.into_inner(here)
    }
}

/// Holds a [`DRwLock`] for reading. The lock is given back when this is dropped, and nobody waits for
/// that.
pub struct DReadGuard<'a, T: Far> {
    hold: ManuallyDrop<LockHold<T>>,
    here: &'a Here<'a>,
}

impl<T: Far> DReadGuard<'_, T> {
    /// Returns whether the last writer panicked, or was gone before it gave the lock back.
    pub fn was_left(&self) -> bool {
        self.hold.was_left
    }
}

impl<T: Far> Deref for DReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value, or a copy of it, as long as the lock is held; nobody writes to it.
        unsafe { &*self.hold.value }
    }
}

impl<T: Far> Drop for DReadGuard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: taken once.
        unsafe { ManuallyDrop::take(&mut self.hold) }.end(self.here, true);
    }
}

impl<T: Far + core::fmt::Debug> core::fmt::Debug for DReadGuard<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        (**self).fmt(f)
    }
}
