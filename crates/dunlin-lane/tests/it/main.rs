//! Identities, handshakes, records, control and data connections, between two ends on loopback.
//! The test `lane_allocations` is a separate program, because it replaces the process's allocator.

mod control;
mod data;
mod guest;
mod handshake;
mod identity_lists;
mod identity_revoked;
mod openssl;
mod record;
