//! `vfork`, and `clone` with `CLONE_VM`: threads and processes that go on in the same memory.
//!
//! The call is made in the SIGSYS handler. The new thread or process begins in `begin`, on the
//! alternate stack that it keeps, and enters the program by returning from a copy of the handler's
//! frame. So it has its signal stack and its record from its first instruction on, and its stack
//! may be far. The program's registers, stacks and return addresses are as the program left them.
//! The parent of a `vfork` waits inside the handler, on its own alternate stack, which the child
//! never touches.
//!
//! A process that runs in our memory without being a thread of ours *borrows* it: its faults are
//! counted elsewhere, and its descriptors are not ours. [`VmSharing`] knows whether there is one.

use super::call::{CallOutcome, Context, done, error};
use super::lock::SpinLock;
use super::runtime::{Phase, RUNTIME, Runtime};
use super::storage;
use super::sync::Wait;
use super::syscall_pinning;
use super::thread::{self, CallFrame, ThreadRecord};
use super::{direct_calls, emulate};
use crate::window;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::PageId;
use farfield_os::{process, signals};

/// Bytes of static thread-local storage below a thread's control block (far more than glibc
/// allows), and of the block. Handlers of ours and the kernel (restartable sequences, the list of
/// robust mutexes) use both.
const STORAGE_BELOW: usize = 64 << 10;
const STORAGE_ABOVE: usize = 4096;

/// Time that arming waits for borrowers that do not have the descriptors yet.
const BORROWER_TIMEOUT_NS: u64 = 2_000_000_000;

/// Processes that run in our memory without being its threads.
pub struct VmSharing {
    /// Borrower counts in one word. Bits 0 to 15 are borrowers whose parent waits for them. Bits 16
    /// to 31 are others, of which nobody knows when they end. Bits from 32 on are borrowers ever
    /// made.
    word: AtomicU64,
    /// Lock held while descriptors are opened that borrowers use too. A borrower has only those
    /// from before it was made.
    opening: SpinLock<()>,
}

const WAITED_FOR: u64 = 1;
const FOR_GOOD: u64 = 1 << 16;
const EVER: u64 = 1 << 32;

impl VmSharing {
    /// Creates the state without a borrower.
    pub const fn new() -> VmSharing {
        VmSharing { word: AtomicU64::new(0), opening: SpinLock::new(()) }
    }

    /// Notes that a borrower is about to be made.
    fn begin(&self, waited_for: bool) {
        let _no_descriptor_meanwhile = self.opening.lock();
        self.word.fetch_add(EVER + if waited_for { WAITED_FOR } else { FOR_GOOD }, Ordering::SeqCst);
    }

    /// Notes that a borrower is gone, or was not made.
    fn end(&self, waited_for: bool) {
        self.word.fetch_sub(if waited_for { WAITED_FOR } else { FOR_GOOD }, Ordering::SeqCst);
    }

    /// Returns `None` if there is a borrower; else a value that changes with the next borrower.
    pub fn exclusive_stamp(&self) -> Option<u64> {
        let word = self.word.load(Ordering::SeqCst);
        word.is_multiple_of(EVER).then_some(word)
    }

    /// Opens descriptors for all that run in our memory. Does nothing while a borrower lives, which
    /// would lack them.
    pub fn open_descriptors(&self, open: impl FnOnce()) {
        let Some(_no_loan_meanwhile) = self.opening.try_lock() else { return };
        if self.exclusive_stamp().is_some() {
            open();
        }
    }

    /// Opens descriptors that cannot be done without. Waits for borrowers, at most for two seconds,
    /// and then opens them anyway. (A borrower of which nobody knows when it ends shares our
    /// descriptors, or was made when they were open.)
    pub fn open_descriptors_for_good(&self, open: impl FnOnce()) {
        let deadline = process::now_ns() + BORROWER_TIMEOUT_NS;
        let mut wait = Wait::new("a child of vfork that lacks our descriptors");
        loop {
            let opening = self.opening.lock();
            if self.word.load(Ordering::SeqCst).is_multiple_of(FOR_GOOD) || process::now_ns() > deadline {
                return open();
            }
            drop(opening);
            wait.pause();
        }
    }

    /// Resets the state in the child of a fork, which has its memory for itself.
    ///
    /// # Safety
    /// No other thread may run.
    pub unsafe fn reset_in_child(&self) {
        self.word.store(0, Ordering::SeqCst);
        // SAFETY: by the caller.
        unsafe { self.opening.reset() };
    }
}

impl Default for VmSharing {
    fn default() -> Self {
        Self::new()
    }
}

/// Makes the call `clone(args)` with `CLONE_VM`.
pub fn clone(context: &Context, args: [usize; 6]) -> CallOutcome {
    let runtime = &RUNTIME;
    let [flags, stack, parent_tid, child_tid, storage, _] = args;
    let has = |flag: i32| flags & flag as usize != 0;
    let (borrows, waits) = (!has(libc::CLONE_THREAD), has(libc::CLONE_VFORK));
    if borrows && !waits && !has(libc::CLONE_FILES) {
        // The new process could never use a pool for which it has no descriptors when it starts.
        super::arm::arm(runtime, None);
    }
    if !waits && !has(libc::CLONE_SETTLS) {
        direct_calls::stop();
    }
    let Some(parent) = thread::current() else { return error(libc::EAGAIN) };
    let Some(child) = runtime.threads.acquire_unnamed() else { return error(libc::EAGAIN) };
    let Ok((base, len)) = child.alternate_stack() else {
        child.leave();
        return error(libc::ENOMEM);
    };
    child.inherit(parent, waits);
    // Without `CLONE_SETTLS` it would begin with the storage of this handler, which is ours.
    let new_storage = if has(libc::CLONE_SETTLS) { storage } else { parent.program_storage.load(Ordering::Relaxed) };
    let storage_start = if has(libc::CLONE_SETTLS) { storage } else { 0 };
    keep(runtime, &child.home, storage_start, [parent_tid, child_tid]);
    if borrows {
        runtime.vm_sharing.begin(waits);
    }
    // SAFETY: the stack has just been taken for the child.
    let start = unsafe { context.copy_below(base + len) };
    start.set_result(0);
    if stack != 0 {
        start.set_sp(stack);
    }
    start.set_alternate_stack(base, len);
    let top = (start.address() - size_of::<CloneStart>()) & !15;
    // SAFETY: on the child's stack, below the frame.
    unsafe { (top as *mut CloneStart).write(CloneStart { record: child, storage: new_storage, frame: start }) };
    let made = [flags, top, parent_tid, child_tid, storage];
    // SAFETY: the program's own call, with a stack of ours. `begin` does not return, and uses
    // storage only if it is its own.
    let result = unsafe { process::clone_into(window::GATE_FORWARD, made, begin, top) };
    if waits || result.is_err() {
        child.leave();
        if borrows {
            runtime.vm_sharing.end(waits);
        }
    } else if let Ok(id) = result {
        child.name(id);
    }
    if waits && runtime.phase() == Phase::Dormant {
        // The child could not arm for us.
        emulate::arm_if_needed(runtime);
    }
    done(result.map(|id| id as usize))
}

/// Contents of the stack with which a new thread or process begins.
struct CloneStart {
    record: &'static ThreadRecord,
    /// Thread pointer that the new thread or process shall have.
    storage: usize,
    frame: Context,
}

/// Starts a new thread or process: its entry point.
extern "C" fn begin(start: usize) -> ! {
    // SAFETY: written by `clone`, on the stack of this thread.
    let start = unsafe { (start as *const CloneStart).read() };
    start.record.name(process::tid());
    // SAFETY: a copy of what the kernel pushed, changed to what the program asked for, and the
    // thread pointer likewise.
    unsafe {
        storage::set_pointer(start.storage);
        signals::return_to(start.frame.address())
    }
}

/// Holds what the kernel or our handlers use of a new thread without a fault, as long as it lives.
/// This is needed in thread mode too: the kernel writes there whenever it has interrupted the
/// thread (restartable sequences). It does so also while the thread owns pages that a handler would
/// wait for, and maybe these pages.
fn keep(runtime: &Runtime, home: &CallFrame, storage: usize, words: [usize; 2]) {
    let mut parts = [(0, 0); 3];
    if window::contains(storage) {
        // The stack that the storage is part of may begin later than the storage could.
        let page = window::page_of(storage);
        let first = runtime.space.lock().stretch(page.0).map_or(page, |(range, _)| PageId(range.start));
        let start = (storage - STORAGE_BELOW).max(window::address_of(first));
        parts[0] = (start, storage + STORAGE_ABOVE - start);
    }
    parts[1] = (words[0], 4);
    parts[2] = (words[1], 4);
    home.active.store(1, Ordering::SeqCst);
    syscall_pinning::pin_for(runtime, home, syscall_pinning::collect(runtime, &parts), || {
        runtime.phase() == Phase::Armed
    });
}

#[cfg(test)]
mod tests {
    //! Danger: a page that a borrower has written is taken for unchanged.
    use super::*;

    #[test]
    fn a_loan_shows_while_it_lasts_and_afterwards() {
        let sharing = VmSharing::new();
        let before = sharing.exclusive_stamp();
        assert!(before.is_some());
        sharing.begin(true);
        assert_eq!(sharing.exclusive_stamp(), None);
        sharing.end(true);
        let after = sharing.exclusive_stamp();
        assert!(after.is_some() && after != before);
    }

    #[test]
    fn descriptors_are_opened_while_nobody_would_lack_them() {
        let sharing = VmSharing::new();
        let opened = |open: &dyn Fn(&mut bool)| {
            let mut opened = false;
            open(&mut opened);
            opened
        };
        let at_leisure = |sharing: &VmSharing| opened(&|opened| sharing.open_descriptors(|| *opened = true));
        assert!(at_leisure(&sharing));
        sharing.begin(true);
        assert!(!at_leisure(&sharing));
        sharing.end(true);
        sharing.begin(false);
        assert!(!at_leisure(&sharing));
        assert!(opened(&|opened| sharing.open_descriptors_for_good(|| *opened = true)), "nobody waits for this one");
    }
}
