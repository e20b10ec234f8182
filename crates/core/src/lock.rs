//! The lock record: a fair lock with leases, in 64 bytes of far memory.
//!
//! ```text
//! word 0   next ticket u32, ticket whose turn it is u32
//! word 1   epoch: which holding it is, or was last
//! word 2   when what is now is over, in nanoseconds of the server's clock; 0: never
//! word 3   holders u32 (all ones: one that is alone), flags u32 (bit 0: left)
//! word 4   waiting tickets that were seen since word 2 was set, by ticket mod 64
//! word 5   waiting tickets that were given up
//! word 6   0
//! word 7   0
//! ```
//!
//! It is a ticket lock. A client before which nobody holds or waits has the lock at once. Any other
//! draws a ticket and polls until it is its turn. Holders are admitted in the order of their
//! tickets. Those that share the lock are admitted together as long as nobody between them wants it
//! exclusively.
//! No client is assumed to be alive. A holding ends with its lease. Its former holder learns that
//! from the epoch (the fencing token), and the next holder is told that the lock was *left*. The
//! client whose turn it is must come soon. If a lease or a turn runs out, all waiters that were not
//! seen meanwhile are dropped from the line, so any number of dead clients delay the living once.
//! Time is that of the one server that keeps the record, and an argument.
//!
//! Every step is a pure function on a copy; the server makes it while nobody else changes the
//! region.

use crate::cast::low_u32;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Mode in which a lock is held.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum LockMode {
    /// Shared with other readers.
    Shared,
    /// Exclusive.
    Exclusive,
}

/// Request of a client to a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum LockRequest {
    /// Takes the lock; if that is not possible at once, draws a ticket or not.
    Take {
        /// Mode to hold the lock in.
        mode: LockMode,
        /// Length of the lease.
        lease: Duration,
        /// Whether the client would wait, and so draws a ticket.
        waits: bool,
    },
    /// Polls: takes the lock if it is the ticket's turn.
    Look {
        /// Ticket that the client drew.
        ticket: u32,
        /// Mode to hold the lock in.
        mode: LockMode,
        /// Length of the lease.
        lease: Duration,
    },
    /// Stops waiting.
    GiveUp {
        /// Ticket that the client drew.
        ticket: u32,
    },
    /// Extends the lease.
    Keep {
        /// Epoch of the holding.
        epoch: u64,
        /// Mode in which the lock is held.
        mode: LockMode,
        /// Length of the lease, from now on.
        lease: Duration,
    },
    /// Releases the lock.
    Release {
        /// Epoch of the holding.
        epoch: u64,
        /// Mode in which the lock is held.
        mode: LockMode,
        /// Whether the protected data is consistent. If not, the next holder is told that the lock
        /// was left.
        is_done: bool,
    },
}

/// Reply of a lock to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum LockReply {
    /// The client has the lock.
    Yours {
        /// Epoch of the holding, the fencing token: writes under it are refused once another
        /// holding has begun.
        epoch: u64,
        /// Whether the last exclusive holder died, or lost its lease, before it was done.
        was_left: bool,
    },
    /// The client waits in the line.
    Waits {
        /// Ticket that names the client.
        ticket: u32,
        /// Greatest number of tickets before this one.
        ahead: u32,
    },
    /// The lock is held, or it is the turn of another client.
    Busy,
    /// The line is full.
    Full,
    /// The client was not seen for so long that it lost its place in the line.
    Missed,
    /// The request was carried out.
    Done,
    /// The holding is over.
    Over,
}

/// Holders of the lock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum LockHolders {
    Free,
    Shared(u32),
    Exclusive,
}

/// Lock record: a fair lock with leases and fencing tokens, as a value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LockRecord {
    next: u32,
    /// Tickets from this one to `next` are in the line.
    turn: u32,
    epoch: u64,
    until: u64,
    held: LockHolders,
    is_poisoned: bool,
    /// `seen` and `given_up` have bits only of tickets in the line.
    seen: u64,
    given_up: u64,
}

const ALONE: u32 = u32::MAX;
const LEFT: u32 = 1;

impl Default for LockRecord {
    fn default() -> LockRecord {
        LockRecord::FREE
    }
}

impl LockRecord {
    /// Size of the record in bytes; its offset is a multiple of it.
    pub const BYTES: usize = 64;
    /// A free lock. All zeros, so memory that was never written is a free lock.
    pub const FREE: LockRecord = LockRecord {
        next: 0,
        turn: 0,
        epoch: 0,
        until: 0,
        held: LockHolders::Free,
        is_poisoned: false,
        seen: 0,
        given_up: 0,
    };
    /// Greatest number of tickets in the line.
    pub const LINE_MAX: u32 = 64;
    /// Time for which it may be the turn of a client that does not come. Some hundred times the
    /// interval at which a waiter polls.
    pub const TURN: Duration = Duration::from_millis(100);
    /// Longest lease.
    pub const LEASE_MAX: Duration = Duration::from_secs(60);

    /// Decodes the record; `None` if the bytes are not one.
    pub fn decode(bytes: &[u8; LockRecord::BYTES]) -> Option<LockRecord> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |index: usize| u64::from_le_bytes(words[index]);
        let (tickets, holders) = (word(0), word(3));
        let held = match low_u32(holders) {
            0 => LockHolders::Free,
            ALONE => LockHolders::Exclusive,
            count => LockHolders::Shared(count),
        };
        let flags = (holders >> 32) as u32;
        let lock = LockRecord {
            next: low_u32(tickets),
            turn: (tickets >> 32) as u32,
            epoch: word(1),
            until: word(2),
            held,
            is_poisoned: flags & LEFT != 0,
            seen: word(4),
            given_up: word(5),
        };
        let is_lock = flags <= LEFT
            && lock.waiting() <= LockRecord::LINE_MAX
            && (lock.seen | lock.given_up) & !lock.line() == 0
            && word(6) | word(7) == 0;
        is_lock.then_some(lock)
    }

    /// Encodes the record as bytes.
    pub fn encode(&self) -> [u8; LockRecord::BYTES] {
        let holders = match self.held {
            LockHolders::Free => 0,
            LockHolders::Shared(count) => count,
            LockHolders::Exclusive => ALONE,
        };
        let flags = if self.is_poisoned { LEFT } else { 0 };
        let words = [
            u64::from(self.turn) << 32 | u64::from(self.next),
            self.epoch,
            self.until,
            u64::from(flags) << 32 | u64::from(holders),
            self.seen,
            self.given_up,
        ];
        let mut bytes = [0; LockRecord::BYTES];
        for (into, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *into = word.to_le_bytes();
        }
        bytes
    }

    /// Carries out a request at time `now`, in nanoseconds of the server's clock. Returns the lock
    /// as it is afterwards, and the reply.
    pub fn step(self, now: u64, ask: LockRequest) -> (LockRecord, LockReply) {
        let mut lock = self.settled(now);
        let says = match ask {
            LockRequest::Take { mode, lease, waits } => lock.take(now, mode, lease, waits),
            LockRequest::Look { ticket, mode, lease } => lock.look(now, ticket, mode, lease),
            LockRequest::GiveUp { ticket } => lock.give_up(now, ticket),
            LockRequest::Keep { epoch, mode, .. } | LockRequest::Release { epoch, mode, .. }
                if !lock.has(epoch, mode) =>
            {
                LockReply::Over
            }
            LockRequest::Keep { lease, .. } => {
                lock.extend(now, lease);
                LockReply::Done
            }
            LockRequest::Release { is_done, .. } => lock.release(now, is_done),
        };
        (lock, says)
    }

    /// Checks whether the holding of this epoch and mode is still valid at time `now`.
    pub fn is_held(self, now: u64, epoch: u64, mode: LockMode) -> bool {
        self.settled(now).has(epoch, mode)
    }

    /// Returns the lock after its lease or turn has ended, if `now` is late enough.
    fn settled(mut self, now: u64) -> LockRecord {
        if self.until == 0 || now < self.until {
            return self;
        }
        self.is_poisoned |= self.held == LockHolders::Exclusive;
        self.held = LockHolders::Free;
        self.given_up |= self.line() & !self.seen;
        self.begin_turn(now);
        self
    }

    fn has(&self, epoch: u64, mode: LockMode) -> bool {
        self.epoch == epoch
            && match self.held {
                LockHolders::Free => false,
                LockHolders::Shared(_) => mode == LockMode::Shared,
                LockHolders::Exclusive => mode == LockMode::Exclusive,
            }
    }

    fn take(&mut self, now: u64, mode: LockMode, lease: Duration, waits: bool) -> LockReply {
        if self.waiting() == 0 && self.admits(mode) {
            return self.admit(now, mode, lease);
        }
        if !waits {
            return LockReply::Busy;
        }
        if self.waiting() == LockRecord::LINE_MAX {
            return LockReply::Full;
        }
        let ticket = self.next;
        self.next = ticket.wrapping_add(1);
        self.seen |= bit(ticket);
        LockReply::Waits { ticket, ahead: self.ahead(ticket) }
    }

    fn look(&mut self, now: u64, ticket: u32, mode: LockMode, lease: Duration) -> LockReply {
        if !self.is_waiting(ticket) {
            return LockReply::Missed;
        }
        self.seen |= bit(ticket);
        if ticket != self.turn || !self.admits(mode) {
            return LockReply::Waits { ticket, ahead: self.ahead(ticket) };
        }
        self.pass();
        self.skip();
        self.admit(now, mode, lease)
    }

    fn give_up(&mut self, now: u64, ticket: u32) -> LockReply {
        if self.is_waiting(ticket) {
            self.given_up |= bit(ticket);
            if ticket == self.turn && self.held == LockHolders::Free {
                self.begin_turn(now);
            } else {
                self.skip();
            }
        }
        LockReply::Done
    }

    fn release(&mut self, now: u64, is_done: bool) -> LockReply {
        match self.held {
            LockHolders::Shared(count) if count > 1 => self.held = LockHolders::Shared(count - 1),
            held => {
                if held == LockHolders::Exclusive {
                    self.is_poisoned = !is_done;
                }
                self.held = LockHolders::Free;
                self.begin_turn(now);
            }
        }
        LockReply::Done
    }

    fn admits(&self, mode: LockMode) -> bool {
        match self.held {
            LockHolders::Free => true,
            // Leaves a gap of one, because all ones mean [`LockHolders::Exclusive`].
            LockHolders::Shared(count) => mode == LockMode::Shared && count < ALONE - 1,
            LockHolders::Exclusive => false,
        }
    }

    fn admit(&mut self, now: u64, mode: LockMode, lease: Duration) -> LockReply {
        match (self.held, mode) {
            (LockHolders::Shared(count), _) => self.held = LockHolders::Shared(count + 1),
            (_, mode) => {
                self.epoch = self.epoch.wrapping_add(1);
                self.held = if mode == LockMode::Shared { LockHolders::Shared(1) } else { LockHolders::Exclusive };
                self.until = 0;
            }
        }
        self.extend(now, lease);
        LockReply::Yours { epoch: self.epoch, was_left: self.is_poisoned }
    }

    /// Extends the holding to at least `lease` from now. If that moves its end, waiters must be
    /// seen again.
    fn extend(&mut self, now: u64, lease: Duration) {
        let until = after(now, lease.min(LockRecord::LEASE_MAX));
        if until > self.until {
            self.until = until;
            self.seen = 0;
        }
    }

    /// Begins the turn of the first ticket in the line; the lock is free.
    fn begin_turn(&mut self, now: u64) {
        self.skip();
        self.until = if self.waiting() == 0 { 0 } else { after(now, LockRecord::TURN) };
        self.seen = 0;
    }

    /// Passes over tickets in front that were given up.
    fn skip(&mut self) {
        while self.waiting() > 0 && self.given_up & bit(self.turn) != 0 {
            self.pass();
        }
    }

    /// Removes the first ticket from the line.
    fn pass(&mut self) {
        let bit = bit(self.turn);
        self.given_up &= !bit;
        self.seen &= !bit;
        self.turn = self.turn.wrapping_add(1);
    }

    fn waiting(&self) -> u32 {
        self.next.wrapping_sub(self.turn)
    }

    fn is_waiting(&self, ticket: u32) -> bool {
        self.ahead(ticket) < self.waiting() && self.given_up & bit(ticket) == 0
    }

    fn ahead(&self, ticket: u32) -> u32 {
        ticket.wrapping_sub(self.turn)
    }

    /// Returns the bits of the tickets in the line.
    fn line(&self) -> u64 {
        let ones = 1u64.checked_shl(self.waiting()).map_or(u64::MAX, |bit| bit - 1);
        ones.rotate_left(self.turn % 64)
    }
}

fn bit(ticket: u32) -> u64 {
    1 << (ticket % 64)
}

fn after(now: u64, time: Duration) -> u64 {
    now.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)).max(1)
}

#[cfg(test)]
mod tests {
    //! Dangers: two who may write at once; somebody who writes after another one began; a holding
    //! that ends before its lease; a line that is not in order; the living who wait for the dead,
    //! whatever dies when.
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;
    use alloc::vec::Vec;

    /// Time passes in halves of a turn; a lease is as long as a turn.
    const TICK: u64 = LockRecord::TURN.as_nanos() as u64 / 2;
    const LEASE: Duration = LockRecord::TURN;
    const LEASE_TICKS: u8 = 2;
    /// It is always now: what is in the record comes nearer.
    const NOW: u64 = 1 << 40;
    const EPOCH: u64 = 10;

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Does {
        Nothing,
        Waits(u32),
        /// Which holding, and the ticks for which it was promised.
        Has(u64, u8),
    }

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct World {
        lock: LockRecord,
        does: [Does; 3],
        is_dead: [bool; 3],
        give_ups_left: u8,
    }

    fn take(mode: LockMode) -> LockRequest {
        LockRequest::Take { mode, lease: LEASE, waits: true }
    }

    impl World {
        fn new(first: u32) -> World {
            let lock = LockRecord { next: first, turn: first, epoch: EPOCH, ..LockRecord::FREE };
            World { lock, does: [Does::Nothing; 3], is_dead: [false; 3], give_ups_left: 1 }
        }

        /// Worlds that differ in names only are one: turns and epochs are counted from the present ones.
        fn named(mut self, first: u32) -> World {
            let (before, by) = (self.lock, self.lock.turn.wrapping_sub(first));
            self.lock.seen = before.seen.rotate_right(by % 64);
            self.lock.given_up = before.given_up.rotate_right(by % 64);
            self.lock.turn = first;
            self.lock.next = before.next.wrapping_sub(by);
            for (does, is_dead) in self.does.iter_mut().zip(self.is_dead) {
                match does {
                    // Passed over, however long ago.
                    Does::Waits(ticket) if !before.is_waiting(*ticket) => *ticket = first.wrapping_sub(1),
                    Does::Waits(ticket) => *ticket = ticket.wrapping_sub(by),
                    Does::Has(epoch, _) if *epoch == before.epoch => *epoch = EPOCH,
                    Does::Has(epoch, _) => *epoch = EPOCH - 1,
                    Does::Nothing => {}
                }
                let is_over = matches!(does, Does::Waits(ticket) if *ticket == first.wrapping_sub(1))
                    || matches!(does, Does::Has(epoch, _) if *epoch != EPOCH);
                if is_dead && is_over {
                    *does = Does::Nothing;
                }
            }
            self.lock.epoch = EPOCH;
            // Nobody's turn depends on it.
            self.lock.is_poisoned = false;
            // What is over is over, however long ago.
            if self.lock.until != 0 {
                self.lock.until = self.lock.until.max(NOW);
            }
            self
        }

        /// Somebody asks; what he does then.
        fn ask(mut self, who: usize, mode: LockMode, ask: LockRequest) -> World {
            let before = self;
            let (lock, says) = self.lock.step(NOW, ask);
            self.lock = lock;
            self.does[who] = match (says, ask) {
                (LockReply::Yours { epoch, .. }, _) => {
                    before.check_order(who);
                    Does::Has(epoch, LEASE_TICKS)
                }
                (LockReply::Waits { ticket, ahead }, _) => {
                    assert!(ahead < 6, "{before:?}");
                    Does::Waits(ticket)
                }
                (LockReply::Done, LockRequest::Keep { epoch, .. }) => Does::Has(epoch, LEASE_TICKS),
                (LockReply::Missed | LockReply::Over | LockReply::Done, _) => Does::Nothing,
                (LockReply::Busy | LockReply::Full, _) => unreachable!("there is room in the line"),
            };
            assert_eq!(LockRecord::decode(&lock.encode()), Some(lock));
            assert!(before.is_kept(who, mode, says), "{before:?} {ask:?} {says:?}");
            self
        }

        /// Nobody who waits in the line came before.
        fn check_order(&self, who: usize) {
            let lock = self.lock.settled(NOW);
            let place = |who: usize| match self.does[who] {
                Does::Waits(ticket) if lock.is_waiting(ticket) => Some(lock.ahead(ticket)),
                _ => None,
            };
            for other in (0..3).filter(|other| *other != who) {
                assert!(place(other).is_none_or(|theirs| place(who).is_some_and(|ours| ours < theirs)), "{self:?}");
            }
        }

        /// He who was promised time has it.
        fn is_kept(&self, who: usize, mode: LockMode, says: LockReply) -> bool {
            match self.does[who] {
                Does::Has(epoch, left) if left > 0 => says == LockReply::Done && self.lock.is_held(NOW, epoch, mode),
                _ => true,
            }
        }

        fn next(self, modes: [LockMode; 3]) -> Vec<World> {
            let mut next = vec![self.tick()];
            for (who, mode) in modes.into_iter().enumerate().filter(|(who, _)| !self.is_dead[*who]) {
                let mut dead = self;
                dead.is_dead[who] = true;
                if dead.is_dead != [true; 3] {
                    next.push(dead);
                }
                match self.does[who] {
                    Does::Nothing => next.push(self.ask(who, mode, take(mode))),
                    Does::Waits(ticket) => {
                        next.push(self.ask(who, mode, LockRequest::Look { ticket, mode, lease: LEASE }));
                        if let Some(give_ups_left) = self.give_ups_left.checked_sub(1) {
                            next.push(World { give_ups_left, ..self.ask(who, mode, LockRequest::GiveUp { ticket }) });
                        }
                    }
                    Does::Has(epoch, _) => {
                        next.push(self.ask(who, mode, LockRequest::Keep { epoch, mode, lease: LEASE }));
                        next.push(self.ask(who, mode, LockRequest::Release { epoch, mode, is_done: true }));
                    }
                }
            }
            next
        }

        fn tick(mut self) -> World {
            if self.lock.until != 0 {
                self.lock.until -= TICK;
            }
            for does in &mut self.does {
                if let Does::Has(_, left) = does {
                    *left = left.saturating_sub(1);
                }
            }
            self
        }

        fn check(&self, modes: [LockMode; 3]) {
            let has = |who: usize, mode| match self.does[who] {
                Does::Has(epoch, _) => self.lock.is_held(NOW, epoch, mode),
                _ => false,
            };
            let holders: Vec<_> = (0..3).filter(|who| has(*who, modes[*who])).collect();
            let is_alone = holders.iter().any(|who| modes[*who] == LockMode::Exclusive);
            assert!(!is_alone || holders.len() == 1, "two at once: {self:?}");
            for (who, mode) in modes.into_iter().enumerate() {
                let other = if mode == LockMode::Shared { LockMode::Exclusive } else { LockMode::Shared };
                assert!(!has(who, other), "{self:?}");
                let Does::Has(_, left) = self.does[who] else { continue };
                assert!(left == 0 || holders.contains(&who), "it ends before its lease: {self:?}");
            }
        }

        /// From now on the living do what they should; they must all have had it soon.
        fn check_progress(mut self, modes: [LockMode; 3]) {
            let mut waits: Vec<_> = (0..3).filter(|who| !self.is_dead[*who]).collect();
            waits.retain(|who| matches!(self.does[*who], Does::Waits(_)));
            let start = self;
            // The lease of a dead holder, the turn of a dead one who waits, and a turn for what was
            // seen before it died.
            for _ in 0..=LEASE_TICKS + 4 {
                for _ in 0..4 {
                    let is_dead = self.is_dead;
                    for who in (0..3).filter(|who| !is_dead[*who]) {
                        let mode = modes[who];
                        let ask = match self.does[who] {
                            Does::Nothing if waits.contains(&who) => take(mode),
                            Does::Nothing => continue,
                            Does::Waits(ticket) => LockRequest::Look { ticket, mode, lease: LEASE },
                            Does::Has(epoch, _) => {
                                waits.retain(|waiting| *waiting != who);
                                LockRequest::Release { epoch, mode, is_done: true }
                            }
                        };
                        self = self.ask(who, mode, ask);
                    }
                }
                self = self.tick();
            }
            assert!(waits.is_empty(), "{waits:?} wait in {self:?}, from {start:?}");
        }
    }

    #[test]
    fn one_holder_writes_and_the_living_go_on_when_others_die() {
        use LockMode::{Exclusive, Shared};
        // Tickets and their bits wrap around.
        for first in [0, 63, u32::MAX - 1] {
            for modes in [[Exclusive; 3], [Exclusive, Exclusive, Shared], [Exclusive, Shared, Shared]] {
                let (mut seen, mut open) = (BTreeSet::new(), vec![World::new(first)]);
                while let Some(world) = open.pop() {
                    let world = world.named(first);
                    if seen.insert(world) {
                        world.check(modes);
                        world.check_progress(modes);
                        open.extend(world.next(modes));
                    }
                }
                assert!(seen.len() > 1000, "{}", seen.len());
                let has_two = |world: &World| matches!(world.lock.held, LockHolders::Shared(2));
                assert_eq!(seen.iter().any(has_two), modes[1] == Shared, "those who read do so together");
            }
        }
    }

    fn step(lock: &mut LockRecord, now: u64, ask: LockRequest) -> LockReply {
        let (next, says) = lock.step(now, ask);
        *lock = next;
        says
    }

    #[test]
    fn the_line_is_as_long_as_it_may_be_and_any_number_of_dead_delay_once() {
        let mut lock = LockRecord { next: u32::MAX - 20, turn: u32::MAX - 20, ..LockRecord::FREE };
        let mode = LockMode::Exclusive;
        assert_eq!(step(&mut lock, 1, take(mode)), LockReply::Yours { epoch: 1, was_left: false });
        let mut tickets = Vec::new();
        for ahead in 0..LockRecord::LINE_MAX {
            let LockReply::Waits { ticket, ahead: before } = step(&mut lock, 2, take(mode)) else { panic!("no place") };
            assert_eq!(before, ahead);
            tickets.push(ticket);
        }
        assert_eq!(step(&mut lock, 2, take(mode)), LockReply::Full);
        assert_eq!(step(&mut lock, 2, LockRequest::Take { mode, lease: LEASE, waits: false }), LockReply::Busy);
        assert_eq!(LockRecord::decode(&lock.encode()), Some(lock));
        // All die but the last in the line, who looks once while the holder has it.
        let look = |ticket| LockRequest::Look { ticket, mode, lease: LEASE };
        let last = tickets[63];
        lock.seen = 0;
        assert!(matches!(step(&mut lock, 3, look(last)), LockReply::Waits { ahead: 63, .. }));
        let over = 1 + LEASE.as_nanos() as u64;
        assert_eq!(step(&mut lock, over, look(last)), LockReply::Yours { epoch: 2, was_left: true });
        assert_eq!(step(&mut lock, over, look(tickets[0])), LockReply::Missed);
        assert_eq!(step(&mut lock, over, LockRequest::Release { epoch: 1, mode, is_done: true }), LockReply::Over);
        assert_eq!(step(&mut lock, over, LockRequest::Release { epoch: 2, mode, is_done: true }), LockReply::Done);
        assert_eq!(step(&mut lock, over, take(mode)), LockReply::Yours { epoch: 3, was_left: false });
    }

    #[test]
    fn a_short_lease_is_over_soon() {
        let (mut lock, mode) = (LockRecord::FREE, LockMode::Exclusive);
        step(&mut lock, 1, take(mode));
        let LockReply::Waits { ticket, .. } = step(&mut lock, 1, take(mode)) else { panic!("no place") };
        step(&mut lock, 2, LockRequest::Release { epoch: 1, mode, is_done: true });
        let lease = Duration::from_nanos(5);
        assert_eq!(
            step(&mut lock, 3, LockRequest::Look { ticket, mode, lease }),
            LockReply::Yours { epoch: 2, was_left: false }
        );
        assert!(lock.is_held(7, 2, mode) && !lock.is_held(8, 2, mode), "whatever time there was to come");
        step(&mut lock, 7, LockRequest::Keep { epoch: 2, mode, lease: Duration::from_nanos(2) });
        assert!(lock.is_held(8, 2, mode) && !lock.is_held(9, 2, mode));
    }

    #[test]
    fn waiters_that_give_up_leave_nothing_behind() {
        let mut lock = LockRecord::FREE;
        step(&mut lock, 1, take(LockMode::Shared));
        let draw = |lock: &mut LockRecord, mode| match step(lock, 2, take(mode)) {
            LockReply::Waits { ticket, .. } => ticket,
            other => panic!("{other:?}"),
        };
        let first = draw(&mut lock, LockMode::Exclusive);
        let second = draw(&mut lock, LockMode::Exclusive);
        let reader = draw(&mut lock, LockMode::Shared);
        step(&mut lock, 3, LockRequest::GiveUp { ticket: second });
        step(&mut lock, 3, LockRequest::GiveUp { ticket: second });
        step(&mut lock, 3, LockRequest::GiveUp { ticket: first });
        let look = LockRequest::Look { ticket: reader, mode: LockMode::Shared, lease: LEASE };
        assert_eq!(step(&mut lock, 4, look), LockReply::Yours { epoch: 1, was_left: false });
        for _ in 0..2 {
            step(&mut lock, 5, LockRequest::Release { epoch: 1, mode: LockMode::Shared, is_done: true });
        }
        assert_eq!(LockRecord { next: 0, turn: 0, epoch: 0, ..lock }, LockRecord::FREE);
    }

    #[test]
    fn bytes_that_are_no_lock_are_none() {
        assert_eq!(LockRecord::decode(&[0; LockRecord::BYTES]), Some(LockRecord::FREE));
        assert_eq!(LockRecord::decode(&[0xFF; LockRecord::BYTES]), None);
        let mut random = fastrand::Rng::with_seed(0x5eed);
        for _ in 0..20_000 {
            let mut bytes = [0; LockRecord::BYTES];
            for _ in 0..random.u32(1..10) {
                bytes[random.usize(..LockRecord::BYTES)] = random.u8(..);
            }
            let Some(lock) = LockRecord::decode(&bytes) else { continue };
            assert_eq!(lock.encode(), bytes);
            // Whatever is in it, no step fails.
            let give_up = LockRequest::GiveUp { ticket: random.u32(..) };
            for ask in [take(LockMode::Shared), take(LockMode::Exclusive), give_up] {
                let (lock, _) = lock.step(random.u64(..), ask);
                assert_eq!(LockRecord::decode(&lock.encode()), Some(lock));
            }
        }
    }
}
