//! The exact sum of floating-point numbers, rounded once at the end.
//!
//! The usual sum of floating-point numbers depends on their order and on where a part of them was
//! added up. Here each number is added as an integer in units of the smallest positive number,
//! 2⁻¹⁰⁷⁴. A fixed-point number of 2,176 bits holds all of them (Kulisch accumulator). So any
//! parts, added anywhere in any order, give the same sum, and it is the correct one.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bits of a limb; its other bits hold carries that are not yet propagated.
const LIMB_BITS: u32 = 32;
/// 2,098 bits for the largest number in units of the smallest, and room for 2⁶⁴ of them.
const LIMBS: usize = 68;
/// Numbers added before carries are propagated: each adds less than 2³² to a limb.
const UNSETTLED_MAX: u32 = 1 << 30;
/// Bits of a significand after its first.
const FRACTION_BITS: u32 = f64::MANTISSA_DIGITS - 1;

const EXPONENT_BITS: u32 = 11;
/// Number of significands of 53 bits that fit in a bin.
const BINNED_MAX: usize = (1 << (u64::BITS - 1 - f64::MANTISSA_DIGITS)) - 1;

/// Number of numbers that are split together. It is below 2 to the power of [`CUT_BITS`], so the
/// sum of this many numbers, and two more, has at most that many bits more than each.
const CUT: usize = 512;
const CUT_BITS: u64 = 10;
const _: () = assert!(CUT + 2 <= 1 << CUT_BITS);
/// Number of times that they are split, by 43 bits each time. Numbers that have a rest then have
/// exponents far apart.
const CUTS: usize = 3;
/// Numbers that the processor works on side by side (SIMD).
const LANES: usize = 8;

/// Splits a finite number into its exponent and its signed significand.
#[inline]
fn taken_apart(number: f64) -> (usize, i64) {
    let bits = number.to_bits();
    let (fraction, exponent) =
        (bits & ((1 << FRACTION_BITS) - 1), (bits >> FRACTION_BITS) as usize & ((1 << EXPONENT_BITS) - 1));
    let significand = if exponent == 0 { fraction } else { fraction | 1 << FRACTION_BITS } as i64;
    (exponent, if number.is_sign_negative() { -significand } else { significand })
}

/// Returns the largest magnitude, if all numbers are finite.
fn largest(numbers: &[f64; CUT]) -> Option<f64> {
    let (mut largest, mut nothing) = ([0.0; LANES], [0.0; LANES]);
    for numbers in numbers.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let magnitude = numbers[lane].abs();
            largest[lane] = if magnitude > largest[lane] { magnitude } else { largest[lane] };
            // An infinity, or NaN, makes the lane NaN.
            nothing[lane] += numbers[lane] * 0.0;
        }
    }
    let is_finite = nothing.iter().all(|nothing| !nothing.is_nan());
    is_finite.then(|| largest.into_iter().fold(0.0, f64::max))
}

/// Takes from each number its multiple of the unit of `at`. Returns the sum of these, which is
/// exact, and the largest magnitude of the rests.
fn cut(numbers: &mut [f64; CUT], at: f64) -> (f64, f64) {
    let (mut sums, mut largest) = ([0.0; LANES], [0.0; LANES]);
    for numbers in numbers.as_chunks_mut::<LANES>().0 {
        for lane in 0..LANES {
            let part = (at + numbers[lane]) - at;
            numbers[lane] -= part;
            sums[lane] += part;
            let rest = numbers[lane].abs();
            largest[lane] = if rest > largest[lane] { rest } else { largest[lane] };
        }
    }
    (sums.iter().sum(), largest.into_iter().fold(0.0, f64::max))
}

/// Exact sum of the numbers added so far.
#[expect(unnameable_types, reason = "the sum of a public trait, which callers only pass on")]
#[derive(Clone, PartialEq, Debug)]
pub struct ExactSum {
    /// Limbs, the lowest first. When settled, all but the last are below 2³², and the last has the
    /// sign.
    limbs: [i64; LIMBS],
    /// Numbers added since the limbs were settled.
    unsettled: u32,
    /// Sum of the infinities and NaNs.
    special: f64,
}

impl Default for ExactSum {
    fn default() -> ExactSum {
        ExactSum { limbs: [0; LIMBS], unsettled: 0, special: 0.0 }
    }
}

impl ExactSum {
    /// Adds a number.
    #[inline]
    pub(crate) fn add(&mut self, number: f64) {
        if !number.is_finite() {
            self.special += number;
            return;
        }
        let (exponent, significand) = taken_apart(number);
        self.add_shifted(significand, exponent);
        self.count_unsettled(1);
    }

    /// Adds many numbers.
    pub(crate) fn add_all(&mut self, mut numbers: impl Iterator<Item = f64>) {
        let mut some = [0.0; CUT];
        loop {
            let mut count = 0;
            for (place, number) in some.iter_mut().zip(numbers.by_ref()) {
                *place = number;
                count += 1;
            }
            if count == 0 {
                return;
            }
            some[count..].fill(0.0);
            self.add_cut(&mut some);
        }
    }

    /// Adds numbers by splitting off their higher parts, as long as there are any. The numbers are
    /// changed.
    fn add_cut(&mut self, numbers: &mut [f64; CUT]) {
        let mut most = largest(numbers);
        for _ in 0..CUTS {
            if most == Some(0.0) {
                return;
            }
            // Where to split: a power of two that is much larger than all numbers, so that adding
            // it rounds a number to a multiple of a unit. The sum of all is at most 2⁵³ of these
            // units.
            let exponent = most.map(|most| (most.to_bits() >> FRACTION_BITS) + 1 + CUT_BITS);
            let Some(at) = exponent.filter(|exponent| *exponent < (1 << EXPONENT_BITS) - 1) else { break };
            let (sum, rest) = cut(numbers, f64::from_bits(at << FRACTION_BITS));
            self.add(sum);
            most = Some(rest);
        }
        self.add_binned(numbers);
    }

    /// Adds any numbers: first the significands of each exponent together, then their sums.
    fn add_binned(&mut self, numbers: &[f64]) {
        for numbers in numbers.chunks(BINNED_MAX) {
            let mut bins = [0i64; 1 << EXPONENT_BITS];
            let (mut least, mut most) = (bins.len(), 0);
            for number in numbers {
                if !number.is_finite() {
                    self.special += number;
                    continue;
                }
                let (exponent, significand) = taken_apart(*number);
                (least, most) = (least.min(exponent), most.max(exponent));
                bins[exponent] += significand;
            }
            for (exponent, bin) in bins.iter().enumerate().take(most + 1).skip(least) {
                self.add_shifted(*bin, exponent);
            }
            self.count_unsettled(bins.len() as u32);
        }
    }

    /// Notes that this many numbers were added, each less than 2³² to a limb; settles the limbs
    /// when it is time.
    #[inline]
    fn count_unsettled(&mut self, added: u32) {
        self.unsettled += added;
        if self.unsettled >= UNSETTLED_MAX {
            self.settle();
        }
    }

    /// Adds a significand, or the sum of several of one exponent.
    #[inline]
    fn add_shifted(&mut self, significand: i64, exponent: usize) {
        let shift = exponent.max(1) as u32 - 1;
        let (first, wide) =
            ((shift / LIMB_BITS) as usize, u128::from(significand.unsigned_abs()) << (shift % LIMB_BITS));
        let sign = significand.signum();
        let parts = [wide as u32, (wide >> 32) as u32, (wide >> 64) as u32];
        for (limb, part) in self.limbs[first..first + 3].iter_mut().zip(parts) {
            *limb += sign * i64::from(part);
        }
    }

    /// Adds everything that another sum has.
    pub(crate) fn merge(&mut self, other: &ExactSum) {
        let mut other = other.clone();
        other.settle();
        self.settle();
        self.limbs.iter_mut().zip(other.limbs).for_each(|(limb, part)| *limb = limb.wrapping_add(part));
        self.settle();
        self.special += other.special;
    }

    /// Returns the number nearest to the sum; of two, the even one. NaN if a number was NaN, or if
    /// there were infinities of both signs. A sum of zero is +0.
    pub(crate) fn rounded(&self) -> f64 {
        if self.special != 0.0 {
            // Which NaN a processor makes of two depends on how the code was compiled.
            return if self.special.is_nan() { f64::NAN } else { self.special };
        }
        let (is_negative, sum) = self.without_sign();
        let magnitude = sum.magnitude();
        if is_negative { -magnitude } else { magnitude }
    }

    /// Returns whether the sum is negative, and its settled magnitude.
    fn without_sign(&self) -> (bool, ExactSum) {
        let mut sum = self.clone();
        sum.settle();
        let is_negative = sum.limbs[LIMBS - 1] < 0;
        if is_negative {
            sum.limbs.iter_mut().for_each(|limb| *limb = limb.wrapping_neg());
            sum.settle();
        }
        (is_negative, sum)
    }

    /// Propagates the carries.
    fn settle(&mut self) {
        let mut carry = 0;
        for limb in &mut self.limbs[..LIMBS - 1] {
            let whole = limb.wrapping_add(carry);
            carry = whole >> LIMB_BITS;
            *limb = whole & i64::from(u32::MAX);
        }
        self.limbs[LIMBS - 1] = self.limbs[LIMBS - 1].wrapping_add(carry);
        self.unsettled = 0;
    }

    /// Rounds the sum, which is settled and not negative.
    fn magnitude(&self) -> f64 {
        let Some(last) = self.limbs.iter().rposition(|limb| *limb != 0) else { return 0.0 };
        let top = last as u32 * LIMB_BITS + self.limbs[last].ilog2();
        let Some(shift) = top.checked_sub(FRACTION_BITS) else { return f64::from_bits(self.bits(0)) };
        if shift == 0 {
            return f64::from_bits(self.bits(0));
        }
        if shift >= 2046 {
            return f64::INFINITY;
        }
        let (significand, half) = (self.bits(shift), shift - 1);
        let is_half = self.bit(half);
        let is_more = (0..half).any(|bit| self.bit(bit));
        let up = is_half && (is_more || significand & 1 == 1);
        // The first bit of the significand makes the exponent one larger, and so does a carry out
        // of it.
        f64::from_bits((u64::from(shift) << FRACTION_BITS) + significand + u64::from(up))
    }

    /// Returns the 53 bits from this one on.
    fn bits(&self, from: u32) -> u64 {
        (0..f64::MANTISSA_DIGITS).fold(0, |bits, bit| bits | u64::from(self.bit(from + bit)) << bit)
    }

    fn bit(&self, bit: u32) -> bool {
        self.limbs[(bit / LIMB_BITS) as usize] >> (bit % LIMB_BITS) & 1 == 1
    }
}

/// A sum in its encoded form: the sign, and the limbs of its magnitude from the first to the last
/// that is not zero. For ordinary numbers they are few.
#[derive(Serialize, Deserialize)]
struct EncodedSum {
    is_negative: bool,
    /// Number of limbs before the first.
    first: u8,
    limbs: Vec<u32>,
    special: Option<f64>,
}

impl Serialize for ExactSum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (is_negative, sum) = self.without_sign();
        let is_some = |limb: &i64| *limb != 0;
        let first = sum.limbs.iter().position(is_some).unwrap_or(0);
        let end = sum.limbs.iter().rposition(is_some).map_or(0, |last| last + 1);
        let limbs = sum.limbs[first..end].iter().map(|limb| *limb as u32).collect();
        let special = (self.special != 0.0).then_some(self.special);
        EncodedSum { is_negative, first: first as u8, limbs, special }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ExactSum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ExactSum, D::Error> {
        let EncodedSum { is_negative, first, limbs, special } = EncodedSum::deserialize(deserializer)?;
        let mut sum = ExactSum { special: special.unwrap_or(0.0), ..ExactSum::default() };
        let rest = sum.limbs.get_mut(first.into()..).unwrap_or_default();
        if limbs.len() > rest.len() {
            return Err(Error::custom("a sum has 68 limbs"));
        }
        let sign = if is_negative { -1 } else { 1 };
        rest.iter_mut().zip(limbs).for_each(|(limb, part)| *limb = sign * i64::from(part));
        sum.settle();
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a sum that is not the right one, and against one that depends on who added first.
    use super::*;

    fn sum(numbers: impl IntoIterator<Item = f64>) -> f64 {
        let mut sum = ExactSum::default();
        numbers.into_iter().for_each(|number| sum.add(number));
        sum.rounded()
    }

    #[test]
    fn sums_of_many_numbers_equal_sums_one_by_one() {
        let mut rng = fastrand::Rng::with_seed(9);
        let any: Vec<f64> = (0..5000).map(|_| f64::from_bits(rng.u64(..))).collect();
        let alike = vec![f64::from_bits(0x43ff_ffff_ffff_ffff); 3 * BINNED_MAX + 1];
        let small: Vec<f64> = (0..3000).map(|index| f64::from_bits(index * 3_000_000_007)).collect();
        let finite: Vec<f64> = any.iter().copied().filter(|number| number.is_finite()).collect();
        let specials = vec![1.0, f64::INFINITY, 2.0];
        // All bits of numbers whose exponents are as far apart as so many cuts reach, and a little
        // farther; of both signs.
        let apart = |bits: u64| -> Vec<f64> {
            let number = |_| {
                let random = rng.u64(..);
                let exponent = 900 + random % bits;
                f64::from_bits(random & (1 << 63 | ((1 << 52) - 1)) | exponent << 52)
            };
            (0..1500).map(number).collect()
        };
        let aparts = [1, 30, 60, 90, 130, 200].map(apart);
        let whole: Vec<f64> = (0..9999).map(|index| f64::from(index * index % 10_007) - 500.0).collect();
        let largest = vec![f64::from_bits(2034 << 52 | 0xf_ffff_ffff_ffff); 1100];
        let beyond = vec![f64::from_bits(2036 << 52 | 0xf_ffff_ffff_ffff); 700];
        let rest = [finite, alike.iter().map(|number| -number).collect(), alike, small, specials, any];
        for numbers in rest.into_iter().chain(aparts).chain([whole, largest, beyond, vec![-0.0], vec![]]) {
            let (mut one_by_one, mut together) = (ExactSum::default(), ExactSum::default());
            numbers.iter().for_each(|number| one_by_one.add(*number));
            together.add_all(numbers.iter().copied());
            assert_eq!(together.rounded().to_bits(), one_by_one.rounded().to_bits());
            one_by_one.settle();
            together.settle();
            assert_eq!(together.limbs, one_by_one.limbs);
        }
    }

    #[test]
    fn one_number_is_its_sum() {
        let mut rng = fastrand::Rng::with_seed(7);
        let edges = [1.0, 0.1, f64::MAX, f64::MIN_POSITIVE, f64::from_bits(1), f64::from_bits((1 << 52) - 1), 3e-310];
        let any = (0..20_000).map(|_| f64::from_bits(rng.u64(..))).filter(|number| number.is_finite());
        for number in edges.into_iter().chain(any) {
            assert_eq!(sum([number]), number);
            assert_eq!(sum([-number]), -number);
            assert_eq!(sum([number, -number]).to_bits(), 0);
        }
    }

    #[test]
    fn two_numbers_are_added_as_the_processor_does() {
        let mut rng = fastrand::Rng::with_seed(8);
        for _ in 0..50_000 {
            let (one, bits) = (f64::from_bits(rng.u64(..)), rng.u64(..));
            // Exponents near each other, so that both matter.
            let exponent = (one.to_bits() >> 52 & 0x7ff).saturating_add(bits >> 60).min(2046);
            let other = f64::from_bits(bits & 1 << 63 | exponent << 52 | bits & ((1 << 52) - 1));
            if one.is_finite() {
                assert_eq!(sum([one, other]), one + other, "{one:e} + {other:e}");
            }
        }
    }

    #[test]
    fn many_integers_are_exact_in_any_order_and_in_any_parts() {
        let mut rng = fastrand::Rng::with_seed(9);
        for _ in 0..200 {
            let integers: Vec<i128> =
                (0..100).map(|_| i128::from(rng.u64(..) as i64 >> 11) << (rng.u64(..) % 60)).collect();
            let numbers: Vec<f64> = integers.iter().map(|integer| *integer as f64).collect();
            let right = integers.iter().sum::<i128>() as f64;
            assert_eq!(sum(numbers.iter().copied()), right);
            assert_eq!(sum(numbers.iter().rev().copied()), right);
            let mut whole = ExactSum::default();
            for part in numbers.chunks(1 + rng.u64(..) as usize % 40) {
                let mut of_part = ExactSum::default();
                part.iter().for_each(|number| of_part.add(*number));
                let bytes = postcard::to_stdvec(&of_part).unwrap();
                whole.merge(&postcard::from_bytes(&bytes).unwrap());
            }
            assert_eq!(whole.rounded(), right);
        }
    }

    #[test]
    fn overflow_and_nan_are_reported() {
        assert_eq!(sum([]).to_bits(), 0);
        assert_eq!(sum([1e16, 1.0, -1e16]), 1.0);
        assert_eq!(sum([f64::MAX, f64::MAX]), f64::INFINITY);
        assert_eq!(sum([f64::MAX, f64::MAX, -f64::MAX]), f64::MAX);
        assert_eq!(sum([f64::MIN, f64::MIN]), f64::NEG_INFINITY);
        assert_eq!(sum([f64::INFINITY, 1.0]), f64::INFINITY);
        assert!(sum([f64::INFINITY, f64::NEG_INFINITY]).is_nan());
        assert!(sum([f64::NAN, 1.0]).is_nan());
        let tenths = sum([0.1; 10]);
        assert_eq!(tenths, 1.0, "what one after the other makes 0.9999999999999999");
    }

    #[test]
    fn carries_are_passed_on_before_there_is_no_room() {
        let mut many = ExactSum { unsettled: UNSETTLED_MAX - 2, ..ExactSum::default() };
        many.limbs[40] = (i64::from(u32::MAX)) * i64::from(UNSETTLED_MAX - 2);
        let before = many.rounded();
        let step = f64::from_bits((1279 + 1) << 52);
        (0..5).for_each(|_| many.add(step));
        assert_eq!(many.unsettled, 3);
        assert!(many.rounded() >= before);
    }

    #[test]
    fn bytes_that_are_no_sum_are_refused() {
        let decode = |first: u8, limbs: usize| {
            let travelling = EncodedSum { is_negative: true, first, limbs: vec![u32::MAX; limbs], special: None };
            postcard::from_bytes::<ExactSum>(&postcard::to_stdvec(&travelling).unwrap())
        };
        assert!(decode(0, LIMBS).is_ok() && decode(67, 1).is_ok() && decode(68, 0).is_ok());
        assert!(
            decode(0, LIMBS + 1).is_err()
                && decode(67, 2).is_err()
                && decode(68, 1).is_err()
                && decode(255, 1).is_err()
        );
    }

    #[test]
    fn sums_travel_whole_and_those_of_ordinary_numbers_are_short() {
        let through = |sum: &ExactSum| {
            let bytes = postcard::to_stdvec(sum).unwrap();
            (postcard::from_bytes::<ExactSum>(&bytes).unwrap(), bytes.len())
        };
        let mut rng = fastrand::Rng::with_seed(11);
        for _ in 0..2000 {
            let mut sum = ExactSum::default();
            (0..rng.u64(..5)).for_each(|_| sum.add(f64::from_bits(rng.u64(..))));
            let (same, _) = through(&sum);
            assert_eq!(same.rounded().to_bits(), sum.rounded().to_bits());
            sum.settle();
            assert!(same == sum || sum.special.is_nan() && same.limbs == sum.limbs, "{sum:?}");
        }
        for sign in [1.0, -1.0] {
            let mut fares = ExactSum::default();
            (0..100_000).for_each(|fare| fares.add(sign * f64::from(fare) * 0.01));
            let (_, bytes) = through(&fares);
            assert!(bytes <= 24, "{bytes}");
        }
    }
}
