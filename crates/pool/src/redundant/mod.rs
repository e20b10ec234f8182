//! Backends that outlive some of the members that they are made of.
//!
//! They have one engine: [`lane`] carries operations out, [`members`] decides which members are
//! active, lagging or failed, [`repair`] and [`repair_schedule`] when members are given what they
//! lack, [`scrub`] when what they hold is compared, and [`backend`] is what callers see. The schemes
//! [`mirror`] and [`ec`] say what pages mean to the members ([`scheme`]).

mod backend;
pub(crate) mod ec;
mod lane;
pub(crate) mod member_lanes;
pub(crate) mod members;
pub(crate) mod mirror;
mod operation;
pub(crate) mod rejoin;
pub(crate) mod repair;
mod repair_schedule;
mod scheme;
pub(crate) mod scrub;
mod split;
pub(crate) mod write_epochs;
