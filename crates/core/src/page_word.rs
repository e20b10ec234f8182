//! The page word: where one page of transparent far memory is, as one atomic 64-bit word.
//!
//! ```text
//!  63          32 31        16 15      8 7      3 2   0
//! +--------------+------------+---------+--------+-----+
//! | left at or   | holds      | reuse   | flags  |state|
//! | epoch        |            |         |        |     |
//! +--------------+------------+---------+--------+-----+
//! ```
//!
//! Absent → Fetching → Near → Leaving → Far → Fetching → …; Absent means that the page is all zeros
//! and exists nowhere. Every transition is a pure function on a copy; the owner of the atomic runs
//! the compare-exchange. `holds` counts system calls that may touch the page right now: a held page
//! does not leave. The count survives every transition, because the page can be discarded while a
//! call is under way. `reuse` is what the replacement policy ([`Gclock`]) keeps of the page, near or
//! far.

use crate::cast::low_u8;
use crate::policy::replacement::{CandidateAction, Gclock, PageArrival, PolicyState, ReplacementPolicy};

/// State of a page: where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Nowhere: reads as zeros.
    Absent,
    /// Owned by a thread that brings it near or changes it: wait.
    Loading,
    /// Near.
    Near,
    /// On its way to the pool: wait.
    Evicting,
    /// In the pool.
    Far,
}

/// Action that a page fault has to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultAction {
    /// Near already: try the access again.
    Retry,
    /// In transition: wait, then look again.
    Wait,
    /// The caller now owns the page (Fetching) and provides zeros.
    Zero,
    /// The caller now owns the page (Fetching) and reads it from the pool.
    Read,
}

/// Word of one page of transparent far memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageWord(pub u64);

const STATE: u64 = 7;
const DIRTY: u64 = 1 << 3;
const STORED: u64 = 1 << 4;
const QUEUED: u64 = 1 << 5;
const SHARED: u64 = 1 << 7;
const REUSE_SHIFT: u32 = 8;
const REUSE_MASK: u64 = 0xFF << REUSE_SHIFT;
const HOLD_ONE: u64 = 1 << 16;
const HOLD_MASK: u64 = 0xFFFF << 16;
const HIGH_SHIFT: u32 = 32;

impl PageWord {
    /// Returns the state of the page.
    pub fn state(self) -> State {
        match self.0 & STATE {
            0 => State::Absent,
            1 => State::Loading,
            2 => State::Near,
            3 => State::Evicting,
            4 => State::Far,
            other => unreachable!("page state {other}"),
        }
    }
    fn with(self, state: State) -> PageWord {
        let bits = match state {
            State::Absent => 0,
            State::Loading => 1,
            State::Near => 2,
            State::Evicting => 3,
            State::Far => 4,
        };
        PageWord(self.0 & !STATE | bits)
    }
    fn set_high(self, value: u32) -> PageWord {
        PageWord(self.0 & 0xFFFF_FFFF | u64::from(value) << HIGH_SHIFT)
    }
    fn set_reuse(self, state: PolicyState) -> PageWord {
        PageWord(self.0 & !REUSE_MASK | u64::from(state.0) << REUSE_SHIFT)
    }
    fn set(self, bit: u64, on: bool) -> PageWord {
        if on { PageWord(self.0 | bit) } else { PageWord(self.0 & !bit) }
    }

    /// Checks whether the page is known to differ from its far copy. If not set, the kernel's
    /// written bit decides.
    pub fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }
    /// Checks whether the pool holds a copy, current or stale.
    pub fn is_stored(self) -> bool {
        self.0 & STORED != 0
    }
    /// Checks whether the page is in the eviction queue.
    pub fn is_queued(self) -> bool {
        self.0 & QUEUED != 0
    }
    /// Returns what the replacement policy keeps of the page.
    pub fn reuse(self) -> PolicyState {
        PolicyState(low_u8(self.0 >> REUSE_SHIFT))
    }
    /// Checks whether the kernel may replace the page's memory at the next write. So it is for the
    /// zero page, and for a page shared with another process since a fork.
    pub fn is_shared(self) -> bool {
        self.0 & SHARED != 0
    }
    /// Returns the number of system calls that may touch the page now.
    pub fn holds(self) -> u16 {
        ((self.0 & HOLD_MASK) >> 16) as u16
    }
    /// Returns the eviction count at the moment the page last left, modulo 2³². Not valid while the
    /// page is near.
    pub fn left_at(self) -> u32 {
        (self.0 >> HIGH_SHIFT) as u32
    }
    /// Returns the epoch in which the page arrived, as given to [`PageWord::finish_load`]; 0 for
    /// unknown. Valid only while the page is near.
    pub fn epoch(self) -> u32 {
        (self.0 >> HIGH_SHIFT) as u32
    }

    /// Decides what a thread that needs the page has to do.
    pub fn fault(self) -> (PageWord, FaultAction) {
        match self.state() {
            State::Near => (self, FaultAction::Retry),
            State::Loading | State::Evicting => (self, FaultAction::Wait),
            State::Absent => (self.with(State::Loading), FaultAction::Zero),
            State::Far => (self.with(State::Loading), FaultAction::Read),
        }
    }

    /// Returns what the replacement policy is told about a Fetching page that comes near. `now` is the
    /// eviction count, `capacity` the number of pages that can be near. `ahead`: nobody waits for the
    /// page.
    pub fn arrival(self, now: u32, capacity: u64, ahead: bool) -> PageArrival {
        assert!(self.state() == State::Loading);
        let distance = self.is_stored().then(|| u64::from(now.wrapping_sub(self.left_at())));
        PageArrival { state: self.reuse(), distance, capacity, ahead }
    }

    /// Makes a Fetching page Near; its owner has installed it. `dirty` unless it equals its far
    /// copy. `reuse` is the policy's state of the page from now on. `epoch` was current before the
    /// page could be written, 0 for unknown. The page must be put into the eviction queue if it was
    /// not in it (`is_queued` of the old word).
    pub fn finish_load(self, dirty: bool, reuse: PolicyState, epoch: u32) -> PageWord {
        assert!(self.state() == State::Loading);
        self.with(State::Near).set(SHARED, false).set(DIRTY, dirty).set_reuse(reuse).set(QUEUED, true).set_high(epoch)
    }

    /// Returns a Fetching page to where it was before the fault; its owner gives up.
    pub fn cancel_load(self) -> PageWord {
        assert!(self.state() == State::Loading && !self.is_dirty());
        if self.is_stored() { self.with(State::Far) } else { self.with(State::Absent) }
    }

    /// Makes a page Leaving that the eviction queue came to and has removed. `Err` if it does not
    /// leave: not near, held, or kept by the policy, unless that is overruled. The error has the word
    /// to store, and whether to queue the page again.
    pub fn begin_eviction(self, rule: PolicyRule) -> Result<PageWord, (PageWord, Requeue)> {
        if self.state() != State::Near {
            return Err((self.set(QUEUED, false), Requeue::No));
        }
        if self.holds() > 0 {
            // The page may stay for as long as a program waits, longer than epochs are unique.
            return Err((self.set_high(0), Requeue::Yes));
        }
        let reuse = match Gclock.on_candidate(0, self.reuse()) {
            CandidateAction::Keep(tail) if rule == PolicyRule::Applies => {
                return Err((self.set_reuse(tail.state), Requeue::Yes));
            }
            CandidateAction::Keep(tail) => tail.state,
            CandidateAction::Evict(state) => state,
        };
        Ok(self.with(State::Evicting).set(QUEUED, false).set_reuse(reuse))
    }

    /// Makes a Leaving page Near again that could not be taken (pinned by the kernel). It counts as
    /// dirty and must be queued again.
    pub fn cancel_eviction(self) -> PageWord {
        assert!(self.state() == State::Evicting);
        self.with(State::Near).set(DIRTY, true).set(QUEUED, true)
    }

    /// Makes a Leaving page Far: it is gone and its far copy is right. `now` is the eviction count.
    pub fn finish_eviction(self, now: u32) -> PageWord {
        assert!(self.state() == State::Evicting);
        self.with(State::Far).set(DIRTY, false).set(STORED, true).set_high(now)
    }

    /// Makes a Leaving page Absent: it was all zeros and is gone, so no far copy is needed.
    pub fn finish_zero_eviction(self) -> PageWord {
        assert!(self.state() == State::Evicting);
        self.with(State::Absent).set(DIRTY, false).set(STORED, false)
    }

    /// Takes ownership (Fetching) of a page that the program gave up or replaced, while near and
    /// far copy are discarded. `None` while another thread owns it. Takes Absent pages too, so that
    /// nobody brings them meanwhile.
    pub fn seize(self) -> Option<PageWord> {
        match self.state() {
            State::Loading | State::Evicting => None,
            State::Absent | State::Near | State::Far => Some(self.with(State::Loading)),
        }
    }

    /// Makes a seized page Absent.
    pub fn discarded(self) -> PageWord {
        assert!(self.state() == State::Loading);
        self.with(State::Absent).set(DIRTY, false).set(STORED, false).set_reuse(PolicyState::default())
    }

    /// Makes an Absent page Near that was found near although nobody brought it. The kernel did
    /// that, before faults were ours. `None` in all other states.
    pub fn found(self) -> Option<PageWord> {
        match self.state() {
            State::Absent => Some(self.with(State::Near).set(DIRTY, true).set(QUEUED, true).set(SHARED, true)),
            _ => None,
        }
    }

    /// Clears the queued mark of a page whose entry was swept out of the eviction queue. Not for
    /// near pages.
    pub fn unqueued(self) -> PageWord {
        assert!(self.state() != State::Near);
        self.set(QUEUED, false)
    }

    /// Marks the page as shared after a fork, until it is written. In the child the kernel has also
    /// forgotten whether the page was clean (`forgotten`).
    pub fn forked(self, forgotten: bool) -> PageWord {
        self.set(SHARED, true).set(DIRTY, self.is_dirty() || forgotten)
    }

    /// Adds a hold for a system call that may touch the page. Only a near page can be held; `None`
    /// otherwise, or if the count is full.
    pub fn hold(self) -> Option<PageWord> {
        (self.state() == State::Near && self.0 & HOLD_MASK != HOLD_MASK).then(|| PageWord(self.0 + HOLD_ONE))
    }

    /// Removes a hold.
    pub fn release(self) -> PageWord {
        assert!(self.holds() > 0);
        PageWord(self.0 - HOLD_ONE)
    }
}

/// Tells whether the replacement policy may keep a candidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyRule {
    /// It may.
    Applies,
    /// The candidate leaves whatever the policy says, because it has kept too many others.
    Overruled,
}

/// Tells whether a page goes back into the eviction queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Requeue {
    /// Yes, at the tail.
    Yes,
    /// No.
    No,
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    fn next(word: PageWord) -> Vec<PageWord> {
        let mut next = vec![word.fault().0];
        next.extend(word.seize());
        next.extend(word.found());
        next.extend(word.hold().filter(|w| w.holds() <= 2));
        for rule in [PolicyRule::Applies, PolicyRule::Overruled] {
            match word.begin_eviction(rule) {
                Ok(left) => next.push(left),
                Err((kept, _)) => next.push(kept),
            }
        }
        if word.holds() > 0 {
            next.push(word.release());
        }
        match word.state() {
            State::Loading => {
                for bits in 0..8u8 {
                    // The weights 0 and 2; all others come down to them.
                    let state = PolicyState(if bits & 2 != 0 { 2 << 5 | 2 } else { 0 });
                    next.push(word.finish_load(bits & 1 != 0, state, u32::from(bits >> 2)));
                }
                next.push(word.discarded());
                if !word.is_dirty() {
                    next.push(word.cancel_load());
                }
            }
            State::Evicting => {
                next.extend([
                    word.cancel_eviction(),
                    word.finish_eviction(0),
                    word.finish_eviction(7),
                    word.finish_zero_eviction(),
                ]);
            }
            State::Near => next.extend([word.forked(false), word.forked(true)]),
            State::Absent | State::Far => next.push(word.unqueued()),
        }
        next
    }

    /// All words reachable from Absent by any sequence of transitions, with up to two holds.
    fn reachable() -> Vec<PageWord> {
        crate::words::reachable(PageWord(0), next)
    }

    #[test]
    fn invariants_hold_on_every_reachable_word() {
        let words = reachable();
        assert!(words.len() > 100);
        for word in words {
            match word.state() {
                State::Far => assert!(word.is_stored() && !word.is_dirty()),
                State::Absent => assert!(!word.is_stored() && !word.is_dirty()),
                State::Evicting => assert!(!word.is_queued()),
                State::Near => assert!(word.is_queued(), "a near page that no queue holds never leaves: {word:?}"),
                State::Loading => {}
            }
        }
    }

    #[test]
    fn an_owned_page_cannot_be_claimed() {
        for word in reachable() {
            if matches!(word.state(), State::Loading | State::Evicting) {
                assert_eq!(word.fault().1, FaultAction::Wait);
                assert!(word.seize().is_none());
                assert!(word.hold().is_none());
                assert!(word.begin_eviction(PolicyRule::Overruled).is_err());
            }
        }
    }

    #[test]
    fn near_pages_leave_when_their_weight_is_spent_or_the_policy_is_overruled() {
        for word in reachable().into_iter().filter(|word| word.state() == State::Near && word.holds() == 0) {
            let mut at = word;
            let mut visits = 0;
            while let Err((kept, requeue)) = at.begin_eviction(PolicyRule::Applies) {
                assert_eq!(requeue, Requeue::Yes);
                (at, visits) = (kept, visits + 1);
                assert!(visits <= 16, "{word:?} stays for ever");
            }
            let left = word.begin_eviction(PolicyRule::Overruled).expect("nothing else keeps it");
            assert_eq!(left.state(), State::Evicting);
        }
    }

    #[test]
    fn the_past_of_a_page_survives_its_absence_and_ends_with_its_contents() {
        let state = PolicyState(3 << 5 | 4);
        let loading = PageWord(0).fault().0;
        let near = loading.finish_load(true, state, 0);
        let far = near.begin_eviction(PolicyRule::Overruled).expect("near").finish_eviction(40);
        let back = far.fault().0;
        let arrival = back.arrival(57, 100, false);
        assert_eq!((arrival.state, arrival.distance), (PolicyState(3 << 5 | 3), Some(17)));
        assert_eq!(back.arrival(10, 100, true).distance, Some(u64::from(10u32.wrapping_sub(40))));
        let discarded = back.cancel_load().seize().expect("far").discarded();
        assert_eq!((discarded.state(), discarded.reuse()), (State::Absent, PolicyState::default()));
        assert_eq!(loading.arrival(9, 100, false).distance, None, "a page of zeros comes from nowhere");
    }

    #[test]
    fn held_pages_stay_and_holds_are_never_lost() {
        for word in reachable() {
            if word.holds() > 0 {
                assert!(word.begin_eviction(PolicyRule::Overruled).is_err());
            }
            for next in [Some(word.fault().0), word.seize(), word.found()].into_iter().flatten() {
                assert_eq!(next.holds(), word.holds());
            }
            if let Some(held) = word.hold() {
                assert_eq!(held.release().holds(), word.holds());
            }
        }
    }
}
