//! The server: listeners, a thread for each connection, a thread that cleans up, and the shutdown.

use crate::address::{AddressLedgers, PeerAddress};
use crate::config::{Config, ListenUrl};
use crate::connection::{ClientConnection, Transport};
use crate::connection_table::{Admitted, ConnectionTable};
use crate::connection_threads::ConnectionThreads;
use crate::counters::ServerCounters;
use crate::fabric::Fabric;
use crate::metrics;
use crate::penalties::Penalties;
use crate::random::random_u64;
use crate::sessions::{ClientSession, Sessions, Tenant};
use crate::spin::Spinners;
use crate::store::{Ledger, PageCounter, Resource, ResourceBudget};
use crate::tenant_table::{NoTokens, TenantChanges, TenantTable};
use crate::tenants::Tenants;
use crate::work_semaphore::WorkTurn;
use farfield_core::Incarnation;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{RefuseCode, Stat};
use farfield_os::{net, serving};
use farfield_tls::{Acceptor, CertificateFileError};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Reason why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration has no address to listen at.
    #[error("the server has no address to listen at: give --listen tcp://HOST:PORT, tls://HOST:PORT or unix:PATH")]
    NowhereToListen,
    /// The address is in use by another server.
    #[error("{url} is in use: stop the server that listens there, or choose another address with --listen")]
    AddressInUse {
        /// The address, as a URL.
        url: String,
    },
    /// The kernel refuses to listen at that address.
    #[error("cannot listen at {url}: {source}")]
    Listen {
        /// The address, as a URL.
        url: String,
        /// Error of the kernel.
        source: std::io::Error,
    },
    /// An address has TLS, and the configuration has no certificates.
    #[error("{url} needs a certificate and a key: give --tls-cert and --tls-key (farfield cert makes them)")]
    NoCertificate {
        /// The address, as a URL.
        url: String,
    },
    /// Certificates or keys cannot be used.
    #[error("TLS: {0}")]
    Certificate(#[from] CertificateFileError),
    /// One-sided reads cannot be offered.
    #[error("cannot offer one-sided reads by {provider:?}: {why}")]
    Fabric {
        /// The provider of libfabric that was asked for.
        provider: String,
        /// Reason, as text.
        why: String,
    },
    /// The kernel refused something else.
    #[error("the operating system refused: {0}")]
    Os(#[from] std::io::Error),
}

/// Longest time per round for which the regions of one holder are swept.
const SWEEP_MAX: Duration = Duration::from_millis(100);

/// State that all threads of a server share.
#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) config: Config,
    pub(crate) incarnation: Incarnation,
    started: Instant,
    pub(crate) capacity: Arc<PageCounter>,
    /// Resources other than memory that clients share.
    pub(crate) budget: Arc<ResourceBudget>,
    pub(crate) address_ledgers: AddressLedgers,
    pub(crate) fabric: Option<Fabric>,
    pub(crate) tenants: TenantTable,
    /// Certificates, and the sessions whose lanes have keys, if the server has TLS.
    pub(crate) tls: Option<Acceptor>,
    pub(crate) sessions: Sessions,
    pub(crate) counters: ServerCounters,
    pub(crate) spinners: Spinners,
    pub(crate) connections: ConnectionTable,
    connection_threads: ConnectionThreads,
    pub(crate) penalties: Penalties,
    /// Whether new sessions are refused.
    pub(crate) draining: AtomicBool,
    /// Whether all threads must end.
    stopping: AtomicBool,
    /// Condition variable that is notified when a connection ends or the server stops.
    change: Condvar,
    /// Lock that guards nothing; the condition variable needs one.
    change_lock: Mutex<()>,
}

impl ServerState {
    pub(crate) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Sleeps until it is notified of a change, or `limit` has passed.
    fn wait_for_change(&self, limit: Duration) {
        let guard = self.change_lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !self.stopping() {
            drop(self.change.wait_timeout(guard, limit));
        }
    }

    fn notify(&self) {
        drop(self.change_lock.lock());
        self.change.notify_all();
    }

    /// Returns the statistics of the whole server.
    pub(crate) fn stat(&self) -> Stat {
        self.stat_of(&self.sessions.all(), &self.capacity, self.connections.len() as u64, &self.counters)
    }

    /// Returns the statistics that a tenant may see: only its own. Without tokens there is a single
    /// tenant, which sees those of the whole server.
    pub(crate) fn stat_for(&self, tenant: &Arc<Tenant>) -> Stat {
        let Some(ledger) = &tenant.ledger else { return self.stat() };
        let mut sessions = self.sessions.all();
        sessions.retain(|session| Arc::ptr_eq(&session.tenant, tenant));
        let connections = ledger.held(Resource::Connections);
        let stat = self.stat_of(&sessions, &tenant.quota, connections, &tenant.counters);
        // A tenant without a quota can hope for the server's capacity at most.
        let limits = [tenant.quota.limit_pages(), self.capacity.limit_pages()];
        Stat { capacity_pages: limits.into_iter().flatten().min().unwrap_or(0), ..stat }
    }

    fn stat_of(
        &self,
        sessions: &[Arc<ClientSession>],
        memory: &PageCounter,
        connections: u64,
        counters: &ServerCounters,
    ) -> Stat {
        let (mut regions, mut reserved_pages) = (0, 0);
        for session in sessions {
            let all = session.all();
            regions += all.len() as u64;
            reserved_pages += all.iter().map(|region| region.reserved_pages()).sum::<u64>();
        }
        let get = ServerCounters::get;
        Stat {
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            capacity_pages: memory.limit_pages().unwrap_or(0),
            used_pages: memory.used_pages().saturating_sub(reserved_pages),
            reserved_pages,
            regions,
            sessions: sessions.len() as u64,
            connections,
            read_pages: get(&counters.read_pages),
            written_pages: get(&counters.written_pages),
            discarded_pages: get(&counters.discarded_pages),
            received_bytes: get(&counters.received_bytes),
            sent_bytes: get(&counters.sent_bytes),
            failed_requests: get(&counters.failed_requests),
        }
    }
}

/// Computes the limit of each resource that clients share, less what the server itself needs.
pub(crate) fn budget(config: &Config, descriptors: u64) -> ResourceBudget {
    /// Address space for clients. A process has 128 TiB; a quarter is left for everything else.
    const ADDRESS_BYTES: u64 = 96 << 40;
    /// The kernel's default for `vm.max_map_count`.
    const MAPPINGS_DEFAULT: u64 = 65_530;
    /// Descriptors, and also mappings, that are kept for the server itself.
    const OWN: u64 = 512;
    let connections = config.connections_max as u64;
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let mappings = allowed.and_then(|text| text.trim().parse().ok()).unwrap_or(MAPPINGS_DEFAULT);
    // Each connection has a descriptor, and a thread with a stack and its guard page.
    let rest = |all: u64, own: u64| all - own.min(all / 2);
    let limit = |resource| match resource {
        Resource::Descriptors => rest(descriptors, connections + OWN),
        Resource::Mappings => config.mappings_max.unwrap_or(rest(mappings, 2 * connections + OWN)),
        Resource::AddressBytes => ADDRESS_BYTES,
        Resource::Sessions => 4 * connections,
        Resource::Connections => connections,
        Resource::BufferBytes => (config.capacity_bytes.unwrap_or(u64::MAX) / 16).clamp(128 << 20, 1 << 30),
    };
    ResourceBudget::new(limit, config.is_private)
}

enum Listener {
    Tcp(TcpListener),
    Tls(TcpListener),
    Unix(UnixListener),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) | Listener::Tls(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

/// A running memory server. Stops when dropped.
#[derive(Debug)]
pub struct Server {
    shared: Arc<ServerState>,
    endpoints: Vec<String>,
    metrics: Option<SocketAddr>,
    threads: Vec<JoinHandle<()>>,
    /// Listening sockets. Shutting them down wakes the threads that wait for connections.
    listening: Vec<OwnedFd>,
    /// Sockets in the file system that are removed when the server stops.
    paths: Vec<PathBuf>,
}

impl Server {
    /// Starts a server: opens its sockets, starts its threads and returns. The server then serves
    /// in the background.
    pub fn start(config: Config) -> Result<Server, StartError> {
        if config.listen.is_empty() {
            return Err(StartError::NowhereToListen);
        }
        // A region takes three descriptors or more. If the limit cannot be raised, the server runs
        // with the one that it has.
        let descriptors = serving::raise_descriptor_limit().unwrap_or(1024);
        let pages = |bytes: u64| bytes / PAGE_BYTES as u64;
        let budget = Arc::new(budget(&config, descriptors));
        let tenants = TenantTable::new(config.tenants.as_ref(), &budget);
        let tls = config.tls.clone().map(Acceptor::new).transpose()?;
        if let (None, Some(url)) = (&tls, config.listen.iter().find(|url| matches!(url, ListenUrl::Tls(_)))) {
            return Err(StartError::NoCertificate { url: url.to_string() });
        }
        let mut listeners = Vec::new();
        let (mut endpoints, mut paths) = (Vec::new(), Vec::new());
        for url in &config.listen {
            let (listener, endpoint) = listen(url)?;
            if let (Listener::Unix(_), ListenUrl::Unix(path)) = (&listener, url)
                && !is_abstract(path)
            {
                paths.push(path.clone());
            }
            endpoints.push(endpoint);
            listeners.push(listener);
        }
        let metrics = match config.metrics {
            None => None,
            Some(address) => {
                let url = format!("http://{address}/metrics");
                Some(TcpListener::bind(address).map_err(|source| listen_error(url, source))?)
            }
        };
        let tcp = endpoints.iter().find_map(|endpoint| endpoint.strip_prefix("tcp://")?.parse::<SocketAddr>().ok());
        let fabric = config.fabric.as_ref().map(|provider| {
            let opened = Fabric::open(provider, tcp.map(|address| address.ip()), config.spin);
            opened.map_err(|why| StartError::Fabric { provider: provider.clone(), why })
        });
        let shared = Arc::new(ServerState {
            fabric: fabric.transpose()?,
            incarnation: Incarnation(random_u64().map_err(std::io::Error::from)?),
            started: Instant::now(),
            capacity: Arc::new(PageCounter::new(config.capacity_bytes.map(pages))),
            tenants,
            tls,
            address_ledgers: AddressLedgers::new(budget.clone()),
            budget,
            sessions: Sessions::new(config.lease, config.ticket_life),
            counters: ServerCounters::default(),
            spinners: Spinners::new(config.spin),
            connections: ConnectionTable::new(config.connections_max),
            connection_threads: ConnectionThreads::default(),
            penalties: Penalties::default(),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            change: Condvar::new(),
            change_lock: Mutex::new(()),
            config,
        });
        let metrics_address = metrics.as_ref().and_then(|listener| listener.local_addr().ok());
        let mut listening = Vec::new();
        for listener in &listeners {
            listening.push(listener.as_fd().try_clone_to_owned()?);
        }
        if let Some(listener) = &metrics {
            listening.push(listener.as_fd().try_clone_to_owned()?);
        }
        let mut server = Server { shared, endpoints, metrics: metrics_address, threads: Vec::new(), listening, paths };
        for listener in listeners {
            server.spawn("farfield-listen", move |shared| accept_all(shared, &listener))?;
        }
        server.spawn("farfield-clean", |shared| clean_up(&shared))?;
        if let Some(listener) = metrics {
            server.spawn("farfield-metrics", move |shared| metrics::serve(&shared, &listener))?;
        }
        tracing::info!(
            endpoints = server.endpoints.join(" "),
            capacity = server.shared.config.capacity_bytes,
            incarnation = format_args!("{:#x}", server.shared.incarnation.0),
            "listening"
        );
        Ok(server)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce(Arc<ServerState>) + Send + 'static) -> Result<(), StartError> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(shared))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Returns the addresses at which the server listens, as URLs for clients. Ports that were left
    /// to the kernel are filled in.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Returns the address at which `GET /metrics` is answered, if any.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics
    }

    /// Returns the random number that tells this run of the server from earlier and later ones.
    pub fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// Exchanges the tokens and quotas of tenants while the server runs. Sessions go on, with the
    /// tokens of before and those of tenants that are not named any more. A quota below what its
    /// tenant keeps becomes what the tenant keeps.
    pub fn exchange_tenants(&self, tenants: &Tenants) -> Result<TenantChanges, NoTokens> {
        self.shared.tenants.exchange(tenants)
    }

    /// Reads the files of certificates and keys again. Connections go on, and lanes can join their
    /// sessions; new sessions meet what the files say now. If they cannot be used, nothing changes. Does nothing
    /// without TLS.
    pub fn reload_certificates(&self) -> Result<(), CertificateFileError> {
        self.shared.tls.as_ref().map_or(Ok(()), Acceptor::reload)
    }

    /// Returns the statistics of the whole server.
    pub fn stat(&self) -> Stat {
        self.shared.stat()
    }

    /// Refuses new sessions from now on. Every answer tells existing clients that the server is
    /// about to stop.
    pub fn drain(&self) {
        if !self.shared.draining.swap(true, Ordering::Relaxed) {
            tracing::info!(sessions = self.shared.sessions.count(), "draining");
        }
    }

    /// Checks whether clients keep nothing here any more.
    pub fn is_drained(&self) -> bool {
        self.shared.sessions.is_empty()
    }

    /// Drains the server, waits until all regions are gone or `grace` has passed, then stops.
    /// Returns whether all were gone.
    pub fn shutdown(mut self, grace: Duration) -> bool {
        self.drain();
        let until = Instant::now() + grace;
        while !self.is_drained() && Instant::now() < until {
            self.shared.wait_for_change(Duration::from_millis(20).min(grace));
        }
        let drained = self.is_drained();
        self.stop();
        drained
    }

    fn stop(&mut self) {
        self.shared.draining.store(true, Ordering::Relaxed);
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.notify();
        self.listening.drain(..).for_each(|fd| serving::shut_down(fd.as_fd()));
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // First ends receiving, which wakes threads that wait for requests, after they sent the
        // answers that they owe. Then ends sending to clients that do not read. Each thread removes
        // its connection, and no listener is left that could add one.
        self.shared.connection_threads.end();
        self.end_connections(serving::finish_receiving, Duration::from_millis(250));
        self.end_connections(serving::shut_down, Duration::from_secs(5));
        self.shared.sessions.clear();
        for path in self.paths.drain(..) {
            let _ = std::fs::remove_file(path);
        }
        tracing::info!("stopped");
    }
}

impl Server {
    /// Calls `how` with every connection and waits until none is left, or `limit` has passed.
    fn end_connections(&self, how: fn(BorrowedFd<'_>), limit: Duration) {
        self.shared.connections.each(how);
        let until = Instant::now() + limit;
        while self.shared.connections.len() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.shared.stopping() {
            self.stop();
        }
    }
}

fn is_abstract(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().starts_with(b"@")
}

fn listen_error(url: String, source: std::io::Error) -> StartError {
    match source.kind() {
        std::io::ErrorKind::AddrInUse => StartError::AddressInUse { url },
        _ => StartError::Listen { url, source },
    }
}

fn listen(url: &ListenUrl) -> Result<(Listener, String), StartError> {
    let bad = |source| listen_error(url.to_string(), source);
    match url {
        ListenUrl::Tcp(address) | ListenUrl::Tls(address) => {
            let listener = TcpListener::bind(address.as_str()).map_err(bad)?;
            listener.set_nonblocking(true).map_err(bad)?;
            let local = listener.local_addr().map_err(bad)?;
            Ok(match url {
                ListenUrl::Tls(_) => (Listener::Tls(listener), format!("tls://{local}")),
                _ => (Listener::Tcp(listener), format!("tcp://{local}")),
            })
        }
        ListenUrl::Unix(path) => {
            let listener = listen_unix(path).map_err(bad)?;
            listener.set_nonblocking(true).map_err(bad)?;
            Ok((Listener::Unix(listener), url.to_string()))
        }
    }
}

fn listen_unix(path: &Path) -> std::io::Result<UnixListener> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    if is_abstract(path) {
        let name = &path.as_os_str().as_encoded_bytes()[1..];
        return UnixListener::bind_addr(&std::os::unix::net::SocketAddr::from_abstract_name(name)?);
    }
    // A socket that a dead server left behind answers no one, so it is removed. A living server
    // must keep its socket.
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
        && UnixStream::connect(path).is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    // A client that connected before this line is checked for its user like all others.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Accepts connections until the server stops.
fn accept_all(shared: Arc<ServerState>, listener: &Listener) {
    /// Interval at which the thread checks by itself whether the server stops; normally it is
    /// woken.
    const LOOK_AGAIN: Duration = Duration::from_secs(1);
    const AFTER_FAILURE: Duration = Duration::from_millis(50);
    let number = listener.as_fd().as_raw_fd();
    let mut turn = WorkTurn::new(shared.budget.newcomers.clone());
    while !shared.stopping() {
        let accepted = match listener {
            Listener::Tcp(socket) | Listener::Tls(socket) => {
                let is_plain = matches!(listener, Listener::Tcp(_));
                let transport = if is_plain { Transport::Tcp } else { Transport::Tls };
                let accepted = socket.accept();
                accepted.map(|(stream, peer)| (OwnedFd::from(stream), transport, PeerAddress::of(peer.ip())))
            }
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| {
                let fd = OwnedFd::from(stream);
                let user = serving::peer(fd.as_fd()).map_or(PeerAddress::Unknown, |peer| PeerAddress::User(peer.uid));
                (fd, Transport::Unix, user)
            }),
        };
        match accepted {
            Ok((fd, transport, address)) => {
                turn.begin();
                admit(&shared, fd, transport, address);
                turn.end();
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let _ = net::poll(number, libc::POLLIN, LOOK_AGAIN);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) if shared.stopping() => {}
            Err(error) => {
                // Out of descriptors or memory: existing connections go on, and this thread waits a
                // moment.
                tracing::warn!(%error, "cannot accept a connection");
                shared.wait_for_change(AFTER_FAILURE);
            }
        }
    }
}

/// Has a thread serve a connection.
fn admit(shared: &Arc<ServerState>, fd: OwnedFd, transport: Transport, address: PeerAddress) {
    if transport != Transport::Unix
        && let Err(errno) = serving::prepare_tcp(fd.as_fd())
    {
        tracing::debug!(%errno, "a connection was gone before it began");
        return;
    }
    let Some(Admitted { number, fd, is_turned_away, has_evicted }) = shared.connections.admit(fd, address) else {
        return;
    };
    shared.counters.evicted_connections.fetch_add(u64::from(has_evicted), Ordering::Relaxed);
    let turn_away = if is_turned_away {
        Some((RefuseCode::Connections, "the server has as many connections as it takes: raise --max-connections"))
    } else if transport == Transport::Unix && shared.config.tenants.is_none() && !may_use(address) {
        Some((RefuseCode::Token, "the server belongs to another user: it needs --token-file to serve others"))
    } else {
        None
    };
    let member = ConnectionSlot { shared: shared.clone(), number };
    let served = shared.connection_threads.run(move || {
        let shared = &member.shared;
        let mut connection = ClientConnection::new(shared, fd, number, transport, address);
        let end = match turn_away {
            None => connection.run(),
            Some((code, text)) => connection.turn_away(code, text),
        };
        tracing::debug!(connection = member.number, ?transport, %end, "connection over");
        // The session is left before the slot is given up: when no slot is taken, everything is
        // settled.
        drop(connection);
        drop(member);
    });
    if let Err(error) = served {
        tracing::warn!(%error, "cannot start a thread for a connection");
    }
}

/// Checks whether a local user may use a server without tokens: the same user, or root.
fn may_use(user: PeerAddress) -> bool {
    user == PeerAddress::User(serving::effective_uid()) || user == PeerAddress::User(0)
}

/// A slot of a connection, given up in whatever way the thread ends.
struct ConnectionSlot {
    shared: Arc<ServerState>,
    number: u64,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.shared.connections.remove(self.number);
        // Nobody else waits for that, and clients could keep the thread that cleans up awake.
        if self.shared.draining.load(Ordering::Relaxed) {
            self.shared.notify();
        }
    }
}

/// Interval between checks for connections whose client has vanished.
const LOOK_FOR_VANISHED: Duration = Duration::from_secs(1);

/// Ends connections to machines that do not answer any more. Their threads then end, and the leases
/// of their sessions begin.
fn end_vanished(shared: &ServerState) {
    shared.connections.each(|fd| {
        if serving::has_vanished(fd) {
            tracing::info!("a client's machine does not answer any more; connection ended");
            serving::shut_down(fd);
        }
    });
}

/// Ends sessions whose lease is over, closes dead connections, and sweeps regions, until the server
/// stops.
fn clean_up(shared: &ServerState) {
    let often = shared.config.lease.min(shared.config.ticket_life) / 8;
    let often = often.clamp(Duration::from_millis(5), Duration::from_millis(100));
    let mut next_sweep = Instant::now() + shared.config.sweep_every;
    let mut next_look = Instant::now();
    let mut round: usize = 0;
    while !shared.stopping() {
        shared.wait_for_change(often);
        let now = Instant::now();
        for (session, regions) in shared.sessions.expire(now) {
            shared.counters.expired_sessions.fetch_add(1, Ordering::Relaxed);
            // A session without regions is not logged: any client could fill the log with them.
            if regions > 0 {
                let (session, client) = (session.number, &session.client_name);
                tracing::info!(session, client, regions, "lease over, regions freed");
            }
        }
        if now >= next_look {
            end_vanished(shared);
            next_look = now + LOOK_FOR_VANISHED;
        }
        if now < next_sweep {
            continue;
        }
        sweep(shared, round);
        round = round.wrapping_add(1);
        next_sweep = Instant::now() + shared.config.sweep_every;
    }
}

/// Gives back memory that no region reaches. The thread serves all holders: in one round, each gets
/// at most [`SWEEP_MAX`] of its time. Each round begins with another session.
fn sweep(shared: &ServerState, round: usize) {
    let mut sessions = shared.sessions.all();
    sessions.sort_unstable_by_key(|session| session.number);
    let first = round.checked_rem(sessions.len()).unwrap_or(0);
    sessions.rotate_left(first);
    let mut spent = HashMap::<*const Ledger, Duration>::new();
    for session in sessions {
        let spent = spent.entry(Arc::as_ptr(&session.account.ledger)).or_default();
        for region in session.all() {
            let began = Instant::now();
            let left = SWEEP_MAX.saturating_sub(*spent);
            if !left.is_zero() {
                match region.sweep(&|| began.elapsed() > left) {
                    Ok(0) => {}
                    Ok(pages) => tracing::debug!(session = session.number, pages, "gave back superseded pages"),
                    Err(error) => tracing::error!(session = session.number, %error, "cannot sweep a region"),
                }
            }
            match region.audit() {
                Ok(None) => {}
                Ok(Some(full)) => {
                    // The client wrote more through its mapping than it had room for. Other clients
                    // must not pay for that.
                    tracing::error!(session = session.number, ?full, "a client wrote beyond its limit; session ended");
                    shared.sessions.end(&session);
                    break;
                }
                Err(error) => tracing::error!(session = session.number, %error, "cannot audit a region"),
            }
            *spent += began.elapsed();
        }
    }
}
