//! A reference for the cost of an encrypted transfer of guest memory on this host: the sum of two
//! measurements that use guest memory as lanes do.
//!
//! 1. [`copy`]: a thread per connection writes slices of source memory to a plain TCP connection,
//!    and another thread reads them into destination memory.
//! 2. [`seal_and_open`]: two threads for each lane, because a lane has one at each end. Each thread
//!    seals slices of source memory into its own buffer and opens the records into destination
//!    memory.
//!
//! A lane does at least this work if the kernel copies the bytes between the process and the
//! socket. [`cached`] repeats both measurements with buffers that stay in the cache.

use std::io::{Read, Write};

use anyhow::{Result, bail};
use dunlin::engine::memory::MappedMemory;
use dunlin::engine::vmm::GuestMemory;
use dunlin::lane::data::BATCH_BYTES;
use dunlin::lane::provider::{CipherSuite, Provider};
use dunlin::lane::record::{
    CONTENT_BYTES, HEADER_BYTES, OVERHEAD_BYTES, OpenHalf, Opened, RECORD_BYTES, SealHalf,
};
use dunlin::vm_memory::{ReadVolatile, WriteVolatile};
use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};

use super::rig::{Spent, Work, connection, in_step};

/// Bytes per write in [`cached_copy`].
const WRITE_BYTES: usize = 1 << 20;
/// Number of records in the buffer of a thread that seals and opens.
const RECORDS: usize = BATCH_BYTES / CONTENT_BYTES;

/// Measures the reference cost of a transfer of `bytes` from `source` to `target`.
pub(super) fn floor(
    source: &MappedMemory,
    target: &MappedMemory,
    bytes: u64,
    provider: Provider,
    lanes: usize,
) -> Result<Spent> {
    Ok(
        copy(source, target, bytes, lanes)?
            + seal_and_open(source, target, bytes, provider, lanes)?,
    )
}

/// Like [`floor`], but with buffers that stay in the cache, so that the result does not include
/// reads from and writes to memory.
pub(super) fn cached(bytes: u64, provider: Provider, lanes: usize) -> Result<Spent> {
    Ok(cached_copy(bytes, lanes)? + cached_seal_and_open(bytes, provider, lanes)?)
}

/// Divides `bytes` of memory into `parts` ranges, one for each thread. All ranges have the same
/// number of batches, except that the last ones may be shorter or empty.
fn shares(bytes: u64, parts: usize) -> Vec<std::ops::Range<u64>> {
    let batch = BATCH_BYTES as u64;
    let share = bytes.div_ceil(batch).div_ceil(parts as u64) * batch;
    let start = |part: u64| (part * share).min(bytes);
    (0..parts as u64)
        .map(|part| start(part)..start(part + 1))
        .collect()
}

/// The batches of a range: offsets and lengths.
fn batches(range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let end = range.end;
    range
        .step_by(BATCH_BYTES)
        .map(move |at| (at, (end - at).min(BATCH_BYTES as u64) as usize))
}

/// Copies memory over plain TCP, with one connection per lane.
pub(super) fn copy(
    source: &MappedMemory,
    target: &MappedMemory,
    bytes: u64,
    lanes: usize,
) -> Result<Spent> {
    let mut work: Vec<Work> = Vec::new();
    for range in shares(bytes, lanes) {
        let (mut near, mut far) = connection()?;
        let same = range.clone();
        work.push(Box::new(move || {
            for (offset, length) in batches(range) {
                near.write_all_volatile(&source.slice(0, offset, length)?)?;
            }
            Ok(())
        }));
        work.push(Box::new(move || {
            for (offset, length) in batches(same) {
                far.read_exact_volatile(&mut target.slice(0, offset, length)?)?;
            }
            Ok(())
        }));
    }
    in_step(work)
}

/// Seals source memory and opens it into destination memory, with two threads for each lane.
pub(super) fn seal_and_open(
    source: &MappedMemory,
    target: &MappedMemory,
    bytes: u64,
    provider: Provider,
    lanes: usize,
) -> Result<Spent> {
    let work = shares(bytes, 2 * lanes).into_iter().map(|range| -> Work {
        Box::new(move || {
            let (mut seal, mut open) = halves(provider)?;
            let mut records = AlignedBytes::zeroed(RECORDS * RECORD_BYTES, LINE_BYTES);
            for (offset, length) in batches(range) {
                let from = source.slice(0, offset, length)?;
                let to = target.slice(0, offset, length)?;
                let contents = || (0..length).step_by(CONTENT_BYTES);
                for (at, record) in contents().zip(records.chunks_exact_mut(RECORD_BYTES)) {
                    let content = (length - at).min(CONTENT_BYTES);
                    let record = &mut record[..content + OVERHEAD_BYTES];
                    seal.seal_guest(&[from.subslice(at, content)?], record)?;
                }
                for (at, record) in contents().zip(records.chunks_exact_mut(RECORD_BYTES)) {
                    let content = (length - at).min(CONTENT_BYTES);
                    let record = &mut record[..content + OVERHEAD_BYTES];
                    let to = to.subslice(at, content)?;
                    if open.opens_into_guest() {
                        open.open_guest(record, &[to])?;
                    } else {
                        let Opened::Data(length) = open.open(record)? else {
                            bail!("a decrypted record is not a data record");
                        };
                        to.copy_from(&record[HEADER_BYTES..HEADER_BYTES + length]);
                    }
                }
            }
            Ok(())
        })
    });
    in_step(work.collect())
}

/// Sends the same buffer over plain TCP repeatedly, and receives it into another buffer. Each lane
/// has its own connection and buffers.
fn cached_copy(bytes: u64, lanes: usize) -> Result<Spent> {
    let mut work: Vec<Work> = Vec::new();
    for range in shares(bytes, lanes) {
        let (mut near, mut far) = connection()?;
        let length = range.end - range.start;
        let pieces = move || {
            let whole = (0..length).step_by(WRITE_BYTES);
            whole.map(move |at| (length - at).min(WRITE_BYTES as u64) as usize)
        };
        work.push(Box::new(move || {
            let mut buffer = AlignedBytes::zeroed(WRITE_BYTES, LINE_BYTES);
            buffer.fill(5);
            pieces().try_for_each(|piece| Ok(near.write_all(&buffer[..piece])?))
        }));
        work.push(Box::new(move || {
            let mut buffer = AlignedBytes::zeroed(WRITE_BYTES, LINE_BYTES);
            buffer.fill(6);
            pieces().try_for_each(|piece| Ok(far.read_exact(&mut buffer[..piece])?))
        }));
    }
    in_step(work)
}

/// Seals and opens the same records repeatedly.
fn cached_seal_and_open(bytes: u64, provider: Provider, lanes: usize) -> Result<Spent> {
    let work = shares(bytes, 2 * lanes).into_iter().map(|range| -> Work {
        Box::new(move || {
            let (mut seal, mut open) = halves(provider)?;
            let mut records = AlignedBytes::zeroed(RECORDS * RECORD_BYTES, LINE_BYTES);
            records.fill(3);
            for _ in batches(range) {
                for record in records.chunks_exact_mut(RECORD_BYTES) {
                    seal.seal(record)?;
                }
                for record in records.chunks_exact_mut(RECORD_BYTES) {
                    open.open(record)?;
                }
            }
            Ok(())
        })
    });
    in_step(work.collect())
}

fn halves(provider: Provider) -> Result<(SealHalf, OpenHalf)> {
    let suite = CipherSuite::Aes256Gcm;
    let seal = SealHalf::new(provider, suite, &[1; 32], [2; 12], 0)?;
    Ok((seal, OpenHalf::new(provider, suite, &[1; 32], [2; 12], 0)?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::bench::rig::memory;
    use dunlin::engine::memory::digest;

    #[test]
    fn shares_cover_every_byte_once() {
        for (bytes, parts) in [(64 << 20, 2), (2 << 20, 4), (BATCH_BYTES as u64 + 4096, 3)] {
            let shares = shares(bytes, parts);
            assert_eq!((shares.len(), shares[0].start), (parts, 0));
            assert_eq!(shares.last().unwrap().end, bytes);
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }

    #[test]
    fn either_half_of_the_floor_moves_the_whole_memory() {
        let bytes = 4 << 20;
        for &provider in Provider::built_in() {
            let source = memory(bytes, 1).unwrap();
            let (copied, opened) = (memory(bytes, 2).unwrap(), memory(bytes, 3).unwrap());
            copy(&source, &copied, bytes, 3).unwrap();
            seal_and_open(&source, &opened, bytes, provider, 1).unwrap();
            let digests = [&source, &copied, &opened].map(|one| digest(one, 1).unwrap());
            assert!(
                digests[0] == digests[1] && digests[0] == digests[2],
                "{provider}"
            );
        }
    }
}
