//! Where the pages of a pool with tiers lie, for functions that run at one of the tiers.

use farfield_core::PageId;
use std::sync::Arc;

/// View of a pool with tiers: which tier has a page. A page has the same number in each tier, and moves
/// from one to another at any time.
///
/// A function that only reads may run at a tier ([`Backend::member`](crate::Backend::member)) if it reads
/// no other pages than [`PagePlaces::pages_at`] has named just before, and its result counts only if
/// [`PagePlaces::are_kept`] holds afterwards. Then each of these pages was at the tier when it was named,
/// and the bytes that the tier had then, or newer ones, were there all the time.
pub trait PagePlaces: Send + Sync {
    /// Returns the number of tiers.
    fn tiers(&self) -> usize;

    /// Returns the tier that has this page now; `None` if the page is zeros.
    fn tier_of(&self, page: PageId) -> Option<usize>;

    /// Returns the pages that a tier has now; `None` if they lie in more than `runs_max` runs.
    fn pages_at(&self, tier: usize, runs_max: usize) -> Option<TierPages>;

    /// Checks whether the tier has given back no page since these were named.
    fn are_kept(&self, pages: &TierPages) -> bool;
}

/// Pages that a tier had at one moment ([`PagePlaces::pages_at`]).
#[derive(Clone, Debug)]
pub struct TierPages {
    pub(crate) tier: usize,
    pub(crate) runs: Arc<[(u64, u64)]>,
    /// Number of times that the tier had given pages back before.
    pub(crate) sweeps: u64,
}

impl TierPages {
    /// Returns the runs of pages (first page, count), in ascending order. No two of them touch.
    pub fn runs(&self) -> &[(u64, u64)] {
        &self.runs
    }
}
