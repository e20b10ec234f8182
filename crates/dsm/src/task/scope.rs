//! Scoped tasks: they may borrow what the task that starts them owns.
//!
//! A borrow that travels is a *loan*, with a number. The owner's new word comes home with the end of
//! the borrower's task, whatever became of the loan there; only then does the lender free the block
//! from which the object was brought. So if the borrower's node dies, the lender has what it lent.
#![allow(unsafe_code, reason = "words come home to owners that the scope has borrowed")]

use super::Borrows;
use super::join::{TaskEnd, Waiting};
use crate::message::LOANS_MAX;
use crate::node::NotStarted;
use crate::object::sealed::ObjectLayout;
use crate::task::code::ShippedCode;
use crate::{
    DArc, DBox, Far, Here, JoinError, Mut, NodeId, Object, ObjectFetch, OwnedObject, PinnedObject, Portable, ShareError,
};
use core::cell::RefCell;
use core::marker::PhantomData;
use farfield_core::dsm::{BorrowRoot, LoanNumber, LoanPlace, OwnerWord, word_of_lost_loan};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// Mutable loan that a task has used.
#[derive(Clone, Copy)]
pub(crate) struct UsedLoan {
    pub(crate) place: LoanPlace,
    /// The object, if this node knows its type.
    pub(crate) object: Option<OwnedObject>,
}

/// Runs `body`, which may start tasks that borrow what was there before, and waits until all of them
/// have ended.
///
/// Returns the error of the first task that had one and was not joined. What `body` returns is lost
/// then.
pub fn scope<'env, R>(
    here: &'env Here<'_>,
    body: impl for<'s> FnOnce(&'s TaskScope<'s, 'env>) -> R,
) -> Result<R, JoinError> {
    let scope = TaskScope {
        here,
        loans: RefCell::default(),
        tasks: RefCell::default(),
        of_scope: PhantomData,
        of_environment: PhantomData,
    };
    let returned = catch_unwind(AssertUnwindSafe(|| body(&scope)));
    // Tasks may use loans until they have ended, also if `body` has panicked.
    let ended = scope.end();
    match returned {
        Ok(returned) => ended.map(|()| returned),
        Err(panic) => resume_unwind(panic),
    }
}

/// Tasks that may borrow what was there before their scope. Made by [`scope`].
pub struct TaskScope<'s, 'env: 's> {
    here: &'env Here<'env>,
    /// Mutable loans of this scope that have not come back, by number.
    loans: RefCell<HashMap<u64, OpenLoan>>,
    /// Tasks that nobody has joined, and the mutable loans that they were given.
    tasks: RefCell<Vec<OpenTask>>,
    of_scope: PhantomData<&'s mut &'s ()>,
    of_environment: PhantomData<&'env mut &'env ()>,
}

struct OpenTask {
    waiting: Arc<Waiting>,
    /// Numbers of its mutable loans, in order.
    loans: Vec<u64>,
    /// Root of what the task may have borrowed.
    root: BorrowRoot,
}

/// An owner that is lent. The scope has borrowed it mutably.
struct OpenLoan {
    owner: LentOwner,
    /// Its word when it was lent.
    lent: OwnerWord,
    /// Whether its object may own others.
    owns_others: bool,
    /// What frees the members of a group that was moved.
    release: Option<fn() -> ShippedCode>,
}

/// Where the word of an owner is that is lent.
enum LentOwner {
    /// In a `DBox`.
    Word(*mut OwnerWord),
    /// In a loan of this number, which is lent further.
    Loan(u64, *mut UsedLoan),
}

impl core::fmt::Debug for TaskScope<'_, '_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "TaskScope({} tasks)", self.tasks.borrow().len())
    }
}

impl<'s, 'env> TaskScope<'s, 'env> {
    /// Lends an owner for reading, to as many tasks as one likes.
    pub fn lend<O: Owner>(&'s self, owner: &'env O) -> Lent<'s, O::Object> {
        self.here.note_loan();
        let (word, extent) = owner.place();
        Lent { word, extent, object: PhantomData }
    }

    /// Lends an owner for writing, to one task.
    pub fn lend_mut<O: OwnerMut>(&'s self, owner: &'env mut O) -> LentMut<'s, O::Object> {
        self.here.note_loan();
        let (lent, extent) = owner.place();
        let next = self.here.node().next_loan();
        let (owner, number) = match owner.parts() {
            sealed::Parts::Word(word) => (LentOwner::Word(word), next),
            sealed::Parts::Loan(outer, now) => {
                // SAFETY: the loan is borrowed mutably.
                let place = unsafe { (*now).place };
                let number = next.of_further_loan(LoanNumber::from_bits(outer), place, self.here.id().0);
                (LentOwner::Loan(outer, now), number)
            }
        };
        let number = number.bits();
        let (owns_others, group) = (<O::Object as ObjectLayout>::OWNS_OTHERS, <O::Object as ObjectLayout>::group());
        let release = group.map(|group| group.release);
        self.loans.borrow_mut().insert(number, OpenLoan { owner, lent, owns_others, release });
        LentMut { now: UsedLoan { place: LoanPlace::lent(lent), object: None }, extent, number, object: PhantomData }
    }

    /// Starts a task at a node and returns at once, as [`Here::spawn_to`] does. The arguments may be
    /// loans of this scope, which then waits for the task even if it is not certain that it has started.
    pub fn spawn_to<F, A, R>(&'s self, node: NodeId, arguments: A, body: F) -> Result<ScopedHandle<'s, R>, ShareError>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: Portable + 's,
        R: Far,
    {
        self.start(arguments, |arguments, borrows| self.here.node().spawn(node, arguments, body, borrows))
    }

    /// Starts a task where there is room for it, as [`Here::spawn`] does, with loans of this scope.
    pub fn spawn<F, A, R>(&'s self, arguments: A, body: F) -> Result<ScopedHandle<'s, R>, ShareError>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: Portable + 's,
        R: Far,
    {
        self.start(arguments, |arguments, borrows| self.here.node().spawn_anywhere(arguments, body, borrows))
    }

    fn start<A: Portable + 's, R: Far>(
        &'s self,
        arguments: A,
        spawn: impl FnOnce(A, Borrows) -> Result<Arc<Waiting>, NotStarted>,
    ) -> Result<ScopedHandle<'s, R>, ShareError> {
        let mut loans = Vec::new();
        arguments.visit_loans(&mut |number| loans.push(number));
        loans.sort_unstable();
        if loans.len() > LOANS_MAX {
            return Err(ShareError::TooManyLoans { loans: loans.len(), most: LOANS_MAX });
        }
        let (root, roots) = self.here.lend();
        let open = |waiting: &Arc<Waiting>| {
            self.tasks.borrow_mut().push(OpenTask { waiting: waiting.clone(), loans, root });
        };
        match spawn(arguments, Some(roots)) {
            Ok(waiting) => {
                open(&waiting);
                let (here, tasks, loans) = (self.here, &self.tasks, &self.loans);
                Ok(ScopedHandle { waiting, here, tasks, loans, result: PhantomData })
            }
            Err(NotStarted { error, waiting }) => {
                // It may run, and read and write what it was lent: the scope waits for it.
                if let Some(waiting) = waiting {
                    open(&waiting);
                }
                Err(error)
            }
        }
    }

    /// Waits for all tasks, and takes all loans back.
    fn end(&self) -> Result<(), JoinError> {
        let mut ended = Ok(());
        loop {
            let Some(task) = self.tasks.borrow_mut().pop() else { break };
            let end = task.waiting.wait(self.here.node());
            settle(self.here, &self.loans, &task, &end);
            if let Err(error) = end.result {
                ended = ended.and(Err(error));
            }
        }
        // What this task itself has done with its loans.
        let left: Vec<u64> = self.loans.borrow().keys().copied().collect();
        for number in left {
            if let Some(used) = self.here.take_loan(number) {
                take_back(self.here, &self.loans, number, used);
            }
        }
        ended
    }
}

/// Takes back the loans of a task that has ended.
fn settle(here: &Here<'_>, open: &RefCell<HashMap<u64, OpenLoan>>, task: &OpenTask, end: &TaskEnd) {
    match &end.result {
        Err(JoinError::Share(ShareError::NodeLost { node })) => {
            here.node().outlast_borrowers(*node, task.root);
            task.loans.iter().for_each(|number| lose(here, open, *number, true));
        }
        _ => {
            // Another node cannot make this one keep what it was not lent.
            for (number, used) in end.loans.iter().filter(|(number, _)| task.loans.binary_search(number).is_ok()) {
                match used {
                    Some(used) => take_back(here, open, *number, *used),
                    None => lose(here, open, *number, false),
                }
            }
        }
    }
}

/// Gives an owner its object's new word, and frees the block in which it was lent if it is elsewhere.
fn take_back(here: &Here<'_>, open: &RefCell<HashMap<u64, OpenLoan>>, number: u64, used: UsedLoan) {
    let Some(loan) = open.borrow_mut().remove(&number) else {
        // A loan that this task was given, and has passed on.
        here.record_loan(number, used);
        return;
    };
    let left = match loan.owner {
        LentOwner::Word(owner) => {
            // SAFETY: the scope has borrowed the owner mutably, and is not over.
            unsafe { *owner = used.place.word };
            used.place.end()
        }
        LentOwner::Loan(outer, now) => {
            // SAFETY: as above.
            let now = unsafe { &mut *now };
            now.object = used.object;
            let left = now.place.take_back(used.place);
            here.record_loan(outer, *now);
            left
        }
    };
    if let Some(left) = left {
        here.node().free(left, loan.release.map(|release| release()));
    }
}

/// Gives an owner the word that it has if its loan does not come back.
fn lose(here: &Here<'_>, open: &RefCell<HashMap<u64, OpenLoan>>, number: u64, is_dead: bool) {
    let Some(loan) = open.borrow_mut().remove(&number) else {
        here.lose_loan(number);
        return;
    };
    let word = word_of_lost_loan(loan.lent, is_dead, loan.owns_others);
    match loan.owner {
        // SAFETY: the scope has borrowed the owner mutably, and is not over.
        LentOwner::Word(owner) => unsafe { *owner = word },
        LentOwner::Loan(outer, now) => {
            // SAFETY: as above.
            unsafe { (*now).place.word = word };
            if word.is_lost() {
                here.lose_loan(outer);
            }
        }
    }
}

/// A task of a scope. Without [`ScopedHandle::join`] the scope waits for it.
pub struct ScopedHandle<'s, R: Far> {
    waiting: Arc<Waiting>,
    here: &'s Here<'s>,
    tasks: &'s RefCell<Vec<OpenTask>>,
    loans: &'s RefCell<HashMap<u64, OpenLoan>>,
    result: PhantomData<R>,
}

impl<R: Far> core::fmt::Debug for ScopedHandle<'_, R> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ScopedHandle(at node {})", self.waiting.node())
    }
}

impl<R: Far> ScopedHandle<'_, R> {
    /// Waits until the task has ended and returns its result, as
    /// [`TaskHandle::join`](crate::TaskHandle::join) does. Its loans are over then.
    pub fn join(self) -> Result<R, JoinError> {
        let position = self.tasks.borrow().iter().position(|task| Arc::ptr_eq(&task.waiting, &self.waiting));
        let task = position.map(|position| self.tasks.borrow_mut().swap_remove(position));
        let end = self.waiting.wait(self.here.node());
        if let Some(task) = task {
            settle(self.here, self.loans, &task, &end);
        }
        // SAFETY: the handle was made with the code of a task that returns this type.
        end.result.map(|value| unsafe { value.into_result() })
    }
}

#[allow(unnameable_types, private_interfaces, reason = "nobody else implements or uses what is sealed")]
pub(crate) mod sealed {
    use crate::Object;
    use farfield_core::dsm::OwnerWord;

    /// Owner of an object of this type, whose word can be read.
    pub trait OwnerPlace<T: Object + ?Sized> {
        fn place(&self) -> (OwnerWord, T::Extent);
    }

    /// Owner whose word can be changed.
    pub trait WordMut {
        fn parts(&mut self) -> Parts;
    }

    /// Where the word of an owner is; of a loan, with its number.
    pub enum Parts {
        Word(*mut OwnerWord),
        Loan(u64, *mut super::UsedLoan),
    }
}

/// What can be lent for reading: a [`DBox`], a [`DArc`], or a loan.
pub trait Owner: sealed::OwnerPlace<Self::Object> + Sized {
    /// Type of the object.
    type Object: Object + ?Sized;

    /// Borrows the object as `get` does, for as long as the owner is borrowed. The borrow outlives the
    /// scope, and other threads may have it.
    fn pin(&self, here: &Here<'_>) -> Result<PinnedObject<'_, Self::Object>, ShareError> {
        PinnedObject::new(self, here)
    }

    /// Borrows the object as `get` does, once it is there: `await` does not block the thread.
    fn fetch<'a>(&'a self, here: &'a Here<'_>) -> ObjectFetch<'a, Self::Object> {
        ObjectFetch::new(self, here)
    }

    /// Starts to fetch the object, which is read soon, and does not wait for it. Whoever reads it waits for
    /// the same copy, and is told if it does not come.
    fn prefetch(&self, here: &Here<'_>) {
        let (word, extent) = self.place();
        here.prefetch::<Self::Object>(word, extent);
    }
}

/// What can be lent for writing: a [`DBox`], or a mutable loan.
pub trait OwnerMut: Owner + sealed::WordMut {}

/// An object that is lent for reading.
pub struct Lent<'s, T: Object + ?Sized> {
    word: OwnerWord,
    extent: T::Extent,
    object: PhantomData<&'s T>,
}

impl<T: Object + ?Sized> Clone for Lent<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Object + ?Sized> Copy for Lent<'_, T> {}

// SAFETY: a word and a length; the object is not written to as long as the loan lasts.
unsafe impl<T: Object + ?Sized> Portable for Lent<'_, T> {}

impl<T: Object + ?Sized> core::fmt::Debug for Lent<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Lent(at node {})", NodeId::of(self.word))
    }
}

impl<T: Object + ?Sized> Lent<'_, T> {
    /// Borrows the object, as [`DBox::get`] does.
    pub fn get<'a>(&'a self, here: &'a Here<'_>) -> Result<&'a T, ShareError> {
        let object = here.reading::<T>(self.word, self.extent)?;
        // SAFETY: as for `DBox::get`; the owner is borrowed as long as the loan lasts.
        Ok(unsafe { &*object })
    }
}

/// An object that is lent for writing.
pub struct LentMut<'s, T: Object + ?Sized> {
    now: UsedLoan,
    extent: T::Extent,
    /// Bits of the loan's [`LoanNumber`].
    number: u64,
    /// Not for other threads: what becomes of the loan belongs to the task.
    object: PhantomData<(&'s mut T, *mut ())>,
}

// SAFETY: words, a length and a number, which `visit_loans` names.
unsafe impl<T: Object + ?Sized> Portable for LentMut<'_, T> {
    fn visit_loans(&self, visit: &mut dyn FnMut(u64)) {
        visit(self.number);
    }

    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::of::<T>(self.now.place.word, self.extent));
    }
}

impl<T: Object + ?Sized> core::fmt::Debug for LentMut<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "LentMut(at node {})", NodeId::of(self.now.place.word))
    }
}

impl<T: Object + ?Sized> LentMut<'_, T> {
    /// Borrows the object, as [`DBox::get`] does.
    pub fn get<'a>(&'a self, here: &'a Here<'_>) -> Result<&'a T, ShareError> {
        let object = here.reading::<T>(self.now.place.word, self.extent)?;
        // SAFETY: as for `DBox::get`.
        Ok(unsafe { &*object })
    }

    /// Borrows the object mutably, as [`DBox::get_mut`] does. The owner learns of it when the task has
    /// ended, even if the loan is forgotten.
    pub fn get_mut<'a>(&'a mut self, here: &'a Here<'_>) -> Result<Mut<'a, T>, ShareError> {
        let rights = self.now.place.rights(LoanNumber::from_bits(self.number), here.id().0);
        let (word, object) = here.writing::<T>(self.now.place.word, self.extent, rights)?;
        self.now.place.change(word);
        self.now.object = Some(OwnedObject::of::<T>(word, self.extent));
        here.record_loan(self.number, self.now);
        // SAFETY: as for `DBox::get_mut`; the loan is the only one.
        Ok(unsafe { Mut::new(object) })
    }
}

impl<T: Object + ?Sized> sealed::OwnerPlace<T> for DBox<T> {
    fn place(&self) -> (OwnerWord, T::Extent) {
        (self.word, self.extent)
    }
}

impl<T: Object + ?Sized> Owner for DBox<T> {
    type Object = T;
}

impl<T: Far> sealed::OwnerPlace<T> for DArc<T> {
    fn place(&self) -> (OwnerWord, ()) {
        (self.owner_word(), ())
    }
}

impl<T: Far> Owner for DArc<T> {
    type Object = T;
}

impl<T: Object + ?Sized> sealed::WordMut for DBox<T> {
    fn parts(&mut self) -> sealed::Parts {
        sealed::Parts::Word(&raw mut self.word)
    }
}

impl<T: Object + ?Sized> OwnerMut for DBox<T> {}

impl<T: Object + ?Sized> sealed::OwnerPlace<T> for Lent<'_, T> {
    fn place(&self) -> (OwnerWord, T::Extent) {
        (self.word, self.extent)
    }
}

impl<T: Object + ?Sized> Owner for Lent<'_, T> {
    type Object = T;
}

impl<T: Object + ?Sized> sealed::OwnerPlace<T> for LentMut<'_, T> {
    fn place(&self) -> (OwnerWord, T::Extent) {
        (self.now.place.word, self.extent)
    }
}

impl<T: Object + ?Sized> Owner for LentMut<'_, T> {
    type Object = T;
}

impl<T: Object + ?Sized> sealed::WordMut for LentMut<'_, T> {
    fn parts(&mut self) -> sealed::Parts {
        sealed::Parts::Loan(self.number, &raw mut self.now)
    }
}

impl<T: Object + ?Sized> OwnerMut for LentMut<'_, T> {}
