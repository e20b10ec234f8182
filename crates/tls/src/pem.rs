//! Files of certificates and keys, in PEM.

use crate::CertificateFileError;
use farfield_os::{Errno, file};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::ffi::CString;
use std::path::Path;

/// Greatest length of a file that is read.
const FILE_BYTES_MAX: usize = 1 << 20;

/// Reads a file through the gate, because this also runs inside programs.
fn read(path: &Path) -> Result<Vec<u8>, CertificateFileError> {
    let unreadable = |errno| CertificateFileError::Unreadable { path: path.to_owned(), errno };
    let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| unreadable(Errno(libc::EINVAL)))?;
    let fd = file::open(&name, libc::O_RDONLY).map_err(unreadable)?;
    let mut bytes = vec![0; 16 * 1024];
    let mut len = 0;
    let result = loop {
        match file::read(fd, &mut bytes[len..]) {
            Ok(0) => break Ok(()),
            Ok(got) => len += got,
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => break Err(unreadable(errno)),
        }
        if len == bytes.len() {
            if len >= FILE_BYTES_MAX {
                break Err(unreadable(Errno(libc::EFBIG)));
            }
            bytes.resize(2 * len, 0);
        }
    };
    file::close(fd);
    bytes.truncate(len);
    result.map(|()| bytes)
}

/// Reads the certificates in a file: at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CertificateFileError> {
    let bytes = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(CertificateFileError::NoCertificate { path: path.to_owned() }),
    }
}

/// Reads the private key in a file.
pub(crate) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, CertificateFileError> {
    let bytes = read(path)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|_| CertificateFileError::NoKey { path: path.to_owned() })
}

/// Reads the certificates of authorities.
pub(crate) fn authorities(path: &Path) -> Result<RootCertStore, CertificateFileError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|_| CertificateFileError::NoCertificate { path: path.to_owned() })?;
    }
    Ok(roots)
}
