//! Clusters whose jobs share a pool of far memory.
//!
//! [`sim`] simulates schedules of such clusters; [`plan`] says which memory to buy for one;
//! [`agent`] divides the near memory of a real node; [`gate`] lets jobs start beside a real
//! scheduler.
//! Decisions are those of [`farfield_core::policy::cluster`]. Nothing here is in the data path.

pub mod agent;
pub mod gate;
pub mod plan;
pub mod sim;
