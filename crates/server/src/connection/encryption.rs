//! Beginning of an encrypted connection: the handshake, before the client is read.

use super::{ClientConnection, CloseReason};
use farfield_core::wire::RefuseCode;
use farfield_tls::{AcceptError, Accepted, ArrivalHandshake, EncryptionError};
use std::os::fd::AsRawFd;
use std::time::Instant;

impl ClientConnection<'_> {
    /// Gives the connection keys. Blocks until `until` at most: the handshake is part of the time in which a
    /// client must authenticate. Its computations have the permits of newcomers.
    pub(super) fn encrypt(&mut self, until: Instant) -> Result<(), CloseReason> {
        let shared = self.shared;
        let Some(acceptor) = &shared.tls else { return Err(self.refuse(RefuseCode::Malformed, "no certificates")) };
        let mut handshake = ArrivalHandshake::default();
        loop {
            self.turn.begin();
            let step = handshake.advance(acceptor, self.fd.as_raw_fd());
            self.turn.end();
            match step {
                Ok(Some(Accepted { stream, names, session })) => {
                    self.records = Some(Box::new(stream));
                    self.names = names;
                    self.tls_session = session;
                    return Ok(());
                }
                Ok(None) => {
                    if !self.wait(handshake.events(), until)? {
                        return Err(CloseReason::Silent);
                    }
                }
                Err(AcceptError::Plain) => {
                    let text =
                        "this port speaks TLS: write tls://HOST:PORT?ca=FILE&cert=FILE&key=FILE instead of tcp://";
                    return Err(self.refuse(RefuseCode::Malformed, text));
                }
                Err(AcceptError::Handshake(EncryptionError::HungUp)) => return Err(CloseReason::Closed),
                Err(AcceptError::Handshake(EncryptionError::Os(errno))) => return Err(super::link::lost(errno)),
                Err(error) => return Err(CloseReason::Handshake(error)),
            }
        }
    }
}
