//! Does a frame from a Parquet file have the rows that were written?
//!
//! Danger: groups of rows that end inside a chunk; nulls and dictionaries that become other values; a damaged file that stops the program, or is taken for a shorter one.

use arrow::array::*;
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Decimal128Type, Field, Float64Type, Int32Type, TimeUnit};
use farfield::Heap;
use farfield_frame::{Agg, CHUNK_ROWS, FarFrame, FrameError, SortBy};
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
fn an_unreadable_parquet_file_is_an_error_that_names_it() {
    let (heap, path) = (heap(), Scratch::new("wrong"));
    assert!(matches!(FarFrame::from_parquet(&heap, "/nowhere/trips.parquet"), Err(FrameError::File { .. })));
    std::fs::write(&path.0, "zone,fare\nHarlem,7.5\n").unwrap();
    assert!(matches!(FarFrame::from_parquet(&heap, &path.0), Err(FrameError::Parquet { .. })));
}

fn read_back(frame: &FarFrame) -> RecordBatch {
    let batches: Vec<RecordBatch> = frame.batches().map(Result::unwrap).collect();
    concat_batches(&frame.schema(), &batches).unwrap()
}

#[test]
fn lists_structs_and_maps_come_in() {
    let (heap, path) = (heap(), Scratch::new("list"));
    let mut stops = ListBuilder::new(Int32Builder::new());
    let mut fees = MapBuilder::new(None, StringBuilder::new(), Float64Builder::new());
    for row in 0..ROWS {
        for stop in 0..row % 3 {
            stops.values().append_option((stop + row % 2 > 0).then_some(stop as i32));
            fees.keys().append_value(["toll", "tip"][stop]);
            fees.values().append_value(row as f64 / 4.0);
        }
        stops.append(row % 5 != 0);
        fees.append(row % 7 != 0).unwrap();
    }
    let trips = trips();
    let names = trips.schema();
    let places = StructArray::try_from(vec![("flag", trips.column(3).clone()), ("fare", trips.column(2).clone())]);
    let nested: [ArrayRef; 3] = [Arc::new(stops.finish()), Arc::new(fees.finish()), Arc::new(places.unwrap())];
    let columns = trips.columns().iter().chain(&nested).cloned();
    let names = names.fields().iter().map(|field| field.name().as_str()).chain(["stops", "fees", "place"]);
    let batch = RecordBatch::try_from_iter_with_nullable(names.zip(columns).map(|(name, array)| (name, array, true)));
    write(&path.0, &batch.unwrap(), Compression::SNAPPY);
    let read = read_back(&FarFrame::from_parquet(&heap, &path.0).unwrap());
    for (read, written) in read.columns()[8..].iter().zip(&nested) {
        assert_eq!(read, written);
    }
    // In another order than that of the file.
    let frame = FarFrame::from_parquet_columns(&heap, &path.0, &["place", "VendorID", "stops"]).unwrap();
    assert_eq!(frame.rows(), ROWS);
    let read = read_back(&frame);
    assert_eq!((read.column(0), read.column(1), read.column(2)), (&nested[2], trips.column(0), &nested[0]));
    match FarFrame::from_parquet_columns(&heap, &path.0, &["fare", "fares"]) {
        Err(FrameError::NoColumn { name }) => assert_eq!(name, "fares"),
        other => panic!("{other:?}"),
    }
    assert_eq!(FarFrame::from_parquet_columns(&heap, &path.0, &[]).unwrap().rows(), ROWS);
}

#[test]
fn a_column_that_frames_do_not_keep_hides_no_other() {
    let (heap, path) = (heap(), Scratch::new("views"));
    let views = ListViewArray::new(
        Arc::new(Field::new("item", DataType::Int32, true)),
        vec![0; ROWS].into(),
        vec![1; ROWS].into(),
        Arc::new(Int32Array::from(vec![7])),
        None,
    );
    let columns: [(&str, ArrayRef); 2] = [("stops", Arc::new(views)), ("fare", trips().column(2).clone())];
    write(&path.0, &RecordBatch::try_from_iter(columns).unwrap(), Compression::SNAPPY);
    match FarFrame::from_parquet(&heap, &path.0) {
        Err(error @ FrameError::NotKept { .. }) => {
            let text = error.to_string();
            assert!(text.contains("\"stops\"") && text.contains("from_parquet_columns"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    let wrong = FarFrame::from_parquet_columns(&heap, &path.0, &["fare", "stops"]);
    assert!(matches!(wrong, Err(FrameError::NotKept { .. })));
    assert_eq!(FarFrame::from_parquet_columns(&heap, &path.0, &["fare"]).unwrap().rows(), ROWS);
}

/// Values that only Arrow understands: they come back as they were, are sorted, and are keys; decimal numbers are added up to the last digit.
#[test]
fn decimal_numbers_and_bytes_come_in() {
    let (heap, path) = (heap(), Scratch::new("decimal"));
    let some = |row: usize| !row.is_multiple_of(7);
    // More than 64 bits.
    let unit = 10i128.pow(20);
    let price = |row: usize| some(row).then_some((row as i128 - 1000) * unit + row as i128);
    let bytes = |row: usize| some(row).then(|| vec![row as u8; row % 5]);
    let prices: Decimal128Array = (0..ROWS).map(price).collect();
    let short: Decimal128Array = (0..ROWS).map(|row| some(row).then_some(row as i128 * 101)).collect();
    let fixed = (0..ROWS).map(|row| some(row).then_some([row as u8; 16]));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("kind", Arc::new((0..ROWS).map(|row| Some(row as i32 % 3)).collect::<Int32Array>())),
        ("price", Arc::new(prices.with_precision_and_scale(38, 4).unwrap())),
        ("short", Arc::new(short.with_precision_and_scale(12, 2).unwrap())),
        ("bytes", Arc::new((0..ROWS).map(bytes).collect::<BinaryArray>())),
        ("large", Arc::new((0..ROWS).map(bytes).collect::<LargeBinaryArray>())),
        ("fixed", Arc::new(FixedSizeBinaryArray::try_from_sparse_iter_with_size(fixed, 16).unwrap())),
    ];
    let columns = columns.into_iter().map(|(name, array)| (name, array, true));
    let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    write(&path.0, &batch, Compression::SNAPPY);
    let frame = FarFrame::from_parquet(&heap, &path.0).unwrap();
    let read = read_back(&frame);
    for (far, written) in read.columns().iter().zip(batch.columns()) {
        let expected = cast(written, far.data_type()).unwrap();
        assert!(*far == expected, "{}", written.data_type());
    }
    let nulls = (0..ROWS).filter(|row| !some(*row)).count();
    assert_eq!(frame.nulls("price").unwrap(), nulls);
    let sorted = read_back(&frame.sort(&[SortBy::descending("price").nulls_first()]).unwrap());
    let sorted = sorted.column(1).as_primitive::<Decimal128Type>();
    assert_eq!((sorted.null_count(), sorted.value(nulls)), (nulls, price(ROWS - 1).unwrap()));
    // Rows that are picked one by one.
    let found = frame.scan(&["price", "fixed", "bytes"]).unwrap();
    let picked = found.filter(&["short"], |batch| {
        let is_picked = |number: Option<i128>| Some(number.is_some_and(|number| number % (101 * 5000) == 101));
        Ok(batch.column(0).as_primitive::<Decimal128Type>().iter().map(is_picked).collect())
    });
    let picked: Vec<RecordBatch> = picked.unwrap().map(Result::unwrap).collect();
    let rows: Vec<usize> = (0..ROWS).filter(|row| some(*row) && row % 5000 == 1).collect();
    let prices: Vec<i128> =
        picked.iter().flat_map(|batch| batch.column(0).as_primitive::<Decimal128Type>().values().to_vec()).collect();
    assert_eq!(prices, rows.iter().map(|row| price(*row).unwrap()).collect::<Vec<_>>());
    // Sums of groups, and keys of all these types.
    let groups = frame.group_by(&["kind"]).unwrap();
    let sums = read_back(&groups.agg(&[Agg::sum("short"), Agg::mean("short"), Agg::max("price")]).unwrap());
    assert_eq!(sums.schema().field(1).data_type(), &DataType::Decimal128(38, 2));
    for kind in 0..3 {
        let of = (0..ROWS).filter(|row| some(*row) && row % 3 == kind);
        let sum: i128 = of.clone().map(|row| row as i128 * 101).sum();
        assert_eq!(sums.column(1).as_primitive::<Decimal128Type>().value(kind), sum);
        let mean = sum as f64 / 100.0 / of.clone().count() as f64;
        assert!((sums.column(2).as_primitive::<Float64Type>().value(kind) / mean - 1.0).abs() < 1e-12);
        assert_eq!(sums.column(3).as_primitive::<Decimal128Type>().value(kind), of.filter_map(price).max().unwrap());
    }
    assert_eq!(frame.group_by(&["price"]).unwrap().agg(&[Agg::rows()]).unwrap().rows(), ROWS - nulls + 1);
    assert_eq!(frame.group_by(&["fixed", "bytes"]).unwrap().agg(&[Agg::rows()]).unwrap().rows(), 256 * 5 + 1);
    let totals = frame.totals("short").unwrap();
    let sum: i128 = (0..ROWS).filter(|row| some(*row)).map(|row| row as i128 * 101).sum();
    assert!((totals.sum / (sum as f64 / 100.0) - 1.0).abs() < 1e-12, "{totals:?}");
    assert!(matches!(frame.quantile("short", 0.5), Err(FrameError::Type { .. })));
    assert!(matches!(frame.scan(&[]).unwrap().equal_to("bytes", "a"), Err(FrameError::Type { .. })));
    assert_eq!(frame.describe().unwrap().len(), 6);
}

#[test]
fn a_sum_of_too_many_digits_is_an_error() {
    let most = 10i128.pow(38) - 1;
    let numbers = Decimal128Array::from(vec![most; 2]).with_precision_and_scale(38, 0).unwrap();
    let columns: [(&str, ArrayRef); 2] = [("kind", Arc::new(Int32Array::from(vec![1, 1]))), ("n", Arc::new(numbers))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let frame = FarFrame::from_batches(&heap(), batch.schema(), [Ok(batch)]).unwrap();
    let groups = frame.group_by(&["kind"]).unwrap();
    assert!(matches!(groups.agg(&[Agg::sum("n")]), Err(FrameError::Arrow(_))));
    assert_eq!(groups.agg(&[Agg::max("n")]).unwrap().rows(), 1);
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
