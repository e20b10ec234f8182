//! System calls of Farfield: every one of the project, and nothing else.
//!
//! All calls go through [`gate::syscall`], one instruction whose address is known, because inside
//! an unmodified program a seccomp filter must tell our own calls from the program's. Nothing here
//! allocates, locks or touches thread-local storage, so everything may be called from a signal
//! handler; the locks of [`sync`] are for others to use.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

pub mod disk;
mod errno;
pub mod file;
pub mod gate;
pub mod memfd;
pub mod memory;
pub mod net;
pub mod numa;
pub mod pagemap;
pub mod pipe;
pub mod process;
pub mod ring;
pub mod seccomp;
pub mod serving;
pub mod signals;
pub mod sync;
pub mod uffd;

pub use errno::{Errno, Result};
