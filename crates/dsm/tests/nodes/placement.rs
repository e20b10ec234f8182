//! Danger: tasks that wait although another node has room, that run twice or never, and that are forgotten where
//! they were.

use crate::support::{Checked, NodesTest, PATIENCE, all_is_free, at, seeded};
use farfield_dsm::{
    DAtomic, Here, JoinError, NodeId, Receiver, RecvError, Sender, ShareError, TaskHandle, channel, scope,
};
use std::time::Instant;

/// Tasks that a node runs at a time.
const WORKERS: usize = 2;

pub(crate) const TESTS: &[NodesTest] = &[
    ("tasks_begin_where_there_is_room", 3, tasks_begin_where_there_is_room),
    ("a_task_that_waits_begins_at_the_first_node_with_room", 3, a_task_that_waits_begins_at_the_first_node_with_room),
    ("a_node_that_was_busy_for_another_one_is_given_tasks", 3, a_node_that_was_busy_for_another_one_is_given_tasks),
    ("a_task_that_cannot_travel_begins_here", 2, a_task_that_cannot_travel_begins_here),
    ("trees_of_tasks_are_those_of_plain_calls", 3, trees_of_tasks_are_those_of_plain_calls),
    ("loans_go_along_and_come_back", 3, loans_go_along_and_come_back),
    ("given_tasks_of_a_dead_node_are_lost", 3, given_tasks_of_a_dead_node_are_lost),
];

/// A task that says where it began, and runs until it is told to end.
struct Blocker {
    node: NodeId,
    end: Sender<u64>,
    handle: BlockerTask,
}

type Began = (Sender<u64>, Receiver<u64>);
type BlockerTask = TaskHandle<Result<(), ShareError>>;

impl Blocker {
    /// Starts such a task, which may not begin yet.
    fn start(here: &Here<'_>, began: &Began) -> Result<(Sender<u64>, BlockerTask), JoinError> {
        let (end, ends) = channel::<u64>(here, 1)?;
        let handle = here.spawn((began.0.try_clone(here)?, ends), |here, (began, ends)| {
            let _ = began.send(here, u64::from(here.id().0));
            block(here, &ends);
            Ok(())
        })?;
        Ok((end, handle))
    }

    /// Starts a task that begins, and waits until it does.
    fn begin(here: &Here<'_>, began: &Began) -> Result<Blocker, JoinError> {
        let (end, handle) = Blocker::start(here, began)?;
        let node = began.1.recv_within(here, PATIENCE).expect("its node lives").expect("it begins");
        Ok(Blocker { node: NodeId(node as u16), end, handle })
    }

    fn end(self, here: &Here<'_>) -> Checked {
        self.end.send(here, 0).expect("it receives");
        Ok(self.handle.join(here)??)
    }
}

/// Fills all nodes with tasks. Their own, which have room, are told first.
fn fill(here: &Here<'_>, began: &Began) -> Result<Vec<Blocker>, JoinError> {
    for node in here.nodes() {
        at(here, node, (), |_, ()| ())?;
    }
    (0..here.nodes().count() * WORKERS).map(|_| Blocker::begin(here, began)).collect()
}

fn tasks_begin_where_there_is_room(here: &Here<'_>) -> Checked {
    let began = channel::<u64>(here, 16)?;
    let blockers = fill(here, &began)?;
    let mut nodes: Vec<u16> = blockers.iter().map(|blocker| blocker.node.0).collect();
    assert_eq!(nodes[..WORKERS], [0; WORKERS], "a task begins here if there is room");
    nodes.sort_unstable();
    assert_eq!(nodes, [0, 0, 1, 1, 2, 2]);
    blockers.into_iter().try_for_each(|blocker| blocker.end(here))?;
    drop(began);
    all_is_free(here)
}

fn a_task_that_waits_begins_at_the_first_node_with_room(here: &Here<'_>) -> Checked {
    for first in [0, 1, 2] {
        let given = here.stats().given_tasks;
        let began = channel::<u64>(here, 16)?;
        let mut blockers = fill(here, &began)?;
        let (end, handle) = Blocker::start(here, &began)?;
        assert!(matches!(began.1.try_recv(here), Ok(None)), "there is no room");
        let index = blockers.iter().position(|blocker| blocker.node == NodeId(first)).expect("each node has some");
        blockers.remove(index).end(here)?;
        let node = began.1.recv_within(here, PATIENCE).expect("its node lives");
        assert_eq!(node, Some(u64::from(first)));
        assert_eq!(handle.node(), NodeId(first));
        assert_eq!(here.stats().given_tasks - given, u64::from(first != 0));
        blockers.push(Blocker { node: NodeId(first), end, handle });
        blockers.into_iter().try_for_each(|blocker| blocker.end(here))?;
    }
    all_is_free(here)
}

/// Runs until it is told to end. Its wait keeps its place, as work does: it asks again and again.
fn block(here: &Here<'_>, ends: &Receiver<u64>) {
    let started = Instant::now();
    while ends.try_recv(here).is_ok_and(|end| end.is_none()) {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

/// Node 0 does not hear when tasks end that node 2 has sent to node 1: node 1 says that it has room.
fn a_node_that_was_busy_for_another_one_is_given_tasks(here: &Here<'_>) -> Checked {
    let number = at(here, NodeId(1), (), |here, ()| DAtomic::new(here, 1u64))??;
    let (began, is_begun) = channel::<u64>(here, 4)?;
    let mut ends = at(here, NodeId(2), (began,), |here, (began,)| -> Result<_, ShareError> {
        let start = || {
            let (end, ends) = channel::<u64>(here, 1)?;
            drop(here.spawn_to(NodeId(1), (began.try_clone(here)?, ends), |here, (began, ends)| {
                let _ = began.send(here, 1);
                block(here, &ends);
            })?);
            Ok::<_, ShareError>(end)
        };
        Ok((start()?, start()?))
    })
    .map(|ends| ends.map(|(one, other)| vec![one, other]))??;
    for _ in 0..WORKERS {
        is_begun.recv(here).expect("it is sent");
        let (end, also) = channel::<u64>(here, 1)?;
        drop(here.spawn_to(NodeId(2), (also,), |here, (ends,)| block(here, &ends))?);
        ends.push(end);
    }
    assert_eq!(number.load(here)?, 1, "node 1 has said that it is full");
    let began = channel::<u64>(here, 16)?;
    let own: Vec<_> = (0..WORKERS).map(|_| Blocker::begin(here, &began)).collect::<Result<_, _>>()?;
    let (end, waiting) = Blocker::start(here, &began)?;
    assert!(matches!(began.1.try_recv(here), Ok(None)), "there is no room");
    ends[0].send(here, 0).expect("it receives");
    let node = began.1.recv_within(here, PATIENCE).expect("its node lives");
    assert_eq!((node, waiting.node()), (Some(1), NodeId(1)));
    end.send(here, 0).expect("it receives");
    waiting.join(here)??;
    own.into_iter().try_for_each(|blocker| blocker.end(here))?;
    ends[1..].iter().for_each(|end| end.send(here, 0).expect("it receives"));
    drop((end, ends, is_begun, began, number));
    all_is_free(here)
}

fn a_task_that_cannot_travel_begins_here(here: &Here<'_>) -> Checked {
    let began = channel::<u64>(here, 16)?;
    let mut own: Vec<_> = (0..WORKERS).map(|_| Blocker::begin(here, &began)).collect::<Result<_, _>>()?;
    // The other node has room, but no message brings so much there.
    let large = here.spawn(([7u64; 20_000],), |here, (numbers,)| (here.id().0, numbers[19_999]))?;
    let small = here.spawn((), |here, ()| here.id().0)?;
    assert_eq!(small.join(here)?, 1);
    own.remove(0).end(here)?;
    assert_eq!(large.join(here)?, (0, 7));
    own.remove(0).end(here)?;
    drop(began);
    all_is_free(here)
}

fn leaves(here: &Here<'_>, seed: u64, depth: u64) -> Result<u64, JoinError> {
    let mut random = fastrand::Rng::with_seed(seed);
    if depth == 0 {
        return Ok(seed % 1000);
    }
    let children: Vec<u64> = (0..random.u64(1..4)).map(|_| random.u64(..)).collect();
    let mut tasks = Vec::new();
    for child in children {
        tasks
            .push(here.spawn((child, depth - 1), |here, (seed, depth)| leaves(here, seed, depth).unwrap_or(u64::MAX))?);
    }
    let mut sum = 0u64;
    for task in tasks {
        sum = sum.wrapping_add(task.join(here)?);
    }
    Ok(sum)
}

fn plain_leaves(seed: u64, depth: u64) -> u64 {
    let mut random = fastrand::Rng::with_seed(seed);
    if depth == 0 {
        return seed % 1000;
    }
    let children: Vec<u64> = (0..random.u64(1..4)).map(|_| random.u64(..)).collect();
    children.into_iter().fold(0, |sum, child| sum.wrapping_add(plain_leaves(child, depth - 1)))
}

fn trees_of_tasks_are_those_of_plain_calls(here: &Here<'_>) -> Checked {
    let mut random = seeded(7);
    for _ in 0..8 {
        let seed = random.u64(..);
        assert_eq!(leaves(here, seed, 4)?, plain_leaves(seed, 4), "seed {seed}");
    }
    all_is_free(here)
}

fn loans_go_along_and_come_back(here: &Here<'_>) -> Checked {
    let mut numbers: Vec<_> = (0..24u64).map(|number| here.alloc(number)).collect::<Result<_, _>>()?;
    let given = scope(here, |s| -> Result<usize, JoinError> {
        let mut tasks = Vec::new();
        for number in &mut numbers {
            tasks.push(s.spawn((s.lend_mut(number),), |here, (mut number,)| {
                // Long enough that some wait.
                let until = Instant::now() + std::time::Duration::from_millis(2);
                while Instant::now() < until {
                    std::thread::yield_now();
                }
                number.get_mut(here).map(|mut number| *number += 100).map(|()| u64::from(here.id().0))
            })?);
        }
        let mut elsewhere = 0;
        for task in tasks {
            elsewhere += usize::from(task.join()?? != 0);
        }
        Ok(elsewhere)
    })??;
    assert!(given > 0, "some ran elsewhere");
    for (index, number) in (0u64..).zip(&numbers) {
        assert_eq!(*number.get(here)?, index + 100);
    }
    drop(numbers);
    all_is_free(here)
}

fn given_tasks_of_a_dead_node_are_lost(here: &Here<'_>) -> Checked {
    let process = at(here, NodeId(1), (), |_, ()| std::process::id())?;
    let began = channel::<u64>(here, 16)?;
    let mut blockers = fill(here, &began)?;
    let (_end, given) = Blocker::start(here, &began)?;
    let index = blockers.iter().position(|blocker| blocker.node == NodeId(1)).expect("each node has some");
    blockers.remove(index).end(here)?;
    assert_eq!(began.1.recv_within(here, PATIENCE).expect("its node lives"), Some(1));
    let killed = std::process::Command::new("kill").args(["-KILL", &process.to_string()]).status();
    assert!(killed.expect("kill starts").success());
    assert_eq!(given.join(here), Err(ShareError::NodeLost { node: NodeId(1) }.into()));
    // What waits for room is not given to the dead.
    let (end, waiting) = Blocker::start(here, &began)?;
    let (lost, mut alive): (Vec<_>, Vec<_>) = blockers.into_iter().partition(|blocker| blocker.node == NodeId(1));
    for blocker in lost {
        assert_eq!(blocker.handle.join(here), Err(ShareError::NodeLost { node: NodeId(1) }.into()));
    }
    alive.remove(0).end(here)?;
    let node = loop {
        // Its sender at the dead node is told of once.
        match began.1.recv_within(here, PATIENCE) {
            Err(RecvError::SenderLost { .. }) => {}
            node => break node.expect("a node lives").expect("it begins"),
        }
    };
    assert_ne!(node, 1);
    end.send(here, 0).expect("it receives");
    waiting.join(here)??;
    alive.into_iter().try_for_each(|blocker| blocker.end(here))
}
