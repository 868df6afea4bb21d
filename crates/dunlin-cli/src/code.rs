//! The exit codes of `dunlin`; docs/cli.md says what they mean for each command.

/// Moved, or done.
pub(crate) const DONE: i32 = 0;
/// Failed, with the VM at the source.
pub(crate) const FAILED: i32 = 1;
/// Asked for something impossible.
pub(crate) const USAGE: i32 = 2;
/// In doubt, or at the destination and not running.
pub(crate) const IN_DOUBT: i32 = 3;
/// Cancelled, with the VM at the source.
pub(crate) const CANCELLED: i32 = 4;
/// Added to a signal's number, as shells do, by a process that was told a
/// second time to end and did so without waiting.
pub(crate) const SIGNAL: i32 = 128;
