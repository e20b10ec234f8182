//! Digests of each far page, kept near: four bytes a page, so that a heap need not trust its pool.
//!
//! A server compares pages with the checksums that came with them, so it finds bytes that rot. It
//! does not find data that it has lost: a write that it acknowledged and did not store, an older
//! version, another page, zeros. All of these have checksums that are right for their bytes. So the
//! heap remembers what it wrote, as an erasure code's index does. All data that comes back, by any
//! path, passes [`HeapInner::check_far`] before anybody has a reference to it.
//!
//! The heap remembers a *digest* of 32 bits for each page: the lower half of its checksum. The
//! checksum travels with each page and with each part of one (`Op::ReadPart`), and the lane has
//! compared it with the bytes. With [`Verify::Keyed`] the digest is a hash of the bytes themselves,
//! under a key that only this process has.
//!
//! A digest is written by the owner of a Claimed page, before the page is Far. It is read by
//! owners of flights, and by the evictor, which have seen Far (Acquire).

use super::HeapInner;
use super::memory::ReservedArray;
use crate::config::Verify;
use crate::error::BuildError;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::UniversalHash;
use farfield_os::memory::load_ahead;
use farfield_pool::{Backend, PoolError};

/// Digests of all far pages of a heap.
pub(crate) struct Checksums {
    digests: ReservedArray<AtomicU32>,
    key: Option<Box<UniversalHash>>,
}

/// Digest of a page whose bytes the heap does not know: nobody has written it, or a function at the
/// server has.
const UNKNOWN: u32 = 0;

impl Checksums {
    /// Bytes of near memory for each page.
    pub(crate) const BYTES_PER_PAGE: usize = size_of::<AtomicU32>();

    pub(crate) fn new(pages: u32, verify: Verify) -> Result<Checksums, BuildError> {
        let os = |why: farfield_os::Errno| BuildError::Os { what: "random bytes", why: why.to_string() };
        let key = match verify {
            Verify::Checksum => None,
            Verify::Keyed => Some(UniversalHash::new(farfield_os::serving::fill_random).map_err(os)?),
        };
        Ok(Checksums { digests: ReservedArray::new(pages as usize)?, key })
    }

    /// Returns the bytes of near memory beside the digests.
    pub(crate) fn key_bytes(&self) -> u64 {
        self.key.as_ref().map_or(0, |_| size_of::<UniversalHash>() as u64)
    }

    /// Checks whether a page must be read as a whole to be verified.
    pub(crate) fn needs_whole_pages(&self) -> bool {
        self.key.is_some()
    }

    /// Loads the digest of a page into the processor's cache, because the page is on its way.
    pub(crate) fn announce(&self, page: u32) {
        load_ahead(&self.digests[page]);
    }

    /// Remembers the digest of these bytes, with this checksum, which are about to be written to
    /// the pool.
    pub(crate) fn note(&self, page: u32, sum: u64, bytes: &[u8]) {
        self.digests[page].store(self.digest(page, sum, bytes), Ordering::Relaxed);
    }

    /// Remembers the digest of a page that a function at the server has written, which says that the
    /// page has this checksum. There is no key.
    pub(crate) fn note_sum(&self, page: u32, sum: u64) {
        assert!(self.key.is_none(), "only the bytes have a keyed digest");
        self.digests[page].store(self.digest(page, sum, &[]), Ordering::Relaxed);
    }

    /// Forgets the digest of a page that a function at the server has written: the first read will
    /// set it.
    pub(crate) fn forget(&self, page: u32) {
        self.digests[page].store(UNKNOWN, Ordering::Relaxed);
    }

    /// Checks whether a page that came from the pool is the one that was written there.
    ///
    /// `sum` is the checksum of the whole page, with which the lane has compared `bytes`: the page,
    /// or at least the part of it that was requested.
    fn matches(&self, page: u32, sum: u64, bytes: &[u8]) -> bool {
        let found = self.digest(page, sum, bytes);
        let known = &self.digests[page];
        match known.compare_exchange(UNKNOWN, found, Ordering::Relaxed, Ordering::Relaxed) {
            // The first read of what a function wrote: from now on the page is this, and nothing
            // else.
            Ok(_) => true,
            Err(known) => known == found,
        }
    }

    /// Checks whether the digest is that of a page with this checksum. There is no key.
    pub(crate) fn is_sum(&self, page: u32, sum: u64) -> bool {
        assert!(self.key.is_none(), "only the bytes have a keyed digest");
        self.digests[page].load(Ordering::Relaxed) == self.digest(page, sum, &[])
    }

    /// Checks whether the digest fits a page with this checksum, which is near and clean. For the
    /// verifier.
    pub(super) fn agrees(&self, page: u32, sum: u64) -> bool {
        self.key.is_some() || self.digests[page].load(Ordering::Relaxed) == (sum as u32).max(UNKNOWN + 1)
    }

    fn digest(&self, page: u32, sum: u64, bytes: &[u8]) -> u32 {
        let digest = match &self.key {
            None => sum as u32,
            Some(key) => {
                let Ok(bytes) = bytes.try_into() else { unreachable!("a page has {PAGE_BYTES} bytes") };
                key.of_page(page, bytes)
            }
        };
        digest.max(UNKNOWN + 1)
    }
}

impl HeapInner {
    /// Verifies a page that came from the pool. All data that comes near, by any path, passes here;
    /// what does not match is not used. For `sum` and `bytes` see [`Checksums::matches`].
    pub(crate) fn check_far(&self, page: u32, sum: u64, bytes: &[u8]) -> Result<(), PoolError> {
        if self.checksums.matches(page, sum, bytes) {
            return Ok(());
        }
        let page = PageId(page.into());
        // If several servers keep the same data, it is not known which one it was.
        let server = self.backend.deal().map_or(0, |deal| deal.place_byte(page.offset()).0 as u16);
        Err(PoolError::Corrupt { page, server })
    }
}

#[cfg(test)]
mod tests {
    //! Guards against bytes that pass for what was taken away and are not.
    use super::*;
    use crate::heap::TABLES_PER_PAGE;
    use crate::test_budget::assert_in_budget;
    use crate::{Heap, Plane};
    use farfield_core::checksum;

    fn checksums(verify: Verify) -> Checksums {
        Checksums::new(1 << 16, verify).unwrap()
    }

    fn page(byte: u8) -> [u8; PAGE_BYTES] {
        [byte; PAGE_BYTES]
    }

    #[test]
    fn a_page_is_recognised_and_no_other_passes() {
        for verify in [Verify::Checksum, Verify::Keyed] {
            let known = checksums(verify);
            let (right, old, zeros) = (page(2), page(1), page(0));
            known.note(7, checksum(&old), &old);
            known.note(7, checksum(&right), &right);
            assert!(known.matches(7, checksum(&right), &right));
            assert!(!known.matches(7, checksum(&old), &old), "{verify:?}: a write that was lost");
            assert!(!known.matches(7, checksum(&zeros), &zeros), "{verify:?}: a page that is not there");
            let mut torn = right;
            torn[..2048].copy_from_slice(&old[..2048]);
            assert!(!known.matches(7, checksum(&torn), &torn), "{verify:?}: two versions in one");
            known.note(8, checksum(&old), &old);
            assert!(!known.matches(7, checksum(&old), &old), "{verify:?}: another page");
            assert!(known.matches(7, checksum(&right), &right), "{verify:?}: a lie is not remembered");
        }
    }

    #[test]
    fn checksums_of_pages_that_a_function_wrote_are_learned_once() {
        for verify in [Verify::Checksum, Verify::Keyed] {
            let known = checksums(verify);
            let (right, other) = (page(2), page(3));
            known.note(7, checksum(&other), &other);
            known.forget(7);
            assert!(known.matches(7, checksum(&right), &right), "nobody knows better");
            assert!(known.matches(7, checksum(&right), &right));
            assert!(!known.matches(7, checksum(&other), &other), "{verify:?}: it was something else before");
        }
    }

    #[test]
    fn checksums_that_a_function_tells_are_believed_and_no_other() {
        let known = checksums(Verify::Checksum);
        let (right, other) = (page(2), page(3));
        known.note_sum(7, checksum(&right));
        assert!(known.is_sum(7, checksum(&right)) && !known.is_sum(7, checksum(&other)));
        assert!(!known.matches(7, checksum(&other), &other) && known.matches(7, checksum(&right), &right));
        known.forget(7);
        assert!(!known.is_sum(7, checksum(&right)), "it is not known");
        // A digest is never the one of an unknown page.
        known.note_sum(7, 0);
        assert!(known.is_sum(7, 0) && !known.matches(7, checksum(&right), &right));
    }

    /// A checksum can be computed by everybody, also to be that of something else.
    #[test]
    fn only_a_key_stands_up_to_a_server_that_forges_checksums() {
        let (right, forged) = (page(2), page(3));
        for (verify, passes) in [(Verify::Checksum, true), (Verify::Keyed, false)] {
            let known = checksums(verify);
            known.note(7, checksum(&right), &right);
            assert_eq!(known.matches(7, checksum(&right), &forged), passes);
        }
    }

    #[test]
    fn digests_and_key_count_as_near_memory() {
        for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
            let tables = |verify| {
                let heap = Heap::builder().near(8 << 20).near_max(8 << 20).far(1 << 30).plane(plane).verify(verify);
                let heap = heap.build().unwrap();
                let values: Vec<_> = (0..8192u64).map(|value| heap.alloc([value; 512]).unwrap()).collect();
                let stats = heap.stats();
                assert_in_budget(&heap);
                assert!(stats.table_bytes >= stats.pages * TABLES_PER_PAGE as u64);
                drop(values);
                heap.core().table_bytes()
            };
            let (plain, keyed) = (tables(Verify::Checksum), tables(Verify::Keyed));
            assert!(keyed >= plain + 8192, "{plane:?}: {plain} and {keyed}");
        }
    }
}
