//! From URLs to a backend.

use crate::connection::{Address, HandshakeError, Identity, Session};
use crate::fault::{FaultBackend, FaultPlan};
use crate::ram::RamBackend;
use crate::shm::ShmBackend;
use crate::stripe::StripeBackend;
use crate::tcp::TcpBackend;
use crate::{Backend, CloneTicket, PoolError};
use core::time::Duration;
use farfield_core::RegionId;
use farfield_core::wire::{Hello, Reply, Request, features};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

/// Why a pool could not be opened. Unlike [`PoolError`] it may allocate: nobody opens a pool in a hurry.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpenError {
    /// No URL was given.
    #[error("no memory server given: name one, for example tcp://10.0.0.7:5555 or shm:/run/farfield.sock")]
    NoUrl,
    /// A URL that cannot be understood.
    #[error("cannot understand {url:?}: {why}")]
    Url {
        /// The URL.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// A scheme that does not exist.
    #[error("no backend is called {scheme:?}: known are tcp://HOST:PORT, shm:PATH, unix:PATH, ram: and fault:SPEC@URL")]
    Scheme {
        /// What stands before the colon.
        scheme: String,
    },
    /// A name that does not resolve to an address.
    #[error("cannot find the address of {host:?}: {why}")]
    Resolve {
        /// The name.
        host: String,
        /// What the resolver says.
        why: String,
    },
    /// A token or name longer than the protocol allows, or a region without pages.
    #[error("{0}")]
    Argument(&'static str),
    /// A server refused the client.
    #[error("memory server {url} refused the client: {text}")]
    Refused {
        /// Which.
        url: String,
        /// What it says.
        text: String,
    },
    /// Anything else that can go wrong with a server.
    #[error("{url}: {error}")]
    Pool {
        /// Which.
        url: String,
        /// What happened.
        error: PoolError,
    },
}

impl OpenError {
    /// The underlying pool error, where there is one.
    pub fn pool_error(&self) -> Option<PoolError> {
        match self {
            OpenError::Pool { error, .. } => Some(*error),
            _ => None,
        }
    }
}

/// Opens a pool: says where, as whom and how much.
///
/// ```no_run
/// # use core::time::Duration;
/// let backend = farfield_pool::Opener::new()
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
pub struct Opener {
    urls: Vec<String>,
    token: String,
    client_name: String,
    pages: u64,
    deadline: Duration,
}

impl Default for Opener {
    fn default() -> Self {
        Opener::new()
    }
}

impl core::fmt::Debug for Opener {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // Without the token.
        write!(f, "Opener {{ urls: {:?}, client_name: {:?}, pages: {} }}", self.urls, self.client_name, self.pages)
    }
}

impl Opener {
    /// Nowhere, as nobody, nothing, within ten seconds.
    pub fn new() -> Opener {
        Opener {
            urls: Vec::new(),
            token: String::new(),
            client_name: String::new(),
            pages: 0,
            deadline: Duration::from_secs(10),
        }
    }

    /// Adds a server; pages are striped over several.
    pub fn url(mut self, url: impl Into<String>) -> Opener {
        self.urls.push(url.into());
        self
    }

    /// Adds several servers.
    pub fn urls<I: IntoIterator<Item: Into<String>>>(mut self, urls: I) -> Opener {
        self.urls.extend(urls.into_iter().map(Into::into));
        self
    }

    /// What proves that we may use the servers.
    pub fn token(mut self, token: impl Into<String>) -> Opener {
        self.token = token.into();
        self
    }

    /// What the servers call us in their logs. A name that is too long is cut.
    pub fn client_name(mut self, name: impl Into<String>) -> Opener {
        self.client_name = name.into();
        let mut len = self.client_name.len().min(Hello::NAME_BYTES_MAX);
        while !self.client_name.is_char_boundary(len) {
            len -= 1;
        }
        self.client_name.truncate(len);
        self
    }

    /// Pages that the region shall be able to address.
    pub fn pages(mut self, pages: u64) -> Opener {
        self.pages = pages;
        self
    }

    /// How long opening, opening a lane, or a clone may take at each server.
    pub fn deadline(mut self, deadline: Duration) -> Opener {
        self.deadline = deadline;
        self
    }

    /// Opens a new, empty region.
    pub fn open(&self) -> Result<Arc<dyn Backend>, OpenError> {
        if self.pages == 0 {
            return Err(OpenError::Argument("a region needs at least one page"));
        }
        self.open_members(None)
    }

    /// Opens the snapshot behind a ticket. Same URLs, in the same order, as the pool that was cloned; the number of pages
    /// is that of the snapshot.
    pub fn claim(&self, ticket: &CloneTicket) -> Result<Arc<dyn Backend>, OpenError> {
        self.open_members(Some(ticket))
    }

    fn open_members(&self, ticket: Option<&CloneTicket>) -> Result<Arc<dyn Backend>, OpenError> {
        if self.urls.is_empty() {
            return Err(OpenError::NoUrl);
        }
        if self.urls.len() > CloneTicket::SERVERS_MAX {
            return Err(OpenError::Argument("more than 16 memory servers in one pool"));
        }
        if self.token.len() > Hello::TOKEN_BYTES_MAX {
            return Err(OpenError::Argument("the token is longer than 256 bytes"));
        }
        let targets: Vec<Target> = self.urls.iter().map(|url| Target::parse(url)).collect::<Result<_, _>>()?;
        let members = targets.len();
        let mut opened = Vec::with_capacity(members);
        for (index, target) in targets.into_iter().enumerate() {
            let want = match ticket {
                Some(ticket) => Want::Claim(ticket.secrets[index]),
                None => Want::Pages(StripeBackend::pages_of_member(self.pages, members, index)),
            };
            let backend = self.open_one(index as u16, target, want).map_err(|error| match error {
                HandshakeError::Pool(error) => OpenError::Pool { url: self.urls[index].clone(), error },
                HandshakeError::Refused(text) => OpenError::Refused { url: self.urls[index].clone(), text },
                HandshakeError::HungUp => {
                    let reason = "it closed the connection without an answer";
                    let error = PoolError::Refused { server: index as u16, reason };
                    OpenError::Pool { url: self.urls[index].clone(), error }
                }
            })?;
            opened.push(backend);
        }
        if opened.len() == 1 {
            return Ok(opened.remove(0));
        }
        Ok(Arc::new(StripeBackend::new(opened, self.pages)))
    }

    fn open_one(&self, server: u16, target: Target, want: Want) -> Result<Arc<dyn Backend>, HandshakeError> {
        let address = match target {
            Target::Tcp(address) => Address::Tcp(address),
            Target::Unix(path) => Address::Unix(path),
            Target::Ram => {
                return Ok(Arc::new(match want {
                    Want::Pages(pages) => RamBackend::new(server, pages),
                    Want::Claim(secret) => RamBackend::claim(server, secret)?,
                }));
            }
            Target::Fault(plan, inner) => {
                let inner = self.open_one(server, *inner, want)?;
                return Ok(Arc::new(FaultBackend::new(server, inner, plan)));
            }
        };
        let identity = Identity {
            token: self.token.clone().into_bytes(),
            client_name: self.client_name.clone(),
            deadline: self.deadline,
        };
        let session = Arc::new(Session::open(server, address, identity)?);
        let (region, pages) = want.ask(&session)?;
        if session.welcome.features & features::MAP != 0 {
            return Ok(Arc::new(ShmBackend::new(session, region, pages)?));
        }
        Ok(Arc::new(TcpBackend::new(session, region, pages)))
    }
}

/// The region that a member shall be.
enum Want {
    Pages(u64),
    Claim(u128),
}

impl Want {
    fn ask(&self, session: &Session) -> Result<(RegionId, u64), PoolError> {
        let request = match *self {
            Want::Pages(pages) => Request::CreateRegion { pages },
            Want::Claim(ticket) => Request::ClaimRegion { ticket },
        };
        match (session.ask(request, session.deadline())?, self) {
            (Reply::Created { region }, Want::Pages(pages)) => Ok((region, *pages)),
            (Reply::Claimed { region, pages }, Want::Claim(_)) if pages > 0 => Ok((region, pages)),
            _ => Err(PoolError::Refused { server: session.server, reason: "its answer makes no sense" }),
        }
    }
}

/// A URL, understood.
#[derive(Debug)]
enum Target {
    Tcp(SocketAddr),
    Unix(Vec<u8>),
    Ram,
    Fault(FaultPlan, Box<Target>),
}

impl Target {
    fn parse(url: &str) -> Result<Target, OpenError> {
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
                Ok(Target::Tcp(address))
            }
            "shm" | "unix" => {
                if rest.is_empty() {
                    return Err(wrong("there is no path, as in shm:/run/farfield.sock"));
                }
                Ok(Target::Unix(rest.as_bytes().to_vec()))
            }
            "ram" => Ok(Target::Ram),
            "fault" => {
                let (spec, inner) = rest.split_once('@').ok_or_else(|| wrong("write fault:SPEC@URL"))?;
                let plan = FaultPlan::parse(spec).map_err(|why| wrong(&why))?;
                Ok(Target::Fault(plan, Box::new(Target::parse(inner)?)))
            }
            other => Err(OpenError::Scheme { scheme: other.to_owned() }),
        }
    }
}

/// Turns the names of hosts in `urls` into numeric addresses. Resolving needs locks, memory and files, so it is done
/// by whoever starts a program and not inside it.
pub fn resolve_urls<S: AsRef<str>>(urls: &[S]) -> Result<Vec<String>, OpenError> {
    urls.iter().map(|url| resolve_url(url.as_ref())).collect()
}

fn resolve_url(url: &str) -> Result<String, OpenError> {
    if let Some(rest) = url.strip_prefix("fault:")
        && let Some((spec, inner)) = rest.split_once('@')
    {
        return Ok(format!("fault:{spec}@{}", resolve_url(inner)?));
    }
    let Some(host) = url.strip_prefix("tcp://") else {
        Target::parse(url)?;
        return Ok(url.to_owned());
    };
    let unresolved = |why: String| OpenError::Resolve { host: host.to_owned(), why };
    let mut addresses = host.to_socket_addrs().map_err(|error| unresolved(error.to_string()))?;
    let address = addresses.next().ok_or_else(|| unresolved("the name has no address".to_owned()))?;
    Ok(format!("tcp://{address}"))
}

#[cfg(test)]
mod tests {
    //! Guards against errors that do not tell what to write instead.
    use super::*;

    fn error(url: &str) -> String {
        match Opener::new().url(url).pages(1).deadline(Duration::from_secs(2)).open() {
            Ok(_) => panic!("{url} opened"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn an_unknown_scheme_names_the_known_ones() {
        let text = error("rdma://x");
        for known in ["tcp://HOST:PORT", "shm:PATH", "unix:PATH", "fault:SPEC@URL"] {
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
        assert_eq!(Opener::new().pages(1).open().err(), Some(OpenError::NoUrl));
    }

    #[test]
    fn names_become_numbers_inside_faults_too() {
        let urls = resolve_urls(&["tcp://127.0.0.1:9", "fault:die=3@tcp://[::1]:9", "shm:/x"]).unwrap();
        assert_eq!(urls, ["tcp://127.0.0.1:9", "fault:die=3@tcp://[::1]:9", "shm:/x"]);
        assert!(matches!(resolve_urls(&["rdma:x"]), Err(OpenError::Scheme { .. })));
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
    fn a_listener_that_never_answers_is_given_up_in_time() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("tcp://{}", listener.local_addr().unwrap());
        assert!(error(&url).contains("did not answer within"));
    }
}
