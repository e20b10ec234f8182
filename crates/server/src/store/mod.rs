//! The store of pages: regions made of layers, paid for by accounts.
//!
//! This module knows nothing of connections and messages. `docs/design/server.md` draws the layout.

// Clients can send anything: no indexing into slices and no narrowing of numbers without a check.
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod account;
mod layer;
mod ledger;
mod memory;
mod parts;
mod region;
mod table;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use account::{Account, Full, PageCounter};
pub(crate) use ledger::{Charge, Exhausted, Ledger, Resource, ResourceBudget};
pub(crate) use memory::RegionMemory;
pub(crate) use parts::Scratch;
#[cfg(feature = "fabric")]
pub(crate) use region::Mappings;
pub(crate) use region::{PresentPage, RegionReader, RegionSnapshot, StoredRegion};

use farfield_core::PageId;
use farfield_os::Errno;

/// Reason why the store did not perform a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RegionStoreError {
    /// There is no room. Nothing was stored.
    #[error("{}", match .0 {
        Full::Server => "the capacity of the server is used up",
        Full::Tenant => "the quota of the tenant is used up",
    })]
    Full(Full),
    /// A resource that all clients share is used up. Nothing was stored.
    #[error("too many {}", .0.name())]
    TooMany(Resource),
    /// The run of pages does not lie inside the region.
    #[error("the pages lie outside of the region")]
    OutOfRange,
    /// The page map names a layer that does not exist: a client that has mapped the region
    /// corrupted it.
    #[error("the page map of page {} is corrupt", .0.0)]
    Corrupt(PageId),
    /// The kernel returned an error.
    #[error("the operating system refused: {0}")]
    Os(Errno),
}

impl From<Full> for RegionStoreError {
    fn from(full: Full) -> RegionStoreError {
        RegionStoreError::Full(full)
    }
}

impl From<Exhausted> for RegionStoreError {
    fn from(Exhausted(resource): Exhausted) -> RegionStoreError {
        RegionStoreError::TooMany(resource)
    }
}

impl From<Errno> for RegionStoreError {
    fn from(errno: Errno) -> RegionStoreError {
        match errno.0 {
            // The machine itself has no memory left. For the client that is the same as a full
            // pool.
            libc::ENOMEM | libc::ENOSPC => RegionStoreError::Full(Full::Server),
            libc::EMFILE | libc::ENFILE => RegionStoreError::TooMany(Resource::Descriptors),
            _ => RegionStoreError::Os(errno),
        }
    }
}
