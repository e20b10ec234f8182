//! Resolves the words of a command line to a file that can be run with far memory, or to a refusal
//! that says why not.

use super::JobRefusal;
use crate::elf::{self, Linkage};
use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum depth of `#!` lines that lead to `#!` lines: as far as the kernel follows.
const SCRIPT_DEPTH_MAX: usize = 5;
/// Largest number of bytes that we read to find a header.
const HEAD_BYTES_MAX: u64 = 64 << 20;
/// Search path when `PATH` is not set, as in `execvp`.
const PATH_DEFAULT: &str = "/bin:/usr/bin";

/// Program that can be started.
#[derive(Debug)]
pub(super) struct ExecCommand {
    /// Path for `execve`.
    pub(super) path: CString,
    /// Arguments of the program, the first included.
    pub(super) argv: Vec<CString>,
}

/// User that starts the program: decides whether the kernel will ignore `LD_PRELOAD`.
#[derive(Clone, Copy, Debug)]
struct User {
    uid: u32,
    gid: u32,
}

/// Finds the file that `command` names and checks that it and all its interpreters load our
/// library.
pub(super) fn find(command: &[OsString]) -> Result<ExecCommand, JobRefusal> {
    let name = command.first().filter(|name| !name.is_empty()).ok_or(JobRefusal::NoCommand)?;
    let search = std::env::var_os("PATH").unwrap_or_else(|| PATH_DEFAULT.into());
    let path = locate(name, &search)?;
    // SAFETY: these calls only read numbers of this process and cannot fail.
    let user = unsafe { User { uid: libc::getuid(), gid: libc::getgid() } };
    let zero = |_| JobRefusal::NoCommand;
    let words = command.iter().map(|word| CString::new(word.as_bytes())).collect::<Result<Vec<_>, _>>();
    let mut argv = words.map_err(zero)?;
    let mut program = CString::new(path.as_os_str().as_bytes()).map_err(zero)?;
    if check(&path, user, SCRIPT_DEPTH_MAX)? == ExecMethod::Shell {
        // A script without `#!` is run by the shell, as `execvp` and every shell do.
        check(Path::new("/bin/sh"), user, 0)?;
        argv.splice(..1, [c"/bin/sh".to_owned(), program]);
        program = c"/bin/sh".to_owned();
    }
    Ok(ExecCommand { path: program, argv })
}

/// Finds the file that a shell would start for `name`.
fn locate(name: &OsStr, search: &OsStr) -> Result<PathBuf, JobRefusal> {
    let not_found = || JobRefusal::NotFound { name: name.into() };
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match executable(&path) {
            Ok(()) => Ok(path),
            Err(error) if is_absent(&error) => Err(not_found()),
            Err(error) => Err(JobRefusal::NotExecutable { path, error }),
        };
    }
    let mut refused = None;
    for folder in search.as_bytes().split(|&byte| byte == b':') {
        // An empty entry is the current folder.
        let folder = if folder.is_empty() { Path::new(".") } else { Path::new(OsStr::from_bytes(folder)) };
        let path = folder.join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(error) if is_absent(&error) => {}
            Err(error) => refused = refused.or(Some(JobRefusal::NotExecutable { path, error })),
        }
    }
    Err(refused.unwrap_or_else(not_found))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

fn executable(path: &Path) -> io::Result<()> {
    let refused = || io::Error::from_raw_os_error(libc::EACCES);
    if !std::fs::metadata(path)?.is_file() {
        return Err(refused());
    }
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| refused())?;
    // The check uses the effective user, as exec does.
    // SAFETY: a zero-terminated path that lives through the call.
    match unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::X_OK, libc::AT_EACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Way in which a file that passed is started.
#[derive(PartialEq, Eq, Debug)]
enum ExecMethod {
    Direct,
    /// By the shell: the file has no format that the kernel knows.
    Shell,
}

fn check(path: &Path, user: User, scripts_left: usize) -> Result<ExecMethod, JobRefusal> {
    let not_readable = |error| JobRefusal::NotReadable { path: path.into(), error };
    let mut file = File::open(path).map_err(not_readable)?;
    let mut head = Vec::with_capacity(elf::HEAD_BYTES);
    let mut wanted = elf::HEAD_BYTES as u64;
    loop {
        let missing = wanted - head.len() as u64;
        let read = file.by_ref().take(missing).read_to_end(&mut head).map_err(not_readable)?;
        match elf::classify(&head) {
            Linkage::More { bytes } if bytes > wanted && bytes <= HEAD_BYTES_MAX && read as u64 == missing => {
                wanted = bytes;
            }
            _ => break,
        }
    }
    let path = path.to_path_buf();
    match elf::classify(&head) {
        Linkage::Dynamic { interpreter } if elf::is_musl(interpreter) => Err(JobRefusal::Musl { path }),
        Linkage::Dynamic { .. } => {
            let metadata = file.metadata().map_err(not_readable)?;
            match ignores_preload(&metadata, has_capabilities(&path), user) {
                Some(why) => Err(JobRefusal::Privileged { path, why }),
                None => Ok(ExecMethod::Direct),
            }
        }
        Linkage::Static => Err(JobRefusal::Static { path }),
        Linkage::Bits32 => Err(JobRefusal::OtherMachine { path, machine: "a 32-bit program".into() }),
        Linkage::Foreign { machine } => {
            Err(JobRefusal::OtherMachine { path, machine: format!("built for another machine (ELF number {machine})") })
        }
        Linkage::Script { .. } if scripts_left == 0 => Err(JobRefusal::Broken { path }),
        Linkage::Script { interpreter, .. } => {
            let interpreter = PathBuf::from(OsStr::from_bytes(interpreter));
            if let Err(error) = executable(&interpreter) {
                return Err(JobRefusal::NoInterpreter { path, interpreter, error });
            }
            match check(&interpreter, user, scripts_left - 1)? {
                ExecMethod::Direct => Ok(ExecMethod::Direct),
                ExecMethod::Shell => Err(JobRefusal::Broken { path: interpreter }),
            }
        }
        Linkage::Unknown if head.is_empty() || !head.contains(&0) => Ok(ExecMethod::Shell),
        Linkage::Unknown | Linkage::Malformed | Linkage::More { .. } => Err(JobRefusal::Broken { path }),
    }
}

/// Returns why the loader would ignore `LD_PRELOAD` for this file (`AT_SECURE`), if it would.
fn ignores_preload(file: &Metadata, capabilities: bool, user: User) -> Option<&'static str> {
    if file.mode() & libc::S_ISUID != 0 && file.uid() != user.uid {
        return Some("it is setuid");
    }
    // Without the group's execute bit, setgid on a file means locking and not privilege.
    let group = libc::S_ISGID | libc::S_IXGRP;
    if file.mode() & group == group && file.gid() != user.gid {
        return Some("it is setgid");
    }
    // Root has the capabilities already.
    (capabilities && user.uid != 0).then_some("it has file capabilities")
}

fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: zero-terminated strings; a size of zero only asks whether the attribute is there.
    unsafe { libc::getxattr(path.as_ptr(), c"security.capability".as_ptr(), core::ptr::null_mut(), 0) > 0 }
}

#[cfg(test)]
mod tests {
    //! Danger: a program that runs to its out-of-memory end without far memory because its loader ignored us.
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("farfield-program-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
        fn file(&self, name: &str, mode: u32, bytes: &[u8]) -> PathBuf {
            let path = self.0.join(name);
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const ROOT: User = User { uid: 0, gid: 0 };

    #[test]
    fn commands_are_found_as_a_shell_finds_them() {
        let folder = Folder::new("find");
        let (plain, program) = (folder.file("plain", 0o644, b"x"), folder.file("program", 0o755, b"echo hi\n"));
        let find = |name: &str, search: &str| locate(OsStr::new(name), OsStr::new(search));
        let here = folder.0.to_str().unwrap();
        assert_eq!(find("program", &format!("/no/where:{here}")).unwrap(), program);
        assert_eq!(find(program.to_str().unwrap(), "").unwrap(), program);
        assert!(matches!(find("program", "/no/where"), Err(JobRefusal::NotFound { .. })));
        assert!(matches!(find("/no/where", ""), Err(JobRefusal::NotFound { .. })));
        assert!(matches!(find("plain", here), Err(JobRefusal::NotExecutable { .. })));
        assert!(matches!(find(plain.to_str().unwrap(), ""), Err(JobRefusal::NotExecutable { .. })));
        assert!(matches!(find(here, ""), Err(JobRefusal::NotExecutable { .. })), "a folder");
        assert_eq!(find("plain", &format!("{here}:/no")).unwrap_err().exit_code(), 126);
        assert_eq!(find("nothing", here).unwrap_err().exit_code(), 127);
    }

    #[test]
    fn only_programs_that_load_the_library_pass() {
        let folder = Folder::new("check");
        let musl = elf::samples::elf(3, b"/lib/ld-musl-x86_64.so.1\0");
        let check = |name: &str, bytes: &[u8]| check(&folder.file(name, 0o755, bytes), ROOT, SCRIPT_DEPTH_MAX);
        assert!(matches!(check("static", &elf::samples::elf(1, b"")), Err(JobRefusal::Static { .. })));
        assert!(matches!(check("musl", &musl), Err(JobRefusal::Musl { .. })));
        assert!(matches!(check("32", b"\x7fELF\x01\x01\x01"), Err(JobRefusal::OtherMachine { .. })));
        assert!(matches!(check("cut", &musl[..100]), Err(JobRefusal::Broken { .. })));
        assert!(matches!(check("noise", b"\x01\x00\x02"), Err(JobRefusal::Broken { .. })));
        assert_eq!(check("script", b"#!/bin/sh\n").unwrap(), ExecMethod::Direct);
        assert_eq!(check("bare", b"echo hi\n").unwrap(), ExecMethod::Shell);
        assert!(matches!(check("lost", b"#!/no/such/thing\n"), Err(JobRefusal::NoInterpreter { .. })));
        let inner = folder.0.join("static");
        let chain = format!("#!{}\n", inner.display());
        assert!(matches!(check("chain", chain.as_bytes()), Err(JobRefusal::Static { path }) if path == inner));
        let itself = format!("#!{}\n", folder.0.join("loop").display());
        assert!(matches!(check("loop", itself.as_bytes()), Err(JobRefusal::Broken { .. })));
    }

    #[test]
    fn a_file_that_gains_privilege_ignores_the_library() {
        let folder = Folder::new("suid");
        let check = |mode: u32, capabilities: bool, uid: u32, gid: u32| {
            let path = folder.file("file", 0o755, b"");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let file = std::fs::metadata(&path).unwrap();
            let user = User { uid: file.uid() + uid, gid: file.gid() + gid };
            ignores_preload(&file, capabilities, user)
        };
        assert_eq!(check(0o755, false, 1, 1), None);
        assert_eq!(check(0o4755, false, 1, 0), Some("it is setuid"));
        assert_eq!(check(0o4755, false, 0, 0), None, "its own user gains nothing");
        assert_eq!(check(0o2755, false, 0, 1), Some("it is setgid"));
        assert_eq!(check(0o2644, false, 0, 1), None, "a lock, not a privilege");
        assert_eq!(check(0o755, true, 1, 0), Some("it has file capabilities"));
        let _ = check(0o755, false, 0, 0);
    }
}
