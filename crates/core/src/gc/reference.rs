//! The reference words: what fields of objects hold that lead to other objects.
//!
//! ```text
//!  63              32 31                0
//! +------------------+-------------------+
//! | entry            | guess             |  strong: the guess is a [`SlotHint`]
//! +------------------+-------------------+
//! | entry            | generation, 1     |  weak
//! +------------------+-------------------+
//! ```
//!
//! A strong reference has the shape of a slot of the far heap. The entry says where the object is;
//! the guess is where it was when the reference was last used. Both are compared, so a wrong guess
//! costs time and never safety, and the address does not wait for the entry.
//!
//! Entry 0 is no object's. Its words are of two kinds. *Loose* (zero) is a reference that lies
//! outside of all collected objects, which leads nowhere and can never be set. *Null* is an empty
//! reference inside of one. Only the allocation of an object makes loose references null, so a word
//! that is not loose lies in memory that the collector traces.

use crate::cast::low_u32;
use crate::heap::SlotHint;

/// Word of a strong reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RefWord(pub u64);

impl RefWord {
    /// Word of a reference outside of all collected objects.
    pub const LOOSE: RefWord = RefWord(0);

    /// Word of an empty reference inside of a collected object.
    pub const NULL: RefWord = RefWord(1);

    /// Creates the word of a reference to the object of this entry, which is not 0.
    #[inline]
    pub fn new(entry: u32, guess: SlotHint) -> RefWord {
        debug_assert!(entry != 0);
        RefWord(u64::from(entry) << 32 | u64::from(guess.0))
    }

    /// Returns the entry of the object; `None` if the reference leads nowhere.
    #[inline]
    pub fn entry(self) -> Option<u32> {
        match (self.0 >> 32) as u32 {
            0 => None,
            entry => Some(entry),
        }
    }

    /// Returns the guessed place of the object.
    #[inline]
    pub fn guess(self) -> SlotHint {
        SlotHint(low_u32(self.0))
    }

    /// Checks whether the reference lies outside of all collected objects.
    #[inline]
    pub fn is_loose(self) -> bool {
        self.0 == 0
    }

    /// Checks whether both words lead to the same object, or both to none.
    #[inline]
    pub fn is_same(self, other: RefWord) -> bool {
        self.0 >> 32 == other.0 >> 32
    }
}

/// Word of a weak reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WeakWord(pub u64);

impl WeakWord {
    /// Word of a weak reference outside of all collected objects.
    pub const LOOSE: WeakWord = WeakWord(0);

    /// Word of an empty weak reference inside of a collected object.
    pub const NULL: WeakWord = WeakWord(1);

    /// Creates the word of a weak reference to the object that has this entry, which is not 0, in
    /// this generation.
    #[inline]
    pub fn new(entry: u32, generation: u32) -> WeakWord {
        debug_assert!(entry != 0 && generation <= u32::MAX >> 1);
        WeakWord(u64::from(entry) << 32 | u64::from(generation) << 1 | 1)
    }

    /// Returns the entry and the generation of the object; `None` if the reference leads nowhere.
    #[inline]
    pub fn target(self) -> Option<(u32, u32)> {
        match (self.0 >> 32) as u32 {
            0 => None,
            entry => Some((entry, low_u32(self.0) >> 1)),
        }
    }

    /// Checks whether the reference lies outside of all collected objects.
    #[inline]
    pub fn is_loose(self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    //! Guards against halves that leak into each other, and against an empty reference that leads
    //! somewhere.
    use super::*;
    use crate::heap::FrameId;

    const ENTRIES: [u32; 5] = [1, 2, 511, 1 << 31, u32::MAX];

    #[test]
    fn halves_do_not_mix() {
        for entry in ENTRIES {
            for guess in [0, 1, 255, 256, u32::MAX] {
                let word = RefWord::new(entry, SlotHint(guess));
                assert_eq!((word.entry(), word.guess()), (Some(entry), SlotHint(guess)));
                assert!(!word.is_loose() && word.is_same(RefWord::new(entry, SlotHint::new(FrameId(9), 7))));
                assert!(
                    ENTRIES
                        .iter()
                        .all(|other| word.is_same(RefWord::new(*other, SlotHint(guess))) == (*other == entry))
                );
            }
            for generation in [0, 1, 1 << 22, u32::MAX >> 1] {
                let word = WeakWord::new(entry, generation);
                assert_eq!(word.target(), Some((entry, generation)));
                assert!(!word.is_loose());
            }
        }
    }

    #[test]
    fn empty_references_lead_nowhere() {
        for word in [RefWord::LOOSE, RefWord::NULL] {
            assert_eq!(word.entry(), None);
            assert!(word.is_same(RefWord::NULL));
        }
        for word in [WeakWord::LOOSE, WeakWord::NULL] {
            assert_eq!(word.target(), None);
        }
        assert!(RefWord::LOOSE.is_loose() && WeakWord::LOOSE.is_loose());
        assert!(!RefWord::NULL.is_loose() && !WeakWord::NULL.is_loose());
    }
}
