//! Member `fabric`: a memory server whose memory is read without asking it, through libfabric
//! (one-sided reads).
//!
//! A region at the server is a page map, checksums and layers, as for `shm`. Here they are
//! *windows*, which a lane reads by transfers of its own. Pages are compared with their checksums.
//! Writes and discards travel as messages over the lane's connection. So whatever happens to either
//! side in the middle of one, the server stores whole pages or none. A read that fails, or whose
//! bytes are wrong, is sent again as a message before anybody hears of it.

mod lane;

use crate::leaf::connection::{CONTROL_BODY_MAX, HandshakeError, ServerSession};
use crate::leaf::tcp::{TcpLane, clone_region};
use crate::table::AtomicTable;
use crate::{Backend, CallChannel, CallLane, CloneTicket, Health, Lane, PoolError};
use core::time::Duration;
use farfield_core::wire::{ExposeReply, RemoteWindow, Reply, Request, StationReply, features};
use farfield_core::{PageId, RegionId};
use farfield_fabric::{FabricError, Post, Provider, StationReader, TransferCompletion, TransferPart};
use farfield_os::process::now_ns;
use farfield_os::sync::Mutex;
use lane::{FabricLane, LANDING_BYTES};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Options of a `fabric` URL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    provider: Provider,
    address: SocketAddr,
}

impl Config {
    pub(crate) fn parse(rest: &str) -> Result<Config, String> {
        let usage = || "write fabric:tcp://HOST:PORT, with a numeric address of a server that runs with --fabric tcp";
        let (provider, address) = rest.split_once("://").ok_or_else(usage)?;
        let provider = Provider::named(provider).map_err(|error| error.to_string())?;
        Ok(Config { provider, address: address.parse().map_err(|_| usage())? })
    }

    /// Returns the address where the server listens for messages.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Windows in which the pages of a region are. The layout changes only inside
/// [`Backend::clone_region`], whose caller has no operation in flight.
#[derive(Clone)]
struct RemoteLayout {
    generation: u64,
    page_map: RemoteWindow,
    sums: RemoteWindow,
    layers: Vec<RemoteWindow>,
    /// Layer in which each page was last known to be, counted from 1; 0 if unknown. It is a guess,
    /// and never decides what a page holds. Layers of another generation have a table of their own.
    seen: Arc<AtomicTable<AtomicU8>>,
}

impl RemoteLayout {
    /// Notes that these pages are in the layer `number`, or, with 0, that their layer is unknown.
    fn note(&self, first: PageId, count: u64, number: u8) {
        for page in first.0..first.0 + count {
            let seen = self.seen.at(page);
            // Most notes say what is known already: a store would take the cache line from other
            // lanes.
            if seen.load(Ordering::Relaxed) != number {
                seen.store(number, Ordering::Relaxed);
            }
        }
    }
}

/// State that the backend and its lanes share.
struct Region {
    session: Arc<ServerSession>,
    id: RegionId,
    pages: u64,
    layout: Mutex<Arc<RemoteLayout>>,
    /// Number of the present layout, by which lanes see whether theirs is the present one.
    version: AtomicU64,
}

impl Region {
    fn layout(&self) -> Arc<RemoteLayout> {
        self.layout.lock().clone()
    }

    /// Asks the server for the windows that `known` lacks. Blocks; each request has the session's
    /// deadline.
    fn ask(
        session: &ServerSession,
        id: RegionId,
        pages: u64,
        known: Option<&RemoteLayout>,
    ) -> Result<RemoteLayout, PoolError> {
        let nonsense = || PoolError::Refused { server: session.server, reason: "its answer is not valid" };
        let mut layout = known.cloned();
        loop {
            let have = layout.as_ref().map_or(0, |layout| layout.layers.len());
            let request = Request::Expose { region: id, first_layer: have as u32 };
            let mut body = [0; CONTROL_BODY_MAX];
            let (reply, length) = session.ask_for_body(request, session.deadline(), &mut body)?;
            let windows =
                ExposeReply::decode(&body[..length]).filter(|_| reply == Reply::Expose).ok_or_else(nonsense)?;
            let ExposeReply { generation, page_map, sums, .. } = windows;
            if layout.as_ref().is_some_and(|layout| layout.generation != generation) {
                // The server merged layers, so the known layout is out of date.
                layout = None;
                continue;
            }
            if layout.is_none() {
                let seen = Arc::new(AtomicTable::new(pages).map_err(PoolError::Os)?);
                layout = Some(RemoteLayout { generation, page_map, sums, layers: Vec::new(), seen });
            }
            let Some(taken) = &mut layout else { unreachable!("made above") };
            taken.layers.extend(windows.layers());
            let is_all = taken.layers.len() == windows.layers_total as usize;
            if windows.pages != pages
                || windows.first_layer as usize != have
                || (windows.layers().len() == 0 && !is_all)
            {
                return Err(nonsense());
            }
            if is_all {
                return layout.take().ok_or_else(nonsense);
            }
        }
    }
}

/// Backend that reads a region over a fabric.
struct FabricBackend {
    region: Arc<Region>,
    config: Config,
    /// Address of the session's station.
    station: Vec<u8>,
    /// Description of how pages are read and written, with libfabric's name of the provider.
    how: String,
}

/// Opens the region of this session, if its server has a fabric and it can be reached.
pub(crate) fn open(
    session: Arc<ServerSession>,
    config: Config,
    id: RegionId,
    pages: u64,
) -> Result<Arc<dyn Backend>, HandshakeError> {
    let refuse = |text: String| Err(HandshakeError::Refused(text));
    let provider = config.provider.name();
    if session.welcome.features & features::FABRIC == 0 {
        return refuse(format!("it offers no one-sided reads: start it with --fabric {provider}"));
    }
    let mut body = [0; CONTROL_BODY_MAX];
    let (_, length) = session.ask_for_body(Request::Station, session.deadline(), &mut body)?;
    let Some(reply) = StationReply::decode(&body[..length]) else {
        return refuse("its answer is not valid".to_owned());
    };
    if reply.provider != provider {
        return refuse(format!("its fabric is {0}: write fabric:{0}://HOST:PORT", reply.provider));
    }
    let layout = Region::ask(&session, id, pages, None)?;
    let station = reply.address.to_vec();
    let how = match reach(&session, config, &station, layout.page_map) {
        Ok(provider) => format!("reads by libfabric, provider {provider}; writes by message"),
        Err(why) => return refuse(format!("its memory cannot be read by libfabric ({why}): is a firewall between?")),
    };
    let region = Region { session, id, pages, layout: Mutex::new(Arc::new(layout)), version: AtomicU64::new(0) };
    Ok(Arc::new(FabricBackend { region: Arc::new(region), config, station, how }))
}

/// Reads one byte, so that any obstacle is found now. Returns the name of the provider, or an error
/// that names the obstacle.
fn reach(session: &ServerSession, config: Config, station: &[u8], window: RemoteWindow) -> Result<String, String> {
    let reader =
        StationReader::open(config.provider, config.address.ip(), station, 4096).map_err(|error| error.to_string())?;
    let until = now_ns().saturating_add(session.deadline().as_nanos() as u64);
    let (mut posted, mut ended) = (false, None);
    while ended.is_none() {
        if now_ns() > until {
            return Err(format!("no answer within {:?}", session.deadline()));
        }
        let step = |error: FabricError| error.to_string();
        let byte = TransferPart { landing: 0, bytes: 1, remote: window.base, key: window.key };
        posted = posted || reader.post(&[byte], 0).map_err(step)? == Post::Begun;
        reader.poll(|TransferCompletion { result, .. }| ended = Some(result)).map_err(step)?;
        farfield_os::process::yield_now();
    }
    ended.unwrap_or(Ok(())).map(|()| reader.provider()).map_err(|error| error.to_string())
}

impl Backend for FabricBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        let session = &self.region.session;
        if session.is_gone() {
            return Err(session.gone_error());
        }
        let messages = TcpLane::new(session.clone(), session.join()?, self.region.id, self.region.pages);
        let reader = StationReader::open(self.config.provider, self.config.address.ip(), &self.station, LANDING_BYTES);
        let reader = reader.map_err(|_| {
            let reason = "libfabric opens no endpoint for another lane";
            PoolError::Refused { server: session.server, reason }
        })?;
        Ok(Box::new(FabricLane::new(self.region.clone(), messages, reader)))
    }

    fn open_calls(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        Ok(Box::new(CallLane::open(&self.region.session, self.region.id)?))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let Region { session, id, pages, .. } = &*self.region;
        let ticket = clone_region(session, *id, session.deadline()).inspect_err(|error| {
            // After a silence of the server it is unknown where pages are.
            if error.is_silence() {
                session.set_gone();
            }
        })?;
        // From here on pages may live in layers that are not known here.
        let layout =
            Region::ask(session, *id, *pages, Some(&self.region.layout())).inspect_err(|_| session.set_gone())?;
        *self.region.layout.lock() = Arc::new(layout);
        self.region.version.fetch_add(1, Ordering::Release);
        Ok(ticket)
    }

    fn pages(&self) -> u64 {
        self.region.pages
    }

    fn incarnation(&self) -> Option<farfield_core::Incarnation> {
        Some(self.region.session.incarnation())
    }

    fn health(&self) -> Health {
        self.region.session.health()
    }

    fn how(&self) -> String {
        self.how.clone()
    }

    fn answers(&self, within: Duration) -> bool {
        self.region.session.answers(within)
    }

    fn release(&self) {
        self.region.session.farewell();
    }

    fn abandon(&self) {
        self.region.session.abandon();
    }
}
