//! Medium that the places of a shadow store are on: a file, a device, or memory of one NUMA node.

use farfield_os::{Errno, disk, file, numa};

/// Medium of a shadow store. Its descriptor is closed when it is dropped.
pub(crate) struct Medium {
    pub(crate) file: i32,
    kind: MediumKind,
}

enum MediumKind {
    /// File on a file system: places have room where the file system reserved it.
    File,
    /// Block device: all of it has room, and it can be told which content does not matter any more.
    BlockDevice,
    /// Memory behind a device: all of it has room.
    DaxDevice,
    /// File in memory that may only be that of one NUMA node.
    Node(numa::NodeMemory),
}

impl Medium {
    pub(crate) fn file(file: i32) -> Medium {
        Medium { file, kind: MediumKind::File }
    }

    pub(crate) fn block_device(file: i32) -> Medium {
        Medium { file, kind: MediumKind::BlockDevice }
    }

    pub(crate) fn dax_device(file: i32) -> Medium {
        Medium { file, kind: MediumKind::DaxDevice }
    }

    /// Creates the medium of a `file` in memory that is bound to the node of `room`.
    pub(crate) fn node(file: i32, room: numa::NodeMemory) -> Medium {
        Medium { file, kind: MediumKind::Node(room) }
    }

    pub(crate) fn is_device(&self) -> bool {
        matches!(self.kind, MediumKind::BlockDevice | MediumKind::DaxDevice)
    }

    /// Gives the range room, so that storing there does not fail for lack of it.
    pub(super) fn give_room(&self, offset: u64, bytes: u64) -> Result<(), Errno> {
        match &self.kind {
            MediumKind::BlockDevice | MediumKind::DaxDevice => return Ok(()),
            // Only one node may give this memory. If asked for more than the node has, the kernel
            // would kill a process.
            MediumKind::Node(room) if !room.is_enough_for(bytes)? => return Err(Errno(libc::ENOSPC)),
            MediumKind::Node(_) | MediumKind::File => {}
        }
        match disk::reserve(self.file, offset, bytes) {
            // The file system has no reservations: a write finds out.
            Err(Errno(libc::EOPNOTSUPP)) => Ok(()),
            other => other,
        }
    }

    /// Takes away the room of the range, whose content is of no use any more. Returns `false` if
    /// the room stays.
    pub(super) fn take_room(&self, offset: u64, bytes: u64) -> bool {
        match self.kind {
            MediumKind::DaxDevice => false,
            // This only says that the content does not matter.
            MediumKind::BlockDevice => {
                let _ = disk::punch(self.file, offset, bytes);
                false
            }
            MediumKind::File | MediumKind::Node(_) => disk::punch(self.file, offset, bytes).is_ok(),
        }
    }
}

impl Drop for Medium {
    fn drop(&mut self) {
        file::close(self.file);
    }
}
