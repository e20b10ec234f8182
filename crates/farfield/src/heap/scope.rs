//! Scopes: how long a reference into the heap is valid.

use super::scopes::ScopeState;
use super::{HeapInner, ThreadState};
use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;

/// Guard that keeps dereferenced values near and in place (epoch-based reclamation).
///
/// Like a `Guard` of crossbeam-epoch, it belongs to the thread that entered it.
///
/// A scope that is forgotten (`mem::forget`) never ends: what is near stays near, and the heap's
/// memory is never freed.
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
    pub(crate) core: &'heap HeapInner,
    pub(crate) record: &'heap ThreadState,
    pub(crate) open: &'heap ScopeState,
    /// Marker that makes this not `Send`: its record belongs to this thread.
    stays: PhantomData<*mut ()>,
}

impl<'heap> Scope<'heap> {
    #[inline]
    pub(crate) fn new(core: &'heap HeapInner) -> Scope<'heap> {
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

    /// Ends this scope and begins it again: all references from it end here.
    ///
    /// Cheaper than a new scope, and enough to let pages leave, unless this thread has older scopes
    /// open in the heap. Then it returns false.
    pub fn renew(&mut self) -> bool {
        self.record.renew(&self.core.epoch, self.open);
        self.record.entered() == Some(self.open.began())
    }

    /// Notes that a reference from this scope exists from now on.
    #[inline]
    pub(crate) fn mark_used(&self) {
        self.open.used.set(true);
    }

    /// Checks whether the scope can be renewed unnoticed: it is the thread's only one, and keeps no
    /// address valid that anybody knows.
    ///
    /// Such an address may be in a reference, or in an operation that is not over, whose user code
    /// may have come back to the same scope. Code that gives an address out calls [`Scope::touch`]
    /// or [`Scope::mark_used`] first. So no code that runs inside an operation (`Eq` of a key, a
    /// closure, a destructor) can end what the operation has found.
    pub(crate) fn is_renewable(&self) -> bool {
        self.has_no_addresses() && self.record.is_single()
    }

    #[inline]
    fn has_no_addresses(&self) -> bool {
        !self.open.is_used() && !self.open.touched.get()
    }

    /// Notes that an address is given out, which is valid as long as the scope lasts.
    #[inline]
    pub(crate) fn touch(&self) {
        self.open.touched.set(true);
    }

    /// Makes a guard for an operation that gives no reference out. When the guard is dropped, the
    /// addresses that the operation has found are forgotten.
    ///
    /// They are not if an address was known before, or a reference has been given out meanwhile.
    #[inline]
    pub(crate) fn begin_transient(&self) -> TransientAccess<'_> {
        TransientAccess { scope: self, is_outermost: self.has_no_addresses() }
    }

    /// Makes a guard for an operation that needs several places at a time. Until it is dropped,
    /// pages that are brought near with this scope stay, as if references had been given out.
    pub(crate) fn hold(&self) -> ScopeHold<'_> {
        if self.is_renewable() {
            self.record.renew(&self.core.epoch, self.open);
        }
        let brief = self.begin_transient();
        self.open.holds.set(self.open.holds.get() + 1);
        ScopeHold { holds: ScopeHoldCount(self), brief }
    }

    /// Forgets the addresses that an operation has found, if it was [the
    /// outermost](TransientAccess) and nobody has been given a reference. True if the scope can be
    /// renewed.
    #[inline]
    pub(crate) fn forget(&self, brief: &TransientAccess<'_>) -> bool {
        let forgets = brief.is_outermost && !self.open.is_used();
        if forgets {
            self.open.touched.set(false);
        }
        forgets && self.record.is_single()
    }

    /// Returns the number within the heap of a page among those of all heaps; `None` if it belongs
    /// to another heap.
    #[inline]
    pub(crate) fn number(&self, page: u32) -> Option<u32> {
        let page = page.wrapping_sub(self.first_page);
        (page < self.pages).then_some(page)
    }
}

/// Guard of an operation that gives no reference out, made by [`Scope::begin_transient`].
pub(crate) struct TransientAccess<'a> {
    scope: &'a Scope<'a>,
    /// True if nobody knew an address from the scope when the operation began.
    is_outermost: bool,
}

impl Drop for TransientAccess<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_outermost {
            self.scope.forget(self);
        }
    }
}

/// Guard of an operation that needs several places at a time, made by [`Scope::hold`].
pub(crate) struct ScopeHold<'a> {
    // Fields are dropped in this order: an address is forgotten when nobody holds it any more.
    holds: ScopeHoldCount<'a>,
    brief: TransientAccess<'a>,
}

/// Part of a [`ScopeHold`] that its scope counts.
struct ScopeHoldCount<'a>(&'a Scope<'a>);

impl Drop for ScopeHoldCount<'_> {
    fn drop(&mut self) {
        let holds = &self.0.open.holds;
        holds.set(holds.get() - 1);
    }
}

impl ScopeHold<'_> {
    /// Checks whether nobody else has an address from the scope.
    pub(crate) fn is_only(&self) -> bool {
        let open = self.holds.0.open;
        self.brief.is_outermost && !open.used.get() && open.holds.get() == 1
    }
}

impl Drop for Scope<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.record.leave(self.open) && self.core.has_deferred_drops() {
            self.core.run_deferred_drops(false).resume();
        }
    }
}

impl core::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Scope")
    }
}
