//! Sizes that all crates share.

/// Bytes in a page, the unit of residency and of transfer.
pub const PAGE_BYTES: usize = 4096;
/// `log2(PAGE_BYTES)`.
pub const PAGE_SHIFT: u32 = 12;

const _: () = assert!(PAGE_BYTES == 1 << PAGE_SHIFT);

/// Returns the number of pages needed to hold `bytes`.
pub const fn pages_for(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES as u64)
}
