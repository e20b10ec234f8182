//! Tasks at a node: how they start, how they run, and how their end comes home.
#![allow(unsafe_code, reason = "arguments and results travel as bytes")]

use super::locks::{LockWish, THIN_NUMBER};
use super::peers::Unanswered;
use super::{Here, NodeId, ShareNode, WaitCause, within};
use crate::message::{
    CodeRef, LOAN_BYTES, LockEnd, LockedType, ShareMessage, ShareReply, TaskOutcome, VALUE_BYTES_MAX, WaitAnswer,
};
use crate::stats::count;
use crate::task::code::{ShippedCode, Value, bytes_of};
use crate::task::{Borrows, QueuedTask, TaskEnd, TaskRefusal, UsedLoan, Waiting};
use crate::{Far, JoinError, Portable, ShareError};
use farfield_core::dsm::{HomeTicket, LoanPlace, NodeLoad, OwnerWord};
use farfield_core::lock::LockMode;
use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Greatest size of the root of a borrow in a message, in bytes.
const ROOT_BYTES_MAX: usize = 10;

/// Error: a task could not be sent for certain.
struct Unsent {
    not_started: NotStarted,
    /// Bytes of the arguments, if nobody else has them.
    arguments: Option<Vec<u8>>,
}

/// Error: a task could not be started for certain.
pub(crate) struct NotStarted {
    pub(crate) error: ShareError,
    /// Where the end of the task arrives, if it runs all the same: its node may have its arguments.
    pub(crate) waiting: Option<Arc<Waiting>>,
}

impl ShareNode {
    /// Starts a task, here or elsewhere. Waits until its node has it. The arguments are dropped if the
    /// task certainly does not start.
    pub(crate) fn spawn<F, A, R>(
        self: &Arc<ShareNode>,
        to: NodeId,
        arguments: A,
        body: F,
        borrows: Borrows,
    ) -> Result<Arc<Waiting>, NotStarted>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: Portable,
        R: Far,
    {
        let (body, arguments) = (ShippedCode::of_body(body), bytes_of(arguments));
        if to == self.id {
            return Ok(self.queue_task(body, arguments, false, borrows));
        }
        self.send_task(to, body, arguments, false, borrows).map_err(|Unsent { not_started, arguments }| {
            if let Some(arguments) = arguments {
                // SAFETY: the bytes of the arguments, which nobody else has.
                drop(unsafe { arguments.as_ptr().cast::<A>().read_unaligned() });
            }
            not_started
        })
    }

    /// Starts a task where it begins soonest, as far as is known here.
    pub(crate) fn spawn_anywhere<F, A, R>(
        self: &Arc<ShareNode>,
        arguments: A,
        body: F,
        borrows: Borrows,
    ) -> Result<Arc<Waiting>, NotStarted>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: Portable,
        R: Far,
    {
        let (body, arguments) = (ShippedCode::of_body(body), bytes_of(arguments));
        if arguments.len() + borrows_bytes(&borrows) > VALUE_BYTES_MAX {
            return Ok(self.queue_task(body, arguments, false, borrows));
        }
        let others = self.peers.loads().filter(|(node, ..)| *node != self.id).map(|(node, heard, _)| (node.0, heard));
        let Some(to) = NodeLoad::place(self.workers.load(), others).map(NodeId) else {
            return Ok(self.queue_task(body, arguments, true, borrows));
        };
        self.peers.note_given(to);
        match self.send_task(to, body, arguments, true, borrows.clone()) {
            Ok(waiting) => Ok(waiting),
            Err(Unsent { arguments: Some(arguments), .. }) => Ok(self.queue_task(body, arguments, true, borrows)),
            Err(unsent) => Err(unsent.not_started),
        }
    }

    /// Queues a task at this node.
    fn queue_task(
        self: &Arc<ShareNode>,
        body: ShippedCode,
        arguments: Vec<u8>,
        may_move: bool,
        borrows: Borrows,
    ) -> Arc<Waiting> {
        let (number, waiting) = self.joins.expect(self.id, WaitCause::Task, body);
        self.workers.submit(
            self,
            QueuedTask { origin: self.id, number, body, arguments, may_move, borrows, bytes_of_other: None },
        );
        if may_move {
            self.seek_room();
        }
        waiting
    }

    /// Sends a task to another node, if that has room or always.
    fn send_task(
        &self,
        to: NodeId,
        body: ShippedCode,
        arguments: Vec<u8>,
        if_room: bool,
        borrows: Borrows,
    ) -> Result<Arc<Waiting>, Unsent> {
        let (number, waiting) = self.joins.expect(to, WaitCause::Task, body);
        count(&self.counters.spawns, 1);
        // SAFETY: the bytes of the arguments, which nobody else has.
        self.stage(|| unsafe { body.owned_by(&arguments, true) });
        let (body, borrows) = (body.reference(), self.lend(&borrows));
        match self.ask_to_run(to, ShareMessage::Spawn { task: number, body, if_room, borrows, arguments: &arguments }) {
            Ok(()) => Ok(waiting),
            Err(Unanswered { error, may_have_arrived: true }) => {
                if matches!(error, ShareError::NodeLost { .. }) {
                    self.joins.lose(to);
                }
                Err(Unsent { not_started: NotStarted { error, waiting: Some(waiting) }, arguments: None })
            }
            Err(Unanswered { error, .. }) => {
                self.joins.take(number);
                Err(Unsent { not_started: NotStarted { error, waiting: None }, arguments: Some(arguments) })
            }
        }
    }

    /// Asks a node to take a task. It is not taken if the node has no room (`Refused`).
    fn ask_to_run(&self, to: NodeId, task: ShareMessage<'_>) -> Result<(), Unanswered> {
        let taken = self.peers.ask(self, to, task, |reply| match reply {
            ShareReply::Done => Some(Ok(())),
            ShareReply::NoPlace => Some(Err(ShareError::Refused { node: to })),
            ShareReply::TooMuch(TaskRefusal::Tasks { tasks, most }) => {
                Some(Err(ShareError::TooManyTasks { node: to, tasks, most }))
            }
            ShareReply::TooMuch(TaskRefusal::Bytes { bytes, limit_bytes }) => {
                Some(Err(ShareError::TooManyArguments { node: to, bytes, limit_bytes }))
            }
            _ => None,
        })?;
        Ok(taken?)
    }

    /// Gives a node a task that waits here, if there is one.
    pub(super) fn give_task(self: &Arc<ShareNode>, to: NodeId) {
        let Some(task) = self.workers.take_movable() else {
            // It has room all the same, which its answer says.
            self.outbox.tell(to, ShareMessage::Load);
            return;
        };
        // Nobody but this node knows where the task is, so its wait is still open.
        self.joins.expect_from(task.number, to);
        count(&self.counters.spawns, 1);
        count(&self.counters.given_tasks, 1);
        // SAFETY: the bytes of the arguments, which nobody else has.
        self.stage(|| unsafe { task.body.owned_by(&task.arguments, true) });
        let (number, body, borrows) = (task.number, task.body.reference(), self.lend(&task.borrows));
        let message = ShareMessage::Spawn { task: number, body, if_room: true, borrows, arguments: &task.arguments };
        match self.ask_to_run(to, message) {
            // Whether a silent node runs it is known when it says how it ended, or is gone.
            Ok(()) | Err(Unanswered { may_have_arrived: true, .. }) => {}
            Err(_) => {
                if self.joins.expect_from(task.number, self.id) {
                    self.workers.take_back(self, task);
                } else {
                    // The node was lost meanwhile, and so was its task for whoever waits.
                    count(&self.counters.orphans, 1);
                }
            }
        }
    }

    /// Hears what work another node has, and gives it some that waits here if it has room.
    pub(crate) fn hear_load(&self, node: NodeId, load: NodeLoad) {
        let is_news = self.peers.note_heard(node, load);
        // A look at this node's queue costs a lock.
        if !is_news || load.room == 0 || node == self.id {
            return;
        }
        for _ in 0..NodeLoad::gift(self.workers.load(), load) {
            self.peers.note_given(node);
            self.outbox.give(node);
        }
    }

    /// Tells nodes that keep tasks waiting that this one has room, if they do not know.
    pub(crate) fn offer_room(&self) {
        // Most of the time nobody does.
        if self.peers.loads().any(|(_, heard, _)| heard.waiting > 0) {
            self.tell_those_who(|here, heard, told| here.room > 0 && heard.waiting > 0 && told.room == 0);
        }
    }

    /// Tells nodes that tasks wait here, if they do not know. A node with room says so in its answer.
    fn seek_room(&self) {
        self.tell_those_who(|here, _, told| here.waiting > here.room && told.waiting == 0);
    }

    /// Tells other nodes the load of this one, if they have said `heard` and were told `told`.
    fn tell_those_who(&self, need: impl Fn(NodeLoad, NodeLoad, NodeLoad) -> bool) {
        let needy: Vec<NodeId> = self.workers.tell_load(|here| {
            let others = self.peers.loads().filter(|(node, ..)| *node != self.id);
            others.filter(|(_, heard, told)| need(here, *heard, *told)).map(|(node, ..)| node).collect()
        });
        needy.into_iter().for_each(|node| self.outbox.tell(node, ShareMessage::Load));
    }

    /// Takes a task from another node, which is counted if it has borrows. Returns `None` if there is no such code.
    pub(crate) fn submit(
        self: &Arc<ShareNode>,
        origin: NodeId,
        number: u64,
        body: CodeRef,
        borrows: Borrows,
        arguments: &[u8],
    ) -> Option<Result<(), TaskRefusal>> {
        let Some(body) = ShippedCode::find(body).filter(|body| body.description.argument_bytes == arguments.len())
        else {
            self.end_borrower(origin, &borrows);
            return None;
        };
        let arguments = arguments.to_vec();
        let counted = borrows.clone();
        let task = QueuedTask { origin, number, body, arguments, may_move: false, borrows, bytes_of_other: None };
        let taken = self.workers.submit_of_other(self, task, self.near_bytes);
        if taken.is_err() {
            self.end_borrower(origin, &counted);
        }
        Some(taken)
    }

    /// Runs a task and says how it ended to the node that waits.
    pub(crate) fn run_task(self: &Arc<ShareNode>, task: QueuedTask) {
        let QueuedTask { origin, number, body, arguments, borrows, .. } = task;
        let (ended, used) = within(self, true, || {
            let here = Here::of_task(self, borrows.clone().unwrap_or_default());
            // SAFETY: the bytes of the arguments of a task of this code, which runs once.
            let ended = unsafe { body.run(&here, &arguments) };
            here.leave_locks();
            (ended, here.take_loans())
        });
        self.end_borrower(origin, &borrows);
        self.workers.while_ending(|| {
            self.end_task(origin, number, ended.map_err(|panic| text_of(&*panic)), &used);
        });
    }

    /// Ends a task that cannot be run.
    pub(crate) fn refuse_task(self: &Arc<ShareNode>, task: QueuedTask, error: &std::io::Error) {
        let message = format!("node {} cannot start a thread: {error}", self.id);
        self.end_borrower(task.origin, &task.borrows);
        self.end_task(task.origin, task.number, Err(message), &HashMap::new());
    }

    fn end_task(
        self: &Arc<ShareNode>,
        origin: NodeId,
        number: u64,
        ended: Result<Value, String>,
        used: &HashMap<u64, Option<UsedLoan>>,
    ) {
        if origin == self.id {
            if let Some(waiting) = self.joins.take(number) {
                let loans = used.iter().map(|(number, used)| (*number, *used)).collect();
                waiting.put(TaskEnd { result: ended.map_err(|message| JoinError::Panicked { message }), loans });
            }
            return;
        }
        let loans = used.iter().map(|(number, used)| {
            let (word, left) = used.map_or((0, 0), |used| (used.place.word.bits(), used.place.left.bits()));
            (*number, word, left)
        });
        let loans: Vec<_> = loans.collect();
        self.stage(|| {
            let lent = used.values().flatten().filter_map(|used| used.object);
            ended.iter().flat_map(Value::owned).chain(lent).collect()
        });
        count(&self.counters.results, 1);
        let room = VALUE_BYTES_MAX - (loans.len() * LOAN_BYTES).min(VALUE_BYTES_MAX);
        let undelivered = match ended {
            Err(message) => {
                let message = shortened(message, room);
                self.tell_end(origin, number, TaskOutcome::Panicked(&message), &loans).err()
            }
            Ok(value) if value.len() > room => {
                let bytes = value.len() as u64;
                within(self, true, || drop(value));
                self.tell_end(origin, number, TaskOutcome::TooLarge(bytes), &loans).err()
            }
            Ok(value) => {
                let code = value.code();
                let bytes = value.into_bytes();
                let undelivered = self.tell_end(origin, number, TaskOutcome::Returned(&bytes), &loans).err();
                if undelivered.as_ref().is_some_and(|undelivered| !undelivered.may_have_arrived) {
                    // SAFETY: the bytes of the result, which nobody has.
                    within(self, true, || drop(unsafe { Value::from_bytes(bytes, code) }));
                }
                undelivered
            }
        };
        if undelivered.is_some_and(|undelivered| !undelivered.may_have_arrived) {
            // The lender is dead, and what it has lent is nobody's.
            let places = used.values().flatten().map(|used| used.place);
            let moved = places.filter(|place| place.is_moved() && self.home_of(place.word) == self.id);
            moved.for_each(|place| self.free_unclaimed(place.word));
        }
    }

    /// Says how a task ended, again and again to a node that is silent: only the first time counts.
    fn tell_end(
        &self,
        origin: NodeId,
        task: u64,
        outcome: TaskOutcome<'_>,
        loans: &[(u64, u64, u64)],
    ) -> Result<(), Unanswered> {
        let mut may_have_arrived = false;
        loop {
            let message = ShareMessage::Ended { task, outcome, loans: loans.to_vec() };
            match self.peers.tell(self, origin, message) {
                Ok(()) => return Ok(()),
                Err(unanswered) => {
                    may_have_arrived |= unanswered.may_have_arrived;
                    if !matches!(unanswered.error, ShareError::Silent { .. }) {
                        return Err(Unanswered { may_have_arrived, ..unanswered });
                    }
                }
            }
        }
    }

    /// Applies a short body to the value under a lock of another node, if nobody has that. Otherwise returns the
    /// arguments. They are dropped on an error, if the body certainly has not run.
    pub(crate) fn apply_there<F, A, R>(
        &self,
        word: OwnerWord,
        locked: LockedType,
        arguments: A,
        body: F,
    ) -> Result<Result<R, A>, JoinError>
    where
        F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy,
        A: Portable,
        R: Far,
    {
        let (body, arguments) = (ShippedCode::of_body(body), bytes_of(arguments));
        // SAFETY: the bytes of the arguments, which nobody else has if this is called; once.
        let take_back = || unsafe { arguments.as_ptr().cast::<A>().read_unaligned() };
        // SAFETY: as above, and they are borrowed.
        self.stage(|| unsafe { body.owned_by(&arguments, true) });
        let message = ShareMessage::Apply { word: word.bits(), locked, body: body.reference(), arguments: &arguments };
        let answered = self.peers.ask(self, self.host_of(word), message, |reply| match reply {
            // SAFETY: the bytes of the body's result, which its node has no longer.
            ShareReply::Applied(outcome) => Some(Some(unsafe { result_of(outcome, body) })),
            ShareReply::NoPlace => Some(None),
            _ => None,
        });
        match answered {
            // SAFETY: the body returns this type.
            Ok(Some(result)) => result.map(|value| Ok(unsafe { value.into_result() })),
            Ok(None) => Ok(Err(take_back())),
            Err(Unanswered { error, may_have_arrived }) => {
                if !may_have_arrived {
                    drop(take_back());
                }
                Err(error.into())
            }
        }
    }

    /// Applies a body to the value under a lock of this node, for another one. Returns its result, or `Some(None)` if
    /// the lock is not free, and `None` if there is no such code.
    pub(super) fn apply_here(
        self: &Arc<ShareNode>,
        word: OwnerWord,
        locked: LockedType,
        body: CodeRef,
        arguments: &[u8],
    ) -> Option<Option<Result<Value, String>>> {
        let body = ShippedCode::find(body).filter(|body| body.description.argument_bytes == arguments.len())?;
        let Some(number) = self.take_lock_here(word, locked) else { return Some(None) };
        // SAFETY: the bytes of the arguments of a body of this code, which runs once.
        let ended = within(self, false, || unsafe { body.run(&Here::at(self), arguments) });
        let is_thin = number == THIN_NUMBER && ended.is_ok();
        if !is_thin || !self.arena.release_thin(word, LockMode::Exclusive) {
            let end = if ended.is_ok() { LockEnd::Released(None) } else { LockEnd::Panicked(None) };
            self.unlock(word, number, end, locked);
        }
        Some(Some(ended.map_err(|panic| shortened(text_of(&*panic), VALUE_BYTES_MAX))))
    }

    /// Takes a lock whose value is in the arena of this node, if it is free. Returns the number of the holding.
    fn take_lock_here(&self, word: OwnerWord, locked: LockedType) -> Option<u64> {
        if self.arena.take_thin(word, LockMode::Exclusive) {
            return Some(THIN_NUMBER);
        }
        let ticket = HomeTicket { node: self.id.0, number: self.waits.number() };
        let wish = LockWish { mode: LockMode::Exclusive, may_wait: false, may_borrow: false, is_new: true };
        // The value of a lock of a node that is gone is not in the arena.
        let answer = if self.is_here(word) { self.ask_lock(word, ticket, wish, locked) } else { None };
        matches!(answer, Some(WaitAnswer::Granted { .. })).then_some(ticket.number)
    }

    /// Takes the end of a task from the node that has run it.
    pub(crate) fn task_ended(self: &Arc<ShareNode>, task: u64, outcome: TaskOutcome<'_>, loans: Vec<(u64, u64, u64)>) {
        let Some(waiting) = self.joins.take(task) else { return };
        let loans = loans.into_iter().map(|(number, word, left)| {
            let words = OwnerWord::from_bits(word).zip(OwnerWord::from_bits(left));
            (number, words.map(|(word, left)| UsedLoan { place: LoanPlace { word, left }, object: None }))
        });
        let loans = loans.collect();
        // SAFETY: the bytes of the result of that task, which its node has no longer.
        let result = unsafe { result_of(outcome, *waiting.about()) };
        waiting.put(TaskEnd { result, loans });
    }
}

/// Returns how many bytes the roots of borrows take in a message, at most.
fn borrows_bytes(borrows: &Borrows) -> usize {
    borrows.as_ref().map_or(0, |roots| roots.len() * ROOT_BYTES_MAX)
}

/// Returns the result of code that has run at another node.
///
/// # Safety
/// Nobody else has the bytes of what the code returned.
unsafe fn result_of(outcome: TaskOutcome<'_>, code: ShippedCode) -> Result<Value, JoinError> {
    match outcome {
        // SAFETY: the caller's promise.
        TaskOutcome::Returned(bytes) => Ok(unsafe { Value::from_bytes(bytes.to_vec(), code) }),
        TaskOutcome::Panicked(message) => Err(JoinError::Panicked { message: message.to_owned() }),
        TaskOutcome::TooLarge(bytes) => Err(ShareError::TooLarge { bytes, limit_bytes: VALUE_BYTES_MAX as u64 }.into()),
    }
}

/// Calls a body as a task of its own would run it: a panic is an error.
pub(crate) fn caught<R>(body: impl FnOnce() -> Result<R, JoinError>) -> Result<R, JoinError> {
    let ended = catch_unwind(AssertUnwindSafe(body));
    ended.unwrap_or_else(|panic| Err(JoinError::Panicked { message: text_of(&*panic) }))
}

/// Shortens a text to so many bytes.
fn shortened(mut text: String, bytes: usize) -> String {
    let end = (0..=text.len().min(bytes)).rfind(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

/// Returns what a panic says.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("something that is no text").to_owned()
}
