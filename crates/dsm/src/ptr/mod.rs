//! Owners of shared objects.

mod darc;
mod dbox;

pub use darc::DArc;
pub use dbox::{DBox, Mut};
