//! Collections that lie in a collected heap: [`TrieMap`], [`OrderedMap`] and [`AppendLog`].
//!
//! They are objects like others, made of the public interface alone. A program allocates one, or has
//! it as a field of an object of its own. All mutators of the heap can use one at the same time:
//! whatever changes is one store to a reference, after all that may fail. So an insertion or removal that
//! fails has changed nothing. Code of the program (`Hash`, `Ord`, [`MapKey`]) is never called in the
//! middle of a change, and a thread that reads waits for no other.
//!
//! An operation fails with [`GcError::SafepointDue`] or
//! [`FarError::NearFull`](farfield::FarError::NearFull) as others do;
//! [`Mutator::with_room`] tries it again.
//!
//! ```
//! use farfield::Heap;
//! use farfield_gc::collections::TrieMap;
//! use farfield_gc::{GcHeap, Ref};
//!
//! let heap = Heap::builder().near(16 << 20).build()?;
//! let gc = GcHeap::in_heap(&heap).limit(256 << 20).build()?;
//! let mut m = gc.enter();
//! let words = m.root(m.alloc(TrieMap::<Ref<str>, u64>::new())?);
//! for (at, word) in "to be or not to be".split(' ').enumerate() {
//!     m.with_room(|m| m.get(&words)?.insert(m, word, at as u64))?;
//! }
//! let words = m.get(&words)?;
//! assert_eq!((words.len(), words.get(&m, "be")?, words.get(&m, "me")?), (4, Some(5), None));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod append_log;
mod fields;
mod ordered_map;
mod trie_map;

pub use append_log::AppendLog;
pub use fields::{MapKey, MapValue};
pub use ordered_map::OrderedMap;
pub use trie_map::{MapEntry, TrieMap, TriePosition, TrieStep};

use crate::{GcError, Mutator};
