//! `SeededState`: a hash function that programs have in common.

use crate::call::FarView;
use crate::call::view::{Loan, NearTables, ViewSource, ViewTypes, layout};
use core::hash::{BuildHasher, Hasher};
use std::hash::RandomState;

/// Hash function with a seed, the same in all programs and builds: for a
/// [`FarFlatMap`](crate::FarFlatMap) whose keys a function looks up at a memory server
/// ([`FarPlace::lookup`](crate::FarPlace::lookup)).
///
/// Words are multiplied and folded, as by wyhash: one multiplication for each 8 bytes. Whoever knows the seed
/// can make keys with equal hashes; [`SeededState::default`] picks one at random.
///
/// ```
/// use farfield::{FarFlatMap, SeededState};
///
/// let map: FarFlatMap<u64, u32, SeededState> = FarFlatMap::default();
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeededState {
    seed: u64,
}

impl SeededState {
    /// Makes the hash function with this seed.
    pub const fn new(seed: u64) -> SeededState {
        SeededState { seed }
    }
}

impl Default for SeededState {
    fn default() -> SeededState {
        SeededState::new(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for SeededState {
    type Hasher = SeededHasher;

    fn build_hasher(&self) -> SeededHasher {
        SeededHasher { state: self.seed ^ FIRST }
    }
}

/// Hasher of a [`SeededState`].
#[derive(Clone, Debug)]
pub struct SeededHasher {
    state: u64,
}

/// Odd numbers with as many ones as zeros in each byte, from wyhash.
const FIRST: u64 = 0xa076_1d64_78bd_642f;
const SECOND: u64 = 0xe703_7ed1_a0b4_28db;

/// Multiplies, and folds the upper half of the product over the lower one.
fn fold(one: u64, two: u64) -> u64 {
    let product = u128::from(one) * u128::from(two);
    product as u64 ^ (product >> 64) as u64
}

impl Hasher for SeededHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for word in words {
            self.state = fold(self.state ^ u64::from_le_bytes(*word), SECOND);
        }
        // The length tells bytes of zero from none.
        self.state = fold(self.state ^ u64::from_le_bytes(last), FIRST ^ bytes.len() as u64);
    }

    fn finish(&self) -> u64 {
        fold(self.state ^ FIRST, SECOND)
    }
}

// SAFETY: a number, which has no interior mutability.
unsafe impl FarView for SeededState {
    type View<'f> = SeededState;
    const NAME: &'static str = "SeededState";
    // The last number is the version of the function.
    const LAYOUT: u64 = layout("SeededState", size_of::<Self>(), align_of::<Self>(), &[("seed", 0, 1)]);

    fn view<'f>(&self, _: Loan<'f>) -> SeededState {
        *self
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>> {
        u64::decode(bytes, source).map(SeededState::new)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        self.seed.write_image(image, tables);
    }

    fn add_pointees(_: &mut ViewTypes) {}
}

/// Hash function that another process does not know.
#[derive(Clone, Copy, Debug)]
pub struct UnknownState;

// SAFETY: nothing of it is read.
unsafe impl FarView for RandomState {
    type View<'f> = UnknownState;
    const NAME: &'static str = "RandomState";
    const LAYOUT: u64 = layout("RandomState", 0, 1, &[]);

    fn view<'f>(&self, _: Loan<'f>) -> UnknownState {
        UnknownState
    }

    fn decode<'f>(_: &[u8], _: ViewSource) -> Option<Self::View<'f>> {
        Some(UnknownState)
    }

    fn write_image(&self, _: &mut [u8], _: &mut NearTables) {}

    fn add_pointees(_: &mut ViewTypes) {}
}

#[cfg(test)]
mod tests {
    //! Guards against a hash that another build does not have, and against one that fills few buckets.
    use super::*;

    #[test]
    fn hashes_are_those_of_all_builds() {
        let hash = |seed, bytes: &[u8]| {
            let mut hasher = SeededState::new(seed).build_hasher();
            hasher.write(bytes);
            hasher.finish()
        };
        // The same by definition: fold((fold(seed ^ FIRST ^ 0, FIRST ^ 0)) ^ FIRST, SECOND).
        let empty = |seed: u64| fold(fold(seed ^ FIRST, FIRST) ^ FIRST, SECOND);
        assert_eq!([hash(0, b""), hash(7, b"")], [empty(0), empty(7)]);
        let texts: [&[u8]; 7] = [b"", b"\0", b"\0\0", b"a", b"\0\0\0\0\0\0\0\0", b"abcdefgh", b"abcdefghi"];
        let hashes: std::collections::BTreeSet<u64> = texts.iter().map(|bytes| hash(3, bytes)).collect();
        assert_eq!(hashes.len(), texts.len());
    }

    #[test]
    fn numbers_one_after_the_other_are_spread_over_all_low_bits() {
        for (seed, step) in [(0, 1), (1, 1), (2, 1 << 20), (3, 1 << 44)] {
            let mut counts = [0u32; 256];
            for number in 0..25_600u64 {
                let hash = crate::collections::flat_hash(&SeededState::new(seed), &(number * step).to_ne_bytes());
                counts[hash as usize % 256] += 1;
            }
            // 100 expected; the standard deviation is 10.
            assert!(counts.iter().all(|count| (50..160).contains(count)), "{seed} {step}: {counts:?}");
        }
    }
}
