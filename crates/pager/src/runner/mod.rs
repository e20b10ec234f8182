//! The runner: starts a program with far memory, watches its processes, and tells how it went.
//!
//! `docs/design/runner.md` is the design page.

mod block;

pub use block::{ControlBlock, MEMFD_NAME, Settings, create_control};
