//! Does SQL over far tables answer what DataFusion answers about the same rows in plain memory?
//!
//! Danger: a condition that the memory server understands otherwise; rows of a partition that are lost or come twice; a query that waits for ever when its server is gone.
//! `FARFIELD_SEED` repeats the choices.

use farfield::{Heap, Plane};
use farfield_frame::arrow::array::*;
use farfield_frame::arrow::compute::concat_batches;
use farfield_frame::arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use farfield_frame::arrow::util::pretty::pretty_format_batches;
use farfield_frame::{CHUNK_ROWS, FarFrame};
use farfield_server::{Config, Server};
use farfield_sql::datafusion::datasource::MemTable;
use farfield_sql::datafusion::prelude::{SessionConfig, SessionContext};
use farfield_sql::{FarTable, context, to_frame};
use farfield_tests::{MIB, PATIENCE, Scratch, seeded};
use farfield_wic::Registry;
use fastrand::Rng;
use futures_util::StreamExt;
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};

mod tpch;

const NEAR: u64 = 4 * MIB;
const ROWS: usize = 12 * CHUNK_ROWS + 77;

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn serve(scratch: &Scratch) -> (Server, String) {
    let url = format!("unix:{}", scratch.path().join("server").display());
    let functions = Registry::standard();
    let config = Config { listen: vec![url.parse().unwrap()], functions, call_within: PATIENCE, ..Config::default() };
    (Server::start(config).unwrap(), url)
}

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("vendor", DataType::Int32, false),
        Field::new("paid", DataType::UInt8, true),
        Field::new("fare", DataType::Float64, false),
        Field::new("tip", DataType::Float64, true),
        Field::new("odd", DataType::Float64, false),
        Field::new("pickup", DataType::Timestamp(TimeUnit::Second, None), false),
        Field::new("day", DataType::Date32, true),
        Field::new("zone", DataType::Utf8, true),
        Field::new("shared", DataType::Boolean, true),
        Field::new("plate", DataType::Utf8, true),
    ]))
}

fn batch(random: &mut Rng, rows: std::ops::Range<usize>) -> RecordBatch {
    let mut below = |end: usize| random.usize(..end);
    let eighths: Vec<usize> = rows.clone().map(|_| below(110)).collect();
    // What is there below a null is no value.
    let tips: Vec<f64> = eighths.iter().map(|eighths| *eighths as f64 / 8.0 - 1.0).collect();
    let tips = Float64Array::new(tips.into(), Some(eighths.iter().map(|eighths| eighths % 6 > 0).collect()));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(rows.clone().map(|row| row as i64))),
        Arc::new(Int32Array::from_iter_values(rows.clone().map(|_| below(7) as i32 - 1))),
        Arc::new(rows.clone().map(|_| Some(below(9) as u8).filter(|paid| *paid > 0)).collect::<UInt8Array>()),
        Arc::new(Float64Array::from_iter_values(rows.clone().map(|_| below(40_000) as f64 / 4.0 - 100.0))),
        Arc::new(tips),
        Arc::new(Float64Array::from_iter_values(rows.clone().map(|_| match below(30) {
            0 => f64::NAN,
            1 => -0.0,
            number => number as f64 - 2.0,
        }))),
        Arc::new(TimestampSecondArray::from_iter_values(rows.clone().map(|row| 1_600_000_000 + 60 * row as i64))),
        Arc::new(rows.clone().map(|row| (row % 11 > 0).then_some((row / 1440) as i32)).collect::<Date32Array>()),
        Arc::new(
            rows.clone().map(|row| (row % 13 > 0).then(|| format!("zone {}", below(50)))).collect::<StringArray>(),
        ),
        Arc::new(rows.clone().map(|_| [Some(true), Some(false), None][below(3)]).collect::<BooleanArray>()),
        // Too many kinds of strings to have numbers.
        Arc::new(rows.map(|row| (row % 7 > 0).then(|| format!("plate {}", row % 20_000))).collect::<StringArray>()),
    ];
    RecordBatch::try_new(schema(), columns).unwrap()
}

/// The same table `t` far and near, and zones to join it with.
fn twins(heap: &Arc<Heap>) -> (SessionContext, SessionContext) {
    let mut random = seeded(3);
    let batches: Vec<RecordBatch> =
        (0..ROWS).step_by(5000).map(|start| batch(&mut random, start..ROWS.min(start + 5000))).collect();
    let zones =
        FarFrame::from_csv_text(heap, "name,borough\nzone 1,Queens\nzone 7,Bronx\nzone 49,\nelsewhere,Queens\n")
            .unwrap();
    let near_zones = zones.batches().map(Result::unwrap).collect();
    let far = FarFrame::from_batches(heap, schema(), batches.iter().cloned().map(Ok)).unwrap();
    let (here, there) = (SessionContext::new_with_config(SessionConfig::new().with_target_partitions(3)), context());
    there.register_table("t", Arc::new(FarTable::new(far))).unwrap();
    there.register_table("zones", Arc::new(FarTable::new(zones.clone()))).unwrap();
    here.register_table("t", Arc::new(MemTable::try_new(schema(), vec![batches]).unwrap())).unwrap();
    here.register_table("zones", Arc::new(MemTable::try_new(zones.schema(), vec![near_zones]).unwrap())).unwrap();
    (there, here)
}

/// Each is in an order, or of one row.
const QUERIES: [&str; 100] = [
    "select * from t order by id",
    "select zone, fare from t where fare > 9000 order by id",
    "select id from t where fare >= 50 and fare < 51.5 and vendor = 2 order by id",
    "select id, tip from t where tip > 12 order by id",
    "select id, tip from t where tip is null and vendor = 3 order by id limit 10",
    "select id, odd from t where odd >= 0.0 and odd < 2 order by id",
    "select id, odd from t where odd > -0.0 and id < 500 order by id",
    "select id, odd from t where odd > 26 order by id",
    "select id, odd from t where odd = 0.0 and id between 100 and 900 order by id",
    "select id from t where 7 > vendor and paid = 3 and shared order by id",
    "select id from t where pickup >= timestamp '2020-09-14T00:00:00' and pickup < timestamp '2020-09-14T01:00:00' order by id",
    "select id from t where day = date '1970-01-05' order by id",
    "select id from t where vendor in (1, 4) and (fare < -99 or tip > 12.3) order by id",
    "select id from t where zone like '%9' and fare > 9800 order by id",
    "select id from t where fare != 4 and id > 98000 order by id",
    "select id from t where vendor > 2 and vendor < 2 order by id",
    "select id + 1 as next from t where id % 1000 = 7 order by id desc limit 5",
    "select count(*) from t",
    "select count(*), count(tip), min(id), max(id), min(fare), max(fare), min(pickup), max(day) from t",
    "select count(*), sum(vendor), avg(vendor), min(vendor), max(vendor) from t where id > 1000",
    "select sum(fare), avg(fare), count(fare) from t",
    "select sum(fare), avg(fare), min(fare), max(fare), count(*) from t where fare between 10 and 20",
    "select sum(id), sum(paid), avg(tip) from t where fare < -1000",
    "select min(odd), max(odd), count(odd) from t where odd < 5",
    "select sum(odd), count(odd) from t where id < 20",
    "select count(*), count(tip), sum(tip), avg(tip), min(tip), max(tip), sum(paid), avg(paid), count(day), max(day) from t",
    "select id, tip from t where tip < 1.25 and id > 5000 order by id limit 100",
    "select count(*), sum(tip) from t where tip >= 0",
    "select id, paid from t where paid < 2 and fare > 9500 order by id",
    "select sum(vendor), avg(vendor), max(vendor), count(*) from t where vendor > 2 and vendor < 2",
    "select count(*), min(pickup), max(pickup) from t where pickup > timestamp '2020-09-14T00:00:00'",
    "select sum(fare), count(*), sum(vendor) from t where vendor = 3",
    "select sum(vendor), min(vendor), count(*) from t where vendor >= 5 and vendor != 9 and vendor < 100",
    "select vendor, count(*), sum(fare), avg(tip), min(day), max(zone) from t group by vendor order by vendor",
    "select zone, paid, count(*) as trips from t where fare > 100 group by zone, paid having count(*) > 30 order by trips desc, zone, paid",
    "select borough, count(*), avg(fare) from t join zones on zone = name group by borough order by borough nulls first",
    "select vendor, count(*), sum(fare), avg(fare), min(fare), max(fare), sum(id), avg(id), max(pickup) from t group by vendor order by vendor",
    "select vendor, count(*) from t group by vendor order by vendor",
    "select vendor as v, sum(vendor), min(vendor), avg(vendor), count(vendor) from t where vendor > 1 group by v order by v",
    "select vendor, sum(fare), count(fare) from t where pickup >= timestamp '2020-09-14T00:00:00' and fare < 5000 group by vendor order by vendor",
    "select vendor, sum(odd), count(odd) from t group by vendor having count(*) > 14000 order by vendor",
    "select vendor, sum(fare) as s from t where id < 3 group by vendor order by s",
    "select id, sum(fare) from t where id > 97000 group by id order by id",
    "select pickup, count(*), min(id) from t where vendor = 2 and id < 20000 group by pickup order by pickup limit 50",
    "select vendor, sum(id * 2), count(*) from t group by vendor order by vendor",
    "select vendor, sum(id + 9223372036854000000) from t group by vendor order by vendor",
    "select vendor, sum(fare) from t where fare < -1000 group by vendor",
    "select sum(fare), avg(vendor), count(*) from t where vendor = 3 and id > 20000 and pickup < timestamp '2020-10-20T00:00:00'",
    "select a.vendor, a.s, b.n from (select vendor, sum(fare) s from t group by vendor) a join (select vendor, count(*) n from t where fare > 0 group by vendor) b on a.vendor = b.vendor order by 1",
    "select count(*) from (select distinct vendor from t)",
    "select vendor, sum(cast(pickup as bigint)), avg(cast(id as double)), count(zone) from t group by vendor order by vendor",
    "select vendor, sum(cast(pickup as bigint)), avg(cast(id as double)) from t group by vendor order by vendor",
    "select vendor, fare, count(*), sum(id) from t where fare < -90 group by vendor, fare order by vendor, fare",
    "select fare, vendor, max(pickup) from t where vendor = 4 group by fare, vendor order by fare limit 100",
    "select distinct vendor, fare from t where fare between 5 and 9 order by fare, vendor",
    "select vendor, count(distinct paid), sum(fare) filter (where fare > 0) from t group by vendor order by vendor",
    "select id from t where fare > (select avg(fare) * 1.98 from t) order by id",
    "select id, fare - lag(fare) over (order by id) as change from t where vendor = 5 order by id limit 20",
    "select distinct vendor from t where exists (select 1 from zones where name = zone) order by vendor",
    "select paid, count(*), sum(fare), avg(fare) from t group by paid order by paid",
    "select paid, count(*), count(tip), sum(tip), avg(tip), min(tip), max(tip), max(day) from t group by paid order by paid",
    "select vendor, count(tip), sum(tip), avg(tip), min(tip), sum(paid), avg(paid) from t group by vendor order by vendor",
    "select day, vendor, paid, count(*), sum(tip) from t where fare > 9000 group by day, vendor, paid order by day, vendor, paid",
    "select paid, day, vendor, tip, count(*), sum(id), avg(tip) from t where id < 900 group by paid, day, vendor, tip order by paid, day, vendor, tip",
    "select distinct paid, day from t where vendor = 2 order by day, paid",
    "select id, count(tip), sum(tip), avg(tip), max(tip), sum(paid) from t where id between 500 and 999 group by id order by id",
    "select vendor, count(*), sum(tip), avg(paid) from t where tip >= 0 and tip < 3 group by vendor order by vendor",
    "select day, count(*), avg(fare) from t where day <= date '1970-01-10' and paid between 0 and 4 group by day order by day",
    "select shared, count(*), sum(fare), avg(tip), max(day) from t group by shared order by shared",
    "select shared, vendor, paid, count(*), sum(id) from t where fare > 9000 group by shared, vendor, paid order by shared, vendor, paid",
    "select distinct shared from t where vendor = 2 order by shared",
    "select shared, max(shared), count(shared), sum(fare) from t where id < 5000 group by shared order by shared",
    "select sum(tip), count(tip), avg(tip), min(tip), count(*) from t where tip between -1 and 3",
    "select sum(fare), count(*), sum(tip), max(paid) from t where paid <= 3 and vendor = 2",
    "select sum(tip), avg(tip), count(tip), min(tip) from t where id < 9000 and tip < -50",
    "select zone, count(*), sum(fare), avg(tip), max(day) from t group by zone order by zone",
    "select distinct zone from t where vendor = 2 order by zone",
    "select zone, vendor, shared, count(*), sum(id) from t where fare > 9000 group by zone, vendor, shared order by zone, vendor, shared",
    "select zone, max(zone), count(zone), sum(fare) from t where id < 5000 group by zone order by zone",
    "select vendor, count(*), sum(fare) from t where zone = 'zone 7' group by vendor order by vendor",
    "select sum(fare), count(*), sum(tip) from t where 'zone 31' = zone and vendor = 2",
    "select id, zone, plate from t where zone = 'zone 0' and fare > 9000 order by id",
    "select count(*), sum(fare) from t where zone = 'nowhere'",
    "select plate, count(*), sum(fare) from t where plate = 'plate 77' and vendor < 4 group by plate",
    "select count(*), sum(fare) from t where odd > 3",
    "select count(*), sum(fare) from t where odd >= 0.0 and odd < 2",
    "select count(*), sum(fare) from t where odd = 0.0",
    "select count(*) from t where odd > 26 and id < 50000",
    "select count(*), sum(fare) from t where odd < 0.0",
    "select vendor, count(*), sum(fare) from t where odd >= 0.0 group by vendor order by vendor",
    "select sum(fare * (1 - fare)), avg(fare * fare - 2.5), count(fare + 1), sum(fare) from t where id > 1000",
    "select sum(fare * vendor), sum((fare - id) * vendor + 0.5), count(*) from t where vendor = 3 and fare < 70",
    "select sum(fare * odd), avg(odd + fare) from t where id < 20",
    "select sum(fare * odd) from t where id < 3",
    "select sum(fare * 2 - 1) from t where fare < -1000",
    "select sum(fare * tip), sum(cast(vendor as double) * vendor), sum(vendor * 3), min(fare * 2) from t",
    "select vendor, sum(fare * (1 - fare)), avg(fare * (1 - fare) * (1 + fare)), sum(fare), avg(id), count(*) from t group by vendor order by vendor",
    "select paid, shared, sum(fare * id), avg(tip), sum(fare - 0.25), count(tip) from t where fare > 9000 group by paid, shared order by paid, shared",
    "select zone, sum(x), avg(x), count(x) from (select zone as zone, fare * 2.5 - 1 as x from t where vendor > 2) group by zone order by zone",
    "select zone, sum(fare * odd) from t where id < 2000 group by zone order by zone",
];

async fn rows_of(context: &SessionContext, query: &str) -> RecordBatch {
    let answer = context.sql(query).await.unwrap_or_else(|error| panic!("{query}: {error}"));
    let schema = Arc::new(answer.schema().as_arrow().clone());
    let batches = answer.collect().await.unwrap_or_else(|error| panic!("{query}: {error}"));
    concat_batches(&schema, &batches).unwrap()
}

/// The same but for the last bits of sums, which have no order to be added up in.
#[track_caller]
fn same(far: &RecordBatch, near: &RecordBatch, query: &str) {
    let show =
        |batch: &RecordBatch| pretty_format_batches(&[batch.slice(0, batch.num_rows().min(20))]).unwrap().to_string();
    let differ = || panic!("{query}\nfar:\n{}\nnear:\n{}", show(far), show(near));
    if (far.num_rows(), far.num_columns()) != (near.num_rows(), near.num_columns()) {
        differ();
    }
    for (far, near) in far.columns().iter().zip(near.columns()) {
        assert_eq!(far.data_type(), near.data_type(), "{query}");
        let floats = |array: &ArrayRef| {
            array.as_any().downcast_ref::<Float64Array>().map(|array| array.iter().collect::<Vec<_>>())
        };
        let is_same = match (floats(far), floats(near)) {
            (Some(far), Some(near)) => far.iter().zip(&near).all(|pair| match pair {
                (Some(far), Some(near)) => far.total_cmp(near).is_eq() || (far - near).abs() <= 1e-9 * near.abs(),
                (far, near) => far == near,
            }),
            _ => far == near,
        };
        if !is_same {
            differ();
        }
    }
}

#[test]
fn queries_answer_what_they_answer_near() {
    let scratch = Scratch::new("sql");
    let (_server, url) = serve(&scratch);
    let builder = || Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).patience(PATIENCE);
    let heaps = [builder().pool(&url).plane(Plane::Page), builder().pool(&url).plane(Plane::Hybrid), builder()];
    let runtime = runtime();
    for heap in heaps {
        let heap = Arc::new(heap.build().unwrap());
        runtime.block_on(async {
            let (far, near) = twins(&heap);
            for query in QUERIES {
                same(&rows_of(&far, query).await, &rows_of(&near, query).await, query);
            }
        });
    }
}

#[test]
fn answers_are_frames_again() {
    let heap = Arc::new(Heap::builder().near(NEAR).far(1 << 30).build().unwrap());
    runtime().block_on(async {
        let (far, near) = twins(&heap);
        let query = "select zone, vendor, upper(zone) as loud, fare, id from t where fare > 5000 order by id";
        let frame = to_frame(&heap, far.sql(query).await.unwrap()).await.unwrap();
        far.register_table("dear", Arc::new(FarTable::new(frame))).unwrap();
        let again = rows_of(&far, "select zone, vendor, loud, fare from dear order by id").await;
        let right = rows_of(&near, &query.replace("upper(zone)", "cast(upper(zone) as varchar)")).await;
        assert_eq!(again.num_rows(), right.num_rows());
        assert!(again.num_rows() > 2 * CHUNK_ROWS);
        assert!(again.columns()[..2] == right.columns()[..2] && again.column(3) == right.column(3));
    });
}

/// A table `p` with structs and lists, far and near.
fn nested_twins(heap: &Arc<Heap>) -> (SessionContext, SessionContext) {
    let mut random = seeded(5);
    let (mut stops, mut zones, mut lats) = (ListBuilder::new(Int64Builder::new()), Vec::new(), Vec::new());
    let rows = 3 * CHUNK_ROWS + 7;
    for row in 0..rows {
        (0..random.usize(..4)).for_each(|stop| stops.values().append_option((stop != 2).then_some(row as i64)));
        stops.append(random.usize(..5) > 0);
        zones.push((random.usize(..5) > 0).then(|| format!("zone {}", random.usize(..9))));
        lats.push((random.usize(..5) > 0).then(|| random.usize(..80) as f64 / 8.0));
    }
    let zone: ArrayRef = Arc::new(StringArray::from(zones));
    let place = StructArray::try_from(vec![("zone", zone), ("lat", Arc::new(Float64Array::from(lats)))]).unwrap();
    let id = Int64Array::from_iter_values(0..rows as i64);
    let columns: [(&str, ArrayRef); 3] =
        [("id", Arc::new(id)), ("place", Arc::new(place)), ("stops", Arc::new(stops.finish()))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let frame = FarFrame::from_batches(heap, batch.schema(), [Ok(batch.clone())]).unwrap();
    let (far, near) = (context(), SessionContext::new());
    far.register_table("p", Arc::new(FarTable::new(frame))).unwrap();
    near.register_table("p", Arc::new(MemTable::try_new(batch.schema(), vec![vec![batch]]).unwrap())).unwrap();
    (far, near)
}

#[test]
fn structs_and_lists_answer_what_they_answer_near() {
    let heap = Arc::new(Heap::builder().near(MIB).near_max(MIB).far(1 << 30).build().unwrap());
    runtime().block_on(async {
        let (far, near) = nested_twins(&heap);
        for query in [
            "select * from p order by id",
            "select id, stops, place from p where id between 8000 and 8400 order by id",
            "select id, get_field(place, 'zone') as zone from p where get_field(place, 'lat') > 9.5 order by id",
            "select p.place.zone, count(*), avg(p.place.lat) from p where id > 100 group by p.place.zone order by 1",
            "select count(*), count(stops), count(place) from p",
            "select id from p where stops is null order by id",
            "select count(*) from (select distinct place from p)",
            "select count(*) from (select stops, count(*) from p where id < 9000 group by stops)",
            "select id, unnest(stops) as stop from p where id < 500 order by id, stop",
            "select a.id, b.place from p a join p b on a.id = b.id + 9000 order by a.id limit 100",
        ] {
            same(&rows_of(&far, query).await, &rows_of(&near, query).await, query);
        }
        let lists = "select place, array_agg(id order by id) as ids from p group by place";
        let frame = to_frame(&heap, far.sql(lists).await.unwrap()).await.unwrap();
        far.register_table("lists", Arc::new(FarTable::new(frame))).unwrap();
        let order = "order by lists.place.zone, lists.place.lat";
        let again = rows_of(&far, &format!("select ids from lists {order}")).await;
        let right = rows_of(&near, &format!("select ids from ({lists}) as lists {order}")).await;
        assert_eq!(again.column(0), right.column(0));
    });
}

#[test]
fn plans_say_what_is_asked_of_far_memory() {
    let heap = Arc::new(Heap::builder().near(NEAR).far(1 << 30).build().unwrap());
    runtime().block_on(async {
        let (far, _) = twins(&heap);
        let plan = async |query: &str| {
            let plan = far.sql(query).await.unwrap().create_physical_plan().await.unwrap();
            farfield_sql::datafusion::physical_plan::displayable(plan.as_ref()).indent(true).to_string()
        };
        let text = plan("select zone from t where fare > 10 and 3 >= vendor and zone like 'z%' limit 5").await;
        assert!(
            text.contains("FarScan: columns=[zone], ranges=[fare > 10, vendor <= 3], filter=zone@0 LIKE z%, limit=5"),
            "{text}"
        );
        // What one column comes to is found where it is, with ranges of its own.
        for query in [
            "select sum(fare), avg(fare), min(fare), max(fare), count(*) from t where fare between 10 and 20",
            "select sum(fare), sum(vendor), avg(vendor), min(pickup) from t",
            "select count(*), count(tip), sum(tip), avg(tip), min(tip), sum(paid), max(day) from t",
            "select count(*), max(pickup) from t where pickup > timestamp '2020-09-14T00:00:00'",
            "select sum(fare) from t where vendor = 3 and id < 1000",
            "select sum(tip), min(tip) from t where tip > 3",
            "select sum(fare), count(tip) from t where paid = 3",
            "select sum(fare), count(*) from t where zone = 'zone 7' and vendor = 3",
            "select count(*) from t where zone = 'zone 7'",
            "select sum(fare * (1 - odd)), avg(fare * id) from t where id > 1000",
            "select sum(fare * fare), sum(fare * fare * fare) from t",
            "select sum(x), count(*) from (select fare + 0.5 as x, id from t) where id > 1000",
        ] {
            let text = plan(query).await;
            assert!(
                text.contains("FarTotals") && text.contains("FarScan") && !text.contains("AggregateExec"),
                "{text}"
            );
        }
        for query in [
            "select sum(odd) from t where odd > 3",
            "select sum(distinct vendor) from t",
            "select sum(fare) from (select fare from t limit 10)",
            "select sum(fare * tip) from t",
            "select sum(fare / 2) from t",
            "select max(fare * 2) from t",
            "select sum(vendor * 2) from t",
        ] {
            let text = plan(query).await;
            assert!(!text.contains("FarTotals") && text.contains("FarScan"), "{text}");
        }
        // Groups, too, by up to four columns of numbers, dates, times, booleans or few kinds of strings.
        for query in [
            "select vendor, sum(fare), avg(fare), count(*) from t group by vendor",
            "select distinct vendor from t",
            "select vendor, id, sum(fare) from t group by vendor, id",
            "select fare, count(*) from t group by fare",
            "select pickup, max(fare) from t where fare > 100 and vendor = 2 group by pickup order by 2 limit 7",
            "select paid, sum(fare) from t group by paid",
            "select shared, paid, sum(fare), max(tip), count(*) from t group by shared, paid",
            "select vendor, sum(tip), avg(tip) from t where tip > 2 group by vendor",
            "select vendor, day, fare, paid, count(*) from t group by vendor, day, fare, paid",
            "select zone, shared, sum(tip), count(*) from t group by zone, shared",
            "select vendor, sum(fare) from t where zone = 'zone 7' and fare > 3 group by vendor",
            "select vendor, sum(fare * (1 - odd)), sum(fare * (1 - odd) * (1 + fare)), avg(fare) from t group by vendor",
        ] {
            let text = plan(query).await;
            assert!(text.contains("FarGroups: [") && !text.contains("mode=Partial"), "{text}");
        }
        for query in [
            "select odd, count(*) from t group by odd",
            "select vendor, id, fare, paid, day, count(*) from t group by vendor, id, fare, paid, day",
            "select vendor % 2, sum(fare) from t group by vendor % 2",
            "select plate, count(*) from t group by plate",
            "select zone, count(plate) from t group by zone",
            "select vendor, count(*) from t where plate = 'plate 7' group by vendor",
            "select vendor, max(odd) from t group by vendor",
            "select vendor, max(shared) from t group by vendor",
            "select vendor, count(*) from t where zone like '%1' group by vendor",
            "select vendor, sum(id + 1) from t group by vendor",
            "select vendor, sum(fare * tip) from t group by vendor",
            "select vendor, sum(fare * (1 + id)) from t group by vendor",
            "select vendor, min(fare * 2) from t group by vendor",
        ] {
            let text = plan(query).await;
            assert!(!text.contains("FarGroups") && text.contains("mode=Partial"), "{text}");
        }
        // What is computed is said.
        let text = plan("select vendor, sum(fare * (1 - odd)) from t where id > 7 group by vendor").await;
        assert!(text.contains("computed=[fare@1 * (1 - odd@2)], ranges=[id > 7]"), "{text}");
        // What is known is not looked for.
        let text = plan("select count(*), min(fare), max(id) from t").await;
        assert!(!text.contains("FarScan"), "{text}");
        // Of what has NaN or a zero with a sign it is not known.
        let text = plan("select max(odd) from t").await;
        assert!(text.contains("FarScan"), "{text}");
    });
}

#[test]
fn rows_that_the_server_filters_do_not_come_near() {
    let scratch = Scratch::new("sql-far");
    let (_server, url) = serve(&scratch);
    let heap = Heap::builder().near(NEAR / 2).near_max(NEAR / 2).far(1 << 30).pool(&url).patience(PATIENCE);
    let heap = Arc::new(heap.build().unwrap());
    runtime().block_on(async {
        let (far, _) = twins(&heap);
        let fetched = async |query: &str| {
            let before = heap.stats().fetched_bytes;
            rows_of(&far, query).await;
            heap.stats().fetched_bytes - before
        };
        // Columns that nobody asks about are near now.
        fetched("select max(zone), max(plate), max(shared), max(day + 1), max(tip + 1) from t").await;
        let at_server = fetched("select sum(fare), min(fare) from t where fare < 9000").await;
        let computed = fetched("select sum(fare * (1 - fare)), avg(fare * 2) from t where fare < 9000").await;
        let few = fetched("select sum(fare) from t where id = 70000").await;
        let groups = fetched("select vendor, sum(fare) from t where id > 500 group by vendor").await;
        fetched("select max(zone), max(plate), max(shared), max(fare + 1), max(id + 1) from t").await;
        fetched("select max(zone), max(plate), max(shared), max(fare + 1), max(id + 1) from t").await;
        let nulls = fetched("select paid, vendor, sum(tip), avg(tip) from t where tip > 0 group by paid, vendor").await;
        fetched("select max(zone), max(plate), max(shared), max(day + 1), max(tip + 1) from t").await;
        let near = fetched("select sum(fare / 2.0) from t").await;
        let most = at_server.max(computed).max(few).max(groups).max(nulls);
        assert!(
            most * 4 < near,
            "{at_server}, {computed}, {few}, {groups} and {nulls} bytes, and {near} to look at them near"
        );
    });
}

#[test]
fn a_query_that_nobody_waits_for_ends() {
    let heap = Arc::new(Heap::builder().near(NEAR).far(1 << 30).build().unwrap());
    let runtime = runtime();
    runtime.block_on(async {
        let (far, _) = twins(&heap);
        let mut rows = far.sql("select * from t").await.unwrap().execute_stream().await.unwrap();
        assert!(rows.next().await.unwrap().unwrap().num_rows() > 0);
    });
    // Waits for all threads that read.
    drop(runtime);
    assert_eq!(Arc::strong_count(&heap), 1);
}

#[test]
fn a_server_that_is_gone_is_an_error() {
    let scratch = Scratch::new("sql-gone");
    let (server, url) = serve(&scratch);
    let builder = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).pool(&url);
    let heap = Arc::new(builder.build().unwrap());
    runtime().block_on(async {
        let (far, _) = twins(&heap);
        let near = far.sql("select sum(fare + tip) from t where zone like '%1'").await.unwrap();
        let there = far.sql("select vendor, sum(fare) from t group by vendor").await.unwrap();
        drop(server);
        for query in [near, there] {
            let error = query.collect().await.unwrap_err().to_string();
            assert!(error.contains("memory server"), "{error}");
        }
    });
}
