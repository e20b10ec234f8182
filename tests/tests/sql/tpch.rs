//! The queries of TPC-H over far tables, compared with DataFusion's over tables in memory.
//!
//! Guards against a join, a decimal number, a date or a subquery that the smaller queries of this program do not have.

use super::*;
use farfield_frame::arrow::compute::cast;
use farfield_frame::arrow::csv::ReaderBuilder;
use farfield_frame::arrow::datatypes::DataType::{Date32, Decimal128, Int32, Int64, Utf8};
use farfield_sql::context_with;
use farfield_sql::datafusion::execution::runtime_env::RuntimeEnv;
use std::fmt::{Display, Write};
use tpchgen::distribution::Distributions;
use tpchgen::generators::*;
use tpchgen::text::TextPool;

/// Share of the benchmark's smallest size: the least at which each query has an answer.
const SCALE: f64 = 0.015;
/// The comments of the rows are parts of one text of this many bytes. The generator's own has 300 MiB.
const TEXT_BYTES: i32 = 1 << 20;

struct Table {
    name: &'static str,
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
}

impl Table {
    /// Parses rows in the benchmark's own format, in which a bar follows each field.
    fn new<R: Display>(name: &'static str, columns: &str, rows: impl Iterator<Item = R>) -> Table {
        let fields = columns.split(' ').map(|column| Field::new(column, data_type(column), false));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let mut text = String::new();
        rows.for_each(|row| writeln!(text, "{}", row.to_string().trim_end_matches('|')).unwrap());
        let reader = ReaderBuilder::new(schema.clone()).with_delimiter(b'|').with_batch_size(5000);
        let batches = reader.build(text.as_bytes()).unwrap().map(Result::unwrap).collect();
        Table { name, schema, batches }
    }
}

fn data_type(column: &str) -> DataType {
    match column {
        "l_linenumber" | "o_shippriority" | "p_size" | "ps_availqty" => Int32,
        "l_quantity" | "l_extendedprice" | "l_discount" | "l_tax" | "o_totalprice" | "p_retailprice"
        | "ps_supplycost" | "s_acctbal" | "c_acctbal" => Decimal128(15, 2),
        key if key.ends_with("key") => Int64,
        date if date.ends_with("date") => Date32,
        _ => Utf8,
    }
}

fn tables() -> [Table; 8] {
    let words = Distributions::static_default();
    let text = &TextPool::new(TEXT_BYTES, words);
    let region = RegionGenerator::new_with_distributions_and_text_pool(words, text);
    let nation = NationGenerator::new_with_distributions_and_text_pool(words, text);
    let part = PartGenerator::new_with_distributions_and_text_pool(SCALE, 1, 1, words, text);
    let supplier = SupplierGenerator::new_with_distributions_and_text_pool(SCALE, 1, 1, words, text);
    let partsupp = PartSuppGenerator::new_with_text_pool(SCALE, 1, 1, text);
    let customer = CustomerGenerator::new_with_distributions_and_text_pool(SCALE, 1, 1, words, text);
    let orders = OrderGenerator::new_with_distributions_and_text_pool(SCALE, 1, 1, words, text);
    let lineitem = LineItemGenerator::new_with_distributions_and_text_pool(SCALE, 1, 1, words, text);
    [
        Table::new("region", "r_regionkey r_name r_comment", region.iter()),
        Table::new("nation", "n_nationkey n_name n_regionkey n_comment", nation.iter()),
        Table::new(
            "part",
            "p_partkey p_name p_mfgr p_brand p_type p_size p_container p_retailprice p_comment",
            part.iter(),
        ),
        Table::new("supplier", "s_suppkey s_name s_address s_nationkey s_phone s_acctbal s_comment", supplier.iter()),
        Table::new("partsupp", "ps_partkey ps_suppkey ps_availqty ps_supplycost ps_comment", partsupp.iter()),
        Table::new(
            "customer",
            "c_custkey c_name c_address c_nationkey c_phone c_acctbal c_mktsegment c_comment",
            customer.iter(),
        ),
        Table::new(
            "orders",
            "o_orderkey o_custkey o_orderstatus o_totalprice o_orderdate o_orderpriority o_clerk o_shippriority \
             o_comment",
            orders.iter(),
        ),
        Table::new(
            "lineitem",
            "l_orderkey l_partkey l_suppkey l_linenumber l_quantity l_extendedprice l_discount l_tax l_returnflag \
             l_linestatus l_shipdate l_commitdate l_receiptdate l_shipinstruct l_shipmode l_comment",
            lineitem.iter(),
        ),
    ]
}

fn queries() -> Vec<String> {
    let queries = include_str!("tpch.sql").replace("0.0001000000", &format!("{:.10}", 0.0001 / SCALE));
    queries.split(";\n").filter(|query| !query.is_empty()).map(str::to_owned).collect()
}

/// In the benchmark, the numbers in the queries are decimals: 0.06 + 0.01 is 0.07.
fn config(has_decimals: bool) -> SessionConfig {
    let config = SessionConfig::new().with_target_partitions(3);
    config.set_bool("datafusion.sql_parser.parse_float_as_decimal", has_decimals)
}

fn near(config: SessionConfig, tables: &[Table]) -> SessionContext {
    let context = SessionContext::new_with_config(config);
    for Table { name, schema, batches } in tables {
        let table = MemTable::try_new(schema.clone(), vec![batches.clone()]).unwrap();
        context.register_table(*name, Arc::new(table)).unwrap();
    }
    context
}

fn far(config: SessionConfig, heap: &Arc<Heap>, tables: &[Table]) -> SessionContext {
    let context = context_with(config, Arc::new(RuntimeEnv::default()));
    for Table { name, schema, batches } in tables {
        let frame = FarFrame::from_batches(heap, schema.clone(), batches.iter().cloned().map(Ok)).unwrap();
        context.register_table(*name, Arc::new(FarTable::new(frame))).unwrap();
    }
    context
}

#[test]
fn the_queries_of_tpch_answer_what_they_answer_near() {
    let scratch = Scratch::new("tpch");
    let (_server, url) = serve(&scratch);
    let (tables, queries) = (tables(), queries());
    assert_eq!(queries.len(), 22);
    let bytes: usize = tables.iter().flat_map(|table| &table.batches).map(RecordBatch::get_array_memory_size).sum();
    assert!(bytes as u64 > 4 * NEAR, "{bytes}");
    runtime().block_on(async {
        let near = near(config(true), &tables);
        let mut answers = Vec::new();
        for query in &queries {
            let answer = rows_of(&near, query).await;
            assert!(answer.columns().iter().any(|column| column.null_count() < answer.num_rows()), "{query}");
            answers.push(answer);
        }
        let builder = || Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).patience(PATIENCE);
        for heap in [builder().pool(&url), builder()] {
            let far = far(config(true), &Arc::new(heap.build().unwrap()), &tables);
            for (query, answer) in queries.iter().zip(&answers) {
                same(&rows_of(&far, query).await, answer, query);
            }
        }
    });
}

/// Where prices are floating-point numbers, the memory server computes what queries 1 and 6 add up.
#[test]
fn revenues_in_floating_point_are_computed_at_the_server() {
    let scratch = Scratch::new("tpch-floats");
    let (_server, url) = serve(&scratch);
    let mut lines = tables().into_iter().find(|table| table.name == "lineitem").unwrap();
    let field = |field: &Arc<Field>| match field.data_type() {
        Decimal128(..) => Field::new(field.name(), DataType::Float64, false),
        _ => field.as_ref().clone(),
    };
    lines.schema = Arc::new(Schema::new(lines.schema.fields().iter().map(field).collect::<Vec<_>>()));
    for batch in &mut lines.batches {
        let columns = batch.columns().iter().zip(lines.schema.fields());
        let columns = columns.map(|(column, field)| cast(column, field.data_type()).unwrap()).collect();
        *batch = RecordBatch::try_new(lines.schema.clone(), columns).unwrap();
    }
    let heap = Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).patience(PATIENCE).pool(&url).build().unwrap();
    runtime().block_on(async {
        let (heap, tables) = (Arc::new(heap), [lines]);
        let (near, far) = (near(config(false), &tables), far(config(false), &heap, &tables));
        let queries = queries();
        for (query, node) in [(&queries[0], "FarGroups"), (&queries[5], "FarTotals")] {
            let plan = far.sql(query).await.unwrap().create_physical_plan().await.unwrap();
            let plan = farfield_sql::datafusion::physical_plan::displayable(plan.as_ref()).indent(true).to_string();
            assert!(plan.contains(node) && plan.contains("computed=[l_extendedprice"), "{plan}");
            same(&rows_of(&far, query).await, &rows_of(&near, query).await, query);
        }
    });
}
