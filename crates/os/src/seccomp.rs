//! Installation of a system call filter (seccomp).

use crate::errno::{Errno, Result};
use crate::gate::syscall;

/// An instruction of classic BPF.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if true.
    pub jump_true: u8,
    /// Instructions to skip if false.
    pub jump_false: u8,
    /// Constant.
    pub constant: u32,
}

/// The kernel's `struct sock_fprog`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FilterProgram {
    /// Number of instructions.
    pub len: u16,
    /// The instructions.
    pub instructions: *const Instruction,
}

/// Checks whether this process may install a filter without giving up the right to gain privileges
/// through `exec`.
pub fn may_filter_with_privileges() -> bool {
    // CAP_SYS_ADMIN is 21; capget's data for version 3 are two sets of three words.
    let mut header = [0x2008_0522u32, 0];
    let mut data = [0u32; 6];
    // SAFETY: both arrays have the kernel's layout.
    let result =
        unsafe { syscall(libc::SYS_capget, [header.as_mut_ptr() as usize, data.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    result.is_ok() && data[0] & (1 << 21) != 0
}

/// Checks whether the kernel lets this process install filters that trap. Changes nothing.
pub fn check() -> Result<()> {
    const RET_TRAP: u32 = 0x0003_0000;
    let action = RET_TRAP;
    let args = [libc::SECCOMP_GET_ACTION_AVAIL as usize, 0, &raw const action as usize, 0, 0, 0];
    // SAFETY: `action` is readable.
    unsafe { syscall(libc::SYS_seccomp, args) }.map(drop)
}

/// Gives up the gaining of privileges through `exec`, for this thread and all that it starts.
pub fn set_no_new_privileges() -> Result<()> {
    // SAFETY: numbers only.
    unsafe { syscall(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0, 0]) }.map(drop)
}

/// Installs `program` for all threads of this process (`SECCOMP_FILTER_FLAG_TSYNC`). EBUSY if a
/// thread could not be synchronised.
pub fn install(program: &[Instruction]) -> Result<()> {
    let header = FilterProgram { len: program.len() as u16, instructions: program.as_ptr() };
    // SAFETY: the program is readable; the kernel verifies it.
    let result = unsafe {
        syscall(
            libc::SYS_seccomp,
            [
                libc::SECCOMP_SET_MODE_FILTER as usize,
                libc::SECCOMP_FILTER_FLAG_TSYNC as usize,
                &raw const header as usize,
                0,
                0,
                0,
            ],
        )
    }?;
    // A positive value is the thread that could not be synchronised.
    if result == 0 { Ok(()) } else { Err(Errno(libc::EBUSY)) }
}
