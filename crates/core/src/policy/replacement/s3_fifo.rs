//! S3-FIFO (Yang et al., SOSP 2023, "FIFO queues are all you need for cache eviction"): a tenth of
//! the pages are on probation in a small queue. Pages that were used there move to the main queue;
//! others leave, and go to the main queue if they return soon. The main queue is GCLOCK with two
//! bits.
//!
//! The paper's ghost queue is a distance here: a page that left the small queue is remembered until
//! as many pages have left as the main queue has room for.

use super::{CandidateAction, PageArrival, PolicyState, QueueTail, ReplacementPolicy};

const SMALL: usize = 0;
const MAIN: usize = 1;
/// Part of the pages that is for the small queue: one of so many.
const SMALL_SHARE: u64 = 10;
const USES: u8 = 3;
/// Flag of a page that left from the small queue.
const GHOST: u8 = 4;

/// Policy with a small queue for new pages and a main queue for pages that were used again.
#[derive(Clone, Copy, Debug, Default)]
pub struct S3Fifo;

impl ReplacementPolicy for S3Fifo {
    const QUEUES: usize = 2;

    fn on_arrival(&self, arrival: &PageArrival) -> QueueTail {
        let room = arrival.capacity - arrival.capacity / SMALL_SHARE;
        let is_ghost = arrival.state.0 & GHOST != 0 && arrival.distance.is_some_and(|distance| distance < room);
        QueueTail { queue: if is_ghost && !arrival.ahead { MAIN } else { SMALL }, state: PolicyState(0) }
    }

    fn on_use(&self, state: PolicyState) -> PolicyState {
        PolicyState((state.0 & USES).saturating_add(1).min(USES))
    }

    fn next_queue(&mut self, lengths: &[usize]) -> usize {
        let (small, main) = (lengths[SMALL], lengths[MAIN]);
        let is_small_full = small as u64 * SMALL_SHARE >= (small + main) as u64;
        if main == 0 || small > 0 && is_small_full { SMALL } else { MAIN }
    }

    fn on_candidate(&self, queue: usize, state: PolicyState) -> CandidateAction {
        let uses = state.0 & USES;
        match queue {
            SMALL if uses > 1 => CandidateAction::Keep(QueueTail { queue: MAIN, state: PolicyState(0) }),
            SMALL => CandidateAction::Evict(PolicyState(GHOST)),
            _ if uses > 0 => CandidateAction::Keep(QueueTail { queue: MAIN, state: PolicyState(uses - 1) }),
            _ => CandidateAction::Evict(PolicyState(0)),
        }
    }
}
