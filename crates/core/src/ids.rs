//! Identifiers: newtypes, so that a page index is never taken for a byte offset.

use crate::geometry::PAGE_SHIFT;

/// Index of a page inside its region; the far address of its first byte is [`PageId::offset`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub struct PageId(pub u64);

impl PageId {
    /// Returns the byte offset of the page inside its region.
    pub const fn offset(self) -> u64 {
        self.0 << PAGE_SHIFT
    }
    /// Returns the page that holds the byte at `offset`.
    pub const fn containing(offset: u64) -> PageId {
        PageId(offset >> PAGE_SHIFT)
    }
}

/// A far address range owned by one client of one server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegionId(pub u64);

/// Random number that a server draws at each start. A server that comes back is a different one, so
/// the promises of an earlier incarnation do not hold for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Incarnation(pub u64);
