//! Traces: the pages that programs of a kind access, in order. Each begins by filling all pages.

use super::{PAGE_BYTES, recorded};
use crate::Options;
use crate::random::{Random, mix};
use crate::zipf::Zipf;
use anyhow::{Result, bail};

/// Names of the traces that are made up.
pub(super) const NAMES: [&str; 9] =
    ["zipf-99", "zipf-120", "hot-cold", "redis", "matrix", "chase", "stencil", "scan", "phases"];

/// Bytes of an entry of the hash table under `zipf`, of a value of `redis` with its header, and of a node of `chase`.
const ENTRY_BYTES: u64 = 256;
const VALUE_BYTES: u64 = 720;
const NODE_BYTES: u64 = 64;
/// Part of the pages that hold the table of a hash map: one of so many.
const TABLE_SHARE: u64 = 16;
/// Part of the pages that are hot under `hot-cold`, and the percentage of accesses that go there.
const HOT_SHARE: u64 = 6;
const HOT_PERCENT: u64 = 90;
/// Part of the pages that a phase of `phases` works with, its percentage of the accesses, and the accesses of one phase for
/// each of these pages.
const PHASE_SHARE: u64 = 8;
const PHASE_PERCENT: u64 = 90;
const PHASE_ACCESSES: u64 = 10;
/// Blocks of the matrix product (Goto and van de Geijn 2008): rows of A, and the common dimension.
const BLOCK: u64 = 256;

/// Accesses to pages, made up or recorded.
pub(super) enum Trace {
    Made { kind: Kind, page_count: u32, ops: u64, seed: u64 },
    Recorded { pages: Vec<u32>, page_count: u32 },
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// Look-ups in a hash table whose keys are chosen by Zipf's law with this exponent.
    Zipf(f64),
    HotCold,
    /// Gets of values that lie across pages, by Zipf's law.
    Redis,
    Matrix,
    Chase,
    Stencil,
    Scan,
    Phases,
}

impl Trace {
    /// The trace of that name.
    pub(super) fn open(name: &str, options: &Options) -> Result<Trace> {
        if NAMES.contains(&name) {
            return Trace::made(name, options.data_bytes(), options.ops, options.seed);
        }
        if !name.contains('/') {
            bail!("no trace is called {name}; write {}, or a recorded one such as arc/P6", NAMES.join(", "));
        }
        let pages = recorded::read(name)?;
        let page_count = pages.iter().max().map_or(0, |&last| last + 1);
        Ok(Trace::Recorded { pages, page_count })
    }

    pub(super) fn made(name: &str, data_bytes: u64, ops: u64, seed: u64) -> Result<Trace> {
        let kind = match name {
            "zipf-99" => Kind::Zipf(0.99),
            "zipf-120" => Kind::Zipf(1.2),
            "hot-cold" => Kind::HotCold,
            "redis" => Kind::Redis,
            "matrix" => Kind::Matrix,
            "chase" => Kind::Chase,
            "stencil" => Kind::Stencil,
            "scan" => Kind::Scan,
            "phases" => Kind::Phases,
            _ => bail!("no trace is called {name}"),
        };
        Ok(Trace::Made { kind, page_count: u32::try_from(data_bytes / PAGE_BYTES as u64)?, ops, seed })
    }

    pub(super) fn is_recorded(&self) -> bool {
        matches!(self, Trace::Recorded { .. })
    }

    pub(super) fn page_count(&self) -> u32 {
        match self {
            Trace::Made { page_count, .. } | Trace::Recorded { page_count, .. } => *page_count,
        }
    }

    /// The pages in order. One that is made up fills all pages first, then makes about so many accesses as were asked for.
    pub(super) fn pages(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match self {
            Trace::Recorded { pages, .. } => Box::new(pages.iter().copied()),
            Trace::Made { kind, page_count, ops, seed } => {
                let accesses = kind.accesses(u64::from(*page_count), *ops, *seed).map(|page| page as u32);
                Box::new((0..*page_count).chain(accesses))
            }
        }
    }
}

/// The page of an entry of so many bytes, behind `first` pages; the second, if it lies across two.
fn pages_of(first: u64, entry: u64, bytes: u64) -> impl Iterator<Item = u64> {
    let (start, end) = (entry * bytes, (entry + 1) * bytes - 1);
    (start / PAGE_BYTES as u64..=end / PAGE_BYTES as u64).map(move |page| first + page)
}

impl Kind {
    fn accesses(self, pages: u64, ops: u64, seed: u64) -> Box<dyn Iterator<Item = u64>> {
        let mut random = Random::new(seed);
        match self {
            Kind::Zipf(exponent) => keyed(pages, ops, exponent, ENTRY_BYTES, random),
            Kind::Redis => keyed(pages, ops, 0.99, VALUE_BYTES, random),
            Kind::HotCold => {
                let hot = pages / HOT_SHARE;
                Box::new((0..ops).map(move |_| match random.below(100) < HOT_PERCENT {
                    true => random.below(hot),
                    false => hot + random.below(pages - hot),
                }))
            }
            Kind::Phases => {
                let set = pages / PHASE_SHARE;
                let mut first = 0;
                Box::new((0..ops).map(move |op| {
                    if op % (set * PHASE_ACCESSES) == 0 {
                        first = random.below(pages - set);
                    }
                    if random.below(100) < PHASE_PERCENT { first + random.below(set) } else { random.below(pages) }
                }))
            }
            // A cycle through all nodes: a bijection on a power of two, from which numbers that are too large are left out.
            Kind::Chase => {
                let nodes = pages * PAGE_BYTES as u64 / NODE_BYTES;
                let bits = nodes.next_power_of_two().trailing_zeros();
                let mask = (1u64 << bits) - 1;
                let node = move |step: u64| {
                    let mixed = (step & mask).wrapping_mul(0x9E37_79B9_7F4A_7C15) & mask;
                    let mixed = (mixed ^ mixed >> (bits / 2)).wrapping_mul(0xBF58_476D_1CE4_E5B9) & mask;
                    mixed ^ mixed >> (bits / 2)
                };
                let nodes = (0..).map(node).filter(move |&node| node < nodes).take(ops as usize);
                Box::new(nodes.map(|node| node * NODE_BYTES / PAGE_BYTES as u64))
            }
            Kind::Scan => Box::new((0..ops).map(move |op| op % pages)),
            // Two arrays by turns; each page is made of three neighbours.
            Kind::Stencil => {
                let half = pages / 2;
                Box::new((0..ops).map(move |op| {
                    let (step, part) = (op / 4, op % 4);
                    let (pass, at) = (step / half, step % half);
                    let (source, target) = if pass % 2 == 0 { (0, half) } else { (half, 0) };
                    match part {
                        0 => source + at.saturating_sub(8),
                        1 => source + at,
                        2 => source + (at + 8).min(half - 1),
                        _ => target + at,
                    }
                }))
            }
            Kind::Matrix => Box::new(matrix_product(pages).take(ops as usize)),
        }
    }
}

/// Look-ups in a hash map: a page of the table, then those of the entry, which lies where its hash says.
fn keyed(pages: u64, ops: u64, exponent: f64, bytes: u64, mut random: Random) -> Box<dyn Iterator<Item = u64>> {
    let table = pages / TABLE_SHARE;
    let count = (pages - table) * PAGE_BYTES as u64 / bytes;
    let law = Zipf::new(count, exponent);
    Box::new((0..ops).flat_map(move |_| {
        let key = law.sample(&mut random);
        std::iter::once(mix(key) % table).chain(pages_of(table, mix(!key) % count, bytes))
    }))
}

/// The product of square matrices that fill the pages, by blocks that are packed, again and again.
fn matrix_product(pages: u64) -> impl Iterator<Item = u64> {
    let doubles = PAGE_BYTES as u64 / 8;
    // Three matrices of n × n, and packed copies of a block of A and of rows of B.
    let fits = |n: u64| 3 * n * n + BLOCK * BLOCK + BLOCK * n <= pages * doubles;
    let n = (1..).map(|blocks| blocks * BLOCK).take_while(|&n| fits(n)).last().unwrap_or(BLOCK);
    let matrix = n * n / doubles;
    let packed_a = 3 * matrix;
    let packed_b = packed_a + BLOCK * BLOCK / doubles;
    // Rows and columns of a matrix, row by row.
    let part = move |base: u64, rows: std::ops::Range<u64>, columns: std::ops::Range<u64>| {
        rows.flat_map(move |row| {
            let (from, to) = (row * n + columns.start, row * n + columns.end - 1);
            (from / doubles..=to / doubles).map(move |page| base + page)
        })
    };
    let blocks = n / BLOCK;
    (0..)
        .flat_map(move |_| 0..blocks)
        .flat_map(move |k| {
            let common = k * BLOCK..(k + 1) * BLOCK;
            let pack_b = part(matrix, common.clone(), 0..n).chain(packed_b..packed_b + BLOCK * n / doubles);
            let rows = (0..blocks).flat_map(move |i| {
                let rows = i * BLOCK..(i + 1) * BLOCK;
                let pack_a = part(0, rows.clone(), common.clone()).chain(packed_a..packed_b);
                let product = (packed_b..packed_b + BLOCK * n / doubles).chain(part(2 * matrix, rows, 0..n));
                pack_a.chain(product)
            });
            pack_b.chain(rows)
        })
        // Small matrices do not fit in few pages.
        .map(move |page| page % pages)
}
