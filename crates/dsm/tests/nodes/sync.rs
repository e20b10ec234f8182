//! What is shared without an owner: shared owners, locks, atomic numbers, and channels.

use crate::support::{Checked, NodesTest, PATIENCE, all_is_free, at, counts, is_deep, seeded, until};
use farfield_dsm::{
    DArc, DAtomic, DBox, DMutex, DRwLock, Far, Here, JoinError, NodeId, Receiver, RecvError, SendError, Sender,
    ShareError, TaskHandle, channel,
};
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

pub(crate) const TESTS: &[NodesTest] = &[
    ("shared_objects_are_dropped_once_after_their_last_owner", 3, shared_objects_are_dropped_once),
    ("clones_send_few_messages", 2, clones_send_few_messages),
    ("no_more_messages_are_sent_than_must_be", 3, no_more_messages_are_sent_than_must_be),
    ("random_shared_owners_are_those_of_arcs", 3, random_shared_owners_are_those_of_arcs),
    ("a_lock_has_one_holder", 1, a_lock_has_one_holder),
    ("a_lock_has_one_holder_of_three_nodes", 3, a_lock_has_one_holder),
    ("what_a_lock_owns_is_handed_on", 3, what_a_lock_owns_is_handed_on),
    ("what_is_applied_has_its_arguments_once", 3, what_is_applied_has_its_arguments_once),
    ("a_lock_is_not_waited_for_longer_than_one_likes", 2, a_lock_is_not_waited_for_longer_than_one_likes),
    ("readers_share_a_lock_and_nobody_overtakes", 2, readers_share_a_lock_and_nobody_overtakes),
    ("a_lock_is_fair", 3, a_lock_is_fair),
    ("whoever_leaves_a_lock_is_known", 2, whoever_leaves_a_lock_is_known),
    ("a_lock_outlives_its_holder", 4, a_lock_outlives_its_holder),
    ("a_home_that_dies_is_an_error_of_who_waits", 2, a_home_that_dies_is_an_error_of_who_waits),
    ("values_arrive_once_and_in_order", 3, values_arrive_once_and_in_order),
    ("values_arrive_once_and_in_order_at_one_node", 1, values_arrive_once_and_in_order),
    ("a_channel_is_bounded_and_closes", 2, a_channel_is_bounded_and_closes),
    ("channels_go_through_channels", 3, channels_go_through_channels),
    ("a_channel_outlives_its_ends", 5, a_channel_outlives_its_ends),
];

/// Starts a task at each node, some at a time, and returns the tasks.
fn at_all<A, R, F>(
    here: &Here<'_>,
    mut arguments: impl FnMut() -> Result<A, ShareError>,
    each: usize,
    body: F,
) -> Result<Vec<TaskHandle<R>>, ShareError>
where
    A: Far,
    R: Far,
    F: for<'h> FnOnce(&Here<'h>, A) -> R + Copy + 'static,
{
    let nodes = (0..each).flat_map(|_| here.nodes());
    nodes.map(|node| here.spawn_to(node, arguments()?, body)).collect()
}

fn shared_objects_are_dropped_once(here: &Here<'_>) -> Checked {
    for home in here.nodes() {
        let shared = at(here, home, (), |here, ()| DArc::new(here, (7u64, here.alloc([1u8; 100])?)))??;
        assert_eq!(shared.home(), home);
        let tasks = at_all(
            here,
            || shared.try_clone(here),
            2,
            |here, shared| {
                // Made and dropped here, handed on, and read.
                let mut clones = Vec::new();
                for round in 0..200 {
                    clones.push(shared.try_clone(here)?);
                    if round % 3 == 0 {
                        clones.pop();
                    }
                }
                let other = NodeId((here.id().0 + 1) % 3);
                let read = at(here, other, (clones.pop(), shared), |here, (clone, shared)| {
                    drop(shared);
                    let clone = clone.as_ref().expect("there are some").get(here)?;
                    Ok::<_, ShareError>(clone.0 + u64::from(clone.1.get(here)?[50]))
                });
                read.map_err(|_| ShareError::Lost)?
            },
        )?;
        for task in tasks {
            assert_eq!(task.join(here)?, Ok(8));
        }
        assert_eq!(shared.get(here)?.0, 7);
        drop(shared);
        all_is_free(here)?;
    }
    Ok(())
}

fn clones_send_few_messages(here: &Here<'_>) -> Checked {
    let shared = at(here, NodeId(1), (), |here, ()| DArc::new(here, [3u8; 500]))??;
    shared.get(here)?;
    let before = here.stats();
    let mut clones = Vec::new();
    for _ in 0..2000 {
        clones.push(shared.try_clone(here)?);
        assert_eq!(clones.last().expect("it was made").get(here)?[0], 3);
    }
    let after = here.stats();
    assert_eq!(after.fetches, before.fetches, "the copy is there");
    assert!(after.message_bytes - before.message_bytes < 2000, "{after:?}");
    drop((clones, shared));
    all_is_free(here)
}

/// Checks that an operation sends so many messages from this node, some of them later.
fn sends<R>(here: &Here<'_>, expected: u64, operation: impl FnOnce() -> R) -> R {
    let before = here.stats().messages;
    let result = operation();
    until(|| here.stats().messages - before >= expected);
    assert_eq!(here.stats().messages - before, expected);
    result
}

fn no_more_messages_are_sent_than_must_be(here: &Here<'_>) -> Checked {
    let there = NodeId(1);
    let mut object = sends(here, 1, || at(here, there, (), |here, ()| here.alloc([1u64; 64])))??;
    // Read: once for each version. The values are at the other node, and this one sends no other message.
    for _ in 0..3 {
        sends(here, u64::from(here.stats().fetches == 0), || object.get(here).map(|all| all[0]))?;
    }
    // Written: the object comes, and its block is freed later; here, nothing, whoever has copies.
    sends(here, 2, || object.get_mut(here).map(|mut all| all[0] = 2))?;
    for readers in 0..3 {
        for node in here.nodes().take(readers).map(|node| NodeId(2 - node.0)) {
            let (read, back) =
                at(here, node, (object,), |here, (object,)| (object.get(here).map(|all| all[0]), object))?;
            read?;
            object = back;
        }
        sends(here, 0, || object.get_mut(here).map(|mut all| all[0] += 1))?;
        assert_eq!(object.home(), here.id());
    }
    // A task: one message there, and one back.
    let results = |here: &Here<'_>| at(here, there, (), |here, ()| here.stats().results);
    let before = results(here)?;
    sends(here, 1, || at(here, there, (), |_, ()| ()))?;
    assert_eq!(results(here)? - before, 2, "its end, and that of the question before");
    // What is at this node costs nothing; elsewhere one message, and one that gives a lock back.
    let make = |here: &Here<'_>, (): ()| {
        let made = (DMutex::new(here, [0u64; 25])?, DAtomic::new(here, 0u64)?, DRwLock::new(here, 1u64)?);
        Ok::<_, ShareError>((DArc::new(here, made)?, channel::<u64>(here, 8)?))
    };
    for (node, most) in [(here.id(), 0), (there, 1)] {
        let (shared, (sender, receiver)) = sends(here, most, || at(here, node, (), make))??;
        let (lock, number, read) = sends(here, most, || shared.get(here))?;
        sends(here, 2 * most, || lock.lock(here).map(|mut all| all[0] = 5))?;
        sends(here, 2 * most, || read.read(here).map(drop))?;
        sends(here, most, || number.fetch_add(here, 1))?;
        sends(here, most, || lock.with(here, 1u64, |all, more| all[0] += more))?;
        sends(here, most, || lock.apply(here, 1u64, |all, more| all[0] += more))?;
        sends(here, most, || sender.send(here, 7)).expect("there is room");
        assert_eq!(sends(here, most, || receiver.recv(here)), Ok(7));
        sends(here, most, || shared.try_clone(here)).map(std::mem::forget)?;
        // The receiver, and the last sender and owner; the clone was forgotten.
        sends(here, 3 * most, || drop((receiver, sender, shared)));
    }
    Ok(())
}

/// Number of an object, and an object that it shares.
type Shared = (u64, Option<DArc<u64>>);
type Twin = std::sync::Arc<(u64, Option<u64>)>;

fn random_shared_owners_are_those_of_arcs(here: &Here<'_>) -> Checked {
    let (mut random, steps) = (seeded(5), if is_deep() { 50_000 } else { 800 });
    let mut owners: Vec<(DArc<Shared>, Twin)> = Vec::new();
    let mut inner: Vec<(DArc<u64>, u64)> = Vec::new();
    for step in 0..steps {
        let node = NodeId(random.u16(..3));
        if owners.len() > 40 || inner.len() > 40 {
            owners.truncate(random.usize(..20));
            inner.truncate(random.usize(..20));
        }
        match random.u8(..5) {
            0 => inner.push((at(here, node, step, DArc::new)??, step)),
            1 => {
                let of = (!inner.is_empty()).then(|| random.usize(..inner.len().max(1)));
                let kept = of.map(|at| inner[at].0.try_clone(here)).transpose()?;
                let made = at(here, node, (step, kept), |here, (step, kept)| DArc::new(here, (step, kept)))??;
                owners.push((made, std::sync::Arc::new((step, of.map(|at| inner[at].1)))));
            }
            2 if !owners.is_empty() => {
                // Cloned elsewhere, from a copy there.
                let (owner, twin) = &owners[random.usize(..owners.len())];
                let again = at(here, node, owner.try_clone(here)?, |here, owner| owner.try_clone(here))??;
                owners.push((again, twin.clone()));
            }
            3 if !owners.is_empty() => {
                // What it owns is cloned through a copy, and outlives it.
                let (owner, twin) = owners.swap_remove(random.usize(..owners.len()));
                let taken = at(here, node, owner, |here, owner| {
                    owner.get(here)?.1.as_ref().map(|inner| inner.try_clone(here)).transpose()
                })??;
                assert_eq!(taken.is_some(), twin.1.is_some());
                inner.extend(taken.zip(twin.1));
            }
            _ => {
                for (owner, twin) in &owners {
                    let (number, kept) = owner.get(here)?;
                    let kept = kept.as_ref().map(|kept| kept.get(here).copied()).transpose()?;
                    assert_eq!((*number, kept), **twin, "step {step}");
                }
                for (owner, number) in &inner {
                    assert_eq!(owner.get(here)?, number, "step {step}");
                }
            }
        }
    }
    drop((owners, inner));
    all_is_free(here)
}

fn a_lock_has_one_holder(here: &Here<'_>) -> Checked {
    const ROUNDS: u64 = 80;
    for home in here.nodes() {
        let lock = at(here, home, (), |here, ()| DArc::new(here, DMutex::new(here, [0u64; 20])?))??;
        let tasks = at_all(
            here,
            || lock.try_clone(here),
            2,
            |here, lock| {
                let lock = lock.get(here)?;
                for round in 0..ROUNDS {
                    if round % 7 == 0 {
                        // The same by a body that runs at the value's node.
                        let added = lock.with(here, 1u64, |all, more| {
                            assert!(all.iter().all(|number| *number == all[0]));
                            all.iter_mut().for_each(|number| *number += more);
                        });
                        added.map_err(|_| ShareError::Lost)?;
                        continue;
                    }
                    if round % 7 == 1 {
                        lock.apply(here, 1u64, |all, more| {
                            assert!(all.iter().all(|number| *number == all[0]));
                            all.iter_mut().for_each(|number| *number += more);
                        })?;
                        continue;
                    }
                    let mut all = lock.lock(here)?;
                    let (first, is_left) = (all[0], all.was_left());
                    assert!(!is_left);
                    for number in all.iter_mut() {
                        assert_eq!(*number, first, "two hold the lock");
                        *number += 1;
                    }
                }
                Ok::<_, ShareError>(())
            },
        )?;
        let count = tasks.len() as u64;
        for task in tasks {
            task.join(here)??;
        }
        assert_eq!(*lock.get(here)?.lock(here)?, [count * ROUNDS; 20]);
        drop(lock);
    }
    all_is_free(here)
}

fn what_a_lock_owns_is_handed_on(here: &Here<'_>) -> Checked {
    let lock = DArc::new(here, DMutex::new(here, (0u64, here.alloc([0u64; 50])?))?)?;
    let tasks = at_all(
        here,
        || lock.try_clone(here),
        2,
        |here, lock| {
            for round in 0..100u64 {
                let mut guard = lock.get(here)?.lock(here)?;
                guard.0 += 1;
                let count = guard.0;
                if round % 2 == 0 {
                    // Written through its owner, which is in the value.
                    let mut all = guard.1.get_mut(here)?;
                    assert_eq!(*all, [count - 1; 50], "what was written before the lock was given back is seen");
                    *all = [count; 50];
                } else {
                    assert_eq!(*guard.1.get(here)?, [count - 1; 50]);
                    guard.1 = here.alloc([count; 50])?;
                }
            }
            Ok::<_, ShareError>(())
        },
    )?;
    let count = tasks.len() as u64;
    for task in tasks {
        task.join(here)??;
    }
    let (written, all) = at(here, NodeId(2), lock, |here, lock| {
        let guard = lock.get(here)?.lock(here)?;
        Ok::<_, ShareError>((guard.0, *guard.1.get(here)?))
    })??;
    assert_eq!((written, all), (count * 100, [count * 100; 50]));
    // And a lock that is taken apart.
    let lock = DMutex::new(here, here.alloc(5u64)?)?;
    let lock = at(here, NodeId(1), lock, |here, lock| {
        *lock.lock(here)?.get_mut(here)? += 1;
        lock.into_inner(here)
    })??;
    assert_eq!(lock.into_inner(here)?, 6);
    all_is_free(here)
}

fn a_lock_is_not_waited_for_longer_than_one_likes(here: &Here<'_>) -> Checked {
    let lock = DArc::new(here, DMutex::new(here, 0u64)?)?;
    let guard = lock.get(here)?.lock(here)?;
    let tries = |here: &Here<'_>, node| {
        at(here, node, lock.try_clone(here)?, |here, lock| {
            let lock = lock.get(here)?;
            let tried = lock.try_lock(here)?.is_some();
            Ok::<_, ShareError>([tried, lock.lock_within(here, Duration::from_millis(20))?.is_some()])
        })
    };
    assert_eq!(tries(here, NodeId(0))??, [false; 2]);
    assert_eq!(tries(here, NodeId(1))??, [false; 2]);
    drop(guard);
    // Those who gave up do not stand in line.
    let lock_here = lock.get(here)?;
    until(|| lock_here.try_lock(here).expect("its home lives").is_some());
    assert!(tries(here, NodeId(1))??[1]);
    // Many give up at the moment at which their turn comes.
    let tasks = at_all(
        here,
        || lock.try_clone(here),
        3,
        |here, lock| {
            let (lock, mut held) = (lock.get(here)?, 0u64);
            for round in 0..150 {
                if let Some(mut number) = lock.lock_within(here, Duration::from_micros(round % 50 * 10))? {
                    *number += 1;
                    held += 1;
                }
            }
            Ok::<_, ShareError>(held)
        },
    )?;
    let held: Vec<u64> = tasks.into_iter().map(|task| Ok(task.join(here)??)).collect::<Result<_, JoinError>>()?;
    assert_eq!(*lock.get(here)?.lock(here)?, held.iter().sum::<u64>());
    drop(lock);
    all_is_free(here)
}

fn readers_share_a_lock_and_nobody_overtakes(here: &Here<'_>) -> Checked {
    let made = (DRwLock::new(here, [0u64; 4])?, DAtomic::new(here, 0u64)?, DAtomic::new(here, false)?);
    let lock = DArc::new(here, made)?;
    let (lock_here, readers, _) = lock.get(here)?;
    let mine = lock_here.read(here)?;
    // Another one reads at the same time, until it is told to end.
    let other = here.spawn_to(NodeId(1), lock.try_clone(here)?, |here, lock| {
        let (lock, readers, _) = lock.get(here)?;
        let read = lock.read(here)?;
        readers.fetch_add(here, 1)?;
        until(|| readers.load(here) != Ok(1));
        Ok::<_, ShareError>(*read)
    })?;
    until(|| readers.load(here) == Ok(1));
    // A writer waits for both, and a reader after it for the writer.
    let writer = here.spawn_to(NodeId(1), lock.try_clone(here)?, |here, lock| {
        let (lock, _, writes) = lock.get(here)?;
        writes.store(here, true)?;
        *lock.write(here)? = [1; 4];
        Ok::<_, ShareError>(())
    })?;
    // Who stands in line is not seen. A reader that comes much later than it asks is behind the writer.
    let late = here.spawn_to(NodeId(0), lock.try_clone(here)?, |here, lock| {
        let (lock, _, writes) = lock.get(here)?;
        until(|| writes.load(here) == Ok(true));
        std::thread::sleep(Duration::from_millis(100));
        lock.read(here).map(|read| *read)
    })?;
    drop(mine);
    readers.fetch_add(here, 1)?;
    assert_eq!(other.join(here)??, [0; 4]);
    writer.join(here)??;
    assert_eq!(late.join(here)??, [1; 4]);
    let tasks = at_all(
        here,
        || lock.try_clone(here),
        2,
        |here, lock| {
            let lock = &lock.get(here)?.0;
            for round in 0..200u64 {
                if round % 4 == 0 {
                    lock.write(here)?.iter_mut().for_each(|number| *number += 1);
                } else {
                    let read = lock.read(here)?;
                    assert_eq!(*read, [read[0]; 4]);
                }
            }
            Ok::<_, ShareError>(())
        },
    )?;
    for task in tasks {
        task.join(here)??;
    }
    assert_eq!(*lock.get(here)?.0.read(here)?, [1 + 4 * 50; 4]);
    drop(lock);
    all_is_free(here)
}

fn a_lock_is_fair(here: &Here<'_>) -> Checked {
    /// Time for which the lock is kept: longer than a message takes, so the others stand in line by then.
    const KEPT: Duration = Duration::from_millis(5);
    let all: u64 = if is_deep() { 1500 } else { 90 };
    let nodes = here.nodes().count() as u64;
    let lock = DArc::new(here, (DMutex::new(here, 0u64)?, DAtomic::new(here, 0u64)?, all, nodes))?;
    let tasks = at_all(
        here,
        || lock.try_clone(here),
        1,
        |here, lock| {
            let (lock, started, all, nodes) = lock.get(here)?;
            started.fetch_add(here, 1)?;
            until(|| started.load(here) == Ok(*nodes));
            let mut taken = 0u64;
            loop {
                let mut count = lock.lock(here)?;
                if *count == *all {
                    return Ok::<_, ShareError>(taken);
                }
                *count += 1;
                taken += 1;
                std::thread::sleep(KEPT);
            }
        },
    )?;
    let taken = tasks.into_iter().map(|task| Ok(task.join(here)??)).collect::<Result<Vec<u64>, JoinError>>()?;
    // On a busy machine a message may take longer now and then.
    assert!(taken.iter().all(|taken| *taken >= all / nodes / 2), "{taken:?}");
    drop(lock);
    all_is_free(here)
}

/// Arguments that own objects reach the body, or come back and go with a task, because the lock is not free.
fn what_is_applied_has_its_arguments_once(here: &Here<'_>) -> Checked {
    type Kept = (u64, Option<DBox<u64>>);
    for home in here.nodes() {
        let lock = at(here, home, (), |here, ()| DArc::new(here, DMutex::<Kept>::new(here, (0, None))?))??;
        let tasks = at_all(
            here,
            || lock.try_clone(here),
            2,
            |here, lock| {
                let lock = lock.get(here)?;
                for round in 0..40u64 {
                    let old = if round % 4 == 0 {
                        // Whoever is refused meets this one.
                        let mut kept = lock.lock(here)?;
                        kept.0 += 1;
                        kept.1.replace(here.alloc(round)?)
                    } else {
                        lock.apply(here, here.alloc(round)?, |kept, new| {
                            kept.0 += 1;
                            kept.1.replace(new)
                        })?
                    };
                    assert!(old.map_or(Ok(0), |old| old.get(here).copied())? < 40);
                }
                Ok::<_, ShareError>(())
            },
        )?;
        let count = 40 * tasks.len() as u64;
        for task in tasks {
            task.join(here)??;
        }
        let shared = lock.get(here)?;
        assert_eq!(shared.apply(here, (), |kept, ()| kept.0)?, count);
        // A lock that is not given back soon, and a body that panics.
        let held = shared.lock(here)?;
        let waits = at_all(
            here,
            || lock.try_clone(here),
            1,
            |here, lock| {
                lock.get(here)?
                    .apply(here, 1, |kept, more| {
                        kept.0 += more;
                    })
                    .map_err(ShareError::from)
            },
        )?;
        drop(held);
        for task in waits {
            task.join(here)??;
        }
        let panicked = shared.apply(here, 7u64, |kept, value| {
            kept.0 = value;
            assert!(value < 7, "no luck");
        });
        assert!(
            matches!(&panicked, Err(JoinError::Panicked { message }) if message.contains("no luck")),
            "{panicked:?}"
        );
        let held = shared.lock(here)?;
        assert!(held.was_left() && held.0 == 7);
        drop(held);
        assert!(!shared.lock(here)?.was_left());
        drop(lock);
        all_is_free(here)?;
    }
    Ok(())
}

fn whoever_leaves_a_lock_is_known(here: &Here<'_>) -> Checked {
    for holder in here.nodes() {
        let lock = DArc::new(here, DMutex::new(here, 1u64)?)?;
        let panicked = at(here, holder, lock.try_clone(here)?, |here, lock| -> Result<(), ShareError> {
            let mut number = lock.get(here)?.lock(here)?;
            *number = 2;
            panic!("no luck")
        });
        assert!(matches!(panicked, Err(JoinError::Panicked { .. })));
        {
            let number = lock.get(here)?.lock(here)?;
            assert!(number.was_left() && *number == 2, "what was written stays");
        }
        assert!(!lock.get(here)?.lock(here)?.was_left(), "it was given back");
        // A guard that is forgotten holds the lock as long as its task.
        at(here, holder, lock.try_clone(here)?, |here, lock| {
            let mut guard = ManuallyDrop::new(lock.get(here)?.lock(here)?);
            **guard = 3;
            Ok::<_, ShareError>(())
        })??;
        {
            let number = lock.get(here)?.lock(here)?;
            assert!(number.was_left());
            assert_eq!(*number, if holder == here.id() { 3 } else { 2 }, "at its home it is written in place");
        }
        // Without its owner, a lock that is held is dropped when it is given back.
        let owning = DMutex::new(here, here.alloc(9u64)?)?;
        at(here, holder, owning, |here, owning| {
            let _ = ManuallyDrop::new(owning.try_lock(here)?);
            Ok::<_, ShareError>(())
        })??;
    }
    // The value that was forgotten at the other node owns an object: nobody knows what became of that.
    let started = Instant::now();
    while counts(here, here.id())?[2] != 1 {
        assert!(started.elapsed() < PATIENCE, "one lost value is counted");
    }
    Ok(())
}

fn a_lock_outlives_its_holder(here: &Here<'_>) -> Checked {
    /// Three locks, and whether one that dies has them all.
    type Locks = (DMutex<u64>, DMutex<Option<DBox<u64>>>, DRwLock<u64>, DAtomic<bool>);
    let owning = DMutex::new(here, Some(here.alloc(2)?))?;
    let made: Locks = (DMutex::new(here, 1)?, owning, DRwLock::new(here, 3)?, DAtomic::new(here, false)?);
    let locks = DArc::new(here, made)?;
    let dies = here.spawn_to(NodeId(1), locks.try_clone(here)?, |here, locks| -> Result<(), ShareError> {
        let (plain, owning, read, are_held) = locks.get(here)?;
        *plain.lock(here)? = 10;
        let (mut plain, mut owning, _read) = (plain.lock(here)?, owning.lock(here)?, read.read(here)?);
        *plain = 20;
        *owning = None;
        // One at the node itself stands in line, too.
        let waits =
            here.spawn_to(here.id(), locks.try_clone(here)?, |here, locks| locks.get(here)?.0.lock(here).map(drop))?;
        are_held.store(here, true)?;
        std::thread::sleep(Duration::from_millis(100));
        drop(waits);
        std::process::abort()
    })?;
    let are_held = &locks.get(here)?.3;
    until(|| are_held.load(here) == Ok(true));
    let waiting = [NodeId(0), NodeId(2), NodeId(3)].map(|node| {
        here.spawn_to(node, locks.try_clone(here)?, |here, locks| {
            let (plain, owning, read, _) = locks.get(here)?;
            let (was_left, number) = {
                let plain = plain.lock(here)?;
                (plain.was_left(), *plain)
            };
            *read.write(here)? += 1;
            Ok::<_, ShareError>((was_left, number, owning.lock(here).map(drop)))
        })
    });
    assert_eq!(dies.join(here), Err(ShareError::NodeLost { node: NodeId(1) }.into()));
    let mut left = 0;
    for waiting in waiting {
        let (was_left, number, owning) = waiting?.join(here)??;
        assert_eq!((number, owning), (10, Err(ShareError::Lost)), "as it was given back last");
        left += u32::from(was_left);
    }
    assert_eq!(left, 1, "the next one is told");
    assert_eq!(*locks.get(here)?.2.read(here)?, 6);
    Ok(())
}

fn a_home_that_dies_is_an_error_of_who_waits(here: &Here<'_>) -> Checked {
    let lost = ShareError::NodeLost { node: NodeId(1) };
    type Made = (DArc<(DMutex<u64>, DAtomic<u64>)>, Sender<u64>, Receiver<u64>);
    let (shared, sender, receiver): Made = at(here, NodeId(1), (), |here, ()| {
        let (sender, receiver) = channel(here, 1)?;
        Ok::<_, ShareError>((DArc::new(here, (DMutex::new(here, 1)?, DAtomic::new(here, 2)?))?, sender, receiver))
    })??;
    let (lock, number) = shared.get(here)?;
    sender.send(here, 1).expect("there is room");
    let held = lock.lock(here)?;
    let waits =
        here.spawn_to(here.id(), (shared.try_clone(here)?, sender.try_clone(here)?), |here, (shared, sender)| {
            let sent = sender.send(here, 2);
            // The value is lost with its home, if it had been sent by then.
            let is_lost = matches!(sent, Err(SendError::Share { error: ShareError::NodeLost { .. }, .. }));
            (is_lost, shared.get(here).and_then(|shared| shared.0.lock(here).map(drop)))
        })?;
    let dies = here.spawn_to(NodeId(1), (), |_, ()| -> u8 {
        std::thread::sleep(Duration::from_millis(100));
        std::process::abort()
    })?;
    assert_eq!(dies.join(here), Err(lost.into()));
    assert_eq!(waits.join(here)?, (true, Err(lost)));
    assert_eq!((number.load(here), *held), (Err(lost), 1));
    assert_eq!(receiver.recv(here), Err(lost.into()));
    assert!(matches!(sender.send(here, 7), Err(SendError::Share { error, value: Some(7) }) if error == lost));
    Ok(())
}

fn values_arrive_once_and_in_order(here: &Here<'_>) -> Checked {
    const EACH: u64 = 60;
    for (home, bound) in here.nodes().zip([0, 1, 50]) {
        let (sender, receiver) = at(here, home, bound, channel::<(u64, u64, DBox<u64>)>)??;
        let senders = at_all(
            here,
            || sender.try_clone(here),
            2,
            |here, sender| {
                let mark = std::ptr::from_ref(here) as u64 | u64::from(here.id().0) << 56;
                for number in 0..EACH {
                    sender.send(here, (mark, number, here.alloc(number * 3)?)).map_err(|_| ShareError::Lost)?;
                }
                Ok::<_, ShareError>(())
            },
        )?;
        drop(sender);
        let count = senders.len() as u64;
        let at_node = here.nodes().last().expect("there is one");
        let received = at(here, at_node, receiver, |here, receiver| {
            let (mut last, mut received) = (std::collections::HashMap::new(), 0);
            loop {
                match receiver.recv(here) {
                    Ok((mark, number, object)) => {
                        let expected = last.entry(mark).or_insert(0);
                        assert_eq!(
                            (number, *object.get(here)?),
                            (*expected, number * 3),
                            "in order, with what it owns"
                        );
                        *expected += 1;
                        received += 1;
                    }
                    Err(RecvError::Closed) => return Ok::<u64, ShareError>(received),
                    Err(error) => panic!("{error}"),
                }
            }
        })??;
        assert_eq!(received, count * EACH);
        for sender in senders {
            sender.join(here)??;
        }
    }
    all_is_free(here)
}

fn a_channel_is_bounded_and_closes(here: &Here<'_>) -> Checked {
    for home in here.nodes() {
        let (sender, receiver) = at(here, home, (), |here, ()| channel::<DBox<u64>>(here, 2))??;
        for number in 0..2 {
            sender.try_send(here, here.alloc(number)?).expect("there is room");
        }
        let refused = sender.try_send(here, here.alloc(2)?);
        let Err(SendError::Full(back)) = refused else { panic!("{refused:?}") };
        let refused = sender.send_within(here, back, Duration::from_millis(20));
        let Err(SendError::Full(back)) = refused else { panic!("{refused:?}") };
        assert_eq!(*back.get(here)?, 2, "it is the sender's");
        let waits = here.spawn_to(NodeId(1), (sender.try_clone(here)?, back), |here, (sender, value)| {
            sender.send(here, value).map_err(|_| ShareError::Lost)
        })?;
        for number in 0..3 {
            assert_eq!(*receiver.recv(here).expect("it was sent").get(here)?, number);
        }
        waits.join(here)??;
        assert!(matches!(receiver.try_recv(here), Ok(None)));
        assert!(matches!(receiver.recv_within(here, Duration::from_millis(20)), Ok(None)));
        // What was not received is dropped with the receiver, and a sender has its value back.
        for number in 0..2 {
            sender.send(here, here.alloc(number)?).expect("there is room");
        }
        let waits = here.spawn_to(NodeId(1), sender.try_clone(here)?, |here, sender| {
            match sender.send(here, here.alloc(5)?) {
                Err(SendError::Closed(back)) => back.get(here).copied(),
                _ => Err(ShareError::Lost),
            }
        })?;
        drop(receiver);
        assert_eq!(waits.join(here)?, Ok(5));
        assert!(matches!(sender.try_send(here, here.alloc(6)?), Err(SendError::Closed(_))));
        drop(sender);

        // Without senders what is there is received.
        let (sender, receiver) = at(here, home, (), |here, ()| channel::<u64>(here, 2))??;
        let waits = here.spawn_to(NodeId(1), receiver, |here, receiver| {
            let received = [receiver.recv(here), receiver.recv(here), receiver.recv(here)];
            received.map(|received| received.ok())
        })?;
        sender.send(here, 1).expect("there is room");
        sender.send(here, 2).expect("there is room");
        drop(sender);
        assert_eq!(waits.join(here)?, [Some(1), Some(2), None]);
    }
    let (sender, _receiver) = channel::<[u8; 60_000]>(here, 1000)?;
    let mut sent = 0;
    let refused = loop {
        match sender.try_send(here, [1; 60_000]) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, SendError::Full(_)) && sent > 30, "values count as objects: {sent}");
    drop((sender, _receiver));
    all_is_free(here)
}

fn channels_go_through_channels(here: &Here<'_>) -> Checked {
    // A request carries the channel for its answer.
    let (requests, server) = channel::<(u64, Sender<u64>)>(here, 4)?;
    let serves = here.spawn_to(NodeId(1), server, |here, server| {
        let mut served = 0;
        // In the middle the receiver itself moves to another task.
        while served < 50 {
            let Ok((number, answer)) = server.recv(here) else { break };
            answer.send(here, number * 2).map_err(|_| ShareError::Lost)?;
            served += 1;
        }
        let rest = at(here, NodeId(2), server, |here, server| {
            let mut served = 0;
            while let Ok((number, answer)) = server.recv(here) {
                answer.send(here, number * 2).map_err(|_| ShareError::Lost)?;
                served += 1;
            }
            Ok::<u64, ShareError>(served)
        });
        Ok::<_, ShareError>(served + rest.map_err(|_| ShareError::Lost)??)
    })?;
    let asks = at_all(
        here,
        || requests.try_clone(here),
        1,
        |here, requests| {
            for number in 0..50 {
                let (answer, answers) = channel(here, 1)?;
                requests.send(here, (number, answer)).map_err(|_| ShareError::Lost)?;
                assert_eq!(answers.recv(here), Ok(number * 2));
            }
            Ok::<_, ShareError>(())
        },
    )?;
    drop(requests);
    for ask in asks {
        ask.join(here)??;
    }
    assert_eq!(serves.join(here)??, 150);
    all_is_free(here)
}

fn a_channel_outlives_its_ends(here: &Here<'_>) -> Checked {
    // A sender dies: what it has sent arrives, and then it is known.
    let (sender, receiver) = channel::<u64>(here, 10)?;
    let dies = at(here, NodeId(1), sender.try_clone(here)?, |here, sender| -> u8 {
        sender.send(here, 1).expect("there is room");
        std::process::abort()
    });
    assert_eq!(dies, Err(ShareError::NodeLost { node: NodeId(1) }.into()));
    assert_eq!(receiver.recv(here), Ok(1));
    assert_eq!(receiver.recv(here), Err(RecvError::SenderLost { node: NodeId(1) }));
    sender.send(here, 2).expect("others may still send");
    assert_eq!(receiver.recv(here), Ok(2));
    // A receiver waits while the sender dies.
    let waits = here.spawn_to(here.id(), receiver, |here, receiver| {
        let received = [receiver.recv(here), receiver.recv(here)];
        (received, receiver.recv_within(here, Duration::from_millis(20)))
    })?;
    let dies = here.spawn_to(NodeId(2), sender, |here, sender| -> u8 {
        sender.send(here, 3).expect("there is room");
        std::thread::sleep(Duration::from_millis(50));
        std::process::abort()
    })?;
    assert!(dies.join(here).is_err());
    // The dead nodes' senders stay counted, so the channel does not close.
    let (received, later) = waits.join(here)?;
    assert_eq!(received, [Ok(3), Err(RecvError::SenderLost { node: NodeId(2) })]);
    assert_eq!(later, Ok(None));
    // The receiver's node dies: senders have their values back.
    let (sender, receiver) = channel::<DBox<u64>>(here, 0)?;
    let dies = here.spawn_to(NodeId(3), receiver, |here, receiver| {
        let first = receiver.recv(here).map(|first| first.get(here).copied());
        std::thread::sleep(Duration::from_millis(50));
        if matches!(first, Ok(Ok(1))) {
            std::process::abort()
        }
    })?;
    sender.send(here, here.alloc(1)?).expect("it was received");
    let refused = sender.send(here, here.alloc(2)?);
    let Err(SendError::Closed(back)) = refused else { panic!("{refused:?}") };
    assert_eq!(*back.get(here)?, 2);
    assert!(dies.join(here).is_err());
    // One of two that share a receiver dies while the other one waits.
    let (sender, receiver) = channel::<u64>(here, 0)?;
    let receiver = DArc::new(here, receiver)?;
    let dies = here.spawn_to(NodeId(4), receiver.try_clone(here)?, |here, receiver| {
        let first = receiver.get(here).map(|receiver| receiver.recv(here));
        std::thread::sleep(Duration::from_millis(50));
        if first == Ok(Ok(1)) {
            std::process::abort()
        }
    })?;
    sender.send(here, 1).expect("it was received");
    let waits =
        here.spawn_to(here.id(), receiver, |here, receiver| receiver.get(here).map(|receiver| receiver.recv(here)))?;
    assert!(dies.join(here).is_err());
    // If the other one came late, the channel was closed for a moment.
    until(|| sender.send(here, 2).is_ok());
    assert_eq!(waits.join(here)?, Ok(Ok(2)));
    Ok(())
}
