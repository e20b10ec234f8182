//! Who may use a job's far memory: its processes, whatever user they become (probe `identity`), and nobody else. And what a
//! process that has become another user may decide for those that have not: nothing (program `hostile`).
//!
//! Danger: what lets a daemon go on as another user lets other users of the machine in.

use farfield_tests::{FarRun, MIB, Scratch, Server, compile, farfield, skip, wait_until};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

/// What the kernel says to user `nobody`, who belongs to no job, about a system call (-1: an error).
fn as_nobody(action: impl Fn() -> i32 + Send + Sync + 'static) -> io::Result<()> {
    let mut command = std::process::Command::new("/bin/true");
    command.uid(65534).gid(65534);
    // SAFETY: only system calls, on memory that was prepared before; the user is another one by then.
    unsafe {
        command.pre_exec(move || match action() {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    command.spawn()?.wait().map(drop)
}

fn connect(path: &Path) -> impl Fn() -> i32 + use<> {
    // SAFETY: plain numbers; all-zero is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let bytes = path.as_os_str().as_bytes();
    assert!(bytes.len() < address.sun_path.len());
    address.sun_path.iter_mut().zip(bytes).for_each(|(target, byte)| *target = *byte as libc::c_char);
    move || {
        // SAFETY: a whole address; the descriptor ends with the process.
        unsafe {
            let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0);
            libc::connect(socket, (&raw const address).cast(), size_of::<libc::sockaddr_un>() as u32)
        }
    }
}

fn open(path: &Path) -> impl Fn() -> i32 + use<> {
    let path = CString::new(path.as_os_str().as_bytes()).expect("no zeros");
    // SAFETY: zero-terminated.
    move || unsafe { libc::open(path.as_ptr(), libc::O_RDWR) }
}

#[test]
fn other_users_reach_neither_the_server_nor_the_control_block() {
    let scratch = Scratch::new("users");
    let temporary = scratch.folder("tmp");
    let job = |options: &[&str], words: &[&str]| {
        FarRun::new(&scratch, options, words).env("TMPDIR", &temporary).env("XDG_RUNTIME_DIR", &temporary)
    };
    let running = job(&["--near", "16M"], &["sh", "-c", "echo $FARFIELD_CONTROL; exec sleep 1000"]).start();
    let mut control = PathBuf::new();
    wait_until("the job says where its control block is", || {
        let said = running.output();
        control = said.trim_end().into();
        said.ends_with('\n')
    });
    let folder =
        std::fs::read_dir(&temporary).expect("it exists").next().expect("the private server's").expect("readable");
    let socket = folder.path().join("server.sock");
    assert!(socket.exists());

    let url = format!("unix:{}", socket.display());
    let without_token = job(&["--near", "16M", "--far", &url], &["true"]).run();
    assert_eq!(
        without_token.code, 97,
        "the user that started the job, but without its token: {}",
        without_token.errors
    );
    assert!(without_token.errors.contains("token"), "{}", without_token.errors);

    if !is_root() {
        return;
    }
    for (what, result) in [("socket", as_nobody(connect(&socket))), ("control block", as_nobody(open(&control)))] {
        let error = result.expect_err(what);
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{what}: {error}");
    }
}

fn is_root() -> bool {
    // SAFETY: no arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root {
        skip("not root: there is no other user to be");
    }
    is_root
}

const TOKEN: &str = "a-token-that-is-found-in-memory";

/// A server that asks for the token.
fn server(scratch: &Scratch) -> Server {
    let tenants = scratch.file("tenants", format!("tenant {TOKEN} -\n"));
    std::fs::set_permissions(&tenants, std::fs::Permissions::from_mode(0o600)).expect("the file is ours");
    Server::start_tcp(scratch, "tcp", ["--capacity", "1G", "--token-file", tenants.to_str().expect("ASCII")])
}

#[test]
fn a_worker_that_gave_up_its_identity_cannot_decide_where_far_memory_is() {
    let scratch = Scratch::new("users-hostile");
    let (true, Some(hostile)) = (is_root(), compile("hostile", scratch.path())) else { return };
    let server = server(&scratch);
    let words = [hostile.to_str().expect("ASCII"), "search", server.url(), TOKEN];
    let ended =
        FarRun::new(&scratch, ["--near", "16M", "--far", server.url()], words).env("FARFIELD_TOKEN", TOKEN).run();
    let said = ended.text();
    assert_eq!(ended.code, 0, "{said}{}", ended.errors);
    let expected = [
        "it knows where far memory is: 1",
        "places at which it could write that: 0",
        "mprotect: EACCES",
        "madvise: EACCES",
        "a write around the protection: 0",
        "process_vm_writev: 0",
        // What it takes along.
        "write: EPERM",
        "map: EPERM",
        "truncate: EPERM",
        "opened again: 1",
        "tokens in its environment: 0",
        "the runner's descriptors: EACCES",
        "memory of its parent: 0 wrong",
        "and after it has been away: 0 wrong",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn another_user_cannot_have_a_job_moved() {
    let scratch = Scratch::new("users-switch");
    if !is_root() {
        return;
    }
    let job = FarRun::new(&scratch, ["--near", "16M"], ["sh", "-c", "echo started; exec sleep 1000"]).start();
    wait_until("the job runs", || job.output().contains("started"));
    let place = format!("ssd:{}?size=64M", scratch.folder("place").display());
    let switch = |uid: u32| {
        let mut command = std::process::Command::new(farfield());
        command.args(["pool", "switch", &job.pid().to_string(), &place]);
        command.uid(uid).gid(uid).output().expect("it starts")
    };
    let refused = switch(65534);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("ask its user, or root"), "{said}");
    let done = switch(0);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_worker_that_falsifies_the_accounts_stops_only_its_own_job() {
    let scratch = Scratch::new("users-lies");
    let (true, Some(hostile)) = (is_root(), compile("hostile", scratch.path())) else { return };
    let run = FarRun::new(&scratch, ["--near", "16M"], [hostile.to_str().expect("ASCII"), "lie"]);
    let job = run.start();
    // People look meanwhile.
    let look = |words: &[&str]| {
        let ended = std::process::Command::new(farfield()).args(words).arg(job.pid().to_string()).output();
        let ended = ended.expect("it starts");
        assert!(matches!(ended.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&ended.stderr));
    };
    while !job.is_over() {
        look(&["top", "--once"]);
        look(&["pool", "status"]);
    }
    let ended = job.wait();
    let said = ended.text();
    assert!(said.lines().all(|line| line.ends_with(": 0 wrong")), "{said}");
    // It may be told that there is no room, or be believed to have failed.
    let is_told = (93..=97).contains(&ended.code) && ended.errors.starts_with("farfield: ");
    assert!(is_told || ended.code == 0 && said.lines().count() == 2, "{}: {said}{}", ended.code, ended.errors);
    assert!(run.report().number("near_limit_bytes") == 16 * MIB);
}
