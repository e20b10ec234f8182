//! Values that are their bytes.

/// A type whose values are plain bytes (*plain old data*): keys and values of a
/// [`FarFlatMap`](crate::FarFlatMap).
///
/// Integers, floating-point numbers, `()` and arrays of those are `Pod`. A struct of the program's
/// own can be, too:
///
/// ```
/// use farfield::Pod;
///
/// #[derive(Clone, Copy)]
/// #[repr(C)]
/// struct Point {
///     x: f32,
///     y: f32,
/// }
///
/// // SAFETY: two numbers of four bytes, one behind the other, and no padding.
/// unsafe impl Pod for Point {}
/// ```
///
/// # Safety
/// All bytes of a value are initialised, so there is no padding. Any bytes are a value, so `bool`,
/// `char`, references and most enums are not `Pod`. A value has no interior mutability.
pub unsafe trait Pod: Copy + Send + Sync + 'static {}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        // SAFETY: a number has no padding, and any bytes are one.
        unsafe impl Pod for $number {}
    )*};
}

numbers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

// SAFETY: it has no bytes.
unsafe impl Pod for () {}
// SAFETY: elements follow each other without padding, and are `Pod`.
unsafe impl<T: Pod, const N: usize> Pod for [T; N] {}

/// Returns the bytes of a value.
#[inline]
pub(super) fn bytes_of<T: Pod>(value: &T) -> &[u8] {
    // SAFETY: all bytes of the value are initialised, and nobody changes them while it is borrowed (`Pod`).
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Makes a value of its bytes.
///
/// # Panics
/// If they are not as many as a value has.
#[inline]
pub(super) fn from_bytes<T: Pod>(bytes: &[u8]) -> T {
    assert_eq!(bytes.len(), size_of::<T>());
    // SAFETY: there are enough bytes, and any bytes are a value (`Pod`).
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}
