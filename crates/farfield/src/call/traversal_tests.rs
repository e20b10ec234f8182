//! Guards against folds that follow pointers to other values at a server than in the heap and in std's
//! collections, and against pieces that visit an element twice or never.

use super::fold::{FarFoldable, FarTraversal, Fold, FoldEnd};
use super::function::{AtServer, FarAnswer};
use super::part::RootImage;
use super::place::FarPlace;
use super::tests::{argument_of, region_of};
use super::view_traits::FarRef;
use crate::{CallError, FarArc, FarBTreeMap, FarBox, FarList, FarVec, FarView, Heap, OffloadError, Where};
use core::cmp::Ordering;
use core::ops::{ControlFlow, Range};
use farfield_wic::{Fault, Sim};
use std::collections::BTreeMap;

/// A chain of numbers behind an element.
#[derive(FarView)]
struct BehindLink {
    number: u64,
    next: Option<FarBox<BehindLink>>,
}

/// Number of elements, sum of what is behind them, and the last digest of all in their order.
type Found = (u64, u64, u64);

fn add(found: &mut Found, number: u64) {
    *found = (found.0, found.1.wrapping_add(number), found.2.rotate_left(7) ^ number);
}

async fn follow<'f, P: FarPlace>(far: &'f P, found: &mut Found, first: FarRef<'f, BehindLink>) -> Result<(), Fault> {
    let mut next = Some(first);
    while let Some(pointer) = next {
        let link = far.follow(pointer).await?;
        add(found, link.number);
        next = link.next;
    }
    Ok(())
}

/// Follows the pointers of elements in a range, up to one that ends the fold.
macro_rules! following {
    ($name:ident, $text:literal, $over:ty, $key:ty, |$item:ident| $value:expr) => {
        struct $name;

        impl FarTraversal for $name {
            const NAME: &'static str = $text;
            const VERSION: u32 = 1;
            const PIECE_ELEMENTS: usize = 37;
            type Over = $over;
            type Argument = (Range<$key>, u64);
            type State = Found;

            fn begin(_: &Self::Argument) -> Found {
                (0, 0, 0)
            }

            fn position(key: &$key, (range, _): &Self::Argument) -> Ordering {
                super::entries::position(range, key)
            }

            async fn visit<'f, P: FarPlace>(
                far: &'f P,
                found: &mut Found,
                $item: <$over as FarFoldable>::Item<'f>,
                (_, end): &Self::Argument,
            ) -> Result<ControlFlow<()>, Fault> {
                let (tag, pointer): (u64, Option<FarRef<'f, BehindLink>>) = $value;
                found.0 += 1;
                if let Some(pointer) = pointer {
                    follow(far, found, pointer).await?;
                }
                Ok(if tag == *end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            }
        }
    };
}

following!(FollowList, "test.follow_list", FarList<(u64, FarBox<BehindLink>)>, usize, |item| (item.0, Some(item.1)));
following!(FollowVec, "test.follow_vec", FarVec<(u64, Option<FarArc<BehindLink>>)>, usize, |item| item);
following!(FollowMap, "test.follow_map", FarBTreeMap<u64, FarBox<BehindLink>>, u64, |item| (item.0, Some(item.1)));

fn link(heap: &Heap, numbers: &[u64]) -> Option<FarBox<BehindLink>> {
    numbers.iter().rev().fold(None, |next, number| {
        Some(heap.alloc(BehindLink { number: *number, next }).map_err(|error| error.error).unwrap())
    })
}

fn fold_there<F: FarTraversal>(heap: &Heap, bytes: &[u8], over: &F::Over, argument: &F::Argument) -> (F::State, usize) {
    let (mut state, pieces, mut calls) = (F::begin(argument), over.pieces::<F>(argument), 0);
    for piece in &pieces {
        let mut place = Vec::new();
        loop {
            let call = Fold::<F>::argument(piece.clone(), state, argument.clone()).at(place);
            let mut call = argument_of(heap, FarRef::near(over), call);
            call.near = Some(RootImage::of(heap.core(), over, piece.clone()).unwrap().0);
            let there = Sim::new(calls as u64, bytes.to_vec()).run_one::<AtServer<Fold<F>>>(call);
            let Ok(FarAnswer::Done((folded, end))) = there else { panic!("a piece is folded") };
            (state, calls) = (folded, calls + 1);
            match end {
                FoldEnd::Over => return (state, calls),
                FoldEnd::Piece => break,
                FoldEnd::At(next) => place = next,
            }
        }
    }
    (state, calls)
}

#[test]
fn folds_follow_pointers_alike_in_the_heap_and_over_its_bytes() {
    let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3922);
    let (mut list, mut vec, mut map) = (FarList::new(), FarVec::new(), FarBTreeMap::new());
    let (mut twin, mut of_map) = (Vec::new(), BTreeMap::new());
    for number in 0..400u64 {
        let numbers: Vec<u64> = (0..random.usize(1..5)).map(|_| random.u64(..)).collect();
        let new = || link(&heap, &numbers);
        let (boxed, shared, of_key) = (new().unwrap(), (number % 3 > 0).then(|| new().unwrap().into()), new().unwrap());
        list.push_back(&heap.enter(), (number, boxed)).map_err(|error| error.error).unwrap();
        vec.push(&heap.enter(), (number, shared)).map_err(|error| error.error).unwrap();
        let key = random.u64(..2000);
        map.insert(&heap.enter(), key, of_key).map_err(|error| error.error).unwrap();
        twin.push(numbers.clone());
        of_map.insert(key, numbers);
    }
    let (bytes, mut most) = (region_of(&heap), 0);
    for round in 0..25 {
        let start = random.usize(..400);
        let range = if round == 0 { 0..usize::MAX } else { start..random.usize(start..500) };
        let end = if round % 2 == 0 { u64::MAX } else { random.u64(..400) };
        let some = &twin[range.start.min(400)..range.end.min(400)];
        let last = (end as usize).checked_sub(range.start).filter(|last| *last < some.len());
        let some = last.map_or(some, |last| &some[..=last]);
        let (mut of_list, mut of_vec) = ((some.len() as u64, 0, 0), (some.len() as u64, 0, 0));
        for (index, numbers) in some.iter().enumerate() {
            numbers.iter().for_each(|number| add(&mut of_list, *number));
            if (range.start + index) % 3 > 0 {
                numbers.iter().for_each(|number| add(&mut of_vec, *number));
            }
        }
        let argument = (range.clone(), end);
        for place in [Where::Client, Where::Auto] {
            assert_eq!(heap.fold::<FollowList>(&list, argument.clone()).at(place).run(), Ok(of_list));
            assert_eq!(heap.fold::<FollowVec>(&vec, argument.clone()).at(place).run(), Ok(of_vec));
        }
        let (there, calls) = fold_there::<FollowList>(&heap, &bytes, &list, &argument);
        assert_eq!((there, calls), (of_list, some.len().div_ceil(37).max(1)), "{range:?}");
        assert_eq!(fold_there::<FollowVec>(&heap, &bytes, &vec, &argument).0, of_vec);

        let keys = range.start as u64 * 4..range.end.min(500) as u64 * 4;
        let mut known = (0, 0, 0);
        for (key, numbers) in of_map.range(keys.clone()) {
            known.0 += 1;
            numbers.iter().for_each(|number| add(&mut known, *number));
            if *key == end {
                break;
            }
        }
        let argument = (keys, end);
        assert_eq!(heap.fold::<FollowMap>(&map, argument.clone()).at(Where::Client).run(), Ok(known));
        let (there, calls) = fold_there::<FollowMap>(&heap, &bytes, &map, &argument);
        assert_eq!(there, known, "{argument:?} in {calls}");
        most = most.max(calls);
    }
    assert!(most > 1, "a tree has more entries than a call visits");
    // Places that the tree does not have, as a server might name them.
    let mut random = fastrand::Rng::with_seed(3928);
    for _ in 0..300 {
        let choice = |random: &mut fastrand::Rng| match random.u8(..4) {
            0 => u16::MAX - random.u16(..3),
            1 => random.u16(..),
            _ => random.u16(..6),
        };
        let place = (0..random.usize(1..5)).map(|_| choice(&mut random)).collect();
        let call = Fold::<FollowMap>::argument(0..usize::MAX, (0, 0, 0), (0..5000, u64::MAX)).at(place);
        let end = heap.call::<Fold<FollowMap>>(&map, call).at(Where::Client).run();
        let is_expected = matches!(end, Ok(_) | Err(OffloadError::Call(CallError::Fault(Fault::OutOfRange { .. }))));
        assert!(is_expected, "{end:?}");
    }
}
