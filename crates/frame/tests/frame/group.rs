//! Do groups come to what a loop over the same rows says?
//!
//! Danger: a group that is there twice where rows were cut into parts; nulls that are counted; keys that are equal numbers and different bytes; a sum that is wrong and no
//! error. `FARFIELD_SEED` repeats the choices.

use crate::common::{MIB, PLANES, float, heap, near, random, some};
use arrow::array::*;
use arrow::datatypes::{DataType, Field, Float64Type, Int32Type, Int64Type, Schema, UInt64Type};
use farfield::Heap;
use farfield_frame::{Agg, CHUNK_ROWS, FarFrame, FrameError};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;

type Key = (Option<String>, Option<u64>, Option<i32>);
type Row = (Key, Option<f64>, Option<i64>, Option<String>);

/// Of floating-point numbers the bits, so that NaN equals NaN.
fn bits(value: Option<f64>) -> Option<u64> {
    value.map(|value| if value.is_nan() { f64::NAN.to_bits() } else { (value + 0.0).to_bits() })
}

fn frame(heap: &Arc<Heap>, rows: &[Row], floats: &[Option<f64>]) -> FarFrame {
    let field = |name: &str, data_type| Field::new(name, data_type, true);
    let schema = Arc::new(Schema::new(vec![
        field("zone", DataType::Utf8),
        field("rate", DataType::Float64),
        field("hour", DataType::Int32),
        field("fare", DataType::Float64),
        field("riders", DataType::Int64),
        field("note", DataType::Utf8),
    ]));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(rows.iter().map(|row| row.0.0.clone()).collect::<StringArray>()),
        Arc::new(floats.iter().copied().collect::<Float64Array>()),
        Arc::new(rows.iter().map(|row| row.0.2).collect::<Int32Array>()),
        Arc::new(rows.iter().map(|row| row.1).collect::<Float64Array>()),
        Arc::new(rows.iter().map(|row| row.2).collect::<Int64Array>()),
        Arc::new(rows.iter().map(|row| row.3.clone()).collect::<StringArray>()),
    ];
    let batch = RecordBatch::try_new(schema.clone(), columns).unwrap();
    FarFrame::from_batches(heap, schema, [Ok(batch)]).unwrap()
}

#[derive(Default)]
struct Model {
    rows: u64,
    fares: Vec<f64>,
    riders: Vec<i64>,
    notes: Vec<String>,
}

fn check(random: &mut Rng, heap: &Arc<Heap>, count: usize, hours: usize) {
    let (mut rows, mut floats): (Vec<Row>, Vec<Option<f64>>) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let zone = ["", "Astoria", "Harlem"][random.usize(..3)].to_owned();
        let rate = Some(float(random).clamp(-1.0, 1.0)).and_then(|rate| some(random, rate));
        let hour = random.usize(..hours) as i32;
        let key = (some(random, zone), bits(rate), some(random, hour));
        let fare = float(random);
        let riders = random.usize(..1000) as i64 - 500;
        let note = format!("note {}", random.usize(..100));
        rows.push((key, some(random, fare), some(random, riders), some(random, note)));
        floats.push(rate);
    }
    let far = frame(heap, &rows, &floats);
    let mut model: BTreeMap<Key, Model> = BTreeMap::new();
    for ((zone, rate, hour), fare, riders, note) in rows {
        let group = model.entry((zone, rate, hour)).or_default();
        group.rows += 1;
        group.fares.extend(fare);
        group.riders.extend(riders);
        group.notes.extend(note);
    }
    let what = [
        Agg::rows(),
        Agg::count("fare"),
        Agg::sum("fare"),
        Agg::mean("fare"),
        Agg::min("fare"),
        Agg::max("fare"),
        Agg::sum("riders").named("people"),
        Agg::mean("riders"),
        Agg::min("note"),
        Agg::max("note"),
        Agg::max("riders"),
    ];
    let groups = far.group_by(&["zone", "rate", "hour"]).unwrap().agg(&what).unwrap();
    assert_eq!(groups.rows(), model.len());
    let far = near(&groups);
    let column = |name: &str| far.column_by_name(name).unwrap_or_else(|| panic!("{name}"));
    let text = |name: &str, row: usize| column(name).as_string::<i32>().iter().nth(row).unwrap().map(str::to_owned);
    let number = |name: &str, row: usize| {
        let column = column(name).as_primitive::<Float64Type>();
        column.is_valid(row).then(|| column.value(row))
    };
    let whole = |name: &str, row: usize| {
        let column = column(name).as_primitive::<Int64Type>();
        column.is_valid(row).then(|| column.value(row))
    };
    let count = |name: &str, row: usize| column(name).as_primitive::<UInt64Type>().value(row);
    let hour = column("hour").as_primitive::<Int32Type>();
    let zones: Vec<Option<String>> =
        column("zone").as_string::<i32>().iter().map(|zone| zone.map(str::to_owned)).collect();
    assert!(zones.is_sorted());
    for (row, zone) in zones.iter().enumerate() {
        let key = (zone.clone(), bits(number("rate", row)), hour.is_valid(row).then(|| hour.value(row)));
        // Each is there once, because it is taken away.
        let group = model.remove(&key).unwrap_or_else(|| panic!("{key:?}"));
        assert_eq!((count("count", row), count("fare_count", row)), (group.rows, group.fares.len() as u64));
        let sum = (!group.fares.is_empty()).then(|| group.fares.iter().sum::<f64>());
        assert_eq!(bits(number("fare_sum", row)), bits(sum));
        assert_eq!(bits(number("fare_mean", row)), bits(sum.map(|sum| sum / group.fares.len() as f64)));
        let ordered = || group.fares.iter().copied().filter(|fare| !fare.is_nan());
        assert_eq!(number("fare_min", row).map(f64::to_bits), ordered().min_by(f64::total_cmp).map(f64::to_bits));
        assert_eq!(number("fare_max", row).map(f64::to_bits), ordered().max_by(f64::total_cmp).map(f64::to_bits));
        let people = (!group.riders.is_empty()).then(|| group.riders.iter().sum::<i64>());
        assert_eq!(whole("people", row), people);
        assert_eq!(number("riders_mean", row), people.map(|sum| sum as f64 / group.riders.len() as f64));
        assert_eq!(whole("riders_max", row), group.riders.iter().max().copied());
        if row < 300 {
            assert_eq!(text("note_min", row), group.notes.iter().min().cloned());
            assert_eq!(text("note_max", row), group.notes.iter().max().cloned());
        }
    }
    assert!(model.is_empty());
}

#[test]
fn groups_come_to_what_their_rows_do() {
    let mut random = random();
    for plane in PLANES {
        for count in [0, 1, CHUNK_ROWS - 1, 2 * CHUNK_ROWS + 3] {
            check(&mut random, &heap(plane, 16 * MIB), count, 3);
        }
    }
}

#[test]
fn more_groups_than_are_near() {
    let mut random = random();
    check(&mut random, &heap(PLANES[0], MIB), 6 * CHUNK_ROWS, 1_000_000);
}

#[test]
fn as_many_groups_as_rows() {
    // Parts of parts.
    let count = 40 * CHUNK_ROWS as u64;
    let key: ArrayRef =
        Arc::new(UInt64Array::from_iter_values((0..count).map(|row| row.wrapping_mul(0x9e37_79b9_7f4a_7c15))));
    let row: ArrayRef = Arc::new(UInt64Array::from_iter_values(0..count));
    let batch = RecordBatch::try_from_iter([("key", key), ("row", row)]).unwrap();
    let far = FarFrame::from_batches(&heap(PLANES[0], MIB), batch.schema(), [Ok(batch)]).unwrap();
    let groups = far.group_by(&["key"]).unwrap().agg(&[Agg::rows(), Agg::sum("row")]).unwrap();
    assert_eq!(groups.rows() as u64, count);
    assert_eq!(groups.totals("count").unwrap().max, Some(1.0));
    let mut before = None;
    for batch in groups.batches() {
        let batch = batch.unwrap();
        let column = |name: &str| batch.column_by_name(name).unwrap().as_primitive::<UInt64Type>().values().to_vec();
        for (key, row) in column("key").into_iter().zip(column("row_sum")) {
            assert_eq!(key, row.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            assert!(before < Some(key));
            before = Some(key);
        }
    }
}

#[test]
fn a_column_that_cannot_be_grouped_is_an_error_that_names_it() {
    let heap = heap(PLANES[0], MIB);
    let batch = RecordBatch::try_from_iter([
        ("zone", Arc::new(StringArray::from(vec!["a", "a", "b"])) as ArrayRef),
        ("big", Arc::new(Int64Array::from(vec![i64::MAX, 1, 2])) as ArrayRef),
    ])
    .unwrap();
    let far = FarFrame::from_batches(&heap, batch.schema(), [Ok(batch)]).unwrap();
    assert!(matches!(far.group_by(&["none"]), Err(FrameError::NoColumn { .. })));
    assert!(matches!(far.group_by(&[]), Err(FrameError::NoKeys)));
    let by = far.group_by(&["zone"]).unwrap();
    assert!(matches!(by.agg(&[Agg::sum("zone")]), Err(FrameError::Type { .. })));
    assert!(matches!(by.agg(&[Agg::rows(), Agg::rows()]), Err(FrameError::SameName { .. })));
    assert!(matches!(by.agg(&[Agg::sum("big")]), Err(FrameError::Arrow(_))));
    assert_eq!(by.agg(&[]).unwrap().rows(), 2);
}
