//! Clusters whose jobs share a pool of far memory.
//!
//! [`sim`] simulates schedules of such clusters. Decisions are those of
//! [`farfield_core::policy::cluster`]. Nothing here is in the data path.

pub mod sim;
