//! Handshake of a connection: the client introduces itself, the server accepts it or says why not.

use super::bytes::{Fields, length, short_length};
use super::{MAGIC, MessageHeader, MessageKind, WireError};
use crate::Incarnation;
use alloc::vec::Vec;

/// Bits of the feature words. A feature is in force when both sides offered it.
pub mod features {
    /// Mapping of the server's regions (`MapRegion`, `Reserve`, `Release`): Unix sockets only.
    pub const MAP: u64 = 1;
    /// Copy-on-write snapshots (`CloneRegion`, `ClaimRegion`).
    pub const CLONE: u64 = 2;
    /// Reads of pages over a fabric (`Station`, `Expose`).
    pub const FABRIC: u64 = 8;
    /// Calls of functions that the server has by name (`Call`).
    pub const CALL: u64 = 16;
    /// Reads of parts of pages (`ReadPart`), whose answer says which version of the page it is of.
    /// Bit 2 (the number 4) was a `ReadPart` that did not say it. A peer that knows only that one
    /// reads whole pages.
    pub const PART: u64 = 32;
}

/// Secret that names a session. A client that knows it may join, so it is random and never shown.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionSecret(pub u128);

impl core::fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("SessionSecret(hidden)")
    }
}

/// First message on a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hello<'a> {
    /// Oldest version that the client speaks.
    pub version_min: u16,
    /// Newest version that the client speaks.
    pub version_max: u16,
    /// Bits of [`features`] that the client can use.
    pub features: u64,
    /// Session to join; `None` starts a new one.
    pub session: Option<SessionSecret>,
    /// Proof that the client may use the server.
    pub token: &'a [u8],
    /// Name of the client, for logs and `farfield top`.
    pub client_name: &'a str,
}

impl core::fmt::Debug for Hello<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // The token is a secret: it must not reach a log by way of `{:?}`.
        write!(f, "Hello {{ {:?}, versions {}..={}", self.client_name, self.version_min, self.version_max)?;
        write!(f, ", features {:#x}, session {:?} }}", self.features, self.session)
    }
}

impl<'a> Hello<'a> {
    /// Greatest length of a token in bytes.
    pub const TOKEN_BYTES_MAX: usize = 256;
    /// Greatest length of a client name in bytes.
    pub const NAME_BYTES_MAX: usize = 128;
    /// Greatest length of the body that a server accepts, in bytes; leaves room for fields of later
    /// versions.
    pub const BODY_BYTES_MAX: usize = 1024;

    /// Appends the frame. Token and name must not be longer than their limits.
    pub fn encode(&self, out: &mut Vec<u8>) {
        assert!(self.token.len() <= Self::TOKEN_BYTES_MAX && self.client_name.len() <= Self::NAME_BYTES_MAX);
        let body = 40 + self.token.len() + self.client_name.len();
        let header = MessageHeader { body: length(body), kind: MessageKind::Hello as u8, ..MessageHeader::default() };
        out.extend_from_slice(&header.encode());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version_min.to_le_bytes());
        out.extend_from_slice(&self.version_max.to_le_bytes());
        out.extend_from_slice(&short_length(self.token.len()).to_le_bytes());
        out.extend_from_slice(&short_length(self.client_name.len()).to_le_bytes());
        out.extend_from_slice(&self.features.to_le_bytes());
        out.extend_from_slice(&self.session.map_or(0, |secret| secret.0).to_le_bytes());
        out.extend_from_slice(self.token);
        out.extend_from_slice(self.client_name.as_bytes());
    }

    /// Decodes the message. Bytes after the known fields belong to a later version and are ignored.
    pub fn decode(header: &MessageHeader, body: &'a [u8]) -> Result<Hello<'a>, WireError> {
        if header.kind != MessageKind::Hello as u8 {
            return Err(WireError::Kind(header.kind));
        }
        let mut fields = Fields(body.strip_prefix(&MAGIC).ok_or(WireError::Magic)?);
        let hello = Self::fields(&mut fields).ok_or(header.length_error())??;
        if hello.version_min > hello.version_max {
            return Err(WireError::Field("version"));
        }
        Ok(hello)
    }

    fn fields(fields: &mut Fields<'a>) -> Option<Result<Hello<'a>, WireError>> {
        let (version_min, version_max) = (fields.u16()?, fields.u16()?);
        let (token_bytes, name_bytes) = (usize::from(fields.u16()?), usize::from(fields.u16()?));
        if token_bytes > Self::TOKEN_BYTES_MAX || name_bytes > Self::NAME_BYTES_MAX {
            return Some(Err(WireError::Field("token or name")));
        }
        let features = fields.u64()?;
        let session = fields.u128()?;
        let session = (session != 0).then_some(SessionSecret(session));
        let token = fields.bytes(token_bytes)?;
        let Ok(client_name) = core::str::from_utf8(fields.bytes(name_bytes)?) else {
            return Some(Err(WireError::Field("name")));
        };
        Some(Ok(Hello { version_min, version_max, features, session, token, client_name }))
    }

    /// Returns the version to speak: the newest that both sides know; `None` if there is none.
    pub fn common_version(&self, ours_min: u16, ours_max: u16) -> Option<u16> {
        let version = self.version_max.min(ours_max);
        (version >= self.version_min && version >= ours_min).then_some(version)
    }
}

/// Answer of the server when it accepts the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// Version that both sides speak from now on.
    pub version: u16,
    /// Lease: time in milliseconds that the session outlives its last connection.
    pub lease_ms: u32,
    /// Bits of [`features`] in force.
    pub features: u64,
    /// Incarnation of the server: a number that it draws at each start.
    pub incarnation: Incarnation,
    /// Secret with which further connections join the session.
    pub session: SessionSecret,
    /// Greatest number of pages in one read or write.
    pub batch_pages_max: u32,
    /// Greatest number of requests of one connection that may wait for their answer.
    pub in_flight_max: u32,
}

impl Welcome {
    const BODY_BYTES: usize = 48;

    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let header = MessageHeader {
            body: length(Self::BODY_BYTES),
            kind: MessageKind::Hello.answer(),
            ..MessageHeader::default()
        };
        out.extend_from_slice(&header.encode());
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.lease_ms.to_le_bytes());
        out.extend_from_slice(&self.features.to_le_bytes());
        out.extend_from_slice(&self.incarnation.0.to_le_bytes());
        out.extend_from_slice(&self.session.0.to_le_bytes());
        out.extend_from_slice(&self.batch_pages_max.to_le_bytes());
        out.extend_from_slice(&self.in_flight_max.to_le_bytes());
    }

    /// Decodes the message or the refusal. Bytes after the known fields are ignored.
    pub fn decode<'a>(
        header: &MessageHeader,
        body: &'a [u8],
    ) -> Result<Result<Welcome, ConnectionRefusal<'a>>, WireError> {
        if header.kind == MessageKind::REFUSAL {
            return Ok(Err(ConnectionRefusal::decode(header, body)));
        }
        if header.kind != MessageKind::Hello.answer() {
            return Err(WireError::Kind(header.kind));
        }
        let welcome = Self::fields(&mut Fields(body)).ok_or(header.length_error())?;
        if welcome.session.0 == 0 {
            return Err(WireError::Field("session"));
        }
        if welcome.batch_pages_max == 0 || welcome.batch_pages_max > super::BATCH_PAGES_LIMIT {
            return Err(WireError::Field("batch_pages_max"));
        }
        if welcome.in_flight_max == 0 {
            return Err(WireError::Field("in_flight_max"));
        }
        Ok(Ok(welcome))
    }

    fn fields(fields: &mut Fields<'_>) -> Option<Welcome> {
        let version = fields.u16()?;
        fields.u16()?;
        Some(Welcome {
            version,
            lease_ms: fields.u32()?,
            features: fields.u64()?,
            incarnation: Incarnation(fields.u64()?),
            session: SessionSecret(fields.u128()?),
            batch_pages_max: fields.u32()?,
            in_flight_max: fields.u32()?,
        })
    }
}

/// Reason for which a server refuses a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RefuseCode {
    /// The two sides have no version in common.
    Version,
    /// The token is wrong.
    Token,
    /// The session to join does not exist (any more).
    Session,
    /// The server has no room for another connection.
    Connections,
    /// The server cannot decode the message.
    Malformed,
    /// The server is about to stop.
    Stopping,
    /// Too many wrong tokens came from the client's address: it looks at none for some seconds.
    Guesses,
    /// The client gave no token, and no tenant has a name that is in its certificate.
    Tenant,
    /// Reason that belongs to a later version.
    Other(u16),
}

impl RefuseCode {
    /// Returns the number of the code on the wire.
    pub fn number(self) -> u16 {
        match self {
            RefuseCode::Version => 1,
            RefuseCode::Token => 2,
            RefuseCode::Session => 3,
            RefuseCode::Connections => 4,
            RefuseCode::Malformed => 5,
            RefuseCode::Stopping => 6,
            RefuseCode::Guesses => 7,
            RefuseCode::Tenant => 8,
            RefuseCode::Other(number) => number,
        }
    }

    /// Returns the code with this number.
    pub fn from_number(number: u16) -> RefuseCode {
        match number {
            1 => RefuseCode::Version,
            2 => RefuseCode::Token,
            3 => RefuseCode::Session,
            4 => RefuseCode::Connections,
            5 => RefuseCode::Malformed,
            6 => RefuseCode::Stopping,
            7 => RefuseCode::Guesses,
            8 => RefuseCode::Tenant,
            other => RefuseCode::Other(other),
        }
    }
}

/// Answer of the server when it refuses the client and closes the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionRefusal<'a> {
    /// Reason of the refusal.
    pub code: RefuseCode,
    /// Oldest version that the server speaks.
    pub version_min: u16,
    /// Newest version that the server speaks.
    pub version_max: u16,
    /// Reason as a text, for people.
    pub text: &'a str,
}

impl<'a> ConnectionRefusal<'a> {
    /// Greatest length of the text in bytes.
    pub const TEXT_BYTES_MAX: usize = 256;

    fn decode(header: &MessageHeader, body: &'a [u8]) -> ConnectionRefusal<'a> {
        let body = body.get(..Self::TEXT_BYTES_MAX).unwrap_or(body);
        // Cut where the bytes stop being text: a refusal with odd text is still a refusal.
        let text = body.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        // Two versions of sixteen bits each.
        let [_, _, _, _, min_high, min_low, max_high, max_low] = header.page.to_be_bytes();
        ConnectionRefusal {
            code: RefuseCode::from_number(header.code),
            version_min: u16::from_be_bytes([min_high, min_low]),
            version_max: u16::from_be_bytes([max_high, max_low]),
            text,
        }
    }
}

/// Appends the frame of a refusal; a text that is too long is cut.
pub fn encode_refusal(refusal: &ConnectionRefusal<'_>, out: &mut Vec<u8>) {
    let text = refusal.text.get(..refusal.text.floor_char_boundary_at(ConnectionRefusal::TEXT_BYTES_MAX)).unwrap_or("");
    let header = MessageHeader {
        body: length(text.len()),
        kind: MessageKind::REFUSAL,
        code: refusal.code.number(),
        page: u64::from(refusal.version_min) << 16 | u64::from(refusal.version_max),
        ..MessageHeader::default()
    };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(text.as_bytes());
}

trait FloorCharBoundary {
    fn floor_char_boundary_at(&self, limit: usize) -> usize;
}

impl FloorCharBoundary for str {
    /// Returns the largest length up to `limit` that does not cut a character.
    fn floor_char_boundary_at(&self, limit: usize) -> usize {
        let mut end = self.len().min(limit);
        while !self.is_char_boundary(end) {
            end -= 1;
        }
        end
    }
}
