//! The memory server: stores pages for clients.
//!
//! A client creates regions of pages. It reads and writes them over TCP, or maps them when it runs
//! on the same machine. When the client is gone, its memory is given back. `docs/design/server.md`
//! draws the storage and lists what happens when something fails.

// Numbers from clients can be anything: none is narrowed without a check.
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss))]

mod address;
mod config;
mod connection;
mod connection_table;
mod connection_threads;
mod counters;
#[cfg_attr(not(feature = "fabric"), path = "fabric_absent.rs")]
mod fabric;
mod metrics;
mod penalties;
mod random;
mod server;
mod sessions;
mod spin;
mod store;
mod tenant_table;
mod tenants;
mod work_semaphore;

pub use config::{BadUrl, Config, ListenUrl, parse_size};
pub use farfield_core::wire::Stat;
pub use farfield_tls::ServerFiles;
pub use server::{Server, StartError};
pub use tenant_table::{NoTokens, TenantChanges};
pub use tenants::{TenantConfig, Tenants, TokenFileError, same_bytes};
