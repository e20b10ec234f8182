//! `farfield run` around real processes.
//!
//! Danger: a program that behaves differently because we started it (an exit code, a signal, a descriptor lost), or
//! one that runs without far memory although it was asked to have it.

mod common;

use common::{Folder, Running, farfield, json, run, text, until};
use farfield_pager::config::ENV_CONTROL;
use farfield_pager::control::exit;
use farfield_pager::runner::ControlBlock;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Stdio;
use std::sync::atomic::Ordering;

const NONE: &[&str] = &[];

#[test]
fn exit_codes_pass_through() {
    let folder = Folder::new("codes");
    for code in [0, 1, 2, 7, 97, 126, 255] {
        let output = run(&folder, &["--quiet"], &["sh", "-c", &format!("exit {code}")]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", text(&output));
        assert_eq!(text(&output), "", "quiet");
    }
}

#[test]
fn a_program_killed_by_a_signal_looks_killed_by_it() {
    let folder = Folder::new("killed");
    for signal in [libc::SIGTERM, libc::SIGKILL, libc::SIGSEGV, libc::SIGABRT, libc::SIGINT, libc::SIGPIPE] {
        let report = folder.path("run.json");
        let options = [std::ffi::OsStr::new("--report"), report.as_os_str()];
        let output = run(&folder, &options, &["sh", "-c", &format!("kill -{signal} $$")]).output().unwrap();
        assert_eq!(output.status.signal(), Some(signal), "{}", text(&output));
        assert_eq!(json(&report)["exit_code"], 128 + signal);
        assert_eq!(json(&report)["signal"], signal);
    }
}

#[test]
fn signals_sent_to_us_reach_the_program_once() {
    let folder = Folder::new("forward");
    for (name, signal) in [
        ("TERM", libc::SIGTERM),
        ("INT", libc::SIGINT),
        ("HUP", libc::SIGHUP),
        ("QUIT", libc::SIGQUIT),
        ("USR1", libc::SIGUSR1),
        ("USR2", libc::SIGUSR2),
        ("WINCH", libc::SIGWINCH),
    ] {
        let script = format!("trap 'echo got; n=1$n' {name}; echo ready; until [ $n ]; do sleep 0.01; done; exit 4$n");
        let mut job = Running::start(&mut run(&folder, &["--quiet"], &["sh", "-c", &script]));
        assert_eq!(job.line(), "ready");
        job.signal(signal);
        assert_eq!(job.line(), "got", "{name}");
        assert_eq!(job.wait().code(), Some(41), "{name}");
        assert_eq!(job.rest(), Vec::<String>::new(), "{name} once");
    }
}

#[test]
fn job_control_stops_and_continues_both() {
    let folder = Folder::new("stop");
    let mut command = run(&folder, &["--quiet"], &["sh", "-c", "echo $$; read line; exit 3"]);
    // A process group of its own, as a shell gives to a job.
    let mut job = Running::start(command.stdin(Stdio::piped()).process_group(0));
    let program = job.line();
    let state = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next())
    };
    let runner = job.pid().to_string();
    job.signal(libc::SIGTSTP);
    until("both are stopped", || state(&program) == Some('T') && state(&runner) == Some('T'));
    job.signal(libc::SIGCONT);
    until("both go on", || state(&program) != Some('T') && state(&runner) != Some('T'));
    drop(job.child.stdin.take());
    assert_eq!(job.wait().code(), Some(3));
}

#[test]
fn a_key_on_the_terminal_reaches_the_program_once() {
    let folder = Folder::new("terminal");
    let (mut master, mut slave) = (0, 0);
    let none = std::ptr::null_mut;
    // SAFETY: room for two descriptors; no name wanted, no modes or size given.
    assert_eq!(unsafe { libc::openpty(&mut master, &mut slave, none(), std::ptr::null(), std::ptr::null()) }, 0);
    let script = "n=; trap 'n=1$n; echo got' INT; trap 'exit 4$n' USR1; echo $$; while :; do sleep 0.01; done";
    let mut command = run(&folder, &["--quiet"], &["sh", "-c", script]);
    // SAFETY: async-signal-safe calls on a descriptor that stays open: a session whose terminal is ours.
    unsafe {
        command.pre_exec(move || {
            let ok = libc::setsid() >= 0 && libc::ioctl(slave, libc::TIOCSCTTY, 0) >= 0 && libc::dup2(slave, 0) == 0;
            if ok { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    let mut job = Running::start(&mut command);
    let _program = job.line();
    // SAFETY: one byte from a live buffer: ^C.
    assert_eq!(unsafe { libc::write(master, b"\x03".as_ptr().cast(), 1) }, 1);
    assert_eq!(job.line(), "got");
    job.signal(libc::SIGUSR1);
    assert_eq!(job.wait().code(), Some(41), "the shell counted its interrupts");
    // SAFETY: opened above.
    unsafe { (libc::close(master), libc::close(slave)) };
}

#[test]
fn the_program_finds_its_surroundings_unchanged() {
    let folder = Folder::new("same");
    let script = "grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status; ls -l /proc/self/fd | wc -l; ulimit -n; cat; umask; pwd; \
                  echo $PPID | wc -w; env | grep -v -E '^(LD_PRELOAD|FARFIELD_|_=)' | sort";
    let with_us = run(&folder, &["--quiet"], &["sh", "-c", script]);
    let mut without_us = std::process::Command::new("sh");
    without_us.args(["-c", script]);
    for name in ["LD_PRELOAD", "FARFIELD_NEAR"] {
        without_us.env_remove(name);
    }
    let mut seen = Vec::new();
    for mut command in [without_us, with_us] {
        // SAFETY: async-signal-safe calls: a mask and dispositions as a careful service manager might leave them.
        unsafe {
            command.pre_exec(|| {
                let mut set = std::mem::zeroed();
                libc::sigemptyset(&mut set);
                libc::sigaddset(&mut set, libc::SIGUSR2);
                libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
                libc::signal(libc::SIGHUP, libc::SIG_IGN);
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                Ok(())
            });
        }
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        seen.push(String::from_utf8(output.stdout).unwrap());
    }
    assert!(seen[0].contains("SigIgn"));
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn input_and_output_are_the_program_s_own() {
    use std::io::Write;
    let folder = Folder::new("stdio");
    let mut command = run(&folder, &["--quiet"], &["cat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"bytes \x00\xff\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"bytes \x00\xff\n");
}

#[test]
fn our_library_comes_before_those_that_were_preloaded() {
    let folder = Folder::new("preload");
    let mut command = run(&folder, &["--quiet"], &["sh", "-c", "echo $LD_PRELOAD; echo $FARFIELD_CONTROL"]);
    let library = folder.library();
    let output = command.env("LD_PRELOAD", &library).output().unwrap();
    let (lines, library) = (text(&output), library.canonicalize().unwrap());
    let theirs = folder.path("libempty.so");
    assert!(lines.starts_with(&format!("{}:{}\n/proc/", library.display(), theirs.display())), "{lines}");
}

#[test]
fn the_token_is_not_in_the_environment_of_the_program() {
    let folder = Folder::new("token-environment");
    // A private server asks for it, so it is used; and nobody of the program's processes sees it.
    let script = "env; cat /proc/self/environ /proc/$$/environ | tr '\\0' '\\n'";
    let mut command = run(&folder, &["--quiet"], &["sh", "-c", script]);
    let output = command.env("FARFIELD_TOKEN", "sesame-sesame").env("KEPT", "yes").output().unwrap();
    assert!(output.status.success() && text(&output).contains("KEPT=yes"), "{}", text(&output));
    assert!(!text(&output).contains("sesame") && !text(&output).contains("FARFIELD_TOKEN"), "{}", text(&output));
}

#[test]
fn the_report_says_what_happened() {
    let folder = Folder::new("report");
    let path = folder.path("run.json");
    let output = run(&folder, &["--report", path.to_str().unwrap()], &["sh", "-c", "exit 9"]).output().unwrap();
    assert_eq!(output.status.code(), Some(9), "{}", text(&output));
    assert!(text(&output).contains("near peak"), "a summary");
    let report = json(&path);
    assert_eq!(report["exit_code"], 9);
    assert_eq!(report["command"], serde_json::json!(["sh", "-c", "exit 9"]));
    assert_eq!(report["near_limit_bytes"], 64 << 20);
    assert_eq!(report["mode"], "auto");
    assert_eq!(report["signal"], serde_json::Value::Null);
    assert!(report["wall_s"].as_f64().unwrap() > 0.0);
    assert!(report["version"].is_string());
    for name in ["near_peak_bytes", "far_peak_bytes", "faults", "pages_in", "pages_out", "zero_pages", "prefetched"] {
        assert!(report[name].is_u64(), "{name}");
    }
    for name in ["prefetch_hits", "syscalls_guarded", "processes", "refaults", "reclaim_ns"] {
        assert!(report[name].is_u64(), "{name}");
    }
    for name in ["fault_ns_p50", "fault_ns_p99"] {
        assert!(report.get(name).is_some(), "{name}");
    }
}

#[test]
fn a_report_that_cannot_be_written_costs_no_run_and_no_exit_code() {
    let folder = Folder::new("unwritable");
    let marker = folder.path("started");
    let script = format!("touch {}; exit 5", marker.display());
    let missing = folder.path("no/such/folder/run.json");
    let output = run(&folder, &["--report", missing.to_str().unwrap()], &["sh", "-c", &script]).output().unwrap();
    assert_eq!(output.status.code(), Some(exit::REFUSED));
    assert!(text(&output).contains("--report"), "{}", text(&output));
    assert!(!marker.exists(), "the program was started");
    // A disk that fills up while the program runs.
    let output = run(&folder, &["--report", "/dev/full"], &["sh", "-c", &script]).output().unwrap();
    assert_eq!(output.status.code(), Some(5), "{}", text(&output));
    assert!(text(&output).contains("No space left"), "{}", text(&output));
    assert!(marker.exists());
}

fn refused(folder: &Folder, options: &[&str], program: &[&str], code: i32, part: &str) {
    let output = run(folder, options, program).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{program:?}: {}", text(&output));
    assert!(text(&output).contains(part), "{program:?}: {}", text(&output));
    assert!(output.stdout.is_empty());
}

#[test]
fn programs_that_cannot_have_far_memory_are_not_started() {
    let folder = Folder::new("refused");
    refused(&folder, &[], &["no-such-command-anywhere"], 127, "not found");
    let plain = folder.path("plain");
    std::fs::write(&plain, "text").unwrap();
    refused(&folder, &[], &[plain.to_str().unwrap()], 126, "cannot be executed");
    let path = |path: std::path::PathBuf| path.to_str().unwrap().to_string();
    let lost = path(folder.program("lost", "#!/no/such/interpreter\n"));
    refused(&folder, &[], &[&lost], 126, "/no/such/interpreter");
    let bits = path(folder.program("bits", b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x03\0"));
    refused(&folder, &[], &[&bits], exit::REFUSED, "32-bit");
    let source = folder.path("main.c");
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let program = folder.path("static");
    let built = std::process::Command::new("cc").args(["-static", "-o"]).args([&program, &source]).output();
    if built.is_ok_and(|output| output.status.success()) {
        refused(&folder, &[], &[&path(program.clone())], exit::REFUSED, "statically linked");
        let script = path(folder.program("script", format!("#!{}\n", program.display())));
        refused(&folder, &[], &[&script], exit::REFUSED, "statically linked");
    }
    refused(&folder, &["--near", "1M"], &["true"], exit::REFUSED, "at least 16M");
    refused(&folder, &["--near", "12"], &["true"], exit::REFUSED, "unit");
    refused(&folder, &["--near", "150%"], &["true"], exit::REFUSED, "at most 100");
    refused(&folder, &["--near", "-5M"], &["true"], exit::REFUSED, "cannot be negative");
    refused(&folder, &["--near", "5 M"], &["true"], exit::REFUSED, "no space in it: 5M");
    refused(&folder, &["--far", "tcp://big"], &["true"], exit::REFUSED, "the port is missing");
    for words in [&["near", "abc"][..], &["pool", "status", "abc"]] {
        let output = farfield().args(words).output().unwrap();
        assert!(!output.status.success() && text(&output).contains("JOB is the number"), "{}", text(&output));
    }
    let negative = farfield().args(["near", "1", "-5M"]).output().unwrap();
    assert!(text(&negative).contains("cannot be negative"), "{}", text(&negative));
    refused(&folder, &["--far", "ftp://x:1"], &["true"], exit::REFUSED, "ftp");
    refused(&folder, &["--far", "ram:"], &["true"], exit::REFUSED, "beside its budget");
    refused(&folder, &["--far", "tier(lz:?size=64M,ssd:/tmp?size=64M)"], &["true"], exit::REFUSED, "lz is for heaps");
    refused(&folder, &["--far", "tier(ssd:/tmp?size=64M,ram:)"], &["true"], exit::REFUSED, "beside its budget");
    refused(&folder, &["--far", "tcp://127.0.0.1"], &["true"], exit::REFUSED, "127.0.0.1");
    refused(&folder, &["--token-file", "/no/such/file"], &["true"], exit::REFUSED, "--token-file");
    refused(&folder, &["--no-such-option"], &["true"], exit::REFUSED, "--no-such-option");
}

#[test]
fn a_program_that_changes_its_user_is_not_started() {
    // SAFETY: only reads a number.
    if unsafe { libc::getuid() } != 0 {
        return; // Only root can give a file to somebody else.
    }
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("setuid");
    let program = folder.program("program", std::fs::read("/bin/true").unwrap());
    std::os::unix::fs::chown(&program, Some(65534), None).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    refused(&folder, &[], &[program.to_str().unwrap()], exit::REFUSED, "setuid");
}

#[test]
fn a_missing_library_says_how_to_build_it() {
    let output = farfield().env("FARFIELD_PRELOAD", "/no/such.so").args(["run", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(exit::REFUSED));
    assert!(text(&output).contains("cargo build"), "{}", text(&output));
    assert!(text(&output).contains("/no/such.so"), "{}", text(&output));
}

#[test]
fn one_job_inside_another_is_refused() {
    let folder = Folder::new("nested");
    let output = run(&folder, NONE, &["true"]).env(ENV_CONTROL, "/proc/1/fd/3").output().unwrap();
    assert_eq!(output.status.code(), Some(exit::REFUSED));
    assert!(text(&output).contains("already runs"), "{}", text(&output));
}

#[test]
fn scripts_run_with_and_without_a_first_line() {
    let folder = Folder::new("scripts");
    for text in ["#!/bin/sh\nexit $1\n", "exit $1\n"] {
        let script = folder.program("script", text);
        let output = run(&folder, &["--quiet"], &[script.to_str().unwrap(), "6"]).output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{text:?}");
    }
}

// What follows needs processes that use the control block as the library does: this test binary itself, started
// again with the name of a helper.

fn helper(name: &str) -> String {
    format!("{} --exact {name} --ignored --nocapture -q", std::env::current_exe().unwrap().display())
}

fn enter() -> Option<(ControlBlock, usize)> {
    let control = ControlBlock::open(std::env::var_os(ENV_CONTROL)?.as_ref()).unwrap();
    let slot = control.take_slot(std::process::id(), farfield_os::process::identity()).unwrap();
    let index = control.slots.iter().position(|other| std::ptr::eq(slot, other)).unwrap();
    Some((control, index))
}

#[test]
#[ignore = "helper: uses memory, then is killed"]
fn helper_killed() {
    let Some((control, index)) = enter() else { return };
    // If the one before us kept its bytes, this never ends well.
    until("the one before gives its bytes back", || control.near_bytes.load(Ordering::Relaxed) == 0);
    let slot = &control.slots[index];
    slot.near_bytes.store(40 << 20, Ordering::Relaxed);
    slot.meta_bytes.store(1 << 20, Ordering::Relaxed);
    slot.far_bytes.store(100 << 20, Ordering::Relaxed);
    control.near_bytes.fetch_add(41 << 20, Ordering::Relaxed);
    control.far_bytes.fetch_add(100 << 20, Ordering::Relaxed);
    slot.counters.faults.store(1000, Ordering::Relaxed);
    slot.counters.fault_ns[farfield_pager::control::bucket_of(3500)].store(1000, Ordering::Relaxed);
    farfield_pager::runner::die_by(libc::SIGKILL);
}

#[test]
fn a_killed_process_is_counted_and_its_bytes_are_given_back() {
    let folder = Folder::new("slots");
    let path = folder.path("run.json");
    let one = helper("helper_killed");
    let script = format!("{one}; {one}; exit 8");
    let output = run(&folder, &["--report", path.to_str().unwrap()], &["sh", "-c", &script]).output().unwrap();
    assert_eq!(output.status.code(), Some(8), "{}", text(&output));
    let report = json(&path);
    assert_eq!(report["processes"], 2);
    assert_eq!(report["faults"], 2000);
    assert_eq!(report["near_peak_bytes"], 41 << 20);
    assert_eq!(report["far_peak_bytes"], 100 << 20);
    let p50 = report["fault_ns_p50"].as_f64().unwrap();
    assert!((p50 / 3500.0 - 1.0).abs() < 0.13, "{p50}");
    assert!(text(&output).contains("2000 faults"), "{}", text(&output));
}

#[test]
#[ignore = "helper: uses memory until its input ends"]
fn helper_daemon() {
    let Some(_slot) = enter() else { return };
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// A named pipe: whoever reads it lives until the end from [`writer_of`] is dropped.
fn fifo(folder: &Folder) -> std::path::PathBuf {
    let path = folder.path("fifo");
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a zero-terminated path.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    path
}

fn writer_of(fifo: &std::path::Path) -> std::fs::File {
    let mut writer = None;
    until("the child opens its side", || {
        // Without blocking, opening fails until then.
        writer = std::fs::File::options().write(true).custom_flags(libc::O_NONBLOCK).open(fifo).ok();
        writer.is_some()
    });
    writer.unwrap()
}

#[test]
fn children_that_outlive_the_program_keep_their_far_memory() {
    let folder = Folder::new("daemon");
    let (fifo, errors) = (fifo(&folder), folder.path("stderr"));
    let script = format!("{} < {} > /dev/null & exit 6", helper("helper_daemon"), fifo.display());
    let mut command = run(&folder, NONE, &["sh", "-c", &script]);
    let mut job = Running::start(command.stderr(std::fs::File::create(&errors).unwrap()));
    let writer = writer_of(&fifo);
    until("it says that it waits", || std::fs::read_to_string(&errors).unwrap().contains("waiting"));
    assert_eq!(job.child.try_wait().unwrap(), None);
    drop(writer);
    assert_eq!(job.wait().code(), Some(6));
}

#[test]
fn a_second_interrupt_ends_the_wait_for_children() {
    let folder = Folder::new("impatient");
    let (fifo, errors) = (fifo(&folder), folder.path("stderr"));
    let script = format!("(trap '' INT; exec {} < {} > /dev/null) & exit 6", helper("helper_daemon"), fifo.display());
    let mut command = run(&folder, NONE, &["sh", "-c", &script]);
    let mut job = Running::start(command.stderr(std::fs::File::create(&errors).unwrap()));
    // The child ends when the test does.
    let _writer = writer_of(&fifo);
    until("it says that it waits", || std::fs::read_to_string(&errors).unwrap().contains("waiting"));
    job.signal(libc::SIGINT);
    // Two signals of one kind become one if the first has not been taken.
    until("it ends", || {
        job.signal(libc::SIGINT);
        matches!(job.child.try_wait(), Ok(Some(_)))
    });
    assert_eq!(job.wait().code(), Some(6));
}

#[test]
#[ignore = "helper: stops because of us"]
fn helper_failed() {
    let Some((control, _)) = enter() else { return };
    control.fail(exit::SERVER_LOST, b"memory server 0 is gone");
    std::process::exit(exit::SERVER_LOST);
}

#[test]
fn a_failure_of_ours_is_named_and_has_its_code() {
    let folder = Folder::new("failure");
    let path = folder.path("run.json");
    let script = format!("{}; exit 1", helper("helper_failed"));
    let output =
        run(&folder, &["--quiet", "--report", path.to_str().unwrap()], &["sh", "-c", &script]).output().unwrap();
    assert_eq!(output.status.code(), Some(exit::SERVER_LOST), "{}", text(&output));
    assert!(text(&output).contains("memory server 0 is gone"), "{}", text(&output));
    let report = json(&path);
    assert_eq!(report["exit_code"], 1, "the program's own");
    assert_eq!(report["failure"]["exit_code"], exit::SERVER_LOST);
    assert_eq!(report["failure"]["reason"], "memory server 0 is gone");
}
