//! Transparent paging.
pub mod control;
pub mod elf;
pub mod runner;
