//! Types whose values may lie in shared memory.
#![allow(unsafe_code, reason = "types promise what their bytes are")]

use crate::{DBox, NodeId, ShareError};
use core::marker::PhantomData;
use core::time::Duration;

/// Type whose values may lie in shared memory, be sent to tasks, and come back from them.
///
/// # Safety
/// A copy of the bytes of a value is that value, in each process of the same build. So it holds no
/// address, no handle of the operating system and no thread's identity, and nothing in it changes
/// through a shared reference. What it owns is owned by its bytes ([`DBox`]).
#[diagnostic::on_unimplemented(
    message = "values of `{Self}` cannot lie in shared memory",
    note = "numbers, `bool`, `char`, arrays, tuples, `Option`, `Result` and `DBox` can; instead of `Box` write `DBox`",
    note = "references, `String`, `Vec`, `Arc` and cells hold addresses of one process"
)]
pub unsafe trait Far: Send + Sync + 'static {}

macro_rules! plain {
    ($($type:ty),*) => {
        // SAFETY: plain bytes, without an address.
        $(unsafe impl Far for $type {})*
    };
}

plain!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64, bool, char, ());
plain!(NodeId, ShareError, Duration, core::cmp::Ordering);

// SAFETY: elements lie side by side, and nothing else is in it.
unsafe impl<T: Far, const N: usize> Far for [T; N] {}
// SAFETY: nothing of `T` is in it.
unsafe impl<T: Far> Far for PhantomData<T> {}
// SAFETY: a value of `T`, or nothing.
unsafe impl<T: Far> Far for Option<T> {}
// SAFETY: a value of one type or of the other.
unsafe impl<T: Far, E: Far> Far for Result<T, E> {}
// SAFETY: a word, which holds no address; what it owns is owned by that word.
unsafe impl<T: Far> Far for DBox<T> {}

macro_rules! tuples {
    ($(($($name:ident),+))*) => {
        // SAFETY: the values of a tuple, and nothing else.
        $(unsafe impl<$($name: Far),+> Far for ($($name,)+) {})*
    };
}

tuples! {
    (A) (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, F) (A, B, C, D, E, F, G) (A, B, C, D, E, F, G, H)
}
