//! The places where a function over far pointers runs: in the heap, and over the bytes of its
//! region.
//!
//! A place can stop its function: a `follow` that cannot go on never completes, and who polls the
//! function looks at the place after each poll. So no function goes on by ignoring that its budget
//! is used up, or that a page must not be read where it is.

use super::view_traits::{FarRef, FarView, Loan};
use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope};
use crate::ptr::Pointer;
use core::cell::{Cell, RefCell};
use core::future::{Future, pending};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{CARD_BYTES, SlotHint};
use farfield_wic::{CallError, Fault, Place};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// The place where a [`FarFunction`](crate::FarFunction) runs, as far as the function sees it.
pub trait FarPlace {
    /// Returns a copy of the value to which the pointer leads. At the client, the value comes near
    /// if it is far; at a memory server it is read where it is.
    ///
    /// Takes one step, and one more for each whole 4 KiB of the value.
    fn follow<'f, T: FarView>(
        &'f self,
        pointer: FarRef<'f, T>,
    ) -> impl Future<Output = Result<T::View<'f>, Fault>> + 'f;

    /// Takes a step. A loop that follows no pointer calls this, because a function can be ended
    /// only here and in [`FarPlace::follow`].
    fn yield_now(&self) -> impl Future<Output = ()>;
}

/// Number of values after which the place at the client lets pages leave that it has used.
const RENEW_EVERY: u32 = 16;
/// Number of steps after which the time is looked at.
const LOOK_EVERY: u64 = 64;

/// Reason why the place at the client has stopped its function.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeapStop {
    Far(FarError),
    Call(CallError),
}

/// The place at the client: values are read near, and come near if they are far.
pub(super) struct HeapPlace<'h> {
    scope: RefCell<Scope<'h>>,
    steps: Cell<u64>,
    steps_max: u64,
    began: Instant,
    within: Duration,
    stop: Cell<Option<HeapStop>>,
}

impl<'h> HeapPlace<'h> {
    pub(super) fn new(core: &'h HeapInner, steps_max: u64, began: Instant, within: Duration) -> HeapPlace<'h> {
        let scope = RefCell::new(Scope::new(core));
        HeapPlace { scope, steps: Cell::new(0), steps_max, began, within, stop: Cell::new(None) }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps.get()
    }

    pub(super) fn stopped(&self) -> Option<HeapStop> {
        self.stop.get()
    }

    async fn halt<R>(&self, stop: HeapStop) -> R {
        self.stop.set(Some(stop));
        pending().await
    }

    async fn step(&self, bytes: usize) {
        let before = self.steps.get();
        let steps = before + 1 + (bytes / PAGE_BYTES) as u64;
        self.steps.set(steps);
        if steps > self.steps_max {
            return self.halt(HeapStop::Call(CallError::Overrun { steps: before })).await;
        }
        if before / LOOK_EVERY != steps / LOOK_EVERY && self.began.elapsed() > self.within {
            self.halt(HeapStop::Call(CallError::TimedOut { after: self.within })).await
        }
    }

    /// Reads a value, which comes near for that.
    fn read<'f, T: FarView>(&'f self, pointer: FarRef<'f, T>) -> Result<T::View<'f>, FarError> {
        assert!(pointer.is_here, "the places of a function see only pointers of their own");
        let slot = Pointer::from_halves(pointer.place, pointer.number);
        let scope = self.scope.borrow();
        let value = slot.address(&scope, AccessMode::Read)?.cast::<T>();
        // SAFETY: the pointer was made of an owner that is borrowed for `'f`, or of a view of such
        // a value (`is_here`), so a `T` is there, and neither it nor what it owns is dropped or
        // changed in that time (`FarView`). It is near as long as `scope`.
        Ok(unsafe { (*value).view(Loan::new()) })
    }
}

impl FarPlace for HeapPlace<'_> {
    async fn follow<'f, T: FarView>(&'f self, pointer: FarRef<'f, T>) -> Result<T::View<'f>, Fault> {
        self.step(size_of::<T>()).await;
        if self.steps.get().is_multiple_of(u64::from(RENEW_EVERY)) {
            self.scope.borrow_mut().renew();
        }
        let mut result = self.read(pointer);
        if result.as_ref().err() == Some(&FarError::NearFull) {
            // Views are copies, so nothing is kept by this scope.
            self.scope.borrow_mut().renew();
            result = self.read(pointer);
        }
        match result {
            Ok(view) => Ok(view),
            Err(FarError::Pool(error)) => Err(error.into()),
            Err(error) => self.halt(HeapStop::Far(error)).await,
        }
    }

    async fn yield_now(&self) {
        self.step(0).await;
        // The time is looked at each time, because a step may take long.
        if self.began.elapsed() > self.within {
            self.halt(HeapStop::Call(CallError::TimedOut { after: self.within })).await
        }
    }
}

/// Part of a call that says how its heap lies in the region.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FarSpan {
    /// Number of the heap's first page among those of all heaps of its process.
    pub(super) first: u32,
    /// Number of its pages, and of all numbers that its pointers may have: the rest are handles.
    pub(super) pages: u32,
    pub(super) numbers: u64,
    /// Pages whose far copies are older than what the heap has near, in ascending order: the first
    /// one, then distances.
    pub(super) changed: Vec<u32>,
}

/// Reason why the place at a server has stopped its function.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RegionStop {
    /// The function has met this page, of which the client has a newer version.
    Changed(u32),
    /// The function has met a value that can move, which only the client can find.
    Movable,
    /// The bytes at this offset are no value of the type that the pointer has.
    NoValue(u64),
}

/// The place over the bytes of the heap's region, wherever those are read.
pub(super) struct RegionPlace<'p, P: Place> {
    place: &'p P,
    first: u32,
    pages: u32,
    numbers: u64,
    changed: Vec<u32>,
    stop: Cell<Option<RegionStop>>,
}

impl<'p, P: Place> RegionPlace<'p, P> {
    pub(super) fn new(place: &'p P, span: FarSpan) -> RegionPlace<'p, P> {
        let mut changed = span.changed;
        let mut last = 0u32;
        for page in &mut changed {
            last = last.saturating_add(*page);
            *page = last;
        }
        let (first, pages, numbers) = (span.first, span.pages, span.numbers);
        RegionPlace { place, first, pages, numbers, changed, stop: Cell::new(None) }
    }

    pub(super) fn stopped(&self) -> Option<RegionStop> {
        self.stop.get()
    }

    async fn halt<R>(&self, stop: RegionStop) -> R {
        self.stop.set(Some(stop));
        pending().await
    }

    /// Returns the first of these pages of which the client has a newer version.
    fn changed(&self, first: u64, last: u64) -> Option<u32> {
        let index = self.changed.partition_point(|page| u64::from(*page) < first);
        self.changed.get(index).copied().filter(|page| u64::from(*page) <= last)
    }
}

impl<P: Place> FarPlace for RegionPlace<'_, P> {
    async fn follow<'f, T: FarView>(&'f self, pointer: FarRef<'f, T>) -> Result<T::View<'f>, Fault> {
        let number = pointer.number.get().wrapping_sub(self.first);
        if number >= self.pages && u64::from(number) < self.numbers {
            return self.halt(RegionStop::Movable).await;
        }
        let card = u64::from(SlotHint(pointer.place).card());
        let offset = u64::from(number) * PAGE_BYTES as u64 + card * CARD_BYTES as u64;
        if number >= self.pages {
            // A step, so that a function that goes on all the same ends.
            self.place.yield_now().await;
            return Err(Fault::OutOfRange { offset });
        }
        let last = (offset + (size_of::<T>() as u64).saturating_sub(1)) / PAGE_BYTES as u64;
        if let Some(page) = self.changed(u64::from(number), last) {
            return self.halt(RegionStop::Changed(page)).await;
        }
        let bytes = self.place.read_range(offset, size_of::<T>()).await?;
        let view = T::decode(&bytes);
        drop(bytes);
        match view {
            Some(view) => Ok(view),
            None => self.halt(RegionStop::NoValue(offset)).await,
        }
    }

    async fn yield_now(&self) {
        self.place.yield_now().await;
    }
}
