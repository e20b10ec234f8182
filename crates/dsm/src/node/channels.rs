//! Channels whose values this node keeps: in blocks of its arena, so they count as objects.
#![allow(unsafe_code, reason = "values are bytes")]

use super::ShareNode;
use crate::NodeId;
use crate::message::{ShareMessage, WaitAnswer};
use crate::task::code::ShippedCode;
use farfield_core::dsm::{ChannelQueue, HomeTicket, OwnerWord, ReceiveStep, SendStep};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Channels of this node.
#[derive(Default)]
pub(super) struct HomeChannels(Mutex<HashMap<OwnerWord, HomeChannel>>);

struct HomeChannel {
    queue: ChannelQueue<OwnerWord>,
    value_bytes: u64,
    /// Destructor of the values.
    destructor: Option<ShippedCode>,
    /// Nodes that have sent, and are not gone.
    sent_from: BTreeSet<u16>,
    /// Nodes that have sent, and are gone. Receivers learn of each once.
    gone: Vec<u16>,
    /// Node that has received last.
    received_at: Option<u16>,
    /// The receiver was dropped, and not only at a node that is gone.
    is_ended: bool,
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
        let channel = HomeChannel {
            queue: ChannelQueue::new(bound),
            value_bytes,
            destructor,
            sent_from: BTreeSet::new(),
            gone: Vec::new(),
            received_at: None,
            is_ended: false,
        };
        self.channels.lock().insert(word, channel);
        self.begin_count(word, None);
    }

    /// Puts a value into a channel of this node, or hands it to who waits for one. Returns `None` if the
    /// ticket waits. The value is the channel's unless it is refused.
    pub(super) fn send_value(
        &self,
        word: OwnerWord,
        ticket: HomeTicket,
        value: &[u8],
        may_wait: bool,
    ) -> Option<WaitAnswer> {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word) else { return Some(WaitAnswer::Closed) };
        // A node that is gone was lost before its waits are ended.
        if self.peers.is_lost(NodeId(ticket.node))
            || !channel.queue.has_receiver()
            || value.len() as u64 != channel.value_bytes
        {
            return Some(WaitAnswer::Closed);
        }
        let Ok(stored) = self.store(value) else { return Some(WaitAnswer::Full) };
        match channel.queue.send(ticket, stored, may_wait) {
            SendStep::Sent(delivered) => {
                channel.sent_from.insert(ticket.node);
                if let Some((receiver, value)) = delivered {
                    channel.received_at = Some(receiver.node);
                    let value = self.take_value(value, channel);
                    self.answer(receiver, value);
                }
                Some(WaitAnswer::Sent)
            }
            SendStep::Waits => {
                channel.sent_from.insert(ticket.node);
                None
            }
            SendStep::Closed(stored) => {
                self.free_block(stored);
                Some(WaitAnswer::Busy)
            }
        }
    }

    /// Takes a value out of a channel of this node. Returns `None` if the ticket waits.
    pub(super) fn receive_value(&self, word: OwnerWord, ticket: HomeTicket, may_wait: bool) -> Option<WaitAnswer> {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word).filter(|channel| !channel.is_ended) else {
            return Some(WaitAnswer::Closed);
        };
        if self.peers.is_lost(NodeId(ticket.node)) {
            return Some(WaitAnswer::Closed);
        }
        channel.received_at = Some(ticket.node);
        // A node that is gone is told of when all has been received that it has sent.
        match channel.queue.receive(ticket, may_wait && channel.gone.is_empty()) {
            ReceiveStep::Received(value, sender) => {
                if let Some(sender) = sender {
                    self.answer(sender, WaitAnswer::Sent);
                }
                Some(self.take_value(value, channel))
            }
            ReceiveStep::Closed => Some(WaitAnswer::Closed),
            ReceiveStep::Waits => match channel.gone.pop() {
                Some(node) => Some(WaitAnswer::SenderGone(node)),
                None if may_wait => None,
                None => Some(WaitAnswer::Busy),
            },
        }
    }

    /// Takes the bytes of a value out of its block.
    fn take_value(&self, stored: OwnerWord, channel: &HomeChannel) -> WaitAnswer {
        let mut value = Vec::new();
        self.arena.read(stored, channel.value_bytes, &mut value);
        self.free_block(stored);
        self.stage(|| {
            // SAFETY: the bytes of a value of the channel, which nobody else has.
            channel.destructor.map_or_else(Vec::new, |destructor| unsafe { destructor.owned_by(&value, false) })
        });
        WaitAnswer::Received(value)
    }

    /// Ends a wait for a channel. Returns whether there was one. The value of a sender is its own again.
    pub(super) fn cancel_channel(&self, word: OwnerWord, ticket: HomeTicket) -> bool {
        let mut channels = self.channels.lock();
        let cancelled = channels.get_mut(&word).and_then(|channel| channel.queue.cancel(ticket));
        if let Some(Some(stored)) = cancelled {
            self.free_block(stored);
        }
        cancelled.is_some()
    }

    /// Records that the senders of a channel are gone. Returns whether the word is one of a channel.
    pub(super) fn end_senders(&self, word: OwnerWord) -> bool {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word) else { return false };
        for receiver in channel.queue.end_senders() {
            self.answer(receiver, WaitAnswer::Closed);
        }
        if channel.is_ended {
            channels.remove(&word);
            self.free_block(word);
        }
        true
    }

    /// Records that the receiver of a channel was dropped.
    pub(super) fn end_receiver(&self, word: OwnerWord) {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(&word) else { return };
        channel.is_ended = true;
        self.refuse_senders(channel);
        for value in channel.queue.take_ready() {
            self.outbox.free(self.id, value, channel.destructor);
        }
        if !channel.queue.has_senders() {
            channels.remove(&word);
            self.free_block(word);
        }
    }

    /// Gives the senders that wait their values back.
    fn refuse_senders(&self, channel: &mut HomeChannel) {
        for (sender, value) in channel.queue.end_receiver() {
            self.free_block(value);
            self.answer(sender, WaitAnswer::Closed);
        }
    }

    /// Ends the waits of a node that is gone, and tells those who wait for it.
    pub(super) fn lose_channels(&self, node: NodeId) {
        for channel in self.channels.lock().values_mut() {
            for value in channel.queue.lose(node.0) {
                self.outbox.free(self.id, value, channel.destructor);
            }
            if channel.received_at == Some(node.0) {
                // Several may share the receiver.
                channel.received_at = channel.queue.waiting_receiver().map(|receiver| receiver.node);
                if channel.received_at.is_none() {
                    // Should the receiver be elsewhere by now, it says so by receiving.
                    self.refuse_senders(channel);
                }
            }
            if channel.sent_from.remove(&node.0) {
                let waiting = channel.queue.take_receivers();
                if waiting.is_empty() {
                    channel.gone.push(node.0);
                }
                waiting.into_iter().for_each(|receiver| self.answer(receiver, WaitAnswer::SenderGone(node.0)));
            }
        }
    }

    /// Drops the receiver of a channel, wherever that is. Never waits for another node.
    pub(crate) fn end_receiving(&self, word: OwnerWord) {
        let home = self.home_of(word);
        if home == self.id {
            self.end_receiver(word);
        } else {
            self.outbox.tell(home, ShareMessage::EndReceiver { word: word.bits() });
        }
    }
}
