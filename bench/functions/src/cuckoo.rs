//! `bench.cuckoo`: a cuckoo hash table of words (WICkit's third workload). A key lies in one of two
//! buckets. An insertion that finds both full moves an entry to its other bucket.
//!
//! A [`WicLock`] lies first, then the buckets, each with four entries of key and value. Key 0 marks
//! a free entry. The path on which entries move is searched before anything moves, and entries move
//! from its end on. So a function that fails on the way has lost no entry. It may have left one
//! twice; the second goes when the key gets a value.

use core::time::Duration;
use farfield_wic::{Fault, Function, Place, WicLock};
use serde::{Deserialize, Serialize};

/// Looks up a key, or sets its value.
#[derive(Debug)]
pub struct Cuckoo;

/// Request to a table. Zeros are an empty table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CuckooRequest {
    /// Offset of the table: a multiple of 64.
    pub table: u64,
    /// Number of buckets.
    pub buckets: u64,
    /// The key, which is not 0.
    pub key: u64,
    /// New value of the key; `None`: the key is looked up.
    pub put: Option<u64>,
}

/// Answer of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum CuckooReply {
    /// The value that the key has, or had before.
    Value(Option<u64>),
    /// There is no path to make room. Nothing has changed.
    Full,
}

impl Cuckoo {
    /// Bytes of a bucket.
    pub const BUCKET_BYTES: u64 = 64;
    /// Entries of a bucket.
    pub const ENTRIES: usize = 4;

    /// Returns the bytes of a table of this many buckets.
    pub const fn bytes(buckets: u64) -> u64 {
        WicLock::BYTES + buckets * Cuckoo::BUCKET_BYTES
    }

    /// Returns the two buckets of a key, which may be the same.
    pub fn buckets_of(key: u64, buckets: u64) -> [u64; 2] {
        let hash = mix(key);
        [hash % buckets, mix(hash) % buckets]
    }
}

/// Lease of the lock: a holder that is silent for this long is dead.
const LEASE: Duration = Duration::from_secs(5);
/// Longest wait for the lock. A call has a deadline of its own.
const WITHIN: Duration = Duration::from_secs(60);
/// Most entries that move for one insertion.
const MOVES_MAX: usize = 64;

/// Mixes a word: one step of splitmix64.
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

type Entry = [u64; 2];
type Bucket = [Entry; Cuckoo::ENTRIES];

fn bucket_of(bytes: &[u8; Cuckoo::BUCKET_BYTES as usize]) -> Bucket {
    let mut words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
    core::array::from_fn(|_| core::array::from_fn(|_| words.next().unwrap_or(0)))
}

fn slot_of(bucket: &Bucket, key: u64) -> Option<usize> {
    bucket.iter().position(|entry| entry[0] == key)
}

/// Position of an entry in the table.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CuckooPosition {
    bucket: u64,
    slot: usize,
}

impl CuckooPosition {
    fn offset(self, table: u64) -> u64 {
        bucket_at(table, self.bucket) + self.slot as u64 * 16
    }
}

fn bucket_at(table: u64, bucket: u64) -> u64 {
    table + WicLock::BYTES + bucket * Cuckoo::BUCKET_BYTES
}

fn bytes_of(entry: Entry) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.as_chunks_mut().0.iter_mut().zip(entry).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    bytes
}

impl Function for Cuckoo {
    const NAME: &'static str = "bench.cuckoo";
    const VERSION: u32 = 1;
    type Argument = CuckooRequest;
    type Answer = CuckooReply;

    async fn run<P: Place>(place: &P, ask: CuckooRequest) -> Result<CuckooReply, Fault> {
        let CuckooRequest { table, buckets, key, put } = ask;
        let outside = Fault::OutOfRange { offset: table };
        let bytes = buckets.checked_mul(Cuckoo::BUCKET_BYTES).and_then(|bytes| bytes.checked_add(WicLock::BYTES));
        let end = bytes.and_then(|bytes| bytes.checked_add(table)).filter(|end| *end <= place.region_bytes());
        end.ok_or(outside)?;
        if key == 0 || buckets == 0 {
            return Ok(if put.is_some() { CuckooReply::Full } else { CuckooReply::Value(None) });
        }
        let both = Cuckoo::buckets_of(key, buckets);
        let lock = WicLock::at(table).lease(LEASE).within(WITHIN);
        let Some(value) = put else {
            let held = lock.read(place).await?;
            let found = find(place, table, both, key).await?;
            held.unlock().await?;
            return Ok(CuckooReply::Value(found.entry.map(|(_, value)| value)));
        };
        let held = lock.lock(place).await?;
        let found = find(place, table, both, key).await?;
        let before = found.entry.map(|(_, value)| value);
        for spot in &found.left {
            held.write(spot.offset(table), &bytes_of([0, 0])).await?;
        }
        let spot = match (found.entry, found.free) {
            (Some((spot, _)), _) => Some(spot),
            (None, Some(free)) => Some(free),
            (None, None) => {
                let way = way(place, table, buckets, both[0]).await?;
                for pair in way.windows(2).rev() {
                    held.write(pair[1].0.offset(table), &bytes_of(pair[0].1)).await?;
                }
                way.first().map(|(spot, _)| *spot)
            }
        };
        if let Some(spot) = spot {
            held.write(spot.offset(table), &bytes_of([key, value])).await?;
        }
        held.unlock().await?;
        Ok(if spot.is_some() { CuckooReply::Value(before) } else { CuckooReply::Full })
    }
}

struct CuckooLookup {
    /// Position and value of the key.
    entry: Option<(CuckooPosition, u64)>,
    /// Other positions of the key, left by a function that failed while it moved the key.
    left: Vec<CuckooPosition>,
    /// A free position.
    free: Option<CuckooPosition>,
}

async fn find<P: Place>(place: &P, table: u64, both: [u64; 2], key: u64) -> Result<CuckooLookup, Fault> {
    let mut bytes = [[0; Cuckoo::BUCKET_BYTES as usize]; 2];
    place.read_many(&both.map(|bucket| bucket_at(table, bucket)), &mut bytes).await?;
    let mut found = CuckooLookup { entry: None, left: Vec::new(), free: None };
    for (number, (bucket, bytes)) in both.into_iter().zip(&bytes).enumerate() {
        if number == 1 && bucket == both[0] {
            break;
        }
        let entries = bucket_of(bytes);
        for (slot, entry) in entries.iter().enumerate() {
            let spot = CuckooPosition { bucket, slot };
            match entry[0] {
                0 => found.free = found.free.or(Some(spot)),
                other if other != key => {}
                _ if found.entry.is_none() => found.entry = Some((spot, entry[1])),
                _ => found.left.push(spot),
            }
        }
    }
    Ok(found)
}

/// Returns the path of entries that move, each to the place of the next one; the last place is
/// free. It is empty if there is no path.
async fn way<P: Place>(place: &P, table: u64, buckets: u64, first: u64) -> Result<Vec<(CuckooPosition, Entry)>, Fault> {
    let mut way: Vec<(CuckooPosition, Entry)> = Vec::new();
    let mut bucket = first;
    while way.len() < MOVES_MAX {
        let entries = bucket_of(&place.read(bucket_at(table, bucket)).await?);
        if let Some(slot) = slot_of(&entries, 0) {
            way.push((CuckooPosition { bucket, slot }, [0, 0]));
            return Ok(way);
        }
        // Not always the same slot, and none that moves already.
        let start = way.len() + bucket as usize;
        let spots =
            (start..start + Cuckoo::ENTRIES).map(|slot| CuckooPosition { bucket, slot: slot % Cuckoo::ENTRIES });
        let other = |spot: CuckooPosition| {
            let [one, other] = Cuckoo::buckets_of(entries[spot.slot][0], buckets);
            if one == bucket { other } else { one }
        };
        let moves = spots.into_iter().find(|spot| other(*spot) != bucket && way.iter().all(|(moves, _)| moves != spot));
        let Some(spot) = moves else { break };
        way.push((spot, entries[spot.slot]));
        bucket = other(spot);
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    //! Guards against keys that are lost when others move, or that are there twice; in any order,
    //! and when functions fail on the way.
    use super::*;
    use farfield_wic::{Sim, Stop};
    use std::collections::HashMap;

    const BUCKETS: u64 = 64;
    const TABLE: u64 = 4096;

    fn ask(key: u64, put: Option<u64>) -> CuckooRequest {
        CuckooRequest { table: TABLE, buckets: BUCKETS, key, put }
    }

    fn region() -> Vec<u8> {
        vec![0; (TABLE + Cuckoo::bytes(BUCKETS)) as usize]
    }

    fn entries(sim: &Sim) -> HashMap<u64, u64> {
        let bytes = sim.bytes();
        let mut found = HashMap::new();
        for entry in bytes[(TABLE + WicLock::BYTES) as usize..].as_chunks::<16>().0 {
            let ([key, value], _) = entry.as_chunks() else { unreachable!("two words") };
            let key = u64::from_le_bytes(*key);
            if key != 0 {
                assert_eq!(found.insert(key, u64::from_le_bytes(*value)), None, "key {key} is there twice");
            }
        }
        found
    }

    #[test]
    fn a_table_is_a_map_until_it_is_full() {
        let sim = Sim::new(1, region()).steps(u64::MAX);
        let mut model = HashMap::new();
        let mut full = 0;
        for step in 0..1000 {
            let key = 1 + mix(step) % 260;
            match sim.run_one::<Cuckoo>(ask(key, Some(step))).unwrap() {
                CuckooReply::Value(before) => assert_eq!(model.insert(key, step), before, "step {step}"),
                CuckooReply::Full => full += 1,
            }
            let key = 1 + mix(!step) % 260;
            let value = CuckooReply::Value(model.get(&key).copied());
            assert_eq!(sim.run_one::<Cuckoo>(ask(key, None)), Ok(value), "step {step}");
        }
        assert_eq!(entries(&sim), model);
        let slots = BUCKETS as usize * Cuckoo::ENTRIES;
        assert!(model.len() > slots * 9 / 10 && full > 0, "{} of {slots}, and {full} without room", model.len());
        assert_eq!(sim.run_one::<Cuckoo>(ask(0, Some(1))), Ok(CuckooReply::Full), "key 0 is none");
        let outside = CuckooRequest { buckets: BUCKETS + 1, ..ask(1, Some(1)) };
        assert_eq!(sim.run_one::<Cuckoo>(outside), Err(Stop::Fault(Fault::OutOfRange { offset: TABLE })));
        let outside = CuckooRequest { buckets: u64::MAX, ..ask(1, None) };
        assert_eq!(sim.run_one::<Cuckoo>(outside), Err(Stop::Fault(Fault::OutOfRange { offset: TABLE })));
    }

    #[test]
    fn in_any_order_no_key_is_lost_or_there_twice() {
        for seed in 0..10 {
            let sim = Sim::new(seed, region()).steps(u64::MAX);
            let mut model = HashMap::new();
            for round in 0..7 {
                let keys = (1..=30).map(|number| round * 30 + number);
                let asks: Vec<_> = keys.flat_map(|key| [ask(key, Some(key * 3)), ask(key.div_ceil(2), None)]).collect();
                for (asked, said) in asks.iter().zip(sim.run::<Cuckoo>(asks.clone())) {
                    match (asked.put, said.unwrap()) {
                        (Some(value), CuckooReply::Value(None)) => drop(model.insert(asked.key, value)),
                        (None, CuckooReply::Value(value)) => assert!(value.is_none_or(|value| value == asked.key * 3)),
                        said => panic!("seed {seed}: {asked:?} {said:?}"),
                    }
                }
            }
            assert_eq!(entries(&sim), model, "seed {seed}");
        }
    }

    #[test]
    fn a_function_that_fails_midway_loses_no_key() {
        for seed in 0..10 {
            let mut sim = Sim::new(seed, region()).steps(u64::MAX).faults(40);
            let mut model = HashMap::new();
            for key in 1..=230 {
                // It may have been put all the same.
                let said = sim.run_one::<Cuckoo>(ask(key, Some(key * 7)));
                model.insert(key, matches!(said, Ok(CuckooReply::Value(_))));
            }
            sim = Sim::new(seed, sim.bytes()).steps(u64::MAX);
            for (key, is_there) in model {
                let value = sim.run_one::<Cuckoo>(ask(key, None)).unwrap();
                assert!(
                    value == CuckooReply::Value(Some(key * 7)) || !is_there && value == CuckooReply::Value(None),
                    "{key}"
                );
                if value == CuckooReply::Value(None) {
                    continue;
                }
                assert_eq!(sim.run_one::<Cuckoo>(ask(key, Some(key))).unwrap(), value, "{key}");
                // Of one that was left twice only the new one is there.
                assert_eq!(sim.run_one::<Cuckoo>(ask(key, None)), Ok(CuckooReply::Value(Some(key))), "{key}");
            }
            entries(&sim);
        }
    }
}
