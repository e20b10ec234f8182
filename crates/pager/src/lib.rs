//! Transparent paging: unmodified programs with far memory.
//!
//! [`runner`] is the outside (`farfield run`); [`inside`] is the part of the preload library that
//! runs in the program. They talk through shared memory: [`config`] holds what the runner decides,
//! [`control`] what processes count.

#![cfg_attr(
    test,
    allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "tests run outside of programs")
)]

pub mod config;
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
