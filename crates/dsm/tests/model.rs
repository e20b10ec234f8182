//! Copies that several threads want at the same time, in all interleavings, with loom. Scopes that read them, and locks,
//! have models beside this one.
//!
//! Danger: a version that is asked for twice; a thread, or a future, that nobody wakes when the copy is there; a
//! thread that waits for one whose fetch has failed; bytes of copies that are counted for ever.
//!
//! The cache and its flights are the real ones (`src/copies.rs`, on loom's locks). What fetches a copy is written
//! again here. The counterpart with one mistake fails.

#[path = "../src/copies.rs"]
#[allow(dead_code, reason = "the models use a part")]
mod copies;
#[path = "model/locks.rs"]
mod lock_model;
#[path = "../../core/tests/models/mod.rs"]
mod models;
#[path = "model/scopes.rs"]
mod scope_model;
#[path = "../src/thin.rs"]
mod thin;

/// What `src/primitives.rs` is in the product.
mod primitives {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
}

use copies::{CopyCache, CopyKey, CopyLookup, ObjectCopy};
use farfield_core::dsm::{Colour, OwnerWord, Partition};
pub(crate) use farfield_dsm::ShareError;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use loom::thread;
use models::check;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

const BYTES: usize = 10;
const LIMIT_BYTES: u64 = 1000;

fn key() -> CopyKey {
    (OwnerWord::new(Partition::new(1).expect("a partition"), 16, Colour(0)).expect("a word"), BYTES)
}

/// Copies of a node, and what its threads have asked another node for.
struct Node {
    copies: CopyCache,
    fetches: AtomicU64,
}

impl Node {
    fn new() -> Arc<Node> {
        Arc::new(Node { copies: CopyCache::default(), fetches: AtomicU64::new(0) })
    }

    fn fetch(&self) -> Arc<ObjectCopy> {
        self.fetches.fetch_add(1, SeqCst);
        self.copies.insert(key(), self.copies.copy(&[7; BYTES]), LIMIT_BYTES)
    }

    fn get(&self) -> Arc<ObjectCopy> {
        self.copies.get_or_fetch(key(), || Ok(self.fetch())).expect("it is fetched")
    }

    /// Gets the copy, and lets the flight land before others find the copy.
    fn get_and_land_first(&self) -> Arc<ObjectCopy> {
        match self.copies.look_up(key()) {
            CopyLookup::Found(copy) => copy,
            CopyLookup::Flying(_) => self.get(),
            CopyLookup::New(flight) => {
                self.fetches.fetch_add(1, SeqCst);
                self.copies.land(key(), &flight, Err(ShareError::Lost));
                self.copies.insert(key(), self.copies.copy(&[7; BYTES]), LIMIT_BYTES)
            }
        }
    }
}

/// Threads that want the same version get the same copy, which was fetched once.
fn get_at_once(get: impl Fn(&Node) -> Arc<ObjectCopy> + Copy + Send + Sync + 'static) {
    check(3, move || {
        let node = Node::new();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let node = node.clone();
                thread::spawn(move || get(&node))
            })
            .collect();
        let own = get(&node);
        for thread in threads {
            assert!(Arc::ptr_eq(&thread.join().expect("it gets a copy"), &own));
        }
        assert_eq!(node.fetches.load(SeqCst), 1);
        node.copies.shrink(0);
        assert_eq!((node.copies.bytes(), node.copies.held_bytes()), (0, BYTES as u64));
        drop(own);
        assert_eq!(node.copies.held_bytes(), 0);
    });
}

#[test]
fn a_version_is_fetched_once_for_all_who_want_it() {
    get_at_once(|node| node.get());
}

#[test]
#[should_panic(expected = "assert")]
fn it_would_be_fetched_twice_if_it_landed_before_it_is_found() {
    get_at_once(|node| node.get_and_land_first());
}

/// An error is told to those who wait, and is not kept: whoever asks later has the version fetched again.
#[test]
fn an_error_is_told_and_not_kept() {
    check(3, || {
        let node = Node::new();
        let other = {
            let node = node.clone();
            thread::spawn(move || node.copies.get_or_fetch(key(), || Ok(node.fetch())).err())
        };
        let failed = node.copies.get_or_fetch(key(), || Err(ShareError::Lost));
        let told = other.join().expect("it is told something");
        assert!(failed.is_ok() || failed.err() == Some(ShareError::Lost));
        assert!(told.is_none() || told == Some(ShareError::Lost));
        node.get();
        assert_eq!(node.fetches.load(SeqCst), 1);
    });
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

/// A future that has found no copy is woken when there is one.
#[test]
fn a_future_is_woken_when_its_copy_lands() {
    check(3, || {
        let node = Node::new();
        let CopyLookup::New(flight) = node.copies.look_up(key()) else { panic!("nobody has asked") };
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let lands = {
            let (node, flight) = (node.clone(), flight.clone());
            thread::spawn(move || {
                let copy = node.fetch();
                node.copies.land(key(), &flight, Ok(copy));
            })
        };
        let waker = Waker::from(woken.clone());
        let first = flight.poll(&waker);
        lands.join().expect("it lands");
        assert!(first.is_ready() || woken.0.load(SeqCst), "nobody has woken it");
        assert!(matches!(flight.poll(&waker), Poll::Ready(Ok(_))));
    });
}
