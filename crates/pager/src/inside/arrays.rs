//! Memory for arrays of NumPy: near or far, as the program chooses for each array (NEP 49).
//!
//! - *Far* arrays of [`CAPTURE_BYTES`] or more are mappings of their own in the window, whatever else
//!   of the program is captured. Smaller ones are `malloc`'s: near, or far with its other blocks.
//! - *Near* arrays of every size lie in a heap of their own, outside of the window. They never leave,
//!   and do not count against the budget: nothing could be evicted to make room for them.
//!
//! Each function finds by the address alone how long an array is, because the size that NumPy gives
//! back with it need not be the one that it asked for. Nothing here reads an array to free it: that
//! would bring a far page near.
//!
//! These functions run in threads of the program, outside of our handlers. Forks take [`lock`] before
//! anything else, so that a child finds neither lock held by a thread that it does not have.

use super::lock::SpinLock;
use crate::filter::CAPTURE_BYTES;
use crate::window;
use core::ffi::c_void;
use core::ptr;
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::memory;
use std::collections::BTreeMap;

/// Minimum size in bytes of arrays that lie in huge pages where the kernel has some. NumPy asks for
/// them from the same size on.
const HUGE_BYTES: usize = 4 << 20;

/// Alignment in bytes of what `malloc` and dlmalloc return.
const ALIGN: usize = 16;

/// The functions by which NumPy gets and frees the memory of arrays, version 1
/// (`PyDataMemAllocator`).
#[repr(C)]
pub struct ArrayAllocator {
    context: *mut c_void,
    malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void, usize),
}

/// NumPy's description of an allocator (`PyDataMem_Handler`).
#[repr(C)]
pub struct ArrayHandler {
    name: [u8; 127],
    version: u8,
    allocator: ArrayAllocator,
}

// SAFETY: it is never written, and `context` is null.
unsafe impl Sync for ArrayHandler {}

const fn handler(name: &str, allocator: ArrayAllocator) -> ArrayHandler {
    let mut bytes = [0; 127];
    let (head, _) = bytes.split_at_mut(name.len());
    head.copy_from_slice(name.as_bytes());
    ArrayHandler { name: bytes, version: 1, allocator }
}

/// Handler whose arrays stay near.
pub static NEAR: ArrayHandler = handler(
    "farfield_near",
    ArrayAllocator {
        context: ptr::null_mut(),
        malloc: near_malloc,
        calloc: near_calloc,
        realloc: near_realloc,
        free: near_free,
    },
);

/// Handler whose arrays are far-capable.
pub static FAR: ArrayHandler = handler(
    "farfield_far",
    ArrayAllocator {
        context: ptr::null_mut(),
        malloc: far_malloc,
        calloc: far_calloc,
        realloc: far_realloc,
        free: far_free,
    },
);

/// Locks what the functions here share while the process is copied.
pub fn lock() -> impl Sized {
    (NEAR_HEAP.lock(), FAR_ARRAYS.lock())
}

/// Pages for near arrays. The gate keeps them outside of the window.
struct ArrayPages;

// SAFETY: hands out fresh private mappings and takes the same back.
unsafe impl dlmalloc::Allocator for ArrayPages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let Ok(address) = memory::map_anonymous(size) else { return (ptr::null_mut(), 0, 0) };
        if size >= HUGE_BYTES {
            // SAFETY: advice that changes no content. Without huge pages it is refused.
            let _ = unsafe { memory::madvise(address, size, libc::MADV_HUGEPAGE) };
        }
        (address as *mut u8, size, 0)
    }
    fn remap(&self, address: *mut u8, old: usize, new: usize, may_move: bool) -> *mut u8 {
        // SAFETY: dlmalloc moves a mapping that `alloc` made, and uses only the new place.
        match unsafe { memory::mremap(address as usize, old, new, may_move) } {
            Ok(address) => address as *mut u8,
            Err(_) => ptr::null_mut(),
        }
    }
    fn free_part(&self, address: *mut u8, old: usize, new: usize) -> bool {
        // SAFETY: dlmalloc gives back the end of a mapping that `alloc` made.
        unsafe { memory::munmap(address as usize + new, old - new) }.is_ok()
    }
    fn free(&self, address: *mut u8, size: usize) -> bool {
        // SAFETY: dlmalloc gives back a mapping that `alloc` made.
        unsafe { memory::munmap(address as usize, size) }.is_ok()
    }
    fn can_release_part(&self, _: u32) -> bool {
        true
    }
    fn allocates_zeros(&self) -> bool {
        true
    }
    fn page_size(&self) -> usize {
        PAGE_BYTES
    }
}

static NEAR_HEAP: SpinLock<dlmalloc::Dlmalloc<ArrayPages>> =
    SpinLock::new(dlmalloc::Dlmalloc::new_with_allocator(ArrayPages));

unsafe extern "C" fn near_malloc(_: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the lock makes it exclusive.
    unsafe { NEAR_HEAP.lock().c_malloc(size) }.cast()
}

unsafe extern "C" fn near_calloc(_: *mut c_void, count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return ptr::null_mut() };
    // SAFETY: as above.
    unsafe { NEAR_HEAP.lock().calloc(bytes, ALIGN) }.cast()
}

unsafe extern "C" fn near_realloc(_: *mut c_void, array: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: `array` is null or comes from this heap: NumPy keeps the handler with each array.
    unsafe { NEAR_HEAP.lock().c_realloc(array.cast(), size.max(1)) }.cast()
}

unsafe extern "C" fn near_free(_: *mut c_void, array: *mut c_void, _: usize) {
    if !array.is_null() {
        // SAFETY: as above.
        unsafe { NEAR_HEAP.lock().c_free(array.cast()) }
    }
}

/// Length in bytes of each far array that is a mapping, by address.
static FAR_ARRAYS: SpinLock<BTreeMap<usize, usize>> = SpinLock::new(BTreeMap::new());

/// Returns the length of the mapping for an array of `size` bytes; `None` if it is `malloc`'s.
fn mapping_bytes(size: usize) -> Option<usize> {
    (size >= CAPTURE_BYTES as usize).then(|| size.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX))
}

/// Returns the length of the mapping that `array` is; `None` if it is `malloc`'s.
fn mapping_of(array: *mut c_void) -> Option<usize> {
    // Blocks of malloc begin behind a header, so most of them are not looked up.
    let is_mapping = (array as usize).is_multiple_of(PAGE_BYTES);
    is_mapping.then(|| FAR_ARRAYS.lock().get(&(array as usize)).copied()).flatten()
}

/// Maps a far array. The call is not made through the gate: it is the program's, and traps.
fn map(len: usize) -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping; the address is a hint.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, window::ANYWHERE, len, prot as usize, flags as usize, -1, 0) };
    if mapped == -1 {
        return ptr::null_mut();
    }
    FAR_ARRAYS.lock().insert(mapped as usize, len);
    mapped as *mut c_void
}

unsafe extern "C" fn far_malloc(_: *mut c_void, size: usize) -> *mut c_void {
    match mapping_bytes(size) {
        Some(len) => map(len),
        // SAFETY: any size is allowed.
        None => unsafe { libc::malloc(size) },
    }
}

unsafe extern "C" fn far_calloc(_: *mut c_void, count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size).map(mapping_bytes) {
        // A new mapping is zero.
        Some(Some(len)) => map(len),
        // SAFETY: any count and size are allowed; a product that is too large is refused.
        _ => unsafe { libc::calloc(count, size) },
    }
}

unsafe extern "C" fn far_realloc(context: *mut c_void, array: *mut c_void, size: usize) -> *mut c_void {
    let (old, new) = (mapping_of(array), mapping_bytes(size));
    match (old, new) {
        // SAFETY: `array` is null or malloc's: NumPy keeps the handler with each array.
        (None, None) => unsafe { libc::realloc(array, size.max(1)) },
        (Some(old), Some(new)) if old == new => array,
        (Some(old), Some(new)) => {
            // It is forgotten first: once it has moved, another thread may be given the old address.
            FAR_ARRAYS.lock().remove(&(array as usize));
            // SAFETY: the array's own mapping. The program uses only what is returned.
            let moved = unsafe { libc::syscall(libc::SYS_mremap, array, old, new, libc::MREMAP_MAYMOVE as usize, 0) };
            let has_moved = moved != -1;
            let (address, len) = if has_moved { (moved as usize, new) } else { (array as usize, old) };
            FAR_ARRAYS.lock().insert(address, len);
            if has_moved { moved as *mut c_void } else { ptr::null_mut() }
        }
        _ => {
            // SAFETY: `array` is null or malloc's where it is no mapping.
            let old = old.unwrap_or_else(|| unsafe { libc::malloc_usable_size(array) });
            // SAFETY: any size is allowed.
            let moved = unsafe { far_malloc(context, size) };
            if !moved.is_null() {
                // SAFETY: both are as long as that, and the new one is nobody else's.
                unsafe {
                    ptr::copy_nonoverlapping(array.cast::<u8>(), moved.cast(), old.min(size));
                    far_free(context, array, 0);
                }
            }
            moved
        }
    }
}

unsafe extern "C" fn far_free(_: *mut c_void, array: *mut c_void, _: usize) {
    // It is forgotten first: another thread may be given the same address at once.
    let is_mapping = (array as usize).is_multiple_of(PAGE_BYTES);
    match is_mapping.then(|| FAR_ARRAYS.lock().remove(&(array as usize))).flatten() {
        Some(len) => {
            // SAFETY: the array's own mapping, which nobody uses any more. The call is the program's, and traps.
            unsafe { libc::syscall(libc::SYS_munmap, array, len) };
        }
        // SAFETY: null or malloc's: NumPy keeps the handler with each array.
        None => unsafe { libc::free(array) },
    }
}

#[cfg(test)]
mod tests {
    //! Danger: an array is cut, or freed by another allocator, when it grows or shrinks over the bound
    //! between small and large.
    use super::*;

    /// Grows and shrinks an array through all sizes, and compares what must be left of it.
    fn resize(handler: &ArrayHandler) {
        let ArrayAllocator { context, calloc, realloc, free, .. } = handler.allocator;
        let bound = CAPTURE_BYTES as usize;
        let sizes = [8, bound - 1, bound, 3 * bound + 5, 40 * bound, 2 * bound, bound - 8, 0, 100];
        // SAFETY: the array is used only as far as it goes, and freed once, with a size that is wrong.
        unsafe {
            let mut array = calloc(context, 8, 1).cast::<u8>();
            let mut kept = 8;
            for (turn, size) in sizes.into_iter().enumerate() {
                array = realloc(context, array.cast(), size).cast();
                kept = kept.min(size);
                let bytes = core::slice::from_raw_parts_mut(array, size);
                assert!(bytes[..kept].iter().all(|byte| usize::from(*byte) == turn), "{size} after turn {turn}");
                bytes.fill(turn as u8 + 1);
                kept = size;
            }
            free(context, array.cast(), 1);
            assert!(calloc(context, usize::MAX / 2, 3).is_null());
            assert!(realloc(context, ptr::null_mut(), usize::MAX - 1).is_null());
            let zeros = calloc(context, bound, 2).cast::<u8>();
            assert!(core::slice::from_raw_parts(zeros, 2 * bound).iter().all(|byte| *byte == 0));
            free(context, zeros.cast(), 7);
            free(context, ptr::null_mut(), 0);
        }
    }

    #[test]
    fn arrays_keep_their_content_through_all_sizes() {
        resize(&NEAR);
        resize(&FAR);
        assert!(FAR_ARRAYS.lock().is_empty());
    }
}
