//! Policies: pure decisions that the machinery asks for.

pub mod prefetch;
pub mod profile;
