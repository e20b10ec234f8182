//! Channel as a backup keeps it, but for its values, which are entries of their own.
//!
//! A sender or receiver whose home has died asks whoever keeps the channel since, with the same ticket. So that
//! nothing is done twice, the home keeps its answers until it is known that they have arrived: each message says
//! which tickets of its node are settled (RIFL, SOSP 2015: completion records). Waits are not recorded.

use super::backup::take_u64;
use super::lock_line::REQUESTS_OF_NODE_MAX;
use super::{HomeTicket, MalformedBatch, OwnerWord};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

const HAS_SENDERS: u64 = 1;
const HAS_RECEIVER: u64 = 1 << 1;
const IS_ENDED: u64 = 1 << 2;
const WAS_RECEIVED: u64 = 1 << 3;
const FLAGS: u64 = HAS_SENDERS | HAS_RECEIVER | IS_ENDED | WAS_RECEIVED;
/// Position of the node that has received last, beside the flags.
const RECEIVER_SHIFT: u32 = 16;

const SENT: u64 = 0;
const RECEIVED: u64 = 1;
const SENDER_GONE: u64 = 2;
/// Position of an answer's kind, beside the number of the node that was answered.
const KIND_SHIFT: u32 = 16;

/// Answer that may not have arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoredAnswer {
    /// The value was accepted.
    Sent,
    /// The value of this word was received. It is kept for whoever asks again.
    Received(OwnerWord),
    /// A node that has sent is gone.
    SenderGone(u16),
}

/// State of a channel for whoever keeps it after its home.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct StoredChannel {
    /// Number of values that the channel holds.
    pub bound: u64,
    /// Size of a value, in bytes.
    pub value_bytes: u64,
    /// Reference to the destructor of the values, in words of those who use it.
    pub destructor: Vec<u8>,
    /// Whether somebody may send.
    pub has_senders: bool,
    /// Whether somebody may receive.
    pub has_receiver: bool,
    /// Whether the receiver was dropped.
    pub is_ended: bool,
    /// Node that has received last.
    pub received_at: Option<u16>,
    /// Nodes that have sent, and are not gone.
    pub sent_from: BTreeSet<u16>,
    /// Nodes that have sent and are gone, of which receivers are still to be told.
    pub gone: Vec<u16>,
    /// Answers to other nodes that may not have arrived.
    pub answers: BTreeMap<HomeTicket, StoredAnswer>,
}

/// Value of a channel in a backup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredMessage {
    /// Word of the channel.
    pub channel: OwnerWord,
    /// Position among the values of the channel, which are received in this order.
    pub position: u64,
    /// Bytes of the value.
    pub value: Vec<u8>,
}

impl StoredChannel {
    /// Forgets the answers to tickets of a node below a number: they have arrived. Returns the words of values
    /// that were kept for them.
    pub fn settle(&mut self, node: u16, below: u64) -> Vec<OwnerWord> {
        let settled = HomeTicket { node, number: 0 }..HomeTicket { node, number: below };
        let tickets: Vec<_> = self.answers.range(settled).map(|(ticket, _)| *ticket).collect();
        tickets.into_iter().filter_map(|ticket| self.forget(ticket)).collect()
    }

    /// Returns whether so many answers to a node may not have arrived that no more are kept.
    pub fn is_full_for(&self, node: u16) -> bool {
        let of_node = HomeTicket { node, number: 0 }..=HomeTicket { node, number: u64::MAX };
        self.answers.len() >= REQUESTS_OF_NODE_MAX && self.answers.range(of_node).count() >= REQUESTS_OF_NODE_MAX
    }

    /// Forgets the answers to a node that is gone. Returns the words of values that were kept for it.
    pub fn lose(&mut self, node: u16) -> Vec<OwnerWord> {
        let mut lost = self.settle(node, u64::MAX);
        lost.extend(self.forget(HomeTicket { node, number: u64::MAX }));
        lost
    }

    fn forget(&mut self, ticket: HomeTicket) -> Option<OwnerWord> {
        match self.answers.remove(&ticket) {
            Some(StoredAnswer::Received(word)) => Some(word),
            _ => None,
        }
    }

    /// Returns the words of values that were received, and are kept until that is known to have arrived.
    pub fn received(&self) -> impl Iterator<Item = OwnerWord> + '_ {
        self.answers.values().filter_map(|answer| match answer {
            StoredAnswer::Received(word) => Some(*word),
            _ => None,
        })
    }

    /// Takes the channel over after its home: nodes that are gone neither send nor receive any more. Returns
    /// the words of values that were kept for them.
    pub fn take_over(&mut self, is_gone: impl Fn(u16) -> bool) -> Vec<OwnerWord> {
        if self.received_at.is_some_and(&is_gone) {
            // Should the receiver be elsewhere by now, it says so by receiving.
            (self.received_at, self.has_receiver) = (None, false);
        }
        let (gone, living) = self.sent_from.iter().partition(|node| is_gone(**node));
        self.sent_from = living;
        let gone: BTreeSet<u16> = gone;
        self.gone.extend(gone);
        let answered: BTreeSet<u16> = self.answers.keys().map(|ticket| ticket.node).collect();
        answered.into_iter().filter(|node| is_gone(*node)).flat_map(|node| self.lose(node)).collect()
    }

    /// Returns the bytes of the channel in a batch.
    pub fn encode(&self) -> Vec<u8> {
        let flag = |is_set: bool, bit| if is_set { bit } else { 0 };
        let flags = flag(self.has_senders, HAS_SENDERS)
            | flag(self.has_receiver, HAS_RECEIVER)
            | flag(self.is_ended, IS_ENDED)
            | self.received_at.map_or(0, |node| WAS_RECEIVED | u64::from(node) << RECEIVER_SHIFT);
        let counts = [self.sent_from.len(), self.gone.len(), self.answers.len()].map(|count| count as u64);
        let mut words = alloc::vec![flags, self.bound, self.value_bytes];
        words.extend(counts);
        words.extend(self.sent_from.iter().chain(&self.gone).map(|node| u64::from(*node)));
        for (ticket, answer) in &self.answers {
            let (kind, about) = match *answer {
                StoredAnswer::Sent => (SENT, 0),
                StoredAnswer::Received(word) => (RECEIVED, word.bits()),
                StoredAnswer::SenderGone(node) => (SENDER_GONE, u64::from(node)),
            };
            words.extend([u64::from(ticket.node) | kind << KIND_SHIFT, ticket.number, about]);
        }
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        bytes.extend_from_slice(&self.destructor);
        bytes
    }

    /// Reads the bytes of a channel. Fails on what [`StoredChannel::encode`] does not write.
    pub fn decode(mut bytes: &[u8]) -> Result<StoredChannel, MalformedBatch> {
        let bytes = &mut bytes;
        let flags = take_u64(bytes)?;
        let receiver = take_node(flags >> RECEIVER_SHIFT)?;
        let has = |bit| flags & bit != 0;
        if flags & ((1 << RECEIVER_SHIFT) - 1) & !FLAGS != 0 || receiver != 0 && !has(WAS_RECEIVED) {
            return Err(MalformedBatch);
        }
        let (bound, value_bytes) = (take_u64(bytes)?, take_u64(bytes)?);
        let (senders, gone, answers) = (take_u64(bytes)?, take_u64(bytes)?, take_u64(bytes)?);
        let mut channel = StoredChannel {
            bound,
            value_bytes,
            has_senders: has(HAS_SENDERS),
            has_receiver: has(HAS_RECEIVER),
            is_ended: has(IS_ENDED),
            received_at: has(WAS_RECEIVED).then_some(receiver),
            ..StoredChannel::default()
        };
        for _ in 0..senders {
            let node = take_node(take_u64(bytes)?)?;
            // In order, and each once.
            if channel.sent_from.last().is_some_and(|last| *last >= node) {
                return Err(MalformedBatch);
            }
            channel.sent_from.insert(node);
        }
        for _ in 0..gone {
            channel.gone.push(take_node(take_u64(bytes)?)?);
        }
        for _ in 0..answers {
            let (of, number, about) = (take_u64(bytes)?, take_u64(bytes)?, take_u64(bytes)?);
            let ticket = HomeTicket { node: take_node(of & ((1 << KIND_SHIFT) - 1))?, number };
            let answer = match of >> KIND_SHIFT {
                SENT if about == 0 => StoredAnswer::Sent,
                RECEIVED => StoredAnswer::Received(OwnerWord::from_bits(about).ok_or(MalformedBatch)?),
                SENDER_GONE => StoredAnswer::SenderGone(take_node(about)?),
                _ => return Err(MalformedBatch),
            };
            if channel.answers.last_key_value().is_some_and(|(last, _)| *last >= ticket) {
                return Err(MalformedBatch);
            }
            channel.answers.insert(ticket, answer);
        }
        channel.destructor = bytes.to_vec();
        Ok(channel)
    }
}

impl StoredMessage {
    /// Returns the bytes of the value in a batch: its channel and position, and itself.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.channel.bits().to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.position.to_le_bytes());
        bytes.extend_from_slice(&self.value);
        bytes
    }

    /// Reads the bytes of a value. Fails on what [`StoredMessage::encode`] does not write.
    pub fn decode(mut bytes: &[u8]) -> Result<StoredMessage, MalformedBatch> {
        let channel = OwnerWord::from_bits(take_u64(&mut bytes)?).ok_or(MalformedBatch)?;
        let position = take_u64(&mut bytes)?;
        Ok(StoredMessage { channel, position, value: bytes.to_vec() })
    }
}

fn take_node(bits: u64) -> Result<u16, MalformedBatch> {
    u16::try_from(bits).map_err(|_| MalformedBatch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsm::{ChannelQueue, Colour, Partition, ReceiveStep, SendStep};
    use alloc::vec;

    fn word(number: u64) -> OwnerWord {
        OwnerWord::new(Partition::new(3).unwrap(), 16 * (1 + number), Colour(number as u16 & 7)).unwrap()
    }

    #[test]
    fn a_channel_is_read_as_it_was_written_and_nothing_else_is_read() {
        let mut random = fastrand::Rng::with_seed(21);
        for _ in 0..20_000 {
            let answers = (0..random.usize(..4)).map(|_| {
                let ticket = HomeTicket { node: random.u16(..), number: random.u64(..) };
                let answer = match random.u8(..3) {
                    0 => StoredAnswer::Sent,
                    1 => StoredAnswer::Received(word(random.u64(..1000))),
                    _ => StoredAnswer::SenderGone(random.u16(..)),
                };
                (ticket, answer)
            });
            let answers = answers.collect();
            let channel = StoredChannel {
                bound: random.u64(..),
                value_bytes: random.u64(..),
                destructor: (0..random.usize(..9)).map(|_| random.u8(..)).collect(),
                has_senders: random.bool(),
                has_receiver: random.bool(),
                is_ended: random.bool(),
                received_at: random.bool().then(|| random.u16(..)),
                sent_from: (0..random.usize(..3)).map(|_| random.u16(..)).collect(),
                gone: (0..random.usize(..3)).map(|_| random.u16(..)).collect(),
                answers,
            };
            let message = StoredMessage {
                channel: word(random.u64(..1000)),
                position: random.u64(..),
                value: (0..random.usize(..9)).map(|_| random.u8(..)).collect(),
            };
            assert_eq!(StoredMessage::decode(&message.encode()), Ok(message.clone()));
            assert_eq!(StoredChannel::decode(&channel.encode()), Ok(channel.clone()));
            for mut bytes in [channel.encode(), message.encode()] {
                match random.u8(..3) {
                    0 => bytes.truncate(random.usize(..bytes.len())),
                    1 => bytes = (0..random.usize(..99)).map(|_| random.u8(..)).collect(),
                    _ => {
                        let at = random.usize(..bytes.len());
                        bytes[at] ^= 1 << random.u8(..8);
                    }
                }
                // What a decoder accepts is what the encoder makes of it.
                if let Ok(channel) = StoredChannel::decode(&bytes) {
                    assert_eq!(channel.encode(), bytes);
                }
                if let Ok(message) = StoredMessage::decode(&bytes) {
                    assert_eq!(message.encode(), bytes);
                }
            }
        }
    }

    const HOME: u16 = 0;
    const NODES: u16 = 4;

    /// Operation of a node's task on the channel.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Wish {
        Send(u64),
        Receive,
    }

    /// A channel as its home has it. Values are words of this number.
    #[derive(Clone)]
    struct Home {
        queue: ChannelQueue<OwnerWord>,
        channel: StoredChannel,
        /// Accepted values by word, with their positions: the entries of the backup.
        messages: BTreeMap<u64, u64>,
        positions: u64,
    }

    impl Home {
        fn accept(&mut self, value: OwnerWord) {
            self.positions += 1;
            self.messages.insert(value.offset(), self.positions);
        }

        /// A value leaves for a receiver.
        fn deliver(&mut self, receiver: HomeTicket, value: OwnerWord) {
            if receiver.node == HOME {
                self.messages.remove(&value.offset());
            } else {
                self.channel.answers.insert(receiver, StoredAnswer::Received(value));
            }
        }
    }

    /// A channel, its backup, and the one task of each node that uses it.
    struct Play {
        home: Home,
        stored: Home,
        /// Ticket and wish of each node's task that has no answer.
        tasks: [Option<(HomeTicket, Wish)>; NODES as usize + 1],
        tickets: u64,
        /// Values that the tasks of a node know to be sent, and those that they have received.
        sent: [Vec<u64>; NODES as usize + 1],
        received: [Vec<u64>; NODES as usize + 1],
    }

    impl Play {
        /// Tells a task how its wish has ended, after that was stored.
        fn tell(&mut self, ticket: HomeTicket, value: Option<u64>) {
            if ticket.node != HOME {
                self.stored = self.home.clone();
            }
            let node = usize::from(ticket.node);
            match (self.tasks[node].take(), value) {
                (Some((of, Wish::Send(value))), None) if of == ticket => self.sent[node].push(value),
                (Some((of, Wish::Receive)), Some(value)) if of == ticket => self.received[node].push(value),
                other => panic!("{other:?}"),
            }
        }

        /// The home does what a task wishes. Returns what the task is told at once.
        fn ask(&mut self, ticket: HomeTicket, wish: Wish) -> Option<Option<u64>> {
            let number = |value: OwnerWord| value.offset() / 16 - 1;
            self.home.channel.settle(ticket.node, ticket.number).iter().for_each(|settled| {
                self.home.messages.remove(&settled.offset());
            });
            match self.home.channel.answers.get(&ticket) {
                Some(StoredAnswer::Sent) => return Some(None),
                Some(StoredAnswer::Received(value)) => return Some(Some(number(*value))),
                _ => {}
            }
            let answer_sender = |home: &mut Home, sender: HomeTicket| {
                if sender.node != HOME {
                    home.channel.answers.insert(sender, StoredAnswer::Sent);
                }
            };
            match wish {
                Wish::Send(value) => match self.home.queue.send(ticket, word(value), true) {
                    SendStep::Sent(delivered) => {
                        self.home.accept(word(value));
                        answer_sender(&mut self.home, ticket);
                        if let Some((receiver, value)) = delivered {
                            self.home.deliver(receiver, value);
                            self.tell(receiver, Some(number(value)));
                        }
                        Some(None)
                    }
                    SendStep::Waits => None,
                    SendStep::Closed(_) => unreachable!("there is a receiver"),
                },
                Wish::Receive => match self.home.queue.receive(ticket, true) {
                    ReceiveStep::Received(value, sender) => {
                        if let Some(sender) = sender {
                            let accepted = self.home.queue.newest().copied().unwrap_or(value);
                            self.home.accept(accepted);
                            answer_sender(&mut self.home, sender);
                            self.home.deliver(ticket, value);
                            self.tell(sender, None);
                        } else {
                            self.home.deliver(ticket, value);
                        }
                        Some(Some(number(value)))
                    }
                    ReceiveStep::Waits => None,
                    ReceiveStep::Closed => unreachable!("there are senders"),
                },
            }
        }

        fn wish(&mut self, node: u16, random: &mut fastrand::Rng) -> (HomeTicket, Wish) {
            self.tickets += 1;
            let wish = if random.bool() { Wish::Send(self.tickets) } else { Wish::Receive };
            (HomeTicket { node, number: self.tickets }, wish)
        }
    }

    /// The home dies in the middle of random histories, after a step that is stored or not and whose answer
    /// does not arrive. Whoever lives asks again, and each value arrives once.
    #[test]
    fn whoever_takes_a_channel_over_hands_each_value_on_once() {
        let mut random = fastrand::Rng::with_seed(22);
        let (mut kept, mut again) = (0, 0);
        for round in 0..30_000 {
            let bound = random.usize(..4);
            let queue = ChannelQueue::new(bound);
            let channel = StoredChannel { has_senders: true, has_receiver: true, ..StoredChannel::default() };
            let home = Home { queue, channel, messages: BTreeMap::new(), positions: 0 };
            let (sent, received) = Default::default();
            let mut play =
                Play { stored: home.clone(), home, tasks: [None; NODES as usize + 1], tickets: 0, sent, received };
            let steps = random.usize(1..30);
            let mut unanswered = None;
            for step in 1..=steps {
                let node = random.u16(..NODES);
                if play.tasks[usize::from(node)].is_some() {
                    continue;
                }
                let (ticket, wish) = play.wish(node, &mut random);
                play.tasks[usize::from(node)] = Some((ticket, wish));
                let before = play.stored.clone();
                let told = [play.sent.clone(), play.received.clone()];
                match play.ask(ticket, wish) {
                    // The last answer is lost with the home, stored or not. If it was not stored, nobody else
                    // has been told of anything either.
                    Some(_) if step == steps && node != HOME => {
                        let others_told = told != [play.sent.clone(), play.received.clone()];
                        unanswered = Some(node);
                        match random.bool() || others_told {
                            true => play.stored = play.home.clone(),
                            false => play.stored = before,
                        }
                    }
                    Some(value) => play.tell(ticket, value),
                    None => {}
                }
                if step < steps && random.bool() {
                    play.stored = play.home.clone();
                }
            }
            // Another node takes the channel over. What the home itself has done and told nobody may be undone.
            let mut home = play.stored.clone();
            home.channel.received_at = None;
            assert_eq!(home.channel.take_over(|node| node == HOME), []);
            let received: BTreeSet<u64> = home.channel.received().map(OwnerWord::offset).collect();
            let mut ready: Vec<_> = home.messages.iter().filter(|(value, _)| !received.contains(value)).collect();
            ready.sort_by_key(|(_, position)| **position);
            let ready: Vec<_> = ready.into_iter().map(|(value, _)| word(value / 16 - 1)).collect();
            kept += ready.len();
            again += usize::from(unanswered.is_some());
            home.queue = ChannelQueue::restored(bound, ready, true, true);
            play.home = home;
            play.tasks[usize::from(HOME)] = None;
            let living = 1..NODES;
            for node in living.clone() {
                if let Some((ticket, wish)) = play.tasks[usize::from(node)]
                    && let Some(value) = play.ask(ticket, wish)
                {
                    play.tell(ticket, value);
                }
            }
            // Another node serves everybody in the end, and receives what is left.
            loop {
                let waits: Vec<_> = play.tasks.iter().flatten().map(|(_, wish)| *wish).collect();
                play.tickets += 1;
                let ticket = HomeTicket { node: NODES, number: play.tickets };
                let wish = if waits.iter().any(|wish| *wish != Wish::Receive) || play.home.queue.newest().is_some() {
                    Wish::Receive
                } else if !waits.is_empty() {
                    Wish::Send(play.tickets)
                } else {
                    break;
                };
                play.tasks[usize::from(NODES)] = Some((ticket, wish));
                let value = play.ask(ticket, wish).expect("there is somebody");
                play.tell(ticket, value);
            }
            assert!(play.tasks.iter().all(Option::is_none), "{round}: {:?}", play.tasks);
            // Each value that a living node knows to be sent was received once, by a living node or by the home.
            let mut all: Vec<u64> = play.received[1..].iter().flatten().copied().collect();
            all.sort_unstable();
            assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "{round}: twice: {all:?}");
            let by_home = &play.received[usize::from(HOME)];
            for value in play.sent[1..].iter().flatten() {
                assert!(all.binary_search(value).is_ok() || by_home.contains(value), "{round}: {value} is lost");
            }
            // Values of one sender are received in order.
            for (sender, receiver) in play
                .sent
                .iter()
                .zip([&play.received])
                .flat_map(|(sender, all)| all.iter().map(move |receiver| (sender, receiver)))
            {
                let of: Vec<_> = receiver.iter().filter(|value| sender.contains(value)).collect();
                assert!(of.is_sorted(), "{round}: {of:?}");
            }
        }
        assert!(kept > 1000 && again > 1000, "{kept} {again}");
    }

    #[test]
    fn nodes_that_are_gone_neither_send_nor_receive() {
        let ticket = |node, number| HomeTicket { node, number };
        let mut channel = StoredChannel {
            has_receiver: true,
            received_at: Some(1),
            sent_from: [0, 1, 2].into(),
            gone: vec![5],
            answers: [
                (ticket(1, 3), StoredAnswer::Received(word(1))),
                (ticket(1, u64::MAX), StoredAnswer::Received(word(2))),
                (ticket(2, 3), StoredAnswer::Received(word(3))),
                (ticket(2, 4), StoredAnswer::Sent),
                (ticket(2, 5), StoredAnswer::SenderGone(9)),
            ]
            .into(),
            ..StoredChannel::default()
        };
        assert_eq!(channel.take_over(|node| node < 2), [word(1), word(2)]);
        assert_eq!((channel.has_receiver, channel.received_at), (false, None));
        assert_eq!((channel.sent_from.clone(), channel.gone.clone()), ([2].into(), vec![5, 0, 1]));
        assert_eq!(channel.received().collect::<Vec<_>>(), [word(3)]);
        assert_eq!((channel.settle(2, 3), channel.answers.len()), (vec![], 3));
        assert_eq!((channel.settle(2, 5), channel.answers.len()), (vec![word(3)], 1));
        assert_eq!((channel.lose(2), channel.answers.len()), (vec![], 0));
    }
}
