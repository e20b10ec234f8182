//! Member `shm`: a memory server on the same machine, whose memory this process reads and writes by
//! itself.
//!
//! A region consists of these memory files (memfds):
//!
//! - a stack of *layers*, each as large as the region;
//! - a *page map* with one byte per page: 0 for absent, `k` for a page that lives in layer `k-1`;
//! - a table of *checksums*, one for each page;
//! - a table of *notes*: short checksums of the blocks of each page, for reads of parts of pages.
//!
//! Only the last layer, the top, is written. A snapshot is copy-on-write: it freezes the top and
//! puts a new one on, for parent and clone each. Bytes are written by `pwrite`: no page fault, and
//! lack of memory is an error instead of a signal. Layers are mapped for reading only, a gigabyte
//! at a time, when one of their pages is read.
//!
//! Before a page is added to the top layer the client must hold a *credit* for it. Credits are
//! reserved in chunks at the server, so that capacity and quota hold although the server sees no
//! write (`docs/design/pool.md`).

use crate::contract::backend::{check_range, hand_over};
use crate::leaf::connection::{Exchange, ExchangeError, ServerSession, SessionConnection};
use crate::leaf::tcp::clone_region;
use crate::{
    Backend, Buffer, CallChannel, CallLane, CloneTicket, Completion, Health, Lane, LaneRequest, Mapped, Op, PoolError,
    Share,
};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use farfield_core::Incarnation;
use farfield_core::blocks::Blocks;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{self, MapReply, PagePart, Reply, WireReply, WireRequest};
use farfield_core::{PageId, RegionId, checksum};
use farfield_os::gate::syscall;
use farfield_os::process::now_ns;
use farfield_os::{Errno, file, memfd, memory, net};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Greatest number of operations of one lane that are submitted and not yet collected.
const SLOTS: usize = 256;
/// Credits requested at a time: 4 MiB of pages, so that asking costs nothing per page and few
/// credits are held unused.
const CREDITS_CHUNK: i64 = 1024;
/// Greatest number of unused credits that are kept; more go back.
const CREDITS_KEPT_MAX: i64 = 4 * CREDITS_CHUNK;
/// Interval at which a busy lane checks that the server is alive.
const PULSE: Duration = Duration::from_millis(1);
const LAYERS: usize = MapReply::LAYERS_MAX as usize;
/// Number of files that come before the layers.
const TABLES: usize = MapReply::TABLES as usize;
const LINE_BYTES: usize = 64;
/// Number of pages of a layer that are mapped at a time: a gigabyte.
const PIECE_PAGES: u64 = 1 << 18;
/// Number of pages whose entries fill a page of the page map.
const BLOCK_PAGES: u64 = PAGE_BYTES as u64;
/// Longest discard that looks at every entry. Longer ones look only at the stretches of the page
/// map that have memory.
const SPARSE_PAGES: u64 = 1024;

/// Memory files of a region, shared by backend and lanes. They change only inside
/// [`Backend::clone_region`], whose caller has no operation in flight.
struct Region {
    session: Arc<ServerSession>,
    id: RegionId,
    pages: u64,
    generation: AtomicU64,
    layers_total: AtomicU32,
    /// Layers, of which the first `layers_total` are set.
    layers: Box<[SessionDescriptor; LAYERS]>,
    page_map_file: SessionDescriptor,
    sums_file: SessionDescriptor,
    notes_file: SessionDescriptor,
    /// Addresses of page map, checksums and notes.
    page_map: AtomicUsize,
    sums: AtomicUsize,
    notes: AtomicUsize,
    /// Whether parts of pages were read; only then are blocks noted when pages are written.
    is_read_in_parts: AtomicBool,
    /// Address of a table of the addresses of pieces, by layer and piece; zero means not mapped. It
    /// is anonymous memory, which costs something only where it is used.
    pieces: AtomicUsize,
    pieces_mapped: AtomicUsize,
    credits: AtomicI64,
    abandoned: AtomicBool,
}

/// Descriptor and its slot in the session's table; -1 for none.
struct SessionDescriptor {
    fd: AtomicI32,
    place: AtomicUsize,
}

impl SessionDescriptor {
    const fn none() -> SessionDescriptor {
        SessionDescriptor { fd: AtomicI32::new(-1), place: AtomicUsize::new(0) }
    }

    /// Takes ownership of `fd`.
    fn set(&self, session: &ServerSession, fd: i32) -> Result<(), PoolError> {
        self.clear(session);
        self.place.store(session.keep(fd).map_err(PoolError::Os)?, Ordering::Relaxed);
        self.fd.store(fd, Ordering::Relaxed);
        Ok(())
    }

    fn clear(&self, session: &ServerSession) {
        if self.fd.swap(-1, Ordering::Relaxed) >= 0 {
            session.close(self.place.load(Ordering::Relaxed));
        }
    }

    fn get(&self) -> BorrowedFd<'_> {
        let fd = self.fd.load(Ordering::Relaxed);
        assert!(fd >= 0, "a memory file is used after it was closed");
        // SAFETY: open until the region is dropped, abandoned or cloned, none of which happens
        // during an operation.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

/// Received descriptors; those that were not taken over are closed on drop.
struct Received<'a>(&'a mut [i32]);

impl Received<'_> {
    /// Takes ownership of the `index`-th descriptor.
    fn take(&mut self, index: usize) -> i32 {
        core::mem::replace(&mut self.0[index], -1)
    }
}

impl Drop for Received<'_> {
    fn drop(&mut self) {
        self.0.iter().filter(|fd| **fd >= 0).for_each(|fd| file::close(*fd));
    }
}

impl Region {
    fn entry(&self, page: u64) -> &AtomicU8 {
        debug_assert!(page < self.pages);
        // SAFETY:
        // - alive: the page map is mapped until the region is dropped or abandoned, after which it
        //   is not accessed;
        // - inside: it has a byte for each page, which was checked against the file's (sealed)
        //   size;
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

    fn blocks(&self, page: u64) -> &Blocks {
        debug_assert!(page < self.pages);
        // SAFETY: as for `entry`; a line of atomics for each page, and mappings start at a page
        // boundary.
        unsafe { &*(self.notes.load(Ordering::Relaxed) as *const Blocks).add(page as usize) }
    }

    /// Returns the number of the top layer, as the page map has it.
    fn top_number(&self) -> u8 {
        // At most 255, checked when it was received.
        self.layers_total.load(Ordering::Acquire) as u8
    }

    /// Returns the layer in which `page` lives, counted from 1; 0 means that it is absent. A number
    /// above the top layer is an error.
    fn number(&self, page: u64) -> Result<u8, PoolError> {
        let number = self.entry(page).load(Ordering::Acquire);
        if number > self.top_number() {
            return Err(PoolError::Corrupt { page: PageId(page), server: self.session.server });
        }
        Ok(number)
    }

    fn top(&self) -> BorrowedFd<'_> {
        self.layers[usize::from(self.top_number()) - 1].get()
    }

    /// Asks the server for the memory files that this process does not have yet.
    fn map(&self) -> Result<(), PoolError> {
        loop {
            let have = self.layers_total.load(Ordering::Relaxed);
            let request = wire::Request::MapRegion { region: self.id, first_layer: have };
            let mut fds = [-1; TABLES + MapReply::LAYERS_AT_ONCE as usize];
            let (reply, count) = self.session.ask_for_descriptors(request, self.session.deadline(), &mut fds)?;
            let mut received = Received(&mut fds[..count]);
            let Reply::Map(reply) = reply else { return Err(self.nonsense()) };
            if have > 0 && reply.generation != self.generation.load(Ordering::Relaxed) {
                // The server merged layers: the files that we have are obsolete.
                drop(received);
                self.close();
                continue;
            }
            self.take(have, &reply, &mut received)?;
            if self.layers_total.load(Ordering::Relaxed) == reply.layers_total {
                return Ok(());
            }
        }
    }

    /// Takes over the files that came with an answer.
    fn take(&self, have: u32, reply: &MapReply, received: &mut Received<'_>) -> Result<(), PoolError> {
        if reply.pages != self.pages
            || reply.first_layer != have
            // No new layer: nothing was written since the last clone, so the top stayed the top.
            || (reply.layers == 0 && have != reply.layers_total)
            || received.0.len() != TABLES + reply.layers as usize
        {
            return Err(self.nonsense());
        }
        if have == 0 {
            for (index, (file, address, entry_bytes)) in self.tables().into_iter().enumerate() {
                let bytes = self.pages * entry_bytes;
                self.check_file(received.0[index], bytes)?;
                file.set(&self.session, received.take(index))?;
                let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
                let fd = file.fd.load(Ordering::Relaxed);
                // SAFETY: a new mapping at a free address touches nobody's memory.
                let mapped =
                    unsafe { memory::mmap(0, bytes as usize, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
                address.store(mapped.map_err(PoolError::Os)?, Ordering::Relaxed);
            }
            self.generation.store(reply.generation, Ordering::Relaxed);
        }
        for index in 0..reply.layers as usize {
            let layer = have as usize + index;
            self.check_file(received.0[TABLES + index], self.pages * PAGE_BYTES as u64)?;
            self.layers[layer].set(&self.session, received.take(TABLES + index))?;
            self.layers_total.store(layer as u32 + 1, Ordering::Release);
        }
        Ok(())
    }

    /// Returns file, address, and bytes per page of each table that comes before the layers.
    fn tables(&self) -> [(&SessionDescriptor, &AtomicUsize, u64); TABLES] {
        [
            (&self.page_map_file, &self.page_map, 1),
            (&self.sums_file, &self.sums, 8),
            (&self.notes_file, &self.notes, Blocks::BYTES as u64),
        ]
    }

    /// Checks that a file is sealed and large enough. A file that could shrink would turn our loads
    /// into SIGBUS.
    fn check_file(&self, fd: i32, bytes: u64) -> Result<(), PoolError> {
        // SAFETY: the descriptor was just received and is open until it is taken over or closed.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let size = memfd::usage(fd).map_err(PoolError::Os)?.size_bytes;
        if !memfd::is_sealed(fd) || size < bytes {
            let reason = "its memory files are not sealed or too small";
            return Err(PoolError::Refused { server: self.session.server, reason });
        }
        Ok(())
    }

    fn pieces_per_layer(&self) -> u64 {
        self.pages.div_ceil(PIECE_PAGES)
    }

    /// Returns the address of a page in the layer with this number; maps its piece if need be.
    fn address(&self, number: u8, page: u64) -> Result<*const u8, Errno> {
        let (layer, piece) = (u64::from(number) - 1, page / PIECE_PAGES);
        let index = (layer * self.pieces_per_layer() + piece) as usize;
        // SAFETY: the table has a word for each piece of each layer, lives as long as the region,
        // and is only used through atomics; anonymous memory is page-aligned and zero.
        #[allow(clippy::cast_ptr_alignment)]
        let word = unsafe { AtomicUsize::from_ptr((self.pieces.load(Ordering::Relaxed) as *mut usize).add(index)) };
        let mut start = word.load(Ordering::Acquire);
        if start == 0 {
            let bytes = self.piece_bytes(piece);
            let fd = self.layers[layer as usize].fd.load(Ordering::Relaxed);
            let (flags, offset) = (libc::MAP_SHARED | libc::MAP_NORESERVE, PageId(piece * PIECE_PAGES).offset());
            // SAFETY: a new mapping at a free address touches nobody's memory.
            let mapped = unsafe { memory::mmap(0, bytes, libc::PROT_READ, flags, fd, offset as usize) }?;
            start = match word.compare_exchange(0, mapped, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.pieces_mapped.fetch_add(1, Ordering::Relaxed);
                    mapped
                }
                Err(faster) => {
                    // SAFETY: mapped just now, and nobody else knows it.
                    let _ = unsafe { memory::munmap(mapped, bytes) };
                    faster
                }
            };
        }
        Ok((start + (page % PIECE_PAGES) as usize * PAGE_BYTES) as *const u8)
    }

    fn piece_bytes(&self, piece: u64) -> usize {
        (self.pages - piece * PIECE_PAGES).min(PIECE_PAGES) as usize * PAGE_BYTES
    }

    /// Returns the length in bytes of the table of pieces.
    fn table_bytes(&self) -> usize {
        LAYERS * self.pieces_per_layer() as usize * size_of::<usize>()
    }

    /// Unmaps and closes everything that came from the server.
    fn close(&self) {
        let unmap = |address: &AtomicUsize, bytes: usize| {
            let address = address.swap(0, Ordering::Relaxed);
            if address != 0 {
                // SAFETY: mapped with this length; the caller has no operation in flight, and
                // pointers that were handed out by `Mapped` end with the call that leads here.
                let _ = unsafe { memory::munmap(address, bytes) };
            }
        };
        let mut left = self.pieces_mapped.swap(0, Ordering::Relaxed);
        let layers = self.layers_total.swap(0, Ordering::Relaxed) as usize;
        let table = self.pieces.load(Ordering::Relaxed) as *mut usize;
        for index in 0..layers * self.pieces_per_layer() as usize {
            if left == 0 {
                break;
            }
            // SAFETY: as in `address`.
            #[allow(clippy::cast_ptr_alignment)]
            let word = unsafe { AtomicUsize::from_ptr(table.add(index)) };
            if word.load(Ordering::Relaxed) != 0 {
                unmap(word, self.piece_bytes(index as u64 % self.pieces_per_layer()));
                left -= 1;
            }
        }
        self.layers[..layers].iter().for_each(|layer| layer.clear(&self.session));
        for (file, address, entry_bytes) in self.tables() {
            unmap(address, (self.pages * entry_bytes) as usize);
            file.clear(&self.session);
        }
    }

    fn nonsense(&self) -> PoolError {
        PoolError::Refused { server: self.session.server, reason: "its answer is not valid" }
    }

    /// Takes `wanted` credits; returns `false`, and takes none, if there are fewer.
    fn take_credits(&self, wanted: i64) -> bool {
        let less = |held: i64| (held >= wanted).then(|| held - wanted);
        self.credits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn check(&self, page: PageId, count: u64) -> Result<(), PoolError> {
        check_range((page, count), self.pages, self.session.server)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.close();
        let table = *self.pieces.get_mut();
        if table != 0 {
            // SAFETY: mapped in `ShmBackend::new` with this length; nobody is left to use it.
            let _ = unsafe { memory::munmap(table, self.table_bytes()) };
        }
    }
}

/// Region whose memory this process maps.
pub(crate) struct ShmBackend {
    region: Arc<Region>,
}

impl ShmBackend {
    pub(crate) fn new(session: Arc<ServerSession>, id: RegionId, pages: u64) -> Result<ShmBackend, PoolError> {
        let region = Region {
            session,
            id,
            pages,
            generation: AtomicU64::new(0),
            layers_total: AtomicU32::new(0),
            layers: Box::new([const { SessionDescriptor::none() }; LAYERS]),
            page_map_file: SessionDescriptor::none(),
            sums_file: SessionDescriptor::none(),
            notes_file: SessionDescriptor::none(),
            page_map: AtomicUsize::new(0),
            sums: AtomicUsize::new(0),
            notes: AtomicUsize::new(0),
            is_read_in_parts: AtomicBool::new(false),
            pieces: AtomicUsize::new(0),
            pieces_mapped: AtomicUsize::new(0),
            credits: AtomicI64::new(0),
            abandoned: AtomicBool::new(false),
        };
        // The protocol counts pages so that all of this fits 64 bits; a larger region is refused.
        if pages > u64::from(u32::MAX) + 1 {
            return Err(PoolError::Refused { server: region.session.server, reason: "the region is too large to map" });
        }
        let table = memory::map_anonymous(region.table_bytes()).map_err(PoolError::Os)?;
        region.pieces.store(table, Ordering::Relaxed);
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
            unpaid: VecDeque::with_capacity(SLOTS),
            exchange: Exchange::new(&[]),
            credit_request: None,
            is_tight: false,
            ended: VecDeque::with_capacity(SLOTS),
            zero_sum: checksum(&[0; PAGE_BYTES]),
            next_pulse: 0,
            tag: 0,
        }))
    }

    fn open_calls(&self) -> Result<Box<dyn CallChannel>, PoolError> {
        Ok(Box::new(CallLane::open(&self.region.session, self.region.id)?))
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        Some(self)
    }

    fn share(&self) -> Result<Share, PoolError> {
        Ok(self.region.session.share(self.region.id, self.region.pages))
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        let session = &self.region.session;
        let ticket = clone_region(session, self.region.id, session.deadline()).inspect_err(|error| {
            // The server may make pages that are written meanwhile a part of a snapshot.
            if error.is_silence() {
                session.set_gone();
            }
        })?;
        // From here on the clone has a right to the pages as they are: writing them in place would
        // corrupt it.
        if let Err(error) = self.region.map() {
            session.set_gone();
            return Err(error);
        }
        Ok(ticket)
    }

    fn pages(&self) -> u64 {
        self.region.pages
    }

    fn incarnation(&self) -> Option<Incarnation> {
        Some(self.region.session.incarnation())
    }

    fn health(&self) -> Health {
        self.region.session.health()
    }

    fn answers(&self, within: Duration) -> bool {
        self.region.session.answers(within)
    }

    fn release(&self) {
        self.region.session.farewell();
    }

    fn abandon(&self) {
        if !self.region.abandoned.swap(true, Ordering::Relaxed) {
            self.region.close();
            self.region.session.abandon();
        }
    }
}

impl Mapped for ShmBackend {
    fn page(&self, page: PageId) -> Option<*const u8> {
        let region = &self.region;
        assert!(page.0 < region.pages, "page {} outside a region of {} pages", page.0, region.pages);
        let address = match region.number(page.0) {
            Ok(0) => return None,
            Ok(number) => region.address(number, page.0).ok(),
            Err(_) => None,
        };
        if address.is_none() {
            // The page map makes no sense, or there is no address space: nothing more can be had
            // from this region.
            region.session.set_gone();
        }
        address
    }
}

/// Copies `bytes` of a page of a layer to the same place of `target`.
fn copy(source: *const u8, bytes: Range<usize>, target: &mut [u8]) {
    let target = &mut target[bytes.clone()];
    // SAFETY: a page of a mapping that lives until the region is dropped, abandoned or cloned, none
    // of which happens during an operation; its file cannot shrink. If its owner writes it
    // meanwhile, against the rules of lanes, the checksum shows it.
    unsafe { core::ptr::copy_nonoverlapping(source.add(bytes.start), target.as_mut_ptr(), target.len()) };
}

struct ShmLane {
    connection: SessionConnection,
    region: Arc<Region>,
    ready: VecDeque<LaneRequest>,
    /// Writes that wait for credits, each with its deadline in ns.
    unpaid: VecDeque<(LaneRequest, u64)>,
    /// Request about credits that the server has not answered yet.
    exchange: Exchange,
    credit_request: Option<CreditRequest>,
    /// Whether the server has no whole chunk of credits left.
    is_tight: bool,
    ended: VecDeque<Completion>,
    zero_sum: u64,
    /// Time (ns) of the next check that the server is alive.
    next_pulse: u64,
    tag: u64,
}

/// Request about credits that was sent to the server.
#[derive(Clone, Copy)]
enum CreditRequest {
    /// Reserve that many credits.
    Reserve(i64),
    /// Give that many credits back.
    Release(i64),
}

impl ShmLane {
    fn read(&self, page: PageId, buffer: &mut Buffer) -> Result<(), PoolError> {
        let region = &*self.region;
        region.check(page, buffer.pages() as u64)?;
        for index in 0..buffer.pages() {
            let at = page.0 + index as u64;
            let number = region.number(at)?;
            if number == 0 {
                buffer.page_mut(index).fill(0);
                buffer.sums_mut()[index] = self.zero_sum;
                continue;
            }
            let source = region.address(number, at).map_err(PoolError::Os)?;
            copy(source, 0..PAGE_BYTES, buffer.page_mut(index));
            let sum = region.sum(at).load(Ordering::Relaxed);
            if checksum(buffer.page(index)) != sum {
                return Err(PoolError::Corrupt { page: PageId(at), server: region.session.server });
            }
            buffer.sums_mut()[index] = sum;
        }
        Ok(())
    }

    /// Reads a part of a page and checks it against the notes on its blocks, or else reads and
    /// checks the whole page.
    fn read_part(&self, page: PageId, part: PagePart, buffer: &mut Buffer) -> Result<(), PoolError> {
        let region = &*self.region;
        region.check(page, 1)?;
        region.is_read_in_parts.store(true, Ordering::Relaxed);
        let number = region.number(page.0)?;
        if number != 0 {
            let source = region.address(number, page.0).map_err(PoolError::Os)?;
            copy(source, Blocks::span(part), buffer.page_mut(0));
            let (blocks, sum) = (region.blocks(page.0), region.sum(page.0).load(Ordering::Relaxed));
            if blocks.match_part(part, buffer.page(0), sum) {
                buffer.sums_mut()[0] = sum;
                return Ok(());
            }
        }
        self.read(page, buffer)?;
        if number != 0 {
            region.blocks(page.0).note(buffer.page(0), buffer.sums()[0]);
        }
        Ok(())
    }

    /// Prefetches into the CPU cache what [`ShmLane::read_part`] looks at first. So parts that are
    /// asked for together do not wait for memory one after the other.
    fn announce(&self, op: &Op) {
        let region = &*self.region;
        let Op::ReadPart { page, part, .. } = op else { return };
        let (Ok(()), top @ 1..) = (region.check(*page, 1), region.top_number()) else { return };
        memory::load_ahead(region.entry(page.0));
        memory::load_ahead(region.sum(page.0));
        memory::load_ahead(region.blocks(page.0).first(*part));
        // Most pages live in the top layer.
        if let Ok(source) = region.address(top, page.0) {
            Blocks::span(*part).step_by(LINE_BYTES).for_each(|at| memory::load_ahead(source.wrapping_add(at)));
        }
    }

    /// Writes pages. `Err(n)`: nothing was written, because it needs `n` credits and there are
    /// fewer.
    fn write(&self, page: PageId, buffer: &Buffer) -> Result<Result<(), PoolError>, i64> {
        let count = buffer.pages() as u64;
        if let Err(error) = self.region.check(page, count) {
            return Ok(Err(error));
        }
        let top = self.region.top_number();
        let pages = page.0..page.0 + count;
        let region = &*self.region;
        let is_new = |page: &u64| region.entry(*page).load(Ordering::Relaxed) != top;
        let wanted = pages.clone().filter(is_new).count() as i64;
        if wanted > 0 && !region.take_credits(wanted) {
            return Err(wanted);
        }
        if let Err(errno) = memfd::write_at(self.region.top(), buffer.bytes(), page.offset()) {
            // A part may have been stored: pages that the page map does not name would take memory
            // without a credit.
            for page in pages.filter(is_new) {
                let _ = memfd::punch(self.region.top(), PageId(page).offset(), PAGE_BYTES as u64);
            }
            self.region.credits.fetch_add(wanted, Ordering::Relaxed);
            return Ok(Err(match errno.0 {
                libc::ENOSPC | libc::ENOMEM => PoolError::PoolFull { server: self.region.session.server },
                _ => PoolError::Os(errno),
            }));
        }
        let noted = self.region.is_read_in_parts.load(Ordering::Relaxed);
        for (index, (page, sum)) in pages.zip(buffer.sums()).enumerate() {
            if noted {
                self.region.blocks(page).note(buffer.page(index), *sum);
            }
            self.region.sum(page).store(*sum, Ordering::Relaxed);
            // A reader that sees the page in the map must see its bytes and its checksum.
            self.region.entry(page).store(top, Ordering::Release);
        }
        Ok(Ok(()))
    }

    fn discard(&mut self, page: PageId, count: u64) -> Result<(), PoolError> {
        self.region.check(page, count)?;
        let end = page.0 + count;
        let (mut freed, mut result) = (0, Ok(()));
        let mut at = page.0;
        while at < end {
            let mut stretch = at..end;
            if count > SPARSE_PAGES {
                // Most of what programs unmap was never stored. Where the page map has no memory,
                // nothing was.
                match memfd::next_data(self.region.page_map_file.get(), at).map_err(PoolError::Os)? {
                    Some(data) if data.start < end => stretch = data.start.max(at)..data.end.min(end),
                    _ => break,
                }
            }
            at = stretch.end;
            result = self.discard_stretch(stretch, &mut freed).and(result);
        }
        // Free whole pages of the page map, the checksums and the notes that hold nothing any more.
        let blocks = page.0.next_multiple_of(BLOCK_PAGES)..end / BLOCK_PAGES * BLOCK_PAGES;
        if blocks.start < blocks.end {
            let pages = blocks.end - blocks.start;
            for (file, _, entry_bytes) in self.region.tables() {
                let punched = memfd::punch(file.get(), blocks.start * entry_bytes, pages * entry_bytes);
                result = punched.map_err(PoolError::Os).and(result);
            }
        }
        let held = self.region.credits.fetch_add(freed, Ordering::Relaxed) + freed;
        let surplus = (held - CREDITS_CHUNK).min(u32::MAX.into());
        if held > CREDITS_KEPT_MAX && self.can_ask() && self.region.take_credits(surplus) {
            self.ask(CreditRequest::Release(surplus));
        }
        result
    }

    /// Discards pages; adds the number of those whose memory was freed to `freed`.
    fn discard_stretch(&self, pages: Range<u64>, freed: &mut i64) -> Result<(), PoolError> {
        let top = self.region.top_number();
        let mut result = Ok(());
        let mut at = pages.start;
        while at < pages.end {
            let number = self.region.entry(at).load(Ordering::Relaxed);
            if number != top {
                if number != 0 {
                    self.region.entry(at).store(0, Ordering::Release);
                }
                at += 1;
                continue;
            }
            let start = at;
            while at < pages.end && self.region.entry(at).load(Ordering::Relaxed) == top {
                self.region.entry(at).store(0, Ordering::Release);
                at += 1;
            }
            match memfd::punch(self.region.top(), PageId(start).offset(), PageId(at - start).offset()) {
                Ok(()) => *freed += (at - start) as i64,
                // The pages are gone for the program; their memory, and so their credits, is not.
                Err(errno) => result = Err(PoolError::Os(errno)),
            }
        }
        result
    }

    /// Checks whether a request about credits can be sent: none waits for its answer, and the
    /// server is there.
    fn can_ask(&self) -> bool {
        self.credit_request.is_none() && self.connection.is_joined() && !self.region.session.is_gone()
    }

    /// Asks the server on the lane's own connection; [`ShmLane::listen`] takes the answer.
    fn ask(&mut self, asked: CreditRequest) {
        self.tag += 1;
        let region = self.region.id;
        let request = match asked {
            CreditRequest::Reserve(pages) => wire::Request::Reserve { region, pages: pages as u32 },
            CreditRequest::Release(pages) => wire::Request::Release { region, pages: pages as u32 },
        };
        // The request needs no deadline: the writes that wait for it have theirs.
        self.exchange.ask(&WireRequest { tag: self.tag, background: false, deadline: None, request }.header());
        self.credit_request = Some(asked);
    }

    /// Goes on with joining the session and with the request about credits.
    fn listen(&mut self) {
        let session = &self.region.session;
        if session.is_gone() {
            return;
        }
        if self.connection.try_join().is_err() {
            return session.set_gone();
        }
        let Some(asked) = self.credit_request else { return };
        let answer = match self.exchange.advance(&mut self.connection.stream) {
            Ok(None) => return,
            Ok(Some((header, body))) => WireReply::decode(&header, body).ok().filter(|answer| answer.tag == self.tag),
            Err(
                ExchangeError::Gone
                | ExchangeError::Malformed
                | ExchangeError::TimedOut
                | ExchangeError::Silent
                | ExchangeError::Os(_),
            ) => None,
        };
        self.credit_request = None;
        match (answer.map(|answer| answer.reply), asked) {
            (Some(Reply::Done), CreditRequest::Reserve(pages)) => {
                self.region.credits.fetch_add(pages, Ordering::Relaxed);
                self.is_tight = false;
            }
            (Some(Reply::Done), CreditRequest::Release(_)) => {}
            (Some(Reply::Failed { .. }), CreditRequest::Release(pages)) => {
                self.region.credits.fetch_add(pages, Ordering::Relaxed);
            }
            (Some(Reply::Failed { code: wire::ErrorCode::PoolFull, .. }), CreditRequest::Reserve(_))
                if !self.is_tight =>
            {
                // The credits held and those still to be had may be enough together.
                self.is_tight = true;
            }
            (Some(Reply::Failed { code, page }), CreditRequest::Reserve(_)) => {
                let error = session.failure(code, PageId(page), Duration::ZERO);
                self.end_unpaid(error);
            }
            _ => session.set_gone(),
        }
    }

    /// Ends, with this error, the write that has waited longest for credits.
    fn end_unpaid(&mut self, error: PoolError) {
        if let Some((LaneRequest { tag, op: Op::Write { buffer, .. }, .. }, _)) = self.unpaid.pop_front() {
            self.ended.push_back(Completion { tag, result: Err(error), buffer: Some(buffer) });
        }
    }

    /// Stores the writes that wait for credits, as far as there are some by now. Requests those
    /// that are lacking.
    fn pay(&mut self) {
        while let Some((LaneRequest { op: Op::Write { page, buffer }, .. }, until)) = self.unpaid.front() {
            let session = &self.region.session;
            let result = match self.write(*page, buffer) {
                _ if session.is_gone() => Err(session.gone_error()),
                Ok(result) => result,
                Err(_) if now_ns() >= *until => {
                    let after = self.unpaid[0].0.deadline;
                    Err(PoolError::TimedOut { server: session.server, after })
                }
                Err(wanted) => {
                    if self.can_ask() {
                        // Ask for a whole chunk if the server has it, otherwise just for what is
                        // needed now.
                        let held = self.region.credits.load(Ordering::Relaxed);
                        let least = if self.is_tight { (wanted - held).max(1) } else { wanted.max(CREDITS_CHUNK) };
                        self.ask(CreditRequest::Reserve(least));
                        self.listen();
                        continue;
                    }
                    return;
                }
            };
            if let Some((LaneRequest { tag, op: Op::Write { buffer, .. }, .. }, _)) = self.unpaid.pop_front() {
                self.ended.push_back(Completion { tag, result, buffer: Some(buffer) });
            }
        }
    }

    /// Checks that the server is alive, at most once per [`PULSE`].
    fn pulse(&mut self) {
        let now = now_ns();
        if now < self.next_pulse {
            return;
        }
        self.next_pulse = now + PULSE.as_nanos() as u64;
        if self.credit_request.is_some() || !self.connection.is_joined() {
            // The code that waits for an answer notices it.
            return;
        }
        let mut byte = 0u8;
        let flags = (libc::MSG_DONTWAIT | libc::MSG_PEEK) as usize;
        let args = [self.connection.fd as usize, &raw mut byte as usize, 1, flags, 0, 0];
        // SAFETY: the kernel writes at most one byte.
        match unsafe { syscall(libc::SYS_recvfrom, args) } {
            Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
            // This is the end of the connection, an error, or an unexpected message.
            _ => self.region.session.set_gone(),
        }
    }

    fn work(&mut self) {
        if self.ready.is_empty() && self.unpaid.is_empty() {
            return;
        }
        self.listen();
        self.pulse();
        self.pay();
        while let Some(LaneRequest { tag, priority, deadline, op }) = self.ready.pop_front() {
            let gone = self.region.session.is_gone().then(|| self.region.session.gone_error());
            let (result, buffer) = match (op, gone) {
                (Op::Read { buffer, .. } | Op::ReadPart { buffer, .. } | Op::Write { buffer, .. }, Some(error)) => {
                    (Err(error), Some(buffer))
                }
                (Op::Discard { .. }, Some(error)) => (Err(error), None),
                (Op::Read { page, mut buffer }, None) => (self.read(page, &mut buffer), Some(buffer)),
                (Op::ReadPart { page, part, mut buffer }, None) => {
                    (self.read_part(page, part, &mut buffer), Some(buffer))
                }
                (Op::Write { page, buffer }, None) => match self.write(page, &buffer) {
                    Ok(result) => (result, Some(buffer)),
                    Err(_) => {
                        let until = now_ns().saturating_add(deadline.as_nanos() as u64);
                        let request = LaneRequest { tag, priority, deadline, op: Op::Write { page, buffer } };
                        self.unpaid.push_back((request, until));
                        self.pay();
                        continue;
                    }
                },
                (Op::Discard { page, count }, None) => (self.discard(page, count), None),
            };
            self.ended.push_back(Completion { tag, result, buffer });
        }
    }

    /// Waits until the server answers about credits, or until the first deadline of a waiting
    /// write, or `timeout`.
    fn wait_for_credits(&mut self, timeout: Duration) {
        if !self.connection.is_joined() {
            return self.connection.wait_to_join(timeout);
        }
        let deadline = self.unpaid.iter().map(|(_, until)| *until).min().unwrap_or(0);
        let left = Duration::from_nanos(deadline.saturating_sub(now_ns()));
        // If something is wrong with the connection, the next poll will show it.
        let _ = net::poll(self.connection.fd, self.exchange.events(), timeout.min(left));
    }
}

impl Lane for ShmLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        self.announce(&request.op);
        self.ready.push_back(request);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.work();
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        self.ready.len() + self.unpaid.len() + self.ended.len()
    }

    fn wait(&mut self, timeout: Duration) {
        if self.ready.is_empty() && self.ended.is_empty() && !self.unpaid.is_empty() {
            return self.wait_for_credits(timeout);
        }
        // Any other operation ends at the next poll. With nothing submitted, the only event to wait
        // for is the death of the server.
        if self.in_flight() == 0
            && !self.region.session.is_gone()
            && net::poll(self.connection.fd, libc::POLLIN, timeout).is_ok_and(|events| events != 0)
        {
            self.next_pulse = 0;
            self.pulse();
        }
    }
}
