//! The `dunlin` command.
#![forbid(unsafe_code)]
fn main() {}
