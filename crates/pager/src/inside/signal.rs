//! Our signal handlers: of the two signals that are ours, and of those that the program has
//! handlers for.

use super::call::{CallOutcome, Context};
use super::delivery::HandlerReturn;
use super::own_code::{self, OwnCode};
use super::runtime::{Phase, RUNTIME};
use super::{delivery, emulate, fault, late_start, storage, syscall_pinning, thread};
use crate::filter::TRAP_DATA;
use crate::window;
use core::sync::atomic::Ordering;
use farfield_os::signals::{self, Action, SignalSet, bit};

/// Signals that must never be blocked: a blocked one would kill the process at the next far access.
pub const OURS: SignalSet = bit(libc::SIGBUS) | bit(libc::SIGSYS);

/// Value of `si_code` for a seccomp trap.
const SYS_SECCOMP: i32 = 1;

/// Length of the instruction `syscall`.
const SYSCALL_BYTES: usize = 2;

const SEGV_MAPERR: i32 = 1;
const SEGV_ACCERR: i32 = 2;

/// Value of `si_code` for a SIGBUS of a missing page, as opposed to a broken file mapping or bad
/// memory.
const BUS_ADRERR: i32 = 2;

/// Installs both handlers. All other signals wait while one runs, so that a program's handler never
/// finds our locks held by the thread that it interrupted.
pub fn install() -> farfield_os::Result<()> {
    // SAFETY: both handlers are async-signal-safe by the laws of this module.
    unsafe {
        let bus = signals::set_action(libc::SIGBUS, &Action::handler(on_bus, !OURS))?;
        let sys = signals::set_action(libc::SIGSYS, &Action::handler(on_sys, !OURS))?;
        let mut actions = RUNTIME.program_actions.lock();
        actions[libc::SIGBUS as usize - 1] = bus;
        actions[libc::SIGSYS as usize - 1] = sys;
    }
    Ok(())
}

/// Returns the index in a record's `postponed` for one of our signals.
fn postponed_index(signal: i32) -> Option<usize> {
    match signal {
        libc::SIGBUS => Some(0),
        libc::SIGSYS => Some(1),
        _ => None,
    }
}

extern "C" fn on_bus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    with_own_storage(bus, signal, info, context);
}

extern "C" fn on_sys(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    with_own_storage(sys, signal, info, context);
}

/// Stands before the program's handlers as the handler that the kernel calls.
extern "C" fn on_program_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    with_own_storage(program_signal, signal, info, context);
}

/// Runs a handler with thread-local storage of ours. If it returns another frame, the thread goes
/// on from that frame and not from the handler's.
fn with_own_storage(
    handler: fn(i32, *mut libc::siginfo_t, *mut libc::c_void) -> HandlerReturn,
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let storage = storage::enter();
    let end = handler(signal, info, context);
    drop(storage);
    if let HandlerReturn::OtherFrame(frame) = end {
        // SAFETY: a frame that `delivery` has made for it.
        unsafe { signals::return_to(frame) }
    }
}

fn bus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) -> HandlerReturn {
    // SAFETY: the kernel's arguments of this handler.
    let (address, code, context_) = unsafe { ((*info).si_addr() as usize, (*info).si_code, Context::new(context)) };
    if code == BUS_ADRERR && window::contains(address) && fault::settled_phase(&RUNTIME) == Phase::Armed {
        let _own = OwnCode::enter();
        if prepare_stack(&context_) && late_start::is_late() {
            // This thread is older than far memory: the access is tried again on the new stack.
            return HandlerReturn::CurrentFrame;
        }
        if fault::on_fault(address, context_.is_write_fault(), Some(&context_)) {
            return HandlerReturn::CurrentFrame;
        }
    }
    pass_on(signal, info, &context_)
}

fn sys(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) -> HandlerReturn {
    // SAFETY: the kernel's arguments of this handler; `si_syscall` lies at offset 24 of a seccomp
    // trap's information.
    let (code, data, number, context_) =
        unsafe { ((*info).si_code, (*info).si_errno, info.cast::<i32>().add(6).read(), Context::new(context)) };
    let is_trap = code == SYS_SECCOMP && data == TRAP_DATA && RUNTIME.phase() != Phase::Off;
    // This comes before anything is waited for.
    if is_trap && let Some(result) = own_code::call(number as usize, &context_) {
        context_.set_result(result);
        return HandlerReturn::CurrentFrame;
    }
    if !is_trap || fault::settled_phase(&RUNTIME) == Phase::Off {
        return pass_on(signal, info, &context_);
    }
    let _own = OwnCode::enter();
    if prepare_stack(&context_) && late_start::is_late() {
        // This thread is older than far memory, and its own stack may be small: the call is made
        // again, on the new stack. (The kernel has restored the number.)
        context_.set_ip(context_.ip() - SYSCALL_BYTES);
        return HandlerReturn::CurrentFrame;
    }
    match emulate::on_call(number as usize, &context_) {
        CallOutcome::Done(value) => context_.set_result(value),
        CallOutcome::Forward => syscall_pinning::forward(number as usize, &context_),
        CallOutcome::Resume => {}
    }
    HandlerReturn::CurrentFrame
}

/// Handles a signal for which the program has a handler. For SIGSEGV it looks at the fault first.
/// The window is reserved as a whole, so the kernel calls a hole in it "access not allowed" where
/// without us it would say "not mapped". The program is told the latter.
fn program_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) -> HandlerReturn {
    // SAFETY: the kernel's arguments of this handler.
    let (address, code, context) = unsafe { ((*info).si_addr() as usize, (*info).si_code, Context::new(context)) };
    prepare_stack(&context);
    if signal == libc::SIGSEGV && code == SEGV_ACCERR && window::contains(address) {
        let own = OwnCode::enter();
        let mapped = RUNTIME.space.lock().stretch(window::page_of(address).0).is_some();
        drop(own);
        if !mapped {
            // SAFETY: ours to change until the handler returns.
            unsafe { (*info).si_code = SEGV_MAPERR };
        }
    }
    // SAFETY: the kernel's argument of this handler.
    unsafe { delivery::deliver(signal, info, &context, &delivery::action_to_deliver(signal)) }
}

/// Returns the handler that the kernel gets in place of one of the program's.
pub fn program_handler() -> extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) {
    on_program_signal
}

/// Gives a thread an alternate stack on its first signal, from the return of this handler on.
/// Returns whether it had none of ours.
fn prepare_stack(context: &Context) -> bool {
    let Some(record) = thread::current() else { return false };
    let in_force = context.alternate_stack();
    // (A record that an earlier thread has left has a stack already, which is not in force for this
    // one.)
    if in_force.ss_sp as usize == record.stack.load(Ordering::Relaxed) && in_force.ss_size > 0 {
        return false;
    }
    let Ok((base, len)) = record.alternate_stack() else { return false };
    // SAFETY: only this thread uses the field.
    unsafe { *record.program_stack.get() = in_force };
    context.set_alternate_stack(base, len);
    if in_force.ss_size > 0 && late_start::is_late() {
        replace_stack(base, len);
    }
    true
}

/// Replaces the alternate stack of this thread, on which this handler may run. The kernel refuses
/// that to a thread whose stack pointer is there, so the call is made with one on the new stack.
fn replace_stack(base: usize, len: usize) {
    let stack = libc::stack_t { ss_sp: base as *mut libc::c_void, ss_flags: 0, ss_size: len };
    // SAFETY: the new stack is mapped and nobody uses it yet; every signal but ours is blocked, and
    // nothing here raises one. The gate is `syscall; ret` and leaves `saved` as it is.
    unsafe {
        core::arch::asm!(
            "mov {saved}, rsp",
            "mov rsp, {top}",
            "call {gate}",
            "mov rsp, {saved}",
            saved = out(reg) _,
            top = in(reg) base + len,
            gate = in(reg) farfield_os::gate::address(),
            inlateout("rax") libc::SYS_sigaltstack as isize => _,
            in("rdi") &raw const stack, in("rsi") 0usize,
            out("rcx") _, out("r11") _,
        );
    }
}

/// Keeps a signal that was sent to a thread whose program believes to have blocked it, until the
/// program opens it again ([`send_postponed`]). As in the kernel, a second one of the same kind is
/// lost. Returns whether the signal was kept.
fn postpone(signal: i32, info: *mut libc::siginfo_t) -> bool {
    let (Some(record), Some(index)) = (thread::current(), postponed_index(signal)) else { return false };
    if record.hidden_mask.load(Ordering::Relaxed) & bit(signal) == 0 {
        return false;
    }
    if record.postponed_mask.load(Ordering::Relaxed) & bit(signal) == 0 {
        // SAFETY: this thread's, which reads it only once the mask says that it is there; a
        // handler's argument.
        unsafe { (*record.postponed.get())[index].write(info.read()) };
        record.postponed_mask.fetch_or(bit(signal), Ordering::Release);
    }
    true
}

/// Sends this thread the postponed signals that are open again. They are delivered when the handler
/// that calls this returns.
pub fn send_postponed(record: &thread::ThreadRecord) {
    let hidden = record.hidden_mask.load(Ordering::Relaxed);
    for signal in [libc::SIGBUS, libc::SIGSYS] {
        if record.postponed_mask.load(Ordering::Acquire) & bit(signal) & !hidden == 0 {
            continue;
        }
        signals::set_mask(!0);
        record.postponed_mask.fetch_and(!bit(signal), Ordering::Relaxed);
        let index = postponed_index(signal).expect("one of ours");
        // SAFETY: the mask said that it is there.
        let info = unsafe { (*record.postponed.get())[index].assume_init_ref() };
        signals::send_again(signal, info);
    }
}

/// Acts on a signal that is not ours as the program asked for.
fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: &Context) -> HandlerReturn {
    prepare_stack(context);
    // SAFETY: the kernel's argument of a handler.
    let sent = unsafe { (*info).si_code } <= 0;
    if sent && postpone(signal, info) {
        return HandlerReturn::CurrentFrame;
    }
    let action = delivery::action_to_deliver(signal);
    match action.handler {
        libc::SIG_IGN if sent => {}
        // A signal that an instruction raised cannot be ignored: the kernel ends the process.
        libc::SIG_IGN | libc::SIG_DFL => {
            // SAFETY: the default action.
            let _ = unsafe { signals::set_action(signal, &Action::default()) };
            // An instruction is tried again, and the default action ends the process; a signal that
            // was sent is sent again.
            if sent {
                farfield_os::process::send_to_self(signal);
            }
        }
        // SAFETY: the kernel's argument of a handler.
        _ => return unsafe { delivery::deliver(signal, info, context, &action) },
    }
    HandlerReturn::CurrentFrame
}
