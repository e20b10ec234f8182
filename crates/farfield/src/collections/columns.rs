//! Push-down over several columns: rows that are far in all columns are processed at the server,
//! the others here.

use super::{FarVec, range_of};
use crate::Heap;
use crate::error::FarError;
use crate::heap::{FarRange, HeapInner, Scope};
use crate::offload::{CHANNELS, OffloadError, OffloadLayout, OffloadTarget};
use core::ops::{Bound, Range, RangeBounds};
use farfield_wic::columns::{CONDITIONS_MAX, Cell, Column, Condition, KEYS_MAX, Key, Rows, keep};
use farfield_wic::{CallError, Function, Number, Where};
use std::collections::{BTreeMap, VecDeque};

/// Bytes of each column that one call processes, at most.
const CALL_BYTES: u64 = 16 << 20;
/// Rows that one call processes, at least: a call costs as much as some thousands.
const CALL_ROWS: usize = 64 * 1024;
/// Runs of rows in one call, at most. Their encoding is a part of the longest argument.
const CALL_RUNS: usize = 256;
/// Up to this many far rows are fetched instead: that takes less than a call, or not much more.
const FEW_ROWS: usize = 2048;
/// An answer that is full after fewer rows shows that there are many different values. The rest is
/// processed faster here.
const FULL_ROWS: u64 = 64 * 1024;
/// Near rows that are worth one more thread: they take a millisecond or two.
const THREAD_ROWS: usize = 128 * 1024;
/// Threads of a query, at most. Each may meet all keys, and has memory of its own for them.
const THREADS_MAX: usize = 8;

/// A vector of numbers, or of bits, as a column, with its type erased.
pub(super) trait AnyColumn: Sync {
    fn cell(&self) -> Cell;
    fn rows(&self) -> usize;
    /// Returns the number of rows of a unit.
    fn per_unit(&self) -> usize;
    fn is_far(&self, unit: usize) -> bool;
    fn ranges(&self, rows: Range<usize>) -> Vec<FarRange>;
    /// Adds the places of these rows, in the form that server functions use.
    fn add_pieces(&self, rows: Range<usize>, pieces: &mut Vec<farfield_wic::Range>);
    fn heap(&self) -> Option<*const HeapInner>;
    /// Reads the images of rows of one unit.
    fn images(&self, scope: &Scope<'_>, rows: Range<usize>, into: &mut Vec<u64>) -> Result<(), FarError>;
}

impl<N: Number> AnyColumn for FarVec<N> {
    fn cell(&self) -> Cell {
        Cell::Number(N::KIND)
    }

    fn rows(&self) -> usize {
        self.len()
    }

    fn per_unit(&self) -> usize {
        super::paged::Paged::<N>::PER_UNIT
    }

    fn is_far(&self, unit: usize) -> bool {
        self.units.is_far(unit)
    }

    fn ranges(&self, rows: Range<usize>) -> Vec<FarRange> {
        self.far_ranges(rows).collect()
    }

    fn add_pieces(&self, rows: Range<usize>, pieces: &mut Vec<farfield_wic::Range>) {
        let bytes = size_of::<N>() as u64;
        self.far_ranges(rows).for_each(|piece| super::vec::add(pieces, piece.start, piece.len / bytes, bytes));
    }

    fn heap(&self) -> Option<*const HeapInner> {
        self.units.core()
    }

    fn images(&self, scope: &Scope<'_>, rows: Range<usize>, into: &mut Vec<u64>) -> Result<(), FarError> {
        into.clear();
        for chunk in self.chunks_in(scope, rows) {
            into.extend(chunk?.iter().map(|number| number.image()));
        }
        Ok(())
    }
}

/// Words whose bits are a column, the lowest bit of each word first.
#[derive(Clone, Copy)]
struct Bits<'v> {
    words: &'v FarVec<u64>,
    rows: usize,
}

impl Bits<'_> {
    const WORD: usize = u64::BITS as usize;

    fn words_of(rows: &Range<usize>) -> Range<usize> {
        rows.start / Self::WORD..rows.end.div_ceil(Self::WORD)
    }
}

impl AnyColumn for Bits<'_> {
    fn cell(&self) -> Cell {
        Cell::Bit
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn per_unit(&self) -> usize {
        super::paged::Paged::<u64>::PER_UNIT * Self::WORD
    }

    fn is_far(&self, unit: usize) -> bool {
        self.words.units.is_far(unit)
    }

    fn ranges(&self, rows: Range<usize>) -> Vec<FarRange> {
        self.words.far_ranges(Self::words_of(&rows)).collect()
    }

    fn add_pieces(&self, rows: Range<usize>, pieces: &mut Vec<farfield_wic::Range>) {
        let mut first = Self::words_of(&rows).start * Self::WORD;
        for piece in self.ranges(rows.clone()) {
            let end = first + 8 * piece.len as usize;
            let (from, to) = (first.max(rows.start), end.min(rows.end));
            super::vec::add(pieces, 8 * piece.start + (from - first) as u64, (to - from) as u64, 1);
            first = end;
        }
    }

    fn heap(&self) -> Option<*const HeapInner> {
        self.words.units.core()
    }

    fn images(&self, scope: &Scope<'_>, rows: Range<usize>, into: &mut Vec<u64>) -> Result<(), FarError> {
        let mut words = Vec::new();
        for chunk in self.words.chunks_in(scope, Self::words_of(&rows)) {
            words.extend_from_slice(chunk?);
        }
        let first = rows.start / Self::WORD;
        into.clear();
        into.extend(rows.map(|row| words[row / Self::WORD - first] >> (row % Self::WORD) & 1));
        Ok(())
    }
}

/// Columns of equal length, and a range of their rows.
pub(super) struct ColumnTable<'v> {
    pub(super) heap: &'v Heap,
    pub(super) columns: Vec<KeyColumn<'v>>,
    pub(super) rows: Range<usize>,
    pub(super) at: Where,
}

impl core::fmt::Debug for ColumnTable<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?} of {} columns at {:?}", self.rows, self.columns.len(), self.at)
    }
}

/// Rows by the target that stores them.
type RowsByTarget = BTreeMap<OffloadTarget, VecDeque<Range<usize>>>;

/// An answer of a server about rows.
pub(super) trait RowReply {
    /// Returns how many of the requested rows the answer covers, from the first on; `None`: all.
    fn rows(&self) -> Option<u64>;
}

/// A computation over rows, which runs at the server and here.
pub(super) trait ColumnKernel: Send + Sized {
    type Function: Function<Answer: RowReply>;

    /// Makes an empty computation of the same kind, for another thread.
    fn fork(&self) -> Self;
    /// Merges the result of another thread.
    fn merge(&mut self, other: Self) -> Result<(), OffloadError>;

    /// Makes the argument for a call about rows that lie in these pieces of each column.
    fn argument(&self, pieces: Vec<Vec<farfield_wic::Range>>) -> <Self::Function as Function>::Argument;
    /// Checks whether an answer has the form of one to this computation. Servers may be wrong.
    fn fits(&self, _answer: &<Self::Function as Function>::Answer) -> bool {
        true
    }

    /// Merges an answer that [fits](Self::fits), about these rows, or the first of them.
    fn merge_answer(
        &mut self,
        rows: &VecDeque<Range<usize>>,
        answer: <Self::Function as Function>::Answer,
    ) -> Result<(), OffloadError>;
    /// Processes rows that lie in one unit of each column.
    fn process(&mut self, scope: &Scope<'_>, rows: Range<usize>) -> Result<(), OffloadError>;
}

impl<'v> ColumnTable<'v> {
    /// Makes a table of all rows of these columns.
    ///
    /// # Panics
    /// If the columns do not have equally many rows, or there is no column.
    #[track_caller]
    pub(super) fn new(heap: &'v Heap, columns: Vec<KeyColumn<'v>>) -> ColumnTable<'v> {
        let rows = columns.first().expect("a table has columns").any().rows();
        assert!(columns.iter().all(|column| column.any().rows() == rows), "columns of a table have equal lengths");
        ColumnTable { heap, columns, rows: 0..rows, at: Where::Auto }
    }

    /// Adds a column.
    ///
    /// # Panics
    /// If the column does not have as many rows as the others.
    #[track_caller]
    pub(super) fn push(&mut self, column: KeyColumn<'v>) {
        assert_eq!(column.any().rows(), self.columns[0].any().rows(), "columns of a table have equal lengths");
        self.columns.push(column);
    }

    /// Restricts the table to these rows.
    #[track_caller]
    pub(super) fn over(&mut self, range: impl RangeBounds<usize>) {
        self.rows = range_of(range, self.columns[0].any().rows());
    }

    /// Runs a computation over all rows, and waits for it.
    pub(super) fn run<L: ColumnKernel>(&self, kernel: &mut L) -> Result<(), OffloadError> {
        if self.rows.is_empty() {
            return Ok(());
        }
        if self.columns.iter().any(|column| column.any().heap() != Some(core::ptr::from_ref(self.heap.core()))) {
            return Err(FarError::OtherHeap.into());
        }
        match self.at {
            Where::Server => {
                let ranges = self.columns.iter().flat_map(|column| column.any().ranges(self.rows.clone()));
                self.heap.write_back(ranges)?;
                let layout = self.heap.core().offload_layout();
                let (targets, apart) = self.split_by_target(layout, self.units(self.rows.clone()));
                if !apart.is_empty() {
                    return Err(CallError::Nowhere.into());
                }
                self.ask_servers(kernel, layout, targets, 0).map_err(|(error, _)| error)
            }
            Where::Auto if self.heap.core().may_offload::<L::Function>() => {
                let units = self.units(self.rows.clone());
                let (far, near): (Vec<_>, Vec<_>) = units.partition(|rows| self.is_far(rows.start));
                let layout = self.heap.core().offload_layout();
                let (targets, apart) = self.split_by_target(layout, far.into_iter());
                let rest = match targets.values().flatten().map(Range::len).sum::<usize>() {
                    0..=FEW_ROWS => targets.into_values().flatten().collect(),
                    _ => match self.ask_servers(kernel, layout, targets, FULL_ROWS) {
                        Ok(()) => Vec::new(),
                        Err((OffloadError::Call(_), rest)) => rest,
                        Err((error, _)) => return Err(error),
                    },
                };
                self.process_near(kernel, &near)?;
                self.process_here(kernel, apart.into_iter().chain(rest))
            }
            _ => self.process_here(kernel, core::iter::once(self.rows.clone())),
        }
    }

    /// Splits rows so that each part lies in one unit of each column.
    fn units(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut at = rows.start;
        core::iter::from_fn(move || {
            let start = at;
            let ends =
                self.columns.iter().map(|column| (start / column.any().per_unit() + 1) * column.any().per_unit());
            at = ends.min().unwrap_or(rows.end).min(rows.end);
            (start < rows.end).then_some(start..at)
        })
    }

    /// Checks whether the units of all columns that have this row are far.
    fn is_far(&self, row: usize) -> bool {
        self.columns.iter().all(|column| column.any().is_far(row / column.any().per_unit()))
    }

    /// Groups parts of rows by the target that stores them in all columns. Parts that lie at
    /// different targets come second.
    fn split_by_target(
        &self,
        layout: OffloadLayout,
        units: impl Iterator<Item = Range<usize>>,
    ) -> (RowsByTarget, Vec<Range<usize>>) {
        let (mut targets, mut apart) = (RowsByTarget::new(), Vec::new());
        for rows in units {
            let starts = self.columns.iter().flat_map(|column| column.any().ranges(rows.start..rows.start + 1));
            let mut places = starts.map(|range| layout.place(range.start).0);
            match places.next() {
                Some(target) if places.all(|other| other == target) => {
                    let runs = targets.entry(target).or_default();
                    add_run(runs, rows);
                }
                _ => apart.push(rows),
            }
        }
        (targets, apart)
    }

    /// Runs the computation for these rows at the servers. On an error, gives back the rows without
    /// an answer. An incomplete answer that covers fewer rows than `few` ends it: the other rows
    /// are given back.
    fn ask_servers<L: ColumnKernel>(
        &self,
        kernel: &mut L,
        layout: OffloadLayout,
        mut rest: RowsByTarget,
        few: u64,
    ) -> Result<(), (OffloadError, Vec<Range<usize>>)> {
        while !rest.is_empty() {
            let mut calls: Vec<(OffloadTarget, VecDeque<Range<usize>>)> = Vec::new();
            let room = self.call_rows(rest.values().flatten().map(Range::len).sum());
            while calls.len() < CHANNELS && !rest.is_empty() {
                calls.extend(rest.iter_mut().map(|(target, runs)| (*target, self.share(runs, room))));
                rest.retain(|_, runs| !runs.is_empty());
            }
            let arguments =
                calls.iter().map(|(target, runs)| (*target, kernel.argument(self.pieces(layout, runs)))).collect();
            let answers = match self.heap.core().offload::<L::Function>(layout, arguments) {
                Ok(answers) => answers,
                Err(error) => {
                    let asked = calls.into_iter().flat_map(|(_, runs)| runs);
                    return Err((error.into(), rest.into_values().flatten().chain(asked).collect()));
                }
            };
            let mut is_slow = false;
            for ((target, runs), answer) in calls.into_iter().zip(answers) {
                let all = runs.iter().map(|run| run.len() as u64).sum::<u64>();
                let done = answer.rows().unwrap_or(all);
                let is_wrong = done > all || done == 0 || !kernel.fits(&answer);
                let mut left = runs;
                if !is_wrong {
                    if let Err(error) = kernel.merge_answer(&left, answer) {
                        return Err((error, Vec::new()));
                    }
                    left = skip(left, done);
                }
                left.into_iter().for_each(|run| add_run(rest.entry(target).or_default(), run));
                is_slow |= is_wrong || done < all && done < few;
            }
            if is_slow && !rest.is_empty() {
                return Err((CallError::Answer.into(), rest.into_values().flatten().collect()));
            }
        }
        Ok(())
    }

    /// Returns the number of rows of one call, so that all calls that run at once have equally
    /// many.
    fn call_rows(&self, rows: usize) -> usize {
        let widest = self.columns.iter().map(|column| column.any().cell().bits()).max().unwrap_or(1);
        // Bits cost as much as bytes.
        let most = (8 * CALL_BYTES / widest.max(8)) as usize;
        rows.div_ceil(CHANNELS).clamp(CALL_ROWS, most)
    }

    /// Takes rows for one call out of `rest`, at most `room`.
    fn share(&self, rest: &mut VecDeque<Range<usize>>, mut room: usize) -> VecDeque<Range<usize>> {
        let mut runs = VecDeque::new();
        while runs.len() < CALL_RUNS / self.columns.len() && room > 0 {
            let Some(run) = rest.pop_front() else { break };
            let cut = run.start + run.len().min(room);
            room -= cut - run.start;
            if cut < run.end {
                rest.push_front(cut..run.end);
            }
            runs.push_back(run.start..cut);
        }
        runs
    }

    /// Returns where these rows, all of one target, lie there, for each column.
    fn pieces(&self, layout: OffloadLayout, runs: &VecDeque<Range<usize>>) -> Vec<Vec<farfield_wic::Range>> {
        let of_column = |column: &KeyColumn<'_>| {
            let column = column.any();
            // Places of bits are counted in bits.
            let (width, unit) = match column.cell() {
                Cell::Bit => (1, 8),
                cell => (cell.bits() / 8, 1),
            };
            let (mut pieces, mut of_run) = (Vec::new(), Vec::new());
            for run in runs {
                column.add_pieces(run.clone(), &mut of_run);
                for piece in of_run.drain(..) {
                    let start = unit * layout.place(piece.offset / unit).1 + piece.offset % unit;
                    super::vec::add(&mut pieces, start, piece.count, width);
                }
            }
            pieces
        };
        self.columns.iter().map(of_column).collect()
    }

    /// Processes parts of rows that are near, with several threads if there are many.
    fn process_near<L: ColumnKernel>(&self, kernel: &mut L, units: &[Range<usize>]) -> Result<(), OffloadError> {
        let rows: usize = units.iter().map(Range::len).sum();
        // The number of processors is read from several files, so not for few rows.
        let count = match (rows / THREAD_ROWS).min(THREADS_MAX) {
            0 | 1 => 1,
            count => std::thread::available_parallelism().map_or(1, |processors| count.min(processors.get())),
        };
        let mut parts = parts(units, count);
        let own = parts.next().unwrap_or_default();
        std::thread::scope(|threads| {
            let mut others = Vec::new();
            let mut result = Ok(());
            for part in parts {
                let mut fork = kernel.fork();
                let work = move || self.process_here(&mut fork, part.iter().cloned()).map(|()| fork);
                match std::thread::Builder::new().name("farfield-look".into()).spawn_scoped(threads, work) {
                    Ok(thread) => others.push(thread),
                    // The system has no further thread.
                    Err(_) => result = result.and_then(|()| self.process_here(kernel, part.iter().cloned())),
                }
            }
            result = result.and_then(|()| self.process_here(kernel, own.iter().cloned()));
            for thread in others {
                let other = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                result = result.and_then(|()| kernel.merge(other?));
            }
            result
        })
    }

    fn process_here<L: ColumnKernel>(
        &self,
        kernel: &mut L,
        rows: impl Iterator<Item = Range<usize>>,
    ) -> Result<(), OffloadError> {
        for run in rows.flat_map(|rows| self.units(rows).collect::<Vec<_>>()) {
            kernel.process(&self.heap.enter(), run)?;
        }
        Ok(())
    }
}

/// Splits parts of rows into at most `count` groups with about equally many rows.
fn parts(units: &[Range<usize>], count: usize) -> impl Iterator<Item = &[Range<usize>]> {
    let share = units.iter().map(Range::len).sum::<usize>().div_ceil(count).max(1);
    let mut rest = units;
    core::iter::from_fn(move || {
        let mut rows = 0;
        let end = rest.iter().position(|unit| {
            rows += unit.len();
            rows >= share
        });
        let (part, others) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
        rest = others;
        (!part.is_empty()).then_some(part)
    })
}

/// Adds rows to runs, as part of the last run if they are adjacent.
fn add_run(runs: &mut VecDeque<Range<usize>>, rows: Range<usize>) {
    match runs.back_mut() {
        Some(last) if last.end == rows.start => last.end = rows.end,
        _ => runs.push_back(rows),
    }
}

/// Removes the first `done` rows.
fn skip(mut runs: VecDeque<Range<usize>>, done: u64) -> VecDeque<Range<usize>> {
    let mut done = done as usize;
    while let Some(first) = runs.front_mut() {
        if done < first.len() {
            first.start += done;
            break;
        }
        done -= first.len();
        runs.pop_front();
    }
    runs
}

/// Columns whose values are a key together. One vector of numbers; a tuple of two, three or four of
/// equal length; or none, `()`: then all rows have the same key.
///
/// If the types are known only at run time: a slice of up to [`KEYS_MAX`] [`KeyColumn`]s. Its key
/// has a word for each column, the [`Number::image`] of the number, and 0 for the columns that are
/// missing up to [`KEYS_MAX`].
pub trait Keys<'v>: Copy + sealed::Sealed {
    /// Type of a key: a number, several numbers, or none.
    type Key: Copy + core::fmt::Debug;

    #[doc(hidden)]
    fn columns(self) -> Vec<KeyColumn<'v>>;
    #[doc(hidden)]
    fn key(images: Key) -> Self::Key;
}

#[expect(unnameable_types, reason = "nobody else shall implement them")]
mod sealed {
    /// Seals [`Keys`](super::Keys): others cannot define what the values of a column are.
    pub trait Sealed {}
}

impl sealed::Sealed for () {}
impl<N: Number> sealed::Sealed for &FarVec<N> {}

impl<'v> Keys<'v> for () {
    type Key = ();

    fn columns(self) -> Vec<KeyColumn<'v>> {
        Vec::new()
    }

    fn key(_images: Key) {}
}

impl<'v, N: Number> Keys<'v> for &'v FarVec<N> {
    type Key = N;

    fn columns(self) -> Vec<KeyColumn<'v>> {
        vec![self.into()]
    }

    fn key(images: Key) -> N {
        N::of_image(images[0])
    }
}

macro_rules! keys_of_several {
    ($($number:ident $index:tt),*) => {
        impl<$($number: Number),*> sealed::Sealed for ($(&FarVec<$number>),*) {}

        impl<'v, $($number: Number),*> Keys<'v> for ($(&'v FarVec<$number>),*) {
            type Key = ($($number),*);

            fn columns(self) -> Vec<KeyColumn<'v>> {
                vec![$(self.$index.into()),*]
            }

            fn key(images: Key) -> Self::Key {
                ($($number::of_image(images[$index])),*)
            }
        }
    };
}
keys_of_several! { A 0, B 1 }
keys_of_several! { A 0, B 1, C 2 }
keys_of_several! { A 0, B 1, C 2, D 3 }

/// A column whose type is known at run time only: numbers, or [bits](KeyColumn::bits). See
/// [`Keys`].
#[derive(Clone, Copy)]
pub struct KeyColumn<'v>(KeyColumnData<'v>);

#[derive(Clone, Copy)]
enum KeyColumnData<'v> {
    Numbers(&'v dyn AnyColumn),
    Bits(Bits<'v>),
}

impl<'v> KeyColumn<'v> {
    /// Makes a column of the first `rows` bits of some words, the lowest bit of each word first.
    /// Their images are 0 and 1.
    ///
    /// # Panics
    /// If the words have fewer bits.
    #[track_caller]
    pub fn bits(words: &'v FarVec<u64>, rows: usize) -> KeyColumn<'v> {
        assert!(rows.div_ceil(Bits::WORD) <= words.len(), "{rows} bits of {} words", words.len());
        KeyColumn(KeyColumnData::Bits(Bits { words, rows }))
    }

    pub(super) fn any(&self) -> &dyn AnyColumn {
        match &self.0 {
            KeyColumnData::Numbers(column) => *column,
            KeyColumnData::Bits(column) => column,
        }
    }
}

impl core::fmt::Debug for KeyColumn<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} of {:?}", self.any().rows(), self.any().cell())
    }
}

impl<'v, N: Number> From<&'v FarVec<N>> for KeyColumn<'v> {
    fn from(column: &'v FarVec<N>) -> KeyColumn<'v> {
        KeyColumn(KeyColumnData::Numbers(column))
    }
}

impl sealed::Sealed for &[KeyColumn<'_>] {}

impl<'v> Keys<'v> for &'v [KeyColumn<'v>] {
    type Key = Key;

    #[track_caller]
    fn columns(self) -> Vec<KeyColumn<'v>> {
        assert!(self.len() <= KEYS_MAX, "at most {KEYS_MAX} columns are a key together");
        self.to_vec()
    }

    fn key(images: Key) -> Key {
        images
    }
}

/// Describes columns and their pieces, in the form that server functions use.
pub(super) fn named(columns: &[KeyColumn<'_>], pieces: Vec<Vec<farfield_wic::Range>>) -> Vec<Column> {
    columns.iter().zip(pieces).map(|(column, pieces)| Column { cell: column.any().cell(), pieces }).collect()
}

/// Conditions that select rows: columns, with the smallest and the largest image that their numbers
/// may have.
#[derive(Clone, Default)]
pub(super) struct Conditions<'v>(Vec<(KeyColumn<'v>, u64, u64)>);

impl core::fmt::Debug for Conditions<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} conditions", self.0.len())
    }
}

impl<'v> Conditions<'v> {
    /// Adds a condition on the rows of this table: the number in this column is in this range.
    ///
    /// # Panics
    /// If the column does not have as many rows as the table, or there are too many conditions.
    #[track_caller]
    pub(super) fn within<N: Number>(
        &mut self,
        table: &mut ColumnTable<'v>,
        column: &'v FarVec<N>,
        values: impl RangeBounds<N>,
    ) {
        let (low, high) = images_of(values).unwrap_or((1, 0));
        self.push(table, column.into(), low, high);
    }

    /// Adds a condition on the rows of this table: their bit in these words is set.
    #[track_caller]
    pub(super) fn marked(&mut self, table: &mut ColumnTable<'v>, words: &'v FarVec<u64>) {
        self.push(table, KeyColumn::bits(words, table.columns[0].any().rows()), 1, 1);
    }

    #[track_caller]
    fn push(&mut self, table: &mut ColumnTable<'v>, column: KeyColumn<'v>, low: u64, high: u64) {
        table.push(column);
        assert!(self.0.len() < CONDITIONS_MAX, "at most {CONDITIONS_MAX} columns say which rows are looked at");
        self.0.push((column, low, high));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Describes the conditions and the pieces of their columns, in the form that server functions
    /// use.
    pub(super) fn named(&self, pieces: Vec<Vec<farfield_wic::Range>>) -> Vec<Condition> {
        let condition = |((column, low, high), pieces): (&(KeyColumn<'_>, u64, u64), _)| Condition {
            column: Column { cell: column.any().cell(), pieces },
            low: *low,
            high: *high,
        };
        self.0.iter().zip(pieces).map(condition).collect()
    }
}

/// Returns the images of the smallest and the largest number in a range. `None` if no number is in
/// it.
fn images_of<N: Number>(values: impl RangeBounds<N>) -> Option<(u64, u64)> {
    let low = match values.start_bound() {
        Bound::Unbounded => 0,
        Bound::Included(low) => low.image(),
        Bound::Excluded(low) => low.image().checked_add(1)?,
    };
    let high = match values.end_bound() {
        Bound::Unbounded => u64::MAX,
        Bound::Included(high) => high.image(),
        Bound::Excluded(high) => high.image().checked_sub(1)?,
    };
    (low <= high).then_some((low, high))
}

/// The images of rows that lie in one unit of each column.
#[derive(Default)]
pub(super) struct RowImages {
    keys: [Vec<u64>; KEYS_MAX],
    asked: Vec<u64>,
    kept: Vec<bool>,
}

impl RowImages {
    pub(super) fn read(
        &mut self,
        scope: &Scope<'_>,
        keys: &[KeyColumn<'_>],
        conditions: &Conditions<'_>,
        rows: Range<usize>,
    ) -> Result<Rows<'_>, FarError> {
        for (column, images) in keys.iter().zip(&mut self.keys) {
            column.any().images(scope, rows.clone(), images)?;
        }
        self.kept.clear();
        self.kept.resize(rows.len(), true);
        for (column, low, high) in &conditions.0 {
            column.any().images(scope, rows.clone(), &mut self.asked)?;
            keep(&mut self.kept, &self.asked, *low, *high);
        }
        let kept = (!conditions.0.is_empty()).then_some(&self.kept[..]);
        Ok(Rows { count: rows.len(), images: self.keys.each_ref().map(Vec::as_slice), kept })
    }
}

#[cfg(test)]
mod tests {
    //! Guards against rows that no thread looks at, or two.
    use super::*;

    #[test]
    fn parts_are_all_units_in_order() {
        // With gaps, and of unequal lengths.
        let some = |count: usize| (0..count).map(|unit| 700 * unit..700 * unit + 2 + 100 * (unit % 7)).collect();
        for units in [0, 1, 2, 3, 99].map(|count| -> Vec<Range<usize>> { some(count) }) {
            for count in 1..9 {
                let parts: Vec<_> = parts(&units, count).collect();
                assert!(parts.len() <= count && parts.concat() == units);
                assert!(parts.iter().all(|part| !part.is_empty()));
            }
        }
        let even: Vec<Range<usize>> = (0..8).map(|unit| 10 * unit..10 * unit + 10).collect();
        assert!(parts(&even, 4).map(<[_]>::len).eq([2, 2, 2, 2]));
    }
}
