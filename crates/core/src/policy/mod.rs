//! Policies: pure decisions, made on request of the machinery.

pub mod advice;
pub mod budget_controller;
pub mod budget_search;
pub mod call_placement;
pub mod cluster;
pub mod curve;
pub mod give_up;
pub mod link;
pub mod placement_controller;
pub mod prefetch;
pub mod profile;
pub mod replacement;
pub mod scrub;
pub mod tier_admission;
