//! What may lie in a collected heap, and how its references are found.

use crate::reference::{Ref, WeakRef};
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicI32, AtomicI64, AtomicU32, AtomicU64, Ordering};
use farfield_core::gc::{LayoutError, ObjectHeader, SLOTS_MAX, TailLayout, TypeLayout};

/// Value that can lie in a collected heap.
///
/// `#[derive(FarObject)]` implements it for structs of such values, and for enums without fields.
/// Numbers, `bool`, `char`, arrays, [`Atom`], [`Ref`] and [`WeakRef`] are such values. Objects are
/// freed without being looked at, so the type has no destructor and owns nothing elsewhere.
///
/// # Safety
/// [`FarObject::describe`] adds each [`Ref`] and [`WeakRef`] in the value, and nothing else. The
/// type has no destructor. Everything in it that changes is atomic.
pub unsafe trait FarObject: Send + Sync + 'static {
    /// Adds the references of a value that begins at this offset.
    fn describe(at: u32, slots: &mut SlotList);
}

/// Offsets of the references of a type.
#[derive(Default, Debug)]
pub struct SlotList {
    strong: Vec<u32>,
    weak: Vec<u32>,
}

impl SlotList {
    /// Adds a strong reference.
    pub(crate) fn add_strong(&mut self, at: u32) {
        // One more than there may be is enough to be refused.
        if self.strong.len() <= SLOTS_MAX {
            self.strong.push(at);
        }
    }

    /// Adds a weak reference.
    pub(crate) fn add_weak(&mut self, at: u32) {
        if self.weak.len() <= SLOTS_MAX {
            self.weak.push(at);
        }
    }

    fn of<T: FarObject>(at: u32) -> (Vec<u32>, Vec<u32>) {
        let mut slots = SlotList::default();
        T::describe(at, &mut slots);
        slots.strong.sort_unstable();
        slots.weak.sort_unstable();
        (slots.strong, slots.weak)
    }
}

fn bytes_of<T>() -> Result<u32, LayoutError> {
    u32::try_from(size_of::<T>()).map_err(|_| LayoutError::Bytes { bytes: u32::MAX })
}

/// What a reference can lead to: an object, or an array of values that objects are made of.
///
/// # Safety
/// `layout` describes what lies from the header of such an object on, and `from_header` finds it
/// there.
pub unsafe trait Referent: 'static {
    /// Bytes from the object's header to what is referred to.
    #[doc(hidden)]
    const OFFSET: usize;

    #[doc(hidden)]
    fn layout() -> Result<TypeLayout, LayoutError>;

    /// Makes a pointer from that to the header.
    ///
    /// # Safety
    /// An object of this type lies there.
    #[doc(hidden)]
    unsafe fn from_header(header: NonNull<u8>) -> NonNull<Self>;
}

// SAFETY: the value follows the header.
unsafe impl<T: FarObject> Referent for T {
    const OFFSET: usize = {
        assert!(align_of::<T>() <= 8, "collected objects are aligned to eight bytes");
        ObjectHeader::BYTES
    };

    fn layout() -> Result<TypeLayout, LayoutError> {
        let (strong, weak) = SlotList::of::<T>(Self::OFFSET as u32);
        let bytes = bytes_of::<T>()?.saturating_add(Self::OFFSET as u32);
        TypeLayout::new(bytes, strong, weak, None)
    }

    unsafe fn from_header(header: NonNull<u8>) -> NonNull<T> {
        // SAFETY: the object has its value there.
        unsafe { header.add(Self::OFFSET).cast() }
    }
}

// SAFETY: the number of elements follows the header, and then the elements.
unsafe impl<T: FarObject> Referent for [T] {
    const OFFSET: usize = {
        assert!(align_of::<T>() <= 8, "collected objects are aligned to eight bytes");
        assert!(size_of::<T>() > 0, "the elements of a collected array have bytes");
        TypeLayout::TAIL_OFFSETS.1
    };

    fn layout() -> Result<TypeLayout, LayoutError> {
        let (strong, weak) = SlotList::of::<T>(0);
        let tail = TailLayout::new(bytes_of::<T>()?, strong, weak)?;
        TypeLayout::new(Self::OFFSET as u32, Vec::new(), Vec::new(), Some(tail))
    }

    unsafe fn from_header(header: NonNull<u8>) -> NonNull<[T]> {
        // SAFETY: the object has the number of its elements there, which never changes, and then
        // so many elements.
        unsafe {
            let elements = header.add(TypeLayout::TAIL_OFFSETS.0).cast::<u64>().read();
            NonNull::slice_from_raw_parts(header.add(Self::OFFSET).cast(), elements as usize)
        }
    }
}

/// Bytes, as an object of their own: `Ref<Bytes>`.
pub type Bytes = [u8];

// SAFETY: a string lies in the heap as its bytes do.
unsafe impl Referent for str {
    const OFFSET: usize = <Bytes>::OFFSET;

    fn layout() -> Result<TypeLayout, LayoutError> {
        <Bytes>::layout()
    }

    unsafe fn from_header(header: NonNull<u8>) -> NonNull<str> {
        // SAFETY: passed on to the caller.
        let bytes = unsafe { <Bytes>::from_header(header) };
        // SAFETY: not null. The bytes are those of a string (`Mutator::alloc_str`).
        unsafe { NonNull::new_unchecked(bytes.as_ptr() as *mut str) }
    }
}

/// Object of any type: [`Gc::as_any`] and [`Gc::downcast`] convert references to it.
///
/// [`Gc::as_any`]: crate::Gc::as_any
/// [`Gc::downcast`]: crate::Gc::downcast
pub struct AnyObject {
    /// Nobody makes one, and a reference shows nothing of the object.
    _opaque: [u8; 0],
}

// SAFETY: what follows the header is not looked at. No object has this type.
unsafe impl Referent for AnyObject {
    const OFFSET: usize = ObjectHeader::BYTES;

    fn layout() -> Result<TypeLayout, LayoutError> {
        TypeLayout::new(Self::OFFSET as u32, Vec::new(), Vec::new(), None)
    }

    unsafe fn from_header(header: NonNull<u8>) -> NonNull<AnyObject> {
        // SAFETY: every object has its header before that.
        unsafe { header.add(Self::OFFSET).cast() }
    }
}

macro_rules! plain {
    ($($name:ty),*) => {$(
        // SAFETY: a value without references that never changes where it lies.
        unsafe impl FarObject for $name {
            fn describe(_: u32, _: &mut SlotList) {}
        }
    )*};
}

plain!((), bool, char, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f32, f64);

// SAFETY: each element is described.
unsafe impl<T: FarObject, const N: usize> FarObject for [T; N] {
    fn describe(at: u32, slots: &mut SlotList) {
        let (before, bytes) = (slots.strong.len() + slots.weak.len(), size_of::<T>() as u32);
        for index in 0..N as u32 {
            T::describe(at.saturating_add(index.saturating_mul(bytes)), slots);
            // Elements without references need not be looked at one by one.
            if slots.strong.len() + slots.weak.len() == before || slots.strong.len().max(slots.weak.len()) > SLOTS_MAX {
                break;
            }
        }
    }
}

// SAFETY: nothing at all.
unsafe impl<T: ?Sized + Send + Sync + 'static> FarObject for PhantomData<T> {
    fn describe(_: u32, _: &mut SlotList) {}
}

// SAFETY: the word of a strong reference.
unsafe impl<T: ?Sized + 'static> FarObject for Ref<T> {
    fn describe(at: u32, slots: &mut SlotList) {
        slots.add_strong(at);
    }
}

// SAFETY: the word of a weak reference.
unsafe impl<T: ?Sized + 'static> FarObject for WeakRef<T> {
    fn describe(at: u32, slots: &mut SlotList) {
        slots.add_weak(at);
    }
}

/// Number in an object that changes: an atomic one, because many threads may see the object.
///
/// Loads acquire, stores release, and changes do both.
#[repr(transparent)]
pub struct Atom<T: AtomValue>(T::Cell);

/// Number that an [`Atom`] can hold.
pub trait AtomValue: Copy {
    #[doc(hidden)]
    type Cell: Send + Sync + 'static;

    #[doc(hidden)]
    fn cell(self) -> Self::Cell;
    #[doc(hidden)]
    fn load(cell: &Self::Cell) -> Self;
    #[doc(hidden)]
    fn swap(cell: &Self::Cell, value: Self) -> Self;
    #[doc(hidden)]
    fn fetch_add(cell: &Self::Cell, value: Self) -> Self;
    #[doc(hidden)]
    fn compare_exchange(cell: &Self::Cell, current: Self, new: Self) -> Result<Self, Self>;
}

macro_rules! atom {
    ($($name:ty: $cell:ty),*) => {$(
        impl AtomValue for $name {
            type Cell = $cell;

            fn cell(self) -> $cell {
                <$cell>::new(self)
            }

            fn load(cell: &$cell) -> $name {
                cell.load(Ordering::Acquire)
            }

            fn swap(cell: &$cell, value: $name) -> $name {
                cell.swap(value, Ordering::AcqRel)
            }

            fn fetch_add(cell: &$cell, value: $name) -> $name {
                cell.fetch_add(value, Ordering::AcqRel)
            }

            fn compare_exchange(cell: &$cell, current: $name, new: $name) -> Result<$name, $name> {
                cell.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
            }
        }

        // SAFETY: an atomic number.
        unsafe impl FarObject for Atom<$name> {
            fn describe(_: u32, _: &mut SlotList) {}
        }
    )*};
}

atom!(u32: AtomicU32, u64: AtomicU64, i32: AtomicI32, i64: AtomicI64);

impl<T: AtomValue> Atom<T> {
    /// Makes a number.
    pub fn new(value: T) -> Atom<T> {
        Atom(value.cell())
    }

    /// Returns the number.
    pub fn get(&self) -> T {
        T::load(&self.0)
    }

    /// Changes the number.
    pub fn set(&self, value: T) {
        T::swap(&self.0, value);
    }

    /// Changes the number, and returns the one before.
    pub fn swap(&self, value: T) -> T {
        T::swap(&self.0, value)
    }

    /// Adds to the number, wrapping around, and returns the one before.
    pub fn fetch_add(&self, value: T) -> T {
        T::fetch_add(&self.0, value)
    }

    /// Changes the number if it is `current`, and returns what it was; an error if it was another.
    pub fn compare_exchange(&self, current: T, new: T) -> Result<T, T> {
        T::compare_exchange(&self.0, current, new)
    }
}

impl<T: AtomValue + Default> Default for Atom<T> {
    fn default() -> Atom<T> {
        Atom::new(T::default())
    }
}

impl<T: AtomValue + core::fmt::Debug> core::fmt::Debug for Atom<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.get().fmt(f)
    }
}
