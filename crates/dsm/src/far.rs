//! Types whose values may travel, and those that may lie in shared memory.
#![allow(unsafe_code, reason = "types promise what their bytes are")]

use crate::{DBox, NodeId, NodeStats, Object, OwnedObject, ShareError, Tie};
use core::marker::PhantomData;
use core::time::Duration;

/// Type whose values may be sent to tasks.
///
/// # Safety
/// A copy of the bytes of a value is that value, in each process of the same build. So it holds no
/// address, no handle of the operating system and no thread's identity. What it owns is owned by its
/// bytes ([`DBox`]). `visit_loans` names every mutable loan in it, and `visit_sent` every object that
/// whoever receives it can come to own, as [`FarGroup`] says.
#[diagnostic::on_unimplemented(
    message = "values of `{Self}` cannot be sent to tasks",
    note = "numbers, `bool`, `char`, arrays, tuples, `Option`, `Result`, `DBox`, `DArc` and loans of a scope can",
    note = "references, `String` and `Vec` hold addresses of one process; `DString` and `DVec` do not",
    note = "instead of `Box`, `Arc`, `Mutex`, `RwLock` and atomics write `DBox`, `DArc`, `DMutex`, `DRwLock`, …",
    note = "a type of your own can after `#[derive(Far)]`"
)]
pub unsafe trait Portable {
    /// Passes the number of each mutable loan in the value.
    #[doc(hidden)]
    fn visit_loans(&self, _visit: &mut dyn FnMut(u64)) {}

    /// Passes each object that whoever receives the value can come to own.
    #[doc(hidden)]
    fn visit_sent(&self, _visit: &mut dyn FnMut(OwnedObject)) {}
}

/// Type whose values may lie in shared memory: behind a [`DBox`], or tied to their owners'
/// objects by a [`TBox`](crate::TBox).
///
/// # Safety
/// A copy of the bytes of a value is that value, in each process of the same build, once the address in
/// each `TBox` in it was replaced; `visit_ties` names all of them, and does nothing else. Nothing in a
/// value changes through a shared reference, and it has no loans. `visit_owned` names the objects, locks and
/// channels that it owns, alone or with others, but not what is tied to it, under these locks or in these channels.
#[diagnostic::on_unimplemented(
    message = "values of `{Self}` cannot lie in shared memory",
    note = "numbers, `bool`, `char`, arrays, tuples, `Option`, `Result`, `DBox`, `TBox` and `DArc` can",
    note = "references, `String` and `Vec` hold addresses of one process; `DString` and `DVec` do not",
    note = "instead of `Box`, `Arc`, `Mutex`, `RwLock` and atomics write `DBox`, `DArc`, `DMutex`, `DRwLock`, …",
    note = "a type of your own can after `#[derive(Far)]`, or after `#[derive(FarGroup)]` if it has a `TBox`"
)]
pub unsafe trait FarGroup: Send + Sync + 'static {
    /// Whether a value may have a `TBox` in it.
    #[doc(hidden)]
    const HAS_TIES: bool = false;

    /// Passes each `TBox` in the value.
    #[doc(hidden)]
    fn visit_ties(&self, _visit: &mut dyn FnMut(Tie)) {}

    /// Passes each object that the value owns.
    #[doc(hidden)]
    fn visit_owned(&self, _visit: &mut dyn FnMut(OwnedObject)) {}
}

/// Type whose values may lie in shared memory, be sent to tasks, and come back from them.
///
/// # Safety
/// No value has a [`TBox`](crate::TBox) in it.
#[diagnostic::on_unimplemented(
    message = "values of `{Self}` cannot lie in shared memory and be sent",
    note = "numbers, `bool`, `char`, arrays, tuples, `Option`, `Result`, `DBox` and `DArc` can",
    note = "references, `String` and `Vec` hold addresses of one process; `DString` and `DVec` do not",
    note = "instead of `Box`, `Arc`, `Mutex`, `RwLock` and atomics write `DBox`, `DArc`, `DMutex`, `DRwLock`, …",
    note = "a `TBox` stays at its node: put it into the object of a `DBox`, which is sent",
    note = "a type of your own can after `#[derive(Far)]`"
)]
pub unsafe trait Far: Portable + FarGroup {}

macro_rules! plain {
    ($($type:ty),*) => {
        $(
            // SAFETY: plain bytes, without an address.
            unsafe impl Portable for $type {}
            // SAFETY: as above.
            unsafe impl FarGroup for $type {}
            // SAFETY: as above.
            unsafe impl Far for $type {}
        )*
    };
}

plain!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64, bool, char, ());
plain!(NodeId, NodeStats, ShareError, Duration, core::cmp::Ordering);

// SAFETY: elements lie side by side, and nothing else is in it.
unsafe impl<T: Portable, const N: usize> Portable for [T; N] {
    fn visit_loans(&self, visit: &mut dyn FnMut(u64)) {
        self.iter().for_each(|element| element.visit_loans(visit));
    }

    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.iter().for_each(|element| element.visit_sent(visit));
    }
}
// SAFETY: nothing of `T` is in it.
unsafe impl<T: Portable> Portable for PhantomData<T> {}
// SAFETY: a value of `T`, or nothing.
unsafe impl<T: Portable> Portable for Option<T> {
    fn visit_loans(&self, visit: &mut dyn FnMut(u64)) {
        self.iter().for_each(|value| value.visit_loans(visit));
    }

    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.iter().for_each(|value| value.visit_sent(visit));
    }
}
// SAFETY: a value of one type or of the other.
unsafe impl<T: Portable, E: Portable> Portable for Result<T, E> {
    fn visit_loans(&self, visit: &mut dyn FnMut(u64)) {
        match self {
            Ok(value) => value.visit_loans(visit),
            Err(error) => error.visit_loans(visit),
        }
    }

    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        match self {
            Ok(value) => value.visit_sent(visit),
            Err(error) => error.visit_sent(visit),
        }
    }
}
// SAFETY: a word and a length, which hold no address; what it owns is owned by that word.
unsafe impl<T: Object + ?Sized> Portable for DBox<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}

// SAFETY: elements lie side by side, and nothing else is in it.
unsafe impl<T: FarGroup, const N: usize> FarGroup for [T; N] {
    const HAS_TIES: bool = T::HAS_TIES;

    fn visit_ties(&self, visit: &mut dyn FnMut(Tie)) {
        self.iter().for_each(|element| element.visit_ties(visit));
    }

    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.iter().for_each(|element| element.visit_owned(visit));
    }
}
// SAFETY: nothing of `T` is in it.
unsafe impl<T: FarGroup> FarGroup for PhantomData<T> {}
// SAFETY: a value of `T`, or nothing.
unsafe impl<T: FarGroup> FarGroup for Option<T> {
    const HAS_TIES: bool = T::HAS_TIES;

    fn visit_ties(&self, visit: &mut dyn FnMut(Tie)) {
        self.iter().for_each(|value| value.visit_ties(visit));
    }

    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.iter().for_each(|value| value.visit_owned(visit));
    }
}
// SAFETY: a value of one type or of the other.
unsafe impl<T: FarGroup, E: FarGroup> FarGroup for Result<T, E> {
    const HAS_TIES: bool = T::HAS_TIES || E::HAS_TIES;

    fn visit_ties(&self, visit: &mut dyn FnMut(Tie)) {
        match self {
            Ok(value) => value.visit_ties(visit),
            Err(error) => error.visit_ties(visit),
        }
    }

    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        match self {
            Ok(value) => value.visit_owned(visit),
            Err(error) => error.visit_owned(visit),
        }
    }
}
// SAFETY: a word and a length. What is tied to the object comes with the object.
unsafe impl<T: Object + ?Sized> FarGroup for DBox<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::of::<T>(self.word, self.extent));
    }
}

// SAFETY: elements that are far values.
unsafe impl<T: Far, const N: usize> Far for [T; N] {}
// SAFETY: nothing.
unsafe impl<T: Far> Far for PhantomData<T> {}
// SAFETY: a far value, or nothing.
unsafe impl<T: Far> Far for Option<T> {}
// SAFETY: a far value of one type or of the other.
unsafe impl<T: Far, E: Far> Far for Result<T, E> {}
// SAFETY: a word and a length.
unsafe impl<T: Object + ?Sized> Far for DBox<T> {}

macro_rules! tuples {
    ($(($($name:ident $index:tt),+))*) => {
        $(
            // SAFETY: the values of a tuple, and nothing else.
            unsafe impl<$($name: Portable),+> Portable for ($($name,)+) {
                fn visit_loans(&self, visit: &mut dyn FnMut(u64)) {
                    $(self.$index.visit_loans(visit);)+
                }

                fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
                    $(self.$index.visit_sent(visit);)+
                }
            }
            // SAFETY: the values of a tuple, and nothing else.
            unsafe impl<$($name: FarGroup),+> FarGroup for ($($name,)+) {
                const HAS_TIES: bool = false $(|| $name::HAS_TIES)+;

                fn visit_ties(&self, visit: &mut dyn FnMut(Tie)) {
                    $(self.$index.visit_ties(visit);)+
                }

                fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
                    $(self.$index.visit_owned(visit);)+
                }
            }
            // SAFETY: far values, and nothing else.
            unsafe impl<$($name: Far),+> Far for ($($name,)+) {}
        )*
    };
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
}
