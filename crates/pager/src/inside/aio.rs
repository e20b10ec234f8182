//! Native asynchronous I/O (`io_submit`): buffers stay near from submission to completion.
//!
//! A completion names the block that was submitted, and lies in a ring of events that the kernel
//! maps into the program. The kernel never has more operations in flight than the ring has events,
//! so none is missed between two submissions.

use super::async_io::{self, ASYNC_IO_REGISTRY, AsyncOperations, PinReservation, ProgressWait};
use super::call::{CallOutcome, error, forward};
use super::lock::SpinLock;
use super::runtime::{RUNTIME, Runtime};
use super::syscall_pinning::{BufferCollector, peek, poke};
use super::thread::PinnedRun;
use crate::submission::{Block, OperandMemory};
use crate::window;
use core::sync::atomic::Ordering;
use std::sync::Arc;

/// Maximum number of blocks submitted at once.
const STEP: usize = 64;

/// Words of `struct aio_ring`, at the address that names the context.
type Header = [u32; 8];
const H_EVENTS: usize = 1;
const H_TAIL: usize = 3;
const H_MAGIC: usize = 4;
const H_BYTES: usize = 7;
const MAGIC: u32 = 0xa10a_10a1;
const EVENT_BYTES: usize = 32;

/// Context of native asynchronous I/O in the registry [`async_io::ASYNC_IO_REGISTRY`].
pub struct Entry {
    context: usize,
    /// Lock held while a thread submits.
    submitter: Arc<SpinLock<Vec<PlannedBlock>>>,
    /// Operations in flight in the context.
    pub operations: AsyncOperations,
    /// Index in the ring where the next event will be.
    seen: u32,
}

struct PlannedBlock {
    block: u64,
    reservation: PinReservation,
}

impl Entry {
    /// Counts the events that have come.
    pub fn reap(&mut self) {
        if self.operations.in_flight() == 0 {
            return;
        }
        let Some(header) = header_of(self.context) else { return };
        let (events, tail, first) = (header[H_EVENTS], header[H_TAIL], self.context + header[H_BYTES] as usize);
        if tail >= events {
            return;
        }
        while self.seen != tail {
            // The second word of an event is the address of its block.
            let place = first + self.seen as usize * EVENT_BYTES + 8;
            let Some(block) = peek::<u64>(place) else { return };
            self.operations.end_operation(block);
            self.seen = (self.seen + 1) % events;
        }
    }
}

fn header_of(context: usize) -> Option<Header> {
    peek::<Header>(context).filter(|header| header[H_MAGIC] == MAGIC && header[H_EVENTS] > 0)
}

/// Serves `io_setup`.
pub fn set_up(args: [usize; 6]) -> CallOutcome {
    match peek::<u64>(args[1]) {
        None => return error(libc::EFAULT),
        Some(0) => {}
        Some(_) => return error(libc::EINVAL),
    }
    if RUNTIME.is_borrowed() {
        return error(libc::EPERM);
    }
    let mut context = 0usize;
    // SAFETY: the program's own call; the result goes to our own memory first.
    let result = unsafe { forward(libc::SYS_io_setup as usize, [args[0], &raw mut context as usize, 0, 0, 0, 0]) };
    if result < 0 {
        return CallOutcome::Done(result);
    }
    let seen = header_of(context).map(|header| header[H_TAIL]);
    let (Some(seen), true) = (seen, poke(args[1], context)) else {
        // SAFETY: made above.
        unsafe { forward(libc::SYS_io_destroy as usize, [context, 0, 0, 0, 0, 0]) };
        return error(libc::EFAULT);
    };
    let submitter = Arc::new(SpinLock::new(Vec::new()));
    ASYNC_IO_REGISTRY.lock().contexts.push(Entry { context, submitter, operations: AsyncOperations::default(), seen });
    super::arm::start_monitor(&RUNTIME);
    CallOutcome::Done(result)
}

/// Serves `io_submit`.
pub fn submit(args: [usize; 6]) -> CallOutcome {
    let runtime = &RUNTIME;
    let [context, count, list, ..] = args;
    let find = || {
        ASYNC_IO_REGISTRY
            .lock()
            .contexts
            .iter()
            .find(|entry| entry.context == context)
            .map(|entry| entry.submitter.clone())
    };
    let Some(submitter) = find() else { return error(libc::EINVAL) };
    if (count as isize) < 0 || runtime.is_borrowed() {
        return error(libc::EINVAL);
    }
    let mut planned = submitter.lock();
    let mut submitted = 0;
    let mut progress_wait = ProgressWait::default();
    while submitted < count {
        let progress = with_entry(context, |entry| {
            entry.reap();
            entry.seen
        });
        let mut blocks = [0usize; STEP];
        let step = plan(runtime, list + submitted * 8, (count - submitted).min(STEP), &mut blocks, &mut planned);
        let step = match step {
            Ok(0) if progress_wait.wait(progress.unwrap_or(0)) => continue,
            Ok(0) | Err(_) if submitted > 0 => break,
            Ok(0) => return error(libc::EAGAIN),
            Ok(step) => step,
            Err(errno) => return error(errno),
        };
        async_io::begin(
            runtime,
            &mut planned,
            |one| &mut one.reservation,
            |registry, planned| {
                if let Some(entry) = registry.contexts.iter_mut().find(|entry| entry.context == context) {
                    planned.drain(..).for_each(|one| entry.operations.begin_operation(one.block, one.reservation));
                }
            },
        );
        runtime.counters().syscalls_guarded.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the program's own call, or a part of it, with a copy of its list.
        let result =
            unsafe { forward(libc::SYS_io_submit as usize, [context, step, blocks.as_ptr() as usize, 0, 0, 0]) };
        let taken = result.max(0) as usize;
        with_entry(context, |entry| {
            blocks[taken..step].iter().for_each(|&block| entry.operations.end_operation(block as u64))
        });
        if result < 0 && submitted == 0 {
            return CallOutcome::Done(result);
        }
        submitted += taken;
        if taken < step {
            break;
        }
    }
    CallOutcome::Done(submitted as isize)
}

fn with_entry<T>(context: usize, action: impl FnOnce(&mut Entry) -> T) -> Option<T> {
    ASYNC_IO_REGISTRY.lock().contexts.iter_mut().find(|entry| entry.context == context).map(action)
}

/// Reserves room for as many blocks as possible, and returns their number.
fn plan(
    runtime: &Runtime,
    list: usize,
    count: usize,
    blocks: &mut [usize; STEP],
    planned: &mut Vec<PlannedBlock>,
) -> Result<usize, i32> {
    planned.clear();
    for (index, place) in blocks[..count].iter_mut().enumerate() {
        let runs = peek::<usize>(list + index * 8).ok_or(libc::EFAULT).and_then(|address| {
            *place = address;
            pages_of_block(runtime, address)
        });
        match runs.map(|runs| PinReservation::reserve(runtime, runs)) {
            Ok(Some(reservation)) => planned.push(PlannedBlock { block: *place as u64, reservation }),
            Err(errno) if index == 0 => return Err(errno),
            Ok(None) | Err(_) => return Ok(index),
        }
    }
    Ok(count)
}

/// Returns the pages that the kernel touches for one block. Fails with ENOMEM if they are more than
/// may ever be pinned, because programs take a short transfer for the end of the file.
fn pages_of_block(runtime: &Runtime, address: usize) -> Result<Vec<PinnedRun>, i32> {
    let block = Block(peek(address).ok_or(libc::EFAULT)?);
    let bytes = match block.part() {
        OperandMemory::Bytes(start, len) if window::contains(start as usize) => len,
        OperandMemory::Vector(start, count) => (0..count.min(1024))
            .map_while(|index| peek::<libc::iovec>(start as usize + index as usize * size_of::<libc::iovec>()))
            .fold(0, |sum: u64, part| sum.saturating_add(part.iov_len as u64)),
        _ => 0,
    };
    if bytes > async_io::operation_bytes_max(runtime) as u64 {
        return Err(libc::ENOMEM);
    }
    let mut runs: Vec<PinnedRun> = Vec::new();
    let mut collector = BufferCollector::new(runtime, &mut runs);
    collector.part(OperandMemory::Bytes(address as u64, Block::BYTES));
    collector.part(block.part());
    Ok(runs)
}

/// Serves `io_destroy`, which waits for all that is in flight.
pub fn destroy(args: [usize; 6]) -> CallOutcome {
    // The entry leaves the registry first: once the context is gone, another thread may get one of
    // the same name.
    let entry = {
        let mut registry = ASYNC_IO_REGISTRY.lock();
        let at = registry.contexts.iter().position(|entry| entry.context == args[0]);
        at.map(|at| registry.contexts.swap_remove(at))
    };
    // SAFETY: the program's own call.
    let result = unsafe { forward(libc::SYS_io_destroy as usize, args) };
    if result < 0 {
        ASYNC_IO_REGISTRY.lock().contexts.extend(entry);
    }
    CallOutcome::Done(result)
}
