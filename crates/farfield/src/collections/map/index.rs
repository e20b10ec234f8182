//! The index: from a hash to the slots of the entries that have it.
//!
//! Readers take no lock (optimistic reads, validated by the bucket's word). An entry that stays in
//! the map stays in its place, except while its bucket moves entries: a link is made, or the bucket
//! is split. The bucket's word shows such a move. So an entry that is found was there. An entry
//! that is not found was not there at some moment of the search, or the search is repeated. Writers
//! search in the same way, and then lock the bucket for a moment. They only compare slots then:
//! under a bucket's lock, no user code runs and nothing is waited for.

use super::buckets::{BucketArray, Index, IndexBucket, PLACES};
use crate::error::{BuildError, FarError};
use crate::heap::{AccessMode, Backoff, HeapInner, Scope, SlotCell, SlotWord, ThreadState};
use core::sync::atomic::{AtomicU32, Ordering, fence};
use farfield_core::heap::buckets::{BucketWord, after, bucket_of, has, low_bits, split_for};
use std::sync::{Mutex, PoisonError};

/// The buckets of a map (linear hashing: the table grows by splitting one bucket at a time).
pub(super) struct IndexTable {
    main: BucketArray,
    /// Overflow buckets, which continue others.
    spare: BucketArray,
    spares: Mutex<SpareBuckets>,
    count: AtomicU32,
    growing: Mutex<()>,
}

#[derive(Default)]
struct SpareBuckets {
    free: Vec<u32>,
    prepared: u32,
}

/// Result of a search: the entries with its hash.
#[derive(Default)]
pub(super) struct IndexSearch {
    /// The entry with the key: its slot and its address.
    pub(super) found: Option<(SlotWord, *mut u8)>,
    /// Entries of other keys that have the hash.
    unequal: Vec<SlotWord>,
    /// A bucket for a link, if one was needed and not used.
    spare: Option<u32>,
}

/// Entries per bucket above which the table grows, in halves: 3.5 entries.
const SEVENTH_HALVES: u64 = 7;

/// A bucket's lock. Other threads wait for it in scopes, so its holder must wait for nothing that
/// takes room.
struct BucketGuard<'a> {
    bucket: &'a IndexBucket,
    word: BucketWord,
    record: &'a ThreadState,
}

impl<'a> BucketGuard<'a> {
    fn new(bucket: &'a IndexBucket, word: BucketWord, record: &'a ThreadState) -> BucketGuard<'a> {
        record.locks.set(record.locks.get() + 1);
        BucketGuard { bucket, word, record }
    }

    /// From here on searches that find nothing are repeated.
    fn begin_move(&mut self) {
        self.word = self.word.moving();
        self.bucket.word.store(self.word.0, Ordering::Relaxed);
        // A thread that sees a store of the move sees the mark, or a later word.
        fence(Ordering::Release);
    }

    fn end_move(&mut self, depth: u32, linked: bool) {
        self.word = self.word.moved(depth, linked);
    }
}

impl Drop for BucketGuard<'_> {
    fn drop(&mut self) {
        self.bucket.word.store(self.word.unlock().0, Ordering::Release);
        self.record.locks.set(self.record.locks.get() - 1);
    }
}

impl IndexTable {
    pub(super) fn new(core: &HeapInner, index: Index) -> Result<IndexTable, BuildError> {
        Ok(IndexTable {
            main: BucketArray::new(core, index)?,
            spare: BucketArray::new(core, index)?,
            spares: Mutex::default(),
            count: AtomicU32::new(0),
            growing: Mutex::new(()),
        })
    }

    /// Makes the first buckets, enough for this many entries. Before that there is none.
    pub(super) fn start(&self, scope: &mut Scope<'_>, entries: u64) -> Result<(), FarError> {
        self.main.prepare(scope, 0)?;
        self.main.get(scope, 0)?.reset(0);
        self.count.store(1, Ordering::Release);
        let count = (entries.saturating_mul(2) / SEVENTH_HALVES).min(u64::from(self.main.max())) as u32;
        while self.count.load(Ordering::Relaxed) < count {
            scope.with_room(|| self.split(scope))?;
            scope.renew();
        }
        Ok(())
    }

    /// Returns the bucket that has the hash, and its word when it had it.
    #[inline]
    fn home<'a>(&'a self, scope: &'a Scope<'_>, hash: u32) -> Result<(&'a IndexBucket, BucketWord), FarError> {
        let mut number = bucket_of(hash, self.count.load(Ordering::Acquire));
        loop {
            let bucket = self.main.get(scope, number)?;
            let word = bucket.look(Ordering::Acquire);
            if has(number, word.depth(), hash) {
                return Ok((bucket, word));
            }
            // It was split. The count may be one behind: then the bucket's own depth tells.
            let again = bucket_of(hash, self.count.load(Ordering::Acquire));
            number = if again == number { low_bits(hash, word.depth()) } else { again };
        }
    }

    /// Returns the bucket that continues this one, if `word` says so. If the word is outdated by
    /// now, the result may be wrong; it proves nothing.
    #[inline]
    fn link(bucket: &IndexBucket, word: BucketWord) -> Option<u32> {
        if !word.is_linked() {
            return None;
        }
        let link = bucket.slots[PLACES - 1].word();
        if link >> 32 == 0 { (link as u32).checked_sub(1) } else { None }
    }

    /// Prefetches the bucket of a hash that is looked up soon, into the processor's cache.
    #[inline]
    pub(super) fn load_ahead(&self, hash: u32) {
        self.main.load_ahead(bucket_of(hash, self.count.load(Ordering::Relaxed)));
    }

    /// Returns the first entry with the hash, if its bucket is near. Only a hint: the bucket may be
    /// changing.
    #[inline]
    pub(super) fn guess(&self, scope: &Scope<'_>, hash: u32) -> Option<SlotWord> {
        let bucket = self.main.get_now(scope, bucket_of(hash, self.count.load(Ordering::Relaxed)))?;
        let place = bucket.hashes.iter().position(|seen| seen.load(Ordering::Relaxed) == hash)?;
        bucket.slots[place].load()
    }

    /// Collects numbers within the heap, for hints: those of the entries with the hash, as far as
    /// they can be found without waiting. From where the chain of buckets is far, the number of
    /// that bucket's page instead.
    pub(super) fn numbers(&self, scope: &Scope<'_>, hash: u32, numbers: &mut Vec<u32>) {
        let home = bucket_of(hash, self.count.load(Ordering::Relaxed));
        let (mut buckets, mut number) = (&self.main, home);
        loop {
            let Some(bucket) = buckets.get_now(scope, number) else {
                return numbers.extend(buckets.page_number(scope.core, number));
            };
            let word = bucket.look(Ordering::Acquire);
            let has_hash = |place: &usize| bucket.hashes[*place].load(Ordering::Relaxed) == hash;
            let slots = (0..PLACES).filter(has_hash).filter_map(|place| bucket.slots[place].load());
            numbers.extend(slots.map(|slot| slot.parts(scope.core).0));
            match Self::link(bucket, word) {
                Some(next) => (buckets, number) = (&self.spare, next),
                None => return,
            }
        }
    }

    /// Finds the entry that `is_key` accepts, among those with the hash.
    #[inline]
    pub(super) fn find(
        &self,
        scope: &Scope<'_>,
        hash: u32,
        mode: AccessMode,
        is_key: impl FnMut(*const u8, SlotWord) -> bool,
    ) -> Result<Option<(SlotWord, *mut u8)>, FarError> {
        self.find_by(scope, hash, |cell, slot| cell.address(scope, slot, mode), is_key)
    }

    /// Finds the entry that `is_key` accepts, among those with the hash. `address` brings the
    /// object of a cell near.
    #[inline]
    pub(super) fn find_by(
        &self,
        scope: &Scope<'_>,
        hash: u32,
        address: impl Fn(&SlotCell, SlotWord) -> Result<*mut u8, FarError>,
        mut is_key: impl FnMut(*const u8, SlotWord) -> bool,
    ) -> Result<Option<(SlotWord, *mut u8)>, FarError> {
        let mut backoff = None;
        loop {
            let (first, before) = self.home(scope, hash)?;
            let (mut bucket, mut word) = (first, before);
            loop {
                let places = if word.is_linked() { PLACES - 1 } else { PLACES };
                for place in 0..places {
                    if bucket.hashes[place].load(Ordering::Relaxed) != hash {
                        continue;
                    }
                    let Some(slot) = bucket.slots[place].load() else { continue };
                    let at = address(&bucket.slots[place], slot)?;
                    if is_key(at, slot) {
                        return Ok(Some((slot, at)));
                    }
                }
                let Some(next) = Self::link(bucket, word) else { break };
                bucket = self.spare.get(scope, next)?;
                word = bucket.look(Ordering::Acquire);
            }
            // The second look comes after everything that was read above.
            fence(Ordering::Acquire);
            if before.proves_absence(first.look(Ordering::Relaxed)) {
                return Ok(None);
            }
            backoff.get_or_insert_with(|| Backoff::new(scope.core.patience)).wait()?;
        }
    }

    /// Finds an entry that the caller wants to change with [`IndexTable::exchange`].
    pub(super) fn search(
        &self,
        scope: &Scope<'_>,
        hash: u32,
        search: &mut IndexSearch,
        mut is_key: impl FnMut(*const u8) -> bool,
    ) -> Result<(), FarError> {
        let unequal = &mut search.unequal;
        unequal.clear();
        search.found = self.find(scope, hash, AccessMode::Read, |address, slot| {
            let found = is_key(address);
            if !found {
                unequal.push(slot);
            }
            found
        })?;
        Ok(())
    }

    /// Puts `new` in place of the entry that the search found, or adds it if none was found; `None`
    /// removes the entry. Returns false if the map is no longer as the search saw it: the caller
    /// must search again.
    pub(super) fn exchange(
        &self,
        scope: &Scope<'_>,
        hash: u32,
        search: &mut IndexSearch,
        new: Option<SlotWord>,
    ) -> Result<bool, FarError> {
        let mut locked = self.lock(scope, hash)?;
        let first = locked.bucket;
        let (mut bucket, mut word) = (first, locked.word);
        let (mut old, mut free) = (None, None);
        'places: loop {
            let places = if word.is_linked() { PLACES - 1 } else { PLACES };
            for place in 0..places {
                let Some(slot) = bucket.slots[place].load() else {
                    free = free.or(Some((bucket, place)));
                    continue;
                };
                if bucket.hashes[place].load(Ordering::Relaxed) != hash {
                    continue;
                }
                if search.found.is_some_and(|(found, _)| found.is(slot, scope.core)) {
                    old = Some((bucket, place));
                    break 'places;
                }
                if !search.unequal.iter().any(|seen| seen.is(slot, scope.core)) {
                    return Ok(false);
                }
            }
            let Some(next) = Self::link(bucket, word) else { break };
            let Some(next) = self.spare.get_now(scope, next) else { return Ok(false) };
            bucket = next;
            word = bucket.look(Ordering::Relaxed);
        }
        if old.is_none() && search.found.is_some() {
            return Ok(false);
        }
        match (old, new, free) {
            (Some((bucket, place)), new, _) => bucket.slots[place].store(new.map_or(0, SlotWord::word)),
            (None, None, _) => {}
            (None, Some(new), Some((bucket, place))) => {
                bucket.hashes[place].store(hash, Ordering::Relaxed);
                bucket.slots[place].store(new.word());
            }
            (None, Some(new), None) => {
                let next = search.spare.and_then(|spare| Some((spare, self.spare.get_now(scope, spare)?)));
                let Some(next) = next else {
                    drop(locked);
                    self.fault_in_spare(scope, search)?;
                    return Ok(false);
                };
                add_link(&mut locked, bucket, next, (hash, new));
                search.spare = None;
            }
        }
        Ok(true)
    }

    /// Ends a search, and gives the bucket that it kept back.
    pub(super) fn finish(&self, search: &mut IndexSearch) {
        if let Some(spare) = search.spare.take() {
            self.lock_spares().free.push(spare);
        }
    }

    fn lock<'a>(&'a self, scope: &'a Scope<'_>, hash: u32) -> Result<BucketGuard<'a>, FarError> {
        let mut backoff = None;
        loop {
            let (bucket, seen) = self.home(scope, hash)?;
            if let Some(word) = seen.lock()
                && bucket.word.compare_exchange(seen.0, word.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return Ok(BucketGuard::new(bucket, word, scope.record));
            }
            backoff.get_or_insert_with(|| Backoff::new(scope.core.patience)).wait()?;
        }
    }

    fn lock_spares(&self) -> std::sync::MutexGuard<'_, SpareBuckets> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the search a bucket for a link, near as long as the scope lasts.
    fn fault_in_spare(&self, scope: &Scope<'_>, search: &mut IndexSearch) -> Result<(), FarError> {
        let spare = match search.spare {
            Some(spare) => spare,
            None => *search.spare.insert(self.take_spare(scope)?),
        };
        self.spare.get(scope, spare).map(drop)
    }

    fn take_spare(&self, scope: &Scope<'_>) -> Result<u32, FarError> {
        loop {
            let next = {
                let mut spares = self.lock_spares();
                if let Some(spare) = spares.free.pop() {
                    return Ok(spare);
                }
                let next = spares.prepared;
                if next == self.spare.max() {
                    return Err(FarError::FarFull);
                }
                if self.spare.is_prepared(next) {
                    spares.prepared += 1;
                    return Ok(next);
                }
                next
            };
            // Without the lock, because it may wait for room.
            self.spare.prepare(scope, next)?;
        }
    }

    /// Grows the table by a bucket or two if there are too many entries for its buckets, unless
    /// another thread is growing it. A failed growth is made up for later.
    #[inline]
    pub(super) fn grow(&self, scope: &Scope<'_>, entries: u64) {
        for _ in 0..2 {
            if entries * 2 > u64::from(self.count.load(Ordering::Relaxed)) * SEVENTH_HALVES {
                // A table that cannot grow gets longer chains.
                let _ = self.split(scope);
            }
        }
    }

    #[cold]
    fn split(&self, scope: &Scope<'_>) -> Result<(), FarError> {
        let Ok(_growing) = self.growing.try_lock() else { return Ok(()) };
        let count = self.count.load(Ordering::Acquire);
        if count == self.main.max() {
            return Ok(());
        }
        self.main.prepare(scope, count)?;
        let target = self.main.get(scope, count)?;
        let (source, depth) = split_for(count);
        // All of the chain near first: nothing is waited for under the lock.
        self.find(scope, source, AccessMode::Read, |_, _| false)?;
        let mut locked = self.lock(scope, source)?;
        let (mut stay, mut go, mut spares) = (Vec::new(), Vec::new(), Vec::new());
        let (mut bucket, mut word) = (locked.bucket, locked.word);
        loop {
            let places = if word.is_linked() { PLACES - 1 } else { PLACES };
            for place in 0..places {
                let hash = bucket.hashes[place].load(Ordering::Relaxed);
                let Some(slot) = bucket.slots[place].load() else { continue };
                if has(source, depth, hash) { stay.push((hash, slot)) } else { go.push((hash, slot)) }
            }
            let Some(next) = Self::link(bucket, word) else { break };
            let Some(bucket_now) = self.spare.get_now(scope, next) else { return Ok(()) };
            (bucket, word) = (bucket_now, bucket_now.look(Ordering::Relaxed));
            spares.push((next, bucket));
        }
        locked.begin_move();
        let linked = fill(target, &go, &mut spares);
        let target_word = BucketWord::new(depth);
        target.word.store(if linked { target_word.as_linked() } else { target_word }.0, Ordering::Release);
        let linked = fill(locked.bucket, &stay, &mut spares);
        locked.end_move(depth, linked);
        drop(locked);
        self.count.store(count + 1, Ordering::Release);
        self.lock_spares().free.extend(spares.iter().map(|(spare, _)| *spare));
        Ok(())
    }

    /// Collects all entries of the bucket at this position of a walk. Returns the position where
    /// the walk goes on.
    pub(super) fn entries_at(
        &self,
        scope: &Scope<'_>,
        position: u32,
        entries: &mut Vec<SlotWord>,
    ) -> Result<Option<u32>, FarError> {
        let mut backoff = Backoff::new(scope.core.patience);
        loop {
            entries.clear();
            let (first, before) = self.home(scope, position.reverse_bits())?;
            let (mut bucket, mut word) = (first, before);
            loop {
                let places = if word.is_linked() { PLACES - 1 } else { PLACES };
                entries.extend(bucket.slots[..places].iter().filter_map(|cell| cell.load()));
                let Some(next) = Self::link(bucket, word) else { break };
                bucket = self.spare.get(scope, next)?;
                word = bucket.look(Ordering::Acquire);
            }
            fence(Ordering::Acquire);
            if before.proves_absence(first.look(Ordering::Relaxed)) {
                return Ok(after(position, before.depth()));
            }
            backoff.wait()?;
        }
    }

    /// Checks whether buckets can be read without a miss.
    pub(super) fn is_near(&self) -> bool {
        self.main.is_near()
    }

    /// Returns the number of buckets that have hashes of their own.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the numbers of buckets in use, for statistics: the first ones, and those that
    /// continue others.
    pub(super) fn bucket_counts(&self) -> (u32, u32) {
        let spares = self.lock_spares();
        (self.count(), spares.prepared - spares.free.len() as u32)
    }

    /// Frees the buckets. Called when the map is dropped.
    pub(super) fn clear(&mut self, core: &HeapInner) {
        self.main.clear(core);
        self.spare.clear(core);
    }
}

/// Continues `last`, which is full, in a spare bucket, and adds an entry there.
fn add_link(
    locked: &mut BucketGuard<'_>,
    last: &IndexBucket,
    (spare, next): (u32, &IndexBucket),
    (hash, new): (u32, SlotWord),
) {
    next.reset(0);
    next.hashes[0].store(last.hashes[PLACES - 1].load(Ordering::Relaxed), Ordering::Relaxed);
    next.slots[0].store(last.slots[PLACES - 1].word());
    next.hashes[1].store(hash, Ordering::Relaxed);
    next.slots[1].store(new.word());
    locked.begin_move();
    last.slots[PLACES - 1].store(u64::from(spare) + 1);
    let is_first = core::ptr::eq(last, locked.bucket);
    if !is_first {
        last.word.store(BucketWord::new(0).as_linked().0, Ordering::Release);
    }
    locked.end_move(locked.word.depth(), is_first || locked.word.is_linked());
}

/// Writes entries into a bucket and as many spare ones as they need. Returns whether it is linked.
/// The entries of a bucket that is split never need more spares than it had.
fn fill<'a>(first: &'a IndexBucket, entries: &[(u32, SlotWord)], spares: &mut Vec<(u32, &'a IndexBucket)>) -> bool {
    let (mut bucket, mut rest) = (first, entries);
    loop {
        let linked = rest.len() > PLACES;
        let (here, later) = rest.split_at(if linked { PLACES - 1 } else { rest.len() });
        for place in 0..PLACES {
            let (hash, word) = here.get(place).map_or((0, 0), |(hash, slot)| (*hash, slot.word()));
            bucket.hashes[place].store(hash, Ordering::Relaxed);
            bucket.slots[place].store(word);
        }
        let mut next = None;
        if linked {
            next = spares.pop();
            let Some((number, _)) = next else { unreachable!("two chains are not longer than one was") };
            bucket.slots[PLACES - 1].store(u64::from(number) + 1);
        }
        if !core::ptr::eq(bucket, first) {
            let word = BucketWord::new(0);
            bucket.word.store(if linked { word.as_linked() } else { word }.0, Ordering::Release);
        }
        let Some((_, next)) = next else { return !core::ptr::eq(bucket, first) || linked };
        (bucket, rest) = (next, later);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against threads that wait for each other: one for room, with a bucket locked, and the
    //! others for the bucket, in scopes that keep the room. Whoever waits for a page with a lock
    //! panics here (`HeapInner::bring`).
    use super::*;
    use crate::Heap;
    use std::alloc::Layout;

    const HASH: u32 = 7;

    /// So many entries with one hash, and what a search sees that is for another one.
    fn chain(heap: &Heap, entries: usize) -> (IndexTable, Vec<SlotWord>) {
        let table = IndexTable::new(heap.core(), Index::Far).unwrap();
        table.start(&mut heap.enter(), 0).unwrap();
        let slots: Vec<SlotWord> = (0..entries).map(|_| entry(heap)).collect();
        for slot in &slots {
            assert_eq!(put(heap, &table, &mut IndexSearch::default(), *slot), Ok(true));
        }
        (table, slots)
    }

    fn entry(heap: &Heap) -> SlotWord {
        SlotWord::make(&heap.enter(), Layout::new::<u64>()).unwrap().0
    }

    fn put(heap: &Heap, table: &IndexTable, search: &mut IndexSearch, slot: SlotWord) -> Result<bool, FarError> {
        let scope = heap.enter();
        table.search(&scope, HASH, search, |_| false)?;
        table.exchange(&scope, HASH, search, Some(slot))
    }

    #[test]
    fn a_link_that_has_left_is_fetched_without_the_lock() {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).build().unwrap();
        let (mut table, mut slots) = chain(&heap, PLACES);
        slots.push(entry(&heap));
        let mut search = IndexSearch::default();
        assert_eq!(put(&heap, &table, &mut search, slots[PLACES]), Ok(false), "the bucket is full");
        assert!(search.spare.is_some());
        let ballast: Vec<_> = (0..512).map(|_| heap.alloc([0u8; 4096]).unwrap()).collect();
        drop(ballast);
        assert_eq!(put(&heap, &table, &mut search, slots[PLACES]), Ok(false), "the bucket for the link is far");
        let scope = heap.enter();
        let mut met = Vec::new();
        table.search(&scope, HASH, &mut search, |_| false).unwrap();
        table.spare.get(&scope, search.spare.unwrap()).unwrap();
        assert_eq!(table.exchange(&scope, HASH, &mut search, Some(slots[PLACES])), Ok(true));
        table
            .find(&scope, HASH, AccessMode::Read, |_, slot| {
                met.push(slot.word() >> 32 << 32 | slot.word() & 0xFF);
                false
            })
            .unwrap();
        assert_eq!(met.len(), slots.len());
        drop(scope);
        table.clear(heap.core());
        // SAFETY: made above, and in no index any more.
        slots.into_iter().for_each(|slot| unsafe { slot.free(heap.core()) });
        heap.verify();
    }
}
