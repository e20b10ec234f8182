//! `ff.find.*`: finds the numbers in a range of values. There is one function for each type of
//! number.

use super::PieceCursor;
use crate::totals::Number;
use crate::{Fault, Function, Place, Range};
use core::marker::PhantomData;
use core::ops::{Bound, RangeBounds};
use serde::{Deserialize, Serialize};

/// Finds numbers by value.
#[derive(Debug)]
pub struct Find<N>(PhantomData<N>);

/// Numbers to search, and the wanted values.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Search<N: Number> {
    /// Pieces in which the numbers lie, in order.
    pub pieces: Vec<Range>,
    /// Range of the wanted values.
    pub values: (Bound<N>, Bound<N>),
}

/// Positions of the numbers that were found.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Found {
    /// Number of unwanted numbers before each one, since the previous one.
    pub gaps: Vec<u64>,
    /// Numbers that were checked: all, or up to where the answer was full.
    pub rows: u64,
}

impl Found {
    /// Most numbers of an answer.
    pub const MOST: usize = 6000;
}

impl<N: Number> Function for Find<N> {
    const NAME: &'static str = N::FIND;
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = Search<N>;
    type Answer = Found;

    async fn run<P: Place>(place: &P, search: Search<N>) -> Result<Found, Fault> {
        let (mut found, mut gap) = (Found::default(), 0);
        let mut walk = PieceCursor::new(&search.pieces, size_of::<N>() as u64);
        loop {
            let count = walk.ready();
            if count == 0 {
                return Ok(found);
            }
            let bytes = walk.next(place, count).await?;
            N::each(&bytes, |number| {
                if found.gaps.len() == Found::MOST {
                    return;
                }
                found.rows += 1;
                if search.values.contains(&number) || is_all(&search.values) {
                    found.gaps.push(core::mem::take(&mut gap));
                } else {
                    gap += 1;
                }
            });
            if found.gaps.len() == Found::MOST {
                return Ok(found);
            }
        }
    }
}

/// Checks whether every value is wanted, NaN included.
fn is_all<N>(values: &(Bound<N>, Bound<N>)) -> bool {
    matches!(values, (Bound::Unbounded, Bound::Unbounded))
}

#[cfg(test)]
mod tests {
    //! Guards against numbers that are passed over where an answer is full.
    use super::*;
    use crate::Sim;

    #[test]
    fn an_answer_that_is_full_goes_on_behind_its_last() {
        let numbers: Vec<i32> = (0..50_000).map(|index| index * 7 % 1000).collect();
        let sim = Sim::new(4, numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
        for values in [
            (Bound::Included(-5), Bound::Excluded(300)),
            (Bound::Unbounded, Bound::Unbounded),
            (Bound::Excluded(998), Bound::Unbounded),
            (Bound::Included(2000), Bound::Unbounded),
        ] {
            let (mut rows, mut all) = (0, Vec::new());
            while rows < 50_000 {
                let pieces = vec![Range { offset: 4 * rows, count: 50_000 - rows }];
                let found = sim.run_one::<Find<i32>>(Search { pieces, values }).unwrap();
                assert!(found.rows > 0 && found.gaps.len() <= Found::MOST);
                let mut at = rows;
                for gap in found.gaps {
                    at += gap;
                    all.push(at);
                    at += 1;
                }
                rows += found.rows;
            }
            let right = (0..50_000).filter(|index| values.contains(&numbers[*index as usize]));
            assert_eq!(all, Vec::from_iter(right));
        }
    }
}
