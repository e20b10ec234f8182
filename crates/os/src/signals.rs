//! Signal actions, masks and alternate stacks, as the kernel sees them (not libc's wrappers).

use crate::errno::Result;
use crate::gate::syscall;

/// The kernel's signal set: bit `n-1` is signal `n`.
pub type SignalSet = u64;

/// Returns the bit of signal `number`.
pub const fn bit(number: i32) -> SignalSet {
    1 << (number - 1)
}

/// The kernel's `struct sigaction` on x86-64.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Action {
    /// Handler address, or `SIG_DFL` (0), `SIG_IGN` (1).
    pub handler: usize,
    /// Flags (`SA_*`).
    pub flags: u64,
    /// Address of code that calls `rt_sigreturn`.
    pub restorer: usize,
    /// Signals that are blocked while the handler runs.
    pub mask: SignalSet,
}

core::arch::global_asm!(
    ".pushsection .text.farfield_restorer,\"ax\",@progbits",
    ".balign 16",
    "nop",
    ".globl farfield_restorer",
    ".hidden farfield_restorer",
    "farfield_restorer:",
    // Through the gate, so that a filter can tell our returns from a program's. No register is worth keeping.
    "mov rcx, qword ptr [rip + {gate}]",
    "test rcx, rcx",
    "jnz 2f",
    "lea rcx, [rip + farfield_local_gate]",
    "2:",
    "mov eax, 15",
    "jmp rcx",
    ".popsection",
    gate = sym crate::gate::GATE,
);

unsafe extern "C" {
    fn farfield_restorer();
}

/// The kernel's flag that says `restorer` is set.
pub const SA_RESTORER: u64 = 0x0400_0000;

impl Action {
    /// Creates the action that runs `handler` with signal information and the interrupted context.
    /// `mask` is blocked meanwhile. The handler runs on the alternate stack if there is one.
    pub fn handler(handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void), mask: SignalSet) -> Action {
        Action {
            handler: handler as usize,
            flags: libc::SA_SIGINFO as u64 | libc::SA_ONSTACK as u64 | libc::SA_NODEFER as u64 | SA_RESTORER,
            restorer: farfield_restorer as *const () as usize,
            mask,
        }
    }
}

/// Installs `action` for `signal`; returns the one before.
///
/// # Safety
/// The handler must be fit to run at any moment.
pub unsafe fn set_action(signal: i32, action: &Action) -> Result<Action> {
    let mut old = Action::default();
    // SAFETY: both structures have the kernel's layout; the handler by the caller.
    unsafe {
        syscall(
            libc::SYS_rt_sigaction,
            [signal as usize, core::ptr::from_ref(action) as usize, &raw mut old as usize, 8, 0, 0],
        )
    }?;
    Ok(old)
}

/// Sends the calling thread a signal that it received before, with the information of the first
/// sender.
pub fn send_again(signal: i32, info: &libc::siginfo_t) {
    let (pid, tid) = (crate::process::pid() as usize, crate::process::tid() as usize);
    // SAFETY: the structure has the kernel's layout, which allows any for oneself.
    let _ = unsafe {
        syscall(libc::SYS_rt_tgsigqueueinfo, [pid, tid, signal as usize, core::ptr::from_ref(info) as usize, 0, 0])
    };
}

/// Returns the action in force for `signal`.
pub fn action(signal: i32) -> Result<Action> {
    let mut old = Action::default();
    // SAFETY: the structure has the kernel's layout.
    unsafe { syscall(libc::SYS_rt_sigaction, [signal as usize, 0, &raw mut old as usize, 8, 0, 0]) }?;
    Ok(old)
}

/// Ends a handler, this one or one that has been copied. The thread goes on as the frame says,
/// whose `ucontext` is given.
///
/// # Safety
/// What the kernel would do with the frame must be what the thread shall do.
pub unsafe fn return_to(context: usize) -> ! {
    // SAFETY: by the caller. The handler's own return address would have been popped: the kernel
    // expects the stack pointer here.
    unsafe {
        core::arch::asm!(
            "mov rsp, {context}",
            "jmp {restorer}",
            context = in(reg) context,
            restorer = sym farfield_restorer,
            options(noreturn),
        )
    }
}

/// Replaces the signal mask of this thread; returns the one before.
pub fn set_mask(mask: SignalSet) -> SignalSet {
    let mut old: SignalSet = 0;
    // SAFETY: both words are readable and writable.
    let _ = unsafe {
        syscall(
            libc::SYS_rt_sigprocmask,
            [libc::SIG_SETMASK as usize, &raw const mask as usize, &raw mut old as usize, 8, 0, 0],
        )
    };
    old
}

/// Sets the alternate stack of this thread.
///
/// # Safety
/// `base .. base + len` must stay mapped and unused while signals may arrive.
pub unsafe fn set_alternate_stack(base: usize, len: usize) -> Result<()> {
    let stack = libc::stack_t { ss_sp: base as *mut libc::c_void, ss_flags: 0, ss_size: len };
    // SAFETY: passed on to the caller.
    unsafe { syscall(libc::SYS_sigaltstack, [&raw const stack as usize, 0, 0, 0, 0, 0]) }.map(drop)
}
