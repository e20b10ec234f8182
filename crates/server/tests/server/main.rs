//! The memory server as its clients see it. Each module says what it guards against.

mod atomics;
mod calls;
mod clones;
mod common;
mod conformance;
mod death;
mod garbage;
mod hostile;
mod locks;
mod mirrors;
mod rejoin;
mod service;
mod tls;
