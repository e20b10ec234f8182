//! Refuses requests that come by way of a stranger's page.
//!
//! A browser on this machine opens pages of strangers, too. A stranger's name can be made to resolve
//! to this machine (DNS rebinding), so a server for this machine's users answers only to names that
//! nobody else can give out. The browser says where a request began (Fetch Metadata, W3C), and a
//! request that changes something must say it (`Origin`, RFC 6454).

use crate::{WebRequest, WebResponse, text};
use std::net::IpAddr;
use ureq_proto::http::{HeaderName, Method, StatusCode, header};

/// Way to a server, and so which names of it nobody else can give out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WebScheme {
    /// In clear, on this machine only: `localhost`, or an address of the loopback interface; with any
    /// port, because a tunnel may have another.
    Http,
    /// Over TLS: those of its certificate, which the browser has compared.
    Https,
}

/// Returns a refusal if a request was not made by a page of this server, by its user, or by a
/// program.
pub fn refuse_stranger(request: &WebRequest, scheme: WebScheme) -> Option<WebResponse> {
    let refused = |line| Some(text(StatusCode::FORBIDDEN, line));
    let is_known = |host: &&str| scheme == WebScheme::Https || is_loopback(host);
    let Some(host) = single(request, &header::HOST).filter(is_known) else {
        return refused("this server answers at localhost, 127.0.0.1 and [::1] only");
    };
    let prefix = if scheme == WebScheme::Https { "https://" } else { "http://" };
    let [site, mode] = ["sec-fetch-site", "sec-fetch-mode"].map(HeaderName::from_static);
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    let is_visit = is_read && single(request, &mode) == Some("navigate");
    match single(request, &site) {
        None | Some("same-origin" | "none") => {}
        Some(_) if is_visit => {}
        Some(_) => return refused("only pages of this server may ask"),
    }
    let origin = single(request, &header::ORIGIN);
    let is_own = origin.and_then(|origin| origin.strip_prefix(prefix)) == Some(host);
    match origin {
        None if is_read => None,
        _ if is_own => None,
        _ => refused("a change needs the header Origin of a page of this server"),
    }
}

/// Returns the value of a header that occurs once.
fn single<'a>(request: &'a WebRequest, name: &HeaderName) -> Option<&'a str> {
    let mut values = request.headers().get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

/// Tells whether a host, with or without a port, can only be this machine.
fn is_loopback(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) => (address, port),
            None => return false,
        },
        None => host.split_once(':').map_or((host, ""), |(name, _)| (name, &host[name.len()..])),
    };
    let has_port = port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
    has_port && (name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|it| it.is_loopback()))
}

#[cfg(test)]
mod tests {
    //! Guards against a page of somebody else that reads or changes what only this machine's users may.
    use super::*;

    fn is_refused(method: &str, headers: &[(&str, &str)]) -> bool {
        is_refused_by(WebScheme::Http, method, headers)
    }

    fn is_refused_by(scheme: WebScheme, method: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = ureq_proto::http::Request::builder().method(method).uri("/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        refuse_stranger(&request.body(Vec::new()).unwrap(), scheme).is_some()
    }

    #[test]
    fn only_names_of_this_machine_are_answered() {
        for host in ["localhost", "LocalHost:80", "127.0.0.1:7404", "127.9.9.9", "[::1]:7404", "[::1]"] {
            assert!(!is_refused("GET", &[("host", host)]), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:7404",
            "10.0.0.1",
            "0.0.0.0:7404",
            "[::1",
            "[::2]",
            "localhost:x",
            "127.0.0.1:7404:1",
            "localhost@evil",
        ] {
            assert!(is_refused("GET", &[("host", host)]), "{host}");
        }
        assert!(is_refused("GET", &[]));
        assert!(is_refused("GET", &[("host", "localhost"), ("host", "localhost")]));
    }

    #[test]
    fn over_tls_names_are_those_of_the_certificate() {
        let by = |method: &str, headers: &[(&str, &str)]| is_refused_by(WebScheme::Https, method, headers);
        assert!(!by("GET", &[("host", "big.example:7404")]) && by("GET", &[]));
        assert!(by("GET", &[("host", "big"), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "cors")]));
        let post = |origin: &str| by("POST", &[("host", "big:7404"), ("origin", origin)]);
        assert!(!post("https://big:7404") && post("http://big:7404") && post("https://big"));
    }

    #[test]
    fn pages_of_others_are_refused_and_links_to_us_are_not() {
        let from = |site, mode| {
            is_refused("GET", &[("host", "localhost"), ("sec-fetch-site", site), ("sec-fetch-mode", mode)])
        };
        assert!(from("cross-site", "no-cors") && from("same-site", "cors"));
        assert!(!from("same-origin", "cors") && !from("none", "navigate") && !from("cross-site", "navigate"));
    }

    #[test]
    fn a_change_says_where_it_began() {
        let post = |origin: &str| is_refused("POST", &[("host", "localhost:7404"), ("origin", origin)]);
        assert!(!post("http://localhost:7404"));
        for origin in ["http://localhost", "https://localhost:7404", "null", "http://evil.example"] {
            assert!(post(origin), "{origin}");
        }
        assert!(is_refused("POST", &[("host", "localhost:7404")]));
        let get = [("host", "localhost:7404"), ("origin", "http://evil.example")];
        assert!(is_refused("GET", &get));
    }
}
