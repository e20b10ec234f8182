//! A job natively and with far memory, compared.

use crate::process::{Command, Ended, marked_processes};
use crate::{MIB, NEAR_BYTES_MIN, Scratch, farfield, usual_deadline, wait_until};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A program with its arguments and input. Its result must not depend on anything else: fixed seeds, fixed order.
#[derive(Debug)]
pub struct Job {
    scratch: Scratch,
    words: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    input: Option<PathBuf>,
    deadline: Duration,
    footprint: Footprint,
    farfield_options: Vec<OsString>,
    tables_may_exceed: bool,
    native: Option<Native>,
}

/// What must happen to the memory of a job, given its native footprint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Footprint {
    /// Most of it is far-capable (heap): when it exceeds the budget, pages must leave.
    Heap,
    /// Far memory may or may not be used (much of it is files, or many processes share it).
    Any,
}

#[derive(Debug)]
struct Native {
    ended: Ended,
    folder: PathBuf,
    left_in_temporary: BTreeSet<String>,
}

/// A run with far memory.
#[derive(Debug)]
pub struct Far {
    /// How `farfield run` ended.
    pub ended: Ended,
    /// What it reported.
    pub report: Report,
    /// The near budget it had.
    pub near_limit_bytes: u64,
}

/// The report of one run.
#[derive(Clone, Debug)]
pub struct Report(pub serde_json::Value);

impl Report {
    /// Reads the report at `path`. Fails the test if there is none.
    pub fn read(path: &Path) -> Report {
        let text = std::fs::read(path).unwrap_or_else(|error| panic!("no report at {}: {error}", path.display()));
        Report(serde_json::from_slice(&text).unwrap_or_else(|error| panic!("the report is not JSON: {error}")))
    }

    /// A number of the report. Fails the test if it is absent.
    pub fn number(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("the report has no number {name}: {}", self.0))
    }
}

impl Job {
    /// A job that runs `words`. Words that are paths must be absolute: the job runs in folders of its own.
    pub fn new(name: &str, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Job {
        Job {
            scratch: Scratch::new(name),
            words: words.into_iter().map(|word| word.as_ref().to_owned()).collect(),
            environment: Vec::new(),
            input: None,
            deadline: usual_deadline(),
            footprint: Footprint::Heap,
            farfield_options: Vec::new(),
            tables_may_exceed: false,
            native: None,
        }
    }

    /// A job that compiles and runs a program of `programs/`. `None` without a compiler.
    pub fn probe(name: &str, arguments: &[&str]) -> Option<Job> {
        let mut job = Job::new(name, [""]);
        let program = crate::compile(name, &job.scratch.folder("bin"))?;
        job.words = std::iter::once(program.into_os_string()).chain(arguments.iter().map(Into::into)).collect();
        Some(job)
    }

    /// The scratch folder, for input files.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// One more argument.
    pub fn arg(mut self, word: impl AsRef<OsStr>) -> Job {
        self.words.push(word.as_ref().to_owned());
        self
    }

    /// More arguments.
    pub fn args(mut self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Job {
        self.words.extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Standard input from a file.
    pub fn input(mut self, path: &Path) -> Job {
        self.input = Some(path.to_owned());
        self
    }

    /// A variable of the environment.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Job {
        self.environment.push((name.into(), value.as_ref().to_owned()));
        self
    }

    /// What must happen to its memory.
    pub fn footprint(mut self, footprint: Footprint) -> Job {
        self.footprint = footprint;
        self
    }

    /// It touches memory so sparsely that the pager's tables alone exceed a small budget, a known limit: the peak is not
    /// compared with it.
    pub fn tables_may_exceed(mut self, exceed: bool) -> Job {
        self.tables_may_exceed = exceed;
        self
    }

    /// When each of its runs is given up.
    pub fn within(mut self, deadline: Duration) -> Job {
        self.deadline = deadline;
        self
    }

    /// One more word for `farfield run`, before the command.
    pub fn option(mut self, word: impl AsRef<OsStr>) -> Job {
        self.farfield_options.push(word.as_ref().to_owned());
        self
    }

    /// Runs the job natively and with `near_percent` of its native footprint near, and compares. Fails the test on any difference.
    pub fn check(&mut self, near_percent: u64) -> Far {
        let peak = self.native().ended.peak_rss_bytes;
        let far = self.check_with_near((peak * near_percent / 100).max(NEAR_BYTES_MIN));
        println!(
            "{near_percent} % of {} MiB near: native {:.1} s, far {:.1} s, far peak {} MiB, {} faults",
            peak / MIB,
            self.native().ended.wall.as_secs_f64(),
            far.ended.wall.as_secs_f64(),
            far.report.number("far_peak_bytes") / MIB,
            far.report.number("faults"),
        );
        far
    }

    /// The same with a near budget in bytes.
    pub fn check_with_near(&mut self, near_limit_bytes: u64) -> Far {
        self.native();
        let far = self.run_far(near_limit_bytes);
        let native = self.native.as_ref().expect("run above");
        let context = format!(
            "with {} MiB near\n--- standard error with far memory ---\n{}",
            near_limit_bytes / MIB,
            far.ended.errors
        );
        assert_eq!(far.ended.code, native.ended.code, "exit code {context}");
        compare_files(&native.ended.output, &far.ended.output, &format!("standard output {context}"));
        compare_folders(&native.folder, &self.scratch.path().join("far"), &context);
        self.judge(&far, native);
        far
    }

    /// Runs the job with far memory and compares nothing.
    pub fn run_alone(&mut self, near_limit_bytes: u64) -> Far {
        self.run_far(near_limit_bytes)
    }

    fn judge(&self, far: &Far, native: &Native) {
        let report = &far.report;
        assert_eq!(report.number("near_limit_bytes"), far.near_limit_bytes);
        assert_eq!(report.0["exit_code"].as_i64(), Some(i64::from(native.ended.code)), "{}", report.0);
        if !self.tables_may_exceed {
            assert_within_budget(report);
        }
        assert_eq!(report.number("own_calls_trapped"), 0, "calls of our own that came to our handler: {}", report.0);
        let must_go_far = native.ended.peak_rss_bytes > far.near_limit_bytes + 16 * MIB;
        if self.footprint == Footprint::Heap && must_go_far {
            assert!(report.number("far_peak_bytes") > 0, "nothing was far: {}", report.0);
            assert!(report.number("pages_out") > 0, "no page left: {}", report.0);
        }
        let left = names_in(&self.scratch.path().join("tmp-far"));
        assert_eq!(left, native.left_in_temporary, "left in TMPDIR");
    }

    fn run_far(&self, near_limit_bytes: u64) -> Far {
        let folder = self.fresh_folder("far");
        let report = self.scratch.path().join("report.json");
        let _ = std::fs::remove_file(&report);
        let mut words: Vec<OsString> = vec![farfield().into(), "run".into(), "--quiet".into(), "--near".into()];
        let near_limit_bytes = near_limit_bytes & !4095; // As the command rounds it.
        words.push(format!("{near_limit_bytes}B").into());
        words.push("--report".into());
        words.push(report.clone().into());
        words.extend(self.farfield_options.iter().cloned());
        words.push("--".into());
        words.extend(self.words.iter().cloned());
        let shared_before = names_in(Path::new("/dev/shm"));
        let ended = self.command(&folder, words, "tmp-far").run();
        let nothing_left = || marked_processes(&ended.mark).is_empty();
        wait_until("all processes of the job, and the private server, have ended", nothing_left);
        wait_until("nothing of ours is left in /dev/shm", || {
            !names_in(Path::new("/dev/shm")).difference(&shared_before).any(|name| name.contains("farfield"))
        });
        if !report.is_file() {
            panic!("no report; exit code {}, standard error:\n{}", ended.code, ended.errors);
        }
        Far { ended, report: Report::read(&report), near_limit_bytes }
    }

    fn native(&mut self) -> &Native {
        if self.native.is_none() {
            let folder = self.fresh_folder("native");
            let ended = self.command(&folder, self.words.clone(), "tmp-native").run();
            let left_in_temporary = names_in(&self.scratch.path().join("tmp-native"));
            self.native = Some(Native { ended, folder, left_in_temporary });
        }
        self.native.as_ref().expect("made above")
    }

    /// How the native run ended.
    pub fn native_run(&mut self) -> &Ended {
        &self.native().ended
    }

    fn command(&self, folder: &Path, words: Vec<OsString>, temporary: &str) -> Command {
        let temporary = self.fresh_folder(temporary);
        let mut command = Command::new(folder, words).within(self.deadline).env("TMPDIR", temporary);
        command.environment.extend(self.environment.iter().cloned());
        command.input.clone_from(&self.input);
        command
    }

    fn fresh_folder(&self, name: &str) -> PathBuf {
        let _ = std::fs::remove_dir_all(self.scratch.path().join(name));
        let path = self.scratch.folder(name);
        // Jobs that give up root write here too.
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).expect("the folder is ours");
        path
    }
}

/// The budget held: what the pager counted, metadata included, with 2 % and 16 MiB for what is in flight.
pub(crate) fn assert_within_budget(report: &Report) {
    let (peak, limit) = (report.number("near_peak_bytes"), report.number("near_limit_bytes"));
    assert!(peak <= limit + limit / 50 + 16 * MIB, "near peak {peak} exceeds the budget {limit}: {}", report.0);
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn compare_folders(native: &Path, far: &Path, context: &str) {
    let names = names_in(native);
    assert_eq!(names, names_in(far), "files of the job {context}");
    for name in names {
        let (native, far) = (native.join(&name), far.join(&name));
        if native.is_dir() {
            compare_folders(&native, &far, context);
        } else {
            compare_files(&native, &far, &format!("file {name} {context}"));
        }
    }
}

fn compare_files(native: &Path, far: &Path, what: &str) {
    let read = |path: &Path| std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (native, far) = (read(native), read(far));
    if native == far {
        return;
    }
    let at = native.iter().zip(&far).position(|(a, b)| a != b).unwrap_or(native.len().min(far.len()));
    let excerpt = |bytes: &[u8]| {
        let start = bytes[..at].iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        let end = bytes.len().min(at + 300);
        String::from_utf8_lossy(&bytes[start.max(at.saturating_sub(300))..end]).into_owned()
    };
    panic!(
        "{what}\ndiffers at byte {at} (native {} bytes, far {} bytes)\n--- native ---\n{}\n--- far ---\n{}",
        native.len(),
        far.len(),
        excerpt(&native),
        excerpt(&far)
    );
}
