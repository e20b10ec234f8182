//! What maps hold: keys and values, as fields of objects.

use crate::object::{FarObject, Referent};
use crate::reference::{Gc, Ref, WeakRef};
use crate::{Bytes, GcError, Mutator};
use core::hash::Hash;

/// Key of a [`TrieMap`](super::TrieMap), as it lies in the map.
///
/// Numbers and arrays of numbers are keys, and so are strings and bytes, as `Ref<str>` and
/// `Ref<Bytes>`. Keys that are equal have queries that are equal, with equal hashes; otherwise a key
/// is not found again.
pub trait MapKey: FarObject {
    /// What one asks for a key with: `str` for `Ref<str>`.
    type Query: ?Sized + Hash;

    /// Makes a key. Its references lead nowhere yet.
    fn new(query: &Self::Query) -> Self;

    /// Sets the references of a key that [`MapKey::new`] made, when it lies in the heap.
    fn fill(&self, m: &Mutator<'_>, query: &Self::Query) -> Result<(), GcError> {
        let _ = (m, query);
        Ok(())
    }

    /// Checks whether the key is what is asked for.
    fn is(&self, m: &Mutator<'_>, query: &Self::Query) -> Result<bool, GcError>;
}

/// Argument of what only this crate implements: a map calls that in the middle of a change.
#[doc(hidden)]
#[expect(unnameable_types, reason = "so that nobody else can call or implement it")]
#[derive(Clone, Copy)]
pub struct Sealed;

/// Value of a map, as it lies in the map: a number, a [`Ref`], or a [`WeakRef`].
///
/// A value of the last kind keeps nothing alive, so the map is a weak map.
pub trait MapValue: FarObject {
    /// What a value is made of: `Gc<'m, T>` for a reference to `T`.
    type Given<'m>: Copy;

    /// Makes a value. Its references lead nowhere yet.
    fn new(given: Self::Given<'_>) -> Self;

    /// Sets the references of a value that [`MapValue::new`] made, when it lies in the heap.
    fn fill(&self, m: &Mutator<'_>, given: Self::Given<'_>) -> Result<(), GcError>;

    /// Makes a value like this one. Its references lead nowhere yet.
    fn copy(&self) -> Self;

    /// Lets the references of this value lead where those of `other` do, without bringing anything
    /// near.
    fn fill_from(&self, m: &Mutator<'_>, other: &Self);

    /// Lets a value that lies in the heap lead elsewhere, in one store. Returns `false` if it cannot
    /// change.
    #[doc(hidden)]
    fn set(&self, m: &Mutator<'_>, given: Self::Given<'_>, _: Sealed) -> bool {
        let _ = (m, given);
        false
    }

    /// Returns what the value leads to; `None` if that was collected.
    fn find<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<Self::Given<'m>>, GcError>;
}

macro_rules! numbers {
    ($($name:ty),*) => {$(
        impl MapKey for $name {
            type Query = $name;

            fn new(query: &$name) -> $name {
                *query
            }

            fn is(&self, _: &Mutator<'_>, query: &$name) -> Result<bool, GcError> {
                Ok(self == query)
            }
        }

        impl<const N: usize> MapKey for [$name; N] {
            type Query = [$name; N];

            fn new(query: &[$name; N]) -> [$name; N] {
                *query
            }

            fn is(&self, _: &Mutator<'_>, query: &[$name; N]) -> Result<bool, GcError> {
                Ok(self == query)
            }
        }
    )*};
}

numbers!(bool, char, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize);

macro_rules! plain_values {
    ($($name:ty),*) => {$(
        impl MapValue for $name {
            type Given<'m> = $name;

            fn new(given: $name) -> $name {
                given
            }

            fn fill(&self, _: &Mutator<'_>, _: $name) -> Result<(), GcError> {
                Ok(())
            }

            fn copy(&self) -> $name {
                *self
            }

            fn fill_from(&self, _: &Mutator<'_>, _: &$name) {}

            fn find(&self, _: &Mutator<'_>) -> Result<Option<$name>, GcError> {
                Ok(Some(*self))
            }
        }
    )*};
}

plain_values!((), bool, char, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f32, f64);

impl MapKey for Ref<str> {
    type Query = str;

    fn new(_: &str) -> Ref<str> {
        Ref::null()
    }

    fn fill(&self, m: &Mutator<'_>, query: &str) -> Result<(), GcError> {
        self.store(m, Some(m.alloc_str(query)?));
        Ok(())
    }

    fn is(&self, m: &Mutator<'_>, query: &str) -> Result<bool, GcError> {
        Ok(self.load(m)?.is_some_and(|key| *key == *query))
    }
}

impl MapKey for Ref<Bytes> {
    type Query = Bytes;

    fn new(_: &Bytes) -> Ref<Bytes> {
        Ref::null()
    }

    fn fill(&self, m: &Mutator<'_>, query: &Bytes) -> Result<(), GcError> {
        self.store(m, Some(m.alloc_copy(query)?));
        Ok(())
    }

    fn is(&self, m: &Mutator<'_>, query: &Bytes) -> Result<bool, GcError> {
        Ok(self.load(m)?.is_some_and(|key| *key == *query))
    }
}

impl<T: Referent + ?Sized> MapValue for Ref<T> {
    type Given<'m> = Gc<'m, T>;

    fn new(_: Gc<'_, T>) -> Ref<T> {
        Ref::null()
    }

    fn fill(&self, m: &Mutator<'_>, given: Gc<'_, T>) -> Result<(), GcError> {
        self.store(m, Some(given));
        Ok(())
    }

    fn copy(&self) -> Ref<T> {
        Ref::null()
    }

    fn fill_from(&self, m: &Mutator<'_>, other: &Ref<T>) {
        self.copy_from(m, other);
    }

    fn set(&self, m: &Mutator<'_>, given: Gc<'_, T>, _: Sealed) -> bool {
        self.store(m, Some(given));
        true
    }

    fn find<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<Gc<'m, T>>, GcError> {
        self.load(m)
    }
}

impl<T: Referent + ?Sized> MapValue for WeakRef<T> {
    type Given<'m> = Gc<'m, T>;

    fn new(_: Gc<'_, T>) -> WeakRef<T> {
        WeakRef::null()
    }

    fn fill(&self, m: &Mutator<'_>, given: Gc<'_, T>) -> Result<(), GcError> {
        self.store(m, Some(given))
    }

    fn copy(&self) -> WeakRef<T> {
        WeakRef::null()
    }

    fn fill_from(&self, m: &Mutator<'_>, other: &WeakRef<T>) {
        self.copy_from(m, other);
    }

    fn find<'m>(&self, m: &'m Mutator<'_>) -> Result<Option<Gc<'m, T>>, GcError> {
        self.load(m)
    }
}
