//! The open scopes of one thread, and when each began.
//!
//! Most threads have one at a time, which costs two stores; further ones are in a table.

use core::cell::{Cell, RefCell};
use core::ptr::NonNull;

/// State of an open scope.
pub(crate) struct ScopeState {
    /// Epoch in which the scope began.
    epoch: Cell<u64>,
    /// True if the scope has given out references.
    pub(crate) used: Cell<bool>,
    /// True if the scope has given out an address, perhaps to an operation that is not over. Until
    /// then it can be renewed at any moment, and nobody notices.
    pub(crate) touched: Cell<bool>,
    /// Number of operations that need several places at a time, and keep what they have found.
    pub(crate) holds: Cell<u32>,
    is_open: Cell<bool>,
    /// Number of pages that are under way for the scope: when they land, they stay until it has
    /// seen them.
    pub(crate) awaited: Cell<u32>,
    /// Number of tasks that hold the scope and wait for room.
    hungry: Cell<u32>,
    /// Index of the scope in the table; `NONE` for the first one.
    number: u32,
    /// Neighbours in the list of open scopes: those that began before and after this one.
    older: Cell<u32>,
    younger: Cell<u32>,
}

/// Index that stands for no entry of the table.
const NONE: u32 = u32::MAX;

/// All scopes of a thread.
pub(crate) struct Scopes {
    first: ScopeState,
    /// Number of open scopes in the table.
    more: Cell<u32>,
    /// Number of open scopes of tasks that wait for room.
    hungry: Cell<u32>,
    table: RefCell<ScopeTable>,
    /// Number of scopes that were looked at, for tests that count the work.
    #[cfg(test)]
    pub(crate) looks: Cell<u64>,
}

struct ScopeTable {
    /// Entries of the table; each stays where it is as long as the table exists.
    #[expect(clippy::vec_box, reason = "scopes know their addresses")]
    all: Vec<Box<ScopeState>>,
    free: Vec<u32>,
    /// Ends of the list of open scopes, which is in the order in which they began.
    oldest: u32,
    youngest: u32,
}

impl ScopeState {
    fn new(number: u32) -> ScopeState {
        ScopeState {
            epoch: Cell::new(0),
            used: Cell::new(false),
            touched: Cell::new(false),
            holds: Cell::new(0),
            is_open: Cell::new(false),
            awaited: Cell::new(0),
            hungry: Cell::new(0),
            number,
            older: Cell::new(NONE),
            younger: Cell::new(NONE),
        }
    }

    pub(crate) fn began(&self) -> u64 {
        self.epoch.get()
    }

    /// Checks whether renewing the scope would lose something.
    pub(crate) fn keeps(&self) -> bool {
        self.is_open.get() && (self.is_used() || self.touched.get() || self.awaited.get() > 0)
    }

    /// Checks whether references were given out, or an operation keeps what it has found.
    pub(crate) fn is_used(&self) -> bool {
        self.used.get() || self.holds.get() > 0
    }

    /// Checks whether a task that holds the scope waits for room.
    pub(crate) fn is_hungry(&self) -> bool {
        self.hungry.get() > 0
    }

    #[inline]
    fn open(&self, epoch: u64) {
        self.epoch.set(epoch);
        self.is_open.set(true);
    }

    #[inline]
    fn close(&self) {
        self.used.set(false);
        self.touched.set(false);
        self.holds.set(0);
        self.is_open.set(false);
        self.awaited.set(0);
    }
}

impl Default for Scopes {
    fn default() -> Scopes {
        let table = ScopeTable { all: Vec::new(), free: Vec::new(), oldest: NONE, youngest: NONE };
        Scopes {
            first: ScopeState::new(NONE),
            more: Cell::new(0),
            hungry: Cell::new(0),
            table: RefCell::new(table),
            #[cfg(test)]
            looks: Cell::new(0),
        }
    }
}

impl Scopes {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.more.get() + u32::from(self.first.is_open.get())
    }

    /// Opens a scope in this epoch. Epochs never go back.
    #[inline]
    pub(crate) fn enter(&self, epoch: u64) -> &ScopeState {
        if self.first.is_open.get() {
            return self.enter_more(epoch);
        }
        self.first.open(epoch);
        &self.first
    }

    fn enter_more(&self, epoch: u64) -> &ScopeState {
        self.more.set(self.more.get() + 1);
        let mut table = self.table.borrow_mut();
        let number = table.free.pop().unwrap_or_else(|| {
            let number = table.all.len() as u32;
            table.all.push(Box::new(ScopeState::new(number)));
            number
        });
        table.append(number);
        drop(table);
        let open = self.at(number);
        open.open(epoch);
        open
    }

    fn at(&self, number: u32) -> &ScopeState {
        let open = NonNull::from(&*self.table.borrow().all[number as usize]);
        // SAFETY: it stays where it is as long as `self`.
        unsafe { open.as_ref() }
    }

    /// Closes a scope. Returns the epoch of the oldest that is left.
    #[inline]
    pub(crate) fn leave(&self, open: &ScopeState) -> Option<u64> {
        open.close();
        if open.is_hungry() {
            // The task was forgotten (`mem::forget`).
            open.hungry.set(0);
            self.hungry.set(self.hungry.get() - 1);
        }
        if open.number != NONE {
            self.more.set(self.more.get() - 1);
            let mut table = self.table.borrow_mut();
            table.remove(open.number);
            table.free.push(open.number);
        }
        self.oldest()
    }

    /// Renews a scope. Returns the epoch of the oldest.
    pub(crate) fn renew(&self, open: &ScopeState, epoch: u64) -> u64 {
        open.used.set(false);
        open.touched.set(false);
        self.set_epoch(open, epoch);
        self.oldest().unwrap_or(epoch)
    }

    fn set_epoch(&self, open: &ScopeState, epoch: u64) {
        open.epoch.set(epoch);
        if open.number != NONE {
            let mut table = self.table.borrow_mut();
            table.remove(open.number);
            table.append(open.number);
        }
    }

    /// Renews the scopes that keep nothing near, from the oldest on up to one that keeps something.
    /// Younger ones are in nobody's way before that one ends. Returns the epoch of the oldest.
    pub(crate) fn renew_idle(&self, epoch: u64) -> Option<u64> {
        let mut end = epoch;
        if self.first.keeps() {
            end = end.min(self.first.epoch.get());
        } else if self.first.is_open.get() {
            self.first.epoch.set(epoch);
        }
        while let Some(open) = self.next(None) {
            self.count_look();
            if open.epoch.get() >= end || open.keeps() {
                break;
            }
            self.set_epoch(open, epoch);
        }
        self.oldest()
    }

    /// Checks whether an open scope began in this epoch or before, keeps pages near, and `fits`.
    pub(crate) fn any_keeps(&self, epoch: u64, fits: impl Fn(&ScopeState) -> bool) -> bool {
        let keeps = |open: &ScopeState| {
            self.count_look();
            open.epoch.get() <= epoch && open.keeps() && fits(open)
        };
        let table = core::iter::successors(self.next(None), |open| self.next(Some(open)));
        keeps(&self.first) || table.take_while(|open| open.epoch.get() <= epoch).any(keeps)
    }

    /// Checks whether an open scope of which no task waits for room began in this epoch or before
    /// and keeps pages near.
    pub(crate) fn any_keeps_and_goes_on(&self, epoch: u64) -> bool {
        self.hungry.get() < self.len() && self.any_keeps(epoch, |open| !open.is_hungry())
    }

    /// Counts a task that holds the scope and begins (`is`) or stops to wait for room.
    pub(crate) fn set_hungry(&self, open: &ScopeState, is: bool) {
        let before = open.hungry.get();
        open.hungry.set(if is { before + 1 } else { before - 1 });
        match (before, is) {
            (0, true) => self.hungry.set(self.hungry.get() + 1),
            (1, false) => self.hungry.set(self.hungry.get() - 1),
            _ => {}
        }
    }

    /// Renews the only open scope, unless it has given out references. Those may exist because code
    /// that wakes tasks while their thread waits for room is code of users, too. Returns the epoch
    /// of the oldest.
    pub(crate) fn renew_only(&self, epoch: u64) -> Option<u64> {
        if self.len() == 1 {
            let only = if self.first.is_open.get() { Some(&self.first) } else { self.next(None) };
            only.filter(|open| !open.is_used()).map(|open| self.renew(open, epoch));
        }
        self.oldest()
    }

    /// Returns the next younger scope of the table; without `open`, its oldest.
    fn next(&self, open: Option<&ScopeState>) -> Option<&ScopeState> {
        let number = if self.more.get() == 0 {
            NONE
        } else {
            open.map_or_else(|| self.table.borrow().oldest, |open| open.younger.get())
        };
        (number != NONE).then(|| self.at(number))
    }

    fn count_look(&self) {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
    }

    #[inline]
    fn oldest(&self) -> Option<u64> {
        let first = self.first.is_open.get().then(|| self.first.epoch.get());
        if self.more.get() == 0 {
            return first;
        }
        let more = self.next(None).map(|open| open.epoch.get());
        match (first, more) {
            (Some(first), Some(more)) => Some(first.min(more)),
            (first, more) => first.or(more),
        }
    }
}

impl ScopeTable {
    fn append(&mut self, number: u32) {
        let open = &self.all[number as usize];
        open.older.set(self.youngest);
        open.younger.set(NONE);
        match self.youngest {
            NONE => self.oldest = number,
            before => self.all[before as usize].younger.set(number),
        }
        self.youngest = number;
    }

    fn remove(&mut self, number: u32) {
        let open = &self.all[number as usize];
        let (older, younger) = (open.older.get(), open.younger.get());
        match older {
            NONE => self.oldest = younger,
            older => self.all[older as usize].younger.set(younger),
        }
        match younger {
            NONE => self.youngest = older,
            younger => self.all[younger as usize].older.set(older),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a record that shows an epoch younger than that of a scope that is open.
    use super::*;

    #[test]
    fn only_a_scope_without_references_begins_anew_while_somebody_waits() {
        let scopes = Scopes::default();
        let open = scopes.enter(1);
        assert_eq!(scopes.renew_only(2), Some(2));
        open.used.set(true);
        assert_eq!(scopes.renew_only(3), Some(2));
        open.used.set(false);
        open.holds.set(1);
        assert_eq!(scopes.renew_only(3), Some(2));
        open.holds.set(0);
        let other = scopes.enter(3);
        assert_eq!(scopes.renew_only(4), Some(2));
        scopes.leave(other);
        assert_eq!(scopes.renew_only(4), Some(4));
    }

    #[test]
    fn the_oldest_scope_agrees_with_a_list() {
        let scopes = Scopes::default();
        let mut twin: Vec<(&ScopeState, u64)> = Vec::new();
        let (mut rng, mut epoch) = (fastrand::Rng::with_seed(7), 1);
        for step in 0..20_000 {
            let random = rng.usize(..);
            epoch += (random / 8 % 3) as u64 / 2;
            let oldest = match random % 8 {
                0..=2 => {
                    let open = scopes.enter(epoch);
                    open.used.set((random / 64).is_multiple_of(2));
                    twin.push((open, epoch));
                    scopes.oldest()
                }
                3..=5 if !twin.is_empty() => {
                    let (open, _) = twin.swap_remove(random / 64 % twin.len());
                    scopes.leave(open)
                }
                6 if !twin.is_empty() => {
                    let at = random / 64 % twin.len();
                    twin[at].1 = epoch;
                    Some(scopes.renew(twin[at].0, epoch))
                }
                _ => {
                    let keeps = twin.iter().filter(|(open, _)| open.used.get()).map(|(_, began)| *began).min();
                    let oldest = scopes.renew_idle(epoch);
                    assert_eq!(oldest, keeps.or((!twin.is_empty()).then_some(epoch)), "step {step}");
                    for (open, began) in &mut twin {
                        let now = open.began();
                        assert!(now == *began || now == epoch && !open.used.get(), "step {step}");
                        *began = now;
                    }
                    oldest
                }
            };
            assert_eq!(oldest, twin.iter().map(|(_, began)| *began).min(), "step {step}");
            assert_eq!(scopes.len() as usize, twin.len());
            let before = epoch.saturating_sub(random as u64 % 4);
            let keeps = twin.iter().any(|(open, began)| open.used.get() && *began <= before);
            assert_eq!(scopes.any_keeps(before, |_| true), keeps, "step {step}");
        }
    }
}
