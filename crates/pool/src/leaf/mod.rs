//! Leaves: backends that keep pages themselves, in a memory server, on a disk or in other memory.

pub(crate) mod call_lane;
pub(crate) mod connection;
#[cfg_attr(not(feature = "fabric"), path = "fabric_absent.rs")]
pub(crate) mod fabric;
pub(crate) mod lz;
pub(crate) mod mapped;
pub(crate) mod ram;
pub(crate) mod request_slab;
pub(crate) mod shadow_store;
pub(crate) mod shm;
pub(crate) mod ssd;
pub(crate) mod tcp;
pub(crate) mod tls;
pub(crate) mod unix;
