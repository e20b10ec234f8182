//! Eight questions about a table of taxi trips, by a far frame. `bench/workloads/questions.py` asks the same ones in Python, of the same
//! file, and the answers must be the same.
//!
//! With `--columns FOLDER` and no pool, the program makes that file, and nothing else. Trips are made up, or with `real = 1` those of New
//! York ([`real`]).

use crate::measure::Outcome;
use crate::random::mix;
use crate::real;
use crate::{Options, figures_since};
use anyhow::{Context, Result, ensure};
use farfield_frame::arrow::array::{Array, AsArray};
use farfield_frame::arrow::compute::cast;
use farfield_frame::arrow::datatypes::{DataType, Float64Type};
use farfield_frame::{Agg, FarFrame, SortBy, column};
use std::fs::File;
use std::io::{BufRead, BufWriter, Seek, Write};
use std::path::Path;
use std::sync::Arc;

/// Columns of the table, and where they are in that of New York.
const COLUMNS: [(&str, usize); 9] = [
    ("VendorID", 0),
    ("lpep_pickup_datetime", 1),
    ("PULocationID", 5),
    ("DOLocationID", 6),
    ("passenger_count", 7),
    ("trip_distance", 8),
    ("fare_amount", 9),
    ("tip_amount", 12),
    ("total_amount", 16),
];
/// Name of the file.
const FILE: &str = "trips.csv";

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let rows = options.data_bytes() / (COLUMNS.len() as u64 * 8);
    let folder = options.columns.as_deref().context("--columns is missing")?;
    let mut outcome = Outcome::new();
    let Some(heap) = options.heap_with(0, options.data_bytes() / 4 * 11)?.map(Arc::new) else {
        outcome.phase("fill", rows, || write_table(&folder.join(FILE), rows, options))?;
        return Ok(outcome);
    };
    let trips = outcome.phase("fill", rows, || FarFrame::from_csv(&heap, folder.join(FILE)))?;
    ensure!(trips.rows() as u64 == rows, "{} rows, not {rows}", trips.rows());
    let before = heap.stats();
    let answers = outcome.phase("ask", rows, || ask(&trips))?;
    figures_since(&mut outcome, &before, &heap.stats(), rows, 0);
    outcome.checked(answers.iter().fold(0, |sum, answer| mix(sum ^ answer.to_bits())), 0);
    Ok(outcome)
}

fn write_table(path: &Path, rows: u64, options: &Options) -> Result<()> {
    let mut table = BufWriter::new(File::create(path)?);
    writeln!(table, "{}", COLUMNS.map(|(name, _)| name).join(","))?;
    let mut real = (options.real == 1).then(|| real::open(real::TRIPS)).transpose()?;
    let mut line = String::new();
    if let Some(real) = &mut real {
        real.read_line(&mut line)?; // The names of its columns.
    }
    for row in 0..rows {
        let Some(real) = &mut real else {
            write_made_up(&mut table, row, options.seed)?;
            continue;
        };
        line.clear();
        if real.read_line(&mut line)? == 0 {
            real.rewind()?;
            real.read_line(&mut line)?;
            line.clear();
            real.read_line(&mut line)?;
        }
        let fields: Vec<&str> = line.trim_end().split(',').collect();
        for (at, (name, index)) in COLUMNS.into_iter().enumerate() {
            let field = fields.get(index).with_context(|| format!("a line without {name}: {line:?}"))?;
            write!(table, "{}{field}", if at == 0 { "" } else { "," })?;
        }
        writeln!(table)?;
    }
    Ok(table.flush()?)
}

fn write_made_up(table: &mut impl Write, row: u64, seed: u64) -> Result<()> {
    let random = |kind: u64, below: u64| mix(row.wrapping_mul(16) + kind + (seed << 32)) % below;
    // Over a year, about in order, as records are written.
    let (month, day) = (1 + row / 8192 % 12, 1 + row / 512 % 28);
    let [hour, minute, second] = [(1, 24), (2, 60), (3, 60)].map(|(kind, below)| random(kind, below));
    let (miles, tip) = (random(4, 3000), random(5, 1000));
    let fare = 250 + miles * 2;
    let passengers = if random(6, 3) == 0 { String::new() } else { (1 + random(7, 6)).to_string() };
    let places = [random(8, 265) + 1, random(9, 265) + 1];
    let money = |cents: u64| format!("{}.{:02}", cents / 100, cents % 100);
    writeln!(
        table,
        "{},2020-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02},{},{},{passengers},{},{},{},{}",
        1 + random(10, 2),
        places[0],
        places[1],
        money(miles),
        money(fare),
        money(tip),
        money(fare + tip)
    )?;
    Ok(())
}

/// Asks all questions. The answers are numbers, row by row; -1 is null.
fn ask(trips: &FarFrame) -> Result<Vec<f64>> {
    let mut answers = Vec::new();
    let by_vendor = trips.group_by(&["VendorID", "passenger_count"])?.agg(&[Agg::rows().named("n")])?;
    tell(&by_vendor, &mut answers)?;

    tell_totals(trips, "trip_distance", &mut answers)?;

    let places = trips.group_by(&["PULocationID"])?.agg(&[
        Agg::rows().named("n"),
        Agg::mean("fare_amount").named("fare"),
        Agg::max("tip_amount").named("tip"),
    ])?;
    tell(&head(&places.sort(&[SortBy::descending("n"), SortBy::ascending("PULocationID")])?, 10)?, &mut answers)?;

    let far = column("trip_distance").more_than(10.0).and(column("fare_amount").more_than(40.0));
    tell_totals(&trips.matching(&far)?, "tip_amount", &mut answers)?;

    let paid = trips.select(&["tip_amount", "fare_amount"])?.matching(&column("fare_amount").more_than(0.0))?;
    let share = column("tip_amount") / column("fare_amount");
    tell_totals(&paid.with_values("share", &share)?, "share", &mut answers)?;

    for (name, share) in [("fare_amount", 0.9), ("trip_distance", 0.5)] {
        answers.push(trips.quantile(name, share)?.unwrap_or(-1.0));
    }

    let when = column("lpep_pickup_datetime");
    let autumn = when.clone().at_least("2020-09-01").and(when.less_than("2020-12-01"));
    let aggs = [Agg::rows().named("n"), Agg::mean("tip_amount").named("tip")];
    tell(&trips.matching(&autumn)?.group_by(&["DOLocationID"])?.agg(&aggs)?, &mut answers)?;

    let dear = trips.select(&["total_amount", "PULocationID", "DOLocationID", "trip_distance"])?;
    let by = [SortBy::descending("total_amount"), SortBy::ascending("PULocationID"), SortBy::ascending("DOLocationID")];
    tell(&head(&dear.sort(&by)?, 100)?, &mut answers)?;
    Ok(answers)
}

fn head(frame: &FarFrame, rows: usize) -> Result<FarFrame> {
    Ok(frame.range(0..rows.min(frame.rows()))?)
}

fn tell(frame: &FarFrame, answers: &mut Vec<f64>) -> Result<()> {
    for batch in frame.batches() {
        let batch = batch?;
        let columns: Vec<_> =
            batch.columns().iter().map(|column| cast(column, &DataType::Float64)).collect::<Result<_, _>>()?;
        for row in 0..batch.num_rows() {
            answers.extend(columns.iter().map(|column| match column.is_null(row) {
                true => -1.0,
                false => column.as_primitive::<Float64Type>().value(row),
            }));
        }
    }
    Ok(())
}

fn tell_totals(frame: &FarFrame, name: &str, answers: &mut Vec<f64>) -> Result<()> {
    let totals = frame.totals(name)?;
    let [mean, min, max] = [totals.mean, totals.min, totals.max].map(|number| number.unwrap_or(-1.0));
    answers.extend([totals.count as f64, totals.sum, mean, min, max]);
    Ok(())
}
