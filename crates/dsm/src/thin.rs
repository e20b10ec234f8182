//! Words of thin locks, which lie beside the values: each step of [`ThinLock`] is one compare-exchange.
//!
//! Nothing here waits. The table of locks (`node/locks.rs`) inflates a lock, and makes it thin again, under its mutex.

use crate::primitives::AtomicU32;
use core::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use farfield_core::dsm::{Colour, ThinLock};
use farfield_core::lock::LockMode;

/// Takes a lock that is thin, and free for this mode. Returns whether it was.
#[inline]
pub(crate) fn take(word: &AtomicU32, colour: Colour, mode: LockMode) -> bool {
    step(word, Acquire, |lock| lock.take(colour, mode)).is_some()
}

/// Gives a lock back that was taken in this mode while it was thin. Returns `false` if its holders are in the table
/// since.
#[inline]
pub(crate) fn release(word: &AtomicU32, mode: LockMode) -> bool {
    step(word, Release, |lock| lock.release(mode)).is_some()
}

/// Inflates a thin lock. Returns how many have it, and in which mode; `None` if it was not thin.
pub(crate) fn inflate(word: &AtomicU32, colour: Colour) -> Option<(u16, LockMode)> {
    // The table gives the value on that the last holder has written.
    step(word, AcqRel, |lock| lock.inflate(colour)).map(ThinLock::holders)
}

/// Makes a lock thin that nobody has, if it was thin before.
pub(crate) fn deflate(word: &AtomicU32, colour: Colour) {
    step(word, Release, |lock| lock.deflate(colour));
}

/// Makes a step of a word. Returns the word before it; `None` if it has no such step.
#[inline]
fn step(word: &AtomicU32, order: Ordering, next: impl Fn(ThinLock) -> Option<ThinLock>) -> Option<ThinLock> {
    let mut bits = word.load(Relaxed);
    loop {
        let before = ThinLock::from_bits(bits);
        match word.compare_exchange_weak(bits, next(before)?.bits(), order, Relaxed) {
            Ok(_) => return Some(before),
            Err(found) => bits = found,
        }
    }
}
