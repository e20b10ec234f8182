//! Every test of tasks, on the object plane.

#[path = "tasks.rs"]
mod tasks;
