//! The shared library that `farfield run` loads into a program.
//!
//! Only the entry point, the allocator, and an `mmap` in front of glibc's are here; everything else
//! is in `farfield_pager::inside`.

use core::ffi::{c_char, c_int, c_void};
use farfield_pager::filter::reservation_flags;
use farfield_pager::inside::{heap::PreloadAllocator, start};

#[global_allocator]
static HEAP: PreloadAllocator = PreloadAllocator;

extern "C" fn constructor(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    // SAFETY: glibc's loader passes argc, argv and the environment to constructors.
    unsafe { start::start(environment) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = constructor;

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
