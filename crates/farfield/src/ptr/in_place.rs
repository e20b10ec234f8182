//! Values that are built where they stay, so that they may be larger than the stack.
//!
//! The idea is placement by a token: whoever builds gets the empty place ([`Uninit`]), and has to return
//! the filled one ([`Init`]). The lifetime of both is a brand, which each place has for itself, so a
//! filled place proves that its own empty one was filled (GhostCell, ICFP'21, has such brands).

use crate::error::FarError;
use core::marker::PhantomData;
use core::mem::forget;
use core::ops::{Deref, DerefMut};

/// Lifetime that is equal to no other one.
type Brand<'p> = PhantomData<fn(&'p ()) -> &'p ()>;

/// The place of a value in near memory, which has none yet: see [`Heap::alloc_with`](crate::Heap::alloc_with).
///
/// A plain value is [written](Uninit::write) there. An array is built by [`Uninit::each`], an element at a
/// time, and a struct by [`fields!`](crate::fields), a field at a time, each in its own place.
pub struct Uninit<'p, T> {
    at: *mut T,
    brand: Brand<'p>,
}

/// The place of a value in near memory that has been built, and owns the value: it can be read and
/// changed, and is dropped with this.
pub struct Init<'p, T> {
    at: *mut T,
    brand: Brand<'p>,
}

/// The place of one field, for [`fields!`](crate::fields).
#[doc(hidden)]
pub struct UninitField<F>(*mut F);

impl<'p, T> Uninit<'p, T> {
    /// # Safety
    /// The place is valid for writes of a `T`, aligned, and nobody else's, as long as `'p` lasts; no other
    /// place has this `'p`.
    unsafe fn new(at: *mut T) -> Uninit<'p, T> {
        Uninit { at, brand: PhantomData }
    }

    /// Moves a value into the place. The value passes the stack.
    #[inline]
    pub fn write(self, value: T) -> Init<'p, T> {
        // SAFETY: the place is valid, aligned and ours (`new`).
        unsafe { self.at.write(value) };
        Init { at: self.at, brand: PhantomData }
    }

    /// Checks that a pattern names all fields of a `T`, and returns where that lies.
    #[doc(hidden)]
    pub fn fields(&self, _names_all: fn(&T)) -> *mut T {
        self.at
    }

    /// Returns what builds a field, which has to take any place: so the compiler infers its type.
    #[doc(hidden)]
    pub fn builder<F, B>(&self, _field: fn(&T) -> &F, build: B) -> B
    where
        B: for<'f> FnOnce(Uninit<'f, F>) -> Result<Init<'f, F>, FarError>,
    {
        build
    }

    /// # Safety
    /// All fields of the value have been built, and nobody drops them.
    #[doc(hidden)]
    pub unsafe fn assume_init(self) -> Init<'p, T> {
        Init { at: self.at, brand: PhantomData }
    }
}

impl<'p, T, const N: usize> Uninit<'p, [T; N]> {
    /// Builds an array, an element at a time: `build` is called with each index, in order, and the place
    /// of that element. If it fails or panics, the elements that it has built are dropped.
    #[inline]
    pub fn each(
        self,
        mut build: impl for<'e> FnMut(usize, Uninit<'e, T>) -> Result<Init<'e, T>, FarError>,
    ) -> Result<Init<'p, [T; N]>, FarError> {
        let mut built = BuiltElements { first: self.at.cast::<T>(), count: 0 };
        for index in 0..N {
            // SAFETY: an element of the array, which is valid, aligned and ours; the brand is the
            // closure's, which gets another one at each call.
            forget(build(index, unsafe { Uninit::new(built.first.add(index)) })?);
            built.count += 1;
        }
        forget(built);
        Ok(Init { at: self.at, brand: PhantomData })
    }
}

impl<F> UninitField<F> {
    /// # Safety
    /// The place is valid for writes of an `F`, aligned, and nobody else's, as long as this and what it
    /// builds last.
    pub unsafe fn new(at: *mut F) -> UninitField<F> {
        UninitField(at)
    }

    /// Builds the field. It is dropped with the result.
    pub fn build<'p>(
        self,
        build: impl for<'f> FnOnce(Uninit<'f, F>) -> Result<Init<'f, F>, FarError>,
    ) -> Result<Init<'p, F>, FarError> {
        // SAFETY: by `new`; the brand is the closure's.
        forget(build(unsafe { Uninit::new(self.0) })?);
        Ok(Init { at: self.0, brand: PhantomData })
    }
}

impl<T> Deref for Init<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: a `T` was built there, which `self` owns.
        unsafe { &*self.at }
    }
}

impl<T> DerefMut for Init<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `&mut self` makes it exclusive.
        unsafe { &mut *self.at }
    }
}

impl<T> Drop for Init<'_, T> {
    fn drop(&mut self) {
        // SAFETY: as in `deref`; nobody uses it after this.
        unsafe { self.at.drop_in_place() };
    }
}

/// The elements of an array that is being built. They are dropped if the next one cannot be built.
struct BuiltElements<T> {
    first: *mut T,
    count: usize,
}

impl<T> Drop for BuiltElements<T> {
    fn drop(&mut self) {
        // SAFETY: so many elements were built there, and are ours.
        unsafe { core::ptr::slice_from_raw_parts_mut(self.first, self.count).drop_in_place() };
    }
}

/// Calls `build` with a place. Returns when a `T` is there, which belongs to the caller.
///
/// # Safety
/// The place is valid for writes of a `T`, aligned, and nobody else's during the call.
pub(super) unsafe fn build_at<T>(
    at: *mut T,
    build: impl for<'p> FnOnce(Uninit<'p, T>) -> Result<Init<'p, T>, FarError>,
) -> Result<(), FarError> {
    // SAFETY: as the caller promises; the brand is the closure's.
    build(unsafe { Uninit::new(at) }).map(forget)
}

/// Builds a struct in its place ([`Uninit`]), each field by a closure that gets the place of that field:
/// see [`Heap::alloc_with`](crate::Heap::alloc_with). The result is that of the first closure that fails,
/// or the filled place.
///
/// All fields are named, and built in the order of the expression. If a closure fails or panics, the
/// fields that are built already are dropped.
///
/// ```compile_fail,E0027
/// struct Table {
///     head: u64,
///     cells: [u64; 400_000],
/// }
/// # let heap = farfield::Heap::builder().near(16 << 20).build().unwrap();
/// let table = heap.alloc_with(|place| {
///     // error: pattern does not mention field `head`
///     farfield::fields!(place, Table { cells: |place| place.each(|at, place| Ok(place.write(at as u64))) })
/// });
/// ```
///
/// What returns instead of naming a closure leaves the function around it, which has to return a place:
///
/// ```compile_fail,E0308
/// # struct Pair { first: u64, second: u64 }
/// # let heap = farfield::Heap::builder().near(16 << 20).build().unwrap();
/// let pair = heap.alloc_with(|place| {
///     // error: expected `Init`, found `()`
///     farfield::fields!(place, Pair { first: |place| Ok(place.write(1)), second: return Ok(()) })
/// });
/// ```
///
/// A packed struct has fields that are not aligned:
///
/// ```compile_fail,E0793
/// #[repr(packed)]
/// struct Table {
///     head: u8,
///     cells: [u64; 400_000],
/// }
/// # let heap = farfield::Heap::builder().near(16 << 20).build().unwrap();
/// let table = heap.alloc_with(|place| {
///     farfield::fields!(place, Table { // error: reference to field of packed struct is unaligned
///         head: |place| Ok(place.write(1)),
///         cells: |place| place.each(|at, place| Ok(place.write(at as u64))),
///     })
/// });
/// ```
#[macro_export]
macro_rules! fields {
    ($place:expr, $name:path { $($field:ident: $build:expr),+ $(,)? }) => {{
        let place = $place;
        let at = place.fields(|value| {
            let $name { $($field),+ } = value;
            $(let _ = $field;)+
        });
        // They come first, so that one that returns or breaks leaves nothing that counts as built.
        let ($($field,)+) = ($(place.builder(|value| &value.$field, $build),)+);
        let build = || {
            let built = ();
            $(
                // SAFETY: a field of the value, which lies as a whole in a place that is valid and nobody
                // else's. It is aligned, because a reference to it was formed above.
                let field = unsafe { $crate::UninitField::new(&raw mut (*at).$field) };
                let built = (built, field.build($field)?);
            )+
            ::core::mem::forget(built);
            ::core::result::Result::Ok::<_, $crate::FarError>(())
        };
        // SAFETY: all fields have been built, and were forgotten.
        build().map(|()| unsafe { place.assume_init() })
    }};
}
