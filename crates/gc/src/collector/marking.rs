//! What a cycle and the mutators share while objects are marked.
//!
//! The snapshot is the graph of objects at the first stop. Whoever removes a strong reference marks
//! and logs the object that it led to, so each object of the snapshot is traced although the graph
//! changes (Yuasa's deletion barrier; snapshot at the beginning). Whoever finds an object by a weak
//! reference does the same. An object is logged once in a cycle.

use crate::entries::{EntryBits, EntryTable, WORDS_PER_PAGE};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::gc::ENTRIES_PER_PAGE;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Marks of one cycle.
pub(crate) struct Marking {
    /// For each entry page that there was at the first stop.
    pages: Box<[PageMarks]>,
    /// Entries that mutators have marked, and whose objects nobody has looked at.
    log: Mutex<Vec<u32>>,
    /// Tells the collector that something was logged, if it is hungry.
    is_shared: Condvar,
    /// Whether the collector has nothing else to look at; a hint.
    is_hungry: AtomicBool,
    /// Whether mutators log what they bring near, too.
    logs_arrivals: bool,
    is_over: AtomicBool,
}

struct PageMarks {
    /// Entries that were in use at the first stop.
    old: EntryBits,
    marks: [AtomicU64; WORDS_PER_PAGE],
}

impl Marking {
    /// Begins to mark, while all mutators are stopped. They log the objects that they bring near, if
    /// the collector looks at objects in their order.
    pub(crate) fn begin(entries: &EntryTable, logs_arrivals: bool) -> Marking {
        let marks = |page| PageMarks { old: entries.bits_of(page), marks: [const { AtomicU64::new(0) }; _] };
        Marking {
            pages: (0..entries.made()).map(marks).collect(),
            log: Mutex::default(),
            is_shared: Condvar::new(),
            is_hungry: AtomicBool::new(false),
            logs_arrivals,
            is_over: AtomicBool::new(false),
        }
    }

    /// Returns the near memory that the marks of these entries take, in bytes.
    pub(crate) fn near_bytes(entries: &EntryTable) -> usize {
        entries.made() * size_of::<PageMarks>()
    }

    fn log_list(&self) -> MutexGuard<'_, Vec<u32>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the marks of the entry's page, the index of its word there, and its bit; `None` if
    /// the object is younger than the snapshot.
    fn locate(&self, entry: u32) -> Option<(&PageMarks, usize, u64)> {
        let page = self.pages.get((entry / ENTRIES_PER_PAGE) as usize)?;
        let within = (entry % ENTRIES_PER_PAGE) as usize;
        let (word, bit) = (within / 64, 1 << (within % 64));
        (page.old[word] & bit != 0).then_some((page, word, bit))
    }

    /// Checks whether the object of this entry is in the snapshot.
    pub(crate) fn is_old(&self, entry: u32) -> bool {
        self.locate(entry).is_some()
    }

    /// Marks an object. True if it is in the snapshot and was not marked: then the caller looks at
    /// it, or logs it.
    #[inline]
    pub(crate) fn mark(&self, entry: u32) -> bool {
        let Some((page, word, bit)) = self.locate(entry) else { return false };
        // Most are marked already, and need no exclusive cache line.
        page.marks[word].load(Ordering::Relaxed) & bit == 0
            && page.marks[word].fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Returns the entries of a page that live, of those that are in use: what is marked, and what
    /// is younger than the snapshot.
    pub(crate) fn live(&self, page: usize, used: EntryBits) -> EntryBits {
        match self.pages.get(page) {
            Some(marked) => {
                core::array::from_fn(|word| marked.marks[word].load(Ordering::Relaxed) | used[word] & !marked.old[word])
            }
            None => used,
        }
    }

    /// Hands the entries that a mutator has logged to the collector.
    pub(crate) fn share(&self, logged: &mut Vec<u32>) {
        if !self.is_over() {
            self.log_list().append(logged);
            if self.is_hungry() {
                self.is_shared.notify_one();
            }
        }
        logged.clear();
    }

    /// Waits until mutators have logged something, this long at most.
    pub(crate) fn wait_for_log(&self, time: Duration) {
        let log = self.log_list();
        self.is_hungry.store(log.is_empty(), Ordering::Relaxed);
        drop(self.is_shared.wait_timeout_while(log, time, |log| log.is_empty()));
    }

    /// Takes what mutators have logged.
    pub(crate) fn take_log(&self, into: &mut Vec<u32>) {
        into.append(&mut self.log_list());
        self.is_hungry.store(into.is_empty(), Ordering::Relaxed);
    }

    /// Checks whether mutators log what they bring near.
    pub(crate) fn logs_arrivals(&self) -> bool {
        self.logs_arrivals
    }

    /// Checks whether the collector waits for what mutators have logged.
    #[inline]
    pub(crate) fn is_hungry(&self) -> bool {
        self.is_hungry.load(Ordering::Relaxed)
    }

    /// Ends the cycle: nobody logs any more.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.log_list().clear();
    }

    /// Checks whether the cycle has ended.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against objects that are marked by nobody, or twice.
    use super::*;

    #[test]
    fn what_is_marked_or_younger_than_the_snapshot_lives() {
        let table = EntryTable::new(4);
        assert!(table.add(10).is_some() && table.add(11).is_some());
        let mut used = [[0; WORDS_PER_PAGE]; 3];
        used[0][0] = 0b1111;
        used[1][7] = 1 << 63;
        table.replace_bits(|page, _| used[page]);
        let marking = Marking::begin(&table, false);
        assert!(marking.mark(2) && !marking.mark(2) && marking.is_old(1023) && !marking.mark(4));
        // 4 and all of the third page were made since.
        assert!(table.add(12).is_some());
        used[0][0] |= 1 << 4;
        used[2][0] = 7;
        assert_eq!(marking.live(0, used[0])[0], 0b10100);
        assert_eq!(marking.live(1, used[1])[7], 0);
        assert_eq!(marking.live(2, used[2]), used[2]);
    }

    #[test]
    fn what_is_logged_arrives_once_and_not_after_the_end() {
        let marking = Marking::begin(&EntryTable::new(1), false);
        let (mut logged, mut stack) = (vec![5, 6], Vec::new());
        marking.share(&mut logged);
        assert!(logged.is_empty());
        marking.take_log(&mut stack);
        assert!(stack == [5, 6] && !marking.is_hungry());
        stack.clear();
        marking.take_log(&mut stack);
        assert!(stack.is_empty() && marking.is_hungry());
        marking.end();
        marking.share(&mut vec![7]);
        marking.take_log(&mut stack);
        assert!(stack.is_empty() && marking.is_over());
    }
}
