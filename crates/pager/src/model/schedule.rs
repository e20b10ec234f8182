//! Scheduling: atomics that ask the model's scheduler before each access.

use core::cell::Cell;
use core::sync::atomic::{self, Ordering};
use farfield_os::process;

std::thread_local! {
    /// Process in which the scheduler runs threads on this one; 0 while it does not.
    static SCHEDULED: Cell<i32> = const { Cell::new(0) };
}

/// Atomic of which every access lets the scheduler choose.
static POINT: shuttle::sync::atomic::AtomicBool = shuttle::sync::atomic::AtomicBool::new(false);

/// Number of threads of the program in this schedule.
static PROGRAM_THREADS: atomic::AtomicU64 = atomic::AtomicU64::new(0);

/// Begins a schedule, in which the scheduler chooses the running thread. `program_threads` of the
/// threads are the program's, the others ours.
pub fn begin(program_threads: u64) {
    PROGRAM_THREADS.store(program_threads, Ordering::Relaxed);
    SCHEDULED.set(process::pid());
}

/// Returns the number of threads of the process, as the kernel would count them; `None` outside of
/// a schedule. (Threads of ours do not count themselves here.)
pub fn thread_count() -> Option<u64> {
    is_scheduled().then(|| PROGRAM_THREADS.load(Ordering::Relaxed))
}

/// Ends the schedule: from here on there is one thread.
pub fn end() {
    SCHEDULED.set(0);
}

/// Checks whether the scheduler runs this thread. It does not in the child of a fork, which has one
/// thread.
fn is_scheduled() -> bool {
    let pid = SCHEDULED.get();
    pid != 0 && pid == process::pid()
}

/// Marks a moment at which another thread may go on.
pub fn point() {
    if is_scheduled() {
        POINT.load(Ordering::SeqCst);
    }
}

/// Lets another thread go on, for which this one may be waiting. `false` outside of a schedule.
pub fn give_way() -> bool {
    let scheduled = is_scheduled();
    if scheduled {
        shuttle::thread::yield_now();
    }
    scheduled
}

/// Returns the id of this thread in the model; outside of a schedule, the kernel's.
pub fn tid() -> i32 {
    if is_scheduled() { usize::from(shuttle::current::me()) as i32 + 1 } else { process::tid() }
}

/// Checks whether a thread exists. Threads of the model stay until the end of the schedule.
pub fn thread_exists(tid: i32) -> bool {
    is_scheduled() || process::thread_exists(tid)
}

macro_rules! atomics {
    ($($name:ident $value:ty),* $(,)?) => {$(
        /// Atomic integer like core's of the same name; each access is a point for the scheduler.
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(atomic::$name);

        #[allow(missing_docs, reason = "as core's")]
        impl $name {
            pub const fn new(value: $value) -> $name {
                $name(atomic::$name::new(value))
            }
            pub const fn as_ptr(&self) -> *mut $value {
                self.0.as_ptr()
            }
            pub fn load(&self, order: Ordering) -> $value {
                point();
                self.0.load(order)
            }
            pub fn store(&self, value: $value, order: Ordering) {
                point();
                self.0.store(value, order);
            }
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.swap(value, order)
            }
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_add(value, order)
            }
            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_sub(value, order)
            }
            pub fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_or(value, order)
            }
            pub fn fetch_and(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_and(value, order)
            }
            pub fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                won: Ordering,
                lost: Ordering,
            ) -> Result<$value, $value> {
                point();
                self.0.compare_exchange(old, new, won, lost)
            }
            pub fn compare_exchange_weak(
                &self,
                old: $value,
                new: $value,
                won: Ordering,
                lost: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(old, new, won, lost)
            }
        }
    )*};
}

atomics! { AtomicI32 i32, AtomicI64 i64, AtomicU8 u8, AtomicU32 u32, AtomicU64 u64, AtomicUsize usize }
