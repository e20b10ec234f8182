//! Planes: how misses of small values are served.
//!
//! | member | on a miss | slots of small values name |
//! |---|---|---|
//! | [`page`]: what every heap has | the page comes, to the same far address | a place |
//! | [`object`] | the value comes, and moves to a page with others that came lately | a handle |
//! | hybrid (`object/paths.rs`) | either, decided for each page when it leaves | a handle |
//!
//! All planes use the frames, frame words, scopes and evictor of `heap`. Values that are too large
//! for [`LogClass`](farfield_core::heap::LogClass) come by pages on each plane. A plane makes and
//! frees values, finds them (a dereference), and takes part in the decision when a page leaves.

pub(crate) mod object;
mod page;

/// Unit in which small values come near on a miss. Chosen with
/// [`Builder::plane`](crate::Builder::plane).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Plane {
    /// The whole page comes. Best where values that lie together are used together.
    #[default]
    Page,
    /// Only the value comes, if it is smaller than about a third of a page. Values that are used at
    /// the same time come to lie together. Best for small values used at random. Each such value
    /// costs eight bytes of near memory, near or far, and each dereference takes a little more
    /// time. Entries of maps and short texts are such values, too.
    Object,
    /// The page comes if enough of it is used to be worth its near memory, else only the value (as
    /// in Atlas). Values that are used together come to lie together, value by value, and come page
    /// by page from then on. The costs are those of [`Plane::Object`], except for the smallest
    /// values, which always [come by pages](crate::Builder::alone_above).
    Hybrid,
}
