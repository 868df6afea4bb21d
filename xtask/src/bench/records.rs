//! The encryption of the tunnel's floor: each byte is sealed once and opened once, without a copy.
//!
//! One end reads bytes into a buffer, seals them from there into the records of another buffer, and
//! writes the records. The other end reads records, opens them into another buffer and writes their
//! content. Each buffer begins at the address that the kernel copies to and from fastest. There is
//! no handshake, and all connections use the same key, so the encryption protects nothing.

use std::io::{Read, Write};

use anyhow::{Result, bail, ensure};
use dunlin_lane::fastest;
use dunlin_lane::provider::{CipherSuite, Provider};
use dunlin_lane::record::{
    CONTENT_BYTES, OVERHEAD_BYTES, OpenHalf, Opened, RECORD_BYTES, SealHalf,
};
use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};

use super::ends::Stream;

/// Bytes that a forwarder moves in one piece, with or without records.
pub(super) const PIECE_BYTES: usize = 512 << 10;
/// The length of the records of one piece.
const RECORDS_BYTES: usize = PIECE_BYTES / CONTENT_BYTES * RECORD_BYTES;
const SUITE: CipherSuite = CipherSuite::Aes256Gcm;
const KEY: [u8; 32] = [1; 32];
const IV: [u8; 12] = [2; 12];

/// The library that Dunlin uses on this processor. The first call measures for some milliseconds.
pub(super) fn provider() -> Provider {
    fastest::auto().provider
}

/// Reads bytes until the end of the stream, and writes them in records, each as full as the read
/// allows.
pub(super) fn seal(mut from: &Stream, mut to: &Stream) -> Result<()> {
    let mut half = SealHalf::new(provider(), SUITE, &KEY, IV, 0)?;
    let mut content = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
    let mut records = AlignedBytes::zeroed(RECORDS_BYTES, LINE_BYTES);
    loop {
        let count = from.read(&mut content)?;
        if count == 0 {
            return Ok(to.shutdown()?);
        }
        let mut sealed = 0;
        for part in content[..count].chunks(CONTENT_BYTES) {
            let record = sealed..sealed + part.len() + OVERHEAD_BYTES;
            sealed = record.end;
            half.seal_from(part, &mut records[record])?;
        }
        to.write_all(&records[..sealed])?;
    }
}

/// Reads records until the end of the stream, and writes their content.
pub(super) fn open(mut from: &Stream, mut to: &Stream) -> Result<()> {
    let mut half = OpenHalf::new(provider(), SUITE, &KEY, IV, 0)?;
    let mut records = AlignedBytes::zeroed(RECORDS_BYTES, LINE_BYTES);
    let mut content = AlignedBytes::zeroed(RECORDS_BYTES, LINE_BYTES);
    // The records that have been received, but not opened.
    let (mut start, mut filled) = (0, 0);
    loop {
        let count = from.read(&mut records[filled..])?;
        if count == 0 {
            ensure!(start == filled, "the stream ends inside a record");
            return Ok(to.shutdown()?);
        }
        filled += count;
        let mut opened = 0;
        let mut rest = &mut records[start..filled];
        while let Some(&header) = rest.first_chunk() {
            let bytes = OpenHalf::record_bytes(header)?;
            let Some((record, behind)) = rest.split_at_mut_checked(bytes) else {
                break;
            };
            let inner = bytes - OVERHEAD_BYTES + 1;
            let Opened::Data(length) = half.open_into(record, &mut content[opened..][..inner])?
            else {
                bail!("a record holds no data");
            };
            opened += length;
            start += bytes;
            rest = behind;
        }
        to.write_all(&content[..opened])?;
        // Move the partial record so that the next read begins at a multiple of a cache line.
        let partial = start..filled;
        start = partial.len().next_multiple_of(LINE_BYTES) - partial.len();
        filled = start + partial.len();
        records.copy_within(partial, start);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn pair() -> (Stream, Stream) {
        let (one, other) = UnixStream::pair().unwrap();
        (Stream::Unix(one), Stream::Unix(other))
    }

    #[test]
    fn records_carry_every_byte_and_the_end() {
        // The length is not a multiple of a record's length, and the bytes need several buffers.
        let sent: Vec<u8> = (0..PIECE_BYTES * 3 + 1000).map(|at| at as u8).collect();
        let (sender, near) = pair();
        let (middle, other_middle) = pair();
        let (far, reader) = pair();
        let received = thread::scope(|scope| {
            scope.spawn(|| seal(&near, &middle).unwrap());
            scope.spawn(|| open(&other_middle, &far).unwrap());
            scope.spawn(|| {
                (&sender).write_all(&sent).unwrap();
                sender.shutdown().unwrap();
            });
            let mut received = Vec::new();
            (&reader).read_to_end(&mut received).unwrap();
            received
        });
        assert!(received == sent);
    }

    #[test]
    fn what_crosses_the_middle_is_sealed() {
        let (sender, near) = pair();
        let (middle, reader) = pair();
        (&sender).write_all(&[7; 100]).unwrap();
        sender.shutdown().unwrap();
        seal(&near, &middle).unwrap();
        let mut sealed = Vec::new();
        (&reader).read_to_end(&mut sealed).unwrap();
        assert_eq!(sealed.len(), 100 + OVERHEAD_BYTES);
        assert!(!sealed.windows(8).any(|part| part == [7; 8]));

        let opened = |bytes: &[u8]| {
            let (middle, other_middle) = pair();
            let (far, _reader) = pair();
            (&middle).write_all(bytes).unwrap();
            middle.shutdown().unwrap();
            open(&other_middle, &far)
        };
        opened(&sealed).unwrap();
        opened(&sealed[..sealed.len() - 1]).unwrap_err();
        sealed[50] ^= 1;
        opened(&sealed).unwrap_err();
    }
}
