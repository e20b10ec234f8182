//! `ff.tally`: how often each value, or pair of values, is there.

use super::{Column, Condition, Key, Numbering, RowWalk, Rows};
use crate::{Fault, Function, Place};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts keys.
#[derive(Debug)]
pub struct Tally;

/// The columns that are a key together: one or two, of equal length.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Tallied {
    /// In this order.
    pub keys: Vec<Column>,
    /// What rows have to be, to be counted.
    pub conditions: Vec<Condition>,
}

/// How often keys were there.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Tallies {
    /// By key.
    pub counts: BTreeMap<Key, u64>,
    /// Rows that were counted: all, or as many as there was room for the keys of.
    pub rows: u64,
}

impl Tallies {
    /// Most keys of an answer.
    pub const MOST: usize = 2048;

    /// Counts rows until there are more keys than so many; `false` if it stopped there.
    pub fn add_all(&mut self, rows: &Rows<'_>, most: usize) -> bool {
        let mut numbering = Numbering::new();
        let done = rows.number(&mut numbering, |key| {
            let has_room = self.counts.len() < most || self.counts.contains_key(key);
            if has_room {
                self.counts.entry(*key).or_default();
            }
            has_room
        });
        let mut counts = vec![0; numbering.keys.len()];
        for number in numbering.rows.iter().filter(|number| **number != Numbering::NONE) {
            counts[*number as usize] += 1;
        }
        for (key, count) in numbering.keys.iter().zip(counts) {
            *self.counts.entry(*key).or_default() += count;
        }
        self.rows += done as u64;
        done == rows.count
    }

    /// All that another one has.
    pub fn merge(&mut self, other: Tallies) {
        self.rows = self.rows.saturating_add(other.rows);
        for (key, count) in other.counts {
            let here = self.counts.entry(key).or_default();
            *here = here.saturating_add(count);
        }
    }
}

impl Function for Tally {
    const NAME: &'static str = "ff.tally";
    const VERSION: u32 = 2;
    const ONLY_READS: bool = true;
    type Argument = Tallied;
    type Answer = Tallies;

    async fn run<P: Place>(place: &P, tallied: Tallied) -> Result<Tallies, Fault> {
        let mut tallies = Tallies::default();
        let walk = RowWalk::new(&tallied.keys, &tallied.conditions).filter(|_| !tallied.keys.is_empty());
        let Some(mut walk) = walk else { return Ok(tallies) };
        loop {
            let count = walk.ready();
            if count == 0 || !tallies.add_all(&walk.next(place, count).await?, Tallies::MOST) {
                return Ok(tallies);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against rows that are counted twice or never where an answer has no room for more keys.
    use super::*;
    use crate::{Number, Range, Sim};

    #[test]
    fn an_answer_that_is_full_says_how_far_it_came() {
        let numbers: Vec<u32> = (0..9000).map(|index| index / 3).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let sim = Sim::new(5, bytes);
        let (mut rows, mut all) = (0, Tallies::default());
        while rows < 9000 {
            let pieces = vec![Range { offset: 4 * rows, count: 9000 - rows }];
            let found = sim
                .run_one::<Tally>(Tallied { keys: vec![Column { kind: u32::KIND, pieces }], conditions: Vec::new() })
                .unwrap();
            assert!(found.rows > 0 && found.counts.len() <= Tallies::MOST);
            rows += found.rows;
            all.merge(found);
        }
        assert_eq!((all.rows, all.counts.len()), (9000, 3000));
        assert!(all.counts.iter().zip(0..).all(|((key, count), number)| (*key, *count) == ([number, 0], 3)));
    }

    #[test]
    fn pairs_are_keys_of_columns_cut_anywhere() {
        let bytes: Vec<u8> = (0..8192u32).map(|index| (index % 251) as u8).collect();
        let sim = Sim::new(5, bytes.clone());
        let range = |offset, count| Range { offset, count };
        let one = Column { kind: u8::KIND, pieces: vec![range(0, 70), range(100, 930)] };
        let other = Column { kind: i16::KIND, pieces: vec![range(4096, 500), range(10, 500)] };
        let found = sim.run_one::<Tally>(Tallied { keys: vec![one, other], conditions: Vec::new() }).unwrap();
        let ones = bytes[..70].iter().chain(&bytes[100..1030]);
        let words = [&bytes[4096..5096], &bytes[10..1010]].concat();
        let mut right = Tallies::default();
        for (one, word) in ones.zip(words.as_chunks().0) {
            let images = [&[one.image()][..], &[i16::from_le_bytes(*word).image()]];
            right.add_all(&Rows { count: 1, images, kept: None }, usize::MAX);
        }
        assert_eq!(found, right);
        let nothing = Tallied { keys: Vec::new(), conditions: Vec::new() };
        assert_eq!(sim.run_one::<Tally>(nothing), Ok(Tallies::default()));
    }
}
