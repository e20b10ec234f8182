//! Every test of many, on the object plane.

#[path = "many.rs"]
mod many;
