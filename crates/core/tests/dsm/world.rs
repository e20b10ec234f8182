//! Virtual time, tasks, messages between nodes, and what goes wrong: one step at a time, all of it from a seed.

use crate::channels::ChannelTwins;
use crate::locks::LockTwin;
use crate::node::{Message, Node, Reply, View, commit};
use farfield_core::dsm::BorrowRoot;
use std::cell::{Cell, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Node that decides who is gone, and keeps what was in their backups. All end with it.
pub(crate) const FIRST: u16 = 0;
pub(crate) const NODES: u16 = 4;
/// Time after which a node counts as silent.
const WITHIN: u64 = 4000;
/// Time after which a stopped node is expelled, and most time until it runs again.
const EXPELLED_AFTER: u64 = 6000;
/// Steps after which a program counts as one that never ends.
const STEPS_MAX: u64 = 200_000;

/// Rules of the protocol. Each of them can be switched off, and is missed then.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Rule {
    /// A mutable borrow in place takes a new colour.
    BorrowsTakeColours,
    /// The next object in a block begins above the last colour of the one before.
    ColoursOutliveObjects,
    /// A block that was lent is not freed before the loan is over.
    LentBlocksStay,
    /// A block that was lent by another node is not written to.
    LentBlocksAreNotWritten,
    /// Nor is it by a task that the borrower has lent it to at the same node.
    LoansOfLoansKeepBlocks,
    /// A block that was lent is freed with the last colour that the object had in it.
    LastColoursFree,
    /// An object that owns others is lost with its borrower.
    OwnersOfOthersAreLost,
    /// The word of an object comes home with the end of the borrower's task.
    WordsComeHome,
    /// A scope that has lost a task waits for those that the dead node has started.
    ScopesOutlastBorrowers,
    /// A free that is late or heard twice does nothing.
    LateFreesAreKnown,
    /// What a message hands over is stored before it leaves.
    StoredBeforeSent,
    /// A batch counts after all of its pages are there.
    PagesBeforeCommit,
    /// The first node knows of a replica that is given up before anybody knows what is not stored there.
    LostReplicasAreKnown,
    /// Whoever takes a backup over sets the fence.
    TakenOverWithFence,
    /// Who holds a lock is stored before it is told.
    HoldersAreStored,
    /// So is what the value owns that is given to another node.
    GrantedObjectsAreStored,
    /// So is a writer at the lock's home, before anybody is told anything.
    WritersAtHomeAreStored,
    /// A ticket that asks for a lock again has what it was given before.
    TicketsAreKnown,
    /// What was withdrawn is not done if it arrives later.
    WithdrawnTicketsAreKnown,
    /// A lock whose writer is dead is lost, because what its value owns may have been dropped or handed on.
    LocksOfDeadWritersAreLost,
    /// A lock whose reader is dead waits for those to whom that has lent what the value owns.
    LocksOutlastBorrowers,
    /// So does whoever takes the lock over.
    PromotedLocksOutlastBorrowers,
    /// A reader at the home that lends what the value owns is stored.
    LentLocksAreStored,
    /// Who waits for borrowers waits for those of one root, and for no task that may wait for it.
    BorrowsHaveRoots,
    /// Nothing is lent of what a lock owns that was taken after the last loan.
    LaterLocksAreNotLent,
    /// Who may have been lent something of what a lock owns does not wait for it if its lender is dead.
    BorrowersAreTold,
    /// The answers of a channel to other nodes are stored until they have arrived.
    AnswersAreKept,
    /// Whoever asks a channel again is answered the same.
    AnswersAreGivenAgain,
    /// That a value was received at the home is stored before anybody is told what follows from it.
    ReceivedValuesAreStored,
    /// Whoever is told something by a node that knows of more losses learns of these first.
    OlderViewsCatchUp,
}

pub(crate) const RULES: [Rule; 30] = [
    Rule::BorrowsTakeColours,
    Rule::ColoursOutliveObjects,
    Rule::LentBlocksStay,
    Rule::LentBlocksAreNotWritten,
    Rule::LoansOfLoansKeepBlocks,
    Rule::LastColoursFree,
    Rule::OwnersOfOthersAreLost,
    Rule::WordsComeHome,
    Rule::ScopesOutlastBorrowers,
    Rule::LateFreesAreKnown,
    Rule::StoredBeforeSent,
    Rule::PagesBeforeCommit,
    Rule::LostReplicasAreKnown,
    Rule::TakenOverWithFence,
    Rule::HoldersAreStored,
    Rule::GrantedObjectsAreStored,
    Rule::WritersAtHomeAreStored,
    Rule::TicketsAreKnown,
    Rule::WithdrawnTicketsAreKnown,
    Rule::LocksOfDeadWritersAreLost,
    Rule::LocksOutlastBorrowers,
    Rule::PromotedLocksOutlastBorrowers,
    Rule::LentLocksAreStored,
    Rule::BorrowsHaveRoots,
    Rule::LaterLocksAreNotLent,
    Rule::BorrowersAreTold,
    Rule::AnswersAreKept,
    Rule::AnswersAreGivenAgain,
    Rule::ReceivedValuesAreStored,
    Rule::OlderViewsCatchUp,
];

/// Moment of a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Phase {
    /// It is about to leave.
    Leaves,
    /// It is about to have its effect.
    Arrives,
    /// It has had its effect, and is about to be answered.
    Answered,
}

/// Kind of a message, of those between nodes and of those to the memory server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Fetch,
    Free,
    Spawn,
    Ended,
    Outlast,
    Outlasted,
    View,
    ReplicaLost,
    Lock,
    Unlock,
    Answered,
    Send,
    Receive,
    Cancel,
    Told,
    Page,
    Commit,
    Fence,
}

/// Node that something happens to at a boundary.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Victim {
    Sender,
    Receiver,
}

/// What becomes of the victim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Dies,
    /// It is stopped, and goes on before or after it is expelled.
    IsStopped,
}

/// What goes wrong, and how the program runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) without: Option<Rule>,
    /// Number of the boundary at which something happens, and to whom.
    pub(crate) faults: Vec<(u64, Victim, Fate)>,
    /// Messages of a thousand that are lost, or whose answers are.
    pub(crate) loss: u64,
    pub(crate) has_backups: bool,
    /// Whether two memory servers keep each backup; from which boundary on one of them cannot be reached, and by which
    /// node if not by any.
    pub(crate) has_mirrors: bool,
    pub(crate) cuts: Vec<(u64, usize, Option<u16>)>,
    /// Whether its tasks use locks.
    pub(crate) has_locks: bool,
    /// Whether they hold locks while they start the tasks of a scope, which are lent nothing of what the locks own.
    pub(crate) has_unused_locks: bool,
    /// Whether they send to channels.
    pub(crate) has_channels: bool,
    /// Whether nodes read each other's memory where it lies.
    pub(crate) reads_in_place: bool,
}

/// What a run has seen.
#[derive(PartialEq, Eq, Debug, Default)]
pub(crate) struct Seen {
    /// Message boundaries.
    pub(crate) boundaries: u64,
    /// Kinds of messages, and whether they were for the first node.
    pub(crate) said: BTreeSet<(Kind, bool)>,
    /// Boundaries at which a node has died or was stopped.
    pub(crate) struck: BTreeSet<(Kind, Phase, Victim)>,
    pub(crate) promotions: u64,
    pub(crate) fenced_writers: u64,
    /// Replicas of backups that their writers have given up.
    pub(crate) lost_replicas: u64,
    /// Locks that were taken, and dead readers that somebody waited for who took a lock over.
    pub(crate) grants: u64,
    /// Values that have come out of channels.
    pub(crate) received: u64,
    pub(crate) lenders: u64,
    /// Batches that have begun a half with all objects.
    pub(crate) checkpoints: u64,
}

/// Something that happens later.
pub(crate) type Action = Box<dyn FnOnce(&Rc<World>)>;
type Body = Pin<Box<dyn Future<Output = ()>>>;

/// Error of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Failure {
    Silent,
    NodeLost(u16),
    /// The object is not there.
    Stale,
    /// It was lost with a borrower.
    Lost,
    /// The lock waits for this task.
    Borrowed,
}

pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) random: RefCell<fastrand::Rng>,
    pub(crate) seen: RefCell<Seen>,
    pub(crate) nodes: Vec<RefCell<Node>>,
    pub(crate) locks: RefCell<Vec<LockTwin>>,
    pub(crate) channels: RefCell<ChannelTwins>,
    /// Whether a node is gone whose backup nobody could take over.
    pub(crate) is_backup_gone: Cell<bool>,
    now: Cell<u64>,
    order: Cell<u64>,
    events: RefCell<BTreeMap<(u64, u64), Action>>,
    tasks: RefCell<BTreeMap<u64, (u16, Option<Body>)>>,
    runnable: RefCell<VecDeque<u64>>,
    current: Cell<u64>,
    violation: RefCell<Option<String>>,
}

/// Where an answer arrives, once.
pub(crate) struct Slot<T>(Rc<RefCell<SlotState<T>>>);

struct SlotState<T> {
    value: Option<T>,
    is_answered: bool,
    waiter: Option<u64>,
}

impl<T> Clone for Slot<T> {
    fn clone(&self) -> Self {
        Slot(self.0.clone())
    }
}

impl<T> Slot<T> {
    pub(crate) fn new() -> Slot<T> {
        Slot(Rc::new(RefCell::new(SlotState { value: None, is_answered: false, waiter: None })))
    }

    pub(crate) fn put(&self, world: &World, value: T) {
        let mut state = self.0.borrow_mut();
        if !std::mem::replace(&mut state.is_answered, true) {
            state.value = Some(value);
            world.runnable.borrow_mut().extend(state.waiter.take());
        }
    }

    pub(crate) async fn wait(&self, world: &World) -> T {
        poll_fn(|_| {
            let mut state = self.0.borrow_mut();
            match state.value.take() {
                Some(value) => Poll::Ready(value),
                None => {
                    state.waiter = Some(world.current.get());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl World {
    pub(crate) fn new(plan: Plan) -> Rc<World> {
        let random = RefCell::new(fastrand::Rng::with_seed(plan.seed));
        let replicas = |id| usize::from(plan.has_backups && id != FIRST) * (1 + usize::from(plan.has_mirrors));
        let nodes = (0..NODES).map(|id| RefCell::new(Node::new(id, replicas(id)))).collect();
        Rc::new(World {
            plan,
            random,
            seen: RefCell::default(),
            nodes,
            locks: RefCell::default(),
            channels: RefCell::default(),
            is_backup_gone: Cell::new(false),
            now: Cell::new(0),
            order: Cell::new(0),
            events: RefCell::default(),
            tasks: RefCell::default(),
            runnable: RefCell::default(),
            current: Cell::new(0),
            violation: RefCell::default(),
        })
    }

    /// Returns whether what was handed over outlives its node.
    pub(crate) fn keeps_backups(&self) -> bool {
        self.plan.has_backups && !self.is_backup_gone.get()
    }

    pub(crate) fn has(&self, rule: Rule) -> bool {
        self.plan.without != Some(rule)
    }

    #[track_caller]
    pub(crate) fn node(&self, id: u16) -> RefMut<'_, Node> {
        self.nodes[usize::from(id)].borrow_mut()
    }

    /// Returns the root by which a borrow is known.
    pub(crate) fn root_of(&self, root: BorrowRoot) -> BorrowRoot {
        if self.has(Rule::BorrowsHaveRoots) { root } else { BorrowRoot::of_task(0, 0) }
    }

    pub(crate) fn pick(&self, below: u64) -> u64 {
        self.random.borrow_mut().u64(..below)
    }

    /// Records that a promise was broken, by what a node has seen that counts.
    pub(crate) fn broken(&self, at: u16, what: String) {
        if !self.node(at).is_condemned {
            self.violation.borrow_mut().get_or_insert(format!("node {at} at {}: {what}", self.now.get()));
        }
    }

    pub(crate) fn after(self: &Rc<World>, delay: u64, action: impl FnOnce(&Rc<World>) + 'static) {
        self.order.set(self.order.get() + 1);
        self.events.borrow_mut().insert((self.now.get() + delay, self.order.get()), Box::new(action));
    }

    /// Does something at a node after a while: not if that is dead then, and later if it is stopped.
    fn after_at(self: &Rc<World>, node: u16, delay: u64, action: impl FnOnce(&Rc<World>) + 'static) {
        self.after(delay, move |world| {
            let mut at = world.node(node);
            if at.is_stopped {
                // What has come meanwhile is looked at in any order.
                at.held.push(Box::new(move |world: &Rc<World>| world.after_at(node, world.pick(30), action)));
            } else if at.is_alive {
                drop(at);
                action(world);
            }
        });
    }

    /// Returns how long something takes to get from one place to another.
    pub(crate) fn delay(&self) -> u64 {
        // Now and then one message is overtaken by many.
        if self.pick(20) == 0 { self.pick(400) } else { 1 + self.pick(30) }
    }

    pub(crate) fn spawn(&self, node: u16, body: impl Future<Output = ()> + 'static) {
        self.order.set(self.order.get() + 1);
        self.tasks.borrow_mut().insert(self.order.get(), (node, Some(Box::pin(body))));
        self.runnable.borrow_mut().push_back(self.order.get());
    }

    /// Runs until nothing is left to do. Returns what was seen, or which promise was broken.
    pub(crate) fn run(self: &Rc<World>) -> Result<Seen, String> {
        for _ in 0..STEPS_MAX {
            if let Some(violation) = self.violation.borrow_mut().take() {
                return self.end(Err(violation));
            }
            let task = self.runnable.borrow_mut().pop_front();
            if let Some(task) = task {
                self.poll(task);
                continue;
            }
            let Some(((now, _), action)) = self.events.borrow_mut().pop_first() else {
                return self.end(Ok(()));
            };
            self.now.set(now);
            action(self);
        }
        self.end(Err("it never ends".into()))
    }

    fn end(&self, ended: Result<(), String>) -> Result<Seen, String> {
        // Tasks hold the world.
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        let events = std::mem::take(&mut *self.events.borrow_mut());
        drop((tasks, events));
        self.nodes.iter().for_each(|node| node.borrow_mut().held.clear());
        ended.map(|()| std::mem::take(&mut *self.seen.borrow_mut()))
    }

    fn poll(&self, id: u64) {
        let Some((node, body)) = self.tasks.borrow_mut().get_mut(&id).map(|(node, body)| (*node, body.take())) else {
            return;
        };
        let [is_alive, is_stopped] = {
            let at = self.node(node);
            [at.is_alive, at.is_stopped]
        };
        let mut body = if is_alive { body } else { None };
        if let Some(running) = &mut body {
            if is_stopped {
                self.node(node).held.push(Box::new(move |world: &Rc<World>| world.runnable.borrow_mut().push_back(id)));
            } else {
                self.current.set(id);
                if running.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                    body = None;
                }
            }
        }
        let mut tasks = self.tasks.borrow_mut();
        match body {
            Some(body) => drop(tasks.insert(id, (node, Some(body)))),
            None => drop(tasks.remove(&id)),
        }
    }

    /// Passes the boundary of a message. Something may happen to one of its ends.
    fn pass(self: &Rc<World>, kind: Kind, phase: Phase, sender: u16, receiver: Option<u16>) {
        let number = {
            let mut seen = self.seen.borrow_mut();
            seen.boundaries += 1;
            seen.said.insert((kind, receiver == Some(FIRST)));
            seen.boundaries
        };
        for (at, victim, fate) in &self.plan.faults {
            let node = match victim {
                Victim::Sender => Some(sender),
                Victim::Receiver => receiver,
            };
            let Some(node) = node.filter(|node| *at == number && *node != FIRST && self.node(*node).is_alive) else {
                continue;
            };
            self.seen.borrow_mut().struck.insert((kind, phase, *victim));
            match fate {
                Fate::Dies => {
                    self.die(node);
                    let notice = 1 + self.pick(100);
                    self.after(notice, move |world| world.expel(node));
                }
                Fate::IsStopped => {
                    self.node(node).is_stopped = true;
                    let for_so_long = self.pick(2 * EXPELLED_AFTER);
                    self.after(for_so_long, move |world| {
                        let held = {
                            let mut at = world.node(node);
                            at.is_stopped = false;
                            std::mem::take(&mut at.held)
                        };
                        held.into_iter().for_each(|action| action(world));
                    });
                    self.after(EXPELLED_AFTER, move |world| {
                        if world.node(node).is_stopped {
                            world.expel(node);
                        }
                    });
                }
            }
        }
    }

    /// Ends a node. What is on its way arrives.
    pub(crate) fn die(&self, node: u16) {
        let mut dead = self.node(node);
        (dead.is_alive, dead.is_stopped, dead.is_condemned) = (false, false, true);
        dead.held.clear();
    }

    fn expel(self: &Rc<World>, node: u16) {
        if !std::mem::replace(&mut self.node(node).is_expelled, true) {
            self.node(node).is_condemned = true;
            // An expelled node ends soon after it runs again.
            self.after(EXPELLED_AFTER * 3, move |world| world.die(node));
            self.spawn(FIRST, crate::node::take_over(self.clone(), node));
        }
    }

    /// Asks a node, and waits for its answer. Both know of the same losses then, as far as the message and the answer
    /// may follow from them.
    pub(crate) async fn ask(self: &Rc<World>, from: u16, to: u16, message: Message) -> Reply {
        if !message.is_read() {
            commit(self, from).await;
        }
        let (reply, view) = self.ask_once(from, to, message).await;
        if self.has(Rule::OlderViewsCatchUp) {
            Node::learn(self, from, &view);
        }
        reply
    }

    async fn ask_once(self: &Rc<World>, from: u16, to: u16, message: Message) -> (Reply, View) {
        let (kind, is_read) = (message.kind(), message.is_read());
        if self.node(from).lost.contains(&to) {
            return (Err(Failure::NodeLost(to)), View::new());
        }
        let view = self.node(from).view.clone();
        self.pass(kind, Phase::Leaves, from, Some(to));
        self.alive(from).await;
        let slot = Slot::new();
        self.node(from).calls.push((to, slot.clone()));
        // A task that was sent arrives if its node lives: it cannot be sent twice.
        let is_lost = kind != Kind::Spawn && self.pick(1000) < self.plan.loss;
        if !is_lost {
            let answer = slot.clone();
            self.after_at(to, self.delay(), move |world| {
                world.pass(kind, Phase::Arrives, from, Some(to));
                // It may have died or been stopped just now.
                world.after_at(to, 0, move |world| {
                    let is_expelled = world.node(to).lost.contains(&from);
                    if !is_expelled && world.has(Rule::OlderViewsCatchUp) {
                        Node::learn(world, to, &view);
                    }
                    let reply = Node::receive(world, to, from, message);
                    let say = move |world: &Rc<World>| {
                        world.pass(kind, Phase::Answered, from, Some(to));
                        let is_unanswered = world.pick(1000) < world.plan.loss || !world.node(to).is_alive;
                        if !is_unanswered {
                            let view = world.node(to).view.clone();
                            world.after_at(from, world.delay(), move |world| answer.put(world, (reply, view)));
                        }
                    };
                    // It has an effect elsewhere, which is stored first.
                    if is_read || world.node(to).backup.is_none() {
                        return say(world);
                    }
                    let world = world.clone();
                    world.clone().spawn(to, async move {
                        commit(&world, to).await;
                        say(&world);
                    });
                });
            });
        }
        let silent = slot.clone();
        self.after(WITHIN, move |world| silent.put(world, (Err(Failure::Silent), View::new())));
        slot.wait(self).await
    }

    /// Returns whether a node can reach a memory server.
    fn reaches(&self, from: u16, replica: usize) -> bool {
        let is_cut = |(boundary, server, node): &(u64, usize, Option<u16>)| {
            *server == replica && node.is_none_or(|node| node == from) && self.seen.borrow().boundaries >= *boundary
        };
        !self.plan.cuts.iter().any(is_cut)
    }

    /// Has a memory server do something for a node, and waits until it has. Returns `None` if it cannot be reached: it
    /// may have done it.
    pub(crate) async fn at_replica<T: 'static>(
        self: &Rc<World>,
        from: u16,
        replica: usize,
        kind: Kind,
        step: impl FnOnce(&World) -> T + 'static,
    ) -> Option<T> {
        self.start_at_replica(from, replica, kind, step).await.wait(self).await
    }

    /// Asks a memory server, and does not wait for its answer.
    pub(crate) async fn start_at_replica<T: 'static>(
        self: &Rc<World>,
        from: u16,
        replica: usize,
        kind: Kind,
        step: impl FnOnce(&World) -> T + 'static,
    ) -> Slot<Option<T>> {
        self.pass(kind, Phase::Leaves, from, None);
        self.alive(from).await;
        let slot = Slot::new();
        let answer = slot.clone();
        self.after(self.delay(), move |world| {
            world.pass(kind, Phase::Arrives, from, None);
            let done = world.reaches(from, replica).then(|| step(world));
            world.pass(kind, Phase::Answered, from, None);
            let done = done.filter(|_| world.reaches(from, replica));
            world.after_at(from, world.delay(), move |world| answer.put(world, done));
        });
        slot
    }

    /// Goes on if the node of this task lives, and never if it has died just now.
    pub(crate) async fn alive(&self, node: u16) {
        if !self.node(node).is_alive {
            pending::<()>().await;
        }
    }

    /// Waits for a while.
    pub(crate) async fn pause(self: &Rc<World>, time: u64) {
        let slot = Slot::new();
        let over = slot.clone();
        self.after(time, move |world| over.put(world, ()));
        slot.wait(self).await;
    }
}
