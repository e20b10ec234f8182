//! Registry of heaps by page number: pages of all heaps of the process have different numbers.

use super::HeapInner;
use crate::config::Config;
use core::sync::atomic::{AtomicPtr, Ordering};
use farfield_core::heap::FreeRuns;
use std::sync::{Mutex, PoisonError};

/// Number of steps of [`Config::FAR_STEP_PAGES`] pages that 32-bit page numbers have.
const STEPS: usize = (1 << 32) / Config::FAR_STEP_PAGES as usize;

static HEAPS: [AtomicPtr<HeapInner>; STEPS] = [const { AtomicPtr::new(core::ptr::null_mut()) }; STEPS];

/// Steps that no heap has. Step 0 is never given out, so no page of a heap has number 0.
static FREE: Mutex<Option<FreeRuns>> = Mutex::new(None);

/// Reserves numbers for so many pages, a multiple of a step. Returns the first, or `None` if there
/// are too few.
pub(super) fn reserve(pages: u64) -> Option<u32> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let free = free.get_or_insert_with(|| {
        let mut runs = FreeRuns::new();
        runs.put(1, STEPS as u32 - 1);
        runs
    });
    let steps = u32::try_from(pages / Config::FAR_STEP_PAGES).ok()?;
    free.take(steps).map(|step| step * Config::FAR_STEP_PAGES as u32)
}

/// Gives the numbers of `pages` pages from `first` on back.
pub(super) fn give_back(first: u32, pages: u64) {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(free) = &mut *free {
        free.put(first / Config::FAR_STEP_PAGES as u32, (pages / Config::FAR_STEP_PAGES) as u32);
    }
}

/// Enters a heap for its pages, or removes it (null).
pub(super) fn set(first: u32, pages: u64, core: *mut HeapInner) {
    let step = (first / Config::FAR_STEP_PAGES as u32) as usize;
    for entry in &HEAPS[step..step + (pages / Config::FAR_STEP_PAGES) as usize] {
        entry.store(core, Ordering::Release);
    }
}

/// Returns the heap of a page in which a value lives; it exists as long as the value does.
pub(crate) fn heap_of(page: u32) -> *const HeapInner {
    let core = HEAPS[(page / Config::FAR_STEP_PAGES as u32) as usize].load(Ordering::Acquire);
    assert!(!core.is_null(), "a far pointer without a heap");
    core
}
