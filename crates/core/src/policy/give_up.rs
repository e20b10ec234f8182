//! Decides whether a member of a mirror or an erasure code is given up although its server is not
//! known to be dead.
//!
//! A member that is slow, silent, or was not repaired in time has not failed: it may be the only
//! one that holds some chunk. It is given up, so that a spare can take its place, only if the other
//! members can do without it. That means that enough of them are *whole*: in use, not lagging, and
//! holding everything that was ever written. Otherwise operations wait for the member, and the
//! question is asked again later.
//!
//! The answer must still be true when it is acted upon. A thread that gives up a member and a
//! thread that writes agree as follows (Dekker's algorithm):
//!
//! - The thread that gives up a member notes that it is *leaving*, then reads which members are
//!   whole, then notes that it has failed.
//! - The thread that ends a write notes that the members that lack it are *in doubt*, then reads
//!   which members are leaving or have failed: the write has failed if only those have it. The
//!   doubt ends when the word of the chunk, and the count of what a member misses, say so.
//!
//! So either the first thread sees that a member lacks something, or the second sees that a member
//! leaves. Two members that leave at the same time see each other in the same way. A member in
//! doubt does not count as whole. (The count alone would not do: a thread that repairs could find
//! that nothing is missing yet, and note that.)

use crate::MemberSet;

/// Returns whether `member` may be given up: `needed` others are whole and stay.
///
/// `whole` are members in use that hold everything, `leaving` those that are being given up at this
/// moment.
pub fn may_give_up(member: usize, whole: MemberSet, leaving: MemberSet, needed: usize) -> bool {
    whole.difference(leaving).difference(MemberSet::one(member)).count() >= needed
}

#[cfg(test)]
mod tests {
    //! Danger: the last member that holds something is given up, at once or because two decisions
    //! did not see each other.
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;
    use alloc::vec::Vec;

    /// All sets of members below `count`.
    fn sets(count: usize) -> impl Iterator<Item = MemberSet> + Clone {
        (0..1u16 << count).map(MemberSet)
    }

    #[test]
    fn data_of_a_member_that_is_given_up_is_held_by_others() {
        for members in 1..=4 {
            for needed in 1..members {
                for active in sets(members) {
                    // Holders of each of two chunks, or rows.
                    for first in sets(members) {
                        for second in sets(members) {
                            let chunks = [first, second];
                            let whole = chunks.iter().fold(active, |whole, chunk| whole.intersection(*chunk));
                            for member in 0..members {
                                for leaving in sets(members) {
                                    if !may_give_up(member, whole, leaving, needed) {
                                        continue;
                                    }
                                    for chunk in chunks.into_iter().filter(|chunk| chunk.has(member)) {
                                        let others = chunk
                                            .intersection(active)
                                            .difference(leaving)
                                            .difference(MemberSet::one(member));
                                        assert!(others.count() >= needed, "{chunk:?} {active:?} {member}");
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_member_is_given_up_when_enough_others_are_whole() {
        assert!(may_give_up(0, MemberSet(0b10), MemberSet(0b01), 1));
        assert!(!may_give_up(0, MemberSet(0b01), MemberSet(0), 1), "nobody else is whole");
        assert!(!may_give_up(0, MemberSet(0b10), MemberSet(0b11), 1), "the other one leaves, too");
        assert!(
            may_give_up(0, MemberSet(0b110), MemberSet(0), 2) && !may_give_up(0, MemberSet(0b110), MemberSet(0), 3)
        );
    }

    /// Two members of a mirror and one chunk; everybody who may change what is known of it, step by step.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct World {
        /// Members that can be read.
        valid: u16,
        missed: [u8; 2],
        repaired: [u8; 2],
        doubted: u16,
        leaving: u16,
        lost: u16,
        givers: [Giver; 2],
        writer: Writer,
        repair: RepairStep,
        writes_left: u8,
    }

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Giver {
        Idle,
        Leaving,
        MayGo,
        Over,
    }

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Writer {
        Idle,
        /// The members that have it, when the answers are in; then what was noted and seen.
        Answered(u16),
        Noted(u16),
        Looked(u16, bool),
        /// The word has changed; these lack it. Then that is counted.
        Changed(u16),
        Missed,
    }

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum RepairStep {
        Idle,
        /// Looks whether this member lacks something, which had missed so much by then.
        Looking(usize, u8),
    }

    impl World {
        fn new() -> World {
            World {
                valid: 3,
                missed: [0; 2],
                repaired: [0; 2],
                doubted: 0,
                leaving: 0,
                lost: 0,
                givers: [Giver::Idle; 2],
                writer: Writer::Idle,
                repair: RepairStep::Idle,
                writes_left: 2,
            }
        }

        fn is_whole(&self, member: usize) -> bool {
            self.missed[member] == self.repaired[member] && (self.lost | self.doubted) >> member & 1 == 0
        }

        fn miss(mut self, members: u16) -> World {
            (0..2).filter(|member| members >> member & 1 == 1).for_each(|member| self.missed[member] += 1);
            self
        }

        /// What may happen next; `is_careless`: writers do not look who is leaving.
        fn next(self, is_careless: bool) -> Vec<World> {
            let mut next = vec![];
            for member in 0..2 {
                let mut world = self;
                match self.givers[member] {
                    Giver::Idle => {
                        world.leaving |= 1 << member;
                        world.givers[member] = Giver::Leaving;
                    }
                    Giver::Leaving => {
                        // Who leaves is looked at before who is whole; both in one step hides
                        // nothing: neither shrinks the other.
                        let whole = MemberSet::from_iter((0..2).filter(|other| self.is_whole(*other)));
                        let may = may_give_up(member, whole, MemberSet(self.leaving), 1);
                        world.givers[member] = if may { Giver::MayGo } else { Giver::Over };
                        if !may {
                            world.leaving &= !(1 << member);
                        }
                    }
                    Giver::MayGo => {
                        world.lost |= 1 << member;
                        world.leaving &= !(1 << member);
                        world.givers[member] = Giver::Over;
                    }
                    Giver::Over => continue,
                }
                next.push(world);
            }
            match self.writer {
                Writer::Idle if self.writes_left > 0 => {
                    for have in 1..=3 {
                        next.push(World { writer: Writer::Answered(have), writes_left: self.writes_left - 1, ..self });
                    }
                }
                Writer::Idle => {}
                Writer::Answered(have) => {
                    next.push(World { writer: Writer::Noted(have), doubted: 3 & !have, ..self });
                }
                Writer::Noted(have) => {
                    let gone = if is_careless { 0 } else { self.leaving | self.lost };
                    // What can be read changes in the next step only, and here only by this writer,
                    // or by a copy, which waits for it.
                    next.push(World { writer: Writer::Looked(have, have & !gone & self.valid != 0), ..self });
                }
                Writer::Looked(have, kept) => {
                    let valid = if kept { self.valid & have } else { self.valid };
                    let lacking = self.valid & !valid;
                    next.push(World { valid, writer: Writer::Changed(lacking), ..self });
                }
                Writer::Changed(lacking) => {
                    next.push(World { writer: Writer::Missed, ..self.miss(lacking) });
                }
                Writer::Missed => next.push(World { writer: Writer::Idle, doubted: 0, ..self }),
            }
            match self.repair {
                RepairStep::Idle => {
                    for member in 0..2 {
                        next.push(World { repair: RepairStep::Looking(member, self.missed[member]), ..self });
                    }
                }
                RepairStep::Looking(member, missed) => {
                    let mut world = World { repair: RepairStep::Idle, ..self };
                    let has = self.valid >> member & 1 == 1;
                    if has {
                        world.repaired[member] = world.repaired[member].max(missed);
                    } else if self.writer == Writer::Idle && self.valid & !self.lost != 0 {
                        // A copy; the next look finds nothing.
                        world.valid |= 1 << member;
                    }
                    next.push(world);
                }
            }
            next
        }

        /// Does a member that has not failed hold the chunk?
        fn is_held(&self) -> bool {
            self.valid & !self.lost != 0
        }
    }

    /// All worlds that can be reached, and whether the chunk is held in all of them.
    fn explore(is_careless: bool) -> (usize, bool) {
        let (mut seen, mut open) = (BTreeSet::new(), vec![World::new()]);
        let mut is_held = true;
        while let Some(world) = open.pop() {
            if seen.insert(world) {
                is_held &= world.is_held();
                open.extend(world.next(is_careless));
            }
        }
        (seen.len(), is_held)
    }

    #[test]
    fn the_last_holder_is_never_given_up_whatever_the_order_of_writes_and_decisions() {
        let (worlds, is_held) = explore(false);
        assert!(is_held);
        assert!(worlds > 5_000, "{worlds} worlds are too few to say anything");
        assert!(!explore(true).1, "the model shows what the agreement is for");
    }
}
