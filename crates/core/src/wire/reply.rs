//! Answers of a server.

use super::bytes::{Fields, length, u64_at};
use super::{BATCH_PAGES_LIMIT, CallBody, ExposeReply, MessageHeader, MessageKind, PagePart, StationReply, WireError};
use crate::RegionId;
use crate::geometry::PAGE_BYTES;
use crate::part_checksum;
use alloc::vec::Vec;

/// Reason for which a request failed. The connection goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorCode {
    /// The session has no such region.
    UnknownRegion,
    /// The pages are not all inside the region.
    OutOfRange,
    /// Capacity of the server or quota of the tenant is used up. Nothing was changed.
    PoolFull,
    /// The deadline passed before the server came to it. Nothing was changed.
    TimedOut,
    /// A page does not match its checksum: as it arrived (write) or as it was kept (read). The
    /// header's `page` names it.
    Corrupt,
    /// The server does not do this, or not on this kind of connection.
    Unsupported,
    /// Too much at once: more pages in one request, or more requests in flight, than the server
    /// said it takes. Used also where a client takes more of something shared than it leaves for
    /// others.
    TooMuch,
    /// The ticket does not exist, was used, or has expired.
    Ticket,
    /// An argument is not valid.
    BadRequest,
    /// Something failed inside the server.
    Internal,
    /// The server has no function of this name.
    NoFunction,
    /// The server has the function in another version, which the header's `page` names.
    OtherVersion,
    /// The function took as many steps as it may and was ended; the header's `page` says how many.
    Overrun,
    /// The function has a bug: it panicked.
    Panicked,
    /// The answer of the function is longer than answers may be.
    AnswerTooLong,
    /// The function waits for something that does not come.
    Stuck,
    /// A word or a lock that a function uses is not aligned to its size. The header's `page` says
    /// the offset.
    Unaligned,
    /// A function changes a word atomically where that is not possible.
    NoAtomics,
    /// There is no lock at the offset that the header's `page` says.
    NoLock,
    /// The lock at the offset that the header's `page` says was not free in time.
    Locked,
    /// The lock at the offset that the header's `page` says was lost before the function wrote the
    /// data that it guards.
    Fenced,
    /// Reason that belongs to a later version.
    Other(u16),
}

impl ErrorCode {
    /// Returns the number of the code on the wire.
    pub fn number(self) -> u16 {
        match self {
            ErrorCode::UnknownRegion => 1,
            ErrorCode::OutOfRange => 2,
            ErrorCode::PoolFull => 3,
            ErrorCode::TimedOut => 4,
            ErrorCode::Corrupt => 5,
            ErrorCode::Unsupported => 6,
            ErrorCode::TooMuch => 7,
            ErrorCode::Ticket => 8,
            ErrorCode::BadRequest => 9,
            ErrorCode::Internal => 10,
            ErrorCode::NoFunction => 11,
            ErrorCode::OtherVersion => 12,
            ErrorCode::Overrun => 13,
            ErrorCode::Panicked => 14,
            ErrorCode::AnswerTooLong => 15,
            ErrorCode::Stuck => 16,
            ErrorCode::Unaligned => 17,
            ErrorCode::NoAtomics => 18,
            ErrorCode::NoLock => 19,
            ErrorCode::Locked => 20,
            ErrorCode::Fenced => 21,
            ErrorCode::Other(number) => number,
        }
    }

    /// Returns the code with this number.
    pub fn from_number(number: u16) -> ErrorCode {
        match number {
            1 => ErrorCode::UnknownRegion,
            2 => ErrorCode::OutOfRange,
            3 => ErrorCode::PoolFull,
            4 => ErrorCode::TimedOut,
            5 => ErrorCode::Corrupt,
            6 => ErrorCode::Unsupported,
            7 => ErrorCode::TooMuch,
            8 => ErrorCode::Ticket,
            9 => ErrorCode::BadRequest,
            10 => ErrorCode::Internal,
            11 => ErrorCode::NoFunction,
            12 => ErrorCode::OtherVersion,
            13 => ErrorCode::Overrun,
            14 => ErrorCode::Panicked,
            15 => ErrorCode::AnswerTooLong,
            16 => ErrorCode::Stuck,
            17 => ErrorCode::Unaligned,
            18 => ErrorCode::NoAtomics,
            19 => ErrorCode::NoLock,
            20 => ErrorCode::Locked,
            21 => ErrorCode::Fenced,
            other => ErrorCode::Other(other),
        }
    }

    /// Returns the reason as a text for people.
    pub fn text(self) -> &'static str {
        match self {
            ErrorCode::UnknownRegion => "no such region in this session",
            ErrorCode::OutOfRange => "pages outside the region",
            ErrorCode::PoolFull => "capacity or quota used up",
            ErrorCode::TimedOut => "the deadline passed before the server served the request",
            ErrorCode::Corrupt => "a page does not match its checksum",
            ErrorCode::Unsupported => "the server does not support the request",
            ErrorCode::TooMuch => "the request is larger than the server takes at once",
            ErrorCode::Ticket => "the ticket is unknown, used or expired",
            ErrorCode::BadRequest => "an argument of the request is invalid",
            ErrorCode::Internal => "the server failed inside: see its log",
            ErrorCode::NoFunction => "the server has no function of this name",
            ErrorCode::OtherVersion => "the server has this function in another version",
            ErrorCode::Overrun => "the function used up its budget of steps",
            ErrorCode::Panicked => "the function panicked",
            ErrorCode::AnswerTooLong => "the answer of the function is too long",
            ErrorCode::Stuck => "the function waits for an event that cannot occur",
            ErrorCode::Unaligned => "a word or a lock is not aligned to its size",
            ErrorCode::NoAtomics => "the server has no atomics for these pages",
            ErrorCode::NoLock => "the bytes are not a lock",
            ErrorCode::Locked => "the lock could not be acquired in time",
            ErrorCode::Fenced => "the lease of the lock has expired, and another task holds it",
            ErrorCode::Other(_) => "for a reason that this release does not know",
        }
    }
}

/// Statistics of a server. All counters since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)] // The names say it.
pub struct Stat {
    pub uptime_ms: u64,
    pub capacity_pages: u64,
    /// Pages that hold bytes.
    pub used_pages: u64,
    /// Pages set aside for clients that write by themselves, and not yet used.
    pub reserved_pages: u64,
    pub regions: u64,
    pub sessions: u64,
    pub connections: u64,
    pub read_pages: u64,
    pub written_pages: u64,
    pub discarded_pages: u64,
    pub received_bytes: u64,
    pub sent_bytes: u64,
    /// Requests answered with an error.
    pub failed_requests: u64,
}

impl Stat {
    const FIELDS: usize = 13;

    fn to_array(self) -> [u64; Self::FIELDS] {
        [
            self.uptime_ms,
            self.capacity_pages,
            self.used_pages,
            self.reserved_pages,
            self.regions,
            self.sessions,
            self.connections,
            self.read_pages,
            self.written_pages,
            self.discarded_pages,
            self.received_bytes,
            self.sent_bytes,
            self.failed_requests,
        ]
    }

    /// Decodes the statistics. Fields that an older server does not send are zero; fields of a
    /// newer one are ignored.
    fn decode(body: &[u8]) -> Stat {
        let field = |index| u64_at(body, index).unwrap_or(0);
        Stat {
            uptime_ms: field(0),
            capacity_pages: field(1),
            used_pages: field(2),
            reserved_pages: field(3),
            regions: field(4),
            sessions: field(5),
            connections: field(6),
            read_pages: field(7),
            written_pages: field(8),
            discarded_pages: field(9),
            received_bytes: field(10),
            sent_bytes: field(11),
            failed_requests: field(12),
        }
    }
}

/// Returns the number of words of the presence map of a read of `count` pages.
pub const fn present_words(count: u32) -> usize {
    (count as usize).div_ceil(64)
}

/// Returns the number of bytes between the header and the first page byte of a read answer. They
/// are the presence map, then a checksum for each present page.
pub const fn read_prefix_bytes(count: u32, present: u32) -> usize {
    (present_words(count) + present as usize) * 8
}

/// Presence map and checksums that precede the page bytes in the answer to a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadReply<'a> {
    count: u32,
    present: u32,
    map: &'a [u8],
    sums: &'a [u8],
}

impl<'a> ReadReply<'a> {
    /// Returns how many bytes of the body must be there before [`ReadReply::decode`] can be called.
    /// Errs unless the answer belongs to a read of `asked` pages.
    pub fn prefix_bytes(header: &MessageHeader, asked: u32) -> Result<usize, WireError> {
        if header.kind != MessageKind::Read.answer() {
            return Err(WireError::Kind(header.kind));
        }
        if header.count != asked || asked == 0 || asked > BATCH_PAGES_LIMIT {
            return Err(WireError::Field("count"));
        }
        // The length of the body says how many pages are present: each adds a checksum and its
        // bytes.
        let map_bytes = present_words(asked) * 8;
        let pages_bytes = (header.body as usize).checked_sub(map_bytes).ok_or(header.length_error())?;
        let present = pages_bytes / (8 + PAGE_BYTES);
        if pages_bytes % (8 + PAGE_BYTES) != 0 || present > asked as usize {
            return Err(header.length_error());
        }
        Ok(map_bytes + present * 8)
    }

    /// Decodes the fields before the page bytes; `prefix` has [`ReadReply::prefix_bytes`] bytes.
    pub fn decode(header: &MessageHeader, asked: u32, prefix: &'a [u8]) -> Result<ReadReply<'a>, WireError> {
        if prefix.len() != Self::prefix_bytes(header, asked)? {
            return Err(header.length_error());
        }
        let (map, sums) = prefix.split_at_checked(present_words(asked) * 8).ok_or(header.length_error())?;
        let present = length(sums.len() / 8);
        let mut ones = 0;
        let mut bits_left = asked;
        for word in map.as_chunks::<8>().0 {
            let word = u64::from_le_bytes(*word);
            let valid = match bits_left {
                bits @ 0..64 => (1 << bits) - 1,
                _ => u64::MAX,
            };
            bits_left = bits_left.saturating_sub(64);
            if word & !valid != 0 {
                return Err(WireError::Field("presence map"));
            }
            ones += word.count_ones();
        }
        if ones != present {
            return Err(WireError::Field("presence map"));
        }
        Ok(ReadReply { count: asked, present, map, sums })
    }

    /// Returns the number of pages that were asked for.
    pub fn count(&self) -> u32 {
        self.count
    }
    /// Returns the number of pages that are present; only their bytes follow, in order.
    pub fn present(&self) -> u32 {
        self.present
    }
    /// Checks whether the `index`-th page is present. If not, it is all zeros.
    pub fn is_present(&self, index: u32) -> bool {
        let word = u64_at(self.map, index as usize / 64).expect("index below count");
        word >> (index % 64) & 1 != 0
    }
    /// Returns the stored checksum of the `nth` present page.
    pub fn sum_of_present(&self, nth: u32) -> u64 {
        u64_at(self.sums, nth as usize).expect("nth below present")
    }
}

/// Memory files that come with the answer to `MapRegion`: page map, checksums, notes, then `layers`
/// from `first_layer` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapReply {
    /// Number of pages of the region.
    pub pages: u64,
    /// Generation of the layers. It changes whenever layers that a client may have mapped are
    /// replaced; those must be mapped again.
    pub generation: u64,
    /// Number of layers of the region; the last is the one that is written.
    pub layers_total: u32,
    /// Index of the first layer that comes with this answer.
    pub first_layer: u32,
    /// Number of layers that come with this answer.
    pub layers: u32,
}

impl MapReply {
    /// Number of files that come before the layers.
    pub const TABLES: u32 = 3;
    /// Greatest number of layers of a region: the page map has one byte per page, and zero means
    /// absent.
    pub const LAYERS_MAX: u32 = 255;
    /// Greatest number of layers in one answer: the kernel passes at most 253 descriptors at once.
    pub const LAYERS_AT_ONCE: u32 = 128;

    fn decode(header: &MessageHeader, body: &[u8]) -> Result<MapReply, WireError> {
        let mut fields = Fields(body);
        let read = |fields: &mut Fields<'_>| {
            Some(MapReply {
                pages: header.page,
                generation: fields.u64()?,
                layers_total: fields.u32()?,
                first_layer: fields.u32()?,
                layers: header.count,
            })
        };
        let map = read(&mut fields).ok_or(header.length_error())?;
        let end = map.first_layer.checked_add(map.layers).ok_or(WireError::Field("layers"))?;
        if map.layers_total == 0
            || map.layers_total > Self::LAYERS_MAX
            || map.layers > Self::LAYERS_AT_ONCE
            || end > map.layers_total
        {
            return Err(WireError::Field("layers"));
        }
        Ok(map)
    }
}

/// The answer to a request, without the page bytes of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Done; there is nothing else to say (drop, write, discard, ping, reserve, release, bye).
    Done,
    /// Answer to a read: [`ReadReply`] decodes the rest.
    Read,
    /// Answer to a read of a part of a page: [`part_reply`] decodes the rest.
    Part,
    /// Answer to `CreateRegion`: the new region.
    Created {
        /// Identifier of the region, valid in this session.
        region: RegionId,
    },
    /// Answer to `CloneRegion`: the right to a snapshot.
    Ticket {
        /// Secret that is valid once, in any session of this server.
        secret: u128,
    },
    /// Answer to `ClaimRegion`: the snapshot is a region of this session now.
    Claimed {
        /// Identifier of the region.
        region: RegionId,
        /// Number of pages that the region can address.
        pages: u64,
    },
    /// Statistics of the server.
    Stat(Stat),
    /// Memory files of a region.
    Map(MapReply),
    /// Address at which memory is read one-sided: [`super::StationReply`] decodes the rest.
    Station,
    /// Windows of a region: [`super::ExposeReply`] decodes the rest.
    Expose,
    /// Answer of a function, which is the whole body.
    Answer {
        /// Number of steps that the function took; 0 if they were not counted.
        steps: u32,
    },
    /// The request failed.
    Failed {
        /// Reason of the failure.
        code: ErrorCode,
        /// Page that the failure is about, where it is about one.
        page: u64,
    },
}

/// An answer with the tag of its request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireReply {
    /// Tag of the request.
    pub tag: u64,
    /// Kind of the request that is answered; `None` in a failure, which does not repeat it.
    pub kind: Option<MessageKind>,
    /// The answer.
    pub reply: Reply,
}

impl WireReply {
    /// Decodes an answer. Of the answer to a read, of pages or of a part, only the header is read,
    /// and `body` may be empty; for the others it is the whole body.
    pub fn decode(header: &MessageHeader, body: &[u8]) -> Result<WireReply, WireError> {
        let tag = header.tag;
        if header.kind == MessageKind::ERROR {
            header.expect_body(0)?;
            let reply = Reply::Failed { code: ErrorCode::from_number(header.code), page: header.page };
            return Ok(WireReply { tag, kind: None, reply });
        }
        let kind = MessageKind::of_answer(header.kind).ok_or(WireError::Kind(header.kind))?;
        if !matches!(kind, MessageKind::Read | MessageKind::ReadPart) && header.body as usize != body.len() {
            return Err(header.length_error());
        }
        let reply = match kind {
            MessageKind::Hello => return Err(WireError::Kind(header.kind)),
            MessageKind::Read => Reply::Read,
            MessageKind::ReadPart => Reply::Part,
            MessageKind::CreateRegion => Reply::Created { region: RegionId(header.region) },
            MessageKind::ClaimRegion => Reply::Claimed { region: RegionId(header.region), pages: header.page },
            MessageKind::CloneRegion => Reply::Ticket { secret: Fields(body).u128().ok_or(header.length_error())? },
            MessageKind::Stat => Reply::Stat(Stat::decode(body)),
            MessageKind::MapRegion => Reply::Map(MapReply::decode(header, body)?),
            MessageKind::Station => {
                StationReply::decode(body).ok_or(header.length_error())?;
                Reply::Station
            }
            MessageKind::Expose => {
                ExposeReply::decode(body).ok_or(WireError::Field("windows"))?;
                Reply::Expose
            }
            MessageKind::Call if body.len() > CallBody::ANSWER_BYTES_MAX => return Err(header.length_error()),
            MessageKind::Call => Reply::Answer { steps: header.count },
            MessageKind::DropRegion
            | MessageKind::Write
            | MessageKind::Discard
            | MessageKind::Ping
            | MessageKind::Reserve
            | MessageKind::Release
            | MessageKind::Bye => {
                header.expect_body(0)?;
                Reply::Done
            }
        };
        Ok(WireReply { tag, kind: Some(kind), reply })
    }
}

pub(super) fn append(header: MessageHeader, body: &[u8], out: &mut Vec<u8>) {
    let header = MessageHeader { body: length(body.len()), ..header };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(body);
}

/// Appends [`Reply::Done`] to a request of this kind.
pub fn encode_ok(tag: u64, kind: MessageKind, out: &mut Vec<u8>) {
    append(MessageHeader { kind: kind.answer(), tag, ..MessageHeader::default() }, &[], out);
}

/// Appends [`Reply::Failed`].
pub fn encode_error(tag: u64, code: ErrorCode, page: u64, out: &mut Vec<u8>) {
    append(
        MessageHeader { kind: MessageKind::ERROR, code: code.number(), tag, page, ..MessageHeader::default() },
        &[],
        out,
    );
}

/// Appends [`Reply::Created`].
pub fn encode_created(tag: u64, region: RegionId, out: &mut Vec<u8>) {
    append(
        MessageHeader { kind: MessageKind::CreateRegion.answer(), tag, region: region.0, ..MessageHeader::default() },
        &[],
        out,
    );
}

/// Appends [`Reply::Claimed`].
pub fn encode_claimed(tag: u64, region: RegionId, pages: u64, out: &mut Vec<u8>) {
    let kind = MessageKind::ClaimRegion.answer();
    append(MessageHeader { kind, tag, region: region.0, page: pages, ..MessageHeader::default() }, &[], out);
}

/// Appends [`Reply::Ticket`].
pub fn encode_ticket(tag: u64, secret: u128, out: &mut Vec<u8>) {
    append(
        MessageHeader { kind: MessageKind::CloneRegion.answer(), tag, ..MessageHeader::default() },
        &secret.to_le_bytes(),
        out,
    );
}

/// Appends [`Reply::Stat`].
pub fn encode_stat(tag: u64, stat: &Stat, out: &mut Vec<u8>) {
    let words = stat.to_array();
    let header = MessageHeader {
        kind: MessageKind::Stat.answer(),
        tag,
        body: length(words.len() * 8),
        ..MessageHeader::default()
    };
    out.extend_from_slice(&header.encode());
    for word in words {
        out.extend_from_slice(&word.to_le_bytes());
    }
}

/// Appends [`Reply::Map`]. The descriptors (page map, checksums, notes, the layers) go with the
/// first byte of this frame.
pub fn encode_map(tag: u64, map: &MapReply, out: &mut Vec<u8>) {
    let header = MessageHeader {
        kind: MessageKind::MapRegion.answer(),
        tag,
        count: map.layers,
        page: map.pages,
        body: 16,
        ..MessageHeader::default()
    };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(&map.generation.to_le_bytes());
    out.extend_from_slice(&map.layers_total.to_le_bytes());
    out.extend_from_slice(&map.first_layer.to_le_bytes());
}

/// Returns the length of the body of an answer to `ReadPart`: its [`crate::part_checksum`], then
/// bytes.
pub const fn part_body_bytes(part: PagePart) -> usize {
    8 + part.len as usize
}

/// Decodes the checksum and the bytes of an answer to `ReadPart`; `None` if the body is too short.
pub fn part_reply(body: &[u8]) -> Option<(u64, &[u8])> {
    let mut fields = Fields(body);
    Some((fields.u64()?, fields.0))
}

/// Appends the answer to `ReadPart`: `bytes` are those of the part, `page_sum` is the stored
/// checksum of their page.
pub fn encode_part(tag: u64, part: PagePart, page_sum: u64, bytes: &[u8], out: &mut Vec<u8>) {
    assert_eq!(bytes.len(), part.len());
    let body = length(part_body_bytes(part));
    let header = MessageHeader {
        kind: MessageKind::ReadPart.answer(),
        tag,
        count: part.count(),
        body,
        page: page_sum,
        ..MessageHeader::default()
    };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(&part_checksum(part, bytes, page_sum).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Appends the answer to a read of `count` pages up to its page bytes. `sums` yields the index, ascending, and
/// the checksum of each page that is present; their bytes must follow in the same order.
pub fn encode_read(tag: u64, count: u32, sums: impl Iterator<Item = (u32, u64)>, out: &mut Vec<u8>) {
    let start = out.len();
    let map_at = start + super::HEADER_BYTES;
    out.resize(map_at + present_words(count) * 8, 0);
    let mut present = 0;
    for (index, sum) in sums {
        debug_assert!(index < count);
        if let Some(bits) = out.get_mut(map_at + index as usize / 8) {
            *bits |= 1 << (index % 8);
        }
        out.extend_from_slice(&sum.to_le_bytes());
        present += 1;
    }
    let body = read_prefix_bytes(count, present) + present as usize * PAGE_BYTES;
    let header =
        MessageHeader { body: length(body), kind: MessageKind::Read.answer(), tag, count, ..MessageHeader::default() };
    if let Some(place) = out.get_mut(start..map_at) {
        place.copy_from_slice(&header.encode());
    }
}
