//! A garbage-collected far heap: graphs of objects with cycles, in far memory, without owners.
//!
//! A program allocates objects and lets them refer to each other. Objects are far when they have to
//! be, and are freed when no root leads to them. The program decides neither: it says how much near
//! memory the far heap may use, and how much far memory the objects may take.
//!
//! ```
//! use farfield::Heap;
//! use farfield_gc::{Atom, Bytes, FarObject, GcHeap, Ref, WeakRef};
//!
//! #[derive(FarObject, Default)]
//! struct Task {
//!     key: u64,
//!     dirty: Atom<u32>,
//!     value: Ref<Bytes>,
//!     deps: Ref<[Ref<Task>]>,
//!     parent: WeakRef<Task>,
//! }
//!
//! let heap = Heap::builder().near(16 << 20).build()?;
//! let gc = GcHeap::in_heap(&heap).limit(256 << 20).build()?;
//! let mut m = gc.enter(); // one for each thread
//! let root = {
//!     let task = m.alloc(Task { key: 7, ..Task::default() })?;
//!     let value = m.alloc_copy(b"twelve bytes")?;
//!     task.value.store(&m, Some(value));
//!     m.root(task) // outlives safepoints
//! };
//! m.safepoint()?; // every reference to an object ends here
//! let task = m.get(&root)?;
//! let value = task.value.load(&m)?; // may miss: an error is a value
//! assert_eq!(value.as_deref(), Some(&b"twelve bytes"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **References.** [`Gc`] is what a thread uses: `Copy`, and valid until the next
//! [safepoint](Mutator::safepoint) of its mutator. [`Ref`] and [`WeakRef`] are fields of objects.
//! [`Root`] is kept anywhere outside of the heap.
//!
//! **Safepoints.** A collection waits for each mutator to reach one. So a thread calls
//! [`Mutator::safepoint`] in its loop, drops its mutator when it does something else, and calls
//! [`Mutator::blocking`] around waits. Between two safepoints it can use as many objects as a scope
//! of the far heap can hold; then it gets [`FarError::NearFull`](farfield::FarError::NearFull).
//!
//! **Objects** hold numbers, atomic numbers and references, and have no destructor:
//!
//! ```compile_fail,E0277
//! #[derive(farfield_gc::FarObject)]
//! struct Named { name: String } // error: `String` owns memory elsewhere
//! ```
//!
//! ```compile_fail,E0277
//! #[derive(farfield_gc::FarObject)]
//! struct Raw { at: *const u8 } // error: an address means nothing in far memory
//! ```
//!
//! ```compile_fail
//! #[derive(farfield_gc::FarObject)]
//! struct Borrowed<'a> { name: &'a str } // error: it has a lifetime
//! ```
//!
//! ```compile_fail,E0080
//! #[derive(farfield_gc::FarObject)]
//! struct Guard(u64);
//! impl Drop for Guard {
//!     fn drop(&mut self) {}
//! }
//! fn alloc(m: &farfield_gc::Mutator<'_>) {
//!     let _ = m.alloc(Guard(1)); // error: it has a destructor
//! }
//! # let heap = farfield::Heap::builder().build().unwrap();
//! # alloc(&farfield_gc::GcHeap::in_heap(&heap).build().unwrap().enter());
//! ```
//!
//! A reference to an object stays in its thread and ends with its mutator:
//!
//! ```compile_fail,E0277
//! fn send(m: &farfield_gc::Mutator<'_>) {
//!     let number = m.alloc(7u64).unwrap();
//!     std::thread::scope(|threads| { threads.spawn(move || *number); }); // error: cannot be sent
//! }
//! ```
//!
//! ```compile_fail,E0505
//! fn end(gc: &farfield_gc::GcHeap) {
//!     let m = gc.enter();
//!     let number = m.alloc(7u64).unwrap();
//!     drop(m); // error: `m` is borrowed by `number`
//!     println!("{}", *number);
//! }
//! ```
//!
//! ```compile_fail,E0594
//! #[derive(farfield_gc::FarObject)]
//! struct Task { key: u64 }
//! fn change(m: &farfield_gc::Mutator<'_>) {
//!     let mut task = m.alloc(Task { key: 1 }).unwrap();
//!     task.key = 2; // error: others may see it; an `Atom` can change
//! }
//! ```
//!
//! The guide is `docs/guide/collected-heap.md`, the design is described in `docs/design/gc.md`.

extern crate self as farfield_gc;

pub mod collections;
mod collector;
mod entries;
mod error;
mod heap;
mod mutator;
mod object;
mod pacing;
mod pages;
mod reference;
mod roots;
mod stats;
mod stops;
mod sync;
mod types;
mod verify;

#[doc(hidden)]
pub use collector::CycleStep;
pub use error::{GcError, RefusedObject};
pub use farfield_derive::FarObject;
#[doc(hidden)]
pub use heap::BrokenRule;
pub use heap::{FarTracing, GcBuilder, GcHeap};
pub use mutator::Mutator;
pub use object::{AnyObject, Atom, AtomValue, Bytes, FarObject, Referent, SlotList};
pub use reference::{Gc, Ref, WeakRef};
pub use roots::Root;
pub use stats::{GcStats, SafepointWait};
pub use verify::VerifiedHeap;

/// Runs the code examples of the guide as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/collected-heap.md")]
mod guide {}
