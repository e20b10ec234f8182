//! The part of shared memory that a node keeps: one memfd, mapped once, cut into blocks of a few
//! sizes.
//!
//! A block is a header of 16 bytes and an object. Blocks of one size are used again for that
//! size only, so a block begins where it always began, and its colours stay with it. The last four
//! bytes of a header are the word of a lock, if the object is under one that may be thin.
#![allow(unsafe_code, reason = "objects lie in a mapping")]

use crate::ShareError;
use crate::message::ArenaAddress;
use crate::primitives::AtomicU32;
use crate::thin;
use core::ffi::CStr;
use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use farfield_core::dsm::{BlockHeader, Colour, LateFree, OwnerWord, Partition, ThinLock};
use farfield_core::lock::LockMode;
use farfield_os::memfd::{self, Mapping};
use farfield_os::serving;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

const NAME: &CStr = c"farfield-share";
/// Bytes before the first block. The first 16 of them are the arena's stamp.
const START: u64 = 64;
/// Bytes of a block before its object.
const HEADER_BYTES: u64 = OwnerWord::ALIGN;
/// Sizes of blocks: 32, 48, 64, 96, 128, … bytes.
const CLASSES: usize = 60;

/// Header as it lies in memory.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawHeader {
    /// Colour of the header's state.
    colour: u16,
    state: u16,
    class: u32,
    /// Version of the group that begins with the object, plus one; zero if none does.
    group_version: u32,
}

/// Bytes of the word of a lock, between a header and its object.
const LOCK_WORD_BYTES: usize = size_of::<AtomicU32>();

const _: () = assert!(size_of::<RawHeader>() + LOCK_WORD_BYTES <= HEADER_BYTES as usize);

const FREE: u16 = 0;
const USED: u16 = 1;
const RESTING: u16 = 2;

/// Blocks of one node.
pub(crate) struct ShareArena {
    /// Others of this machine can open it to read.
    memory: OwnedFd,
    /// Memory of the objects. Tied objects have owners with addresses, and keep it for ever.
    mapping: ManuallyDrop<Mapping>,
    stamp: [u8; 16],
    partition: Partition,
    blocks: Mutex<ArenaBlocks>,
    /// Tied objects.
    tied: AtomicU64,
}

struct ArenaBlocks {
    /// End of the blocks that were ever made, in bytes.
    end: u64,
    /// Objects' offsets of free blocks, by class.
    free: [Vec<u64>; CLASSES],
    /// Bytes of blocks with objects.
    used_bytes: u64,
}

/// Returns the class of blocks for objects of so many bytes.
fn class_of(bytes: u64) -> usize {
    let block = bytes.saturating_add(HEADER_BYTES).max(32);
    (0..CLASSES).find(|class| block_bytes(*class) >= block).unwrap_or(CLASSES - 1)
}

/// Returns the size of the blocks of a class, in bytes.
fn block_bytes(class: usize) -> u64 {
    let power = 32u64 << (class / 2);
    if class.is_multiple_of(2) { power } else { power + power / 2 }
}

/// Returns how many blocks of a class are cut at a time: as many as end where a cache line does. So the header of a
/// block of 64 bytes or more lies in one line with the first 48 bytes of its object.
fn run_blocks(class: usize) -> u64 {
    const LINE_BYTES: u64 = 64;
    let bytes = block_bytes(class);
    (1..=4).find(|blocks| (blocks * bytes).is_multiple_of(LINE_BYTES)).unwrap_or(1)
}

/// Returns the word of the lock beside an object.
///
/// # Safety
/// The address is that of an object of an arena, which is mapped as long as the word is used.
#[inline]
pub(crate) unsafe fn lock_word<'a>(object: *mut u8) -> &'a AtomicU32 {
    let word = object.wrapping_sub(LOCK_WORD_BYTES).cast();
    // SAFETY: the last bytes of the header, aligned, which are initialised and used as this word only.
    unsafe { AtomicU32::from_ptr(word) }
}

impl ShareArena {
    /// Reserves `bytes` bytes of address space for the objects of a partition. Memory is taken when
    /// objects need it.
    pub(crate) fn new(partition: Partition, bytes: u64) -> std::io::Result<ShareArena> {
        let (memory, mapping) = memfd::create_published(NAME, bytes.max(START)).map_err(std::io::Error::from)?;
        let mut stamp = [0; 16];
        serving::fill_random(&mut stamp)?;
        // SAFETY: new memory of at least so many bytes.
        unsafe { core::ptr::copy_nonoverlapping(stamp.as_ptr(), mapping.as_ptr(), stamp.len()) };
        let blocks = ArenaBlocks { end: START, free: [const { Vec::new() }; CLASSES], used_bytes: 0 };
        let (mapping, blocks) = (ManuallyDrop::new(mapping), Mutex::new(blocks));
        Ok(ShareArena { memory, mapping, stamp, partition, blocks, tied: AtomicU64::new(0) })
    }

    /// Returns where another process of this machine finds the memory.
    pub(crate) fn published_address(&self) -> ArenaAddress {
        ArenaAddress {
            process: std::process::id(),
            descriptor: self.memory.as_raw_fd(),
            bytes: self.mapping.len() as u64,
            stamp: self.stamp,
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.lock().used_bytes
    }

    fn lock(&self) -> MutexGuard<'_, ArenaBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a block for an object of `bytes` bytes, whose contents are arbitrary but initialised.
    /// All objects together take at most `limit_bytes`.
    pub(crate) fn take(&self, bytes: u64, limit_bytes: u64) -> Result<OwnerWord, ShareError> {
        let full = ShareError::Full { bytes, limit_bytes };
        let class = class_of(bytes);
        let mut blocks = self.lock();
        if blocks.used_bytes + block_bytes(class) > limit_bytes.min(self.mapping.len() as u64) {
            return Err(full);
        }
        let offset = match blocks.free[class].pop() {
            Some(offset) => offset,
            None => {
                let offset = blocks.end + HEADER_BYTES;
                let fit = (self.mapping.len() as u64 - blocks.end) / block_bytes(class);
                if fit == 0 {
                    return Err(full);
                }
                let count = run_blocks(class).min(fit);
                blocks.end += count * block_bytes(class);
                for index in (0..count).rev() {
                    let offset = offset + index * block_bytes(class);
                    self.put_header(offset, BlockHeader::NEW, class);
                    if index > 0 {
                        blocks.free[class].push(offset);
                    }
                }
                offset
            }
        };
        let (mut header, class) = self.header(offset);
        let colour = header.fill().ok_or(full)?;
        self.put_header(offset, header, class);
        blocks.used_bytes += block_bytes(class);
        let word = OwnerWord::new(self.partition, offset, colour).ok_or(full)?;
        self.put_lock(word, ThinLock::NONE);
        Ok(word)
    }

    /// Lets a new object be under a lock that is thin and free.
    pub(crate) fn begin_thin(&self, word: OwnerWord) {
        self.put_lock(word, ThinLock::free(word.colour()));
    }

    fn put_lock(&self, word: OwnerWord, lock: ThinLock) {
        if let Some(of_block) = self.lock_word(word) {
            of_block.store(lock.bits(), Relaxed);
        }
    }

    /// Takes the lock of an object, if that is thin, and free for this mode. Returns whether it was.
    pub(crate) fn take_thin(&self, word: OwnerWord, mode: LockMode) -> bool {
        self.lock_word(word).is_some_and(|of_block| thin::take(of_block, word.colour(), mode))
    }

    /// Gives the lock of an object back that was taken while it was thin. Returns `false` if it is inflated since.
    pub(crate) fn release_thin(&self, word: OwnerWord, mode: LockMode) -> bool {
        self.lock_word(word).is_some_and(|of_block| thin::release(of_block, mode))
    }

    /// Inflates the lock of an object, if that is thin. Returns how many have it, and in which mode.
    pub(crate) fn inflate(&self, word: OwnerWord) -> Option<(u16, LockMode)> {
        thin::inflate(self.lock_word(word)?, word.colour())
    }

    /// Makes the lock of an object thin again, which nobody has.
    pub(crate) fn deflate(&self, word: OwnerWord) {
        if let Some(of_block) = self.lock_word(word) {
            thin::deflate(of_block, word.colour());
        }
    }

    /// Returns the word of the lock in the header of a block that may be there.
    fn lock_word(&self, word: OwnerWord) -> Option<&AtomicU32> {
        let objects = START + HEADER_BYTES..self.mapping.len() as u64;
        let is_ours = word.partition() == self.partition && objects.contains(&word.offset());
        // SAFETY: within the mapping, which lives as long as the arena.
        is_ours.then(|| unsafe { lock_word(self.address(word)) })
    }

    /// Frees the block of an object that is not used any more.
    pub(crate) fn free(&self, word: OwnerWord) -> Result<(), LateFree> {
        let mut blocks = self.lock();
        let (mut header, class) = self.block_at(&blocks, word).ok_or(LateFree)?;
        header.free(word.colour())?;
        self.put_header(word.offset(), header, class);
        blocks.used_bytes -= block_bytes(class);
        if matches!(header, BlockHeader::Free { .. }) {
            blocks.free[class].push(word.offset());
        }
        Ok(())
    }

    /// Returns the address from which the offsets of words count.
    pub(crate) fn base(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Returns the address of an object. It is valid as long as the arena, whatever the word says.
    pub(crate) fn address(&self, word: OwnerWord) -> *mut u8 {
        debug_assert!(word.partition() == self.partition && word.offset() < self.mapping.len() as u64);
        self.mapping.as_ptr().wrapping_add(word.offset() as usize)
    }

    /// Appends the bytes of an object that nobody writes to. Returns whether the block can hold
    /// such an object.
    pub(crate) fn read(&self, word: OwnerWord, bytes: u64, into: &mut Vec<u8>) -> bool {
        self.read_part(word, 0, bytes, into)
    }

    /// Appends so many bytes of such an object, from an offset on.
    pub(crate) fn read_part(&self, word: OwnerWord, offset: u64, bytes: u64, into: &mut Vec<u8>) -> bool {
        let read = self.with_object(word, offset.saturating_add(bytes), |address| {
            let start = into.len();
            into.resize(start + bytes as usize, 0);
            let address = address.wrapping_add(offset as usize);
            // SAFETY: bytes of the block; all bytes of a file are initialised. Its owner lends the object
            // to the one who reads, so nobody writes to it.
            unsafe { core::ptr::copy_nonoverlapping(address, into[start..].as_mut_ptr(), bytes as usize) };
        });
        read.is_some()
    }

    /// Overwrites an object that nobody else reads or writes. Returns whether the block can hold
    /// such an object.
    pub(crate) fn write(&self, word: OwnerWord, bytes: &[u8]) -> bool {
        let written = self.with_object(word, bytes.len() as u64, |address| {
            // SAFETY: so many bytes of the block, which nobody else uses.
            unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len()) };
        });
        written.is_some()
    }

    /// Calls `action` with the address of an object of so many bytes, which is not freed meanwhile.
    /// Returns `None` if the block cannot hold such an object.
    pub(crate) fn with_object<R>(&self, word: OwnerWord, bytes: u64, action: impl FnOnce(*mut u8) -> R) -> Option<R> {
        let blocks = self.lock();
        let (header, class) = self.block_at(&blocks, word)?;
        let fits = bytes <= block_bytes(class) - HEADER_BYTES && bytes <= blocks.end - word.offset();
        (header.may_hold(word.colour()) && fits).then(|| action(self.address(word)))
    }

    /// Records the version of a group, of which this is the word: others may read that one only.
    pub(crate) fn begin_version(&self, word: OwnerWord) {
        self.put_group_version(word, u32::from(word.colour().0) + 1);
    }

    /// Records that a group is read no longer.
    pub(crate) fn end_version(&self, word: OwnerWord) {
        self.put_group_version(word, 0);
    }

    fn put_group_version(&self, word: OwnerWord, group_version: u32) {
        let blocks = self.lock();
        if self.block_at(&blocks, word).is_some_and(|(header, _)| header.may_hold(word.colour())) {
            // SAFETY: as for `header`.
            unsafe { (*self.header_at(word.offset())).group_version = group_version };
        }
    }

    fn group_version(&self, word: OwnerWord) -> u32 {
        // SAFETY: as for `header`.
        unsafe { (*self.header_at(word.offset())).group_version }
    }

    /// Returns whether a group begins with the object of this word.
    pub(crate) fn is_group(&self, word: OwnerWord) -> bool {
        let blocks = self.lock();
        self.block_at(&blocks, word).is_some() && self.group_version(word) > 0
    }

    /// Calls `action` with the address of a group's first object, if this is the version of the group.
    /// No later version begins meanwhile.
    pub(crate) fn with_version<R>(&self, word: OwnerWord, action: impl FnOnce(*const u8) -> R) -> Option<R> {
        let blocks = self.lock();
        let (header, _) = self.block_at(&blocks, word)?;
        let is_current = header.may_hold(word.colour()) && self.group_version(word) == u32::from(word.colour().0) + 1;
        is_current.then(|| action(self.address(word)))
    }

    /// Returns the word of the object at an address, if one can be there.
    pub(crate) fn word_at(&self, address: *const u8) -> Option<OwnerWord> {
        let blocks = self.lock();
        let offset = (address.addr()).checked_sub(self.mapping.as_ptr().addr())? as u64;
        if offset < START + HEADER_BYTES || offset >= blocks.end {
            return None;
        }
        match self.header(offset).0 {
            BlockHeader::Used { first } => OwnerWord::new(self.partition, offset, first),
            _ => None,
        }
    }

    /// Counts more tied objects.
    pub(crate) fn add_tied(&self, more: u64) {
        self.tied.fetch_add(more, Relaxed);
    }

    /// Counts fewer tied objects.
    pub(crate) fn remove_tied(&self, fewer: u64) {
        self.tied.fetch_sub(fewer, Relaxed);
    }

    /// Returns header and class of the block that a word of another node means, if there is a
    /// block.
    fn block_at(&self, blocks: &ArenaBlocks, word: OwnerWord) -> Option<(BlockHeader, usize)> {
        let is_ours = word.partition() == self.partition && word.offset() >= HEADER_BYTES && word.offset() < blocks.end;
        is_ours.then(|| self.header(word.offset()))
    }

    fn header_at(&self, offset: u64) -> *mut RawHeader {
        self.mapping.as_ptr().wrapping_add((offset - HEADER_BYTES) as usize).cast()
    }

    fn header(&self, offset: u64) -> (BlockHeader, usize) {
        // SAFETY: the header of a block, within the mapping and aligned to 16 bytes; headers are
        // used under the lock only.
        let RawHeader { colour, state, class, .. } = unsafe { self.header_at(offset).read() };
        let colour = Colour(colour);
        let header = match state {
            USED => BlockHeader::Used { first: colour },
            RESTING => BlockHeader::Resting,
            _ => BlockHeader::Free { next: colour },
        };
        (header, (class as usize).min(CLASSES - 1))
    }

    fn put_header(&self, offset: u64, header: BlockHeader, class: usize) {
        let (state, colour) = match header {
            BlockHeader::Free { next } => (FREE, next),
            BlockHeader::Used { first } => (USED, first),
            BlockHeader::Resting => (RESTING, Colour::LAST),
        };
        let raw = RawHeader { colour: colour.0, state, class: class as u32, group_version: 0 };
        // SAFETY: as for `header`.
        unsafe { self.header_at(offset).write(raw) };
    }
}

impl Drop for ShareArena {
    fn drop(&mut self) {
        // A `TBox` on some stack is used without a check, and may outlive its program.
        if *self.tied.get_mut() == 0 {
            // SAFETY: nobody uses the mapping any more.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_their_objects_and_waste_less_than_half() {
        for bytes in (0..5000).chain([64 << 10, 1 << 20, 1 << 30]) {
            let block = block_bytes(class_of(bytes));
            assert!(block >= bytes + HEADER_BYTES && block.is_multiple_of(16), "{bytes}");
            assert!(block <= 32 || block < (bytes + HEADER_BYTES) * 3 / 2 + 16, "{bytes}: {block}");
            assert!((run_blocks(class_of(bytes)) * block).is_multiple_of(64), "{bytes}");
        }
    }

    #[test]
    fn a_header_is_in_one_cache_line_with_its_object_whatever_was_taken_before() {
        let arena = ShareArena::new(Partition::new(3).unwrap(), 1 << 20).unwrap();
        let mut random = fastrand::Rng::with_seed(8);
        for _ in 0..500 {
            let bytes = random.u64(..300);
            let offset = arena.take(bytes, 1 << 20).unwrap().offset();
            let is_one = offset % 64 == HEADER_BYTES;
            assert!(is_one || !block_bytes(class_of(bytes)).is_multiple_of(64), "{bytes} at {offset}");
        }
    }

    #[test]
    fn objects_do_not_overlap_and_blocks_are_used_again_with_new_colours() {
        let arena = ShareArena::new(Partition::new(3).unwrap(), 1 << 20).unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        let mut kept: Vec<(OwnerWord, u64, u8)> = Vec::new();
        let mut words = std::collections::HashSet::new();
        for step in 0..20_000u64 {
            let mut bytes = Vec::new();
            if kept.len() < 300 || random.bool() {
                let len = random.u64(..3000);
                let Ok(word) = arena.take(len, 1 << 20) else {
                    let (word, ..) = kept.swap_remove(random.usize(..kept.len()));
                    arena.free(word).unwrap();
                    continue;
                };
                assert!(words.insert(word), "no object has the word of another");
                // SAFETY: a new block of so many bytes.
                unsafe { arena.address(word).write_bytes(step as u8, len as usize) };
                kept.push((word, len, step as u8));
            } else {
                let (word, len, byte) = kept.swap_remove(random.usize(..kept.len()));
                assert!(arena.read(word, len, &mut bytes) && bytes.iter().all(|it| *it == byte));
                arena.free(word).unwrap();
                assert_eq!(arena.free(word), Err(LateFree));
                assert!(!arena.read(word, len, &mut bytes), "it is gone");
            }
        }
        kept.into_iter().for_each(|(word, ..)| arena.free(word).unwrap());
        assert_eq!(arena.used_bytes(), 0);
    }
}
