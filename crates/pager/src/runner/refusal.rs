//! Reasons why a program was not started, with advice for the user.

use super::ByteSize;
use crate::control::exit;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Reason why the program was not started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each is")]
pub enum JobRefusal {
    #[error("no command given: farfield run [OPTIONS] -- COMMAND [ARG]...")]
    NoCommand,
    #[error("{}: command not found", name.display())]
    NotFound { name: OsString },
    #[error("{}: cannot be executed: {error}", path.display())]
    NotExecutable { path: PathBuf, error: io::Error },
    #[error("{}: its interpreter {} cannot be executed: {error}", path.display(), interpreter.display())]
    NoInterpreter { path: PathBuf, interpreter: PathBuf, error: io::Error },
    #[error(
        "{}: cannot be examined before the start: {error}; farfield must be able to read the program",
        path.display()
    )]
    NotReadable { path: PathBuf, error: io::Error },
    #[error("{}: not a program that the kernel can start, or a damaged one", path.display())]
    Broken { path: PathBuf },
    #[error(
        "{}: statically linked, so no library can be loaded into it; link it dynamically (without -static, with \
         -C target-feature=-crt-static for Rust, with CGO_ENABLED=1 or -buildmode=pie for Go)",
        path.display()
    )]
    Static { path: PathBuf },
    #[error(
        "{}: linked against musl; far memory needs glibc, so use a glibc build of it (in a container: a Debian, Ubuntu \
         or Fedora image in place of Alpine)",
        path.display()
    )]
    Musl { path: PathBuf },
    #[error("{}: {machine}; far memory works for 64-bit x86 programs", path.display())]
    OtherMachine { path: PathBuf, machine: String },
    #[error(
        "{}: {why}, so the loader ignores LD_PRELOAD and far memory would be silently missing; run it as the user \
         whose rights it takes, or use a copy without that privilege",
        path.display()
    )]
    Privileged { path: PathBuf, why: &'static str },
    #[error("--near {:#} is too small to make progress; give at least 16M", ByteSize(*bytes))]
    NearTooSmall { bytes: u64 },
    #[error(
        "{} is less than the {} with which the job promises to run: give at least as much",
        ByteSize(*bytes),
        ByteSize(*least_bytes)
    )]
    NearBelowLeast { bytes: u64, least_bytes: u64 },
    #[error("process {pid} cannot be given far memory: {error}")]
    NoProcess { pid: u32, error: io::Error },
    #[error("process {pid} is of another user: only its own user can keep far memory for it")]
    OtherUser { pid: u32 },
    #[error("the agent of this node: {reason}")]
    Agent { reason: String },
    #[error(
        "the hard limit on {} (`ulimit -H{}`) is {}, and far memory reserves 16 TiB of addresses that it does not use; \
         lift it for `farfield run` (LimitAS=infinity and LimitDATA=infinity in a systemd unit) and set it for the \
         program alone: farfield run -- sh -c 'ulimit -{} {}; exec COMMAND'",
        if *resource == libc::RLIMIT_AS { "address space" } else { "data" },
        ulimit_option(*resource),
        ByteSize(*bytes),
        ulimit_option(*resource),
        bytes / 1024
    )]
    Limit { resource: libc::__rlimit_resource_t, bytes: u64 },
    #[error(
        "this shell already runs under `farfield run` (FARFIELD_CONTROL is set); use one `farfield run` for the whole \
         job"
    )]
    Nested,
    #[error("{what}; `farfield doctor` says more")]
    Kernel { what: String },
    #[error(
        "libfarfield_preload.so not found (looked for {}); build it with `cargo build --release -p farfield-preload`, \
         or set FARFIELD_PRELOAD to its path",
        searched.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoPreload { searched: Vec<PathBuf> },
    #[error(
        "{}: the path of the library has a space or a colon in it, which LD_PRELOAD cannot express; move it or set \
         FARFIELD_PRELOAD",
        path.display()
    )]
    PreloadPath { path: PathBuf },
    #[error("--far: {reason}")]
    Url { reason: String },
    #[error("far memory cannot be used: {reason}")]
    Far { reason: String },
    #[error("{reason}")]
    Pool { reason: String },
    #[error("--report {}: {error}; choose a folder that can be written and has room", path.display())]
    Report { path: PathBuf, error: io::Error },
    #[error("the private memory server did not start: {reason}; use --far URL to choose a server that runs already")]
    Server { reason: String },
    #[error(
        "the private memory server was not ready within {after:?}; use --far URL to choose a server that runs already"
    )]
    ServerSlow { after: Duration },
    #[error("stopped by signal {signal} before the program was started")]
    Interrupted { signal: i32 },
    #[error("{what}: {error}")]
    Os { what: &'static str, error: io::Error },
}

/// Returns the letter by which a shell's `ulimit` knows a limit.
fn ulimit_option(resource: libc::__rlimit_resource_t) -> char {
    if resource == libc::RLIMIT_AS { 'v' } else { 'd' }
}

impl JobRefusal {
    /// Returns the exit code of `farfield run`: that of a shell for commands that cannot be run,
    /// else [`exit::REFUSED`].
    pub fn exit_code(&self) -> i32 {
        match self {
            JobRefusal::NotFound { .. } => 127,
            JobRefusal::NotExecutable { .. } | JobRefusal::NoInterpreter { .. } => 126,
            JobRefusal::Interrupted { signal } => 128 + signal,
            _ => exit::REFUSED,
        }
    }
}
