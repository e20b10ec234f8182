//! Configuration of a server.

use crate::tenants::Tenants;
use farfield_tls::ServerFiles;
use farfield_wic::Registry;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Address at which a server listens: `tcp://HOST:PORT`, `tls://HOST:PORT` or `unix:PATH`. A path that begins with `@`
/// is an abstract name.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ListenUrl {
    /// Host and port; port 0 means any free port.
    Tcp(String),
    /// Host and port of a listener that speaks TLS ([`Config::tls`]).
    Tls(String),
    /// Path of a socket in the file system, or an abstract name.
    Unix(PathBuf),
}

/// Error: the text is not an address at which a server can listen.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot listen at {url:?}: write tcp://HOST:PORT, tls://HOST:PORT or unix:PATH, with a port up to 65535")]
pub struct BadUrl {
    /// The text, as given.
    pub url: String,
}

impl FromStr for ListenUrl {
    type Err = BadUrl;

    fn from_str(url: &str) -> Result<ListenUrl, BadUrl> {
        let bad = || BadUrl { url: url.to_owned() };
        let encrypted = url.strip_prefix("tls://");
        if let Some(address) = encrypted.or_else(|| url.strip_prefix("tcp://")) {
            let (host, port) = address.trim_end_matches('/').rsplit_once(':').ok_or_else(bad)?;
            let port: u16 = port.parse().map_err(|_| bad())?;
            if host.is_empty() || host.contains('/') {
                return Err(bad());
            }
            let address = format!("{host}:{port}");
            return Ok(if encrypted.is_some() { ListenUrl::Tls(address) } else { ListenUrl::Tcp(address) });
        }
        let path = url.strip_prefix("unix://").or_else(|| url.strip_prefix("unix:")).ok_or_else(bad)?;
        if path.is_empty() || path.contains('\0') {
            return Err(bad());
        }
        Ok(ListenUrl::Unix(PathBuf::from(path)))
    }
}

impl std::fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ListenUrl::Tcp(address) => write!(f, "tcp://{address}"),
            ListenUrl::Tls(address) => write!(f, "tls://{address}"),
            ListenUrl::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Addresses to listen at; at least one.
    pub listen: Vec<ListenUrl>,
    /// Most bytes to store; `None` means until the machine has no more.
    pub capacity_bytes: Option<u64>,
    /// Tenants that may use the server. `None` allows all clients that can connect over TCP, and
    /// over a Unix socket the processes of the same user or root.
    pub tenants: Option<Tenants>,
    /// Certificates for addresses with TLS, and whose clients are let in there.
    pub tls: Option<ServerFiles>,
    /// Time for which regions outlive the last connection of their session; zero means not at all.
    pub lease: Duration,
    /// Time for which a snapshot waits to be claimed.
    pub ticket_life: Duration,
    /// Provider of libfabric through which regions can be read one-sided, at the host of the first
    /// TCP address in `listen`. `None` offers no one-sided reads.
    pub fabric: Option<String>,
    /// Address at which `GET /metrics` is answered.
    pub metrics: Option<SocketAddr>,
    /// Functions that clients may call. If there are none, clients are told so when they connect.
    pub functions: Registry,
    /// Most steps that a function may take, even if its caller allows more. Then it is pushed back
    /// to the client.
    pub call_steps_max: u64,
    /// Longest time that a function may take, even if its caller allows more. Its connection serves
    /// nothing else meanwhile.
    pub call_within: Duration,
    /// Most connections at a time.
    pub connections_max: usize,
    /// Whether all clients are one job that may use all resources, so that nothing is left for
    /// others.
    pub is_private: bool,
    /// Most mappings for what clients keep. `None` takes the kernel's limit for the process, less
    /// the server's own.
    pub mappings_max: Option<u64>,
    /// Time for which a connection polls for the next request before it sleeps; zero means not at
    /// all.
    pub spin: Duration,
    /// Time within which a new connection must authenticate.
    pub greeting_within: Duration,
    /// Time after which a client that does not read its answers counts as dead.
    pub stall_max: Duration,
    /// Interval between searches for memory that no region reaches any more.
    pub sweep_every: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: Vec::new(),
            capacity_bytes: None,
            tenants: None,
            tls: None,
            lease: Duration::from_secs(10),
            ticket_life: Duration::from_secs(30),
            fabric: None,
            metrics: None,
            functions: Registry::standard(),
            call_steps_max: 1 << 20,
            call_within: Duration::from_secs(2),
            connections_max: 4096,
            is_private: false,
            mappings_max: None,
            spin: Duration::from_micros(50),
            greeting_within: Duration::from_secs(10),
            stall_max: Duration::from_secs(30),
            sweep_every: Duration::from_secs(1),
        }
    }
}

/// Parses a number of bytes: `4096`, `64K`, `512M`, `2G`, `1T`, also with `B` or `iB` after the
/// letter. Letters stand for powers of 1024. Returns `None` for any other text, or if the number
/// overflows.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let unit = text[digits..].trim_start().to_ascii_lowercase();
    let letter = unit.trim_end_matches("ib").trim_end_matches('b');
    let shift = match letter {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024_and_nonsense_is_refused() {
        for (text, size) in [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("64K", Some(64 << 10)),
            ("512 MiB", Some(512 << 20)),
            ("2g", Some(2 << 30)),
            ("1TB", Some(1 << 40)),
            ("", None),
            ("G", None),
            ("-1", None),
            ("1.5G", None),
            ("12X", None),
            ("99999999999999T", None),
        ] {
            assert_eq!(parse_size(text), size, "{text:?}");
        }
    }

    #[test]
    fn urls_are_read_and_written() {
        for url in ["tcp://127.0.0.1:7400", "tcp://[::1]:0", "tls://localhost:1", "unix:/run/farfield", "unix:@name"] {
            assert_eq!(url.parse::<ListenUrl>().unwrap().to_string(), url);
        }
        for url in
            ["", "tcp://", "tcp://:1", "tcp://host", "tcp://host:99999", "tcp://a/b:1", "unix:", "/path", "http://x:1"]
        {
            assert!(url.parse::<ListenUrl>().is_err(), "{url}");
        }
    }
}
