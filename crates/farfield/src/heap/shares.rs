//! Reference counts of values that have several owners or weak pointers.
//!
//! A count beside the value would be far with it; a clone would have to bring it near, and could
//! fail. So the counts are near, in a table by the number of the value, and only for values that
//! have several owners now: a value that never had costs nothing. The table has locks: a thread
//! that finds itself the last owner sees what the others did to the value.
//!
//! A value that has had weak pointers has a [`WeakCell`] instead, which has the count: a weak
//! pointer that becomes an owner needs neither the table nor the heap, which may be gone.

use super::HeapInner;
use super::objects::InternalScope;
use super::wait_queue::NumberHasher;
use super::weak_cell::WeakCell;
use core::cmp::Ordering::{Equal, Greater, Less};
use core::hash::BuildHasherDefault;
use core::num::NonZeroU32;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Key of a value within its heap.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ShareKey(u64);

type Table<V> = HashMap<ShareKey, V, BuildHasherDefault<NumberHasher>>;

/// Owners of the values that have at least two, or have had weak pointers.
#[derive(Default)]
pub(crate) struct Shares([Mutex<Shard>; SHARDS]);

/// Part of the values, by key.
#[derive(Default)]
struct Shard {
    /// Numbers of owners of the values that have at least two, and no cell.
    counts: Table<u64>,
    /// Cells of values that live.
    cells: Table<Arc<WeakCell>>,
}

/// Number of shards: so many threads can clone at the same time.
const SHARDS: usize = 16;
/// Approximate bytes of near memory of a count: key, count, and a byte of the table's own.
const COUNT_BYTES: usize = size_of::<(ShareKey, u64)>() + 1;
/// Approximate bytes of near memory of a cell: its entry, the two counts of its `Arc`, itself, and
/// what the allocator needs.
const CELL_BYTES: usize = COUNT_BYTES + 16 + size_of::<WeakCell>() + 8;

impl Shard {
    fn bytes(&self) -> u64 {
        (self.counts.capacity() * COUNT_BYTES + self.cells.capacity() * CELL_BYTES) as u64
    }

    /// Makes room for a cell. A full table first gives up the cells that no weak pointer leads to.
    fn reserve_cell(&mut self) {
        let (full, counts) = (self.cells.capacity(), &mut self.counts);
        if self.cells.len() < full {
            return;
        }
        self.cells.retain(|key, cell| {
            let Some(cell) = Arc::get_mut(cell) else { return true };
            let owners = cell.owners_mut();
            if owners > 1 {
                counts.insert(*key, owners);
            }
            false
        });
        // A table that stays half full grows, so that not every new cell comes with a search.
        if self.cells.len() > full / 2 {
            self.cells.reserve(full + 1 - self.cells.len());
        }
    }
}

/// Shrinks a table after an entry has gone, if it is nearly empty.
fn shrink<V>(table: &mut Table<V>) {
    let capacity = table.capacity();
    if table.len() < capacity / 8 {
        table.shrink_to(capacity / 4);
    }
}

impl Shares {
    /// Returns how many values have several owners or a cell, for the verifier.
    pub(super) fn verify(&self) -> usize {
        let count = |shard: &Mutex<Shard>| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            assert!(shard.counts.values().all(|owners| *owners >= 2), "one owner has no entry");
            assert!(shard.cells.values().all(|cell| cell.owners() >= 1), "a cell of a value that is gone");
            assert!(shard.cells.keys().all(|key| !shard.counts.contains_key(key)), "one value with two counts");
            shard.counts.len() + shard.cells.len()
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

    /// Calls `action` with the shard of this value, locked, and charges the budget for what it has
    /// grown by.
    fn with_shard<R>(&self, key: ShareKey, action: impl FnOnce(&mut Shard) -> R) -> R {
        let index = key.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        let mut shard = self.shares.0[index as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let before = shard.bytes();
        let result = action(&mut shard);
        let after = shard.bytes();
        drop(shard);
        match after.cmp(&before) {
            Greater => self.charge_anyway(after - before),
            Less => self.uncharge(before - after),
            Equal => {}
        }
        result
    }

    /// Adds an owner. The caller is one already.
    pub(crate) fn share(&self, key: ShareKey) {
        self.with_shard(key, |shard| match shard.cells.get(&key) {
            Some(cell) => cell.add_owner(),
            None => *shard.counts.entry(key).or_insert(1) += 1,
        });
    }

    /// Returns the number of owners. The caller is one. If it is the only one, and there is no weak
    /// pointer, that stays so as long as nobody else can reach the value.
    pub(crate) fn owners(&self, key: ShareKey) -> u64 {
        self.with_shard(key, |shard| match shard.cells.get(&key) {
            Some(cell) => cell.owners(),
            None => shard.counts.get(&key).copied().unwrap_or(1),
        })
    }

    /// Returns the number of weak pointers to a value that the caller owns.
    pub(crate) fn weak_count(&self, key: ShareKey) -> u64 {
        self.with_shard(key, |shard| shard.cells.get(&key).map_or(0, |cell| Arc::weak_count(cell) as u64))
    }

    /// Checks whether the caller is the only owner, and no weak pointer leads to the value. That
    /// stays so as long as nobody else can reach the value.
    pub(crate) fn is_unshared(&self, key: ShareKey) -> bool {
        self.with_shard(key, |shard| match shard.cells.get_mut(&key) {
            Some(cell) => Arc::get_mut(cell).is_some_and(|cell| cell.owners_mut() == 1),
            None => !shard.counts.contains_key(&key),
        })
    }

    /// Makes weak pointers lead nowhere, if the caller is the only owner. False if it is not.
    pub(crate) fn detach_weak(&self, key: ShareKey) -> bool {
        self.with_shard(key, |shard| {
            let Some(cell) = shard.cells.get(&key) else { return !shard.counts.contains_key(&key) };
            let is_only = cell.end_only_owner();
            if is_only {
                shard.cells.remove(&key);
                shrink(&mut shard.cells);
            }
            is_only
        })
    }

    /// Makes a weak pointer to a value that the caller owns, whose slot word has these halves.
    pub(crate) fn downgrade(&self, key: ShareKey, halves: (u32, NonZeroU32)) -> Weak<WeakCell> {
        self.with_shard(key, |shard| {
            if let Some(cell) = shard.cells.get(&key) {
                return Arc::downgrade(cell);
            }
            shard.reserve_cell();
            let cell = Arc::new(WeakCell::unborn());
            cell.begin(halves, shard.counts.remove(&key).unwrap_or(1));
            let weak = Arc::downgrade(&cell);
            shard.cells.insert(key, cell);
            weak
        })
    }

    /// Begins the life of a value with this cell. The caller is the only owner, and its slot word
    /// has these halves.
    pub(crate) fn begin_cell(&self, key: ShareKey, halves: (u32, NonZeroU32), cell: Arc<WeakCell>) {
        self.with_shard(key, |shard| {
            shard.reserve_cell();
            // Under the lock: a weak pointer that becomes an owner from now on finds the entry.
            cell.begin(halves, 1);
            shard.cells.insert(key, cell);
        });
    }

    fn unshare(&self, key: ShareKey) -> bool {
        self.with_shard(key, |shard| {
            if let Some(cell) = shard.cells.get(&key) {
                let was_last = cell.remove_owner();
                if was_last {
                    shard.cells.remove(&key);
                    shrink(&mut shard.cells);
                }
                return was_last;
            }
            let Some(owners) = shard.counts.get_mut(&key) else { return true };
            *owners -= 1;
            if *owners == 1 {
                shard.counts.remove(&key);
                shrink(&mut shard.counts);
            }
            false
        })
    }
}

/// Removes an owner; true if the caller was the only one, and still is. Weak pointers lead nowhere
/// then.
///
/// # Safety
/// The caller has one. If this says false, it has none any more, and the heap may be gone.
pub(crate) unsafe fn unshare(core: *const HeapInner, key: ShareKey) -> bool {
    // SAFETY: the caller's value keeps the heap until it is given up, and our scope does from then on.
    let (core, _inside) = unsafe { (&*core, InternalScope::new(&*core)) };
    core.unshare(key)
}
