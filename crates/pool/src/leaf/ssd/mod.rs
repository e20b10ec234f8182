//! Member `ssd`: pages in a file of this process, or on a block device.
//!
//! The file has no name, so it vanishes with the process, however that ends. A page that is written
//! goes to a free place and is only then *the* page (shadow paging), so a write that fails or comes
//! too late leaves the version before it. Places have room on the medium before anything is written
//! to them. Checksums stay in memory. See `docs/design/pool.md`.

mod clone;
mod config;
mod depth;
mod engine;
mod lane;

pub(crate) use clone::create as create_file;
pub(crate) use config::Config;

use crate::leaf::connection::HandshakeError;
use crate::leaf::shadow_store::{Medium, MediumCapacity, ShadowStore};
use crate::{Backend, CloneTicket, Health, Lane, PoolError};
use config::SsdIoMode;
use core::ops::Deref;
use core::sync::atomic::{AtomicBool, Ordering};
use farfield_os::disk::{self, FileKind};
use farfield_os::ring::Ring;
use lane::SsdLane;
use std::sync::Arc;

/// State that the backend and its lanes share.
struct Region {
    store: ShadowStore,
    config: Config,
    is_direct: bool,
    io: SsdIoMode,
    abandoned: AtomicBool,
}

impl Deref for Region {
    type Target = ShadowStore;
    fn deref(&self) -> &ShadowStore {
        &self.store
    }
}

/// Backend that keeps a region in a file or on a device.
pub(crate) struct SsdBackend {
    region: Arc<Region>,
}

impl SsdBackend {
    /// Creates a new, empty region of `pages` pages.
    pub(crate) fn new(server: u16, config: Config, pages: u64) -> Result<SsdBackend, HandshakeError> {
        let path = config.c_path();
        let is_device = match disk::kind(&path).map_err(PoolError::Os)? {
            FileKind::Folder => false,
            FileKind::Device if config.may_erase => true,
            FileKind::Device => {
                let text = "it is a block device, whose content would be lost: add device=erase, as in \
                            ssd:/dev/nvme1n1?device=erase";
                return Err(HandshakeError::Refused(text.into()));
            }
            _ => return Err(HandshakeError::Refused("it is neither a folder nor a block device".into())),
        };
        let (medium, bytes) = if is_device {
            let medium = Medium::block_device(disk::open_device(&path).map_err(PoolError::Os)?);
            let bytes = disk::device_bytes(medium.file);
            (medium, bytes)
        } else {
            clone::sweep(&path);
            let medium = Medium::file(clone::create(&path).map_err(PoolError::Os)?);
            let bytes = disk::file_system_bytes(medium.file).map(|bytes| bytes.min(disk::file_bytes_max()));
            (medium, bytes)
        };
        let room = MediumCapacity { bytes: bytes.map_err(PoolError::Os)?, begun: 0 };
        Ok(Self::over(server, config, medium, pages, room)?)
    }

    /// Creates the region over an open file.
    fn over(
        server: u16,
        config: Config,
        medium: Medium,
        pages: u64,
        room: MediumCapacity,
    ) -> Result<SsdBackend, PoolError> {
        let is_direct = disk::set_direct(medium.file).is_ok();
        let store = ShadowStore::new(server, medium, pages, config.size_bytes, room)?;
        let (io, abandoned) = (config.io, AtomicBool::new(false));
        Ok(SsdBackend { region: Arc::new(Region { store, config, is_direct, io, abandoned }) })
    }

    /// Claims the snapshot with this secret.
    pub(crate) fn claim(server: u16, config: Config, secret: u128) -> Result<SsdBackend, HandshakeError> {
        Ok(clone::claim(server, config, secret)?)
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
            SsdIoMode::Auto if Ring::open(self.region.medium.file, 1).is_err() => "pread, for io_uring is not allowed",
            SsdIoMode::Auto | SsdIoMode::Uring => "io_uring",
            SsdIoMode::Calls => "pread",
        };
        format!("{cache} the page cache, by {io}")
    }

    fn abandon(&self) {
        // Descriptors and memory are this process's own copies: they go when lanes and backend are
        // dropped.
        self.region.abandoned.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
