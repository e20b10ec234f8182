//! Every test of trees, on the object plane.

#[path = "btree.rs"]
mod btree;
