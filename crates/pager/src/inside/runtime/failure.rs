//! The end of the program because of us, and what is said on standard error meanwhile.

use super::super::sync::Ordering;
use super::{Phase, RUNTIME};
use farfield_os::process;

/// Remembers the standard error of this moment: long waits are reported on it from now on.
pub fn remember_standard_error() {
    let (device, inode) = farfield_os::file::identity(2).unwrap_or_default();
    RUNTIME.standard_error[0].store(device, Ordering::Relaxed);
    RUNTIME.standard_error[1].store(inode, Ordering::Relaxed);
    farfield_os::sync::set_say(say);
}

/// Writes a text to standard error, unless the program has made that descriptor something else.
fn say(text: &[u8]) {
    let known = RUNTIME.standard_error.each_ref().map(|number| number.load(Ordering::Relaxed));
    if farfield_os::file::identity(2) == Some((known[0], known[1])) {
        farfield_os::file::write_without_waiting(2, text);
    }
}

/// Ends the program because of us: tells the runner why, or the user if there is no runner yet.
/// Never returns.
pub fn fail(code: i32, reason: core::fmt::Arguments<'_>) -> ! {
    use core::fmt::Write;
    if cfg!(feature = "model") {
        panic!("exit code {code}: {reason}");
    }
    let ending = RUNTIME.ending.load(Ordering::Acquire);
    if ending != 0 {
        // Another thread is ending the program and has given its far memory up: nothing is wrong.
        process::exit_group(ending as i32 & 0xFF)
    }
    let mut text = FailureText { bytes: [0; 480], len: 0 };
    let _ = text.write_fmt(reason);
    if RUNTIME.phase() != Phase::Off {
        // The runner reports the reason, once for the whole job.
        RUNTIME.control().fail(code, &text.bytes[..text.len]);
        process::exit_group(code)
    }
    let _ = farfield_os::file::write_all(2, b"farfield: ");
    let _ = farfield_os::file::write_all(2, &text.bytes[..text.len]);
    let _ = farfield_os::file::write_all(2, b"\n");
    process::exit_group(code)
}

struct FailureText {
    bytes: [u8; 480],
    len: usize,
}

impl core::fmt::Write for FailureText {
    fn write_str(&mut self, s: &str) -> core::fmt::Result {
        let take = s.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + take].copy_from_slice(&s.as_bytes()[..take]);
        self.len += take;
        Ok(())
    }
}
