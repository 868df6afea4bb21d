//! The exit codes of `dunlin`; docs/reference/exit-codes.md lists them for each command.

/// Success.
pub(crate) const DONE: i32 = 0;
/// Failed; the VM is at the source.
pub(crate) const FAILED: i32 = 1;
/// Usage error.
pub(crate) const USAGE: i32 = 2;
/// The VM is in doubt, or at the destination and not running.
pub(crate) const IN_DOUBT: i32 = 3;
/// Cancelled; the VM is at the source.
pub(crate) const CANCELLED: i32 = 4;
/// A second signal ends a process immediately. The exit code is this number plus the signal's
/// number, as in shells.
pub(crate) const SIGNAL: i32 = 128;
