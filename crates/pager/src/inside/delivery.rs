//! Delivery of the program's signals: its handlers run on the stack, and with the mask, that it
//! asked for.
//!
//! The kernel knows one alternate stack per thread. It must be ours: the frame of a SIGBUS has to
//! be written without a fault, and the program's stacks may be far. So the kernel delivers every
//! signal for which the program has a handler to a handler of ours ([`super::signal`]), on our
//! stack and with all signals blocked. Our handler writes the frame where the kernel would have
//! written it without us, on the program's alternate stack or below its stack pointer; far pages
//! come near when they are touched. Then it changes its own frame so that returning from it begins
//! the program's handler. From there on our stack is free for the faults of the handler, which may
//! return, jump away, or never end.
//!
//! When the program's handler returns (`rt_sigreturn`), the filter sends the call to us, because
//! the mask and the alternate stack in the frame are the program's view of them.

use super::call::{CallOutcome, Context, error};
use super::runtime::RUNTIME;
use super::signal::{self, OURS};
use super::thread::{self, ThreadRecord};
use super::{storage, syscall_pinning};
use core::sync::atomic::Ordering;
use farfield_os::signals::{self, Action, SA_RESTORER, SignalSet, bit};
use farfield_os::{Result, process};

/// Flag by which the alternate stack is given up while a handler runs on it, until the handler
/// returns. (libc has no name for it.)
const SS_AUTODISARM: i32 = i32::MIN;

/// Flags of an action that the kernel gets from us; all others are the program's.
const OUR_FLAGS: u64 = libc::SA_SIGINFO as u64 | libc::SA_ONSTACK as u64 | libc::SA_NODEFER as u64 | SA_RESTORER;

/// Signals that no mask has.
const UNBLOCKABLE: SignalSet = bit(libc::SIGKILL) | bit(libc::SIGSTOP);

const NO_STACK: libc::stack_t = libc::stack_t { ss_sp: core::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };

/// Place where the thread goes on when a handler of ours is done.
#[must_use]
pub enum HandlerReturn {
    /// The thread goes on where the handler's frame says.
    CurrentFrame,
    /// The thread goes on as the frame says whose `ucontext` is at this address.
    OtherFrame(usize),
}

/// Begins the program's handler when the caller, a handler of ours, returns.
///
/// # Safety
/// `info` must be what the kernel gave that handler.
pub unsafe fn deliver(signal: i32, info: *mut libc::siginfo_t, context: &Context, action: &Action) -> HandlerReturn {
    let Some(record) = thread::current() else {
        // There are too many threads: the handler runs on this stack, with all signals blocked.
        // SAFETY: the program installed this handler for this signal; with or without SA_SIGINFO,
        // the x86-64 convention lets a callee ignore further arguments.
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { core::mem::transmute(action.handler) };
        handler(signal, info, context.address() as *mut libc::c_void);
        return HandlerReturn::CurrentFrame;
    };
    if record.on_alternate_stack(context.sp()) {
        // SAFETY: by the caller.
        unsafe { call_here(record, signal, info, context, action) };
        return HandlerReturn::CurrentFrame;
    }
    // SAFETY: only this thread uses the field.
    let stack = unsafe { &mut *record.program_stack.get() };
    let before = *stack;
    let (sp, red_zone) = (context.sp(), 128);
    let enters = action.flags & libc::SA_ONSTACK as u64 != 0 && before.ss_size > 0 && !is_on(&before, sp - red_zone);
    let top = if enters { before.ss_sp as usize + before.ss_size } else { sp - red_zone };
    let frame = context.frame_below(top);
    let overflows = (enters || is_on(&before, sp)) && !contains(&before, frame.address);
    if overflows || action.flags & SA_RESTORER == 0 {
        end_by_fault(context);
        return HandlerReturn::CurrentFrame;
    }
    if enters {
        record.enter_handler_stack(before.ss_sp as usize, before.ss_size);
    }
    let hidden = record.hidden_mask.load(Ordering::Relaxed);
    let restored = context.mask() | hidden;
    let defer = if action.flags & libc::SA_NODEFER as u64 == 0 { bit(signal) } else { 0 };
    let blocked = syscall_pinning::mask_of_wait(record, context).unwrap_or(context.mask()) | action.mask | defer;
    record.hidden_mask.store((hidden | blocked) & OURS, Ordering::Relaxed);
    if before.ss_flags & SS_AUTODISARM != 0 {
        *stack = NO_STACK;
    }
    let is_ours = record.on_alternate_stack(context.address());
    if is_ours || enters {
        // SAFETY: where the kernel would have written it; not where the handler that runs has its
        // own frame.
        let theirs = unsafe { context.write_frame(&frame, action.restorer, info) };
        theirs.set_mask(restored);
        theirs.name_alternate_stack(before);
        context.begin_handler(action.handler, signal, frame.address, frame.info());
        context.set_mask(blocked & !OURS);
        HandlerReturn::CurrentFrame
    } else {
        // The first signal of a thread that had no alternate stack: the kernel's frame is where the
        // program's belongs.
        begin_in_place(record, signal, info, context, action, blocked & !OURS, |theirs| {
            theirs.set_mask(restored);
            theirs.name_alternate_stack(before);
        })
    }
}

/// Runs the program's handler on our stack, because the signal interrupted a handler of ours: one
/// that executes another program lets signals in. Its frames are on our stack, so nothing may begin
/// at the top of that stack before it goes on.
///
/// # Safety
/// The contract is that of [`deliver`].
unsafe fn call_here(
    record: &ThreadRecord,
    signal: i32,
    info: *mut libc::siginfo_t,
    context: &Context,
    action: &Action,
) {
    // SAFETY: the program installed this handler for this signal; with or without SA_SIGINFO, the
    // x86-64 convention lets a callee ignore further arguments.
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
        unsafe { core::mem::transmute(action.handler) };
    let defer = if action.flags & libc::SA_NODEFER as u64 == 0 { bit(signal) } else { 0 };
    let all = signals::set_mask((context.mask() | action.mask | defer) & !OURS);
    let storage = storage::lend(record);
    handler(signal, info, context.address() as *mut libc::c_void);
    drop(storage);
    signals::set_mask(all);
}

/// Begins the handler with the kernel's frame as its own, from a frame on our stack, where nothing
/// runs yet.
fn begin_in_place(
    record: &ThreadRecord,
    signal: i32,
    info: *mut libc::siginfo_t,
    context: &Context,
    action: &Action,
    blocked: SignalSet,
    change: impl FnOnce(&Context),
) -> HandlerReturn {
    let Ok((base, len)) = record.alternate_stack() else {
        end_by_fault(context);
        return HandlerReturn::CurrentFrame;
    };
    // A signal of ours that is sent now would be delivered where the frame is built.
    signals::set_mask(!0);
    // SAFETY: our stack of this thread, which is not on it.
    let ours = unsafe { context.copy_below(base + len) };
    let frame = context.address() - super::call::FRAME_CONTEXT;
    change(context);
    // SAFETY: in front of the context the kernel has put the address to which the handler returns.
    unsafe { (frame as *mut usize).write(action.restorer) };
    ours.begin_handler(action.handler, signal, frame, info as usize);
    ours.set_mask(blocked);
    ours.set_alternate_stack(base, len);
    HandlerReturn::OtherFrame(ours.address())
}

/// Serves `rt_sigreturn`: the thread goes on as a frame of the program's says.
pub fn return_from_handler(context: &Context) -> CallOutcome {
    let Some(record) = thread::current() else { return error(libc::EAGAIN) };
    let Some((mask, stack)) = context.load(context.sp(), syscall_pinning::peek_slice) else {
        end_by_fault(context);
        return CallOutcome::Resume;
    };
    context.set_mask(mask & !OURS);
    // This is not so for a frame that the kernel wrote itself, for a handler that a child of vfork
    // has set.
    if !record.on_alternate_stack(stack.ss_sp as usize) {
        record.hidden_mask.store(mask & OURS, Ordering::Relaxed);
        // SAFETY: only this thread uses the field.
        let _ = set_to(unsafe { &mut *record.program_stack.get() }, stack, context.sp());
    }
    signal::send_postponed(record);
    CallOutcome::Resume
}

/// Serves `sigaltstack`: the kernel's alternate stack stays ours; the program's is where its
/// handlers will run.
pub fn set_stack(context: &Context, args: [usize; 6]) -> CallOutcome {
    let [new, old, ..] = args;
    let Some(record) = thread::current() else { return error(libc::ENOMEM) };
    let asked = if new == 0 { None } else { syscall_pinning::peek::<libc::stack_t>(new) };
    if new != 0 && asked.is_none() {
        return error(libc::EFAULT);
    }
    // SAFETY: only this thread uses the field.
    let stack = unsafe { &mut *record.program_stack.get() };
    let mut before = *stack;
    before.ss_flags &= SS_AUTODISARM;
    if before.ss_size == 0 {
        before.ss_flags |= libc::SS_DISABLE;
    } else if is_on(stack, context.sp()) {
        before.ss_flags |= libc::SS_ONSTACK;
    }
    if let Some(asked) = asked
        && let Err(errno) = set_to(stack, asked, context.sp())
    {
        return error(errno);
    }
    if old != 0 && !syscall_pinning::poke(old, before) {
        return error(libc::EFAULT);
    }
    CallOutcome::Done(0)
}

/// Sets the program's alternate stack as the kernel would, for a thread whose stack pointer is
/// `sp`.
fn set_to(stack: &mut libc::stack_t, asked: libc::stack_t, sp: usize) -> core::result::Result<(), i32> {
    if is_on(stack, sp) {
        return Err(libc::EPERM);
    }
    let mode = asked.ss_flags & !SS_AUTODISARM;
    match mode {
        libc::SS_DISABLE => *stack = libc::stack_t { ss_flags: asked.ss_flags, ..NO_STACK },
        0 | libc::SS_ONSTACK if asked.ss_size < libc::MINSIGSTKSZ => return Err(libc::ENOMEM),
        0 | libc::SS_ONSTACK => *stack = asked,
        _ => return Err(libc::EINVAL),
    }
    Ok(())
}

/// Checks whether the address is on this stack.
fn contains(stack: &libc::stack_t, address: usize) -> bool {
    let base = stack.ss_sp as usize;
    stack.ss_size > 0 && address > base && address - base <= stack.ss_size
}

/// Checks whether a thread with this stack pointer runs on it; never true for a stack that is given
/// up meanwhile (`SS_AUTODISARM`).
fn is_on(stack: &libc::stack_t, sp: usize) -> bool {
    stack.ss_flags & SS_AUTODISARM == 0 && contains(stack, sp)
}

/// Ends the program as the kernel does when there is no room for the frame of a signal, or none
/// where one should be.
fn end_by_fault(context: &Context) {
    // SAFETY: the default action.
    let _ = unsafe { signals::set_action(libc::SIGSEGV, &Action::default()) };
    context.set_mask(context.mask() & !bit(libc::SIGSEGV));
    process::send_to_self(libc::SIGSEGV);
}

/// Serves `rt_sigaction`: the kernel gets a handler of ours for each of the program's.
pub fn set_action(args: [usize; 6]) -> CallOutcome {
    let [signal, new, old, size, ..] = args;
    if size != size_of::<SignalSet>() {
        return error(libc::EINVAL);
    }
    let signal = signal as i32;
    let asked = if new == 0 { None } else { syscall_pinning::peek::<Action>(new) };
    if new != 0 && asked.is_none() {
        return error(libc::EFAULT);
    }
    let before = match asked {
        None => action(signal),
        Some(asked) => replace_action(signal, asked),
    };
    match before {
        Err(errno) => error(errno.0),
        Ok(before) if old != 0 && !syscall_pinning::poke(old, before) => error(libc::EFAULT),
        Ok(_) => CallOutcome::Done(0),
    }
}

/// Returns the program's action for a signal.
pub fn action(signal: i32) -> Result<Action> {
    let remembered = RUNTIME.program_actions.lock();
    if is_ours(signal) {
        return Ok(remembered[signal as usize - 1]);
    }
    let kernel = signals::action(signal)?;
    Ok(as_set(kernel, &remembered[signal as usize - 1]))
}

/// Returns the action that a handler of ours has been called for. A handler that is gone again is
/// still found for signals delivered before.
pub fn action_to_deliver(signal: i32) -> Action {
    let mut remembered = RUNTIME.program_actions.lock();
    let action = &mut remembered[signal as usize - 1];
    let delivered = *action;
    if is_ours(signal) && delivered.flags & libc::SA_RESETHAND as u64 != 0 && delivered.handler > libc::SIG_IGN {
        action.handler = libc::SIG_DFL;
    }
    delivered
}

fn is_ours(signal: i32) -> bool {
    matches!(signal, libc::SIGBUS | libc::SIGSYS)
}

/// Puts our handler before each handler that the program has already. Used where the program had
/// run before far memory was switched on.
pub fn adopt_actions() -> Result<()> {
    const SIGNALS: i32 = 64;
    for signal in (1..=SIGNALS).filter(|signal| !is_ours(*signal) && bit(*signal) & UNBLOCKABLE == 0) {
        let action = signals::action(signal)?;
        if action.handler > libc::SIG_IGN {
            replace_action(signal, action)?;
        }
    }
    Ok(())
}

/// Sets an action, and returns the one before.
fn replace_action(signal: i32, mut asked: Action) -> Result<Action> {
    asked.mask &= !UNBLOCKABLE;
    // A process may share our memory until it executes something: what it sets is not its parent's.
    let borrowed = RUNTIME.is_borrowed();
    // The lock is held over both steps, so that a handler called for the new action finds it.
    let mut remembered = RUNTIME.program_actions.lock();
    if is_ours(signal) {
        let action = &mut remembered[signal as usize - 1];
        let before = *action;
        if !borrowed {
            *action = asked;
        }
        return Ok(before);
    }
    let has_handler = !matches!(asked.handler, libc::SIG_DFL | libc::SIG_IGN);
    // Without a restorer the kernel ends the program at the first signal, and that is right.
    let wrapped = has_handler && asked.flags & SA_RESTORER != 0 && !borrowed;
    let kernel = if wrapped {
        let ours = Action::handler(signal::program_handler(), !OURS);
        Action { flags: asked.flags & !OUR_FLAGS | ours.flags, ..ours }
    } else {
        Action { mask: asked.mask & !OURS, ..asked }
    };
    // SAFETY: a handler of ours that calls the program's, or the program's own action.
    let before = unsafe { signals::set_action(signal, &kernel) }?;
    let action = &mut remembered[signal as usize - 1];
    let before = as_set(before, action);
    if wrapped {
        *action = asked;
    }
    Ok(before)
}

/// Returns the action as the program has set it, for the one that the kernel has. (The kernel
/// leaves out flags that it does not know.)
fn as_set(kernel: Action, remembered: &Action) -> Action {
    if kernel.handler != signal::program_handler() as *const () as usize {
        return kernel;
    }
    Action { flags: kernel.flags & !OUR_FLAGS | remembered.flags & OUR_FLAGS, ..*remembered }
}
