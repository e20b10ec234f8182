//! Who may use a job's far memory: its processes, whatever user they become (probe `identity`), and nobody else.
//!
//! Danger: what lets a daemon go on as another user lets other users of the machine in.

use farfield_tests::{FarRun, Scratch, skip, wait_until};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
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
fn nobody_else_gets_to_the_server_or_the_control_block() {
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

    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        skip("not root: there is no other user to be");
        return;
    }
    for (what, result) in [("socket", as_nobody(connect(&socket))), ("control block", as_nobody(open(&control)))] {
        let error = result.expect_err(what);
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{what}: {error}");
    }
}
