//! The row word: which parts of a row of an erasure code can be used, as one atomic 64-bit word.
//!
//! ```text
//!  63     51   50    49 48    47      32  31     16  15      0
//! +---------+--------+-------+----------+----------+----------+
//! | 0       |claimed | state | present  | live     | have     |
//! +---------+--------+-------+----------+----------+----------+
//! ```
//!
//! Clean → Writing → Closed → Spent → Writing or Clean. A row is written once, by one writer, and
//! never changed while it is closed. So a member that dies in the middle of a write harms nothing
//! but that row, which nothing refers to yet. *present* are the data pages that were written (the
//! others are zeros), *live* those that still are the newest version of some page, *have* the
//! members that hold their part. When nothing is live any more the row is spent, unless it is being
//! repaired: a part that is on its way to a member must not land in a row that has another writer.
//! A thread that compares what members hold with what was written keeps the row in the same way. So
//! does a write that has failed while members still owe an answer: such a row is *abandoned*, and
//! spent once they have answered.
//!
//! Every transition is a pure function on a copy; the owner of the atomic runs the
//! compare-exchange. *Writing* is not in the word: a thread that has claimed a row is alone with
//! it.

use crate::MemberSet;
use crate::cast::low_u16;

/// Word of one row of an erasure code.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowWord(pub u64);

const CLOSED: u64 = 1 << 48;
const SPENT: u64 = 1 << 49;
const CLAIMED: u64 = 1 << 50;

impl RowWord {
    /// Word of a row that was never written, or was discarded at all members.
    pub const CLEAN: RowWord = RowWord(0);
    /// Word of a row in which nothing is of use, and that members may still hold.
    pub const SPENT: RowWord = RowWord(SPENT);

    /// Word of a row whose write has failed, and may still arrive at members: nobody else writes it.
    pub const ABANDONED: RowWord = RowWord(CLAIMED);

    /// Creates the word of a written row, whose `present` data pages are the newest version of
    /// their pages.
    pub fn closed(have: MemberSet, present: u16) -> RowWord {
        assert!(present != 0);
        RowWord(CLOSED | u64::from(present) << 32 | u64::from(present) << 16 | u64::from(have.0))
    }

    /// Checks whether the row can be read.
    pub fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }

    /// Checks whether members may hold bytes of the row that nobody needs.
    pub fn is_spent(self) -> bool {
        self.0 & SPENT != 0
    }

    /// Returns the members that hold their part.
    pub fn have(self) -> MemberSet {
        MemberSet(low_u16(self.0))
    }

    /// Returns the set of data pages that are the newest version of a page, one bit each.
    pub fn live(self) -> u16 {
        low_u16(self.0 >> 16)
    }

    /// Returns the set of data pages that are not zeros by definition, one bit each.
    pub fn present(self) -> u16 {
        low_u16(self.0 >> 32)
    }

    /// Checks whether the row is claimed: being repaired or watched.
    pub fn is_claimed(self) -> bool {
        self.0 & CLAIMED != 0
    }

    /// Returns a spent row if nothing keeps it, and whether it is: then a writer may claim it.
    fn settled(self) -> (RowWord, bool) {
        let is_over = self.live() == 0 && !self.is_claimed();
        (if is_over { RowWord::SPENT } else { self }, is_over)
    }

    /// Removes data page `part` from the live ones; there is a newer version of its page. `true`:
    /// the row is spent now.
    pub fn kill(self, part: usize) -> (RowWord, bool) {
        assert!(self.is_closed() && self.live() & 1 << part != 0);
        RowWord(self.0 & !(1 << (16 + part))).settled()
    }

    /// Removes `member` from those that hold their part, because it gave wrong bytes. `None`: it
    /// did not count as one that holds its part, or too few would be left: fewer than `needed` of
    /// the `living` members.
    pub fn suspect(self, member: usize, needed: usize, living: MemberSet) -> Option<RowWord> {
        let others = self.have().intersection(living).difference(MemberSet::one(member));
        let may = self.is_closed() && self.have().has(member) && others.count() >= needed;
        may.then_some(RowWord(self.0 & !(1 << member)))
    }

    /// Removes `member` from those that hold their part, because it has failed and will be replaced
    /// by another server. `None`: it did not count as one that holds its part.
    pub fn forget(self, member: usize) -> Option<RowWord> {
        (self.is_closed() && self.have().has(member)).then_some(RowWord(self.0 & !(1 << member)))
    }

    /// Claims the row so that `member` can be brought its part. `None`: the member has it, or not
    /// possible now.
    pub fn claim(self, member: usize) -> Option<RowWord> {
        let may = self.is_closed() && self.live() != 0 && !self.is_claimed() && !self.have().has(member);
        may.then_some(RowWord(self.0 | CLAIMED))
    }

    /// Claims the row so that what members hold can be compared while nobody repairs it. `None`:
    /// not possible now.
    pub fn watch(self) -> Option<RowWord> {
        let may = self.is_closed() && self.live() != 0 && !self.is_claimed();
        may.then_some(RowWord(self.0 | CLAIMED))
    }

    /// Ends a watch. `true`: the row is spent now.
    pub fn unwatch(self) -> (RowWord, bool) {
        assert!(self.is_closed() && self.is_claimed());
        RowWord(self.0 & !CLAIMED).settled()
    }

    /// Ends a claim, `repaired` or given up. Nothing of it may be under way any more. `true`: the
    /// row is spent now.
    pub fn finish(self, member: usize, repaired: bool) -> (RowWord, bool) {
        assert!(self.is_closed() && self.is_claimed());
        RowWord(self.0 & !CLAIMED | u64::from(repaired) << member).settled()
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a member that counts as one that holds its part and does not, whatever the order in
    //! which rows are written, spent, repaired and written again.
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;
    use alloc::vec::Vec;

    /// One row with two data pages and three members, and everything that is under way.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct World {
        word: u64,
        /// Which writing of the row it is, and of which one each member holds its part.
        version: u8,
        holds: [u8; 3],
        /// Members that have the part of the writer, if there is one.
        writer: Option<u16>,
        /// Who brings which member its part, of which version, and whether it has landed.
        mender: Option<(usize, u8, bool)>,
        /// Who looks at which version.
        watcher: Option<u8>,
        suspicions_left: u8,
        /// Who still may get its part, of which version, after the write has failed.
        late: Option<(usize, u8)>,
    }

    impl World {
        fn next(self) -> Vec<World> {
            let (mut next, word) = (vec![], RowWord(self.word));
            if self.writer.is_none() && !word.is_closed() && word != RowWord::ABANDONED && self.version < 3 {
                next.push(World { writer: Some(0), version: self.version + 1, ..self });
            }
            if let Some(have) = self.writer {
                for member in MemberSet::first(3).difference(MemberSet(have)).iter() {
                    let mut world = World { writer: Some(have | 1 << member), ..self };
                    world.holds[member] = self.version;
                    next.push(world);
                }
                // It has failed, or it ends with enough members and one or both of the data pages.
                next.push(World { writer: None, word: RowWord::SPENT.0, ..self });
                for member in MemberSet::first(3).difference(MemberSet(have)).iter() {
                    let late = Some((member, self.version));
                    next.push(World { writer: None, word: RowWord::ABANDONED.0, late, ..self });
                }
                if MemberSet(have).count() >= 2 {
                    for present in 1..4 {
                        next.push(World { writer: None, word: RowWord::closed(MemberSet(have), present).0, ..self });
                    }
                }
            }
            if let Some((member, version)) = self.late {
                let mut world = self;
                world.holds[member] = version;
                next.push(world);
                next.push(World { word: RowWord::SPENT.0, late: None, ..world });
            }
            for part in (0..2).filter(|part| word.is_closed() && word.live() & 1 << part != 0) {
                next.push(World { word: word.kill(part).0.0, ..self });
            }
            for member in 0..3 {
                if let Some(after) = word.suspect(member, 2, MemberSet(7)).filter(|_| self.suspicions_left > 0) {
                    next.push(World { word: after.0, suspicions_left: self.suspicions_left - 1, ..self });
                }
                if let Some(after) = word.claim(member) {
                    next.push(World { word: after.0, mender: Some((member, self.version, false)), ..self });
                }
            }
            if let Some(word) = word.watch() {
                next.push(World { word: word.0, watcher: Some(self.version), ..self });
            }
            if self.watcher.is_some() {
                next.push(World { word: word.unwatch().0.0, watcher: None, ..self });
            }
            if let Some((member, version, has_landed)) = self.mender {
                let mut world = World { mender: Some((member, version, true)), ..self };
                world.holds[member] = version;
                next.push(world);
                next.push(World { word: word.finish(member, has_landed).0.0, mender: None, ..self });
            }
            next
        }

        fn check(&self) {
            let word = RowWord(self.word);
            assert!(self.writer.is_none() || !word.is_closed(), "a row that can be read is written: {self:?}");
            for member in word.have().iter() {
                assert_eq!(self.holds[member], self.version, "{self:?}");
            }
            let is_kept = |version| word.is_closed() && version == self.version && self.mender.is_none();
            assert!(self.watcher.is_none_or(is_kept), "it changes while somebody looks: {self:?}");
            if word.is_closed() {
                assert!(word.live() & !word.present() == 0 && word.have().count() >= 2);
                assert!(word.live() != 0 || word.is_claimed(), "spent, and nobody knows: {self:?}");
            }
        }
    }

    #[test]
    fn shards_of_a_lost_member_are_forgotten_and_can_be_rebuilt() {
        let word = RowWord::closed(MemberSet(0b011), 0b01);
        let forgotten = word.forget(1).unwrap();
        assert_eq!((forgotten.have(), forgotten.live(), forgotten.present()), (MemberSet(0b001), 0b01, 0b01));
        assert!(
            forgotten.forget(1).is_none() && RowWord::SPENT.forget(1).is_none() && RowWord::CLEAN.forget(1).is_none()
        );
        assert_eq!(forgotten.claim(1).unwrap().finish(1, true), (word, false));
        let repaired = word.claim(2).unwrap().forget(1).unwrap();
        assert_eq!(repaired.finish(2, true).0.have(), MemberSet(0b101), "whoever mends another leg goes on");
    }

    #[test]
    fn members_counted_as_holders_hold_the_last_version() {
        let start = World {
            word: 0,
            version: 0,
            holds: [0; 3],
            writer: None,
            mender: None,
            watcher: None,
            suspicions_left: 2,
            late: None,
        };
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(world) = open.pop() {
            if seen.insert(world) {
                world.check();
                open.extend(world.next());
            }
        }
        assert!(seen.len() > 1000, "{}", seen.len());
        assert!(seen.iter().any(|world| world.version == 3 && RowWord(world.word).have() == MemberSet::first(3)));
    }
}
