//! Common parts of the functions of columns: they read the numbers in pieces of a region in order,
//! and together with those of other columns.
//!
//! The caller splits a column into far and near parts, and merges the answers. So each function
//! returns partial results that do not depend on how the column was split.

mod compute;
mod copy;
mod find;
mod group;
mod merge;
mod numbering;
mod ranks;
mod sort;
mod take;
mod tally;

pub use compute::{
    Compute, ComputeColumn, Computed, ComputedColumn, FORMULA_DEPTH_MAX, FORMULA_INPUTS_MAX, FORMULA_STEPS_MAX,
    FormulaMachine, FormulaStep, is_computable,
};
pub use copy::{Copied, CopyBytes};
pub use find::{Find, Found, Search};
pub use group::{Group, Grouped, Grouping, Groups};
pub use merge::{Merge, Merged, Runs};
pub use ranks::{Bucket, Buckets, Histogram, Ranks, Span};
pub use sort::{Form, Sort, Unsorted};
pub use take::{Indices, Take, Taken};
pub use tally::{Tallied, Tallies, Tally, Tallying};

use crate::totals::Number;
use crate::{Fault, Place, Range};
use serde::{Deserialize, Serialize};

/// Bytes read between two turns of the other tasks.
const CHUNK_BYTES: u64 = 32 * 1024;
/// Most columns of a key: four, each with a bit that says whether there is a number.
pub const KEYS_MAX: usize = 8;
/// Most columns that are added up in one pass.
pub const VALUES_MAX: usize = 8;
/// Most conditions on a row.
pub const CONDITIONS_MAX: usize = 16;

/// A key: an image ([`Number::image`]) for each column; 0 for a missing column.
pub type Key = [u64; KEYS_MAX];

/// The type of the numbers of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Kind {
    /// `u8`
    U8,
    /// `u16`
    U16,
    /// `u32`
    U32,
    /// `u64`
    U64,
    /// `i8`
    I8,
    /// `i16`
    I16,
    /// `i32`
    I32,
    /// `i64`
    I64,
    /// `f32`
    F32,
    /// `f64`
    F64,
}

impl Kind {
    /// Returns the bytes of a number.
    pub fn bytes(self) -> u64 {
        match self {
            Kind::U8 | Kind::I8 => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 => 8,
        }
    }

    /// Writes the images of numbers that lie side by side to `into`.
    fn images(self, bytes: &[u8], into: &mut Vec<u64>) {
        fn of<N: Number>(bytes: &[u8], into: &mut Vec<u64>) {
            N::each(bytes, |number| into.push(number.image()));
        }
        into.clear();
        match self {
            Kind::U8 => of::<u8>(bytes, into),
            Kind::U16 => of::<u16>(bytes, into),
            Kind::U32 => of::<u32>(bytes, into),
            Kind::U64 => of::<u64>(bytes, into),
            Kind::I8 => of::<i8>(bytes, into),
            Kind::I16 => of::<i16>(bytes, into),
            Kind::I32 => of::<i32>(bytes, into),
            Kind::I64 => of::<i64>(bytes, into),
            Kind::F32 => of::<f32>(bytes, into),
            Kind::F64 => of::<f64>(bytes, into),
        }
    }
}

/// Type of the cells of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Cell {
    /// A number.
    Number(Kind),
    /// A bit; in each byte the lowest comes first. Its image is the bit. The offset of a piece
    /// counts bits.
    Bit,
}

impl Cell {
    /// Returns the bits of a cell.
    pub fn bits(self) -> u64 {
        match self {
            Cell::Number(kind) => 8 * kind.bytes(),
            Cell::Bit => 1,
        }
    }

    /// Writes the images of `count` cells that lie side by side to `into`; the first `skipped` bits
    /// belong to no row.
    fn images(self, bytes: &[u8], skipped: usize, count: usize, into: &mut Vec<u64>) {
        match self {
            Cell::Number(kind) => kind.images(bytes, into),
            Cell::Bit => {
                let bit = |at: usize| u64::from(bytes[at / 8] >> (at % 8) & 1);
                into.clear();
                into.extend((skipped..skipped + count).map(bit));
            }
        }
    }
}

/// A column whose type is known at run time only.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Column {
    /// Type of its cells.
    pub cell: Cell,
    /// Pieces in which the cells lie, in order.
    pub pieces: Vec<Range>,
}

/// A condition on a row: the image ([`Number::image`]) of its number in a column is in this range.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Condition {
    /// The column.
    pub column: Column,
    /// Smallest image.
    pub low: u64,
    /// Largest image. If it is smaller than `low`, no row fits.
    pub high: u64,
}

/// Images of the columns of some rows that lie side by side.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'r> {
    /// Number of rows.
    pub count: usize,
    /// Images of each column of the key; empty for a missing column.
    pub images: [&'r [u64]; KEYS_MAX],
    /// Flags of the rows that all conditions keep. `None`: all are kept.
    pub kept: Option<&'r [bool]>,
}

impl<'r> Rows<'r> {
    /// Returns the number of columns of the key.
    fn columns(&self) -> usize {
        self.images.iter().filter(|column| !column.is_empty()).count()
    }

    /// Returns the key of a row, of `K` columns; missing columns are 0.
    fn key<const K: usize>(&self, row: usize) -> [u64; K] {
        core::array::from_fn(|column| self.images[column].get(row).copied().unwrap_or(0))
    }

    fn is_kept(&self, row: usize) -> bool {
        self.kept.is_none_or(|kept| kept[row])
    }
}

/// Returns how many keys of these columns fit in an answer, if `most` keys of two columns do: bits
/// take no room.
fn room(keys: &[Column], most: usize) -> usize {
    2 * most / keys.iter().filter(|column| column.cell != Cell::Bit).count().max(2)
}

/// Cursor over the numbers in pieces.
struct PieceCursor<'w> {
    pieces: &'w [Range],
    bits: u64,
    /// Numbers of the first piece that were read.
    seen: u64,
}

impl<'w> PieceCursor<'w> {
    /// Makes a cursor over numbers of this many bytes.
    fn new(pieces: &'w [Range], bytes: u64) -> PieceCursor<'w> {
        PieceCursor { pieces, bits: 8 * bytes, seen: 0 }
    }

    fn of(column: &'w Column) -> PieceCursor<'w> {
        PieceCursor { pieces: &column.pieces, bits: column.cell.bits(), seen: 0 }
    }

    /// Returns how many numbers lie side by side from here on; 0 at the end. At most a chunk.
    fn ready(&mut self) -> u64 {
        while let Some((first, rest)) = self.pieces.split_first() {
            if self.seen < first.count {
                // At most as many bits as bytes, since a word is made of each.
                return (first.count - self.seen).min(CHUNK_BYTES * 8 / self.bits.max(8));
            }
            (self.pieces, self.seen) = (rest, 0);
        }
        0
    }

    /// Returns how many bits of the first byte come before the next number.
    fn skipped(&self) -> usize {
        let first = self.pieces.first().map_or(0, |piece| piece.offset);
        if self.bits.is_multiple_of(8) { 0 } else { (first.wrapping_add(self.seen) % 8) as usize }
    }

    /// Reads the bytes of the next `count` numbers, which are [ready](Walk::ready).
    async fn next<'p, P: Place>(&mut self, place: &'p P, count: u64) -> Result<P::Bytes<'p>, Fault> {
        let outside = Fault::OutOfRange { offset: self.pieces.first().map_or(0, |piece| piece.offset) };
        let Some(piece) = self.pieces.first() else { return Err(outside) };
        let before = match self.bits {
            1 => piece.offset.checked_add(self.seen).map(|bit| bit / 8),
            bits => self.seen.checked_mul(bits / 8).and_then(|before| piece.offset.checked_add(before)),
        };
        let offset = before.filter(|offset| *offset < place.region_bytes()).ok_or(outside)?;
        let bits = self.skipped() + (count * self.bits) as usize;
        let bytes = place.read_range(offset, bits.div_ceil(8)).await?;
        self.seen += count;
        Ok(bytes)
    }
}

/// Cursor over rows: the keys and the conditions of columns side by side.
struct RowCursor<'w> {
    keys: Vec<(Cell, PieceCursor<'w>)>,
    conditions: Vec<(&'w Condition, PieceCursor<'w>)>,
    images: [Vec<u64>; KEYS_MAX],
    asked: Vec<u64>,
    kept: Vec<bool>,
}

impl<'w> RowCursor<'w> {
    /// Makes a cursor; `None` if there are too many columns.
    fn new(keys: &'w [Column], conditions: &'w [Condition]) -> Option<RowCursor<'w>> {
        let is_right = keys.len() <= KEYS_MAX && conditions.len() <= CONDITIONS_MAX;
        is_right.then(|| RowCursor {
            keys: keys.iter().map(|column| (column.cell, PieceCursor::of(column))).collect(),
            conditions: conditions.iter().map(|condition| (condition, PieceCursor::of(&condition.column))).collect(),
            images: Default::default(),
            asked: Vec::new(),
            kept: Vec::new(),
        })
    }

    /// Returns how many rows lie side by side from here on, in each column; 0 at the end. Without
    /// columns it is `u64::MAX`.
    fn ready(&mut self) -> u64 {
        let keys = self.keys.iter_mut().map(|(_, walk)| walk.ready());
        keys.chain(self.conditions.iter_mut().map(|(_, walk)| walk.ready())).min().unwrap_or(u64::MAX)
    }

    /// Reads the next `count` rows.
    async fn next<P: Place>(&mut self, place: &P, count: u64) -> Result<Rows<'_>, Fault> {
        let rows = count as usize;
        for ((cell, walk), images) in self.keys.iter_mut().zip(&mut self.images) {
            let skipped = walk.skipped();
            let bytes = walk.next(place, count).await?;
            cell.images(&bytes, skipped, rows, images);
        }
        if !self.conditions.is_empty() {
            self.kept.clear();
            self.kept.resize(rows, true);
        }
        for (Condition { column, low, high }, walk) in &mut self.conditions {
            let skipped = walk.skipped();
            let bytes = walk.next(place, count).await?;
            column.cell.images(&bytes, skipped, rows, &mut self.asked);
            keep(&mut self.kept, &self.asked, *low, *high);
        }
        let kept = (!self.conditions.is_empty()).then_some(&self.kept[..]);
        Ok(Rows { count: rows, images: self.images.each_ref().map(Vec::as_slice), kept })
    }
}

/// Clears the flags of those rows whose image is not from `low` to `high`.
pub fn keep(kept: &mut [bool], images: &[u64], low: u64, high: u64) {
    for (kept, image) in kept.iter_mut().zip(images) {
        *kept &= (low..=high).contains(image);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against images that have another order than their numbers, or do not lead back to them.
    use super::*;
    use core::fmt::Debug;

    fn check<N: Number + PartialEq + Debug, const BYTES: usize>(ascending: &[N], bytes: fn(N) -> [u8; BYTES]) {
        for pair in ascending.windows(2) {
            assert!(pair[0].image() < pair[1].image(), "{pair:?}");
        }
        for number in ascending {
            assert_eq!(format!("{:?}", N::of_image(number.image())), format!("{number:?}"));
        }
        let bytes: Vec<u8> = ascending.iter().flat_map(|number| bytes(*number)).collect();
        let mut images = Vec::new();
        N::KIND.images(&bytes, &mut images);
        assert_eq!(images, Vec::from_iter(ascending.iter().map(|number| number.image())));
        assert_eq!(N::KIND.bytes() as usize, size_of::<N>());
    }

    #[test]
    fn images_are_ordered_as_numbers_are() {
        check(&[0u8, 1, 200, 255], u8::to_le_bytes);
        check(&[0u16, 7, u16::MAX], u16::to_le_bytes);
        check(&[0u32, 7, u32::MAX], u32::to_le_bytes);
        check(&[0u64, 7, u64::MAX], u64::to_le_bytes);
        check(&[i8::MIN, -1, 0, 1, i8::MAX], i8::to_le_bytes);
        check(&[i16::MIN, -1, 0, 1, i16::MAX], i16::to_le_bytes);
        check(&[i32::MIN, -1, 0, 1, i32::MAX], i32::to_le_bytes);
        check(&[i64::MIN, -1, 0, 1, i64::MAX], i64::to_le_bytes);
        check(&[f32::NEG_INFINITY, -1.5, -f32::MIN_POSITIVE, -0.0, 0.0, 1e-40, 2.5, f32::INFINITY], f32::to_le_bytes);
        check(&[f64::NEG_INFINITY, f64::MIN, -1.5, -0.0, 0.0, 5e-324, 2.5, f64::MAX, f64::INFINITY], f64::to_le_bytes);
    }

    #[test]
    fn pieces_are_walked_side_by_side() {
        let piece = |offset, count| Range { offset, count };
        let pieces = [piece(0, 0), piece(8, 3), piece(0, 0), piece(80, 10_000)];
        let mut walk = PieceCursor::new(&pieces, 8);
        assert_eq!(walk.ready(), 3);
        walk.seen += 2;
        assert_eq!(walk.ready(), 1);
        walk.seen += 1;
        assert_eq!(walk.ready(), CHUNK_BYTES / 8);
        walk.seen += 10_000;
        assert_eq!(walk.ready(), 0);
    }
}
