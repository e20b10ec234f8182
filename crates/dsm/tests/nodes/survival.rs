//! Nodes that die and have a backup.
//!
//! Danger: an object that was handed over and is gone with its node, or is there in another version, or in
//! two halves; a free that is done twice; objects that nobody frees any more; a lock with two holders, or with
//! a holder that nobody knows, or whose value was not released; a value of a channel that arrives twice, or never.

use crate::owners::{Signals, look_at};
use crate::support::{
    Checked, NEAR_BYTES, NodesTest, at, is_deep, last_of, seeded, signal_process, stop_process, until,
};
use farfield_dsm::{
    DArc, DAtomic, DBox, DMutex, DRwLock, DString, DVec, Far, FarGroup, Here, Lent, NodeBuilder, NodeId, Receiver,
    RecvError, SendError, Sender, ShareError, TBox, channel, run, scope,
};
use farfield_server::{Config, Server};
use std::time::Duration;

pub(crate) const TESTS: &[NodesTest] = &[
    ("what_was_handed_over_outlives_its_node", 3, what_was_handed_over_outlives_its_node),
    ("what_was_lent_is_as_it_was_handed_over_last", 2, what_was_lent_is_as_it_was_handed_over_last),
    ("what_was_lent_further_at_its_node_is_as_it_was", 2, what_was_lent_further_at_its_node_is_as_it_was),
    ("what_a_dead_node_was_lent_comes_home", 3, what_a_dead_node_was_lent_comes_home),
    ("a_number_has_all_steps_that_were_answered", 3, a_number_has_all_steps_that_were_answered),
    ("a_step_that_was_seen_is_not_lost", 3, a_step_that_was_seen_is_not_lost),
    ("what_came_out_of_locks_and_channels_outlives_them", 2, what_came_out_of_locks_and_channels_outlives_them),
    ("a_group_outlives_its_node", 3, a_group_outlives_its_node),
    ("a_group_without_room_to_be_dropped_is_counted", 2, a_group_without_room_to_be_dropped_is_counted),
    ("a_changed_group_is_as_it_was_handed_over_last", 2, a_changed_group_is_as_it_was_handed_over_last),
    ("random_groups_are_whole_when_their_node_is_killed", 3, random_groups_are_whole_when_their_node_is_killed),
    ("a_channel_outlives_its_home", 3, a_channel_outlives_its_home),
    ("what_the_home_has_received_does_not_arrive_again", 2, what_the_home_has_received_does_not_arrive_again),
    ("waits_for_a_channel_outlive_its_home", 3, waits_for_a_channel_outlive_its_home),
    ("who_receives_at_the_home_is_gone_with_it", 3, who_receives_at_the_home_is_gone_with_it),
    ("random_values_arrive_once_when_their_home_is_killed", 3, random_values_arrive_once_when_their_home_is_killed),
    ("a_lock_outlives_its_home", 3, a_lock_outlives_its_home),
    ("a_guard_outlives_the_home_of_its_lock", 3, a_guard_outlives_the_home_of_its_lock),
    ("what_was_not_released_is_not_there", 3, what_was_not_released_is_not_there),
    ("a_lock_without_an_owner_holds_up_nobody", 3, a_lock_without_an_owner_holds_up_nobody),
    ("holders_die_before_and_after_the_home", 4, holders_die_before_and_after_the_home),
    ("a_promoted_lock_waits_for_what_dead_readers_have_lent", 4, a_promoted_lock_waits_for_what_dead_readers_have_lent),
    ("random_locks_count_right_when_their_home_is_killed", 3, random_locks_count_right_when_their_home_is_killed),
    ("what_was_freed_is_not_kept", 2, what_was_freed_is_not_kept),
    ("a_reader_in_place_meets_no_newer_version", 3, a_reader_in_place_meets_no_newer_version),
    ("promoted_objects_are_dropped_with_what_they_own", 3, promoted_objects_are_dropped_with_what_they_own),
    ("a_full_half_is_followed_by_all_objects", 2, a_full_half_is_followed_by_all_objects),
    ("random_loans_are_whole_when_their_node_is_killed", 3, random_loans_are_whole_when_their_node_is_killed),
];

/// Starts a memory server, at the URL that is returned with it.
pub(crate) fn memory_server() -> (Server, String) {
    memory_server_at("tcp://127.0.0.1:0")
}

fn memory_server_at(url: &str) -> (Server, String) {
    let server = Server::start(Config {
        listen: vec![url.parse().expect("a URL")],
        functions: farfield_wic::Registry::standard(),
        lease: Duration::ZERO,
        ..Config::default()
    });
    let server = server.expect("a server starts");
    let url = server.endpoints()[0].clone();
    (server, url)
}

const DEAD: NodeId = NodeId(1);
const LOST: ShareError = ShareError::NodeLost { node: DEAD };

/// Kills node 1, and waits until this node and the others know it.
fn kill(here: &Here<'_>) -> Checked {
    kill_node(here, DEAD)
}

/// Kills a node, and waits until this node and the others that live know it.
fn kill_node(here: &Here<'_>, dead: NodeId) -> Checked {
    let process = at(here, dead, (), |_, ()| std::process::id())?;
    kill_process(process);
    let knows = |node| {
        let tried = at(here, node, (dead,), |here, (dead,)| here.spawn_to(dead, (), |_, ()| ()).map(drop));
        match tried {
            Ok(known) => known == Err(ShareError::NodeLost { node: dead }),
            Err(error) => error == (ShareError::NodeLost { node }).into(),
        }
    };
    here.nodes().filter(|node| *node != dead).for_each(|node| until(|| knows(node)));
    Ok(())
}

/// Ends a process at once.
pub(crate) fn kill_process(process: u32) {
    signal_process(process, "-KILL");
}

#[derive(Far)]
struct Tree {
    number: u64,
    left: Option<DBox<Tree>>,
    right: Option<DBox<Tree>>,
}

impl Tree {
    fn grow(here: &Here<'_>, number: u64) -> Result<DBox<Tree>, ShareError> {
        let child = |number| if number < 64 { Tree::grow(here, number).map(Some) } else { Ok(None) };
        let (left, right) = (child(2 * number)?, child(2 * number + 1)?);
        here.alloc(Tree { number, left, right })
    }

    fn sum(&self, here: &Here<'_>) -> Result<u64, ShareError> {
        let child = |child: &Option<DBox<Tree>>| child.as_ref().map_or(Ok(0), |child| child.get(here)?.sum(here));
        Ok(self.number + child(&self.left)? + child(&self.right)?)
    }
}

fn what_was_handed_over_outlives_its_node(here: &Here<'_>) -> Checked {
    let expected: u64 = (1..64).sum();
    let (mut tree, vector, string, shared, never) = at(here, DEAD, (), |here, ()| {
        let mut vector = DVec::<u64>::with_chunk(10);
        vector.extend(here, 0..25)?;
        let mut string = DString::from_str(here, "what was ")?;
        string.push_str(here, "said")?;
        let shared = DArc::new(here, (here.alloc(7u64)?, [1u8; 3000]))?;
        let never = Tree::grow(here, 1)?;
        Ok::<_, ShareError>((Tree::grow(here, 1)?, vector, string, shared, Some(never)))
    })??;
    // Appended at this node; the chunk came here. Another vector gets longer where it was stored.
    let mut longer = at(here, DEAD, (vector,), |here, (mut vector,)| vector.extend(here, 25..28).map(|()| vector))??;
    drop(never);
    let (tree_there, other) = at(here, DEAD, (), |here, ()| (Tree::grow(here, 1), here.alloc([5u64; 200])))?;
    let (tree_there, other) = (tree_there?, other?);
    let there = at(here, NodeId(2), (tree_there,), |here, (tree,)| DArc::new(here, tree))??;
    assert_eq!(tree.home(), DEAD);
    kill(here)?;
    assert_eq!(tree.home(), NodeId(0), "it keeps what was in the backup");
    assert_eq!(tree.get(here)?.sum(here)?, expected);
    assert_eq!(
        longer.iter(here).map(|value| value.copied()).collect::<Result<Vec<_>, _>>()?,
        (0..28).collect::<Vec<_>>()
    );
    assert_eq!(string.as_str(here)?, "what was said");
    let (seven, bytes) = shared.get(here)?;
    assert_eq!((*seven.get(here)?, bytes), (7, &[1; 3000]));
    // Another node reads it, and owns a part.
    let sum = at(here, NodeId(2), (there.try_clone(here)?, shared.try_clone(here)?), |here, (there, shared)| {
        Ok::<_, ShareError>(there.get(here)?.get(here)?.sum(here)? + *shared.get(here)?.0.get(here)?)
    })??;
    assert_eq!(sum, expected + 7);
    let other = at(here, NodeId(2), (other,), |here, (mut other,)| {
        other.get_mut(here)?[3] += 1;
        Ok::<_, ShareError>(other)
    })??;
    assert_eq!((other.home(), other.get(here)?[2..4].to_vec()), (NodeId(2), vec![5, 6]));
    // It is written to here.
    let number = &mut tree.get_mut(here)?.number;
    *number += 1000;
    assert_eq!((tree.home(), tree.get(here)?.sum(here)?), (here.id(), expected + 1000));
    longer.push(here, 28)?;
    assert_eq!((longer.len(), longer.get(here, 28)?.copied()), (29, Some(28)));
    Ok(())
}

fn what_was_lent_is_as_it_was_handed_over_last(here: &Here<'_>) -> Checked {
    let mut numbers = at(here, DEAD, (), |here, ()| here.alloc([0u64; 500]))??;
    for round in 1..=20u64 {
        scope(here, |s| {
            s.spawn_to(DEAD, (s.lend_mut(&mut numbers), round), |here, (mut numbers, round)| {
                numbers.get_mut(here).map(|mut numbers| numbers.fill(round))
            })
            .map(drop)
        })??;
    }
    assert_eq!(numbers.home(), DEAD, "the last borrower's");
    // It dies in the middle of a change.
    let ended = scope(here, |s| {
        let task = s.spawn_to(DEAD, (s.lend_mut(&mut numbers),), |here, (mut numbers,)| -> () {
            numbers.get_mut(here).unwrap()[..250].fill(99);
            std::process::abort()
        })?;
        task.join()
    });
    assert_eq!(last_of(ended), Err(LOST.into()));
    until(|| numbers.home() == here.id());
    assert_eq!(numbers.get(here)?, &[20; 500]);
    numbers.get_mut(here)?[0] = 21;
    assert_eq!(numbers.get(here)?[..2], [21, 20]);
    Ok(())
}

/// The borrower has lent it to another task of its own node, which has changed it, and dies.
fn what_was_lent_further_at_its_node_is_as_it_was(here: &Here<'_>) -> Checked {
    let mut numbers = at(here, DEAD, (), |here, ()| here.alloc([3u64; 500]))??;
    let ended = scope(here, |s| {
        let task = s.spawn_to(DEAD, s.lend_mut(&mut numbers), |here, mut numbers| -> () {
            let ended = scope(here, |s| {
                let further = s.lend_mut(&mut numbers);
                let task = s.spawn_to(here.id(), further, |here, mut numbers| {
                    // Twice: it has moved by then.
                    numbers.get_mut(here).map(|mut numbers| numbers.fill(98))?;
                    numbers.get_mut(here).map(|mut numbers| numbers.fill(99))
                });
                task.and_then(|task| task.join()?)
            });
            assert_eq!((ended, numbers.get(here)), (Ok(Ok(())), Ok(&[99; 500])));
            // What is stored with this message is stored without what has changed.
            at(here, NodeId(0), here.alloc(1u64).unwrap(), |_, number| drop(number)).unwrap();
            std::process::abort()
        })?;
        task.join()
    });
    assert_eq!(last_of(ended), Err(LOST.into()));
    until(|| numbers.home() == here.id());
    assert_eq!(numbers.get(here)?, &[3; 500]);
    Ok(())
}

/// The lender's object is at a node that dies while another one has the loan.
fn what_a_dead_node_was_lent_comes_home(here: &Here<'_>) -> Checked {
    let mut pair = at(here, DEAD, (), |here, ()| Ok::<_, ShareError>((here.alloc(1u64)?, here.alloc(2u64)?)))??;
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let sum = scope(here, |s| {
        let task =
            s.spawn_to(NodeId(2), (s.lend_mut(&mut pair.0), s.lend(&pair.1)), move |here, (mut one, other)| {
                until(|| here.spawn_to(DEAD, (), |_, ()| ()).map(drop) == Err(LOST));
                *one.get_mut(here)? += 10;
                Ok::<_, ShareError>(*one.get(here)? + *other.get(here)?)
            })?;
        kill_process(process);
        task.join()
    })??;
    assert_eq!(sum, Ok(13));
    assert_eq!((*pair.0.get(here)?, *pair.1.get(here)?), (11, 2));
    Ok(())
}

fn a_number_has_all_steps_that_were_answered(here: &Here<'_>) -> Checked {
    let number = at(here, DEAD, (), |here, ()| DArc::new(here, DAtomic::new(here, 0u64)?))??;
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let answered = DArc::new(here, DAtomic::new(here, 0u64)?)?;
    let mut counts = Vec::new();
    for node in here.nodes() {
        let count = |here: &Here<'_>, (number, answered): (DArc<DAtomic<u64>>, DArc<DAtomic<u64>>)| {
            let (number, answered) = (number.get(here).unwrap(), answered.get(here).unwrap());
            let is_answered = || {
                let is_answered = number.fetch_add(here, 1).is_ok();
                if is_answered && here.id() != DEAD {
                    answered.fetch_add(here, 1).unwrap();
                }
                is_answered
            };
            // A step that is not answered is done or not.
            (0u64..).find(|_| !is_answered()).unwrap_or(u64::MAX)
        };
        counts.push(here.spawn_to(node, (number.try_clone(here)?, answered.try_clone(here)?), count)?);
    }
    until(|| answered.get(here).unwrap().load(here).unwrap() > 100);
    kill_process(process);
    // What a task of the dead node has done to its own number, and told nobody, may be lost.
    let [own, dead, other] = <[_; 3]>::try_from(counts).expect("three nodes");
    assert_eq!(dead.join(here), Err(LOST.into()));
    let (own, other) = (own.join(here)?, other.join(here)?);
    until(|| at(here, NodeId(2), (), |here, ()| here.spawn_to(DEAD, (), |_, ()| ()).map(drop)) == Ok(Err(LOST)));
    let found = number.get(here)?.load(here)?;
    assert!(found >= own + other && own + other > 0, "{found} of {own} and {other}");
    // It goes on at the node that keeps it now.
    assert_eq!(number.get(here)?.fetch_add(here, 1)?, found);
    let there = at(here, NodeId(2), (number.try_clone(here)?,), |here, (number,)| number.get(here)?.load(here))?;
    assert_eq!(there?, found + 1);
    Ok(())
}

/// A node changes its own number and tells of it in another way. What it has told is so afterwards.
fn a_step_that_was_seen_is_not_lost(here: &Here<'_>) -> Checked {
    let number = at(here, DEAD, (), |here, ()| DArc::new(here, DAtomic::new(here, 0u64)?))??;
    let seen = DArc::new(here, DAtomic::new(here, 0u64)?)?;
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let tells = here.spawn_to(DEAD, (number.try_clone(here)?, seen.try_clone(here)?), |here, (number, seen)| {
        for step in 1..u64::MAX {
            number.get(here).unwrap().store(here, step).unwrap();
            seen.get(here).unwrap().store(here, step).unwrap();
        }
    })?;
    until(|| seen.get(here).unwrap().load(here).unwrap() > 200);
    kill_process(process);
    assert_eq!(tells.join(here), Err(LOST.into()));
    let (found, seen) = (number.get(here)?.load(here)?, seen.get(here)?.load(here)?);
    assert!(found == seen || found == seen + 1, "{found}, and {seen} was seen");
    Ok(())
}

fn what_came_out_of_locks_and_channels_outlives_them(here: &Here<'_>) -> Checked {
    let (lock, received) = at(here, DEAD, (), |here, ()| {
        let lock = DArc::new(here, DMutex::new(here, Some(Tree::grow(here, 1)?))?)?;
        let (sender, receiver) = channel(here, 4)?;
        assert!(sender.send(here, Tree::grow(here, 32)?).is_ok() && sender.send(here, Tree::grow(here, 16)?).is_ok());
        Ok::<_, ShareError>((lock, receiver))
    })??;
    let tree = lock.get(here)?.lock(here)?.take().expect("a tree");
    let small = received.recv(here).expect("a tree");
    // What a node sends to another one's channel and lock.
    let (sender, receiver) = channel::<DBox<Tree>>(here, 1)?;
    let own = DArc::new(here, DMutex::new(here, None::<DBox<Tree>>)?)?;
    at(here, DEAD, (sender, own.try_clone(here)?), |here, (sender, own)| {
        *own.get(here).unwrap().lock(here).unwrap() = Some(Tree::grow(here, 1).unwrap());
        sender.send(here, Tree::grow(here, 8).unwrap()).unwrap();
    })?;
    let sent = receiver.recv(here).expect("a tree");
    until(|| own.get(here).unwrap().lock(here).unwrap().is_some());
    kill(here)?;
    let sums = [(&tree, 2016), (&small, 32), (&sent, 8 + 16 + 17 + (32..36).sum::<u64>())];
    for (tree, expected) in sums {
        assert_eq!(tree.get(here)?.sum(here)?, expected);
    }
    assert_eq!(own.get(here)?.lock(here)?.as_ref().expect("a tree").get(here)?.sum(here)?, 2016);
    Ok(())
}

/// A node receives a value from its own channel, changes it in its block, and dies: it has told nobody, so the value is
/// in the channel as it was sent. Another node has mapped the memory of the dead one, in which the newer version lies, and
/// hears of the death by nothing but the message that brings it the value.
fn a_reader_in_place_meets_no_newer_version(here: &Here<'_>) -> Checked {
    type Ends = (Sender<DBox<[u64; 300]>>, Receiver<DBox<[u64; 300]>>);
    const READER: NodeId = NodeId(2);
    let (ends, other) = at(here, DEAD, (), |here, ()| {
        let ends: DArc<Ends> = DArc::new(here, channel(here, 1)?)?;
        assert!(ends.get(here)?.0.send(here, here.alloc([1; 300])?).is_ok());
        Ok::<_, ShareError>((ends, here.alloc([7u64; 300])?))
    })??;
    let (reader, fetches, held_up) = at(here, READER, (other,), |here, (other,)| {
        assert_eq!(other.get(here), Ok(&[7; 300]));
        let held_up: [DBox<u64>; 1000] = std::array::from_fn(|_| here.alloc(0).expect("there is room"));
        Ok::<_, ShareError>((std::process::id(), here.stats().fetches, held_up))
    })??;
    // What this node tells the reader in the background waits behind frees, the first of which the reader does not answer.
    stop_process(reader);
    let frees = here.stats().frees;
    drop(held_up);
    until(|| here.stats().frees > frees);
    let changed = at(here, DEAD, (ends.try_clone(here)?,), |here, (ends,)| -> () {
        let mut value = ends.get(here).unwrap().1.recv(here).unwrap();
        value.get_mut(here).unwrap().fill(2);
        assert_eq!(value.home(), DEAD, "it is changed where it was stored");
        std::process::abort()
    });
    assert_eq!(changed, Err(LOST.into()));
    let value = ends.get(here)?.1.recv(here).expect("nobody has received it");
    // It goes on when the message is on its way. If it went on earlier, it would be told in the background.
    let goes_on = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        signal_process(reader, "-CONT");
    });
    let read =
        at(here, READER, (value,), |here, (value,)| Ok::<_, ShareError>((*value.get(here)?, here.stats().fetches)));
    let (read, fetches_since) = read??;
    goes_on.join().expect("it does not panic");
    assert_eq!(read, [1; 300]);
    assert_eq!(fetches_since, fetches + 1, "it comes from who keeps it since");
    Ok(())
}

/// The rest of the promise: an error, at once.
/// A list whose links own an object and a lock each.
#[derive(FarGroup)]
struct Link {
    number: u64,
    owned: DBox<u64>,
    lock: DMutex<u64>,
    next: Option<TBox<Link>>,
}

impl Link {
    /// Makes a list of these numbers.
    fn list(here: &Here<'_>, numbers: impl DoubleEndedIterator<Item = u64>) -> Result<DBox<Link>, ShareError> {
        let mut next = None;
        for number in numbers.rev() {
            let next_link = next.take().map(|link| here.tie(link)).transpose()?;
            let (owned, lock) = (here.alloc(number)?, DMutex::new(here, number)?);
            next = Some(Link { number, owned, lock, next: next_link });
        }
        here.alloc(next.expect("a number"))
    }

    /// Returns the numbers of all links, and checks what they own.
    fn numbers(&self, here: &Here<'_>) -> Result<Vec<u64>, ShareError> {
        std::iter::successors(Some(self), |link| link.next.as_deref())
            .map(|link| {
                assert_eq!((*link.owned.get(here)?, *link.lock.lock(here)?), (link.number, link.number));
                Ok(link.number)
            })
            .collect()
    }
}

fn a_group_outlives_its_node(here: &Here<'_>) -> Checked {
    let make = |here: &Here<'_>, (): ()| {
        let long = (0..9000u64).rev().try_fold(None, |next, number| {
            let next: Option<TBox<Plain>> = next;
            here.tie(Plain { number, next }).map(Some)
        })?;
        let lists = [Link::list(here, 0..50)?, Link::list(here, 100..150)?, Link::list(here, 200..250)?];
        Ok::<_, ShareError>((here.alloc(Plain { number: 9000, next: long })?, lists))
    };
    let (long, [read, mut written, dropped]) = at(here, DEAD, (), make)??;
    // A group in an object, and one at another node, whose links are at the dead one.
    let nested = at(here, DEAD, (), |here, ()| here.alloc((Link::list(here, 300..310)?, 1u64)))??;
    assert_eq!(long.home(), DEAD);
    kill(here)?;
    assert_eq!(read.home(), NodeId(0));
    assert_eq!(read.get(here)?.numbers(here)?, (0..50).collect::<Vec<_>>());
    assert_eq!(nested.get(here)?.0.get(here)?.numbers(here)?, (300..310).collect::<Vec<_>>());
    // It comes in pieces to another node.
    let (long, count) = at(here, NodeId(2), (long,), |here, (long,)| {
        let links = std::iter::successors(Some(long.get(here)?), |link| link.next.as_deref());
        let mut numbers = links.map(|link| link.number);
        assert_eq!(numbers.next(), Some(9000));
        let is_right = numbers.by_ref().eq(0..9000);
        Ok::<_, ShareError>((long, is_right))
    })??;
    assert!(count);
    // It is written to here and there, and comes with all that is tied to it.
    written = at(here, NodeId(2), (written,), |here, (mut written,)| {
        let mut first = written.get_mut(here)?;
        first.number = 99;
        *first.owned.get_mut(here)? = 99;
        *first.lock.lock(here)? = 99;
        assert_eq!(written.home(), here.id());
        Ok::<_, ShareError>(written)
    })??;
    written.get_mut(here)?.next.as_mut().expect("a second one").next = None;
    assert_eq!(written.get(here)?.numbers(here)?, [99, 101]);
    // All that nobody owns any more is dropped, once, with what it owns.
    drop((read, dropped, nested, written, long));
    until(|| here.stats().promoted_objects == 0 && here.stats().object_bytes == 0);
    until(|| at(here, NodeId(2), (), |here, ()| here.stats().object_bytes) == Ok(0));
    assert_eq!((here.stats().late_frees, here.stats().orphans), (0, 0));
    Ok(())
}

/// A list of numbers.
#[derive(FarGroup)]
struct Plain {
    number: u64,
    next: Option<TBox<Plain>>,
}

fn a_group_without_room_to_be_dropped_is_counted(here: &Here<'_>) -> Checked {
    let list = at(here, DEAD, (), |here, ()| Link::list(here, 0..50))??;
    kill(here)?;
    let mut large = Vec::new();
    large.extend(std::iter::from_fn(|| here.alloc([0u8; 100_000]).ok()));
    let mut small = Vec::new();
    small.extend(std::iter::from_fn(|| here.alloc([0u8; 16]).ok()));
    // It is read all the same.
    assert_eq!(list.get(here)?.next.as_ref().map(|next| next.number), Some(1));
    let before = here.stats();
    assert_eq!(before.promoted_objects, 101, "the list, and 50 objects and locks");
    drop(list);
    until(|| here.stats().promoted_objects == 100);
    until(|| here.stats().orphans == before.orphans + 1);
    drop((large, small));
    Ok(())
}

fn a_changed_group_is_as_it_was_handed_over_last(here: &Here<'_>) -> Checked {
    let mut list = at(here, DEAD, (), |here, ()| here.alloc(Plain { number: 0, next: None }))??;
    for number in 1..=20u64 {
        // It gets longer in place.
        list = at(here, DEAD, (list, number), |here, (mut list, number)| {
            let mut first = list.get_mut(here)?;
            let next = first.next.take();
            let link = Plain { number: first.number, next };
            (first.number, first.next) = (number, Some(here.tie(link)?));
            Ok::<_, ShareError>(list)
        })??;
        assert_eq!(list.home(), DEAD);
    }
    // A task of the dead node changes it while it is lent: it is lost, as without a backup.
    let mut lent = at(here, DEAD, (), |here, ()| here.alloc(Plain { number: 5, next: None }))??;
    let ended = scope(here, |s| {
        let task = s.spawn_to(DEAD, (s.lend_mut(&mut lent),), |here, (mut lent,)| -> () {
            lent.get_mut(here).unwrap().number = 6;
            std::process::abort()
        })?;
        task.join()
    });
    assert_eq!(last_of(ended), Err(LOST.into()));
    until(|| list.home() == here.id());
    let links = std::iter::successors(Some(list.get(here)?), |link| link.next.as_deref());
    assert!(links.map(|link| link.number).eq((0..=20).rev()));
    assert_eq!(lent.get(here).map(drop), Err(ShareError::Lost));
    Ok(())
}

/// Tasks of two nodes own lists for a while and change them, and one of the two is killed at any moment.
fn random_groups_are_whole_when_their_node_is_killed(here: &Here<'_>) -> Checked {
    let mut random = seeded(std::time::UNIX_EPOCH.elapsed().map_or(1, |since| u64::from(since.subsec_nanos())));
    eprintln!("seed {} (FARFIELD_SEED)", random.get_seed());
    let mut lists = Vec::new();
    for first in 0..8u64 {
        lists.push((Link::list(here, first..first + 3)?, (first..first + 3).collect::<Vec<_>>()));
    }
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let pause = Duration::from_millis(random.u64(1..80));
    let killer = std::thread::spawn(move || {
        std::thread::sleep(pause);
        kill_process(process);
    });
    let rounds = if is_deep() { 400 } else { 60u64 };
    for round in 0..rounds {
        let mut tasks = Vec::new();
        for (list, mut twin) in core::mem::take(&mut lists) {
            let (node, is_longer) = (NodeId(random.u16(0..3)), twin.len() < 2 || random.bool());
            let body = |here: &Here<'_>, (mut list, number, is_longer): (DBox<Link>, u64, bool)| {
                let mut first = list.get_mut(here)?;
                if is_longer {
                    let (owned, lock) = (here.alloc(number)?, DMutex::new(here, number)?);
                    let next = first.next.take();
                    let link = Link { number, owned, lock, next };
                    first.next = Some(here.tie(link)?);
                } else {
                    let second = first.next.take().expect("two links");
                    *first = second.into_inner();
                }
                Ok::<_, ShareError>(list)
            };
            // The list of a task that dies is nobody's.
            if let Ok(task) = here.spawn_to(node, (list, 1000 + round, is_longer), body) {
                if is_longer {
                    twin.insert(1, 1000 + round);
                } else {
                    twin.remove(0);
                }
                tasks.push((task, twin));
            }
        }
        for (task, twin) in tasks {
            match task.join(here) {
                Ok(list) => lists.push((list?, twin)),
                Err(error) => assert_eq!(error, LOST.into()),
            }
        }
        for (list, twin) in &lists {
            assert_eq!(&list.get(here)?.numbers(here)?, twin, "round {round}");
        }
    }
    killer.join().expect("it does not panic");
    until(|| here.spawn_to(DEAD, (), |_, ()| ()).map(drop) == Err(LOST));
    for (list, twin) in &lists {
        assert_eq!(&list.get(here)?.numbers(here)?, twin);
    }
    Ok(())
}

/// Values of three nodes, with what they own, in their order.
fn a_channel_outlives_its_home(here: &Here<'_>) -> Checked {
    type Ends = (Sender<(u64, DBox<Tree>)>, Receiver<(u64, DBox<Tree>)>);
    let (sender, receiver) = at(here, DEAD, (), |here, ()| -> Result<Ends, ShareError> {
        let (sender, receiver) = channel(here, 20)?;
        // Before anybody else knows it.
        sender.send(here, (0, Tree::grow(here, 32)?)).unwrap();
        sender.send(here, (1, Tree::grow(here, 16)?)).unwrap();
        Ok((sender, receiver))
    })??;
    for (node, first) in [(NodeId(2), 2u64), (here.id(), 4), (DEAD, 6)] {
        let send = |here: &Here<'_>, (sender, first): (Sender<(u64, DBox<Tree>)>, u64)| {
            for number in [first, first + 1] {
                sender.send(here, (number, Tree::grow(here, 8).unwrap())).unwrap();
            }
        };
        at(here, node, (sender.try_clone(here)?, first), send)?;
    }
    let sum =
        |here: &Here<'_>, (number, tree): (u64, DBox<Tree>)| Ok::<_, ShareError>((number, tree.get(here)?.sum(here)?));
    let eights = 8 + 16 + 17 + (32..36).sum::<u64>();
    let receive = || sum(here, receiver.recv(here).expect("a value"));
    assert_eq!(receive()?, (0, 32));
    kill(here)?;
    assert_eq!(receive()?, (1, 16 + 32 + 33));
    for number in 2..6 {
        assert_eq!(receive()?, (number, eights), "of a node that lives");
    }
    // What was received by this node before the home died is not there any more; what is left goes on.
    let (receiver, rest) = at(here, NodeId(2), (receiver,), |here, (receiver,)| {
        let first = receiver.recv(here).expect("a value");
        let number = first.0;
        first.1.get(here)?;
        Ok::<_, ShareError>((receiver, number))
    })??;
    assert_eq!(rest, 6);
    let receive = || receiver.recv(here);
    assert_eq!(sum(here, receive().expect("a value"))?, (7, eights));
    // Its home has sent, and is gone: it is said once, after all that it has sent.
    assert!(matches!(receive(), Err(RecvError::SenderLost { node: DEAD })));
    let again = sender.try_clone(here)?;
    at(here, NodeId(2), (again,), |here, (sender,)| sender.send(here, (9, Tree::grow(here, 40).unwrap())).is_ok())?;
    assert_eq!(receive().map(|(number, _)| number).expect("a value"), 9);
    assert!(receiver.try_recv(here).expect("it is open").is_none());
    // What nobody receives is dropped, and comes back from then on.
    sender.send(here, (10, Tree::grow(here, 32)?)).unwrap();
    let before = here.stats().object_bytes;
    drop(receiver);
    until(|| matches!(sender.try_send(here, (11, Tree::grow(here, 64).unwrap())), Err(SendError::Closed((11, _)))));
    until(|| here.stats().object_bytes < before);
    Ok(())
}

/// Tasks of a channel's home receive one value after the other, and say so. Nothing else has changed there.
fn what_the_home_has_received_does_not_arrive_again(here: &Here<'_>) -> Checked {
    let (sender, mut receiver) = at(here, DEAD, (), |here, ()| channel::<u64>(here, 8))??;
    (1..=4).for_each(|number| sender.send(here, number).expect("there is room"));
    for expected in 1..=3 {
        let received = at(here, DEAD, (receiver,), |here, (receiver,)| {
            let number = receiver.recv(here);
            (number, receiver)
        })?;
        assert_eq!(received.0, Ok(expected));
        receiver = received.1;
    }
    kill(here)?;
    assert_eq!(receiver.recv(here), Ok(4));
    Ok(())
}

/// Senders to a full channel and receivers of an empty one wait on where it is kept since.
fn waits_for_a_channel_outlive_its_home(here: &Here<'_>) -> Checked {
    for bound in [0usize, 2] {
        // Only the first round kills, so the channel of the second one is at another node.
        let home = if bound == 0 { DEAD } else { NodeId(2) };
        let make =
            |here: &Here<'_>, (bound,): (usize,)| Ok::<_, ShareError>((channel(here, bound)?, channel(here, bound)?));
        let ((to_full, full), (to_empty, empty)) = at(here, home, (bound,), make)??;
        let (began, begun) = channel::<u64>(here, 8)?;
        let mut senders = Vec::new();
        for first in 0..2u64 {
            let send = |here: &Here<'_>, (sender, began, first): (Sender<u64>, Sender<u64>, u64)| {
                began.send(here, first).unwrap();
                (0..5).for_each(|number| sender.send(here, 10 * first + number).unwrap());
            };
            senders.push(here.spawn_to(here.id(), (to_full.try_clone(here)?, began.try_clone(here)?, first), send)?);
        }
        let receive = |here: &Here<'_>, (receiver, began): (Receiver<u64>, Sender<u64>)| {
            began.send(here, 9).unwrap();
            let all: Vec<u64> = (0..3).map(|_| receiver.recv(here).unwrap()).collect();
            (all[0], all[1], all[2])
        };
        let receiver = here.spawn_to(here.id(), (empty, began.try_clone(here)?), receive)?;
        for _ in 0..3 {
            begun.recv(here).expect("a task");
        }
        let short = Duration::from_millis(30);
        assert!(matches!(to_full.send_within(here, 99, short), Err(SendError::Full(99))));
        kill_node(here, home)?;
        assert!(matches!(to_full.send_within(here, 99, short), Err(SendError::Full(99))));
        let mut received = Vec::new();
        while received.len() < 10 {
            received.push(full.recv(here).expect("a value"));
        }
        assert!(full.recv_within(here, short).expect("it is open").is_none(), "{received:?}");
        for first in [0, 10] {
            let of: Vec<u64> = received.iter().copied().filter(|number| number / 10 == first / 10).collect();
            assert_eq!(of, (first..first + 5).collect::<Vec<_>>());
        }
        senders.into_iter().try_for_each(|task| task.join(here))?;
        (1..4).for_each(|number| to_empty.send(here, number).unwrap());
        assert_eq!(receiver.join(here)?, (1, 2, 3));
        drop(to_full);
        assert!(full.recv_within(here, short).expect("it does not close").is_none());
    }
    Ok(())
}

fn who_receives_at_the_home_is_gone_with_it(here: &Here<'_>) -> Checked {
    let (sender, receiver) = at(here, DEAD, (), |here, ()| channel::<u64>(here, 4))??;
    let (took, taken) = channel::<u64>(here, 1)?;
    let (never, wait) = channel::<u64>(here, 1)?;
    let task = here.spawn_to(
        DEAD,
        (receiver, took, wait),
        |here, (receiver, took, wait): (Receiver<u64>, Sender<u64>, Receiver<u64>)| {
            took.send(here, receiver.recv(here).unwrap()).unwrap();
            let _ = wait.recv(here);
        },
    )?;
    (1..4).for_each(|number| sender.send(here, number).unwrap());
    assert_eq!(taken.recv(here), Ok(1));
    kill(here)?;
    assert_eq!(task.join(here), Err(LOST.into()));
    for node in [here.id(), NodeId(2)] {
        let closed =
            |here: &Here<'_>, (sender,): (Sender<u64>,)| matches!(sender.send(here, 5), Err(SendError::Closed(5)));
        assert!(at(here, node, (sender.try_clone(here)?,), closed)?, "as if its node had been another one");
    }
    drop(never);
    Ok(())
}

/// Tasks of all nodes send and receive while the home is killed at any moment.
fn random_values_arrive_once_when_their_home_is_killed(here: &Here<'_>) -> Checked {
    type Numbered = (u64, DBox<u64>);
    let mut random = seeded(std::time::UNIX_EPOCH.elapsed().map_or(1, |since| u64::from(since.subsec_nanos())));
    eprintln!("seed {} (FARFIELD_SEED)", random.get_seed());
    let bound = random.usize(..5);
    let (sender, receiver) = at(here, DEAD, (bound,), |here, (bound,)| channel::<Numbered>(here, bound))??;
    let receiver = DArc::new(here, receiver)?;
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let rounds = if is_deep() { 3000 } else { 200u64 };
    let send = |here: &Here<'_>, (sender, rounds): (Sender<Numbered>, u64)| {
        let node = u64::from(here.id().0);
        for round in 1..=rounds {
            let number = node << 32 | round;
            sender.send(here, (number, here.alloc(number)?)).unwrap();
        }
        Ok::<_, ShareError>(())
    };
    // Two tasks at each of two nodes receive until they are told that there is no more.
    let receive = |here: &Here<'_>, (receiver,): (DArc<Receiver<Numbered>>,)| {
        let mut all = DVec::<u64>::new();
        loop {
            match receiver.get(here)?.recv(here) {
                Ok((u64::MAX, _)) => return Ok::<_, ShareError>(all),
                Ok((number, owned)) => {
                    assert_eq!(*owned.get(here)?, number);
                    all.push(here, number)?;
                }
                Err(RecvError::SenderLost { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let mut receivers = Vec::new();
    for node in [here.id(), NodeId(2), here.id(), NodeId(2)] {
        receivers.push(here.spawn_to(node, (receiver.try_clone(here)?,), receive)?);
    }
    let mut senders = Vec::new();
    for node in here.nodes() {
        let rounds = if node == DEAD { u64::MAX } else { rounds };
        senders.push(here.spawn_to(node, (sender.try_clone(here)?, rounds), send)?);
    }
    let pause = Duration::from_millis(random.u64(1..200));
    let killer = std::thread::spawn(move || {
        std::thread::sleep(pause);
        kill_process(process);
    });
    let [own, dead, other] = <[_; 3]>::try_from(senders).expect("three nodes");
    own.join(here)??;
    other.join(here)??;
    killer.join().expect("it does not panic");
    assert_eq!(dead.join(here), Err(LOST.into()));
    let mut all = Vec::new();
    for _ in &receivers {
        sender.send(here, (u64::MAX, here.alloc(0)?)).expect("they receive");
    }
    for task in receivers {
        let received = task.join(here)??;
        let received = received.iter(here).map(|number| number.copied()).collect::<Result<Vec<_>, _>>()?;
        for node in 0..3 {
            let of: Vec<_> = received.iter().filter(|number| **number >> 32 == node).collect();
            assert!(of.is_sorted(), "in order: {of:?}");
        }
        all.extend(received);
    }
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "a value arrived twice");
    for node in [0u64, 2] {
        let of: Vec<_> =
            all.iter().filter(|number| **number >> 32 == node).map(|number| number & 0xffff_ffff).collect();
        assert_eq!(of, (1..=rounds).collect::<Vec<_>>(), "of node {node}");
    }
    // Of the dead node's values none is missing before one that arrived.
    let of: Vec<_> = all.iter().filter(|number| **number >> 32 == 1).map(|number| number & 0xffff_ffff).collect();
    assert_eq!(of, (1..=of.len() as u64).collect::<Vec<_>>());
    Ok(())
}

/// Values that were released at three nodes, one of them in place, and what they own.
fn a_lock_outlives_its_home(here: &Here<'_>) -> Checked {
    let (numbers, trees, read, moved) = at(here, DEAD, (), |here, ()| {
        let numbers = DArc::new(here, DMutex::new(here, [0u64; 3])?)?;
        let trees = DArc::new(here, DMutex::new(here, [Some(Tree::grow(here, 1)?), None])?)?;
        // A lock that is handed over with its owner, and one in an object under a lock.
        let within = DMutex::new(here, here.alloc(DMutex::new(here, 5u64)?)?)?;
        Ok::<_, ShareError>((numbers, trees, DArc::new(here, DRwLock::new(here, 7u64)?)?, within))
    })??;
    for node in here.nodes() {
        at(here, node, (numbers.try_clone(here)?, trees.try_clone(here)?), |here, (numbers, trees)| {
            numbers.get(here)?.lock(here)?[usize::from(here.id().0)] = 10 + u64::from(here.id().0);
            let mut trees = trees.get(here)?.lock(here)?;
            let tree = trees[0].as_mut().expect("a tree");
            tree.get_mut(here)?.number += 100;
            // It came here with the borrow, what it owns did not.
            assert_eq!(tree.home(), here.id());
            if here.id() == DEAD {
                trees[1] = Some(Tree::grow(here, 32)?);
            }
            Ok::<_, ShareError>(())
        })??;
    }
    assert_eq!(numbers.get(here)?.home(), DEAD);
    kill(here)?;
    let (numbers_lock, trees_lock) = (numbers.get(here)?, trees.get(here)?);
    assert_eq!(numbers_lock.home(), NodeId(0), "it keeps what was in the backup");
    let guard = numbers_lock.lock(here)?;
    assert_eq!((*guard, guard.was_left()), ([10, 11, 12], false));
    drop(guard);
    let mut guard = trees_lock.lock(here)?;
    let sums = [guard[0].as_ref(), guard[1].as_ref()].map(|tree| tree.expect("a tree").get(here)?.sum(here));
    assert_eq!(sums, [Ok(2016 + 300), Ok(32)]);
    guard[1] = None;
    drop(guard);
    assert_eq!(*moved.lock(here)?.get(here)?.lock(here)?, 5);
    // Others go on with it, and a body runs where it is.
    for _ in 0..3 {
        let changed =
            at(here, NodeId(2), (numbers.try_clone(here)?, read.try_clone(here)?), |here, (numbers, read)| {
                numbers.get(here)?.lock(here)?[2] += 1;
                *read.get(here)?.write(here)? += 1;
                let shared = (read.get(here)?.read(here)?, read.get(here)?.read(here)?);
                Ok::<_, ShareError>(*shared.0 + *shared.1)
            });
        changed??;
    }
    assert_eq!((numbers_lock.lock(here)?[2], *read.get(here)?.read(here)?), (15, 10));
    assert_eq!(numbers_lock.with(here, 5u64, |numbers, more| numbers.map(|number| number + more))?, [15, 16, 20]);
    // One that has an owner is dropped with what it owns.
    let before = here.stats().promoted_objects;
    drop(moved);
    until(|| here.stats().promoted_objects == before - 3);
    Ok(())
}

/// Nobody else has the lock until the guard is dropped, and its value is there then.
fn a_guard_outlives_the_home_of_its_lock(here: &Here<'_>) -> Checked {
    type Pair = (u64, DBox<u64>);
    let make = |here: &Here<'_>, (): ()| {
        let pair = DMutex::new(here, (1u64, here.alloc(10u64)?))?;
        Ok::<_, ShareError>((DArc::new(here, pair)?, DArc::new(here, DRwLock::new(here, 5u64)?)?))
    };
    let (pair, read) = at(here, DEAD, (), make)??;
    let (took, taken) = channel::<u64>(here, 4)?;
    let (go, wait) = channel::<u64>(here, 4)?;
    type Holder = (DArc<DMutex<Pair>>, DArc<DRwLock<u64>>, Sender<u64>, Receiver<u64>);
    let hold = |here: &Here<'_>, (pair, read, took, wait): Holder| {
        let (mut pair, number) = (pair.get(here)?.lock(here)?, read.get(here)?.read(here)?);
        took.send(here, 1).unwrap();
        let more = wait.recv(here).unwrap();
        pair.0 += more;
        *pair.1.get_mut(here)? += more;
        Ok::<_, ShareError>(*number)
    };
    let shared = (pair.try_clone(here)?, read.try_clone(here)?, took.try_clone(here)?, wait);
    let holder = here.spawn_to(NodeId(2), shared, hold)?;
    assert_eq!(taken.recv(here), Ok(1));
    // These wait, some before the home dies and some after it.
    let add = |here: &Here<'_>, (pair, took): (DArc<DMutex<Pair>>, Sender<u64>)| {
        took.send(here, 2).unwrap();
        let mut pair = pair.get(here)?.lock(here)?;
        assert!(pair.0 >= 41 && *pair.1.get(here)? == pair.0 + 9 && !pair.was_left(), "{pair:?}");
        pair.0 += 1;
        *pair.1.get_mut(here)? += 1;
        Ok::<_, ShareError>(())
    };
    let mut waiters = Vec::new();
    for node in [here.id(), NodeId(2)] {
        waiters.push(here.spawn_to(node, (pair.try_clone(here)?, took.try_clone(here)?), add)?);
        assert_eq!(taken.recv(here), Ok(2));
    }
    // A writer waits for the reader.
    let write = here.spawn_to(here.id(), (read.try_clone(here)?,), |here, (read,)| {
        *read.get(here)?.write(here)? += 1;
        Ok::<_, ShareError>(())
    })?;
    assert!(pair.get(here)?.lock_within(here, Duration::from_millis(30))?.is_none());
    kill(here)?;
    let short = Duration::from_millis(30);
    for node in [here.id(), NodeId(2)] {
        let busy = |here: &Here<'_>, (pair, short): (DArc<DMutex<Pair>>, Duration)| {
            let pair = pair.get(here)?;
            Ok::<_, ShareError>(pair.try_lock(here)?.is_none() && pair.lock_within(here, short)?.is_none())
        };
        assert_eq!(at(here, node, (pair.try_clone(here)?, short), busy)?, Ok(true));
    }
    go.send(here, 40).unwrap();
    assert_eq!(holder.join(here)?, Ok(5));
    for waiter in waiters {
        waiter.join(here)??;
    }
    write.join(here)??;
    let guard = pair.get(here)?.lock(here)?;
    assert_eq!((guard.0, *guard.1.get(here)?, guard.was_left()), (43, 52, false));
    assert_eq!(*read.get(here)?.read(here)?, 6);
    Ok(())
}

/// Tasks of the home that hold locks of it when it dies.
fn what_was_not_released_is_not_there(here: &Here<'_>) -> Checked {
    type Locks = (DMutex<[u64; 50]>, DMutex<DBox<u64>>, DRwLock<u64>);
    let locks = at(here, DEAD, (), |here, ()| {
        let owning = DMutex::new(here, here.alloc(1u64)?)?;
        DArc::new(here, (DMutex::new(here, [1u64; 50])?, owning, DRwLock::new(here, 1u64)?))
    })??;
    locks.get(here)?.0.lock(here)?[0] = 2;
    let (took, taken) = channel::<u64>(here, 1)?;
    let (never, wait) = channel::<u64>(here, 1)?;
    let holder = here.spawn_to(
        DEAD,
        (locks.try_clone(here)?, took, wait),
        |here, (locks, took, wait): (DArc<Locks>, Sender<u64>, Receiver<u64>)| {
            let (plain, owning, read) = locks.get(here).unwrap();
            // One change is released, the next one is not.
            plain.lock(here).unwrap()[1] = 3;
            let (mut plain, mut owning) = (plain.lock(here).unwrap(), owning.lock(here).unwrap());
            let _read = read.read(here).unwrap();
            plain.fill(99);
            *owning.get_mut(here).unwrap() = 99;
            took.send(here, 1).unwrap();
            plain[0] = wait.recv(here).unwrap_or(98);
        },
    )?;
    assert_eq!(taken.recv(here), Ok(1));
    let (plain, owning, read) = locks.get(here)?;
    assert!(plain.try_lock(here)?.is_none() && owning.try_lock(here)?.is_none());
    kill(here)?;
    assert_eq!(holder.join(here), Err(LOST.into()));
    let guard = plain.lock(here)?;
    assert_eq!((&guard[..3], guard.was_left()), (&[2, 3, 1][..], true));
    drop(guard);
    assert!(!plain.lock(here)?.was_left());
    assert_eq!(owning.lock(here).map(drop), Err(ShareError::Lost));
    let at_other = at(here, NodeId(2), (locks.try_clone(here)?,), |here, (locks,)| {
        locks.get(here)?.1.lock_within(here, Duration::from_secs(60)).map(drop)
    })?;
    assert_eq!(at_other, Err(ShareError::Lost));
    // A reader leaves nothing.
    let guard = read.write(here)?;
    assert_eq!((*guard, guard.was_left()), (1, false));
    drop(never);
    Ok(())
}

/// A task forgets its guard and drops the lock. It ends after the home has died.
fn a_lock_without_an_owner_holds_up_nobody(here: &Here<'_>) -> Checked {
    let (lock, other) = at(here, DEAD, (), |here, ()| {
        let owned = here.alloc(1u64)?;
        Ok::<_, ShareError>((DMutex::new(here, owned)?, DArc::new(here, DMutex::new(here, 2u64)?)?))
    })??;
    let (took, taken) = channel::<u64>(here, 1)?;
    let (go, wait) = channel::<u64>(here, 1)?;
    type Holder = (DMutex<DBox<u64>>, Sender<u64>, Receiver<u64>, DArc<DMutex<u64>>);
    let hold = |here: &Here<'_>, (lock, took, wait, other): Holder| {
        core::mem::forget(lock.lock(here)?);
        drop(lock);
        took.send(here, 1).unwrap();
        *other.get(here)?.lock(here)? += wait.recv(here).unwrap();
        Ok::<_, ShareError>(())
    };
    let holder = here.spawn_to(NodeId(2), (lock, took, wait, other.try_clone(here)?), hold)?;
    assert_eq!(taken.recv(here), Ok(1));
    kill(here)?;
    go.send(here, 40).unwrap();
    holder.join(here)??;
    assert_eq!(*other.get(here)?.lock(here)?, 42);
    // The other lock and its owner's object, and at most this one with what it owns.
    assert!(here.stats().promoted_objects <= 4, "{:?}", here.stats());
    assert_eq!(here.stats().late_frees, 0);
    Ok(())
}

/// Locks of node 1 that nodes 2 and 3 hold. Node 3 dies before node 1, and node 2 after it.
fn holders_die_before_and_after_the_home(here: &Here<'_>) -> Checked {
    type Locks = [(DMutex<u64>, DMutex<DBox<u64>>); 2];
    let locks = at(here, DEAD, (), |here, ()| {
        let pair =
            |here: &Here<'_>| Ok::<_, ShareError>((DMutex::new(here, 1u64)?, DMutex::new(here, here.alloc(1u64)?)?));
        DArc::new(here, [pair(here)?, pair(here)?])
    })??;
    let (took, taken) = channel::<u64>(here, 1)?;
    let mut holders = Vec::new();
    for (node, index) in [(NodeId(2), 0usize), (NodeId(3), 1)] {
        let (never, wait) = channel::<u64>(here, 1)?;
        let hold = |here: &Here<'_>, (locks, index, took, wait): (DArc<Locks>, usize, Sender<u64>, Receiver<u64>)| {
            let (plain, owning) = &locks.get(here).unwrap()[index];
            let (mut plain, mut owning) = (plain.lock(here).unwrap(), owning.lock(here).unwrap());
            (*plain, *owning.get_mut(here).unwrap()) = (99, 99);
            took.send(here, 1).unwrap();
            let _ = wait.recv(here);
        };
        let arguments = (locks.try_clone(here)?, index, took.try_clone(here)?, wait);
        holders.push((here.spawn_to(node, arguments, hold)?, never));
        assert_eq!(taken.recv(here), Ok(1));
    }
    let waiter = here.spawn_to(here.id(), (locks.try_clone(here)?,), |here, (locks,)| {
        let guard = locks.get(here)?[0].0.lock(here)?;
        Ok::<_, ShareError>((*guard, guard.was_left()))
    })?;
    kill_node(here, NodeId(3))?;
    kill(here)?;
    assert!(locks.get(here)?[0].0.try_lock(here)?.is_none(), "its holder lives");
    assert!(locks.get(here)?[0].1.try_lock(here)?.is_none(), "its holder lives");
    kill_node(here, NodeId(2))?;
    assert_eq!(waiter.join(here)?, Ok((1, true)));
    for (index, was_left) in [(0, false), (1, true)] {
        let (plain, owning) = &locks.get(here)?[index];
        let guard = plain.lock(here)?;
        assert_eq!((*guard, guard.was_left()), (1, was_left), "{index}");
        assert_eq!(owning.lock(here).map(drop), Err(ShareError::Lost), "{index}");
    }
    holders.into_iter().for_each(|(task, never)| drop((task.join(here), never)));
    Ok(())
}

/// A reader at the home of a lock, and one at another node, lend what the values own, and die with the home. Whoever
/// writes next comes after the borrowers. A task that the dead reader's node has sent is among those who write.
fn a_promoted_lock_waits_for_what_dead_readers_have_lent(here: &Here<'_>) -> Checked {
    type Lock = DRwLock<DBox<u64>>;
    const READER: NodeId = NodeId(2);
    let locks = at(here, DEAD, (), |here, ()| {
        let lock = |here: &Here<'_>| DRwLock::new(here, here.alloc(7u64)?);
        DArc::new(here, [lock(here)?, lock(here)?])
    })??;
    let made: Signals = (DAtomic::new(here, 0)?, DAtomic::new(here, 0)?, DAtomic::new(here, false)?);
    let signals = DArc::new(here, made)?;
    let (looking, ended, may_end) = signals.get(here)?;
    let mut tasks = Vec::new();
    // A borrower looks all the time, so there is one at a node.
    for (reader, index, borrower) in [(DEAD, 0usize, here.id()), (READER, 1, NodeId(3))] {
        let arguments = (locks.try_clone(here)?, index, borrower, signals.try_clone(here)?);
        let reads = |here: &Here<'_>, (locks, index, borrower, signals): (DArc<[Lock; 2]>, usize, _, _)| {
            let guard = locks.get(here)?[index].read(here)?;
            let ended = scope(here, |s| {
                let further = (s.lend(&*guard), signals);
                s.spawn_to(borrower, further, |here, (lent, signals)| look_at(here, lent.get(here)?, &signals))?.join()
            });
            ended??
        };
        tasks.push(here.spawn_to(reader, arguments, reads)?);
    }
    until(|| looking.load(here) == Ok(2));
    // It waits for its own node's task only if that had lent something of this lock.
    let (wrote, written) = channel::<u64>(here, 1)?;
    tasks.push(here.spawn_to(READER, (locks.try_clone(here)?, wrote), |here, (locks, wrote)| {
        let ended = scope(here, |s| {
            let further = (s.lend(&locks), wrote);
            let task = s.spawn_to(NodeId(3), further, |here, (locks, wrote): (Lent<'_, [Lock; 2]>, _)| {
                wrote.send(here, 0).map_err(|_| ShareError::Lost)?;
                let mut guard = locks.get(here)?[1].write(here)?;
                *guard.get_mut(here)? += 1;
                wrote.send(here, 1).map_err(|_| ShareError::Lost)
            });
            task?.join()
        });
        ended??
    })?);
    assert_eq!(written.recv(here), Ok(0));
    kill_node(here, READER)?;
    kill(here)?;
    let ends = here.spawn_to(here.id(), signals.try_clone(here)?, |here, signals| {
        // Time for a lock that does not wait.
        std::thread::sleep(Duration::from_millis(100));
        signals.get(here)?.2.store(here, true)
    })?;
    *locks.get(here)?[0].write(here)?.get_mut(here)? += 1;
    assert!(may_end.load(here)?, "a task has borrowed what is written to");
    *locks.get(here)?[1].write(here)?.get_mut(here)? += 1;
    until(|| ended.load(here) == Ok(2));
    assert_eq!(written.recv(here), Ok(1), "who writes waits for itself");
    for (lock, expected) in locks.get(here)?.iter().zip([8, 9]) {
        assert_eq!(*lock.read(here)?.get(here)?, expected);
    }
    ends.join(here)??;
    tasks.into_iter().for_each(|task| assert!(task.join(here).is_err()));
    Ok(())
}

/// Tasks of all nodes count under locks whose home is killed at any moment.
fn random_locks_count_right_when_their_home_is_killed(here: &Here<'_>) -> Checked {
    type Locks = (DMutex<[[u64; 3]; 2]>, DMutex<DBox<[u64; 3]>>, DRwLock<[u64; 3]>);
    let mut random = seeded(std::time::UNIX_EPOCH.elapsed().map_or(1, |since| u64::from(since.subsec_nanos())));
    eprintln!("seed {} (FARFIELD_SEED)", random.get_seed());
    let locks = at(here, DEAD, (), |here, ()| {
        let owning = DMutex::new(here, here.alloc([0u64; 3])?)?;
        DArc::new(here, (DMutex::new(here, [[0u64; 3]; 2])?, owning, DRwLock::new(here, [0u64; 3])?))
    })??;
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let rounds = if is_deep() { 2000 } else { 150 };
    let count = |here: &Here<'_>, (locks, rounds): (DArc<Locks>, u64)| {
        let own = usize::from(here.id().0);
        let (plain, owning, read) = locks.get(here)?;
        for round in 1..=rounds {
            let mut guard = plain.lock(here)?;
            assert_eq!(guard[0], guard[1], "half of a change");
            assert_eq!(guard[0][own], round - 1);
            guard[0][own] += 1;
            guard[1][own] += 1;
            drop(guard);
            // A writer at the home that dies would lose what it owns.
            if here.id() != DEAD {
                owning.lock(here)?.get_mut(here)?[own] += 1;
            }
            if round % 3 == 0 {
                read.write(here)?[own] += 1;
            } else {
                assert_eq!(read.read(here)?[own], round / 3);
            }
        }
        Ok::<_, ShareError>(())
    };
    let mut tasks = Vec::new();
    for node in here.nodes() {
        let rounds = if node == DEAD { u64::MAX } else { rounds };
        tasks.push(here.spawn_to(node, (locks.try_clone(here)?, rounds), count)?);
    }
    let pause = Duration::from_millis(random.u64(1..150));
    let killer = std::thread::spawn(move || {
        std::thread::sleep(pause);
        kill_process(process);
    });
    let [own, dead, other] = <[_; 3]>::try_from(tasks).expect("three nodes");
    own.join(here)??;
    other.join(here)??;
    killer.join().expect("it does not panic");
    assert_eq!(dead.join(here), Err(LOST.into()));
    let (plain, owning, read) = locks.get(here)?;
    let [one, two] = *plain.lock(here)?;
    assert_eq!(one, two);
    assert_eq!((one[0], one[2]), (rounds, rounds));
    assert_eq!(owning.lock(here)?.get(here)?, &[rounds, 0, rounds]);
    let read = read.read(here)?;
    assert_eq!((read[0], read[2]), (rounds / 3, rounds / 3));
    Ok(())
}

fn what_was_freed_is_not_kept(here: &Here<'_>) -> Checked {
    let made = at(here, DEAD, (), |here, ()| {
        let all = DVec::<DBox<[u64; 20]>>::with_chunk(50);
        (0..100u64).try_fold(all, |mut all, number| all.push(here, here.alloc([number; 20])?).map(|()| all))
    })??;
    let mut kept = Vec::new();
    let mut made = made;
    while let Some(object) = made.pop(here)? {
        // Every third one goes on living at its node, another is moved here, and the last one is dropped.
        match kept.len() % 3 {
            0 => kept.push(Some(object)),
            1 => {
                let mut object = object;
                object.get_mut(here)?[0] += 1;
                kept.push(Some(object));
            }
            _ => kept.push(None),
        }
    }
    let there = kept.iter().flatten().filter(|object| object.home() == DEAD).count() as u64;
    assert_eq!(there, 34);
    // Frees are told later, and stored with the next batch.
    until(|| {
        // An object and its header take 192 bytes.
        at(here, DEAD, (), |here, ()| here.stats().object_bytes).is_ok_and(|bytes| bytes <= 34 * 192)
    });
    let last = at(here, DEAD, (), |here, ()| here.alloc(1u8))??;
    kill(here)?;
    assert_eq!(here.stats().promoted_objects, there + 1);
    for (number, object) in (0..100u64).rev().zip(&kept).filter_map(|(number, object)| Some((number, object.as_ref()?)))
    {
        assert_eq!(object.get(here)?[19], number);
    }
    drop((kept, last));
    until(|| here.stats().promoted_objects == 0);
    Ok(())
}

/// What they own lies at three nodes.
fn promoted_objects_are_dropped_with_what_they_own(here: &Here<'_>) -> Checked {
    let own = here.alloc(1u64)?;
    let other = at(here, NodeId(2), (), |here, ()| here.alloc(2u64))??;
    let parent = at(here, DEAD, (own, other), |here, (own, other)| {
        let third = here.alloc(3u64)?;
        here.alloc((own, other, third))
    })??;
    kill(here)?;
    assert_eq!(here.stats().promoted_objects, 2);
    drop(parent);
    until(|| here.stats().promoted_objects == 0 && here.stats().object_bytes == 0);
    until(|| at(here, NodeId(2), (), |here, ()| here.stats().object_bytes) == Ok(0));
    assert_eq!((here.stats().late_frees, here.stats().orphans), (0, 0));
    Ok(())
}

fn a_full_half_is_followed_by_all_objects(here: &Here<'_>) -> Checked {
    let make = |here: &Here<'_>, (): ()| {
        (0..20u64).try_fold(DVec::<DBox<[u64; 4096]>>::new(), |mut all, number| {
            all.push(here, here.alloc([number; 4096])?).map(|()| all)
        })
    };
    // These lie still while others are stored again and again: four times as much as a half has room for.
    let still = at(here, DEAD, (), make)??;
    let lock = at(here, DEAD, (), |here, ()| DArc::new(here, DMutex::new(here, (here.alloc(1u64)?, 2u64))?))??;
    lock.get(here)?.lock(here)?.1 = 3;
    let group = at(here, DEAD, (), |here, ()| Link::list(here, 0..20))??;
    let (sender, receiver) = at(here, DEAD, (), |here, ()| channel::<DBox<u64>>(here, 3))??;
    (0..3).for_each(|number| sender.send(here, here.alloc(number).unwrap()).unwrap());
    let mut moving = here.alloc([0u64; 16384])?;
    let rounds = 4 * 2 * NEAR_BYTES / (16384 * 8) + 3;
    for round in 1..=rounds {
        let change = |here: &Here<'_>, (mut moving, round): (DBox<[u64; 16384]>, u64)| {
            moving.get_mut(here)?.fill(round);
            Ok::<_, ShareError>(moving)
        };
        moving = at(here, DEAD, (moving, round), change)??;
    }
    let stored_bytes = at(here, DEAD, (), |here, ()| here.stats().backup_bytes)?;
    assert!(stored_bytes > 8 * NEAR_BYTES, "{stored_bytes}");
    kill(here)?;
    assert_eq!(moving.get(here)?, &[rounds; 16384]);
    for (number, object) in (0..).zip(still.iter(here)) {
        assert_eq!(object?.get(here)?, &[number; 4096]);
    }
    let guard = lock.get(here)?.lock(here)?;
    assert_eq!((*guard.0.get(here)?, guard.1), (1, 3));
    (0..3).for_each(|number| assert_eq!(receiver.recv(here).unwrap().get(here), Ok(&number)));
    assert_eq!(group.get(here)?.numbers(here)?, (0..20).collect::<Vec<_>>());
    Ok(())
}

/// Tasks of two nodes change what they are lent, and one of the two is killed at any moment.
fn random_loans_are_whole_when_their_node_is_killed(here: &Here<'_>) -> Checked {
    let mut random = seeded(std::time::UNIX_EPOCH.elapsed().map_or(1, |since| u64::from(since.subsec_nanos())));
    eprintln!("seed {} (FARFIELD_SEED)", random.get_seed());
    let mut objects: Vec<(DBox<[u64; 64]>, u64)> =
        (0..12).map(|_| here.alloc([0; 64]).map(|object| (object, 0))).collect::<Result<_, _>>()?;
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let pause = Duration::from_millis(random.u64(1..60));
    let killer = std::thread::spawn(move || {
        std::thread::sleep(pause);
        kill_process(process);
    });
    let rounds = if is_deep() { 400 } else { 60 };
    let mut died = 0;
    for round in 0..rounds {
        let ended = scope(here, |s| {
            let mut tasks = Vec::new();
            for (object, twin) in &mut objects {
                let node = NodeId(random.u16(0..3));
                let body = |here: &Here<'_>, (mut lent, round): (farfield_dsm::LentMut<'_, [u64; 64]>, u64)| {
                    lent.get_mut(here).map(|mut object| object.iter_mut().for_each(|number| *number += round))
                };
                match s.spawn_to(node, (s.lend_mut(object), round), body) {
                    Ok(task) => tasks.push((task, twin)),
                    Err(error) => assert_eq!(error, LOST),
                }
            }
            for (task, twin) in tasks {
                match task.join() {
                    Ok(Ok(())) => *twin += round,
                    // An object that was elsewhere was not found in time: it was not changed.
                    Ok(Err(error)) => panic!("{error}"),
                    Err(error) => {
                        assert_eq!(error, LOST.into());
                        died += 1;
                    }
                }
            }
        });
        // Of a task that was not sent for certain the scope hears later.
        assert!(ended == Ok(()) || ended == Err(LOST.into()), "{ended:?}");
        // After the death some of these were as they were before a task that had ended there.
        for (object, twin) in &objects {
            assert_eq!(object.get(here)?, &[*twin; 64], "round {round}, {died} tasks died");
        }
    }
    killer.join().expect("it does not panic");
    until(|| here.spawn_to(DEAD, (), |_, ()| ()).map(drop) == Err(LOST));
    for (object, twin) in &objects {
        assert_eq!(object.get(here)?, &[*twin; 64], "after {rounds} rounds, {died} tasks died");
    }
    Ok(())
}

/// The memory server dies first: the program goes on without backups.
pub(crate) fn nodes_go_on_without_their_backups() {
    let (server, url) = memory_server();
    let config = NodeBuilder::new().nodes(3).near(NEAR_BYTES).workers(2).backup(url);
    let ended = run(&config, |here| -> Checked {
        let before = at(here, DEAD, (), |here, ()| here.alloc(1u64))??;
        server.shutdown(Duration::ZERO);
        let after = at(here, DEAD, (), |here, ()| here.alloc(2u64))??;
        assert_eq!((*before.get(here)?, *after.get(here)?), (1, 2));
        kill(here)?;
        // Both or none: what is stored is older than what was told.
        let unread =
            [&before, &after].map(|object| at(here, NodeId(2), (), |_, ()| ()).and(Ok(object.get(here).err())));
        assert!(unread.iter().all(|error| matches!(error, Ok(None | Some(LOST)))), "{unread:?}");
        assert_eq!(here.stats().promoted_objects, 0);
        Ok(())
    });
    ended.expect("the nodes start").expect("a node lives");
}

/// Of two memory servers one dies before the node, and then what the other one keeps is there.
pub(crate) fn what_was_handed_over_outlives_a_node_and_a_server() {
    for lost in [0, 1] {
        let [(one, one_url), (other, other_url)] = [memory_server(), memory_server()];
        let (first, last) = if lost == 0 { (one, other) } else { (other, one) };
        let url = format!("mirror({one_url},{other_url})");
        let config = NodeBuilder::new().nodes(3).near(NEAR_BYTES).workers(2).backup(url);
        let ended = run(&config, |here| -> Checked {
            let before = at(here, DEAD, (), |here, ()| here.alloc([1u64; 200]))??;
            let lock = at(here, DEAD, (), |here, ()| DArc::new(here, DMutex::new(here, 5u64)?))??;
            first.shutdown(Duration::ZERO);
            let after = at(here, DEAD, (), |here, ()| here.alloc([2u64; 200]))??;
            *lock.get(here)?.lock(here)? += 1;
            kill(here)?;
            assert_eq!((before.get(here)?[7], after.get(here)?[7], *lock.get(here)?.lock(here)?), (1, 2, 6));
            // Another node of the same program goes on with what is left, and without it.
            let there = at(here, NodeId(2), (), |here, ()| here.alloc(3u64))??;
            last.shutdown(Duration::ZERO);
            let more = at(here, NodeId(2), (), |here, ()| here.alloc(4u64))??;
            assert_eq!((*there.get(here)?, *more.get(here)?), (3, 4));
            Ok(())
        });
        ended.expect("the nodes start").expect("a node lives");
    }
}

/// One of two memory servers comes back, empty. It is filled, and then it may be the only one that is left.
pub(crate) fn a_memory_server_that_comes_back_keeps_backups_again() {
    let [(first, first_url), (last, last_url)] = [memory_server(), memory_server()];
    let config = NodeBuilder::new().nodes(3).near(NEAR_BYTES).workers(2);
    let ended = run(&config.backup(format!("mirror({first_url},{last_url})")), |here| -> Checked {
        let servers = || at(here, DEAD, (), |here, ()| here.stats().backup_servers);
        let kept = |number: u64| at(here, DEAD, (number,), |here, (number,)| here.alloc([number; 200]));
        let lock = at(here, DEAD, (), |here, ()| DArc::new(here, DMutex::new(here, 5u64)?))??;
        let mut all = vec![kept(0)??];
        first.shutdown(Duration::ZERO);
        all.push(kept(1)??);
        assert_eq!(servers()?, 1);
        let (again, _) = memory_server_at(&first_url);
        until(|| servers() == Ok(2));
        all.push(kept(2)??);
        *lock.get(here)?.lock(here)? += 1;
        last.shutdown(Duration::ZERO);
        all.push(kept(3)??);
        assert_eq!(servers()?, 1);
        kill(here)?;
        for (number, object) in all.iter().enumerate() {
            assert_eq!(object.get(here)?[7], number as u64);
        }
        assert_eq!(*lock.get(here)?.lock(here)?, 6);
        drop(again);
        Ok(())
    });
    ended.expect("the nodes start").expect("a node lives");
}

/// A backup is refused where it cannot be kept, before the program begins.
pub(crate) fn backups_that_cannot_be_kept_are_refused() {
    let (_server, url) = memory_server();
    let refused = |url: &str, advice: &str| {
        let config = NodeBuilder::new().nodes(2).near(NEAR_BYTES).backup(url);
        let error = run(&config, |_| ()).expect_err("it cannot be kept").to_string();
        assert!(error.contains(advice), "{error}");
    };
    refused(&format!("mirror({url}, {url})"), "different memory servers");
    refused(&format!("mirror({url})"), "2 to 8 memory servers");
    refused(&format!("mirror({url}, ram:)"), "one memory server");
    refused("ram:", "one memory server");
    refused("tcp://127.0.0.1:1", "tcp://127.0.0.1:1");
    refused("nonsense", "nonsense");
}
