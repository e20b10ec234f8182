//! Destructors of far values: they run in a bounded stack, and all of them run though some panic.
//!
//! A destructor drops the far values that its value owns, whose destructors do so again: a chain of
//! owners would need as much stack as it is long. So what is dropped inside of [`DEPTH_MAX`]
//! destructors waits in a queue of its thread, which the outermost drop works off before it
//! returns. When a drop from outside returns, all of the value is dropped. A destructor that drops
//! a deep part of its value finds that done only after it has returned itself.
//!
//! A destructor that panics keeps no other from running, as in std: the first panic goes on when
//! all have run.

use super::HeapInner;
use super::objects::{DeferredDrop, run_deferred_drop};
use core::any::Any;
use core::cell::{Cell, RefCell};
use core::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Maximum number of destructors inside of each other.
const DEPTH_MAX: u32 = 8;

/// Values that wait for the outermost drop of their thread. Each keeps the heap that it is in.
struct DropQueue {
    depth: Cell<u32>,
    /// Stack of waiting values: the last one is dropped next.
    // Without a destructor, so that it can be used as long as the thread lasts. It is empty, and
    // owns nothing, outside of drops.
    waiting: RefCell<ManuallyDrop<Vec<(*const HeapInner, DeferredDrop)>>>,
}

thread_local! {
    static QUEUE: DropQueue =
        const { DropQueue { depth: Cell::new(0), waiting: RefCell::new(ManuallyDrop::new(Vec::new())) } };
}

/// The first panic of several destructors.
#[derive(Default)]
#[must_use = "the panic goes on"]
pub(crate) struct Panics(Option<Box<dyn Any + Send>>);

impl Panics {
    /// Runs destructors of a user and keeps the first panic.
    pub(crate) fn catch(&mut self, action: impl FnOnce()) {
        // State that the panic has broken is broken for the code that catches the panic in the end,
        // as in std.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(action)) {
            self.0.get_or_insert(panic);
        }
    }

    /// Continues the panic, if there was one.
    pub(crate) fn resume(self) {
        if let Some(panic) = self.0 {
            resume_unwind(panic);
        }
    }
}

/// Drops a value or collection, or leaves that to the outermost drop of this thread.
///
/// # Safety
/// The dropped value or collection keeps the heap, and belongs to the heap from now on, whatever
/// happens.
pub(super) unsafe fn drop_or_queue(core: *const HeapInner, what: DeferredDrop) {
    QUEUE.with(|queue| {
        if queue.depth.get() >= DEPTH_MAX {
            queue.waiting.borrow_mut().push((core, what));
            return;
        }
        let mut panics = Panics::default();
        let is_outermost = queue.depth.get() == 0;
        let mut next = Some((core, what));
        while let Some((core, what)) = next {
            let before = queue.len();
            // SAFETY: passed on to the caller, or the code that put it into the queue said so; and
            // only we take it out.
            unsafe { queue.run(core, what, &mut panics) };
            next = None;
            if is_outermost {
                // Values that one value has dropped are dropped in that order.
                queue.waiting.borrow_mut()[before..].reverse();
                next = queue.next();
            }
        }
        panics.resume();
    });
}

impl DropQueue {
    /// # Safety
    /// As for [`drop_or_queue`].
    unsafe fn run(&self, core: *const HeapInner, what: DeferredDrop, panics: &mut Panics) {
        self.depth.set(self.depth.get() + 1);
        // SAFETY: passed on to the caller.
        panics.catch(|| unsafe { run_deferred_drop(core, what, false) });
        self.depth.set(self.depth.get() - 1);
    }

    fn next(&self) -> Option<(*const HeapInner, DeferredDrop)> {
        let mut waiting = self.waiting.borrow_mut();
        let next = waiting.pop();
        if next.is_none() {
            **waiting = Vec::new();
        }
        next
    }

    fn len(&self) -> usize {
        self.waiting.borrow().len()
    }
}
