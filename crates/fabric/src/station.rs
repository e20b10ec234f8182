//! Station: the passive side, with windows into memory that others read.

use crate::domain::{FabricDomain, FabricError, Registration, Use};
use crate::endpoint::{COMPLETIONS_MAX, FabricEndpoint};
use crate::provider::Provider;
use crate::shim;
use core::time::Duration;
use farfield_os::memfd::Mapping;
use farfield_os::net;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

/// Key and address by which others reach a range of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryWindow {
    /// Key of the memory: anyone who knows it may read.
    pub key: u64,
    /// Address of the first byte.
    pub base: u64,
}

/// Endpoint, and all memory that may be read through it. Two stations share nothing, so everything
/// that belongs to one ends with it.
#[derive(Debug)]
pub struct Station {
    // The order of these fields is the order in which they go: first the transfers, then the memory
    // that they read.
    endpoint: FabricEndpoint,
    open: Mutex<Vec<(Registration, Mapping)>>,
    /// Memory that was withdrawn. An answer may still be on its way from there, so the address
    /// stays ours.
    withdrawn: Mutex<Vec<Mapping>>,
}

impl Station {
    /// Opens a station at this address; without one, where the provider thinks best.
    pub fn open(provider: Provider, node: Option<IpAddr>) -> Result<Station, FabricError> {
        let endpoint = FabricEndpoint::open(Arc::new(FabricDomain::open(provider, node, true)?))?;
        Ok(Station { endpoint, open: Mutex::default(), withdrawn: Mutex::default() })
    }

    /// Returns the address that a [`crate::StationReader`] must know to find the station.
    pub fn address(&self) -> Result<Vec<u8>, FabricError> {
        self.endpoint.address()
    }

    /// Returns the name of the provider as libfabric resolved it.
    pub fn provider(&self) -> String {
        self.endpoint.domain().provider()
    }

    /// Lets others read `memory`. `wanted_key` should be hard to guess; the provider decides
    /// whether it becomes the key.
    pub fn expose(&self, memory: Mapping, wanted_key: u64) -> Result<MemoryWindow, FabricError> {
        // SAFETY: the mapping is kept beside the registration; it is unmapped after the endpoint
        // was closed (order of fields).
        let registration = unsafe {
            Registration::new(self.endpoint.domain(), memory.as_ptr(), memory.len(), wanted_key, Use::Window)
        }?;
        let window = MemoryWindow { key: registration.key, base: registration.base };
        self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((registration, memory));
        Ok(window)
    }

    /// Ends a window and gives up the memory behind it.
    pub fn withdraw(&self, window: MemoryWindow) {
        let mut open = self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some(place) = open.iter().position(|(registration, _)| registration.key == window.key) else { return };
        let (registration, mut memory) = open.swap_remove(place);
        drop(open);
        drop(registration);
        // If that fails, the memory lives until the station goes, and no longer.
        let _ = memory.blank();
        self.withdrawn.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(memory);
    }

    /// Lets transfers proceed for `spin` at least, then sleeps until there is more to do or `limit`
    /// has passed.
    pub fn serve(&self, spin: Duration, limit: Duration) -> Result<(), FabricError> {
        let mut completions = [shim::RawCompletion::default(); COMPLETIONS_MAX];
        let started = farfield_os::process::now_ns();
        loop {
            // Reads by others do not complete here: there is nothing to look at.
            self.endpoint.poll(&mut completions)?;
            if farfield_os::process::now_ns() - started >= u64::try_from(spin.as_nanos()).unwrap_or(u64::MAX) {
                break;
            }
            farfield_os::process::yield_now();
        }
        if let Some(descriptor) = self.endpoint.sleeps_on() {
            net::poll(descriptor, libc::POLLIN, limit).map_err(|errno| FabricError(errno.0))?;
        }
        Ok(())
    }
}
