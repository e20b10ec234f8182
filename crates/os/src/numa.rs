//! NUMA nodes: memory bound to one of them, and how much a node has left.

use crate::errno::{Errno, Result};
use crate::file;
use crate::gate::syscall;
use crate::net::lift;

/// Greatest number of nodes that the kernel can be built for.
const NODES_MAX: usize = 1024;
/// Part of a node's memory that is left alone: one in this many, within these bounds in bytes.
const LEFT_SHARE: u64 = 64;
const LEFT_MIN: u64 = 16 << 20;
const LEFT_MAX: u64 = 1 << 30;

/// Binds the memory of this range to `node` from now on. For a shared mapping that holds for its
/// file, whichever process touches it. EINVAL if the node has no memory or this process may not use
/// it.
///
/// # Safety
/// The range is a mapping of the caller's.
pub unsafe fn bind(address: usize, len: usize, node: u32) -> Result<()> {
    let mut nodes = [0u64; NODES_MAX / 64];
    let word = nodes.get_mut(node as usize / 64).ok_or(Errno(libc::EINVAL))?;
    *word = 1 << (node % 64);
    // The kernel subtracts one from the number of bits.
    let args = [address, len, libc::MPOL_BIND as usize, nodes.as_ptr() as usize, NODES_MAX + 1, 0];
    // SAFETY: the kernel reads that many bits; where memory comes from changes nothing for its
    // users.
    unsafe { syscall(libc::SYS_mbind, args) }.map(drop)
}

/// Returns the node that gave the memory at this address.
pub fn node_at(address: *const u8) -> Result<u32> {
    const NODE_OF_ADDRESS: usize = 1 | 2;
    let mut node = 0u32;
    let args = [&raw mut node as usize, 0, 0, address as usize, NODE_OF_ADDRESS, 0];
    // SAFETY: `node` is writable; the address is only looked up.
    unsafe { syscall(libc::SYS_get_mempolicy, args) }.map(|_| node)
}

/// Memory that a node has left.
#[derive(Debug)]
pub struct NodeMemory {
    meminfo: i32,
}

impl NodeMemory {
    /// Opens the statistics of a node. ENOENT if there is no such node.
    pub fn open(node: u32) -> Result<NodeMemory> {
        let meminfo = file::open_formatted(format_args!("/sys/devices/system/node/node{node}/meminfo"))?;
        Ok(NodeMemory { meminfo: lift(meminfo)? })
    }

    /// Returns the bytes of memory that the node has altogether.
    pub fn total_bytes(&self) -> Result<u64> {
        self.look(|info| info.total)
    }

    /// Checks whether the node can give `bytes` bytes and have something left. If memory is bound
    /// to a node that has none, the kernel does not report it: it kills a process.
    pub fn is_enough_for(&self, bytes: u64) -> Result<bool> {
        self.look(|info| info.available() >= bytes)
    }

    fn look<T>(&self, what: impl FnOnce(Info) -> T) -> Result<T> {
        let mut bytes = [0; 4096];
        let len = file::read_at(self.meminfo, &mut bytes, 0)?;
        let text = core::str::from_utf8(&bytes[..len]).map_err(|_| Errno(libc::EINVAL))?;
        Info::parse(text).map(what).ok_or(Errno(libc::EINVAL))
    }
}

impl Drop for NodeMemory {
    fn drop(&mut self) {
        file::close(self.meminfo);
    }
}

/// Memory figures of a node, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Info {
    total: u64,
    free: u64,
    /// Memory that the kernel can free by dropping the page cache and other reclaimable memory.
    files: u64,
}

impl Info {
    /// Parses lines like `Node 0 MemFree:        20046632 kB`.
    fn parse(text: &str) -> Option<Info> {
        let mut info = Info::default();
        for line in text.lines() {
            let mut words = line.split_whitespace().skip(2);
            let (Some(name), Some(number)) = (words.next(), words.next()) else { continue };
            let bytes = number.parse::<u64>().ok()?.checked_mul(1024)?;
            match name {
                "MemTotal:" => info.total = bytes,
                "MemFree:" => info.free = bytes,
                "Active(file):" | "Inactive(file):" | "SReclaimable:" => info.files += bytes,
                _ => {}
            }
        }
        (info.total > 0).then_some(info)
    }

    /// Returns the bytes that the node can give. Half of the files may be in use.
    fn available(self) -> u64 {
        let left = (self.total / LEFT_SHARE).clamp(LEFT_MIN, LEFT_MAX);
        (self.free + self.files / 2).saturating_sub(left)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against memory of another node, and against asking a node for more than it has.
    use super::*;
    use crate::{disk, memfd};
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn memory_figures_of_a_node_are_parsed() {
        let text = "Node 1 MemTotal:   2097152 kB\nNode 1 MemFree:  1048576 kB\nNode 1 Active(anon): 77 kB\n\
                    Node 1 Active(file):   1024 kB\nNode 1 Inactive(file):  1024 kB\nNode 1 HugePages_Total:     0\n";
        let info = Info::parse(text).unwrap();
        assert_eq!(info, Info { total: 2 << 30, free: 1 << 30, files: 2 << 20 });
        assert_eq!(info.available(), (1 << 30) + (1 << 20) - (32 << 20));
        assert_eq!(Info { total: 1 << 30, ..Info::default() }.available(), 0);
        assert_eq!(Info::parse("nothing of the kind"), None);
        assert_eq!(Info::parse("Node 0 MemTotal: many kB"), None);
    }

    #[test]
    fn bound_memory_is_that_of_the_node() {
        // Every machine has node 0; some containers may not bind to it.
        let (file, room) = (memfd::create(c"test", 1 << 20).unwrap(), NodeMemory::open(0).unwrap());
        let mapping = memfd::Mapping::new(file.as_fd(), 1 << 20, memfd::MappingAccess::ReadWrite).unwrap();
        // SAFETY: the mapping made here.
        match unsafe { bind(mapping.as_ptr() as usize, 1 << 20, 0) } {
            Err(Errno(libc::EPERM | libc::ENOSYS)) => return eprintln!("skipped: mbind is not allowed here"),
            bound => bound.unwrap(),
        }
        disk::reserve(file.as_raw_fd(), 0, 1 << 20).unwrap();
        assert_eq!(node_at(mapping.as_ptr()), Ok(0));
        let total = room.total_bytes().unwrap();
        assert!(total > 1 << 20 && !room.is_enough_for(total).unwrap() && room.is_enough_for(0).unwrap());
    }

    #[test]
    fn nodes_that_are_not_there_are_errors() {
        assert_eq!(NodeMemory::open(1000).unwrap_err(), Errno(libc::ENOENT));
        assert_eq!(NodeMemory::open(u32::MAX).unwrap_err(), Errno(libc::ENOENT));
        let memory = crate::memory::map_anonymous(4096).unwrap();
        // SAFETY: the mapping made here.
        unsafe {
            assert_eq!(bind(memory, 4096, 5000), Err(Errno(libc::EINVAL)));
            crate::memory::munmap(memory, 4096).unwrap();
        }
    }
}
