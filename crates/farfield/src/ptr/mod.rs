//! Far pointers.

mod far_box;

pub use far_box::FarBox;
