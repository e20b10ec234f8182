//! Many values at a time: all fetches are started before the first one is awaited.

use super::{FarBox, FarPtr, Follow, Pointer, PointerLookup};
use crate::Heap;
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};
use crate::task::Executor;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::collections::VecDeque;

/// Future that ends when all values are near at the same time. Yields their addresses, in order,
/// which are valid as long as the scope lasts.
pub(crate) struct BatchGet<'a> {
    scope: &'a Scope<'a>,
    /// Pointers to the values, which live as long as this future.
    pointers: Vec<&'a Pointer>,
    mode: AccessMode,
    found: Vec<*mut u8>,
    /// Stages of the values after `found`. All are under way but the last, which may wait for room.
    stages: VecDeque<PointerLookup<'a>>,
}

impl<'a> BatchGet<'a> {
    pub(crate) fn new(scope: &'a Scope<'_>, pointers: Vec<&'a Pointer>, mode: AccessMode) -> BatchGet<'a> {
        let found = Vec::with_capacity(pointers.len());
        BatchGet { scope, pointers, mode, found, stages: VecDeque::new() }
    }

    /// Starts fetches as long as there is room for them.
    fn ask(&mut self, context: &mut Context<'_>) -> Result<(), FarError> {
        while !matches!(self.stages.back(), Some(PointerLookup::Fault(fault)) if fault.waits_for_room())
            && let Some(pointer) = self.pointers.get(self.found.len() + self.stages.len())
        {
            let mut stage = pointer.look_up(self.scope, self.mode)?;
            step(self.scope, pointer, &mut stage, context)?;
            self.stages.push_back(stage);
        }
        Ok(())
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Poll<Result<(), FarError>> {
        while self.found.len() < self.pointers.len() {
            self.ask(context)?;
            // The first one decides. The others wake us too, but are looked at when it is their
            // turn.
            let Some(stage) = self.stages.front_mut() else { unreachable!("some are left, and asked for") };
            step(self.scope, self.pointers[self.found.len()], stage, context)?;
            let PointerLookup::Resident(address) = stage else { return Poll::Pending };
            self.found.push(*address);
            self.stages.pop_front();
        }
        Poll::Ready(Ok(()))
    }
}

/// Polls the fetch of one value.
fn step<'a>(
    scope: &'a Scope<'_>,
    pointer: &Pointer,
    stage: &mut PointerLookup<'a>,
    context: &mut Context<'_>,
) -> Result<(), FarError> {
    if let PointerLookup::Fault(fault) = stage
        && let Poll::Ready(frame) = Pin::new(fault).poll(context)
    {
        *stage = PointerLookup::Resident(pointer.address_after_fault(scope, frame?));
    }
    Ok(())
}

impl Future for BatchGet<'_> {
    type Output = Result<Vec<*mut u8>, FarError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        this.turn(context).map_ok(|()| core::mem::take(&mut this.found))
    }
}

impl Heap {
    /// Returns references to many far values, in the order of the pointers. All fetches are started
    /// together and then awaited, so many values take little longer than one.
    ///
    /// Blocks until all are near. Fails with [`FarError::NearFull`] if the scope cannot hold them
    /// all.
    ///
    /// ```
    /// # use farfield::{FarBox, Heap};
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let values: Vec<FarBox<u64>> = (0..100).map(|n| heap.alloc(n)).collect::<Result<_, _>>()?;
    /// let scope = heap.enter();
    /// assert_eq!(heap.get_many(&scope, &values)?.into_iter().sum::<u64>(), 4950);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// References end with their scope:
    ///
    /// ```compile_fail,E0505
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// let values = [heap.alloc(7).unwrap()];
    /// let scope = heap.enter();
    /// let sevens = heap.get_many(&scope, &values).unwrap();
    /// drop(scope); // error: cannot move out of `scope` because it is borrowed
    /// println!("{sevens:?}");
    /// ```
    pub fn get_many<'a, P: FarPtr + 'a>(
        &self,
        scope: &'a Scope<'_>,
        values: impl IntoIterator<Item = &'a P>,
    ) -> Result<Vec<&'a P::Value>, FarError> {
        Executor::new(self).block_on(self.fetch_many(scope, values))
    }

    /// Fetches many far values at once, as [`Heap::get_many`] does, without blocking the thread:
    /// other tasks run meanwhile.
    pub async fn fetch_many<'a, P: FarPtr + 'a>(
        &self,
        scope: &'a Scope<'_>,
        values: impl IntoIterator<Item = &'a P>,
    ) -> Result<Vec<&'a P::Value>, FarError> {
        let pointers = values.into_iter().map(P::pointer).collect();
        let addresses = BatchGet::new(scope, pointers, AccessMode::Read).await?;
        // SAFETY: as in `FarBox::fetch`; `'a` is shorter than the borrows of scope and pointers.
        Ok(addresses.into_iter().map(|address| unsafe { &*address.cast::<P::Value>() }).collect())
    }

    /// Returns mutable references to many far values, as [`Heap::get_many`] does for shared ones.
    pub fn get_many_mut<'a, T: Send + 'static>(
        &self,
        scope: &'a Scope<'_>,
        values: impl IntoIterator<Item = &'a mut FarBox<T>>,
    ) -> Result<Vec<&'a mut T>, FarError> {
        Executor::new(self).block_on(self.fetch_many_mut(scope, values))
    }

    /// Fetches mutable references to many far values, as [`Heap::fetch_many`] does for shared ones.
    pub async fn fetch_many_mut<'a, T: Send + 'static>(
        &self,
        scope: &'a Scope<'_>,
        values: impl IntoIterator<Item = &'a mut FarBox<T>>,
    ) -> Result<Vec<&'a mut T>, FarError> {
        let pointers = values.into_iter().map(|value| value.pointer()).collect();
        let addresses = BatchGet::new(scope, pointers, AccessMode::Write).await?;
        // SAFETY: as in `FarBox::fetch_mut`; the pointers are of different values, because each was borrowed mutably.
        Ok(addresses.into_iter().map(|address| unsafe { &mut *address.cast::<T>() }).collect())
    }
}

impl Heap {
    /// Walks over any number of far values in batches of `size`: while one batch is used, the next
    /// one is fetched.
    ///
    /// A batch ends when the next one is requested: the scope is renewed then.
    ///
    /// ```
    /// # use farfield::{FarBox, Heap, task::Executor};
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// # let values: Vec<FarBox<u64>> = (0..1000).map(|n| heap.alloc(n)).collect::<Result<_, _>>()?;
    /// Executor::new(&heap).block_on(async {
    ///     let mut scope = heap.enter();
    ///     let mut batches = heap.batches(&mut scope, &values, 64);
    ///     let mut sum = 0;
    ///     while let Some(batch) = batches.fetch_batch().await? {
    ///         sum += batch.into_iter().sum::<u64>();
    ///     }
    ///     assert_eq!(sum, 499_500);
    ///     Ok::<(), farfield::FarError>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// References end with their batch:
    ///
    /// ```compile_fail,E0499
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// # let values = [heap.alloc(1).unwrap(), heap.alloc(2).unwrap()];
    /// let mut scope = heap.enter();
    /// let mut batches = heap.batches(&mut scope, &values, 1);
    /// let first = batches.next_batch().unwrap();
    /// let second = batches.next_batch().unwrap(); // error: cannot borrow `batches` as mutable more than once
    /// println!("{first:?}");
    /// ```
    ///
    /// # Panics
    /// If `size` is 0.
    pub fn batches<'a, 'heap, P: FarPtr + 'a, I: IntoIterator<Item = &'a P>>(
        &'heap self,
        scope: &'a mut Scope<'heap>,
        values: I,
        size: usize,
    ) -> Batches<'a, 'heap, P, I::IntoIter> {
        assert!(size > 0, "batches of nothing");
        Batches { heap: self, scope, values: values.into_iter(), size, now: Vec::new(), next: Vec::new(), begun: false }
    }
}

/// Iterator over far values in batches, made by [`Heap::batches`].
pub struct Batches<'a, 'heap, P, I> {
    heap: &'heap Heap,
    /// Scope of the references. Borrowed mutably, so that nobody else has references from it.
    scope: &'a mut Scope<'heap>,
    values: I,
    size: usize,
    /// The batch that was requested last, until it was returned.
    now: Vec<&'a P>,
    /// The batch after `now`.
    next: Vec<&'a P>,
    /// True once the first batch was returned.
    begun: bool,
}

impl<'a, P: FarPtr + 'a, I: Iterator<Item = &'a P>> Batches<'a, '_, P, I> {
    /// Returns the next batch; `None` at the end. Blocks until its values are near. After an error,
    /// the batch can be requested again.
    pub fn next_batch(&mut self) -> Result<Option<Vec<&P::Value>>, FarError> {
        if !self.step() {
            return Ok(None);
        }
        let batch = self.heap.get_many(self.scope, self.now.iter().copied())?;
        Self::came(self.heap, &mut self.now, &self.next, &mut self.begun);
        Ok(Some(batch))
    }

    /// Fetches the next batch, as [`Batches::next_batch`] does, without blocking the thread: other
    /// tasks run meanwhile.
    pub async fn fetch_batch(&mut self) -> Result<Option<Vec<&P::Value>>, FarError> {
        if !self.step() {
            return Ok(None);
        }
        let batch = self.heap.fetch_many(self.scope, self.now.iter().copied()).await?;
        Self::came(self.heap, &mut self.now, &self.next, &mut self.begun);
        Ok(Some(batch))
    }

    /// Ends the last batch, unless its fetch failed, and selects the next one. False if there is
    /// none.
    fn step(&mut self) -> bool {
        self.scope.renew();
        if self.now.is_empty() {
            let following = |values: &mut I| values.take(self.size).collect::<Vec<_>>();
            self.now = if self.begun { core::mem::take(&mut self.next) } else { following(&mut self.values) };
            self.next = following(&mut self.values);
            // The batch that `now` has become was on its way for as long as the last one was used.
            if self.begun {
                self.heap.prefetch(self.next.iter().copied());
            }
        }
        !self.now.is_empty()
    }

    /// Notes that the batch has arrived. Before the first batch, nothing is prefetched.
    fn came(heap: &Heap, now: &mut Vec<&'a P>, next: &[&'a P], begun: &mut bool) {
        now.clear();
        if !core::mem::replace(begun, true) {
            heap.prefetch(next.iter().copied());
        }
    }
}

impl<P, I> core::fmt::Debug for Batches<'_, '_, P, I> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Batches(of {})", self.size)
    }
}
