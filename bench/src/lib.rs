//! The bench harness.
