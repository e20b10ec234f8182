//! `ff.group.*`: number, sum, smallest and largest of the numbers of columns, grouped by the values
//! of others. There is one function for each type of number. All columns of it are aggregated in one
//! pass, for which the keys are read and looked up once.

use super::numbering::{NONE, Numbering};
use super::{CHUNK_BYTES, Column, Condition, Key, PieceCursor, RowCursor, Rows, VALUES_MAX, room};
use crate::totals::{Number, Part};
use crate::{Fault, Function, Place, Range};
use core::marker::PhantomData;
use core::ops::Bound;
use farfield_core::wire::CallBody;
use postcard::ser_flavors::Size;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Adds up numbers by their keys.
#[derive(Debug)]
pub struct Group<N>(PhantomData<N>);

/// Columns to group and to add up, of equal length.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grouped {
    /// Columns that form the key, at most [`KEYS_MAX`](super::KEYS_MAX). Without columns, all rows
    /// have the same key.
    pub keys: Vec<Column>,
    /// Pieces in which the numbers lie that are added up, for each column; at most
    /// [`VALUES_MAX`](super::VALUES_MAX).
    pub values: Vec<Vec<Range>>,
    /// Conditions on the rows to add up.
    pub conditions: Vec<Condition>,
}

/// Number, sum, smallest and largest of the numbers of each key, column by column.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Groups<N: Number> {
    /// Results by key.
    pub groups: BTreeMap<Key, Vec<Part<N>>>,
    /// Rows that were added up: all, or those up to where the keys filled the answer.
    pub rows: u64,
}

impl<N: Number> Default for Groups<N> {
    fn default() -> Groups<N> {
        Groups { groups: BTreeMap::new(), rows: 0 }
    }
}

impl<N: Number> Groups<N> {
    /// Most keys of an answer; for keys of more than two columns, or several columns that are added up, fewer.
    pub const MOST: usize = 1024;

    /// Checks whether each key has a result for each of so many columns. Servers may be wrong.
    pub fn has_columns(&self, columns: usize) -> bool {
        self.groups.values().all(|parts| parts.len() == columns)
    }

    /// Adds everything that another one has.
    pub fn merge(&mut self, other: &Groups<N>) {
        self.rows = self.rows.saturating_add(other.rows);
        for (key, parts) in &other.groups {
            let known = self.groups.entry(*key).or_default();
            if known.len() < parts.len() {
                known.resize_with(parts.len(), Part::default);
            }
            known.iter_mut().zip(parts).for_each(|(known, part)| known.merge(part));
        }
    }
}

/// Adds up rows, many at a time, for the final [`Groups`].
#[derive(Debug)]
pub struct Grouping<N: Number> {
    numbering: Numbering,
    /// Columns that are added up.
    columns: usize,
    /// Results of each key, by its number, for each column.
    parts: Vec<Part<N>>,
    rows: u64,
    /// Number of keys at the last check whether an answer is full. The next field is the number of
    /// rows from which on it is checked again.
    keys_looked_at: usize,
    looks_again: u64,
    /// For the rows that are being added: their keys with where the values of each begin, where those
    /// end, and the values of each side by side.
    seen: Vec<(u32, u32)>,
    ends: Vec<u32>,
    sorted: Vec<N>,
}

impl<N: Number> Grouping<N> {
    /// Creates the results of no rows, of so many columns.
    pub fn new(columns: usize) -> Grouping<N> {
        Grouping {
            numbering: Numbering::default(),
            columns,
            parts: Vec::new(),
            rows: 0,
            keys_looked_at: 0,
            looks_again: 0,
            seen: Vec::new(),
            ends: Vec::new(),
            sorted: Vec::new(),
        }
    }

    /// Number of results that fit in an answer in any case: exact sums of floating-point numbers have
    /// at most some 400 bytes.
    const FITTING: usize = 128;
    /// Bytes from which on an answer is full: rows added before the next check make it hardly
    /// longer.
    const FULL_BYTES: usize = CallBody::ANSWER_BYTES_MAX * 3 / 4;
    /// Bytes by which a number may make an answer longer between two checks, if its key is not new.
    const ROW_BYTES: usize = 8;

    /// Checks whether an answer has no room for more rows.
    pub(super) fn is_full(&mut self) -> bool {
        let keys = self.numbering.len();
        let is_looked_at = keys == self.keys_looked_at && self.rows < self.looks_again;
        if keys * self.columns <= Self::FITTING || is_looked_at {
            return false;
        }
        let bytes = |entry: (Key, &[Part<N>])| postcard::serialize_with_flavor(&entry, Size::default()).unwrap_or(0);
        let bytes = self.results().map(bytes).sum::<usize>();
        let room = CallBody::ANSWER_BYTES_MAX.saturating_sub(bytes);
        let rows = room / (Self::ROW_BYTES * self.columns.max(1));
        (self.keys_looked_at, self.looks_again) = (keys, self.rows + rows as u64);
        bytes > Self::FULL_BYTES
    }

    /// Adds rows until there are more keys than `most`. Returns `false` if it stopped there. Each of the
    /// columns has as many values as there are rows. The keys of all rows must have equally many columns.
    ///
    /// # Panics
    /// If there are not as many columns as this was created for.
    pub fn add_all<'n>(
        &mut self,
        rows: &Rows<'_>,
        columns: impl ExactSizeIterator<Item = &'n [N]>,
        most: usize,
    ) -> bool {
        assert_eq!(columns.len(), self.columns, "columns that are added up");
        let done = self.numbering.number(rows, most);
        self.parts.resize_with(self.numbering.len() * self.columns, Part::default);
        self.ends.resize(self.numbering.len(), 0);
        // The values of each key side by side: many are added up faster together than one by one.
        for number in self.numbering.rows.iter().filter(|number| **number != NONE) {
            let count = &mut self.ends[*number as usize];
            if *count == 0 {
                self.seen.push((*number, 0));
            }
            *count += 1;
        }
        let mut before = 0;
        for (number, start) in &mut self.seen {
            *start = before;
            before += core::mem::replace(&mut self.ends[*number as usize], before);
        }
        self.sorted.clear();
        self.sorted.resize(before as usize, N::of_image(N::FIRST));
        for (column, values) in columns.enumerate() {
            for (number, value) in self.numbering.rows.iter().zip(values).filter(|(number, _)| **number != NONE) {
                let next = &mut self.ends[*number as usize];
                self.sorted[*next as usize] = *value;
                *next += 1;
            }
            for (number, start) in &self.seen {
                let end = core::mem::replace(&mut self.ends[*number as usize], *start) as usize;
                let part = &mut self.parts[*number as usize * self.columns + column];
                part.add_all(&self.sorted[*start as usize..end], &(Bound::Unbounded, Bound::Unbounded));
            }
        }
        self.seen.drain(..).for_each(|(number, _)| self.ends[number as usize] = 0);
        self.rows += done as u64;
        done == rows.count
    }

    /// Returns the keys, and the results of each.
    fn results(&self) -> impl Iterator<Item = (Key, &[Part<N>])> {
        self.numbering.keys().zip(self.parts.chunks(self.columns.max(1)))
    }

    /// Returns the results.
    pub fn finish(self) -> Groups<N> {
        Groups { groups: self.results().map(|(key, parts)| (key, parts.to_vec())).collect(), rows: self.rows }
    }
}

impl<N: Number> Function for Group<N> {
    const NAME: &'static str = N::GROUP;
    const VERSION: u32 = 4;
    const ONLY_READS: bool = true;
    type Argument = Grouped;
    type Answer = Groups<N>;

    async fn run<P: Place>(place: &P, grouped: Grouped) -> Result<Groups<N>, Fault> {
        let columns = grouped.values.len();
        let mut grouping = Grouping::new(columns);
        let rows = RowCursor::new(&grouped.keys, &grouped.conditions).filter(|_| (1..=VALUES_MAX).contains(&columns));
        let Some(mut rows) = rows else { return Ok(grouping.finish()) };
        let mut values: Vec<_> =
            grouped.values.iter().map(|pieces| PieceCursor::new(pieces, size_of::<N>() as u64)).collect();
        let most = room(&grouped.keys, Groups::<N>::MOST / columns);
        let mut numbers = vec![Vec::new(); columns];
        // Before the next look whether an answer is full, all columns together make it as long as one could.
        let rows_max = CHUNK_BYTES / (size_of::<N>() * columns) as u64;
        loop {
            let count = values.iter_mut().map(PieceCursor::ready).fold(rows.ready(), u64::min).min(rows_max);
            if count == 0 {
                return Ok(grouping.finish());
            }
            for (values, numbers) in values.iter_mut().zip(&mut numbers) {
                let bytes = values.next(place, count).await?;
                numbers.clear();
                N::each(&bytes, |number| numbers.push(number));
            }
            let numbers = numbers.iter().map(Vec::as_slice);
            let is_all = grouping.add_all(&rows.next(place, count).await?, numbers, most);
            if !is_all || grouping.is_full() {
                return Ok(grouping.finish());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against numbers in the group of another row, and against answers that are too long.
    use super::*;
    use crate::columns::{Cell, KEYS_MAX};
    use crate::{Sim, Stop};

    /// Sums by keys of which there are so many, asked for until all rows are there; how often.
    fn calls(keys_max: u32, number: fn(u32) -> f64) -> usize {
        let keys: Vec<u16> = (0..20_000u32).map(|index| (index * index % keys_max) as u16).collect();
        let numbers: Vec<f64> = (0..20_000).map(number).collect();
        let mut bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        let sim = Sim::new(6, bytes);
        let (mut rows, mut calls, mut all) = (0, 0, Groups::default());
        while rows < 20_000 {
            let count = 20_000 - rows;
            let key = Column { cell: Cell::Number(u16::KIND), pieces: vec![Range { offset: 2 * rows, count }] };
            let values = vec![Range { offset: 40_000 + 8 * rows, count }];
            let grouped = Grouped { keys: vec![key], values: vec![values], conditions: Vec::new() };
            let found = sim.run_one::<Group<f64>>(grouped).unwrap();
            assert!(found.rows > 0 && found.groups.len() <= Groups::<f64>::MOST);
            let encoded = postcard::to_stdvec(&found).unwrap();
            assert!(encoded.len() <= CallBody::ANSWER_BYTES_MAX, "{}", encoded.len());
            rows += found.rows;
            calls += 1;
            all.merge(&found);
        }
        let mut right: BTreeMap<Key, Part<f64>> = BTreeMap::new();
        for (key, number) in keys.iter().zip(&numbers) {
            let part = right.entry([u64::from(*key), 0, 0, 0, 0, 0, 0, 0]).or_default();
            part.add_all(&[*number], &(Bound::Unbounded, Bound::Unbounded));
        }
        let said = |groups: &BTreeMap<Key, Part<f64>>| {
            groups.iter().map(|(key, part)| (*key, part.count(), part.sum().to_bits())).collect::<Vec<_>>()
        };
        let all = all.groups.into_iter().map(|(key, parts)| (key, parts[0].clone())).collect();
        assert_eq!(said(&all), said(&right));
        calls
    }

    #[test]
    fn groups_are_those_of_a_loop_however_often_an_answer_is_full() {
        let ordinary = |index| f64::from(index) * -0.25;
        assert_eq!(calls(613, ordinary), 1);
        assert!(calls(9973, ordinary) > 3);
        // Of numbers so far apart sums are as long as they get.
        let wild = |index: u32| f64::from_bits(u64::from(index % 2000) << 52 | 0xf_ffff_ffff_ffff);
        assert!(calls(613, wild) > 1);
        assert_eq!(calls(99, wild), 1);
    }

    #[test]
    fn several_columns_are_added_up_in_one_pass_as_each_alone() {
        // Sums that are as long as they get, in answers that are soon full.
        let wild = |index: u64| f64::from_bits((index * 37 % 2000) << 52 | 0xf_ffff_ffff_ffff);
        let bytes: Vec<u8> = (0..8000).flat_map(|index| wild(index).to_le_bytes()).collect();
        let sim = Sim::new(16, bytes);
        let count = 1000;
        let column = |number: u64, from: u64| vec![Range { offset: 8 * (count * number + from), count: count - from }];
        let all = |columns: &[u64]| {
            let (mut rows, mut all) = (0, Groups::default());
            while rows < count {
                let key =
                    Column { cell: Cell::Number(u8::KIND), pieces: vec![Range { offset: rows, count: count - rows }] };
                let values = columns.iter().map(|number| column(*number, rows)).collect();
                let found =
                    sim.run_one::<Group<f64>>(Grouped { keys: vec![key], values, conditions: Vec::new() }).unwrap();
                assert!(found.rows > 0);
                let encoded = postcard::to_stdvec(&found).unwrap();
                assert!(encoded.len() <= CallBody::ANSWER_BYTES_MAX, "{} of {columns:?}", encoded.len());
                rows += found.rows;
                all.merge(&found);
            }
            all.groups
        };
        let together = all(&[7, 2, 0, 2, 5, 1, 3, 6]);
        for (place, number) in [7, 2, 0, 2, 5, 1, 3, 6].into_iter().enumerate() {
            let alone = all(&[number]);
            assert!(together.keys().eq(alone.keys()));
            assert!(together.values().zip(alone.values()).all(|(all, one)| all.len() == 8 && all[place] == one[0]));
        }
        let of = |columns| Grouped { keys: Vec::new(), values: vec![column(0, 0); columns], conditions: Vec::new() };
        for columns in [0, VALUES_MAX + 1] {
            assert_eq!(sim.run_one::<Group<f64>>(of(columns)), Ok(Groups::default()), "{columns} columns");
        }
    }

    #[test]
    fn only_rows_that_all_conditions_keep_are_added_up() {
        let bytes: Vec<u8> = (0..4000u32).map(|index| (index * index % 251) as u8).collect();
        let sim = Sim::new(6, bytes.clone());
        let range = |offset, count| Range { offset, count };
        let column =
            |offset| Column { cell: Cell::Number(u8::KIND), pieces: vec![range(offset, 70), range(offset + 100, 900)] };
        let condition = |offset, low, high| Condition { column: column(offset), low, high };
        let rows: Vec<usize> = (0..70).chain(100..1000).collect();
        let check = |keys: &[u64], conditions: Vec<Condition>| {
            let values = vec![vec![range(2000, 970)]];
            let is_kept = |row: usize| {
                conditions.iter().all(|one| {
                    let offset = one.column.pieces[0].offset as usize;
                    (one.low..=one.high).contains(&u64::from(bytes[offset + row]))
                })
            };
            let mut right: BTreeMap<Key, (u64, u128)> = BTreeMap::new();
            for (index, row) in rows.iter().enumerate().filter(|(_, row)| is_kept(**row)) {
                let key = |key: usize| keys.get(key).map_or(0, |offset| u64::from(bytes[*offset as usize + row]));
                let (count, sum) = right.entry([key(0), key(1), 0, 0, 0, 0, 0, 0]).or_default();
                (*count, *sum) = (*count + 1, *sum + u128::from(bytes[2000 + index]));
            }
            let keys = keys.iter().map(|offset| column(*offset)).collect();
            let found = sim.run_one::<Group<u8>>(Grouped { keys, values, conditions }).unwrap();
            let said = found.groups.iter().map(|(key, parts)| (*key, (parts[0].count(), parts[0].sum())));
            assert_eq!((found.rows, said.collect::<BTreeMap<_, _>>()), (970, right));
        };
        check(&[], Vec::new());
        check(&[], vec![condition(1000, 100, 200)]);
        check(&[], vec![condition(1000, 2, 1)]);
        check(&[3000], vec![condition(1000, 0, 4), condition(2990, 10, 255)]);
        check(&[3000, 1], vec![condition(3000, 0, 9), condition(1, 0, 9)]);
    }

    #[test]
    fn bits_and_many_columns_are_keys_wherever_they_begin() {
        let bytes: Vec<u8> = (0..8192u64).map(|index| (index * index * index % 251) as u8).collect();
        let sim = Sim::new(6, bytes.clone());
        let column = |cell, offset| Column {
            cell,
            pieces: vec![Range { offset, count: 301 }, Range { offset: offset + 1003, count: 669 }],
        };
        let number = Cell::Number(u8::KIND);
        let image = |(cell, offset): (Cell, u64), row: usize| {
            let at = offset as usize + if row < 301 { row } else { row - 301 + 1003 };
            u64::from(if cell == Cell::Bit { bytes[at / 8] >> (at % 8) & 1 } else { bytes[at] })
        };
        let all: [(Cell, u64); KEYS_MAX] = [
            (Cell::Bit, 13),
            (number, 2000),
            (Cell::Bit, 40_007),
            (number, 17),
            (Cell::Bit, 7 * 8),
            (number, 3000),
            (Cell::Bit, 30_001),
            (number, 5000),
        ];
        for columns in 0..=KEYS_MAX {
            let condition = (Cell::Bit, 50_003);
            let mut right: BTreeMap<Key, (u64, u128)> = BTreeMap::new();
            for row in (0..970).filter(|row| image(condition, *row) == 1) {
                let mut key = Key::default();
                key.iter_mut().zip(&all[..columns]).for_each(|(key, column)| *key = image(*column, row));
                let (count, sum) = right.entry(key).or_default();
                (*count, *sum) = (*count + 1, *sum + u128::from(bytes[row]));
            }
            let keys = all[..columns].iter().map(|(cell, offset)| column(*cell, *offset)).collect();
            let conditions = vec![Condition { column: column(condition.0, condition.1), low: 1, high: 1 }];
            let values = vec![vec![Range { offset: 0, count: 970 }]];
            let found = sim.run_one::<Group<u8>>(Grouped { keys, values, conditions }).unwrap();
            let said = found.groups.iter().map(|(key, parts)| (*key, (parts[0].count(), parts[0].sum())));
            assert_eq!((found.rows, said.collect::<BTreeMap<_, _>>()), (970, right), "{columns} columns");
        }
        let too_many =
            Grouped { keys: vec![column(number, 0); KEYS_MAX + 1], values: Vec::new(), conditions: Vec::new() };
        assert!(sim.run_one::<Group<u8>>(too_many).unwrap().groups.is_empty());
        for offset in [u64::MAX, 8192 * 8 - 5, u64::MAX / 8] {
            let bits = Column { cell: Cell::Bit, pieces: vec![Range { offset, count: 20 }] };
            let outside = Grouped {
                keys: vec![bits],
                values: vec![vec![Range { offset: 0, count: 20 }]],
                conditions: Vec::new(),
            };
            assert!(
                matches!(sim.run_one::<Group<u8>>(outside), Err(Stop::Fault(Fault::OutOfRange { .. }))),
                "{offset}"
            );
        }
    }
}
