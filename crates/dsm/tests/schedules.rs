//! Threads of a node under a random scheduler and one that finds rare orders (PCT), with shuttle: tasks, waits for answers, and
//! channels.
//!
//! Danger: a task that runs twice, or never; a wait that nobody ends; a value that arrives although its sender has it back,
//! or that nobody has.
//!
//! The workers (`src/task/workers.rs`), the waits (`src/node/wait_table.rs`) and the queue of a channel are the real ones, on
//! shuttle's locks and threads, where no time passes. What is around them is written again here. Each model has
//! counterparts with one rule off, which fail. `FARFIELD_SCHEDULES` is the number of schedules of each model under each
//! scheduler, `FARFIELD_SEED` repeats a run.

#[path = "../src/node/wait_table.rs"]
#[allow(dead_code, reason = "the models use a part")]
mod wait_table;
#[path = "../src/task/workers.rs"]
#[allow(dead_code, reason = "the models use a part")]
mod workers;

/// What `src/primitives.rs` is in the product.
mod primitives {
    pub(crate) use shuttle::sync::atomic::{AtomicU16, AtomicU64};
    pub(crate) use shuttle::sync::{Mutex, MutexGuard};
    pub(crate) use shuttle::thread;
    use std::cell::{Cell, RefCell};
    use std::sync::{Arc, LockResult, PoisonError};
    use std::time::Duration;

    thread_local! {
        /// Whether threads are woken. All threads of a model are in one of the system's.
        pub(crate) static WAKES: Cell<bool> = const { Cell::new(true) };
        /// Whether the model is over: the time of all waits, too.
        static IS_OVER: Cell<bool> = const { Cell::new(false) };
        static CONDITIONS: RefCell<Vec<Arc<shuttle::sync::Condvar>>> = const { RefCell::new(Vec::new()) };
    }

    pub(crate) fn begin_model() {
        IS_OVER.set(false);
        CONDITIONS.take();
    }

    /// Ends the waits of threads that wait for a task.
    pub(crate) fn end_model() {
        IS_OVER.set(true);
        CONDITIONS.take().iter().for_each(|condition| condition.notify_all());
    }

    /// Condition whose waits end when they are told to, or when the model is over.
    pub(crate) struct Condvar(Arc<shuttle::sync::Condvar>);

    impl Condvar {
        pub(crate) fn new() -> Condvar {
            let condition = Arc::new(shuttle::sync::Condvar::new());
            CONDITIONS.with_borrow_mut(|conditions| conditions.push(condition.clone()));
            Condvar(condition)
        }

        pub(crate) fn notify_one(&self) {
            if WAKES.get() {
                self.0.notify_one();
            }
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(crate) fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _within: Duration,
        ) -> LockResult<(MutexGuard<'a, T>, bool)> {
            let guard = self.0.wait(guard).unwrap_or_else(PoisonError::into_inner);
            Ok((guard, false))
        }

        pub(crate) fn wait_timeout_while<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _within: Duration,
            mut condition: impl FnMut(&mut T) -> bool,
        ) -> LockResult<(MutexGuard<'a, T>, bool)> {
            let guard = self.0.wait_while(guard, |value| !IS_OVER.get() && condition(value));
            Ok((guard.unwrap_or_else(PoisonError::into_inner), IS_OVER.get()))
        }
    }
}

/// What `src/task/code.rs` is in the product.
mod code {
    pub(crate) struct ShippedCode;
}

/// A node that has tasks and waits only.
mod node {
    use super::wait_table::{WaitCause, WaitSlot, WaitTable};
    use super::workers::{QueuedTask, Workers};
    use super::{Answer, far_future};
    use farfield_dsm::NodeId;
    use shuttle::sync::Mutex;
    use std::sync::{Arc, Weak};

    pub(crate) struct ShareNode {
        this: Weak<ShareNode>,
        pub(crate) workers: Workers,
        pub(crate) ends: WaitTable<Answer>,
        /// Whether a task that waits lends its place: a rule.
        lends_places: bool,
        /// How often each task has run.
        pub(crate) runs: Mutex<Vec<u32>>,
    }

    impl ShareNode {
        pub(crate) fn new(places: usize, lends_places: bool) -> Arc<ShareNode> {
            Arc::new_cyclic(|this| ShareNode {
                this: this.clone(),
                workers: Workers::new(places),
                ends: WaitTable::default(),
                lends_places,
                runs: Mutex::default(),
            })
        }

        /// Starts a task that has so many descendants, each of which waits for the next one.
        pub(crate) fn start(self: &Arc<ShareNode>, descendants: usize, may_move: bool) -> Arc<WaitSlot<Answer>> {
            let (number, slot) = self.ends.expect(NodeId(0), WaitCause::Task, ());
            self.workers.submit(
                self,
                QueuedTask {
                    origin: NodeId(0),
                    number,
                    body: super::code::ShippedCode,
                    arguments: vec![0; descendants],
                    may_move,
                    borrows: None,
                    bytes_of_other: None,
                },
            );
            slot
        }

        pub(crate) fn run_task(self: &Arc<ShareNode>, task: QueuedTask) {
            {
                let mut runs = self.runs.lock().unwrap();
                let at = task.number as usize;
                if runs.len() <= at {
                    runs.resize(at + 1, 0);
                }
                runs[at] += 1;
            }
            if let Some(left) = task.arguments.len().checked_sub(1) {
                let slot = self.start(left, task.may_move);
                self.workers.while_waiting(self, || slot.take_until(far_future()));
            }
            self.workers.while_ending(|| {
                if let Some(slot) = self.ends.take(task.number) {
                    slot.put(Answer::Value(task.number));
                }
            });
        }

        pub(crate) fn refuse_task(&self, _task: QueuedTask, error: &std::io::Error) {
            panic!("a thread does not start: {error}");
        }

        pub(crate) fn offer_room(&self) {}

        pub(crate) fn is_worker(&self) -> bool {
            self.lends_places
        }

        pub(crate) fn shared(&self) -> Option<Arc<ShareNode>> {
            self.this.upgrade()
        }
    }
}

use farfield_core::dsm::{ChannelQueue, HomeTicket, ReceiveStep, SendStep};
use farfield_dsm::{NodeId, ShareError};
use node::ShareNode;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::Mutex;
use shuttle::{Config, Runner, thread};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wait_table::{WaitCause, WaitTable};

/// Answer to a wait.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Answer {
    Value(u64),
    Sent,
    Closed,
    Lost,
}

impl From<ShareError> for Answer {
    fn from(_error: ShareError) -> Answer {
        Answer::Lost
    }
}

fn far_future() -> Instant {
    Instant::now() + Duration::from_secs(1 << 32)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")))
}

/// Runs a model under many schedules.
fn check(model: impl Fn() + Copy + Send + Sync + 'static) {
    fn run(scheduler: impl Scheduler + 'static, model: impl Fn() + Send + Sync + 'static) {
        let mut config = Config::new();
        config.stack_size = 256 << 10;
        config.silence_warnings = true;
        Runner::new(scheduler, config).run(model);
    }
    let deep = number("FARFIELD_DEEP").is_some_and(|deep| deep != 0);
    let schedules = number("FARFIELD_SCHEDULES").unwrap_or(if deep { 20_000 } else { 500 }) as usize;
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_nanos();
    let seed = number("FARFIELD_SEED").unwrap_or(clock as u64 % 1_000_000_000);
    println!("{schedules} schedules twice, FARFIELD_SEED={seed}");
    run(RandomScheduler::new_from_seed(seed, schedules), model);
    run(PctScheduler::new_from_seed(seed, 3, schedules), model);
}

/// Tasks of a node with so many places, some of which wait for others, while another node takes some that may move and gives
/// them back. All of them run once.
fn tasks_end(places: usize, lends_places: bool) {
    primitives::begin_model();
    let node = ShareNode::new(places, lends_places);
    // The second time there may be threads that wait for a task.
    for _ in 0..2 {
        let thief = {
            let node = node.clone();
            thread::spawn(move || {
                if let Some(task) = node.workers.take_movable() {
                    node.workers.take_back(&node, task);
                }
            })
        };
        let tasks = [node.start(2, false), node.start(0, true), node.start(1, true)];
        for slot in tasks {
            assert!(slot.take_until(far_future()).is_some());
        }
        thief.join().unwrap();
    }
    assert!(node.runs.lock().unwrap().iter().skip(1).all(|runs| *runs == 1), "{:?}", node.runs);
    // The threads notice the end of their tasks a little later.
    while node.workers.counts() != (0, 0) {
        thread::yield_now();
    }
    assert_eq!(usize::from(node.workers.load().room), places);
    primitives::end_model();
}

#[test]
fn all_tasks_run_once_and_leave_their_places() {
    check(|| tasks_end(1, true));
    check(|| tasks_end(2, true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn tasks_would_starve_if_those_that_wait_kept_their_places() {
    check(|| tasks_end(2, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn tasks_would_wait_for_ever_if_nobody_woke_idle_threads() {
    primitives::WAKES.set(false);
    check(|| tasks_end(2, true));
}

/// Order of the steps of a wait.
#[derive(Clone, Copy, PartialEq)]
enum WaitOrder {
    /// The answer is expected, then it is looked whether the node is there, then it is asked.
    Right,
    AsksFirst,
    LooksFirst,
}

/// A node that is asked, and may be lost meanwhile: who asks has an answer, or is told.
fn an_answer_comes(order: WaitOrder) {
    const ASKED: NodeId = NodeId(1);
    let waits: Arc<WaitTable<Answer>> = Arc::default();
    let is_lost = Arc::new(Mutex::new(false));
    let (ask, asked) = shuttle::sync::mpsc::channel::<u64>();
    let answers = {
        let (waits, is_lost) = (waits.clone(), is_lost.clone());
        thread::spawn(move || {
            while let Ok(number) = asked.recv() {
                // A node that is lost answers nobody.
                if *is_lost.lock().unwrap() {
                    return;
                }
                if let Some(slot) = waits.take(number) {
                    slot.put(Answer::Value(number));
                }
            }
        })
    };
    let loses = {
        let (waits, is_lost) = (waits.clone(), is_lost.clone());
        thread::spawn(move || {
            // Otherwise an answer that was missed would be noticed as late as that.
            if order != WaitOrder::AsksFirst {
                *is_lost.lock().unwrap() = true;
                waits.lose(ASKED);
            }
        })
    };
    for _ in 0..2 {
        let looks = || *is_lost.lock().unwrap();
        if order == WaitOrder::LooksFirst && looks() {
            continue;
        }
        let (number, slot) = if order == WaitOrder::AsksFirst {
            let number = waits.number();
            let _ = ask.send(number);
            (number, waits.expect_again(number, ASKED, WaitCause::Answer, ()))
        } else {
            waits.expect(ASKED, WaitCause::Answer, ())
        };
        if order != WaitOrder::LooksFirst && looks() {
            waits.take(number);
            continue;
        }
        if order != WaitOrder::AsksFirst {
            let _ = ask.send(number);
        }
        let answer = slot.take_until(far_future()).unwrap();
        assert!([Answer::Value(number), Answer::Lost].contains(&answer), "{answer:?}");
    }
    drop(ask);
    answers.join().unwrap();
    loses.join().unwrap();
}

#[test]
fn who_asks_is_answered_or_told_that_the_node_is_gone() {
    check(|| an_answer_comes(WaitOrder::Right));
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_answer_would_be_missed_if_it_was_expected_later() {
    check(|| an_answer_comes(WaitOrder::AsksFirst));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wait_would_not_end_if_the_node_was_looked_for_before_it() {
    check(|| an_answer_comes(WaitOrder::LooksFirst));
}

/// Home of a channel, and the waits of the one node that uses it.
struct ChannelHome {
    queue: Mutex<ChannelQueue<u64>>,
    waits: WaitTable<Answer>,
}

fn ticket(number: u64) -> HomeTicket {
    HomeTicket { node: 0, number }
}

impl ChannelHome {
    fn answer(&self, ticket: HomeTicket, answer: Answer) {
        if let Some(slot) = self.waits.take(ticket.number) {
            slot.put(answer);
        }
    }

    /// Sends a value, and gives up at any moment if it has to wait. Returns whether it was sent. `asks` is whether who has
    /// given up asks the home whether the value was received meanwhile: a rule.
    fn send(&self, value: u64, asks: bool) -> bool {
        let (number, slot) = self.waits.expect(NodeId(0), WaitCause::Answer, ());
        {
            let mut queue = self.queue.lock().unwrap();
            match queue.send(ticket(number), value, true) {
                SendStep::Sent(delivered) => {
                    if let Some((receiver, value)) = delivered {
                        self.answer(receiver, Answer::Value(value));
                    }
                    self.waits.take(number);
                    return true;
                }
                SendStep::Closed(_) => {
                    self.waits.take(number);
                    return false;
                }
                SendStep::Waits => {}
            }
        }
        // The time is over.
        thread::yield_now();
        let cancelled = self.queue.lock().unwrap().cancel(ticket(number)).is_some();
        if cancelled || !asks {
            self.waits.take(number);
            return false;
        }
        slot.take_until(far_future()) == Some(Answer::Sent)
    }

    fn receive(&self) -> Option<u64> {
        let (number, slot) = self.waits.expect(NodeId(0), WaitCause::Answer, ());
        {
            let mut queue = self.queue.lock().unwrap();
            match queue.receive(ticket(number), true) {
                ReceiveStep::Received(value, sender) => {
                    if let Some(sender) = sender {
                        self.answer(sender, Answer::Sent);
                    }
                    self.waits.take(number);
                    return Some(value);
                }
                ReceiveStep::Closed => {
                    self.waits.take(number);
                    return None;
                }
                ReceiveStep::Waits => {}
            }
        }
        match slot.take_until(far_future())? {
            Answer::Value(value) => Some(value),
            _ => None,
        }
    }
}

/// Two senders that give up, and a receiver: each value was received, or its sender has it.
fn values_have_one_owner(bound: usize, asks: bool) {
    let home = Arc::new(ChannelHome { queue: Mutex::new(ChannelQueue::new(bound)), waits: WaitTable::default() });
    let senders: Vec<_> = (0..2u64)
        .map(|sender| {
            let home = home.clone();
            thread::spawn(move || (0..2).map(|at| 10 * sender + at).filter(|value| home.send(*value, asks)).collect())
        })
        .collect();
    let receiver = {
        let home = home.clone();
        thread::spawn(move || std::iter::from_fn(|| home.receive()).collect::<Vec<u64>>())
    };
    let sent: Vec<u64> = senders.into_iter().flat_map(|sender| -> Vec<u64> { sender.join().unwrap() }).collect();
    let closed = home.queue.lock().unwrap().end_senders();
    closed.into_iter().for_each(|receiver| home.answer(receiver, Answer::Closed));
    let mut count: BTreeMap<u64, i32> = sent.into_iter().map(|value| (value, 1)).collect();
    for value in receiver.join().unwrap() {
        *count.entry(value).or_default() -= 1;
    }
    assert!(count.values().all(|count| *count == 0), "sent and received differ: {count:?}");
}

#[test]
fn a_value_is_received_or_is_its_senders() {
    check(|| values_have_one_owner(0, true));
    check(|| values_have_one_owner(1, true));
}

#[test]
#[should_panic(expected = "sent and received differ")]
fn a_value_would_have_two_owners_if_who_gives_up_did_not_ask() {
    check(|| values_have_one_owner(0, false));
}
