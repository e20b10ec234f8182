//! Pool URLs as the user wrote them, made ready for processes that cannot look up names.

use super::Refusal;
use std::net::ToSocketAddrs;

/// The same URL with a numeric address: the library inside a program must not call a resolver.
pub fn resolve(url: &str) -> Result<String, Refusal> {
    let refused = |reason: String| Refusal::Url { url: url.into(), reason };
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(refused("not a URL; it looks like tcp://HOST:PORT or unix:PATH".into()));
    };
    if scheme != "tcp" {
        return Ok(url.into());
    }
    let Some(rest) = rest.strip_prefix("//") else {
        return Err(refused("a TCP server is written tcp://HOST:PORT".into()));
    };
    let (address, options) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let resolved = address.to_socket_addrs().map_err(|error| refused(error.to_string()))?;
    // The first answer is what the system's resolver prefers.
    let address = resolved.into_iter().next().ok_or_else(|| refused("the name has no address".into()))?;
    Ok(format!("tcp://{address}{options}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_numbers_and_the_rest_stays() {
        assert_eq!(resolve("tcp://127.0.0.1:7400").unwrap(), "tcp://127.0.0.1:7400");
        assert_eq!(resolve("tcp://[::1]:7400?weight=2").unwrap(), "tcp://[::1]:7400?weight=2");
        let local = resolve("tcp://localhost:7400/").unwrap();
        assert!(local == "tcp://127.0.0.1:7400/" || local == "tcp://[::1]:7400/", "{local}");
        assert_eq!(resolve("unix:/run/farfield").unwrap(), "unix:/run/farfield");
        assert!(resolve("localhost").is_err());
        assert!(resolve("tcp:localhost:1").is_err());
        assert!(resolve("tcp://localhost").unwrap_err().to_string().contains("tcp://localhost"));
    }
}
