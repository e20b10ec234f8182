//! What a mirror notes of a split: the pages of one operation that are read or changed at once.

use crate::redundant::split::Split;

pub(super) type MirrorSplit = Split<MirrorTask>;

#[derive(Clone, Copy)]
pub(crate) struct MirrorTask {
    pub(super) operation: usize,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Set when the operation has ended in failure before the split has. The split goes on until
    /// all members have answered: a member that cannot be done without may still do it.
    pub(super) is_over: bool,
    pub(super) is_hedged: bool,
}
