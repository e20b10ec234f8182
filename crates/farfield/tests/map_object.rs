//! Every test of maps, on the object plane.

#[path = "map.rs"]
mod map;
