//! The encryption of the tunnel's floor: each byte is sealed once and opened once, in place.
//!
//! One end reads bytes straight into the records of a buffer, seals the records there and writes
//! them from there. The other end opens records in its own buffer and writes their content from
//! there. There is no handshake, and all connections use the same key, so the encryption protects
//! nothing.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};

use anyhow::{Result, bail, ensure};
use dunlin_lane::fastest;
use dunlin_lane::provider::{CipherSuite, Provider};
use dunlin_lane::record::{
    CONTENT_BYTES, HEADER_BYTES, OVERHEAD_BYTES, OpenHalf, Opened, RECORD_BYTES, SealHalf,
};
use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};

use super::ends::Stream;

/// Bytes that a forwarder moves in one piece, with or without records.
pub(super) const PIECE_BYTES: usize = 512 << 10;
/// The number of records that one read fills.
const RECORDS: usize = PIECE_BYTES / CONTENT_BYTES;
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
    let mut records = AlignedBytes::zeroed(RECORDS * RECORD_BYTES, LINE_BYTES);
    loop {
        let contents = records.chunks_exact_mut(RECORD_BYTES);
        let contents = contents.map(|record| &mut record[HEADER_BYTES..][..CONTENT_BYTES]);
        let mut contents: Vec<_> = contents.map(IoSliceMut::new).collect();
        let count = from.read_vectored(&mut contents)?;
        if count == 0 {
            return Ok(to.shutdown()?);
        }
        let sealed = &mut records[..sealed_bytes(count)];
        for record in sealed.chunks_mut(RECORD_BYTES) {
            half.seal(record)?;
        }
        to.write_all(sealed)?;
    }
}

/// The total length of records with this much content: full records, and a last one that may
/// be shorter.
fn sealed_bytes(content: usize) -> usize {
    content + content.div_ceil(CONTENT_BYTES) * OVERHEAD_BYTES
}

/// Reads records until the end of the stream, and writes their content.
pub(super) fn open(mut from: &Stream, to: &Stream) -> Result<()> {
    let mut half = OpenHalf::new(provider(), SUITE, &KEY, IV, 0)?;
    let mut buffer = AlignedBytes::zeroed(RECORDS * RECORD_BYTES, LINE_BYTES);
    let mut filled = 0;
    loop {
        let count = from.read(&mut buffer[filled..])?;
        if count == 0 {
            ensure!(filled == 0, "the stream ends inside a record");
            return Ok(to.shutdown()?);
        }
        filled += count;
        let mut contents = Vec::with_capacity(RECORDS);
        let mut opened = 0;
        let mut rest = &mut buffer[..filled];
        while let Some(&header) = rest.first_chunk() {
            let bytes = OpenHalf::record_bytes(header)?;
            let Some((record, behind)) = rest.split_at_mut_checked(bytes) else {
                break;
            };
            let Opened::Data(length) = half.open(record)? else {
                bail!("a record holds no data");
            };
            contents.push(IoSlice::new(&record[HEADER_BYTES..][..length]));
            opened += bytes;
            rest = behind;
        }
        write_all_vectored(to, &mut contents)?;
        buffer.copy_within(opened..filled, 0);
        filled -= opened;
    }
}

/// Does the work of [`Write::write_all_vectored`], which is not stable yet.
fn write_all_vectored(mut to: &Stream, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !parts.is_empty() {
        match to.write_vectored(parts)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => IoSlice::advance_slices(&mut parts, count),
        }
    }
    Ok(())
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

    #[test]
    fn the_last_record_is_as_short_as_its_content() {
        for (content, sealed) in [
            (1, 1 + OVERHEAD_BYTES),
            (CONTENT_BYTES, RECORD_BYTES),
            (CONTENT_BYTES + 1, RECORD_BYTES + 1 + OVERHEAD_BYTES),
            (PIECE_BYTES, RECORDS * RECORD_BYTES),
        ] {
            assert_eq!(sealed_bytes(content), sealed);
        }
    }
}
