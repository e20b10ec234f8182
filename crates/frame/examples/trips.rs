//! Trips of taxis as a far frame, with 4 MiB near: what its columns hold, the dear ones among them, and a column more.
//!
//! `FARFIELD_DATA=DIR cargo run --release -p farfield-frame --example trips` reads the trips of New York's green taxis in that folder; without it some are made up.
//! `FARFIELD_POOL` is the pool's URL, `ram:` if there is none.

use arrow::array::Float64Array;
use arrow::compute::kernels::{cmp::gt, numeric::div};
use arrow::datatypes::{DataType, Field};
use farfield::Heap;
use farfield_frame::FarFrame;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

const TRIPS: &str = "nyc-green-taxi/green_tripdata_2020-04_2022-02.csv";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = std::env::var("FARFIELD_POOL").unwrap_or_else(|_| "ram:".into());
    let heap = Arc::new(Heap::builder().near(4 << 20).near_max(4 << 20).far(2 << 30).pool(pool).build()?);
    let trips = match std::env::var_os("FARFIELD_DATA") {
        Some(folder) => FarFrame::from_csv(&heap, Path::new(&folder).join(TRIPS))?,
        None => {
            println!("FARFIELD_DATA is not set: the trips are made up");
            FarFrame::from_csv_text(&heap, &made_up(100_000))?
        }
    };
    println!("{} trips", trips.rows());
    for line in trips.describe()? {
        print!("{:24}{:>10} nulls", line.name, line.nulls);
        match line.totals {
            Some(totals) => println!("  mean {:?}, {:?} to {:?}", totals.mean, totals.min, totals.max),
            None => println!("  {}", line.data_type),
        }
    }
    let dear = trips.filter(&["fare_amount"], |batch| gt(batch.column(0), &Float64Array::new_scalar(50.0)))?;
    println!("{} of them for more than 50 dollars", dear.rows());
    let field = Field::new("fare_per_mile", DataType::Float64, true);
    let rated =
        dear.with_column(field, &["fare_amount", "trip_distance"], |batch| div(batch.column(0), batch.column(1)))?;
    let fair = rated.totals_in("fare_per_mile", 0.0..1000.0)?;
    println!("on average {:.2} dollars a mile, {} far faults", fair.mean.unwrap_or(f64::NAN), heap.stats().misses);
    Ok(())
}

fn made_up(rows: usize) -> String {
    let mut text = String::from("VendorID,fare_amount,trip_distance,store_and_fwd_flag\n");
    for row in 0..rows {
        let miles = (row * 7919 % 3000) as f64 / 100.0 + 0.1;
        let _ = writeln!(text, "{},{:.2},{miles:.2},N", 1 + row % 2, 2.5 + 2.5 * miles);
    }
    text
}
