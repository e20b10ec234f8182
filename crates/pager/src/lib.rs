//! Transparent paging.
pub mod control;
