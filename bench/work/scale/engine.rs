//! Replay of a trace in virtual time: nodes with processors, handlers and links, and tasks that wait for messages.
//!
//! A discrete-event simulation. A node has so many processors, which run the tasks that are ready in the order in which
//! they became so, those that have begun before the others; a task that waits gives its processor to another. A message
//! takes the sender's link for its bytes, travels, takes the receiver's link, and is handled at the receiver by a
//! thread for each other node, in order. Whoever asks spends as much processor time on a question and its answer as is
//! spent on handling it.
//!
//! What has to be asked where is decided by a [`Coherence`].

use super::coherence::{Coherence, Fetch, LockProtocol, Trip};
use super::trace::{Action, ObjectId, Step, TaskId, Trace};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

/// What a message has beside its contents: addresses, numbers, the loads of its sender.
const HEADER_BYTES: u64 = 64;
/// Handles of an object that a node asks for at most at a time.
const SHARES_MAX: u32 = 1024;
/// Time after which a node gives back the handles that it does not need.
const SHARES_KEPT_NS: u64 = 5_000_000;

/// Network between the nodes, and what the runtime takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    /// Time for which a message is on its way, beside that of its bytes.
    pub(super) one_way_ns: u64,
    pub(super) bytes_per_us: u64,
    /// Time of a processor for a message: at the node that is asked, and as much at the one that asks.
    pub(super) handle_ns: u64,
    /// What a lock at its home takes beside that of one process.
    pub(super) lock_ns: u64,
    /// What a task takes to start and to end, beside a call.
    pub(super) task_ns: u64,
    /// Whether messages are handled and bytes copied by the processors that run tasks. Otherwise the first have processors of
    /// their own, and devices carry the others.
    pub(super) takes_processors: bool,
}

/// Counts of a replay, and how long it took.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(super) struct ReplayReport {
    pub(super) elapsed_ns: u64,
    /// Messages, without answers.
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// Objects that have moved to another node.
    pub(super) moves: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// The work before a step of a task is done.
    Worked(u32),
    /// The last byte of a letter has travelled, unless the receiver's link is busy.
    Arrived(u32),
    /// A letter is there, and was handled.
    Handled(u32),
    /// A node gives handles of an object back.
    GiveBack(u16, u32),
}

/// Purpose of a letter.
#[derive(Clone, Copy, Debug)]
enum Letter {
    /// Part of a trip, to the place of this number on its path.
    Trip(u32, usize),
    /// A node of a trip's fan is told, or has answered.
    Fan(u32, u16),
    FanAnswer(u32),
    Spawn(TaskId),
    Spawned(TaskId),
    Ended(TaskId),
    /// The task drops what an object owned.
    Drop(TaskId),
    AskLock(TaskId, ObjectId),
    /// The task has what it waits for.
    Resume(TaskId),
    Unlock(ObjectId),
    /// The task goes on at another node, when it has the lock.
    EnterAt(TaskId, ObjectId),
    /// The lock is not free, so the body comes again as a task, which waits.
    Refused(TaskId, ObjectId),
    EnterAgain(TaskId),
    /// The task goes on at its own node.
    Return(TaskId),
    /// Nobody waits for it.
    Notice,
}

#[derive(Clone, Copy, Debug)]
struct Mail {
    from: u16,
    to: u16,
    letter: Letter,
    /// Time that it takes of a link.
    link_ns: u64,
    /// Time that it takes of the handler; `None` for an answer, which is taken by whoever waits for it.
    handle_ns: Option<u64>,
}

/// Who waits for a trip.
#[derive(Clone, Copy, Debug)]
enum Waiter {
    Task(TaskId),
    /// All tasks of a node that want a copy of this object.
    Flight(u16, ObjectId),
}

#[derive(Debug)]
struct OpenTrip {
    trip: Trip,
    waiter: Waiter,
    /// Nodes of the fan that have not answered.
    fan_left: u32,
}

/// Copy of an object that is on its way to a node (single flight), and the tasks that wait for it.
#[derive(Debug)]
struct Flight {
    trips_left: usize,
    tasks: Vec<TaskId>,
}

#[derive(Debug)]
struct NodeState {
    idle: usize,
    /// Tasks that want a processor: those that have begun, and those that have not.
    begun: VecDeque<TaskId>,
    fresh: VecDeque<TaskId>,
    /// When the links are free.
    out_free_ns: u64,
    in_free_ns: u64,
    /// When the handler for each other node is free.
    handler_free_ns: Vec<u64>,
    /// What messages have taken of processors that run tasks.
    taken_ns: u64,
}

#[derive(Clone, Debug, Default)]
struct TaskState {
    /// Node at which it runs.
    at: u16,
    /// Nodes to which it returns after its locks.
    came_from: Vec<u16>,
    next: usize,
    /// Time of a processor that it has to pay before its next step.
    debt_ns: u64,
    parent: Option<TaskId>,
    is_joinable: bool,
    joiner: Option<TaskId>,
    trips_left: u32,
    /// Whether the step that comes next was tried before, so the work before it is done.
    tries_again: bool,
}

#[derive(Debug, Default)]
struct LockState {
    is_held: bool,
    line: VecDeque<TaskId>,
}

/// Handles of an object at a node that is not its home.
#[derive(Debug, Default)]
struct SpareShares {
    spare: u32,
    batch: u32,
    gives_back: bool,
}

/// Does a task go on after a step?
enum Progress {
    /// After so much time of its processor.
    GoOn(u64),
    Wait,
}

pub(super) struct Replay<'t, C> {
    trace: &'t Trace,
    coherence: C,
    network: Network,
    now_ns: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Numbers of events, so that those of the same time have an order.
    next_event: u64,
    nodes: Vec<NodeState>,
    tasks: Vec<TaskState>,
    mails: Slots<Mail>,
    trips: Slots<OpenTrip>,
    flights: HashMap<(u16, ObjectId), Flight>,
    locks: HashMap<ObjectId, LockState>,
    shares: HashMap<(u16, ObjectId), SpareShares>,
    report: ReplayReport,
}

/// Values by numbers that are used again.
#[derive(Debug)]
struct Slots<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slots<T> {
    fn new() -> Slots<T> {
        Slots { slots: Vec::new(), free: Vec::new() }
    }

    fn insert(&mut self, value: T) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(value);
                slot
            }
            None => {
                self.slots.push(Some(value));
                self.slots.len() as u32 - 1
            }
        }
    }

    fn get(&mut self, slot: u32) -> &mut T {
        self.slots[slot as usize].as_mut().expect("the slot is in use")
    }

    fn remove(&mut self, slot: u32) -> T {
        self.free.push(slot);
        self.slots[slot as usize].take().expect("the slot is in use")
    }
}

impl<'t, C: Coherence> Replay<'t, C> {
    pub(super) fn new(trace: &'t Trace, coherence: C, network: Network, processors: usize) -> Self {
        let count = usize::from(trace.nodes);
        let node = |_| NodeState {
            idle: processors,
            begun: VecDeque::new(),
            fresh: VecDeque::new(),
            out_free_ns: 0,
            in_free_ns: 0,
            handler_free_ns: vec![0; count],
            taken_ns: 0,
        };
        let task = |task: &super::trace::TaskTrace| TaskState { at: task.node, ..TaskState::default() };
        Replay {
            trace,
            coherence,
            network,
            now_ns: 0,
            events: BinaryHeap::new(),
            next_event: 0,
            nodes: (0..count).map(node).collect(),
            tasks: trace.tasks.iter().map(task).collect(),
            mails: Slots::new(),
            trips: Slots::new(),
            flights: HashMap::new(),
            locks: HashMap::new(),
            shares: HashMap::new(),
            report: ReplayReport::default(),
        }
    }

    /// Replays all of the trace. Returns what it took until the first task had ended.
    pub(super) fn run(mut self) -> ReplayReport {
        self.make_ready(TaskId(0), false);
        let last = self.trace.tasks[0].steps.len();
        while self.tasks[0].next < last {
            let Reverse((now, _, event)) = self.events.pop().expect("the first task waits for somebody who goes on");
            self.now_ns = now;
            match event {
                Event::Worked(task) => self.step(TaskId(task)),
                Event::Arrived(mail) => self.receive(mail),
                Event::Handled(mail) => {
                    let Mail { to, letter, .. } = self.mails.remove(mail);
                    self.handle(to, letter);
                }
                Event::GiveBack(node, object) => self.give_back(node, ObjectId(object)),
            }
        }
        self.report.elapsed_ns = self.now_ns;
        self.report
    }

    fn schedule(&mut self, at_ns: u64, event: Event) {
        self.events.push(Reverse((at_ns, self.next_event, event)));
        self.next_event += 1;
    }

    // Processors.

    fn make_ready(&mut self, task: TaskId, is_urgent: bool) {
        let TaskState { at, next, .. } = self.tasks[task.index()];
        let node = &mut self.nodes[usize::from(at)];
        let line = if next > 0 { &mut node.begun } else { &mut node.fresh };
        if node.idle > 0 {
            node.idle -= 1;
            self.begin_step(task, 0);
        } else if is_urgent {
            line.push_front(task);
        } else {
            line.push_back(task);
        }
    }

    /// Has a task that has a processor do the work before its next step.
    fn begin_step(&mut self, task: TaskId, cost_ns: u64) {
        let state = &mut self.tasks[task.index()];
        let debt = std::mem::take(&mut state.debt_ns);
        let is_done = std::mem::take(&mut state.tries_again);
        let work = if is_done { 0 } else { self.trace.tasks[task.index()].steps[state.next].work_ns.into() };
        let taken = std::mem::take(&mut self.nodes[usize::from(state.at)].taken_ns);
        self.schedule(self.now_ns + debt + cost_ns + work + taken, Event::Worked(task.0));
    }

    /// Gives the processor of a task to the next one.
    fn release_processor(&mut self, node: u16) {
        let state = &mut self.nodes[usize::from(node)];
        match state.begun.pop_front().or_else(|| state.fresh.pop_front()) {
            Some(next) => self.begin_step(next, 0),
            None => state.idle += 1,
        }
    }

    fn step(&mut self, task: TaskId) {
        let state = &mut self.tasks[task.index()];
        let Step { action, .. } = self.trace.tasks[task.index()].steps[state.next];
        let node = state.at;
        state.next += 1;
        match self.act(task, node, action) {
            Progress::GoOn(cost_ns) => self.begin_step(task, cost_ns),
            Progress::Wait => self.release_processor(node),
        }
    }

    fn act(&mut self, task: TaskId, node: u16, action: Action) -> Progress {
        match action {
            Action::Read(object, range) => {
                if let Some(flight) = self.flights.get_mut(&(node, object)) {
                    flight.tasks.push(task);
                    return Progress::Wait;
                }
                let fetch = self.coherence.read(node, object, range);
                self.fetch(task, node, fetch)
            }
            Action::Prefetch(object, range) => {
                if !self.flights.contains_key(&(node, object))
                    && let Some(Fetch { trips, copy: Some(object), .. }) = self.coherence.prefetch(node, object, range)
                {
                    self.pay(task, trips.iter().map(|trip| trip.messages).sum());
                    self.begin_flight(node, object, trips, None);
                }
                Progress::GoOn(0)
            }
            Action::Write(object, range) => {
                let fetch = self.coherence.write(node, object, range);
                self.fetch(task, node, fetch)
            }
            Action::Lock(object) => self.lock(task, node, object),
            Action::Unlock(object) => self.unlock(task, node, object),
            Action::Enter(object, bytes) => self.enter(task, node, object, bytes),
            Action::Leave(object, bytes) => self.leave(task, node, object, bytes),
            Action::Step(object) => {
                let home = self.coherence.home(object);
                if home == node { Progress::GoOn(0) } else { self.ask(task, node, home, 0) }
            }
            Action::Share(object) => self.share(task, node, object),
            Action::Unshare(object) => self.unshare(node, object),
            Action::Free(object, drops) => {
                let home = self.coherence.home(object);
                self.report.messages += u64::from(home != node);
                self.send(node, home, 1, 0, drops.map_or(Letter::Notice, Letter::Drop));
                Progress::GoOn(0)
            }
            Action::Spawn(child) => {
                let trace = &self.trace.tasks[child.index()];
                self.tasks[child.index()].parent = Some(task);
                if trace.node == node {
                    self.tasks[child.index()].debt_ns = self.network.task_ns;
                    self.make_ready(child, false);
                    return Progress::GoOn(0);
                }
                self.report.messages += 1;
                self.send(node, trace.node, 1, trace.argument_bytes.into(), Letter::Spawn(child));
                self.pay(task, 1);
                Progress::Wait
            }
            Action::Join(child) => {
                if self.tasks[child.index()].is_joinable {
                    return Progress::GoOn(0);
                }
                self.tasks[child.index()].joiner = Some(task);
                Progress::Wait
            }
            Action::End => {
                let parent = self.tasks[task.index()].parent;
                let home = parent.map_or(node, |parent| self.trace.tasks[parent.index()].node);
                if home == node {
                    self.end(task);
                } else {
                    self.report.messages += 1;
                    let bytes = self.trace.tasks[task.index()].result_bytes.into();
                    self.send(node, home, 1, bytes, Letter::Ended(task));
                }
                Progress::Wait
            }
        }
    }

    /// Lets whoever waits for the end of a task go on.
    fn end(&mut self, task: TaskId) {
        let state = &mut self.tasks[task.index()];
        state.is_joinable = true;
        if let Some(joiner) = state.joiner.take() {
            self.make_ready(joiner, false);
        }
    }

    // Messages.

    /// Charges a task for so many questions and their answers.
    fn pay(&mut self, task: TaskId, messages: u64) {
        self.tasks[task.index()].debt_ns += self.network.handle_ns * messages;
    }

    /// Has messages take so much time of a node's processors, if all of these run tasks.
    fn take_processor(&mut self, node: u16, ns: u64) {
        let state = &mut self.nodes[usize::from(node)];
        if self.network.takes_processors && state.idle == 0 {
            state.taken_ns += ns;
        }
    }

    /// Sends a letter that takes so many messages.
    fn send(&mut self, from: u16, to: u16, messages: u64, bytes: u64, letter: Letter) {
        let is_answer = match letter {
            Letter::Resume(_) | Letter::Spawned(_) | Letter::Return(_) | Letter::FanAnswer(_) | Letter::Refused(..) => {
                true
            }
            Letter::Trip(trip, place) => place == self.trips.get(trip).trip.path.last(),
            _ => false,
        };
        let bytes = bytes + HEADER_BYTES * messages;
        let link_ns = bytes * 1000 / self.network.bytes_per_us;
        let handle_ns = (!is_answer).then_some(self.network.handle_ns * messages);
        let mail = self.mails.insert(Mail { from, to, letter, link_ns, handle_ns });
        if from == to {
            self.schedule(self.now_ns, Event::Handled(mail));
            return;
        }
        self.report.bytes += bytes;
        self.take_processor(from, link_ns / 2);
        let sender = &mut self.nodes[usize::from(from)];
        sender.out_free_ns = self.now_ns.max(sender.out_free_ns) + link_ns;
        let there_ns = sender.out_free_ns + self.network.one_way_ns;
        self.schedule(there_ns, Event::Arrived(mail));
    }

    /// Has a letter take the receiver's link, in the order in which letters arrive, and then its handler.
    fn receive(&mut self, mail: u32) {
        let Mail { from, to, link_ns, handle_ns, .. } = *self.mails.get(mail);
        self.take_processor(to, link_ns / 2 + handle_ns.unwrap_or(0));
        let receiver = &mut self.nodes[usize::from(to)];
        receiver.in_free_ns = self.now_ns.max(receiver.in_free_ns + link_ns);
        let mut handled_ns = receiver.in_free_ns;
        if let Some(handle_ns) = handle_ns {
            let handler = &mut receiver.handler_free_ns[usize::from(from)];
            *handler = handled_ns.max(*handler) + handle_ns;
            handled_ns = *handler;
        }
        self.schedule(handled_ns, Event::Handled(mail));
    }

    /// Has a task ask a node, and wait for the answer.
    fn ask(&mut self, task: TaskId, node: u16, home: u16, answer_bytes: u64) -> Progress {
        let trip = Trip::round(home, node, 1, 0, answer_bytes);
        self.wait_for(task, node, vec![trip])
    }

    fn fetch(&mut self, task: TaskId, node: u16, fetch: Fetch) -> Progress {
        let Fetch { trips, copy, left } = fetch;
        if let Some(home) = left {
            self.report.moves += 1;
            self.report.messages += 1;
            self.send(node, home, 1, 0, Letter::Notice);
        }
        if trips.is_empty() {
            return Progress::GoOn(0);
        }
        let Some(object) = copy else { return self.wait_for(task, node, trips) };
        self.pay(task, trips.iter().map(|trip| trip.messages).sum());
        self.begin_flight(node, object, trips, Some(task));
        Progress::Wait
    }

    /// Sends the trips for which all tasks of a node wait that want a copy of an object.
    fn begin_flight(&mut self, node: u16, object: ObjectId, trips: Vec<Trip>, task: Option<TaskId>) {
        let flight = Flight { trips_left: trips.len(), tasks: task.into_iter().collect() };
        self.flights.insert((node, object), flight);
        self.send_trips(node, trips, Waiter::Flight(node, object));
    }

    fn wait_for(&mut self, task: TaskId, node: u16, trips: Vec<Trip>) -> Progress {
        self.tasks[task.index()].trips_left += trips.len() as u32;
        self.pay(task, trips.iter().map(|trip| trip.messages).sum());
        self.send_trips(node, trips, Waiter::Task(task));
        Progress::Wait
    }

    fn send_trips(&mut self, from: u16, trips: Vec<Trip>, waiter: Waiter) {
        for trip in trips {
            // What a node has its own directory do is no message.
            self.report.messages += if trip.path.node(0) == from { 0 } else { trip.messages };
            let (to, bytes, messages) = (trip.path.node(0), trip.bytes(0), trip.messages);
            let number = self.trips.insert(OpenTrip { trip, waiter, fan_left: 0 });
            self.send(from, to, messages, bytes, Letter::Trip(number, 0));
        }
    }

    /// Sends a trip on from a place on its path.
    fn go_on(&mut self, number: u32, place: usize) {
        let OpenTrip { trip, waiter, .. } = self.trips.get(number);
        if place == trip.path.last() {
            let waiter = *waiter;
            self.trips.remove(number);
            return self.arrive(waiter);
        }
        let (from, to) = (trip.path.node(place), trip.path.node(place + 1));
        let (messages, bytes) = (trip.messages, trip.bytes(place + 1));
        self.send(from, to, messages, bytes, Letter::Trip(number, place + 1));
    }

    fn arrive(&mut self, waiter: Waiter) {
        match waiter {
            Waiter::Task(task) => {
                let state = &mut self.tasks[task.index()];
                state.trips_left -= 1;
                if state.trips_left == 0 {
                    self.make_ready(task, false);
                }
            }
            Waiter::Flight(node, object) => {
                let flight = self.flights.get_mut(&(node, object)).expect("its trips are on their way");
                flight.trips_left -= 1;
                if flight.trips_left == 0 {
                    self.coherence.arrived(node, object);
                    let landed = self.flights.remove(&(node, object));
                    landed.into_iter().flat_map(|flight| flight.tasks).for_each(|task| self.make_ready(task, false));
                }
            }
        }
    }

    fn handle(&mut self, to: u16, letter: Letter) {
        match letter {
            Letter::Trip(number, place) => {
                let open = self.trips.get(number);
                let (fan, messages) = (open.trip.fan, open.trip.messages);
                if place > 0 || fan == 0 {
                    return self.go_on(number, place);
                }
                open.fan_left = fan.count_ones();
                for node in (0..self.trace.nodes).filter(|node| fan & 1 << node != 0) {
                    self.report.messages += messages;
                    self.send(to, node, messages, 0, Letter::Fan(number, to));
                }
            }
            Letter::Fan(number, home) => {
                let messages = self.trips.get(number).trip.messages;
                self.send(to, home, messages, 0, Letter::FanAnswer(number));
            }
            Letter::FanAnswer(number) => {
                let open = self.trips.get(number);
                open.fan_left -= 1;
                if open.fan_left == 0 {
                    self.go_on(number, 0);
                }
            }
            Letter::Spawn(child) => {
                self.tasks[child.index()].debt_ns = self.network.task_ns;
                self.make_ready(child, false);
                let parent = self.tasks[child.index()].parent.expect("it was started by a task");
                let node = self.trace.tasks[parent.index()].node;
                self.send(to, node, 1, 0, Letter::Spawned(parent));
            }
            Letter::Spawned(task) | Letter::Resume(task) => self.make_ready(task, false),
            Letter::Ended(task) => self.end(task),
            Letter::Drop(task) => self.make_ready(task, false),
            Letter::AskLock(task, object) => {
                if self.take_lock(task, object) {
                    self.grant(task, object);
                }
            }
            Letter::Unlock(object) => self.pass_lock(object, to),
            Letter::EnterAt(task, object)
                if self.coherence.lock_protocol() == LockProtocol::AtHome
                    && self.locks.get(&object).is_some_and(|lock| lock.is_held) =>
            {
                self.send(to, self.tasks[task.index()].at, 1, 0, Letter::Refused(task, object));
            }
            Letter::Refused(task, object) => {
                // A task is a message there and one back.
                self.report.messages += 2;
                self.pay(task, 1);
                self.send(to, self.coherence.home(object), 1, 0, Letter::EnterAgain(task));
            }
            Letter::EnterAgain(task) => {
                let state = &mut self.tasks[task.index()];
                state.came_from.push(std::mem::replace(&mut state.at, to));
                state.next -= 1;
                state.tries_again = true;
                state.debt_ns += self.network.task_ns;
                self.make_ready(task, false);
            }
            Letter::EnterAt(task, object) => {
                let state = &mut self.tasks[task.index()];
                state.came_from.push(std::mem::replace(&mut state.at, to));
                if self.take_lock(task, object) {
                    self.make_ready(task, true);
                }
            }
            Letter::Return(task) => {
                self.tasks[task.index()].at = to;
                self.make_ready(task, false);
            }
            Letter::Notice => {}
        }
    }

    // Locks.

    /// Takes a lock for a task, or puts the task into its line. Returns whether the task has it.
    fn take_lock(&mut self, task: TaskId, object: ObjectId) -> bool {
        let lock = self.locks.entry(object).or_default();
        if lock.is_held {
            lock.line.push_back(task);
            return false;
        }
        lock.is_held = true;
        true
    }

    fn lock(&mut self, task: TaskId, node: u16, object: ObjectId) -> Progress {
        let home = self.coherence.home(object);
        match self.coherence.lock_protocol() {
            LockProtocol::AtHome if home != node => {
                self.report.messages += 1;
                self.pay(task, 1);
                self.send(node, home, 1, 0, Letter::AskLock(task, object));
                Progress::Wait
            }
            LockProtocol::Delegated if home != node => {
                self.report.messages += 1;
                self.pay(task, 1);
                self.send(node, home, 1, 0, Letter::EnterAt(task, object));
                Progress::Wait
            }
            _ if !self.take_lock(task, object) => Progress::Wait,
            LockProtocol::AtHome | LockProtocol::Delegated => Progress::GoOn(self.network.lock_ns),
            LockProtocol::Cached => {
                let fetch = self.coherence.write(node, object, self.coherence.whole(object));
                match self.fetch(task, node, fetch) {
                    Progress::GoOn(_) => Progress::GoOn(self.network.lock_ns),
                    Progress::Wait => Progress::Wait,
                }
            }
        }
    }

    /// Tells a task that it has a lock, from the lock's home.
    fn grant(&mut self, task: TaskId, object: ObjectId) {
        let (home, node) = (self.coherence.home(object), self.tasks[task.index()].at);
        let bytes = self.coherence.whole(object).len.into();
        self.send(home, node, 1, bytes, Letter::Resume(task));
    }

    fn unlock(&mut self, task: TaskId, node: u16, object: ObjectId) -> Progress {
        let home = self.coherence.home(object);
        match self.coherence.lock_protocol() {
            LockProtocol::AtHome if home != node => {
                self.report.messages += 1;
                self.send(node, home, 1, self.coherence.whole(object).len.into(), Letter::Unlock(object));
                Progress::GoOn(self.network.handle_ns)
            }
            LockProtocol::AtHome | LockProtocol::Cached => {
                self.pass_lock(object, node);
                Progress::GoOn(0)
            }
            LockProtocol::Delegated => {
                self.pass_lock(object, node);
                let Some(base) = self.tasks[task.index()].came_from.pop() else { return Progress::GoOn(0) };
                self.send(node, base, 1, self.coherence.whole(object).len.into(), Letter::Return(task));
                Progress::Wait
            }
        }
    }

    /// Has a task apply a body to the value of a lock: at its home, unless the value comes to whoever wants it.
    fn enter(&mut self, task: TaskId, node: u16, object: ObjectId, bytes: u32) -> Progress {
        let home = self.coherence.home(object);
        if home == node || self.coherence.lock_protocol() == LockProtocol::Cached {
            return self.lock(task, node, object);
        }
        self.report.messages += 1;
        self.pay(task, 1);
        self.send(node, home, 1, bytes.into(), Letter::EnterAt(task, object));
        Progress::Wait
    }

    fn leave(&mut self, task: TaskId, node: u16, object: ObjectId, bytes: u32) -> Progress {
        if self.coherence.lock_protocol() == LockProtocol::Cached {
            return self.unlock(task, node, object);
        }
        self.pass_lock(object, node);
        let Some(base) = self.tasks[task.index()].came_from.pop() else { return Progress::GoOn(0) };
        self.send(node, base, 1, bytes.into(), Letter::Return(task));
        Progress::Wait
    }

    /// Gives a lock to the next one in its line, from the node of the one who had it.
    fn pass_lock(&mut self, object: ObjectId, from: u16) {
        let lock = self.locks.get_mut(&object).expect("the lock is held");
        let Some(next) = lock.line.pop_front() else {
            lock.is_held = false;
            return;
        };
        match self.coherence.lock_protocol() {
            LockProtocol::AtHome => self.grant(next, object),
            LockProtocol::Delegated => self.make_ready(next, true),
            LockProtocol::Cached => {
                let node = self.tasks[next.index()].at;
                let range = self.coherence.whole(object);
                if node == from {
                    return self.make_ready(next, false);
                }
                // The next one has asked before, so what it needs comes from the one before it.
                let fetch = self.coherence.write(node, object, range);
                let messages = fetch.trips.iter().map(|trip| trip.messages).sum::<u64>().max(1);
                self.report.messages += messages;
                self.pay(next, messages);
                self.send(from, node, messages, range.len.into(), Letter::Resume(next));
            }
        }
    }

    // Handles of objects that many own.

    fn share(&mut self, task: TaskId, node: u16, object: ObjectId) -> Progress {
        let home = self.coherence.home(object);
        if home == node {
            return Progress::GoOn(0);
        }
        let shares = self.shares.entry((node, object)).or_default();
        if shares.spare > 0 {
            shares.spare -= 1;
            return Progress::GoOn(0);
        }
        shares.batch = (shares.batch * 2).clamp(1, SHARES_MAX);
        shares.spare += shares.batch - 1;
        self.ask(task, node, home, 0)
    }

    fn unshare(&mut self, node: u16, object: ObjectId) -> Progress {
        if self.coherence.home(object) != node {
            let shares = self.shares.entry((node, object)).or_default();
            shares.spare += 1;
            if !std::mem::replace(&mut shares.gives_back, true) {
                self.schedule(self.now_ns + SHARES_KEPT_NS, Event::GiveBack(node, object.0));
            }
        }
        Progress::GoOn(0)
    }

    fn give_back(&mut self, node: u16, object: ObjectId) {
        let home = self.coherence.home(object);
        if let Some(shares) = self.shares.remove(&(node, object))
            && shares.spare > 0
        {
            self.report.messages += 1;
            self.send(node, home, 1, 0, Letter::Notice);
        }
    }
}

/// Returns the objects that the trace writes to or locks.
pub(super) fn written_objects(trace: &Trace) -> HashSet<ObjectId> {
    let steps = trace.tasks.iter().flat_map(|task| &task.steps);
    let written = steps.filter_map(|step| match step.action {
        Action::Write(object, _) | Action::Lock(object) | Action::Enter(object, _) => Some(object),
        _ => None,
    });
    written.collect()
}
