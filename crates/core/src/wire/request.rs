//! Requests of a client.

use super::bytes::{Fields, length, u64_at};
use super::{BATCH_PAGES_LIMIT, CallBody, MessageHeader, MessageKind, WireError, flags};
use crate::geometry::PAGE_BYTES;
use crate::{PageId, RegionId};
use alloc::vec::Vec;
use core::time::Duration;

/// A request. Its page bytes are borrowed from where they were received or are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request<'a> {
    /// Creates an empty region of `pages` pages. Answer: [`super::Reply::Created`].
    CreateRegion {
        /// Number of pages that the region can address.
        pages: u64,
    },
    /// Frees a region of the session and all its pages.
    DropRegion {
        /// Region of the session.
        region: RegionId,
    },
    /// Reads `count` pages. Answer: [`super::Reply::Read`].
    Read {
        /// Region of the session.
        region: RegionId,
        /// First page.
        page: PageId,
        /// Number of pages, at most `batch_pages_max`.
        count: u32,
    },
    /// Reads bytes inside one page. Answer: [`super::part_body_bytes`], their checksum and the bytes.
    ReadPart {
        /// Region of the session.
        region: RegionId,
        /// The page.
        page: PageId,
        /// Part of the page to read.
        part: PagePart,
    },
    /// Stores pages.
    Write {
        /// Region of the session.
        region: RegionId,
        /// First page.
        page: PageId,
        /// Checksums and bytes.
        pages: WritePages<'a>,
    },
    /// Forgets pages; they read as zeros afterwards.
    Discard {
        /// Region of the session.
        region: RegionId,
        /// First page.
        page: PageId,
        /// Number of pages.
        count: u32,
    },
    /// Makes a copy-on-write snapshot. Answer: [`super::Reply::Ticket`].
    CloneRegion {
        /// Region of the session.
        region: RegionId,
    },
    /// Makes the snapshot behind a ticket a region of this session; a ticket is good once.
    /// Answer: [`super::Reply::Claimed`].
    ClaimRegion {
        /// Secret that the answer to `CloneRegion` had, in any session.
        ticket: u128,
    },
    /// Asks for the statistics of the server. Answer: [`super::Reply::Stat`].
    Stat,
    /// Asks whether the server is there.
    Ping,
    /// Asks for the memory files of a region, layers `first_layer` and up. Answer: [`super::Reply::Map`]; the
    /// descriptors come with its first byte (`SCM_RIGHTS`).
    MapRegion {
        /// Region of the session.
        region: RegionId,
        /// Index of the first layer wanted.
        first_layer: u32,
    },
    /// Sets capacity for `pages` new pages aside for this region: all of it, or
    /// [`super::ErrorCode::PoolFull`].
    Reserve {
        /// Region of the session.
        region: RegionId,
        /// Number of pages.
        pages: u32,
    },
    /// Returns capacity that was set aside and is not in use.
    Release {
        /// Region of the session.
        region: RegionId,
        /// Number of pages.
        pages: u32,
    },
    /// Asks for the address at which the session's memory can be read one-sided. Answer:
    /// [`super::StationReply`].
    Station,
    /// Asks for the windows of a region, of layers `first_layer` and up. Answer: [`super::ExposeReply`].
    Expose {
        /// Region of the session.
        region: RegionId,
        /// Index of the first layer wanted.
        first_layer: u32,
    },
    /// Runs a function over a region. Answer: its bytes, [`super::encode_answer`].
    Call {
        /// Region of the session.
        region: RegionId,
        /// Greatest number of steps that the function may take; 0: as many as the server allows.
        steps_max: u32,
        /// Function and argument.
        call: CallBody<'a>,
    },
    /// Ends the session at once: its regions are freed without waiting for the lease.
    Bye,
}

/// Pages of a write: a checksum for each, then the bytes of each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct WritePages<'a> {
    sums: &'a [u8],
    bytes: &'a [u8],
}

impl core::fmt::Debug for WritePages<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "WritePages({})", self.count())
    }
}

impl<'a> WritePages<'a> {
    /// Returns the number of pages.
    pub fn count(&self) -> u32 {
        length(self.bytes.len() / PAGE_BYTES)
    }
    /// Returns the checksum that the client computed of the `index`-th page.
    pub fn sum(&self, index: u32) -> u64 {
        u64_at(self.sums, index as usize).expect("index below count")
    }
    /// Returns the bytes of all pages.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
    /// Iterates over the pages, each with its checksum.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &'a [u8])> + use<'a> {
        let sums = self.sums.as_chunks::<8>().0.iter().map(|sum| u64::from_le_bytes(*sum));
        sums.zip(self.bytes.chunks_exact(PAGE_BYTES))
    }
}

/// Range of bytes inside a page: at least one byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagePart {
    pub(super) offset: u16,
    pub(super) len: u16,
}

impl PagePart {
    /// Creates the range of `len` bytes from `offset` on; `None` if it is empty or leaves the page.
    pub fn new(offset: usize, len: usize) -> Option<PagePart> {
        let fits = len > 0 && offset.checked_add(len)? <= PAGE_BYTES;
        let (offset, len) = (u16::try_from(offset).ok()?, u16::try_from(len).ok()?);
        fits.then_some(PagePart { offset, len })
    }

    /// Returns the offset of the first byte in the page.
    pub fn offset(self) -> usize {
        usize::from(self.offset)
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(self) -> usize {
        usize::from(self.len)
    }

    /// Returns the range of the bytes in their page.
    pub fn range(self) -> core::ops::Range<usize> {
        self.offset()..self.offset() + self.len()
    }

    /// Encodes the range in the form of the header's `count`.
    pub(crate) fn count(self) -> u32 {
        u32::from(self.offset) << 16 | u32::from(self.len)
    }

    fn from_count(count: u32) -> Option<PagePart> {
        PagePart::new((count >> 16) as usize, (count & 0xFFFF) as usize)
    }
}

/// Returns the length of the body of a write of `count` pages: checksums, then pages.
pub const fn write_body_bytes(count: u32) -> usize {
    count as usize * (8 + PAGE_BYTES)
}

/// A request with the fields that travel beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireRequest<'a> {
    /// Tag, repeated in the answer.
    pub tag: u64,
    /// Whether the request is background: nobody waits for it.
    pub background: bool,
    /// Time after its arrival for which the answer is still wanted.
    pub deadline: Option<Duration>,
    /// The request itself.
    pub request: Request<'a>,
}

impl Request<'_> {
    /// Returns the kind of the request.
    pub fn kind(&self) -> MessageKind {
        match self {
            Request::CreateRegion { .. } => MessageKind::CreateRegion,
            Request::DropRegion { .. } => MessageKind::DropRegion,
            Request::Read { .. } => MessageKind::Read,
            Request::ReadPart { .. } => MessageKind::ReadPart,
            Request::Write { .. } => MessageKind::Write,
            Request::Discard { .. } => MessageKind::Discard,
            Request::CloneRegion { .. } => MessageKind::CloneRegion,
            Request::ClaimRegion { .. } => MessageKind::ClaimRegion,
            Request::Stat => MessageKind::Stat,
            Request::Ping => MessageKind::Ping,
            Request::MapRegion { .. } => MessageKind::MapRegion,
            Request::Reserve { .. } => MessageKind::Reserve,
            Request::Release { .. } => MessageKind::Release,
            Request::Station => MessageKind::Station,
            Request::Expose { .. } => MessageKind::Expose,
            Request::Call { .. } => MessageKind::Call,
            Request::Bye => MessageKind::Bye,
        }
    }
}

impl<'a> WireRequest<'a> {
    /// Decodes a request; `body` is the whole body that `header` announces.
    pub fn decode(header: &MessageHeader, body: &'a [u8]) -> Result<WireRequest<'a>, WireError> {
        header.expect_body(body.len())?;
        let kind = MessageKind::of_request(header.kind).ok_or(WireError::Kind(header.kind))?;
        let region = RegionId(header.region);
        let page = PageId(header.page);
        let count = header.count;
        let request = match kind {
            MessageKind::Hello => return Err(WireError::Kind(header.kind)), // Only as the first message.
            MessageKind::Write => {
                if count == 0 || count > BATCH_PAGES_LIMIT {
                    return Err(WireError::Field("count"));
                }
                header.expect_body(write_body_bytes(count))?;
                let (sums, bytes) = body.split_at_checked(count as usize * 8).ok_or(header.length_error())?;
                Request::Write { region, page, pages: WritePages { sums, bytes } }
            }
            MessageKind::Call => {
                let call = CallBody::decode(body).ok_or(WireError::Field("call"))?;
                Request::Call { region, steps_max: count, call }
            }
            MessageKind::ClaimRegion => {
                header.expect_body(16)?;
                let ticket = Fields(body).u128().ok_or(header.length_error())?;
                Request::ClaimRegion { ticket }
            }
            _ => {
                header.expect_body(0)?;
                match kind {
                    MessageKind::CreateRegion => Request::CreateRegion { pages: header.page },
                    MessageKind::DropRegion => Request::DropRegion { region },
                    MessageKind::Read => Request::Read { region, page, count },
                    MessageKind::ReadPart => {
                        let part = PagePart::from_count(count).ok_or(WireError::Field("part"))?;
                        Request::ReadPart { region, page, part }
                    }
                    MessageKind::Discard => Request::Discard { region, page, count },
                    MessageKind::CloneRegion => Request::CloneRegion { region },
                    MessageKind::Stat => Request::Stat,
                    MessageKind::Ping => Request::Ping,
                    MessageKind::MapRegion => Request::MapRegion { region, first_layer: count },
                    MessageKind::Reserve => Request::Reserve { region, pages: count },
                    MessageKind::Release => Request::Release { region, pages: count },
                    MessageKind::Bye => Request::Bye,
                    MessageKind::Station => Request::Station,
                    MessageKind::Expose => Request::Expose { region, first_layer: count },
                    // Handled above, with their bodies.
                    MessageKind::Hello | MessageKind::Write | MessageKind::ClaimRegion | MessageKind::Call => {
                        return Err(WireError::Kind(header.kind));
                    }
                }
            }
        };
        let deadline = (header.deadline_us != 0).then(|| Duration::from_micros(u64::from(header.deadline_us)));
        Ok(WireRequest { tag: header.tag, background: header.flags & flags::BACKGROUND != 0, deadline, request })
    }

    /// Returns the header of this request. The body, if there is one (write, claim, call), follows
    /// it on the wire.
    pub fn header(&self) -> MessageHeader {
        let mut header = MessageHeader {
            tag: self.tag,
            flags: if self.background { flags::BACKGROUND } else { 0 },
            // A deadline too short to express becomes one microsecond, not none; one too long
            // becomes the longest there is.
            deadline_us: self.deadline.map_or(0, |wait| u32::try_from(wait.as_micros().max(1)).unwrap_or(u32::MAX)),
            ..MessageHeader::default()
        };
        header.kind = self.request.kind() as u8;
        match self.request {
            Request::CreateRegion { pages } => header.page = pages,
            Request::DropRegion { region } | Request::CloneRegion { region } => header.region = region.0,
            Request::Read { region, page, count } | Request::Discard { region, page, count } => {
                (header.region, header.page, header.count) = (region.0, page.0, count);
            }
            Request::ReadPart { region, page, part } => {
                (header.region, header.page, header.count) = (region.0, page.0, part.count());
            }
            Request::Write { region, page, pages } => {
                let count = pages.count();
                (header.region, header.page, header.count) = (region.0, page.0, count);
                header.body = length(write_body_bytes(count));
            }
            Request::ClaimRegion { .. } => header.body = 16,
            Request::Call { region, steps_max, call } => {
                (header.region, header.count) = (region.0, steps_max);
                header.body = length(call.body_bytes());
            }
            Request::MapRegion { region, first_layer } | Request::Expose { region, first_layer } => {
                (header.region, header.count) = (region.0, first_layer);
            }
            Request::Reserve { region, pages } | Request::Release { region, pages } => {
                (header.region, header.count) = (region.0, pages);
            }
            Request::Stat | Request::Ping | Request::Station | Request::Bye => {}
        }
        header
    }
}

/// Appends a whole request, with its body.
pub fn encode_request(request: &WireRequest<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(&request.header().encode());
    match request.request {
        Request::Write { pages, .. } => {
            out.extend_from_slice(pages.sums);
            out.extend_from_slice(pages.bytes);
        }
        Request::ClaimRegion { ticket } => out.extend_from_slice(&ticket.to_le_bytes()),
        Request::Call { call, .. } => call.encode(out),
        _ => {}
    }
}
