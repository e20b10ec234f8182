//! Hash of a page under a secret key, for a heap that does not trust its server at all.
//!
//! Multilinear-HM of Lemire and Kaser ("Strongly universal string hashing is fast", The Computer
//! Journal 57, 2014). It sums, modulo 2^64, the products of pairs of 32-bit words, each with 64
//! bits of the key added, and keeps the upper half. It is *strongly universal*: for any two
//! different pages the hashes are equal for one key in 2^32, no matter who chose the pages and how
//! long they computed. That needs no assumption as those of cryptography do. But it holds only as
//! long as nobody sees a hash: hashes are kept near, and compared near.

use crate::cast::low_u32;
use crate::geometry::PAGE_BYTES;
use alloc::boxed::Box;

/// Number of pairs of 32-bit words: those of a page, and one for its number.
const PAIRS: usize = PAGE_BYTES / 8 + 1;

/// A hash function that a key has picked.
pub struct UniversalHash {
    /// Key word that the sum begins with.
    offset: u64,
    keys: [[u64; 2]; PAIRS],
}

impl core::fmt::Debug for UniversalHash {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // The key must not reach a log by way of `{:?}`.
        f.write_str("UniversalHash(hidden)")
    }
}

impl UniversalHash {
    /// Takes its key from `fill`, which fills bytes with random bits fit for secrets. Errs if
    /// `fill` does.
    pub fn new<E>(mut fill: impl FnMut(&mut [u8]) -> Result<(), E>) -> Result<Box<UniversalHash>, E> {
        let mut hash = Box::new(UniversalHash { offset: 0, keys: [[0; 2]; PAIRS] });
        let words = hash.keys.as_flattened_mut().iter_mut();
        for word in words {
            let mut bytes = [0; 8];
            fill(&mut bytes)?;
            *word = u64::from_le_bytes(bytes);
        }
        let mut bytes = [0; 8];
        fill(&mut bytes)?;
        hash.offset = u64::from_le_bytes(bytes);
        Ok(hash)
    }

    /// Returns the hash of the page with this number. The number counts as two more words of its
    /// bytes.
    pub fn of_page(&self, page: u32, bytes: &[u8; PAGE_BYTES]) -> u32 {
        let product = |[low, high]: [u32; 2], [first, second]: [u64; 2]| {
            first.wrapping_add(low.into()).wrapping_mul(second.wrapping_add(high.into()))
        };
        let words = bytes.as_chunks::<8>().0.iter().map(|pair| {
            let pair = u64::from_le_bytes(*pair);
            [low_u32(pair), low_u32(pair >> 32)]
        });
        let words = words.chain(core::iter::once([page, 0]));
        let sum = words.zip(self.keys).fold(self.offset, |sum, (pair, keys)| sum.wrapping_add(product(pair, keys)));
        (sum >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    //! Guards against pages that a hash cannot tell apart whatever its key is.
    use super::*;

    /// Keys that can be had again.
    fn hash(seed: u64) -> Box<UniversalHash> {
        let mut state = seed;
        let fill = |bytes: &mut [u8]| -> Result<(), ()> {
            // splitmix64
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = state;
            word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            bytes.copy_from_slice(&(word ^ word >> 31).to_le_bytes());
            Ok(())
        };
        UniversalHash::new(fill).unwrap()
    }

    #[test]
    fn the_hash_is_the_sum_that_the_paper_defines() {
        let (hash, mut page) = (hash(7), [0; PAGE_BYTES]);
        (0..PAGE_BYTES).for_each(|at| page[at] = (at * 131 / 7) as u8);
        let keys: alloc::vec::Vec<u64> = hash.keys.as_flattened().to_vec();
        let mut words: alloc::vec::Vec<u32> =
            page.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        words.extend([99, 0]);
        let mut sum = u128::from(hash.offset);
        for pair in 0..words.len() / 2 {
            let wide = |index: usize| (u128::from(keys[index]) + u128::from(words[index])) % (1 << 64);
            sum += wide(2 * pair) * wide(2 * pair + 1) % (1 << 64);
        }
        assert_eq!(hash.of_page(99, &page), ((sum % (1 << 64)) >> 32) as u32);
    }

    #[test]
    fn every_bit_every_place_and_the_number_count() {
        for seed in 1..4 {
            let (hash, mut page) = (hash(seed), [0xA5; PAGE_BYTES]);
            let before = hash.of_page(3, &page);
            assert_ne!(hash.of_page(4, &page), before, "another page");
            for bit in (0..PAGE_BYTES * 8).step_by(37) {
                page[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(hash.of_page(3, &page), before, "bit {bit}");
                page[bit / 8] ^= 1 << (bit % 8);
            }
            // Words that change places.
            (page[0], page[8]) = (1, 2);
            let one = hash.of_page(3, &page);
            (page[0], page[8]) = (2, 1);
            assert_ne!(hash.of_page(3, &page), one);
        }
    }

    /// One key in 2^32 makes them equal, and of the lowest eight bits of a hash one in 256. A pair
    /// that is equal for more keys would be one that a server can choose.
    #[test]
    fn no_pair_of_pages_is_equal_for_many_keys() {
        let page = |places: &[usize]| {
            let mut page = [0; PAGE_BYTES];
            places.iter().for_each(|at| page[*at] = 0x80);
            page
        };
        for other in [page(&[0]), page(&[7]), page(&[3, 7]), page(&[3, 7, 11, 15]), [0xFF; PAGE_BYTES]] {
            let equal = |seed: &u64| {
                let hash = hash(*seed);
                (hash.of_page(0, &page(&[])) ^ hash.of_page(0, &other)) & 0xFF == 0
            };
            let equal = (0..1024).filter(equal).count();
            assert!(equal < 20, "{equal} of 1024 keys, where 4 are expected");
        }
    }
}
