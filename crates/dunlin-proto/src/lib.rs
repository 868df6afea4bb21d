//! The wire format and the decisions of a migration, without I/O, a clock or threads.
#![forbid(unsafe_code)]
