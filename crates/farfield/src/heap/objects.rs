//! How objects are made and freed.

use super::AccessMode;
use super::drops::{Panics, drop_or_queue};
use super::scopes::ScopeState;
use super::segments::{FreeOutcome, TransferUnit};
use super::threads::{ThreadState, count};
use super::{Backoff, HeapInner};
use crate::error::FarError;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{Class, FrameWord, LogClass, SEGMENT_PAGES, SlotHint, State};
use farfield_pool::PoolError;
use std::alloc::Layout;
use std::sync::{Mutex, PoisonError};

/// Number of other segments that are tried when a page of the first one is lost.
const ELSEWHERE: usize = 8;

/// Internal scope, in which no user has references.
///
/// Code that frees a value holds it in a function that has no reference to the heap as an argument:
/// when the scope ends, another thread may end the heap.
pub(crate) struct InternalScope<'a> {
    pub(crate) record: &'a ThreadState,
    open: &'a ScopeState,
}

impl<'a> InternalScope<'a> {
    pub(crate) fn new(core: &'a HeapInner) -> InternalScope<'a> {
        let record = core.record();
        let open = record.enter(&core.epoch);
        // Pages that are brought near in it stay.
        open.touched.set(true);
        InternalScope { record, open }
    }

    /// Checks whether this scope is the thread's only one, so that no user loses anything if it is
    /// renewed.
    pub(super) fn is_outermost(&self) -> bool {
        self.record.is_single()
    }
}

impl Drop for InternalScope<'_> {
    fn drop(&mut self) {
        self.record.leave(self.open);
    }
}

/// Values whose destructor could not run when they were dropped, because a scope had no room. It
/// runs when a scope ends.
#[derive(Default)]
pub(crate) struct DeferredDrops {
    waiting: Mutex<Vec<DeferredDrop>>,
    count: AtomicUsize,
}

/// Entry of the list of deferred drops: its destructors are to run, by [`run_deferred_drop`].
pub(super) enum DeferredDrop {
    Value(DeferredValue),
    Collection(Box<dyn Teardown>),
}

/// Contents of a collection that was dropped, whose elements are still to be dropped.
pub(crate) trait Teardown: Send {
    /// Drops the elements and catches their panics. False if some have to wait; with `finally`,
    /// those are lost.
    fn tear_down(&mut self, finally: bool, panics: &mut Panics) -> bool;
}

pub(super) struct DeferredValue {
    number: u32,
    card: u8,
    teardown: TeardownFn,
}

/// Function that drops an object and frees its place.
pub(crate) type TeardownFn = unsafe fn(*const HeapInner, u32, u8) -> Result<(), FarError>;

impl HeapInner {
    /// Puts a value into the heap. Returns its number within the heap (page, or handle above all
    /// pages) and its place.
    pub(crate) fn put_in<T>(&self, value: T) -> Result<(u32, SlotHint), (FarError, T)> {
        let inside = InternalScope::new(self);
        match self.place_for::<T>(&inside) {
            Ok((number, place, at)) => {
                // SAFETY: as `place_for` says.
                unsafe { at.write(value) };
                Ok((number, place))
            }
            Err(error) => Err((error, value)),
        }
    }

    /// Puts a value into the heap like [`HeapInner::put_in`], from where it lies.
    pub(crate) fn put_in_boxed<T>(&self, value: Box<T>) -> Result<(u32, SlotHint), (FarError, Box<T>)> {
        let inside = InternalScope::new(self);
        match self.place_for::<T>(&inside) {
            Ok((number, place, at)) => {
                let from = Box::into_raw(value);
                // SAFETY: as `place_for` says. The value is moved: what is dropped is the box of
                // bytes that are no value any more.
                unsafe {
                    at.copy_from_nonoverlapping(from, 1);
                    drop(Box::from_raw(from.cast::<MaybeUninit<T>>()));
                }
                Ok((number, place))
            }
            Err(error) => Err((error, value)),
        }
    }

    /// Makes room for a value whose bytes do not matter yet. Returns what [`HeapInner::put_in`]
    /// does.
    pub(crate) fn put_in_nothing<T>(&self) -> Result<(u32, SlotHint), FarError> {
        let inside = InternalScope::new(self);
        self.place_for::<T>(&inside).map(|(number, place, _)| (number, place))
    }

    /// Makes room for a `T`. Returns its number within the heap, its place, and the address of the
    /// place, until the scope ends: nobody else knows of it, and it is large enough and so aligned.
    fn place_for<T>(&self, inside: &InternalScope<'_>) -> Result<(u32, SlotHint, *mut T), FarError> {
        const { assert!(align_of::<T>() <= PAGE_BYTES, "far values cannot be aligned to more than a page") };
        let class = const { LogClass::of(size_of::<T>(), align_of::<T>()) };
        let (number, place) = self.room_for(inside.record, class, Layout::new::<T>(), inside.is_outermost())?;
        // SAFETY: the place is large enough for `T` and so aligned (`Class::of`, `LogClass::of`), near since
        // `room_for`, and stays so until our scope ends. So it lies in the arena.
        Ok((number, place, unsafe { self.frames.base().add(place.offset()) }.cast()))
    }

    /// Makes room for an object of this layout; on the object plane, of this class.
    ///
    /// Returns its number within the heap (page, or handle above all pages), and the place where it
    /// lies until the caller's scope ends, near and dirty.
    pub(crate) fn room_for(
        &self,
        record: &ThreadState,
        class: Option<LogClass>,
        layout: Layout,
        renewable: bool,
    ) -> Result<(u32, SlotHint), FarError> {
        if let (Some(objects), Some(class)) = (&self.objects, class)
            && !objects.makes_without_handle(class, layout.size())
            && self.may_have_handle(objects, record)
        {
            let (object, place) = self.make_object(record, objects, class, renewable)?;
            return Ok((self.pages + object, place));
        }
        self.make(record, layout, renewable)
    }

    /// Makes room for an object that is fetched by pages, near and dirty.
    fn make(&self, record: &ThreadState, layout: Layout, renewable: bool) -> Result<(u32, SlotHint), FarError> {
        let Some(class) = Class::of(layout.size(), layout.align()) else {
            let pages = layout.size().div_ceil(PAGE_BYTES);
            let pages = u32::try_from(pages).ok().filter(|pages| *pages <= self.frames.limit() / 2);
            let pages = pages.ok_or(FarError::TooLarge { bytes: layout.size() as u64 })?;
            let page = self.segments.take_run(1, pages)?;
            self.references.fetch_add(1, Ordering::Relaxed);
            self.fit();
            return self.make_at(record, page, 0, renewable);
        };
        let mut made = self.make_in_segment(record, class, renewable);
        for _ in 0..ELSEWHERE {
            // The object would lie in a page that is lost. Another segment is filled instead, so
            // that the lost page keeps no other object out.
            let Err(FarError::Pool(PoolError::Corrupt { .. })) = made else { break };
            self.shelve(record, class);
            made = self.make_in_segment(record, class, renewable);
        }
        made
    }

    /// Makes this thread give up the segment of the class that it fills; it fills another one from
    /// now on.
    fn shelve(&self, record: &ThreadState, class: Class) {
        if let Some(segment) = record.segments[class.index()].take()
            && self.segments.shelve(segment, class) == FreeOutcome::Release
        {
            self.release_segment(segment * SEGMENT_PAGES);
        }
    }

    /// Makes room for an object that is smaller than a segment, in the segment that this thread
    /// fills.
    fn make_in_segment(
        &self,
        record: &ThreadState,
        class: Class,
        renewable: bool,
    ) -> Result<(u32, SlotHint), FarError> {
        let cell = &record.segments[class.index()];
        let (segment, object) = loop {
            let segment = match cell.get() {
                Some(segment) => segment,
                None => {
                    let segment = self.segments.own(class)?;
                    self.fit();
                    cell.set(Some(segment));
                    segment
                }
            };
            match self.segments.take_object(segment, class) {
                Some((object, first)) => {
                    if first {
                        self.references.fetch_add(1, Ordering::Relaxed);
                    }
                    break (segment, object);
                }
                None => cell.set(None),
            }
        };
        let (page, card) = class.locate(object);
        self.make_at(record, segment * SEGMENT_PAGES + page, card, renewable)
    }

    fn make_at(&self, record: &ThreadState, page: u32, card: u8, renewable: bool) -> Result<(u32, SlotHint), FarError> {
        match self.fault_in(record, page, AccessMode::Create, renewable) {
            Ok(frame) => Ok((page, SlotHint::new(frame, card))),
            Err(error) => {
                // Its pages were not made, or belong to others too: only the place is given back.
                if self.free_place(page, card) {
                    // Not the last reference: a caller that makes objects has a heap.
                    self.references.fetch_sub(1, Ordering::AcqRel);
                }
                Err(error)
            }
        }
    }

    /// Brings an object that the caller owns near, and returns where it is.
    pub(super) fn fault_in_owned(
        &self,
        inside: &InternalScope<'_>,
        number: u32,
        card: u8,
        mode: AccessMode,
    ) -> Result<SlotHint, FarError> {
        let place = match (&self.objects, number.checked_sub(self.pages)) {
            (Some(objects), Some(object)) => {
                self.fault_in_object(inside.record, objects, object, mode, inside.is_outermost())?
            }
            _ => SlotHint::new(self.fault_in(inside.record, number, mode, inside.is_outermost())?, card),
        };
        // The scope may have been renewed while there was no room. The place that it has found from
        // here on stays, whatever a destructor does.
        inside.open.touched.set(true);
        Ok(place)
    }

    /// Frees an object that the caller owned. True if the caller must give up a reference to the
    /// heap.
    fn free(&self, inside: &InternalScope<'_>, number: u32, card: u8) -> bool {
        if let (Some(objects), Some(object)) = (&self.objects, number.checked_sub(self.pages)) {
            self.free_object(inside.record, objects, object);
            return true;
        }
        let page = number;
        if let Some(unit) = self.segments.unit_of(page).filter(|unit| unit.pages > 1) {
            self.release(unit);
        }
        self.free_place(page, card)
    }

    fn free_place(&self, page: u32, card: u8) -> bool {
        let (freed, last) = self.segments.free_object(page, card);
        if freed == FreeOutcome::Release {
            self.release_segment(page);
        }
        last
    }

    fn release_segment(&self, page: u32) {
        for unit in self.segments.units(page).filter(|unit| unit.pages == 1) {
            self.release(unit);
        }
        self.segments.give_back(page);
    }

    /// Makes a unit Empty in which no object lives. Nobody can refer to it, so its frames are free
    /// at once.
    pub(crate) fn release(&self, unit: TransferUnit) {
        let word = &self.words[unit.page];
        // The owner of a page that is Claimed or being discarded waits neither for us nor for
        // anything without an end.
        let mut backoff = Backoff::new(core::time::Duration::MAX);
        let (released, frame) = loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            match seen.release() {
                Some((next, frame)) if self.exchange(word, seen, next) => {
                    // A page that was Empty already was counted then.
                    self.vacate(next.is_stored() && seen.state() != State::Empty);
                    break (next, frame);
                }
                _ => {
                    // The page may be on its way because it was prefetched.
                    self.help(self.record(), None);
                    backoff.wait().unwrap_or(());
                }
            }
        };
        for inside in unit.page + 1..unit.page + unit.pages {
            let seen = FrameWord(self.words[inside].load(Ordering::Acquire));
            let next = seen.unit_released(released.is_stored());
            self.words[inside].store(next.0, Ordering::Release);
            self.vacate(next.is_stored());
        }
        if let Some(frame) = frame {
            self.frames.put(frame, unit.pages);
        }
    }

    /// Detaches the record of a thread that ends: other threads may fill its segments.
    pub(crate) fn detach(&self, record: &ThreadState) {
        self.detach_objects(&record.objects);
        for (index, cell) in record.segments.iter().enumerate() {
            if let Some(segment) = cell.take()
                && self.segments.disown(segment, Class::from_index(index)) == FreeOutcome::Release
            {
                self.release_segment(segment * SEGMENT_PAGES);
            }
        }
    }

    /// Moves a value out of the heap, by `read` from its address, and frees its place. If the flag
    /// is true, the caller must give up the reference of its segment, outside of all scopes.
    ///
    /// # Safety
    /// An object lives there and is the caller's; unless there is an error, it lives there no more.
    unsafe fn take_out<R>(
        &self,
        inside: &InternalScope<'_>,
        number: u32,
        card: u8,
        read: impl FnOnce(*mut u8) -> R,
    ) -> Result<(R, bool), FarError> {
        let place = self.fault_in_owned(inside, number, card, AccessMode::Read)?;
        // SAFETY: its page stays there until our scope ends.
        let value = read(unsafe { self.frames.base().add(place.offset()) });
        Ok((value, self.free(inside, number, card)))
    }

    /// Frees a value without its destructor; true as for `take_out`.
    fn lose(&self, inside: &InternalScope<'_>, number: u32, card: u8) -> bool {
        count(&inside.record.counters.lost_values);
        self.free(inside, number, card)
    }

    /// Drops a value that is too large to be moved out (`destructor` does it, at its address) or
    /// needs no destructor, and frees its place.
    ///
    /// # Safety
    /// As for `take_out`.
    unsafe fn drop_object_in_place(
        &self,
        inside: &InternalScope<'_>,
        number: u32,
        card: u8,
        destructor: Option<impl FnOnce(*mut u8)>,
    ) -> Result<(bool, Panics), FarError> {
        let mut panics = Panics::default();
        if let Some(destructor) = destructor {
            let place = self.fault_in_owned(inside, number, card, AccessMode::Write)?;
            // SAFETY: its page stays there until our scope ends.
            panics.catch(|| destructor(unsafe { self.frames.base().add(place.offset()) }));
        }
        Ok((self.free(inside, number, card), panics))
    }

    /// Checks whether a value whose bytes could not be read because of `error` is lost for good.
    pub(crate) fn is_lost(&self, error: FarError) -> bool {
        use PoolError::{Corrupt, Refused, ServerGone};
        matches!(error, FarError::Pool(ServerGone { .. } | Corrupt { .. } | Refused { .. }))
            || self.closed.load(Ordering::SeqCst)
    }

    fn defer_drop(&self, what: DeferredDrop) {
        let mut waiting = self.deferred_drops.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push(what);
        self.deferred_drops.count.store(waiting.len(), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn has_deferred_drops(&self) -> bool {
        self.deferred_drops.count.load(Ordering::Relaxed) > 0
    }

    /// Runs destructors that had to wait. With `finally`, those that still cannot run never will.
    /// The caller has a reference to the heap and is in no scope.
    #[cold]
    pub(crate) fn run_deferred_drops(&self, finally: bool) -> Panics {
        let waiting = {
            let mut waiting = self.deferred_drops.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            self.deferred_drops.count.store(0, Ordering::Relaxed);
            core::mem::take(&mut *waiting)
        };
        let mut panics = Panics::default();
        for what in waiting {
            // SAFETY: the owner has forgotten it, and the entry is its only owner. The caller's
            // reference keeps the heap.
            panics.catch(|| unsafe { run_deferred_drop(self, what, finally) });
        }
        panics
    }
}

/// Moves a value out of its heap.
///
/// # Safety
/// A `T` lives there and is the caller's; unless there is an error, it lives there no more. The
/// heap exists as long as it does, and no longer for us.
pub(crate) unsafe fn take<T>(core: *const HeapInner, number: u32, card: u8) -> Result<T, FarError> {
    // SAFETY: the object there is a `T`, and passed on to the caller.
    unsafe { take_with(core, number, card, |at| at.cast::<T>().read()) }
}

/// Moves an object out of its heap whose type only the caller knows: `read` moves its parts out.
///
/// # Safety
/// As for [`take`].
pub(crate) unsafe fn take_with<R>(
    core: *const HeapInner,
    number: u32,
    card: u8,
    read: impl FnOnce(*mut u8) -> R,
) -> Result<R, FarError> {
    let (value, last) = {
        // SAFETY: the value keeps the heap until its place is free, and our scope does from then on.
        let inside = InternalScope::new(unsafe { &*core });
        // SAFETY: as above, and passed on to the caller.
        unsafe { (*core).take_out(&inside, number, card, read) }?
    };
    // SAFETY: as above.
    unsafe { unreference_if(core, last) };
    Ok(value)
}

/// Drops a value where it is, and frees its place: later if there is no room now, never if its
/// bytes are lost.
///
/// # Safety
/// As for [`take`], except that the value is the heap's from now on, whatever happens.
pub(crate) unsafe fn drop_far<T>(core: *const HeapInner, number: u32, card: u8) {
    if core::mem::needs_drop::<T>() {
        // SAFETY: passed on to the caller.
        unsafe { drop_far_with(core, number, card, tear_down_value::<T>) };
    } else {
        // SAFETY: passed on to the caller. No code of a user runs.
        unsafe { drop_value(core, DeferredValue { number, card, teardown: tear_down_value::<T> }, false) };
    }
}

/// Drops an object whose type only the caller knows: `teardown` drops it and frees its place, as
/// [`take_with`] or [`drop_and_free`] do.
///
/// # Safety
/// As for [`drop_far`]; `teardown` may be called later, and by another thread.
pub(crate) unsafe fn drop_far_with(core: *const HeapInner, number: u32, card: u8, teardown: TeardownFn) {
    // SAFETY: passed on to the caller; the value keeps the heap.
    unsafe { drop_or_queue(core, DeferredDrop::Value(DeferredValue { number, card, teardown })) };
}

/// Drops what is left of a collection, now or later.
///
/// # Safety
/// The collection keeps the heap.
pub(crate) unsafe fn drop_collection(core: *const HeapInner, teardown: Box<dyn Teardown>) {
    // SAFETY: passed on to the caller.
    unsafe { drop_or_queue(core, DeferredDrop::Collection(teardown)) };
}

/// Runs the destructors of an entry. If they cannot run, defers them or gives the values up.
///
/// # Safety
/// As for [`drop_far`]; a collection keeps the heap.
pub(super) unsafe fn run_deferred_drop(core: *const HeapInner, what: DeferredDrop, finally: bool) {
    match what {
        // SAFETY: passed on to the caller.
        DeferredDrop::Value(deferred) => unsafe { drop_value(core, deferred, finally) },
        DeferredDrop::Collection(mut teardown) => {
            let mut panics = Panics::default();
            if !teardown.tear_down(finally, &mut panics) {
                // SAFETY: passed on to the caller.
                unsafe { defer_collection_drop(core, teardown) };
            }
            panics.resume();
        }
    }
}

/// Runs the destructor of a value. If it cannot run, defers it, or frees a lost value without it.
///
/// # Safety
/// As for [`drop_far`].
unsafe fn drop_value(core: *const HeapInner, deferred: DeferredValue, finally: bool) {
    // SAFETY: passed on to the caller.
    let Err(error) = (unsafe { (deferred.teardown)(core, deferred.number, deferred.card) }) else { return };
    // SAFETY: the value still lives, and keeps the heap.
    if !(finally || unsafe { &*core }.is_lost(error)) {
        // SAFETY: as above.
        unsafe { &*core }.defer_drop(DeferredDrop::Value(deferred));
        return;
    }
    let last = {
        // SAFETY: as in `take`.
        let (core, inside) = unsafe { (&*core, InternalScope::new(&*core)) };
        core.lose(&inside, deferred.number, deferred.card)
    };
    // SAFETY: `lose` said so, and our scope is over.
    unsafe { unreference_if(core, last) };
}

/// Defers the drop of what is left of a collection until a scope ends.
///
/// # Safety
/// The collection keeps the heap.
unsafe fn defer_collection_drop(core: *const HeapInner, teardown: Box<dyn Teardown>) {
    // As soon as it is in the list, another thread may drop it, and it keeps the heap no more.
    // SAFETY: passed on to the caller.
    unsafe { &*core }.references.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the reference above keeps it.
    unsafe { &*core }.defer_drop(DeferredDrop::Collection(teardown));
    // SAFETY: the reference above.
    unsafe { unreference_if(core, true) };
}

/// Drops a `T` in the heap and frees its place.
///
/// # Safety
/// As for [`take`].
unsafe fn tear_down_value<T>(core: *const HeapInner, number: u32, card: u8) -> Result<(), FarError> {
    if core::mem::needs_drop::<T>() && size_of::<T>() <= PAGE_BYTES {
        // SAFETY: passed on to the caller.
        return unsafe { move_out_and_drop::<T>(core, number, card) };
    }
    // SAFETY: the object there is a `T` and nobody else has it; passed on to the caller.
    unsafe {
        drop_and_free(
            core,
            number,
            card,
            core::mem::needs_drop::<T>().then_some(|at: *mut u8| at.cast::<T>().drop_in_place()),
        )
    }
}

/// Moves a `T` out of the heap and drops it: a destructor that drops a long chain of far values must
/// not keep a scope open.
///
/// A function of its own, because without optimization its frame has room for a `T`, also if it is
/// not called: a value that is larger than the stack is dropped where it lies.
///
/// # Safety
/// As for [`take`].
unsafe fn move_out_and_drop<T>(core: *const HeapInner, number: u32, card: u8) -> Result<(), FarError> {
    // SAFETY: passed on to the caller.
    drop(unsafe { take::<T>(core, number, card) }?);
    Ok(())
}

/// Frees an object after `destructor` has dropped it where it is, if it has a destructor.
///
/// # Safety
/// As for [`take`].
pub(crate) unsafe fn drop_and_free(
    core: *const HeapInner,
    number: u32,
    card: u8,
    destructor: Option<impl FnOnce(*mut u8)>,
) -> Result<(), FarError> {
    let (last, panics) = {
        // SAFETY: as in `take_with`.
        let inside = InternalScope::new(unsafe { &*core });
        // SAFETY: as in `take_with`, and passed on to the caller.
        unsafe { (*core).drop_object_in_place(&inside, number, card, destructor) }?
    };
    // SAFETY: `drop_object_in_place` said so, and our scope is over.
    unsafe { unreference_if(core, last) };
    panics.resume();
    Ok(())
}

/// # Safety
/// `last` is true for whom `free` said so. The caller is in no scope of its own, and does not use
/// the heap afterwards unless it has another reference.
pub(super) unsafe fn unreference_if(core: *const HeapInner, last: bool) {
    if last {
        // SAFETY: it is the reference of a segment without objects. If scopes are open around us,
        // they are of a user, whose `Heap` has a reference, or of the destructor of a value that
        // lives still.
        unsafe { HeapInner::unreference(core) };
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a value that leaves while its destructor, which needs room, runs where it lies.
    use super::*;
    use crate::Heap;
    use crate::ptr::Follow;

    #[test]
    fn what_a_destructor_runs_on_stays_though_its_scope_began_anew() {
        let heap = Heap::builder().near(1 << 20).build().unwrap();
        let value = heap.alloc([7u64; 1200]).unwrap();
        let (core, (_, number, card)) = (heap.core(), value.pointer().parts());
        let inside = InternalScope::new(core);
        // As whoever waits for room does, before anything is found.
        inside.record.renew_only(&core.epoch);
        core.fault_in_owned(&inside, number, card, AccessMode::Write).unwrap();
        core.next_epoch();
        let began = inside.open.began();
        inside.record.renew_idle(&core.epoch);
        assert!(inside.open.keeps() && inside.open.began() == began);
    }
}
