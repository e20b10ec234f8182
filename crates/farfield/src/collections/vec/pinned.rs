//! Vectors that stay near, to be read without a scope.

use super::FarVec;
use crate::error::FarError;
use crate::fault::Pin;
use crate::heap::{AccessMode, Scope};
use core::fmt;
use core::ops::Index;

/// The elements of a vector, which stay near until this guard is dropped. Made by [`FarVec::pin`].
///
/// The guard may go to other threads if they may share the elements. If the guard is forgotten
/// (`mem::forget`), the pages stay near, perhaps longer than the elements.
pub struct PinnedVec<'v, T> {
    /// The elements of each unit.
    units: Box<[&'v [T]]>,
    len: usize,
    _pins: Vec<Pin<'v>>,
}

impl<T: Send + 'static> FarVec<T> {
    /// Brings all elements near and keeps them there, whatever scopes and tasks do, until the guard
    /// is dropped. For a table that is used at every step. An access costs no more than one to a
    /// vector of vectors.
    ///
    /// At most half of the near memory can be pinned ([`FarError::PinsFull`]).
    ///
    /// ```
    /// use farfield::{FarVec, Heap};
    ///
    /// let heap = Heap::builder().near(16 << 20).build()?;
    /// let mut squares = FarVec::new();
    /// squares.extend(&heap.enter(), (0..1000u64).map(|number| number * number))?;
    /// let near = squares.pin()?;
    /// assert_eq!((near[31], near.iter().sum::<u64>()), (961, 332_833_500)); // no scope
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The guard must be dropped before the vector changes:
    ///
    /// ```compile_fail,E0502
    /// # use farfield::{FarVec, Heap};
    /// # let heap = Heap::builder().build().unwrap();
    /// let mut squares = FarVec::new();
    /// let near = squares.pin().unwrap();
    /// // error: cannot borrow `squares` as mutable because it is also borrowed as immutable
    /// squares.push(&heap.enter(), 4).unwrap();
    /// println!("{}", near[0]);
    /// ```
    pub fn pin(&self) -> Result<PinnedVec<'_, T>, FarError> {
        let Some(core) = self.core(0) else {
            return Ok(PinnedVec { units: Box::default(), len: 0, _pins: Vec::new() });
        };
        // SAFETY: the elements keep it.
        let core = unsafe { &*core };
        let (mut units, mut pins) = (Vec::new(), Vec::new());
        for unit in self.units_of(..) {
            let scope = Scope::new(core);
            let _patient = scope.allow_blocking();
            let address = self.units.unit(&scope, unit, AccessMode::Read)?;
            pins.push(scope.pin_at(address.cast())?);
            let count = (self.len - unit * Self::PER_UNIT).min(Self::PER_UNIT);
            // SAFETY: as in `get`; the pin keeps the unit where it is, and is kept as long as the reference can be had.
            units.push(unsafe { core::slice::from_raw_parts(address.cast_const(), count) });
        }
        Ok(PinnedVec { units: units.into(), len: self.len, _pins: pins })
    }
}

impl<T: Send + 'static> PinnedVec<'_, T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the element with this index, if there is one.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&T> {
        self.units.get(index / FarVec::<T>::PER_UNIT)?.get(index % FarVec::<T>::PER_UNIT)
    }

    /// Iterates over slices that together are the elements, in order. Each has the elements of a
    /// page, or one larger element.
    pub fn slices(&self) -> impl Iterator<Item = &[T]> {
        self.units.iter().copied()
    }

    /// Iterates over the elements, in order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slices().flatten()
    }
}

impl<T: Send + 'static> Index<usize> for PinnedVec<'_, T> {
    type Output = T;

    #[inline]
    fn index(&self, index: usize) -> &T {
        &self.units[index / FarVec::<T>::PER_UNIT][index % FarVec::<T>::PER_UNIT]
    }
}

impl<T: fmt::Debug + Send + 'static> fmt::Debug for PinnedVec<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
