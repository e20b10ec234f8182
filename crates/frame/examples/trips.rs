//! Trips of taxis as a far frame, with 4 MiB near, and what an analyst asks of them: what their columns hold, which hours pay best, which trips were dear, and in which zone they began.
//!
//! `FARFIELD_DATA=DIR cargo run --release -p farfield-frame --example trips` reads the trips of New York's green taxis in that folder; without it some are made up.
//! `FARFIELD_POOL` is the pool's URL, `ram:` if there is none.

use arrow::array::{BooleanArray, Float64Array, RecordBatch};
use arrow::compute::and;
use arrow::compute::kernels::cmp::{gt, lt};
use arrow::compute::kernels::numeric::div;
use arrow::compute::kernels::temporal::{DatePart, date_part};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use arrow::util::display::array_value_to_string;
use farfield::Heap;
use farfield_frame::{Agg, FarFrame, Join, SortBy};
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

const TRIPS: &str = "nyc-green-taxi/green_tripdata_2020-04_2022-02.csv";
const ZONES: &str = "nyc-green-taxi/taxi_zone_centroids.csv";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = std::env::var("FARFIELD_POOL").unwrap_or_else(|_| "ram:".into());
    let heap = Arc::new(Heap::builder().near(4 << 20).near_max(4 << 20).far(2 << 30).pool(pool).build()?);
    let (trips, zones) = read(&heap)?;
    println!("{} trips", trips.rows());
    for line in trips.describe()? {
        print!("{:24}{:>10} nulls", line.name, line.nulls);
        match line.totals {
            Some(totals) => {
                println!(
                    "  mean {:?}, {:?} to {:?}, quartiles {:?}",
                    totals.mean, totals.min, totals.max, line.quartiles
                );
            }
            None => println!("  {}", line.data_type),
        }
    }

    // Fares by the hour of the day, of trips that cost something and not everything.
    let paid = trips.filter(&["fare_amount"], sensible)?;
    let hour = Field::new("hour", DataType::Int32, true);
    let timed =
        paid.with_column(hour, &["lpep_pickup_datetime"], |batch| date_part(batch.column(0), DatePart::Hour))?;
    let per_mile = Field::new("per_mile", DataType::Float64, true);
    let rated = timed
        .with_column(per_mile, &["fare_amount", "trip_distance"], |batch| div(batch.column(0), batch.column(1)))?;
    let hours = rated.group_by(&["hour"])?.agg(&[Agg::rows(), Agg::mean("fare_amount"), Agg::max("trip_distance")])?;
    show("hours that pay best", &hours.sort(&[SortBy::descending("fare_amount_mean")])?)?;

    let fair = rated.totals_in("per_mile", 0.0..1000.0)?;
    println!("on average {:.2} dollars a mile", fair.mean.unwrap_or(f64::NAN));

    // Where trips began, by the names of zones.
    let places = rated.group_by(&["PULocationID"])?.agg(&[Agg::rows(), Agg::sum("fare_amount")])?;
    let named = places.join(&zones, &Join::left(&[]).on("PULocationID", "LocationID"))?;
    show("zones that paid most", &named.sort(&[SortBy::descending("fare_amount_sum")])?)?;
    println!("{} far faults", heap.stats().misses);
    Ok(())
}

fn sensible(batch: &RecordBatch) -> Result<BooleanArray, ArrowError> {
    let limit = Float64Array::new_scalar;
    and(&gt(batch.column(0), &limit(0.0))?, &lt(batch.column(0), &limit(500.0))?)
}

/// The first rows.
fn show(title: &str, frame: &FarFrame) -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<String> = frame.schema().fields().iter().map(|field| field.name().clone()).collect();
    println!("{title}: {}", names.join(", "));
    for batch in frame.range(0..frame.rows().min(5))?.batches() {
        let batch = batch?;
        for row in 0..batch.num_rows() {
            let values = batch.columns().iter().map(|column| array_value_to_string(column, row));
            println!("  {}", values.collect::<Result<Vec<_>, _>>()?.join(", "));
        }
    }
    Ok(())
}

fn read(heap: &Arc<Heap>) -> Result<(FarFrame, FarFrame), Box<dyn std::error::Error>> {
    if let Some(folder) = std::env::var_os("FARFIELD_DATA") {
        let file = |name| Path::new(&folder).join(name);
        return Ok((
            FarFrame::from_csv(heap, file(TRIPS))?,
            FarFrame::from_csv(heap, file(ZONES))?.select(&["LocationID", "zone"])?,
        ));
    }
    println!("FARFIELD_DATA is not set: the trips are made up");
    let zones = "LocationID,zone\n1,Astoria\n2,Harlem\n3,Jamaica Bay\n";
    Ok((FarFrame::from_csv_text(heap, &made_up(100_000))?, FarFrame::from_csv_text(heap, zones)?))
}

fn made_up(rows: usize) -> String {
    let mut text =
        String::from("VendorID,lpep_pickup_datetime,PULocationID,fare_amount,trip_distance,store_and_fwd_flag\n");
    for row in 0..rows {
        let miles = (row * 7919 % 3000) as f64 / 100.0 + 0.1;
        let (day, hour, place) = (1 + row % 28, row * 31 % 24, 1 + row * 17 % 4);
        let _ = writeln!(
            text,
            "{},2020-04-{day:02}T{hour:02}:30:00,{place},{:.2},{miles:.2},N",
            1 + row % 2,
            2.5 + 2.5 * miles
        );
    }
    text
}
