//! The chunk word: which members of a mirror hold the right bytes of a chunk of pages, as one
//! atomic 32-bit word.
//!
//! ```text
//!  31        18   17        16       15           0
//! +------------+---------+---------+--------------+
//! | writers    | watched | touched | 8 members × 2|
//! +------------+---------+---------+--------------+
//! ```
//!
//! A member is Valid, or Stale → Copying → Valid. A write that begins meanwhile turns Copying into
//! Spoiled, and the copier then ends it as Stale. A copy begins only while no write is under way,
//! so no member becomes Valid while a write is. When a write ends, Valid members that do not have
//! it become Stale. While a chunk was never written (not touched), every member holds zeros. A
//! thread that compares what members hold *watches* the chunk: as long as the mark is set no write
//! has begun, so all Valid members hold equal bytes.
//!
//! Every transition is a pure function on a copy; the owner of the atomic runs the
//! compare-exchange.

use crate::MemberSet;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Holds the newest bytes.
    Valid = 0,
    /// Lacks the newest bytes.
    Stale = 1,
    /// A copy of the chunk to this member is under way.
    Copying = 2,
    /// A copy is under way in vain, because a write began meanwhile.
    Spoiled = 3,
}

/// Word of one chunk: the state of each member, two flags, and the number of writes under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ChunkWord(pub u32);

const TOUCHED: u32 = 1 << 16;
const WATCHED: u32 = 1 << 17;
const WRITER_ONE: u32 = 1 << 18;
const WRITERS_MAX: u32 = u32::MAX / WRITER_ONE;

impl ChunkWord {
    /// Greatest number of members of a mirror, spares counted.
    pub const MEMBERS_MAX: usize = 8;

    /// Creates the word of a new mirror: the `spares` are not in use, so no write reaches them, and
    /// they are Stale.
    pub fn fresh(spares: MemberSet) -> ChunkWord {
        spares.iter().fold(ChunkWord(0), |word, member| word.with(member, State::Stale))
    }

    /// Creates the word of a chunk of a snapshot: all members hold equal bytes, which may not be
    /// zeros.
    pub fn inherited() -> ChunkWord {
        ChunkWord(TOUCHED)
    }

    fn state(self, member: usize) -> State {
        match self.0 >> (2 * member) & 3 {
            0 => State::Valid,
            1 => State::Stale,
            2 => State::Copying,
            _ => State::Spoiled,
        }
    }

    fn with(self, member: usize, state: State) -> ChunkWord {
        ChunkWord(self.0 & !(3 << (2 * member)) | (state as u32) << (2 * member))
    }

    fn is(self, state: State) -> MemberSet {
        (0..Self::MEMBERS_MAX).filter(|&member| self.state(member) == state).collect()
    }

    fn writers(self) -> u32 {
        self.0 / WRITER_ONE
    }

    /// Checks whether the chunk was ever written.
    pub fn is_touched(self) -> bool {
        self.0 & TOUCHED != 0
    }

    /// Returns the members that can be read.
    pub fn valid(self) -> MemberSet {
        self.is(State::Valid)
    }

    /// Returns those of `members` that a copy would help: the Stale ones, if the chunk was ever
    /// written.
    pub fn stale(self, members: MemberSet) -> MemberSet {
        if self.is_touched() { self.is(State::Stale).intersection(members) } else { MemberSet(0) }
    }

    /// Checks whether a copy that was claimed for `member` is still worth finishing: no write
    /// spoiled it.
    pub fn is_copying(self, member: usize) -> bool {
        self.state(member) == State::Copying
    }

    /// Begins a write to all `active` members. `None`: too many writes are under way.
    pub fn begin_write(self, active: MemberSet) -> Option<ChunkWord> {
        if self.writers() == WRITERS_MAX {
            return None;
        }
        let mut word = ChunkWord(self.0 & !WATCHED);
        for member in self.is(State::Copying).iter() {
            word = word.with(member, State::Spoiled);
        }
        if !self.is_touched() {
            for member in active.iter() {
                word = word.with(member, State::Valid);
            }
        }
        Some(ChunkWord((word.0 | TOUCHED) + WRITER_ONE))
    }

    /// Ends a write that the members `have` hold now and the others of `all` do not. `false`: no
    /// member that can be read holds it. Then the write has failed, and the pages hold either of
    /// the two versions.
    pub fn end_write(self, have: MemberSet, all: MemberSet) -> (ChunkWord, bool) {
        assert!(self.writers() > 0);
        let mut word = ChunkWord(self.0 - WRITER_ONE);
        let kept = !have.intersection(self.valid()).is_empty();
        if kept {
            for member in self.valid().intersection(all).difference(have).iter() {
                word = word.with(member, State::Stale);
            }
        }
        (word, kept)
    }

    /// Ends a failed write of a mirror whose `leader` has not got it. All other members of `all`
    /// become Stale, whether they have the write or not.
    pub fn fail_write(self, authoritative: usize, all: MemberSet) -> ChunkWord {
        assert!(self.valid().has(authoritative));
        self.end_write(MemberSet::one(authoritative), all).0
    }

    /// Marks the chunk as written, after a write that was not noted; the states of the members stay
    /// as they were.
    pub fn touch(self) -> ChunkWord {
        ChunkWord(self.0 | TOUCHED)
    }

    /// Marks `member` as Stale because it has failed and will be replaced by a server that holds
    /// nothing. No copy to `member` may be under way.
    pub fn forget(self, member: usize) -> ChunkWord {
        self.with(member, State::Stale)
    }

    /// Sets the watched mark, before the bytes that members hold are compared. Only one thread may
    /// watch the chunk at a time. `None`: not possible now.
    pub fn watch(self) -> Option<ChunkWord> {
        (self.is_touched() && self.writers() == 0).then_some(ChunkWord(self.0 | WATCHED))
    }

    /// Checks whether no write has begun since [`ChunkWord::watch`].
    pub fn is_watched(self) -> bool {
        self.0 & WATCHED != 0
    }

    /// Clears the watched mark.
    pub fn unwatch(self) -> ChunkWord {
        ChunkWord(self.0 & !WATCHED)
    }

    /// Marks `member` as Stale because wrong bytes were found there. `None`: it is the only member
    /// of `active` that can be read, or it cannot be read any more.
    pub fn suspect(self, member: usize, active: MemberSet) -> Option<ChunkWord> {
        let others = self.valid().intersection(active).difference(MemberSet::one(member));
        (self.valid().has(member) && !others.is_empty()).then(|| self.with(member, State::Stale))
    }

    /// Claims a copy of the chunk to `member`; returns the members from which it may be copied.
    /// `None`: not possible now.
    pub fn claim(self, member: usize, active: MemberSet) -> Option<(ChunkWord, MemberSet)> {
        let sources = self.valid().intersection(active);
        let may = self.writers() == 0 && self.is_touched() && self.state(member) == State::Stale && !sources.is_empty();
        may.then(|| (self.with(member, State::Copying), sources))
    }

    /// Ends a claimed copy, `copied` or given up. Nothing of the copy may be under way any more.
    pub fn finish(self, member: usize, copied: bool) -> ChunkWord {
        let state = self.state(member);
        assert!(matches!(state, State::Copying | State::Spoiled));
        self.with(member, if copied && state == State::Copying { State::Valid } else { State::Stale })
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a member that is read and holds an old version, whatever the order in which writes,
    //! copies and deaths happen.
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;
    use alloc::vec::Vec;

    /// Two members and a spare, one page, its versions, and everything that is under way.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct World {
        word: u32,
        holds: [u8; 3],
        /// The last version whose write ended well.
        written: u8,
        /// A version whose write failed: members that could be read may or may not hold it.
        failed: Option<u8>,
        /// Version and targets of the write under way, and the members that have it.
        writer: Option<(u8, u16, u16)>,
        /// A write that ended and may still land at a member.
        late: Option<(usize, u8)>,
        /// Who copies to which member, and what was read.
        copier: Option<(usize, Option<u8>)>,
        /// Members that are compared.
        watcher: Option<u16>,
        active: u16,
        lost: u16,
        writes_left: u8,
        suspicions_left: u8,
    }

    const ALL: MemberSet = MemberSet(7);

    impl World {
        fn new() -> World {
            World {
                word: ChunkWord::fresh(MemberSet(4)).0,
                holds: [0; 3],
                written: 0,
                failed: None,
                writer: None,
                late: None,
                copier: None,
                watcher: None,
                active: 3,
                lost: 0,
                writes_left: 3,
                suspicions_left: 1,
            }
        }

        fn next(self) -> Vec<World> {
            let mut next = vec![];
            let (word, active) = (ChunkWord(self.word), MemberSet(self.active));
            if self.writer.is_none()
                && self.writes_left > 0
                && let Some(word) = word.begin_write(active)
            {
                let writer = Some((4 - self.writes_left, self.active, 0));
                next.push(World { word: word.0, writer, writes_left: self.writes_left - 1, ..self });
            }
            if let Some((version, targets, have)) = self.writer {
                for member in MemberSet(targets).difference(MemberSet(have)).iter() {
                    let mut world = World { writer: Some((version, targets, have | 1 << member)), ..self };
                    world.holds[member] = version;
                    next.push(world);
                }
                let (after, kept) = word.end_write(MemberSet(have), ALL);
                let (written, failed) = if kept { (version, None) } else { (self.written, Some(version)) };
                let ended = World { word: after.0, writer: None, written, failed, ..self };
                next.push(ended);
                for member in MemberSet(targets).difference(MemberSet(have)).iter() {
                    // Not answered: nobody copies there before it is. (With nobody who has it, it is a failed write.)
                    if self.late.is_none() && kept {
                        next.push(World {
                            late: Some((member, version)),
                            active: self.active & !(1 << member),
                            ..ended
                        });
                    }
                }
            }
            if let Some((member, version)) = self.late {
                let mut world = World { late: None, active: self.active | 1 << member & !self.lost, ..self };
                world.holds[member] = version;
                next.push(world);
            }
            match self.copier {
                None => {
                    for member in active.iter().filter(|&member| self.late.is_none_or(|(late, _)| late != member)) {
                        if let Some((word, _)) = word.claim(member, active) {
                            next.push(World { word: word.0, copier: Some((member, None)), ..self });
                        }
                    }
                }
                Some((member, None)) => {
                    for source in word.valid().intersection(active).iter() {
                        next.push(World { copier: Some((member, Some(self.holds[source]))), ..self });
                    }
                    next.push(World { word: word.finish(member, false).0, copier: None, ..self });
                }
                Some((member, Some(version))) => {
                    let mut world = World { word: word.finish(member, true).0, copier: None, ..self };
                    world.holds[member] = version;
                    next.push(world);
                    // It lands, and somebody else goes on before the copy is finished.
                    if self.holds[member] != version {
                        let mut world = self;
                        world.holds[member] = version;
                        next.push(world);
                    }
                }
            }
            if self.lost == 0 {
                for member in 0..2 {
                    // A member has failed, and the spare comes in.
                    next.push(World { lost: 1 << member, active: self.active & !(1 << member) | 4, ..self });
                }
            }
            match self.watcher {
                None => next.extend(word.watch().map(|word| World {
                    word: word.0,
                    watcher: Some(word.valid().intersection(active).0),
                    ..self
                })),
                Some(_) => next.push(World { word: word.unwatch().0, watcher: None, ..self }),
            }
            if self.suspicions_left > 0 {
                for member in 0..3 {
                    if let Some(word) = word.suspect(member, active) {
                        next.push(World { word: word.0, suspicions_left: 0, ..self });
                    }
                }
            }
            next
        }

        fn check(&self) {
            let readable = ChunkWord(self.word).valid().intersection(MemberSet(self.active));
            for member in readable.iter() {
                let holds = self.holds[member];
                let under_way = self.writer.is_some_and(|(version, ..)| version == holds);
                assert!(holds == self.written || under_way || self.failed == Some(holds), "{self:?}");
            }
            if let Some(compared) = self.watcher.filter(|_| ChunkWord(self.word).is_watched() && self.failed.is_none())
            {
                assert!(
                    MemberSet(compared).iter().all(|member| self.holds[member] == self.written),
                    "they differ: {self:?}"
                );
            }
            // As long as no member is lagging, one of two members that did not die is enough.
            if self.lost == 0 && self.late.is_none() && self.active & 3 == 3 {
                assert!(!readable.is_empty(), "nobody can be read: {self:?}");
            }
        }
    }

    #[test]
    fn readable_members_hold_the_last_write() {
        let (mut seen, mut open) = (BTreeSet::new(), vec![World::new()]);
        while let Some(world) = open.pop() {
            if seen.insert(world) {
                world.check();
                open.extend(world.next());
            }
        }
        assert!(seen.len() > 10_000, "{}", seen.len());
        let repaired =
            |world: &&World| world.lost != 0 && ChunkWord(world.word).valid().has(2) && world.writes_left < 2;
        assert!(seen.iter().any(|world| repaired(&world)), "a spare is filled");
    }

    #[test]
    fn writers_are_counted_up_to_a_limit() {
        let mut word = ChunkWord::inherited();
        let mut begun = 0;
        while let Some(next) = word.begin_write(ALL) {
            (word, begun) = (next, begun + 1);
        }
        assert_eq!(begun, WRITERS_MAX);
        for _ in 0..begun {
            word = word.end_write(ALL, ALL).0;
        }
        assert_eq!(word, ChunkWord::inherited());
    }

    #[test]
    fn a_leg_that_leads_decides() {
        let both = ChunkWord::inherited().begin_write(ALL).expect("room");
        let failed = both.fail_write(0, ALL);
        let behind = MemberSet::first(ChunkWord::MEMBERS_MAX).difference(ALL).union(MemberSet::one(0));
        assert_eq!((failed.valid(), failed.writers()), (behind, 0), "the others are behind");
        let spare = ChunkWord::fresh(MemberSet::one(1));
        assert!(!spare.is_touched() && spare.touch().is_touched());
        assert_eq!(spare.touch().stale(ALL), MemberSet::one(1), "touched by somebody else, it is to be copied");
        assert_eq!(spare.touch().valid(), spare.valid());
    }

    #[test]
    fn the_last_leg_is_never_suspected_away() {
        let word = ChunkWord::inherited().suspect(0, MemberSet(3)).expect("there is another");
        assert_eq!(word.suspect(1, MemberSet(3)), None);
        assert_eq!(word.suspect(0, MemberSet(3)), None, "it is stale already");
    }
}
