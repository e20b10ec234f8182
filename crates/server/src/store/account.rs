//! Who pays for a page: the capacity of the server and the quota of one tenant, both or neither.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages in use against a limit.
#[derive(Debug)]
pub(crate) struct Meter {
    limit_pages: u64,
    used_pages: AtomicU64,
}

impl Meter {
    /// `None`: no limit.
    pub(crate) fn new(limit_pages: Option<u64>) -> Meter {
        Meter { limit_pages: limit_pages.unwrap_or(u64::MAX), used_pages: AtomicU64::new(0) }
    }

    pub(crate) fn used_pages(&self) -> u64 {
        self.used_pages.load(Ordering::Relaxed)
    }

    pub(crate) fn limit_pages(&self) -> Option<u64> {
        (self.limit_pages != u64::MAX).then_some(self.limit_pages)
    }

    fn try_add(&self, pages: u64) -> bool {
        let fits = |used: u64| used.checked_add(pages).filter(|sum| *sum <= self.limit_pages);
        self.used_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn sub(&self, pages: u64) {
        // Never below zero: a meter that is a little off is better than one that says full forever.
        let less = |used: u64| Some(used.saturating_sub(pages));
        let before = self.used_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).unwrap_or(0);
        debug_assert!(before >= pages, "refunded {pages} of {before} pages");
    }
}

/// What stands in the way of one more page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Full {
    /// The server's capacity.
    Server,
    /// The tenant's quota.
    Tenant,
}

/// The two meters that a region's pages run on.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(crate) server: Arc<Meter>,
    pub(crate) tenant: Arc<Meter>,
}

impl Account {
    /// Takes `pages` from both, or from neither.
    pub(crate) fn charge(&self, pages: u64) -> Result<(), Full> {
        if !self.tenant.try_add(pages) {
            return Err(Full::Tenant);
        }
        if !self.server.try_add(pages) {
            self.tenant.sub(pages);
            return Err(Full::Server);
        }
        Ok(())
    }

    /// Counts pages that are there already, whatever the limits say.
    pub(crate) fn charge_regardless(&self, pages: u64) {
        self.tenant.used_pages.fetch_add(pages, Ordering::Relaxed);
        self.server.used_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Gives `pages` back to both.
    pub(crate) fn refund(&self, pages: u64) {
        self.tenant.sub(pages);
        self.server.sub(pages);
    }

    /// Is one of the two over its limit (because of pages that were counted regardless)?
    pub(crate) fn overdrawn(&self) -> Option<Full> {
        let over = |meter: &Meter| meter.used_pages() > meter.limit_pages;
        if over(&self.tenant) {
            Some(Full::Tenant)
        } else if over(&self.server) {
            Some(Full::Server)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_takes_from_both_or_from_neither() {
        let server = Arc::new(Meter::new(Some(10)));
        let small = Account { server: server.clone(), tenant: Arc::new(Meter::new(Some(4))) };
        let large = Account { server: server.clone(), tenant: Arc::new(Meter::new(None)) };
        assert_eq!(small.charge(5), Err(Full::Tenant));
        assert_eq!(server.used_pages(), 0);
        assert_eq!(large.charge(8), Ok(()));
        assert_eq!(small.charge(3), Err(Full::Server));
        assert_eq!(small.tenant.used_pages(), 0);
        assert_eq!(large.charge(u64::MAX), Err(Full::Tenant), "sums do not wrap");
        large.refund(8);
        assert_eq!(small.charge(4), Ok(()));
        assert_eq!(server.used_pages(), 4);
    }
}
