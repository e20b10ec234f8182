//! Mutable loan, without I/O: where its object is, what its borrower may do there, and what becomes of it.
//!
//! The word of the object comes home with the end of the borrower's task, whatever became of the loan there. What
//! was lent stays as it was until then, so the lender has it if the borrower's node dies.

use super::{OwnerWord, Partition};

/// What a mutable borrow may do with the block that its object is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockRights {
    /// Write to it, and free it when the object moves.
    Owner,
    /// Write to it. It stays when the object moves.
    Writer,
    /// Read it: the object moves.
    Reader,
}

impl BlockRights {
    /// Returns whether the object may be written to in its block.
    #[inline]
    pub fn may_write(self) -> bool {
        self != BlockRights::Reader
    }

    /// Returns whether the block is free when the object has moved away.
    pub fn frees_moved(self) -> bool {
        self == BlockRights::Owner
    }
}

/// Where the object of a mutable loan is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoanPlace {
    /// Word of the object.
    pub word: OwnerWord,
    /// Last word that it had in the block in which it was lent. That block is free when the loan is over, if the
    /// object is elsewhere then.
    pub left: OwnerWord,
}

/// Number of a mutable loan, which no other loan has. It says who lends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LoanNumber(u64);

const LENDER_SHIFT: u32 = 48;
/// Mark of a loan of a block that another node has lent before, to whoever lends it now.
const LENT_BEFORE: u64 = 1 << 63;
const _: () = assert!((Partition::COUNT as u64) << LENDER_SHIFT <= LENT_BEFORE);

impl LoanNumber {
    /// Returns the number of the loan that a node makes after so many others.
    pub fn new(lender: u16, before: u64) -> LoanNumber {
        LoanNumber(u64::from(lender) << LENDER_SHIFT | before)
    }

    /// Returns the number of a loan of this loan, whose object is at this place, by a task of this node.
    #[must_use]
    pub fn of_further_loan(self, outer: LoanNumber, place: LoanPlace, node: u16) -> LoanNumber {
        if place.rights(outer, node).may_write() { self } else { LoanNumber(self.0 | LENT_BEFORE) }
    }

    /// Returns the number of these bits.
    pub fn from_bits(bits: u64) -> LoanNumber {
        LoanNumber(bits)
    }

    /// Returns the bits of the number.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns whether nobody but tasks of this node has lent the block.
    fn is_within(self, node: u16) -> bool {
        self.0 & LENT_BEFORE == 0 && self.0 >> LENDER_SHIFT == u64::from(node)
    }
}

impl LoanPlace {
    /// Lends the object of this word.
    pub fn lent(word: OwnerWord) -> LoanPlace {
        LoanPlace { word, left: word }
    }

    /// Returns whether the object is in another block than when it was lent.
    pub fn is_moved(self) -> bool {
        !self.word.is_same_block(self.left)
    }

    /// Returns what a task of this node may do with the block that the object of this loan is in. What another node
    /// has lent stays as it is, also if the lender was lent it: should the node of this task die, that is what is left.
    pub fn rights(self, number: LoanNumber, node: u16) -> BlockRights {
        match (self.is_moved(), number.is_within(node)) {
            (true, _) => BlockRights::Owner,
            (false, true) => BlockRights::Writer,
            (false, false) => BlockRights::Reader,
        }
    }

    /// Records the word of a new version, before that is written to.
    pub fn change(&mut self, word: OwnerWord) {
        self.word = word;
        if !self.is_moved() {
            self.left = word;
        }
    }

    /// Ends the loan of an owner, which has the object's word then. Returns the last word of a block to be freed.
    pub fn end(self) -> Option<OwnerWord> {
        self.is_moved().then_some(self.left)
    }

    /// Takes back what was lent further. Returns the last word of a block to be freed: not of the one in which the
    /// object of this loan was lent, which stays until this loan is over.
    pub fn take_back(&mut self, inner: LoanPlace) -> Option<OwnerWord> {
        let is_of_this = self.left.is_same_block(inner.left);
        self.word = inner.word;
        if is_of_this {
            self.left = inner.left;
            return None;
        }
        inner.end()
    }
}

/// Returns the word of an owner whose loan does not come back, of an object that had this word when it was lent. If
/// the borrower is dead, and the object owns no others, it is as it was. Otherwise it is lost: an object that it owns
/// may have been freed or handed on meanwhile, and nobody could tell.
pub fn word_of_lost_loan(lent: OwnerWord, is_borrower_dead: bool, owns_others: bool) -> OwnerWord {
    if is_borrower_dead && !owns_others { lent } else { lent.lost() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsm::Colour;

    fn word(block: u64, colour: u16) -> OwnerWord {
        OwnerWord::new(Partition::new(1).unwrap(), 16 * (1 + block), Colour(colour)).unwrap()
    }

    #[test]
    fn what_another_node_has_lent_stays_until_the_loan_is_over() {
        let mut loan = LoanPlace::lent(word(0, 5));
        let number = LoanNumber::new(7, 1);
        assert_eq!((loan.rights(number, 2), loan.rights(number, 7)), (BlockRights::Reader, BlockRights::Writer));
        assert_eq!(loan.end(), None);
        // In place, at the lender's node: the block is freed with its last colour.
        loan.change(word(0, 6));
        assert_eq!(loan, LoanPlace { word: word(0, 6), left: word(0, 6) });
        loan.change(word(1, 0));
        assert_eq!((loan.rights(number, 2), loan.end()), (BlockRights::Owner, Some(word(0, 6))));
        loan.change(word(1, 1));
        assert_eq!(loan.end(), Some(word(0, 6)));
    }

    #[test]
    fn a_loan_of_a_loan_frees_only_blocks_of_its_own() {
        // Lent further before it has moved: the first lender's block stays.
        let mut outer = LoanPlace::lent(word(0, 5));
        let mut inner = LoanPlace::lent(outer.word);
        inner.change(word(0, 6));
        inner.change(word(2, 0));
        assert_eq!(outer.take_back(inner), None);
        assert_eq!((outer.word, outer.end()), (word(2, 0), Some(word(0, 6))));
        // Lent further after it has moved: that block is the lender's own.
        let mut inner = LoanPlace::lent(outer.word);
        inner.change(word(3, 9));
        assert_eq!(outer.take_back(inner), Some(word(2, 0)));
        assert_eq!((outer.word, outer.end()), (word(3, 9), Some(word(0, 6))));
        // Back unchanged.
        assert_eq!(outer.take_back(LoanPlace::lent(outer.word)), None);
    }

    #[test]
    fn what_another_node_has_lent_stays_when_it_is_lent_within_a_node() {
        // Node 7 lends to a task of node 2, which lends to another one there, and that to a third.
        let (number, outer) = (LoanNumber::new(7, 1), LoanPlace::lent(word(0, 5)));
        let further = |count, of, place| LoanNumber::new(2, count).of_further_loan(of, place, 2);
        let second = further(1, number, outer);
        let mut inner = LoanPlace::lent(outer.word);
        assert_eq!(inner.rights(second, 2), BlockRights::Reader);
        assert_eq!(inner.rights(further(2, second, inner), 2), BlockRights::Reader);
        assert_eq!(inner.rights(second, 7), BlockRights::Reader);
        inner.change(word(1, 0));
        assert_eq!(inner.rights(second, 2), BlockRights::Owner);
        assert_eq!(LoanPlace::lent(inner.word).rights(further(3, second, inner), 2), BlockRights::Writer);
        // What no other node has lent is changed in place.
        let within = LoanNumber::new(7, 2).of_further_loan(number, outer, 7);
        assert_eq!((within.bits(), outer.rights(within, 7)), (LoanNumber::new(7, 2).bits(), BlockRights::Writer));
        assert_eq!(LoanNumber::from_bits(second.bits()), second);
    }

    #[test]
    fn a_loan_of_a_dead_borrower_is_as_it_was_or_lost() {
        let lent = word(0, 5);
        assert_eq!(word_of_lost_loan(lent, true, false), lent);
        for (is_dead, owns_others) in [(true, true), (false, false), (false, true)] {
            assert!(word_of_lost_loan(lent, is_dead, owns_others).is_lost());
        }
    }
}
