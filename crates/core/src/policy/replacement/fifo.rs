//! FIFO: the page leaves that has been near for longest.

use super::{CandidateAction, PageArrival, PolicyState, QueueTail, ReplacementPolicy};

/// Policy that evicts pages in the order of their arrival.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fifo;

impl ReplacementPolicy for Fifo {
    const QUEUES: usize = 1;

    fn on_arrival(&self, _arrival: &PageArrival) -> QueueTail {
        QueueTail { queue: 0, state: PolicyState(0) }
    }

    fn next_queue(&mut self, _lengths: &[usize]) -> usize {
        0
    }

    fn on_candidate(&self, _queue: usize, state: PolicyState) -> CandidateAction {
        CandidateAction::Evict(state)
    }
}
