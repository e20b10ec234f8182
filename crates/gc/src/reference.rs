//! References: those that threads have between safepoints, and those that objects have.

use crate::error::GcError;
use crate::mutator::Mutator;
use crate::object::{AnyObject, Referent};
use core::marker::PhantomData;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::gc::{ObjectHeader, RefWord, WeakWord};

/// Reference to an object, which is near until the mutator's next safepoint.
///
/// The compiler ends all of them there, because a safepoint takes the mutator by `&mut`. A [`Root`]
/// outlives safepoints.
///
/// [`Root`]: crate::Root
pub struct Gc<'m, T: ?Sized> {
    object: NonNull<T>,
    /// Borrow of the mutator. The pointer keeps the reference in the mutator's thread.
    mutator: PhantomData<(&'m (), *const ())>,
}

impl<T: ?Sized> Clone for Gc<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ?Sized> Copy for Gc<'_, T> {}

impl<T: ?Sized> Deref for Gc<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY:
        // - initialised: `Gc::from_header` was given an object of this type;
        // - alive: no collection frees an object before the mutator reaches a safepoint, and `'m`
        //   ends before that;
        // - there: the mutator's scope has found the object near, and is renewed at safepoints only;
        // - shared: what changes in an object is atomic (`FarObject`).
        unsafe { self.object.as_ref() }
    }
}

impl<'m, T: Referent + ?Sized> Gc<'m, T> {
    /// Makes a reference from the address of an object's header.
    ///
    /// # Safety
    /// A live object of this type lies there, and was found near in the scope of the mutator that
    /// `'m` borrows.
    #[inline]
    pub(crate) unsafe fn from_header(header: NonNull<u8>) -> Gc<'m, T> {
        // SAFETY: passed on to the caller.
        let object = unsafe { T::from_header(header) };
        Gc { object, mutator: PhantomData }
    }

    /// Returns the address of the object's header.
    #[inline]
    pub(crate) fn header(self) -> NonNull<u8> {
        // SAFETY: the header lies before what is referred to, in the same object, and the pointer
        // was made from that of the header.
        unsafe { self.object.cast::<u8>().sub(T::OFFSET) }
    }

    /// Returns the object's entry.
    #[inline]
    pub(crate) fn entry(self) -> u32 {
        // SAFETY: the object is near as in `deref`, and its header never changes.
        ObjectHeader(unsafe { self.header().cast::<u64>().read() }).entry()
    }

    /// Returns the object, borrowed for as long as the reference is valid. Not a method, so that it
    /// hides none of the object.
    #[inline]
    pub fn get(this: Gc<'m, T>) -> &'m T {
        // SAFETY: as in `deref`, all of which holds for `'m`.
        unsafe { this.object.as_ref() }
    }

    /// Forgets the type of the object.
    #[inline]
    pub fn as_any(self) -> Gc<'m, AnyObject> {
        // SAFETY: the header is that of a live object, which was found near for `'m`, and any object
        // is one of these.
        unsafe { Gc::from_header(self.header()) }
    }

    /// Checks whether both are references to the same object.
    #[inline]
    pub fn is(self, other: Gc<'_, T>) -> bool {
        self.header() == other.header()
    }

    /// Returns a number that no other object has as long as this one lives.
    #[inline]
    pub fn id(self) -> u64 {
        self.entry().into()
    }
}

impl<'m> Gc<'m, AnyObject> {
    /// Returns a reference to the object as what it is; `None` if it is of another type, or of another
    /// heap than the mutator's.
    #[inline]
    pub fn downcast<T: Referent + ?Sized>(self, m: &'m Mutator<'_>) -> Option<Gc<'m, T>> {
        let header = self.header();
        // SAFETY: the object is near as in `deref`, and its header never changes.
        let found = ObjectHeader(unsafe { header.cast::<u64>().read() }).type_number();
        let is_it = m.is_own(header) && m.type_number::<T>() == Some(found);
        // SAFETY: the object is of the type whose number it has in its heap. It lives and is near
        // for `'m`.
        is_it.then(|| unsafe { Gc::from_header(header) })
    }
}

impl<T: ?Sized + core::fmt::Debug> core::fmt::Debug for Gc<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        T::fmt(self, f)
    }
}

/// Field of an object that leads to another object, or nowhere.
///
/// A new one leads nowhere, and can be set when the object that it lies in is in a heap. What it
/// leads to lives at least as long as the object that it lies in.
#[repr(transparent)]
pub struct Ref<T: ?Sized> {
    word: AtomicU64,
    leads_to: PhantomData<fn(*const T) -> *const T>,
}

impl<T: ?Sized> Ref<T> {
    /// Makes a reference that leads nowhere.
    pub const fn null() -> Ref<T> {
        Ref { word: AtomicU64::new(RefWord::LOOSE.0), leads_to: PhantomData }
    }

    /// Checks whether the reference leads nowhere.
    pub fn is_null(&self) -> bool {
        RefWord(self.word.load(Ordering::Relaxed)).entry().is_none()
    }
}

impl<T: ?Sized> Default for Ref<T> {
    fn default() -> Ref<T> {
        Ref::null()
    }
}

impl<T: ?Sized> core::fmt::Debug for Ref<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(if self.is_null() { "Ref(null)" } else { "Ref" })
    }
}

impl<T: Referent + ?Sized> Ref<T> {
    /// Returns the object that the reference leads to, and brings it near.
    #[inline(always)]
    pub fn load<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<Gc<'m, T>>, GcError> {
        // Acquire: the thread that stored the reference has made the object.
        let word = RefWord(self.word.load(Ordering::Acquire));
        let Some(entry) = word.entry() else { return Ok(None) };
        if !m.contains(&self.word) {
            return Err(GcError::OtherHeap);
        }
        let header = m.find_by_reference(&self.word, word, entry)?;
        // SAFETY: a reference in an object of this heap leads to an object of its type, which lives
        // because it was reachable since the last safepoint. `find_by_reference` has found it near.
        Ok(Some(unsafe { Gc::from_header(header) }))
    }

    /// Returns the entry of the object that the reference leads to, if it lies in the mutator's heap.
    #[inline]
    pub(crate) fn entry(&self, m: &Mutator<'_>) -> Option<u32> {
        RefWord(self.word.load(Ordering::Acquire)).entry().filter(|_| m.contains(&self.word))
    }

    /// Lets the reference lead to this object, or nowhere.
    ///
    /// # Panics
    /// The reference does not lie in an object of the mutator's heap, or `value` is of another
    /// heap.
    #[inline]
    pub fn store(&self, m: &Mutator<'_>, value: Option<Gc<'_, T>>) {
        let before = m.check_settable(&self.word);
        let word = m.word_of(value).0;
        // The store that is first after a snapshot logs what the snapshot has there. Others may log
        // something else, which does no harm.
        m.log_removed(before);
        self.word.store(word, Ordering::Release);
    }

    /// Lets the reference lead to where `other` leads, without bringing that object near.
    ///
    /// # Panics
    /// One of the two does not lie in an object of the mutator's heap.
    #[inline]
    pub fn copy_from(&self, m: &Mutator<'_>, other: &Ref<T>) {
        let before = m.check_settable(&self.word);
        m.check_settable(&other.word);
        // Acquire and release: the thread that stored the reference has made the object. As long as
        // `other` has led to it, it was reachable from what this mutator may use.
        let word = other.word.load(Ordering::Acquire);
        m.log_removed(before);
        self.word.store(word, Ordering::Release);
    }

    /// Lets the reference lead to `value`, and returns where it led before.
    ///
    /// # Panics
    /// As for [`Ref::store`].
    pub fn swap<'m>(&self, m: &'m Mutator<'_>, value: Option<Gc<'_, T>>) -> Result<Option<Gc<'m, T>>, GcError> {
        let mut seen = self.word.load(Ordering::Acquire);
        m.check_settable(&self.word);
        let new = m.word_of(value).0;
        loop {
            // Found first: an error leaves the reference as it was.
            let before = match RefWord(seen).entry() {
                // SAFETY: as in `load`.
                Some(entry) => Some(unsafe { Gc::from_header(m.find(entry)?) }),
                None => None,
            };
            match self.word.compare_exchange_weak(seen, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    m.log_removed(RefWord(seen));
                    return Ok(before);
                }
                Err(other) => seen = other,
            }
        }
    }

    /// Lets the reference lead to `new` if it leads to `current`. False if it leads elsewhere.
    ///
    /// # Panics
    /// As for [`Ref::store`].
    pub fn compare_exchange(&self, m: &Mutator<'_>, current: Option<Gc<'_, T>>, new: Option<Gc<'_, T>>) -> bool {
        m.check_settable(&self.word);
        let (current, new) = (m.word_of(current), m.word_of(new));
        let mut seen = self.word.load(Ordering::Acquire);
        // Words that differ in their guess lead to the same object.
        while RefWord(seen).is_same(current) {
            match self.word.compare_exchange_weak(seen, new.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    m.log_removed(RefWord(seen));
                    return true;
                }
                Err(other) => seen = other,
            }
        }
        false
    }
}

/// Field of an object that leads to another object without keeping it alive.
///
/// It leads nowhere from the collection on that finds the object unreachable.
#[repr(transparent)]
pub struct WeakRef<T: ?Sized> {
    word: AtomicU64,
    leads_to: PhantomData<fn(*const T) -> *const T>,
}

impl<T: ?Sized> WeakRef<T> {
    /// Makes a reference that leads nowhere.
    pub const fn null() -> WeakRef<T> {
        WeakRef { word: AtomicU64::new(WeakWord::LOOSE.0), leads_to: PhantomData }
    }
}

impl<T: ?Sized> Default for WeakRef<T> {
    fn default() -> WeakRef<T> {
        WeakRef::null()
    }
}

impl<T: ?Sized> core::fmt::Debug for WeakRef<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("WeakRef")
    }
}

impl<T: Referent + ?Sized> WeakRef<T> {
    /// Returns the object that the reference leads to, and brings it near; `None` if it was
    /// collected.
    pub fn load<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<Gc<'m, T>>, GcError> {
        // Acquire: the thread that stored the reference has made the object.
        let word = WeakWord(self.word.load(Ordering::Acquire));
        let Some((entry, generation)) = word.target() else { return Ok(None) };
        if !m.contains(&self.word) {
            return Err(GcError::OtherHeap);
        }
        let header = m.find_weakly(entry, generation)?;
        // SAFETY: the entry is in use, in the generation of the object that was stored here, so it
        // is that object's, and no safepoint has passed since. It was found near.
        Ok(header.map(|header| unsafe { Gc::from_header(header) }))
    }

    /// Lets the reference lead to where `other` leads, without bringing anything near.
    ///
    /// # Panics
    /// As for [`Ref::copy_from`].
    pub fn copy_from(&self, m: &Mutator<'_>, other: &WeakRef<T>) {
        m.check_settable(&self.word);
        m.check_settable(&other.word);
        self.word.store(other.word.load(Ordering::Acquire), Ordering::Release);
    }

    /// Lets the reference lead to this object, or nowhere. Fails if the object's entry cannot be
    /// brought near.
    ///
    /// # Panics
    /// As for [`Ref::store`].
    pub fn store(&self, m: &Mutator<'_>, value: Option<Gc<'_, T>>) -> Result<(), GcError> {
        m.check_settable(&self.word);
        let word = match value {
            Some(value) => {
                m.check_own(value.header());
                WeakWord::new(value.entry(), m.generation_of(value.entry())?)
            }
            None => WeakWord::NULL,
        };
        self.word.store(word.0, Ordering::Release);
        Ok(())
    }
}
