//! Is anything left behind: processes, files, sockets, shared memory, mounts, whatever way a job ends?
//!
//! Danger: a machine that fills up with the remains of jobs. Each test ends with the same look around.

use farfield_tests::{FarRun, Scratch, compile, kill_marked, marked_processes, tier, wait_until};
use std::collections::BTreeSet;
use std::path::Path;

/// What one can see of this machine that a job of ours could have left.
#[derive(PartialEq, Eq, Debug)]
struct Around {
    names: BTreeSet<String>,
}

impl Around {
    fn look(temporary: &Path) -> Around {
        let mut names = BTreeSet::new();
        for folder in [Path::new("/dev/shm"), Path::new("/run"), Path::new("/tmp"), temporary] {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.contains("farfield") || folder == temporary {
                    names.insert(folder.join(name).display().to_string());
                }
            }
        }
        for line in std::fs::read_to_string("/proc/net/unix").unwrap_or_default().lines() {
            if let Some(path) = line.split_whitespace().nth(7).filter(|path| Path::new(path).starts_with(temporary)) {
                names.insert(format!("socket {path}"));
            }
        }
        Around { names }
    }
}

/// Runs `action` with a temporary folder of its own; afterwards everything is as before. `action` gives back marks of its jobs.
fn leaves_nothing(name: &str, action: impl FnOnce(&Scratch, &Path, &str) -> Vec<String>) {
    let scratch = Scratch::new(name);
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let temporary = scratch.folder("tmp");
    let before = Around::look(&temporary);
    let marks = action(&scratch, &temporary, hog.to_str().expect("an ASCII path"));
    for mark in &marks {
        let gone = || marked_processes(mark).is_empty();
        wait_until("all processes of the job and its private server are gone", gone);
    }
    let mut left = Vec::new();
    let nothing = || {
        left = Around::look(&temporary).names.difference(&before.names).cloned().collect();
        left.is_empty()
    };
    wait_until("nothing is left", nothing);
}

fn job(scratch: &Scratch, temporary: &Path, words: &[&str]) -> FarRun {
    FarRun::new(scratch, ["--near", "16M"], words).env("TMPDIR", temporary).env("XDG_RUNTIME_DIR", temporary)
}

#[test]
fn many_jobs_in_a_row_leave_nothing() {
    leaves_nothing("in-a-row", |scratch, temporary, hog| {
        let run = |_| {
            let ended = job(scratch, temporary, &[hog, "24", "1"]).run();
            assert_eq!(ended.code, 0, "{}\n{}", ended.text(), ended.errors);
            ended.mark
        };
        (0..tier(10, 100)).map(run).collect()
    });
}

#[test]
fn jobs_side_by_side_leave_nothing() {
    leaves_nothing("side-by-side", |scratch, temporary, hog| {
        let folders: Vec<Scratch> = (0..6).map(|n| Scratch::new(&format!("side-{n}"))).collect();
        let running: Vec<_> = folders.iter().map(|own| job(own, temporary, &[hog, "48", "2", "2"]).start()).collect();
        let _ = scratch;
        let ended: Vec<_> = running.into_iter().map(|running| running.wait()).collect();
        for one in &ended {
            assert_eq!(one.code, 0, "{}\n{}", one.text(), one.errors);
        }
        ended.into_iter().map(|one| one.mark).collect()
    });
}

/// Starts a job that would run for ever, waits until it pages, and ends it by a signal to `farfield run`.
fn ended_by(signal: i32) {
    leaves_nothing(&format!("signal-{signal}"), |scratch, temporary, hog| {
        let running = job(scratch, temporary, &[hog, "64", "0", "3"]).start();
        wait_until("it has started", || running.output().contains("started"));
        wait_until("it has children", || marked_processes(running.mark()).len() >= 4);
        running.signal(signal);
        wait_until("it has ended", || running.is_over());
        let ended = running.wait();
        assert_eq!(ended.code, 128 + signal, "{}", ended.errors);
        kill_marked(&ended.mark, "hog");
        vec![ended.mark]
    });
}

#[test]
fn a_runner_that_is_killed_leaves_nothing() {
    ended_by(libc::SIGKILL);
}

#[test]
fn a_program_that_kills_itself_leaves_nothing() {
    leaves_nothing("suicide", |scratch, temporary, hog| {
        let script = format!("{hog} 48 1 & {hog} 64 0 & sleep 1; kill -9 $!; wait; kill -9 $$");
        let ended = job(scratch, temporary, &["sh", "-c", &script]).run();
        assert_eq!(ended.code, 137, "{}", ended.errors);
        vec![ended.mark]
    });
}

#[test]
fn a_job_whose_program_forks_and_goes_on_leaves_nothing() {
    leaves_nothing("daemon", |scratch, temporary, hog| {
        let script = format!("({hog} 48 2 > /dev/null 2>&1 &) ; exit 5");
        let ended = job(scratch, temporary, &["sh", "-c", &script]).run();
        assert_eq!(ended.code, 5, "{}", ended.errors);
        vec![ended.mark]
    });
}

/// Jobs that were refused before the start, too.
#[test]
fn refused_jobs_leave_nothing() {
    leaves_nothing("refused", |scratch, temporary, _| {
        let run = |words: &[&str]| {
            let ended = job(scratch, temporary, words).run();
            assert!([97, 126, 127].contains(&ended.code), "{}", ended.errors);
            ended.mark
        };
        vec![run(&["/no/such/program"]), run(&["/etc/passwd"]), run(&["no-such-name"])]
    });
}
