//! The library's side: what [`export!`](crate::export!) is made of.

use crate::abi::{ByteSlice, CallTable, FunctionEntry, MemoryTable, ResultTable, Status};
use core::ffi::c_void;
use core::slice::from_raw_parts;
use core::time::Duration;
use farfield_wic::{Budget, Fault, Function, Memory, Stop, Task, run_row};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Exports functions for memory servers that load this library (`farfield serve --functions`). Used
/// once in a crate of type `cdylib`.
///
/// ```
/// use farfield_wic::{Fault, Function, Place};
///
/// /// The word behind a pointer.
/// struct Behind;
///
/// impl Function for Behind {
///     const NAME: &'static str = "example.behind";
///     const VERSION: u32 = 1;
///     type Argument = u64;
///     type Answer = u64;
///
///     async fn run<P: Place>(place: &P, pointer: u64) -> Result<u64, Fault> {
///         let behind = place.read_u64(pointer).await?;
///         place.read_u64(behind).await
///     }
/// }
///
/// farfield_plugin::export!(Behind);
/// # fn main() {}
/// ```
#[macro_export]
macro_rules! export {
    ($($function:ty),+ $(,)?) => {
        #[cfg(panic = "abort")]
        compile_error!("a function that panics would end the memory server: build the library with panic = \"unwind\"");

        /// Describes the functions of this library to a memory server.
        #[unsafe(no_mangle)]
        pub extern "C" fn farfield_functions() -> *const $crate::abi::FunctionTable {
            static FUNCTIONS: &[$crate::abi::FunctionEntry] = &[$($crate::export::entry::<$function>()),+];
            static TABLE: $crate::abi::FunctionTable = $crate::abi::FunctionTable::new(FUNCTIONS);
            &TABLE
        }
    };
}

/// Returns the entry of a function.
pub const fn entry<F: Function>() -> FunctionEntry {
    FunctionEntry { name: ByteSlice::new(F::NAME.as_bytes()), version: F::VERSION, reserved: 0, run: run::<F> }
}

/// Runs calls of a function. Panics end here.
unsafe extern "C" fn run<F: Function>(
    memory: *const MemoryTable,
    calls: *const CallTable,
    count: usize,
    results: *const ResultTable,
) {
    // SAFETY: the server passes tables that live as long as this call.
    let (memory, results) = unsafe { (RemoteMemory(&*memory), &*results) };
    // SAFETY: the server passes `count` calls, at least one.
    let calls = unsafe { from_raw_parts(calls, count) };
    let now = Instant::now();
    // SAFETY: arguments live as long as this call.
    let tasks: Vec<_> = calls.iter().map(|call| unsafe { task(call, now) }).collect();
    let mut ended = |index: usize, result: Result<&[u8], Stop>, steps: u64| {
        let (status, answer) = match result {
            Ok(answer) => (Status::OK, ByteSlice::new(answer)),
            Err(stop) => (Status::of_stop(stop), ByteSlice::EMPTY),
        };
        // SAFETY: the receiver is called with its context, by the thread that was called.
        unsafe { (results.ended)(results.context, index, status, answer, steps) };
    };
    // The server counts calls without a result as panicked.
    let _ = catch_unwind(AssertUnwindSafe(|| run_row::<F>(&memory, &tasks, &mut ended)));
}

/// Reads a call.
///
/// # Safety
/// The bytes of the argument live as long as `'a`.
unsafe fn task<'a>(call: &CallTable, now: Instant) -> Task<'a> {
    let until = match call.time_left_ns {
        u64::MAX => None,
        left => now.checked_add(Duration::from_nanos(left)),
    };
    // SAFETY: the caller promises it.
    let argument = unsafe { call.argument.as_slice() };
    Task { argument, budget: Budget { steps_max: call.steps_max, until } }
}

/// The region of a call, behind the server's table.
struct RemoteMemory<'t>(&'t MemoryTable);

// Each access passes the context of the table, and slices with their lengths. What the server gets
// lives as long as the access.
impl Memory for RemoteMemory<'_> {
    fn region_bytes(&self) -> u64 {
        self.0.region_bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        // SAFETY: see above.
        unsafe { (self.0.read)(self.0.context, offset, into.as_mut_ptr(), into.len()) }.access()
    }

    fn load(&self, offsets: &[u64], each: usize, into: &mut [u8]) -> Result<(), Fault> {
        let count = offsets.len().min(into.len().checked_div(each).unwrap_or(0));
        // SAFETY: see above; there is room for `count` values.
        unsafe { (self.0.load)(self.0.context, offsets.as_ptr(), count, each, into.as_mut_ptr()) }.access()
    }

    fn sums(&self, offset: u64, into: &mut [u64]) -> Result<(), Fault> {
        // SAFETY: see above.
        unsafe { (self.0.sums)(self.0.context, offset, into.as_mut_ptr(), into.len()) }.access()
    }

    fn matches(&self, offset: u64, sums: &[u64]) -> Result<bool, Fault> {
        let mut matches = 0;
        // SAFETY: see above.
        let status = unsafe { (self.0.matches)(self.0.context, offset, sums.as_ptr(), sums.len(), &raw mut matches) };
        status.access().map(|()| matches == 1)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        // SAFETY: see above.
        unsafe { (self.0.write)(self.0.context, offset, bytes.as_ptr(), bytes.len()) }.access()
    }

    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
        let mut work = work;
        // SAFETY: `work_here` gets the context that it expects, during this access only.
        unsafe { (self.0.alone)(self.0.context, work_here, (&raw mut work).cast()) }.access()
    }

    fn clock(&self) -> u64 {
        // SAFETY: see above.
        unsafe { (self.0.clock)(self.0.context) }
    }

    fn rest(&self) {
        // SAFETY: see above.
        unsafe { (self.0.rest)(self.0.context) }
    }

    fn turn(&self) {
        // SAFETY: see above.
        unsafe { (self.0.turn)(self.0.context) }
    }

    fn announce(&self, ranges: &mut dyn Iterator<Item = (u64, usize)>) {
        /// Ranges that are passed at once.
        const AT_ONCE: usize = 16;
        let (mut offsets, mut lens, mut count) = ([0; AT_ONCE], [0; AT_ONCE], 0);
        let flush = |offsets: &[u64], lens: &[usize]| {
            // SAFETY: see above; both slices have one length.
            unsafe { (self.0.announce)(self.0.context, offsets.as_ptr(), lens.as_ptr(), offsets.len()) }
        };
        for (offset, len) in ranges {
            (offsets[count], lens[count]) = (offset, len);
            count += 1;
            if count == AT_ONCE {
                flush(&offsets, &lens);
                count = 0;
            }
        }
        if count > 0 {
            flush(&offsets[..count], &lens[..count]);
        }
    }
}

/// Runs the work of [`Memory::alone`]. A panic in it ends the access, and the function with it.
unsafe extern "C" fn work_here(context: *mut c_void) -> Status {
    // SAFETY: `alone` passes a pointer to its reference, which it does not use meanwhile.
    let work = unsafe { &mut *context.cast::<&mut dyn FnMut() -> Result<(), Fault>>() };
    Status::of_access(catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Fault::Internal)))
}
