//! URL of a server with TLS: `tls://HOST:PORT?ca=FILE&cert=FILE&key=FILE`.
//!
//! Its backend is that of `tcp`, over sealed records (`farfield_tls`).

use crate::leaf::connection::ServerAddress;
use crate::url::leaf_urls;
use farfield_os::sync::Mutex;
use farfield_tls::{ClientFiles, Connector, ConnectorTemplate};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Form of the URL, for errors.
const FORM: &str = "write tls://HOST:PORT?ca=FILE&cert=FILE&key=FILE, or pin=HEX instead of ca=FILE";

/// Parsed URL of a server with TLS.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct TlsUrl {
    /// Host and port.
    pub(crate) host: String,
    /// Name that the server's certificate must have, if it is not the host.
    name: Option<String>,
    files: ClientFiles,
}

impl TlsUrl {
    /// Parses what follows `tls:`. The host may be a name.
    pub(crate) fn parse(rest: &str) -> Result<TlsUrl, String> {
        let rest = rest.strip_prefix("//").ok_or(FORM)?;
        let (host, options) = rest.split_once('?').unwrap_or((rest, ""));
        let mut url = TlsUrl { host: host.to_owned(), name: None, files: ClientFiles::default() };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').filter(|(_, value)| !value.is_empty()).ok_or(FORM)?;
            let file = || Some(PathBuf::from(value));
            let is_first = match name {
                "name" => url.name.replace(value.to_owned()).is_none(),
                "ca" => std::mem::replace(&mut url.files.ca, file()).is_none(),
                "cert" => std::mem::replace(&mut url.files.certificate, file()).is_none(),
                "key" => std::mem::replace(&mut url.files.key, file()).is_none(),
                "pin" => url.files.pin.replace(value.parse()?).is_none(),
                other => return Err(format!("tls:// has no option {other:?}: {FORM}")),
            };
            if !is_first {
                return Err(format!("{name}= is given twice: remove one of them"));
            }
        }
        if url.files.ca.is_none() && url.files.pin.is_none() {
            return Err(format!("it does not say whom to trust: {FORM}"));
        }
        if url.files.certificate.is_some() != url.files.key.is_some() {
            return Err("cert= and key= belong together: give both, or none".to_owned());
        }
        Ok(url)
    }

    /// Returns the numeric address.
    pub(crate) fn address(&self) -> Result<SocketAddr, String> {
        let why = "the host must be a numeric address with a port, as in tls://10.0.0.7:7400?name=big&ca=FILE";
        self.host.parse().map_err(|_| why.to_owned())
    }

    /// Returns the URL with this address for its host, and with absolute paths. The name of the host stays, as the one
    /// that the certificate must have.
    pub(crate) fn resolved(mut self, address: SocketAddr) -> Result<String, String> {
        if self.name.is_none() && self.address().is_err() {
            self.name = self.host.rsplit_once(':').map(|(name, _)| name.to_owned());
        }
        self.host = address.to_string();
        let files = &mut self.files;
        for path in [&mut files.ca, &mut files.certificate, &mut files.key].into_iter().flatten() {
            *path = std::path::absolute(&path).map_err(|error| error.to_string())?;
        }
        Ok(self.to_string())
    }

    /// Returns how to reach the server. Reads the files, unless this process has read them.
    pub(crate) fn open(&self) -> Result<ServerAddress, String> {
        let template = match &*PREPARED.lock() {
            None => ConnectorTemplate::new(),
            Some(prepared) => match prepared.servers.iter().find(|(url, _)| url == self) {
                Some((_, address)) => return Ok(address.clone()),
                None => prepared.template.clone(),
            },
        };
        let address = self.read(&template)?;
        if let Some(prepared) = &mut *PREPARED.lock() {
            prepared.servers.push((self.clone(), address.clone()));
        }
        Ok(address)
    }

    fn read(&self, template: &ConnectorTemplate) -> Result<ServerAddress, String> {
        let address = self.address()?;
        let numeric = address.ip().to_string();
        let connector = template.connector(self.name.as_deref().unwrap_or(&numeric), &self.files);
        Ok(ServerAddress::Tls(address, connector.map_err(|error| error.to_string())?))
    }
}

/// Template and files of a process that must be able to reach servers with TLS without thread-local storage.
struct PreparedServers {
    template: ConnectorTemplate,
    servers: Vec<(TlsUrl, ServerAddress)>,
}

static PREPARED: Mutex<Option<PreparedServers>> = Mutex::new(None);

/// Reads the files of the servers with TLS in these URLs, as far as they can be read now: later the process may have
/// another root directory, or another user. From now on this process needs no thread-local storage to reach a server
/// with TLS, which handlers inside programs do not have. It reads the files of other servers when it opens them.
pub fn prepare_tls<'a>(urls: impl Iterator<Item = &'a str>) {
    let template = ConnectorTemplate::new();
    let parsed = urls.flat_map(leaf_urls).filter_map(|leaf| TlsUrl::parse(leaf.strip_prefix("tls:")?).ok());
    let servers = parsed.filter_map(|url| url.read(&template).ok().map(|address| (url, address))).collect();
    *PREPARED.lock() = Some(PreparedServers { template, servers });
}

/// Returns the numeric address of a server with TLS, and how to begin a session there. Reads the files that the URL
/// names. The error is a text that says what to do.
pub fn tls_connector(url: &str) -> Result<(SocketAddr, Connector), String> {
    match TlsUrl::parse(url.strip_prefix("tls:").ok_or(FORM)?)?.open()? {
        ServerAddress::Tls(address, connector) => Ok((address, connector)),
        _ => Err(FORM.to_owned()),
    }
}

/// Writes a URL that means the same.
impl core::fmt::Display for TlsUrl {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "tls://{}", self.host)?;
        let file = |path: &Option<PathBuf>| path.as_deref().map(Path::display).map(|path| path.to_string());
        let ClientFiles { ca, pin, certificate, key } = &self.files;
        let options = [
            ("name", self.name.clone()),
            ("ca", file(ca)),
            ("pin", pin.map(|pin| pin.to_string())),
            ("cert", file(certificate)),
            ("key", file(key)),
        ];
        let options = options.into_iter().filter_map(|(name, value)| Some((name, value?)));
        ('?'..='?')
            .chain(std::iter::repeat('&'))
            .zip(options)
            .try_for_each(|(sign, (name, value))| write!(f, "{sign}{name}={value}"))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a server that is trusted for another reason than the URL says.
    use super::*;

    #[test]
    fn urls_are_read_and_written() {
        let pin = "5a".repeat(32);
        for url in [
            "//10.0.0.7:7400?name=big&ca=/etc/ca.pem&cert=/c.pem&key=/c.key".to_owned(),
            format!("//[::1]:7400?pin={pin}"),
            format!("//10.0.0.7:7400?ca=/ca&pin={pin}&cert=/c&key=/k"),
        ] {
            let parsed = TlsUrl::parse(&url).unwrap();
            assert_eq!(parsed.to_string(), format!("tls:{url}"));
            assert_eq!(parsed.clone().resolved(parsed.address().unwrap()).unwrap(), format!("tls:{url}"));
        }
    }

    #[test]
    fn a_name_stays_and_paths_become_absolute() {
        let here = std::env::current_dir().unwrap();
        let url = TlsUrl::parse("//big:7400?ca=ca.pem").unwrap();
        assert!(url.address().is_err());
        let resolved = url.resolved("10.0.0.7:7400".parse().unwrap()).unwrap();
        assert_eq!(resolved, format!("tls://10.0.0.7:7400?name=big&ca={}/ca.pem", here.display()));
    }

    #[test]
    fn a_prepared_process_reaches_servers_that_nobody_has_named_before() {
        let pinned = TlsUrl::parse(&format!("//127.0.0.1:1?pin={}", "5a".repeat(32))).unwrap();
        let absent = TlsUrl::parse("//127.0.0.1:1?ca=/no/such/authority").unwrap();
        prepare_tls([absent.to_string().as_str()].into_iter());
        assert!(pinned.open().is_ok() && pinned.open().is_ok());
        let error = absent.open().unwrap_err();
        assert!(error.contains("cannot read /no/such/authority"), "{error}");
    }

    #[test]
    fn mistakes_say_what_to_write() {
        for (url, part) in [
            ("10.0.0.7:1?ca=/a", "write tls://"),
            ("//a:1", "whom to trust"),
            ("//a:1?cert=/a&key=/b", "whom to trust"),
            ("//a:1?ca=/a&cert=/b", "belong together"),
            ("//a:1?ca=/a&ca=/b", "ca= is given twice"),
            ("//a:1?ca", "write tls://"),
            ("//a:1?ca=", "write tls://"),
            ("//a:1?authority=/a", "no option \"authority\""),
            ("//a:1?pin=12", "64 hexadecimal digits"),
        ] {
            let error = TlsUrl::parse(url).unwrap_err();
            assert!(error.contains(part), "{url}: {error}");
        }
    }
}
