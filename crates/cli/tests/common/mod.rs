//! The farfield command in tests, with a library in place of the real one that does nothing: what is tested here is the
//! runner. Programs that need far memory are tested in `tests/`.
#![allow(dead_code, reason = "each test file uses a part")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long anything may take before a test fails.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Name, or a part of names, of the tests that are wanted: the first argument of this program that is no option.
pub(crate) fn wanted_tests() -> String {
    std::env::args().nth(1).filter(|argument| !argument.starts_with('-')).unwrap_or_default()
}

/// Runs those of these tests whose names have a part, and says so as test programs do.
pub(crate) fn run_tests<'t>(tests: impl IntoIterator<Item = &'t (&'static str, fn())>, wanted: &str) {
    let mut passed = 0;
    for (name, test) in tests.into_iter().filter(|(name, _)| name.contains(wanted)) {
        let begun = Instant::now();
        test();
        println!("test {name} ... ok in {:.2}s", begun.elapsed().as_secs_f64());
        passed += 1;
    }
    println!("\ntest result: ok. {passed} passed; 0 failed");
}

/// A folder of one test, removed in the end.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("farfield-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes an executable file.
    pub(crate) fn program(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// A library without contents, for LD_PRELOAD.
    pub(crate) fn library(&self) -> PathBuf {
        let (source, library) = (self.path("empty.c"), self.path("libempty.so"));
        std::fs::write(&source, "").unwrap();
        let built = Command::new("cc").args(["-shared", "-o"]).args([&library, &source]).output();
        // Without a compiler the loader prints a warning about an empty file and goes on.
        if !built.is_ok_and(|output| output.status.success()) {
            std::fs::write(&library, "").unwrap();
        }
        library
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The farfield command, nothing set. Who started the tests in the background may have them ignore signals; commands do not.
pub(crate) fn farfield() -> Command {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: no handler is replaced, for tests have none.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_farfield"));
    for name in ["LD_PRELOAD", "FARFIELD_CONTROL", "FARFIELD_TOKEN", "FARFIELD_NEAR", "FARFIELD_PRELOAD"] {
        command.env_remove(name);
    }
    command
}

/// `farfield run --near 64M OPTIONS -- PROGRAM`, with the empty library.
pub(crate) fn run<O: AsRef<OsStr>, P: AsRef<OsStr>>(folder: &Folder, options: &[O], program: &[P]) -> Command {
    let mut command = farfield();
    command.env("FARFIELD_PRELOAD", folder.library()).args(["run", "--near", "64M"]);
    command.args(options).arg("--").args(program);
    command
}

/// Stdout and stderr of an output, for messages.
pub(crate) fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A running command whose lines are read one by one; killed when dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: std::sync::mpsc::Receiver<String>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = lines_of(child.stdout.take().unwrap());
        Running { child, lines }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The next line of stdout.
    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(DEADLINE).expect("a line before the deadline and the end")
    }

    /// The next line of stdout, if it is there already.
    pub(crate) fn line_now(&self) -> Result<String, std::sync::mpsc::TryRecvError> {
        self.lines.try_recv()
    }

    /// All lines up to the end of stdout.
    pub(crate) fn rest(&self) -> Vec<String> {
        std::iter::from_fn(|| self.lines.recv_timeout(DEADLINE).ok()).collect()
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: sends a signal to our child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Stops it. Returns when all of its threads have stopped: the signal itself only reaches one of them, which may have to
    /// wait for a processor, and the others go on until then.
    pub(crate) fn stop(&self) {
        self.signal(libc::SIGSTOP);
        // SAFETY: all zeros is a valid `siginfo_t`.
        let mut found: libc::siginfo_t = unsafe { core::mem::zeroed() };
        // SAFETY: an out pointer to a local; without `WEXITED`, the child is not reaped.
        let waited = unsafe { libc::waitid(libc::P_PID, self.child.id(), &mut found, libc::WSTOPPED) };
        assert_eq!(waited, 0, "{}", std::io::Error::last_os_error());
    }

    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        let mut status = None;
        until("it ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(output: ChildStdout) -> std::sync::mpsc::Receiver<String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Waits until `condition` holds, or fails.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The JSON in a file.
pub(crate) fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// `GET /metrics`.
pub(crate) fn scrape(url: &str) -> String {
    use std::io::{Read, Write};
    let address = url.strip_prefix("http://").and_then(|url| url.strip_suffix("/metrics")).unwrap();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    answer
}

/// Issues certificates for 127.0.0.1 of two authorities, in the folders `old` and `new`. Returns what installs one of
/// them as `pem` and `key`.
pub(crate) fn exchangeable_certificates(folder: &Folder) -> impl Fn(&str) {
    for authority in ["old", "new"] {
        for words in [&["init"][..], &["server", "127.0.0.1"]] {
            let mut command = farfield();
            command.args(["cert", words[0]]).arg(folder.path(authority)).args(&words[1..]);
            let made = command.output().unwrap();
            assert!(made.status.success(), "{}", text(&made));
        }
    }
    |authority| {
        for kind in ["pem", "key"] {
            std::fs::copy(folder.path(&format!("{authority}/127.0.0.1.{kind}")), folder.path(kind)).unwrap();
        }
    }
}
