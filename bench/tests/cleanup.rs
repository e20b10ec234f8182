//! Guards against leaving swap on, a cgroup or a filled zram device behind, on a real kernel: stopped by Ctrl-C, and killed.
//!
//! Needs root, zram and no other swap; elsewhere the driver itself says that the baseline is unavailable, and there is
//! nothing to leave behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(90);

fn wait_until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} did not happen within {DEADLINE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("farfield-bench-cleanup-{}-{name}", std::process::id()));
    fs::create_dir_all(&path).unwrap();
    path
}

fn bench(folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-bench"));
    command.args(["run", "paging/random", "--only", "swap-zram", "--results"]).arg(folder.join("results"));
    command.arg("--scratch").arg(folder.join("scratch")).args(more).stdin(Stdio::null());
    command
}

/// Runs the smoke variant. `None` if this machine has no such baseline, in which case the driver must have said so.
fn smoke(folder: &Path) -> Option<Output> {
    let output = bench(folder, &["--quick"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let line = fs::read_to_string(folder.join("results/paging-random.jsonl")).unwrap();
    if line.contains("\"baseline\":\"unavailable\"") {
        assert!(line.contains("\"baseline_why\""), "{line}");
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stdout));
        return None;
    }
    Some(output)
}

fn cgroup(pid: u32) -> Option<PathBuf> {
    let roots = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    roots.iter().map(|root| Path::new(root).join(format!("farfield-bench-{pid}"))).find(|path| path.exists())
}

/// A driver that ends with the test, also if that fails.
struct Driver(Child);

impl Drop for Driver {
    fn drop(&mut self) {
        if self.0.try_wait().unwrap().is_none() {
            send("TERM", &self.0);
            wait(&mut self.0);
        }
    }
}

fn wait(child: &mut Child) -> ExitStatus {
    wait_until("the end of the driver", || child.try_wait().unwrap())
}

/// A run that has a program swapping right now.
fn swapping(folder: &Path) -> Driver {
    // So many accesses that it does not end by itself between our look and our signal.
    let mut command = bench(folder, &["--set", "ops=20000000"]);
    let child = Driver(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    wait_until("swapping", || {
        let group = cgroup(child.0.id())?;
        let inside = fs::read_to_string(group.join("cgroup.procs")).ok()?;
        (!inside.is_empty()).then_some(())
    });
    child
}

fn send(signal: &str, child: &Child) {
    let status = Command::new("/bin/sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().unwrap();
    assert!(status.success());
}

/// The swap area that `farfield-bench` made is gone, and so are its cgroup and its scratch folder.
fn assert_clean(folder: &Path, pid: u32) {
    assert_eq!(fs::read_to_string("/run/farfield-bench/ledger.json").unwrap(), "[]");
    let swaps = fs::read_to_string("/proc/swaps").unwrap();
    assert_eq!(swaps.lines().count(), 1, "{swaps}");
    assert_eq!(cgroup(pid), None);
    let own = folder.join(format!("scratch/farfield-bench-{pid}"));
    assert!(!own.exists(), "{} is left behind", own.display());
}

#[test]
fn interrupted_and_killed_runs_leave_nothing_behind() {
    let first = folder("smoke");
    if smoke(&first).is_none() {
        return;
    }
    // Ctrl-C in the middle.
    let interrupted = folder("interrupted");
    let mut child = swapping(&interrupted);
    send("INT", &child.0);
    assert_eq!(wait(&mut child.0).code(), Some(130));
    assert_clean(&interrupted, child.0.id());
    assert!(!interrupted.join("results").exists(), "half a run was recorded");

    // Killed, so that it cannot clean up; its keeper does.
    let killed = folder("killed");
    let mut child = swapping(&killed);
    send("KILL", &child.0);
    wait(&mut child.0);
    wait_until("the keeper's work", || {
        let ledger = fs::read_to_string("/run/farfield-bench/ledger.json").unwrap();
        (ledger == "[]").then_some(())
    });
    fs::remove_dir_all(killed.join("scratch")).unwrap();
    assert_clean(&killed, child.0.id());

    for folder in [first, interrupted, killed] {
        fs::remove_dir_all(folder).unwrap();
    }
}
