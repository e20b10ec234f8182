//! URLs of the servers of etcd: `http://HOST:2379`, or `https://USER:PASSWORD@HOST:2379?ca=FILE&cert=FILE&key=FILE`.

use std::sync::Arc;
use ureq::tls::{Certificate, ClientCert, PemItem, RootCerts, TlsConfig, parse_pem};

const ADVICE: &str = "write http://HOST:2379, or https://USER:PASSWORD@HOST:2379?ca=FILE&cert=FILE&key=FILE, or \
                      several of them with commas";

/// Servers of one etcd, and how they are reached.
pub(super) struct EtcdUrls {
    /// Scheme, host and port of each.
    pub(super) servers: Vec<String>,
    /// User and password.
    pub(super) login: Option<(String, String)>,
    pub(super) files: EtcdFiles,
}

/// PEM files with the authorities that are believed, and with this client's certificate and key.
#[derive(Default)]
pub(super) struct EtcdFiles {
    ca: Option<String>,
    cert: Option<String>,
    key: Option<String>,
}

/// Returns a text in which a percent sign and two hexadecimal digits stand for a byte.
fn unescaped(text: &str) -> Result<String, String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(digits.ok_or("write a percent sign as %25")?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).map_err(|_| "user and password are UTF-8".to_owned())
}

/// Returns the URLs as they may be shown: without users, passwords and files.
pub(super) fn shown(urls: &str) -> String {
    let shown = urls.split(',').map(|url| {
        let url = url.trim().split('?').next().unwrap_or_default();
        let (scheme, place) = url.split_once("://").unwrap_or(("", url));
        format!("{scheme}://{}", place.rsplit('@').next().unwrap_or_default().trim_end_matches('/'))
    });
    shown.collect::<Vec<_>>().join(",")
}

impl EtcdUrls {
    /// Reads URLs, which commas separate. What one of them says of user and files holds for all.
    pub(super) fn parse(urls: &str) -> Result<EtcdUrls, String> {
        let mut read = EtcdUrls { servers: Vec::new(), login: None, files: EtcdFiles::default() };
        let mut is_secret = true;
        for url in urls.split(',') {
            let (scheme, rest) = url.trim().split_once("://").ok_or(ADVICE)?;
            let (place, parameters) = rest.split_once('?').unwrap_or((rest, ""));
            let (login, host) = place.rsplit_once('@').map_or((None, place), |(login, host)| (Some(login), host));
            let host = host.trim_end_matches('/');
            if !["http", "https"].contains(&scheme) || host.is_empty() || host.contains('/') {
                return Err(ADVICE.into());
            }
            is_secret &= scheme == "https";
            if let Some(login) = login {
                let (user, password) = login.split_once(':').ok_or("write USER:PASSWORD before the @")?;
                read.login = Some((unescaped(user)?, unescaped(password)?));
            }
            for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
                let (name, file) = parameter.split_once('=').unwrap_or((parameter, ""));
                let named = match name {
                    "ca" => &mut read.files.ca,
                    "cert" => &mut read.files.cert,
                    "key" => &mut read.files.key,
                    _ => return Err(format!("{parameter} is no parameter: write ca=FILE, cert=FILE or key=FILE")),
                };
                *named = Some(file.to_owned());
            }
            read.servers.push(format!("{scheme}://{host}"));
        }
        let EtcdFiles { ca, cert, key } = &read.files;
        if read.servers.iter().any(|server| server.starts_with("https:")) && ca.is_none() {
            return Err("https:// needs the authority that is believed: ?ca=FILE".into());
        }
        if cert.is_some() != key.is_some() {
            return Err("a client's certificate needs its key: ?cert=FILE&key=FILE".into());
        }
        if ca.is_some() && !is_secret {
            return Err("certificates are for https:// URLs, of all servers".into());
        }
        Ok(read)
    }
}

impl EtcdFiles {
    /// Reads the files.
    pub(super) fn config(&self) -> Result<TlsConfig, String> {
        let (roots, _) = self.ca.as_deref().map_or(Ok(Default::default()), pem)?;
        if self.ca.is_some() && roots.is_empty() {
            return Err("the file of ca= has no certificate".into());
        }
        let identity = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                let key = pem(key)?.1.ok_or("the file of key= has no private key")?;
                Some(ClientCert::new_with_certs(&pem(cert)?.0, key))
            }
            _ => None,
        };
        let config = TlsConfig::builder().root_certs(RootCerts::Specific(Arc::new(roots))).client_cert(identity);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        Ok(config.unversioned_rustls_crypto_provider(provider).build())
    }
}

type PemContents = (Vec<Certificate<'static>>, Option<ureq::tls::PrivateKey<'static>>);

/// Reads the certificates of a PEM file, and its private key.
fn pem(file: &str) -> Result<PemContents, String> {
    let bytes = std::fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    let (mut certificates, mut key) = (Vec::new(), None);
    for item in parse_pem(&bytes) {
        match item.map_err(|error| format!("{file}: {error}"))? {
            PemItem::Certificate(certificate) => certificates.push(certificate),
            PemItem::PrivateKey(private) => key = Some(private),
            _ => {}
        }
    }
    Ok((certificates, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_say_where_and_who_and_are_shown_without_secrets() {
        let urls = "https://root:p%2Cq%25@one:2379?ca=a.pem&cert=b.pem&key=c.key, https://two:2379/";
        let EtcdUrls { servers, login, files } = EtcdUrls::parse(urls).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(servers, ["https://one:2379", "https://two:2379"]);
        assert_eq!(login, Some(("root".into(), "p,q%".into())));
        assert_eq!([files.ca, files.cert, files.key].map(Option::unwrap), ["a.pem", "b.pem", "c.key"]);
        assert_eq!(shown(urls), "https://one:2379,https://two:2379");
        assert_eq!(shown("tcp://a:b@c?d"), "tcp://c");
        for (urls, advice) in [
            ("tcp://etcd:2379", "write http://HOST:2379"),
            ("http://", "write http://HOST:2379"),
            ("http://etcd:2379/path", "write http://HOST:2379"),
            ("https://etcd:2379", "?ca=FILE"),
            ("https://etcd:2379?ca=a.pem&cert=b.pem", "needs its key"),
            ("https://etcd:2379?ca=a.pem,http://other:2379", "of all servers"),
            ("http://root@etcd:2379", "USER:PASSWORD"),
            ("http://root:100%@etcd:2379", "%25"),
            ("https://etcd:2379?pin=1", "pin=1 is no parameter"),
        ] {
            let error = EtcdUrls::parse(urls).err().unwrap_or_else(|| panic!("{urls}"));
            assert!(error.contains(advice), "{urls}: {error}");
        }
    }

    #[test]
    fn files_are_named_if_they_cannot_be_used() {
        let with = |ca: &str| EtcdFiles { ca: Some(ca.into()), ..EtcdFiles::default() }.config().err();
        assert!(with("/no/such/file").is_some_and(|error| error.contains("/no/such/file")));
        assert!(with("/dev/null").is_some_and(|error| error.contains("no certificate")));
        assert!(EtcdFiles::default().config().is_ok());
    }
}
