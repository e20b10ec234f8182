//! One system call of the program, as the SIGSYS handler sees it.

use farfield_os::signals::SignalSet;

/// Registers of a thread of the program that a signal has interrupted: whoever has one runs in its handler, in that thread.
pub struct Context {
    context: *mut libc::ucontext_t,
}

impl Context {
    /// Wraps what the kernel gave the handler.
    ///
    /// # Safety
    /// `context` must be the third argument of a running `SA_SIGINFO` handler, and outlive this value.
    pub unsafe fn new(context: *mut libc::c_void) -> Context {
        Context { context: context.cast() }
    }

    fn register(&self, index: i32) -> *mut i64 {
        // SAFETY: by `new` the context is valid; the index is one of libc's.
        unsafe { (&raw mut (*self.context).uc_mcontext.gregs).cast::<i64>().add(index as usize) }
    }

    fn get(&self, index: i32) -> usize {
        // SAFETY: a register of our context.
        unsafe { self.register(index).read() as usize }
    }

    fn set(&self, index: i32, value: usize) {
        // SAFETY: a register of our context; the handler is its only user.
        unsafe { self.register(index).write(value as i64) }
    }

    /// Stack pointer.
    pub fn sp(&self) -> usize {
        self.get(libc::REG_RSP)
    }

    /// Sets the stack pointer.
    pub fn set_sp(&self, sp: usize) {
        self.set(libc::REG_RSP, sp);
    }

    /// Instruction pointer.
    pub fn ip(&self) -> usize {
        self.get(libc::REG_RIP)
    }

    /// Sets the instruction pointer.
    pub fn set_ip(&self, ip: usize) {
        self.set(libc::REG_RIP, ip);
    }

    /// Page-fault error code: was the access a write?
    pub fn is_write_fault(&self) -> bool {
        self.get(libc::REG_ERR) & 2 != 0
    }

    /// What the call returns to the program.
    pub fn set_result(&self, value: isize) {
        self.set(libc::REG_RAX, value as usize);
    }

    /// The number of the call, for the kernel to read again.
    pub fn set_number(&self, number: usize) {
        self.set(libc::REG_RAX, number);
    }

    /// The six arguments.
    pub fn arguments(&self) -> [usize; 6] {
        [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9]
            .map(|index| self.get(index))
    }

    /// Changes one argument.
    pub fn set_argument(&self, index: usize, value: usize) {
        let registers = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9];
        self.set(registers[index], value);
    }

    /// The mask that is restored when the handler returns.
    pub fn mask(&self) -> SignalSet {
        // SAFETY: by `new`. The kernel's set is the first 8 bytes of libc's.
        unsafe { (&raw const (*self.context).uc_sigmask).cast::<SignalSet>().read() }
    }

    /// Sets it.
    pub fn set_mask(&self, mask: SignalSet) {
        // SAFETY: as in `mask`; the handler is its only user.
        unsafe { (&raw mut (*self.context).uc_sigmask).cast::<SignalSet>().write(mask) }
    }

    /// The alternate stack that is restored when the handler returns.
    pub fn alternate_stack(&self) -> libc::stack_t {
        // SAFETY: by `new`.
        unsafe { (*self.context).uc_stack }
    }

    /// A copy of the frame that the handler returns to, with its floating-point state, below `top`.
    ///
    /// # Safety
    /// The 64 KiB below `top` must be the caller's.
    pub unsafe fn copy_below(&self, top: usize) -> Context {
        // SAFETY: by `new` and the caller. The processor's state must begin at a multiple of 64; the kernel wrote it so, and
        // its length with it.
        unsafe {
            let floats = (*self.context).uc_mcontext.fpregs.cast::<u8>();
            let floats_bytes = match floats.add(FLOATS_EXTENDED).cast::<[u32; 2]>().read_unaligned() {
                [FLOATS_MAGIC, bytes] => bytes as usize,
                _ => FLOATS_BYTES,
            };
            let floats_copy = ((top - floats_bytes) & !63) as *mut u8;
            core::ptr::copy_nonoverlapping(floats, floats_copy, floats_bytes);
            let copy = ((floats_copy as usize - CONTEXT_BYTES) & !63) as *mut libc::ucontext_t;
            core::ptr::copy_nonoverlapping(self.context.cast::<u8>(), copy.cast(), CONTEXT_BYTES);
            (&raw mut (*copy).uc_mcontext.fpregs).write(floats_copy.cast());
            Context { context: copy }
        }
    }

    /// Where the frame is.
    pub fn address(&self) -> usize {
        self.context as usize
    }

    /// Sets it to `len` bytes at `base`.
    pub fn set_alternate_stack(&self, base: usize, len: usize) {
        let stack = libc::stack_t { ss_sp: base as *mut libc::c_void, ss_flags: 0, ss_size: len };
        // SAFETY: by `new`; the handler is its only user.
        unsafe { (*self.context).uc_stack = stack }
    }
}

/// `ucontext` as the kernel pushes it: up to the mask, which has 8 bytes here.
const CONTEXT_BYTES: usize = core::mem::offset_of!(libc::ucontext_t, uc_sigmask) + 8;
/// Floating-point state without extensions, and where in it the kernel says whether it has some, and the length of all.
const FLOATS_BYTES: usize = 512;
const FLOATS_EXTENDED: usize = 464;
const FLOATS_MAGIC: u32 = 0x4650_5853;

/// What becomes of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Done by us: the value to return, an error as `-errno`.
    Done(isize),
    /// The kernel shall do it, once its buffers are near.
    Forward,
    /// The context was changed already; just return.
    Resume,
}

/// An error as the kernel returns it.
pub const fn error(errno: i32) -> Outcome {
    Outcome::Done(-(errno as isize))
}

/// A result as the kernel returns it.
pub fn done(result: farfield_os::Result<usize>) -> Outcome {
    match result {
        Ok(value) => Outcome::Done(value as isize),
        Err(errno) => error(errno.0),
    }
}

/// Makes the program's call for it, visible to the program's own filters.
///
/// # Safety
/// The call must be one that the program made, with pointers that it passed or that are ours.
pub unsafe fn forward(number: usize, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: GATE_FORWARD is `syscall; ret`; may use the stack, so no red zone is hit.
    unsafe {
        core::arch::asm!(
            "call {gate}",
            gate = in(reg) crate::window::GATE_FORWARD,
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            out("rcx") _, out("r11") _,
        );
    }
    result
}
