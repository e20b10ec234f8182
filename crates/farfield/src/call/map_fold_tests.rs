//! Guards against entries of a map that a fold meets twice or never, at either side, and against slots with
//! wrong bytes.

use super::fold::{FarTraversal, Fold, FoldEnd};
use super::function::{AtServer, FarAnswer};
use super::map_fold::MapEntries;
use super::place::FarPlace;
use super::tests::{argument_of, region_of};
use super::view_traits::FarRef;
use crate::collections::Index;
use crate::{FarBox, FarError, FarMap, FarView, Heap, OffloadError, Plane, Where};
use core::ops::ControlFlow;
use farfield_wic::{Fault, Sim, Stop};
use std::collections::BTreeMap;

/// A key whose value needs a larger alignment.
type Key = (u16, bool);

#[derive(FarView)]
struct Entry {
    number: u64,
    letter: Option<char>,
    behind: Option<FarBox<u64>>,
}

/// Number of entries, and a digest of all that is in them and behind them, in any order.
struct Weigh;

type Weight = (u64, u64);

fn weigh(key: Key, number: u64, letter: Option<char>, behind: Option<u64>) -> u64 {
    let key = u64::from(key.0) << 1 | u64::from(key.1);
    let letter = letter.map_or(7, u64::from);
    (key ^ 0x9e37).wrapping_mul(number | 1).rotate_left(11).wrapping_mul(letter | 1) ^ behind.unwrap_or(3)
}

impl FarTraversal for Weigh {
    const NAME: &'static str = "test.weigh";
    const VERSION: u32 = 1;
    type Over = MapEntries<Key, Entry>;
    /// Number of entries after which it ends.
    type Argument = u64;
    type State = Weight;

    fn begin(_: &u64) -> Weight {
        (0, 0)
    }

    async fn visit<'f, P: FarPlace>(
        far: &'f P,
        state: &mut Weight,
        (key, entry): (Key, EntryView<'f>),
        most: &u64,
    ) -> Result<ControlFlow<()>, Fault> {
        let behind = match entry.behind {
            Some(pointer) => Some(far.follow(pointer).await?),
            None => None,
        };
        *state = (state.0 + 1, state.1.wrapping_add(weigh(key, entry.number, entry.letter, behind)));
        Ok(if state.0 == *most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

type Twin = BTreeMap<Key, (u64, Option<char>, Option<u64>)>;

fn change(heap: &Heap, map: &FarMap<Key, Entry>, twin: &mut Twin, random: &mut fastrand::Rng, times: usize) {
    for _ in 0..times {
        let key = (random.u16(..900), random.bool());
        if random.u8(..4) == 0 {
            assert_eq!(map.remove(&heap.enter(), &key).unwrap().is_some(), twin.remove(&key).is_some());
            continue;
        }
        let (number, letter) = (random.u64(..), random.bool().then(|| random.char(..)));
        let behind = random.bool().then(|| random.u64(..));
        let of = behind.map(|behind| heap.alloc(behind).unwrap());
        let entry = Entry { number, letter, behind: of };
        map.insert(&heap.enter(), key, entry).map_err(|error| error.error).unwrap();
        twin.insert(key, (number, letter, behind));
    }
}

fn weight(twin: &Twin) -> Weight {
    let weights = twin.iter().map(|(key, (number, letter, behind))| weigh(*key, *number, *letter, *behind));
    (twin.len() as u64, weights.fold(0, u64::wrapping_add))
}

#[test]
fn a_fold_of_a_map_meets_each_entry_once_at_either_side() {
    for (plane, index) in [(Plane::Page, Index::Near), (Plane::Page, Index::Far), (Plane::Object, Index::Near)] {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).plane(plane).build().unwrap();
        let mut random = fastrand::Rng::with_seed(3940);
        let mut map: FarMap<Key, Entry> = FarMap::builder().index(index).build(&heap).unwrap();
        let mut twin = Twin::new();
        for round in 0..6 {
            for place in [Where::Client, Where::Auto] {
                let found = heap.fold_map::<Weigh, _, _, _>(&mut map, u64::MAX).at(place).run();
                assert_eq!(found, Ok(weight(&twin)), "{plane:?} {index:?}, round {round}");
            }
            if plane == Plane::Page {
                let (entries, bytes) = (MapEntries::of(&heap, &mut map), region_of(&heap));
                let call = Fold::<Weigh>::argument(0..entries.len(), (0, 0), u64::MAX);
                let call = argument_of(&heap, FarRef::near(&entries), call);
                let there = Sim::new(round, bytes).run_one::<AtServer<Fold<Weigh>>>(call);
                let Ok(FarAnswer::Done((there, FoldEnd::Piece))) = there else { panic!("it ends well: {there:?}") };
                assert_eq!(there, weight(&twin));
            }
            change(&heap, &map, &mut twin, &mut random, 1000);
        }
        let ended = heap.fold_map::<Weigh, _, _, _>(&mut map, 170).run().map(|(count, _)| count);
        assert_eq!(ended, Ok(170), "in the second call");
        let other = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
        let refused = other.fold_map::<Weigh, _, _, _>(&mut map, 1).run();
        assert_eq!(refused, Err(OffloadError::Far(FarError::OtherHeap)));
        drop(map);
        heap.verify();
    }
}

#[test]
fn slots_with_wrong_bytes_end_a_fold_in_time_and_never_in_a_panic() {
    let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3941);
    let mut map: FarMap<Key, Entry> = FarMap::new(&heap).unwrap();
    change(&heap, &map, &mut Twin::new(), &mut random, 600);
    let (entries, bytes) = (MapEntries::of(&heap, &mut map), region_of(&heap));
    let mut ends = BTreeMap::<String, u32>::new();
    for round in 0..500 {
        let call = Fold::<Weigh>::argument(0..entries.len(), (0, 0), u64::MAX);
        let mut call = argument_of(&heap, FarRef::near(&entries), call);
        let near = call.near.as_mut().unwrap();
        for _ in 0..random.usize(1..4) {
            let word = [random.u32(..), random.u32(..300), heap.core().first_page, 0][random.usize(..4)];
            if random.u8(..8) == 0 {
                near.bytes[random.usize(..2) * 4..][..4].copy_from_slice(&word.to_ne_bytes());
            } else {
                let at = random.usize(..near.tables.len());
                near.tables[at] = word;
            }
        }
        let end = match Sim::new(round, bytes.clone()).steps(5_000).run_one::<AtServer<Fold<Weigh>>>(call) {
            Err(Stop::Fault(fault)) => format!("{fault:?}"),
            Err(stop) => format!("{stop:?}"),
            Ok(FarAnswer::Stopped(stop)) => format!("{stop:?}"),
            Ok(_) => "Done".into(),
        };
        let end = end.split([' ', '(', '{']).next().unwrap().to_owned();
        assert_ne!(end, "Panicked", "round {round}");
        *ends.entry(end).or_default() += 1;
    }
    println!("{ends:?}");
    assert!(["NoValue", "OutOfRange", "Done"].iter().all(|end| ends.contains_key(*end)), "{ends:?}");
}
