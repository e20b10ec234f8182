//! Linear hashing: which bucket a hash belongs to, in a table that grows one bucket at a time; and
//! a bucket's word.
//!
//! Bucket *b* of depth *d* has the hashes whose lower *d* bits are *b*. A table grows by one bucket
//! by splitting the bucket that has the hashes of the new one until then; both then use one bit
//! more. So a table can have every size, and no growth stops other threads (Litwin, VLDB'80).
//!
//! Read from the other end, the hashes of a bucket are an interval, and a split divides it. A walk
//! over the intervals from left to right meets everything once, whatever is split meanwhile.

use crate::cast::low_u32;

/// Returns the bucket of `hash` in a table of `count` buckets.
#[inline]
pub fn bucket_of(hash: u32, count: u32) -> u32 {
    debug_assert!(count > 0);
    // The smallest power of two that is not below `count`, minus one; the shift is below 32 because of the `| 1`.
    let mask = u32::MAX >> ((count - 1) | 1).leading_zeros();
    let bucket = hash & mask;
    if bucket < count { bucket } else { hash & mask >> 1 }
}

/// Returns the depth of a bucket in a table of `count` buckets.
pub fn depth_of(bucket: u32, count: u32) -> u32 {
    assert!(bucket < count);
    // With this depth, every bucket of the table has its own number.
    let depth = u32::BITS - (count - 1).leading_zeros();
    let buddy = u64::from(bucket) + (1 << depth >> 1);
    if depth > 0 && bucket < 1 << (depth - 1) && buddy >= u64::from(count) { depth - 1 } else { depth }
}

/// Returns the bucket that is split to make bucket number `count`, and the depth of both
/// afterwards.
pub fn split_for(count: u32) -> (u32, u32) {
    assert!(count > 0);
    let depth = u32::BITS - count.leading_zeros();
    (count & !(1 << (depth - 1)), depth)
}

/// Checks whether `hash` belongs to the bucket of this number and depth.
#[inline]
pub fn has(bucket: u32, depth: u32, hash: u32) -> bool {
    low_bits(hash, depth) == bucket
}

/// Returns the lower `depth` bits of a hash: the number of its bucket, if that bucket has this
/// depth.
#[inline]
pub fn low_bits(hash: u32, depth: u32) -> u32 {
    hash & low_u32((1u64 << depth) - 1)
}

/// Returns the position at which a walk over the hashes goes on after a bucket of this depth that
/// began at `at`. Positions are hashes with their bits reversed. `None` at the end.
pub fn after(at: u32, depth: u32) -> Option<u32> {
    let step = 1u64 << (u32::BITS - depth);
    let next = (u64::from(at) / step + 1) * step;
    u32::try_from(next).ok()
}

/// Word of a bucket. Only the holder of its lock changes it.
/// ```text
///  31            9 8      3   2      1       0
/// +---------------+--------+------+-------+------+
/// | version       | depth  |linked|moving |locked|
/// +---------------+--------+------+-------+------+
/// ```
///
/// While entries *move*, a search may miss an entry that is in the table. A search that found
/// nothing looks at the word again. If entries moved then, or the version is another, the search
/// proves nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BucketWord(pub u32);

const LOCKED: u32 = 1;
const MOVING: u32 = 1 << 1;
const LINKED: u32 = 1 << 2;
const DEPTH_SHIFT: u32 = 3;
const DEPTH_MASK: u32 = 0x3F << DEPTH_SHIFT;
const VERSION_ONE: u32 = 1 << 9;

impl BucketWord {
    /// Creates the word of an empty bucket.
    pub fn new(depth: u32) -> BucketWord {
        assert!(depth <= u32::BITS);
        BucketWord(depth << DEPTH_SHIFT)
    }

    /// Returns the number of hash bits that are the same for all entries.
    #[inline]
    pub fn depth(self) -> u32 {
        (self.0 & DEPTH_MASK) >> DEPTH_SHIFT
    }

    /// Checks whether the last place is a link to another bucket.
    #[inline]
    pub fn is_linked(self) -> bool {
        self.0 & LINKED != 0
    }

    /// Returns the word of a bucket that continues another one and is itself continued.
    pub fn as_linked(self) -> BucketWord {
        BucketWord(self.0 | LINKED)
    }

    /// Checks whether a thread is changing the bucket.
    #[inline]
    pub fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// Locks the bucket for the caller; `None` if it is locked already.
    pub fn lock(self) -> Option<BucketWord> {
        (!self.is_locked()).then_some(BucketWord(self.0 | LOCKED))
    }

    /// Unlocks the bucket, with everything where it was.
    pub fn unlock(self) -> BucketWord {
        assert!(self.is_locked() && self.0 & MOVING == 0);
        BucketWord(self.0 & !LOCKED)
    }

    /// Marks that the owner is about to move entries.
    pub fn moving(self) -> BucketWord {
        assert!(self.is_locked());
        BucketWord(self.0 | MOVING)
    }

    /// Marks that the owner has moved entries. The bucket stays locked and has a new version.
    pub fn moved(self, depth: u32, linked: bool) -> BucketWord {
        assert!(self.0 & MOVING != 0 && depth <= u32::BITS);
        let kept = self.0 & !(MOVING | LINKED | DEPTH_MASK);
        BucketWord(kept.wrapping_add(VERSION_ONE) | depth << DEPTH_SHIFT | if linked { LINKED } else { 0 })
    }

    /// Checks whether a search between these two looks saw every entry that was there all the time.
    #[inline]
    pub fn proves_absence(self, later: BucketWord) -> bool {
        self.0 & MOVING == 0 && (self.0 ^ later.0) & !LOCKED == 0
    }
}

#[cfg(test)]
mod tests {
    //! Guards against hashes without a bucket, with two, or lost in a split or on a walk.
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    /// Depths of a table that was grown to this size.
    fn grown(count: u32) -> Vec<u32> {
        let mut depths = vec![0];
        while (depths.len() as u32) < count {
            let (source, depth) = split_for(depths.len() as u32);
            assert_eq!(depths[source as usize] + 1, depth);
            depths[source as usize] = depth;
            depths.push(depth);
        }
        depths
    }

    fn hashes() -> impl Iterator<Item = u32> {
        (0..2000u32).map(|n| n.wrapping_mul(0x9E37_79B9)).chain([0, 1, u32::MAX, 1 << 31])
    }

    #[test]
    fn every_hash_has_one_bucket_and_a_split_moves_it_only_to_the_new_one() {
        for count in 1..200 {
            let depths = grown(count);
            for (bucket, depth) in depths.iter().enumerate() {
                assert_eq!(depth_of(bucket as u32, count), *depth, "bucket {bucket} of {count}");
            }
            for hash in hashes() {
                let bucket = bucket_of(hash, count);
                let owners = (0..count).filter(|bucket| has(*bucket, depths[*bucket as usize], hash));
                assert_eq!(owners.collect::<Vec<_>>(), [bucket]);
                let next = bucket_of(hash, count + 1);
                assert!(next == bucket || next == count && bucket == split_for(count).0);
            }
        }
        assert_eq!(bucket_of(u32::MAX, 1 << 31), u32::MAX >> 1);
        assert_eq!(depth_of(0, u32::MAX), 32);
    }

    #[test]
    fn a_walk_meets_every_bucket_once_also_while_the_table_grows() {
        for (before, later) in [(1, 1), (1, 50), (7, 7), (7, 100), (64, 65), (64, 64)] {
            let all: Vec<u32> = hashes().collect();
            let mut met = vec![0; all.len()];
            let (mut at, mut steps) = (Some(0u32), 0);
            while let Some(position) = at {
                let count = if steps < before / 2 { before } else { later };
                let bucket = bucket_of(position.reverse_bits(), count);
                let depth = depth_of(bucket, count);
                for (hash, met) in all.iter().zip(&mut met) {
                    *met += u32::from(has(bucket, depth, *hash));
                }
                at = after(position, depth);
                steps += 1;
            }
            assert!(met.iter().all(|met| *met == 1), "{before} then {later}");
            assert!(steps >= before && steps <= later, "{steps} steps for {before} to {later} buckets");
        }
    }

    #[test]
    fn a_search_beside_a_move_proves_nothing() {
        for depth in [0, 5, 32] {
            let before = BucketWord::new(depth);
            let locked = before.lock().unwrap();
            assert_eq!((locked.lock(), locked.depth()), (None, depth));
            assert!(before.proves_absence(locked) && locked.proves_absence(locked.unlock()));
            let moving = locked.moving();
            assert!(!before.proves_absence(moving) && !moving.proves_absence(moving));
            let mut word = before;
            for linked in [true, false] {
                let moved = word.lock().unwrap().moving().moved(depth, linked).unlock();
                assert!(!before.proves_absence(moved) && !moving.proves_absence(moved));
                assert_eq!((moved.is_linked(), moved.is_locked(), moved.depth()), (linked, false, depth));
                word = moved;
            }
        }
    }
}
