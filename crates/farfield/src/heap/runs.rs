//! Runs of units: far space for collections, which find their elements by number and so need no
//! slots.

use super::AccessMode;
use super::objects::{InternalScope, unreference_if};
use super::segments::TransferUnit;
use super::{HeapInner, Scope};
use crate::error::FarError;
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FrameId, FrameWord, State};
use farfield_core::policy::prefetch::PrefetchTimeliness;

impl Scope<'_> {
    /// Returns the address of the unit that begins at this page (of all heaps' pages), if it is
    /// near and needs no mark.
    ///
    /// The unit stays there as long as the scope lasts, or until it is renewed. So the caller marks
    /// the scope as used, or holds it, before a reference, or a second call, relies on the first.
    #[inline]
    pub(crate) fn near_unit(&self, page: u32, mode: AccessMode) -> Option<*mut u8> {
        let page = self.number(page)?;
        // SAFETY: `page` is below `self.pages`, the length of the table.
        let word = unsafe { &*self.words.add(page as usize) };
        // Acquire: the thread that brought the page has filled the frame.
        let word = FrameWord(word.load(Ordering::Acquire));
        let FrameId(frame) = if mode.is_read() { word.near() } else { word.near_dirty() }?;
        self.touch();
        // SAFETY: a page's word names a frame of the arena.
        Some(unsafe { self.arena.add(frame as usize * PAGE_BYTES) })
    }

    /// Brings a unit near, or makes it, and returns its address.
    pub(crate) fn fault_in_unit(&self, page: u32, mode: AccessMode) -> Result<*mut u8, FarError> {
        let Some(page) = self.number(page) else { return Err(FarError::OtherHeap) };
        let frame = self.core.fault_in(self.record, page, mode, self.is_renewable())?;
        self.touch();
        Ok(self.core.frames.address(frame))
    }

    /// Returns how a unit is found that is not near, or that was prefetched and not used since.
    pub(crate) fn timeliness(&self, page: u32) -> Option<PrefetchTimeliness> {
        let word = FrameWord(self.core.words[self.number(page)?].load(Ordering::Relaxed));
        match word.state() {
            State::Far => Some(PrefetchTimeliness::Missing),
            State::Loading => Some(PrefetchTimeliness::Late),
            _ => word.is_ahead().then_some(PrefetchTimeliness::InTime),
        }
    }

    /// Checks whether this unit would not be near, or not stay, without the use to come. It is far,
    /// on its way, about to leave, or was prefetched and not used since.
    pub(crate) fn is_new(&self, page: u32) -> bool {
        self.number(page).is_some_and(|page| {
            let word = FrameWord(self.core.words[page].load(Ordering::Relaxed));
            word.state() != State::Near || word.is_ahead()
        })
    }

    /// Marks these units to be evicted before others. Units that are far are skipped.
    pub(crate) fn mark_evict_first(&self, pages: impl Iterator<Item = u32>) {
        self.core.mark_evict_first(pages.filter_map(|page| self.number(page)));
    }

    /// Starts to fetch these units without waiting. Returns how many.
    pub(crate) fn prefetch(&self, pages: impl Iterator<Item = u32>) -> usize {
        self.core.prefetch(self.record, pages.filter_map(|page| self.number(page))) as usize
    }

    /// Returns how many units of one page, from this page on and at most `most`, are near in
    /// contiguous frames. The first is at `address`.
    #[inline]
    pub(crate) fn side_by_side(&self, page: u32, address: *const u8, most: usize, mode: AccessMode) -> usize {
        let first = page - self.first_page;
        let frame = ((address as usize - self.arena as usize) / PAGE_BYTES) as u32;
        let is_next = |count: &usize| {
            // SAFETY: units of one run, so their pages are below `self.pages`, too.
            let word = FrameWord(unsafe { &*self.words.add(first as usize + count) }.load(Ordering::Acquire));
            let near = if mode.is_read() { word.near() } else { word.near_dirty() };
            near == Some(FrameId(frame + *count as u32))
        };
        (1..most).take_while(is_next).count() + 1
    }
}

impl HeapInner {
    /// Takes far space for `units` units of `unit_pages` pages each. Returns its first page, among
    /// all heaps' pages. The run keeps the heap until [`free_run`].
    pub(crate) fn take_run(&self, units: usize, unit_pages: u32) -> Result<u32, FarError> {
        self.take_run_at(units, unit_pages, Some)
    }

    /// Takes far space as [`HeapInner::take_run`] does. `next` returns the least page of this heap,
    /// not below another one, with which the run may begin.
    pub(crate) fn take_run_at(
        &self,
        units: usize,
        unit_pages: u32,
        next: impl Fn(u32) -> Option<u32>,
    ) -> Result<u32, FarError> {
        let units = u32::try_from(units).map_err(|_| FarError::FarFull)?;
        let page = self.segments.take_run_at(units, unit_pages, next)?;
        self.references.fetch_add(1, Ordering::Relaxed);
        self.fit();
        Ok(self.first_page + page)
    }

    /// Releases units of a run, one after the other, that hold nothing any more: their frames
    /// become free, and their far copies are given back. They were made, or are of one page; nobody
    /// refers to them.
    pub(crate) fn release_units(&self, page: u32, units: usize, unit_pages: u32) {
        for unit in 0..units as u32 {
            self.release(TransferUnit { page: page - self.first_page + unit * unit_pages, pages: unit_pages });
        }
    }

    /// Calls `action` with the address of a unit that was made, which is near during the call.
    pub(crate) fn with_unit<R>(&self, page: u32, action: impl FnOnce(*mut u8) -> R) -> Result<R, FarError> {
        let inside = InternalScope::new(self);
        let frame = self.fault_in(inside.record, page - self.first_page, AccessMode::Read, inside.is_outermost())?;
        Ok(action(self.frames.address(frame)))
    }

    /// Counts values whose destructor will not run.
    pub(crate) fn lose_values(&self, count: usize) {
        let counter = &self.record().counters.lost_values;
        counter.store(counter.load(Ordering::Relaxed) + count as u64, Ordering::Relaxed);
    }
}

impl HeapInner {
    /// Waits until no write of what was in pages that are [claimed](HeapInner::claim) is on its way
    /// to the pool.
    pub(crate) fn await_writes(&self) {
        // The thread that runs the evictor waits for the end of its writes.
        self.evictor.paused(|| ());
    }

    /// Makes a claimed page Far that was written at the pool. Only the pool knows its bytes until
    /// they come near.
    pub(crate) fn mark_written_far(&self, page: u32) {
        self.checksums.forget(page);
        self.finish_far(page);
    }

    /// Makes a claimed page Far that was written at the pool, by whoever has told its checksum. The
    /// heap has no key.
    pub(crate) fn mark_written_far_with(&self, page: u32, sum: u64) {
        self.checksums.note_sum(page, sum);
        self.finish_far(page);
    }

    fn finish_far(&self, page: u32) {
        let seen = FrameWord(self.words[page].load(Ordering::Acquire));
        self.words[page].store(seen.finish_far_create().0, Ordering::Release);
    }

    /// Makes a claimed page Empty that may have been written at the pool, by a writer that has
    /// ended.
    pub(crate) fn mark_unwritten(&self, page: u32) {
        let seen = FrameWord(self.words[page].load(Ordering::Acquire));
        self.words[page].store(seen.abandon_far_create().0, Ordering::Release);
        self.vacate(true);
    }

    /// Gives up a claimed page that a writer at the pool may still write. It has no owner from now
    /// on, and its run is [lost](lose_run).
    pub(crate) fn abandon_claimed(&self, page: u32) {
        self.words[page].store(FrameWord::EMPTY.0, Ordering::Release);
    }
}

/// Gives up the reference of a run whose far addresses are never used again.
///
/// # Safety
/// As for [`free_run`].
pub(crate) unsafe fn lose_run(core: *const HeapInner, page: u32) {
    {
        // SAFETY: the run keeps the heap until its reference is given up below.
        let core = unsafe { &*core };
        core.segments.free_object(page - core.first_page, 0);
    }
    // SAFETY: the reference of the run, which is no more.
    unsafe { unreference_if(core, true) };
}

/// Gives back a run all of whose units are released.
///
/// # Safety
/// `page` came from [`HeapInner::take_run`] of this heap and was not given back; the caller uses
/// neither run nor heap afterwards, unless it has another reference.
pub(crate) unsafe fn free_run(core: *const HeapInner, page: u32) {
    {
        // SAFETY: the run keeps the heap until its reference is given up below.
        let core = unsafe { &*core };
        let page = page - core.first_page;
        core.segments.free_object(page, 0);
        core.segments.give_back(page);
    }
    // SAFETY: the reference of the run, which is no more.
    unsafe { unreference_if(core, true) };
}
