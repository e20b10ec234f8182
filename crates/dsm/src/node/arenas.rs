//! Arenas of other nodes of this machine, mapped to be read in place.
//!
//! An object that is borrowed is neither written nor moved nor freed, at whatever node the borrow is. So a
//! borrower on the same machine can read it where it is, without a message and without a copy. A node that
//! is gone must not read any more when what it was lent is freed: whoever learns that it is gone, and is on
//! its machine, first ends its process, which may have been stopped.

use super::{NodeId, ShareNode};
use crate::message::ArenaAddress;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use core::time::Duration;
use farfield_core::dsm::OwnerWord;
use farfield_os::memfd::{self, Mapping, MappingAccess};
use farfield_os::process;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::OnceLock;

/// Longest wait for the end of a process that is killed.
const END_WITHIN: Duration = Duration::from_secs(1);

/// Arenas of all nodes of a program, by number.
pub(super) struct PeerArenas(Box<[PeerArena]>);

#[derive(Default)]
struct PeerArena {
    /// Where offsets count from; null if objects are not read in place.
    base: AtomicPtr<u8>,
    /// Set when it was first tried. The memory stays as long as this node, for it may be borrowed.
    mapping: OnceLock<Option<Mapping>>,
    is_lost: AtomicBool,
}

impl PeerArenas {
    pub(super) fn new(nodes: u16) -> PeerArenas {
        PeerArenas((0..nodes).map(|_| PeerArena::default()).collect())
    }

    /// Reads objects of a node that is gone in place no longer. What is borrowed stays.
    pub(super) fn lose(&self, node: NodeId) {
        if let Some(arena) = self.0.get(usize::from(node.0)) {
            arena.is_lost.store(true, Ordering::SeqCst);
            arena.base.store(core::ptr::null_mut(), Ordering::SeqCst);
        }
    }
}

impl ShareNode {
    /// Returns the address of another node's object, if it is read in place.
    #[inline]
    pub(super) fn in_place(&self, word: OwnerWord) -> Option<*const u8> {
        let arena = self.arenas.0.get(usize::from(self.home_of(word).0))?;
        let base = arena.base.load(Ordering::Acquire);
        let is_read = !base.is_null() && !word.is_lost();
        is_read.then(|| base.wrapping_add(word.offset() as usize).cast_const())
    }

    /// Maps the arena of an object's node when it is first needed. Returns the object's address, if
    /// the node is on this machine and lives.
    #[cold]
    pub(super) fn map_in_place(&self, word: OwnerWord) -> Option<*const u8> {
        let home = self.home_of(word);
        let arena = self.arenas.0.get(usize::from(home.0)).filter(|_| home != self.id && self.reads_in_place)?;
        let address = self.peers.arena_of(home)?;
        let mut is_new = false;
        let mapping = arena.mapping.get_or_init(|| {
            is_new = true;
            map(&address)
        });
        if is_new && let Some(mapping) = mapping {
            arena.base.store(mapping.as_ptr(), Ordering::SeqCst);
            if arena.is_lost.load(Ordering::SeqCst) {
                self.arenas.lose(home);
            }
        }
        self.in_place(word)
    }

    /// Ends the process of a node that is gone, if it is on this machine and could read in place.
    pub(super) fn end_process(&self, node: NodeId) {
        let address = self.peers.arena_of(node).filter(|_| self.reads_in_place);
        if let Some(address) = address.filter(|address| address.process != std::process::id()) {
            process::kill(address.process, END_WITHIN, || open(&address).is_some());
        }
    }
}

/// Opens the memory of another process of the same user. Returns `None` if that is not allowed, or if
/// another process has its number by now.
fn open(address: &ArenaAddress) -> Option<File> {
    let file = File::open(format!("/proc/{}/fd/{}", address.process, address.descriptor)).ok()?;
    if !memfd::is_published(file.as_fd()) || file.metadata().ok()?.len() != address.bytes {
        return None;
    }
    let mut stamp = [0; 16];
    memfd::read_at(file.as_fd(), &mut stamp, 0).ok()?;
    (stamp == address.stamp).then_some(file)
}

fn map(address: &ArenaAddress) -> Option<Mapping> {
    Mapping::new(open(address)?.as_fd(), address.bytes, MappingAccess::Read).ok()
}
