//! Every test of boxes, on the object plane.

#[path = "boxes.rs"]
mod boxes;
