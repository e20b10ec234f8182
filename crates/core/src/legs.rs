//! Sets of legs of a mirror or an erasure code.

/// A set of legs, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Legs(pub u16);

impl Legs {
    /// Greatest number of legs of one backend, spares counted.
    pub const MAX: usize = 16;

    /// Returns the set of the first `count` legs.
    pub fn first(count: usize) -> Legs {
        assert!(count <= Legs::MAX);
        Legs(((1u32 << count) - 1) as u16)
    }
    /// Returns the set that holds only `leg`.
    pub fn one(leg: usize) -> Legs {
        Legs(1 << leg)
    }
    /// Checks whether `leg` is in the set.
    pub fn has(self, leg: usize) -> bool {
        self.0 & 1 << leg != 0
    }
    /// Returns the intersection of both sets.
    pub fn and(self, other: Legs) -> Legs {
        Legs(self.0 & other.0)
    }
    /// Returns the union of both sets.
    pub fn or(self, other: Legs) -> Legs {
        Legs(self.0 | other.0)
    }
    /// Returns the difference: the legs of this set that are not in `other`.
    pub fn but(self, other: Legs) -> Legs {
        Legs(self.0 & !other.0)
    }
    /// Checks whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// Returns the number of legs in the set.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }
    /// Iterates over the legs in the set, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..Legs::MAX).filter(move |&leg| self.has(leg))
    }
}

impl FromIterator<usize> for Legs {
    fn from_iter<I: IntoIterator<Item = usize>>(legs: I) -> Legs {
        legs.into_iter().fold(Legs(0), |all, leg| all.or(Legs::one(leg)))
    }
}
