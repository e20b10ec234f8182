//! Owners of shared objects.

mod darc;
mod dbox;
mod read;
mod tbox;

pub use darc::DArc;
pub use dbox::{DBox, Mut};
pub use read::{ObjectFetch, PinnedObject};
pub(crate) use tbox::MemberType;
pub use tbox::{TBox, Tie};
