//! Planes: how misses of small values are served.
//!
//! | member | on a miss | slots of small values name |
//! |---|---|---|
//! | [`page`]: what every heap has | the page comes, to the same far address | a place |
//! | [`object`] | the value comes, and moves to a page with others that came lately | a handle |
//! | hybrid (`object/paths.rs`) | either, decided for each page when it leaves | a handle |
//!
//! All use the same frames, frame words, scopes and evictor; those are in `heap`. Values that are too large for
//! [`LogClass`](farfield_core::heap::LogClass) come by pages on each plane. A plane makes and frees values, finds them (a
//! dereference), and has a say when a page leaves.

pub(crate) mod object;
mod page;

/// How misses of small values are served. Chosen with [`Builder::plane`](crate::Builder::plane).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Plane {
    /// The whole page comes. Best where what lies together is used together.
    #[default]
    Page,
    /// Only the value comes, if it is smaller than about a third of a page; values that are used at the same time come to lie
    /// together. Best for small values used at random. Costs eight bytes of near memory for each such value, near or
    /// far, and a little more time for each dereference. Entries of maps and short texts are such values, too.
    Object,
    /// The page if enough of it is used to be worth its near memory, else only the value (after Atlas). What is used together comes to lie
    /// together, value by value, and comes page by page from then on. Costs what [`Plane::Object`] does, except for the smallest values, which
    /// always [come by pages](crate::Builder::alone_above).
    Hybrid,
}
