//! Copies of other nodes' objects, by the words of their owners.
//!
//! A word means one version of one object for ever, so a copy is never wrong, only unused. Of a slice
//! that grows at its end, a word and a length do. Copies leave
//! oldest first when objects or newer copies need their memory. A scope keeps those that it has read:
//! it counts as one of their owners, because a task that waits for others would hold back every copy
//! of its node if they left by epochs.
#![allow(unsafe_code, reason = "copies are memory of their own")]

use crate::ShareError;
use crate::primitives::{AtomicU64, Condvar, Mutex, MutexGuard};
use core::cell::RefCell;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;
use core::task::{Poll, Waker};
use farfield_core::dsm::OwnerWord;
use std::alloc::Layout;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

/// Version of an object: the word of its owner, and the number of bytes. A slice to which values are
/// appended keeps its word; its first values stay as they are.
pub(crate) type CopyKey = (OwnerWord, usize);

/// The copies of a node.
#[derive(Default)]
pub(crate) struct CopyCache {
    table: Mutex<CopyTable>,
    /// Bytes of all copies, also of those that only scopes keep.
    live_bytes: Arc<AtomicU64>,
}

#[derive(Default)]
struct CopyTable {
    by_key: HashMap<CopyKey, Arc<ObjectCopy>>,
    /// Keys in the order in which their copies came.
    order: VecDeque<CopyKey>,
    bytes: u64,
    /// Copies that are on their way.
    flights: HashMap<CopyKey, Arc<CopyFlight>>,
}

/// A copy on its way, which several may wait for.
#[derive(Default)]
pub(crate) struct CopyFlight {
    landing: Mutex<CopyLanding>,
    arrived: Condvar,
}

#[derive(Default)]
struct CopyLanding {
    result: Option<Result<Arc<ObjectCopy>, ShareError>>,
    /// Futures that wait for it.
    wakers: Vec<Waker>,
}

/// Where the copy of a version is.
pub(crate) enum CopyLookup {
    /// Here.
    Found(Arc<ObjectCopy>),
    /// On its way.
    Flying(Arc<CopyFlight>),
    /// To be fetched by whoever is told this, who lets it land.
    New(Arc<CopyFlight>),
}

/// Memory with the bytes of an object. They are not the object: they are never dropped.
pub(crate) struct ObjectCopy {
    address: NonNull<u8>,
    layout: Layout,
    live_bytes: Arc<AtomicU64>,
}

// SAFETY: plain memory, written before anybody else can see it and only read afterwards.
unsafe impl Send for ObjectCopy {}
// SAFETY: as above.
unsafe impl Sync for ObjectCopy {}

impl ObjectCopy {
    fn new(bytes: &[u8], live_bytes: &Arc<AtomicU64>) -> ObjectCopy {
        let layout = Layout::from_size_align(bytes.len().max(1), OwnerWord::ALIGN as usize).expect("a small size");
        // SAFETY: the size is not zero.
        let address = unsafe { std::alloc::alloc(layout) };
        let Some(address) = NonNull::new(address) else { std::alloc::handle_alloc_error(layout) };
        // SAFETY: new memory of that size.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), bytes.len()) };
        live_bytes.fetch_add(layout.size() as u64, Relaxed);
        ObjectCopy { address, layout, live_bytes: live_bytes.clone() }
    }

    /// Returns the address of the bytes, which is valid as long as the copy.
    pub(crate) fn address(&self) -> *const u8 {
        self.address.as_ptr()
    }
}

impl Drop for ObjectCopy {
    fn drop(&mut self) {
        self.live_bytes.fetch_sub(self.layout.size() as u64, Relaxed);
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.address.as_ptr(), self.layout) };
    }
}

impl CopyCache {
    fn lock(&self) -> MutexGuard<'_, CopyTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes of the copies that may leave, or be found by others.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Returns the bytes of copies that have left and that scopes keep.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.live_bytes.load(Relaxed).saturating_sub(self.bytes())
    }

    /// Returns where the copy of this version is. It is fetched once for all who ask meanwhile (single
    /// flight), who share an error, too.
    pub(crate) fn look_up(&self, key: CopyKey) -> CopyLookup {
        let mut table = self.lock();
        if let Some(copy) = table.by_key.get(&key) {
            return CopyLookup::Found(copy.clone());
        }
        if let Some(flight) = table.flights.get(&key) {
            return CopyLookup::Flying(flight.clone());
        }
        let flight = Arc::new(CopyFlight::default());
        table.flights.insert(key, flight.clone());
        CopyLookup::New(flight)
    }

    /// Tells all who wait for a copy what has become of it.
    pub(crate) fn land(&self, key: CopyKey, flight: &CopyFlight, result: Result<Arc<ObjectCopy>, ShareError>) {
        self.lock().flights.remove(&key);
        let mut landing = flight.lock();
        landing.result = Some(result);
        let wakers = core::mem::take(&mut landing.wakers);
        drop(landing);
        flight.arrived.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Returns the copy of this version, and has it fetched if there is none.
    pub(crate) fn get_or_fetch(
        &self,
        key: CopyKey,
        fetch: impl FnOnce() -> Result<Arc<ObjectCopy>, ShareError>,
    ) -> Result<Arc<ObjectCopy>, ShareError> {
        match self.look_up(key) {
            CopyLookup::Found(copy) => Ok(copy),
            CopyLookup::Flying(flight) => flight.wait(),
            CopyLookup::New(flight) => {
                let mut landing = LandingGuard { copies: self, key, flight: &flight, result: None };
                let fetched = fetch();
                landing.result = Some(fetched.clone());
                fetched
            }
        }
    }

    /// Makes a copy of bytes, which nobody else knows yet.
    pub(crate) fn copy(&self, bytes: &[u8]) -> ObjectCopy {
        ObjectCopy::new(bytes, &self.live_bytes)
    }

    /// Keeps a copy, if there is none, and as many others as fit `limit_bytes`.
    pub(crate) fn insert(&self, key: CopyKey, copy: ObjectCopy, limit_bytes: u64) -> Arc<ObjectCopy> {
        let mut table = self.lock();
        if let Some(copy) = table.by_key.get(&key) {
            return copy.clone();
        }
        let bytes = copy.layout.size() as u64;
        table.shrink(limit_bytes.saturating_sub(bytes));
        let copy = Arc::new(copy);
        table.bytes += bytes;
        table.order.push_back(key);
        table.by_key.insert(key, copy.clone());
        copy
    }

    /// Lets copies leave, oldest first, until the rest takes no more than `bytes`.
    pub(crate) fn shrink(&self, bytes: u64) {
        self.lock().shrink(bytes);
    }
}

/// Copies that a scope has read. References to them may be in use.
#[derive(Default)]
pub(crate) struct ScopeCopies(RefCell<HashMap<CopyKey, Arc<ObjectCopy>>>);

impl ScopeCopies {
    /// Calls `action` with the copy of this version, if the scope has read it.
    pub(crate) fn with<R>(&self, key: CopyKey, action: impl FnOnce(&Arc<ObjectCopy>) -> R) -> Option<R> {
        self.0.borrow().get(&key).map(action)
    }

    /// Keeps a copy as long as the scope.
    pub(crate) fn keep(&self, key: CopyKey, copy: Arc<ObjectCopy>) {
        self.0.borrow_mut().insert(key, copy);
    }

    /// Lets all copies go: nothing is borrowed in the scope any more.
    pub(crate) fn clear(&mut self) {
        self.0.get_mut().clear();
    }
}

impl CopyFlight {
    fn lock(&self) -> MutexGuard<'_, CopyLanding> {
        self.landing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the copy.
    fn wait(&self) -> Result<Arc<ObjectCopy>, ShareError> {
        let mut landing = self.lock();
        loop {
            match &landing.result {
                Some(result) => return result.clone(),
                None => landing = self.arrived.wait(landing).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Returns the copy if it is there, or wakes somebody when it is.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Result<Arc<ObjectCopy>, ShareError>> {
        let mut landing = self.lock();
        if let Some(result) = &landing.result {
            return Poll::Ready(result.clone());
        }
        if !landing.wakers.iter().any(|other| other.will_wake(waker)) {
            landing.wakers.push(waker.clone());
        }
        Poll::Pending
    }
}

/// Flight that lands when this is dropped, also if what fetches the copy panics: others wait for it.
struct LandingGuard<'c> {
    copies: &'c CopyCache,
    key: CopyKey,
    flight: &'c CopyFlight,
    result: Option<Result<Arc<ObjectCopy>, ShareError>>,
}

impl Drop for LandingGuard<'_> {
    fn drop(&mut self) {
        self.copies.land(self.key, self.flight, self.result.take().unwrap_or(Err(ShareError::TaskPanicked)));
    }
}

impl CopyTable {
    fn shrink(&mut self, bytes: u64) {
        while self.bytes > bytes {
            let Some(oldest) = self.order.pop_front() else { return };
            if let Some(copy) = self.by_key.remove(&oldest) {
                self.bytes -= copy.layout.size() as u64;
            }
        }
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;
    use farfield_core::dsm::{Colour, Partition};

    #[test]
    fn copies_leave_oldest_first_and_those_that_a_scope_keeps_stay() {
        let copies = CopyCache::default();
        let word = |number: u64| OwnerWord::new(Partition::new(1).unwrap(), 16 * number, Colour(0)).unwrap();
        let insert = |word, byte: u8| copies.insert((word, 100), copies.copy(&[byte; 100]), 250);
        let first = insert(word(1), 1);
        insert(word(2), 2);
        assert!(Arc::ptr_eq(&insert(word(1), 9), &first), "it is there already");
        insert(word(3), 3);
        assert!(copies.get_or_fetch((word(1), 100), || Err(ShareError::Lost)).is_err(), "it has left");
        assert!(copies.get_or_fetch((word(2), 100), || unreachable!("it is there")).is_ok());
        // SAFETY: the copy is kept, and has so many bytes.
        assert_eq!(unsafe { core::slice::from_raw_parts(first.address(), 100) }, [1; 100]);
        assert_eq!((copies.bytes(), copies.held_bytes()), (200, 100));
        copies.shrink(0);
        assert_eq!((copies.bytes(), copies.held_bytes()), (0, 100));
        drop(first);
        assert_eq!(copies.held_bytes(), 0);
    }

    #[test]
    fn a_copy_is_fetched_once_for_all_who_want_it() {
        let copies = CopyCache::default();
        let word = OwnerWord::new(Partition::new(1).unwrap(), 16, Colour(0)).unwrap();
        let fetches = AtomicU64::new(0);
        let got: Vec<_> = std::thread::scope(|s| {
            let get = || {
                copies.get_or_fetch((word, 10), || {
                    fetches.fetch_add(1, Relaxed);
                    // The table, this thread, and seven that wait.
                    let started = std::time::Instant::now();
                    while Arc::strong_count(&copies.lock().flights[&(word, 10)]) < 9 {
                        assert!(started.elapsed().as_secs() < 60, "the others wait for this copy");
                    }
                    Ok(copies.insert((word, 10), copies.copy(&[3; 10]), 100))
                })
            };
            let threads: Vec<_> = (0..8).map(|_| s.spawn(get)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        });
        assert_eq!(fetches.into_inner(), 1);
        assert!(got.iter().all(|copy| Arc::ptr_eq(copy, &got[0])));
        // Nobody waits for a fetch that has panicked.
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let other = OwnerWord::new(Partition::new(1).unwrap(), 48, Colour(0)).unwrap();
            copies.get_or_fetch((other, 10), || panic!("it is to be seen by the others"))
        }));
        assert!(panicked.is_err() && copies.lock().flights.is_empty());
        // An error is not kept.
        let other = OwnerWord::new(Partition::new(1).unwrap(), 32, Colour(0)).unwrap();
        assert!(matches!(copies.get_or_fetch((other, 10), || Err(ShareError::Lost)), Err(ShareError::Lost)));
        assert!(
            copies.get_or_fetch((other, 10), || Ok(copies.insert((other, 10), copies.copy(&[4; 10]), 100))).is_ok()
        );
    }
}
