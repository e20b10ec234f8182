//! Tasks at a node that may have borrows of other nodes' tasks, without I/O.

use super::{HomeTicket, OwnerWord, Partition};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// The origin of a borrow that travels with a scoped task: a task that was lent it, or a lock.
///
/// A task has the roots of all that it may have borrowed: of each scoped task before it, and itself, one, and of each
/// lock that one of them has had for reading meanwhile, because what the value owns may be lent. Whoever waits for
/// borrowers waits for those with one root. So it does not wait for other tasks, which may wait for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BorrowRoot(u64);

const NUMBER_BITS: u32 = 52;

impl BorrowRoot {
    /// Returns the root of a scoped task: the node that has started it, and a number that it uses once.
    pub fn of_task(node: u16, number: u64) -> BorrowRoot {
        let number = number & ((1 << NUMBER_BITS) - 1);
        // The word of a lost object, so no lock has it.
        let (low, high) = (number & OwnerWord::OFFSET_MASK, number & !OwnerWord::OFFSET_MASK);
        let node = u64::from(node % Partition::COUNT) << OwnerWord::PARTITION_SHIFT;
        BorrowRoot(low | OwnerWord::FLAGS_MASK | node | high << (u64::BITS - NUMBER_BITS))
    }

    /// Returns the root of what the value under a lock owns.
    pub fn of_lock(word: OwnerWord) -> BorrowRoot {
        BorrowRoot(word.bits())
    }

    /// Returns the root that has these bits.
    pub fn from_bits(bits: u64) -> BorrowRoot {
        BorrowRoot(bits)
    }

    /// Returns the bits of the root.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns the word of the lock; `None` if the root is a task's.
    pub fn lock(self) -> Option<OwnerWord> {
        OwnerWord::from_bits(self.0)
    }
}

/// Counts of the scoped tasks at a node, by the node that has sent them and by the roots of their borrows, and waits
/// for the end of those that a dead one has sent.
#[derive(Clone, Default, Debug)]
pub struct BorrowerCounts {
    counts: BTreeMap<(u16, BorrowRoot), usize>,
    /// Dead nodes, of which no task is taken any more.
    closed: BTreeSet<u16>,
    waits: Vec<((u16, BorrowRoot), HomeTicket)>,
}

impl BorrowerCounts {
    /// Counts a task that a node has sent with borrows of these roots. Returns false if somebody knows that the node
    /// is dead: the task is not taken.
    pub fn admit(&mut self, sender: u16, roots: &[BorrowRoot]) -> bool {
        let is_open = !self.closed.contains(&sender);
        if is_open {
            roots.iter().for_each(|root| *self.counts.entry((sender, *root)).or_default() += 1);
        }
        is_open
    }

    /// Records that a task has ended, which was counted with the same roots. Returns the waits that are over.
    pub fn end(&mut self, sender: u16, roots: &[BorrowRoot]) -> Vec<HomeTicket> {
        let mut over = Vec::new();
        for key in roots.iter().map(|root| (sender, *root)) {
            if let Some(count) = self.counts.get_mut(&key)
                && *count > 1
            {
                *count -= 1;
                continue;
            }
            self.counts.remove(&key);
            over.extend(self.waits.extract_if(.., |(of, _)| *of == key).map(|(_, ticket)| ticket));
        }
        over
    }

    /// Takes no task of a dead node from now on. Returns whether none has borrows of this root; otherwise the ticket
    /// waits.
    pub fn close(&mut self, dead: u16, root: BorrowRoot, ticket: HomeTicket) -> bool {
        self.closed.insert(dead);
        let key = (dead, root);
        let is_none = !self.counts.contains_key(&key);
        if !is_none {
            self.waits.push((key, ticket));
        }
        is_none
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsm::Colour;

    fn ticket(number: u64) -> HomeTicket {
        HomeTicket { node: 0, number }
    }

    #[test]
    fn a_dead_node_s_tasks_are_counted_until_the_last_one_ends_and_no_more_are_taken() {
        let (mut tasks, dead, other) = (BorrowerCounts::default(), 1, 2);
        let root = [BorrowRoot::of_task(0, 1)];
        assert!(tasks.admit(dead, &root) && tasks.admit(dead, &root) && tasks.admit(other, &root));
        assert!(!tasks.close(dead, root[0], ticket(1)) && !tasks.close(dead, root[0], ticket(2)));
        assert!(!tasks.admit(dead, &root), "it would not be waited for");
        assert_eq!((tasks.end(dead, &root), tasks.end(other, &root)), (Vec::new(), Vec::new()));
        assert_eq!(tasks.end(dead, &root), [ticket(1), ticket(2)]);
        assert!(tasks.close(dead, root[0], ticket(3)) && !tasks.admit(dead, &root));
        assert!(tasks.admit(other, &root) && !tasks.close(other, root[0], ticket(4)));
        assert_eq!(tasks.end(other, &root), [ticket(4)]);
    }

    #[test]
    fn who_waits_for_borrowers_waits_for_no_other_tasks() {
        let (mut tasks, dead) = (BorrowerCounts::default(), 1);
        let lock = OwnerWord::new(Partition::new(3).unwrap(), 16, Colour(0)).unwrap();
        let [one, two, three] = [BorrowRoot::of_task(0, 1), BorrowRoot::of_task(2, 1), BorrowRoot::of_lock(lock)];
        assert!(tasks.admit(dead, &[one]) && tasks.admit(dead, &[one, two]) && tasks.admit(dead, &[one, two, three]));
        assert!(tasks.close(dead, BorrowRoot::of_task(0, 2), ticket(1)), "nobody has borrowed from it");
        [one, two, three].into_iter().zip(2..).for_each(|(root, at)| assert!(!tasks.close(dead, root, ticket(at))));
        assert_eq!(tasks.end(dead, &[one, two, three]), [ticket(4)]);
        assert_eq!(tasks.end(dead, &[one]), []);
        assert_eq!(tasks.end(dead, &[one, two]), [ticket(2), ticket(3)]);
        assert!(tasks.counts.is_empty() && tasks.waits.is_empty());
    }

    #[test]
    fn no_two_roots_are_alike() {
        let mut roots = BTreeSet::new();
        for node in [0, 1, Partition::COUNT - 1] {
            for number in (0..NUMBER_BITS).map(|bit| 1 << bit).chain([0, 3, (1 << NUMBER_BITS) - 1]) {
                let root = BorrowRoot::of_task(node, number);
                assert!(roots.insert(root) && root.lock().is_none(), "{root:?}");
                assert_eq!(BorrowRoot::from_bits(root.bits()), root);
            }
            let lock = OwnerWord::new(Partition::new(node).unwrap(), 64, Colour(9)).unwrap();
            assert_eq!(BorrowRoot::of_lock(lock).lock(), Some(lock));
        }
    }
}
