//! Every test of arcs, on the object plane.
#[path = "arcs.rs"]
mod arcs;
