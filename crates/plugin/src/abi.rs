//! Tables through which a memory server and a function library call each other, in C's layout.
//! `include/farfield_functions.h` declares them for C.
//!
//! Everything that a table points to lives as long as the call to which it is passed, and what a
//! library describes of itself lives as long as the process.

use core::ffi::c_void;
use core::ptr::null;
use farfield_core::wire::ErrorCode;
use farfield_wic::{Fault, Stop};

/// Version of the tables. A server loads libraries of this version only.
pub const ABI_VERSION: u32 = 1;

/// Name of the symbol that a library exports: a [`Describe`].
pub const SYMBOL: &str = "farfield_functions";

/// Type of the symbol that a library exports.
pub type Describe = unsafe extern "C" fn() -> *const FunctionTable;

/// Bytes that belong to the caller.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ByteSlice {
    /// First byte; may be anything if there are none.
    pub data: *const u8,
    /// Number of bytes.
    pub len: usize,
}

impl ByteSlice {
    /// No bytes.
    pub const EMPTY: ByteSlice = ByteSlice { data: null(), len: 0 };

    /// Describes bytes.
    pub const fn new(bytes: &[u8]) -> ByteSlice {
        ByteSlice { data: bytes.as_ptr(), len: bytes.len() }
    }

    /// Returns the bytes.
    ///
    /// # Safety
    /// `data` points to `len` bytes, unless `len` is 0. They do not change, and live as long as `'a`.
    pub unsafe fn as_slice<'a>(self) -> &'a [u8] {
        match self.len {
            0 => &[],
            // SAFETY: the caller promises it.
            len => unsafe { core::slice::from_raw_parts(self.data, len) },
        }
    }
}

/// Result of an access or a call: 0 for success, otherwise the number of an error code of the wire
/// protocol (docs/design/wire.md) and its detail.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// Number of the error code; 0 for success.
    pub code: u32,
    /// Zero.
    pub reserved: u32,
    /// Offset, page or steps, as the code says.
    pub detail: u64,
}

impl Status {
    /// Success.
    pub const OK: Status = Status { code: 0, reserved: 0, detail: 0 };

    /// Returns the status of a stop.
    pub fn of_stop(stop: Stop) -> Status {
        let (code, detail) = stop.code();
        Status { code: code.number().into(), reserved: 0, detail }
    }

    /// Returns the status of an access.
    pub fn of_access(result: Result<(), Fault>) -> Status {
        result.map_or_else(|fault| Status::of_stop(Stop::Fault(fault)), |()| Status::OK)
    }

    /// Returns the result of a call. A code that no function stops with becomes
    /// [`Fault::Internal`].
    pub fn stop(self) -> Result<(), Stop> {
        if self == Status::OK {
            return Ok(());
        }
        let code = u16::try_from(self.code).ok().map(ErrorCode::from_number);
        Err(code.and_then(|code| Stop::of_code(code, self.detail)).unwrap_or(Stop::Fault(Fault::Internal)))
    }

    /// Returns the result of an access. A code that is no fault becomes [`Fault::Internal`].
    pub fn access(self) -> Result<(), Fault> {
        self.stop().map_err(|stop| match stop {
            Stop::Fault(fault) => fault,
            _ => Fault::Internal,
        })
    }
}

/// Function of a library that runs while no other changes bytes of the region. It gets its own context.
pub type Work = unsafe extern "C" fn(*mut c_void) -> Status;

/// The bytes of a region, for the duration of a call. Accesses take the context as their first
/// argument. The server checks ranges and pages. One thread uses it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemoryTable {
    /// Context of the server.
    pub context: *const c_void,
    /// Size of the region in bytes.
    pub region_bytes: u64,
    /// Copies `len` bytes at `offset` into `into`, after comparing their pages with the checksums.
    pub read: unsafe extern "C" fn(context: *const c_void, offset: u64, into: *mut u8, len: usize) -> Status,
    /// Copies one value of `each` bytes (1, 2, 4 or 8) per offset, none beyond the end of its page.
    /// Nothing is compared with a checksum until `matches` does so.
    pub load: unsafe extern "C" fn(
        context: *const c_void,
        offsets: *const u64,
        count: usize,
        each: usize,
        into: *mut u8,
    ) -> Status,
    /// Reads the checksums that `count` pages should have, from the one at `offset` on.
    pub sums: unsafe extern "C" fn(context: *const c_void, offset: u64, into: *mut u64, count: usize) -> Status,
    /// Sets `matches` to 1 if these pages match the checksums that they should have had, and still
    /// should have; to 0 otherwise.
    pub matches: unsafe extern "C" fn(
        context: *const c_void,
        offset: u64,
        sums: *const u64,
        count: usize,
        matches: *mut u32,
    ) -> Status,
    /// Stores `len` bytes at `offset`.
    pub write: unsafe extern "C" fn(context: *const c_void, offset: u64, bytes: *const u8, len: usize) -> Status,
    /// Runs `work` while no function changes bytes of the region. `work` reads and writes as usual,
    /// and does not wait.
    pub alone: unsafe extern "C" fn(context: *const c_void, work: Work, work_context: *mut c_void) -> Status,
    /// Returns the nanoseconds of a clock that all users of the region share.
    pub clock: unsafe extern "C" fn(context: *const c_void) -> u64,
    /// Hints that no access will come for a while.
    pub rest: unsafe extern "C" fn(context: *const c_void),
    /// Hints that each call that can go on has had a turn.
    pub turn: unsafe extern "C" fn(context: *const c_void),
    /// Hints that `count` ranges will be read soon: their offsets and lengths.
    pub announce: unsafe extern "C" fn(context: *const c_void, offsets: *const u64, lens: *const usize, count: usize),
}

/// A call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CallTable {
    /// Encoded argument.
    pub argument: ByteSlice,
    /// Most steps: one for each access, and one for each whole 4 KiB of it.
    pub steps_max: u64,
    /// Time that the call has left, in nanoseconds; `u64::MAX` without a deadline.
    pub time_left_ns: u64,
}

/// Receiver of results.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ResultTable {
    /// Context of the server.
    pub context: *mut c_void,
    /// Takes the result of the call with this index: a status, and the encoded answer if that is 0,
    /// which it copies. `steps` is the number of steps that the call took.
    pub ended: unsafe extern "C" fn(context: *mut c_void, index: usize, status: Status, answer: ByteSlice, steps: u64),
}

/// Runs `count` calls, and passes one result for each of them to the receiver, in any order, before
/// it returns. A call without a result counts as one that panicked.
pub type Run = unsafe extern "C" fn(
    memory: *const MemoryTable,
    calls: *const CallTable,
    count: usize,
    results: *const ResultTable,
);

/// A function of a library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FunctionEntry {
    /// Name of the function in UTF-8, 1 to 64 bytes.
    pub name: ByteSlice,
    /// Version of the function.
    pub version: u32,
    /// Zero.
    pub reserved: u32,
    /// Code of the function.
    pub run: Run,
}

// SAFETY: an entry is not changed, and its name is a constant of the library.
unsafe impl Sync for FunctionEntry {}

/// Functions of a library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FunctionTable {
    /// [`ABI_VERSION`]. The rest of the table means something in this version only.
    pub abi_version: u32,
    /// Zero.
    pub reserved: u32,
    /// First function.
    pub functions: *const FunctionEntry,
    /// Number of functions.
    pub count: usize,
}

// SAFETY: the table is not changed, and the entries it points to can be shared.
unsafe impl Sync for FunctionTable {}

impl FunctionTable {
    /// Makes the table of a library.
    pub const fn new(functions: &'static [FunctionEntry]) -> FunctionTable {
        FunctionTable { abi_version: ABI_VERSION, reserved: 0, functions: functions.as_ptr(), count: functions.len() }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an error that is another one on the other side of the table.

    use super::*;

    #[test]
    fn errors_cross_the_table_and_unknown_ones_are_internal() {
        for stop in [
            Stop::Fault(Fault::OutOfRange { offset: 77 }),
            Stop::Fault(Fault::Full),
            Stop::Overrun { steps: 9 },
            Stop::TimedOut,
            Stop::Panicked,
            Stop::Argument,
        ] {
            assert_eq!(Status::of_stop(stop).stop(), Err(stop));
        }
        assert_eq!(Status::of_access(Ok(())).access(), Ok(()));
        let locked = Err(Fault::Locked { offset: 64 });
        assert_eq!(Status::of_access(locked).access(), locked);
        assert_eq!(Status::of_stop(Stop::TimedOut).access(), Err(Fault::Internal), "no access ends so");
        for code in [999, u32::MAX, 1 << 16] {
            let status = Status { code, ..Status::OK };
            assert_eq!(status.stop(), Err(Stop::Fault(Fault::Internal)), "{code}");
        }
    }
}
