//! The guest, compiled; a server that takes code, and callers.

use farfield_bench_functions::with_workloads;
use farfield_pool::{Backend, PoolBuilder};
use farfield_sandbox::{Code, SandboxEngine, with_sandbox_by};
use farfield_server::{Config, Server};
use farfield_tests::PATIENCE;
use farfield_wic::{Caller, Registry};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) const PAGES: u64 = 256;
const TARGET: &str = "wasm32-unknown-unknown";

/// The guest of this workspace as WebAssembly; `None`, after saying so, where the compiler cannot make that (`rustup target add wasm32-unknown-unknown`).
pub(crate) fn guest() -> Option<&'static [u8]> {
    static GUEST: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    GUEST.get_or_init(build).as_deref()
}

fn build() -> Option<Vec<u8>> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let library =
        Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]).output().expect("rustc runs");
    if !Path::new(String::from_utf8_lossy(&library.stdout).trim()).is_dir() {
        farfield_tests::skip(&format!("the target is not installed: rustup target add {TARGET}"));
        return None;
    }
    // A folder of its own: whoever runs this test holds the lock of the other one.
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("guest");
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--profile", "guest", "--target", TARGET, "-p", "farfield-guest", "--target-dir"])
        .arg(&target)
        .current_dir(workspace)
        // Flags of this build, as those of sanitizers, are not for the guest.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .expect("cargo runs");
    assert!(built.success(), "the guest cannot be built");
    let file = target.join(TARGET).join("guest/farfield_guest.wasm");
    Some(std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())))
}

/// The guest as code, ready to be called.
pub(crate) fn code() -> Option<Code> {
    guest().map(|bytes| Code::new(bytes).expect("the guest is as guests should be"))
}

/// A server that lets calls go on for so long.
pub(crate) fn serve_within(functions: Registry, call_within: Duration) -> Server {
    let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
    Server::start(Config { listen, functions, call_within, ..Config::default() }).unwrap()
}

/// As long as a busy machine may need.
pub(crate) fn serve(functions: Registry) -> Server {
    serve_within(functions, PATIENCE)
}

/// What runs the guests of these tests.
#[cfg(feature = "compiled")]
const ENGINE: SandboxEngine = SandboxEngine::Compiled;
#[cfg(not(feature = "compiled"))]
const ENGINE: SandboxEngine = SandboxEngine::Interpreted;

pub(crate) fn with_sandbox(functions: Registry) -> Registry {
    with_sandbox_by(functions, ENGINE)
}

pub(crate) fn sandbox() -> Server {
    serve(with_sandbox(with_workloads(Registry::standard())))
}

pub(crate) fn region(server: &Server) -> Arc<dyn Backend> {
    PoolBuilder::new().url(&server.endpoints()[0]).pages(PAGES).client_name("sandbox").open().unwrap()
}

pub(crate) fn caller(server: &Server) -> Caller {
    Caller::new(region(server))
}
