//! The tier word: where a page of a tiered pool is, as one atomic 64-bit word.
//!
//! ```text
//!  63          32     27     20  18    17      16    15     12  11      4 3    0
//! +--------------+---+---------+-----+-------+------+---------+----------+------+
//! | generation   | 0 | writers |young|spoiled|moving| claimed | copies   | at   |
//! +--------------+---+---------+-----+-------+------+---------+----------+------+
//! ```
//!
//! *at* is the tier that has the newest version, if the page is not zeros; *copies* are tiers that
//! may have bytes of it, old ones too. The *generation* changes whenever the bytes that count
//! change, or come to lie elsewhere. A reader that finds the same generation after a read as before
//! it has read the page as it was.
//!
//! A thread that moves a page, or gives back an old copy, *claims* it first, with the tier whose
//! bytes change. Then nobody else writes there until the claim ends. A claim is taken only while
//! nobody writes the page. A write that meets a claim goes to another tier, so no writer waits for
//! a move. Such a write *spoils* the move, which then changes nothing but a copy that does not
//! count. A claim whose end is unknown (no answer came) is never given back, and a write whose end
//! is unknown never ends.
//!
//! Every transition is a pure function on a copy; the owner of the atomic runs the
//! compare-exchange.

use crate::MemberSet;
use crate::cast::{low_u16, usize_of};

/// Word of one page of a tiered pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierWord(pub u64);

const COPIES: u32 = 4;
const CLAIMED: u32 = 12;
const NIBBLE: u64 = 15;
const MOVING: u64 = 1 << 16;
const SPOILED: u64 = 1 << 17;
const YOUNG: u64 = 1 << 18;
const WRITER_ONE: u64 = 1 << 20;
const WRITERS_MAX: u64 = 255;
const GENERATION_ONE: u64 = 1 << 32;

impl TierWord {
    /// Greatest number of tiers of one pool.
    pub const TIERS_MAX: usize = 8;

    /// Returns the tier that has the page; `None`: the page is zeros.
    pub fn at(self) -> Option<usize> {
        (self.0 & NIBBLE).checked_sub(1).map(usize_of)
    }

    fn with_at(self, tier: Option<usize>) -> TierWord {
        TierWord(self.0 & !NIBBLE | tier.map_or(0, |tier| tier as u64 + 1))
    }

    /// Returns the tiers that may have bytes of the page.
    pub fn copies(self) -> MemberSet {
        MemberSet(low_u16(self.0 >> COPIES) & 0xff)
    }

    fn with_copies(self, copies: MemberSet) -> TierWord {
        TierWord(self.0 & !(0xff << COPIES) | u64::from(copies.0) << COPIES)
    }

    /// Returns the tier whose bytes the holder of a claim changes.
    pub fn claimed(self) -> Option<usize> {
        (self.0 >> CLAIMED & NIBBLE).checked_sub(1).map(usize_of)
    }

    fn with_claim(self, tier: Option<usize>) -> TierWord {
        let claim = tier.map_or(0, |tier| tier as u64 + 1);
        TierWord(self.0 & !(NIBBLE << CLAIMED | MOVING | SPOILED) | claim << CLAIMED)
    }

    fn writers(self) -> u64 {
        self.0 / WRITER_ONE % (WRITERS_MAX + 1)
    }

    /// Returns the generation, which changes whenever the newest bytes change or come to lie
    /// elsewhere.
    pub fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn next_generation(self) -> TierWord {
        TierWord(self.0.wrapping_add(GENERATION_ONE))
    }

    fn spoiled(self) -> TierWord {
        if self.0 & MOVING == 0 { self } else { TierWord(self.0 | SPOILED) }
    }

    fn is_at(self, tier: usize) -> bool {
        self.at() == Some(tier)
    }

    /// Returns the tiers whose copy can be given back: it does not count, and nobody writes.
    pub fn garbage(self) -> MemberSet {
        if self.writers() > 0 {
            return MemberSet(0);
        }
        let kept = [self.at(), self.claimed()].into_iter().flatten();
        kept.fold(self.copies(), |garbage, tier| garbage.difference(MemberSet::one(tier)))
    }

    /// Begins a write to `tier`. `None`: not possible at this tier now.
    pub fn begin_write(self, tier: usize) -> Option<TierWord> {
        if self.claimed() == Some(tier) || self.writers() == WRITERS_MAX {
            return None;
        }
        let word = self.with_copies(self.copies().union(MemberSet::one(tier))).spoiled();
        Some(TierWord(word.0 + WRITER_ONE))
    }

    /// Ends a write. `written`: `tier` has the newest version now. If not, the page is where it
    /// was, and a write in its place may have changed it.
    pub fn end_write(self, tier: usize, written: bool) -> TierWord {
        assert!(self.writers() > 0 && self.copies().has(tier));
        let word = TierWord(self.0 - WRITER_ONE).next_generation();
        if written { TierWord(word.with_at(Some(tier)).0 | YOUNG) } else { word }
    }

    /// Makes the page zeros. `None`: it was zeros already.
    pub fn discard(self) -> Option<TierWord> {
        self.at().map(|_| self.with_at(None).spoiled().next_generation())
    }

    /// Claims the copy at `tier`, which is to be given back. `None`: not possible now.
    pub fn claim_sweep(self, tier: usize) -> Option<TierWord> {
        let may = self.claimed().is_none() && self.garbage().has(tier);
        may.then(|| self.with_claim(Some(tier)))
    }

    /// Ends a sweep, `swept` or given up. Nothing of it may be under way any more.
    pub fn finish_sweep(self, tier: usize, swept: bool) -> TierWord {
        assert!(self.claimed() == Some(tier) && !self.is_at(tier));
        let gone = if swept { MemberSet::one(tier) } else { MemberSet(0) };
        self.with_claim(None).with_copies(self.copies().difference(gone))
    }

    /// Clears the mark of a page that was written since the last call; `None` if it was not.
    pub fn age(self) -> Option<TierWord> {
        (self.0 & YOUNG != 0).then_some(TierWord(self.0 & !YOUNG))
    }

    /// Checks whether the page can be moved away from tier `from`.
    pub fn is_movable(self, from: usize) -> bool {
        self.is_at(from) && self.claimed().is_none() && self.writers() == 0
    }

    /// Claims the page for a copy from one tier to another. `None`: not possible now.
    pub fn claim_move(self, from: usize, to: usize) -> Option<TierWord> {
        assert!(from != to);
        let copies = self.copies().union(MemberSet::one(to));
        let may = self.is_movable(from);
        may.then(|| TierWord(self.with_claim(Some(to)).with_copies(copies).0 | MOVING))
    }

    /// Ends a move, `copied` or given up. Nothing of it may be under way any more. `true`: the page
    /// is at tier `to` now.
    pub fn finish_move(self, to: usize, copied: bool) -> (TierWord, bool) {
        assert!(self.claimed() == Some(to) && self.0 & MOVING != 0);
        let moves = copied && self.0 & SPOILED == 0;
        let word = self.with_claim(None);
        if moves { (word.with_at(Some(to)).next_generation(), true) } else { (word, false) }
    }

    /// Returns the word as it is in a snapshot, where nothing is under way. Claimed tiers still
    /// count as having a copy.
    pub fn settled(self) -> TierWord {
        TierWord(self.with_claim(None).0 & !(WRITERS_MAX * WRITER_ONE))
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a read that gives what nobody wrote or an older version, or bytes that nobody gives
    //! back, whatever the order of writes, reads, moves and discards.
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;
    use alloc::vec::Vec;

    const TIERS: usize = 2;
    /// Versions, one bit each; 0 is zeros.
    type Versions = u8;

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Writer {
        version: u8,
        tier: usize,
        has_landed: bool,
        /// What else was written while it was under way.
        beside: Versions,
    }

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Carer {
        Move {
            from: usize,
            to: usize,
            read: Option<u8>,
            has_landed: bool,
        },
        /// `is_late`: it may still land, and nobody waits for it any more.
        Sweep {
            tier: usize,
            has_landed: bool,
            is_late: bool,
        },
    }

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Reader {
        tier: usize,
        generation: u32,
        read: Option<u8>,
        /// What the page may have been since it began.
        right: Versions,
    }

    /// One page, and everything that is under way.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct World {
        word: u64,
        holds: [u8; TIERS],
        /// What a read may give now.
        right: Versions,
        writers: [Option<Writer>; 2],
        carer: Option<Carer>,
        reader: Option<Reader>,
        next_version: u8,
        discards_left: u8,
        carers_left: u8,
    }

    impl World {
        fn becomes(mut self, right: Versions) -> World {
            self.right = right;
            if let Some(reader) = &mut self.reader {
                reader.right |= right;
            }
            self
        }

        fn under_way(&self) -> Versions {
            self.writers.iter().flatten().fold(0, |versions, writer| versions | 1 << writer.version)
        }

        fn writes_begin(mut self, version: u8) -> World {
            for writer in self.writers.iter_mut().flatten() {
                writer.beside |= 1 << version;
            }
            if let Some(reader) = &mut self.reader {
                reader.right |= 1 << version;
            }
            self
        }

        fn next(self) -> Vec<World> {
            let (mut next, word) = (vec![], TierWord(self.word));
            for place in 0..self.writers.len() {
                match self.writers[place] {
                    None if self.next_version < 4 => {
                        for tier in 0..TIERS {
                            if let Some(word) = word.begin_write(tier) {
                                let version = self.next_version;
                                let beside = self.under_way();
                                let mut world = World { word: word.0, next_version: version + 1, ..self };
                                world = world.writes_begin(version);
                                world.writers[place] = Some(Writer { version, tier, has_landed: false, beside });
                                next.push(world);
                            }
                        }
                    }
                    None => {}
                    Some(writer) => {
                        let mut ended = World { word: word.end_write(writer.tier, writer.has_landed).0, ..self };
                        ended.writers[place] = None;
                        if writer.has_landed {
                            next.push(ended.becomes(1 << writer.version | writer.beside));
                        } else {
                            let mut landed = self;
                            landed.holds[writer.tier] = writer.version;
                            landed.writers[place] = Some(Writer { has_landed: true, ..writer });
                            next.push(landed);
                        }
                        // It fails, whether it has landed or not.
                        ended.word = word.end_write(writer.tier, false).0;
                        next.push(ended.becomes(self.right | 1 << writer.version));
                    }
                }
            }
            if self.discards_left > 0
                && let Some(word) = word.discard()
            {
                let mut world = World { word: word.0, discards_left: self.discards_left - 1, ..self };
                for writer in world.writers.iter_mut().flatten() {
                    writer.beside |= 1;
                }
                next.push(world.becomes(1 | self.under_way()));
            }
            match self.carer {
                None if self.carers_left > 0 => {
                    let carers_left = self.carers_left - 1;
                    for tier in 0..TIERS {
                        if let Some(word) = word.claim_sweep(tier) {
                            let carer = Some(Carer::Sweep { tier, has_landed: false, is_late: false });
                            next.push(World { word: word.0, carer, carers_left, ..self });
                        }
                        if let Some(word) = word.claim_move(tier, 1 - tier) {
                            let carer = Some(Carer::Move { from: tier, to: 1 - tier, read: None, has_landed: false });
                            next.push(World { word: word.0, carer, carers_left, ..self });
                        }
                    }
                }
                None => {}
                Some(Carer::Sweep { tier, has_landed, is_late }) => {
                    if !has_landed {
                        let mut world = self;
                        world.holds[tier] = 0;
                        world.carer = Some(Carer::Sweep { tier, has_landed: true, is_late });
                        next.push(world);
                        next.push(World { carer: Some(Carer::Sweep { tier, has_landed, is_late: true }), ..self });
                    }
                    if !is_late {
                        next.push(World { word: word.finish_sweep(tier, has_landed).0, carer: None, ..self });
                    }
                }
                Some(Carer::Move { from, to, read, has_landed }) => {
                    match read {
                        None => {
                            let carer = Some(Carer::Move { from, to, read: Some(self.holds[from]), has_landed });
                            next.push(World { carer, ..self });
                        }
                        Some(version) if !has_landed => {
                            let mut world = self;
                            world.holds[to] = version;
                            world.carer = Some(Carer::Move { from, to, read, has_landed: true });
                            next.push(world);
                        }
                        Some(_) => next.push(World { word: word.finish_move(to, true).0.0, carer: None, ..self }),
                    }
                    next.push(World { word: word.finish_move(to, false).0.0, carer: None, ..self });
                }
            }
            match self.reader {
                None => {
                    if let Some(tier) = word.at() {
                        let right = self.right | self.under_way();
                        let reader = Some(Reader { tier, generation: word.generation(), read: None, right });
                        next.push(World { reader, ..self });
                    }
                }
                Some(Reader { read: Some(_), .. }) => next.push(World { reader: None, ..self }),
                Some(reader) => {
                    let reader = Some(Reader { read: Some(self.holds[reader.tier]), ..reader });
                    next.push(World { reader, ..self });
                }
            }
            next
        }

        fn check(&self) {
            let word = TierWord(self.word);
            let now = word.at().map_or(0, |tier| self.holds[tier]);
            assert!((self.right | self.under_way()) & 1 << now != 0, "it reads as {now}: {self:?}");
            if let Some(Reader { generation, read: Some(read), right, .. }) = self.reader
                && generation == word.generation()
            {
                assert!(right & 1 << read != 0, "what was read is believed: {self:?}");
            }
            for tier in 0..TIERS {
                let is_noted = word.copies().has(tier) || word.claimed() == Some(tier);
                assert!(self.holds[tier] == 0 || is_noted, "nobody gives it back: {self:?}");
            }
            assert!(word.at().is_none_or(|tier| word.copies().has(tier)));
            assert!(!self.writers.iter().flatten().any(|writer| word.claimed() == Some(writer.tier)));
            // A page that nobody uses is one that can be written, and moved or swept.
            if self.writers == [None; 2] && self.carer.is_none() {
                assert!((0..TIERS).all(|tier| word.begin_write(tier).is_some()));
                assert!(word.at().is_none_or(|tier| word.claim_move(tier, 1 - tier).is_some()));
                assert_eq!(word.settled(), word);
            }
        }
    }

    #[test]
    fn reads_return_the_last_write() {
        let start = World {
            word: 0,
            holds: [0; TIERS],
            right: 1,
            writers: [None; 2],
            carer: None,
            reader: None,
            next_version: 1,
            discards_left: 1,
            carers_left: 2,
        };
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(world) = open.pop() {
            if seen.insert(world) {
                world.check();
                open.extend(world.next());
            }
        }
        assert!(seen.len() > 10_000, "{}", seen.len());
        let is_moved = |world: &World| {
            let word = TierWord(world.word);
            word.at() == Some(1)
                && word.copies() == MemberSet::one(1)
                && world.carers_left == 0
                && world.next_version == 2
        };
        assert!(seen.iter().any(is_moved), "a page is moved, and its old copy given back");
    }

    #[test]
    fn writers_are_counted_up_to_a_limit() {
        let mut word = TierWord::default();
        let mut begun = 0;
        while let Some(next) = word.begin_write(7) {
            (word, begun) = (next, begun + 1);
        }
        assert_eq!(begun, WRITERS_MAX);
        for _ in 0..begun {
            word = word.end_write(7, false);
        }
        assert_eq!((word.at(), word.garbage(), word.generation()), (None, MemberSet::one(7), begun as u32));
    }

    #[test]
    fn a_written_page_is_young_once() {
        let word = TierWord::default().begin_write(0).expect("room").end_write(0, true);
        let aged = word.age().expect("young");
        assert_eq!((aged.age(), aged.at()), (None, Some(0)));
        let (moved, is_moved) = aged.claim_move(0, 3).expect("free").finish_move(3, true);
        assert!(is_moved && moved.age().is_none());
        assert_eq!((moved.at(), moved.garbage()), (Some(3), MemberSet::one(0)));
    }
}
