//! Functions of a server that can be held while they run: until a test lets them go on, or their server ends.

use farfield_wic::evacuate::{Evacuate, Evacuated, EvacuationBatch};
use farfield_wic::trace::{Trace, Traced, Tracing};
use farfield_wic::{Fault, Function, Place};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

/// Who hears that a server that is held was asked; one test at a time.
static ASKED: Mutex<Option<mpsc::Sender<()>>> = Mutex::new(None);
static ONE_TEST: Mutex<()> = Mutex::new(());
/// Whether a server that is held may go on.
static IS_FREE: AtomicBool = AtomicBool::new(true);

/// Does what it should when it may go on. It is held once for each [`hold`].
pub(crate) struct Held<F>(F);

/// Says that a server is asked, and waits until it may go on.
async fn wait_until_free(place: &impl Place) {
    let asked = ASKED.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(asked) = asked {
        asked.send(()).expect("somebody waits for that");
        while !IS_FREE.load(Ordering::Acquire) {
            place.pause(Duration::from_millis(1)).await;
        }
    }
}

impl Function for Held<Trace> {
    const NAME: &'static str = Trace::NAME;
    const VERSION: u32 = Trace::VERSION;
    const ONLY_READS: bool = true;
    type Argument = Tracing;
    type Answer = Traced;

    async fn run<P: Place>(place: &P, tracing: Tracing) -> Result<Traced, Fault> {
        // The first question is whether there are servers at all.
        if !tracing.objects.is_empty() {
            wait_until_free(place).await;
        }
        Trace::run(place, tracing).await
    }
}

impl Function for Held<Evacuate> {
    const NAME: &'static str = Evacuate::NAME;
    const VERSION: u32 = Evacuate::VERSION;
    type Argument = EvacuationBatch;
    type Answer = Evacuated;

    async fn run<P: Place>(place: &P, batch: EvacuationBatch) -> Result<Evacuated, Fault> {
        wait_until_free(place).await;
        Evacuate::run(place, batch).await
    }
}

/// Holds the next server that is asked, which the receiver hears of. It goes on when the guard is dropped.
pub(crate) fn hold() -> (impl Drop, mpsc::Receiver<()>) {
    struct Holding(#[expect(dead_code, reason = "it is only held")] MutexGuard<'static, ()>);
    impl Drop for Holding {
        fn drop(&mut self) {
            IS_FREE.store(true, Ordering::Release);
        }
    }
    let alone = ONE_TEST.lock().unwrap_or_else(PoisonError::into_inner);
    let (sender, asked) = mpsc::channel();
    IS_FREE.store(false, Ordering::Release);
    *ASKED.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
    (Holding(alone), asked)
}
