//! Decision logic of Farfield, without side effects.
//!
//! Pure logic of the far-memory runtime: identifiers, geometry, the wire protocol, page words, the
//! words of far heaps and collected heaps, and policies. No I/O, no clock, no thread: time and
//! randomness are arguments, so every decision can be replayed.
#![no_std]
#![forbid(unsafe_code)]
// Numbers from the wire can be anything: none is narrowed without a check. See `cast`.
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss))]

extern crate alloc;

pub mod blocks;
pub mod cast;
pub mod chunk_word;
mod deal;
pub mod dsm;
pub mod gc;
pub mod geometry;
pub mod gf256;
pub mod heap;
mod ids;
pub mod lock;
mod member_set;
pub mod notice;
pub mod page_word;
pub mod policy;
pub mod row_word;
pub mod session;
pub mod tier_word;
pub mod time;
pub mod wire;
#[cfg(test)]
mod words;

pub use deal::Deal;
pub use ids::{Incarnation, PageId, RegionId};
pub use member_set::MemberSet;

/// Returns the checksum of one page: XXH3, 64 bits. Both ends of every wire and every store use
/// this function.
pub fn checksum(page: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(page)
}

/// Returns the checksum of a part of a page. It is tied to the stored checksum of that page and to
/// the part's place in it. The bytes of another page, of an older version of the page, or of
/// another part of it do not match.
pub fn part_checksum(part: wire::PagePart, bytes: &[u8], page_sum: u64) -> u64 {
    // An odd factor: no two parts have the same multiple of it.
    checksum(bytes) ^ page_sum ^ u64::from(part.count()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
