//! Member `shm`: a memory server on the same machine, whose memory this process reads and writes by itself.
//!
//! A region is a stack of *layers* (memfds as large as the region), a *page map* (one byte per page: 0 for absent, `k` for
//! a page that lives in layer `k-1`) and a table of *checksums*. Only the last layer, the top, is written. A snapshot
//! freezes it and puts a new one on, for parent and clone each. Reads and writes of the top go through `pread` and
//! `pwrite`: no page fault, no page table, and lack of memory is an error instead of a signal. Frozen layers are
//! read through a mapping, so that a region needs one descriptor however many snapshots it went through.
//!
//! Before a page is added to the top layer the client holds a *credit* for it, reserved in chunks at the server, so
//! that capacity and quota hold although the server sees no write. See `docs/design/pool.md`.

use crate::connection::{AskError, Connection, Session, ask_on};
use crate::tcp::clone_region;
use crate::{Backend, Buffer, CloneTicket, Completion, Health, Lane, Mapped, Op, PoolError, Request};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{self, MapReply, Reply};
use farfield_core::{PageId, RegionId, checksum};
use farfield_os::gate::syscall;
use farfield_os::process::now_ns;
use farfield_os::{Errno, file, memfd, memory, net};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Operations of one lane that may be submitted and not yet collected.
const SLOTS: usize = 256;
/// Credits asked for at a time: 4 MiB, so that asking costs nothing per page, and little is held unused.
const CREDITS_CHUNK: i64 = 1024;
/// Unused credits above this go back.
const CREDITS_KEPT_MAX: i64 = 4 * CREDITS_CHUNK;
/// How often a busy lane looks whether the server is still there.
const PULSE: Duration = Duration::from_millis(1);
/// How long the server may take to answer a lane's question about credits.
const CREDITS_WITHIN: Duration = Duration::from_secs(5);

const LAYERS: usize = MapReply::LAYERS_MAX as usize;

/// What backend and lanes share of a region: where its parts are mapped. The parts change only inside
/// [`Backend::clone_region`], whose caller has no operation in flight.
struct Region {
    session: Arc<Session>,
    id: RegionId,
    pages: u64,
    generation: AtomicU64,
    layers_total: AtomicU32,
    /// Addresses of the layers, read-only. The first `layers_total` are set.
    layers: Box<[AtomicUsize; LAYERS]>,
    page_map: AtomicUsize,
    sums: AtomicUsize,
    /// Descriptor of the top layer and its place among the session's descriptors.
    top: AtomicI32,
    top_place: AtomicUsize,
    credits: AtomicI64,
    unmapped: AtomicBool,
}

/// Where a page lives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Absent,
    /// In a frozen layer, at this address.
    Frozen(*const u8),
    Top,
}

impl Region {
    fn layer_bytes(&self) -> usize {
        self.pages as usize * PAGE_BYTES
    }

    fn entry(&self, page: u64) -> &AtomicU8 {
        debug_assert!(page < self.pages);
        // SAFETY:
        // - alive: the page map is mapped until the region is dropped or abandoned, after which nobody asks;
        // - inside: it has a byte for each page, which was checked against the file's (sealed) size;
        // - shared: the server writes it too, and both sides only ever use atomic operations.
        unsafe { AtomicU8::from_ptr((self.page_map.load(Ordering::Relaxed) as *mut u8).add(page as usize)) }
    }

    fn sum(&self, page: u64) -> &AtomicU64 {
        debug_assert!(page < self.pages);
        // SAFETY: as for `entry`; eight bytes for each page, and mappings start at a page boundary.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU64::from_ptr((self.sums.load(Ordering::Relaxed) as *mut u64).add(page as usize))
        }
    }

    fn top_number(&self) -> u8 {
        // At most 255, checked when it was received.
        self.layers_total.load(Ordering::Acquire) as u8
    }

    fn place(&self, page: u64) -> Result<Place, PoolError> {
        let number = self.entry(page).load(Ordering::Acquire);
        let top = self.top_number();
        if number == 0 {
            return Ok(Place::Absent);
        }
        if number == top {
            return Ok(Place::Top);
        }
        if number > top {
            return Err(PoolError::Corrupt { page: PageId(page), server: self.session.server });
        }
        let layer = self.layers[usize::from(number) - 1].load(Ordering::Relaxed);
        Ok(Place::Frozen((layer + page as usize * PAGE_BYTES) as *const u8))
    }

    fn top_fd(&self) -> i32 {
        self.top.load(Ordering::Relaxed)
    }

    /// Asks the server for the memory files that are not mapped yet, and maps them.
    fn map(&self) -> Result<(), PoolError> {
        loop {
            let have = self.layers_total.load(Ordering::Relaxed);
            let request = wire::Request::MapRegion { region: self.id, first_layer: have };
            let mut fds = [-1; 2 + MapReply::LAYERS_AT_ONCE as usize];
            let asked = self.session.ask_for_descriptors(request, self.session.deadline(), &mut fds)?;
            let (Reply::Map(reply), count) = asked else {
                fds[..asked.1].iter().for_each(|fd| file::close(*fd));
                return Err(self.nonsense());
            };
            if have > 0 && reply.generation != self.generation.load(Ordering::Relaxed) {
                // The server merged layers: what is mapped belongs to the past.
                fds[..count].iter().for_each(|fd| file::close(*fd));
                self.unmap();
                continue;
            }
            let taken = self.take(have, &reply, &fds[..count]);
            // Mappings keep their memory without a descriptor; the top's was kept by taking it out of the list.
            let kept = self.top_fd();
            fds[..count].iter().filter(|fd| **fd != kept || taken.is_err()).for_each(|fd| file::close(*fd));
            taken?;
            if self.layers_total.load(Ordering::Relaxed) == reply.layers_total {
                return Ok(());
            }
        }
    }

    /// Maps what came with an answer.
    fn take(&self, have: u32, reply: &MapReply, fds: &[i32]) -> Result<(), PoolError> {
        if reply.pages != self.pages
            || reply.first_layer != have
            // No new layer: nothing was written since the last clone, so the top stayed the top.
            || (reply.layers == 0 && have != reply.layers_total)
            || fds.len() != 2 + reply.layers as usize
        {
            return Err(self.nonsense());
        }
        if have == 0 {
            let read_write = libc::PROT_READ | libc::PROT_WRITE;
            let page_map = self.map_file(fds[0], self.pages as usize, read_write)?;
            self.page_map.store(page_map, Ordering::Relaxed);
            let sums = self.map_file(fds[1], self.pages as usize * 8, read_write)?;
            self.sums.store(sums, Ordering::Relaxed);
            self.generation.store(reply.generation, Ordering::Relaxed);
        }
        for (fd, layer) in fds[2..].iter().zip(have..) {
            let address = self.map_file(*fd, self.layer_bytes(), libc::PROT_READ)?;
            self.layers[layer as usize].store(address, Ordering::Relaxed);
            self.layers_total.store(layer + 1, Ordering::Release);
        }
        if reply.layers > 0 && have + reply.layers == reply.layers_total {
            self.drop_top();
            let top = fds[fds.len() - 1];
            let place = self.session.keep(top).map_err(PoolError::Os)?;
            self.top_place.store(place, Ordering::Relaxed);
            self.top.store(top, Ordering::Relaxed);
        }
        Ok(())
    }

    fn map_file(&self, fd: i32, bytes: usize, protection: i32) -> Result<usize, PoolError> {
        // SAFETY: the descriptor was just received and is open until after this call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        // A file that could shrink would turn our loads into SIGBUS.
        let size = memfd::usage(borrowed).map_err(PoolError::Os)?.size_bytes;
        if !memfd::is_sealed(borrowed) || size < bytes as u64 {
            let reason = "its memory files are not sealed or too small";
            return Err(PoolError::Refused { server: self.session.server, reason });
        }
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at a free address touches nobody's memory.
        unsafe { memory::mmap(0, bytes, protection, flags, fd, 0) }.map_err(PoolError::Os)
    }

    fn drop_top(&self) {
        if self.top.swap(-1, Ordering::Relaxed) >= 0 {
            self.session.close(self.top_place.load(Ordering::Relaxed));
        }
    }

    fn unmap(&self) {
        let unmap = |address: &AtomicUsize, bytes: usize| {
            let address = address.swap(0, Ordering::Relaxed);
            if address != 0 {
                // SAFETY: mapped in `map_file` with this length; the caller has no operation in flight, and pointers
                // handed out by `Mapped` end with the call that leads here.
                let _ = unsafe { memory::munmap(address, bytes) };
            }
        };
        self.layers_total.store(0, Ordering::Relaxed);
        self.layers.iter().for_each(|layer| unmap(layer, self.layer_bytes()));
        unmap(&self.page_map, self.pages as usize);
        unmap(&self.sums, self.pages as usize * 8);
        self.drop_top();
    }

    fn nonsense(&self) -> PoolError {
        PoolError::Refused { server: self.session.server, reason: "its answer makes no sense" }
    }

    /// Takes `wanted` credits if there are so many.
    fn take_credits(&self, wanted: i64) -> bool {
        let less = |held: i64| (held >= wanted).then(|| held - wanted);
        self.credits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn check(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        match page.0.checked_add(count) {
            Some(end) if end <= self.pages => Ok(()),
            _ => Err(PoolError::Refused { server: self.session.server, reason: "pages outside the region" }),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.unmapped.load(Ordering::Relaxed) {
            self.unmap();
        }
    }
}

/// A region whose memory this process maps.
pub(crate) struct ShmBackend {
    region: Arc<Region>,
}

impl ShmBackend {
    pub(crate) fn new(session: Arc<Session>, id: RegionId, pages: u64) -> Result<ShmBackend, PoolError> {
        let region = Region {
            session,
            id,
            pages,
            generation: AtomicU64::new(0),
            layers_total: AtomicU32::new(0),
            layers: Box::new([const { AtomicUsize::new(0) }; LAYERS]),
            page_map: AtomicUsize::new(0),
            sums: AtomicUsize::new(0),
            top: AtomicI32::new(-1),
            top_place: AtomicUsize::new(0),
            credits: AtomicI64::new(0),
            unmapped: AtomicBool::new(false),
        };
        region.map()?;
        Ok(ShmBackend { region: Arc::new(region) })
    }
}

impl Backend for ShmBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        let session = &self.region.session;
        if session.is_gone() {
            return Err(session.gone_error());
        }
        Ok(Box::new(ShmLane {
            connection: session.join()?,
            region: self.region.clone(),
            ready: VecDeque::with_capacity(SLOTS),
            ended: VecDeque::with_capacity(SLOTS),
            zero_sum: checksum(&[0; PAGE_BYTES]),
            next_pulse: 0,
            tag: 0,
        }))
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        Some(self)
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let session = &self.region.session;
        let ticket = clone_region(session, self.region.id)?;
        // From here on the clone has a right to the pages as they are: writing them in place would be a lie to it.
        if let Err(error) = self.region.map() {
            session.set_gone();
            return Err(error);
        }
        Ok(ticket)
    }

    fn pages(&self) -> u64 {
        self.region.pages
    }

    fn health(&self) -> Health {
        if self.region.session.is_gone() { Health::Gone } else { Health::Good }
    }

    fn abandon(&self) {
        self.region.session.abandon();
        self.region.top.store(-1, Ordering::Relaxed); // Closed with all the others.
        self.region.unmapped.store(true, Ordering::Relaxed);
        self.region.unmap();
    }
}

impl Mapped for ShmBackend {
    fn page(&self, page: PageId) -> Option<*const u8> {
        let region = &self.region;
        assert!(page.0 < region.pages, "page {} outside a region of {} pages", page.0, region.pages);
        match region.place(page.0) {
            Ok(Place::Absent) => None,
            Ok(Place::Frozen(address)) => Some(address),
            Ok(Place::Top) => {
                let layer = region.layers[usize::from(region.top_number()) - 1].load(Ordering::Relaxed);
                Some((layer + page.0 as usize * PAGE_BYTES) as *const u8)
            }
            Err(_) => {
                // A page map that makes no sense: nothing in it can be believed any more.
                region.session.set_gone();
                None
            }
        }
    }
}

struct ShmLane {
    connection: Connection,
    region: Arc<Region>,
    ready: VecDeque<Request>,
    ended: VecDeque<Completion>,
    zero_sum: u64,
    /// When to look next whether the server is still there.
    next_pulse: u64,
    tag: u64,
}

impl ShmLane {
    fn read(&self, page: PageId, buffer: &mut Buffer) -> Result<(), PoolError> {
        let region = &*self.region;
        let count = buffer.pages() as u64;
        region.check(page, count)?;
        let mut index = 0;
        while index < count {
            let at = page.0 + index;
            match region.place(at)? {
                Place::Absent => {
                    buffer.page_mut(index as usize).fill(0);
                    buffer.sums_mut()[index as usize] = self.zero_sum;
                    index += 1;
                    continue;
                }
                Place::Frozen(address) => {
                    let target = buffer.page_mut(index as usize).as_mut_ptr();
                    // SAFETY: a whole page of a layer that is mapped for as long as the lane works with it, and of the
                    // buffer. The server may write there at the same time, so no reference is made; what was torn
                    // fails its checksum.
                    unsafe { core::ptr::copy_nonoverlapping(address, target, PAGE_BYTES) };
                    self.verify(at, buffer, index)?;
                    index += 1;
                }
                Place::Top => {
                    let mut run = 1;
                    while index + run < count && matches!(region.place(at + run), Ok(Place::Top)) {
                        run += 1;
                    }
                    let bytes = &mut buffer.bytes_mut()[index as usize * PAGE_BYTES..][..run as usize * PAGE_BYTES];
                    // SAFETY: the descriptor is open as long as the region is not dropped or abandoned.
                    let top = unsafe { BorrowedFd::borrow_raw(region.top_fd()) };
                    memfd::read_at(top, bytes, at * PAGE_BYTES as u64).map_err(PoolError::Os)?;
                    for offset in 0..run {
                        self.verify(at + offset, buffer, index + offset)?;
                    }
                    index += run;
                }
            }
        }
        Ok(())
    }

    fn verify(&self, page: u64, buffer: &mut Buffer, index: u64) -> Result<(), PoolError> {
        let sum = self.region.sum(page).load(Ordering::Relaxed);
        if checksum(buffer.page(index as usize)) != sum {
            return Err(PoolError::Corrupt { page: PageId(page), server: self.region.session.server });
        }
        buffer.sums_mut()[index as usize] = sum;
        Ok(())
    }

    fn write(&mut self, page: PageId, buffer: &Buffer) -> Result<(), PoolError> {
        let count = buffer.pages() as u64;
        self.region.check(page, count)?;
        let top = self.region.top_number();
        let pages = page.0..page.0 + count;
        let is_new = |page: &u64| self.region.entry(*page).load(Ordering::Relaxed) != top;
        let wanted = pages.clone().filter(is_new).count() as i64;
        self.ensure_credits(wanted)?;
        // SAFETY: the descriptor is open as long as the region is not dropped or abandoned.
        let fd = unsafe { BorrowedFd::borrow_raw(self.region.top_fd()) };
        if let Err(errno) = memfd::write_at(fd, buffer.bytes(), page.offset()) {
            // A part may have been stored: pages that the map does not name yet are nobody's and are written over later.
            self.region.credits.fetch_add(wanted, Ordering::Relaxed);
            return Err(match errno.0 {
                libc::ENOSPC | libc::ENOMEM => PoolError::PoolFull { server: self.region.session.server },
                _ => PoolError::Os(errno),
            });
        }
        for (page, sum) in pages.zip(buffer.sums()) {
            self.region.sum(page).store(*sum, Ordering::Relaxed);
            // Whoever sees the page in the map sees its bytes and its checksum.
            self.region.entry(page).store(top, Ordering::Release);
        }
        Ok(())
    }

    fn discard(&mut self, page: PageId, count: u64) -> Result<(), PoolError> {
        self.region.check(page, count)?;
        let top = self.region.top_number();
        let end = page.0 + count;
        let mut at = page.0;
        let mut freed = 0;
        let mut result = Ok(());
        while at < end {
            let number = self.region.entry(at).load(Ordering::Relaxed);
            if number != top {
                if number != 0 {
                    self.region.entry(at).store(0, Ordering::Release);
                }
                at += 1;
                continue;
            }
            let start = at;
            while at < end && self.region.entry(at).load(Ordering::Relaxed) == top {
                self.region.entry(at).store(0, Ordering::Release);
                at += 1;
            }
            // SAFETY: the descriptor is open as long as the region is not dropped or abandoned.
            let fd = unsafe { BorrowedFd::borrow_raw(self.region.top_fd()) };
            match memfd::punch(fd, PageId(start).offset(), PageId(at - start).offset()) {
                Ok(()) => freed += (at - start) as i64,
                // The pages are gone for the program; their memory, and so their credits, is not.
                Err(errno) => result = Err(PoolError::Os(errno)),
            }
        }
        let held = self.region.credits.fetch_add(freed, Ordering::Relaxed) + freed;
        if held > CREDITS_KEPT_MAX && self.region.take_credits(held - CREDITS_CHUNK) {
            let pages = (held - CREDITS_CHUNK).min(u32::MAX.into()) as u32;
            self.region.credits.fetch_add(held - CREDITS_CHUNK - i64::from(pages), Ordering::Relaxed);
            self.ask(wire::Request::Release { region: self.region.id, pages })?;
        }
        result
    }

    /// Takes `wanted` credits, asking the server for more if need be.
    fn ensure_credits(&mut self, wanted: i64) -> Result<(), PoolError> {
        if wanted == 0 || self.region.take_credits(wanted) {
            return Ok(());
        }
        let region = self.region.id;
        // A whole chunk if the server has it, else just what is needed now.
        let chunk = wire::Request::Reserve { region, pages: wanted.max(CREDITS_CHUNK) as u32 };
        match self.ask(chunk) {
            Ok(()) => {
                self.region.credits.fetch_add(wanted.max(CREDITS_CHUNK) - wanted, Ordering::Relaxed);
                Ok(())
            }
            Err(PoolError::PoolFull { .. }) if wanted < CREDITS_CHUNK => {
                // What is held and what is still to be had may be enough together.
                let held = self.region.credits.swap(0, Ordering::Relaxed);
                if held >= wanted {
                    self.region.credits.fetch_add(held - wanted, Ordering::Relaxed);
                    return Ok(());
                }
                let asked = self.ask(wire::Request::Reserve { region, pages: (wanted - held) as u32 });
                if asked.is_err() {
                    self.region.credits.fetch_add(held, Ordering::Relaxed);
                }
                asked
            }
            Err(error) => Err(error),
        }
    }

    /// Asks the server on the lane's own connection and waits for the answer.
    fn ask(&mut self, request: wire::Request<'_>) -> Result<(), PoolError> {
        self.tag += 1;
        let session = &self.region.session;
        let until = now_ns().saturating_add(CREDITS_WITHIN.as_nanos() as u64);
        match ask_on(self.connection.fd, self.tag, request, until, &mut []) {
            Ok((Reply::Done, _)) => Ok(()),
            Ok((Reply::Failed { code, page }, _)) => Err(session.failure(code, PageId(page), CREDITS_WITHIN)),
            Ok(_) | Err(AskError::Nonsense | AskError::Gone) => {
                session.set_gone();
                Err(session.gone_error())
            }
            Err(AskError::TimedOut) => {
                session.set_gone(); // Its answer would be taken for that of the next question.
                Err(PoolError::TimedOut { server: session.server, after: CREDITS_WITHIN })
            }
            Err(AskError::Os(errno)) => {
                session.set_gone();
                Err(PoolError::Os(errno))
            }
        }
    }

    /// Looks whether the server is still there, not too often.
    fn pulse(&mut self) {
        let now = now_ns();
        if now < self.next_pulse {
            return;
        }
        self.next_pulse = now + PULSE.as_nanos() as u64;
        let mut byte = 0u8;
        let flags = (libc::MSG_DONTWAIT | libc::MSG_PEEK) as usize;
        let args = [self.connection.fd as usize, &raw mut byte as usize, 1, flags, 0, 0];
        // SAFETY: the kernel writes at most one byte.
        match unsafe { syscall(libc::SYS_recvfrom, args) } {
            Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
            // The end, an error, or a word that nobody asked for.
            _ => self.region.session.set_gone(),
        }
    }

    fn work(&mut self) {
        if self.ready.is_empty() {
            return;
        }
        self.pulse();
        while let Some(Request { tag, op, .. }) = self.ready.pop_front() {
            let gone = self.region.session.is_gone().then(|| self.region.session.gone_error());
            let (result, buffer) = match (op, gone) {
                (Op::Read { buffer, .. } | Op::Write { buffer, .. }, Some(error)) => (Err(error), Some(buffer)),
                (Op::Discard { .. }, Some(error)) => (Err(error), None),
                (Op::Read { page, mut buffer }, None) => (self.read(page, &mut buffer), Some(buffer)),
                (Op::Write { page, buffer }, None) => (self.write(page, &buffer), Some(buffer)),
                (Op::Discard { page, count }, None) => (self.discard(page, count), None),
            };
            self.ended.push_back(Completion { tag, result, buffer });
        }
    }
}

impl Lane for ShmLane {
    fn submit(&mut self, request: Request) -> Result<(), Request> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        self.ready.push_back(request);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.work();
        let moved = self.ended.len().min(done.capacity() - done.len());
        done.extend(self.ended.drain(..moved));
        moved
    }

    fn in_flight(&self) -> usize {
        self.ready.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        // Whatever was submitted ends at the next poll; with nothing submitted there is nothing to wait for but death.
        if self.in_flight() == 0
            && !self.region.session.is_gone()
            && net::poll(self.connection.fd, libc::POLLIN, timeout).is_ok_and(|events| events != 0)
        {
            self.next_pulse = 0;
        }
    }
}
