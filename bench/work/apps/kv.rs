//! Key-value store: chained buckets with a lock each, of which clients read or replace values by Zipf's law (YCSB; DRust, section
//! 7; GAM).
//!
//! A bucket has room for some entries, and others are in a chain. What is done with those of the bucket itself is applied where
//! it is, so neither the bucket nor its lock travels.
//!
//! A value names its key, and who has written it when.

mod cluster;
mod load;

use super::dsm::{self, DArc, DBox, DMutex, DVec, Far, Here, JoinError, Mut, NodeId, ShareError};
use super::{Nodes, count_since, counts};
use crate::random::mix;
use crate::{Options, Outcome};
use anyhow::Result;
use load::{KvLoad, SCAN_MAX};
use std::sync::Mutex;

/// Value of 32 bytes: its key, its writer, the writer's count of writes, and a hash of the three.
type KvValue = [u64; 4];
/// Entries of a bucket, and of each link of its chain. With as many keys as buckets one key in 43 is in a chain.
const LINK_ENTRIES: usize = 3;
/// Key of an entry that is free.
const NO_KEY: u64 = u64::MAX;
/// Writer of the values with which a store begins.
const LOADER: u64 = u64::MAX;

fn value(key: u64, writer: u64, count: u64) -> KvValue {
    [key, writer, count, mix(key ^ mix(writer ^ mix(count)))]
}

fn is_right(key: u64, found: &KvValue) -> bool {
    found[0] == key && *found == value(key, found[1], found[2])
}

/// What a client has found.
#[derive(Clone, Copy, Default, Far)]
struct KvFound {
    reads: u64,
    writes: u64,
    sum: u64,
    errors: u64,
}

impl KvFound {
    fn add(self, more: KvFound) -> KvFound {
        KvFound {
            reads: self.reads + more.reads,
            writes: self.writes + more.writes,
            sum: self.sum.wrapping_add(more.sum),
            errors: self.errors + more.errors,
        }
    }

    fn see(&mut self, key: u64, found: Option<KvValue>, is_exact: bool) {
        let found = found.filter(|found| is_right(key, found));
        self.errors += u64::from(found.is_none());
        if let Some(found) = found {
            self.sum = self.sum.wrapping_add(if is_exact { mix(found[3]) } else { mix(key) });
        }
    }
}

/// Store of values, as a client sees it.
trait KvStore {
    type Error;
    fn get(&mut self, key: u64) -> Result<Option<KvValue>, Self::Error>;
    fn put(&mut self, key: u64, value: KvValue) -> Result<(), Self::Error>;
    /// Replaces a value. Returns the one before.
    fn swap(&mut self, key: u64, value: KvValue) -> Result<Option<KvValue>, Self::Error>;
    /// Returns the values of so many keys from one on, in any order.
    fn scan(&mut self, first: u64, count: u64) -> Result<Vec<KvValue>, Self::Error>;
}

/// Returns the bucket of a key, among so many.
fn bucket_of(key: u64, buckets: usize) -> usize {
    (mix(key ^ 0x6b76) % buckets as u64) as usize
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let load = KvLoad::of(options)?;
    if let Some(addresses) = options.peer.as_deref().and_then(|peer| peer.strip_prefix("redis-cluster:")) {
        return cluster::run(load, addresses);
    }
    match Nodes::of(options)? {
        None => Ok(plain(load)),
        Some(nodes) => nodes.run(|here| shared(here, load)),
    }
}

/// Entries of a link.
#[derive(Clone, Copy, Far)]
struct Entries {
    keys: [u64; LINK_ENTRIES],
    values: [KvValue; LINK_ENTRIES],
}

impl Entries {
    const FREE: Entries = Entries { keys: [NO_KEY; LINK_ENTRIES], values: [[0; 4]; LINK_ENTRIES] };

    fn get(&self, key: u64) -> Option<KvValue> {
        self.keys.iter().position(|found| *found == key).map(|at| self.values[at])
    }

    /// Replaces the value of a key, which gets a free entry if it has none. Returns whether there was room, and the value before.
    fn put(&mut self, key: u64, value: KvValue) -> (bool, Option<KvValue>) {
        // Entries are filled in order, and stay.
        let Some(at) = self.keys.iter().position(|found| [key, NO_KEY].contains(found)) else { return (false, None) };
        let before = (self.keys[at] == key).then_some(self.values[at]);
        (self.keys[at], self.values[at]) = (key, value);
        (true, before)
    }
}

/// Link of a bucket's chain in std's types.
struct PlainLink {
    entries: Entries,
    next: Option<Box<PlainLink>>,
}

impl PlainLink {
    const FREE: PlainLink = PlainLink { entries: Entries::FREE, next: None };
}

struct PlainStore {
    buckets: Vec<Mutex<PlainLink>>,
}

impl KvStore for &PlainStore {
    type Error = ShareError;

    fn get(&mut self, key: u64) -> Result<Option<KvValue>, ShareError> {
        let bucket = self.buckets[bucket_of(key, self.buckets.len())].lock().expect("no client panics");
        let mut links = std::iter::successors(Some(&*bucket), |link| link.next.as_deref());
        Ok(links.find_map(|link| link.entries.get(key)))
    }

    fn put(&mut self, key: u64, value: KvValue) -> Result<(), ShareError> {
        self.swap(key, value).map(drop)
    }

    fn swap(&mut self, key: u64, value: KvValue) -> Result<Option<KvValue>, ShareError> {
        let mut bucket = self.buckets[bucket_of(key, self.buckets.len())].lock().expect("no client panics");
        let mut link = &mut *bucket;
        loop {
            let (is_stored, before) = link.entries.put(key, value);
            if is_stored {
                return Ok(before);
            }
            link = link.next.get_or_insert_with(|| Box::new(PlainLink::FREE));
        }
    }

    fn scan(&mut self, first: u64, count: u64) -> Result<Vec<KvValue>, ShareError> {
        (first..first + count).filter_map(|key| self.get(key).transpose()).collect()
    }
}

fn plain(load: KvLoad) -> Outcome {
    let mut outcome = Outcome::new();
    let store = outcome.phase("fill", load.keys, || {
        let store = PlainStore { buckets: (0..load.keys).map(|_| Mutex::new(PlainLink::FREE)).collect() };
        (0..load.keys).for_each(|key| (&store).put(key, value(key, LOADER, 0)).expect("a plain store cannot fail"));
        store
    });
    let found = outcome.phase("serve", load.all_ops(), || {
        std::thread::scope(|s| {
            let clients: Vec<_> = (0..load.clients)
                .map(|client| {
                    let store = &store;
                    s.spawn(move || load.run(client, &mut { store }).expect("a plain store cannot fail"))
                })
                .collect();
            clients
                .into_iter()
                .map(|client| client.join().expect("no client panics"))
                .fold(KvFound::default(), KvFound::add)
        })
    });
    let mut end = KvFound::default();
    for key in 0..load.keys_in_the_end() {
        end.see(key, (&store).get(key).expect("a plain store cannot fail"), load.is_exact);
    }
    finish(&mut outcome, load, found, end);
    outcome
}

/// Says what was read by clients, and what there is in the end.
fn finish(outcome: &mut Outcome, load: KvLoad, found: KvFound, end: KvFound) {
    let errors = found.errors + end.errors + u64::from(found.reads + found.writes != load.all_ops());
    outcome.figure("writes_per_op", found.writes as f64 / load.all_ops().max(1) as f64);
    outcome.checked(mix(found.sum) ^ end.sum ^ found.writes, errors);
}

/// Link of a bucket's chain in shared memory.
#[derive(Far)]
struct Link {
    entries: Entries,
    next: Option<DBox<Link>>,
}

impl Link {
    fn free() -> Link {
        Link { entries: Entries::FREE, next: None }
    }
}

/// Buckets that are at one node.
#[derive(Far)]
struct Shard {
    buckets: DVec<DMutex<Link>>,
}

/// Store in shared memory: the buckets are divided among the nodes.
#[derive(Far)]
struct Store {
    shards: DVec<Shard>,
    /// Buckets of a shard, but for the last one.
    shard_len: usize,
    len: usize,
}

impl Store {
    /// Makes a store without entries; a task at each node makes its buckets.
    fn new(here: &Here<'_>, len: usize) -> Result<Store, JoinError> {
        let nodes = here.nodes().count();
        let shard_len = len.div_ceil(nodes);
        let mut shards = DVec::new();
        for (node, first) in here.nodes().zip((0..len).step_by(shard_len)) {
            let count = shard_len.min(len - first);
            let shard = here.spawn_to(node, (count,), |here, (count,)| {
                let mut buckets = DVec::new();
                for _ in 0..count {
                    buckets.push(here, DMutex::new(here, Link::free())?)?;
                }
                Ok::<_, ShareError>(Shard { buckets })
            })?;
            shards.push(here, shard.join(here)??)?;
        }
        Ok(Store { shards, shard_len, len })
    }

    /// Returns the node that has the bucket of a key.
    fn node_of(&self, key: u64) -> NodeId {
        NodeId((bucket_of(key, self.len) / self.shard_len) as u16)
    }

    fn bucket<'a>(&'a self, here: &'a Here<'_>, key: u64) -> Result<&'a DMutex<Link>, ShareError> {
        let index = bucket_of(key, self.len);
        let shard = self.shards.get(here, index / self.shard_len)?;
        let bucket = shard.map_or(Ok(None), |shard| shard.buckets.get(here, index % self.shard_len))?;
        Ok(bucket.expect("all buckets are there"))
    }
}

/// A client's view of the store.
struct StoreView<'a, 'n> {
    owner: &'a DArc<Store>,
    store: &'a Store,
    here: &'a Here<'n>,
}

/// Values that a scan has found at a node, and how many.
type Scanned = ([KvValue; SCAN_MAX as usize], usize);

impl<'a, 'n> StoreView<'a, 'n> {
    fn new(here: &'a Here<'n>, owner: &'a DArc<Store>) -> Result<StoreView<'a, 'n>, ShareError> {
        Ok(StoreView { owner, store: owner.get(here)?, here })
    }

    /// Reads those of the keys whose buckets are here.
    fn scan_here(&mut self, first: u64, count: u64) -> Result<Scanned, ShareError> {
        let (mut values, mut found) = ([[0; 4]; SCAN_MAX as usize], 0);
        for key in first..first + count {
            if self.store.node_of(key) == self.here.id()
                && let Some(value) = self.get(key)?
            {
                values[found] = value;
                found += 1;
            }
        }
        Ok((values, found))
    }
}

impl KvStore for StoreView<'_, '_> {
    type Error = ShareError;

    fn get(&mut self, key: u64) -> Result<Option<KvValue>, ShareError> {
        let bucket = self.store.bucket(self.here, key)?;
        let (found, is_chained) =
            bucket.apply(self.here, (key,), |link, (key,)| (link.entries.get(key), link.next.is_some()))?;
        if found.is_some() || !is_chained {
            return Ok(found);
        }
        let bucket = bucket.lock(self.here)?;
        // What is read of a bucket at another node is kept as long as the bucket is read.
        let here = &self.here.enter();
        let mut link = &*bucket;
        while let Some(next) = &link.next {
            link = next.get(here)?;
            if let Some(found) = link.entries.get(key) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn put(&mut self, key: u64, value: KvValue) -> Result<(), ShareError> {
        self.swap(key, value).map(drop)
    }

    fn swap(&mut self, key: u64, value: KvValue) -> Result<Option<KvValue>, ShareError> {
        let bucket = self.store.bucket(self.here, key)?;
        let (is_stored, before) =
            bucket.apply(self.here, (key, value), |link, (key, value)| link.entries.put(key, value))?;
        if is_stored {
            return Ok(before);
        }
        let mut bucket = bucket.lock(self.here)?;
        let here = &self.here.enter();
        let mut link = &mut *bucket;
        loop {
            let (is_stored, before) = link.entries.put(key, value);
            if is_stored {
                return Ok(before);
            }
            let next = match link.next.take() {
                Some(next) => next,
                None => here.alloc(Link::free())?,
            };
            link = Mut::into_mut(link.next.insert(next).get_mut(here)?);
        }
    }

    /// A task at each other node reads what is there.
    fn scan(&mut self, first: u64, count: u64) -> Result<Vec<KvValue>, ShareError> {
        let others = self.here.nodes().filter(|node| *node != self.here.id());
        let tasks = others.map(|node| {
            let arguments = (self.owner.try_clone(self.here)?, first, count);
            self.here.spawn_to(node, arguments, |here, (owner, first, count)| {
                StoreView::new(here, &owner)?.scan_here(first, count)
            })
        });
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        let mut read = Vec::with_capacity(count as usize);
        let mut take = |(values, found): Scanned| read.extend_from_slice(&values[..found]);
        take(self.scan_here(first, count)?);
        tasks.into_iter().try_for_each(|task| task.join(self.here).map_err(share_error)?.map(&mut take))?;
        Ok(read)
    }
}

/// What a task reads can be out of reach; it does not panic.
fn share_error(error: JoinError) -> ShareError {
    match error {
        JoinError::Share(error) => error,
        panicked => unreachable!("{panicked}"),
    }
}

/// Does some work at each node with the keys whose buckets it has, at all nodes at a time.
fn with_own_keys<F>(here: &Here<'_>, store: &DArc<Store>, load: KvLoad, work: F) -> Result<KvFound, JoinError>
where
    F: for<'h> FnOnce(&Here<'h>, (DArc<Store>, KvLoad)) -> Result<KvFound, ShareError> + Copy + 'static,
{
    let tasks = here.nodes().map(|node| here.spawn_to(node, (store.try_clone(here)?, load), work));
    let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
    tasks.into_iter().try_fold(KvFound::default(), |found, task| Ok(found.add(task.join(here)??)))
}

impl Store {
    /// Returns those of the keys below `end` whose buckets are at this node.
    fn own_keys(&self, here: &Here<'_>, end: u64) -> impl Iterator<Item = u64> {
        (0..end).filter(|key| self.node_of(*key) == here.id())
    }
}

fn shared(here: &Here<'_>, load: KvLoad) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let store = outcome.phase("fill", load.keys, || -> Result<_, JoinError> {
        let store = DArc::new(here, Store::new(here, load.keys as usize)?)?;
        // Chains are where their buckets are.
        with_own_keys(here, &store, load, |here, (store, load)| {
            let mut view = StoreView::new(here, &store)?;
            let mut own_keys = view.store.own_keys(here, load.keys);
            own_keys.try_for_each(|key| view.put(key, value(key, LOADER, 0)))?;
            Ok(KvFound::default())
        })?;
        Ok(store)
    })?;
    let before = counts(here)?;
    let serve = || -> Result<KvFound, JoinError> {
        let clients = (0..load.clients).map(|client| {
            let node = NodeId((client % here.nodes().count() as u64) as u16);
            here.spawn_to(node, (store.try_clone(here)?, load, client), |here, (store, load, client)| {
                load.run(client, &mut StoreView::new(here, &store)?)
            })
        });
        let clients = clients.collect::<Result<Vec<_>, ShareError>>()?;
        clients.into_iter().try_fold(KvFound::default(), |found, client| Ok(found.add(client.join(here)??)))
    };
    let found = outcome.phase("serve", load.all_ops(), || dsm::measured(serve))?;
    count_since(here, before, load.all_ops(), &mut outcome)?;
    let end = with_own_keys(here, &store, load, |here, (store, load)| {
        let (mut view, mut end) = (StoreView::new(here, &store)?, KvFound::default());
        for key in view.store.own_keys(here, load.keys_in_the_end()) {
            end.see(key, view.get(key)?, load.is_exact);
        }
        Ok(end)
    })?;
    finish(&mut outcome, load, found, end);
    Ok(outcome)
}
