//! `ff.tally`: counts how often each value, or each combination of values of several columns,
//! occurs.

use super::numbering::{NONE, Numbering};
use super::{Column, Condition, Key, RowCursor, Rows, room};
use crate::{Fault, Function, Place};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts keys.
#[derive(Debug)]
pub struct Tally;

/// Columns that form the key: one to [`KEYS_MAX`](super::KEYS_MAX), of equal length.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Tallied {
    /// Columns of the key, in this order.
    pub keys: Vec<Column>,
    /// Conditions on the rows to count.
    pub conditions: Vec<Condition>,
}

/// Number of rows of each key.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Tallies {
    /// Counts by key.
    pub counts: BTreeMap<Key, u64>,
    /// Rows that were counted: all, or those up to where the keys filled the answer.
    pub rows: u64,
}

impl Tallies {
    /// Most keys of an answer; for more than two columns, fewer.
    pub const MOST: usize = 2048;

    /// Adds everything that another one has.
    pub fn merge(&mut self, other: Tallies) {
        self.rows = self.rows.saturating_add(other.rows);
        for (key, count) in other.counts {
            let here = self.counts.entry(key).or_default();
            *here = here.saturating_add(count);
        }
    }
}

/// Counts rows, many at a time, for the final [`Tallies`].
#[derive(Default, Debug)]
pub struct Tallying {
    numbering: Numbering,
    /// Counts by the number of a key.
    counts: Vec<u64>,
    rows: u64,
}

impl Tallying {
    /// Counts rows until there are more keys than `most`; returns `false` if it stopped there. The
    /// keys of all rows must have equally many columns.
    pub fn add_all(&mut self, rows: &Rows<'_>, most: usize) -> bool {
        let done = self.numbering.number(rows, most);
        self.counts.resize(self.numbering.len(), 0);
        for number in self.numbering.rows.iter().filter(|number| **number != NONE) {
            self.counts[*number as usize] += 1;
        }
        self.rows += done as u64;
        done == rows.count
    }

    /// Returns the counts.
    pub fn finish(self) -> Tallies {
        Tallies { counts: self.numbering.keys().zip(self.counts).collect(), rows: self.rows }
    }
}

impl Function for Tally {
    const NAME: &'static str = "ff.tally";
    const VERSION: u32 = 3;
    const ONLY_READS: bool = true;
    type Argument = Tallied;
    type Answer = Tallies;

    async fn run<P: Place>(place: &P, tallied: Tallied) -> Result<Tallies, Fault> {
        let mut tallying = Tallying::default();
        let walk = RowCursor::new(&tallied.keys, &tallied.conditions).filter(|_| !tallied.keys.is_empty());
        let Some(mut walk) = walk else { return Ok(tallying.finish()) };
        let most = room(&tallied.keys, Tallies::MOST);
        loop {
            let count = walk.ready();
            if count == 0 || !tallying.add_all(&walk.next(place, count).await?, most) {
                return Ok(tallying.finish());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against rows that are counted twice or never where an answer has no room for more keys.
    use super::*;
    use crate::columns::{Cell, KEYS_MAX};
    use crate::{Number, Range, Sim};
    use farfield_core::wire::CallBody;

    #[test]
    fn an_answer_that_is_full_says_how_far_it_came() {
        let numbers: Vec<u32> = (0..9000).map(|index| index / 3).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let sim = Sim::new(5, bytes);
        let (mut rows, mut all) = (0, Tallies::default());
        while rows < 9000 {
            let pieces = vec![Range { offset: 4 * rows, count: 9000 - rows }];
            let found = sim
                .run_one::<Tally>(Tallied {
                    keys: vec![Column { cell: Cell::Number(u32::KIND), pieces }],
                    conditions: Vec::new(),
                })
                .unwrap();
            assert!(found.rows > 0 && found.counts.len() <= Tallies::MOST);
            rows += found.rows;
            all.merge(found);
        }
        assert_eq!((all.rows, all.counts.len()), (9000, 3000));
        assert!(
            all.counts
                .iter()
                .zip(0..)
                .all(|((key, count), number)| (*key, *count) == ([number, 0, 0, 0, 0, 0, 0, 0], 3))
        );
    }

    #[test]
    fn pairs_are_keys_of_columns_cut_anywhere() {
        let bytes: Vec<u8> = (0..8192u32).map(|index| (index % 251) as u8).collect();
        let sim = Sim::new(5, bytes.clone());
        let range = |offset, count| Range { offset, count };
        let one = Column { cell: Cell::Number(u8::KIND), pieces: vec![range(0, 70), range(100, 930)] };
        let other = Column { cell: Cell::Number(i16::KIND), pieces: vec![range(4096, 500), range(10, 500)] };
        let found = sim.run_one::<Tally>(Tallied { keys: vec![one, other], conditions: Vec::new() }).unwrap();
        let ones = bytes[..70].iter().chain(&bytes[100..1030]);
        let words = [&bytes[4096..5096], &bytes[10..1010]].concat();
        let mut right = Tallying::default();
        for (one, word) in ones.zip(words.as_chunks().0) {
            let (one, other) = ([one.image()], [i16::from_le_bytes(*word).image()]);
            let images = [&one[..], &other, &[], &[], &[], &[], &[], &[]];
            right.add_all(&Rows { count: 1, images, kept: None }, usize::MAX);
        }
        assert_eq!(found, right.finish());
        let nothing = Tallied { keys: Vec::new(), conditions: Vec::new() };
        assert_eq!(sim.run_one::<Tally>(nothing), Ok(Tallies::default()));
    }

    #[test]
    fn an_answer_has_room_for_what_it_says_of_many_columns() {
        let numbers: Vec<u64> = (0..8000u64).map(|index| (index / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let sim = Sim::new(5, numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
        for columns in 1..=KEYS_MAX as u64 {
            let (mut rows, mut all) = (0, Tallies::default());
            while rows < 6000 {
                let pieces = |column: u64| vec![Range { offset: 8 * (rows + 3 * column), count: 6000 - rows }];
                let keys = (0..columns).map(|column| Column { cell: Cell::Number(u64::KIND), pieces: pieces(column) });
                let found = sim.run_one::<Tally>(Tallied { keys: keys.collect(), conditions: Vec::new() }).unwrap();
                let bytes = postcard::to_stdvec(&found).unwrap().len();
                assert!(found.rows > 0 && bytes <= CallBody::ANSWER_BYTES_MAX, "{columns} columns: {bytes}");
                rows += found.rows;
                all.merge(found);
            }
            let mut right: BTreeMap<Key, u64> = BTreeMap::new();
            for row in 0..6000 {
                let mut key = Key::default();
                key.iter_mut().zip(0..columns as usize).for_each(|(key, column)| *key = numbers[row + 3 * column]);
                *right.entry(key).or_default() += 1;
            }
            assert!(all.counts == right, "{columns} columns");
        }
    }
}
