//! Calls: functions of the registry that run over a region, in the thread of the connection.

use super::{ClientConnection, CloseReason, is_late};
use crate::sessions::ClientSession;
use crate::store::RegionMemory;
use arrayvec::ArrayVec;
use farfield_core::RegionId;
use farfield_core::wire::{self, CallBody, ErrorCode, Request, WireRequest};
use farfield_wic::{Budget, Task, Unknown};
use std::time::{Duration, Instant};

/// Most calls of a batch that run side by side: their answers take a megabyte at most.
const ROW_MAX: usize = 16;
/// Size of the outbox, in bytes, from which answers are sent before the end of the batch.
const SEND_BYTES: usize = 64 * 1024;
/// Duration of a row of calls from which its answers are sent before the end of the batch.
const SEND_AFTER: Duration = Duration::from_micros(100);

/// Calls of one function over one region that follow one another.
pub(super) type CallBatch<'i> = ArrayVec<(WireRequest<'i>, QueuedCall<'i>), ROW_MAX>;

/// A call in a row.
#[derive(Clone, Copy)]
pub(super) struct QueuedCall<'i> {
    tag: u64,
    deadline: Option<Duration>,
    pub(super) region: RegionId,
    steps_max: u32,
    call: CallBody<'i>,
}

/// Returns the call, if the request is one.
pub(super) fn call_of<'i>(wire: &WireRequest<'i>) -> Option<QueuedCall<'i>> {
    match wire.request {
        Request::Call { region, steps_max, call } => {
            Some(QueuedCall { tag: wire.tag, deadline: wire.deadline, region, steps_max, call })
        }
        _ => None,
    }
}

impl QueuedCall<'_> {
    /// Checks whether both calls run the same function over the same region.
    pub(super) fn is_like(&self, other: &QueuedCall<'_>) -> bool {
        let function = |queued: &Self| (queued.region, queued.call.version);
        function(self) == (other.region, other.call.version) && self.call.name == other.call.name
    }
}

impl ClientConnection<'_> {
    /// Returns the budget of a call: the client's limits, but at most the server's.
    fn budget(&self, queued: &QueuedCall<'_>, arrived: Instant, now: Instant) -> Budget {
        let config = &self.shared.config;
        let wanted = queued.deadline.map(|deadline| arrived + deadline);
        let most = now.checked_add(config.call_within);
        let steps_max = match queued.steps_max {
            0 => config.call_steps_max,
            wanted => config.call_steps_max.min(u64::from(wanted)),
        };
        Budget { steps_max, until: wanted.into_iter().chain(most).min() }
    }

    /// Runs a row of calls of one function over one region and answers each.
    pub(super) fn serve_calls(
        &mut self,
        session: &ClientSession,
        row: &CallBatch<'_>,
        arrived: Instant,
    ) -> Result<(), CloseReason> {
        let Some((_, first)) = row.first() else { return Ok(()) };
        let now = Instant::now();
        let mut tags = ArrayVec::<_, ROW_MAX>::new();
        let mut tasks = ArrayVec::<_, ROW_MAX>::new();
        for (wire, queued) in row {
            self.conversation.on_answered();
            self.tally.request(wire.request.kind());
            if is_late(wire, arrived, now) {
                self.fail(queued.tag, ErrorCode::TimedOut, 0);
                continue;
            }
            tags.push(queued.tag);
            tasks.push(Task { argument: queued.call.argument, budget: self.budget(queued, arrived, now) });
        }
        // Answers may be long, and the client may not read them.
        self.hold_outbox(tags.len().saturating_mul(CallBody::ANSWER_BYTES_MAX))?;
        let Some(region) = session.region(first.region) else {
            tags.into_iter().for_each(|tag| self.fail(tag, ErrorCode::UnknownRegion, 0));
            return Ok(());
        };
        let shared = self.shared;
        let CallBody { name, version, .. } = first.call;
        // A function may wait for another one, which may wait for a permit: the memory gives this one
        // back while the function sleeps, and hands it over now and then while it does not.
        let memory = RegionMemory::new(&region, core::mem::take(&mut self.turn));
        let ran = shared.config.functions.run(name, version, &memory, &tasks, &mut |index, result, steps| {
            let Some(&tag) = tags.get(index) else { return };
            match result {
                Ok(answer) => {
                    let steps = u32::try_from(steps).unwrap_or(u32::MAX);
                    self.answer(|out| wire::encode_answer(tag, steps, answer, out));
                }
                Err(stop) => {
                    let (code, detail) = stop.code();
                    self.fail(tag, code, detail);
                }
            }
        });
        // The region's lock must not be held while waiting for the client.
        self.turn = memory.into_turn();
        if let Err(unknown) = ran {
            let (code, detail) = match unknown {
                Unknown::Name => (ErrorCode::NoFunction, 0),
                Unknown::Version { newest } => (ErrorCode::OtherVersion, u64::from(newest)),
            };
            tags.into_iter().for_each(|tag| self.fail(tag, code, detail));
        }
        if self.outbox.len() >= SEND_BYTES || now.elapsed() >= SEND_AFTER {
            self.flush()?;
        }
        Ok(())
    }
}
