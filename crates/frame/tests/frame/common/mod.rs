//! What the tests of frames share: chance, heaps, and rows that are compared.

use arrow::array::*;
use arrow::compute::concat_batches;
use arrow::datatypes::Float64Type;
use farfield::{Heap, Plane};
use farfield_frame::{CHUNK_ROWS, FarFrame};
use fastrand::Rng;
use std::sync::Arc;

pub(crate) const PLANES: [Plane; 3] = [Plane::Page, Plane::Object, Plane::Hybrid];
pub(crate) const MIB: u64 = 1 << 20;

/// Returns a generator whose seed is `FARFIELD_SEED`, or the time; the seed is printed.
pub(crate) fn random() -> Rng {
    let given = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok());
    let time = || std::time::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64);
    let seed = given.unwrap_or_else(time);
    eprintln!("FARFIELD_SEED={seed}");
    Rng::with_seed(seed)
}

/// Returns the value, or nothing in a tenth of the calls.
pub(crate) fn some<T>(random: &mut Rng, value: T) -> Option<T> {
    (random.u8(..10) > 0).then_some(value)
}

pub(crate) fn heap(plane: Plane, near: u64) -> Arc<Heap> {
    Arc::new(Heap::builder().near(near).near_max(near).far(256 * MIB).plane(plane).build().unwrap())
}

pub(crate) fn near(frame: &FarFrame) -> RecordBatch {
    let batches: Vec<RecordBatch> = frame.batches().map(Result::unwrap).collect();
    assert!(batches.iter().rev().skip(1).all(|batch| batch.num_rows() == CHUNK_ROWS));
    concat_batches(&frame.schema(), &batches).unwrap()
}

/// Equal, and NaN equals NaN, as it does for nobody else.
pub(crate) fn same(far: &RecordBatch, near: &RecordBatch) {
    assert_eq!((far.num_rows(), far.num_columns()), (near.num_rows(), near.num_columns()));
    for (one, other) in far.columns().iter().zip(near.columns()) {
        assert_eq!(one.data_type(), other.data_type());
        match (one.as_primitive_opt::<Float64Type>(), other.as_primitive_opt::<Float64Type>()) {
            (Some(one), Some(other)) => {
                let bits = |array: &Float64Array| array.iter().map(|value| value.map(f64::to_bits)).collect::<Vec<_>>();
                assert!(bits(one) == bits(other));
            }
            _ => assert!(one == other, "{:?}", one.data_type()),
        }
    }
}

/// A floating-point number, often one that others have too, sometimes a special one.
pub(crate) fn float(random: &mut Rng) -> f64 {
    match random.usize(..20) {
        0 => f64::NAN,
        1 => -0.0,
        2 => 0.0,
        3 => f64::NEG_INFINITY,
        4 => -f64::NAN,
        _ => random.usize(..100) as f64 / 4.0 - 7.0,
    }
}

/// Returns whether this is the deep tier.
pub(crate) fn is_deep() -> bool {
    std::env::var_os("FARFIELD_DEEP").is_some()
}
