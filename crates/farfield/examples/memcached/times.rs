//! When records are gone: times to live, and flushes of all versions until now.

use std::sync::atomic::{AtomicU64, Ordering};

/// Times to live up to this many seconds count from now; larger ones are dates.
const RELATIVE_MAX: i64 = 30 * 24 * 60 * 60;

/// Clock and versions of a cache.
pub(crate) struct Times {
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    /// The last version that was given to a record.
    versions: AtomicU64,
    /// Records up to this version are gone.
    flushed: AtomicU64,
    /// When everything will be; 0 for never.
    flush_at: AtomicU64,
}

impl Times {
    pub(crate) fn new(clock: impl Fn() -> u64 + Send + Sync + 'static) -> Times {
        let zero = || AtomicU64::new(0);
        Times { clock: Box::new(clock), versions: zero(), flushed: zero(), flush_at: zero() }
    }

    /// Seconds since 1970. If everything was to be flushed by now, it is.
    pub(crate) fn now(&self) -> u64 {
        let now = (self.clock)();
        let flush_at = self.flush_at.load(Ordering::Relaxed);
        if flush_at != 0
            && flush_at <= now
            && self.flush_at.compare_exchange(flush_at, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            self.flushed.fetch_max(self.last_version(), Ordering::Relaxed);
        }
        now
    }

    /// When a time to live that is given now ends; `None` if it has ended.
    pub(crate) fn deadline(&self, expires: i64) -> Option<u64> {
        match expires {
            0 => Some(0),
            ..0 => None,
            1..=RELATIVE_MAX => Some(self.now() + expires as u64),
            date => Some(date as u64).filter(|date| *date > self.now()),
        }
    }

    pub(crate) fn last_version(&self) -> u64 {
        self.versions.load(Ordering::Relaxed)
    }

    pub(crate) fn next_version(&self) -> u64 {
        self.versions.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Is a record of this version gone, which ends then, or never (0)?
    pub(crate) fn is_gone(&self, version: u64, expires: u64, now: u64) -> bool {
        expires != 0 && expires <= now || version <= self.flushed.load(Ordering::Relaxed)
    }

    /// Everything that is there is gone, now or after a delay.
    pub(crate) fn flush(&self, delay: i64) {
        let at = match delay {
            ..=0 => self.now(),
            1..=RELATIVE_MAX => self.now() + delay as u64,
            date => date as u64,
        };
        self.flush_at.store(at.max(1), Ordering::Relaxed);
        self.now();
    }
}
