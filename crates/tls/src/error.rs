//! Errors, with what to do about each.

use farfield_os::Errno;
use rustls::{AlertDescription, CertificateError, Error};
use std::path::PathBuf;

/// Reason why files of certificates and keys cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CertificateFileError {
    /// The file cannot be read.
    #[error("cannot read {}: {errno}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the kernel.
        errno: Errno,
    },
    /// The file has no certificate in it.
    #[error("there is no certificate in {}: give a file in PEM, as `farfield cert` makes it", path.display())]
    NoCertificate {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file has no private key in it.
    #[error("there is no private key in {}: give a file in PEM, as `farfield cert` makes it", path.display())]
    NoKey {
        /// Path of the file.
        path: PathBuf,
    },
    /// Certificate and key do not belong together, or are of a kind that is not known.
    #[error("{} and {} cannot be used together: {why}", certificate.display(), key.display())]
    Pair {
        /// Path of the certificate.
        certificate: PathBuf,
        /// Path of the key.
        key: PathBuf,
        /// Reason, as text.
        why: String,
    },
    /// Certificates of an authority cannot be used.
    #[error("{} cannot be used as an authority: {why}", path.display())]
    Authority {
        /// Path of the file.
        path: PathBuf,
        /// Reason, as text.
        why: String,
    },
    /// The name of the server is none that a certificate can have.
    #[error("{name:?} is no name that a certificate can have")]
    Name {
        /// The name.
        name: String,
    },
}

/// Reason why a connection could not be encrypted.
#[derive(Clone, PartialEq, Debug)]
pub enum EncryptionError {
    /// The peer does not speak TLS.
    NoTls,
    /// The peer does not speak TLS, and sent these bytes, or more.
    Plain(Vec<u8>),
    /// The peer closed the connection.
    HungUp,
    /// The server does not know the session that a lane wants to join.
    SessionUnknown,
    /// The kernel returned an error.
    Os(Errno),
    /// The handshake failed.
    Tls(Error),
}

impl From<Error> for EncryptionError {
    fn from(error: Error) -> Self {
        EncryptionError::Tls(error)
    }
}

/// Tells a client why its handshake failed, and what to do.
impl core::fmt::Display for EncryptionError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let error = match self {
            EncryptionError::NoTls | EncryptionError::Plain(_) => {
                return f
                    .write_str("it does not speak TLS: write tcp:// instead of tls://, or have it listen at tls://");
            }
            EncryptionError::HungUp => return f.write_str("it closed the connection during the handshake"),
            EncryptionError::SessionUnknown => return f.write_str("it does not know the session any more"),
            EncryptionError::Os(errno) => return write!(f, "{errno}"),
            EncryptionError::Tls(error) => error,
        };
        match error {
            Error::InvalidCertificate(error) => match error {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => f.write_str(
                    "its certificate is not of the authority in ca=: give the file of the authority that signed it, or \
                     pin= with the server's key",
                ),
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => f.write_str(
                    "its certificate has expired: make a new one there (farfield cert server), and send SIGHUP to the \
                     server",
                ),
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    f.write_str("its certificate is not valid yet: compare the clocks of both machines")
                }
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => write!(
                    f,
                    "its certificate is not for this name ({error}): use a name that is in it, or make one with this \
                     name (farfield cert server)"
                ),
                CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                    f.write_str("its certificate is not one of a server: make one with farfield cert server")
                }
                CertificateError::Other(other) => write!(f, "{other}"),
                error => write!(f, "its certificate is not valid: {error}"),
            },
            Error::AlertReceived(alert) => match alert {
                AlertDescription::CertificateRequired => f.write_str(
                    "it wants a certificate of the client: add cert=FILE&key=FILE to the URL (farfield cert client \
                     makes them)",
                ),
                AlertDescription::UnknownCA | AlertDescription::DecryptError => f.write_str(
                    "it does not know the authority of this client's certificate: use one that is signed by its \
                     --tls-client-ca",
                ),
                AlertDescription::CertificateExpired => {
                    f.write_str("this client's certificate has expired: make a new one (farfield cert client)")
                }
                AlertDescription::NoApplicationProtocol => {
                    f.write_str("it speaks TLS, but is not a Farfield memory server: check host and port")
                }
                AlertDescription::BadCertificate | AlertDescription::UnsupportedCertificate => f.write_str(
                    "it refuses this client's certificate: use one of a client (farfield cert client), and compare the \
                     clocks of both machines",
                ),
                alert => write!(f, "it ended the handshake with the alert {alert:?}"),
            },
            error => write!(f, "the handshake failed: {error}"),
        }
    }
}
