//! Writing back: gives the pool the bytes that another reader of its region will look at next
//! (Atlas: before a call to the memory server).
//!
//! Far addresses mean the same to all readers: byte *n* of the heap's pages is byte *n* of its
//! region. Pages are written by evicting them: a page that stayed near could be changed through a
//! reference while it is copied. So no scope may refer to them, and they are far afterwards.

use super::eviction::CoolingBatch;
use super::{Backoff, HeapInner};
use crate::error::FarError;
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FrameWord, State};
use std::collections::BTreeSet;

/// A range of far addresses: bytes of the heap's region in the pool.
///
/// Everybody who reads the region, as a memory server does, finds them at this address. A value
/// keeps its far address as long as it lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FarRange {
    /// Offset of the first byte in the region, in bytes.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl FarRange {
    /// Makes the range of `len` bytes at `offset` in this page of a heap.
    pub(crate) fn in_page(page: u32, offset: usize, len: usize) -> FarRange {
        FarRange { start: u64::from(page) * PAGE_BYTES as u64 + offset as u64, len: len as u64 }
    }

    /// Returns the pages that the range touches in a heap of `all` pages, clipped to that heap.
    fn pages(self, all: u32) -> core::ops::Range<u32> {
        let in_heap = |page: u64| page.min(u64::from(all)) as u32;
        let end = self.start.saturating_add(self.len).div_ceil(PAGE_BYTES as u64);
        in_heap(self.start / PAGE_BYTES as u64)..in_heap(end)
    }
}

/// Progress of a write-back: the units that are to be evicted.
pub(super) struct WriteBack {
    /// Units that were not far when they were last checked.
    near: Vec<u32>,
    /// Units that are Cooling and wait for scopes.
    batch: Option<CoolingBatch>,
}

impl WriteBack {
    pub(super) fn new(core: &HeapInner, ranges: impl IntoIterator<Item = FarRange>) -> WriteBack {
        let pages = ranges.into_iter().flat_map(|range| range.pages(core.pages));
        let units: BTreeSet<u32> = pages.filter_map(|page| Some(core.segments.unit_of(page)?.page)).collect();
        WriteBack { near: Vec::from_iter(units), batch: None }
    }

    /// Takes a step; true if all units were written.
    pub(super) fn step(&mut self, core: &HeapInner) -> Result<bool, FarError> {
        // A page that was seen at the pool once has been written since the call.
        self.near.retain(|page| {
            let word = FrameWord(core.words[*page].load(Ordering::Acquire));
            !matches!(word.state(), State::Far | State::Empty)
        });
        if self.near.is_empty() {
            return Ok(true);
        }
        core.help_all();
        core.evictor.evict_units(core, &self.near, &mut self.batch)?;
        Ok(false)
    }

    /// Ends the write-back, complete or not: a batch that still waits leaves later, as others do.
    pub(super) fn end(self, core: &HeapInner) {
        if let Some(batch) = self.batch {
            core.evictor.requeue(batch);
        }
    }
}

impl HeapInner {
    /// Checks whether the bytes of this unit are at the pool, and only there.
    pub(crate) fn is_far(&self, page: u32) -> bool {
        FrameWord(self.words[page].load(Ordering::Acquire)).state() == State::Far
    }

    /// Checks whether the pool has the bytes of this unit, wherever else they are. The caller rules
    /// out that anybody changes them meanwhile, or through shared references at any time.
    pub(crate) fn is_as_far(&self, page: u32) -> bool {
        let word = FrameWord(self.words[page].load(Ordering::Acquire));
        match word.state() {
            State::Far => true,
            State::Near | State::Cooling => word.is_stored() && !word.is_dirty(),
            State::Empty | State::Loading | State::Claimed | State::Writeback => false,
        }
    }

    pub(crate) fn write_back(&self, ranges: impl IntoIterator<Item = FarRange>) -> Result<(), FarError> {
        self.write_back_within(ranges, self.patience)
    }

    /// Writes back as [`Heap::write_back`](crate::Heap::write_back) does, and gives up after this
    /// time.
    pub(crate) fn write_back_within(
        &self,
        ranges: impl IntoIterator<Item = FarRange>,
        limit: Duration,
    ) -> Result<(), FarError> {
        if self.record().entered().is_some() {
            return Err(FarError::NearFull);
        }
        let mut work = WriteBack::new(self, ranges);
        let mut backoff = Backoff::new(limit);
        let result = loop {
            match work.step(self) {
                Ok(true) => break Ok(()),
                Ok(false) => {}
                Err(error) => break Err(error),
            }
            if let Err(error) = backoff.wait() {
                break Err(error);
            }
        };
        work.end(self);
        result
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a server that reads what was there before.
    use super::*;
    use crate::Heap;
    use crate::task::Executor;
    use crate::{FarBox, FarVec, Plane};
    use core::cell::Cell;
    use core::future::{Future, poll_fn};
    use core::task::{Context, Poll, Waker};
    use core::time::Duration;
    use farfield_core::PageId;
    use farfield_pool::{Backend, Buffer, Lane, LaneRequest, Op, Priority};
    use std::time::Instant;

    fn builder() -> crate::Builder {
        Heap::builder().near(16 << 20).near_max(16 << 20).far(1 << 30).paranoid(true)
    }

    /// Somebody who reads the same region.
    struct Reader(Box<dyn Lane>);

    impl Reader {
        fn page(&mut self, page: u64) -> Vec<u8> {
            let op = Op::Read { page: PageId(page), buffer: Buffer::new(1) };
            let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: Duration::from_secs(10), op };
            self.0.submit(request).expect("a lane of its own");
            let mut done = Vec::with_capacity(1);
            while self.0.poll(&mut done) == 0 {
                self.0.wait(Duration::from_secs(10));
            }
            let completion = done.pop().unwrap();
            completion.result.unwrap();
            completion.buffer.unwrap().page(0).to_vec()
        }

        fn bytes(&mut self, ranges: impl IntoIterator<Item = FarRange>) -> Vec<u8> {
            let mut found = Vec::new();
            for range in ranges {
                let all: Vec<u8> = range.pages(u32::MAX).flat_map(|page| self.page(u64::from(page))).collect();
                found.extend(&all[(range.start % PAGE_BYTES as u64) as usize..][..range.len as usize]);
            }
            found
        }

        fn words(&mut self, ranges: impl IntoIterator<Item = FarRange>) -> Vec<u64> {
            self.bytes(ranges).as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
        }
    }

    #[test]
    fn another_reader_of_the_region_finds_what_was_written_back() {
        for plane in [Plane::Page, Plane::Hybrid] {
            let heap = builder().plane(plane).build().unwrap();
            let mut reader = Reader(heap.core().backend.open_lane().unwrap());
            let mut vec = FarVec::new();
            vec.extend(&heap.enter(), 0..300_000u64).unwrap();
            let large: FarBox<[u64; 5000]> = heap.alloc([7; 5000]).unwrap();
            let ranges = || vec.far_ranges(1000..200_000);
            assert_eq!(ranges().map(|range| range.len).sum::<u64>(), 199_000 * 8);
            heap.write_back(ranges().chain(heap.far_range(&large))).unwrap();
            assert_eq!(reader.words(ranges()), Vec::from_iter(1000..200_000));
            assert_eq!(reader.words(heap.far_range(&large)), [7; 5000]);
            // What is near, and what was far and is changed.
            let mut large = large;
            large.get_mut(&heap.enter()).unwrap()[4999] = 8;
            for index in [1000, 99_999, 199_999] {
                *vec.get_mut(&heap.enter(), index).unwrap().unwrap() = 5;
            }
            let ranges = || vec.far_ranges(1000..200_000);
            heap.write_back(ranges().chain(heap.far_range(&large))).unwrap();
            let changed = |index| if [1000, 99_999, 199_999].contains(&index) { 5 } else { index };
            assert_eq!(reader.words(ranges()), Vec::from_iter((1000..200_000).map(changed)));
            assert_eq!(reader.words(heap.far_range(&large))[4998..], [7, 8]);
            assert_eq!(vec.get(&heap.enter(), 99_999).unwrap(), Some(&5));
            drop((vec, large));
            heap.verify();
        }
    }

    #[test]
    fn small_values_have_a_far_address_where_they_do_not_move() {
        for (plane, has) in [(Plane::Page, true), (Plane::Object, false), (Plane::Hybrid, true)] {
            let heap = builder().plane(plane).build().unwrap();
            let mut reader = Reader(heap.core().backend.open_lane().unwrap());
            let values: Vec<FarBox<[u64; 3]>> = (0..100).map(|index| heap.alloc([index; 3]).unwrap()).collect();
            let range = heap.far_range(&values[77]);
            assert_eq!(range.is_some(), has, "{plane:?}");
            heap.write_back(range).unwrap();
            assert!(!has || reader.words(range) == [77; 3]);
            let other = builder().build().unwrap();
            assert_eq!(other.far_range(&values[77]), None);
        }
    }

    #[test]
    fn scopes_are_waited_for_and_not_for_ever() {
        let heap = builder().patience(Duration::from_millis(200)).build().unwrap();
        let mut reader = Reader(heap.core().backend.open_lane().unwrap());
        let value = heap.alloc([3u64; 3]).unwrap();
        let range = heap.far_range(&value);
        let scope = heap.enter();
        assert_eq!(heap.write_back(range), Err(FarError::NearFull));
        std::thread::scope(|threads| {
            let other = threads.spawn(|| heap.write_back(range));
            assert!(matches!(other.join().unwrap(), Err(FarError::Stalled { .. })));
        });
        drop(scope);
        let pinned = value.pin().unwrap();
        assert!(matches!(heap.write_back(range), Err(FarError::Stalled { .. })));
        drop(pinned);
        heap.write_back(range).unwrap();
        assert_eq!(reader.words(range), [3; 3]);
        // Nothing is there, or nothing to be had; and what comes behind that is written all the same.
        let mut value = value;
        value.get_mut(&heap.enter()).unwrap()[1] = 4;
        let nothing = [FarRange { start: 1 << 29, len: 9000 }, FarRange { start: u64::MAX - 5, len: 9 }];
        heap.write_back(nothing.into_iter().chain(range)).unwrap();
        assert_eq!(reader.words(range), [3, 4, 3]);
        drop(value);
        heap.verify();
    }

    #[test]
    fn a_pool_that_fails_is_an_error() {
        let heap = builder().pool("fault:die=1@ram:").build().unwrap();
        let value = heap.alloc([3u64; 3]).unwrap();
        assert!(matches!(heap.write_back(heap.far_range(&value)), Err(FarError::Pool(_))));
        assert_eq!(*value.get(&heap.enter()).unwrap(), [3; 3], "it stays near");
    }

    /// One that writes back, and one that uses what is written, in the same thread and in another; on each plane.
    #[test]
    fn tasks_write_back_while_others_go_on() {
        for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
            let heap = builder().plane(plane).build().unwrap();
            let mut reader = Reader(heap.core().backend.open_lane().unwrap());
            let mut vec = FarVec::new();
            vec.extend(&heap.enter(), 0..100_000u64).unwrap();
            let large: FarBox<[u64; 5000]> = heap.alloc([7; 5000]).unwrap();
            let executor = Executor::new(&heap);
            let turns = Cell::new(0);
            let is_written = Cell::new(false);
            executor.spawn(async {
                // In its way until it ends.
                let scope = heap.enter();
                let seen = large.fetch(&scope).await.unwrap();
                for _ in 0..100 {
                    assert!(!is_written.get() && seen[4999] == 7);
                    turns.set(turns.get() + 1);
                    yield_now().await;
                }
            });
            executor.block_on(async {
                while turns.get() == 0 {
                    yield_now().await;
                }
                let ranges = vec.far_ranges(..).chain(heap.far_range(&large));
                heap.write_back_async(ranges).await.unwrap();
                is_written.set(true);
            });
            assert_eq!(turns.get(), 100);
            assert_eq!(reader.words(vec.far_ranges(..)), Vec::from_iter(0..100_000));
            assert_eq!(reader.words(heap.far_range(&large)), [7; 5000]);
            drop(executor);
            drop((vec, large));
            heap.verify();
        }
    }

    #[test]
    fn tasks_that_write_back_are_told_what_is_wrong() {
        let heap = builder().patience(Duration::from_millis(200)).build().unwrap();
        let value = heap.alloc([3u64; 3]).unwrap();
        let executor = Executor::new(&heap);
        let stalled = executor.block_on(async {
            let scope = heap.enter();
            let result = heap.write_back_async(heap.far_range(&value)).await;
            drop(scope);
            result
        });
        assert!(matches!(stalled, Err(FarError::Stalled { .. })), "{stalled:?}");
        // Given up while a scope is in its way: nothing is left of it.
        let scope = heap.enter();
        {
            let mut given_up = core::pin::pin!(heap.write_back_async(heap.far_range(&value)));
            assert!(given_up.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while heap.core().background_jobs.has_jobs() {
            assert!(Instant::now() < deadline, "nobody waits for it");
            std::thread::yield_now();
        }
        drop(scope);
        executor.block_on(heap.write_back_async(heap.far_range(&value))).unwrap();
        executor.block_on(heap.write_back_async([])).unwrap();
        let broken = builder().pool("fault:die=1@ram:").build().unwrap();
        let value = broken.alloc([3u64; 3]).unwrap();
        let result = Executor::new(&broken).block_on(broken.write_back_async(broken.far_range(&value)));
        assert!(matches!(result, Err(FarError::Pool(_))), "{result:?}");
    }

    /// Anything else may run first.
    async fn yield_now() {
        let mut is_first = true;
        poll_fn(|context| {
            context.waker().wake_by_ref();
            if core::mem::take(&mut is_first) { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }
}
