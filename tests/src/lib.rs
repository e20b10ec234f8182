//! End-to-end tests on real programs: the same job natively and with far memory, compared byte for byte.
//!
//! A [`Job`] is a command with its input files. [`Job::check`] runs it natively, takes its memory footprint, runs it again
//! under `farfield run` with a part of that near, and compares everything that can be seen: exit code, output,
//! files, and what the job leaves behind. The tests themselves are in `tests/`, one file for each question:
//!
//! - `probes.rs`: do the memory and system calls mean the same? (the C programs in `programs/`)
//! - `programs.rs`: do programs that people use give the same results?
//! - `python.rs`: can a Python that runs already be given far memory?
//! - `budget.rs`: does near memory stay within its budget, measured from outside?
//! - `faults.rs`: does every fault of the world end in time, with a message?
//! - `heaps.rs`: does a far heap outlive its server, whatever it was doing?
//! - `survival/`: do programs and heaps outlive the servers of a mirror, and go on while some of them are silent?
//! - `agents.rs`: do jobs share the near memory of a machine as they were promised?
//! - `switch.rs`: do they go on while their pool is exchanged?
//! - `offload.rs`: are numbers added up where they are, and rightly?
//! - `calls.rs`: do functions over far pointers answer alike in the heap and at the server?
//! - `calls_mut.rs`: do functions that change values change the same at both, and all of it or nothing?
//! - `own_collections.rs`: does a collection of a user's own do so, on public API alone?
//! - `flat_maps.rs`: are keys found in far pages there, and rightly?
//! - `columns.rs`: are columns copied, shuffled, counted and grouped there, and rightly?
//! - `frames.rs`: are rows of a far frame found there, and rightly?
//! - `sql/`: does SQL over far tables answer what it answers near, also the queries of TPC-H?
//! - `sandbox/`: does code that is shipped to a server answer as native code, and can it do no harm?
//! - `leftovers.rs`: is anything left behind?
//! - `situations.rs`: do programs run in namespaces, under limits and debuggers?
//! - `packages.rs`: does the Debian package install, and do its units and the container have what they need and nothing else?
//! - `kills.rs`: does it matter at which moment something is killed?
//!
//! `cargo x test` makes a checked build for them first, and names it in `FARFIELD_BIN`; without that they use the release build.

/// Runs the code examples of the guide that need a server.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/functions.md")]
mod guide {}

mod authority;
mod data;
mod far;
mod gone;
mod in_process;
mod job;
mod process;
mod python;
mod random;
mod relay;
mod scratch;

pub use authority::TestAuthority;
pub use data::{random_lines, random_words, shared_data, shared_text};
pub use far::{FarRun, Server};
pub use gone::{ask_until, ask_until_gone};
pub use in_process::{heap_at, serve_here};
pub use job::{Far, Footprint, Job, Report};
pub use process::{Command, Ended, Running, kill_marked, marked_processes, window_pss_bytes};
pub use python::{python, python_command, python_filled, python_program};
pub use random::seeded;
pub use relay::Relay;
pub use scratch::Scratch;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// One MiB.
pub const MIB: u64 = 1 << 20;
/// The smallest near budget that `farfield run` takes.
pub const NEAR_BYTES_MIN: u64 = 16 * MIB;

/// The `farfield` binary under test. Fails the test when there is none: a test that cannot run has not passed.
pub fn farfield() -> PathBuf {
    let path = match std::env::var_os("FARFIELD_BIN") {
        Some(path) => PathBuf::from(path),
        None => {
            let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
            let target = target.unwrap_or_else(|| project().join("target"));
            project().join(target).join("release/farfield")
        }
    };
    assert!(path.is_file(), "{} is not there: run the tests by `cargo x test`, which builds it first", path.display());
    path
}

/// The root of the project.
pub fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent")
}

/// Larger jobs, more rounds: the deep tier (`cargo x deep`).
pub fn deep() -> bool {
    std::env::var_os("FARFIELD_DEEP").is_some_and(|value| value != "0" && !value.is_empty())
}

/// `small` in the CI tier, `large` in the deep one.
pub fn tier<T>(small: T, large: T) -> T {
    if deep() { large } else { small }
}

/// Returns the length of a test that could go on for ever: `FARFIELD_SECONDS`, else `usual` in the deep tier. `None` in the CI tier.
pub fn soak_time(usual: Duration) -> Option<Duration> {
    let seconds = std::env::var("FARFIELD_SECONDS").ok();
    let asked = seconds.map(|text| Duration::from_secs(text.parse().expect("FARFIELD_SECONDS is a number of seconds")));
    asked.or(deep().then_some(usual))
}

/// Says that it is over when it is dropped, also by a test that fails: other threads wait for that.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Where a program of this machine is. At home a test whose program is not installed is skipped (`None`, with a printed
/// reason); in CI it fails, because there everything is installed.
pub fn program(name: &str) -> Option<PathBuf> {
    // Debian's own before others: a version manager's wrapper script is not the program.
    let folders = ["/usr/bin", "/bin", "/usr/sbin", "/usr/local/bin"].map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = folders.into_iter().chain(std::env::split_paths(&path));
    let found = folders.map(|folder| folder.join(name)).find(|path| path.is_file());
    if found.is_none() {
        skip(&format!("{name} is not installed"));
    }
    found
}

/// Says why a test cannot run here. In CI (`CI=true`) that is a failure.
pub fn skip(reason: &str) {
    let ci = std::env::var("CI").is_ok_and(|value| value == "true" || value == "1");
    assert!(!ci, "{reason}; in CI every test must run");
    println!("SKIPPED: {reason}");
}

/// No wait for something is longer. Only a test that fails waits so long; a busy machine needs some of it.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// When a job that says nothing else is given up.
fn usual_deadline() -> Duration {
    PATIENCE * tier(2, 20)
}

/// Asks until the answer is yes. Fails when that takes too long, with `what` was waited for.
pub fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        // What is asked for may be another process each time.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Compiles a C program of `programs/` into `folder`.
pub fn compile(name: &str, folder: &Path) -> Option<PathBuf> {
    compile_with(name, folder, name, &[])
}

/// The same, with another name for the result and more flags.
pub fn compile_with(name: &str, folder: &Path, output: &str, flags: &[&str]) -> Option<PathBuf> {
    let compiler = program("cc")?;
    let source = project().join("tests/programs").join(format!("{name}.c"));
    let output = folder.join(output);
    let result = std::process::Command::new(compiler)
        .args(["-O1", "-g", "-Wall", "-Wextra", "-Wno-clobbered", "-Wno-infinite-recursion", "-pthread"])
        .args(flags)
        .arg("-o")
        .arg(&output)
        .arg(&source)
        .output()
        .expect("the compiler starts");
    let messages = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{} does not compile:\n{messages}", source.display());
    Some(output)
}
