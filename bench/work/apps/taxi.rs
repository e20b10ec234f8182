//! Questions about a real table, whose answers are known: trips of New York's green taxis are counted, grouped, filtered, joined and
//! sorted, as the made table of [`frame`](super::frame) is.

mod trips;

use super::chunked::{
    AtNodes, PARTS, Parts, all_of, by_part, each, left_for, list, map_in_threads, own, store_parts, summed,
};
use super::dsm::{self, DBox, DVec, Far, Here, JoinError, Lent, ShareError};
use super::sorting::{self, Pivots};
use super::{Nodes, all, count_since, counts, store};
use crate::{Options, Outcome};
use anyhow::Result;
use trips::{COLUMNS, PaidByBorough, SortedBy, Tally, TripAnswers, TripForm, TripView, Trips};

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let form = TripForm::of(options)?;
    match Nodes::of(options)? {
        None => plain(options, form),
        Some(nodes) => nodes.run(|here| shared(here, form)),
    }
}

fn plain(options: &Options, form: TripForm) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let table = outcome.phase("fill", form.rows as u64, || {
        (0..form.chunks()).map(|chunk| form.read(chunk)).collect::<Result<Vec<_>>>()
    })?;
    let boroughs = trips::boroughs()?;
    let ask = || ask_plain(&table, &boroughs, options.threads);
    let (answers, [by_seconds, by_month]) = outcome.phase("ask", form.rows as u64, ask);
    answers.finish(&mut outcome, &by_seconds.concat(), &by_month.concat())?;
    Ok(outcome)
}

/// Asks all questions. Returns the answers, and the keys by which trips are sorted in parts.
fn ask_plain(table: &[Trips], boroughs: &[i32], threads: u64) -> (TripAnswers, [Vec<Vec<u64>>; 2]) {
    let chunks = table.len();
    let tally = Tally::sum(&map_in_threads(threads, chunks, |chunk| table[chunk].view().tally()));
    let filtered = map_in_threads(threads, chunks, |chunk| table[chunk].view().paid_for_long());
    let paid = filtered.iter().flatten().map(|paid| i64::from(*paid)).sum();
    let long = (filtered.iter().map(Vec::len).sum(), paid);
    let pairs = map_in_threads(threads, chunks, |chunk| table[chunk].view().pairs());
    let pairs = map_in_threads(threads, PARTS, |part| trips::distinct(pairs.iter().map(|pairs| &*pairs[part])));
    let paid = map_in_threads(threads, chunks, |chunk| table[chunk].view().paid_by_borough(boroughs));
    let answers = TripAnswers { tally, long, pairs: pairs.iter().sum(), paid: summed(&paid) };
    let sorted = [SortedBy::Seconds, SortedBy::MonthAndSeconds].map(|by| {
        let samples = map_in_threads(threads, chunks, |chunk| table[chunk].view().sample(by));
        let pivots = sorting::pivots(samples.iter().flatten().copied());
        let ranges = map_in_threads(threads, chunks, |chunk| table[chunk].view().ranges(by, &pivots));
        map_in_threads(threads, PARTS, |part| sorting::merged(ranges.iter().map(|ranges| &*ranges[part])))
    });
    (answers, sorted)
}

/// Columns of a chunk of trips, in shared memory.
#[derive(Far)]
struct TripGroup {
    columns: [DVec<i32>; COLUMNS],
}

/// Trips in shared memory.
#[derive(Far)]
struct TripTable {
    groups: DVec<TripGroup>,
    /// Table to join with, by place.
    boroughs: DVec<i32>,
}

impl TripGroup {
    fn store(here: &Here<'_>, trips: &Trips) -> Result<TripGroup, ShareError> {
        let mut columns = std::array::from_fn(|_| DVec::new());
        for (stored, column) in columns.iter_mut().zip(&trips.columns) {
            *stored = store(here, column)?;
        }
        Ok(TripGroup { columns })
    }

    fn view<'a>(&'a self, here: &'a Here<'_>) -> Result<TripView<'a>, ShareError> {
        let mut columns = [&[][..]; COLUMNS];
        for (borrowed, column) in columns.iter_mut().zip(&self.columns) {
            *borrowed = all(here, column)?;
        }
        Ok(TripView { columns })
    }
}

impl TripTable {
    /// Reads a table. Each node reads its part of the trips.
    fn read(here: &Here<'_>, form: TripForm) -> Result<DBox<TripTable>> {
        let chunks = form.chunks();
        let read = |here: &Here<'_>, (form, chunk): (TripForm, usize)| {
            TripGroup::store(here, &form.read(chunk).expect("the file could be read before"))
        };
        let at = here.nodes().flat_map(|node| own(here, node, chunks).map(move |chunk| (node, chunk)));
        let tasks = at.map(|(node, chunk)| here.spawn_to(node, (form, chunk), read));
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        let mut groups = DVec::new();
        tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(groups.push(here, task.join(here)??)?))?;
        Ok(here.alloc(TripTable { groups, boroughs: store(here, &trips::boroughs()?)? })?)
    }

    fn trips<'a>(&'a self, here: &'a Here<'_>, chunk: usize) -> Result<TripView<'a>, ShareError> {
        self.groups.get(here, chunk)?.expect("each chunk has a task").view(here)
    }
}

/// Sorted keys, in parts at each node.
type SortedKeys = Vec<DVec<DVec<u64>>>;
/// Arguments of the task of a chunk.
type Chunk<'t, X> = (Lent<'t, TripTable>, usize, X);

/// Asks all questions. Returns the answers, and the keys by which trips are sorted in parts at their nodes.
fn ask(here: &Here<'_>, table: &DBox<TripTable>) -> Result<(TripAnswers, [SortedKeys; 2]), JoinError> {
    let chunks = table.get(here)?.groups.len();
    let tally = |here: &Here<'_>, (table, chunk, ()): Chunk<'_, ()>| Ok(table.get(here)?.trips(here, chunk)?.tally());
    let tally = each(here, table, chunks, (), tally, |_, tallies| Ok(Tally::sum(&tallies)))?;
    let filter = |here: &Here<'_>, (table, chunk, ()): Chunk<'_, ()>| {
        store(here, &table.get(here)?.trips(here, chunk)?.paid_for_long())
    };
    let filtered = each(here, table, chunks, (), filter, |here, left| list(here, left.into_iter()))?;
    let long = sums(here, filtered)?;
    let divide = |here: &Here<'_>, (table, chunk, ()): Chunk<'_, ()>| {
        store_parts(here, &table.get(here)?.trips(here, chunk)?.pairs())
    };
    let left: Vec<Parts<u32>> = each(here, table, chunks, (), divide, by_part)?;
    let left = here.alloc(list(here, left.into_iter())?)?;
    let count = |here: &Here<'_>, (left, part, ()): (Lent<'_, AtNodes<DVec<u32>>>, usize, ())| {
        Ok(trips::distinct(left_for(here, left.get(here)?, part)?.into_iter()))
    };
    let pairs = each(here, &left, PARTS, (), count, |_, counts| Ok(counts.iter().sum::<usize>()))?;
    drop(left);
    let join = |here: &Here<'_>, (table, chunk, ()): Chunk<'_, ()>| {
        let table = table.get(here)?;
        Ok(table.trips(here, chunk)?.paid_by_borough(all(here, &table.boroughs)?))
    };
    let paid: Vec<PaidByBorough> = each(here, table, chunks, (), join, |_, paid| Ok(summed(&paid)))?;
    let answers = TripAnswers { tally: Tally::sum(&tally), long, pairs: pairs.iter().sum(), paid: summed(&paid) };
    let sorted = [sort(here, table, SortedBy::Seconds)?, sort(here, table, SortedBy::MonthAndSeconds)?];
    Ok((answers, sorted))
}

/// Returns how many numbers there are, and their sum, worked out beside them.
fn sums(here: &Here<'_>, columns: Vec<DVec<DVec<i32>>>) -> Result<(usize, i64), JoinError> {
    let mut all_sums = (0, 0);
    let tasks = here.nodes().zip(columns).map(|(node, columns)| {
        here.spawn_to(node, (columns,), |here, (columns,)| {
            columns.iter(here).try_fold((0, 0), |(count, sum), column| {
                let column = all(here, column?)?;
                Ok::<_, ShareError>((
                    count + column.len(),
                    sum + column.iter().map(|paid| i64::from(*paid)).sum::<i64>(),
                ))
            })
        })
    });
    for task in tasks.collect::<Result<Vec<_>, ShareError>>()? {
        let (count, sum) = task.join(here)??;
        all_sums = (all_sums.0 + count, all_sums.1 + sum);
    }
    Ok(all_sums)
}

fn sort(here: &Here<'_>, table: &DBox<TripTable>, by: SortedBy) -> Result<SortedKeys, JoinError> {
    let chunks = table.get(here)?.groups.len();
    let sample =
        |here: &Here<'_>, (table, chunk, by): Chunk<'_, SortedBy>| Ok(table.get(here)?.trips(here, chunk)?.sample(by));
    let samples = each(here, table, chunks, by, sample, |here, samples| store(here, samples.as_flattened()))?;
    let pivots = sorting::pivots(all_of(&here.enter(), samples.iter())?.into_iter().flatten().copied());
    let divide = |here: &Here<'_>, (table, chunk, (by, pivots)): Chunk<'_, (SortedBy, Pivots<u64>)>| {
        store_parts(here, &table.get(here)?.trips(here, chunk)?.ranges(by, &pivots))
    };
    let left: Vec<Parts<u64>> = each(here, table, chunks, (by, pivots), divide, by_part)?;
    let left = here.alloc(list(here, left.into_iter())?)?;
    let merge = |here: &Here<'_>, (left, part, ()): (Lent<'_, AtNodes<DVec<u64>>>, usize, ())| {
        store(here, &sorting::merged(left_for(here, left.get(here)?, part)?.into_iter()))
    };
    each(here, &left, PARTS, (), merge, |here, sorted| list(here, sorted.into_iter()))
}

fn shared(here: &Here<'_>, form: TripForm) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let table = outcome.phase("fill", form.rows as u64, || TripTable::read(here, form))?;
    let before = counts(here)?;
    let (answers, sorted) = outcome.phase("ask", form.rows as u64, || dsm::measured(|| ask(here, &table)))?;
    count_since(here, before, form.chunks() as u64, &mut outcome)?;
    let mut keys = [Vec::with_capacity(form.rows), Vec::with_capacity(form.rows)];
    for (keys, sorted) in keys.iter_mut().zip(&sorted) {
        for part in sorted.iter().flat_map(|node| node.iter(here)) {
            keys.extend_from_slice(all(&here.enter(), part?)?);
        }
    }
    answers.finish(&mut outcome, &keys[0], &keys[1])?;
    Ok(outcome)
}
