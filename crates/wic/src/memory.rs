//! The bytes of a region where they are kept.

use crate::Fault;

/// The bytes of a region, as a server gives them to functions. Ranges lie inside the region and
/// have at most [`crate::RANGE_BYTES_MAX`] bytes.
pub trait Memory {
    /// Returns the size of the region in bytes.
    fn region_bytes(&self) -> u64;

    /// Copies bytes out after comparing their pages with the checksums.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Copies out one value of `each` bytes per offset; none goes beyond the end of its page.
    /// Nothing is compared with a checksum until [`Memory::matches`] does so.
    fn load(&self, offsets: &[u64], each: usize, into: &mut [u8]) -> Result<(), Fault> {
        offsets.iter().zip(into.chunks_exact_mut(each)).try_for_each(|(offset, into)| self.read(*offset, into))
    }

    /// Reads the checksums that pages should have, from the one at this offset on.
    fn sums(&self, _offset: u64, _into: &mut [u64]) -> Result<(), Fault> {
        Ok(())
    }

    /// Checks whether these pages match the checksums that they [should have had](Memory::sums),
    /// and should still have. Then the bytes that were loaded from them in between are those that
    /// were stored.
    fn matches(&self, _offset: u64, _sums: &[u64]) -> Result<bool, Fault> {
        Ok(true)
    }

    /// Stores bytes.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Runs `work` while no function changes bytes of the region, wherever it runs. `work` reads
    /// and writes as usual, and does not wait.
    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault>;

    /// Returns the nanoseconds of a clock that all users of this region share.
    fn clock(&self) -> u64;

    /// Hints that no access will come for a while.
    fn rest(&self) {}

    /// Hints that each function that can go on has had a turn, whether it accessed anything or not.
    fn turn(&self) {}

    /// Hints that these ranges, offsets and lengths, will be read soon, so that the processor can
    /// prefetch them.
    fn announce(&self, _ranges: &mut dyn Iterator<Item = (u64, usize)>) {}
}
