//! `ff.group.*`: number, sum, smallest and largest of the numbers of one column by the values of others. One function for each type of number.

use super::{Column, Key, KeyWalk, Walk, key_of};
use crate::totals::{Number, Part};
use crate::{Fault, Function, Place, Range};
use core::marker::PhantomData;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Adds up numbers by their keys.
#[derive(Debug)]
pub struct Group<N>(PhantomData<N>);

/// Columns of equal length.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grouped {
    /// Those that are a key together: one or two.
    pub keys: Vec<Column>,
    /// Where the numbers lie that are added up.
    pub values: Vec<Range>,
}

/// What there is to say of the numbers of each key.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Groups<N: Number> {
    /// By key.
    pub groups: BTreeMap<Key, Part<N>>,
    /// Rows that were added up: all, or as many as there was room for the keys of.
    pub rows: u64,
}

impl<N: Number> Default for Groups<N> {
    fn default() -> Groups<N> {
        Groups { groups: BTreeMap::new(), rows: 0 }
    }
}

impl<N: Number> Groups<N> {
    /// Most keys of an answer: exact sums of floating-point numbers are some 400 bytes at most.
    pub const MOST: usize = 128;

    /// Adds rows until there are more keys than so many; `false` if it stopped there.
    pub fn add_all(&mut self, images: &[&[u64]; super::KEYS_MAX], values: &[N], most: usize) -> bool {
        let rows = images[0].len().min(values.len());
        let mut row = 0;
        while row < rows {
            let key = key_of(images, row);
            if self.groups.len() >= most && !self.groups.contains_key(&key) {
                return false;
            }
            let part = self.groups.entry(key).or_default();
            // Neighbours are often alike.
            while row < rows && key_of(images, row) == key {
                part.add(values[row]);
                self.rows += 1;
                row += 1;
            }
        }
        true
    }

    /// All that another one has.
    pub fn merge(&mut self, other: &Groups<N>) {
        self.rows = self.rows.saturating_add(other.rows);
        for (key, part) in &other.groups {
            self.groups.entry(*key).or_default().merge(part);
        }
    }
}

impl<N: Number> Function for Group<N> {
    const NAME: &'static str = N::GROUP;
    const VERSION: u32 = 1;
    const REPEATABLE: bool = true;
    type Argument = Grouped;
    type Answer = Groups<N>;

    async fn run<P: Place>(place: &P, grouped: Grouped) -> Result<Groups<N>, Fault> {
        let mut groups = Groups::default();
        let Some(mut keys) = KeyWalk::new(&grouped.keys) else { return Ok(groups) };
        let mut values = Walk::new(&grouped.values, size_of::<N>() as u64);
        let mut numbers = Vec::new();
        loop {
            let count = keys.ready().min(values.ready());
            if count == 0 {
                return Ok(groups);
            }
            {
                let bytes = values.next(place, count).await?;
                numbers.clear();
                N::each(&bytes, |number| numbers.push(number));
            }
            if !groups.add_all(&keys.next(place, count).await?, &numbers, Groups::<N>::MOST) {
                return Ok(groups);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against numbers in the group of another row, and against answers that are too long.
    use super::*;
    use crate::Sim;
    use core::ops::Bound;

    #[test]
    fn groups_are_those_of_a_loop_however_often_an_answer_is_full() {
        let keys: Vec<u16> = (0..5000u32).map(|index| (index * index % 613) as u16).collect();
        // Negative, so that sums are as long as they get.
        let numbers: Vec<f64> = (0..5000).map(|index| f64::from(index) * -1e-300).collect();
        let mut bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        let sim = Sim::new(6, bytes);
        let (mut rows, mut all) = (0, Groups::default());
        while rows < 5000 {
            let count = 5000 - rows;
            let key = Column { kind: u16::KIND, pieces: vec![Range { offset: 2 * rows, count }] };
            let values = vec![Range { offset: 10_000 + 8 * rows, count }];
            let found = sim.run_one::<Group<f64>>(Grouped { keys: vec![key], values }).unwrap();
            assert!(found.rows > 0 && found.groups.len() <= Groups::<f64>::MOST);
            let encoded = postcard::to_stdvec(&found).unwrap();
            assert!(encoded.len() <= 64 * 1024, "{}", encoded.len());
            rows += found.rows;
            all.merge(&found);
        }
        let mut right: BTreeMap<Key, Part<f64>> = BTreeMap::new();
        for (key, number) in keys.iter().zip(&numbers) {
            let part = right.entry([u64::from(*key), 0]).or_default();
            part.add_all(&[*number], &(Bound::Unbounded, Bound::Unbounded));
        }
        let said = |groups: &BTreeMap<Key, Part<f64>>| {
            groups.iter().map(|(key, part)| (*key, part.count(), part.sum().to_bits())).collect::<Vec<_>>()
        };
        assert_eq!(said(&all.groups), said(&right));
    }
}
