//! Functions from shared libraries: native where-independent code that a memory server loads when
//! it starts.
//!
//! - A *function library* is a crate of type `cdylib` that names its functions:
//!   `farfield_plugin::export!(Behind);`. A library in C includes `include/farfield_functions.h`.
//! - The *server* loads it: `farfield serve --functions LIB.so`, or [`with_library`] adds it to a
//!   registry.
//! - The *caller* does not notice: the functions are called by name and version, like those that
//!   the server was built with.
//!
//! Server and library share nothing but the tables of [`abi`], so they may come from different
//! compilers and releases. The code of a library is trusted: it runs in the server's process, as
//! fast as the server's own. Strangers' code belongs into a sandbox (`farfield-sandbox`).
//! `docs/design/wic.md`, *Function libraries*, describes what is checked.

pub mod abi;
pub mod export;

mod load;
mod memory;

pub use load::{PluginError, with_library};
