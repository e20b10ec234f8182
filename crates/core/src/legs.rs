//! Which of the legs of a mirror or an erasure code.

/// A set of legs, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Legs(pub u16);

impl Legs {
    /// Most legs of one backend, spares counted.
    pub const MAX: usize = 16;

    /// The first `count` legs.
    pub fn first(count: usize) -> Legs {
        assert!(count <= Legs::MAX);
        Legs(((1u32 << count) - 1) as u16)
    }
    /// One leg.
    pub fn one(leg: usize) -> Legs {
        Legs(1 << leg)
    }
    /// Is it one of these?
    pub fn has(self, leg: usize) -> bool {
        self.0 & 1 << leg != 0
    }
    /// In both sets.
    pub fn and(self, other: Legs) -> Legs {
        Legs(self.0 & other.0)
    }
    /// In one of the sets.
    pub fn or(self, other: Legs) -> Legs {
        Legs(self.0 | other.0)
    }
    /// Here and not there.
    pub fn but(self, other: Legs) -> Legs {
        Legs(self.0 & !other.0)
    }
    /// None at all.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// How many.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }
    /// Each of them, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..Legs::MAX).filter(move |&leg| self.has(leg))
    }
}

impl FromIterator<usize> for Legs {
    fn from_iter<I: IntoIterator<Item = usize>>(legs: I) -> Legs {
        legs.into_iter().fold(Legs(0), |all, leg| all.or(Legs::one(leg)))
    }
}
