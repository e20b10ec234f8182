//! Channels whose values this node keeps: in blocks of its arena, so they count as objects. Among them are
//! channels of nodes that are gone, if they were in a backup.
//!
//! A node with a backup keeps what it has answered to other nodes until they say that it has arrived, values
//! that were received, too: whoever asks again, after the home has died, is answered the same.
#![allow(unsafe_code, reason = "values are bytes")]

use super::ShareNode;
use crate::NodeId;
use crate::message::{CodeRef, ShareMessage, WaitAnswer};
use crate::task::code::ShippedCode;
use farfield_core::dsm::{
    ChannelQueue, HomeTicket, OwnerWord, ReceiveStep, SendStep, StoredAnswer, StoredChannel, StoredMessage,
};
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Channels of this node.
#[derive(Default)]
pub(super) struct HomeChannels(Mutex<HashMap<OwnerWord, HomeChannel>>);

struct HomeChannel {
    queue: ChannelQueue<OwnerWord>,
    /// Destructor of the values.
    destructor: Option<ShippedCode>,
    /// Everything else. Who may send and receive is as the queue says.
    state: StoredChannel,
}

impl HomeChannel {
    /// Returns whether no more requests of a node are kept.
    fn is_full_for(&self, node: u16) -> bool {
        self.queue.is_full_for(node) || self.state.is_full_for(node)
    }
}

impl HomeChannels {
    fn lock(&self) -> MutexGuard<'_, HashMap<OwnerWord, HomeChannel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShareNode {
    /// Begins a channel of this node, for so many values of so many bytes.
    pub(crate) fn begin_channel(
        &self,
        word: OwnerWord,
        bound: usize,
        value_bytes: u64,
        destructor: Option<ShippedCode>,
    ) {
        let reference = destructor.and_then(|code| postcard::to_allocvec(&code.reference()).ok());
        let state = StoredChannel {
            bound: bound as u64,
            value_bytes,
            destructor: reference.unwrap_or_default(),
            has_senders: true,
            has_receiver: true,
            ..StoredChannel::default()
        };
        self.begin_stored_channel(word, state.clone());
        self.channels.lock().insert(word, HomeChannel { queue: ChannelQueue::new(bound), destructor, state });
        self.begin_count(word, None);
    }

    /// Returns whether a channel may be asked here: one of this node, or one that was taken over.
    pub(super) fn keeps_channel(&self, word: OwnerWord) -> bool {
        self.is_here(word) || self.channels.lock().contains_key(&word)
    }

    /// Keeps a channel of a node that is gone, with the values that nobody has received.
    pub(super) fn promote_channel(
        &self,
        node: NodeId,
        word: OwnerWord,
        mut state: StoredChannel,
        mut messages: Vec<(OwnerWord, StoredMessage)>,
    ) {
        let mut channels = self.channels.lock();
        messages.sort_by_key(|(_, message)| message.position);
        let received: HashSet<_> = state.received().collect();
        messages.iter().for_each(|(value, message)| self.keep_promoted(*value, &message.value));
        self.keep_stored_channel(word, state.clone(), &messages);
        // A node that is gone was lost before its waits are ended.
        let unasked = state.take_over(|other| other == node.0 || self.peers.is_lost(NodeId(other)));
        unasked.into_iter().for_each(|value| self.free_message(value));
        let ready = messages.into_iter().map(|(value, _)| value).filter(|value| !received.contains(value));
        let bound = usize::try_from(state.bound).unwrap_or(usize::MAX);
        let queue = ChannelQueue::restored(bound, ready, state.has_senders, state.has_receiver);
        let reference: Option<CodeRef> = postcard::from_bytes(&state.destructor).ok();
        channels.insert(word, HomeChannel { queue, destructor: reference.and_then(ShippedCode::find), state });
    }

    /// Puts a value into a channel of this node, or hands it to who waits for one. Returns `None` if the
    /// ticket waits. The value is the channel's unless it is refused.
    pub(super) fn send_value(
        &self,
        word: OwnerWord,
        ticket: HomeTicket,
        settled: u64,
        value: &[u8],
        may_wait: bool,
    ) -> Option<WaitAnswer> {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word) else { return Some(WaitAnswer::Closed) };
        // A node that is gone was lost before its waits are ended.
        if self.peers.is_lost(NodeId(ticket.node)) {
            return Some(WaitAnswer::Closed);
        }
        if let Some(answer) = self.answered(word, channel, ticket, settled) {
            return Some(answer);
        }
        if self.withdrawn().take(ticket) {
            return Some(WaitAnswer::Busy);
        }
        if channel.is_full_for(ticket.node) {
            return Some(WaitAnswer::TooMany);
        }
        if !channel.queue.has_receiver() || value.len() as u64 != channel.state.value_bytes {
            return Some(WaitAnswer::Closed);
        }
        let Ok(stored) = self.store(value) else { return Some(WaitAnswer::Full) };
        match channel.queue.send(ticket, stored, may_wait) {
            SendStep::Sent(delivered) => {
                channel.state.sent_from.insert(ticket.node);
                self.keep_answer(channel, ticket, StoredAnswer::Sent);
                if let Some((receiver, value)) = delivered {
                    channel.state.received_at = Some(receiver.node);
                    let value = self.hand_over(word, channel, receiver, value);
                    self.note(word, channel, ticket);
                    self.answer(receiver, value);
                } else {
                    self.note_message(word, stored, channel.state.value_bytes);
                    self.note(word, channel, ticket);
                }
                Some(WaitAnswer::Sent)
            }
            SendStep::Waits => {
                channel.state.sent_from.insert(ticket.node);
                self.note(word, channel, ticket);
                None
            }
            SendStep::Closed(stored) => {
                self.free_message(stored);
                Some(WaitAnswer::Busy)
            }
        }
    }

    /// Takes a value out of a channel of this node. Returns `None` if the ticket waits.
    pub(super) fn receive_value(
        &self,
        word: OwnerWord,
        ticket: HomeTicket,
        settled: u64,
        may_wait: bool,
    ) -> Option<WaitAnswer> {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word).filter(|channel| !channel.state.is_ended) else {
            return Some(WaitAnswer::Closed);
        };
        if self.peers.is_lost(NodeId(ticket.node)) {
            return Some(WaitAnswer::Closed);
        }
        if let Some(answer) = self.answered(word, channel, ticket, settled) {
            return Some(answer);
        }
        if self.withdrawn().take(ticket) {
            return Some(WaitAnswer::Busy);
        }
        if channel.is_full_for(ticket.node) {
            return Some(WaitAnswer::TooMany);
        }
        channel.state.received_at = Some(ticket.node);
        // A node that is gone is told of when all has been received that it has sent.
        let step = channel.queue.receive(ticket, may_wait && channel.state.gone.is_empty());
        let answer = match step {
            ReceiveStep::Received(value, sender) => {
                if let Some(sender) = sender {
                    let accepted = channel.queue.newest().copied().unwrap_or(value);
                    self.note_message(word, accepted, channel.state.value_bytes);
                    self.keep_answer(channel, sender, StoredAnswer::Sent);
                }
                let answer = self.hand_over(word, channel, ticket, value);
                self.note(word, channel, ticket);
                if let Some(sender) = sender {
                    self.answer(sender, WaitAnswer::Sent);
                }
                return Some(answer);
            }
            ReceiveStep::Closed => Some(WaitAnswer::Closed),
            ReceiveStep::Waits => match channel.state.gone.pop() {
                Some(node) => {
                    self.keep_answer(channel, ticket, StoredAnswer::SenderGone(node));
                    Some(WaitAnswer::SenderGone(node))
                }
                None if may_wait => None,
                None => Some(WaitAnswer::Busy),
            },
        };
        self.note(word, channel, ticket);
        answer
    }

    /// Records in the backup how a channel is, before anybody is told.
    fn note(&self, word: OwnerWord, channel: &mut HomeChannel, asked_by: HomeTicket) {
        let HomeChannel { queue, state, .. } = channel;
        (state.has_senders, state.has_receiver) = (queue.has_senders(), queue.has_receiver());
        self.note_channel(word, state, asked_by.node != self.id.0);
    }

    /// Records in the backup how a channel is that nobody has asked for something.
    fn note_end(&self, word: OwnerWord, channel: &mut HomeChannel) {
        self.note(word, channel, HomeTicket { node: self.id.0, number: 0 });
    }

    /// Keeps an answer to another node until that says that it has arrived.
    fn keep_answer(&self, channel: &mut HomeChannel, ticket: HomeTicket, answer: StoredAnswer) -> bool {
        let is_kept = self.has_backup() && ticket.node != self.id.0;
        if is_kept {
            channel.state.answers.insert(ticket, answer);
        }
        is_kept
    }

    /// Returns what a ticket was answered before, and forgets what its node has settled.
    fn answered(
        &self,
        word: OwnerWord,
        channel: &mut HomeChannel,
        ticket: HomeTicket,
        settled: u64,
    ) -> Option<WaitAnswer> {
        let unasked = channel.state.settle(ticket.node, settled);
        if !unasked.is_empty() {
            self.note(word, channel, ticket);
        }
        unasked.into_iter().for_each(|value| self.free_message(value));
        Some(match *channel.state.answers.get(&ticket)? {
            StoredAnswer::Sent => WaitAnswer::Sent,
            StoredAnswer::Received(value) => WaitAnswer::Received(self.message(value, channel)),
            StoredAnswer::SenderGone(node) => WaitAnswer::SenderGone(node),
        })
    }

    /// Returns the bytes of a value.
    fn message(&self, stored: OwnerWord, channel: &HomeChannel) -> Vec<u8> {
        let bytes = channel.state.value_bytes;
        if !self.is_here(stored) {
            return self.read_promoted(stored, 0, bytes).unwrap_or_default();
        }
        let mut value = Vec::new();
        self.arena.read(stored, bytes, &mut value);
        value
    }

    /// Forgets the bytes of a value.
    fn free_message(&self, stored: OwnerWord) {
        if self.is_here(stored) {
            self.free_block(stored);
        } else {
            self.forget_promoted(stored);
        }
    }

    /// Hands a value to a receiver.
    fn hand_over(
        &self,
        word: OwnerWord,
        channel: &mut HomeChannel,
        receiver: HomeTicket,
        stored: OwnerWord,
    ) -> WaitAnswer {
        let value = self.message(stored, channel);
        self.stage(|| {
            // SAFETY: the bytes of a value of the channel, which nobody else has.
            channel.destructor.map_or_else(Vec::new, |destructor| unsafe { destructor.owned_by(&value, false) })
        });
        if self.keep_answer(channel, receiver, StoredAnswer::Received(stored)) {
            self.note_message(word, stored, channel.state.value_bytes);
        } else {
            self.free_message(stored);
        }
        WaitAnswer::Received(value)
    }

    /// Ends a wait for a channel. Returns whether there was one. The value of a sender is its own again.
    pub(super) fn cancel_channel(&self, word: OwnerWord, ticket: HomeTicket) -> bool {
        let mut channels = self.channels.lock();
        let cancelled = channels.get_mut(&word).and_then(|channel| channel.queue.cancel(ticket));
        if let Some(Some(stored)) = cancelled {
            self.free_message(stored);
        }
        cancelled.is_some()
    }

    /// Records that the senders of a channel are gone. Returns whether the word is one of a channel.
    pub(super) fn end_senders(&self, word: OwnerWord) -> bool {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word) else { return false };
        let waiting = channel.queue.end_senders();
        self.note_end(word, channel);
        for receiver in waiting {
            self.answer(receiver, WaitAnswer::Closed);
        }
        if channel.state.is_ended {
            self.end_channel(&mut channels, word);
        }
        true
    }

    /// Frees a channel that has neither senders nor a receiver.
    fn end_channel(&self, channels: &mut HashMap<OwnerWord, HomeChannel>, word: OwnerWord) {
        if let Some(channel) = channels.remove(&word) {
            channel.state.received().for_each(|value| self.free_message(value));
        }
        if self.is_here(word) {
            self.free_block(word);
        }
    }

    /// Records that the receiver of a channel was dropped.
    pub(super) fn end_receiver(&self, word: OwnerWord) {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word) else { return };
        channel.state.is_ended = true;
        let waiting = channel.queue.end_receiver();
        self.note_end(word, channel);
        self.refuse_senders(waiting);
        for value in channel.queue.take_ready() {
            self.outbox.free(self.id, value, channel.destructor);
        }
        if !channel.queue.has_senders() {
            self.end_channel(&mut channels, word);
        }
    }

    /// Gives senders that wait their values back.
    fn refuse_senders(&self, waiting: Vec<(HomeTicket, OwnerWord)>) {
        for (sender, value) in waiting {
            self.free_message(value);
            self.answer(sender, WaitAnswer::Closed);
        }
    }

    /// Ends the waits of a node that is gone, and tells those who wait for it.
    pub(super) fn lose_channels(&self, node: NodeId) {
        for (word, channel) in self.channels.lock().iter_mut() {
            for value in channel.queue.lose(node.0) {
                self.outbox.free(self.id, value, channel.destructor);
            }
            // Nobody asks for these again.
            channel.state.lose(node.0).into_iter().for_each(|value| self.free_message(value));
            let mut refused = Vec::new();
            if channel.state.received_at == Some(node.0) {
                // Several may share the receiver.
                channel.state.received_at = channel.queue.waiting_receiver().map(|receiver| receiver.node);
                if channel.state.received_at.is_none() {
                    // Should the receiver be elsewhere by now, it says so by receiving.
                    refused = channel.queue.end_receiver();
                }
            }
            let mut told = Vec::new();
            if channel.state.sent_from.remove(&node.0) {
                told = channel.queue.take_receivers();
                if told.is_empty() {
                    channel.state.gone.push(node.0);
                }
            }
            for receiver in &told {
                self.keep_answer(channel, *receiver, StoredAnswer::SenderGone(node.0));
            }
            self.note_end(*word, channel);
            self.refuse_senders(refused);
            told.into_iter().for_each(|receiver| self.answer(receiver, WaitAnswer::SenderGone(node.0)));
        }
    }

    /// Drops the receiver of a channel, wherever that is. Never waits for another node.
    pub(crate) fn end_receiving(&self, word: OwnerWord) {
        let home = self.host_of(word);
        if home == self.id {
            self.end_receiver(word);
        } else {
            self.outbox.tell(home, ShareMessage::EndReceiver { word: word.bits() });
        }
    }
}
