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

    /// No address in the heap that this scope keeps valid is known to anybody: neither a reference, nor an operation that is not over,
    /// whose user code may have come back to the same scope. So nothing is lost if it begins anew, and it is the thread's only one.
    ///
    /// Whatever gives an address out says so first ([`Scope::touch`] or [`Scope::mark_used`]), so no code that runs inside an operation
    /// (`Eq` of a key, a closure, a destructor) can end what the operation has found.
    pub(crate) fn is_renewable(&self) -> bool {
        self.knows_nothing() && self.record.is_single()
    }

    #[inline]
    fn knows_nothing(&self) -> bool {
        !self.open.is_used() && !self.open.touched.get()
    }

    /// An address is given out, which is good as long as the scope lasts.
    #[inline]
    pub(crate) fn touch(&self) {
        self.open.touched.set(true);
    }

    /// For an operation that gives no reference out: when the guard goes, the addresses that it has found are forgotten, unless
    /// somebody else had some before, or has been given a reference meanwhile.
    #[inline]
    pub(crate) fn briefly(&self) -> Brief<'_> {
        Brief { scope: self, is_outermost: self.knows_nothing() }
    }

    /// Until the guard goes, what is brought near with this scope stays, as if references had been given out. For operations that
    /// need several places at a time.
    pub(crate) fn hold(&self) -> Hold<'_> {
        if self.is_renewable() {
            self.record.renew(&self.core.epoch, self.open);
        }
        let brief = self.briefly();
        self.open.holds.set(self.open.holds.get() + 1);
        Hold { holds: Holds(self), brief }
    }

    /// The addresses that an operation has found are forgotten, if it was [the outermost](Brief) and nobody has been given a reference.
    /// True if the scope can begin anew.
    #[inline]
    pub(crate) fn forget(&self, brief: &Brief<'_>) -> bool {
        let forgets = brief.is_outermost && !self.open.is_used();
        if forgets {
            self.open.touched.set(false);
        }
        forgets && self.record.is_single()
    }

    /// Is it a scope of the heap that this page belongs to? Its number within the heap.
    #[inline]
    pub(crate) fn number(&self, page: u32) -> Option<u32> {
        let page = page.wrapping_sub(self.first_page);
        (page < self.pages).then_some(page)
    }
}

/// See [`Scope::briefly`].
pub(crate) struct Brief<'a> {
    scope: &'a Scope<'a>,
    /// Nobody knew an address when it began.
    is_outermost: bool,
}

impl Drop for Brief<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_outermost {
            self.scope.forget(self);
        }
    }
}

/// See [`Scope::hold`].
pub(crate) struct Hold<'a> {
    // Dropped in this order: what was found is forgotten when nobody holds it any more.
    holds: Holds<'a>,
    brief: Brief<'a>,
}

/// Counted in its scope.
struct Holds<'a>(&'a Scope<'a>);

impl Drop for Holds<'_> {
    fn drop(&mut self) {
        let holds = &self.0.open.holds;
        holds.set(holds.get() - 1);
    }
}

impl Hold<'_> {
    /// Nobody else has an address from the scope.
    pub(crate) fn is_only(&self) -> bool {
        let open = self.holds.0.open;
        self.brief.is_outermost && !open.used.get() && open.holds.get() == 1
    }
}

impl Drop for Scope<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.record.leave(self.open) && self.core.has_graves() {
            self.core.bury_all(false).resume();
        }
    }
}

impl core::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Scope")
    }
}
