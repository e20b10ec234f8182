//! GCLOCK, the generalised clock (Smith 1978, "Sequentiality and Prefetching in Database Systems"):
//! a page has a weight, loses one at each visit, and leaves at zero. Here the weight comes from the
//! past of the page, because its uses are not seen: it is 1 at the first early return and doubles
//! at each further one, up to 16.
//!
//! ```text
//!  7     5 4      0
//! +-------+--------+
//! | level | weight |     weight at an early return: 2^(level - 1)
//! +-------+--------+
//! ```

use super::{CandidateAction, PageArrival, PolicyState, QueueTail, ReplacementPolicy};

const WEIGHT: u8 = 0x1F;
const LEVEL_SHIFT: u32 = 5;
/// Level at which the weight is 16. A page in constant use is then evicted in vain, to learn whether
/// it still is, at every seventeenth visit.
const LEVEL_MAX: u8 = 5;
const _: () = assert!(1 << (LEVEL_MAX - 1) <= WEIGHT, "the largest weight fits into its bits");

/// Policy that gives a page more visits of the clock hand the more often it returned early.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gclock;

/// Number of early returns in a row, up to [`LEVEL_MAX`].
fn level(state: PolicyState) -> u8 {
    (state.0 >> LEVEL_SHIFT).min(LEVEL_MAX)
}

fn state_of(level: u8, weight: u8) -> PolicyState {
    PolicyState(level << LEVEL_SHIFT | weight)
}

impl ReplacementPolicy for Gclock {
    const QUEUES: usize = 1;

    fn on_arrival(&self, arrival: &PageArrival) -> QueueTail {
        let level = level(arrival.state);
        let state = match (arrival.is_early(), arrival.ahead) {
            (true, false) => {
                let level = (level + 1).min(LEVEL_MAX);
                state_of(level, 1 << (level - 1))
            }
            // Nobody knows yet whether it is used.
            (true, true) => state_of(level, 0),
            (false, _) => state_of(level.saturating_sub(1), 0),
        };
        QueueTail { queue: 0, state }
    }

    /// Gives a page the weight of its next early return.
    fn on_use(&self, state: PolicyState) -> PolicyState {
        let level = level(state);
        let weight = (1 << level.min(LEVEL_MAX - 1)).max(state.0 & WEIGHT);
        state_of(level, weight)
    }

    fn next_queue(&mut self, _lengths: &[usize]) -> usize {
        0
    }

    fn on_candidate(&self, _queue: usize, state: PolicyState) -> CandidateAction {
        match state.0 & WEIGHT {
            0 => CandidateAction::Evict(state),
            _ => CandidateAction::Keep(QueueTail { queue: 0, state: PolicyState(state.0 - 1) }),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against weights that do not follow from the page's past.
    use super::*;

    fn arrive(state: PolicyState, distance: u64, ahead: bool) -> PolicyState {
        Gclock.on_arrival(&PageArrival { state, distance: Some(distance), capacity: 100, ahead }).state
    }

    fn visits(mut state: PolicyState) -> (u32, PolicyState) {
        for visit in 0.. {
            match Gclock.on_candidate(0, state) {
                CandidateAction::Evict(state) => return (visit, state),
                CandidateAction::Keep(tail) => state = tail.state,
            }
        }
        unreachable!("a weight is lost at each visit")
    }

    #[test]
    fn visits_double_at_each_early_return() {
        let mut state = PolicyState(0);
        for expected in [1, 2, 4, 8, 16, 16] {
            let (kept, left_with) = visits(arrive(state, 49, false));
            assert_eq!(kept, expected);
            state = left_with;
        }
        // Half as much after each late return, and a late return itself keeps nothing.
        assert_eq!(visits(arrive(state, 50, false)).0, 0);
        let late = visits(arrive(state, 50, false)).1;
        assert_eq!(visits(arrive(late, 0, false)).0, 16);
        let later = visits(arrive(visits(arrive(late, 50, false)).1, 50, false)).1;
        assert_eq!(visits(arrive(later, 0, false)).0, 4);
    }

    #[test]
    fn a_page_that_comes_ahead_of_its_use_has_no_weight_and_loses_no_level() {
        let known = visits(arrive(visits(arrive(PolicyState(0), 0, false)).1, 0, false)).1;
        let (kept, state) = visits(arrive(known, 0, true));
        assert_eq!((kept, state), (0, known));
    }

    #[test]
    fn a_new_page_has_no_weight() {
        let arrival = PageArrival { state: PolicyState(0), distance: None, capacity: 100, ahead: false };
        assert_eq!(Gclock.on_arrival(&arrival).state, PolicyState(0));
    }
}
