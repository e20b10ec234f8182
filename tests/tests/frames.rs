//! Are rows of a far frame found where they are, and are they those that a plain comparison keeps? Are tables that are made of it the same whoever keeps their bytes?
//!
//! Danger: a chunk that is passed over; rows that a server finds by another order of numbers; values of other rows where only a few come near.
//! `FARFIELD_SEED` repeats the choices.

use farfield::collections::CONDITIONS_MAX;
use farfield::{Heap, Plane};
use farfield_frame::arrow::array::*;
use farfield_frame::arrow::compute::kernels::cmp::eq;
use farfield_frame::arrow::compute::kernels::numeric::sub;
use farfield_frame::arrow::compute::{
    DatePart, cast, concat_batches, date_part, max as arrow_max, min as arrow_min, take_record_batch,
};
use farfield_frame::arrow::datatypes::{
    DataType, Date32Type, Field, Float64Type, Int32Type, Int64Type, Schema, SchemaRef, UInt8Type, UInt64Type,
};
use farfield_frame::arrow::util::display::array_value_to_string;
use farfield_frame::{Agg, CHUNK_ROWS, FarFrame, FrameError, Join, SortBy};
use farfield_server::{Config, Server};
use farfield_tests::{MIB, PATIENCE, Scratch, deep, project, seeded, shared_data, tier};
use farfield_wic::Registry;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

const NEAR: u64 = 2 * MIB;
const TRIPS: usize = 17 * CHUNK_ROWS + 77;
const GROUPED: usize = 3 * CHUNK_ROWS + 77;

fn serve(scratch: &Scratch, name: &str, functions: Registry) -> (Server, String) {
    let url = format!("unix:{}", scratch.path().join(name).display());
    let config = Config { listen: vec![url.parse().unwrap()], functions, call_within: PATIENCE, ..Config::default() };
    (Server::start(config).unwrap(), url)
}

/// Heaps whose server runs functions, whose server does not, and that have none.
fn heaps(scratch: &Scratch) -> (Vec<Server>, Vec<Arc<Heap>>) {
    let (able, dumb) = (serve(scratch, "able", Registry::standard()), serve(scratch, "dumb", Registry::new()));
    let builder = || Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).patience(PATIENCE);
    let heaps = [
        builder().plane(Plane::Page).pool(&able.1),
        builder().plane(Plane::Hybrid).pool(&able.1),
        builder().plane(Plane::Object).pool(&dumb.1),
        builder(),
    ];
    (vec![able.0, dumb.0], heaps.into_iter().map(|heap| Arc::new(heap.build().unwrap())).collect())
}

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("row", DataType::Int32, false),
        Field::new("id", DataType::Int64, false),
        Field::new("small", DataType::UInt8, false),
        Field::new("plain", DataType::Float64, false),
        Field::new("odd", DataType::Float64, true),
        Field::new("tip", DataType::Float64, true),
        Field::new("month", DataType::Date32, true),
        Field::new("name", DataType::Utf8, true),
    ]))
}

/// The same rows far and near.
fn twins(random: &mut Rng, heap: &Arc<Heap>) -> (FarFrame, RecordBatch) {
    let mut rows = 0..tier(3, 40) * CHUNK_ROWS + 77;
    let mut batches = Vec::new();
    while !rows.is_empty() {
        let now: Vec<usize> = rows.by_ref().take(1 + random.usize(..3 * CHUNK_ROWS)).collect();
        let mut odd = |_: &usize| match random.usize(..40) {
            0 => Some(f64::NAN),
            1 => Some(-0.0),
            2 => None,
            number => Some(number as f64 / 8.0 - 2.0),
        };
        let odd: Float64Array = now.iter().map(&mut odd).collect();
        let halves: Vec<i32> = now.iter().map(|_| random.usize(..60) as i32 - 20).collect();
        // What is there below a null is no value, and a whole chunk has none.
        let tip: Vec<f64> = halves.iter().map(|halves| f64::from(*halves) / 2.0).collect();
        let tip = Float64Array::new(
            tip.into(),
            Some(halves.iter().zip(&now).map(|(halves, row)| halves % 7 != 3 && row / CHUNK_ROWS != 3).collect()),
        );
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int32Array::from_iter_values(now.iter().map(|row| *row as i32))),
            Arc::new(Int64Array::from_iter_values(now.iter().map(|_| random.usize(..2000) as i64 - 1000))),
            Arc::new(UInt8Array::from_iter_values(now.iter().map(|_| random.usize(..256) as u8))),
            Arc::new(Float64Array::from_iter_values(now.iter().map(|_| random.usize(..2000) as f64 / 4.0 - 250.0))),
            Arc::new(odd),
            Arc::new(tip),
            Arc::new(now.iter().map(|row| (row % 17 > 0).then_some((row / 5000) as i32)).collect::<Date32Array>()),
            Arc::new(
                now.iter().map(|row| (row % 5 > 0).then(|| format!("name {}", row % 700))).collect::<StringArray>(),
            ),
        ];
        batches.push(RecordBatch::try_new(schema(), columns).unwrap());
    }
    let far = FarFrame::from_batches(heap, schema(), batches.iter().cloned().map(Ok)).unwrap();
    (far, concat_batches(&schema(), &batches).unwrap())
}

/// What a scan gives, and what `keep` says of rows of the near twin.
#[track_caller]
fn check(near: &RecordBatch, scan: farfield_frame::Scan, keep: impl Fn(usize) -> bool) -> usize {
    let schema = scan.schema();
    let batches: Vec<RecordBatch> = scan.map(Result::unwrap).collect();
    assert!(batches.iter().all(|batch| (1..=CHUNK_ROWS).contains(&batch.num_rows())));
    let far = concat_batches(&schema, &batches).unwrap();
    let rows: UInt64Array = (0..near.num_rows()).filter(|row| keep(*row)).map(|row| row as u64).collect();
    let which: Vec<usize> = schema.fields().iter().map(|field| near.schema().index_of(field.name()).unwrap()).collect();
    let right = take_record_batch(&near.project(&which).unwrap(), &rows).unwrap();
    assert_eq!(far.num_rows(), right.num_rows());
    for (one, other) in far.columns().iter().zip(right.columns()) {
        // As they are stored: NaN equals NaN.
        let bits = |array: &ArrayRef| {
            let floats = array.as_primitive_opt::<Float64Type>()?.iter();
            Some(floats.map(|float| float.map(f64::to_bits)).collect::<Vec<_>>())
        };
        assert!(bits(one) == bits(other) && (bits(one).is_some() || one == other), "{:?}", one.data_type());
    }
    far.num_rows()
}

#[test]
fn a_scan_keeps_what_a_comparison_keeps() {
    let scratch = Scratch::new("scan");
    let (_servers, heaps) = heaps(&scratch);
    let mut random = seeded(1);
    for heap in &heaps {
        let (far, near) = twins(&mut random, heap);
        let column = |name: &str| near.column(near.schema().index_of(name).unwrap()).clone();
        let (row, id, small) = (column("row"), column("id"), column("small"));
        let (row, id) = (row.as_primitive::<Int32Type>(), id.as_primitive::<Int64Type>());
        let small = small.as_primitive::<UInt8Type>();
        let (plain, odd, month) = (column("plain"), column("odd"), column("month"));
        let plain = plain.as_primitive::<Float64Type>();
        let odd = odd.as_primitive::<Float64Type>();
        let month = month.as_primitive::<Date32Type>();
        let tip = column("tip");
        let tip = tip.as_primitive::<Float64Type>();
        let all = ["name", "odd", "id", "month", "small", "row", "tip"];
        let scan = || far.scan(&all).unwrap();

        assert_eq!(check(&near, scan(), |_| true), near.num_rows());
        assert_eq!(check(&near, far.scan(&["row"]).unwrap().within("small", 7u8..7).unwrap(), |_| false), 0);
        // Chunks are known: all of some, none of the others.
        let rows = 3 * CHUNK_ROWS as i32 - 5..30 * CHUNK_ROWS as i32;
        check(&near, scan().within("row", rows.clone()).unwrap(), |at| rows.contains(&row.value(at)));
        // Few rows of each chunk, and most of them.
        let few = check(&near, scan().within("id", 17i64..=19).unwrap(), |at| (17..=19).contains(&id.value(at)));
        assert!(few > 0 && few < near.num_rows() / 100);
        check(&near, scan().within("small", 3u8..).unwrap(), |at| small.value(at) >= 3);
        // Several, a closure with null among its answers, and one behind it.
        let odd_name = |batch: &RecordBatch| eq(batch.column(0), &StringArray::new_scalar("name 13"));
        let several = scan().within("id", ..500i64).unwrap().within("small", 100u8..).unwrap();
        let several = several.filter(&["name"], odd_name).unwrap();
        let several = several.filter(&["row", "id"], |batch| {
            let rows = batch.column(0).as_primitive::<Int32Type>();
            Ok(rows.iter().map(|row| row.map(|row| row % 3 > 0)).collect())
        });
        let kept = |at: usize| {
            id.value(at) < 500
                && small.value(at) >= 100
                && at % 700 == 13
                && !at.is_multiple_of(5)
                && !at.is_multiple_of(3)
        };
        assert!(check(&near, several.unwrap(), kept) > 0);
        // Nulls, NaN and zeros with a sign.
        for (low, high) in [(-0.0, 1.0), (0.0, 0.25), (1.0, f64::NAN), (f64::NAN, f64::INFINITY)] {
            let range = (Bound::Included(low), Bound::Excluded(high));
            let kept = |value: f64| low.total_cmp(&value).is_le() && value.total_cmp(&high).is_lt();
            check(&near, scan().within("odd", range).unwrap(), |at| odd.is_valid(at) && kept(odd.value(at)));
            check(&near, scan().within("plain", range).unwrap(), |at| kept(plain.value(at)));
        }
        // One of several kinds of strings, the nulls' number among them, and one that is none.
        for number in [1, 0, 699, 700] {
            let kept = |at: usize| !at.is_multiple_of(5) && at % 700 == number;
            let some = scan().within("id", 0i64..).unwrap().equal_to("name", &format!("name {number}")).unwrap();
            let found = check(&near, some, |at| kept(at) && id.value(at) >= 0);
            assert_eq!(found > 0, [1, 699].contains(&number));
        }
        // Of what has nulls they are never found, whatever is stored for them.
        let tips = [(0.0, 0.5), (-20.0, 99.0), (-1.0, 30.0), (5.0, 7.0), (19.0, 19.5)].map(|(low, high)| low..high);
        for range in tips {
            let kept = |at: usize| tip.is_valid(at) && range.contains(&tip.value(at));
            check(&near, scan().within("tip", range.clone()).unwrap(), kept);
            check(&near, far.scan(&["tip", "id"]).unwrap().within("tip", range.clone()).unwrap(), kept);
        }
        let (sum, count) = tip.iter().flatten().fold((0.0, 0), |(sum, count), tip| (sum + tip, count + 1));
        let totals = far.totals("tip").unwrap();
        assert_eq!((totals.sum, totals.count, totals.mean), (sum, count, Some(sum / count as f64)));
        assert_eq!((totals.min, totals.max), (arrow_min(tip), arrow_max(tip)));
        // What is computed of several columns, in eighths, so that its sum is exact.
        let value = farfield_frame::column;
        let product = value("plain") * (farfield_frame::Expression::from(0.5) - value("small"));
        let products = (0..near.num_rows()).map(|at| plain.value(at) * (0.5 - f64::from(small.value(at))));
        let totals = far.totals_of(&product).unwrap();
        assert_eq!((totals.count, totals.sum), (near.num_rows() as u64, products.sum()));
        check(&near, scan().within("month", 4i32..9).unwrap(), |at| {
            month.is_valid(at) && (4..9).contains(&month.value(at))
        });
        // Parts are all rows once.
        for of in [1, 3, 41, 50] {
            let parts =
                (0..of).flat_map(|part| scan().within("id", 0i64..).unwrap().part(part, of)).map(Result::unwrap);
            let rows: Vec<i32> =
                parts.flat_map(|batch| batch.column(5).as_primitive::<Int32Type>().values().to_vec()).collect();
            assert_eq!(
                rows,
                Vec::from_iter((0..near.num_rows()).filter(|at| id.value(*at) >= 0).map(|at| at as i32)),
                "{of} parts"
            );
        }
    }
}

#[test]
fn columns_that_cannot_be_scanned_are_an_error() {
    let heap = Arc::new(Heap::builder().near(NEAR).far(64 * MIB).build().unwrap());
    let far = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\n").unwrap();
    assert!(matches!(far.scan(&["zones"]), Err(FrameError::NoColumn { name }) if name == "zones"));
    let wrong = |error: Result<_, FrameError>| matches!(error, Err(FrameError::Type { .. }));
    assert!(
        wrong(far.scan(&[]).unwrap().within("fare", 1i64..))
            && wrong(far.scan(&[]).unwrap().within("zone", 1.0..))
            && wrong(far.scan(&[]).unwrap().within("zone", 0u16..))
            && wrong(far.scan(&[]).unwrap().equal_to("fare", "7.5"))
    );
    let short =
        far.scan(&["fare"]).unwrap().filter(&["fare"], |_| Ok(BooleanArray::from(vec![true, true]))).unwrap().next();
    assert!(matches!(short, Some(Err(FrameError::Lengths { rows: 1, values: 2 }))));
    let nothing = FarFrame::from_batches(&heap, schema(), []).unwrap();
    assert!(nothing.scan(&["name"]).unwrap().within("id", 1i64..).unwrap().next().is_none());
    // A frame without columns has rows.
    assert_eq!(far.scan(&[]).unwrap().next().unwrap().unwrap().num_rows(), 1);
}

/// Keys and numbers with and without nulls, whose groups are found where they are, and a column of strings, which has nothing to be added up.
fn mixture(random: &mut Rng) -> RecordBatch {
    let odd = [f64::NAN, -0.0, 0.0, f64::INFINITY, 0.1, 1e300];
    let mut column =
        |what: &mut dyn FnMut(&mut Rng) -> i64| -> Vec<i64> { (0..GROUPED).map(|_| what(random)).collect() };
    let keys = [4, 300, 9000].map(|keys| column(&mut |random| random.usize(..keys) as i64 - 2));
    let numbers = column(&mut |random| random.usize(..1 << 20) as i64 - 1000);
    let with_nulls = |nulls: usize, keys: &[i64]| -> Vec<Option<i64>> {
        keys.iter().enumerate().map(|(row, key)| Some(*key).filter(|_| row * row % 11 >= nulls)).collect()
    };
    let (kinds, whens) = (with_nulls(2, &keys[0]), with_nulls(5, &keys[1]));
    // There is a chunk of nothing but nulls, a kind of nothing but nulls, and zeros that are values.
    let late = |row: usize| {
        (row / CHUNK_ROWS != 1 && !row.is_multiple_of(3) && kinds[row] != Some(1)).then_some(numbers[row] as i32 % 50)
    };
    let rows = || 0..GROUPED;
    let columns: [(&str, ArrayRef); 20] = [
        ("few", Arc::new(Int8Array::from_iter_values(keys[0].iter().map(|key| *key as i8)))),
        ("some", Arc::new(Date32Array::from_iter_values(keys[1].iter().map(|key| *key as i32)))),
        ("many", Arc::new(UInt64Array::from_iter_values(keys[2].iter().map(|key| *key as u64)))),
        ("all", Arc::new(Int64Array::from_iter_values(0..GROUPED as i64))),
        ("whole", Arc::new(Int32Array::from_iter_values(numbers.iter().map(|number| *number as i32)))),
        ("unsigned", Arc::new(UInt32Array::from_iter_values(numbers.iter().map(|number| *number as u32 >> 8)))),
        ("short", Arc::new(Float32Array::from_iter_values(numbers.iter().map(|number| *number as f32 / 3.0)))),
        ("odd", Arc::new(Float64Array::from_iter_values((0..GROUPED).map(|row| odd[(row * row / 7) % odd.len()])))),
        ("nan", Arc::new(Float64Array::from_value(f64::NAN, GROUPED))),
        ("tip", Arc::new(rows().map(|row| (row % 3 > 0).then_some(row as f64 / 3.0)).collect::<Float64Array>())),
        ("kind", Arc::new(kinds.iter().map(|kind| kind.map(|kind| kind as i16)).collect::<Int16Array>())),
        ("when", Arc::new(whens.iter().map(|when| when.map(|when| when as i32 / 60)).collect::<Date32Array>())),
        ("tiny", Arc::new(rows().map(|row| (row % 5 > 0).then_some((row % 2) as f32)).collect::<Float32Array>())),
        ("late", Arc::new(rows().map(late).collect::<Int32Array>())),
        (
            "mix",
            Arc::new(
                rows().map(|row| (row % 4 > 0).then_some(odd[row * row / 5 % odd.len()])).collect::<Float64Array>(),
            ),
        ),
        // Below a null is a bit of either kind.
        ("flag", {
            let (set, valid) = (rows().map(|row| row * row % 7 > 3), rows().map(|row| row * row % 13 > 2));
            Arc::new(BooleanArray::new(set.collect(), Some(valid.collect::<Vec<_>>().into())))
        }),
        ("sure", Arc::new(rows().map(|row| Some(row % 6 > 1)).collect::<BooleanArray>())),
        ("name", Arc::new(rows().map(|row| (row % 3 > 0).then_some("somebody")).collect::<StringArray>())),
        ("plate", Arc::new(rows().map(|row| Some(format!("plate {}", row % 20_000))).collect::<StringArray>())),
        ("zone", {
            let zones = ["Harlem", "", "Astoria", "a zone whose name is long", "Æ"];
            Arc::new(rows().map(|row| (row % 8 > 0).then_some(zones[row * row / 3 % 5])).collect::<StringArray>())
        }),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

#[test]
fn groups_that_are_found_where_they_are_are_those_of_rows_looked_at() {
    let scratch = Scratch::new("groups");
    let (_servers, heaps) = heaps(&scratch);
    let rows = mixture(&mut seeded(3));
    let bits = |array: &ArrayRef| {
        let floats = array.as_primitive_opt::<Float64Type>()?.iter();
        // One NaN is as good as another.
        let bits = |float: f64| if float.is_nan() { f64::NAN.to_bits() } else { float.to_bits() };
        Some(floats.map(|float| float.map(bits)).collect::<Vec<_>>())
    };
    for (number, heap) in heaps.iter().enumerate() {
        let frame = FarFrame::from_batches(heap, rows.schema(), [Ok(rows.clone())]).unwrap();
        // Of the last there are too many.
        let keys: [&[&str]; 14] = [
            &["zone"],
            &["few"],
            &["some"],
            &["many"],
            &["few", "some"],
            &["kind"],
            &["kind", "zone"],
            &["flag"],
            &["sure", "flag", "few"],
            &["when", "few", "kind"],
            &["kind", "tiny", "few", "when"],
            &["few", "short"],
            &["all"],
            &["late", "some", "kind", "many"],
        ];
        let keys = if number == 0 { &keys[..] } else { &keys[..11] };
        // In the CI tier some at each place.
        for by in keys.iter().skip(number % tier(5, 1)).step_by(tier(5, 1)) {
            let groups = frame.group_by(by).unwrap();
            let values = ["whole", "unsigned", "short", "odd", "nan", "tip", "late", "mix"];
            let numbers = values.iter().flat_map(|name| [Agg::sum(*name), Agg::mean(*name)]);
            let ends = ["odd", "nan", "some", "short", "tip", "late", "mix", "when"]
                .iter()
                .flat_map(|name| [Agg::min(*name), Agg::max(*name), Agg::count(*name)]);
            let mut asked: Vec<Agg> = numbers.chain(ends).chain([Agg::rows()]).collect();
            let there = near(&groups.agg(&asked).unwrap());
            let only_rows = near(&groups.agg(&[Agg::rows()]).unwrap());
            let of_nulls = near(&groups.agg(&[Agg::sum("late"), Agg::rows()]).unwrap());
            // A column of strings has all rows be looked at.
            assert!(frame.scan(&[]).unwrap().has_groups(by, &asked).unwrap());
            asked.push(Agg::count("name"));
            assert!(!frame.scan(&[]).unwrap().has_groups(by, &asked).unwrap());
            let here = near(&groups.agg(&asked).unwrap());
            assert_eq!(there.num_columns() + 1, here.num_columns());
            let names: u64 =
                here.column_by_name("name_count").unwrap().as_primitive::<UInt64Type>().values().iter().sum();
            assert_eq!(names as usize, GROUPED - GROUPED.div_ceil(3));
            for (index, (one, other)) in there.columns().iter().zip(here.columns()).enumerate() {
                let name = there.schema().field(index).name().clone();
                assert!(bits(one) == bits(other) && (bits(one).is_some() || one == other), "{name} by {by:?}");
            }
            assert_eq!(only_rows.column(by.len()), here.column_by_name("count").unwrap());
            for name in ["late_sum", "count"] {
                assert_eq!(
                    of_nulls.column_by_name(name).unwrap(),
                    here.column_by_name(name).unwrap(),
                    "{name} by {by:?}"
                );
            }
        }
        // What has no room is an error, there as here.
        let huge = RecordBatch::try_from_iter([
            ("key", Arc::new(UInt8Array::from(vec![1, 2, 1])) as ArrayRef),
            ("huge", Arc::new(UInt64Array::from(vec![u64::MAX, 7, 1])) as ArrayRef),
        ]);
        let huge = huge.unwrap();
        let huge = FarFrame::from_batches(heap, huge.schema(), [Ok(huge)]).unwrap();
        let error = huge.group_by(&["key"]).unwrap().agg(&[Agg::sum("huge")]).unwrap_err();
        assert!(error.to_string().contains("does not fit"), "{error}");
        let means = near(&huge.group_by(&["key"]).unwrap().agg(&[Agg::mean("huge")]).unwrap());
        assert_eq!(means.column(1).as_primitive::<Float64Type>().values()[..], [(u64::MAX as f64) / 2.0, 7.0]);
    }
}

/// In the order of these columns, if that is another one than that of the numbers of kinds of strings.
fn sorted(heap: &Arc<Heap>, groups: RecordBatch, by: &[&str]) -> RecordBatch {
    let keys: Vec<SortBy> = by.iter().map(|name| SortBy::ascending(*name).nulls_first()).collect();
    let groups = FarFrame::from_batches(heap, groups.schema(), [Ok(groups)]).unwrap();
    near(&groups.sort(&keys).unwrap())
}

#[test]
fn sums_and_groups_of_rows_that_ranges_keep_are_those_of_rows_looked_at() {
    let scratch = Scratch::new("kept");
    let (_servers, heaps) = heaps(&scratch);
    let rows = mixture(&mut seeded(5));
    let end = GROUPED as i64;
    // Of one column that ascends, so that most chunks are kept whole or not at all; of columns of which every chunk has some; and of both.
    // Of columns with nulls, of ranges that have the zeros below them.
    let ranges: [&[(&str, i64, i64)]; 12] = [
        &[("all", 9000, end - 9000)],
        &[("whole", 5000, 600_000)],
        &[("all", 9000, end), ("whole", -1000, 300_000)],
        &[("all", 9000, end), ("all", 0, 20_000), ("unsigned", 100, 3000), ("some", 0, 100)],
        &[("few", 0, 1)],
        &[("few", 1, 1)],
        &[("all", end + 5, end + 9)],
        &[("late", -5, 20), ("all", 0, end - 9000)],
        &[("late", -1000, 1000), ("tip", -1, 7000)],
        &[("kind", 0, 2), ("late", 1, 50), ("whole", -1000, 600_000)],
        &[("zone", 0, 0), ("all", 0, end - 9000)],
        &[("zone", 2, 2), ("tip", -1, 7000)],
    ];
    for (number, heap) in heaps.iter().enumerate() {
        let frame = FarFrame::from_batches(heap, rows.schema(), [Ok(rows.clone())]).unwrap();
        // All of them at one server, and every third at others; fewer in the CI tier.
        let (first, step) = if number == 0 { (0, tier(3, 1)) } else { (number - 1, tier(6, 3)) };
        for ranges in ranges.into_iter().skip(first).step_by(step) {
            let scan = |names: &[&str]| {
                let scan = frame.scan(names).unwrap();
                ranges.iter().fold(scan, |scan, (name, low, end)| {
                    match *name {
                        "all" => scan.within(name, *low..*end),
                        "unsigned" => scan.within(name, *low as u32..*end as u32),
                        "few" => scan.within(name, *low as i8..*end as i8),
                        "kind" => scan.within(name, *low as i16..*end as i16),
                        "tip" => scan.within(name, *low as f64..*end as f64),
                        "zone" => scan.equal_to(name, ["Harlem", "", "Astoria"][*low as usize]),
                        _ => scan.within(name, *low as i32..*end as i32),
                    }
                    .unwrap()
                })
            };
            let all = [
                "few", "some", "many", "whole", "unsigned", "short", "odd", "tip", "kind", "when", "tiny", "late",
                "flag", "name", "zone",
            ];
            let kept =
                FarFrame::from_batches(heap, scan(&all).schema(), scan(&all).map(|batch| Ok(batch.unwrap()))).unwrap();
            for name in ["whole", "unsigned", "short", "many", "tip", "late"] {
                let sums = scan(&[]).sums(name).unwrap().unwrap();
                let right = kept.totals(name).unwrap();
                assert_eq!(
                    (sums.count, sums.sum.rounded(), sums.mean),
                    (right.count, right.sum, right.mean),
                    "{name} of {ranges:?}"
                );
                assert_eq!(sums.ends.is_some(), right.count > 0);
            }
            let asked = [Agg::sum("short"), Agg::mean("whole"), Agg::max("unsigned"), Agg::min("many"), Agg::rows()];
            let of_nulls = [Agg::sum("late"), Agg::count("tip"), Agg::mean("tip"), Agg::max("when")];
            // With a column of strings rows are looked at.
            let looked_at = [&asked[..], &of_nulls, &[Agg::count("name")]].concat();
            let keys: [&[&str]; 8] = [
                &["few"],
                &["flag", "few"],
                &["flag", "zone"],
                &["many"],
                &["some", "few"],
                &["unsigned", "whole"],
                &["when", "few", "late"],
                &["tiny", "kind", "some", "when"],
            ];
            for by in keys {
                let right = near(&kept.group_by(by).unwrap().agg(&looked_at).unwrap());
                for asked in [&asked[..], &of_nulls, &[Agg::rows()]] {
                    assert!(scan(&[]).has_groups(by, asked).unwrap());
                    let groups = scan(&[]).groups(by, asked, GROUPED).unwrap().unwrap();
                    let groups = if by.contains(&"zone") { sorted(heap, groups, by) } else { groups };
                    let names = groups.schema();
                    let right = names.fields().iter().map(|field| right.column_by_name(field.name()).unwrap());
                    assert!(groups.columns().iter().eq(right), "by {by:?} of {ranges:?}");
                    if asked.len() < 5 {
                        let few = groups.num_rows().saturating_sub(1);
                        assert_eq!(scan(&[]).groups(by, asked, few).unwrap().is_none(), groups.num_rows() > 0);
                    }
                }
            }
            // Parts of a frame have what all of it has.
            for (name, nulls) in [("whole", 0), ("late", kept.nulls("late").unwrap())] {
                let counts = (0..3).map(|part| scan(&[]).part(part, 3).sums(name).unwrap().unwrap().count);
                assert_eq!(counts.sum::<u64>() as usize, kept.rows() - nulls);
            }
            // Where the order of numbers is not that of their bits, or there are no numbers, rows are looked at.
            assert!(scan(&[]).sums("odd").unwrap().is_none() && scan(&[]).sums("mix").unwrap().is_none());
            for by in [&["few", "some", "many", "tip", "kind"][..], &["odd"], &["mix"], &["few", "nan"], &["plate"]] {
                assert!(!scan(&[]).has_groups(by, &[Agg::rows()]).unwrap(), "{by:?}");
            }
            // As many conditions as there may be, and one more: each says of a range and of nulls, and one of the nulls of what is looked at.
            let mut many = scan(&[]);
            let had =
                ranges.iter().map(|(name, ..)| if ["late", "kind", "tip", "zone"].contains(name) { 2 } else { 1 });
            for _ in had.sum::<usize>()..CONDITIONS_MAX - 1 {
                assert!(many.has_groups(&["few"], &[Agg::rows()]).unwrap());
                many = many.within("whole", -1000..i32::MAX).unwrap();
            }
            assert!(many.has_groups(&["few"], &[Agg::sum("tip")]).unwrap());
            let many = many.within("whole", -1000i32..).unwrap();
            assert!(!many.has_groups(&["few"], &[Agg::rows()]).unwrap() && many.sums("whole").unwrap().is_none());
            let closed =
                scan(&[]).filter(&["few"], |batch| Ok(BooleanArray::from(vec![true; batch.num_rows()]))).unwrap();
            assert!(!closed.has_groups(&["few"], &[Agg::rows()]).unwrap() && closed.sums("whole").unwrap().is_none());
        }
    }
}

fn near(frame: &FarFrame) -> RecordBatch {
    let batches: Vec<RecordBatch> = frame.batches().map(Result::unwrap).collect();
    concat_batches(&frame.schema(), &batches).unwrap()
}

/// More of them than are sorted in one run, or joined by one table.
fn trips() -> RecordBatch {
    let mixed = |row: usize| row.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let columns: [(&str, ArrayRef); 4] = [
        ("row", Arc::new(UInt32Array::from_iter_values(0..TRIPS as u32))),
        (
            "zone",
            Arc::new(
                (0..TRIPS)
                    .map(|row| (row % 9 > 0).then(|| format!("zone {}", mixed(row) % 30_000)))
                    .collect::<StringArray>(),
            ),
        ),
        ("fare", Arc::new(Float64Array::from_iter_values((0..TRIPS).map(|row| (mixed(row) % 4096) as f64 / 8.0)))),
        (
            "tip",
            Arc::new(
                (0..TRIPS).map(|row| (row % 7 > 0).then_some((mixed(row) % 512) as f64)).collect::<Float64Array>(),
            ),
        ),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, array)| (name, array, true))).unwrap()
}

/// What is asked, near, and quantiles.
fn answers(heap: &Arc<Heap>, rows: &RecordBatch) -> (Vec<RecordBatch>, Vec<Option<f64>>) {
    let frame = FarFrame::from_batches(heap, rows.schema(), [Ok(rows.clone())]).unwrap();
    let sorted = frame.sort(&[SortBy::descending("fare"), SortBy::ascending("zone")]).unwrap();
    let groups = frame.group_by(&["zone"]).unwrap();
    let groups = groups.agg(&[Agg::rows(), Agg::sum("fare"), Agg::mean("tip"), Agg::max("row")]).unwrap();
    let joined = groups.join(&frame, &Join::left(&["zone"])).unwrap();
    let joined = joined.sort(&[SortBy::ascending("zone"), SortBy::ascending("row")]).unwrap();
    let quantile = |name, share| frame.quantile(name, share).unwrap();
    let quantiles = ["fare", "tip", "row"].iter().flat_map(|name| [0.0, 0.5, 0.99].map(|share| quantile(name, share)));
    (vec![near(&sorted), near(&groups), near(&joined)], quantiles.collect())
}

#[test]
fn tables_are_the_same_whoever_keeps_them() {
    let scratch = Scratch::new("tables");
    let (_servers, heaps) = heaps(&scratch);
    let rows = trips();
    let (last, heaps) = heaps.split_last().unwrap();
    let (tables, quantiles) = answers(last, &rows);
    assert_eq!(tables[0].num_rows(), TRIPS);
    // Null is a group, which has no partner.
    let nulls = rows.column(1).null_count();
    assert_eq!(tables[2].num_rows(), TRIPS - nulls + 1);
    for heap in heaps {
        let (there, found) = answers(heap, &rows);
        assert_eq!(found, quantiles);
        for (one, other) in there.iter().zip(&tables) {
            assert!(one == other, "{:?}", one.schema());
        }
    }
}

/// Both columns of a table, as text: numbers without a fraction if they are whole, and nothing for null.
fn pairs(frame: &FarFrame, keys: &[&str], value: &str) -> BTreeMap<String, f64> {
    let rows = near(&frame.select(&[keys, &[value]].concat()).unwrap());
    let text = |column: usize, row: usize| {
        let text = array_value_to_string(rows.column(column), row).unwrap();
        text.trim_end_matches(".0").to_owned()
    };
    let key = |row| (0..keys.len()).map(|column| text(column, row)).collect::<Vec<_>>().join("/");
    (0..rows.num_rows()).map(|row| (key(row), text(keys.len(), row).parse().unwrap())).collect()
}

/// Nearly two years of trips of New York's green taxis, some forty times what may be near, and what others counted in the same file.
#[test]
fn real_trips_are_what_others_counted() {
    // Made rows show the same in CI.
    if !deep() {
        return;
    }
    let known = project().join("../shared/data/reference_answers.json");
    let (Some(csv), Ok(known)) =
        (shared_data("nyc-green-taxi/green_tripdata_2020-04_2022-02.csv"), std::fs::read_to_string(known))
    else {
        return;
    };
    let known = &serde_json::from_str::<serde_json::Value>(&known).unwrap()["taxi"];
    let counted = |name: &str| -> BTreeMap<String, f64> {
        known[name].as_object().unwrap().iter().map(|(key, rows)| (key.clone(), rows.as_f64().unwrap())).collect()
    };
    let number = |name: &str| known[name].as_f64().unwrap();
    let scratch = Scratch::new("trips");
    let (_server, url) = serve(&scratch, "server", Registry::standard());
    let heap = Heap::builder().near(4 * NEAR).near_max(4 * NEAR).far(2 << 30).pool(url).patience(PATIENCE);
    let heap = Arc::new(heap.build().unwrap());
    let trips = FarFrame::from_csv_text(&heap, str::from_utf8(&csv).unwrap()).unwrap();
    drop(csv);
    assert_eq!(trips.rows() as f64, number("rows"));

    let rows_by = |frame: &FarFrame, keys: &[&str]| {
        pairs(&frame.group_by(keys).unwrap().agg(&[Agg::rows().named("trips")]).unwrap(), keys, "trips")
    };
    assert_eq!(rows_by(&trips, &["VendorID"]), counted("rows_by_VendorID"));
    assert_eq!(rows_by(&trips, &["store_and_fwd_flag"]), counted("store_and_fwd_flag"));
    assert_eq!(rows_by(&trips, &["VendorID", "passenger_count"]), counted("passenger_count_by_VendorID"));
    assert_eq!(rows_by(&trips, &["PULocationID", "DOLocationID"]).len() as f64, number("distinct_PU_DO_pairs"));
    for (column, sum) in [("trip_distance", "sum_trip_distance"), ("total_amount", "sum_total_amount")] {
        let (found, sum) = (trips.totals(column).unwrap().sum, number(sum));
        assert!((found - sum).abs() < 0.005, "{column}: {found}, {sum}");
    }

    let part = |frame: &FarFrame, name: &str, part| {
        let field = Field::new(name, DataType::Int32, true);
        frame.with_column(field, &["lpep_pickup_datetime"], |batch| date_part(batch.column(0), part)).unwrap()
    };
    assert_eq!(rows_by(&part(&trips, "hour", DatePart::Hour), &["hour"]), counted("rows_by_pickup_hour"));
    let timed = part(&trips, "month", DatePart::Month)
        .with_column(
            Field::new("seconds", DataType::Int64, true),
            &["lpep_pickup_datetime", "lpep_dropoff_datetime"],
            |batch| {
                let seconds = |column: usize| cast(batch.column(column), &DataType::Int64);
                sub(&seconds(1)?, &seconds(0)?)
            },
        )
        .unwrap()
        .select(&["month", "seconds"])
        .unwrap();
    let (seconds, known_seconds) = (timed.totals("seconds").unwrap(), &known["duration_s"]);
    assert_eq!((seconds.min, seconds.max), (known_seconds["min"].as_f64(), known_seconds["max"].as_f64()));
    assert!((seconds.mean.unwrap() - known_seconds["mean"].as_f64().unwrap()).abs() < 1e-6);
    assert_eq!(timed.quantile("seconds", 0.5).unwrap(), known_seconds["median"].as_f64());
    for (month, median) in counted("median_duration_s_by_pickup_month") {
        let wanted = Int32Array::new_scalar(month.parse().unwrap());
        let one = timed.filter(&["month"], |batch| eq(batch.column(0), &wanted)).unwrap();
        assert_eq!(one.quantile("seconds", 0.5).unwrap(), Some(median), "month {month}");
    }
}
