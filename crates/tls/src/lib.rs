//! Encryption between clients and memory servers.
//!
//! A session begins with one TLS 1.3 handshake (RFC 8446), by rustls, on its control connection.
//! Both sides export a secret from it. Every connection of the session, the control connection too,
//! then carries [records](RecordStream) that are sealed with keys of its own. A lane gets its keys
//! from that secret and a fresh nonce of each side ([`LaneHandshake`]), so it runs no public-key
//! cryptography. Opening a lane and moving bytes allocate nothing, take no lock and use no
//! thread-local storage: lanes run inside signal handlers.
//!
//! `docs/design/tls.md` has the format, and decision 40 the reasons.

#[cfg(feature = "authority")]
pub mod authority;
mod client;
mod error;
mod keys;
mod lane;
mod pem;
mod record;
mod server;
mod socket;

pub use client::{ClientFiles, Connector, ConnectorTemplate, KeyPin, SessionHandshake};
pub use error::{CertificateFileError, EncryptionError};
pub use keys::{ConnectionKeys, EncryptionSecret};
pub use lane::LaneHandshake;
#[cfg(any(test, feature = "conformance"))]
pub use record::check_stream;
pub use record::{RECORD_BYTES_MAX, RecordStream};
pub use server::{AcceptError, Accepted, Acceptor, ArrivalHandshake, PeerNames, ServerFiles, SessionEntry};
