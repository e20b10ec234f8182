//! One-sided reads, in a server that was built without libfabric: there are none.

use crate::store::{Ledger, Region, StoreError};
use farfield_core::RegionId;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// There are no one-sided reads, and so no errors of theirs.
pub(crate) type FabricError = Infallible;

/// What would be answered for an error.
pub(crate) fn store_error(error: &FabricError) -> Option<StoreError> {
    match *error {}
}

/// Never there.
#[derive(Debug)]
pub(crate) struct Fabric(Infallible);

impl Fabric {
    pub(crate) fn open(_provider: &str, _node: Option<IpAddr>, _spin: Duration) -> Result<Fabric, String> {
        Err("this farfield was built without libfabric: install libfabric-dev and pkg-config, and build it with --features fabric".to_owned())
    }

    pub(crate) fn provider(&self) -> &'static str {
        match self.0 {}
    }
}

/// What a session shows: nothing.
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
        _region: &Region,
    ) -> Result<Layout, FabricError> {
        match fabric.0 {}
    }

    pub(crate) fn remove(&self, _id: RegionId) {}

    pub(crate) fn end(&self) {}
}

/// Never there.
#[derive(Debug)]
pub(crate) struct Layout(Infallible);

impl Layout {
    pub(crate) fn encode(&self, _tag: u64, _first: u32, _out: &mut Vec<u8>) {
        match self.0 {}
    }
}
