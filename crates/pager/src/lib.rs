//! Transparent paging: unmodified programs with far memory.
//!
//! [`runner`] is the outside (`farfield run`); [`inside`] is what the preload library does in the program; [`control`] is
//! the shared memory through which they talk.

#![cfg_attr(
    test,
    allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests run outside of programs")
)]

pub mod control;
pub mod elf;
pub mod filter;
pub mod inside;
pub mod limits;
#[cfg(feature = "model")]
pub mod model;
#[allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "runs outside of programs")]
pub mod runner;
pub mod space;
pub mod submission;
pub mod window;
