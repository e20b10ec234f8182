//! Memory server.
