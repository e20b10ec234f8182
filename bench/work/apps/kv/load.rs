//! What the clients of a key-value store do: the core workloads of YCSB (Cooper et al., SoCC 2010, Table 2), or reads and writes
//! in any proportion.

use super::{Far, KvFound, KvStore, value};
use crate::random::{Random, mix};
use crate::zipf::Zipf;
use crate::{Options, YcsbName};
use anyhow::{Result, ensure};

/// Data of a key, in bytes: there is a bucket for each.
const KEY_BYTES: u64 = 64;
/// A workload that inserts does so once in so many operations, so all know how many keys there are in the end.
const INSERT_EVERY: u64 = 20;
/// Values of a scan, at most.
pub(super) const SCAN_MAX: u64 = 100;

/// Work of the clients. It follows from a client's number alone, so it is the same whoever keeps the values.
#[derive(Clone, Copy, Far)]
pub(super) struct KvLoad {
    /// Keys with which a store begins: all numbers below.
    pub(super) keys: u64,
    pub(super) clients: u64,
    /// Operations of each client.
    ops: u64,
    /// What is done by so many of a hundred operations; others read a value, or insert one.
    put_percent: u64,
    swap_percent: u64,
    scan_percent: u64,
    has_inserts: bool,
    /// Whether the latest keys are the popular ones. Otherwise these are anywhere.
    is_latest_popular: bool,
    zipf_percent: u64,
    seed: u64,
    /// Whether the result tells what was read: if there is one client.
    pub(super) is_exact: bool,
}

enum KvOp {
    Get(u64),
    Put(u64),
    /// Reads a value, and replaces it.
    Swap(u64),
    /// Reads the values of so many keys from one on.
    Scan(u64, u64),
}

impl KvLoad {
    pub(super) fn of(options: &Options) -> Result<KvLoad> {
        ensure!((1..=4096).contains(&options.threads), "--threads must be 1 to 4096");
        let plain = KvLoad {
            keys: options.data_bytes() / KEY_BYTES,
            clients: options.threads,
            ops: options.ops / options.threads,
            put_percent: 0,
            swap_percent: 0,
            scan_percent: 0,
            has_inserts: false,
            is_latest_popular: false,
            zipf_percent: options.zipf_percent,
            seed: options.seed,
            is_exact: options.threads == 1,
        };
        ensure!(plain.keys >= SCAN_MAX, "--data-mib must be 1 or more");
        Ok(match options.ycsb {
            YcsbName::None => KvLoad { put_percent: options.write_percent, ..plain },
            YcsbName::A => KvLoad { put_percent: 50, ..plain },
            YcsbName::B => KvLoad { put_percent: 5, ..plain },
            YcsbName::C => plain,
            YcsbName::D => KvLoad { has_inserts: true, is_latest_popular: true, ..plain },
            YcsbName::E => KvLoad { has_inserts: true, scan_percent: 100, ..plain },
            YcsbName::F => KvLoad { swap_percent: 50, ..plain },
        })
    }

    /// Operations of all clients.
    pub(super) fn all_ops(self) -> u64 {
        self.ops * self.clients
    }

    /// Keys that there are in the end: all numbers below.
    pub(super) fn keys_in_the_end(self) -> u64 {
        self.keys + self.clients * self.inserted(self.ops)
    }

    /// Returns how many keys a client has inserted before one of its operations.
    fn inserted(self, step: u64) -> u64 {
        if self.has_inserts { step / INSERT_EVERY } else { 0 }
    }

    /// Returns a client's key by the order in which it was inserted.
    fn inserted_key(self, client: u64, order: u64) -> u64 {
        self.keys + order * self.clients + client
    }

    fn next(self, client: u64, step: u64, zipf: &Zipf, random: &mut Random) -> KvOp {
        let inserted = self.inserted(step);
        if self.inserted(step + 1) > inserted {
            return KvOp::Put(self.inserted_key(client, inserted));
        }
        let rank = zipf.sample(random);
        // Others may not have inserted theirs yet.
        let key = match self.is_latest_popular {
            true if rank < inserted => self.inserted_key(client, inserted - 1 - rank),
            true => self.keys - 1 - (rank - inserted),
            false => mix(rank) % self.keys,
        };
        let mut left = random.below(100);
        let mut is_one_of = |percent: u64| {
            let is_one = left < percent;
            left = left.wrapping_sub(percent);
            is_one
        };
        if is_one_of(self.put_percent) {
            KvOp::Put(key)
        } else if is_one_of(self.swap_percent) {
            KvOp::Swap(key)
        } else if is_one_of(self.scan_percent) {
            KvOp::Scan(key, (1 + random.below(SCAN_MAX)).min(self.keys - key))
        } else {
            KvOp::Get(key)
        }
    }

    /// Runs a client.
    pub(super) fn run<S: KvStore>(self, client: u64, store: &mut S) -> Result<KvFound, S::Error> {
        let zipf = Zipf::new(self.keys, self.zipf_percent as f64 / 100.0);
        let mut random = Random::new(self.seed ^ client << 32);
        let mut found = KvFound::default();
        for step in 0..self.ops {
            match self.next(client, step, &zipf, &mut random) {
                KvOp::Get(key) => {
                    let read = store.get(key)?;
                    found.see(key, read, self.is_exact);
                    found.reads += 1;
                }
                KvOp::Put(key) => {
                    store.put(key, value(key, client, found.writes))?;
                    found.writes += 1;
                }
                KvOp::Swap(key) => {
                    let before = store.swap(key, value(key, client, found.writes))?;
                    found.see(key, before, self.is_exact);
                    found.writes += 1;
                }
                KvOp::Scan(first, count) => {
                    let read = store.scan(first, count)?;
                    let is_whole = read.len() as u64 == count;
                    found.errors += u64::from(!is_whole);
                    read.into_iter().for_each(|value| found.see(value[0], Some(value), self.is_exact));
                    found.reads += 1;
                }
            }
        }
        Ok(found)
    }
}
