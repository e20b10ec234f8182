//! The bytes of a region where they are kept.

use crate::Fault;

/// The bytes of a region, as a server gives them to functions. Ranges lie inside the region and are at most [`crate::RANGE_BYTES_MAX`].
pub trait Memory {
    /// Bytes of the region.
    fn region_bytes(&self) -> u64;

    /// Copies bytes out, compared with their checksums.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Copies out as many values of `each` bytes as there are offsets, none of which goes beyond the end of its page, as they are: nothing is compared with a
    /// checksum before [`Memory::matches`] says so.
    fn load(&self, offsets: &[u64], each: usize, into: &mut [u8]) -> Result<(), Fault> {
        offsets.iter().zip(into.chunks_exact_mut(each)).try_for_each(|(offset, into)| self.read(*offset, into))
    }

    /// The checksums that pages should have, from the one at this offset on.
    fn sums(&self, _offset: u64, _into: &mut [u64]) -> Result<(), Fault> {
        Ok(())
    }

    /// Do these pages match the checksums that they [should have had](Memory::sums), and should still have? Then what was loaded of them in between is what
    /// was stored.
    fn matches(&self, _offset: u64, _sums: &[u64]) -> Result<bool, Fault> {
        Ok(true)
    }

    /// Stores bytes.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Does this while no function changes bytes of the region, wherever it runs. `work` reads and writes as otherwise, and waits for nothing.
    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault>;

    /// Nanoseconds of a clock that all who have this region share.
    fn clock(&self) -> u64;

    /// Nothing will be asked for a while.
    fn rest(&self) {}

    /// These ranges, offsets and lengths, will be read soon: the processor may begin to bring them.
    fn announce(&self, _ranges: &mut dyn Iterator<Item = (u64, usize)>) {}
}
