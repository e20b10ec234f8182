//! Tracks which threads run our code now, and serves system calls that our code makes outside of
//! the gate.
//!
//! All our calls go through the gate, which the filter lets pass, and all our locks are our own
//! ([`super::lock`], `farfield_os::sync`). But a library that we use may make a call by itself. The
//! filter traps such a call if any register points into the window, even a register that the call
//! does not use and that is left over from something else. If it were taken for the program's call,
//! it would wait for locks that its own thread holds.
//!
//! So each thread knows whether it is in our code: from the entry of a handler to its end, and
//! threads of ours always. A trapped call of such a thread is ours, whatever it is. The handler
//! makes it at once, through the gate, takes no lock and looks at nothing. It also counts the call:
//! there should be none.

use super::call::Context;
use super::runtime::{RUNTIME, fail};
use super::thread::{self, ThreadRecord};
use crate::control::exit;
use core::sync::atomic::Ordering;
use farfield_os::gate;

/// Guard: while it lives, the calling thread runs our code.
pub struct OwnCode(Option<&'static ThreadRecord>);

impl OwnCode {
    /// Notes that the handler of a signal begins. (A thread for which there is no record any more
    /// has no way to know.)
    pub fn enter() -> OwnCode {
        let record = thread::current();
        if let Some(record) = record {
            record.own_code_depth.fetch_add(1, Ordering::Relaxed);
        }
        OwnCode(record)
    }
}

impl Drop for OwnCode {
    fn drop(&mut self) {
        if let Some(record) = self.0 {
            record.own_code_depth.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Runs `action`, in a handler, while signals of the program are open: their handlers are not our
/// code.
pub fn as_program<T>(action: impl FnOnce() -> T) -> T {
    let record = thread::current();
    let depth = record.map_or(0, |record| record.own_code_depth.swap(0, Ordering::Relaxed));
    let result = action();
    if let Some(record) = record {
        record.own_code_depth.store(depth, Ordering::Relaxed);
    }
    result
}

/// Notes that a thread of ours begins: it runs nothing else, and never ends.
pub fn begin_thread() {
    core::mem::forget(OwnCode::enter());
    RUNTIME.own_threads.fetch_add(1, Ordering::SeqCst);
}

/// Makes the trapped call `number` if it is one of ours. `None`: the call is the program's.
pub fn call(number: usize, context: &Context) -> Option<isize> {
    let record = thread::current()?;
    if record.own_code_depth.load(Ordering::Relaxed) == 0 {
        return None;
    }
    RUNTIME.counters().own_calls_trapped.fetch_add(1, Ordering::Relaxed);
    let is_process = matches!(number as i64, libc::SYS_clone | libc::SYS_fork | libc::SYS_vfork);
    if is_process || cfg!(debug_assertions) && !RUNTIME.is_lenient.load(Ordering::Relaxed) {
        fail(exit::INTERNAL, format_args!("a system call of our own, number {number}, did not go through the gate"));
    }
    // SAFETY: our own call, as it was made.
    Some(unsafe { gate::syscall_raw(number, context.arguments()) })
}
