//! Bytes and texts in far memory, as functions read them.

use super::part::{ObjectRef, refuse};
use super::place::FarPlace;
use crate::collections::unchecked_range_of;
use core::ops::{Range, RangeBounds};
use farfield_wic::{Fault, RANGE_BYTES_MAX};

/// Most bytes that are copied at once. A length that is met at a server may be any number, and bytes that
/// were never written are zeros there, so memory needs a bound.
const COPY_BYTES_MAX: usize = 16 << 20;

/// The bytes of a [`FarBytes`](crate::FarBytes), as a [`FarFunction`](crate::FarFunction) sees them:
/// where they are, and how many. [`FarPlace::read`] and [`FarPlace::bytes`] read them.
#[derive(Clone, Copy, Debug)]
pub struct BytesRef<'f> {
    object: Option<ObjectRef<'f>>,
    len: usize,
}

impl<'f> BytesRef<'f> {
    /// Makes one of an object with so many bytes; `None` if there are bytes without an object.
    pub(crate) fn new(object: Option<ObjectRef<'f>>, len: usize) -> Option<BytesRef<'f>> {
        (object.is_some() || len == 0).then_some(BytesRef { object, len })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of this range that exist.
    fn range(&self, range: impl RangeBounds<usize>) -> Range<usize> {
        let Range { start, end } = unchecked_range_of(range, self.len);
        let end = end.min(self.len);
        start.min(end)..end
    }
}

/// The text of a [`FarString`](crate::FarString), as a [`FarFunction`](crate::FarFunction) sees it.
/// [`FarPlace::text`] reads it.
#[derive(Clone, Copy, Debug)]
pub struct TextRef<'f> {
    bytes: BytesRef<'f>,
}

impl<'f> TextRef<'f> {
    pub(crate) fn new(bytes: BytesRef<'f>) -> TextRef<'f> {
        TextRef { bytes }
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Checks whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the bytes of the text.
    pub fn as_bytes(self) -> BytesRef<'f> {
        self.bytes
    }
}

/// Reads bytes from this index on, in pieces that a server gives at once.
pub(super) async fn read<'f, P: FarPlace>(
    far: &'f P,
    bytes: BytesRef<'f>,
    at: usize,
    into: &mut [u8],
) -> Result<usize, Fault> {
    let Range { start, end } = bytes.range(at..at.saturating_add(into.len()));
    let Some(object) = bytes.object else { return Ok(0) };
    let mut offset = start;
    for piece in into[..end - start].chunks_mut(RANGE_BYTES_MAX) {
        let part = object.part(offset, piece.len());
        offset += piece.len();
        // SAFETY: in this process, `len` bytes of the object are initialised, and these are some of
        // them.
        far.look(part, |found| unsafe { found.copy(0, piece) }).await?;
    }
    Ok(end - start)
}

/// Returns a copy of the bytes of a range that exist.
pub(super) async fn copy<'f, P: FarPlace>(
    far: &'f P,
    bytes: BytesRef<'f>,
    range: impl RangeBounds<usize>,
) -> Result<Vec<u8>, Fault> {
    let Range { mut start, end } = bytes.range(range);
    if end - start > COPY_BYTES_MAX {
        far.yield_now().await;
        return Err(Fault::TooLong { bytes: (end - start) as u64 });
    }
    let mut copy = Vec::new();
    // Piece by piece, because a length at a server may be wrong: what does not exist takes no memory.
    while start < end {
        let piece = (end - start).min(RANGE_BYTES_MAX);
        let old = copy.len();
        copy.resize(old + piece, 0);
        read(far, bytes, start, &mut copy[old..]).await?;
        start += piece;
    }
    Ok(copy)
}

/// Returns a copy of a text.
pub(super) async fn text<'f, P: FarPlace>(far: &'f P, text: TextRef<'f>) -> Result<String, Fault> {
    let bytes = copy(far, text.bytes, ..).await?;
    match (String::from_utf8(bytes), text.bytes.object) {
        (Ok(text), _) => Ok(text),
        (Err(_), Some(object)) => refuse(far, object).await,
        (Err(_), None) => unreachable!("no bytes are a text"),
    }
}
