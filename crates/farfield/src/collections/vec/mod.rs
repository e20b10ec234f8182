//! `FarVec`: a growing vector.

mod aggregate;
mod alone;
mod copy;
mod order;
mod parts;
mod pinned;
mod ranks;
mod sieve;
mod sorted;
mod stream;
mod take;
mod view;

pub use aggregate::Aggregate;
pub use copy::Copying;
pub(super) use copy::{FEW_UNITS, add};
pub use pinned::PinnedVec;
pub use ranks::{Finding, Ranking};
pub use sorted::Sorting;
pub use take::{Order, Taking};

use super::chunks::{Chunks, ChunksMut, Iter, IterMut, Scan, ScanMut};
use super::paged::Paged;
use super::pattern::PrefetchMode;
use super::range_of;
use super::shift::ShiftError;
use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, FarRange, Scope, StreamingHint};
use core::mem::MaybeUninit;
use core::ops::{Range, RangeBounds};

/// A `Vec` whose elements are near or far.
///
/// The index gives the page, so an element costs nothing beside its own bytes, and growing copies
/// nothing. Elements up to a page (4 KiB) are packed into pages and never cross one. A larger
/// element has pages of its own.
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
/// A borrowed element prevents changes that would move or drop it:
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
/// Near memory beside its elements: 48 bytes, and 4 for every 16 MiB.
pub struct FarVec<T: Send + 'static> {
    pub(super) units: Paged<T>,
    len: usize,
}

impl<T: Send + 'static> FarVec<T> {
    const PER_UNIT: usize = Paged::<T>::PER_UNIT;

    /// Makes an empty vector.
    pub const fn new() -> FarVec<T> {
        FarVec { units: Paged::new(), len: 0 }
    }

    /// Makes a vector of units that are made.
    pub(super) fn from_units(units: Paged<T>, len: usize) -> FarVec<T> {
        FarVec { units, len }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether the vector has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of an element that exists.
    #[inline]
    fn element(&self, scope: &Scope<'_>, index: usize, mode: AccessMode) -> Result<*mut T, FarError> {
        debug_assert!(index < self.len);
        let unit = self.units.unit(scope, index / Self::PER_UNIT, mode)?;
        // SAFETY: a unit has room for so many elements.
        Ok(unsafe { unit.add(index % Self::PER_UNIT) })
    }

    /// Returns the element with this index, if there is one.
    #[inline]
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>, index: usize) -> Result<Option<&'a T>, FarError> {
        if index >= self.len {
            return Ok(None);
        }
        let address = self.element(scope, index, AccessMode::Read)?;
        scope.mark_used();
        // SAFETY:
        // - initialised: every element below `len` is;
        // - alive: its unit became near after the scope began, so it keeps its frame until the
        //   scope ends, and the reference borrows the scope; it borrows `self` too, so the element
        //   is not dropped or moved meanwhile;
        // - shared: a writer has `&mut self`, or writes through interior mutability, which `T`
        //   allows.
        Ok(Some(unsafe { &*address }))
    }

    /// Returns the element like [`FarVec::get`], with the hint that it will not be used again soon.
    /// If it has to be brought near, it is evicted first.
    pub fn get_once<'a>(&'a self, scope: &'a Scope<'_>, index: usize) -> Result<Option<&'a T>, FarError> {
        if index >= self.len {
            return Ok(None);
        }
        scope.run_streaming(|hint| {
            self.units.note(hint, scope, index / Self::PER_UNIT);
            self.get(scope, index)
        })
    }

    /// Returns the element with this index, to be changed, if there is one.
    #[inline]
    pub fn get_mut<'a>(&'a mut self, scope: &'a Scope<'_>, index: usize) -> Result<Option<&'a mut T>, FarError> {
        if index >= self.len {
            return Ok(None);
        }
        let address = self.element(scope, index, AccessMode::Write)?;
        scope.mark_used();
        // SAFETY: as in `get`, and `&mut self` makes it exclusive.
        Ok(Some(unsafe { &mut *address }))
    }

    /// Returns the element like [`FarVec::get`], for a task: other tasks run while the element is
    /// fetched.
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>, index: usize) -> Result<Option<&'a T>, FarError> {
        scope.retry(|| self.get(scope, index)).await
    }

    /// Returns the element like [`FarVec::fetch`], with the hint that it will not be used again
    /// soon: see [`FarVec::get_once`].
    pub async fn fetch_once<'a>(&'a self, scope: &'a Scope<'_>, index: usize) -> Result<Option<&'a T>, FarError> {
        if index >= self.len {
            return Ok(None);
        }
        let look = async |hint: &StreamingHint| {
            self.units.note(hint, scope, index / Self::PER_UNIT);
            self.fetch(scope, index).await
        };
        scope.fetch_streaming(look).await
    }

    /// Returns the element like [`FarVec::get_mut`], for a task: other tasks run while the element
    /// is fetched.
    pub async fn fetch_mut<'a>(
        &'a mut self,
        scope: &'a Scope<'_>,
        index: usize,
    ) -> Result<Option<&'a mut T>, FarError> {
        if index >= self.len {
            return Ok(None);
        }
        let address = scope.retry(|| self.element(scope, index, AccessMode::Write)).await?;
        // SAFETY: as in `get_mut`; `retry` has marked the scope as used.
        Ok(Some(unsafe { &mut *address }))
    }

    /// Returns the element with this index, as `vec[index]`.
    ///
    /// # Panics
    /// If the index is out of bounds.
    #[inline]
    pub fn at<'a>(&'a self, scope: &'a Scope<'_>, index: usize) -> Result<&'a T, FarError> {
        self.check(index);
        self.get(scope, index).map(|element| element.unwrap_or_else(|| unreachable!("checked")))
    }

    /// Returns the element with this index, to be changed, as `&mut vec[index]`.
    ///
    /// # Panics
    /// If the index is out of bounds.
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

    /// Appends an element at the end.
    #[inline]
    pub fn push(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        let _brief = scope.begin_transient();
        let (unit, within) = (self.len / Self::PER_UNIT, self.len % Self::PER_UNIT);
        let made = unit < self.units.made();
        let address = if made { self.units.unit(scope, unit, AccessMode::Write) } else { self.units.make(scope) };
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

    /// Takes the last element out, if there is one.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        let Some(last) = self.len.checked_sub(1) else { return Ok(None) };
        let _brief = scope.begin_transient();
        let address = self.element(scope, last, AccessMode::Read)?;
        // SAFETY: initialised and near; not an element any more from the next line on.
        let value = unsafe { address.read() };
        self.len = last;
        self.trim();
        Ok(Some(value))
    }

    /// Replaces the element with this index. Returns the old one.
    ///
    /// # Panics
    /// If the index is out of bounds.
    pub fn set(&mut self, scope: &Scope<'_>, index: usize, value: T) -> Result<T, AllocError<T>> {
        match self.at_mut(scope, index) {
            Ok(element) => Ok(core::mem::replace(element, value)),
            Err(error) => Err(AllocError { error, value }),
        }
    }

    /// Swaps two elements.
    ///
    /// # Panics
    /// If the index is out of bounds.
    pub fn swap(&mut self, scope: &Scope<'_>, one: usize, other: usize) -> Result<(), FarError> {
        self.check(one);
        self.check(other);
        let _both = scope.hold();
        let one = self.element(scope, one, AccessMode::Write)?;
        let other = self.element(scope, other, AccessMode::Write)?;
        // SAFETY: both are elements, near and ours alone; the scope is held, so the first is still there.
        unsafe { one.swap(other) };
        Ok(())
    }

    /// Inserts an element at this index. The elements from there on move by one, through all pages
    /// up to the end.
    ///
    /// If it fails, nothing has changed. But if the pool fails again while the elements are moved
    /// back, the value given back is another element, which found no place.
    ///
    /// # Panics
    /// If the index is beyond the end.
    pub fn insert(&mut self, scope: &Scope<'_>, index: usize, value: T) -> Result<(), AllocError<T>> {
        assert!(index <= self.len, "insertion index (is {index}) should be <= len (is {})", self.len);
        let brief = scope.begin_transient();
        if self.len / Self::PER_UNIT == self.units.made()
            && let Err(error) = self.units.make(scope)
        {
            return Err(AllocError { error, value });
        }
        drop(brief);
        let mut carry = MaybeUninit::new(value);
        match self.units.shift_to_end(scope, index..=self.len, &mut carry) {
            // The last slot was free, so no element came out.
            Ok(()) => self.len += 1,
            // SAFETY: the value or an element, as it says.
            Err(stuck) => return Err(AllocError { error: stuck.error, value: unsafe { carry.assume_init() } }),
        }
        Ok(())
    }

    /// Removes an element. The elements behind it move by one, through all pages up to the end.
    ///
    /// If it fails, nothing has changed. But if the pool fails again while the elements are moved
    /// back, another element is dropped.
    ///
    /// # Panics
    /// If the index is out of bounds.
    pub fn remove(&mut self, scope: &Scope<'_>, index: usize) -> Result<T, FarError> {
        assert!(index < self.len, "removal index (is {index}) should be < len (is {})", self.len);
        let mut carry = MaybeUninit::uninit();
        let moved = self.units.shift_to_start(scope, index..=self.len - 1, &mut carry);
        if let Err(ShiftError { error, restored: true }) = moved {
            return Err(error);
        }
        self.len -= 1;
        self.trim();
        // SAFETY: what was at `index`, or the element that found no place.
        let value = unsafe { carry.assume_init() };
        moved.map(|()| value).map_err(|stuck| stuck.error)
    }

    /// Removes an element. The last one moves into its place.
    ///
    /// # Panics
    /// If the index is out of bounds.
    pub fn swap_remove(&mut self, scope: &Scope<'_>, index: usize) -> Result<T, FarError> {
        assert!(index < self.len, "swap_remove index (is {index}) should be < len (is {})", self.len);
        let _both = scope.hold();
        let element = self.element(scope, index, AccessMode::Write)?;
        let last = self.element(scope, self.len - 1, AccessMode::Read)?;
        // SAFETY: both are elements, near and ours alone; the scope is held, so the first is still
        // there. The last one is none from the next line on, and its value is where the other was.
        let value = unsafe {
            let value = element.read();
            element.copy_from(last, 1);
            value
        };
        self.len -= 1;
        self.trim();
        Ok(value)
    }

    /// Appends the elements of an iterator. If it fails, those before the value given back have
    /// been appended.
    pub fn extend(&mut self, scope: &Scope<'_>, values: impl IntoIterator<Item = T>) -> Result<(), AllocError<T>> {
        values.into_iter().try_for_each(|value| self.push(scope, value))
    }

    /// Appends copies of these elements. If it fails, some of them have been appended.
    pub fn extend_from_slice(&mut self, scope: &Scope<'_>, values: &[T]) -> Result<(), FarError>
    where
        T: Clone,
    {
        let mut values = values;
        while !values.is_empty() {
            let (unit, within) = (self.len / Self::PER_UNIT, self.len % Self::PER_UNIT);
            let made = unit < self.units.made();
            // The scope is not renewed while the values are cloned, by whatever code does that.
            let _held = scope.hold();
            let address = if made { self.units.unit(scope, unit, AccessMode::Write) } else { self.units.make(scope) }?;
            let (now, later) = values.split_at(values.len().min(Self::PER_UNIT - within));
            for (index, value) in now.iter().enumerate() {
                // SAFETY: within the unit, near and ours alone; no element lives there.
                unsafe { address.add(within + index).write(value.clone()) };
            }
            self.len += now.len();
            values = later;
        }
        Ok(())
    }

    /// Drops all elements from this index on, the last pages first. Their far memory is given back.
    /// If it fails, those elements are left that could not be brought near for their destructor.
    pub fn truncate(&mut self, scope: &Scope<'_>, len: usize) -> Result<(), FarError> {
        while core::mem::needs_drop::<T>() && self.len > len {
            let unit = (self.len - 1) / Self::PER_UNIT;
            let first = len.max(unit * Self::PER_UNIT);
            let count = self.len - first;
            let brief = scope.begin_transient();
            let address = self.units.unit(scope, unit, AccessMode::Read)?;
            let mut taken: Vec<T> = Vec::with_capacity(count);
            // SAFETY: initialised elements, near; `taken` has room for them and owns them from here
            // on, because they are beyond the length before any destructor runs.
            unsafe {
                let source = address.add(first % Self::PER_UNIT);
                taken.as_mut_ptr().copy_from_nonoverlapping(source, count);
                taken.set_len(count);
            }
            drop(brief);
            self.len = first;
        }
        self.len = self.len.min(len);
        self.trim();
        Ok(())
    }

    /// Drops all elements. Their far memory is given back.
    pub fn clear(&mut self) {
        let mode = self.prefetch_mode();
        drop(core::mem::take(self));
        self.set_prefetch(mode);
    }

    /// Shortens the vector to this length, or appends copies of `value` up to it.
    pub fn resize(&mut self, scope: &Scope<'_>, len: usize, value: T) -> Result<(), FarError>
    where
        T: Clone,
    {
        self.truncate(scope, len)?;
        while self.len < len {
            self.push(scope, value.clone())?;
        }
        Ok(())
    }

    /// Iterates over the elements in order. All that it has passed stays near as long as the scope
    /// lasts; for long vectors there is [`FarVec::scan`].
    pub fn iter<'a>(&'a self, scope: &'a Scope<'_>) -> Iter<'a, T> {
        Iter::new(self.chunks(scope))
    }

    /// Iterates over the elements in order, to change them. For long vectors there is
    /// [`FarVec::scan_mut`].
    pub fn iter_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> IterMut<'a, T> {
        IterMut::new(self.chunks_mut(scope))
    }

    /// Iterates over slices that together are all elements, in order. This takes one check for each
    /// page and none for its elements. The length of a slice depends on how pages lie near. All
    /// slices but the first and last have at least the elements of a page.
    pub fn chunks<'a>(&'a self, scope: &'a Scope<'_>) -> Chunks<'a, T> {
        self.chunks_in(scope, ..)
    }

    /// Iterates over slices that together are the elements of a range: see [`FarVec::chunks`].
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn chunks_in<'a>(&'a self, scope: &'a Scope<'_>, range: impl RangeBounds<usize>) -> Chunks<'a, T> {
        Chunks::new(&self.units, scope, range_of(range, self.len))
    }

    /// Iterates over slices that together are all elements, in order, to change them.
    pub fn chunks_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> ChunksMut<'a, T> {
        self.chunks_mut_in(scope, ..)
    }

    /// Iterates over slices that together are the elements of a range, to change them: see
    /// [`FarVec::chunks`].
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn chunks_mut_in<'a>(&'a mut self, scope: &'a Scope<'_>, range: impl RangeBounds<usize>) -> ChunksMut<'a, T> {
        let range = range_of(range, self.len);
        ChunksMut::new(&mut self.units, scope, range)
    }

    /// Walks through all elements, however many, in chunks of which one at a time is held near.
    pub fn scan<'a, 'heap>(&'a self, scope: &'a mut Scope<'heap>) -> Scan<'a, 'heap, T> {
        self.scan_in(scope, ..)
    }

    /// Walks through the elements of a range, however many: see [`FarVec::scan`].
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn scan_in<'a, 'heap>(
        &'a self,
        scope: &'a mut Scope<'heap>,
        range: impl RangeBounds<usize>,
    ) -> Scan<'a, 'heap, T> {
        Scan::new(&self.units, scope, range_of(range, self.len))
    }

    /// Walks through all elements, however many, to change them: see [`FarVec::scan`].
    pub fn scan_mut<'a, 'heap>(&'a mut self, scope: &'a mut Scope<'heap>) -> ScanMut<'a, 'heap, T> {
        self.scan_mut_in(scope, ..)
    }

    /// Walks through the elements of a range, however many, to change them: see [`FarVec::scan`].
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn scan_mut_in<'a, 'heap>(
        &'a mut self,
        scope: &'a mut Scope<'heap>,
        range: impl RangeBounds<usize>,
    ) -> ScanMut<'a, 'heap, T> {
        let range = range_of(range, self.len);
        ScanMut::new(&mut self.units, scope, range)
    }

    /// Begins to bring elements near that will be needed soon, and does not wait. Returns the
    /// number of pages (or large elements) that are on their way now and were not before. This is a
    /// hint: elements for which there is no room are passed over.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn will_need(&self, scope: &Scope<'_>, range: impl RangeBounds<usize>) -> usize {
        self.units.prefetch(scope, self.units_of(range))
    }

    /// Sets what this vector fetches ahead of need, from now on: what its walks show
    /// ([`PrefetchMode::Auto`], the default), nothing, or the elements of a fixed pattern.
    ///
    /// With [`PrefetchMode::Off`], each page is fetched when it is needed. With
    /// [`PrefetchMode::Static`], a walk that comes to a page of the pattern fetches the next pages
    /// of the pattern ahead: at most 64 pages (or large elements), and fewer in a small near memory.
    /// Pages without an element of the pattern are fetched when they are needed. A prefetch is a
    /// hint in each mode: pages for which there is no room are passed over.
    ///
    /// The mode is the vector's and not its elements': they may go, and copies and parts of the
    /// vector have a mode of their own. Other hints ([`FarVec::will_need`]) work in each mode.
    ///
    /// ```
    /// use farfield::{FarVec, Heap, PrefetchMode};
    ///
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let mut table = FarVec::new();
    /// table.extend(&heap.enter(), 0..2_000_000u64)?;
    /// // Every 1000th number, from the end to the beginning.
    /// table.set_prefetch(PrefetchMode::Static { start: 1_999_000, step: -1000, count: 2000 });
    /// let sum = (0..2000).rev().map(|n| table.read(n * 1000, |number| *number)).sum::<Result<Option<u64>, _>>()?;
    /// assert_eq!(sum, Some(1_999_000_000));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_prefetch(&mut self, mode: PrefetchMode) {
        self.units.set_prefetch_mode(mode);
    }

    /// Returns what this vector fetches ahead of need.
    pub fn prefetch_mode(&self) -> PrefetchMode {
        self.units.prefetch_mode()
    }

    /// Marks elements as not needed soon: their pages are evicted before others.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn cold(&self, scope: &Scope<'_>, range: impl RangeBounds<usize>) {
        self.units.mark_evict_first(scope, self.units_of(range));
    }

    /// Returns where these elements lie in the heap's region, for another reader of the region
    /// ([`Heap::write_back`](crate::Heap::write_back)). Ranges are in order, one for each page, or
    /// for each element that is larger than a page.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn far_ranges(&self, range: impl RangeBounds<usize>) -> impl Iterator<Item = FarRange> {
        let range = range_of(range, self.len);
        (range.start / Self::PER_UNIT..range.end.div_ceil(Self::PER_UNIT)).map(move |unit| {
            let first = unit * Self::PER_UNIT;
            let elements = range.start.max(first) - first..range.end.min(first + Self::PER_UNIT) - first;
            self.units.far_range(unit, elements)
        })
    }

    #[track_caller]
    fn units_of(&self, range: impl RangeBounds<usize>) -> Range<usize> {
        let range = range_of(range, self.len);
        range.start / Self::PER_UNIT..range.end.div_ceil(Self::PER_UNIT)
    }

    /// Gives units without elements back, but for one: alternating pushes and pops shall not make a
    /// page each time.
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
