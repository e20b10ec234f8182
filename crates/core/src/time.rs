//! Time as an argument: this crate has no clock, so its driver says what time it is.

use core::time::Duration;

/// A point on the driver's monotonic clock, in nanoseconds since an origin of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// A moment that never comes.
    pub const NEVER: Moment = Moment(u64::MAX);

    /// Returns this moment plus `wait`; saturates at [`Moment::NEVER`].
    pub fn after(self, wait: Duration) -> Moment {
        Moment(self.0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the time from `earlier` to this moment; zero if `earlier` lies in the future.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
