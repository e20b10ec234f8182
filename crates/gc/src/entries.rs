//! Entries: where each object is, in far pages, and which of them are in use, in near bitmaps.
//!
//! An entry page is never given back: weak references remember the generations that lie in it.

use crate::error::GcError;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield::space::SpaceScope;
use farfield_core::gc::{ENTRIES_PER_PAGE, EntryWord};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Bitmap of the entries of one page.
pub(crate) type EntryBits = [u64; WORDS_PER_PAGE];

pub(crate) const WORDS_PER_PAGE: usize = ENTRIES_PER_PAGE as usize / 64;

/// Pages in a chunk of bitmaps.
const CHUNK_PAGES: usize = 256;

type Chunk = Box<[[AtomicU64; WORDS_PER_PAGE]]>;

/// All entries of a heap.
pub(crate) struct EntryTable {
    /// Far page of each entry page, counted within the far heap.
    pages: Box<[AtomicU32]>,
    /// Bitmaps of the entries that have objects.
    chunks: Box<[OnceLock<Chunk>]>,
    growth: Mutex<EntryGrowth>,
}

#[derive(Default)]
struct EntryGrowth {
    /// Number of entry pages.
    made: usize,
    /// Words of the bitmaps before this one are claimed.
    unclaimed: usize,
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
        // SAFETY: the entry lies in the page, whose words are only used as atomics. It is never given
        // back.
        let word = unsafe { entries.cast::<AtomicU64>().add(self.within).as_ref() };
        EntryWord(word.load(Ordering::Acquire))
    }
}

#[inline]
fn locate(entry: u32) -> (usize, usize) {
    ((entry / ENTRIES_PER_PAGE) as usize, (entry % ENTRIES_PER_PAGE) as usize)
}

impl EntryTable {
    /// Creates a table that can have so many pages.
    pub(crate) fn new(pages_max: usize) -> EntryTable {
        EntryTable {
            pages: (0..pages_max).map(|_| AtomicU32::new(0)).collect(),
            chunks: (0..pages_max.div_ceil(CHUNK_PAGES)).map(|_| OnceLock::new()).collect(),
            growth: Mutex::default(),
        }
    }

    /// Returns the near bytes of a table that can have so many pages, and of each chunk of
    /// bitmaps.
    pub(crate) fn near_bytes(pages_max: usize) -> (u64, u64) {
        let chunks = pages_max.div_ceil(CHUNK_PAGES) * size_of::<OnceLock<Chunk>>();
        ((pages_max * size_of::<AtomicU32>() + chunks) as u64, (CHUNK_PAGES * size_of::<EntryBits>()) as u64)
    }

    fn lock(&self) -> MutexGuard<'_, EntryGrowth> {
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of entry pages.
    pub(crate) fn made(&self) -> usize {
        self.lock().made
    }

    /// Returns the far pages of all entry pages, in the order of the entries.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u32> {
        self.pages[..self.made()].iter().map(|page| page.load(Ordering::Acquire))
    }

    /// Returns the number of chunks of bitmaps.
    pub(crate) fn chunk_count(&self) -> usize {
        self.lock().made.div_ceil(CHUNK_PAGES)
    }

    /// Returns the table of the far pages in which entries lie.
    pub(crate) fn entry_pages(&self) -> EntryPages<'_> {
        EntryPages(&self.pages)
    }

    /// Adds a page of zeros, and says whether that took a new chunk of bitmaps. `None` if the table
    /// has as many pages as it can have.
    pub(crate) fn add(&self, page: u32) -> Option<bool> {
        let mut growth = self.lock();
        let index = growth.made;
        let cell = self.pages.get(index)?;
        cell.store(page, Ordering::Release);
        let chunk = self.chunks[index / CHUNK_PAGES]
            .get_or_init(|| (0..CHUNK_PAGES).map(|_| [const { AtomicU64::new(0) }; WORDS_PER_PAGE]).collect());
        if index == 0 {
            // Entry 0 is no object's.
            chunk[0][0].store(1, Ordering::Relaxed);
        }
        growth.made = index + 1;
        Some(index.is_multiple_of(CHUNK_PAGES))
    }

    /// Claims the free entries of one word of the bitmaps; `None` if no entry is free.
    ///
    /// No word is claimed twice before a collection begins the row anew. A claimed entry is not in
    /// use before it has an object.
    pub(crate) fn claim(&self) -> Option<ClaimedEntries> {
        let mut growth = self.lock();
        for index in growth.unclaimed..growth.made * WORDS_PER_PAGE {
            let free = !self.bits(index / WORDS_PER_PAGE)[index % WORDS_PER_PAGE].load(Ordering::Relaxed);
            growth.unclaimed = index + 1;
            if free != 0 {
                return Some(ClaimedEntries { first: index as u32 * 64, mask: free });
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
    pub(crate) fn replace_bits(&self, live: impl Fn(usize, EntryBits) -> EntryBits) {
        let mut growth = self.lock();
        growth.unclaimed = 0;
        for page in 0..growth.made {
            let mut bits = live(page, self.bits_of(page));
            if page == 0 {
                // Entry 0 is no object's.
                bits[0] |= 1;
            }
            for (word, bits) in self.bits(page).iter().zip(bits) {
                word.store(bits, Ordering::Release);
            }
        }
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
        let Some(next) = EntryWord(word.load(Ordering::Acquire)).next(page, card) else { return Ok(false) };
        word.store(next.0, Ordering::Release);
        let (page, within) = locate(entry);
        let bits = &self.bits(page)[within / 64];
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
}
