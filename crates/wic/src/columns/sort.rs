//! `ff.sort`: sorts the numbers of a column into whole pages of the same region. It sorts a whole
//! column, or a run of a longer one, which [`ff.merge`](super::Merge) joins with others.
//!
//! Numbers are ordered by their [rank](Number::rank): by value, −0 before +0, and NaN behind all
//! others. On request, the indices of the numbers are written, too. The sort is stable: of equal
//! numbers the first one comes first.

use super::copy::PageStreamWriter;
use super::merge::{IndexRecord, MergeRecord, NumberRecord, PairRecord, RunCursor, merge};
use super::{Kind, PieceCursor};
use crate::totals::Number;
use crate::{Fault, Function, Place, Range};
use serde::{Deserialize, Serialize};

/// Sorts numbers.
#[derive(Debug)]
pub struct Sort;

/// Numbers to sort, and pages for the result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Unsorted {
    /// The type of the numbers.
    pub kind: Kind,
    /// Pieces in which the numbers lie, in order: [`Sort::MOST`] numbers at most.
    pub pieces: Vec<Range>,
    /// Form of the result.
    pub form: Form,
    /// Output: whole pages, as in [`Copied`](super::Copied).
    pub to: Vec<Range>,
}

/// Data that is written for a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Form {
    /// The number.
    Numbers,
    /// Index and rank of the number, two words, for [`Merge`](super::Merge).
    Pairs {
        /// Index of the first number.
        first: u64,
    },
    /// Index of the number, a word.
    Indices {
        /// Index of the first number.
        first: u64,
    },
}

/// Numbers that are sorted between two turns of the other tasks.
const CHUNK: usize = 4096;

impl Sort {
    /// Most numbers of a call: all are in the server's memory, 16 bytes for each, until they are
    /// written.
    pub const MOST: u64 = 64 * 1024;
}

impl Function for Sort {
    const NAME: &'static str = "ff.sort";
    const VERSION: u32 = 1;
    type Argument = Unsorted;
    /// Number of numbers.
    type Answer = u64;

    async fn run<P: Place>(place: &P, unsorted: Unsorted) -> Result<u64, Fault> {
        match unsorted.kind {
            Kind::U8 => of::<u8, P>(place, &unsorted).await,
            Kind::U16 => of::<u16, P>(place, &unsorted).await,
            Kind::U32 => of::<u32, P>(place, &unsorted).await,
            Kind::U64 => of::<u64, P>(place, &unsorted).await,
            Kind::I8 => of::<i8, P>(place, &unsorted).await,
            Kind::I16 => of::<i16, P>(place, &unsorted).await,
            Kind::I32 => of::<i32, P>(place, &unsorted).await,
            Kind::I64 => of::<i64, P>(place, &unsorted).await,
            Kind::F32 => of::<f32, P>(place, &unsorted).await,
            Kind::F64 => of::<f64, P>(place, &unsorted).await,
        }
    }
}

async fn of<N: Number, P: Place>(place: &P, unsorted: &Unsorted) -> Result<u64, Fault> {
    match unsorted.form {
        Form::Numbers => sort::<N, NumberRecord<N>, P>(place, unsorted, |rank, _| rank).await,
        Form::Pairs { first } => sort::<N, PairRecord, P>(place, unsorted, |rank, at| pair(rank, first, at)).await,
        Form::Indices { first } => sort::<N, IndexRecord, P>(place, unsorted, |rank, at| pair(rank, first, at)).await,
    }
}

fn pair(rank: u64, first: u64, at: u64) -> u128 {
    u128::from(rank) << 64 | u128::from(first.wrapping_add(at))
}

async fn sort<N: Number, R: MergeRecord, P: Place>(
    place: &P,
    unsorted: &Unsorted,
    key: impl Fn(u64, u64) -> R::Key,
) -> Result<u64, Fault> {
    let bytes = size_of::<N>() as u64;
    let all = unsorted.pieces.iter().fold(0u64, |all, piece| all.saturating_add(piece.count));
    if all > Sort::MOST {
        return Err(Fault::TooLong { bytes: all.saturating_mul(bytes) });
    }
    let mut target = PageStreamWriter::new(place, &unsorted.to)?;
    let mut keys = Vec::with_capacity(all as usize);
    let mut walk = PieceCursor::new(&unsorted.pieces, bytes);
    loop {
        let count = walk.ready();
        if count == 0 {
            break;
        }
        let bytes = walk.next(place, count).await?;
        N::each(&bytes, |number| keys.push(key(number.rank(), keys.len() as u64)));
    }
    for chunk in keys.chunks_mut(CHUNK) {
        chunk.sort_unstable();
        place.yield_now().await;
    }
    let mut runs: Vec<RunCursor<'_, R>> = keys.chunks(CHUNK).map(|chunk| RunCursor::of_keys(chunk.to_vec())).collect();
    drop(keys);
    merge(place, &mut runs, all, &mut target).await?;
    target.end(place).await?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    //! Guards against numbers in another order than that of a sort here, for each type and form,
    //! and against memory without bounds.
    use super::*;
    use crate::columns::{Merge, Merged, Runs};
    use crate::{Sim, Stop};
    use farfield_core::geometry::PAGE_BYTES;

    const PAGE: u64 = PAGE_BYTES as u64;

    fn range(offset: u64, count: u64) -> Range {
        Range { offset, count }
    }

    fn bytes_of<N: Number>(numbers: &[N]) -> Vec<u8> {
        let mut bytes = Vec::new();
        numbers.iter().for_each(|number| number.put(&mut bytes));
        bytes
    }

    fn words(bytes: &[u8]) -> Vec<u64> {
        bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }

    /// In two runs, cut anywhere, which are merged then.
    fn check<N: Number>(numbers: &[N], is_before: fn(&N, &N) -> core::cmp::Ordering) {
        let mut right: Vec<usize> = (0..numbers.len()).collect();
        right.sort_by(|one, other| is_before(&numbers[*one], &numbers[*other]).then(one.cmp(other)));
        let sorted: Vec<N> = right.iter().map(|index| numbers[*index]).collect();
        let right: Vec<u64> = right.iter().map(|index| *index as u64).collect();
        let wide = size_of::<N>() as u64;
        let (all, cut) = (numbers.len() as u64, numbers.len() as u64 / 3);
        let mut region = bytes_of(numbers);
        region.resize(1000 * PAGE_BYTES, 0);
        let sim = Sim::new(all, region);
        let sort = |first: u64, end: u64, form: Form, page: u64| {
            let middle = first + (end - first) / 2;
            let pieces = vec![range(first * wide, middle - first), range(middle * wide, end - middle)];
            let unsorted = Unsorted { kind: N::KIND, pieces, form, to: vec![range(page * PAGE, 250)] };
            assert_eq!(sim.run_one::<Sort>(unsorted), Ok(end - first));
        };
        let merge = |form: Merged, wide: u64| {
            let runs = [vec![range(250 * PAGE, cut)], vec![range(500 * PAGE, all - cut)]];
            let mut at = [0, 0];
            // A part that is whole pages, then the rest.
            let part = all / 8192 * 4096;
            for (count, page) in [(part, 0), (all - part, part * wide / PAGE)] {
                let rest = |run: usize| {
                    let Range { offset, count } = runs[run][0];
                    let wide = if form == Merged::Numbers(N::KIND) { size_of::<N>() as u64 } else { 16 };
                    vec![range(offset + at[run] * wide, count - at[run])]
                };
                let to = vec![range((750 + page) * PAGE, 250 - page)];
                let taken = sim.run_one::<Merge>(Runs { form, runs: vec![rest(0), rest(1)], count, to }).unwrap();
                assert_eq!(taken.iter().sum::<u64>(), count);
                at.iter_mut().zip(taken).for_each(|(at, taken)| *at += taken);
            }
            sim.bytes()[750 * PAGE_BYTES..][..(all * wide) as usize].to_vec()
        };
        let at = |page: usize, wide: u64| sim.bytes()[page * PAGE_BYTES..][..(all * wide) as usize].to_vec();

        sort(0, all, Form::Numbers, 250);
        assert!(at(250, wide) == bytes_of(&sorted), "{:?}", N::KIND);
        sort(0, all, Form::Indices { first: 0 }, 250);
        assert!(words(&at(250, 8)) == right, "{:?}", N::KIND);
        sort(0, cut, Form::Numbers, 250);
        sort(cut, all, Form::Numbers, 500);
        assert!(merge(Merged::Numbers(N::KIND), wide) == bytes_of(&sorted), "{:?}", N::KIND);
        sort(0, cut, Form::Pairs { first: 0 }, 250);
        sort(cut, all, Form::Pairs { first: cut }, 500);
        assert!(words(&merge(Merged::Indices, 8)) == right, "{:?}", N::KIND);
        let pairs = merge(Merged::Pairs, 16);
        assert!(words(&pairs).into_iter().step_by(2).collect::<Vec<_>>() == right, "{:?}", N::KIND);
    }

    fn mixed(count: u64) -> Vec<u64> {
        (0..count).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (number % 40)).collect()
    }

    #[test]
    fn numbers_of_each_type_come_in_order() {
        for count in [0, 1, 2, 4096, 10_000] {
            check(&mixed(count).iter().map(|bits| *bits as u8).collect::<Vec<_>>(), u8::cmp);
            check(&mixed(count).iter().map(|bits| *bits as i8).collect::<Vec<_>>(), i8::cmp);
            check(&mixed(count).iter().map(|bits| *bits as u16).collect::<Vec<_>>(), u16::cmp);
            check(&mixed(count).iter().map(|bits| *bits as i16).collect::<Vec<_>>(), i16::cmp);
            check(&mixed(count).iter().map(|bits| *bits as u32).collect::<Vec<_>>(), u32::cmp);
            check(&mixed(count).iter().map(|bits| *bits as i32).collect::<Vec<_>>(), i32::cmp);
            check(&mixed(count), u64::cmp);
            check(&mixed(count).iter().map(|bits| *bits as i64).collect::<Vec<_>>(), i64::cmp);
        }
    }

    #[test]
    fn nans_sort_last_and_minus_zero_before_zero() {
        fn by_rank<N: Number>(one: &N, other: &N) -> core::cmp::Ordering {
            // Of those that are numbers, what std says; of the others nothing but that they come
            // last is said, and that it is always the same.
            match (one.is_ordered(), other.is_ordered()) {
                (true, true) if one.is_before(*other) => core::cmp::Ordering::Less,
                (true, true) if other.is_before(*one) => core::cmp::Ordering::Greater,
                (true, true) => core::cmp::Ordering::Equal,
                (false, false) => one.rank().cmp(&other.rank()),
                (one, other) => other.cmp(&one),
            }
        }
        let of_32: Vec<f32> = mixed(9_000).iter().map(|bits| f32::from_bits((*bits >> 7) as u32)).collect();
        assert!(of_32.iter().any(|number| number.is_nan() && number.is_sign_negative()));
        check(&of_32, by_rank);
        let mut of_64: Vec<f64> = mixed(5_000).iter().map(|bits| f64::from_bits(*bits)).collect();
        of_64.extend([f64::INFINITY, 0.0, -f64::NAN, -0.0, f64::NAN, f64::NEG_INFINITY, -0.0, 0.0, -1.0]);
        check(&of_64, by_rank);
        let mut few = [f64::NAN, 1.0, f64::NEG_INFINITY, -f64::NAN, 0.0, f64::INFINITY, -0.0];
        few.sort_by_key(|number| number.rank());
        assert_eq!(format!("{few:?}"), "[-inf, -0.0, 0.0, 1.0, inf, NaN, NaN]");
        of_64.iter().for_each(|number| assert_eq!(f64::of_rank(number.rank()).to_bits(), number.to_bits()));
    }

    #[test]
    fn too_many_or_outside_numbers_are_a_fault() {
        let run = |pieces: Vec<Range>, to: Vec<Range>| {
            let sim = Sim::new(1, vec![0; 600 * PAGE_BYTES]);
            sim.run_one::<Sort>(Unsorted { kind: Kind::U8, pieces, form: Form::Numbers, to })
        };
        let to = || vec![range(300 * PAGE, 100)];
        assert_eq!(run(vec![range(0, Sort::MOST)], to()), Ok(Sort::MOST));
        let long = Err(Stop::Fault(Fault::TooLong { bytes: Sort::MOST + 1 }));
        assert_eq!(run(vec![range(0, Sort::MOST), range(0, 1)], to()), long);
        assert_eq!(
            run(vec![range(0, u64::MAX), range(0, 1)], to()),
            Err(Stop::Fault(Fault::TooLong { bytes: u64::MAX }))
        );
        let outside = Err(Stop::Fault(Fault::OutOfRange { offset: 600 * PAGE - 1 }));
        assert_eq!(run(vec![range(600 * PAGE - 1, 2)], to()), outside);
        assert_eq!(run(vec![range(0, 8)], vec![range(8, 1)]), Err(Stop::Fault(Fault::Unaligned { offset: 8 })));
        let runs = |runs: usize, count: u64| {
            let runs = vec![vec![range(0, 4)]; runs];
            Sim::new(1, vec![0; 4 * PAGE_BYTES]).run_one::<Merge>(Runs {
                form: Merged::Indices,
                runs,
                count,
                to: vec![range(PAGE, 1)],
            })
        };
        assert_eq!(runs(3, 12), Ok(vec![4; 3]));
        assert_eq!(runs(2, 12), Ok(vec![4; 2]), "there are no more");
        assert!(matches!(runs(Merge::MOST + 1, 4), Err(Stop::Fault(Fault::TooLong { .. }))));
    }
}
