//! Types of keys and values of a map, any sized type, and bytes and text of any length; and the
//! layout of an entry in far memory.

use crate::error::FarError;
use crate::heap::{HeapInner, Panics, drop_and_free, take_with};
use core::borrow::Borrow;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use farfield_core::geometry::PAGE_BYTES;
use std::alloc::Layout;

/// A key or a value of a [`FarMap`](crate::FarMap): any `T: Send + Sync + 'static`, `[u8]` or `str`.
///
/// Many threads read a value at the same time, so it must be `Sync`. The trait is sealed: its
/// methods access memory, and are for the map only.
pub trait Item: sealed::ItemAccess {}

/// A type that becomes an [`Item`] when it is put into a map. That is the `T` itself; for `[u8]`
/// and `str` a slice, which is copied, or an owned type such as `Vec<u8>` or `String`.
pub trait Source<T: ?Sized>: sealed::ItemSource<T> {}

#[expect(unnameable_types, reason = "nobody else shall implement them")]
pub(super) mod sealed {
    use super::*;

    /// # Safety
    /// `view` and `take` accept what `ItemSource::copy_to` has written.
    pub unsafe trait ItemAccess: Send + Sync + 'static {
        const ALIGN: usize;
        /// Size in bytes, if all values of the type have the same.
        const SIZE: Option<usize>;
        const NEEDS_DROP: bool;
        /// Type of the value that `take` moves out: the item itself, or nothing.
        type Kept;

        /// # Safety
        /// At `at` is an item of this many bytes, which nobody changes during `'a`.
        unsafe fn view<'a>(at: *const u8, bytes: usize) -> &'a Self;
        /// # Safety
        /// At `at` is an item of this many bytes, which is the caller's alone during `'a`.
        unsafe fn view_mut<'a>(at: *mut u8, bytes: usize) -> &'a mut Self;
        /// # Safety
        /// At `at` is an item that is the caller's, and is gone afterwards.
        unsafe fn take(at: *mut u8) -> Self::Kept;
        /// # Safety
        /// As for `take`.
        unsafe fn drop_at(at: *mut u8);
    }

    /// # Safety
    /// `copy_to` writes `size_of_val` bytes that make a `T`.
    pub unsafe trait ItemSource<T: ?Sized>: Borrow<T> {
        /// # Safety
        /// There is room at `at`. Only one of the original and the copy is used afterwards.
        unsafe fn copy_to(&self, at: *mut u8);
        /// Forgets the original: the copy is the value from now on.
        fn placed(self);
    }
}

impl<T: sealed::ItemAccess + ?Sized> Item for T {}
impl<T: ?Sized, S: sealed::ItemSource<T>> Source<T> for S {}

// SAFETY: a value is its bytes, written by `ItemSource::copy_to` for `T`.
unsafe impl<T: Send + Sync + 'static> sealed::ItemAccess for T {
    const ALIGN: usize = {
        assert!(align_of::<T>() <= PAGE_BYTES, "far values cannot be aligned to more than a page");
        align_of::<T>()
    };
    const SIZE: Option<usize> = Some(size_of::<T>());
    const NEEDS_DROP: bool = core::mem::needs_drop::<T>();
    type Kept = T;

    #[inline]
    unsafe fn view<'a>(at: *const u8, _: usize) -> &'a T {
        // SAFETY: passed on to the caller.
        unsafe { &*at.cast::<T>() }
    }

    #[inline]
    unsafe fn view_mut<'a>(at: *mut u8, _: usize) -> &'a mut T {
        // SAFETY: passed on to the caller.
        unsafe { &mut *at.cast::<T>() }
    }

    unsafe fn take(at: *mut u8) -> T {
        // SAFETY: passed on to the caller.
        unsafe { at.cast::<T>().read() }
    }

    unsafe fn drop_at(at: *mut u8) {
        // SAFETY: passed on to the caller.
        unsafe { at.cast::<T>().drop_in_place() }
    }
}

// SAFETY: the value is its bytes.
unsafe impl<T: Send + Sync + 'static> sealed::ItemSource<T> for T {
    #[inline]
    unsafe fn copy_to(&self, at: *mut u8) {
        // SAFETY: there is room for a `T`, as the caller says.
        unsafe { at.cast::<T>().copy_from_nonoverlapping(self, 1) }
    }

    #[inline]
    fn placed(self) {
        let _ = ManuallyDrop::new(self);
    }
}

/// Items that are runs of bytes.
macro_rules! bytes_item {
    ($item:ty, $from:expr, $from_mut:expr, $($source:ty),*) => {
        // SAFETY: any bytes that were one are one again.
        unsafe impl sealed::ItemAccess for $item {
            const ALIGN: usize = 1;
            const SIZE: Option<usize> = None;
            const NEEDS_DROP: bool = false;
            type Kept = ();

            #[inline]
            unsafe fn view<'a>(at: *const u8, bytes: usize) -> &'a $item {
                // SAFETY: passed on to the caller; `copy_to` wrote the bytes of one.
                unsafe { $from(core::slice::from_raw_parts(at, bytes)) }
            }

            #[inline]
            unsafe fn view_mut<'a>(at: *mut u8, bytes: usize) -> &'a mut $item {
                // SAFETY: as in `view`.
                unsafe { $from_mut(core::slice::from_raw_parts_mut(at, bytes)) }
            }

            unsafe fn take(_: *mut u8) {}
            unsafe fn drop_at(_: *mut u8) {}
        }

        $(
            // SAFETY: it copies all bytes.
            unsafe impl sealed::ItemSource<$item> for $source {
                #[inline]
                unsafe fn copy_to(&self, at: *mut u8) {
                    let item: &$item = self.borrow();
                    // SAFETY: there is room, as the caller says.
                    unsafe { at.copy_from_nonoverlapping(item.as_ptr(), item.len()) }
                }

                fn placed(self) {}
            }
        )*
    };
}

bytes_item!([u8], core::convert::identity, core::convert::identity, &[u8], Vec<u8>, Box<[u8]>);
bytes_item!(str, core::str::from_utf8_unchecked, core::str::from_utf8_unchecked_mut, &str, String, Box<str>);

// SAFETY: it copies all bytes.
unsafe impl<const N: usize> sealed::ItemSource<[u8]> for [u8; N] {
    unsafe fn copy_to(&self, at: *mut u8) {
        // SAFETY: there is room, as the caller says.
        unsafe { at.copy_from_nonoverlapping(self.as_ptr(), N) }
    }

    fn placed(self) {}
}

/// Layout of an entry in far memory: a word with both lengths unless the types fix them, then the
/// key, then the value.
pub(crate) struct EntryLayout<K: ?Sized, V: ?Sized>(PhantomData<fn(&K, &V)>);

/// Bits of the key's length in the word of lengths: 28. The value's length has the other 36.
const KEY_BITS: u32 = 28;
const KEY_BYTES_MAX: usize = (1 << KEY_BITS) - 1;
const VALUE_BYTES_MAX: usize = (1 << (64 - KEY_BITS)) - 1;

impl<K: Item + ?Sized, V: Item + ?Sized> EntryLayout<K, V> {
    const HAS_LENGTHS: bool = K::SIZE.is_none() || V::SIZE.is_none();
    const KEY_AT: usize = if Self::HAS_LENGTHS { 8usize.next_multiple_of(K::ALIGN) } else { 0 };
    const ALIGN: usize = {
        let word = if Self::HAS_LENGTHS { 8 } else { 1 };
        let items = if K::ALIGN > V::ALIGN { K::ALIGN } else { V::ALIGN };
        if items > word { items } else { word }
    };
    const NEEDS_DROP: bool = K::NEEDS_DROP || V::NEEDS_DROP;
    /// Whether both can be moved to the stack.
    const IS_SMALL: bool = size_of::<K::Kept>() + size_of::<V::Kept>() <= PAGE_BYTES;

    /// Returns where the value lies in an entry whose key has this size.
    #[inline]
    pub(crate) const fn value_at(key_bytes: usize) -> usize {
        (Self::KEY_AT + key_bytes).next_multiple_of(V::ALIGN)
    }

    fn layout(key_bytes: usize, value_bytes: usize) -> Result<Layout, FarError> {
        let bytes = Self::value_at(key_bytes).saturating_add(value_bytes);
        let fits = !Self::HAS_LENGTHS || key_bytes <= KEY_BYTES_MAX && value_bytes <= VALUE_BYTES_MAX;
        let layout = Layout::from_size_align(bytes, Self::ALIGN).ok().filter(|_| fits);
        layout.ok_or(FarError::TooLarge { bytes: bytes as u64 })
    }

    /// Returns the layout of an entry of this key and value.
    pub(super) fn layout_of(key: &K, value: &V) -> Result<Layout, FarError> {
        Self::layout(size_of_val(key), size_of_val(value))
    }

    /// Writes an entry.
    ///
    /// # Safety
    /// There is room for one of [`EntryLayout::layout_of`].
    pub(super) unsafe fn write(at: *mut u8, key: &impl Source<K>, value: &impl Source<V>) {
        let (key_bytes, value_bytes) = (size_of_val::<K>(key.borrow()), size_of_val::<V>(value.borrow()));
        // SAFETY: all three lie in the layout; its alignment is the largest of theirs, and each offset has its own.
        unsafe {
            if Self::HAS_LENGTHS {
                let word = (value_bytes as u64) << KEY_BITS | key_bytes as u64;
                at.cast::<[u8; 8]>().write(word.to_ne_bytes());
            }
            key.copy_to(at.add(Self::KEY_AT));
            value.copy_to(at.add(Self::value_at(key_bytes)));
        }
    }

    /// Returns the sizes of key and value in bytes.
    ///
    /// # Safety
    /// There is an entry.
    #[inline]
    unsafe fn lengths(at: *const u8) -> (usize, usize) {
        if !Self::HAS_LENGTHS {
            return (K::SIZE.unwrap_or(0), V::SIZE.unwrap_or(0));
        }
        // SAFETY: an entry of this shape begins with its lengths.
        let word = u64::from_ne_bytes(unsafe { at.cast::<[u8; 8]>().read() });
        (word as usize & KEY_BYTES_MAX, (word >> KEY_BITS) as usize)
    }

    /// # Safety
    /// There is an entry, whose key nobody changes during `'a`.
    #[inline]
    pub(super) unsafe fn key<'a>(at: *const u8) -> &'a K {
        // SAFETY: passed on to the caller; `write` put the key there.
        unsafe { K::view(at.add(Self::KEY_AT), Self::lengths(at).0) }
    }

    /// # Safety
    /// There is an entry, whose value nobody changes during `'a`.
    #[inline]
    pub(super) unsafe fn value<'a>(at: *const u8) -> &'a V {
        // SAFETY: passed on to the caller; `write` put the value there.
        unsafe {
            let (key_bytes, value_bytes) = Self::lengths(at);
            V::view(at.add(Self::value_at(key_bytes)), value_bytes)
        }
    }

    /// # Safety
    /// There is an entry, whose value is the caller's alone during `'a`.
    pub(super) unsafe fn value_mut<'a>(at: *mut u8) -> &'a mut V {
        // SAFETY: as in `value`.
        unsafe {
            let (key_bytes, value_bytes) = Self::lengths(at);
            V::view_mut(at.add(Self::value_at(key_bytes)), value_bytes)
        }
    }

    /// Returns the size of an entry in bytes.
    ///
    /// # Safety
    /// There is an entry.
    pub(super) unsafe fn bytes(at: *const u8) -> usize {
        // SAFETY: passed on to the caller.
        let (key_bytes, value_bytes) = unsafe { Self::lengths(at) };
        Self::value_at(key_bytes) + value_bytes
    }

    /// Drops an entry and frees its place.
    ///
    /// # Safety
    /// There is an entry, which is the caller's. It is gone afterwards, unless there is an error.
    /// The heap is kept alive by the entry, and not by us.
    pub(super) unsafe fn tear_down_entry(core: *const HeapInner, page: u32, card: u8) -> Result<(), FarError> {
        let value_at = Self::value_at(K::SIZE.unwrap_or(0));
        // The offset of a value behind a key of any length does not matter: it has no destructor
        // then, or the length tells.
        let value_of = move |at: *mut u8| {
            // SAFETY: there is an entry.
            let skip = if K::SIZE.is_some() { value_at } else { Self::value_at(unsafe { Self::lengths(at) }.0) };
            // SAFETY: inside the entry.
            unsafe { at.add(skip) }
        };
        if Self::NEEDS_DROP && Self::IS_SMALL {
            // Out of the heap first: a destructor that drops a long chain of far values must not
            // keep a scope open.
            // SAFETY: passed on to the caller.
            drop(unsafe { take_with(core, page, card, |at| (K::take(at.add(Self::KEY_AT)), V::take(value_of(at)))) }?);
            return Ok(());
        }
        let drop_both = |at: *mut u8| {
            let mut panics = Panics::default();
            // SAFETY: passed on to the caller.
            panics.catch(|| unsafe { K::drop_at(at.add(Self::KEY_AT)) });
            // SAFETY: as above.
            panics.catch(|| unsafe { V::drop_at(value_of(at)) });
            panics.resume();
        };
        // SAFETY: passed on to the caller.
        unsafe { drop_and_free(core, page, card, Self::NEEDS_DROP.then_some(drop_both)) }
    }
}
