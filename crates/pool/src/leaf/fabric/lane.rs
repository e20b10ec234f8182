//! Lane of `fabric`: reads in one step or two, everything else by message.
//!
//! A read is cut into splits of at most [`SPLIT_PAGES`]. A split first reads the page map and the
//! checksums of its pages, and with them the pages whose layer is known. Then it reads the pages
//! that were not there, by a transfer for each run in one layer. All transfers end in memory of the
//! lane's reader, and their bytes are copied from there. A transfer cannot be called back, and one
//! that comes after its deadline must not land in memory that its owner has back. Its split is free
//! again when the transfer has ended.

use super::{Region, RemoteLayout};
use crate::contract::backend::hand_over;
use crate::leaf::tcp::TcpLane;
use crate::polling::Polling;
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PagePart, PoolError, Priority};
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{PageId, checksum};
use farfield_fabric::{Post, StationReader, TransferCompletion, TransferPart};
use farfield_os::net;
use farfield_os::process::now_ns;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most operations of one lane that may be submitted and not yet collected.
const SLOTS: usize = 256;
/// Number of pages of a large split; there are small ones of one page, too.
const SPLIT_PAGES: usize = 16;
const LARGE_SPLITS: usize = 12;
const SMALL_SPLITS: usize = 64;
/// Bytes of the page itself, its checksum, and its entry in the page map (with room, so that all is
/// aligned).
const LANDING_PER_PAGE: usize = PAGE_BYTES + 8 + 8;
/// Number of bytes in which a lane's transfers end.
pub(super) const LANDING_BYTES: usize = (LARGE_SPLITS * SPLIT_PAGES + SMALL_SPLITS) * LANDING_PER_PAGE;
/// Most parts of a split at a time: each page may live in another layer than its neighbours, and
/// there are the two tables.
const WAITING_MAX: usize = SPLIT_PAGES + 2;
/// Period in which a lane that only reads checks whether the server is still there.
const PULSE: Duration = Duration::from_millis(1);
/// Sleep when transfers wait for the fabric and not for the server.
const NAP: Duration = Duration::from_micros(200);

/// Read that is under way.
struct FabricRead {
    tag: u64,
    priority: Priority,
    page: PageId,
    part: Option<PagePart>,
    buffer: Buffer,
    wait: Duration,
    deadline: u64,
    /// Number of pages of which splits were made.
    begun: usize,
    splits: usize,
    failed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FabricReadPhase {
    /// Page map and checksums are on their way, and pages whose layer is guessed.
    Tables,
    /// Pages are on their way that were not where the guesses said.
    Pages,
}

/// Pages of a read, and where they land.
struct FabricSplit {
    landing: usize,
    pages_max: usize,
    /// Index of the read; `None` if it ended without this split.
    read: Option<usize>,
    /// Range of the pages within the read.
    pages: Range<usize>,
    step: FabricReadPhase,
    /// Parts of transfers that have not begun, the last first.
    waiting: Vec<TransferPart>,
    under_way: usize,
    failed: bool,
    /// Layer of each page, counted from 1; 0 if absent.
    numbers: [u8; SPLIT_PAGES],
    /// Layer from which each page was read before its number was known; 0 from none.
    guesses: [u8; SPLIT_PAGES],
    sums: [u64; SPLIT_PAGES],
}

impl FabricSplit {
    fn new(landing: usize, pages_max: usize) -> FabricSplit {
        FabricSplit {
            landing,
            pages_max,
            read: None,
            pages: 0..0,
            step: FabricReadPhase::Tables,
            waiting: Vec::with_capacity(WAITING_MAX),
            under_way: 0,
            failed: false,
            numbers: [0; SPLIT_PAGES],
            guesses: [0; SPLIT_PAGES],
            sums: [0; SPLIT_PAGES],
        }
    }

    fn sums_at(&self) -> usize {
        self.landing + self.pages_max * PAGE_BYTES
    }

    fn numbers_at(&self) -> usize {
        self.sums_at() + self.pages_max * 8
    }

    /// Takes pages of a read on. Pages whose layer is guessed are read at once, in the same
    /// transfer as the tables.
    fn begin(&mut self, read: usize, first: u64, pages: Range<usize>, layout: &RemoteLayout) {
        let (at, count) = (first + pages.start as u64, pages.len());
        (self.read, self.pages, self.step, self.failed) = (Some(read), pages, FabricReadPhase::Tables, false);
        for (index, guess) in self.guesses[..count].iter_mut().enumerate() {
            let seen = layout.seen.at(at + index as u64).load(Ordering::Relaxed);
            *guess = if usize::from(seen) <= layout.layers.len() { seen } else { 0 };
        }
        self.waiting.clear();
        let guesses = self.guesses;
        if !self.read_from(&guesses[..count], first, layout) {
            unreachable!("only layers that are there are guessed");
        }
        let RemoteLayout { page_map, sums, .. } = layout;
        let sums =
            TransferPart { landing: self.sums_at(), bytes: count * 8, remote: sums.base + at * 8, key: sums.key };
        let map =
            TransferPart { landing: self.numbers_at(), bytes: count, remote: page_map.base + at, key: page_map.key };
        self.waiting.extend([sums, map]);
    }

    /// Evaluates the page map and the checksums, and adds transfers for stored pages whose layer
    /// was not guessed. Returns `false` if the tables cannot be true.
    fn ask_for_pages(&mut self, reader: &StationReader, first: u64, layout: &RemoteLayout) -> bool {
        let count = self.pages.len();
        reader.copy(self.numbers_at(), &mut self.numbers[..count]);
        let mut sums = [0; SPLIT_PAGES * 8];
        reader.copy(self.sums_at(), &mut sums[..count * 8]);
        for (sum, bytes) in self.sums.iter_mut().zip(sums.as_chunks::<8>().0) {
            *sum = u64::from_le_bytes(*bytes);
        }
        self.step = FabricReadPhase::Pages;
        let mut missing = self.numbers;
        for (index, (missing, guess)) in missing.iter_mut().zip(&self.guesses).enumerate().take(count) {
            if missing == guess {
                *missing = 0;
            } else if usize::from(*missing) <= layout.layers.len() {
                layout.note(PageId(first + (self.pages.start + index) as u64), 1, *missing);
            }
        }
        self.read_from(&missing[..count], first, layout)
    }

    /// Adds transfers of each page from the layer with its number, one part for each run; 0 means
    /// none. Returns `false` if there is no such layer.
    fn read_from(&mut self, numbers: &[u8], first: u64, layout: &RemoteLayout) -> bool {
        let mut index = 0;
        for run in numbers.chunk_by(|one, next| one == next) {
            if let Some(layer) = usize::from(run[0]).checked_sub(1) {
                let Some(window) = layout.layers.get(layer) else { return false };
                self.waiting.push(TransferPart {
                    landing: self.landing + index * PAGE_BYTES,
                    bytes: run.len() * PAGE_BYTES,
                    remote: window.base + PageId(first + (self.pages.start + index) as u64).offset(),
                    key: window.key,
                });
            }
            index += run.len();
        }
        true
    }

    /// Copies the pages, which are here now, to where they are wanted. Returns `false` if they are
    /// not what was stored.
    fn deliver(&self, reader: &StationReader, buffer: &mut Buffer, zero_sum: u64) -> bool {
        for (index, page) in self.pages.clone().enumerate() {
            if self.numbers[index] == 0 {
                buffer.page_mut(page).fill(0);
                buffer.sums_mut()[page] = zero_sum;
                continue;
            }
            reader.copy(self.landing + index * PAGE_BYTES, buffer.page_mut(page));
            if checksum(buffer.page(page)) != self.sums[index] {
                return false;
            }
            buffer.sums_mut()[page] = self.sums[index];
        }
        true
    }
}

pub(super) struct FabricLane {
    region: Arc<Region>,
    layout: Arc<RemoteLayout>,
    version: u64,
    /// Lane for writes, discards, and reads that failed.
    messages: TcpLane,
    reader: ManuallyDrop<StationReader>,
    /// Set when libfabric has failed: everything goes by message.
    is_broken: bool,
    reads: Box<[Option<FabricRead>]>,
    free_reads: Vec<usize>,
    /// Reads that are not all begun.
    demand: VecDeque<usize>,
    background: VecDeque<usize>,
    splits: Box<[FabricSplit]>,
    free_large: Vec<usize>,
    free_small: Vec<usize>,
    /// Splits with transfers to begin.
    waiting: VecDeque<usize>,
    ended: VecDeque<Completion>,
    /// Writes under way: tag, first page, number of pages.
    writes: Vec<(u64, PageId, u64)>,
    zero_sum: u64,
    next_deadline: u64,
    next_pulse: u64,
    polling: Polling,
}

impl Drop for FabricLane {
    fn drop(&mut self) {
        // The reader that a child of `fork` has belongs to its parent.
        if !self.region.session.is_abandoned() {
            // SAFETY: here only.
            unsafe { ManuallyDrop::drop(&mut self.reader) };
        }
    }
}

impl FabricLane {
    pub(super) fn new(region: Arc<Region>, messages: TcpLane, reader: StationReader) -> FabricLane {
        let mut landing = 0;
        let mut split = |pages_max: usize| {
            landing += pages_max * LANDING_PER_PAGE;
            FabricSplit::new(landing - pages_max * LANDING_PER_PAGE, pages_max)
        };
        let large = (0..LARGE_SPLITS).map(|_| SPLIT_PAGES);
        let splits = large.chain((0..SMALL_SPLITS).map(|_| 1)).map(&mut split).collect();
        FabricLane {
            version: region.version.load(Ordering::Acquire),
            layout: region.layout(),
            region,
            messages,
            reader: ManuallyDrop::new(reader),
            is_broken: false,
            reads: (0..SLOTS).map(|_| None).collect(),
            free_reads: (0..SLOTS).collect(),
            demand: VecDeque::with_capacity(SLOTS),
            background: VecDeque::with_capacity(SLOTS),
            splits,
            free_large: (0..LARGE_SPLITS).collect(),
            free_small: (LARGE_SPLITS..LARGE_SPLITS + SMALL_SPLITS).collect(),
            waiting: VecDeque::with_capacity(LARGE_SPLITS + SMALL_SPLITS),
            ended: VecDeque::with_capacity(SLOTS),
            writes: Vec::with_capacity(SLOTS),
            zero_sum: checksum(&[0; PAGE_BYTES]),
            next_deadline: u64::MAX,
            next_pulse: 0,
            polling: Polling::default(),
        }
    }

    /// Returns the number of reads that are under way here and not by message.
    fn own_reads(&self) -> usize {
        SLOTS - self.free_reads.len()
    }

    fn queue(&mut self, priority: Priority) -> &mut VecDeque<usize> {
        match priority {
            Priority::Demand => &mut self.demand,
            Priority::Background => &mut self.background,
        }
    }

    /// Makes splits of the reads that wait, demand first, as long as there are free splits.
    fn begin(&mut self) {
        while let Some(&slot) = self.demand.front().or(self.background.front()) {
            let Some(read) = &mut self.reads[slot] else { unreachable!("reads that ended are in no queue") };
            let left = read.buffer.pages() - read.begun;
            let free = match left {
                1 => self.free_small.pop().or_else(|| self.free_large.pop()),
                _ => self.free_large.pop().or_else(|| self.free_small.pop()),
            };
            let Some(free) = free else { return };
            let split = &mut self.splits[free];
            let end = read.begun + left.min(split.pages_max);
            split.begin(slot, read.page.0, read.begun..end, &self.layout);
            self.waiting.push_back(free);
            read.begun = end;
            read.splits += 1;
            let (is_begun, priority) = (end == read.buffer.pages(), read.priority);
            if is_begun {
                self.queue(priority).pop_front();
            }
        }
    }

    /// Begins the transfers that wait, as far as the fabric takes them.
    fn post(&mut self) {
        while let Some(&index) = self.waiting.front() {
            let split = &mut self.splits[index];
            while !split.waiting.is_empty() {
                let rest = split.waiting.len().saturating_sub(self.reader.parts_max());
                match self.reader.post(&split.waiting[rest..], index as u64) {
                    Ok(Post::Begun) => {
                        split.waiting.truncate(rest);
                        split.under_way += 1;
                    }
                    Ok(Post::Later) => return,
                    Err(_) => {
                        split.failed = true;
                        split.waiting.clear();
                    }
                }
            }
            self.waiting.pop_front();
            if self.splits[index].under_way == 0 {
                self.advance(index);
            }
        }
    }

    /// Takes the transfers that have ended.
    fn collect(&mut self) {
        loop {
            let mut arrived = [(0, false); 16];
            let mut count = 0;
            let polled = self.reader.poll(|TransferCompletion { context, result }| {
                arrived[count] = (context as usize, result.is_ok());
                count += 1;
            });
            for (index, is_well) in &arrived[..count] {
                let split = &mut self.splits[*index];
                split.under_way -= 1;
                split.failed |= !is_well;
                if split.under_way == 0 && split.waiting.is_empty() {
                    self.advance(*index);
                }
            }
            match polled {
                Ok(0) => return,
                Ok(_) => {}
                Err(_) => return self.give_up(),
            }
        }
    }

    /// Advances a split that has nothing under way and nothing waiting to its next step, or ends
    /// it.
    fn advance(&mut self, index: usize) {
        let split = &mut self.splits[index];
        let slot = split.read;
        if let Some(read) = slot.and_then(|slot| self.reads[slot].as_mut()) {
            if split.step == FabricReadPhase::Tables && !split.failed && !read.failed {
                split.failed = !split.ask_for_pages(&self.reader, read.page.0, &self.layout);
                if !split.failed && !split.waiting.is_empty() {
                    return self.waiting.push_back(index);
                }
                split.waiting.clear();
            }
            read.failed |= split.failed || !split.deliver(&self.reader, &mut read.buffer, self.zero_sum);
            read.splits -= 1;
        }
        let pages_max = split.pages_max;
        split.read = None;
        if pages_max == 1 { &mut self.free_small } else { &mut self.free_large }.push(index);
        if let Some(slot) = slot {
            self.settle(slot);
        }
    }

    /// Ends a read whose pages are all here, and asks by message for one that failed.
    fn settle(&mut self, slot: usize) {
        let Some(read) = &self.reads[slot] else { return };
        if read.splits > 0 || (read.begun < read.buffer.pages() && !read.failed) {
            return;
        }
        if !read.failed {
            return self.end(slot, Ok(()));
        }
        if let Some(read) = self.take(slot) {
            let left = Duration::from_nanos(read.deadline.saturating_sub(now_ns()));
            self.ask(read, left);
        }
    }

    /// Sends a read as a message; the server checks the checksums of its answer.
    fn ask(&mut self, read: FabricRead, deadline: Duration) {
        let FabricRead { tag, priority, page, part, buffer, .. } = read;
        let op = match part {
            Some(part) => Op::ReadPart { page, part, buffer },
            None => Op::Read { page, buffer },
        };
        if self.messages.submit(LaneRequest { tag, priority, deadline, op }).is_err() {
            unreachable!("both together take as many as one of them has room for");
        }
    }

    /// Takes a read out; its splits go on without it.
    fn take(&mut self, slot: usize) -> Option<FabricRead> {
        let read = self.reads[slot].take()?;
        self.free_reads.push(slot);
        if read.begun < read.buffer.pages() {
            self.queue(read.priority).retain(|other| *other != slot);
        }
        if read.splits > 0 {
            self.splits.iter_mut().filter(|split| split.read == Some(slot)).for_each(|split| split.read = None);
        }
        Some(read)
    }

    fn end(&mut self, slot: usize, result: Result<(), PoolError>) {
        if let Some(FabricRead { tag, buffer, .. }) = self.take(slot) {
            self.ended.push_back(Completion { tag, result, buffer: Some(buffer) });
        }
    }

    /// Gives libfabric up, and sends all reads as messages.
    fn give_up(&mut self) {
        self.is_broken = true;
        for slot in 0..SLOTS {
            if let Some(read) = self.take(slot) {
                let left = Duration::from_nanos(read.deadline.saturating_sub(now_ns()));
                self.ask(read, left);
            }
        }
    }

    /// Ends the reads whose time is over.
    fn expire(&mut self, now: u64) {
        let server = self.region.session.server;
        self.next_deadline = u64::MAX;
        for slot in 0..SLOTS {
            let Some(FabricRead { deadline, wait, .. }) = self.reads[slot] else { continue };
            if deadline <= now {
                self.end(slot, Err(PoolError::TimedOut { server, after: wait }));
            } else {
                self.next_deadline = self.next_deadline.min(deadline);
            }
        }
    }

    /// Drives reads forward and ends late ones; returns the time.
    fn work(&mut self) -> u64 {
        let now = now_ns();
        if self.own_reads() > 0 {
            if self.region.session.is_gone() {
                let error = self.region.session.gone_error();
                (0..SLOTS).for_each(|slot| self.end(slot, Err(error)));
                return now;
            }
            self.begin();
            self.post();
            self.collect();
            // Ended transfers made room, and brought splits to their second step.
            self.begin();
            self.post();
            if now >= self.next_deadline {
                self.expire(now);
            }
        }
        now
    }

    /// Checks whether the lane of messages has something to do, or has not checked for long whether
    /// the server lives.
    fn has_messages(&mut self, now: u64) -> bool {
        if self.messages.in_flight() == 0 && now < self.next_pulse {
            return false;
        }
        self.next_pulse = now + PULSE.as_nanos() as u64;
        true
    }

    /// Takes the present layout if it changed. Nothing is in flight then.
    fn renew(&mut self) {
        let version = self.region.version.load(Ordering::Acquire);
        if version != self.version {
            (self.version, self.layout) = (version, self.region.layout());
        }
    }

    /// Notes that the pages of a write are in the top layer, if this is its end.
    fn note_write(&mut self, completion: &Completion) {
        let Some(place) = self.writes.iter().position(|(tag, ..)| *tag == completion.tag) else { return };
        let (_, page, count) = self.writes.swap_remove(place);
        if completion.result.is_ok() {
            self.layout.note(page, count, self.layout.layers.len() as u8);
        }
    }

    /// Takes a read on. A read that comes too late, or of pages that the server's windows do not
    /// have, is sent as a message.
    fn submit_read(&mut self, read: FabricRead) {
        let count = read.buffer.pages() as u64;
        let is_inside = read.page.0.checked_add(count).is_some_and(|end| end <= self.region.pages);
        if !is_inside || self.is_broken || self.region.session.is_gone() {
            let wait = read.wait;
            return self.ask(read, wait);
        }
        self.renew();
        let Some(slot) = self.free_reads.pop() else { unreachable!("there is room for as many as may be in flight") };
        self.next_deadline = self.next_deadline.min(read.deadline);
        self.queue(read.priority).push_back(slot);
        self.reads[slot] = Some(read);
    }
}

impl Lane for FabricLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let LaneRequest { tag, priority, deadline: wait, op } = request;
        let deadline = now_ns().saturating_add(wait.as_nanos() as u64);
        self.polling.renew();
        let read = |page, part, buffer| {
            let (begun, splits, failed) = (0, 0, false);
            FabricRead { tag, priority, page, part, buffer, wait, deadline, begun, splits, failed }
        };
        match op {
            Op::Read { page, buffer } => self.submit_read(read(page, None, buffer)),
            Op::ReadPart { page, part, buffer } if buffer.pages() == 1 => {
                self.submit_read(read(page, Some(part), buffer));
            }
            op => {
                self.renew();
                let written = match &op {
                    Op::Write { page, buffer } => Some((tag, *page, buffer.pages() as u64)),
                    _ => None,
                };
                let discarded = match &op {
                    Op::Discard { page, count } => Some((*page, *count)),
                    _ => None,
                };
                self.messages.submit(LaneRequest { tag, priority, deadline: wait, op })?;
                self.writes.extend(written);
                // A discard that is outside of the region is not noted: the server refuses it.
                let is_inside =
                    |page: PageId, count| page.0.checked_add(count).is_some_and(|end| end <= self.region.pages);
                if let Some((page, count)) = discarded.filter(|(page, count)| is_inside(*page, *count)) {
                    self.layout.note(page, count, 0);
                    // Whichever of the write and the discard is done last, no read will guess at a
                    // hole.
                    self.writes.retain(|(_, first, pages)| first.0 >= page.0 + count || first.0 + pages <= page.0);
                }
            }
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let now = self.work();
        let moved = hand_over(&mut self.ended, done);
        if !self.has_messages(now) {
            return moved;
        }
        let before = done.len();
        let moved = moved + self.messages.poll(done);
        if !self.writes.is_empty() {
            done[before..].iter().for_each(|completion| self.note_write(completion));
        }
        moved
    }

    fn in_flight(&self) -> usize {
        self.own_reads() + self.ended.len() + self.messages.in_flight()
    }

    fn wait(&mut self, timeout: Duration) {
        if self.own_reads() == 0 {
            if self.ended.is_empty() {
                self.messages.wait(timeout);
            }
            return;
        }
        let start = now_ns();
        let limit = start.saturating_add(timeout.as_nanos() as u64);
        loop {
            let now = self.work();
            if self.has_messages(now) {
                self.messages.work();
            }
            if !self.ended.is_empty() || self.messages.has_ended() || self.in_flight() == 0 {
                self.polling.renew();
                return;
            }
            if now >= limit {
                return;
            }
            if self.polling.goes_on(start, now) {
                continue;
            }
            let (fd, events, until) = self.messages.sleeps_on();
            let sleep = Duration::from_nanos(limit.min(until).min(self.next_deadline).saturating_sub(now));
            // Transfers that did not begin wait for libfabric, and nothing wakes the lane for it.
            let sleep = if self.waiting.is_empty() { sleep } else { sleep.min(NAP) };
            if let Some(own) = self.reader.sleeps_on() {
                let _ = net::poll_either([(fd, events), (own, libc::POLLIN)], sleep);
                self.next_pulse = 0;
            }
        }
    }
}
