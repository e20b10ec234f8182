//! The tests of the collected heap, in one program: it is built and linked once.

mod api;
mod collections;
mod common;
mod counters;
mod errors;
mod evacuation;
mod graph;
mod measured;
mod rules;
mod shadow;
mod shapes;
mod tracers;
