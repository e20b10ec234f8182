//! Scopes that read copies while these leave the table.
//!
//! Danger: a reference into memory that is free; copies that stay although no scope reads them.
//!
//! Cache, flights and the copies of a scope are the real ones (`src/copies.rs`). Copies do not leave by epochs: a scope is
//! one of their owners. A weak reference stands for what a task has borrowed. Each counterpart with one rule off fails.

use super::copies::{ObjectCopy, ScopeCopies};
use super::models::check;
use super::{BYTES, Node, key};
use loom::sync::atomic::Ordering::SeqCst;
use loom::thread;
use std::sync::{Arc, Weak};

/// Rule that a scope does not keep.
#[derive(Clone, Copy, PartialEq)]
enum Missing {
    Nothing,
    /// A scope keeps the copy, and not its address only.
    Copy,
    /// A scope keeps the copy that it was told of, and does not look for it once more.
    SameCopy,
    /// A scope within another one has copies of its own.
    OwnCopies,
    /// A scope that ends, or begins anew, keeps nothing.
    End,
}

/// Scope of a task.
struct Scope<'n> {
    node: &'n Node,
    copies: ScopeCopies,
    missing: Missing,
}

/// A borrow of a copy.
struct Borrowed(Weak<ObjectCopy>);

impl Borrowed {
    fn read(&self) {
        assert!(self.0.upgrade().is_some(), "a reference into memory that is free");
    }
}

impl<'n> Scope<'n> {
    fn new(node: &'n Node, missing: Missing) -> Scope<'n> {
        Scope { node, copies: ScopeCopies::default(), missing }
    }

    /// Borrows the object, as `Here::reading` does.
    fn borrow(&self) -> Borrowed {
        if let Some(kept) = self.copies.with(key(), Arc::downgrade) {
            return Borrowed(kept);
        }
        let copy = self.node.get();
        let borrowed = Borrowed(Arc::downgrade(&copy));
        match self.missing {
            Missing::Copy => {}
            Missing::SameCopy => {
                drop(copy);
                self.copies.keep(key(), self.node.get());
            }
            _ => self.copies.keep(key(), copy),
        }
        borrowed
    }

    /// Nothing that was borrowed is borrowed any more.
    fn renew(&mut self) {
        if self.missing != Missing::End {
            self.copies.clear();
        }
    }
}

/// A task reads in a scope, and in one within it, while another one does the same and copies leave.
fn read_in_scopes(missing: Missing) {
    check(2, move || {
        let node = Node::new();
        let leave = {
            let node = node.clone();
            thread::spawn(move || node.copies.shrink(0))
        };
        let other = {
            let node = node.clone();
            thread::spawn(move || {
                let scope = Scope::new(&node, missing);
                scope.borrow().read();
            })
        };
        let mut scope = Scope::new(&node, missing);
        let borrowed = scope.borrow();
        if missing == Missing::OwnCopies {
            scope.borrow().read();
            scope.renew();
        } else {
            let mut inner = Scope::new(&node, missing);
            let within = inner.borrow();
            within.read();
            inner.renew();
            // What is read again is fetched again, or found.
            inner.borrow().read();
        }
        borrowed.read();
        leave.join().expect("copies leave");
        other.join().expect("it reads");
        node.copies.shrink(0);
        borrowed.read();
        assert!(node.copies.held_bytes() >= BYTES as u64, "the scope keeps it");
        scope.renew();
        assert_eq!((node.copies.bytes(), node.copies.held_bytes()), (0, 0), "nobody reads it");
        assert!(node.fetches.load(SeqCst) <= 4);
    });
}

#[test]
fn what_a_scope_has_read_stays_until_it_ends() {
    read_in_scopes(Missing::Nothing);
}

#[test]
#[should_panic(expected = "memory that is free")]
fn it_would_be_free_if_a_scope_kept_its_address_only() {
    read_in_scopes(Missing::Copy);
}

#[test]
#[should_panic(expected = "memory that is free")]
fn it_would_be_free_if_a_scope_looked_for_it_once_more() {
    read_in_scopes(Missing::SameCopy);
}

#[test]
#[should_panic(expected = "memory that is free")]
fn it_would_be_free_if_a_scope_within_ended_it() {
    read_in_scopes(Missing::OwnCopies);
}

#[test]
#[should_panic(expected = "nobody reads it")]
fn it_would_stay_if_a_scope_did_not_let_it_go() {
    read_in_scopes(Missing::End);
}
