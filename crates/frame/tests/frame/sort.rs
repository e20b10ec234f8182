//! Are rows sorted as Arrow sorts them in plain memory?
//!
//! Danger: equal rows that change places; nulls, NaN and −0 at the wrong end; rows that are lost where runs and chunks end; an order that is right only as long as
//! all is near. `FARFIELD_SEED` repeats the choices.

use crate::common::{MIB, PLANES, float, heap, is_deep, near, random, same, some};
use arrow::array::*;
use arrow::compute::{SortColumn, SortOptions, concat_batches, lexsort_to_indices, take_record_batch};
use arrow::datatypes::{DataType, Field, Schema};
use farfield::Heap;
use farfield_frame::{CHUNK_ROWS, FarFrame, FrameError, SortBy};
use fastrand::Rng;
use std::sync::Arc;

/// Chunks of a run.
const RUN_ROWS: usize = 16 * CHUNK_ROWS;
const NAMES: [&str; 4] = ["zone", "fare", "hour", "paid"];

/// Few values, so that many rows are equal; `row` says which was which.
fn rows(random: &mut Rng, count: usize) -> RecordBatch {
    let schema = Schema::new(vec![
        Field::new("row", DataType::UInt64, false),
        Field::new("zone", DataType::Utf8, true),
        Field::new("fare", DataType::Float64, true),
        Field::new("hour", DataType::Int32, false),
        Field::new("paid", DataType::Boolean, true),
    ]);
    let word =
        |random: &mut Rng| ["", "b", "ba", "ä", "long enough to be more than one block of bytes"][random.usize(..5)];
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt64Array::from_iter_values(0..count as u64)),
        Arc::new((0..count).map(|_| Some(word(random)).and_then(|word| some(random, word))).collect::<StringArray>()),
        Arc::new(
            (0..count).map(|_| Some(float(random)).and_then(|value| some(random, value))).collect::<Float64Array>(),
        ),
        Arc::new((0..count).map(|_| Some(random.usize(..24) as i32 - 12)).collect::<Int32Array>()),
        Arc::new(
            (0..count)
                .map(|_| Some(random.usize(..2) == 0).and_then(|value| some(random, value)))
                .collect::<BooleanArray>(),
        ),
    ];
    RecordBatch::try_new(Arc::new(schema), columns).unwrap()
}

/// What Arrow makes of it. Its order of equal rows is its own: what they were before makes it stable.
fn sorted(batch: &RecordBatch, by: &[(&str, SortOptions)]) -> RecordBatch {
    let column = |name: &str, options| SortColumn { values: batch.column_by_name(name).unwrap().clone(), options };
    let columns = by.iter().map(|(name, options)| column(name, Some(*options)));
    let columns: Vec<SortColumn> = columns.chain([column("row", None)]).collect();
    take_record_batch(batch, &lexsort_to_indices(&columns, None).unwrap()).unwrap()
}

fn check(random: &mut Rng, heap: &Arc<Heap>, count: usize) {
    let plain = rows(random, count);
    let far = FarFrame::from_batches(heap, plain.schema(), [Ok(plain.clone())]).unwrap();
    let mut by: Vec<(&str, SortOptions)> = Vec::new();
    for _ in 0..1 + random.usize(..3) {
        let options = SortOptions { descending: random.usize(..2) == 0, nulls_first: random.usize(..2) == 0 };
        by.push((NAMES[random.usize(..NAMES.len())], options));
    }
    let order = |(name, options): &(&str, SortOptions)| {
        let by = if options.descending { SortBy::descending(*name) } else { SortBy::ascending(*name) };
        if options.nulls_first { by.nulls_first() } else { by }
    };
    let order: Vec<SortBy> = by.iter().map(order).collect();
    same(&near(&far.sort(&order).unwrap()), &sorted(&plain, &by));
    // The frame itself is what it was.
    same(&near(&far), &plain);
}

#[test]
fn rows_come_in_the_order_that_arrow_says() {
    let mut random = random();
    for plane in PLANES {
        let heap = heap(plane, 16 * MIB);
        for count in [0, 1, 2, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS + 7] {
            check(&mut random, &heap, count);
        }
    }
}

#[test]
fn runs_are_merged() {
    let mut random = random();
    // One run, two with one row in the second, and several, of which a ninth is near.
    // The CI tier tries the last.
    let counts = [RUN_ROWS, RUN_ROWS + 1, 2 * RUN_ROWS + CHUNK_ROWS + 3];
    for count in counts.into_iter().skip(if is_deep() { 0 } else { 2 }) {
        check(&mut random, &heap(PLANES[count % 3], MIB), count);
    }
}

#[test]
fn sorting_by_nothing_changes_nothing() {
    let plain = rows(&mut Rng::with_seed(7), 100);
    let far = FarFrame::from_batches(&heap(PLANES[0], MIB), plain.schema(), [Ok(plain.clone())]).unwrap();
    same(&near(&far.sort(&[]).unwrap()), &concat_batches(&plain.schema(), [&plain]).unwrap());
    assert!(matches!(far.sort(&[SortBy::ascending("none")]), Err(FrameError::NoColumn { .. })));
}
