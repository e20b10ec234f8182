//! Messages and bytes of each operation of shared memory, against the fewest that the protocol needs, at two nodes and as many
//! readers as there are nodes beyond them.
//!
//! The counts do not depend on the machine. An operation that sends another number of messages is an error of the run.

use crate::apps::{Counts, Nodes, counts};
use crate::{Options, Outcome};
use anyhow::{Context, Result, ensure};
use farfield_dsm::{
    DArc, DAtomic, DBox, DMutex, Far, FarGroup, Here, JoinError, NodeId, Receiver, Sender, ShareError, TBox, channel,
    scope,
};
use std::time::{Duration, Instant};

/// Times that each operation is counted.
const TIMES: usize = 1000;
const TIMES_EACH: u64 = TIMES as u64;
/// Words of an object.
const WORDS: usize = 64;
type Counted = [u64; WORDS];
const OBJECT_BYTES: u64 = size_of::<Counted>() as u64;
/// Links of a list whose objects are tied.
const LINKS: u64 = 1000;
/// Longest wait for messages that nobody waits for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Node that keeps what the first node uses.
const THERE: NodeId = NodeId(1);

#[derive(FarGroup)]
struct CountedLink {
    words: [u64; 3],
    next: Option<TBox<CountedLink>>,
}

/// Counts of operations, beside those that asking for the counts costs.
struct Tally<'h, 'n> {
    here: &'h Here<'n>,
    /// Messages and bytes of each question for the counts.
    question: [f64; 2],
    outcome: Outcome,
    ops: u64,
    errors: u64,
}

/// Counts at some moment, and how often they were asked for since.
struct Mark {
    counts: Counts,
    questions: u64,
}

impl<'h, 'n> Tally<'h, 'n> {
    fn new(here: &'h Here<'n>) -> Result<Tally<'h, 'n>, JoinError> {
        let questions = 50;
        let before = counts(here)?;
        let after = (0..questions).try_fold(before, |_, _| counts(here))?;
        let each = |index: usize| (after[index] - before[index]) as f64 / f64::from(questions);
        Ok(Tally { here, question: [each(0), each(1)], outcome: Outcome::new(), ops: 0, errors: 0 })
    }

    fn mark(&self) -> Result<Mark, JoinError> {
        Ok(Mark { counts: counts(self.here)?, questions: 1 })
    }

    /// Returns the messages and bytes of all nodes since a mark.
    fn since(&self, mark: &mut Mark) -> Result<[f64; 2], JoinError> {
        let now = counts(self.here)?;
        let each =
            |index: usize| (now[index] - mark.counts[index]) as f64 - self.question[index] * mark.questions as f64;
        let sent = [each(0), each(1)];
        mark.questions += 1;
        Ok(sent)
    }

    /// Waits until all nodes have sent so many messages since a mark.
    fn wait_for(&self, mark: &mut Mark, messages: u64) -> Result<[f64; 2]> {
        let started = Instant::now();
        loop {
            let sent = self.since(mark)?;
            if sent[0] >= messages as f64 {
                return Ok(sent);
            }
            ensure!(started.elapsed() < PATIENCE, "{} messages were sent, not {messages}", sent[0]);
        }
    }

    /// Counts an operation that is done so many times, with the fewest messages and bytes that it needs each time.
    fn count<R>(
        &mut self,
        name: &str,
        times: u64,
        (messages, bytes): (u64, u64),
        operation: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let mut mark = self.mark()?;
        let result = operation().with_context(|| format!("{name} fails"))?;
        self.wait_for(&mut mark, messages * times).with_context(|| format!("{name} sends too little"))?;
        // Whoever sends more than it must has done so by now.
        let sent = self.since(&mut mark)?.map(|sent| sent / times as f64);
        if sent[0] != messages as f64 {
            eprintln!("{name}: {} messages each, not {messages}", sent[0]);
            self.errors += 1;
        }
        self.outcome.figure(&format!("{name}_messages"), sent[0]);
        self.outcome.figure(&format!("{name}_bytes"), sent[1]);
        if messages > 0 {
            self.outcome.figure(&format!("{name}_overhead_bytes"), (sent[1] - bytes as f64) / messages as f64);
        }
        self.ops += times;
        Ok(result)
    }
}

/// Returns objects that are at the other node.
fn objects_there(here: &Here<'_>) -> Result<Box<[DBox<Counted>; TIMES]>, JoinError> {
    let made = here.spawn_to(THERE, (), |here, ()| {
        let made = (0..TIMES_EACH).map(|number| here.alloc([number; WORDS])).collect::<Result<Vec<_>, ShareError>>()?;
        Ok::<_, ShareError>(<[DBox<Counted>; TIMES]>::try_from(made).expect("so many"))
    })?;
    Ok(Box::new(made.join(here)??))
}

/// Reads an object at each node but the first two, so that all of them have copies.
fn read_elsewhere(here: &Here<'_>, object: &DBox<Counted>) -> Result<(), JoinError> {
    scope(here, |s| {
        let tasks = here
            .nodes()
            .skip(2)
            .map(|node| s.spawn_to(node, (s.lend(object),), |here, (object,)| object.get(here).map(|words| words[0])));
        let tasks = tasks.collect::<Result<Vec<_>, ShareError>>()?;
        tasks.into_iter().try_for_each(|task| task.join()?.map(drop).map_err(JoinError::from))
    })?
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let nodes = Nodes::of(options)?.filter(|nodes| nodes.count >= 2 && !nodes.is_in_place);
    let nodes = nodes.context("messages are counted at two --nodes or more, with --peer share:")?;
    let started = Instant::now();
    let (mut outcome, ops, errors) = nodes.run(count_all)?;
    outcome.timed("count", ops, started.elapsed().as_nanos() as u64);
    outcome.checked(ops, errors);
    Ok(outcome)
}

fn count_all(here: &Here<'_>) -> Result<(Outcome, u64, u64)> {
    let mut tally = Tally::new(here)?;
    reads_and_writes(&mut tally)?;
    tasks_and_groups(&mut tally)?;
    locks(&mut tally)?;
    channels(&mut tally)?;
    Ok((tally.outcome, tally.ops, tally.errors))
}

fn reads_and_writes(tally: &mut Tally<'_, '_>) -> Result<()> {
    let here = tally.here;
    let mut objects = objects_there(here)?;
    let read = |objects: &[DBox<Counted>]| -> Result<()> {
        let here = here.enter();
        Ok(objects.iter().try_for_each(|object| object.get(&here).map(drop))?)
    };
    tally.count("cold_read", TIMES_EACH, (1, OBJECT_BYTES), || read(&*objects))?;
    tally.count("warm_read", TIMES_EACH, (0, 0), || read(&*objects))?;
    objects.iter().try_for_each(|object| read_elsewhere(here, object))?;
    // The object comes, and its block is freed later. Nobody who has a copy is told.
    let mut written = objects_there(here)?;
    written.iter().try_for_each(|object| read_elsewhere(here, object))?;
    tally.count("remote_write", TIMES_EACH, (2, OBJECT_BYTES), || {
        written
            .iter_mut()
            .try_for_each(|object| object.get_mut(here).map(|mut words| words[0] += 1))
            .map_err(Into::into)
    })?;
    written.iter().try_for_each(|object| read_elsewhere(here, object))?;
    tally.count("local_write", TIMES_EACH, (0, 0), || {
        written
            .iter_mut()
            .try_for_each(|object| object.get_mut(here).map(|mut words| words[0] += 1))
            .map_err(Into::into)
    })?;
    tally.count("drop", TIMES_EACH, (1, 0), || {
        drop(std::mem::replace(&mut objects, written));
        Ok(())
    })
}

fn tasks_and_groups(tally: &mut Tally<'_, '_>) -> Result<()> {
    let here = tally.here;
    tally.count("task", TIMES_EACH, (2, 0), || {
        Ok((0..TIMES).try_for_each(|_| here.spawn_to(THERE, (), |_, ()| ())?.join(here))?)
    })?;
    let list = here.spawn_to(THERE, (), |here, ()| {
        let mut next = None;
        for number in 1..LINKS {
            next = Some(here.tie(CountedLink { words: [number; 3], next })?);
        }
        here.alloc(CountedLink { words: [0; 3], next })
    })?;
    let list = list.join(here)??;
    tally.count("list", 1, (1, LINKS * size_of::<CountedLink>() as u64), || {
        let links = std::iter::successors(Some(list.get(here)?), |link| link.next.as_deref());
        ensure!(links.map(|link| link.words[0]).eq(std::iter::once(0).chain((1..LINKS).rev())), "links are wrong");
        Ok(())
    })?;
    tally.count("list_drop", 1, (1, 0), || {
        drop(list);
        Ok(())
    })
}

/// What tasks share without an owner among them.
#[derive(Far)]
struct SharedValues {
    locks: [DMutex<CountedValue>; TIMES],
    number: DAtomic<u64>,
}

/// Value of a lock.
type CountedValue = [u64; 6];
const VALUE_BYTES: u64 = size_of::<CountedValue>() as u64;

fn shared_values(here: &Here<'_>, node: NodeId) -> Result<DArc<SharedValues>, JoinError> {
    let make = |here: &Here<'_>, (): ()| {
        let locks = (0..TIMES).map(|_| DMutex::new(here, [0; 6])).collect::<Result<Vec<_>, ShareError>>()?;
        let locks = <[DMutex<CountedValue>; TIMES]>::try_from(locks).expect("so many");
        DArc::new(here, SharedValues { locks, number: DAtomic::new(here, 0)? })
    };
    Ok(here.spawn_to(node, (), make)?.join(here)??)
}

fn locks(tally: &mut Tally<'_, '_>) -> Result<()> {
    let here = tally.here;
    for (place, node, [lock, step, with]) in [("home", here.id(), [0; 3]), ("remote", THERE, [2, 1, 2])] {
        let shared = shared_values(here, node)?;
        let values = shared.get(here)?;
        // The lock comes with its value, and goes back with it.
        tally.count(&format!("lock_{place}"), TIMES_EACH, (lock, 2 * VALUE_BYTES), || {
            Ok(values.locks.iter().try_for_each(|mutex| mutex.lock(here).map(|mut value| value[0] += 1))?)
        })?;
        tally.count(&format!("with_{place}"), TIMES_EACH, (with, 0), || {
            Ok(values.locks.iter().try_for_each(|mutex| mutex.with(here, (), |value, ()| value[0] += 1))?)
        })?;
        // As many messages as a step of a number.
        tally.count(&format!("apply_{place}"), TIMES_EACH, (step, 0), || {
            Ok(values.locks.iter().try_for_each(|mutex| mutex.apply(here, (), |value, ()| value[0] += 1))?)
        })?;
        tally.count(&format!("atomic_{place}"), TIMES_EACH, (step, 0), || {
            Ok((0..TIMES).try_for_each(|_| values.number.fetch_add(here, 1).map(drop))?)
        })?;
        let counted = tally.count(&format!("look_{place}"), 1, (lock + step, VALUE_BYTES), || {
            Ok((values.locks[0].lock(here)?[0], values.number.load(here)?))
        })?;
        ensure!(counted == (3, TIMES_EACH), "steps are lost: {counted:?}");
        if node == here.id() {
            let clone = || shared.try_clone(here).map(drop);
            tally.count("clone_home", TIMES_EACH, (0, 0), || Ok((0..TIMES).try_for_each(|_| clone())?))?;
            hand_off(tally, &shared)?;
        } else {
            // What it owned is at its node.
            tally.count("shared_drop_remote", 1, (1, 0), || {
                drop(shared);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Counts a lock that is given to one that waits for it.
fn hand_off(tally: &mut Tally<'_, '_>, shared: &DArc<SharedValues>) -> Result<()> {
    let here = tally.here;
    let held = shared.get(here)?.locks[0].lock(here)?;
    let mut waiting = tally.mark()?;
    let task = here.spawn_to(THERE, (shared.try_clone(here)?,), |here, (shared,)| {
        // The object comes, too: one message.
        let value = shared.get(here)?.locks[0].lock(here)?;
        Ok::<_, ShareError>(value[0])
    })?;
    // The task, the object, and the question for the lock.
    tally.wait_for(&mut waiting, 3)?;
    // The lock goes to the other node, and comes back. The task ends, and its handle is counted later.
    tally.count("lock_hand_off", 1, (4, 0), || {
        drop(held);
        Ok(task.join(here)??)
    })?;
    Ok(())
}

fn channels(tally: &mut Tally<'_, '_>) -> Result<()> {
    let here = tally.here;
    let (sender, receiver): (Sender<u64>, Receiver<u64>) = {
        let made = here.spawn_to(THERE, (), |here, ()| channel::<u64>(here, TIMES))?;
        made.join(here)??
    };
    tally.count("send", TIMES_EACH, (1, 8), || {
        (0..TIMES_EACH).try_for_each(|number| sender.send(here, number)).context("nobody receives")
    })?;
    tally.count("receive", TIMES_EACH, (1, 8), || {
        (0..TIMES_EACH).try_for_each(|number| {
            ensure!(receiver.recv(here)? == number, "values are out of order");
            Ok(())
        })
    })
}
