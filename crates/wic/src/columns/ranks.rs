//! `ff.ranks.*`: histogram of numbers between a smallest and a largest one. With it an element of a
//! given rank, such as the median, is found in few rounds. There is one function for each type of
//! number.
//!
//! Numbers are compared by their images ([`Number::image`]). A span of images is divided into
//! buckets of equal width, a power of two. Each bucket that has numbers also has the smallest and
//! the largest of them, so that the next round searches no more than that.

use super::PieceCursor;
use crate::totals::Number;
use crate::{Fault, Function, Place, Range};
use core::marker::PhantomData;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts numbers by bucket.
#[derive(Debug)]
pub struct Ranks<N>(PhantomData<N>);

/// Numbers to count, and the span of those that count.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Span {
    /// Pieces in which the numbers lie.
    pub pieces: Vec<Range>,
    /// Smallest image that counts.
    pub first: u64,
    /// Largest image that counts.
    pub last: u64,
}

impl Span {
    /// Returns the width of the buckets, as a power of two.
    pub fn shift(first: u64, last: u64) -> u32 {
        (u64::BITS - last.wrapping_sub(first).leading_zeros()).saturating_sub(Buckets::BITS)
    }
}

/// Numbers of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Bucket {
    /// Number of numbers.
    pub count: u64,
    /// Smallest image.
    pub first: u64,
    /// Largest image.
    pub last: u64,
}

/// Histogram of the numbers of a span.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Buckets {
    /// The buckets that have numbers, in order.
    pub inside: BTreeMap<u64, Bucket>,
    /// Number of numbers before the span.
    pub before: u64,
    /// Number of all numbers that have a place in the order, inside the span or not.
    pub count: u64,
}

/// Counts numbers of a span.
#[derive(Clone, Debug)]
pub struct Histogram {
    first: u64,
    last: u64,
    buckets: Vec<Bucket>,
    before: u64,
    count: u64,
}

impl Buckets {
    /// Bits of the index of a bucket.
    const BITS: u32 = 10;
}

impl Histogram {
    /// Makes an empty histogram of the numbers with an image from `first` to `last`.
    pub fn new(first: u64, last: u64) -> Histogram {
        let empty = Bucket { count: 0, first: u64::MAX, last: 0 };
        Histogram { first, last, buckets: vec![empty; 1 << Buckets::BITS], before: 0, count: 0 }
    }

    /// Adds numbers. NaN is passed over.
    pub fn add_all<N: Number>(&mut self, numbers: &[N]) {
        let Histogram { first, last, .. } = *self;
        let shift = Span::shift(first, last);
        let (mut count, mut before) = (0, 0);
        for number in numbers {
            let (image, is_ordered) = (number.image(), number.is_ordered());
            count += u64::from(is_ordered);
            before += u64::from(is_ordered & (image < first));
            if is_ordered & (first..=last).contains(&image) {
                let bucket = &mut self.buckets[((image - first) >> shift) as usize];
                bucket.count += 1;
                bucket.first = bucket.first.min(image);
                bucket.last = bucket.last.max(image);
            }
        }
        self.count = self.count.saturating_add(count);
        self.before = self.before.saturating_add(before);
    }

    /// Adds counts made elsewhere; `None` if they are not of such a span.
    pub fn merge(&mut self, others: &Buckets) -> Option<()> {
        for (index, other) in &others.inside {
            let bucket = self.buckets.get_mut(usize::try_from(*index).ok()?)?;
            bucket.count = bucket.count.saturating_add(other.count);
            bucket.first = bucket.first.min(other.first);
            bucket.last = bucket.last.max(other.last);
        }
        self.before = self.before.saturating_add(others.before);
        self.count = self.count.saturating_add(others.count);
        Some(())
    }

    /// Returns the histogram.
    pub fn buckets(self) -> Buckets {
        let some = self.buckets.into_iter().enumerate().filter(|(_, bucket)| bucket.count > 0);
        let inside = some.map(|(index, bucket)| (index as u64, bucket)).collect();
        Buckets { inside, before: self.before, count: self.count }
    }
}

impl<N: Number> Function for Ranks<N> {
    const NAME: &'static str = N::RANKS;
    const VERSION: u32 = 2;
    const ONLY_READS: bool = true;
    type Argument = Span;
    type Answer = Buckets;

    async fn run<P: Place>(place: &P, span: Span) -> Result<Buckets, Fault> {
        let mut histogram = Histogram::new(span.first, span.last);
        let mut walk = PieceCursor::new(&span.pieces, size_of::<N>() as u64);
        let mut numbers: Vec<N> = Vec::new();
        loop {
            let count = walk.ready();
            if count == 0 {
                return Ok(histogram.buckets());
            }
            {
                let bytes = walk.next(place, count).await?;
                numbers.clear();
                N::each(&bytes, |number| numbers.push(number));
            }
            histogram.add_all(&numbers);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against numbers that fall between two buckets, and against more buckets than an answer has room for.
    use super::*;
    use crate::Sim;

    #[test]
    fn histograms_counted_at_servers_and_near_add_up() {
        let numbers: Vec<f64> = (0..3000).map(|index| f64::from(index * 37 % 1000) - 300.0).chain([f64::NAN]).collect();
        let span = (f64::image(-100.0), f64::image(500.0));
        let of = |numbers: &[f64]| {
            let mut histogram = Histogram::new(span.0, span.1);
            histogram.add_all(numbers);
            histogram
        };
        let (here, there) = numbers.split_at(700);
        let (mut both, there) = (of(here), of(there).buckets());
        assert_eq!(both.merge(&there), Some(()));
        assert_eq!(both.clone().buckets(), of(&numbers).buckets());
        let nowhere = Bucket { count: 1, first: 0, last: 0 };
        for index in [1 << Buckets::BITS, u64::MAX] {
            assert_eq!(both.merge(&Buckets { inside: [(index, nowhere)].into(), ..Buckets::default() }), None);
        }
        let mut none = Histogram::new(7, 3);
        none.add_all(&numbers);
        assert!(none.clone().buckets().inside.is_empty() && none.count == 3000);
    }

    #[test]
    fn every_number_of_the_span_is_in_one_bucket() {
        let numbers: Vec<i64> = (0..20_000i64).map(|index| (index * index * 7919 - 90_000) << (index % 40)).collect();
        let sim = Sim::new(8, numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
        let pieces = vec![Range { offset: 0, count: 20_000 }];
        for (first, last) in [(i64::MIN, i64::MAX), (-90_000, 1 << 30), (0, 0), (5, 6), (-1, i64::MAX)] {
            let span = Span { pieces: pieces.clone(), first: first.image(), last: last.image() };
            let found = sim.run_one::<Ranks<i64>>(span).unwrap();
            let inside = numbers.iter().filter(|number| (first..=last).contains(number)).count() as u64;
            assert_eq!(found.inside.values().map(|bucket| bucket.count).sum::<u64>(), inside);
            let before = numbers.iter().filter(|number| **number < first).count() as u64;
            assert_eq!((found.before, found.count), (before, 20_000));
            assert!(found.inside.len() <= 1 << Buckets::BITS);
            for ((_, one), (_, next)) in found.inside.iter().zip(found.inside.iter().skip(1)) {
                assert!(one.first <= one.last && one.last < next.first);
            }
            assert!(postcard::to_stdvec(&found).unwrap().len() <= 64 * 1024);
        }
    }
}
