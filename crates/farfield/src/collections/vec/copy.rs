//! Copies of a vector that are made where its numbers are: no byte of a far page goes over the
//! network (AIFM's *Copy*).

use super::FarVec;
use crate::Heap;
use crate::collections::output_units::OutputUnits;
use crate::collections::{FarArray, range_of};
use crate::error::FarError;
use crate::heap::AccessMode;
use crate::offload::OffloadError;
use core::ops::{Range, RangeBounds};
use farfield_wic::columns::{Copied, CopyBytes};
use farfield_wic::{Number, Where};

/// Pages that one call makes, at most: with this many, it takes a few milliseconds.
const CALL_PAGES: usize = 512;
/// Pieces of one call, at most.
const CALL_PIECES: usize = 1024;
/// Calls under way at a time.
const CALLS: usize = 4;
/// Up to this many pages are made here instead: that takes less than a call.
pub(in crate::collections) const FEW_UNITS: usize = 4;

impl<N: Number> FarVec<N> {
    /// Copies the elements, or [some](Copying::over), into a new vector. Far elements stay far and
    /// are copied where they are, if the pool runs functions: one memory server, or a mirror of
    /// such. Their copies are far, too.
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let mut fares = FarVec::new();
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25, 52.5])?;
    /// let some = fares.copy(&heap).over(1..3).run()?;
    /// assert_eq!((some.len(), some.read(1, f64::clone)?), (2, Some(3.25)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn copy<'v>(&'v self, heap: &'v Heap) -> Copying<'v, N> {
        Copying { vec: self, heap, range: 0..self.len, at: Where::Auto }
    }
}

impl<N: Number, const D: usize> FarArray<N, D> {
    /// Copies the elements into a new vector like [`FarVec::copy`]. For a row, a plane and so on,
    /// use [`over`](Copying::over) with its [part](FarArray::part).
    pub fn copy<'v>(&'v self, heap: &'v Heap) -> Copying<'v, N> {
        self.elements.copy(heap)
    }
}

/// A copy that is not made yet. See [`FarVec::copy`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Copying<'v, N: Number> {
    vec: &'v FarVec<N>,
    heap: &'v Heap,
    range: Range<usize>,
    at: Where,
}

impl<N: Number> Copying<'_, N> {
    /// Restricts the copy to the elements with these indices.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn over(mut self, range: impl RangeBounds<usize>) -> Self {
        self.range = range_of(range, self.vec.len);
        self
    }

    /// Sets where the copy is made. By default, [`Where::Auto`]: pages of the copy of which all
    /// elements are far are made at the server, the others here, and here what the server does not
    /// do.
    ///
    /// With [`Where::Client`], here. With [`Where::Server`], at the server, and near elements are
    /// [written back](Heap::write_back) before; the calling thread must be in no scope of the heap.
    pub fn at(mut self, at: Where) -> Self {
        self.at = at;
        self
    }

    /// Makes the copy, and waits for it.
    pub fn run(self) -> Result<FarVec<N>, OffloadError> {
        if self.range.is_empty() {
            return Ok(FarVec::new());
        }
        if self.vec.units.core() != Some(core::ptr::from_ref(self.heap.core())) {
            return Err(FarError::OtherHeap.into());
        }
        let units = self.range.len().div_ceil(FarVec::<N>::PER_UNIT);
        let units = match self.at {
            Where::Server => {
                self.heap.write_back(self.vec.far_ranges(self.range.clone()))?;
                let mut output = OutputUnits::claim(self.heap.core(), units)?;
                self.ask_server(&mut output, 0..units)?;
                output
            }
            Where::Auto if self.heap.core().may_offload::<CopyBytes>() => {
                let far: Vec<usize> = (0..units).filter(|unit| self.is_far(*unit)).collect();
                let mut output = OutputUnits::claim(self.heap.core(), units)?;
                if far.len() > FEW_UNITS && self.ask_server(&mut output, far.into_iter()).is_err() {
                    output.renew_if_lost()?;
                }
                self.make_here(&mut output)?;
                output
            }
            _ => {
                let mut output = OutputUnits::claim(self.heap.core(), units)?;
                self.make_here(&mut output)?;
                output
            }
        };
        Ok(FarVec { units: units.finish(), len: self.range.len() })
    }

    /// Returns the elements of which a unit of the copy is made.
    fn elements(&self, unit: usize) -> Range<usize> {
        let first = self.range.start + unit * FarVec::<N>::PER_UNIT;
        first..self.range.end.min(first + FarVec::<N>::PER_UNIT)
    }

    /// Checks whether all of them are far.
    fn is_far(&self, unit: usize) -> bool {
        self.vec.units_of(self.elements(unit)).all(|source| self.vec.units.is_far(source))
    }

    fn ask_server(
        &self,
        output: &mut OutputUnits<'_, N>,
        units: impl Iterator<Item = usize>,
    ) -> Result<(), OffloadError> {
        let mut calls: Vec<(Vec<Range<usize>>, Copied)> = Vec::new();
        let mut pages = 0;
        for unit in units {
            let is_full =
                |copied: &Copied| pages == CALL_PAGES || copied.from.len() + copied.to.len() > CALL_PIECES - 3;
            if calls.last().is_none_or(|(_, copied)| is_full(copied)) {
                if calls.len() == CALLS {
                    output.ask::<CopyBytes>(core::mem::take(&mut calls))?;
                }
                calls.push((Vec::new(), Copied { from: Vec::new(), to: Vec::new() }));
                pages = 0;
            }
            let Some((made, copied)) = calls.last_mut() else { unreachable!("just pushed") };
            pages += 1;
            match made.last_mut() {
                Some(last) if last.end == unit => last.end += 1,
                _ => made.push(unit..unit + 1),
            }
            for piece in self.vec.far_ranges(self.elements(unit)) {
                add(&mut copied.from, piece.start, piece.len, 1);
            }
            for page in output.pages(unit..unit + 1) {
                add(&mut copied.to, page.offset, page.count, farfield_core::geometry::PAGE_BYTES as u64);
            }
        }
        output.ask::<CopyBytes>(calls)?;
        Ok(())
    }

    /// Makes the units that the server has not made.
    fn make_here(&self, output: &mut OutputUnits<'_, N>) -> Result<(), FarError> {
        let scope = self.heap.enter();
        let _patient = scope.allow_blocking();
        let mut elements = Vec::with_capacity(FarVec::<N>::PER_UNIT);
        for unit in output.missing() {
            elements.clear();
            let mut rest = self.elements(unit);
            while !rest.is_empty() {
                let _brief = scope.begin_transient();
                let source = self.vec.element(&scope, rest.start, AccessMode::Read)?;
                let count = rest.len().min(FarVec::<N>::PER_UNIT - rest.start % FarVec::<N>::PER_UNIT);
                // SAFETY: so many elements lie there in one unit, near until something else is
                // looked for; they are plain numbers.
                elements.extend_from_slice(unsafe { core::slice::from_raw_parts(source, count) });
                rest.start += count;
            }
            output.make_here(&scope, unit, &elements)?;
        }
        Ok(())
    }
}

/// Appends a piece, merged with the last one if it is adjacent. A count is in elements of `bytes`
/// bytes.
pub(in crate::collections) fn add(pieces: &mut Vec<farfield_wic::Range>, offset: u64, count: u64, bytes: u64) {
    match pieces.last_mut() {
        Some(last) if last.offset + last.count * bytes == offset => last.count += count,
        _ => pieces.push(farfield_wic::Range { offset, count }),
    }
}
