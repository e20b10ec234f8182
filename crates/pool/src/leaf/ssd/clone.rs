//! Snapshots: a copy of the file, with its list of contents behind the pages, under a name that is
//! the ticket.
//!
//! The process that claims it may be another one (the child of a fork), so all of the snapshot is
//! in the file. Where the file system can, the copy shares its blocks with the original; else the
//! stored pages are copied, packed. A file that nobody claims within ten minutes is removed by the
//! next process that opens or clones a region in the folder.

use super::config::Config;
use super::{Region, SsdBackend};
use crate::leaf::shadow_store::{Medium, MediumCapacity, PAGES_MAX};
use crate::{Buffer, PoolError};
use core::sync::atomic::Ordering;
use farfield_core::PageId;
use farfield_core::checksum;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::{Errno, disk, file, serving};
use std::ffi::{CStr, CString};

/// Time for which a ticket is good, in seconds.
const GOOD_SECONDS: u64 = 600;
const PREFIX: &str = "farfield-";
const SUFFIX: &str = ".clone";
const MAGIC: u64 = u64::from_le_bytes(*b"ffclone1");
/// Number of pages that are copied at a time.
const COPY_PAGES: usize = 64;

/// Place of a stored page.
#[derive(Clone, Copy)]
struct Entry {
    page: u64,
    place: u64,
    sum: u64,
}

const ENTRY_BYTES: usize = 16;
const ENTRIES_PER_BLOCK: usize = PAGE_BYTES / ENTRY_BYTES;

impl Entry {
    fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..4].copy_from_slice(&(self.page as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&(self.place as u32).to_le_bytes());
        bytes[8..].copy_from_slice(&self.sum.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Entry {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let sum = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        Entry { page: word(0).into(), place: word(4).into(), sum }
    }
}

/// Makes a secret with the time in its upper bits.
fn new_secret() -> Result<u128, Errno> {
    let mut bytes = [0; 16];
    serving::fill_random(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes) >> 32 | u128::from(disk::unix_seconds() as u32) << 96)
}

/// Returns the name of the file of a ticket.
fn name(folder: &CStr, secret: u128) -> CString {
    let name = format!("/{PREFIX}{secret:032x}{SUFFIX}");
    CString::new([folder.to_bytes(), name.as_bytes()].concat()).expect("neither has a NUL")
}

/// Creates a file in the folder that no other process finds.
pub(crate) fn create(folder: &CStr) -> Result<i32, Errno> {
    match disk::create_unnamed(folder) {
        Err(Errno(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) => {
            let name = name(folder, new_secret()?);
            let file = disk::create(&name)?;
            disk::unlink(&name)?;
            Ok(file)
        }
        other => other,
    }
}

/// Removes the files of tickets that were not claimed in time.
pub(super) fn sweep(folder: &CStr) {
    let now = disk::unix_seconds();
    let mut old = Vec::new();
    let _ = disk::for_each_name(folder, |name| {
        let secret = core::str::from_utf8(name).ok().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        let Some(secret) = secret.filter(|secret| secret.len() == 32) else { return };
        let Ok(value) = u128::from_str_radix(secret, 16) else { return };
        if now.saturating_sub((value >> 96) as u64) > GOOD_SECONDS {
            old.push([folder.to_bytes(), b"/", name].concat());
        }
    });
    for path in old {
        let _ = CString::new(path).map(|path| disk::unlink(&path));
    }
}

/// File that is removed again if anything fails.
struct Draft<'a> {
    region: &'a Region,
    name: CString,
    file: i32,
    is_done: bool,
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        file::close(self.file);
        if !self.is_done {
            let _ = disk::unlink(&self.name);
        }
    }
}

impl Draft<'_> {
    fn error(&self, errno: Errno) -> PoolError {
        match errno.0 {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => self.region.full(),
            _ => PoolError::Os(errno),
        }
    }

    fn write(&self, buffer: &Buffer, offset: u64) -> Result<(), PoolError> {
        write_all(self.file, buffer.bytes(), offset).map_err(|errno| self.error(errno))
    }
}

/// Writes the snapshot and returns its secret.
pub(super) fn make(region: &Region) -> Result<u128, PoolError> {
    if region.medium.is_device() {
        let reason = "a region on a block device cannot be cloned: give a folder where processes fork";
        return Err(PoolError::Refused { server: region.server, reason });
    }
    sweep(&region.config.c_path());
    let secret = new_secret().map_err(PoolError::Os)?;
    let name = name(&region.config.c_path(), secret);
    let file = disk::create(&name).map_err(PoolError::Os)?;
    let mut draft = Draft { region, name, file, is_done: false };
    // As for the original: copied pages do not displace others from the page cache.
    if region.is_direct {
        let _ = disk::set_direct(file);
    }
    let is_shared = disk::share(region.medium.file, file).is_ok();
    let places = if is_shared { region.slots.end() } else { copy(&draft)? };
    let mut list = PageListWriter { draft: &draft, buffer: Buffer::new(1), filled: 0, entries: 0, sum: 0, at: places };
    let (mut result, mut packed) = (Ok(()), 0);
    let walked = region.places.each(0, region.pages, |page| {
        let Some(place) = region.places.get(page) else { return };
        let sum = region.sum(place).load(Ordering::Relaxed);
        let place = if is_shared { place } else { packed };
        packed += 1;
        if result.is_ok() {
            result = list.add(Entry { page, place, sum });
        }
    });
    walked.map_err(PoolError::Os)?;
    result?;
    list.finish(places)?;
    draft.is_done = true;
    Ok(secret)
}

/// Copies the stored pages, one after the other, and returns their number.
fn copy(draft: &Draft<'_>) -> Result<u64, PoolError> {
    let region = draft.region;
    let (mut buffer, mut result) = (Buffer::new(COPY_PAGES), Ok(()));
    let (mut first, mut run, mut copied) = (0, 0u64, 0);
    let mut flush = |first: u64, run: u64, copied: &mut u64| {
        if run == 0 {
            return Ok(());
        }
        buffer.set_pages(run as usize);
        let bytes = buffer.bytes_mut();
        // A page that cannot be read is corrupt for the clone as for the original, which finds out
        // when it reads.
        read_all(region.medium.file, bytes, PageId(first).offset()).map_err(PoolError::Os)?;
        draft.write(&buffer, PageId(*copied).offset())?;
        *copied += run;
        Ok(())
    };
    let walked = region.places.each(0, region.pages, |page| {
        let Some(place) = region.places.get(page) else { return };
        if run > 0 && place == first + run && run < COPY_PAGES as u64 {
            run += 1;
        } else {
            if result.is_ok() {
                result = flush(first, run, &mut copied);
            }
            (first, run) = (place, 1);
        }
    });
    walked.map_err(PoolError::Os)?;
    result?;
    flush(first, run, &mut copied)?;
    Ok(copied)
}

/// List of the places of pages, behind the pages.
struct PageListWriter<'a> {
    draft: &'a Draft<'a>,
    buffer: Buffer,
    filled: usize,
    entries: u64,
    /// Checksum over all blocks of the list so far, in their order.
    sum: u64,
    at: u64,
}

impl PageListWriter<'_> {
    fn add(&mut self, entry: Entry) -> Result<(), PoolError> {
        self.buffer.bytes_mut()[self.filled * ENTRY_BYTES..][..ENTRY_BYTES].copy_from_slice(&entry.to_bytes());
        self.filled += 1;
        self.entries += 1;
        if self.filled == ENTRIES_PER_BLOCK { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), PoolError> {
        self.sum = chain(self.sum, self.buffer.bytes());
        self.draft.write(&self.buffer, PageId(self.at).offset())?;
        self.at += 1;
        self.filled = 0;
        self.buffer.bytes_mut().fill(0);
        Ok(())
    }

    /// Writes the rest, and the last block, which says what the file contains.
    fn finish(mut self, places: u64) -> Result<(), PoolError> {
        if self.filled > 0 {
            self.flush()?;
        }
        let words = [MAGIC, self.draft.region.pages, places, self.entries, self.sum];
        for (index, word) in words.into_iter().enumerate() {
            self.buffer.bytes_mut()[index * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        self.draft.write(&self.buffer, PageId(self.at).offset())?;
        // A shared copy is as long as the original.
        disk::resize(self.draft.file, PageId(self.at + 1).offset()).map_err(PoolError::Os)
    }
}

fn chain(before: u64, block: &[u8]) -> u64 {
    before.rotate_left(17).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ checksum(block)
}

/// Turns the snapshot of a ticket into a region, and removes its name.
pub(super) fn claim(server: u16, config: Config, secret: u128) -> Result<SsdBackend, PoolError> {
    let name = name(&config.c_path(), secret);
    let unknown = PoolError::Refused { server, reason: "the ticket is unknown, used or expired" };
    let other = |errno: Errno| if errno.0 == libc::ENOENT { unknown } else { PoolError::Os(errno) };
    let medium = Medium::file(disk::open_file(&name).map_err(other)?);
    // If two want it, only one can take it.
    disk::unlink(&name).map_err(other)?;
    let broken = PoolError::Refused { server, reason: "the snapshot's file is damaged" };
    let (pages, places, entries, sum) = head(medium.file).map_err(PoolError::Os)?.ok_or(broken)?;
    let bytes = disk::file_system_bytes(medium.file).map_err(PoolError::Os)?.min(disk::file_bytes_max());
    let room = MediumCapacity { bytes, begun: places.next_multiple_of(64) };
    let backend = SsdBackend::over(server, config, medium, pages, room)?;
    let region = &backend.region;
    let file = region.medium.file;
    // Everything up to the last page counts as taken until it is known to be free.
    let (mut buffer, mut found, mut left) = (Buffer::new(1), 0u64, entries);
    let mut used = vec![false; places as usize];
    for block in 0..entries.div_ceil(ENTRIES_PER_BLOCK as u64) {
        read_all(file, buffer.bytes_mut(), PageId(places + block).offset()).map_err(PoolError::Os)?;
        found = chain(found, buffer.bytes());
        for bytes in buffer.bytes().chunks(ENTRY_BYTES).take(left.min(ENTRIES_PER_BLOCK as u64) as usize) {
            let Entry { page, place, sum } = Entry::from_bytes(bytes);
            if page >= pages || place >= places || core::mem::replace(&mut used[place as usize], true) {
                return Err(broken);
            }
            region.sum(place).store(sum, Ordering::Relaxed);
            region.places.set(page, Some(place));
        }
        left = left.saturating_sub(ENTRIES_PER_BLOCK as u64);
    }
    if found != sum {
        return Err(broken);
    }
    region.stored.store(entries, Ordering::Relaxed);
    for (place, _) in (0..).zip(&used).filter(|(_, used)| !**used) {
        region.slots.give(place, 1);
    }
    disk::resize(file, PageId(places).offset()).map_err(PoolError::Os)?;
    Ok(backend)
}

/// Reads the last block: pages of the region, places, entries and their checksum.
fn head(file: i32) -> Result<Option<(u64, u64, u64, u64)>, Errno> {
    let bytes = file::size(file).unwrap_or(0);
    let mut buffer = Buffer::new(1);
    let Some(last) = (bytes / PAGE_BYTES as u64).checked_sub(1) else { return Ok(None) };
    read_all(file, buffer.bytes_mut(), PageId(last).offset())?;
    let word = |index: usize| u64::from_le_bytes(buffer.bytes()[index * 8..][..8].try_into().expect("eight bytes"));
    let [magic, pages, places, entries, sum] = [0, 1, 2, 3, 4].map(word);
    let is_sound = magic == MAGIC
        && (1..=PAGES_MAX).contains(&pages)
        && entries <= places
        && places.checked_add(entries.div_ceil(ENTRIES_PER_BLOCK as u64)) == Some(last);
    Ok(is_sound.then_some((pages, places, entries, sum)))
}

fn read_all(file: i32, bytes: &mut [u8], offset: u64) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &mut bytes[done..];
        // SAFETY: the rest of the slice is ours.
        match unsafe { disk::read_at(file, rest.as_mut_ptr() as usize, rest.len(), offset + done as u64) } {
            Ok(0) => return Err(Errno(libc::EIO)),
            Ok(read) => done += read,
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn write_all(file: i32, bytes: &[u8], offset: u64) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        // SAFETY: the rest of the slice stays as it is.
        match unsafe { disk::write_at(file, rest.as_ptr() as usize, rest.len(), offset + done as u64) } {
            Ok(0) => return Err(Errno(libc::ENOSPC)),
            Ok(written) => done += written,
            Err(Errno(libc::EINTR)) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
