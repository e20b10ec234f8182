//! Map from keys to values, in no order: a hash trie.
//!
//! A branch has a slot for each value of four bits of the hash. A slot leads nowhere, to an entry, to
//! the next branch, or to the entries whose hashes are equal. Entries do not change: a change is an
//! exchange of what one slot leads to, and branches stay where they are (Prokopec et al., *Concurrent
//! Tries with Efficient Non-Blocking Snapshots*, PPoPP 2012, without their snapshots and contraction).

use super::{GcError, MapKey, MapValue, Mutator};
use crate::FarObject;
use crate::object::{AnyObject, Atom};
use crate::reference::{Gc, Ref};
use core::hash::{BuildHasher, Hash, Hasher};
use core::marker::PhantomData;
use std::hash::{DefaultHasher, RandomState};

/// Bits of the hash that choose a slot of a branch.
const BITS: u32 = 4;
const SLOTS: usize = 1 << BITS;

/// Map from keys to values, in no order.
///
/// A value is a number, a [`Ref`], or a [`WeakRef`](crate::WeakRef), with which the map is a weak map.
/// A lookup reads as many objects as the logarithm of the number of entries to the base 16, of which
/// the first few are near in a map that is used.
///
/// The map does not get smaller: branches stay when their entries are removed.
#[derive(FarObject)]
pub struct TrieMap<K: MapKey, V: MapValue> {
    /// Number that each hash begins with, so that nobody can foresee it.
    seed: u64,
    len: Atom<u64>,
    root: Ref<Branch>,
    entries: PhantomData<fn() -> MapEntry<K, V>>,
}

type Branch = [Ref<AnyObject>];

/// Entry of a map.
#[derive(FarObject)]
pub struct MapEntry<K: MapKey, V: MapValue> {
    hash: u64,
    key: K,
    value: V,
}

impl<K: MapKey, V: MapValue> MapEntry<K, V> {
    /// Returns the key.
    pub fn key(&self) -> &K {
        &self.key
    }

    /// Returns the value, and brings what it leads to near; `None` if that was collected.
    pub fn value<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<V::Given<'m>>, GcError> {
        self.value.find(m)
    }
}

type EntryRef<'m, K, V> = Gc<'m, MapEntry<K, V>>;

/// Entry and its index among those whose hashes are equal.
type Indexed<'m, K, V> = (usize, EntryRef<'m, K, V>);

/// Entries whose hashes are equal.
type Collisions<K, V> = [Ref<MapEntry<K, V>>];

/// What a slot leads to.
enum SlotTarget<'m, K: MapKey, V: MapValue> {
    Nothing,
    Branch(Gc<'m, Branch>),
    Entry(EntryRef<'m, K, V>),
    Collisions(Gc<'m, Collisions<K, V>>),
}

impl<'m, K: MapKey, V: MapValue> SlotTarget<'m, K, V> {
    fn of(found: Option<Gc<'m, AnyObject>>, m: &'m Mutator<'_>) -> Result<SlotTarget<'m, K, V>, GcError> {
        let Some(object) = found else { return Ok(SlotTarget::Nothing) };
        if let Some(branch) = object.downcast(m) {
            return Ok(SlotTarget::Branch(branch));
        }
        if let Some(entry) = object.downcast(m) {
            return Ok(SlotTarget::Entry(entry));
        }
        let collisions = object.downcast(m).map(SlotTarget::Collisions);
        collisions.ok_or(GcError::Damaged { entry: object.entry(), what: "it is no part of this map" })
    }
}

/// Position in a walk over a map. The default is the beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TriePosition(u64);

/// Entries that a step of a walk has met, and where it goes on, if there are more.
pub type TrieStep<'m, K, V> = (Vec<Gc<'m, MapEntry<K, V>>>, Option<TriePosition>);

/// Place of a key in a map: a slot, and what it leads to.
struct TriePlace<'m, K: MapKey, V: MapValue> {
    slot: &'m Ref<AnyObject>,
    /// Level of the slot's branch.
    level: u32,
    seen: Option<Gc<'m, AnyObject>>,
    /// Never a branch.
    node: SlotTarget<'m, K, V>,
}

/// Returns the slot of a hash in a branch of this level.
fn slot_of(hash: u64, level: u32) -> usize {
    (hash >> (u64::BITS - BITS * (level + 1))) as usize % SLOTS
}

fn new_branch<'m>(m: &'m Mutator<'_>) -> Result<Gc<'m, Branch>, GcError> {
    m.alloc_array(SLOTS, |_| Ref::null())
}

impl<K: MapKey, V: MapValue> Default for TrieMap<K, V> {
    fn default() -> TrieMap<K, V> {
        TrieMap::new()
    }
}

impl<K: MapKey, V: MapValue> TrieMap<K, V> {
    /// Makes an empty map. It can be filled when it is in a heap.
    pub fn new() -> TrieMap<K, V> {
        let seed = RandomState::new().build_hasher().finish();
        TrieMap { seed, len: Atom::new(0), root: Ref::null(), entries: PhantomData }
    }

    /// Returns the number of entries. Those that others insert or remove at this moment may count or
    /// not.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Checks whether the map has no entries, as [`TrieMap::len`] does.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn hash(&self, key: &K::Query) -> u64 {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.seed);
        key.hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the value of a key, and brings it near. `None` if the key is not there, or if what its
    /// value leads to was collected.
    pub fn get<'m>(&self, m: &'m Mutator<'_>, key: &K::Query) -> Result<Option<V::Given<'m>>, GcError> {
        match self.entry(m, key)? {
            Some(entry) => entry.value(m),
            None => Ok(None),
        }
    }

    /// Returns the entry of a key.
    pub fn entry<'m>(&self, m: &'m Mutator<'_>, key: &K::Query) -> Result<Option<Gc<'m, MapEntry<K, V>>>, GcError> {
        let hash = self.hash(key);
        let Some(root) = self.root.load(m)? else { return Ok(None) };
        match Self::place(m, root, 0, hash)?.node {
            SlotTarget::Entry(entry) => Ok((entry.hash == hash && entry.key.is(m, key)?).then_some(entry)),
            SlotTarget::Collisions(all) => Ok(Self::find_equal(m, all, hash, key)?.map(|(_, entry)| entry)),
            SlotTarget::Nothing | SlotTarget::Branch(_) => Ok(None),
        }
    }

    /// Follows a hash from a branch on to the slot that leads to no other branch.
    fn place<'m>(
        m: &'m Mutator<'_>,
        mut branch: Gc<'m, Branch>,
        mut level: u32,
        hash: u64,
    ) -> Result<TriePlace<'m, K, V>, GcError> {
        loop {
            let slot = &Gc::get(branch)[slot_of(hash, level)];
            let seen = slot.load(m)?;
            match SlotTarget::of(seen, m)? {
                SlotTarget::Branch(next) => (branch, level) = (next, level + 1),
                node => return Ok(TriePlace { slot, level, seen, node }),
            }
        }
    }

    /// Returns the entry of a key among those with the same hash, and its index.
    fn find_equal<'m>(
        m: &'m Mutator<'_>,
        all: Gc<'m, Collisions<K, V>>,
        hash: u64,
        key: &K::Query,
    ) -> Result<Option<Indexed<'m, K, V>>, GcError> {
        for (index, entry) in Gc::get(all).iter().enumerate() {
            let Some(entry) = entry.load(m)? else { continue };
            if entry.hash != hash {
                return Ok(None);
            }
            if entry.key.is(m, key)? {
                return Ok(Some((index, entry)));
            }
        }
        Ok(None)
    }

    /// Inserts a value, in place of the one that the key has, if any. Returns whether the key is new.
    pub fn insert<'m>(&self, m: &'m Mutator<'_>, key: &K::Query, value: V::Given<'m>) -> Result<bool, GcError> {
        let hash = self.hash(key);
        let new = Self::new_entry(m, hash, key, value)?;
        let is_new = self.change(m, key, hash, Some(new), |_| true)? == Some(Effect::Count);
        if is_new {
            self.len.fetch_add(1);
        }
        Ok(is_new)
    }

    /// Removes a key. Returns whether it was there.
    pub fn remove(&self, m: &Mutator<'_>, key: &K::Query) -> Result<bool, GcError> {
        let was_there = self.change(m, key, self.hash(key), None, |_| true)?.is_some();
        if was_there {
            self.len.fetch_add(u64::MAX);
        }
        Ok(was_there)
    }

    /// Lets a key have a new value, or none, if its entry is still `current`. Returns whether it was.
    pub fn compare_exchange<'m>(
        &self,
        m: &'m Mutator<'_>,
        key: &K::Query,
        current: Option<Gc<'_, MapEntry<K, V>>>,
        new: Option<V::Given<'m>>,
    ) -> Result<bool, GcError> {
        let hash = self.hash(key);
        let is_current = |found: Option<Gc<'_, MapEntry<K, V>>>| match (current, found) {
            (Some(current), Some(found)) => current.is(found),
            (None, None) => true,
            _ => false,
        };
        let new = new.map(|value| Self::new_entry(m, hash, key, value)).transpose()?;
        if current.is_none() && new.is_none() {
            return Ok(self.entry(m, key)?.is_none());
        }
        let Some(effect) = self.change(m, key, hash, new, is_current)? else { return Ok(false) };
        if effect == Effect::Count {
            self.len.fetch_add(if new.is_some() { 1 } else { u64::MAX });
        }
        Ok(true)
    }

    fn new_entry<'m>(
        m: &'m Mutator<'_>,
        hash: u64,
        key: &K::Query,
        value: V::Given<'_>,
    ) -> Result<EntryRef<'m, K, V>, GcError> {
        let entry = m.alloc(MapEntry { hash, key: K::new(key), value: V::new(value) })?;
        entry.key.fill(m, key)?;
        entry.value.fill(m, value)?;
        Ok(entry)
    }

    /// Lets a key have this entry, or none, if it `may` with the one that it has. Returns what has
    /// changed, if anything.
    fn change(
        &self,
        m: &Mutator<'_>,
        key: &K::Query,
        hash: u64,
        new: Option<Gc<'_, MapEntry<K, V>>>,
        may: impl Fn(Option<Gc<'_, MapEntry<K, V>>>) -> bool,
    ) -> Result<Option<Effect>, GcError> {
        let root = match self.root.load(m)? {
            Some(root) => root,
            None if new.is_none() => return Ok(None),
            None => {
                let root = new_branch(m)?;
                self.root.compare_exchange(m, None, Some(root));
                // Perhaps another thread was first.
                self.root.load(m)?.unwrap_or(root)
            }
        };
        loop {
            let place = Self::place(m, root, 0, hash)?;
            let current = match &place.node {
                SlotTarget::Nothing | SlotTarget::Branch(_) => None,
                SlotTarget::Entry(entry) => (entry.hash == hash && entry.key.is(m, key)?).then_some((0, *entry)),
                SlotTarget::Collisions(all) => Self::find_equal(m, *all, hash, key)?,
            };
            if !may(current.map(|(_, entry)| entry)) || current.is_none() && new.is_none() {
                return Ok(None);
            }
            let (next, effect) = Self::plan(m, &place, hash, current, new)?;
            // Where it fails, another thread was first.
            if place.slot.compare_exchange(m, place.seen, next) && effect != Effect::Growth {
                return Ok(Some(effect));
            }
        }
    }

    /// Says what a place shall lead to so that a key has the entry `new` instead of `current`; one of
    /// the two is there.
    fn plan<'m>(
        m: &'m Mutator<'_>,
        place: &TriePlace<'m, K, V>,
        hash: u64,
        current: Option<Indexed<'m, K, V>>,
        new: Option<EntryRef<'m, K, V>>,
    ) -> Result<(Option<Gc<'m, AnyObject>>, Effect), GcError> {
        let effect = if current.is_some() && new.is_some() { Effect::Replacement } else { Effect::Count };
        let (all, their_hash) = match &place.node {
            SlotTarget::Nothing | SlotTarget::Branch(_) => return Ok((new.map(Gc::as_any), effect)),
            SlotTarget::Entry(_) if current.is_some() => return Ok((new.map(Gc::as_any), effect)),
            SlotTarget::Entry(entry) if entry.hash == hash => {
                let both: Vec<_> = [*entry].into_iter().chain(new).collect();
                return Ok((Some(collide(m, &[], &both)?), effect));
            }
            SlotTarget::Entry(entry) => (&[][..], entry.hash),
            SlotTarget::Collisions(all) => (Gc::get(*all), hash_of(m, *all)?),
        };
        if their_hash != hash {
            // They differ in some bits further on.
            let branch = new_branch(m)?;
            branch[slot_of(their_hash, place.level + 1)].store(m, place.seen);
            return Ok((Some(branch.as_any()), Effect::Growth));
        }
        let index = current.map(|(index, _)| index);
        let others = all.iter().enumerate().filter(|(at, _)| Some(*at) != index);
        let others: Vec<_> = others.map(|(_, entry)| entry).collect();
        let next = match (&others[..], new) {
            ([only], None) => only.load(m)?.map(Gc::as_any),
            (others, new) => Some(collide(m, others, new.as_slice())?),
        };
        Ok((next, effect))
    }

    /// Returns up to `most` entries from a position on, and the position after them; `None` at the
    /// end.
    ///
    /// Entries with equal hashes are returned together, though that may be more. A walk that goes on,
    /// with safepoints in between, meets each entry once that is there all the time. Entries that are
    /// inserted or removed meanwhile are met or not.
    pub fn walk<'m>(&self, m: &'m Mutator<'_>, from: TriePosition, most: usize) -> Result<TrieStep<'m, K, V>, GcError> {
        let mut found = Vec::new();
        let Some(root) = self.root.load(m)? else { return Ok((found, None)) };
        let has_more = Self::gather(m, root, 0, Some(from.0), most.max(1), &mut found)?;
        let next = found.last().filter(|_| has_more).and_then(|last| last.hash.checked_add(1));
        Ok((found, next.map(TriePosition)))
    }

    /// Adds the entries of a branch to `found`, in the order of their hashes, beginning with the hash
    /// `from`. Returns whether there are more than `most`.
    fn gather<'m>(
        m: &'m Mutator<'_>,
        branch: Gc<'m, Branch>,
        level: u32,
        from: Option<u64>,
        most: usize,
        found: &mut Vec<EntryRef<'m, K, V>>,
    ) -> Result<bool, GcError> {
        let first = from.map_or(0, |from| slot_of(from, level));
        if found.len() + SLOTS <= most {
            m.prefetch(&branch[first..]);
        }
        for (index, slot) in branch.iter().enumerate().skip(first) {
            let from = from.filter(|_| index == first);
            let is_wanted = |hash| from.is_none_or(|from| hash >= from);
            match SlotTarget::of(slot.load(m)?, m)? {
                SlotTarget::Nothing => {}
                SlotTarget::Branch(next) => {
                    if Self::gather(m, next, level + 1, from, most, found)? {
                        return Ok(true);
                    }
                }
                SlotTarget::Entry(entry) if !is_wanted(entry.hash) => {}
                SlotTarget::Collisions(all) if !is_wanted(hash_of(m, all)?) => {}
                _ if found.len() >= most => return Ok(true),
                SlotTarget::Entry(entry) => found.push(entry),
                SlotTarget::Collisions(all) => {
                    for entry in all.iter() {
                        found.extend(entry.load(m)?);
                    }
                }
            }
        }
        Ok(false)
    }
}

/// Effect of an exchange.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// There is one entry more, or one less.
    Count,
    /// The key has another entry.
    Replacement,
    /// There is another branch, and nothing has changed yet.
    Growth,
}

/// Returns the hash that colliding entries have.
fn hash_of<K: MapKey, V: MapValue>(m: &Mutator<'_>, all: Gc<'_, Collisions<K, V>>) -> Result<u64, GcError> {
    let first = all.first().map_or(Ok(None), |first| first.load(m))?;
    first.map(|first| first.hash).ok_or(GcError::Damaged { entry: all.entry(), what: "no entries collide there" })
}

/// Makes a list of entries whose hashes are equal.
fn collide<'m, K: MapKey, V: MapValue>(
    m: &'m Mutator<'_>,
    old: &[&Ref<MapEntry<K, V>>],
    new: &[Gc<'_, MapEntry<K, V>>],
) -> Result<Gc<'m, AnyObject>, GcError> {
    let all = m.alloc_array(old.len() + new.len(), |_| Ref::null())?;
    for (to, from) in all.iter().zip(old) {
        to.copy_from(m, from);
    }
    for (to, from) in all[old.len()..].iter().zip(new) {
        to.store(m, Some(*from));
    }
    Ok(all.as_any())
}
