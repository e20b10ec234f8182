//! Packer that compresses pages again, by zstd, when they were not used for long.
//!
//! It works only when memory is scarce: zstd takes several times as long as lz4. A clock hand goes
//! round over the pages, by one page for each page that is written (and by more when there is no
//! room). A page that was read since the hand came by last is left for the next round (CLOCK). A
//! page that zstd made little smaller is not tried again until it is written. Writes use lz4, as
//! ever.

use super::slabs::Slabs;
use super::{EncodedHeader, HEADER_BYTES, PageEncoding, Region};
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::checksum;
use farfield_core::geometry::PAGE_BYTES;
use lz4_flex::block::decompress_into;
use zstd_safe::{CCtx, DCtx};

/// Level of zstd. The higher, the slower; at higher levels pages of 4 KiB hardly become smaller
/// still (a text: 2.60 times, 2.64 by level 3, 1.83 by lz4).
const LEVEL: i32 = 1;
/// Number of pages that are looked at for a page that has no room, which takes some ten
/// milliseconds at most.
pub(super) const STEPS_WHEN_FULL: u32 = 512;
/// Number of entries without a page that one step passes over.
const LOOKS: u32 = 64;

/// Number of pages whose marks are in one word.
pub(super) const PAGES_OF_WORD: u64 = 32;
/// Mark of a page that was read since the hand came by.
const USED: u64 = 1;
/// Mark of a page that is not worth packing again.
const TRIED: u64 = 2;

/// Bit in the table of pages that marks a page as being packed. One lane at a time packs, and a
/// write of the page takes the mark away. So a packed old version is not published, even if the
/// page is by now in the same piece again.
const IN_WORK: u64 = 1 << 31;

/// Returns a place in the table of pages without its mark.
pub(super) fn unit_of(place: u64) -> u64 {
    place & !IN_WORK
}

impl Region {
    fn marks(&self, page: u64) -> (&AtomicU64, u64) {
        (self.marks.at(page / PAGES_OF_WORD), page % PAGES_OF_WORD * 2)
    }

    /// Marks a page as read.
    pub(super) fn is_used(&self, page: u64) {
        let (word, shift) = self.marks(page);
        if word.load(Ordering::Relaxed) >> shift & USED == 0 {
            word.fetch_or(USED << shift, Ordering::Relaxed);
        }
    }

    /// Unmarks a page that was written, so that it is tried again.
    pub(super) fn is_new(&self, page: u64) {
        let (word, shift) = self.marks(page);
        if word.load(Ordering::Relaxed) >> shift & TRIED != 0 {
            word.fetch_and(!(TRIED << shift), Ordering::Relaxed);
        }
    }

    /// Checks whether more than half of the memory is used.
    pub(super) fn is_scarce(&self) -> bool {
        self.slabs.held_bytes() > self.size_bytes / 2
    }

    /// Returns the next page that is stored; `None` if there is none among those that it looked at.
    fn next_page(&self) -> Option<u64> {
        let end = self.end.load(Ordering::Relaxed).max(1);
        (0..LOOKS).map(|_| self.hand.fetch_add(1, Ordering::Relaxed) % end).find(|page| self.unit(*page).is_some())
    }
}

/// Decompressor that makes pages from their stored bytes.
pub(super) struct Unpacker(DCtx<'static>);

impl Unpacker {
    /// Makes a page from its stored bytes; returns `false` if they are damaged. Not all damage is
    /// seen here: the page may be damaged all the same.
    pub(super) fn unpack(&mut self, header: EncodedHeader, kept: &[u8], page: &mut [u8]) -> bool {
        match header.form() {
            Some(PageEncoding::Raw) if kept.len() == PAGE_BYTES => page.copy_from_slice(kept),
            Some(PageEncoding::Repeated) if kept.len() == 8 => {
                page.as_chunks_mut::<8>().0.iter_mut().for_each(|word| word.copy_from_slice(kept));
            }
            Some(PageEncoding::Lz4) => return decompress_into(kept, page).is_ok_and(|bytes| bytes == PAGE_BYTES),
            Some(PageEncoding::Zstd) => return self.0.decompress(page, kept) == Ok(PAGE_BYTES),
            _ => return false,
        }
        true
    }
}

/// Outcome of a look at a page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PackStep {
    /// The page takes less room now.
    Packed,
    /// The page stays as it is.
    Passed,
    /// No page was near, there is no room at all, or another lane is packing. Another look would be
    /// in vain, too.
    Exhausted,
}

enum PackResult {
    At(u64),
    Incompressible,
    NoRoom,
}

/// Compressor and buffers of one lane. It has all its memory from the beginning.
pub(super) struct Packer {
    pub(super) unpacker: Unpacker,
    packs: CCtx<'static>,
    kept: Box<[u8; PAGE_BYTES]>,
    page: Box<[u8; PAGE_BYTES]>,
    packed: Box<[u8; PAGE_BYTES]>,
}

impl Packer {
    pub(super) fn new() -> Packer {
        let [kept, page, mut packed] = [const { [0; PAGE_BYTES] }; 3].map(Box::new);
        let mut packs = CCtx::create();
        // The compressor takes its memory with its first page.
        let first = packs.compress(&mut packed[..], &page[..], LEVEL);
        assert!(first.is_ok(), "zeros can be packed");
        Packer { unpacker: Unpacker(DCtx::create()), packs, kept, page, packed }
    }

    /// Looks at one more page, and packs it again if that is worth it.
    pub(super) fn step(&mut self, region: &Region) -> PackStep {
        if region.is_packing.swap(true, Ordering::Acquire) {
            return PackStep::Exhausted;
        }
        let step = region.next_page().map_or(PackStep::Exhausted, |page| self.look_at(region, page));
        region.is_packing.store(false, Ordering::Release);
        step
    }

    fn look_at(&mut self, region: &Region, page: u64) -> PackStep {
        let (marks, shift) = region.marks(page);
        let before = marks.fetch_and(!(USED << shift), Ordering::Relaxed) >> shift;
        if before & (USED | TRIED) != 0 {
            return PackStep::Passed;
        }
        let Some(unit) = region.unit(page) else { return PackStep::Passed };
        if !region.places.exchange(page, unit, unit | IN_WORK) {
            return PackStep::Passed;
        }
        let packed = self.pack(region, page);
        let step = match packed {
            PackResult::At(packed) if region.places.exchange(page, unit | IN_WORK, packed) => {
                region.slabs.give(unit);
                return PackStep::Packed;
            }
            PackResult::At(packed) => {
                region.slabs.give(packed);
                return PackStep::Passed;
            }
            PackResult::NoRoom => PackStep::Exhausted,
            PackResult::Incompressible => {
                marks.fetch_or(TRIED << shift, Ordering::Relaxed);
                PackStep::Passed
            }
        };
        region.places.exchange(page, unit | IN_WORK, unit);
        step
    }

    /// Packs a page into a smaller piece than it has.
    fn pack(&mut self, region: &Region, page: u64) -> PackResult {
        let Some(header) = region.copy(page, &mut self.kept) else { return PackResult::Incompressible };
        let is_packable = matches!(header.form(), Some(PageEncoding::Raw | PageEncoding::Lz4));
        let is_whole = is_packable && self.unpacker.unpack(header, &self.kept[..header.bytes], &mut self.page[..]);
        // A read of a damaged page finds that out.
        if !is_whole || checksum(&self.page[..]) != header.sum {
            return PackResult::Incompressible;
        }
        let Ok(bytes) = self.packs.compress(&mut self.packed[..], &self.page[..], LEVEL) else {
            return PackResult::Incompressible;
        };
        let [now, then] = [header.bytes, bytes].map(|bytes| Slabs::units_for(HEADER_BYTES + bytes));
        if then * 8 > now * 7 {
            return PackResult::Incompressible;
        }
        let kept = region.keep(EncodedHeader::new(header.sum, PageEncoding::Zstd, bytes), &self.packed[..bytes]);
        kept.map_or(PackResult::NoRoom, PackResult::At)
    }
}
