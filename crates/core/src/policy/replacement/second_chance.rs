//! FIFO with a second chance (Corbató 1968, "A Paging Experiment with the Multics System"). Where
//! uses are seen this is CLOCK; where only faults are, a page that returns early gets the mark.

use super::{CandidateAction, PageArrival, PolicyState, QueueTail, ReplacementPolicy};

const MARKED: PolicyState = PolicyState(1);
const UNMARKED: PolicyState = PolicyState(0);

/// Policy that queues a marked page once more and takes its mark.
#[derive(Clone, Copy, Debug, Default)]
pub struct SecondChance;

impl ReplacementPolicy for SecondChance {
    const QUEUES: usize = 1;

    fn on_arrival(&self, arrival: &PageArrival) -> QueueTail {
        let state = if arrival.is_early() && !arrival.ahead { MARKED } else { UNMARKED };
        QueueTail { queue: 0, state }
    }

    fn on_use(&self, _state: PolicyState) -> PolicyState {
        MARKED
    }

    fn next_queue(&mut self, _lengths: &[usize]) -> usize {
        0
    }

    fn on_candidate(&self, _queue: usize, state: PolicyState) -> CandidateAction {
        match state {
            UNMARKED => CandidateAction::Evict(UNMARKED),
            _ => CandidateAction::Keep(QueueTail { queue: 0, state: UNMARKED }),
        }
    }
}
