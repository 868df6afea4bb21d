//! Fuzz target: the receiving half of a data lane.

use std::io::Write;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};
use dunlin_proto::fuzz::Choices;
use vm_memory::VolatileSlice;

use super::{
    Counters, DataReceiver, Link, OVERHEAD_BYTES, RECEIVE_BYTES, ReceiveError, Security, State,
};
use crate::internals::data::Keys;
use crate::internals::record::fuzz::halves;

/// Maximum number of bytes that the fuzz target writes before it reads. A socket's buffer holds
/// this many.
const ROOM_BYTES: usize = 64 << 10;

/// Reads records of any length, with any mixture of the receiver's calls. The sequence of records
/// ends with a close, is truncated, or is modified. The output must equal what was sealed, up to
/// the truncation or modification and not beyond it.
pub fn fuzz_data_lane(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let choice = choices.byte();
    let (mut seal, open) = halves(choice);
    let (mut near, far) = crate::fuzz::pair();
    let mut sent = Vec::new();
    let mut wire = Vec::new();
    for number in 0..=choices.below(12) {
        let content = match choices.byte() % 4 {
            0 => 4096 * choices.below(5) as usize,
            _ => choices.below(700) as usize + 1,
        };
        if content == 0 || wire.len() + content + 2 * OVERHEAD_BYTES > ROOM_BYTES {
            continue;
        }
        let mut record = vec![number as u8 + 1; content + OVERHEAD_BYTES];
        sent.extend_from_slice(&record[..content]);
        seal.seal(&mut record).expect("far below the record limit");
        wire.extend_from_slice(&record);
    }
    let close = seal.close_notify().expect("far below the record limit");
    wire.extend_from_slice(&close);
    let damage = choices.byte() % 3;
    let at = choices.below(wire.len() as u64) as usize;
    match damage {
        0 => {}
        1 => wire.truncate(at),
        _ => wire[at] ^= 1 << (choice % 8),
    }
    near.write_all(&wire)
        .expect("the socket's buffer is larger");
    near.shutdown(Shutdown::Write)
        .expect("the connection is open");

    let mut receiver = DataReceiver {
        link: Link {
            stream: Arc::new(far),
            cancelled: Arc::default(),
        },
        security: Security::Tls(Box::new(Keys { seal, open })),
        guard: None,
        buffer: AlignedBytes::zeroed(RECEIVE_BYTES, LINE_BYTES),
        sealed: 0..0,
        opened: 0..0,
        header_bytes: 0,
        stall_limit: Duration::from_secs(10),
        counters: Counters::default(),
        state: State::Open,
    };
    let mut taken = Vec::new();
    let ended = loop {
        let wanted = choices.below(6000) as usize + 1;
        let mut part = vec![0; wanted];
        let result = match choices.byte() % 4 {
            0 => receiver.read_exact(&mut part),
            1 => {
                let mut at = 0;
                receiver.payload(wanted as u64, |piece| {
                    part[at..][..piece.len()].copy_from_slice(piece);
                    at += piece.len();
                })
            }
            2 => {
                let length = choices.below(3000) as usize + 1;
                let pieces = part.chunks_mut(length).map(VolatileSlice::from);
                receiver.payload_into(pieces)
            }
            _ => match receiver.next(&mut part[..1], None) {
                Ok(true) => {
                    part.truncate(1);
                    Ok(())
                }
                Ok(false) => break None,
                Err(error) => Err(error),
            },
        };
        if let Err(error) = result {
            break Some(error);
        }
        taken.extend_from_slice(&part);
    };
    assert!(
        sent.starts_with(&taken),
        "received bytes that were not sent"
    );
    match ended {
        // The close is sealed like data, so a modified record cannot appear to be a close.
        None => assert!(damage == 0 && taken == sent),
        Some(ReceiveError::ClosedInside) => assert_eq!(damage, 0),
        Some(ReceiveError::Truncated | ReceiveError::Record(_)) => assert_ne!(damage, 0),
        Some(error) => panic!("{error}"),
    }
    let again = receiver.read_exact(&mut [0]);
    assert!(again.is_err(), "a lane that has ended returns data");
}
