//! Every test of bytes, on the object plane.

#[path = "bytes.rs"]
mod bytes;
