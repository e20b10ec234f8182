//! Member `lz`: pages in the memory of this process, compressed.
//!
//! A page of zeros takes nothing, and one that repeats eight bytes takes 64 bytes. A page that lz4
//! makes at least a quarter smaller takes its compressed bytes, in pieces of that size. Any other
//! page is stored as it is. Pages that nobody has used for long are packed again, by zstd, when
//! memory becomes scarce (`pack`). Checksums are of the page before it was compressed.

mod lane;
mod pack;
mod slabs;

use crate::contract::backend::check_range;
use crate::table::{AtomicTable, PageTable};
use crate::{Backend, CloneTicket, Health, Lane, PoolError};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::Errno;
use farfield_os::sync::Mutex;
use lane::LzLane;
use slabs::Slabs;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most bytes of a compressed page. A larger one is stored as it is: reading it would cost more
/// than it saves.
const COMPRESSED_MAX: usize = PAGE_BYTES * 3 / 4;
/// Least size that makes sense, in bytes.
const SIZE_MIN: u64 = 16 << 20;
/// Most bytes that can be addressed: pages are named by 32 bits, in units of 64 bytes.
const SIZE_MAX: u64 = 128 << 30;

/// Options of the URL `lz:?size=8G`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Config {
    size_bytes: u64,
}

impl Config {
    /// Parses the text after `lz:`.
    pub(crate) fn parse(text: &str) -> Result<Config, String> {
        let write = || "write how much memory compressed pages may take, as in lz:?size=8G".to_owned();
        let size = text.strip_prefix('?').and_then(|options| options.strip_prefix("size=")).ok_or_else(write)?;
        let size_bytes = crate::url::size::parse(size)?;
        if !(SIZE_MIN..=SIZE_MAX).contains(&size_bytes) {
            return Err("the size of lz is between 16M and 128G".into());
        }
        Ok(Config { size_bytes })
    }
}

/// Form in which a page is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PageEncoding {
    /// The page as it is.
    Raw,
    /// A single word that the page repeats.
    Repeated,
    /// The page compressed by lz4.
    Lz4,
    /// The page compressed by zstd.
    Zstd,
}

/// Header of two words before the bytes of a page.
#[derive(Clone, Copy, Debug)]
struct EncodedHeader {
    sum: u64,
    bytes: usize,
    form: u32,
}

const WORD_BYTES: usize = size_of::<u64>();
const HEADER_BYTES: usize = 2 * WORD_BYTES;

impl EncodedHeader {
    fn new(sum: u64, form: PageEncoding, bytes: usize) -> EncodedHeader {
        EncodedHeader { sum, bytes, form: form as u32 }
    }

    fn to_words(self) -> [u64; 2] {
        [self.sum, u64::from(self.form) << 32 | self.bytes as u64]
    }

    /// Reads a header. Damaged words give a header, too, but one of a page at most.
    fn from_words([sum, rest]: [u64; 2]) -> EncodedHeader {
        EncodedHeader { sum, bytes: (rest as u32 as usize).min(PAGE_BYTES), form: (rest >> 32) as u32 }
    }

    /// Returns the form; `None` if the header is damaged.
    fn form(self) -> Option<PageEncoding> {
        [PageEncoding::Raw, PageEncoding::Repeated, PageEncoding::Lz4, PageEncoding::Zstd]
            .into_iter()
            .find(|form| *form as u32 == self.form)
    }
}

/// State that the backend and its lanes share.
struct Region {
    server: u16,
    pages: u64,
    size_bytes: u64,
    places: PageTable,
    slabs: Slabs,
    stored: AtomicU64,
    /// Two bits for each page.
    marks: AtomicTable<AtomicU64>,
    /// End of the pages that are stored.
    end: AtomicU64,
    /// Page that is looked at next.
    hand: AtomicU64,
    /// Set while a lane packs.
    is_packing: AtomicBool,
}

impl Region {
    fn new(server: u16, size_bytes: u64, pages: u64) -> Result<Region, PoolError> {
        if pages > 1 << 32 {
            return Err(PoolError::Refused { server, reason: "the region is larger than 16 TiB" });
        }
        let parts = || {
            let marks = AtomicTable::new(pages.div_ceil(pack::PAGES_OF_WORD))?;
            Ok::<_, Errno>((PageTable::new(pages)?, Slabs::new(size_bytes)?, marks))
        };
        let (places, slabs, marks) = parts().map_err(PoolError::Os)?;
        let [stored, end, hand] = [const { AtomicU64::new(0) }; 3];
        Ok(Region {
            server,
            pages,
            size_bytes,
            places,
            slabs,
            stored,
            marks,
            end,
            hand,
            is_packing: AtomicBool::new(false),
        })
    }

    fn check(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        check_range((page, count), self.pages, self.server)
    }

    /// Returns the `index`-th word of a piece. A reader of a piece that became another page's
    /// meanwhile reads what another lane writes, so all words are atomic.
    fn word(&self, unit: u64, index: usize) -> &AtomicU64 {
        // SAFETY: the address is checked, aligned, and mapped as long as the region; everybody uses
        // it atomically.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU64::from_ptr(self.slabs.address(unit, index * WORD_BYTES).cast())
        }
    }

    /// Puts the bytes of a page into a piece of their own.
    fn keep(&self, header: EncodedHeader, bytes: &[u8]) -> Result<u64, PoolError> {
        let full = PoolError::PoolFull { server: self.server };
        let unit = self.slabs.take(HEADER_BYTES + bytes.len()).ok_or(full)?;
        // A reader that takes these words for those of another page learns thereby that its page is
        // elsewhere.
        fence(Ordering::Release);
        let (whole, rest) = bytes.as_chunks::<WORD_BYTES>();
        let mut last = [0; WORD_BYTES];
        last[..rest.len()].copy_from_slice(rest);
        let words = whole.iter().chain((!rest.is_empty()).then_some(&last)).map(|word| u64::from_le_bytes(*word));
        for (index, word) in header.to_words().into_iter().chain(words).enumerate() {
            self.word(unit, index).store(word, Ordering::Relaxed);
        }
        Ok(unit)
    }

    /// Returns the unit where the page is.
    fn unit(&self, page: u64) -> Option<u64> {
        self.places.get(page).map(pack::unit_of)
    }

    /// Copies the stored bytes of `page` into `bytes`. Returns its header, or `None` if the page is
    /// not stored.
    fn copy(&self, page: u64, bytes: &mut [u8; PAGE_BYTES]) -> Option<EncodedHeader> {
        loop {
            let unit = self.unit(page)?;
            let word = |index: usize| self.word(unit, index).load(Ordering::Relaxed);
            let header = EncodedHeader::from_words([word(0), word(1)]);
            // The last piece of all ends with the memory of slabs.
            let len = header.bytes.min(self.slabs.bytes_from(unit) - HEADER_BYTES);
            for (index, target) in
                bytes.as_chunks_mut::<WORD_BYTES>().0[..len.div_ceil(WORD_BYTES)].iter_mut().enumerate()
            {
                *target = word(2 + index).to_le_bytes();
            }
            fence(Ordering::Acquire);
            if self.unit(page) == Some(unit) {
                return Some(EncodedHeader { bytes: len, ..header });
            }
        }
    }

    /// Makes this piece the page, or removes the page.
    fn publish(&self, page: u64, unit: Option<u64>) {
        let before = self.places.set(page, unit).map(pack::unit_of);
        if let Some(before) = before {
            self.slabs.give(before);
        }
        if unit.is_some() {
            // Mostly the page is below the end already, which others read, too.
            if page >= self.end.load(Ordering::Relaxed) {
                self.end.fetch_max(page + 1, Ordering::Relaxed);
            }
            self.is_new(page);
        }
        match (before, unit) {
            (None, Some(_)) => drop(self.stored.fetch_add(1, Ordering::Relaxed)),
            (Some(_), None) => drop(self.stored.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
    }

    fn discard(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        self.check(page, count)?;
        let end = page.0 + count;
        let walked = self.places.each(page.0, end, |page| self.publish(page, None));
        walked.and_then(|()| self.places.forget(page.0, end)).map_err(PoolError::Os)
    }

    /// Copies all pages to other memory.
    fn duplicate(&self) -> Result<Region, PoolError> {
        let copy = Region::new(self.server, self.size_bytes, self.pages)?;
        let (mut bytes, mut result) = ([0; PAGE_BYTES], Ok(()));
        let walked = self.places.each(0, self.pages, |page| {
            if let (Some(header), Ok(())) = (self.copy(page, &mut bytes), result) {
                result = copy.keep(header, &bytes[..header.bytes]).map(|unit| copy.publish(page, Some(unit)));
            }
        });
        walked.map_err(PoolError::Os)?;
        result.map(|()| copy)
    }
}

/// Number of the next ticket. No number is given twice, so that a used ticket stays used.
static NEXT_TICKET: AtomicU64 = AtomicU64::new(1);

/// Unclaimed snapshots. The key is the ticket's secret.
static CLONES: Mutex<BTreeMap<u128, Region>> = Mutex::new(BTreeMap::new());

/// Backend that keeps a region of compressed pages.
pub(crate) struct LzBackend {
    region: Arc<Region>,
}

impl LzBackend {
    pub(crate) fn new(server: u16, config: Config, pages: u64) -> Result<LzBackend, PoolError> {
        Ok(LzBackend { region: Arc::new(Region::new(server, config.size_bytes, pages)?) })
    }

    pub(crate) fn claim(server: u16, secret: u128) -> Result<LzBackend, PoolError> {
        let claimed = CLONES.lock().remove(&secret);
        let reason = "the ticket is unknown, used or expired";
        let region = claimed.ok_or(PoolError::Refused { server, reason })?;
        Ok(LzBackend { region: Arc::new(Region { server, ..region }) })
    }
}

impl Backend for LzBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(LzLane::new(self.region.clone())))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let copy = self.region.duplicate()?;
        // The number need not be secret: all code in this process sees the pages anyway.
        let secret = u128::from(NEXT_TICKET.fetch_add(1, Ordering::Relaxed));
        CLONES.lock().insert(secret, copy);
        Ok(CloneTicket::of_leaf(secret))
    }

    fn pages(&self) -> u64 {
        self.region.pages
    }

    fn health(&self) -> Health {
        Health::Good
    }

    fn how(&self) -> String {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let pages = self.region.stored.load(Ordering::Relaxed) * PAGE_BYTES as u64;
        format!("{:.1} MiB of pages in {:.1} MiB", mib(pages), mib(self.region.slabs.held_bytes()))
    }

    fn abandon(&self) {}
}

#[cfg(test)]
mod tests;
