//! Backends made of other backends, without redundancy of their own.

pub(crate) mod fault;
pub(crate) mod stripe;
pub(crate) mod switch;
pub(crate) mod tier;
