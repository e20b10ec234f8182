//! Do the memory and system calls mean the same with far memory? Small C programs that print a transcript, with 16 MiB near.
//!
//! Danger: a call that works on near memory and fails, lies or loses data on far memory.

use std::process::{Command, Stdio};

use farfield_tests::{Footprint, Job, MIB, compile_with, program, skip, tier};

const NEAR: u64 = 16 * MIB;

/// The transcript is the same, in signal mode and with handler threads.
fn same_in_mode(name: &str, arguments: &[&str], mode: &str) {
    let Some(job) = Job::probe(name, arguments) else { return };
    let mut job = job.option("--mode").option(mode).tables_may_exceed(name == "reservations");
    let far = job.check_with_near(NEAR);
    println!("{name}: {:.1} s, {}", far.ended.wall.as_secs_f64(), far.report.0);
}

/// Each probe in signal mode, and with handler threads if `$handler_threads`: where the same code answers in both modes, the
/// CI tier tries one.
macro_rules! probes {
    ($handler_threads:expr; $($name:ident $arguments:expr),* $(,)?) => {
        $(mod $name {
            use super::*;

            #[test]
            fn means_the_same() {
                same_in_mode(stringify!($name), &$arguments, "auto");
            }
            #[test]
            fn means_the_same_with_handler_threads() {
                if $handler_threads {
                    same_in_mode(stringify!($name), &$arguments, "thread");
                }
            }
        })*
    };
}

probes! { true;
    threads [],
    signals [],
    delivery [],
}

// Kills, switches and stopped servers page and fork with handler threads, too, in the CI tier.
probes! { farfield_tests::deep();
    paging [],
    fork_far [tier("20", "32")],
    fork_stacks [],
    borrowers [tier("2000", "40000")],
    big_io [],
    exec_far [],
    async_io [],
    waiting_calls [],
    files [],
    mremap [],
    mmap_edges [],
    counters [],
    contexts [],
    thread_pointer [],
    itimer [],
    many_maps [],
    identity [],
    hints [],
    droppable [],
    reservations [],
    brk [],
    descriptors [],
    direct_io [],
    seccomp_own [],
    inaccessible [],
    foreign [],
    system_calls [],
    direct_calls [],
}

/// Calls on what is near do not trap, neither before anything is far nor afterwards.
#[test]
fn calls_on_near_memory_need_no_trap() {
    for argument in ["dormant", "armed"] {
        let Some(job) = Job::probe("direct_calls", &[argument]) else { return };
        let report = job.footprint(Footprint::Any).check_with_near(NEAR).report;
        assert!(report.number("syscalls_guarded") < 1000, "{argument}, of 100,000 calls: {}", report.0);
    }
}

/// `FARFIELD_SEED` chooses other histories; `cargo x soak` goes on for as long as one likes.
fn random_histories(mode: &str) {
    let seed = std::env::var("FARFIELD_SEED").unwrap_or_else(|_| "0".into());
    same_in_mode("torture", &[tier("1", "60"), &seed], mode);
}

#[test]
fn random_histories_match_the_model() {
    random_histories("auto");
}

#[test]
fn random_histories_match_the_model_with_handler_threads() {
    if farfield_tests::deep() {
        random_histories("thread");
    }
}

#[test]
fn native_asynchronous_io_means_the_same() {
    same_in_mode("async_io", &["native"], "auto");
}

#[test]
fn native_asynchronous_io_means_the_same_with_handler_threads() {
    if farfield_tests::deep() {
        same_in_mode("async_io", &["native"], "thread");
    }
}

#[test]
fn a_userfaultfd_of_the_program_lives_beside_ours() {
    same_in_mode("own_faults", &["early"], "auto");
    same_in_mode("own_faults", &["late"], "auto");
}

#[test]
fn a_userfaultfd_of_the_program_lives_beside_ours_with_handler_threads() {
    same_in_mode("own_faults", &["early"], "thread");
    if farfield_tests::deep() {
        same_in_mode("own_faults", &["late"], "thread");
    }
}

#[test]
fn every_way_to_end_comes_out_unchanged() {
    let ways = [
        "return",
        "zero",
        "exit",
        "_exit",
        "raw",
        "thread",
        "abort",
        "term",
        "kill",
        "segv",
        "bus",
        "sys",
        "fpe",
        "ill",
        "pthread_exit",
        "exec",
        "orphan",
    ];
    let mut failures = Vec::new();
    for way in ways {
        let check = || {
            let Some(mut job) = Job::probe("exits", &[way]) else { return };
            job.check_with_near(NEAR);
        };
        if std::panic::catch_unwind(check).is_err() {
            failures.push(way);
        }
    }
    assert!(failures.is_empty(), "ways that came out otherwise: {failures:?}");
}

/// Where more threads want a processor than there are, locks of ours are waited for that nobody ever waits for else.
#[test]
fn programs_fork_on_a_busy_machine() {
    if !farfield_tests::deep() {
        return;
    }
    let busy = || Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().expect("a shell");
    let mut load: Vec<_> = (0..8).map(|_| busy()).collect();
    let outcome = std::panic::catch_unwind(|| {
        let Some(mut job) = Job::probe("fork_far", &[]) else { return };
        for _ in 0..60 {
            job.check_with_near(NEAR);
        }
    });
    for shell in &mut load {
        let _ = shell.kill();
        let _ = shell.wait();
    }
    assert!(outcome.is_ok(), "see above");
}

/// The program that is started is itself a script, or found by PATH.
#[test]
fn scripts_are_programs() {
    let job = Job::new("scripts", ["sh"]).footprint(Footprint::Any);
    let script = job.scratch().file("script", "#!/bin/sh\necho \"$0\" has $# arguments: \"$@\"; exit 9\n");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("the file is ours");
    job.arg("-c").arg("exec \"$0\" 'a b' c").arg(script).check_with_near(NEAR);
    if program("env").is_none() {
        skip("no env");
        return;
    }
    Job::new("by-path", ["env", "printf", "%s-%s\\n", "one", "two"]).footprint(Footprint::Any).check_with_near(NEAR);
}

/// A program that is executed inside a job is loaded under our filter, before our handlers are there.
#[test]
fn programs_with_aligned_libraries_start_inside_a_job() {
    let mut job = Job::new("aligned", ["sh"]);
    let folder = job.scratch().path().to_owned();
    let aligned = ["-shared", "-fPIC", "-Wl,-z,max-page-size=0x200000"];
    let Some(library) = compile_with("aligned_library", &folder, "libaligned.so", &aligned) else { return };
    let library = library.to_str().expect("an ASCII path");
    let run_path = format!("-Wl,-rpath,{}", folder.display());
    // Behind the source, where the linker looks for what is missing so far.
    let flags = ["-Wl,--no-as-needed", library, &run_path];
    let Some(binary) = compile_with("aligned", &folder, "aligned", &flags) else { return };
    job = job.arg("-c").arg("\"$0\"; exit $?").arg(binary);
    let far = job.check_with_near(NEAR);
    assert!(far.report.number("far_peak_bytes") > 16 << 20, "{}", far.report.0);
}

/// The loader maps tables of its own, and says what it does not find, before our handlers are there.
#[test]
fn programs_with_many_symbols_or_without_a_library_are_loaded_inside_a_job_as_outside() {
    let mut job = Job::new("many-symbols", ["sh"]).footprint(Footprint::Any);
    let folder = job.scratch().path().to_owned();
    let shared = ["-shared", "-fPIC"];
    let Some(library) = compile_with("many_symbols", &folder, "libmany.so", &shared) else { return };
    let Some(missing) = compile_with("many_symbols", &folder, "libmissing.so", &shared) else { return };
    let run_path = format!("-Wl,-rpath,{}", folder.display());
    let link = |library: &std::path::Path, name: &str| {
        let library = library.to_str().expect("an ASCII path");
        compile_with("uses_symbols", &folder, name, &["-Wl,--no-as-needed", library, &run_path])
            .expect("the compiler is there")
    };
    let (with, without) = (link(&library, "with"), link(&missing, "without"));
    std::fs::remove_file(missing).expect("compiled above");
    job = job.arg("-c").arg("\"$0\"; echo $?; \"$1\" 2>&1; echo $?").arg(with).arg(without);
    let far = job.check_with_near(NEAR);
    let said = far.ended.text();
    assert!(said.starts_with("the library says 42\n0\n") && said.ends_with("\n127\n"), "{said}");
}
