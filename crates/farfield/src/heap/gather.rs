//! Many values at a time: all that are far are asked for before the first one is waited for.

use super::{Heap, Scope, Want};
use crate::error::FarError;
use crate::ptr::{FarBox, FarPtr, Follow, Pointer, Stage};
use crate::task::Executor;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::collections::VecDeque;

/// Ends when all values are near at the same time: where they are, in order, as long as the scope lasts.
pub(crate) struct Gather<'a> {
    scope: &'a Scope<'a>,
    /// Of values that live as long as this.
    pointers: Vec<&'a Pointer>,
    want: Want,
    found: Vec<*mut u8>,
    /// Those after `found`. All are under way but the last, which may be waiting for room.
    stages: VecDeque<Stage<'a>>,
}

impl<'a> Gather<'a> {
    pub(crate) fn new(scope: &'a Scope<'_>, pointers: Vec<&'a Pointer>, want: Want) -> Gather<'a> {
        let found = Vec::with_capacity(pointers.len());
        Gather { scope, pointers, want, found, stages: VecDeque::new() }
    }

    /// Asks for what there is room for.
    fn ask(&mut self, context: &mut Context<'_>) -> Result<(), FarError> {
        while !matches!(self.stages.back(), Some(Stage::Comes(arrival)) if arrival.waits_for_room())
            && let Some(pointer) = self.pointers.get(self.found.len() + self.stages.len())
        {
            let mut stage = pointer.stage(self.scope, self.want)?;
            step(self.scope, pointer, &mut stage, context)?;
            self.stages.push_back(stage);
        }
        Ok(())
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Poll<Result<(), FarError>> {
        while self.found.len() < self.pointers.len() {
            self.ask(context)?;
            // The first one decides. The others wake us too, but are looked at when it is their turn.
            let Some(stage) = self.stages.front_mut() else { unreachable!("some are left, and asked for") };
            step(self.scope, self.pointers[self.found.len()], stage, context)?;
            let Stage::Here(address) = stage else { return Poll::Pending };
            self.found.push(*address);
            self.stages.pop_front();
        }
        Poll::Ready(Ok(()))
    }
}

/// One look at a value that is under way.
fn step<'a>(
    scope: &'a Scope<'_>,
    pointer: &Pointer,
    stage: &mut Stage<'a>,
    context: &mut Context<'_>,
) -> Result<(), FarError> {
    if let Stage::Comes(arrival) = stage
        && let Poll::Ready(frame) = Pin::new(arrival).poll(context)
    {
        *stage = Stage::Here(pointer.landed(scope, frame?));
    }
    Ok(())
}

impl Future for Gather<'_> {
    type Output = Result<Vec<*mut u8>, FarError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        this.turn(context).map_ok(|()| core::mem::take(&mut this.found))
    }
}

impl Heap {
    /// Far values, all at the same time: they are asked for together and then waited for, so many take little longer than one. In
    /// the order of the pointers. The scope must be able to hold them all ([`FarError::NearFull`]).
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

    /// The same, for a task: while they are on their way, others run.
    pub async fn fetch_many<'a, P: FarPtr + 'a>(
        &self,
        scope: &'a Scope<'_>,
        values: impl IntoIterator<Item = &'a P>,
    ) -> Result<Vec<&'a P::Value>, FarError> {
        let pointers = values.into_iter().map(P::pointer).collect();
        let addresses = Gather::new(scope, pointers, Want::Read).await?;
        // SAFETY: as in `FarBox::fetch`; `'a` is shorter than the borrows of scope and pointers.
        Ok(addresses.into_iter().map(|address| unsafe { &*address.cast::<P::Value>() }).collect())
    }

    /// As [`Heap::get_many`], to change the values.
    pub fn get_many_mut<'a, T: Send + 'static>(
        &self,
        scope: &'a Scope<'_>,
        values: impl IntoIterator<Item = &'a mut FarBox<T>>,
    ) -> Result<Vec<&'a mut T>, FarError> {
        Executor::new(self).block_on(self.fetch_many_mut(scope, values))
    }

    /// As [`Heap::fetch_many`], to change the values.
    pub async fn fetch_many_mut<'a, T: Send + 'static>(
        &self,
        scope: &'a Scope<'_>,
        values: impl IntoIterator<Item = &'a mut FarBox<T>>,
    ) -> Result<Vec<&'a mut T>, FarError> {
        let pointers = values.into_iter().map(|value| value.pointer()).collect();
        let addresses = Gather::new(scope, pointers, Want::Write).await?;
        // SAFETY: as in `FarBox::fetch_mut`; the pointers are of different values, because each was borrowed mutably.
        Ok(addresses.into_iter().map(|address| unsafe { &mut *address.cast::<T>() }).collect())
    }
}

impl Heap {
    /// Many far values, however many, a batch of so many at a time: while one is used, the next one is on its way. A batch ends when the
    /// next one is asked for, and the scope is renewed.
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
    /// If batches shall be empty.
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

/// A walk over far values, in batches. Made by [`Heap::batches`].
pub struct Batches<'a, 'heap, P, I> {
    heap: &'heap Heap,
    /// Borrowed mutably: nobody else has references from it.
    scope: &'a mut Scope<'heap>,
    values: I,
    size: usize,
    /// The batch that was asked for last, unless it has come.
    now: Vec<&'a P>,
    /// The one behind it.
    next: Vec<&'a P>,
    /// One has come.
    begun: bool,
}

impl<'a, P: FarPtr + 'a, I: Iterator<Item = &'a P>> Batches<'a, '_, P, I> {
    /// The next values; `None` at the end. After an error, the same batch can be asked for again.
    pub fn next_batch(&mut self) -> Result<Option<Vec<&P::Value>>, FarError> {
        if !self.step() {
            return Ok(None);
        }
        let batch = self.heap.get_many(self.scope, self.now.iter().copied())?;
        Self::came(self.heap, &mut self.now, &self.next, &mut self.begun);
        Ok(Some(batch))
    }

    /// The same, for a task: while they are on their way, others run.
    pub async fn fetch_batch(&mut self) -> Result<Option<Vec<&P::Value>>, FarError> {
        if !self.step() {
            return Ok(None);
        }
        let batch = self.heap.fetch_many(self.scope, self.now.iter().copied()).await?;
        Self::came(self.heap, &mut self.now, &self.next, &mut self.begun);
        Ok(Some(batch))
    }

    /// The last batch ends, unless it did not come; false if there is no more.
    fn step(&mut self) -> bool {
        self.scope.renew();
        if self.now.is_empty() {
            let following = |values: &mut I| values.take(self.size).collect::<Vec<_>>();
            self.now = if self.begun { core::mem::take(&mut self.next) } else { following(&mut self.values) };
            self.next = following(&mut self.values);
            // This one has been on its way for as long as the last one was used.
            if self.begun {
                self.heap.prefetch(self.next.iter().copied());
            }
        }
        !self.now.is_empty()
    }

    /// The batch has come. Nothing was asked for before the first.
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
