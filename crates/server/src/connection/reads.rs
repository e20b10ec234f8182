//! Reads: their answers are gathered, and page bytes are sent straight from the layers.

use super::link::lost;
use super::perform::error_code;
use super::{BATCH_PAGES_MAX, ClientConnection, CloseReason, InboxMessage, is_late, region_read};
use crate::sessions::ClientSession;
use crate::store::{PresentPage, RegionReader};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{self, ErrorCode, Request, WireError, WireRequest};
use farfield_core::{PageId, RegionId};
use std::ops::Range;
use std::time::Instant;

/// Page bytes that are gathered before they are sent.
const GATHER_BYTES_MAX: usize = 1 << 20;
/// Bytes of the longest read.
const READ_BYTES_MAX: usize = BATCH_PAGES_MAX as usize * PAGE_BYTES;
/// Parts that are gathered before they are sent. The last read may add one part per page, a head
/// and a tail.
const PARTS_MAX: usize = 512;
/// Most parts that the kernel takes in one call.
pub(super) const VECTORS_MAX: usize = 1024;
const _: () = assert!(PARTS_MAX + BATCH_PAGES_MAX as usize + 2 <= VECTORS_MAX);

/// A part of the bytes to send next.
pub(super) enum SendSlice {
    /// A range of the outbox.
    Own(Range<usize>),
    /// Bytes in a layer.
    Layer { bytes: *const u8, len: usize },
}

impl ClientConnection<'_> {
    /// Serves `first` and the reads of the same region that follow it. Sets `next` to the first
    /// request that is no such read.
    pub(super) fn serve_reads<'i>(
        &mut self,
        session: &ClientSession,
        id: RegionId,
        first: WireRequest<'i>,
        requests: &mut impl Iterator<Item = Result<WireRequest<'i>, WireError>>,
        next: &mut Option<Result<WireRequest<'i>, WireError>>,
        arrived: Instant,
    ) -> Result<(), CloseReason> {
        let region = session.region(id);
        let now = Instant::now();
        let mut current = Some(first);
        while let Some(request) = current {
            // Bytes that the client does not take at once are kept in the outbox. They are charged
            // before the region is locked, because charging may wait.
            self.hold_outbox(self.batch_bytes.min(GATHER_BYTES_MAX + READ_BYTES_MAX))?;
            self.turn.begin();
            current = Some(request);
            let reader = region.as_ref().map(|region| region.reader());
            self.parts.clear();
            let mut gathered = 0;
            let mut own_from = self.sent;
            while let Some(request) = current {
                self.tally.request(request.request.kind());
                self.conversation.on_answered();
                let outcome = match &reader {
                    _ if is_late(&request, arrived, now) => Err((ErrorCode::TimedOut, 0)),
                    None => Err((ErrorCode::UnknownRegion, 0)),
                    Some(reader) => self.collect(reader, &request, &mut own_from),
                };
                match outcome {
                    Ok(bytes) => gathered += bytes,
                    Err((code, page)) => self.fail(request.tag, code, page),
                }
                *next = requests.next();
                current = match next {
                    Some(Ok(following)) if region_read(&following.request) == Some(id) => Some(*following),
                    _ => None,
                };
                if gathered >= GATHER_BYTES_MAX || self.parts.len() >= PARTS_MAX {
                    break;
                }
            }
            if own_from < self.outbox.len() {
                self.parts.push(SendSlice::Own(own_from..self.outbox.len()));
            }
            self.send_parts()?;
            // The region's lock must not be held while waiting for the client.
            drop(reader);
            self.flush()?;
        }
        Ok(())
    }

    /// Adds the answer to one read to outbox and parts. `own_from` is the start of the outbox bytes
    /// that no part covers yet. Returns the bytes of pages that will be sent. On an error nothing
    /// was added.
    fn collect(
        &mut self,
        reader: &RegionReader<'_>,
        request: &WireRequest<'_>,
        own_from: &mut usize,
    ) -> Result<usize, (ErrorCode, u64)> {
        match request.request {
            Request::ReadPart { page, part, .. } => {
                let (bytes, page_sum) = reader.part(page, part, &mut self.scratch).map_err(error_code)?;
                wire::encode_part(request.tag, part, page_sum, bytes, &mut self.outbox);
                Ok(bytes.len())
            }
            Request::Read { page, count, .. } => {
                let (parts, found) = (&mut self.parts, &mut self.found);
                let mut collected = Collected { parts, found, own_from: *own_from, present: 0 };
                collect_read(reader, request.tag, page, count, &mut self.outbox, &mut collected)?;
                let Collected { own_from: from, present, .. } = collected;
                *own_from = from;
                self.tally.read_pages += present as u64;
                self.tally.absent_pages += u64::from(count).saturating_sub(present as u64);
                Ok(present * PAGE_BYTES)
            }
            _ => unreachable!("only reads get here"),
        }
    }

    /// Sends the gathered parts as far as the kernel takes them, and copies the rest to the outbox.
    fn send_parts(&mut self) -> Result<(), CloseReason> {
        let mut vectors = core::mem::take(&mut self.vectors);
        vectors.clear();
        vectors.extend(self.parts.drain(..).map(|part| {
            let (bytes, len) = match part {
                SendSlice::Own(range) => {
                    let own = self.outbox.get(range).unwrap_or_default();
                    (own.as_ptr(), own.len())
                }
                SendSlice::Layer { bytes, len } => (bytes, len),
            };
            libc::iovec { iov_base: bytes.cast_mut().cast(), iov_len: len }
        }));
        let mut rest = &mut vectors[..];
        // Records have less room than the kernel: as many calls as it takes, until the kernel is full.
        while !rest.is_empty() {
            // Parts of the outbox are ours. Parts of layers are mapped for as long as the
            // reader of the region lives, which the caller holds. If the owner changes them meanwhile,
            // it receives its own changes.
            // SAFETY: as just said, all parts are readable.
            match unsafe { self.send(rest) } {
                Ok(0) => break,
                Ok(sent) => {
                    self.tally.sent_bytes += sent as u64;
                    rest = advance(rest, sent);
                }
                Err(errno) if errno.is_transient() => break,
                Err(errno) => return Err(lost(errno)),
            }
        }
        if rest.is_empty() {
            self.outbox.clear();
        } else {
            let mut kept: Vec<u8> = Vec::with_capacity(rest.iter().map(|part| part.iov_len).sum());
            for part in rest.iter() {
                // SAFETY: as above; `kept` has room for everything that is not sent, and raw copies
                // make no reference into the layer.
                unsafe {
                    let target = kept.as_mut_ptr().add(kept.len());
                    core::ptr::copy_nonoverlapping(part.iov_base.cast::<u8>(), target, part.iov_len);
                    kept.set_len(kept.len() + part.iov_len);
                }
            }
            self.outbox = kept;
        }
        self.vectors = vectors;
        self.sent = 0;
        Ok(())
    }
}

/// Returns what is left of `parts` after their first `sent` bytes.
fn advance(parts: &mut [libc::iovec], mut sent: usize) -> &mut [libc::iovec] {
    let mut whole = 0;
    for part in parts.iter_mut() {
        let taken = sent.min(part.iov_len);
        part.iov_base = part.iov_base.wrapping_byte_add(taken);
        part.iov_len -= taken;
        sent -= taken;
        if part.iov_len > 0 {
            break;
        }
        whole += 1;
    }
    parts.get_mut(whole..).unwrap_or_default()
}

/// Returns the number of bytes of the pages that a batch reads.
pub(super) fn read_bytes(batch: &[InboxMessage]) -> usize {
    let bytes = batch.iter().filter_map(|item| match item.read?.request {
        Request::Read { count, .. } => Some((count as usize).saturating_mul(PAGE_BYTES)),
        Request::ReadPart { part, .. } => Some(part.len()),
        _ => None,
    });
    bytes.fold(0, usize::saturating_add)
}

/// Prefetches the memory that reads of parts will look at. A single such read is served at once
/// instead.
pub(super) fn announce(session: &ClientSession, batch: &[InboxMessage]) {
    let mut parts = batch.iter().filter_map(|item| match item.read?.request {
        Request::ReadPart { region, page, part } => Some((region, page, part)),
        _ => None,
    });
    let (Some(first), Some(second)) = (parts.next(), parts.next()) else { return };
    let Some(region) = session.region(first.0) else { return };
    let reader = region.reader();
    let parts = [first, second].into_iter().chain(parts);
    parts.filter(|(id, ..)| *id == first.0).for_each(|(_, page, part)| reader.announce(page, part));
}

/// Output of the reads in a row that are gathered for sending.
struct Collected<'a> {
    parts: &'a mut Vec<SendSlice>,
    /// Pages of the current read.
    found: &'a mut Vec<Option<PresentPage>>,
    /// Start of the outbox bytes that no part covers yet.
    own_from: usize,
    present: usize,
}

/// Adds the answer to one read to outbox and parts. On an error nothing was added.
fn collect_read(
    reader: &RegionReader<'_>,
    tag: u64,
    first: PageId,
    count: u32,
    outbox: &mut Vec<u8>,
    collected: &mut Collected<'_>,
) -> Result<(), (ErrorCode, u64)> {
    let run = reader.check_run(first, u64::from(count)).map_err(error_code)?;
    collected.found.clear();
    for page in run {
        // Each page is looked up once, because the owner may change the page map between two looks.
        collected.found.push(reader.page(PageId(page)).map_err(error_code)?);
    }
    let present = || (0..).zip(collected.found.iter()).filter_map(|(index, found)| Some((index, (*found)?)));
    wire::encode_read(tag, count, present().map(|(index, found)| (index, found.sum)), outbox);
    let before = collected.parts.len();
    for page in collected.found.iter().flatten() {
        collected.present += 1;
        if collected.parts.len() == before {
            collected.parts.push(SendSlice::Own(collected.own_from..outbox.len()));
            collected.own_from = outbox.len();
        } else if let Some(SendSlice::Layer { bytes, len }) = collected.parts.last_mut()
            && bytes.wrapping_add(*len) == page.bytes
        {
            *len += PAGE_BYTES;
            continue;
        }
        collected.parts.push(SendSlice::Layer { bytes: page.bytes, len: PAGE_BYTES });
    }
    Ok(())
}
