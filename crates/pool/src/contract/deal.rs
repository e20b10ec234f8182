//! Layout of pages that are dealt out to several members.

use farfield_core::PageId;

/// Number of pages that are kept together.
pub(crate) const GROUP_PAGES: u64 = 16;

/// Layout of a striped pool: groups of 16 pages are dealt out to the members in turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deal {
    pub(crate) members: u64,
}

impl Deal {
    /// Returns the member that keeps this byte of the region, and the offset of the byte there.
    pub fn place_byte(self, offset: u64) -> (usize, u64) {
        let page = PageId::containing(offset);
        let (member, local) = self.place(page.0);
        (member, PageId(local).offset() + (offset - page.offset()))
    }

    /// Returns the member that keeps `page`, and the number of the page there.
    pub(crate) fn place(self, page: u64) -> (usize, u64) {
        let group = page / GROUP_PAGES;
        ((group % self.members) as usize, group / self.members * GROUP_PAGES + page % GROUP_PAGES)
    }

    /// Returns how many of the first `pages` pages `member` keeps. They are its first ones, so a
    /// run of pages is one run at each member.
    pub(crate) fn share(self, pages: u64, member: usize) -> u64 {
        let round = GROUP_PAGES * self.members;
        let rest = (pages % round).saturating_sub(member as u64 * GROUP_PAGES).min(GROUP_PAGES);
        pages / round * GROUP_PAGES + rest
    }

    /// Returns the page that `member` keeps as its `local`-th.
    pub(crate) fn page(self, member: usize, local: u64) -> u64 {
        (local / GROUP_PAGES * self.members + member as u64) * GROUP_PAGES + local % GROUP_PAGES
    }
}
