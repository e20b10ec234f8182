//! A region as functions see it: bytes without page boundaries.

use super::RegionStoreError;
use super::parts::Scratch;
use super::region::{RegionReader, StoredRegion};
use crate::work_semaphore::WorkTurn;
use core::cell::{Cell, RefCell};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::PagePart;
use farfield_core::{PageId, checksum};
use farfield_os::process::now_ns;
use farfield_wic::{Fault, Memory};
use std::ops::Range;

/// Reads after which the region's lock is released for a moment, so that a snapshot or a sweep
/// waits no longer.
const READS_MAX: u32 = 256;
/// Loaded values that count as one read.
const LOADS_OF_READ: usize = 16;

/// The bytes of a region, for use by one thread.
pub(crate) struct RegionMemory<'r> {
    region: &'r StoredRegion,
    /// Read lock on the region, kept from one read to the next because taking it costs as much as a
    /// read.
    reader: RefCell<Option<RegionReader<'r>>>,
    /// Reads, changes and turns since others went first.
    reads: Cell<u32>,
    /// Turns of this thread at the processors.
    turn: RefCell<WorkTurn>,
    /// Whether other functions are kept from changing pages now.
    is_alone: Cell<bool>,
    scratch: RefCell<ScratchGuard>,
}

thread_local! {
    /// The thread's page buffer for checksums, unless a [`RegionMemory`] of the thread has taken
    /// it.
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// The thread's page buffer, given back when dropped.
struct ScratchGuard(Option<Box<Scratch>>);

impl ScratchGuard {
    fn new() -> ScratchGuard {
        ScratchGuard(SCRATCH.take())
    }

    fn page(&mut self) -> &mut Scratch {
        self.0.get_or_insert_with(|| Box::new([0; PAGE_BYTES]))
    }
}

impl Drop for ScratchGuard {
    fn drop(&mut self) {
        SCRATCH.set(self.0.take());
    }
}

/// Guard that sets a flag for as long as it lives.
struct FlagGuard<'f>(&'f Cell<bool>);

impl<'f> FlagGuard<'f> {
    fn new(flag: &'f Cell<bool>) -> FlagGuard<'f> {
        flag.set(true);
        FlagGuard(flag)
    }
}

impl Drop for FlagGuard<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Returns the pages of a range of bytes, the part of each page, and its place in the range.
fn pages(offset: u64, len: usize) -> impl Iterator<Item = (PageId, PagePart, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset.saturating_add(done as u64);
        let page = PageId::containing(at);
        let skip = usize::try_from(at - page.offset()).ok()?;
        let part = PagePart::new(skip, (len - done).min(PAGE_BYTES - skip))?;
        let bytes = done..done + part.len();
        done = bytes.end;
        Some((page, part, bytes))
    })
}

impl<'r> RegionMemory<'r> {
    pub(crate) fn new(region: &'r StoredRegion, turn: WorkTurn) -> RegionMemory<'r> {
        RegionMemory {
            region,
            reader: RefCell::new(None),
            reads: Cell::new(0),
            turn: RefCell::new(turn),
            is_alone: Cell::new(false),
            scratch: RefCell::new(ScratchGuard::new()),
        }
    }

    /// Returns the turns of the thread. The region's lock is released.
    pub(crate) fn into_turn(self) -> WorkTurn {
        self.turn.into_inner()
    }

    /// Releases the region's lock. A thread that holds it must not wait for another function: that
    /// one may wait for the lock, behind a thread that wants to write-lock it.
    fn release_lock(&self) {
        drop(self.reader.borrow_mut().take());
    }

    /// Calls `look` with a reader, and counts it as `reads` reads.
    fn with_reader<T>(&self, reads: u32, look: impl FnOnce(&RegionReader<'r>) -> T) -> T {
        self.count(reads);
        self.let_others();
        look(self.reader.borrow_mut().get_or_insert_with(|| self.region.reader()))
    }

    fn count(&self, reads: u32) {
        self.reads.set(self.reads.get().saturating_add(reads));
    }

    /// Waits for a permit if the thread has none. After enough reads, lets others go first: threads
    /// that wait for the region, and those that wait for a permit. While this thread keeps other
    /// functions from changing pages, it keeps its permit, because those wait with permits.
    fn let_others(&self) {
        if self.reads.get() >= READS_MAX {
            self.reads.set(0);
            self.release_lock();
            if !self.is_alone.get() {
                self.turn.borrow().pass();
            }
        }
        // Without a permit it holds no lock, and is not alone.
        self.turn.borrow_mut().begin();
    }

    fn try_read(&self, offset: u64, into: &mut [u8]) -> Result<(), RegionStoreError> {
        self.with_reader(1, |reader| {
            let mut scratch = self.scratch.borrow_mut();
            let scratch = scratch.page();
            for (page, part, bytes) in pages(offset, into.len()) {
                let target = into.get_mut(bytes).ok_or(RegionStoreError::OutOfRange)?;
                match <&mut Scratch>::try_from(&mut *target) {
                    Ok(target) => reader.whole(page, target)?,
                    Err(_) => target.copy_from_slice(reader.part(page, part, scratch)?.0),
                }
            }
            Ok(())
        })
    }

    fn try_load<const N: usize>(&self, offsets: &[u64], into: &mut [u8]) -> Result<(), RegionStoreError> {
        let reads = u32::try_from(offsets.len().div_ceil(LOADS_OF_READ)).unwrap_or(READS_MAX);
        self.with_reader(reads, |reader| reader.load::<N>(offsets, into.as_chunks_mut().0))
    }

    /// Calls `work` while no other function changes pages.
    fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.is_alone.get() {
            return work();
        }
        self.count(1);
        self.let_others();
        self.release_lock();
        let _changing = self.region.change();
        let _alone = FlagGuard::new(&self.is_alone);
        work()
    }

    /// Writes bytes at an offset. The caller keeps other functions from changing pages.
    fn try_write(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionStoreError> {
        // The lock is taken once more below, and a thread that wants to write-lock it may have come
        // in between.
        self.release_lock();
        let mut scratch = self.scratch.borrow_mut();
        let scratch = scratch.page();
        let mut parts = pages(offset, bytes.len());
        while let Some((page, part, range)) = parts.next() {
            if part.len() == PAGE_BYTES {
                // All consecutive whole pages of the range are written together.
                let (run, _) = bytes.get(range.start..).unwrap_or_default().as_chunks::<PAGE_BYTES>();
                let sum = |index: u32| run.get(index as usize).map_or(0, |page| checksum(page));
                self.region.write(page, run.as_flattened(), sum)?;
                parts.by_ref().take(run.len() - 1).for_each(drop);
                continue;
            }
            self.region.reader().whole(page, scratch)?;
            let (Some(target), Some(source)) = (scratch.get_mut(part.range()), bytes.get(range)) else {
                return Err(RegionStoreError::OutOfRange);
            };
            target.copy_from_slice(source);
            let sum = checksum(scratch);
            self.region.write(page, scratch, |_| sum)?;
        }
        Ok(())
    }
}

impl Memory for RegionMemory<'_> {
    fn region_bytes(&self) -> u64 {
        PageId(self.region.pages()).offset()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        let result = match self.try_read(offset, into) {
            // Perhaps another function was storing the page, so the read is repeated without such a
            // function.
            Err(RegionStoreError::Corrupt(_)) => self.alone(|| self.try_read(offset, into)),
            result => result,
        };
        result.map_err(|error| fault(error, offset))
    }

    fn load(&self, offsets: &[u64], each: usize, into: &mut [u8]) -> Result<(), Fault> {
        let loaded = match each {
            1 => self.try_load::<1>(offsets, into),
            2 => self.try_load::<2>(offsets, into),
            4 => self.try_load::<4>(offsets, into),
            8 => self.try_load::<8>(offsets, into),
            _ => Err(RegionStoreError::OutOfRange),
        };
        loaded.map_err(|error| fault(error, offsets.first().copied().unwrap_or(0)))
    }

    fn sums(&self, offset: u64, into: &mut [u64]) -> Result<(), Fault> {
        let mut pages = (PageId::containing(offset).0..).map(PageId);
        // However many there are, other threads wait for the lock no longer than for this many
        // reads.
        let result = into.chunks_mut(READS_MAX as usize).try_for_each(|some| {
            self.with_reader(READS_MAX, |reader| {
                some.iter_mut().zip(&mut pages).try_for_each(|(sum, page)| reader.sum(page).map(|found| *sum = found))
            })
        });
        result.map_err(|error| fault(error, offset))
    }

    fn matches(&self, offset: u64, sums: &[u64]) -> Result<bool, Fault> {
        let first = PageId::containing(offset).0;
        let result = self.with_reader(u32::try_from(sums.len()).unwrap_or(READS_MAX), |reader| {
            let mut scratch = self.scratch.borrow_mut();
            for (sum, page) in sums.iter().zip(first..) {
                if !reader.matches(PageId(page), *sum, scratch.page())? {
                    return Ok(false);
                }
            }
            Ok(true)
        });
        result.map_err(|error| fault(error, offset))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.alone(|| self.try_write(offset, bytes)).map_err(|error| fault(error, offset))
    }

    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
        RegionMemory::alone(self, work)
    }

    fn clock(&self) -> u64 {
        now_ns()
    }

    fn rest(&self) {
        self.release_lock();
        self.turn.borrow_mut().end();
    }

    fn turn(&self) {
        self.count(1);
        self.let_others();
    }

    fn announce(&self, ranges: &mut dyn Iterator<Item = (u64, usize)>) {
        let parts = ranges.flat_map(|(offset, len)| pages(offset, len));
        self.with_reader(1, |reader| parts.for_each(|(page, part, _)| reader.announce(page, part)));
    }
}

fn fault(error: RegionStoreError, offset: u64) -> Fault {
    match error {
        RegionStoreError::Full(_) | RegionStoreError::TooMany(_) => Fault::Full,
        RegionStoreError::OutOfRange => Fault::OutOfRange { offset },
        RegionStoreError::Corrupt(page) => Fault::Corrupt { page },
        RegionStoreError::Os(errno) => {
            tracing::error!(%errno, "the operating system refused");
            Fault::Internal
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a page that rotted, and becomes good because a function changes a part of it;
    //! against ranges of parts and whole pages that become others.

    use super::*;
    use crate::store::tests::account;

    #[test]
    fn a_corrupt_page_stays_corrupt_when_a_part_of_it_is_written() {
        let region = StoredRegion::new(2, account(None, None)).unwrap();
        let bytes = [7; PAGE_BYTES];
        region.write(PageId(1), &bytes, |_| checksum(&bytes)).unwrap();
        let memory = RegionMemory::new(&region, WorkTurn::default());
        let offset = PageId(1).offset() + 8;
        let change = || {
            memory.alone(|| {
                let mut word = [0; 8];
                memory.read(offset, &mut word)?;
                memory.write(offset, &[word[0] + 1; 8])
            })
        };
        change().unwrap();
        let found = region.reader().page(PageId(1)).unwrap().unwrap();
        // SAFETY: inside a page of the region, which is mapped writable; this thread alone uses it.
        unsafe { *found.bytes.add(2000).cast_mut() ^= 1 };
        let corrupt = Err(Fault::Corrupt { page: PageId(1) });
        assert_eq!(change(), corrupt);
        assert_eq!(memory.write(offset + 100, &[1]), corrupt);
        assert_eq!(memory.read(offset - 8 + 2000, &mut [0]), corrupt, "and it stays what it is");
        assert!(!memory.is_alone.get());
    }

    #[test]
    fn loaded_elements_count_only_if_their_pages_did_not_change() {
        let region = StoredRegion::new(4, account(None, None)).unwrap();
        let store =
            |page: u64, byte: u8| region.write(PageId(page), &[byte; PAGE_BYTES], |_| checksum(&[byte; PAGE_BYTES]));
        store(0, 1).unwrap();
        store(1, 2).unwrap();
        let memory = RegionMemory::new(&region, WorkTurn::default());
        let sums_of = |pages: usize| {
            let mut sums = vec![0; pages];
            memory.sums(0, &mut sums).unwrap();
            sums
        };
        let before = sums_of(3);
        let mut loaded = [[0xEE; 8]; 40];
        let offsets: Vec<u64> = (0..40).map(|index| index % 3 * PAGE_BYTES as u64 + 8 * index).collect();
        memory.load(&offsets, 8, loaded.as_flattened_mut()).unwrap();
        assert!(loaded.iter().enumerate().all(|(index, value)| *value == [[1; 8], [2; 8], [0; 8]][index % 3]));
        assert_eq!(memory.matches(0, &before), Ok(true));
        let flip = || {
            let found = region.reader().page(PageId(1)).unwrap().unwrap();
            // SAFETY: inside a page of the region, which is mapped writable; this thread alone uses it.
            unsafe { *found.bytes.add(2000).cast_mut() ^= 1 };
        };
        flip();
        assert_eq!(memory.matches(0, &before), Ok(false), "half of another version, or rot");
        flip();
        assert_eq!(memory.matches(0, &before), Ok(true));
        memory.rest();
        store(1, 3).unwrap();
        assert_eq!((memory.matches(0, &before), memory.matches(0, &sums_of(3))), (Ok(false), Ok(true)));
        assert_eq!(memory.matches(0, &before[..1]), Ok(true), "another page");
        let before = sums_of(3);
        memory.rest();
        store(2, 0).unwrap();
        assert_eq!(memory.matches(0, &before), Ok(true), "zeros are zeros, stored or not");
        region.discard(PageId(0), 1).unwrap();
        assert_eq!(memory.matches(0, &before), Ok(false));
        for (offset, each) in [(4 * PAGE_BYTES as u64, 8), (PAGE_BYTES as u64 - 4, 8), (0, 3)] {
            let refused = memory.load(&[offset], each, &mut [0; 8][..each]);
            assert_eq!(refused, Err(Fault::OutOfRange { offset }), "{offset} {each}");
        }
        assert_eq!(memory.sums(0, &mut [0; 5]), Err(Fault::OutOfRange { offset: 0 }));
    }

    #[test]
    fn ranges_are_what_was_written_wherever_they_begin_and_end() {
        let region = StoredRegion::new(20, account(None, None)).unwrap();
        let memory = RegionMemory::new(&region, WorkTurn::default());
        let mut twin = vec![0u8; 20 * PAGE_BYTES];
        let edges = [0, 1, 255, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 9, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 700];
        for (round, (from, len)) in edges.iter().flat_map(|from| edges.map(|len| (*from, len))).enumerate() {
            let from = from + round % 3 * 5 * PAGE_BYTES;
            let bytes: Vec<u8> = (0..len).map(|index| (index * 7 + round * 13) as u8).collect();
            memory.write(from as u64, &bytes).unwrap();
            twin[from..from + len].copy_from_slice(&bytes);
            for (at, len) in [(from, len), (from / 2, len + 300), (0, 16 * PAGE_BYTES)] {
                let mut found = vec![0xEE; len];
                memory.read(at as u64, &mut found).unwrap();
                assert!(found == twin[at..at + len], "round {round}");
            }
        }
        let whole = region.reader().page(PageId(3)).unwrap().unwrap();
        // SAFETY: inside a page of the region, which is mapped writable; this thread alone uses it.
        unsafe { *whole.bytes.add(4000).cast_mut() ^= 1 };
        let read = memory.read(PageId(2).offset(), &mut [0; 3 * PAGE_BYTES]);
        assert_eq!(read, Err(Fault::Corrupt { page: PageId(3) }));
    }
}
