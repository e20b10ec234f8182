//! Does a frame in far memory say what Arrow says of the same batches in plain memory?
//!
//! Danger: rows lost or doubled where chunks meet; nulls, empty strings and NaN that are taken for something else; a wrong answer only when
//! most is far. `FARFIELD_SEED` repeats the choices.

use crate::common::{MIB, PLANES, heap, is_deep, near, random, same, some};
use arrow::array::*;
use arrow::compute::kernels::cmp::gt;
use arrow::compute::kernels::numeric::add;
use arrow::compute::{cast, concat_batches, filter_record_batch};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef, TimeUnit};
use farfield::{Heap, Plane};
use farfield_frame::{CHUNK_ROWS, FarFrame, FrameError, Totals};
use fastrand::Rng;
use std::sync::Arc;

fn schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, true);
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        field("fare", DataType::Float64),
        field("zone", DataType::Utf8),
        field("paid", DataType::Boolean),
        field("when", DataType::Timestamp(TimeUnit::Second, None)),
        Field::new("small", DataType::UInt8, false),
        Field::new("ratio", DataType::Float64, false),
        field("day", DataType::Date32),
    ]))
}

fn batch(random: &mut Rng, rows: usize) -> RecordBatch {
    let word = |random: &mut Rng| "ä mile".repeat(random.usize(..5));
    let number = |random: &mut Rng| match random.usize(..50) {
        0 => f64::NAN,
        1 => -0.0,
        _ => random.usize(..100_000) as f64 / 100.0 - 300.0,
    };
    let columns: Vec<ArrayRef> = vec![
        Arc::new((0..rows).map(|_| Some(random.usize(..1 << 40) as i64 - (1 << 39))).collect::<Int64Array>()),
        Arc::new(
            (0..rows).map(|_| Some(number(random)).and_then(|value| some(random, value))).collect::<Float64Array>(),
        ),
        Arc::new((0..rows).map(|_| Some(word(random)).and_then(|value| some(random, value))).collect::<StringArray>()),
        Arc::new(
            (0..rows)
                .map(|_| Some(random.usize(..2) == 0).and_then(|value| some(random, value)))
                .collect::<BooleanArray>(),
        ),
        Arc::new((0..rows).map(|row| some(random, row as i64)).collect::<TimestampSecondArray>()),
        Arc::new((0..rows).map(|_| Some(random.usize(..256) as u8)).collect::<UInt8Array>()),
        Arc::new((0..rows).map(|_| Some(number(random))).collect::<Float64Array>()),
        Arc::new((0..rows).map(|row| Some(row as i32)).collect::<Date32Array>()),
    ];
    RecordBatch::try_new(schema(), columns).unwrap()
}

/// The same rows, as a frame and near.
fn twins(random: &mut Rng, heap: &Arc<Heap>, rows: usize) -> (FarFrame, RecordBatch) {
    let mut batches = Vec::new();
    let mut left = rows;
    while left > 0 {
        let now = (1 + random.usize(..3 * CHUNK_ROWS)).min(left);
        // Slices, so that nothing begins where a buffer or a byte of bits begins.
        batches.push(batch(random, now + 5).slice(3, now));
        left -= now;
    }
    let far = FarFrame::from_batches(heap, schema(), batches.iter().cloned().map(Ok)).unwrap();
    (far, concat_batches(&schema(), &batches).unwrap())
}

/// A loop over the values of an array that are not null.
fn totals(array: &ArrayRef, keep: impl Fn(f64) -> bool) -> Totals {
    let numbers = cast(array, &DataType::Float64).unwrap();
    let numbers: Vec<f64> = numbers.as_primitive::<Float64Type>().iter().flatten().filter(|n| keep(*n)).collect();
    let sum: f64 = numbers.iter().sum();
    let some = || numbers.iter().copied().filter(|number| !number.is_nan());
    let mean = (!numbers.is_empty()).then(|| sum / numbers.len() as f64);
    Totals {
        count: numbers.len() as u64,
        sum,
        mean,
        min: some().min_by(f64::total_cmp),
        max: some().max_by(f64::total_cmp),
    }
}

/// By sorting: the smallest that this share does not exceed.
fn quantile(array: &ArrayRef, share: f64) -> Option<f64> {
    let numbers = cast(array, &DataType::Float64).unwrap();
    let mut numbers: Vec<f64> =
        numbers.as_primitive::<Float64Type>().iter().flatten().filter(|n| !n.is_nan()).collect();
    numbers.sort_by(f64::total_cmp);
    let rank = (numbers.len() as f64 * share).ceil() as usize;
    numbers.get(rank.max(1) - 1).copied()
}

/// Sums are exact far, and rounded at each step near.
fn about(far: Totals, near: Totals) {
    let close =
        |one: f64, other: f64| one.is_nan() && other.is_nan() || (one - other).abs() <= 1e-9 * one.abs().max(1e-3);
    assert_eq!((far.count, far.min, far.max), (near.count, near.min, near.max));
    assert!(close(far.sum, near.sum), "{} {}", far.sum, near.sum);
    assert!(close(far.mean.unwrap_or(0.0), near.mean.unwrap_or(0.0)), "{:?} {:?}", far.mean, near.mean);
}

fn check(random: &mut Rng, heap: &Arc<Heap>, rows: usize) {
    let (far, plain) = twins(random, heap, rows);
    assert_eq!(far.rows(), rows);
    same(&near(&far), &plain);

    let limit = Float64Array::new_scalar(random.usize(..1000) as f64 - 300.0);
    let kept = far.filter(&["fare"], |batch| gt(batch.column(0), &limit)).unwrap();
    same(&near(&kept), &filter_record_batch(&plain, &gt(plain.column(1), &limit).unwrap()).unwrap());

    let start = random.usize(..rows + 1);
    let end = start + random.usize(..rows - start + 1);
    same(&near(&far.range(start..end).unwrap()), &plain.slice(start, end - start));

    let sum = |batch: &RecordBatch, one: usize, other: usize| add(batch.column(one), batch.column(other));
    let field = Field::new("both", DataType::Float64, true);
    let more = far.with_column(field, &["ratio", "fare"], |batch| sum(batch, 0, 1)).unwrap();
    let both = near(&more.select(&["both"]).unwrap());
    let made = RecordBatch::try_new(both.schema(), vec![sum(&plain, 6, 1).unwrap()]).unwrap();
    same(&both, &made);
    assert_eq!(more.schema().fields().len(), 9);

    let middle = random.usize(..1000) as f64 - 300.0;
    for (index, name) in [(0, "id"), (1, "fare"), (5, "small"), (6, "ratio")] {
        about(far.totals(name).unwrap(), totals(plain.column(index), |_| true));
        about(far.totals_in(name, middle..).unwrap(), totals(plain.column(index), |number| number >= middle));
    }
    for (line, array) in far.describe().unwrap().iter().zip(plain.columns()) {
        assert_eq!(line.nulls, array.null_count() as u64);
        assert_eq!(line.totals.is_some(), array.data_type().is_numeric(), "{}", line.name);
        if array.data_type().is_numeric() {
            let ranked = [0.25, 0.5, 0.75].map(|share| quantile(array, share));
            assert_eq!(line.quartiles.map(|found| found.map(Some)).unwrap_or_default(), ranked, "{}", line.name);
        }
    }
}

#[test]
fn far_frames_say_what_arrow_says() {
    let mut random = random();
    for plane in PLANES {
        let heap = heap(plane, 16 * MIB);
        for rows in [0, 1, 63, 64, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 2 * CHUNK_ROWS] {
            check(&mut random, &heap, rows);
        }
        let rows = random.usize(..5 * CHUNK_ROWS);
        check(&mut random, &heap, rows);
    }
}

#[test]
fn a_tenth_near_is_enough() {
    let mut random = random();
    // The CI tier tries one.
    let planes = if is_deep() { &PLANES[..] } else { &PLANES[..1] };
    for plane in planes.iter().copied() {
        // 45 bytes and a dozen of text to a row: nine times what is near, and twice that with what is made of it.
        check(&mut random, &heap(plane, MIB), 20 * CHUNK_ROWS + 7);
    }
}

#[test]
fn nulls_that_begin_late_are_the_only_ones() {
    let heap = heap(Plane::Page, 4 * MIB);
    let schema = Arc::new(Schema::new(vec![Field::new("n", DataType::Int32, true)]));
    let values = |rows: std::ops::Range<i32>| rows.map(|row| (row != 20_000).then_some(row)).collect::<Int32Array>();
    let batches =
        [0..9000, 9000..30_000].map(|rows| RecordBatch::try_new(schema.clone(), vec![Arc::new(values(rows))]));
    let frame = FarFrame::from_batches(&heap, schema.clone(), batches).unwrap();
    assert_eq!(near(&frame).column(0).as_ref(), &values(0..30_000) as &dyn Array);
    assert_eq!(frame.totals("n").unwrap().count, 29_999);
}

#[test]
fn csv_comes_in_with_its_types() {
    let heap = heap(Plane::Page, 4 * MIB);
    // Integers that turn out to be none, far behind; a field in quotes; empty fields.
    let mut text = "vendor,fare,when,flag,place\n1,7.5,2020-04-01T00:44:02,true,\"Astoria, Queens\"\n".to_owned();
    text.push_str(&"2,12,2020-04-01T00:45:00,false,Harlem\n".repeat(3 * CHUNK_ROWS));
    text.push_str("1.0,,,,\n");
    let frame = FarFrame::from_csv_text(&heap, &text).unwrap();
    let types: Vec<DataType> = frame.schema().fields().iter().map(|field| field.data_type().clone()).collect();
    let time = DataType::Timestamp(TimeUnit::Second, None);
    assert_eq!(types, [DataType::Float64, DataType::Float64, time, DataType::Boolean, DataType::Utf8]);
    assert_eq!(frame.rows(), 3 * CHUNK_ROWS + 2);
    let nulls: Vec<u64> = frame.describe().unwrap().iter().map(|line| line.nulls).collect();
    assert_eq!(nulls[..4], [0, 1, 1, 1]);
    let first = frame.range(0..1).unwrap();
    assert_eq!(near(&first).column(4).as_string::<i32>().value(0), "Astoria, Queens");
    let path = std::env::temp_dir().join(format!("farfield-frame-{}.csv", std::process::id()));
    std::fs::write(&path, &text).unwrap();
    let read = FarFrame::from_csv(&heap, &path);
    std::fs::remove_file(&path).unwrap();
    same(&near(&read.unwrap()), &near(&frame));
}

#[test]
fn a_column_that_is_always_empty_comes_in() {
    let frame = FarFrame::from_csv_text(&heap(Plane::Page, 4 * MIB), "fare,fee\n1.5,\n2.5,\n").unwrap();
    let nulls: Vec<u64> = frame.describe().unwrap().iter().map(|line| line.nulls).collect();
    assert_eq!((frame.rows(), nulls), (2, vec![0, 2]));
}

#[test]
fn a_wrong_line_is_named() {
    let heap = heap(Plane::Page, 4 * MIB);
    let schema =
        Arc::new(Schema::new(vec![Field::new("a", DataType::Int64, true), Field::new("b", DataType::Utf8, true)]));
    let lines = "1,x\n".repeat(20_000);
    let check = |text: &str, expected: u64| match FarFrame::from_csv_with(&heap, schema.clone(), text.as_bytes()) {
        Err(FrameError::Csv { line, why }) => assert_eq!(line, expected, "{why}"),
        other => panic!("{other:?}"),
    };
    check("a,b\n1,x\ntwo,y\n", 3);
    check(&format!("a,b\n{lines}two,y\n"), 20_002);
    check("a,b\n1,x\nline 9,y\n", 3);
    check("a,b\n1,x\n2,y,z\n", 3);
    match FarFrame::from_csv_text(&heap, "a,b\n1,x\n2\n") {
        Err(FrameError::Csv { line: 3, .. }) => {}
        other => panic!("{other:?}"),
    }
    let nowhere = FarFrame::from_csv(&heap, "/nowhere/trips.csv");
    assert!(matches!(nowhere, Err(FrameError::File { .. })), "{nowhere:?}");
}

#[test]
fn an_impossible_operation_is_an_error_that_names_its_column() {
    let heap = heap(Plane::Page, 4 * MIB);
    let (frame, _) = twins(&mut Rng::with_seed(7), &heap, 10);
    assert!(matches!(frame.totals("none"), Err(FrameError::NoColumn { .. })));
    assert!(matches!(frame.totals("zone"), Err(FrameError::Type { .. })));
    assert!(matches!(frame.range(4..11), Err(FrameError::NoRows { end: 11, rows: 10 })));
    assert!(matches!(frame.select(&["id", "id"]), Err(FrameError::SameName { .. })));
    let short = frame.filter(&["id"], |_| Ok(BooleanArray::from(vec![true])));
    assert!(matches!(short, Err(FrameError::Lengths { rows: 10, values: 1 })));
    let field = Field::new("both", DataType::Int8, true);
    let wrong = frame.with_column(field, &["id"], |batch| Ok(batch.column(0).clone()));
    assert!(matches!(wrong, Err(FrameError::Arrow(_))));
    let twice =
        frame.with_column(Field::new("id", DataType::Int64, false), &["id"], |batch| Ok(batch.column(0).clone()));
    assert!(matches!(twice, Err(FrameError::SameName { .. })));
    let item = Field::new("item", DataType::Int8, true);
    let odd = Arc::new(Schema::new(vec![Field::new("odd", DataType::ListView(Arc::new(item)), true)]));
    assert!(matches!(FarFrame::from_batches(&heap, odd, []), Err(FrameError::NotKept { .. })));
}
