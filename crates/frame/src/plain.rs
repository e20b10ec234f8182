//! Values that only Arrow understands: decimal numbers, byte strings of one length, lists, structs
//! and maps.
//!
//! A value of one width is kept as its bytes. Lists, structs and maps are kept as Arrow has them:
//! each buffer of each level is one far vector, in which the parts of the chunks follow each other.
//!
//! Danger: an element that moves to the list of another row; elements of a slice that begin where
//! its buffer begins; a null inside a list that becomes a value.

use crate::column::{CHUNK_ROWS, is_decimal, read, values_of};
use crate::error::FrameError;
use arrow::array::{ArrayData, ArrayDataBuilder, MutableArrayData};
use arrow::buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow::datatypes::DataType;
use farfield::{FarError, FarVec, Heap};

pub(crate) enum Plain {
    /// Values of this many bytes.
    Fixed {
        bytes: FarVec<u8>,
        width: usize,
    },
    Nested(Nested),
}

impl Plain {
    /// Returns a column without rows, or `None` if its type is not one of those here.
    pub(crate) fn new(data_type: &DataType) -> Option<Plain> {
        match width_of(data_type) {
            Some(width) => Some(Plain::Fixed { bytes: FarVec::new(), width }),
            None if is_nested(data_type) => Nested::new(data_type).map(Plain::Nested),
            None => None,
        }
    }

    /// Appends a chunk, without the validity of its rows.
    pub(crate) fn push(&mut self, heap: &Heap, data: &ArrayData) -> Result<(), FarError> {
        match self {
            Plain::Fixed { bytes, width } => {
                let stored = &data.buffers()[0][data.offset() * *width..(data.offset() + data.len()) * *width];
                bytes.extend_from_slice(&heap.enter(), stored)
            }
            Plain::Nested(nested) => {
                // Leaves out the elements that a slice does not show.
                let mut shown = MutableArrayData::new(vec![data], false, data.len());
                shown.extend(0, 0, data.len());
                nested.push(heap, &shown.freeze())
            }
        }
    }

    /// Adds the buffers of a chunk with this many rows to its array.
    pub(crate) fn read(
        &self,
        heap: &Heap,
        chunk: usize,
        rows: usize,
        array: ArrayDataBuilder,
    ) -> Result<ArrayDataBuilder, FrameError> {
        match self {
            Plain::Fixed { bytes, width } => {
                let start = chunk * CHUNK_ROWS * width;
                let bytes = read(heap, bytes, start..start + rows * width)?;
                Ok(array.add_buffer(Buffer::from_vec(bytes)).align_buffers(true))
            }
            Plain::Nested(nested) => nested.read(heap, chunk, array),
        }
    }
}

/// Lists, structs or maps, or the values in them, without their validity.
pub(crate) struct Nested {
    data_type: DataType,
    buffers: Vec<ChunkBuffers>,
    children: Vec<Child>,
}

/// The values inside lists, or those of one field of structs.
struct Child {
    /// Number of values of each chunk, which need not be that of its rows.
    lengths: Vec<usize>,
    /// Validity bits, from the first bit of a byte on; none for a chunk without nulls.
    valid: ChunkBuffers,
    values: Nested,
}

impl Nested {
    /// Returns no values of a type, or `None` if frames do not keep it, or a part of it.
    fn new(data_type: &DataType) -> Option<Nested> {
        if !is_nested(data_type) && values_of(data_type).is_none() {
            return None;
        }
        let child = |data_type: &DataType| {
            let values = Nested::new(data_type)?;
            Some(Child { lengths: Vec::new(), valid: ChunkBuffers::default(), values })
        };
        let children = children_of(data_type).into_iter().map(child).collect::<Option<_>>()?;
        Some(Nested { data_type: data_type.clone(), buffers: Vec::new(), children })
    }

    /// Appends a chunk, which must begin where its buffers begin.
    fn push(&mut self, heap: &Heap, data: &ArrayData) -> Result<(), FarError> {
        assert_eq!((data.offset(), data.child_data().len()), (0, self.children.len()));
        self.buffers.resize_with(data.buffers().len(), ChunkBuffers::default);
        for (stored, buffer) in self.buffers.iter_mut().zip(data.buffers()) {
            stored.push(heap, buffer)?;
        }
        for (child, data) in self.children.iter_mut().zip(data.child_data()) {
            child.lengths.push(data.len());
            let valid = data.nulls().map(|nulls| nulls.inner().sliced());
            child.valid.push(heap, valid.as_deref().unwrap_or_default())?;
            child.values.push(heap, data)?;
        }
        Ok(())
    }

    /// Adds the buffers of a chunk to its array.
    fn read(&self, heap: &Heap, chunk: usize, mut array: ArrayDataBuilder) -> Result<ArrayDataBuilder, FrameError> {
        for buffer in &self.buffers {
            array = array.add_buffer(Buffer::from_vec(buffer.read(heap, chunk)?));
        }
        for Child { lengths, valid, values } in &self.children {
            let (length, valid) = (lengths[chunk], Some(valid.read(heap, chunk)?).filter(|valid| !valid.is_empty()));
            let nulls = valid.map(|valid| NullBuffer::new(BooleanBuffer::new(Buffer::from_vec(valid), 0, length)));
            let child = ArrayData::builder(values.data_type.clone()).len(length).nulls(nulls);
            array = array.add_child_data(values.read(heap, chunk, child)?.build()?);
        }
        Ok(array.align_buffers(true))
    }
}

/// A buffer of all chunks, one after the other.
#[derive(Default)]
struct ChunkBuffers {
    bytes: FarVec<u8>,
    /// Position in `bytes` at which each chunk begins.
    starts: Vec<usize>,
}

impl ChunkBuffers {
    fn push(&mut self, heap: &Heap, bytes: &[u8]) -> Result<(), FarError> {
        self.starts.push(self.bytes.len());
        self.bytes.extend_from_slice(&heap.enter(), bytes)
    }

    fn read(&self, heap: &Heap, chunk: usize) -> Result<Vec<u8>, FarError> {
        let end = self.starts.get(chunk + 1).copied().unwrap_or(self.bytes.len());
        read(heap, &self.bytes, self.starts[chunk]..end)
    }
}

/// Returns the number of bytes of a value that is kept as its bytes; `None` for other types.
fn width_of(data_type: &DataType) -> Option<usize> {
    match data_type {
        DataType::FixedSizeBinary(width) => usize::try_from(*width).ok(),
        DataType::Interval(_) => data_type.primitive_width(),
        other if is_decimal(other) => other.primitive_width(),
        _ => None,
    }
}

/// Checks whether a type is one of lists, structs or maps.
pub(crate) fn is_nested(data_type: &DataType) -> bool {
    use DataType::{FixedSizeList, LargeList, List, Map, Struct};
    matches!(data_type, List(_) | LargeList(_) | FixedSizeList(..) | Struct(_) | Map(..))
}

fn children_of(data_type: &DataType) -> Vec<&DataType> {
    use DataType::{FixedSizeList, LargeList, List, Map, Struct};
    match data_type {
        List(field) | LargeList(field) | FixedSizeList(field, _) | Map(field, _) => vec![field.data_type()],
        Struct(fields) => fields.iter().map(|field| field.data_type()).collect(),
        _ => Vec::new(),
    }
}
