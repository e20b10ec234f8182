//! Bindings to libfabric, as far as Farfield needs it: one side opens memory, the other reads it
//! without asking.
//!
//! A `Station` is the passive side: windows into memory files, and an endpoint through which anyone
//! with a window's key reads them. A `StationReader` is the active side: an endpoint with memory of its
//! own, the *landing*, where transfers end. Both are safe to drop at any time: an endpoint is
//! closed, which ends its transfers, before memory that they touch goes.
//!
//! No code here starts a thread. Software providers (`tcp`) move bytes while one of the two sides
//! is polled, so the owner of a station polls it (`Station::serve`). The reason that this is a
//! crate is in `docs/decisions/0009-fabric-is-a-crate-and-a-feature.md`.

// Numbers from other machines can be anything: they are no index into a slice, and are not
// narrowed, without a check.
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]

#[cfg(feature = "libfabric")]
mod domain;
#[cfg(feature = "libfabric")]
mod endpoint;
mod provider;
#[cfg(feature = "libfabric")]
mod reader;
#[cfg(feature = "libfabric")]
mod shim;
#[cfg(feature = "libfabric")]
mod station;

pub use provider::{BadProvider, Provider};

#[cfg(feature = "libfabric")]
pub use {
    domain::FabricError,
    reader::{PARTS_MAX, Post, StationReader, TransferCompletion, TransferPart},
    station::{MemoryWindow, Station},
};

/// Longest address of an endpoint, in bytes.
pub const ADDRESS_BYTES_MAX: usize = 256;
