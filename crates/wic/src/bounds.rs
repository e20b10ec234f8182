//! Checks of offsets and ranges, with equal errors at each place.

use crate::{Fault, RANGE_BYTES_MAX};
use farfield_core::lock::LockRecord;

/// Bytes of a word.
const WORD_BYTES: usize = 8;

/// Checks that a word lies in the region, at a multiple of its size.
pub(crate) fn check_word(region_bytes: u64, offset: u64) -> Result<(), Fault> {
    check_range(region_bytes, offset, WORD_BYTES)?;
    if offset.is_multiple_of(WORD_BYTES as u64) { Ok(()) } else { Err(Fault::Unaligned { offset }) }
}

/// Checks that a lock lies in the region, at a multiple of its size.
pub(crate) fn check_lock(region_bytes: u64, offset: u64) -> Result<(), Fault> {
    check_range(region_bytes, offset, LockRecord::BYTES)?;
    if offset.is_multiple_of(LockRecord::BYTES as u64) { Ok(()) } else { Err(Fault::Unaligned { offset }) }
}

/// Checks that a range lies in the region and has at most [`RANGE_BYTES_MAX`] bytes.
pub fn check_range(region_bytes: u64, offset: u64, len: usize) -> Result<(), Fault> {
    if len > RANGE_BYTES_MAX {
        return Err(Fault::TooLong { bytes: len as u64 });
    }
    match offset.checked_add(len as u64) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(Fault::OutOfRange { offset }),
    }
}
