//! `cuckoo`: keys given values in a cuckoo hash table, and looked up, by turns of chance. Keys of a row are different ones, so each answer is known.

use super::pages::Pages;
use super::{Ask, Kept, open};
use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Context, Result, bail, ensure};
use farfield_bench_functions::{Cuckoo, CuckooReply, CuckooRequest};
use farfield_wic::WicLock;
use std::collections::{HashMap, HashSet};

#[derive(Clone, Copy)]
struct Table {
    buckets: u64,
}

const SLOTS: usize = Cuckoo::ENTRIES;
/// Most entries that move for one.
const MOVES_MAX: usize = 64;

type Entry = [u64; 2];
type Bucket = [Entry; SLOTS];

/// Where buckets are.
trait Buckets {
    /// Two that are looked at together.
    fn both(&mut self, buckets: [u64; 2]) -> Result<[Bucket; 2]>;
    fn set(&mut self, bucket: u64, slot: usize, entry: Entry) -> Result<()>;

    /// Looks a key up, or gives it a value, as one would write it without functions that run anywhere.
    fn look_or_put(&mut self, count: u64, Ask { key, put }: Ask) -> Result<Option<u64>> {
        let both = Cuckoo::buckets_of(key, count);
        let found = self.both(both)?;
        let spots = || {
            both.into_iter()
                .zip(&found)
                .flat_map(|(bucket, entries)| (0..SLOTS).map(move |slot| (bucket, slot, entries[slot])))
        };
        let own = spots().find(|(_, _, entry)| entry[0] == key);
        let before = own.map(|(_, _, entry)| entry[1]);
        let Some(value) = put else { return Ok(before) };
        let free = own.or_else(|| spots().find(|(_, _, entry)| entry[0] == 0));
        let (bucket, slot) = match free {
            Some((bucket, slot, _)) => (bucket, slot),
            None => self.make_room(count, both[0])?,
        };
        self.set(bucket, slot, [key, value])?;
        Ok(before)
    }

    fn make_room(&mut self, count: u64, first: u64) -> Result<(u64, usize)> {
        let mut way: Vec<(u64, usize, Entry)> = Vec::new();
        let mut bucket = first;
        while way.len() < MOVES_MAX {
            let [entries, _] = self.both([bucket; 2])?;
            if let Some(slot) = entries.iter().position(|entry| entry[0] == 0) {
                way.push((bucket, slot, [0; 2]));
                for pair in way.windows(2).rev() {
                    self.set(pair[1].0, pair[1].1, pair[0].2)?;
                }
                return Ok((way[0].0, way[0].1));
            }
            let other = |slot: usize| {
                let [one, other] = Cuckoo::buckets_of(entries[slot][0], count);
                if one == bucket { other } else { one }
            };
            let start = way.len() + bucket as usize;
            let slots = (start..start + SLOTS).map(|slot| slot % SLOTS);
            let is_new =
                |slot: usize| other(slot) != bucket && way.iter().all(|(moves, at, _)| (*moves, *at) != (bucket, slot));
            let slot = slots.into_iter().find(|slot| is_new(*slot)).context("the table is full")?;
            way.push((bucket, slot, entries[slot]));
            bucket = other(slot);
        }
        bail!("the table is full")
    }
}

/// In plain memory.
struct Plain(Vec<Bucket>);

impl Buckets for Plain {
    fn both(&mut self, buckets: [u64; 2]) -> Result<[Bucket; 2]> {
        Ok(buckets.map(|bucket| self.0[bucket as usize]))
    }

    fn set(&mut self, bucket: u64, slot: usize, entry: Entry) -> Result<()> {
        self.0[bucket as usize][slot] = entry;
        Ok(())
    }
}

fn offset(bucket: u64) -> u64 {
    WicLock::BYTES + bucket * Cuckoo::BUCKET_BYTES
}

impl Buckets for Pages {
    fn both(&mut self, buckets: [u64; 2]) -> Result<[Bucket; 2]> {
        self.bring(&buckets.map(offset))?;
        let mut found = [[[0; 2]; SLOTS]; 2];
        for (found, bucket) in found.iter_mut().zip(buckets) {
            let words: [u64; 2 * SLOTS] = self.read(offset(bucket))?;
            found.copy_from_slice(words.as_chunks().0);
        }
        Ok(found)
    }

    fn set(&mut self, bucket: u64, slot: usize, entry: Entry) -> Result<()> {
        self.write(offset(bucket) + slot as u64 * 16, entry)
    }
}

impl Kept for Table {
    type Function = Cuckoo;

    fn bytes(self) -> u64 {
        Cuckoo::bytes(self.buckets)
    }

    fn argument(self, Ask { key, put }: Ask) -> CuckooRequest {
        CuckooRequest { table: 0, buckets: self.buckets, key, put }
    }

    fn answer(self, answer: CuckooReply) -> Result<Option<u64>> {
        match answer {
            CuckooReply::Value(value) => Ok(value),
            CuckooReply::Full => bail!("the table is full"),
        }
    }

    fn handler(self) -> impl FnMut(Ask) -> Result<Option<u64>> + Send + 'static {
        let mut plain = Plain(vec![[[0; 2]; SLOTS]; self.buckets as usize]);
        move |ask| plain.look_or_put(self.buckets, ask)
    }

    fn one_sided(self, pages: &mut Pages, ask: Ask) -> Result<Option<u64>> {
        pages.forget();
        pages.look_or_put(self.buckets, ask)
    }
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let table = Table { buckets: options.data_bytes() / Cuckoo::BUCKET_BYTES };
    // Seven tenths of the places.
    let keys = table.buckets * SLOTS as u64 * 7 / 10;
    ensure!(keys > 4 * options.in_flight, "--data-mib is too little for --in-flight");
    let mut keeper = open(table, options)?;
    let mut random = Random::new(options.seed);
    let mut rows = |ops: u64| {
        let mut rows: Vec<Vec<Ask>> = Vec::new();
        let mut left = ops;
        while left > 0 {
            let len = left.min(options.in_flight);
            let mut used = HashSet::new();
            while (used.len() as u64) < len {
                used.insert(1 + random.below(keys));
            }
            let mut row: Vec<u64> = used.into_iter().collect();
            row.sort_unstable_by_key(|key| mix(*key));
            let put = |key: u64, word: u64| Ask { key, put: (word & 1 == 0).then_some(word) };
            rows.push(row.into_iter().map(|key| put(key, random.next())).collect());
            left -= len;
        }
        rows
    };
    let (before, timed) = (rows(options.ops / 8), rows(options.ops));
    let mut answers = Vec::with_capacity((options.ops + options.ops / 8) as usize);
    let mut outcome = Outcome::new();
    outcome.phase("fill", options.ops / 8, || before.iter().try_for_each(|row| keeper.ask(row, &mut answers)))?;
    outcome.phase("ask", options.ops, || timed.iter().try_for_each(|row| keeper.ask(row, &mut answers)))?;

    let mut model: HashMap<u64, u64> = HashMap::new();
    let (mut errors, mut sum) = (0, 0u64);
    let asked = before.iter().chain(&timed).flatten();
    ensure!(asked.clone().count() == answers.len(), "the peer left operations without an answer");
    for (ask, answer) in asked.zip(answers) {
        let right = match ask.put {
            Some(value) => model.insert(ask.key, value),
            None => model.get(&ask.key).copied(),
        };
        errors += u64::from(answer != right);
        sum = sum.wrapping_add(answer.unwrap_or(1));
    }
    let all: Vec<Ask> = (1..=keys).map(|key| Ask { key, put: None }).collect();
    let mut found = Vec::with_capacity(all.len());
    all.chunks(64).try_for_each(|asks| keeper.ask(asks, &mut found))?;
    errors += all.iter().zip(found).filter(|(ask, found)| model.get(&ask.key).copied() != *found).count() as u64;
    outcome.checked(sum, errors);
    Ok(outcome)
}
