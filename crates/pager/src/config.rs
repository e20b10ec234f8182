//! The configuration of a job: what the runner decides. Processes of the job read it and can never
//! write it.
//!
//! The runner makes it as a memfd that only its own mapping can write (`F_SEAL_FUTURE_WRITE`) and
//! passes the path (`/proc/PID/fd/N`) in [`ENV_CONTROL`]. The configuration says where the control
//! block is, where far memory is and with which token. The numbers that processes write, which
//! nobody has to believe, are in [`crate::control`]. Requests of people come to the runner through
//! a [`RequestBlock`], which only its own user and root can open.

use crate::control::{JobAccounts, PagingCounters, ProcessSlot};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Environment variable with the path of the configuration, for processes of the job.
pub const ENV_CONTROL: &str = "FARFIELD_CONTROL";
/// Maximum length in bytes of the pool URLs, and of the token.
pub const TEXT_BYTES: usize = 4096;
/// Maximum length in bytes of a job's claim.
pub const CLAIM_BYTES: usize = 4096;
/// First eight bytes of a configuration. They differ for each layout of the three blocks, so that a
/// runner and a library of different builds do not misread each other.
pub const MAGIC: u64 = {
    let sizes = [
        size_of::<JobAccounts>() as u64,
        size_of::<ProcessSlot>() as u64,
        core::mem::offset_of!(JobAccounts, failure) as u64,
        core::mem::offset_of!(JobAccounts, past) as u64,
        size_of::<JobConfig>() as u64,
        core::mem::offset_of!(JobConfig, pool_epoch) as u64,
        core::mem::offset_of!(JobConfig, claim) as u64,
        core::mem::offset_of!(JobConfig, capture) as u64,
        size_of::<RequestBlock>() as u64,
    ];
    let mut hash = u64::from_le_bytes(*b"FARFIELD");
    let mut at = 0;
    while at < sizes.len() {
        hash = (hash ^ sizes[at]).wrapping_mul(FNV_PRIME);
        at += 1;
    }
    at = 0;
    while at < PagingCounters::NAMES.len() {
        hash = (hash ^ PagingCounters::NAMES.as_bytes()[at] as u64).wrapping_mul(FNV_PRIME);
        at += 1;
    }
    hash
};
/// Multiplier of the Fowler-Noll-Vo hash.
const FNV_PRIME: u64 = 0x100_0000_01b3;

/// Which memory of a program becomes far-capable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Capture {
    /// All large private anonymous mappings, and the program break.
    Everything = 0,
    /// Only arrays that the program places far ([`crate::inside::arrays`]). Calls of `mmap` and
    /// `brk` that do not name the window stay the kernel's.
    Arrays = 1,
}

/// Configuration of a job. The runner has it mapped writable, everybody else read-only: a store is
/// SIGSEGV there.
#[repr(C, align(4096))]
pub struct JobConfig {
    /// Equals [`MAGIC`] if the layout is that of this build.
    pub magic: AtomicU64,
    /// Descriptor of the runner that is the control block.
    pub control_fd: AtomicU32,
    /// Descriptor of the runner that is the request block.
    pub requests_fd: AtomicU32,
    /// Effective user of the runner. A server that this user runs is believed, whatever user a
    /// process has become.
    pub runner_uid: AtomicU32,
    /// Mode asked for ([`crate::control::FaultMode`] as number).
    pub mode: AtomicU32,
    /// 1 if memory lies in huge pages until some of it has to leave; 0: only where the program asks
    /// for huge pages.
    pub huge_pages: AtomicU32,
    /// What becomes far-capable ([`Capture`] as number).
    pub capture: AtomicU32,
    /// Near budget of the process tree, in bytes. It may change while the job runs.
    pub near_limit_bytes: AtomicU64,
    /// Most that the budget may be now, in bytes: the budget that the job began with, or the last
    /// offer. [`near_limit_bytes`](JobConfig::near_limit_bytes) is less while the job needs less
    /// (`--auto`).
    pub near_offer_bytes: AtomicU64,
    /// Least that an offer may be, in bytes.
    pub near_least_bytes: AtomicU64,
    /// Process id of the private memory server; 0 if there is none. Its memory is not the job's.
    pub server_pid: AtomicU32,
    /// Process whose far memory this is, if it was not started by its runner (`farfield keep`); else
    /// 0.
    pub kept_pid: AtomicU32,
    /// 1 once the agent of the node has given the job a budget and the program may start.
    pub is_admitted: AtomicU32,
    /// Socket of the agent that decides the budget; empty if there is none.
    pub agent: SharedText<16>,
    /// Claim of the job as JSON ([`JobClaim`](farfield_core::policy::cluster::JobClaim)), for agents that find it.
    pub claim: SharedText<{ CLAIM_BYTES / 8 }>,
    /// Pool that the job began with.
    pub first: PoolText,
    /// Pools between which the job may move by itself (`--auto`), with no token. Each process reads their
    /// certificates when it starts.
    pub places: PoolText,
    /// Number of the pool that the job shall have now: 0 is the one that it began with.
    /// `pools[pool_epoch % 2]` says which that is, and the other entry says which it was before.
    pub pool_epoch: AtomicU32,
    /// Current and previous pool, by the parity of `pool_epoch`.
    pub pools: [PoolText; 2],
    /// Number of times that the job has moved to another pool by itself.
    pub pool_moves: AtomicU32,
    /// Number of the pool to which the job has moved by itself.
    pub pool_cause_epoch: AtomicU32,
    /// Reason why the job moved there.
    pub pool_cause: SharedText<64>,
    /// Reason why the pool of the last switch was given up.
    pub pool_reason: SharedText<64>,
}

/// Where a pool is, and what proves that the job may use it.
#[repr(C)]
pub struct PoolText {
    /// Pool URLs with numeric addresses, separated by newlines.
    urls: SharedText<{ TEXT_BYTES / 8 }>,
    /// Token for the servers, empty if none.
    token: SharedText<{ TEXT_BYTES / 8 }>,
}

impl PoolText {
    /// Stores texts of at most [`TEXT_BYTES`], before other processes are told of them.
    pub fn write(&self, urls: &[u8], token: &[u8]) {
        self.urls.write(urls);
        self.token.write(token);
    }

    /// Returns URLs and token.
    pub fn read(&self) -> (Vec<String>, Vec<u8>) {
        let mut token = [0; TEXT_BYTES];
        let token = self.token.read(&mut token).to_vec();
        (self.with_urls(|urls| urls.map(str::to_owned).collect()), token)
    }

    /// Calls `action` with the URLs, and allocates nothing.
    pub fn with_urls<T>(&self, action: impl FnOnce(core::str::Lines<'_>) -> T) -> T {
        let mut urls = [0; TEXT_BYTES];
        // The bytes were written from text, so they are UTF-8.
        action(core::str::from_utf8(self.urls.read(&mut urls)).unwrap_or_default().lines())
    }
}

impl JobConfig {
    /// Returns the number, URLs and token of the pool that the job shall have.
    pub fn pool(&self) -> (u32, Vec<String>, Vec<u8>) {
        loop {
            let epoch = self.pool_epoch.load(Ordering::SeqCst);
            let (urls, token) = self.pools[epoch as usize % 2].read();
            // A pool is written only while it is not the current one.
            if self.pool_epoch.load(Ordering::SeqCst) == epoch {
                return (epoch, urls, token);
            }
        }
    }

    /// Returns which memory becomes far-capable.
    pub fn capture(&self) -> Capture {
        match self.capture.load(Ordering::Relaxed) {
            1 => Capture::Arrays,
            _ => Capture::Everything,
        }
    }

    /// Returns the near budget in bytes, clamped so that sums of a few such numbers do not
    /// overflow.
    pub fn near_limit(&self) -> i64 {
        self.near_limit_bytes.load(Ordering::Relaxed).min(crate::control::BYTES_MAX as u64) as i64
    }
}

/// Request to the runner, and its answer. The asking process meanwhile holds a lock on the file
/// (`flock`).
#[repr(C, align(4096))]
pub struct RequestBlock {
    /// Number of the last request. The request is complete once its number is here.
    pub asked: AtomicU32,
    /// Number of the last request that was answered.
    pub answered: AtomicU32,
    /// [`RunnerRequest`] as a number.
    pub kind: AtomicU32,
    /// Pool to move to, for [`RunnerRequest::Switch`].
    pub pool: PoolText,
    /// Answer: the number of the pool that the job shall have now.
    pub pool_epoch: AtomicU32,
    /// Answer: why nothing was done; empty if the request was carried out.
    pub refusal: SharedText<64>,
    /// Most near memory that the job may have, in bytes, as it was last offered from outside; 0: no
    /// offer was made. It is a state and not a request: the last store counts, and nobody waits for
    /// an answer.
    pub near_offer_bytes: AtomicU64,
}

/// Kind of request to a runner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum RunnerRequest {
    /// Move the job to another pool.
    Switch = 1,
    /// Move the job to the pool that it began with.
    SwitchToFirst = 2,
    /// Move the job back to the pool before, if it is still on the way.
    Cancel = 3,
}

impl RunnerRequest {
    /// Returns the request with that number.
    pub fn of(number: u32) -> Option<RunnerRequest> {
        [RunnerRequest::Switch, RunnerRequest::SwitchToFirst, RunnerRequest::Cancel]
            .into_iter()
            .find(|kind| *kind as u32 == number)
    }
}

/// Text in memory that other processes may be reading or writing at the same time.
#[repr(C)]
pub struct SharedText<const WORDS: usize> {
    len: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> SharedText<WORDS> {
    /// Stores as much of `text` as fits, and then its length.
    pub fn write(&self, text: &[u8]) {
        let text = &text[..text.len().min(WORDS * 8)];
        for (word, chunk) in self.words.iter().zip(text.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        self.len.store(text.len() as u32, Ordering::Release);
    }

    /// Copies the text into `into` and returns the part that was filled. Never trusts the stored
    /// length.
    pub fn read<'a>(&self, into: &'a mut [u8]) -> &'a [u8] {
        let len = (self.len.load(Ordering::Acquire) as usize).min(WORDS * 8).min(into.len());
        for (chunk, word) in into[..len].chunks_mut(8).zip(&self.words) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes()[..chunk.len()]);
        }
        &into[..len]
    }

    /// Returns the text as one line without control characters, so that it cannot confuse a
    /// terminal, no matter which process has written it.
    pub fn line(&self) -> String {
        let mut bytes = vec![0; WORDS * 8];
        let text = String::from_utf8_lossy(self.read(&mut bytes));
        text.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_survive_and_lengths_are_not_trusted() {
        let text = SharedText::<512> { len: AtomicU32::new(0), words: [const { AtomicU64::new(0) }; 512] };
        let mut buffer = [0; TEXT_BYTES];
        for len in [0, 1, 7, 8, 9, TEXT_BYTES] {
            let bytes: Vec<u8> = (0..len).map(|index| index as u8).collect();
            text.write(&bytes);
            assert_eq!(text.read(&mut buffer), bytes);
        }
        text.write(&[b'x'; TEXT_BYTES + 1]);
        assert_eq!(text.read(&mut buffer).len(), TEXT_BYTES, "what there is room for");
        text.len.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(text.read(&mut buffer).len(), TEXT_BYTES);
        assert_eq!(text.read(&mut buffer[..3]).len(), 3);
    }

    #[test]
    fn a_text_of_a_stranger_cannot_write_to_the_terminal() {
        let text = SharedText::<8> { len: AtomicU32::new(0), words: [const { AtomicU64::new(0) }; 8] };
        text.write(b"a\x1b[2Jb\n\xffc");
        assert_eq!(text.line(), "a?[2Jb?\u{fffd}c");
    }
}
