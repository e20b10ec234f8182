//! Copier of chunks to members that lack them. It copies a few at a time, in the background, and is
//! driven by lanes that are polled or by a thread of its own.

use super::lane::MirrorScheme;
use super::replica_map::{CHUNK_PAGES, ReplicaMap};
use crate::redundant::repair_schedule::{RepairLook, RepairSchedule};
use crate::redundant::scheme::Scheme;
use crate::{Buffer, Op, PoolError};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;

/// Number of pages that are read at a time.
const STEP_PAGES: u64 = 16;
/// Copy of one chunk to one member, and how far it is.
struct ChunkCopy {
    chunk: u64,
    member: usize,
    sources: MemberSet,
    /// Source that was asked last.
    source: usize,
    /// First page of the chunk that is not copied yet.
    page: u64,
    count: u64,
    /// Number of pages of the step that are stored; `None` while they are read.
    stored: Option<usize>,
    read: Option<Buffer>,
    write: Option<Buffer>,
    /// When a step that stores pages has taken too long, and whether it has. Then it is not waited
    /// for, and the chunk stays claimed until the step is answered.
    late_at: u64,
    is_late: bool,
}

/// Copies that one lane makes.
pub(super) struct Copier {
    copies: Vec<Option<ChunkCopy>>,
    /// Buffers of jobs that do not run: one to read to, one to write from.
    buffers: Vec<(Buffer, Buffer)>,
    schedule: RepairSchedule,
    /// Members from which a copy was not read in time: others are asked first.
    slow: MemberSet,
    zero: Box<[u8; PAGE_BYTES]>,
}

impl Copier {
    pub(super) fn new(copies: usize) -> Copier {
        let run = || Buffer::new(STEP_PAGES as usize);
        Copier {
            copies: std::iter::repeat_with(|| None).take(copies).collect(),
            buffers: (0..copies).map(|_| (run(), run())).collect(),
            schedule: RepairSchedule::new(),
            slow: MemberSet(0),
            zero: Box::new([0; PAGE_BYTES]),
        }
    }

    /// Starts no more copies; those that are under way end.
    pub(super) fn give_up(&mut self) {
        self.schedule.stop();
    }

    /// Checks whether a copy is under way that is waited for.
    pub(super) fn is_busy(&self) -> bool {
        self.copies.iter().flatten().any(|copy| !copy.is_late)
    }

    pub(super) fn is_late(&self, copy: usize) -> bool {
        self.copies[copy].as_ref().is_some_and(|copy| copy.is_late)
    }

    /// Marks members as lagging that do not store what they are given in time. The write may still
    /// arrive, on top of what would be copied there next.
    pub(super) fn mark_lagging(&mut self, table: &ReplicaMap) {
        if table.is_dual_write() || self.copies.iter().flatten().all(|copy| copy.late_at == u64::MAX) {
            return;
        }
        let now = now_ns();
        for copy in self.copies.iter_mut().flatten().filter(|copy| copy.late_at <= now) {
            (copy.late_at, copy.is_late) = (u64::MAX, true);
            table.mark_lagging(copy.member, now.saturating_add(MirrorScheme::REPAIR_DEADLINE.as_nanos() as u64));
        }
    }

    /// Claims the next chunk that a member lacks, if there is one. Returns the job, and which
    /// operation to send to which member. The chunk is copied to a member that is `usable`, from
    /// one that the lane has a way to.
    pub(super) fn start(
        &mut self,
        table: &ReplicaMap,
        usable: MemberSet,
        open: MemberSet,
    ) -> Option<(usize, (usize, Op))> {
        if self.schedule.is_resting() {
            return None;
        }
        let copy = self.copies.iter().position(Option::is_none)?;
        let (chunk, member, sources) = self.look(table, usable, open)?;
        let (read, write) = self.buffers.pop()?;
        let page = chunk * CHUNK_PAGES;
        let count = STEP_PAGES.min(table.pages - page);
        let (stored, late_at, is_late) = (None, u64::MAX, false);
        let (read, write) = (Some(read), Some(write));
        self.copies[copy] = Some(ChunkCopy {
            chunk,
            member,
            sources,
            source: member,
            page,
            count,
            stored,
            read,
            write,
            late_at,
            is_late,
        });
        match self.read_step(table, copy) {
            Some(step) => Some((copy, step)),
            None => {
                self.finish(table, copy, false);
                None
            }
        }
    }

    /// Looks at some words for a chunk that a member lacks, and claims it.
    fn look(&mut self, table: &ReplicaMap, usable: MemberSet, open: MemberSet) -> Option<(u64, usize, MemberSet)> {
        let to_repair = table.repairable().intersection(usable);
        self.schedule.find(
            table,
            to_repair,
            |chunk| table.next_to_repair(chunk),
            |chunk, member| {
                let word = table.word(chunk);
                if !word.is_touched() || word.valid().has(member) {
                    return RepairLook::Whole;
                }
                match table.claim(chunk, member, open) {
                    Some(sources) => RepairLook::Claimed { repair: (chunk, member, sources), next: chunk + 1 },
                    None => RepairLook::Busy,
                }
            },
        )
    }

    fn read_step(&mut self, table: &ReplicaMap, copy: usize) -> Option<(usize, Op)> {
        let copy = self.copies[copy].as_mut()?;
        let sources = copy.sources.intersection(table.present());
        let quick = sources.intersection(table.active()).difference(self.slow);
        let source = quick.iter().chain(sources.difference(self.slow).iter()).chain(sources.iter()).next()?;
        let mut buffer = copy.read.take()?;
        buffer.set_pages(copy.count as usize);
        (copy.stored, copy.source) = (None, source);
        Some((source, Op::Read { page: PageId(copy.page), buffer }))
    }

    /// Handles the end of a step; returns the next step, unless that was the last.
    pub(super) fn on_end(
        &mut self,
        table: &ReplicaMap,
        index: usize,
        result: Result<(), PoolError>,
        buffer: Option<Buffer>,
    ) -> Option<(usize, Op)> {
        let copy = self.copies[index].as_mut()?;
        let (member, was_read) = (copy.member, copy.stored.is_none());
        let is_silence = result.is_err_and(PoolError::is_silence);
        copy.late_at = u64::MAX;
        if core::mem::take(&mut copy.is_late) {
            if is_silence { table.stay_lagging(member) } else { table.on_late_reply(member) }
        } else if !was_read && is_silence && table.follower() != Some(member) {
            // The write may still arrive.
            table.note_indeterminate(member);
        }
        match buffer {
            Some(buffer) if was_read => copy.read = Some(buffer),
            Some(buffer) => copy.write = Some(buffer),
            None => {}
        }
        if let Err(error) = result {
            if !was_read && table.follower() == Some(member) {
                table.give_up(member, error);
            }
            if was_read && matches!(error, PoolError::TimedOut { .. }) {
                self.slow = self.slow.union(MemberSet::one(copy.source));
            }
            // A source that gave wrong bytes becomes a target of copies itself, if another member
            // holds the chunk. Bytes that were read while a write was under way say nothing of it.
            let is_spoiled = !table.word(copy.chunk).is_copying(member);
            let wrong = was_read && !is_spoiled && matches!(error, PoolError::Corrupt { .. });
            if wrong && table.suspect(copy.page, copy.count, copy.source) {
                self.finish(table, index, false);
                return None;
            }
            if wrong && let Some(follower) = table.follower() {
                // No member has the right bytes, and pages that cannot be read cannot be moved.
                table.give_up(follower, error);
            }
            self.schedule.rest();
            self.finish(table, index, false);
            return None;
        }
        if was_read {
            self.slow = self.slow.difference(MemberSet::one(copy.source));
        }
        if !table.word(copy.chunk).is_copying(member) || self.schedule.is_stopped() {
            self.finish(table, index, false);
            return None;
        }
        if let Some(step) = self.write_step(index) {
            return Some((member, step));
        }
        let copy = self.copies[index].as_mut()?;
        copy.page += copy.count;
        let end = ((copy.chunk + 1) * CHUNK_PAGES).min(table.pages);
        if copy.page == end {
            self.finish(table, index, true);
            return None;
        }
        copy.count = STEP_PAGES.min(end - copy.page);
        let step = self.read_step(table, index);
        if step.is_none() {
            self.finish(table, index, false);
        }
        step
    }

    /// Stores the next run of pages that were read. Pages of zeros are stored by a discard, which
    /// takes no memory.
    fn write_step(&mut self, index: usize) -> Option<Op> {
        let zero = &self.zero[..];
        let copy = self.copies[index].as_mut()?;
        let read = copy.read.as_ref()?;
        let first = *copy.stored.get_or_insert(0);
        if first == copy.count as usize {
            return None;
        }
        let is_zero = read.page(first) == zero;
        let end = (first + 1..copy.count as usize).find(|&page| (read.page(page) == zero) != is_zero);
        let end = end.unwrap_or(copy.count as usize);
        let page = PageId(copy.page + first as u64);
        copy.stored = Some(end);
        copy.late_at = now_ns().saturating_add(MirrorScheme::REPAIR_DEADLINE.as_nanos() as u64);
        if is_zero {
            return Some(Op::Discard { page, count: (end - first) as u64 });
        }
        let mut buffer = copy.write.take()?;
        buffer.set_pages(end - first);
        for from in first..end {
            buffer.page_mut(from - first).copy_from_slice(read.page(from));
            buffer.sums_mut()[from - first] = read.sums()[from];
        }
        Some(Op::Write { page, buffer })
    }

    fn finish(&mut self, table: &ReplicaMap, index: usize, copied: bool) {
        let Some(ChunkCopy { chunk, member, read, write, .. }) = self.copies[index].take() else { return };
        table.finish(chunk, member, copied);
        if let (Some(read), Some(write)) = (read, write) {
            self.buffers.push((read, write));
        }
    }
}
