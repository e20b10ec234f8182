//! Client's side of the handshake of a session, by rustls. Runs where memory may be allocated.

use crate::keys::{EXPORTER_LABEL, EncryptionSecret, SECRET_BYTES};
use crate::server::WELCOME_BYTES;
use crate::socket::Socket;
use crate::{CertificateFileError, ConnectionKeys, EncryptionError, pem};
use farfield_os::Errno;
use ring::digest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, OtherError, SignatureScheme};
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

/// Name of the protocol inside TLS (ALPN, RFC 7301).
pub(crate) const PROTOCOL: &[u8] = b"farfield/1";

/// SHA-256 of a public key, as its certificate has it (SubjectPublicKeyInfo).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyPin([u8; 32]);

impl KeyPin {
    /// Returns the pin of the first certificate in a file.
    pub fn of_file(path: &std::path::Path) -> Result<KeyPin, CertificateFileError> {
        let certificates = pem::certificates(path)?;
        let pin = certificates.first().and_then(KeyPin::of);
        pin.ok_or(CertificateFileError::NoCertificate { path: path.to_owned() })
    }

    fn of(certificate: &CertificateDer<'_>) -> Option<KeyPin> {
        let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
        let key = certificate.subject_public_key_info();
        digest::digest(&digest::SHA256, &key).as_ref().try_into().ok().map(KeyPin)
    }
}

/// Reads 64 hexadecimal digits.
impl std::str::FromStr for KeyPin {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<KeyPin, &'static str> {
        let why = "a pin is the SHA-256 of a public key, in 64 hexadecimal digits: farfield cert pin FILE prints it";
        let text = text.as_bytes();
        let mut pin = [0; 32];
        if text.len() != 64 {
            return Err(why);
        }
        for (byte, digits) in pin.iter_mut().zip(text.as_chunks::<2>().0) {
            let digit = |digit: u8| char::from(digit).to_digit(16).ok_or(why);
            *byte = (digit(digits[0])? << 4 | digit(digits[1])?) as u8;
        }
        Ok(KeyPin(pin))
    }
}

impl core::fmt::Display for KeyPin {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl core::fmt::Debug for KeyPin {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "KeyPin({self})")
    }
}

/// Files and names by which a client and a server know each other.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ClientFiles {
    /// Certificates of the authorities that may sign the server's certificate.
    pub ca: Option<PathBuf>,
    /// The server's public key. Without `ca` it alone is compared, and neither name nor date.
    pub pin: Option<KeyPin>,
    /// Certificate of this client, with those that lead to its authority.
    pub certificate: Option<PathBuf>,
    /// Private key of this client.
    pub key: Option<PathBuf>,
}

/// Everything that a client needs to begin sessions at a server.
#[derive(Clone, Debug)]
pub struct Connector {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Connector {
    /// Reads the files. `name` is the name, or the numeric address, that the server's certificate must have.
    pub fn new(name: &str, files: &ClientFiles) -> Result<Connector, CertificateFileError> {
        ConnectorTemplate::new().connector(name, files)
    }
}

/// Settings of rustls without any file, from which connectors are made.
///
/// To make a template takes thread-local storage: rustls makes a cache of sessions with a hash map, which is thrown
/// away at once. To make a connector of it takes none, so that handlers inside programs can do so.
#[derive(Clone, Debug)]
pub struct ConnectorTemplate(ClientConfig);

impl Default for ConnectorTemplate {
    fn default() -> Self {
        ConnectorTemplate::new()
    }
}

impl ConnectorTemplate {
    /// Creates a template, which trusts no server.
    pub fn new() -> ConnectorTemplate {
        let provider = provider();
        let verifier = ServerVerifier { authority: None, pin: None, provider: provider.clone() };
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap_or_else(|_| unreachable!("ring has suites for TLS 1.3"))
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        config.resumption = Resumption::disabled();
        ConnectorTemplate(config)
    }

    /// Reads the files, as [`Connector::new`] does. Uses no thread-local storage.
    pub fn connector(&self, name: &str, files: &ClientFiles) -> Result<Connector, CertificateFileError> {
        let mut config = self.0.clone();
        let provider = config.crypto_provider().clone();
        let roots = files.ca.as_ref().map(|path| {
            let roots = Arc::new(pem::authorities(path)?);
            let built = WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).build();
            built.map_err(|error| CertificateFileError::Authority { path: path.clone(), why: error.to_string() })
        });
        if let (Some(certificate), Some(key)) = (&files.certificate, &files.key) {
            let pair = CertifiedKey::from_der(pem::certificates(certificate)?, pem::private_key(key)?, &provider);
            let pair = pair.map_err(|error| pair_error(certificate, key, &error))?;
            config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(pair));
        }
        let verifier = ServerVerifier { authority: roots.transpose()?, pin: files.pin, provider };
        config.dangerous().set_certificate_verifier(Arc::new(verifier));
        let name =
            ServerName::try_from(name.to_owned()).map_err(|_| CertificateFileError::Name { name: name.to_owned() })?;
        Ok(Connector { config: Arc::new(config), name })
    }
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

pub(crate) fn pair_error(
    certificate: &std::path::Path,
    key: &std::path::Path,
    error: &rustls::Error,
) -> CertificateFileError {
    let why = match error {
        rustls::Error::InconsistentKeys(_) => "the key is not the one of the certificate".to_owned(),
        error => error.to_string(),
    };
    CertificateFileError::Pair { certificate: certificate.to_owned(), key: key.to_owned(), why }
}

/// Verifier of servers: by an authority, by a pin, or by both.
#[derive(Debug)]
struct ServerVerifier {
    authority: Option<Arc<WebPkiServerVerifier>>,
    pin: Option<KeyPin>,
    provider: Arc<CryptoProvider>,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "its key is {found}, which is not the one in pin=: if the server was given a new key, use this pin; else somebody \
     is between"
)]
struct OtherKey {
    found: KeyPin,
}

#[derive(Debug, thiserror::Error)]
#[error("the URL does not say whom to trust: add ca=FILE or pin=HEX to it")]
struct NobodyTrusted;

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let other = |error: Arc<dyn std::error::Error + Send + Sync>| {
            rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(error)))
        };
        if let Some(pin) = self.pin {
            let found = KeyPin::of(end_entity).ok_or(CertificateError::BadEncoding)?;
            if found != pin {
                return Err(other(Arc::new(OtherKey { found })));
            }
        }
        match &self.authority {
            Some(authority) => authority.verify_server_cert(end_entity, intermediates, name, ocsp, now),
            None if self.pin.is_some() => Ok(ServerCertVerified::assertion()),
            None => Err(other(Arc::new(NobodyTrusted))),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Checks whether these first bytes begin a TLS record; `None` if there are too few.
pub(crate) fn is_tls(bytes: &[u8]) -> Option<bool> {
    let [kind, version, ..] = bytes else { return None };
    // Change of cipher, alert, handshake and data, of any version of TLS.
    Some((20..=23).contains(kind) && *version == 3)
}

/// Client's handshake of a session: a state machine whose steps never wait.
pub struct SessionHandshake {
    tls: ClientConnection,
    /// First bytes of the server, as long as it is not known whether it speaks TLS.
    first: Vec<u8>,
    is_tls: bool,
    welcome: [u8; WELCOME_BYTES],
    received: usize,
}

impl core::fmt::Debug for SessionHandshake {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.tls.fmt(f)
    }
}

impl SessionHandshake {
    /// Begins a session.
    pub fn new(connector: &Connector) -> Result<SessionHandshake, EncryptionError> {
        let tls = ClientConnection::new(connector.config.clone(), connector.name.clone())?;
        Ok(SessionHandshake { tls, first: Vec::new(), is_tls: false, welcome: [0; WELCOME_BYTES], received: 0 })
    }

    /// Returns the poll events to wait for.
    pub fn events(&self) -> i16 {
        if self.tls.wants_write() { libc::POLLOUT } else { libc::POLLIN }
    }

    /// Sends and receives what can be moved now. Returns the secret of the session, and the keys of this
    /// connection, once the server has accepted the client.
    pub fn advance(&mut self, fd: i32) -> Result<Option<(EncryptionSecret, ConnectionKeys)>, EncryptionError> {
        let mut socket = Socket(fd);
        loop {
            if !socket.send_from(&mut self.tls)? {
                return Ok(None);
            }
            match self.tls.reader().read(&mut self.welcome[self.received..]) {
                Ok(got) if got > 0 => self.received += got,
                _ => {}
            }
            if self.received == WELCOME_BYTES {
                return self.finish().map(Some);
            }
            let mut bytes = [0; 4096];
            match socket.receive(&mut bytes) {
                Ok(0) => return Err(EncryptionError::HungUp),
                Ok(got) => self.take(&bytes[..got], &mut socket)?,
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(EncryptionError::Os(errno)),
            }
        }
    }

    /// Gives received bytes to rustls, once it is known that they are TLS.
    fn take(&mut self, bytes: &[u8], socket: &mut Socket) -> Result<(), EncryptionError> {
        let joined;
        let mut bytes = bytes;
        if !self.is_tls {
            self.first.extend_from_slice(bytes);
            match is_tls(&self.first) {
                None => return Ok(()),
                Some(false) => return Err(EncryptionError::Plain(std::mem::take(&mut self.first))),
                Some(true) => self.is_tls = true,
            }
            joined = std::mem::take(&mut self.first);
            bytes = &joined;
        }
        socket.give(bytes, &mut self.tls)
    }

    fn finish(&mut self) -> Result<(EncryptionSecret, ConnectionKeys), EncryptionError> {
        let secret = self.tls.export_keying_material([0; SECRET_BYTES], EXPORTER_LABEL, None)?;
        let session = EncryptionSecret { id: self.welcome, secret };
        let keys = session.control_keys();
        Ok((session, keys))
    }
}
