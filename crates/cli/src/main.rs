//! The farfield command.
fn main() {}
