//! Reference counts of values that have several owners.
//!
//! A count beside the value would be far with it; a clone would have to bring it near, and could
//! fail. So the counts are near, in a table by the number of the value, and only for values that
//! have several owners now: a value that never had costs nothing. The table has locks and no
//! atomics: a thread that finds itself the last owner sees what the others did to the value.

use super::HeapInner;
use super::objects::InternalScope;
use super::wait_queue::NumberHasher;
use core::hash::BuildHasherDefault;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Key of a value within its heap.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ShareKey(u64);

type Counts = HashMap<ShareKey, u64, BuildHasherDefault<NumberHasher>>;

/// Numbers of owners of the values that have at least two.
#[derive(Default)]
pub(crate) struct Shares([Mutex<Counts>; SHARDS]);

/// Number of shards: so many threads can clone at the same time.
const SHARDS: usize = 16;
/// Approximate bytes of near memory of an entry: key, count, and a byte of the table's own.
const ENTRY_BYTES: u64 = size_of::<(ShareKey, u64)>() as u64 + 1;

impl Shares {
    fn lock(&self, key: ShareKey) -> MutexGuard<'_, Counts> {
        let shard = key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        self.0[shard as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many values have several owners, for the verifier.
    pub(super) fn verify(&self) -> usize {
        let count = |counts: &Mutex<Counts>| {
            let counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
            assert!(counts.values().all(|owners| *owners >= 2), "one owner has no entry");
            counts.len()
        };
        self.0.iter().map(count).sum()
    }
}

impl HeapInner {
    /// Returns the key of the value with this number, at this card of its page. For a handle's
    /// number, the card is ignored.
    pub(crate) fn share_key(&self, number: u32, card: u8) -> ShareKey {
        let card = if number < self.pages { card } else { 0 };
        ShareKey(u64::from(number) << 8 | u64::from(card))
    }

    /// Adds an owner. The caller is one already.
    pub(crate) fn share(&self, key: ShareKey) {
        let mut counts = self.shares.lock(key);
        let before = counts.capacity();
        *counts.entry(key).or_insert(1) += 1;
        let grown = counts.capacity() - before;
        drop(counts);
        if grown > 0 {
            self.charge_anyway(grown as u64 * ENTRY_BYTES);
        }
    }

    /// Returns the number of owners. The caller is one. If it is the only one, that stays so as
    /// long as nobody else can reach the value.
    pub(crate) fn owners(&self, key: ShareKey) -> u64 {
        self.shares.lock(key).get(&key).copied().unwrap_or(1)
    }

    fn unshare(&self, key: ShareKey) -> bool {
        let mut counts = self.shares.lock(key);
        let Some(owners) = counts.get_mut(&key) else { return true };
        *owners -= 1;
        if *owners == 1 {
            counts.remove(&key);
            let before = counts.capacity();
            if counts.len() < before / 8 {
                counts.shrink_to(before / 4);
            }
            let shrunk = before - counts.capacity();
            drop(counts);
            if shrunk > 0 {
                self.uncharge(shrunk as u64 * ENTRY_BYTES);
            }
        }
        false
    }
}

/// Removes an owner; true if the caller was the only one, and still is.
///
/// # Safety
/// The caller has one. If this says false, it has none any more, and the heap may be gone.
pub(crate) unsafe fn unshare(core: *const HeapInner, key: ShareKey) -> bool {
    // SAFETY: the caller's value keeps the heap until it is given up, and our scope does from then on.
    let (core, _inside) = unsafe { (&*core, InternalScope::new(&*core)) };
    core.unshare(key)
}
