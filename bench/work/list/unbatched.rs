//! A pool that sends each operation when it is made, and looks for answers as often: what a client does without batches.

use core::time::Duration;
use farfield_pool::{Backend, CallChannel, CloneTicket, Completion, Health, Lane, LaneRequest, PoolError};
use std::sync::Arc;

/// Operations that a lane has under way, at most.
const UNDER_WAY_MAX: usize = 256;

pub(super) struct Unbatched(pub(super) Arc<dyn Backend>);

impl Backend for Unbatched {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(Sent { lane: self.0.open_lane()?, ended: Vec::with_capacity(UNDER_WAY_MAX) }))
    }

    fn open_calls(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        self.0.open_calls()
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        self.0.clone_region()
    }

    fn pages(&self) -> u64 {
        self.0.pages()
    }

    fn health(&self) -> Health {
        self.0.health()
    }

    fn release(&self) {
        self.0.release();
    }

    fn abandon(&self) {
        self.0.abandon();
    }
}

/// A lane on which nothing waits to be sent.
struct Sent {
    lane: Box<dyn Lane>,
    /// What came back while others were sent.
    ended: Vec<Completion>,
}

impl Lane for Sent {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        self.lane.submit(request)?;
        self.lane.poll(&mut self.ended);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let early = self.ended.len().min(done.capacity() - done.len());
        done.extend(self.ended.drain(..early));
        early + self.lane.poll(done)
    }

    fn in_flight(&self) -> usize {
        self.lane.in_flight() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        if self.ended.is_empty() {
            self.lane.wait(timeout);
        }
    }
}
