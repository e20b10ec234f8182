//! Address space: memory that is reserved in one piece and costs only where it is touched.

use crate::error::BuildError;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// A range of fresh, zeroed memory.
pub(crate) struct Reserved {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it is only an address range; code that accesses it synchronises for itself.
unsafe impl Send for Reserved {}
// SAFETY: as above.
unsafe impl Sync for Reserved {}

/// Alignment of reserved memory, in bytes, so that huge pages can back it.
const ALIGN: usize = 2 << 20;

impl Reserved {
    /// Reserves `len` bytes that read as zeros.
    pub(crate) fn new(len: usize) -> Result<Reserved, BuildError> {
        #[cfg(not(miri))]
        let base = {
            let refused = |errno: farfield_os::Errno| BuildError::Os { what: "address space", why: errno.to_string() };
            let mapped = farfield_os::memory::map_anonymous(len + ALIGN).map_err(refused)?;
            let base = mapped.next_multiple_of(ALIGN);
            let (before, after) = (base - mapped, mapped + ALIGN - base);
            for (addr, len) in [(mapped, before), (base + len, after)] {
                if len > 0 {
                    // SAFETY: part of the mapping made above, which nobody knows yet. It cannot
                    // fail on such a range, and if it did, address space would be wasted and
                    // nothing else.
                    let _ = unsafe { farfield_os::memory::munmap(addr, len) };
                }
            }
            base as *mut u8
        };
        #[cfg(miri)]
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc_zeroed(Self::layout(len)) };
        let base = NonNull::new(base).expect("a mapping is not at 0");
        Ok(Reserved { base, len })
    }

    #[cfg(miri)]
    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len, ALIGN).expect("it fits")
    }

    /// Returns the address of the first byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the address of byte `at`. Panics if `at..at + len` is not inside the range.
    fn range(&self, at: usize, len: usize) -> usize {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        self.base.as_ptr() as usize + at
    }

    /// Asks the kernel for huge pages in `at..at + len`.
    pub(crate) fn prefer_huge(&self, at: usize, len: usize) {
        let addr = self.range(at, len);
        if cfg!(not(miri)) {
            // SAFETY: advice that changes no content. Refused where huge pages are off, which costs speed only.
            let _ = unsafe { farfield_os::memory::madvise(addr, len, libc::MADV_HUGEPAGE) };
        }
    }

    /// Gives `at..at + len` back to the kernel; it reads as zeros afterwards.
    ///
    /// # Safety
    /// Nobody uses the range now or relies on what is in it.
    pub(crate) unsafe fn give_back(&self, at: usize, len: usize) {
        let addr = self.range(at, len);
        if cfg!(miri) {
            // SAFETY: inside the allocation, and unused as the caller promises.
            unsafe { core::ptr::write_bytes(self.base().add(at), 0, len) };
        } else {
            // SAFETY: passed on to the caller. It cannot fail on a mapping of ours.
            let _ = unsafe { farfield_os::memory::madvise(addr, len, libc::MADV_DONTNEED) };
        }
    }

    /// Allows or forbids any access to `at..at + len`.
    ///
    /// # Safety
    /// When forbidden, nobody accesses the range.
    pub(crate) unsafe fn set_access(&self, at: usize, len: usize, allowed: bool) {
        let addr = self.range(at, len);
        if cfg!(not(miri)) {
            let protection = if allowed { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
            // SAFETY: passed on to the caller.
            let result = unsafe { farfield_os::memory::mprotect(addr, len, protection) };
            assert!(!allowed || result.is_ok(), "the kernel has no room for one more mapping: {result:?}");
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        #[cfg(not(miri))]
        // SAFETY: made in `new`; the owner of the range is gone, so nobody uses it.
        let _ = unsafe { farfield_os::memory::munmap(self.base() as usize, self.len) };
        #[cfg(miri)]
        // SAFETY: made in `new` with this layout.
        unsafe {
            std::alloc::dealloc(self.base(), Self::layout(self.len))
        };
    }
}

/// Types for which zeroed memory is a value, and that need no destructor.
///
/// # Safety
/// All bytes zero is a valid value, the type is not larger in alignment than a page, and has no `Drop`.
pub(crate) unsafe trait Zeroed {}

// SAFETY: zero is a number.
unsafe impl Zeroed for core::sync::atomic::AtomicU64 {}
// SAFETY: as above.
unsafe impl Zeroed for core::sync::atomic::AtomicU32 {}

/// A long array in reserved memory.
pub(crate) struct ReservedArray<T: Zeroed> {
    memory: Reserved,
    len: usize,
    holds: PhantomData<T>,
}

impl<T: Zeroed> ReservedArray<T> {
    pub(crate) fn new(len: usize) -> Result<ReservedArray<T>, BuildError> {
        Ok(ReservedArray {
            memory: Reserved::new((len * size_of::<T>()).next_multiple_of(4096))?,
            len,
            holds: PhantomData,
        })
    }

    pub(crate) fn base(&self) -> *const T {
        self.memory.base().cast()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Asks for huge pages for the bytes `at..at + len`; does nothing if the table is shorter.
    pub(crate) fn prefer_huge(&self, at: usize, len: usize) {
        if at + len <= self.len * size_of::<T>() {
            self.memory.prefer_huge(at, len);
        }
    }
}

impl<T: Zeroed> core::ops::Index<u32> for ReservedArray<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        assert!((index as usize) < self.len);
        // SAFETY: inside the reserved memory, aligned because its base is, and zeroed memory is a value (Zeroed).
        // Nobody has a `&mut` to an element, because none is ever given out.
        unsafe { &*self.base().add(index as usize) }
    }
}

// Shared access to elements is all that a table gives.
// SAFETY: `&ReservedArray<T>` gives `&T` only.
unsafe impl<T: Zeroed + Sync> Sync for ReservedArray<T> {}
// SAFETY: it owns its elements, which have no ties to a thread if `T` is Send.
unsafe impl<T: Zeroed + Send> Send for ReservedArray<T> {}
