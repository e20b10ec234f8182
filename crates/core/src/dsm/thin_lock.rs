//! Thin lock: a lock that is kept in one word as long as only tasks of its home are concerned, and none of them waits.
//!
//! After the thin locks of Bacon et al. (PLDI 1998). A free lock is taken, and given back, by one compare-exchange of
//! a word beside its value. It is *inflated* as soon as somebody has to wait, comes from another node, leaves it, or
//! drops it. Then a [`LockLine`](super::LockLine) at the home says who has it, until nobody has it and nobody waits.

use super::Colour;
use crate::cast::low_u16;
use crate::lock::LockMode;

const COLOUR_SHIFT: u32 = 16;
const STATE_MASK: u32 = (1 << COLOUR_SHIFT) - 1;
/// The block has no lock that may be thin.
const NONE: u32 = 0;
/// A line says who has the lock.
const INFLATED: u32 = 1;
const FREE: u32 = 2;
const WRITTEN: u32 = 3;
/// State before that of one reader. Each reader more is one more.
const READ: u32 = WRITTEN;

/// Word of a lock: the colour of its object (16 bits), and its state (16).
///
/// The colour of a lock never changes, and no two objects of a block have the same. So a word of an object that is gone
/// never takes a later lock.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ThinLock(u32);

impl ThinLock {
    /// Word of a block without a thin lock.
    pub const NONE: ThinLock = ThinLock(NONE);
    /// Most readers of a thin lock.
    pub const READERS_MAX: u16 = low_u16((STATE_MASK - READ) as u64);

    /// Word of a free lock, whose object has this colour.
    #[inline]
    pub fn free(colour: Colour) -> ThinLock {
        ThinLock::of(colour, FREE)
    }

    /// Reads the bits of a word. Whatever they are, they are one.
    #[inline]
    pub fn from_bits(bits: u32) -> ThinLock {
        ThinLock(bits)
    }

    /// Returns the bits of the word.
    #[inline]
    pub fn bits(self) -> u32 {
        self.0
    }

    #[inline]
    fn of(colour: Colour, state: u32) -> ThinLock {
        ThinLock((colour.0 as u32) << COLOUR_SHIFT | state)
    }

    #[inline]
    fn state(self) -> u32 {
        self.0 & STATE_MASK
    }

    #[inline]
    fn with(self, state: u32) -> ThinLock {
        ThinLock(self.0 & !STATE_MASK | state)
    }

    #[inline]
    fn is_of(self, colour: Colour) -> bool {
        self.0 >> COLOUR_SHIFT == colour.0 as u32
    }

    /// Takes the lock of the object with this colour. Returns `None` if it is not free for this mode, or not thin.
    #[inline]
    pub fn take(self, colour: Colour, mode: LockMode) -> Option<ThinLock> {
        let next = match (self.state(), mode) {
            (FREE, LockMode::Exclusive) => WRITTEN,
            (FREE, LockMode::Shared) => READ + 1,
            (state, LockMode::Shared) if state > READ && state < STATE_MASK => state + 1,
            _ => return None,
        };
        self.is_of(colour).then(|| self.with(next))
    }

    /// Gives the lock back for one who has taken it in this mode. Returns `None` if it was inflated since.
    #[inline]
    pub fn release(self, mode: LockMode) -> Option<ThinLock> {
        let next = match (self.state(), mode) {
            (WRITTEN, LockMode::Exclusive) => FREE,
            (state, LockMode::Shared) if state == READ + 1 => FREE,
            (state, LockMode::Shared) if state > READ + 1 => state - 1,
            _ => return None,
        };
        Some(self.with(next))
    }

    /// Inflates the lock of the object with this colour. Returns `None` if it is inflated, or not thin.
    pub fn inflate(self, colour: Colour) -> Option<ThinLock> {
        (self.is_of(colour) && self.state() >= FREE).then(|| self.with(INFLATED))
    }

    /// Returns how many have the lock while it is thin, and in which mode.
    pub fn holders(self) -> (u16, LockMode) {
        match self.state() {
            WRITTEN => (1, LockMode::Exclusive),
            state if state > READ => (low_u16(u64::from(state - READ)), LockMode::Shared),
            _ => (0, LockMode::Shared),
        }
    }

    /// Makes the lock of the object with this colour thin and free again, after its line was idle. Returns `None` if it
    /// was not inflated.
    pub fn deflate(self, colour: Colour) -> Option<ThinLock> {
        (self == ThinLock::of(colour, INFLATED)).then(|| self.with(FREE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsm::{HomeTicket, LockLine};
    use alloc::collections::BTreeSet;
    use alloc::format;
    use alloc::vec::Vec;

    const COLOUR: Colour = Colour(7);
    const MODES: [LockMode; 2] = [LockMode::Shared, LockMode::Exclusive];
    /// Ticket in the line of all who have taken the lock while it was thin.
    const THIN: HomeTicket = HomeTicket { node: 0, number: 0 };

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum User {
        Idle,
        HoldsThin(LockMode),
        Holds(LockMode),
        Waits(LockMode),
    }

    /// Rule that a home does not keep.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Missing {
        Nothing,
        /// Whoever is in the line is not told who has the lock already.
        Holders,
        /// The lock is thin again only when nobody has it.
        Idleness,
        /// Whoever gives a lock back looks whether it was inflated.
        Release,
    }

    /// A lock, its home, and tasks that use it.
    #[derive(Clone, Debug)]
    struct Home {
        word: ThinLock,
        line: Option<LockLine>,
        users: [User; 3],
    }

    fn ticket(user: usize) -> HomeTicket {
        HomeTicket { node: user as u16, number: 1 + user as u64 }
    }

    impl Home {
        fn new() -> Home {
            Home { word: ThinLock::free(COLOUR), line: None, users: [User::Idle; 3] }
        }

        fn ask(&mut self, user: usize, mode: LockMode, missing: Missing) {
            if let Some(inflated) = self.word.inflate(COLOUR) {
                let (count, held) = if missing == Missing::Holders { (0, mode) } else { self.word.holders() };
                self.line = Some(LockLine::held_by((0..count).map(|_| (THIN, held))));
                self.word = inflated;
            }
            let is_granted = self.line.as_mut().unwrap().ask(ticket(user), mode);
            self.users[user] = if is_granted { User::Holds(mode) } else { User::Waits(mode) };
        }

        fn leave(&mut self, user: usize, of: HomeTicket, missing: Missing) {
            self.users[user] = User::Idle;
            let Some(line) = &mut self.line else { return };
            for turn in line.leave(of) {
                let user = usize::from(turn.node);
                let User::Waits(mode) = self.users[user] else { panic!("{user} does not wait") };
                self.users[user] = User::Holds(mode);
            }
            if line.is_idle() || (missing == Missing::Idleness && line.waiters() == 0) {
                self.line = None;
                self.word = self.word.deflate(COLOUR).unwrap();
            }
        }

        /// Returns the homes after each step that a task may do.
        fn steps(&self, missing: Missing) -> Vec<Home> {
            let mut homes = Vec::new();
            for (user, state) in self.users.iter().enumerate() {
                match *state {
                    User::Idle => {
                        for mode in MODES {
                            if let Some(word) = self.word.take(COLOUR, mode) {
                                let mut home = Home { word, ..self.clone() };
                                home.users[user] = User::HoldsThin(mode);
                                homes.push(home);
                            }
                            // A task of another node, or one that waits.
                            let mut home = self.clone();
                            home.ask(user, mode, missing);
                            homes.push(home);
                        }
                    }
                    User::HoldsThin(mode) => {
                        let mut home = self.clone();
                        match self.word.release(mode) {
                            Some(word) => (home.word, home.users[user]) = (word, User::Idle),
                            None if missing == Missing::Release => {
                                (home.word, home.users[user]) = (ThinLock::free(COLOUR), User::Idle);
                            }
                            None => home.leave(user, THIN, missing),
                        }
                        homes.push(home);
                        // It panics: whoever comes next learns that from the table.
                        let mut home = self.clone();
                        if let Some(inflated) = self.word.inflate(COLOUR) {
                            let (count, held) = self.word.holders();
                            home.line = Some(LockLine::held_by((0..count).map(|_| (THIN, held))));
                            home.word = inflated;
                        }
                        home.leave(user, THIN, missing);
                        homes.push(home);
                    }
                    User::Holds(_) | User::Waits(_) => {
                        let mut home = self.clone();
                        home.leave(user, ticket(user), missing);
                        homes.push(home);
                    }
                }
            }
            homes
        }

        /// Returns which promise is broken.
        fn fault(&self) -> Option<&'static str> {
            let count = |is_meant: fn(&User) -> bool| self.users.iter().filter(|user| is_meant(user)).count();
            let writes =
                |user: &User| matches!(user, User::Holds(LockMode::Exclusive) | User::HoldsThin(LockMode::Exclusive));
            let holders = count(|user| matches!(user, User::Holds(_) | User::HoldsThin(_)));
            let waiting = count(|user| matches!(user, User::Waits(_)));
            if count(writes) > 0 && holders > 1 {
                return Some("a writer is not alone");
            }
            if waiting > 0 && (holders == 0 || self.line.as_ref().is_none_or(|line| line.waiters() != waiting)) {
                return Some("somebody waits for ever");
            }
            if waiting > 0 && MODES.iter().any(|mode| self.word.take(COLOUR, *mode).is_some()) {
                return Some("somebody overtakes");
            }
            let known = self.line.as_ref().map_or(usize::from(self.word.holders().0), |line| line.holders().count());
            if known != holders {
                return Some("the home does not know who has it");
            }
            (holders == 0 && self.word != ThinLock::free(COLOUR)).then_some("it stays inflated")
        }
    }

    /// Tries all steps of three tasks, and returns the first broken promise.
    fn explore(missing: Missing) -> Option<&'static str> {
        let (mut seen, mut left) = (BTreeSet::new(), Vec::from([Home::new()]));
        while let Some(home) = left.pop() {
            if let Some(fault) = home.fault() {
                return Some(fault);
            }
            if seen.insert(format!("{home:?}")) {
                left.extend(home.steps(missing));
            }
        }
        assert!(seen.len() > 100, "{}", seen.len());
        None
    }

    #[test]
    fn a_lock_keeps_its_promises_in_all_orders_of_steps() {
        assert_eq!(explore(Missing::Nothing), None);
    }

    #[test]
    fn each_rule_is_needed() {
        for missing in [Missing::Holders, Missing::Idleness, Missing::Release] {
            assert!(explore(missing).is_some(), "{missing:?}");
        }
    }

    #[test]
    fn each_word_has_the_steps_of_its_state_only() {
        for state in 0..=STATE_MASK {
            let word = ThinLock::of(COLOUR, state);
            assert_eq!(ThinLock::from_bits(word.bits()), word);
            let (count, held) = word.holders();
            for mode in MODES {
                let taken = word.take(COLOUR, mode);
                let is_free = state >= FREE && (count == 0 || (mode, held) == (LockMode::Shared, LockMode::Shared));
                assert_eq!(taken.is_some(), is_free && count < ThinLock::READERS_MAX, "{state} {mode:?}");
                if let Some(taken) = taken {
                    assert_eq!(taken.holders(), (count + 1, mode));
                    assert_eq!(taken.release(mode), Some(word));
                    assert!(taken.is_of(COLOUR));
                }
                assert_eq!(word.release(mode).is_some(), count > 0 && mode == held, "{state} {mode:?}");
                // A word of an object that was in the block before.
                assert_eq!(word.take(Colour(6), mode), None);
            }
            assert_eq!(word.inflate(COLOUR).is_some(), state >= FREE);
            assert_eq!((word.inflate(Colour(8)), word.deflate(Colour(8))), (None, None));
            let inflated = word.inflate(COLOUR).unwrap_or(word);
            assert_eq!((inflated.holders().0, inflated.inflate(COLOUR)), (0, None));
            assert_eq!(inflated.deflate(COLOUR), (state != NONE).then(|| ThinLock::free(COLOUR)));
        }
        assert_eq!(ThinLock::NONE.deflate(Colour(0)), None, "a block without a lock stays one");
    }
}
