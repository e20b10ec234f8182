//! The control block: shared memory between the runner and every process of a job.
//!
//! The runner creates it as a memfd and passes its path (`/proc/PID/fd/N`) in [`ENV_CONTROL`]; each process of the job maps
//! it and takes one [`Slot`]. All fields are atomics: another process may write them at any time. The near
//! budget of the whole process tree is [`Control::near_bytes`] against [`Control::near_limit_bytes`].

use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

/// Path of the control block, for processes of the job.
pub const ENV_CONTROL: &str = "FARFIELD_CONTROL";
/// First bytes of a control block.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FARFIEL1");
/// Most processes alive at once in one job.
pub const SLOTS: usize = 1024;
/// Most bytes of pool URLs, and of the token.
pub const TEXT_BYTES: usize = 4096;

/// How page faults are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Mode {
    /// Signal mode where possible, else handler threads.
    Auto = 0,
    /// In the faulting thread.
    Signal = 1,
    /// By handler threads.
    Thread = 2,
}

/// Exit codes of `farfield run` that are ours and not the program's. Chosen outside of what shells and `sysexits`
/// use.
pub mod exit {
    /// The memory server was lost while the program still needed it.
    pub const SERVER_LOST: i32 = 93;
    /// The pool is full.
    pub const POOL_FULL: i32 = 94;
    /// A page came back with the wrong bytes.
    pub const CORRUPT: i32 = 95;
    /// Another fault of our own inside the program.
    pub const INTERNAL: i32 = 96;
    /// The command could not be run with far memory (static, setuid, unsupported kernel …); it was not started.
    pub const REFUSED: i32 = 97;
}

/// Shared state of a job.
#[repr(C, align(4096))]
pub struct Control {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Near budget of the process tree, bytes. May change while the job runs.
    pub near_limit_bytes: AtomicU64,
    /// Near bytes in use now: sum over slots of near and metadata bytes.
    pub near_bytes: AtomicI64,
    /// Largest value of `near_bytes` seen.
    pub near_peak_bytes: AtomicU64,
    /// Far bytes in use now.
    pub far_bytes: AtomicI64,
    /// Largest value of `far_bytes` seen.
    pub far_peak_bytes: AtomicU64,
    /// Mode asked for ([`Mode`] as number).
    pub mode: AtomicU32,
    /// Processes that ever took a slot.
    pub processes: AtomicU32,
    /// Exit code from [`exit`] if a process had to stop because of us, with the reason in `reason`.
    pub failure: AtomicU32,
    /// Length of `reason` in bytes.
    pub reason_len: AtomicU32,
    /// Why, UTF-8.
    pub reason: [AtomicU64; 64],
    /// Lengths of the texts below.
    pub urls_len: AtomicU32,
    /// Length of `token`.
    pub token_len: AtomicU32,
    /// Pool URLs with numeric addresses, separated by newlines.
    pub urls: [AtomicU64; TEXT_BYTES / 8],
    /// Token for the servers, empty if none.
    pub token: [AtomicU64; TEXT_BYTES / 8],
    /// Counters of processes that have ended, added up by the runner.
    pub past: Counters,
    /// One per living process.
    pub slots: [Slot; SLOTS],
}

/// A living process of the job.
#[repr(C, align(128))]
pub struct Slot {
    /// Process id; 0 = free.
    pub pid: AtomicU32,
    /// 0 dormant (below the budget, kernel serves faults), 1 armed in signal mode, 2 armed in thread mode.
    pub state: AtomicU32,
    /// Bytes of far-capable memory that are near.
    pub near_bytes: AtomicI64,
    /// Bytes of our own tables and buffers.
    pub meta_bytes: AtomicI64,
    /// Bytes far.
    pub far_bytes: AtomicI64,
    /// What happened.
    pub counters: Counters,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Event counts of one process, or of all that have ended.
        #[repr(C)]
        pub struct Counters {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// Histogram of fault service times; see [`bucket_of`].
            pub fault_ns: [AtomicU64; BUCKETS],
        }
        impl Counters {
            /// Adds the counts of `other`.
            pub fn add(&self, other: &Counters) {
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
    /// Of these, first touches (nothing to read).
    first_touches,
    /// Of these, demand reads from the pool.
    demand_reads,
    /// Pages that came near, demand and prefetch.
    pages_in,
    /// Pages written to the pool.
    pages_out,
    /// Pages that left without being written, because their far copy was still right.
    clean_drops,
    /// Pages that left without being written, because they were all zeros.
    zero_pages,
    /// Pages read ahead of need.
    prefetched,
    /// Of these, pages that were used.
    prefetch_hits,
    /// System calls whose buffers we brought near and held.
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
}

/// Buckets of a latency histogram: 8 per power of two.
pub const BUCKETS: usize = 320;

/// Bucket of a duration in nanoseconds: exact below 8, then 8 per power of two (at most 12.5 % off).
pub fn bucket_of(ns: u64) -> usize {
    if ns < 8 {
        return ns as usize;
    }
    let exponent = 63 - ns.leading_zeros() as usize;
    let index = (exponent - 2) * 8 + ((ns >> (exponent - 3)) as usize & 7);
    index.min(BUCKETS - 1)
}

/// Smallest duration, in nanoseconds, that falls into `bucket`.
pub fn bucket_floor(bucket: usize) -> u64 {
    if bucket < 8 {
        return bucket as u64;
    }
    let exponent = bucket / 8 + 2;
    (8 + (bucket as u64 & 7)) << (exponent - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

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
