//! Data frames: columns of Apache Arrow whose bytes live in far memory.
//!
//! Arrow computes, and this crate decides where the bytes live. A [`FarFrame`] keeps each column in
//! far vectors. It brings [`CHUNK_ROWS`] rows of the columns that are asked for near at a time, as
//! a `RecordBatch` for Arrow's kernels. Results go far again chunk by chunk. Where the memory
//! server runs functions, it counts, sums and compares whole columns of numbers itself.
//!
//! ```
//! use farfield::Heap;
//! use farfield_frame::FarFrame;
//! use arrow::{array::Float64Array, compute::kernels::cmp::gt};
//! use std::sync::Arc;
//!
//! let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
//! let text = "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n";
//! let trips = FarFrame::from_csv_text(&heap, text)?;
//! let dear = trips.filter(&["fare"], |batch| gt(batch.column(0), &Float64Array::new_scalar(10.0)))?;
//! assert_eq!((trips.rows(), dear.rows()), (3, 2));
//! assert_eq!(trips.totals("fare")?.mean, Some(24.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The design is described in `docs/design/frame.md`.

#![forbid(unsafe_code)]

mod cancel;
mod chunk_runs;
mod column;
mod conversion;
mod csv;
mod error;
mod expression;
mod frame;
mod group;
mod group_pushdown;
mod join;
mod keys;
#[cfg(feature = "parquet")]
mod parquet;
mod plain;
mod scan;
mod sort;
mod sums;
mod text;
mod totals;
mod zones;

pub use arrow;
pub use cancel::{block_on, cancellable, share_cancellation};
pub use column::CHUNK_ROWS;
pub use error::FrameError;
pub use expression::{Expression, column};
pub use frame::{Batches, FarFrame};
pub use group::{Agg, GroupBy};
pub use join::Join;
pub use scan::Scan;
pub use sort::SortBy;
pub use sums::{Sum, Sums};
pub use totals::{Summary, Totals};
