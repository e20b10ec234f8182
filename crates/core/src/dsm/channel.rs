//! Bounded channel, at its home: values, and those who wait to send or to receive.

use super::lock_line::{HomeTicket, REQUESTS_OF_NODE_MAX};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// First-in, first-out channel for any number of senders and receivers, without I/O.
///
/// It holds up to `bound` values. A sender beyond that waits with its value; with a bound of 0 every
/// sender waits until its value is received.
#[derive(Clone, Debug)]
pub struct ChannelQueue<V> {
    bound: usize,
    ready: VecDeque<V>,
    senders: VecDeque<(HomeTicket, V)>,
    receivers: VecDeque<HomeTicket>,
    has_senders: bool,
    has_receiver: bool,
}

/// Immediate answer to a sender.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SendStep<V> {
    /// The value is in the channel, or is the receiver's with this ticket.
    Sent(Option<(HomeTicket, V)>),
    /// The sender waits, and its value with it.
    Waits,
    /// The value comes back, because nobody will receive it.
    Closed(V),
}

/// Immediate answer to a receiver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReceiveStep<V> {
    /// The value is the receiver's. The sender of this ticket waits no longer.
    Received(V, Option<HomeTicket>),
    /// The receiver waits.
    Waits,
    /// The channel is empty, and will stay so.
    Closed,
}

impl<V> ChannelQueue<V> {
    /// Creates an empty channel for so many values.
    pub fn new(bound: usize) -> ChannelQueue<V> {
        ChannelQueue {
            bound,
            ready: VecDeque::new(),
            senders: VecDeque::new(),
            receivers: VecDeque::new(),
            has_senders: true,
            has_receiver: true,
        }
    }

    /// Creates a channel that has these values, and for which nobody waits.
    pub fn restored(
        bound: usize,
        ready: impl IntoIterator<Item = V>,
        has_senders: bool,
        has_receiver: bool,
    ) -> ChannelQueue<V> {
        let ready = ready.into_iter().collect();
        ChannelQueue { ready, has_senders, has_receiver, ..ChannelQueue::new(bound) }
    }

    /// Returns the value in the channel that will be received last. Senders that wait have theirs still.
    pub fn newest(&self) -> Option<&V> {
        self.ready.back()
    }

    /// Returns whether so many tickets of a node wait that no more may.
    pub fn is_full_for(&self, node: u16) -> bool {
        let waiting = self.senders.len() + self.receivers.len();
        let tickets = self.senders.iter().map(|(ticket, _)| ticket).chain(&self.receivers);
        // Most of the time few wait.
        waiting >= REQUESTS_OF_NODE_MAX && tickets.filter(|ticket| ticket.node == node).count() >= REQUESTS_OF_NODE_MAX
    }

    /// Sends a value. With `may_wait` false, `Closed` also says that there is no room
    /// ([`ChannelQueue::has_receiver`] tells which).
    pub fn send(&mut self, ticket: HomeTicket, value: V, may_wait: bool) -> SendStep<V> {
        if !self.has_receiver {
            return SendStep::Closed(value);
        }
        if let Some(receiver) = self.receivers.pop_front() {
            return SendStep::Sent(Some((receiver, value)));
        }
        if self.ready.len() < self.bound {
            self.ready.push_back(value);
            return SendStep::Sent(None);
        }
        if !may_wait {
            return SendStep::Closed(value);
        }
        self.senders.push_back((ticket, value));
        SendStep::Waits
    }

    /// Receives the oldest value.
    pub fn receive(&mut self, ticket: HomeTicket, may_wait: bool) -> ReceiveStep<V> {
        self.has_receiver = true;
        let Some(value) = self.ready.pop_front() else {
            return match self.senders.pop_front() {
                Some((sender, value)) => ReceiveStep::Received(value, Some(sender)),
                None if !self.has_senders => ReceiveStep::Closed,
                None => {
                    if may_wait {
                        self.receivers.push_back(ticket);
                    }
                    ReceiveStep::Waits
                }
            };
        };
        let sender = self.senders.pop_front().map(|(sender, waiting)| {
            self.ready.push_back(waiting);
            sender
        });
        ReceiveStep::Received(value, sender)
    }

    /// Records that nobody will send any more. Returns the receivers that wait no longer.
    pub fn end_senders(&mut self) -> Vec<HomeTicket> {
        self.has_senders = false;
        self.receivers.drain(..).collect()
    }

    /// Records that nobody will receive any more, for now. Returns the senders that wait no longer; their
    /// values are theirs again.
    pub fn end_receiver(&mut self) -> Vec<(HomeTicket, V)> {
        self.has_receiver = false;
        self.receivers.clear();
        self.senders.drain(..).collect()
    }

    /// Takes the values that nobody has received.
    pub fn take_ready(&mut self) -> VecDeque<V> {
        core::mem::take(&mut self.ready)
    }

    /// Ends a wait. Returns whether there was one; the value of a sender is returned with it.
    pub fn cancel(&mut self, ticket: HomeTicket) -> Option<Option<V>> {
        if let Some(at) = self.senders.iter().position(|(sender, _)| *sender == ticket) {
            return self.senders.remove(at).map(|(_, value)| Some(value));
        }
        let at = self.receivers.iter().position(|receiver| *receiver == ticket)?;
        self.receivers.remove(at).map(|_| None)
    }

    /// Ends the waits of a node that is gone. Returns the values of its senders.
    pub fn lose(&mut self, node: u16) -> Vec<V> {
        self.receivers.retain(|receiver| receiver.node != node);
        let (lost, kept) = core::mem::take(&mut self.senders).into_iter().partition(|(sender, _)| sender.node == node);
        self.senders = kept;
        let lost: VecDeque<(HomeTicket, V)> = lost;
        lost.into_iter().map(|(_, value)| value).collect()
    }

    /// Returns the receiver that has waited longest.
    pub fn waiting_receiver(&self) -> Option<HomeTicket> {
        self.receivers.front().copied()
    }

    /// Takes the receivers that wait.
    pub fn take_receivers(&mut self) -> Vec<HomeTicket> {
        self.receivers.drain(..).collect()
    }

    /// Returns whether somebody may receive.
    pub fn has_receiver(&self) -> bool {
        self.has_receiver
    }

    /// Returns whether somebody may send.
    pub fn has_senders(&self) -> bool {
        self.has_senders
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// What everyone has seen, beside a channel.
    #[derive(Clone, Default)]
    struct Seen {
        /// Values in the order in which they were offered, without those that were refused.
        offered: Vec<u64>,
        /// Values in the order in which receivers got them.
        received: Vec<u64>,
        /// Senders that were told that they are done.
        done: Vec<u64>,
        tickets: u64,
    }

    fn explore(queue: &ChannelQueue<u64>, seen: &Seen, steps: usize) {
        // The values that were received are the oldest of those that were offered.
        assert_eq!(seen.received, seen.offered[..seen.received.len()]);
        assert!(queue.ready.len() <= queue.bound);
        assert!(queue.receivers.is_empty() || (queue.ready.is_empty() && queue.senders.is_empty()), "lost wake-up");
        assert!(queue.senders.is_empty() || queue.ready.len() == queue.bound, "lost wake-up of a sender");
        assert_eq!(seen.received.len() + queue.ready.len() + queue.senders.len(), seen.offered.len());
        assert_eq!(seen.done.len() + queue.senders.len(), seen.offered.len());
        if steps == 0 {
            return;
        }
        for step in 0..6 {
            let (mut queue, mut seen) = (queue.clone(), seen.clone());
            let ticket = HomeTicket { node: (seen.tickets % 2) as u16, number: seen.tickets };
            seen.tickets += 1;
            match step {
                0 | 1 => {
                    if !queue.has_senders {
                        continue;
                    }
                    match queue.send(ticket, ticket.number, step == 0) {
                        SendStep::Sent(delivered) => {
                            seen.offered.push(ticket.number);
                            seen.done.push(ticket.number);
                            seen.received.extend(delivered.map(|(_, value)| value));
                        }
                        SendStep::Waits => seen.offered.push(ticket.number),
                        SendStep::Closed(value) => assert_eq!(value, ticket.number),
                    }
                }
                2 | 3 => match queue.receive(ticket, step == 2) {
                    ReceiveStep::Received(value, sender) => {
                        seen.received.push(value);
                        seen.done.extend(sender.map(|sender| sender.number));
                    }
                    ReceiveStep::Waits => {}
                    ReceiveStep::Closed => assert!(!queue.has_senders && queue.ready.is_empty()),
                },
                4 => {
                    queue.end_senders();
                }
                _ => {
                    // The youngest wait ends.
                    let waits = queue.senders.back().map(|(sender, _)| *sender).or(queue.receivers.back().copied());
                    let Some(waits) = waits else { continue };
                    if let Some(value) = queue.cancel(waits).expect("it waits") {
                        seen.offered.retain(|offered| *offered != value);
                    }
                    assert_eq!(queue.cancel(waits), None);
                }
            }
            explore(&queue, &seen, steps - 1);
        }
    }

    #[test]
    fn values_come_in_order_once_and_nobody_waits_in_vain() {
        for bound in 0..3 {
            explore(&ChannelQueue::new(bound), &Seen::default(), 8);
        }
    }

    #[test]
    fn without_a_receiver_values_go_back_until_there_is_one_again() {
        let ticket = |number| HomeTicket { node: 1, number };
        let mut queue = ChannelQueue::new(1);
        assert_eq!(queue.send(ticket(1), 1, true), SendStep::Sent(None));
        assert_eq!(queue.send(ticket(2), 2, true), SendStep::Waits);
        assert_eq!(queue.end_receiver(), [(ticket(2), 2)]);
        assert_eq!(queue.send(ticket(3), 3, true), SendStep::Closed(3));
        assert_eq!(queue.receive(ticket(4), true), ReceiveStep::Received(1, None));
        assert_eq!(queue.send(ticket(5), 5, true), SendStep::Sent(None));
        assert_eq!(queue.send(ticket(6), 6, true), SendStep::Waits);
        assert_eq!((queue.lose(0), queue.lose(1)), (vec![], vec![6]));
        assert_eq!(queue.take_ready(), [5]);
    }
}
