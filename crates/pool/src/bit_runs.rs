//! Runs of set bits in a word whose bits say which slots, or rows, are free.

/// Number of bits of a word.
const GROUP: u64 = u64::BITS as u64;

/// Returns a mask of `count` bits from `shift` on.
pub(crate) fn mask(shift: u64, count: u64) -> u64 {
    if count == GROUP { u64::MAX } else { ((1 << count) - 1) << shift }
}

/// Finds the first run of `wanted` set bits, else of half as many and so on. Returns its first bit
/// and its length.
pub(crate) fn run_of(bits: u64, wanted: u64) -> Option<(u64, u64)> {
    if bits == 0 {
        return None;
    }
    let mut count = wanted.min(GROUP);
    loop {
        // `starts` has the bits that begin a run of `known` set bits; each step at most doubles
        // `known`.
        let (mut starts, mut known) = (bits, 1);
        while known < count {
            let step = known.min(count - known);
            starts &= starts >> step;
            known += step;
        }
        if starts != 0 {
            return Some((u64::from(starts.trailing_zeros()), count));
        }
        count /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_where_they_are() {
        assert_eq!(run_of(0, 4), None);
        assert_eq!(run_of(u64::MAX, 64), Some((0, 64)));
        assert_eq!(run_of(0b0110_1110, 3), Some((1, 3)));
        assert_eq!(run_of(0b0101_0100, 16), Some((2, 1)));
        assert_eq!(run_of(1 << 63, 1), Some((63, 1)));
        for shift in 0..=57 {
            assert_eq!(run_of(0x7f << shift, 7), Some((shift, 7)));
        }
    }
}
