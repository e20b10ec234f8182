//! Reach of a call: the member of the pool at which a function runs, and the pages that it finds there.
//!
//! Members of a stripe have different pages, and so have tiers, which also exchange them. So a call runs
//! at the member that has its root, and tells the server which pages are there. A function that meets
//! another page stops, and the call continues at the client.

use super::counts::MissingAnswer;
use crate::offload::{OffloadMembers, OffloadTarget};
use farfield_core::{Deal, PageId};
use farfield_pool::{PagePlaces, TierPages};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Most runs of pages that a call names. As distances and lengths, they take some 8 KiB of the argument.
pub(super) const RUNS_MAX: usize = 2048;

/// Part of a call that says which pages of the heap its server has, and where.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ServerPages {
    /// All, with the numbers that they have in the heap.
    All,
    /// Those that a stripe deals to one member, with numbers of that member.
    Dealt {
        /// Number of members.
        members: u32,
        /// Number of pages that are kept together.
        group_pages: u64,
        /// Index of the member.
        member: u32,
    },
    /// These runs, with the numbers that they have in the heap: the distance from the end of the run
    /// before, and the length.
    Runs(Vec<(u32, u32)>),
}

impl ServerPages {
    /// Makes the part of a call for runs of pages (first page, count) in ascending order.
    fn of_runs(runs: &[(u64, u64)]) -> ServerPages {
        let mut end = 0;
        let number = |pages: u64| u32::try_from(pages).unwrap_or(u32::MAX);
        let distance = |(first, count): &(u64, u64)| {
            let distance = first - core::mem::replace(&mut end, first + count);
            (number(distance), number(*count))
        };
        ServerPages::Runs(runs.iter().map(distance).collect())
    }
}

/// Pages of the heap at a server, by which a function finds them there.
#[derive(Debug)]
pub(super) enum PageMap {
    All,
    Dealt { deal: Deal, member: usize },
    Runs { ends: Vec<(u64, u64)> },
    None,
}

impl PageMap {
    /// Makes the map of what came with a call. Nothing of it is believed.
    pub(super) fn new(pages: ServerPages) -> PageMap {
        match pages {
            ServerPages::All => PageMap::All,
            ServerPages::Dealt { members, group_pages, member } => match Deal::new(members.into(), group_pages) {
                Some(deal) if member < members => PageMap::Dealt { deal, member: member as usize },
                _ => PageMap::None,
            },
            ServerPages::Runs(runs) => {
                let mut end = 0u64;
                let run = |(distance, count): (u32, u32)| {
                    let first = end + u64::from(distance);
                    end = first + u64::from(count);
                    (first, end)
                };
                PageMap::Runs { ends: runs.into_iter().map(run).collect() }
            }
        }
    }

    /// Checks whether the same pages are here as long as the pool is not switched.
    pub(super) fn is_fixed(&self) -> bool {
        !matches!(self, PageMap::Runs { .. })
    }

    /// Returns the number that the first of these pages has here, if all of them are here, side by side;
    /// else a page that is not.
    pub(super) fn place(&self, first: u64, last: u64) -> Result<u64, u64> {
        match self {
            PageMap::All => Ok(first),
            PageMap::Dealt { deal, member } => {
                let (of, local) = deal.place(first);
                // Behind its group the next page is at another member, if there is one.
                let is_one_run = deal.members() == 1 || last - first < deal.group_pages() - deal.within(first);
                match of == *member {
                    true if is_one_run => Ok(local),
                    true => Err(first - deal.within(first) + deal.group_pages()),
                    false => Err(first),
                }
            }
            PageMap::Runs { ends } => {
                let run = ends.partition_point(|(_, end)| *end <= first);
                match ends.get(run).filter(|(begin, _)| *begin <= first) {
                    Some((_, end)) if last < *end => Ok(first),
                    Some((_, end)) => Err(*end),
                    None => Err(first),
                }
            }
            PageMap::None => Err(first),
        }
    }

    /// Returns the number in the heap of a page with this number here.
    pub(super) fn page_of(&self, local: PageId) -> PageId {
        match self {
            PageMap::Dealt { deal, member } => PageId(deal.page(*member, local.0)),
            _ => local,
        }
    }
}

/// Member of the pool at which one call runs.
pub(super) struct CallReach {
    pub(super) target: OffloadTarget,
    pub(super) pages: ServerPages,
    /// Pages of a tier, which must keep them until the call has ended.
    held: Option<(Arc<dyn PagePlaces>, TierPages)>,
}

impl CallReach {
    /// Finds the member that has this page of the heap, and what else it has. Changed pages were named
    /// before: a page that has changed since then may be found here, and has the right values.
    pub(super) fn of(members: &OffloadMembers, page: Option<u32>) -> Result<CallReach, MissingAnswer> {
        let page = PageId(page.unwrap_or(0).into());
        if let Some(deal) = members.layout.deal {
            let (member, _) = deal.place(page.0);
            let (count, group_pages) = (deal.members() as u32, deal.group_pages());
            let pages = ServerPages::Dealt { members: count, group_pages, member: member as u32 };
            return Ok(CallReach { target: OffloadTarget::Member(member), pages, held: None });
        }
        let Some(tiers) = &members.tiers else {
            return Ok(CallReach { target: OffloadTarget::Whole, pages: ServerPages::All, held: None });
        };
        // A page that was never written will come to lie in the first tier, if that has room.
        let tier = tiers.tier_of(page).unwrap_or(0);
        let held = tiers.pages_at(tier, RUNS_MAX).ok_or(MissingAnswer::SCATTERED)?;
        let pages = ServerPages::of_runs(held.runs());
        Ok(CallReach { target: OffloadTarget::Member(tier), pages, held: Some((tiers.clone(), held)) })
    }

    /// Checks whether the member has kept its pages until now.
    pub(super) fn is_kept(&self) -> bool {
        self.held.as_ref().is_none_or(|(tiers, held)| tiers.are_kept(held))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a function that reads another page than its pointer means, or one that its server does not have.
    use super::*;

    #[test]
    fn pages_of_a_stripe_are_found_where_the_stripe_deals_them() {
        for (members, group_pages) in [(1, 16), (2, 16), (3, 64), (5, 1)] {
            let deal = Deal::new(members, group_pages).unwrap();
            for member in 0..members {
                let dealt = ServerPages::Dealt { members: members as u32, group_pages, member: member as u32 };
                let map = PageMap::new(dealt);
                for first in 0..500 {
                    for last in first..first + 40 {
                        let is_here = (first..=last).all(|page| deal.place(page).0 == member as usize);
                        let locals = (first..=last).map(|page| deal.place(page).1);
                        let is_run = locals.zip(deal.place(first).1..).all(|(local, next)| local == next);
                        let expected = (is_here && is_run).then(|| deal.place(first).1);
                        let found = map.place(first, last);
                        assert_eq!(found.ok(), expected, "{first}..={last} at {member} of {members} by {group_pages}");
                        let other = found.err().map(|page| deal.place(page).0 != member as usize);
                        assert!(other != Some(false), "another page is named");
                        let back = expected.map(|local| map.page_of(PageId(local)));
                        assert!(back.is_none_or(|page| page == PageId(first)));
                    }
                }
            }
        }
    }

    #[test]
    fn pages_of_a_tier_are_those_of_its_runs() {
        let runs = [(0, 1), (3, 4), (9, 2), (64, 100)];
        let map = PageMap::new(ServerPages::of_runs(&runs));
        let has = |page: u64| runs.iter().any(|(first, count)| (*first..first + count).contains(&page));
        for first in 0..200 {
            for last in first..first + 20 {
                let missing = (first..=last).find(|page| !has(*page));
                assert_eq!(map.place(first, last), missing.map_or(Ok(first), Err), "{first}..={last}");
            }
        }
        assert!(!map.is_fixed() && PageMap::All.is_fixed());
    }

    #[test]
    fn what_no_client_says_leads_to_no_page() {
        let dealt = |members, group_pages, member| PageMap::new(ServerPages::Dealt { members, group_pages, member });
        for map in [dealt(0, 16, 0), dealt(2, 3, 0), dealt(2, 16, 2), PageMap::new(ServerPages::Runs(Vec::new()))] {
            assert_eq!(map.place(5, 5), Err(5));
        }
        let map = PageMap::new(ServerPages::Runs(vec![(u32::MAX, u32::MAX); 3]));
        assert_eq!(map.place(7, 9), Err(7));
    }
}
