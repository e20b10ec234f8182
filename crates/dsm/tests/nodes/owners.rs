//! Owners and loans: what one node does to an object is what others see; nothing leaks; who dies is
//! named.

use crate::support::{
    Checked, NEAR_BYTES, NodesTest, PATIENCE, Played, all_is_free, at, is_deep, last_of, play, play_plain, seeded,
    signal_process, stop_process, until,
};
use crate::survival::kill_process;
use farfield_dsm::{
    DArc, DAtomic, DBox, DMutex, DRwLock, Far, Here, JoinError, LentMut, Mut, NodeBuilder, NodeId, NodeStartError,
    Owner, ShareError, channel, scope,
};
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

pub(crate) const TESTS: &[NodesTest] = &[
    ("one_node_is_a_heap", 1, one_node_is_a_heap),
    ("a_reader_elsewhere_sees_what_was_written", 2, a_reader_elsewhere_sees_what_was_written),
    ("each_version_is_asked_for_once", 2, each_version_is_asked_for_once),
    ("a_writer_has_the_object_at_its_node", 3, a_writer_has_the_object_at_its_node),
    ("an_object_outlives_all_colours_of_its_block", 2, an_object_outlives_all_colours_of_its_block),
    ("objects_that_are_dropped_elsewhere_drop_what_they_own", 3, objects_that_are_dropped_elsewhere_drop_what_they_own),
    ("random_steps_are_those_of_plain_boxes", 3, random_steps_are_those_of_plain_boxes),
    ("random_steps_of_five_nodes_are_those_of_plain_boxes", 5, random_steps_are_those_of_plain_boxes),
    ("a_panic_is_an_error_of_its_task", 2, a_panic_is_an_error_of_its_task),
    ("a_task_fails_with_the_one_it_waits_for", 2, a_task_fails_with_the_one_it_waits_for),
    ("a_list_is_followed_and_changed", 2, a_list_is_followed_and_changed),
    ("what_does_not_fit_is_refused_and_nothing_is_lost", 2, what_does_not_fit_is_refused_and_nothing_is_lost),
    ("large_objects_are_read_and_moved", 2, large_objects_are_read_and_moved),
    ("tasks_that_wait_lend_their_places", 2, tasks_that_wait_lend_their_places),
    ("copies_make_room", 2, copies_make_room),
    ("a_scope_that_reads_too_much_is_told", 2, a_scope_that_reads_too_much_is_told),
    ("who_dies_is_named_and_the_others_go_on", 3, who_dies_is_named_and_the_others_go_on),
    ("owners_of_a_thread_are_dropped_when_it_ends", 2, owners_of_a_thread_are_dropped_when_it_ends),
    ("a_silent_node_that_was_lent_something_is_waited_for", 2, a_silent_node_that_was_lent_something_is_waited_for),
    ("many_read_what_is_lent", 3, many_read_what_is_lent),
    ("what_is_lent_comes_back_changed", 3, what_is_lent_comes_back_changed),
    ("a_loan_that_is_forgotten_comes_back", 2, a_loan_that_is_forgotten_comes_back),
    ("loans_are_lent_further", 3, loans_are_lent_further),
    ("random_loans_are_those_of_plain_references", 3, random_loans_are_those_of_plain_references),
    ("random_loans_at_one_node_are_those_of_plain_references", 1, random_loans_are_those_of_plain_references),
    ("many_loans_come_home_with_a_long_result", 2, many_loans_come_home_with_a_long_result),
    ("a_block_that_was_lent_does_not_use_its_colours_again", 2, a_block_that_was_lent_does_not_use_its_colours_again),
    ("a_loan_that_came_home_meanwhile_is_as_it_was", 2, a_loan_that_came_home_meanwhile_is_as_it_was),
    ("a_loan_of_a_dead_node_is_as_it_was_or_lost", 4, a_loan_of_a_dead_node_is_as_it_was_or_lost),
    ("a_scope_waits_for_tasks_that_a_dead_node_has_started", 4, a_scope_waits_for_tasks_that_a_dead_node_has_started),
    ("a_scope_waits_for_no_task_that_waits_for_it", 3, a_scope_waits_for_no_task_that_waits_for_it),
    ("a_lock_waits_for_those_to_whom_a_dead_reader_has_lent", 4, a_lock_waits_for_those_to_whom_a_dead_reader_has_lent),
    ("nobody_waits_for_a_lock_that_waits_for_it", 4, nobody_waits_for_a_lock_that_waits_for_it),
];

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
    let (mut random, steps) = (seeded(1), if is_deep() { 100_000 } else { 1200 });
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

fn a_task_fails_with_the_one_it_waits_for(here: &Here<'_>) -> Checked {
    let failed = at(here, NodeId(1), (), |here, ()| -> Result<u32, ShareError> {
        let (panics, fails) = (here.spawn_to(NodeId(0), (), |_, ()| -> u32 { panic!("no luck") })?, NodeId(9));
        assert_eq!(panics.join(here).map_err(ShareError::from), Err(ShareError::TaskPanicked));
        Ok(at(here, fails, (), |_, ()| 1)?)
    })?;
    assert_eq!(failed, Err(ShareError::UnknownNode { node: NodeId(9) }));
    Ok(())
}

#[derive(Far)]
struct ListLink {
    number: u64,
    next: Option<DBox<ListLink>>,
}

fn a_list_is_followed_and_changed(here: &Here<'_>) -> Checked {
    let mut list = None;
    for number in 0..20 {
        // Each other link is at the other node.
        let made = at(here, NodeId(number as u16 % 2), (number, list), |here, (number, next)| {
            here.alloc(ListLink { number, next })
        });
        list = Some(made??);
    }
    // All links are at this node afterwards, and there is one more at the end.
    let mut end = &mut list;
    while let Some(link) = end {
        let link = Mut::into_mut(link.get_mut(here)?);
        link.number *= 2;
        end = &mut link.next;
    }
    *end = Some(here.alloc(ListLink { number: 1, next: None })?);
    let (mut numbers, mut next) = (Vec::new(), &list);
    while let Some(link) = next {
        assert_eq!(link.home(), here.id());
        let link = link.get(here)?;
        numbers.push(link.number);
        next = &link.next;
    }
    assert!(numbers.into_iter().eq((0..20).rev().map(|number| number * 2).chain([1])));
    drop(list);
    all_is_free(here)
}

fn large_objects_are_read_and_moved(here: &Here<'_>) -> Checked {
    const WORDS: usize = 40_000;
    let mut large = here.alloc(std::array::from_fn::<u64, WORDS, _>(|at| at as u64))?;
    for round in 1..4u64 {
        let (read, back) = at(here, NodeId(1), (large, round), |here, (mut large, round)| {
            let check = large.get(here).map(|all| (0..).zip(all).all(|(at, word)| *word == at * round));
            let written =
                large.get_mut(here).map(|mut all| (0..).zip(all.iter_mut()).for_each(|(at, word)| *word += at));
            (written.and(check), large)
        })?;
        assert_eq!((read, back.home()), (Ok(true), NodeId(1)));
        large = back;
        // And home again.
        assert_eq!(large.get(here)?[WORDS - 1], (WORDS as u64 - 1) * (round + 1));
        large.get_mut(here)?;
        assert_eq!((large.home(), large.get(here)?[WORDS / 2]), (here.id(), WORDS as u64 / 2 * (round + 1)));
    }
    drop(large);
    all_is_free(here)
}

fn what_does_not_fit_is_refused_and_nothing_is_lost(here: &Here<'_>) -> Checked {
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
    let inner = at(here, NodeId(1), (), |here, ()| here.alloc(1u64))??;
    let refused = here.alloc((inner, [0u64; 1000]));
    assert!(matches!(refused, Err(ShareError::Full { .. })), "{refused:?}");
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

/// Objects of 8000 bytes: three quarters of near memory at this node, and two thirds at the other one.
fn fill_both(here: &Here<'_>) -> Result<[Vec<DBox<[u64; 1000]>>; 2], JoinError> {
    let own = (0..380u64).map(|number| here.alloc([number; 1000])).collect::<Result<_, _>>()?;
    let far =
        (0..350u64).map(|number| Ok(at(here, NodeId(1), (number,), |here, (number,)| here.alloc([number; 1000]))??));
    Ok([own, far.collect::<Result<_, JoinError>>()?])
}

fn copies_make_room(here: &Here<'_>) -> Checked {
    let [own, far] = fill_both(here)?;
    // Twice as much as there is room for beside the own objects, in scopes that are short.
    for _ in 0..4 {
        for (number, boxed) in far.iter().enumerate() {
            let read = scope(here, |s| {
                let task =
                    s.spawn_to(here.id(), (s.lend(boxed),), |here, (boxed,)| boxed.get(here).map(|all| all[999]))?;
                task.join()
            })?;
            assert_eq!(read, Ok(Ok(number as u64)));
        }
        let stats = here.stats();
        assert!(stats.object_bytes + stats.copy_bytes <= NEAR_BYTES && stats.copy_bytes > 0, "{stats:?}");
    }
    // Objects go before copies.
    let more = here.alloc([7u64; 4000])?;
    let stats = here.stats();
    assert!(stats.object_bytes + stats.copy_bytes <= NEAR_BYTES, "{stats:?}");
    for (number, own) in own.iter().enumerate() {
        assert_eq!(own.get(here)?[0], number as u64);
    }
    drop((own, far, more));
    all_is_free(here)
}

/// A scope that goes on for ever, and reads new versions all the time, is told so.
fn a_scope_that_reads_too_much_is_told(here: &Here<'_>) -> Checked {
    let [own, mut far] = fill_both(here)?;
    let inner = here.enter();
    let mut told = 0;
    for _ in 0..3 {
        for boxed in &mut far {
            scope(here, |s| {
                let task = s.spawn_to(NodeId(1), (s.lend_mut(boxed),), |here, (mut boxed,)| {
                    let started = Instant::now();
                    loop {
                        match boxed.get_mut(here) {
                            Ok(mut all) => {
                                all[0] += 1;
                                return Ok(());
                            }
                            // What was lent before is freed a moment later.
                            Err(ShareError::Full { .. }) if started.elapsed() < PATIENCE => {
                                std::thread::yield_now();
                            }
                            Err(error) => return Err(error),
                        }
                    }
                })?;
                task.join()?.map_err(JoinError::from)
            })??;
            match boxed.get(&inner) {
                Ok(_) => {}
                Err(ShareError::ScopeTooLong { held_bytes }) => {
                    assert!((NEAR_BYTES..NEAR_BYTES + (1 << 20)).contains(&held_bytes), "{held_bytes}");
                    told += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    assert!(told > 0, "it has read twice as much as may be near");
    drop(inner);
    // In scopes that are short it goes on.
    let mut short = here.enter();
    for boxed in &far {
        assert!(boxed.get(&short).is_ok());
        short.renew();
    }
    drop((own, far));
    all_is_free(here)
}

fn who_dies_is_named_and_the_others_go_on(here: &Here<'_>) -> Checked {
    let lost = ShareError::NodeLost { node: NodeId(1) };
    let mut there = at(here, NodeId(1), (), |here, ()| here.alloc(4u64))??;
    let read_before = at(here, NodeId(1), (), |here, ()| here.alloc(5u64))??;
    assert_eq!(*read_before.get(here)?, 5);
    let waits = here.spawn_to(NodeId(1), (), |_, ()| std::thread::sleep(PATIENCE))?;
    // It may die before it says that it has the task.
    assert_eq!(at(here, NodeId(1), (), |_, ()| -> () { std::process::abort() }), Err(lost.into()));
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

fn many_read_what_is_lent(here: &Here<'_>) -> Checked {
    let numbers = here.alloc([3u64; 1000])?;
    let sums = scope(here, |s| {
        let lent = s.lend(&numbers);
        let tasks = (0..12u16).map(|task| NodeId(task % 3)).map(|node| {
            s.spawn_to(node, (lent, node.0), |here, (lent, factor)| {
                lent.get(here).map(|all| all.iter().sum::<u64>() * u64::from(factor))
            })
        });
        let tasks: Vec<_> = tasks.collect::<Result<_, _>>()?;
        tasks.into_iter().map(|task| task.join()).collect::<Result<Vec<_>, JoinError>>()
    })??;
    let expected: Vec<_> = (0..12).map(|task| Ok(3000 * (task % 3))).collect();
    assert_eq!(sums, expected);
    drop(numbers);
    all_is_free(here)
}

fn what_is_lent_comes_back_changed(here: &Here<'_>) -> Checked {
    let mut parts: Vec<DBox<[u64; 100]>> = (0..6).map(|_| here.alloc([1; 100])).collect::<Result<_, _>>()?;
    for round in 1..20 {
        let rotated = move |at: usize| NodeId(((at as u64 + round) % 3) as u16);
        scope(here, |s| {
            for (at, part) in parts.iter_mut().enumerate() {
                // Nobody joins them: the scope waits.
                s.spawn_to(rotated(at), (s.lend_mut(part), at as u64), |here, (mut part, at)| {
                    let all = part.get_mut(here).map(|mut all| all.iter_mut().for_each(|number| *number += at));
                    all.and_then(|()| part.get(here).map(|all| all[99]))
                })?;
            }
            Ok::<_, ShareError>(())
        })??;
        for (at, part) in parts.iter().enumerate() {
            assert_eq!((part.home(), part.get(here)?), (rotated(at), &[1 + round * at as u64; 100]), "round {round}");
        }
    }
    // A loan that is used here, and one that is not used at all.
    let [first, second, ..] = &mut parts[..] else { unreachable!() };
    scope(here, |s| {
        let mut used = s.lend_mut(first);
        let _unused = s.lend_mut(second);
        used.get_mut(here).map(|mut all| all[0] = 77)
    })??;
    assert_eq!((first.get(here)?[0], second.get(here)?[0]), (77, 20));
    // What a task that panics has written is written.
    let panicked = scope(here, |s| {
        let body = |here: &Here<'_>, (mut lent,): (LentMut<'_, [u64; 100]>,)| {
            lent.get_mut(here).expect("it is there")[1] = 5;
            panic!("after writing")
        };
        s.spawn_to::<_, _, ()>(NodeId(1), (s.lend_mut(first),), body).map(drop)
    });
    assert_eq!(panicked, Err(JoinError::Panicked { message: "after writing".into() }));
    assert_eq!(first.get(here)?[..2], [77, 5]);
    drop(parts);
    all_is_free(here)
}

fn a_loan_that_is_forgotten_comes_back(here: &Here<'_>) -> Checked {
    let mut boxed = here.alloc((1u64, here.alloc(2u64)?))?;
    scope(here, |s| {
        s.spawn_to(NodeId(1), (s.lend_mut(&mut boxed),), |here, (mut lent,)| {
            let written = lent.get_mut(here).and_then(|mut both| {
                both.0 += 10;
                let new = here.alloc(20u64)?;
                // The one before is dropped, at its node.
                both.1 = new;
                let _ = ManuallyDrop::new(both);
                Ok(())
            });
            let _ = ManuallyDrop::new(lent);
            written
        })
        .map(drop)
    })??;
    let both = boxed.get(here)?;
    assert_eq!((both.0, *both.1.get(here)?), (11, 20));
    assert_eq!((boxed.home(), both.1.home()), (NodeId(1), NodeId(1)));
    drop(boxed);
    all_is_free(here)
}

/// Each node adds its number and lends the list to the next one, and adds it again afterwards.
fn visit(here: &Here<'_>, mut list: LentMut<'_, (usize, [u16; 64])>, depth: u16) -> Result<(), JoinError> {
    let push = |list: &mut LentMut<'_, (usize, [u16; 64])>| {
        let mut list = list.get_mut(here)?;
        let (len, all) = &mut *list;
        all[*len] = here.id().0 * 100 + depth;
        *len += 1;
        Ok::<_, ShareError>(())
    };
    // Some write before they lend, some after, some not at all.
    if depth % 3 != 2 {
        push(&mut list)?;
    }
    if depth > 0 {
        scope(here, |s| {
            let node = NodeId((here.id().0 + depth) % 3);
            let task = s.spawn_to(node, (s.lend_mut(&mut list), depth - 1), |here, (list, depth)| {
                visit(here, list, depth).map_err(|_| ShareError::Lost)
            })?;
            task.join()?.map_err(JoinError::from)
        })??;
    }
    if !depth.is_multiple_of(3) {
        push(&mut list)?;
    }
    Ok(())
}

fn loans_are_lent_further(here: &Here<'_>) -> Checked {
    for home in here.nodes() {
        let mut list = at(here, home, (), |here, ()| here.alloc((0usize, [0u16; 64])))??;
        scope(here, |s| visit(here, s.lend_mut(&mut list), 12))??;
        let (len, all) = list.get(here)?;
        // By the rules of `visit`: who wrote when, at which node.
        let (mut expected, mut after, mut node) = (Vec::new(), Vec::new(), here.id().0);
        for depth in (0..=12u16).rev() {
            if depth % 3 != 2 {
                expected.push(node * 100 + depth);
            }
            if depth % 3 != 0 {
                after.push(node * 100 + depth);
            }
            node = (node + depth) % 3;
        }
        expected.extend(after.into_iter().rev());
        assert_eq!(all[..*len], expected);
        drop(list);
    }
    all_is_free(here)
}

type Leaf = [u64; 6];

impl Played for Leaf {
    type Plain = Leaf;

    fn step(&mut self, _here: &Here<'_>, seed: u64) -> Result<(), ShareError> {
        Leaf::plain_step(self, seed);
        Ok(())
    }

    fn plain_step(leaf: &mut Leaf, seed: u64) {
        leaf[(seed % 6) as usize] = leaf[(seed % 6) as usize].wrapping_mul(31).wrapping_add(seed);
    }
}

fn random_loans_are_those_of_plain_references(here: &Here<'_>) -> Checked {
    let (mut random, rounds) = (seeded(3), if is_deep() { 20_000 } else { 200 });
    let nodes = here.nodes().count() as u16;
    let (mut leaf, mut twin) = (here.alloc([1u64; 6])?, [1u64; 6]);
    for round in 0..rounds {
        let seed = random.u64(..);
        scope(here, |s| play(here, s.lend_mut(&mut leaf), seed, 4))??;
        play_plain::<Leaf>(&mut twin, nodes, seed, 4);
        // Read here and elsewhere: no copy of an old version is taken for it.
        assert_eq!(*leaf.get(here)?, twin, "round {round}");
        let reader = NodeId(random.u16(..nodes));
        let read =
            scope(here, |s| s.spawn_to(reader, (s.lend(&leaf),), |here, (leaf,)| leaf.get(here).copied())?.join())??;
        assert_eq!(read, Ok(twin), "round {round}");
    }
    drop(leaf);
    all_is_free(here)
}

fn a_loan_of_a_dead_node_is_as_it_was_or_lost(here: &Here<'_>) -> Checked {
    let lost = ShareError::NodeLost { node: NodeId(1) };
    let (mut leaf, mut owner) = (here.alloc(4u64)?, here.alloc((5u64, Some(here.alloc(6u64)?)))?);
    let mut untouched = here.alloc([7u64; 50])?;
    let ended = scope(here, |s| {
        let arguments = (s.lend_mut(&mut leaf), s.lend_mut(&mut owner), s.lend_mut(&mut untouched));
        let task =
            s.spawn_to(NodeId(1), arguments, |here, (mut leaf, mut owner, _untouched)| -> Result<(), ShareError> {
                *leaf.get_mut(here)? = 40;
                owner.get_mut(here)?.1 = None;
                std::process::abort()
            })?;
        task.join()
    });
    assert_eq!(last_of(ended), Err(lost.into()));
    assert_eq!((*leaf.get(here)?, *untouched.get(here)?), (4, [7; 50]));
    assert_eq!(owner.get(here).map(|_| ()), Err(ShareError::Lost));
    assert_eq!(owner.get_mut(here).map(drop), Err(ShareError::Lost));
    // It can be written and lent again.
    *leaf.get_mut(here)? += 1;
    let lent_again = scope(here, |s| {
        let task = s.spawn_to(NodeId(2), (s.lend_mut(&mut leaf),), |here, (mut leaf,)| {
            // Lent further to a node that dies: the one between has it as it was.
            *leaf.get_mut(here)? += 10;
            let ended = scope(here, |s| {
                let body = |here: &Here<'_>, (mut leaf,): (LentMut<'_, u64>,)| -> Result<(), ShareError> {
                    *leaf.get_mut(here)? = 0;
                    std::process::abort()
                };
                s.spawn_to(NodeId(3), (s.lend_mut(&mut leaf),), body)?.join()
            });
            assert_eq!(last_of(ended), Err(ShareError::NodeLost { node: NodeId(3) }.into()));
            leaf.get(here).copied()
        })?;
        task.join()
    })??;
    assert_eq!(lent_again, Ok(15));
    assert_eq!((leaf.home(), *leaf.get(here)?), (NodeId(2), 15));
    drop((leaf, untouched));
    let before = here.stats().orphans;
    drop(owner);
    assert_eq!(here.stats().orphans, before + 1, "a lost object is counted");
    Ok(())
}

/// Reads a number at the other node, which keeps a copy of this version.
fn read_there<O: Owner<Object = u64>>(here: &Here<'_>, number: &O) -> Result<u64, JoinError> {
    scope(here, |s| s.spawn_to(NodeId(1), (s.lend(number),), |here, (number,)| number.get(here).copied())?.join())??
        .map_err(JoinError::from)
}

fn a_block_that_was_lent_does_not_use_its_colours_again(here: &Here<'_>) -> Checked {
    let mut number = here.alloc(0u64)?;
    // Written in place by a loan at this node, and read elsewhere each time; then it moves.
    scope(here, |s| {
        let mut lent = s.lend_mut(&mut number);
        for value in 1..=5 {
            *lent.get_mut(here)? = value;
            assert_eq!(read_there(here, &lent)?, value);
        }
        // The loan itself goes on to the other node.
        let task =
            s.spawn_to(NodeId(1), (lent,), |here, (mut lent,)| lent.get_mut(here).map(|mut number| *number += 1))?;
        task.join()?.map_err(JoinError::from)
    })??;
    assert_eq!((number.home(), read_there(here, &number)?), (NodeId(1), 6));
    // The next object in that block goes through versions of its own.
    let mut next = here.alloc(100u64)?;
    for value in 101..110 {
        assert_eq!(read_there(here, &next)?, value - 1);
        *next.get_mut(here)? = value;
    }
    drop((number, next));
    all_is_free(here)
}

/// Lends what was lent to it back to the node of the lender, and dies.
fn lend_home_and_die(here: &Here<'_>, mut lent: LentMut<'_, u64>) -> Result<(), JoinError> {
    scope(here, |s| {
        let task = s.spawn_to(NodeId(0), (s.lend_mut(&mut lent),), |here, (mut lent,)| {
            lent.get_mut(here).map(|mut number| *number = 50)
        })?;
        task.join()?.map_err(JoinError::from)
    })??;
    assert_eq!(*lent.get(here)?, 50);
    std::process::abort()
}

fn a_loan_that_came_home_meanwhile_is_as_it_was(here: &Here<'_>) -> Checked {
    let mut number = here.alloc(4u64)?;
    let ended = scope(here, |s| {
        let task = s.spawn_to(NodeId(1), (s.lend_mut(&mut number),), |here, (lent,)| {
            lend_home_and_die(here, lent).map_err(|_| ShareError::Lost)
        })?;
        task.join()
    });
    assert_eq!(last_of(ended), Err(ShareError::NodeLost { node: NodeId(1) }.into()));
    assert_eq!(*number.get(here)?, 4);
    Ok(())
}

/// Tasks that look at their loans, of those the ones that have ended, and whether they shall end.
pub(crate) type Signals = (DAtomic<u64>, DAtomic<u64>, DAtomic<bool>);

/// Looks at a loan until it is told to end.
pub(crate) fn look_at(here: &Here<'_>, number: &u64, signals: &DArc<Signals>) -> Result<(), ShareError> {
    let (looking, ended, shall_end) = signals.get(here)?;
    looking.fetch_add(here, 1)?;
    let started = Instant::now();
    while !shall_end.load(here)? {
        assert!(started.elapsed() < PATIENCE);
        assert_eq!(std::hint::black_box(number), &7, "it is lent");
    }
    ended.fetch_add(here, 1).map(drop)
}

/// The node between lender and borrowers dies. They go on with their loans, so the lender waits for them.
fn a_scope_waits_for_tasks_that_a_dead_node_has_started(here: &Here<'_>) -> Checked {
    const BETWEEN: NodeId = NodeId(1);
    const LOST: ShareError = ShareError::NodeLost { node: BETWEEN };
    let process = at(here, BETWEEN, (), |_, ()| std::process::id())?;
    let mut numbers = [here.alloc(7u64)?, here.alloc(7)?, here.alloc(7)?, here.alloc(7)?];
    let made: Signals = (DAtomic::new(here, 0)?, DAtomic::new(here, 0)?, DAtomic::new(here, false)?);
    let signals = DArc::new(here, made)?;
    let (looking, ended, _) = signals.get(here)?;
    let ends = here.spawn_to(NodeId(3), signals.try_clone(here)?, |here, signals| {
        until(|| here.spawn_to(BETWEEN, (), |_, ()| ()).map(drop) == Err(LOST));
        // Time for a scope that does not wait.
        std::thread::sleep(Duration::from_millis(100));
        signals.get(here)?.2.store(here, true)
    })?;
    let lost = scope(here, |s| -> Result<(), ShareError> {
        let [one, two, three, four] = &mut numbers;
        // To another node, and home again; for a writer, and for readers.
        for (node, lent) in [(NodeId(2), s.lend_mut(one)), (here.id(), s.lend_mut(two))] {
            let arguments = (node, lent, signals.try_clone(here)?);
            drop(s.spawn_to(BETWEEN, arguments, |here, (node, mut lent, signals)| {
                let ended = scope(here, |s| {
                    let further = (s.lend_mut(&mut lent), signals);
                    let task =
                        s.spawn_to(node, further, |here, (lent, signals)| look_at(here, lent.get(here)?, &signals));
                    task?.join()
                });
                ended??
            })?);
        }
        for (node, lent) in [(NodeId(3), s.lend(three)), (here.id(), s.lend(four))] {
            let arguments = (node, lent, signals.try_clone(here)?);
            drop(s.spawn_to(BETWEEN, arguments, |here, (node, lent, signals)| {
                let ended = scope(here, |s| {
                    let task = s.spawn_to(node, (lent, signals), |here, (lent, signals)| {
                        look_at(here, lent.get(here)?, &signals)
                    });
                    task?.join()
                });
                ended??
            })?);
        }
        until(|| looking.load(here) == Ok(4));
        kill_process(process);
        Ok(())
    });
    assert_eq!(lost, Err(LOST.into()));
    assert_eq!(ended.load(here)?, 4, "tasks have loans of a scope that is over");
    for number in &mut numbers {
        *number.get_mut(here)? += 1;
        assert_eq!(*number.get(here)?, 8);
    }
    ends.join(here)??;
    Ok(())
}

/// A scope has lost a task, and holds a lock. A task waits for the lock that the dead node has sent for another scope.
fn a_scope_waits_for_no_task_that_waits_for_it(here: &Here<'_>) -> Checked {
    const BETWEEN: NodeId = NodeId(1);
    const LOST: ShareError = ShareError::NodeLost { node: BETWEEN };
    let process = at(here, BETWEEN, (), |_, ()| std::process::id())?;
    let lock = DArc::new(here, DMutex::new(here, 1u64)?)?;
    let (asks, asked) = channel::<u64>(here, 1)?;
    let guard = lock.get(here)?.lock(here)?;
    let other = here.spawn_to(BETWEEN, (lock.try_clone(here)?, asks), |here, (lock, asks)| {
        let ended = scope(here, |s| {
            let task = s.spawn_to(NodeId(2), (s.lend(&lock), asks), |here, (lock, asks)| {
                asks.send(here, 1).map_err(|_| ShareError::Lost)?;
                *lock.get(here)?.lock(here)? += 1;
                Ok::<_, ShareError>(())
            });
            task?.join()
        });
        ended??
    })?;
    assert_eq!(asked.recv(here), Ok(1));
    let mut number = here.alloc(7u64)?;
    let lost = scope(here, |s| {
        let task = s.spawn_to(BETWEEN, (s.lend_mut(&mut number),), |_, (lent,)| {
            until(|| false);
            let _ = lent;
        })?;
        kill_process(process);
        task.join()
    });
    assert_eq!(last_of(lost), Err(LOST.into()));
    assert_eq!((*number.get(here)?, *guard), (7, 1));
    drop(guard);
    until(|| lock.get(here).and_then(|lock| lock.lock(here).map(|number| *number)) == Ok(2));
    assert_eq!(other.join(here), Err(LOST.into()));
    Ok(())
}

/// A reader of a lock lends what the value owns, and dies. Whoever writes next comes after the borrower.
fn a_lock_waits_for_those_to_whom_a_dead_reader_has_lent(here: &Here<'_>) -> Checked {
    const READER: NodeId = NodeId(1);
    const LOST: ShareError = ShareError::NodeLost { node: READER };
    let process = at(here, READER, (), |_, ()| std::process::id())?;
    let lock = DArc::new(here, DRwLock::new(here, here.alloc(7u64)?)?)?;
    let made: Signals = (DAtomic::new(here, 0)?, DAtomic::new(here, 0)?, DAtomic::new(here, false)?);
    let signals = DArc::new(here, made)?;
    let (looking, ended, _) = signals.get(here)?;
    let ends = here.spawn_to(NodeId(3), signals.try_clone(here)?, |here, signals| {
        until(|| here.spawn_to(READER, (), |_, ()| ()).map(drop) == Err(LOST));
        // Time for a lock that does not wait.
        std::thread::sleep(Duration::from_millis(100));
        signals.get(here)?.2.store(here, true)
    })?;
    let reads = here.spawn_to(READER, (lock.try_clone(here)?, signals.try_clone(here)?), |here, (lock, signals)| {
        let guard = lock.get(here)?.read(here)?;
        let ended = scope(here, |s| {
            let further = (s.lend(&*guard), signals.try_clone(here)?);
            s.spawn_to(NodeId(2), further, |here, (lent, signals)| look_at(here, lent.get(here)?, &signals))?.join()
        });
        ended??
    })?;
    until(|| looking.load(here) == Ok(1));
    kill_process(process);
    assert_eq!(reads.join(here), Err(LOST.into()));
    *lock.get(here)?.write(here)?.get_mut(here)? += 1;
    assert_eq!(ended.load(here)?, 1, "a task has borrowed what is written to");
    assert_eq!(*lock.get(here)?.read(here)?.get(here)?, 8);
    ends.join(here)??;
    Ok(())
}

/// A lock that owns an object, what has become of a task that writes to it, and a signal that it has begun.
type WrittenLock = (DRwLock<DBox<u64>>, DAtomic<u64>, DAtomic<u64>);

/// Writes to a lock after the reader is dead that has started this task, or waits for it from now on.
fn write_after_reader(here: &Here<'_>, shared: &DArc<WrittenLock>, waits_first: bool) -> Result<(), ShareError> {
    const READER: NodeId = NodeId(1);
    let (lock, result, begun) = shared.get(here)?;
    begun.fetch_add(here, 1)?;
    if !waits_first {
        until(|| here.spawn_to(READER, (), |_, ()| ()).map(drop) == Err(ShareError::NodeLost { node: READER }));
    }
    let written = match lock.write(here) {
        Ok(mut number) => {
            *number.get_mut(here)? += 1;
            1
        }
        Err(ShareError::Borrowed { node: READER }) => 2,
        Err(_) => 3,
    };
    result.store(here, written)
}

/// A reader starts a task in a scope, and dies. The task writes to the lock. It is served if nothing was lent while the
/// lock was held, and is told otherwise: the lock waits for whoever may have been lent what it owns.
fn nobody_waits_for_a_lock_that_waits_for_it(here: &Here<'_>) -> Checked {
    const READER: NodeId = NodeId(1);
    let process = at(here, READER, (), |_, ()| std::process::id())?;
    let mut all = Vec::new();
    for (number, (is_before, waits_first)) in
        [(false, false), (false, true), (true, false), (true, true)].iter().enumerate()
    {
        let made: WrittenLock =
            (DRwLock::new(here, here.alloc(7u64)?)?, DAtomic::new(here, 0)?, DAtomic::new(here, 0)?);
        let shared = DArc::new(here, made)?;
        let arguments = (shared.try_clone(here)?, NodeId(2 + (number % 2) as u16), *is_before, *waits_first);
        drop(here.spawn_to(READER, arguments, |here, (shared, to, is_before, waits_first)| {
            let other = here.alloc(1u64)?;
            let ended = scope(here, |s| {
                let early = if is_before { None } else { Some(s.lend(&other)) };
                let _guard = shared.get(here)?.0.read(here)?;
                let lent = early.unwrap_or_else(|| s.lend(&other));
                let arguments = (lent, shared.try_clone(here)?, waits_first);
                let task = s.spawn_to(to, arguments, |here, (_, shared, waits_first)| {
                    write_after_reader(here, &shared, waits_first)
                })?;
                task.join()
            });
            ended??
        })?);
        all.push((shared, if *is_before { 2 } else { 1 }));
    }
    until(|| all.iter().all(|(shared, _)| shared.get(here).and_then(|shared| shared.2.load(here)) == Ok(1)));
    kill_process(process);
    for (shared, expected) in &all {
        let (lock, result, _) = shared.get(here)?;
        until(|| result.load(here).expect("it is here") > 0);
        assert_eq!(result.load(here)?, *expected);
        *lock.write(here)?.get_mut(here)? += 10;
        assert_eq!(*lock.read(here)?.get(here)?, if *expected == 1 { 18 } else { 17 });
    }
    Ok(())
}

fn many_loans_come_home_with_a_long_result(here: &Here<'_>) -> Checked {
    const MANY: usize = 1000;
    let numbers = (0..MANY as u64 + 100).map(|number| here.alloc(number));
    let mut numbers: Vec<DBox<u64>> = numbers.collect::<Result<_, _>>()?;
    let ended = scope(here, |s| {
        let lent: Vec<_> = numbers[..MANY].iter_mut().map(|number| s.lend_mut(number)).collect();
        let lent: [LentMut<'_, u64>; MANY] = lent.try_into().expect("so many");
        let task = s.spawn_to(NodeId(1), (lent,), |here, (mut lent,)| {
            for number in &mut lent {
                *number.get_mut(here).expect("it is lent") += 1;
            }
            // Alone it could travel.
            [7u8; 60_000]
        })?;
        task.join().map(|_| ())
    })?;
    assert!(matches!(ended, Err(JoinError::Share(ShareError::TooLarge { .. }))), "{ended:?}");
    for (number, expected) in numbers[..MANY].iter().zip(1..) {
        assert_eq!((number.home(), *number.get(here)?), (NodeId(1), expected));
    }
    let refused = scope(here, |s| {
        let lent: Vec<_> = numbers.iter_mut().map(|number| s.lend_mut(number)).collect();
        let lent: [LentMut<'_, u64>; MANY + 100] = lent.try_into().expect("so many");
        s.spawn_to(NodeId(1), (lent,), |_, _| ()).map(drop)
    })?;
    assert!(matches!(refused, Err(ShareError::TooManyLoans { loans: 1100, .. })), "{refused:?}");
    drop(numbers);
    all_is_free(here)
}

/// Owners and handles of one program, used in the next one of the same process.
pub(crate) fn owners_that_outlive_their_program_lead_to_nothing() {
    let config = NodeBuilder::new().nodes(2).near(NEAR_BYTES);
    let (mut old, never) = farfield_dsm::run(&config, |here| {
        let again = farfield_dsm::run(&NodeBuilder::new(), |_| ());
        assert!(matches!(again, Err(NodeStartError::Argument(_))), "{again:?}");
        let never = here.spawn_to(NodeId(1), (), |_, ()| std::thread::sleep(PATIENCE)).unwrap();
        // Every bit pattern but two is no `bool`.
        (here.alloc([true; 100]).unwrap(), never)
    })
    .unwrap();
    farfield_dsm::run(&config, |here| {
        let new = here.alloc([[0x77u8; 100]; 10]).unwrap();
        assert!(matches!(old.get(here), Err(ShareError::UnknownNode { .. })));
        assert!(matches!(old.get_mut(here).map(drop), Err(ShareError::UnknownNode { .. })));
        assert_eq!(never.join(here), Err(ShareError::NodeLost { node: NodeId(1) }.into()));
        let started = Instant::now();
        drop(old);
        while here.stats().orphans == 0 {
            assert!(started.elapsed() < PATIENCE);
            std::thread::yield_now();
        }
        assert_eq!((new.get(here), here.stats().late_frees), (Ok(&[[0x77; 100]; 10]), 0));
    })
    .unwrap();
}

thread_local! {
    /// Dropped after what the library keeps for the thread, or before: nobody knows.
    static KEPT: std::cell::RefCell<Option<DBox<u64>>> = const { std::cell::RefCell::new(None) };
}

fn owners_of_a_thread_are_dropped_when_it_ends(here: &Here<'_>) -> Checked {
    for is_before in [true, false] {
        let boxed = here.alloc(5u64)?;
        let there = at(here, NodeId(1), (), |here, ()| here.alloc(6u64))??;
        let thread = std::thread::spawn(move || {
            let keep = |boxed| KEPT.with_borrow_mut(|kept| drop(kept.replace(boxed)));
            if is_before {
                keep(boxed);
                drop(there);
            } else {
                drop(there);
                keep(boxed);
            }
        });
        thread.join().expect("it does not panic");
    }
    all_is_free(here)
}

/// Takes as long as a node may be silent: for the deep tier.
fn a_silent_node_that_was_lent_something_is_waited_for(here: &Here<'_>) -> Checked {
    if !is_deep() {
        return Ok(());
    }
    let process = at(here, NodeId(1), (), |_, ()| std::process::id())?;
    let mut number = here.alloc(1u64)?;
    stop_process(process);
    let speaks = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(12));
        signal_process(process, "-CONT");
    });
    let told = scope(here, |s| {
        let task = s.spawn_to(NodeId(1), (s.lend_mut(&mut number),), |here, (mut number,)| {
            number.get_mut(here).map(|mut number| *number = 2)
        });
        task.map(drop)
    })?;
    assert!(matches!(told, Err(ShareError::Silent { node: NodeId(1), .. })), "{told:?}");
    // The scope has waited for what was asked for.
    assert_eq!(*number.get(here)?, 2);
    speaks.join().expect("it does not panic");
    drop(number);
    all_is_free(here)
}
