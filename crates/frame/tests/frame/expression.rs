//! Do expressions keep and compute what a model says that looks at one row after the other?
//!
//! Danger: a range that keeps other rows than the comparison would; a value rounded to the type of a
//! column; null that counts as false where it is negated. `FARFIELD_SEED` repeats the choices.

use crate::common::{MIB, PLANES, float, heap, is_deep, near, random, same, some};
use arrow::array::*;
use arrow::compute::filter_record_batch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use farfield::Plane;
use farfield_frame::{Agg, CHUNK_ROWS, Expression, FarFrame, FrameError, Scan, column};
use fastrand::Rng;
use std::cmp::Ordering;
use std::sync::Arc;

const ZONES: [&str; 4] = ["Harlem", "Astoria", "", "Inwood"];

fn schema() -> SchemaRef {
    let field = |name: &str, data_type| Field::new(name, data_type, true);
    Arc::new(Schema::new(vec![
        field("id", DataType::Int32),
        field("fare", DataType::Float64),
        field("zone", DataType::Utf8),
        field("paid", DataType::Boolean),
        field("day", DataType::Date32),
        Field::new("small", DataType::UInt8, false),
        Field::new("row", DataType::Int64, false),
    ]))
}

fn rows(random: &mut Rng, rows: usize) -> RecordBatch {
    let columns: Vec<ArrayRef> = vec![
        Arc::new((0..rows).map(|_| Some(random.i32(-20..20)).and_then(|v| some(random, v))).collect::<Int32Array>()),
        Arc::new((0..rows).map(|_| Some(float(random)).and_then(|v| some(random, v))).collect::<Float64Array>()),
        Arc::new(
            (0..rows).map(|_| Some(ZONES[random.usize(..4)]).and_then(|v| some(random, v))).collect::<StringArray>(),
        ),
        Arc::new((0..rows).map(|_| Some(random.bool()).and_then(|v| some(random, v))).collect::<BooleanArray>()),
        Arc::new((0..rows).map(|row| some(random, row as i32 / 100)).collect::<Date32Array>()),
        Arc::new((0..rows).map(|_| Some(random.u8(..))).collect::<UInt8Array>()),
        Arc::new((0..rows).map(|row| Some(row as i64)).collect::<Int64Array>()),
    ];
    RecordBatch::try_new(schema(), columns).unwrap()
}

/// A value of a row; `None` is null.
#[derive(Clone, PartialEq, Debug)]
enum Plain {
    Int(i64),
    Float(f64),
    Text(String),
    Bool(bool),
}

/// A row: what a column of it is.
type Row<'r> = dyn Fn(&str) -> Option<Plain> + 'r;
/// An expression, and what it is of a row.
type Twin = (Expression, Box<dyn Fn(&Row<'_>) -> Option<Plain>>);

fn of_row(batch: &RecordBatch, row: usize, name: &str) -> Option<Plain> {
    let array = batch.column_by_name(name).unwrap();
    array.is_valid(row).then(|| match array.data_type() {
        DataType::Int32 => Plain::Int(array.as_primitive::<arrow::datatypes::Int32Type>().value(row).into()),
        DataType::Date32 => Plain::Int(array.as_primitive::<arrow::datatypes::Date32Type>().value(row).into()),
        DataType::UInt8 => Plain::Int(array.as_primitive::<arrow::datatypes::UInt8Type>().value(row).into()),
        DataType::Int64 => Plain::Int(array.as_primitive::<arrow::datatypes::Int64Type>().value(row)),
        DataType::Float64 => Plain::Float(array.as_primitive::<arrow::datatypes::Float64Type>().value(row)),
        DataType::Utf8 => Plain::Text(array.as_string::<i32>().value(row).to_owned()),
        DataType::Boolean => Plain::Bool(array.as_boolean().value(row)),
        other => panic!("{other}"),
    })
}

fn order(left: &Plain, right: &Plain) -> Ordering {
    match (left, right) {
        (Plain::Int(left), Plain::Int(right)) => left.cmp(right),
        (Plain::Text(left), Plain::Text(right)) => left.cmp(right),
        (Plain::Bool(left), Plain::Bool(right)) => left.cmp(right),
        _ => number(left).total_cmp(&number(right)),
    }
}

fn number(value: &Plain) -> f64 {
    match value {
        Plain::Int(value) => *value as f64,
        Plain::Float(value) => *value,
        other => panic!("{other:?}"),
    }
}

fn column_of(name: &'static str) -> Twin {
    (column(name), Box::new(move |row: &Row<'_>| row(name)))
}

/// A column of numbers, a number, or a sum or product.
fn numeric(random: &mut Rng, depth: usize) -> Twin {
    match random.usize(..if depth == 0 { 4 } else { 7 }) {
        0 => column_of(["id", "fare", "small"][random.usize(..3)]),
        1 => column_of("id"),
        2 => {
            let value = random.i64(-300..300);
            (value.into(), Box::new(move |_: &Row<'_>| Some(Plain::Int(value))))
        }
        3 => {
            let value = float(random);
            (value.into(), Box::new(move |_: &Row<'_>| Some(Plain::Float(value))))
        }
        which => {
            let ((left, left_of), (right, right_of)) = (numeric(random, depth - 1), numeric(random, depth - 1));
            let expression = match which {
                4 => left + right,
                5 => left - right,
                _ => left * right,
            };
            let value = move |row: &Row<'_>| {
                Some(match (left_of(row)?, right_of(row)?, which) {
                    (Plain::Int(left), Plain::Int(right), 4) => Plain::Int(left + right),
                    (Plain::Int(left), Plain::Int(right), 5) => Plain::Int(left - right),
                    (Plain::Int(left), Plain::Int(right), _) => Plain::Int(left * right),
                    (left, right, 4) => Plain::Float(number(&left) + number(&right)),
                    (left, right, 5) => Plain::Float(number(&left) - number(&right)),
                    (left, right, _) => Plain::Float(number(&left) * number(&right)),
                })
            };
            (expression, Box::new(value))
        }
    }
}

fn comparison(random: &mut Rng) -> Twin {
    let ((left, left_of), (right, right_of)) = match random.usize(..6) {
        0 => {
            let text = ZONES[random.usize(..4)];
            let literal: Twin = (text.into(), Box::new(move |_: &Row<'_>| Some(Plain::Text(text.into()))));
            (column_of("zone"), literal)
        }
        1 => {
            let day = random.i32(0..300);
            let text = Date32Array::from(vec![day]);
            let text = arrow::util::display::array_value_to_string(&text, 0).unwrap();
            (column_of("day"), (text.into(), Box::new(move |_: &Row<'_>| Some(Plain::Int(day.into()))) as Box<_>))
        }
        // Both sides, so that the operator is exchanged.
        2 => (numeric(random, 0), column_of(["id", "fare", "small", "row"][random.usize(..4)])),
        3 => (column_of(["id", "fare", "small", "row"][random.usize(..4)]), numeric(random, 0)),
        _ => (numeric(random, 2), numeric(random, 2)),
    };
    let (expression, holds): (Expression, fn(Ordering) -> bool) = match random.usize(..6) {
        0 => (left.equal_to(right), Ordering::is_eq),
        1 => (left.not_equal_to(right), Ordering::is_ne),
        2 => (left.less_than(right), Ordering::is_lt),
        3 => (left.at_most(right), Ordering::is_le),
        4 => (left.more_than(right), Ordering::is_gt),
        _ => (left.at_least(right), Ordering::is_ge),
    };
    (expression, Box::new(move |row: &Row<'_>| Some(Plain::Bool(holds(order(&left_of(row)?, &right_of(row)?))))))
}

fn condition(random: &mut Rng, depth: usize) -> Twin {
    let truth = |value: Option<Plain>| value.map(|value| value == Plain::Bool(true));
    match random.usize(..if depth == 0 { 3 } else { 6 }) {
        0 => column_of("paid"),
        1 | 2 => comparison(random),
        3 => {
            let (of, value) = condition(random, depth - 1);
            (!of, Box::new(move |row: &Row<'_>| truth(value(row)).map(|value| Plain::Bool(!value))))
        }
        4 => {
            let name = ["id", "zone", "paid"][random.usize(..3)];
            (column(name).is_null(), Box::new(move |row: &Row<'_>| Some(Plain::Bool(row(name).is_none()))))
        }
        _ => {
            let ((left, left_of), (right, right_of)) = (condition(random, depth - 1), condition(random, depth - 1));
            let is_and = random.bool();
            let expression = if is_and { left.and(right) } else { left.or(right) };
            let value = move |row: &Row<'_>| match (truth(left_of(row)), truth(right_of(row))) {
                (Some(value), _) | (_, Some(value)) if value != is_and => Some(Plain::Bool(value)),
                (Some(_), Some(_)) => Some(Plain::Bool(is_and)),
                _ => None,
            };
            (expression, Box::new(value))
        }
    }
}

#[test]
fn random_expressions_agree_with_a_model() {
    let mut random = random();
    for plane in PLANES {
        let heap = heap(plane, 2 * MIB);
        let batch = rows(&mut random, 3 * CHUNK_ROWS + 17);
        let frame = FarFrame::from_batches(&heap, schema(), [Ok(batch.clone())]).unwrap();
        for _ in 0..if is_deep() { 300 } else { 15 } {
            let (expression, of) = condition(&mut random, 3);
            let kept: BooleanArray = (0..batch.num_rows())
                .map(|row| of(&|name| of_row(&batch, row, name)).map(|value| value == Plain::Bool(true)))
                .collect();
            let far = frame.matching(&expression).unwrap_or_else(|error| panic!("{expression:?}: {error}"));
            let kept = filter_record_batch(&batch, &kept).unwrap();
            assert_eq!(far.rows(), kept.num_rows(), "{expression:?}");
            if far.rows() > 0 {
                same(&near(&far), &kept);
            }
            let (expression, of) = numeric(&mut random, 2);
            let found = frame.totals_of(&expression).unwrap();
            let frame = frame.with_values("value", &expression).unwrap();
            let totals = frame.totals("value").unwrap();
            let is_same = |one: f64, other: f64| one == other || one.is_nan() && other.is_nan();
            assert!(
                found.count == totals.count && is_same(found.sum, totals.sum),
                "{expression:?}: {found:?}, {totals:?}"
            );
            assert_eq!((found.min, found.max), (totals.min, totals.max), "{expression:?}");
            let values = near(&frame.select(&["value"]).unwrap());
            for row in (0..batch.num_rows()).step_by(97) {
                let (far, model) = (of_row(&values, row, "value"), of(&|name| of_row(&batch, row, name)));
                let is_same = match (&far, &model) {
                    (Some(far), Some(model)) => {
                        order(far, model).is_eq() || (number(far).is_nan() && number(model).is_nan())
                    }
                    (far, model) => far.is_none() && model.is_none(),
                };
                assert!(is_same, "{expression:?} in row {row}: {far:?}, {model:?}");
            }
        }
    }
}

#[test]
fn totals_of_expressions_are_those_of_a_loop() {
    let heap = heap(Plane::Page, MIB);
    let batch = rows(&mut random(), 2 * CHUNK_ROWS + 5);
    let frame = FarFrame::from_batches(&heap, schema(), [Ok(batch.clone())]).unwrap();
    let (small, row) = (|| column("small"), || column("row"));
    let value = |name: &str, at: usize| of_row(&batch, at, name).map(|value| number(&value));
    type Model<'m> = Box<dyn Fn(usize) -> Option<f64> + 'm>;
    let twins: [(Expression, Model<'_>); 4] = [
        (
            small() * (Expression::from(0.5) - row()),
            Box::new(|at| Some(value("small", at)? * (0.5 - value("row", at)?))),
        ),
        // Whole numbers, and what a server does not compute.
        (small() * row() + 3.into(), Box::new(|at| Some(value("small", at)? * value("row", at)? + 3.0))),
        (row() / 2.into(), Box::new(|at| Some(value("row", at)? / 2.0))),
        (column("id") * 0.25.into(), Box::new(|at| Some(value("id", at)? * 0.25))),
    ];
    for (expression, of) in twins {
        let values: Vec<f64> = (0..batch.num_rows()).filter_map(&of).collect();
        let totals = frame.totals_of(&expression).unwrap();
        assert_eq!((totals.count, totals.sum), (values.len() as u64, values.iter().sum()), "{expression:?}");
        assert_eq!(totals.max, values.iter().copied().reduce(f64::max), "{expression:?}");
    }
    assert!(matches!(frame.totals_of(&column("zone")), Err(FrameError::Type { .. })));
    assert!(matches!(frame.totals_of(&column("tip")), Err(FrameError::NoColumn { .. })));
}

/// Values that are never a column come to the same, bit for bit, as a column of them.
#[test]
fn computed_values_are_added_up_like_a_column_of_them() {
    let mut random = random();
    let batch = rows(&mut random, 4 * CHUNK_ROWS + 5);
    let fares: Float64Array = (0..batch.num_rows()).map(|_| Some(random.i32(-999..999) as f64 / 7.0)).collect();
    let (fields, price) = (batch.schema().fields().to_vec(), Field::new("price", DataType::Float64, false));
    let schema = Arc::new(Schema::new([fields, vec![Arc::new(price)]].concat()));
    let columns = batch.columns().iter().cloned().chain([Arc::new(fares) as ArrayRef]).collect();
    let batch = RecordBatch::try_new(schema.clone(), columns).unwrap();
    for plane in PLANES {
        let frame = FarFrame::from_batches(&heap(plane, MIB), schema.clone(), [Ok(batch.clone())]).unwrap();
        let product = column("price") * (Expression::from(1.0) - column("price") * column("small"));
        let shifted = column("row").cast(DataType::Float64) + column("price");
        let made = frame.with_values("a", &product).unwrap().with_values("b", &shifted).unwrap();
        let end = random.i64(3000..batch.num_rows() as i64);
        let scan = || frame.scan(&[]).unwrap().computed("a", &product).unwrap().computed("b", &shifted).unwrap();
        for narrowed in [false, true] {
            let narrow = |scan: Scan| match narrowed {
                true => scan.within("row", ..end).unwrap().within("day", 10..).unwrap(),
                false => scan,
            };
            for name in ["a", "b"] {
                let sums =
                    [narrow(scan()), narrow(made.scan(&[]).unwrap())].map(|scan| scan.sums(name).unwrap().unwrap());
                let [far, near] = sums.map(|sums| (sums.count, sums.sum, sums.mean));
                assert_eq!(far, near, "{name}");
            }
            // In one pass and in several, beside columns of other types and with nulls.
            let aggs = ["a", "price", "b", "small", "row", "id"].map(Agg::sum);
            let aggs = [&aggs[..], &[Agg::mean("a"), Agg::count("b"), Agg::rows(), Agg::max("price")]].concat();
            let groups = [narrow(scan()), narrow(made.scan(&[]).unwrap())]
                .map(|scan| scan.groups(&["zone", "paid"], &aggs, 100).unwrap().unwrap());
            // Of a group whose values are all null, the sum is null; the schemas differ in that only.
            assert_eq!(groups[0].columns(), groups[1].columns());
            assert!(groups[0].num_rows() > 9);
        }
        let taken = frame.scan(&[]).unwrap().computed("price", &product);
        assert!(matches!(taken, Err(FrameError::SameName { .. })));
        for near in [column("id") * 0.5.into(), column("price") / 2.0.into(), column("row") * column("small")] {
            assert!(matches!(frame.scan(&[]).unwrap().computed("a", &near), Err(FrameError::Type { .. })), "{near:?}");
        }
        assert!(matches!(scan().groups(&["zone"], &[Agg::max("a")], 9), Err(FrameError::Type { .. })));
        assert!(matches!(scan().groups(&["a"], &[Agg::rows()], 9), Err(FrameError::NoColumn { .. })));
    }
}

#[test]
fn wrong_types_names_and_depths_are_errors() {
    let heap = heap(Plane::Page, MIB);
    let frame = FarFrame::from_csv_text(&heap, "zone,fare,day\nHarlem,7.5,2024-01-31\n").unwrap();
    let error = |condition: Expression| frame.matching(&condition).unwrap_err();
    assert!(matches!(error(column("tip").more_than(1)), FrameError::NoColumn { name } if name == "tip"));
    assert!(matches!(error(column("zone").more_than(1)), FrameError::Types { .. }));
    assert!(matches!(error(column("zone") + 1.into()), FrameError::Types { .. }));
    assert!(matches!(error(column("fare")), FrameError::NoCondition { data_type: DataType::Float64 }));
    assert!(matches!(error(!column("fare")), FrameError::NoCondition { .. }));
    assert!(error(column("day").more_than("Tuesday")).to_string().contains("Tuesday"));
    assert!(matches!(error(column("zone").cast(DataType::Int64).equal_to(1)), FrameError::Arrow(_)));
    let deep = (0..100_000).fold(column("fare"), |sum, _| sum + 1.into());
    assert!(matches!(error(deep.more_than(0)), FrameError::TooDeep { levels_max: 256 }));
}

#[test]
fn a_value_keeps_its_meaning_in_the_type_of_a_column() {
    let heap = heap(Plane::Page, MIB);
    let text = "id,zone,day,at\n10,Harlem,2024-01-31,2024-01-31T12:00:00\n11,,2024-02-01,2024-02-01T00:00:00\n";
    let frame = FarFrame::from_csv_text(&heap, text).unwrap();
    let kept = |condition: Expression| frame.matching(&condition).unwrap().rows();
    assert_eq!(kept(column("id").more_than(10.5)), 1);
    assert_eq!(kept(column("id").equal_to(10.0)), 1);
    assert_eq!(kept(column("id").less_than(1e300)), 2);
    assert_eq!(kept(column("day").at_least("2024-02-01")), 1);
    assert_eq!(kept(column("at").less_than("2024-01-31T12:00:01")), 1);
    assert_eq!(kept(column("zone").equal_to("Harlem")), 1);
    assert_eq!(kept(column("zone").starts_with("Har").and(column("zone").contains("rle"))), 1);
    assert_eq!(kept((!column("zone").is_null()).and(column("zone").ends_with("x"))), 0);
    let ids = (0..1000).map(|id| Expression::from(i64::from(id) * 11));
    assert_eq!(kept(column("id").is_in(ids)), 1);
    assert_eq!(kept(column("id").is_in([])), 0);
    assert_eq!(kept((column("id") / 4.into()).equal_to(2.5)), 1);
    // More conditions than an expression may have levels, none of which is a range.
    let mut conditions: Vec<_> = (0..1024).map(|other| column("id").not_equal_to(other * 11)).collect();
    while conditions.len() > 1 {
        conditions = conditions.chunks(2).map(|pair| pair[0].clone().and(pair[1].clone())).collect();
    }
    assert_eq!(kept(conditions.remove(0)), 1);
}

#[test]
fn columns_are_replaced_and_renamed() {
    let heap = heap(Plane::Page, MIB);
    let frame = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\n").unwrap();
    let frame = frame.with_values("fare", &(column("fare") * 2.into())).unwrap();
    assert_eq!(frame.totals("fare").unwrap().sum, 39.0);
    let frame = frame.with_values("zone", &column("zone").is_null()).unwrap();
    assert_eq!(frame.schema().field(0).data_type(), &DataType::Boolean);
    let swapped = frame.renamed(&[("zone", "fare"), ("fare", "zone")]).unwrap();
    assert_eq!(swapped.totals("zone").unwrap().sum, 39.0);
    assert!(matches!(frame.renamed(&[("zone", "fare")]), Err(FrameError::SameName { name }) if name == "fare"));
    assert!(matches!(frame.renamed(&[("tip", "fare")]), Err(FrameError::NoColumn { name }) if name == "tip"));
}
