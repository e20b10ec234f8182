//! Rate limit for wrong tokens: a token bucket per address, like OpenSSH's `PerSourcePenalties`.
//!
//! An address may send a few wrong tokens in a row, and then one a second. While its bucket is
//! empty, nothing that comes from the address is looked at, so parallel guesses are no faster.
//! Clients of existing sessions are exempt: a client that knows the secret of a session does not
//! guess.

use crate::address::PeerAddress;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Wrong tokens that an address may send in a burst.
const BURST: u32 = 16;
/// Interval after which one more wrong token is allowed.
const EVERY: Duration = Duration::from_secs(1);
/// Most addresses that are remembered. If there are more, the one whose penalty ends first is
/// forgotten.
const ADDRESSES_MAX: usize = 4096;

/// Addresses that sent wrong tokens, with the time at which their buckets will be full again.
#[derive(Debug, Default)]
pub(crate) struct Penalties(Mutex<HashMap<PeerAddress, Instant>>);

impl Penalties {
    fn full_at(&self) -> MutexGuard<'_, HashMap<PeerAddress, Instant>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Checks whether the address has to wait: its bucket is empty.
    pub(crate) fn is_closed(&self, address: PeerAddress, now: Instant) -> bool {
        let full_at = self.full_at().get(&address).copied();
        full_at.is_some_and(|at| at.saturating_duration_since(now) > EVERY * (BURST - 1))
    }

    /// Counts a wrong token from an address.
    pub(crate) fn add(&self, address: PeerAddress, now: Instant) {
        let mut full_at = self.full_at();
        if full_at.len() >= ADDRESSES_MAX && !full_at.contains_key(&address) {
            full_at.retain(|_, at| *at > now);
            if full_at.len() >= ADDRESSES_MAX
                && let Some(least) = full_at.iter().min_by_key(|(_, at)| **at).map(|(address, _)| *address)
            {
                full_at.remove(&least);
            }
        }
        let at = full_at.entry(address).or_insert(now);
        *at = (*at).max(now) + EVERY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_wrong_tokens_are_forgiven_and_then_one_a_second() {
        let penalties = Penalties::default();
        let (one, other) = (PeerAddress::User(1), PeerAddress::User(2));
        let mut now = Instant::now();
        let mut tries = 0;
        while !penalties.is_closed(one, now) {
            penalties.add(one, now);
            tries += 1;
        }
        assert_eq!(tries, BURST);
        assert!(!penalties.is_closed(other, now), "each address for itself");
        for _ in 0..10 {
            assert!(penalties.is_closed(one, now + EVERY / 2));
            now += EVERY;
            assert!(!penalties.is_closed(one, now));
            penalties.add(one, now);
            assert!(penalties.is_closed(one, now));
        }
        now += EVERY * BURST;
        (0..BURST).for_each(|_| penalties.add(one, now));
        assert!(penalties.is_closed(one, now), "a full bucket holds no more than before");
    }

    #[test]
    fn no_more_addresses_are_remembered_than_fit_and_the_worst_longest() {
        let penalties = Penalties::default();
        let now = Instant::now();
        let worst = PeerAddress::User(u32::MAX);
        (0..BURST).for_each(|_| penalties.add(worst, now));
        (0..3 * ADDRESSES_MAX as u32).for_each(|user| penalties.add(PeerAddress::User(user), now));
        assert!(penalties.full_at().len() <= ADDRESSES_MAX);
        assert!(penalties.is_closed(worst, now));
    }
}
