//! `ff.tally`: how often each value, or pair of values, is there.

use super::{Column, Key, KeyWalk, key_of};
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
    pub fn add_all(&mut self, images: &[&[u64]; super::KEYS_MAX], most: usize) -> bool {
        let mut row = 0;
        while row < images[0].len() {
            let key = key_of(images, row);
            // Neighbours are often alike.
            let alike = (row + 1..images[0].len()).take_while(|next| key_of(images, *next) == key).count();
            if self.counts.len() >= most && !self.counts.contains_key(&key) {
                return false;
            }
            *self.counts.entry(key).or_default() += 1 + alike as u64;
            self.rows += 1 + alike as u64;
            row += 1 + alike;
        }
        true
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
    const VERSION: u32 = 1;
    const REPEATABLE: bool = true;
    type Argument = Tallied;
    type Answer = Tallies;

    async fn run<P: Place>(place: &P, tallied: Tallied) -> Result<Tallies, Fault> {
        let mut tallies = Tallies::default();
        let Some(mut walk) = KeyWalk::new(&tallied.keys) else { return Ok(tallies) };
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
            let found = sim.run_one::<Tally>(Tallied { keys: vec![Column { kind: u32::KIND, pieces }] }).unwrap();
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
        let found = sim.run_one::<Tally>(Tallied { keys: vec![one, other] }).unwrap();
        let ones = bytes[..70].iter().chain(&bytes[100..1030]);
        let words = [&bytes[4096..5096], &bytes[10..1010]].concat();
        let mut right = Tallies::default();
        for (one, word) in ones.zip(words.as_chunks().0) {
            right.add_all(&[&[one.image()], &[i16::from_le_bytes(*word).image()]], usize::MAX);
        }
        assert_eq!(found, right);
        assert_eq!(sim.run_one::<Tally>(Tallied { keys: Vec::new() }), Ok(Tallies::default()));
    }
}
