//! Trips of New York's green taxis: how they are read, what is done with a chunk of them, whoever keeps it, and what must come out.

use super::sorting::{self, Pivots, SAMPLES};
use super::{Far, PARTS};
use crate::random::mix;
use crate::real;
use crate::{Options, Outcome};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::HashSet;
use std::io::BufRead;
use std::ops::Range;

/// A vendor, a number of passengers, or whether a trip was stored, that the file leaves out.
const MISSING: i32 = -1;
const VENDOR: usize = 0;
const PASSENGERS: usize = 1;
/// 1 if a trip was stored before it was sent, else 0.
const STORED: usize = 2;
const HOUR: usize = 3;
const MONTH: usize = 4;
const FROM: usize = 5;
const TO: usize = 6;
const SECONDS: usize = 7;
/// In hundredths.
const MILES: usize = 8;
/// In cents.
const PAID: usize = 9;
pub(super) const COLUMNS: usize = 10;

/// Vendors and passengers that are told apart, from [`MISSING`] on.
const VENDORS: usize = 8;
const PASSENGERS_MAX: usize = 64;
/// Boroughs with the airport of Newark, and what is in none.
const BOROUGHS: usize = 8;
/// A trip is long from so many seconds on.
const LONG: i32 = 3600;
/// Cents that were paid for the trips from each borough.
pub(super) type PaidByBorough = [i64; BOROUGHS];

/// Form of the table.
#[derive(Clone, Copy, Far)]
pub(super) struct TripForm {
    pub(super) rows: usize,
    chunk_rows: usize,
}

impl TripForm {
    pub(super) fn of(options: &Options) -> Result<TripForm> {
        let chunk_rows = options.object_bytes as usize / size_of::<i32>();
        ensure!(chunk_rows > 0, "--object-bytes must be 4 or more");
        let mut file = real::open(real::TRIPS)?;
        let (mut lines, mut line) = (0usize, Vec::new());
        while file.read_until(b'\n', &mut line)? > 0 {
            lines += 1;
            line.clear();
        }
        let rows = lines.checked_sub(1).filter(|rows| *rows > 0).context("no trip is in the file")?;
        Ok(TripForm { rows, chunk_rows })
    }

    pub(super) fn chunks(self) -> usize {
        self.rows.div_ceil(self.chunk_rows)
    }

    fn rows_of(self, chunk: usize) -> Range<usize> {
        chunk * self.chunk_rows..((chunk + 1) * self.chunk_rows).min(self.rows)
    }

    pub(super) fn read(self, chunk: usize) -> Result<Trips> {
        let (mut file, mut line) = (real::open(real::TRIPS)?, String::new());
        let rows = self.rows_of(chunk);
        let mut next = |line: &mut String| {
            line.clear();
            file.read_line(line)
        };
        // The names of the columns, and the trips before.
        for _ in 0..=rows.start {
            next(&mut line)?;
        }
        let mut trips = Trips::default();
        for row in rows {
            next(&mut line)?;
            let values = trip(line.trim_end()).with_context(|| format!("row {row} is no trip: {line:?}"))?;
            trips.columns.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
        }
        Ok(trips)
    }
}

/// Reads a line of the table.
fn trip(line: &str) -> Option<[i32; COLUMNS]> {
    let fields: Vec<&str> = line.split(',').collect();
    let field = |column: usize| fields.get(column).copied();
    let number = |column| field(column).and_then(real::number);
    let code = |column| Some(if field(column)?.is_empty() { MISSING } else { number(column)? as i32 });
    let hundredths = |column| number(column).map(|number| (number * 100.0).round() as i32);
    let start = field(1)?;
    let part = |range: Range<usize>| start.get(range)?.parse().ok();
    let stored = match field(3)? {
        "" => MISSING,
        flag => i32::from(flag == "Y"),
    };
    let seconds = (number(2)? - number(1)?) as i32;
    let (from, to) = (code(5)?, code(6)?);
    Some([code(0)?, code(7)?, stored, part(11..13)?, part(5..7)?, from, to, seconds, hundredths(8)?, hundredths(16)?])
}

/// Returns the borough of each place, by number.
pub(super) fn boroughs() -> Result<Vec<i32>> {
    let mut names: Vec<String> = Vec::new();
    let mut boroughs = Vec::new();
    for line in real::open(real::PLACES)?.lines().skip(1) {
        let line = line?;
        let mut fields = line.split(',');
        let place: Option<usize> = fields.next().and_then(|place| place.parse().ok());
        let (Some(place), Some(name)) = (place, fields.next()) else { continue };
        let known = names.iter().position(|known| known == name).unwrap_or_else(|| {
            names.push(name.to_owned());
            names.len() - 1
        });
        boroughs.resize(boroughs.len().max(place + 1), 0);
        // 0 is none.
        boroughs[place] = known as i32 + 1;
    }
    ensure!(names.len() < BOROUGHS, "New York has {} boroughs", names.len());
    Ok(boroughs)
}

/// Trips in columns.
#[derive(Default)]
pub(super) struct Trips {
    pub(super) columns: [Vec<i32>; COLUMNS],
}

impl Trips {
    pub(super) fn view(&self) -> TripView<'_> {
        TripView { columns: self.columns.each_ref().map(Vec::as_slice) }
    }
}

/// Borrowed trips.
pub(super) struct TripView<'a> {
    pub(super) columns: [&'a [i32]; COLUMNS],
}

/// Counts and sums over trips.
#[derive(Clone, Copy, Far)]
pub(super) struct Tally {
    /// Trips by vendor and passengers, of which [`MISSING`] is the first.
    passengers: [[i64; PASSENGERS_MAX]; VENDORS],
    stored: [i64; 3],
    hours: [i64; 24],
    miles: i64,
    paid: i64,
    seconds: i64,
    seconds_min: i32,
    seconds_max: i32,
}

impl Tally {
    const NONE: Tally = Tally {
        passengers: [[0; PASSENGERS_MAX]; VENDORS],
        stored: [0; 3],
        hours: [0; 24],
        miles: 0,
        paid: 0,
        seconds: 0,
        seconds_min: i32::MAX,
        seconds_max: i32::MIN,
    };

    pub(super) fn sum<'t>(tallies: impl IntoIterator<Item = &'t Tally>) -> Tally {
        tallies.into_iter().fold(Tally::NONE, |mut all, more| {
            let counts = |tally: &mut Tally, add: &Tally| {
                let own = tally.passengers.as_flattened_mut().iter_mut();
                let own = own.chain(&mut tally.stored).chain(&mut tally.hours);
                let more = add.passengers.as_flattened().iter().chain(&add.stored).chain(&add.hours);
                own.zip(more).for_each(|(own, more)| *own += more);
            };
            counts(&mut all, more);
            all.miles += more.miles;
            all.paid += more.paid;
            all.seconds += more.seconds;
            all.seconds_min = all.seconds_min.min(more.seconds_min);
            all.seconds_max = all.seconds_max.max(more.seconds_max);
            all
        })
    }
}

/// By what trips are sorted.
#[derive(Clone, Copy, Far)]
pub(super) enum SortedBy {
    Seconds,
    MonthAndSeconds,
}

impl TripView<'_> {
    fn len(&self) -> usize {
        self.columns[0].len()
    }

    pub(super) fn tally(&self) -> Tally {
        let mut tally = Tally::NONE;
        let from_missing = |code: i32| (code - MISSING) as usize;
        for row in 0..self.len() {
            let value = |column: usize| self.columns[column][row];
            tally.passengers[from_missing(value(VENDOR))][from_missing(value(PASSENGERS))] += 1;
            tally.stored[from_missing(value(STORED))] += 1;
            tally.hours[value(HOUR) as usize] += 1;
            tally.miles += i64::from(value(MILES));
            tally.paid += i64::from(value(PAID));
            tally.seconds += i64::from(value(SECONDS));
            tally.seconds_min = tally.seconds_min.min(value(SECONDS));
            tally.seconds_max = tally.seconds_max.max(value(SECONDS));
        }
        tally
    }

    /// Returns what was paid for trips that took long.
    pub(super) fn paid_for_long(&self) -> Vec<i32> {
        let rows = self.columns[SECONDS].iter().zip(self.columns[PAID]);
        rows.filter(|(seconds, _)| **seconds >= LONG).map(|(_, paid)| *paid).collect()
    }

    /// Returns from where to where trips went, divided by that.
    pub(super) fn pairs(&self) -> [Vec<u32>; PARTS] {
        let mut parts = std::array::from_fn(|_| Vec::with_capacity(self.len() / PARTS * 5 / 4));
        for (from, to) in self.columns[FROM].iter().zip(self.columns[TO]) {
            let pair = from.cast_unsigned() << 16 | to.cast_unsigned();
            parts[mix(pair.into()) as usize % PARTS].push(pair);
        }
        parts
    }

    /// Returns what was paid by the borough of the start.
    pub(super) fn paid_by_borough(&self, boroughs: &[i32]) -> PaidByBorough {
        let mut paid = [0; BOROUGHS];
        for (from, cents) in self.columns[FROM].iter().zip(self.columns[PAID]) {
            let borough = boroughs.get(*from as usize).map_or(0, |borough| *borough as usize);
            paid[borough] += i64::from(*cents);
        }
        paid
    }

    fn key(&self, by: SortedBy, row: usize) -> u64 {
        let seconds = (i64::from(self.columns[SECONDS][row]) - i64::from(i32::MIN)).cast_unsigned();
        match by {
            SortedBy::Seconds => seconds,
            SortedBy::MonthAndSeconds => u64::from(self.columns[MONTH][row].cast_unsigned()) << u32::BITS | seconds,
        }
    }

    /// Returns some of the keys.
    pub(super) fn sample(&self, by: SortedBy) -> [u64; SAMPLES] {
        sorting::sample(self.len(), |row| self.key(by, row))
    }

    /// Returns the keys, divided into ranges and sorted in each.
    pub(super) fn ranges(&self, by: SortedBy, pivots: &Pivots<u64>) -> [Vec<u64>; PARTS] {
        sorting::ranges((0..self.len()).map(|row| self.key(by, row)), pivots)
    }
}

fn seconds_of(key: u64) -> f64 {
    (i64::from(key as u32) + i64::from(i32::MIN)) as f64
}

/// Returns how many pairs there are, each counted once.
pub(super) fn distinct<'a>(pairs: impl Iterator<Item = &'a [u32]>) -> usize {
    pairs.flatten().collect::<HashSet<_>>().len()
}

/// Answers to all questions.
pub(super) struct TripAnswers {
    pub(super) tally: Tally,
    /// Trips that took long, and what was paid for them.
    pub(super) long: (usize, i64),
    pub(super) pairs: usize,
    pub(super) paid: PaidByBorough,
}

/// Returns the middle of numbers in order.
fn median(keys: &[u64]) -> f64 {
    let [low, high] = [(keys.len() - 1) / 2, keys.len() / 2].map(|at| seconds_of(keys[at]));
    f64::midpoint(low, high)
}

impl TripAnswers {
    /// Says what was found, and how much of it is not what others counted. The keys are in order by seconds, and by month and
    /// seconds.
    pub(super) fn finish(&self, outcome: &mut Outcome, by_seconds: &[u64], by_month: &[u64]) -> Result<()> {
        let file = real::open(real::ANSWERS)?;
        let known: Value = serde_json::from_reader(file).context(real::ANSWERS)?;
        let known = &known["taxi"];
        let count = |name: &str, key: &str| known[name].get(key).map_or(0, |rows| rows.as_i64().unwrap_or(-1));
        let tally = &self.tally;
        let mut is_right = vec![
            by_seconds.is_sorted() && by_month.is_sorted(),
            by_seconds.len() == by_month.len() && known["rows"] == by_seconds.len(),
            known["distinct_PU_DO_pairs"] == self.pairs,
            self.paid.iter().sum::<i64>() == tally.paid,
            (self.long.0 as i64) < tally.hours.iter().sum(),
            known["duration_s"]["min"] == tally.seconds_min && known["duration_s"]["max"] == tally.seconds_max,
        ];
        let mut is_about = |found: f64, known: &Value, within: f64| {
            is_right.push(known.as_f64().is_some_and(|known| (found - known).abs() < within));
        };
        is_about(tally.miles as f64 / 100.0, &known["sum_trip_distance"], 0.005);
        is_about(tally.paid as f64 / 100.0, &known["sum_total_amount"], 0.005);
        is_about(tally.seconds as f64 / by_seconds.len() as f64, &known["duration_s"]["mean"], 1e-6);
        is_about(median(by_seconds), &known["duration_s"]["median"], 1e-9);
        for keys in by_month.chunk_by(|one, other| one >> u32::BITS == other >> u32::BITS) {
            let month = (keys[0] >> u32::BITS).to_string();
            is_about(median(keys), &known["median_duration_s_by_pickup_month"][month], 1e-9);
        }
        for (hour, rows) in tally.hours.iter().enumerate() {
            is_right.push(count("rows_by_pickup_hour", &hour.to_string()) == *rows);
        }
        for (flag, rows) in ["", "N", "Y"].into_iter().zip(tally.stored) {
            is_right.push(count("store_and_fwd_flag", flag) == rows);
        }
        let name = |code: usize| if code == 0 { String::new() } else { (code as i32 + MISSING).to_string() };
        for (vendor, by_passengers) in tally.passengers.iter().enumerate() {
            is_right.push(count("rows_by_VendorID", &name(vendor)) == by_passengers.iter().sum::<i64>());
            for (passengers, rows) in by_passengers.iter().enumerate() {
                let key = format!("{}/{}", name(vendor), name(passengers));
                is_right.push(count("passenger_count_by_VendorID", &key) == *rows);
            }
        }
        let words = [self.long.0 as u64, self.long.1.cast_unsigned(), self.pairs as u64];
        let words = words.into_iter().chain(self.paid.map(i64::cast_unsigned)).chain(by_month.iter().copied());
        let errors = is_right.iter().filter(|is_right| !**is_right).count();
        outcome.checked(words.fold(0, |hash, word| mix(hash ^ word)), errors as u64);
        Ok(())
    }
}
