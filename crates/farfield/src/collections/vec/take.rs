//! A vector of the elements with given indices, gathered where they are (AIFM's *Shuffle*).

use super::FarVec;
use super::copy::{FEW_UNITS, add};
use crate::Heap;
use crate::collections::output_units::OutputUnits;
use crate::error::FarError;
use crate::heap::AccessMode;
use crate::offload::{CHANNELS, OffloadError};
use core::ops::{Range, RangeInclusive};
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::columns::{Indices, Take, Taken};
use farfield_wic::{CallError, Function, Number, Where};

/// Elements that one call gathers, at least and at most: as many as the server looks up together,
/// which takes some ten milliseconds.
const CALL_ELEMENTS: RangeInclusive<usize> = 32 * 1024..=Taken::BATCH;
/// Elements of one call if there are at least `LOADED_PER_PAGE` for each page of the column: then
/// the call loads and compares the pages only once.
const LOADED_ELEMENTS: usize = 2 << 20;
const LOADED_PER_PAGE: usize = 12;
/// Bytes of an argument that encode indices.
const CALL_BYTES: usize = 40 * 1024;
/// Pieces that describe a column, at most. The description of a longer column has no room in an
/// argument.
const CALL_PIECES: usize = 1024;
/// Pieces of pages and of indices of one call, at most.
const CALL_PARTS: usize = 512;

// Approximate costs, in nanoseconds per page, for the choice between server and client.
const MISS_NS: usize = 6000;
const WRITE_BACK_NS: usize = 5000;
/// Extra cost of an index that is sent over one that the server has: few indices of a call share a
/// page there. Apart from that, an element takes as long there as here.
const SENT_NS: usize = 50;

/// The indices of elements in the order in which they are wanted.
#[derive(Clone, Copy, Debug)]
pub enum Order<'i> {
    /// Indices in a slice.
    Near(&'i [u64]),
    /// Indices in a vector of the same heap, near or far.
    Far(&'i FarVec<u64>),
}

impl<'i> From<&'i [u64]> for Order<'i> {
    fn from(indices: &'i [u64]) -> Order<'i> {
        Order::Near(indices)
    }
}

impl<'i> From<&'i Vec<u64>> for Order<'i> {
    fn from(indices: &'i Vec<u64>) -> Order<'i> {
        Order::Near(indices)
    }
}

impl<'i> From<&'i FarVec<u64>> for Order<'i> {
    fn from(indices: &'i FarVec<u64>) -> Order<'i> {
        Order::Far(indices)
    }
}

impl Order<'_> {
    fn len(&self) -> usize {
        match self {
            Order::Near(indices) => indices.len(),
            Order::Far(indices) => indices.len(),
        }
    }
}

impl<N: Number> FarVec<N> {
    /// Gathers the elements with these indices into a new vector, in this order: sorted, shuffled,
    /// or some of them, some more than once. Far elements stay far and are gathered where they are,
    /// if the pool runs functions: one memory server, or a mirror of such. The new vector is far,
    /// too.
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let mut fares = FarVec::new();
    /// fares.extend(&heap.enter(), [7.5, 12.0, 3.25, 52.5])?;
    /// let some = fares.take(&heap, &vec![3, 0, 3]).run()?;
    /// assert_eq!((some.len(), some.read(1, f64::clone)?, some.read(2, f64::clone)?), (3, Some(7.5), Some(52.5)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn take<'v>(&'v self, heap: &'v Heap, indices: impl Into<Order<'v>>) -> Taking<'v, N> {
        Taking { vec: self, heap, order: indices.into(), at: Where::Auto }
    }
}

/// A vector that is not gathered yet. See [`FarVec::take`].
#[derive(Debug)]
#[must_use = "nothing is done before `run`"]
pub struct Taking<'v, N: Number> {
    vec: &'v FarVec<N>,
    heap: &'v Heap,
    order: Order<'v>,
    at: Where,
}

impl<N: Number> Taking<'_, N> {
    /// Sets where the elements are gathered. By default, [`Where::Auto`]: at the server, if that is
    /// expected to take less time than fetching the far elements. Near elements that were changed
    /// are [written back](Heap::write_back) before. Otherwise, and where the server does not do it,
    /// here.
    ///
    /// With [`Where::Client`], here. With [`Where::Server`], at the server, and elements and
    /// indices are written back before; the calling thread must be in no scope of the heap.
    pub fn at(mut self, at: Where) -> Self {
        self.at = at;
        self
    }

    /// Gathers the elements, and waits for the result.
    ///
    /// # Panics
    /// If an index is out of bounds.
    pub fn run(self) -> Result<FarVec<N>, OffloadError> {
        let len = self.order.len();
        if len == 0 {
            return Ok(FarVec::new());
        }
        let is_ours = |core| core == Some(core::ptr::from_ref(self.heap.core()));
        let is_foreign = match self.order {
            Order::Near(indices) => {
                indices.iter().for_each(|index| self.check(*index));
                false
            }
            Order::Far(indices) => !is_ours(indices.units.core()),
        };
        if is_foreign || !self.vec.is_empty() && !is_ours(self.vec.units.core()) {
            return Err(FarError::OtherHeap.into());
        }
        let units = len.div_ceil(FarVec::<N>::PER_UNIT);
        let mut output = OutputUnits::claim(self.heap.core(), units)?;
        match self.at {
            Where::Server => {
                let indices = match self.order {
                    Order::Near(_) => None,
                    Order::Far(indices) => Some(indices.far_ranges(..)),
                };
                self.heap.write_back(self.vec.far_ranges(..).chain(indices.into_iter().flatten()))?;
                self.ask_server(&mut output, units)?;
            }
            Where::Auto if self.is_worth_asking() => {
                let asked =
                    self.write_back().map_err(OffloadError::from).and_then(|()| self.ask_server(&mut output, units));
                if asked.is_err() {
                    output.renew_if_lost()?;
                }
                self.make_here(&mut output)?;
            }
            _ => self.make_here(&mut output)?,
        }
        Ok(FarVec { units: output.finish(), len })
    }

    #[track_caller]
    fn check(&self, index: u64) {
        let len = self.vec.len;
        assert!(index < len as u64, "index out of bounds: the len is {len} but the index is {index}");
    }

    /// Checks whether the server runs the function and would take less time than fetching the far
    /// elements.
    fn is_worth_asking(&self) -> bool {
        if !self.may_offload() {
            return false;
        }
        let units = self.vec.units_of(..);
        let all = units.len();
        let far = units.clone().filter(|unit| self.vec.units.is_far(*unit)).count();
        let changed = units.filter(|unit| !self.vec.units.is_as_far(*unit)).count();
        let uses = self.order.len().saturating_mul(far) / all.max(1);
        // Pages that have room near, beside what else is used, are fetched once.
        let room = self.heap.core().near.load(Ordering::Relaxed) as usize / PAGE_BYTES / 2;
        let fetches = if far <= room { uses.min(far) } else { uses };
        let sent = match self.order {
            Order::Near(indices) => indices.len(),
            Order::Far(_) => 0,
        };
        let there = changed * WRITE_BACK_NS + sent.saturating_mul(SENT_NS);
        far > FEW_UNITS && there < fetches.saturating_mul(MISS_NS)
    }

    fn may_offload(&self) -> bool {
        let core = self.heap.core();
        match size_of::<N>() {
            1 => core.may_offload::<Take<1>>(),
            2 => core.may_offload::<Take<2>>(),
            4 => core.may_offload::<Take<4>>(),
            _ => core.may_offload::<Take<8>>(),
        }
    }

    /// Writes back the elements of which the server has an older copy.
    fn write_back(&self) -> Result<(), FarError> {
        let changed = self.vec.units_of(..).filter(|unit| !self.vec.units.is_as_far(*unit));
        let elements = |unit: usize| {
            let first = unit * FarVec::<N>::PER_UNIT;
            first..self.vec.len.min(first + FarVec::<N>::PER_UNIT)
        };
        let ranges: Vec<_> = changed.flat_map(|unit| self.vec.far_ranges(elements(unit))).collect();
        if ranges.is_empty() { Ok(()) } else { self.heap.write_back(ranges) }
    }

    fn ask_server(&self, output: &mut OutputUnits<'_, N>, units: usize) -> Result<(), OffloadError> {
        match size_of::<N>() {
            1 => self.ask::<Take<1>>(output, units),
            2 => self.ask::<Take<2>>(output, units),
            4 => self.ask::<Take<4>>(output, units),
            _ => self.ask::<Take<8>>(output, units),
        }
    }

    fn ask<F: Function<Argument = Taken, Answer = Option<u64>>>(
        &self,
        output: &mut OutputUnits<'_, N>,
        units: usize,
    ) -> Result<(), OffloadError> {
        let mut from = Vec::new();
        for piece in self.vec.far_ranges(..) {
            add(&mut from, piece.start, piece.len / size_of::<N>() as u64, size_of::<N>() as u64);
        }
        if from.len() > CALL_PIECES {
            return Err(CallError::Argument.into());
        }
        // Calls that are under way together end together.
        let share = |most: usize| units.div_ceil(CHANNELS * units.div_ceil(CHANNELS * most / FarVec::<N>::PER_UNIT));
        let (call_units, pages) = (share(LOADED_ELEMENTS), self.vec.units_of(..).len());
        let call_units = match call_units * FarVec::<N>::PER_UNIT >= pages * LOADED_PER_PAGE {
            true => call_units,
            false => share(*CALL_ELEMENTS.end()),
        };
        let call_units = call_units.max(CALL_ELEMENTS.start() / FarVec::<N>::PER_UNIT);
        let mut next = 0;
        while next < units {
            let mut calls = Vec::with_capacity(CHANNELS);
            while calls.len() < CHANNELS && next < units {
                let first = next;
                let (mut indices, mut bytes) = (Vec::new(), 0);
                while next < units && bytes < CALL_BYTES && indices.len() < CALL_PARTS && next - first < call_units {
                    bytes += self.name(next, &mut indices)?;
                    next += 1;
                }
                let to = output.pages(first..next);
                calls.push((core::iter::once(first..next).collect(), Taken { from: from.clone(), indices, to }));
            }
            // A unit is made once, so it does not matter that a call with an index out of bounds
            // has written its units in part.
            let answers = output.ask::<F>(calls)?;
            answers.into_iter().flatten().for_each(|index| self.check(index));
        }
        Ok(())
    }

    /// Returns the indices in the new vector of the elements of a unit.
    fn places(&self, unit: usize) -> Range<usize> {
        let first = unit * FarVec::<N>::PER_UNIT;
        first..self.order.len().min(first + FarVec::<N>::PER_UNIT)
    }

    /// Adds the indices of a unit to an argument. Returns about how many bytes their encoding
    /// takes.
    fn name(&self, unit: usize, into: &mut Vec<Indices>) -> Result<usize, FarError> {
        let places = self.places(unit);
        let these = match self.order {
            Order::Near(indices) => indices[places].to_vec(),
            Order::Far(indices) => {
                if indices.units_of(places.clone()).all(|unit| indices.units.is_as_far(unit)) {
                    for piece in indices.far_ranges(places) {
                        match into.last_mut() {
                            Some(Indices::There(last)) if last.offset + last.count * 8 == piece.start => {
                                last.count += piece.len / 8;
                            }
                            _ => into.push(Indices::There(farfield_wic::Range {
                                offset: piece.start,
                                count: piece.len / 8,
                            })),
                        }
                    }
                    return Ok(0);
                }
                self.read(indices, places)?
            }
        };
        these.iter().for_each(|index| self.check(*index));
        let bytes = these.iter().map(|index| 1 + index.checked_ilog2().unwrap_or(0) as usize / 7).sum();
        into.push(Indices::These(these));
        Ok(bytes)
    }

    fn read(&self, indices: &FarVec<u64>, places: Range<usize>) -> Result<Vec<u64>, FarError> {
        let mut these = Vec::with_capacity(places.len());
        let mut scope = self.heap.enter();
        let mut scan = indices.scan_in(&mut scope, places).once();
        while let Some(some) = scan.next_chunk()? {
            these.extend_from_slice(some);
        }
        Ok(these)
    }

    /// Makes the units that the server has not made.
    fn make_here(&self, output: &mut OutputUnits<'_, N>) -> Result<(), FarError> {
        let mut elements = Vec::with_capacity(FarVec::<N>::PER_UNIT);
        for unit in output.missing() {
            let places = self.places(unit);
            let indices = match self.order {
                Order::Near(indices) => indices[places].to_vec(),
                Order::Far(indices) => self.read(indices, places)?,
            };
            let scope = self.heap.enter();
            let _patient = scope.allow_blocking();
            elements.clear();
            for index in indices {
                self.check(index);
                let _brief = scope.begin_transient();
                let element = self.vec.element(&scope, index as usize, AccessMode::Read)?;
                // SAFETY: an element, near until the next one is looked for; a plain number.
                elements.push(unsafe { element.read() });
            }
            output.make_here(&scope, unit, &elements)?;
        }
        Ok(())
    }
}

const _: () = assert!(CALL_ELEMENTS.start().is_multiple_of(PAGE_BYTES) && Taken::BATCH.is_multiple_of(PAGE_BYTES));
