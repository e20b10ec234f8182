//! Members `numa` and `dax`: pages in memory that the processor loads from, farther away than its
//! own. CXL expanders look like that, as a NUMA node without processors or as a DAX device.
//!
//! The store (`crate::leaf::shadow_store`) knows which page is in which place, as for `ssd`; bytes are
//! copied where `ssd` has transfers. See `docs/design/pool.md`.

mod config;
mod lane;
mod memory;
#[cfg(test)]
mod tests;

pub(crate) use config::Config;

use crate::leaf::connection::HandshakeError;
use crate::leaf::shadow_store::{NoSpace, READ_TRIES, ShadowStore};
use crate::unclaimed_snapshots::UnclaimedSnapshots;
use crate::{Backend, CloneTicket, Health, Lane, Mapped, PoolError};
use core::ops::Deref;
use core::sync::atomic::{Ordering, fence};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{PageId, checksum};
use farfield_os::sync::Mutex;
use farfield_os::{Errno, disk, file, serving};
use lane::MappedLane;
use memory::{MappedMemory, Nature};
use std::sync::Arc;

/// State that the backend and its lanes share.
struct Region {
    config: Config,
    memory: MappedMemory,
    zero_sum: u64,
}

impl Deref for Region {
    type Target = ShadowStore;
    fn deref(&self) -> &ShadowStore {
        &self.memory.store
    }
}

impl Region {
    fn new(server: u16, config: Config, pages: u64) -> Result<Region, HandshakeError> {
        let place = MappedMemory::open(server, &config, pages)?;
        Ok(Region { config, memory: place, zero_sum: checksum(&[0; PAGE_BYTES]) })
    }

    fn address(&self, place: u64) -> *mut u8 {
        let offset = place as usize * PAGE_BYTES;
        assert!(offset + PAGE_BYTES <= self.memory.mapping.len());
        // SAFETY: a whole page inside the mapping.
        unsafe { self.memory.mapping.as_ptr().add(offset) }
    }

    /// Checks whether the owner of a file that is not ours has cut it. A load from behind its end
    /// would be a signal and no error.
    fn is_cut(&self) -> bool {
        matches!(self.memory.nature, Nature::Named { .. })
            && file::size(self.medium.file).is_none_or(|bytes| bytes < self.memory.mapping.len() as u64)
    }

    /// Copies `page` into `bytes` and returns its checksum.
    fn load(&self, page: u64, bytes: &mut [u8]) -> Result<u64, PoolError> {
        assert_eq!(bytes.len(), PAGE_BYTES);
        for _ in 0..READ_TRIES {
            let Some(place) = self.places.get(page) else {
                bytes.fill(0);
                return Ok(self.zero_sum);
            };
            let sum = self.sum(place).load(Ordering::Relaxed);
            // SAFETY: a place with room, in a mapping that lives as long as the region. If it
            // becomes another page's meanwhile, the checksum and the look at the table below show
            // it.
            unsafe { core::ptr::copy_nonoverlapping(self.address(place), bytes.as_mut_ptr(), PAGE_BYTES) };
            fence(Ordering::Acquire);
            if self.places.get(page) == Some(place) && checksum(bytes) == sum {
                return Ok(sum);
            }
        }
        Err(self.corrupt(page))
    }

    /// Stores `bytes`, whole pages with these checksums, as the pages from `page` on. For lack of
    /// room it stores all or none. `rover` is where the last pages went.
    fn store(&self, page: u64, bytes: &[u8], sums: &[u64], rover: &mut u64) -> Result<(), MappedStoreError> {
        let count = sums.len() as u64;
        let mut admitted = self.claim(page, count)?;
        let (mut done, mut result) = (0, Ok(()));
        while done < count && result.is_ok() {
            let (place, taken) = self.slots.take(rover, count - done);
            let run = done as usize..(done + taken) as usize;
            result = self.put(place, &bytes[run.start * PAGE_BYTES..run.end * PAGE_BYTES]);
            match result {
                Ok(()) => {
                    for (next, sum) in (0..).zip(&sums[run]) {
                        self.sum(place + next).store(*sum, Ordering::Relaxed);
                        self.publish(page + done + next, place + next, &mut admitted);
                    }
                }
                Err(_) => self.slots.give(place, taken),
            }
            done += taken;
        }
        self.slots.unclaim(count - done);
        self.dismiss(admitted);
        result.map_err(|errno| match errno.0 {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::ENOMEM => MappedStoreError::Full,
            _ => MappedStoreError::Os(errno),
        })
    }

    /// Copies whole pages to places that are the caller's.
    fn put(&self, place: u64, bytes: &[u8]) -> Result<(), Errno> {
        if self.memory.nature == Nature::Device {
            // SAFETY: places of the caller's, inside the mapping; whoever still reads them as
            // another page sees that they are not.
            unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address(place), bytes.len()) };
            return Ok(());
        }
        // Calls are used and not stores: lack of memory is an error then and no signal.
        let (mut done, offset) = (0, PageId(place).offset());
        while done < bytes.len() {
            let rest = &bytes[done..];
            // SAFETY: the rest of the slice stays as it is.
            match unsafe { disk::write_at(self.medium.file, rest.as_ptr() as usize, rest.len(), offset + done as u64) }
            {
                Ok(0) => return Err(Errno(libc::ENOSPC)),
                Ok(written) => done += written,
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Copies all pages to other memory of the same kind.
    fn duplicate(&self) -> Result<Region, PoolError> {
        let reason =
            "a region in a file or on a device cannot be cloned: give a folder, or numa:, where processes fork";
        if matches!(self.memory.nature, Nature::Named { .. } | Nature::Device) {
            return Err(PoolError::Refused { server: self.server, reason });
        }
        let copy = Region::new(self.server, self.config.clone(), self.pages).map_err(|error| match error {
            HandshakeError::Pool(error) => error,
            _ => {
                PoolError::Refused { server: self.server, reason: "no second memory of the same kind could be opened" }
            }
        })?;
        let (mut bytes, mut rover, mut result) = ([0; PAGE_BYTES], 0, Ok(()));
        let walked = self.places.each(0, self.pages, |page| {
            let Some(place) = self.places.get(page) else { return };
            if result.is_err() {
                return;
            }
            // A page that does not match its checksum is corrupt for the clone as for the original,
            // which finds out when it reads.
            // SAFETY: as in `load`; the caller has no operation in flight.
            unsafe { core::ptr::copy_nonoverlapping(self.address(place), bytes.as_mut_ptr(), PAGE_BYTES) };
            let sum = self.sum(place).load(Ordering::Relaxed);
            result = copy.store(page, &bytes, &[sum], &mut rover).map_err(|error| error.into_pool(self));
        });
        walked.map_err(PoolError::Os)?;
        result.map(|()| copy)
    }
}

/// Reason for which pages were not stored.
enum MappedStoreError {
    /// The places for new versions are in use by others at the moment.
    Busy,
    /// There is no room.
    Full,
    Os(Errno),
}

impl MappedStoreError {
    /// Returns the error for a caller that will not try again, because others have no places
    /// either, or have had them for too long.
    fn into_pool(self, region: &Region) -> PoolError {
        match self {
            MappedStoreError::Busy | MappedStoreError::Full => region.full(),
            MappedStoreError::Os(errno) => PoolError::Os(errno),
        }
    }
}

impl From<NoSpace> for MappedStoreError {
    fn from(reason: NoSpace) -> MappedStoreError {
        match reason {
            NoSpace::Busy => MappedStoreError::Busy,
            NoSpace::Os(errno) => MappedStoreError::Os(errno),
            NoSpace::Full => MappedStoreError::Full,
        }
    }
}

/// Unclaimed snapshots, with room for four of the largest pool. Parent and child of a `fork` share
/// the memory.
static SNAPSHOTS: Mutex<UnclaimedSnapshots<Region, { 4 * CloneTicket::SERVERS_MAX }>> =
    Mutex::new(UnclaimedSnapshots::new());

fn take_snapshot(secret: u128) -> Option<Region> {
    SNAPSHOTS.lock().take(secret)
}

impl CloneTicket {
    /// Drops what this process keeps for the ticket. Called when a child of `fork` has the ticket
    /// and this process does not need it any more.
    pub fn forget(&self) {
        self.secrets.iter().for_each(|secret| drop(take_snapshot(*secret)));
    }
}

/// Backend that keeps a region in memory that the processor loads from.
pub(crate) struct MappedBackend {
    region: Arc<Region>,
}

impl MappedBackend {
    /// Creates a new, empty region of `pages` pages.
    pub(crate) fn new(server: u16, config: Config, pages: u64) -> Result<MappedBackend, HandshakeError> {
        Ok(MappedBackend { region: Arc::new(Region::new(server, config, pages)?) })
    }

    /// Claims the snapshot with this secret.
    pub(crate) fn claim(server: u16, secret: u128) -> Result<MappedBackend, PoolError> {
        let reason = "the ticket is unknown, used or expired";
        let mut region = take_snapshot(secret).ok_or(PoolError::Refused { server, reason })?;
        region.memory.store.server = server;
        Ok(MappedBackend { region: Arc::new(region) })
    }
}

impl Backend for MappedBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(MappedLane::new(self.region.clone())))
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        // A file of another owner is looked at before each load.
        let is_ours = !matches!(self.region.memory.nature, Nature::Named { .. });
        is_ours.then_some(self)
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let copy = self.region.duplicate()?;
        let mut secret = [0; 16];
        serving::fill_random(&mut secret).map_err(PoolError::Os)?;
        // Zero means "none".
        let secret = u128::from_le_bytes(secret) | 1;
        let old = SNAPSHOTS.lock().put(secret, copy);
        drop(old);
        Ok(CloneTicket::of_leaf(secret))
    }

    fn pages(&self) -> u64 {
        self.region.pages
    }

    fn health(&self) -> Health {
        Health::Good
    }

    fn how(&self) -> String {
        self.region.memory.how()
    }

    fn abandon(&self) {
        // Memory and descriptors are this process's own copies: they go when lanes and backend are
        // dropped.
    }
}

impl Mapped for MappedBackend {
    fn page(&self, page: PageId) -> Option<*const u8> {
        let region = &self.region;
        assert!(page.0 < region.pages, "page {} outside a region of {} pages", page.0, region.pages);
        region.places.get(page.0).map(|place| region.address(place).cast_const())
    }
}
