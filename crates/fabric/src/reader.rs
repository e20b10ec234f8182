//! Reader: the active side, which reads the windows of a station.

use crate::domain::{FabricDomain, FabricError, Registration, Use};
use crate::endpoint::{COMPLETIONS_MAX, FabricEndpoint};
use crate::provider::Provider;
use crate::shim;
use farfield_os::memory;
use std::net::IpAddr;
use std::sync::Arc;

/// Outcome of an attempt to begin a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Post {
    /// The transfer has begun.
    Begun,
    /// The transfer has not begun: poll, then try again.
    Later,
}

/// Most parts of one transfer.
pub const PARTS_MAX: usize = 4;

/// Part of a transfer: bytes from an offset in a window to one in the reader's own memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferPart {
    /// Offset in the landing at which it ends.
    pub landing: usize,
    /// Number of bytes.
    pub bytes: usize,
    /// Address at which it begins, counted as the window's base is.
    pub remote: u64,
    /// Key of the window.
    pub key: u64,
}

/// Transfer that has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferCompletion {
    /// Context that was given to [`StationReader::post`].
    pub context: u64,
    /// Outcome: `Ok` if all bytes arrived.
    pub result: Result<(), FabricError>,
}

/// Memory where transfers end: its own mapping, which goes after the endpoint.
#[derive(Debug)]
struct LandingBuffer {
    start: usize,
    bytes: usize,
}

impl Drop for LandingBuffer {
    fn drop(&mut self) {
        // SAFETY: mapped in `StationReader::open` with this length, and nobody is left who could touch it
        // (order of fields there).
        let _ = unsafe { memory::munmap(self.start, self.bytes) };
    }
}

/// Endpoint that reads from one station into memory of its own.
#[derive(Debug)]
pub struct StationReader {
    // The order of these fields is the order in which they go: first the transfers, then the memory
    // where they end.
    endpoint: FabricEndpoint,
    registration: Registration,
    landing: LandingBuffer,
    station: u64,
    parts_max: usize,
}

impl StationReader {
    /// Opens a reader for the station with this address, on the machine `node`. Transfers end in
    /// `landing_bytes` of memory.
    pub fn open(
        provider: Provider,
        node: IpAddr,
        station: &[u8],
        landing_bytes: usize,
    ) -> Result<StationReader, FabricError> {
        let domain = Arc::new(FabricDomain::open(provider, Some(node), false)?);
        let start = memory::map_anonymous(landing_bytes).map_err(|errno| FabricError(errno.0))?;
        let landing = LandingBuffer { start, bytes: landing_bytes };
        // SAFETY: the landing goes last (order of fields below); if this function fails, nothing
        // was begun.
        let registration = unsafe { Registration::new(&domain, start as *mut u8, landing_bytes, 1, Use::Landing) }?;
        let endpoint = FabricEndpoint::open(domain)?;
        let station = endpoint.peer(station)?;
        let parts_max = endpoint.parts_max().min(PARTS_MAX);
        Ok(StationReader { endpoint, registration, landing, station, parts_max })
    }

    /// Returns the name of the provider as libfabric resolved it.
    pub fn provider(&self) -> String {
        self.endpoint.domain().provider()
    }

    /// Returns the most parts that one transfer has room for, which is never more than
    /// [`PARTS_MAX`].
    pub fn parts_max(&self) -> usize {
        self.parts_max
    }

    /// Begins one transfer of all these parts. `context` comes back when it has ended. Panics if
    /// there are no parts, more than [`StationReader::parts_max`], or one outside of the landing.
    pub fn post(&self, parts: &[TransferPart], context: u64) -> Result<Post, FabricError> {
        assert!(!parts.is_empty() && parts.len() <= self.parts_max);
        let none = shim::RawTransferPart { into: core::ptr::null_mut(), bytes: 0, remote: 0, key: 0 };
        let mut all = [none; PARTS_MAX];
        for (out, TransferPart { landing, bytes, remote, key }) in all.iter_mut().zip(parts) {
            assert!(*landing <= self.landing.bytes && *bytes <= self.landing.bytes - landing);
            let into = (self.landing.start + landing) as *mut core::ffi::c_void;
            *out = shim::RawTransferPart { into, bytes: *bytes, remote: *remote, key: *key };
        }
        let all = all.get(..parts.len()).unwrap_or_default();
        // SAFETY: inside the landing, which stays until the endpoint was closed.
        let posted = unsafe { self.endpoint.read(all, &self.registration, self.station, context) };
        match posted {
            Ok(()) => Ok(Post::Begun),
            Err(FabricError(libc::EAGAIN)) => Ok(Post::Later),
            Err(error) => Err(error),
        }
    }

    /// Calls `ended` for each transfer that has ended, a few at most, and returns their number.
    pub fn poll(&self, mut ended: impl FnMut(TransferCompletion)) -> Result<usize, FabricError> {
        let mut completions = [shim::RawCompletion::default(); COMPLETIONS_MAX];
        let count = self.endpoint.poll(&mut completions)?;
        for shim::RawCompletion { context, error } in completions.iter().take(count) {
            let result = if *error == 0 { Ok(()) } else { Err(FabricError(*error)) };
            ended(TransferCompletion { context: *context, result });
        }
        Ok(count)
    }

    /// Copies bytes that landed. The caller knows that no transfer to this range is under way; if
    /// one is, the copied bytes are any mixture.
    pub fn copy(&self, landing: usize, into: &mut [u8]) {
        assert!(landing <= self.landing.bytes && into.len() <= self.landing.bytes - landing);
        // SAFETY: inside the landing, which nobody else has a reference to. Raw copy, because a
        // transfer may be writing there.
        unsafe {
            core::ptr::copy_nonoverlapping((self.landing.start + landing) as *const u8, into.as_mut_ptr(), into.len())
        }
    }

    /// Returns a descriptor that becomes readable when there is something to poll for; `None` if
    /// there is already.
    pub fn sleeps_on(&self) -> Option<i32> {
        self.endpoint.sleeps_on()
    }
}
