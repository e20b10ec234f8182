//! When code is compiled: once interpreting it has taken as long as compiling it would.
//!
//! So whoever ships code makes a server work for it at most twice as long as it computes, and code that
//! is called once is never compiled. One thread compiles, beside those that serve; until it has,
//! code is interpreted.

use super::compiled::{CompiledCode, CompiledGuest, native_bytes};
use super::{GuestFailure, RunningGuest, SandboxEngine};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Time that the compiler takes for each byte of code, in nanoseconds: measured with the 108 kB of the guest that the
/// tests ship.
const COMPILE_NS_PER_BYTE: u64 = 2100;

/// Most bytes of compiled code that a process keeps.
const NATIVE_BYTES_MAX: usize = 64 << 20;

/// Most codes that wait for the compiler.
const QUEUE_MAX: usize = 64;

/// Progress of one code.
pub(super) struct Tiers {
    /// Time for which it was interpreted, in nanoseconds.
    interpreted_ns: AtomicU64,
    tier: Mutex<CodeTier>,
    code_bytes: usize,
}

enum CodeTier {
    /// Interpreted, and may be compiled.
    Interpreted(Arc<[u8]>),
    /// Waits for the compiler, or is being compiled.
    Queued,
    Compiled(Arc<CompiledCode>),
    /// The compiler does not take it.
    Refused,
}

/// Stack of a thread that compiles. Those that serve have less than the compiler needs.
const COMPILER_STACK_BYTES: usize = 16 << 20;

/// Code to compile.
type QueuedCode = (Arc<Tiers>, Arc<[u8]>);

static COMPILER: LazyLock<Option<SyncSender<QueuedCode>>> = LazyLock::new(|| {
    let (sender, queue) = sync_channel::<QueuedCode>(QUEUE_MAX);
    let body = move || {
        for (tiers, code) in queue {
            let compiled = compile(&code);
            *tiers.tier() = compiled;
        }
    };
    compiler_thread().spawn(body).ok().map(|_| sender)
});

impl Tiers {
    /// Creates the record of code that nobody has run.
    pub(super) fn new(code: &[u8]) -> Tiers {
        Tiers {
            interpreted_ns: AtomicU64::new(0),
            tier: Mutex::new(CodeTier::Interpreted(code.into())),
            code_bytes: code.len(),
        }
    }

    fn tier(&self) -> MutexGuard<'_, CodeTier> {
        self.tier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an instance of compiled code, if there is any and it is wanted; otherwise the code is interpreted.
    pub(super) async fn instantiate(self: &Arc<Self>, engine: SandboxEngine) -> Option<RunningGuest> {
        match engine {
            SandboxEngine::Interpreted => return None,
            SandboxEngine::Tiered => self.compile_if_hot(),
            SandboxEngine::Compiled => {
                let mut tier = self.tier();
                if let CodeTier::Interpreted(code) = &*tier {
                    let code = Arc::clone(code);
                    let compiler = compiler_thread().spawn(move || compile(&code)).map(JoinHandle::join);
                    *tier = compiler.ok().and_then(Result::ok).unwrap_or(CodeTier::Refused);
                }
            }
        }
        let code = match &*self.tier() {
            CodeTier::Compiled(code) => Arc::clone(code),
            _ => return None,
        };
        let guest = CompiledGuest::new(&code).await.ok()?;
        Some(RunningGuest::Compiled(Box::new(guest)))
    }

    /// Adds time for which the code was interpreted.
    pub(super) fn count_interpreted(&self, time: Duration) {
        self.interpreted_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Lets the code be compiled beside, if that pays.
    fn compile_if_hot(self: &Arc<Self>) {
        if self.interpreted_ns.load(Ordering::Relaxed) < self.code_bytes as u64 * COMPILE_NS_PER_BYTE {
            return;
        }
        let mut tier = self.tier();
        let (CodeTier::Interpreted(code), Some(compiler)) = (&*tier, COMPILER.as_ref()) else { return };
        // If too many wait, a later call tries again.
        if compiler.try_send((Arc::clone(self), Arc::clone(code))).is_ok() {
            *tier = CodeTier::Queued;
        }
    }

    /// Drops compiled code. What runs keeps it until it ends; later calls are interpreted.
    pub(super) fn drop_compiled(&self) {
        let mut tier = self.tier();
        if matches!(*tier, CodeTier::Compiled(_)) {
            *tier = CodeTier::Refused;
        }
    }
}

/// Checks whether compiled code takes more memory than it may.
pub(super) fn is_full() -> bool {
    native_bytes() > NATIVE_BYTES_MAX
}

fn compiler_thread() -> std::thread::Builder {
    std::thread::Builder::new().name("farfield-compile".into()).stack_size(COMPILER_STACK_BYTES)
}

fn compile(code: &[u8]) -> CodeTier {
    match catch_unwind(AssertUnwindSafe(|| CompiledCode::new(code))) {
        Ok(Ok(compiled)) => CodeTier::Compiled(Arc::new(compiled)),
        Ok(Err(GuestFailure(_))) | Err(_) => CodeTier::Refused,
    }
}

#[cfg(test)]
mod tests {
    //! Guards against code that is compiled before that pays, against answers that depend on who runs
    //! it, and against guests that nobody stops because the clock rests.
    use super::super::compiled::is_clock_at_rest;
    use super::super::{Export, Guest, GuestCode, GuestHost};
    use super::*;
    use crate::abi::GuestMessage;
    use core::cell::Cell;
    use core::future::{Future, pending};
    use core::pin::pin;
    use core::task::{Context, Poll, Waker};
    use std::time::Instant;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Code that computes `rounds` rounds, and then says that it has no such function.
    fn code(rounds: u64) -> GuestCode {
        let speaks = format!(
            r#"(local $left i64)
               (local.set $left (i64.const {rounds}))
               (loop $again
                 (local.set $left (i64.sub (local.get $left) (i64.const 1)))
                 (br_if $again (i64.ne (local.get $left) (i64.const 0))))
               (i64.const {})"#,
            4096u64 << 32 | 1
        );
        let text = format!(
            r#"(module (memory (export "memory") 1) (data (i32.const 4096) "\02")
                (func (export "ff_sandbox_room") (param i32) (result i32) i32.const 0)
                (func (export "ff_sandbox_begin") (param i32) (result i64) {speaks})
                (func (export "ff_sandbox_go_on") (param i32) (result i64) {speaks}))"#
        );
        GuestCode::new(&wat::parse_str(text).unwrap()).unwrap()
    }

    /// A host that gives so many turns but one, and has nothing to read.
    struct Turns(Cell<u64>);

    impl GuestHost for Turns {
        async fn turn(&self) {
            self.0.update(|left| left - 1);
            if self.0.get() == 0 {
                pending().await
            }
        }

        async fn read(&self, _: u64, _: &mut [u8]) -> bool {
            false
        }
    }

    /// Runs what waits for nobody.
    fn run<T>(work: impl Future<Output = T>) -> T {
        match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => result,
            Poll::Pending => panic!("it waits"),
        }
    }

    fn guest(code: &GuestCode, engine: SandboxEngine) -> Guest {
        run(Guest::new(code, engine)).unwrap()
    }

    fn is_compiled(guest: &Guest) -> bool {
        matches!(guest.running, RunningGuest::Compiled(_))
    }

    #[test]
    fn code_is_compiled_once_it_was_interpreted_for_as_long() {
        let (hot, cold) = (code(100_000), code(1));
        let began = Instant::now();
        loop {
            let mut guest = guest(&hot, SandboxEngine::Tiered);
            let is_compiled = is_compiled(&guest);
            assert_eq!(run(guest.tell(Export::Begin, &0u8, &Turns(Cell::new(u64::MAX)))), Ok(GuestMessage::NoFunction));
            if is_compiled {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "it is never compiled");
        }
        // It is hot where it is told to be interpreted, too.
        assert!(!is_compiled(&guest(&hot, SandboxEngine::Interpreted)));
        run(guest(&cold, SandboxEngine::Tiered).tell(Export::Begin, &0u8, &Turns(Cell::new(u64::MAX)))).unwrap();
        assert!(!is_compiled(&guest(&cold, SandboxEngine::Tiered)), "it was interpreted for less than it has bytes");
        assert!(is_compiled(&guest(&code(2), SandboxEngine::Compiled)), "at the first call");
        hot.drop_compiled();
        assert!(!is_compiled(&guest(&hot, SandboxEngine::Tiered)));
    }

    #[test]
    fn a_guest_that_computes_gives_others_their_turn_also_after_a_rest_of_the_clock() {
        let endless = code(u64::MAX);
        for _ in 0..3 {
            let turns = Turns(Cell::new(3));
            let mut guest = guest(&endless, SandboxEngine::Compiled);
            assert!(is_compiled(&guest));
            let mut told = Box::pin(guest.tell(Export::Begin, &0u8, &turns));
            assert!(told.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            // It is given up in the middle.
            drop(told);
            assert_eq!(turns.0.get(), 0);
            drop(guest);
            let began = Instant::now();
            while !is_clock_at_rest() {
                assert!(began.elapsed() < PATIENCE, "the clock does not rest");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
