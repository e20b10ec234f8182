//! The door to pages of a heap for a library that manages what is in them itself.
//!
//! A [`Space`] takes runs of far pages of a [`Heap`]. Each run is cut into units of one or more
//! pages, which travel between near and far memory as those of collections do, under the heap's
//! budget. The heap knows nothing of what is in them. `farfield-gc` is the only user: this is no
//! interface for programs, and it changes without notice.
//!
//! Pages are counted within the heap. The addresses that a [`SpaceScope`] gives are raw: whoever
//! uses one proves that the unit was made, that it has not been released, and that the scope has
//! been neither renewed nor ended since.

use crate::Heap;
use crate::error::{BuildError, FarError};
use crate::fault::Pin;
use crate::heap::{AccessMode, HeapInner, HeapRef, Scope, copy_words, free_run, lose_run};
use crate::offload::{OffloadLayout, OffloadTarget, OffloadWriteError};
use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FrameId, FrameWord, SlotHint, State};
use farfield_core::{Deal, PageId};
use farfield_os::memory;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use farfield_wic::{CallError, Function, Range};
use std::time::Instant;

/// Right to manage pages of a heap. A heap has at most one at a time, so an address in its arena
/// tells whose it is.
pub struct Space {
    heap: HeapRef,
}

/// Scope of a [`Space`]: units that it finds near stay in their frames until it ends or is renewed.
pub struct SpaceScope<'space> {
    scope: Scope<'space>,
}

/// Guard that keeps a unit near without a scope. Half of the near memory can be kept so.
pub struct UnitPin<'space> {
    _pin: Pin<'space>,
}

/// Reader of pages, wherever they are, that takes no frame for a far one. Whoever has many copies at a
/// time [charges](Space::charge_anyway) the heap with them.
pub struct PageReader<'space> {
    core: &'space HeapInner,
    lane: Option<Box<dyn Lane>>,
    /// Buffers that are not in use.
    buffers: Vec<Buffer>,
}

/// Copy of a far page.
pub struct FarCopy {
    page: u32,
    buffer: Buffer,
}

/// Distribution of far pages over memory servers at one moment. When the pool has been
/// [switched](Heap::switch_pool) since, calls for which it was used fail with [`CallError::Nowhere`].
#[derive(Clone, Copy, Debug)]
pub struct FarLayout(OffloadLayout);

/// Server that has far pages: the only one of a pool (or each of several with equal pages), or a
/// member of a stripe.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FarServer(OffloadTarget);

impl FarServer {
    /// Returns the number of the server among those that share the pages.
    pub fn index(self) -> u32 {
        match self.0 {
            OffloadTarget::Whole => 0,
            OffloadTarget::Member(index) => index as u32,
        }
    }
}

impl FarLayout {
    /// Returns how pages are dealt out to servers, if several share them.
    pub fn deal(&self) -> Option<Deal> {
        self.0.deal
    }

    /// Returns the servers that share the pages.
    pub fn servers(&self) -> Vec<FarServer> {
        let member = |index| FarServer(OffloadTarget::Member(index));
        let members = |deal: Deal| (0..deal.members() as usize).map(member).collect();
        self.0.deal.map_or_else(|| vec![FarServer(OffloadTarget::Whole)], members)
    }

    /// Returns the server that has this page, and the number of the page there.
    pub fn place(&self, page: u32) -> (FarServer, u32) {
        let (target, offset) = self.0.place(PageId(page.into()).offset());
        let local = PageId::containing(offset).0;
        (FarServer(target), u32::try_from(local).unwrap_or_else(|_| unreachable!("no member has more pages than all")))
    }
}

/// Failure of a function that was to make units.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnmadeUnits {
    /// Reason.
    pub error: CallError,
    /// Whether it is certain that the function writes nothing any more. Then the units are empty. If
    /// not, nobody may use or release them again, and their run can only be
    /// [lost](Space::lose_run).
    pub is_over: bool,
}

impl Space {
    /// Takes the right to manage pages of this heap. The space keeps the heap's memory.
    pub fn open(heap: &Heap) -> Result<Space, BuildError> {
        if heap.core().has_space.swap(true, Ordering::AcqRel) {
            return Err(BuildError::Argument("the heap has a collected heap already: use that one, or drop it"));
        }
        Ok(Space { heap: HeapRef::of(&heap.enter()) })
    }

    fn core(&self) -> &HeapInner {
        self.heap.core()
    }

    /// Adds lines to the [notice](farfield_core::notice) of the heap, each with a name and a
    /// number, as long as this space exists. `lines` is called a few times a second if the heap has
    /// a name, on a thread of the heap. It holds no reference to the heap, and is quick.
    pub fn add_to_notice(&self, lines: impl Fn() -> String + Send + 'static) {
        self.core().space_notice.set(Some(Box::new(lines)));
    }

    /// Begins a scope.
    pub fn enter(&self) -> SpaceScope<'_> {
        SpaceScope { scope: Scope::new(self.core()) }
    }

    /// Takes far space for `units` units of `unit_pages` pages each, all of them empty. Returns the
    /// first page.
    pub fn take_run(&self, units: u32, unit_pages: u32) -> Result<u32, FarError> {
        self.take_run_at(units, unit_pages, Some)
    }

    /// Takes far space as [`Space::take_run`] does. `next` returns the least page, not below another
    /// one, with which the run may begin; `None` if there is none. All such pages are multiples of
    /// [`SEGMENT_PAGES`](farfield_core::heap::SEGMENT_PAGES).
    pub fn take_run_at(&self, units: u32, unit_pages: u32, next: impl Fn(u32) -> Option<u32>) -> Result<u32, FarError> {
        if unit_pages > self.core().frames.limit() / 2 {
            return Err(FarError::TooLarge { bytes: u64::from(unit_pages) * PAGE_BYTES as u64 });
        }
        Ok(self.core().take_run_at(units as usize, unit_pages, next)? - self.core().first_page)
    }

    /// Makes a unit empty: its frames are free at once, and its far copy is given back.
    ///
    /// # Safety
    /// The unit is one of a run of this space, of that many pages, and was [made](SpaceScope::make).
    /// Nobody uses an address in it any more.
    pub unsafe fn release(&self, page: u32, unit_pages: u32) {
        self.core().release_units(self.core().first_page + page, 1, unit_pages);
    }

    /// Gives back a run.
    ///
    /// # Safety
    /// [`Space::take_run`] gave this page, the run has not been given back, and all its units are
    /// empty.
    pub unsafe fn free_run(&self, page: u32) {
        // SAFETY: passed on to the caller; our own reference keeps the heap.
        unsafe { free_run(self.core(), self.core().first_page + page) };
    }

    /// Gives up a run whose far addresses are never used again, because a function
    /// [may still write](UnmadeUnits::is_over) there.
    ///
    /// # Safety
    /// As for [`Space::free_run`], but units that such a function was to make need not be empty.
    pub unsafe fn lose_run(&self, page: u32) {
        // SAFETY: passed on to the caller; our own reference keeps the heap.
        unsafe { lose_run(self.core(), self.core().first_page + page) };
    }

    /// Writes those of these units that are near and differ from their far copies; they stay near.
    /// Returns the number of pages written.
    ///
    /// Afterwards the pool has each unit as it was at some moment since the call, or later. After
    /// an error it is not known which ones it has. Waits for the pool.
    ///
    /// # Safety
    /// The units were [made](SpaceScope::make). Until this returns, nobody releases one, and
    /// whoever changes words in one changes them as atomics.
    pub unsafe fn flush(&self, units: &[u32]) -> Result<u64, FarError> {
        Ok(self.core().evictor.flush(self.core(), units)?)
    }

    /// Checks whether the unit of a page is near, or on its way there, so that whoever brings it
    /// does not wait for the pool long.
    pub fn is_near(&self, page: u32) -> bool {
        assert!(page < self.core().pages);
        FrameWord(self.core().words[page].load(Ordering::Acquire)).state() != State::Far
    }

    /// Returns how far pages are distributed over memory servers now.
    pub fn layout(&self) -> FarLayout {
        FarLayout(self.core().offload_layout())
    }

    /// Calls a function that only reads, once for each of these arguments, at the server that is
    /// given with it. A server of several with equal pages is any of these. Waits for the answers.
    ///
    /// The function finds byte *n* of a page of the server at offset 4096 *p* + *n*, as it was
    /// written last. There, *p* is the number that the page [has at the server](FarLayout::place).
    /// Fails with [`CallError::Nowhere`] where a server does not run functions, where the pool was
    /// switched since the layout was asked for, and where the heap verifies pages with a key, because
    /// it could not verify an answer.
    pub fn call<F: Function>(
        &self,
        layout: FarLayout,
        calls: Vec<(FarServer, F::Argument)>,
    ) -> Result<Vec<F::Answer>, CallError> {
        if !self.may_call::<F>() {
            return Err(CallError::Nowhere);
        }
        let calls = calls.into_iter().map(|(FarServer(target), argument)| (target, argument));
        self.core().offload::<F>(layout.0, calls.collect())
    }

    /// Checks whether servers run this function, as far as is known, and are believed.
    pub fn may_call<F: Function>(&self) -> bool {
        let core = self.core();
        core.may_offload::<F>() && !core.checksums.needs_whole_pages()
    }

    /// Calls a function once that makes these units, of one page each, at the server that has them:
    /// if it is one of several with equal pages, at each of these. Waits for the answer.
    ///
    /// The units are empty, and the caller's alone. The argument counts pages as
    /// [the server does](FarLayout::place). `sums` returns the checksums that the answer tells
    /// of the first units. These units are far then, and the others are empty. Fails as [`Space::call`]
    /// does, and over a mirror also if the answers of its members differ.
    pub fn call_to_make<F: Function>(
        &self,
        layout: FarLayout,
        server: FarServer,
        units: &[u32],
        argument: F::Argument,
        sums: impl FnOnce(&F::Answer) -> &[u64],
    ) -> Result<F::Answer, UnmadeUnits> {
        let core = self.core();
        let unmade = |error| UnmadeUnits { error, is_over: true };
        if !self.may_call::<F>() {
            return Err(unmade(CallError::Nowhere));
        }
        for (claimed, unit) in units.iter().enumerate() {
            if core.claim(*unit..*unit + 1).is_err() {
                units[..claimed].iter().for_each(|unit| core.unclaim(*unit));
                return Err(unmade(CallError::NotNow));
            }
        }
        // Writes of earlier contents of these pages may be on their way to the pool.
        core.await_writes();
        let pages = units.iter().map(|unit| Range { offset: u64::from(*unit) * PAGE_BYTES as u64, count: 1 });
        let answer = match core.offload_writing_at::<F>(layout.0, server.0, vec![argument], pages) {
            Ok(mut answers) => answers.pop().ok_or(unmade(CallError::Answer)),
            Err(OffloadWriteError { error, is_over }) => Err(UnmadeUnits { error, is_over }),
        };
        match &answer {
            Ok(answer) => {
                let (sums, mut units) = (sums(answer), units.iter());
                sums.iter().zip(units.by_ref()).for_each(|(sum, unit)| core.mark_written_far_with(*unit, *sum));
                units.for_each(|unit| core.mark_unwritten(*unit));
            }
            Err(UnmadeUnits { is_over: true, .. }) => units.iter().for_each(|unit| core.mark_unwritten(*unit)),
            Err(UnmadeUnits { is_over: false, .. }) => units.iter().for_each(|unit| core.abandon_claimed(*unit)),
        }
        answer
    }

    /// Checks whether a page is far, and has this checksum there. The heap verifies pages without a
    /// key.
    pub fn is_far_with(&self, page: u32, sum: u64) -> bool {
        // Acquire: the page's digest was noted before the page was far.
        FrameWord(self.core().words[page].load(Ordering::Acquire)).state() == State::Far
            && self.core().checksums.is_sum(page, sum)
    }

    /// Charges the heap's budget with tables that are about to take this much near memory.
    pub fn charge(&self, bytes: u64) -> Result<(), FarError> {
        self.core().charge(bytes)
    }

    /// Charges the heap's budget with tables that are needed whatever the budget is.
    pub fn charge_anyway(&self, bytes: u64) {
        self.core().charge_anyway(bytes);
    }

    /// Takes a charge back.
    pub fn uncharge(&self, bytes: u64) {
        self.core().uncharge(bytes);
    }

    /// Returns the address and the length of the arena that all near pages of the heap lie in.
    pub fn arena(&self) -> (usize, usize) {
        (self.core().frames.base() as usize, self.core().frames.arena_bytes())
    }

    /// Returns the near budget of the heap, in bytes.
    pub fn near_bytes(&self) -> u64 {
        self.core().near.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that the heap can have, far and near.
    pub fn far_pages(&self) -> u32 {
        self.core().pages
    }

    /// Makes a reader of pages.
    pub fn reader(&self) -> PageReader<'_> {
        PageReader { core: self.core(), lane: None, buffers: Vec::new() }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.core().space_notice.set(None);
        self.core().has_space.store(false, Ordering::Release);
    }
}

impl<'space> SpaceScope<'space> {
    /// Returns the address of a unit, if it is near and needs no mark.
    #[inline]
    pub fn near(&self, page: u32) -> Option<NonNull<u8>> {
        let address = self.peek(page)?;
        self.scope.touch();
        Some(address)
    }

    /// Returns the address of a unit, if it is near and marked as changed.
    #[inline]
    pub fn near_to_change(&self, page: u32) -> Option<NonNull<u8>> {
        NonNull::new(self.scope.near_unit(self.scope.first_page + page, AccessMode::Write)?)
    }

    /// Returns the address of a unit as [`SpaceScope::near`] does, and notes nothing.
    ///
    /// The address is valid until the thread brings or makes a unit, or renews this scope; or up to the
    /// end of the scope if [`SpaceScope::mark_used`] is called before.
    #[inline(always)]
    pub fn peek(&self, page: u32) -> Option<NonNull<u8>> {
        let FrameId(frame) = self.word(page)?.near()?;
        Some(self.address(frame as usize * PAGE_BYTES))
    }

    /// Returns the address of a card of a unit that was made, if this guess stands for it. Valid as
    /// that of [`SpaceScope::peek`].
    ///
    /// The processor can load from the address while the guess is checked.
    #[inline(always)]
    pub fn peek_at(&self, page: u32, card: u8, guess: SlotHint) -> Option<NonNull<u8>> {
        self.word(page)?.confirms_card(card, guess).then(|| self.address(guess.offset()))
    }

    /// Returns the word of a page, if there is such a page.
    #[inline(always)]
    fn word(&self, page: u32) -> Option<FrameWord> {
        if page >= self.scope.pages {
            return None;
        }
        // SAFETY: `page` is below `pages`, the length of the table.
        let word = unsafe { &*self.scope.words.add(page as usize) };
        // Acquire: the thread that brought the page has filled the frame.
        Some(FrameWord(word.load(Ordering::Acquire)))
    }

    /// Returns the address of a byte of the arena.
    #[inline(always)]
    fn address(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: a word of the table, which has confirmed the guess if there is one, names a frame of
        // the arena, and a card lies within its frame. So this is inside of the arena, where no
        // address is null.
        unsafe { NonNull::new_unchecked(self.scope.arena.add(offset)) }
    }

    /// Lets the processor load a cache line of a unit while it does other things, if the unit is near.
    #[inline]
    pub fn load_ahead(&self, page: u32, offset: usize) {
        if let Some(address) = self.near(page) {
            memory::load_ahead(address.as_ptr().wrapping_add(offset));
        }
    }

    /// Brings a unit near that was made, and returns its address.
    pub fn bring(&self, page: u32) -> Result<NonNull<u8>, FarError> {
        self.fault_in(page, AccessMode::Read)
    }

    /// Brings a unit near that was made, if it is not, and returns its address. If it is, it does not
    /// count as used.
    pub fn bring_unmarked(&self, page: u32) -> Result<NonNull<u8>, FarError> {
        self.fault_in(page, AccessMode::Peek)
    }

    /// Brings a unit near to change it, and returns its address.
    pub fn bring_to_change(&self, page: u32) -> Result<NonNull<u8>, FarError> {
        self.fault_in(page, AccessMode::Write)
    }

    /// Begins to bring units near that were made, without waiting. Returns how many are on their way
    /// now that were not.
    pub fn prefetch(&self, pages: impl IntoIterator<Item = u32>) -> usize {
        self.scope.core.prefetch(self.scope.record, pages) as usize
    }

    /// Makes a unit that is empty, of zeros, and returns its address.
    pub fn make(&self, page: u32) -> Result<NonNull<u8>, FarError> {
        self.fault_in(page, AccessMode::Create)
    }

    fn fault_in(&self, page: u32, mode: AccessMode) -> Result<NonNull<u8>, FarError> {
        let address = self.scope.fault_in_unit(self.scope.first_page + page, mode)?;
        Ok(NonNull::new(address).unwrap_or_else(|| unreachable!("frame 0 is nobody's")))
    }

    /// Keeps the unit near that this scope has found at this address, until the pin is dropped.
    pub fn pin(&self, address: NonNull<u8>) -> Result<UnitPin<'space>, FarError> {
        Ok(UnitPin { _pin: self.scope.pin_at(address.as_ptr())? })
    }

    /// Returns the guess that stands for an address in the arena, which is a multiple of 16.
    #[inline]
    pub fn guess_of(&self, address: NonNull<u8>) -> SlotHint {
        SlotHint(((address.as_ptr() as usize - self.scope.arena as usize) / farfield_core::heap::CARD_BYTES) as u32)
    }

    /// Checks whether it is time to put a better guess into a reference that lies in a page.
    ///
    /// Each guess that changes makes a clean page differ from its far copy, so few do.
    pub fn may_correct(&self, reference: usize) -> bool {
        self.scope.core.may_correct(self.scope.record, reference)
    }

    /// Marks that addresses from this scope are in use until it ends or is renewed.
    #[inline]
    pub fn mark_used(&self) {
        self.scope.mark_used();
    }

    /// Ends the scope and begins it again: no address from it is valid any more.
    pub fn renew(&mut self) {
        self.scope.renew();
    }
}

impl PageReader<'_> {
    /// Copies the bytes of one page. A near page is read where it is, and a far one from the pool,
    /// past all frames. Whoever changes the page meanwhile may be seen in part.
    pub fn read(&mut self, page: u32, into: &mut [u8; PAGE_BYTES]) -> Result<(), FarError> {
        let core = self.core;
        assert!(page < core.pages);
        let scope = Scope::new(core);
        // The first page of a unit has its word.
        let first = core.segments.unit_of(page).map_or(page, |unit| unit.page);
        match FrameWord(core.words[first].load(Ordering::Acquire)).state() {
            State::Empty => into.fill(0),
            State::Far => self.read_far(page, into)?,
            // Near, or under way.
            _ => {
                let address = scope.fault_in_unit(core.first_page + first, AccessMode::Read)?;
                let address = address.wrapping_add((page - first) as usize * PAGE_BYTES);
                // SAFETY: the page is in a frame that the scope keeps. Whoever changes words of units of a
                // space does so with atomics.
                unsafe { copy_words(address, into) };
            }
        }
        Ok(())
    }

    fn read_far(&mut self, page: u32, into: &mut [u8; PAGE_BYTES]) -> Result<(), FarError> {
        for Completion { result, buffer, .. } in self.fetch(&[page])? {
            result?;
            if let Some(buffer) = buffer {
                self.core.check_far(page, buffer.sums()[0], buffer.page(0))?;
                into.copy_from_slice(buffer.page(0));
                self.buffers.push(buffer);
            }
        }
        Ok(())
    }

    /// Copies those of these pages that are far, all at once. Returns their copies, in no order.
    ///
    /// A page is left out if it is near, comes near meanwhile, or is not what was written there:
    /// whoever brings it near gets the error.
    pub fn copy_far(&mut self, pages: &[u32]) -> Result<Vec<FarCopy>, FarError> {
        let is_far = |page: &u32| FrameWord(self.core.words[*page].load(Ordering::Acquire)).state() == State::Far;
        let far: Vec<u32> = pages.iter().copied().filter(is_far).collect();
        let mut copies = Vec::with_capacity(far.len());
        for Completion { tag, result, buffer } in self.fetch(&far)? {
            let copy = buffer.map(|buffer| FarCopy { page: far[tag as usize], buffer });
            match copy {
                Some(copy) if result.is_ok() && self.is_current(&copy) => copies.push(copy),
                Some(copy) => self.take_back(copy),
                None => {}
            }
        }
        Ok(copies)
    }

    /// Checks whether a page is far, and as it was when it was copied.
    pub fn is_current(&self, copy: &FarCopy) -> bool {
        // Acquire: the page's digest was noted before the page was far.
        FrameWord(self.core.words[copy.page].load(Ordering::Acquire)).state() == State::Far
            && self.core.check_far(copy.page, copy.buffer.sums()[0], copy.bytes()).is_ok()
    }

    /// Takes a copy that is not needed any more, so that its memory is used again.
    pub fn take_back(&mut self, copy: FarCopy) {
        self.buffers.push(copy.buffer);
    }

    /// Reads these pages from the pool. The tags of the completions are the indices of the pages.
    fn fetch(&mut self, pages: &[u32]) -> Result<Vec<Completion>, FarError> {
        let core = self.core;
        let mut lane = match self.lane.take() {
            Some(lane) => lane,
            None => core.backend.open_lane()?,
        };
        let until = Instant::now() + core.patience * 2;
        let mut left = (0..).zip(pages);
        let mut full: Option<LaneRequest> = None;
        let mut done: Vec<Completion> = Vec::with_capacity(pages.len());
        while done.len() < pages.len() {
            while let Some(request) = full.take().or_else(|| Some(self.read_request(left.next()?))) {
                full = lane.submit(request).err();
                if full.is_some() {
                    break;
                }
            }
            if lane.poll(&mut done) == 0 {
                lane.wait(core.patience);
            }
            if Instant::now() > until {
                return Err(PoolError::TimedOut { server: 0, after: core.patience * 2 }.into());
            }
        }
        self.lane = Some(lane);
        Ok(done)
    }

    fn read_request(&mut self, (tag, page): (u64, &u32)) -> LaneRequest {
        let buffer = self.buffers.pop().unwrap_or_else(|| Buffer::new(1));
        let op = Op::Read { page: PageId(u64::from(*page)), buffer };
        LaneRequest { tag, priority: Priority::Demand, deadline: self.core.patience, op }
    }
}

impl FarCopy {
    /// Returns the number of the page.
    pub fn page(&self) -> u32 {
        self.page
    }

    /// Returns the bytes of the page.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.page(0)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against units that are lost on their way, read wrongly, or not given back.
    use super::*;
    use crate::test_budget::assert_in_budget;
    use crate::{Plane, Verify};
    use farfield_wic::columns::{Copied, CopyBytes};

    const PAGES: u32 = 2048;

    /// Fills each page with its number.
    fn fill(scope: &mut SpaceScope<'_>, first: u32, units: u32, unit_pages: u32) {
        for unit in 0..units {
            let page = first + unit * unit_pages;
            let address = scope.make(page).unwrap().cast::<u32>();
            for at in 0..unit_pages as usize * PAGE_BYTES / 4 {
                // SAFETY: the unit is near in this scope, has so many words, and is ours.
                unsafe {
                    assert_eq!(address.add(at).read(), 0);
                    address.add(at).write(page);
                }
            }
            scope.renew();
        }
    }

    #[test]
    fn units_come_back_as_they_were_and_are_given_back_on_each_plane() {
        for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
            let heap = Heap::builder().near(2 << 20).far(1 << 30).plane(plane).build().unwrap();
            let space = Space::open(&heap).unwrap();
            assert!(Space::open(&heap).is_err());
            let runs: Vec<(u32, u32, u32)> = [(PAGES, 1), (PAGES / 4, 3), (1, 20)]
                .map(|(units, unit_pages)| (space.take_run(units, unit_pages).unwrap(), units, unit_pages))
                .into();
            let mut scope = space.enter();
            runs.iter().for_each(|(first, units, unit_pages)| fill(&mut scope, *first, *units, *unit_pages));
            let (mut reader, mut bytes) = (space.reader(), [0; PAGE_BYTES]);
            for (first, units, unit_pages) in &runs {
                for page in *first..first + units * unit_pages {
                    let expected = first + (page - first) / unit_pages * unit_pages;
                    let before = heap.stats().misses;
                    reader.read(page, &mut bytes).unwrap();
                    assert_eq!(heap.stats().misses, before, "a reader brings nothing near");
                    assert!(bytes.chunks(4).all(|word| word == expected.to_ne_bytes()), "page {page} of {expected}");
                }
                for unit in 0..*units {
                    let page = first + unit * unit_pages;
                    let address = scope.bring(page).unwrap();
                    // The unit may be cooling, and stays for this scope all the same.
                    assert!(scope.near(page).is_none_or(|near| near == address));
                    assert!(scope.peek(page).is_none_or(|near| near == address));
                    let guess = scope.guess_of(address);
                    assert!(scope.peek_at(page, 0, guess).is_none_or(|near| near == address));
                    assert_eq!(scope.peek_at(page, 1, guess), None);
                    assert_eq!(scope.peek_at(page, 0, SlotHint::new(FrameId(0), 0)), None);
                    // SAFETY: near in this scope.
                    assert_eq!(unsafe { address.cast::<u32>().read() }, page);
                    scope.renew();
                }
            }
            drop(scope);
            assert_in_budget(&heap);
            for (first, units, unit_pages) in runs {
                // SAFETY: our run, whose units were made; nobody uses them.
                unsafe {
                    (0..units).for_each(|unit| space.release(first + unit * unit_pages, unit_pages));
                    space.free_run(first);
                }
            }
            drop(reader);
            drop(space);
            heap.verify();
            assert!(Space::open(&heap).is_ok());
        }
    }

    #[test]
    fn copies_of_far_pages_are_current_until_the_pages_change() {
        let heap = Heap::builder().near(2 << 20).far(1 << 30).build().unwrap();
        let space = Space::open(&heap).unwrap();
        let first = space.take_run(PAGES, 1).unwrap();
        let mut scope = space.enter();
        fill(&mut scope, first, PAGES, 1);
        let (before, mut reader) = (heap.stats(), space.reader());
        let pages: Vec<u32> = (first..first + PAGES).collect();
        // A page that came near may leave again, as it was, between two looks.
        let is_current_or_near = |reader: &PageReader<'_>, copy: &FarCopy| {
            reader.is_current(copy) || space.is_near(copy.page()) || reader.is_current(copy)
        };
        let copies = reader.copy_far(&pages).unwrap();
        assert!(copies.len() as u32 >= PAGES - (2 << 20) / PAGE_BYTES as u32);
        assert_eq!(heap.stats().misses, before.misses, "a reader brings nothing near");
        for (index, copy) in copies.iter().enumerate() {
            assert!(is_current_or_near(&reader, copy));
            assert!(copy.bytes().chunks(4).all(|word| word == copy.page().to_ne_bytes()));
            if index % 100 > 0 {
                continue;
            }
            // It comes near, is changed in every second case, and leaves.
            let near = scope.bring(copy.page()).unwrap().cast::<u32>();
            assert!(!reader.is_current(copy), "it is near");
            let is_changed = index % 200 == 0;
            // SAFETY: near in this scope, and ours.
            unsafe { near.write(copy.page() + u32::from(is_changed)) };
            scope.renew();
            for page in first..first + 600 {
                scope.bring(page).unwrap();
                scope.renew();
            }
            let is_current = if is_changed { reader.is_current(copy) } else { is_current_or_near(&reader, copy) };
            assert_eq!(is_current, !is_changed, "copy {index}");
        }
        copies.into_iter().for_each(|copy| reader.take_back(copy));
        drop(reader);
        drop(scope);
        // SAFETY: our run, whose units were made; nobody uses them.
        unsafe {
            pages.iter().for_each(|page| space.release(*page, 1));
            space.free_run(first);
        }
        drop(space);
        heap.verify();
    }

    /// `ram:` runs no functions, and says so before anybody is asked.
    #[test]
    fn units_that_no_server_has_made_are_empty() {
        let argument = || Copied { from: Vec::new(), to: Vec::new() };
        for (verify, is_asked) in [(Verify::Checksum, true), (Verify::Keyed, false)] {
            let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).verify(verify).build().unwrap();
            let space = Space::open(&heap).unwrap();
            let first = space.take_run(PAGES, 1).unwrap();
            let units: Vec<u32> = (first..first + PAGES).collect();
            assert_eq!(space.may_call::<CopyBytes>(), is_asked);
            let unmade = {
                let layout = space.layout();
                let server = layout.servers()[0];
                space.call_to_make::<CopyBytes>(layout, server, &units, argument(), |_| unreachable!("nobody answers"))
            };
            assert_eq!(unmade, Err(UnmadeUnits { error: CallError::Nowhere, is_over: true }));
            assert!(!space.may_call::<CopyBytes>(), "it is known from now on");
            // They can be made here.
            let mut scope = space.enter();
            fill(&mut scope, first, PAGES, 1);
            drop(scope);
            // SAFETY: our run, whose units were made; nobody uses them.
            unsafe {
                units.iter().for_each(|unit| space.release(*unit, 1));
                space.free_run(first);
            }
            drop(space);
            heap.verify();
        }
    }

    #[test]
    fn units_that_could_never_be_near_are_refused() {
        let heap = Heap::builder().near(2 << 20).build().unwrap();
        let space = Space::open(&heap).unwrap();
        assert_eq!(space.take_run(1, 300), Err(FarError::TooLarge { bytes: 300 << 12 }));
    }
}
