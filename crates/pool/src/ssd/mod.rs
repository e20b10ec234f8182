//! Member `ssd`: pages in a file of this process, or on a block device.
//!
//! The file has no name, so it vanishes with the process, however that ends. A page that is written goes to a free place and is only then
//! *the* page, so that a write that fails or comes too late leaves the version before it. Places have room on the medium before anything
//! is written to them. Checksums stay in memory. See `docs/design/pool.md`.

mod clone;
mod config;
mod depth;
mod engine;
mod lane;
mod slots;

pub(crate) use config::Config;
pub(crate) use slots::{mask, run_of};

use crate::connection::HandshakeError;
use crate::table::{PageTable, Words};
use crate::{Backend, CloneTicket, Health, Lane, PoolError};
use config::Io;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::disk::{self, Kind};
use farfield_os::ring::Ring;
use farfield_os::{Errno, file};
use lane::SsdLane;
use slots::Slots;
use std::sync::Arc;

/// Most pages of a region, and most places.
const PAGES_MAX: u64 = 1 << 32;
/// Places beyond the capacity, for new versions of pages that are stored: so many, and one in 64.
const SPARE: u64 = 1024;
/// Places that new pages leave to new versions, at most.
const MARGIN: u64 = 256;
/// Fewest places of a region.
const PLACES_MIN: u64 = 1024;

/// What backend and lanes share.
struct Region {
    server: u16,
    config: Config,
    file: i32,
    pages: u64,
    /// Most pages that may be stored.
    capacity: u64,
    /// Places beyond the capacity, and how many of them new pages leave alone.
    spare: u64,
    margin: u64,
    /// Pages that are stored, or about to be.
    stored: AtomicU64,
    places: PageTable,
    /// The checksum of what is in each place.
    sums: Words<AtomicU64>,
    slots: Slots,
    is_direct: bool,
    io: Io,
    abandoned: AtomicBool,
}

impl Region {
    fn check(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        match page.0.checked_add(count) {
            Some(end) if end <= self.pages => Ok(()),
            _ => Err(PoolError::Refused { server: self.server, reason: "pages outside the region" }),
        }
    }

    fn full(&self) -> PoolError {
        PoolError::PoolFull { server: self.server }
    }

    /// Room for `count` pages more.
    fn admit(&self, count: u64) -> Result<(), PoolError> {
        let more = |stored: u64| (stored + count <= self.capacity).then_some(stored + count);
        let admitted = self.stored.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        admitted.map(drop).map_err(|_| self.full())
    }

    fn dismiss(&self, count: u64) {
        self.stored.fetch_sub(count, Ordering::Relaxed);
    }

    fn sum(&self, place: u64) -> &AtomicU64 {
        self.sums.at(place)
    }

    fn discard(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        self.check(page, count)?;
        let end = page.0 + count;
        // Neighbouring places go back together.
        let (mut first, mut run) = (0, 0);
        let give = |first: u64, run: u64| {
            if run > 0 {
                self.slots.give(first, run);
                self.slots.trim(self.file, first, run);
                self.dismiss(run);
            }
        };
        let walked = self.places.each(page.0, end, |page| {
            let Some(place) = self.places.set(page, None) else { return };
            if place == first + run && run > 0 {
                run += 1;
            } else {
                give(first, run);
                (first, run) = (place, 1);
            }
        });
        give(first, run);
        walked.and_then(|()| self.places.forget(page.0, end)).map_err(PoolError::Os)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        file::close(self.file);
    }
}

/// A region in a file or on a device.
pub(crate) struct SsdBackend {
    region: Arc<Region>,
}

impl SsdBackend {
    /// A new, empty region of `pages` pages.
    pub(crate) fn new(server: u16, config: Config, pages: u64) -> Result<SsdBackend, HandshakeError> {
        let path = config.c_path();
        let is_device = match disk::kind(&path).map_err(PoolError::Os)? {
            Kind::Folder => false,
            Kind::Device if config.may_erase => true,
            Kind::Device => {
                let text = "it is a block device, whose content would be lost: add device=erase, as in ssd:/dev/nvme1n1?device=erase";
                return Err(HandshakeError::Refused(text.into()));
            }
            Kind::Other => return Err(HandshakeError::Refused("it is neither a folder nor a block device".into())),
        };
        let (file, room_bytes) = if is_device {
            let file = disk::open_device(&path).map_err(PoolError::Os)?;
            (file, disk::device_bytes(file))
        } else {
            clone::sweep(&path);
            let file = create(&config).map_err(PoolError::Os)?;
            (file, disk::file_system_bytes(file).map(|bytes| bytes.min(disk::file_bytes_max())))
        };
        let room_bytes = room_bytes.inspect_err(|_| file::close(file)).map_err(PoolError::Os)?;
        Ok(Self::over(server, config, file, pages, Room { bytes: room_bytes, begun: 0, is_device })?)
    }

    /// The region over an open file.
    fn over(server: u16, config: Config, file: i32, pages: u64, room: Room) -> Result<SsdBackend, PoolError> {
        let room_pages = (room.bytes / PAGE_BYTES as u64).min(PAGES_MAX) / 64 * 64;
        let wanted = config.size_bytes.unwrap_or(room.bytes).min(room.bytes) / PAGE_BYTES as u64;
        let most = (wanted + SPARE + wanted / 64).next_multiple_of(64).min(room_pages).max(room.begun);
        let capacity = wanted.min(most - most / 65 - most.min(SPARE) / 4);
        let (spare, margin) = (most - capacity, MARGIN.min((most - capacity) / 2));
        let is_direct = disk::set_direct(file).is_ok();
        let refuse = |reason| {
            file::close(file);
            Err(PoolError::Refused { server, reason })
        };
        if pages > PAGES_MAX {
            return refuse("the region is larger than 16 TiB");
        }
        if most < PLACES_MIN {
            return refuse("its folder or device has less than 4 MiB");
        }
        let tables = || {
            Ok::<_, Errno>((PageTable::new(pages)?, Words::new(most)?, Slots::new(most, room.begun, room.is_device)?))
        };
        let (places, sums, slots) = tables().inspect_err(|_| file::close(file)).map_err(PoolError::Os)?;
        let region = Region {
            server,
            io: config.io,
            config,
            file,
            pages,
            capacity,
            spare,
            margin,
            stored: AtomicU64::new(0),
            places,
            sums,
            slots,
            is_direct,
            abandoned: AtomicBool::new(false),
        };
        Ok(SsdBackend { region: Arc::new(region) })
    }

    /// The snapshot with this secret.
    pub(crate) fn claim(server: u16, config: Config, secret: u128) -> Result<SsdBackend, HandshakeError> {
        Ok(clone::claim(server, config, secret)?)
    }
}

/// What there is to begin with.
struct Room {
    /// Most that the file may have.
    bytes: u64,
    /// Places that have room and something in them.
    begun: u64,
    is_device: bool,
}

/// A file in the folder that nobody else finds.
fn create(config: &Config) -> Result<i32, Errno> {
    match disk::create_unnamed(&config.c_path()) {
        Err(Errno(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) => {
            let name = clone::name(config, clone::new_secret()?);
            let file = disk::create(&name)?;
            disk::unlink(&name)?;
            Ok(file)
        }
        other => other,
    }
}

impl Backend for SsdBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        Ok(Box::new(SsdLane::new(self.region.clone())?))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        Ok(CloneTicket::of_leaf(clone::make(&self.region)?))
    }

    fn pages(&self) -> u64 {
        self.region.pages
    }

    fn health(&self) -> Health {
        Health::Good
    }

    fn how(&self) -> String {
        let cache = if self.region.is_direct { "past" } else { "through" };
        let io = match self.region.io {
            Io::Auto if Ring::open(self.region.file, 1).is_err() => "pread, for io_uring is not allowed",
            Io::Auto | Io::Uring => "io_uring",
            Io::Calls => "pread",
        };
        format!("{cache} the page cache, by {io}")
    }

    fn abandon(&self) {
        // Descriptors and memory are this process's own copies: they go when lanes and backend are dropped.
        self.region.abandoned.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
