//! The steps of a switchover at which a test can make a process wait, in order.

/// The steps at the source.
pub const SOURCE: &[&str] = &[
    "committing-unwritten",
    "committing-unsynced",
    "committing-recorded",
    "pause",
    "paused",
    "deactivate",
    "save",
    "hold",
    "commit-unsent",
    "commit-sent",
    "released-unwritten",
    "released-unsynced",
    "released-recorded",
    "destroy",
    "destroyed",
];

/// The steps at the destination.
pub const DESTINATION: &[&str] = &[
    "load",
    "ready",
    "commit-come",
    "acquire",
    "running-unwritten",
    "running-unsynced",
    "running-recorded",
    "resume",
    "resumed",
    "running-unsent",
    "running-sent",
];
