//! Lists, structs and maps in frames, compared with Arrow's arrays of the same values.
//!
//! Guards against elements that move to another row, nulls and empty lists that are taken for each other, and
//! slices whose elements begin where their buffer begins. `FARFIELD_SEED` repeats the choices.

use crate::common::{MIB, PLANES, heap, near, random, same};
use arrow::array::*;
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::compute::{cast, concat_batches, filter_record_batch, take_record_batch};
use arrow::datatypes::{DataType, Field, FieldRef, Fields, Int64Type, Schema, SchemaRef, TimeUnit};
use farfield::{Heap, Plane};
use farfield_frame::{Agg, CHUNK_ROWS, FarFrame, FrameError, Join, SortBy, column};
use fastrand::Rng;
use std::sync::Arc;

/// Levels of lists, structs and maps in a random type.
const LEVELS: usize = 3;

fn item(data_type: DataType) -> FieldRef {
    Arc::new(Field::new("item", data_type, true))
}

fn entries(keys: DataType, values: DataType) -> FieldRef {
    let fields = Fields::from(vec![Field::new("keys", keys, false), Field::new("values", values, true)]);
    Arc::new(Field::new("entries", DataType::Struct(fields), false))
}

/// A type of so many levels at most, the first of which is no plain one.
fn nested_type(random: &mut Rng, levels: usize) -> DataType {
    let mut part = || match random.usize(..levels + 1) {
        0 => [
            DataType::Int32,
            DataType::Float64,
            DataType::Utf8,
            DataType::Boolean,
            DataType::Date32,
            DataType::Binary,
            DataType::Decimal128(15, 2),
            DataType::Timestamp(TimeUnit::Microsecond, None),
        ][random.usize(..8)]
        .clone(),
        _ => nested_type(random, levels - 1),
    };
    let parts = [part(), part(), part()];
    let [first, second, third] = parts;
    match random.usize(..6) {
        0 => DataType::LargeList(item(first)),
        1 => DataType::FixedSizeList(item(first), 2),
        2 | 3 => DataType::Struct(Fields::from(vec![
            Field::new("a", first, true),
            Field::new("b", second, true),
            Field::new("c", third, true),
        ])),
        4 => DataType::Map(entries(DataType::Utf8, first), false),
        _ => DataType::List(item(first)),
    }
}

/// Random values of a type, a tenth of them null.
fn array(random: &mut Rng, data_type: &DataType, length: usize) -> ArrayRef {
    let nulls = |random: &mut Rng| NullBuffer::from_iter((0..length).map(|_| random.u8(..10) > 0));
    let lengths = |random: &mut Rng| (0..length).map(|_| random.usize(..4)).collect::<Vec<_>>();
    match data_type {
        DataType::List(field) => {
            let lengths = lengths(random);
            let values = array(random, field.data_type(), lengths.iter().sum());
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(ListArray::new(field.clone(), offsets, values, Some(nulls(random))))
        }
        DataType::LargeList(field) => {
            let lengths = lengths(random);
            let values = array(random, field.data_type(), lengths.iter().sum());
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(LargeListArray::new(field.clone(), offsets, values, Some(nulls(random))))
        }
        DataType::FixedSizeList(field, size) => {
            let values = array(random, field.data_type(), length * *size as usize);
            Arc::new(FixedSizeListArray::new(field.clone(), *size, values, Some(nulls(random))))
        }
        DataType::Struct(fields) => {
            let arrays = fields.iter().map(|field| array(random, field.data_type(), length)).collect();
            Arc::new(StructArray::new(fields.clone(), arrays, Some(nulls(random))))
        }
        DataType::Map(field, is_sorted) => {
            let DataType::Struct(fields) = field.data_type() else { panic!("entries are structs") };
            let lengths = lengths(random);
            let count = lengths.iter().sum();
            let keys: ArrayRef = Arc::new(StringArray::from_iter_values((0..count).map(|key| key.to_string())));
            let entries =
                StructArray::new(fields.clone(), vec![keys, array(random, fields[1].data_type(), count)], None);
            let offsets = OffsetBuffer::from_lengths(lengths);
            Arc::new(MapArray::new(field.clone(), offsets, entries, Some(nulls(random)), *is_sorted))
        }
        plain => {
            let mut number = || Some(random.i32(..1000)).filter(|number| number % 10 > 0);
            let numbers: Int32Array = (0..length).map(|_| number()).collect();
            let strings = cast(&numbers, &DataType::Utf8).unwrap();
            match plain {
                DataType::Int32 | DataType::Date32 | DataType::Float64 | DataType::Boolean => cast(&numbers, plain),
                DataType::Timestamp(..) => cast(&cast(&numbers, &DataType::Int64).unwrap(), plain),
                other => cast(&strings, other),
            }
            .unwrap()
        }
    }
}

/// Batches with a number and values of each type; their rows are parts of longer arrays.
fn batches(random: &mut Rng, types: &[DataType], rows: usize) -> (SchemaRef, Vec<RecordBatch>) {
    let nested = types.iter().enumerate().map(|(index, of)| Field::new(format!("c{index}"), of.clone(), true));
    let fields = [Field::new("id", DataType::Int64, false)].into_iter().chain(nested);
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let (mut batches, mut first) = (Vec::new(), 0);
    while first < rows {
        let now = (1 + random.usize(..2 * CHUNK_ROWS)).min(rows - first);
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values((0..now + 5).map(|row| (first + row) as i64 - 3)));
        let columns = types.iter().map(|data_type| array(random, data_type, now + 5));
        let columns = [ids].into_iter().chain(columns).collect();
        batches.push(RecordBatch::try_new(schema.clone(), columns).unwrap().slice(3, now));
        first += now;
    }
    (schema, batches)
}

fn check(random: &mut Rng, heap: &Arc<Heap>, types: &[DataType], rows: usize) {
    let (schema, batches) = batches(random, types, rows);
    let plain = concat_batches(&schema, &batches).unwrap();
    let far = FarFrame::from_batches(heap, schema.clone(), batches.into_iter().map(Ok)).unwrap();
    same(&near(&far), &plain);
    for (index, column) in plain.columns().iter().enumerate() {
        assert_eq!(far.nulls(schema.field(index).name()).unwrap(), column.null_count());
    }
    // Rows that are kept, of whole chunks and one by one.
    for share in [2, 300] {
        let mask: BooleanArray = (0..rows).map(|_| Some(random.usize(..share) == 0)).collect();
        let kept = far.filter(&["id"], |batch| {
            let ids = batch.column(0).as_primitive::<Int64Type>();
            Ok(ids.values().iter().map(|id| Some(mask.value(*id as usize))).collect())
        });
        same(&near(&kept.unwrap()), &filter_record_batch(&plain, &mask).unwrap());
    }
    if rows > 9 {
        let start = random.usize(..rows - 9);
        let few = far.matching(&column("id").at_least(start as i64).and(column("id").less_than(start as i64 + 9)));
        same(&near(&few.unwrap()), &plain.slice(start, 9));
    }
    // Rows that change places.
    let sorted = far.sort(&[SortBy::descending("id")]).unwrap();
    let backwards = UInt32Array::from_iter_values((0..rows as u32).rev());
    same(&near(&sorted), &take_record_batch(&plain, &backwards).unwrap());
    // Rows that pass through another frame.
    let ids = far.select(&["id"]).unwrap();
    let joined = ids.join(&far, &Join::left(&["id"])).unwrap().sort(&[SortBy::ascending("id")]).unwrap();
    same(&near(&joined), &plain);
    let reader = RecordBatchIterator::new(far.batches().map(|batch| Ok(batch.unwrap())), far.schema());
    same(&near(&FarFrame::from_reader(heap, reader).unwrap()), &plain);
}

#[test]
fn lists_structs_and_maps_are_those_of_arrow() {
    let mut random = random();
    for plane in PLANES {
        let heap = heap(plane, 8 * MIB);
        for rows in [0, 1, 9, CHUNK_ROWS, CHUNK_ROWS + 1] {
            let types: Vec<DataType> = (0..3).map(|_| nested_type(&mut random, LEVELS)).collect();
            check(&mut random, &heap, &types, rows);
        }
    }
}

#[test]
fn lists_and_structs_may_be_larger_than_near_memory() {
    let mut random = random();
    let fields = vec![Field::new("lat", DataType::Float64, true), Field::new("name", DataType::Utf8, true)];
    let places = DataType::Struct(Fields::from(fields));
    let types = [DataType::List(item(places.clone())), places, DataType::List(item(DataType::Int32))];
    check(&mut random, &heap(Plane::Page, MIB), &types, 5 * CHUNK_ROWS + 7);
}

#[test]
fn strings_in_lists_and_structs_become_those_that_frames_keep() {
    let names = StringViewArray::from(vec![Some("a"), None, Some("a name of more than twelve bytes")]);
    let offsets = OffsetBuffer::from_lengths([2, 0, 1]);
    let lists = ListArray::new(item(DataType::Utf8View), offsets, Arc::new(names.clone()), None);
    let fields = Fields::from(vec![Field::new("name", DataType::Utf8View, true)]);
    let structs = StructArray::new(fields, vec![Arc::new(names)], None);
    let columns: [(&str, ArrayRef); 2] = [("lists", Arc::new(lists)), ("structs", Arc::new(structs))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
    let frame = FarFrame::from_reader(&heap(Plane::Page, 4 * MIB), reader).unwrap();
    assert_eq!(frame.schema().field(0).data_type(), &DataType::List(item(DataType::Utf8)));
    let kept = near(&frame);
    for (kept, given) in kept.columns().iter().zip(batch.columns()) {
        assert_eq!(kept, &cast(given, kept.data_type()).unwrap());
    }
}

#[test]
fn structs_without_fields_and_lists_without_room_come_back() {
    let nulls = || Some(NullBuffer::from_iter((0..9000).map(|row| row % 7 > 0)));
    let none: ArrayRef = Arc::new(Int32Array::from(Vec::<i32>::new()));
    let lists = FixedSizeListArray::new(item(DataType::Int32), 0, none, nulls());
    let columns: [(&str, ArrayRef); 2] =
        [("structs", Arc::new(StructArray::new_empty_fields(9000, nulls()))), ("lists", Arc::new(lists))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let frame = FarFrame::from_batches(&heap(Plane::Page, 4 * MIB), batch.schema(), [Ok(batch.clone())]).unwrap();
    same(&near(&frame), &batch);
}

#[test]
fn an_operation_that_compares_lists_is_an_error_that_names_the_column() {
    let (heap, mut random) = (heap(Plane::Page, 4 * MIB), Rng::with_seed(7));
    let (schema, batches) = batches(&mut random, &[DataType::List(item(DataType::Int32))], 20);
    let frame = FarFrame::from_batches(&heap, schema, batches.into_iter().map(Ok)).unwrap();
    let refused = |name: &str, result: Result<(), FrameError>| match result {
        Err(FrameError::Type { name: named, data_type: DataType::List(_) }) => assert_eq!(named, "c0", "{name}"),
        other => panic!("{name}: {other:?}"),
    };
    refused("group", frame.group_by(&["id", "c0"]).map(drop));
    refused("sort", frame.sort(&[SortBy::ascending("c0")]).map(drop));
    refused("join", frame.join(&frame, &Join::inner(&["c0"])).map(drop));
    refused("minimum", frame.group_by(&["id"]).unwrap().agg(&[Agg::min("c0")]).map(drop));
    refused("sum", frame.group_by(&["id"]).unwrap().agg(&[Agg::sum("c0")]).map(drop));
    refused("totals", frame.totals("c0").map(drop));
    let counts = frame.group_by(&["id"]).unwrap().agg(&[Agg::count("c0")]).unwrap();
    assert_eq!(counts.totals("c0_count").unwrap().sum, (20 - frame.nulls("c0").unwrap()) as f64);
    // A part that frames do not keep is said with the whole type.
    let views =
        DataType::Struct(Fields::from(vec![Field::new("seen", DataType::ListView(item(DataType::Int8)), true)]));
    let schema = Arc::new(Schema::new(vec![Field::new("odd", views.clone(), true)]));
    match FarFrame::from_batches(&heap, schema, []) {
        Err(FrameError::NotKept { name, data_type }) => assert_eq!((name.as_str(), data_type), ("odd", views)),
        other => panic!("{other:?}"),
    }
}
