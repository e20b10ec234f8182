//! One-sided reads: memory of a session that clients on other machines read by themselves, through
//! libfabric.
//!
//! Every session has its own station (endpoint), opened when it is first asked for, and a thread
//! that serves it. Keys of one session are useless at the station of another. A region exposes its
//! page map, its checksums and its layers as windows, which are read-only. The reader has to verify
//! all bytes.

// Numbers from clients can be anything: no indexing into slices and no narrowing without a check.
#![deny(clippy::indexing_slicing)]

use crate::store::{Charge, Ledger, Mappings, RegionStoreError, Resource, StoredRegion};
use farfield_core::RegionId;
use farfield_core::wire::{self, ExposeReply};
use farfield_fabric::{MemoryWindow, Provider, Station};
use farfield_os::memfd::Mapping;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Longest sleep of a station's thread. When it wakes, it notices the end of its session, and goes
/// on with a transfer for which libfabric did not wake it.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Descriptors charged for a station: sockets, event queues and the like. More than were counted.
const STATION_DESCRIPTORS: u64 = 16;
/// Mappings charged for a station: the stack of its thread, and buffers.
const STATION_MAPPINGS: u64 = 8;

/// Reason why memory cannot be read one-sided.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FabricError {
    /// The session is over.
    #[error("the session is over")]
    Ended,
    /// The store cannot provide the memory.
    #[error(transparent)]
    Store(#[from] RegionStoreError),
    /// No thread could be started.
    #[error("cannot start the thread that serves one-sided reads: {0}")]
    Thread(std::io::Error),
    /// libfabric returned an error.
    #[error(transparent)]
    Fabric(#[from] farfield_fabric::FabricError),
}

/// Returns the error of the store, if that is the cause; it is answered like in any other request.
pub(crate) fn store_error(error: &FabricError) -> Option<RegionStoreError> {
    match error {
        FabricError::Store(error) => Some(*error),
        _ => None,
    }
}

/// Provider and address for the stations of this server.
#[derive(Debug)]
pub(crate) struct Fabric {
    provider: Provider,
    node: Option<IpAddr>,
    spin: Duration,
}

impl Fabric {
    /// Opens a provider. Stations are at the address at which the server listens, unless that is
    /// the wildcard address.
    pub(crate) fn open(provider: &str, node: Option<IpAddr>, spin: Duration) -> Result<Fabric, String> {
        let provider = Provider::named(provider).map_err(|error| error.to_string())?;
        let Some(node) = node else {
            return Err("clients find it by a TCP address: give --listen tcp://HOST:PORT, too".to_owned());
        };
        let fabric = Fabric { provider, node: (!node.is_unspecified()).then_some(node), spin };
        // Opens a station as a test: better now than when the first client comes.
        let station = Station::open(fabric.provider, fabric.node).map_err(|error| error.to_string())?;
        tracing::info!(provider = station.provider(), "one-sided reads are offered");
        Ok(fabric)
    }

    pub(crate) fn provider(&self) -> &'static str {
        self.provider.name()
    }
}

/// Memory that a session exposes to one-sided reads.
#[derive(Debug, Default)]
pub(crate) struct Exposure(Mutex<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Unasked,
    Open(OpenExposure),
    Ended,
}

#[derive(Debug)]
struct OpenExposure {
    station: Arc<Station>,
    ended: Arc<AtomicBool>,
    regions: HashMap<RegionId, Layout>,
    held: Vec<Charge>,
}

impl Drop for OpenExposure {
    fn drop(&mut self) {
        // The thread ends then, and is the last to drop the station.
        self.ended.store(true, Ordering::Relaxed);
    }
}

impl Exposure {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the address of the session's station, which is opened if needed.
    pub(crate) fn station(&self, fabric: &Fabric, ledger: &Arc<Ledger>) -> Result<Vec<u8>, FabricError> {
        Ok(opened(&mut self.state(), fabric, ledger)?.station.address()?)
    }

    /// Returns the windows of a region as it is now, and exposes those that are new.
    pub(crate) fn layout(
        &self,
        fabric: &Fabric,
        ledger: &Arc<Ledger>,
        id: RegionId,
        region: &StoredRegion,
    ) -> Result<Layout, FabricError> {
        let mut state = self.state();
        let open = opened(&mut state, fabric, ledger)?;
        let known = open.regions.get(&id).map(|layout| (layout.generation, layout.layers.len()));
        let Mappings { generation, tables, layers, held } = region.mappings(known)?;
        // Addresses stay mapped until the station is closed, also those of withdrawn windows.
        open.held.extend(held);
        let station = &open.station;
        let expose = |memory: Mapping| -> Result<MemoryWindow, FabricError> {
            let key = crate::random::random_u64().map_err(RegionStoreError::from)?;
            Ok(station.expose(memory, key)?)
        };
        let layout = match open.regions.entry(id) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let [page_map, sums] = tables;
                let (page_map, sums) = (expose(page_map)?, expose(sums)?);
                entry.insert(Layout { pages: region.pages(), generation, page_map, sums, layers: Vec::new() })
            }
        };
        if layout.generation != generation {
            layout.layers.drain(..).for_each(|layer| station.withdraw(layer));
            layout.generation = generation;
        }
        for layer in layers {
            layout.layers.push(expose(layer)?);
        }
        Ok(layout.clone())
    }

    /// Withdraws the windows of a region that is gone.
    pub(crate) fn remove(&self, id: RegionId) {
        if let State::Open(open) = &mut *self.state()
            && let Some(layout) = open.regions.remove(&id)
        {
            layout.windows().for_each(|window| open.station.withdraw(window));
        }
    }

    /// Withdraws all windows, because the session is over.
    pub(crate) fn end(&self) {
        if let State::Open(open) = std::mem::replace(&mut *self.state(), State::Ended) {
            // The thread may hold the station a little longer, but no memory.
            let windows = open.regions.values().flat_map(Layout::windows);
            windows.for_each(|window| open.station.withdraw(window));
        }
    }
}

fn opened<'s>(
    state: &'s mut State,
    fabric: &Fabric,
    ledger: &Arc<Ledger>,
) -> Result<&'s mut OpenExposure, FabricError> {
    if let State::Unasked = state {
        let held = [(Resource::Descriptors, STATION_DESCRIPTORS), (Resource::Mappings, STATION_MAPPINGS)];
        let held = held.into_iter().map(|(resource, amount)| ledger.charge(resource, amount));
        let held = held.collect::<Result<Vec<_>, _>>().map_err(RegionStoreError::from)?;
        let station = Arc::new(Station::open(fabric.provider, fabric.node)?);
        let ended = Arc::new(AtomicBool::new(false));
        let (served, over, spin) = (station.clone(), ended.clone(), fabric.spin);
        let serve = move || {
            while !over.load(Ordering::Relaxed) {
                if let Err(error) = served.serve(spin, LOOK_AGAIN) {
                    tracing::error!(%error, "one-sided reads of a session fail; its clients ask instead");
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("farfield-fabric".to_owned()).spawn(serve);
        thread.map_err(FabricError::Thread)?;
        *state = State::Open(OpenExposure { station, ended, regions: HashMap::new(), held });
    }
    match state {
        State::Open(open) => Ok(open),
        _ => Err(FabricError::Ended),
    }
}

/// Windows of a region.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pages: u64,
    generation: u64,
    page_map: MemoryWindow,
    sums: MemoryWindow,
    layers: Vec<MemoryWindow>,
}

impl Layout {
    fn windows(&self) -> impl Iterator<Item = MemoryWindow> {
        [self.page_map, self.sums].into_iter().chain(self.layers.iter().copied())
    }

    /// Appends the reply about layers from `first` on.
    pub(crate) fn encode(&self, tag: u64, first: u32, out: &mut Vec<u8>) {
        let on_wire = |window: MemoryWindow| wire::RemoteWindow { key: window.key, base: window.base };
        let reply = ExposeReply::new(
            self.pages,
            self.generation,
            u32::try_from(self.layers.len()).unwrap_or(u32::MAX),
            first,
            [self.page_map, self.sums].map(on_wire),
        );
        let layers = self.layers.iter().skip(reply.first_layer as usize).take(ExposeReply::LAYERS_AT_ONCE as usize);
        wire::encode_expose(tag, &reply, layers.map(|window| on_wire(*window)), out);
    }
}
