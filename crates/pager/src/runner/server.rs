//! The private memory server of a job: started before it, stopped after it.

use super::JobRefusal;
use super::sys::{self, Signals};
use std::ffi::{CString, OsStr};
use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time that the server may take to report that it is ready.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// Time that a server that has closed its output may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(1);
/// Room for the path of a Unix socket, with the final zero (`sun_path`).
const SOCKET_PATH_MAX: usize = 108;
/// Longest ready line in bytes.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Memory server that belongs to one job.
pub(super) struct PrivateServer {
    child: Child,
    /// True once another part of the runner has waited for the server: its process id may belong to
    /// another process by now.
    reaped: bool,
    socket: PathBuf,
    /// Folder that is removed with the socket in it, after the server was stopped.
    _folder: PrivateFolder,
}

impl PrivateServer {
    /// Starts `program serve --private` and waits until it reports that it is ready, at most for
    /// [`READY_WITHIN`].
    pub(super) fn start(program: &Path, token: &[u8], quiet: bool, signals: &Signals) -> Result<Self, JobRefusal> {
        let folder = PrivateFolder::new()?;
        let socket = folder.0.join("server.sock");
        let mut listen = std::ffi::OsString::from("unix:");
        listen.push(&socket);
        let mut command = Command::new(program);
        command.args(["serve", "--private", "--listen"]).arg(listen);
        command.args(["--parent-pid", &std::process::id().to_string()]);
        command.env_remove("LD_PRELOAD").stdin(Stdio::null()).stdout(Stdio::piped());
        // The token is ours, which may come from a file, and not that of the environment.
        match token.is_empty() {
            true => command.env_remove("FARFIELD_TOKEN"),
            false => command.env("FARFIELD_TOKEN", OsStr::from_bytes(token)),
        };
        if quiet {
            command.stderr(Stdio::null());
        }
        // The server must outlive the program: in a process group of its own it gets no ^C, ^Z or
        // hang-up of the terminal. It has no session of its own: where the kernel shares processors
        // out between sessions (autogroup), it would have to wait for those of a busy job.
        command.process_group(0);
        let failed = |error: io::Error| JobRefusal::Server { reason: format!("{}: {error}", program.display()) };
        let child = command.spawn().map_err(failed)?;
        let mut server = PrivateServer { child, reaped: false, socket, _folder: folder };
        server.wait_until_ready(signals)?;
        // The folder is closed to others. A process of the job that becomes another user has the
        // socket open already, but the kernel then requires write permission.
        std::fs::set_permissions(&server.socket, Permissions::from_mode(0o666)).map_err(failed)?;
        Ok(server)
    }

    fn wait_until_ready(&mut self, signals: &Signals) -> Result<(), JobRefusal> {
        let output = File::from(std::os::fd::OwnedFd::from(self.child.stdout.take().expect("piped in `start`")));
        let mut line = Vec::new();
        let mut ready = Vec::new();
        let deadline = Instant::now() + READY_WITHIN;
        while !line.contains(&b'\n') {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || line.len() > LINE_BYTES_MAX {
                return Err(JobRefusal::ServerSlow { after: READY_WITHIN });
            }
            sys::poll(&[output.as_raw_fd(), signals.fd()], left, &mut ready);
            if ready[1] {
                check_interrupted(signals)?;
            }
            if !ready[0] {
                continue;
            }
            let mut chunk = [0; 4096];
            match (&output).read(&mut chunk) {
                Ok(0) => return Err(JobRefusal::Server { reason: self.describe_exit() }),
                Ok(read) => line.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(JobRefusal::Server { reason: error.to_string() }),
            }
        }
        // The line is for programs; that it is JSON tells a server from a program that only prints.
        let parsed: Result<serde_json::Value, _> =
            serde_json::from_slice(line.split(|&b| b == b'\n').next().unwrap_or(&[]));
        match parsed {
            Ok(serde_json::Value::Object(_)) => Ok(()),
            _ => Err(JobRefusal::Server { reason: format!("unexpected output {:?}", String::from_utf8_lossy(&line)) }),
        }
    }

    fn describe_exit(&mut self) -> String {
        // The server has closed its output, so it is about to end by itself; if not, `stop` ends
        // it.
        if let Ok(pidfd) = sys::pidfd(self.child.id()) {
            sys::poll(&[pidfd.as_raw_fd()], ENDS_WITHIN, &mut Vec::new());
        }
        match self.child.try_wait() {
            Ok(Some(status)) => format!("it ended with {status}"),
            _ => "it closed its output".into(),
        }
    }

    /// Returns the URL of the server for programs.
    pub(super) fn url(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Notes that the server has ended, and that the caller has waited for it.
    pub(super) fn note_reaped(&mut self) {
        self.reaped = true;
    }

    fn stop(&mut self) {
        if self.reaped {
            return;
        }
        // The server is killed at once: nobody uses it any more, and it keeps nothing that outlives
        // it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Calls the start off if a signal that ends programs has arrived before there was a program.
pub(super) fn check_interrupted(signals: &Signals) -> Result<(), JobRefusal> {
    while let Some(signal) = signals.next() {
        if matches!(signal.number, libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT) {
            return Err(JobRefusal::Interrupted { signal: signal.number });
        }
    }
    Ok(())
}

/// Folder that only this user can enter, removed on drop.
struct PrivateFolder(PathBuf);

impl PrivateFolder {
    fn new() -> Result<PrivateFolder, JobRefusal> {
        let chosen = ["XDG_RUNTIME_DIR", "TMPDIR"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
        let mut error = None;
        for parent in chosen.chain([PathBuf::from("/tmp")]) {
            let template = parent.join("farfield-XXXXXX");
            if !parent.is_absolute() || template.as_os_str().len() + "/server.sock".len() >= SOCKET_PATH_MAX {
                continue;
            }
            match make_folder(&template) {
                Ok(path) => return Ok(PrivateFolder(path)),
                Err(refused) => error = Some(refused),
            }
        }
        let error = error.unwrap_or_else(|| io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        Err(JobRefusal::Os { what: "no folder for the socket of the private memory server (set TMPDIR)", error })
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes a folder with `mkdtemp`: its mode is 0700 from the first moment on.
fn make_folder(template: &Path) -> io::Result<PathBuf> {
    let template = CString::new(template.as_os_str().as_bytes()).map_err(io::Error::other)?.into_raw();
    // SAFETY: a writable zero-terminated string, which the call changes in place without growing
    // it, and which is given back to `CString` exactly once.
    let (made, path) = unsafe { (!libc::mkdtemp(template).is_null(), CString::from_raw(template)) };
    if !made {
        return Err(io::Error::last_os_error());
    }
    Ok(PathBuf::from(std::ffi::OsString::from_vec(path.into_bytes())))
}
