//! Stub for one-sided reads in a server that was built without libfabric.

use crate::store::{Ledger, RegionStoreError, StoredRegion};
use farfield_core::RegionId;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Error of one-sided reads, which cannot occur.
pub(crate) type FabricError = Infallible;

/// Returns the error of the store that is behind an error of one-sided reads.
pub(crate) fn store_error(error: &FabricError) -> Option<RegionStoreError> {
    match *error {}
}

/// Provider of one-sided reads, which cannot exist.
#[derive(Debug)]
pub(crate) struct Fabric(Infallible);

impl Fabric {
    pub(crate) fn open(_provider: &str, _node: Option<IpAddr>, _spin: Duration) -> Result<Fabric, String> {
        let reason = "this farfield was built without libfabric: install libfabric-dev and pkg-config, and build it \
                      with --features fabric";
        Err(reason.to_owned())
    }

    pub(crate) fn provider(&self) -> &'static str {
        match self.0 {}
    }
}

/// Memory of a session that is read one-sided: none.
#[derive(Debug, Default)]
pub(crate) struct Exposure {}

impl Exposure {
    pub(crate) fn station(&self, fabric: &Fabric, _ledger: &Arc<Ledger>) -> Result<Vec<u8>, FabricError> {
        match fabric.0 {}
    }

    pub(crate) fn layout(
        &self,
        fabric: &Fabric,
        _ledger: &Arc<Ledger>,
        _id: RegionId,
        _region: &StoredRegion,
    ) -> Result<Layout, FabricError> {
        match fabric.0 {}
    }

    pub(crate) fn remove(&self, _id: RegionId) {}

    pub(crate) fn end(&self) {}
}

/// Windows of a region, which cannot exist.
#[derive(Debug)]
pub(crate) struct Layout(Infallible);

impl Layout {
    pub(crate) fn encode(&self, _tag: u64, _first: u32, _out: &mut Vec<u8>) {
        match self.0 {}
    }
}
