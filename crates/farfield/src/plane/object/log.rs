//! Log pages: which are free, which objects live in them, and when they may be used again.

use super::holes::Holes;
use super::tags::{PageTags, TagTable};
use super::{ObjectId, ThreadObjects};
use crate::error::{BuildError, FarError};
use crate::heap::{HeapInner, ReservedArray, TransferUnit};
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{IngressPath, LogClass, LogWord, SEGMENT_PAGES};
use farfield_os::memory::load_ahead;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// All log pages of a heap.
pub(crate) struct LogPages {
    /// Log words, one per page of the heap, in use or not.
    words: ReservedArray<AtomicU32>,
    /// Number of log pages that there are.
    count: AtomicU32,
    /// Number of log pages that were opened, so far.
    opened: AtomicU32,
    /// Number of log pages in use. The next field counts those of them that come whole next time.
    in_use: AtomicU32,
    by_page: AtomicU32,
    pub(super) tag_table: TagTable,
    pub(super) holes: Holes,
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    /// Pages that are Empty and that no scope can remember: those without room for tags aside, and
    /// those with.
    free: [Vec<u32>; 2],
    /// Pages that are Empty, but an open scope may have read a handle when it said that the object
    /// is there.
    retired: Vec<u32>,
    /// Pages that were retired before an epoch began, oldest first. They are free when every scope
    /// that was open then is over.
    aging: VecDeque<(u64, Vec<u32>)>,
}

/// Number of retired pages from which it is worth checking whether they are free by now, before new
/// far addresses are used.
const RETIRED_MANY: usize = 64;

impl LogPages {
    pub(super) fn new(pages: u32, near: u64) -> Result<LogPages, BuildError> {
        Ok(LogPages {
            words: ReservedArray::new(pages as usize)?,
            count: AtomicU32::new(0),
            opened: AtomicU32::new(0),
            in_use: AtomicU32::new(0),
            by_page: AtomicU32::new(0),
            tag_table: TagTable::new(pages)?,
            holes: Holes::new(near),
            lists: Mutex::new(Lists::default()),
        })
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn table_bytes(&self, high_page: u32) -> u64 {
        let words = (u64::from(high_page) * size_of::<LogWord>() as u64).next_multiple_of(PAGE_BYTES as u64);
        // A page is in one list at most, and lists grow by doubling.
        let lists = u64::from(self.count.load(Ordering::Relaxed)) * 2 * size_of::<u32>() as u64;
        words + lists + self.holes.table_bytes() + self.tag_table.table_bytes(high_page)
    }

    /// Returns the number of log pages that were opened, so far, modulo 2^32.
    pub(crate) fn opened(&self) -> u32 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Returns the number of pages in use, near or far, and how many of them come whole next time.
    pub(crate) fn in_use(&self) -> (u32, u32) {
        (self.in_use.load(Ordering::Relaxed), self.by_page.load(Ordering::Relaxed))
    }

    /// Returns the number of pages that are not in use.
    pub(crate) fn unused_count(&self) -> usize {
        let lists = self.lists();
        lists.free.iter().map(Vec::len).sum::<usize>()
            + lists.retired.len()
            + lists.aging.iter().map(|(_, pages)| pages.len()).sum::<usize>()
    }

    /// Prefetches the word of the page, which is read soon, into the processor's cache.
    #[inline]
    pub(crate) fn load_ahead(&self, page: u32) {
        load_ahead(&self.words[page]);
    }

    /// Returns the word of the page, which counts its objects.
    pub(crate) fn word(&self, page: u32) -> LogWord {
        // SeqCst: a thread that finds a page dead must not believe an old count.
        LogWord(self.words[page].load(Ordering::SeqCst))
    }

    pub(super) fn update<R>(&self, page: u32, transition: impl Fn(LogWord) -> (LogWord, R)) -> R {
        let word = &self.words[page];
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let (next, result) = transition(LogWord(seen));
            match word.compare_exchange(seen, next.0, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return result,
                Err(now) => seen = now,
            }
        }
    }

    /// Counts an object that will live in the page, which the caller has open. `coming`: it is on
    /// its way.
    pub(super) fn enter(&self, page: u32, coming: bool) {
        self.update(page, |word| (if coming { word.expect() } else { word.add() }, ()));
    }

    /// Checks whether objects are on their way to the page. If so, it must not leave.
    pub(crate) fn has_arriving(&self, page: u32) -> bool {
        self.word(page).coming() > 0
    }

    /// Counts the departure of an object from a page that is the caller's (Claimed). Returns true
    /// if it was the last: the page is dead, and the caller's to [retire](LogPages::retire).
    pub(super) fn leave(&self, page: u32) -> bool {
        self.update(page, LogWord::remove)
    }

    /// Lets the caller take objects out of the page, which stays Far if it is. False if it comes
    /// near at this moment, or is dead.
    pub(crate) fn begin_departure(&self, page: u32) -> bool {
        self.update(page, |word| word.go().map_or((word, false), |next| (next, true)))
    }

    /// Makes the page the caller's to fill again; the caller keeps it near. Returns the word as it
    /// was, or `None` if the page is of another class, is not worth filling, or is in other hands.
    pub(super) fn reopen(&self, page: u32, class: LogClass) -> Option<LogWord> {
        self.update(page, |word| {
            let reopened = word.reopened().filter(|_| word.class() == Some(class) && word.is_worth_filling());
            reopened.map_or((word, None), |next| (next, Some(word)))
        })
    }

    /// Counts the end of an object of a page that is not being emptied. Returns true if the page is
    /// dead by that.
    fn lose(&self, page: u32) -> bool {
        let (word, died) = self.update(page, |word| {
            let (next, died) = word.remove();
            (next, (next, died))
        });
        if let Some(class) = word.class()
            && word.live() == class.worth_filling()
        {
            self.note_holes(page, word);
        }
        died
    }

    /// Notes the holes of this page, if they are worth filling.
    fn note_holes(&self, page: u32, word: LogWord) {
        if let Some(class) = word.class()
            && !word.is_open()
            && word.is_worth_filling()
        {
            self.holes.note(page, class);
        }
    }

    /// Notes that the page, which is the caller's (Claimed), leaves, and the path by which its
    /// objects will come.
    pub(super) fn send(&self, page: u32, path: IngressPath) {
        // Incremented before the word says so, and decremented after: the count is never below
        // zero.
        if path == IngressPath::Page {
            self.by_page.fetch_add(1, Ordering::Relaxed);
        }
        self.uncount_whole_page(self.update(page, |word| (word.leave(path), word)));
    }

    /// Removes a page from the count of those that come whole, if its word before says that it is
    /// one.
    fn uncount_whole_page(&self, before: LogWord) {
        if before.path() == IngressPath::Page {
            self.by_page.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Retires the page, which is Empty and not in use.
    pub(crate) fn retire(&self, page: u32) {
        self.uncount_whole_page(LogWord(self.words[page].swap(LogWord::UNUSED.0, Ordering::SeqCst)));
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        self.lists().retired.push(page);
    }

    /// Returns the object of this index in a near page of this class, by its tag. For the verifier.
    ///
    /// # Safety
    /// The page's bytes are at this address, and nobody writes them.
    pub(crate) unsafe fn tagged(&self, page: u32, class: LogClass, index: u32, bytes: *const u8) -> Option<ObjectId> {
        // SAFETY: passed on to the caller.
        unsafe { PageTags::new(&self.tag_table, page, class).get(bytes, index) }
    }

    /// Returns the pages that are not in use, for the verifier.
    pub(crate) fn unused(&self) -> Vec<u32> {
        let lists = self.lists();
        let aging = lists.aging.iter().flat_map(|(_, pages)| pages);
        lists.free.iter().flatten().chain(&lists.retired).chain(aging).copied().collect()
    }
}

impl HeapInner {
    /// Opens a log page for the caller to fill. Fails if all far addresses are in use.
    pub(super) fn open_log(&self, log: &LogPages, class: LogClass) -> Result<u32, FarError> {
        let kind = usize::from(class.has_tags_aside());
        let free = |log: &LogPages| log.lists().free[kind].pop();
        let is_many = log.lists().retired.len() >= RETIRED_MANY;
        let mut page = free(log);
        if page.is_none() && is_many {
            self.recycle_log(log);
            page = free(log);
        }
        let page = match page {
            Some(page) => page,
            None => match self.segments.take_log() {
                Ok(first) => {
                    // Pages are taken from the end, so neighbours come in this order.
                    log.count.fetch_add(SEGMENT_PAGES, Ordering::Relaxed);
                    log.lists().free[kind].extend((first + 1..first + SEGMENT_PAGES).rev());
                    self.fit();
                    first
                }
                Err(error) => {
                    self.recycle_log(log);
                    free(log).or_else(|| log.lists().free[1 - kind].pop()).ok_or(error)?
                }
            },
        };
        if class.has_tags_aside() && log.tag_table.make_room(page) {
            self.fit();
        }
        log.in_use.fetch_add(1, Ordering::Relaxed);
        log.words[page].store(LogWord::opened(class).0, Ordering::SeqCst);
        log.opened.fetch_add(1, Ordering::Relaxed);
        Ok(page)
    }

    /// Makes retired pages free when every scope that was open then is over. Such a scope may have
    /// read a handle that named them (epoch-based reclamation).
    pub(crate) fn recycle_log(&self, log: &LogPages) {
        let mut lists = log.lists();
        if !lists.retired.is_empty() {
            let (epoch, retired) = (self.next_epoch(), core::mem::take(&mut lists.retired));
            lists.aging.push_back((epoch, retired));
        }
        while let Some(epoch) = lists.aging.front().map(|(epoch, _)| *epoch) {
            // Threads have a lock of their own.
            drop(lists);
            let is_over = self.threads.is_over(epoch);
            lists = log.lists();
            if !is_over {
                break;
            }
            // Another thread may have taken the entry meanwhile.
            if lists.aging.front().is_some_and(|(first, _)| *first == epoch)
                && let Some((_, pages)) = lists.aging.pop_front()
            {
                pages.into_iter().for_each(|page| lists.free[usize::from(log.tag_table.has_room(page))].push(page));
            }
        }
    }

    /// Closes the page: its owner does not fill it any more.
    pub(super) fn close_log(&self, log: &LogPages, page: u32) {
        let (word, died) = log.update(page, |word| {
            let (next, died) = word.closed();
            (next, (next, died))
        });
        log.note_holes(page, word);
        if died {
            self.retire_log(log, page);
        }
    }

    /// Counts the end of the caller's object, which lived in the page.
    pub(super) fn lose_log(&self, log: &LogPages, page: u32) {
        if log.lose(page) {
            self.retire_log(log, page);
        }
    }

    /// Counts the departure of an object from the page.
    pub(super) fn leave_log(&self, log: &LogPages, page: u32) {
        if log.update(page, LogWord::remove) {
            self.retire_log(log, page);
        }
    }

    /// Ends the wait of the page for an object that has come, or does not come.
    pub(super) fn end_arrival(&self, log: &LogPages, page: u32) {
        if log.update(page, LogWord::arrived) {
            self.retire_log(log, page);
        }
    }

    /// Ends the caller's taking of objects out of the page.
    pub(crate) fn end_departure(&self, log: &LogPages, page: u32) {
        if log.update(page, LogWord::gone) {
            self.retire_log(log, page);
        }
    }

    /// Ends the flight of the whole page, which has come near or (`came` is false) has not.
    pub(crate) fn end_fetch(&self, log: &LogPages, page: u32, came: bool) {
        let (word, died) = log.update(page, |word| {
            let (next, died) = word.fetched(came);
            (next, (next, died))
        });
        if came {
            log.note_holes(page, word);
        }
        if died {
            self.retire_log(log, page);
        }
    }

    /// Retires a page in which nothing lives and which nobody fills. Called once for each death.
    pub(super) fn retire_log(&self, log: &LogPages, page: u32) {
        self.release(TransferUnit { page, pages: 1 });
        log.retire(page);
    }

    /// Closes the open pages of a thread that ends, and gives its handles to others.
    pub(crate) fn detach_objects(&self, own: &ThreadObjects) {
        let Some(objects) = &self.objects else { return };
        for cell in own.pages.iter().flatten() {
            if let Some(filling) = cell.take() {
                self.close_log(&objects.log, filling.page);
            }
        }
        objects.handles.give_all(&own.handles);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against far addresses that are used up while retired pages wait for somebody who is busy.
    use crate::{Heap, Plane};

    #[test]
    fn retired_pages_are_used_again_while_the_evictor_is_busy() {
        let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(2 << 20).plane(Plane::Object).build().unwrap();
        let core = heap.core();
        core.evictor.paused(|| {
            // Three times as many pages as there are.
            for round in 0..3 * core.pages {
                let values = [0; 4].map(|_| heap.alloc([round; 250]).map_err(|refused| refused.error));
                assert!(values.iter().all(Result::is_ok), "round {round} of {}: {values:?}", core.pages);
            }
        });
        heap.verify();
    }
}
