//! Owners of shared objects.

mod dbox;

pub use dbox::{DBox, Mut};
