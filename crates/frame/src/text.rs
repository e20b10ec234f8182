//! Strings: stored as numbers of kinds as long as there are few kinds (dictionary encoding),
//! otherwise as their bytes.
//!
//! A flag, the name of a zone or a kind of payment has a hundred or a thousand values in a million
//! rows. Numbers of kinds take two bytes a row. The memory server groups by them and searches them
//! like any numbers. The kinds themselves are near.
//!
//! Danger: a row that gets another row's string; the zero below a null that is taken for the first
//! kind; rows that are lost when there become too many kinds.

use crate::column::{CHUNK_ROWS, nulls_of, read};
use crate::error::FrameError;
use arrow::array::{Array, ArrayData, ArrayRef, StringArray, UInt16Array};
use arrow::buffer::NullBuffer;
use arrow::compute::take;
use farfield::{FarError, FarVec, Heap};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// Most kinds of a column: as many as groups that are kept near, and as rows of a chunk.
const KINDS_MAX: usize = 8192;
/// Most bytes of all kinds of a column together.
const BYTES_MAX: usize = 256 << 10;

/// Strings of few kinds: for each row the number of its kind, or zero for a null.
#[derive(Default)]
pub(crate) struct DictionaryStrings {
    pub(crate) numbers: FarVec<u16>,
    kinds: Vec<Arc<str>>,
    number_of: HashMap<Arc<str>, u16>,
    bytes: usize,
    /// All kinds as an Arrow array, made when strings are first read.
    array: OnceLock<StringArray>,
}

impl DictionaryStrings {
    /// Returns the number of each string, zero for nulls. New strings become kinds. Returns `None`
    /// if there are too many kinds.
    pub(crate) fn numbers_of(&mut self, strings: &StringArray) -> Option<Vec<u16>> {
        strings.iter().map(|string| string.map_or(Some(0), |string| self.number_or_new(string))).collect()
    }

    fn number_or_new(&mut self, kind: &str) -> Option<u16> {
        if let Some(number) = self.number(kind) {
            return Some(number);
        }
        let number = self.kinds.len() as u16;
        self.bytes += kind.len();
        if self.kinds.len() == KINDS_MAX || self.bytes > BYTES_MAX {
            return None;
        }
        let kind: Arc<str> = kind.into();
        self.array.take();
        self.kinds.push(kind.clone());
        self.number_of.insert(kind, number);
        Some(number)
    }

    /// Returns the number of a kind, or `None` if no row has it.
    pub(crate) fn number(&self, kind: &str) -> Option<u16> {
        self.number_of.get(kind).copied()
    }

    /// Returns the strings with these numbers.
    pub(crate) fn strings(&self, numbers: Vec<u16>, nulls: Option<NullBuffer>) -> Result<ArrayRef, FrameError> {
        let kinds = self.array.get_or_init(|| StringArray::from_iter_values(&self.kinds));
        Ok(take(kinds, &UInt16Array::new(numbers.into(), nulls), None)?)
    }

    /// Copies all strings into a column of bytes. `valid` are the validity bits, if there are
    /// nulls.
    pub(crate) fn spelled_out(&self, heap: &Heap, valid: Option<&FarVec<u64>>) -> Result<VariableBytes, FrameError> {
        let mut text = VariableBytes::default();
        for first in (0..self.numbers.len()).step_by(CHUNK_ROWS) {
            let rows = first..self.numbers.len().min(first + CHUNK_ROWS);
            let nulls = valid.map(|valid| nulls_of(heap, valid, rows.clone())).transpose()?;
            let strings = self.strings(read(heap, &self.numbers, rows)?, nulls)?;
            text.push(heap, &strings.to_data())?;
        }
        Ok(text)
    }
}

/// Strings of many kinds: bytes without gaps, and for each chunk one offset more than it has rows.
#[derive(Default)]
pub(crate) struct VariableBytes {
    bytes: FarVec<u8>,
    offsets: FarVec<i32>,
    /// Offset in `bytes` at which each chunk begins.
    starts: Vec<usize>,
}

impl VariableBytes {
    pub(crate) fn push(&mut self, heap: &Heap, data: &ArrayData) -> Result<(), FarError> {
        let scope = heap.enter();
        let start = self.bytes.len();
        let offsets = &data.buffers()[0].typed_data::<i32>();
        // An array without rows may have no offset at all.
        let offsets = if data.is_empty() { &[0][..] } else { &offsets[data.offset()..=data.offset() + data.len()] };
        let first = offsets[0];
        let moved: Vec<i32> = offsets.iter().map(|offset| offset - first).collect();
        let bytes = first as usize..offsets[offsets.len() - 1] as usize;
        self.offsets.extend_from_slice(&scope, &moved)?;
        self.bytes.extend_from_slice(&scope, &data.buffers()[1][bytes])?;
        self.starts.push(start);
        Ok(())
    }

    pub(crate) fn read(&self, heap: &Heap, chunk: usize, rows: usize) -> Result<(Vec<i32>, Vec<u8>), FarError> {
        let first = chunk * (CHUNK_ROWS + 1);
        let offsets = read(heap, &self.offsets, first..first + rows + 1)?;
        let end = self.starts.get(chunk + 1).copied().unwrap_or(self.bytes.len());
        Ok((offsets, read(heap, &self.bytes, self.starts[chunk]..end)?))
    }
}
