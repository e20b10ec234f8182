//! A data frame that is copied and shuffled (Atlas, Figure 4: DataFrame): columns are copied one after the other, in order, and then one
//! is made anew with its rows in another order, read at random.
//!
//! Columns are those of made-up trips, as in [`frame`](crate::frame), or with `real = 1` way, fare and total of real ones ([`real`]).

use crate::frame::{KILOMETRES, trip};
use crate::random::mix;
use crate::real::{self, Rows};
use crate::{Options, Outcome, course, figures_since};
use anyhow::{Result, ensure};
use farfield::{FarError, FarVec, Heap};
use std::fs::File;
use std::io::BufReader;

/// Columns that are there; one more is made.
const SOURCES: usize = 3;
const BYTES_PER_ROW: u64 = (SOURCES as u64 + 1) * 8;
/// Rows that are copied in one scope: a page of them.
const RUN: usize = 512;
/// Rows that are shuffled in one scope, each of which may bring a page.
const GATHER: usize = 64;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let rows = (options.data_bytes() / BYTES_PER_ROW) as usize;
    match options.heap(0)? {
        None => work(options, rows, &mut Near::default()),
        Some(heap) => course::followed(options, &heap, || {
            let before = heap.stats();
            let mut frame = Far { heap: &heap, sources: Default::default(), made: FarVec::new() };
            let mut outcome = work(options, rows, &mut frame)?;
            figures_since(&mut outcome, &before, &heap.stats(), ops(rows), 0);
            Ok(outcome)
        }),
    }
}

/// Elements that are made.
fn ops(rows: usize) -> u64 {
    (SOURCES as u64 + 1) * rows as u64
}

/// Columns, and the one that was made last.
trait Frame {
    fn push(&mut self, column: usize, values: &[f64]) -> Result<(), FarError>;
    fn copy(&mut self, column: usize) -> Result<(), FarError>;
    fn shuffle(&mut self, column: usize, order: Order) -> Result<(), FarError>;
    /// Shows what was made, in order.
    fn read(&self, see: impl FnMut(f64)) -> Result<(), FarError>;
}

fn work(options: &Options, rows: usize, frame: &mut impl Frame) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut trips = Trips::new(options)?;
    outcome.phase("fill", rows as u64, || fill(rows, frame, &mut trips))?;
    let order = Order::new(rows, options.seed);
    let (mut checksum, mut errors) = (0, 0);
    for column in 0..SOURCES {
        outcome.phase("move", rows as u64, || frame.copy(column))?;
        frame.read(|value| checksum = mix(checksum ^ value.to_bits()))?;
        // Of all values, in any order.
        let mut sum = 0u64;
        frame.read(|value| sum = sum.wrapping_add(mix(value.to_bits())))?;
        errors += u64::from(sum != trips.sums[column]);
    }
    outcome.phase("move", rows as u64, || frame.shuffle(0, order))?;
    let (mut at, mut sum) = (0, 0u64);
    frame.read(|value| {
        errors += u64::from(trips.known(order.source(at)).is_some_and(|known| known != value));
        checksum = mix(checksum ^ value.to_bits());
        sum = sum.wrapping_add(mix(value.to_bits()));
        at += 1;
    })?;
    ensure!(at == rows, "rows are missing");
    outcome.checked(checksum, errors + u64::from(sum != trips.sums[0]));
    Ok(outcome)
}

/// Where rows come from.
struct Trips {
    seed: u64,
    real: Option<Rows<BufReader<File>, SOURCES>>,
    made: u64,
    /// Of each column, of all values in any order.
    sums: [u64; SOURCES],
}

impl Trips {
    fn new(options: &Options) -> Result<Trips> {
        let real = (options.real == 1).then(|| real::open(real::TRIPS)).transpose()?;
        let real = real.map(|file| Rows::new(file, real::TRIP_NUMBERS));
        Ok(Trips { seed: options.seed, real, made: 0, sums: [0; SOURCES] })
    }

    fn next(&mut self) -> Result<[f64; SOURCES]> {
        let row = match &mut self.real {
            Some(rows) => rows.next()?,
            None => made_up(self.made, self.seed),
        };
        self.made += 1;
        for (sum, value) in self.sums.iter_mut().zip(row) {
            *sum = sum.wrapping_add(mix(value.to_bits()));
        }
        Ok(row)
    }

    /// What is in the first column of this row, if that can be known without keeping it.
    fn known(&self, row: usize) -> Option<f64> {
        self.real.is_none().then(|| made_up(row as u64, self.seed)[0])
    }
}

fn made_up(row: u64, seed: u64) -> [f64; SOURCES] {
    // The last columns of a trip are places, no two alike.
    let trip = trip(row, seed);
    std::array::from_fn(|column| trip[KILOMETRES - 1 - column])
}

fn fill(rows: usize, frame: &mut impl Frame, trips: &mut Trips) -> Result<()> {
    for first in (0..rows).step_by(RUN) {
        let run: Vec<[f64; SOURCES]> = (first..rows.min(first + RUN)).map(|_| trips.next()).collect::<Result<_>>()?;
        for column in 0..SOURCES {
            frame.push(column, &Vec::from_iter(run.iter().map(|row| row[column])))?;
        }
    }
    Ok(())
}

/// An order of all rows, which nobody need remember.
#[derive(Clone, Copy)]
pub(crate) struct Order {
    rows: usize,
    bits: u32,
    seed: u64,
}

impl Order {
    pub(crate) fn new(rows: usize, seed: u64) -> Order {
        Order { rows, bits: rows.next_power_of_two().ilog2().max(2), seed }
    }

    /// The row that comes to this place.
    pub(crate) fn source(&self, place: usize) -> usize {
        let mask = (1u64 << self.bits) - 1;
        let mut row = place as u64;
        // Each step can be undone, so no two places meet; who falls beyond the rows goes on.
        loop {
            for round in 0..3 {
                row = row.wrapping_mul(mix(self.seed ^ round) | 1) & mask;
                row ^= row >> (self.bits / 2);
            }
            if row < self.rows as u64 {
                return row as usize;
            }
        }
    }
}

#[derive(Default)]
struct Near {
    sources: [Vec<f64>; SOURCES],
    made: Vec<f64>,
}

impl Frame for Near {
    fn push(&mut self, column: usize, values: &[f64]) -> Result<(), FarError> {
        self.sources[column].extend_from_slice(values);
        Ok(())
    }

    fn copy(&mut self, column: usize) -> Result<(), FarError> {
        self.made = Vec::new();
        self.made.extend_from_slice(&self.sources[column]);
        Ok(())
    }

    fn shuffle(&mut self, column: usize, order: Order) -> Result<(), FarError> {
        self.made = Vec::new();
        self.made.extend((0..order.rows).map(|place| self.sources[column][order.source(place)]));
        Ok(())
    }

    fn read(&self, see: impl FnMut(f64)) -> Result<(), FarError> {
        self.made.iter().copied().for_each(see);
        Ok(())
    }
}

struct Far<'a> {
    heap: &'a Heap,
    sources: [FarVec<f64>; SOURCES],
    made: FarVec<f64>,
}

impl Frame for Far<'_> {
    fn push(&mut self, column: usize, values: &[f64]) -> Result<(), FarError> {
        self.sources[column].extend_from_slice(&self.heap.enter(), values)
    }

    fn copy(&mut self, column: usize) -> Result<(), FarError> {
        self.made = FarVec::new();
        let source = &self.sources[column];
        for first in (0..source.len()).step_by(RUN) {
            let scope = self.heap.enter();
            let run = first..source.len().min(first + RUN);
            // A run is a page, so it is one slice.
            let values = source.chunks_in(&scope, run).next().unwrap_or(Ok(&[]))?;
            self.made.extend_from_slice(&scope, values)?;
        }
        Ok(())
    }

    fn shuffle(&mut self, column: usize, order: Order) -> Result<(), FarError> {
        self.made = FarVec::new();
        for first in (0..order.rows).step_by(GATHER) {
            let scope = self.heap.enter();
            for place in first..order.rows.min(first + GATHER) {
                let value = *self.sources[column].at(&scope, order.source(place))?;
                self.made.push(&scope, value)?;
            }
        }
        Ok(())
    }

    fn read(&self, mut see: impl FnMut(f64)) -> Result<(), FarError> {
        let mut scope = self.heap.enter();
        let mut scan = self.made.scan(&mut scope);
        while let Some(values) = scan.next_chunk()? {
            values.iter().copied().for_each(&mut see);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_every_row_once() {
        for rows in [1, 2, 3, 1000, 4096, 5000] {
            let order = Order::new(rows, 9);
            let mut sources: Vec<_> = (0..rows).map(|place| order.source(place)).collect();
            let in_order = sources.is_sorted();
            sources.sort_unstable();
            assert!(sources.into_iter().eq(0..rows), "{rows} rows");
            assert!(rows < 10 || !in_order, "{rows} rows are not shuffled");
        }
    }
}
