//! Guards against entries of a flat map that a function sees otherwise over the bytes of a region than in
//! the heap and in std's map, and against directories and pages with wrong bytes.

use super::fold::{FarFold, FarFoldable, Fold, FoldEnd};
use super::function::{AtServer, FarAnswer, FarFunction};
use super::part::RootImage;
use super::place::{FarPlace, RegionStop};
use super::tests::{argument_of, region_of};
use super::view_traits::FarRef;
use crate::{FarBox, FarFlatMap, FarView, Heap, Plane, SeededState, Where};
use bytemuck::{Pod, Zeroable};
use core::ops::ControlFlow;
use farfield_wic::{Fault, Sim, Stop};
use std::collections::BTreeMap;

#[derive(FarView, Clone, Copy, PartialEq, Debug)]
#[repr(C)]
struct Price {
    cents: u32,
    since: [u16; 2],
    weights: [f32; 20],
}

// SAFETY: numbers without padding between them.
unsafe impl Zeroable for Price {}
// SAFETY: as above.
unsafe impl Pod for Price {}

#[derive(FarView, Default)]
struct Bazaar {
    prices: FarFlatMap<u64, Price, SeededState>,
    /// A map whose hash function no server knows.
    visits: FarFlatMap<[u8; 6], u16>,
}

type Twin = (BTreeMap<u64, Price>, BTreeMap<[u8; 6], u16>);

/// Values of some keys, and all entries in order.
struct TellBazaar;

/// Cents and weights of some keys, and digests of all entries.
type Told = (Vec<Option<(u32, u32)>>, u64, u64, u64, u64);

fn digest(one: u64, two: u64) -> u64 {
    (one ^ 0x9e37).wrapping_mul(two | 1).wrapping_add(one)
}

impl FarFunction for TellBazaar {
    const NAME: &'static str = "test.tell_bazaar";
    const VERSION: u32 = 1;
    type Root = Bazaar;
    type Argument = Vec<u64>;
    type Answer = Told;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Bazaar>, keys: Vec<u64>) -> Result<Told, Fault> {
        let bazaar = far.follow(root).await?;
        let mut told = (Vec::new(), 0u64, bazaar.prices.len(), 0u64, bazaar.visits.len());
        for key in keys {
            let price = far.lookup(bazaar.prices, key).await?;
            told.0.push(price.map(|price| (price.cents, price.weights[19] as u32)));
        }
        let mut prices = far.entries(bazaar.prices);
        while let Some((key, price)) = prices.next().await? {
            told.1 = told.1.wrapping_add(digest(key, u64::from(price.cents) << 16 | u64::from(price.since[1])));
        }
        let mut visits = far.entries(bazaar.visits);
        while let Some((key, count)) = visits.next().await? {
            told.3 = told.3.wrapping_add(digest(u64::from(key[0]) << 8 | u64::from(key[5]), count.into()));
        }
        Ok(told)
    }
}

fn tell((prices, visits): &Twin, keys: &[u64]) -> Told {
    let found = keys.iter().map(|key| prices.get(key).map(|price| (price.cents, price.weights[19] as u32))).collect();
    let of_price =
        |(key, price): (&u64, &Price)| digest(*key, u64::from(price.cents) << 16 | u64::from(price.since[1]));
    let of_visit = |(key, count): (&[u8; 6], &u16)| digest(u64::from(key[0]) << 8 | u64::from(key[5]), (*count).into());
    let sum = |digests: &mut dyn Iterator<Item = u64>| digests.fold(0u64, u64::wrapping_add);
    let (of_prices, of_visits) = (sum(&mut prices.iter().map(of_price)), sum(&mut visits.iter().map(of_visit)));
    (found, of_prices, prices.len() as u64, of_visits, visits.len() as u64)
}

/// Changes both in the same way.
fn change(heap: &Heap, bazaar: &mut Bazaar, twin: &mut Twin, random: &mut fastrand::Rng, times: usize) {
    for _ in 0..times {
        let scope = heap.enter();
        let key = random.u64(..4000);
        match random.u32(..6) {
            0..3 => {
                let cents = random.u32(..);
                let price = Price { cents, since: [1, random.u16(..)], weights: [(cents % 1000) as f32; 20] };
                assert_eq!(bazaar.prices.insert(&scope, key, price).unwrap(), twin.0.insert(key, price));
            }
            3 => assert_eq!(bazaar.prices.remove(&scope, &key).unwrap(), twin.0.remove(&key)),
            _ => {
                let key = [key as u8, 1, 2, 3, 4, (key >> 8) as u8];
                let count = random.u16(..);
                assert_eq!(bazaar.visits.insert(&scope, key, count).unwrap(), twin.1.insert(key, count));
            }
        }
    }
}

#[test]
fn flat_maps_are_read_alike_in_the_heap_over_its_bytes_and_in_std() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).plane(plane).build().unwrap();
        let mut random = fastrand::Rng::with_seed(3923);
        let (mut bazaar, mut twin) = (Bazaar::default(), Twin::default());
        for round in 0..8 {
            let keys: Vec<u64> = (0..40).map(|_| random.u64(..4100)).collect();
            let expected = tell(&twin, &keys);
            for place in [Where::Client, Where::Auto] {
                let here = heap.call::<TellBazaar>(&bazaar, keys.clone()).at(place).run();
                assert_eq!(here.as_ref(), Ok(&expected), "{plane:?}, round {round}");
            }
            let call = argument_of(&heap, FarRef::from(&bazaar), keys.clone());
            let there = Sim::new(round, region_of(&heap)).run_one::<AtServer<TellBazaar>>(call);
            assert!(matches!(&there, Ok(FarAnswer::Done(there)) if *there == expected), "round {round}: {there:?}");
            change(&heap, &mut bazaar, &mut twin, &mut random, 1 + 300 * round as usize);
        }
        drop(bazaar);
        heap.verify();
    }
}

#[test]
fn a_map_whose_directory_is_too_long_is_walked_over_bytes_and_looked_up_by_the_heap() {
    let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3924);
    let (mut bazaar, mut twin) = (Bazaar::default(), Twin::default());
    change(&heap, &mut bazaar, &mut twin, &mut random, 30_000);
    for key in 4000..9000 {
        let price = Price { cents: key as u32, since: [0; 2], weights: [1.0; 20] };
        bazaar.prices.insert(&heap.enter(), key, price).unwrap();
        twin.0.insert(key, price);
    }
    assert!(bazaar.prices.index_bytes() > 4 * 128, "more places than a call takes along");
    let there = |keys: Vec<u64>| {
        let call = argument_of(&heap, FarRef::from(&bazaar), keys);
        Sim::new(1, region_of(&heap)).run_one::<AtServer<TellBazaar>>(call)
    };
    let expected = tell(&twin, &[]);
    let walked = there(vec![]);
    assert!(matches!(&walked, Ok(FarAnswer::Done(there)) if *there == expected), "{walked:?}");
    let looked_up = there(vec![1]);
    assert!(matches!(looked_up, Ok(FarAnswer::Stopped(RegionStop::TableNear))), "{looked_up:?}");
    assert_eq!(heap.call::<TellBazaar>(&bazaar, vec![1, 8999]).run(), Ok(tell(&twin, &[1, 8999])));
}

/// Number of prices above a limit, their sum, up to so many.
struct Above;

impl FarFold for Above {
    const NAME: &'static str = "test.above";
    const VERSION: u32 = 1;
    type Over = FarFlatMap<u64, Price, SeededState>;
    type Argument = (u32, u64);
    type State = (u64, u64);

    fn begin(_: &(u32, u64)) -> (u64, u64) {
        (0, 0)
    }

    fn step(state: &mut (u64, u64), (_, price): (u64, PriceView<'_>), (limit, most): &(u32, u64)) -> ControlFlow<()> {
        if price.cents > *limit {
            *state = (state.0 + 1, state.1 + u64::from(price.cents));
        }
        if state.0 == *most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

#[test]
fn a_fold_of_a_flat_map_sees_each_entry_once_in_pieces() {
    let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3925);
    let (mut bazaar, mut twin) = (Bazaar::default(), Twin::default());
    change(&heap, &mut bazaar, &mut twin, &mut random, 12_000);
    let bytes = region_of(&heap);
    let there = |argument: (u32, u64)| {
        let (mut state, pieces) = (Above::begin(&argument), bazaar.prices.pieces::<Above>(&argument));
        for (number, piece) in pieces.iter().enumerate() {
            let call = Fold::<Above>::argument(piece.clone(), state, argument);
            let mut call = argument_of(&heap, FarRef::near(&bazaar.prices), call);
            call.near = Some(RootImage::of(heap.core(), &bazaar.prices, piece.clone()).unwrap().0);
            let there = Sim::new(number as u64, bytes.clone()).run_one::<AtServer<Fold<Above>>>(call);
            let Ok(FarAnswer::Done((folded, end))) = there else { panic!("a piece is folded") };
            state = folded;
            if end == FoldEnd::Over {
                break;
            }
        }
        (state, pieces.len())
    };
    for limit in [0, 1 << 30, u32::MAX] {
        let above = twin.0.values().map(|price| price.cents).filter(|cents| *cents > limit);
        let expected = (above.clone().count() as u64, above.map(u64::from).sum());
        let argument = (limit, u64::MAX);
        for place in [Where::Client, Where::Auto] {
            assert_eq!(heap.fold::<Above>(&bazaar.prices, argument).at(place).run(), Ok(expected));
        }
        let (folded, pieces) = there(argument);
        assert_eq!(folded, expected);
        assert!(pieces > 1, "{pieces}");
    }
    assert_eq!(there((0, 5)).0.0, 5);
    assert_eq!(heap.fold::<Above>(&FarFlatMap::default(), (0, 1)).run(), Ok((0, 0)));
}

/// Looks one key up in a map in a far value.
struct LookDeep;

#[derive(FarView)]
struct Deep {
    map: FarFlatMap<u64, u32, SeededState>,
}

impl FarFunction for LookDeep {
    const NAME: &'static str = "test.look_deep";
    const VERSION: u32 = 1;
    type Root = Deep;
    type Argument = u64;
    type Answer = (Option<u32>, u64);

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Deep>, key: u64) -> Result<(Option<u32>, u64), Fault> {
        let (map, mut sum) = (far.follow(root).await?.map, 0);
        let mut entries = far.entries(map);
        while let Some((_, value)) = entries.next().await? {
            sum += u64::from(value);
        }
        Ok((far.lookup(map, key).await?, sum))
    }
}

#[test]
fn a_map_in_a_far_value_is_read_by_the_heap_unless_it_is_empty() {
    let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let mut deep: FarBox<Deep> = heap.alloc(Deep { map: FarFlatMap::default() }).map_err(|error| error.error).unwrap();
    let there = |deep: &FarBox<Deep>| {
        let call = argument_of(&heap, FarRef::from(deep), 7);
        Sim::new(1, region_of(&heap)).run_one::<AtServer<LookDeep>>(call)
    };
    assert!(matches!(there(&deep), Ok(FarAnswer::Done((None, 0)))));
    for number in 0..5000u64 {
        let scope = heap.enter();
        deep.get_mut(&scope).unwrap().map.insert(&scope, number, number as u32).unwrap();
    }
    assert!(matches!(there(&deep), Ok(FarAnswer::Stopped(RegionStop::TableNear))));
    // Its value comes and goes while the function looks at pages.
    let here = heap.call::<LookDeep>(&deep, 7).at(Where::Client).run();
    assert_eq!(here, Ok((Some(7), 4999 * 5000 / 2)));
}

#[test]
fn maps_with_wrong_bytes_end_a_function_in_time_and_never_in_a_panic() {
    let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3926);
    let (mut bazaar, mut twin) = (Bazaar::default(), Twin::default());
    change(&heap, &mut bazaar, &mut twin, &mut random, 2000);
    let bytes = region_of(&heap);
    let mut ends = BTreeMap::<String, u32>::new();
    for round in 0..500 {
        let mut bytes = bytes.clone();
        let keys = (0..20).map(|_| random.u64(..4000)).collect();
        let mut call = argument_of(&heap, FarRef::from(&bazaar), keys);
        let near = call.near.as_mut().unwrap();
        for _ in 0..random.usize(1..20) {
            let word = [random.u32(..), random.u32(..100), u32::MAX, 0][random.usize(..4)];
            match random.u32(..10) {
                0 => {
                    let at = random.usize(..near.bytes.len() / 4) * 4;
                    near.bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
                }
                1..4 => {
                    let at = random.usize(..near.tables.len());
                    near.tables[at] = word;
                }
                4 if near.tables.len() > 1 => near.tables.truncate(random.usize(1..near.tables.len())),
                // Counts and next pages.
                5.. => {
                    let at = random.usize(..bytes.len() / 4096) * 4096 + random.usize(..4) * 4;
                    bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
                }
                _ => {}
            }
        }
        let end = match Sim::new(round, bytes).steps(5_000).run_one::<AtServer<TellBazaar>>(call) {
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
    assert!(["OutOfRange", "TableNear", "Done"].iter().all(|end| ends.contains_key(*end)), "{ends:?}");
}
