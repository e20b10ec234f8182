//! Tickets that were given up before their requests have arrived, without I/O.

use super::HomeTicket;
use alloc::collections::{BTreeMap, BTreeSet};

/// Tickets of which the home of a lock or a channel knows only that nobody wants what they ask for any more.
///
/// Whoever has no answer in time withdraws its request. If the home was stopped, the withdrawal may overtake the
/// request, which would be granted to nobody then. So the home remembers what was withdrawn before it came.
#[derive(Clone, Default, Debug)]
pub struct WithdrawnTickets(BTreeMap<u16, BTreeSet<u64>>);

impl WithdrawnTickets {
    /// Greatest number of tickets of a node that are remembered. Requests that are older than so many withdrawn ones
    /// are not on their way any more: a node withdraws one at most for each time that it waits for an answer.
    pub const OF_NODE_MAX: usize = 1024;

    /// Records that a ticket is not wanted any more. The oldest one of its node is forgotten if there are too many.
    pub fn withdraw(&mut self, ticket: HomeTicket) {
        let of_node = self.0.entry(ticket.node).or_default();
        of_node.insert(ticket.number);
        if of_node.len() > WithdrawnTickets::OF_NODE_MAX {
            of_node.pop_first();
        }
    }

    /// Forgets a ticket whose request is there. Returns whether it was withdrawn.
    pub fn take(&mut self, ticket: HomeTicket) -> bool {
        self.0.get_mut(&ticket.node).is_some_and(|of_node| of_node.remove(&ticket.number))
    }

    /// Forgets the tickets of a node that is gone.
    pub fn lose(&mut self, node: u16) {
        self.0.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_withdrawn_ticket_is_known_once_until_its_node_is_gone_or_many_were_withdrawn_since() {
        let mut withdrawn = WithdrawnTickets::default();
        let ticket = |node, number| HomeTicket { node, number };
        withdrawn.withdraw(ticket(1, 5));
        assert!(!withdrawn.take(ticket(2, 5)) && !withdrawn.take(ticket(1, 6)));
        assert!(withdrawn.take(ticket(1, 5)) && !withdrawn.take(ticket(1, 5)));
        let most = WithdrawnTickets::OF_NODE_MAX as u64;
        (0..=most).for_each(|number| withdrawn.withdraw(ticket(1, number)));
        withdrawn.withdraw(ticket(2, 0));
        assert_eq!([0, 1, most].map(|number| withdrawn.take(ticket(1, number))), [false, true, true]);
        withdrawn.lose(1);
        assert!(!withdrawn.take(ticket(1, 2)) && withdrawn.take(ticket(2, 0)));
    }
}
