//! Do programs run where people put them: in pid namespaces, under limits and debuggers, with libraries of their own?
//!
//! Danger: a situation in which the program hangs, fails without a word, or something happens to a stranger.

use farfield_tests::{
    Command, Ended, FarRun, Footprint, Job, MIB, Report, Scratch, compile, compile_with, deep, farfield, program, skip,
    tier,
};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

const NEAR: u64 = 16 * MIB;

/// May this user make pid namespaces?
fn may_have_namespaces() -> bool {
    let may = program("unshare").is_some_and(|unshare| {
        let made =
            std::process::Command::new(unshare).args(["-pf", "true"]).stderr(std::process::Stdio::null()).status();
        made.is_ok_and(|status| status.success())
    });
    if !may {
        skip("no pid namespaces for this user");
    }
    may
}

fn shell(name: &str, script: &str) -> Job {
    Job::new(name, ["sh", "-c", script]).footprint(Footprint::Any)
}

/// Runs `farfield run -- WORDS` under a filter that answers the call with this error. `None` without a compiler.
fn run_without(scratch: &Scratch, call: libc::c_long, errno: i32, words: &[&str]) -> Option<Ended> {
    let filtered = compile("without_call", scratch.path())?;
    let mut all: Vec<OsString> = vec![filtered.into(), call.to_string().into(), errno.to_string().into()];
    all.extend([farfield().into(), "run".into(), "--near".into(), "16M".into()]);
    all.extend(["--report".into(), scratch.path().join("report.json").into(), "--".into()]);
    all.extend(words.iter().map(OsString::from));
    Some(Command::new(&scratch.folder("run"), all).run())
}

/// Docker's profile hides the first from containers without CAP_SYS_ADMIN, and so does our own filter. Without the second, pages leave
/// one by one.
#[test]
fn programs_in_a_container_without_clone3_or_process_madvise_have_far_memory() {
    for call in [libc::SYS_clone3, libc::SYS_process_madvise] {
        has_far_memory_without(call);
    }
}

fn has_far_memory_without(call: libc::c_long) {
    let allocates = ["perl", "-e", "$x = 'x' x (40 << 20); print length $x"];
    let scratch = Scratch::new("without-call");
    let Some(ended) = run_without(&scratch, call, libc::ENOSYS, &allocates) else { return };
    assert_eq!((ended.code, ended.text().as_str()), (0, "41943040"), "{}", ended.errors);
    let report = Report::read(&scratch.path().join("report.json"));
    assert!(report.number("far_peak_bytes") > 16 * MIB, "{}", report.0);
}

/// Podman's profile forbids the second.
#[test]
fn a_container_that_forbids_what_paging_needs_is_told_so_at_the_start() {
    for (call, name) in [(libc::SYS_userfaultfd, "userfaultfd"), (libc::SYS_vmsplice, "vmsplice")] {
        let scratch = Scratch::new("without-call");
        let Some(ended) = run_without(&scratch, call, libc::EPERM, &["true"]) else { return };
        assert_eq!(ended.code, 97, "{}", ended.errors);
        let advice = format!("seccomp profile must let {name} through");
        assert!(ended.errors.contains(&advice), "{}", ended.errors);
    }
}

/// Two programs have number 1, each in its own namespace, and so has somebody outside.
#[test]
fn jobs_with_pid_namespaces_of_their_own_end() {
    if !may_have_namespaces() {
        return;
    }
    let job =
        shell("namespaces", "unshare -pf \"$0\" \"$1\" > one & unshare -pf \"$0\" \"$1\" > two; wait; cat one two");
    let Some(probe) = compile("fork_far", &job.scratch().folder("bin")) else { return };
    // Two families of processes at once: their tables alone take more than the least budget, and so may what dozens of their
    // threads hold, each in a call that waits.
    let far = job.tables_may_exceed(true).arg(probe).arg(tier("20", "32")).check_with_near(2 * NEAR);
    assert!(far.report.number("processes") >= 5, "{}", far.report.0);
}

/// A namespace with a view of `/proc` of its own, in which the runner is not, or is somebody else.
#[test]
fn namespaces_with_a_proc_of_their_own_belong_to_the_job() {
    if !may_have_namespaces() {
        return;
    }
    let job = shell("own-proc", "unshare -pf --mount-proc sh -c '\"$0\" \"$1\"; \"$0\" \"$1\"' \"$0\" \"$1\"");
    let Some(probe) = compile("fork_far", &job.scratch().folder("bin")) else { return };
    job.arg(probe).arg(tier("20", "32")).check_with_near(NEAR);
}

/// Signals for processes that outlive their program go to these, by whatever numbers they know themselves.
#[test]
fn signals_reach_processes_of_the_job_and_no_stranger() {
    if !may_have_namespaces() {
        return;
    }
    let scratch = Scratch::new("strangers");
    // Number 1 outside is this shell, in a namespace that the test made; inside it is what the program leaves behind.
    let script = r#"
        trap 'echo a stranger was hit' TERM
        "$0" run -q --near 16M -- sh -c 'unshare -pf sh "$0" & exit 0' "$1" > said &
        runner=$!
        until grep -q ready said; do sleep 0.1; done
        until grep -q reached said; do kill -TERM $runner 2>/dev/null || break; sleep 0.5; done
        wait $runner
        cat said
    "#;
    let inside = "trap 'echo reached; exit' TERM\necho ready\nwhile :; do sleep 0.1; done\n";
    let inside = scratch.file("inside.sh", inside);
    let mut command = Command::new(&scratch.folder("run"), ["unshare", "-pf", "--mount-proc", "sh", "-c", script]);
    command.words.extend([farfield().into(), inside.into()]);
    let ended = command.run();
    assert_eq!(ended.text(), "ready\nreached\n", "{}", ended.errors);
}

#[test]
fn libraries_that_a_program_preloads_stay() {
    let job = shell(
        "preloads",
        "count() { sh -c 'grep -c libown /proc/$$/maps > n; test $(cat n) -gt 0 && echo there || echo gone'; }; \
         LD_PRELOAD=$0; export LD_PRELOAD; count; \
         LD_PRELOAD=$0${LD_PRELOAD:+:$LD_PRELOAD} count; \
         sh -c 'sh -c \"grep -c libown /proc/\\$\\$/maps >/dev/null && echo there || echo gone\"; true'; \
         LD_PRELOAD= count; unset LD_PRELOAD; count",
    );
    let folder = job.scratch().folder("bin");
    let Some(library) = compile_with("aligned_library", &folder, "libown.so", &["-shared", "-fPIC"]) else { return };
    let mut job = job.arg(library);
    let far = job.check_with_near(NEAR);
    assert_eq!(far.ended.text(), "there\nthere\nthere\ngone\ngone\n");
}

/// Functions of ours stand in front of the C library's, too.
#[test]
fn a_library_that_a_program_preloads_sees_its_calls() {
    let job = shell("sees-calls", "LD_PRELOAD=$0 exec \"$1\" armed");
    let folder = job.scratch().folder("bin");
    let Some(library) = compile_with("sees_calls", &folder, "libsees.so", &["-shared", "-fPIC"]) else { return };
    let Some(probe) = compile("direct_calls", &folder) else { return };
    let mut job = job.arg(library).arg(probe);
    let far = job.check_with_near(NEAR);
    assert!(far.ended.text().contains("100000 calls seen"), "{}", far.ended.text());
}

#[test]
fn limits_on_address_space_and_data_mean_the_same() {
    for mode in tier(&["auto"][..], &["auto", "thread"]) {
        let Some(job) = Job::probe("limits", &[]) else { return };
        job.option("--mode").option(*mode).check_with_near(NEAR);
    }
}

/// By the shell that starts the program, as people do it.
#[test]
fn limits_of_a_shell_are_kept_by_what_it_executes() {
    for limit in ["-v 2000000", "-d 2000000", "-Sv 1500000"] {
        let job = shell("ulimit", &format!("ulimit {limit}; ulimit {}; exec \"$0\" shown", &limit[..3]));
        let Some(probe) = compile("limits", &job.scratch().folder("bin")) else { return };
        job.arg(probe).check_with_near(NEAR);
    }
}

/// Before the job begins: the runner and its server live with it, and the program has it.
#[test]
fn a_limit_from_before_the_job_is_the_programs() {
    let scratch = Scratch::new("limited");
    let Some(probe) = compile("limits", &scratch.folder("bin")) else { return };
    let words = |before: &str| {
        let script = format!("ulimit {before}; exec \"$0\" \"$@\"");
        vec!["sh".to_owned(), "-c".to_owned(), script]
    };
    for before in ["-Sv 2000000", "-Sd 2000000"] {
        let run = |words: Vec<String>, more: &[&str]| {
            let mut command = Command::new(&scratch.folder("run"), words);
            command.words.extend(more.iter().map(Into::into));
            command.run()
        };
        let probe = probe.to_str().expect("an ASCII path");
        let native = run(words(before), &[probe, "shown"]);
        let farfield = farfield();
        let farfield = farfield.to_str().expect("an ASCII path");
        let far = run(words(before), &[farfield, "run", "--quiet", "--near", "16M", "--", probe, "shown"]);
        assert_eq!((far.code, far.text()), (native.code, native.text()), "{before}: {}", far.errors);
    }
}

/// A hard limit cannot be lifted by everybody; then nothing starts, and the message says what to do.
#[test]
fn a_hard_limit_that_stays_is_refused_with_advice() {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        skip("not root: the binary may lie where no other user gets to it");
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let scratch = Scratch::new("hard-limit");
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).expect("the folder is ours");
    let copy = |from: &Path| {
        let to = scratch.path().join(from.file_name().expect("a file"));
        std::fs::copy(from, &to).expect("room in the scratch folder");
        to
    };
    let binary = copy(&farfield());
    copy(&farfield().with_file_name("libfarfield_preload.so"));
    for (option, what) in [("v", "address space"), ("d", "data")] {
        let mut command = std::process::Command::new("sh");
        command.arg("-c").arg(format!("ulimit -{option} 3000000; exec \"$0\" run --near 16M -- true")).arg(&binary);
        let output = command.uid(65534).gid(65534).current_dir("/").output().expect("a shell starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(97), "{errors}");
        assert!(errors.contains(what) && errors.contains(&format!("ulimit -{option} 3000000; exec")), "{errors}");
    }
}

#[test]
fn parents_may_trace_their_children() {
    for mode in tier(&["auto"][..], &["auto", "thread"]) {
        let Some(job) = Job::probe("traced", &[]) else { return };
        let far = job.footprint(Footprint::Any).option("--mode").option(*mode).check_with_near(NEAR);
        assert!(far.ended.errors.contains("handle SIGSYS SIGBUS nostop noprint pass"), "{}", far.ended.errors);
    }
}

/// The program of a job may ask to be traced and forget about it: its parent is the runner.
#[test]
fn a_program_that_asks_to_be_traced_is_not_left_standing() {
    let scratch = Scratch::new("trace-me");
    let source = scratch.file("ask.c", ASKS);
    let Some(compiler) = program("cc") else { return };
    let binary = scratch.path().join("ask");
    let compiled = std::process::Command::new(compiler).arg("-o").arg(&binary).arg(&source).status();
    assert!(compiled.is_ok_and(|status| status.success()));
    let ended = FarRun::new(&scratch, ["--near", "16M"], [&binary]).run();
    assert_eq!((ended.code, ended.text().as_str()), (6, "0 -1\n"), "{}", ended.errors);
}

const ASKS: &str = "#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
int main(void) {
    long first = ptrace(PTRACE_TRACEME, 0, 0, 0), second = ptrace(PTRACE_TRACEME, 0, 0, 0);
    for (int i = 0; i < 20; i++) { char *volatile p = malloc(1 << 20); p[5] = 1; free(p); }
    printf(\"%ld %ld\\n\", first, second);
    return 6;
}
";

/// gdb with the words that the message has for it.
#[test]
fn gdb_runs_a_program_inside_a_job() {
    if !deep() {
        return;
    }
    let Some(gdb) = program("gdb") else { return };
    let job = Job::new("gdb", [gdb]).footprint(Footprint::Any);
    let Some(probe) = compile("paging", &job.scratch().folder("bin")) else { return };
    let job = job.args(["-nx", "-batch", "-iex", "set debuginfod enabled off", "-iex"]);
    let job = job.args(["handle SIGSYS SIGBUS nostop noprint pass", "-ex", "run", "--args"]).arg(probe);
    let far = { job }.run_alone(NEAR);
    assert!(far.ended.text().contains("exited normally"), "{}\n{}", far.ended.text(), far.ended.errors);
}

#[test]
fn sanitizers_are_refused_with_advice_that_works() {
    let scratch = Scratch::new("sanitizer");
    let flags = ["-fsanitize=address"];
    let Some(binary) = compile_with("paging", &scratch.folder("bin"), "sanitized", &flags) else { return };
    let refused = FarRun::new(&scratch, ["--near", "16M"], [&binary]).run();
    let advice = "ASAN_OPTIONS=verify_asan_link_order=0";
    assert!(refused.code == 97 && refused.errors.contains(advice), "{} {}", refused.code, refused.errors);
    let native = Command::new(&scratch.folder("native"), [&binary]).run();
    let run = FarRun::new(&scratch, ["--near", "16M"], [&binary]).env("ASAN_OPTIONS", "verify_asan_link_order=0");
    let far = run.within(Duration::from_secs(600)).run();
    assert_eq!((far.code, far.text()), (native.code, native.text()), "{}", far.errors);
    let flags = ["-fsanitize=thread"];
    let Some(other) = compile_with("paging", &scratch.folder("bin"), "thread-sanitized", &flags) else { return };
    let refused = FarRun::new(&scratch, ["--near", "16M"], [&other]).run();
    assert!(refused.code == 97 && refused.errors.contains("thread or memory sanitizer"), "{}", refused.errors);
    // The same library in the program itself.
    if !deep() {
        return;
    }
    let Some(inside) =
        compile_with("paging", &scratch.folder("bin"), "inside", &["-fsanitize=address", "-static-libasan"])
    else {
        return;
    };
    let far = FarRun::new(&scratch, ["--near", "16M"], [&inside]).within(Duration::from_secs(600)).run();
    assert_eq!((far.code, far.text()), (native.code, native.text()), "{}", far.errors);
}

/// Each process needs tables of its own, which cannot leave: when they take too much of the budget, the user is told.
#[test]
fn a_budget_that_is_too_small_for_so_many_processes_is_said() {
    let scratch = Scratch::new("many-processes");
    let Some(probe) = compile("many_processes", &scratch.folder("bin")) else { return };
    let report = scratch.path().join("report.json");
    let mut command = Command::new(&scratch.folder("run"), [farfield()]);
    command.words.extend(["run", "--near", "16M", "--report"].map(Into::into));
    command.words.extend([report.clone().into(), "--".into(), probe.into(), "30".into()]);
    let ended = command.run();
    assert_eq!((ended.code, ended.text().as_str()), (0, "30 children, 0 wrong\n"), "{}", ended.errors);
    let report = Report::read(&report);
    let (tables, near) = (report.number("meta_peak_bytes"), report.number("near_peak_bytes"));
    assert!(tables > 8 * MIB && near >= tables, "{}", report.0);
    let enough = format!("give --near {}M", (2 * tables).div_ceil(MIB));
    assert!(ended.errors.contains("and cannot leave") && ended.errors.contains(&enough), "{}", ended.errors);
    // What was near beyond the budget is the tables that exceed half of it, and the usual slack.
    assert!(near < 16 * MIB + tables + 16 * MIB, "{}", report.0);
}
