//! Layouts of types: where the references of their objects lie.
//!
//! Whoever traces a collected heap reads objects by these tables and runs no code of their types.
//! So a memory server can trace objects of a program that it does not know, and the tables that it
//! gets are bytes of a stranger: [`LayoutTable::decode`] checks each number before it is used.
//!
//! ```text
//! table   version 4, types 4, then the types
//! type    bytes 4, stride 4, number of each of the four lists 2 2 2 2, then their offsets 4 each
//! ```
//!
//! All numbers are little-endian. The lists are the strong and the weak references of the fixed
//! part, and those of each element of the tail. Offsets count from the object's header, or from the
//! beginning of the element. They are multiples of eight, in ascending order.

use super::header::{ObjectHeader, TYPES_MAX};
use crate::cast::{u16_of, u32_of, usize_of};
use alloc::vec::Vec;

/// Number of references that one list of a layout can have.
pub const SLOTS_MAX: usize = 4096;

/// Size of the largest fixed part, and of the largest element, in bytes.
const PART_BYTES_MAX: u32 = 1 << 24;

const VERSION: u32 = 1;

/// Bytes of a type before its offsets.
const HEAD_BYTES: usize = 16;

/// Offset of the number of elements in objects that have a tail.
const LENGTH_OFFSET: u32 = u32_of(ObjectHeader::BYTES);

/// Elements at the end of an object, whose number the object says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TailLayout {
    stride: u32,
    strong: Vec<u32>,
    weak: Vec<u32>,
}

/// Layout of the objects of one type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TypeLayout {
    bytes: u32,
    strong: Vec<u32>,
    weak: Vec<u32>,
    tail: Option<TailLayout>,
}

/// Layouts of all types of a heap, by the numbers of the types.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct LayoutTable {
    types: Vec<TypeLayout>,
}

/// Reason why bytes are no table of layouts, or numbers no layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// The bytes end too early, or go on.
    #[error("the table of layouts is longer or shorter than it says")]
    Length,
    /// The version is unknown.
    #[error("the table of layouts has version {found}, and not {VERSION}")]
    Version {
        /// Version that was found.
        found: u32,
    },
    /// There are too many types, or references of one type.
    #[error("the table of layouts has too many types, or a type too many references")]
    TooMany,
    /// A part has no room for its header, or is too large.
    #[error("a layout says {bytes} bytes, which its objects cannot have")]
    Bytes {
        /// Bytes that were said.
        bytes: u32,
    },
    /// A reference is not aligned, out of order, or does not lie in its part.
    #[error("a layout has a reference at {offset}, which is misplaced")]
    Offset {
        /// Offset of the reference.
        offset: u32,
    },
}

/// Checks the references of a part: aligned, ascending, inside of it, and no offset in both lists.
fn check_part(strong: &[u32], weak: &[u32], first: u32, bytes: u32) -> Result<(), LayoutError> {
    for list in [strong, weak] {
        if list.len() > SLOTS_MAX {
            return Err(LayoutError::TooMany);
        }
        let mut next = first;
        for &offset in list {
            let fits = offset >= next && offset % 8 == 0 && offset.checked_add(8).is_some_and(|end| end <= bytes);
            if !fits {
                return Err(LayoutError::Offset { offset });
            }
            next = offset + 8;
        }
    }
    match strong.iter().find(|offset| weak.binary_search(offset).is_ok()) {
        Some(&offset) => Err(LayoutError::Offset { offset }),
        None => Ok(()),
    }
}

impl TailLayout {
    /// Creates the layout of elements of `stride` bytes each.
    pub fn new(stride: u32, strong: Vec<u32>, weak: Vec<u32>) -> Result<TailLayout, LayoutError> {
        if stride == 0 || stride > PART_BYTES_MAX {
            return Err(LayoutError::Bytes { bytes: stride });
        }
        if !(strong.is_empty() && weak.is_empty() || stride.is_multiple_of(8)) {
            return Err(LayoutError::Bytes { bytes: stride });
        }
        check_part(&strong, &weak, 0, stride)?;
        Ok(TailLayout { stride, strong, weak })
    }
}

impl TypeLayout {
    /// Offset of the number of elements in an object that has a tail, and of its first element.
    pub const TAIL_OFFSETS: (usize, usize) = (LENGTH_OFFSET as usize, LENGTH_OFFSET as usize + 8);

    /// Creates a layout. `bytes` are those of the fixed part, with the header; in an object with a
    /// tail, the number of elements follows the header.
    pub fn new(
        bytes: u32,
        strong: Vec<u32>,
        weak: Vec<u32>,
        tail: Option<TailLayout>,
    ) -> Result<TypeLayout, LayoutError> {
        let first = LENGTH_OFFSET + if tail.is_some() { 8 } else { 0 };
        let is_aligned = tail.is_none() || bytes.is_multiple_of(8);
        if bytes < first || bytes > PART_BYTES_MAX || !is_aligned {
            return Err(LayoutError::Bytes { bytes });
        }
        check_part(&strong, &weak, first, bytes)?;
        Ok(TypeLayout { bytes, strong, weak, tail })
    }

    /// Checks whether the object says how many elements its tail has.
    pub fn has_tail(&self) -> bool {
        self.tail.is_some()
    }

    /// Checks whether no object of the type has references.
    pub fn is_leaf(&self) -> bool {
        let has = |strong: &Vec<u32>, weak: &Vec<u32>| !(strong.is_empty() && weak.is_empty());
        !has(&self.strong, &self.weak) && !self.tail.as_ref().is_some_and(|tail| has(&tail.strong, &tail.weak))
    }

    /// Returns the bytes of an object with so many elements, header included; `None` if no address
    /// space has them. The number is 0 if the type has no tail.
    #[inline]
    pub fn object_bytes(&self, elements: u64) -> Option<u64> {
        match &self.tail {
            Some(tail) => elements.checked_mul(tail.stride.into())?.checked_add(self.bytes.into()),
            None => (elements == 0).then_some(self.bytes.into()),
        }
    }

    /// Returns the number of strong references of an object with so many elements.
    pub fn strong_count(&self, elements: u64) -> u64 {
        let tail = self.tail.as_ref().map_or(0, |tail| tail.strong.len() as u64);
        self.strong.len() as u64 + tail.saturating_mul(elements)
    }

    /// Returns the offset of the strong reference with this index, counted from the header. The
    /// index is below [`TypeLayout::strong_count`].
    pub fn strong_offset(&self, index: u64) -> u64 {
        let fixed = self.strong.len() as u64;
        match &self.tail {
            Some(tail) if index >= fixed => {
                let (index, each) = (index - fixed, tail.strong.len() as u64);
                let within = tail.strong[usize_of(index % each)];
                u64::from(self.bytes) + index / each * u64::from(tail.stride) + u64::from(within)
            }
            _ => self.strong[usize_of(index)].into(),
        }
    }

    /// Calls `visit` with the offset of each strong reference of an object with so many elements,
    /// counted from the header.
    #[inline]
    pub fn visit_strong(&self, elements: u64, mut visit: impl FnMut(u64)) {
        self.strong.iter().for_each(|offset| visit((*offset).into()));
        let Some(tail) = self.tail.as_ref().filter(|tail| !tail.strong.is_empty()) else { return };
        for at in 0..elements {
            let element = u64::from(self.bytes) + at * u64::from(tail.stride);
            tail.strong.iter().for_each(|offset| visit(element + u64::from(*offset)));
        }
    }

    /// Returns the offsets of the weak references of an object with so many elements.
    #[inline]
    pub fn weak_offsets(&self, elements: u64) -> impl Iterator<Item = u64> + '_ {
        let tail = self.tail.iter().flat_map(move |tail| {
            let each = move |at| u64::from(self.bytes) + at * u64::from(tail.stride);
            let elements = if tail.weak.is_empty() { 0 } else { elements };
            (0..elements).flat_map(move |at| tail.weak.iter().map(move |offset| each(at) + u64::from(*offset)))
        });
        self.weak.iter().map(|offset| u64::from(*offset)).chain(tail)
    }

    fn lists(&self) -> [&[u32]; 4] {
        let (strong, weak) = self.tail.as_ref().map_or((&[][..], &[][..]), |tail| (&tail.strong, &tail.weak));
        [&self.strong, &self.weak, strong, weak]
    }

    fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.bytes.to_le_bytes());
        into.extend(self.tail.as_ref().map_or(0, |tail| tail.stride).to_le_bytes());
        for list in self.lists() {
            into.extend(u16_of(list.len()).to_le_bytes());
        }
        for offset in self.lists().into_iter().flatten() {
            into.extend(offset.to_le_bytes());
        }
    }

    fn decode(bytes: &mut &[u8]) -> Result<TypeLayout, LayoutError> {
        let (fixed, stride) = (take_u32(bytes)?, take_u32(bytes)?);
        let mut counts = [0; 4];
        for count in &mut counts {
            let (head, rest) = bytes.split_at_checked(2).ok_or(LayoutError::Length)?;
            *bytes = rest;
            *count = usize::from(u16::from_le_bytes([head[0], head[1]]));
        }
        if counts.iter().any(|count| *count > SLOTS_MAX) {
            return Err(LayoutError::TooMany);
        }
        // No list is longer than the bytes that are there.
        if counts.iter().sum::<usize>() * 4 > bytes.len() {
            return Err(LayoutError::Length);
        }
        let mut list = |count: usize| (0..count).map(|_| take_u32(bytes)).collect::<Result<Vec<u32>, _>>();
        let (strong, weak, tail_strong, tail_weak) =
            (list(counts[0])?, list(counts[1])?, list(counts[2])?, list(counts[3])?);
        let tail = match stride {
            0 if tail_strong.is_empty() && tail_weak.is_empty() => None,
            _ => Some(TailLayout::new(stride, tail_strong, tail_weak)?),
        };
        TypeLayout::new(fixed, strong, weak, tail)
    }
}

fn take_u32(bytes: &mut &[u8]) -> Result<u32, LayoutError> {
    let (head, rest) = bytes.split_first_chunk::<4>().ok_or(LayoutError::Length)?;
    *bytes = rest;
    Ok(u32::from_le_bytes(*head))
}

impl LayoutTable {
    /// Adds a type and returns its number; `None` if there are [`TYPES_MAX`] types.
    pub fn add(&mut self, layout: TypeLayout) -> Option<u32> {
        let number = u32_of(self.types.len());
        (number < TYPES_MAX).then(|| {
            self.types.push(layout);
            number
        })
    }

    /// Returns the layout of a type.
    pub fn get(&self, type_number: u32) -> Option<&TypeLayout> {
        self.types.get(type_number as usize)
    }

    /// Returns the number of types.
    pub fn len(&self) -> usize {
        self.types.len()
    }

    /// Checks whether there is no type.
    pub fn is_empty(&self) -> bool {
        self.types.is_empty()
    }

    /// Returns the table as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(8 + self.types.len() * HEAD_BYTES);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(u32_of(self.types.len()).to_le_bytes());
        self.types.iter().for_each(|layout| layout.encode(&mut bytes));
        bytes
    }

    /// Reads a table from bytes, which may be anybody's.
    pub fn decode(mut bytes: &[u8]) -> Result<LayoutTable, LayoutError> {
        let version = take_u32(&mut bytes)?;
        if version != VERSION {
            return Err(LayoutError::Version { found: version });
        }
        let count = take_u32(&mut bytes)?;
        if count > TYPES_MAX {
            return Err(LayoutError::TooMany);
        }
        if count as usize > bytes.len() / HEAD_BYTES {
            return Err(LayoutError::Length);
        }
        let types = (0..count).map(|_| TypeLayout::decode(&mut bytes)).collect::<Result<Vec<TypeLayout>, _>>()?;
        if bytes.is_empty() { Ok(LayoutTable { types }) } else { Err(LayoutError::Length) }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a reference that is not traced, or traced where none is, and against a table
    //! of a stranger that is believed.
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn table() -> LayoutTable {
        let mut table = LayoutTable::default();
        let tail = |stride, strong, weak| Some(TailLayout::new(stride, strong, weak).unwrap());
        for layout in [
            TypeLayout::new(8, vec![], vec![], None),
            TypeLayout::new(40, vec![8, 24], vec![32], None),
            TypeLayout::new(11, vec![], vec![], None),
            TypeLayout::new(16, vec![], vec![], tail(1, vec![], vec![])),
            TypeLayout::new(16, vec![], vec![], tail(8, vec![0], vec![])),
            TypeLayout::new(32, vec![16], vec![24], tail(32, vec![8, 16], vec![0])),
        ] {
            table.add(layout.unwrap()).unwrap();
        }
        table
    }

    #[test]
    fn references_are_where_the_layout_says() {
        let table = table();
        let all = |number, elements| {
            let layout: &TypeLayout = table.get(number).unwrap();
            let mut visited = Vec::new();
            layout.visit_strong(elements, |offset| visited.push(offset));
            let strong = (0..layout.strong_count(elements)).map(|index| layout.strong_offset(index));
            assert_eq!(visited, strong.clone().collect::<Vec<_>>());
            (strong.collect::<Vec<u64>>(), layout.weak_offsets(elements).collect::<Vec<u64>>())
        };
        assert_eq!(all(0, 0), (vec![], vec![]));
        assert_eq!(all(1, 0), (vec![8, 24], vec![32]));
        assert_eq!(all(3, 100), (vec![], vec![]));
        assert_eq!(all(4, 3), (vec![16, 24, 32], vec![]));
        assert_eq!(all(5, 0), (vec![16], vec![24]));
        assert_eq!(all(5, 2), (vec![16, 40, 48, 72, 80], vec![24, 32, 64]));
        let leaves: Vec<bool> = (0..6).map(|number| table.get(number).unwrap().is_leaf()).collect();
        assert_eq!(leaves, [true, false, true, true, false, false]);
        assert_eq!(table.get(5).unwrap().object_bytes(3), Some(128));
        assert_eq!(table.get(1).unwrap().object_bytes(0), Some(40));
        assert_eq!(table.get(1).unwrap().object_bytes(1), None);
        assert_eq!(table.get(5).unwrap().object_bytes(u64::MAX), None);
    }

    #[test]
    fn misplaced_references_are_refused() {
        let fixed = |bytes, strong: &[u32], weak: &[u32]| TypeLayout::new(bytes, strong.to_vec(), weak.to_vec(), None);
        assert_eq!(fixed(7, &[], &[]), Err(LayoutError::Bytes { bytes: 7 }));
        assert_eq!(fixed(PART_BYTES_MAX + 1, &[], &[]), Err(LayoutError::Bytes { bytes: PART_BYTES_MAX + 1 }));
        for (strong, weak, offset) in [
            (&[0][..], &[][..], 0),               // the header
            (&[12], &[], 12),                     // not aligned
            (&[32], &[], 32),                     // behind the end
            (&[24, 16], &[], 16),                 // out of order
            (&[16, 16], &[], 16),                 // twice
            (&[8, 16], &[16], 16),                // strong and weak
            (&[u32::MAX - 7], &[], u32::MAX - 7), // overflows
        ] {
            assert_eq!(fixed(32, strong, weak), Err(LayoutError::Offset { offset }), "{strong:?} {weak:?}");
        }
        assert_eq!(TailLayout::new(0, vec![], vec![]), Err(LayoutError::Bytes { bytes: 0 }));
        assert_eq!(TailLayout::new(12, vec![0], vec![]), Err(LayoutError::Bytes { bytes: 12 }));
        let tail = TailLayout::new(8, vec![0], vec![]).unwrap();
        assert_eq!(
            TypeLayout::new(16, vec![8], vec![], Some(tail.clone())),
            Err(LayoutError::Offset { offset: 8 }),
            "the number of elements"
        );
        assert_eq!(TypeLayout::new(8, vec![], vec![], Some(tail)), Err(LayoutError::Bytes { bytes: 8 }));
    }

    #[test]
    fn a_table_survives_as_bytes_and_no_part_of_it_is_one() {
        let bytes = table().encode();
        assert_eq!(LayoutTable::decode(&bytes), Ok(table()));
        for end in 0..bytes.len() {
            assert!(LayoutTable::decode(&bytes[..end]).is_err(), "{end}");
        }
        let more = [&bytes[..], &[0]].concat();
        assert_eq!(LayoutTable::decode(&more), Err(LayoutError::Length));
        // Whatever one byte becomes, what is read is a layout that can be written as it was read.
        for at in 0..bytes.len() {
            for value in 0..=255 {
                let mut other = bytes.clone();
                other[at] = value;
                if let Ok(read) = LayoutTable::decode(&other) {
                    assert_eq!(read.encode(), other);
                }
            }
        }
    }

    #[test]
    fn large_numbers_take_no_memory() {
        let claim = |types: u32| [VERSION.to_le_bytes(), types.to_le_bytes()].concat();
        assert_eq!(LayoutTable::decode(&claim(TYPES_MAX)), Err(LayoutError::Length));
        assert_eq!(LayoutTable::decode(&claim(u32::MAX)), Err(LayoutError::TooMany));
        let mut lists = claim(1);
        lists.extend([16u32, 8].map(u32::to_le_bytes).concat());
        lists.extend([4096u16; 4].map(u16::to_le_bytes).concat());
        assert_eq!(LayoutTable::decode(&lists), Err(LayoutError::Length));
    }

    proptest! {
        #[test]
        fn bytes_of_anybody_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(read) = LayoutTable::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }
    }
}
