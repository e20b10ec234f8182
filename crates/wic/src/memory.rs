//! The bytes of a region where they are kept.

use crate::Fault;

/// The bytes of a region, as a server gives them to functions. Ranges lie inside the region and are at most [`crate::RANGE_BYTES_MAX`].
pub trait Memory {
    /// Bytes of the region.
    fn region_bytes(&self) -> u64;

    /// Copies bytes out, compared with their checksums.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Stores bytes.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// Does this while no function changes bytes of the region, wherever it runs. `work` reads and writes as otherwise, and waits for nothing.
    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault>;

    /// Nanoseconds of a clock that all who have this region share.
    fn clock(&self) -> u64;

    /// Nothing will be asked for a while.
    fn rest(&self) {}

    /// These bytes will be read soon: the processor may begin to bring them.
    fn announce(&self, _offset: u64, _len: usize) {}
}
