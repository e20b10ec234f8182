//! Numbers that tasks at any node change atomically, at the number's home.
#![allow(unsafe_code, reason = "numbers lie in blocks")]

use crate::node::{self, AtomicStep};
use crate::{Far, FarGroup, Here, NodeId, OwnedObject, Portable, ShareError};
use core::marker::PhantomData;
use core::sync::atomic::AtomicU64;
use farfield_core::dsm::OwnerWord;

#[allow(unnameable_types, reason = "nobody else implements what is sealed")]
mod sealed {
    pub trait AtomicBits: crate::Far + Copy {
        fn to_bits(self) -> u64;
        fn of_bits(bits: u64) -> Self;
    }
}
use sealed::AtomicBits;

/// Value that a [`DAtomic`] can hold: `u64`, `i64`, `usize`, `isize` or `bool`.
pub trait AtomicValue: AtomicBits {}

macro_rules! atomic_values {
    ($($type:ty),*) => {$(
        impl AtomicBits for $type {
            fn to_bits(self) -> u64 {
                self as u64
            }
            fn of_bits(bits: u64) -> Self {
                bits as $type
            }
        }
        impl AtomicValue for $type {}
    )*};
}

atomic_values!(u64, i64, usize, isize);

impl AtomicBits for bool {
    fn to_bits(self) -> u64 {
        u64::from(self)
    }
    fn of_bits(bits: u64) -> bool {
        bits != 0
    }
}
impl AtomicValue for bool {}

/// Atomic number that tasks at any node share, as `AtomicU64` is for the threads of one process.
///
/// It stays at the node that has made it. A step elsewhere is one message. All steps of all numbers
/// are sequentially consistent, and each is over when its call returns. On `Silent` and `NodeLost`
/// nobody knows whether the step was made.
pub struct DAtomic<T: AtomicValue> {
    word: OwnerWord,
    number: PhantomData<T>,
}

// SAFETY: a word, which holds no address.
unsafe impl<T: AtomicValue> Portable for DAtomic<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: AtomicValue> FarGroup for DAtomic<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::number(self.word));
    }
}
// SAFETY: the word never changes.
unsafe impl<T: AtomicValue> Far for DAtomic<T> {}

impl<T: AtomicValue> core::fmt::Debug for DAtomic<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DAtomic(at node {})", self.home())
    }
}

impl<T: AtomicValue> DAtomic<T> {
    /// Stores a number at this node. Errors are those of [`Here::alloc`].
    pub fn new(here: &Here<'_>, value: T) -> Result<DAtomic<T>, ShareError> {
        let word = here.alloc(value.to_bits())?.into_word();
        Ok(DAtomic { word, number: PhantomData })
    }

    /// Returns the node that keeps the number.
    pub fn home(&self) -> NodeId {
        NodeId::of(self.word)
    }

    fn step(&self, here: &Here<'_>, step: AtomicStep) -> Result<T, ShareError> {
        let address = match step {
            AtomicStep::Load => here.address(self.word),
            _ => here.writing_address(self.word),
        };
        if let Some(address) = address {
            // SAFETY: the number, aligned to 16 bytes; it is only used atomically as long as its owner is
            // there, which is borrowed.
            return Ok(T::of_bits(step.apply(unsafe { AtomicU64::from_ptr(address.cast()) })));
        }
        here.node().number_at_home(self.word, step).map(T::of_bits).map_err(|unanswered| unanswered.error)
    }

    /// Returns the number.
    pub fn load(&self, here: &Here<'_>) -> Result<T, ShareError> {
        self.step(here, AtomicStep::Load)
    }

    /// Sets the number.
    pub fn store(&self, here: &Here<'_>, value: T) -> Result<(), ShareError> {
        self.step(here, AtomicStep::Store(value.to_bits())).map(drop)
    }

    /// Sets the number and returns the one before.
    pub fn swap(&self, here: &Here<'_>, value: T) -> Result<T, ShareError> {
        self.step(here, AtomicStep::Swap(value.to_bits()))
    }

    /// Sets the number if it is `current`. Returns the number that was found, in `Err` if it was another
    /// one.
    pub fn compare_exchange(&self, here: &Here<'_>, current: T, new: T) -> Result<Result<T, T>, ShareError> {
        let (current, new) = (current.to_bits(), new.to_bits());
        let found = self.step(here, AtomicStep::CompareExchange { current, new })?;
        Ok(if found.to_bits() == current { Ok(found) } else { Err(found) })
    }

    /// Combines the number with these bits by *and*, and returns the one before.
    pub fn fetch_and(&self, here: &Here<'_>, bits: T) -> Result<T, ShareError> {
        self.step(here, AtomicStep::And(bits.to_bits()))
    }

    /// Combines the number with these bits by *or*, and returns the one before.
    pub fn fetch_or(&self, here: &Here<'_>, bits: T) -> Result<T, ShareError> {
        self.step(here, AtomicStep::Or(bits.to_bits()))
    }

    /// Combines the number with these bits by *exclusive or*, and returns the one before.
    pub fn fetch_xor(&self, here: &Here<'_>, bits: T) -> Result<T, ShareError> {
        self.step(here, AtomicStep::Xor(bits.to_bits()))
    }
}

macro_rules! sums {
    ($($type:ty),*) => {$(
        impl DAtomic<$type> {
            /// Adds to the number, which wraps around, and returns the one before.
            pub fn fetch_add(&self, here: &Here<'_>, more: $type) -> Result<$type, ShareError> {
                self.step(here, AtomicStep::Add(more.to_bits()))
            }

            /// Subtracts from the number, which wraps around, and returns the one before.
            pub fn fetch_sub(&self, here: &Here<'_>, less: $type) -> Result<$type, ShareError> {
                self.step(here, AtomicStep::Add(less.to_bits().wrapping_neg()))
            }
        }
    )*};
}

sums!(u64, i64, usize, isize);

impl<T: AtomicValue> Drop for DAtomic<T> {
    fn drop(&mut self) {
        node::free(self.word, None);
    }
}
