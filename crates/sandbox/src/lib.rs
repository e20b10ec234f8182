//! Sandbox for functions of other programs: where-independent code as WebAssembly.
//!
//! A [`Function`](farfield_wic::Function) that a memory server was not built with is compiled to
//! WebAssembly from the same source, shipped to the server once, and run there beside the memory.
//! In its sandbox it can use the bytes of the caller's region, a few megabytes of its own, and
//! nothing else.
//!
//! - The *guest* is a crate of type `cdylib` that names its functions:
//!   `farfield_sandbox::export!(Behind);`, built with
//!   `cargo build --release --target wasm32-unknown-unknown`.
//! - The *host* is a server that accepts such code (`farfield serve --sandbox`), or a registry
//!   [`with_sandbox`].
//! - The *caller* has the file as [`Code`] and calls `code.call::<Behind>(&mut caller, argument)`.
//!
//! A guest imports nothing but a way to read. It sends requests to its place and gets the results ([`abi`]). So it
//! can do what a [`Place`](farfield_wic::Place) can do, and every access is checked where those of
//! native functions are. `docs/design/wic.md`, *Sandbox*, describes its limits.

pub mod abi;
pub mod guest;

#[cfg(not(target_family = "wasm"))]
mod code;
#[cfg(not(target_family = "wasm"))]
mod engine;
#[cfg(not(target_family = "wasm"))]
mod error;
#[cfg(not(target_family = "wasm"))]
mod run;
#[cfg(not(target_family = "wasm"))]
mod ship;
#[cfg(not(target_family = "wasm"))]
mod store;

#[cfg(not(target_family = "wasm"))]
pub use code::{Code, SandboxedCall, SandboxedCalls};
#[cfg(not(target_family = "wasm"))]
pub use engine::SandboxEngine;
#[cfg(not(target_family = "wasm"))]
pub use error::SandboxError;
#[cfg(not(target_family = "wasm"))]
pub use run::{with_sandbox, with_sandbox_by};
