//! Keys of rows, and the partition of a frame by the hash of its keys.
//!
//! Keys are equal as in SQL: NaN equals NaN, and −0 equals +0. A key is Arrow's row format of the
//! values, in which all NaN are made the same and −0 is made +0.
//!
//! Danger: equal keys in two parts; keys that are equal as numbers and not as bytes; nulls that are
//! taken for a value.

use crate::error::FrameError;
use crate::frame::{FarFrame, Maker};
use crate::plain::is_nested;
use arrow::array::{ArrayRef, ArrowPrimitiveType, AsArray, RecordBatch, UInt32Array};
use arrow::compute::take_record_batch;
use arrow::datatypes::{DataType, Float32Type, Float64Type};
use arrow::row::{RowConverter, Rows, SortField};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Parts that a frame is cut into. While a frame is cut, one chunk of each part is near.
pub(crate) const PARTS: usize = 16;

/// Converter from the first columns of batches to keys.
pub(crate) struct KeyConverter {
    columns: usize,
    converter: RowConverter,
}

impl KeyConverter {
    pub(crate) fn new(types: &[DataType]) -> Result<KeyConverter, FrameError> {
        let fields = types.iter().map(|data_type| SortField::new(data_type.clone())).collect();
        Ok(KeyConverter { columns: types.len(), converter: RowConverter::new(fields)? })
    }

    /// Returns the number of columns in a key.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn of(&self, batch: &RecordBatch) -> Result<Rows, FrameError> {
        let columns: Vec<ArrayRef> = batch.columns()[..self.columns].iter().map(alike).collect();
        Ok(self.converter.convert_columns(&columns)?)
    }

    /// Returns the key columns of these keys.
    pub(crate) fn columns_of<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Result<Vec<ArrayRef>, FrameError> {
        let parser = self.converter.parser();
        Ok(self.converter.convert_rows(keys.map(|key| parser.parse(key)))?)
    }

    /// Partitions the rows of a frame by the hash of their keys. All rows with a key are in one
    /// part, in the order that they had.
    pub(crate) fn parts(&self, frame: &FarFrame, hasher: &RandomState) -> Result<Vec<FarFrame>, FrameError> {
        let mut makers =
            (0..PARTS).map(|_| Maker::new(&frame.heap, frame.schema())).collect::<Result<Vec<Maker>, _>>()?;
        for batch in frame.batches() {
            let batch = batch?;
            let mut rows: Vec<Vec<u32>> = vec![Vec::new(); PARTS];
            for (row, key) in self.of(&batch)?.iter().enumerate() {
                rows[(hasher.hash_one(key.data()) % PARTS as u64) as usize].push(row as u32);
            }
            for (maker, rows) in makers.iter_mut().zip(rows).filter(|(_, rows)| !rows.is_empty()) {
                maker.push(take_record_batch(&batch, &UInt32Array::from(rows))?)?;
            }
        }
        makers.into_iter().map(Maker::finish).collect()
    }
}

impl FarFrame {
    /// Returns the index of a column by which rows are grouped, joined or sorted. Returns an error if
    /// the column holds lists, structs or maps: NaN and −0 inside them have no common key.
    pub(crate) fn key_index(&self, name: &str) -> Result<usize, FrameError> {
        let index = self.index(name)?;
        let data_type = self.schema.field(index).data_type();
        match is_nested(data_type) {
            true => Err(FrameError::Type { name: name.to_owned(), data_type: data_type.clone() }),
            false => Ok(index),
        }
    }
}

/// Replaces each NaN by one NaN and −0 by +0.
fn alike(array: &ArrayRef) -> ArrayRef {
    match array.data_type() {
        DataType::Float32 => {
            alike_by::<Float32Type>(array, |number| if number.is_nan() { f32::NAN } else { number + 0.0 })
        }
        DataType::Float64 => {
            alike_by::<Float64Type>(array, |number| if number.is_nan() { f64::NAN } else { number + 0.0 })
        }
        _ => array.clone(),
    }
}

fn alike_by<T: ArrowPrimitiveType>(array: &ArrayRef, one: impl Fn(T::Native) -> T::Native) -> ArrayRef {
    Arc::new(array.as_primitive::<T>().unary::<_, T>(one))
}
