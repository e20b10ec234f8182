//! Does every fault of the world end in time, with its own exit code and a message that says what to do?
//!
//! Danger: a job that hangs, dies without a word, or goes on with wrong memory when its server does.

use farfield_tests::{
    Command, FarRun, MIB, PATIENCE, Scratch, Server, compile, compile_with, farfield, kill_marked, marked_processes,
    program, wait_until,
};
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SERVER_LOST: i32 = 93;
const POOL_FULL: i32 = 94;
const CORRUPT: i32 = 95;
const REFUSED: i32 = 97;

fn hog(scratch: &Scratch) -> Option<String> {
    Some(compile("hog", scratch.path())?.to_str().expect("an ASCII path").to_owned())
}

/// Runs `true` with these options: it is not started, the exit code is 97, and the message has all of `parts` in it.
fn is_refused(options: &[&str], parts: &[&str]) {
    let scratch = Scratch::new("refused");
    let ended = FarRun::new(&scratch, options, ["sh", "-c", "echo it was started"]).run();
    assert_eq!(ended.code, REFUSED, "{options:?}: {}", ended.errors);
    assert_eq!(ended.text(), "", "{options:?}: the program was started");
    for part in parts {
        assert!(ended.errors.contains(part), "{options:?}: no word of {part:?} in: {}", ended.errors);
    }
}

#[test]
fn a_server_that_is_not_there_is_named() {
    is_refused(&["--near", "64M", "--far", "tcp://127.0.0.1:1"], &["tcp://127.0.0.1:1"]);
    is_refused(&["--near", "64M", "--far", "unix:/no/such/socket"], &["/no/such/socket"]);
}

#[test]
fn a_host_that_has_no_name_is_named() {
    is_refused(&["--near", "64M", "--far", "tcp://no-such-host.invalid:7400"], &["no-such-host.invalid"]);
}

#[test]
fn urls_that_are_none_are_refused() {
    is_refused(&["--near", "64M", "--far", "ftp://127.0.0.1:7400"], &["ftp"]);
    is_refused(&["--near", "64M", "--far", "127.0.0.1"], &["127.0.0.1"]);
    is_refused(&["--near", "64M", "--far", "tcp://127.0.0.1"], &["127.0.0.1"]);
    is_refused(&["--near", "64M", "--far", "tcp://127.0.0.1:99999"], &["99999"]);
}

#[test]
fn a_budget_too_small_to_work_is_refused() {
    is_refused(&["--near", "64K"], &["16M"]);
    is_refused(&["--near", "15M"], &["16M"]);
}

#[test]
fn sizes_that_are_none_are_refused() {
    for near in ["banana", "-5G", "0", "1e99", "101%", "4096"] {
        let scratch = Scratch::new("sizes");
        let ended = FarRun::new(&scratch, [format!("--near={near}")], ["echo", "it was started"]).run();
        assert!([2, REFUSED].contains(&ended.code), "{near}: exit code {}", ended.code);
        assert_eq!(ended.text(), "", "{near}: the program was started");
        assert!(ended.errors.contains("--near"), "{near}: {}", ended.errors);
    }
}

#[test]
fn programs_that_cannot_be_found_or_run_are_as_in_a_shell() {
    let scratch = Scratch::new("not-found");
    let check = |word: &str, code: i32| {
        let ended = FarRun::new(&scratch, ["--near", "64M"], [word]).run();
        assert_eq!(ended.code, code, "{word}: {}", ended.errors);
        assert!(ended.errors.contains(word), "{word}: {}", ended.errors);
    };
    check("no-such-program-anywhere", 127);
    check("/no/such/program", 127);
    check("/etc/passwd", 126);
    check("/", 126);
}

/// A static program started by a program of the job: refused too, never run outside of the budget in silence; the
/// parent learns it as it learns that a file may not be executed.
#[test]
fn static_children_are_refused_with_the_reason() {
    let scratch = Scratch::new("static-child");
    let Some(path) = compile_with("brk", scratch.path(), "static-brk", &["-static"]) else { return };
    let script = format!("{0}; echo $?; env -i {0}; echo $?; exec {0}", path.display());
    let ended = FarRun::new(&scratch, ["--near", "16M"], ["/bin/sh", "-c", script.as_str()]).run();
    assert_eq!(ended.text(), "126\n126\n");
    assert_eq!(ended.code, 126, "{}", ended.errors);
    assert_eq!(ended.errors.matches("statically linked").count(), 3, "{}", ended.errors);
}

#[test]
fn static_programs_are_refused_with_advice() {
    let scratch = Scratch::new("static");
    let Some(path) = compile_with("brk", scratch.path(), "static-brk", &["-static"]) else { return };
    let ended = FarRun::new(&scratch, ["--near", "64M"], [path]).run();
    assert_eq!(ended.code, REFUSED, "{}", ended.errors);
    assert!(ended.errors.contains("static"), "{}", ended.errors);
    assert_eq!(ended.text(), "");
}

#[test]
fn programs_that_take_other_rights_are_refused() {
    let scratch = Scratch::new("setuid");
    let Some(path) = compile("brk", scratch.path()) else { return };
    // Rights that differ from ours: root gives the file away, others have none to give.
    if std::os::unix::fs::chown(&path, Some(65534), Some(65534)).is_err() {
        farfield_tests::skip("only root can make a program that takes other rights");
        return;
    }
    for mode in [0o4755, 0o2755] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("the file is ours");
        let ended = FarRun::new(&scratch, ["--near", "64M"], [&path]).run();
        assert_eq!(ended.code, REFUSED, "mode {mode:o}: {}", ended.errors);
        assert_eq!(ended.text(), "");
    }
}

#[test]
fn garbage_instead_of_a_program_is_refused() {
    let scratch = Scratch::new("garbage");
    for (name, content) in
        [("elf-head", &b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0"[..]), ("noise", &[0xa7; 5000][..]), ("empty", b"")]
    {
        let path = scratch.file(name, content);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("the file is ours");
        let ended = FarRun::new(&scratch, ["--near", "64M"], [&path]).run();
        // As in a shell: what is no program is a script, of which a shell then says that it is none.
        let allowed: &[i32] = match name {
            "empty" => &[0, 126, REFUSED],
            "noise" => &[126, 127, REFUSED],
            _ => &[126, REFUSED],
        };
        assert!(allowed.contains(&ended.code), "{name}: exit code {}", ended.code);
    }
}

#[test]
fn a_wrong_token_is_refused_and_said() {
    let scratch = Scratch::new("token");
    let (right, wrong) = (scratch.token("right", "the-right-one"), scratch.token("wrong", "another-one"));
    let known = scratch.token("known", "tenant the-right-one -");
    let text = |path: &PathBuf| path.to_str().expect("an ASCII path").to_owned();
    let server = Server::start_tcp(&scratch, "server", ["--token-file", &text(&known)]);
    let Some(hog) = hog(&scratch) else { return };
    let try_with = |options: &[&str]| {
        let mut all = vec!["--near", "16M", "--far", server.url()];
        all.extend(options);
        FarRun::new(&scratch, all, [&hog, "64", "1"]).run()
    };
    let ended = try_with(&["--token-file", &text(&right)]);
    assert_eq!(ended.code, 0, "{}", ended.errors);
    for options in [vec![], vec!["--token-file".to_owned(), text(&wrong)]] {
        let ended = try_with(&options.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(ended.code, REFUSED, "{options:?}: {}", ended.errors);
        assert!(ended.errors.contains("token"), "{options:?}: {}", ended.errors);
        assert!(!ended.errors.contains("another-one"), "the token itself was printed: {}", ended.errors);
    }
    let absent = try_with(&["--token-file", "/no/such/file"]);
    assert_eq!(absent.code, REFUSED, "{}", absent.errors);
    assert!(absent.errors.contains("/no/such/file"), "{}", absent.errors);
}

#[test]
fn a_full_pool_ends_the_job_with_94() {
    let scratch = Scratch::new("full");
    let Some(hog) = hog(&scratch) else { return };
    let server = Server::start(&scratch, "server", ["--capacity", "32M"]);
    let far = FarRun::new(&scratch, ["--near", "16M", "--far", server.url()], [&hog, "160", "2"]);
    let ended = far.run();
    assert_eq!(ended.code, POOL_FULL, "{}\n{}", ended.text(), ended.errors);
    assert!(ended.errors.contains("full") || ended.errors.contains("capacity"), "{}", ended.errors);
    // The server lives, and has room again as soon as it has seen the end of that job.
    wait_until("the server has room again", || {
        FarRun::new(&scratch, ["--near", "16M", "--far", server.url()], [&hog, "24", "2"]).run().code == 0
    });
}

#[test]
fn a_server_that_gives_other_pages_than_it_got_ends_the_job_with_95() {
    let scratch = Scratch::new("lies");
    let Some(hog) = hog(&scratch) else { return };
    let server = Server::start_tcp(&scratch, "server", ["--capacity", "256M"]);
    for lie in ["lose=0.01", "swap=0.01", "zero=0.01"] {
        let far = format!("fault:{lie}@{}", server.url());
        let ended = FarRun::new(&scratch, ["--near", "16M", "--far", &far], [&hog, "64", "2", "2", "2"]).run();
        assert_eq!(ended.code, CORRUPT, "{lie}: {}\n{}", ended.text(), ended.errors);
    }
}

#[test]
fn far_memory_in_files_serves_forks_and_vanishes_with_its_processes() {
    let scratch = Scratch::new("files");
    let Some(hog) = hog(&scratch) else { return };
    let folder = scratch.path().join("far memory");
    std::fs::create_dir(&folder).unwrap();
    let url = format!("ssd:{}?size=256M", folder.display());
    let options = ["--near", "16M", "--far", &url];
    let is_empty = || std::fs::read_dir(&folder).unwrap().next().is_none();
    let ended = FarRun::new(&scratch, options, [&hog, "64", "2", "2", "2"]).run();
    assert!(ended.code == 0 && ended.text().contains("0 wrong"), "{}\n{}", ended.text(), ended.errors);
    assert!(is_empty());
    let running = FarRun::new(&scratch, options, [&hog, "64", "0", "2"]).start();
    let mark = running.mark().to_owned();
    let has_file = |pid: &i32| {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.filter_map(|file| std::fs::read_link(file.path()).ok()).any(|file| file.starts_with(&folder))
    };
    wait_until("parent and child have a file each", || {
        assert!(!running.is_over(), "ended early: {}", running.errors());
        is_empty() && marked_processes(&mark).iter().filter(|pid| has_file(pid)).count() >= 2
    });
    wait_until("the job has ended", || {
        kill_marked(&mark, "hog");
        running.is_over()
    });
    assert!(is_empty());
}

#[test]
fn far_memory_that_is_loaded_from_serves_forks_and_is_full_in_time() {
    let scratch = Scratch::new("mapped");
    let Some(hog) = hog(&scratch) else { return };
    let folder = scratch.path().join("far memory");
    std::fs::create_dir(&folder).unwrap();
    for place in [format!("dax:{}", folder.display()), "numa:0".to_owned()] {
        let far = format!("{place}?size=256M");
        let ended = FarRun::new(&scratch, ["--near", "16M", "--far", &far], [&hog, "64", "2", "2", "2"]).run();
        if ended.errors.contains("CAP_SYS_NICE") {
            eprintln!("skipped: {}", ended.errors);
            continue;
        }
        assert!(ended.code == 0 && ended.text().contains("0 wrong"), "{far}: {}\n{}", ended.text(), ended.errors);
        let far = format!("{place}?size=32M");
        let ended = FarRun::new(&scratch, ["--near", "16M", "--far", &far], [&hog, "160", "2"]).run();
        assert_eq!(ended.code, POOL_FULL, "{far}: {}\n{}", ended.text(), ended.errors);
        assert!(std::fs::read_dir(&folder).unwrap().next().is_none(), "{far}");
    }
    is_refused(&["--near", "16M", "--far", "numa:1000"], &["no NUMA node 1000"]);
}

#[test]
fn a_full_file_ends_the_job_with_94() {
    let scratch = Scratch::new("full-file");
    let Some(hog) = hog(&scratch) else { return };
    let url = format!("ssd:{}?size=32M", scratch.path().display());
    let ended = FarRun::new(&scratch, ["--near", "16M", "--far", &url], [&hog, "160", "2"]).run();
    assert_eq!(ended.code, POOL_FULL, "{}\n{}", ended.text(), ended.errors);
    let nowhere = FarRun::new(&scratch, ["--near", "16M", "--far", "ssd:/no/such/folder"], [&hog, "16", "1"]).run();
    assert_eq!(nowhere.code, REFUSED);
    assert!(
        nowhere.errors.contains("no such file") && !nowhere.errors.contains("farfield serve"),
        "{}",
        nowhere.errors
    );
}

fn server_lost_in_the_middle(server: Server, mode: &str) {
    let scratch = Scratch::new("lost");
    let Some(hog) = hog(&scratch) else { return };
    let options = ["--near", "16M", "--mode", mode, "--far", server.url()];
    let running = FarRun::new(&scratch, options, [&hog, "96", "0", "2", "2"]).within(PATIENCE * 3).start();
    // Until it really pages: its server holds memory then.
    wait_until("the server holds pages", || {
        assert!(!running.is_over(), "ended early: {}", running.errors());
        held_bytes(server.running().pid()) > 40 * MIB
    });
    server.kill();
    wait_until("the job has ended", || running.is_over());
    let ended = running.wait();
    assert_eq!(ended.code, SERVER_LOST, "{}", ended.errors);
    assert!(ended.errors.contains("server"), "{}", ended.errors);
    let mark = ended.mark.clone();
    wait_until("its processes are gone", || marked_processes(&mark).is_empty());
}

/// What a server holds: in its own memory, or in files of memory that clients on this machine write to themselves.
fn held_bytes(pid: i32) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let resident = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096;
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let memory_files = descriptors
        .map(|entry| entry.path())
        .filter(|path| std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:")));
    let in_files: u64 = memory_files.filter_map(|path| Some(path.metadata().ok()?.blocks() * 512)).sum();
    resident.max(in_files)
}

#[test]
fn a_tcp_server_killed_in_the_middle_ends_the_job_with_93() {
    let scratch = Scratch::new("lost-tcp");
    server_lost_in_the_middle(Server::start_tcp(&scratch, "server", [] as [&str; 0]), "auto");
}

#[test]
fn a_local_server_killed_in_the_middle_ends_the_job_with_93() {
    let scratch = Scratch::new("lost-unix");
    server_lost_in_the_middle(Server::start(&scratch, "server", [] as [&str; 0]), "thread");
}

/// A server that is stopped, not dead: the connection is open, and nothing comes.
#[test]
fn a_server_that_falls_silent_ends_the_job_in_time() {
    let scratch = Scratch::new("silent-middle");
    let Some(hog) = hog(&scratch) else { return };
    let server = Server::start_tcp(&scratch, "server", [] as [&str; 0]);
    let options = ["--near", "16M", "--far", server.url()];
    let running = FarRun::new(&scratch, options, [&hog, "96", "0"]).within(PATIENCE * 3).start();
    wait_until("the server holds pages", || held_bytes(server.running().pid()) > 40 * MIB);
    server.running().stop();
    wait_until("the job has ended", || running.is_over());
    assert_eq!(running.wait().code, SERVER_LOST);
}

/// Something that listens, says what `answer` says to each connection, and is no memory server.
fn impostor(answer: impl Fn(std::net::TcpStream, &AtomicBool) + Send + Sync + 'static) -> (String, impl Drop) {
    struct Stop(Arc<AtomicBool>);
    impl Drop for Stop {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("tcp://{}", listener.local_addr().expect("it is bound"));
    let stop = Arc::new(AtomicBool::new(false));
    let (seen, answer) = (stop.clone(), Arc::new(answer));
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            if seen.load(Ordering::Relaxed) {
                return;
            }
            let (seen, answer) = (seen.clone(), answer.clone());
            std::thread::spawn(move || answer(stream, &seen));
        }
    });
    (url, Stop(stop))
}

fn does_not_hang_with(name: &str, answer: impl Fn(std::net::TcpStream, &AtomicBool) + Send + Sync + 'static) {
    let scratch = Scratch::new(name);
    let Some(hog) = hog(&scratch) else { return };
    let (url, _stop) = impostor(answer);
    let ended = FarRun::new(&scratch, ["--near", "16M", "--far", &url], [&hog, "64", "1"]).within(PATIENCE * 3).run();
    assert!([REFUSED, SERVER_LOST, CORRUPT].contains(&ended.code), "exit code {}: {}", ended.code, ended.errors);
    assert!(ended.errors.lines().any(|line| line.starts_with("farfield")), "no message: {}", ended.errors);
}

#[test]
fn garbage_on_the_wire_ends_the_job_with_a_message() {
    does_not_hang_with("wire-noise", |mut stream, _| {
        let noise: Vec<u8> = (0..1_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let _ = stream.write_all(&noise);
    });
    does_not_hang_with("wire-http", |mut stream, _| {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    });
    does_not_hang_with("wire-zeros", |mut stream, _| {
        let _ = stream.write_all(&[0; 100_000]);
    });
}

#[test]
fn a_server_that_hangs_up_at_once_ends_the_job_with_a_message() {
    does_not_hang_with("wire-close", |stream, _| drop(stream));
}

#[test]
fn a_server_that_never_answers_ends_the_job_with_a_message() {
    does_not_hang_with("wire-silent", |mut stream, stop| {
        let mut sink = [0; 4096];
        let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
        while !stop.load(Ordering::Relaxed) {
            if matches!(stream.read(&mut sink), Ok(0)) {
                return;
            }
        }
    });
}

/// The other direction: a server meets clients that speak nonsense, and goes on serving the others.
#[test]
fn a_server_survives_garbage() {
    let scratch = Scratch::new("survives");
    let Some(hog) = hog(&scratch) else { return };
    let server = Server::start_tcp(&scratch, "server", [] as [&str; 0]);
    let address = server.url().trim_start_matches("tcp://").to_owned();
    for round in 0..40u32 {
        let mut stream = std::net::TcpStream::connect(&address).expect("the server still accepts");
        let bytes: Vec<u8> =
            (0..(1 << (round % 18))).map(|i: u32| (i.wrapping_mul(2_654_435_761 + round) >> 11) as u8).collect();
        let _ = stream.write_all(&bytes);
    }
    let ended = FarRun::new(&scratch, ["--near", "16M", "--far", server.url()], [&hog, "64", "2"]).run();
    assert_eq!(ended.code, 0, "{}\n{}", ended.text(), ended.errors);
    assert!(!server.running().is_over(), "the server has ended: {}", server.running().errors());
}

/// The report cannot be written: that is said, and the program's result stays what it was.
#[test]
fn a_full_disk_for_the_report_is_said() {
    let scratch = Scratch::new("report");
    let Some(hog) = hog(&scratch) else { return };
    let run_with = |report: &str| {
        let farfield = farfield();
        let words = ["run", "--quiet", "--near", "16M", "--report", report, "--", &hog, "32", "1"].map(OsStr::new);
        Command::new(&scratch.folder("run"), std::iter::once(farfield.as_os_str()).chain(words)).run()
    };
    let full = run_with("/dev/full");
    assert!(full.errors.contains("/dev/full"), "no word of the report: {}", full.errors);
    assert!([0, REFUSED].contains(&full.code), "exit code {}: {}", full.code, full.errors);
    if full.code == 0 {
        assert!(full.text().contains("0 wrong"), "{}", full.text());
    }
    let absent = run_with("/no/such/folder/report.json");
    assert_eq!(absent.code, REFUSED, "{}", absent.errors);
    assert!(absent.errors.contains("/no/such/folder"), "{}", absent.errors);
}

/// Signals to `farfield run` reach the program, and the end of the program is its own.
#[test]
fn signals_are_passed_on() {
    let scratch = Scratch::new("signals");
    if program("sh").is_none() {
        return;
    }
    let script = "trap 'echo trapped; exit 21' TERM; echo ready; while :; do sleep 0.05; done";
    let running = FarRun::new(&scratch, ["--near", "64M"], ["sh", "-c", script]).start();
    wait_until("it is ready", || running.output().contains("ready"));
    running.signal(libc::SIGTERM);
    let ended = running.wait();
    assert_eq!((ended.code, ended.text().contains("trapped")), (21, true), "{}", ended.errors);
}
