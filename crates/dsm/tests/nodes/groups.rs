//! Groups: what is tied to an object comes with it, is never shared by two owners, and is freed once.

use crate::support::{
    Checked, NodesTest, PATIENCE, Played, all_is_free, at, is_deep, last_of, play, play_plain, seeded,
};
use farfield_dsm::{DBox, FarGroup, Here, NodeBuilder, NodeId, ShareError, TBox, scope};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Instant;

pub(crate) const TESTS: &[NodesTest] = &[
    ("a_group_comes_by_one_message", 2, a_group_comes_by_one_message),
    ("a_group_larger_than_a_message_comes_in_pieces", 2, a_group_larger_than_a_message_comes_in_pieces),
    ("random_groups_are_those_of_plain_boxes", 1, random_groups_are_those_of_plain_boxes),
    ("random_groups_of_two_nodes_are_those_of_plain_boxes", 2, random_groups_are_those_of_plain_boxes),
    ("random_groups_of_three_nodes_are_those_of_plain_boxes", 3, random_groups_are_those_of_plain_boxes),
    ("random_loans_of_groups_are_those_of_plain_references", 3, random_loans_of_groups),
    ("random_loans_of_groups_at_one_node_are_those_of_plain_references", 1, random_loans_of_groups),
    ("a_group_outlives_all_colours_of_its_block", 2, a_group_outlives_all_colours_of_its_block),
    ("a_member_that_is_taken_out_stays_at_its_node", 2, a_member_that_is_taken_out_stays_at_its_node),
    ("members_are_dropped_once_wherever_they_are", 3, members_are_dropped_once),
    ("a_long_group_is_dropped", 2, a_long_group_is_dropped),
    ("a_group_that_does_not_fit_stays_where_it_was", 2, a_group_that_does_not_fit_stays_where_it_was),
    ("a_group_of_a_dead_node_is_lost", 3, a_group_of_a_dead_node_is_lost),
];

/// A list, each link of which is tied to the one before.
#[derive(FarGroup)]
struct Chain {
    number: u64,
    next: Option<TBox<Chain>>,
}

/// Makes a chain of these numbers.
fn chain(here: &Here<'_>, numbers: impl DoubleEndedIterator<Item = u64>) -> Result<DBox<Chain>, ShareError> {
    let mut numbers = numbers.rev();
    let mut link = Chain { number: numbers.next().expect("a number"), next: None };
    for number in numbers {
        link = Chain { number, next: Some(here.tie(link)?) };
    }
    here.alloc(link)
}

fn numbers(first: &Chain) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(first), |link| link.next.as_deref()).map(|link| link.number)
}

fn a_group_comes_by_one_message(here: &Here<'_>) -> Checked {
    let mut list = at(here, NodeId(1), (), |here, ()| chain(here, 0..1000))??;
    let before = here.stats();
    for _ in 0..3 {
        assert!(numbers(list.get(here)?).eq(0..1000));
    }
    let read = here.stats();
    assert_eq!((read.messages - before.messages, read.fetches - before.fetches), (1, 1));
    assert!(read.message_bytes - before.message_bytes < 1000 * 16 + 200, "{read:?}");
    // Who writes has all of it: one message that brings it, and one that frees what was there.
    list.get_mut(here)?.number = 7;
    assert_eq!(list.home(), here.id());
    assert!(numbers(list.get(here)?).skip(1).eq(1..1000));
    let started = Instant::now();
    while here.stats().messages < read.messages + 2 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    let written = here.stats();
    assert_eq!((written.messages - read.messages, written.frees - read.frees), (2, 1));
    assert_eq!(written.moved_objects - read.moved_objects, 1000);
    // Here it costs nothing.
    list.get_mut(here)?.next.as_mut().expect("a second one").number = 8;
    assert_eq!(numbers(list.get(here)?).nth(1), Some(8));
    assert_eq!(here.stats().messages, written.messages);
    drop(list);
    all_is_free(here)
}

/// A member of another type than its owner's, which owns others.
#[derive(FarGroup)]
enum Leaf {
    Empty,
    Plain([u64; 10]),
    Owning { shared: DBox<u64>, tied: TBox<Leaf> },
}

#[derive(FarGroup)]
struct Large {
    parts: [TBox<Leaf>; 2],
    bytes: TBox<[u8; 70_000]>,
    both: (Option<TBox<u8>>, Result<u16, TBox<u32>>),
}

fn large(here: &Here<'_>, number: u64) -> Result<Large, ShareError> {
    let tied = here.tie(Leaf::Plain([number; 10]))?;
    let owning = Leaf::Owning { shared: here.alloc(number + 1)?, tied };
    Ok(Large {
        parts: [here.tie(Leaf::Empty)?, here.tie(owning)?],
        bytes: here.tie([number as u8; 70_000])?,
        both: (Some(here.tie(number as u8)?), Err(here.tie(number as u32)?)),
    })
}

fn is_large(here: &Here<'_>, large: &Large, number: u64) -> Result<bool, ShareError> {
    let (Leaf::Empty, Leaf::Owning { shared, tied }) = (&*large.parts[0], &*large.parts[1]) else { return Ok(false) };
    let Leaf::Plain(plain) = &**tied else { return Ok(false) };
    let (Some(byte), Err(word)) = (&large.both.0, &large.both.1) else { return Ok(false) };
    let all = [u64::from(**byte), u64::from(**word), *shared.get(here)? - 1, u64::from(large.bytes[69_999])];
    Ok(*plain == [number; 10] && all == [number; 4])
}

fn a_group_larger_than_a_message_comes_in_pieces(here: &Here<'_>) -> Checked {
    for home in here.nodes() {
        let mut group = at(here, home, (), |here, ()| here.alloc(large(here, 9)?))??;
        assert_eq!(is_large(here, group.get(here)?, 9), Ok(true));
        // By a loan to each node, which reads it, changes it and reads it again.
        for (number, node) in (9..).zip(here.nodes().chain(here.nodes())) {
            let changed = scope(here, |s| {
                let task = s.spawn_to(node, (s.lend_mut(&mut group), number), |here, (mut group, number)| {
                    let was = is_large(here, group.get(here)?, number)?;
                    *group.get_mut(here)? = large(here, number + 1)?;
                    Ok::<_, ShareError>(was && is_large(here, group.get(here)?, number + 1)?)
                })?;
                task.join()
            })?;
            assert_eq!(changed, Ok(Ok(true)), "at {node}");
        }
        assert_eq!(is_large(here, group.get(here)?, 13), Ok(true));
        drop(group);
    }
    all_is_free(here)
}

/// One random step with a chain, at whatever node; `Plain` does the same.
fn chain_step(here: &Here<'_>, mut first: &mut Chain, seed: u64) -> Result<u64, ShareError> {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..random.usize(..6) {
        if first.next.is_none() {
            break;
        }
        first = first.next.as_deref_mut().expect("it is there");
    }
    let number = random.u64(..);
    match random.u8(..6) {
        0 | 1 => first.next = Some(here.tie(Chain { number, next: first.next.take() })?),
        2 => {
            let taken = first.next.take().map(TBox::into_inner);
            if let Some(taken) = taken {
                first.next = taken.next;
                return Ok(taken.number);
            }
        }
        3 => drop(first.next.take()),
        // The rest becomes the first one's, by way of the stack.
        4 => {
            if let Some(mut next) = first.next.take() {
                std::mem::swap(first, &mut next);
                next.next = first.next.take();
                first.next = Some(next);
            }
        }
        _ => first.number ^= number,
    }
    Ok(first.number)
}

struct Plain {
    number: u64,
    next: Option<Box<Plain>>,
}

fn plain_step(mut first: &mut Plain, seed: u64) -> u64 {
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..random.usize(..6) {
        if first.next.is_none() {
            break;
        }
        first = first.next.as_deref_mut().expect("it is there");
    }
    let number = random.u64(..);
    match random.u8(..6) {
        0 | 1 => first.next = Some(Box::new(Plain { number, next: first.next.take() })),
        2 => {
            if let Some(taken) = first.next.take() {
                first.next = taken.next;
                return taken.number;
            }
        }
        3 => first.next = None,
        4 => {
            if let Some(mut next) = first.next.take() {
                std::mem::swap(first, &mut next);
                next.next = first.next.take();
                first.next = Some(next);
            }
        }
        _ => first.number ^= number,
    }
    first.number
}

fn plain_numbers(first: &Plain) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(first), |link| link.next.as_deref()).map(|link| link.number)
}

fn random_groups_are_those_of_plain_boxes(here: &Here<'_>) -> Checked {
    let (mut random, rounds) = (seeded(21), if is_deep() { 20_000 } else { 150 });
    let nodes = here.nodes().count() as u16;
    let (mut list, mut twin) = (chain(here, 0..1)?, Plain { number: 0, next: None });
    for round in 0..rounds {
        let (node, seed) = (NodeId(random.u16(..nodes)), random.u64(..));
        // Groups leave shared memory and come back, too.
        let is_anew = random.u8(..8) == 0;
        let (done, back) = at(here, node, (list, seed, is_anew), |here, (mut list, seed, is_anew)| {
            if is_anew {
                list = list.into_inner(here).and_then(|first| here.alloc(first)).expect("it is there");
            }
            let done = list.get_mut(here).and_then(|mut first| chain_step(here, &mut first, seed));
            (done, list)
        })?;
        list = back;
        assert_eq!(done, Ok(plain_step(&mut twin, seed)), "round {round}");
        assert!(numbers(list.get(&here.enter())?).eq(plain_numbers(&twin)), "round {round}");
    }
    drop(list);
    all_is_free(here)
}

impl Played for Chain {
    type Plain = Plain;

    fn step(&mut self, here: &Here<'_>, seed: u64) -> Result<(), ShareError> {
        chain_step(here, self, seed).map(drop)
    }

    fn plain_step(first: &mut Plain, seed: u64) {
        plain_step(first, seed);
    }

    fn read(&self) {
        numbers(self).count();
    }
}

fn random_loans_of_groups(here: &Here<'_>) -> Checked {
    let (mut random, rounds) = (seeded(22), if is_deep() { 5000 } else { 60 });
    let nodes = here.nodes().count() as u16;
    let (mut list, mut twin) = (chain(here, 0..1)?, Plain { number: 0, next: None });
    for round in 0..rounds {
        let seed = random.u64(..);
        scope(here, |s| play(here, s.lend_mut(&mut list), seed, 3))??;
        play_plain::<Chain>(&mut twin, nodes, seed, 3);
        assert!(numbers(list.get(&here.enter())?).eq(plain_numbers(&twin)), "round {round}");
    }
    drop(list);
    all_is_free(here)
}

fn a_group_outlives_all_colours_of_its_block(here: &Here<'_>) -> Checked {
    let mut list = chain(here, 0..3)?;
    let (before, second) = (here.stats().moved_objects, std::ptr::from_ref(&**list.get(here)?.next.as_ref().unwrap()));
    for _ in 0..70_000 {
        list.get_mut(here)?.number += 1;
    }
    // The root is elsewhere, and the others are where they were.
    assert_eq!(here.stats().moved_objects - before, 1);
    assert!(std::ptr::eq(&**list.get(here)?.next.as_ref().unwrap(), second));
    // Within a loan the lender keeps all of them.
    scope(here, |s| {
        let mut lent = s.lend_mut(&mut list);
        (0..70_000).try_for_each(|_| lent.get_mut(here).map(|mut first| first.number += 1))
    })??;
    // What was lent is freed, with its members; those of the list are there.
    let started = Instant::now();
    while here.stats().object_bytes != 3 * 32 {
        assert!(started.elapsed() < PATIENCE, "{:?}", here.stats());
        std::thread::yield_now();
    }
    let (read, list) = at(here, NodeId(1), (list,), |here, (list,)| {
        (list.get(here).map(|first| [first.number, numbers(first).sum()]), list)
    })?;
    assert_eq!(read, Ok([140_000, 140_003]));
    drop(list);
    all_is_free(here)
}

fn a_member_that_is_taken_out_stays_at_its_node(here: &Here<'_>) -> Checked {
    let mut list = at(here, NodeId(1), (), |here, ()| chain(here, 0..10))??;
    let mut taken = list.get_mut(here)?.next.take().expect("a second one");
    let rest = taken.next.as_mut().expect("a third one").next.take();
    // The list goes on without them.
    let (read, mut list) = at(here, NodeId(1), (list,), |here, (mut list,)| {
        (list.get_mut(here).map(|first| numbers(&first).count()), list)
    })?;
    assert_eq!((read, list.home()), (Ok(1), NodeId(1)));
    taken.number += 100;
    assert!(numbers(&taken).eq([101, 2]));
    drop(taken);
    // Threads of this node may have them.
    let rest = std::thread::spawn(move || rest.inspect(|rest| assert!(numbers(rest).eq(3..10)))).join().unwrap();
    list.get_mut(here)?.next = rest;
    let (read, list) =
        at(here, NodeId(1), (list,), |here, (list,)| (list.get(here).map(|first| numbers(first).sum::<u64>()), list))?;
    assert_eq!(read, Ok((3..10).sum()));
    drop(list);
    all_is_free(here)
}

/// Member whose destructor is counted, at the node where it runs.
#[derive(FarGroup)]
struct Counted {
    number: u64,
    next: Option<TBox<Counted>>,
}

static DROPPED: AtomicU64 = AtomicU64::new(0);

impl Drop for Counted {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, SeqCst);
        assert!(self.number != 5, "a destructor that fails");
    }
}

fn members_are_dropped_once(here: &Here<'_>) -> Checked {
    DROPPED.store(0, SeqCst);
    for home in here.nodes() {
        let make = |here: &Here<'_>, ()| {
            let mut next = None;
            for number in (1..10).rev() {
                next = Some(here.tie(Counted { number, next })?);
            }
            here.alloc(Counted { number: 0, next })
        };
        let mut group = at(here, home, (), make)??;
        // It is moved twice, and members of it are dropped on the way; nothing else of it is.
        for (index, node) in (8..).zip(here.nodes().take(2)) {
            let (cut, back) = at(here, node, (group, 9 - (index - 8)), |here, (mut group, length)| {
                let cut = group.get_mut(here).map(|mut first| {
                    let mut last = &mut *first;
                    for _ in 0..length - 1 {
                        last = last.next.as_mut().expect("it is so long");
                    }
                    drop(last.next.take());
                });
                (cut, group)
            })?;
            cut?;
            group = back;
        }
        drop(group);
    }
    all_is_free(here)?;
    let dropped = here.nodes().map(|node| at(here, node, (), |_, ()| DROPPED.load(SeqCst)));
    assert_eq!(dropped.sum::<Result<u64, _>>()?, 30);
    Ok(())
}

fn a_long_group_is_dropped(here: &Here<'_>) -> Checked {
    // As a list of plain boxes it would overflow the stack of a thread.
    let list = chain(here, 0..20_000)?;
    assert_eq!(numbers(list.get(here)?).count(), 20_000);
    let (first, taken) = {
        let mut first = list.into_inner(here)?;
        let taken = first.next.take();
        (here.alloc(first)?, taken)
    };
    drop(taken);
    drop(first);
    all_is_free(here)
}

fn a_group_that_does_not_fit_stays_where_it_was(here: &Here<'_>) -> Checked {
    let mut kept = Vec::new();
    while let Ok(boxed) = here.alloc([1u64; 1000]) {
        kept.push(boxed);
    }
    let mut list = at(here, NodeId(1), (), |here, ()| chain(here, 0..5000))??;
    let used = here.stats().object_bytes;
    assert!(matches!(list.get_mut(here).map(drop), Err(ShareError::Full { .. })));
    assert_eq!((list.home(), here.stats().object_bytes), (NodeId(1), used), "what was taken for it is free again");
    assert!(numbers(list.get(here)?).eq(0..5000));
    // A value that finds no room is dropped with what is tied to it.
    let mut tied = Vec::new();
    while let Ok(more) = here.tie(0u64) {
        tied.push(more);
    }
    let last = tied.pop().expect("there was room for one");
    assert!(matches!(here.alloc((last, [0u64; 1000])), Err(ShareError::Full { .. })));
    drop(tied);
    drop((kept, list));
    all_is_free(here)
}

fn a_group_of_a_dead_node_is_lost(here: &Here<'_>) -> Checked {
    let lost = ShareError::NodeLost { node: NodeId(1) };
    let mut lent = chain(here, 0..10)?;
    let there = at(here, NodeId(1), (), |here, ()| chain(here, 0..10))??;
    let mut read_before = at(here, NodeId(1), (), |here, ()| chain(here, 0..20))??;
    assert!(numbers(read_before.get(here)?).eq(0..20));
    let ended = scope(here, |s| {
        let task = s.spawn_to(NodeId(1), (s.lend_mut(&mut lent),), |here, (mut lent,)| -> Result<(), ShareError> {
            lent.get_mut(here)?.next = None;
            std::process::abort()
        })?;
        task.join()
    });
    assert_eq!(last_of(ended), Err(lost.into()));
    assert_eq!(lent.get(here).map(|_| ()), Err(ShareError::Lost));
    assert_eq!(lent.get_mut(here).map(drop), Err(ShareError::Lost));
    assert_eq!((there.get(here).map(|_| ()), read_before.get_mut(here).map(drop)), (Err(lost), Err(lost)));
    // The copy of a version that was read is there with its members.
    assert!(numbers(read_before.get(here)?).eq(0..20));
    let mut list = chain(here, 0..4)?;
    list.get_mut(here)?.number = 9;
    assert_eq!(numbers(list.get(here)?).sum::<u64>(), 15);
    let before = here.stats();
    drop((lent, there, read_before));
    let started = Instant::now();
    while here.stats().orphans < before.orphans + 3 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    assert_eq!(here.stats().late_frees, 0);
    Ok(())
}

/// Tied objects are used without a check: their memory stays as long as they have owners.
pub(crate) fn tied_objects_outlive_their_program() {
    let config = NodeBuilder::new().near(crate::support::NEAR_BYTES);
    let mut old = farfield_dsm::run(&config, |here| here.tie([3u64; 1000])).unwrap().unwrap();
    farfield_dsm::run(&config, |here| {
        let new = here.alloc([4u64; 1000]).unwrap();
        old[999] += 1;
        assert_eq!((old[0], old[999], new.get(here)), (3, 4, Ok(&[4; 1000])));
        drop(old);
        assert_eq!(here.stats().late_frees, 0);
        let first = new.into_inner(here).unwrap();
        assert_eq!((first, here.stats().object_bytes), ([4; 1000], 0));
    })
    .unwrap();
}
