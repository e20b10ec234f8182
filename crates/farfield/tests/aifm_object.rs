//! AIFM's tests, on the object plane.

#[path = "aifm.rs"]
mod aifm;
