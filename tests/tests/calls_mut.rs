//! Does a function that changes values change the same in the heap and beside the memory, and all of it or nothing?
//!
//! Danger: changes that are lost, made twice, or made in part: because a server dies in the middle of a call, because the heap changes the
//! same values between calls, or because near memory is too small. `FARFIELD_SEED` repeats the choices.

use farfield::{
    AtServer, AtServerMut, CallError, FarArc, FarBox, FarError, FarFunction, FarFunctionMut, FarMut, FarPlace,
    FarPlaceMut, FarRef, FarView, FarViewMut, Fault, Heap, OffloadError, Plane, Verify, Where,
};
use farfield_server::{Config, Server};
use farfield_tests::{MIB, PATIENCE, Relay, Scratch, heap_at, seeded, serve_here, wait_until};
use farfield_wic::Registry;
use fastrand::Rng;
use ledger::{Balance, Charge, Entry};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const PLACES: [Where; 3] = [Where::Client, Where::Server, Where::Auto];
const PAYLOAD: usize = 400;

/// What several nodes share: functions read it, and change nothing of it.
#[derive(FarView)]
struct Label {
    factor: u64,
    summand: FarBox<u64>,
}

/// A node of a list or of a tree.
#[derive(FarView, FarViewMut)]
struct Node {
    number: u64,
    payload: [u8; PAYLOAD],
    mark: char,
    is_even: bool,
    state: State,
    limits: (u8, Option<u64>),
    owned: [Option<FarBox<Node>>; 2],
    label: Option<FarArc<Label>>,
}

/// A state that follows from the number of its node.
#[derive(FarView, FarViewMut, Clone, Copy)]
#[repr(u8)]
enum State {
    Empty,
    Small(u8),
    Large { number: u64, of: Option<char> },
}

impl State {
    fn of(number: u64) -> State {
        match number % 3 {
            0 => State::Empty,
            1 => State::Small(number as u8),
            _ => State::Large { number, of: char::from_u32(number as u32) },
        }
    }
}

fn limits(number: u64) -> (u8, Option<u64>) {
    (number as u8, number.checked_sub(1 << 62))
}

/// What [`Work`] does at the end of a way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Ending {
    Well,
    Fault,
    Panic,
    /// It does not end.
    Loop,
}

/// A way through the structure, with what is added to the nodes on it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trip {
    way: Vec<u8>,
    add: u64,
}

/// Goes some ways, changes what is on them, and answers with a digest of all that it has read.
struct Work;

impl FarFunctionMut for Work {
    const NAME: &'static str = "test.work";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = (Vec<Trip>, Ending);
    type Answer = u64;

    async fn run<P: FarPlaceMut>(
        far: &P,
        root: FarMut<'_, Node>,
        (trips, ending): (Vec<Trip>, Ending),
    ) -> Result<u64, Fault> {
        let mut digest = 0u64;
        for Trip { way, add } in trips {
            let (mut next, mut way) = (Some(root), way.into_iter());
            while let Some(pointer) = next {
                let mut node = far.follow_mut(pointer).await?;
                let at = (add as usize + way.len()) % PAYLOAD;
                digest = digest.wrapping_mul(31).wrapping_add(node.number ^ u64::from(node.payload[at]));
                let (mut factor, mut summand) = (31, add);
                if let Some(label) = node.label {
                    let label = far.follow(label).await?;
                    (factor, summand) = (label.factor, far.follow(label.summand).await?);
                }
                if add % 3 > 0 {
                    node.number = node.number.wrapping_mul(factor).wrapping_add(summand);
                    node.payload[at] = node.number as u8;
                    node.mark = char::from(node.number as u8);
                    node.is_even = node.number.is_multiple_of(2);
                    node.limits = limits(node.number);
                    node.state = match State::of(node.number) {
                        State::Empty => StateViewMut::Empty,
                        State::Small(number) => StateViewMut::Small(number),
                        State::Large { number, of } => StateViewMut::Large { number, of },
                    };
                    far.store(pointer, node).await?;
                } else {
                    far.change(pointer, |node| node.payload[at] ^= 1).await?;
                }
                next = way.next().and_then(|branch| node.owned[usize::from(branch)]);
            }
        }
        match ending {
            Ending::Well => Ok(digest),
            Ending::Fault => Err(Fault::NotHere),
            Ending::Panic => panic!("this is the panic of a test"),
            Ending::Loop => loop {
                far.yield_now().await;
            },
        }
    }
}

/// The plain fields of a node, in which each byte of the payload counts.
type Seen = (u64, u64, char, bool, u64);

/// All nodes, depth first.
struct Collect;

impl FarFunction for Collect {
    const NAME: &'static str = "test.collect";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = ();
    type Answer = Vec<Seen>;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Node>, _: ()) -> Result<Vec<Seen>, Fault> {
        let (mut left, mut seen) = (vec![root], Vec::new());
        while let Some(pointer) = left.pop() {
            let node = far.follow(pointer).await?;
            let state = match node.state {
                StateView::Empty => 1,
                StateView::Small(number) => 2 + u64::from(number),
                StateView::Large { number, of } => number.rotate_left(9) ^ of.map_or(3, u64::from),
            };
            let state = state.wrapping_add(u64::from(node.limits.0) << 7 ^ node.limits.1.unwrap_or(5));
            seen.push((node.number, weigh(&node.payload), node.mark, node.is_even, state));
            left.extend(node.owned.iter().flatten());
        }
        Ok(seen)
    }
}

fn weigh(payload: &[u8; PAYLOAD]) -> u64 {
    payload.iter().fold(0, |sum, byte| u64::wrapping_mul(sum, 257) + u64::from(*byte))
}

/// Weight of the state and the limits that follow from a number.
fn weigh_state(number: u64) -> u64 {
    let state = match State::of(number) {
        State::Empty => 1,
        State::Small(number) => 2 + u64::from(number),
        State::Large { number, of } => number.rotate_left(9) ^ of.map_or(3, u64::from),
    };
    let (low, high) = limits(number);
    state.wrapping_add(u64::from(low) << 7 ^ high.unwrap_or(5))
}

/// The same structure here, by which answers and changes are known.
struct Model {
    number: u64,
    payload: [u8; PAYLOAD],
    mark: char,
    is_even: bool,
    owned: [Option<Box<Model>>; 2],
    label: Option<(u64, u64)>,
}

impl Model {
    fn work(&mut self, trips: &[Trip]) -> u64 {
        let mut digest = 0u64;
        for Trip { way, add } in trips {
            let (mut next, mut way) = (Some(&mut *self), way.iter());
            while let Some(node) = next {
                let at = (*add as usize + way.len()) % PAYLOAD;
                digest = digest.wrapping_mul(31).wrapping_add(node.number ^ u64::from(node.payload[at]));
                let (factor, summand) = node.label.unwrap_or((31, *add));
                if add % 3 > 0 {
                    node.set(node.number.wrapping_mul(factor).wrapping_add(summand), at);
                } else {
                    node.payload[at] ^= 1;
                }
                next = way.next().and_then(|branch| node.owned[usize::from(*branch)].as_deref_mut());
            }
        }
        digest
    }

    fn set(&mut self, number: u64, at: usize) {
        (self.number, self.mark, self.is_even) = (number, char::from(number as u8), number.is_multiple_of(2));
        self.payload[at] = number as u8;
    }

    fn collect(&self) -> Vec<Seen> {
        let (mut left, mut seen) = (vec![self], Vec::new());
        while let Some(node) = left.pop() {
            seen.push((node.number, weigh(&node.payload), node.mark, node.is_even, weigh_state(node.number)));
            left.extend(node.owned.iter().flatten().map(|node| &**node));
        }
        seen
    }
}

/// Makes a random structure, here and there: a list (`shape` 0) or a tree.
fn make(heap: &Heap, random: &mut Rng, shape: u8, nodes: usize) -> (FarBox<Node>, Model) {
    let labels: Vec<(FarArc<Label>, (u64, u64))> = (0..4)
        .map(|_| {
            let of = (random.u64(..), random.u64(..));
            let summand = heap.alloc(of.1).unwrap();
            (heap.alloc_shared(Label { factor: of.0, summand }).unwrap(), of)
        })
        .collect();
    let mut made: Vec<(FarBox<Node>, Model)> = Vec::new();
    for index in 0..nodes {
        let (mut owned, mut models) = ([None, None], [None, None]);
        let children = if shape == 0 { 1 } else { random.usize(..=2) };
        for (place, model) in owned.iter_mut().zip(&mut models).take(children) {
            let child = match shape {
                0 => made.pop(),
                _ => (!made.is_empty()).then(|| made.swap_remove(random.usize(..made.len()))),
            };
            if let Some((child, of)) = child {
                (*place, *model) = (Some(child), Some(Box::new(of)));
            }
        }
        let label = (random.u8(..4) == 0).then(|| &labels[random.usize(..labels.len())]);
        let number = random.u64(..);
        let (payload, mark) = ([index as u8; PAYLOAD], 'x');
        let (state, limits) = (State::of(number), limits(number));
        let far_label = label.map(|(label, _)| label.clone());
        let node = Node { number, payload, mark, is_even: false, state, limits, owned, label: far_label };
        let label = label.map(|(_, of)| *of);
        let model = Model { number, payload, mark, is_even: false, owned: models, label };
        made.push((heap.alloc(node).unwrap(), model));
    }
    let root = made.pop().expect("there are nodes");
    made.into_iter().for_each(take_apart);
    root
}

/// Drops a structure node by node: a chain of destructors would need much stack.
fn take_apart((root, model): (FarBox<Node>, Model)) {
    let mut left = vec![root];
    while let Some(mut node) = left.pop() {
        left.extend(node.write(|node| node.owned.each_mut().map(Option::take)).unwrap().into_iter().flatten());
    }
    let mut left = vec![Box::new(model)];
    while let Some(mut node) = left.pop() {
        left.extend(node.owned.each_mut().map(Option::take).into_iter().flatten());
    }
}

fn trips(random: &mut Rng, shape: u8, count: usize, steps: usize) -> Vec<Trip> {
    let branch = |random: &mut Rng| if shape == 0 { 0 } else { random.u8(..2) };
    let way = |random: &mut Rng| (0..random.usize(..steps)).map(|_| branch(random)).collect();
    (0..count).map(|_| Trip { way: way(random), add: random.u64(..) }).collect()
}

/// A server of this process, and where it is found: across TCP and in shared memory.
fn serve(functions: Registry) -> (Server, [String; 2]) {
    let (server, [tcp, _, shared]) = serve_here(Config { functions, call_within: PATIENCE, ..Config::default() });
    (server, [tcp, shared])
}

fn functions() -> Registry {
    Registry::standard().with::<AtServerMut<Work>>().with::<AtServer<Collect>>()
}

fn heap(url: &str, plane: Plane) -> Heap {
    heap_at(url, plane, MIB)
}

/// Gives a random node another number, in the heap.
fn change_near(heap: &Heap, random: &mut Rng, shape: u8, (root, model): &mut (FarBox<Node>, Model)) {
    let (number, at) = (random.u64(..), random.usize(..PAYLOAD));
    let scope = heap.enter();
    let (mut node, mut of) = (root.get_mut(&scope).unwrap(), model);
    for _ in 0..random.usize(..40) {
        let branch = if shape == 0 { 0 } else { random.usize(..2) };
        if node.owned[branch].is_none() {
            break;
        }
        let next = node.owned[branch].as_mut().map(|next| next.get_mut(&scope).unwrap());
        (node, of) = next.zip(of.owned[branch].as_deref_mut()).expect("it is there, on both sides");
    }
    (node.number, node.mark, node.is_even) = (number, char::from(number as u8), number.is_multiple_of(2));
    (node.state, node.limits) = (State::of(number), limits(number));
    node.payload[at] = number as u8;
    of.set(number, at);
}

#[test]
fn lists_and_trees_change_alike_at_both_sides() {
    let (_server, urls) = serve(functions());
    change_at_both_sides(&urls, false);
}

#[test]
fn members_of_a_pool_change_what_they_have_and_the_client_the_rest() {
    let small = Config { functions: functions(), capacity_bytes: Some(MIB), ..Config::default() };
    let (_small, [first, ..]) = serve_here(small);
    let [(_one, [one, _]), (_two, [_, two])] = [serve(functions()), serve(functions())];
    let pools =
        [format!("stripe({one},{two})"), format!("stripe({one},{two})?group=16M"), format!("tier({first},{one})")];
    change_at_both_sides(&pools, true);
}

/// Changes structures at all places, which are members that may not have all of them, and compares.
fn change_at_both_sides(urls: &[String], are_members: bool) {
    let (mut random, mut at_server) = (seeded(4101), 0);
    for url in urls {
        for shape in 0..2 {
            let heap = heap(url, Plane::Page);
            let mut made = make(&heap, &mut random, shape, 3000);
            for turn in 0..60 {
                let place = PLACES[random.usize(..3)];
                let count = random.usize(1..4);
                let trips = trips(&mut random, shape, count, 50);
                let ending = [Ending::Well, Ending::Well, Ending::Well, Ending::Fault][random.usize(..4)];
                let answer = heap.call_mut::<Work>(&mut made.0, (trips.clone(), ending)).at(place).run();
                match ending {
                    // Nothing has changed.
                    _ if are_members && place == Where::Server && answer == Err(OffloadError::OtherMember) => {}
                    Ending::Well => assert_eq!(answer, Ok(made.1.work(&trips)), "shape {shape} {place:?} {turn} {url}"),
                    _ => assert_eq!(answer, Err(CallError::Fault(Fault::NotHere).into())),
                }
                for _ in 0..random.usize(..4) {
                    change_near(&heap, &mut random, shape, &mut made);
                }
                if turn % 10 == 9 {
                    let seen = heap.call::<Collect>(&made.0, ()).at(PLACES[turn / 10 % 3]).run();
                    let seen = match seen {
                        // It is longer than an answer of a server may be.
                        Err(OffloadError::Call(CallError::AnswerTooLong) | OffloadError::OtherMember) => {
                            heap.call::<Collect>(&made.0, ()).at(Where::Client).run()
                        }
                        other => other,
                    };
                    assert!(seen.unwrap() == made.1.collect(), "shape {shape} after {turn}");
                }
            }
            let counts = heap.call_mut_counts::<Work>();
            println!("shape {shape} {url}: {counts}");
            at_server += counts.at_server;
            take_apart(made);
            heap.verify();
        }
    }
    assert!(at_server > 0, "servers change, too");
}

#[test]
fn values_that_move_are_changed_by_the_client_alone() {
    let (_server, [url, _]) = serve(functions());
    let mut random = seeded(4102);
    for plane in [Plane::Object, Plane::Hybrid] {
        let heap = heap(&url, plane);
        let mut made = make(&heap, &mut random, 1, 3000);
        for turn in 0..30 {
            let trips = trips(&mut random, 1, 3, 50);
            let refused = heap.call_mut::<Work>(&mut made.0, (trips.clone(), Ending::Well)).at(Where::Server).run();
            assert_eq!(refused, Err(OffloadError::Movable), "{plane:?}");
            let place = [Where::Client, Where::Auto][turn % 2];
            let answer = heap.call_mut::<Work>(&mut made.0, (trips.clone(), Ending::Well)).at(place).run();
            assert_eq!(answer, Ok(made.1.work(&trips)), "{plane:?} {place:?}");
            change_near(&heap, &mut random, 1, &mut made);
        }
        assert!(heap.call::<Collect>(&made.0, ()).at(Where::Client).run().unwrap() == made.1.collect(), "{plane:?}");
        take_apart(made);
        heap.verify();
    }
}

#[test]
fn functions_that_do_not_end_well_change_nothing_at_either_side() {
    let (_server, [url, _]) = serve(functions());
    let heap = heap(&url, Plane::Page);
    let mut random = seeded(4103);
    let mut made = make(&heap, &mut random, 0, 200);
    let expected = made.1.collect();
    let trips = trips(&mut random, 0, 5, 100);
    for place in [Where::Server, Where::Client] {
        let mut call = |ending, most| {
            let call = heap.call_mut::<Work>(&mut made.0, (trips.clone(), ending));
            call.at(place).steps(5000).changes(most).run()
        };
        assert_eq!(call(Ending::Fault, 19_999), Err(CallError::Fault(Fault::NotHere).into()), "{place:?}");
        let looped = call(Ending::Loop, 19_999);
        assert!(matches!(looped, Err(OffloadError::Call(CallError::Overrun { .. }))), "{place:?}: {looped:?}");
        let many = call(Ending::Well, 300);
        let Err(OffloadError::TooManyChanges { bytes, most: 300 }) = many else { panic!("{place:?}: {many:?}") };
        assert!((301..400).contains(&bytes), "it ends with the first one too many: {bytes}");
        if place == Where::Server {
            let panicked = call(Ending::Panic, 19_999);
            assert!(matches!(panicked, Err(OffloadError::Call(CallError::Panicked))), "{panicked:?}");
        }
        assert!(heap.call::<Collect>(&made.0, ()).at(Where::Client).run().unwrap() == expected, "{place:?}");
    }
    // As often as values are changed, they count once.
    let long: Vec<Trip> = (0..40).map(|index| Trip { way: vec![0; 4 * index], add: 3 * index as u64 }).collect();
    for _ in 0..2 {
        let answer = heap.call_mut::<Work>(&mut made.0, (long.clone(), Ending::Well)).at(Where::Server).run();
        assert_eq!(answer, Ok(made.1.work(&long)));
    }
    let seen = heap.call::<Collect>(&made.0, ()).at(Where::Client).run().unwrap();
    assert!(seen == made.1.collect());
    take_apart(made);
    heap.verify();
}

#[test]
fn changes_that_cannot_be_near_together_are_refused_with_nothing_changed() {
    let (_server, [url, _]) = serve(functions());
    let heap = heap(&url, Plane::Page);
    let mut random = seeded(4104);
    let mut made = make(&heap, &mut random, 0, 3000);
    // Nodes on more pages than a scope holds.
    let far = vec![Trip { way: vec![0; 2900], add: 1 }];
    for place in PLACES {
        let refused = heap.call_mut::<Work>(&mut made.0, (far.clone(), Ending::Well)).at(place).changes(1 << 20).run();
        let expected = match place {
            Where::Server => CallError::AnswerTooLong.into(),
            _ => OffloadError::Far(FarError::NearFull),
        };
        assert_eq!(refused, Err(expected), "{place:?}");
    }
    // A scope of the caller keeps changed pages from being written back, and holds what it has seen itself.
    let near = vec![Trip { way: vec![0; 100], add: 1 }];
    {
        let _scope = heap.enter();
        let mut call = |place| heap.call_mut::<Work>(&mut made.0, (near.clone(), Ending::Well)).at(place).run();
        assert_eq!(call(Where::Client), Ok(made.1.work(&near)));
        assert_eq!(call(Where::Server), Err(OffloadError::Far(FarError::NearFull)));
        assert_eq!(call(Where::Auto), Ok(made.1.work(&near)));
    }
    for place in PLACES {
        let answer = heap.call_mut::<Work>(&mut made.0, (near.clone(), Ending::Well)).at(place).run();
        assert_eq!(answer, Ok(made.1.work(&near)), "{place:?}");
    }
    assert!(heap.call::<Collect>(&made.0, ()).at(Where::Client).run().unwrap() == made.1.collect());
    take_apart(made);
}

#[test]
fn a_heap_with_a_key_believes_no_server_and_others_are_told_what_they_lack() {
    let (_server, [url, _]) = serve(functions());
    let (_without, [other, _]) = serve(Registry::standard());
    let mut random = seeded(4105);
    let keyed = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).verify(Verify::Keyed).pool(&url);
    let cases = [
        (keyed.build().unwrap(), CallError::Nowhere),
        (heap(&other, Plane::Page), CallError::NoFunction { name: "test.work" }),
        (heap("ram:", Plane::Page), CallError::Nowhere),
    ];
    for (heap, expected) in cases {
        let mut made = make(&heap, &mut random, 1, 500);
        let trips = trips(&mut random, 1, 3, 20);
        let mut call = |place| heap.call_mut::<Work>(&mut made.0, (trips.clone(), Ending::Well)).at(place).run();
        assert_eq!(call(Where::Server), Err(expected.into()));
        let answers = [Where::Auto, Where::Client].map(call);
        assert_eq!(answers, [Ok(made.1.work(&trips)), Ok(made.1.work(&trips))]);
        take_apart(made);
    }
}

#[test]
fn a_mirror_changes_once_when_a_server_dies_and_an_erasure_code_leaves_it_to_the_client() {
    let [(first, [one, _]), (_second, [two, _])] = [serve(functions()), serve(functions())];
    let mut random = seeded(4106);
    let coded = heap(&format!("ec(2,1,{one},{two},ram:)"), Plane::Page);
    let mut made = make(&coded, &mut random, 1, 2000);
    let one_trip = trips(&mut random, 1, 2, 50);
    let nowhere = coded.call_mut::<Work>(&mut made.0, (one_trip.clone(), Ending::Well)).at(Where::Server).run();
    assert_eq!(nowhere, Err(CallError::Nowhere.into()));
    let answer = coded.call_mut::<Work>(&mut made.0, (one_trip.clone(), Ending::Well)).run();
    assert_eq!(answer, Ok(made.1.work(&one_trip)));
    assert!(coded.call::<Collect>(&made.0, ()).run().unwrap() == made.1.collect());
    take_apart(made);
    drop(coded);
    let mirrored = heap(&format!("mirror({one},{two})"), Plane::Page);
    let mut made = make(&mirrored, &mut random, 0, 2000);
    let mut first = Some(first);
    for turn in 0..24 {
        if turn == 8 {
            drop(first.take());
        }
        let place = [Where::Server, Where::Auto, Where::Server, Where::Client][turn % 4];
        let trips = trips(&mut random, 0, 2, 50);
        let answer = mirrored.call_mut::<Work>(&mut made.0, (trips.clone(), Ending::Well)).at(place).run();
        assert_eq!(answer, Ok(made.1.work(&trips)), "{place:?} {turn}");
        change_near(&mirrored, &mut random, 0, &mut made);
    }
    assert!(mirrored.call::<Collect>(&made.0, ()).at(Where::Client).run().unwrap() == made.1.collect());
    take_apart(made);
}

#[test]
fn no_change_is_lost_while_others_change_what_shares_its_pages() {
    let (_server, [url, _]) = serve(functions());
    let heap = heap(&url, Plane::Page);
    let mut random = seeded(4109);
    let (mut lists, mut others) = (Vec::new(), Vec::new());
    for _ in 0..30 {
        let mut made: Option<(FarBox<Node>, Model)> = None;
        for _ in 0..20 {
            others.push(heap.alloc([0u64; 20]).unwrap());
            let (node, model) = made.take().map_or((None, None), |(node, model)| (Some(node), Some(Box::new(model))));
            let (number, payload, mark) = (random.u64(..), [0; PAYLOAD], 'x');
            let (state, limits) = (State::of(number), limits(number));
            let owned = [node, None];
            let node = Node { number, payload, mark, is_even: false, state, limits, owned, label: None };
            let model = Model { number, payload, mark, is_even: false, owned: [model, None], label: None };
            made = Some((heap.alloc(node).unwrap(), model));
        }
        lists.extend(made);
    }
    let (is_over, changes) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|threads| {
        let (is_over, changes) = (&is_over, &changes);
        let changing = threads.spawn(move || {
            let mut random = Rng::with_seed(5);
            let mut counts = vec![0u64; others.len()];
            while !is_over.load(Ordering::Relaxed) {
                let index = random.usize(..others.len());
                others[index].write(|other| other.iter_mut().for_each(|word| *word += 1)).unwrap();
                counts[index] += 1;
                changes.fetch_add(1, Ordering::Relaxed);
            }
            (others, counts)
        });
        wait_until("the other thread changes values", || changes.load(Ordering::Relaxed) > 100);
        let mut answers = [0; 3];
        for turn in 0..150 {
            let list = random.usize(..lists.len());
            let (root, model) = &mut lists[list];
            let trips = trips(&mut random, 0, 2, 20);
            let place = PLACES[turn % 3];
            let call = heap.call_mut::<Work>(root, (trips.clone(), Ending::Well)).at(place);
            let call = if place == Where::Server { call.within(Duration::from_millis(100)) } else { call };
            match call.run() {
                Ok(answer) => assert_eq!(answer, model.work(&trips), "{place:?}"),
                // The other thread may change a page again before it is met.
                Err(
                    OffloadError::Far(FarError::Stalled { .. })
                    | OffloadError::Call(CallError::TimedOut { .. } | CallError::NotNow),
                ) if place == Where::Server => continue,
                Err(error) => panic!("{place:?}: {error:?}"),
            }
            answers[turn % 3] += 1;
        }
        is_over.store(true, Ordering::Relaxed);
        let (others, counts) = changing.join().unwrap();
        assert_eq!((answers[0], answers[2]), (50, 50), "client and auto always answer");
        for (other, count) in others.iter().zip(counts) {
            assert_eq!(other.read(|other| *other).unwrap(), [count; 20]);
        }
    });
    for (root, model) in lists {
        assert!(heap.call::<Collect>(&root, ()).at(Where::Client).run().unwrap() == model.collect());
        take_apart((root, model));
    }
    heap.verify();
}

/// Changes its root, and waits at the server until it is told to go on.
struct Linger;

/// Whether a function waits, and whether it has to. The server is in this process.
static IS_WAITING: AtomicBool = AtomicBool::new(false);
static MUST_WAIT: AtomicBool = AtomicBool::new(false);

impl FarFunctionMut for Linger {
    const NAME: &'static str = "test.linger_mut";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = u64;
    type Answer = u64;

    async fn run<P: FarPlaceMut>(far: &P, root: FarMut<'_, Node>, number: u64) -> Result<u64, Fault> {
        let before = far.change(root, |node| std::mem::replace(&mut node.number, number)).await?;
        while MUST_WAIT.load(Ordering::Acquire) {
            IS_WAITING.store(true, Ordering::Release);
            far.yield_now().await;
        }
        Ok(before)
    }
}

#[test]
fn a_server_that_is_lost_during_a_call_changes_nothing_and_auto_goes_on_with_what_is_near() {
    let (_server, [url, _]) = serve(functions().with::<AtServerMut<Linger>>());
    let relay = Relay::to(&url);
    let builder = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).pool(relay.url());
    let heap = builder.patience(Duration::from_secs(2)).build().unwrap();
    let mut made = make(&heap, &mut seeded(4107), 0, 5);
    let number = made.1.number;
    let mut call = |number, place| heap.call_mut::<Linger>(&mut made.0, number).at(place).run();
    assert_eq!(call(5, Where::Server), Ok(number));
    assert_eq!(call(6, Where::Client), Ok(5));
    assert_eq!(call(6, Where::Server), Ok(6), "the same value is no change, and the page is clean afterwards");
    assert_eq!(call(6, Where::Client), Ok(6), "near");
    MUST_WAIT.store(true, Ordering::Release);
    std::thread::scope(|threads| {
        let call = threads.spawn(|| call(7, Where::Server));
        wait_until("the function runs at the server", || IS_WAITING.load(Ordering::Acquire));
        relay.cut();
        MUST_WAIT.store(false, Ordering::Release);
        let ended = call.join().unwrap();
        let is_lost =
            matches!(ended, Err(OffloadError::Call(CallError::Fault(Fault::Lost(_)) | CallError::TimedOut { .. })));
        assert!(is_lost, "{ended:?}");
    });
    assert_eq!(call(8, Where::Auto), Ok(6), "nothing had changed");
    assert_eq!(call(9, Where::Auto), Ok(8));
    relay.mend();
}

/// The library with the functions of the ledger.
fn library() -> std::path::PathBuf {
    let program = std::env::current_exe().expect("a program has a path");
    let library =
        program.ancestors().skip(1).take(2).map(|folder| folder.join("libledger.so")).find(|path| path.exists());
    library.expect("libledger.so is built with the tests: build farfield-ledger")
}

#[test]
fn a_server_that_is_killed_leaves_an_account_as_it_was_or_wholly_charged() {
    const DAYS: u32 = 400;
    let (library, mut random) = (library(), seeded(4108));
    let (mut whole, mut none) = (0, 0);
    for turn in 0..8 {
        let scratch = Scratch::new("charge");
        let start = |name| farfield_tests::Server::start_tcp(&scratch, name, [&"--functions".into(), &library]);
        let is_mirror = turn % 2 == 0;
        let victim = start("victim");
        let other = is_mirror.then(|| start("other"));
        let pool = match &other {
            Some(other) => format!("mirror({},{})", victim.url(), other.url()),
            None => victim.url().to_owned(),
        };
        let builder = Heap::builder().near(4 * MIB).near_max(4 * MIB).far(1 << 30).pool(pool);
        let heap = builder.patience(Duration::from_secs(5)).build().unwrap();
        let mut account = heap.alloc(Entry { day: 0, cents: 0, before: None }).unwrap();
        for day in 1..DAYS {
            account = heap.alloc(Entry { day, cents: 0, before: Some(account) }).unwrap();
        }
        // Charged everywhere by one cent with each call.
        let (mut charges, calls) = (0, AtomicUsize::new(0));
        let until = 2 + random.usize(..6);
        let pause = random.u32(..200_000);
        let is_killed = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let (calls, is_killed) = (&calls, &is_killed);
            threads.spawn(move || {
                wait_until("some calls have ended", || calls.load(Ordering::Acquire) >= until);
                (0..pause).for_each(|_| std::hint::spin_loop());
                // SIGKILL, in the middle of a call.
                victim.kill();
                is_killed.store(true, Ordering::Release);
            });
            for later in 0.. {
                let was_killed = is_killed.load(Ordering::Acquire);
                let ended = heap.call_mut::<Charge>(&mut account, (0..DAYS, 1)).at(Where::Server).run();
                let balance = heap.call::<Balance>(&account, DAYS).at(Where::Client).run();
                match (&ended, balance) {
                    (Ok(DAYS), Ok(balance)) => {
                        charges += 1;
                        assert_eq!(balance, i64::from(charges * DAYS), "turn {turn}: all of it is charged");
                        whole += 1;
                    }
                    (Err(_), Ok(balance)) => {
                        assert_eq!(balance, i64::from(charges * DAYS), "turn {turn}: {ended:?} has changed nothing");
                        none += 1;
                    }
                    // What the only server had is lost with it.
                    (Err(_), Err(_)) if !is_mirror => none += 1,
                    other => panic!("turn {turn}: {other:?}"),
                }
                calls.fetch_add(1, Ordering::AcqRel);
                if was_killed && (ended.is_err() || later > 30) {
                    break;
                }
            }
        });
        core::mem::forget((account, heap));
    }
    assert!(whole > 0 && none > 0, "{whole} calls changed all, and {none} nothing");
}
