//! Certificates of a server, and the authorities that a client believes.

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, crypto};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

/// Reason why a file of certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsFileError {
    /// The file cannot be read, or has nothing of what is needed.
    #[error("{}: {why}", path.display())]
    File {
        /// File.
        path: PathBuf,
        /// Reason.
        why: String,
    },
    /// Certificate and key do not belong together, or are of a kind that is not known.
    #[error("{} and {}: {error}", certificate.display(), key.display())]
    Pair {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// Answer of rustls.
        error: rustls::Error,
    },
}

/// Certificate and private key of a server.
#[derive(Debug)]
pub struct TlsIdentity {
    certificate: PathBuf,
    key: PathBuf,
    loaded: RwLock<LoadedIdentity>,
}

/// Contents of the two files, and when these were written.
#[derive(Debug)]
struct LoadedIdentity {
    config: Arc<ServerConfig>,
    written: [Option<SystemTime>; 2],
}

impl TlsIdentity {
    /// Reads two PEM files: the certificate, with those that lead to its authority, and the key.
    pub fn read(certificate: &Path, key: &Path) -> Result<TlsIdentity, TlsFileError> {
        let loaded = RwLock::new(LoadedIdentity::read(certificate, key)?);
        Ok(TlsIdentity { certificate: certificate.to_owned(), key: key.to_owned(), loaded })
    }

    /// Reads the files again, for connections that come from now on. If they cannot be used, nothing changes.
    pub fn reload(&self) -> Result<(), TlsFileError> {
        let loaded = LoadedIdentity::read(&self.certificate, &self.key)?;
        *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded;
        Ok(())
    }

    /// Checks whether one of the files was written since they were read.
    pub fn is_outdated(&self) -> bool {
        let written = written_at(&self.certificate, &self.key);
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).written != written
    }

    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).config.clone()
    }
}

impl LoadedIdentity {
    fn read(certificate: &Path, key: &Path) -> Result<LoadedIdentity, TlsFileError> {
        // Files that are written meanwhile are outdated.
        let written = written_at(certificate, key);
        Ok(LoadedIdentity { config: server_config(certificate, key)?, written })
    }
}

fn written_at(certificate: &Path, key: &Path) -> [Option<SystemTime>; 2] {
    [certificate, key].map(|file| file.metadata().and_then(|file| file.modified()).ok())
}

fn server_config(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsFileError> {
    let chain = certificates(certificate)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| file_error(key, error))?;
    let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap_or_else(|_| unreachable!("ring has suites for TLS 1.3"))
        .with_no_client_auth()
        .with_single_cert(chain, private);
    let pair = |error| TlsFileError::Pair { certificate: certificate.into(), key: key.into(), error };
    Ok(Arc::new(config.map_err(pair)?))
}

/// Reads the certificates of a PEM file, of which there is at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let read = CertificateDer::pem_file_iter(path).map_err(|error| file_error(path, error))?;
    let all: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| file_error(path, error))?;
    if all.is_empty() { Err(file_error(path, "there is no certificate in it")) } else { Ok(all) }
}

fn file_error(path: &Path, why: impl std::fmt::Display) -> TlsFileError {
    TlsFileError::File { path: path.to_owned(), why: why.to_string() }
}
