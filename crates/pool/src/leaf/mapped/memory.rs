//! Place of mapped memory: found, opened and mapped. It is that of a NUMA node, or that behind a
//! path.

use super::config::{Config, MemorySource, c_path};
use crate::PoolError;
use crate::leaf::connection::HandshakeError;
use crate::leaf::shadow_store::{Medium, MediumCapacity, ShadowStore};
use crate::leaf::ssd;
use farfield_os::disk::{self, FileKind};
use farfield_os::memfd::{Mapping, MappingAccess};
use farfield_os::{Errno, file, memfd, net, numa};
use std::os::fd::{BorrowedFd, IntoRawFd};

/// Kind of the memory, as far as it matters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Nature {
    Node(u32),
    /// File in a folder that no other process can find. `is_dax` says whether loads go to the
    /// medium.
    Private {
        is_dax: bool,
    },
    /// File of another owner, who could cut it.
    Named {
        is_dax: bool,
    },
    Device,
}

/// Memory, with the store of pages that are stored there.
pub(super) struct MappedMemory {
    pub(super) store: ShadowStore,
    pub(super) mapping: Mapping,
    pub(super) nature: Nature,
}

impl MappedMemory {
    /// Opens the memory for a region of `pages` pages.
    pub(super) fn open(server: u16, config: &Config, pages: u64) -> Result<MappedMemory, HandshakeError> {
        match &config.source {
            MemorySource::Node(node) => open_node(server, *node, config, pages),
            MemorySource::Path(path) => open_path(server, path, config, pages),
        }
    }

    fn over(
        server: u16,
        config: &Config,
        pages: u64,
        nature: Nature,
        medium: Medium,
        bytes: u64,
        align_bytes: u64,
    ) -> Result<MappedMemory, PoolError> {
        let store = ShadowStore::new(server, medium, pages, config.size_bytes, MediumCapacity { bytes, begun: 0 })?;
        let mapped_bytes = store.bytes().next_multiple_of(align_bytes);
        // Behind the end of a file there is nothing to load.
        if let Nature::Private { .. } = nature {
            disk::resize(store.medium.file, mapped_bytes).map_err(PoolError::Os)?;
        }
        // SAFETY: open as long as the medium.
        let fd = unsafe { BorrowedFd::borrow_raw(store.medium.file) };
        let mapping = Mapping::new(fd, mapped_bytes, MappingAccess::ReadWrite).map_err(PoolError::Os)?;
        Ok(MappedMemory { store, mapping, nature })
    }
}

fn refused<T>(text: String) -> Result<T, HandshakeError> {
    Err(HandshakeError::Refused(text))
}

fn open_node(server: u16, node: u32, config: &Config, pages: u64) -> Result<MappedMemory, HandshakeError> {
    let room = match numa::NodeMemory::open(node) {
        Err(Errno(libc::ENOENT)) => {
            return refused(format!(
                "there is no NUMA node {node}: /sys/devices/system/node/has_memory says which have memory"
            ));
        }
        room => room.map_err(PoolError::Os)?,
    };
    let bytes = room.total_bytes().map_err(PoolError::Os)?;
    if bytes == 0 {
        return refused(format!("NUMA node {node} has no memory"));
    }
    if config.size_bytes.is_some_and(|size| size > bytes) {
        return refused(format!("NUMA node {node} has {} MiB, and size= asks for more", bytes >> 20));
    }
    let file = memfd::create(c"farfield numa", bytes).map_err(PoolError::Os)?.into_raw_fd();
    let medium = Medium::node(net::lift(file).map_err(PoolError::Os)?, room);
    let place = MappedMemory::over(server, config, pages, Nature::Node(node), medium, bytes, 1)?;
    // SAFETY: the mapping made here.
    match unsafe { numa::bind(place.mapping.as_ptr() as usize, place.mapping.len(), node) } {
        Err(Errno(libc::EPERM)) => {
            refused("this process may not choose where its memory is (mbind): a container needs CAP_SYS_NICE".into())
        }
        Err(Errno(libc::EINVAL)) => refused(format!(
            "this process may not have memory of NUMA node {node}: see Mems_allowed_list in /proc/self/status"
        )),
        Err(Errno(libc::ENOSYS)) => refused("this kernel knows no NUMA nodes".into()),
        bound => Ok(bound.map(|()| place).map_err(PoolError::Os)?),
    }
}

fn open_path(server: u16, path: &str, config: &Config, pages: u64) -> Result<MappedMemory, HandshakeError> {
    let c_path = c_path(path);
    let kind = disk::kind(&c_path).map_err(PoolError::Os)?;
    let too_small = |bytes: u64| config.size_bytes.is_some_and(|size| size > bytes);
    match kind {
        FileKind::Folder => {
            let medium = Medium::file(ssd::create_file(&c_path).map_err(PoolError::Os)?);
            let bytes = disk::file_system_bytes(medium.file).map_err(PoolError::Os)?.min(disk::file_bytes_max());
            let nature = Nature::Private { is_dax: disk::is_dax(medium.file) };
            Ok(MappedMemory::over(server, config, pages, nature, medium, bytes, 1)?)
        }
        FileKind::File => {
            let medium = Medium::file(disk::open_file(&c_path).map_err(PoolError::Os)?);
            in_use(path, disk::lock(medium.file))?;
            let bytes = file::size(medium.file).unwrap_or(0);
            if too_small(bytes) {
                return refused(format!(
                    "the file has {} MiB, and size= asks for more: make it longer, as by truncate --size",
                    bytes >> 20
                ));
            }
            if !config.may_erase && has_content(medium.file)? {
                return refused(format!(
                    "what is in the file would be lost: add file=erase, as in dax:{path}?file=erase"
                ));
            }
            let nature = Nature::Named { is_dax: disk::is_dax(medium.file) };
            Ok(MappedMemory::over(server, config, pages, nature, medium, bytes, 1)?)
        }
        FileKind::Dax(_) if !config.may_erase => {
            refused(format!("what is on the device would be lost: add device=erase, as in dax:{path}?device=erase"))
        }
        FileKind::Dax(device) => {
            let medium = Medium::dax_device(
                net::lift(file::open(&c_path, libc::O_RDWR).map_err(PoolError::Os)?).map_err(PoolError::Os)?,
            );
            in_use(path, disk::lock(medium.file))?;
            let bytes = device.bytes / device.align_bytes * device.align_bytes;
            if too_small(bytes) {
                return refused(format!("the device has {} MiB, and size= asks for more", bytes >> 20));
            }
            Ok(MappedMemory::over(server, config, pages, Nature::Device, medium, bytes, device.align_bytes)?)
        }
        FileKind::Device => {
            refused("it is a block device, which a processor cannot load from: ssd: is for those".into())
        }
        FileKind::Other => refused("it is neither a folder, nor a file, nor a DAX device".into()),
    }
}

fn in_use(path: &str, locked: Result<(), Errno>) -> Result<(), HandshakeError> {
    match locked {
        Err(Errno(libc::EAGAIN)) => refused(format!(
            "another process has {path}: a file or a device serves one process that does not fork, a folder any number"
        )),
        other => Ok(other.map_err(PoolError::Os)?),
    }
}

fn has_content(file: i32) -> Result<bool, PoolError> {
    // SAFETY: the caller's, open.
    let fd = unsafe { BorrowedFd::borrow_raw(file) };
    match memfd::next_data(fd, 0) {
        Ok(data) => Ok(data.is_some()),
        Err(errno) => Err(PoolError::Os(errno)),
    }
}

impl MappedMemory {
    /// Describes the memory for people; a stand-in for the real thing says so.
    pub(super) fn how(&self) -> String {
        let cache = |is_dax: bool| match is_dax {
            true => "loads go to the medium (DAX)",
            false => "no DAX here: the page cache stands in for it",
        };
        match self.nature {
            Nature::Node(node) => {
                let processors = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist"));
                match processors.as_deref().map(str::trim) {
                    Ok("") => format!("node {node} is memory only"),
                    Ok(list) => format!("node {node} has processors ({list}): it stands in for a node of memory only"),
                    Err(_) => format!("memory of node {node}"),
                }
            }
            Nature::Private { is_dax } => format!("a file without a name; {}", cache(is_dax)),
            Nature::Named { is_dax } => cache(is_dax).to_owned(),
            Nature::Device => "a DAX device".to_owned(),
        }
    }
}
