//! Line of those who hold a lock and of those who wait for it, at the lock's home.

use crate::lock::LockMode;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Ticket of a node that waits at the home of a lock or a channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HomeTicket {
    /// Number of the node that waits.
    pub node: u16,
    /// Number of the wait at that node. It is used once.
    pub number: u64,
}

/// First-in, first-out reader-writer lock, without I/O.
///
/// Nobody overtakes: who comes while others wait joins the end of the line, a reader behind a writer,
/// too. It has no lease, because its home tells a waiter that its turn has come, and learns from the
/// membership view that a holder is dead ([`crate::lock`] is for homes that can do neither).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LockLine {
    holders: Vec<(HomeTicket, LockMode)>,
    waiting: VecDeque<(HomeTicket, LockMode)>,
}

/// Most requests of a node that one lock or channel keeps for it: waits, and answers that may not have arrived. A node
/// has one for each of its threads.
pub const REQUESTS_OF_NODE_MAX: usize = 1 << 16;

impl LockLine {
    /// Returns whether so many tickets of a node wait that no more may.
    pub fn is_full_for(&self, node: u16) -> bool {
        let is_of_node = |(ticket, _): &&(HomeTicket, LockMode)| ticket.node == node;
        // Most of the time few wait.
        self.waiting.len() >= REQUESTS_OF_NODE_MAX
            && self.waiting.iter().filter(is_of_node).count() >= REQUESTS_OF_NODE_MAX
    }

    /// Creates the line of a lock that these tickets hold, and for which nobody waits. A ticket may stand for several
    /// holdings.
    pub fn held_by(holders: impl IntoIterator<Item = (HomeTicket, LockMode)>) -> LockLine {
        LockLine { holders: holders.into_iter().collect(), waiting: VecDeque::new() }
    }

    /// Asks for the lock. Returns whether it is the ticket's at once; otherwise it waits in line.
    pub fn ask(&mut self, ticket: HomeTicket, mode: LockMode) -> bool {
        let is_granted = self.waiting.is_empty() && self.allows(mode);
        if is_granted {
            self.holders.push((ticket, mode));
        } else {
            self.waiting.push_back((ticket, mode));
        }
        is_granted
    }

    /// Returns the mode in which a ticket holds the lock; `None` if it does not.
    pub fn held(&self, ticket: HomeTicket) -> Option<LockMode> {
        self.holders.iter().find(|(holder, _)| *holder == ticket).map(|(_, mode)| *mode)
    }

    /// Returns whether a ticket holds the lock or waits for it.
    pub fn has(&self, ticket: HomeTicket) -> bool {
        self.holders.iter().chain(&self.waiting).any(|(other, _)| *other == ticket)
    }

    /// Returns those who hold the lock.
    pub fn holders(&self) -> impl Iterator<Item = HomeTicket> + '_ {
        self.holders.iter().map(|(ticket, _)| *ticket)
    }

    /// Returns those who hold the lock, and how.
    pub fn holdings(&self) -> impl Iterator<Item = (HomeTicket, LockMode)> + '_ {
        self.holders.iter().copied()
    }

    /// Returns how many wait for the lock.
    pub fn waiters(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the holders and waiters that belong to a node.
    pub fn of_node(&self, node: u16) -> Vec<HomeTicket> {
        let all = self.holders.iter().chain(&self.waiting).map(|(ticket, _)| *ticket);
        all.filter(|ticket| ticket.node == node).collect()
    }

    /// Takes everyone out of the line. Returns those who waited.
    pub fn dissolve(&mut self) -> Vec<HomeTicket> {
        self.holders.clear();
        self.waiting.drain(..).map(|(ticket, _)| ticket).collect()
    }

    /// Ends the holding or the waiting of a ticket, and one holding of one that has several; does nothing if it does
    /// neither. Returns the tickets whose turn has come: they hold the lock now.
    pub fn leave(&mut self, ticket: HomeTicket) -> Vec<HomeTicket> {
        if let Some(at) = self.holders.iter().position(|(holder, _)| *holder == ticket) {
            self.holders.remove(at);
        }
        self.waiting.retain(|(waiter, _)| *waiter != ticket);
        let mut granted = Vec::new();
        while let Some((next, mode)) = self.waiting.front().copied()
            && self.allows(mode)
        {
            self.waiting.pop_front();
            self.holders.push((next, mode));
            granted.push(next);
        }
        granted
    }

    /// Returns whether nobody holds the lock and nobody waits for it.
    pub fn is_idle(&self) -> bool {
        self.holders.is_empty() && self.waiting.is_empty()
    }

    /// Returns whether the holders leave room for one more of this mode.
    fn allows(&self, mode: LockMode) -> bool {
        match mode {
            LockMode::Exclusive => self.holders.is_empty(),
            LockMode::Shared => self.holders.iter().all(|(_, held)| *held == LockMode::Shared),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[derive(Clone, Copy)]
    enum Step {
        Ask(LockMode),
        Leave(usize),
    }

    fn ticket(number: u64) -> HomeTicket {
        HomeTicket { node: (number % 3) as u16, number }
    }

    /// Tries all sequences of so many steps. `turns` are the tickets in the order in which they got the
    /// lock; `gone` are those that ended before.
    fn explore(line: &LockLine, asked: u64, turns: &[u64], gone: &[u64], steps: usize) {
        let exclusive = line.holders.iter().filter(|(_, mode)| *mode == LockMode::Exclusive).count();
        assert!(exclusive == 0 || line.holders.len() == 1, "a writer is alone: {line:?}");
        assert!(!line.holders.is_empty() || line.waiting.is_empty(), "a wake-up is lost: {line:?}");
        assert!(turns.is_sorted(), "someone has overtaken: {turns:?}");
        // Who has asked has had its turn, waits, or has left.
        for number in 0..asked {
            let waits = line.waiting.iter().any(|(waiter, _)| waiter.number == number);
            assert_eq!(waits, !turns.contains(&number) && !gone.contains(&number), "{number} in {line:?}");
        }
        if steps == 0 {
            return;
        }
        let tickets: Vec<_> = line.holders.iter().chain(&line.waiting).map(|(ticket, _)| *ticket).collect();
        let asks = [Step::Ask(LockMode::Shared), Step::Ask(LockMode::Exclusive)];
        for step in asks.into_iter().chain((0..tickets.len()).map(Step::Leave)) {
            let (mut line, mut asked, mut turns, mut gone) = (line.clone(), asked, turns.to_vec(), gone.to_vec());
            match step {
                Step::Ask(mode) => {
                    if line.ask(ticket(asked), mode) {
                        turns.push(asked);
                    }
                    assert_eq!(line.held(ticket(asked)).is_some(), turns.contains(&asked));
                    asked += 1;
                }
                Step::Leave(index) => {
                    gone.push(tickets[index].number);
                    turns.extend(line.leave(tickets[index]).iter().map(|ticket| ticket.number));
                    assert_eq!(line.leave(tickets[index]), [], "once");
                }
            }
            explore(&line, asked, &turns, &gone, steps - 1);
        }
    }

    #[test]
    fn writers_are_alone_nobody_overtakes_and_no_wake_up_is_lost() {
        explore(&LockLine::default(), 0, &[], &[], 8);
    }

    #[test]
    fn a_node_that_is_gone_leaves_nobody_behind() {
        let mut line = LockLine::default();
        for number in 0..9 {
            line.ask(ticket(number), if number == 4 { LockMode::Exclusive } else { LockMode::Shared });
        }
        assert_eq!(line.of_node(1), [1, 4, 7].map(ticket));
        // 1 reads, 4 waits to write and 7 behind it: the other readers have their turns then.
        let turns: Vec<_> = line.of_node(1).into_iter().flat_map(|gone| line.leave(gone)).collect();
        assert_eq!(turns, [5, 6, 7, 8].map(ticket));
        assert_eq!((line.of_node(1), line.dissolve()), (vec![], vec![]));
    }
}
