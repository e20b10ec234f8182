//! `FarArray`: a fixed number of elements in several dimensions.

use super::chunks::{Chunks, ChunksMut, Scan, ScanMut};
use super::vec::FarVec;
use crate::error::{AllocError, FarError};
use crate::heap::{FarRange, Scope};
use core::ops::Range;

/// An array of `D` dimensions whose elements are near or far. The last index runs fastest, as in `[[T; columns]; rows]`.
///
/// Its memory and its walks are those of [`FarVec`].
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
/// let row: usize = table.chunks_in(&scope, table.part([7])).map(|chunk| chunk.map_or(0, |chunk| chunk.iter().sum())).sum();
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
    /// [`FarVec::far_ranges`] of these elements, in the order of their memory.
    ///
    /// # Panics
    /// If there are no such elements.
    pub fn far_ranges(&self, range: Range<usize>) -> impl Iterator<Item = FarRange> {
        self.elements.far_ranges(range)
    }

    /// An array with these lengths, of what the function makes of each index.
    ///
    /// # Panics
    /// If there are more elements than addresses.
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

    /// An array with these lengths, of copies of one value.
    ///
    /// # Panics
    /// If there are more elements than addresses.
    pub fn filled(scope: &Scope<'_>, dims: [usize; D], value: T) -> Result<FarArray<T, D>, FarError>
    where
        T: Clone,
    {
        FarArray::from_fn(scope, dims, |_| value.clone())
    }

    /// Its lengths.
    pub fn dims(&self) -> [usize; D] {
        self.dims
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Has it none?
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// All elements, in order: to walk through them, and for hints.
    pub fn elements(&self) -> &FarVec<T> {
        &self.elements
    }

    /// Where an element is among all. `None` if there is none.
    #[inline]
    pub fn position(&self, index: [usize; D]) -> Option<usize> {
        index
            .iter()
            .zip(self.dims)
            .try_fold(0, |position, (index, dim)| (*index < dim).then(|| position * dim + *index))
    }

    /// The elements whose index begins like this, for [`FarArray::chunks_in`] and its like: `part([3])` of a table is its fourth row.
    ///
    /// # Panics
    /// If there are none.
    #[track_caller]
    pub fn part<const P: usize>(&self, start: [usize; P]) -> Range<usize> {
        const { assert!(P <= D, "an index has no more parts than there are dimensions") };
        let fits = start.iter().zip(self.dims).all(|(index, dim)| *index < dim);
        assert!(fits, "index {start:?} out of bounds for {:?}", self.dims);
        let size: usize = self.dims[P..].iter().product();
        let first = start.iter().zip(self.dims).fold(0, |position, (index, dim)| position * dim + index) * size;
        first..first + size
    }

    /// The element with this index, if there is one.
    #[inline]
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<Option<&'a T>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.get(scope, position))
    }

    /// The same, to be changed.
    #[inline]
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<Option<&'a mut T>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.get_mut(scope, position))
    }

    /// As [`FarArray::get`], for a task: while the element is on its way, others run.
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<Option<&'a T>, FarError> {
        let Some(position) = self.position(index) else { return Ok(None) };
        self.elements.fetch(scope, position).await
    }

    /// As [`FarArray::get_mut`], for a task.
    pub async fn fetch_mut<'a>(
        &'a mut self,
        scope: &'a Scope<'_>,
        index: [usize; D],
    ) -> Result<Option<&'a mut T>, FarError> {
        let Some(position) = self.position(index) else { return Ok(None) };
        self.elements.fetch_mut(scope, position).await
    }

    /// Calls `action` with an element, if there is one: see [`FarVec::read`].
    pub fn read<R>(&self, index: [usize; D], action: impl FnOnce(&T) -> R) -> Result<Option<R>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.read(position, action))
    }

    /// Calls `action` with an element, if there is one, to change it.
    pub fn write<R>(&mut self, index: [usize; D], action: impl FnOnce(&mut T) -> R) -> Result<Option<R>, FarError> {
        self.position(index).map_or(Ok(None), |position| self.elements.write(position, action))
    }

    /// The element with this index, as `array[index]`.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub fn at<'a>(&'a self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<&'a T, FarError> {
        let position = self.check(index);
        self.elements.at(scope, position)
    }

    /// The same, to be changed.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub fn at_mut<'a>(&'a mut self, scope: &'a Scope<'_>, index: [usize; D]) -> Result<&'a mut T, FarError> {
        let position = self.check(index);
        self.elements.at_mut(scope, position)
    }

    /// Puts a value in the place of an element, which comes out.
    ///
    /// # Panics
    /// If there is none.
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

    /// Slices that together are these elements: see [`FarVec::chunks_in`].
    ///
    /// # Panics
    /// If there are no such elements.
    pub fn chunks_in<'a>(&'a self, scope: &'a Scope<'_>, range: Range<usize>) -> Chunks<'a, T> {
        self.elements.chunks_in(scope, range)
    }

    /// The same, to be changed.
    ///
    /// # Panics
    /// If there are no such elements.
    pub fn chunks_mut_in<'a>(&'a mut self, scope: &'a Scope<'_>, range: Range<usize>) -> ChunksMut<'a, T> {
        self.elements.chunks_mut_in(scope, range)
    }

    /// All elements, however many: see [`FarVec::scan`].
    pub fn scan<'a, 'heap>(&'a self, scope: &'a mut Scope<'heap>) -> Scan<'a, 'heap, T> {
        self.elements.scan(scope)
    }

    /// The same, to be changed.
    pub fn scan_mut<'a, 'heap>(&'a mut self, scope: &'a mut Scope<'heap>) -> ScanMut<'a, 'heap, T> {
        self.elements.scan_mut(scope)
    }
}

impl<T: Send + 'static, const D: usize> core::fmt::Debug for FarArray<T, D> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarArray({:?})", self.dims)
    }
}
