//! [`PoolBuilder`]: opens the backend that a list of URLs describes.

use crate::compose::fault::FaultBackend;
use crate::compose::stripe::StripeBackend;
use crate::compose::switch::SnapshotContents;
use crate::compose::tier::TierBackend;
use crate::leaf::connection::{HandshakeError, Identity, ServerAddress, ServerSession};
use crate::leaf::fabric;
use crate::leaf::lz::{self, LzBackend};
use crate::leaf::mapped::{self, MappedBackend};
use crate::leaf::ram::RamBackend;
use crate::leaf::shm::ShmBackend;
use crate::leaf::ssd::{self, SsdBackend};
use crate::leaf::tcp::TcpBackend;
use crate::leaf::tls::TlsUrl;
use crate::leaf::unix::UnixSocket;
use crate::redundant::ec::EcBackend;
use crate::redundant::members::PoolMember;
use crate::redundant::mirror::{InitialContents, MirrorBackend};
use crate::redundant::rejoin::{Reopen, SpareMembers, TRY_WITHIN};
use crate::url::{Tree, replace_leaves};
#[cfg(any(test, feature = "conformance"))]
use crate::url::{check_tree, leaf_urls};
use crate::{Backend, CloneTicket, PoolError, Share};
use core::time::Duration;
use farfield_core::gf256::ErasureCode;
use farfield_core::wire::{Hello, Reply, Request, SessionSecret, features};
use farfield_core::{Deal, MemberSet, RegionId};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Instant;

/// Reason why a pool could not be opened. Unlike [`PoolError`] it may allocate: opening a pool is
/// not urgent.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpenError {
    /// No URL was given.
    #[error("no memory server given: name one, for example tcp://10.0.0.7:5555 or shm:/run/farfield.sock")]
    NoUrl,
    /// A URL cannot be understood.
    #[error("cannot understand {url:?}: {why}")]
    Url {
        /// The URL.
        url: String,
        /// Explanation of what is wrong with it.
        why: String,
    },
    /// A URL has a scheme that does not exist.
    #[error(
        "no backend is called {scheme:?}: known are tcp://HOST:PORT, tls://HOST:PORT?ca=FILE&cert=FILE&key=FILE, \
         fabric:tcp://HOST:PORT, shm:PATH, unix:PATH, ssd:PATH, lz:?size=SIZE, numa:NODE, dax:PATH, ram:, \
         fault:SPEC@URL, stripe(URL, URL), mirror(URL, URL), \
         ec(2,1, URL, URL, URL), tier(URL, URL) and throttle(latency=100us, URL)"
    )]
    Scheme {
        /// Text before the colon.
        scheme: String,
    },
    /// A name does not resolve to an address.
    #[error("cannot find the address of {host:?}: {why}")]
    Resolve {
        /// Name that was looked up.
        host: String,
        /// Message of the resolver.
        why: String,
    },
    /// A token is longer than the protocol allows, a region has no pages, or another argument is
    /// wrong.
    #[error("{0}")]
    Argument(&'static str),
    /// A server refused the client.
    #[error("memory server {url} refused the client: {text}")]
    Refused {
        /// URL of the server.
        url: String,
        /// Reason that the server gives.
        text: String,
    },
    /// The connection to a server cannot be encrypted, or one side does not trust the other.
    #[error("memory server {url}: {why}")]
    Tls {
        /// URL of the server.
        url: String,
        /// Reason, and what to do.
        why: String,
    },
    /// Any other error of a server.
    #[error("{url}: {error}")]
    Pool {
        /// URL of the server.
        url: String,
        /// Error that occurred.
        error: PoolError,
    },
}

impl OpenError {
    /// Returns the underlying pool error, where there is one.
    pub fn pool_error(&self) -> Option<PoolError> {
        match self {
            OpenError::Pool { error, .. } => Some(*error),
            _ => None,
        }
    }
}

/// Builder that opens a pool: it says where, as which client and how large.
///
/// ```no_run
/// # use core::time::Duration;
/// let backend = farfield_pool::PoolBuilder::new()
///     .url("tcp://10.0.0.7:5555")
///     .token("secret")
///     .client_name("solver")
///     .pages(1 << 20)
///     .deadline(Duration::from_secs(5))
///     .open()?;
/// let lane = backend.open_lane()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PoolBuilder {
    urls: Vec<String>,
    token: String,
    client_name: String,
    pages: u64,
    deadline: Duration,
    /// Time that a member may be silent while others may do without it.
    timeout: Option<Duration>,
    degraded: bool,
    repair_thread: bool,
    is_inside_a_program: bool,
    server_uid: Option<u32>,
    #[cfg(test)]
    wrap: Option<Wrap>,
}

#[cfg(test)]
type Wrap = fn(Arc<dyn Backend>) -> Arc<dyn Backend>;

impl Default for PoolBuilder {
    fn default() -> Self {
        PoolBuilder::new()
    }
}

impl core::fmt::Debug for PoolBuilder {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // The token must not reach a log.
        write!(f, "PoolBuilder {{ urls: {:?}, client_name: {:?}, pages: {} }}", self.urls, self.client_name, self.pages)
    }
}

impl PoolBuilder {
    /// Creates a builder with no URL, no token, no client name, zero pages and a deadline of 10 s.
    pub fn new() -> PoolBuilder {
        PoolBuilder {
            urls: Vec::new(),
            token: String::new(),
            client_name: String::new(),
            pages: 0,
            deadline: Duration::from_secs(10),
            timeout: None,
            degraded: false,
            repair_thread: false,
            is_inside_a_program: false,
            server_uid: None,
            #[cfg(test)]
            wrap: None,
        }
    }

    /// Wraps every backend that is opened.
    #[cfg(test)]
    pub(crate) fn wrapped(mut self, wrap: Wrap) -> PoolBuilder {
        self.wrap = Some(wrap);
        self
    }

    /// Adds a server; pages are striped over several.
    pub fn url(mut self, url: impl Into<String>) -> PoolBuilder {
        self.urls.push(url.into());
        self
    }

    /// Adds several servers.
    pub fn urls<I: IntoIterator<Item: Into<String>>>(mut self, urls: I) -> PoolBuilder {
        self.urls.extend(urls.into_iter().map(Into::into));
        self
    }

    /// Returns a copy of the builder with this URL as its only one.
    pub fn with_url(&self, url: impl Into<String>) -> PoolBuilder {
        PoolBuilder { urls: vec![url.into()], ..self.clone() }
    }

    /// Sets the token that proves the right to use the servers. A token longer than 256 bytes is an
    /// error when the pool is opened.
    pub fn token(mut self, token: impl Into<String>) -> PoolBuilder {
        self.token = token.into();
        self
    }

    /// Sets the name of the client in the logs of the servers. A name that is too long is cut.
    pub fn client_name(mut self, name: impl Into<String>) -> PoolBuilder {
        self.client_name = name.into();
        let mut len = self.client_name.len().min(Hello::NAME_BYTES_MAX);
        while !self.client_name.is_char_boundary(len) {
            len -= 1;
        }
        self.client_name.truncate(len);
        self
    }

    /// Sets the number of pages that the region shall be able to address.
    pub fn pages(mut self, pages: u64) -> PoolBuilder {
        self.pages = pages;
        self
    }

    /// Sets the longest time that opening the pool, opening a lane, or a clone may take at each
    /// server.
    pub fn deadline(mut self, deadline: Duration) -> PoolBuilder {
        self.deadline = deadline;
        self
    }

    /// Counts members of mirrors and erasure codes that cannot be reached, or do not answer soon,
    /// as lost, as long as enough others answer. Without this, they are errors: otherwise a wrong
    /// URL would be noticed too late.
    pub fn degraded(mut self) -> PoolBuilder {
        self.degraded = true;
        self
    }

    /// Starts a thread of this process that repairs: it gives members of a mirror or an erasure
    /// code, and their spares, what they lack. Without this, the threads that poll lanes do the
    /// repairs.
    pub fn repair_thread(mut self) -> PoolBuilder {
        self.repair_thread = true;
        self
    }

    /// Trusts servers at Unix sockets that this user runs, besides those of root and of the user of
    /// this process.
    pub fn server_uid(mut self, uid: u32) -> PoolBuilder {
        self.server_uid = Some(uid);
        self
    }

    /// Declares that this code runs inside a foreign program: nothing that the pool does may change
    /// how system calls of the program end.
    pub fn inside_a_program(mut self) -> PoolBuilder {
        self.is_inside_a_program = true;
        self
    }

    /// Opens a new, empty region. Blocks until the servers answer, or their deadlines pass.
    pub fn open(&self) -> Result<Arc<dyn Backend>, OpenError> {
        if self.pages == 0 {
            return Err(OpenError::Argument("a region needs at least one page"));
        }
        self.open_members(None)
    }

    /// Opens the snapshot behind a ticket. The URLs must be those of the pool that was cloned, in
    /// the same order. The number of pages is that of the snapshot.
    pub fn claim(&self, ticket: &CloneTicket) -> Result<Arc<dyn Backend>, OpenError> {
        self.open_members(Some((ticket, None)))
    }

    /// Opens the snapshot behind a ticket, given what may be in it. With that knowledge a mirror
    /// can repair servers that come back.
    pub fn claim_with(&self, ticket: &CloneTicket, contents: &SnapshotContents) -> Result<Arc<dyn Backend>, OpenError> {
        self.open_members(Some((ticket, Some(contents))))
    }

    /// Opens the region behind a share, at the one server that keeps it. Pages are moved by
    /// messages, even on the machine of the server.
    pub fn attach(&self, share: &Share) -> Result<Arc<dyn Backend>, OpenError> {
        let [url] = &self.urls[..] else {
            return Err(OpenError::Argument("a shared region belongs to one memory server: give one URL"));
        };
        if self.token.len() > Hello::TOKEN_BYTES_MAX {
            return Err(OpenError::Argument("the token is longer than 256 bytes"));
        }
        let address = match LeafUrl::parse(url)? {
            LeafUrl::Tcp(address) => ServerAddress::Tcp(address),
            LeafUrl::Unix(path, uid) => ServerAddress::Unix(path, [uid, self.server_uid]),
            LeafUrl::Tls(config) => config.open().map_err(|why| OpenError::Tls { url: url.clone(), why })?,
            LeafUrl::Fabric(config) => ServerAddress::Tcp(config.address()),
            _ => return Err(OpenError::Argument("only regions of memory servers can be shared")),
        };
        let session = self.open_session(0, address, Some(SessionSecret(share.session)));
        let session = session.map_err(|error| open_error(url, 0, error))?;
        Ok(Arc::new(TcpBackend::new(session, RegionId(share.region), share.pages)))
    }

    fn open_members(
        &self,
        ticket: Option<(&CloneTicket, Option<&SnapshotContents>)>,
    ) -> Result<Arc<dyn Backend>, OpenError> {
        if self.token.len() > Hello::TOKEN_BYTES_MAX {
            return Err(OpenError::Argument("the token is longer than 256 bytes"));
        }
        let mut trees = self.urls.iter().map(|url| parse(url)).collect::<Result<Vec<_>, _>>()?;
        let tree = match trees.len() {
            0 => return Err(OpenError::NoUrl),
            1 => trees.remove(0),
            _ => Tree::Stripe { members: trees, group_pages: Deal::GROUP_PAGES },
        };
        if tree.leaves() > CloneTicket::SERVERS_MAX {
            return Err(OpenError::Argument("more than 16 memory servers in one pool"));
        }
        let opened = match ticket {
            Some((ticket, contents)) => {
                self.open_tree(&tree, 0, RegionSource::Claim { secrets: &ticket.secrets, pages: self.pages, contents })
            }
            None => self.open_tree(&tree, 0, RegionSource::Pages(self.pages)),
        };
        #[cfg(test)]
        let opened = opened.map(|backend| self.wrap.map_or(backend.clone(), |wrap| wrap(backend)));
        opened
    }

    /// Opens a tree of backends; `server` is the number of its first leaf.
    fn open_tree(&self, tree: &Tree, server: u16, want: RegionSource<'_>) -> Result<Arc<dyn Backend>, OpenError> {
        match tree {
            Tree::Leaf(url) => self.open_leaf(url, server, want),
            Tree::Fault(plan, inner) => {
                Ok(Arc::new(FaultBackend::new(server, self.open_tree(inner, server, want)?, *plan)))
            }
            Tree::Mirror { members, spares, scrub, wait } => {
                let mirror = self.open_mirror(members, spares, *scrub, server, want)?;
                mirror.set_write_timeout(*wait);
                Ok(Arc::new(mirror))
            }
            Tree::Tier(tiers) => Ok(Arc::new(self.open_tier(tiers, server, want)?)),
            Tree::Ec { code, members, spares, scrub, wait } => {
                let ec = self.open_ec(*code, members, spares, *scrub, server, want)?;
                ec.set_write_timeout(*wait);
                Ok(Arc::new(ec))
            }
            Tree::Stripe { members, group_pages } => {
                let deal = Deal::new(members.len() as u64, *group_pages);
                let deal = deal.ok_or(OpenError::Argument("a stripe has members, and groups of a power of two"))?;
                let (mut opened, mut leaf) = (Vec::with_capacity(members.len()), 0);
                for (index, member) in members.iter().enumerate() {
                    let share = match want {
                        RegionSource::Pages(pages) => {
                            RegionSource::Pages(StripeBackend::pages_of_member(pages, deal, index))
                        }
                        RegionSource::Claim { secrets, .. } => RegionSource::part(&secrets[leaf..]),
                    };
                    opened.push((self.open_tree(member, server + leaf as u16, share)?, member.leaves()));
                    leaf += member.leaves();
                }
                let (RegionSource::Pages(pages) | RegionSource::Claim { pages, .. }) = want;
                Ok(if opened.len() == 1 {
                    opened.remove(0).0
                } else {
                    Arc::new(StripeBackend::new(opened, deal, pages))
                })
            }
        }
    }

    fn open_mirror(
        &self,
        members: &[Tree],
        spares: &[Tree],
        scrub: Option<Duration>,
        server: u16,
        want: RegionSource<'_>,
    ) -> Result<MirrorBackend, OpenError> {
        let trees = members.iter().chain(spares);
        let (members, spares) = self.open_replicas("mirror", 1, members, spares, server, want)?;
        let holds = match want {
            RegionSource::Pages(_) => InitialContents::Zeros,
            RegionSource::Claim { contents: None, .. } => InitialContents::Snapshot,
            RegionSource::Claim { contents: Some(contents), .. } => InitialContents::Chunks(contents.0.clone()),
        };
        // A member that comes later must be told what it lacks.
        let is_known = !matches!(holds, InitialContents::Snapshot);
        let reopen = is_known.then(|| self.reopen(trees, members.iter().chain(&spares), want)).flatten();
        let spares = SpareMembers { members: spares, reopen };
        let (RegionSource::Pages(pages) | RegionSource::Claim { pages, .. }) = want;
        MirrorBackend::new(members, spares, pages, holds, scrub, self.repair_thread)
            .map_err(|error| OpenError::Pool { url: "mirror".to_owned(), error })
    }

    fn open_tier(&self, tiers: &[Tree], server: u16, want: RegionSource<'_>) -> Result<TierBackend, OpenError> {
        let (members, _) = self.open_replicas("tier", 1, tiers, &[], server, want)?;
        match want {
            RegionSource::Pages(pages) => TierBackend::new(members, pages, self.repair_thread),
            RegionSource::Claim { secrets, .. } => {
                let leaves = tiers.iter().map(Tree::leaves).sum();
                TierBackend::claim(members, &secrets[..leaves], self.repair_thread)
            }
        }
        .map_err(|error| OpenError::Pool { url: "tier".to_owned(), error })
    }

    fn open_ec(
        &self,
        code: ErasureCode,
        members: &[Tree],
        spares: &[Tree],
        scrub: Option<Duration>,
        server: u16,
        want: RegionSource<'_>,
    ) -> Result<EcBackend, OpenError> {
        let leaves = members.iter().chain(spares).map(Tree::leaves).sum();
        let of_members = match want {
            RegionSource::Pages(pages) => RegionSource::Pages(EcBackend::pages_of_member(pages)),
            claim => claim,
        };
        let trees = members.iter().chain(spares);
        let (members, spares) = self.open_replicas("ec", code.data(), members, spares, server, of_members)?;
        let reopen = self.reopen(trees, members.iter().chain(&spares), of_members);
        let spares = SpareMembers { members: spares, reopen };
        match want {
            RegionSource::Pages(pages) => EcBackend::new(code, members, spares, pages, scrub, self.repair_thread),
            RegionSource::Claim { secrets, .. } => {
                EcBackend::claim(code, members, spares, &secrets[..leaves], scrub, self.repair_thread)
            }
        }
        .map_err(|error| OpenError::Pool { url: "ec".to_owned(), error })
    }

    /// Opens the members and spares of a backend that needs at least `needed` of them. Those that
    /// may be lost, and are, come without a backend.
    fn open_replicas(
        &self,
        name: &str,
        needed: usize,
        members: &[Tree],
        spares: &[Tree],
        server: u16,
        want: RegionSource<'_>,
    ) -> Result<(Vec<PoolMember>, Vec<PoolMember>), OpenError> {
        let (mut opened, mut leaf, mut first_error) = (Vec::with_capacity(members.len() + spares.len()), 0, None);
        let are_enough =
            |opened: &[PoolMember]| opened.iter().filter(|member| member.backend.is_some()).count() >= needed;
        let (mut silent, mut timeout) = (Vec::new(), MEMBERS_TIMEOUT);
        // A page in a tier is nowhere else, so no tier may be left out after a short wait.
        let is_brief = self.degraded && name != "tier";
        for (index, member) in members.iter().chain(spares).enumerate() {
            let (leaves, server) = (member.leaves(), server + leaf as u16);
            let result = match want {
                // The member had failed before the snapshot.
                RegionSource::Claim { secrets, .. } if secrets[leaf..][..leaves].iter().all(|secret| *secret == 0) => {
                    None
                }
                RegionSource::Claim { secrets, .. } => Some(RegionSource::part(&secrets[leaf..])),
                pages => Some(pages),
            }
            .map(|want| {
                let started = Instant::now();
                let result = self.with_timeout(is_brief.then_some(timeout)).open_tree(member, server, want);
                if result.as_ref().is_err_and(|error| matches!(error.pool_error(), Some(PoolError::TimedOut { .. }))) {
                    timeout = timeout.saturating_sub(started.elapsed()).max(MEMBER_TIMEOUT_MIN);
                    silent.push((index, member, server, want));
                }
                result
            });
            let backend = match result {
                Some(Err(error)) if !self.degraded && matches!(want, RegionSource::Pages(_)) => return Err(error),
                Some(Err(error)) => {
                    // The error of a member is more to the point than that of a spare.
                    first_error.get_or_insert(error);
                    None
                }
                Some(Ok(backend)) => Some(backend),
                None => None,
            };
            opened.push(PoolMember { backend, leaves, server });
            leaf += leaves;
            if index + 1 == members.len()
                && !are_enough(&opened)
                && silent.is_empty()
                && matches!(want, RegionSource::Pages(_))
            {
                break;
            }
        }
        // If the others are not enough, the silent members get the full deadline.
        for (index, member, server, want) in silent {
            if !are_enough(&opened) {
                opened[index].backend = self.open_tree(member, server, want).ok();
            }
        }
        if !are_enough(&opened) {
            let reason = "the snapshot has too few members";
            let error = PoolError::Refused { server, reason };
            return Err(first_error.unwrap_or(OpenError::Pool { url: name.to_owned(), error }));
        }
        let spares = opened.split_off(members.len());
        Ok((opened, spares))
    }

    /// Returns the way to open the server of a failed member again, if this process looks for it
    /// (with a repair thread, or inside a program).
    fn reopen<'a>(
        &self,
        trees: impl Iterator<Item = &'a Tree>,
        members: impl Iterator<Item = &'a PoolMember>,
        want: RegionSource<'_>,
    ) -> Option<Reopen> {
        if !self.repair_thread && !self.is_inside_a_program {
            return None;
        }
        let members: Vec<_> = members.collect();
        let pages = match want {
            RegionSource::Pages(pages) => pages,
            // The new region is as large as those that were cloned.
            RegionSource::Claim { .. } => {
                members.iter().filter_map(|member| Some(member.backend.as_ref()?.pages())).max()?
            }
        };
        let trees: Vec<_> = trees.cloned().collect();
        let servers: MemberSet =
            trees.iter().enumerate().filter(|(_, tree)| is_server(tree)).map(|(member, _)| member).collect();
        if servers.is_empty() {
            return None;
        }
        let (builder, numbers) =
            (self.with_timeout(Some(TRY_WITHIN)), members.iter().map(|member| member.server).collect::<Vec<_>>());
        let open =
            move |member: usize| builder.open_tree(&trees[member], numbers[member], RegionSource::Pages(pages)).ok();
        Some(Reopen { servers, open: Box::new(open) })
    }

    /// Returns a copy of the builder with this timeout, at most its deadline.
    fn with_timeout(&self, timeout: Option<Duration>) -> PoolBuilder {
        PoolBuilder { timeout: timeout.map(|timeout| timeout.min(self.deadline)), ..self.clone() }
    }

    fn open_leaf(&self, url: &str, server: u16, want: RegionSource<'_>) -> Result<Arc<dyn Backend>, OpenError> {
        self.open_target(server, LeafUrl::parse(url)?, want).map_err(|error| open_error(url, server, error))
    }

    fn open_target(
        &self,
        server: u16,
        target: LeafUrl,
        want: RegionSource<'_>,
    ) -> Result<Arc<dyn Backend>, HandshakeError> {
        let address = match target {
            LeafUrl::Tcp(address) => ServerAddress::Tcp(address),
            LeafUrl::Tls(config) => config.open().map_err(HandshakeError::Tls)?,
            LeafUrl::Unix(path, uid) => ServerAddress::Unix(path, [uid, self.server_uid]),
            LeafUrl::Fabric(_) if self.is_inside_a_program => {
                let text = "libfabric takes memory and locks, which a thread of the program may hold when it misses a \
                            page: fabric is for heaps";
                return Err(HandshakeError::Refused(text.into()));
            }
            LeafUrl::Fabric(config) => {
                let session = self.open_session(server, ServerAddress::Tcp(config.address()), None)?;
                let (region, pages) = want.ask(&session, self.answers_within())?;
                return fabric::open(session, config, region, pages);
            }
            LeafUrl::Ram(stored_max) => {
                return Ok(Arc::new(match want {
                    RegionSource::Pages(pages) => RamBackend::with_size(server, pages, stored_max),
                    RegionSource::Claim { secrets, .. } => RamBackend::claim(server, secrets[0])?,
                }));
            }
            LeafUrl::Lz(_) if self.is_inside_a_program => {
                let text = "compressed pages would lie in the memory of the program: lz is for heaps";
                return Err(HandshakeError::Refused(text.into()));
            }
            LeafUrl::Lz(config) => {
                return Ok(Arc::new(match want {
                    RegionSource::Pages(pages) => LzBackend::new(server, config, pages)?,
                    RegionSource::Claim { secrets, .. } => LzBackend::claim(server, secrets[0])?,
                }));
            }
            LeafUrl::Mapped(config) => {
                return Ok(Arc::new(match want {
                    RegionSource::Pages(pages) => MappedBackend::new(server, config, pages)?,
                    RegionSource::Claim { secrets, .. } => MappedBackend::claim(server, secrets[0])?,
                }));
            }
            LeafUrl::Ssd(config) => {
                let config = if self.is_inside_a_program { config.inside_a_program() } else { config };
                return Ok(Arc::new(match want {
                    RegionSource::Pages(pages) => SsdBackend::new(server, config, pages)?,
                    RegionSource::Claim { secrets, .. } => SsdBackend::claim(server, config, secrets[0])?,
                }));
            }
        };
        let session = self.open_session(server, address, None)?;
        let (region, pages) = want.ask(&session, self.answers_within())?;
        if session.welcome.features & features::MAP != 0 {
            return Ok(Arc::new(ShmBackend::new(session, region, pages)?));
        }
        Ok(Arc::new(TcpBackend::new(session, region, pages)))
    }

    fn open_session(
        &self,
        server: u16,
        address: ServerAddress,
        joins: Option<SessionSecret>,
    ) -> Result<Arc<ServerSession>, HandshakeError> {
        let identity = Identity {
            token: self.token.clone().into_bytes(),
            client_name: self.client_name.clone(),
            deadline: self.deadline,
        };
        Ok(Arc::new(ServerSession::open(server, address, &identity, self.answers_within(), joins)?))
    }

    fn answers_within(&self) -> Duration {
        self.timeout.unwrap_or(self.deadline)
    }
}

fn open_error(url: &str, server: u16, error: HandshakeError) -> OpenError {
    match error {
        HandshakeError::Pool(error) => OpenError::Pool { url: url.to_owned(), error },
        HandshakeError::Refused(text) => OpenError::Refused { url: url.to_owned(), text },
        HandshakeError::Tls(why) => OpenError::Tls { url: url.to_owned(), why },
        HandshakeError::HungUp => {
            let error = PoolError::Refused { server, reason: "it closed the connection without an answer" };
            OpenError::Pool { url: url.to_owned(), error }
        }
    }
}

/// Checks whether the tree is a single server, whose incarnation is known.
fn is_server(tree: &Tree) -> bool {
    match tree {
        Tree::Leaf(url) => matches!(
            LeafUrl::parse(url),
            Ok(LeafUrl::Tcp(_) | LeafUrl::Tls(_) | LeafUrl::Unix(..) | LeafUrl::Fabric(_))
        ),
        Tree::Fault(_, inner) => is_server(inner),
        _ => false,
    }
}

/// Time that all members together may be silent where others can do without them, and the least
/// time for each.
const MEMBERS_TIMEOUT: Duration = Duration::from_millis(600);
const MEMBER_TIMEOUT_MIN: Duration = Duration::from_millis(50);

fn parse(url: &str) -> Result<Tree, OpenError> {
    Tree::parse(url).map_err(|error| OpenError::Url { url: url.to_owned(), why: error.to_string() })
}

/// Region that a member shall provide.
#[derive(Clone, Copy)]
enum RegionSource<'a> {
    /// A new region of that many pages.
    Pages(u64),
    /// The snapshot behind these secrets, one per leaf; secrets of other members may follow.
    /// `pages` is how many of its pages are used, 0 for all. `contents` tells what may be in it, if
    /// that is known.
    Claim { secrets: &'a [u128], pages: u64, contents: Option<&'a SnapshotContents> },
}

impl RegionSource<'_> {
    /// Asks for a part of a snapshot, in which pages have other numbers.
    fn part(secrets: &[u128]) -> RegionSource<'_> {
        RegionSource::Claim { secrets, pages: 0, contents: None }
    }

    fn ask(&self, session: &ServerSession, within: Duration) -> Result<(RegionId, u64), PoolError> {
        let request = match *self {
            RegionSource::Pages(pages) => Request::CreateRegion { pages },
            RegionSource::Claim { secrets, .. } => Request::ClaimRegion { ticket: secrets[0] },
        };
        match (session.ask(request, within)?, self) {
            (Reply::Created { region }, RegionSource::Pages(pages)) => Ok((region, *pages)),
            (Reply::Claimed { region, pages }, RegionSource::Claim { .. }) if pages > 0 => Ok((region, pages)),
            _ => Err(PoolError::Refused { server: session.server, reason: "its answer is not valid" }),
        }
    }
}

/// Reads `text` as a pool URL, without looking anything up, and returns whether it was understood.
/// Panics unless what must hold for any text does:
///
/// - A text that is understood can be written again from what was understood, and means the same
///   then. Its leaves are those of the text, in their order, and nesting is never deeper than the
///   stack has room for.
/// - An error points at a letter of the text, or behind the last.
/// - Each leaf is understood or refused.
#[cfg(any(test, feature = "conformance"))]
pub fn check_url(text: &str) -> bool {
    for leaf in leaf_urls(text) {
        if let Err(error) = LeafUrl::parse(leaf) {
            assert!(!error.to_string().is_empty());
        }
    }
    check_tree(text)
}

/// Parsed leaf of a URL.
#[derive(Debug)]
enum LeafUrl {
    Tcp(SocketAddr),
    Tls(TlsUrl),
    /// Path of a Unix socket, with the user that the URL names.
    Unix(Vec<u8>, Option<u32>),
    Fabric(fabric::Config),
    /// Memory of this process, with room for that many pages.
    Ram(usize),
    Ssd(ssd::Config),
    Lz(lz::Config),
    Mapped(mapped::Config),
}

impl LeafUrl {
    fn parse(url: &str) -> Result<LeafUrl, OpenError> {
        let wrong = |why: &str| OpenError::Url { url: url.to_owned(), why: why.to_owned() };
        let (scheme, rest) = url.split_once(':').ok_or_else(|| wrong("there is no scheme, as in tcp://HOST:PORT"))?;
        match scheme {
            "tcp" => {
                let rest = rest.strip_prefix("//").ok_or_else(|| wrong("write tcp://HOST:PORT"))?;
                let address = rest.parse().map_err(|_| {
                    wrong(
                        "the host must be a numeric address with a port, as in tcp://10.0.0.7:5555 or tcp://[::1]:5555",
                    )
                })?;
                Ok(LeafUrl::Tcp(address))
            }
            "tls" => {
                let config = TlsUrl::parse(rest).map_err(|why| wrong(&why))?;
                config.address().map_err(|why| wrong(&why))?;
                Ok(LeafUrl::Tls(config))
            }
            "shm" | "unix" => {
                let named = UnixSocket::parse(url).filter(|socket| !socket.path.is_empty());
                let socket = named.ok_or_else(|| wrong("there is no path, as in shm:/run/farfield.sock"))?;
                Ok(LeafUrl::Unix(socket.path.as_bytes().to_vec(), socket.uid))
            }
            "fabric" => Ok(LeafUrl::Fabric(fabric::Config::parse(rest).map_err(|why| wrong(&why))?)),
            "ram" => Ok(LeafUrl::Ram(RamBackend::parse_size(rest).map_err(|why| wrong(&why))?)),
            "lz" => Ok(LeafUrl::Lz(lz::Config::parse(rest).map_err(|why| wrong(&why))?)),
            "numa" => Ok(LeafUrl::Mapped(mapped::Config::parse_numa(rest).map_err(|why| wrong(&why))?)),
            "dax" => Ok(LeafUrl::Mapped(mapped::Config::parse_dax(rest).map_err(|why| wrong(&why))?)),
            "ssd" => Ok(LeafUrl::Ssd(ssd::Config::parse(rest).map_err(|why| wrong(&why))?)),
            other => Err(OpenError::Scheme { scheme: other.to_owned() }),
        }
    }
}

/// Turns the names of hosts in `urls` into numeric addresses, and paths into absolute ones.
/// Resolving needs locks, memory and files, so the code that starts a program does it, and not code
/// inside the program.
pub fn resolve_urls<S: AsRef<str>>(urls: &[S]) -> Result<Vec<String>, OpenError> {
    urls.iter().map(|url| resolve_url(url.as_ref())).collect()
}

fn resolve_url(url: &str) -> Result<String, OpenError> {
    parse(url)?;
    replace_leaves(url, resolve_leaf)
}

fn resolve_leaf(url: &str) -> Result<String, OpenError> {
    if let Some(rest) = url.strip_prefix("tls:") {
        let wrong = |why| OpenError::Url { url: url.to_owned(), why };
        let config = TlsUrl::parse(rest).map_err(wrong)?;
        let address = resolve_host("tls://", url, &config.host)?;
        return config.resolved(address).map_err(wrong);
    }
    let Some(scheme) = ["tcp://", "fabric:tcp://"].into_iter().find(|scheme| url.starts_with(scheme)) else {
        let absolute = match LeafUrl::parse(url)? {
            LeafUrl::Ssd(config) => config.absolute(url),
            LeafUrl::Mapped(config) => config.absolute(url),
            _ => Ok(url.to_owned()),
        };
        return absolute.map_err(|why| OpenError::Url { url: url.to_owned(), why });
    };
    let address = resolve_host(scheme, url, &url[scheme.len()..])?;
    Ok(format!("{scheme}{address}"))
}

fn resolve_host(scheme: &str, url: &str, host: &str) -> Result<SocketAddr, OpenError> {
    if let Some(why) = address_mistake(scheme, host) {
        return Err(OpenError::Url { url: url.to_owned(), why });
    }
    let unresolved = |why: String| OpenError::Resolve { host: host.to_owned(), why };
    let mut addresses = host.to_socket_addrs().map_err(|error| unresolved(error.to_string()))?;
    addresses.next().ok_or_else(|| unresolved("the name has no address".to_owned()))
}

/// Returns what is wrong with a host and port, as far as nobody must look the host up.
fn address_mistake(scheme: &str, host: &str) -> Option<String> {
    if let Some((before, options)) = host.split_once('?') {
        return Some(format!("{scheme} has no options; throttle({options}, {scheme}{before}) makes a slower pool"));
    }
    // The colons of an IPv6 address are in brackets.
    let behind = host.rsplit_once(']').map_or(host, |(_, behind)| behind);
    match behind.split_once(':').map(|(_, port)| port) {
        None | Some("") => Some(format!("the port is missing, as in {scheme}HOST:7400")),
        Some(port) if port.parse::<u16>().is_err() => Some(format!("{port:?} is not a port: ports are 1 to 65535")),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    //! Guards against errors that do not tell what to write instead.
    use super::*;

    fn error(url: &str) -> String {
        match PoolBuilder::new().url(url).pages(1).deadline(Duration::from_secs(2)).open() {
            Ok(_) => panic!("{url} opened"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn an_unknown_scheme_names_the_known_ones() {
        let text = error("rdma://x");
        for known in ["tcp://HOST:PORT", "shm:PATH", "unix:PATH", "fault:SPEC@URL", "stripe(URL, URL)"] {
            assert!(text.contains(known), "{text}");
        }
    }

    #[test]
    fn wrong_urls_say_what_to_write() {
        assert!(error("tcp:10.0.0.7:5555").contains("tcp://HOST:PORT"));
        assert!(error("tcp://localhost:1").contains("numeric"));
        assert!(error("shm:").contains("shm:/run"));
        assert!(error("10.0.0.7").contains("scheme"));
        assert!(error("fault:die=x@ram:").contains("die"));
        assert!(error("stripe(ram:,tcp:10.0.0.7:5555)").contains("tcp://HOST:PORT"));
        assert!(error("stripe(ram:,,ram:)").contains("at character 13"));
        assert!(error(&format!("stripe({})", ["ram:"; 17].join(","))).contains("more than 16"));
        assert_eq!(PoolBuilder::new().pages(1).open().err(), Some(OpenError::NoUrl));
    }

    #[test]
    fn an_address_that_nobody_could_look_up_is_named_before_anybody_tries() {
        let check = |url: &str, part: &str| {
            let error = resolve_urls(&[url]).expect_err(url).to_string();
            assert!(error.contains(part), "{url}: {error}");
        };
        check("tcp://localhost", "the port is missing, as in tcp://HOST:7400");
        check("tcp://[::1]", "the port is missing");
        check("fabric:tcp://big:", "as in fabric:tcp://HOST:7400");
        check("mirror(tcp://127.0.0.1:9, tcp://big:65536)", "ports are 1 to 65535");
        check("tcp://big:seven", "\"seven\" is not a port");
        check("tcp://127.0.0.1:9?latency=5ms", "throttle(latency=5ms, tcp://127.0.0.1:9)");
    }

    #[test]
    fn names_become_numbers_wherever_they_stand() {
        let numeric =
            ["tcp://127.0.0.1:9", "fault:die=3@tcp://[::1]:9", "shm:/x", "stripe(ram:, stripe(tcp://[::1]:9))"];
        assert_eq!(resolve_urls(&numeric).unwrap(), numeric);
        for scheme in ["tcp", "fabric:tcp"] {
            let resolved = resolve_urls(&[format!("stripe(shm:/x, fault:die=3@{scheme}://localhost:9)")]).unwrap();
            let local = ["127.0.0.1", "[::1]"].map(|host| format!("stripe(shm:/x, fault:die=3@{scheme}://{host}:9)"));
            assert!(local.contains(&resolved[0]), "{resolved:?}");
        }
        assert!(matches!(resolve_urls(&["rdma:x"]), Err(OpenError::Scheme { .. })));
        let here = std::env::current_dir().unwrap().join("far");
        let resolved = resolve_urls(&["stripe(ssd:far?size=8G&io=pread, ram:)"]).unwrap();
        assert_eq!(resolved[0], format!("stripe(ssd:{}?size=8G&io=pread, ram:)", here.display()));
    }

    #[test]
    fn errors_count_leaves_in_the_order_of_the_text() {
        let url = "stripe(ram:, stripe(ram:, fault:die=1@ram:), ram:)";
        let backend = PoolBuilder::new().urls(["ram:", url]).pages(1 << 12).open().unwrap();
        let dead = (0..1 << 12).step_by(16).find_map(|page| {
            let mut lane = backend.open_lane().ok()?;
            let op = crate::Op::Read { page: farfield_core::PageId(page), buffer: crate::Buffer::new(1) };
            let deadline = Duration::from_secs(9);
            lane.submit(crate::LaneRequest { tag: 0, priority: crate::Priority::Demand, deadline, op }).unwrap();
            let mut done = Vec::with_capacity(1);
            while lane.poll(&mut done) == 0 {}
            done[0].result.err()
        });
        assert!(matches!(dead, Some(PoolError::ServerGone { server: 3, .. })), "{dead:?}");
    }

    #[test]
    fn a_server_that_is_not_there_is_an_error_of_the_system() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // The port of a client: nobody listens there, and nobody else gets it meanwhile.
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let url = format!("tcp://{}", client.local_addr().unwrap());
        assert!(error(&url).contains("connection refused"));
    }

    #[test]
    fn a_leg_that_is_silent_is_not_waited_for_where_others_are_enough() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let silent = format!("tcp://{}", listener.local_addr().unwrap());
        let deadline = Duration::from_secs(60);
        for url in [
            format!("mirror({silent},ram:)"),
            format!("ec(2,2,ram:,{silent},ram:,{silent})"),
            format!("mirror(ram:,ram:,spare={silent})"),
        ] {
            let started = Instant::now();
            let backend = PoolBuilder::new().url(&url).pages(64).degraded().deadline(deadline).open().unwrap();
            assert!(started.elapsed() < deadline / 2, "{url}: waited {:?}", started.elapsed());
            let mut lane = backend.open_lane().unwrap();
            crate::trial::write(&mut *lane, 3, 20, 1).unwrap();
            crate::trial::assert_version(&mut *lane, 3, 20, 1);
        }
        // Nothing goes without it: it has all the time that there is.
        let deadline = Duration::from_millis(1500);
        let started = Instant::now();
        let builder =
            PoolBuilder::new().url(format!("mirror({silent},{silent})")).pages(64).degraded().deadline(deadline);
        let error = builder.open().err().unwrap();
        assert!(matches!(error.pool_error(), Some(PoolError::TimedOut { .. })), "{error}");
        assert!(started.elapsed() >= deadline);
    }

    #[test]
    fn a_listener_that_never_answers_is_given_up_in_time() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("tcp://{}", listener.local_addr().unwrap());
        assert!(error(&url).contains("did not answer within"));
    }
}
