//! Transparent paging: unmodified programs with far memory.
//!
//! [`runner`] is the outside (`farfield run`); [`inside`] is what the preload library does in the program; [`control`] is
//! the shared memory through which they talk.

pub mod control;
pub mod elf;
pub mod filter;
pub mod inside;
#[cfg(feature = "model")]
pub mod model;
pub mod runner;
pub mod space;
pub mod submission;
pub mod window;
