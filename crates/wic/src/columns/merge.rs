//! `ff.merge`: runs that are in order, made one that is, in whole pages of the same region.
//!
//! A call puts a part of it and says how much it took of each run, so the next one goes on there: no call takes long, however long runs are.

use super::copy::Target;
use super::{Kind, Walk};
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

/// What is merged, and where to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Runs {
    /// What runs are of, and what is put.
    pub form: Merged,
    /// Where the rest of each run lies: [`Merge::MOST`] runs at most.
    pub runs: Vec<Vec<Range>>,
    /// How many elements are put, if there are so many.
    pub count: u64,
    /// Whole pages that get them, as in [`Copied`](super::Copied).
    pub to: Vec<Range>,
}

/// Elements of runs, and what is put for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Merged {
    /// Numbers.
    Numbers(Kind),
    /// Pairs of an index and a rank.
    Pairs,
    /// Such pairs, of which the indices are put.
    Indices,
}

impl Merge {
    /// Most runs of a call: of each 1,024 elements are in the server's memory.
    pub const MOST: usize = 64;
}

/// Elements that are read at a time.
const READ: u64 = 1024;

impl Function for Merge {
    const NAME: &'static str = "ff.merge";
    const VERSION: u32 = 1;
    type Argument = Runs;
    /// How many elements of each run were put.
    type Answer = Vec<u64>;

    async fn run<P: Place>(place: &P, runs: Runs) -> Result<Vec<u64>, Fault> {
        match runs.form {
            Merged::Numbers(Kind::U8) => of::<Numbers<u8>, P>(place, &runs).await,
            Merged::Numbers(Kind::U16) => of::<Numbers<u16>, P>(place, &runs).await,
            Merged::Numbers(Kind::U32) => of::<Numbers<u32>, P>(place, &runs).await,
            Merged::Numbers(Kind::U64) => of::<Numbers<u64>, P>(place, &runs).await,
            Merged::Numbers(Kind::I8) => of::<Numbers<i8>, P>(place, &runs).await,
            Merged::Numbers(Kind::I16) => of::<Numbers<i16>, P>(place, &runs).await,
            Merged::Numbers(Kind::I32) => of::<Numbers<i32>, P>(place, &runs).await,
            Merged::Numbers(Kind::I64) => of::<Numbers<i64>, P>(place, &runs).await,
            Merged::Numbers(Kind::F32) => of::<Numbers<f32>, P>(place, &runs).await,
            Merged::Numbers(Kind::F64) => of::<Numbers<f64>, P>(place, &runs).await,
            Merged::Pairs => of::<Pairs, P>(place, &runs).await,
            Merged::Indices => of::<Indices, P>(place, &runs).await,
        }
    }
}

async fn of<R: Record, P: Place>(place: &P, runs: &Runs) -> Result<Vec<u64>, Fault> {
    if runs.runs.len() > Merge::MOST {
        return Err(Fault::TooLong { bytes: runs.runs.len() as u64 * READ * R::BYTES });
    }
    let mut target = Target::new(place, &runs.to)?;
    let mut sources: Vec<Source<'_, R>> = runs.runs.iter().map(|run| Source::of_pieces(run)).collect();
    merge(place, &mut sources, runs.count, &mut target).await?;
    target.end(place).await?;
    Ok(sources.into_iter().map(|source| source.taken).collect())
}

/// What elements are, and what is put for them.
pub(super) trait Record {
    /// What they are ordered by; all that there is of them.
    type Key: Copy + Ord;
    /// Bytes of one in a run.
    const BYTES: u64;

    fn read(bytes: &[u8], into: &mut Vec<Self::Key>);
    fn put(key: Self::Key, into: &mut Vec<u8>);
}

/// Numbers, by their ranks.
pub(super) struct Numbers<N>(PhantomData<N>);
/// Index and rank.
pub(super) struct Pairs;
/// Pairs that become indices.
pub(super) struct Indices;

impl<N: Number> Record for Numbers<N> {
    type Key = u64;
    const BYTES: u64 = size_of::<N>() as u64;

    fn read(bytes: &[u8], into: &mut Vec<u64>) {
        N::each(bytes, |number| into.push(number.rank()));
    }

    fn put(key: u64, into: &mut Vec<u8>) {
        N::of_rank(key).put(into);
    }
}

impl Record for Pairs {
    type Key = u128;
    const BYTES: u64 = 16;

    fn read(bytes: &[u8], into: &mut Vec<u128>) {
        into.extend(bytes.as_chunks().0.iter().map(|pair| u128::from_le_bytes(*pair)));
    }

    fn put(key: u128, into: &mut Vec<u8>) {
        into.extend(key.to_le_bytes());
    }
}

impl Record for Indices {
    type Key = u128;
    const BYTES: u64 = Pairs::BYTES;

    fn read(bytes: &[u8], into: &mut Vec<u128>) {
        Pairs::read(bytes, into);
    }

    fn put(key: u128, into: &mut Vec<u8>) {
        into.extend((key as u64).to_le_bytes());
    }
}

/// A run.
pub(super) struct Source<'r, R: Record> {
    rest: Walk<'r>,
    keys: Vec<R::Key>,
    /// Of these, so many were taken.
    at: usize,
    taken: u64,
}

impl<'r, R: Record> Source<'r, R> {
    /// Elements that are here.
    pub(super) fn of_keys(keys: Vec<R::Key>) -> Source<'r, R> {
        Source { rest: Walk::new(&[], R::BYTES), keys, at: 0, taken: 0 }
    }

    /// Elements of the region.
    fn of_pieces(pieces: &'r [Range]) -> Source<'r, R> {
        Source { rest: Walk::new(pieces, R::BYTES), keys: Vec::new(), at: 0, taken: 0 }
    }

    /// The next element, if there is one.
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

/// Bytes that are put between two turns of the others.
const PUT_BYTES: usize = RANGE_BYTES_MAX / 4;

/// Puts so many elements of runs, in order, or all.
pub(super) async fn merge<R: Record, P: Place>(
    place: &P,
    runs: &mut [Source<'_, R>],
    count: u64,
    target: &mut Target<'_>,
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
