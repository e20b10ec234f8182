//! The forty bytes in front of every message.

use super::bytes::Fields;
use super::{BODY_BYTES_LIMIT, WireError};

/// Length of an encoded [`MessageHeader`] in bytes.
pub const HEADER_BYTES: usize = 40;

/// Kind of a message. An answer has the kind of its request with the top bit set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // Each is described where its message is.
pub enum MessageKind {
    Hello = 0x01,
    CreateRegion = 0x02,
    DropRegion = 0x03,
    Read = 0x04,
    Write = 0x05,
    Discard = 0x06,
    CloneRegion = 0x07,
    ClaimRegion = 0x08,
    Stat = 0x09,
    Ping = 0x0a,
    MapRegion = 0x0b,
    Reserve = 0x0c,
    Release = 0x0d,
    Bye = 0x0e,
    ReadPart = 0x0f,
    Station = 0x10,
    Expose = 0x11,
    Call = 0x12,
}

impl MessageKind {
    /// Top bit of the kind byte: set in answers.
    pub const ANSWER: u8 = 0x80;
    /// Kind byte of the answer to a request that failed.
    pub const ERROR: u8 = 0xff;
    /// Kind byte of the answer that refuses a [`super::Hello`].
    pub const REFUSAL: u8 = 0xfe;

    /// All kinds.
    pub const ALL: [MessageKind; 18] = [
        MessageKind::Hello,
        MessageKind::CreateRegion,
        MessageKind::DropRegion,
        MessageKind::Read,
        MessageKind::Write,
        MessageKind::Discard,
        MessageKind::CloneRegion,
        MessageKind::ClaimRegion,
        MessageKind::Stat,
        MessageKind::Ping,
        MessageKind::MapRegion,
        MessageKind::Reserve,
        MessageKind::Release,
        MessageKind::Bye,
        MessageKind::ReadPart,
        MessageKind::Station,
        MessageKind::Expose,
        MessageKind::Call,
    ];

    /// Returns the kind of a request byte; `None` if there is no such kind.
    pub fn of_request(byte: u8) -> Option<MessageKind> {
        // The kinds are dense and start at 1.
        Self::ALL.get(usize::from(byte).checked_sub(1)?).copied()
    }

    /// Returns the kind of the request that an answer byte belongs to.
    pub fn of_answer(byte: u8) -> Option<MessageKind> {
        if byte & Self::ANSWER == 0 {
            return None;
        }
        Self::of_request(byte & !Self::ANSWER)
    }

    /// Returns the kind byte of the answer.
    pub fn answer(self) -> u8 {
        self as u8 | Self::ANSWER
    }
}

/// Bits of [`MessageHeader::flags`].
pub mod flags {
    /// Background: nobody waits for this request, so all others are served first.
    pub const BACKGROUND: u8 = 1;
    /// Stopping, in answers: the server is about to stop, and waits only until its regions are
    /// gone.
    pub const STOPPING: u8 = 2;
    /// Every bit that has a meaning; the reader ignores the others, the writer makes them zero.
    pub const KNOWN: u8 = BACKGROUND | STOPPING;
}

/// The forty bytes in front of every message. Fields that a message does not use are zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MessageHeader {
    /// Number of bytes that follow the header.
    pub body: u32,
    /// Kind: [`MessageKind`] of the request, of the answer, or one of the two failures.
    pub kind: u8,
    /// Bits of [`flags`].
    pub flags: u8,
    /// Error code of a failure.
    pub code: u16,
    /// Tag: chosen by the client, repeated in the answer.
    pub tag: u64,
    /// Microseconds from arrival after which the client no longer wants the answer; 0: no limit.
    pub deadline_us: u32,
    /// Number of pages, or of whatever the message counts.
    pub count: u32,
    /// Region that the request is about.
    pub region: u64,
    /// First page of the run, or number of pages of a region.
    pub page: u64,
}

impl MessageHeader {
    /// Encodes the header as forty bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        // Constant ranges of an array of forty bytes: the compiler checks them.
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&self.body.to_le_bytes());
        bytes[4] = self.kind;
        bytes[5] = self.flags;
        bytes[6..8].copy_from_slice(&self.code.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.deadline_us.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.count.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.region.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.page.to_le_bytes());
        bytes
    }

    /// Decodes a header from the front of `bytes`; `None` if there are fewer than [`HEADER_BYTES`].
    /// Errs if the body is longer than any that the protocol has, before a receiver waits for it.
    pub fn decode(bytes: &[u8]) -> Result<Option<MessageHeader>, WireError> {
        let mut fields = Fields(bytes);
        let Some(header) = Self::fields(&mut fields) else { return Ok(None) };
        if header.body as usize > BODY_BYTES_LIMIT {
            return Err(WireError::Length { kind: header.kind, body: header.body });
        }
        Ok(Some(header))
    }

    fn fields(fields: &mut Fields<'_>) -> Option<MessageHeader> {
        Some(MessageHeader {
            body: fields.u32()?,
            kind: fields.u8()?,
            flags: fields.u8()?,
            code: fields.u16()?,
            tag: fields.u64()?,
            deadline_us: fields.u32()?,
            count: fields.u32()?,
            region: fields.u64()?,
            page: fields.u64()?,
        })
    }

    /// Returns the length of the whole frame in bytes.
    pub fn frame_bytes(&self) -> usize {
        HEADER_BYTES + self.body as usize
    }

    /// Errs unless the body has `bytes` bytes: then the message is malformed.
    pub(super) fn expect_body(&self, bytes: usize) -> Result<(), WireError> {
        if self.body as usize == bytes { Ok(()) } else { Err(self.length_error()) }
    }

    pub(super) fn length_error(&self) -> WireError {
        WireError::Length { kind: self.kind, body: self.body }
    }
}
