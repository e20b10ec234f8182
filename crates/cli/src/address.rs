//! Addresses that options name, at which the command answers.

use std::net::{SocketAddr, ToSocketAddrs as _};

/// Reads `ADDR:PORT`, where the address may be a name of this machine, like localhost.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let found = text.to_socket_addrs().ok().and_then(|mut all| all.next());
    found.ok_or_else(|| "write ADDR:PORT, like 127.0.0.1:7404, with a port up to 65535".to_owned())
}

#[cfg(test)]
mod tests {
    //! Danger: an address that people write is refused without a word about how it is written.
    use super::*;

    #[test]
    fn addresses_have_a_port_and_may_be_names() {
        assert_eq!(address("127.0.0.1:7404"), Ok(SocketAddr::from(([127, 0, 0, 1], 7404))));
        assert_eq!(address("[::1]:0").map(|address| address.is_ipv6()), Ok(true));
        assert!(address("localhost:80").is_ok_and(|address| address.ip().is_loopback()));
        for wrong in ["127.0.0.1", "7404", ":x", "127.0.0.1:65536", "127.0.0.1:-1", "", "http://127.0.0.1:1"] {
            assert!(address(wrong).is_err_and(|error| error.contains("65535")), "{wrong}");
        }
    }
}
