//! Eviction: near pages leave in batches.
//!
//! A batch leaves in one shoot-down and loses no write, without stopping any thread:
//!
//! 1. Victims become Evicting, so that nobody else touches their words.
//! 2. Victims that share memory with another process (after fork) or with the zero page get memory
//!    of their own.
//! 3. `vmsplice` takes a reference to each victim's memory into a pipe.
//! 4. One `process_madvise` unmaps all victims. Whatever was written until then is in the memory
//!    that the pipe holds; whatever is written later faults and waits for the page to have left.
//! 5. Victims are read from the pipe. Pages of zeros vanish, a page that equals its far copy by
//!    checksum has left with that, and the rest is written to the pool.
//!
//! A program of one thread that evicts in this very thread writes nothing meanwhile
//! ([`SoleWriter`]). Then, before 3, pages whose far copy may still be right are asked for the
//! kernel's written bit, and those that were not written need neither 3 nor 5.
//!
//! No pipe can hold victims that the program may not access: `inaccessible.rs` evicts them.

mod inaccessible;

use super::call::Context;
use super::direct_calls::Announcement;
use super::huge;
use super::runtime::{Armed, Phase, Runtime, fail};
use super::sole_writer::{FirstWrites, SoleWriter};
use super::store::{EgressWriter, RUN_PAGES};
use super::sync::{Wait, nap, schedule_point};
use super::table::PageWordTable;
use crate::control::{believed, exit};
use crate::window;
use core::ops::Range;
use core::sync::atomic::{Ordering, fence};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::page_word::{PolicyRule, Requeue};
use farfield_core::policy::replacement::CANDIDATES_PER_VICTIM;
use farfield_core::{PageId, checksum};
use farfield_os::pagemap::{PageRun, category};
use farfield_os::{Errno, memory, pipe::PagePipe, process};
use farfield_pool::Buffer;

/// Maximum number of victims of one batch.
pub const BATCH: usize = 64;
/// Returns the bytes by which direct reclaim may overshoot while another thread is evicting
/// (Fastswap's α): 1.6 % of the limit, but at least 1 MiB and at most 8 MiB.
fn slack_bytes(limit: i64) -> i64 {
    (limit / 64).clamp(1 << 20, 8 << 20)
}

/// Near bytes below which a process may overshoot by `STARVING_SLACK_BYTES` more.
const STARVING_BYTES: i64 = 2 << 20;
const STARVING_SLACK_BYTES: i64 = 6 << 20;
/// Time that a thread waits for room before it gives up. It is longer than the pool may take for an
/// operation, so that a silent server is named as the cause.
const ROOM_TIMEOUT_NS: u64 = 45_000_000_000;

/// Part of the limit (1 / 32) that a process that forks keeps near. It waits `COPY_TIMEOUT_NS` for
/// others to make room for the rest.
const COPY_SHARE: i64 = 32;
const COPY_TIMEOUT_NS: u64 = 100_000_000;
/// Bytes that our heap is charged with at once, before it grows. Room for all of the growth may
/// take `HEAP_TIMEOUT_NS`, because nobody waits for it.
const HEAP_PIECE_BYTES: i64 = 256 << 10;
const HEAP_TIMEOUT_NS: u64 = 10_000_000_000;

/// Buffers of the evicting thread.
pub struct WindowEvictor {
    pipe: PagePipe,
    victims: [Victim; BATCH],
    count: usize,
    vectored: bool,
    /// Counters of first writes when the epoch began.
    writes: Option<FirstWrites>,
    /// Number of victims of this batch that were read and had no far copy that equals them.
    differing: usize,
}

#[derive(Clone, Copy)]
struct Victim {
    page: PageId,
    dirty: bool,
    shared: bool,
    /// Whether the page has a far copy.
    stored: bool,
    epoch: u32,
}

const NO_RANGE: libc::iovec = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };

/// Reason why a batch is evicted.
#[derive(Clone, Copy)]
pub enum ReclaimMode<'a> {
    /// A thread waits for the room: one of the program, interrupted in this context, or another.
    Direct(Option<&'a Context>),
    /// The batch is evicted ahead of need.
    Background,
}

/// Number of pages to evict at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EvictionSize {
    /// Most pages for one shoot-down.
    Batch = BATCH as isize,
    /// Number of pages that leave while a page travels.
    WhileWaiting = 8,
}

impl EvictionSize {
    /// Returns the size of a batch that leaves while a page travels. It is little, so that the page
    /// does not arrive before; but dirty pages leave in whole batches, so that neighbours are
    /// written together.
    pub fn while_waiting(runtime: &Runtime) -> EvictionSize {
        if runtime.dirty_share.get() < 16 { EvictionSize::WhileWaiting } else { EvictionSize::Batch }
    }
}

impl WindowEvictor {
    /// Creates an evictor with a pipe of its own.
    pub fn new(pipe: PagePipe) -> WindowEvictor {
        WindowEvictor {
            pipe,
            victims: [Victim { page: PageId(0), dirty: false, shared: false, stored: false, epoch: 0 }; BATCH],
            count: 0,
            vectored: true,
            writes: None,
            differing: 0,
        }
    }

    /// Closes the pipe in the child of a fork, where it is the parent's.
    pub fn close_inherited(&self) {
        for fd in self.pipe.fds() {
            farfield_os::file::close(fd);
        }
    }

    /// Evicts up to one batch. Returns the number of pages that left.
    pub fn run(&mut self, runtime: &Runtime, armed: &Armed, mode: ReclaimMode<'_>, size: EvictionSize) -> usize {
        let started = process::now_ns();
        self.choose(runtime, size as usize);
        self.spare_announced(runtime);
        self.unshare(runtime);
        if self.count == 0 {
            return 0;
        }
        huge::split(runtime.table(), self.victims[..self.count].iter().map(|victim| victim.page));
        let sole_writer = match mode {
            ReclaimMode::Direct(Some(context)) => SoleWriter::prove(runtime, armed, context),
            ReclaimMode::Direct(None) | ReclaimMode::Background => None,
        };
        let clean = sole_writer.as_ref().map_or(0, |sole_writer| self.find_clean(runtime, armed, sole_writer));
        let (taken, surplus) = self.take_away(armed, clean);
        let space = self.keep_inaccessible(runtime, taken);
        self.finish_victims(runtime, armed, taken, clean);
        if sole_writer.is_none() && taken > 0 {
            // The share is known only now.
            runtime.dirty_share.count(self.differing, taken);
        }
        let copied = space.map_or(0, |space| self.leave_inaccessible(runtime, armed, taken, space));
        if surplus > 0 && self.pipe.release(armed.null, surplus * PAGE_BYTES).is_err() {
            fail(exit::INTERNAL, format_args!("references to pages could not be released"));
        }
        let counters = runtime.counters();
        let counter = match mode {
            ReclaimMode::Direct(_) => &counters.direct_reclaims,
            ReclaimMode::Background => &counters.background_reclaims,
        };
        counter.fetch_add((taken + copied) as u64, Ordering::Relaxed);
        counters.reclaim_ns.fetch_add(process::now_ns() - started, Ordering::Relaxed);
        taken + copied
    }

    /// Takes victims from the head of the queue. Pages that the replacement policy keeps are queued
    /// again, until there were four candidates for each victim that is wanted.
    fn choose(&mut self, runtime: &Runtime, most: usize) {
        let table = runtime.table();
        let mut queue = runtime.queue.lock();
        self.count = 0;
        let looks = queue.len().min(16 * BATCH);
        for look in 0..looks {
            if self.count == most {
                break;
            }
            let Some(page) = queue.pop() else { break };
            let is_overruled = look >= most * CANDIDATES_PER_VICTIM;
            let rule = if is_overruled { PolicyRule::Overruled } else { PolicyRule::Applies };
            let mut again = Requeue::No;
            let taken = table.update(page, |word| match word.begin_eviction(rule) {
                Ok(word) => {
                    again = Requeue::No;
                    Some(word)
                }
                Err((word, requeue)) => {
                    again = requeue;
                    Some(word)
                }
            });
            let (_, word) = taken.expect("always");
            if again == Requeue::Yes {
                queue.push(page, |_| false);
            } else if word.state() == farfield_core::page_word::State::Evicting {
                let shared = word.is_shared();
                let (dirty, stored) = (word.is_dirty() || shared, word.is_stored());
                self.victims[self.count] = Victim { page, dirty, shared, stored, epoch: word.epoch() };
                self.count += 1;
            }
        }
        self.victims[..self.count].sort_unstable_by_key(|victim| victim.page);
    }

    /// Lets victims stay that calls under way may touch ([`super::direct_calls`]).
    fn spare_announced(&mut self, runtime: &Runtime) {
        fence(Ordering::SeqCst);
        for pages in runtime.threads.announcements().iter().flat_map(Announcement::pages) {
            self.let_stay(runtime, |victim| (pages.start..pages.end).contains(&victim.page.0));
        }
    }

    /// Lets those victims stay of which `stays` says so.
    fn let_stay(&mut self, runtime: &Runtime, stays: impl Fn(&Victim) -> bool) {
        let mut count = 0;
        for index in 0..self.count {
            let victim = self.victims[index];
            if stays(&victim) {
                inaccessible::stay(runtime, victim.page);
            } else {
                self.victims[count] = victim;
                count += 1;
            }
        }
        self.count = count;
    }

    /// Gives victims memory of their own if the kernel would replace their memory at a write. The
    /// pipe's reference must be to the memory that a late write hits. Where writing is not allowed
    /// nobody writes. Victims that cannot be given any stay.
    fn unshare(&mut self, runtime: &Runtime) {
        let has_own = |victim: &Victim| {
            let address = window::address_of(victim.page);
            // SAFETY: changes no content.
            let populated = unsafe { memory::madvise(address, PAGE_BYTES, libc::MADV_POPULATE_WRITE) };
            // The kernel returns EINVAL where writing is not allowed.
            populated.is_ok() || populated == Err(Errno(libc::EINVAL))
        };
        self.let_stay(runtime, |victim| victim.shared && !has_own(victim));
    }

    /// Begins another epoch if a page may have been written for the first time since this one
    /// began. Returns the epoch.
    fn look_at_epoch(&mut self, runtime: &Runtime, writes: FirstWrites) -> u32 {
        let epoch = runtime.epoch.load(Ordering::SeqCst);
        if self.writes == Some(writes) {
            return epoch;
        }
        self.writes = Some(writes);
        let next = epoch.wrapping_add(1).max(1);
        runtime.epoch.store(next, Ordering::SeqCst);
        next
    }

    /// Asks the kernel which of the clean-looking victims were written, run by run. Those that
    /// arrived in this epoch were not. Returns the number of clean victims, which come first. They
    /// are still clean when they are unmapped, because no other thread runs.
    fn find_clean(&mut self, runtime: &Runtime, armed: &Armed, sole_writer: &SoleWriter<'_>) -> usize {
        let epoch = self.look_at_epoch(runtime, sole_writer.first_writes());
        let mut at = 0;
        let in_doubt = |victim: &Victim| !victim.dirty && victim.epoch != epoch;
        while at < self.count {
            if !in_doubt(&self.victims[at]) {
                at += 1;
                continue;
            }
            let first = self.victims[at].page.0;
            let mut end = at + 1;
            while end < self.count
                && in_doubt(&self.victims[end])
                && self.victims[end].page.0 == first + (end - at) as u64
            {
                end += 1;
            }
            let start_address = window::address_of(PageId(first));
            let end_address = start_address + (end - at) * PAGE_BYTES;
            let mut runs = [PageRun::default(); BATCH];
            match armed.pagemap.scan(start_address, end_address, category::WRITTEN, &mut runs) {
                Ok((found, _)) => {
                    for run in &runs[..found] {
                        let from = (run.start as usize - start_address) / PAGE_BYTES;
                        let to = (run.end as usize - start_address) / PAGE_BYTES;
                        self.victims[at + from..at + to].iter_mut().for_each(|victim| victim.dirty = true);
                    }
                }
                Err(_) => self.victims[at..end].iter_mut().for_each(|victim| victim.dirty = true),
            }
            at = end;
        }
        // The pipe is emptied in this order.
        self.victims[..self.count].sort_unstable_by_key(|victim| (victim.dirty, victim.page));
        let dirty = self.victims[..self.count].iter().filter(|victim| victim.dirty).count();
        runtime.dirty_share.count(dirty, self.count);
        self.count - dirty
    }

    /// Takes references to all but the first `clean` victims, then unmaps. Returns the number of
    /// victims that are gone, and of references in the pipe to pages that are not.
    fn take_away(&mut self, armed: &Armed, clean: usize) -> (usize, usize) {
        let mut ranges = [NO_RANGE; BATCH];
        let mut held = clean;
        schedule_point();
        if clean < self.count {
            let count = merge(&self.victims[clean..self.count], &mut ranges);
            held += self.pipe.take(&ranges[..count]).unwrap_or(0) / PAGE_BYTES;
        }
        let held = held.min(self.count);
        schedule_point();
        let count = merge(&self.victims[..held], &mut ranges);
        let mut gone = 0;
        if self.vectored && held > 0 {
            // SAFETY: the pages' memory is held by the pipe and will be read by `finish_victims`.
            match unsafe { memory::drop_scattered(armed.pidfd, &ranges[..count]) } {
                Ok(bytes) => gone = bytes / PAGE_BYTES,
                // The kernel, or the profile of a container, does not allow the call.
                Err(errno) if matches!(errno.0, libc::EPERM | libc::EINVAL | libc::ENOSYS) => self.vectored = false,
                Err(_) => {}
            }
        }
        if !self.vectored {
            // One call per run, as before Linux 6.13.
            gone = 0;
            for range in &ranges[..count] {
                // SAFETY: as above.
                let dropped = unsafe { memory::madvise(range.iov_base as usize, range.iov_len, libc::MADV_DONTNEED) };
                if dropped.is_err() {
                    break;
                }
                gone += range.iov_len / PAGE_BYTES;
            }
        }
        (gone, held - gone.max(clean))
    }

    /// Decides for each of the first `gone` victims, which are unmapped, where it is now. The first
    /// `clean` equal their far copies, and the pipe has nothing of them.
    fn finish_victims(&mut self, runtime: &Runtime, armed: &Armed, gone: usize, clean: usize) {
        self.differing = 0;
        if gone == 0 {
            return;
        }
        let table = runtime.table();
        let now = runtime.evictions.fetch_add(gone as u32, Ordering::Relaxed);
        let clean = clean.min(gone);
        for victim in &self.victims[..clean] {
            table.update(victim.page, |word| Some(word.finish_eviction(now)));
        }
        runtime.counters().clean_drops.fetch_add(clean as u64, Ordering::Relaxed);
        runtime.charge(-(clean as i64));
        let mut changed = 0;
        if clean < gone {
            let from_pipe = |_, bytes: &mut [u8]| {
                // SAFETY: a slice is writable as long as it says.
                if unsafe { self.pipe.read_exact(bytes.as_mut_ptr(), bytes.len()) }.is_err() {
                    fail(exit::INTERNAL, format_args!("pages could not be read back from the pipe"));
                }
                true
            };
            let read = self.read_and_write(runtime, armed, clean..gone, now, from_pipe);
            (self.differing, changed) = (read.differing, read.changed);
        }
        let stored = self.victims[..gone].iter().filter(|victim| victim.stored).count();
        if stored > 0 {
            runtime.changed_share.count(changed, stored);
        }
    }

    /// Reads victims that nobody can write any more, run by run, in their order, until `read`
    /// fails. Writes those that changed to the pool.
    fn read_and_write(
        &self,
        runtime: &Runtime,
        armed: &Armed,
        range: Range<usize>,
        now: u32,
        read: impl Fn(PageId, &mut [u8]) -> bool,
    ) -> VictimCounts {
        let table = runtime.table();
        let victims = &self.victims[range];
        let mut diffs = [VictimDiff::Unchanged; BATCH];
        let mut writer = armed.store.writer();
        let mut at = 0;
        while at < victims.len() {
            let start = victims[at].page;
            let follows = |(index, victim): (usize, &Victim)| victim.page.0 == start.0 + index as u64;
            let rest = victims[at..].iter().take(RUN_PAGES);
            let count = rest.enumerate().take_while(|&victim| follows(victim)).count();
            let mut buffer = writer.buffer(count);
            if !read(start, &mut buffer.bytes_mut()[..count * PAGE_BYTES]) {
                writer.give_back(buffer);
                break;
            }
            let diffs = &mut diffs[at..at + count];
            for (index, diff) in diffs.iter_mut().enumerate() {
                *diff = victims[at + index].diff(table, buffer.page(index));
            }
            write_changed(&mut writer, start, buffer, diffs);
            at += count;
        }
        writer.finish();
        let counters = runtime.counters();
        let read = || victims[..at].iter().zip(&diffs);
        for (victim, diff) in read() {
            match *diff {
                VictimDiff::Unchanged => {
                    table.update(victim.page, |word| Some(word.finish_eviction(now)));
                    counters.clean_drops.fetch_add(1, Ordering::Relaxed);
                }
                VictimDiff::Zero => {
                    if victim.stored {
                        armed.store.discard(victim.page, 1);
                        runtime.charge_far(-1);
                    }
                    table.update(victim.page, |word| Some(word.finish_zero_eviction()));
                    counters.zero_pages.fetch_add(1, Ordering::Relaxed);
                }
                // The store updates the word when the page is written.
                VictimDiff::Changed(_) => {}
            }
        }
        runtime.charge(-(at as i64));
        let differing = || read().filter(|(_, diff)| !matches!(diff, VictimDiff::Unchanged));
        let changed = differing().filter(|(victim, _)| victim.stored).count();
        VictimCounts { pages: at, differing: differing().count(), changed }
    }
}

/// Numbers of victims that were read, that have no far copy that equals them (`differing`), and
/// that have a different one (`changed`).
struct VictimCounts {
    pages: usize,
    differing: usize,
    changed: usize,
}

/// Difference between a victim that was read and its far copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VictimDiff {
    /// The far copy equals the victim.
    Unchanged,
    /// The victim is all zeros and needs no far copy.
    Zero,
    /// The victim goes to the pool, with this checksum.
    Changed(u64),
}

impl Victim {
    fn diff(&self, table: &PageWordTable, bytes: &[u8]) -> VictimDiff {
        if is_zero(bytes) {
            return VictimDiff::Zero;
        }
        let sum = checksum(bytes);
        if self.stored && sum == table.sum(self.page) { VictimDiff::Unchanged } else { VictimDiff::Changed(sum) }
    }
}

/// Starts writing those pages of `buffer` that changed; the buffer belongs at `start`.
fn write_changed(writer: &mut EgressWriter<'_>, start: PageId, mut buffer: Buffer, diffs: &[VictimDiff]) {
    let mut at = 0;
    for run in diffs.chunk_by(|a, b| matches!(a, VictimDiff::Changed(_)) == matches!(b, VictimDiff::Changed(_))) {
        let first = at;
        at += run.len();
        let VictimDiff::Changed(_) = run[0] else { continue };
        let sums = run.iter().map(|diff| if let VictimDiff::Changed(sum) = diff { *sum } else { 0 });
        if run.len() == diffs.len() {
            buffer.sums_mut().iter_mut().zip(sums).for_each(|(place, sum)| *place = sum);
            writer.write(start, buffer);
            return;
        }
        let mut part = writer.buffer(run.len());
        part.bytes_mut().copy_from_slice(&buffer.bytes()[first * PAGE_BYTES..at * PAGE_BYTES]);
        part.sums_mut().iter_mut().zip(sums).for_each(|(place, sum)| *place = sum);
        writer.write(PageId(start.0 + first as u64), part);
    }
    writer.give_back(buffer);
}

/// Merges neighbouring victims into one range each. Returns the number of ranges.
fn merge(victims: &[Victim], ranges: &mut [libc::iovec; BATCH]) -> usize {
    let mut count = 0;
    for victim in victims {
        let address = window::address_of(victim.page);
        if count > 0 {
            let last = &mut ranges[count - 1];
            if last.iov_base as usize + last.iov_len == address {
                last.iov_len += PAGE_BYTES;
                continue;
            }
        }
        ranges[count] = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: PAGE_BYTES };
        count += 1;
    }
    count
}

fn is_zero(page: &[u8]) -> bool {
    // SAFETY: any bytes are a valid u64; the middle part is aligned.
    let (head, words, tail) = unsafe { page.align_to::<u64>() };
    head.is_empty() && tail.is_empty() && words.iter().all(|word| *word == 0)
}

/// Makes room for `pages` pages, evicting in this thread if need be, and charges them. Blocks until
/// they fit; while another thread evicts, some overshoot is allowed. Ends the program if there is
/// no room within 45 s. `context` is that of the program thread that needs the pages, if this is
/// one in its handler.
pub fn make_room(runtime: &Runtime, pages: i64, size: EvictionSize, context: Option<&Context>) {
    let need = pages * PAGE_BYTES as i64;
    let mut wait = Wait::new("room below the near limit");
    let mut deadline = None;
    loop {
        let (near, limit) = runtime.near();
        if near + need <= limit {
            break;
        }
        let armed = runtime.armed();
        let evicted = match armed.evictor.try_lock() {
            Some(mut evictor) => evictor.run(runtime, armed, ReclaimMode::Direct(context), size),
            None if near + need <= limit + slack_bytes(limit) => break,
            None => 0,
        };
        if evicted > 0 {
            continue;
        }
        // A thread that forks waits for the faults under way.
        if runtime.frozen_by.load(Ordering::Relaxed) != 0 {
            break;
        }
        // A process that has next to nothing near cannot help; the others evict meanwhile.
        let starving = believed(&runtime.slot().near_bytes) < STARVING_BYTES;
        if near + need <= limit + slack_bytes(limit) + if starving { STARVING_SLACK_BYTES } else { 0 } {
            break;
        }
        let now = process::now_ns();
        let deadline = *deadline.get_or_insert(now + ROOM_TIMEOUT_NS);
        if now > deadline {
            fail(
                exit::INTERNAL,
                format_args!(
                    "no room could be made below the near limit of {limit} bytes within 45 s ({near} in use); give the \
                     job more with --near"
                ),
            );
        }
        wait.pause();
    }
    runtime.charge(pages);
}

/// Makes room before our own heap grows by much. It charges the growth piece by piece, and after
/// each piece evicts until all fits, or for a moment. If it made room first and charged then, the
/// program would use the room as fast as it is made.
pub fn make_room_for_heap(runtime: &Runtime, bytes: i64) {
    let deadline = process::now_ns() + HEAP_TIMEOUT_NS;
    let mut charged = 0;
    while charged < bytes {
        charged = (charged + HEAP_PIECE_BYTES).min(bytes);
        runtime.expect_heap(charged);
        loop {
            let (near, limit) = runtime.near();
            // A thread that forks waits for threads that evict.
            let is_frozen = runtime.frozen_by.load(Ordering::Relaxed) != 0;
            if near <= limit || is_frozen || process::now_ns() > deadline {
                break;
            }
            let armed = runtime.armed();
            if armed.evictor.lock().run(runtime, armed, ReclaimMode::Background, EvictionSize::Batch) == 0 {
                nap(Duration::from_millis(1));
            }
        }
    }
}

/// Evicts ahead of need until the reserve is free again. Returns whether anything left.
pub fn reclaim_ahead(runtime: &Runtime) -> bool {
    if runtime.phase() != Phase::Armed {
        return false;
    }
    let armed = runtime.armed();
    let mut evicted = false;
    loop {
        let (near, limit) = runtime.near();
        let reserve = Runtime::reserve_bytes(limit);
        if near <= limit - reserve || runtime.frozen_by.load(Ordering::Relaxed) != 0 {
            return evicted;
        }
        let Some(mut evictor) = armed.evictor.try_lock() else { return evicted };
        if evictor.run(runtime, armed, ReclaimMode::Background, EvictionSize::Batch) == 0 {
            return evicted;
        }
        evicted = true;
    }
}

/// Makes room before a fork, after which this process would be there twice. Evicts, and waits a
/// moment for other processes to do so, until both fit the budget. Other threads of this process
/// may bring pages near as fast as they leave.
pub fn make_room_for_copy(runtime: &Runtime, context: &Context) {
    let deadline = process::now_ns() + COPY_TIMEOUT_NS;
    while !shrink_for_copy(runtime, context, deadline) && process::now_ns() < deadline {
        process::sleep(Duration::from_millis(1));
    }
}

/// Evicts until a second process like this one fits the budget, as far as this process can help. No
/// other thread of this process may bring pages near meanwhile.
pub fn make_room_for_copy_frozen(runtime: &Runtime, context: &Context) {
    shrink_for_copy(runtime, context, u64::MAX);
}

/// Evicts for a copy of this process, but keeps a small share for the two to run with. Returns
/// whether the copy fits.
fn shrink_for_copy(runtime: &Runtime, context: &Context, deadline: u64) -> bool {
    let armed = runtime.armed();
    let mut fruitless = 0;
    loop {
        let (near, limit) = runtime.near();
        if near + runtime.copy_bytes() <= limit {
            return true;
        }
        let own = believed(&runtime.slot().near_bytes);
        if own <= limit / COPY_SHARE || fruitless == 64 || process::now_ns() > deadline {
            return false;
        }
        let evicted = armed.evictor.lock().run(runtime, armed, ReclaimMode::Direct(Some(context)), EvictionSize::Batch);
        fruitless = if evicted == 0 { fruitless + 1 } else { 0 };
    }
}
