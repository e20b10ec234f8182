//! Detects whether SIGPIPE was ignored when this process started. The program that we run must
//! inherit the original setting, but the Rust runtime ignores the signal before `main`. So it is
//! read earlier.

use std::sync::atomic::{AtomicBool, Ordering};

static IGNORED: AtomicBool = AtomicBool::new(false);

extern "C" fn look() {
    let mut action = core::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: only asks; the struct is read after success.
    let ignored = unsafe {
        libc::sigaction(libc::SIGPIPE, core::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    };
    IGNORED.store(ignored, Ordering::Relaxed);
}

// SAFETY: the C runtime calls every pointer in this section once, before `main`; `look` needs nothing of the Rust
// runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

/// Returns whether SIGPIPE was ignored when this process started.
pub(crate) fn was_ignored() -> bool {
    IGNORED.load(Ordering::Relaxed)
}
