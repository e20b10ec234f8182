//! Flush: writes pages that stay near, so that a reader of the region finds them as they are now
//! (Mako's write-through buffer, as a job of the evictor).
//!
//! The evictor is the only one that writes pages to the pool, so a page never has two writes under
//! way. Nobody is kept from changing a page while it is copied. So the copy is taken word by word,
//! and each word of it is one that the page had at some moment of the flush. What changes later is
//! noticed when the page leaves: it is marked as changed again, or its checksum is not the copy's.

use super::writer::EvictionRequest;
use super::{EvictorState, HeapEvictor, HeapInner, TransferUnit};
use farfield_core::heap::fault::{fail_flush_page, flush_page};
use farfield_pool::PoolError;

/// Units that are looked at before others may run the evictor.
const WINDOW: usize = 64;

impl HeapEvictor {
    /// Writes those of these units that are near and differ from their far copies; they stay near.
    /// Returns the number of pages written. Nobody releases one of the units meanwhile,
    /// and their words are changed as atomics only.
    ///
    /// Afterwards the pool has each unit as it was at some moment since the call, or later. After
    /// an error it is not known which ones it has.
    pub(crate) fn flush(&self, core: &HeapInner, units: &[u32]) -> Result<u64, PoolError> {
        let mut written = 0;
        for window in units.chunks(WINDOW) {
            let mut state = self.lock();
            written += self.timed(|| state.flush(core, window))?;
        }
        Ok(written)
    }
}

impl EvictorState {
    fn flush(&mut self, core: &HeapInner, pages: &[u32]) -> Result<u64, PoolError> {
        // Whatever is under way ends: units that leave are far then, or near again.
        self.finish(core)?;
        self.writer.open(core)?;
        let units = pages.iter().filter_map(|page| core.segments.unit_of(*page));
        let written = units.map(|unit| self.flush_unit(core, unit)).sum();
        let (waited, requests) = self.writer.finish(core);
        let mut trouble = waited;
        for EvictionRequest { unit, frame, result } in requests {
            if let Err(error) = waited.and(result) {
                // One that has left this frame, or was released, is written by nobody any more.
                fail_flush_page(core, unit.page, frame);
                trouble = trouble.and(Err(error));
            }
        }
        trouble.map(|()| written)
    }

    /// Begins to write what differs of a unit. Returns the number of its pages that do.
    fn flush_unit(&mut self, core: &HeapInner, unit: TransferUnit) -> u64 {
        // What is not near now is far, or on its way from there, and what is there is current.
        let Some(seen) = flush_page(core, unit.page) else { return 0 };
        let Some(frame) = seen.frame() else { unreachable!("a near page has a frame") };
        let was_clean = seen.is_stored() && !seen.is_dirty();
        self.writer.write_copies(core, unit, frame, was_clean)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a reader of the region that finds what was there before, and against a change
    //! during or after the copy that is lost.
    use crate::space::Space;
    use crate::{FarError, Heap, PoolError};
    use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use core::time::Duration;
    use farfield_core::PageId;
    use farfield_core::geometry::PAGE_BYTES;
    use farfield_pool::{Backend, Buffer, LaneRequest, Op, Priority};

    const UNITS: u32 = 128;
    const WORDS: usize = PAGE_BYTES / 8;

    fn word<'s>(unit: core::ptr::NonNull<u8>, index: usize) -> &'s AtomicU64 {
        assert!(index < WORDS);
        // SAFETY: the unit is near in a scope of our caller, who uses the word before it ends; all
        // accesses to it are atomic.
        unsafe { unit.cast::<AtomicU64>().add(index).as_ref() }
    }

    /// A heap whose pool fails after so many requests, and a run of made units with their numbers in the first word.
    fn filled(pool: &str, unit_pages: u32) -> (Heap, Space, Vec<u32>) {
        let heap = Heap::builder().near(4 << 20).near_max(4 << 20).far(1 << 30).paranoid(true).pool(pool);
        let heap = heap.build().unwrap();
        let space = Space::open(&heap).unwrap();
        let first = space.take_run(UNITS, unit_pages).unwrap();
        let units: Vec<u32> = (0..UNITS).map(|unit| first + unit * unit_pages).collect();
        let mut scope = space.enter();
        for unit in &units {
            word(scope.make(*unit).unwrap(), 0).store(u64::from(*unit), Ordering::Relaxed);
            scope.renew();
        }
        drop(scope);
        (heap, space, units)
    }

    #[test]
    fn a_reader_of_the_region_finds_what_was_flushed_and_nothing_leaves() {
        for unit_pages in [1, 3] {
            let (heap, space, units) = filled("ram:", unit_pages);
            let far_word = |unit: u32| far_word(&heap, unit);
            let misses = heap.stats().misses;
            assert!(flush(&space, &units).unwrap() >= u64::from(UNITS));
            assert!(units.iter().all(|unit| far_word(*unit) == u64::from(*unit)));
            assert_eq!(flush(&space, &units).unwrap(), 0, "nothing has changed");
            // One is changed through an address that needs no mark, one through a marked one.
            let mut scope = space.enter();
            word(scope.bring(units[5]).unwrap(), 0).store(77, Ordering::Relaxed);
            word(scope.bring_to_change(units[6]).unwrap(), 0).store(78, Ordering::Relaxed);
            scope.renew();
            drop(scope);
            assert_eq!(flush(&space, &units).unwrap(), 1 + u64::from(unit_pages), "a unit is marked as a whole");
            assert_eq!((far_word(units[5]), far_word(units[6]), far_word(units[7])), (77, 78, units[7].into()));
            assert_eq!(heap.stats().misses, misses, "all units are still near");
            release(&space, &units, unit_pages);
            drop(space);
            heap.verify();
        }
    }

    fn flush(space: &Space, units: &[u32]) -> Result<u64, FarError> {
        // SAFETY: our run; it is released later, and its words are changed as atomics.
        unsafe { space.flush(units) }
    }

    /// The first word of a page, as the pool has it.
    fn far_word(heap: &Heap, page: u32) -> u64 {
        let mut lane = heap.core().backend.open_lane().unwrap();
        let op = Op::Read { page: PageId(page.into()), buffer: Buffer::new(1) };
        let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: Duration::from_secs(10), op };
        assert!(lane.submit(request).is_ok());
        let mut done = Vec::with_capacity(1);
        while lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_secs(10));
        }
        let completion = done.pop().unwrap();
        completion.result.unwrap();
        u64::from_ne_bytes(*completion.buffer.unwrap().page(0).first_chunk().unwrap())
    }

    fn release(space: &Space, units: &[u32], unit_pages: u32) {
        // SAFETY: our run, whose units were made; nobody uses them.
        unsafe {
            units.iter().for_each(|unit| space.release(*unit, unit_pages));
            space.free_run(units[0]);
        }
    }

    #[test]
    fn changes_beside_a_flush_are_never_lost() {
        let (heap, space, units) = filled("ram:", 1);
        let is_over = AtomicBool::new(false);
        let last = std::thread::scope(|threads| {
            let changing = threads.spawn(|| {
                let mut scope = space.enter();
                let mut count = 0u64;
                // Once at least, however late the thread begins.
                while count == 0 || !is_over.load(Ordering::Relaxed) {
                    for (index, unit) in units.iter().enumerate() {
                        let address = if index % 2 == 0 { scope.bring(*unit) } else { scope.bring_to_change(*unit) };
                        word(address.unwrap(), 9).store(count, Ordering::Relaxed);
                        count += 1;
                        scope.renew();
                    }
                }
                count
            });
            for _ in 0..200 {
                flush(&space, &units).unwrap();
            }
            is_over.store(true, Ordering::Relaxed);
            changing.join().unwrap()
        });
        // All of them leave, and come back.
        let other = space.take_run(4 * UNITS * 8, 1).unwrap();
        let mut scope = space.enter();
        for page in 0..4 * UNITS * 8 {
            scope.make(other + page).unwrap();
            scope.renew();
        }
        for (index, unit) in units.iter().enumerate() {
            let expected = last - u64::from(UNITS) + index as u64;
            assert_eq!(word(scope.bring(*unit).unwrap(), 9).load(Ordering::Relaxed), expected, "unit {index}");
            scope.renew();
        }
        drop(scope);
        // SAFETY: as above.
        unsafe { (0..4 * UNITS * 8).for_each(|page| space.release(other + page, 1)) };
        // SAFETY: as above.
        unsafe { space.free_run(other) };
        release(&space, &units, 1);
        drop(space);
        heap.verify();
    }

    #[test]
    fn a_flush_that_fails_loses_nothing() {
        let (heap, space, units) = filled("fault:die=100@ram:", 1);
        assert!(matches!(flush(&space, &units), Err(FarError::Pool(PoolError::ServerGone { .. }))));
        let mut scope = space.enter();
        for unit in &units {
            let near = scope.bring(*unit).unwrap();
            assert_eq!(word(near, 0).load(Ordering::Relaxed), u64::from(*unit));
            scope.renew();
        }
        drop(scope);
        assert!(matches!(flush(&space, &units), Err(FarError::Pool(_))), "they still differ");
        drop(space);
        drop(heap);
    }
}
