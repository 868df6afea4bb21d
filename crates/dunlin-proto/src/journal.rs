//! The journal record: what one side remembers of a session after its process
//! or host has died. [`crate::switchover`] decides when each record is written.
//!
//! A journal file belongs to one session and role and is allocated when the session starts. It has
//! two *slots* that are written alternately; each holds a record with an increasing generation. A
//! torn write leaves the other slot intact. A slot with a wrong checksum is treated as torn and
//! ignored; if both slots are torn, the file is unreadable. The reader takes the valid slot with
//! the higher generation. The slots lie [`SLOT_BYTES`] apart, because a disk may rewrite 4096 bytes
//! to change 512 of them. docs/journal/format.md lists every byte.
//!
//! After a failed write, the next write goes to the same slot: the other slot
//! holds the only record known to be on disk.
//!
//! The *peer block* ([`peer`]) follows the slots: it says which peer may ask
//! about the session and settle it.

pub mod peer;

use std::fmt;

use thiserror::Error;

use crate::limits::{MAX_ENDPOINT_BYTES, MAX_NAME_BYTES, MAX_SOCKET_PATH_BYTES};
use crate::negotiate::SessionId;
use crate::wire::codec::{Codec, NOT_ZERO};
use crate::wire::numbered::numbered;
use crate::wire::{DecodeError, EncodeError, Reader, Writer, bad_value};

/// Bytes of a record. All records have this size. The longest name, peer and path
/// fit, and one write call writes the whole record.
pub const RECORD_BYTES: usize = 1024;

/// Distance between the starts of the two slots. The bytes after a slot's record are zero.
pub const SLOT_BYTES: usize = 4096;

/// Bytes of the two slots. Earlier releases, which had no peer block, wrote files of this length.
pub const SLOTS_BYTES: usize = 2 * SLOT_BYTES;

/// Bytes of a journal file: two slots and the peer block.
pub const JOURNAL_BYTES: usize = SLOTS_BYTES + SLOT_BYTES;

const MAGIC: [u8; 8] = *b"DUNLJRNL";
const VERSION: u16 = 1;
const CHECKSUM_AT: usize = RECORD_BYTES - 8;
/// Bytes of all fields except the three texts.
const FIXED_BYTES: usize = 8 + 2 + 1 + 1 + 4 + 8 + 16 + 4 + 4 + 16 + 8 + 8;

const _: () = assert!(
    FIXED_BYTES + 2 + MAX_NAME_BYTES + 2 + MAX_ENDPOINT_BYTES + 2 + MAX_SOCKET_PATH_BYTES
        <= CHECKSUM_AT
);
const _: () = assert!(RECORD_BYTES <= SLOT_BYTES);

numbered! {
    /// What the source remembers of an attempt.
    SourceRecord: u8 {
        /// Pre-copy. The VM is at the source and has not been paused.
        Migrating = 1, "migrating";
        /// *commit* may have been sent. Therefore the VM must not be resumed at the source before
        /// the destination has answered *aborted*, or an operator has decided.
        Committing = 2, "committing";
        /// The migration ended early; the VM is here.
        Kept = 3, "kept";
        /// The destination runs the VM; the copy here may be destroyed.
        Released = 4, "released";
        /// The destination reported that the VM ran there and died. The copy at the source is
        /// paused, and an operator decides.
        RanThenDied = 5, "ran, then died";
        /// The operator has decided that the VM continues here.
        RunHere = 6, "run here";
        /// The operator has given up the copy here.
        GivenUp = 7, "given up";
    }
}

numbered! {
    /// What the destination remembers of an attempt.
    DestinationRecord: u8 {
        /// The destination has recorded the attempt, but neither *running* nor *aborted*.
        Prepared = 1, "prepared";
        /// The VM runs here, or ran until its process died.
        Running = 2, "running";
        /// This attempt's VM will never run here.
        Aborted = 3, "aborted";
        /// The VM ran here and a later migration moved it to another host. The copy that this
        /// attempt's source may still have is outdated.
        MovedOn = 4, "moved on";
    }
}

/// Which side wrote a record, and that side's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Written by the source.
    Source(SourceRecord),
    /// Written by the destination.
    Destination(DestinationRecord),
}

impl fmt::Display for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(state) => write!(formatter, "source, {state}"),
            Self::Destination(state) => write!(formatter, "destination, {state}"),
        }
    }
}

/// What one side remembers of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The side that wrote the record, and the state of that side.
    pub state: State,
    /// The session.
    pub session: SessionId,
    /// The attempt, counted from 1.
    pub attempt: u32,
    /// The epoch of the newest control lane. A restarted source inquires with a higher epoch.
    pub epoch: u32,
    /// The VM's UUID.
    pub vm_uuid: [u8; 16],
    /// The VM's name, at most [`MAX_NAME_BYTES`].
    pub vm_name: String,
    /// The other side as text, at most [`MAX_ENDPOINT_BYTES`]. At the source, this is the address
    /// for inquiries (`host:port`).
    pub peer: String,
    /// The path of the control socket of the process that holds the VM; empty if
    /// the process has none. While that process lives, it alone answers inquiries.
    /// Another process that receives an inquiry must not answer it. At most
    /// [`MAX_SOCKET_PATH_BYTES`].
    pub owner: String,
    /// When the attempt started, in milliseconds since 1970 by this host's
    /// clock; only for display.
    pub started_ms: u64,
    /// When this record was written, in milliseconds since 1970.
    pub written_ms: u64,
}

/// Why a slot has no usable record.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The slot has never been written.
    #[error("the slot is empty")]
    Empty,
    /// The record's checksum is wrong, in most cases because a write was interrupted.
    #[error("checksum {found:#018x} does not match the content ({computed:#018x})")]
    Torn {
        /// The checksum in the slot.
        found: u64,
        /// The checksum that the reader computed from the slot's other bytes.
        computed: u64,
    },
    /// The checksum is right, but the slot does not start with Dunlin's magic.
    #[error("not a Dunlin journal record")]
    Foreign,
    /// Written by a newer release.
    #[error(
        "record version {version} is not supported (this release reads {VERSION}); use the release that wrote it"
    )]
    Newer {
        /// The record's version.
        version: u16,
    },
    /// The checksum is right, but a field is invalid.
    #[error("malformed record: {0}")]
    Malformed(#[from] DecodeError),
}

/// A journal file from which nothing may be concluded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unreadable {
    /// A slot has a valid checksum, but this release cannot read it. The record in the other slot
    /// is not used, because it may be older.
    #[error("slot {slot}: {why}")]
    Slot {
        /// 0 or 1.
        slot: usize,
        /// The slot's error.
        why: SlotError,
    },
    /// Both slots are damaged. An interrupted write damages only one slot, so something
    /// else damaged the file.
    #[error(
        "both slots are damaged; check for another program that writes to the file, or a failing disk"
    )]
    BothTorn,
    /// The slots contradict each other.
    #[error(
        "the two slots of the journal file belong to different sessions, or have the same generation; \
         check for another program that writes to the file, or a failing disk"
    )]
    Mixed,
}

/// The newest record of a journal file, and the slot for the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest {
    /// The newest valid record; `None` if no record was ever written completely.
    pub record: Option<Record>,
    /// The generation of the newest record; 0 if there is none.
    pub generation: u64,
    /// The slot that the next write goes to.
    pub next_slot: usize,
    /// Whether one slot is torn.
    pub torn: bool,
}

/// Encodes a record. `generation` counts the records of a file from 1.
///
/// # Errors
/// A text exceeds its limit.
pub fn encode(record: &Record, generation: u64) -> Result<[u8; RECORD_BYTES], EncodeError> {
    record.encode(generation)
}

/// Reads one slot; returns the record and its generation.
///
/// # Errors
/// [`SlotError`].
pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Result<(Record, u64), SlotError> {
    Record::decode(bytes)
}

impl Record {
    fn encode(&self, generation: u64) -> Result<[u8; RECORD_BYTES], EncodeError> {
        sealed(|writer| {
            writer.bytes(&MAGIC);
            writer.u16(VERSION);
            let (role, state) = match self.state {
                State::Source(state) => (1, state.to_wire()),
                State::Destination(state) => (2, state.to_wire()),
            };
            writer.u8(role);
            writer.u8(state);
            writer.u32(0);
            writer.u64(generation);
            writer.bytes(&self.session);
            writer.u32(self.attempt);
            writer.u32(self.epoch);
            writer.bytes(&self.vm_uuid);
            writer.u64(self.started_ms);
            writer.u64(self.written_ms);
            writer.text("VM name", &self.vm_name, MAX_NAME_BYTES)?;
            writer.text("peer", &self.peer, MAX_ENDPOINT_BYTES)?;
            writer.text("owner", &self.owner, MAX_SOCKET_PATH_BYTES)
        })
    }

    fn decode(bytes: &[u8; RECORD_BYTES]) -> Result<(Self, u64), SlotError> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Err(SlotError::Empty);
        }
        // Every version has magic, version and checksum at the same positions. So the checksum of a
        // newer release's record is right here, and the record is not treated as torn.
        let (body, tail) = bytes.split_at(CHECKSUM_AT);
        let found = Reader::new(tail).u64("checksum")?;
        let computed = checksum(body);
        if found != computed {
            return Err(SlotError::Torn { found, computed });
        }
        let mut reader = Reader::new(body);
        if reader.array::<8>("magic")? != MAGIC {
            return Err(SlotError::Foreign);
        }
        let version = reader.u16("version")?;
        if version != VERSION {
            return Err(SlotError::Newer { version });
        }
        Ok(Self::read(&mut reader)?)
    }

    fn read(reader: &mut Reader<'_>) -> Result<(Self, u64), DecodeError> {
        let role_at = reader.offset();
        let role = reader.u8("role")?;
        let number = reader.u8("state")?;
        let unknown = || bad_value("state", u64::from(number), role_at + 1);
        let state = match role {
            1 => State::Source(SourceRecord::from_wire(number).ok_or_else(unknown)?),
            2 => State::Destination(DestinationRecord::from_wire(number).ok_or_else(unknown)?),
            role => return Err(bad_value("role", u64::from(role), role_at)),
        };
        reader.reserved::<4>("reserved")?;
        let generation = NOT_ZERO.decode("generation", reader)?;
        let record = Self {
            state,
            session: reader.array("session")?,
            attempt: NOT_ZERO.decode("attempt", reader)?,
            epoch: NOT_ZERO.decode("epoch", reader)?,
            vm_uuid: reader.array("VM UUID")?,
            started_ms: reader.u64("start")?,
            written_ms: reader.u64("time of writing")?,
            vm_name: reader.text("VM name", MAX_NAME_BYTES)?.into(),
            peer: reader.text("peer", MAX_ENDPOINT_BYTES)?.into(),
            owner: reader.text("owner", MAX_SOCKET_PATH_BYTES)?.into(),
        };
        let rest_at = reader.offset();
        let rest = reader.bytes("padding", reader.left())?;
        match rest.iter().find(|byte| **byte != 0) {
            Some(byte) => Err(bad_value("padding", u64::from(*byte), rest_at)),
            None => Ok((record, generation)),
        }
    }
}

/// Finds the newest valid record of a file.
///
/// # Errors
/// [`Unreadable`] if nothing may be concluded from the file. In particular, a slot that a newer
/// release wrote is never skipped in favour of the other slot.
pub fn newest(slots: &[[u8; RECORD_BYTES]; 2]) -> Result<Newest, Unreadable> {
    let mut found: [Option<(Record, u64)>; 2] = [None, None];
    let mut torn = 0;
    for (slot, bytes) in slots.iter().enumerate() {
        match Record::decode(bytes) {
            Ok(record) => found[slot] = Some(record),
            Err(SlotError::Empty) => {}
            Err(SlotError::Torn { .. }) => torn += 1,
            Err(why) => return Err(Unreadable::Slot { slot, why }),
        }
    }
    let torn_once = torn == 1;
    let (slot, (record, generation)) = match found {
        [None, None] if torn == 2 => return Err(Unreadable::BothTorn),
        [None, None] => {
            return Ok(Newest {
                record: None,
                generation: 0,
                next_slot: 0,
                torn: torn_once,
            });
        }
        [Some((one, first)), Some((other, second))]
            if first == second || one.session != other.session =>
        {
            return Err(Unreadable::Mixed);
        }
        [Some(first), Some(second)] if second.1 > first.1 => (1, second),
        [Some(first), _] => (0, first),
        [None, Some(second)] => (1, second),
    };
    Ok(Newest {
        record: Some(record),
        generation,
        next_slot: 1 - slot,
        torn: torn_once,
    })
}

/// Returns a block with the fields that `write` appends, zeros, and a checksum at its end.
fn sealed(
    write: impl FnOnce(&mut Writer<'_>) -> Result<(), EncodeError>,
) -> Result<[u8; RECORD_BYTES], EncodeError> {
    let mut bytes = Vec::with_capacity(RECORD_BYTES);
    Writer::append(&mut bytes, write)?;
    let mut block = [0; RECORD_BYTES];
    block[..bytes.len()].copy_from_slice(&bytes);
    let checksum = checksum(&block[..CHECKSUM_AT]);
    block[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
    Ok(block)
}

/// CRC-64/XZ (ECMA-182, reflected, as in the .xz file format, section 1.4).
/// It detects torn writes, not tampering. It is computed bit by bit, because a
/// session writes few records.
fn checksum(bytes: &[u8]) -> u64 {
    const POLYNOMIAL: u64 = 0xc96c_5795_d787_0f42;
    !bytes.iter().fold(u64::MAX, |crc, byte| {
        (0..8).fold(crc ^ u64::from(*byte), |crc, _| {
            (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn record(state: State) -> Record {
        Record {
            state,
            session: [7; 16],
            attempt: 1,
            epoch: 1,
            vm_uuid: [9; 16],
            vm_name: "web".into(),
            peer: "host-b.example:4444".into(),
            owner: String::new(),
            started_ms: 1_000,
            written_ms: 2_000,
        }
    }

    const PREPARED: State = State::Destination(DestinationRecord::Prepared);
    const RUNNING: State = State::Destination(DestinationRecord::Running);
    const EMPTY: [u8; RECORD_BYTES] = [0; RECORD_BYTES];

    #[test]
    fn the_checksum_is_crc_64_xz() {
        assert_eq!(checksum(b"123456789"), 0x995d_c9bb_df19_39fa);
    }

    #[test]
    fn every_state_survives_a_round_trip() {
        let source = SourceRecord::ALL.iter().copied().map(State::Source);
        let destination = DestinationRecord::ALL
            .iter()
            .copied()
            .map(State::Destination);
        for state in source.chain(destination) {
            let bytes = record(state).encode(5).unwrap();
            assert_eq!(Record::decode(&bytes), Ok((record(state), 5)));
        }
    }

    #[test]
    fn the_longest_texts_fit_and_longer_ones_are_rejected() {
        let mut long = record(RUNNING);
        long.vm_name = "n".repeat(MAX_NAME_BYTES);
        long.peer = "p".repeat(MAX_ENDPOINT_BYTES);
        long.owner = "o".repeat(MAX_SOCKET_PATH_BYTES);
        assert_eq!(
            Record::decode(&long.encode(1).unwrap()),
            Ok((long.clone(), 1))
        );
        long.owner.push('o');
        assert!(long.encode(1).is_err());
    }

    #[test]
    fn the_higher_generation_wins_and_the_other_slot_is_next() {
        let old = record(PREPARED).encode(1).unwrap();
        let new = record(RUNNING).encode(2).unwrap();
        for (slots, next_slot) in [([old, new], 0), ([new, old], 1)] {
            let newest = newest(&slots).unwrap();
            assert_eq!(newest.record, Some(record(RUNNING)));
            assert_eq!((newest.generation, newest.next_slot), (2, next_slot));
            assert!(!newest.torn);
        }
    }

    /// A write may start at either end of the slot and stop after any byte. The file then
    /// holds the previous record or the new one.
    #[test]
    fn i1_a_torn_write_leaves_the_previous_record() {
        let old = record(PREPARED).encode(3).unwrap();
        let stale = record(PREPARED).encode(2).unwrap();
        let new = record(RUNNING).encode(4).unwrap();
        for before in [stale, EMPTY] {
            for length in 0..=RECORD_BYTES {
                for front in [true, false] {
                    let mut slot = before;
                    if front {
                        slot[..length].copy_from_slice(&new[..length]);
                    } else {
                        let kept = RECORD_BYTES - length;
                        slot[kept..].copy_from_slice(&new[kept..]);
                    }
                    let whole = slot == new;
                    let newest = newest(&[old, slot]).unwrap();
                    let expected = if whole { RUNNING } else { PREPARED };
                    assert_eq!(newest.record, Some(record(expected)), "{length}");
                    assert_eq!(newest.next_slot, usize::from(!whole), "{length}");
                }
            }
        }
    }

    #[test]
    fn a_torn_first_write_leaves_no_record() {
        let mut torn = record(PREPARED).encode(1).unwrap();
        torn[100..].fill(0);
        let newest = newest(&[torn, EMPTY]).unwrap();
        assert_eq!(newest.record, None);
        assert_eq!((newest.generation, newest.next_slot), (0, 0));
        assert!(newest.torn);
    }

    #[test]
    fn damage_that_no_crash_can_cause_is_rejected() {
        let whole = record(RUNNING).encode(1).unwrap();
        let mut torn = whole;
        torn[50] ^= 1;
        assert_eq!(newest(&[torn, torn]), Err(Unreadable::BothTorn));
        assert_eq!(newest(&[whole, whole]), Err(Unreadable::Mixed));
        let mut other = record(RUNNING);
        other.session = [8; 16];
        let other = other.encode(2).unwrap();
        assert_eq!(newest(&[whole, other]), Err(Unreadable::Mixed));
    }

    /// Returns the bytes with a recomputed checksum.
    fn sealed(mut bytes: [u8; RECORD_BYTES]) -> [u8; RECORD_BYTES] {
        let checksum = checksum(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// One slot has a *running* of a newer release, the other an older *prepared*. If the
    /// reader used *prepared*, the destination would answer *aborted*.
    #[test]
    fn i1_a_valid_slot_that_is_not_understood_is_never_skipped() {
        let old = record(PREPARED).encode(1).unwrap();
        let new = record(RUNNING).encode(2).unwrap();
        // Wrong bytes in magic, version, role, state, reserved field and padding.
        for (position, value) in [(0, 0), (8, 2), (10, 3), (11, 99), (12, 1), (1000, 1)] {
            let mut changed = new;
            changed[position] = value;
            let slots = [old, sealed(changed)];
            assert!(
                matches!(newest(&slots), Err(Unreadable::Slot { slot: 1, .. })),
                "byte {position}"
            );
        }
        // Generation, attempt and epoch must not be zero.
        for zero in [16..24, 40..44, 44..48] {
            let mut changed = new;
            changed[zero.clone()].fill(0);
            let slots = [old, sealed(changed)];
            assert!(newest(&slots).is_err(), "bytes {zero:?}");
        }
    }

    #[test]
    fn i7_every_changed_byte_is_detected() {
        let bytes = record(RUNNING).encode(1).unwrap();
        for position in 0..RECORD_BYTES {
            let mut changed = bytes;
            changed[position] ^= 0x10;
            assert!(matches!(
                Record::decode(&changed),
                Err(SlotError::Torn { .. })
            ));
            // With a recomputed checksum the record is rejected, or decodes and
            // encodes to the same bytes.
            let changed = sealed(changed);
            if let Ok((record, generation)) = Record::decode(&changed) {
                assert_eq!(record.encode(generation).unwrap(), changed);
            }
        }
    }
}
