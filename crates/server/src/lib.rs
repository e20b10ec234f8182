//! Farfield keeps: the memory server.
mod store;
