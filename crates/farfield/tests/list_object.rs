//! Every test of lists, on the object plane.

#[path = "list.rs"]
mod list;
