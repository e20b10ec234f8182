//! A store of counts that clients in three processes change at the same time, and the same with threads and std's types: a
//! table of buckets with a lock each, in which entries are chained.
//!
//! `cargo run --release -p farfield-dsm --example key_value`

use farfield_dsm::{DArc, DBox, DMutex, DVec, Far, Here, JoinError, Mut, NodeBuilder, ShareError};
use std::sync::Mutex;

const BUCKETS: usize = 300;
const CLIENTS: u64 = 3;
const OPS: u64 = 250;

/// Returns what a client counts at a step: popular keys are small.
fn key_of(client: u64, step: u64) -> u64 {
    let random = (client << 32 | step).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    random % (1 + random % 1000)
}

struct PlainEntry {
    key: u64,
    count: u64,
    next: Option<Box<PlainEntry>>,
}

fn plain_add(buckets: &[Mutex<Option<Box<PlainEntry>>>], key: u64) {
    let mut bucket = buckets[key as usize % BUCKETS].lock().expect("no client panics");
    let mut next = &mut *bucket;
    while let Some(entry) = next {
        if entry.key == key {
            entry.count += 1;
            return;
        }
        next = &mut entry.next;
    }
    *next = Some(Box::new(PlainEntry { key, count: 1, next: None }));
}

/// Counts with threads. Returns keys and counts in order.
fn plain() -> Vec<(u64, u64)> {
    let buckets: Vec<_> = (0..BUCKETS).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|s| {
        for client in 0..CLIENTS {
            let buckets = &buckets;
            s.spawn(move || (0..OPS).for_each(|step| plain_add(buckets, key_of(client, step))));
        }
    });
    let mut counts = Vec::new();
    for bucket in buckets {
        let mut next = bucket.into_inner().expect("no client panics");
        while let Some(entry) = next {
            counts.push((entry.key, entry.count));
            next = entry.next;
        }
    }
    counts.sort_unstable();
    counts
}

#[derive(Far)]
struct Entry {
    key: u64,
    count: u64,
    next: Option<DBox<Entry>>,
}

/// Table in shared memory. A bucket is at the node that has made it.
type Buckets = DVec<DMutex<Option<DBox<Entry>>>>;

fn add(here: &Here<'_>, buckets: &Buckets, key: u64) -> Result<(), ShareError> {
    let bucket = buckets.get(here, key as usize % BUCKETS)?.expect("each key has a bucket");
    let mut bucket = bucket.lock(here)?;
    let mut next = &mut *bucket;
    while let Some(entry) = next {
        // An entry is brought here only if it is changed, or the one behind it.
        if entry.get(here)?.key == key {
            entry.get_mut(here)?.count += 1;
            return Ok(());
        }
        next = &mut Mut::into_mut(entry.get_mut(here)?).next;
    }
    *next = Some(here.alloc(Entry { key, count: 1, next: None })?);
    Ok(())
}

/// Counts with tasks at all nodes. Returns keys and counts in order.
fn shared(here: &Here<'_>) -> Result<Vec<(u64, u64)>, JoinError> {
    let mut buckets = Buckets::new();
    for number in 0..BUCKETS {
        let node = here.nodes().nth(number % here.nodes().count()).unwrap_or(here.id());
        let made = here.spawn_to(node, (), |here, ()| DMutex::new(here, None))?;
        buckets.push(here, made.join(here)??)?;
    }
    let buckets = DArc::new(here, buckets)?;
    let clients = (0..CLIENTS).zip(here.nodes().cycle()).map(|(client, node)| {
        here.spawn_to(node, (buckets.try_clone(here)?, client), |here, (buckets, client)| {
            let buckets = buckets.get(here)?;
            (0..OPS).try_for_each(|step| add(here, buckets, key_of(client, step)))
        })
    });
    for client in clients.collect::<Result<Vec<_>, ShareError>>()? {
        client.join(here)??;
    }
    let mut counts = Vec::new();
    for bucket in buckets.get(here)?.iter(here) {
        let bucket = bucket?.lock(here)?;
        let mut next = &*bucket;
        while let Some(entry) = next {
            let entry = entry.get(here)?;
            counts.push((entry.key, entry.count));
            next = &entry.next;
        }
    }
    counts.sort_unstable();
    Ok(counts)
}

/// Counts in both ways, and compares the counts.
pub(crate) fn compare(here: &Here<'_>) -> Result<(), JoinError> {
    let counts = shared(here)?;
    assert_eq!(counts, plain(), "counts are lost");
    let total: u64 = counts.iter().map(|(_, count)| count).sum();
    println!("{total} steps of {CLIENTS} clients at {} nodes, {} keys", here.nodes().count(), counts.len());
    println!("node {} sent {} messages", here.id(), here.stats().messages);
    Ok(())
}

#[allow(dead_code, reason = "the tests include this file, and have a `main` of their own")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    farfield_dsm::run(&NodeBuilder::new().nodes(3), compare)??;
    Ok(())
}
