//! `farfield top`, `farfield doctor`, and the private server as others see them.
//!
//! Danger: numbers of the wrong job, memory that stays behind after a job, help that does not help.

mod common;

use common::{Folder, Running, farfield, run, scrape, text, until};
use std::process::Stdio;

/// A job that reads its input, so that it lives until the test ends it; the pid of the program.
fn job(folder: &Folder, options: &[&str]) -> (Running, u32) {
    let mut command = run(folder, options, &["sh", "-c", "echo $$; read line; exit 5"]);
    let job = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::null()));
    let program = job.line().parse().unwrap();
    (job, program)
}

fn top(arguments: &[&str]) -> serde_json::Value {
    let output = farfield().arg("top").args(["--once", "--json"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Children of a process, by `/proc`.
fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

/// The private server of a job and the folder of its socket.
fn server(job: &Running, program: u32) -> (u32, std::path::PathBuf) {
    let server = children(job.child.id()).into_iter().find(|&pid| pid != program).unwrap();
    let words = std::fs::read(format!("/proc/{server}/cmdline")).unwrap();
    let words = String::from_utf8(words).unwrap();
    let socket = words.split('\0').find_map(|word| word.strip_prefix("unix:")).unwrap();
    (server, std::path::Path::new(socket).parent().unwrap().to_path_buf())
}

#[test]
fn the_pool_of_a_job_is_said_for_programs_too() {
    let folder = Folder::new("pool");
    let place = folder.path("second");
    std::fs::create_dir(&place).unwrap();
    let (job, program) = job(&folder, &["--near", "64M"]);
    let pool = |words: &[&str]| {
        let output = farfield().arg("pool").args(words).arg(program.to_string()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        output.stdout
    };
    let status = || serde_json::from_slice::<serde_json::Value>(&pool(&["status", "--json"])).unwrap();
    let first = status();
    assert_eq!(
        (first["switches"].as_u64(), first["moves"].as_u64(), &first["before"]),
        (Some(0), Some(0), &serde_json::json!([]))
    );
    assert!(first["cause"].is_null() && first["reason"].is_null(), "{first}");
    let url = format!("ssd:{}?size=64M", place.display());
    let switch = farfield().args(["pool", "switch", &program.to_string(), &url]).output().unwrap();
    assert!(switch.status.success(), "{}", text(&switch));
    assert!(String::from_utf8_lossy(&switch.stdout).starts_with(&format!("moved to {url} in ")), "{}", text(&switch));
    let second = status();
    assert_eq!((&second["urls"], &second["before"]), (&serde_json::json!([url]), &first["urls"]), "{second}");
    assert_eq!(
        (second["switches"].as_u64(), second["moves"].as_u64()),
        (Some(1), Some(0)),
        "somebody has asked for it"
    );
    assert_eq!(
        [&second["moving"], &second["degraded"], &second["scrubbed"], &second["protection"]],
        [&serde_json::json!([]); 4]
    );
    assert_eq!(top(&[&program.to_string()])["jobs"][0]["pool"], second);
    drop(job);
}

#[test]
fn top_finds_the_job_by_its_program_and_by_its_runner() {
    let folder = Folder::new("top");
    let (mut job, program) = job(&folder, &["--near", "123M"]);
    for pid in [program, job.child.id()] {
        let view = top(&[&pid.to_string()]);
        assert_eq!(view["jobs"][0]["runner_pid"], job.child.id(), "{view}");
        assert_eq!(view["jobs"][0]["near_limit_bytes"], 123 << 20);
        assert_eq!(view["jobs"][0]["alive"], true);
        assert!(view["jobs"][0]["counters"]["faults"].is_u64());
        let server = &view["jobs"][0]["servers"][0];
        assert!(server["capacity_bytes"].as_u64().unwrap() > 0, "{server}");
    }
    // Other tests have jobs too.
    let all = top(&[]);
    assert!(all["jobs"].as_array().unwrap().iter().any(|one| one["runner_pid"] == job.child.id()), "{all}");
    let people = farfield().args(["top", "--once", &program.to_string()]).output().unwrap();
    assert!(text(&people).contains("123.0 MiB"), "{}", text(&people));
    let exporter = Running::start(farfield().args(["top", "--metrics", "127.0.0.1:0"]));
    let metrics = scrape(&exporter.line());
    let of_pool =
        ["pool_switches_total", "pool_moves_total", "degraded_processes", "scrub_wrong_pages", "exposed_pages"]
            .map(|name| (name, 0));
    for (name, value) in [("near_limit_bytes", 123 << 20), ("faults_total", 0)].into_iter().chain(of_pool) {
        let end = format!(",runner=\"{}\"}} {value}", job.child.id());
        let is_it = |line: &str| line.starts_with(&format!("farfield_job_{name}{{program=")) && line.ends_with(&end);
        assert!(metrics.lines().any(is_it), "no {name} of the job in\n{metrics}");
    }
    drop(job.child.stdin.take());
    assert_eq!(job.wait().code(), Some(5));
}

#[test]
#[ignore = "helper: has had faults, and waits until its input ends"]
fn helper_that_has_had_faults() {
    let Some(path) = std::env::var_os(farfield_pager::config::ENV_CONTROL) else { return };
    let control = farfield_pager::runner::ControlBlock::open(path.as_ref()).unwrap();
    let slot = control.take_slot(std::process::id(), farfield_os::process::identity()).unwrap();
    slot.counters.faults.store(1_000_000_000, std::sync::atomic::Ordering::Relaxed);
    println!("{}", std::process::id());
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn top_once_says_rates_since_the_start() {
    let folder = Folder::new("rates");
    let me = std::env::current_exe().unwrap();
    let words = [me.to_str().unwrap(), "--exact", "helper_that_has_had_faults", "--ignored", "--nocapture", "-q"];
    let job = Running::start(run(&folder, &["--quiet"], &words).stdin(Stdio::piped()).stderr(Stdio::null()));
    let pid = std::iter::repeat_with(|| job.line()).find_map(|line| line.trim().parse::<u32>().ok()).unwrap();
    let view = top(&[&pid.to_string()]);
    let job = &view["jobs"][0];
    for rate in [&job["faults_per_s"], &job["processes"][0]["faults_per_s"]] {
        // It has lived for less than a quarter of an hour.
        assert!(rate.as_f64().is_some_and(|rate| rate > 1e6), "{view}");
    }
}

#[test]
fn top_says_what_is_wrong_with_a_target() {
    let check = |target: &str, part: &str| {
        let output = farfield().args(["top", "--once", target]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(part), "{}", text(&output));
    };
    check(&std::process::id().to_string(), "does not belong to a job");
    check("4000000000", "there is no process");
    check("ftp://x:1", "ftp");
    check("unix:/no/such/socket", "/no/such/socket");
}

#[test]
fn top_and_doctor_ask_a_server() {
    let folder = Folder::new("server");
    let url = format!("unix:{}", folder.path("socket").display());
    let mut command = farfield();
    command.args(["serve", "--listen", &url, "--capacity", "64M", "--log-format", "json"]).stderr(Stdio::null());
    let server = Running::start(&mut command);
    assert!(server.line().starts_with('{'), "ready");
    let view = top(&[&url]);
    assert_eq!(view["servers"][0]["url"], url.as_str());
    assert_eq!(view["servers"][0]["capacity_bytes"], 64 << 20, "{view}");
    let output = farfield().args(["doctor", "--json", "--far", &url]).output().unwrap();
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let last = found["checks"].as_array().unwrap().last().unwrap();
    assert_eq!((last["check"].as_str(), last["level"].as_str()), (Some("memory server"), Some("ok")), "{last}");
    // The region of the doctor is gone.
    until("its memory is given back", || top(&[&url])["servers"][0]["used_bytes"] == 0);
}

#[test]
fn a_wrong_token_is_found_before_the_start() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("token");
    let url = format!("unix:{}", folder.path("socket").display());
    let (tenants, token) = (folder.path("tenants"), folder.path("token"));
    std::fs::write(&tenants, "alice 8Xw0p3kq9 16G\n").unwrap();
    std::fs::set_permissions(&tenants, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(&token, "8Xw0p3kq9\n").unwrap();
    let mut command = farfield();
    command.args(["serve", "--listen", &url, "--token-file", tenants.to_str().unwrap()]).stderr(Stdio::null());
    let server = Running::start(&mut command);
    assert!(server.line().starts_with('{'), "ready");
    let marker = folder.path("started");
    let with = |token: &std::path::Path| {
        let options = ["--quiet", "--far", &url, "--token-file", token.to_str().unwrap()];
        run(&folder, &options, &["touch", marker.to_str().unwrap()]).output().unwrap()
    };
    let wrong = folder.path("wrong");
    std::fs::write(&wrong, "guess\n").unwrap();
    for file in [&wrong, &tenants] {
        let output = with(file);
        assert_eq!(output.status.code(), Some(97), "{}", text(&output));
        assert!(text(&output).contains("--token-file"), "{}", text(&output));
        assert!(!marker.exists(), "the program was started");
    }
    let output = with(&token);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(marker.exists());
    // A private server asks for the job's token, wherever that comes from.
    let options = ["--quiet", "--token-file", token.to_str().unwrap()];
    for variable in ["", "another"] {
        let output = run(&folder, &options, &["true"]).env("FARFIELD_TOKEN", variable).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    }
}

#[test]
fn doctor_ends_with_one_if_something_fails() {
    let output = farfield().args(["doctor", "--json", "--near", "1M"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["ok"], false);
    let near = found["checks"].as_array().unwrap().iter().find(|check| check["check"] == "near memory").unwrap();
    assert_eq!(near["level"], "fail");
    assert!(near["advice"].as_str().unwrap().contains("16.0 MiB"), "{near}");
}

#[test]
fn a_private_server_is_private_and_leaves_nothing() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("private");
    let (mut job, program) = job(&folder, &["--quiet"]);
    let (server, socket_folder) = server(&job, program);
    assert_eq!(std::fs::metadata(&socket_folder).unwrap().permissions().mode() & 0o777, 0o700);
    // A group of its own: no key on the terminal reaches it. In the session of its job: they share the processors.
    // SAFETY: only asks.
    let (group, session, ours) =
        unsafe { (libc::getpgid(server as i32), libc::getsid(server as i32), libc::getsid(0)) };
    assert_eq!((group, session), (server as i32, ours));
    drop(job.child.stdin.take());
    assert_eq!(job.wait().code(), Some(5));
    assert!(!is_alive(server), "stopped with the job");
    assert!(!socket_folder.exists());
}

#[test]
fn a_private_server_does_not_outlive_a_killed_runner() {
    let folder = Folder::new("orphan");
    let (mut job, program) = job(&folder, &["--quiet"]);
    let (server, socket_folder) = server(&job, program);
    // The program goes when its input ends, which the test holds open.
    job.signal(libc::SIGKILL);
    job.wait();
    drop(job.child.stdin.take());
    until("the server notices", || !is_alive(server));
    assert!(!socket_folder.exists());
}

/// What `/proc` knows of processes with this word in their command line.
fn processes_with(word: &str) -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let words =
        |pid| String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).into_owned();
    pids.filter(|&pid| words(pid).contains(word)).collect()
}

#[test]
fn a_signal_at_any_moment_leaves_nothing() {
    let folder = Folder::new("moment");
    let place = folder.path("runtime");
    std::fs::create_dir(&place).unwrap();
    let library = folder.library();
    for milliseconds in (0..80).step_by(4) {
        let mut command = farfield();
        command.args(["run", "--quiet", "--near", "64M", "--", "sh", "-c", "exit 5"]);
        command.env("FARFIELD_PRELOAD", &library).env("XDG_RUNTIME_DIR", &place);
        let mut job = Running::start(command.stderr(Stdio::null()));
        // Not a hope but a sweep: each delay hits another moment between start and end.
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        job.signal(libc::SIGTERM);
        let status = job.wait();
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert!(status.code() == Some(5) || signal == Some(libc::SIGTERM), "after {milliseconds} ms: {status}");
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 0, "after {milliseconds} ms");
        assert_eq!(processes_with(place.to_str().unwrap()), Vec::<u32>::new(), "after {milliseconds} ms");
    }
}

#[test]
fn a_program_whose_server_dies_keeps_its_exit_code_if_it_needs_it_no_more() {
    let folder = Folder::new("lost");
    let errors = folder.path("stderr");
    let mut command = run(&folder, &["--near", "64M"], &["sh", "-c", "echo $$; read line; exit 5"]);
    command.stdin(Stdio::piped()).stderr(std::fs::File::create(&errors).unwrap());
    let mut job = Running::start(&mut command);
    let program = job.line().parse().unwrap();
    let (server, _) = server(&job, program);
    // SAFETY: sends a signal to a grandchild that lives until its job ends.
    assert_eq!(unsafe { libc::kill(server as i32, libc::SIGKILL) }, 0);
    until("it is said", || std::fs::read_to_string(&errors).unwrap().contains("server is gone"));
    drop(job.child.stdin.take());
    assert_eq!(job.wait().code(), Some(5));
}

#[test]
fn output_that_nobody_reads_is_no_crash() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let doctor = farfield().arg("doctor").stdout(full()).output().unwrap();
    assert!(doctor.status.code().is_some_and(|code| code <= 1), "{}", text(&doctor));
    assert!(!text(&doctor).contains("panicked"), "{}", text(&doctor));
    let mut refused = farfield();
    refused.args(["run", "no-such-command-anywhere"]).env("FARFIELD_PRELOAD", "/bin/sh").stderr(full());
    assert_eq!(refused.status().unwrap().code(), Some(127));
}

#[test]
fn every_command_explains_itself_with_examples() {
    for command in
        [&["--help"][..], &["run", "--help"], &["serve", "--help"], &["top", "--help"], &["doctor", "--help"]]
    {
        let output = farfield().args(command).output().unwrap();
        assert!(output.status.success(), "{command:?}");
        let help = text(&output);
        let examples = help.split("Examples:").nth(1).unwrap_or_else(|| panic!("{command:?} has no examples"));
        assert!(examples.matches("farfield ").count() >= 3, "{command:?}");
    }
    let version = farfield().arg("--version").output().unwrap();
    assert_eq!(text(&version), format!("farfield {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn experiments_are_a_program_beside_the_command() {
    let folder = Folder::new("bench");
    let command = folder.program("farfield", std::fs::read(env!("CARGO_BIN_EXE_farfield")).unwrap());
    let bench = || std::process::Command::new(&command).args(["bench", "run", "--quick", "all"]).output().unwrap();
    let absent = bench();
    assert_eq!(absent.status.code(), Some(1));
    assert!(text(&absent).contains("cargo build --release -p farfield-bench"), "{}", text(&absent));

    folder.program("farfield-bench", "#!/bin/sh\necho \"$@\"\nexit 4\n");
    let present = bench();
    assert_eq!((text(&present).as_str(), present.status.code()), ("run --quick all\n", Some(4)));
}
