//! Far collections: std's collections, with elements that are near or far.
//!
//! Rules that every collection keeps:
//!
//! - **Names and meaning are std's.** `new` makes an empty collection, which uses no far memory.
//!   Elements are any `T: Send + 'static`, far values and far collections among them. Each element
//!   is dropped once, near or far.
//! - **The scope is the first argument** of each method that touches an element:
//!   `vec.get(&scope, 3)?`. Methods that need no element (`len`) need no scope. A collection that
//!   is changed through `&mut self` is made without a heap: it belongs to the heap of the scope in
//!   which its first element was added.
//! - **References end with their scope and with the borrow of their collection**, so the value
//!   behind a reference is neither moved nor dropped.
//! - **Errors are values.** An operation that fails with a [`FarError`](crate::FarError) has
//!   changed nothing, and gives back the value it was given ([`AllocError`](crate::AllocError)). A
//!   panic means what it means in std: an index out of bounds.
//! - **No scan is too long.** Each walk through all elements has a form with `&mut Scope`, which
//!   renews the scope between steps. The other forms end with `NearFull` when a scope holds too
//!   much.
//! - **Memory comes back**: far memory of removed elements is used again. Dropping elements without
//!   destructors does no I/O. The page of each collection says what it keeps near beside its
//!   elements.
//! - **Each passes `tests/common/twin.rs`**: random steps, compared with its std counterpart, with
//!   2 % to 100 % of the data near.

mod array;
mod btree;
mod btree_set;
mod bytes;
mod chain;
mod chunks;
mod columns;
mod computing;
mod flat_map;
mod formula;
mod list;
mod map;
mod output_units;
mod paged;
mod pattern;
mod queue;
mod set;
mod shift;
#[cfg(feature = "serde")]
mod snapshot;
mod stack;
mod string;
mod tables;
mod vec;
mod views;

pub use array::FarArray;
pub(crate) use btree::NodeLayout;
pub use btree::{BTreeEntry, FarBTreeMap, OccupiedBTreeEntry, RangeIter, RangeIterMut, VacantBTreeEntry};
pub use btree_set::FarBTreeSet;
pub use bytes::FarBytes;
pub(crate) use chain::ChainChunk;
pub use chunks::{Chunks, ChunksMut, Iter, IterMut, Scan, ScanMut};
pub use columns::{KeyColumn, Keys};
pub use computing::Computing;
pub use farfield_wic::columns::{CONDITIONS_MAX, KEYS_MAX, VALUES_MAX};
pub(crate) use flat_map::flat_hash;
pub use flat_map::{FarFlatMap, SeededHasher, SeededState, UnknownState};
pub use formula::Formula;
pub use list::{Cursor, CursorMut, FarList, ListIter};
pub(crate) use map::EntryLayout;
#[cfg(feature = "serde")]
pub use map::Restored;
pub use map::{Change, Entry, FarMap, FarMapBuilder, Index, Item, OccupiedEntry, Source, VacantEntry, Walk};
pub use pattern::PrefetchMode;
pub use queue::FarQueue;
pub use set::FarSet;
pub use stack::FarStack;
pub use string::FarString;
pub use tables::{AllByKey, ByKey, Grouping, Tallying};
pub use vec::{Aggregate, Copying, FarVec, Finding, Order, PinnedVec, Ranking, Sorting, Taking};

/// Resolves a range of indices, with the bounds and panics of std's slices.
#[track_caller]
fn range_of(range: impl core::ops::RangeBounds<usize>, len: usize) -> core::ops::Range<usize> {
    let core::ops::Range { start, end } = unchecked_range_of(range, len);
    assert!(start <= end, "range starts at {start} but ends at {end}");
    assert!(end <= len, "range end index {end} out of range for length {len}");
    start..end
}

/// Resolves a range of indices that need not exist; one without an end ends at `len`.
pub(crate) fn unchecked_range_of(range: impl core::ops::RangeBounds<usize>, len: usize) -> core::ops::Range<usize> {
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
    start..end
}

#[cfg(test)]
mod tests {
    //! Guards against look-ups that become chains of far accesses: that there are none is why no
    //! function at the server walks them (decision 15).
    use crate::{FarList, FarMap, Heap, Plane, collections::Index};

    const PLANES: [Plane; 3] = [Plane::Page, Plane::Object, Plane::Hybrid];
    const NEAR: u64 = 4 << 20;

    fn heap(plane: Plane) -> Heap {
        Heap::builder().near(NEAR).near_max(NEAR).far(1 << 30).plane(plane).build().unwrap()
    }

    #[test]
    fn a_get_is_one_far_access_and_one_more_if_the_index_is_far() {
        const ENTRIES: u64 = 40_000;
        const GETS: u64 = 2_000;
        for plane in PLANES {
            for (index, most) in [(Index::Near, 1.05), (Index::Far, 2.05)] {
                let heap = heap(plane);
                let map: FarMap<u64, [u64; 30]> = FarMap::builder().index(index).build(&heap).unwrap();
                for key in 0..ENTRIES {
                    map.insert(&heap.enter(), key, [key; 30]).unwrap();
                }
                let before = heap.stats().misses;
                for number in 0..GETS {
                    let key = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % ENTRIES;
                    assert_eq!(map.get(&heap.enter(), &key).unwrap().map(|value| value[29]), Some(key));
                }
                let misses = (heap.stats().misses - before) as f64 / GETS as f64;
                println!("{plane:?}, index {index:?}: {misses:.3} misses a get");
                assert!(misses > 0.4 && misses < most, "{plane:?}, index {index:?}: {misses:.3} misses a get");
            }
        }
    }

    #[test]
    fn a_cursor_of_a_list_moves_without_a_far_access() {
        const ELEMENTS: u64 = 800_000;
        for plane in PLANES {
            let heap = heap(plane);
            let mut list = FarList::new();
            for number in 0..ELEMENTS {
                list.push_back(&heap.enter(), number).unwrap();
            }
            let before = heap.stats().misses;
            let mut cursor = list.cursor_front();
            (0..ELEMENTS / 3).for_each(|_| cursor.move_next());
            assert_eq!(heap.stats().misses, before, "{plane:?}: a cursor that moves brings nothing");
            assert_eq!(cursor.current(&heap.enter()).unwrap(), Some(&(ELEMENTS / 3)));
            assert!(heap.stats().misses - before <= 1, "{plane:?}: and an element brings its chunk");
        }
    }
}
