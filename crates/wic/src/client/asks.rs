//! Accesses that the server makes for functions at the client: calls of [`Access`].

use super::underway::Underway;
use crate::access::{Access, Answer, Ask};
use crate::registry::decode;
use crate::{CallError, Fault, Function};
use core::time::Duration;
use farfield_pool::{Backend, CallEnd, CallFailure, CallLane, FarCall, PoolError};
use std::collections::VecDeque;
use std::sync::Arc;

/// What an ask came to.
pub(super) type Ended = Result<Vec<u8>, CallFailure>;

/// The channel for them, opened when it is first needed.
pub(super) struct Asks {
    backend: Arc<dyn Backend>,
    lane: Option<CallLane>,
    /// There is no such channel.
    is_nowhere: bool,
    pub(super) underway: Underway<Ended>,
    /// What the channel had no room for.
    queued: VecDeque<FarCall>,
    ended: Vec<CallEnd>,
}

impl Asks {
    pub(super) fn new(backend: Arc<dyn Backend>) -> Asks {
        Asks {
            backend,
            lane: None,
            is_nowhere: false,
            underway: Underway::new(),
            queued: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    fn lane(&mut self) -> Result<&mut CallLane, Fault> {
        if self.is_nowhere {
            return Err(Fault::NotHere);
        }
        let lane = match self.lane.take().map_or_else(|| self.backend.open_calls(), Ok) {
            Ok(lane) => lane,
            Err(PoolError::Refused { reason: CallLane::NOWHERE, .. }) => {
                self.is_nowhere = true;
                return Err(Fault::NotHere);
            }
            Err(error) => return Err(error.into()),
        };
        Ok(self.lane.insert(lane))
    }

    /// Begins an access for this task; its tag.
    pub(super) fn begin(&mut self, ask: &Ask, task: u32, deadline: Duration) -> Result<u32, Fault> {
        let argument = postcard::to_stdvec(ask).map_err(|_| Fault::Internal)?;
        self.lane()?;
        let tag = self.underway.begin(task);
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

    /// Sends what was begun and says which tasks can go on.
    pub(super) fn turn(&mut self, ready: &mut VecDeque<u32>) {
        self.submit();
        let Some(lane) = &mut self.lane else { return };
        lane.poll(&mut self.ended);
        for ended in self.ended.drain(..) {
            self.underway.end(ended.tag as u32, ended.result, ready);
        }
    }

    /// Waits until one has probably ended.
    pub(super) fn wait(&mut self, most: Duration) {
        if let Some(lane) = &mut self.lane {
            lane.wait(most);
        }
    }

    /// The answer in it. A server without this access is none that could do it.
    pub(super) fn answer(&mut self, ended: Ended) -> Result<Answer, Fault> {
        let failure = match ended {
            Ok(bytes) => return decode(&bytes).ok_or(Fault::Internal),
            Err(CallFailure::Pool(error)) => return Err(error.into()),
            Err(failure) => failure,
        };
        match CallError::of_failure(failure, Access::NAME, Access::VERSION, Duration::ZERO) {
            CallError::Fault(fault) => Err(fault),
            CallError::TimedOut { after } => Err(Fault::Lost(PoolError::TimedOut { server: 0, after })),
            CallError::Nowhere | CallError::NoFunction { .. } | CallError::OtherVersion { .. } => {
                self.is_nowhere = true;
                Err(Fault::NotHere)
            }
            _ => Err(Fault::Internal),
        }
    }
}
