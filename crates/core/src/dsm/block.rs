//! Header of a block: whether it holds an object, and which colours the object may have.

use super::Colour;

/// Error: the object that was to be freed is not the one in the block. Its owner was freed twice,
/// or long ago.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LateFree;

/// Header of a block of an arena.
///
/// Colours outlive objects: a free block remembers its last colour, and the next object begins one
/// above. So a copy of an object that is gone has a word that no later object has (without that, a
/// copy kept by address and colour could be taken for another object's: the ABA problem). A mutable
/// borrow does not touch the header: it knows the first colour of its object, and learns the last
/// one when that is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockHeader {
    /// The block is free; the next object begins with this colour.
    Free {
        /// First colour of the next object.
        next: Colour,
    },
    /// The block holds an object.
    Used {
        /// Colour with which the object began.
        first: Colour,
    },
    /// All colours of the block were used. It is free once no node has a copy of what it held.
    Resting,
}

impl BlockHeader {
    /// Header of a block that was never used.
    pub const NEW: BlockHeader = BlockHeader::Free { next: Colour(0) };

    /// Puts an object into a free block. Returns its first colour; `None` if the block is not free.
    pub fn fill(&mut self) -> Option<Colour> {
        let BlockHeader::Free { next } = *self else { return None };
        *self = BlockHeader::Used { first: next };
        Some(next)
    }

    /// Returns whether an object of this colour may be in the block.
    pub fn may_hold(self, colour: Colour) -> bool {
        matches!(self, BlockHeader::Used { first } if first <= colour)
    }

    /// Frees the object, whose owner had this colour last. The block is free afterwards, or rests.
    pub fn free(&mut self, colour: Colour) -> Result<(), LateFree> {
        if !self.may_hold(colour) {
            return Err(LateFree);
        }
        *self = colour.next().map_or(BlockHeader::Resting, |next| BlockHeader::Free { next });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_colour_of_a_block_is_used_twice() {
        let (mut header, mut used) = (BlockHeader::NEW, [false; 1 << 16]);
        // Objects live through 0, 1, 2, … borrows, until the block has no colour left.
        for borrows in 0u16.. {
            let Some(first) = header.fill() else { break };
            let mut last = first;
            for _ in 0..borrows {
                last = last.next().unwrap_or(last);
            }
            for colour in first.0..=last.0 {
                assert!(!core::mem::replace(&mut used[usize::from(colour)], true), "{colour}");
                assert!(header.may_hold(Colour(colour)));
            }
            assert_eq!(header.fill(), None, "it is not free");
            assert_eq!(header.free(last), Ok(()));
            assert_eq!(header.free(last), Err(LateFree), "freed twice");
        }
        assert_eq!(header, BlockHeader::Resting);
        assert!(used.iter().all(|used| *used));
    }

    #[test]
    fn a_late_free_is_recognised_when_the_block_is_in_use_again() {
        let mut header = BlockHeader::NEW;
        for first in 0..1000 {
            assert_eq!(header.fill(), Some(Colour(first)));
            for early in 0..first {
                assert_eq!(header.free(Colour(early)), Err(LateFree), "{early} of {first}");
            }
            header.free(Colour(first)).unwrap();
        }
    }
}
