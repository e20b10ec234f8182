//! Policies: pure decisions, made on request of the machinery.

pub mod advice;
pub mod curve;
pub mod give_up;
pub mod hold;
pub mod link;
pub mod place;
pub mod prefetch;
pub mod profile;
pub mod room;
pub mod scrub;
pub mod seek;
pub mod settle;
