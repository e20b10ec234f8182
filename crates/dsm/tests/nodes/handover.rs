//! Message passing with an object as the message: whoever learns by an edge between tasks that an object was
//! written sees what was written.
//!
//! Danger: the reader has a copy of the version before, and takes it for this one; the payload owns another
//! object, which is older than it; a value is dropped that is not the last one. The writer, the reader, the object
//! that is the edge, and the payload are at different nodes, in all rotations. Each reader has read the version
//! before.

use crate::support::{Checked, NodesTest, PATIENCE, all_is_free, at, is_deep, until};
use farfield_dsm::{
    DArc, DAtomic, DBox, DMutex, DRwLock, Far, Here, JoinError, NodeId, Receiver, Sender, ShareError, channel, scope,
};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Instant;

pub(crate) const TESTS: &[NodesTest] = &[
    ("a_payload_is_seen_after_a_message", 3, a_payload_is_seen_after_a_message),
    ("a_payload_is_seen_after_an_unlock", 3, a_payload_is_seen_after_an_unlock),
    ("a_payload_is_seen_after_an_atomic_step", 3, a_payload_is_seen_after_an_atomic_step),
    ("a_payload_is_seen_after_a_join", 3, a_payload_is_seen_after_a_join),
    ("a_payload_is_seen_after_the_last_owner_is_gone", 3, a_payload_is_seen_after_the_last_owner_is_gone),
];

fn rounds() -> u64 {
    if is_deep() { 5000 } else { 40 }
}

/// An object that owns another one, both of which say the round in which they were written.
type Payload = DBox<(u64, DBox<[u64; 40]>)>;

fn new_payload(here: &Here<'_>, (): ()) -> Result<Payload, ShareError> {
    here.alloc((0, here.alloc([0; 40])?))
}

/// Writes both, in one of two orders, or only the inner one and the outer one later.
fn write(here: &Here<'_>, payload: &mut Payload, round: u64) -> Result<(), ShareError> {
    let mut outer = payload.get_mut(here)?;
    if round.is_multiple_of(2) {
        outer.0 = round;
        outer.1.get_mut(here)?.fill(round);
    } else {
        outer.1.get_mut(here)?.fill(round);
        outer.0 = round;
    }
    Ok(())
}

/// Returns the round in which the payload was written.
fn read(here: &Here<'_>, payload: &Payload) -> Result<u64, ShareError> {
    let here = &here.enter();
    let (round, inner) = payload.get(here)?;
    assert_eq!(inner.get(here)?, &[*round; 40], "one of the two is older");
    Ok(*round)
}

/// Nodes of writer, reader, edge and payload.
fn rotations(here: &Here<'_>) -> impl Iterator<Item = [NodeId; 4]> + use<> {
    let nodes: Vec<_> = here.nodes().collect();
    (0..nodes.len() * 2).map(move |turn| {
        let second = if turn < nodes.len() { 1 } else { 2 };
        [0, second, 3 - second, second + turn].map(|more| nodes[(turn + more) % nodes.len()])
    })
}

fn a_payload_is_seen_after_a_message(here: &Here<'_>) -> Checked {
    type Ends = (Sender<Payload>, Receiver<Payload>);
    for [writer, reader, edge, home] in rotations(here) {
        let payload = at(here, home, (), new_payload)??;
        let made = |here: &Here<'_>, (): ()| Ok::<_, ShareError>((channel(here, 1)?, channel(here, 1)?));
        let ((there, from_writer), (back, from_reader)): (Ends, Ends) = at(here, edge, (), made)??;
        let writes = here.spawn_to(writer, (payload, there, from_reader, rounds()), |here, arguments| {
            let (mut payload, sender, back, rounds) = arguments;
            for round in 1..=rounds {
                write(here, &mut payload, round)?;
                sender.send(here, payload).expect("it is received");
                payload = back.recv(here).expect("it comes back");
            }
            Ok::<_, ShareError>(())
        })?;
        let reads = here.spawn_to(reader, (from_writer, back, rounds()), |here, (receiver, back, rounds)| {
            for round in 1..=rounds {
                let payload = receiver.recv(here).expect("it was sent");
                assert_eq!(read(here, &payload)?, round);
                back.send(here, payload).expect("it is received");
            }
            Ok::<_, ShareError>(())
        })?;
        writes.join(here)??;
        reads.join(here)??;
    }
    all_is_free(here)
}

fn a_payload_is_seen_after_an_unlock(here: &Here<'_>) -> Checked {
    for [writer, reader, edge, home] in rotations(here) {
        let payload = at(here, home, (), new_payload)??;
        let lock = at(here, edge, payload, |here, payload| DArc::new(here, DRwLock::new(here, payload)?))??;
        let writes = here.spawn_to(writer, (lock.try_clone(here)?, rounds()), |here, (lock, rounds)| {
            for round in 1..=rounds {
                write(here, &mut *lock.get(here)?.write(here)?, round)?;
            }
            Ok::<_, ShareError>(())
        })?;
        let reads = here.spawn_to(reader, (lock, rounds()), |here, (lock, rounds)| {
            let (mut seen, started) = (0, Instant::now());
            while seen < rounds {
                assert!(started.elapsed() < PATIENCE, "round {seen} is seen for ever");
                let round = read(here, &*lock.get(here)?.read(here)?)?;
                assert!(round >= seen, "{round} after {seen}");
                seen = round;
            }
            Ok::<_, ShareError>(())
        })?;
        writes.join(here)??;
        reads.join(here)??;
    }
    all_is_free(here)
}

fn a_payload_is_seen_after_an_atomic_step(here: &Here<'_>) -> Checked {
    /// What was written, and the last round of it that the writer has told, and that the reader has seen.
    type Told = (DMutex<Payload>, DAtomic<u64>, DAtomic<u64>);
    for [writer, reader, edge, home] in rotations(here) {
        let payload = at(here, home, (), new_payload)??;
        let told = at(here, edge, (), |here, ()| DAtomic::new(here, 0))??;
        let made = at(here, home, (payload, told), |here, (payload, told)| {
            let made: Told = (DMutex::new(here, payload)?, told, DAtomic::new(here, 0)?);
            DArc::new(here, made)
        })??;
        let writes = here.spawn_to(writer, (made.try_clone(here)?, rounds()), |here, (shared, rounds)| {
            let (lock, told, seen) = shared.get(here)?;
            for round in 1..=rounds {
                write(here, &mut *lock.lock(here)?, round)?;
                told.store(here, round)?;
                // The reader has a copy of each other version.
                until(|| round.is_multiple_of(2) || seen.load(here) == Ok(round));
            }
            Ok::<_, ShareError>(())
        })?;
        let reads = here.spawn_to(reader, (made, rounds()), |here, (shared, rounds)| {
            let (lock, told, seen) = shared.get(here)?;
            let started = Instant::now();
            loop {
                assert!(started.elapsed() < PATIENCE, "the last round is not told");
                let round = told.load(here)?;
                let found = read(here, &*lock.lock(here)?)?;
                assert!(found >= round, "{found}, and {round} was told");
                seen.store(here, round)?;
                if round == rounds {
                    return Ok::<_, ShareError>(());
                }
            }
        })?;
        writes.join(here)??;
        reads.join(here)??;
    }
    all_is_free(here)
}

fn a_payload_is_seen_after_a_join(here: &Here<'_>) -> Checked {
    for [writer, reader, _, home] in rotations(here) {
        let mut payload = at(here, home, (), new_payload)??;
        for round in 1..=rounds() / 2 {
            // It is the task's, and comes back as a result; or it is lent.
            if round.is_multiple_of(3) {
                payload = at(here, writer, (payload, round), |here, (mut payload, round)| {
                    write(here, &mut payload, round).map(|()| payload)
                })??;
            } else {
                scope(here, |s| {
                    let task = s.spawn_to(writer, (s.lend_mut(&mut payload), round), |here, (mut lent, round)| {
                        let mut outer = lent.get_mut(here)?;
                        outer.0 = round;
                        outer.1.get_mut(here)?.fill(round);
                        Ok::<_, ShareError>(())
                    })?;
                    task.join()
                })???;
            }
            let found = scope(here, |s| {
                let reads = s.spawn_to(reader, s.lend(&payload), |here, payload| {
                    let (found, inner) = payload.get(here)?;
                    assert_eq!(inner.get(here)?, &[*found; 40]);
                    Ok::<_, ShareError>(*found)
                })?;
                reads.join()
            })???;
            assert_eq!((found, read(here, &payload)?), (round, round));
        }
    }
    all_is_free(here)
}

/// Rounds of the values that were dropped at this node, added up, and their number.
static DROPPED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// A value that tells what it was when it is dropped.
#[derive(Far)]
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        DROPPED[0].fetch_add(self.0, SeqCst);
        DROPPED[1].fetch_add(1, SeqCst);
    }
}

fn dropped(here: &Here<'_>) -> Result<[u64; 2], JoinError> {
    let mut all = [0; 2];
    for node in here.nodes() {
        let of_node = at(here, node, (), |_, ()| [DROPPED[0].load(SeqCst), DROPPED[1].load(SeqCst)])?;
        all = [all[0] + of_node[0], all[1] + of_node[1]];
    }
    Ok(all)
}

fn a_payload_is_seen_after_the_last_owner_is_gone(here: &Here<'_>) -> Checked {
    /// A value under a lock, and an object that moves to whoever writes it.
    type Shared = (DMutex<Told>, DMutex<DBox<Told>>);
    let [before, mut expected] = [dropped(here)?, [0; 2]];
    for [writer, reader, edge, home] in rotations(here) {
        for round in 1..=rounds() / 8 {
            let boxed = at(here, home, (), |here, ()| here.alloc(Told(0)))??;
            let shared = at(here, edge, boxed, |here, boxed| {
                let made: Shared = (DMutex::new(here, Told(0))?, DMutex::new(here, boxed)?);
                DArc::new(here, made)
            })??;
            let body = |here: &Here<'_>, (shared, round): (DArc<Shared>, u64)| {
                let (locked, boxed) = shared.get(here)?;
                locked.lock(here)?.0 += round;
                boxed.lock(here)?.get_mut(here)?.0 += round;
                // Whose handle is the last one nobody knows.
                drop(shared);
                Ok::<_, ShareError>(())
            };
            let tasks = [writer, reader].map(|node| here.spawn_to(node, (shared.try_clone(here)?, round), body));
            drop(shared);
            for task in tasks {
                task?.join(here)??;
            }
            expected = [expected[0] + 4 * round, expected[1] + 2];
        }
    }
    // Each is dropped once, and was what both had written.
    until(|| dropped(here).is_ok_and(|now| now[1] - before[1] >= expected[1]));
    all_is_free(here)?;
    let now = dropped(here)?;
    assert_eq!([now[0] - before[0], now[1] - before[1]], expected);
    Ok(())
}
