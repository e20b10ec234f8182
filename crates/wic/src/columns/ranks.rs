//! `ff.ranks.*`: how many numbers lie where, between a smallest and a largest one. With it an element of a rank, as the median, is found in few rounds.
//! One function for each type of number.
//!
//! Numbers are compared by their images ([`Number::image`]). A span of them is cut into buckets of equal width, a power of two. Each bucket that has
//! numbers says the smallest and the largest of them, so that the next round looks at no more than that.

use super::Walk;
use crate::totals::Number;
use crate::{Fault, Function, Place, Range};
use core::marker::PhantomData;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts numbers by bucket.
#[derive(Debug)]
pub struct Ranks<N>(PhantomData<N>);

/// Some numbers, and which of them count.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Span {
    /// Where they lie.
    pub pieces: Vec<Range>,
    /// The smallest image that counts.
    pub first: u64,
    /// The largest.
    pub last: u64,
}

impl Span {
    /// The width of buckets, as a power of two.
    pub fn shift(first: u64, last: u64) -> u32 {
        (u64::BITS - last.wrapping_sub(first).leading_zeros()).saturating_sub(Buckets::BITS)
    }
}

/// The numbers of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Bucket {
    /// How many.
    pub count: u64,
    /// The smallest image.
    pub first: u64,
    /// The largest.
    pub last: u64,
}

/// The buckets that have numbers, in order.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Buckets(pub BTreeMap<u64, Bucket>);

impl Buckets {
    /// There are as many buckets as so many bits can tell apart.
    const BITS: u32 = 10;

    /// Adds numbers whose image lies in this span. What has no place in the order is passed over.
    pub fn add_all<N: Number>(&mut self, numbers: &[N], first: u64, last: u64) {
        let shift = Span::shift(first, last);
        // Neighbours fall into few buckets, and a map is slow to find one for each.
        let mut dense = [const { Bucket { count: 0, first: u64::MAX, last: 0 } }; 1 << Buckets::BITS];
        for number in numbers.iter().filter(|number| number.is_ordered()) {
            let image = number.image();
            if (first..=last).contains(&image) {
                let bucket = &mut dense[((image - first) >> shift) as usize];
                bucket.count += 1;
                bucket.first = bucket.first.min(image);
                bucket.last = bucket.last.max(image);
            }
        }
        for (index, bucket) in dense.iter().enumerate().filter(|(_, bucket)| bucket.count > 0) {
            self.add(index as u64, bucket);
        }
    }

    fn add(&mut self, index: u64, other: &Bucket) {
        let bucket = self.0.entry(index).or_insert(Bucket { count: 0, ..*other });
        bucket.count = bucket.count.saturating_add(other.count);
        bucket.first = bucket.first.min(other.first);
        bucket.last = bucket.last.max(other.last);
    }

    /// All that another one has.
    pub fn merge(&mut self, other: &Buckets) {
        other.0.iter().for_each(|(index, bucket)| self.add(*index, bucket));
    }
}

impl<N: Number> Function for Ranks<N> {
    const NAME: &'static str = N::RANKS;
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = Span;
    type Answer = Buckets;

    async fn run<P: Place>(place: &P, span: Span) -> Result<Buckets, Fault> {
        let mut buckets = Buckets::default();
        let mut walk = Walk::new(&span.pieces, size_of::<N>() as u64);
        let mut numbers: Vec<N> = Vec::new();
        if span.first > span.last {
            return Ok(buckets);
        }
        loop {
            let count = walk.ready();
            if count == 0 {
                return Ok(buckets);
            }
            {
                let bytes = walk.next(place, count).await?;
                numbers.clear();
                N::each(&bytes, |number| numbers.push(number));
            }
            buckets.add_all(&numbers, span.first, span.last);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against numbers that fall between two buckets, and against more buckets than an answer has room for.
    use super::*;
    use crate::Sim;

    #[test]
    fn every_number_of_the_span_is_in_one_bucket() {
        let numbers: Vec<i64> = (0..20_000i64).map(|index| (index * index * 7919 - 90_000) << (index % 40)).collect();
        let sim = Sim::new(8, numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
        let pieces = vec![Range { offset: 0, count: 20_000 }];
        for (first, last) in [(i64::MIN, i64::MAX), (-90_000, 1 << 30), (0, 0), (5, 6), (-1, i64::MAX)] {
            let span = Span { pieces: pieces.clone(), first: first.image(), last: last.image() };
            let found = sim.run_one::<Ranks<i64>>(span).unwrap();
            let inside = numbers.iter().filter(|number| (first..=last).contains(number)).count() as u64;
            assert_eq!(found.0.values().map(|bucket| bucket.count).sum::<u64>(), inside);
            assert!(found.0.len() <= 1 << Buckets::BITS);
            for ((_, one), (_, next)) in found.0.iter().zip(found.0.iter().skip(1)) {
                assert!(one.first <= one.last && one.last < next.first);
            }
            assert!(postcard::to_stdvec(&found).unwrap().len() <= 64 * 1024);
        }
    }
}
