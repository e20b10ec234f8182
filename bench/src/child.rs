//! Runs one program with a deadline and never leaves it, or what it started, behind.

use crate::sys::{self, Ended, Gave};
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The user asked to stop.
#[derive(Debug)]
pub(crate) struct Interrupted(pub(crate) i32);

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stopped by signal {}", self.0)
    }
}

impl std::error::Error for Interrupted {}

/// It was ended, because it had taken so long.
#[derive(Debug)]
pub(crate) struct Late(Duration);

impl std::fmt::Display for Late {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "did not end within {} s", self.0.as_secs())
    }
}

impl std::error::Error for Late {}

/// What a program left.
pub(crate) struct Finished {
    pub(crate) ended: Ended,
    /// From its start to its end.
    pub(crate) wall: Duration,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Finished {
    /// The output of a program that succeeded; what it said if it did not.
    pub(crate) fn success(&self) -> Result<&str> {
        if self.ended.code == 0 {
            return Ok(&self.stdout);
        }
        let said: Vec<&str> = self.stderr.lines().collect();
        let last = said[said.len().saturating_sub(5)..].join(" | ");
        match self.ended.signal {
            0 => bail!("ended with code {}: {last}{}", self.ended.code, self.stdout.trim()),
            signal => bail!("killed by signal {signal}: {last}"),
        }
    }
}

/// Checks whether a program could not be run because it is not installed.
pub(crate) fn is_absent(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    kinds.any(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// Leads a process group of its own; what is left of it is killed in the end.
struct Group {
    pid: u32,
    reaped: bool,
}

impl Drop for Group {
    fn drop(&mut self) {
        sys::kill(-(self.pid as i32)).ok(); // Nobody left is the usual case.
        if !self.reaped {
            sys::reap_killed(self.pid);
        }
    }
}

/// The environment variable that names the folder for files of a program.
const FILES: &str = "FARFIELD_BENCH_FILES";

/// Folder for the files of one program. A program that is killed leaves them behind, so they are removed here.
struct ProgramFiles(PathBuf);

impl ProgramFiles {
    fn new(scratch: &Path, command: &mut Command) -> Result<ProgramFiles> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let folder = scratch.join(format!("files-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        command.env(FILES, &folder);
        Ok(ProgramFiles(folder))
    }
}

impl Drop for ProgramFiles {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok(); // What a dying program still writes goes with the scratch folder.
    }
}

/// A program that runs beside others until this is dropped.
pub(crate) struct Beside {
    group: Group,
    _files: ProgramFiles,
}

impl Beside {
    /// Starts `command`, whose output nobody reads.
    pub(crate) fn start(mut command: Command, scratch: &Path) -> Result<Beside> {
        let err = scratch.join("stderr");
        let files = ProgramFiles::new(scratch, &mut command)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(err)?).process_group(0);
        let child =
            command.spawn().with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
        Ok(Beside { group: Group { pid: child.id(), reaped: false }, _files: files })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.group.pid
    }

    /// Whoever was to run beside something and has ended did not.
    pub(crate) fn ensure_runs(&mut self) -> Result<()> {
        match sys::wait_for(self.group.pid, Instant::now())? {
            Err(Gave::TimedOut) => Ok(()),
            Err(Gave::Stopped(signal)) => Err(Interrupted(signal).into()),
            Ok(ended) => {
                self.group.reaped = true;
                bail!("the job beside it ended with code {}", ended.code)
            }
        }
    }
}

/// Runs `command` to its end. Its output goes through files in `scratch`, so that a long one blocks nobody.
pub(crate) fn run(mut command: Command, scratch: &Path, patience: Duration) -> Result<Finished> {
    let (out, err) = (scratch.join("stdout"), scratch.join("stderr"));
    let _files = ProgramFiles::new(scratch, &mut command)?;
    command.stdin(Stdio::null()).stdout(File::create(&out)?).stderr(File::create(&err)?).process_group(0);
    sys::forget_resident_peak().context("cannot tell how much memory the program will have used")?;
    let started = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
    let mut group = Group { pid: child.id(), reaped: false };
    let ended = match sys::wait_for(group.pid, Instant::now() + patience)? {
        Ok(ended) => ended,
        Err(Gave::TimedOut) => return Err(Late(patience).into()),
        Err(Gave::Stopped(signal)) => return Err(Interrupted(signal).into()),
    };
    let wall = started.elapsed();
    group.reaped = true;
    drop(group);
    let text = |path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok(Finished { ended, wall, stdout: text(&out)?, stderr: text(&err)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, patience: Duration) -> Result<Finished> {
        let scratch =
            std::env::temp_dir().join(format!("farfield-bench-child-{}-{}", std::process::id(), script.len()));
        fs::create_dir_all(&scratch)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let finished = run(command, &scratch, patience);
        fs::remove_dir_all(&scratch)?;
        finished
    }

    #[test]
    fn output_and_cpu_time_come_back() {
        let finished =
            shell("echo out; i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done", Duration::from_secs(30)).unwrap();
        assert_eq!(finished.success().unwrap(), "out\n");
        assert!(finished.ended.cpu_user + finished.ended.cpu_system > Duration::ZERO);
        assert!(finished.ended.resident_peak_bytes > 100_000);
    }

    #[test]
    fn memory_that_the_driver_used_before_is_not_counted_for_the_program() {
        const BYTES: usize = 256 << 20;
        sys::touch(BYTES, false).unwrap();
        // Other tests of this process may touch memory, too, but not all the time.
        let peak = (0..20).map(|_| shell("exit 0", Duration::from_secs(30)).unwrap().ended.resident_peak_bytes).min();
        assert!(peak.is_some_and(|peak| peak < BYTES as u64 / 2), "{peak:?}");
    }

    #[test]
    fn failure_repeats_what_the_program_said() {
        let failed = shell("echo because >&2; exit 3", Duration::from_secs(30)).unwrap();
        let error = failed.success().unwrap_err().to_string();
        assert!(error.contains("code 3") && error.contains("because"), "{error}");
        let killed = shell("kill -9 $$", Duration::from_secs(30)).unwrap();
        assert!(killed.success().unwrap_err().to_string().contains("signal 9"));
    }

    #[test]
    fn files_of_a_program_that_is_killed_are_removed() {
        let scratch = std::env::temp_dir().join(format!("farfield-bench-files-{}", std::process::id()));
        fs::create_dir_all(&scratch).unwrap();
        for (script, ends) in [("echo $FARFIELD_BENCH_FILES; exit 0", 0), ("kill -9 $$", 9), ("sleep 1000", -1)] {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", &format!("echo text > $FARFIELD_BENCH_FILES/one || exit 3; {script}")]);
            match run(command, &scratch, Duration::from_secs(if ends < 0 { 1 } else { 30 })) {
                Ok(finished) => assert_eq!(finished.ended.signal, ends, "{script}: {}", finished.stderr),
                Err(error) => assert!(ends < 0 && error.is::<Late>(), "{script}: {error}"),
            }
            let mut left = fs::read_dir(&scratch).unwrap().map(|entry| entry.unwrap().file_name());
            assert!(left.all(|name| name == "stdout" || name == "stderr"), "{script}");
        }
        fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    fn late_program_is_killed_with_its_children() {
        let pid_file = std::env::temp_dir().join(format!("farfield-bench-pid-{}", std::process::id()));
        let script = format!("sleep 1000 & echo $! > {}; wait", pid_file.display());
        let mut patience = Duration::from_millis(300);
        // On a busy machine the script may be killed before it has started its child; then it gets more time.
        let pid = loop {
            let error = shell(&script, patience).err().unwrap();
            assert!(error.to_string().contains("did not end"));
            match fs::read_to_string(&pid_file) {
                Ok(pid) if pid.ends_with('\n') => break pid,
                _ => patience *= 2,
            }
            assert!(patience < Duration::from_secs(60), "the script never gets to start its child");
        };
        let stat = format!("/proc/{}/stat", pid.trim());
        let deadline = Instant::now() + Duration::from_secs(10);
        // Gone, or a zombie that its new parent has not collected yet.
        while fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z ")) {
            assert!(Instant::now() < deadline, "the child of the late program is still there");
            std::thread::yield_now();
        }
        fs::remove_file(pid_file).ok();
    }
}
