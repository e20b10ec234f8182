//! Tests that say themselves on which plane they are: `cargo x test` runs them once.

mod guide;
mod hybrid;
mod large;
mod objects;
mod places;
