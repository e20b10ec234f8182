//! Far pointers.

mod batch_get;
mod far_arc;
mod far_box;
mod far_weak;
mod in_place;
mod pinned;
mod pointer;

pub(crate) use batch_get::BatchGet;
pub use batch_get::Batches;
pub use far_arc::FarArc;
pub use far_box::FarBox;
pub use far_weak::FarWeak;
pub use in_place::{Init, Uninit, UninitField};
pub use pinned::{Pinned, PinnedMut};
pub(crate) use pointer::{Pointer, PointerLookup};

/// A far pointer: [`FarBox`] or [`FarArc`].
#[expect(private_bounds, reason = "pointers are ours: nobody else implements it")]
pub trait FarPtr: Follow {
    /// Type of the value that the pointer points to.
    type Value: Send + 'static;
}

/// Access to the [`Pointer`] inside a far pointer.
pub(crate) trait Follow {
    fn pointer(&self) -> &Pointer;
}
