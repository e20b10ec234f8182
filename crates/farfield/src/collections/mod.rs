//! Far collections: std's collections, with elements that are near or far.
//!
//! What every member keeps:
//!
//! - **Names and meaning are std's.** `new` is empty and costs no far memory. Elements are any `T: Send + 'static`, far values
//!   and far collections among them; each is dropped once, wherever it is.
//! - **The scope is the first argument** of whatever touches an element: `vec.get(&scope, 3)?`. What needs no element (`len`)
//!   needs no scope. A collection that is changed through `&mut self` needs no heap to begin with: it belongs to the heap of the
//!   scope with which its first element came.
//! - **References end with their scope and with the borrow of their collection**, so nothing moves or goes under them.
//! - **Errors are values.** What fails with a [`FarError`](crate::FarError) has changed nothing, and gives back what it was given
//!   ([`AllocError`](crate::AllocError)). A panic means what it means in std: an index out of bounds.
//! - **No scan is too long.** Whatever walks through all elements exists in a form with `&mut Scope`, which renews the scope
//!   between steps; the other forms end with `NearFull` when a scope holds too much.
//! - **Memory comes back**: far memory of what is removed is used again; dropping elements without destructors does no I/O.
//!   The page of a member says what it keeps near beside its elements.
//! - **Each passes `tests/common/twin.rs`**: random steps beside its std twin, from 2 % to 100 % near.

mod array;
mod btree;
mod bytes;
mod chain;
mod chunks;
mod columns;
mod fresh;
mod list;
mod map;
mod paged;
mod queue;
mod shift;
#[cfg(feature = "serde")]
mod snapshot;
mod stack;
mod string;
mod tables;
mod vec;

pub use array::FarArray;
pub use btree::{BTreeEntry, FarBTreeMap, OccupiedBTreeEntry, RangeIter, RangeIterMut, VacantBTreeEntry};
pub use bytes::FarBytes;
pub use chunks::{Chunks, ChunksMut, Iter, IterMut, Scan, ScanMut};
pub use columns::Keys;
pub use list::{Cursor, CursorMut, FarList, ListIter};
#[cfg(feature = "serde")]
pub use map::Restored;
pub use map::{Change, Entry, FarMap, FarMapBuilder, Index, Item, OccupiedEntry, Source, VacantEntry, Walk};
pub use queue::FarQueue;
pub use stack::FarStack;
pub use string::FarString;
pub use tables::{ByKey, Grouping, Tallying};
pub use vec::{Aggregate, Copying, FarVec, Finding, Order, Ranking, Sorting, Taking};

/// The elements of a range, as std's slices understand it.
#[track_caller]
fn range_of(range: impl core::ops::RangeBounds<usize>, len: usize) -> core::ops::Range<usize> {
    use core::ops::Bound::{Excluded, Included, Unbounded};
    let start = match range.start_bound() {
        Included(start) => *start,
        Excluded(before) => before.saturating_add(1),
        Unbounded => 0,
    };
    let end = match range.end_bound() {
        Included(last) => last.saturating_add(1),
        Excluded(end) => *end,
        Unbounded => len,
    };
    assert!(start <= end, "range starts at {start} but ends at {end}");
    assert!(end <= len, "range end index {end} out of range for length {len}");
    start..end
}
