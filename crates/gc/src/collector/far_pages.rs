//! Far pages that a tracer reads in batches, past the frames of the far heap.
//!
//! Objects whose bytes, or whose entries, are far wait for the page that is needed next. When nothing
//! else is left to trace, the pages with waiters are read in the order of their numbers, as an
//! elevator goes: one read serves all that wait for a page, many reads are on their way at a time, and
//! no page of the program leaves for them. The copies are kept until the next batch, so what they lead
//! to within them is traced at once.
//!
//! A copy may be older than its page is now. That does no harm: it is younger than the snapshot.
//!
//! An object that waits takes one bit, that of its entry. Who has its page finds it there: the heap
//! knows at which cards objects begin, and each object names its entry.

use crate::entries::WORDS_PER_PAGE;
use core::cell::Cell;
use core::ops::Bound;
use farfield::FarError;
use farfield::space::{FarCopy, PageReader, Space};
use farfield_core::gc::ENTRIES_PER_PAGE;
use std::collections::BTreeMap;

/// Near memory of a page with waiters, some of it in nodes that are not full.
const AWAITED_BYTES: usize = 20;

/// Batches of which copies are kept: what was read last often leads to what was read shortly before.
const BATCHES_KEPT: usize = 4;

/// Far pages of one cycle.
pub(super) struct FarPages<'a> {
    reader: PageReader<'a>,
    /// A bit for each entry of the snapshot whose object waits.
    waits: Box<[u64]>,
    /// Pages with waiters; with its index, one of entries.
    pages: BTreeMap<u32, Option<u32>>,
    /// Bits of these pages: most objects begin to wait for one that is known.
    awaited: PageBitmap,
    /// Objects that wait for pages which their entries, as far as they are here, do not lead to.
    placed: Vec<(u32, Waiter)>,
    /// Number of all these objects.
    waiters: usize,
    /// First page that the next batch looks at.
    next: u32,
    /// First word of bits that the next look at waiters begins with.
    next_word: usize,
    /// Most copies at a time.
    copies_max: usize,
    /// Copies in the order of their pages, each with the number of its batch, and the index of the one
    /// that was asked for last.
    copies: Vec<(u64, FarCopy)>,
    last: Cell<usize>,
    /// The pages of these copies.
    copied: PageBitmap,
    /// Number of batches.
    batches: u64,
    /// Pages that were read.
    read: u64,
}

/// Set of pages, a bit for each.
#[derive(Default)]
struct PageBitmap(Vec<u64>);

impl PageBitmap {
    fn contains(&self, page: u32) -> bool {
        let (word, bit) = locate(page);
        self.0.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Adds a page. False if it was there.
    fn insert(&mut self, page: u32) -> bool {
        let (word, bit) = locate(page);
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }

    fn remove(&mut self, page: u32) {
        let (word, bit) = locate(page);
        if let Some(bits) = self.0.get_mut(word) {
            *bits &= !bit;
        }
    }
}

/// Object that waits for a page.
#[derive(Clone, Copy)]
pub(super) struct Waiter {
    pub(super) entry: u32,
    /// Card at which the object begins, if it waits for its own page; `None` if for that of its entry.
    pub(super) card: Option<u8>,
}

/// Page for which objects wait, and its index if it is a page of entries.
pub(super) type AwaitedPage = (u32, Option<u32>);

/// Returns the index of the word of bits for an entry or a page, and its bit.
fn locate(index: u32) -> (usize, u64) {
    (index as usize / 64, 1 << (index % 64))
}

impl<'a> FarPages<'a> {
    /// Creates an empty table for so many pages of entries, which has copies of so many others at a time.
    pub(super) fn new(space: &'a Space, entry_pages: usize, copies_max: usize) -> FarPages<'a> {
        FarPages {
            reader: space.reader(),
            waits: vec![0; entry_pages * WORDS_PER_PAGE].into(),
            pages: BTreeMap::new(),
            awaited: PageBitmap::default(),
            placed: Vec::new(),
            waiters: 0,
            next: 0,
            next_word: 0,
            copies_max,
            copies: Vec::new(),
            last: Cell::new(0),
            copied: PageBitmap::default(),
            batches: 0,
            read: 0,
        }
    }

    /// Gives up the copies, so that somebody else can read pages into their memory.
    pub(super) fn reader(&mut self) -> &mut PageReader<'a> {
        self.give_up_copies();
        &mut self.reader
    }

    fn give_up_copies(&mut self) {
        for (_, copy) in self.copies.drain(..) {
            self.copied.remove(copy.page());
            self.reader.take_back(copy);
        }
    }

    /// Gives up the oldest copies until so many more can be had.
    fn make_room(&mut self, more: usize) {
        while self.copies.len() + more > self.copies_max {
            let Some(oldest) = self.copies.iter().map(|(batch, _)| *batch).min() else { return };
            for (_, copy) in self.copies.extract_if(.., |(batch, _)| *batch == oldest) {
                self.copied.remove(copy.page());
                self.reader.take_back(copy);
            }
        }
    }

    /// Lets an object of the snapshot wait for its page.
    pub(super) fn wait_for_object(&mut self, page: u32, entry: u32) {
        self.wait(page, None, entry);
    }

    /// Lets an object of the snapshot wait for the page of its entry.
    pub(super) fn wait_for_entry(&mut self, page: u32, entry: u32) {
        self.wait(page, Some(entry / ENTRIES_PER_PAGE), entry);
    }

    fn wait(&mut self, page: u32, index: Option<u32>, entry: u32) {
        if self.awaited.insert(page) {
            self.pages.insert(page, index);
        }
        let (word, bit) = locate(entry);
        self.waiters += usize::from(self.waits[word] & bit == 0);
        self.waits[word] |= bit;
    }

    /// Lets an object wait for its page, of which only the caller knows that it is there.
    pub(super) fn wait_placed(&mut self, page: u32, waiter: Waiter) {
        self.placed.push((page, waiter));
        self.waiters += 1;
    }

    /// Checks whether the object of this entry waits for a page that its entry leads to.
    pub(super) fn is_waiting(&self, entry: u32) -> bool {
        let (word, bit) = locate(entry);
        self.waits.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Ends the wait of an object. False if it does not [wait](FarPages::is_waiting).
    pub(super) fn end_wait(&mut self, entry: u32) -> bool {
        let is_waiting = self.is_waiting(entry);
        if is_waiting {
            let (word, bit) = locate(entry);
            self.waits[word] &= !bit;
            self.leave(1);
        }
        is_waiting
    }

    /// Counts objects that wait no longer.
    fn leave(&mut self, count: usize) {
        self.waiters -= count;
        if self.waiters == 0 {
            self.pages.keys().for_each(|page| self.awaited.remove(*page));
            self.pages.clear();
        }
    }

    /// Returns the objects that wait, and whose entries are in the page of this index. Some may wait for
    /// their own pages.
    pub(super) fn of_entry_page(&self, index: u32) -> Vec<u32> {
        let first = index as usize * WORDS_PER_PAGE;
        (first..first + WORDS_PER_PAGE).flat_map(|word| entries_of(word, self.waits[word])).collect()
    }

    /// Returns the objects that wait for no page, because their pages do not say that they are there.
    pub(super) fn lost(&self) -> Vec<u32> {
        self.waits.iter().enumerate().flat_map(|(word, bits)| entries_of(word, *bits)).collect()
    }

    /// Returns the number of objects that wait.
    pub(super) fn waiters(&self) -> usize {
        self.waiters
    }

    /// Returns the number of pages for which they wait, or have waited.
    pub(super) fn awaited_pages(&self) -> usize {
        self.pages.len()
    }

    /// Returns the near memory that those take, in bytes.
    pub(super) fn near_bytes(&self) -> usize {
        let bitmaps = size_of_val(&*self.waits) + size_of_val(&*self.awaited.0) + size_of_val(&*self.copied.0);
        bitmaps + self.pages.len() * AWAITED_BYTES + self.placed.len() * size_of::<(u32, Waiter)>()
    }

    /// Returns the number of pages that were read.
    pub(super) fn read_pages(&self) -> u64 {
        self.read
    }

    /// Returns the bytes of a page, as they were when it was read last.
    pub(super) fn copy(&self, page: u32) -> Option<&[u8]> {
        if !self.copied.contains(page) {
            return None;
        }
        let is_it = |index: &usize| self.copies.get(*index).is_some_and(|(_, copy)| copy.page() == page);
        let found = Some(self.last.get()).filter(is_it);
        let index = found.or_else(|| self.copies.binary_search_by_key(&page, |(_, copy)| copy.page()).ok())?;
        self.last.set(index);
        self.copies.get(index).map(|(_, copy)| copy.bytes())
    }

    /// Returns the word at this offset of a page, as it was when the page was read last.
    pub(super) fn word(&self, page: u32, offset: usize) -> Option<u64> {
        Some(u64::from_ne_bytes(*self.copy(page)?.get(offset..)?.first_chunk()?))
    }

    /// Takes up to so many objects that wait, 64 or more, each with the page that it waits for, for whoever else
    /// looks at them. `find` says where an object is, or that of its entry.
    pub(super) fn take(&mut self, most: usize, find: impl Fn(u32) -> (u32, Waiter)) -> Vec<(u32, Waiter)> {
        let mut taken = self.placed.split_off(self.placed.len().saturating_sub(most));
        let words = self.waits.len();
        for _ in 0..words {
            let word = self.next_word % words;
            if taken.len() + self.waits[word].count_ones() as usize > most {
                break;
            }
            let bits = core::mem::take(&mut self.waits[word]);
            taken.extend(entries_of(word, bits).map(&find));
            self.next_word = word + 1;
        }
        self.leave(taken.len());
        taken
    }

    /// Takes the pages with waiters that are near now.
    pub(super) fn take_arrived(&mut self, is_near: impl Fn(u32) -> bool) -> Vec<AwaitedPage> {
        let pages: Vec<u32> = self.pages.keys().copied().filter(|page| is_near(*page)).collect();
        self.take_awaited(&pages)
    }

    /// Puts a page with waiters back.
    pub(super) fn put_back(&mut self, (page, entries): AwaitedPage) {
        self.awaited.insert(page);
        self.pages.insert(page, entries);
    }

    fn take_awaited(&mut self, pages: &[u32]) -> Vec<AwaitedPage> {
        pages.iter().for_each(|page| self.awaited.remove(*page));
        pages.iter().filter_map(|page| self.pages.remove_entry(page)).collect()
    }

    /// Reads the next pages for which objects wait, in place of the oldest copies, and returns them. There
    /// is no copy of a page that is near, or could not be read. Waits for the pool.
    pub(super) fn read(&mut self) -> Result<Vec<AwaitedPage>, FarError> {
        for (page, Waiter { entry, .. }) in core::mem::take(&mut self.placed) {
            self.waiters -= 1;
            self.wait_for_object(page, entry);
        }
        let ahead = self.pages.range(self.next..);
        let behind = self.pages.range((Bound::Unbounded, Bound::Excluded(self.next)));
        let pages: Vec<u32> =
            ahead.chain(behind).map(|(page, _)| *page).take(self.copies_max.div_ceil(BATCHES_KEPT)).collect();
        self.next = pages.last().map_or(0, |page| page + 1);
        self.make_room(pages.len());
        let copies = self.reader.copy_far(&pages)?;
        self.read += copies.len() as u64;
        self.batches += 1;
        for copy in &copies {
            self.copied.insert(copy.page());
        }
        self.copies.extend(copies.into_iter().map(|copy| (self.batches, copy)));
        self.copies.sort_unstable_by_key(|(_, copy)| copy.page());
        Ok(self.take_awaited(&pages))
    }
}

/// Returns the entries of a word of bits.
fn entries_of(word: usize, mut bits: u64) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let bit = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(word as u32 * 64 + bit)
    })
}

#[cfg(test)]
mod tests {
    //! Guards against a cycle that ends while objects wait, and against one that counts fewer than nobody.
    use super::*;
    use farfield::Heap;

    #[test]
    fn each_wait_begins_once_and_ends_once() {
        let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
        let space = Space::open(&heap).unwrap();
        let mut far = FarPages::new(&space, 2, 64);
        for page in [70, 71] {
            far.wait_for_object(page, 600);
            far.wait_for_entry(page, 3);
        }
        assert_eq!((far.waiters(), far.awaited_pages()), (2, 2));
        assert!(!far.end_wait(601) && !far.end_wait(1 << 20), "nobody waits for these");
        // As a damaged page, in which two objects name one entry, has it.
        assert!(far.end_wait(600) && !far.end_wait(600));
        assert_eq!((far.waiters(), far.lost()), (1, vec![3]));
        assert!(far.end_wait(3) && !far.end_wait(3));
        assert_eq!((far.waiters(), far.awaited_pages()), (0, 0));
    }
}
