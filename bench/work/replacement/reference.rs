//! Policies to compare with, which need more than queues and a byte per page.

use std::collections::{BinaryHeap, VecDeque};

/// Least recently used, exactly. A page's entries in the queue are stale but for its last.
pub(super) struct Lru {
    /// Number of the last use of each page, from 1 on; 0: none.
    last: Vec<u64>,
    is_near: Vec<bool>,
    queue: VecDeque<(u32, u64)>,
    near: usize,
    page_ins: u64,
    uses: u64,
}

impl Lru {
    /// Page-ins of a trace: returns of pages, without first uses.
    pub(super) fn page_ins_of(pages: impl Iterator<Item = u32>, capacity: usize) -> u64 {
        let (last, is_near) = (Vec::new(), Vec::new());
        let mut lru = Lru { last, is_near, queue: VecDeque::new(), near: 0, page_ins: 0, uses: 0 };
        pages.for_each(|page| lru.access(page, capacity));
        lru.page_ins
    }

    fn access(&mut self, page: u32, capacity: usize) {
        let index = page as usize;
        if index >= self.last.len() {
            self.last.resize(index + 1, 0);
            self.is_near.resize(index + 1, false);
        }
        self.uses += 1;
        if !self.is_near[index] {
            self.page_ins += u64::from(self.last[index] > 0);
            if self.near == capacity {
                self.evict();
            }
            self.is_near[index] = true;
            self.near += 1;
        }
        self.last[index] = self.uses;
        self.queue.push_back((page, self.uses));
        // Stale entries go when they are most.
        if self.queue.len() > 4 * capacity + 64 {
            self.queue.retain(|&(page, use_number)| self.last[page as usize] == use_number);
        }
    }

    fn evict(&mut self) {
        while let Some((page, use_number)) = self.queue.pop_front() {
            if self.last[page as usize] == use_number {
                self.is_near[page as usize] = false;
                self.near -= 1;
                return;
            }
        }
        unreachable!("each near page has its last use in the queue");
    }
}

/// Page-ins of the best policy that there can be (Belady 1966): the page leaves whose next use is farthest.
pub(super) fn belady_page_ins(trace: &[u32], capacity: usize) -> u64 {
    const NEVER: usize = usize::MAX;
    let count = trace.iter().max().map_or(0, |&last| last as usize + 1);
    let mut next_of = vec![NEVER; trace.len()];
    let mut next = vec![NEVER; count];
    for (at, &page) in trace.iter().enumerate().rev() {
        next_of[at] = std::mem::replace(&mut next[page as usize], at);
    }
    let (mut was_used, mut next_use, mut near) = (vec![false; count], vec![None; count], 0);
    let mut heap = BinaryHeap::new();
    let mut page_ins = 0;
    for (at, &page) in trace.iter().enumerate() {
        let index = page as usize;
        if next_use[index].is_none() {
            page_ins += u64::from(was_used[index]);
            was_used[index] = true;
            near += 1;
            while near > capacity {
                let (use_at, victim): (usize, u32) = heap.pop().expect("each near page is in the heap");
                if next_use[victim as usize] == Some(use_at) {
                    next_use[victim as usize] = None;
                    near -= 1;
                }
            }
        }
        next_use[index] = Some(next_of[at]);
        heap.push((next_of[at], page));
    }
    page_ins
}

/// FIFO whose oldest tenth is unmapped but still in memory (Turner and Levy, SIGMETRICS 1981). A use of such a page is a soft
/// fault, after which it is the newest.
pub(super) struct SegmentedFifo {
    capacity: usize,
    segment: usize,
    /// Queue of each page, and the number of its entry there.
    places: Vec<(Place, u64)>,
    mapped: VecDeque<u32>,
    unmapped: VecDeque<(u32, u64)>,
    unmapped_len: usize,
    page_ins: u64,
    soft_faults: u64,
    accesses: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Mapped,
    Unmapped,
    Far,
}

impl SegmentedFifo {
    pub(super) fn new(capacity: usize) -> SegmentedFifo {
        SegmentedFifo {
            capacity,
            segment: (capacity / 10).max(1),
            places: Vec::new(),
            mapped: VecDeque::new(),
            unmapped: VecDeque::new(),
            unmapped_len: 0,
            page_ins: 0,
            soft_faults: 0,
            accesses: 0,
        }
    }

    pub(super) fn page_ins(&self) -> u64 {
        self.page_ins
    }

    pub(super) fn soft_faults(&self) -> u64 {
        self.soft_faults
    }

    pub(super) fn access(&mut self, page: u32) {
        let index = page as usize;
        if index >= self.places.len() {
            self.places.resize(index + 1, (Place::Nowhere, 0));
        }
        self.accesses += 1;
        match self.places[index].0 {
            Place::Mapped => return,
            Place::Unmapped => {
                self.soft_faults += 1;
                self.unmapped_len -= 1;
            }
            Place::Nowhere | Place::Far => {
                self.page_ins += u64::from(self.places[index].0 == Place::Far);
                if self.mapped.len() + self.unmapped_len == self.capacity {
                    self.evict();
                }
            }
        }
        self.places[index] = (Place::Mapped, self.accesses);
        self.mapped.push_back(page);
        if self.mapped.len() > self.capacity - self.segment {
            let oldest = self.mapped.pop_front().expect("not empty");
            self.places[oldest as usize] = (Place::Unmapped, self.accesses);
            self.unmapped.push_back((oldest, self.accesses));
            self.unmapped_len += 1;
        }
    }

    fn evict(&mut self) {
        while let Some((page, entry)) = self.unmapped.pop_front() {
            if self.places[page as usize] == (Place::Unmapped, entry) {
                self.places[page as usize] = (Place::Far, 0);
                self.unmapped_len -= 1;
                return;
            }
        }
        unreachable!("the last segment is full when memory is");
    }
}
