//! SQL over data frames in far memory.
//!
//! DataFusion plans and computes. This crate decides where the bytes live and where they are looked
//! at. A [`FarTable`] gives a query only the columns that it names, and only the rows that it asks
//! for. The memory server finds ranges of numbers and computes aggregates, with or without groups.
//! The result of a query can become a far frame again ([`to_frame`]).
//!
//! ```
//! use farfield::Heap;
//! use farfield_frame::FarFrame;
//! use farfield_sql::{FarTable, context, to_frame};
//! use std::sync::Arc;
//!
//! # tokio::runtime::Builder::new_multi_thread().build()?.block_on(async {
//! let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
//! let trips = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n")?;
//! let context = context();
//! context.register_table("trips", Arc::new(FarTable::new(trips)))?;
//! let query = "select zone, avg(fare) as fare from trips where fare > 10 group by zone order by fare";
//! let dear = to_frame(&heap, context.sql(query).await?).await?;
//! assert_eq!((dear.rows(), dear.totals("fare")?.max), (2, Some(52.5)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The design is described in `docs/design/sql.md`.

#![forbid(unsafe_code)]

mod aggregate_request;
mod computed;
mod groups;
mod pushdown;
mod range;
mod result;
mod scan;
mod table;
mod totals;

pub use datafusion;
pub use groups::FarGroups;
pub use result::to_frame;
pub use scan::FarScan;
pub use table::{FarTable, context, context_with};
pub use totals::FarTotals;
