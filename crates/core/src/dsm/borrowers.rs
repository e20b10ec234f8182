//! Tasks at a node that may have borrows of other nodes' tasks, without I/O.

use super::HomeTicket;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// Counts of the scoped tasks at a node, by the node that has sent them, and waits for the end of those that a dead
/// one has sent.
#[derive(Clone, Default, Debug)]
pub struct BorrowerCounts {
    counts: BTreeMap<u16, usize>,
    /// Dead nodes, of which no task is taken any more.
    closed: BTreeSet<u16>,
    waits: Vec<(u16, HomeTicket)>,
}

impl BorrowerCounts {
    /// Counts a task that a node has sent. Returns false if somebody knows that it is dead: the task is not taken.
    pub fn admit(&mut self, sender: u16) -> bool {
        let is_open = !self.closed.contains(&sender);
        if is_open {
            *self.counts.entry(sender).or_default() += 1;
        }
        is_open
    }

    /// Records that a task has ended. Returns the waits that are over.
    pub fn end(&mut self, sender: u16) -> Vec<HomeTicket> {
        if let Some(count) = self.counts.get_mut(&sender)
            && *count > 1
        {
            *count -= 1;
            return Vec::new();
        }
        self.counts.remove(&sender);
        self.waits.extract_if(.., |(of, _)| *of == sender).map(|(_, ticket)| ticket).collect()
    }

    /// Takes no task of a dead node from now on. Returns whether there is none; otherwise the ticket waits.
    pub fn close(&mut self, dead: u16, ticket: HomeTicket) -> bool {
        self.closed.insert(dead);
        let is_none = !self.counts.contains_key(&dead);
        if !is_none {
            self.waits.push((dead, ticket));
        }
        is_none
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_node_s_tasks_are_counted_until_the_last_one_ends_and_no_more_are_taken() {
        let (mut tasks, dead, other) = (BorrowerCounts::default(), 1, 2);
        let ticket = |number| HomeTicket { node: 0, number };
        assert!(tasks.admit(dead) && tasks.admit(dead) && tasks.admit(other));
        assert!(!tasks.close(dead, ticket(1)) && !tasks.close(dead, ticket(2)));
        assert!(!tasks.admit(dead), "it would not be waited for");
        assert_eq!((tasks.end(dead), tasks.end(other)), (Vec::new(), Vec::new()));
        assert_eq!(tasks.end(dead), [ticket(1), ticket(2)]);
        assert!(tasks.close(dead, ticket(3)) && !tasks.admit(dead));
        assert!(tasks.admit(other) && !tasks.close(other, ticket(4)));
        assert_eq!(tasks.end(other), [ticket(4)]);
    }
}
