//! What tasks share without an owner among them: locks, atomic numbers, and channels.

pub(crate) mod atomic;
pub(crate) mod channel;
pub(crate) mod lock;

pub use atomic::{AtomicValue, DAtomic};
pub use channel::{Receiver, RecvError, SendError, Sender, channel};
pub use lock::{DMutex, DMutexGuard, DReadGuard, DRwLock};
