//! `ff.totals.*`: number, sum, smallest and largest of plain numbers, of all or of those in a range
//! of values. There is one function for each type of number.
//!
//! Parts can be merged, and the result does not depend on how the numbers were split. So near and
//! far parts of one array may be added up where they are. (`ff.aggregate` does this for words,
//! without parts.)

mod exact;
mod number;

pub use number::Number;

use crate::{Fault, Function, Place, Range};
use core::marker::PhantomData;
use core::ops::{Bound, RangeBounds};
use serde::{Deserialize, Serialize};

/// Bytes read between two turns of the other tasks.
const CHUNK_BYTES: u64 = 32 * 1024;

/// Number of numbers below which adding one by one is faster.
const FEW: usize = 8;

/// Adds up numbers that lie side by side.
#[derive(Debug)]
pub struct Totals<N>(PhantomData<N>);

/// Numbers to add up.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Wanted<N: Number> {
    /// Places of the numbers; counts are of numbers.
    pub pieces: Vec<Range>,
    /// Range of the values that count.
    pub values: (Bound<N>, Bound<N>),
}

/// Number, sum, smallest and largest of some numbers, in a form that can be merged.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Part<N: Number> {
    count: u64,
    sum: N::Part,
    min: Option<N>,
    max: Option<N>,
}

impl<N: Number> Default for Part<N> {
    fn default() -> Part<N> {
        Part { count: 0, sum: N::Part::default(), min: None, max: None }
    }
}

impl<N: Number> Part<N> {
    /// Adds those of these numbers whose values are wanted.
    pub fn add_all(&mut self, numbers: &[N], values: &(Bound<N>, Bound<N>)) {
        if !is_all(values) {
            let wanted: Vec<N> = numbers.iter().copied().filter(|number| values.contains(number)).collect();
            return self.add_all(&wanted, &(Bound::Unbounded, Bound::Unbounded));
        }
        if numbers.len() < FEW {
            return numbers.iter().for_each(|number| self.add(*number));
        }
        self.count += numbers.len() as u64;
        N::add_all(numbers, &mut self.sum);
        let (least, most) = N::edges(numbers).unzip();
        self.take_edges(least, most);
    }

    /// Adds a number.
    #[inline]
    fn add(&mut self, number: N) {
        self.count += 1;
        number.add(&mut self.sum);
        if number.is_ordered() {
            self.min = Some(self.min.map_or(number, |min| if number.is_before(min) { number } else { min }));
            self.max = Some(self.max.map_or(number, |max| if max.is_before(number) { number } else { max }));
        }
    }

    /// Adds everything that another part has.
    pub fn merge(&mut self, other: &Part<N>) {
        self.count = self.count.saturating_add(other.count);
        N::merge(&mut self.sum, &other.sum);
        self.take_edges(other.min, other.max);
    }

    /// Takes the smallest and the largest of other numbers into account.
    fn take_edges(&mut self, least: Option<N>, most: Option<N>) {
        let edges = |one: Option<N>, other: Option<N>, is_other: fn(N, N) -> bool| match (one, other) {
            (Some(one), Some(other)) => Some(if is_other(other, one) { other } else { one }),
            (one, other) => one.or(other),
        };
        self.min = edges(self.min, least, |other, one| other.is_before(one));
        self.max = edges(self.max, most, |other, one| one.is_before(other));
    }

    /// Returns how many numbers were added.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum. It is exact: floating-point numbers are rounded once, at the end. NaN if
    /// one of them is.
    pub fn sum(&self) -> N::Sum {
        N::sum(&self.sum)
    }

    /// Returns the sum divided by the count; `None` if there are no numbers.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| N::mean(self.sum(), self.count))
    }

    /// Returns the smallest number. NaN is passed over, and −0 is smaller than +0.
    pub fn min(&self) -> Option<N> {
        self.min
    }

    /// Returns the largest number, in the order of [`Part::min`].
    pub fn max(&self) -> Option<N> {
        self.max
    }
}

/// Checks whether every value counts, NaN included.
fn is_all<N>(values: &(Bound<N>, Bound<N>)) -> bool {
    matches!(values, (Bound::Unbounded, Bound::Unbounded))
}

impl<N: Number> Function for Totals<N> {
    const NAME: &'static str = N::TOTALS;
    const VERSION: u32 = 2;
    const ONLY_READS: bool = true;
    type Argument = Wanted<N>;
    type Answer = Part<N>;

    async fn run<P: Place>(place: &P, wanted: Wanted<N>) -> Result<Part<N>, Fault> {
        let (mut part, mut numbers) = (Part::default(), Vec::new());
        for piece in &wanted.pieces {
            let bytes = piece.count.checked_mul(size_of::<N>() as u64);
            let end = bytes.and_then(|bytes| piece.offset.checked_add(bytes));
            let end =
                end.filter(|end| *end <= place.region_bytes()).ok_or(Fault::OutOfRange { offset: piece.offset })?;
            let mut offset = piece.offset;
            while offset < end {
                let len = (end - offset).min(CHUNK_BYTES);
                let bytes = place.read_range(offset, len as usize).await?;
                numbers.clear();
                N::each(&bytes, |number| numbers.push(number));
                part.add_all(&numbers, &wanted.values);
                offset += len;
            }
        }
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an answer that depends on where numbers lie or how they are cut, and against
    //! ranges that are none.
    use super::*;
    use crate::{Sim, Stop};

    const ALL: (Bound<f64>, Bound<f64>) = (Bound::Unbounded, Bound::Unbounded);

    fn bytes_of(numbers: &[f64]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn the_answer_is_that_of_a_loop_wherever_pieces_begin() {
        let numbers: Vec<f64> = (0..20_000).map(|index| f64::from(index % 977) * 0.1 - 40.0).collect();
        let mut bytes = bytes_of(&numbers);
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        for (seed, values) in [(1, ALL), (2, (Bound::Included(-3.0), Bound::Excluded(20.0)))] {
            let mut right = Part::default();
            right.add_all(&numbers, &values);
            for cut in [1, 511, 4096, 4097, 19_999] {
                let piece = |(index, count): (usize, usize)| Range { offset: 8 * index as u64, count: count as u64 };
                let pieces = vec![piece((cut, numbers.len() - cut)), piece((0, cut))];
                let sim = Sim::new(seed, bytes.clone());
                let answer = sim.run_one::<Totals<f64>>(Wanted { pieces, values }).unwrap();
                assert_eq!((answer.count(), answer.min(), answer.max()), (right.count(), right.min(), right.max()));
                assert_eq!(answer.sum().to_bits(), right.sum().to_bits());
            }
        }
    }

    #[test]
    fn nans_are_counted_and_have_no_place_in_the_order() {
        let mut part = Part::default();
        part.add_all(&[f64::NAN, 0.0, -0.0], &ALL);
        assert_eq!((part.count(), part.sum().is_nan()), (3, true));
        assert_eq!(part.min().map(f64::to_bits), Some((-0.0f64).to_bits()));
        assert_eq!(part.max().map(f64::to_bits), Some(0));
        let mut none = Part::default();
        none.add_all(&[f64::NAN], &(Bound::Included(f64::NEG_INFINITY), Bound::Unbounded));
        assert_eq!((none.count(), none.mean(), none.min()), (0, None, None));
    }

    #[test]
    fn edges_are_those_of_the_order() {
        let special = [f64::NAN, -0.0, 0.0, f64::INFINITY, f64::NEG_INFINITY, -f64::NAN, 1.5, -1.5, 5e-324];
        for round in 0..4000u64 {
            let len = (round % 40) as usize;
            let kinds = 1 + round / 40 % special.len() as u64;
            let numbers: Vec<f64> =
                (0..len as u64).map(|index| special[((index * 7 + round) * (index + 3) % kinds) as usize]).collect();
            let one_by_one = numbers.iter().fold(Part::default(), |mut part, number| {
                part.add(*number);
                part
            });
            let bits = |edges: Option<(f64, f64)>| edges.map(|(least, most)| (least.to_bits(), most.to_bits()));
            assert_eq!(bits(f64::edges(&numbers)), bits(one_by_one.min.zip(one_by_one.max)), "{numbers:?}");
            let narrow: Vec<f32> = numbers.iter().map(|number| *number as f32).collect();
            let one_by_one = narrow.iter().fold(Part::default(), |mut part, number| {
                part.add(*number);
                part
            });
            assert_eq!(format!("{:?}", f32::edges(&narrow)), format!("{:?}", one_by_one.min.zip(one_by_one.max)));
        }
        assert_eq!((i8::edges(&[3, -7, 100]), u64::edges(&[])), (Some((-7, 100)), None));
    }

    #[test]
    fn ranges_outside_the_region_are_refused() {
        for (offset, count) in [(0, 513), (4096, 1), (u64::MAX, 1), (8, u64::MAX / 4)] {
            let wanted =
                Wanted { pieces: vec![Range { offset, count }], values: (Bound::<u64>::Unbounded, Bound::Unbounded) };
            let answer = Sim::new(1, vec![0; 4096]).run_one::<Totals<u64>>(wanted);
            assert_eq!(answer, Err(Stop::Fault(Fault::OutOfRange { offset })));
        }
    }
}
