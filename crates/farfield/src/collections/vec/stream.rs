//! Elements as a `futures` stream.

use super::{FarVec, Scope};
use crate::collections::paged::Paged;
use crate::collections::range_of;
use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner};
use core::ops::{Range, RangeBounds};
use futures_util::stream::{Stream, try_unfold};

/// Pages of a batch, at most.
const BATCH_PAGES: usize = 16;

impl<T: Clone + Send + Sync + 'static> FarVec<T> {
    /// Returns a stream of copies of the elements of a range, in order and in batches, for
    /// `futures::StreamExt` and its like. Elements are fetched ahead, as in every walk. The stream
    /// holds nothing near between two batches, so its task may move to another thread. The length
    /// of a batch depends on how pages lie near: it has some pages at most. The stream ends with
    /// the first error.
    ///
    /// (A stream cannot lend what it will forget. If no copies are needed, use a loop around
    /// [`Scan::fetch_chunk`](crate::collections::Scan::fetch_chunk).)
    ///
    /// ```
    /// # use farfield::{FarError, FarVec, Heap, task::Executor};
    /// use futures_util::{TryStreamExt, future::ready};
    ///
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let mut squares = FarVec::new();
    /// squares.extend(&heap.enter(), (0..1000u64).map(|number| number * number))?;
    /// let sum = squares.stream(100..).try_fold(0, |sum, batch| ready(Ok(sum + batch.iter().sum::<u64>())));
    /// assert_eq!(Executor::new(&heap).block_on(sum)?, 332_505_150);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn stream(&self, range: impl RangeBounds<usize>) -> impl Stream<Item = Result<Vec<T>, FarError>> + Send + '_ {
        self.batches_of(range_of(range, self.len), false)
    }

    /// Returns a stream like [`FarVec::stream`], with the hint that its elements will not be used
    /// again soon. Pages that it brings near are evicted first, and pages that were near stay.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn stream_once(
        &self,
        range: impl RangeBounds<usize>,
    ) -> impl Stream<Item = Result<Vec<T>, FarError>> + Send + '_ {
        self.batches_of(range_of(range, self.len), true)
    }

    fn batches_of(&self, range: Range<usize>, once: bool) -> impl Stream<Item = Result<Vec<T>, FarError>> + Send + '_ {
        try_unfold(range, move |rest| async move {
            let Some(core) = self.core(rest.start).filter(|_| !rest.is_empty()) else { return Ok(None) };
            // SAFETY: the element keeps it.
            let batch = self.batch(unsafe { &*core }, &rest, once).await?;
            let rest = rest.start + batch.len()..rest.end;
            Ok(Some((batch, rest)))
        })
    }

    /// Copies the first of these elements: one batch.
    async fn batch(&self, core: &HeapInner, rest: &Range<usize>, once: bool) -> Result<Vec<T>, FarError> {
        let (unit, first) = (rest.start / Self::PER_UNIT, rest.start % Self::PER_UNIT);
        let most = BATCH_PAGES.div_ceil(Paged::<T>::UNIT_PAGES as usize);
        let mut is_new = false;
        let copy = |scope: &Scope<'_>| {
            is_new |= self.units.is_new(scope, unit);
            let (address, found) = self.units.units(scope, unit, most, AccessMode::Read)?;
            scope.mark_used();
            let count = (found * Self::PER_UNIT - first).min(rest.len());
            // SAFETY: as in `Chunks`.
            Ok(unsafe { core::slice::from_raw_parts(address.add(first), count) }.to_vec())
        };
        let batch = core.fetch_with(copy).await?;
        if once && is_new {
            self.units.mark_evict_first(&Scope::new(core), unit..unit + 1);
        }
        Ok(batch)
    }
}
