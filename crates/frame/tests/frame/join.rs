//! Are the pairs of a join those that a loop over the same rows finds?
//!
//! Danger: a pair that is there twice or not at all where frames were cut; a row without a partner that is lost or has a partner, too; nulls that are equal; one key that fills
//! everything. `FARFIELD_SEED` repeats the choices.

use crate::common::{MIB, PLANES, float, heap, random, some};
use arrow::array::*;
use arrow::datatypes::{DataType, Field, Float64Type, Schema, UInt32Type};
use farfield::Heap;
use farfield_frame::{CHUNK_ROWS, FarFrame, FrameError, Join};
use fastrand::Rng;
use std::collections::HashMap;
use std::sync::Arc;

/// More rows than are near in a table, also without those that have nulls, about a fifth.
const MANY: usize = 21 * CHUNK_ROWS + 1;

/// Strings and floating-point numbers: the keys of a row.
type Key = (Option<String>, Option<f64>);

fn frame(heap: &Arc<Heap>, number: &str, keys: &[Key]) -> FarFrame {
    let schema = Arc::new(Schema::new(vec![
        Field::new(number, DataType::UInt32, false),
        Field::new("zone", DataType::Utf8, true),
        Field::new("rate", DataType::Float64, true),
    ]));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..keys.len() as u32)),
        Arc::new(keys.iter().map(|(zone, _)| zone.clone()).collect::<StringArray>()),
        Arc::new(keys.iter().map(|(_, rate)| *rate).collect::<Float64Array>()),
    ];
    let batch = RecordBatch::try_new(schema.clone(), columns).unwrap();
    FarFrame::from_batches(heap, schema, [Ok(batch)]).unwrap()
}

/// What makes keys equal; `None`: it is equal to nothing.
fn known(key: &Key) -> Option<(String, u64)> {
    let rate = key.1?;
    Some((key.0.clone()?, if rate.is_nan() { f64::NAN.to_bits() } else { (rate + 0.0).to_bits() }))
}

fn pairs(left: &[Key], right: &[Key], keeps_left: bool) -> Vec<(u32, Option<u32>)> {
    let mut table: HashMap<(String, u64), Vec<u32>> = HashMap::new();
    for (row, key) in right.iter().enumerate() {
        if let Some(key) = known(key) {
            table.entry(key).or_default().push(row as u32);
        }
    }
    let mut pairs = Vec::new();
    for (row, key) in left.iter().enumerate() {
        let partners = known(key).and_then(|key| table.get(&key));
        pairs.extend(partners.into_iter().flatten().map(|partner| (row as u32, Some(*partner))));
        if partners.is_none() && keeps_left {
            pairs.push((row as u32, None));
        }
    }
    pairs.sort_unstable();
    pairs
}

fn check(heap: &Arc<Heap>, left: &[Key], right: &[Key]) {
    let (first, second) = (frame(heap, "first", left), frame(heap, "second", right));
    for keeps_left in [false, true] {
        let on = ["zone", "rate"];
        let joined = first.join(&second, &if keeps_left { Join::left(&on) } else { Join::inner(&on) }).unwrap();
        let names: Vec<String> = joined.schema().fields().iter().map(|field| field.name().clone()).collect();
        assert_eq!(names, ["first", "zone", "rate", "second"]);
        let mut found = Vec::new();
        for batch in joined.batches() {
            let batch = batch.unwrap();
            let (one, other) =
                (batch.column(0).as_primitive::<UInt32Type>(), batch.column(3).as_primitive::<UInt32Type>());
            let (zones, rates) = (batch.column(1).as_string::<i32>(), batch.column(2).as_primitive::<Float64Type>());
            for row in 0..batch.num_rows() {
                // Keys are those of the first frame, to the bit.
                let (zone, rate) = &left[one.value(row) as usize];
                assert_eq!(zones.is_valid(row).then(|| zones.value(row)), zone.as_deref());
                assert_eq!(rates.is_valid(row).then(|| rates.value(row).to_bits()), rate.map(f64::to_bits));
                found.push((one.value(row), other.is_valid(row).then(|| other.value(row))));
            }
        }
        found.sort_unstable();
        let expected = pairs(left, right, keeps_left);
        assert_eq!(found.len(), expected.len());
        assert!(found == expected);
    }
}

fn keys(random: &mut Rng, count: usize, zones: usize) -> Vec<Key> {
    let key = |random: &mut Rng| {
        let zone = format!("zone {}", random.usize(..zones));
        let rate = float(random).clamp(-1.0, 1.0);
        (some(random, zone), some(random, rate))
    };
    (0..count).map(|_| key(random)).collect()
}

#[test]
fn pairs_are_those_of_a_loop() {
    let mut random = random();
    for plane in PLANES {
        let heap = heap(plane, 4 * MIB);
        for (left, right) in [(0, 5), (5, 0), (300, 200), (CHUNK_ROWS, 7), (CHUNK_ROWS + 1, CHUNK_ROWS + 1)] {
            let (left, right) = (keys(&mut random, left, 200), keys(&mut random, right, 200));
            check(&heap, &left, &right);
        }
    }
}

#[test]
fn more_rows_than_a_table_has() {
    let mut random = random();
    let (left, right) = (keys(&mut random, CHUNK_ROWS + 9, 20_000), keys(&mut random, MANY, 20_000));
    check(&heap(PLANES[0], MIB), &left, &right);
}

#[test]
fn one_key_that_fills_everything() {
    let mut random = random();
    let one = (Some("Harlem".to_owned()), Some(f64::NAN));
    let mut right = vec![one.clone(); MANY];
    right[77] = (Some("Astoria".to_owned()), Some(-0.0));
    right[78] = (None, Some(1.0));
    let mut left = keys(&mut random, CHUNK_ROWS + 9, 3);
    left[5] = one.clone();
    left[CHUNK_ROWS + 3] = one;
    left[9] = (Some("Astoria".to_owned()), Some(0.0));
    check(&heap(PLANES[0], MIB), &left, &right);
}

#[test]
fn names_that_both_have() {
    let heap = heap(PLANES[0], MIB);
    let trips = FarFrame::from_csv_text(&heap, "zone,fare,note\n1,7.5,a\n2,8.5,b\n").unwrap();
    let zones = FarFrame::from_csv_text(&heap, "id,note,name\n1,c,Harlem\n1,d,Harlem\n").unwrap();
    let join = Join::left(&[]).on("zone", "id");
    assert!(matches!(trips.join(&zones, &join), Err(FrameError::BothHave { name }) if name == "note"));
    let joined = trips.join(&zones, &join.clone().suffix("_zone")).unwrap();
    let names: Vec<String> = joined.schema().fields().iter().map(|field| field.name().clone()).collect();
    assert_eq!((names.join(" ").as_str(), joined.rows()), ("zone fare note note_zone name", 3));
    assert!(matches!(trips.join(&zones, &join.suffix("")), Err(FrameError::SameName { .. })));
    assert!(matches!(trips.join(&zones, &Join::inner(&[])), Err(FrameError::NoKeys)));
    assert!(matches!(trips.join(&zones, &Join::inner(&["none"])), Err(FrameError::NoColumn { .. })));
    let wrong = trips.join(&zones, &Join::inner(&[]).on("zone", "name"));
    assert!(matches!(wrong, Err(FrameError::KeyTypes { .. })), "{wrong:?}");
}
