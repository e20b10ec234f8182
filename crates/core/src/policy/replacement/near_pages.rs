//! Model of near memory under a replacement policy, for comparing policies on traces.

use super::{CANDIDATES_PER_VICTIM, CandidateAction, PageArrival, PolicyState, QueueTail, ReplacementPolicy};
use crate::cast::usize_of;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// What a policy learns of the uses of near pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Visibility {
    /// Nothing: only faults are seen, as in the pager.
    Faults,
    /// Every use, as by accessed bits or in a cache.
    Uses,
}

/// Page of the model.
#[derive(Clone, Copy, Default)]
struct ModelPage {
    state: PolicyState,
    is_near: bool,
    /// Number of evictions when the page left, that one included; 0 if it never did.
    left_at: u64,
}

/// Near memory of bounded size, under a policy.
pub struct NearPages<P> {
    policy: P,
    visibility: Visibility,
    capacity: usize,
    batch: usize,
    pages: Vec<ModelPage>,
    queues: Vec<VecDeque<u32>>,
    len: usize,
    page_ins: u64,
    evictions: u64,
    candidates: u64,
}

impl<P: ReplacementPolicy> NearPages<P> {
    /// Creates near memory with room for `capacity` pages, which leave in batches of `batch`.
    pub fn new(policy: P, visibility: Visibility, capacity: usize, batch: usize) -> NearPages<P> {
        assert!(batch >= 1 && batch < capacity, "a batch is less than all near pages");
        let queues = (0..P::QUEUES).map(|_| VecDeque::new()).collect();
        let (pages, len, page_ins, evictions, candidates) = (Vec::new(), 0, 0, 0, 0);
        NearPages { policy, visibility, capacity, batch, pages, queues, len, page_ins, evictions, candidates }
    }

    /// Returns the number of near pages.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether no page is near.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns how often a page came back that had left. First uses are not counted.
    pub fn page_ins(&self) -> u64 {
        self.page_ins
    }

    /// Returns how many pages have left.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Returns how many candidates were looked at.
    pub fn candidates(&self) -> u64 {
        self.candidates
    }

    /// Checks whether a page is near.
    pub fn is_near(&self, page: u32) -> bool {
        self.pages.get(usize_of(page.into())).is_some_and(|page| page.is_near)
    }

    /// Uses a page. Returns whether it was near.
    pub fn access(&mut self, page: u32) -> bool {
        let index = usize_of(page.into());
        if index >= self.pages.len() {
            self.pages.resize(index + 1, ModelPage::default());
        }
        let known = self.pages[index];
        if known.is_near {
            if self.visibility == Visibility::Uses {
                self.pages[index].state = self.policy.on_use(known.state);
            }
            return true;
        }
        if self.len == self.capacity {
            self.evict();
        }
        let has_left = known.left_at > 0;
        self.page_ins += u64::from(has_left);
        let arrival = PageArrival {
            state: known.state,
            distance: has_left.then(|| self.evictions - known.left_at),
            capacity: self.capacity as u64,
            ahead: false,
        };
        let tail = self.policy.on_arrival(&arrival);
        self.pages[index].is_near = true;
        self.len += 1;
        self.enqueue(page, tail);
        false
    }

    fn enqueue(&mut self, page: u32, tail: QueueTail) {
        self.pages[usize_of(page.into())].state = tail.state;
        self.queues[tail.queue].push_back(page);
    }

    /// Evicts one batch. All near pages are in a queue, so that a victim is always found.
    fn evict(&mut self) {
        let mut looks = 0;
        let mut victims = 0;
        while victims < self.batch {
            let mut lengths = [0; 8];
            self.queues.iter().zip(&mut lengths).for_each(|(queue, len)| *len = queue.len());
            let queue = self.policy.next_queue(&lengths[..P::QUEUES]);
            let page = self.queues[queue].pop_front().expect("the policy names a queue that is not empty");
            looks += 1;
            let at = &mut self.pages[usize_of(page.into())];
            match self.policy.on_candidate(queue, at.state) {
                CandidateAction::Keep(tail) if looks <= self.batch * CANDIDATES_PER_VICTIM => self.enqueue(page, tail),
                CandidateAction::Evict(state) | CandidateAction::Keep(QueueTail { state, .. }) => {
                    self.evictions += 1;
                    *at = ModelPage { state, is_near: false, left_at: self.evictions };
                    self.len -= 1;
                    victims += 1;
                }
            }
        }
        self.candidates += looks as u64;
    }
}
