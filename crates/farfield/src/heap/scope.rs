//! Scopes: how long a reference into the heap is good.

use super::scopes::Open;
use super::{Core, Record};
use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;

/// The time in which values that were dereferenced stay near, and where they are. Belongs to the thread that entered it.
///
/// A scope that is forgotten (`mem::forget`) never ends: what is near stays near, and the heap's memory is never freed.
///
/// References cannot outlive it:
///
/// ```compile_fail,E0505
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc(7).unwrap();
/// let scope = heap.enter();
/// let seven = value.get(&scope).unwrap();
/// drop(scope);
/// println!("{seven}"); // error: cannot move out of `scope` because it is borrowed
/// ```
///
/// ```compile_fail,E0502
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let value = heap.alloc(7).unwrap();
/// let mut scope = heap.enter();
/// let seven = value.get(&scope).unwrap();
/// scope.renew(); // error: cannot borrow `scope` as mutable
/// println!("{seven}");
/// ```
///
/// ```compile_fail,E0277
/// # let heap = farfield::Heap::builder().build().unwrap();
/// let scope = heap.enter();
/// std::thread::scope(|threads| { threads.spawn(|| &scope); }); // error: cannot be shared between threads
/// ```
///
/// ```compile_fail,E0505
/// let heap = farfield::Heap::builder().build().unwrap();
/// let scope = heap.enter();
/// drop(heap); // error: cannot move out of `heap` because it is borrowed
/// drop(scope);
/// ```
pub struct Scope<'heap> {
    pub(crate) words: *const AtomicU64,
    pub(crate) arena: *mut u8,
    pub(crate) first_page: u32,
    pub(crate) pages: u32,
    pub(crate) core: &'heap Core,
    pub(crate) record: &'heap Record,
    pub(crate) open: &'heap Open,
    /// Not `Send`: its record belongs to this thread.
    stays: PhantomData<*mut ()>,
}

impl<'heap> Scope<'heap> {
    #[inline]
    pub(crate) fn new(core: &'heap Core) -> Scope<'heap> {
        let record = core.record();
        if core.frames.is_scarce() && record.entered().is_none() {
            core.relieve();
        }
        let open = record.enter(&core.epoch);
        Scope {
            words: core.words.base(),
            arena: core.frames.base(),
            first_page: core.first_page,
            pages: core.pages,
            core,
            record,
            open,
            stays: PhantomData,
        }
    }

    /// Ends this scope and begins it again: all references from it end here. Cheaper than a new scope, and enough to let
    /// pages leave, unless this thread has older scopes open in the heap; then it says so by `false`.
    pub fn renew(&mut self) -> bool {
        self.record.renew(&self.core.epoch, self.open);
        self.record.entered() == Some(self.open.began())
    }

    /// A reference from this scope exists from now on.
    #[inline]
    pub(crate) fn mark_used(&self) {
        self.open.used.set(true);
    }

    /// Nobody has a reference from a scope of this thread, so nothing is lost if it begins anew.
    pub(crate) fn is_renewable(&self) -> bool {
        !self.open.used.get() && self.record.is_single()
    }

    /// Something is looked up, without [`Scope::page`].
    #[inline]
    pub(crate) fn touch(&self) {
        self.open.touched.set(true);
    }

    /// Until the guard goes, what is brought near with this scope stays, as if references had been given out. For operations that
    /// need several places at a time.
    pub(crate) fn hold(&self) -> Hold<'_> {
        if self.is_renewable() {
            self.record.renew(&self.core.epoch, self.open);
        }
        Hold { scope: self, used: self.open.used.replace(true) }
    }

    /// Is it a scope of the heap that this page belongs to? Its number within the heap.
    #[inline]
    pub(crate) fn page(&self, page: u32) -> Option<u32> {
        self.touch();
        self.number(page)
    }

    /// The same for those who mark the scope as used before they rely on what they see, and for hints.
    #[inline]
    pub(crate) fn number(&self, page: u32) -> Option<u32> {
        let page = page.wrapping_sub(self.first_page);
        (page < self.pages).then_some(page)
    }
}

/// See [`Scope::hold`].
pub(crate) struct Hold<'a> {
    scope: &'a Scope<'a>,
    used: bool,
}

impl Hold<'_> {
    /// Nobody has had a reference from the scope.
    pub(crate) fn is_only(&self) -> bool {
        !self.used
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.scope.open.used.set(self.used);
    }
}

impl Drop for Scope<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.record.leave(self.open) && self.core.has_graves() {
            self.core.bury_all(false);
        }
    }
}

impl core::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Scope")
    }
}
