//! `FarArray`: a fixed number of elements in several dimensions.

use super::chunks::{Chunks, ChunksMut, Scan, ScanMut};
use super::pattern::PrefetchMode;
use super::vec::FarVec;
use crate::error::{AllocError, FarError};
use crate::heap::{FarRange, Scope};
use core::ops::Range;

/// An array of `D` dimensions whose elements are near or far. The last index runs fastest, as in
/// `[[T; columns]; rows]`.
///
/// Memory and walks are those of [`FarVec`].
///
/// ```
/// use farfield::{FarArray, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let mut scope = heap.enter();
/// let mut table = FarArray::from_fn(&scope, [100, 1000], |[row, column]| row * column)?;
/// *table.at_mut(&scope, [7, 8])? += 1;
/// assert_eq!(table.at(&scope, [7, 8])?, &57);
///
/// // One row, in slices.
/// let chunks = table.chunks_in(&scope, table.part([7]));
/// let row: usize = chunks.map(|chunk| chunk.map_or(0, |chunk| chunk.iter().sum())).sum();
/// assert_eq!(row, 7 * 999 * 1000 / 2 + 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// # let table = farfield::FarArray::filled(&heap.enter(), [2, 2], 1).unwrap();
/// let scope = heap.enter();
/// let row = table.chunks_in(&scope, table.part([1])).next();
/// drop(scope); // error: cannot move out of `scope` because it is borrowed
/// println!("{row:?}");
/// ```
pub struct FarArray<T: Send + 'static, const D: usize = 1> {
    pub(super) elements: FarVec<T>,
    pub(super) dims: [usize; D],
}

impl<T: Send + 'static, const D: usize> FarArray<T, D> {
    /// Returns where these elements lie in the heap's region, in memory order: see
    /// [`FarVec::far_ranges`].
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn far_ranges(&self, range: Range<usize>) -> impl Iterator<Item = FarRange> {
        self.elements.far_ranges(range)
    }

    /// Makes an array with these lengths. `make` is called with each index, and returns its
    /// element.
    ///
    /// # Panics
    /// If the number of elements overflows `usize`.
    pub fn from_fn(
        scope: &Scope<'_>,
        dims: [usize; D],
        mut make: impl FnMut([usize; D]) -> T,
    ) -> Result<FarArray<T, D>, FarError> {
        let count = dims.iter().try_fold(1usize, |count, dim| count.checked_mul(*dim)).expect("capacity overflow");
        let mut elements = FarVec::new();
        let mut index = [0; D];
        for _ in 0..count {
            elements.push(scope, make(index))?;
            for (index, dim) in index.iter_mut().zip(dims).rev() {
                *index += 1;
                if *index < dim {
                    break;
                }
                *index = 0;
            }
        }
        Ok(FarArray { elements, dims })
    }

    /// Makes an array with these lengths, of copies of one value.
    ///
    /// # Panics
    /// If the number of elements overflows `usize`.
    pub fn filled(scope: &Scope<'_>, dims: [usize; D], value: T) -> Result<FarArray<T, D>, FarError>
    where
        T: Clone,
    {
        FarArray::from_fn(scope, dims, |_| value.clone())
    }

    /// Returns the length of each dimension.
    pub fn dims(&self) -> [usize; D] {
        self.dims
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Checks whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// Returns all elements as a vector, in memory order: to walk through them, and for hints.
    pub fn elements(&self) -> &FarVec<T> {
        &self.elements
    }

    /// Sets what this array fetches ahead of need: see [`FarVec::set_prefetch`]. A pattern names
    /// [positions](FarArray::position).
    pub fn set_prefetch(&mut self, mode: PrefetchMode) {
        self.elements.set_prefetch(mode);
    }

    /// Returns the position of an element among all. `None` if there is no element with this index.
    #[inline]
    pub fn position(&self, index: [usize; D]) -> Option<usize> {
        index
            .iter()
            .zip(self.dims)
            .try_fold(0, |position, (index, dim)| (*index < dim).then(|| position * dim + *index))
    }

    /// Returns the positions of the elements whose index begins with `start`, for
    /// [`FarArray::chunks_in`] and its like: `part([3])` of a table is its fourth row.
    ///
    /// # Panics
    /// If `start` is out of bounds.
    #[track_caller]
    pub fn part<const P: usize>(&self, start: [usize; P]) -> Range<usize> {
        const { assert!(P <= D, "an index has no more parts than there are dimensions") };
        let fits = start.iter().zip(self.dims).all(|(index, dim)| *index < dim);
        assert!(fits, "index {start:?} out of bounds for {:?}", self.dims);
        let size: usize = self.dims[P..].iter().product();
        let first = start.iter().zip(self.dims).fold(0, |position, (index, dim)| position * dim + index) * size;
        first..first + size
    }

    /// Returns the element with this index, if there is one.
    #[inline]
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<Option<&'a T>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.get(scope, position))
    }

    /// Returns the element with this index, to be changed, if there is one.
    #[inline]
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<Option<&'a mut T>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.get_mut(scope, position))
    }

    /// Returns the element like [`FarArray::get`], for a task: other tasks run while the element is
    /// fetched.
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<Option<&'a T>, FarError> {
        let Some(position) = self.position(index) else { return Ok(None) };
        self.elements.fetch(scope, position).await
    }

    /// Returns the element like [`FarArray::get_mut`], for a task: other tasks run while the
    /// element is fetched.
    pub async fn fetch_mut<'a>(
        &'a mut self,
        scope: &'a Scope<'_>,
        index: [usize; D],
    ) -> Result<Option<&'a mut T>, FarError> {
        let Some(position) = self.position(index) else { return Ok(None) };
        self.elements.fetch_mut(scope, position).await
    }

    /// Calls `action` with an element, if there is one. Needs no scope: see [`FarVec::read`].
    pub fn read<R>(&self, index: [usize; D], action: impl FnOnce(&T) -> R) -> Result<Option<R>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.read(position, action))
    }

    /// Calls `action` with an element, if there is one, to change it. Needs no scope: see
    /// [`FarVec::read`].
    pub fn write<R>(&mut self, index: [usize; D], action: impl FnOnce(&mut T) -> R) -> Result<Option<R>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.write(position, action))
    }

    /// Returns the element with this index, as `array[index]`.
    ///
    /// # Panics
    /// If the index is out of bounds.
    #[inline]
    pub fn at<'a>(&'a self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<&'a T, FarError> {
        let position = self.check(index);
        self.elements.at(scope, position)
    }

    /// Returns the element with this index, to be changed, as `&mut array[index]`.
    ///
    /// # Panics
    /// If the index is out of bounds.
    #[inline]
    pub fn at_mut<'a>(&'a mut self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<&'a mut T, FarError> {
        let position = self.check(index);
        self.elements.at_mut(scope, position)
    }

    /// Replaces the element with this index. Returns the old one.
    ///
    /// # Panics
    /// If the index is out of bounds.
    pub fn set(&mut self, scope: &Scope<'_>, index: [usize; D], value: T) -> Result<T, AllocError<T>> {
        let position = self.check(index);
        self.elements.set(scope, position, value)
    }

    #[inline]
    #[track_caller]
    fn check(&self, index: [usize; D]) -> usize {
        let Some(position) = self.position(index) else { panic!("index {index:?} out of bounds for {:?}", self.dims) };
        position
    }

    /// Iterates over slices that together are these elements: see [`FarVec::chunks_in`].
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn chunks_in<'a>(&'a self, scope: &'a Scope<'_>, range: Range<usize>) -> Chunks<'a, T> {
        self.elements.chunks_in(scope, range)
    }

    /// Iterates over slices that together are these elements, to change them: see
    /// [`FarVec::chunks_in`].
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn chunks_mut_in<'a>(&'a mut self, scope: &'a Scope<'_>, range: Range<usize>) -> ChunksMut<'a, T> {
        self.elements.chunks_mut_in(scope, range)
    }

    /// Walks through all elements, however many: see [`FarVec::scan`].
    pub fn scan<'a, 'heap>(&'a self, scope: &'a mut Scope<'heap>) -> Scan<'a, 'heap, T> {
        self.elements.scan(scope)
    }

    /// Walks through all elements, however many, to change them: see [`FarVec::scan`].
    pub fn scan_mut<'a, 'heap>(&'a mut self, scope: &'a mut Scope<'heap>) -> ScanMut<'a, 'heap, T> {
        self.elements.scan_mut(scope)
    }
}

impl<T: Send + 'static, const D: usize> core::fmt::Debug for FarArray<T, D> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarArray({:?})", self.dims)
    }
}
