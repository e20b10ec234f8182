//! The open scopes of one thread, and when each began.
//!
//! Most threads have one at a time, which costs two stores; others are in a table.

use core::cell::{Cell, RefCell};
use core::ptr::NonNull;
use std::collections::VecDeque;

/// An open scope.
pub(crate) struct Open {
    /// When it began.
    epoch: Cell<u64>,
    /// It has given out references.
    pub(crate) used: Cell<bool>,
    /// Something was looked up with it, perhaps by an operation that is not over and has seen addresses. Until then it can
    /// begin anew at any moment, and nobody notices.
    pub(crate) touched: Cell<bool>,
    is_open: Cell<bool>,
    /// Pages that are under way for it: when they land, they shall stay until it has seen them.
    pub(crate) awaited: Cell<u32>,
    /// Tasks that hold it and wait for room.
    pub(crate) hungry: Cell<u32>,
    /// Its place in the table.
    number: u32,
}

/// All of them.
pub(crate) struct Scopes {
    first: Open,
    /// Those in the table that are open.
    more: Cell<u32>,
    table: RefCell<Table>,
}

#[derive(Default)]
struct Table {
    /// Each stays where it is as long as this exists.
    #[expect(clippy::vec_box, reason = "scopes know their addresses")]
    all: Vec<Box<Open>>,
    free: Vec<u32>,
    /// The epochs in which they began and how many did in each, oldest first. The first is never without scopes.
    began: VecDeque<(u64, u32)>,
}

impl Open {
    fn new(number: u32) -> Open {
        Open {
            epoch: Cell::new(0),
            used: Cell::new(false),
            touched: Cell::new(false),
            is_open: Cell::new(false),
            awaited: Cell::new(0),
            hungry: Cell::new(0),
            number,
        }
    }

    pub(crate) fn began(&self) -> u64 {
        self.epoch.get()
    }

    /// Something would be lost if it began anew.
    pub(crate) fn keeps(&self) -> bool {
        self.is_open.get() && (self.used.get() || self.touched.get() || self.awaited.get() > 0)
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
        self.is_open.set(false);
        self.awaited.set(0);
        self.hungry.set(0);
    }
}

impl Default for Scopes {
    fn default() -> Scopes {
        Scopes { first: Open::new(u32::MAX), more: Cell::new(0), table: RefCell::default() }
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

    /// One more. Epochs never go back.
    #[inline]
    pub(crate) fn enter(&self, epoch: u64) -> &Open {
        if self.first.is_open.get() {
            return self.enter_more(epoch);
        }
        self.first.open(epoch);
        &self.first
    }

    fn enter_more(&self, epoch: u64) -> &Open {
        self.more.set(self.more.get() + 1);
        let mut table = self.table.borrow_mut();
        let number = table.free.pop().unwrap_or_else(|| {
            let number = table.all.len() as u32;
            table.all.push(Box::new(Open::new(number)));
            number
        });
        table.count_in(epoch);
        let open = NonNull::from(&*table.all[number as usize]);
        // SAFETY: it stays where it is as long as `self`.
        let open = unsafe { open.as_ref() };
        open.open(epoch);
        open
    }

    /// One less; the epoch of the oldest that is left.
    #[inline]
    pub(crate) fn leave(&self, open: &Open) -> Option<u64> {
        open.close();
        if open.number != u32::MAX {
            self.more.set(self.more.get() - 1);
            let mut table = self.table.borrow_mut();
            table.free.push(open.number);
            table.count_out(open.epoch.get());
        }
        self.oldest()
    }

    /// It begins anew; the epoch of the oldest.
    pub(crate) fn renew(&self, open: &Open, epoch: u64) -> u64 {
        open.used.set(false);
        open.touched.set(false);
        self.set_epoch(open, epoch);
        self.oldest().unwrap_or(epoch)
    }

    fn set_epoch(&self, open: &Open, epoch: u64) {
        let before = open.epoch.replace(epoch);
        if open.number != u32::MAX {
            let mut table = self.table.borrow_mut();
            table.count_in(epoch);
            table.count_out(before);
        }
    }

    /// Those that keep nothing near begin anew; the epoch of the oldest.
    pub(crate) fn renew_idle(&self, epoch: u64) -> Option<u64> {
        self.each(|open| {
            if open.is_open.get() && !open.keeps() && open.epoch.get() < epoch {
                self.set_epoch(open, epoch);
            }
        });
        self.oldest()
    }

    /// Is one open that keeps pages near and fits?
    pub(crate) fn any_keeps(&self, fits: impl Fn(&Open) -> bool) -> bool {
        let mut found = false;
        self.each(|open| found |= open.keeps() && fits(open));
        found
    }

    /// The only one that is open, renewed; the epoch of the oldest.
    pub(crate) fn renew_only(&self, epoch: u64) -> Option<u64> {
        if self.len() == 1 {
            self.each(|open| {
                if open.is_open.get() {
                    self.renew(open, epoch);
                }
            });
        }
        self.oldest()
    }

    fn each(&self, mut action: impl FnMut(&Open)) {
        action(&self.first);
        let count = if self.more.get() > 0 { self.table.borrow().all.len() } else { 0 };
        for number in 0..count {
            let open = NonNull::from(&*self.table.borrow().all[number]);
            // SAFETY: as in `enter_more`.
            action(unsafe { open.as_ref() });
        }
    }

    #[inline]
    fn oldest(&self) -> Option<u64> {
        let first = self.first.is_open.get().then(|| self.first.epoch.get());
        if self.more.get() == 0 {
            return first;
        }
        let more = self.table.borrow().began.front().map(|(epoch, _)| *epoch);
        match (first, more) {
            (Some(first), Some(more)) => Some(first.min(more)),
            (first, more) => first.or(more),
        }
    }
}

impl Table {
    fn count_in(&mut self, epoch: u64) {
        match self.began.back_mut() {
            Some((newest, count)) if *newest == epoch => *count += 1,
            _ => self.began.push_back((epoch, 1)),
        }
    }

    fn count_out(&mut self, epoch: u64) {
        let at = match self.began.back() {
            Some((newest, _)) if *newest == epoch => self.began.len() - 1,
            _ => match self.began.binary_search_by_key(&epoch, |(epoch, _)| *epoch) {
                Ok(at) => at,
                Err(_) => unreachable!("a scope ends that did not begin"),
            },
        };
        self.began[at].1 -= 1;
        while self.began.front().is_some_and(|(_, count)| *count == 0) {
            self.began.pop_front();
        }
        // Epochs without scopes, between others.
        if self.began.len() > 2 * (self.all.len() - self.free.len()) + 8 {
            self.began.retain(|(_, count)| *count > 0);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a record that shows an epoch younger than that of a scope that is open.
    use super::*;

    #[test]
    fn the_oldest_is_what_a_list_says() {
        let scopes = Scopes::default();
        let mut twin: Vec<(&Open, u64)> = Vec::new();
        let (mut state, mut epoch) = (7u64, 1);
        for step in 0..20_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let random = (state >> 33) as usize;
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
                    twin.iter_mut().filter(|(open, _)| !open.used.get()).for_each(|(_, began)| *began = epoch);
                    scopes.renew_idle(epoch)
                }
            };
            assert_eq!(oldest, twin.iter().map(|(_, began)| *began).min(), "step {step}");
            assert_eq!(scopes.len() as usize, twin.len());
            assert!(scopes.table.borrow().began.len() <= 2 * twin.len() + 9);
        }
    }
}
