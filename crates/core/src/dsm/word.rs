//! Word of an owner: which object it owns, and which version of it.

use crate::cast::low_u16;
use core::num::NonZeroU64;

/// Version of the contents of a block. It rises with each mutable borrow, and is never used twice
/// for one block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Colour(pub u16);

impl Colour {
    /// Colour after which a block cannot be written in place.
    pub const LAST: Colour = Colour(u16::MAX);

    /// Returns the next colour; `None` after the last one.
    #[inline]
    pub fn next(self) -> Option<Colour> {
        self.0.checked_add(1).map(Colour)
    }
}

/// Number of a part of the shared memory, which one node keeps. A number is used once in a
/// cluster's life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Partition(u16);

impl Partition {
    /// Greatest number of partitions.
    pub const COUNT: u16 = 1 << PARTITION_BITS;

    /// Returns the partition of this number; `None` if there can be none.
    pub fn new(number: u16) -> Option<Partition> {
        (number < Partition::COUNT).then_some(Partition(number))
    }

    /// Returns the number.
    pub fn number(self) -> u16 {
        self.0
    }
}

const OFFSET_BITS: u32 = 36;
const FLAG_BITS: u32 = 2;
/// Flag of an owner whose object is lost.
const LOST: u64 = 1 << OFFSET_BITS;
const PARTITION_BITS: u32 = 10;
const PARTITION_SHIFT: u32 = OFFSET_BITS + FLAG_BITS;
const COLOUR_SHIFT: u32 = PARTITION_SHIFT + PARTITION_BITS;

/// Block of a partition, whatever is in it when.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockKey {
    partition: Partition,
    offset: u64,
}

/// Word of an owner: colour (16 bits), partition (10), flags (2), offset in units of 16 bytes (36).
///
/// It holds no address, so address spaces may differ from node to node. An owner that is lent or
/// sent is this word. One flag marks owners whose object is lost; words with flags name no object.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OwnerWord(NonZeroU64);

impl OwnerWord {
    /// Alignment of objects, in bytes.
    pub const ALIGN: u64 = 16;
    /// End of the offsets that a word can hold, in bytes: one tebibyte.
    pub const OFFSET_END: u64 = OwnerWord::ALIGN << OFFSET_BITS;
    /// Bits that are the same in all words of a partition.
    pub const PARTITION_MASK: u64 = ((1 << (PARTITION_BITS + FLAG_BITS)) - 1) << OFFSET_BITS;

    pub(super) const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
    pub(super) const FLAGS_MASK: u64 = ((1 << FLAG_BITS) - 1) << OFFSET_BITS;
    pub(super) const PARTITION_SHIFT: u32 = PARTITION_SHIFT;

    /// Returns the word of an object at this offset of a partition, in bytes. Returns `None` if the
    /// offset is zero, is not a multiple of [`OwnerWord::ALIGN`], or is [`OwnerWord::OFFSET_END`]
    /// or more.
    #[inline]
    pub fn new(partition: Partition, offset: u64, colour: Colour) -> Option<OwnerWord> {
        let is_valid = offset > 0 && offset.is_multiple_of(OwnerWord::ALIGN) && offset < OwnerWord::OFFSET_END;
        let (colour, partition) = (u64::from(colour.0), u64::from(partition.0));
        let bits = colour << COLOUR_SHIFT | partition << PARTITION_SHIFT | (offset / OwnerWord::ALIGN);
        NonZeroU64::new(bits).filter(|_| is_valid).map(OwnerWord)
    }

    /// Returns the word that these bits are; `None` if they are none.
    pub fn from_bits(bits: u64) -> Option<OwnerWord> {
        let offset = (bits & ((1 << OFFSET_BITS) - 1)) * OwnerWord::ALIGN;
        let has_flags = bits >> OFFSET_BITS & ((1 << FLAG_BITS) - 1) != 0;
        NonZeroU64::new(bits).filter(|_| offset > 0 && !has_flags).map(OwnerWord)
    }

    /// Returns the bits of the word.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0.get()
    }

    /// Returns the partition of the object.
    #[inline]
    pub fn partition(self) -> Partition {
        Partition(low_u16(self.bits() >> PARTITION_SHIFT) & (Partition::COUNT - 1))
    }

    /// Returns the offset of the object in its partition, in bytes.
    #[inline]
    pub fn offset(self) -> u64 {
        (self.bits() & ((1 << OFFSET_BITS) - 1)) * OwnerWord::ALIGN
    }

    /// Returns the version of the object.
    #[inline]
    pub fn colour(self) -> Colour {
        Colour(low_u16(self.bits() >> COLOUR_SHIFT))
    }

    /// Returns the word of an owner whose object is lost.
    pub fn lost(self) -> OwnerWord {
        OwnerWord(self.0 | LOST)
    }

    /// Returns whether the object is lost.
    pub fn is_lost(self) -> bool {
        self.bits() & LOST != 0
    }

    /// Returns whether both words name the same block, whatever was in it when.
    pub fn is_same_block(self, other: OwnerWord) -> bool {
        self.block() == other.block()
    }

    /// Returns the block of the object.
    pub fn block(self) -> BlockKey {
        BlockKey { partition: self.partition(), offset: self.offset() }
    }

    /// Returns the word after a mutable borrow in place; `None` if the object must move, because
    /// its block has no more colours.
    #[inline]
    pub fn next_version(self) -> Option<OwnerWord> {
        // Colours are the upper bits, so the next one is an addition, and there is none if it overflows.
        self.0.checked_add(1 << COLOUR_SHIFT).map(OwnerWord)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [u16; 4] = [0, 1, 511, Partition::COUNT - 1];
    const OFFSETS: [u64; 4] = [16, 32, 1 << 20, OwnerWord::OFFSET_END - 16];
    const COLOURS: [u16; 4] = [0, 1, u16::MAX - 1, u16::MAX];

    #[test]
    fn a_word_has_what_it_was_made_of_and_no_two_are_alike() {
        let mut words = alloc::collections::BTreeSet::new();
        for number in NUMBERS {
            for offset in OFFSETS {
                for colour in COLOURS.map(Colour) {
                    let partition = Partition::new(number).unwrap();
                    let word = OwnerWord::new(partition, offset, colour).unwrap();
                    assert_eq!((word.partition(), word.offset(), word.colour()), (partition, offset, colour));
                    assert_eq!(OwnerWord::from_bits(word.bits()), Some(word));
                    assert_eq!(
                        word.bits() & OwnerWord::PARTITION_MASK,
                        OwnerWord::new(partition, 16, Colour(0)).unwrap().bits() & OwnerWord::PARTITION_MASK
                    );
                    assert!(words.insert(word.bits()));
                    let lost = word.lost();
                    assert!(lost.is_lost() && !word.is_lost() && OwnerWord::from_bits(lost.bits()).is_none());
                    assert!(lost.is_same_block(word) && lost.colour() == colour);
                    let next = word.next_version();
                    assert_eq!(next.map(|next| next.colour()), colour.next());
                    assert!(next.is_none_or(|next| (next.partition(), next.offset()) == (partition, offset)));
                }
            }
        }
    }

    #[test]
    fn offsets_and_bits_that_are_no_object_are_refused() {
        let partition = Partition::new(3).unwrap();
        for offset in [0, 1, 8, 17, OwnerWord::OFFSET_END, u64::MAX] {
            assert_eq!(OwnerWord::new(partition, offset, Colour(1)), None, "{offset}");
        }
        assert_eq!(Partition::new(Partition::COUNT), None);
        for bits in [0, 1 << OFFSET_BITS | 5, 1 << (OFFSET_BITS + 1) | 5, 7 << COLOUR_SHIFT] {
            assert_eq!(OwnerWord::from_bits(bits), None, "{bits:x}");
        }
        assert_eq!(size_of::<Option<OwnerWord>>(), 8);
    }
}
