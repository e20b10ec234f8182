//! Reads little-endian fields from bytes that may have any value, and converts lengths to their
//! wire form.

/// Cursor that takes fields from the front; `None` when the bytes run out.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*front)
    }
    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }
    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }
    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    pub(super) fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }
}

/// Converts a length to the form of the header. A length that does not fit becomes the longest,
/// which every reader refuses.
pub(crate) fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Converts a length to two bytes. A length that does not fit becomes the longest, which every
/// reader refuses.
pub(super) fn short_length(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

/// Returns the `index`-th little-endian u64 of `bytes`; `None` behind their end.
pub(super) fn u64_at(bytes: &[u8], index: usize) -> Option<u64> {
    Fields(bytes.get(index.checked_mul(8)?..)?).u64()
}
