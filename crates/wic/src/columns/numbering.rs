//! Numbers for keys of rows, in the order in which they are first seen. The results of each key are
//! then an element of a vector.
//!
//! Dangers: two keys with one number; a key that is taken for one with other columns; a number
//! beyond those for which there is room.

use super::{KEYS_MAX, Key, Rows};
use hashbrown::HashTable;

/// Number of a row that is not kept.
pub(super) const NONE: u32 = u32::MAX;
const LATELY_BITS: u32 = 10;

/// Numbers of keys, all with equally many columns.
#[derive(Debug)]
pub(super) struct Numbering {
    /// Images of each key, as many as it has columns, by number.
    images: Vec<u64>,
    columns: usize,
    /// Numbers by their keys.
    table: HashTable<u32>,
    /// Numbers that were seen last, by some bits of the key's hash: a cache in front of the table.
    lately: Vec<u32>,
    /// Number of the key of each row that was numbered last, or [`NONE`].
    pub(super) rows: Vec<u32>,
}

impl Default for Numbering {
    fn default() -> Numbering {
        let lately = vec![NONE; 1 << LATELY_BITS];
        Numbering { images: Vec::new(), columns: 1, table: HashTable::new(), lately, rows: Vec::new() }
    }
}

fn hash<const K: usize>(key: &[u64; K]) -> u64 {
    let mix = |mixed: u64, image: &u64| (mixed.rotate_left(5) ^ image).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    key.iter().fold(0, mix)
}

impl Numbering {
    /// Returns the number of keys.
    pub(super) fn len(&self) -> usize {
        self.images.len() / self.columns
    }

    /// Numbers the keys of rows until there are more keys than `most`; returns how many rows were
    /// done. The keys of all rows must have equally many columns.
    pub(super) fn number(&mut self, rows: &Rows<'_>, most: usize) -> usize {
        self.rows.clear();
        // An empty set of rows does not tell its number of columns.
        if rows.count == 0 {
            return 0;
        }
        // Most keys have one column or two.
        match rows.columns() {
            0 | 1 => self.number_by::<1>(rows, most),
            2 => self.number_by::<2>(rows, most),
            3 | 4 => self.number_by::<4>(rows, most),
            _ => self.number_by::<KEYS_MAX>(rows, most),
        }
    }

    fn number_by<const K: usize>(&mut self, rows: &Rows<'_>, most: usize) -> usize {
        debug_assert!(self.images.is_empty() || self.columns == K, "keys of one table");
        self.columns = K;
        for row in 0..rows.count {
            let number = match rows.is_kept(row) {
                false => NONE,
                true => match self.number_of::<K>(rows.key(row), most) {
                    Some(number) => number,
                    None => break,
                },
            };
            self.rows.push(number);
        }
        self.rows.len()
    }

    #[inline]
    fn number_of<const K: usize>(&mut self, key: [u64; K], most: usize) -> Option<u32> {
        let hash = hash(&key);
        let place = (hash >> (u64::BITS - LATELY_BITS)) as usize;
        let number = self.lately[place];
        if self.images.as_chunks().0.get(number as usize) == Some(&key) {
            return Some(number);
        }
        let number = self.find::<K>(hash, key, most)?;
        self.lately[place] = number;
        Some(number)
    }

    fn find<const K: usize>(&mut self, hash: u64, key: [u64; K], most: usize) -> Option<u32> {
        let Numbering { images, table, .. } = self;
        let key_of = |images: &[u64], number: u32| images.as_chunks::<K>().0[number as usize];
        if let Some(number) = table.find(hash, |number| key_of(images, *number) == key) {
            return Some(*number);
        }
        let len = images.len() / K;
        if len >= most {
            return None;
        }
        let number = len as u32;
        images.extend_from_slice(&key);
        table.insert_unique(hash, number, |number| self::hash(&key_of(images, *number)));
        Some(number)
    }

    /// Returns all keys, by number; missing columns are zeros.
    pub(super) fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.images.chunks_exact(self.columns).map(|images| {
            let mut key = Key::default();
            key[..images.len()].copy_from_slice(images);
            key
        })
    }
}

#[cfg(test)]
mod tests {
    //! Against a map, with all numbers of columns, and with as many keys as there is room for.
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn numbers_are_those_of_a_map_in_the_order_of_rows() {
        for columns in 0..=KEYS_MAX {
            let (mut numbering, mut map) = (Numbering::default(), BTreeMap::new());
            for part in 0..20u64 {
                let image = |row: u64, column: u64| ((part * 997 + row * row) % (7 + 40 * column)) << (8 * column);
                let images: Vec<Vec<u64>> =
                    (0..columns as u64).map(|column| (0..500).map(|row| image(row, column)).collect()).collect();
                let kept: Vec<bool> = (0..500).map(|row| (row + part) % 3 > 0).collect();
                let side = |column: usize| images.get(column).map_or(&[][..], Vec::as_slice);
                let rows = Rows { count: 500, images: core::array::from_fn(side), kept: Some(&kept) };
                assert_eq!(numbering.number(&rows, usize::MAX), 500);
                for (row, is_kept) in kept.iter().enumerate() {
                    let key: Key = core::array::from_fn(|column| side(column).get(row).copied().unwrap_or(0));
                    let next = map.len() as u32;
                    let wanted = if *is_kept { *map.entry(key).or_insert(next) } else { NONE };
                    assert_eq!(numbering.rows[row], wanted, "{columns} columns, row {row}");
                }
            }
            assert_eq!(numbering.len(), map.len());
            assert!(numbering.keys().zip(0..).all(|(key, number)| map.get(&key) == Some(&number)));
        }
    }

    #[test]
    fn rows_of_known_keys_are_numbered_until_one_is_new() {
        let mut numbering = Numbering::default();
        let number = |numbering: &mut Numbering, images: &[u64], most| {
            let images = [images, &[], &[], &[], &[], &[], &[], &[]];
            numbering.number(&Rows { count: images[0].len(), images, kept: None }, most)
        };
        assert_eq!(number(&mut numbering, &[5, 6, 5, 7, 8], 3), 4);
        assert_eq!((numbering.len(), &numbering.rows[..]), (3, &[0, 1, 0, 2][..]));
        assert_eq!(number(&mut numbering, &[7, 7, 9, 5], 3), 2);
        // Of no rows nobody knows how many columns they have.
        let mut pairs = Numbering::default();
        let of_two = |images| Rows { count: 1, images: [images, images, &[], &[], &[], &[], &[], &[]], kept: None };
        assert_eq!(pairs.number(&of_two(&[1]), 9), 1);
        assert_eq!(number(&mut pairs, &[], 9), 0);
        assert!((pairs.len(), pairs.keys().count()) == (1, 1) && pairs.keys().all(|key| key[..3] == [1, 1, 0]));
        assert_eq!(number(&mut numbering, &[8, 5], 4), 2);
    }
}
