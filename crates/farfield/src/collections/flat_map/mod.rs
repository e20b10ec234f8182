//! `FarFlatMap`: a hash map whose index is far, for entries that are plain bytes.
//!
//! A bucket is a page with its entries in it ("flat", as Abseil's `flat_hash_map`; an entry of a
//! [`FarMap`](crate::FarMap) is an object of its own). A small directory near leads from a hash to
//! the page (extendible hashing: Fagin et al., TODS'79). So a look-up is one far access: of the
//! page, or at the memory server, which answers with the value alone (`lookup`).
//!
//! Keys are compared by their bytes. The only code of users that runs inside is the hash function,
//! before anything is looked at, and closures, with copies of entries and no page in use.

mod lookup;
mod seeded;
mod view;
mod walk;

pub use seeded::{SeededHasher, SeededState, UnknownState};

use super::map::Change;
use super::paged::Paged;
use super::pattern::PrefetchMode;
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};
use bytemuck::{Pod, bytes_of, pod_read_unaligned as from_bytes};
use core::hash::{BuildHasher, Hasher};
use core::marker::PhantomData;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FlatBucket, HashDirectory};
use farfield_wic::Where;
use std::hash::RandomState;

/// Buckets with more pages than this are not split: their hashes are equal, or nearly so.
const SPLIT_PAGES_MAX: usize = 4;

/// A hash map for plain keys and values, whose index is far with the entries.
///
/// Near it keeps 4 to 8 bytes for each page of entries, a fraction of a byte for each entry, beside
/// the tables that a heap has for any page. A
/// look-up takes one far access. If the page is near, it is searched here. If it is far, it is
/// brought near, or the memory server looks the key up and answers with the value alone: by
/// default where that was faster lately ([`FarFlatMap::at`]). In both cases the answer is the same.
///
/// Keys and values are plain bytes ([`Pod`]): numbers, arrays of them, and structs for which `bytemuck` derives
/// that. Together they have at most 1016 bytes. [`FarMap`](crate::FarMap) takes values
/// of any type and size, is changed by several threads at a time and returns references; it keeps
/// some 20 bytes near for each entry, or its index in far pages of its own.
///
/// Two keys are equal if their bytes are: `-0.0` and `0.0` are different keys.
///
/// ```
/// use farfield::{FarFlatMap, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let mut visits: FarFlatMap<u64, u32> = FarFlatMap::new();
/// let scope = heap.enter();
/// for user in [7, 3, 7] {
///     visits.update(&scope, user, |visits| farfield::Change::Put(visits.unwrap_or(&0) + 1))?;
/// }
/// assert_eq!(visits.get(&scope, &7)?, Some(2));
/// assert_eq!(visits.get_many(&scope, &[3, 4])?, [Some(1), None]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Entries of more bytes are refused by the compiler:
///
/// ```compile_fail,E0080
/// let map: farfield::FarFlatMap<u64, [u8; 1009]> = farfield::FarFlatMap::new();
/// ```
pub struct FarFlatMap<K: Pod, V: Pod, S = RandomState> {
    pages: Paged<BucketPage>,
    directory: HashDirectory,
    /// Pages that belong to no bucket. They have no entries.
    free: Vec<u32>,
    len: u64,
    at: Where,
    hasher: S,
    owns: PhantomData<(K, V)>,
}

/// The bytes of one page of a bucket.
struct BucketPage([u8; PAGE_BYTES]);

/// Place of a key in its bucket, or of a new entry.
enum Slot {
    Occupied {
        page: u32,
        index: usize,
    },
    /// A page with room.
    Vacant {
        page: u32,
    },
    /// The bucket is to be split, or has no room.
    Full(FullBucket),
}

/// A bucket without room in its first page.
struct FullBucket {
    pages: Vec<u32>,
    depth: u32,
}

impl<K: Pod, V: Pod> FarFlatMap<K, V> {
    /// Makes an empty map. It belongs to the heap of its first entry.
    pub fn new() -> FarFlatMap<K, V> {
        FarFlatMap::with_hasher(RandomState::new())
    }
}

impl<K: Pod, V: Pod, S> FarFlatMap<K, V, S> {
    const BUCKET: FlatBucket = match FlatBucket::new(size_of::<K>(), size_of::<V>()) {
        Some(bucket) => bucket,
        None => panic!("key and value of a FarFlatMap have at most 1016 bytes: FarMap takes larger ones"),
    };

    /// Makes an empty map with this hash function, which is given the bytes of keys.
    pub fn with_hasher(hasher: S) -> FarFlatMap<K, V, S> {
        const { assert!(Self::BUCKET.capacity() > 0) };
        let mut pages = Paged::new();
        // Look-ups are random. Walks prefetch by themselves.
        pages.set_prefetch_mode(PrefetchMode::Off);
        FarFlatMap {
            pages,
            directory: HashDirectory::new(),
            free: Vec::new(),
            len: 0,
            at: Where::Auto,
            hasher,
            owns: PhantomData,
        }
    }

    /// Sets where keys of far pages are looked up. Near pages are always searched here.
    ///
    /// With [`Where::Client`], the page is brought near. That is best if few pages are used much
    /// oftener than others: near pages are the cache of this map. With [`Where::Server`], the memory
    /// server looks the key up, and nothing comes near; what it does not answer is looked up here.
    /// With [`Where::Auto`], the default, measurements choose. They compare the times of look-ups,
    /// and do not foresee whether a page is used again.
    pub fn at(mut self, at: Where) -> Self {
        self.at = at;
        self
    }

    /// Returns the number of entries.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Checks whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes that the map keeps near for its index. The heap's tables of pages are not
    /// among them.
    pub fn index_bytes(&self) -> u64 {
        self.directory.bytes()
    }

    /// Removes all entries. Takes no far access.
    pub fn clear(&mut self) {
        self.uncharge();
        self.pages.release(0);
        self.directory = HashDirectory::new();
        self.free = Vec::new();
        self.len = 0;
    }

    fn uncharge(&self) {
        if let Some(core) = self.pages.core() {
            // SAFETY: the extents keep the heap.
            unsafe { &*core }.uncharge(self.directory.bytes());
        }
    }

    /// Checks whether the scope is one of the map's heap.
    fn check(&self, scope: &Scope<'_>) -> Result<(), FarError> {
        match self.pages.core() {
            Some(core) if !core::ptr::eq(core, scope.core) => Err(FarError::OtherHeap),
            _ => Ok(()),
        }
    }

    /// Runs `action` on a page. It is our own code, and keeps no address of the page.
    #[inline]
    fn read<R>(&self, scope: &Scope<'_>, page: u32, action: impl FnOnce(&[u8]) -> R) -> Result<R, FarError> {
        let _brief = scope.begin_transient();
        let page = self.pages.unit(scope, page as usize, AccessMode::Read)?;
        // SAFETY: a page of bytes, all of which were zero or written; near until `_brief` is dropped.
        // Nobody changes it: that takes `&mut self`.
        Ok(action(unsafe { &(*page).0 }))
    }

    /// Runs `action` on a page, which it may change, like [`FarFlatMap::read`].
    fn write<R>(&mut self, scope: &Scope<'_>, page: u32, action: impl FnOnce(&mut [u8]) -> R) -> Result<R, FarError> {
        let _brief = scope.begin_transient();
        let page = self.pages.unit(scope, page as usize, AccessMode::Write)?;
        // SAFETY: as in `read`, and `&mut self` makes it exclusive.
        Ok(action(unsafe { &mut (*page).0 }))
    }

    /// Looks a key up here, from this page of its bucket on.
    #[inline]
    fn find(
        &self,
        scope: &Scope<'_>,
        mut page: u32,
        hash: u32,
        key: &[u8],
    ) -> Result<Option<(u32, usize, V)>, FarError> {
        loop {
            let (found, next) = self.read(scope, page, |bytes| {
                let found = Self::BUCKET.find(bytes, hash, key);
                let value = found.map(|index| {
                    let entry = &bytes[Self::BUCKET.entry(index)];
                    (index, from_bytes(Self::BUCKET.split(entry).1))
                });
                (value, Self::BUCKET.next(bytes))
            })?;
            match (found, next) {
                (Some((index, value)), _) => return Ok(Some((page, index, value))),
                (None, Some(next)) => page = next,
                (None, None) => return Ok(None),
            }
        }
    }

    /// Finds the place of a key, from the first page of its bucket on.
    fn slot(&self, scope: &Scope<'_>, first: u32, hash: u32, key: &[u8]) -> Result<Slot, FarError> {
        let (mut pages, mut vacant, mut depth) = (Vec::new(), None, 0);
        let mut next = Some(first);
        while let Some(page) = next {
            let found = self.read(scope, page, |bytes| {
                next = Self::BUCKET.next(bytes);
                if pages.is_empty() {
                    depth = Self::BUCKET.depth(bytes);
                }
                if vacant.is_none() && !Self::BUCKET.is_full(bytes) {
                    vacant = Some(page);
                }
                Self::BUCKET.find(bytes, hash, key)
            })?;
            if let Some(index) = found {
                return Ok(Slot::Occupied { page, index });
            }
            pages.push(page);
        }
        Ok(match vacant {
            // Room behind the first page is used only if the bucket cannot be split.
            Some(page) if page == first || !self.may_split(&pages, depth) => Slot::Vacant { page },
            _ => Slot::Full(FullBucket { pages, depth }),
        })
    }

    fn may_split(&self, pages: &[u32], depth: u32) -> bool {
        pages.len() <= SPLIT_PAGES_MAX && depth < self.directory.depth_max().min(u32::BITS)
    }

    /// Puts an entry in. If there is one, it is replaced if `replaces` says so. Returns the value
    /// that was there.
    fn put(&mut self, scope: &Scope<'_>, hash: u32, key: &K, value: &V, replaces: bool) -> Result<Option<V>, FarError> {
        self.check(scope)?;
        let (key, value) = (bytes_of(key), bytes_of(value));
        loop {
            let Some(first) = self.directory.find(hash) else {
                self.start(scope)?;
                continue;
            };
            match self.slot(scope, first, hash, key)? {
                Slot::Occupied { page, index } => {
                    let entry = Self::BUCKET.entry(index);
                    let old = |bytes: &[u8]| from_bytes(Self::BUCKET.split(&bytes[entry]).1);
                    return match replaces {
                        false => self.read(scope, page, old).map(Some),
                        true => self.write(scope, page, |bytes| {
                            let old = old(bytes);
                            Self::BUCKET.set_value(bytes, index, value);
                            Some(old)
                        }),
                    };
                }
                Slot::Vacant { page } => {
                    self.write(scope, page, |bytes| Self::BUCKET.push(bytes, hash, &[key, value].concat()))?;
                    self.len += 1;
                    return Ok(None);
                }
                Slot::Full(bucket) if self.may_split(&bucket.pages, bucket.depth) => {
                    self.split(scope, hash, &bucket)?;
                }
                Slot::Full(bucket) => self.append_page(scope, &bucket)?,
            }
        }
    }

    /// Makes the first bucket.
    fn start(&mut self, scope: &Scope<'_>) -> Result<(), FarError> {
        let _brief = scope.begin_transient();
        let bytes = self.directory.bytes_to_grow(0);
        scope.core.charge(bytes)?;
        match self.make_page(scope) {
            Ok((page, _)) => {
                self.directory.start(page);
                Ok(())
            }
            Err(error) => {
                scope.core.uncharge(bytes);
                Err(error)
            }
        }
    }

    /// Returns a page without entries, and its address, which is valid as long as the scope is held.
    fn make_page(&mut self, scope: &Scope<'_>) -> Result<(u32, *mut BucketPage), FarError> {
        if let Some(page) = self.free.last() {
            let (page, address) = (*page, self.pages.unit(scope, *page as usize, AccessMode::Write)?);
            self.free.pop();
            return Ok((page, address));
        }
        // The directory counts one more.
        let page = u32::try_from(self.pages.made()).ok().filter(|page| *page < u32::MAX - 1);
        let page = page.ok_or(FarError::FarFull)?;
        Ok((page, self.pages.make(scope)?))
    }

    /// Adds a page to a bucket whose hashes do not tell its entries apart.
    fn append_page(&mut self, scope: &Scope<'_>, bucket: &FullBucket) -> Result<(), FarError> {
        let Some(last) = bucket.pages.last() else { unreachable!("a bucket has a page") };
        let _hold = scope.hold();
        let before = self.pages.unit(scope, *last as usize, AccessMode::Write)?;
        let (page, address) = self.make_page(scope)?;
        // SAFETY: as in `write`; the two are different pages, and both are near while the scope is held.
        let (before, new) = unsafe { (&mut (*before).0, &mut (*address).0) };
        Self::BUCKET.start(new, bucket.depth);
        Self::BUCKET.set_next(before, Some(page));
        Ok(())
    }

    /// Splits the bucket of this hash by one more bit. After an error nothing has changed.
    fn split(&mut self, scope: &Scope<'_>, hash: u32, bucket: &FullBucket) -> Result<(), FarError> {
        let _hold = scope.hold();
        let mut old = Vec::with_capacity(bucket.pages.len());
        for page in &bucket.pages {
            old.push((*page, self.pages.unit(scope, *page as usize, AccessMode::Write)?));
        }
        let mut parts: [Vec<(u32, Vec<u8>)>; 2] = Default::default();
        for (_, address) in &old {
            // SAFETY: as in `read`; near while the scope is held.
            let bytes = unsafe { &(**address).0 };
            for index in 0..Self::BUCKET.count(bytes) {
                let hash = Self::BUCKET.hash(bytes, index);
                let part = (hash >> bucket.depth & 1) as usize;
                parts[part].push((hash, bytes[Self::BUCKET.entry(index)].to_vec()));
            }
        }

        // All that can fail.
        let capacity = Self::BUCKET.capacity();
        let pages_of = |part: usize| parts[part].len().div_ceil(capacity).max(1);
        self.free.try_reserve(old.len() + pages_of(1)).map_err(|_| FarError::NearFull)?;
        let bytes = self.directory.bytes_to_grow(bucket.depth + 1);
        if bytes > 0 {
            scope.core.charge(bytes)?;
        }
        let mut new = Vec::with_capacity(pages_of(1));
        while new.len() < pages_of(1) {
            match self.make_page(scope) {
                Ok(page) => new.push(page),
                Err(error) => {
                    self.free.extend(new.into_iter().map(|(page, _)| page));
                    if bytes > 0 {
                        scope.core.uncharge(bytes);
                    }
                    return Err(error);
                }
            }
        }

        let surplus = old.split_off(pages_of(0));
        for (page, address) in surplus {
            // SAFETY: as in `write`; near while the scope is held.
            Self::BUCKET.start(unsafe { &mut (*address).0 }, 0);
            self.free.push(page);
        }
        for (pages, entries) in [&old, &new].into_iter().zip(&parts) {
            let nexts = pages.iter().skip(1).map(|(page, _)| Some(*page)).chain([None]);
            let mut entries = entries.chunks(capacity);
            for ((_, address), next) in pages.iter().zip(nexts) {
                // SAFETY: as in `write`; each is another page, near while the scope is held.
                let bytes = unsafe { &mut (**address).0 };
                Self::BUCKET.start(bytes, bucket.depth + 1);
                Self::BUCKET.set_next(bytes, next);
                for (hash, entry) in entries.next().unwrap_or_default() {
                    Self::BUCKET.push(bytes, *hash, entry);
                }
            }
        }
        self.directory.split(hash, bucket.depth, new[0].0);
        Ok(())
    }

    /// Removes a key. Returns its value.
    fn take(&mut self, scope: &Scope<'_>, hash: u32, key: &K) -> Result<Option<V>, FarError> {
        self.check(scope)?;
        let Some(first) = self.directory.find(hash) else { return Ok(None) };
        let Some((page, index, value)) = self.find(scope, first, hash, bytes_of(key))? else { return Ok(None) };
        self.write(scope, page, |bytes| Self::BUCKET.remove(bytes, index))?;
        self.len -= 1;
        Ok(Some(value))
    }
}

impl<K: Pod, V: Pod, S: BuildHasher> FarFlatMap<K, V, S> {
    fn hash(&self, key: &K) -> u32 {
        flat_hash(&self.hasher, bytes_of(key))
    }

    /// Returns the value of a key, if the map has the key.
    pub fn get(&self, scope: &Scope<'_>, key: &K) -> Result<Option<V>, FarError> {
        let hash = self.hash(key);
        self.check(scope)?;
        let Some(first) = self.directory.find(hash) else { return Ok(None) };
        if self.at != Where::Client && self.pages.is_far(first as usize) {
            return self.get_far(scope, first, hash, key);
        }
        Ok(self.find(scope, first, hash, bytes_of(key))?.map(|(.., value)| value))
    }

    /// Returns the value like [`FarFlatMap::get`], for a task: other tasks run while the page is
    /// brought near.
    pub async fn fetch(&self, scope: &Scope<'_>, key: &K) -> Result<Option<V>, FarError> {
        let hash = self.hash(key);
        self.check(scope)?;
        let Some(first) = self.directory.find(hash) else { return Ok(None) };
        Ok(scope.retry(|| self.find(scope, first, hash, bytes_of(key))).await?.map(|(.., value)| value))
    }

    /// Checks whether the map has the key.
    pub fn contains_key(&self, scope: &Scope<'_>, key: &K) -> Result<bool, FarError> {
        Ok(self.get(scope, key)?.is_some())
    }

    /// Puts an entry in. Returns the value that it replaces. The page comes near.
    pub fn insert(&mut self, scope: &Scope<'_>, key: K, value: V) -> Result<Option<V>, FarError> {
        self.put(scope, self.hash(&key), &key, &value, true)
    }

    /// Puts an entry in if the map does not have the key. Otherwise changes nothing and returns the
    /// value that is there.
    pub fn insert_new(&mut self, scope: &Scope<'_>, key: K, value: V) -> Result<Option<V>, FarError> {
        self.put(scope, self.hash(&key), &key, &value, false)
    }

    /// Removes a key. Returns its value.
    pub fn remove(&mut self, scope: &Scope<'_>, key: &K) -> Result<Option<V>, FarError> {
        self.take(scope, self.hash(key), key)
    }

    /// Looks at an entry and changes it. Returns the value that was there.
    pub fn update(
        &mut self,
        scope: &Scope<'_>,
        key: K,
        change: impl FnOnce(Option<&V>) -> Change<V>,
    ) -> Result<Option<V>, FarError> {
        let hash = self.hash(&key);
        self.check(scope)?;
        let old = match self.directory.find(hash) {
            Some(first) => self.find(scope, first, hash, bytes_of(&key))?.map(|(.., value)| value),
            None => None,
        };
        match change(old.as_ref()) {
            Change::Keep => Ok(old),
            Change::Put(value) => self.put(scope, hash, &key, &value, true),
            Change::Remove => self.take(scope, hash, &key),
        }
    }
}

/// Returns the hash of a key with these bytes.
pub(crate) fn flat_hash(state: &impl BuildHasher, key: &[u8]) -> u32 {
    let mut hasher = state.build_hasher();
    hasher.write(key);
    let hash = hasher.finish();
    // Both halves, for hash functions that leave one of them empty.
    (hash ^ hash >> 32) as u32
}

impl<K: Pod, V: Pod, S> Drop for FarFlatMap<K, V, S> {
    fn drop(&mut self) {
        self.uncharge();
    }
}

impl<K: Pod, V: Pod, S: Default> Default for FarFlatMap<K, V, S> {
    fn default() -> Self {
        FarFlatMap::with_hasher(S::default())
    }
}

impl<K: Pod, V: Pod, S> core::fmt::Debug for FarFlatMap<K, V, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarFlatMap({} entries, {} pages)", self.len, self.pages.made())
    }
}
