//! Proof that nobody writes the program's memory.
//!
//! Code that moves pages has to reckon with writers at any moment. One shortcut leaves that out,
//! for the program of one thread, the most frequent one: as long as that thread is inside a handler
//! of ours, nothing of the program runs. That depends on the calling thread. The monitor and the
//! maintenance thread run beside the program, and for them the same process with the same number of
//! threads proves nothing. So the proof is a value. It can only be had for the registers of an
//! interrupted thread, which only a handler has.

use super::call::Context;
use super::runtime::{Armed, Runtime};
use super::sync::{Ordering, thread_count};
use crate::control::FaultMode;
use core::marker::PhantomData;
use farfield_os::process;

/// Proof: while it lives, nobody but the calling thread can write the program's memory, and this
/// thread runs only a handler.
///
/// Writers from outside are left out: debuggers, and other processes that call `process_vm_writev`
/// ([limits]).
///
/// [limits]: ../../../../docs/design/pager.md#known-limits
pub struct SoleWriter<'a> {
    /// Handler that the thread is in. Contexts hold raw pointers, so neither they nor this go to
    /// another thread.
    handler: PhantomData<&'a Context>,
    stamp: u64,
}

/// Counters that change whenever a page may have been written for the first time since it was
/// mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FirstWrites {
    faults: u64,
    stamp: u64,
}

impl<'a> SoleWriter<'a> {
    /// Proves that the program thread that is interrupted in `context` is the sole writer. `None`:
    /// another thread, or a borrower of this memory, may run.
    pub fn prove(runtime: &Runtime, armed: &Armed, _context: &'a Context) -> Option<SoleWriter<'a>> {
        // A thread of ours counts itself once it runs, and never ends. So there are at least as
        // many of them as we read before the kernel counts all. At most one of all is then the
        // program's: the calling one.
        let ours = runtime.own_threads.load(Ordering::SeqCst);
        let threads = thread_count(armed.threads.as_ref()?)?;
        // From here on there is no other thread that could make a borrower; one that was made
        // before shows.
        let stamp = runtime.vm_sharing.exclusive_stamp()?;
        (armed.mode == FaultMode::Signal && threads <= 1 + ours).then_some(SoleWriter { handler: PhantomData, stamp })
    }

    /// Returns the counters of first writes so far, by threads that have ended and by the calling
    /// one.
    pub fn first_writes(&self) -> FirstWrites {
        FirstWrites { faults: process::faults(), stamp: self.stamp }
    }
}
