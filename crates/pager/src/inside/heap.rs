//! Our own heap: near memory, apart from the program's, usable inside signal handlers.
//!
//! The allocator is dlmalloc over pages mapped through the gate. Its size is part of the near
//! budget.

use super::lock::SpinLock;
use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicI64, Ordering};

/// Bytes mapped for our heap.
pub static HEAP_BYTES: AtomicI64 = AtomicI64::new(0);

struct MmapAllocator;

// SAFETY: hands out fresh private mappings and takes the same back.
unsafe impl dlmalloc::Allocator for MmapAllocator {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        match farfield_os::memory::map_anonymous(size) {
            Ok(address) => {
                HEAP_BYTES.fetch_add(size as i64, Ordering::Relaxed);
                (address as *mut u8, size, 0)
            }
            Err(_) => (core::ptr::null_mut(), 0, 0),
        }
    }
    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        core::ptr::null_mut()
    }
    fn free_part(&self, ptr: *mut u8, old: usize, new: usize) -> bool {
        // SAFETY: dlmalloc gives back the end of a mapping that `alloc` made.
        let done = unsafe { farfield_os::memory::munmap(ptr as usize + new, old - new) }.is_ok();
        if done {
            HEAP_BYTES.fetch_sub((old - new) as i64, Ordering::Relaxed);
        }
        done
    }
    fn free(&self, ptr: *mut u8, size: usize) -> bool {
        // SAFETY: dlmalloc gives back a mapping that `alloc` made.
        let done = unsafe { farfield_os::memory::munmap(ptr as usize, size) }.is_ok();
        if done {
            HEAP_BYTES.fetch_sub(size as i64, Ordering::Relaxed);
        }
        done
    }
    fn can_release_part(&self, _: u32) -> bool {
        true
    }
    fn allocates_zeros(&self) -> bool {
        true
    }
    fn page_size(&self) -> usize {
        4096
    }
}

static INNER: SpinLock<dlmalloc::Dlmalloc<MmapAllocator>> =
    SpinLock::new(dlmalloc::Dlmalloc::new_with_allocator(MmapAllocator));

/// Global allocator of the preload library.
pub struct PreloadAllocator;

/// Locks the heap while the process is copied.
pub fn lock() -> impl Sized {
    INNER.lock()
}

// SAFETY: dlmalloc keeps the contract of GlobalAlloc; the lock makes it exclusive.
unsafe impl GlobalAlloc for PreloadAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on to the caller.
        unsafe { INNER.lock().malloc(layout.size(), layout.align()) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on to the caller.
        unsafe { INNER.lock().calloc(layout.size(), layout.align()) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: passed on to the caller.
        unsafe { INNER.lock().free(ptr, layout.size(), layout.align()) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: passed on to the caller.
        unsafe { INNER.lock().realloc(ptr, layout.size(), layout.align(), new_size) }
    }
}
