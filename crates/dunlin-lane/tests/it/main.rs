//! Identities, handshakes, records, control and data connections, between two ends on loopback.
//! `lane_allocations` replaces the process's allocator, so that test is a separate program.

mod control;
mod data;
mod guest;
mod handshake;
mod identity_lists;
mod identity_revoked;
mod openssl;
mod record;
