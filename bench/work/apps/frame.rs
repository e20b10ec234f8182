//! Data frame: a table in columns, cut into chunks of rows, which is filtered, grouped, joined and sorted (DRust, section 7).
//!
//! The table is that of the group-by benchmark of h2oai, `G1` with 100 groups: `id1`, `id2`, `id4` and `id5` have as many
//! values as there are groups, `id3` and `id6` one for each hundred rows.

mod kernels;

use super::chunked::{
    AtNodes, PARTS, Parts, all_of, by_part, each, left_for, list, map_in_threads, own, store_parts, summed,
};
use super::dsm::{self, DBox, DVec, Far, Here, JoinError, Lent, Owner, ShareError};
use super::sorting::{self, Pivots};
use super::{Nodes, all, count_since, counts, store};
use crate::{Options, Outcome};
use anyhow::Result;
use kernels::{Answers, Cell, GROUPS, GroupRow, GroupSums, RowView, Rows, TableForm};

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
    answers.small_groups = summed(&groups).to_vec();
    // Many groups.
    let scattered = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().scattered());
    let groups = map_in_threads(threads, PARTS, |part| {
        let groups = kernels::large_groups(scattered.iter().map(|cells| &*cells[part]));
        let sums = GroupSums::of(&groups);
        (groups, sums)
    });
    groups.iter().for_each(|(_, sums)| answers.large_groups.add(*sums));
    // Join with a small and with a large table.
    let joined =
        map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().joined(&table.rates, &table.weights));
    let sums = map_in_threads(threads, chunks, |chunk| joined[chunk].iter().sum::<f64>());
    sums.into_iter().for_each(|sum| answers.add_joined(sum));
    // Sort.
    let samples = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().sample());
    let pivots = sorting::pivots(samples.iter().flatten().copied());
    let ranges = map_in_threads(threads, chunks, |chunk| table.groups[chunk].view().ranges(&pivots));
    let sorted = map_in_threads(threads, PARTS, |part| sorting::merged(ranges.iter().map(|ranges| &*ranges[part])));
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
        let at = here.nodes().flat_map(|node| own(here, node, chunks).map(move |chunk| (node, chunk)));
        let tasks = at.map(|(node, chunk)| here.spawn_to(node, (form, chunk), make));
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        let mut groups = DVec::new();
        tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(groups.push(here, task.join(here)??)?))?;
        Ok(here.alloc(Table { groups, rates: store(here, &form.rates())?, weights: store(here, &form.weights())? })?)
    }

    fn rows<'a>(&'a self, here: &'a Here<'_>, chunk: usize) -> Result<RowView<'a>, ShareError> {
        self.groups.get(here, chunk)?.expect("each chunk has a task").view(here)
    }
}

/// Sorted prices, in parts at each node.
type SortedPrices = Vec<DVec<DVec<f64>>>;
/// Asks all questions. Returns the answers, and the sorted prices in parts at their nodes.
fn ask(here: &Here<'_>, table: &DBox<Table>) -> Result<(Answers, SortedPrices), JoinError> {
    let mut answers = Answers::default();
    let chunks = table.get(here)?.groups.len();
    // Filter, and a sum over what is left.
    let filter = |here: &Here<'_>, (table, chunk, ()): (Lent<'_, Table>, usize, ())| {
        store(here, &table.get(here)?.rows(here, chunk)?.filtered())
    };
    let filtered = each(here, table, chunks, (), filter, |here, left| list(here, left.into_iter()))?;
    for (count, sum) in sums(here, chunks, filtered)? {
        answers.add_filtered(count, sum);
    }
    // Few groups.
    let group = |here: &Here<'_>, (table, chunk, ()): (Lent<'_, Table>, usize, ())| {
        Ok(table.get(here)?.rows(here, chunk)?.small_groups())
    };
    let groups: Vec<[i64; GROUPS]> = each(here, table, chunks, (), group, |_, groups| Ok(summed(&groups)))?;
    answers.small_groups = summed(&groups).to_vec();
    // Many groups.
    let scatter = |here: &Here<'_>, (table, chunk, ()): (Lent<'_, Table>, usize, ())| {
        let table = table.get(here)?;
        // All nodes join with the large table next.
        if let Some(weights) = table.weights.chunk(here, 0)? {
            weights.prefetch(here);
        }
        store_parts(here, &table.rows(here, chunk)?.scattered())
    };
    let left: Vec<Parts<Cell>> = each(here, table, chunks, (), scatter, by_part)?;
    let left = here.alloc(list(here, left.into_iter())?)?;
    let group = |here: &Here<'_>, (left, part, ()): (Lent<'_, AtNodes<DVec<Cell>>>, usize, ())| {
        let groups: Vec<GroupRow> = kernels::large_groups(left_for(here, left.get(here)?, part)?.into_iter());
        Ok((store(here, &groups)?, GroupSums::of(&groups)))
    };
    let groups = each(here, &left, PARTS, (), group, |here, groups| {
        let mut all_sums = GroupSums::default();
        groups.iter().for_each(|(_, sums)| all_sums.add(*sums));
        Ok((list(here, groups.into_iter().map(|(groups, _)| groups))?, all_sums))
    })?;
    groups.iter().for_each(|(_, sums)| answers.large_groups.add(*sums));
    drop((left, groups));
    // Join with a small and with a large table.
    let join = |here: &Here<'_>, (table, chunk, ()): (Lent<'_, Table>, usize, ())| {
        let table = table.get(here)?;
        store(here, &table.rows(here, chunk)?.joined(all(here, &table.rates)?, all(here, &table.weights)?))
    };
    let joined = each(here, table, chunks, (), join, |here, left| list(here, left.into_iter()))?;
    sums(here, chunks, joined)?.into_iter().for_each(|(_, sum)| answers.add_joined(sum));
    // Sort.
    let sample = |here: &Here<'_>, (table, chunk, ()): (Lent<'_, Table>, usize, ())| {
        Ok(table.get(here)?.rows(here, chunk)?.sample())
    };
    let samples = each(here, table, chunks, (), sample, |here, samples| store(here, samples.as_flattened()))?;
    let pivots = sorting::pivots(all_of(&here.enter(), samples.iter())?.into_iter().flatten().copied());
    let divide = |here: &Here<'_>, (table, chunk, pivots): (Lent<'_, Table>, usize, Pivots<f64>)| {
        store_parts(here, &table.get(here)?.rows(here, chunk)?.ranges(&pivots))
    };
    let left: Vec<Parts<f64>> = each(here, table, chunks, pivots, divide, by_part)?;
    let left = here.alloc(list(here, left.into_iter())?)?;
    let merge = |here: &Here<'_>, (left, part, ()): (Lent<'_, AtNodes<DVec<f64>>>, usize, ())| {
        store(here, &sorting::merged(left_for(here, left.get(here)?, part)?.into_iter()))
    };
    let sorted = each(here, &left, PARTS, (), merge, |here, sorted| list(here, sorted.into_iter()))?;
    Ok((answers, sorted))
}

/// Returns the length and the sum of each chunk's column, worked out beside it.
fn sums(here: &Here<'_>, chunks: usize, columns: Vec<DVec<DVec<f64>>>) -> Result<Vec<(usize, f64)>, JoinError> {
    let columns = here.alloc(list(here, columns.into_iter())?)?;
    let sum = |here: &Here<'_>, (columns, chunk, chunks): (Lent<'_, AtNodes<DVec<f64>>>, usize, usize)| {
        let columns = columns.get(here)?.get(here, here.id().0.into())?.expect("each node has left some");
        let column = columns.get(here, chunk - own(here, here.id(), chunks).start)?.expect("each chunk has one");
        Ok((column.len(), all(here, column)?.iter().sum::<f64>()))
    };
    let sums = each(here, &columns, chunks, chunks, sum, |here, sums| store(here, &sums))?;
    Ok(all_of(&here.enter(), sums.iter())?.concat())
}

fn shared(here: &Here<'_>, form: TableForm) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let table = outcome.phase("fill", form.rows as u64, || Table::filled(here, form))?;
    let before = counts(here)?;
    let (mut answers, sorted) = outcome.phase("ask", form.rows as u64, || dsm::measured(|| ask(here, &table)))?;
    count_since(here, before, form.chunks() as u64, &mut outcome)?;
    for part in sorted.iter().flat_map(|node| node.iter(here)) {
        answers.see_sorted(all(&here.enter(), part?)?);
    }
    finish(&mut outcome, &answers, form);
    Ok(outcome)
}
