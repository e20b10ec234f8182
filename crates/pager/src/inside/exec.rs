//! `execve`: the new program belongs to the job too.
//!
//! Arguments and environment are copied into near memory (the kernel would not find far ones), and
//! the environment is made to name our library. Programs that would run without it are refused: a
//! budget is never dropped in silence.

use super::call::{CallOutcome, Context, error, forward};
use super::lock::SpinLock;
use super::syscall_pinning::{peek, peek_slice};
use super::{own_code, signal, thread, tracing};
use crate::elf::{self, Linkage};
use core::ffi::CStr;
use farfield_os::{Errno, file, gate, memory, process, signals};

/// Longest path in bytes.
const PATH_BYTES: usize = 4096;
/// Maximum number of bytes of arguments and environment together (the kernel's own limit is of this
/// size).
const STRINGS_BYTES: usize = 6 << 20;
/// Maximum depth of interpreters of interpreters that are followed.
const DEPTH: u32 = 5;

/// `LD_PRELOAD=…` and `FARFIELD_CONTROL=…` as they must stand in every environment.
static ENVIRONMENT: SpinLock<Vec<Vec<u8>>> = SpinLock::new(Vec::new());

/// Remembers the two variables, at the start.
pub fn remember(preload: &[u8], control: &[u8]) {
    let entry = |name: &[u8], value: &[u8]| [name, b"=", value, b"\0"].concat();
    *ENVIRONMENT.lock() = vec![entry(b"LD_PRELOAD", preload), entry(b"FARFIELD_CONTROL", control)];
}

/// Calls `action` with the path of the job's configuration, if it is known.
pub fn with_config_path(action: impl FnOnce(&CStr)) {
    let environment = ENVIRONMENT.lock();
    let path = environment.get(1).and_then(|entry| entry.strip_prefix(b"FARFIELD_CONTROL="));
    if let Some(Ok(path)) = path.map(CStr::from_bytes_with_nul) {
        action(path);
    }
}

/// Serves `execve` and `execveat`. Refuses with EACCES, and says why, if the program could not have
/// far memory.
pub fn execute(number: usize, context: &Context) -> CallOutcome {
    let args = context.arguments();
    let at = usize::from(number as i64 == libc::SYS_execveat);
    let directory = if at == 1 { args[0] as i32 } else { libc::AT_FDCWD };
    let flags = if at == 1 { args[4] as i32 } else { 0 };
    let mut path = [0u8; PATH_BYTES];
    if peek_string(args[at], &mut path).is_none() {
        return error(libc::EFAULT);
    }
    if let Some(reason) = refusal(directory, &path, flags, 0).or_else(refusal_of_library) {
        say(&path, reason);
        return error(libc::EACCES);
    }
    let Some(record) = thread::current() else { return error(libc::EAGAIN) };
    let copies = match Copies::new(args[at + 1], args[at + 2], &path) {
        Ok(copies) => copies,
        Err(errno) => return error(errno.0),
    };
    // This frees the copies that an earlier vfork child of this thread left behind.
    record.replace_scratch(copies.base, copies.len);
    let mut changed = args;
    changed[at] = copies.path;
    changed[at + 1] = copies.argv;
    changed[at + 2] = copies.envp;
    let is_traced = match tracing::begin(record, directory, &path, flags) {
        Ok(is_traced) => is_traced,
        Err(errno) => return error(errno.0),
    };
    // The new program inherits the mask, which must be the program's and not this handler's.
    let result = own_code::as_program(|| {
        let blocked = signals::set_mask(context.mask() & !signal::OURS);
        // SAFETY: the program's own call with near copies of its arguments.
        let result = unsafe { forward(number, changed) };
        if is_traced {
            tracing::give_up(-result as i32);
        }
        signals::set_mask(blocked);
        result
    });
    CallOutcome::Done(result)
}

fn say(path: &[u8], reason: &str) {
    let len = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
    for part in [&b"farfield: "[..], &path[..len], b" was not started: ", reason.as_bytes(), b"\n"] {
        let _ = file::write_all(2, part);
    }
}

/// Returns why a file cannot run with far memory; `None` if it can, or if the kernel itself will
/// refuse it.
fn refusal(directory: i32, path: &[u8], flags: i32, depth: u32) -> Option<&'static str> {
    if depth > DEPTH {
        return None;
    }
    let fd = if path[0] == 0 && flags & libc::AT_EMPTY_PATH != 0 {
        // SAFETY: numbers only.
        unsafe { gate::syscall(libc::SYS_fcntl, [directory as usize, libc::F_DUPFD_CLOEXEC as usize, 3, 0, 0, 0]) }
    } else {
        let open = (libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
        // SAFETY: `path` is NUL-terminated.
        unsafe { gate::syscall(libc::SYS_openat, [directory as usize, path.as_ptr() as usize, open, 0, 0, 0]) }
    };
    let fd = fd.ok()? as i32;
    let mut head = [0u8; 4096];
    let len = file::read_at(fd, &mut head, 0).unwrap_or(0);
    let privileged = is_privileged(fd);
    file::close(fd);
    if privileged {
        return Some(
            "it is setuid, setgid or has file capabilities, and Linux does not let such a program be helped by a \
             preloaded library",
        );
    }
    let head = &head[..len];
    match elf::classify(head) {
        Linkage::Script { interpreter, .. } => {
            let mut next = [0u8; PATH_BYTES];
            next.get_mut(..interpreter.len())?.copy_from_slice(interpreter);
            refusal(libc::AT_FDCWD, &next, 0, depth + 1)
        }
        Linkage::Static => {
            Some("it is statically linked, so the library that serves far memory cannot be loaded into it")
        }
        Linkage::Bits32 | Linkage::Foreign { .. } => Some("it is a program for another architecture"),
        Linkage::Dynamic { interpreter } if elf::is_musl(interpreter) => {
            Some("it uses the musl C library; far memory needs glibc")
        }
        // A file that is no program at all is refused by the kernel itself.
        Linkage::Dynamic { .. } | Linkage::Unknown | Linkage::Malformed | Linkage::More { .. } => None,
    }
}

/// Returns why the loader would not load our library for this process; `None` if it would.
fn refusal_of_library() -> Option<&'static str> {
    let library = &ENVIRONMENT.lock()[0];
    let library = library.strip_prefix(b"LD_PRELOAD=").and_then(|path| CStr::from_bytes_with_nul(path).ok())?;
    if file::open(library, libc::O_RDONLY).map(file::close).is_err() {
        return Some("its user cannot read the library that serves far memory (libfarfield_preload.so)");
    }
    process::is_of_two_users().then_some(
        "its effective user or group is not its real one, and Linux does not let such a process be helped by a \
         preloaded library",
    )
}

fn is_privileged(fd: i32) -> bool {
    // SAFETY: stat is plain numbers; all-zero is valid.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `stat` is writable.
    let known = unsafe { gate::syscall(libc::SYS_fstat, [fd as usize, &raw mut stat as usize, 0, 0, 0, 0]) }.is_ok();
    if known && stat.st_mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
        return true;
    }
    let name = c"security.capability";
    // SAFETY: the name is NUL-terminated; no value is asked for.
    unsafe { gate::syscall(libc::SYS_fgetxattr, [fd as usize, name.as_ptr() as usize, 0, 0, 0, 0]) }
        .is_ok_and(|len| len > 0)
}

/// Copies a NUL-terminated string. Returns its length without the NUL; `None` if it cannot be read
/// or is too long.
fn peek_string(address: usize, into: &mut [u8]) -> Option<usize> {
    let mut len = 0;
    while len < into.len() {
        // The copy goes up to the end of the page: what follows may not be mapped.
        let step = (4096 - (address + len) % 4096).min(into.len() - len);
        if !peek_slice(address + len, &mut into[len..len + step]) {
            return None;
        }
        if let Some(end) = into[len..len + step].iter().position(|byte| *byte == 0) {
            return Some(len + end);
        }
        len += step;
    }
    None
}

/// Near copies of path, arguments and environment, in one mapping.
struct Copies {
    base: usize,
    len: usize,
    path: usize,
    argv: usize,
    envp: usize,
}

impl Copies {
    fn new(argv: usize, envp: usize, path: &[u8]) -> Result<Copies, Errno> {
        let arguments = count(argv)?;
        let variables = count(envp)?;
        let extra = ENVIRONMENT.lock();
        let pointers = (arguments + variables + extra.len() + 2) * 8;
        let len = (pointers + STRINGS_BYTES + PATH_BYTES).next_multiple_of(4096);
        // Untouched pages of the mapping cost nothing.
        let base = memory::map_anonymous(len)?;
        let mut writer = ArgumentWriter { at: base + pointers, end: base + len };
        let copied = (|| {
            let path = writer.bytes(path)?;
            let new_argv = base;
            for index in 0..arguments {
                let string = peek::<usize>(argv + index * 8).ok_or(Errno(libc::EFAULT))?;
                let copy = writer.string(string)?;
                // SAFETY: inside the pointer part of the mapping.
                unsafe { ((new_argv + index * 8) as *mut usize).write(copy) };
            }
            let new_envp = base + (arguments + 1) * 8;
            let mut kept = 0;
            for index in 0..variables {
                let string = peek::<usize>(envp + index * 8).ok_or(Errno(libc::EFAULT))?;
                let copy = writer.string(string)?;
                // SAFETY: NUL-terminated by `string`, inside the mapping.
                let text = unsafe { CStr::from_ptr(copy as *const libc::c_char) }.to_bytes();
                if let Some(theirs) = text.strip_prefix(b"LD_PRELOAD=") {
                    let ours = &extra[0][b"LD_PRELOAD=".len()..extra[0].len() - 1];
                    let copy = writer.bytes(&preload_entry(ours, theirs))?;
                    // SAFETY: as above.
                    unsafe { ((new_envp + kept * 8) as *mut usize).write(copy) };
                    kept += 1;
                    continue;
                }
                if text.starts_with(b"FARFIELD_CONTROL=") {
                    continue;
                }
                // SAFETY: as above.
                unsafe { ((new_envp + kept * 8) as *mut usize).write(copy) };
                kept += 1;
            }
            let preloads = (0..kept).any(|index| {
                // SAFETY: written above.
                let entry = unsafe { CStr::from_ptr(*((new_envp + index * 8) as *const usize) as *const libc::c_char) };
                entry.to_bytes().starts_with(b"LD_PRELOAD=")
            });
            for entry in extra.iter().skip(usize::from(preloads)) {
                let copy = writer.bytes(entry)?;
                // SAFETY: room was reserved for all of `extra`.
                unsafe { ((new_envp + kept * 8) as *mut usize).write(copy) };
                kept += 1;
            }
            Ok((path, new_argv, new_envp))
        })();
        match copied {
            Ok((path, argv, envp)) => Ok(Copies { base, len, path, argv, envp }),
            Err(errno) => {
                // SAFETY: made above.
                let _ = unsafe { memory::munmap(base, len) };
                Err(errno)
            }
        }
    }
}

/// Makes the entry `LD_PRELOAD=…` of a new program: our library first, then the program's own in
/// its order.
fn preload_entry(ours: &[u8], theirs: &[u8]) -> Vec<u8> {
    let mut entry = [b"LD_PRELOAD=", ours].concat();
    for library in theirs.split(|byte| matches!(byte, b':' | b' ')) {
        if !library.is_empty() && library != ours {
            entry.push(b':');
            entry.extend_from_slice(library);
        }
    }
    entry.push(0);
    entry
}

/// Counts the entries of a NULL-terminated array of pointers.
fn count(array: usize) -> Result<usize, Errno> {
    if array == 0 {
        return Ok(0);
    }
    for index in 0..(1 << 20) {
        match peek::<usize>(array + index * 8) {
            Some(0) => return Ok(index),
            Some(_) => {}
            None => return Err(Errno(libc::EFAULT)),
        }
    }
    Err(Errno(libc::E2BIG))
}

struct ArgumentWriter {
    at: usize,
    end: usize,
}

impl ArgumentWriter {
    fn string(&mut self, address: usize) -> Result<usize, Errno> {
        // SAFETY: the rest of the mapping, ours alone.
        let room = unsafe { core::slice::from_raw_parts_mut(self.at as *mut u8, self.end - self.at) };
        let room_len = room.len().min(128 << 10);
        let len = peek_string(address, &mut room[..room_len]).ok_or(if room_len < 4096 {
            Errno(libc::E2BIG)
        } else {
            Errno(libc::EFAULT)
        })?;
        let start = self.at;
        self.at += len + 1;
        Ok(start)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        if self.end - self.at < bytes.len() {
            return Err(Errno(libc::E2BIG));
        }
        // SAFETY: room was checked.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at as *mut u8, bytes.len()) };
        let start = self.at;
        self.at += bytes.len();
        Ok(start)
    }
}

#[cfg(test)]
mod tests {
    //! Danger: libraries that a program preloads for itself are gone in what it executes.
    use super::*;

    #[test]
    fn libraries_of_the_program_stay_behind_ours() {
        let joined = |theirs: &str| {
            let entry = preload_entry(b"/lib/ours.so", theirs.as_bytes());
            let text = entry.strip_suffix(b"\0").and_then(|text| text.strip_prefix(b"LD_PRELOAD="));
            String::from_utf8(text.unwrap().to_vec()).unwrap()
        };
        assert_eq!(joined(""), "/lib/ours.so");
        assert_eq!(joined("/lib/ours.so"), "/lib/ours.so");
        assert_eq!(joined("a.so b.so"), "/lib/ours.so:a.so:b.so");
        // As the program was given it, by its first and by its second exec.
        assert_eq!(joined("/lib/ours.so:a.so"), "/lib/ours.so:a.so");
        // It puts its own before what it found.
        assert_eq!(joined("a.so:/lib/ours.so:b.so"), "/lib/ours.so:a.so:b.so");
    }
}
