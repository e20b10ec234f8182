//! Backends that outlive some of the members that they are made of, and what those have in common.

pub(crate) mod ec;
pub(crate) mod member_lanes;
pub(crate) mod members;
pub(crate) mod mirror;
pub(crate) mod rejoin;
pub(crate) mod repair;
pub(crate) mod scrub;
pub(crate) mod write_epochs;
