//! io_uring: many reads and writes of one file in flight at a time.

use crate::errno::{Errno, Result};
use crate::file;
use crate::gate::syscall;
use crate::memory;
use crate::net::lift;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;

const SETUP_CLAMP: u32 = 1 << 4;
const FEATURE_SINGLE_MMAP: u32 = 1;
/// `IORING_ENTER_GETEVENTS`, and with it `IORING_ENTER_EXT_ARG`.
const ENTER_WAIT: usize = 1 | 1 << 3;
const REGISTER_BUFFERS: usize = 0;
const REGISTER_FILES: usize = 2;
const OFFSET_SQES: usize = 0x1000_0000;
const FLAG_FIXED_FILE: u8 = 1;

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Parameters {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    sq: Offsets,
    cq: Offsets,
}

/// `struct io_sqring_offsets` and `struct io_cqring_offsets`: `fourth` to `last` differ.
#[repr(C)]
#[derive(Default)]
struct Offsets {
    head: u32,
    tail: u32,
    mask: u32,
    entries: u32,
    /// sq: flags; cq: overflow.
    fourth: u32,
    /// sq: dropped; cq: the completions.
    fifth: u32,
    /// sq: the array; cq: flags.
    sixth: u32,
    reserved: u32,
    user: u64,
}

/// `struct io_uring_sqe`.
#[repr(C)]
#[derive(Default)]
struct Submission {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    operation_flags: u32,
    tag: u64,
    buffer_index: u16,
    personality: u16,
    splice_fd: i32,
    reserved: [u64; 2],
}

/// `struct io_uring_cqe`.
#[repr(C)]
struct CompletionEntry {
    tag: u64,
    result: i32,
    flags: u32,
}

/// `struct io_uring_getevents_arg`.
#[repr(C)]
struct WaitArgument {
    mask: u64,
    mask_bytes: u32,
    padding: u32,
    time: u64,
}

const _: () =
    assert!(size_of::<Parameters>() == 120 && size_of::<Submission>() == 64 && size_of::<CompletionEntry>() == 16);

/// Direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransferDirection {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

/// A transfer between a file and memory.
#[derive(Clone, Copy, Debug)]
pub struct FileTransfer {
    /// Tag that comes back with the result.
    pub tag: u64,
    /// Direction of the transfer.
    pub direction: TransferDirection,
    /// Address in memory.
    pub address: usize,
    /// Length in bytes.
    pub len: u32,
    /// Offset in the file.
    pub offset: u64,
}

/// A ring for the transfers of one file. Used by one thread at a time.
#[derive(Debug)]
pub struct Ring {
    fd: i32,
    file: i32,
    rings: usize,
    rings_bytes: usize,
    submissions: usize,
    submissions_bytes: usize,
    entries: u32,
    parameters: [u32; 7],
    has_file: bool,
    has_buffer: bool,
    /// Number of transfers that were put into the ring and not handed to the kernel.
    queued: u32,
}

// Indices of `Ring::parameters`: offsets in the ring mapping, and masks.
const SQ_TAIL: usize = 0;
const SQ_HEAD: usize = 1;
const SQ_MASK: usize = 2;
const CQ_HEAD: usize = 3;
const CQ_TAIL: usize = 4;
const CQ_MASK: usize = 5;
const CQ_ARRIVALS: usize = 6;

impl Ring {
    /// Opens a ring for at most `entries` transfers of `file` at a time. EPERM or ENOSYS where
    /// io_uring is forbidden.
    pub fn open(file: i32, entries: u32) -> Result<Ring> {
        let mut parameters = Parameters { flags: SETUP_CLAMP, ..Parameters::default() };
        let at = &raw mut parameters as usize;
        // SAFETY: `parameters` is what the kernel expects, readable and writable.
        let fd = unsafe { syscall(libc::SYS_io_uring_setup, [entries as usize, at, 0, 0, 0, 0]) }?;
        let fd = lift(fd as i32)?;
        let mut ring = Ring {
            fd,
            file,
            rings: 0,
            rings_bytes: 0,
            submissions: 0,
            submissions_bytes: 0,
            entries: parameters.sq_entries,
            parameters: [0; 7],
            has_file: false,
            has_buffer: false,
            queued: 0,
        };
        if parameters.features & FEATURE_SINGLE_MMAP == 0 {
            return Err(Errno(libc::ENOSYS));
        }
        let (sq, cq) = (&parameters.sq, &parameters.cq);
        let sq_bytes = sq.sixth as usize + parameters.sq_entries as usize * size_of::<u32>();
        let cq_bytes = cq.fifth as usize + parameters.cq_entries as usize * size_of::<CompletionEntry>();
        ring.rings = map(fd, sq_bytes.max(cq_bytes), 0)?;
        ring.rings_bytes = sq_bytes.max(cq_bytes);
        let submissions_bytes = parameters.sq_entries as usize * size_of::<Submission>();
        ring.submissions = map(fd, submissions_bytes, OFFSET_SQES)?;
        ring.submissions_bytes = submissions_bytes;
        let mask = |offset: u32| ring.word(offset).load(Ordering::Relaxed);
        ring.parameters = [sq.tail, sq.head, mask(sq.mask), cq.head, cq.tail, mask(cq.mask), cq.fifth];
        for index in 0..parameters.sq_entries {
            ring.word(sq.sixth + index * 4).store(index, Ordering::Relaxed);
        }
        // SAFETY: one readable number.
        let registered = unsafe { ring.register(REGISTER_FILES, &raw const file as usize) };
        ring.has_file = registered.is_ok();
        Ok(ring)
    }

    /// Registers all memory from which and to which transfers go. The kernel then keeps it in
    /// place, so that no transfer has to look it up. `false` if the kernel refuses (`ulimit -l`):
    /// then everything works as before, more slowly.
    ///
    /// # Safety
    /// The memory is mapped until the ring is dropped.
    pub unsafe fn register_memory(&mut self, address: usize, len: usize) -> bool {
        let range = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len };
        // SAFETY: one readable range.
        self.has_buffer = unsafe { self.register(REGISTER_BUFFERS, &raw const range as usize) }.is_ok();
        self.has_buffer
    }

    /// Calls `io_uring_register` with one entry.
    ///
    /// # Safety
    /// `argument` is the address of one entry of what `what` takes.
    unsafe fn register(&self, what: usize, argument: usize) -> Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe { syscall(libc::SYS_io_uring_register, [self.fd as usize, what, argument, 1, 0, 0]) }
    }

    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: offsets are the kernel's, inside the mapping, aligned; the kernel reads and writes atomically too.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU32::from_ptr((self.rings + offset as usize) as *mut u32)
        }
    }

    /// Puts a transfer into the ring; `false` if there is no room. The transfer starts with
    /// [`Ring::start`].
    ///
    /// # Safety
    /// The memory of the transfer is nobody else's until it has ended, and inside what was
    /// registered if anything was.
    pub unsafe fn queue(&mut self, transfer: FileTransfer) -> bool {
        let (tail, head) = (self.word(self.parameters[SQ_TAIL]), self.word(self.parameters[SQ_HEAD]));
        let at = tail.load(Ordering::Relaxed);
        if at.wrapping_sub(head.load(Ordering::Acquire)) >= self.entries {
            return false;
        }
        // IORING_OP_READ and WRITE, or READ_FIXED and WRITE_FIXED.
        let opcode = match (transfer.direction, self.has_buffer) {
            (TransferDirection::Read, false) => 22,
            (TransferDirection::Write, false) => 23,
            (TransferDirection::Read, true) => 4,
            (TransferDirection::Write, true) => 5,
        };
        let submission = Submission {
            opcode,
            flags: if self.has_file { FLAG_FIXED_FILE } else { 0 },
            fd: if self.has_file { 0 } else { self.file },
            offset: transfer.offset,
            address: transfer.address as u64,
            len: transfer.len,
            tag: transfer.tag,
            ..Submission::default()
        };
        let index = (at & self.parameters[SQ_MASK]) as usize;
        // SAFETY: inside the mapping of submissions; the kernel does not look at this one before the tail passes it.
        unsafe { (self.submissions as *mut Submission).add(index).write_volatile(submission) };
        tail.store(at.wrapping_add(1), Ordering::Release);
        self.queued += 1;
        true
    }

    /// Hands everything queued to the kernel.
    pub fn start(&mut self) -> Result<()> {
        while self.queued > 0 {
            let args = [self.fd as usize, self.queued as usize, 0, 0, 0, 0];
            // SAFETY: the transfers are the responsibility of the code that queued them.
            match unsafe { syscall(libc::SYS_io_uring_enter, args) } {
                Ok(0) => return Err(Errno(libc::EAGAIN)),
                Ok(taken) => self.queued -= (taken as u32).min(self.queued),
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Takes one transfer that has ended; returns its tag and how many bytes were transferred.
    /// `None` if there is none.
    pub fn take(&mut self) -> Option<(u64, Result<usize>)> {
        let head = self.word(self.parameters[CQ_HEAD]);
        let at = head.load(Ordering::Relaxed);
        if at == self.word(self.parameters[CQ_TAIL]).load(Ordering::Acquire) {
            return None;
        }
        let index = (at & self.parameters[CQ_MASK]) as usize;
        let arrivals = (self.rings + self.parameters[CQ_ARRIVALS] as usize) as *const CompletionEntry;
        // SAFETY: inside the mapping; the kernel does not write this one before the head passes it.
        let CompletionEntry { tag, result, .. } = unsafe { arrivals.add(index).read_volatile() };
        head.store(at.wrapping_add(1), Ordering::Release);
        Some((tag, Errno::from_raw(result as isize)))
    }

    /// Sleeps until a transfer ends or `timeout` has passed; may return earlier.
    pub fn wait(&self, timeout: Duration) {
        let time = [timeout.as_secs() as i64, i64::from(timeout.subsec_nanos())];
        let argument = WaitArgument { mask: 0, mask_bytes: 0, padding: 0, time: time.as_ptr() as u64 };
        let at = &raw const argument as usize;
        let args = [self.fd as usize, 0, 1, ENTER_WAIT, at, size_of::<WaitArgument>()];
        // SAFETY: argument and time are readable.
        let _ = unsafe { syscall(libc::SYS_io_uring_enter, args) };
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for (start, bytes) in [(self.rings, self.rings_bytes), (self.submissions, self.submissions_bytes)] {
            if start != 0 {
                // SAFETY: mapped in `open` with this length.
                let _ = unsafe { memory::munmap(start, bytes) };
            }
        }
        file::close(self.fd);
    }
}

fn map(fd: i32, bytes: usize, offset: usize) -> Result<usize> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
    // SAFETY: a new mapping at a free address touches nobody's memory.
    unsafe { memory::mmap(0, bytes, protection, flags, fd, offset) }
}

#[cfg(test)]
mod tests {
    //! Guards against transfers that are lost, mixed up, or go elsewhere.
    use super::*;
    use crate::disk;
    use std::ffi::CString;

    #[test]
    fn many_transfers_arrive_each_with_its_own_bytes() {
        let folder = CString::new(std::env::temp_dir().into_os_string().into_encoded_bytes()).unwrap();
        let fd = disk::create_unnamed(&folder).unwrap();
        let Ok(mut ring) = Ring::open(fd, 32) else { return eprintln!("io_uring is forbidden here") };
        let bytes = 32 * 4096;
        let memory = memory::map_anonymous(bytes).unwrap();
        // SAFETY: mapped until the end of the test.
        let registered = unsafe { ring.register_memory(memory, bytes) };
        eprintln!("registered: {registered}");
        for direction in [TransferDirection::Write, TransferDirection::Read] {
            for page in 0..32usize {
                let (tag, address) = (page as u64, memory + page * 4096);
                let mark = if direction == TransferDirection::Write { page as u8 + 1 } else { 0xEE };
                // SAFETY: pages of the mapping, each of one transfer, which does not run yet.
                unsafe { (address as *mut u8).write_bytes(mark, 4096) };
                let offset = (31 - page as u64) * 4096;
                // SAFETY: as above; nobody touches them before they have arrived.
                assert!(unsafe { ring.queue(FileTransfer { tag, direction, address, len: 4096, offset }) });
            }
            // SAFETY: not queued: the ring is full.
            let more =
                unsafe { ring.queue(FileTransfer { tag: 99, direction, address: memory, len: 4096, offset: 0 }) };
            assert!(!more);
            ring.start().unwrap();
            let mut seen = [false; 32];
            while seen != [true; 32] {
                while let Some((tag, result)) = ring.take() {
                    assert_eq!(result, Ok(4096));
                    assert!(!core::mem::replace(&mut seen[tag as usize], true));
                }
                ring.wait(Duration::from_millis(10));
            }
        }
        for page in 0..32 {
            // SAFETY: everything has arrived.
            let byte = unsafe { ((memory + page * 4096 + 17) as *const u8).read() };
            assert_eq!(byte, page as u8 + 1);
        }
        drop(ring);
        // SAFETY: nobody uses it any more.
        unsafe { memory::munmap(memory, bytes) }.unwrap();
        file::close(fd);
    }
}
