//! Layout of pages that are dealt out to several members.

use crate::PageId;
use crate::cast::usize_of;
use crate::geometry::PAGE_BYTES;

/// Layout of a striped pool: groups of pages are dealt out to the members in turn.
///
/// Group `g` is kept by member `g mod n`, there as group `g div n`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deal {
    members: u64,
    /// Logarithm of the number of pages of a group.
    group_shift: u32,
}

impl Deal {
    /// Number of pages of a group, unless something else is said.
    pub const GROUP_PAGES: u64 = 16;
    /// Smallest and largest group of a pool, in bytes.
    pub const GROUP_BYTES: (u64, u64) = (Deal::GROUP_PAGES * PAGE_BYTES as u64, 16 << 20);

    /// Creates the layout over so many members; `None` if there are none, or if the number of pages
    /// of a group is no power of two.
    pub const fn new(members: u64, group_pages: u64) -> Option<Deal> {
        if members == 0 || !group_pages.is_power_of_two() {
            return None;
        }
        Some(Deal { members, group_shift: group_pages.trailing_zeros() })
    }

    /// Returns the number of members.
    pub fn members(self) -> u64 {
        self.members
    }

    /// Returns the number of pages that are kept together.
    pub fn group_pages(self) -> u64 {
        1 << self.group_shift
    }

    /// Returns the member that keeps this byte of the region, and the offset of the byte there.
    pub fn place_byte(self, offset: u64) -> (usize, u64) {
        let page = PageId::containing(offset);
        let (member, local) = self.place(page.0);
        (member, PageId(local).offset() + (offset - page.offset()))
    }

    /// Returns the member that keeps `page`, and the number of the page there.
    pub fn place(self, page: u64) -> (usize, u64) {
        let group = page >> self.group_shift;
        (usize_of(group % self.members), ((group / self.members) << self.group_shift) + self.within(page))
    }

    /// Returns the number of a page within its group.
    pub fn within(self, page: u64) -> u64 {
        page & (self.group_pages() - 1)
    }

    /// Returns the first page from `page` on that `member` keeps; `None` if it has too great a number.
    pub fn next_of(self, member: usize, page: u64) -> Option<u64> {
        let group = page >> self.group_shift;
        // Groups to go to the next one of this member.
        let ahead = (member as u64 + self.members - group % self.members) % self.members;
        if ahead == 0 { Some(page) } else { group.checked_add(ahead)?.checked_mul(self.group_pages()) }
    }

    /// Returns how many of the first `pages` pages `member` keeps. They are its first ones, so a
    /// run of pages is one run at each member.
    pub fn share(self, pages: u64, member: usize) -> u64 {
        let group = self.group_pages();
        let round = group * self.members;
        let rest = (pages % round).saturating_sub(member as u64 * group).min(group);
        pages / round * group + rest
    }

    /// Returns the page that `member` keeps as its `local`-th.
    pub fn page(self, member: usize, local: u64) -> u64 {
        (((local >> self.group_shift) * self.members + member as u64) << self.group_shift) + self.within(local)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against two pages in one place.
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn every_page_has_a_place_of_its_own_and_the_way_back_is_right() {
        for (members, group) in (1..6).flat_map(|members| [1, 16, 64, 256].map(|group| (members, group))) {
            let deal = Deal::new(members, group).unwrap();
            assert_eq!((deal.members(), deal.group_pages()), (members, group));
            let mut seen = BTreeSet::new();
            for page in 0..1500 {
                let (member, local) = deal.place(page);
                assert!(seen.insert((member, local)) && member < members as usize);
                assert_eq!(deal.page(member, local), page);
                for of in 0..members as usize {
                    let next = (page..).find(|page| deal.place(*page).0 == of);
                    assert_eq!(deal.next_of(of, page), next);
                }
                assert_eq!(member as u64, page / group % members, "groups are dealt in turn");
                let (byte, place) = (PageId(page).offset() + page % 4096, PageId(local).offset() + page % 4096);
                assert_eq!(deal.place_byte(byte), (member, place));
                assert_eq!(deal.share(page, member), local, "page {page} of {members} members");
                let shares: u64 = (0..members as usize).map(|member| deal.share(page, member)).sum();
                assert_eq!(shares, page);
            }
        }
    }

    #[test]
    fn only_powers_of_two_are_groups() {
        assert_eq!(Deal::new(0, 16), None);
        for group in [0, 3, 17, u64::MAX] {
            assert_eq!(Deal::new(2, group), None, "{group}");
        }
        let alone = Deal::new(1, 1 << 63).unwrap();
        assert_eq!(alone.place(u64::MAX), (0, u64::MAX));
    }
}
