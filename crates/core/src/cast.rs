//! Casts between numbers that lose nothing, or only what they say.
//!
//! The lints against lossy casts hold in this crate and in the server, so that a number from the
//! wire is never cut silently. What is proven goes through these functions; what is not uses
//! `try_from`.

#![cfg_attr(
    not(test),
    expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "each function says what it takes, or what it drops"
    )
)]

use core::time::Duration;

/// Returns a number that is known to fit: wherever pages are kept, a `usize` has 64 bits.
#[inline]
pub const fn usize_of(number: u64) -> usize {
    debug_assert!(number <= usize::MAX as u64);
    number as usize
}

/// Returns the low 32 bits of a word.
#[inline]
pub const fn low_u32(word: u64) -> u32 {
    word as u32
}

/// Returns the low 16 bits of a word.
#[inline]
pub const fn low_u16(word: u64) -> u16 {
    word as u16
}

/// Returns the low 8 bits of a word.
#[inline]
pub const fn low_u8(word: u64) -> u8 {
    word as u8
}

/// Returns a number that is known to fit into 32 bits.
#[inline]
pub const fn u32_of(number: usize) -> u32 {
    debug_assert!(number <= u32::MAX as usize);
    number as u32
}

/// Returns a number that is known to fit into 16 bits.
#[inline]
pub const fn u16_of(number: usize) -> u16 {
    debug_assert!(number <= u16::MAX as usize);
    number as u16
}

/// Returns a number that is known to fit into 8 bits.
#[inline]
pub const fn u8_of(number: usize) -> u8 {
    debug_assert!(number <= u8::MAX as usize);
    number as u8
}

/// Returns the whole part of a number, bounded to what a `u64` can hold; 0 for NaN.
#[inline]
pub const fn saturating_u64(number: f64) -> u64 {
    number as u64
}

/// Returns the nanoseconds of a duration, at most `u64::MAX`, which are 584 years.
#[inline]
pub const fn nanos(duration: Duration) -> u64 {
    let nanos = duration.as_nanos();
    if nanos > u64::MAX as u128 { u64::MAX } else { nanos as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_bounded() {
        assert_eq!([f64::NAN, -1.0, 1.9, f64::INFINITY].map(saturating_u64), [0, 0, 1, u64::MAX]);
        assert_eq!([Duration::from_nanos(7), Duration::MAX].map(nanos), [7, u64::MAX]);
    }

    #[test]
    fn words_are_cut_to_their_low_bits() {
        let word = 0x0123_4567_89ab_cdef;
        assert_eq!((low_u32(word), low_u16(word), low_u8(word)), (0x89ab_cdef, 0xcdef, 0xef));
    }
}
