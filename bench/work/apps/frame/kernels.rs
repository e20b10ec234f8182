//! What is done with a chunk of rows, whoever keeps it, and what must come out.

use super::sorting::{self, Pivots, SAMPLES};
use super::{Far, PARTS};
use crate::Options;
use crate::random::{Random, mix};
use anyhow::{Result, ensure};
use std::collections::HashMap;
use std::ops::Range;

/// Values of `id1`, `id2`, `id4` and `id5`.
pub(super) const GROUPS: usize = 100;
/// Bytes of a row.
const ROW_BYTES: u64 = 40;
/// A price is below this.
const PRICE_MAX: f64 = 100.0;

/// Form of a table.
#[derive(Clone, Copy, Far)]
pub(super) struct TableForm {
    pub(super) rows: usize,
    /// Rows of a chunk: its prices take so many bytes as an object has.
    pub(super) chunk_rows: usize,
    seed: u64,
}

impl TableForm {
    pub(super) fn of(options: &Options) -> Result<TableForm> {
        let rows = (options.data_bytes() / ROW_BYTES) as usize;
        let chunk_rows = options.object_bytes as usize / size_of::<f64>();
        ensure!(chunk_rows > 0 && rows >= GROUPS, "--object-bytes must be 8 or more");
        Ok(TableForm { rows, chunk_rows, seed: options.seed })
    }

    pub(super) fn chunks(self) -> usize {
        self.rows.div_ceil(self.chunk_rows)
    }

    /// Values of `id3` and `id6`.
    fn large_groups(self) -> usize {
        self.rows / GROUPS
    }

    fn range_of(self, chunk: usize) -> Range<usize> {
        chunk * self.chunk_rows..((chunk + 1) * self.chunk_rows).min(self.rows)
    }

    /// Makes the rows of a chunk.
    pub(super) fn rows_of(self, chunk: usize) -> Rows {
        let mut random = Random::new(self.seed ^ (chunk as u64 + 1) << 32);
        let mut rows = Rows::default();
        for _ in self.range_of(chunk) {
            for (at, column) in rows.ids.iter_mut().enumerate() {
                let groups = if at % 3 == 2 { self.large_groups() } else { GROUPS };
                column.push(1 + random.below(groups as u64) as u32);
            }
            rows.values[0].push(1 + random.below(5) as i32);
            rows.values[1].push(1 + random.below(15) as i32);
            rows.prices.push(random.below(PRICE_MAX as u64 * 1_000_000) as f64 / 1e6);
        }
        rows
    }

    /// Makes the small table to join with: a rate for each value of `id2`.
    pub(super) fn rates(self) -> Vec<f64> {
        (0..GROUPS as u64).map(|id| (mix(id ^ self.seed) % 64) as f64 / 64.0).collect()
    }

    /// Makes the large table to join with: a weight for each value of `id6`.
    pub(super) fn weights(self) -> Vec<f64> {
        (0..self.large_groups() as u64).map(|id| (mix(id ^ self.seed << 8) % 256) as f64 / 256.0).collect()
    }
}

/// Rows in columns.
#[derive(Default)]
pub(super) struct Rows {
    pub(super) ids: [Vec<u32>; 6],
    pub(super) values: [Vec<i32>; 2],
    pub(super) prices: Vec<f64>,
}

impl Rows {
    pub(super) fn view(&self) -> RowView<'_> {
        RowView {
            ids: self.ids.each_ref().map(Vec::as_slice),
            values: self.values.each_ref().map(Vec::as_slice),
            prices: &self.prices,
        }
    }
}

/// Borrowed rows: `id1` to `id6`, `v1` and `v2`, and `v3`.
pub(super) struct RowView<'a> {
    pub(super) ids: [&'a [u32]; 6],
    pub(super) values: [&'a [i32]; 2],
    pub(super) prices: &'a [f64],
}

/// Row of a group, of which there are many.
#[derive(Clone, Copy, Far)]
pub(super) struct Cell {
    id: u32,
    value: i32,
    price: f64,
}

/// Group of many: the sum of `v1`, and the mean of `v3`.
#[derive(Clone, Copy, Far)]
pub(super) struct GroupRow {
    id: u32,
    sum: i64,
    mean: f64,
}

/// Sums over groups, of which there are many.
#[derive(Clone, Copy, Default, Far)]
pub(super) struct GroupSums {
    count: usize,
    total: i64,
    /// Sum over hashes of all groups.
    hash: u64,
}

impl GroupSums {
    pub(super) fn of(groups: &[GroupRow]) -> GroupSums {
        let mut sums = GroupSums { count: groups.len(), ..GroupSums::default() };
        for GroupRow { id, sum, mean } in groups {
            sums.total += sum;
            let hash = mix(u64::from(*id) ^ mix(sum.cast_unsigned() ^ mix(mean.to_bits())));
            sums.hash = sums.hash.wrapping_add(hash);
        }
        sums
    }

    pub(super) fn add(&mut self, more: GroupSums) {
        *self = GroupSums {
            count: self.count + more.count,
            total: self.total + more.total,
            hash: self.hash.wrapping_add(more.hash),
        };
    }
}

impl RowView<'_> {
    /// Returns the prices of the rows whose `v1` is 3 and whose price is above 50.
    pub(super) fn filtered(&self) -> Vec<f64> {
        let rows = self.values[0].iter().zip(self.prices);
        rows.filter(|(value, price)| **value == 3 && **price > 50.0).map(|(_, price)| *price).collect()
    }

    /// Returns the sums of `v1` by `id1`.
    pub(super) fn small_groups(&self) -> [i64; GROUPS] {
        let mut sums = [0; GROUPS];
        for (id, value) in self.ids[0].iter().zip(self.values[0]) {
            sums[*id as usize - 1] += i64::from(*value);
        }
        sums
    }

    /// Returns `id3`, `v1` and `v3`, divided by `id3`.
    pub(super) fn scattered(&self) -> [Vec<Cell>; PARTS] {
        let mut parts = std::array::from_fn(|_| Vec::with_capacity(self.prices.len() / PARTS * 5 / 4));
        for ((id, value), price) in self.ids[2].iter().zip(self.values[0]).zip(self.prices) {
            parts[mix(u64::from(*id)) as usize % PARTS].push(Cell { id: *id, value: *value, price: *price });
        }
        parts
    }

    /// Returns the price of each row by the rate of its `id2` and the weight of its `id6`.
    pub(super) fn joined(&self, rates: &[f64], weights: &[f64]) -> Vec<f64> {
        let rows = self.prices.iter().zip(self.ids[1]).zip(self.ids[5]);
        rows.map(|((price, small), large)| price * rates[*small as usize - 1] * weights[*large as usize - 1]).collect()
    }

    /// Returns some of the prices.
    pub(super) fn sample(&self) -> [f64; SAMPLES] {
        sorting::sample(self.prices.len(), |row| self.prices[row])
    }

    /// Returns the prices, divided into ranges and sorted in each.
    pub(super) fn ranges(&self, pivots: &Pivots<f64>) -> [Vec<f64>; PARTS] {
        sorting::ranges(self.prices.iter().copied(), pivots)
    }
}

/// Returns the groups of rows that are divided by their ids.
pub(super) fn large_groups<'a>(cells: impl Iterator<Item = &'a [Cell]>) -> Vec<GroupRow> {
    let mut groups: HashMap<u32, (i64, f64, u32)> = HashMap::new();
    for Cell { id, value, price } in cells.flatten() {
        let (sum, prices, count) = groups.entry(*id).or_default();
        *sum += i64::from(*value);
        *prices += price;
        *count += 1;
    }
    groups.into_iter().map(|(id, (sum, prices, count))| GroupRow { id, sum, mean: prices / f64::from(count) }).collect()
}

/// Answers to all questions.
#[derive(Default)]
pub(super) struct Answers {
    filtered: (usize, f64),
    pub(super) small_groups: Vec<i64>,
    pub(super) large_groups: GroupSums,
    joined: f64,
    /// Number of sorted prices, the last one, a hash of all in their order, and how many are out of order.
    sorted: (usize, f64, u64, u64),
}

impl Answers {
    pub(super) fn add_filtered(&mut self, count: usize, sum: f64) {
        self.filtered = (self.filtered.0 + count, self.filtered.1 + sum);
    }

    pub(super) fn add_joined(&mut self, sum: f64) {
        self.joined += sum;
    }

    pub(super) fn see_sorted(&mut self, prices: &[f64]) {
        let (count, last, hash, errors) = &mut self.sorted;
        *count += prices.len();
        for price in prices {
            *errors += u64::from(*price < *last);
            *last = *price;
            *hash = mix(*hash ^ price.to_bits());
        }
    }

    pub(super) fn checksum(&self) -> u64 {
        let words = [self.filtered.0 as u64, self.filtered.1.to_bits(), self.large_groups.hash, self.joined.to_bits()];
        let groups = self.small_groups.iter().map(|sum| sum.cast_unsigned());
        words.into_iter().chain(groups).fold(self.sorted.2, |sum, word| mix(sum ^ word))
    }

    /// Returns how many answers contradict each other, or the table.
    pub(super) fn errors(&self, form: TableForm) -> u64 {
        let is_right = [
            self.sorted.0 == form.rows && self.sorted.1 < PRICE_MAX,
            self.small_groups.iter().sum::<i64>() == self.large_groups.total,
            self.large_groups.count <= form.large_groups(),
            self.filtered.0 <= form.rows && self.filtered.1 > 50.0 * self.filtered.0 as f64 - 1.0,
        ];
        self.sorted.3 + is_right.iter().filter(|is_right| !**is_right).count() as u64
    }
}
