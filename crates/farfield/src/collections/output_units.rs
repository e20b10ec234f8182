//! Units of a collection that is being made, some of them by functions at the pool.
//!
//! All units are claimed first, so that no other thread looks at them. Pages that a function at the
//! server has written are far from the beginning. If it is not known whether a function has ended,
//! it may still write later, whatever is in its pages by then. So these pages are never used again.

use super::paged::Paged;
use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope, free_run, lose_run};
use crate::offload::OffloadWriteError;
use core::ops::Range;
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::{CallError, Function};

/// Units of a collection that is being made. They are released on drop, unless it is finished.
pub(super) struct OutputUnits<'h, T: Send + 'static> {
    core: &'h HeapInner,
    /// Storage that has extents, but no units yet.
    paged: Paged<T>,
    units: Vec<OutputUnitState>,
    /// Whether a function may still write to these pages at the pool.
    is_lost: bool,
}

/// State of a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OutputUnitState {
    /// Claimed by us, and unused at the pool.
    Claimed,
    /// Claimed by us, and passed to a function at the server, which may write it.
    Offloaded,
    /// An empty page, claimed no more.
    Empty,
    /// A unit with elements.
    Filled,
}

/// Consecutive pages, as an offset in bytes in the region and a number of pages.
pub(super) type Pages = farfield_wic::Range;

impl<'h, T: Send + 'static> OutputUnits<'h, T> {
    /// Claims this many units, of a page each. Waits until earlier writes to their pages have
    /// ended.
    pub(super) fn claim(core: &'h HeapInner, units: usize) -> Result<OutputUnits<'h, T>, FarError> {
        const { assert!(Paged::<T>::UNIT_PAGES == 1, "elements are no larger than a page") };
        let mut output = OutputUnits { core, paged: Paged::new(), units: Vec::with_capacity(units), is_lost: false };
        while output.units.len() < units {
            let extent = output.paged.take_extent(core)?;
            let first = output.page(output.units.len());
            let count = extent.min(units - output.units.len());
            core.claim(first..first + count as u32)?;
            output.units.resize(output.units.len() + count, OutputUnitState::Claimed);
        }
        // Writes of earlier contents of these pages may be on their way to the pool.
        core.await_writes();
        Ok(output)
    }

    /// Returns the number of a unit's page within the heap.
    fn page(&self, unit: usize) -> u32 {
        self.paged.page(unit) - self.core.first_page
    }

    /// Returns where units lie in the region.
    pub(super) fn pages(&self, units: Range<usize>) -> Vec<Pages> {
        let mut found: Vec<Pages> = Vec::new();
        for unit in units {
            let offset = u64::from(self.page(unit)) * PAGE_BYTES as u64;
            match found.last_mut() {
                Some(last) if last.offset + last.count * PAGE_BYTES as u64 == offset => last.count += 1,
                _ => found.push(Pages { offset, count: 1 }),
            }
        }
        found
    }

    /// Runs functions at the server that make these units, and waits for them. Each call makes
    /// some.
    pub(super) fn ask<F: Function>(
        &mut self,
        calls: Vec<(Vec<Range<usize>>, F::Argument)>,
    ) -> Result<Vec<F::Answer>, CallError> {
        let (units, arguments): (Vec<Vec<Range<usize>>>, Vec<F::Argument>) = calls.into_iter().unzip();
        let pages: Vec<Pages> = units.iter().flatten().flat_map(|units| self.pages(units.clone())).collect();
        let each = || units.iter().flatten().flat_map(Range::clone);
        each().for_each(|unit| {
            assert_eq!(self.units[unit], OutputUnitState::Claimed, "a unit is made once");
            self.units[unit] = OutputUnitState::Offloaded;
        });
        match self.core.offload_writing::<F>(arguments, pages.into_iter()) {
            Ok(answers) => {
                each().for_each(|unit| {
                    self.core.mark_written_far(self.page(unit));
                    self.units[unit] = OutputUnitState::Filled;
                });
                Ok(answers)
            }
            Err(OffloadWriteError { error, is_over }) => {
                self.is_lost |= !is_over;
                Err(error)
            }
        }
    }

    /// Claims other units in the place of these, if functions that failed may still write to these. What the
    /// server did not make can be made here afterwards.
    pub(super) fn renew_if_lost(&mut self) -> Result<(), FarError> {
        if self.is_lost {
            *self = OutputUnits::claim(self.core, self.units.len())?;
        }
        Ok(())
    }

    /// Returns the units that are not made yet.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> + use<T> {
        let units: Vec<usize> =
            (0..self.units.len()).filter(|unit| self.units[*unit] != OutputUnitState::Filled).collect();
        units.into_iter()
    }

    /// Makes a unit near, from copies of these elements and zeros behind them.
    pub(super) fn make_here(&mut self, scope: &Scope<'_>, unit: usize, elements: &[T]) -> Result<(), FarError>
    where
        T: Copy,
    {
        assert!(!self.is_lost && elements.len() <= Paged::<T>::PER_UNIT);
        let page = self.page(unit);
        match self.units[unit] {
            OutputUnitState::Claimed => self.core.unclaim(page),
            OutputUnitState::Offloaded => self.core.mark_unwritten(page),
            OutputUnitState::Empty => {}
            OutputUnitState::Filled => unreachable!("a unit is made once"),
        }
        self.units[unit] = OutputUnitState::Empty;
        let _brief = scope.begin_transient();
        let address: *mut T = scope.fault_in_unit(self.paged.page(unit), AccessMode::Create)?.cast();
        // SAFETY: the unit has room for so many, is ours alone, and is near until the scope is used
        // again.
        unsafe { address.copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        self.units[unit] = OutputUnitState::Filled;
        Ok(())
    }

    /// Returns the storage of all units, which must be made.
    pub(super) fn finish(mut self) -> Paged<T> {
        assert!(self.units.iter().all(|unit| *unit == OutputUnitState::Filled), "units are missing");
        let units = core::mem::take(&mut self.units).len();
        let mut paged = core::mem::replace(&mut self.paged, Paged::new());
        paged.set_made(units);
        paged
    }
}

impl<T: Send + 'static> Drop for OutputUnits<'_, T> {
    fn drop(&mut self) {
        for (unit, was) in core::mem::take(&mut self.units).into_iter().enumerate() {
            let page = self.page(unit);
            match was {
                OutputUnitState::Claimed => self.core.unclaim(page),
                OutputUnitState::Offloaded if self.is_lost => self.core.abandon_claimed(page),
                OutputUnitState::Offloaded => self.core.mark_unwritten(page),
                OutputUnitState::Empty => {}
                OutputUnitState::Filled => self.core.release_units(self.paged.page(unit), 1, 1),
            }
        }
        for extent in self.paged.take_extents() {
            // SAFETY: it came from `take_run`, all its units are released, and it is in `extents`
            // no more; the heap is borrowed.
            unsafe { if self.is_lost { lose_run(self.core, extent) } else { free_run(self.core, extent) } }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against pages that are used again while somebody may still write them, and against
    //! claims that nobody gives back.
    use super::*;
    use crate::{FarVec, Heap, Plane};
    use farfield_wic::columns::{Copied, CopyBytes};

    #[test]
    fn unmade_output_is_freed_on_each_plane() {
        for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
            let heap = Heap::builder().near(4 << 20).near_max(4 << 20).far(1 << 30).plane(plane).build().unwrap();
            for units in [0, 1, 5, 16, 17, 300] {
                let mut output: OutputUnits<'_, u64> = OutputUnits::claim(heap.core(), units).unwrap();
                for unit in (0..units).step_by(3) {
                    output.make_here(&heap.enter(), unit, &[7, 8]).unwrap();
                }
                assert_eq!(output.missing().count(), units - units.div_ceil(3));
                drop(output);
                heap.verify();
            }
            let mut vec = FarVec::new();
            vec.extend(&heap.enter(), 0..100_000u64).unwrap();
            drop(vec);
            heap.verify();
        }
    }

    /// `ram:` runs no functions, and says so before anybody is asked.
    #[test]
    fn output_that_no_server_was_asked_for_can_be_made_near() {
        let heap = Heap::builder().near(4 << 20).near_max(4 << 20).far(1 << 30).build().unwrap();
        let mut output: OutputUnits<'_, u64> = OutputUnits::claim(heap.core(), 40).unwrap();
        let argument = Copied { from: Vec::new(), to: output.pages(0..40) };
        assert_eq!(argument.to.iter().map(|pages| pages.count).sum::<u64>(), 40);
        let refused = output.ask::<CopyBytes>(vec![(core::iter::once(0..40).collect(), argument)]);
        assert_eq!(refused, Err(CallError::Nowhere));
        assert!(!output.is_lost);
        let scope = heap.enter();
        for unit in 0..40 {
            output.make_here(&scope, unit, &[]).unwrap();
        }
        drop(scope);
        drop(output.finish());
        heap.verify();
    }

    #[test]
    fn output_pages_that_a_server_may_still_write_are_never_reused() {
        let heap = Heap::builder().near(4 << 20).near_max(4 << 20).far(64 << 20).build().unwrap();
        let mut lost: OutputUnits<'_, u64> = OutputUnits::claim(heap.core(), 40).unwrap();
        lost.is_lost = true;
        lost.units[3] = OutputUnitState::Offloaded;
        let taken: Vec<u32> = (0..40).map(|unit| lost.page(unit)).collect();
        drop(lost);
        heap.verify();
        let mut others = Vec::new();
        // All that there is.
        while let Ok(output) = OutputUnits::<u64>::claim(heap.core(), 16) {
            assert!((0..16).all(|unit| !taken.contains(&output.page(unit))));
            others.push(output);
        }
        assert!(others.len() > 100);
        drop(others);
        heap.verify();
    }
}
