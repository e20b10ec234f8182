//! The control block: shared memory that every process of a job writes, and the runner.
//!
//! The block holds accounts: what is near and far, what happened, what failed. All fields are
//! atomics, because another process may write them at any time. A process that has become another
//! user is believed no more than a stranger. So every reader bounds the numbers that it reads, and
//! nothing that is decided for the whole job is here: that is in [`crate::config`]. Each process of
//! the job takes one [`ProcessSlot`]. The near budget is [`JobAccounts::near_bytes`] against
//! [`crate::config::JobConfig::near_limit_bytes`]. `docs/design/trust.md` says what a lie in each
//! field can do.

use crate::config::SharedText;
use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use farfield_pool::{Protection, ScrubStats};

/// Maximum number of processes alive at once in one job.
pub const SLOTS: usize = 1024;
/// Largest magnitude of a byte count that is believed, positive or negative. Sums of a few such
/// numbers do not overflow.
pub const BYTES_MAX: i64 = 1 << 60;
/// Largest number of pages, or of events that concern pages, that is believed. As bytes, and summed
/// over all slots, it does not overflow.
pub const PAGES_MAX: u64 = 1 << 40;

/// Way in which page faults are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum FaultMode {
    /// Signal mode where possible, else handler threads.
    Auto = 0,
    /// Faults are served in the faulting thread.
    Signal = 1,
    /// Faults are served by handler threads.
    Thread = 2,
}

/// Exit codes of `farfield run` that are ours and not the program's, outside of the codes that
/// shells and `sysexits` use.
pub mod exit {
    /// The memory server was lost while the program still needed it.
    pub const SERVER_LOST: i32 = 93;
    /// The pool is full.
    pub const POOL_FULL: i32 = 94;
    /// A page came back with the wrong bytes.
    pub const CORRUPT: i32 = 95;
    /// The library failed inside the program for another reason.
    pub const INTERNAL: i32 = 96;
    /// The command could not be run with far memory (static, setuid, unsupported kernel …); it was
    /// not started.
    pub const REFUSED: i32 = 97;

    /// Returns `code` if it is one of these, else [`INTERNAL`].
    pub(super) fn known(code: i32) -> i32 {
        if (SERVER_LOST..=REFUSED).contains(&code) { code } else { INTERNAL }
    }
}

/// Accounts of a job.
#[repr(C, align(4096))]
pub struct JobAccounts {
    /// Part of `near_bytes` that is our own tables and buffers, which cannot leave.
    pub meta_bytes: AtomicI64,
    /// Near bytes in use now: sum over slots of near and metadata bytes.
    pub near_bytes: AtomicI64,
    /// Largest value of `near_bytes` seen.
    pub near_peak_bytes: AtomicU64,
    /// Far bytes in use now.
    pub far_bytes: AtomicI64,
    /// Largest value of `far_bytes` seen.
    pub far_peak_bytes: AtomicU64,
    /// Processes that ever took a slot.
    pub processes: AtomicU32,
    /// Exit code from [`exit`] if a process had to stop because of us, with the reason in `reason`.
    pub failure: AtomicU32,
    /// Reason of the failure, UTF-8.
    pub reason: SharedText<64>,
    /// Counters of processes that have ended, added up by the runner.
    pub past: PagingCounters,
    /// Slots of the living processes, one each.
    pub slots: [ProcessSlot; SLOTS],
}

/// Returns a number of bytes that another process may have written, clamped to ±[`BYTES_MAX`].
pub fn believed(bytes: &AtomicI64) -> i64 {
    bytes.load(Ordering::Relaxed).clamp(-BYTES_MAX, BYTES_MAX)
}

/// Returns a count of pages, or of events that concern pages, that another process may have
/// written, clamped to [`PAGES_MAX`].
pub fn believed_pages(pages: &AtomicU64) -> u64 {
    pages.load(Ordering::Relaxed).min(PAGES_MAX)
}

/// A living process of the job.
#[repr(C, align(128))]
pub struct ProcessSlot {
    /// Process id, in the pid namespace of the process; 0 = free.
    pub pid: AtomicU32,
    /// Process id as the runner sees it; 0 until the runner has looked.
    pub outer_pid: AtomicU32,
    /// [`farfield_os::process::identity`] of the process; 0 while it takes the slot.
    pub identity: AtomicU64,
    /// 0 dormant (below the budget, kernel serves faults), 1 armed in signal mode, 2 armed in
    /// thread mode.
    pub state: AtomicU32,
    /// Bytes of far-capable memory that are near.
    pub near_bytes: AtomicI64,
    /// Bytes of our own tables and buffers.
    pub meta_bytes: AtomicI64,
    /// Bytes of far memory.
    pub far_bytes: AtomicI64,
    /// Number of the pool that the process has ([`crate::config::JobConfig::pool_epoch`]), if it is
    /// armed.
    pub pool_epoch: AtomicU32,
    /// Number of the last pool to which the process could not move; 0: none.
    pub pool_failed: AtomicU32,
    /// Reason why the process could not move there.
    pub pool_failure: SharedText<64>,
    /// Pages that the process has or had far, while it moves to another pool.
    pub pool_pages: AtomicU64,
    /// Pages out of `pool_pages` that were moved already.
    pub pool_moved_pages: AtomicU64,
    /// 1 while a part of the process's pool does not answer, or lacks something.
    pub pool_degraded: AtomicU32,
    /// 1 if the process's pool has a scrub; `pool_scrubbed` is valid then.
    pub pool_scrub: AtomicU32,
    /// [`farfield_pool::ScrubStats`], field by field.
    pub pool_scrubbed: [AtomicU64; 5],
    /// 1 if the process's pool protects what it holds; `pool_protection` is valid then.
    pub pool_protects: AtomicU32,
    /// [`farfield_pool::Protection`], field by field.
    pub pool_protection: [AtomicU64; 4],
    /// Events that were counted in the process.
    pub counters: PagingCounters,
}

impl ProcessSlot {
    /// Returns the pid of this slot's process as the runner sees it; 0 if the slot is free. Before
    /// the runner has looked, it is the pid as the process sees itself.
    pub fn process(&self) -> u32 {
        let pid = self.pid.load(Ordering::Acquire);
        match self.outer_pid.load(Ordering::Acquire) {
            outer if outer != 0 && pid != 0 => outer,
            _ => pid,
        }
    }

    /// Notes that the process could not move to the pool with number `epoch`, and why. The runner
    /// polls this.
    pub fn fail_pool(&self, epoch: u32, why: &[u8]) {
        self.pool_failure.write(why);
        self.pool_failed.store(epoch, Ordering::Release);
    }

    /// Notes what the scrub of the process's pool has done.
    pub fn set_scrubbed(&self, scrubbed: Option<ScrubStats>) {
        if let Some(ScrubStats { looked_pages, wrong_pages, mended_pages, turns, turn_ended_at_ns }) = scrubbed {
            let counts = [looked_pages, wrong_pages, mended_pages, turns, turn_ended_at_ns];
            self.pool_scrubbed.iter().zip(counts).for_each(|(at, count)| at.store(count, Ordering::Relaxed));
        }
        self.pool_scrub.store(scrubbed.is_some().into(), Ordering::Release);
    }

    /// Notes how well the process's pool protects what it holds.
    pub fn set_protection(&self, protection: Option<Protection>) {
        if let Some(Protection { missing_legs, shared_legs, exposed_pages, restored_pages }) = protection {
            let counts = [missing_legs, shared_legs, exposed_pages, restored_pages];
            self.pool_protection.iter().zip(counts).for_each(|(at, count)| at.store(count, Ordering::Relaxed));
        }
        self.pool_protects.store(protection.is_some().into(), Ordering::Release);
    }

    /// Returns what [`ProcessSlot::set_protection`] noted, within [`PAGES_MAX`]; `None` if the pool
    /// protects nothing.
    pub fn protection(&self) -> Option<Protection> {
        let is_known = self.pool_protects.load(Ordering::Acquire) != 0;
        let [missing_legs, shared_legs, exposed_pages, restored_pages] =
            self.pool_protection.each_ref().map(believed_pages);
        is_known.then_some(Protection { missing_legs, shared_legs, exposed_pages, restored_pages })
    }

    /// Returns what [`ProcessSlot::set_scrubbed`] noted, with counts within [`PAGES_MAX`]; `None`
    /// if the pool has no scrub.
    pub fn scrubbed(&self) -> Option<ScrubStats> {
        let is_known = self.pool_scrub.load(Ordering::Acquire) != 0;
        let [looked, wrong, mended, turns, turn_ended_at] = &self.pool_scrubbed;
        let [looked_pages, wrong_pages, mended_pages, turns] = [looked, wrong, mended, turns].map(believed_pages);
        let turn_ended_at_ns = turn_ended_at.load(Ordering::Relaxed);
        is_known.then_some(ScrubStats { looked_pages, wrong_pages, mended_pages, turns, turn_ended_at_ns })
    }
}

impl JobAccounts {
    /// Takes the first free slot for process `pid`.
    ///
    /// If the process has a slot already (it has called `exec`), that slot is taken again: the old
    /// image is gone, so its bytes leave the totals, while its counts go on. Returns `None` if all
    /// slots are taken; the runner frees slots of dead processes within a tenth of a second.
    /// Processes of several pid namespaces can have one pid: `identity`
    /// ([`farfield_os::process::identity`]) tells them apart.
    pub fn take_slot(&self, pid: u32, identity: u64) -> Option<&ProcessSlot> {
        assert!(pid != 0 && identity != 0);
        let is_own = |slot: &&ProcessSlot| {
            slot.pid.load(Ordering::Acquire) == pid && slot.identity.load(Ordering::Acquire) == identity
        };
        if let Some(slot) = self.slots.iter().find(is_own) {
            self.forget_bytes(slot);
            return Some(slot);
        }
        let free = |slot: &&ProcessSlot| {
            slot.pid.load(Ordering::Relaxed) == 0
                && slot.pid.compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let slot = self.slots.iter().find(free)?;
        slot.identity.store(identity, Ordering::Release);
        self.processes.fetch_add(1, Ordering::Relaxed);
        Some(slot)
    }

    /// Gives back the slot of a process that is gone. Its bytes leave the totals, and its counts
    /// move to `past`. Only the runner does this, so a slot is freed once.
    pub fn free_slot(&self, slot: &ProcessSlot) {
        self.forget_bytes(slot);
        self.past.add(&slot.counters);
        slot.counters.clear();
        slot.outer_pid.store(0, Ordering::Relaxed);
        slot.identity.store(0, Ordering::Relaxed);
        slot.pid.store(0, Ordering::Release);
    }

    /// Takes the bytes of a process whose memory is gone, or about to be, out of the totals.
    pub fn forget_bytes(&self, slot: &ProcessSlot) {
        let meta = slot.meta_bytes.swap(0, Ordering::Relaxed);
        let near = slot.near_bytes.swap(0, Ordering::Relaxed).wrapping_add(meta);
        self.meta_bytes.fetch_sub(meta, Ordering::Relaxed);
        self.near_bytes.fetch_sub(near, Ordering::Relaxed);
        self.far_bytes.fetch_sub(slot.far_bytes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        // The next owner of the slot may end before it has looked at its own pool.
        slot.pool_failed.store(0, Ordering::Relaxed);
        slot.pool_degraded.store(0, Ordering::Relaxed);
        slot.pool_scrub.store(0, Ordering::Relaxed);
        slot.pool_protects.store(0, Ordering::Relaxed);
        slot.state.store(0, Ordering::Relaxed);
    }

    /// Notes that a process stops because of us: `code` of [`exit`], and the reason. The first note
    /// stays.
    pub fn fail(&self, code: i32, reason: &[u8]) {
        let code = code as u32;
        if self.failure.compare_exchange(0, code | Self::FAILING, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.reason.write(reason);
            self.failure.store(code, Ordering::Release);
        }
    }

    /// Returns the exit code that [`JobAccounts::fail`] noted, and whether the note is complete.
    /// The note is incomplete while (or because) the process that makes it has not finished
    /// writing.
    pub fn failure(&self) -> Option<(i32, bool)> {
        match self.failure.load(Ordering::Acquire) {
            0 => None,
            word => Some((exit::known((word & !Self::FAILING) as i32), word & Self::FAILING == 0)),
        }
    }

    /// Bit of `failure` while the reason is being written.
    const FAILING: u32 = 1 << 31;
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Event counts of one process, or of all that have ended.
        #[repr(C)]
        pub struct PagingCounters {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// Histogram of fault service times in nanoseconds; [`bucket_of`] gives the bucket.
            pub fault_ns: [AtomicU64; BUCKETS],
        }
        impl PagingCounters {
            pub(crate) const NAMES: &str = concat!($(stringify!($name), ","),*);
            /// Adds the counts of `other`.
            pub fn add(&self, other: &PagingCounters) {
                $(self.$name.fetch_add(other.$name.load(Ordering::Relaxed), Ordering::Relaxed);)*
                for (mine, theirs) in self.fault_ns.iter().zip(&other.fault_ns) {
                    mine.fetch_add(theirs.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            /// Sets all counts to zero.
            pub fn clear(&self) {
                $(self.$name.store(0, Ordering::Relaxed);)*
                for bucket in &self.fault_ns { bucket.store(0, Ordering::Relaxed); }
            }
            /// Names and values, for reports.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)*]
            }
        }
    };
}

counters! {
    /// Page faults that we served.
    faults,
    /// Faults that were first touches, with nothing to read.
    first_touches,
    /// Faults that read their page from the pool.
    demand_reads,
    /// Pages that came near, on demand or by prefetch.
    pages_in,
    /// Pages written to the pool.
    pages_out,
    /// Pages that left without being written, because their far copy was still right.
    clean_drops,
    /// Pages that left without being written, because they were all zeros.
    zero_pages,
    /// Pages read ahead of need.
    prefetched,
    /// Prefetched pages that were used.
    prefetch_hits,
    /// System calls whose buffers we brought near and pinned.
    syscalls_guarded,
    /// Memory system calls that we served ourselves (`mmap`, `brk`, …).
    syscalls_emulated,
    /// Pages evicted by the thread that needed room.
    direct_reclaims,
    /// Pages evicted ahead of need by the reclaim thread.
    background_reclaims,
    /// Nanoseconds spent evicting.
    reclaim_ns,
    /// Pages that came back soon after they had left.
    refaults,
    /// System calls of our own that came to our own handler, because they did not go through the
    /// gate.
    own_calls_trapped,
}

/// Buckets of a latency histogram: 8 per power of two.
pub const BUCKETS: usize = 320;

/// Returns the bucket of a duration in nanoseconds: exact below 8 ns, then 8 per power of two (at
/// most 12.5 % off).
pub fn bucket_of(ns: u64) -> usize {
    if ns < 8 {
        return ns as usize;
    }
    let exponent = 63 - ns.leading_zeros() as usize;
    let index = (exponent - 2) * 8 + ((ns >> (exponent - 3)) as usize & 7);
    index.min(BUCKETS - 1)
}

/// Returns the smallest duration, in nanoseconds, that falls into `bucket`.
pub fn bucket_floor(bucket: usize) -> u64 {
    if bucket < 8 {
        return bucket as u64;
    }
    let exponent = bucket / 8 + 2;
    (8 + (bucket as u64 & 7)) << (exponent - 3)
}

/// Returns the duration, in nanoseconds, that `numerator / denominator` of the events did not
/// exceed; `None` without events. Accurate to one bucket (12.5 %).
pub fn quantile_ns(counts: &[u64; BUCKETS], numerator: u64, denominator: u64) -> Option<u64> {
    let total: u128 = counts.iter().map(|&count| u128::from(count)).sum();
    // The rank is rounded up, so that of one event every quantile is that event.
    let rank = (total * u128::from(numerator)).div_ceil(u128::from(denominator)).max(1);
    let mut seen = 0;
    let found = counts.iter().position(|&count| {
        seen += u128::from(count);
        seen >= rank
    })?;
    let (floor, next) = (bucket_floor(found), bucket_floor(found + 1));
    Some(floor + (next - floor) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control() -> Box<JobAccounts> {
        // SAFETY: every field is an atomic integer, for which all zeros is a value; the layout is
        // that of `JobAccounts`.
        unsafe { Box::from_raw(std::alloc::alloc_zeroed(std::alloc::Layout::new::<JobAccounts>()).cast()) }
    }

    #[test]
    fn a_dead_process_leaves_its_counts_and_takes_its_bytes() {
        let control = control();
        let slot = control.take_slot(7, 1007).unwrap();
        slot.near_bytes.store(100, Ordering::Relaxed);
        slot.meta_bytes.store(10, Ordering::Relaxed);
        slot.far_bytes.store(50, Ordering::Relaxed);
        control.near_bytes.store(1110, Ordering::Relaxed);
        control.far_bytes.store(60, Ordering::Relaxed);
        slot.counters.faults.store(3, Ordering::Relaxed);
        slot.counters.fault_ns[5].store(3, Ordering::Relaxed);
        control.free_slot(slot);
        assert_eq!(control.near_bytes.load(Ordering::Relaxed), 1000);
        assert_eq!(control.far_bytes.load(Ordering::Relaxed), 10);
        assert_eq!(control.past.faults.load(Ordering::Relaxed), 3);
        assert_eq!(control.past.fault_ns[5].load(Ordering::Relaxed), 3);
        let again = control.take_slot(8, 1008).unwrap();
        assert!(core::ptr::eq(slot, again), "the first free slot is taken");
        assert_eq!(again.counters.faults.load(Ordering::Relaxed), 0);
        assert_eq!(control.processes.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn exec_keeps_the_slot_and_its_counts() {
        let control = control();
        let slot = control.take_slot(7, 1007).unwrap();
        slot.near_bytes.store(100, Ordering::Relaxed);
        control.near_bytes.store(100, Ordering::Relaxed);
        slot.counters.faults.store(3, Ordering::Relaxed);
        let again = control.take_slot(7, 1007).unwrap();
        assert!(core::ptr::eq(slot, again));
        assert_eq!(control.near_bytes.load(Ordering::Relaxed), 0);
        assert_eq!(again.counters.faults.load(Ordering::Relaxed), 3);
        assert_eq!(control.processes.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn processes_of_two_namespaces_with_one_pid_have_a_slot_each() {
        let control = control();
        let init = control.take_slot(1, 301).unwrap();
        init.near_bytes.store(100, Ordering::Relaxed);
        let other = control.take_slot(1, 302).unwrap();
        assert!(!core::ptr::eq(init, other));
        assert_eq!(init.near_bytes.load(Ordering::Relaxed), 100);
        init.outer_pid.store(4711, Ordering::Relaxed);
        assert_eq!((init.process(), other.process()), (4711, 1));
        control.free_slot(init);
        assert_eq!(init.process(), 0);
        assert!(core::ptr::eq(init, control.take_slot(1, 303).unwrap()));
        assert_eq!(init.process(), 1, "the one before had another number outside");
    }

    #[test]
    fn a_process_that_has_looked_at_nothing_yet_does_not_say_what_the_one_before_saw() {
        let control = control();
        let slot = control.take_slot(7, 1007).unwrap();
        slot.pool_degraded.store(1, Ordering::Relaxed);
        control.free_slot(slot);
        let next = control.take_slot(8, 1008).unwrap();
        assert!(core::ptr::eq(slot, next));
        assert_eq!(next.pool_degraded.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn slots_run_out_without_harm() {
        let control = control();
        for pid in 1..=SLOTS as u32 {
            assert!(control.take_slot(pid, u64::from(pid) + 1000).is_some());
        }
        assert!(control.take_slot(SLOTS as u32 + 1, 1).is_none());
        assert!(control.take_slot(5, 1005).is_some(), "its own");
    }

    #[test]
    fn the_first_failure_stays() {
        let control = control();
        assert_eq!(control.failure(), None);
        control.fail(exit::SERVER_LOST, b"server 0 is gone");
        control.fail(exit::CORRUPT, &[b'x'; 5000]);
        assert_eq!(control.failure(), Some((exit::SERVER_LOST, true)));
        assert_eq!(control.reason.line(), "server 0 is gone");
    }

    #[test]
    fn a_process_cannot_make_the_job_end_with_any_code() {
        let control = control();
        for (noted, said) in [(0x7fff_ffff, exit::INTERNAL), (1, exit::INTERNAL), (93, exit::SERVER_LOST)] {
            control.failure.store(noted, Ordering::Relaxed);
            assert_eq!(control.failure(), Some((said, true)));
        }
    }

    #[test]
    fn quantiles_are_within_a_bucket() {
        let mut counts = [0; BUCKETS];
        assert_eq!(quantile_ns(&counts, 1, 2), None);
        for ns in 1..=1000 {
            counts[bucket_of(ns)] += 1;
        }
        for (percent, expected) in [(50, 500.0), (99, 990.0), (100, 1000.0)] {
            let found = quantile_ns(&counts, percent, 100).unwrap() as f64;
            assert!((found / expected - 1.0).abs() < 0.13, "{percent}: {found}");
        }
        counts = [u64::MAX; BUCKETS];
        assert!(quantile_ns(&counts, 99, 100).is_some());
    }

    #[test]
    fn buckets_are_monotonic_and_invert() {
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(bucket_floor(bucket)), bucket);
            if bucket > 0 {
                assert_eq!(bucket_of(bucket_floor(bucket) - 1), bucket - 1);
            }
        }
    }
}
