//! Locks as farfield-dsm has them: their lines and values at their homes, and who waits for them. What they promise is
//! checked by a twin that knows what everybody has seen.

use crate::node::{Answer, Contents, Here, Message, Node, free, home_of, tell};
use crate::world::{Failure, NODES, Rule, Slot, World};
use farfield_core::dsm::{BorrowRoot, HomeTicket, LockLine, OwnerWord, StoredLock};
use farfield_core::lock::LockMode;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Lock at its home, or at the node that keeps it since. Its value is an object there.
#[derive(Clone, Default)]
pub(crate) struct HomeLock {
    line: LockLine,
    /// Those who wait and may have been lent something of what the lock owns.
    borrowers: Vec<HomeTicket>,
    was_left: bool,
    is_lost: bool,
    /// A reader at the home has lent what the value owns.
    is_lent: bool,
}

/// Answer to who asks for a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockAnswer {
    Granted { was_left: bool, value: Contents },
    Lost,
    Borrowed,
    Closed,
}

/// End of a holding. Writers bring the value back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LockEnd {
    Released(Option<Contents>),
    Abandoned,
    /// Nobody waits for it any more. The request may still be on its way.
    Withdrawn,
}

/// A lock that a task holds.
pub(crate) struct Hold {
    pub(crate) word: OwnerWord,
    ticket: HomeTicket,
    mode: LockMode,
    pub(crate) value: Contents,
}

/// Values under locks may own objects.
const OWNS_OTHERS: bool = true;

impl Contents {
    /// Returns the value under a lock as it is in a backup.
    pub(crate) fn encode_locked(self) -> Vec<u8> {
        [self.value, self.child.map_or(0, OwnerWord::bits)].into_iter().flat_map(u64::to_le_bytes).collect()
    }

    pub(crate) fn decode_locked(bytes: &[u8]) -> Option<Contents> {
        let (value, child) = bytes.split_first_chunk()?;
        let child = u64::from_le_bytes(child.try_into().ok()?);
        Some(Contents { value: u64::from_le_bytes(*value), child: OwnerWord::from_bits(child) })
    }
}

impl Node {
    /// Records how a lock is, before anybody is told.
    fn note_lock(&mut self, world: &World, word: OwnerWord, value: Option<Contents>) {
        let (id, is_here) = (self.id, self.is_here(word));
        let Some(lock) = self.locks.get_mut(&word.bits()) else { return };
        lock.is_lent &= lock.line.holders().any(|ticket| ticket.node == id);
        let is_lent = lock.is_lent && world.has(Rule::LentLocksAreStored);
        let is_noted = |(ticket, mode): &(HomeTicket, LockMode)| match *mode {
            _ if !world.has(Rule::HoldersAreStored) => false,
            LockMode::Exclusive => ticket.node != id || world.has(Rule::WritersAtHomeAreStored),
            LockMode::Shared => ticket.node != id || is_lent,
        };
        let holders: Vec<_> = lock.line.holdings().filter(is_noted).collect();
        let (was_left, is_lost) = (lock.was_left, lock.is_lost);
        let Some(backup) = self.backup.as_mut().filter(|_| is_here) else { return };
        let Some((_, stored)) = backup.locks.get_mut(&word.offset()) else { return };
        let before = stored.clone();
        (stored.holders, stored.was_left, stored.is_lost) = (holders, was_left, is_lost);
        if let Some(value) = value {
            stored.value = value.encode_locked();
        }
        if *stored != before {
            backup.changed_locks.insert(word.offset());
        }
    }

    /// Adds the locks that have changed to the next batch, with what they own if nobody may be writing to that.
    pub(crate) fn stage_changes(&mut self) {
        while let Some(offset) = self.backup.as_mut().and_then(|backup| backup.changed_locks.pop_first()) {
            let backup = self.backup.as_mut().expect("it has one");
            let Some((word, stored)) = backup.locks.get(&offset) else { continue };
            backup.batch.put_lock(*word, stored);
            backup.staged += 1;
            let is_used = stored.is_written() || stored.is_lost;
            let child = Contents::decode_locked(&stored.value).and_then(|value| value.child).filter(|_| !is_used);
            child.into_iter().for_each(|child| self.stage(child));
        }
        self.stage_channels();
    }

    /// Makes a lock at this node.
    pub(crate) fn make_lock(&mut self, value: Contents) -> OwnerWord {
        let word = self.alloc(value);
        self.locks.insert(word.bits(), HomeLock::default());
        if let Some(backup) = &mut self.backup {
            let stored = StoredLock { value: value.encode_locked(), owns_others: OWNS_OTHERS, ..StoredLock::default() };
            backup.locks.insert(word.offset(), (word, stored));
            backup.changed_locks.insert(word.offset());
        }
        word
    }

    fn write_locked(&mut self, word: OwnerWord, value: Contents) {
        if self.is_here(word) {
            self.write_here(word, value);
        } else if let Some((_, kept)) = self.promoted.get_mut(&crate::node::key(word)) {
            *kept = value;
        }
    }

    /// Returns what a ticket is told that has the lock, and sees to it that what it is given is stored.
    fn grant(&mut self, world: &World, word: OwnerWord, ticket: HomeTicket) -> LockAnswer {
        let was_left = self.locks.get(&word.bits()).is_some_and(|lock| lock.was_left);
        let Some(value) = self.read_here(word) else { return LockAnswer::Closed };
        if ticket.node != self.id && world.has(Rule::GrantedObjectsAreStored) {
            value.child.into_iter().for_each(|child| self.stage(child));
        }
        LockAnswer::Granted { was_left, value }
    }

    /// Forgets a lock that is dropped.
    pub(crate) fn forget_lock(&mut self, word: OwnerWord) {
        let is_lock = self.locks.remove(&word.bits()).is_some();
        if let Some(backup) = self.backup.as_mut().filter(|_| is_lock) {
            backup.locks.remove(&word.offset());
            backup.changed_locks.remove(&word.offset());
            backup.batch.free(word);
        }
    }

    /// Keeps a lock of a node that is gone. Returns the readers at nodes that are gone, which have lent something.
    pub(crate) fn promote_lock(
        &mut self,
        world: &World,
        word: OwnerWord,
        stored: StoredLock,
        dead: u16,
    ) -> Vec<HomeTicket> {
        let is_gone = |node: u16| node == dead || self.lost.contains(&node);
        let mut stored = stored.without(is_gone);
        let mut lenders = stored.lenders(is_gone);
        if !world.has(Rule::PromotedLocksOutlastBorrowers) {
            stored.holders.retain(|(ticket, _)| !is_gone(ticket.node));
            lenders.clear();
        }
        if let Some(value) = Contents::decode_locked(&stored.value) {
            self.promoted.insert(crate::node::key(word), (word, value));
        }
        let (was_left, is_lost) = (stored.was_left, stored.is_lost && world.has(Rule::LocksOfDeadWritersAreLost));
        let line = LockLine::held_by(stored.holders);
        self.locks.insert(word.bits(), HomeLock { line, was_left, is_lost, ..HomeLock::default() });
        lenders
    }
}

/// Asks for a lock at the node that keeps it. Returns `None` if the ticket waits.
pub(crate) fn ask_lock(
    world: &World,
    at: u16,
    word: OwnerWord,
    ticket: HomeTicket,
    mode: LockMode,
    may_borrow: bool,
) -> Option<LockAnswer> {
    let mut node = world.node(at);
    if node.lost.contains(&ticket.node) {
        return Some(LockAnswer::Closed);
    }
    if node.withdrawn.take(ticket) {
        return Some(LockAnswer::Closed);
    }
    let Some(lock) = node.locks.get_mut(&word.bits()) else { return Some(LockAnswer::Closed) };
    if lock.is_lost {
        return Some(LockAnswer::Lost);
    }
    let had_it = lock.line.held(ticket).is_some() && world.has(Rule::TicketsAreKnown);
    if had_it || lock.line.ask(ticket, mode) {
        node.note_lock(world, word, None);
        return Some(node.grant(world, word, ticket));
    }
    if may_borrow && world.has(Rule::BorrowersAreTold) {
        let lost = node.lost.clone();
        let lock = node.locks.get_mut(&word.bits())?;
        let is_lender = |(ticket, mode): (HomeTicket, _)| mode == LockMode::Shared && lost.contains(&ticket.node);
        if lock.line.holdings().any(is_lender) {
            lock.line.leave(ticket);
            return Some(LockAnswer::Borrowed);
        }
        lock.borrowers.push(ticket);
    }
    None
}

/// Ends a holding or a wait. Does nothing if the ticket has neither.
pub(crate) fn end_lock(world: &Rc<World>, at: u16, word: OwnerWord, ticket: HomeTicket, end: LockEnd) {
    let mut node = world.node(at);
    let Some(lock) = node.locks.get_mut(&word.bits()) else { return };
    if matches!(end, LockEnd::Withdrawn) && !lock.line.has(ticket) {
        if world.has(Rule::WithdrawnTicketsAreKnown) {
            node.withdrawn.withdraw(ticket);
        }
        return;
    }
    let mut written = None;
    if lock.line.held(ticket) == Some(LockMode::Exclusive) {
        lock.was_left = matches!(end, LockEnd::Abandoned);
        match end {
            LockEnd::Released(value) => written = value,
            LockEnd::Withdrawn => {}
            LockEnd::Abandoned => lock.is_lost = OWNS_OTHERS && world.has(Rule::LocksOfDeadWritersAreLost),
        }
    }
    let mut turns = lock.line.leave(ticket);
    lock.borrowers.retain(|waiter| *waiter != ticket && !turns.contains(waiter));
    let is_lost = lock.is_lost;
    if is_lost {
        turns.extend(lock.line.dissolve());
    }
    if let Some(value) = written {
        node.write_locked(word, value);
    }
    node.note_lock(world, word, written);
    drop(node);
    for ticket in turns {
        let answer = if is_lost { LockAnswer::Lost } else { world.node(at).grant(world, word, ticket) };
        answer_lock(world, at, ticket, answer);
    }
}

/// Tells one that waits for a lock of this node how that has ended.
fn answer_lock(world: &Rc<World>, at: u16, ticket: HomeTicket, answer: LockAnswer) {
    if ticket.node == at {
        take_answer(world, at, ticket.number, answer);
    } else {
        tell(world, at, ticket.node, Message::Answered { ticket: ticket.number, answer });
    }
}

/// Takes the answer of a home.
pub(crate) fn take_answer(world: &World, at: u16, number: u64, answer: LockAnswer) {
    let wait = world.node(at).lock_waits.remove(&number);
    if let Some((_, wait)) = wait {
        wait.put(world, Some(answer));
    }
}

/// Ends the holdings and waits of a node that is gone. What the value of a lock owns may have been lent further by a
/// reader, so its holding ends when nobody has borrowed that any more.
pub(crate) fn lose_locks(world: &Rc<World>, at: u16, dead: u16) {
    let (mut lent, mut lost) = (Vec::new(), Vec::new());
    for (bits, lock) in &world.node(at).locks {
        let word = OwnerWord::from_bits(*bits).expect("a word");
        for ticket in lock.line.of_node(dead) {
            match lock.line.held(ticket) {
                Some(LockMode::Shared) if world.has(Rule::LocksOutlastBorrowers) => lent.push((word, ticket)),
                held => lost.push((held.is_some(), word, ticket)),
            }
        }
    }
    // Who waits and is among those who are waited for would wait for ever.
    for (word, _) in &lent {
        let lock = world.node(at).locks.get_mut(&word.bits()).map(|lock| std::mem::take(&mut lock.borrowers));
        for ticket in lock.into_iter().flatten().filter(|ticket| ticket.node != dead) {
            end_lock(world, at, *word, ticket, LockEnd::Abandoned);
            answer_lock(world, at, ticket, LockAnswer::Borrowed);
        }
    }
    outlast_lenders(world, at, lent);
    // Those that wait first, so that none of them has its turn.
    lost.sort_by_key(|(is_held, ..)| *is_held);
    lost.into_iter().for_each(|(_, word, ticket)| end_lock(world, at, word, ticket, LockEnd::Abandoned));
}

/// Ends the holdings of dead readers, each when nobody has borrowed any more what the value of its lock owns.
pub(crate) fn outlast_lenders(world: &Rc<World>, at: u16, lenders: Vec<(OwnerWord, HomeTicket)>) {
    for (word, ticket) in lenders {
        let (world, here) = (world.clone(), Here::new(world, at));
        world.clone().spawn(at, async move {
            here.outlast_borrowers(ticket.node, world.root_of(BorrowRoot::of_lock(word))).await;
            end_lock(&world, at, word, ticket, LockEnd::Abandoned);
        });
    }
}

/// Gives a lock back, wherever it is kept. Does not wait.
pub(crate) fn unlock(world: &Rc<World>, at: u16, word: OwnerWord, ticket: HomeTicket, end: LockEnd) {
    let host = world.node(at).host_of(word);
    if host == at {
        end_lock(world, at, word, ticket, end);
    } else {
        tell(world, at, host, Message::Unlock { word, ticket: ticket.number, end });
    }
}

impl Here {
    /// Takes a lock, and waits until it is free.
    pub(crate) async fn lock(&self, word: OwnerWord, mode: LockMode) -> Result<Hold, Failure> {
        let (world, at) = (self.world.clone(), self.node);
        let ticket = HomeTicket { node: at, number: world.node(at).number() };
        let mut home = world.node(at).host_of(word);
        if mode == LockMode::Exclusive {
            world.with_twin(word, |twin| twin.writers.insert(at));
        }
        loop {
            let slot = Slot::new();
            world.node(at).lock_waits.insert(ticket.number, (home, slot.clone()));
            let may_borrow = self.roots.contains(&world.root_of(BorrowRoot::of_lock(word)));
            let message = Message::Lock { word, ticket: ticket.number, mode, may_borrow };
            let reply =
                if home == at { Node::receive(&world, at, at, message) } else { world.ask(at, home, message).await };
            let answer = match reply {
                Ok(Answer::Lock(answer)) => Ok(answer),
                Ok(Answer::Waits) => slot.wait(&world).await.ok_or(Failure::NodeLost(home)),
                Ok(Answer::Expelled) => {
                    world.die(at);
                    world.alive(at).await;
                    Err(Failure::Stale)
                }
                Ok(_) => Err(Failure::Stale),
                Err(failure) => Err(failure),
            };
            world.node(at).lock_waits.remove(&ticket.number);
            let host = world.node(at).host_of(word);
            return match answer {
                Ok(LockAnswer::Granted { was_left, value }) => {
                    world.granted(ticket, word, mode, was_left, value);
                    Ok(Hold { word, ticket, mode, value })
                }
                Ok(LockAnswer::Lost) => Err(Failure::Lost),
                Ok(LockAnswer::Borrowed) => Err(Failure::Borrowed),
                // It was not in the backup.
                Ok(LockAnswer::Closed) if host != home_of(word) => Err(Failure::NodeLost(home_of(word))),
                Ok(LockAnswer::Closed) => Err(Failure::Stale),
                Err(Failure::NodeLost(_)) if host != home => {
                    home = host;
                    continue;
                }
                Err(Failure::Silent) => {
                    // The home may have given it the lock.
                    unlock(&world, at, word, ticket, LockEnd::Withdrawn);
                    Err(Failure::Silent)
                }
                Err(failure) => Err(failure),
            };
        }
    }

    /// Gives a lock back. A writer says what its value is, and the value of what that owns.
    pub(crate) fn unlock(&self, hold: Hold, child: Option<u64>) {
        let Hold { word, ticket, mode, value } = hold;
        let is_writer = mode == LockMode::Exclusive;
        if is_writer {
            value.child.into_iter().for_each(|child| self.world.node(self.node).stage(child));
        }
        self.world.released(ticket, word, is_writer.then_some((value.value, child)));
        unlock(&self.world, self.node, word, ticket, LockEnd::Released(is_writer.then_some(value)));
    }

    /// Records that a task with these borrows is about to be sent to another node.
    pub(crate) fn note_lent(&self) {
        let mut node = self.world.node(self.node);
        for word in self.roots.iter().filter_map(|root| root.lock()) {
            if let Some(lock) = node.locks.get_mut(&word.bits()) {
                lock.is_lent = true;
                node.note_lock(&self.world, word, None);
            }
        }
    }
}

/// What everybody has seen of a lock.
#[derive(Default)]
pub(crate) struct LockTwin {
    word: Option<OwnerWord>,
    /// Values that were under the lock, with the one that the writer has found, and the value that they own.
    values: BTreeMap<u64, (u64, Option<u64>)>,
    /// Values that tasks have found or made, with their nodes.
    known: Vec<(u16, u64)>,
    holders: Vec<(HomeTicket, LockMode, u64)>,
    /// Nodes whose tasks have borrowed what the value owns.
    borrowed: Vec<u16>,
    /// Nodes that have asked for it to write.
    writers: BTreeSet<u16>,
}

impl LockTwin {
    /// Returns what is wrong if a task is told now that it has the lock. What nodes have seen that are gone does not
    /// count.
    fn check(&self, mode: LockMode, was_left: bool, found: Contents, counts: impl Fn(u16) -> bool) -> Option<String> {
        let is_other = |(holder, held, _): &&(HomeTicket, LockMode, u64)| {
            counts(holder.node) && (mode == LockMode::Exclusive || *held == LockMode::Exclusive)
        };
        if let Some(other) = self.holders.iter().find(is_other) {
            return Some(format!("is held for {mode:?}, and by {other:?}"));
        }
        if mode == LockMode::Exclusive && self.borrowed.iter().any(|node| counts(*node)) {
            return Some("is held by a writer, and what it owns is borrowed".into());
        }
        if was_left && !self.writers.iter().any(|node| !counts(*node)) {
            return Some("was left by nobody".into());
        }
        let mut before = BTreeSet::new();
        let mut value = found.value;
        while let Some((earlier, _)) = self.values.get(&value).filter(|_| before.insert(value)) {
            value = *earlier;
        }
        if let Some(missed) = self.known.iter().find(|(node, value)| counts(*node) && !before.contains(value)) {
            return Some(format!("has {found:?}, which does not come after {missed:?}"));
        }
        let owns = self.values.get(&found.value).is_some_and(|(_, child)| child.is_some());
        (owns != found.child.is_some()).then(|| format!("has {found:?} without what it owns"))
    }
}

impl World {
    /// Makes a lock at a node whose value owns an object.
    pub(crate) fn make_lock(&self, at: u16) {
        let mut node = self.node(at);
        let [value, owned] = [node.number(), node.number()];
        let child = Some(node.alloc(Contents { value: owned, child: None }));
        let word = node.make_lock(Contents { value, child });
        let values = [(value, (0, Some(owned)))].into();
        self.locks.borrow_mut().push(LockTwin { word: Some(word), values, ..LockTwin::default() });
    }

    /// Returns the words of all locks.
    pub(crate) fn all_locks(&self) -> Vec<OwnerWord> {
        self.locks.borrow().iter().filter_map(|twin| twin.word).collect()
    }

    fn with_twin<T>(&self, word: OwnerWord, action: impl FnOnce(&mut LockTwin) -> T) -> T {
        let mut locks = self.locks.borrow_mut();
        action(locks.iter_mut().find(|twin| twin.word == Some(word)).expect("a lock"))
    }

    pub(crate) fn is_condemned(&self, node: u16) -> bool {
        self.node(node).is_condemned
    }

    /// Checks what a task is told that has a lock now.
    fn granted(&self, ticket: HomeTicket, word: OwnerWord, mode: LockMode, was_left: bool, found: Contents) {
        self.seen.borrow_mut().grants += 1;
        let wrong = self.with_twin(word, |twin| {
            let wrong = twin.check(mode, was_left, found, |node| !self.is_condemned(node));
            twin.known.push((ticket.node, found.value));
            twin.holders.push((ticket, mode, found.value));
            wrong
        });
        wrong.into_iter().for_each(|wrong| self.broken(ticket.node, format!("{word:?} {wrong}")));
    }

    /// Records that a task gives a lock back, and the value if it has written.
    fn released(&self, ticket: HomeTicket, word: OwnerWord, written: Option<(u64, Option<u64>)>) {
        self.with_twin(word, |twin| {
            let Some(at) = twin.holders.iter().position(|(holder, ..)| *holder == ticket) else { return };
            let (.., found) = twin.holders.swap_remove(at);
            if let Some((value, child)) = written {
                twin.values.entry(value).or_insert((found, child));
                twin.known.push((ticket.node, value));
            }
        });
    }

    /// Returns the value that the value under a lock owns.
    pub(crate) fn owned_under(&self, word: OwnerWord, value: u64) -> Option<u64> {
        self.with_twin(word, |twin| twin.values.get(&value).and_then(|(_, child)| *child))
    }

    /// Returns whether a living node has been told of a lock, so that the lock outlives its home.
    pub(crate) fn is_known(&self, word: OwnerWord) -> bool {
        let known = self.with_twin(word, |twin| twin.known.clone());
        known.into_iter().any(|(node, _)| !self.is_condemned(node))
    }

    /// Returns whether a writer of a lock is gone, so that the lock may be lost.
    pub(crate) fn may_be_lost(&self, word: OwnerWord) -> bool {
        let writers = self.with_twin(word, |twin| twin.writers.clone());
        writers.into_iter().any(|node| self.is_condemned(node))
    }

    /// Records that a task begins or ends to borrow what is owned under locks.
    pub(crate) fn borrow_under(&self, at: u16, roots: &BTreeSet<BorrowRoot>, begins: bool) {
        for word in roots.iter().filter_map(|root| root.lock()) {
            self.with_twin(word, |twin| {
                if begins {
                    twin.borrowed.push(at);
                } else if let Some(index) = twin.borrowed.iter().position(|node| *node == at) {
                    twin.borrowed.swap_remove(index);
                }
            });
        }
    }
}

/// Takes a lock at the end of a program. Drops it if nobody can use it any more: tasks of dead nodes may go on.
pub(crate) async fn end_use(here: &Here, word: OwnerWord) -> Result<(), Failure> {
    let hold = loop {
        match here.lock(word, LockMode::Exclusive).await {
            Err(Failure::Silent) => {}
            held => break held?,
        }
    };
    let child = here.world.owned_under(word, hold.value.value);
    here.unlock(hold, child);
    if here.world.plan.faults.is_empty() {
        free(&here.world, here.node, word, true);
    }
    Ok(())
}

/// Makes a lock at each node, if the program has locks.
pub(crate) fn make_locks(world: &World) {
    if world.plan.has_locks {
        (0..NODES).for_each(|node| world.make_lock(node));
    }
}
