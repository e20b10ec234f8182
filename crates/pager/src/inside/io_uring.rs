//! io_uring: buffers stay near from submission to completion.
//!
//! A program fills the submission queue and enters the kernel. That is when we look. We read the
//! entries that the kernel is about to take, pin their buffers, and submit them by our own call;
//! the waiting half of the program's call follows in the stub of [`super::syscall_pinning`].
//! Completions are counted in the completion queue, which we map too: by the next thread that
//! enters, and by the monitor.
//!
//! Features that cannot be followed are refused as an older kernel refuses them. These are a kernel
//! thread that takes entries by itself, memory of the program as queues, rings of buffers that the
//! program fills without a call, and operations that [`crate::submission`] does not know.

use super::arm;
use super::async_io::{self, ASYNC_IO_REGISTRY, AsyncOperations, PermanentPins, PinReservation, ProgressWait};
use super::call::{CallOutcome, Context, done, error, forward};
use super::lock::SpinLock;
use super::runtime::{RUNTIME, Runtime};
use super::syscall_pinning::{self, BufferCollector, peek, peek_slice, poke, poke_slice};
use super::thread::PinnedRun;
use crate::submission::{Entry as Submission, OP_LAST, OperandMemory, TransferKind, is_known, op};
use crate::window;
use core::sync::atomic::{AtomicU32, Ordering};
use farfield_os::{Errno, Result, file, gate, memory, process};
use std::sync::Arc;

/// Flags of `io_uring_setup` that we accept: those that change nothing for us, and those that do.
const SETUP_KNOWN: u32 = 1 << 0 // IOPOLL
    | SETUP_CQSIZE
    | 1 << 4 // CLAMP
    | 1 << 5 // ATTACH_WQ
    | 1 << 6 // R_DISABLED
    | 1 << 7 // SUBMIT_ALL
    | 1 << 8 // COOP_TASKRUN
    | 1 << 9 // TASKRUN_FLAG
    | SETUP_SQE128
    | SETUP_CQE32
    | 1 << 12 // SINGLE_ISSUER
    | 1 << 13 // DEFER_TASKRUN
    | SETUP_NO_SQARRAY
    | 1 << 17; // HYBRID_IOPOLL
const SETUP_SQPOLL: u32 = 1 << 1;
const SETUP_CQSIZE: u32 = 1 << 3;
const SETUP_SQE128: u32 = 1 << 10;
const SETUP_CQE32: u32 = 1 << 11;
const SETUP_NO_SQARRAY: u32 = 1 << 16;
/// Features of the kernel that programs do not get. They are tags and silent success (completions
/// that we could not count), rings without descriptor, and attributes of transfers.
const FEATURES_HIDDEN: u32 = 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16;
const FEATURE_SINGLE_MMAP: u32 = 1 << 0;

const ENTER_GETEVENTS: u32 = 1 << 0;
const ENTER_REGISTERED_RING: u32 = 1 << 4;
const ENTER_EXTENDED_REGISTERED: u32 = 1 << 6;

const OFFSET_RINGS: usize = 0;
const OFFSET_ENTRIES: usize = 0x1000_0000;

const REGISTER_BUFFERS: u32 = 0;
const UNREGISTER_BUFFERS: u32 = 1;
const FILES_UPDATE: u32 = 6;
const PROBE: u32 = 8;
const REGISTER_FILES_TAGGED: u32 = 13;
const FILES_UPDATE_TAGGED: u32 = 14;
const REGISTER_BUFFERS_TAGGED: u32 = 15;
const BUFFERS_UPDATE_TAGGED: u32 = 16;
const SYNC_CANCEL: u32 = 24;
/// Registrations of which the kernel takes no more than a look at their arguments. They are files,
/// event descriptors, personalities, restrictions, enabling, workers, cancelling, file slots, busy
/// polling, and clock.
const REGISTER_PLAIN: [u32; 19] =
    [2, 3, 4, 5, FILES_UPDATE, 7, 9, 10, 11, 12, 17, 18, 19, 23, SYNC_CANCEL, 25, 27, 28, 29];

/// Minimum size of the completion queue. It is large because completions are only told apart while
/// none can have been overwritten.
const COMPLETIONS_MIN: u32 = 8192;
/// Flag of a completion that more will come of this operation (`IORING_CQE_F_MORE`).
const COMPLETION_MORE: u32 = 1 << 1;

/// Time for which a closed ring is asked to cancel what it has in flight.
const CLOSING_NS: u64 = 10_000_000_000;

/// Words of `struct io_uring_params`.
type Parameters = [u32; 30];
const P_ENTRIES: usize = 0;
const P_COMPLETIONS: usize = 1;
const P_FLAGS: usize = 2;
const P_FEATURES: usize = 5;
const P_SUBMISSION: usize = 10;
const P_COMPLETION: usize = 20;

/// Ring of io_uring: our descriptor and our view of its queues.
pub struct ProgramRing {
    /// Device and inode that a descriptor must name to be this ring.
    identity: (u64, u64),
    descriptor: i32,
    parameters: Parameters,
    /// Address and length of the view of the queues; `entries` is that of the submission entries.
    queues: (usize, usize),
    entries: (usize, usize),
    /// Lock of the submitting thread, with room for the planned entries.
    submitter: SpinLock<Vec<PlannedEntry>>,
}

/// State of a ring in the registry [`async_io::ASYNC_IO_REGISTRY`].
pub struct Entry {
    ring: Arc<ProgramRing>,
    /// Descriptor that the program has for the ring.
    descriptor: i32,
    /// Operations in flight in the ring.
    pub operations: AsyncOperations,
    /// Number of completions seen.
    seen: u32,
    /// True if some operation has posted, or may post, more than one completion.
    posts_many: bool,
    /// True once completions cannot be told apart any more: what is pinned stays so until the ring
    /// closes.
    ambiguous: bool,
    /// Buffers that the kernel may use at any time.
    pub permanent: PermanentPins,
    /// Buffers that the kernel has pinned.
    pub registered: Vec<PinReservation>,
    /// Time at which the program was found to have closed the ring.
    closed_ns: Option<u64>,
}

/// Entry that is about to be submitted.
struct PlannedEntry {
    name: u64,
    reservation: PinReservation,
    /// True if the kernel may fill the buffer whenever it likes.
    lasting: bool,
    ambiguous: bool,
    multishot: bool,
}

impl ProgramRing {
    fn open(descriptor: i32, parameters: Parameters) -> Result<ProgramRing> {
        let identity = identity_of(descriptor)?;
        let ours = arm::with_descriptors(|| duplicate(descriptor))?;
        let p = &parameters;
        let size = if p[P_FLAGS] & SETUP_CQE32 != 0 { 32 } else { 16 };
        let array_end = match p[P_FLAGS] & SETUP_NO_SQARRAY {
            0 => p[P_SUBMISSION + 6] as usize + p[P_ENTRIES] as usize * 4,
            _ => 0,
        };
        let queues_len = array_end.max(p[P_COMPLETION + 5] as usize + p[P_COMPLETIONS] as usize * size);
        let entries_len = p[P_ENTRIES] as usize * entry_bytes(p);
        let mut ring = ProgramRing {
            identity,
            descriptor: ours,
            parameters,
            queues: (0, queues_len),
            entries: (0, entries_len),
            submitter: SpinLock::new(Vec::new()),
        };
        ring.map()?;
        Ok(ring)
    }

    /// Maps our view. A part that was mapped before a failure is unmapped when the ring is dropped.
    fn map(&mut self) -> Result<()> {
        let view = |len, offset| {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
            // SAFETY: a new mapping at a free address touches nobody's memory.
            unsafe { memory::mmap(0, len, prot, flags, self.descriptor, offset) }
        };
        self.queues.0 = view(self.queues.1, OFFSET_RINGS)?;
        self.entries.0 = view(self.entries.1, OFFSET_ENTRIES)?;
        Ok(())
    }

    fn unmap(&mut self) {
        for (address, len) in [&mut self.queues, &mut self.entries].map(|view| (core::mem::take(&mut view.0), view.1)) {
            if address != 0 {
                // SAFETY: our own view, which nobody uses any more.
                let _ = unsafe { memory::munmap(address, len) };
            }
        }
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        assert!(offset as usize + 4 <= self.queues.1 && offset.is_multiple_of(4));
        // SAFETY: inside the view, which is mapped as long as `self`; shared with kernel and
        // program, so atomic.
        unsafe { &*((self.queues.0 + offset as usize) as *const AtomicU32) }
    }

    /// Returns the position at which the kernel goes on to take entries.
    fn head(&self) -> u32 {
        self.word(self.parameters[P_SUBMISSION]).load(Ordering::Acquire)
    }

    /// Returns the number of entries that wait to be taken.
    fn waiting(&self) -> u32 {
        let tail = self.word(self.parameters[P_SUBMISSION + 1]).load(Ordering::Acquire);
        tail.wrapping_sub(self.head()).min(self.parameters[P_ENTRIES])
    }

    /// Returns the entry at a position of the queue. `None` if the program names one that does not
    /// exist: the kernel drops it.
    fn entry(&self, position: u32) -> Option<*mut [u64; 8]> {
        let slot = position & (self.parameters[P_ENTRIES] - 1);
        let index = match self.parameters[P_FLAGS] & SETUP_NO_SQARRAY {
            0 => self.word(self.parameters[P_SUBMISSION + 6] + slot * 4).load(Ordering::Relaxed),
            _ => slot,
        };
        let address = self.entries.0 + index as usize * entry_bytes(&self.parameters);
        (index < self.parameters[P_ENTRIES]).then_some(address as *mut [u64; 8])
    }

    fn completed(&self) -> u32 {
        self.word(self.parameters[P_COMPLETION + 1]).load(Ordering::Acquire)
    }

    /// Returns the name and flags of a completion.
    fn completion(&self, position: u32) -> (u64, u32) {
        let slot = (position & (self.parameters[P_COMPLETIONS] - 1)) as usize;
        let size = if self.parameters[P_FLAGS] & SETUP_CQE32 != 0 { 32 } else { 16 };
        let offset = self.parameters[P_COMPLETION + 5] as usize + slot * size;
        assert!(offset + 16 <= self.queues.1);
        let at = (self.queues.0 + offset) as *const u64;
        // SAFETY: inside the view, aligned; the program may write it, so volatile.
        unsafe { (at.read_volatile(), (at.add(1).read_volatile() >> 32) as u32) }
    }
}

impl Drop for ProgramRing {
    fn drop(&mut self) {
        self.unmap();
        file::close(self.descriptor);
    }
}

impl Entry {
    /// Counts the completions that have come, and lets the pages of ended operations go.
    pub fn reap(&mut self) {
        let completed = self.ring.completed();
        let room = self.ring.parameters[P_COMPLETIONS];
        let new = completed.wrapping_sub(self.seen);
        if new > 0 && !self.ambiguous {
            // The program may have taken the new completions already, and then the kernel may write
            // in their place. But operations in flight post one completion each. If there are some
            // that post more, those fill less than half a queue between two of our looks.
            let bound = self.operations.in_flight().saturating_add(if self.posts_many { new + room / 2 } else { 0 });
            if bound > room {
                self.mark_ambiguous();
            }
            for position in (0..new).map(|index| self.seen.wrapping_add(index)) {
                let (name, flags) = self.ring.completion(position);
                if !self.ambiguous && flags & COMPLETION_MORE == 0 {
                    self.operations.end_operation(name);
                }
            }
        }
        self.seen = completed;
    }

    fn mark_ambiguous(&mut self) {
        self.ambiguous = true;
        for reservation in self.operations.take() {
            self.permanent.add(reservation);
        }
    }

    fn begin_operation(&mut self, planned: &mut PlannedEntry) {
        self.posts_many |= planned.multishot;
        if planned.ambiguous {
            self.mark_ambiguous();
        }
        let mut reservation = core::mem::take(&mut planned.reservation);
        if planned.lasting || self.ambiguous {
            self.permanent.add(core::mem::take(&mut reservation));
        }
        if !self.ambiguous {
            self.operations.begin_operation(planned.name, reservation);
        }
    }

    /// Checks whether the kernel may still touch pages that this ring pins for operations.
    fn is_in_use(&self) -> bool {
        let any = self.ambiguous || self.operations.in_flight() > 0;
        self.operations.have_pins() || any && !self.permanent.is_empty()
    }

    /// Adapts the ring in the child of a fork. The ring is still the parent's too, whose
    /// completions we cannot tell from ours. Returns whether the child can use it.
    pub fn inherit(&mut self) -> bool {
        self.operations.take().for_each(drop);
        self.permanent = PermanentPins::default();
        self.registered.clear();
        self.ambiguous = true;
        // SAFETY: no other thread exists.
        unsafe { self.ring.submitter.reset() };
        match Arc::get_mut(&mut self.ring) {
            Some(ring) => {
                ring.unmap();
                ring.submitter.lock().clear();
                ring.map().is_ok()
            }
            // Another thread of the parent was using it when the process was copied.
            None => false,
        }
    }
}

fn entry_bytes(parameters: &Parameters) -> usize {
    if parameters[P_FLAGS] & SETUP_SQE128 != 0 { 128 } else { 64 }
}

fn identity_of(descriptor: i32) -> Result<(u64, u64)> {
    file::identity(descriptor).ok_or(Errno(libc::EBADF))
}

fn duplicate(descriptor: i32) -> Result<i32> {
    let (command, floor) = (libc::F_DUPFD_CLOEXEC as usize, window::DESCRIPTORS as usize);
    // SAFETY: numbers only.
    unsafe { gate::syscall(libc::SYS_fcntl, [descriptor as usize, command, floor, 0, 0, 0]) }.map(|fd| fd as i32)
}

/// Finds the ring that a descriptor names.
fn find(descriptor: i32) -> Option<Arc<ProgramRing>> {
    let identity = identity_of(descriptor).ok()?;
    ASYNC_IO_REGISTRY.lock().rings.iter().find(|entry| entry.ring.identity == identity).map(|entry| entry.ring.clone())
}

/// Runs `action` on the state of a ring in the registry.
fn with_entry<T>(ring: &Arc<ProgramRing>, action: impl FnOnce(&mut Entry) -> T) -> Option<T> {
    ASYNC_IO_REGISTRY.lock().rings.iter_mut().find(|entry| Arc::ptr_eq(&entry.ring, ring)).map(action)
}

/// Returns the error for a descriptor that names no ring that we know: none at all, or one that
/// came from another process.
fn unknown(descriptor: i32) -> CallOutcome {
    error(if identity_of(descriptor).is_err() { libc::EBADF } else { libc::EOPNOTSUPP })
}

/// Serves `io_uring_setup`.
pub fn set_up(args: [usize; 6]) -> CallOutcome {
    let runtime = &RUNTIME;
    let Some(asked) = peek::<Parameters>(args[1]) else { return error(libc::EFAULT) };
    if asked[P_FLAGS] & SETUP_SQPOLL != 0 || runtime.is_borrowed() {
        return error(libc::EPERM);
    }
    if asked[P_FLAGS] & !SETUP_KNOWN != 0 {
        return error(libc::EINVAL);
    }
    find_closed(runtime);
    let mut parameters = asked;
    parameters[P_FLAGS] |= SETUP_CQSIZE;
    let completions = match asked[P_FLAGS] & SETUP_CQSIZE {
        0 => (args[0] as u32).saturating_mul(2).min(1 << 16),
        _ => asked[P_COMPLETIONS],
    };
    parameters[P_COMPLETIONS] = completions.max(COMPLETIONS_MIN);
    // SAFETY: the program's own call, with a copy of its parameters.
    let made =
        unsafe { forward(libc::SYS_io_uring_setup as usize, [args[0], parameters.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    if made < 0 {
        return CallOutcome::Done(made);
    }
    let descriptor = made as i32;
    if parameters[P_FEATURES] & FEATURE_SINGLE_MMAP == 0 {
        file::close(descriptor);
        return error(libc::ENOSYS);
    }
    let opened = ProgramRing::open(descriptor, parameters);
    parameters[P_FEATURES] &= !FEATURES_HIDDEN;
    parameters[P_FLAGS] = asked[P_FLAGS];
    match opened {
        Ok(ring) if poke(args[1], parameters) => {
            ASYNC_IO_REGISTRY.lock().rings.push(Entry {
                ring: Arc::new(ring),
                descriptor,
                operations: AsyncOperations::default(),
                seen: 0,
                posts_many: false,
                ambiguous: false,
                permanent: PermanentPins::default(),
                registered: Vec::new(),
                closed_ns: None,
            });
            // The monitor notices when the program closes the ring.
            arm::start_monitor(runtime);
            CallOutcome::Done(made)
        }
        failed => {
            file::close(descriptor);
            error(failed.map_or(libc::EMFILE, |_| libc::EFAULT))
        }
    }
}

/// Serves `io_uring_enter`: submits in here, and waits in the stub.
pub fn enter(context: &Context) -> CallOutcome {
    let args = context.arguments();
    let (wanted, flags) = (args[1] as u32, args[3] as u32);
    if flags & (ENTER_REGISTERED_RING | ENTER_EXTENDED_REGISTERED) != 0 {
        return error(libc::EINVAL);
    }
    let Some(ring) = find(args[0] as i32) else { return unknown(args[0] as i32) };
    if RUNTIME.is_borrowed() {
        return error(libc::EPERM);
    }
    let mut submitted = 0;
    if wanted > 0 {
        match submit(&RUNTIME, &ring, args[0], wanted) {
            Ok(count) => submitted = count,
            Err(errno) => return error(errno),
        }
        // As in the kernel, a caller does not wait if not all of its entries were submitted.
        if submitted != wanted || flags & ENTER_GETEVENTS == 0 {
            return CallOutcome::Done(submitted as isize);
        }
    }
    drop(ring);
    syscall_pinning::wait_on_ring(context, submitted)
}

/// Submits up to `wanted` entries, in as many steps as their buffers need. Returns the number
/// submitted, or an error number.
fn submit(
    runtime: &Runtime,
    ring: &Arc<ProgramRing>,
    descriptor: usize,
    wanted: u32,
) -> core::result::Result<u32, i32> {
    let mut planned = ring.submitter.lock();
    let mut submitted = 0;
    let mut progress_wait = ProgressWait::default();
    loop {
        with_entry(ring, Entry::reap);
        let waiting = ring.waiting().min(wanted - submitted);
        if waiting == 0 {
            return Ok(submitted);
        }
        let head = ring.head();
        let count = plan(runtime, ring, head, waiting, &mut planned);
        if count == 0 {
            // Operations that pin buffers must end before these can be submitted.
            if !progress_wait.wait(ring.completed()) {
                return if submitted > 0 { Ok(submitted) } else { Err(libc::EAGAIN) };
            }
            flush(descriptor);
            continue;
        }
        if planned.iter().any(|one| !one.reservation.is_empty()) {
            runtime.counters().syscalls_guarded.fetch_add(1, Ordering::Relaxed);
        }
        async_io::begin(
            runtime,
            &mut planned,
            |one| &mut one.reservation,
            |registry, planned| {
                if let Some(entry) = registry.rings.iter_mut().find(|entry| Arc::ptr_eq(&entry.ring, ring)) {
                    planned.iter_mut().for_each(|one| entry.begin_operation(one));
                }
            },
        );
        // SAFETY: the program's own call, or a part of it.
        let result = unsafe { forward(libc::SYS_io_uring_enter as usize, [descriptor, count as usize, 0, 0, 0, 0]) };
        let taken = ring.head().wrapping_sub(head).min(count);
        with_entry(ring, |entry| {
            if !entry.ambiguous {
                planned.iter().skip(taken as usize).for_each(|one| entry.operations.end_operation(one.name));
            }
        });
        if result < 0 {
            return if submitted > 0 { Ok(submitted) } else { Err(-result as i32) };
        }
        submitted += result as u32;
        if (result as u32) < count {
            return Ok(submitted);
        }
    }
}

/// Lets completions through that need a call of this thread.
fn flush(descriptor: usize) {
    let args = [descriptor, 0, 0, ENTER_GETEVENTS as usize, 0, 0];
    // SAFETY: waits for nothing and gives no memory.
    let _ = unsafe { forward(libc::SYS_io_uring_enter as usize, args) };
}

/// Reserves room for as many of the `waiting` entries as possible, and returns their number. It
/// goes chain by chain, because the kernel ends a chain where a submission ends.
fn plan(runtime: &Runtime, ring: &Arc<ProgramRing>, head: u32, waiting: u32, planned: &mut Vec<PlannedEntry>) -> u32 {
    planned.clear();
    let mut chain = 0;
    let mut at = 0;
    while at < waiting {
        let linked = match ring.entry(head.wrapping_add(at)) {
            // The kernel takes no entry that follows.
            None => return at + 1,
            Some(place) => match plan_entry(runtime, place) {
                Ok((one, linked)) => {
                    planned.push(one);
                    linked
                }
                Err(NoRoom)
                    if chain > 0
                        || async_io::other_operations_in_flight(&mut planned.iter().map(|one| &one.reservation))
                            > 0 =>
                {
                    planned.truncate(chain as usize);
                    return chain;
                }
                Err(NoRoom) => {
                    // Even alone it is too much: treat it as if the operation did not exist, and
                    // with it the rest of its chain.
                    planned.clear();
                    refuse(ring, head, at);
                    at = 0;
                    continue;
                }
            },
        };
        at += 1;
        if !linked {
            chain = at;
        }
    }
    waiting
}

/// Makes an operation one that no kernel knows.
fn refuse(ring: &Arc<ProgramRing>, head: u32, at: u32) {
    if let Some(place) = ring.entry(head.wrapping_add(at)) {
        // SAFETY: inside our view of the entries; the program gave this one to the kernel, in whose
        // place we stand.
        unsafe { place.write_volatile(Submission(place.read_volatile()).with_opcode(op::NONE).0) };
    }
}

struct NoRoom;

/// Reserves what one entry touches. Returns the planned entry, and whether the next belongs to its
/// chain.
fn plan_entry(runtime: &Runtime, place: *mut [u64; 8]) -> core::result::Result<(PlannedEntry, bool), NoRoom> {
    // SAFETY: inside our view of the entries; the program may write it, so volatile.
    let mut entry = Submission(unsafe { place.read_volatile() });
    if let Some(shorter) = shorten(runtime, entry) {
        entry = shorter;
        // SAFETY: as above; the program gave this entry to the kernel, in whose place we stand.
        unsafe { place.write_volatile(entry.0) };
    }
    let mut runs: Vec<PinnedRun> = Vec::new();
    let mut lasting = false;
    match entry.parts() {
        Ok(parts) => {
            let mut collector = BufferCollector::new(runtime, &mut runs);
            for part in parts {
                lasting |= matches!(part, OperandMemory::Provided(..));
                collector.part(part);
            }
        }
        Err(_) => {
            entry = entry.with_opcode(op::NONE);
            // SAFETY: as above.
            unsafe { place.write_volatile(entry.0) };
        }
    }
    let reservation = if entry.is_fixed() {
        PinReservation::covered(runs)
    } else {
        PinReservation::reserve(runtime, runs).ok_or(NoRoom)?
    };
    let (name, ambiguous, multishot) = (entry.user_data(), entry.is_ambiguous(), entry.is_multishot());
    Ok((PlannedEntry { name, reservation, lasting, ambiguous, multishot }, entry.is_linked()))
}

/// Returns the entry with a shorter transfer, if the transfer can never be pinned as a whole.
fn shorten(runtime: &Runtime, entry: Submission) -> Option<Submission> {
    let transfer = entry.transfer()?;
    let most = async_io::operation_bytes_max(runtime);
    let (address, len) = (entry.address() as usize, entry.length() as usize);
    let single = match transfer {
        TransferKind::Plain => {
            return (len > most && window::contains(address)).then(|| entry.with_buffer(address as u64, most as u32));
        }
        TransferKind::Vector { single } => single,
    };
    let mut bytes = 0usize;
    for index in 0..len.min(1024) {
        let part = peek::<libc::iovec>(address + index * size_of::<libc::iovec>())?;
        bytes = bytes.saturating_add(if window::contains(part.iov_base as usize) { part.iov_len } else { 0 });
        if bytes > most {
            return Some(if index > 0 {
                entry.with_buffer(address as u64, index as u32)
            } else {
                entry.with_opcode(single).with_buffer(part.iov_base as u64, most as u32)
            });
        }
    }
    None
}

/// Serves `io_uring_register`.
pub fn register(args: [usize; 6]) -> CallOutcome {
    let (descriptor, operation, address, count) = (args[0] as i32, args[1] as u32, args[2], args[3]);
    let Some(ring) = find(descriptor) else { return unknown(descriptor) };
    let tags = |offset: usize| peek::<u64>(address + offset).is_none_or(|tags| tags != 0);
    match operation {
        REGISTER_BUFFERS => register_buffers(&ring, args, Some((address, count))),
        REGISTER_BUFFERS_TAGGED | BUFFERS_UPDATE_TAGGED | REGISTER_FILES_TAGGED | FILES_UPDATE_TAGGED => {
            let is_update = matches!(operation, BUFFERS_UPDATE_TAGGED | FILES_UPDATE_TAGGED);
            if tags(if is_update { 16 } else { 24 }) {
                // The kernel reports a tag by a completion of its own.
                return error(libc::EINVAL);
            }
            if matches!(operation, REGISTER_FILES_TAGGED | FILES_UPDATE_TAGGED) {
                return CallOutcome::Forward;
            }
            register_buffers(&ring, args, tagged_list(operation, address))
        }
        UNREGISTER_BUFFERS => {
            // SAFETY: the program's own call. Operations that use these buffers pin them by
            // themselves.
            let result = unsafe { forward(libc::SYS_io_uring_register as usize, args) };
            if result == 0 {
                with_entry(&ring, |entry| entry.registered.clear());
            }
            CallOutcome::Done(result)
        }
        PROBE => probe(args),
        plain if REGISTER_PLAIN.contains(&plain) => CallOutcome::Forward,
        _ => error(libc::EINVAL),
    }
}

/// Returns array and length of a registration that names its array in a structure.
fn tagged_list(operation: u32, address: usize) -> Option<(usize, usize)> {
    let words = peek::<[u64; 4]>(address)?;
    match operation {
        REGISTER_FILES_TAGGED | REGISTER_BUFFERS_TAGGED => Some((words[2] as usize, words[0] as u32 as usize)),
        FILES_UPDATE_TAGGED | BUFFERS_UPDATE_TAGGED => Some((words[1] as usize, words[3] as u32 as usize)),
        _ => None,
    }
}

/// Returns the list behind the structure that a forwarded registration passes: address and length
/// in bytes.
pub fn list_of_registration(operation: usize, address: usize, count: usize) -> Option<(usize, usize)> {
    match operation as u32 {
        FILES_UPDATE => Some((peek::<[u64; 2]>(address)?[1] as usize, count.saturating_mul(4))),
        REGISTER_FILES_TAGGED | FILES_UPDATE_TAGGED => {
            tagged_list(operation as u32, address).map(|(list, count)| (list, count.saturating_mul(4)))
        }
        _ => None,
    }
}

/// Registers buffers. The kernel pins them, so they stay near until they are unregistered or the
/// ring is closed.
fn register_buffers(ring: &Arc<ProgramRing>, args: [usize; 6], list: Option<(usize, usize)>) -> CallOutcome {
    let runtime = &RUNTIME;
    let Some((address, count)) = list else { return error(libc::EFAULT) };
    let mut runs: Vec<PinnedRun> = Vec::new();
    let mut collector = BufferCollector::new(runtime, &mut runs);
    // This adds the structure that names the list; the loop adds the list, and what it names.
    collector.add(args[2], 32);
    let mut bytes = 0usize;
    for index in 0..count.min(1 << 14) {
        let place = address + index * size_of::<libc::iovec>();
        if address == 0 {
            break;
        }
        let Some(part) = peek::<libc::iovec>(place) else { return error(libc::EFAULT) };
        collector.add(place, size_of::<libc::iovec>());
        if window::contains(part.iov_base as usize) {
            bytes = bytes.saturating_add(part.iov_len);
        }
        if bytes > async_io::operation_bytes_max(runtime) {
            // The error is that of a limit of locked memory in force.
            return error(libc::ENOMEM);
        }
        collector.add(part.iov_base as usize, part.iov_len);
    }
    let Some(reservation) = PinReservation::reserve_lasting(runtime, runs) else { return error(libc::ENOMEM) };
    let mut reservations = vec![reservation];
    let mut at = None;
    async_io::begin(
        runtime,
        &mut reservations,
        |reservation| reservation,
        |registry, reservations| {
            let entry = registry.rings.iter_mut().find(|entry| Arc::ptr_eq(&entry.ring, ring));
            if let Some(entry) = entry {
                at = Some(entry.registered.len());
                entry.registered.append(reservations);
            }
        },
    );
    // SAFETY: the program's own call; its buffers are near and pinned.
    let result = unsafe { forward(libc::SYS_io_uring_register as usize, args) };
    if result < 0 && at.is_some() {
        with_entry(ring, |entry| entry.registered.truncate(at.unwrap_or(0)));
    }
    CallOutcome::Done(result)
}

/// Answers which operations the kernel knows, as far as we allow them.
fn probe(args: [usize; 6]) -> CallOutcome {
    // A header of 16 bytes, then 8 bytes for each operation: number, -, flags (16 bits), -.
    let count = args[3].min(256);
    let mut answer = [0u64; 2 + 256];
    let call = [args[0], args[1], answer.as_mut_ptr() as usize, count, 0, 0];
    let mut before = [0u64; 2 + 256];
    if !peek_slice(args[2], &mut before[..2 + count]) {
        return error(libc::EFAULT);
    }
    if before.iter().any(|&word| word != 0) {
        return error(libc::EINVAL);
    }
    // SAFETY: the program's own question, answered into our own memory.
    let result = done(unsafe { gate::syscall(libc::SYS_io_uring_register, call) });
    if result != CallOutcome::Done(0) {
        return result;
    }
    let last = (answer[0] as u8).min(OP_LAST);
    let known = ((answer[0] >> 8) as u8).min(OP_LAST + 1);
    answer[0] = answer[0] & !0xFFFF | u64::from(last) | u64::from(known) << 8;
    for (number, word) in answer[2..].iter_mut().enumerate() {
        if !is_known(number as u8) {
            *word &= 0xFFFF;
        }
    }
    if poke_slice(args[2], &answer[..2 + count]) { result } else { error(libc::EFAULT) }
}

/// Notices rings that the program has closed. Our view keeps a ring alive, so its operations are
/// cancelled in the name of the program. Pages go when nothing is in flight any more.
pub fn find_closed(runtime: &Runtime) {
    if runtime.is_borrowed() {
        return;
    }
    let mut index = 0;
    loop {
        let look = |entry: &Entry| (entry.ring.clone(), entry.descriptor, entry.closed_ns.is_some());
        let Some((ring, descriptor, was_closed)) = ASYNC_IO_REGISTRY.lock().rings.get(index).map(look) else { return };
        index += 1;
        if !was_closed {
            if identity_of(descriptor) == Ok(ring.identity) {
                continue;
            }
            if let Some(other) = another_descriptor(&ring) {
                with_entry(&ring, |entry| entry.descriptor = other);
                continue;
            }
        }
        let now = process::now_ns();
        let since = with_entry(&ring, |entry| {
            entry.reap();
            let since = *entry.closed_ns.get_or_insert(now);
            (entry.is_in_use(), since)
        });
        match since {
            Some((true, since)) if now < since + CLOSING_NS => cancel_all(&ring),
            Some((in_use, _)) => {
                let mut registry = ASYNC_IO_REGISTRY.lock();
                if let Some(at) = registry.rings.iter().position(|entry| Arc::ptr_eq(&entry.ring, &ring)) {
                    let mut entry = registry.rings.swap_remove(at);
                    if in_use {
                        // Another user of the ring exists that we do not see: these pages stay for
                        // good.
                        entry.operations.take().for_each(core::mem::forget);
                        entry.registered.drain(..).for_each(core::mem::forget);
                        core::mem::forget(core::mem::take(&mut entry.permanent));
                    }
                    index -= 1;
                }
            }
            None => {}
        }
    }
}

/// Finds another descriptor of the program for the same ring.
fn another_descriptor(ring: &ProgramRing) -> Option<i32> {
    let ours = window::DESCRIPTORS..window::DESCRIPTORS_END;
    file::find_descriptor(|descriptor| !ours.contains(&descriptor) && identity_of(descriptor) == Ok(ring.identity))
}

/// Asks a ring to cancel all that it has in flight.
fn cancel_all(ring: &ProgramRing) {
    #[repr(C)]
    struct Cancel {
        address: u64,
        descriptor: i32,
        flags: u32,
        timeout: [i64; 2],
        rest: [u64; 4],
    }
    const ALL: u32 = 1 << 0;
    const ANY: u32 = 1 << 2;
    let cancel = Cancel { address: 0, descriptor: -1, flags: ALL | ANY, timeout: [0, 1_000_000], rest: [0; 4] };
    let args = [ring.descriptor as usize, SYNC_CANCEL as usize, &raw const cancel as usize, 1, 0, 0];
    // SAFETY: `cancel` has the kernel's layout.
    let _ = unsafe { gate::syscall(libc::SYS_io_uring_register, args) };
}
