//! Histories of calls that real nodes have made at the same time are linearizable, for each object by itself.
//!
//! Danger: a copy that is older than its owner says, a lock with two holders, a step that is done twice or in two
//! halves, a value that arrives twice or out of order, an object that is freed while somebody has it. Random tasks
//! of all nodes note when each call began and ended, by the clock of the machine, and what it returned.

use crate::history::{Call, Sequential, Step, check};
use crate::support::{Checked, NodesTest, all_is_free, at, is_deep, seeded};
use crate::survival::kill_process;
use farfield_dsm::{
    DArc, DAtomic, DBox, DMutex, DRwLock, DVec, Far, Here, JoinError, NodeId, Receiver, RecvError, SendError, Sender,
    ShareError, channel, scope,
};
use farfield_os::process::now_ns;
use std::time::Duration;

pub(crate) const TESTS: &[NodesTest] = &[
    ("histories_of_one_node_are_linearizable", 1, histories_are_linearizable),
    ("histories_of_three_nodes_are_linearizable", 3, histories_are_linearizable),
    ("histories_of_random_steps_of_five_nodes_are_linearizable", 5, histories_are_linearizable),
    ("two_steps_that_pass_for_one_are_found", 3, two_steps_that_pass_for_one_are_found),
];

/// Nodes that have backups.
pub(crate) const SURVIVAL_TESTS: &[NodesTest] =
    &[("random_histories_are_linearizable_when_their_home_is_killed", 3, histories_outlive_their_home)];

/// Objects of a history, in the order of [`Kind`].
#[derive(Far)]
struct Objects {
    number: DAtomic<u64>,
    locked: DMutex<u64>,
    read: DRwLock<u64>,
    /// Its object moves to whoever writes, and is copied by those who read.
    boxed: DRwLock<DBox<u64>>,
    /// Each writer makes a new object; readers keep the old one for a while.
    published: DMutex<DArc<u64>>,
    /// One object, which belongs to whoever has received it.
    passed: (Sender<DBox<u64>>, Receiver<DBox<u64>>),
    queue: (Sender<DBox<u64>>, Receiver<DBox<u64>>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Far)]
enum Kind {
    Number,
    Locked,
    Read,
    Boxed,
    Published,
    Passed,
    Queue,
}

const KINDS: [Kind; 7] =
    [Kind::Number, Kind::Locked, Kind::Read, Kind::Boxed, Kind::Published, Kind::Passed, Kind::Queue];

impl Objects {
    /// Makes objects with the value zero, and a channel with this bound.
    fn new(here: &Here<'_>, bound: usize) -> Result<Objects, ShareError> {
        let passed = channel(here, 1)?;
        assert!(passed.0.send(here, here.alloc(0)?).is_ok(), "there is room");
        Ok(Objects {
            number: DAtomic::new(here, 0)?,
            locked: DMutex::new(here, 0)?,
            read: DRwLock::new(here, 0)?,
            boxed: DRwLock::new(here, here.alloc(0)?)?,
            published: DMutex::new(here, DArc::new(here, 0)?)?,
            passed,
            queue: channel(here, bound)?,
        })
    }
}

/// What a task does: its seed, its number, and the number of its calls.
#[derive(Clone, Copy, Far)]
struct Plan {
    seed: u64,
    task: u64,
    calls: u64,
}

/// A task that makes calls and notes them.
struct Caller<'a> {
    here: &'a Here<'a>,
    objects: &'a Objects,
    random: fastrand::Rng,
    nodes: u16,
    /// Value that the atomic number had last.
    seen: u64,
}

impl Caller<'_> {
    /// Makes a call of one kind. Returns its step, if it had an effect or has seen something; `Err` has a step of
    /// which nobody knows whether it was done. `new` is a value that nobody else writes.
    fn call(&mut self, kind: Kind, new: u64) -> Result<Option<Step>, Option<Step>> {
        let here = self.here;
        // Of a call that does not change anything nothing is left to know.
        let unknown = |_: ShareError| None;
        match kind {
            Kind::Number => self.number(new).map(Some),
            Kind::Locked => {
                let lock = &self.objects.locked;
                let guard = match self.random.u8(..5) {
                    0 => lock.try_lock(here),
                    1 => lock.lock_within(here, Duration::from_micros(self.random.u64(..500))),
                    2 => lock.lock(here).map(Some),
                    // At the home of the value.
                    way => {
                        let found = match way {
                            3 => lock.with(here, new, std::mem::replace),
                            _ => lock.apply(here, new, std::mem::replace),
                        };
                        return found.map(|found| Some(Step::Swap { new, found })).map_err(|_| Some(Step::Write(new)));
                    }
                };
                let Some(mut guard) = guard.map_err(unknown)? else { return Ok(None) };
                Ok(Some(Step::Swap { new, found: std::mem::replace(&mut guard, new) }))
            }
            Kind::Read => {
                if self.random.bool() {
                    return Ok(Some(Step::Read(*self.objects.read.read(here).map_err(unknown)?)));
                }
                let mut guard = self.objects.read.write(here).map_err(unknown)?;
                Ok(Some(Step::Swap { new, found: std::mem::replace(&mut guard, new) }))
            }
            Kind::Boxed => {
                if self.random.bool() {
                    let guard = self.objects.boxed.read(here).map_err(unknown)?;
                    return Ok(Some(Step::Read(*guard.get(here).map_err(unknown)?)));
                }
                let mut guard = self.objects.boxed.write(here).map_err(unknown)?;
                self.write(&mut guard, new)
            }
            Kind::Published => {
                let mut guard = self.objects.published.lock(here).map_err(unknown)?;
                if self.random.bool() {
                    let object = guard.try_clone(here).map_err(unknown)?;
                    drop(guard);
                    return Ok(Some(Step::Read(*object.get(here).map_err(unknown)?)));
                }
                let old = std::mem::replace(&mut *guard, DArc::new(here, new).map_err(unknown)?);
                Ok(Some(Step::Swap { new, found: *old.get(here).map_err(unknown)? }))
            }
            Kind::Passed => {
                let (sender, receiver) = &self.objects.passed;
                let Some(mut object) = self.receive(receiver) else { return Ok(None) };
                let step = if self.random.bool() {
                    Ok(Some(Step::Read(*object.get(here).map_err(unknown)?)))
                } else {
                    self.write(&mut object, new)
                };
                sender.send(here, object).expect("it was taken out of there");
                step
            }
            Kind::Queue => self.queue(new),
        }
    }

    fn number(&mut self, new: u64) -> Result<Step, Option<Step>> {
        let (here, number) = (self.here, &self.objects.number);
        let step = match self.random.u8(..5) {
            0 => Step::Read(number.load(here).map_err(|_| None)?),
            1 => number.store(here, new).map(|()| Step::Write(new)).map_err(|_| Step::Write(new))?,
            2 => {
                let found = number.swap(here, new).map_err(|_| Step::Write(new))?;
                Step::Swap { new, found }
            }
            3 => {
                let found = number.fetch_add(here, new).map_err(|_| Step::Add { more: new, found: None })?;
                Step::Add { more: new, found: Some(found) }
            }
            _ => {
                let step = |found| Step::Exchange { current: self.seen, new, found };
                let found = number.compare_exchange(here, self.seen, new).map_err(|_| step(None))?;
                step(Some(found.unwrap_or_else(|found| found)))
            }
        };
        self.seen = match step {
            Step::Read(found) | Step::Exchange { found: Some(found), .. } => found,
            Step::Add { more, found: Some(found) } => more + found,
            _ => new,
        };
        Ok(step)
    }

    /// Writes to an object, here or through a loan to another node.
    fn write(&mut self, object: &mut DBox<u64>, new: u64) -> Result<Option<Step>, Option<Step>> {
        let here = self.here;
        let found = if self.random.u8(..3) > 0 {
            object.get_mut(here).map(|mut value| std::mem::replace(&mut *value, new)).map_err(|_| None)?
        } else {
            let node = NodeId(self.random.u16(..self.nodes));
            let ended = scope(here, |s| {
                let task = s.spawn_to(node, (s.lend_mut(&mut *object), new), |here, (mut lent, new)| {
                    lent.get_mut(here).map(|mut value| std::mem::replace(&mut *value, new))
                })?;
                task.join()
            });
            // The object is as it was lent if the other node is gone.
            let Ok(Ok(Ok(found))) = ended else { return Ok(None) };
            found
        };
        Ok(Some(Step::Swap { new, found }))
    }

    /// Receives an object, if there is one soon.
    fn receive(&mut self, receiver: &Receiver<DBox<u64>>) -> Option<DBox<u64>> {
        let within = Duration::from_micros(self.random.u64(..2000));
        match if self.random.bool() { receiver.try_recv(self.here) } else { receiver.recv_within(self.here, within) } {
            Ok(received) => received,
            Err(RecvError::SenderLost { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn queue(&mut self, new: u64) -> Result<Option<Step>, Option<Step>> {
        let (here, (sender, receiver)) = (self.here, &self.objects.queue);
        if self.random.bool() {
            let received = self.receive(receiver);
            let value = received.map(|received| received.into_inner(here)).transpose().map_err(|_| None)?;
            return Ok(Some(value.map_or(Step::Empty, Step::Receive)));
        }
        let value = here.alloc(new).map_err(|_| None)?;
        let within = Duration::from_micros(self.random.u64(..2000));
        let sent =
            if self.random.bool() { sender.try_send(here, value) } else { sender.send_within(here, value, within) };
        match sent {
            Ok(()) => Ok(Some(Step::Send(new))),
            Err(SendError::Full(_)) => Ok(Some(Step::Refused)),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Makes calls one after the other. Returns those that have had an effect or have seen something.
fn run_calls(here: &Here<'_>, objects: &Objects, plan: Plan) -> Result<DVec<(Kind, Call)>, ShareError> {
    let (random, nodes) = (fastrand::Rng::with_seed(plan.seed), here.nodes().count() as u16);
    let mut caller = Caller { here, objects, random, nodes, seen: 0 };
    let mut calls = Vec::new();
    for number in 1..=plan.calls {
        let kind = KINDS[caller.random.usize(..KINDS.len())];
        let called = now_ns();
        let (step, returned) = match caller.call(kind, plan.task << 32 | number) {
            Ok(step) => (step, now_ns()),
            Err(step) => (step, Call::NEVER),
        };
        calls.extend(step.map(|step| (kind, Call { called, returned, step })));
    }
    let mut noted = DVec::new();
    noted.extend(here, calls)?;
    Ok(noted)
}

/// Has tasks of some nodes make calls on the same objects at the same time. Returns what they noted.
fn record(
    here: &Here<'_>,
    objects: &DArc<Objects>,
    at_nodes: &[NodeId],
    calls: u64,
    seed: u64,
    meanwhile: impl FnOnce(),
) -> Result<Vec<(Kind, Call)>, JoinError> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut tasks = Vec::new();
    for (node, task) in at_nodes.iter().zip(1u64..) {
        let plan = Plan { seed: random.u64(..), task, calls };
        tasks.push(here.spawn_to(*node, (objects.try_clone(here)?, plan), |here, (objects, plan)| {
            run_calls(here, objects.get(here)?, plan)
        })?);
    }
    meanwhile();
    let mut all = Vec::new();
    for task in tasks {
        let noted = task.join(here)??;
        for call in noted.iter(here) {
            all.push(*call?);
        }
    }
    Ok(all)
}

/// Checks what was noted of each object. `reproduce` is printed if it is wrong.
fn check_all(noted: &[(Kind, Call)], bound: usize, reproduce: &str) {
    for kind in KINDS {
        let start = if kind == Kind::Queue { Sequential::channel(bound) } else { Sequential::Number(0) };
        // With a bound of zero a sender may be refused whenever nobody waits for its value.
        let is_said = |call: &Call| bound > 0 || call.step != Step::Refused;
        let calls: Vec<_> = noted.iter().filter(|(of, _)| *of == kind).map(|(_, call)| *call).collect();
        let count = calls.len();
        let checked = check(start, calls.into_iter().filter(is_said).collect());
        assert!(checked.is_ok(), "{kind:?}, {count} calls, {reproduce}: {checked:#?}");
    }
}

fn histories_are_linearizable(here: &Here<'_>) -> Checked {
    let mut random = seeded(21);
    let (histories, calls) = if is_deep() { (600, 60) } else { (8, 60) };
    let mut noted_calls = 0;
    for _ in 0..histories {
        let (here, seed) = (&here.enter(), random.get_seed());
        let (home, bound) = (NodeId(random.u16(..here.nodes().count() as u16)), random.usize(..4));
        let objects = at(here, home, bound, |here, bound| DArc::new(here, Objects::new(here, bound)?))??;
        let nodes: Vec<_> = here.nodes().chain(here.nodes()).collect();
        let noted = record(here, &objects, &nodes, calls, random.u64(..), || ())?;
        check_all(&noted, bound, &format!("FARFIELD_SEED={seed}"));
        noted_calls += noted.len();
        drop(objects);
    }
    println!("  {noted_calls} calls in {histories} histories");
    all_is_free(here)
}

/// The home of all objects dies, and another node keeps them.
fn histories_outlive_their_home(here: &Here<'_>) -> Checked {
    const DEAD: NodeId = NodeId(1);
    let mut random = seeded(std::time::UNIX_EPOCH.elapsed().map_or(1, |since| u64::from(since.subsec_nanos())));
    let reproduce = format!("FARFIELD_SEED={}", random.get_seed());
    eprintln!("{reproduce}");
    let bound = random.usize(..4);
    let objects = at(here, DEAD, bound, |here, bound| DArc::new(here, Objects::new(here, bound)?))??;
    let process = at(here, DEAD, (), |_, ()| std::process::id())?;
    let (pause, seed) = (Duration::from_millis(random.u64(1..60)), random.u64(..));
    let nodes = [NodeId(0), NodeId(2), NodeId(0), NodeId(2)];
    let noted = record(here, &objects, &nodes, 150, seed, || {
        std::thread::sleep(pause);
        kill_process(process);
    })?;
    check_all(&noted, bound, &reproduce);
    Ok(())
}

/// A step in two halves, between which another one's lie, is no step: what is recorded here must be found.
fn two_steps_that_pass_for_one_are_found(here: &Here<'_>) -> Checked {
    let numbers = DArc::new(here, (DAtomic::new(here, 0u64)?, DAtomic::new(here, 0u64)?))?;
    let mut tasks = Vec::new();
    for node in here.nodes() {
        tasks.push(here.spawn_to(node, numbers.try_clone(here)?, |here, numbers| {
            let (number, have_read) = numbers.get(here)?;
            let called = now_ns();
            let found = number.load(here)?;
            have_read.fetch_add(here, 1)?;
            while have_read.load(here)? < here.nodes().count() as u64 {
                std::thread::yield_now();
            }
            number.store(here, found + 1)?;
            let step = Step::Add { more: 1, found: Some(found) };
            Ok::<_, ShareError>(Call { called, returned: now_ns(), step })
        })?);
    }
    let calls = tasks.into_iter().map(|task| Ok(task.join(here)??)).collect::<Result<Vec<_>, JoinError>>()?;
    let found = check(Sequential::Number(0), calls).expect_err("all have found zero");
    assert_eq!(found.explained(), 1);
    Ok(())
}
