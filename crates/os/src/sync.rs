//! Locks and waits that go through the gate.
//!
//! Inside an unmodified program a system call of ours must go through the [gate](crate::gate). One
//! that does not comes back to our own handler, if a register that the call does not even use
//! happens to point into far-capable memory. The handler then waits for locks that the interrupted
//! thread holds. The standard library's locks make such calls. So these locks are used instead, by
//! all code that may run inside a program.
//!
//! The mutex is the one of Ulrich Drepper's "Futexes Are Tricky": one word, free, taken, or taken
//! and waited for. None of these locks is ever poisoned: the owner must know what a panic leaves
//! behind.
//!
//! A wait that takes longer than [`Wait::REPORT_AFTER`] says on standard error what it waits for,
//! and goes on waiting.

use crate::gate::syscall_raw;
use crate::process::{now_ns, pid, sleep, tid, yield_now};
use crate::{file, process};
use core::cell::UnsafeCell;
use core::fmt::Write as _;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::panic::Location;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use core::time::Duration;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
const WAITED_FOR: u32 = 2;

/// Number of looks at a word before the thread yields the processor, and before it sleeps.
const SPINS: u32 = 100;
const YIELDS: u32 = 1000;
/// Length of one such sleep.
const NAP: Duration = Duration::from_micros(50);

/// A wait for something that other threads do, with growing back-off.
#[derive(Debug)]
pub struct Wait {
    what: &'static str,
    place: &'static Location<'static>,
    looks: u32,
    since_ns: u64,
    said: u32,
}

impl Wait {
    /// Time after which a wait reports what it waits for. It is longer than any wait that ends the
    /// program (45 s for room).
    pub const REPORT_AFTER: Duration = Duration::from_secs(60);

    /// Begins to wait for `what` (the report says "waits for" it).
    #[track_caller]
    pub const fn new(what: &'static str) -> Wait {
        Wait { what, place: Location::caller(), looks: 0, since_ns: 0, said: 0 }
    }

    /// Makes one step of waiting: spins first, then yields the processor, then sleeps for a moment.
    pub fn pause(&mut self) {
        self.looks = self.looks.saturating_add(1);
        if wait_in_model() {
            return;
        }
        if self.looks < SPINS {
            core::hint::spin_loop();
        } else if self.looks < YIELDS {
            yield_now();
        } else {
            sleep(NAP);
            self.look_at_clock();
        }
    }

    /// Makes one step of waiting that sleeps for `time`.
    pub fn nap(&mut self, time: Duration) {
        if !wait_in_model() {
            sleep(time);
            self.look_at_clock();
        }
    }

    /// Checks whether [`Wait::pause`] was called before.
    pub fn has_waited(&self) -> bool {
        self.looks > 0
    }

    /// Checks whether the wait has taken so many steps that it yields the processor, or is about
    /// to.
    pub fn is_long(&self) -> bool {
        self.looks > SPINS / 5
    }

    /// Sleeps until `word` is woken, or until a report is due. Returns at once if its value is not
    /// `value`.
    fn on(&mut self, word: &AtomicU32, value: u32) {
        if wait_in_model() {
            return;
        }
        self.look_at_clock();
        futex_wait(word, value, Wait::REPORT_AFTER);
    }

    fn look_at_clock(&mut self) {
        let now = now_ns();
        if self.since_ns == 0 {
            self.since_ns = now;
        }
        let waited = now - self.since_ns;
        // Reports first after `REPORT_AFTER`, then after twice that time, four times, and so on.
        if waited >= (Wait::REPORT_AFTER.as_nanos() as u64) << self.said.min(20) {
            self.said += 1;
            let mut text = WaitReportText { bytes: [0; 256], len: 0 };
            let _ = writeln!(
                text,
                "farfield: process {}, thread {} has waited {} s for {} ({})",
                pid(),
                tid(),
                waited / 1_000_000_000,
                self.what,
                self.place,
            );
            say(&text.bytes[..text.len]);
        }
    }
}

struct WaitReportText {
    bytes: [u8; 256],
    len: usize,
}

impl core::fmt::Write for WaitReportText {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let take = text.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + take].copy_from_slice(&text.as_bytes()[..take]);
        self.len += take;
        Ok(())
    }
}

/// Sleeps for `time`. In models others run instead.
pub fn nap(time: Duration) {
    if !wait_in_model() {
        sleep(time);
    }
}

type Say = fn(&[u8]);
type Yield = fn() -> bool;

static SAY: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());
static YIELD: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Sends the reports of waits to `say` from now on, instead of standard error.
pub fn set_say(say: Say) {
    SAY.store(say as *mut (), Ordering::Release);
}

/// Makes waits call `give_way` to let another thread run. They wait themselves only where it
/// returns `false`. For models.
pub fn set_yield(give_way: Yield) {
    YIELD.store(give_way as *mut (), Ordering::Release);
}

fn say(text: &[u8]) {
    let hook = SAY.load(Ordering::Acquire);
    if hook.is_null() {
        file::write_without_waiting(2, text);
    } else {
        // SAFETY: only `set_say` stores here.
        (unsafe { core::mem::transmute::<*mut (), Say>(hook) })(text);
    }
}

fn wait_in_model() -> bool {
    let hook = YIELD.load(Ordering::Acquire);
    // SAFETY: only `set_yield` stores here.
    !hook.is_null() && (unsafe { core::mem::transmute::<*mut (), Yield>(hook) })()
}

fn futex_wait(word: &AtomicU32, value: u32, timeout: Duration) {
    if cfg!(miri) {
        return std::thread::yield_now();
    }
    let time = process::timespec(timeout);
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let args = [word.as_ptr() as usize, operation as usize, value as usize, &raw const time as usize, 0, 0];
    // SAFETY: the word and the time are readable. Whatever the result, the caller looks again.
    let _ = unsafe { syscall_raw(libc::SYS_futex as usize, args) };
}

fn futex_wake(word: &AtomicU32, count: u32) {
    if cfg!(miri) {
        return;
    }
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: only the address counts. Somebody may have freed the word: then this wakes nobody, or
    // somebody who looks again.
    let _ = unsafe {
        syscall_raw(libc::SYS_futex as usize, [word.as_ptr() as usize, operation as usize, count as usize, 0, 0, 0])
    };
}

/// Mutual exclusion over `T`.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, of which there is one at a time, or through `&mut self`.
unsafe impl<T: ?Sized + Send> Send for Mutex<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send> Sync for Mutex<T> {}

impl<T> Mutex<T> {
    /// Creates a free lock.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex { state: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Returns the protected value.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        if self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait();
        }
        MutexGuard { mutex: self, thread: PhantomData }
    }

    #[cold]
    #[track_caller]
    fn wait(&self) {
        let mut wait = Wait::new("a lock");
        for _ in 0..SPINS {
            if self.state.load(Ordering::Relaxed) == FREE
                && self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
            core::hint::spin_loop();
        }
        // A thread that takes the lock from here on does not know whether others wait.
        while self.state.swap(WAITED_FOR, Ordering::Acquire) != FREE {
            wait.on(&self.state, WAITED_FOR);
        }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let taken = self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        // (Not `then_some`: a guard that is made and not given away would release the lock of
        // another thread.)
        taken.is_ok().then(|| MutexGuard { mutex: self, thread: PhantomData })
    }

    /// Returns the value, which nobody else can have.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T: ?Sized> core::fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Mutex").finish_non_exhaustive()
    }
}

/// Guard of a lock that is held, in the thread that took it.
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    thread: PhantomData<*const ()>,
}

// SAFETY: a shared guard gives shared access to the value only.
unsafe impl<T: ?Sized + Sync> Sync for MutexGuard<'_, T> {}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard is exclusive.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard is exclusive.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        if self.mutex.state.swap(FREE, Ordering::Release) == WAITED_FOR {
            futex_wake(&self.mutex.state, 1);
        }
    }
}

/// Reader-writer lock over `T`. For values that hardly ever change: a writer can be kept waiting by
/// readers.
#[derive(Default)]
pub struct RwLock<T: ?Sized> {
    /// Number of readers; [`WRITER`] while a thread writes.
    state: AtomicU32,
    value: UnsafeCell<T>,
}

const WRITER: u32 = u32::MAX;

// SAFETY: the value is reached only through guards: one that writes, or some that read.
unsafe impl<T: ?Sized + Send> Send for RwLock<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send + Sync> Sync for RwLock<T> {}

impl<T> RwLock<T> {
    /// Creates a free lock.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock { state: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits until no thread writes, and takes the lock to read.
    #[track_caller]
    pub fn read(&self) -> ReadGuard<'_, T> {
        let mut wait = Wait::new("a lock to read");
        let one_more = |readers: u32| (readers < WRITER - 1).then(|| readers + 1);
        while self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).is_err() {
            wait.pause();
        }
        ReadGuard { lock: self, thread: PhantomData }
    }

    /// Waits until no thread reads or writes, and takes the lock to write.
    #[track_caller]
    pub fn write(&self) -> WriteGuard<'_, T> {
        let mut wait = Wait::new("a lock to write");
        while self.state.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            wait.pause();
        }
        WriteGuard { lock: self, thread: PhantomData }
    }
}

/// Guard of a lock that is held to read.
pub struct ReadGuard<'a, T: ?Sized> {
    lock: &'a RwLock<T>,
    thread: PhantomData<*const ()>,
}

impl<T: ?Sized> Deref for ReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: nobody writes as long as there are guards that read.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: ?Sized> Drop for ReadGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.state.fetch_sub(1, Ordering::Release);
    }
}

/// Guard of a lock that is held to write.
pub struct WriteGuard<'a, T: ?Sized> {
    lock: &'a RwLock<T>,
    thread: PhantomData<*const ()>,
}

impl<T: ?Sized> Deref for WriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard is exclusive.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: ?Sized> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard is exclusive.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T: ?Sized> Drop for WriteGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.state.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    //! Dangers: two who hold a lock at once; one who sleeps although it is free; a wait that nobody hears of.
    use super::*;
    use std::sync::{Arc, mpsc};

    #[test]
    fn one_at_a_time_holds_a_mutex_and_nobody_sleeps_for_ever() {
        let count = Arc::new(Mutex::new((0u64, 0u64)));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let count = count.clone();
                std::thread::spawn(move || {
                    for turn in 0..20_000 {
                        let mut both = count.lock();
                        both.0 += 1;
                        if turn % 500 == 0 {
                            // The others fall asleep.
                            sleep(Duration::from_micros(200));
                        }
                        both.1 += 1;
                        assert_eq!(both.0, both.1);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*count.lock(), (80_000, 80_000));
        let held = count.lock();
        assert!(count.try_lock().is_none());
        drop(held);
        assert!(count.try_lock().is_some());
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let pair = Arc::new(RwLock::new((0u64, 0u64)));
        let first = pair.read();
        assert_eq!(*pair.read(), *first);
        drop(first);
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let pair = pair.clone();
                std::thread::spawn(move || {
                    for _ in 0..5_000 {
                        if thread == 0 {
                            let mut pair = pair.write();
                            pair.0 += 1;
                            pair.1 += 1;
                        } else {
                            let pair = pair.read();
                            assert_eq!(pair.0, pair.1);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(pair.read().0, 5_000);
    }

    #[test]
    fn a_long_wait_says_what_it_waits_for() {
        static SAID: Mutex<String> = Mutex::new(String::new());
        set_say(|text| SAID.lock().push_str(core::str::from_utf8(text).unwrap()));
        let mut wait = Wait::new("a page that never comes");
        wait.look_at_clock();
        assert_eq!(*SAID.lock(), "");
        // As if it had begun so long ago.
        wait.since_ns = now_ns() - Wait::REPORT_AFTER.as_nanos() as u64 - 1_000_000;
        wait.look_at_clock();
        wait.look_at_clock();
        let said = SAID.lock().clone();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("60 s for a page that never comes") && said.contains("sync.rs"), "{said}");
        wait.since_ns -= Wait::REPORT_AFTER.as_nanos() as u64;
        wait.look_at_clock();
        assert_eq!(SAID.lock().lines().count(), 2);
    }

    #[test]
    fn a_lock_is_passed_on_to_whoever_sleeps() {
        let lock = Arc::new(Mutex::new(()));
        let held = lock.lock();
        let (send, receive) = mpsc::channel();
        let other = lock.clone();
        let waiter = std::thread::spawn(move || {
            drop(other.lock());
            send.send(()).unwrap();
        });
        while lock.state.load(Ordering::Relaxed) != WAITED_FOR {
            yield_now();
        }
        drop(held);
        receive.recv_timeout(Duration::from_secs(50)).expect("it is woken, long before a wait ends by itself");
        waiter.join().unwrap();
    }
}
