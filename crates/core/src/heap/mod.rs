//! Decision logic of the far heap: words of frames, slots and handles, faults, size classes, log
//! pages, extents, free runs, hash map buckets and directories, page hashes.
//!
//! `docs/design/heap.md` draws the whole.

pub mod buckets;
mod class;
mod extents;
pub mod fault;
mod flat_bucket;
mod frame_word;
mod handle;
mod hotness;
mod log_page;
mod runs;
mod slot;
mod universal_hash;

pub use class::{CARD_BYTES, Class, SEGMENT_BYTES, SEGMENT_PAGES};
pub use extents::Extents;
pub use fault::{AccessMode, FetchIntent};
pub use flat_bucket::{FlatBucket, HashDirectory};
pub use frame_word::{DerefOutcome, FrameWord, State};
pub use handle::{Handle, ObjectLocation};
pub use hotness::{Hotness, STAMPS_PER_TURN, Stamp};
pub use log_page::{EvacuationDecision, IngressPath, LogClass, LogWord, TAG_BYTES, TAGS_ASIDE};
pub use runs::FreeRuns;
pub use slot::{FRAMES_MAX, FrameId, SlotHint};
pub use universal_hash::UniversalHash;
