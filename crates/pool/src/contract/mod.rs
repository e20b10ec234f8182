//! Contract of the pool: what a backend and a lane promise, and the types in which they speak.

pub(crate) mod backend;
pub(crate) mod buffer;
pub(crate) mod calls;
pub(crate) mod places;
pub(crate) mod protection;
pub(crate) mod scrub_stats;
