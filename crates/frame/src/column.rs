//! A column: its buffers as far vectors, and chunks of it as Arrow arrays.
//!
//! All rows of a buffer lie in one far vector, so one `aggregate` covers a whole column. Bits
//! (validity, booleans) are stored in words of 64. Chunks begin at a word, so a chunk is read
//! without shifting. Strings are in [`text`](crate::text).
//!
//! Danger: a chunk that is cut where its neighbour begins; bits that are read from the wrong word;
//! nulls that are taken for values.

use crate::cancel;
use crate::error::FrameError;
use crate::plain::Plain;
use crate::text::{DictionaryStrings, VariableBytes};
use crate::zones::{Zone, Zones};
use arrow::array::{Array, ArrayData, ArrayRef, AsArray, BooleanArray, BooleanBufferBuilder, UInt32Array, make_array};
use arrow::buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow::compute::{concat, take};
use arrow::datatypes::{ArrowNativeType, DataType, Field};
use farfield::collections::KeyColumn;
use farfield::{FarError, FarVec, Heap, Number};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Rows that are brought near together.
pub const CHUNK_ROWS: usize = 8192;
const WORD_BITS: usize = u64::BITS as usize;
const CHUNK_WORDS: usize = CHUNK_ROWS / WORD_BITS;
const _: () = assert!(CHUNK_ROWS.is_multiple_of(WORD_BITS));

/// Values of a column, by the type that they are stored as.
pub(crate) enum Values {
    I8(FarVec<i8>),
    I16(FarVec<i16>),
    I32(FarVec<i32>),
    I64(FarVec<i64>),
    U8(FarVec<u8>),
    U16(FarVec<u16>),
    U32(FarVec<u32>),
    U64(FarVec<u64>),
    F32(FarVec<f32>),
    F64(FarVec<f64>),
    Bits(FarVec<u64>),
    Words(DictionaryStrings),
    Text(VariableBytes),
    Plain(Plain),
}

/// Evaluates one expression for numbers of any type. The other kinds of values have arms of their
/// own.
macro_rules! with_numbers {
    ($values:expr, $numbers:ident => $numeric:expr, $($other:tt)*) => {
        match $values {
            Values::I8($numbers) => $numeric,
            Values::I16($numbers) => $numeric,
            Values::I32($numbers) => $numeric,
            Values::I64($numbers) => $numeric,
            Values::U8($numbers) => $numeric,
            Values::U16($numbers) => $numeric,
            Values::U32($numbers) => $numeric,
            Values::U64($numbers) => $numeric,
            Values::F32($numbers) => $numeric,
            Values::F64($numbers) => $numeric,
            $($other)*
        }
    };
}
pub(crate) use with_numbers;

/// Evaluates one expression for all values that have images: numbers, and strings stored as numbers
/// of kinds. The other kinds of values have arms of their own.
macro_rules! with_images {
    ($values:expr, $numbers:ident => $numeric:expr, $($other:tt)*) => {
        with_numbers!($values, $numbers => $numeric,
            Values::Words(words) => {
                let $numbers = &words.numbers;
                $numeric
            }
            $($other)*)
    };
}
pub(crate) use with_images;

/// A column under construction, or finished. It only grows: by whole chunks, and by a last one that
/// may be shorter.
pub(crate) struct FrameColumn {
    data_type: DataType,
    rows: usize,
    nulls: usize,
    /// Validity bits: which rows have a value. Empty as long as all rows have one. Rows without a
    /// value store zero as their number or bit.
    valid: FarVec<u64>,
    pub(crate) values: Values,
    /// Zone maps of numbers, and of strings stored as numbers of kinds.
    pub(crate) zones: Zones,
}

impl FrameColumn {
    pub(crate) fn new(field: &Field) -> Result<FrameColumn, FrameError> {
        let data_type = field.data_type().clone();
        let Some(values) = values_of(&data_type) else {
            return Err(FrameError::NotKept { name: field.name().clone(), data_type });
        };
        Ok(FrameColumn { data_type, rows: 0, nulls: 0, valid: FarVec::new(), values, zones: Zones::default() })
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn nulls(&self) -> usize {
        self.nulls
    }

    /// Returns the validity bits, or `None` if all rows have a value.
    pub(crate) fn valid(&self) -> Option<&FarVec<u64>> {
        (self.nulls > 0).then_some(&self.valid)
    }

    /// Checks whether the column stores numbers, and not bits, strings or plain bytes.
    pub(crate) fn has_numbers(&self) -> bool {
        with_numbers!(&self.values, _numbers => true,
            Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => false)
    }

    /// Checks whether the column can be a part of a key, as words.
    pub(crate) fn has_images(&self) -> bool {
        !matches!(self.values, Values::Text(_) | Values::Plain(_))
    }

    pub(crate) fn ends(&self) -> Result<Option<ArrayRef>, FrameError> {
        // Numbers of kinds of strings are not in the order of the strings.
        let zone = self.zones.all().filter(|_| self.has_numbers());
        let Some(Zone { low, high }) = zone else { return Ok(None) };
        self.array_of_images([low, high].into_iter(), None)
    }

    /// Returns the values with these images ([`Number::image`]) as an array of the column's type.
    /// An image stands for a number, a bit or a kind of string. Returns `None` if the column has no
    /// images.
    pub(crate) fn array_of_images(
        &self,
        images: impl Iterator<Item = u64>,
        nulls: Option<NullBuffer>,
    ) -> Result<Option<ArrayRef>, FrameError> {
        let bits = |images: &mut dyn Iterator<Item = u64>| images.map(|image| image == 1).collect();
        with_numbers!(&self.values, numbers => self.array_of(numbers_of(numbers, images), nulls).map(Some),
            Values::Bits(_) => Ok(Some(Arc::new(BooleanArray::new(bits(&mut { images }), nulls)))),
            Values::Words(words) => words.strings(images.map(u16::of_image).collect(), nulls).map(Some),
            Values::Text(_) | Values::Plain(_) => Ok(None))
    }

    /// Returns the column as a part of keys: its validity bits, if it has nulls, and then its
    /// numbers, bits or kinds. Nulls are all zeros, so they make one group, the first. Empty if the
    /// column has no images.
    pub(crate) fn key_columns(&self) -> Vec<KeyColumn<'_>> {
        let values: Option<KeyColumn<'_>> = with_images!(&self.values, numbers => Some(numbers.into()),
            Values::Bits(bits) => Some(KeyColumn::bits(bits, self.rows)), Values::Text(_) | Values::Plain(_) => None);
        let valid = self.valid().filter(|_| values.is_some()).map(|valid| KeyColumn::bits(valid, self.rows));
        valid.into_iter().chain(values).collect()
    }

    /// Returns numbers as an array of the column's type.
    pub(crate) fn array_of<N: ArrowNativeType>(
        &self,
        numbers: Vec<N>,
        nulls: Option<NullBuffer>,
    ) -> Result<ArrayRef, FrameError> {
        array_of(&self.data_type, numbers, nulls)
    }

    /// Appends a chunk. All chunks before it must be whole.
    pub(crate) fn push(&mut self, heap: &Heap, array: &ArrayRef) -> Result<(), FrameError> {
        assert!(self.rows.is_multiple_of(CHUNK_ROWS) && array.len() <= CHUNK_ROWS);
        assert_eq!(array.data_type(), &self.data_type);
        cancel::check()?;
        let data = array.to_data();
        self.push_valid(heap, &data)?;
        match &mut self.values {
            Values::Bits(bits) => {
                let set = BooleanBuffer::new(data.buffers()[0].clone(), data.offset(), data.len());
                // Bits of nulls are stored as zeros.
                let set = data.nulls().map_or_else(|| set.clone(), |valid| &set & valid.inner());
                bits.extend_from_slice(&heap.enter(), &words_of(&set))?;
            }
            Values::Words(words) => match words.numbers_of(array.as_string()) {
                Some(numbers) => {
                    words.numbers.extend_from_slice(&heap.enter(), &numbers)?;
                    push_zone(&mut self.zones, &numbers, data.nulls());
                }
                None => {
                    let mut text = words.spelled_out(heap, (self.nulls > 0).then_some(&self.valid))?;
                    text.push(heap, &data)?;
                    (self.values, self.zones) = (Values::Text(text), Zones::default());
                }
            },
            Values::Text(text) => text.push(heap, &data)?,
            Values::Plain(plain) => plain.push(heap, &data)?,
            numbers => with_numbers!(numbers, numbers => {
                let stored = with_zeros(&data);
                numbers.extend_from_slice(&heap.enter(), &stored)?;
                push_zone(&mut self.zones, &stored, data.nulls());
            }, Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => {
                unreachable!("these are not numbers")
            }),
        }
        self.rows += data.len();
        self.nulls += data.null_count();
        Ok(())
    }

    fn push_valid(&mut self, heap: &Heap, data: &ArrayData) -> Result<(), FarError> {
        if self.nulls + data.null_count() == 0 {
            return Ok(());
        }
        let scope = heap.enter();
        if self.valid.is_empty() {
            self.valid.resize(&scope, self.rows / WORD_BITS, u64::MAX)?;
        }
        let all = || BooleanBuffer::new_set(data.len());
        let words = words_of(&data.nulls().map_or_else(all, |nulls| nulls.inner().clone()));
        self.valid.extend_from_slice(&scope, &words)
    }

    /// Returns the validity bits of `rows`, which must ascend. Returns `None` if all rows of the
    /// column have a value.
    pub(crate) fn valid_at(&self, heap: &Heap, rows: &[u64]) -> Result<Option<BooleanBuffer>, FrameError> {
        if self.nulls == 0 {
            return Ok(None);
        }
        let mut valid = BooleanBufferBuilder::new(rows.len());
        for part in rows.chunk_by(|row, next| chunk_of(*row) == chunk_of(*next)) {
            let first = chunk_of(part[0]) * CHUNK_WORDS;
            let words = read(heap, &self.valid, first..self.valid.len().min(first + CHUNK_WORDS))?;
            let is_valid = |row: usize| words[row / WORD_BITS - first] >> (row % WORD_BITS) & 1 == 1;
            part.iter().for_each(|row| valid.append(is_valid(*row as usize)));
        }
        Ok(Some(valid.finish()))
    }

    /// Returns `rows`, which must ascend, as an Arrow array. The memory server gathers numbers.
    pub(crate) fn gather(&self, heap: &Heap, rows: &[u64]) -> Result<ArrayRef, FrameError> {
        cancel::check()?;
        let nulls = || Ok::<_, FrameError>(self.valid_at(heap, rows)?.map(NullBuffer::new));
        with_numbers!(&self.values, numbers => return self.array_of(taken(heap, numbers, rows)?, nulls()?),
            Values::Words(words) => return words.strings(taken(heap, &words.numbers, rows)?, nulls()?),
            Values::Bits(_) | Values::Text(_) | Values::Plain(_) => {});
        let part = |rows: &[u64]| {
            let chunk = chunk_of(rows[0]);
            let rows =
                UInt32Array::from_iter_values(rows.iter().map(|row| (*row as usize - chunk * CHUNK_ROWS) as u32));
            Ok(take(&self.chunk(heap, chunk)?, &rows, None)?)
        };
        let parts: Vec<ArrayRef> = rows
            .chunk_by(|row, next| chunk_of(*row) == chunk_of(*next))
            .map(part)
            .collect::<Result<_, FrameError>>()?;
        Ok(concat(&parts.iter().map(AsRef::as_ref).collect::<Vec<_>>())?)
    }

    /// Returns a chunk as an Arrow array.
    pub(crate) fn chunk(&self, heap: &Heap, chunk: usize) -> Result<ArrayRef, FrameError> {
        cancel::check()?;
        let rows = chunk * CHUNK_ROWS..self.rows.min((chunk + 1) * CHUNK_ROWS);
        let nulls = self.valid().map(|valid| nulls_of(heap, valid, rows.clone())).transpose()?;
        let builder = ArrayData::builder(self.data_type.clone()).len(rows.len());
        let builder = match &self.values {
            Values::Bits(bits) => builder.add_buffer(Buffer::from_vec(read(heap, bits, words_with(&rows))?)),
            Values::Words(words) => return words.strings(read(heap, &words.numbers, rows)?, nulls),
            Values::Text(text) => {
                let (offsets, bytes) = text.read(heap, chunk, rows.len())?;
                builder.add_buffer(Buffer::from_vec(offsets)).add_buffer(Buffer::from_vec(bytes))
            }
            Values::Plain(plain) => plain.read(heap, chunk, rows.len(), builder)?,
            numbers => {
                with_numbers!(numbers,
                numbers => builder.add_buffer(Buffer::from_vec(read(heap, numbers, rows.clone())?)),
                Values::Bits(_) | Values::Words(_) | Values::Text(_) | Values::Plain(_) => {
                    unreachable!("these are not numbers")
                })
            }
        };
        Ok(make_array(builder.nulls(nulls.filter(|nulls| nulls.null_count() > 0)).build()?))
    }
}

/// Returns numbers as an array of a type that is stored as them.
pub(crate) fn array_of<N: ArrowNativeType>(
    data_type: &DataType,
    numbers: Vec<N>,
    nulls: Option<NullBuffer>,
) -> Result<ArrayRef, FrameError> {
    let data = ArrayData::builder(data_type.clone()).len(numbers.len());
    let data = data.nulls(nulls.filter(|nulls| nulls.null_count() > 0));
    Ok(make_array(data.add_buffer(Buffer::from_vec(numbers)).build()?))
}

/// Returns no values of a type, or `None` if frames do not keep it.
pub(crate) fn values_of(data_type: &DataType) -> Option<Values> {
    Some(match data_type {
        DataType::Int8 => Values::I8(FarVec::new()),
        DataType::Int16 => Values::I16(FarVec::new()),
        DataType::Int32 | DataType::Date32 | DataType::Time32(_) => Values::I32(FarVec::new()),
        DataType::Int64 | DataType::Date64 | DataType::Time64(_) | DataType::Timestamp(..) | DataType::Duration(_) => {
            Values::I64(FarVec::new())
        }
        DataType::UInt8 => Values::U8(FarVec::new()),
        DataType::UInt16 => Values::U16(FarVec::new()),
        DataType::UInt32 => Values::U32(FarVec::new()),
        DataType::UInt64 => Values::U64(FarVec::new()),
        DataType::Float32 => Values::F32(FarVec::new()),
        DataType::Float64 => Values::F64(FarVec::new()),
        DataType::Boolean => Values::Bits(FarVec::new()),
        DataType::Utf8 => Values::Words(DictionaryStrings::default()),
        DataType::Binary => Values::Text(VariableBytes::default()),
        other => return Plain::new(other).map(Values::Plain),
    })
}

/// Checks whether a type is one of decimal numbers.
pub(crate) fn is_decimal(data_type: &DataType) -> bool {
    use DataType::{Decimal32, Decimal64, Decimal128, Decimal256};
    matches!(data_type, Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..))
}

/// Returns the values of an array of numbers, with zeros for nulls: zeros change no sum.
fn with_zeros<N: ArrowNativeType>(data: &ArrayData) -> Cow<'_, [N]> {
    let numbers = natives(data);
    match data.nulls() {
        None => Cow::Borrowed(numbers),
        Some(nulls) => {
            let value = |(number, is_valid)| if is_valid { number } else { N::default() };
            numbers.iter().copied().zip(nulls).map(value).collect()
        }
    }
}

/// Appends the zone of a chunk with these numbers, nulls left out.
fn push_zone<N: Number>(zones: &mut Zones, numbers: &[N], nulls: Option<&NullBuffer>) {
    match nulls {
        Some(nulls) => zones.push(nulls.valid_indices().map(|row| numbers[row])),
        None => zones.push(numbers.iter().copied()),
    }
}

/// Converts images to numbers of the column's type.
fn numbers_of<N: Number>(_column: &FarVec<N>, images: impl Iterator<Item = u64>) -> Vec<N> {
    images.map(N::of_image).collect()
}

/// Returns the words of bits that hold these rows of one chunk.
fn words_with(rows: &Range<usize>) -> Range<usize> {
    rows.start / WORD_BITS..rows.end.div_ceil(WORD_BITS)
}

/// Returns which of these rows of one chunk have no value.
pub(crate) fn nulls_of(heap: &Heap, valid: &FarVec<u64>, rows: Range<usize>) -> Result<NullBuffer, FarError> {
    let words = read(heap, valid, words_with(&rows))?;
    Ok(NullBuffer::new(BooleanBuffer::new(Buffer::from_vec(words), 0, rows.len())))
}

pub(crate) fn chunk_of(row: u64) -> usize {
    row as usize / CHUNK_ROWS
}

/// Returns the values of an array of numbers.
pub(crate) fn natives<N: ArrowNativeType>(data: &ArrayData) -> &[N] {
    &data.buffers()[0].typed_data::<N>()[data.offset()..data.offset() + data.len()]
}

/// Returns bits as words. The unused bits of the last word are zero.
fn words_of(bits: &BooleanBuffer) -> Vec<u64> {
    bits.bit_chunks().iter_padded().take(bits.len().div_ceil(WORD_BITS)).collect()
}

/// Returns the numbers of `rows`, which the memory server gathers.
fn taken<N: Number>(heap: &Heap, numbers: &FarVec<N>, rows: &[u64]) -> Result<Vec<N>, FrameError> {
    let some = numbers.take(heap, rows).run()?;
    Ok(read(heap, &some, 0..some.len())?)
}

/// Copies a range of elements.
pub(crate) fn read<T: Clone + Send + 'static>(
    heap: &Heap,
    vec: &FarVec<T>,
    range: Range<usize>,
) -> Result<Vec<T>, FarError> {
    let mut values = Vec::with_capacity(range.len());
    let mut scope = heap.enter();
    let mut scan = vec.scan_in(&mut scope, range);
    while let Some(some) = scan.next_chunk()? {
        values.extend_from_slice(some);
    }
    Ok(values)
}
