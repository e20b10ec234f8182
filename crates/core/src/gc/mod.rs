//! Decision logic of the garbage-collected far heap: its words, the layouts of its types, and which
//! places of its pages are in use.
//!
//! | file | contents |
//! |---|---|
//! | `reference` | what a field of an object holds: an entry number and a guess |
//! | `entry` | where one object is, as one word that never moves |
//! | `evacuation` | which pages a collection empties, and how pages are filled |
//! | `header` | first word of each object: its entry and its type |
//! | `layout` | where the references of a type lie, as tables that others can read |
//! | `occupancy` | which objects begin in a page |
//! | `region` | how far space is cut into regions, and regions into units |
//!
//! `docs/design/gc.md` draws the whole.

mod entry;
mod evacuation;
mod header;
mod layout;
mod occupancy;
mod reference;
mod region;

pub use entry::{ENTRIES_PER_PAGE, EntryWord};
pub use evacuation::{CARDS_PER_PAGE, PageFill, PageSequence, SparseTotals, cards_of, is_sparse};
pub use header::{ObjectHeader, TYPES_MAX};
pub use layout::{LayoutError, LayoutTable, SLOTS_MAX, TailLayout, TypeLayout};
pub use occupancy::PageOccupancy;
pub use reference::{RefWord, WeakWord};
pub use region::{INSIDE_BYTES_MAX, OBJECT_BYTES_MIN, ObjectPlacement, RegionGeometry, UnitMap};
