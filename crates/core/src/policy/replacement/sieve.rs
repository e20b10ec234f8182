//! SIEVE (Zhang et al., NSDI 2024, "SIEVE is Simpler than LRU"): a hand goes from the oldest page to
//! the newest and evicts those that were not used since it came by. Unlike in CLOCK, pages that stay
//! keep their place, so that new pages are soon met again.
//!
//! The hand cuts the list into two queues: pages ahead of it, at whose end new ones are put, and
//! pages that it has passed. When it reaches the end, the queues change their roles.

use super::{CandidateAction, PageArrival, PolicyState, QueueTail, ReplacementPolicy};

const VISITED: PolicyState = PolicyState(1);
const NEW: PolicyState = PolicyState(0);

/// Policy whose hand passes used pages without moving them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sieve {
    /// Queue of the pages ahead of the hand.
    ahead: usize,
}

impl ReplacementPolicy for Sieve {
    const QUEUES: usize = 2;

    fn on_arrival(&self, arrival: &PageArrival) -> QueueTail {
        let is_marked = arrival.is_early() && !arrival.ahead;
        QueueTail { queue: self.ahead, state: if is_marked { VISITED } else { NEW } }
    }

    fn on_use(&self, _state: PolicyState) -> PolicyState {
        VISITED
    }

    fn next_queue(&mut self, lengths: &[usize]) -> usize {
        if lengths[self.ahead] == 0 {
            self.ahead = 1 - self.ahead;
        }
        self.ahead
    }

    fn on_candidate(&self, queue: usize, state: PolicyState) -> CandidateAction {
        match state {
            NEW => CandidateAction::Evict(NEW),
            _ => CandidateAction::Keep(QueueTail { queue: 1 - queue, state: NEW }),
        }
    }
}
