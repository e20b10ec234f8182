//! Member `fabric` in a program that was built without libfabric: every use is an error that says
//! so.

use crate::Backend;
use crate::leaf::connection::{HandshakeError, ServerSession};
use farfield_core::RegionId;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

/// Configuration that can never exist.
#[derive(Debug)]
pub(crate) struct Config(Infallible);

impl Config {
    pub(crate) fn parse(_rest: &str) -> Result<Config, String> {
        let reason = "this program was built without libfabric: install libfabric-dev and pkg-config, and build it \
                      with the feature `fabric`";
        Err(reason.to_owned())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        match self.0 {}
    }
}

pub(crate) fn open(
    _session: Arc<ServerSession>,
    config: Config,
    _region: RegionId,
    _pages: u64,
) -> Result<Arc<dyn Backend>, HandshakeError> {
    match config.0 {}
}
