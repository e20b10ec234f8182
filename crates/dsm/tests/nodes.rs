//! Programs of one to five processes: what one node does to an object is what others see; nothing
//! leaks; who dies is named.
//!
//! The processes run this program, so it has a `main`: a started process serves tasks at the first
//! `run`.

use farfield_dsm::{DBox, Far, Here, JoinError, NodeBuilder, NodeId, NodeStats, ShareError};
use std::time::{Duration, Instant};

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

type Checked = Result<(), JoinError>;
type Test = fn(&Here<'_>) -> Checked;

fn main() {
    assert_eq!(size_of::<Option<DBox<[u8; 500]>>>(), 8);
    let tests: [(&str, u16, Test); 13] = [
        ("one_node_is_a_heap", 1, one_node_is_a_heap),
        ("a_reader_elsewhere_sees_what_was_written", 2, a_reader_elsewhere_sees_what_was_written),
        ("each_version_is_asked_for_once", 2, each_version_is_asked_for_once),
        ("a_writer_has_the_object_at_its_node", 3, a_writer_has_the_object_at_its_node),
        ("an_object_outlives_all_colours_of_its_block", 2, an_object_outlives_all_colours_of_its_block),
        (
            "objects_that_are_dropped_elsewhere_drop_what_they_own",
            3,
            objects_that_are_dropped_elsewhere_drop_what_they_own,
        ),
        ("random_steps_are_those_of_plain_boxes", 3, random_steps_are_those_of_plain_boxes),
        ("random_steps_of_five_nodes_are_those_of_plain_boxes", 5, random_steps_are_those_of_plain_boxes),
        ("a_panic_is_an_error_of_its_task", 2, a_panic_is_an_error_of_its_task),
        ("what_does_not_fit_is_refused_and_nothing_is_lost", 2, what_does_not_fit_is_refused_and_nothing_is_lost),
        ("tasks_that_wait_lend_their_places", 2, tasks_that_wait_lend_their_places),
        ("copies_make_room", 2, copies_make_room),
        ("who_dies_is_named_and_the_others_go_on", 3, who_dies_is_named_and_the_others_go_on),
    ];
    let started = Instant::now();
    for (name, nodes, test) in tests {
        let config = NodeBuilder::new().nodes(nodes).near(NEAR_BYTES).workers(2);
        farfield_dsm::run(&config, test).expect("the nodes start").unwrap_or_else(|error| panic!("{name}: {error}"));
        println!("test {name} ... ok");
    }
    println!(
        "\ntest result: ok. {} passed; 0 failed; finished in {:.2}s",
        tests.len(),
        started.elapsed().as_secs_f64()
    );
}

const NEAR_BYTES: u64 = 4 << 20;

/// Runs a body at a node and returns what it returns.
fn at<A, R, F>(here: &Here<'_>, node: NodeId, arguments: A, body: F) -> Result<R, JoinError>
where
    A: Far,
    R: Far,
    F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy + 'static,
{
    here.spawn_to(node, arguments, body)?.join(here)
}

/// Counts of a node that can travel.
fn counts(here: &Here<'_>, node: NodeId) -> Result<[u64; 4], JoinError> {
    at(here, node, (), |here, ()| {
        let NodeStats { object_bytes, late_frees, orphans, fetches, .. } = here.stats();
        [object_bytes, late_frees, orphans, fetches]
    })
}

/// No node has objects any more, and nobody has freed one twice.
fn all_is_free(here: &Here<'_>) -> Checked {
    for node in here.nodes() {
        let started = Instant::now();
        loop {
            let [object_bytes, late_frees, orphans, _] = counts(here, node)?;
            assert_eq!((late_frees, orphans), (0, 0), "node {node}");
            if object_bytes == 0 {
                break;
            }
            assert!(started.elapsed() < PATIENCE, "node {node} keeps {object_bytes} bytes");
            std::thread::yield_now();
        }
    }
    Ok(())
}

fn one_node_is_a_heap(here: &Here<'_>) -> Checked {
    let mut boxed = here.alloc((5u64, [7u8; 300]))?;
    boxed.get_mut(here)?.0 += 1;
    assert_eq!(*boxed.get(here)?, (6, [7; 300]));
    let nested = here.alloc((boxed, 1u8))?;
    assert_eq!(nested.get(here)?.0.get(here)?.0, 6);
    let doubled =
        at(here, here.id(), (nested,), |here, (nested,)| nested.get(here)?.0.get(here).map(|value| value.0 * 2));
    assert_eq!(doubled?, Ok(12));
    all_is_free(here)
}

fn a_reader_elsewhere_sees_what_was_written(here: &Here<'_>) -> Checked {
    let mut boxed = here.alloc(0u64)?;
    for round in 1..500u64 {
        // Written here or there, read at the other side.
        let (writer, reader) = if round % 3 == 0 { (NodeId(1), NodeId(0)) } else { (NodeId(0), NodeId(1)) };
        let (written, back) = at(here, writer, (boxed, round), |here, (mut boxed, round)| {
            let written = boxed.get_mut(here).map(|mut value| *value += round);
            (written, boxed)
        })?;
        written?;
        let (read, back) = at(here, reader, (back,), |here, (boxed,)| (boxed.get(here).copied(), boxed))?;
        assert_eq!(read, Ok(round * (round + 1) / 2), "round {round}");
        boxed = back;
    }
    drop(boxed);
    all_is_free(here)
}

fn each_version_is_asked_for_once(here: &Here<'_>) -> Checked {
    let mut boxed = at(here, NodeId(1), (), |here, ()| here.alloc([9u8; 1000]))??;
    assert_eq!(boxed.home(), NodeId(1));
    let before = here.stats();
    for _ in 0..10 {
        assert_eq!(boxed.get(here)?, &[9; 1000]);
    }
    let read = here.stats();
    assert_eq!(read.fetches - before.fetches, 1);
    assert!(read.message_bytes - before.message_bytes < 1000 + 100, "{read:?}");
    // A new version at its node: the copy of the old one is not taken for it.
    let (written, back) =
        at(here, NodeId(1), (boxed,), |here, (mut boxed,)| (boxed.get_mut(here).map(|mut bytes| bytes[5] = 1), boxed))?;
    written?;
    boxed = back;
    let before = here.stats();
    assert_eq!(boxed.get(here)?[4..7], [9, 1, 9]);
    assert_eq!(here.stats().fetches - before.fetches, 1);
    // Here it is read and written without a message.
    boxed.get_mut(here)?[6] = 2;
    let before = here.stats();
    assert_eq!(boxed.home(), NodeId(0));
    for round in 0..100 {
        boxed.get_mut(here)?[7] = round;
        assert_eq!(boxed.get(here)?[5..8], [1, 2, round]);
    }
    let after = here.stats();
    assert_eq!((after.fetches, after.spawns), (before.fetches, before.spawns));
    drop(boxed);
    all_is_free(here)
}

fn a_writer_has_the_object_at_its_node(here: &Here<'_>) -> Checked {
    let mut boxed = here.alloc([0u16; 3])?;
    for round in 0..60u16 {
        let node = NodeId(round % 3);
        let (written, back) = at(here, node, (boxed, round), |here, (mut boxed, round)| {
            (boxed.get_mut(here).map(|mut all| all[usize::from(round % 3)] += 1), boxed)
        })?;
        written?;
        boxed = back;
        assert_eq!(boxed.home(), node);
    }
    assert_eq!(boxed.into_inner(here)?, [20; 3]);
    all_is_free(here)
}

fn an_object_outlives_all_colours_of_its_block(here: &Here<'_>) -> Checked {
    let mut boxed = here.alloc(0u64)?;
    for _ in 0..200_000u64 {
        *boxed.get_mut(here)? += 1;
    }
    assert!(here.stats().moved_objects >= 2, "{:?}", here.stats());
    let (read, boxed) = at(here, NodeId(1), (boxed,), |here, (boxed,)| (boxed.get(here).copied(), boxed))?;
    assert_eq!(read, Ok(200_000));
    drop(boxed);
    all_is_free(here)
}

/// A list: each link owns the next one.
#[derive(Far)]
struct Link {
    number: u64,
    next: Option<DBox<Link>>,
}

fn objects_that_are_dropped_elsewhere_drop_what_they_own(here: &Here<'_>) -> Checked {
    let mut list: Option<DBox<Link>> = None;
    for number in 0..300u64 {
        // Each link at another node than the next one.
        let made = at(here, NodeId(number as u16 % 3), (list, number), |here, (next, number)| {
            here.alloc(Link { number, next })
        });
        list = Some(made??);
    }
    let list = list.expect("three hundred links");
    let mut link = Some(&list);
    let mut expected = (0..300).rev();
    while let Some(now) = link {
        let now = now.get(here)?;
        assert_eq!(Some(now.number), expected.next());
        link = now.next.as_ref();
    }
    assert_eq!(expected.next(), None);
    at(here, NodeId(2), (list,), |_, (list,)| drop(list))?;
    all_is_free(here)
}

/// Objects that own others, by their owners and by plain boxes.
type Tree = (u64, [Option<DBox<u64>>; 4]);
type Twin = (u64, [Option<u64>; 4]);

fn random_steps_are_those_of_plain_boxes(here: &Here<'_>) -> Checked {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let steps = if std::env::var_os("FARFIELD_DEEP").is_some() { 100_000 } else { 3000 };
    let mut random = fastrand::Rng::with_seed(seed);
    let mut trees: Vec<(DBox<Tree>, Twin)> = Vec::new();
    let count = here.nodes().count() as u16;
    for step in 0..steps {
        let node = NodeId(random.u16(..count));
        if trees.len() < 5 || (trees.len() < 60 && random.u8(..10) == 0) {
            let made = at(here, node, (step,), |here, (step,)| here.alloc((step, [const { None }; 4])))?;
            trees.push((made?, (step, [None; 4])));
            continue;
        }
        let (tree, mut twin) = trees.swap_remove(random.usize(..trees.len()));
        let slot = random.usize(..4);
        let tree = match random.u8(..6) {
            0 => {
                drop(tree);
                continue;
            }
            1 => {
                twin.0 += step;
                let (done, tree) = at(here, node, (tree, step), |here, (mut tree, step)| {
                    (tree.get_mut(here).map(|mut tree| tree.0 += step), tree)
                })?;
                done?;
                tree
            }
            2 => {
                // An owner is put into an object, and the one before is dropped.
                twin.1[slot] = Some(step);
                let (done, tree) = at(here, node, (tree, slot, step), |here, (mut tree, slot, step)| {
                    let done =
                        here.alloc(step).and_then(|new| tree.get_mut(here).map(|mut tree| tree.1[slot] = Some(new)));
                    (done, tree)
                })?;
                done?;
                tree
            }
            3 => {
                // What an object owns is written through it, wherever it is.
                twin.1[slot] = twin.1[slot].map(|value| value ^ step);
                let (done, tree) = at(here, node, (tree, slot, step), |here, (mut tree, slot, step)| {
                    let done = tree.get_mut(here).and_then(|mut tree| match &mut tree.1[slot] {
                        Some(inner) => inner.get_mut(here).map(|mut value| *value ^= step),
                        None => Ok(()),
                    });
                    (done, tree)
                })?;
                done?;
                tree
            }
            4 => {
                // And taken out of it.
                let (taken, tree) = at(here, node, (tree, slot), |here, (mut tree, slot)| {
                    let taken = tree.get_mut(here).map(|mut tree| tree.1[slot].take());
                    (taken.and_then(|inner| inner.map(|inner| inner.into_inner(here)).transpose()), tree)
                })?;
                assert_eq!(taken, Ok(twin.1[slot].take()), "step {step}");
                tree
            }
            _ => tree,
        };
        let read = |tree: &Tree, here: &Here<'_>| {
            let mut all = [None; 4];
            for (value, inner) in all.iter_mut().zip(&tree.1) {
                *value = inner.as_ref().map(|inner| inner.get(here).copied()).transpose()?;
            }
            Ok::<_, ShareError>((tree.0, all))
        };
        assert_eq!(read(tree.get(here)?, here), Ok(twin), "step {step}");
        trees.push((tree, twin));
    }
    drop(trees);
    all_is_free(here)
}

fn a_panic_is_an_error_of_its_task(here: &Here<'_>) -> Checked {
    for node in here.nodes() {
        let boxed = here.alloc(3u32)?;
        let ended = at(here, node, (boxed,), |_, (boxed,)| -> u32 {
            let _dropped_when_it_unwinds = boxed;
            panic!("no luck")
        });
        assert_eq!(ended, Err(JoinError::Panicked { message: "no luck".into() }));
    }
    all_is_free(here)
}

fn what_does_not_fit_is_refused_and_nothing_is_lost(here: &Here<'_>) -> Checked {
    let inner = here.alloc(1u64)?;
    let refused = here.alloc((inner, [0u8; 65_500]));
    assert!(matches!(refused, Err(ShareError::TooLarge { .. })), "{refused:?}");
    let inner = here.alloc(1u64)?;
    let refused = here.spawn_to(NodeId(1), (inner, [0u8; 66_000]), |_, (inner, _)| inner.home());
    assert!(matches!(refused, Err(ShareError::TooLarge { .. })));
    let too_long = at(here, NodeId(1), (), |_, ()| [0u8; 66_000]);
    assert!(matches!(too_long, Err(JoinError::Share(ShareError::TooLarge { .. }))));
    assert!(matches!(
        here.spawn_to(NodeId(9), (), |_, ()| ()).map(drop),
        Err(ShareError::UnknownNode { node: NodeId(9) })
    ));

    let mut kept = Vec::new();
    let error = loop {
        match here.alloc([kept.len() as u64; 1000]) {
            Ok(boxed) => kept.push(boxed),
            Err(error) => break error,
        }
    };
    assert_eq!(error, ShareError::Full { bytes: 8000, limit_bytes: NEAR_BYTES });
    // A writer that has no room for an object leaves it where it was.
    let mut elsewhere = at(here, NodeId(1), (), |here, ()| here.alloc([5u64; 1000]))??;
    assert!(matches!(elsewhere.get_mut(here), Err(ShareError::Full { .. })));
    assert_eq!((elsewhere.home(), elsewhere.get(here)?), (NodeId(1), &[5; 1000]));
    for (number, boxed) in kept.iter().enumerate() {
        assert_eq!(boxed.get(here)?, &[number as u64; 1000]);
    }
    drop((kept, elsewhere));
    all_is_free(here)
}

/// Each level waits for two tasks of the next one, at both nodes, which have two workers each.
fn leaves(here: &Here<'_>, levels: u32) -> Result<u64, ShareError> {
    if levels == 0 {
        return Ok(1);
    }
    let tasks: Vec<_> = here
        .nodes()
        .map(|node| here.spawn_to(node, (levels - 1,), |here, (levels,)| leaves(here, levels)))
        .collect::<Result<_, _>>()?;
    let lost = |_| ShareError::UnknownNode { node: here.id() };
    tasks.into_iter().map(|task| task.join(here).map_err(lost)?).sum()
}

fn tasks_that_wait_lend_their_places(here: &Here<'_>) -> Checked {
    assert_eq!(leaves(here, 6)?, 64);
    all_is_free(here)
}

fn copies_make_room(here: &Here<'_>) -> Checked {
    // Three times as much as this node may have, and objects of its own beside.
    let mut far = Vec::new();
    for number in 0..350u64 {
        far.push(at(here, NodeId(1), (number,), |here, (number,)| here.alloc([number; 1000]))??);
    }
    for round in 0..4 {
        let mut own = Vec::new();
        for (number, boxed) in far.iter().enumerate() {
            // A scope of its own: what it does not need any more may leave.
            let sum = at(here, here.id(), (), |_, ()| 0u64)?;
            assert_eq!(boxed.get(here)?[999] + sum, number as u64);
            if number % 2 == 0 {
                own.push(here.alloc([round as u64; 1000])?);
            }
        }
        let stats = here.stats();
        assert!(stats.object_bytes + stats.copy_bytes <= NEAR_BYTES, "{stats:?}");
        assert!(own.iter().all(|own| own.get(here).is_ok_and(|own| *own == [round as u64; 1000])));
    }
    drop(far);
    all_is_free(here)
}

fn who_dies_is_named_and_the_others_go_on(here: &Here<'_>) -> Checked {
    let lost = ShareError::NodeLost { node: NodeId(1) };
    let mut there = at(here, NodeId(1), (), |here, ()| here.alloc(4u64))??;
    let read_before = at(here, NodeId(1), (), |here, ()| here.alloc(5u64))??;
    assert_eq!(*read_before.get(here)?, 5);
    let waits = here.spawn_to(NodeId(1), (), |_, ()| std::thread::sleep(PATIENCE))?;
    let dies = here.spawn_to(NodeId(1), (), |_, ()| -> () { std::process::abort() })?;
    assert_eq!(dies.join(here), Err(lost.into()));
    assert_eq!(waits.join(here), Err(lost.into()));
    assert_eq!(there.get(here), Err(lost));
    assert_eq!(there.get_mut(here).map(drop), Err(lost));
    assert_eq!(here.spawn_to(NodeId(1), (), |_, ()| ()).map(drop), Err(lost));
    // A version that was read is still that version.
    assert_eq!(*read_before.get(here)?, 5);
    // Others are told. What they send meanwhile is an error, too.
    let started = Instant::now();
    loop {
        let told = at(here, NodeId(2), (), |here, ()| here.spawn_to(NodeId(1), (), |_, ()| ()).map(drop))?;
        match told {
            Err(error) if error == lost => break,
            _ => assert!(started.elapsed() < PATIENCE),
        }
    }
    let mut boxed = here.alloc(1u8)?;
    *boxed.get_mut(here)? = 2;
    let (read, boxed) = at(here, NodeId(2), (boxed,), |here, (boxed,)| (boxed.get(here).copied(), boxed))?;
    assert_eq!(read, Ok(2));
    drop((boxed, there, read_before));
    // What the dead node kept cannot be freed, and is counted.
    while here.stats().orphans < 2 {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    Ok(())
}
