//! Channels as farfield-dsm has them: queues and answers at their homes, and who waits for them. What they promise is
//! checked by a twin that knows who has sent and received what.

use crate::locks::LockEnd;
use crate::node::{Answer, Backup, Block, Contents, Here, Message, Node, free, home_of, key, tell};
use crate::program::Held;
use crate::world::{FIRST, Failure, NODES, Rule, Slot, World};
use farfield_core::dsm::{
    ChannelQueue, HomeTicket, OwnerWord, ReceiveStep, SendStep, StoredAnswer, StoredChannel, StoredMessage,
};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Values that a channel holds.
const BOUND: usize = 2;

/// Channel at its home, or at the node that keeps it since.
pub(crate) struct HomeChannel {
    queue: ChannelQueue<OwnerWord>,
    state: StoredChannel,
}

/// Answer to who sends or receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChannelAnswer {
    Sent,
    Received(Contents),
    SenderGone(u16),
    Closed,
    Busy,
    /// The time of the wait is over: a clock says it, and no home.
    TimeOver,
}

/// What a ticket asks of a channel: to take a value, or to give one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wish {
    Send(Contents),
    Receive,
}

impl Backup {
    fn message(&self, blocks: &BTreeMap<u64, Block>, offset: u64) -> Option<(OwnerWord, StoredMessage)> {
        let (word, channel, position) = *self.messages.get(&offset)?;
        Some((word, StoredMessage { channel, position, value: blocks.get(&offset)?.contents.encode_locked() }))
    }
}

impl Node {
    /// Returns all values of channels as they are stored.
    pub(crate) fn all_messages(&self) -> Vec<(OwnerWord, StoredMessage)> {
        let Some(backup) = &self.backup else { return Vec::new() };
        backup.messages.keys().filter_map(|offset| backup.message(&self.blocks, *offset)).collect()
    }

    /// Makes a channel at this node.
    fn make_channel(&mut self) -> OwnerWord {
        let word = self.alloc(Contents { value: 0, child: None });
        let state = StoredChannel {
            bound: BOUND as u64,
            value_bytes: 16,
            has_senders: true,
            has_receiver: true,
            ..StoredChannel::default()
        };
        if let Some(backup) = &mut self.backup {
            backup.channels.insert(word.offset(), (word, state.clone()));
            backup.changed_channels.insert(word.offset());
        }
        self.channels.insert(word.bits(), HomeChannel { queue: ChannelQueue::new(BOUND), state });
        word
    }

    /// Adds the channels that have changed to the next batch, and their new values.
    pub(crate) fn stage_channels(&mut self) {
        let Some(backup) = &mut self.backup else { return };
        for offset in std::mem::take(&mut backup.changed_messages) {
            if let Some((word, message)) = backup.message(&self.blocks, offset) {
                backup.batch.put_message(word, &message);
                backup.staged += 1;
            }
        }
        for offset in std::mem::take(&mut backup.changed_channels) {
            if let Some((word, state)) = backup.channels.get(&offset) {
                backup.batch.put_channel(*word, state);
                backup.staged += 1;
            }
        }
    }

    /// Records how a channel is, before anybody is told.
    fn note_channel(&mut self, world: &World, word: OwnerWord) {
        let Some(HomeChannel { queue, state }) = self.channels.get_mut(&word.bits()) else { return };
        (state.has_senders, state.has_receiver) = (queue.has_senders(), queue.has_receiver());
        let mut state = state.clone();
        if !world.has(Rule::AnswersAreKept) {
            state.answers.clear();
        }
        let is_here = home_of(word) == self.id;
        let Some(backup) = self.backup.as_mut().filter(|_| is_here) else { return };
        let Some((_, stored)) = backup.channels.get_mut(&word.offset()) else { return };
        if *stored != state {
            *stored = state;
            backup.changed_channels.insert(word.offset());
        }
    }

    /// Records that a value was accepted, behind all others; or was received, and may be asked for again.
    fn note_message(&mut self, channel: OwnerWord, value: OwnerWord) {
        let is_here = home_of(value) == self.id;
        let Some(backup) = self.backup.as_mut().filter(|_| is_here) else { return };
        if !backup.messages.contains_key(&value.offset()) {
            backup.position += 1;
            backup.messages.insert(value.offset(), (value, channel, backup.position));
            backup.changed_messages.insert(value.offset());
        }
    }

    /// Forgets a channel, or a value of one, that is freed.
    pub(crate) fn forget_channel(&mut self, world: &World, word: OwnerWord) {
        let is_channel = self.channels.remove(&word.bits()).is_some();
        let Some(backup) = &mut self.backup else { return };
        let is_message = backup.messages.get(&word.offset()).is_some_and(|(of, ..)| *of == word);
        if is_message {
            // Whoever is told something that follows from it is told after it is stored.
            backup.staged += u64::from(world.has(Rule::ReceivedValuesAreStored));
            backup.messages.remove(&word.offset());
            backup.changed_messages.remove(&word.offset());
        }
        if is_channel {
            backup.channels.remove(&word.offset());
            backup.changed_channels.remove(&word.offset());
        }
        if is_message || is_channel {
            backup.batch.free(word);
        }
    }

    /// Keeps an answer to another node until that says that it has arrived.
    fn keep_answer(&mut self, channel: OwnerWord, ticket: HomeTicket, answer: StoredAnswer) -> bool {
        let is_kept = self.backup.is_some() && ticket.node != self.id;
        if let Some(channel) = self.channels.get_mut(&channel.bits()).filter(|_| is_kept) {
            channel.state.answers.insert(ticket, answer);
        }
        is_kept
    }

    fn queue(&mut self, word: OwnerWord) -> &mut HomeChannel {
        self.channels.get_mut(&word.bits()).expect("it is here")
    }

    /// Keeps a channel of a node that is gone, with the values that nobody has received. Returns the values that were
    /// kept for nodes that are gone.
    pub(crate) fn promote_channel(
        &mut self,
        word: OwnerWord,
        mut state: StoredChannel,
        mut messages: Vec<(OwnerWord, StoredMessage)>,
        dead: u16,
    ) {
        messages.sort_by_key(|(_, message)| message.position);
        let received: Vec<_> = state.received().collect();
        for (value, message) in &messages {
            if let Some(contents) = Contents::decode_locked(&message.value) {
                self.promoted.insert(key(*value), (*value, contents));
            }
        }
        let lost = self.lost.clone();
        for value in state.take_over(|other| other == dead || lost.contains(&other)) {
            self.promoted.remove(&key(value));
        }
        let ready = messages.into_iter().map(|(value, _)| value).filter(|value| !received.contains(value));
        let queue = ChannelQueue::restored(BOUND, ready, state.has_senders, state.has_receiver);
        self.channels.insert(word.bits(), HomeChannel { queue, state });
    }
}

/// Forgets the bytes of a value. Nobody owns what it owns by them.
fn free_message(world: &Rc<World>, at: u16, value: OwnerWord) {
    if home_of(value) == at {
        free(world, at, value, false);
    } else {
        world.node(at).promoted.remove(&key(value));
    }
}

/// Hands a value to a receiver.
fn hand_over(world: &Rc<World>, at: u16, word: OwnerWord, receiver: HomeTicket, value: OwnerWord) -> ChannelAnswer {
    let mut node = world.node(at);
    let contents = node.read_here(value).expect("a value of the channel");
    if receiver.node != at {
        contents.child.into_iter().for_each(|child| node.stage(child));
    }
    let is_kept = node.keep_answer(word, receiver, StoredAnswer::Received(value));
    if is_kept {
        node.note_message(word, value);
    }
    drop(node);
    if !is_kept {
        free_message(world, at, value);
    }
    world.handed(receiver, contents);
    ChannelAnswer::Received(contents)
}

/// Returns what a ticket was answered before, and forgets what its node has settled.
fn answered(world: &Rc<World>, at: u16, word: OwnerWord, ticket: HomeTicket, settled: u64) -> Option<ChannelAnswer> {
    let mut node = world.node(at);
    let unasked = node.queue(word).state.settle(ticket.node, settled);
    if !unasked.is_empty() {
        node.note_channel(world, word);
    }
    drop(node);
    unasked.into_iter().for_each(|value| free_message(world, at, value));
    let mut node = world.node(at);
    let answer = node.queue(word).state.answers.get(&ticket).copied().filter(|_| world.has(Rule::AnswersAreGivenAgain));
    Some(match answer? {
        StoredAnswer::Sent => ChannelAnswer::Sent,
        StoredAnswer::Received(value) => ChannelAnswer::Received(node.read_here(value).expect("it is kept")),
        StoredAnswer::SenderGone(node) => ChannelAnswer::SenderGone(node),
    })
}

/// Does what a ticket asks of a channel. Returns `None` if it waits.
pub(crate) fn ask_channel(
    world: &Rc<World>,
    at: u16,
    word: OwnerWord,
    (ticket, settled): (HomeTicket, u64),
    wish: Wish,
) -> Option<ChannelAnswer> {
    {
        let node = world.node(at);
        if !node.channels.contains_key(&word.bits()) || node.lost.contains(&ticket.node) {
            return Some(ChannelAnswer::Closed);
        }
    }
    if let Some(answer) = answered(world, at, word, ticket, settled) {
        return Some(answer);
    }
    if world.node(at).withdrawn.take(ticket) {
        return Some(ChannelAnswer::Busy);
    }
    match wish {
        Wish::Send(value) => send(world, at, word, ticket, value),
        Wish::Receive => receive(world, at, word, ticket),
    }
}

fn send(world: &Rc<World>, at: u16, word: OwnerWord, ticket: HomeTicket, value: Contents) -> Option<ChannelAnswer> {
    let mut node = world.node(at);
    if !node.queue(word).queue.has_receiver() {
        return Some(ChannelAnswer::Closed);
    }
    let stored = node.alloc(value);
    let step = node.queue(word).queue.send(ticket, stored, true);
    node.queue(word).state.sent_from.insert(ticket.node);
    match step {
        SendStep::Sent(Some((receiver, value))) => {
            node.queue(word).state.received_at = Some(receiver.node);
            node.keep_answer(word, ticket, StoredAnswer::Sent);
            drop(node);
            let value = hand_over(world, at, word, receiver, value);
            world.node(at).note_channel(world, word);
            say(world, at, receiver, value);
            Some(ChannelAnswer::Sent)
        }
        SendStep::Sent(None) => {
            node.keep_answer(word, ticket, StoredAnswer::Sent);
            node.note_message(word, stored);
            node.note_channel(world, word);
            Some(ChannelAnswer::Sent)
        }
        SendStep::Waits => {
            node.note_channel(world, word);
            None
        }
        SendStep::Closed(_) => unreachable!("it has a receiver, and the ticket waits"),
    }
}

fn receive(world: &Rc<World>, at: u16, word: OwnerWord, ticket: HomeTicket) -> Option<ChannelAnswer> {
    let mut node = world.node(at);
    let channel = node.queue(word);
    channel.state.received_at = Some(ticket.node);
    let step = channel.queue.receive(ticket, channel.state.gone.is_empty());
    match step {
        ReceiveStep::Received(value, sender) => {
            if let Some(sender) = sender {
                let accepted = channel.queue.newest().copied().unwrap_or(value);
                node.note_message(word, accepted);
                node.keep_answer(word, sender, StoredAnswer::Sent);
            }
            drop(node);
            let answer = hand_over(world, at, word, ticket, value);
            world.node(at).note_channel(world, word);
            sender.into_iter().for_each(|sender| say(world, at, sender, ChannelAnswer::Sent));
            Some(answer)
        }
        ReceiveStep::Waits => {
            let gone = channel.state.gone.pop();
            if let Some(gone) = gone {
                node.keep_answer(word, ticket, StoredAnswer::SenderGone(gone));
            }
            node.note_channel(world, word);
            gone.map(ChannelAnswer::SenderGone)
        }
        ReceiveStep::Closed => Some(ChannelAnswer::Closed),
    }
}

/// Says what one that waits has waited for.
fn say(world: &Rc<World>, at: u16, ticket: HomeTicket, answer: ChannelAnswer) {
    if ticket.node == at {
        take_channel_answer(world, at, ticket.number, answer);
    } else {
        tell(world, at, ticket.node, Message::Told { ticket: ticket.number, answer });
    }
}

/// Takes the answer of a home.
pub(crate) fn take_channel_answer(world: &World, at: u16, number: u64, answer: ChannelAnswer) {
    let wait = world.node(at).channel_waits.remove(&number);
    if let Some((_, wait)) = wait {
        wait.put(world, Some(answer));
    }
}

/// Ends a wait. Returns whether there was one.
pub(crate) fn cancel(world: &Rc<World>, at: u16, word: OwnerWord, ticket: HomeTicket) -> bool {
    let cancelled = world.node(at).channels.get_mut(&word.bits()).and_then(|channel| channel.queue.cancel(ticket));
    if let Some(Some(value)) = cancelled {
        free_message(world, at, value);
    }
    cancelled.is_some()
}

/// Takes back what a ticket has asked for, whether that has arrived or not.
pub(crate) fn withdraw(world: &Rc<World>, at: u16, word: OwnerWord, ticket: HomeTicket) {
    if !cancel(world, at, word, ticket) && world.has(Rule::WithdrawnTicketsAreKnown) {
        world.node(at).withdrawn.withdraw(ticket);
    }
}

/// Ends the waits of a node that is gone, and tells those who wait for it.
pub(crate) fn lose_channels(world: &Rc<World>, at: u16, dead: u16) {
    let words: Vec<_> = world.node(at).channels.keys().filter_map(|bits| OwnerWord::from_bits(*bits)).collect();
    for word in words {
        let mut node = world.node(at);
        let HomeChannel { queue, state } = node.queue(word);
        let dropped = queue.lose(dead);
        let unasked = state.lose(dead);
        let mut refused = Vec::new();
        if state.received_at == Some(dead) {
            state.received_at = queue.waiting_receiver().map(|receiver| receiver.node);
            if state.received_at.is_none() {
                refused = queue.end_receiver();
            }
        }
        let mut told = Vec::new();
        if state.sent_from.remove(&dead) {
            told = queue.take_receivers();
            if told.is_empty() {
                state.gone.push(dead);
            }
        }
        for receiver in &told {
            node.keep_answer(word, *receiver, StoredAnswer::SenderGone(dead));
        }
        node.note_channel(world, word);
        drop(node);
        dropped.into_iter().for_each(|value| free(world, at, value, true));
        unasked.into_iter().for_each(|value| free_message(world, at, value));
        for (sender, value) in refused {
            free_message(world, at, value);
            say(world, at, sender, ChannelAnswer::Closed);
        }
        told.into_iter().for_each(|receiver| say(world, at, receiver, ChannelAnswer::SenderGone(dead)));
    }
}

impl Here {
    /// Asks a channel for something, and waits so long at most. `Busy` says that the time is over.
    async fn ask_channel(&self, word: OwnerWord, wish: Wish, for_so_long: u64) -> Result<ChannelAnswer, Failure> {
        let (world, at) = (self.world.clone(), self.node);
        let number = world.node(at).number();
        world.node(at).tickets.insert((word.bits(), number));
        let answer = self.ask_homes(word, number, wish, for_so_long).await;
        world.node(at).tickets.remove(&(word.bits(), number));
        if let (Err(Failure::Silent), Wish::Receive) = (&answer, wish) {
            world.given_up(HomeTicket { node: at, number });
        }
        answer
    }

    async fn ask_homes(
        &self,
        word: OwnerWord,
        number: u64,
        wish: Wish,
        mut for_so_long: u64,
    ) -> Result<ChannelAnswer, Failure> {
        let (world, at) = (self.world.clone(), self.node);
        let mut home = world.node(at).host_of(word);
        loop {
            let answer = self.ask_home(home, word, number, wish, for_so_long).await;
            world.node(at).channel_waits.remove(&number);
            let host = world.node(at).host_of(word);
            return match answer {
                // It was not in the backup.
                Ok(ChannelAnswer::Closed) if host != home_of(word) && !world.is_channel_at(host, word) => {
                    Err(Failure::NodeLost(home_of(word)))
                }
                Err(Failure::NodeLost(_)) if host != home => {
                    (home, for_so_long) = (host, 0);
                    continue;
                }
                Err(Failure::Silent) => {
                    tell(&world, at, home, Message::Unlock { word, ticket: number, end: LockEnd::Withdrawn });
                    Err(Failure::Silent)
                }
                answer => answer,
            };
        }
    }

    /// Asks one node, and waits for its answer.
    async fn ask_home(
        &self,
        home: u16,
        word: OwnerWord,
        number: u64,
        wish: Wish,
        for_so_long: u64,
    ) -> Result<ChannelAnswer, Failure> {
        let (world, at) = (self.world.clone(), self.node);
        let [first, second] = [Slot::new(), Slot::new()];
        world.node(at).channel_waits.insert(number, (home, first.clone()));
        let range = (word.bits(), 0)..=(word.bits(), u64::MAX);
        let settled = world.node(at).tickets.range(range).next().map_or(0, |(_, number)| *number);
        let message = Message::Wish { word, ticket: number, settled, wish };
        let answer = match self.say(home, message).await? {
            Answer::Channel(answer) => return Ok(answer),
            Answer::Waits => {
                let (over, later) = (first.clone(), second.clone());
                // What the home says after this time arrives elsewhere.
                world.after(for_so_long, move |world| {
                    if let Some((_, wait)) = world.node(at).channel_waits.get_mut(&number) {
                        *wait = later;
                        over.put(world, Some(ChannelAnswer::TimeOver));
                    }
                });
                first.wait(&world).await.ok_or(Failure::NodeLost(home))?
            }
            _ => return Err(Failure::Stale),
        };
        if answer != ChannelAnswer::TimeOver {
            return Ok(answer);
        }
        match self.say(home, Message::Cancel { word, ticket: number }).await? {
            Answer::Done => Ok(ChannelAnswer::Busy),
            _ => second.wait(&world).await.ok_or(Failure::NodeLost(home)),
        }
    }

    /// Says something to a node, which may be this one.
    async fn say(&self, to: u16, message: Message) -> Result<Answer, Failure> {
        let world = &self.world;
        let answer = if to == self.node {
            Node::receive(world, to, to, message)
        } else {
            world.ask(self.node, to, message).await
        };
        if matches!(answer, Ok(Answer::Expelled)) {
            world.die(self.node);
            world.alive(self.node).await;
        }
        answer
    }

    /// Sends an object that this task owns. Returns it if nobody else may have it.
    pub(crate) async fn send(&self, word: OwnerWord, held: Held, for_so_long: u64) -> Result<Option<Held>, Failure> {
        let (world, id) = (self.world.clone(), self.world.node(self.node).number());
        world.node(self.node).stage(held.word());
        world.sending(id, self.node, held.clone());
        let value = Contents { value: id, child: Some(held.word()) };
        match self.ask_channel(word, Wish::Send(value), for_so_long).await {
            Ok(ChannelAnswer::Sent) => {
                world.sent(id);
                Ok(None)
            }
            Ok(_) => {
                world.not_sent(self.node, id);
                Ok(Some(held))
            }
            Err(failure) => Err(failure),
        }
    }

    /// Receives an object, if there is one in time.
    pub(crate) async fn receive(&self, word: OwnerWord, for_so_long: u64) -> Result<Option<Held>, Failure> {
        match self.ask_channel(word, Wish::Receive, for_so_long).await? {
            ChannelAnswer::Received(value) => Ok(Some(self.world.received(self.node, word, value))),
            ChannelAnswer::SenderGone(node) => {
                self.world.sender_gone(self.node, node);
                Ok(None)
            }
            _ => Ok(None),
        }
    }
}

/// What everybody has sent and received.
#[derive(Default)]
pub(crate) struct ChannelTwins {
    words: Vec<OwnerWord>,
    values: BTreeMap<u64, SentValue>,
    /// Receivers that have given up, because a home was silent.
    given_up: BTreeSet<HomeTicket>,
}

struct SentValue {
    held: Held,
    sender: u16,
    /// Whether the sender was told that the value was sent, or that it was not.
    is_sent: Option<bool>,
    /// Receivers to which a home has given it.
    handed: Vec<HomeTicket>,
    received: Vec<u16>,
}

impl World {
    /// Makes a channel at each node.
    pub(crate) fn make_channels(&self) {
        let words: Vec<_> = (0..NODES).map(|node| self.node(node).make_channel()).collect();
        self.channels.borrow_mut().words = words;
    }

    pub(crate) fn all_channels(&self) -> Vec<OwnerWord> {
        self.channels.borrow().words.clone()
    }

    fn is_channel_at(&self, node: u16, word: OwnerWord) -> bool {
        self.node(node).channels.contains_key(&word.bits())
    }

    fn sending(&self, id: u64, sender: u16, held: Held) {
        let value = SentValue { held, sender, is_sent: None, handed: Vec::new(), received: Vec::new() };
        self.channels.borrow_mut().values.insert(id, value);
    }

    fn with_value<T>(&self, id: u64, action: impl FnOnce(&mut SentValue) -> T) -> T {
        action(self.channels.borrow_mut().values.get_mut(&id).expect("it was sent"))
    }

    fn sent(&self, id: u64) {
        self.with_value(id, |value| value.is_sent = Some(true));
    }

    /// Records that a sender has its value back.
    fn not_sent(&self, at: u16, id: u64) {
        let received = self.with_value(id, |value| {
            value.is_sent = Some(false);
            value.received.clone()
        });
        if received.iter().any(|node| !self.is_condemned(*node)) {
            self.broken(at, format!("value {id} comes back, and node {received:?} has it"));
        }
    }

    fn handed(&self, receiver: HomeTicket, value: Contents) {
        self.with_value(value.value, |sent| sent.handed.push(receiver));
    }

    fn given_up(&self, ticket: HomeTicket) {
        self.channels.borrow_mut().given_up.insert(ticket);
    }

    /// Checks a value that has arrived. Returns what it is.
    fn received(&self, at: u16, word: OwnerWord, value: Contents) -> Held {
        let (held, is_sent, sender, before) = self.with_value(value.value, |sent| {
            let before = sent.received.clone();
            sent.received.push(at);
            (sent.held.clone(), sent.is_sent, sent.sender, before)
        });
        self.seen.borrow_mut().received += 1;
        if let Some(other) = before.iter().find(|node| !self.is_condemned(**node)) {
            self.broken(at, format!("{value:?} of {word:?} arrives again: node {other} has it"));
        }
        if is_sent == Some(false) && !self.is_condemned(sender) {
            self.broken(at, format!("{value:?} of {word:?} arrives, and its sender has it back"));
        }
        if value.child != Some(held.word()) {
            self.broken(at, format!("{value:?} of {word:?} is not what was sent: {held:?}"));
        }
        held
    }

    fn sender_gone(&self, at: u16, node: u16) {
        if !self.is_condemned(node) {
            self.broken(at, format!("node {node} lives, and is said to be gone"));
        }
    }

    /// Returns the values of which their senders know that they were sent.
    pub(crate) fn sent_values(&self) -> BTreeSet<u64> {
        let channels = self.channels.borrow();
        channels.values.iter().filter(|(_, value)| value.is_sent == Some(true)).map(|(id, _)| *id).collect()
    }

    /// Checks that these values have arrived, or were given to a node that is gone, or to who had given up.
    pub(crate) fn check_arrivals(&self, sent: &BTreeSet<u64>) {
        let channels = self.channels.borrow();
        for (id, value) in channels.values.iter().filter(|(id, _)| sent.contains(id)) {
            let is_excused = |ticket: &HomeTicket| self.is_condemned(ticket.node) || channels.given_up.contains(ticket);
            let is_there = value.received.iter().any(|node| !self.is_condemned(*node));
            if !self.is_condemned(value.sender) && !is_there && !value.handed.iter().any(is_excused) {
                self.broken(FIRST, format!("value {id} of node {} never arrives", value.sender));
            }
        }
    }

    /// Returns whether some value may be nobody's, because a home was silent.
    pub(crate) fn has_unclaimed_values(&self) -> bool {
        let channels = self.channels.borrow();
        !channels.given_up.is_empty() || channels.values.values().any(|value| value.is_sent.is_none())
    }
}

/// Frees a channel that nobody uses any more.
pub(crate) fn drop_channel(world: &Rc<World>, at: u16, word: OwnerWord) {
    let home = home_of(word);
    let kept: Vec<_> = world.node(home).queue(word).state.received().collect();
    kept.into_iter().for_each(|value| free_message(world, home, value));
    free(world, at, word, false);
}
