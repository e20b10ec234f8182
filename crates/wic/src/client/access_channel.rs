//! Accesses that the server makes for functions at the client: calls of [`Access`].

use super::operation_table::OperationTable;
use crate::access::{Access, Answer, Ask};
use crate::registry::decode;
use crate::{CallError, Fault, Function};
use core::time::Duration;
use farfield_core::lock::{self, LockMode, LockReply};
use farfield_pool::{Backend, CallChannel, CallEnd, CallFailure, CallLane, FarCall, PoolError};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Deadline of requests for which nobody waits: no longer than any lease.
const GIVE_BACK_WITHIN: Duration = lock::LockRecord::LEASE_MAX;
/// Longest wait of a caller for locks that arrive for tasks that were ended. After that their
/// leases end them.
const UNDO_WITHIN: Duration = Duration::from_millis(50);

/// Result of a request.
type Ended = Result<Vec<u8>, CallFailure>;

/// Channel for these requests, opened when it is first needed.
pub(super) struct AccessChannel {
    backend: Arc<dyn Backend>,
    lane: Option<Box<dyn CallChannel>>,
    /// Whether there is no such channel.
    is_nowhere: bool,
    operations: OperationTable<Ended>,
    /// Locks that are asked for, by tag: if the task does not want one any more, it is given back.
    taking: BTreeMap<u32, (u64, LockMode)>,
    /// Requests for which the channel had no room.
    queued: VecDeque<FarCall>,
    ended: Vec<CallEnd>,
}

impl AccessChannel {
    pub(super) fn new(backend: Arc<dyn Backend>) -> AccessChannel {
        AccessChannel {
            backend,
            lane: None,
            is_nowhere: false,
            operations: OperationTable::new(),
            taking: BTreeMap::new(),
            queued: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    fn lane(&mut self) -> Result<&mut Box<dyn CallChannel>, Fault> {
        if self.is_nowhere {
            return Err(Fault::NotHere);
        }
        let lane = match self.lane.take().map_or_else(|| self.backend.open_calls(), Ok) {
            Ok(lane) => lane,
            Err(PoolError::Refused { reason: CallLane::NOWHERE, .. }) => {
                self.is_nowhere = true;
                return Err(Fault::NotHere);
            }
            Err(PoolError::Refused { reason: CallLane::NOT_NOW, .. }) => return Err(Fault::NotHere),
            Err(error) => return Err(error.into()),
        };
        Ok(self.lane.insert(lane))
    }

    /// Begins an access for this task, and returns its tag.
    pub(super) fn begin(&mut self, ask: &Ask, task: u32, deadline: Duration) -> Result<u32, Fault> {
        let argument = postcard::to_stdvec(ask).map_err(|_| Fault::Internal)?;
        self.lane()?;
        let tag = self.operations.begin(task);
        if let Ask::Lock { lock, ask: lock::LockRequest::Take { mode, .. } | lock::LockRequest::Look { mode, .. } } =
            *ask
        {
            self.taking.insert(tag, (lock, mode));
        }
        let (name, version) = (Access::NAME, Access::VERSION);
        let call = FarCall { tag: u64::from(tag), deadline, steps_max: 0, name, version, argument };
        self.queued.push_back(call);
        self.submit();
        Ok(tag)
    }

    fn submit(&mut self) {
        let Some(lane) = &mut self.lane else { return };
        while let Some(call) = self.queued.pop_front() {
            if let Err(call) = lane.submit(call) {
                self.queued.push_front(call);
                break;
            }
        }
    }

    /// Sends the requests that were begun, and makes the tasks ready that can go on.
    pub(super) fn turn(&mut self, ready: &mut VecDeque<u32>) {
        self.submit();
        let Some(lane) = &mut self.lane else { return };
        lane.poll(&mut self.ended);
        let mut ended = core::mem::take(&mut self.ended);
        for CallEnd { tag, result, .. } in ended.drain(..) {
            let unwanted = self.operations.end(tag as u32, result, ready);
            self.undo(tag as u32, unwanted);
        }
        self.ended = ended;
    }

    pub(super) fn in_flight(&self) -> usize {
        self.operations.in_flight()
    }

    /// Takes the answer, if it has come; otherwise this task waits on.
    pub(super) fn take(&mut self, tag: u32, task: u32) -> Option<Result<Answer, Fault>> {
        let ended = self.operations.take(tag, task)?;
        self.taking.remove(&tag);
        Some(self.answer(ended))
    }

    /// Gives up a request whose answer nobody wants.
    pub(super) fn give_up(&mut self, tag: u32) {
        let unwanted = self.operations.give_up(tag);
        self.undo(tag, unwanted);
    }

    /// Makes a step of a lock, without waiting for the answer.
    pub(super) fn give_back(&mut self, lock: u64, ask: lock::LockRequest) {
        // If it cannot be sent, the lease ends the holding.
        if let Ok(tag) = self.begin(&Ask::Lock { lock, ask }, u32::MAX, GIVE_BACK_WITHIN) {
            self.give_up(tag);
        }
    }

    /// Gives back an unwanted lock, or an unwanted position in its line.
    fn undo(&mut self, tag: u32, unwanted: Option<Ended>) {
        let Some(ended) = unwanted else { return };
        let Some((lock, mode)) = self.taking.remove(&tag) else { return };
        match self.answer(ended) {
            Ok(Answer::Lock(LockReply::Yours { epoch, .. })) => {
                self.give_back(lock, lock::LockRequest::Release { epoch, mode, is_done: true });
            }
            Ok(Answer::Lock(LockReply::Waits { ticket, .. })) => {
                self.give_back(lock, lock::LockRequest::GiveUp { ticket })
            }
            _ => {}
        }
    }

    /// Sends the requests for which nobody waits, when there is no task any more.
    pub(super) fn flush(&mut self) {
        let until = Instant::now() + UNDO_WITHIN;
        self.turn(&mut VecDeque::new());
        while !self.taking.is_empty() && Instant::now() < until {
            self.wait(until.saturating_duration_since(Instant::now()));
            self.turn(&mut VecDeque::new());
        }
        self.turn(&mut VecDeque::new());
    }

    /// Waits, at most this long, until a request has probably ended.
    pub(super) fn wait(&mut self, most: Duration) {
        if let Some(lane) = &mut self.lane {
            lane.wait(most);
        }
    }

    /// Decodes the answer. A server without [`Access`] counts as one that has no atomics.
    fn answer(&mut self, ended: Ended) -> Result<Answer, Fault> {
        let failure = match ended {
            Ok(bytes) => return decode(&bytes).ok_or(Fault::Internal),
            Err(CallFailure::Pool(error)) => return Err(error.into()),
            Err(failure) => failure,
        };
        match CallError::of_failure(failure, Access::NAME, Access::VERSION, Duration::ZERO) {
            CallError::Fault(fault) => Err(fault),
            CallError::TimedOut { after } => Err(Fault::Lost(PoolError::TimedOut { server: 0, after })),
            CallError::NotNow => Err(Fault::NotHere),
            CallError::Nowhere | CallError::NoFunction { .. } | CallError::OtherVersion { .. } => {
                self.is_nowhere = true;
                Err(Fault::NotHere)
            }
            _ => Err(Fault::Internal),
        }
    }
}
