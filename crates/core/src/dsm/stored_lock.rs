//! Lock as a backup keeps it: its value, and who holds it.
//!
//! The home of a lock records each change in a batch before anybody elsewhere can know of it. So whoever
//! takes the backup over knows every holder at another node, and the value that was released last. Waiters are
//! not recorded: they ask again, with the same ticket.

use super::{HomeTicket, MalformedBatch};
use crate::lock::LockMode;
use alloc::vec::Vec;

const WAS_LEFT: u64 = 1;
const IS_LOST: u64 = 1 << 1;
const OWNS_OTHERS: u64 = 1 << 2;
const FLAGS: u64 = WAS_LEFT | IS_LOST | OWNS_OTHERS;
/// Position of the number of holders, beside the flags.
const HOLDERS_SHIFT: u32 = 32;
/// Mode of a holder that writes, beside the number of its node.
const EXCLUSIVE: u64 = 1 << 16;

/// State of a lock for whoever keeps it after its home.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct StoredLock {
    /// Value as it was released last.
    pub value: Vec<u8>,
    /// Nodes that hold the lock. Readers at the home are among them only if one of them has lent what the value
    /// owns.
    pub holders: Vec<(HomeTicket, LockMode)>,
    /// Whether the last writer panicked, or was gone before it gave the lock back.
    pub was_left: bool,
    /// Whether a writer is gone that may have dropped or handed on what the value owns.
    pub is_lost: bool,
    /// Whether the value may own objects.
    pub owns_others: bool,
}

impl StoredLock {
    /// Returns whether somebody may write to the value now, or to what it owns.
    pub fn is_written(&self) -> bool {
        self.holders.iter().any(|(_, mode)| *mode == LockMode::Exclusive)
    }

    /// Returns the lock without its holders at nodes that are gone. A writer among these has left the value
    /// as it was released last; if that may own objects, it is lost. If it is not, readers may have lent these
    /// objects further, so they hold the lock until nobody has borrowed them any more ([`StoredLock::lenders`]).
    #[must_use]
    pub fn without(mut self, is_gone: impl Fn(u16) -> bool) -> StoredLock {
        for (ticket, mode) in core::mem::take(&mut self.holders) {
            let is_lender = mode == LockMode::Shared && self.owns_others;
            if !is_gone(ticket.node) || is_lender {
                self.holders.push((ticket, mode));
            } else if mode == LockMode::Exclusive {
                self.was_left = true;
                self.is_lost |= self.owns_others;
            }
        }
        self
    }

    /// Returns the readers at nodes that are gone, if the value may own objects.
    pub fn lenders(&self, is_gone: impl Fn(u16) -> bool) -> Vec<HomeTicket> {
        let gone = self
            .holders
            .iter()
            .filter(|(ticket, mode)| self.owns_others && *mode == LockMode::Shared && is_gone(ticket.node));
        gone.map(|(ticket, _)| *ticket).collect()
    }

    /// Returns the bytes of the lock in a batch: flags and number of holders, the holders, and the value.
    pub fn encode(&self) -> Vec<u8> {
        let flag = |is_set: bool, bit| if is_set { bit } else { 0 };
        let flags = flag(self.was_left, WAS_LEFT) | flag(self.is_lost, IS_LOST) | flag(self.owns_others, OWNS_OTHERS);
        let mut bytes = (flags | (self.holders.len() as u64) << HOLDERS_SHIFT).to_le_bytes().to_vec();
        for (ticket, mode) in &self.holders {
            let mode = flag(*mode == LockMode::Exclusive, EXCLUSIVE);
            bytes.extend_from_slice(&ticket.number.to_le_bytes());
            bytes.extend_from_slice(&(u64::from(ticket.node) | mode).to_le_bytes());
        }
        bytes.extend_from_slice(&self.value);
        bytes
    }

    /// Reads the bytes of a lock. Fails on what [`StoredLock::encode`] does not write.
    pub fn decode(mut bytes: &[u8]) -> Result<StoredLock, MalformedBatch> {
        let head = super::backup::take_u64(&mut bytes)?;
        let (flags, count) = (head & ((1 << HOLDERS_SHIFT) - 1), head >> HOLDERS_SHIFT);
        if flags & !FLAGS != 0 {
            return Err(MalformedBatch);
        }
        let mut holders = Vec::new();
        for _ in 0..count {
            let (number, of) = (super::backup::take_u64(&mut bytes)?, super::backup::take_u64(&mut bytes)?);
            let node = u16::try_from(of & !EXCLUSIVE).map_err(|_| MalformedBatch)?;
            let mode = if of & EXCLUSIVE == 0 { LockMode::Shared } else { LockMode::Exclusive };
            holders.push((HomeTicket { node, number }, mode));
        }
        let lock = StoredLock {
            value: bytes.to_vec(),
            holders,
            was_left: flags & WAS_LEFT != 0,
            is_lost: flags & IS_LOST != 0,
            owns_others: flags & OWNS_OTHERS != 0,
        };
        // A writer is alone.
        if lock.is_written() && lock.holders.len() > 1 { Err(MalformedBatch) } else { Ok(lock) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsm::LockLine;
    use alloc::vec;

    #[test]
    fn a_lock_is_read_as_it_was_written_and_nothing_else_is_read() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..20_000 {
            let mode = if random.bool() { LockMode::Exclusive } else { LockMode::Shared };
            let most = if mode == LockMode::Exclusive { 2 } else { 4 };
            let holders = (0..random.usize(..most)).map(|_| {
                let ticket = HomeTicket { node: random.u16(..), number: random.u64(..) };
                (ticket, mode)
            });
            let holders = holders.collect();
            let value = (0..random.usize(..40)).map(|_| random.u8(..)).collect();
            let [was_left, is_lost, owns_others] = [random.bool(), random.bool(), random.bool()];
            let lock = StoredLock { value, holders, was_left, is_lost, owns_others };
            let mut bytes = lock.encode();
            assert_eq!(StoredLock::decode(&bytes), Ok(lock));
            // What a decoder accepts is what the encoder makes of it.
            match random.u8(..3) {
                0 => bytes.truncate(random.usize(..bytes.len())),
                1 => bytes = (0..random.usize(..64)).map(|_| random.u8(..)).collect(),
                _ => {
                    let at = random.usize(..bytes.len());
                    bytes[at] ^= 1 << random.u8(..8);
                }
            }
            if let Ok(lock) = StoredLock::decode(&bytes) {
                assert_eq!(lock.encode(), bytes);
            }
        }
    }

    const HOME: u16 = 0;
    const NODES: u16 = 4;

    /// A lock, the backup of its home, and the one task of each node that uses it.
    struct Play {
        line: LockLine,
        state: StoredLock,
        /// State that is in the backup.
        stored: StoredLock,
        /// Ticket and mode of each node's task, and whether it was told that it has the lock.
        tasks: [Option<(HomeTicket, LockMode, bool)>; NODES as usize],
        tickets: u64,
    }

    impl Play {
        /// Records a change at the home, and tells whoever has the lock since.
        fn changed(&mut self, turns: Vec<HomeTicket>) {
            let is_recorded =
                |(ticket, mode): &(HomeTicket, LockMode)| ticket.node != HOME || *mode == LockMode::Exclusive;
            self.state.holders = self.line.holdings().filter(is_recorded).collect();
            for ticket in turns {
                if ticket.node != HOME {
                    self.stored = self.state.clone();
                }
                let task = self.tasks[usize::from(ticket.node)].as_mut().expect("it waits");
                assert_eq!(task.0, ticket);
                task.2 = true;
            }
            let has: Vec<_> = self.tasks.iter().flatten().filter(|(.., has)| *has).collect();
            assert!(has.len() < 2 || has.iter().all(|(_, mode, _)| *mode == LockMode::Shared), "{has:?}");
        }

        fn ask(&mut self, ticket: HomeTicket, mode: LockMode) {
            // Whoever asks again has the lock if it was granted before.
            let has = self.line.held(ticket).is_some() || self.line.ask(ticket, mode);
            self.changed(if has { vec![ticket] } else { Vec::new() });
        }

        fn release(&mut self, ticket: HomeTicket, value: u8) {
            if self.line.held(ticket) == Some(LockMode::Exclusive) {
                (self.state.value, self.state.was_left) = (vec![value], false);
            }
            let turns = self.line.leave(ticket);
            self.changed(turns);
        }
    }

    /// The home dies in the middle of random histories, after a step that is stored or not and whose answer
    /// does not arrive, and perhaps another node with it.
    #[test]
    fn whoever_takes_a_lock_over_knows_its_holders_and_its_value() {
        let mut random = fastrand::Rng::with_seed(12);
        let (mut left, mut held, mut lent) = (0, 0, 0);
        for _ in 0..30_000 {
            let state = StoredLock { value: vec![0], owns_others: random.bool(), ..StoredLock::default() };
            let (line, stored) = (LockLine::default(), state.clone());
            let mut play = Play { line, stored, state, tasks: [None; NODES as usize], tickets: 0 };
            // Values that the lock may have afterwards, and the message that was not answered.
            let mut unanswered = None;
            let steps = random.usize(1..30);
            for step in 1..=steps {
                let node = random.u16(..NODES);
                let before = (play.stored.clone(), play.state.clone());
                let written = match play.tasks[usize::from(node)] {
                    None => {
                        play.tickets += 1;
                        let ticket = HomeTicket { node, number: play.tickets };
                        let mode = if random.bool() { LockMode::Exclusive } else { LockMode::Shared };
                        play.tasks[usize::from(node)] = Some((ticket, mode, false));
                        play.ask(ticket, mode);
                        None
                    }
                    Some((ticket, mode, true)) => {
                        play.tasks[usize::from(node)] = None;
                        let value = if mode == LockMode::Exclusive { random.u8(..) } else { play.state.value[0] };
                        play.release(ticket, value);
                        Some((ticket, mode, value))
                    }
                    Some((.., false)) => continue,
                };
                if step < steps {
                    // The answer leaves after the change is stored. The home itself tells nobody.
                    if node != HOME || random.bool() {
                        play.stored = play.state.clone();
                    }
                } else if node != HOME && random.bool() {
                    // The last message is lost with the home, before anybody else was told of anything.
                    play.stored = before.0;
                    let told = |task: &mut Option<(HomeTicket, LockMode, bool)>| {
                        if let Some((ticket, _, has)) = task {
                            *has &= before.1.holders.iter().any(|(holder, _)| holder == ticket) || ticket.node == HOME;
                        }
                    };
                    play.tasks.iter_mut().for_each(told);
                    unanswered = written;
                } else {
                    unanswered = written.filter(|_| node != HOME);
                }
            }
            let dead = [HOME, random.u16(..NODES)];
            let is_dead = |node: u16| dead.contains(&node);
            let known = play.stored.value[0];
            let writer = play.stored.holders.iter().find(|(_, mode)| *mode == LockMode::Exclusive).copied();
            let state = play.stored.clone().without(is_dead);
            let is_left = writer.is_some_and(|(ticket, _)| is_dead(ticket.node));
            assert_eq!((state.was_left, state.is_lost), (is_left, is_left && state.owns_others));
            assert_eq!(state.value, [known], "nobody has released since");
            left += u32::from(is_left);
            dead.iter().for_each(|node| play.tasks[usize::from(*node)] = None);
            let lenders = state.lenders(is_dead);
            lenders.iter().for_each(|ticket| assert!(state.holders.contains(&(*ticket, LockMode::Shared))));
            lent += u32::from(!lenders.is_empty());
            play.line = LockLine::held_by(state.holders.iter().copied());
            play.state = state;
            // Living holders are holders there.
            for (ticket, mode, _) in play.tasks.iter().flatten().filter(|(.., has)| *has) {
                assert_eq!(play.line.held(*ticket), Some(*mode), "a holder was forgotten");
                held += 1;
            }
            // What was not answered is said again, those who wait ask again, and all have their turns.
            if let Some((ticket, mode, value)) = unanswered.filter(|(ticket, ..)| !is_dead(ticket.node)) {
                play.release(ticket, value);
                assert!(mode == LockMode::Shared || play.state.value == [value], "a release was lost");
            }
            let value = play.state.value.clone();
            let waiting: Vec<_> = play.tasks.iter().flatten().filter(|(.., has)| !has).copied().collect();
            waiting.into_iter().for_each(|(ticket, mode, _)| play.ask(ticket, mode));
            // What dead readers have lent is not written to before it was given back.
            for lender in lenders {
                let writes = |task: &(HomeTicket, LockMode, bool)| task.1 == LockMode::Exclusive && task.2;
                assert!(!play.tasks.iter().flatten().any(writes));
                play.release(lender, value[0]);
            }
            while let Some((ticket, ..)) = play.tasks.iter().flatten().find(|(.., has)| *has).copied() {
                play.tasks[usize::from(ticket.node)] = None;
                play.release(ticket, value[0]);
            }
            assert!(play.tasks.iter().all(Option::is_none) && play.line.is_idle(), "somebody waits for ever");
        }
        assert!(left > 1000 && held > 1000 && lent > 1000, "{left} {held} {lent}");
    }
}
