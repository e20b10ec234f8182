//! Locks in far memory: WICkit's fair lock, with a shared form for readers, for functions at the
//! server and at clients at once.
//!
//! The lock is a record of 64 bytes in the region ([`farfield_core::lock`]): a lease with a fencing
//! token. The server makes every step of it, by its own clock, so both sides stand in one line. No
//! holder is assumed alive: one that died, or is too slow, loses the lock when its lease ends. Its
//! late writes are refused, because the server compares the epoch of the holding with the record,
//! and writes while nobody can change either.
//!
//! A waiting task polls the lock, less often the more tasks are ahead of it, and gives up its
//! ticket when it is dropped. Among the tasks that wait beside the memory, on one channel, the
//! first is notified when the lock is given back there. So none of them waits for a free lock.

use crate::{Fault, Place};
use core::time::Duration;
use farfield_core::lock::{LockMode, LockRecord, LockReply, LockRequest};
use serde::{Deserialize, Serialize};

/// Shortest pause between two looks, of a task that is first in the line and has looked a few
/// times.
const PAUSE_MIN: Duration = Duration::from_micros(20);
/// Longest pause between two looks: a hundredth of the time after which a task that does not look
/// loses its ticket.
const PAUSE_MAX: Duration = Duration::from_millis(1);
const _: () = assert!(PAUSE_MAX.as_micros() * 100 <= LockRecord::TURN.as_micros());

/// Fencing token: the holding of a lock to which a write belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Fence {
    /// Offset of the lock.
    pub lock: u64,
    /// Epoch of the holding.
    pub epoch: u64,
}

/// A lock at an offset of the region, a multiple of [`WicLock::BYTES`]. Bytes that were never
/// written are a free lock.
///
/// ```
/// use farfield_wic::{Fault, Function, Place, WicLock};
///
/// /// Moves something from one account to another. The lock is at offset 0.
/// struct Transfer;
///
/// impl Function for Transfer {
///     const NAME: &'static str = "example.transfer";
///     const VERSION: u32 = 1;
///     type Argument = (u64, u64, u64);
///     type Answer = ();
///
///     async fn run<P: Place>(place: &P, (from, to, amount): (u64, u64, u64)) -> Result<(), Fault> {
///         let held = WicLock::at(0).lock(place).await?;
///         let [left, right] = [place.read_u64(from).await?, place.read_u64(to).await?];
///         held.write_u64(from, left.wrapping_sub(amount)).await?;
///         held.write_u64(to, right.wrapping_add(amount)).await?;
///         held.unlock().await
///     }
/// }
/// # let sim = farfield_wic::Sim::new(1, vec![0; 128]);
/// # sim.run::<Transfer>(vec![(64, 72, 1); 20]).into_iter().for_each(|end| assert_eq!(end, Ok(())));
/// # assert_eq!(sim.bytes()[72], 20);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WicLock {
    offset: u64,
    lease: Duration,
    within: Duration,
}

impl WicLock {
    /// Bytes of a lock.
    pub const BYTES: u64 = LockRecord::BYTES as u64;

    /// Returns the lock at this offset, with a lease of one second and a wait of at most one
    /// second.
    pub const fn at(offset: u64) -> WicLock {
        WicLock { offset, lease: Duration::from_secs(1), within: Duration::from_secs(1) }
    }

    /// Sets the lease: the longest time for which the lock may be held unless it is extended, at
    /// most a minute. A holder that dies blocks others for so long. The lease should be much longer
    /// than a function needs, and than its process may be kept from running.
    pub const fn lease(self, lease: Duration) -> WicLock {
        WicLock { lease, ..self }
    }

    /// Sets how long to wait for the lock; zero: only one attempt. After that, taking it fails with
    /// [`Fault::Locked`].
    pub const fn within(self, within: Duration) -> WicLock {
        WicLock { within, ..self }
    }

    /// Takes the lock exclusively. Waits until nobody else has it; fails with [`Fault::Locked`]
    /// when the time of [`WicLock::within`] is over.
    pub async fn lock<'p, P: Place>(&self, place: &'p P) -> Result<Exclusive<'p, P>, Fault> {
        self.take(place, LockMode::Exclusive).await.map(Exclusive)
    }

    /// Takes the lock together with other readers. Waits until no writer has it; fails with
    /// [`Fault::Locked`] when the time of [`WicLock::within`] is over.
    pub async fn read<'p, P: Place>(&self, place: &'p P) -> Result<Shared<'p, P>, Fault> {
        self.take(place, LockMode::Shared).await.map(Shared)
    }

    async fn take<'p, P: Place>(&self, place: &'p P, mode: LockMode) -> Result<WicLockGuard<'p, P>, Fault> {
        let WicLock { offset, lease, within } = *self;
        let until = place.now().saturating_add(within);
        let mut waiter = WicLockWaiter { place, lock: offset, ticket: None };
        let mut looks = 0;
        loop {
            let ask = match waiter.ticket {
                Some(ticket) => LockRequest::Look { ticket, mode, lease },
                None => LockRequest::Take { mode, lease, waits: !within.is_zero() },
            };
            let ahead = match place.lock_step(offset, ask).await? {
                LockReply::Yours { epoch, was_left } => {
                    waiter.ticket = None;
                    let fence = Fence { lock: offset, epoch };
                    return Ok(WicLockGuard { place, fence, mode, is_poisoned: was_left, is_over: false });
                }
                LockReply::Waits { ticket, ahead } => {
                    waiter.ticket = Some(ticket);
                    ahead
                }
                LockReply::Missed | LockReply::Full | LockReply::Busy => {
                    waiter.ticket = None;
                    LockRecord::LINE_MAX
                }
                LockReply::Done | LockReply::Over => return Err(Fault::Internal),
            };
            if place.now() >= until {
                return Err(Fault::Locked { offset });
            }
            match waiter.ticket {
                Some(ticket) => place.pause_in_line(offset, ticket, pause(looks, ahead)).await,
                None => place.pause(pause(looks, ahead)).await,
            }
            looks += 1;
        }
    }
}

/// Returns the pause before the next look, after `looks` looks, with `ahead` tasks ahead.
fn pause(looks: u32, ahead: u32) -> Duration {
    if looks < 4 && ahead == 0 {
        return Duration::ZERO;
    }
    let alone = PAUSE_MIN * (1 << looks.min(5));
    alone.saturating_mul(1 + ahead).min(PAUSE_MAX)
}

/// A waiter in the line of a lock; its position is given up when dropped.
struct WicLockWaiter<'p, P: Place> {
    place: &'p P,
    lock: u64,
    ticket: Option<u32>,
}

impl<P: Place> Drop for WicLockWaiter<'_, P> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.place.give_back(self.lock, LockRequest::GiveUp { ticket });
        }
    }
}

/// A held lock; given back when dropped.
struct WicLockGuard<'p, P: Place> {
    place: &'p P,
    fence: Fence,
    mode: LockMode,
    is_poisoned: bool,
    is_over: bool,
}

impl<P: Place> WicLockGuard<'_, P> {
    async fn renew(&self, lease: Duration) -> Result<(), Fault> {
        let WicLockGuard { place, fence, mode, .. } = self;
        self.expect(place.lock_step(fence.lock, LockRequest::Keep { epoch: fence.epoch, mode: *mode, lease }).await?)
    }

    async fn release(mut self) -> Result<(), Fault> {
        let Fence { lock, epoch } = self.fence;
        let release = LockRequest::Release { epoch, mode: self.mode, is_done: true };
        let reply = self.place.lock_step(lock, release).await?;
        self.is_over = true;
        self.expect(reply)
    }

    fn expect(&self, reply: LockReply) -> Result<(), Fault> {
        match reply {
            LockReply::Done => Ok(()),
            LockReply::Over => Err(Fault::Fenced { offset: self.fence.lock }),
            _ => Err(Fault::Internal),
        }
    }
}

impl<P: Place> Drop for WicLockGuard<'_, P> {
    fn drop(&mut self) {
        if !self.is_over {
            let Fence { lock, epoch } = self.fence;
            // A reader leaves nothing half done.
            let is_done = self.mode == LockMode::Shared;
            self.place.give_back(lock, LockRequest::Release { epoch, mode: self.mode, is_done });
        }
    }
}

/// An exclusively held lock, through which the data that it guards is written. If it is dropped
/// without [`Exclusive::unlock`], because the function failed or was ended, the next holder is told
/// that the lock was left.
#[must_use = "the lock is given back when this is dropped"]
pub struct Exclusive<'p, P: Place>(WicLockGuard<'p, P>);

/// A lock held together with other readers. Only if [`Shared::unlock`] succeeds, all reads are
/// known to have been of one moment.
#[must_use = "the lock is given back when this is dropped"]
pub struct Shared<'p, P: Place>(WicLockGuard<'p, P>);

impl<P: Place> core::fmt::Debug for Exclusive<'_, P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Exclusive({:?})", self.0.fence)
    }
}

impl<P: Place> core::fmt::Debug for Shared<'_, P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Shared({:?})", self.0.fence)
    }
}

impl<P: Place> Exclusive<'_, P> {
    /// Checks whether the last exclusive holder died or failed before it unlocked. Then the guarded
    /// data may be half changed.
    pub fn was_left(&self) -> bool {
        self.0.is_poisoned
    }

    /// Returns the fencing token of this holding, which is checked with every write.
    pub fn fence(&self) -> Fence {
        self.0.fence
    }

    /// Writes bytes, as [`Place::write`]. Fails with [`Fault::Fenced`] if the lease is over.
    pub async fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.0.place.write_fenced(self.0.fence, offset, bytes).await
    }

    /// Writes a little-endian word.
    pub async fn write_u64(&self, offset: u64, word: u64) -> Result<(), Fault> {
        self.write(offset, &word.to_le_bytes()).await
    }

    /// Extends the lease to this time from now, if that is longer. Fails with [`Fault::Fenced`] if
    /// the lease is over.
    pub async fn keep(&self, lease: Duration) -> Result<(), Fault> {
        self.0.renew(lease).await
    }

    /// Gives the lock back; the guarded data is complete. Fails with [`Fault::Fenced`] if the lease
    /// was over before that.
    pub async fn unlock(self) -> Result<(), Fault> {
        self.0.release().await
    }
}

impl<P: Place> Shared<'_, P> {
    /// Checks whether the last exclusive holder died or failed before it unlocked. Then the guarded
    /// data may be half changed.
    pub fn was_left(&self) -> bool {
        self.0.is_poisoned
    }

    /// Extends the lease to this time from now, if that is longer. Fails with [`Fault::Fenced`] if
    /// the lease is over.
    pub async fn keep(&self, lease: Duration) -> Result<(), Fault> {
        self.0.renew(lease).await
    }

    /// Gives the lock back. Fails with [`Fault::Fenced`] if the lease was over before that, so that
    /// the reads may be of several moments.
    pub async fn unlock(self) -> Result<(), Fault> {
        self.0.release().await
    }
}
