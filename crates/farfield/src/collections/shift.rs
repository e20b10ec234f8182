//! Moving elements by one place, unit by unit: the common part of `insert` and `remove`.

use super::paged::Paged;
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};
use core::mem::MaybeUninit;
use core::ops::RangeInclusive;

/// Direction in which elements move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ShiftDirection {
    End,
    Start,
}

/// Error of a move, with the state that it left.
pub(super) struct ShiftError {
    pub(super) error: FarError,
    /// Whether all is as it was. Otherwise the pool failed once more on the way back. Then the
    /// elements between there and the end that was not reached have moved, the value is in its
    /// place, and the element that found none came out.
    pub(super) restored: bool,
}

impl<T: Send + 'static> Paged<T> {
    /// Moves the elements in `slots` one place toward the end. `value` is put into the first slot,
    /// and gets the element that was in the last one. One unit at a time is near.
    pub(super) fn shift_to_end(
        &mut self,
        scope: &Scope<'_>,
        slots: RangeInclusive<usize>,
        value: &mut MaybeUninit<T>,
    ) -> Result<(), ShiftError> {
        let _patient = scope.allow_blocking();
        let (at, end) = (*slots.start(), *slots.end());
        self.pass(scope, at, end, value, ShiftDirection::End).map_err(|(error, unit)| {
            let next = unit * Self::PER_UNIT;
            let restored = next <= at || self.pass(scope, at, next - 1, value, ShiftDirection::Start).is_ok();
            ShiftError { error, restored }
        })
    }

    /// Moves the elements in `slots` one place toward the start. `value` is put into the last slot,
    /// and gets the element that was in the first one. One unit at a time is near.
    pub(super) fn shift_to_start(
        &mut self,
        scope: &Scope<'_>,
        slots: RangeInclusive<usize>,
        value: &mut MaybeUninit<T>,
    ) -> Result<(), ShiftError> {
        let _patient = scope.allow_blocking();
        let (at, end) = (*slots.start(), *slots.end());
        self.pass(scope, at, end, value, ShiftDirection::Start).map_err(|(error, unit)| {
            let next = (unit + 1) * Self::PER_UNIT;
            let restored = next > end || self.pass(scope, next, end, value, ShiftDirection::End).is_ok();
            ShiftError { error, restored }
        })
    }

    /// Passes `carry` through the slots, and thereby moves their elements. An error has the unit
    /// that could not be brought near.
    fn pass(
        &mut self,
        scope: &Scope<'_>,
        at: usize,
        end: usize,
        carry: &mut MaybeUninit<T>,
        toward: ShiftDirection,
    ) -> Result<(), (FarError, usize)> {
        let (first, last) = (at / Self::PER_UNIT, end / Self::PER_UNIT);
        for step in 0..=last - first {
            let unit = if toward == ShiftDirection::End { first + step } else { last - step };
            let low = at.saturating_sub(unit * Self::PER_UNIT);
            let high = (end - unit * Self::PER_UNIT).min(Self::PER_UNIT - 1);
            let _brief = scope.begin_transient();
            let address =
                self.unit(scope, unit, AccessMode::Write).map_err(|error| (error, unit))?.cast::<MaybeUninit<T>>();
            // SAFETY: slots `low..=high` are in the unit, which is near and ours alone (`&mut self`).
            let slots = unsafe { core::slice::from_raw_parts_mut(address.add(low), high - low + 1) };
            match toward {
                ShiftDirection::End => slots.rotate_right(1),
                ShiftDirection::Start => slots.rotate_left(1),
            }
            let open = if toward == ShiftDirection::End { slots.first_mut() } else { slots.last_mut() };
            let Some(open) = open else { unreachable!("a unit has slots") };
            core::mem::swap(open, carry);
        }
        Ok(())
    }
}
