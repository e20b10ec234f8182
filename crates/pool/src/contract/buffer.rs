//! Page-aligned buffers with one checksum per page; each has one owner at a time.

use farfield_core::{checksum, geometry::PAGE_BYTES};

/// Run of pages in near memory. Sent to a lane with an operation and returned with its completion.
pub struct Buffer {
    bytes: *mut u8,
    sums: Box<[u64]>,
    pages: usize,
    /// Whether the memory was allocated by `new`, and so is freed on drop.
    owned: bool,
}

// SAFETY: the memory is the buffer's alone (`new`, `over`).
unsafe impl Send for Buffer {}

impl core::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Buffer({} of {} pages)", self.pages, self.sums.len())
    }
}

impl Buffer {
    /// Makes a zeroed buffer that can hold up to `capacity` pages. Its `pages()` starts at
    /// `capacity`.
    pub fn new(capacity: usize) -> Buffer {
        assert!(capacity > 0);
        let layout = Self::layout(capacity);
        // SAFETY: the layout has a non-zero size.
        let bytes = unsafe { std::alloc::alloc_zeroed(layout) };
        if bytes.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Buffer { bytes, sums: vec![0; capacity].into_boxed_slice(), pages: capacity, owned: true }
    }

    /// Makes a buffer over `pages` pages of memory that the caller allocated and will free. What is
    /// read arrives directly in its final place.
    ///
    /// # Safety
    /// `bytes` is aligned to a page. The `pages` pages from there on are initialised memory that no
    /// other code accesses or frees before the buffer is dropped.
    pub unsafe fn over(bytes: *mut u8, pages: usize) -> Buffer {
        assert!(pages > 0 && (bytes as usize).is_multiple_of(PAGE_BYTES));
        Buffer { bytes, sums: vec![0; pages].into_boxed_slice(), pages, owned: false }
    }

    fn layout(capacity: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(capacity * PAGE_BYTES, PAGE_BYTES).expect("size fits")
    }

    /// Returns the greatest number of pages that the buffer can hold.
    pub fn capacity(&self) -> usize {
        self.sums.len()
    }

    /// Returns the number of pages in use: the length of the run that an operation moves.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Sets the number of pages in use; between 1 and the capacity, otherwise it panics.
    pub fn set_pages(&mut self, pages: usize) {
        assert!(pages > 0 && pages <= self.sums.len());
        self.pages = pages;
    }

    /// Returns the bytes of the pages in use.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: at least this many bytes, initialised, exclusively ours (`new`, `over`).
        unsafe { core::slice::from_raw_parts(self.bytes, self.pages * PAGE_BYTES) }
    }

    /// Returns the bytes of the pages in use, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes it exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.bytes, self.pages * PAGE_BYTES) }
    }

    /// Returns the bytes of the `index`-th page.
    pub fn page(&self, index: usize) -> &[u8] {
        &self.bytes()[index * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// Returns the bytes of the `index`-th page, to be written.
    pub fn page_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes_mut()[index * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// Returns the checksums of the pages in use.
    pub fn sums(&self) -> &[u64] {
        &self.sums[..self.pages]
    }

    /// Returns the checksums of the pages in use, to be filled by the code that fills the pages.
    pub fn sums_mut(&mut self) -> &mut [u64] {
        &mut self.sums[..self.pages]
    }

    /// Computes the checksums of all pages in use.
    pub fn seal(&mut self) {
        for index in 0..self.pages {
            self.sums[index] = checksum(self.page(index));
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: allocated in `new` with the same layout.
            unsafe { std::alloc::dealloc(self.bytes, Self::layout(self.sums.len())) }
        }
    }
}
