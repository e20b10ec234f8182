//! Page replacement: which near pages leave.
//!
//! Near pages stand in FIFO queues, and each has one byte of state. A policy decides where a page
//! goes that arrives, from which queue the next candidate is taken, and whether a candidate leaves
//! or is queued again. That is all of FIFO-Reinsertion, GCLOCK, S3-FIFO and SIEVE, and none of it
//! allocates, so that the pager can use it in a signal handler.
//!
//! The pager does not see uses of near pages: only faults ([`Visibility::Faults`]). What it knows of
//! a page is how many pages left between its departure and its return.

mod fifo;
mod gclock;
mod near_pages;
mod s3_fifo;
mod second_chance;
mod sieve;

pub use fifo::Fifo;
pub use gclock::Gclock;
pub use near_pages::{NearPages, Visibility};
pub use s3_fifo::S3Fifo;
pub use second_chance::SecondChance;
pub use sieve::Sieve;

/// Number of candidates per victim after which pages leave whatever the policy says. The bound
/// keeps eviction cheap when nearly all near pages are to be kept, and the choice matters little.
pub const CANDIDATES_PER_VICTIM: usize = 4;

/// State that a policy keeps of one page, near or far. Zero for a page that was never near.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct PolicyState(pub u8);

/// Knowledge about a page that comes near.
#[derive(Clone, Copy, Debug)]
pub struct PageArrival {
    /// State of the page when it left; zero if it never did.
    pub state: PolicyState,
    /// Number of pages that have left since it did; `None` if it never did.
    pub distance: Option<u64>,
    /// Number of pages that can be near.
    pub capacity: u64,
    /// Whether the page comes ahead of its use, which may never follow.
    pub ahead: bool,
}

impl PageArrival {
    /// Checks whether the page comes back before half as many others have left as can be near. LRU
    /// would have kept it if its last use was in the second half of its stay.
    pub fn is_early(&self) -> bool {
        self.distance.is_some_and(|distance| distance < self.capacity / 2)
    }
}

/// Place of a near page: the tail of a queue, and a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueTail {
    /// Index of the queue.
    pub queue: usize,
    /// State of the page there.
    pub state: PolicyState,
}

/// Decision about a candidate, the page at the head of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CandidateAction {
    /// The page leaves with this state.
    Evict(PolicyState),
    /// The page stays.
    Keep(QueueTail),
}

/// Policy of page replacement over FIFO queues.
pub trait ReplacementPolicy {
    /// Number of queues.
    const QUEUES: usize;

    /// Returns where a page goes that arrives.
    fn on_arrival(&self, arrival: &PageArrival) -> QueueTail;

    /// Returns the state of a near page after a use that was seen. Nobody sees uses under
    /// [`Visibility::Faults`].
    fn on_use(&self, state: PolicyState) -> PolicyState {
        state
    }

    /// Returns the queue that gives the next candidate; not an empty one. `lengths` has the number of
    /// pages in each queue, of which one is not empty.
    fn next_queue(&mut self, lengths: &[usize]) -> usize;

    /// Decides about the page that was at the head of `queue`.
    fn on_candidate(&self, queue: usize, state: PolicyState) -> CandidateAction;
}

#[cfg(test)]
mod tests {
    //! Guards against a policy that names an empty or a missing queue, never finds a victim, keeps a
    //! page for ever, forgets a page, or does worse than FIFO where its paper says that it does
    //! better. All members of the family pass the same tests.
    use super::*;
    use alloc::vec::Vec;

    /// Trace of a program that uses a cold page once in `share` accesses, and hot ones else.
    fn skewed(seed: u64, accesses: usize, hot: u32, cold: u32, share: u32) -> Vec<u32> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut next = || if random.u32(..share) > 0 { random.u32(..hot) } else { hot + random.u32(..cold) };
        (0..accesses).map(|_| next()).collect()
    }

    fn page_ins<P: ReplacementPolicy>(policy: P, visibility: Visibility, capacity: usize, trace: &[u32]) -> u64 {
        let mut near = NearPages::new(policy, visibility, capacity, 1);
        trace.iter().for_each(|&page| {
            near.access(page);
        });
        near.page_ins()
    }

    /// Runs the tests that every policy must pass.
    fn check_policy<P: ReplacementPolicy>(new: impl Fn() -> P) {
        for visibility in [Visibility::Faults, Visibility::Uses] {
            let trace = skewed(38, 40_000, 64, 2_000, 2);
            let (ours, fifo) =
                (page_ins(new(), visibility, 512, &trace), page_ins(Fifo, Visibility::Faults, 512, &trace));
            assert!(ours <= fifo + fifo / 50, "{ours} page-ins on a skewed trace, FIFO {fifo}, {visibility:?}");
            // Everything fits.
            assert_eq!(page_ins(new(), visibility, 2_064, &trace), 0, "{visibility:?}");
            check_counts(new(), visibility);
            check_that_pages_leave(new(), visibility);
        }
        check_actions(&mut new());
    }

    /// The number of near pages never exceeds the capacity, and a page that was just used is near.
    fn check_counts<P: ReplacementPolicy>(policy: P, visibility: Visibility) {
        let (capacity, batch) = (100, 7);
        let mut near = NearPages::new(policy, visibility, capacity, batch);
        for page in skewed(7, 20_000, 50, 500, 3) {
            near.access(page);
            assert!(near.is_near(page), "page {page} was just used");
            assert!(near.len() <= capacity, "{} pages are near", near.len());
        }
        assert!(near.len() > capacity - 2 * batch, "memory is left unused: {} pages are near", near.len());
        let most = (near.evictions() + batch as u64) * CANDIDATES_PER_VICTIM as u64 + near.evictions();
        assert!(near.candidates() <= most, "{} candidates for {} victims", near.candidates(), near.evictions());
    }

    /// Pages that were in constant use leave when nobody uses them any more.
    fn check_that_pages_leave<P: ReplacementPolicy>(policy: P, visibility: Visibility) {
        let mut near = NearPages::new(policy, visibility, 256, 1);
        skewed(3, 50_000, 128, 2_000, 4).into_iter().for_each(|page| {
            near.access(page);
        });
        // Another working set, which does not fit.
        for page in skewed(4, 200_000, 512, 1_000_000, 4) {
            near.access(page + 10_000);
        }
        let stale = (0..128).filter(|&page| near.is_near(page)).count();
        assert_eq!(stale, 0, "pages of a working set that is past are near");
    }

    /// Queues exist, and no state keeps a page for ever.
    fn check_actions<P: ReplacementPolicy>(policy: &mut P) {
        for state in (0..=u8::MAX).map(PolicyState) {
            for distance in [None, Some(0), Some(40), Some(80), Some(1 << 40)] {
                let arrival = PageArrival { state, distance, capacity: 100, ahead: false };
                assert!(policy.on_arrival(&arrival).queue < P::QUEUES);
                assert!(policy.on_arrival(&PageArrival { ahead: true, ..arrival }).queue < P::QUEUES);
            }
            for mut queue in 0..P::QUEUES {
                let mut at = policy.on_use(state);
                let mut rounds = 0;
                while let CandidateAction::Keep(tail) = policy.on_candidate(queue, at) {
                    assert!(tail.queue < P::QUEUES);
                    (queue, at, rounds) = (tail.queue, tail.state, rounds + 1);
                    assert!(rounds <= 256, "state {state:?} never leaves");
                }
            }
        }
        for lengths in [[1, 0], [0, 1], [5, 5], [0, 9], [9, 0], [1, 99]] {
            let lengths = &lengths[..P::QUEUES];
            if lengths.iter().sum::<usize>() > 0 {
                let queue = policy.next_queue(lengths);
                assert!(lengths[queue] > 0, "queue {queue} of {lengths:?} is empty");
            }
        }
    }

    #[test]
    fn every_policy_keeps_the_contract() {
        check_policy(|| Fifo);
        check_policy(|| SecondChance);
        check_policy(|| Gclock);
        check_policy(|| S3Fifo);
        check_policy(Sieve::default);
    }

    #[test]
    fn gclock_sees_only_faults_and_comes_near_to_clock_which_sees_uses() {
        let trace = skewed(11, 400_000, 2_000, 8_000, 2);
        let clock = page_ins(SecondChance, Visibility::Uses, 4_000, &trace);
        let [gclock, marked, fifo] = [
            page_ins(Gclock, Visibility::Faults, 4_000, &trace),
            page_ins(SecondChance, Visibility::Faults, 4_000, &trace),
            page_ins(Fifo, Visibility::Faults, 4_000, &trace),
        ];
        assert!(gclock < marked && marked < fifo, "{gclock} page-ins, one mark {marked}, FIFO {fifo}");
        assert!(gclock * 100 <= clock * 110, "{gclock} page-ins, CLOCK {clock}");
    }

    #[test]
    fn a_scan_displaces_less_from_s3_fifo_than_from_clock() {
        let mut random = fastrand::Rng::with_seed(5);
        let trace: Vec<u32> =
            (0..200_000).map(|step| if step % 2 == 0 { random.u32(..300) } else { 300 + step / 2 }).collect();
        let clock = page_ins(SecondChance, Visibility::Uses, 400, &trace);
        let s3_fifo = page_ins(S3Fifo, Visibility::Uses, 400, &trace);
        assert!(s3_fifo * 2 < clock, "{s3_fifo} page-ins, CLOCK {clock}");
    }

    #[test]
    fn a_loop_that_does_not_fit_defeats_fifo_entirely() {
        let trace: Vec<u32> = (0..10).flat_map(|_| 0..1_000).collect();
        assert_eq!(page_ins(Fifo, Visibility::Faults, 900, &trace), 9_000);
        assert!(page_ins(Sieve::default(), Visibility::Uses, 900, &trace) <= 9_000);
    }
}
