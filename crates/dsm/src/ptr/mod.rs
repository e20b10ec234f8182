//! Owners of shared objects.

mod darc;
mod dbox;
mod tbox;

pub use darc::DArc;
pub use dbox::{DBox, Mut};
pub(crate) use tbox::MemberType;
pub use tbox::{TBox, Tie};
