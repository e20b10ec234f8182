//! Sets of members of a mirror or an erasure code.

use crate::cast::low_u16;

/// A set of members, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemberSet(pub u16);

impl MemberSet {
    /// Greatest number of members of one backend, spares counted.
    pub const MAX: usize = 16;

    /// Returns the set of the first `count` members.
    pub fn first(count: usize) -> MemberSet {
        assert!(count <= MemberSet::MAX);
        MemberSet(low_u16((1u64 << count) - 1))
    }
    /// Returns the set that holds only `member`.
    pub fn one(member: usize) -> MemberSet {
        MemberSet(1 << member)
    }
    /// Checks whether `member` is in the set.
    pub fn has(self, member: usize) -> bool {
        self.0 & 1 << member != 0
    }
    /// Returns the intersection of both sets.
    pub fn intersection(self, other: MemberSet) -> MemberSet {
        MemberSet(self.0 & other.0)
    }
    /// Returns the union of both sets.
    pub fn union(self, other: MemberSet) -> MemberSet {
        MemberSet(self.0 | other.0)
    }
    /// Returns the difference: the members of this set that are not in `other`.
    pub fn difference(self, other: MemberSet) -> MemberSet {
        MemberSet(self.0 & !other.0)
    }
    /// Checks whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// Returns the number of members in the set.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }
    /// Iterates over the members in the set, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..MemberSet::MAX).filter(move |&member| self.has(member))
    }
}

impl FromIterator<usize> for MemberSet {
    fn from_iter<I: IntoIterator<Item = usize>>(members: I) -> MemberSet {
        members.into_iter().fold(MemberSet(0), |all, member| all.union(MemberSet::one(member)))
    }
}
