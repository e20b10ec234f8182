//! State that all lanes of a mirror share: its members and the words of its chunks.

use super::calls::Callees;
use crate::dirty_chunks::DirtyChunks;
use crate::redundant::members::{Membership, PoolMember};
use crate::redundant::rejoin::SpareMembers;
use crate::redundant::scrub::Scrub;
use crate::{Backend, PoolError};
use core::ops::Deref;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use farfield_core::MemberSet;
use farfield_core::chunk_word::ChunkWord;
use farfield_os::memory;
use farfield_os::sync::Mutex;
use std::sync::Arc;

/// Number of pages that are valid or stale together.
pub(crate) const CHUNK_PAGES: u64 = 64;

/// Members of a mirror and the word of each of its chunks.
pub(crate) struct ReplicaMap {
    membership: Membership,
    pub(super) pages: u64,
    /// Members that are memory of this machine: they answer while they are polled, and are never
    /// slow.
    pub(super) near: MemberSet,
    /// Index of the member that is authoritative in a dual write ([`ReplicaMap::dual_write`]);
    /// [`NOBODY`] if there is none.
    authoritative: AtomicU8,
    dual_write: Option<DualWrite>,
    words: ChunkWordTable,
    pub(super) callees: Callees,
    /// Scrub of the mirror, which is off unless the maker of the table turns it on.
    pub(super) scrub: Scrub,
    /// Chunks that were written here (in a snapshot, since it was claimed) or that some member
    /// lacks, and their number. The scrub and the copier look at these.
    pub(super) written: DirtyChunks,
    pub(super) written_chunks: AtomicU64,
}

impl Deref for ReplicaMap {
    type Target = Membership;
    fn deref(&self) -> &Membership {
        &self.membership
    }
}

/// Contents of members when they become a mirror: each holds the same.
pub(crate) enum InitialContents {
    Zeros,
    /// Contents of a snapshot; only its parent knows where they are.
    Snapshot,
    /// Contents of a snapshot, with zeros outside of these chunks.
    Chunks(Arc<DirtyChunks>),
}

/// Value of `authoritative` when no member is.
const NOBODY: u8 = u8::MAX;

/// Two members between which a switch goes on.
struct DualWrite {
    /// Chunks that were ever written, also before there was a dual write.
    dirty_chunks: Arc<DirtyChunks>,
    /// Error for which the new member was given up.
    cause: Mutex<Option<PoolError>>,
}

impl ReplicaMap {
    /// Index of the old member of a dual write, and of the new one.
    pub(crate) const OLD: usize = 0;
    pub(crate) const NEW: usize = 1;

    /// Creates a dual write to `source`, which holds everything, and to `target`, which holds zeros
    /// and waits as a spare until it is [admitted](ReplicaMap::admit). The old member is
    /// *authoritative*: a write has succeeded if it has succeeded there. Failures of the other
    /// member end no operation.
    pub(crate) fn dual_write(
        source: Arc<dyn Backend>,
        target: Arc<dyn Backend>,
        dirty: Arc<DirtyChunks>,
    ) -> Result<ReplicaMap, PoolError> {
        let member = |backend: Arc<dyn Backend>| vec![PoolMember { backend: Some(backend), leaves: 1, server: 0 }];
        let pages = source.pages();
        let mut table = ReplicaMap::new(member(source), member(target).into(), pages, InitialContents::Zeros)?;
        table.authoritative = AtomicU8::new(ReplicaMap::OLD as u8);
        table.dual_write = Some(DualWrite { dirty_chunks: dirty, cause: Mutex::new(None) });
        Ok(table)
    }

    /// Lets the new member take part from now on. All lanes must be lanes of the dual write.
    pub(crate) fn admit(&self) {
        let Some(dual_write) = &self.dual_write else { return };
        self.mark_all(&dual_write.dirty_chunks);
        self.call_spare(ReplicaMap::NEW);
    }

    /// Returns the old member of a dual write.
    pub(crate) fn source(&self) -> Option<Arc<dyn Backend>> {
        self.backend(ReplicaMap::OLD)
    }

    /// Returns the authoritative member, while it lives.
    pub(super) fn authoritative(&self) -> Option<usize> {
        let authoritative = self.authoritative.load(Ordering::SeqCst);
        (authoritative != NOBODY && !self.failed().has(authoritative.into())).then_some(authoritative.into())
    }

    pub(crate) fn set_authoritative(&self, authoritative: Option<usize>) {
        self.authoritative.store(authoritative.map_or(NOBODY, |member| member as u8), Ordering::SeqCst);
    }

    /// Returns the member whose failures concern only the thread that carries out the switch.
    pub(super) fn follower(&self) -> Option<usize> {
        let leads = self.authoritative.load(Ordering::SeqCst) == ReplicaMap::NEW as u8;
        (self.dual_write.is_some() && !leads).then_some(ReplicaMap::NEW)
    }

    /// Gives up a member that has failed for good: others go on without it.
    pub(crate) fn give_up(&self, member: usize, error: PoolError) {
        if let Some(dual_write) = &self.dual_write
            && member == ReplicaMap::NEW
            && let Some(mut cause) = dual_write.cause.try_lock()
        {
            cause.get_or_insert(error);
        }
        self.mark_failed(member);
    }

    /// Checks whether a switch goes on. Then the authoritative member decides, and the other one is
    /// given up as soon as anything goes wrong there.
    pub(super) fn is_dual_write(&self) -> bool {
        self.dual_write.is_some()
    }

    /// Notes that it is unknown, and stays so, whether `member` has done a write.
    pub(super) fn note_indeterminate(&self, member: usize) {
        if self.is_dual_write() { self.mark_failed(member) } else { self.membership.note_indeterminate(member) }
    }

    /// Returns the error for which the new member was given up.
    pub(crate) fn cause(&self) -> Option<PoolError> {
        self.dual_write.as_ref().and_then(|dual_write| dual_write.cause.try_lock().and_then(|cause| *cause))
    }

    /// Returns how many of the chunks that were ever written the member holds, and how many there
    /// are. Both are 0 without a dual write.
    pub(crate) fn held(&self, member: usize) -> (u64, u64) {
        let Some(dual_write) = &self.dual_write else { return (0, 0) };
        let is_held = |chunk: u64| self.words.load(chunk).is_touched() && self.words.load(chunk).valid().has(member);
        dual_write.dirty_chunks.iter().fold((0, 0), |(held, all), chunk| (held + u64::from(is_held(chunk)), all + 1))
    }

    /// Returns the next chunk, from this one on, that a member may lack.
    pub(super) fn next_to_repair(&self, chunk: u64) -> Option<u64> {
        self.written.next(chunk)
    }

    /// Marks a chunk as written. This comes before any of it is written, or is known to be wrong.
    fn mark(&self, chunk: u64) {
        if self.written.mark(chunk) {
            self.written_chunks.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn new(
        members: Vec<PoolMember>,
        spares: SpareMembers,
        pages: u64,
        holds: InitialContents,
    ) -> Result<ReplicaMap, PoolError> {
        let is_known = !matches!(holds, InitialContents::Snapshot);
        assert!(is_known || spares.reopen.is_none(), "who comes later would be given nothing");
        let is_new = matches!(holds, InitialContents::Zeros);
        let spare = MemberSet::first(members.len() + spares.members.len()).difference(MemberSet::first(members.len()));
        let membership = Membership::new(members, spares, 1, !is_new, ChunkWord::MEMBERS_MAX);
        // Spares of a snapshot hold what the others hold.
        let spare = if is_new { spare.intersection(membership.select(|_, _| true)) } else { MemberSet(0) };
        let waiting = spare.union(membership.spare_slots());
        let most = membership.pages();
        let pages = if pages == 0 { most } else { pages.min(most) };
        let chunks = pages.div_ceil(CHUNK_PAGES);
        let first = if is_known { ChunkWord::fresh(waiting) } else { ChunkWord::inherited() };
        let table = ReplicaMap {
            pages,
            near: membership.select(|_, backend| backend.mapped().is_some()),
            authoritative: AtomicU8::new(NOBODY),
            dual_write: None,
            words: ChunkWordTable::new(chunks, first).map_err(PoolError::Os)?,
            callees: Callees::default(),
            scrub: Scrub::new(None),
            written: DirtyChunks::new(chunks).map_err(PoolError::Os)?,
            written_chunks: AtomicU64::new(0),
            membership,
        };
        if let InitialContents::Chunks(dirty) = holds {
            table.mark_all(&dirty);
        }
        Ok(table)
    }

    /// Notes that these chunks were written before this table existed.
    fn mark_all(&self, dirty: &DirtyChunks) {
        for chunk in dirty.iter() {
            self.mark(chunk);
            self.words.change(chunk, |word| Some(word.touch()));
        }
    }

    pub(super) fn word(&self, chunk: u64) -> ChunkWord {
        self.words.load(chunk)
    }

    /// Returns those of `members` that hold all of these pages and take part.
    pub(super) fn valid(&self, page: u64, count: u64, members: MemberSet) -> MemberSet {
        chunks(page, count).fold(members, |members, chunk| members.intersection(self.holders(chunk)))
    }

    /// Returns the members that hold the chunk. An untouched chunk is zeros, which all members
    /// hold, also those that came as spares.
    fn holders(&self, chunk: u64) -> MemberSet {
        let word = self.words.load(chunk);
        if word.is_touched() { word.valid() } else { self.all() }
    }

    /// Checks whether nothing was ever written to these pages.
    pub(super) fn is_untouched(&self, page: u64, count: u64) -> bool {
        let is_touched = |chunk| match &self.dual_write {
            Some(dual_write) => dual_write.dirty_chunks.has(chunk),
            None => self.words.load(chunk).is_touched(),
        };
        !chunks(page, count).any(is_touched)
    }

    /// Begins a write to all `active` members; returns `false` if that is not possible now.
    pub(super) fn begin_write(&self, page: u64, count: u64, active: MemberSet) -> bool {
        let range = chunks(page, count);
        let is_first = range.clone().any(|chunk| !self.words.load(chunk).is_touched());
        // Where nothing was written yet, all members that are not asked lack it from the beginning.
        let lacking = if is_first { self.present().difference(active) } else { MemberSet(0) };
        self.with_unrecorded_miss(lacking, || {
            let is_reliable = !is_first || self.unreliable().intersection(active).is_empty();
            is_reliable && self.begin_write_in(range, active)
        })
    }

    fn begin_write_in(&self, range: core::ops::Range<u64>, active: MemberSet) -> bool {
        for chunk in range.clone() {
            let Some((before, after)) = self.words.change(chunk, |word| word.begin_write(active)) else {
                (range.start..chunk).for_each(|begun| {
                    self.words.change(begun, |word| Some(word.end_write(active, MemberSet(0)).0));
                });
                return false;
            };
            self.mark(chunk);
            // A spare that came in since the members were chosen lacks the chunk, which could not
            // be seen before.
            if !before.is_touched() {
                after.stale(self.all()).iter().for_each(|member| self.note_missed(member));
            }
        }
        true
    }

    /// Checks whether a write that ends with these members would be kept.
    pub(super) fn keeps(&self, page: u64, count: u64, have: MemberSet) -> bool {
        chunks(page, count).all(|chunk| !self.holders(chunk).intersection(have).is_empty())
    }

    /// Ends a write at the members that `have` it, of those that were `asked`. Returns whether the
    /// write is kept.
    pub(super) fn end_write(&self, page: u64, count: u64, asked: MemberSet, have: MemberSet) -> bool {
        self.with_unrecorded_miss(self.present().difference(have), || self.end_write_at(page, count, asked, have))
    }

    fn end_write_at(&self, page: u64, count: u64, asked: MemberSet, have: MemberSet) -> bool {
        let reliable = have.difference(self.unreliable());
        let mut all_kept = true;
        // Without the authoritative member, copies at other members are worth nothing. A member
        // that became authoritative meanwhile and was not asked is behind, like any other.
        let failed_authoritative =
            self.authoritative().filter(|authoritative| asked.has(*authoritative) && !have.has(*authoritative));
        for chunk in chunks(page, count) {
            let mut kept = false;
            let changed = self.words.change(chunk, |word| {
                let (next, is_kept) = match failed_authoritative {
                    Some(authoritative) if word.valid().has(authoritative) => {
                        (word.fail_write(authoritative, self.all()), false)
                    }
                    // Bytes that only members have that are being given up would be lost with them.
                    _ if word.valid().intersection(reliable).is_empty() => word.end_write(MemberSet(0), self.all()),
                    _ => word.end_write(have, self.all()),
                };
                kept = is_kept;
                Some(next)
            });
            all_kept &= kept;
            if let Some((before, after)) = changed {
                self.count_missed(before, after);
            }
        }
        all_kept
    }

    /// Notes that `member` gave wrong bytes. Returns `true` if others are asked from now on.
    pub(super) fn suspect(&self, page: u64, count: u64, member: usize) -> bool {
        self.with_unrecorded_miss(MemberSet::one(member), || {
            let others = self.active().difference(self.unreliable());
            let mut is_changed = false;
            for chunk in chunks(page, count) {
                self.mark(chunk);
                if let Some((before, after)) = self.words.change(chunk, |word| word.suspect(member, others)) {
                    self.count_missed(before, after);
                    is_changed = true;
                }
            }
            is_changed
        })
    }

    /// Forgets which chunks the member holds. The member has failed, and no lane has a way to it.
    pub(super) fn forget(&self, member: usize) {
        for chunk in self.written.iter() {
            self.words.change(chunk, |word| Some(word.forget(member)));
        }
    }

    fn count_missed(&self, before: ChunkWord, after: ChunkWord) {
        for member in before.valid().difference(after.valid()).intersection(self.all()).iter() {
            self.note_missed(member);
        }
    }

    /// Begins to watch a chunk while the members' bytes are compared; returns `false` if it is
    /// being written.
    pub(super) fn watch(&self, chunk: u64) -> bool {
        self.words.change(chunk, |word| word.watch()).is_some()
    }

    /// Ends the watch over a chunk.
    pub(super) fn unwatch(&self, chunk: u64) {
        self.words.change(chunk, |word| Some(word.unwatch()));
    }

    /// Claims the copy of the chunk to `member` for the caller. Returns those of the `open` members
    /// from which it can be copied.
    pub(super) fn claim(&self, chunk: u64, member: usize, open: MemberSet) -> Option<MemberSet> {
        let (before, _) = self.words.change(chunk, |word| {
            // Late writes could land on top of the copy.
            if self.is_lagging(member) { None } else { Some(word.claim(member, open)?.0) }
        })?;
        Some(before.valid().intersection(open))
    }

    /// Ends a copy.
    pub(super) fn finish(&self, chunk: u64, member: usize, copied: bool) {
        let changed = self.words.change(chunk, |word| Some(word.finish(member, copied)));
        if changed.is_some_and(|(_, after)| after.valid().has(member)) {
            self.restored(CHUNK_PAGES.min(self.pages - chunk * CHUNK_PAGES));
        }
    }
}

pub(crate) fn chunks(page: u64, count: u64) -> core::ops::Range<u64> {
    page / CHUNK_PAGES..(page + count).div_ceil(CHUNK_PAGES)
}

/// Words of all chunks, in memory that exists once it is written. At the beginning every word is
/// `first`.
struct ChunkWordTable {
    base: usize,
    count: u64,
    first: ChunkWord,
}

impl ChunkWordTable {
    fn new(count: u64, first: ChunkWord) -> Result<ChunkWordTable, farfield_os::Errno> {
        Ok(ChunkWordTable { base: memory::map_anonymous(Self::bytes(count))?, count, first })
    }

    fn bytes(count: u64) -> usize {
        (count as usize * size_of::<AtomicU32>()).max(1)
    }

    fn at(&self, chunk: u64) -> &AtomicU32 {
        assert!(chunk < self.count);
        // SAFETY: inside of the mapping, which lives as long as we do; zeroed, aligned, and only
        // ever used as atomics.
        unsafe { &*(self.base as *const AtomicU32).add(chunk as usize) }
    }

    fn load(&self, chunk: u64) -> ChunkWord {
        ChunkWord(self.at(chunk).load(Ordering::SeqCst) ^ self.first.0)
    }

    /// Changes a word, which happens only here. Returns the word before and after, or `None` if
    /// `change` does.
    fn change(
        &self,
        chunk: u64,
        mut change: impl FnMut(ChunkWord) -> Option<ChunkWord>,
    ) -> Option<(ChunkWord, ChunkWord)> {
        let at = self.at(chunk);
        let mut before = at.load(Ordering::SeqCst);
        loop {
            let word = ChunkWord(before ^ self.first.0);
            let next = change(word)?;
            match at.compare_exchange_weak(before, next.0 ^ self.first.0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some((word, next)),
                Err(now) => before = now,
            }
        }
    }
}

impl Drop for ChunkWordTable {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; references do not outlive us.
        let _ = unsafe { memory::munmap(self.base, Self::bytes(self.count)) };
    }
}
