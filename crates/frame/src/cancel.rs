//! Operations that another thread can cancel.

use crate::error::FrameError;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Runs an operation on frames that another thread cancels by setting `flag`. The operation looks at
/// the flag before each chunk of a column that it reads or makes, so within milliseconds unless the
/// pool is slow. It then returns [`FrameError::Cancelled`] and has changed nothing.
///
/// ```
/// use farfield::Heap;
/// use farfield_frame::{FarFrame, FrameError, cancellable};
/// use std::sync::Arc;
/// use std::sync::atomic::AtomicBool;
///
/// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
/// let flag = Arc::new(AtomicBool::new(true));
/// let trips = cancellable(&flag, || FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\n"));
/// assert!(matches!(trips, Err(FrameError::Cancelled)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn cancellable<T>(flag: &Arc<AtomicBool>, operation: impl FnOnce() -> T) -> T {
    /// Puts the flag of the operation around this one back, also after a panic.
    struct Outer(Option<Arc<AtomicBool>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            FLAG.replace(self.0.take());
        }
    }
    let _outer = Outer(FLAG.replace(Some(flag.clone())));
    operation()
}

/// Returns an error if the operation of this thread was cancelled.
pub(crate) fn check() -> Result<(), FrameError> {
    let is_cancelled = |flag: &Option<Arc<AtomicBool>>| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed));
    if FLAG.with_borrow(is_cancelled) { Err(FrameError::Cancelled) } else { Ok(()) }
}
