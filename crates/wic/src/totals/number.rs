//! Plain numbers, as far memory has them.

use super::exact::ExactSum;
use core::fmt::Debug;
use serde::Serialize;
use serde::de::DeserializeOwned;

// A near number and its far bytes are the same bytes.
const _: () = assert!(cfg!(target_endian = "little"), "numbers in far memory are little-endian");

/// A number whose bytes functions understand: an integer of up to 64 bits, `f32` or `f64`.
pub trait Number: Copy + PartialOrd + Debug + Serialize + DeserializeOwned + Send + Sync + Sealed + 'static {
    /// Of the function that adds them up.
    #[doc(hidden)]
    const TOTALS: &'static str;
    /// What a sum of them is: `i128`, `u128` or `f64`. Sums are exact; of floating-point numbers, the exact sum rounded once.
    type Sum: Copy + PartialEq + Debug;
    /// A sum that is not finished.
    #[doc(hidden)]
    type Part: Clone + Default + PartialEq + Debug + Serialize + DeserializeOwned;

    #[doc(hidden)]
    fn add(self, part: &mut Self::Part);
    #[doc(hidden)]
    fn merge(part: &mut Self::Part, other: &Self::Part);
    #[doc(hidden)]
    fn sum(part: &Self::Part) -> Self::Sum;
    #[doc(hidden)]
    fn mean(sum: Self::Sum, count: u64) -> f64;
    /// Has it a place in the order? All but NaN.
    #[doc(hidden)]
    fn is_ordered(self) -> bool;
    /// Does it come before the other? −0 does before +0.
    #[doc(hidden)]
    fn is_before(self, other: Self) -> bool;
    /// Numbers side by side.
    #[doc(hidden)]
    fn each(bytes: &[u8], work: impl FnMut(Self));
}

mod sealed {
    /// Nobody else can say what the bytes of a number mean.
    pub trait Sealed {}
}
use sealed::Sealed;

macro_rules! integers {
    ($($number:ty => $sum:ty, $name:literal;)*) => {$(
        impl Sealed for $number {}
        impl Number for $number {
            const TOTALS: &'static str = $name;
            type Sum = $sum;
            type Part = $sum;

            #[inline]
            fn add(self, part: &mut $sum) {
                *part += <$sum>::from(self);
            }
            fn merge(part: &mut $sum, other: &$sum) {
                *part = part.wrapping_add(*other);
            }
            fn sum(part: &$sum) -> $sum {
                *part
            }
            fn mean(sum: $sum, count: u64) -> f64 {
                sum as f64 / count as f64
            }
            #[inline]
            fn is_ordered(self) -> bool {
                true
            }
            #[inline]
            fn is_before(self, other: Self) -> bool {
                self < other
            }
            #[inline]
            fn each(bytes: &[u8], mut work: impl FnMut(Self)) {
                bytes.as_chunks().0.iter().for_each(|bytes| work(<$number>::from_le_bytes(*bytes)));
            }
        }
    )*};
}

integers! {
    u8 => u128, "ff.totals.u8";
    u16 => u128, "ff.totals.u16";
    u32 => u128, "ff.totals.u32";
    u64 => u128, "ff.totals.u64";
    i8 => i128, "ff.totals.i8";
    i16 => i128, "ff.totals.i16";
    i32 => i128, "ff.totals.i32";
    i64 => i128, "ff.totals.i64";
}

macro_rules! floats {
    ($($number:ty, $name:literal;)*) => {$(
        impl Sealed for $number {}
        impl Number for $number {
            const TOTALS: &'static str = $name;
            type Sum = f64;
            type Part = ExactSum;

            #[inline]
            fn add(self, part: &mut ExactSum) {
                part.add(f64::from(self));
            }
            fn merge(part: &mut ExactSum, other: &ExactSum) {
                part.merge(other);
            }
            fn sum(part: &ExactSum) -> f64 {
                part.rounded()
            }
            fn mean(sum: f64, count: u64) -> f64 {
                sum / count as f64
            }
            #[inline]
            fn is_ordered(self) -> bool {
                !self.is_nan()
            }
            #[inline]
            fn is_before(self, other: Self) -> bool {
                self.total_cmp(&other).is_lt()
            }
            #[inline]
            fn each(bytes: &[u8], mut work: impl FnMut(Self)) {
                bytes.as_chunks().0.iter().for_each(|bytes| work(<$number>::from_le_bytes(*bytes)));
            }
        }
    )*};
}

floats! {
    f32, "ff.totals.f32";
    f64, "ff.totals.f64";
}
