//! The server's side of a call: the table through which a library reaches a region.

use crate::abi::{MemoryTable, Status, Work};
use core::cell::Cell;
use core::ffi::c_void;
use core::slice::{from_raw_parts, from_raw_parts_mut};
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::{Budget, Fault, Memory, RANGE_BYTES_MAX, Stop, Task, check_range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Bytes of an access that cost a step, in addition to the step of the access itself.
const BYTES_PER_STEP: u64 = 4096;
/// A library may make so many times the accesses that its calls have steps, because a step of a lock
/// takes several.
const ACCESSES_PER_STEP: u64 = 4;
/// Accesses between two looks at the clock.
const LOOK_EVERY: u64 = 256;

/// A region, while calls of a library run over it. It refuses accesses once all of these calls have
/// spent their budgets, so a library that does not count ends all the same.
pub(crate) struct HostMemory<'m> {
    memory: &'m dyn Memory,
    spent: Cell<u64>,
    spent_max: u64,
    until: Option<Instant>,
    stop: Cell<Option<Stop>>,
}

impl<'m> HostMemory<'m> {
    pub(crate) fn new(memory: &'m dyn Memory, tasks: &[Task<'_>]) -> HostMemory<'m> {
        let steps = tasks.iter().map(|task| task.budget.steps_max).fold(0, u64::saturating_add);
        // The last deadline, if each call has one.
        let until = tasks.iter().map(|Task { budget: Budget { until, .. }, .. }| *until);
        let until = until.collect::<Option<Vec<_>>>().and_then(|until| until.into_iter().max());
        let spent_max = steps.saturating_mul(ACCESSES_PER_STEP);
        HostMemory { memory, spent: Cell::new(0), spent_max, until, stop: Cell::new(None) }
    }

    /// Returns the reason why accesses are refused.
    pub(crate) fn stop(&self) -> Option<Stop> {
        self.stop.get()
    }

    pub(crate) fn table(&self) -> MemoryTable {
        MemoryTable {
            context: (&raw const *self).cast(),
            region_bytes: self.memory.region_bytes(),
            read,
            load,
            sums,
            matches,
            write,
            alone,
            clock,
            rest,
            turn,
            announce,
        }
    }

    /// Counts an access to this many bytes. Fails once the budgets are spent.
    fn spend(&self, bytes: u64) -> Result<(), Stop> {
        if let Some(stop) = self.stop.get() {
            return Err(stop);
        }
        let before = self.spent.get();
        // An access to more than this many bytes or values fails.
        let steps = 1 + (bytes / BYTES_PER_STEP).min(RANGE_BYTES_MAX as u64);
        let after = before.saturating_add(steps);
        self.spent.set(after);
        let is_late =
            before / LOOK_EVERY != after / LOOK_EVERY && self.until.is_some_and(|until| Instant::now() > until);
        let stop = match (after > self.spent_max, is_late) {
            (true, _) => Stop::Overrun { steps: after / ACCESSES_PER_STEP },
            (_, true) => Stop::TimedOut,
            _ => return Ok(()),
        };
        self.stop.set(Some(stop));
        Err(stop)
    }

    /// Checks that these pages lie in the region.
    fn check_pages(&self, offset: u64, count: usize) -> Result<(), Fault> {
        let bytes = (count as u64).saturating_mul(PAGE_BYTES as u64);
        let first = offset - offset % PAGE_BYTES as u64;
        match first.checked_add(bytes) {
            Some(end) if end <= self.memory.region_bytes() => Ok(()),
            _ => Err(Fault::OutOfRange { offset }),
        }
    }

    /// Checks that a value of `each` bytes at this offset lies in one page of the region.
    fn check_value(&self, offset: u64, each: usize) -> Result<(), Fault> {
        check_range(self.memory.region_bytes(), offset, each)?;
        let in_page = (offset % PAGE_BYTES as u64) as usize;
        if in_page + each <= PAGE_BYTES { Ok(()) } else { Err(Fault::Unaligned { offset }) }
    }
}

/// Runs an access of a library: counts it, and keeps panics of the server from a library that may
/// not have been made for them.
///
/// # Safety
/// `context` is that of a [`HostMemory`] which still lives.
unsafe fn access(context: *const c_void, bytes: u64, run: impl FnOnce(&HostMemory<'_>) -> Result<(), Fault>) -> Status {
    // SAFETY: the caller promises it; one thread uses a table, and all state is in cells.
    let host = unsafe { &*context.cast::<HostMemory<'_>>() };
    if let Err(stop) = host.spend(bytes) {
        return Status::of_stop(stop);
    }
    Status::of_access(catch_unwind(AssertUnwindSafe(|| run(host))).unwrap_or(Err(Fault::Internal)))
}

/// Passes a hint of a library on.
///
/// # Safety
/// `context` is that of a [`HostMemory`] which still lives.
unsafe fn hint<T: Default>(context: *const c_void, run: impl FnOnce(&HostMemory<'_>) -> T) -> T {
    // SAFETY: the caller promises it.
    let host = unsafe { &*context.cast::<HostMemory<'_>>() };
    catch_unwind(AssertUnwindSafe(|| run(host))).unwrap_or_default()
}

unsafe extern "C" fn read(context: *const c_void, offset: u64, into: *mut u8, len: usize) -> Status {
    let read = |host: &HostMemory<'_>| {
        check_range(host.memory.region_bytes(), offset, len)?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the library passes room for `len` bytes, which it may not have initialised. It is
        // written here without being read: `Memory::read` copies.
        unsafe { into.write_bytes(0, len) };
        // SAFETY: as above, and it is initialised now.
        host.memory.read(offset, unsafe { from_raw_parts_mut(into, len) })
    };
    // SAFETY: the table's functions are called with the table's context.
    unsafe { access(context, len as u64, read) }
}

unsafe extern "C" fn load(
    context: *const c_void,
    offsets: *const u64,
    count: usize,
    each: usize,
    into: *mut u8,
) -> Status {
    let load = |host: &HostMemory<'_>| {
        if !matches!(each, 1 | 2 | 4 | 8) || count > RANGE_BYTES_MAX {
            return Err(Fault::TooLong { bytes: (each as u64).saturating_mul(count as u64) });
        }
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the library passes `count` offsets.
        let offsets = unsafe { from_raw_parts(offsets, count) };
        offsets.iter().try_for_each(|offset| host.check_value(*offset, each))?;
        // SAFETY: the library passes room for as many values, which is initialised here.
        unsafe { into.write_bytes(0, count * each) };
        // SAFETY: as above.
        host.memory.load(offsets, each, unsafe { from_raw_parts_mut(into, count * each) })
    };
    // Each value is an access.
    let steps = (count as u64).saturating_mul(BYTES_PER_STEP);
    // SAFETY: the table's functions are called with the table's context.
    unsafe { access(context, steps, load) }
}

unsafe extern "C" fn sums(context: *const c_void, offset: u64, into: *mut u64, count: usize) -> Status {
    let sums = |host: &HostMemory<'_>| {
        host.check_pages(offset, count)?;
        if count == 0 {
            return Ok(());
        }
        // SAFETY: the library passes room for `count` checksums, which is initialised here.
        unsafe { into.write_bytes(0, count) };
        // SAFETY: as above.
        host.memory.sums(offset, unsafe { from_raw_parts_mut(into, count) })
    };
    // SAFETY: the table's functions are called with the table's context.
    unsafe { access(context, (count as u64).saturating_mul(8), sums) }
}

unsafe extern "C" fn matches(
    context: *const c_void,
    offset: u64,
    sums: *const u64,
    count: usize,
    matches: *mut u32,
) -> Status {
    let compare = |host: &HostMemory<'_>| {
        host.check_pages(offset, count)?;
        // SAFETY: the library passes `count` checksums; without any, the pointer is not used.
        let sums = if count == 0 { &[] } else { unsafe { from_raw_parts(sums, count) } };
        let found = host.memory.matches(offset, sums)?;
        // SAFETY: the library passes room for the result.
        unsafe { matches.write(found.into()) };
        Ok(())
    };
    // SAFETY: the table's functions are called with the table's context.
    unsafe { access(context, (count as u64).saturating_mul(PAGE_BYTES as u64), compare) }
}

unsafe extern "C" fn write(context: *const c_void, offset: u64, bytes: *const u8, len: usize) -> Status {
    let write = |host: &HostMemory<'_>| {
        check_range(host.memory.region_bytes(), offset, len)?;
        // SAFETY: the library passes `len` bytes; without any, the pointer is not used.
        host.memory.write(offset, if len == 0 { &[] } else { unsafe { from_raw_parts(bytes, len) } })
    };
    // SAFETY: the table's functions are called with the table's context.
    unsafe { access(context, len as u64, write) }
}

unsafe extern "C" fn alone(context: *const c_void, work: Work, work_context: *mut c_void) -> Status {
    let alone = |host: &HostMemory<'_>| {
        // SAFETY: the library passes its own function with its own context.
        host.memory.alone(&mut || unsafe { work(work_context) }.access())
    };
    // SAFETY: the table's functions are called with the table's context.
    unsafe { access(context, 0, alone) }
}

unsafe extern "C" fn clock(context: *const c_void) -> u64 {
    // SAFETY: the table's functions are called with the table's context.
    unsafe { hint(context, |host| host.memory.clock()) }
}

unsafe extern "C" fn rest(context: *const c_void) {
    // SAFETY: the table's functions are called with the table's context.
    unsafe { hint(context, |host| host.memory.rest()) }
}

unsafe extern "C" fn turn(context: *const c_void) {
    // SAFETY: the table's functions are called with the table's context.
    unsafe { hint(context, |host| host.memory.turn()) }
}

unsafe extern "C" fn announce(context: *const c_void, offsets: *const u64, lens: *const usize, count: usize) {
    if count == 0 {
        return;
    }
    // SAFETY: the library passes `count` offsets and as many lengths.
    let (offsets, lens) = unsafe { (from_raw_parts(offsets, count), from_raw_parts(lens, count)) };
    let announce = |host: &HostMemory<'_>| {
        let is_inside = |range: &(u64, usize)| check_range(host.memory.region_bytes(), range.0, range.1).is_ok();
        host.memory.announce(&mut offsets.iter().copied().zip(lens.iter().copied()).filter(is_inside));
    };
    // SAFETY: the table's functions are called with the table's context.
    unsafe { hint(context, announce) }
}
