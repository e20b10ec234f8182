//! Does a frame from a Parquet file have the rows that were written?
//!
//! Danger: groups of rows that end inside a chunk; nulls and dictionaries that become other values; a damaged file that stops the program, or is taken for a shorter one.

#![cfg(feature = "parquet")]

use arrow::array::*;
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Field, Int32Type, Schema, TimeUnit};
use farfield::Heap;
use farfield_frame::{CHUNK_ROWS, FarFrame, FrameError};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const ROWS: usize = 5 * CHUNK_ROWS + 77;

fn heap() -> Arc<Heap> {
    Arc::new(Heap::builder().near(1 << 20).near_max(1 << 20).far(256 << 20).build().unwrap())
}

/// A path that is free again afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        Scratch(std::env::temp_dir().join(format!("farfield-frame-{}-{name}.parquet", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn write(path: &Path, batch: &RecordBatch, compression: Compression) {
    // Groups of rows end where no chunk does.
    let properties =
        WriterProperties::builder().set_compression(compression).set_max_row_group_row_count(Some(10_001)).build();
    let mut writer =
        ArrowWriter::try_new(std::fs::File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

/// What files of trips have.
fn trips() -> RecordBatch {
    let zones = ["Astoria", "", "Harlem", "Jamaica Bay"];
    let some = |row: usize| !row.is_multiple_of(7);
    let zone = |row: usize| some(row).then(|| zones[row * 31 % zones.len()]);
    let when = |row: usize| some(row + 2).then_some(1_600_000_000_000_000 + row as i64);
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("VendorID", Arc::new((0..ROWS).map(|row| some(row).then_some(row as i64)).collect::<Int64Array>())),
        ("pickup", Arc::new((0..ROWS).map(when).collect::<TimestampMicrosecondArray>())),
        ("fare", Arc::new((0..ROWS).map(|row| Some(row as f64 / 4.0)).collect::<Float64Array>())),
        ("flag", Arc::new((0..ROWS).map(zone).collect::<StringArray>())),
        ("large", Arc::new((0..ROWS).map(zone).collect::<LargeStringArray>())),
        ("view", Arc::new((0..ROWS).map(zone).collect::<StringViewArray>())),
        ("zone", Arc::new((0..ROWS).map(zone).collect::<DictionaryArray<Int32Type>>())),
        ("paid", Arc::new((0..ROWS).map(|row| Some(row.is_multiple_of(3))).collect::<BooleanArray>())),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true))).unwrap()
}

#[test]
fn the_rows_of_a_file_come_in() {
    let (heap, trips) = (heap(), trips());
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY] {
        let path = Scratch::new("trips");
        write(&path.0, &trips, compression);
        let frame = FarFrame::from_parquet(&heap, &path.0).unwrap();
        assert_eq!(frame.rows(), ROWS);
        let batches: Vec<RecordBatch> = frame.batches().map(Result::unwrap).collect();
        let near = concat_batches(&frame.schema(), &batches).unwrap();
        for (far, written) in near.columns().iter().zip(trips.columns()) {
            let expected = match written.data_type() {
                DataType::LargeUtf8 | DataType::Utf8View | DataType::Dictionary(..) => {
                    cast(written, &DataType::Utf8).unwrap()
                }
                _ => written.clone(),
            };
            assert!(*far == expected, "{compression:?} {}", written.data_type());
        }
        let time = DataType::Timestamp(TimeUnit::Microsecond, None);
        assert_eq!(frame.schema().field_with_name("pickup").unwrap().data_type(), &time);
    }
}

#[test]
fn a_file_without_rows_has_its_columns() {
    let path = Scratch::new("empty");
    write(&path.0, &trips().slice(0, 0), Compression::SNAPPY);
    let frame = FarFrame::from_parquet(&heap(), &path.0).unwrap();
    assert_eq!((frame.rows(), frame.schema().fields().len()), (0, 8));
}

#[test]
fn what_cannot_be_read_is_an_error_by_name() {
    let (heap, path) = (heap(), Scratch::new("wrong"));
    assert!(matches!(FarFrame::from_parquet(&heap, "/nowhere/trips.parquet"), Err(FrameError::File { .. })));
    std::fs::write(&path.0, "zone,fare\nHarlem,7.5\n").unwrap();
    assert!(matches!(FarFrame::from_parquet(&heap, &path.0), Err(FrameError::Parquet { .. })));
    let field = Field::new("price", DataType::Decimal128(10, 2), true);
    let prices = Decimal128Array::from(vec![1234]).with_precision_and_scale(10, 2).unwrap();
    let batch = RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![Arc::new(prices)]).unwrap();
    write(&path.0, &batch, Compression::SNAPPY);
    match FarFrame::from_parquet(&heap, &path.0) {
        Err(FrameError::Type { name, .. }) => assert_eq!(name, "price"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_lost_a_part_is_no_shorter_one() {
    let path = Scratch::new("cut");
    write(&path.0, &trips(), Compression::SNAPPY);
    let whole = std::fs::read(&path.0).unwrap();
    for cut in [whole.len() - 1, whole.len() / 2, 9, 0] {
        std::fs::write(&path.0, &whole[..cut]).unwrap();
        assert!(matches!(FarFrame::from_parquet(&heap(), &path.0), Err(FrameError::Parquet { .. })), "{cut}");
    }
}
