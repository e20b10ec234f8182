//! HTTP of Farfield: an answering side with bounds, server-sent events, and a small client.
//!
//! Parsing and framing of HTTP/1.1 are those of the crate `ureq-proto`, which does no I/O. This
//! crate adds sockets, threads and bounds: one thread per connection, a deadline for everything
//! that a client can make a server wait for, and no buffer per reader of events.
//! `docs/design/web.md` says what a stranger at the other end can and cannot do.

// Numbers from clients can be anything: none is narrowed without a check.
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss))]
#![forbid(unsafe_code)]

mod api;
mod client;
mod connection;
mod credentials;
mod events;
mod guard;
mod reply;
mod scrape;
mod serving;
mod stream;
mod tls;

pub use api::{ApiAnswer, ApiClient, ApiLines};
pub use client::{FetchError, post};
pub use credentials::{shown_token, unauthorized};
pub use events::EventChannel;
pub use guard::{WebScheme, refuse_stranger};
pub use reply::{WebBody, WebRequest, WebResponse, bytes, events, text};
pub use scrape::{answer_scrapes, metrics};
pub use serving::{HttpLimits, serve, serve_tls};
pub use tls::{TlsFileError, TlsIdentity};
pub use ureq_proto::http::{Method, StatusCode};
