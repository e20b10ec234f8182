//! Addresses of clients, which tell connections apart that have not authenticated yet.

use crate::store::{Ledger, ResourceBudget};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, Weak};

/// Address of a connection. One person has only one of them, or few.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum PeerAddress {
    /// A host. For IPv6 it is the network of 64 bits, because a host can use any number of
    /// addresses in it.
    Host(IpAddr),
    /// A user of this machine, by user id.
    User(u32),
    /// The kernel did not tell the address.
    Unknown,
}

impl PeerAddress {
    pub(crate) fn of(ip: IpAddr) -> PeerAddress {
        match ip.to_canonical() {
            IpAddr::V4(v4) => PeerAddress::Host(IpAddr::V4(v4)),
            IpAddr::V6(v6) => PeerAddress::Host(IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64))),
        }
    }
}

/// Ledgers of the addresses that hold something now, for clients without tokens.
#[derive(Debug)]
pub(crate) struct AddressLedgers {
    budget: Arc<ResourceBudget>,
    ledgers: Mutex<HashMap<PeerAddress, Weak<Ledger>>>,
}

impl AddressLedgers {
    pub(crate) fn new(budget: Arc<ResourceBudget>) -> AddressLedgers {
        AddressLedgers { budget, ledgers: Mutex::default() }
    }

    /// Returns the ledger of an address. The ledger lives as long as it is referenced.
    pub(crate) fn of(&self, address: PeerAddress) -> Arc<Ledger> {
        let mut ledgers = self.ledgers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(ledger) = ledgers.get(&address).and_then(Weak::upgrade) {
            return ledger;
        }
        if ledgers.len() == ledgers.capacity() {
            // Afterwards there are at most as many entries as connections and sessions.
            ledgers.retain(|_, ledger| ledger.strong_count() > 0);
        }
        let ledger = Arc::new(Ledger::new(self.budget.clone()));
        ledgers.insert(address, Arc::downgrade(&ledger));
        ledger
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_one_address_however_it_comes() {
        let of = |text: &str| PeerAddress::of(text.parse().unwrap());
        assert_eq!(of("10.0.0.7"), of("::ffff:10.0.0.7"));
        assert_ne!(of("10.0.0.7"), of("10.0.0.8"));
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
    }

    #[test]
    fn an_address_has_one_ledger_for_as_long_as_it_holds_something() {
        let addresses = AddressLedgers::new(Arc::new(ResourceBudget::new(|_| 10, false)));
        let first = addresses.of(PeerAddress::User(1));
        assert!(Arc::ptr_eq(&first, &addresses.of(PeerAddress::User(1))));
        assert!(!Arc::ptr_eq(&first, &addresses.of(PeerAddress::User(2))));
        for user in 0..10_000 {
            addresses.of(PeerAddress::User(user));
        }
        assert!(Arc::ptr_eq(&first, &addresses.of(PeerAddress::User(1))));
        assert!(addresses.ledgers.lock().unwrap().len() < 100, "those that hold nothing are forgotten");
    }
}
