//! Snapshots of vectors, arrays, lists, bytes and strings, written as serde writes their std
//! counterparts (`FarBytes` as a byte string).

use super::chain::{Chain, ChainEnd};
use super::paged::Paged;
use super::{FarArray, FarBytes, FarList, FarQueue, FarStack, FarString, FarVec};
use crate::error::AllocError;
use crate::heap::{AccessMode, Scope};
use crate::snapshot::{not_restored, not_written, with_target};
use core::fmt;
use core::marker::PhantomData;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Writes these elements, which lie side by side and are pinned.
///
/// # Safety
/// There are `count` elements, and nobody changes them meanwhile.
unsafe fn write<T: Serialize, Q: SerializeSeq>(
    sequence: &mut Q,
    first: *const T,
    count: usize,
) -> Result<(), Q::Error> {
    // SAFETY: passed on to the caller.
    unsafe { core::slice::from_raw_parts(first, count) }
        .iter()
        .try_for_each(|element| sequence.serialize_element(element))
}

impl<T: Send + Serialize + 'static> Serialize for FarVec<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut sequence = serializer.serialize_seq(Some(self.len()))?;
        let Some(core) = self.units.core() else { return sequence.end() };
        let mut at = 0;
        while at < self.len() {
            let count = Paged::<T>::PER_UNIT.min(self.len() - at);
            let near = || {
                // SAFETY: our units keep the heap.
                let scope = Scope::new(unsafe { &*core });
                let first = self.units.unit(&scope, at / Paged::<T>::PER_UNIT, AccessMode::Read)?;
                Ok((first, scope.pin_at(first.cast())?))
            };
            // Without a scope: elements may have far parts, each of which has one of its own.
            let (first, _pin) = near().map_err(not_written)?;
            // SAFETY: elements of the vector, which is borrowed.
            unsafe { write(&mut sequence, first, count) }?;
            at += count;
        }
        sequence.end()
    }
}

fn write_chain<T: Send + Serialize, S: Serializer>(chain: &Chain<T>, serializer: S) -> Result<S::Ok, S::Error> {
    let mut sequence = serializer.serialize_seq(Some(chain.len()))?;
    let Some(heap_ref) = chain.heap_ref() else { return sequence.end() };
    let mut at = chain.end(ChainEnd::Front);
    loop {
        let near = || {
            let scope = Scope::new(heap_ref.core());
            let Some((first, count)) = chain.chunk_at(&scope, at, AccessMode::Read)? else { return Ok(None) };
            chain.prefetch(&scope, chain.next_chunk(at, ChainEnd::Back));
            Ok(Some((first, count, scope.pin_at(first.cast())?)))
        };
        let Some((first, count, _pin)) = near().map_err(not_written)? else { return sequence.end() };
        // SAFETY: elements of the chain, which is borrowed.
        unsafe { write(&mut sequence, first, count) }?;
        at = chain.next_chunk(at, ChainEnd::Back);
    }
}

/// Reads a sequence, one element at a time, and adds each with `put`.
struct SequenceVisitor<C, T, P>(C, P, PhantomData<T>);

impl<'de, C, T, P> Visitor<'de> for SequenceVisitor<C, T, P>
where
    T: Deserialize<'de>,
    P: FnMut(&mut C, &Scope<'_>, T) -> Result<(), AllocError<T>>,
{
    type Value = C;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sequence")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<C, A::Error> {
        let SequenceVisitor(mut all, mut put, _) = self;
        while let Some(element) = sequence.next_element()? {
            with_target(|heap| put(&mut all, &heap.enter(), element).map_err(|error| not_restored(error.error)))?;
        }
        Ok(all)
    }
}

/// Collections that are sequences: how they are written, and how they grow.
macro_rules! sequence {
    ($($name:ident: $push:ident;)*) => {$(
        impl<'de, T: Send + Deserialize<'de> + 'static> Deserialize<'de> for $name<T> {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name<T>, D::Error> {
                deserializer.deserialize_seq(SequenceVisitor($name::new(), $name::$push, PhantomData))
            }
        }
    )*};
}

sequence! {
    FarVec: push;
    FarList: push_back;
    FarQueue: push;
    FarStack: push;
}

/// Writes the elements from the front to the back.
impl<T: Send + Serialize + 'static> Serialize for FarList<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write_chain(&self.chain, serializer)
    }
}

/// Writes the elements from the front to the back.
impl<T: Send + Serialize + 'static> Serialize for FarQueue<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write_chain(&self.chain, serializer)
    }
}

/// Writes the elements from the bottom to the top.
impl<T: Send + Serialize + 'static> Serialize for FarStack<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        write_chain(&self.chain, serializer)
    }
}

/// Writes the lengths of the dimensions, and then all elements in order.
impl<T: Send + Serialize + 'static, const D: usize> Serialize for FarArray<T, D> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (&self.dims[..], &self.elements).serialize(serializer)
    }
}

impl<'de, T: Send + Deserialize<'de> + 'static, const D: usize> Deserialize<'de> for FarArray<T, D> {
    fn deserialize<R: Deserializer<'de>>(deserializer: R) -> Result<FarArray<T, D>, R::Error> {
        let (dims, elements) = <(Vec<usize>, FarVec<T>)>::deserialize(deserializer)?;
        let count = dims.iter().try_fold(1usize, |count, dim| count.checked_mul(*dim));
        let Ok(dims) = <[usize; D]>::try_from(dims) else {
            return Err(R::Error::custom(format_args!("not an array of {D} dimensions")));
        };
        if count != Some(elements.len()) {
            return Err(R::Error::custom(format_args!("{} elements for an array of {dims:?}", elements.len())));
        }
        Ok(FarArray { elements, dims })
    }
}

impl Serialize for FarBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(scope) = self.enter() else { return serializer.serialize_bytes(&[]) };
        serializer.serialize_bytes(self.get(&scope).map_err(not_written)?)
    }
}

impl Serialize for FarString {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(scope) = self.bytes.enter() else { return serializer.serialize_str("") };
        serializer.serialize_str(self.get(&scope).map_err(not_written)?)
    }
}

struct FarBytesVisitor;

impl<'de> Visitor<'de> for FarBytesVisitor {
    type Value = FarBytes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<FarBytes, E> {
        with_target(|heap| FarBytes::copy_of(&heap.enter(), bytes).map_err(not_restored::<E>))
    }

    /// Reads bytes from a format that has no byte strings, such as JSON.
    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<FarBytes, A::Error> {
        let mut bytes = FarBytes::new();
        let mut some = Vec::with_capacity(PIECE);
        loop {
            let byte: Option<u8> = sequence.next_element()?;
            some.extend(byte);
            if byte.is_none() || some.len() == PIECE {
                with_target(|heap| bytes.extend_from_slice(&heap.enter(), &some).map_err(not_restored::<A::Error>))?;
                some.clear();
            }
            if byte.is_none() {
                return Ok(bytes);
            }
        }
    }
}

/// Bytes that are moved at a time.
const PIECE: usize = 4096;

impl<'de> Deserialize<'de> for FarBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FarBytes, D::Error> {
        deserializer.deserialize_bytes(FarBytesVisitor)
    }
}

struct FarStringVisitor;

impl Visitor<'_> for FarStringVisitor {
    type Value = FarString;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<FarString, E> {
        with_target(|heap| FarString::copy_of(&heap.enter(), text).map_err(not_restored::<E>))
    }
}

impl<'de> Deserialize<'de> for FarString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FarString, D::Error> {
        deserializer.deserialize_str(FarStringVisitor)
    }
}
