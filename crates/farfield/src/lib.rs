//! Farfield is a far-memory runtime: values live in far memory and come near when they are used.
//!
//! A [`Heap`] has a near budget and a pool of far memory. [`Heap::alloc`] puts a value into it and
//! returns a [`FarBox`]: eight bytes that own the value wherever it is. Inside a [`Scope`],
//! [`FarBox::get`] gives a reference. The compiler ensures that no reference outlives its scope.
//!
//! ```
//! use farfield::Heap;
//!
//! let heap = Heap::builder().near(16 << 20).build()?; // far = this process: to try it out
//! let greeting = heap.alloc(String::from("hello"))?;
//! {
//!     let scope = heap.enter();
//!     assert_eq!(greeting.get(&scope)?, "hello");
//! } // from here on the string may leave
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With the feature `serde`, far pointers and collections can be written as snapshots and restored.
//!
//! The guide is `docs/guide/README.md`: how to port a program, and which hints to choose. The
//! design is described in `docs/design/heap.md`.

// Derives name this crate by its name, within it too.
extern crate self as farfield;

mod call;
pub mod collections;
mod config;
mod error;
mod facade;
mod fault;
mod heap;
mod offload;
mod plane;
mod ptr;
#[cfg(feature = "serde")]
mod snapshot;
#[doc(hidden)]
pub mod space;
mod stats;
pub mod task;

// Tests within this crate wait as those outside of it do.
#[cfg(test)]
#[path = "../tests/common/budget.rs"]
mod test_budget;

pub use bytemuck::Pod;
pub use call::{
    AtServer, AtServerMut, BytesRef, CallCounts, ClientReason, EntriesRef, EntryCursor, FarFold, FarFoldable,
    FarFunction, FarFunctionMut, FarMut, FarPlace, FarPlaceMut, FarRef, FarTraversal, FarView, FarViewMut, FlatCursor,
    FlatRef, Fold, HeapCall, HeapCallMut, HeapFold, HeapMapFold, ItemCursor, ItemsRef, MapEntries, MapEntriesRef,
    TextRef, view,
};
pub use collections::{
    Change, FarArray, FarBTreeMap, FarBTreeSet, FarBytes, FarFlatMap, FarList, FarMap, FarQueue, FarSet, FarStack,
    FarString, FarVec, Formula, Index, PrefetchMode, SeededHasher, SeededState, UnknownState,
};
pub use config::{Builder, Verify};
pub use error::{AllocError, BuildError, FarError};
pub use facade::Heap;
pub use farfield_core::heap::Hotness;
pub use farfield_core::policy::call_placement::{CallPlacementDecision, Side};
pub use farfield_derive::{FarView, FarViewMut};
pub use farfield_pool::{Health, OpenError, PoolError, SwitchError, SwitchProgress};
pub use farfield_wic::{CallError, Fault, Number, Part, Where};
pub use heap::{FarRange, PoolSwitch, Scope};
pub use offload::OffloadError;
pub use plane::Plane;
#[doc(hidden)]
pub use ptr::UninitField;
pub use ptr::{Batches, FarArc, FarBox, FarPtr, FarWeak, Init, Pinned, PinnedMut, Uninit};
pub use stats::Stats;

/// Runs the code examples of the guide as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/README.md")]
mod guide {}
