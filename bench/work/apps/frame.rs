//! Data frame: a table in columns, cut into chunks of rows, which is filtered, grouped, joined and sorted (DRust, section 7).
//!
//! The table is that of the group-by benchmark of h2oai, `G1` with 100 groups: `id1`, `id2`, `id4` and `id5` have as many
//! values as there are groups, `id3` and `id6` one for each hundred rows. A task for each chunk works beside it. What it gives
//! to others, to be grouped or sorted, it leaves in as many parts as there are tasks that take them.

mod kernels;

use super::dsm::{self, DBox, DVec, Far, Here, JoinError, Lent, Owner, ShareError, scope};
use super::{Nodes, all, count_since, counts, in_threads, node_of, store};
use crate::{Options, Outcome};
use anyhow::Result;
use kernels::{Answers, Cell, GROUPS, GroupRow, PARTS, Pivots, RowView, Rows, SAMPLES, TableForm};
use std::sync::Mutex;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let form = TableForm::of(options)?;
    match Nodes::of(options)? {
        None => Ok(plain(options, form)),
        Some(nodes) => nodes.run(|here| shared(here, form)),
    }
}

/// Says what was found, and whether it can be right.
fn finish(outcome: &mut Outcome, answers: &Answers, form: TableForm) {
    outcome.checked(answers.checksum(), answers.errors(form));
}

/// Table in std's types.
struct PlainTable {
    groups: Vec<Rows>,
    rates: Vec<f64>,
    weights: Vec<f64>,
}

/// Returns what a function gives for each number, worked out by so many threads.
fn map_in_threads<R: Send>(threads: u64, count: usize, work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let results: Vec<Mutex<Option<R>>> = (0..count).map(|_| Mutex::new(None)).collect();
    in_threads(threads, results.iter().enumerate(), |(number, result)| {
        *result.lock().expect("no kernel panics") = Some(work(number));
    });
    let result = |result: Mutex<Option<R>>| result.into_inner().expect("no kernel panics").expect("each has a result");
    results.into_iter().map(result).collect()
}

fn plain(options: &Options, form: TableForm) -> Outcome {
    let mut outcome = Outcome::new();
    let table = outcome.phase("fill", form.rows as u64, || PlainTable {
        groups: map_in_threads(options.threads, form.chunks(), |chunk| form.rows_of(chunk)),
        rates: form.rates(),
        weights: form.weights(),
    });
    let (mut answers, sorted) = outcome.phase("ask", form.rows as u64, || ask_plain(&table, options.threads));
    sorted.iter().for_each(|part| answers.see_sorted(part));
    finish(&mut outcome, &answers, form);
    outcome
}

/// Asks all questions. Returns the answers, and the sorted prices in parts.
fn ask_plain(table: &PlainTable, threads: u64) -> (Answers, Vec<Vec<f64>>) {
    let mut answers = Answers::default();
    let chunks = table.groups.len();
    // Filter, and a sum over what is left.
    let filtered = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().filtered());
    let sums = map_in_threads(threads, chunks, |chunk| filtered[chunk].iter().sum::<f64>());
    filtered.iter().zip(sums).for_each(|(left, sum)| answers.add_filtered(left.len(), sum));
    // Few groups.
    let groups = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().small_groups());
    groups.iter().for_each(|groups| answers.add_small_groups(groups));
    // Many groups.
    let scattered = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().scattered());
    let groups =
        map_in_threads(threads, PARTS, |part| kernels::large_groups(scattered.iter().map(|cells| &*cells[part])));
    groups.iter().for_each(|groups| answers.add_large_groups(groups));
    // Join with a small and with a large table.
    let joined =
        map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().joined(&table.rates, &table.weights));
    let sums = map_in_threads(threads, chunks, |chunk| joined[chunk].iter().sum::<f64>());
    sums.into_iter().for_each(|sum| answers.add_joined(sum));
    // Sort.
    let samples = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().sample());
    let pivots = kernels::pivots(samples.iter().flatten().copied());
    let ranges = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().ranges(&pivots));
    let sorted = map_in_threads(threads, PARTS, |part| kernels::merged(ranges.iter().map(|ranges| &*ranges[part])));
    (answers, sorted)
}

/// Columns of a chunk of rows, in shared memory.
#[derive(Far)]
struct RowGroup {
    ids: [DVec<u32>; 6],
    values: [DVec<i32>; 2],
    prices: DVec<f64>,
}

/// Table in shared memory.
#[derive(Far)]
struct Table {
    groups: DVec<RowGroup>,
    /// Tables to join with, by row.
    rates: DVec<f64>,
    weights: DVec<f64>,
}

impl RowGroup {
    fn store(here: &Here<'_>, rows: &Rows) -> Result<RowGroup, ShareError> {
        let mut group = RowGroup {
            ids: std::array::from_fn(|_| DVec::new()),
            values: std::array::from_fn(|_| DVec::new()),
            prices: store(here, &rows.prices)?,
        };
        for (stored, column) in group.ids.iter_mut().zip(&rows.ids) {
            *stored = store(here, column)?;
        }
        for (stored, column) in group.values.iter_mut().zip(&rows.values) {
            *stored = store(here, column)?;
        }
        Ok(group)
    }

    fn view<'a>(&'a self, here: &'a Here<'_>) -> Result<RowView<'a>, ShareError> {
        let [a, b, c, d, e, f] = self.ids.each_ref().map(|column| all(here, column));
        let [v, w] = self.values.each_ref().map(|column| all(here, column));
        Ok(RowView { ids: [a?, b?, c?, d?, e?, f?], values: [v?, w?], prices: all(here, &self.prices)? })
    }
}

impl Table {
    /// Makes a table. Each node makes its part of the rows.
    fn filled(here: &Here<'_>, form: TableForm) -> Result<DBox<Table>, JoinError> {
        let chunks = form.chunks();
        let make = |here: &Here<'_>, (form, chunk): (TableForm, usize)| RowGroup::store(here, &form.rows_of(chunk));
        let tasks = (0..chunks).map(|chunk| here.spawn_to(node_of(here, chunk, chunks), (form, chunk), make));
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        let mut groups = DVec::new();
        tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(groups.push(here, task.join(here)??)?))?;
        Ok(here.alloc(Table { groups, rates: store(here, &form.rates())?, weights: store(here, &form.weights())? })?)
    }

    fn rows<'a>(&'a self, here: &'a Here<'_>, chunk: usize) -> Result<RowView<'a>, ShareError> {
        self.groups.get(here, chunk)?.expect("each chunk has a task").view(here)
    }
}

/// Runs a task beside each chunk of a table. Returns what they return, in order.
fn each_chunk<X, R>(
    here: &Here<'_>,
    table: &DBox<Table>,
    extra: X,
    body: impl for<'t, 'h> FnOnce(&Here<'h>, (Lent<'t, Table>, usize, X)) -> Result<R, ShareError> + Copy,
) -> Result<Vec<R>, JoinError>
where
    X: Far + Copy,
    R: Far,
{
    let chunks = table.get(here)?.groups.len();
    scope(here, |s| {
        let start = |chunk| s.spawn_to(node_of(here, chunk, chunks), (s.lend(table), chunk, extra), body);
        let tasks = (0..chunks).map(start).collect::<Result<Vec<_>, ShareError>>()?;
        tasks.into_iter().map(|task| Ok(task.join()??)).collect()
    })?
}

/// Runs a task for each part of what chunks have left, which it owns. Returns what they return, in order.
fn each_part<T: Far, R: Far>(
    here: &Here<'_>,
    left: Vec<[DVec<T>; PARTS]>,
    body: impl for<'h> FnOnce(&Here<'h>, (DVec<DVec<T>>,)) -> Result<R, ShareError> + Copy + 'static,
) -> Result<Vec<R>, JoinError> {
    let mut parts: [DVec<DVec<T>>; PARTS] = std::array::from_fn(|_| DVec::new());
    for left in left {
        for (part, values) in parts.iter_mut().zip(left) {
            part.push(here, values)?;
        }
    }
    let start = |(number, part)| here.spawn_to(node_of(here, number, PARTS), (part,), body);
    let tasks = parts.into_iter().enumerate().map(start).collect::<Result<Vec<_>, ShareError>>()?;
    tasks.into_iter().map(|task| Ok(task.join(here)??)).collect()
}

/// Stores what a chunk leaves for each part.
fn store_parts<T: Far + Copy>(here: &Here<'_>, parts: &[Vec<T>; PARTS]) -> Result<[DVec<T>; PARTS], ShareError> {
    let mut stored = std::array::from_fn(|_| DVec::new());
    for (stored, values) in stored.iter_mut().zip(parts) {
        *stored = store(here, values)?;
    }
    Ok(stored)
}

/// Borrows what all chunks have left for one part.
fn all_of<'a, T: Far>(here: &'a Here<'_>, part: &'a DVec<DVec<T>>) -> Result<Vec<&'a [T]>, ShareError> {
    // What is needed soon is asked for at once.
    for values in part.iter(here) {
        if let Some(values) = values?.chunk(here, 0)? {
            values.prefetch(here);
        }
    }
    part.iter(here).map(|values| all(here, values?)).collect()
}

/// Asks all questions. Returns the answers, and the sorted prices in parts.
fn ask(here: &Here<'_>, table: &DBox<Table>) -> Result<(Answers, Vec<DVec<f64>>), JoinError> {
    let mut answers = Answers::default();
    // Filter, and a sum over what is left.
    let filtered = each_chunk(here, table, (), |here, (table, chunk, ())| {
        let filtered = table.get(here)?.rows(here, chunk)?.filtered();
        store(here, &filtered)
    })?;
    for (left, sum) in filtered.iter().zip(sums(here, &filtered)?) {
        answers.add_filtered(left.len(), sum);
    }
    // Few groups.
    let groups = each_chunk(here, table, (), |here, (table, chunk, ())| {
        Ok::<[i64; GROUPS], _>(table.get(here)?.rows(here, chunk)?.small_groups())
    })?;
    groups.iter().for_each(|groups| answers.add_small_groups(groups));
    // Many groups.
    let scattered = each_chunk(here, table, (), |here, (table, chunk, ())| {
        let scattered: [Vec<Cell>; PARTS] = table.get(here)?.rows(here, chunk)?.scattered();
        store_parts(here, &scattered)
    })?;
    let groups = each_part(here, scattered, |here, (part,)| {
        let groups: Vec<GroupRow> = kernels::large_groups(all_of(here, &part)?.into_iter());
        store(here, &groups)
    })?;
    for groups in &groups {
        answers.add_large_groups(all(&here.enter(), groups)?);
    }
    // Join with a small and with a large table.
    let joined = each_chunk(here, table, (), |here, (table, chunk, ())| {
        let table = table.get(here)?;
        let joined = table.rows(here, chunk)?.joined(all(here, &table.rates)?, all(here, &table.weights)?);
        store(here, &joined)
    })?;
    sums(here, &joined)?.into_iter().for_each(|sum| answers.add_joined(sum));
    // Sort.
    let samples = each_chunk(here, table, (), |here, (table, chunk, ())| {
        Ok::<[f64; SAMPLES], _>(table.get(here)?.rows(here, chunk)?.sample())
    })?;
    let pivots: Pivots = kernels::pivots(samples.iter().flatten().copied());
    let ranges = each_chunk(here, table, pivots, |here, (table, chunk, pivots)| {
        let ranges = table.get(here)?.rows(here, chunk)?.ranges(&pivots);
        store_parts(here, &ranges)
    })?;
    let sorted = each_part(here, ranges, |here, (part,)| {
        let sorted = kernels::merged(all_of(here, &part)?.into_iter());
        store(here, &sorted)
    })?;
    Ok((answers, sorted))
}

fn sum(here: &Here<'_>, (values,): (Lent<'_, [f64]>,)) -> Result<f64, ShareError> {
    Ok(values.get(here)?.iter().sum())
}

/// Returns the sum of each column, worked out beside it.
fn sums(here: &Here<'_>, columns: &[DVec<f64>]) -> Result<Vec<f64>, JoinError> {
    let mut values = Vec::new();
    for column in columns {
        values.extend(column.chunk(here, 0)?);
    }
    let sums: Vec<f64> = scope(here, |s| {
        let tasks = values.iter().map(|values| s.spawn_to(values.home(), (s.lend(*values),), sum));
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        tasks.into_iter().map(|task| Ok(task.join()??)).collect::<Result<_, JoinError>>()
    })??;
    Ok(sums)
}

fn shared(here: &Here<'_>, form: TableForm) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let table = outcome.phase("fill", form.rows as u64, || Table::filled(here, form))?;
    let before = counts(here)?;
    let (mut answers, sorted) = outcome.phase("ask", form.rows as u64, || dsm::measured(|| ask(here, &table)))?;
    count_since(here, before, form.chunks() as u64, &mut outcome)?;
    for part in &sorted {
        answers.see_sorted(all(&here.enter(), part)?);
    }
    finish(&mut outcome, &answers, form);
    Ok(outcome)
}
