//! Who is a node, and who says so.

pub(crate) mod solo;
