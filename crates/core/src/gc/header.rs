//! The object header: the first word of each collected object.
//!
//! ```text
//!  63              32 31          12 11    0
//! +------------------+--------------+-------+
//! | entry            | type         | flags |
//! +------------------+--------------+-------+
//! ```
//!
//! With its entry, an object that lies in a page leads back to the word that says where it is. So
//! whoever finds an object can tell whether it is the one that was meant.

use crate::cast::low_u32;

/// Number of types that a heap can have.
pub const TYPES_MAX: u32 = 1 << 20;

/// Header of a collected object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectHeader(pub u64);

impl ObjectHeader {
    /// Bytes of a header.
    pub const BYTES: usize = size_of::<u64>();

    /// Creates the header of an object; `type_number` is below [`TYPES_MAX`].
    #[inline]
    pub fn new(entry: u32, type_number: u32) -> ObjectHeader {
        debug_assert!(type_number < TYPES_MAX);
        ObjectHeader(u64::from(entry) << 32 | u64::from(type_number) << 12)
    }

    /// Returns the object's entry; 0 where no object is.
    #[inline]
    pub fn entry(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns the number of the object's type.
    #[inline]
    pub fn type_number(self) -> u32 {
        low_u32(self.0 >> 12) & (TYPES_MAX - 1)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an entry that leaks into the type, or the other way round.
    use super::*;

    #[test]
    fn fields_do_not_mix() {
        for entry in [0, 1, 0x8000_0000, u32::MAX] {
            for type_number in [0, 1, 0x55555, TYPES_MAX - 1] {
                let header = ObjectHeader::new(entry, type_number);
                assert_eq!((header.entry(), header.type_number()), (entry, type_number));
                assert_eq!(header.0 & 0xFFF, 0);
            }
        }
    }
}
