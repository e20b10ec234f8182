//! The shared library that `farfield run` loads into a program, or that a program loads itself.
//!
//! Only the entry points, the allocator, and functions in front of glibc's are here; everything else is
//! in `farfield_pager::inside`.

mod interposed;

use core::ffi::{CStr, c_char, c_int, c_void};
use farfield_pager::filter::reservation_flags;
use farfield_pager::inside::{arrays, heap::PreloadAllocator, late_start, start};

#[global_allocator]
static HEAP: PreloadAllocator = PreloadAllocator;

extern "C" fn constructor(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    interposed::find_next();
    // SAFETY: glibc's loader passes argc, argv and the environment to constructors.
    unsafe { start::start(environment) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = constructor;

/// Switches far memory on in this process, which runs already. It joins the job whose configuration
/// is at `path`; `library` is the path of this library. Returns 0, or -1 with the reason in
/// `message`, as a NUL-terminated text of at most `message_bytes` bytes. Nothing is read from the
/// environment, and nothing is changed if the conditions are not met.
///
/// # Safety
/// `path` and `library` must be NUL-terminated; `message` must have room for `message_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farfield_start(
    path: *const c_char,
    library: *const c_char,
    message: *mut c_char,
    message_bytes: usize,
) -> c_int {
    // SAFETY: by the caller.
    let (path, library) = unsafe { (CStr::from_ptr(path), CStr::from_ptr(library)) };
    let Err(error) = late_start::start(path, library) else { return 0 };
    if message_bytes > 0 {
        let text = error.to_string();
        let len = text.len().min(message_bytes - 1);
        // SAFETY: room by the caller.
        unsafe {
            core::ptr::copy_nonoverlapping(text.as_ptr(), message.cast(), len);
            message.add(len).write(0);
        }
    }
    -1
}

/// Returns NumPy's description of an allocator (`PyDataMem_Handler`, NEP 49) whose arrays stay near,
/// or are far-capable. It lives as long as the process, works in every process, and each array must
/// be freed by the handler that made it. [`arrays`] says where the arrays lie.
#[unsafe(no_mangle)]
pub extern "C" fn farfield_array_handler(is_far: c_int) -> *const arrays::ArrayHandler {
    if is_far == 0 { &raw const arrays::NEAR } else { &raw const arrays::FAR }
}

/// Returns the name that a capsule with such a handler must have. It lives as long as the process:
/// NumPy compares it whenever it frees an array, also while the interpreter ends.
#[unsafe(no_mangle)]
pub extern "C" fn farfield_array_capsule() -> *const c_char {
    c"mem_handler".as_ptr()
}

/// Maps memory as glibc's `mmap` does, but gives reservations a flag by which the filter can tell
/// them from the loader's.
///
/// # Safety
/// The contract is that of glibc's `mmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's own call. It sets `errno` as it should.
    let mapped = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            address,
            len,
            i64::from(prot),
            i64::from(reservation_flags(prot, flags)),
            i64::from(fd),
            offset,
        )
    };
    mapped as *mut c_void
}

/// Maps memory like [`mmap`]; the two are equal because offsets have 64 bits.
///
/// # Safety
/// The contract is that of glibc's `mmap64`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as above.
    unsafe { mmap(address, len, prot, flags, fd, offset) }
}
