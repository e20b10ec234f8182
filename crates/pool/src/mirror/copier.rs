//! Copier of chunks to legs that lack them. It copies a few at a time, in the background, and is
//! driven by lanes that are polled or by a thread of its own.

use super::replica_map::{CHUNK_PAGES, ReplicaMap};
use crate::{Buffer, Op, PoolError};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{MemberSet, PageId};
use farfield_os::process::now_ns;

/// Number of pages that are read at a time.
const STEP_PAGES: u64 = 16;
/// Number of words that are looked at in one go.
const LOOK_CHUNKS: u64 = 512;
/// Pause after a copy that failed.
const REST: Duration = Duration::from_millis(100);
/// Copy of one chunk to one leg, and how far it is.
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
    /// Round over all words: the leg that it is for, how often that leg had been hurt when it
    /// began, the next chunk, and whether anything was found.
    round: Option<MirrorRepairPass>,
    /// Time before which nothing begins, after a failure. At the end of the lane it is set to the
    /// end of time.
    rests_until: u64,
    /// Legs from which a copy was not read in time: others are asked first.
    slow: MemberSet,
    zero: Box<[u8; PAGE_BYTES]>,
}

struct MirrorRepairPass {
    member: usize,
    missed_generation: u32,
    next: u64,
    is_clean: bool,
}

impl Copier {
    /// Time limit of one step of a copy. (Tests have less time.)
    pub(super) const DEADLINE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

    pub(super) fn new(copies: usize) -> Copier {
        let run = || Buffer::new(STEP_PAGES as usize);
        Copier {
            copies: std::iter::repeat_with(|| None).take(copies).collect(),
            buffers: (0..copies).map(|_| (run(), run())).collect(),
            round: None,
            rests_until: 0,
            slow: MemberSet(0),
            zero: Box::new([0; PAGE_BYTES]),
        }
    }

    /// Starts no more copies; those that are under way end.
    pub(super) fn give_up(&mut self) {
        self.rests_until = u64::MAX;
    }

    /// Checks whether a copy is under way that is waited for.
    pub(super) fn is_busy(&self) -> bool {
        self.copies.iter().flatten().any(|job| !job.is_late)
    }

    pub(super) fn is_late(&self, job: usize) -> bool {
        self.copies[job].as_ref().is_some_and(|job| job.is_late)
    }

    /// Notes legs as late that do not store what they are given in time. The write may still
    /// arrive, on top of what would be copied there next.
    pub(super) fn mark_lagging(&mut self, table: &ReplicaMap) {
        if table.is_dual_write() || self.copies.iter().flatten().all(|job| job.late_at == u64::MAX) {
            return;
        }
        let now = now_ns();
        for job in self.copies.iter_mut().flatten().filter(|job| job.late_at <= now) {
            (job.late_at, job.is_late) = (u64::MAX, true);
            table.mark_lagging(job.member, now.saturating_add(Copier::DEADLINE.as_nanos() as u64));
        }
    }

    /// Claims the next chunk that a leg lacks, if there is one. Returns the job, and which
    /// operation to send to which leg. The chunk is copied to a leg that is `usable`, from one that
    /// the lane has a way to.
    pub(super) fn start(
        &mut self,
        table: &ReplicaMap,
        usable: MemberSet,
        open: MemberSet,
    ) -> Option<(usize, (usize, Op))> {
        if self.rests_until > 0 && now_ns() < self.rests_until {
            return None;
        }
        let job = self.copies.iter().position(Option::is_none)?;
        let (chunk, leg, sources) = self.look(table, usable, open)?;
        let (read, write) = self.buffers.pop()?;
        let page = chunk * CHUNK_PAGES;
        let count = STEP_PAGES.min(table.pages - page);
        let (stored, late_at, is_late) = (None, u64::MAX, false);
        let (read, write) = (Some(read), Some(write));
        self.copies[job] = Some(ChunkCopy {
            chunk,
            member: leg,
            sources,
            source: leg,
            page,
            count,
            stored,
            read,
            write,
            late_at,
            is_late,
        });
        match self.read_step(table, job) {
            Some(step) => Some((job, step)),
            None => {
                self.finish(table, job, false);
                None
            }
        }
    }

    /// Looks at some words for a chunk that a leg lacks. One round over all words is for one leg;
    /// the leg is healed when the round finds nothing.
    fn look(&mut self, table: &ReplicaMap, usable: MemberSet, open: MemberSet) -> Option<(u64, usize, MemberSet)> {
        let to_heal = table.repairable().intersection(usable);
        if to_heal.is_empty() {
            return None;
        }
        let round = self.round.get_or_insert_with(|| {
            let leg = to_heal.iter().next().unwrap_or(0);
            MirrorRepairPass { member: leg, missed_generation: table.missed_generation(leg), next: 0, is_clean: true }
        });
        let leg = round.member;
        for _ in 0..LOOK_CHUNKS {
            let Some(chunk) = table.next_to_repair(round.next).filter(|_| to_heal.has(leg)) else {
                if round.is_clean && to_heal.has(leg) {
                    table.set_repaired(leg, round.missed_generation);
                }
                self.round = None;
                return None;
            };
            round.next = chunk + 1;
            let word = table.word(chunk);
            if !word.is_touched() || word.valid().has(leg) {
                continue;
            }
            round.is_clean = false;
            if let Some(sources) = table.claim(chunk, leg, open) {
                return Some((chunk, leg, sources));
            }
        }
        None
    }

    fn read_step(&mut self, table: &ReplicaMap, job: usize) -> Option<(usize, Op)> {
        let job = self.copies[job].as_mut()?;
        let sources = job.sources.intersection(table.present());
        let quick = sources.intersection(table.active()).difference(self.slow);
        let source = quick.iter().chain(sources.difference(self.slow).iter()).chain(sources.iter()).next()?;
        let mut buffer = job.read.take()?;
        buffer.set_pages(job.count as usize);
        (job.stored, job.source) = (None, source);
        Some((source, Op::Read { page: PageId(job.page), buffer }))
    }

    /// Handles the end of a step; returns the next step, unless that was the last.
    pub(super) fn on_end(
        &mut self,
        table: &ReplicaMap,
        index: usize,
        result: Result<(), PoolError>,
        buffer: Option<Buffer>,
    ) -> Option<(usize, Op)> {
        let job = self.copies[index].as_mut()?;
        let (leg, was_read) = (job.member, job.stored.is_none());
        let is_silence = matches!(result, Err(PoolError::TimedOut { .. }));
        job.late_at = u64::MAX;
        if core::mem::take(&mut job.is_late) {
            if is_silence { table.stay_lagging(leg) } else { table.on_late_reply(leg) }
        } else if !was_read && is_silence && table.follower() != Some(leg) {
            // The write may still arrive.
            table.note_indeterminate(leg);
        }
        match buffer {
            Some(buffer) if was_read => job.read = Some(buffer),
            Some(buffer) => job.write = Some(buffer),
            None => {}
        }
        if let Err(error) = result {
            if !was_read && table.follower() == Some(leg) {
                table.give_up(leg, error);
            }
            if was_read && matches!(error, PoolError::TimedOut { .. }) {
                self.slow = self.slow.union(MemberSet::one(job.source));
            }
            // A source that gave wrong bytes becomes a target of copies itself, if another leg
            // holds the chunk.
            let wrong = was_read && matches!(error, PoolError::Corrupt { .. });
            if wrong && table.suspect(job.page, job.count, job.source) {
                self.finish(table, index, false);
                return None;
            }
            if wrong && let Some(follower) = table.follower() {
                // No leg has the right bytes, and pages that cannot be read cannot be moved.
                table.give_up(follower, error);
            }
            self.rests_until = self.rests_until.max(now_ns().saturating_add(REST.as_nanos() as u64));
            self.finish(table, index, false);
            return None;
        }
        if was_read {
            self.slow = self.slow.difference(MemberSet::one(job.source));
        }
        if !table.word(job.chunk).is_copying(leg) || self.rests_until == u64::MAX {
            self.finish(table, index, false);
            return None;
        }
        if let Some(step) = self.write_step(index) {
            return Some((leg, step));
        }
        let job = self.copies[index].as_mut()?;
        job.page += job.count;
        let end = ((job.chunk + 1) * CHUNK_PAGES).min(table.pages);
        if job.page == end {
            self.finish(table, index, true);
            return None;
        }
        job.count = STEP_PAGES.min(end - job.page);
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
        let job = self.copies[index].as_mut()?;
        let read = job.read.as_ref()?;
        let first = *job.stored.get_or_insert(0);
        if first == job.count as usize {
            return None;
        }
        let is_zero = read.page(first) == zero;
        let end = (first + 1..job.count as usize).find(|&page| (read.page(page) == zero) != is_zero);
        let end = end.unwrap_or(job.count as usize);
        let page = PageId(job.page + first as u64);
        job.stored = Some(end);
        job.late_at = now_ns().saturating_add(Copier::DEADLINE.as_nanos() as u64);
        if is_zero {
            return Some(Op::Discard { page, count: (end - first) as u64 });
        }
        let mut buffer = job.write.take()?;
        buffer.set_pages(end - first);
        for from in first..end {
            buffer.page_mut(from - first).copy_from_slice(read.page(from));
            buffer.sums_mut()[from - first] = read.sums()[from];
        }
        Some(Op::Write { page, buffer })
    }

    fn finish(&mut self, table: &ReplicaMap, index: usize, copied: bool) {
        let Some(ChunkCopy { chunk, member: leg, read, write, .. }) = self.copies[index].take() else { return };
        table.finish(chunk, leg, copied);
        if let (Some(read), Some(write)) = (read, write) {
            self.buffers.push((read, write));
        }
    }
}
