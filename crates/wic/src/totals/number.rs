//! Plain numbers, as they lie in far memory.

use super::exact::ExactSum;
use crate::columns::Kind;
use core::fmt::Debug;
use serde::Serialize;
use serde::de::DeserializeOwned;

// A near number and its far bytes are the same bytes.
const _: () = assert!(cfg!(target_endian = "little"), "numbers in far memory are little-endian");

/// A number whose bytes functions understand: an integer of up to 64 bits, `f32` or `f64`.
pub trait Number: Copy + PartialOrd + Debug + Serialize + DeserializeOwned + Send + Sync + Sealed + 'static {
    /// Name of the function that adds numbers up.
    #[doc(hidden)]
    const TOTALS: &'static str;
    /// Name of the function that adds numbers up by keys.
    #[doc(hidden)]
    const GROUP: &'static str;
    /// Name of the function that aggregates what formulas make of numbers.
    #[doc(hidden)]
    const COMPUTE: &'static str;
    /// Name of the function that computes columns of numbers.
    #[doc(hidden)]
    const COLUMN: &'static str;
    /// Name of the function that counts numbers by value.
    #[doc(hidden)]
    const RANKS: &'static str;
    /// Name of the function that finds the numbers in a range of values.
    #[doc(hidden)]
    const FIND: &'static str;
    /// Type of the numbers.
    #[doc(hidden)]
    const KIND: Kind;
    /// Type of a sum: `i128`, `u128` or `f64`. Sums are exact; for floating-point numbers, the
    /// exact sum is rounded once.
    type Sum: Copy + PartialEq + Debug;
    /// Partial sum, which is not rounded.
    #[doc(hidden)]
    type Part: Clone + Default + PartialEq + Debug + Serialize + DeserializeOwned + Send;

    #[doc(hidden)]
    fn add(self, part: &mut Self::Part);
    /// Adds many numbers to a partial sum.
    #[doc(hidden)]
    fn add_all(numbers: &[Self], part: &mut Self::Part) {
        numbers.iter().for_each(|number| number.add(part));
    }
    /// Returns the smallest and the largest number among those that have a place in the order.
    #[doc(hidden)]
    fn edges(numbers: &[Self]) -> Option<(Self, Self)> {
        let images = || numbers.iter().map(|number| number.image());
        Some((Self::of_image(images().min()?), Self::of_image(images().max()?)))
    }
    #[doc(hidden)]
    fn merge(part: &mut Self::Part, other: &Self::Part);
    #[doc(hidden)]
    fn sum(part: &Self::Part) -> Self::Sum;
    #[doc(hidden)]
    fn mean(sum: Self::Sum, count: u64) -> f64;
    /// Checks whether the number has a place in the order, as all but NaN have.
    #[doc(hidden)]
    fn is_ordered(self) -> bool;
    /// Checks whether the number comes before the other; −0 comes before +0.
    #[doc(hidden)]
    fn is_before(self, other: Self) -> bool;
    /// Returns the number's bits as a word, such that words are ordered as numbers are: −0 before
    /// +0. The images of NaN lie outside of those of all other numbers.
    #[doc(hidden)]
    fn image(self) -> u64;
    /// Returns the number with this image.
    #[doc(hidden)]
    fn of_image(image: u64) -> Self;
    /// Image of the smallest number.
    #[doc(hidden)]
    const FIRST: u64;
    /// Returns a word that is ordered as numbers are when they are sorted: as the image, but NaN
    /// comes behind all others.
    #[doc(hidden)]
    #[inline]
    fn rank(self) -> u64 {
        self.image().wrapping_sub(Self::FIRST) & (u64::MAX >> (u64::BITS - 8 * size_of::<Self>() as u32))
    }
    /// Returns the number with this rank.
    #[doc(hidden)]
    #[inline]
    fn of_rank(rank: u64) -> Self {
        Self::of_image(rank.wrapping_add(Self::FIRST) & (u64::MAX >> (u64::BITS - 8 * size_of::<Self>() as u32)))
    }
    /// Calls `work` with each of the numbers that lie side by side in `bytes`.
    #[doc(hidden)]
    fn each(bytes: &[u8], work: impl FnMut(Self));
    /// Appends the number's bytes to `into`.
    #[doc(hidden)]
    fn put(self, into: &mut Vec<u8>);
    /// Writes the numbers of this kind with these images to `into`, in this type (as by `as`).
    #[doc(hidden)]
    fn cast_images(kind: Kind, images: &[u64], into: &mut Vec<Self>);
    /// Returns the sum of two numbers. Whole numbers wrap around.
    #[doc(hidden)]
    fn plus(self, other: Self) -> Self;
    /// Returns the difference of two numbers. Whole numbers wrap around.
    #[doc(hidden)]
    fn minus(self, other: Self) -> Self;
    /// Returns the product of two numbers. Whole numbers wrap around.
    #[doc(hidden)]
    fn times(self, other: Self) -> Self;
}

/// Implements `cast_images`.
macro_rules! cast_images {
    ($number:ty) => {
        fn cast_images(kind: Kind, images: &[u64], into: &mut Vec<$number>) {
            fn cast<N: Number>(images: &[u64], into: &mut Vec<$number>, cast: impl Fn(N) -> $number) {
                into.extend(images.iter().map(|image| cast(N::of_image(*image))));
            }
            into.clear();
            match kind {
                Kind::U8 => cast::<u8>(images, into, |number| number as $number),
                Kind::U16 => cast::<u16>(images, into, |number| number as $number),
                Kind::U32 => cast::<u32>(images, into, |number| number as $number),
                Kind::U64 => cast::<u64>(images, into, |number| number as $number),
                Kind::I8 => cast::<i8>(images, into, |number| number as $number),
                Kind::I16 => cast::<i16>(images, into, |number| number as $number),
                Kind::I32 => cast::<i32>(images, into, |number| number as $number),
                Kind::I64 => cast::<i64>(images, into, |number| number as $number),
                Kind::F32 => cast::<f32>(images, into, |number| number as $number),
                Kind::F64 => cast::<f64>(images, into, |number| number as $number),
            }
        }
    };
}

#[expect(unnameable_types, reason = "nobody else shall implement them")]
mod sealed {
    /// Seals [`Number`](super::Number): only this module defines what the bytes of a number mean.
    pub trait Sealed {}
}
use sealed::Sealed;

macro_rules! integers {
    ($($number:ty => $sum:ty, $name:literal, $kind:ident, $bits:ty, $flip:expr;)*) => {$(
        impl Sealed for $number {}
        impl Number for $number {
            const TOTALS: &'static str = concat!("ff.totals.", $name);
            const GROUP: &'static str = concat!("ff.group.", $name);
            const COMPUTE: &'static str = concat!("ff.compute.", $name);
            const COLUMN: &'static str = concat!("ff.column.", $name);
            const RANKS: &'static str = concat!("ff.ranks.", $name);
            const FIND: &'static str = concat!("ff.find.", $name);
            const KIND: Kind = Kind::$kind;
            const FIRST: u64 = 0;
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
            fn image(self) -> u64 {
                u64::from(self as $bits ^ $flip)
            }
            #[inline]
            fn of_image(image: u64) -> $number {
                (image as $bits ^ $flip) as $number
            }
            #[inline]
            fn put(self, into: &mut Vec<u8>) {
                into.extend(self.to_le_bytes());
            }
            cast_images!($number);
            #[inline]
            fn plus(self, other: $number) -> $number {
                self.wrapping_add(other)
            }
            #[inline]
            fn minus(self, other: $number) -> $number {
                self.wrapping_sub(other)
            }
            #[inline]
            fn times(self, other: $number) -> $number {
                self.wrapping_mul(other)
            }
            #[inline]
            fn each(bytes: &[u8], mut work: impl FnMut(Self)) {
                bytes.as_chunks().0.iter().for_each(|bytes| work(<$number>::from_le_bytes(*bytes)));
            }
        }
    )*};
}

integers! {
    u8 => u128, "u8", U8, u8, 0;
    u16 => u128, "u16", U16, u16, 0;
    u32 => u128, "u32", U32, u32, 0;
    u64 => u128, "u64", U64, u64, 0;
    i8 => i128, "i8", I8, u8, 1 << 7;
    i16 => i128, "i16", I16, u16, 1 << 15;
    i32 => i128, "i32", I32, u32, 1 << 31;
    i64 => i128, "i64", I64, u64, 1 << 63;
}

macro_rules! floats {
    ($($number:ty, $name:literal, $kind:ident, $bits:ty;)*) => {$(
        impl Sealed for $number {}
        impl Number for $number {
            const TOTALS: &'static str = concat!("ff.totals.", $name);
            const GROUP: &'static str = concat!("ff.group.", $name);
            const COMPUTE: &'static str = concat!("ff.compute.", $name);
            const COLUMN: &'static str = concat!("ff.column.", $name);
            const RANKS: &'static str = concat!("ff.ranks.", $name);
            const FIND: &'static str = concat!("ff.find.", $name);
            const KIND: Kind = Kind::$kind;
            const FIRST: u64 = !<$number>::NEG_INFINITY.to_bits() as u64;
            type Sum = f64;
            type Part = ExactSum;

            #[inline]
            fn add(self, part: &mut ExactSum) {
                part.add(f64::from(self));
            }
            fn add_all(numbers: &[$number], part: &mut ExactSum) {
                match numbers.len() {
                    // So few numbers take longer together than one by one.
                    ..128 => numbers.iter().for_each(|number| number.add(part)),
                    _ => part.add_all(numbers.iter().copied().map(f64::from)),
                }
            }
            fn edges(numbers: &[$number]) -> Option<($number, $number)> {
                const LANES: usize = 8;
                let (mut least, mut most) = ([<$number>::INFINITY; LANES], [<$number>::NEG_INFINITY; LANES]);
                // NaN is neither less nor more.
                let (side_by_side, others) = numbers.as_chunks::<LANES>();
                for numbers in side_by_side {
                    for lane in 0..LANES {
                        least[lane] = if numbers[lane] < least[lane] { numbers[lane] } else { least[lane] };
                        most[lane] = if numbers[lane] > most[lane] { numbers[lane] } else { most[lane] };
                    }
                }
                let mut least = least.into_iter().fold(<$number>::INFINITY, <$number>::min);
                let mut most = most.into_iter().fold(<$number>::NEG_INFINITY, <$number>::max);
                for number in others {
                    (least, most) = (least.min(*number), most.max(*number));
                }
                // Zeros of both signs are equal.
                let has = |bits: $bits| numbers.iter().any(|number| number.to_bits() == bits);
                let least = if least == 0.0 && has(1 << (<$bits>::BITS - 1)) { -0.0 } else { least };
                let most = if most == 0.0 && !has(0) { -0.0 } else { most };
                (least <= most).then_some((least, most))
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
            fn image(self) -> u64 {
                let (bits, sign) = (self.to_bits(), 1 << (<$bits>::BITS - 1));
                u64::from(if bits & sign == 0 { bits | sign } else { !bits })
            }
            #[inline]
            fn of_image(image: u64) -> $number {
                let (image, sign) = (image as $bits, 1 << (<$bits>::BITS - 1));
                <$number>::from_bits(if image & sign == 0 { !image } else { image ^ sign })
            }
            #[inline]
            fn put(self, into: &mut Vec<u8>) {
                into.extend(self.to_le_bytes());
            }
            cast_images!($number);
            #[inline]
            fn plus(self, other: $number) -> $number {
                self + other
            }
            #[inline]
            fn minus(self, other: $number) -> $number {
                self - other
            }
            #[inline]
            fn times(self, other: $number) -> $number {
                self * other
            }
            #[inline]
            fn each(bytes: &[u8], mut work: impl FnMut(Self)) {
                bytes.as_chunks().0.iter().for_each(|bytes| work(<$number>::from_le_bytes(*bytes)));
            }
        }
    )*};
}

floats! {
    f32, "f32", F32, u32;
    f64, "f64", F64, u64;
}
