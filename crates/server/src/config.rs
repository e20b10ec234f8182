//! What a server is told before it starts.

use crate::tenants::Tenants;
use farfield_wic::Registry;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Where a server listens: `tcp://HOST:PORT` or `unix:PATH` (a path that begins with `@` is an abstract name).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ListenUrl {
    /// Host and port; port 0 takes any free one.
    Tcp(String),
    /// A socket in the file system.
    Unix(PathBuf),
}

/// The text is no place to listen at.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot listen at {url:?}: write tcp://HOST:PORT or unix:PATH")]
pub struct BadUrl {
    /// The text.
    pub url: String,
}

impl FromStr for ListenUrl {
    type Err = BadUrl;

    fn from_str(url: &str) -> Result<ListenUrl, BadUrl> {
        let bad = || BadUrl { url: url.to_owned() };
        if let Some(address) = url.strip_prefix("tcp://") {
            let (host, port) = address.trim_end_matches('/').rsplit_once(':').ok_or_else(bad)?;
            let port: u16 = port.parse().map_err(|_| bad())?;
            if host.is_empty() || host.contains('/') {
                return Err(bad());
            }
            return Ok(ListenUrl::Tcp(format!("{host}:{port}")));
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
            ListenUrl::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// What a server is told before it starts.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it listens; at least one place.
    pub listen: Vec<ListenUrl>,
    /// Most bytes that it keeps; `None`: until the machine has no more.
    pub capacity_bytes: Option<u64>,
    /// Who may use it. `None`: whoever can connect over TCP, and over a Unix socket processes of the same user or root.
    pub tenants: Option<Tenants>,
    /// How long regions outlive the last connection of their session. Zero: not at all.
    pub lease: Duration,
    /// How long a snapshot waits to be claimed.
    pub ticket_life: Duration,
    /// Provider of libfabric through which regions can be read one-sided, at the host of the first TCP address in `listen`.
    pub fabric: Option<String>,
    /// Where `GET /metrics` is answered.
    pub metrics: Option<SocketAddr>,
    /// Functions that clients may call. Without any, clients are told so when they connect.
    pub functions: Registry,
    /// Most steps that a function may take, whatever its caller says; then it is pushed back to the client.
    pub call_steps_max: u64,
    /// Most time that a function may take, whatever its caller says. Its connection serves nothing else meanwhile.
    pub call_within: Duration,
    /// Most connections at a time.
    pub connections_max: usize,
    /// All clients are one job, which may have all that there is: nothing is left for others.
    pub is_private: bool,
    /// Most mappings of what clients keep; `None`: as many as the kernel allows the process, but for its own.
    pub mappings_max: Option<u64>,
    /// How long a connection looks for the next request before it sleeps. Zero: not at all.
    pub spin: Duration,
    /// How long a new connection may take to say who it is.
    pub greeting_within: Duration,
    /// How long a client may leave its answers unread before it counts as dead.
    pub stall_max: Duration,
    /// How often memory that no region reaches any more is looked for.
    pub sweep_every: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: Vec::new(),
            capacity_bytes: None,
            tenants: None,
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

/// Reads a number of bytes: `4096`, `64K`, `512M`, `2G`, `1T`, also with `B` or `iB` after the letter. Powers of 1024.
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
        for url in ["tcp://127.0.0.1:7400", "tcp://[::1]:0", "tcp://localhost:1", "unix:/run/farfield", "unix:@name"] {
            assert_eq!(url.parse::<ListenUrl>().unwrap().to_string(), url);
        }
        for url in
            ["", "tcp://", "tcp://:1", "tcp://host", "tcp://host:99999", "tcp://a/b:1", "unix:", "/path", "http://x:1"]
        {
            assert!(url.parse::<ListenUrl>().is_err(), "{url}");
        }
    }
}
