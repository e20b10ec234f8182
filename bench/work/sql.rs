//! What an analyst asks of a table of taxi trips in SQL: groups by names of places, rows of one place, ranges, rows that are dear, expressions, pairs of places, a join.
//!
//! In plain memory DataFusion has the rows as Arrow's arrays; in a far heap they are a far frame, and with `--offload all` the session is the one that has groups and sums found
//! where the columns are. Trips are made up, or with `real = 1` those of a file ([`real`]). Money and miles are whole cents and hundredths, so that sums are exact in any order.

use crate::measure::Outcome;
use crate::random::{Random, mix};
use crate::real::{self, Rows};
use crate::{OffloadName, Options, figures_since};
use anyhow::{Context, Result, ensure};
use farfield::Heap;
use farfield_frame::FarFrame;
use farfield_frame::arrow::array::{ArrayRef, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray};
use farfield_frame::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use farfield_frame::arrow::error::ArrowError;
use farfield_frame::arrow::util::pretty::pretty_format_batches;
use farfield_os::process::now_ns;
use farfield_sql::FarTable;
use farfield_sql::datafusion::catalog::TableProvider;
use farfield_sql::datafusion::datasource::MemTable;
use farfield_sql::datafusion::prelude::SessionContext;
use std::io::BufRead;
use std::sync::Arc;
use tokio::runtime::Builder;

/// Bytes of a row in plain memory: five numbers, the vendor, and two names of 16 bytes with their offsets.
const ROW_BYTES: u64 = 5 * 8 + 4 + 2 * 20;
/// Rows that are made at a time.
const BATCH: usize = 8192;
/// Places that are made up: as many as New York has, in as many boroughs.
const PLACES: u64 = 265;
const BOROUGHS: u64 = 6;

/// Each question, and the figure that its time belongs to.
const QUESTIONS: [(&str, &str); 8] = [
    ("groups_s", "select pickup, count(*), sum(fare), avg(tip), max(miles) from trips group by pickup order by pickup"),
    (
        "groups_s",
        "select passengers, count(*), avg(fare) from trips where miles between 300 and 900 group by passengers order by passengers",
    ),
    ("search_s", "select count(*), sum(fare), avg(tip) from trips where dropoff = 'Astoria'"),
    (
        "search_s",
        "select pickup, dropoff, started, fare from trips where fare > 13000 order by fare desc, started, pickup, dropoff limit 100",
    ),
    ("rows_s", "select vendor, sum(fare + tip) from trips group by vendor order by vendor"),
    (
        "rows_s",
        "select pickup, dropoff, count(*) as trips from trips group by pickup, dropoff order by trips desc, pickup, dropoff limit 100",
    ),
    (
        "rows_s",
        "select borough, count(*), sum(tip) from trips join places on pickup = place group by borough order by borough",
    ),
    ("rows_s", "select count(distinct dropoff) from trips where tip > 0"),
];

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let rows = (options.data_bytes() / ROW_BYTES) as usize;
    let mut outcome = Outcome::new();
    let mut trips = Trips::new(options, rows)?;
    match options.heap(0)?.map(Arc::new) {
        None => {
            let batches = outcome.phase("fill", rows as u64, || trips.by_ref().collect::<Result<Vec<_>, _>>())?;
            // One for each thread.
            let (one, other) = batches.split_at(batches.len() / 2);
            let table = MemTable::try_new(schema(), vec![one.to_vec(), other.to_vec()])?;
            drop(batches);
            ask(&mut outcome, rows, SessionContext::new(), Arc::new(table), &trips)?;
        }
        Some(heap) => {
            let frame = outcome.phase("fill", rows as u64, || filled(&heap, &mut trips))?;
            let session = match options.offload {
                OffloadName::None => SessionContext::new(),
                OffloadName::All => farfield_sql::context(),
                other => anyhow::bail!("--offload must be none or all for sql, not {other:?}"),
            };
            let before = heap.stats();
            ask(&mut outcome, rows, session, Arc::new(FarTable::new(frame)), &trips)?;
            figures_since(&mut outcome, &before, &heap.stats(), rows as u64, 0);
        }
    }
    Ok(outcome)
}

fn filled(heap: &Arc<Heap>, trips: &mut Trips) -> Result<FarFrame> {
    Ok(FarFrame::from_batches(heap, schema(), trips)?)
}

/// Asks all questions, one after the other.
fn ask(
    outcome: &mut Outcome,
    rows: usize,
    session: SessionContext,
    table: Arc<dyn TableProvider>,
    trips: &Trips,
) -> Result<()> {
    session.register_table("trips", table)?;
    session.register_table(
        "places",
        Arc::new(MemTable::try_new(trips.places.schema(), vec![vec![trips.places.clone()]])?),
    )?;
    let runtime = Builder::new_multi_thread().build()?;
    let mut checksum = 0;
    let mut seconds = std::collections::BTreeMap::new();
    let answers = outcome.phase("ask", rows as u64, || {
        let answer = |(number, (figure, sql)): (usize, (&str, &str))| {
            let started = now_ns();
            let answer = runtime.block_on(async { session.sql(sql).await?.collect().await });
            let ns = now_ns() - started;
            *seconds.entry(figure.to_owned()).or_insert(0) += ns;
            seconds.insert(format!("question_{number}_s"), ns);
            answer.with_context(|| sql.to_owned())
        };
        (1..).zip(QUESTIONS).map(answer).collect::<Result<Vec<_>>>()
    })?;
    for (figure, ns) in seconds {
        outcome.figure(&figure, ns as f64 / 1e9);
    }
    let mut errors = 0;
    for answer in &answers {
        let text = pretty_format_batches(answer)?.to_string();
        checksum = text.bytes().fold(checksum, |sum, byte| mix(sum ^ u64::from(byte)));
        errors += u64::from(answer.iter().all(|batch| batch.num_rows() == 0));
    }
    // Whoever answers, the first question counts all trips, and so does the one with the join.
    let counted = |answer: usize| {
        let counts = answers[answer].iter().map(|batch| {
            let counts = batch.column(1).as_any().downcast_ref::<Int64Array>();
            counts.map_or(0, |counts| counts.values().iter().sum::<i64>())
        });
        counts.sum::<i64>() as usize
    };
    errors += u64::from(counted(0) != rows) + u64::from(counted(6) != rows);
    outcome.checked(checksum, errors);
    Ok(())
}

fn schema() -> SchemaRef {
    let field = |name, data_type| Field::new(name, data_type, false);
    Arc::new(Schema::new(vec![
        field("vendor", DataType::Int32),
        field("started", DataType::Int64),
        field("pickup", DataType::Utf8),
        field("dropoff", DataType::Utf8),
        field("passengers", DataType::Int64),
        field("miles", DataType::Float64),
        field("fare", DataType::Float64),
        field("tip", DataType::Float64),
    ]))
}

/// A trip as numbers: vendor, start, places, passengers, miles, fare, tip.
type Trip = [f64; 8];

/// Trips, a batch at a time.
struct Trips {
    made: usize,
    rows: usize,
    seed: u64,
    real: Option<Rows<std::io::BufReader<std::fs::File>, 8>>,
    /// Names, by number; and the borough of each.
    names: Vec<String>,
    places: RecordBatch,
}

impl Trips {
    fn new(options: &Options, rows: usize) -> Result<Trips> {
        let is_real = options.real == 1;
        let names = if is_real { real_places()? } else { (0..PLACES).map(place).collect() };
        let field = |name| Field::new(name, DataType::Utf8, false);
        let schema = Schema::new(vec![field("place"), field("borough")]);
        let column = |of: fn(&(String, String)) -> &str| -> ArrayRef {
            Arc::new(StringArray::from_iter_values(names.iter().map(of)))
        };
        let places =
            RecordBatch::try_new(Arc::new(schema), vec![column(|(name, _)| name), column(|(_, borough)| borough)])?;
        let real = is_real.then(|| real::open(real::TRIPS)).transpose()?;
        Ok(Trips {
            made: 0,
            rows,
            seed: options.seed,
            real: real.map(|file| Rows::new(file, real::TRIP_PLACES)),
            names: names.into_iter().map(|(name, _)| name).collect(),
            places,
        })
    }

    fn next_trip(&mut self) -> Result<Trip> {
        let Some(rows) = &mut self.real else { return Ok(made_up(self.made as u64, self.seed)) };
        let mut trip = rows.next()?;
        real::in_hundredths(&mut trip[5..]);
        let places = self.names.len() as f64;
        ensure!(
            trip[2..4].iter().all(|place| (0.0..places).contains(place)),
            "trip {} is of no known place",
            self.made
        );
        Ok(trip)
    }

    fn batch(&mut self) -> Result<RecordBatch> {
        let count = BATCH.min(self.rows - self.made);
        let mut trips = Vec::with_capacity(count);
        for _ in 0..count {
            trips.push(self.next_trip()?);
            self.made += 1;
        }
        let numbers = |column: usize| trips.iter().map(move |trip| trip[column]);
        let words = |column| -> ArrayRef {
            Arc::new(Int64Array::from_iter_values(numbers(column).map(|number| number as i64)))
        };
        let floats = |column| -> ArrayRef { Arc::new(Float64Array::from_iter_values(numbers(column))) };
        let names = |column| -> ArrayRef {
            Arc::new(StringArray::from_iter_values(numbers(column).map(|number| &self.names[number as usize])))
        };
        let vendors: ArrayRef = Arc::new(Int32Array::from_iter_values(numbers(0).map(|number| number as i32)));
        let columns = vec![vendors, words(1), names(2), names(3), words(4), floats(5), floats(6), floats(7)];
        Ok(RecordBatch::try_new(schema(), columns)?)
    }
}

impl Iterator for Trips {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        (self.made < self.rows).then(|| self.batch().map_err(|error| ArrowError::ExternalError(error.into())))
    }
}

/// The name of a place that is made up, and its borough. One has the name that is asked for.
fn place(number: u64) -> (String, String) {
    let name = if number == 7 { "Astoria".to_owned() } else { format!("Neighbourhood {number:03}") };
    (name, format!("Borough {}", number % BOROUGHS))
}

/// Places of New York by their numbers: of those that have none, too.
fn real_places() -> Result<Vec<(String, String)>> {
    let mut places: Vec<(String, String)> =
        (0..=PLACES).map(|number| (format!("Place {number}"), "Unknown".into())).collect();
    for line in real::open(real::PLACES)?.lines().skip(1) {
        let line = line?;
        let mut fields = line.split(',');
        let mut next = || fields.next().with_context(|| format!("no place: {line:?}"));
        let (number, borough, name) = (next()?.parse::<usize>()?, next()?, next()?);
        *places.get_mut(number).with_context(|| format!("no place: {line:?}"))? = (name.into(), borough.into());
    }
    // Names of places are not unique, and a join is to find each trip once.
    let mut seen = std::collections::BTreeSet::new();
    for (number, (name, _)) in places.iter_mut().enumerate() {
        if !seen.insert(name.clone()) {
            *name = format!("{name} {number}");
        }
    }
    Ok(places)
}

/// Most trips are short, and some places are busier than others.
fn made_up(row: u64, seed: u64) -> Trip {
    let mut random = Random::new(mix(row) ^ seed);
    let started = 1_585_699_200 + row / 4 + random.below(600);
    let mut place = || random.below(PLACES).min(random.below(PLACES)) as f64;
    let (pickup, dropoff) = (place(), place());
    let miles = (random.below(60) * random.below(60)) as f64;
    let fare = 250.0 + 4.0 * miles;
    let tip = random.below(500).saturating_sub(200) as f64;
    [(1 + random.below(2)) as f64, started as f64, pickup, dropoff, (1 + random.below(6)) as f64, miles, fare, tip]
}
