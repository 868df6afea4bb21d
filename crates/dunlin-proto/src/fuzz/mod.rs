//! Fuzz entries: one for each decoder, and one for each state machine, driven
//! by operations that the input bytes choose.
//!
//! Each takes arbitrary bytes and panics if a decoder returns an invalid value or a state machine
//! deviates from its model. Unit tests run them over seeds and mutations of the seeds; `make fuzz`
//! runs the same functions under libFuzzer. Compiled only for tests and with the feature `fuzzing`.

mod client_hello;
mod decoders;
mod ipsec;
mod lanes;
mod operations;
mod pair;
mod schedule;
mod stripe;
mod switchover;

pub use client_hello::fuzz_client_hello;
pub use decoders::{
    fuzz_control_message, fuzz_data_frame, fuzz_extension_fields, fuzz_opening, fuzz_region_table,
};
pub use ipsec::{fuzz_ipsec_message, fuzz_ipsec_session};
pub use lanes::{fuzz_receiving, fuzz_sending};
pub use operations::{fuzz_bitmap, fuzz_marks, fuzz_pace, fuzz_precopy, fuzz_regions};
pub use pair::fuzz_lanes;
pub use schedule::{fuzz_received, fuzz_schedule};
pub use stripe::{fuzz_trunk, fuzz_tunnel_frame, fuzz_tunnel_message};
pub use switchover::{fuzz_destination_switchover, fuzz_source_switchover};

pub use crate::journal::peer::fuzz::fuzz_peer_block;

/// A fuzz entry with its name. Its seed directory and its binary have the same name.
pub type Target = (&'static str, fn(&[u8]));

/// Every entry of this crate.
pub const TARGETS: &[Target] = &[
    ("opening", fuzz_opening),
    ("control_message", fuzz_control_message),
    ("data_frame", fuzz_data_frame),
    ("region_table", fuzz_region_table),
    ("extension_fields", fuzz_extension_fields),
    ("client_hello", fuzz_client_hello),
    ("peer_block", fuzz_peer_block),
    ("bitmap", fuzz_bitmap),
    ("marks", fuzz_marks),
    ("pace", fuzz_pace),
    ("precopy", fuzz_precopy),
    ("regions", fuzz_regions),
    ("tunnel_message", fuzz_tunnel_message),
    ("tunnel_frame", fuzz_tunnel_frame),
    ("trunk", fuzz_trunk),
    ("ipsec_message", fuzz_ipsec_message),
    ("ipsec_session", fuzz_ipsec_session),
    ("schedule", fuzz_schedule),
    ("received", fuzz_received),
    ("sending", fuzz_sending),
    ("receiving", fuzz_receiving),
    ("lanes", fuzz_lanes),
    ("source_switchover", fuzz_source_switchover),
    ("destination_switchover", fuzz_destination_switchover),
];

/// Calls `message` with the bytes as they are, and with the body length corrected.
fn as_is_and_with_its_length<T>(bytes: &[u8], header_bytes: usize, message: fn(&[u8]) -> T) {
    message(bytes);
    let Some(body_bytes) = bytes.len().checked_sub(header_bytes) else {
        return;
    };
    if let Ok(length) = u32::try_from(body_bytes) {
        let mut honest = bytes.to_vec();
        honest[..4].copy_from_slice(&length.to_le_bytes());
        message(&honest);
    }
}

/// Bytes that choose operations. After their end all choices are zero, so every
/// input is valid.
#[derive(Clone, Debug)]
pub struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    /// Choices taken from `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether bytes are left.
    #[must_use]
    pub fn more(&self) -> bool {
        !self.0.is_empty()
    }

    /// Any byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// A number from 0 to `limit - 1`; 0 if `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        u64::from(u16::from_le_bytes(self.array()))
            .checked_rem(limit)
            .unwrap_or(0)
    }

    /// Returns any number. Values near the limits of `u64`, pages and words are much more
    /// frequent than in a uniform distribution.
    pub fn number(&mut self) -> u64 {
        let near = u64::from(self.byte());
        match self.byte() % 8 {
            0 => u64::MAX - near,
            1 => near * 4096,
            2 => (1 << 52) - near,
            3 => u64::from_le_bytes(self.array()),
            4 => u64::from(u32::MAX) + near,
            5 => u64::from(u32::from_le_bytes(self.array())),
            _ => near,
        }
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.0.len().min(N);
        let (head, rest) = self.0.split_at(taken);
        array[..taken].copy_from_slice(head);
        self.0 = rest;
        array
    }
}

#[cfg(test)]
#[path = "../../../../fuzz/driver.rs"]
mod driver;

#[cfg(test)]
mod tests {
    use super::driver::{Seed, check, vectors};
    use super::*;

    /// Returns the seeds of a target: for decoders, the test vectors of docs/wire/ or constructed
    /// inputs; for entries that perform operations, random bytes.
    fn seeds(target: &str) -> Vec<Seed> {
        match target {
            "opening" => vectors("opening/"),
            "control_message" => vectors("control/"),
            "data_frame" => vectors("frame/"),
            "region_table" => driver::within(&vectors("control/describe"), decoders::table_at),
            "tunnel_message" => vectors("tunnel-control/"),
            "tunnel_frame" => vectors("tunnel-frame/"),
            "ipsec_message" => vectors("ipsec/"),
            "extension_fields" => decoders::extension_seeds(),
            "client_hello" => client_hello::seeds(),
            "peer_block" => crate::journal::peer::fuzz::seeds(),
            _ => driver::noise(),
        }
    }

    #[test]
    fn i7_every_decoder_and_model_passes_seeds_and_mutations() {
        #[cfg(feature = "mistakes")]
        let _none = crate::mistake::plant(None);
        check(TARGETS, seeds);
    }

    /// With random bytes as input, the entries that perform operations find planted mistakes in the
    /// code under test. The tests of `tests/model` find the mistakes that appear only with both
    /// roles of a switchover.
    #[test]
    #[cfg(feature = "mistakes")]
    fn i4_planted_mistakes_are_found() {
        use std::panic::catch_unwind;

        use crate::mistake::{Mistake, plant};

        const INPUTS: u64 = 20_000;
        let found = |mistake, run: fn(&[u8])| {
            let _planted = plant(Some(mistake));
            (1..=INPUTS).find(|&seed| {
                let mut random = driver::Random(seed);
                let length = random.next() % 2048;
                let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
                catch_unwind(|| run(&bytes)).is_err()
            })
        };
        let expected: [(Mistake, Target); 15] = [
            (Mistake::NoRedirty, ("schedule", fuzz_schedule)),
            (Mistake::CutBeforeIteration, ("schedule", fuzz_schedule)),
            (Mistake::NoRedirty, ("lanes", fuzz_lanes)),
            (Mistake::CutBeforeIteration, ("lanes", fuzz_lanes)),
            (Mistake::NoFence, ("lanes", fuzz_lanes)),
            (Mistake::NoFence, ("sending", fuzz_sending)),
            (Mistake::MarkPassedEarly, ("lanes", fuzz_lanes)),
            (Mistake::MarkPassedEarly, ("marks", fuzz_marks)),
            (
                Mistake::WrongChunkAcknowledged,
                ("receiving", fuzz_receiving),
            ),
            (Mistake::PauseBeforeRecord, SOURCE),
            (Mistake::ResumeWithoutAsking, SOURCE),
            (Mistake::ReleaseBeforeRecord, SOURCE),
            (Mistake::RunBeforeRecord, DESTINATION),
            (Mistake::TellBeforeRecord, DESTINATION),
            (Mistake::TellBeforeLettingGo, DESTINATION),
        ];
        let mut missed = Vec::new();
        for (mistake, (name, run)) in expected {
            match found(mistake, run) {
                Some(input) => println!("{mistake:?}: found by {name} with input {input}"),
                None => missed.push((mistake, name)),
            }
        }
        assert!(missed.is_empty(), "{missed:?} were not found");
    }

    #[cfg(feature = "mistakes")]
    const SOURCE: Target = ("source_switchover", fuzz_source_switchover);
    #[cfg(feature = "mistakes")]
    const DESTINATION: Target = ("destination_switchover", fuzz_destination_switchover);
}
