//! Buckets of a flat hash map: one page each, with the entries in it. A bucket is found by the lower
//! bits of a hash, and split when it is full.
//!
//! A page begins with a header: number of entries, depth, and the next page of the bucket. The
//! hashes of the entries follow, so that a search reads one entry. Then come the entries, key and
//! value, at any alignment.
//!
//! Which page is whose is said by a [`HashDirectory`]: extendible hashing (Fagin et al., TODS'79).

use crate::cast::u32_of;
use crate::geometry::PAGE_BYTES;
use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

/// Bytes before the hashes: three numbers of four bytes, and four that are zero.
const HEADER_BYTES: usize = 16;
const COUNT_AT: usize = 0;
const DEPTH_AT: usize = 4;
const NEXT_AT: usize = 8;
const HASH_BYTES: usize = size_of::<u32>();
/// Least number of entries for which a page has room.
const CAPACITY_MIN: usize = 4;

/// Layout of a bucket's pages, for entries of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlatBucket {
    key_bytes: usize,
    value_bytes: usize,
    capacity: usize,
}

impl FlatBucket {
    /// Most bytes of a key and a value together.
    pub const ENTRY_BYTES_MAX: usize = (PAGE_BYTES - HEADER_BYTES) / CAPACITY_MIN - HASH_BYTES;

    /// Returns the layout for keys and values of these sizes; `None` if a page has room for fewer
    /// than four entries.
    pub const fn new(key_bytes: usize, value_bytes: usize) -> Option<FlatBucket> {
        let entry_bytes = key_bytes.saturating_add(value_bytes);
        if entry_bytes > Self::ENTRY_BYTES_MAX {
            return None;
        }
        let capacity = (PAGE_BYTES - HEADER_BYTES) / (HASH_BYTES + entry_bytes);
        Some(FlatBucket { key_bytes, value_bytes, capacity })
    }

    /// Returns the number of entries for which a page has room.
    pub const fn capacity(self) -> usize {
        self.capacity
    }

    /// Returns the number of bytes, from the start of a page, that a search reads first.
    pub const fn head_bytes(self) -> usize {
        HEADER_BYTES + self.capacity * HASH_BYTES
    }

    /// Returns the number of entries in a page.
    #[inline]
    pub fn count(self, head: &[u8]) -> usize {
        (word(head, COUNT_AT) as usize).min(self.capacity)
    }

    /// Checks whether a page has no room.
    pub fn is_full(self, head: &[u8]) -> bool {
        self.count(head) == self.capacity
    }

    /// Returns the number of hash bits that all entries of the bucket have in common.
    pub fn depth(self, head: &[u8]) -> u32 {
        word(head, DEPTH_AT)
    }

    /// Returns the next page of the bucket.
    #[inline]
    pub fn next(self, head: &[u8]) -> Option<u32> {
        word(head, NEXT_AT).checked_sub(1)
    }

    /// Returns the hash of an entry.
    pub fn hash(self, head: &[u8], index: usize) -> u32 {
        word(head, HEADER_BYTES + index * HASH_BYTES)
    }

    /// Returns the indices of the entries with this hash.
    #[inline]
    pub fn candidates(self, head: &[u8], hash: u32) -> impl Iterator<Item = usize> {
        let hashes = head.get(HEADER_BYTES..).unwrap_or_default().as_chunks().0;
        let bytes = hash.to_le_bytes();
        let found = hashes.iter().take(self.count(head)).enumerate().filter(move |(_, of)| **of == bytes);
        found.map(|(index, _)| index)
    }

    /// Returns where an entry lies in its page: the key, then the value.
    #[inline]
    pub const fn entry(self, index: usize) -> Range<usize> {
        let entry_bytes = self.key_bytes + self.value_bytes;
        let start = self.head_bytes() + index * entry_bytes;
        start..start + entry_bytes
    }

    /// Splits the bytes of an entry into key and value.
    #[inline]
    pub fn split(self, entry: &[u8]) -> (&[u8], &[u8]) {
        entry.split_at(self.key_bytes.min(entry.len()))
    }

    /// Returns the index of the entry with this key.
    #[inline]
    pub fn find(self, page: &[u8], hash: u32, key: &[u8]) -> Option<usize> {
        self.candidates(page, hash).find(|index| self.split(&page[self.entry(*index)]).0 == key)
    }

    /// Makes a page of a bucket, without entries.
    pub fn start(self, page: &mut [u8], depth: u32) {
        page[..HEADER_BYTES].fill(0);
        set_word(page, DEPTH_AT, depth);
    }

    /// Sets the next page of the bucket.
    pub fn set_next(self, page: &mut [u8], next: Option<u32>) {
        set_word(page, NEXT_AT, next.map_or(0, |next| next + 1));
    }

    /// Adds an entry to a page that is not full.
    pub fn push(self, page: &mut [u8], hash: u32, entry: &[u8]) {
        let index = self.count(page);
        assert!(index < self.capacity);
        set_word(page, HEADER_BYTES + index * HASH_BYTES, hash);
        page[self.entry(index)].copy_from_slice(entry);
        set_word(page, COUNT_AT, u32_of(index + 1));
    }

    /// Removes an entry. The last one of the page moves into its place.
    pub fn remove(self, page: &mut [u8], index: usize) {
        let last = self.count(page) - 1;
        assert!(index <= last);
        let hash = self.hash(page, last);
        set_word(page, HEADER_BYTES + index * HASH_BYTES, hash);
        page.copy_within(self.entry(last), self.entry(index).start);
        set_word(page, COUNT_AT, u32_of(last));
    }

    /// Replaces the value of an entry.
    pub fn set_value(self, page: &mut [u8], index: usize, value: &[u8]) {
        let entry = self.entry(index);
        page[entry.start + self.key_bytes..entry.end].copy_from_slice(value);
    }
}

/// Returns the number at this place; 0 behind the end.
#[inline]
fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn set_word(bytes: &mut [u8], at: usize, word: u32) {
    bytes[at..at + size_of::<u32>()].copy_from_slice(&word.to_le_bytes());
}

/// Directory of an extendible hash table: it leads from a hash to a bucket.
///
/// A bucket of depth *d* has all hashes that end with the *d* bits of its *suffix*. The directory has
/// a place for each suffix up to its own depth, and a bucket is noted at one of them, with zeros
/// for the bits that it does not use. So a split fills one place, and a directory of twice the size
/// needs no copy of the old one: a search that finds no bucket clears the upper one of its bits.
/// The number of buckets bounds the depth, so that the places are at most twice as many.
#[derive(Clone, Debug, Default)]
pub struct HashDirectory {
    /// Buckets plus one, by suffix; 0: none. The first level has suffix 0, and level *d* the
    /// suffixes of *d* bits whose upper one is set.
    levels: Vec<Box<[u32]>>,
    buckets: u32,
}

impl HashDirectory {
    /// Makes a directory without buckets.
    pub const fn new() -> HashDirectory {
        HashDirectory { levels: Vec::new(), buckets: 0 }
    }

    /// Returns the number of buckets.
    pub fn buckets(&self) -> u32 {
        self.buckets
    }

    /// Returns the bytes that the directory takes.
    pub fn bytes(&self) -> u64 {
        self.levels.iter().map(|level| size_of_val::<[u32]>(level) as u64).sum()
    }

    /// Returns the bytes by which a bucket of this depth makes the directory larger.
    pub fn bytes_to_grow(&self, depth: u32) -> u64 {
        let levels = self.levels.len()..=depth as usize;
        levels.map(|level| (places(level) * size_of::<u32>()) as u64).sum()
    }

    /// Returns the greatest depth that a bucket may have now.
    pub fn depth_max(&self) -> u32 {
        self.buckets.max(1).ilog2() + 1
    }

    /// Returns the bucket of a hash; `None` if there is no bucket.
    #[inline]
    pub fn find(&self, hash: u32) -> Option<u32> {
        Self::find_in(self.levels.len(), hash, |level, index| self.levels[level][index])
    }

    /// Returns the bucket of a hash in a directory of so many levels, whose places `place` returns, by level
    /// and index; `None` if there is no bucket.
    #[inline]
    pub fn find_in(levels: usize, hash: u32, place: impl Fn(usize, usize) -> u32) -> Option<u32> {
        let depth = levels.checked_sub(1)?;
        let mut suffix = suffix(hash, u32_of(depth));
        loop {
            let (level, index) = locate(suffix);
            match place(level, index) {
                0 if suffix == 0 => return None,
                0 => suffix &= !(1 << suffix.ilog2()),
                bucket => return Some(bucket - 1),
            }
        }
    }

    /// Returns the levels, each twice as long as all before it: one place, one, two, four, and so on.
    pub fn levels(&self) -> &[Box<[u32]>] {
        &self.levels
    }

    /// Adds the first bucket, with all hashes.
    pub fn start(&mut self, bucket: u32) {
        assert_eq!(self.buckets, 0);
        self.set(0, bucket);
    }

    /// Notes that the bucket of this hash had this depth, and that its entries with the next bit
    /// set are in another bucket now.
    pub fn split(&mut self, hash: u32, depth: u32, bucket: u32) {
        assert!(depth < u32::BITS);
        self.set(suffix(hash, depth) | 1 << depth, bucket);
    }

    fn set(&mut self, suffix: u32, bucket: u32) {
        let (level, index) = locate(suffix);
        while self.levels.len() <= level {
            self.levels.push(vec![0; places(self.levels.len())].into_boxed_slice());
        }
        let place = &mut self.levels[level][index];
        assert_eq!(*place, 0, "a suffix has one bucket");
        *place = bucket.checked_add(1).unwrap_or_else(|| unreachable!("buckets are fewer than 32 bits can count"));
        self.buckets += 1;
    }
}

/// Returns the lower bits of a hash.
#[inline]
fn suffix(hash: u32, depth: u32) -> u32 {
    hash & u32::MAX.checked_shr(u32::BITS - depth).unwrap_or(0)
}

/// Returns the level of a suffix, and its index there.
#[inline]
fn locate(suffix: u32) -> (usize, usize) {
    match suffix.checked_ilog2() {
        None => (0, 0),
        Some(bit) => (bit as usize + 1, (suffix & !(1 << bit)) as usize),
    }
}

/// Returns the number of suffixes of a level.
fn places(level: usize) -> usize {
    (1 << level >> 1).max(1)
}

#[cfg(test)]
mod tests {
    //! Guards against hashes without a bucket, or with another one after a split of a stranger, and
    //! against entries that lie in each other.
    use super::*;

    #[test]
    fn each_hash_has_the_bucket_whose_suffix_it_ends_with() {
        let mut random = fastrand::Rng::with_seed(39);
        let mut directory = HashDirectory::new();
        assert_eq!(directory.find(7), None);
        directory.start(0);
        // Suffix and depth of each bucket.
        let mut model: Vec<(u32, u32)> = vec![(0, 0)];
        while model.len() < 5000 {
            let hash = random.u32(..);
            let bucket = directory.find(hash).unwrap();
            let (suffix, depth) = model[bucket as usize];
            assert_eq!(super::suffix(hash, depth), suffix);
            if depth >= directory.depth_max() {
                continue;
            }
            let (before, grows) = (directory.bytes(), directory.bytes_to_grow(depth + 1));
            directory.split(hash, depth, model.len() as u32);
            assert_eq!(directory.bytes(), before + grows);
            model[bucket as usize].1 += 1;
            model.push((suffix | 1 << depth, depth + 1));
            assert_eq!(directory.buckets() as usize, model.len());
            assert!(directory.bytes() <= 8 * u64::from(directory.buckets()), "at most two places for a bucket");
        }
        for (bucket, (suffix, depth)) in model.into_iter().enumerate() {
            let other_bits = random.u32(..).checked_shl(depth).unwrap_or(0);
            assert_eq!(directory.find(suffix | other_bits), Some(bucket as u32));
        }
    }

    #[test]
    fn a_page_is_a_small_map() {
        let mut random = fastrand::Rng::with_seed(40);
        for (key_bytes, value_bytes) in [(16, 64), (1, 0), (0, 0), (4, 8), (1000, 16), (3, 1013)] {
            let layout = FlatBucket::new(key_bytes, value_bytes).unwrap();
            assert!(layout.capacity() >= 4 && layout.entry(layout.capacity() - 1).end <= PAGE_BYTES);
            let (mut page, mut model) = (vec![0xEE; PAGE_BYTES], Vec::<(u32, Vec<u8>)>::new());
            layout.start(&mut page, 9);
            layout.set_next(&mut page, Some(70));
            for _ in 0..5000 {
                // Few hashes, so that several entries have the same.
                let mut key = vec![0; key_bytes];
                key.iter_mut().take(2).for_each(|byte| *byte = random.u8(..12));
                let hash = u32::from(key.first().copied().unwrap_or(0)) % 5;
                let value = vec![random.u8(..); value_bytes];
                let of = model.iter().position(|(_, entry)| entry[..key_bytes] == key);
                let found = layout.find(&page, hash, &key);
                assert_eq!(found, of);
                match found {
                    Some(index) if random.bool() => {
                        layout.remove(&mut page, index);
                        model.swap_remove(index);
                    }
                    Some(index) => {
                        layout.set_value(&mut page, index, &value);
                        model[index].1[key_bytes..].copy_from_slice(&value);
                    }
                    None if layout.is_full(&page) => {}
                    None => {
                        let entry = [key, value].concat();
                        layout.push(&mut page, hash, &entry);
                        model.push((hash, entry));
                    }
                }
                assert_eq!(layout.count(&page), model.len());
            }
            for (index, (hash, entry)) in model.iter().enumerate() {
                assert_eq!((layout.hash(&page, index), &page[layout.entry(index)]), (*hash, &entry[..]));
            }
            assert_eq!((layout.depth(&page), layout.next(&page)), (9, Some(70)));
        }
        assert_eq!(FlatBucket::new(500, FlatBucket::ENTRY_BYTES_MAX - 499), None);
    }

    #[test]
    fn bytes_that_nobody_wrote_lead_out_of_no_page() {
        let layout = FlatBucket::new(16, 64).unwrap();
        let page = vec![0xFF; PAGE_BYTES];
        assert_eq!(layout.count(&page), layout.capacity());
        assert_eq!(layout.candidates(&page, u32::MAX).count(), layout.capacity());
        assert_eq!((layout.count(&[]), layout.next(&[1, 2]), layout.candidates(&[], 0).count()), (0, None, 0));
    }
}
