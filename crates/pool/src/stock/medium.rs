//! What the places of a stock are on.

use farfield_os::{Errno, disk, file};

/// See the module. The descriptor is closed with it.
pub(crate) struct Medium {
    pub(crate) file: i32,
    kind: Kind,
}

enum Kind {
    /// Places have room where the file system reserved it.
    File,
    /// A block device: all of it has room, and it can be told what does not matter any more.
    BlockDevice,
}

impl Medium {
    pub(crate) fn file(file: i32) -> Medium {
        Medium { file, kind: Kind::File }
    }

    pub(crate) fn block_device(file: i32) -> Medium {
        Medium { file, kind: Kind::BlockDevice }
    }

    pub(crate) fn is_device(&self) -> bool {
        matches!(self.kind, Kind::BlockDevice)
    }

    /// Gives the range room, so that storing there does not fail for lack of it.
    pub(super) fn give_room(&self, offset: u64, bytes: u64) -> Result<(), Errno> {
        match self.kind {
            Kind::BlockDevice => Ok(()),
            Kind::File => match disk::reserve(self.file, offset, bytes) {
                // A file system without reservations: a write finds out.
                Err(Errno(libc::EOPNOTSUPP)) => Ok(()),
                other => other,
            },
        }
    }

    /// Takes the room of the range away, whose content is of no use any more. `false`: it stays.
    pub(super) fn take_room(&self, offset: u64, bytes: u64) -> bool {
        match self.kind {
            // Only that the content does not matter.
            Kind::BlockDevice => {
                let _ = disk::punch(self.file, offset, bytes);
                false
            }
            Kind::File => disk::punch(self.file, offset, bytes).is_ok(),
        }
    }
}

impl Drop for Medium {
    fn drop(&mut self) {
        file::close(self.file);
    }
}
