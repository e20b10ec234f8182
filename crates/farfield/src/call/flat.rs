//! Entries of flat hash maps, as functions read them.
//!
//! A map's pages are found as those of a vector are. Which page a key is in says its directory, which is
//! near: it comes with the call if the map is a part of the root, and is not too long. The hash function
//! has to be one that both sides know ([`SeededState`](crate::SeededState)).

use super::items::ItemsRef;
use super::part::{NearTables, ObjectRef, PartBytes};
use super::place::FarPlace;
use super::view_traits::{FarView, Loan, ViewSource};
use bytemuck::{Pod, bytes_of};
use core::fmt::Debug;
use core::hash::BuildHasher;
use core::ops::Range;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FlatBucket, HashDirectory};
use farfield_wic::Fault;
use std::hash::RandomState;

/// The entries of a [`FarFlatMap`](crate::FarFlatMap), as a [`FarFunction`](crate::FarFunction) sees them.
/// [`FarPlace::entries`] and [`FarPlace::lookup`] read them.
pub struct FlatRef<'f, K: FarView + Pod, V: FarView + Pod, S: FarView = RandomState> {
    pages: ItemsRef<'f, [u8; PAGE_BYTES]>,
    directory: DirectoryTable<'f>,
    entries: u64,
    hasher: S::View<'f>,
    points: core::marker::PhantomData<&'f (K, V)>,
}

/// Directory that says in which page a key is.
#[derive(Clone, Copy)]
enum DirectoryTable<'f> {
    /// Levels of the directory in this process.
    Levels(&'f [Box<[u32]>]),
    /// Places of all levels, from this word on, of the tables that came with the call.
    Sent { first: u32, places: u32 },
    /// Nothing of it, because it is in another process.
    Elsewhere,
}

/// Longest directory that a call takes along, in places. It shares the room of an argument with the names
/// of changed pages.
const PLACES_MAX: usize = if cfg!(test) { 128 } else { 8 * 1024 };
/// Bytes of an image before the hash function: those of the pages, and first place, number of places, and
/// number of entries.
const IMAGE_BYTES: usize = ItemsRef::<[u8; PAGE_BYTES]>::IMAGE_BYTES + 16;

impl<K: FarView + Pod, V: FarView + Pod, S: FarView> Clone for FlatRef<'_, K, V, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K: FarView + Pod, V: FarView + Pod, S: FarView> Copy for FlatRef<'_, K, V, S> {}

impl<K: FarView + Pod, V: FarView + Pod, S: FarView> Debug for FlatRef<'_, K, V, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FlatRef({} entries)", self.entries)
    }
}

impl<'f, K: FarView + Pod, V: FarView + Pod, S: FarView> FlatRef<'f, K, V, S> {
    pub(crate) const BUCKET: FlatBucket = match FlatBucket::new(size_of::<K>(), size_of::<V>()) {
        Some(bucket) => bucket,
        None => panic!("key and value of a FarFlatMap have at most 1016 bytes"),
    };

    /// Makes one of a map that is lent: of the extents of its pages, their number, and its directory.
    pub(crate) fn new(
        (extents, pages): (&[u32], usize),
        directory: &HashDirectory,
        entries: u64,
        hasher: S::View<'f>,
        loan: Loan<'f>,
    ) -> FlatRef<'f, K, V, S> {
        // SAFETY: the levels are memory of the directory's own, which nobody changes or frees while the map is
        // lent, wherever the map itself is moved meanwhile.
        let levels = unsafe { &*core::ptr::from_ref(directory.levels()) };
        FlatRef {
            pages: ItemsRef::of_extents(extents, pages).lent(loan),
            directory: DirectoryTable::Levels(levels),
            entries,
            hasher,
            points: core::marker::PhantomData,
        }
    }

    /// Makes one of a map in a far value, whose tables are in another process.
    pub(crate) fn elsewhere(entries: u64, hasher: S::View<'f>) -> FlatRef<'f, K, V, S> {
        let (pages, directory) = (ItemsRef::elsewhere(0), DirectoryTable::Elsewhere);
        FlatRef { pages, directory, entries, hasher, points: core::marker::PhantomData }
    }

    /// Writes what [`FlatRef::decode_image`] reads, but for the hash function, which comes behind it.
    pub(crate) fn write_image(self, image: &mut [u8], tables: &mut NearTables) -> usize {
        self.pages.write_image(image, tables);
        let DirectoryTable::Levels(levels) = self.directory else { unreachable!("images are made of maps") };
        let (first, places) = (tables.len(), levels.iter().map(|level| level.len()).sum::<usize>());
        let is_whole = tables.window() == (0..usize::MAX);
        let places = if is_whole && places <= PLACES_MAX { places } else { 0 };
        levels.iter().flat_map(|level| level.iter()).take(places).for_each(|page| tables.push(*page));
        let at = ItemsRef::<[u8; PAGE_BYTES]>::IMAGE_BYTES;
        image[at..at + 4].copy_from_slice(&(first as u32).to_ne_bytes());
        image[at + 4..at + 8].copy_from_slice(&(places as u32).to_ne_bytes());
        image[at + 8..at + 16].copy_from_slice(&self.entries.to_ne_bytes());
        IMAGE_BYTES
    }

    /// Makes one of the image of a map.
    pub(crate) fn decode_image(image: &[u8]) -> Option<FlatRef<'f, K, V, S>> {
        let pages = ItemsRef::decode_image(super::ItemKind::Paged, image)?;
        let numbers = image.get(ItemsRef::<[u8; PAGE_BYTES]>::IMAGE_BYTES..)?;
        let word = |at: usize| numbers.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes);
        let (first, places) = (word(0)?, word(4)?);
        let entries = u64::from_ne_bytes(*numbers.get(8..)?.first_chunk()?);
        let hasher = S::decode(image.get(IMAGE_BYTES..IMAGE_BYTES + size_of::<S>())?, ViewSource::Root)?;
        let directory = match places {
            0 => DirectoryTable::Elsewhere,
            places => DirectoryTable::Sent { first, places },
        };
        Some(FlatRef { pages, directory, entries, hasher, points: core::marker::PhantomData })
    }

    /// Returns the number of entries.
    pub fn len(&self) -> u64 {
        self.entries
    }

    /// Checks whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Returns the number of pages that a call reads at most, where it is to read so many entries.
    pub(super) fn pieces(&self, entries_max: usize) -> Vec<Range<usize>> {
        let step = (entries_max / Self::BUCKET.capacity()).clamp(1, super::items::PIECE_SEGMENTS);
        let pages = self.pages.len();
        let mut pieces: Vec<_> = (0..pages).step_by(step).map(|page| page..(page + step).min(pages)).collect();
        if pieces.is_empty() {
            pieces.push(0..0);
        }
        pieces
    }

    /// Returns the first page of a hash's bucket. The outer `None` means that the directory is not here.
    fn find(&self, hash: u32, tables: &[u32]) -> Option<Option<u32>> {
        match self.directory {
            DirectoryTable::Levels(levels) => {
                Some(HashDirectory::find_in(levels.len(), hash, |level, index| levels[level][index]))
            }
            DirectoryTable::Sent { first, places } => {
                let places = tables.get(first as usize..)?.get(..places as usize)?;
                // Levels lie one behind the other, so a place of one is found by its suffix.
                let depth = places.len().checked_ilog2()? as usize + 1;
                let place = |level: usize, index| {
                    let before = if level == 0 { 0 } else { 1 << (level - 1) };
                    places.get(before + index).copied().unwrap_or(0)
                };
                Some(HashDirectory::find_in(depth, hash, place))
            }
            DirectoryTable::Elsewhere if self.entries == 0 => Some(None),
            DirectoryTable::Elsewhere => None,
        }
    }

    /// Returns a page of the map.
    async fn page<P: FarPlace>(&self, far: &'f P, page: usize) -> Result<ObjectRef<'f>, Fault> {
        if let Some(object) = self.pages.object(page, far.tables()) {
            return Ok(object);
        }
        if page < self.pages.len() || self.pages.is_elsewhere() {
            return far.halt_without_table().await;
        }
        // A step, so that a function that goes on all the same ends.
        far.yield_now().await;
        Err(Fault::OutOfRange { offset: page as u64 * PAGE_BYTES as u64 })
    }
}

/// Finds the value of a key.
pub(super) async fn lookup<'f, P: FarPlace, K: FarView + Pod, V: FarView + Pod, S: FarView>(
    far: &'f P,
    map: FlatRef<'f, K, V, S>,
    key: K,
) -> Result<Option<V::View<'f>>, Fault>
where
    S::View<'f>: BuildHasher,
{
    let bucket = FlatRef::<K, V, S>::BUCKET;
    let hash = crate::collections::flat_hash(&map.hasher, bytes_of(&key));
    let mut next = match map.find(hash, far.tables()) {
        Some(page) => page,
        None => return far.halt_without_table().await,
    };
    while let Some(page) = next {
        let object = map.page(far, page as usize).await?;
        let head = far.look(object.part(0, bucket.head_bytes()), copy_of(bucket.head_bytes())).await?;
        for candidate in bucket.candidates(&head, hash) {
            let entry = bucket.entry(candidate);
            let copy = far.look(object.part(entry.start, entry.len()), copy_of(entry.len())).await?;
            let (of, value) = bucket.split(&copy);
            if of == bytes_of(&key) {
                return match V::decode(value, ViewSource::Region) {
                    Some(value) => Ok(Some(value)),
                    None => super::part::refuse(far, object).await,
                };
            }
        }
        next = bucket.next(&head);
    }
    Ok(None)
}

/// Returns what copies so many bytes of a part.
fn copy_of(len: usize) -> impl FnOnce(&PartBytes<'_, '_>) -> Option<Vec<u8>> {
    move |part| {
        let mut copy = vec![0; len];
        // SAFETY: in this process, all bytes of a map's page were zero or written.
        unsafe { part.copy(0, &mut copy) }?;
        Some(copy)
    }
}

/// Pages that are fetched ahead of a walk.
const WINDOW: usize = 8;

/// A walk over the entries of a flat hash map, in no order ([`FarPlace::entries`]).
///
/// It reads a page at a time.
pub struct FlatCursor<'f, P: FarPlace, K: FarView + Pod, V: FarView + Pod, S: FarView> {
    far: &'f P,
    map: FlatRef<'f, K, V, S>,
    /// Pages that are left to be read.
    pages: Range<usize>,
    ahead: usize,
    views: Vec<(K::View<'f>, V::View<'f>)>,
}

impl<P: FarPlace, K: FarView + Pod, V: FarView + Pod, S: FarView> Debug for FlatCursor<'_, P, K, V, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FlatCursor({:?} of {:?})", self.pages, self.map)
    }
}

impl<'f, P: FarPlace, K: FarView + Pod, V: FarView + Pod, S: FarView> FlatCursor<'f, P, K, V, S> {
    /// Makes a walk over the entries in these pages.
    pub(super) fn new(far: &'f P, map: FlatRef<'f, K, V, S>, pages: Range<usize>) -> FlatCursor<'f, P, K, V, S> {
        let pages = pages.start..if map.pages.is_elsewhere() { pages.end } else { pages.end.min(map.pages.len()) };
        FlatCursor { far, map, ahead: pages.start + 1, pages, views: Vec::new() }
    }

    /// Returns the next entry, if there is one. Takes two steps for each page.
    ///
    /// # Errors
    /// Those of [`FarPlace::follow`].
    pub async fn next(&mut self) -> Result<Option<(K::View<'f>, V::View<'f>)>, Fault> {
        loop {
            if let Some(entry) = self.views.pop() {
                return Ok(Some(entry));
            }
            if self.pages.is_empty() || self.map.is_empty() {
                return Ok(None);
            }
            let page = self.map.page(self.far, self.pages.start).await?;
            self.fetch_ahead();
            let bytes = self.far.look(page.part(0, PAGE_BYTES), copy_of(PAGE_BYTES)).await?;
            let bucket = FlatRef::<K, V, S>::BUCKET;
            for index in 0..bucket.count(&bytes) {
                let (key, value) = bucket.split(&bytes[bucket.entry(index)]);
                let entry = K::decode(key, ViewSource::Region).zip(V::decode(value, ViewSource::Region));
                match entry {
                    Some(entry) => self.views.push(entry),
                    None => return super::part::refuse(self.far, page).await,
                }
            }
            self.pages.start += 1;
        }
    }

    /// Begins to fetch the pages that come next.
    fn fetch_ahead(&mut self) {
        let end = (self.pages.start + WINDOW + 1).min(self.pages.end);
        while self.ahead < end {
            if let Some(page) = self.map.pages.object(self.ahead, self.far.tables()) {
                self.far.announce(page);
            }
            self.ahead += 1;
        }
    }
}
