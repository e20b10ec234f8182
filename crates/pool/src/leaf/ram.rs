//! Member `ram`: pages in the memory of this process, for tests. It behaves like a remote member in
//! everything but distance. `ram:?size=1M` limits the memory, so that the member can become full.

use crate::contract::backend::{check_range, hand_over};
use crate::{Backend, Buffer, CloneTicket, Completion, Health, Lane, LaneRequest, Op, PoolError};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{PageId, checksum};
use farfield_os::sync::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Greatest number of operations of one lane that are submitted and not yet collected.
const SLOTS: usize = 256;

type Pages = BTreeMap<u64, (u64, Arc<[u8]>)>;

/// Region in the memory of this process.
pub(crate) struct RamBackend {
    region: Arc<Region>,
}

struct Region {
    server: u16,
    pages: u64,
    /// Greatest number of pages stored at a time.
    stored_max: usize,
    stored: Mutex<Pages>,
}

/// Next ticket number. No number is given out twice, so that a used ticket stays used.
static NEXT_TICKET: AtomicU64 = AtomicU64::new(1);

/// Snapshots that were not claimed yet, by the ticket's secret.
static CLONES: Mutex<BTreeMap<u128, (u64, usize, Pages)>> = Mutex::new(BTreeMap::new());

impl RamBackend {
    #[cfg(test)]
    pub(crate) fn new(server: u16, pages: u64) -> RamBackend {
        RamBackend::with_size(server, pages, usize::MAX)
    }

    /// Makes a region of `pages` pages with room for `stored_max` of them.
    pub(crate) fn with_size(server: u16, pages: u64, stored_max: usize) -> RamBackend {
        RamBackend { region: Arc::new(Region { server, pages, stored_max, stored: Mutex::new(Pages::new()) }) }
    }

    /// Parses the text behind `ram:` in a URL; returns the size in pages.
    pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
        match text.strip_prefix("?size=") {
            Some(size) => Ok((crate::url::size::parse(size)? / PAGE_BYTES as u64) as usize),
            None if text.is_empty() => Ok(usize::MAX),
            None => Err("write ram: or ram:?size=1M".to_owned()),
        }
    }

    pub(crate) fn claim(server: u16, secret: u128) -> Result<RamBackend, PoolError> {
        let claimed = CLONES.lock().remove(&secret);
        let reason = "the ticket is unknown, used or expired";
        let (pages, stored_max, stored) = claimed.ok_or(PoolError::Refused { server, reason })?;
        Ok(RamBackend { region: Arc::new(Region { server, pages, stored_max, stored: Mutex::new(stored) }) })
    }
}

#[cfg(test)]
fn flip(bytes: &mut Arc<[u8]>) {
    let mut rotten = bytes.to_vec();
    rotten[77] ^= 4;
    *bytes = rotten.into();
}

#[cfg(test)]
impl RamBackend {
    /// Returns the pages that are stored.
    pub(crate) fn stored(&self) -> Vec<u64> {
        self.region.lock().keys().copied().collect()
    }

    /// Flips a bit of a page; returns whether the page is stored.
    pub(crate) fn rot(&self, page: u64) -> bool {
        self.region.lock().get_mut(&page).map(|(_, bytes)| flip(bytes)).is_some()
    }

    /// Flips a bit of every page.
    pub(crate) fn rot_all(&self) {
        self.region.lock().values_mut().for_each(|(_, bytes)| flip(bytes));
    }

    /// Drops a page without telling anyone; returns whether it was stored.
    pub(crate) fn forget(&self, page: u64) -> bool {
        self.region.lock().remove(&page).is_some()
    }

    /// Gives a page the bytes of another one; returns whether they differ from its own.
    pub(crate) fn confuse(&self, page: u64, with: u64) -> bool {
        let mut stored = self.region.lock();
        let Some(other) = stored.get(&with).cloned() else { return false };
        let sum = other.0;
        stored.insert(page, other).is_none_or(|old| old.0 != sum)
    }
}

impl Backend for RamBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        let region = self.region.clone();
        let (ready, ended) = (VecDeque::with_capacity(SLOTS), VecDeque::with_capacity(SLOTS));
        Ok(Box::new(RamLane { region, ready, ended, zero_sum: checksum(&[0; PAGE_BYTES]) }))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let mut clones = CLONES.lock();
        // The number need not be secret: code in this process sees the pages anyway.
        let secret = u128::from(NEXT_TICKET.fetch_add(1, Ordering::Relaxed));
        clones.insert(secret, (self.region.pages, self.region.stored_max, self.region.lock().clone()));
        Ok(CloneTicket::of_leaf(secret))
    }

    fn pages(&self) -> u64 {
        self.region.pages
    }

    fn health(&self) -> Health {
        Health::Good
    }

    fn abandon(&self) {}
}

impl Region {
    fn lock(&self) -> MutexGuard<'_, Pages> {
        self.stored.lock()
    }

    fn check(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        check_range((page, count), self.pages, self.server)
    }

    fn read(&self, page: PageId, buffer: &mut Buffer, zero_sum: u64) -> Result<(), PoolError> {
        self.check(page, buffer.pages() as u64)?;
        for index in 0..buffer.pages() {
            let id = page.0 + index as u64;
            let stored = self.lock().get(&id).cloned();
            let Some((sum, bytes)) = stored else {
                buffer.page_mut(index).fill(0);
                buffer.sums_mut()[index] = zero_sum;
                continue;
            };
            buffer.page_mut(index).copy_from_slice(&bytes);
            buffer.sums_mut()[index] = sum;
            if checksum(buffer.page(index)) != sum {
                return Err(PoolError::Corrupt { page: PageId(id), server: self.server });
            }
        }
        Ok(())
    }

    fn write(&self, page: PageId, buffer: &Buffer) -> Result<(), PoolError> {
        self.check(page, buffer.pages() as u64)?;
        for index in 0..buffer.pages() {
            if checksum(buffer.page(index)) != buffer.sums()[index] {
                return Err(PoolError::Corrupt { page: PageId(page.0 + index as u64), server: self.server });
            }
        }
        let pages = || (0..buffer.pages()).map(|index| (page.0 + index as u64, index));
        let mut stored = self.lock();
        if self.stored_max < usize::MAX {
            let more = pages().filter(|(id, _)| !stored.contains_key(id)).count();
            if stored.len() + more > self.stored_max {
                return Err(PoolError::PoolFull { server: self.server });
            }
        }
        let new = |index: usize| (buffer.sums()[index], Arc::from(buffer.page(index)));
        let old: Vec<_> = pages().map(|(id, index)| stored.insert(id, new(index))).collect();
        drop(stored);
        // Free the memory without holding the lock.
        drop(old);
        Ok(())
    }

    fn discard(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        self.check(page, count)?;
        let mut stored = self.lock();
        let gone: Vec<u64> = stored.range(page.0..page.0 + count).map(|(id, _)| *id).collect();
        let old: Vec<_> = gone.iter().map(|id| stored.remove(id)).collect();
        drop(stored);
        // Free the memory without holding the lock.
        drop(old);
        Ok(())
    }
}

struct RamLane {
    region: Arc<Region>,
    ready: VecDeque<LaneRequest>,
    ended: VecDeque<Completion>,
    zero_sum: u64,
}

impl Lane for RamLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        self.ready.push_back(request);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        while let Some(LaneRequest { tag, op, .. }) = self.ready.pop_front() {
            let (result, buffer) = match op {
                Op::Read { page, mut buffer } => (self.region.read(page, &mut buffer, self.zero_sum), Some(buffer)),
                // Reading a part saves distance, and there is none here.
                Op::ReadPart { page, mut buffer, .. } => {
                    (self.region.read(page, &mut buffer, self.zero_sum), Some(buffer))
                }
                Op::Write { page, buffer } => (self.region.write(page, &buffer), Some(buffer)),
                Op::Discard { page, count } => (self.region.discard(page, count), None),
            };
            self.ended.push_back(Completion { tag, result, buffer });
        }
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        self.ready.len() + self.ended.len()
    }

    fn wait(&mut self, _timeout: Duration) {
        // Every submitted operation ends at the next poll.
    }
}

#[cfg(test)]
mod tests {
    use crate::trial::{assert_version, open, write};
    use crate::{PoolBuilder, PoolError, conformance};

    #[test]
    fn ram_conforms() {
        conformance::run(&PoolBuilder::new().url("ram:"));
        assert!(PoolBuilder::new().url("ram:7").pages(1).open().is_err());
    }

    #[test]
    fn a_full_region_takes_new_versions_of_its_pages() {
        let backend = open("ram:?size=64K", 64);
        let mut lane = backend.open_lane().unwrap();
        assert_eq!(write(&mut *lane, 8, 16, 1), Ok(()));
        assert_eq!(write(&mut *lane, 7, 2, 2), Err(PoolError::PoolFull { server: 0 }));
        assert_eq!(write(&mut *lane, 23, 1, 2), Ok(()));
        assert_version(&mut *lane, 8, 15, 1);
    }
}
