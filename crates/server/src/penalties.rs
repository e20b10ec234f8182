//! Wrong tokens are slowed down: a token bucket per address, as OpenSSH has it (`PerSourcePenalties`).
//!
//! An address may be wrong a few times in a row, and then once a second. While its bucket is empty nothing that
//! comes from there is looked at, so that guesses made side by side are no faster; but for clients of sessions
//! that are here already: whoever knows the secret of one does not guess.

use crate::address::Address;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Wrong tokens that an address may show at once.
const BURST: u32 = 16;
/// After that, one in so long.
const EVERY: Duration = Duration::from_secs(1);
/// Most addresses that are remembered. Of more, those are forgotten whose penalty ends first.
const ADDRESSES_MAX: usize = 4096;

/// Addresses that showed wrong tokens, and when their buckets will be full again.
#[derive(Debug, Default)]
pub(crate) struct Penalties(Mutex<HashMap<Address, Instant>>);

impl Penalties {
    fn full_at(&self) -> MutexGuard<'_, HashMap<Address, Instant>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Is nothing looked at that comes from this address now?
    pub(crate) fn is_closed(&self, address: Address, now: Instant) -> bool {
        let full_at = self.full_at().get(&address).copied();
        full_at.is_some_and(|at| at.saturating_duration_since(now) > EVERY * (BURST - 1))
    }

    /// A wrong token came from there.
    pub(crate) fn add(&self, address: Address, now: Instant) {
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
        let (one, other) = (Address::User(1), Address::User(2));
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
        let worst = Address::User(u32::MAX);
        (0..BURST).for_each(|_| penalties.add(worst, now));
        (0..3 * ADDRESSES_MAX as u32).for_each(|user| penalties.add(Address::User(user), now));
        assert!(penalties.full_at().len() <= ADDRESSES_MAX);
        assert!(penalties.is_closed(worst, now));
    }
}
