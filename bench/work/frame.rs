//! A data frame of taxi trips (AIFM, Figure 7, without offload): eight questions that walk some of its columns, filter, group and count.
//!
//! Trips are made up, with proportions as in New York: two vendors, one to six passengers, mostly short ways.

use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_of};
use anyhow::{Result, ensure};
use farfield::{FarError, FarVec, Heap};
use std::collections::BTreeMap;
use std::ops::Range;

/// Columns; all hold numbers of eight bytes.
const VENDOR: usize = 0;
const PASSENGERS: usize = 1;
const START: usize = 2;
const END: usize = 3;
const STORED: usize = 4;
/// Latitude and longitude of start and end.
const PLACES: usize = 5;
/// Computed by a question.
pub(crate) const KILOMETRES: usize = 9;
const COLUMNS: usize = 10;

/// Elements that are looked at in one scope, in each column: a page of them.
const RUN: usize = 512;
/// Elements of a column that are made before they are put into it.
const MADE: usize = 16 * RUN;
const DAY: f64 = 86_400.0;
/// Longer trips there are none.
const SECONDS_MAX: usize = 4_000;

enum Frame<'a> {
    Near(Vec<Vec<f64>>),
    Far(&'a Heap, Vec<FarVec<f64>>),
}

impl Frame<'_> {
    fn push(&mut self, column: usize, values: &[f64]) -> Result<(), FarError> {
        match self {
            Frame::Near(columns) => columns[column].extend_from_slice(values),
            Frame::Far(heap, columns) => columns[column].extend_from_slice(&heap.enter(), values)?,
        }
        Ok(())
    }

    fn rows(&self) -> usize {
        match self {
            Frame::Near(columns) => columns[0].len(),
            Frame::Far(_, columns) => columns[0].len(),
        }
    }

    /// The columns `which` side by side, run by run.
    fn walk<const N: usize>(&self, which: [usize; N], visit: impl FnMut([&[f64]; N])) -> Result<(), FarError> {
        self.walk_in(0..self.rows(), which, visit)
    }

    /// The same for some of the rows.
    fn walk_in<const N: usize>(
        &self,
        rows: Range<usize>,
        which: [usize; N],
        mut visit: impl FnMut([&[f64]; N]),
    ) -> Result<(), FarError> {
        for start in rows.clone().step_by(RUN) {
            let range = start..(start + RUN).min(rows.end);
            match self {
                Frame::Near(columns) => visit(which.map(|column| &columns[column][range.clone()])),
                Frame::Far(heap, columns) => {
                    let scope = heap.enter();
                    let mut runs = [&[][..]; N];
                    for (run, column) in runs.iter_mut().zip(which) {
                        // A run is a page, so it is one slice.
                        let mut chunks = columns[column].chunks_in(&scope, range.clone());
                        *run = chunks.next().unwrap_or(Ok(&[]))?;
                    }
                    visit(runs);
                }
            }
        }
        Ok(())
    }
}

/// A trip, as a row without the computed column.
pub(crate) fn trip(number: u64, seed: u64) -> [f64; KILOMETRES] {
    let mut random = Random::new(mix(number) ^ seed);
    // About in order, as records are written.
    let start = 1_451_606_400 + number / 4 + random.below(600);
    let end = start + 120 + random.below(60) * random.below(60);
    let mut near = |middle: f64| middle + random.below(200_001) as f64 / 1e6 - 0.1;
    let (from, mut to) = ([near(40.75), near(-73.97)], [near(40.75), near(-73.97)]);
    // A few go to another town.
    if random.below(1000) == 0 {
        to[0] += 2.0;
    }
    let vendor = 1 + random.below(2);
    let passengers = 1 + (random.below(36) as f64).sqrt() as u64;
    let stored = u64::from(random.below(150) == 0);
    [vendor as f64, passengers as f64, start as f64, end as f64, stored as f64, from[0], from[1], to[0], to[1]]
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let rows = options.data_bytes() / (COLUMNS as u64 * 8);
    let heap = options.heap(0)?;
    let mut frame = match &heap {
        None => Frame::Near((0..COLUMNS).map(|_| Vec::with_capacity(rows as usize)).collect()),
        Some(heap) => Frame::Far(heap, (0..COLUMNS).map(|_| FarVec::new()).collect()),
    };
    let mut outcome = Outcome::new();
    outcome.phase("fill", rows, || fill(&mut frame, rows, options.seed))?;
    ensure!(frame.rows() as u64 == rows, "rows are missing");
    let answers = outcome.phase("ask", rows, || ask(&mut frame))?;
    if let Some(heap) = &heap {
        figures_of(&mut outcome, &heap.stats(), 0);
    }
    // Which rows there are is known from how they were made.
    let trips = (0..rows).map(|number| trip(number, options.seed));
    let passengers: f64 = trips.map(|trip| trip[PASSENGERS] * trip[VENDOR]).sum();
    let wrong = u64::from(answers.passengers_by_vendor != passengers);
    outcome.checked(answers.all.iter().fold(0, |sum, answer| mix(sum ^ answer.to_bits())), wrong);
    Ok(outcome)
}

fn fill(frame: &mut Frame<'_>, rows: u64, seed: u64) -> Result<(), FarError> {
    let mut run = [const { Vec::new() }; KILOMETRES];
    for first in (0..rows).step_by(RUN) {
        run.iter_mut().for_each(Vec::clear);
        for number in first..(first + RUN as u64).min(rows) {
            run.iter_mut().zip(trip(number, seed)).for_each(|(column, value)| column.push(value));
        }
        for (column, values) in run.iter().enumerate() {
            frame.push(column, values)?;
        }
    }
    Ok(())
}

struct Answers {
    all: Vec<f64>,
    /// Sum over all trips, to be checked.
    passengers_by_vendor: f64,
}

fn ask(frame: &mut Frame<'_>) -> Result<Answers, FarError> {
    let mut all = Vec::new();
    let mut vendors = BTreeMap::new();
    frame.walk([VENDOR], |[vendor]| {
        vendor.iter().for_each(|vendor| *vendors.entry(*vendor as u64).or_insert(0.0) += 1.0)
    })?;
    all.extend(vendors.values());

    let mut passengers = [[0.0; 8]; 3];
    frame.walk([VENDOR, PASSENGERS], |[vendor, count]| {
        vendor.iter().zip(count).for_each(|(vendor, count)| passengers[*vendor as usize][*count as usize] += 1.0);
    })?;
    all.extend(passengers.as_flattened());
    let by_vendor =
        |vendor: usize| passengers[vendor].iter().enumerate().map(|(count, trips)| count as f64 * trips).sum::<f64>();
    let passengers_by_vendor = by_vendor(1) + 2.0 * by_vendor(2);

    let (mut shortest, mut longest, mut sum) = (f64::MAX, f64::MIN, 0.0);
    frame.walk([START, END], |[start, end]| {
        for time in start.iter().zip(end).map(|(start, end)| end - start) {
            (shortest, longest, sum) = (time.min(shortest), time.max(longest), sum + time);
        }
    })?;
    all.extend([shortest, longest, sum]);

    let mut stored = [0.0; 3];
    frame.walk([VENDOR, STORED], |[vendor, is_stored]| {
        vendor.iter().zip(is_stored).for_each(|(vendor, is_stored)| stored[*vendor as usize] += is_stored);
    })?;
    all.extend(stored);

    all.push(long_ways(frame)?);

    let mut hours: BTreeMap<u64, f64> = BTreeMap::new();
    frame.walk([START], |[start]| {
        start.iter().for_each(|start| *hours.entry((start / 3600.0) as u64).or_default() += 1.0)
    })?;
    let mut busiest: Vec<(f64, u64)> = hours.into_iter().map(|(hour, trips)| (trips, hour)).collect();
    busiest.sort_by(|one, other| other.partial_cmp(one).expect("no trip count is not a number"));
    all.extend(busiest.iter().take(10).flat_map(|(trips, hour)| [*trips, *hour as f64]));

    for length in [DAY, 30.0 * DAY] {
        all.extend(medians(frame, length)?);
    }
    Ok(Answers { all, passengers_by_vendor })
}

/// Makes the column of distances; how many trips are longer than 100 km.
fn long_ways(frame: &mut Frame<'_>) -> Result<f64, FarError> {
    let rows = frame.rows();
    for first in (0..rows).step_by(MADE) {
        let mut made = Vec::with_capacity(MADE);
        let range = first..(first + MADE).min(rows);
        frame.walk_in(range, [PLACES, PLACES + 1, PLACES + 2, PLACES + 3], |[a, b, c, d]| {
            made.extend((0..a.len()).map(|row| haversine([a[row], b[row]], [c[row], d[row]])));
        })?;
        frame.push(KILOMETRES, &made)?;
    }
    let mut long = 0.0;
    frame.walk([KILOMETRES], |[ways]| long += ways.iter().filter(|way| **way > 100.0).count() as f64)?;
    Ok(long)
}

fn haversine(from: [f64; 2], to: [f64; 2]) -> f64 {
    let half = |one: f64, other: f64| ((other - one).to_radians() / 2.0).sin().powi(2);
    let (from_cos, to_cos) = (from[0].to_radians().cos(), to[0].to_radians().cos());
    let share = half(from[0], to[0]) + from_cos * to_cos * half(from[1], to[1]);
    2.0 * 6371.0 * share.sqrt().asin()
}

/// The median time of the trips of each period.
fn medians(frame: &Frame<'_>, length: f64) -> Result<Vec<f64>, FarError> {
    let mut periods: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    frame.walk([START, END], |[start, end]| {
        for (start, end) in start.iter().zip(end) {
            let counts = periods.entry((start / length) as u64).or_insert_with(|| vec![0; SECONDS_MAX]);
            counts[(end - start) as usize] += 1;
        }
    })?;
    let median = |counts: &Vec<u32>| {
        let half = counts.iter().sum::<u32>() / 2;
        let mut below = 0;
        counts.iter().position(|count| {
            below += count;
            below > half
        })
    };
    Ok(periods.values().filter_map(median).map(|seconds| seconds as f64).collect())
}
