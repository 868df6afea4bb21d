//! Journal records of sessions, for tests.
#![allow(unreachable_pub)]

use dunlin::engine::journal::{Record, State};

/// The record of session `number` in its first attempt, in the state `state`.
pub fn record(number: u8, state: State) -> Record {
    Record {
        state,
        session: [number; 16],
        attempt: 1,
        epoch: 1,
        vm_uuid: [number; 16],
        vm_name: "web".into(),
        peer: "host-b.example:4444".into(),
        owner: String::new(),
        started_ms: u64::from(number),
        written_ms: 0,
    }
}
