//! Server's side: who arrives, and with which keys.

use crate::client::{PROTOCOL, is_tls, pair_error, provider};
use crate::keys::{EXPORTER_LABEL, EncryptionSecret, NONCE_BYTES, SECRET_BYTES, SESSION_ID_BYTES};
use crate::lane::{LaneHello, MAGIC, REPLY_BYTES, REQUEST_BYTES, encode_reply};
use crate::socket::{Socket, errno_of};
use crate::{CertificateFileError, EncryptionError, RecordStream, pem};
use farfield_os::{Errno, serving};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ServerConfig, ServerConnection};
use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Length of what a server sends inside TLS when it has accepted a client: the name of the session.
pub(crate) const WELCOME_BYTES: usize = SESSION_ID_BYTES;

/// Files of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerFiles {
    /// Certificate of the server, with those that lead to its authority.
    pub certificate: PathBuf,
    /// Private key of the server.
    pub key: PathBuf,
    /// Certificates of the authorities that sign those of clients; `None` asks clients for no certificate.
    pub client_ca: Option<PathBuf>,
}

/// Names in the certificate of a client (DNS names of the subject), as far as an authority of ours has
/// signed it.
pub type PeerNames = Arc<[String]>;

/// Sessions that lanes can join, and the certificates of a server. The files can be read again while the
/// server runs.
#[derive(Debug)]
pub struct Acceptor {
    files: ServerFiles,
    config: RwLock<Arc<ServerConfig>>,
    sessions: Arc<SessionTable>,
}

type SessionTable = Mutex<HashMap<[u8; SESSION_ID_BYTES], (EncryptionSecret, PeerNames)>>;

fn rows(table: &SessionTable) -> MutexGuard<'_, HashMap<[u8; SESSION_ID_BYTES], (EncryptionSecret, PeerNames)>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Acceptor {
    /// Reads the files.
    pub fn new(files: ServerFiles) -> Result<Acceptor, CertificateFileError> {
        let config = RwLock::new(server_config(&files)?);
        Ok(Acceptor { files, config, sessions: Arc::default() })
    }

    /// Reads the files again. Sessions go on; handshakes that begin now use what the files say now. If they
    /// cannot be used, everything stays as it is.
    pub fn reload(&self) -> Result<(), CertificateFileError> {
        let config = server_config(&self.files)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    /// Checks whether clients must have a certificate.
    pub fn wants_certificates(&self) -> bool {
        self.files.client_ca.is_some()
    }

    fn config(&self) -> Arc<ServerConfig> {
        self.config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn server_config(files: &ServerFiles) -> Result<Arc<ServerConfig>, CertificateFileError> {
    let provider = provider();
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap_or_else(|_| unreachable!("ring has suites for TLS 1.3"));
    let builder = match &files.client_ca {
        Some(path) => {
            let roots = Arc::new(pem::authorities(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
            let why = |error: rustls::server::VerifierBuilderError| error.to_string();
            let verifier =
                verifier.map_err(|error| CertificateFileError::Authority { path: path.clone(), why: why(error) })?;
            builder.with_client_cert_verifier(verifier)
        }
        None => builder.with_no_client_auth(),
    };
    let (certificate, key): (&Path, &Path) = (&files.certificate, &files.key);
    let mut config = builder
        .with_single_cert(pem::certificates(certificate)?, pem::private_key(key)?)
        .map_err(|error| pair_error(certificate, key, &error))?;
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    // Nothing may follow the handshake but what this crate sends; and lanes need no resumption.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// Entry of a session in the table, removed when its control connection ends.
pub struct SessionEntry {
    sessions: Arc<SessionTable>,
    id: [u8; SESSION_ID_BYTES],
}

impl core::fmt::Debug for SessionEntry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("SessionEntry")
    }
}

impl Drop for SessionEntry {
    fn drop(&mut self) {
        rows(&self.sessions).remove(&self.id);
    }
}

/// A connection that has keys.
#[derive(Debug)]
pub struct Accepted {
    /// Stream of the connection. Its buffers are small until it [grows](RecordStream::grow).
    pub stream: RecordStream,
    /// Names in the client's certificate.
    pub names: PeerNames,
    /// Lanes can join as long as this lives. `None` for a lane.
    pub session: Option<SessionEntry>,
}

/// Reason why a server does not accept a connection.
#[derive(Debug)]
pub enum AcceptError {
    /// The client does not speak TLS.
    Plain,
    /// The handshake failed.
    Handshake(EncryptionError),
}

impl core::fmt::Display for AcceptError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            AcceptError::Plain => f.write_str("the client does not speak TLS"),
            AcceptError::Handshake(EncryptionError::Tls(error)) => write!(f, "the handshake failed: {error}"),
            AcceptError::Handshake(EncryptionError::HungUp) => f.write_str("the client hung up in the handshake"),
            AcceptError::Handshake(EncryptionError::SessionUnknown) => f.write_str("a lane of no known session"),
            AcceptError::Handshake(error) => write!(f, "the handshake failed: {error:?}"),
        }
    }
}

impl From<EncryptionError> for AcceptError {
    fn from(error: EncryptionError) -> Self {
        AcceptError::Handshake(error)
    }
}

/// Server's side of the beginning of a connection: a state machine whose steps never wait.
pub struct ArrivalHandshake {
    stage: Stage,
}

impl core::fmt::Debug for ArrivalHandshake {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ArrivalHandshake")
    }
}

enum Stage {
    /// The first message is not complete, or not known yet.
    Arriving {
        first: [u8; REQUEST_BYTES],
        received: usize,
    },
    /// The control connection of a session.
    Session(Box<ServerConnection>),
    /// The answer to the client is being sent.
    Answering {
        accepted: Option<Box<Accepted>>,
        reply: [u8; REPLY_BYTES],
        sent: usize,
    },
    Welcoming {
        tls: Box<ServerConnection>,
        accepted: Option<Box<Accepted>>,
    },
}

impl Default for ArrivalHandshake {
    fn default() -> Self {
        ArrivalHandshake { stage: Stage::Arriving { first: [0; REQUEST_BYTES], received: 0 } }
    }
}

impl ArrivalHandshake {
    /// Returns the poll events to wait for.
    pub fn events(&self) -> i16 {
        match &self.stage {
            Stage::Arriving { .. } => libc::POLLIN,
            Stage::Session(tls) if !tls.wants_write() => libc::POLLIN,
            _ => libc::POLLOUT,
        }
    }

    /// Sends and receives what can be moved now. Returns the connection once it has keys.
    pub fn advance(&mut self, acceptor: &Acceptor, fd: i32) -> Result<Option<Accepted>, AcceptError> {
        let mut socket = Socket(fd);
        loop {
            match &mut self.stage {
                Stage::Arriving { first, received } => {
                    // No byte is taken that belongs to TLS's next message: rustls is given all of them.
                    let Some(got) = receive(&socket, &mut first[*received..])? else { return Ok(None) };
                    *received += got;
                    let bytes = &first[..*received];
                    match is_tls(bytes) {
                        None => {}
                        Some(true) => {
                            let tls = ServerConnection::new(acceptor.config()).map_err(EncryptionError::from)?;
                            let mut tls = Box::new(tls);
                            socket.give(bytes, &mut tls)?;
                            self.stage = Stage::Session(tls);
                        }
                        Some(false) if !MAGIC.starts_with(&bytes[..bytes.len().min(MAGIC.len())]) => {
                            return Err(AcceptError::Plain);
                        }
                        Some(false) if *received < REQUEST_BYTES => {}
                        Some(false) => {
                            let request = LaneHello::decode(first).ok_or(AcceptError::Plain)?;
                            self.stage = answer_lane(acceptor, &request)?;
                        }
                    }
                }
                Stage::Session(tls) => {
                    if !socket.send_from(tls)? {
                        return Ok(None);
                    }
                    if !tls.is_handshaking() {
                        self.stage = welcome(acceptor, std::mem::replace(&mut self.stage, Stage::empty()))?;
                        continue;
                    }
                    let mut bytes = [0; 4096];
                    let Some(got) = receive(&socket, &mut bytes)? else { return Ok(None) };
                    socket.give(&bytes[..got], tls)?;
                }
                Stage::Welcoming { tls, accepted } => {
                    if !socket.send_from(tls)? {
                        return Ok(None);
                    }
                    return Ok(accepted.take().map(|accepted| *accepted));
                }
                Stage::Answering { accepted, reply, sent } => {
                    match socket.write(&reply[*sent..]) {
                        Ok(count) => *sent += count,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(EncryptionError::Os(errno_of(&error)).into()),
                    }
                    if *sent == REPLY_BYTES {
                        return match accepted.take() {
                            Some(accepted) => Ok(Some(*accepted)),
                            None => Err(EncryptionError::SessionUnknown.into()),
                        };
                    }
                }
            }
        }
    }
}

impl Stage {
    fn empty() -> Stage {
        Stage::Arriving { first: [0; REQUEST_BYTES], received: 0 }
    }
}

/// Receives what has arrived; `None` if that is nothing.
fn receive(socket: &Socket, into: &mut [u8]) -> Result<Option<usize>, AcceptError> {
    loop {
        match socket.receive(into) {
            Ok(0) => return Err(EncryptionError::HungUp.into()),
            Ok(got) => return Ok(Some(got)),
            Err(Errno(libc::EAGAIN)) => return Ok(None),
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(EncryptionError::Os(errno).into()),
        }
    }
}

/// Enters the session of a finished handshake into the table, and has rustls say its name.
fn welcome(acceptor: &Acceptor, stage: Stage) -> Result<Stage, AcceptError> {
    let Stage::Session(mut tls) = stage else { unreachable!("only a session's handshake ends so") };
    let secret = tls.export_keying_material([0; SECRET_BYTES], EXPORTER_LABEL, None).map_err(EncryptionError::from)?;
    let mut id = [0; SESSION_ID_BYTES];
    serving::fill_random(&mut id).map_err(EncryptionError::Os)?;
    let names: PeerNames = match tls.peer_certificates().and_then(|chain| chain.first()) {
        Some(certificate) => match webpki::EndEntityCert::try_from(certificate) {
            Ok(certificate) => certificate.valid_dns_names().map(str::to_owned).collect(),
            Err(_) => PeerNames::default(),
        },
        None => PeerNames::default(),
    };
    let session = EncryptionSecret { id, secret };
    let mut stream = RecordStream::small();
    stream.set_server_keys(&session.control_keys());
    rows(&acceptor.sessions).insert(id, (session, names.clone()));
    let session = Some(SessionEntry { sessions: acceptor.sessions.clone(), id });
    let accepted = Some(Box::new(Accepted { stream, names, session }));
    tls.writer().write_all(&id).map_err(|error| EncryptionError::Os(errno_of(&error)))?;
    Ok(Stage::Welcoming { tls, accepted })
}

/// Finds the session of a lane, and draws a nonce for the lane's keys.
fn answer_lane(acceptor: &Acceptor, request: &LaneHello) -> Result<Stage, AcceptError> {
    let found = rows(&acceptor.sessions).get(&request.session).cloned();
    let Some((session, names)) = found else {
        return Ok(Stage::Answering { accepted: None, reply: encode_reply(None), sent: 0 });
    };
    let mut nonce = [0; NONCE_BYTES];
    serving::fill_random(&mut nonce).map_err(EncryptionError::Os)?;
    let mut stream = RecordStream::small();
    stream.set_server_keys(&session.lane_keys(&request.nonce, &nonce));
    let accepted = Some(Box::new(Accepted { stream, names, session: None }));
    Ok(Stage::Answering { accepted, reply: encode_reply(Some(&nonce)), sent: 0 })
}
