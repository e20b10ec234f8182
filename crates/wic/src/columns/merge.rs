//! `ff.merge`: merges sorted runs into one, in whole pages of the same region.
//!
//! A call writes a part of the result and returns how much it took of each run, so that the next
//! call continues there. No call takes long, however long the runs are.

use super::copy::PageStreamWriter;
use super::{Kind, PieceCursor};
use crate::totals::Number;
use crate::{Fault, Function, Place, RANGE_BYTES_MAX, Range};
use core::cmp::Reverse;
use core::marker::PhantomData;
use serde::{Deserialize, Serialize};
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

/// Merges runs.
#[derive(Debug)]
pub struct Merge;

/// Runs to merge, and pages for the result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Runs {
    /// Type of the elements, and form of the result.
    pub form: Merged,
    /// Pieces of the rest of each run: [`Merge::MOST`] runs at most.
    pub runs: Vec<Vec<Range>>,
    /// Most elements to write.
    pub count: u64,
    /// Output: whole pages, as in [`Copied`](super::Copied).
    pub to: Vec<Range>,
}

/// Type of the elements, and the data written for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Merged {
    /// Numbers.
    Numbers(Kind),
    /// Pairs of an index and a rank.
    Pairs,
    /// Pairs of an index and a rank, of which only the indices are written.
    Indices,
}

impl Merge {
    /// Most runs of a call: 1,024 elements of each are in the server's memory.
    pub const MOST: usize = 64;
}

/// Elements that are read at a time.
const READ: u64 = 1024;

impl Function for Merge {
    const NAME: &'static str = "ff.merge";
    const VERSION: u32 = 1;
    type Argument = Runs;
    /// Number of elements of each run that were written.
    type Answer = Vec<u64>;

    async fn run<P: Place>(place: &P, runs: Runs) -> Result<Vec<u64>, Fault> {
        match runs.form {
            Merged::Numbers(Kind::U8) => of::<NumberRecord<u8>, P>(place, &runs).await,
            Merged::Numbers(Kind::U16) => of::<NumberRecord<u16>, P>(place, &runs).await,
            Merged::Numbers(Kind::U32) => of::<NumberRecord<u32>, P>(place, &runs).await,
            Merged::Numbers(Kind::U64) => of::<NumberRecord<u64>, P>(place, &runs).await,
            Merged::Numbers(Kind::I8) => of::<NumberRecord<i8>, P>(place, &runs).await,
            Merged::Numbers(Kind::I16) => of::<NumberRecord<i16>, P>(place, &runs).await,
            Merged::Numbers(Kind::I32) => of::<NumberRecord<i32>, P>(place, &runs).await,
            Merged::Numbers(Kind::I64) => of::<NumberRecord<i64>, P>(place, &runs).await,
            Merged::Numbers(Kind::F32) => of::<NumberRecord<f32>, P>(place, &runs).await,
            Merged::Numbers(Kind::F64) => of::<NumberRecord<f64>, P>(place, &runs).await,
            Merged::Pairs => of::<PairRecord, P>(place, &runs).await,
            Merged::Indices => of::<IndexRecord, P>(place, &runs).await,
        }
    }
}

async fn of<R: MergeRecord, P: Place>(place: &P, runs: &Runs) -> Result<Vec<u64>, Fault> {
    if runs.runs.len() > Merge::MOST {
        return Err(Fault::TooLong { bytes: runs.runs.len() as u64 * READ * R::BYTES });
    }
    let mut target = PageStreamWriter::new(place, &runs.to)?;
    let mut sources: Vec<RunCursor<'_, R>> = runs.runs.iter().map(|run| RunCursor::of_pieces(run)).collect();
    merge(place, &mut sources, runs.count, &mut target).await?;
    target.end(place).await?;
    Ok(sources.into_iter().map(|source| source.taken).collect())
}

/// Type of the elements of runs, with their order and their output.
pub(super) trait MergeRecord {
    /// Sort key, which holds the whole element.
    type Key: Copy + Ord;
    /// Bytes of an element in a run.
    const BYTES: u64;

    fn read(bytes: &[u8], into: &mut Vec<Self::Key>);
    fn put(key: Self::Key, into: &mut Vec<u8>);
}

/// Numbers, by their ranks.
pub(super) struct NumberRecord<N>(PhantomData<N>);
/// Pairs of an index and a rank.
pub(super) struct PairRecord;
/// Pairs of which the indices are written.
pub(super) struct IndexRecord;

impl<N: Number> MergeRecord for NumberRecord<N> {
    type Key = u64;
    const BYTES: u64 = size_of::<N>() as u64;

    fn read(bytes: &[u8], into: &mut Vec<u64>) {
        N::each(bytes, |number| into.push(number.rank()));
    }

    fn put(key: u64, into: &mut Vec<u8>) {
        N::of_rank(key).put(into);
    }
}

impl MergeRecord for PairRecord {
    type Key = u128;
    const BYTES: u64 = 16;

    fn read(bytes: &[u8], into: &mut Vec<u128>) {
        into.extend(bytes.as_chunks().0.iter().map(|pair| u128::from_le_bytes(*pair)));
    }

    fn put(key: u128, into: &mut Vec<u8>) {
        into.extend(key.to_le_bytes());
    }
}

impl MergeRecord for IndexRecord {
    type Key = u128;
    const BYTES: u64 = PairRecord::BYTES;

    fn read(bytes: &[u8], into: &mut Vec<u128>) {
        PairRecord::read(bytes, into);
    }

    fn put(key: u128, into: &mut Vec<u8>) {
        into.extend((key as u64).to_le_bytes());
    }
}

/// Cursor over a run.
pub(super) struct RunCursor<'r, R: MergeRecord> {
    rest: PieceCursor<'r>,
    keys: Vec<R::Key>,
    /// Number of the keys that were taken.
    at: usize,
    taken: u64,
}

impl<'r, R: MergeRecord> RunCursor<'r, R> {
    /// Makes a cursor over elements in memory.
    pub(super) fn of_keys(keys: Vec<R::Key>) -> RunCursor<'r, R> {
        RunCursor { rest: PieceCursor::new(&[], R::BYTES), keys, at: 0, taken: 0 }
    }

    /// Makes a cursor over elements of the region.
    fn of_pieces(pieces: &'r [Range]) -> RunCursor<'r, R> {
        RunCursor { rest: PieceCursor::new(pieces, R::BYTES), keys: Vec::new(), at: 0, taken: 0 }
    }

    /// Returns the next element, if there is one.
    async fn first<P: Place>(&mut self, place: &P) -> Result<Option<R::Key>, Fault> {
        if self.at == self.keys.len() {
            let count = self.rest.ready().min(READ);
            self.keys.clear();
            self.at = 0;
            if count > 0 {
                R::read(&self.rest.next(place, count).await?, &mut self.keys);
            }
        }
        Ok(self.keys.get(self.at).copied())
    }

    fn take(&mut self) {
        self.at += 1;
        self.taken += 1;
    }
}

/// Bytes that are written between two turns of the other tasks.
const PUT_BYTES: usize = RANGE_BYTES_MAX / 4;

/// Writes the first `count` elements of the merged runs, or all.
pub(super) async fn merge<R: MergeRecord, P: Place>(
    place: &P,
    runs: &mut [RunCursor<'_, R>],
    count: u64,
    target: &mut PageStreamWriter<'_>,
) -> Result<(), Fault> {
    let mut firsts = BinaryHeap::with_capacity(runs.len());
    for (number, run) in runs.iter_mut().enumerate() {
        if let Some(key) = run.first(place).await? {
            firsts.push(Reverse((key, number)));
        }
    }
    let mut bytes = Vec::with_capacity(PUT_BYTES + R::BYTES as usize);
    let mut left = count;
    while left > 0 && !firsts.is_empty() {
        while left > 0 && bytes.len() < PUT_BYTES {
            let Some(mut first) = firsts.peek_mut() else { break };
            let Reverse((key, number)) = *first;
            R::put(key, &mut bytes);
            left -= 1;
            let run = &mut runs[number];
            run.take();
            match run.first(place).await? {
                Some(next) => first.0.0 = next,
                None => drop(PeekMut::pop(first)),
            }
        }
        target.put(place, &bytes).await?;
        bytes.clear();
        place.yield_now().await;
    }
    Ok(())
}
