//! Guards against functions that answer otherwise in the heap than over the bytes of its region,
//! and against bytes there that nobody wrote: a server believes none of them.

use super::function::{AtServer, FarAnswer, FarArgument, FarFunction};
use super::part::RootImage;
use super::place::{FarPlace, FarSpan, RegionStop};
use super::reach::ServerPages;
use super::view_traits::{FarRef, ViewTypes};
use crate::{CallError, FarArc, FarBox, FarError, FarView, Heap, OffloadError, Plane, Where};
use core::mem::offset_of;
use core::time::Duration;
use farfield_wic::{Fault, Sim, Stop};

#[derive(FarView)]
struct Node {
    number: u64,
    is_last: bool,
    next: Option<FarBox<Node>>,
}

/// Adds up a list, up to its end.
struct Sum;

impl FarFunction for Sum {
    const NAME: &'static str = "test.sum";
    const VERSION: u32 = 1;
    type Root = Node;
    type Argument = ();
    type Answer = u64;

    async fn run<P: FarPlace>(far: &P, first: FarRef<'_, Node>, _: ()) -> Result<u64, Fault> {
        let (mut next, mut sum) = (Some(first), 0u64);
        while let Some(pointer) = next {
            let node = far.follow(pointer).await?;
            sum = sum.wrapping_add(node.number);
            assert_eq!(node.is_last, node.next.is_none());
            next = node.next;
        }
        Ok(sum)
    }
}

const PAGES: u32 = 16;
/// The first page of the region, as pointers number it.
const FIRST: u32 = 7000;

/// The bytes of a region with nodes: (page, card), number, and the halves of the next one's slot.
fn region(nodes: impl IntoIterator<Item = ((u32, u8), u64, (u32, u32))>) -> Vec<u8> {
    let mut bytes = vec![0; PAGES as usize * 4096];
    for ((page, card), number, (place, next)) in nodes {
        let node = &mut bytes[page as usize * 4096 + usize::from(card) * 16..][..size_of::<Node>()];
        node[offset_of!(Node, number)..][..8].copy_from_slice(&number.to_ne_bytes());
        node[offset_of!(Node, is_last)] = u8::from(next == 0);
        node[offset_of!(Node, next)..][..4].copy_from_slice(&place.to_ne_bytes());
        node[offset_of!(Node, next) + 4..][..4].copy_from_slice(&next.to_ne_bytes());
    }
    bytes
}

/// The halves of a slot word; the guess of the frame means nothing.
fn slot(page: u32, card: u8) -> (u32, u32) {
    (0xABCD_EF00 | u32::from(card), FIRST + page)
}

fn argument(root: (u32, u32), changed: Vec<u32>) -> FarArgument<()> {
    let span = FarSpan { first: FIRST, pages: PAGES, numbers: u64::from(PAGES) + 10, changed };
    FarArgument {
        span,
        layouts: ViewTypes::of::<Node>().layouts().to_vec(),
        root,
        argument: (),
        near: None,
        pages: ServerPages::All,
    }
}

fn run(bytes: Vec<u8>, call: FarArgument<()>) -> Result<FarAnswer<u64>, Stop> {
    Sim::new(1, bytes).steps(10_000).run_one::<AtServer<Sum>>(call)
}

#[test]
fn a_list_is_walked_over_the_bytes_of_a_region() {
    let nodes = [((3, 5), 10, slot(9, 0)), ((9, 0), 20, slot(3, 9)), ((3, 9), 30, (77, 0))];
    let done = run(region(nodes), argument(slot(3, 5), vec![]));
    assert!(matches!(done, Ok(FarAnswer::Done(60))), "{done:?}");
}

#[test]
fn pages_that_changed_are_met_and_not_read() {
    let nodes = [((3, 5), 10, slot(9, 0)), ((9, 0), 20, (0, 0))];
    // As distances: 4, 9, and 2, 8, 10.
    let met = run(region(nodes), argument(slot(3, 5), vec![4, 5]));
    assert!(matches!(met, Ok(FarAnswer::Stopped(RegionStop::Changed(9)))), "{met:?}");
    let done = run(region(nodes), argument(slot(3, 5), vec![2, 6, 2]));
    assert!(matches!(done, Ok(FarAnswer::Done(30))), "{done:?}");
    // Distances that run over are pages that do not exist.
    let done = run(region(nodes), argument(slot(3, 5), vec![u32::MAX, 9]));
    assert!(matches!(done, Ok(FarAnswer::Done(30))), "{done:?}");
}

#[test]
fn pages_of_another_member_are_met_and_not_read() {
    let walk = |nodes, changed, pages| run(region(nodes), FarArgument { pages, ..argument(slot(3, 5), changed) });
    // Pages 3 and 9 are the second and the fifth of the second member.
    let dealt = |member| ServerPages::Dealt { members: 2, group_pages: 1, member };
    let done = walk([((1, 5), 10, slot(9, 0)), ((4, 0), 20, (0, 0))], vec![], dealt(1));
    assert!(matches!(done, Ok(FarAnswer::Done(30))), "{done:?}");
    let other = walk([((1, 5), 10, slot(8, 0)), ((4, 0), 20, (0, 0))], vec![8], dealt(1));
    assert!(matches!(other, Ok(FarAnswer::Stopped(RegionStop::OtherMember(8)))), "{other:?}");
    let other = walk([((1, 5), 10, slot(9, 0)), ((4, 0), 20, (0, 0))], vec![], dealt(0));
    assert!(matches!(other, Ok(FarAnswer::Stopped(RegionStop::OtherMember(3)))), "{other:?}");
    // Pages 2, 3 and 9 of a tier.
    let tier = || ServerPages::Runs(vec![(2, 2), (5, 1)]);
    let done = walk([((3, 5), 10, slot(9, 0)), ((9, 0), 20, (0, 0))], vec![], tier());
    assert!(matches!(done, Ok(FarAnswer::Done(30))), "{done:?}");
    let other = walk([((3, 5), 10, slot(8, 0)), ((8, 0), 20, (0, 0))], vec![], tier());
    assert!(matches!(other, Ok(FarAnswer::Stopped(RegionStop::OtherMember(8)))), "{other:?}");
    // One that changed may come to lie there when it is written back.
    let changed = walk([((3, 5), 10, slot(8, 0)), ((8, 0), 20, (0, 0))], vec![8], tier());
    assert!(matches!(changed, Ok(FarAnswer::Stopped(RegionStop::Changed(8)))), "{changed:?}");
}

#[test]
fn forged_pointers_end_as_faults_and_cycles_by_their_budget() {
    let to = |slot| run(region([((3, 5), 10, slot)]), argument(crate::call::tests::slot(3, 5), vec![]));
    for number in [FIRST - 1, FIRST + PAGES + 10, u32::MAX, 1] {
        let fault = to((0, number));
        assert!(matches!(fault, Err(Stop::Fault(Fault::OutOfRange { .. }))), "{number}: {fault:?}");
    }
    // The last card of the last page has no room for a node.
    assert!(matches!(to(slot(PAGES - 1, 255)), Err(Stop::Fault(Fault::OutOfRange { .. }))));
    let moved = to((0, FIRST + PAGES + 9));
    assert!(matches!(moved, Ok(FarAnswer::Stopped(RegionStop::Movable))), "{moved:?}");
    assert!(matches!(run(region([]), argument((0, 0), vec![])), Err(Stop::Fault(Fault::OutOfRange { offset: 0 }))));
    assert!(matches!(to(slot(3, 5)), Err(Stop::Overrun { .. })), "a cycle");
    // A bool that is neither.
    let mut bytes = region([((3, 5), 10, (0, 0))]);
    bytes[3 * 4096 + 5 * 16 + offset_of!(Node, is_last)] = 2;
    let none = run(bytes, argument(slot(3, 5), vec![]));
    assert!(matches!(none, Ok(FarAnswer::Stopped(RegionStop::NoValue(offset))) if offset == 3 * 4096 + 80), "{none:?}");
}

#[test]
fn random_bytes_end_a_function_in_time() {
    let mut random = fastrand::Rng::with_seed(11);
    for _ in 0..300 {
        let mut bytes = vec![0; PAGES as usize * 4096];
        random.fill(&mut bytes);
        // Pointers that lead somewhere, so that walks go on.
        for word in bytes.chunks_exact_mut(8) {
            if random.bool() {
                word[4..].copy_from_slice(&(FIRST + random.u32(..PAGES + 2)).to_ne_bytes());
            }
        }
        let root = slot(random.u32(..PAGES), random.u8(..));
        // It ends, in whatever way. `Panicked` is the function's own assertion.
        let _ = run(bytes, argument(root, vec![random.u32(..20)]));
    }
}

/// The same name with other fields, as in another build.
mod other {
    #[derive(farfield::FarView)]
    pub(super) struct Node {
        pub(super) number: u64,
        pub(super) is_last: bool,
        pub(super) previous: Option<farfield::FarBox<Node>>,
    }
}

#[test]
fn another_layout_of_a_type_is_refused() {
    let mut call = argument(slot(3, 5), vec![]);
    call.layouts = ViewTypes::of::<other::Node>().layouts().to_vec();
    assert!(matches!(run(region([]), call.clone()), Ok(FarAnswer::OtherLayout(0))));
    call.layouts = Vec::new();
    assert!(matches!(run(region([]), call.clone()), Ok(FarAnswer::OtherLayout(0))));
    call.layouts = [ViewTypes::of::<Node>().layouts(), &[5]].concat();
    assert!(matches!(run(region([]), call), Ok(FarAnswer::OtherLayout(1))));
}

/// All kinds of fields.
#[derive(FarView)]
struct Everything {
    number: i128,
    ratio: f32,
    pairs: [Pair; 2],
    shared: FarArc<Pair>,
    owners: [Option<FarBox<Everything>>; 3],
}

#[derive(FarView)]
struct Pair(u8, char);

/// Text of all that it finds.
struct Tell;

impl FarFunction for Tell {
    const NAME: &'static str = "test.tell";
    const VERSION: u32 = 1;
    type Root = Everything;
    type Argument = String;
    type Answer = String;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Everything>, prefix: String) -> Result<String, Fault> {
        let (mut text, mut left) = (prefix, vec![root]);
        while let Some(pointer) = left.pop() {
            let EverythingView { number, ratio, pairs, shared, owners } = far.follow(pointer).await?;
            let [PairView(_, first), PairView(byte, second)] = pairs;
            let PairView(shared, mark) = far.follow(shared).await?;
            text.push_str(&format!("{number} {ratio} {byte} {second} {first} {shared} {mark}; "));
            left.extend(owners.iter().flatten());
        }
        Ok(text)
    }
}

fn everything(heap: &Heap, depth: i128, shared: &FarArc<Pair>) -> FarBox<Everything> {
    let owner = |index: i128| (depth > index).then(|| everything(heap, depth - 1 - index, shared));
    let value = Everything {
        number: depth - (1 << 100),
        ratio: depth as f32 / 4.0,
        pairs: [Pair(1, 'ä'), Pair(depth as u8, '\u{1F30D}')],
        shared: shared.clone(),
        owners: [owner(0), None, owner(2)],
    };
    heap.alloc(value).unwrap()
}

#[test]
fn fields_of_all_kinds_are_read_alike_in_the_heap_and_over_its_bytes() {
    let heap = Heap::builder().near(2 << 20).far(1 << 30).build().unwrap();
    let shared = heap.alloc_shared(Pair(7, '!')).unwrap();
    let root = everything(&heap, 6, &shared);
    let here = heap.call::<Tell>(&root, String::from("all: ")).at(Where::Client).run().unwrap();
    assert!(here.starts_with("all: -1267650600228229401496703205370 1.5 6 \u{1F30D} ä 7 !; "), "{here}");
    let bytes = region_of(&heap);
    let call = argument_of(&heap, FarRef::from(&root), String::from("all: "));
    for seed in 0..20 {
        let there = Sim::new(seed, bytes.clone()).run_one::<AtServer<Tell>>(call.clone()).unwrap();
        assert!(matches!(there, FarAnswer::Done(there) if there == here));
    }
}

/// Writes a heap's pages back, and returns the bytes of its region as a server would have them.
pub(super) fn region_of(heap: &Heap) -> Vec<u8> {
    use farfield_pool::{Backend, Buffer, LaneRequest, Op, Priority};
    let core = heap.core();
    let high = core.segments.high_page();
    heap.write_back([crate::FarRange { start: 0, len: u64::from(high) << 12 }]).unwrap();
    let mut lane = core.backend.open_lane().unwrap();
    let mut read = |page: u32| {
        let op = Op::Read { page: farfield_core::PageId(page.into()), buffer: Buffer::new(1) };
        let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: Duration::from_secs(10), op };
        assert!(lane.submit(request).is_ok());
        let mut done = Vec::with_capacity(1);
        while lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_secs(10));
        }
        done.pop().unwrap().buffer.unwrap().page(0).to_vec()
    };
    (0..high).flat_map(&mut read).collect()
}

/// The argument of a call over such a region.
pub(super) fn argument_of<T: FarView, A>(heap: &Heap, root: FarRef<'_, T>, argument: A) -> FarArgument<A> {
    let core = heap.core();
    FarArgument {
        span: FarSpan { first: core.first_page, pages: core.pages, numbers: core.numbers(), changed: vec![] },
        layouts: ViewTypes::of::<T>().layouts().to_vec(),
        root: (root.place, root.number.get()),
        argument,
        near: root.near.map(|root| RootImage::of(core, root, 0..usize::MAX).unwrap().0),
        pages: ServerPages::All,
    }
}

/// A list of so many nodes, whose numbers are 1, 2, and so on.
fn list(heap: &Heap, nodes: u64) -> FarBox<Node> {
    let mut first = heap.alloc(Node { number: nodes, is_last: true, next: None }).unwrap();
    for number in (1..nodes).rev() {
        first = heap.alloc(Node { number, is_last: false, next: Some(first) }).unwrap();
    }
    first
}

/// Drops a list from its front: a chain of destructors would need much stack.
fn drop_list(mut first: FarBox<Node>) {
    loop {
        let next = first.write(|node| node.next.take()).unwrap();
        match next {
            Some(next) => first = next,
            None => break,
        }
    }
}

#[test]
fn a_long_walk_at_the_client_needs_no_more_near_memory_than_there_is() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).plane(plane).build().unwrap();
        let few = list(&heap, 3);
        let nodes = 100_000;
        let first = list(&heap, nodes);
        let sum = heap.call::<Sum>(&first, ());
        assert_eq!(sum.at(Where::Client).run().unwrap(), nodes * (nodes + 1) / 2);
        // No server: `Auto` goes on at the client, and says so.
        assert_eq!(heap.call::<Sum>(&first, ()).run().unwrap(), nodes * (nodes + 1) / 2);
        let nowhere = heap.call::<Sum>(&few, ()).at(Where::Server).run();
        let expected = match plane {
            Plane::Object => OffloadError::Movable,
            // The smallest values have no handle on the hybrid plane.
            Plane::Page | Plane::Hybrid => OffloadError::Call(CallError::Nowhere),
        };
        assert_eq!(nowhere, Err(expected), "{plane:?}");
        drop_list(few);
        drop_list(first);
        heap.verify();
    }
}

#[test]
fn calls_at_the_client_end_by_their_limits() {
    let heap = Heap::builder().near(2 << 20).far(1 << 30).build().unwrap();
    let first = list(&heap, 20_000);
    let call = || heap.call::<Sum>(&first, ()).at(Where::Client);
    assert_eq!(call().steps(100).run(), Err(CallError::Overrun { steps: 100 }.into()));
    let after = Duration::from_nanos(1);
    assert_eq!(call().within(after).run(), Err(CallError::TimedOut { after }.into()));
    // A pointer of another heap is noticed where it is followed.
    let other = Heap::builder().near(2 << 20).build().unwrap();
    for place in [Where::Client, Where::Server, Where::Auto] {
        assert_eq!(other.call::<Sum>(&first, ()).at(place).run(), Err(FarError::OtherHeap.into()), "{place:?}");
    }
    drop_list(first);
}

#[test]
fn a_pool_that_fails_is_an_error_of_the_call() {
    let heap =
        Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).pool("fault:die=4000@ram:").build().unwrap();
    let first = list(&heap, 100_000);
    let result = loop {
        if let Err(error) = heap.call::<Sum>(&first, ()).run() {
            break error;
        }
    };
    let is_lost =
        matches!(result, OffloadError::Call(CallError::Fault(Fault::Lost(_))) | OffloadError::Far(FarError::Pool(_)));
    assert!(is_lost, "{result:?}");
    core::mem::forget((first, heap));
}
