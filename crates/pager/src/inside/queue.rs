//! The eviction queue: near pages in the order of their arrival, a ring of page numbers.
//!
//! Whether a page is in the ring is a bit of its word, so each page is in it at most once. Entries
//! of pages that were discarded stay until they come up or the ring is swept.

use farfield_core::PageId;
use farfield_os::{Result, memory};

/// Ring of page numbers.
pub struct PageQueue {
    ring: usize,
    capacity: usize,
    head: usize,
    len: usize,
}

impl PageQueue {
    /// Creates a queue without room.
    pub const fn empty() -> PageQueue {
        PageQueue { ring: 0, capacity: 0, head: 0, len: 0 }
    }

    /// Makes room for `capacity` entries.
    pub fn reserve(&mut self, capacity: usize) -> Result<()> {
        assert!(self.len == 0);
        self.ring = memory::map_anonymous(capacity * 4)?;
        self.capacity = capacity;
        Ok(())
    }

    fn slot(&self, index: usize) -> *mut u32 {
        let at = (self.head + index) % self.capacity;
        (self.ring + at * 4) as *mut u32
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a page. When the ring is full, sweeps out entries that `is_stale` names, and grows
    /// the ring when that is not enough.
    pub fn push(&mut self, page: PageId, mut is_stale: impl FnMut(PageId) -> bool) {
        if self.len == self.capacity {
            let len = self.len;
            for _ in 0..len {
                let page = self.pop().expect("not empty");
                if !is_stale(page) {
                    self.append(page);
                }
            }
            if self.len > self.capacity * 7 / 8 {
                self.grow();
            }
        }
        self.append(page);
    }

    fn grow(&mut self) {
        let mut larger = PageQueue::empty();
        if larger.reserve(self.capacity * 2).is_err() {
            return;
        }
        while let Some(page) = self.pop() {
            larger.append(page);
        }
        // SAFETY: the old ring is not used any more.
        let _ = unsafe { memory::munmap(self.ring, self.capacity * 4) };
        *self = larger;
    }

    fn append(&mut self, page: PageId) {
        assert!(self.len < self.capacity, "the eviction queue has room");
        // SAFETY: inside the ring.
        unsafe { self.slot(self.len).write(page.0 as u32) };
        self.len += 1;
    }

    /// Removes and returns the oldest entry.
    pub fn pop(&mut self) -> Option<PageId> {
        if self.len == 0 {
            return None;
        }
        // SAFETY: inside the ring.
        let page = unsafe { self.slot(0).read() };
        self.head = (self.head + 1) % self.capacity;
        self.len -= 1;
        Some(PageId(u64::from(page)))
    }

    /// Returns the `index`-th oldest entry.
    pub fn peek(&self, index: usize) -> Option<PageId> {
        // SAFETY: inside the ring.
        (index < self.len).then(|| PageId(u64::from(unsafe { self.slot(index).read() })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_kept_and_stale_entries_make_room() {
        let mut queue = PageQueue::empty();
        queue.reserve(64).unwrap();
        for page in 0..64 {
            queue.push(PageId(page), |_| false);
        }
        // Full: odd pages are stale.
        queue.push(PageId(100), |page| page.0 % 2 == 1);
        let order: Vec<u64> = core::iter::from_fn(|| queue.pop()).map(|page| page.0).collect();
        let expected: Vec<u64> = (0..64).step_by(2).chain([100]).collect();
        assert_eq!(order, expected);
        // Nothing stale: it grows.
        for page in 0..200 {
            queue.push(PageId(page), |_| false);
        }
        assert_eq!(queue.len(), 200);
        assert_eq!(queue.peek(199), Some(PageId(199)));
    }
}
