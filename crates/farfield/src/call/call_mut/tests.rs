//! Guards against calls that change a part of what they should, or anything after an error, and against
//! what a server may name that no function has changed.

use super::finish;
use crate::call::function::FarFunction;
use crate::call::function_mut::{AtServerMut, Changed, ChangingArgument, FarFunctionMut};
use crate::call::overlay::{ByteRun, ChangeList, ChangeStop, OverlayLimits, ValueChange};
use crate::call::place::{FarPlace, FarSpan, RegionStop};
use crate::call::place_mut::FarPlaceMut;
use crate::call::view::{FarAnswer, FarArgument, ServerPages};
use crate::call::view_mut::{Changeable, FarMut};
use crate::call::view_traits::{FarRef, ViewTypes};
use crate::{
    CallError, FarArc, FarBox, FarError, FarRange, FarView, FarViewMut, Heap, OffloadError, Plane, Side, Verify, Where,
};
use core::mem::offset_of;
use core::time::Duration;
use farfield_wic::{Fault, Sim};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A node of a list, as large as two fifths of a page.
#[derive(FarView, FarViewMut)]
struct Node {
    number: u64,
    payload: [u8; 1500],
    is_last: bool,
    next: Option<FarBox<Node>>,
}

fn list(heap: &Heap, nodes: u64) -> FarBox<Node> {
    let node = |number, next: Option<_>| Node { number, payload: [0; 1500], is_last: next.is_none(), next };
    let mut first = heap.alloc(node(nodes, None)).unwrap();
    for number in (1..nodes).rev() {
        first = heap.alloc(node(number, Some(first))).unwrap();
    }
    first
}

fn numbers(heap: &Heap, first: &FarBox<Node>) -> Vec<u64> {
    heap.call::<Numbers>(first, ()).at(Where::Client).run().unwrap()
}

fn drop_list(mut first: FarBox<Node>) {
    while let Some(next) = first.write(|node| node.next.take()).unwrap() {
        first = next;
    }
}

/// The numbers of a list that is larger than near memory.
struct Numbers;

impl FarFunction for Numbers {
    const NAME: &'static str = "test.numbers";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = ();
    type Answer = Vec<u64>;

    async fn run<P: FarPlace>(far: &P, first: FarRef<'_, Node>, _: ()) -> Result<Vec<u64>, Fault> {
        let (mut next, mut numbers) = (Some(first), Vec::new());
        while let Some(pointer) = next {
            let node = far.follow(pointer).await?;
            numbers.push(node.number);
            next = node.next;
        }
        Ok(numbers)
    }
}

/// What [`Add`] does at its end.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
enum End {
    Well,
    Fault,
    Panic,
    Steps,
    /// Gives a node the owner of another one.
    Swap,
    /// Takes a node's owner away.
    Cut,
}

/// Adds to the number of every node, twice, and answers with the sum in between.
struct Add;

impl FarFunctionMut for Add {
    const NAME: &'static str = "test.add";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = (u64, End);
    type Answer = u64;

    async fn run<P: FarPlaceMut>(far: &P, first: FarMut<'_, Node>, (more, end): (u64, End)) -> Result<u64, Fault> {
        let (mut next, mut sum, mut last) = (Some(first), 0u64, first);
        while let Some(pointer) = next {
            let mut node = far.follow_mut(pointer).await?;
            node.number += more;
            far.store(pointer, node).await?;
            let seen = far.follow_mut(pointer).await?;
            assert_eq!(seen.number, node.number, "a function reads what it has stored");
            sum += seen.number;
            far.change(pointer, |node| node.number += more).await?;
            (next, last) = (node.next, pointer);
        }
        match end {
            End::Well => {}
            End::Fault => return Err(Fault::NotHere),
            End::Panic => panic!("the function panics"),
            End::Steps => loop {
                far.yield_now().await;
            },
            End::Swap => far.change(last, |node| node.next = Some(first)).await?,
            End::Cut => far.change(first, |node| node.next = None).await?,
        }
        Ok(sum)
    }
}

fn builder(near: u64) -> crate::Builder {
    Heap::builder().near(near).near_max(near).far(1 << 30)
}

#[test]
fn a_call_at_the_client_changes_all_or_nothing() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let heap = builder(4 << 20).plane(plane).build().unwrap();
        let mut first = list(&heap, 100);
        let mut other = list(&heap, 3000);
        let mut expected: Vec<u64> = (1..=100).collect();
        for more in [3, 0, 1 << 40] {
            let sum = heap.call_mut::<Add>(&mut first, (more, End::Well)).at(Where::Client).run().unwrap();
            assert_eq!(sum, expected.iter().map(|number| number + more).sum::<u64>());
            expected.iter_mut().for_each(|number| *number += 2 * more);
            assert_eq!(numbers(&heap, &first), expected, "{plane:?}");
            // Everything leaves, and comes back as it was changed.
            assert_eq!(heap.call_mut::<Add>(&mut other, (0, End::Well)).run().unwrap(), 3000 * 3001 / 2);
            assert_eq!(numbers(&heap, &first), expected, "{plane:?}");
        }
        let mut call = |end| heap.call_mut::<Add>(&mut first, (1, end)).at(Where::Client).steps(1000).run();
        assert_eq!(call(End::Fault), Err(CallError::Fault(Fault::NotHere).into()));
        assert_eq!(call(End::Steps), Err(CallError::Overrun { steps: 1000 }.into()));
        let is_owner = Err(OffloadError::OwnerChanged { name: "Node" });
        assert_eq!(call(End::Swap), is_owner);
        assert_eq!(call(End::Cut), is_owner);
        let panicked = catch_unwind(AssertUnwindSafe(|| call(End::Panic)));
        assert!(panicked.is_err());
        let few = heap.call_mut::<Add>(&mut first, (1, End::Well)).changes(1000).run();
        assert_eq!(few, Err(OffloadError::TooManyChanges { bytes: 1025, most: 1000 }), "each node counts for 25");
        let after = Duration::from_nanos(1);
        let late = heap.call_mut::<Add>(&mut first, (1, End::Well)).within(after).run();
        assert_eq!(late, Err(CallError::TimedOut { after }.into()));
        assert_eq!(numbers(&heap, &first), expected, "{plane:?}");
        let foreign = builder(4 << 20).build().unwrap();
        let refused = foreign.call_mut::<Add>(&mut first, (1, End::Well)).run();
        assert_eq!(refused, Err(FarError::OtherHeap.into()));
        drop_list(first);
        drop_list(other);
        heap.verify();
    }
}

#[test]
fn changes_that_cannot_be_near_together_are_refused_before_the_first_one() {
    let heap = builder(1 << 20).build().unwrap();
    let mut first = list(&heap, 1200);
    // 600 pages, of 256 that may be near.
    let refused = heap.call_mut::<Add>(&mut first, (1, End::Well)).run();
    assert_eq!(refused, Err(OffloadError::Far(FarError::NearFull)));
    let sum = heap.call_mut::<Add>(&mut first, (0, End::Well)).run().unwrap();
    assert_eq!(sum, 1200 * 1201 / 2, "nothing has changed, and a call that changes nothing needs nothing near");
    drop_list(first);
    heap.verify();
}

/// Adds to each twentieth number.
struct AddToSome;

impl FarFunctionMut for AddToSome {
    const NAME: &'static str = "test.add_to_some";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = u64;
    type Answer = ();

    async fn run<P: FarPlaceMut>(far: &P, first: FarMut<'_, Node>, more: u64) -> Result<(), Fault> {
        let (mut next, mut index) = (Some(first), 0);
        while let Some(pointer) = next {
            next = far.follow_mut(pointer).await?.next;
            if index % 20 == 0 {
                far.change(pointer, |node| node.number += more).await?;
            }
            index += 1;
        }
        Ok(())
    }
}

#[test]
fn pages_that_are_lost_while_changes_come_near_leave_all_as_it_was() {
    // Four times as many pages as may be near, so what has changed is far when it is to be applied. A read that is
    // damaged is right the next time.
    let mut ends = [0; 3];
    for seed in 0..40 {
        let pool = format!("fault:corrupt=0.002,seed={seed}@ram:");
        let heap = builder(1 << 20).pool(pool).build().unwrap();
        let mut first = list(&heap, 800);
        let mut more = 0;
        for _ in 0..4 {
            let end = match heap.call_mut::<AddToSome>(&mut first, 1000).run() {
                Ok(()) => {
                    more += 1000;
                    0
                }
                Err(OffloadError::Call(CallError::Fault(Fault::Corrupt { .. }))) => 1,
                Err(OffloadError::Far(FarError::Pool(_))) => 2,
                Err(error) => panic!("{error:?}"),
            };
            ends[end] += 1;
            let seen = loop {
                if let Ok(numbers) = heap.call::<Numbers>(&first, ()).run() {
                    break numbers;
                }
            };
            let expected = (0..800).map(|index| index + 1 + if index % 20 == 0 { more } else { 0 });
            assert!(seen.into_iter().eq(expected), "seed {seed}");
        }
        core::mem::forget(first);
    }
    assert!(ends.iter().all(|count| *count > 0), "changes that came, and failures before and meanwhile: {ends:?}");
}

/// All kinds of fields, and what is reached through others.
#[derive(FarView, FarViewMut)]
struct Everything {
    number: i128,
    ratio: f32,
    pairs: [Pair; 2],
    flags: [bool; 5],
    states: [State; 2],
    level: (Level, (), Option<u128>),
    options: Options,
    shared: FarArc<Shared>,
    owners: [Option<FarBox<Everything>>; 3],
    link: (u8, Option<FarBox<Everything>>),
}

type Options = (Option<bool>, [Option<char>; 2], Option<i16>, [Option<f64>; 3]);

#[derive(FarView, FarViewMut)]
struct Pair(u8, char);

#[derive(FarView, FarViewMut, Clone, Copy, Debug)]
#[repr(u8)]
enum State {
    Open,
    Shipped { day: u16, by: Option<u8> } = 7,
    Lost(char, [bool; 2], (u64, Level)),
}

#[derive(FarView, FarViewMut, Clone, Copy, Debug)]
#[repr(i16)]
enum Level {
    Low = -5,
    High = 300,
}

/// A type that functions only read, with a box in it.
#[derive(FarView)]
struct Shared {
    factor: i128,
    deeper: FarBox<Deep>,
}

#[derive(FarView)]
struct Deep {
    summand: i128,
}

/// Changes a field of each kind in all that is owned, by what is shared.
struct Mix;

impl FarFunctionMut for Mix {
    const NAME: &'static str = "test.mix";
    const VERSION: u32 = 1;
    type Root = Everything;
    type Argument = u8;
    type Answer = u32;

    async fn run<P: FarPlaceMut>(far: &P, root: FarMut<'_, Everything>, byte: u8) -> Result<u32, Fault> {
        let (mut left, mut count) = (vec![root], 0);
        while let Some(pointer) = left.pop() {
            let mut value = far.follow_mut(pointer).await?;
            let shared = far.follow(value.shared).await?;
            let deep = far.follow(shared.deeper).await?;
            value.number = value.number.wrapping_mul(shared.factor) + deep.summand;
            value.ratio /= 2.0;
            value.pairs[1] = PairViewMut(byte, char::from(byte));
            value.flags[usize::from(byte) % 5] ^= true;
            for state in &mut value.states {
                *state = match *state {
                    StateViewMut::Open => StateViewMut::Shipped { day: byte.into(), by: None },
                    StateViewMut::Shipped { day, by: None } => StateViewMut::Shipped { day: day + 1, by: Some(byte) },
                    StateViewMut::Shipped { day, .. } => {
                        StateViewMut::Lost(char::from(byte), [true, day > 3], (u64::from(day) << 40, value.level.0))
                    }
                    StateViewMut::Lost(..) => StateViewMut::Open,
                };
            }
            value.level.0 = match value.level.0 {
                LevelViewMut::Low => LevelViewMut::High,
                LevelViewMut::High => LevelViewMut::Low,
            };
            value.level.2 = value.level.2.map_or(Some(u128::MAX - u128::from(byte)), |_| None);
            value.options.0 = value.options.0.map_or(Some(true), |flag| flag.then_some(false));
            value.options.1[1] = value.options.1[0].replace(char::from(byte));
            value.options.2 = value.options.2.map_or(Some(-300), |_| None);
            value.options.3[usize::from(byte) % 3] = Some(f64::from(byte) / 8.0);
            far.store(pointer, value).await?;
            left.extend(value.owners.iter().flatten());
            left.extend(value.link.1);
            count += 1;
        }
        Ok(count)
    }
}

fn everything(heap: &Heap, depth: i128, shared: &FarArc<Shared>) -> FarBox<Everything> {
    let owner = |index: i128| (depth > index).then(|| everything(heap, depth - 1 - index, shared));
    let value = Everything {
        number: depth - (1 << 100),
        ratio: depth as f32 / 4.0,
        pairs: [Pair(1, 'ä'), Pair(depth as u8, '\u{1F30D}')],
        flags: [true, false, true, false, depth % 2 == 0],
        states: match depth % 3 {
            0 => [State::Open, State::Shipped { day: 9, by: Some(200) }],
            1 => [State::Shipped { day: 0, by: None }, State::Lost('\u{10FFFF}', [false; 2], (7, Level::High))],
            _ => [State::Lost('a', [true; 2], (u64::MAX, Level::Low)), State::Open],
        },
        level: (if depth % 2 == 0 { Level::Low } else { Level::High }, (), (depth % 3 > 0).then_some(1 << 100)),
        options: (
            [None, Some(false), Some(true)][depth as usize % 3],
            [None, Some('\0')],
            (depth % 2 > 0).then_some(7),
            [Some(f64::NAN), None, Some(-0.0)],
        ),
        shared: shared.clone(),
        owners: [owner(0), None, owner(2)],
        link: (depth as u8, owner(3)),
    };
    heap.alloc(value).unwrap()
}

/// The plain fields of all values, in the order of a walk.
fn tell(heap: &Heap, root: &FarBox<Everything>) -> String {
    let (scope, mut text, mut left) = (heap.enter(), String::new(), vec![root]);
    while let Some(value) = left.pop() {
        let Everything { number, ratio, pairs, flags, states, level, options, owners, link, .. } =
            value.get(&scope).unwrap();
        let [Pair(one, two), Pair(three, four)] = pairs;
        text.push_str(&format!("{number} {ratio} {one} {two} {three} {four} {flags:?} {states:?} {level:?} "));
        text.push_str(&format!("{options:?} {}; ", link.0));
        left.extend(owners.iter().flatten());
        left.extend(&link.1);
    }
    text
}

fn shared(heap: &Heap) -> FarArc<Shared> {
    let deeper = heap.alloc(Deep { summand: 11 }).unwrap();
    heap.alloc_shared(Shared { factor: -3, deeper }).unwrap()
}

/// All bytes of the heap's region as the pool has them.
fn region(heap: &Heap) -> Vec<u8> {
    use farfield_pool::{Backend, Buffer, LaneRequest, Op, Priority};
    let high = heap.core().segments.high_page();
    heap.write_back([FarRange { start: 0, len: u64::from(high) << 12 }]).unwrap();
    let mut lane = heap.core().backend.open_lane().unwrap();
    let mut page = |page: u32| {
        let op = Op::Read { page: farfield_core::PageId(page.into()), buffer: Buffer::new(1) };
        let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: Duration::from_secs(10), op };
        assert!(lane.submit(request).is_ok());
        let mut done = Vec::with_capacity(1);
        while lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_secs(10));
        }
        done.pop().unwrap().buffer.unwrap().page(0).to_vec()
    };
    (0..high).flat_map(&mut page).collect()
}

fn limits(heap: &Heap) -> OverlayLimits {
    let core = heap.core();
    OverlayLimits { bytes_max: 1 << 15, first_handle: u64::from(core.first_page + core.pages) }
}

/// What [`Mix`] answers over these bytes of the region.
fn over_bytes(
    heap: &Heap,
    seed: u64,
    bytes: Vec<u8>,
    root: &mut FarBox<Everything>,
    changed: Vec<u32>,
) -> FarAnswer<Changed<u32>> {
    let call = argument::<Mix>(heap, root, b'q', changed);
    Sim::new(seed, bytes).run_one::<AtServerMut<Mix>>(call).unwrap()
}

/// What goes to a server for a call of the function.
fn argument<F: FarFunctionMut>(
    heap: &Heap,
    root: &mut FarBox<F::Root>,
    argument: F::Argument,
    changed: Vec<u32>,
) -> FarArgument<ChangingArgument<F::Argument>>
where
    F::Root: Send,
{
    let (core, root) = (heap.core(), FarMut::of_root(root).0);
    FarArgument {
        span: FarSpan { first: core.first_page, pages: core.pages, numbers: core.numbers(), changed },
        layouts: ViewTypes::of::<Changeable<F::Root>>().layouts().to_vec(),
        root: (root.place, root.number.get()),
        argument: ChangingArgument { limits: limits(heap), argument },
        near: None,
        pages: ServerPages::All,
    }
}

#[test]
fn a_server_keeps_no_more_changes_than_it_can_answer_with_whatever_callers_allow() {
    let heap = builder(2 << 20).build().unwrap();
    let mut first = list(&heap, 3000);
    let mut call = argument::<Add>(&heap, &mut first, (1, End::Well), Vec::new());
    call.argument.limits.bytes_max = usize::MAX;
    let answer = Sim::new(1, region(&heap)).steps(1 << 20).run_one::<AtServerMut<Add>>(call).unwrap();
    let FarAnswer::Done(Changed::Stopped(stop)) = answer else { panic!("{answer:?}") };
    let ChangeStop::TooMany { bytes } = stop else { panic!("{stop:?}") };
    assert!((1 << 16..(1 << 16) + 100).contains(&bytes), "{bytes}");
    let limits = OverlayLimits { bytes_max: 1 << 20, ..limits(&heap) };
    let ended = finish::<Add>(heap.core(), limits, Changed::Stopped(stop), Side::Server);
    assert_eq!(ended, Err(CallError::AnswerTooLong.into()));
    drop_list(first);
}

#[test]
fn fields_of_all_kinds_change_alike_in_the_heap_and_over_its_bytes() {
    let heap = builder(2 << 20).build().unwrap();
    let shared = shared(&heap);
    let [mut one, mut two] = [(), ()].map(|()| everything(&heap, 6, &shared));
    let before = tell(&heap, &one);
    let count = heap.call_mut::<Mix>(&mut one, b'q').at(Where::Client).run().unwrap();
    let expected = tell(&heap, &one);
    assert_ne!(expected, before);
    let bytes = region(&heap);
    let met = over_bytes(&heap, 1, bytes.clone(), &mut two, (0..1000).map(|page| u32::from(page > 0)).collect());
    assert!(matches!(met, FarAnswer::Stopped(RegionStop::Changed(_))), "{met:?}");
    for seed in 0..20 {
        assert_eq!(tell(&heap, &two), before, "a function over bytes changes none");
        let FarAnswer::Done(changed) = over_bytes(&heap, seed, bytes.clone(), &mut two, Vec::new()) else {
            panic!("it ends")
        };
        if seed == 19 {
            assert_eq!(finish::<Mix>(heap.core(), limits(&heap), changed, Side::Server), Ok(count));
        }
    }
    assert_eq!(tell(&heap, &two), expected);
    assert_eq!(shared.read(|shared| shared.factor).unwrap(), -3);
    drop((one, two, shared));
    heap.verify();
}

/// What a server makes of the changes of a function.
type Forgery<'a> = &'a dyn Fn(&mut Vec<ValueChange>);

#[test]
fn random_bytes_end_a_function_that_changes_them_in_time() {
    let heap = builder(2 << 20).build().unwrap();
    let shared = shared(&heap);
    let mut root = everything(&heap, 6, &shared);
    let (bytes, first) = (region(&heap), heap.core().first_page);
    let mut random = fastrand::Rng::with_seed(12);
    let mut ends = [0; 2];
    for seed in 0..200 {
        let mut bytes = bytes.clone();
        for _ in 0..random.usize(..40) {
            let at = random.usize(..bytes.len() / 8) * 8;
            // Numbers, and pointers that lead somewhere.
            bytes[at..at + 4].copy_from_slice(&random.u32(..).to_ne_bytes());
            let word = if random.bool() { random.u32(..) } else { first + random.u32(..(bytes.len() >> 12) as u32) };
            bytes[at + 4..at + 8].copy_from_slice(&word.to_ne_bytes());
        }
        let call = argument::<Mix>(&heap, &mut root, b'q', Vec::new());
        let ended = Sim::new(seed, bytes).steps(10_000).run_one::<AtServerMut<Mix>>(call);
        let has_changes = matches!(ended, Ok(FarAnswer::Done(Changed::Done(..))));
        ends[usize::from(has_changes)] += 1;
    }
    assert!(ends.iter().all(|count| *count > 0), "with changes and without: {ends:?}");
    drop((root, shared));
    heap.verify();
}

#[test]
fn a_server_that_names_what_no_function_changes_changes_nothing() {
    let heap = builder(2 << 20).patience(Duration::from_millis(200)).build().unwrap();
    let shared = shared(&heap);
    let mut root = everything(&heap, 5, &shared);
    let large: FarBox<[u64; 5000]> = heap.alloc([7; 5000]).unwrap();
    let gone = heap.far_range(&heap.alloc([1u8; 3000]).unwrap()).unwrap();
    let before = tell(&heap, &root);
    let FarAnswer::Done(Changed::Done(count, sound)) = over_bytes(&heap, 1, region(&heap), &mut root, Vec::new())
    else {
        panic!("it ends")
    };
    let forge = |change: Forgery<'_>| {
        let mut changes = sound.changes.clone();
        change(&mut changes);
        let list = ChangeList::new(changes);
        finish::<Mix>(heap.core(), limits(&heap), Changed::Done(count, list), Side::Server)
    };
    let core = heap.core();
    let page_of = |range: FarRange| core.first_page + (range.start >> 12) as u32;
    let large_page = page_of(heap.far_range(&large).unwrap());
    let elsewhere: Vec<(u32, u32)> = vec![
        (0, 0),
        (0, core.first_page - 1),
        (0, core.first_page + core.pages - 1),
        (0, core.first_page + core.pages),
        (0, u32::MAX),
        // Within a large value, and beside the beginnings of small ones.
        (0, large_page + 1),
        (1, large_page),
        (sound.changes[0].slot.0 + 1, sound.changes[0].slot.1),
        // Where nothing is any more.
        ((gone.start as u32 & 4095) / 16, page_of(gone) + 7),
    ];
    for slot in elsewhere {
        let refused = forge(&|changes| changes.last_mut().unwrap().slot = slot);
        assert!(matches!(refused, Err(OffloadError::WrongChanges(_))), "{slot:?}: {refused:?}");
    }
    let refusals: [Forgery<'_>; 5] = [
        &|changes| changes[3].type_index = 1,
        &|changes| changes[2].runs[0] = ByteRun { at: offset_of!(Everything, shared), bytes: vec![1] },
        &|changes| changes[2].runs[0] = ByteRun { at: offset_of!(Everything, flags), bytes: vec![2] },
        &|changes| changes[2].runs[0] = ByteRun { at: size_of::<Everything>() - 1, bytes: vec![0; 9] },
        &|changes| *changes = changes.iter().cycle().take(2000).cloned().collect(),
    ];
    for change in refusals {
        let refused = forge(change);
        assert!(matches!(refused, Err(OffloadError::WrongChanges(_))), "{refused:?}");
    }
    let mut damaged = sound.clone();
    damaged.changes[1].runs[0].bytes[0] ^= 1;
    let refused = finish::<Mix>(core, limits(&heap), Changed::Done(count, damaged), Side::Server);
    assert!(matches!(refused, Err(OffloadError::WrongChanges(_))), "{refused:?}");
    assert_eq!(tell(&heap, &root), before);
    assert_eq!(shared.read(|shared| shared.factor).unwrap(), -3);
    let stopped = Changed::Stopped(ChangeStop::Owner { type_index: 77 });
    let named = finish::<Mix>(core, limits(&heap), stopped, Side::Server);
    assert_eq!(named, Err(OffloadError::OwnerChanged { name: "(unknown)" }));
    // Guesses of frames mean nothing.
    let changed = forge(&|changes| changes.iter_mut().for_each(|change| change.slot.0 |= 0xFFFF_FF00));
    assert_eq!(changed, Ok(count));
    assert_ne!(tell(&heap, &root), before);
    assert!(large.read(|large| large.iter().all(|word| *word == 7)).unwrap());
    drop((root, shared, large));
    heap.verify();
}

#[test]
fn a_heap_with_a_key_asks_no_server_what_to_change() {
    let heap = builder(2 << 20).verify(Verify::Keyed).build().unwrap();
    let mut first = list(&heap, 3);
    let refused = heap.call_mut::<Add>(&mut first, (1, End::Well)).at(Where::Server).run();
    assert_eq!(refused, Err(CallError::Nowhere.into()));
    assert_eq!(heap.call_mut::<Add>(&mut first, (1, End::Well)).run(), Ok(9));
    assert_eq!(heap.call_mut_choice::<Add>().calls, [0, 0], "there is nothing to choose");
    assert_eq!(numbers(&heap, &first), [3, 4, 5]);
    drop_list(first);
}

#[test]
fn places_of_values_are_those_that_values_have() {
    let heap = builder(4 << 20).build().unwrap();
    let segments = &heap.core().segments;
    let values: Vec<_> = (0..300).map(|_| heap.alloc([0u8; 300]).unwrap()).collect();
    let place = |range: FarRange| ((range.start >> 12) as u32, ((range.start & 4095) / 16) as u8);
    for value in &values {
        let (page, card) = place(heap.far_range(value).unwrap());
        assert!(segments.has_room(page, card, 300) && !segments.has_room(page, card, 400));
        assert!(!segments.has_room(page, card + 1, 1) && !segments.has_room(page, card.wrapping_sub(1), 1));
    }
    let large: FarBox<[u64; 100_000]> = heap.alloc_array_with(|_| 0).unwrap();
    let (page, card) = place(heap.far_range(&large).unwrap());
    assert_eq!(card, 0);
    assert!(segments.has_room(page, 0, 800_000) && !segments.has_room(page, 0, 900_000));
    for page in [page + 1, page + 64, heap.core().pages - 1] {
        assert!(!segments.has_room(page, 0, 1), "{page}");
    }
    // Those of several pages.
    let middle: FarBox<[u64; 1000]> = heap.alloc([0; 1000]).unwrap();
    let (page, card) = place(heap.far_range(&middle).unwrap());
    assert!(segments.has_room(page, card, 8000) && !segments.has_room(page + 1, card, 8));
}
