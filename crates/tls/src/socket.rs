//! Socket under a handshake of rustls.

use crate::EncryptionError;
use farfield_os::{Errno, net};
use rustls::{ConnectionCommon, SideData};
use std::io;

/// Socket, as rustls uses one.
pub(crate) struct Socket(pub(crate) i32);

fn io_error(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

impl io::Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: the bytes are readable.
        unsafe { net::send(self.0, &[part]) }.map_err(io_error)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    /// Sends what rustls has to send. Returns false if the kernel does not take all of it now.
    pub(crate) fn send_from<T>(&mut self, tls: &mut ConnectionCommon<T>) -> Result<bool, EncryptionError> {
        while tls.wants_write() {
            match tls.write_tls(self) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(EncryptionError::Os(errno_of(&error))),
            }
        }
        Ok(true)
    }

    /// Gives received bytes to rustls. If it does not accept them, the peer is told why, as far as the kernel takes
    /// that now.
    pub(crate) fn give<T: SideData>(
        &mut self,
        mut bytes: &[u8],
        tls: &mut ConnectionCommon<T>,
    ) -> Result<(), EncryptionError> {
        while !bytes.is_empty() {
            if tls.read_tls(&mut bytes).is_err() {
                return Err(EncryptionError::HungUp);
            }
            if let Err(error) = tls.process_new_packets() {
                let _ = self.send_from(tls);
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Receives what has arrived, as far as there is room.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: the bytes are writable, and borrowed alone.
        unsafe { net::receive(self.0, &[part]) }
    }
}

/// Returns the kernel's error number.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}
