//! Index that says which row holds the newest version of each page, and which rows are in use.
//! Everything in it is a number that changes atomically: no lane waits for another.

use crate::bit_runs::{mask, run_of};
use crate::table::AtomicTable;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield_core::MemberSet;
use farfield_core::gf256::PARTS_MAX;
use farfield_core::row_word::RowWord;
use farfield_os::Errno;

/// Number of rows whose parts belong to the same shards, which is the number of bits of a word.
pub(super) const GROUP: u64 = u64::BITS as u64;
/// Rows beyond those that all pages could take: for rows that writers hold, and rows that are never
/// used again.
const MORE_ROWS: u64 = 64 * GROUP;
/// Most rows that versions can name.
const ROWS_MAX: u64 = (1 << 28) - GROUP;
/// Number of groups that are searched for a run of the wanted length before a shorter one will do.
const LOOKS: u64 = 16;
/// Number of entries that are noted together as perhaps written.
const BLOCK: u64 = 512;
/// Number of spent rows that are kept for writers; one more is kept for each eight rows in use.
const SPENT_KEPT: u64 = 4 * GROUP;
/// Number of sparse rows that are not worth writing again.
const SPARSE_KEPT: u64 = GROUP;

/// Place of the newest version of a page, and 32 bits of its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Version(u64);

impl Version {
    /// Version of a page that is zeros.
    pub(super) const ZEROS: Version = Version(0);

    pub(super) fn new(row: u64, part: usize, sum: u64) -> Version {
        debug_assert!(row < ROWS_MAX + GROUP && part < PARTS_MAX);
        let place = (row << 4) | part as u64;
        Version((sum << 32) | (place + 1))
    }

    fn place(self) -> u64 {
        u64::from(self.0 as u32) - 1
    }

    pub(super) fn row(self) -> u64 {
        self.place() >> 4
    }

    pub(super) fn part(self) -> usize {
        self.place() as usize % PARTS_MAX
    }

    /// Checks whether a page with this checksum could be this version.
    pub(super) fn is_of(self, sum: u64) -> bool {
        self.0 >> 32 == sum & 0xffff_ffff
    }
}

/// Newest version of each page, and state of each row.
pub(super) struct VersionIndex {
    pub(super) pages: u64,
    pub(super) rows: u64,
    versions: AtomicTable<AtomicU64>,
    /// Bit for each block of versions, set once something was written there.
    touched: AtomicTable<AtomicU64>,
    words: AtomicTable<AtomicU64>,
    /// Lower 32 bits of the checksum of each part of each row, part by part; 0 if the part was
    /// never made.
    digests: AtomicTable<AtomicU32>,
    parts: u64,
    /// Bit for each row, set while it is closed or claimed.
    used: AtomicTable<AtomicU64>,
    /// Group before which no group has a free row.
    low: AtomicU64,
    /// Row from which on no row was ever claimed.
    rows_end: AtomicU64,
    /// Number of closed rows, of live pages in them, and of spent rows.
    closed: AtomicU64,
    live: AtomicU64,
    spent: AtomicU64,
}

impl VersionIndex {
    /// Returns the number of rows, that is of pages of each member, for a region of `pages`. There
    /// are so many that one is always free, however sparse they are.
    pub(super) fn rows_for(pages: u64) -> u64 {
        pages.saturating_add(MORE_ROWS).next_multiple_of(GROUP).min(ROWS_MAX)
    }

    /// Creates an index of up to `rows` rows with `parts` parts each.
    pub(super) fn new(pages: u64, rows: u64, parts: u64) -> Result<VersionIndex, Errno> {
        let rows = rows / GROUP * GROUP;
        Ok(VersionIndex {
            pages,
            rows,
            versions: AtomicTable::new(pages)?,
            touched: AtomicTable::new(pages.div_ceil(BLOCK).div_ceil(GROUP))?,
            words: AtomicTable::new(rows)?,
            digests: AtomicTable::new(rows * parts)?,
            parts,
            used: AtomicTable::new(rows / GROUP)?,
            low: AtomicU64::new(0),
            rows_end: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            live: AtomicU64::new(0),
            spent: AtomicU64::new(0),
        })
    }

    /// Copies the index as it is now, for a snapshot of the members. It must not change meanwhile.
    pub(super) fn copy(&self) -> Result<VersionIndex, Errno> {
        let copy = VersionIndex::new(self.pages, self.rows, self.parts)?;
        self.each_written(0, self.pages, |page| {
            let version = self.version(page);
            if version != Version::ZEROS {
                copy.touch(page);
                copy.versions.at(page).store(version.0, Ordering::Relaxed);
            }
        });
        let end = self.rows_end();
        for row in 0..end {
            let (word, bit) = (self.word(row), 1 << (row % GROUP));
            if word.is_closed() && word.live() != 0 {
                let word = if word.is_claimed() { word.finish(0, word.have().has(0)).0 } else { word };
                copy.words.at(row).store(word.0, Ordering::Relaxed);
                for part in row * self.parts..(row + 1) * self.parts {
                    copy.digests.at(part).store(self.digests.at(part).load(Ordering::Relaxed), Ordering::Relaxed);
                }
                copy.used.at(row / GROUP).fetch_or(bit, Ordering::Relaxed);
                copy.closed.fetch_add(1, Ordering::Relaxed);
                copy.live.fetch_add(u64::from(word.live().count_ones()), Ordering::Relaxed);
            } else if word != RowWord::CLEAN || self.used.at(row / GROUP).load(Ordering::Relaxed) & bit != 0 {
                // A member may have bytes by now of a row that a writer has claimed.
                copy.words.at(row).store(RowWord::SPENT.0, Ordering::Relaxed);
                copy.spent.fetch_add(1, Ordering::Relaxed);
            }
        }
        copy.rows_end.store(end, Ordering::SeqCst);
        Ok(copy)
    }

    pub(super) fn version(&self, page: u64) -> Version {
        Version(self.versions.at(page).load(Ordering::SeqCst))
    }

    fn touch(&self, page: u64) {
        let (block, word) = (page / BLOCK, self.touched.at(page / BLOCK / GROUP));
        if word.load(Ordering::SeqCst) & 1 << (block % GROUP) == 0 {
            word.fetch_or(1 << (block % GROUP), Ordering::SeqCst);
        }
    }

    /// Makes `version`, whose row is closed, the newest one of `page`. With `only_after` it does so
    /// only if that is the newest one until now. The version that loses is not live any more.
    pub(super) fn set_version(&self, page: u64, version: Version, only_after: Option<Version>) {
        self.touch(page);
        let at = self.versions.at(page);
        let old = match only_after {
            None => Version(at.swap(version.0, Ordering::SeqCst)),
            Some(old) => match at.compare_exchange(old.0, version.0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => old,
                Err(_) => version,
            },
        };
        self.kill(old);
    }

    /// Makes the pages from `page` up to `end` zeros.
    pub(super) fn discard(&self, page: u64, end: u64) {
        self.each_written(page, end, |page| {
            if self.version(page) != Version::ZEROS {
                self.kill(Version(self.versions.at(page).swap(0, Ordering::SeqCst)));
            }
        });
    }

    /// Calls `each` for every page of a range that may have been written.
    fn each_written(&self, page: u64, end: u64, mut each: impl FnMut(u64)) {
        let mut at = page;
        while at < end {
            let block = at / BLOCK;
            let bits = self.touched.at(block / GROUP).load(Ordering::SeqCst) >> (block % GROUP);
            if bits & 1 != 0 {
                let stop = ((block + 1) * BLOCK).min(end);
                (at..stop).for_each(&mut each);
                at = stop;
            } else {
                let next = if bits == 0 { GROUP - block % GROUP } else { u64::from(bits.trailing_zeros()) };
                at = (block + next) * BLOCK;
            }
        }
    }

    /// Returns the first page from `page` on that may have been written, or the end.
    pub(super) fn next_written(&self, page: u64) -> u64 {
        let mut block = page / BLOCK;
        while block * BLOCK < self.pages {
            let bits = self.touched.at(block / GROUP).load(Ordering::SeqCst) >> (block % GROUP);
            if bits != 0 {
                return ((block + u64::from(bits.trailing_zeros())) * BLOCK).max(page);
            }
            block += GROUP - block % GROUP;
        }
        self.pages
    }

    fn kill(&self, version: Version) {
        if version == Version::ZEROS {
            return;
        }
        let (row, mut is_over) = (version.row(), false);
        self.change(row, |word| {
            let (next, over) = word.kill(version.part());
            is_over = over;
            Some(next)
        });
        self.live.fetch_sub(1, Ordering::SeqCst);
        if is_over {
            self.spend(row);
        }
    }

    /// Counts a row whose word has just become Spent, and frees it.
    fn spend(&self, row: u64) {
        self.closed.fetch_sub(1, Ordering::SeqCst);
        self.spent.fetch_add(1, Ordering::SeqCst);
        self.give(row, 1);
    }

    fn give(&self, first: u64, count: u64) {
        self.used.at(first / GROUP).fetch_and(!mask(first % GROUP, count), Ordering::SeqCst);
        self.low.fetch_min(first / GROUP, Ordering::SeqCst);
    }

    /// Claims neighbouring rows of one group for a writer: `wanted` rows if there is such a run
    /// nearby, else fewer.
    pub(super) fn claim(&self, wanted: u64) -> Option<(u64, u64)> {
        let start = self.low.load(Ordering::SeqCst);
        for group in start..self.rows / GROUP {
            let used = self.used.at(group).load(Ordering::SeqCst);
            if used == u64::MAX {
                let _ = self.low.compare_exchange(group, group + 1, Ordering::SeqCst, Ordering::SeqCst);
                if self.used.at(group).load(Ordering::SeqCst) != u64::MAX {
                    self.low.fetch_min(group, Ordering::SeqCst);
                }
                continue;
            }
            let is_enough = |count: &u64| *count == wanted || group - start >= LOOKS;
            let Some((shift, count)) = run_of(!used, wanted).filter(|(_, count)| is_enough(count)) else { continue };
            let bits = mask(shift, count);
            let before = self.used.at(group).fetch_or(bits, Ordering::SeqCst);
            if before & bits != 0 {
                // Another lane was faster with some of these rows.
                self.used.at(group).fetch_and(!(bits & !before), Ordering::SeqCst);
                self.low.fetch_min(group, Ordering::SeqCst);
                continue;
            }
            let first = group * GROUP + shift;
            self.begin(first, count);
            return Some((first, count));
        }
        None
    }

    fn begin(&self, first: u64, count: u64) {
        self.rows_end.fetch_max(first + count, Ordering::SeqCst);
        for row in first..first + count {
            if RowWord(self.words.at(row).swap(RowWord::CLEAN.0, Ordering::SeqCst)).is_spent() {
                self.spent.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Claims spent rows, to be discarded at the members, from `group` downwards. Also returns the
    /// group to go on from.
    pub(super) fn claim_spent(&self, group: u64) -> (Option<(u64, u64)>, u64) {
        for group in (0..=group).rev() {
            let used = self.used.at(group).load(Ordering::SeqCst);
            if used == u64::MAX {
                continue;
            }
            let is_spent = |row: &u64| used & 1 << row == 0 && self.word(group * GROUP + row).is_spent();
            let Some(first) = (0..GROUP).find(is_spent) else { continue };
            let count = (first..GROUP).take_while(is_spent).count() as u64;
            let bits = mask(first, count);
            let before = self.used.at(group).fetch_or(bits, Ordering::SeqCst);
            if before & bits == 0 {
                let first = group * GROUP + first;
                self.begin(first, count);
                return (Some((first, count)), group);
            }
            self.used.at(group).fetch_and(!(bits & !before), Ordering::SeqCst);
        }
        (None, 0)
    }

    /// Gives claimed rows back. Unless they are `clean`, members may hold bytes of them.
    pub(super) fn unclaim(&self, first: u64, count: u64, clean: bool) {
        if !clean {
            (first..first + count).for_each(|row| self.words.at(row).store(RowWord::SPENT.0, Ordering::SeqCst));
            self.spent.fetch_add(count, Ordering::SeqCst);
        }
        self.give(first, count);
    }

    /// Closes a claimed row that has been written; it may be read from now on. If the write is
    /// still `awaited` at some member, the row stays claimed until that has [answered](Self::answered):
    /// the member may be written to by other lanes meanwhile, and old bytes would land on new ones.
    pub(super) fn close(&self, row: u64, have: MemberSet, present: u16, awaited: bool) {
        self.closed.fetch_add(1, Ordering::SeqCst);
        self.live.fetch_add(u64::from(present.count_ones()), Ordering::SeqCst);
        let closed = RowWord::closed(have, present);
        let word = if awaited { closed.watch().unwrap_or(closed) } else { closed };
        self.words.at(row).store(word.0, Ordering::SeqCst);
    }

    /// Keeps claimed rows whose write has failed until all members have [answered](Self::answered).
    pub(super) fn abandon(&self, first: u64, count: u64) {
        (first..first + count).for_each(|row| self.words.at(row).store(RowWord::ABANDONED.0, Ordering::SeqCst));
    }

    /// Takes note that all members have answered the write of a row that was closed or abandoned before.
    pub(super) fn answered(&self, row: u64) {
        let word = self.word(row);
        if word == RowWord::ABANDONED {
            self.unclaim(row, 1, false);
        } else if word.is_closed() && word.is_claimed() {
            self.unwatch(row);
        }
    }

    /// Sets the checksum of this part of a row; `None` means that the part was never made. The
    /// caller must be alone with the row, as its writer or by a claim.
    pub(super) fn set_digest(&self, row: u64, part: usize, sum: Option<u64>) {
        let digest = sum.map_or(0, |sum| sum as u32);
        // A thread that keeps the row has seen its word change after this.
        self.digests.at(row * self.parts + part as u64).store(digest, Ordering::Relaxed);
    }

    /// Checks whether bytes with this checksum could be this part of the row, which the caller
    /// keeps. Returns `None` if the part was never made.
    pub(super) fn is_digest(&self, row: u64, part: usize, sum: u64) -> Option<bool> {
        let digest = self.digests.at(row * self.parts + part as u64).load(Ordering::Relaxed);
        (digest != 0).then_some(digest == sum as u32)
    }

    pub(super) fn word(&self, row: u64) -> RowWord {
        RowWord(self.words.at(row).load(Ordering::SeqCst))
    }

    /// Returns the end of the rows that were ever claimed.
    pub(super) fn rows_end(&self) -> u64 {
        self.rows_end.load(Ordering::SeqCst)
    }

    /// Notes that `member` gave wrong bytes of these rows. Returns `true` if others are asked from
    /// now on.
    pub(super) fn suspect(&self, first: u64, count: u64, member: usize, needed: usize, living: MemberSet) -> bool {
        let change = |row| self.change(row, |word| word.suspect(member, needed, living));
        (first..first + count).fold(false, |changed, row| changed | change(row))
    }

    /// Forgets which rows `member` holds. The member has failed, and no lane has a way to it.
    pub(super) fn forget(&self, member: usize) {
        (0..self.rows_end()).for_each(|row| {
            self.change(row, |word| word.forget(member));
        });
    }

    /// Begins to watch a row, which stays as it is until [`VersionIndex::unwatch`]. Returns `false` if it
    /// cannot be watched now.
    pub(super) fn watch(&self, row: u64) -> bool {
        self.change(row, RowWord::watch)
    }

    /// Ends the watch over a row.
    pub(super) fn unwatch(&self, row: u64) {
        let mut is_over = false;
        self.change(row, |word| {
            let (next, over) = word.unwatch();
            is_over = over;
            Some(next)
        });
        if is_over {
            self.spend(row);
        }
    }

    /// Claims the repair of the part of the row that `member` shall get. Returns `false` if it is
    /// not to be repaired now.
    pub(super) fn claim_repair(&self, row: u64, member: usize) -> bool {
        self.change(row, |word| word.claim(member))
    }

    /// Ends the repair of a row's part at `member`.
    pub(super) fn finish_repair(&self, row: u64, member: usize, repaired: bool) {
        let mut is_over = false;
        self.change(row, |word| {
            let (next, over) = word.finish(member, repaired);
            is_over = over;
            Some(next)
        });
        if is_over {
            self.spend(row);
        }
    }

    /// Changes the word of a row that others may change, too; this is the only place that does.
    fn change(&self, row: u64, mut change: impl FnMut(RowWord) -> Option<RowWord>) -> bool {
        let at = self.words.at(row);
        let mut before = at.load(Ordering::SeqCst);
        while let Some(next) = change(RowWord(before)) {
            match at.compare_exchange_weak(before, next.0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return true,
                Err(now) => before = now,
            }
        }
        false
    }

    /// Checks whether members keep more spent rows than is good.
    pub(super) fn has_too_many_spent(&self) -> bool {
        self.spent.load(Ordering::SeqCst) > SPENT_KEPT + self.closed.load(Ordering::SeqCst) / 8
    }

    /// Checks whether closed rows, of `data` pages each, have room for over a quarter more pages
    /// than are live in them.
    pub(super) fn is_sparse(&self, data: u64) -> bool {
        let live = self.live.load(Ordering::SeqCst);
        data > 1 && self.closed.load(Ordering::SeqCst).saturating_sub(SPARSE_KEPT) * data > live + live / 4
    }

    /// Returns the number of rows that no writer can claim now.
    #[cfg(test)]
    pub(super) fn used_rows(&self) -> u64 {
        (0..self.rows / GROUP).map(|group| u64::from(self.used.at(group).load(Ordering::SeqCst).count_ones())).sum()
    }

    /// Returns the number of closed rows, of live pages in them, and of spent rows.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let [closed, live, spent] = [&self.closed, &self.live, &self.spent].map(|count| count.load(Ordering::SeqCst));
        (closed, live, spent)
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a row that two writers have, or one that is lost.
    use super::*;
    use crate::conformance::Random;

    #[test]
    fn versions_name_rows_and_parts() {
        let version = Version::new(ROWS_MAX - 1, 15, 0xabcd_0000_1234_5678);
        assert_eq!((version.row(), version.part()), (ROWS_MAX - 1, 15));
        assert!(version.is_of(0x1234_5678) && !version.is_of(0xabcd_0000_0234_5678));
        assert!(Version::new(0, 0, 0) != Version::ZEROS);
    }

    #[test]
    fn rows_are_claimed_once_and_come_back() {
        let index = VersionIndex::new(1000, VersionIndex::rows_for(1000), 3).unwrap();
        let mut random = Random(77);
        let mut versions: Vec<Option<Version>> = vec![None; 1000];
        for step in 0..20_000u64 {
            let page = random.below(1000);
            match random.below(5) {
                0 => {
                    index.discard(page, page + 1);
                    versions[page as usize] = None;
                }
                1 => {
                    let (first, count) = index.claim(1 + random.below(16)).expect("there always is a row");
                    index.unclaim(first, count, false);
                }
                _ => {
                    let (first, count) = index.claim(1 + random.below(4)).expect("there always is a row");
                    for row in first..first + count {
                        assert!(!index.word(row).is_closed());
                        let page = (page + row - first) % 1000;
                        let version = Version::new(row, 1, step);
                        index.close(row, MemberSet(7), 2, false);
                        index.set_version(page, version, None);
                        versions[page as usize] = Some(version);
                    }
                }
            }
        }
        let live = versions.iter().flatten().count() as u64;
        assert_eq!(index.counts().0, live);
        assert_eq!(index.counts().1, live);
        for (page, version) in versions.iter().enumerate() {
            assert_eq!(index.version(page as u64), version.unwrap_or(Version::ZEROS));
        }
        let copy = index.copy().unwrap();
        assert_eq!((copy.counts().0, copy.counts().1), (live, live));
        index.discard(0, 1000);
        assert_eq!((index.counts().0, index.counts().1), (0, 0));
        assert!(index.rows_end() < 1000 + MORE_ROWS);
        assert_eq!(index.used.at(0).load(Ordering::SeqCst), 0);
    }
}
