//! The functions of WICkit's three workloads, a list, a log and a cuckoo hash table, and walks over
//! far pointers.
//!
//! A memory server of users does not have them. `farfield-bench serve` does, and so do servers of
//! tests that add [`with_workloads`] to their registry. Compiled to WebAssembly, [`List`] is also
//! what experiments ship to a server.

mod cuckoo;
mod list;
mod shared_log;
#[cfg(not(target_family = "wasm"))]
mod walks;

pub use cuckoo::{Cuckoo, CuckooReply, CuckooRequest};
pub use list::{List, ListEnd, ListStart};
pub use shared_log::{LogRequest, SharedLog};
#[cfg(not(target_family = "wasm"))]
pub use walks::{Branch, Course, Vertex, WalkBranches, WalkGraph};

/// Adds the functions of the workloads to those of a server.
#[cfg(not(target_family = "wasm"))]
pub fn with_workloads(functions: farfield_wic::Registry) -> farfield_wic::Registry {
    let bytes = functions.with::<List>().with::<SharedLog>().with::<Cuckoo>();
    bytes.with::<farfield::AtServer<WalkBranches>>().with::<farfield::AtServer<WalkGraph>>()
}
