//! Functions in front of the C library's, for the system calls that programs make most.
//!
//! Each makes its call without a trap where that is possible, and goes on to the C library's function
//! where it is not ([`farfield_pager::inside::direct_calls`]). For the program nothing else differs:
//! `errno`, points of cancellation, what signals do, and the system call itself (filters of the program
//! see it) are those of the C library. Calls that the C library makes by itself (in `fread`, for
//! example) do not come here, nor functions whose system call differs between its versions (`fstat`).

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::MaybeUninit;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use farfield_pager::inside::direct_calls::{Buffers, announce};

unsafe extern "C" {
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

const PTHREAD_CANCEL_ASYNCHRONOUS: c_int = 1;

/// Symbol that the program would have without this library.
struct NextSymbol {
    address: AtomicPtr<c_void>,
    is_libc: AtomicBool,
}

impl NextSymbol {
    const fn new() -> NextSymbol {
        NextSymbol { address: AtomicPtr::new(core::ptr::null_mut()), is_libc: AtomicBool::new(false) }
    }

    /// Finds the symbol. The C library lies at the addresses `libc`.
    fn find(&self, name: &CStr, libc: &Range<usize>) {
        // SAFETY: the name ends with NUL.
        let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        self.is_libc.store(libc.contains(&(address as usize)), Ordering::Relaxed);
        self.address.store(address, Ordering::Release);
    }

    /// Returns the symbol's address; null if there is none, or before [`find_next`].
    fn address(&self) -> *mut c_void {
        self.address.load(Ordering::Acquire)
    }

    /// Checks whether the symbol is the C library's. If another library stands in front of that, it
    /// must see each call.
    fn is_libc(&self) -> bool {
        self.is_libc.load(Ordering::Relaxed)
    }
}

/// Returns where the C library lies; nowhere if it cannot be found. (One look at the symbols of a library
/// takes microseconds. Opening the library would allocate before the program break is moved.)
fn libc_range() -> Range<usize> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is writable, and all zeros are a value of it.
    let base = unsafe {
        libc::dladdr(libc::__errno_location as *const c_void, info.as_mut_ptr());
        info.assume_init().dli_fbase as usize
    };
    if base == 0 {
        return 0..0;
    }
    // SAFETY: the loader has loaded an ELF file there, whose first page holds its headers, and which stays.
    let headers = unsafe {
        let file = &*(base as *const libc::Elf64_Ehdr);
        let first = (base + file.e_phoff as usize) as *const libc::Elf64_Phdr;
        core::slice::from_raw_parts(first, usize::from(file.e_phnum))
    };
    let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    base..loaded.map(|header| base + (header.p_vaddr + header.p_memsz) as usize).max().unwrap_or(base)
}

/// glibc's variable that says whether the process has had one thread only.
static SINGLE_THREADED: NextSymbol = NextSymbol::new();

/// Runs a call that is a point of cancellation: a thread that is cancelled meanwhile ends in it, as in
/// glibc's functions.
fn cancellable(call: impl FnOnce() -> isize) -> isize {
    let single = SINGLE_THREADED.address().cast::<c_char>();
    // SAFETY: glibc's variable, which it changes before a second thread begins.
    if !single.is_null() && unsafe { single.read_volatile() } != 0 {
        return call();
    }
    let mut old = 0;
    // SAFETY: as glibc does it around its own calls.
    unsafe { pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &mut old) };
    let result = call();
    // SAFETY: as above.
    unsafe { pthread_setcanceltype(old, core::ptr::null_mut()) };
    result
}

/// Kind of a call: whether a thread can be cancelled in it, and what EFAULT means.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CallKind {
    /// A thread can be cancelled in it.
    Cancellable,
    /// A thread can be cancelled in it, and EFAULT means that nothing was done.
    CancellablePath,
    /// A thread cannot be cancelled in it, and EFAULT means that nothing was done.
    Path,
}

/// Makes a call without a trap. `None` if the C library's function has to make it.
#[inline]
fn direct(number: libc::c_long, args: [usize; 6], kind: CallKind, buffers: &Buffers) -> Option<isize> {
    let announced = announce(buffers)?;
    // SAFETY: the program's own call, with what it may touch.
    let make = || unsafe { announced.make(number, args) };
    let result = if kind == CallKind::Path { make() } else { cancellable(make) };
    if kind != CallKind::Cancellable && result == -(libc::EFAULT as isize) {
        // The path goes on in a page that is far.
        return None;
    }
    if (-4095..0).contains(&result) {
        // SAFETY: this thread's variable.
        unsafe { *libc::__errno_location() = -result as c_int };
        return Some(-1);
    }
    Some(result)
}

/// Defines functions: name, parameters, result; the system call with its arguments; the kind; and how
/// its buffers are found.
macro_rules! interpose {
    ($($name:ident($($parameter:ident: $type:ty),*) -> $result:ty =
        $call:ident($($argument:expr),*), $kind:ident, |$buffers:ident| $find:expr;)*) => {
        $(
            /// Stands in front of the C library's function of this name, and does the same.
            ///
            /// # Safety
            /// The contract is that of the C library's function.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name($($parameter: $type),*) -> $result {
                if next::$name.is_libc() {
                    let mut $buffers = Buffers::default();
                    $find;
                    let mut args = [0usize; 6];
                    for (place, value) in args.iter_mut().zip([$($argument as usize),*]) {
                        *place = value;
                    }
                    if let Some(result) = direct(libc::$call, args, CallKind::$kind, &$buffers) {
                        return result as $result;
                    }
                }
                let next = next::$name.address();
                if next.is_null() {
                    // Nobody has had the time to look for it yet.
                    // SAFETY: the caller's own call.
                    return unsafe { libc::syscall(libc::$call, $($argument),*) as $result };
                }
                // SAFETY: the C library's function, which has this type.
                unsafe {
                    let next: unsafe extern "C" fn($($type),*) -> $result = core::mem::transmute(next);
                    next($($parameter),*)
                }
            }
        )*

        /// The C library's functions.
        #[allow(non_upper_case_globals, reason = "they have the names of functions")]
        mod next {
            use super::NextSymbol;
            $(pub(super) static $name: NextSymbol = NextSymbol::new();)*
        }

        /// Finds the functions behind ours. Not to be called from a handler of a signal.
        pub(crate) fn find_next() {
            const fn with_nul(name: &str) -> &CStr {
                match CStr::from_bytes_with_nul(name.as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name without NUL"),
                }
            }
            let libc = libc_range();
            SINGLE_THREADED.find(c"__libc_single_threaded", &libc);
            $(next::$name.find(const { with_nul(concat!(stringify!($name), "\0")) }, &libc);)*
        }
    };
}

/// Adds a buffer of a function that knows how large it can be at most; such a function ends the program
/// if `len` is larger.
fn add_checked(buffers: &mut Buffers, address: *mut c_void, len: usize, most: usize) {
    buffers.add(address as usize, len);
    if len > most {
        buffers.refuse();
    }
}

/// Adds the parts of a vectored transfer.
fn add_parts(buffers: &mut Buffers, parts: *const libc::iovec, count: c_int) {
    // SAFETY: the program has passed it as the C library wants it: an array, if it is on the stack.
    unsafe { buffers.add_vector(parts, count as usize) }
}

/// Adds a message.
fn add_message(buffers: &mut Buffers, message: *const libc::msghdr) {
    // SAFETY: as in `add_parts`.
    unsafe { buffers.add_message(message) }
}

/// Adds the address of a peer, of `len` bytes.
fn add_peer(buffers: &mut Buffers, address: *const libc::sockaddr, len: *const libc::socklen_t) {
    buffers.add(address as usize, size_of::<libc::sockaddr_storage>());
    buffers.add(len as usize, size_of::<libc::socklen_t>());
}

/// Adds a path and the place of an answer.
fn add_path(buffers: &mut Buffers, path: *const c_char, answer: *const c_void, len: usize) {
    buffers.add_path(path as usize);
    buffers.add(answer as usize, len);
}

const STAT_BYTES: usize = size_of::<libc::stat>();
const LINK: c_int = libc::AT_SYMLINK_NOFOLLOW;

interpose! {
    read(fd: c_int, buffer: *mut c_void, len: usize) -> isize =
        SYS_read(fd, buffer, len), Cancellable, |buffers| buffers.add(buffer as usize, len);
    write(fd: c_int, buffer: *const c_void, len: usize) -> isize =
        SYS_write(fd, buffer, len), Cancellable, |buffers| buffers.add(buffer as usize, len);
    pread(fd: c_int, buffer: *mut c_void, len: usize, offset: i64) -> isize =
        SYS_pread64(fd, buffer, len, offset), Cancellable, |buffers| buffers.add(buffer as usize, len);
    pread64(fd: c_int, buffer: *mut c_void, len: usize, offset: i64) -> isize =
        SYS_pread64(fd, buffer, len, offset), Cancellable, |buffers| buffers.add(buffer as usize, len);
    pwrite(fd: c_int, buffer: *const c_void, len: usize, offset: i64) -> isize =
        SYS_pwrite64(fd, buffer, len, offset), Cancellable, |buffers| buffers.add(buffer as usize, len);
    pwrite64(fd: c_int, buffer: *const c_void, len: usize, offset: i64) -> isize =
        SYS_pwrite64(fd, buffer, len, offset), Cancellable, |buffers| buffers.add(buffer as usize, len);
    readv(fd: c_int, parts: *const libc::iovec, count: c_int) -> isize =
        SYS_readv(fd, parts, count), Cancellable, |buffers| add_parts(&mut buffers, parts, count);
    writev(fd: c_int, parts: *const libc::iovec, count: c_int) -> isize =
        SYS_writev(fd, parts, count), Cancellable, |buffers| add_parts(&mut buffers, parts, count);

    recv(fd: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> isize =
        SYS_recvfrom(fd, buffer, len, flags, 0, 0), Cancellable, |buffers| buffers.add(buffer as usize, len);
    send(fd: c_int, buffer: *const c_void, len: usize, flags: c_int) -> isize =
        SYS_sendto(fd, buffer, len, flags, 0, 0), Cancellable, |buffers| buffers.add(buffer as usize, len);
    recvfrom(fd: c_int, buffer: *mut c_void, len: usize, flags: c_int, peer: *mut libc::sockaddr,
        peer_len: *mut libc::socklen_t) -> isize =
        SYS_recvfrom(fd, buffer, len, flags, peer, peer_len), Cancellable,
        |buffers| { buffers.add(buffer as usize, len); add_peer(&mut buffers, peer, peer_len) };
    sendto(fd: c_int, buffer: *const c_void, len: usize, flags: c_int, peer: *const libc::sockaddr,
        peer_len: libc::socklen_t) -> isize =
        SYS_sendto(fd, buffer, len, flags, peer, peer_len), Cancellable,
        |buffers| { buffers.add(buffer as usize, len); buffers.add(peer as usize, peer_len as usize) };
    recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize =
        SYS_recvmsg(fd, message, flags), Cancellable, |buffers| add_message(&mut buffers, message);
    sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize =
        SYS_sendmsg(fd, message, flags), Cancellable, |buffers| add_message(&mut buffers, message);

    poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int =
        SYS_poll(fds, count, timeout), Cancellable,
        |buffers| buffers.add(fds as usize, (count as usize).saturating_mul(size_of::<libc::pollfd>()));
    epoll_wait(epoll: c_int, events: *mut libc::epoll_event, most: c_int, timeout: c_int) -> c_int =
        SYS_epoll_wait(epoll, events, most, timeout), Cancellable,
        |buffers| buffers.add(events as usize, most.max(0) as usize * size_of::<libc::epoll_event>());

    open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int =
        SYS_openat(libc::AT_FDCWD, path, flags, mode), CancellablePath, |buffers| buffers.add_path(path as usize);
    open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int =
        SYS_openat(libc::AT_FDCWD, path, flags, mode), CancellablePath, |buffers| buffers.add_path(path as usize);
    openat(directory: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int =
        SYS_openat(directory, path, flags, mode), CancellablePath, |buffers| buffers.add_path(path as usize);
    openat64(directory: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int =
        SYS_openat(directory, path, flags, mode), CancellablePath, |buffers| buffers.add_path(path as usize);
    access(path: *const c_char, mode: c_int) -> c_int =
        SYS_access(path, mode), Path, |buffers| buffers.add_path(path as usize);
    readlink(path: *const c_char, answer: *mut c_char, len: usize) -> isize =
        SYS_readlink(path, answer, len), Path, |buffers| add_path(&mut buffers, path, answer.cast(), len);
    stat(path: *const c_char, answer: *mut libc::stat) -> c_int =
        SYS_newfstatat(libc::AT_FDCWD, path, answer, 0), Path,
        |buffers| add_path(&mut buffers, path, answer.cast(), STAT_BYTES);
    stat64(path: *const c_char, answer: *mut libc::stat) -> c_int =
        SYS_newfstatat(libc::AT_FDCWD, path, answer, 0), Path,
        |buffers| add_path(&mut buffers, path, answer.cast(), STAT_BYTES);
    lstat(path: *const c_char, answer: *mut libc::stat) -> c_int =
        SYS_newfstatat(libc::AT_FDCWD, path, answer, LINK), Path,
        |buffers| add_path(&mut buffers, path, answer.cast(), STAT_BYTES);
    lstat64(path: *const c_char, answer: *mut libc::stat) -> c_int =
        SYS_newfstatat(libc::AT_FDCWD, path, answer, LINK), Path,
        |buffers| add_path(&mut buffers, path, answer.cast(), STAT_BYTES);
    fstatat(directory: c_int, path: *const c_char, answer: *mut libc::stat, flags: c_int) -> c_int =
        SYS_newfstatat(directory, path, answer, flags), Path,
        |buffers| add_path(&mut buffers, path, answer.cast(), STAT_BYTES);
    fstatat64(directory: c_int, path: *const c_char, answer: *mut libc::stat, flags: c_int) -> c_int =
        SYS_newfstatat(directory, path, answer, flags), Path,
        |buffers| add_path(&mut buffers, path, answer.cast(), STAT_BYTES);

    __read_chk(fd: c_int, buffer: *mut c_void, len: usize, most: usize) -> isize =
        SYS_read(fd, buffer, len), Cancellable, |buffers| add_checked(&mut buffers, buffer, len, most);
    __pread_chk(fd: c_int, buffer: *mut c_void, len: usize, offset: i64, most: usize) -> isize =
        SYS_pread64(fd, buffer, len, offset), Cancellable, |buffers| add_checked(&mut buffers, buffer, len, most);
    __pread64_chk(fd: c_int, buffer: *mut c_void, len: usize, offset: i64, most: usize) -> isize =
        SYS_pread64(fd, buffer, len, offset), Cancellable, |buffers| add_checked(&mut buffers, buffer, len, most);
    __recv_chk(fd: c_int, buffer: *mut c_void, len: usize, most: usize, flags: c_int) -> isize =
        SYS_recvfrom(fd, buffer, len, flags, 0, 0), Cancellable, |buffers| add_checked(&mut buffers, buffer, len, most);
}
