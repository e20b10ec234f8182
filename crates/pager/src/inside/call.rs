//! One system call of the program, as the SIGSYS handler sees it.

use farfield_os::signals::SignalSet;

/// Registers of a program thread that a signal has interrupted. Code that has one runs in the
/// signal's handler, in that thread.
pub struct Context {
    context: *mut libc::ucontext_t,
}

impl Context {
    /// Wraps what the kernel gave the handler.
    ///
    /// # Safety
    /// `context` must be the third argument of a running `SA_SIGINFO` handler, and outlive this
    /// value.
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

    /// Returns the stack pointer.
    pub fn sp(&self) -> usize {
        self.get(libc::REG_RSP)
    }

    /// Sets the stack pointer.
    pub fn set_sp(&self, sp: usize) {
        self.set(libc::REG_RSP, sp);
    }

    /// Returns the instruction pointer.
    pub fn ip(&self) -> usize {
        self.get(libc::REG_RIP)
    }

    /// Sets the instruction pointer.
    pub fn set_ip(&self, ip: usize) {
        self.set(libc::REG_RIP, ip);
    }

    /// Checks by the page-fault error code whether the access was a write.
    pub fn is_write_fault(&self) -> bool {
        self.get(libc::REG_ERR) & 2 != 0
    }

    /// Returns what the call returned to the program.
    pub fn result(&self) -> isize {
        self.get(libc::REG_RAX) as isize
    }

    /// Sets what the call returns to the program.
    pub fn set_result(&self, value: isize) {
        self.set(libc::REG_RAX, value as usize);
    }

    /// Sets the number of the call, for the kernel to read again.
    pub fn set_number(&self, number: usize) {
        self.set(libc::REG_RAX, number);
    }

    /// Returns the six arguments.
    pub fn arguments(&self) -> [usize; 6] {
        [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9]
            .map(|index| self.get(index))
    }

    /// Changes one argument.
    pub fn set_argument(&self, index: usize, value: usize) {
        let registers = [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9];
        self.set(registers[index], value);
    }

    /// Returns the signal mask that is restored when the handler returns.
    pub fn mask(&self) -> SignalSet {
        // SAFETY: by `new`. The kernel's set is the first 8 bytes of libc's.
        unsafe { (&raw const (*self.context).uc_sigmask).cast::<SignalSet>().read() }
    }

    /// Sets the signal mask that is restored when the handler returns.
    pub fn set_mask(&self, mask: SignalSet) {
        // SAFETY: as in `mask`; the handler is its only user.
        unsafe { (&raw mut (*self.context).uc_sigmask).cast::<SignalSet>().write(mask) }
    }

    /// Returns the alternate stack that is restored when the handler returns.
    pub fn alternate_stack(&self) -> libc::stack_t {
        // SAFETY: by `new`.
        unsafe { (*self.context).uc_stack }
    }

    /// Returns address and length of the processor's state behind the registers, as the kernel
    /// wrote it.
    fn floats(&self) -> (*mut u8, usize) {
        // SAFETY: by `new`. The kernel wrote the length with the state.
        unsafe {
            let floats = (*self.context).uc_mcontext.fpregs.cast::<u8>();
            match floats.add(FLOATS_EXTENDED).cast::<[u32; 2]>().read_unaligned() {
                [FLOATS_MAGIC, bytes] => (floats, bytes as usize),
                _ => (floats, FLOATS_BYTES),
            }
        }
    }

    /// Returns where the kernel would put the floating-point state and the frame of a signal on a
    /// stack that is free below `top`.
    pub fn frame_below(&self, top: usize) -> SignalFrame {
        let floats = (top - self.floats().1) & !63;
        SignalFrame { address: ((floats - FRAME_BYTES) & !15) - 8, floats }
    }

    /// Writes a copy of the kernel's frame to `frame`, which returns to `restorer`.
    ///
    /// # Safety
    /// The place must be one that the program has given to handlers of signals; `info` is the
    /// handler's second argument.
    pub unsafe fn write_frame(&self, frame: &SignalFrame, restorer: usize, info: *const libc::siginfo_t) -> Context {
        let (floats, floats_bytes) = self.floats();
        // SAFETY: by `new` and the caller; a page that is far comes near when it is touched.
        unsafe {
            core::ptr::copy_nonoverlapping(floats, frame.floats as *mut u8, floats_bytes);
            core::ptr::copy_nonoverlapping(info.cast::<u8>(), frame.info() as *mut u8, size_of::<libc::siginfo_t>());
            core::ptr::copy_nonoverlapping(self.context.cast::<u8>(), frame.context() as *mut u8, CONTEXT_BYTES);
            let copy = frame.context() as *mut libc::ucontext_t;
            (&raw mut (*copy).uc_mcontext.fpregs).write(frame.floats as *mut _);
            (frame.address as *mut usize).write(restorer);
            Context { context: copy }
        }
    }

    /// Makes the thread begin `handler` when this frame is returned from, as the kernel begins one.
    /// The handler's frame is at `frame`, and its floating-point state is new.
    pub fn begin_handler(&self, handler: usize, signal: i32, frame: usize, info: usize) {
        self.set_ip(handler);
        self.set_sp(frame);
        self.set(libc::REG_RDI, signal as usize);
        self.set(libc::REG_RSI, info);
        self.set(libc::REG_RDX, frame + FRAME_CONTEXT);
        self.set(libc::REG_RAX, 0);
        self.set(libc::REG_EFL, self.get(libc::REG_EFL) & !FLAGS_CLEARED);
        self.forget_floats();
    }

    fn forget_floats(&self) {
        // SAFETY: by `new`; without state the kernel gives the thread that of a new one.
        unsafe { (&raw mut (*self.context).uc_mcontext.fpregs).write(core::ptr::null_mut()) };
    }

    /// Takes over registers and floating-point state of a frame of the program's at `address`,
    /// which `peek` reads. Returns the mask and the alternate stack in that frame; `None` if it
    /// cannot be read.
    pub fn load(&self, address: usize, peek: impl Fn(usize, &mut [u8]) -> bool) -> Option<(SignalSet, libc::stack_t)> {
        let mut bytes = ContextCopy([0; CONTEXT_BYTES]);
        if !peek(address, &mut bytes.0) {
            return None;
        }
        let theirs = Context { context: (&raw mut bytes).cast() };
        // SAFETY: fields of a copied context, all of them numbers.
        let theirs_floats = unsafe { (*theirs.context).uc_mcontext.fpregs } as usize;
        let (floats, room) = self.floats();
        if theirs_floats == 0 {
            self.forget_floats();
        } else {
            // SAFETY: the kernel wrote as much there for the handler that runs; nobody else uses
            // it.
            let ours = unsafe { core::slice::from_raw_parts_mut(floats, room) };
            if !peek(theirs_floats, &mut ours[..FLOATS_BYTES]) {
                return None;
            }
            let [magic, len] = [FLOATS_EXTENDED, FLOATS_EXTENDED + 4]
                .map(|at| u32::from_ne_bytes([ours[at], ours[at + 1], ours[at + 2], ours[at + 3]]));
            let extended = magic == FLOATS_MAGIC && (FLOATS_BYTES..=room).contains(&(len as usize));
            if extended && !peek(theirs_floats + FLOATS_BYTES, &mut ours[FLOATS_BYTES..len as usize]) {
                return None;
            }
            if !extended {
                // The kernel does this with state that it does not know.
                ours[FLOATS_EXTENDED..FLOATS_EXTENDED + 4].fill(0);
            }
        }
        // SAFETY: both are contexts; the pointer to the floating-point state stays ours.
        unsafe {
            let kept = (*self.context).uc_mcontext.fpregs;
            let mut registers = (*theirs.context).uc_mcontext;
            registers.fpregs = kept;
            (&raw mut (*self.context).uc_mcontext).write(registers);
            (&raw mut (*self.context).uc_flags).write((*theirs.context).uc_flags);
        }
        Some((theirs.mask(), theirs.alternate_stack()))
    }

    /// Writes a copy of the frame that the handler returns to, with its floating-point state, below
    /// `top`.
    ///
    /// # Safety
    /// The 64 KiB below `top` must be the caller's.
    pub unsafe fn copy_below(&self, top: usize) -> Context {
        // SAFETY: by `new` and the caller. The processor's state must begin at a multiple of 64;
        // the kernel wrote it so.
        unsafe {
            let (floats, floats_bytes) = self.floats();
            let floats_copy = ((top - floats_bytes) & !63) as *mut u8;
            core::ptr::copy_nonoverlapping(floats, floats_copy, floats_bytes);
            let copy = ((floats_copy as usize - CONTEXT_BYTES) & !63) as *mut libc::ucontext_t;
            core::ptr::copy_nonoverlapping(self.context.cast::<u8>(), copy.cast(), CONTEXT_BYTES);
            (&raw mut (*copy).uc_mcontext.fpregs).write(floats_copy.cast());
            Context { context: copy }
        }
    }

    /// Returns the address of the frame.
    pub fn address(&self) -> usize {
        self.context as usize
    }

    /// Sets the alternate stack that is restored when the handler returns to `len` bytes at `base`.
    pub fn set_alternate_stack(&self, base: usize, len: usize) {
        self.name_alternate_stack(libc::stack_t { ss_sp: base as *mut libc::c_void, ss_flags: 0, ss_size: len });
    }

    /// Sets the alternate stack that is restored when the handler returns.
    pub fn name_alternate_stack(&self, stack: libc::stack_t) {
        // SAFETY: by `new`; the handler is its only user.
        unsafe { (*self.context).uc_stack = stack }
    }
}

/// Place of the frame of a signal: the kernel's `struct rt_sigframe`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalFrame {
    /// Address of the frame's first byte, which holds the address that the handler returns to.
    pub address: usize,
    floats: usize,
}

impl SignalFrame {
    /// Returns the address of the `ucontext`.
    pub fn context(&self) -> usize {
        self.address + FRAME_CONTEXT
    }

    /// Returns the address of the `siginfo`.
    pub fn info(&self) -> usize {
        self.context() + CONTEXT_BYTES
    }
}

/// Number of bytes in front of the `ucontext` in a frame; `FRAME_BYTES` is the whole frame without
/// floating-point state.
pub const FRAME_CONTEXT: usize = 8;
const FRAME_BYTES: usize = FRAME_CONTEXT + CONTEXT_BYTES + size_of::<libc::siginfo_t>();

/// A copied `ucontext`, aligned as one.
#[repr(C, align(16))]
struct ContextCopy([u8; CONTEXT_BYTES]);

/// Bits of the flags register that are off when a handler begins: direction, trap after each
/// instruction, resume.
const FLAGS_CLEARED: usize = 1 << 10 | 1 << 8 | 1 << 16;

/// Bytes of `ucontext` as the kernel pushes it: up to the mask, which has 8 bytes here.
const CONTEXT_BYTES: usize = core::mem::offset_of!(libc::ucontext_t, uc_sigmask) + 8;
/// Bytes of the floating-point state without extensions. At `FLOATS_EXTENDED` the kernel says by
/// `FLOATS_MAGIC` whether it has some, and the length of all.
const FLOATS_BYTES: usize = 512;
const FLOATS_EXTENDED: usize = 464;
const FLOATS_MAGIC: u32 = 0x4650_5853;

/// Decision about a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallOutcome {
    /// The call was done by us: the value to return, an error as `-errno`.
    Done(isize),
    /// The kernel shall do the call, once its buffers are near.
    Forward,
    /// The context was changed already, and the handler just returns.
    Resume,
}

/// Returns an error number as the kernel returns it.
pub const fn error(errno: i32) -> CallOutcome {
    CallOutcome::Done(-(errno as isize))
}

/// Converts a result to what the kernel returns.
pub fn done(result: farfield_os::Result<usize>) -> CallOutcome {
    match result {
        Ok(value) => CallOutcome::Done(value as isize),
        Err(errno) => error(errno.0),
    }
}

/// Makes the program's call for it, visible to the program's own filters. Returns the kernel's
/// result, an error as `-errno`.
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
