//! Far pages that a tracer reads in batches, past the frames of the far heap.
//!
//! Objects whose bytes, or whose entries, are far wait for the page that is needed next. When nothing
//! else is left to trace, the pages with waiters are read in the order of their numbers, as an
//! elevator goes: one read serves all that wait for a page, many reads are on their way at a time, and
//! no page of the program leaves for them. The copies are kept until the next batch, so what they lead
//! to within them is traced at once.
//!
//! A copy may be older than its page is now. That does no harm: it is younger than the snapshot.

use core::cell::Cell;
use core::ops::Bound;
use farfield::FarError;
use farfield::space::{FarCopy, PageReader, Space};
use std::collections::BTreeMap;

/// Near memory of a page with waiters, beside these.
const PAGE_OVERHEAD: usize = 64;

/// Far pages of one cycle.
pub(super) struct FarPages<'a> {
    reader: PageReader<'a>,
    /// Objects that wait, by the page that they wait for.
    waiting: BTreeMap<u32, Vec<Waiter>>,
    /// Objects that began to wait last, and their page: neighbours often follow each other.
    newest: Waiters,
    /// Number of these objects.
    waiters: usize,
    /// First page that the next batch looks at.
    next: u32,
    batch_pages: usize,
    /// Copies in the order of their pages, and the index of the one that was asked for last.
    copies: Vec<FarCopy>,
    last: Cell<usize>,
    /// Pages that were read.
    read: u64,
}

/// Object that waits for a page.
#[derive(Clone, Copy)]
pub(super) struct Waiter {
    pub(super) entry: u32,
    /// Card at which the object begins, if it waits for its own page; `None` if for that of its entry.
    pub(super) card: Option<u8>,
}

/// Objects that waited for one page, of which there may be a copy now.
pub(super) type Waiters = (u32, Vec<Waiter>);

impl<'a> FarPages<'a> {
    /// Creates an empty table, which has copies of so many pages at a time.
    pub(super) fn new(space: &'a Space, batch_pages: usize) -> FarPages<'a> {
        FarPages {
            reader: space.reader(),
            waiting: BTreeMap::new(),
            newest: (0, Vec::new()),
            waiters: 0,
            next: 0,
            batch_pages,
            copies: Vec::new(),
            last: Cell::new(0),
            read: 0,
        }
    }

    /// Gives up the copies, so that somebody else can read pages into their memory.
    pub(super) fn reader(&mut self) -> &mut PageReader<'a> {
        self.give_up_copies();
        &mut self.reader
    }

    fn give_up_copies(&mut self) {
        self.copies.drain(..).for_each(|copy| self.reader.take_back(copy));
    }

    /// Lets an object wait for a page.
    pub(super) fn wait(&mut self, page: u32, waiter: Waiter) {
        if self.newest.0 != page {
            self.settle();
            self.newest.0 = page;
        }
        self.newest.1.push(waiter);
        self.waiters += 1;
    }

    /// Puts the objects that began to wait last with the others.
    fn settle(&mut self) {
        let (page, newest) = &mut self.newest;
        if !newest.is_empty() {
            self.waiting.entry(*page).or_default().append(newest);
        }
    }

    /// Returns the number of objects that wait.
    pub(super) fn waiters(&self) -> usize {
        self.waiters
    }

    /// Returns the near memory that those take, in bytes.
    pub(super) fn near_bytes(&self) -> usize {
        self.waiters * size_of::<Waiter>() + self.waiting.len() * PAGE_OVERHEAD
    }

    /// Returns the number of pages that were read.
    pub(super) fn read_pages(&self) -> u64 {
        self.read
    }

    /// Returns the bytes of a page, as they were when it was read last.
    pub(super) fn copy(&self, page: u32) -> Option<&[u8]> {
        let is_it = |index: &usize| self.copies.get(*index).is_some_and(|copy| copy.page() == page);
        let found = Some(self.last.get()).filter(is_it);
        let index = found.or_else(|| self.copies.binary_search_by_key(&page, FarCopy::page).ok())?;
        self.last.set(index);
        self.copies.get(index).map(FarCopy::bytes)
    }

    /// Returns the word at this offset of a page, as it was when the page was read last.
    pub(super) fn word(&self, page: u32, offset: usize) -> Option<u64> {
        Some(u64::from_ne_bytes(*self.copy(page)?.get(offset..)?.first_chunk()?))
    }

    /// Takes up to so many objects that wait, each with the page that it waits for, for whoever else
    /// looks at them.
    pub(super) fn take(&mut self, most: usize) -> Vec<(u32, Waiter)> {
        self.settle();
        let mut taken = Vec::with_capacity(most.min(self.waiters));
        while let Some(mut waiters) = self.waiting.first_entry().filter(|_| taken.len() < most) {
            let page = *waiters.key();
            let of_page = waiters.get_mut();
            let rest = of_page.len().saturating_sub(most - taken.len());
            taken.extend(of_page.drain(rest..).map(|waiter| (page, waiter)));
            if rest == 0 {
                waiters.remove();
            }
        }
        self.waiters -= taken.len();
        taken
    }

    /// Takes the objects whose pages were far and are not any more.
    pub(super) fn take_arrived(&mut self, is_near: impl Fn(u32) -> bool) -> Vec<Waiters> {
        self.settle();
        let pages: Vec<u32> = self.waiting.keys().copied().filter(|page| is_near(*page)).collect();
        let arrived: Vec<Waiters> = pages.iter().filter_map(|page| self.waiting.remove_entry(page)).collect();
        self.waiters -= arrived.iter().map(|(_, waiters)| waiters.len()).sum::<usize>();
        arrived
    }

    /// Reads the next pages for which objects wait, in place of those before, and returns the objects.
    /// There is no copy of a page that is near, or could not be read. Waits for the pool.
    pub(super) fn read(&mut self) -> Result<Vec<Waiters>, FarError> {
        self.settle();
        self.give_up_copies();
        let ahead = self.waiting.range(self.next..);
        let behind = self.waiting.range((Bound::Unbounded, Bound::Excluded(self.next)));
        let pages: Vec<u32> = ahead.chain(behind).map(|(page, _)| *page).take(self.batch_pages).collect();
        self.next = pages.last().map_or(0, |page| page + 1);
        let copies = self.reader.copy_far(&pages)?;
        self.read += copies.len() as u64;
        self.copies.extend(copies);
        self.copies.sort_unstable_by_key(FarCopy::page);
        let batch: Vec<Waiters> = pages.iter().filter_map(|page| self.waiting.remove_entry(page)).collect();
        self.waiters -= batch.iter().map(|(_, waiters)| waiters.len()).sum::<usize>();
        Ok(batch)
    }
}
