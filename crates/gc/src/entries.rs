//! Entries: where each object is, in far pages, and which of them are in use, in near bitmaps.
//!
//! A page of entries of which none is in use is given back. Weak references remember generations that
//! lay in it, so the table remembers the highest of them.

use crate::error::GcError;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield::space::SpaceScope;
use farfield_core::gc::{ENTRIES_PER_PAGE, EntryWord};
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Bitmap of the entries of one page.
pub(crate) type EntryBits = [u64; WORDS_PER_PAGE];

pub(crate) const WORDS_PER_PAGE: usize = ENTRIES_PER_PAGE as usize / 64;

/// Pages in a chunk of bitmaps.
const CHUNK_PAGES: usize = 256;

type Chunk = Box<[[AtomicU64; WORDS_PER_PAGE]]>;

/// In place of the far page of an entry page that there is not: no heap has a page of this number.
const ABSENT: u32 = u32::MAX;

/// All entries of a heap.
pub(crate) struct EntryTable {
    /// Far page of each entry page, counted within the far heap; [`ABSENT`] for none.
    pages: Box<[AtomicU32]>,
    generations: Box<[PageGenerations]>,
    /// Bitmaps of the entries that have objects.
    chunks: Box<[OnceLock<Chunk>]>,
    growth: Mutex<EntryGrowth>,
}

/// Generations of the entries of one page, whether there is a page or not.
#[derive(Default)]
struct PageGenerations {
    /// Generation in which entries begin that were not used since their page was made.
    first: AtomicU32,
    /// Highest generation that one of the entries has had.
    last: AtomicU32,
}

#[derive(Default)]
struct EntryGrowth {
    /// Number of entry pages, with those below the last that were given back.
    made: usize,
    /// Entry pages below `made` that were given back.
    absent: BTreeSet<usize>,
    /// Words of the bitmaps before this one are claimed, but for those in `again`.
    unclaimed: usize,
    /// Words before `unclaimed` whose page was absent then.
    again: Vec<usize>,
}

impl EntryGrowth {
    /// Returns the next word of the bitmaps that nobody has claimed.
    fn next_word(&mut self) -> Option<usize> {
        self.again.pop().or_else(|| {
            let word = self.unclaimed;
            let is_there = word < self.made * WORDS_PER_PAGE;
            self.unclaimed += usize::from(is_there);
            is_there.then_some(word)
        })
    }
}

/// Near table of the far pages in which entries lie.
#[derive(Clone, Copy)]
pub(crate) struct EntryPages<'a>(&'a [AtomicU32]);

/// Entries that a mutator has claimed and not used yet.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct ClaimedEntries {
    first: u32,
    mask: u64,
}

impl ClaimedEntries {
    /// Returns the next entry, and leaves it claimed.
    #[inline]
    pub(crate) fn peek(self) -> Option<u32> {
        (self.mask != 0).then(|| self.first + self.mask.trailing_zeros())
    }

    /// Removes the entry that [`ClaimedEntries::peek`] gives.
    pub(crate) fn advance(&mut self) {
        self.mask &= self.mask - 1;
    }
}

impl EntryPages<'_> {
    /// Returns the address of a page of entries of this heap if it is near, valid as
    /// [`SpaceScope::peek`] says.
    #[inline(always)]
    pub(crate) fn peek(self, scope: &SpaceScope<'_>, page: u32) -> Option<NonNull<u8>> {
        scope.peek(self.0[page as usize].load(Ordering::Acquire))
    }
}

/// Place of an entry: the index of its page among those of entries, and its index there.
#[derive(Clone, Copy)]
pub(crate) struct EntryPlace {
    pub(crate) page: u32,
    within: usize,
}

impl EntryPlace {
    #[inline(always)]
    pub(crate) fn of(entry: u32) -> EntryPlace {
        let (page, within) = locate(entry);
        EntryPlace { page: page as u32, within }
    }

    /// Loads the word of the entry.
    ///
    /// # Safety
    /// The page of entries is near at this address.
    #[inline(always)]
    pub(crate) unsafe fn load(self, entries: NonNull<u8>) -> EntryWord {
        // SAFETY: the entry lies in the page, whose words are only used as atomics.
        let word = unsafe { entries.cast::<AtomicU64>().add(self.within).as_ref() };
        EntryWord(word.load(Ordering::Acquire))
    }
}

#[inline]
fn locate(entry: u32) -> (usize, usize) {
    ((entry / ENTRIES_PER_PAGE) as usize, (entry % ENTRIES_PER_PAGE) as usize)
}

impl PageGenerations {
    /// Notes that an entry of the page has this generation.
    #[inline]
    fn note(&self, generation: u32) {
        // Most entries of a page have had as many objects as others.
        if generation > self.last.load(Ordering::Relaxed) {
            self.last.fetch_max(generation, Ordering::Relaxed);
        }
    }

    /// Lets entries of a page that will be made anew begin above all generations that there were, as
    /// long as mutators are stopped. False if there is none above.
    fn begin_anew(&self) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        if last < EntryWord::GENERATION_MAX {
            self.first.store(last + 1, Ordering::Relaxed);
        }
        last < EntryWord::GENERATION_MAX
    }
}

impl EntryTable {
    /// Creates a table that can have so many pages.
    pub(crate) fn new(pages_max: usize) -> EntryTable {
        EntryTable {
            pages: (0..pages_max).map(|_| AtomicU32::new(ABSENT)).collect(),
            generations: (0..pages_max).map(|_| PageGenerations::default()).collect(),
            chunks: (0..pages_max.div_ceil(CHUNK_PAGES)).map(|_| OnceLock::new()).collect(),
            growth: Mutex::default(),
        }
    }

    /// Returns the near bytes of a table that can have so many pages, and of each chunk of
    /// bitmaps.
    pub(crate) fn near_bytes(pages_max: usize) -> (u64, u64) {
        let chunks = pages_max.div_ceil(CHUNK_PAGES) * size_of::<OnceLock<Chunk>>();
        let each = size_of::<AtomicU32>() + size_of::<PageGenerations>();
        ((pages_max * each + chunks) as u64, (CHUNK_PAGES * size_of::<EntryBits>()) as u64)
    }

    fn lock(&self) -> MutexGuard<'_, EntryGrowth> {
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a number above those of all entry pages.
    pub(crate) fn made(&self) -> usize {
        self.lock().made
    }

    /// Returns the far pages of all entry pages, in the order of the entries. An absent one, which
    /// nobody asks for, seems to follow the one before, so that servers are told few runs of pages.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u32> {
        let mut before = 0u32;
        self.pages[..self.made()].iter().map(move |page| {
            before = match page.load(Ordering::Acquire) {
                ABSENT => before.saturating_add(1),
                page => page,
            };
            before
        })
    }

    /// Returns the number of chunks of bitmaps.
    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.get().is_some()).count()
    }

    /// Returns the table of the far pages in which entries lie.
    pub(crate) fn entry_pages(&self) -> EntryPages<'_> {
        EntryPages(&self.pages)
    }

    /// Adds a page of zeros, and says whether that took a new chunk of bitmaps. `None` if the table
    /// has as many pages as it can have.
    pub(crate) fn add(&self, page: u32) -> Option<bool> {
        let mut growth = self.lock();
        let index = growth.absent.pop_first().unwrap_or(growth.made);
        let cell = self.pages.get(index)?;
        cell.store(page, Ordering::Release);
        let mut is_new = false;
        let chunk = self.chunks[index / CHUNK_PAGES].get_or_init(|| {
            is_new = true;
            (0..CHUNK_PAGES).map(|_| [const { AtomicU64::new(0) }; WORDS_PER_PAGE]).collect()
        });
        if index == 0 {
            // Entry 0 is no object's.
            chunk[0][0].store(1, Ordering::Relaxed);
        }
        growth.made = growth.made.max(index + 1);
        let words = index * WORDS_PER_PAGE..growth.unclaimed.min((index + 1) * WORDS_PER_PAGE);
        growth.again.extend(words);
        Some(is_new)
    }

    /// Claims the free entries of one word of the bitmaps; `None` if no entry is free.
    ///
    /// No word is claimed twice before a collection begins the row anew. A claimed entry is not in
    /// use before it has an object.
    pub(crate) fn claim(&self) -> Option<ClaimedEntries> {
        let mut growth = self.lock();
        while let Some(word) = growth.next_word() {
            let page = word / WORDS_PER_PAGE;
            if growth.absent.contains(&page) {
                continue;
            }
            let free = !self.bits(page)[word % WORDS_PER_PAGE].load(Ordering::Relaxed);
            if free != 0 {
                return Some(ClaimedEntries { first: word as u32 * 64, mask: free });
            }
        }
        None
    }

    fn bits(&self, page: usize) -> &[AtomicU64; WORDS_PER_PAGE] {
        let Some(chunk) = self.chunks[page / CHUNK_PAGES].get() else { unreachable!("the page was added") };
        &chunk[page % CHUNK_PAGES]
    }

    /// Returns the bitmap of a page.
    pub(crate) fn bits_of(&self, page: usize) -> EntryBits {
        core::array::from_fn(|word| self.bits(page)[word].load(Ordering::Acquire))
    }

    /// Replaces the bitmaps of all pages by what `live` makes of them, and forgets what was claimed.
    /// All mutators are stopped, and forget it too.
    ///
    /// Returns the far pages of which no entry is in use any more. The table has them no more, and
    /// the caller gives them back.
    pub(crate) fn replace_bits(&self, live: impl Fn(usize, EntryBits) -> EntryBits) -> Vec<u32> {
        let mut growth = self.lock();
        growth.unclaimed = 0;
        growth.again.clear();
        let mut given_back = Vec::new();
        for page in 0..growth.made {
            let mut bits = live(page, self.bits_of(page));
            if page == 0 {
                // Entry 0 is no object's.
                bits[0] |= 1;
            }
            for (word, bits) in self.bits(page).iter().zip(bits) {
                word.store(bits, Ordering::Release);
            }
            if bits == [0; WORDS_PER_PAGE] && !growth.absent.contains(&page) && self.generations[page].begin_anew() {
                given_back.push(self.pages[page].swap(ABSENT, Ordering::AcqRel));
                growth.absent.insert(page);
            }
        }
        while let Some(last) = growth.made.checked_sub(1).filter(|last| growth.absent.remove(last)) {
            growth.made = last;
        }
        given_back
    }

    /// Checks whether an entry has an object.
    pub(crate) fn is_used(&self, entry: u32) -> bool {
        let (page, within) = locate(entry);
        let word = self.chunks.get(page / CHUNK_PAGES).and_then(OnceLock::get).map(|chunk| &chunk[page % CHUNK_PAGES]);
        word.is_some_and(|words| words[within / 64].load(Ordering::Acquire) & 1 << (within % 64) != 0)
    }

    /// Returns the far page in which an entry lies, and its offset there in bytes.
    #[inline]
    pub(crate) fn place(&self, entry: u32) -> (u32, usize) {
        let (page, within) = locate(entry);
        (self.pages[page].load(Ordering::Acquire), within * size_of::<u64>())
    }

    /// Loads the word of an entry of this heap, and brings its page near.
    #[inline]
    pub(crate) fn load(&self, scope: &SpaceScope<'_>, entry: u32) -> Result<EntryWord, GcError> {
        let page = self.place(entry).0;
        let address = match scope.near(page) {
            Some(address) => address,
            None => scope.bring(page)?,
        };
        // SAFETY: the page of the entry is near in this scope.
        Ok(unsafe { EntryPlace::of(entry).load(address) })
    }

    /// Loads the word of an entry of this heap, and brings its page near, which does not count as used.
    pub(crate) fn load_unmarked(&self, scope: &SpaceScope<'_>, entry: u32) -> Result<EntryWord, GcError> {
        let address = scope.bring_unmarked(self.place(entry).0)?;
        // SAFETY: as in `load`.
        Ok(unsafe { EntryPlace::of(entry).load(address) })
    }

    /// Loads the word of an entry of this heap if its page is near. Returns the page if it is not.
    #[inline]
    pub(crate) fn load_near(&self, scope: &SpaceScope<'_>, entry: u32) -> Result<EntryWord, u32> {
        let page = self.place(entry).0;
        let address = scope.near(page).ok_or(page)?;
        // SAFETY: as in `load`.
        Ok(unsafe { EntryPlace::of(entry).load(address) })
    }

    /// Gives an entry that the caller has claimed to an object at this card of this page. The entry is
    /// in use from now on. False if its generations are used up: nobody uses it again.
    pub(crate) fn give(&self, scope: &SpaceScope<'_>, entry: u32, page: u32, card: u8) -> Result<bool, GcError> {
        let address = self.bring_to_change(scope, entry)?;
        // SAFETY: as in `EntryPlace::load`.
        let word = unsafe { address.cast::<AtomicU64>().as_ref() };
        let (entry_page, within) = locate(entry);
        let generations = &self.generations[entry_page];
        let before = EntryWord(word.load(Ordering::Acquire));
        let Some(next) = before.next(page, card, generations.first.load(Ordering::Relaxed)) else { return Ok(false) };
        generations.note(next.generation());
        word.store(next.0, Ordering::Release);
        let bits = &self.bits(entry_page)[within / 64];
        // No exchange: who has claimed entries has claimed all of their word, until mutators are stopped.
        // Release: who finds the entry in use finds its word, and so the generation.
        bits.store(bits.load(Ordering::Relaxed) | 1 << (within % 64), Ordering::Release);
        Ok(true)
    }

    /// Brings the page of an entry of this heap near to change it. Returns the address of its word.
    #[inline]
    fn bring_to_change(&self, scope: &SpaceScope<'_>, entry: u32) -> Result<NonNull<u8>, GcError> {
        let (page, offset) = self.place(entry);
        let address = match scope.near_to_change(page) {
            Some(address) => address,
            None => scope.bring_to_change(page)?,
        };
        // SAFETY: the entry lies in the page.
        Ok(unsafe { address.add(offset) })
    }

    /// Replaces the word of an entry of this heap.
    pub(crate) fn replace(&self, scope: &SpaceScope<'_>, entry: u32, word: EntryWord) -> Result<(), GcError> {
        let address = self.bring_to_change(scope, entry)?;
        // SAFETY: as in `EntryPlace::load`.
        unsafe { address.cast::<AtomicU64>().as_ref() }.store(word.0, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an entry that two objects have.
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn entries_are_claimed_once_until_a_collection_frees_them() {
        let table = EntryTable::new(300);
        assert!(table.claim().is_none() && !table.is_used(0));
        let mut seen = HashSet::from([0]);
        for page in 0..300 {
            assert_eq!(table.add(1000 + page), Some(page == 0 || page == 256));
            while let Some(mut claimed) = table.claim() {
                while let Some(entry) = claimed.peek() {
                    assert!(!table.is_used(entry) && seen.insert(entry));
                    assert_eq!(table.place(entry), (1000 + entry / 512, (entry % 512) as usize * 8));
                    claimed.advance();
                }
            }
        }
        assert!(table.add(1).is_none() && seen.len() == 300 * 512);
        let mut bits = vec![[u64::MAX; WORDS_PER_PAGE]; 300];
        bits[7][3] = 0;
        bits[0][0] = u64::MAX - 1;
        table.replace_bits(|page, _| bits[page]);
        assert!(table.is_used(0) && table.is_used(7 * 512) && !table.is_used(7 * 512 + 3 * 64));
        let claimed = table.claim().unwrap();
        assert_eq!((claimed.peek(), claimed.mask), (Some(7 * 512 + 3 * 64), u64::MAX));
        assert!(table.claim().is_none());
    }

    #[test]
    fn pages_without_entries_are_given_back_and_begin_in_a_later_generation() {
        let table = EntryTable::new(10);
        (100..104).for_each(|page| assert!(table.add(page).is_some()));
        let claims = || -> Vec<u32> {
            let words: Vec<u32> = std::iter::from_fn(|| table.claim()).map(|claimed| claimed.first / 64).collect();
            assert_eq!(words.len(), words.iter().collect::<HashSet<_>>().len(), "a word is claimed twice");
            words
        };
        assert_eq!(claims().len(), 32);
        let first = |page: usize| table.generations[page].first.load(Ordering::Relaxed);
        [6, 3].into_iter().for_each(|generation| table.generations[1].note(generation));
        table.generations[2].note(EntryWord::GENERATION_MAX);
        // The first has entry 0, and the third has no generation left.
        let last_has_one = |page, _| [u64::from(page == 3); WORDS_PER_PAGE];
        assert_eq!(table.replace_bits(last_has_one), [101]);
        assert!(table.pages().eq([100, 101, 102, 103]) && first(1) == 7);
        // It comes again before the row of words has reached it, or afterwards.
        for (page, words_before, words_after) in [(200, 0, 32), (201, 24, 8)] {
            if words_before > 0 {
                assert_eq!(claims().len(), words_before);
            }
            assert_eq!(table.add(page), Some(false));
            assert_eq!((table.place(512).0, claims().len()), (page, words_after));
            table.generations[1].note(first(1));
            assert_eq!(table.replace_bits(last_has_one), [page]);
        }
        assert_eq!(first(1), 9);
        // Those at the end are forgotten, but not their generations.
        assert_eq!((table.replace_bits(|_, _| [0; WORDS_PER_PAGE]), table.made()), (vec![103], 3));
        assert!(table.add(300).is_some() && table.add(301).is_some());
        assert!(table.pages().eq([100, 300, 102, 301]) && first(3) == 1);
    }
}
