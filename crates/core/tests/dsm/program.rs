//! Random programs: tasks that borrow, lend further, own, and hand on, beside a twin of plain values.

use crate::channels::drop_channel;
use crate::locks::{Hold, end_use, make_locks};
use crate::node::{Contents, Here, TaskEnd, end_borrower, free};
use crate::world::{FIRST, Failure, NODES, Rule, Slot, World};
use farfield_core::dsm::{BlockRights, BorrowRoot, LoanNumber, LoanPlace, OwnerWord, word_of_lost_loan};
use farfield_core::lock::LockMode;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What an object holds, and the object that it owns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Twin {
    value: u64,
    child: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Access {
    Owned,
    /// A mutable loan of this number.
    Mutable(LoanNumber),
    Shared,
}

/// An object that a task owns, or was lent.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    place: LoanPlace,
    access: Access,
    /// Whether objects of its type may own others.
    may_own: bool,
    twin: Twin,
}

impl Held {
    pub(crate) fn word(&self) -> OwnerWord {
        self.place.word
    }

    fn is_writable(&self) -> bool {
        self.access != Access::Shared && !self.word().is_lost()
    }
}

/// Result of a task: twins of its mutable loans, by number, and what it hands on.
#[derive(Clone, Default, Debug)]
pub(crate) struct Outcome {
    twins: BTreeMap<LoanNumber, Twin>,
    pub(crate) given: Vec<Held>,
}

/// A task that is to run.
pub(crate) struct Start {
    pub(crate) origin: u16,
    pub(crate) number: u64,
    /// Whether another node's task may have lent its arguments.
    pub(crate) is_scoped: bool,
    /// Roots of what is lent.
    pub(crate) roots: Vec<BorrowRoot>,
    /// Those of them of which nothing was lent, and whether other things were lent under the lock.
    pub(crate) unused: BTreeMap<BorrowRoot, bool>,
    pub(crate) arguments: Vec<Held>,
    pub(crate) seed: u64,
    pub(crate) depth: u64,
}

pub(crate) fn start_task(world: &Rc<World>, at: u16, start: Start) {
    let Start { origin, number, is_scoped, roots, unused, arguments, seed, depth } = start;
    let here = Here { roots: roots.iter().copied().collect(), unused, ..Here::new(world, at) };
    let mut task = Task { here, random: fastrand::Rng::with_seed(seed), held: arguments, depth, unused: None };
    world.spawn(at, async move {
        let world = task.here.world.clone();
        let borrowed = task.here.borrowed().copied().collect();
        world.borrow_under(at, &borrowed, true);
        for _ in 0..task.random.u8(1..5) {
            task.step().await;
        }
        let outcome = task.outcome();
        world.borrow_under(at, &borrowed, false);
        if is_scoped {
            end_borrower(&world, at, origin, &roots);
        }
        task.here.end(origin, number, outcome).await;
    });
}

/// Starts a program at the first node. Says when it is over.
pub(crate) fn start(world: &Rc<World>, is_over: Rc<Cell<bool>>) {
    make_locks(world);
    if world.plan.has_channels {
        world.make_channels();
    }
    let here = Here::new(world, FIRST);
    let random = fastrand::Rng::with_seed(world.plan.seed ^ 0x5eed);
    let mut root = Task { here, random, held: Vec::new(), depth: 2, unused: None };
    world.spawn(FIRST, async move {
        for may_own in [false, true, false] {
            root.make(may_own);
        }
        // Some are long enough to fill the halves of backups.
        let rounds = if root.here.world.plan.seed.is_multiple_of(5) { 16 } else { 4 };
        for _ in 0..rounds {
            root.scope().await;
            root.step().await;
            let mut words = Vec::new();
            for index in 0..root.held.len() {
                words.extend(root.check(index, 0).await);
            }
            for (index, word) in words.iter().enumerate() {
                if words[..index].iter().any(|other| other.is_same_block(*word)) {
                    root.here.world.broken(FIRST, format!("{word:?} has two owners"));
                }
            }
        }
        root.held.drain(..).for_each(|held| free(&root.here.world, FIRST, held.word(), true));
        root.end_channels().await;
        for word in root.here.world.all_locks() {
            if let Err(failure) = end_use(&root.here, word).await {
                root.failed_lock(word, failure);
            }
        }
        is_over.set(true);
    });
}

struct Task {
    here: Here,
    random: fastrand::Rng,
    held: Vec<Held>,
    /// Levels of tasks that it may start.
    depth: u64,
    /// Root of a lock that it has, and from which it has lent nothing.
    unused: Option<BorrowRoot>,
}

impl Task {
    fn world(&self) -> Rc<World> {
        self.here.world.clone()
    }

    /// A value that no other write has.
    fn new_value(&self) -> u64 {
        self.world().node(self.here.node).number()
    }

    /// Makes an object.
    fn make(&mut self, may_own: bool) {
        let (value, world) = (self.new_value(), self.world());
        let mut node = world.node(self.here.node);
        let word = node.alloc(Contents { value, child: None });
        let twin = Twin { value, child: None };
        self.held.push(Held { place: LoanPlace::lent(word), access: Access::Owned, may_own, twin });
    }

    /// Checks why something could not be done.
    fn failed(&self, held: &Held, failure: Failure) {
        let is_allowed = match failure {
            Failure::Silent => self.here.world.plan.loss > 0 || !self.here.world.plan.faults.is_empty(),
            Failure::NodeLost(_) => !self.here.world.keeps_backups(),
            Failure::Lost => held.word().is_lost(),
            Failure::Stale | Failure::Borrowed => false,
        };
        if !is_allowed {
            self.here.world.broken(self.here.node, format!("{failure:?}: {held:?}"));
        }
    }

    fn compare(&self, held: &Held, found: Contents) {
        if (found.value, found.child.is_some()) != (held.twin.value, held.twin.child.is_some()) {
            self.here.world.broken(self.here.node, format!("{found:?} is found: {held:?}"));
        }
    }

    /// Reads an object, and what it owns, for a while. Returns their words, if they were read.
    async fn check(&mut self, index: usize, for_so_long: u64) -> Vec<OwnerWord> {
        let held = self.held[index].clone();
        let found = match self.here.read(held.word(), for_so_long).await {
            Ok(found) => found,
            Err(failure) => {
                self.failed(&held, failure);
                return Vec::new();
            }
        };
        self.compare(&held, found);
        if let Some(child) = found.child {
            match self.here.read(child, 0).await {
                Ok(found) if Some(found.value) == held.twin.child => {}
                Ok(found) => self.here.world.broken(self.here.node, format!("{found:?} is owned by {held:?}")),
                Err(failure) => self.failed(&held, failure),
            }
        }
        [held.word()].into_iter().chain(found.child).collect()
    }

    /// Borrows an object mutably. Returns its contents at this node.
    async fn borrow(&mut self, index: usize) -> Option<Contents> {
        let held = self.held[index].clone();
        let rights = match held.access {
            Access::Mutable(number) => held.place.rights(number, self.here.node),
            _ => BlockRights::Owner,
        };
        let word = match self.here.write(held.word(), rights).await {
            Ok(word) => word,
            Err(failure) => {
                self.failed(&held, failure);
                return None;
            }
        };
        let found = self.here.world.node(self.here.node).borrowed(word);
        self.compare(&held, found);
        let place = &mut self.held[index].place;
        match held.access {
            Access::Mutable(number) => {
                let left = place.left;
                place.change(word);
                if !self.here.world.has(Rule::LastColoursFree) {
                    place.left = left;
                }
                self.here.loans.insert(number, Some(*place));
            }
            _ => *place = LoanPlace::lent(word),
        }
        // The word is the owner's before anything is written.
        self.here.world.node(self.here.node).write_here(word, found);
        Some(found)
    }

    fn put(&mut self, index: usize, contents: Contents) {
        let word = self.held[index].word();
        self.here.world.node(self.here.node).write_here(word, contents);
    }

    async fn write(&mut self, index: usize) {
        let Some(found) = self.borrow(index).await else { return };
        let value = self.new_value();
        self.put(index, Contents { value, ..found });
        self.held[index].twin.value = value;
    }

    /// Changes, replaces or takes out what an object owns.
    async fn change_child(&mut self, index: usize) {
        let Some(found) = self.borrow(index).await else { return };
        let (world, node, value) = (self.world(), self.here.node, self.new_value());
        match (found.child, self.random.u8(..3)) {
            (Some(child), 0) => {
                let word = match self.here.write(child, BlockRights::Owner).await {
                    Ok(word) => word,
                    Err(failure) => return self.failed(&self.held[index].clone(), failure),
                };
                let before = world.node(node).borrowed(word);
                if Some(before.value) != self.held[index].twin.child {
                    world.broken(node, format!("{before:?} is owned by {:?}", self.held[index]));
                }
                self.put(index, Contents { child: Some(word), ..found });
                world.node(node).write_here(word, Contents { value, child: None });
                self.held[index].twin.child = Some(value);
            }
            (Some(child), 1) => {
                self.put(index, Contents { child: None, ..found });
                let twin = Twin { value: self.held[index].twin.child.take().expect("it has one"), child: None };
                self.held.push(Held { place: LoanPlace::lent(child), access: Access::Owned, may_own: false, twin });
            }
            (old, _) => {
                let child = Some(world.node(node).alloc(Contents { value, child: None }));
                self.put(index, Contents { child, ..found });
                self.held[index].twin.child = Some(value);
                old.into_iter().for_each(|old| free(&world, node, old, true));
            }
        }
    }

    /// Returns whether the task was lent something of what a lock owns.
    fn has_borrowed_under_lock(&self) -> bool {
        self.here.borrowed().any(|root| root.lock().is_some())
    }

    async fn step(&mut self) {
        // Who has borrowed under a lock reads and lends further; who has none may use one.
        if self.has_borrowed_under_lock() {
            return match self.random.u8(..3) {
                0 if self.depth > 0 => self.scope().await,
                _ => self.look().await,
            };
        }
        let channels = self.here.world.all_channels();
        if !channels.is_empty() && self.random.u8(..3) == 0 {
            let word = channels[self.random.usize(..channels.len())];
            return if self.random.bool() { self.send(word).await } else { self.receive(word).await };
        }
        let locks = self.here.world.all_locks();
        if !locks.is_empty() && self.random.bool() {
            let word = locks[self.random.usize(..locks.len())];
            return if self.random.bool() { self.write_locked(word).await } else { self.read_locked(word).await };
        }
        let what = self.random.u8(..10);
        let Some(index) = (!self.held.is_empty()).then(|| self.random.usize(..self.held.len())) else {
            return self.make(self.random.clone().bool());
        };
        let is_writable = self.held[index].is_writable();
        match what {
            0..3 if is_writable => self.write(index).await,
            3..6 if is_writable && self.held[index].may_own => self.change_child(index).await,
            6 | 7 if self.depth > 0 => self.scope().await,
            8 if self.held[index].access == Access::Owned && self.held.len() > 1 => self.hand_on(index).await,
            9 if self.held.len() < 5 => {
                let may_own = self.random.bool();
                self.make(may_own);
            }
            _ => {
                let for_so_long = self.random.u64(..200);
                self.check(index, for_so_long).await;
            }
        }
    }

    /// Reads something for a while.
    async fn look(&mut self) {
        let for_so_long = self.random.u64(..1000);
        match self.held.len() {
            0 => self.here.world.clone().pause(for_so_long).await,
            len => {
                let index = self.random.usize(..len);
                self.check(index, for_so_long).await;
            }
        }
    }

    /// Checks why a channel could not be used. One that nobody knows is gone with its home.
    fn failed_channel(&self, failure: Failure) {
        let world = &self.here.world;
        let is_allowed = match failure {
            Failure::Silent => world.plan.loss > 0 || !world.plan.faults.is_empty(),
            Failure::NodeLost(_) => true,
            Failure::Lost | Failure::Stale | Failure::Borrowed => false,
        };
        if !is_allowed {
            world.broken(self.here.node, format!("{failure:?}: a channel"));
        }
    }

    /// Sends an object that the task owns.
    async fn send(&mut self, word: OwnerWord) {
        let owned = |held: &Held| held.access == Access::Owned && !held.word().is_lost();
        let Some(index) = self.held.iter().position(owned) else { return };
        let (held, for_so_long) = (self.held.swap_remove(index), self.random.u64(..500));
        match self.here.send(word, held, for_so_long).await {
            Ok(kept) => self.held.extend(kept),
            // It is nobody's.
            Err(failure) => self.failed_channel(failure),
        }
    }

    /// Receives an object, and looks at it.
    async fn receive(&mut self, word: OwnerWord) {
        let for_so_long = self.random.u64(..500);
        match self.here.receive(word, for_so_long).await {
            Ok(Some(held)) => {
                self.held.push(held);
                self.check(self.held.len() - 1, 0).await;
            }
            Ok(None) => {}
            Err(failure) => self.failed_channel(failure),
        }
    }

    /// Receives what is left in all channels, and drops it.
    async fn end_channels(&mut self) {
        let world = self.world();
        let sent = world.sent_values();
        for word in world.all_channels() {
            // Some answers say only that a sender is gone, or that a home was silent.
            let mut empty = 0;
            while empty < 8 {
                let before = self.held.len();
                self.receive(word).await;
                empty = if self.held.len() > before { 0 } else { empty + 1 };
            }
        }
        if world.keeps_backups() || world.plan.faults.is_empty() {
            world.check_arrivals(&sent);
        }
        self.held.drain(..).for_each(|held| free(&world, FIRST, held.word(), true));
        if world.plan.faults.is_empty() {
            world.all_channels().into_iter().for_each(|word| drop_channel(&world, FIRST, word));
        }
    }

    /// Checks why a lock could not be taken, or what is under it not be used.
    fn failed_lock(&self, word: OwnerWord, failure: Failure) {
        let world = &self.here.world;
        let is_allowed = match failure {
            Failure::Silent => world.plan.loss > 0 || !world.plan.faults.is_empty(),
            Failure::NodeLost(_) => !world.keeps_backups() || !world.is_known(word),
            Failure::Lost => world.may_be_lost(word),
            // Something was lent while the lock was held, so that the task may have borrowed what it owns.
            Failure::Borrowed => self.here.unused.get(&BorrowRoot::of_lock(word)) == Some(&true),
            Failure::Stale => false,
        };
        if !is_allowed {
            world.broken(self.here.node, format!("{failure:?}: lock {word:?}"));
        }
    }

    /// Changes a value under a lock, and what it owns.
    async fn write_locked(&mut self, word: OwnerWord) {
        let (world, node) = (self.world(), self.here.node);
        let mut hold = match self.here.lock(word, LockMode::Exclusive).await {
            Ok(hold) => hold,
            Err(failure) => return self.failed_lock(word, failure),
        };
        let mut owned = world.owned_under(word, hold.value.value);
        let [value, inner] = [self.new_value(), self.new_value()];
        match (hold.value.child, self.random.u8(..4)) {
            (Some(child), 0 | 1) => match self.here.write(child, BlockRights::Owner).await {
                Ok(child) => {
                    let before = world.node(node).borrowed(child);
                    if Some(before.value) != owned {
                        world.broken(node, format!("{before:?} is owned under {word:?}"));
                    }
                    world.node(node).write_here(child, Contents { value: inner, child: None });
                    (hold.value.child, owned) = (Some(child), Some(inner));
                }
                Err(failure) => self.failed_lock(word, failure),
            },
            (Some(child), 2) => {
                free(&world, node, child, true);
                (hold.value.child, owned) = (None, None);
            }
            (None, _) => {
                let child = world.node(node).alloc(Contents { value: inner, child: None });
                (hold.value.child, owned) = (Some(child), Some(inner));
            }
            _ => {}
        }
        let for_so_long = self.random.u64(..100);
        world.pause(for_so_long).await;
        hold.value.value = value;
        self.here.unlock(hold, owned);
    }

    /// Reads a value under a lock, and lends what it owns further.
    async fn read_locked(&mut self, word: OwnerWord) {
        let hold = match self.here.lock(word, LockMode::Shared).await {
            Ok(hold) => hold,
            Err(failure) => return self.failed_lock(word, failure),
        };
        let owned = self.here.world.owned_under(word, hold.value.value);
        if let Some((child, value)) = hold.value.child.zip(owned) {
            let (place, twin) = (LoanPlace::lent(child), Twin { value, child: None });
            let mut here = Here::new(&self.here.world, self.here.node);
            here.roots.insert(BorrowRoot::of_lock(word));
            let held = vec![Held { place, access: Access::Shared, may_own: false, twin }];
            let mut reader = Task { here, random: self.random.fork(), held, depth: self.depth, unused: None };
            if reader.depth > 0 && reader.random.bool() {
                // Tasks of this scope are borrowers as well.
                Box::pin(reader.scope()).await;
            }
            reader.look().await;
        }
        self.here.unlock(hold, None);
    }

    /// Hands an object to a task that owns it, and waits for what that gives back; or drops it.
    async fn hand_on(&mut self, index: usize) {
        let held = self.held.swap_remove(index);
        if self.random.bool() || self.depth == 0 || held.word().is_lost() {
            return free(&self.world(), self.here.node, held.word(), true);
        }
        let to = self.random.u16(..NODES);
        let depth = self.depth - 1;
        let Some(task) = self.here.spawn(to, vec![held.clone()], None, depth).await else {
            return self.held.push(held);
        };
        if let Ok((outcome, _)) = task.wait(&self.world()).await {
            self.held.extend(outcome.given);
        }
    }

    /// Runs tasks that borrow what this one has, and waits for them.
    async fn scope(&mut self) {
        let world = self.world();
        let unused = self.unused_lock(true).await;
        let mut tasks: Vec<(u16, Vec<Held>)> =
            (0..self.random.usize(1..4)).map(|_| (self.random.u16(..NODES), Vec::new())).collect();
        let mut open: BTreeMap<LoanNumber, (usize, OwnerWord)> = BTreeMap::new();
        for (index, held) in self.held.iter().enumerate().filter(|(_, held)| !held.word().is_lost()) {
            let lend = |access| Held { place: LoanPlace::lent(held.word()), access, ..held.clone() };
            if self.random.u8(..5) < 3 && held.access != Access::Shared {
                let before = world.node(self.here.node).number() & 0xffff_ffff;
                let mut number = LoanNumber::new(self.here.node, before);
                if let Access::Mutable(outer) = held.access
                    && world.has(Rule::LoansOfLoansKeepBlocks)
                {
                    number = number.of_further_loan(outer, held.place, self.here.node);
                }
                open.insert(number, (index, held.word()));
                let task = self.random.usize(..tasks.len());
                tasks[task].1.push(lend(Access::Mutable(number)));
            } else {
                tasks.iter_mut().filter(|_| self.random.bool()).for_each(|(_, lent)| lent.push(lend(Access::Shared)));
            }
        }
        let unused = match unused {
            None => self.unused_lock(false).await,
            held => held,
        };
        let depth = self.depth.saturating_sub(1);
        let mut started: Vec<(Slot<TaskEnd>, Vec<LoanNumber>, BorrowRoot)> = Vec::new();
        for (to, lent) in tasks {
            let number = |held: &Held| match held.access {
                Access::Mutable(number) => Some(number),
                _ => None,
            };
            let numbers = lent.iter().filter_map(number).collect();
            let root = BorrowRoot::of_task(self.here.node, world.node(self.here.node).number() & 0xffff_ffff);
            let root = world.root_of(root);
            started.extend(self.here.spawn(to, lent, Some(root), depth).await.map(|task| (task, numbers, root)));
        }
        if let Some(hold) = unused {
            self.end_unused_lock(hold);
        }
        for (task, numbers, root) in started {
            match task.wait(&world).await {
                Ok((outcome, loans)) => {
                    for (number, used) in loans {
                        if let Some((index, lent)) = open.remove(&number) {
                            self.settle(index, lent, used, outcome.twins.get(&number).copied());
                        }
                    }
                    self.held.extend(outcome.given);
                }
                Err(dead) => {
                    if world.has(Rule::ScopesOutlastBorrowers) {
                        self.here.outlast_borrowers(dead, root).await;
                    }
                    for number in numbers {
                        let Some((index, lent)) = open.remove(&number) else { continue };
                        let may_own = self.held[index].may_own && world.has(Rule::OwnersOfOthersAreLost);
                        self.lose(index, word_of_lost_loan(lent, true, may_own));
                    }
                }
            }
        }
    }

    /// Takes a lock for reading, or none, whose value lends nothing to the scope. If that is before the loans of the
    /// scope, nobody knows but the task.
    async fn unused_lock(&mut self, is_before: bool) -> Option<Hold> {
        let world = self.world();
        let locks = world.all_locks();
        if locks.is_empty() || !world.plan.has_unused_locks || self.has_borrowed_under_lock() || self.random.bool() {
            return None;
        }
        let word = locks[self.random.usize(..locks.len())];
        match self.here.lock(word, LockMode::Shared).await {
            Ok(hold) => {
                let root = world.root_of(BorrowRoot::of_lock(word));
                if (is_before || !world.has(Rule::LaterLocksAreNotLent)) && self.here.roots.insert(root) {
                    self.here.unused.insert(root, is_before);
                    self.unused = Some(root);
                }
                Some(hold)
            }
            Err(failure) => {
                self.failed_lock(word, failure);
                None
            }
        }
    }

    /// Gives a lock back from which nothing was lent.
    fn end_unused_lock(&mut self, hold: Hold) {
        if let Some(root) = self.unused.take() {
            self.here.unused.remove(&root);
            self.here.roots.remove(&root);
        }
        self.here.unlock(hold, None);
    }

    /// Takes a loan back.
    fn settle(&mut self, index: usize, lent: OwnerWord, used: Option<LoanPlace>, twin: Option<Twin>) {
        let (world, node) = (self.world(), self.here.node);
        let Some(mut used) = used else { return self.lose(index, word_of_lost_loan(lent, false, true)) };
        let held = &mut self.held[index];
        held.twin = twin.unwrap_or(held.twin);
        if !world.has(Rule::WordsComeHome) {
            used.word = lent;
        }
        let left = match held.access {
            Access::Mutable(number) => {
                let left = held.place.take_back(used);
                self.here.loans.insert(number, Some(held.place));
                left
            }
            _ => {
                held.place = LoanPlace::lent(used.word);
                used.end()
            }
        };
        if let Some(left) = left.filter(|_| world.has(Rule::LentBlocksStay)) {
            free(&world, node, left, false);
        }
    }

    /// Gives an owner the word that it has if its loan does not come back.
    fn lose(&mut self, index: usize, word: OwnerWord) {
        let held = &mut self.held[index];
        held.place.word = word;
        if word.is_lost()
            && let Access::Mutable(number) = held.access
        {
            self.here.loans.insert(number, None);
        }
    }

    /// Ends the task: drops or gives back what it owns.
    fn outcome(&mut self) -> Outcome {
        let mut outcome = Outcome::default();
        for held in std::mem::take(&mut self.held) {
            match held.access {
                Access::Mutable(number) => drop(outcome.twins.insert(number, held.twin)),
                Access::Owned if self.random.u8(..3) > 0 => outcome.given.push(held),
                Access::Owned => free(&self.world(), self.here.node, held.word(), true),
                Access::Shared => {}
            }
        }
        outcome
    }
}
