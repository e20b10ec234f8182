//! Are strings those that were put in, whether there are few kinds of them or many?
//!
//! Danger: a row that gets another's string; strings that are lost where kinds become too many; nulls that become the first kind. `FARFIELD_SEED` repeats the choices.

use crate::common::{MIB, PLANES, heap, is_deep, near, random, same};
use arrow::array::*;
use arrow::compute::filter_record_batch;
use arrow::compute::kernels::cmp::eq;
use arrow::datatypes::{DataType, Field, Schema, UInt64Type};
use farfield_frame::{Agg, CHUNK_ROWS, FarFrame, SortBy};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;

const ROWS: usize = 5 * CHUNK_ROWS + 77;

/// Strings of so many kinds, of which some come late, and so that there are nulls from some row on.
fn strings(random: &mut Rng, kinds: usize, length: usize, nulls_from: usize) -> StringArray {
    let rows = 0..ROWS;
    let string = |row: usize| {
        let kind = random.usize(..1 + kinds * (row / CHUNK_ROWS + 1) / (ROWS / CHUNK_ROWS + 1));
        let is_null = row >= nulls_from && random.usize(..5) == 0;
        // One is empty.
        (!is_null).then(|| if kind == 0 { String::new() } else { format!("{kind:0length$}") })
    };
    rows.map(string).collect()
}

fn check(strings: StringArray, plane: farfield::Plane) {
    let row: ArrayRef = Arc::new(UInt64Array::from_iter_values(0..ROWS as u64));
    let schema =
        Schema::new(vec![Field::new("row", DataType::UInt64, false), Field::new("text", DataType::Utf8, true)]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![row, Arc::new(strings.clone())]).unwrap();
    let far = FarFrame::from_batches(&heap(plane, MIB), batch.schema(), [Ok(batch.clone())]).unwrap();
    same(&near(&far), &batch);
    // Few rows, which come by themselves, of two chunks.
    let (start, end) = (CHUNK_ROWS as u64 - 100, CHUNK_ROWS as u64 + 100);
    let few = far.scan(&["row", "text"]).unwrap().within("row", start..end).unwrap();
    let few = FarFrame::from_batches(&heap(plane, MIB), batch.schema(), few.map(|batch| Ok(batch.unwrap()))).unwrap();
    same(&near(&few), &batch.slice(start as usize, (end - start) as usize));
    // Those that equal one, which may be none.
    let first = strings.iter().flatten().nth(ROWS / 2).unwrap();
    for one in [first, "", "no such string"] {
        let found = far.scan(&["row", "text"]).unwrap().equal_to("text", one).unwrap();
        let found = FarFrame::from_batches(&heap(plane, MIB), batch.schema(), found.map(|batch| Ok(batch.unwrap())));
        let right = eq(&strings, &StringArray::new_scalar(one)).unwrap();
        same(&near(&found.unwrap()), &filter_record_batch(&batch, &right).unwrap());
    }
    // Groups, and the order of strings, which is not that in which they came.
    let mut right: BTreeMap<Option<&str>, (u64, u64)> = BTreeMap::new();
    for (row, string) in strings.iter().enumerate() {
        let (count, sum) = right.entry(string).or_default();
        (*count, *sum) = (*count + 1, *sum + row as u64);
    }
    let groups = near(&far.group_by(&["text"]).unwrap().agg(&[Agg::rows(), Agg::sum("row")]).unwrap());
    let numbers = |column: usize| groups.column(column).as_primitive::<UInt64Type>().values().to_vec();
    let found = groups.column(0).as_string::<i32>().iter().zip(numbers(1).into_iter().zip(numbers(2)));
    assert!(found.eq(right.iter().map(|(string, found)| (*string, *found))));
    let sorted = near(&far.sort(&[SortBy::ascending("text").nulls_first()]).unwrap());
    assert!(sorted.column(1).as_string::<i32>().iter().is_sorted());
    assert!(far.ends("text").unwrap().is_none());
}

#[test]
fn strings_of_few_kinds_and_of_many_are_those_that_were_put_in() {
    let mut random = random();
    for (number, (kinds, length, nulls_from)) in [
        (1, 0, ROWS),
        (3, 0, 0),
        // More than a memory server says of at a time.
        (3000, 3, ROWS / 2),
        (1000, 3, ROWS / 2),
        // Too many, from some chunk on, or from the first.
        (12_000, 3, 2 * CHUNK_ROWS + 5),
        (12_000, 3, ROWS),
        (10_000, 3, 0),
        (1 << 20, 3, 0),
        // Too long.
        (300, 1000, ROWS / 3),
    ]
    .into_iter()
    .enumerate()
    // The CI tier tries every other one.
    .filter(|(number, _)| is_deep() || number % 2 == 0)
    {
        check(strings(&mut random, kinds, length, nulls_from), PLANES[number % 3]);
    }
}

#[test]
fn strings_that_are_all_null_have_no_kind() {
    let batch = RecordBatch::try_new(
        Arc::new(Schema::new(vec![Field::new("text", DataType::Utf8, true)])),
        vec![Arc::new(StringArray::new_null(ROWS)) as ArrayRef],
    );
    let batch = batch.unwrap();
    let far = FarFrame::from_batches(&heap(PLANES[0], MIB), batch.schema(), [Ok(batch.clone())]).unwrap();
    same(&near(&far), &batch);
    assert!(far.scan(&["text"]).unwrap().equal_to("text", "").unwrap().next().is_none());
    let groups = near(&far.group_by(&["text"]).unwrap().agg(&[Agg::rows()]).unwrap());
    assert_eq!((groups.num_rows(), groups.column(0).null_count()), (1, 1));
}
