//! `fork`: the child sees the parent's memory, near and far, and both go on independently.
//!
//! The system call itself comes to us, so nothing of the program or the C library runs in the child
//! before its memory is served again. While the world is frozen the pool makes a copy-on-write
//! snapshot of the region; the kernel does the same for what is near. Before that, enough leaves
//! the parent's near memory that both fit the budget.

use super::call::{CallOutcome, Context, done};
use super::runtime::{Phase, RUNTIME, Runtime, fail};
use super::store::{self, Store};
use super::switching::InheritedSnapshot;
use super::{arm, arrays, async_io, emulate, evict, fault, heap, sync, thread};
use crate::control::{believed, exit};
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::page_word::State;
use farfield_os::{gate, process};
use farfield_pool::PoolError;

/// Makes the call `clone(args)` without `CLONE_VM`.
pub fn fork(context: &Context, mut args: [usize; 6]) -> CallOutcome {
    // The child first goes on in this handler, on the handler's stack. If the program wants it to
    // have another one, it begins there afterwards.
    let stack = core::mem::take(&mut args[1]);
    let outcome = fork_here(context, args);
    if outcome == CallOutcome::Done(0) && stack != 0 {
        context.set_sp(stack);
    }
    outcome
}

fn fork_here(context: &Context, args: [usize; 6]) -> CallOutcome {
    let runtime = &RUNTIME;
    // This comes first: a signal may have come to a thread that has it, whose handler waits as long
    // as the world is frozen.
    let _arrays = arrays::lock();
    let near = believed(&runtime.slot().near_bytes);
    if fault::settled_phase(runtime) == Phase::Dormant && arm::is_close(runtime, near) {
        arm::arm(runtime, None);
    }
    if fault::settled_phase(runtime) == Phase::Armed {
        fork_armed(runtime, context, args)
    } else {
        fork_dormant(runtime, context, args)
    }
}

fn fork_dormant(runtime: &Runtime, context: &Context, args: [usize; 6]) -> CallOutcome {
    let end = runtime.break_end.lock();
    let space = runtime.space.lock();
    // Nobody arms while the space is held; but another thread may have armed before.
    if runtime.phase() != Phase::Dormant {
        drop((space, end));
        return fork_armed(runtime, context, args);
    }
    let actions = (runtime.wiped.lock(), runtime.program_actions.lock(), async_io::ASYNC_IO_REGISTRY.lock());
    let heap = heap::lock();
    let inherited = Inheritance::take(runtime);
    let me = thread::current();
    // SAFETY: the program's own call; the child continues in this handler on its own copy of
    // everything.
    let result = unsafe { gate::syscall(libc::SYS_clone, args) };
    drop((heap, actions, space, end));
    if result.is_err() {
        inherited.give_back(runtime);
    }
    if result == Ok(0) {
        let watched = runtime.monitor.load(Ordering::Relaxed) != 0;
        become_child(runtime, me, inherited);
        if watched {
            arm::start_monitor(runtime);
        }
    }
    done(result)
}

fn fork_armed(runtime: &Runtime, context: &Context, args: [usize; 6]) -> CallOutcome {
    evict::make_room_for_copy(runtime, context);
    // This comes before everything else that a thread that moves to another pool might need.
    let still = runtime.armed().store.backend().hold_still();
    // This comes before freezing: the holder of the space may wait for the world to thaw.
    let end = runtime.break_end.lock();
    let space = runtime.space.lock();
    let registry = async_io::ASYNC_IO_REGISTRY.lock();
    let mut wait = sync::Wait::new("threads that are inside a fault, so that the process can fork");
    let me = sync::tid() as u32;
    while runtime.frozen_by.compare_exchange(0, me, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        wait.pause();
    }
    while runtime.busy.load(Ordering::SeqCst) != 0 {
        runtime.armed().store.progress();
        wait.pause();
    }
    // No thread of this process takes more now; what was taken since the room was made leaves
    // again.
    let armed = runtime.armed();
    evict::make_room_for_copy_frozen(runtime, context);
    let evictor = armed.evictor.lock();
    let snapshot = arm::with_descriptors(|| take_snapshot(&armed.store));
    let actions = (runtime.wiped.lock(), runtime.program_actions.lock());
    let queue = runtime.queue.lock();
    let heap = heap::lock();
    let me = thread::current();
    let inherited = Inheritance::take(runtime);
    // The monitor may be asking the pool for its state: the child would wait for that for ever.
    let lanes = armed.store.backend().hold_lanes();
    // SAFETY: as in `fork_dormant`.
    let result = unsafe { gate::syscall(libc::SYS_clone, args) };
    drop((lanes, heap, actions));
    match result {
        Ok(child) => mark_shared(runtime, &queue, child == 0),
        Err(_) => inherited.give_back(runtime),
    }
    if result != Ok(0) {
        snapshot.ticket.forget();
    }
    drop((queue, evictor, registry, space, end, still));
    if result == Ok(0) {
        // SAFETY: no other thread runs in the child, and nothing of this one refers to what is
        // dropped.
        unsafe { runtime.drop_inherited() };
        become_child(runtime, me, inherited);
        runtime.charge_far(inherited.far_bytes / PAGE_BYTES as i64);
        let back = runtime.advance(Phase::Armed, Phase::Dormant);
        assert!(back);
        arm::arm(runtime, Some(snapshot));
    }
    runtime.frozen_by.store(0, Ordering::SeqCst);
    if result == Ok(0) {
        // The kernel has wiped what was near; what was far comes from the snapshot.
        let wiped = runtime.wiped.lock().clone();
        for range in wiped {
            emulate::discard(runtime, range, true);
        }
    }
    done(result)
}

/// Takes a snapshot of the pool. If too much of the pool is silent, it is given time: as much as
/// for any other operation.
fn take_snapshot(store: &Store) -> InheritedSnapshot {
    let mut lanes = store.quiesce();
    let until = process::now_ns() + store::DEADLINE.as_nanos() as u64;
    loop {
        match InheritedSnapshot::of(store) {
            Ok(snapshot) => return snapshot,
            Err(PoolError::TimedOut { .. }) if process::now_ns() < until => lanes.take_answers(),
            Err(error) => store::fail_pool_lost(error),
        }
    }
}

/// Accounts that a child gets, known before it exists: afterwards its parent's accounts change
/// without it.
#[derive(Clone, Copy)]
struct Inheritance {
    near_bytes: i64,
    far_bytes: i64,
    /// Bytes that the job has been charged for the child.
    reserved_bytes: i64,
}

impl Inheritance {
    /// Charges the job with the child. Nothing may come near or leave until the child exists.
    fn take(runtime: &Runtime) -> Inheritance {
        let slot = runtime.slot();
        let inherited = Inheritance {
            near_bytes: believed(&slot.near_bytes),
            far_bytes: believed(&slot.far_bytes),
            reserved_bytes: runtime.copy_bytes(),
        };
        runtime.reserve(inherited.reserved_bytes);
        inherited
    }

    /// Takes the charge back if there is no child.
    fn give_back(self, runtime: &Runtime) {
        runtime.reserve(-self.reserved_bytes);
    }
}

/// Gives the child a slot of its own in the job.
fn become_child(runtime: &Runtime, me: Option<&thread::ThreadRecord>, inherited: Inheritance) {
    let Some(slot) = runtime.control().take_slot(process::pid() as u32, process::identity()) else {
        fail(exit::INTERNAL, format_args!("more than {} processes in one job", crate::control::SLOTS));
    };
    runtime.set_slot(slot);
    runtime.monitor.store(0, Ordering::Relaxed);
    runtime.maintenance_running.store(0, Ordering::Relaxed);
    runtime.own_threads.store(0, Ordering::SeqCst);
    runtime.busy.store(0, Ordering::SeqCst);
    // SAFETY: no other thread exists.
    unsafe { runtime.vm_sharing.reset_in_child() };
    runtime.threads.reset_in_child(me);
    async_io::reset_in_child();
    runtime.adopt(inherited.near_bytes, inherited.reserved_bytes);
}

/// Marks near pages as shared between parent and child.
fn mark_shared(runtime: &Runtime, queue: &super::queue::PageQueue, in_child: bool) {
    for index in 0..queue.len() {
        let Some(page) = queue.peek(index) else { break };
        runtime.table().update(page, |word| (word.state() == State::Near).then(|| word.forked(in_child)));
    }
}
