//! Accounts for memory: a charge counts against the capacity of the server and the quota of one
//! tenant, against both or neither.
//!
//! A limit is on *pages*, the bytes that clients store. *Bookkeeping* (page maps, checksums, notes,
//! and what the kernel needs for a region) has an allowance beyond the limit. A dense region stays
//! below it. The bookkeeping of a sparse region, a clone or an empty region takes the room of pages
//! once the allowance is used up.

use super::ledger::Ledger;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Part of a limit (1/256) that bookkeeping may take besides the pages. A dense region needs 9
/// bytes per page.
const ALLOWANCE_PART: u64 = 256;
/// Pages of bookkeeping that every limit allows besides its pages, so that small ones can be used
/// in full.
const ALLOWANCE_PAGES: u64 = 256;

/// Memory in use against a limit.
#[derive(Debug)]
pub(crate) struct PageCounter {
    /// Most pages of clients; `u64::MAX` means no limit.
    limit_pages: AtomicU64,
    /// Pages of clients, at most the limit.
    used_pages: AtomicU64,
    /// Pages of clients and of bookkeeping, at most the limit and the allowance.
    total_pages: AtomicU64,
}

fn try_add(counter: &AtomicU64, pages: u64, limit: u64) -> bool {
    let fits = |used: u64| used.checked_add(pages).filter(|sum| *sum <= limit);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
}

fn sub(counter: &AtomicU64, pages: u64) {
    // Never below zero: a counter that is a little off is better than one that is full forever.
    let less = |used: u64| Some(used.saturating_sub(pages));
    let before = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).unwrap_or(0);
    debug_assert!(before >= pages, "refunded {pages} of {before} pages");
}

impl PageCounter {
    /// Makes an empty counter; `None` means no limit.
    pub(crate) fn new(limit_pages: Option<u64>) -> PageCounter {
        PageCounter {
            limit_pages: AtomicU64::new(limit_pages.unwrap_or(u64::MAX)),
            used_pages: AtomicU64::new(0),
            total_pages: AtomicU64::new(0),
        }
    }

    pub(crate) fn used_pages(&self) -> u64 {
        self.used_pages.load(Ordering::Relaxed)
    }

    /// Returns the pages of bookkeeping.
    pub(crate) fn bookkeeping_pages(&self) -> u64 {
        self.total_pages.load(Ordering::Relaxed).saturating_sub(self.used_pages())
    }

    pub(crate) fn limit_pages(&self) -> Option<u64> {
        let limit = self.limit();
        (limit != u64::MAX).then_some(limit)
    }

    /// Sets another limit; `None` means none. A limit below what is in use becomes what is in use,
    /// so nobody is overdrawn for what was allowed before.
    pub(crate) fn set_limit(&self, limit_pages: Option<u64>) {
        self.limit_pages.store(limit_pages.unwrap_or(u64::MAX).max(self.used_pages()), Ordering::Relaxed);
    }

    fn limit(&self) -> u64 {
        self.limit_pages.load(Ordering::Relaxed)
    }

    fn total_limit(&self) -> u64 {
        let limit = self.limit();
        limit.saturating_add(limit / ALLOWANCE_PART).saturating_add(ALLOWANCE_PAGES)
    }

    fn try_add(&self, memory: ChargeKind, pages: u64) -> bool {
        if !try_add(&self.total_pages, pages, self.total_limit()) {
            return false;
        }
        if memory == ChargeKind::Bookkeeping || try_add(&self.used_pages, pages, self.limit()) {
            return true;
        }
        sub(&self.total_pages, pages);
        false
    }

    fn add(&self, memory: ChargeKind, pages: u64) {
        self.total_pages.fetch_add(pages, Ordering::Relaxed);
        if memory == ChargeKind::Pages {
            self.used_pages.fetch_add(pages, Ordering::Relaxed);
        }
    }

    fn sub(&self, memory: ChargeKind, pages: u64) {
        if memory == ChargeKind::Pages {
            sub(&self.used_pages, pages);
        }
        sub(&self.total_pages, pages);
    }

    /// Checks whether more is stored than allowed, because a client stored through its own mapping.
    /// The bookkeeping of such pages is found afterwards, and is two pages for a page at most. That
    /// is no fault of the client, so it has a higher limit.
    fn is_overdrawn(&self) -> bool {
        let most = self.total_limit().saturating_mul(4);
        self.used_pages() > self.limit() || self.total_pages.load(Ordering::Relaxed) > most
    }
}

/// Kind of memory that is charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChargeKind {
    /// Bytes that clients stored, or reserved room for.
    Pages,
    /// Metadata with which the server finds pages.
    Bookkeeping,
}

/// Limit that leaves no room for one more page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Full {
    /// The capacity of the server.
    Server,
    /// The quota of the tenant.
    Tenant,
}

/// Account that pays for a region: two page counters for its memory, and a ledger for other
/// resources.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(crate) server: Arc<PageCounter>,
    pub(crate) tenant: Arc<PageCounter>,
    pub(crate) ledger: Arc<Ledger>,
}

impl Account {
    /// Charges `pages` to both counters, or to neither if one is full.
    pub(crate) fn charge(&self, memory: ChargeKind, pages: u64) -> Result<(), Full> {
        if !self.tenant.try_add(memory, pages) {
            return Err(Full::Tenant);
        }
        if !self.server.try_add(memory, pages) {
            self.tenant.sub(memory, pages);
            return Err(Full::Server);
        }
        Ok(())
    }

    /// Charges pages that exist already, whatever the limits say.
    pub(crate) fn charge_regardless(&self, memory: ChargeKind, pages: u64) {
        self.tenant.add(memory, pages);
        self.server.add(memory, pages);
    }

    /// Refunds `pages` to both counters.
    pub(crate) fn refund(&self, memory: ChargeKind, pages: u64) {
        self.tenant.sub(memory, pages);
        self.server.sub(memory, pages);
    }

    /// Returns which of the two counters is over its limit, because of pages that were charged
    /// regardless.
    pub(crate) fn overdrawn(&self) -> Option<Full> {
        if self.tenant.is_overdrawn() {
            Some(Full::Tenant)
        } else if self.server.is_overdrawn() {
            Some(Full::Server)
        } else {
            None
        }
    }

    /// Charges bookkeeping for as long as the returned guard lives.
    pub(crate) fn hold(&self, pages: u64) -> Result<Bookkeeping, Full> {
        self.charge(ChargeKind::Bookkeeping, pages)?;
        Ok(Bookkeeping { account: self.clone(), pages: AtomicU64::new(pages) })
    }
}

/// Charged bookkeeping, refunded when dropped.
#[derive(Debug)]
pub(crate) struct Bookkeeping {
    account: Account,
    pages: AtomicU64,
}

impl Bookkeeping {
    #[cfg(test)]
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Charges `pages` more.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), Full> {
        self.account.charge(ChargeKind::Bookkeeping, pages)?;
        self.pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Refunds up to `pages`.
    pub(crate) fn shrink(&self, pages: u64) {
        let mut given = 0;
        let less = |held: u64| {
            given = held.min(pages);
            Some(held - given)
        };
        let _ = self.pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.account.refund(ChargeKind::Bookkeeping, given);
    }

    /// Sets the charge to the kernel's number of pages, whatever the limits say.
    pub(crate) fn set(&self, pages: u64) {
        let before = self.pages.swap(pages, Ordering::Relaxed);
        match pages.checked_sub(before) {
            Some(more) => self.account.charge_regardless(ChargeKind::Bookkeeping, more),
            None => self.account.refund(ChargeKind::Bookkeeping, before - pages),
        }
    }
}

impl Drop for Bookkeeping {
    fn drop(&mut self) {
        self.account.refund(ChargeKind::Bookkeeping, *self.pages.get_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::ledger;

    fn account(server: &Arc<PageCounter>, limit_pages: Option<u64>) -> Account {
        Account { server: server.clone(), tenant: Arc::new(PageCounter::new(limit_pages)), ledger: ledger() }
    }

    #[test]
    fn a_charge_takes_from_both_or_from_neither() {
        let server = Arc::new(PageCounter::new(Some(10)));
        let (small, large) = (account(&server, Some(4)), account(&server, None));
        assert_eq!(small.charge(ChargeKind::Pages, 5), Err(Full::Tenant));
        assert_eq!(server.used_pages(), 0);
        assert_eq!(large.charge(ChargeKind::Pages, 8), Ok(()));
        assert_eq!(small.charge(ChargeKind::Pages, 3), Err(Full::Server));
        assert_eq!(small.tenant.used_pages(), 0);
        assert_eq!(large.charge(ChargeKind::Pages, u64::MAX), Err(Full::Tenant), "sums do not wrap");
        large.refund(ChargeKind::Pages, 8);
        assert_eq!(small.charge(ChargeKind::Pages, 4), Ok(()));
        assert_eq!(server.used_pages(), 4);
    }

    #[test]
    fn bookkeeping_beyond_its_allowance_takes_the_room_of_pages() {
        let server = Arc::new(PageCounter::new(None));
        let tenant = account(&server, Some(1024));
        let allowance = 1024 / ALLOWANCE_PART + ALLOWANCE_PAGES;
        let held = tenant.hold(allowance).unwrap();
        tenant.charge(ChargeKind::Pages, 1024).unwrap();
        assert_eq!(tenant.charge(ChargeKind::Pages, 1), Err(Full::Tenant));
        assert!(matches!(held.grow(1), Err(Full::Tenant)));
        tenant.refund(ChargeKind::Pages, 100);
        held.grow(100).unwrap();
        assert_eq!(tenant.charge(ChargeKind::Pages, 1), Err(Full::Tenant), "the sum counts");
        held.shrink(1);
        tenant.charge(ChargeKind::Pages, 1).unwrap();
        held.set(3 * 1024);
        assert_eq!(tenant.overdrawn(), None, "found afterwards");
        assert_eq!(tenant.charge(ChargeKind::Pages, 1), Err(Full::Tenant), "and then there is no room for more");
        held.set(allowance + 5 * 1024);
        assert_eq!(tenant.overdrawn(), Some(Full::Tenant));
        held.set(0);
        assert_eq!((tenant.overdrawn(), tenant.tenant.bookkeeping_pages()), (None, 0));
        tenant.refund(ChargeKind::Pages, 925);
        drop(held);
        assert_eq!((server.used_pages(), server.bookkeeping_pages()), (0, 0));
    }
}
