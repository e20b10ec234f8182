//! Frames in far memory, beside the same rows in plain memory. Each module says what it guards against.

mod common;
mod expression;
mod group;
mod join;
mod like_arrow;
mod nested;
#[cfg(feature = "parquet")]
mod parquet;
mod sort;
mod text;
