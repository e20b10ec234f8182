//! Scenarios: the work of the threads of a model.

use super::*;
use crate::inside::call::CallOutcome;
use crate::inside::direct_calls::{self, Buffers};
use crate::inside::thread::{CallFramePages, PinnedRun, RUNS};
use crate::inside::{forking, remap, syscall_pinning};

/// Scenario: its name, and one schedule of it.
pub type Scenario = (&'static str, fn());

/// All scenarios.
pub const ALL: [Scenario; 10] = [
    ("faults, eviction, discards and holds of the same pages", same_pages),
    ("every fault makes its own room", tight),
    ("threads of ours evict beside a program of one thread", beside_one),
    ("two threads bring pages ahead of need", ahead),
    ("a fork while memory changes", fork),
    ("the pool of a program of one thread is exchanged", switch_of_one),
    ("the pool of a program of two threads is exchanged", switch_of_two),
    ("a fork while the pool is exchanged", switch_and_fork),
    ("memory moves where late faults arrive", moving),
    ("arming while the program runs", arming),
];

type Threads = Vec<Box<dyn FnOnce() + Send>>;

fn thread(body: impl FnOnce() + Send + 'static) -> Box<dyn FnOnce() + Send> {
    Box::new(body)
}

/// Returns a program thread that stores in these pages, one after the other, `rounds` times.
fn writer(number: usize, rounds: u64, pages: core::ops::Range<u64>) -> Box<dyn FnOnce() + Send> {
    thread(move || {
        let mut writer = ModelWriter::new(number);
        for _ in 0..rounds {
            pages.clone().for_each(|index| writer.write(index));
        }
        pages.for_each(|index| writer.check(index));
    })
}

fn same_pages() {
    let threads: Threads = vec![
        writer(0, 3, 0..2),
        writer(1, 2, 0..2),
        thread(|| (0..3).for_each(|_| evict())),
        thread(|| (0..2).for_each(|_| discard(0))),
        thread(|| (0..2).for_each(|_| system_calls(2, 1))),
    ];
    run(ScheduleStart::ARMED, threads);
}

fn tight() {
    let threads: Threads = vec![
        writer(0, 2, 0..3),
        writer(1, 2, 0..3),
        thread(|| discard(1)),
        thread(|| (0..2).for_each(|_| system_calls(2, 2))),
    ];
    run(ScheduleStart::TIGHT, threads);
}

/// Runs the program's thread, which evicts in its own handler, where it may go by the written bits.
/// The maintenance thread and the monitor evict while it runs, and must not.
fn beside_one() {
    let program = || {
        let mut writer = ModelWriter { slowness: 24, ..ModelWriter::new(0) };
        (1..PAGES).for_each(|index| writer.write(index));
        for turn in 0..20 {
            // The program mostly reads: where most pages leave changed, all are expected to be
            // written, and none is ever clean.
            (1..PAGES).for_each(|index| writer.check(index));
            writer.write(0);
            if turn % 4 == 0 {
                evict_directly(Some(&context()));
            }
        }
    };
    let maintenance = || (0..30).for_each(|_| evict_directly(None));
    run(ScheduleStart::ONE, vec![thread(program), thread(maintenance), thread(|| (0..2).for_each(|_| monitor()))]);
}

/// Evicts a batch because a thread waits for the room: one of the program in its handler, or
/// another.
fn evict_directly(context: Option<&Context>) {
    let armed = RUNTIME.armed();
    armed.evictor.lock().run(&RUNTIME, armed, ReclaimMode::Direct(context), EvictionSize::Batch);
}

fn ahead() {
    let threads: Threads = vec![
        thread(|| {
            let mut writer = ModelWriter::new(0);
            for _ in 0..2 {
                (0..PAGES).for_each(|index| writer.write(index));
                evict();
                evict();
            }
        }),
        writer(1, 2, 0..PAGES),
        thread(|| (0..3).for_each(|_| monitor())),
        thread(|| discard(2)),
    ];
    run(ScheduleStart::ARMED, threads);
}

fn fork() {
    let threads: Threads = vec![
        thread(|| {
            let mut writer = ModelWriter::new(0);
            writer.write(0);
            writer.write(1);
            fork_and_check();
            writer.write(0);
            writer.write(1);
        }),
        writer(1, 2, 0..3),
        thread(|| (0..2).for_each(|_| monitor())),
        thread(|| discard(2)),
    ];
    run(ScheduleStart::ARMED, threads);
}

/// Moves the process to another pool as its maintenance thread would. It makes room beside the
/// running program, opens the pool, moves everything and exchanges the two.
fn maintenance() {
    // The runner decides this; only its mapping can be written.
    let config = RUNTIME.config();
    let next = config.pool_epoch.load(Ordering::SeqCst) + 1;
    config.pools[next as usize % 2].write(format!("ram:?size={}G", 1 + next % 2).as_bytes(), b"");
    config.pool_epoch.store(next, Ordering::SeqCst);
    switching::follow(&RUNTIME);
    assert_eq!(RUNTIME.slot().pool_epoch.load(Ordering::SeqCst), next, "the pool was not exchanged");
}

fn switch_of_one() {
    let program = || {
        let mut writer = ModelWriter { slowness: 24, ..ModelWriter::new(0) };
        (1..PAGES).for_each(|index| writer.write(index));
        for _ in 0..8 {
            // The program mostly reads, as in `beside_one`.
            (1..PAGES).for_each(|index| writer.check(index));
            writer.write(0);
        }
    };
    run(
        ScheduleStart { program_threads: 1, ..ScheduleStart::SWITCH },
        vec![thread(program), thread(maintenance), thread(monitor)],
    );
}

fn switch_of_two() {
    let threads: Threads = vec![
        writer(0, 3, 0..3),
        writer(1, 3, 0..3),
        thread(maintenance),
        thread(|| (0..2).for_each(|_| monitor())),
        thread(|| discard(2)),
    ];
    run(ScheduleStart::SWITCH, threads);
}

fn switch_and_fork() {
    let forker = || {
        let mut writer = ModelWriter::new(0);
        (0..2).for_each(|index| writer.write(index));
        fork_and_check();
        (0..2).for_each(|index| writer.write(index));
    };
    run(ScheduleStart::SWITCH_AND_FORK, vec![thread(forker), writer(1, 2, 0..3), thread(maintenance), thread(monitor)]);
}

fn moving() {
    let threads: Threads = vec![
        thread(|| {
            let mut writer = ModelWriter::new(0);
            (0..2).for_each(|index| writer.write(index));
            for (from, to) in [(0, 2), (2, 0), (0, 2)] {
                move_two(from, to);
                (to..to + 2).for_each(|index| writer.check(index));
                writer.write(to);
            }
            // Pages that have moved away read as zeros once there is a mapping again.
            map();
        }),
        // These threads are like a handler thread whose event is older than the move.
        thread(|| [2, 0, 3].map(|index| fault::fault_in(&RUNTIME, page(index), true)).into_iter().for_each(drop)),
        thread(|| [1, 2].map(|index| fault::fault_in(&RUNTIME, page(index), false)).into_iter().for_each(drop)),
        thread(|| (0..3).for_each(|_| evict())),
    ];
    run(ScheduleStart::ARMED, threads);
}

/// Moves two pages, with what writers know of them, to another place.
fn move_two(from: u64, to: u64) {
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    let [old, new] = [from, to].map(|index| window::address_of(page(index)));
    let outcome = remap::remap(&RUNTIME, [old, 2 * PAGE_BYTES, 2 * PAGE_BYTES, flags, new, 0]);
    assert_eq!(outcome, CallOutcome::Done(new as isize));
    for stored in &KNOWN.stored {
        for index in 0..2 {
            let value = stored[(from + index) as usize].swap(0, Ordering::Relaxed);
            stored[(to + index) as usize].store(value, Ordering::Relaxed);
        }
    }
}

fn arming() {
    let threads: Threads = vec![
        writer(0, 2, 0..2),
        thread(|| {
            let mut writer = ModelWriter::new(1);
            writer.write(0);
            arm::arm(&RUNTIME, None);
            writer.write(1);
        }),
        // Nobody has touched the page before the first of them.
        thread(|| (0..2).for_each(|_| system_calls(2, 3))),
        thread(|| {
            arm::arm(&RUNTIME, None);
            monitor();
        }),
        thread(|| discard(0)),
    ];
    run(ScheduleStart::DORMANT, threads);
}

/// Makes two system calls that read and write a page, one of them without a trap if nothing speaks
/// against it.
fn system_calls(number: usize, index: u64) {
    let mut buffers = Buffers::default();
    buffers.add(address(index, number), size_of::<u64>());
    match direct_calls::announce(&buffers) {
        Some(_announced) => use_page(number, index),
        None => system_call(number, index),
    }
    system_call(number, index);
}

/// Makes a guarded system call that reads and writes a page: once its pages are pinned, the kernel
/// never misses one.
fn system_call(number: usize, index: u64) {
    let record = crate::inside::thread::current().expect("a record");
    let frame = record.enter(0x1000 * (number + 1));
    let mut pages = CallFramePages { runs: [PinnedRun { start: PageId(0), count: 0 }; RUNS], len: 0, pinned: false };
    pages.runs[0] = PinnedRun { start: page(index), count: 1 };
    pages.len = 1;
    syscall_pinning::pin_for(&RUNTIME, frame, pages, || RUNTIME.guards());
    use_page(number, index);
    frame.active.store(0, Ordering::Release);
    record.reap();
}

/// Does what the kernel does in a system call whose pages stay near.
fn use_page(number: usize, index: u64) {
    schedule::give_way();
    let mut value = KNOWN.stored[number][index as usize].load(Ordering::Relaxed);
    for _ in 0..2 {
        value += 1;
        let mut encoded = ModelWriter::encode(value);
        // While dormant the kernel itself serves the fault, also in the middle of the call.
        assert!(access(libc::SYS_process_vm_writev, address(index, number), &mut encoded), "EFAULT for a held page");
        KNOWN.stored[number][index as usize].store(value, Ordering::Relaxed);
        schedule::give_way();
        let mut found = 0;
        assert!(access(libc::SYS_process_vm_readv, address(index, number), &mut found), "EFAULT for a held page");
        assert_eq!(found, encoded, "a held page lost a write");
    }
}

/// Forks and checks the child, which must find every word as it was at one moment, and go on
/// independently.
fn fork_and_check() {
    match forking::fork(&context(), [libc::SIGCHLD as usize, 0, 0, 0, 0, 0]) {
        CallOutcome::Done(0) => process::exit_group(child()),
        CallOutcome::Done(child) if child > 0 => {
            let mut status = -1;
            // SAFETY: our child; `status` is writable.
            assert_eq!(unsafe { libc::waitpid(child as i32, &mut status, 0) }, child as i32);
            assert_eq!(status, 0, "the child found something wrong");
            // The runner does this.
            let slots = &RUNTIME.control().slots;
            let left = slots.iter().find(|slot| slot.pid.load(Ordering::Acquire) == child as u32);
            RUNTIME.control().free_slot(left.expect("the child had a slot"));
        }
        other => panic!("fork: {other:?}"),
    }
}

/// Checks the memory as the only thread of the child. Returns its exit code.
fn child() -> i32 {
    let mut code = 0;
    for number in 0..WRITERS {
        for index in 0..PAGES {
            let known = KNOWN.stored[number][index as usize].load(Ordering::Relaxed);
            let mut found = 0;
            insist(libc::SYS_process_vm_readv, address(index, number), &mut found);
            // A store that was under way may be there or not.
            let expected = [known, known + 1].map(ModelWriter::encode);
            let discarded = found == 0 && KNOWN.begun[index as usize].load(Ordering::Relaxed) > 0;
            if !discarded && !expected.contains(&found) {
                eprintln!("child: word {number} of page {index} is {found} instead of {expected:?}");
                code = 1;
            }
        }
    }
    for round in 1..3 {
        // The child's maintenance thread would do this, if its parent had not moved yet.
        switching::follow(&RUNTIME);
        for index in 0..PAGES {
            let mut value = 1000 * round + index;
            insist(libc::SYS_process_vm_writev, address(index, 0), &mut value);
        }
        evict();
        for index in 0..PAGES {
            let mut found = 0;
            insist(libc::SYS_process_vm_readv, address(index, 0), &mut found);
            if found != 1000 * round + index {
                eprintln!("child: page {index} lost a write: {found} in round {round}");
                code = 1;
            }
        }
    }
    code
}
