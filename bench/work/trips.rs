//! What an analyst does with a data frame of taxi trips (AIFM, Figures 7 and 8): columns are copied, put into another order, and summed, counted,
//! grouped and searched. What of that is done where the columns are is a choice.
//!
//! Trips are made up, as in [`frame`](crate::frame), or with `real = 1` those of a file ([`real`]). Money and miles are whole cents and hundredths, so
//! that sums are exact in any order.

use crate::device::Device;
use crate::frame::trip;
use crate::measure::Outcome;
use crate::random::mix;
use crate::real::{self, Rows};
use crate::shuffle::Order;
use crate::{OffloadName, Options, figures_since};
use anyhow::{Context, Result, ensure};
use core::ops::Bound::{Excluded, Unbounded};
use farfield::{FarVec, Formula, Heap, Where};
use farfield_os::process::now_ns;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Columns that are filled.
const FILLED: usize = 8;
const VENDOR: usize = 0;
const START: usize = 1;
const END: usize = 2;
const PASSENGERS: usize = 3;
const MILES: usize = 4;
const FARE: usize = 5;
const TIP: usize = 6;
const TOTAL: usize = 7;
/// Computed from others.
const SECONDS: usize = 8;
/// Those that are copied, and those that are put into another order.
const COPIED: [usize; 4] = [FARE, TIP, TOTAL, SECONDS];
const SHUFFLED: [usize; 2] = [TOTAL, MILES];
/// All that there is in the end, with the order.
const COLUMNS: u64 = FILLED as u64 + 2 + COPIED.len() as u64 + SHUFFLED.len() as u64;
/// Rows that are filled or walked at a time.
const RUN: usize = 512;
/// Cents above which a trip is dear.
const DEAR: f64 = 6000.0;

/// Number, sum, smallest and largest.
pub(crate) type Totals = [f64; 4];

/// Where columns are kept, and what can be done with them.
pub(crate) trait Place {
    type Numbers;
    type Order;

    /// Makes a column without rows.
    fn column(&self) -> Result<Self::Numbers>;
    fn push(&self, column: &mut Self::Numbers, values: &[f64]) -> Result<()>;
    fn order(&self, indices: &mut dyn Iterator<Item = u64>) -> Result<Self::Order>;
    /// Shows columns side by side.
    fn walk(&self, columns: [&Self::Numbers; 2], visit: &mut dyn FnMut(&[f64], &[f64])) -> Result<()>;
    /// Computes how much larger the numbers of one column are than those of the other.
    fn difference(&self, [one, other]: [&Self::Numbers; 2]) -> Result<Self::Numbers> {
        let mut differences = self.column()?;
        // Not all at once: there are as many as rows.
        let mut batch = Vec::with_capacity(RUN);
        let mut result = Ok(());
        self.walk([one, other], &mut |one, other| {
            batch.extend(one.iter().zip(other).map(|(one, other)| one - other));
            if batch.len() >= RUN && result.is_ok() {
                result = self.push(&mut differences, &batch);
                batch.clear();
            }
        })?;
        result?;
        self.push(&mut differences, &batch)?;
        Ok(differences)
    }
    fn copy(&self, column: &Self::Numbers) -> Result<Self::Numbers>;
    fn take(&self, column: &Self::Numbers, order: &Self::Order) -> Result<Self::Numbers>;
    fn totals(&self, column: &Self::Numbers) -> Result<Totals>;
    fn tally(&self, column: &Self::Numbers) -> Result<Vec<(f64, u64)>>;
    fn group(&self, keys: &Self::Numbers, values: &Self::Numbers) -> Result<Vec<(f64, Totals)>>;
    /// Which are larger.
    fn find(&self, column: &Self::Numbers, than: f64) -> Result<Self::Order>;
    fn median(&self, column: &Self::Numbers) -> Result<f64>;
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let rows = (options.data_bytes() / (COLUMNS * 8)) as usize;
    match options.heap(0)? {
        None => work(options, rows, &Near),
        Some(heap) => {
            let at = |names: &[OffloadName]| match names.contains(&options.offload) {
                true => Where::Auto,
                false => Where::Client,
            };
            let far = Far {
                heap: &heap,
                copy: at(&[OffloadName::Copy, OffloadName::All, OffloadName::Own]),
                take: at(&[OffloadName::Shuffle, OffloadName::All, OffloadName::Own]),
                ask: at(&[OffloadName::Aggregate, OffloadName::All]),
                compute: at(&[OffloadName::All, OffloadName::Own]),
            };
            let before = heap.stats();
            let mut outcome = match options.offload {
                OffloadName::Own => work(options, rows, &Device::new(far))?,
                _ => work(options, rows, &far)?,
            };
            figures_since(&mut outcome, &before, &heap.stats(), rows as u64, 0);
            Ok(outcome)
        }
    }
}

fn work<P: Place>(options: &Options, rows: usize, place: &P) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let mut columns = (0..FILLED).map(|_| place.column()).collect::<Result<Vec<_>>>()?;
    let order = Order::new(rows, options.seed);
    let sum = outcome.phase("fill", rows as u64, || fill(options, rows, place, &mut columns))?;
    if let Some(folder) = &options.columns {
        for (number, column) in columns.iter().enumerate() {
            let mut file = BufWriter::new(File::create(folder.join(format!("column-{number}")))?);
            let mut result = Ok(());
            place.walk([column, column], &mut |values, _| {
                let write = |value: &f64| file.write_all(&value.to_le_bytes());
                result = core::mem::replace(&mut result, Ok(())).and_then(|()| values.iter().try_for_each(write));
            })?;
            result.and_then(|()| file.flush())?;
        }
        leave(&folder.join("order"), (0..rows).map(|at| (order.source(at) as u64).to_le_bytes()))?;
    }
    let order = place.order(&mut (0..rows).map(|at| order.source(at) as u64))?;
    let mut clock = Clock::default();
    let (answers, made) = outcome.phase("ask", rows as u64, || ask(place, &mut columns, &order, &mut clock))?;
    if let Some(folder) = &options.columns {
        leave(&folder.join("answers"), answers.iter().map(|answer| answer.to_le_bytes()))?;
    }
    for (name, ns) in ["copy_s", "shuffle_s", "aggregate_s", "compute_s"].into_iter().zip(clock.ns) {
        outcome.figure(name, ns as f64 / 1e9);
    }
    let mut checksum = answers.iter().fold(0, |sum, answer| mix(sum ^ answer.to_bits()));
    let mut sums = Vec::new();
    for column in &made {
        let mut sum = 0u64;
        place.walk([column, column], &mut |values, _| {
            for value in values {
                checksum = mix(checksum ^ value.to_bits());
                sum = sum.wrapping_add(mix(value.to_bits()));
            }
        })?;
        sums.push(sum);
    }
    // Copies, and columns in another order, have what was filled in.
    let wanted = [sum[FARE], sum[TIP], sum[TOTAL], sums[3], sum[TOTAL], sum[MILES]];
    let errors = sums.iter().zip(wanted).filter(|(sum, wanted)| *sum != wanted).count();
    outcome.checked(checksum, errors as u64);
    Ok(outcome)
}

/// Leaves words in a file.
fn leave(path: &Path, words: impl Iterator<Item = [u8; 8]>) -> Result<()> {
    let mut file = BufWriter::new(File::create(path).with_context(|| format!("cannot make {}", path.display()))?);
    for word in words {
        file.write_all(&word)?;
    }
    Ok(file.flush()?)
}

/// Fills the columns; of each the sum of its values in any order.
fn fill<P: Place>(options: &Options, rows: usize, place: &P, columns: &mut [P::Numbers]) -> Result<[u64; FILLED]> {
    let mut real = (options.real == 1).then(|| real::open(real::TRIPS)).transpose()?;
    let mut real = real.take().map(|file| Rows::new(file, real::TRIP_COLUMNS));
    let mut sums = [0u64; FILLED];
    for first in (0..rows).step_by(RUN) {
        let mut run = [const { Vec::new() }; FILLED];
        for row in first..rows.min(first + RUN) {
            let trip = match &mut real {
                Some(rows) => of_file(rows.next()?),
                None => made_up(row as u64, options.seed),
            };
            for ((values, sum), value) in run.iter_mut().zip(&mut sums).zip(trip) {
                values.push(value);
                *sum = sum.wrapping_add(mix(value.to_bits()));
            }
        }
        for (column, values) in columns.iter_mut().zip(&run) {
            place.push(column, values)?;
        }
    }
    Ok(sums)
}

fn of_file(mut row: [f64; FILLED]) -> [f64; FILLED] {
    real::in_hundredths(&mut row[MILES..]);
    row
}

fn made_up(row: u64, seed: u64) -> [f64; FILLED] {
    let [vendor, passengers, start, end, ..] = trip(row, seed);
    let miles = ((end - start) * 0.4).round();
    let fare = 250.0 + 2.0 * miles;
    let tip = (mix(row ^ seed) % 500) as f64;
    [vendor, start, end, passengers, miles, fare, tip, fare + tip]
}

/// What the kinds of operations took.
#[derive(Default)]
struct Clock {
    /// Copies, orders, questions, and what is computed.
    ns: [u64; 4],
}

impl Clock {
    fn time<R>(&mut self, kind: usize, work: impl FnOnce() -> R) -> R {
        let started = now_ns();
        let result = work();
        self.ns[kind] += now_ns() - started;
        result
    }
}

fn ask<P: Place>(
    place: &P,
    columns: &mut Vec<P::Numbers>,
    order: &P::Order,
    clock: &mut Clock,
) -> Result<(Vec<f64>, Vec<P::Numbers>)> {
    let mut answers = Vec::new();
    let mut made = Vec::new();
    let seconds = clock.time(3, || place.difference([&columns[END], &columns[START]]))?;
    columns.push(seconds);
    for column in COPIED {
        made.push(clock.time(0, || place.copy(&columns[column]))?);
    }
    clock.time(2, || -> Result<()> {
        for column in [FARE, TIP, TOTAL, MILES, SECONDS] {
            answers.extend(place.totals(&columns[column])?);
        }
        for column in [VENDOR, PASSENGERS] {
            answers.extend(place.tally(&columns[column])?.into_iter().flat_map(|(key, count)| [key, count as f64]));
        }
        for (keys, values) in [(PASSENGERS, FARE), (VENDOR, TIP)] {
            let groups = place.group(&columns[keys], &columns[values])?;
            answers.extend(groups.into_iter().flat_map(|(key, totals)| [[key; 1].as_slice(), &totals].concat()));
        }
        answers.extend([place.median(&columns[FARE])?, place.median(&columns[SECONDS])?]);
        Ok(())
    })?;
    for column in SHUFFLED {
        made.push(clock.time(1, || place.take(&columns[column], order))?);
    }
    let dear = clock.time(2, || place.find(&columns[TOTAL], DEAR))?;
    for column in [TIP, MILES] {
        let some = clock.time(1, || place.take(&columns[column], &dear))?;
        answers.extend(clock.time(2, || place.totals(&some))?);
    }
    Ok((answers, made))
}

/// In std's types.
struct Near;

fn totals_of(values: impl Iterator<Item = f64>) -> Totals {
    values.fold([0.0, 0.0, f64::MAX, f64::MIN], |[count, sum, least, most], value| {
        [count + 1.0, sum + value, least.min(value), most.max(value)]
    })
}

impl Place for Near {
    type Numbers = Vec<f64>;
    type Order = Vec<u64>;

    fn column(&self) -> Result<Vec<f64>> {
        Ok(Vec::new())
    }

    fn push(&self, column: &mut Vec<f64>, values: &[f64]) -> Result<()> {
        column.extend_from_slice(values);
        Ok(())
    }

    fn order(&self, indices: &mut dyn Iterator<Item = u64>) -> Result<Vec<u64>> {
        Ok(indices.collect())
    }

    fn walk(&self, [one, other]: [&Vec<f64>; 2], visit: &mut dyn FnMut(&[f64], &[f64])) -> Result<()> {
        one.chunks(RUN).zip(other.chunks(RUN)).for_each(|(one, other)| visit(one, other));
        Ok(())
    }

    fn copy(&self, column: &Vec<f64>) -> Result<Vec<f64>> {
        Ok(column.clone())
    }

    fn take(&self, column: &Vec<f64>, order: &Vec<u64>) -> Result<Vec<f64>> {
        Ok(order.iter().map(|index| column[*index as usize]).collect())
    }

    fn totals(&self, column: &Vec<f64>) -> Result<Totals> {
        Ok(totals_of(column.iter().copied()))
    }

    fn tally(&self, column: &Vec<f64>) -> Result<Vec<(f64, u64)>> {
        let mut counts = BTreeMap::new();
        column.iter().for_each(|value| *counts.entry(value.to_bits()).or_insert(0u64) += 1);
        Ok(counts.into_iter().map(|(bits, count)| (f64::from_bits(bits), count)).collect())
    }

    fn group(&self, keys: &Vec<f64>, values: &Vec<f64>) -> Result<Vec<(f64, Totals)>> {
        let mut groups: BTreeMap<u64, Totals> = BTreeMap::new();
        for (key, value) in keys.iter().zip(values) {
            let [count, sum, least, most] = groups.entry(key.to_bits()).or_insert([0.0, 0.0, f64::MAX, f64::MIN]);
            (*count, *sum, *least, *most) = (*count + 1.0, *sum + value, least.min(*value), most.max(*value));
        }
        Ok(groups.into_iter().map(|(bits, totals)| (f64::from_bits(bits), totals)).collect())
    }

    fn find(&self, column: &Vec<f64>, than: f64) -> Result<Vec<u64>> {
        Ok((0..column.len() as u64).filter(|index| column[*index as usize] > than).collect())
    }

    fn median(&self, column: &Vec<f64>) -> Result<f64> {
        let mut all = column.clone();
        let middle = (all.len() - 1) / 2;
        Ok(*all.select_nth_unstable_by(middle, f64::total_cmp).1)
    }
}

/// In a far heap, and what is done where.
pub(crate) struct Far<'a> {
    pub(crate) heap: &'a Heap,
    copy: Where,
    take: Where,
    ask: Where,
    compute: Where,
}

fn totals_from(part: &farfield::Part<f64>) -> Totals {
    [part.count() as f64, part.sum(), part.min().unwrap_or(f64::MAX), part.max().unwrap_or(f64::MIN)]
}

impl Place for Far<'_> {
    type Numbers = FarVec<f64>;
    type Order = FarVec<u64>;

    fn column(&self) -> Result<FarVec<f64>> {
        Ok(FarVec::new())
    }

    fn push(&self, column: &mut FarVec<f64>, values: &[f64]) -> Result<()> {
        Ok(column.extend_from_slice(&self.heap.enter(), values)?)
    }

    fn order(&self, indices: &mut dyn Iterator<Item = u64>) -> Result<FarVec<u64>> {
        let mut order = FarVec::new();
        loop {
            let run: Vec<u64> = core::iter::from_fn(|| indices.next()).take(RUN).collect();
            if run.is_empty() {
                return Ok(order);
            }
            order.extend_from_slice(&self.heap.enter(), &run)?;
        }
    }

    fn walk(&self, [one, other]: [&FarVec<f64>; 2], visit: &mut dyn FnMut(&[f64], &[f64])) -> Result<()> {
        ensure!(one.len() == other.len(), "columns of one table");
        for start in (0..one.len()).step_by(RUN) {
            let scope = self.heap.enter();
            let rows = start..one.len().min(start + RUN);
            // A run is a page, so it is one slice.
            let ones = one.chunks_in(&scope, rows.clone()).next().unwrap_or(Ok(&[]))?;
            visit(ones, other.chunks_in(&scope, rows).next().unwrap_or(Ok(&[]))?);
        }
        Ok(())
    }

    fn difference(&self, [one, other]: [&FarVec<f64>; 2]) -> Result<FarVec<f64>> {
        Ok(self.heap.compute(Formula::of(one) - other).at(self.compute).run()?)
    }

    fn copy(&self, column: &FarVec<f64>) -> Result<FarVec<f64>> {
        Ok(column.copy(self.heap).at(self.copy).run()?)
    }

    fn take(&self, column: &FarVec<f64>, order: &FarVec<u64>) -> Result<FarVec<f64>> {
        Ok(column.take(self.heap, order).at(self.take).run()?)
    }

    fn totals(&self, column: &FarVec<f64>) -> Result<Totals> {
        Ok(totals_from(&column.aggregate(self.heap).at(self.ask).run()?))
    }

    fn tally(&self, column: &FarVec<f64>) -> Result<Vec<(f64, u64)>> {
        Ok(self.heap.tally(column).at(self.ask).run()?)
    }

    fn group(&self, keys: &FarVec<f64>, values: &FarVec<f64>) -> Result<Vec<(f64, Totals)>> {
        let groups = self.heap.group(keys, values).at(self.ask).run()?;
        Ok(groups.iter().map(|(key, part)| (*key, totals_from(part))).collect())
    }

    fn find(&self, column: &FarVec<f64>, than: f64) -> Result<FarVec<u64>> {
        Ok(column.find(self.heap, (Excluded(than), Unbounded)).at(self.ask).run()?)
    }

    fn median(&self, column: &FarVec<f64>) -> Result<f64> {
        Ok(column.ranks(self.heap).at(self.ask).median()?.unwrap_or(0.0))
    }
}
