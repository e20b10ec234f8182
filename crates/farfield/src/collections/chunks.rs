//! Walking through paged storage: slices of neighbours, with one check each.

use super::paged::Paged;
use crate::error::FarError;
use crate::fault::{AttemptKind, try_access};
use crate::heap::{AccessMode, Scope};
use core::ops::Range;

/// A range of elements of paged storage that exist and have not been visited yet.
#[derive(Clone)]
struct ElementSpan {
    at: usize,
    end: usize,
}

/// Pages in a chunk, at most.
const CHUNK_PAGES: usize = 64;

impl ElementSpan {
    fn new(range: Range<usize>) -> ElementSpan {
        ElementSpan { at: range.start, end: range.end }
    }

    /// Returns the address of the next elements and how many lie there side by side; `None` at the
    /// end. They count as visited then.
    #[inline]
    fn next<T: Send + 'static>(
        &mut self,
        units: &Paged<T>,
        scope: &Scope<'_>,
        mode: AccessMode,
    ) -> Result<Option<(*mut T, usize)>, FarError> {
        if self.at >= self.end {
            return Ok(None);
        }
        let (unit, first) = (self.at / Paged::<T>::PER_UNIT, self.at % Paged::<T>::PER_UNIT);
        let (address, found) = units.units(scope, unit, CHUNK_PAGES, mode)?;
        let count = (found * Paged::<T>::PER_UNIT - first).min(self.end - self.at);
        self.at += count;
        // SAFETY: `first` is below the number of elements in a unit.
        Ok(Some((unsafe { address.add(first) }, count)))
    }

    fn units(&self, per_unit: usize) -> usize {
        if self.at >= self.end { 0 } else { (self.end - 1) / per_unit - self.at / per_unit + 1 }
    }
}

/// An iterator over slices that together are the elements, in order. See
/// [`FarVec::chunks`](super::FarVec::chunks).
pub struct Chunks<'a, T: Send + 'static> {
    units: &'a Paged<T>,
    scope: &'a Scope<'a>,
    span: ElementSpan,
}

impl<'a, T: Send + 'static> Chunks<'a, T> {
    /// Makes an iterator over a range, whose elements must exist.
    pub(super) fn new(units: &'a Paged<T>, scope: &'a Scope<'_>, range: Range<usize>) -> Chunks<'a, T> {
        Chunks { units, scope, span: ElementSpan::new(range) }
    }
}

impl<'a, T: Send + 'static> Iterator for Chunks<'a, T> {
    type Item = Result<&'a [T], FarError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.span.next(self.units, self.scope, AccessMode::Read);
        self.scope.mark_used();
        if next.is_err() {
            self.span.at = self.span.end;
        }
        // SAFETY:
        // - initialised: the elements exist, and lie there side by side;
        // - alive: the unit became near after the scope began, so it keeps its frame until the
        //   scope ends, and `'a` ends before that; it also ends before the storage is changed;
        // - shared: a writer has `&mut` to the storage, or writes through interior mutability,
        //   which `T` allows.
        next.map(|next| next.map(|(address, count)| unsafe { core::slice::from_raw_parts(address, count) })).transpose()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let units = self.span.units(Paged::<T>::PER_UNIT);
        (units.min(1), Some(units))
    }
}

/// An iterator over slices that together are the elements, in order, to change them. See
/// [`FarVec::chunks_mut`](super::FarVec::chunks_mut).
pub struct ChunksMut<'a, T: Send + 'static> {
    units: &'a mut Paged<T>,
    scope: &'a Scope<'a>,
    span: ElementSpan,
}

impl<'a, T: Send + 'static> ChunksMut<'a, T> {
    /// Makes an iterator over a range, whose elements must exist.
    pub(super) fn new(units: &'a mut Paged<T>, scope: &'a Scope<'_>, range: Range<usize>) -> ChunksMut<'a, T> {
        ChunksMut { units, scope, span: ElementSpan::new(range) }
    }
}

impl<'a, T: Send + 'static> Iterator for ChunksMut<'a, T> {
    type Item = Result<&'a mut [T], FarError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.span.next(self.units, self.scope, AccessMode::Write);
        self.scope.mark_used();
        if next.is_err() {
            self.span.at = self.span.end;
        }
        // SAFETY: as in `Chunks`; exclusive, because the storage is borrowed mutably for `'a` and
        // the span never comes back to an element.
        next.map(|next| next.map(|(address, count)| unsafe { core::slice::from_raw_parts_mut(address, count) }))
            .transpose()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let units = self.span.units(Paged::<T>::PER_UNIT);
        (units.min(1), Some(units))
    }
}

/// An iterator over elements in order. See [`FarVec::iter`](super::FarVec::iter).
pub struct Iter<'a, T: Send + 'static> {
    chunks: Chunks<'a, T>,
    here: core::slice::Iter<'a, T>,
}

impl<'a, T: Send + 'static> Iter<'a, T> {
    /// Makes an iterator over the elements of these chunks.
    pub(super) fn new(chunks: Chunks<'a, T>) -> Iter<'a, T> {
        Iter { chunks, here: [].iter() }
    }
}

impl<'a, T: Send + 'static> Iterator for Iter<'a, T> {
    type Item = Result<&'a T, FarError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if let Some(element) = self.here.next() {
            return Some(Ok(element));
        }
        match self.chunks.next()? {
            Ok(chunk) => self.here = chunk.iter(),
            Err(error) => return Some(Err(error)),
        }
        self.here.next().map(Ok)
    }
}

/// An iterator over elements in order, to change them. See
/// [`FarVec::iter_mut`](super::FarVec::iter_mut).
pub struct IterMut<'a, T: Send + 'static> {
    chunks: ChunksMut<'a, T>,
    here: core::slice::IterMut<'a, T>,
}

impl<'a, T: Send + 'static> IterMut<'a, T> {
    /// Makes an iterator over the elements of these chunks.
    pub(super) fn new(chunks: ChunksMut<'a, T>) -> IterMut<'a, T> {
        IterMut { chunks, here: [].iter_mut() }
    }
}

impl<'a, T: Send + 'static> Iterator for IterMut<'a, T> {
    type Item = Result<&'a mut T, FarError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if let Some(element) = self.here.next() {
            return Some(Ok(element));
        }
        match self.chunks.next()? {
            Ok(chunk) => self.here = chunk.iter_mut(),
            Err(error) => return Some(Err(error)),
        }
        self.here.next().map(Ok)
    }
}

/// A walk that may be longer than near memory. Each chunk ends when the next one is requested, and
/// the scope is renewed on the way. It cannot be renewed while this thread has another scope open
/// in the heap: then a long walk ends with [`FarError::NearFull`]. After an error, the same chunk
/// can be requested again.
pub struct Scan<'a, 'heap, T: Send + 'static> {
    units: &'a Paged<T>,
    steps: Steps<'a, 'heap>,
}

/// A walk that may be longer than near memory, to change elements. See [`Scan`].
pub struct ScanMut<'a, 'heap, T: Send + 'static> {
    units: &'a mut Paged<T>,
    steps: Steps<'a, 'heap>,
}

struct Steps<'a, 'heap> {
    /// Borrowed mutably: nobody else has references from it.
    scope: &'a mut Scope<'heap>,
    span: ElementSpan,
    /// Pages visited since the scope was renewed.
    visited: u32,
    /// Whether pages that this walk brings near are evicted first.
    once: bool,
    /// Units that were brought near for this walk since the scope was renewed, if it is `once`.
    brought: Vec<usize>,
}

/// Pages that a scan visits before it renews its scope, which costs a fence.
const RENEW_PAGES: u32 = 16;

impl<'a, 'heap> Steps<'a, 'heap> {
    fn new(scope: &'a mut Scope<'heap>, range: Range<usize>) -> Steps<'a, 'heap> {
        Steps { scope, span: ElementSpan::new(range), visited: RENEW_PAGES, once: false, brought: Vec::new() }
    }

    /// Returns the address of the next elements, and how many there are. The caller must not use
    /// the previous ones any more.
    #[inline]
    fn next<T: Send + 'static>(
        &mut self,
        units: &Paged<T>,
        mode: AccessMode,
    ) -> Result<Option<(*mut T, usize)>, FarError> {
        if self.span.at < self.span.end {
            let unit = self.span.at / Paged::<T>::PER_UNIT;
            let is_near = units.is_near(self.scope, unit, mode);
            if self.visited >= RENEW_PAGES || !is_near {
                self.pause(units);
            }
            if self.once && !is_near && units.is_new(self.scope, unit) {
                self.brought.push(unit);
            }
        } else {
            self.pause(units);
        }
        let next = self.span.next(units, self.scope, mode)?;
        if let Some((_, count)) = next {
            self.visited += count.div_ceil(Paged::<T>::PER_UNIT) as u32 * Paged::<T>::UNIT_PAGES;
        }
        Ok(next)
    }

    /// [`Steps::next`] for a task, which waits without blocking its thread.
    async fn arrive<T: Send + 'static>(
        &mut self,
        units: &Paged<T>,
        mode: AccessMode,
    ) -> Result<Option<(*mut T, usize)>, FarError> {
        loop {
            match try_access(self.scope.record, AttemptKind::First, || self.next(units, mode)) {
                Ok(next) => return next,
                Err(missed) => {
                    // It keeps nothing while it waits.
                    self.pause(units);
                    self.scope.await_missed(missed).await?;
                }
            }
        }
    }

    /// Renews the scope between two chunks, so that pages that were visited may be evicted.
    fn pause<T: Send + 'static>(&mut self, units: &Paged<T>) {
        self.scope.renew();
        self.visited = 0;
        // The list is shared by all threads: a walk that brought nothing leaves it alone.
        if !self.brought.is_empty() {
            units.mark_evict_first(self.scope, self.brought.drain(..));
        }
    }
}

impl<'a, 'heap, T: Send + 'static> Scan<'a, 'heap, T> {
    /// Makes a walk through a range, whose elements must exist.
    pub(super) fn new(units: &'a Paged<T>, scope: &'a mut Scope<'heap>, range: Range<usize>) -> Scan<'a, 'heap, T> {
        Scan { units, steps: Steps::new(scope, range) }
    }

    /// Hints that the elements of this walk will not be used again soon. Pages that it brings near
    /// are evicted first, and pages that were near stay.
    pub fn once(mut self) -> Self {
        self.steps.once = true;
        self
    }

    /// Returns the next elements; `None` at the end.
    #[inline]
    pub fn next_chunk(&mut self) -> Result<Option<&[T]>, FarError> {
        let next = self.steps.next(self.units, AccessMode::Read)?;
        // SAFETY: as in `Chunks`; the scope is renewed by the next call at the earliest, which
        // needs `&mut self`, and our caller has that only when the slice is gone.
        Ok(next.map(|(address, count)| unsafe { core::slice::from_raw_parts(address, count) }))
    }

    /// Returns the next elements like [`Scan::next_chunk`], for a task: other tasks run while the
    /// elements are fetched.
    pub async fn fetch_chunk(&mut self) -> Result<Option<&[T]>, FarError> {
        let next = self.steps.arrive(self.units, AccessMode::Read).await?;
        // SAFETY: as in `next_chunk`.
        Ok(next.map(|(address, count)| unsafe { core::slice::from_raw_parts(address, count) }))
    }
}

impl<'a, 'heap, T: Send + 'static> ScanMut<'a, 'heap, T> {
    /// Makes a walk through a range, whose elements must exist.
    pub(super) fn new(units: &'a mut Paged<T>, scope: &'a mut Scope<'heap>, range: Range<usize>) -> Self {
        ScanMut { units, steps: Steps::new(scope, range) }
    }

    /// Hints that the elements of this walk will not be used again soon. Pages that it brings near
    /// are evicted first, and pages that were near stay.
    pub fn once(mut self) -> Self {
        self.steps.once = true;
        self
    }

    /// Returns the next elements, to be changed; `None` at the end.
    #[inline]
    pub fn next_chunk(&mut self) -> Result<Option<&mut [T]>, FarError> {
        let next = self.steps.next(self.units, AccessMode::Write)?;
        // SAFETY: as in `Scan`; exclusive, because the storage is borrowed mutably.
        Ok(next.map(|(address, count)| unsafe { core::slice::from_raw_parts_mut(address, count) }))
    }

    /// Returns the next elements like [`ScanMut::next_chunk`], for a task: other tasks run while
    /// the elements are fetched.
    pub async fn fetch_chunk(&mut self) -> Result<Option<&mut [T]>, FarError> {
        let next = self.steps.arrive(self.units, AccessMode::Write).await?;
        // SAFETY: as in `next_chunk`.
        Ok(next.map(|(address, count)| unsafe { core::slice::from_raw_parts_mut(address, count) }))
    }
}
