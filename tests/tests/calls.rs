//! Does a function over far pointers answer alike in the heap and beside the memory?
//!
//! Danger: bytes of before at the server; an answer that depends on what is near, or on who uses the same pages meanwhile; a server that dies,
//! or was built otherwise, and takes the answer with it. `FARFIELD_SEED` repeats the choices.

use farfield::{
    AtServer, CallCounts, CallError, ClientReason, FarArc, FarBox, FarError, FarFunction, FarPlace, FarRef, FarView,
    Fault, Heap, OffloadError, Plane, Side, Where,
};
use farfield_server::{Config, Server};
use farfield_tests::{MIB, Over, PATIENCE, Relay, Scratch, heap_at, seeded, serve_here, wait_until};
use farfield_wic::Registry;
use fastrand::Rng;
use ledger::{Balance, Entry};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const PLACES: [Where; 3] = [Where::Client, Where::Server, Where::Auto];

/// A node of a structure that branches: a list has the first branch only, a graph has shared nodes.
#[derive(FarView)]
struct Node {
    number: u64,
    payload: [u8; 400],
    owned: [Option<FarBox<Node>>; 2],
    shared: Option<FarArc<Node>>,
}

impl Node {
    fn new(number: u64) -> Node {
        Node { number, payload: [number as u8; 400], owned: [None, None], shared: None }
    }
}

/// Follows a way through the structure, a branch for each step, and collects what is on it.
struct Follow;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Found {
    nodes: u32,
    sum: u64,
    last: u8,
}

impl FarFunction for Follow {
    const NAME: &'static str = "test.follow";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = Vec<u8>;
    type Answer = Found;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Node>, way: Vec<u8>) -> Result<Found, Fault> {
        let mut found = Found { nodes: 0, sum: 0, last: 0 };
        let (mut next, mut way) = (Some(root), way.into_iter());
        while let Some(pointer) = next {
            let node = far.follow(pointer).await?;
            found.nodes += 1;
            found.sum = found.sum.wrapping_mul(31).wrapping_add(node.number);
            found.last = node.payload[399];
            next = match way.next() {
                Some(2) => node.shared,
                Some(branch) => node.owned[usize::from(branch)],
                None => None,
            };
        }
        Ok(found)
    }
}

/// Goes through all that can be reached, shared nodes as often as they are met.
struct Count;

impl FarFunction for Count {
    const NAME: &'static str = "test.count";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = ();
    type Answer = (u64, u64);

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Node>, _: ()) -> Result<(u64, u64), Fault> {
        let (mut left, mut count, mut sum) = (vec![root], 0u64, 0u64);
        while let Some(pointer) = left.pop() {
            let node = far.follow(pointer).await?;
            (count, sum) = (count + 1, sum.wrapping_add(node.number));
            left.extend(node.owned.iter().flatten().chain(&node.shared));
        }
        Ok((count, sum))
    }
}

/// A server of this process, and where it is found: across TCP and in shared memory.
fn serve(functions: Registry) -> (Server, [String; 2]) {
    serve_with(Config { functions, ..Config::default() })
}

fn serve_with(config: Config) -> (Server, [String; 2]) {
    let (server, [tcp, _, shared]) = serve_here(config);
    (server, [tcp, shared])
}

/// Servers that keep different pages of a pool; the first has little room.
struct MemberServers {
    _servers: [Server; 3],
    urls: [String; 3],
}

impl MemberServers {
    fn start() -> MemberServers {
        let small = Config { functions: functions(), capacity_bytes: Some(MIB), ..Config::default() };
        let [(small, [first, _]), (second, [_, shared]), (third, [tcp, _])] =
            [serve_with(small), serve(functions()), serve(functions())];
        MemberServers { _servers: [small, second, third], urls: [first, shared, tcp] }
    }

    fn tiers(&self) -> String {
        format!("tier({},{})", self.urls[0], self.urls[1])
    }

    fn stripes(&self) -> [String; 2] {
        ["", "?group=16M"].map(|group| format!("stripe({},{}){group}", self.urls[1], self.urls[2]))
    }
}

fn functions() -> Registry {
    Registry::standard().with::<AtServer<Follow>>().with::<AtServer<Count>>()
}

fn heap(url: &str, plane: Plane) -> Heap {
    heap_at(url, plane, MIB)
}

/// The same structure here, by which answers are known.
struct Model {
    number: u64,
    branches: [Option<usize>; 3],
    /// Nodes on all ways from it on.
    size: u64,
}

/// Makes a random structure, its leaves first: lists (`shape` 0), trees (1), and graphs with shared nodes (2).
fn make(heap: &Heap, random: &mut Rng, shape: u8, nodes: usize) -> (FarBox<Node>, Vec<Model>) {
    let mut models: Vec<Model> = Vec::with_capacity(nodes);
    let mut owned: Vec<(FarBox<Node>, usize)> = Vec::new();
    let mut shared: Vec<(FarArc<Node>, usize)> = Vec::new();
    for index in 0..nodes {
        let is_last = index + 1 == nodes;
        let number = random.u64(..);
        let (mut node, mut branches) = (Node::new(number), [None; 3]);
        let children = if shape == 0 || is_last { 1 } else { random.usize(..=2) };
        for (place, branch) in node.owned.iter_mut().zip(&mut branches).take(children) {
            let child = match shape {
                0 => owned.pop(),
                _ => (!owned.is_empty()).then(|| owned.swap_remove(random.usize(..owned.len()))),
            };
            if let Some((child, of)) = child {
                (*place, *branch) = (Some(child), Some(of));
            }
        }
        if shape == 2 && !shared.is_empty() && random.bool() {
            let (child, of) = &shared[random.usize(..shared.len())];
            (node.shared, branches[2]) = (Some(child.clone()), Some(*of));
        }
        let size = 1 + branches.iter().flatten().map(|of| models[*of].size).sum::<u64>();
        models.push(Model { number, branches, size });
        // Shared nodes lead to few others, so that a walk of all ways ends soon.
        if shape == 2 && !is_last && size < 8 && random.bool() {
            shared.push((heap.alloc_shared(node).unwrap(), index));
        } else {
            owned.push((heap.alloc(node).unwrap(), index));
        }
    }
    let (root, _) = owned.pop().expect("the last one");
    for (left, _) in owned {
        take_apart(left);
    }
    (root, models)
}

/// Drops a structure node by node: a chain of destructors would need much stack.
fn take_apart(root: FarBox<Node>) {
    let mut left = vec![root];
    while let Some(mut node) = left.pop() {
        left.extend(node.write(|node| node.owned.each_mut().map(Option::take)).unwrap().into_iter().flatten());
    }
}

fn follow(models: &[Model], way: &[u8]) -> Found {
    let mut found = Found { nodes: 0, sum: 0, last: 0 };
    let (mut next, mut way) = (models.len().checked_sub(1), way.iter());
    while let Some(index) = next {
        let model = &models[index];
        found.nodes += 1;
        found.sum = found.sum.wrapping_mul(31).wrapping_add(model.number);
        found.last = model.number as u8;
        next = way.next().and_then(|branch| model.branches[usize::from(*branch)]);
    }
    found
}

fn count(models: &[Model]) -> (u64, u64) {
    let (mut left, mut count, mut sum) = (vec![models.len() - 1], 0, 0u64);
    while let Some(index) = left.pop() {
        (count, sum) = (count + 1, sum.wrapping_add(models[index].number));
        left.extend(models[index].branches.iter().flatten());
    }
    (count, sum)
}

fn way(random: &mut Rng, shape: u8, nodes: usize) -> Vec<u8> {
    let branch = |random: &mut Rng| match shape {
        0 => 0,
        1 => random.u8(..2),
        _ => random.u8(..3),
    };
    (0..random.usize(..nodes.min(500))).map(|_| branch(random)).collect()
}

#[test]
fn a_library_brings_functions_over_far_pointers_to_the_command() {
    let program = std::env::current_exe().expect("a program has a path");
    let library =
        program.ancestors().skip(1).take(2).map(|folder| folder.join("libledger.so")).find(|path| path.exists());
    let library = library.expect("libledger.so is built with the tests: build farfield-ledger");
    let scratch = Scratch::new("ledger");
    let server = farfield_tests::Server::start_tcp(&scratch, "server", [&"--functions".into(), &library]);
    let heap = Heap::builder().near(4 * MIB).pool(server.url()).build().unwrap();
    let mut account = heap.alloc(Entry { day: 0, cents: 1000, before: None }).unwrap();
    for day in 1..400 {
        account = heap.alloc(Entry { day, cents: -10, before: Some(account) }).unwrap();
    }
    for place in PLACES {
        for (day, cents) in [(0, 1000), (30, 700), (399, -2990), (u32::MAX, -2990)] {
            assert_eq!(heap.call::<Balance>(&account, day).at(place).run().unwrap(), cents, "{place:?}");
        }
    }
    let without = farfield_tests::Server::start_tcp(&scratch, "without", [""; 0]);
    let heap = Heap::builder().near(4 * MIB).pool(without.url()).build().unwrap();
    let account = heap.alloc(Entry { day: 0, cents: 7, before: None }).unwrap();
    let call = || heap.call::<Balance>(&account, 0);
    let unknown = call().at(Where::Server).run().unwrap_err();
    assert!(unknown.to_string().contains("has no function \"ledger.balance\""), "{unknown}");
    assert_eq!(call().run().unwrap(), 7, "the heap has it");
}

#[test]
fn lists_trees_and_graphs_are_walked_alike_at_both_sides() {
    let (_server, urls) = serve(functions());
    let mut random = seeded(3901);
    for url in &urls {
        for shape in 0..3 {
            let heap = heap(url, Plane::Page);
            let nodes = 4000;
            let (root, models) = make(&heap, &mut random, shape, nodes);
            for turn in 0..30 {
                let (way, place) = (way(&mut random, shape, nodes), PLACES[turn % 3]);
                let found = heap.call::<Follow>(&root, way.clone()).at(place).run();
                assert_eq!(found, Ok(follow(&models, &way)), "shape {shape} {place:?} {url}");
            }
            for place in PLACES {
                assert_eq!(
                    heap.call::<Count>(&root, ()).at(place).run(),
                    Ok(count(&models)),
                    "shape {shape} {place:?}"
                );
            }
            take_apart(root);
            heap.verify();
        }
    }
}

#[test]
fn members_of_a_pool_answer_for_what_they_have_and_the_client_for_the_rest() {
    let servers = MemberServers::start();
    let mut random = seeded(3908);
    let [small_groups, large_groups] = servers.stripes();
    let roomy = format!("tier({},{})", servers.urls[1], servers.urls[2]);
    // Whether one member has all pages of a structure.
    for (url, is_whole) in [(small_groups, false), (large_groups, true), (servers.tiers(), false), (roomy, true)] {
        let (heap, mut others) = (heap(&url, Plane::Page), 0);
        for shape in 0..3 {
            let (mut root, mut models) = make(&heap, &mut random, shape, 4000);
            for turn in 0..90 {
                let (way, place) = (way(&mut random, shape, 4000), PLACES[turn % 3]);
                let found = heap.call::<Follow>(&root, way.clone()).at(place).run();
                match found {
                    Err(OffloadError::OtherMember) if place == Where::Server && !is_whole => others += 1,
                    found => assert_eq!(found, Ok(follow(&models, &way)), "shape {shape} {place:?} {url}"),
                }
                // What was changed is written to the first tier, and older copies count no more.
                let number = random.u64(..);
                let way = usize::from(turn % 2 == 0);
                let scope = heap.enter();
                let (mut node, mut index) = (root.get_mut(&scope).unwrap(), models.len() - 1);
                for _ in 0..way * random.usize(..200) {
                    let (Some(next), Some(of)) = (&mut node.owned[0], models[index].branches[0]) else { break };
                    (node, index) = (next.get_mut(&scope).unwrap(), of);
                }
                (node.number, models[index].number) = (number, number);
                node.payload[399] = number as u8;
            }
            for place in [Where::Client, Where::Auto] {
                let all = heap.call::<Count>(&root, ()).at(place).run();
                assert_eq!(all, Ok(count(&models)), "shape {shape} {place:?} {url}");
            }
            take_apart(root);
        }
        let counts = heap.call_counts::<Follow>();
        println!("{url}: {counts}");
        assert!(counts.at_server > 0, "{url}: {counts}");
        assert!(is_whole || others > 0, "{url}: {counts}");
        heap.verify();
    }
}

#[test]
fn calls_over_a_stripe_run_at_the_member_that_has_their_root_and_others_are_given_up_soon() {
    let servers = [serve(functions()), serve(functions())];
    let relays = servers.each_ref().map(|(_, [tcp, _])| Relay::to(tcp));
    let url = format!("stripe({},{})", relays[0].url(), relays[1].url());
    let heap = Heap::builder().near(4 * MIB).near_max(4 * MIB).far(1 << 30).pool(&url).patience(PATIENCE);
    let heap = heap.build().unwrap();
    let mut random = seeded(3909);
    // Single nodes, at both members.
    let mut nodes = Vec::new();
    for number in (0..400).map(|_| random.u64(..)) {
        nodes.push((heap.alloc(Node::new(number)).unwrap(), number));
    }
    for (node, number) in &nodes {
        assert_eq!(heap.call::<Count>(node, ()).at(Where::Server).run(), Ok((1, *number)));
    }
    assert_eq!(heap.call_counts::<Count>(), CallCounts { at_server: 400, ..CallCounts::default() });
    // A list across both, which is near.
    let (root, models) = make(&heap, &mut random, 0, 2000);
    let deep = vec![0; 400];
    assert_eq!(heap.call::<Follow>(&root, deep.clone()).at(Where::Server).run(), Err(OffloadError::OtherMember));
    relays.iter().for_each(|relay| relay.delay(Duration::from_millis(2)));
    for _ in 0..200 {
        assert_eq!(heap.call::<Follow>(&root, deep.clone()).run(), Ok(follow(&models, &deep)));
    }
    let (counts, choice) = (heap.call_counts::<Follow>(), heap.call_choice::<Follow>());
    assert_eq!(choice.side, Side::Client, "{choice}");
    assert!((1..60).contains(&counts.at_client_by(ClientReason::OtherMember)), "{counts}");
    take_apart(root);
}

#[test]
fn what_was_changed_is_seen_and_only_what_is_met_is_written() {
    let (_server, [url, _]) = serve(functions());
    let heap = heap(&url, Plane::Page);
    let mut random = seeded(3902);
    // Lists whose nodes share pages.
    let mut lists: Vec<(FarBox<Node>, Vec<u64>)> = (0..200)
        .map(|_| {
            let numbers: Vec<u64> = (0..20).map(|_| random.u64(..)).collect();
            let mut root = heap.alloc(Node::new(numbers[0])).unwrap();
            for number in &numbers[1..] {
                let owned = [Some(root), None];
                root = heap.alloc(Node { owned, ..Node::new(*number) }).unwrap();
            }
            (root, numbers)
        })
        .collect();
    for turn in 0..400 {
        let index = random.usize(..lists.len());
        let (root, numbers) = &mut lists[index];
        // A node somewhere in the list gets another number.
        let depth = random.usize(..20);
        let number = random.u64(..);
        let scope = heap.enter();
        let mut node = root.get_mut(&scope).unwrap();
        for _ in 0..depth {
            node = node.owned[0].as_mut().unwrap().get_mut(&scope).unwrap();
        }
        node.number = number;
        numbers[19 - depth] = number;
        drop(scope);
        let sum = numbers.iter().fold(0u64, |sum, number| sum.wrapping_add(*number));
        let place = PLACES[turn % 3];
        assert_eq!(heap.call::<Count>(&*root, ()).at(place).run(), Ok((20, sum)), "{place:?}");
    }
    // Clean pages are met without a write, and stay where they are.
    let (root, _) = &lists[7];
    let first = heap.call::<Count>(root, ()).at(Where::Server).run().unwrap();
    let before = heap.stats();
    assert_eq!(heap.call::<Count>(root, ()).at(Where::Server).run(), Ok(first));
    let after = heap.stats();
    assert_eq!((before.written_pages, before.misses), (after.written_pages, after.misses));
}

#[test]
fn calls_answer_rightly_while_others_change_what_shares_their_pages() {
    let (_server, [url, _]) = serve(functions());
    let (counts, others) = call_while_others_change(&url);
    assert!(counts.at_server > 0 && others == 0, "{counts}");
}

#[test]
fn calls_answer_rightly_while_pages_move_from_tier_to_tier() {
    let servers = MemberServers::start();
    let (counts, others) = call_while_others_change(&servers.tiers());
    println!("{counts}, {others} of a server met a page of another tier");
    assert!(others > 0, "{counts}");
    for pool in servers.stripes() {
        call_while_others_change(&pool);
    }
}

/// Calls over lists while another thread changes what shares their pages. Returns where the calls ran, and how many of
/// those at a server met a page of another one.
fn call_while_others_change(url: &str) -> (CallCounts, u32) {
    let heap = heap(url, Plane::Page);
    let mut random = seeded(3903);
    let (mut lists, mut others) = (Vec::new(), Vec::new());
    for _ in 0..60 {
        let numbers: Vec<u64> = (0..30).map(|_| random.u64(..)).collect();
        let mut root = heap.alloc(Node::new(numbers[0])).unwrap();
        for number in &numbers[1..] {
            others.push(heap.alloc(Node::new(0)).unwrap());
            let owned = [Some(root), None];
            root = heap.alloc(Node { owned, ..Node::new(*number) }).unwrap();
        }
        lists.push((root, numbers.iter().fold(0u64, |sum, number| sum.wrapping_add(*number))));
    }
    let (is_over, changes) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut others_met = 0;
    std::thread::scope(|threads| {
        let (is_over, changes) = (&is_over, &changes);
        let _over = Over(is_over);
        let changing = threads.spawn(move || {
            let mut random = Rng::with_seed(5);
            let mut counts = vec![0u64; others.len()];
            while !is_over.load(Ordering::Relaxed) {
                let index = random.usize(..others.len());
                others[index].write(|node| node.number += 1).unwrap();
                counts[index] += 1;
                changes.fetch_add(1, Ordering::Relaxed);
            }
            (others, counts)
        });
        wait_until("the other thread changes values", || changes.load(Ordering::Relaxed) > 100);
        let mut answers = [0; 3];
        for turn in 0..150 {
            let (root, sum) = &lists[turn % lists.len()];
            let place = PLACES[turn % 3];
            let call = heap.call::<Count>(root, ()).at(place);
            let call = if place == Where::Server { call.within(Duration::from_millis(100)) } else { call };
            match call.run() {
                Ok(found) => assert_eq!(found, (30, *sum), "{place:?}"),
                Err(OffloadError::OtherMember) if place == Where::Server => others_met += 1,
                // The other thread may change a page again before it is met.
                Err(
                    OffloadError::Far(FarError::Stalled { .. })
                    | OffloadError::Call(CallError::TimedOut { .. } | CallError::NotNow),
                ) if place == Where::Server => continue,
                Err(error) => panic!("{place:?} {url}: {error:?}"),
            }
            answers[turn % 3] += 1;
        }
        is_over.store(true, Ordering::Relaxed);
        let (others, counts) = changing.join().unwrap();
        assert_eq!((answers[0], answers[2]), (50, 50), "client and auto always answer");
        for (other, count) in others.iter().zip(counts) {
            assert_eq!(other.read(|node| node.number).unwrap(), count);
        }
    });
    (heap.call_counts::<Count>(), others_met)
}

#[test]
fn values_that_move_are_found_by_the_client_alone() {
    let (_server, [url, _]) = serve(functions());
    for plane in [Plane::Object, Plane::Hybrid] {
        let heap = heap(&url, plane);
        let (root, models) = make(&heap, &mut seeded(3904), 2, 3000);
        for place in [Where::Client, Where::Auto, Where::Auto] {
            assert_eq!(heap.call::<Count>(&root, ()).at(place).run(), Ok(count(&models)), "{plane:?} {place:?}");
        }
        assert_eq!(heap.call::<Count>(&root, ()).at(Where::Server).run(), Err(OffloadError::Movable), "{plane:?}");
        let counts = heap.call_counts::<Count>();
        assert_eq!((counts.at_server, counts.at_client_by(ClientReason::Requested)), (0, 1), "{plane:?}: {counts}");
        assert!(counts.at_client_by(ClientReason::Movable) >= 1, "{plane:?}: {counts}");
        assert_eq!(heap.stats().calls(), counts, "{plane:?}");
        take_apart(root);
    }
}

#[test]
fn a_scope_of_the_caller_keeps_pages_from_being_written_back() {
    let (_server, [url, _]) = serve(functions());
    let heap = heap(&url, Plane::Page);
    let (mut root, models) = make(&heap, &mut seeded(3905), 0, 2000);
    assert_eq!(heap.call::<Count>(&root, ()).at(Where::Server).run(), Ok(count(&models)));
    {
        let _scope = heap.enter();
        // Everything is clean.
        assert_eq!(heap.call::<Count>(&root, ()).at(Where::Server).run(), Ok(count(&models)));
    }
    root.write(|node| node.payload[3] = 1).unwrap();
    {
        let _scope = heap.enter();
        let refused = heap.call::<Count>(&root, ()).at(Where::Server).run();
        assert_eq!(refused, Err(OffloadError::Far(FarError::NearFull)));
        assert_eq!(heap.call::<Count>(&root, ()).at(Where::Auto).run(), Ok(count(&models)));
    }
    let changed = heap.call_counts::<Count>();
    assert_eq!(changed.at_client_by(ClientReason::ChangedPages), 1, "{changed}");
    assert_eq!(heap.call::<Count>(&root, ()).at(Where::Server).run(), Ok(count(&models)));
    assert_eq!(heap.call_counts::<Count>(), CallCounts { at_server: changed.at_server + 1, ..changed });
    take_apart(root);
}

/// The same functions as a server of another build has them.
mod other_build {
    use farfield::{FarBox, FarFunction, FarPlace, FarRef, FarView, Fault};

    #[derive(FarView)]
    pub(super) struct Node {
        number: u32,
        owned: [Option<FarBox<Node>>; 2],
    }

    pub(super) struct Count;

    impl FarFunction for Count {
        const NAME: &'static str = "test.count";
        const VERSION: u32 = 1;
        type Root = Node;
        type Argument = ();
        type Answer = (u64, u64);

        async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Node>, _: ()) -> Result<(u64, u64), Fault> {
            let node = far.follow(root).await?;
            Ok((node.number.into(), node.owned.iter().flatten().count() as u64))
        }
    }
}

#[test]
fn servers_without_the_function_or_with_another_one_are_named_and_auto_goes_on() {
    let other_types = Registry::standard().with::<AtServer<other_build::Count>>();
    let cases = [
        (Registry::standard(), OffloadError::Call(CallError::NoFunction { name: "test.count" })),
        (other_types, OffloadError::OtherLayout { name: "Node" }),
    ];
    for (functions, expected) in cases {
        let (_server, [url, _]) = serve(functions);
        let heap = heap(&url, Plane::Page);
        let (root, models) = make(&heap, &mut seeded(3906), 1, 1000);
        assert_eq!(heap.call::<Count>(&root, ()).at(Where::Server).run(), Err(expected));
        assert_eq!(heap.call::<Count>(&root, ()).at(Where::Auto).run(), Ok(count(&models)));
        assert_eq!(heap.call::<Count>(&root, ()).at(Where::Server).run(), Err(expected));
        assert_eq!(heap.call::<Count>(&root, ()).run(), Ok(count(&models)));
        let (counts, choice) = (heap.call_counts::<Count>(), heap.call_choice::<Count>());
        assert_eq!(counts.at_client_by(ClientReason::NoFunction), 2, "{counts}");
        assert!(choice.side == Side::Client && choice.is_bound, "{choice}");
        take_apart(root);
    }
    assert!(OffloadError::OtherLayout { name: "Node" }.to_string().contains("the type Node"));
}

/// Looks at one node so many times; with none, it waits until it is told to go on.
struct Linger;

/// Whether a function waits, and whether it has to. The server is in this process.
static IS_WAITING: AtomicBool = AtomicBool::new(false);
static MUST_WAIT: AtomicBool = AtomicBool::new(false);

impl FarFunction for Linger {
    const NAME: &'static str = "test.linger";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = u32;
    type Answer = u64;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Node>, times: u32) -> Result<u64, Fault> {
        let mut sum = 0u64;
        for _ in 0..times {
            sum = sum.wrapping_add(far.follow(root).await?.number);
        }
        while times == 0 && MUST_WAIT.load(Ordering::Acquire) {
            IS_WAITING.store(true, Ordering::Release);
            far.yield_now().await;
        }
        Ok(sum)
    }
}

#[test]
fn functions_that_take_too_long_are_ended_at_the_server() {
    let functions = functions().with::<AtServer<Linger>>();
    let (_server, [url, _]) = serve_with(Config { functions, call_steps_max: 20_000, ..Config::default() });
    let heap = heap(&url, Plane::Page);
    let node = heap.alloc(Node::new(3)).unwrap();
    let call = |times| heap.call::<Linger>(&node, times);
    assert_eq!(call(1000).at(Where::Server).run(), Ok(3000));
    let overrun = call(1000).at(Where::Server).steps(100).run();
    assert!(matches!(overrun, Err(OffloadError::Call(CallError::Overrun { .. }))), "{overrun:?}");
    // The server's own limit, whatever the caller allows; the client has none but the caller's.
    let overrun = call(50_000).at(Where::Server).run();
    assert!(matches!(overrun, Err(OffloadError::Call(CallError::Overrun { .. }))), "{overrun:?}");
    assert_eq!(call(50_000).at(Where::Auto).run(), Ok(150_000));
}

#[test]
fn a_server_that_is_lost_during_a_call_is_an_error_and_auto_goes_on_with_what_is_near() {
    let [(_server, [url, _]), (_other, [other, _])] =
        [serve(functions().with::<AtServer<Linger>>()), serve(functions().with::<AtServer<Linger>>())];
    for pool in 0..3 {
        let relay = Relay::to(&url);
        let pool = match pool {
            0 => relay.url().to_owned(),
            1 => format!("stripe({},{other})", relay.url()),
            _ => format!("tier({},{other})", relay.url()),
        };
        let builder = Heap::builder().near(MIB).near_max(MIB).far(1 << 30).pool(&pool);
        let heap = builder.patience(Duration::from_secs(2)).build().unwrap();
        let node = heap.alloc(Node::new(3)).unwrap();
        assert_eq!(heap.call::<Linger>(&node, 5).at(Where::Server).run(), Ok(15), "{pool}");
        // Near, and clean.
        assert_eq!(heap.call::<Linger>(&node, 5).at(Where::Client).run(), Ok(15), "{pool}");
        IS_WAITING.store(false, Ordering::Release);
        MUST_WAIT.store(true, Ordering::Release);
        std::thread::scope(|threads| {
            let call = threads.spawn(|| heap.call::<Linger>(&node, 0).at(Where::Server).run());
            wait_until("the function runs at the server", || IS_WAITING.load(Ordering::Acquire));
            relay.cut();
            MUST_WAIT.store(false, Ordering::Release);
            let ended = call.join().unwrap();
            let is_lost =
                matches!(ended, Err(OffloadError::Call(CallError::Fault(Fault::Lost(_)) | CallError::TimedOut { .. })));
            assert!(is_lost, "{pool}: {ended:?}");
        });
        for _ in 0..3 {
            assert_eq!(heap.call::<Linger>(&node, 5).run(), Ok(15), "{pool}");
        }
        relay.mend();
    }
}

#[test]
fn a_mirror_answers_when_a_server_dies_and_an_erasure_code_leaves_it_to_the_client() {
    let [(first, [one, _]), (_second, [two, _])] = [serve(functions()), serve(functions())];
    let mut random = seeded(39);
    let heap_of = |pool: String| {
        Heap::builder().near(MIB).near_max(MIB).far(1 << 30).pool(pool).patience(PATIENCE).build().unwrap()
    };
    for pool in [format!("ec(2,1,{one},{two},ram:)"), format!("tier(ram:,{one})"), "stripe(ram:,ram:)".to_owned()] {
        let coded = heap_of(pool);
        let (root, models) = make(&coded, &mut random, 2, 2000);
        assert_eq!(coded.call::<Count>(&root, ()).at(Where::Server).run(), Err(CallError::Nowhere.into()));
        assert_eq!(coded.call::<Count>(&root, ()).run(), Ok(count(&models)));
        assert_eq!(coded.call_counts::<Count>().at_client_by(ClientReason::PoolKind), 1);
        take_apart(root);
    }
    let mirrored = heap_of(format!("mirror({one},{two})"));
    let (root, models) = make(&mirrored, &mut random, 2, 2000);
    for _ in 0..4 {
        assert_eq!(mirrored.call::<Count>(&root, ()).at(Where::Server).run(), Ok(count(&models)));
    }
    drop(first);
    for place in [Where::Auto, Where::Server, Where::Auto, Where::Client] {
        assert_eq!(mirrored.call::<Count>(&root, ()).at(place).run(), Ok(count(&models)), "{place:?}");
    }
    take_apart(root);
}

#[test]
fn auto_moves_to_the_side_that_is_faster() {
    let (_server, [url, _]) = serve(functions());
    let relay = Relay::to(&url);
    relay.delay(Duration::from_micros(500));
    let heap = heap(relay.url(), Plane::Page);
    let mut random = seeded(3907);
    let (root, models) = make(&heap, &mut random, 0, 20_000);
    let deep = vec![0; 600];
    for _ in 0..80 {
        assert_eq!(heap.call::<Follow>(&root, deep.clone()).run(), Ok(follow(&models, &deep)));
    }
    let choice = heap.call_choice::<Follow>();
    assert!(choice.calls.iter().all(|calls| *calls > 0), "both are tried: {choice}");
    // Near now, as nothing else is used: the client needs no round trip.
    let near = vec![0; 10];
    for _ in 0..200 {
        assert_eq!(heap.call::<Follow>(&root, near.clone()).run(), Ok(follow(&models, &near)));
    }
    assert_eq!(heap.call_choice::<Follow>().side, Side::Client, "{}", heap.call_choice::<Follow>());
    take_apart(root);
}
