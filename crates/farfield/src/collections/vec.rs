//! `FarVec`: a growing vector.

use super::chunks::{Chunks, ChunksMut, Scan, ScanMut};
use super::paged::Paged;
use crate::error::{AllocError, FarError};
use crate::heap::{Scope, Want};

/// A `Vec` whose elements are near or far.
///
/// The index gives the page, so an element costs nothing beside its own bytes, and growing copies nothing. Elements up to a page
/// (4 KiB) are packed into pages and never cross one; a larger one has pages of its own.
///
/// ```
/// use farfield::{Heap, collections::FarVec};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let mut squares = FarVec::new();
/// let mut scope = heap.enter();
/// for number in 0..10_000u64 {
///     squares.push(&scope, number * number)?;
/// }
/// assert_eq!(squares.get(&scope, 99)?, Some(&9801));
///
/// // A scan that may be longer than near memory: the scope is renewed as it goes.
/// let mut sum = 0;
/// let mut scan = squares.scan(&mut scope);
/// while let Some(chunk) = scan.next_chunk()? {
///     sum += chunk.iter().sum::<u64>();
/// }
/// assert_eq!(sum, 333_283_335_000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// References forbid what would move or drop what they refer to:
///
/// ```compile_fail,E0502
/// # use farfield::{Heap, collections::FarVec};
/// # let heap = Heap::builder().build().unwrap();
/// # let mut vec = FarVec::new();
/// let scope = heap.enter();
/// let first = vec.get(&scope, 0).unwrap();
/// vec.push(&scope, 1).unwrap(); // error: cannot borrow `vec` as mutable
/// println!("{first:?}");
/// ```
///
/// ```compile_fail,E0499
/// # use farfield::{Heap, collections::FarVec};
/// # let heap = Heap::builder().build().unwrap();
/// # let mut scope = heap.enter();
/// # let vec: FarVec<u64> = FarVec::new();
/// let mut scan = vec.scan(&mut scope);
/// let first = scan.next_chunk().unwrap();
/// let second = scan.next_chunk().unwrap(); // error: cannot borrow `scan` as mutable more than once
/// println!("{first:?}");
/// ```
///
/// Near memory beside its elements: 40 bytes, and 4 for every 16 MiB.
pub struct FarVec<T: Send + 'static> {
    units: Paged<T>,
    len: usize,
}

impl<T: Send + 'static> FarVec<T> {
    const PER_UNIT: usize = Paged::<T>::PER_UNIT;

    /// An empty one.
    pub const fn new() -> FarVec<T> {
        FarVec { units: Paged::new(), len: 0 }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Has it none?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// An element that exists.
    #[inline]
    fn element(&self, scope: &Scope<'_>, index: usize, want: Want) -> Result<*mut T, FarError> {
        debug_assert!(index < self.len);
        let unit = self.units.unit(scope, index / Self::PER_UNIT, want)?;
        // SAFETY: a unit has room for so many elements.
        Ok(unsafe { unit.add(index % Self::PER_UNIT) })
    }

    /// The element with this index, if there is one.
    #[inline]
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>, index: usize) -> Result<Option<&'a T>, FarError> {
        if index >= self.len {
            return Ok(None);
        }
        let address = self.element(scope, index, Want::Read)?;
        scope.mark_used();
        // SAFETY:
        // - initialised: every element below `len` is;
        // - alive: its unit became near after the scope began, so it keeps its frame until the scope ends, and the reference
        //   borrows the scope; it borrows `self` too, so the element is not dropped or moved meanwhile;
        // - shared: whoever writes has `&mut self`, or does so through interior mutability, which `T` allows.
        Ok(Some(unsafe { &*address }))
    }

    /// The element with this index, to be changed.
    #[inline]
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>, index: usize) -> Result<Option<&'a mut T>, FarError> {
        if index >= self.len {
            return Ok(None);
        }
        let address = self.element(scope, index, Want::Write)?;
        scope.mark_used();
        // SAFETY: as in `get`, and `&mut self` makes it exclusive.
        Ok(Some(unsafe { &mut *address }))
    }

    /// The element with this index, as `vec[index]`.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub fn at<'a>(&'a self, scope: &'a Scope<'_>, index: usize) -> Result<&'a T, FarError> {
        self.check(index);
        self.get(scope, index).map(|element| element.unwrap_or_else(|| unreachable!("checked")))
    }

    /// The element with this index, as `&mut vec[index]`.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub fn at_mut<'a>(&'a mut self, scope: &'a Scope<'_>, index: usize) -> Result<&'a mut T, FarError> {
        self.check(index);
        self.get_mut(scope, index).map(|element| element.unwrap_or_else(|| unreachable!("checked")))
    }

    #[inline]
    #[track_caller]
    fn check(&self, index: usize) {
        assert!(index < self.len, "index out of bounds: the len is {} but the index is {index}", self.len);
    }

    /// One element more, at the end.
    #[inline]
    pub fn push(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        let (unit, within) = (self.len / Self::PER_UNIT, self.len % Self::PER_UNIT);
        let made = unit < self.units.made();
        let address = if made { self.units.unit(scope, unit, Want::Write) } else { self.units.make(scope) };
        match address {
            Ok(address) => {
                // SAFETY: within the unit, near and ours alone (`&mut self`); no element lives there.
                unsafe { address.add(within).write(value) };
                self.len += 1;
                Ok(())
            }
            Err(error) => Err(AllocError { error, value }),
        }
    }

    /// Takes the last element out.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        let Some(last) = self.len.checked_sub(1) else { return Ok(None) };
        let address = self.element(scope, last, Want::Read)?;
        // SAFETY: initialised and near; not an element any more from the next line on.
        let value = unsafe { address.read() };
        self.len = last;
        self.trim();
        Ok(Some(value))
    }

    /// Slices that together are all elements, in order: one check for each page and none for its elements. How long they are
    /// depends on how pages lie near; all but the last have at least the elements of a page.
    pub fn chunks<'a>(&'a self, scope: &'a Scope<'_>) -> Chunks<'a, T> {
        Chunks::new(&self.units, scope, 0..self.len)
    }

    /// The same, to be changed.
    pub fn chunks_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> ChunksMut<'a, T> {
        ChunksMut::new(&mut self.units, scope, 0..self.len)
    }

    /// All elements, however many, in chunks of which one at a time is held near.
    pub fn scan<'a, 'heap>(&'a self, scope: &'a mut Scope<'heap>) -> Scan<'a, 'heap, T> {
        Scan::new(&self.units, scope, 0..self.len)
    }

    /// The same, to be changed.
    pub fn scan_mut<'a, 'heap>(&'a mut self, scope: &'a mut Scope<'heap>) -> ScanMut<'a, 'heap, T> {
        ScanMut::new(&mut self.units, scope, 0..self.len)
    }

    /// Gives units without elements back, but for one: pushing and popping by turns shall not make a page each time.
    fn trim(&mut self) {
        let used = self.len.div_ceil(Self::PER_UNIT);
        if self.units.made() > used + 1 {
            self.units.release(used + 1);
        }
    }
}

impl<T: Send + 'static> Default for FarVec<T> {
    fn default() -> FarVec<T> {
        FarVec::new()
    }
}

impl<T: Send + 'static> Drop for FarVec<T> {
    fn drop(&mut self) {
        core::mem::replace(&mut self.units, Paged::new()).drop_elements(self.len);
    }
}

impl<T: Send + 'static> core::fmt::Debug for FarVec<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarVec(len {})", self.len)
    }
}
