//! A channel of a relay. This process seals and opens its records.
//!
//! The channel's two threads share one TLS session. While a thread waits in a read or write of a
//! socket, it holds no lock of the session.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::time::Instant;

use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};
use dunlin_linux::interrupted::until_not_interrupted;
use dunlin_linux::poll::{Interest, poll};
use dunlin_linux::socket::wait_writable;

use super::channel::{Channel, Process, is_early, of_hypervisor, try_lock};
use crate::failure::Failure;
use dunlin_lane::record::RECEIVED_RECORD_BYTES;
use dunlin_lane::sync::lock;

/// Bytes that are sealed and sent in one piece, or received in one piece. Each piece wakes a
/// thread, so larger pieces cost less CPU: docs/benchmarking/tried.md has the figures.
///
/// Drawback: a busy direction has two buffers of this size, one for the bytes and one for their
/// records.
const PIECE_BYTES: usize = 512 << 10;
/// The size of the buffers of a busy channel, in bytes, for both directions. The buffers count
/// towards [`Limits::peer_bytes`](crate::Limits::peer_bytes).
pub(super) const CHANNEL_BYTES: u64 = 2 * (1080 << 10);

const _: () = assert!(PIECE_BYTES >= 2 * RECEIVED_RECORD_BYTES + LINE_BYTES);
// A channel has four buffers of one piece each. In TLS 1.2, rustls buffers one record per
// direction. In TLS 1.3, an incomplete message of 64 KiB can wait for a record of the peer. Both
// bounds have one more record for overhead: a sealed record is up to 29 bytes longer than its
// content.
const _: () = assert!(CHANNEL_BYTES as usize >= 4 * PIECE_BYTES + 3 * RECEIVED_RECORD_BYTES);
const _: () =
    assert!(CHANNEL_BYTES as usize >= 4 * PIECE_BYTES + (64 << 10) + 2 * RECEIVED_RECORD_BYTES);

impl Channel {
    /// Carries the hypervisor's bytes to the peer.
    pub(super) fn carry_out(&self, tls: &Process) -> Result<(), Failure> {
        let mut content = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
        loop {
            let count = match self.plain.read(&mut content[..self.limited(PIECE_BYTES)]) {
                Ok(count) => count,
                Err(error) if is_early(&error) => {
                    drop(std::mem::take(&mut content));
                    drop(std::mem::take(&mut *lock(&tls.sending)));
                    self.wait(&self.plain);
                    content = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
                    continue;
                }
                Err(error) => return Err(of_hypervisor(&error)),
            };
            if count == 0 {
                return self.end_outward(|| self.send(tls, None));
            }
            if !self.life().send() {
                return Ok(());
            }
            self.send(tls, Some(&content[..count]))?;
            self.pace(count);
            self.send_pending(tls)?;
        }
    }

    /// Seals and sends content, or the end of this direction.
    fn send(&self, tls: &Process, content: Option<&[u8]>) -> Result<(), Failure> {
        let mut records = lock(&tls.sending);
        let count = tls.session.seal(content, &mut records);
        let count = count.map_err(|error| self.of_tls(&error))?;
        self.write_tls(&records[..count])
    }

    /// Sends pending TLS messages, even while the hypervisor sends nothing. Never waits for the
    /// peer, because the thread that reads from the peer calls this too. If the other thread is
    /// sending now, or the socket's buffer is full, a later call sends the messages.
    fn send_pending(&self, tls: &Process) -> Result<(), Failure> {
        if !tls.session.is_pending() {
            return Ok(());
        }
        let Some(_sending) = try_lock(&tls.sending) else {
            return Ok(());
        };
        match wait_writable(&self.tls, Instant::now()) {
            Ok(true) => {
                let pending = tls.session.take_pending();
                self.write_tls(&pending.map_err(|error| self.of_tls(&error))?)
            }
            // If the socket has failed, the next write reports the error.
            Ok(false) | Err(_) => Ok(()),
        }
    }

    fn write_tls(&self, records: &[u8]) -> Result<(), Failure> {
        let written = (&self.tls).write_all(records);
        written.map_err(|error| self.of_io(&error))
    }

    /// Carries the peer's bytes to the hypervisor.
    pub(super) fn carry_in(&self, tls: &Process) -> Result<(), Failure> {
        let mut records = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
        let mut content = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
        // The bytes that have been received, but not opened.
        let (mut start, mut filled) = (0, 0);
        loop {
            match until_not_interrupted(|| (&self.tls).read(&mut records[filled..])) {
                Ok(0) => return Err(self.lost("closed without close_notify")),
                Ok(count) => filled += count,
                Err(error) if is_early(&error) => {
                    if start == filled {
                        drop((std::mem::take(&mut records), std::mem::take(&mut content)));
                        self.wait(&self.tls);
                        records = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
                        content = AlignedBytes::zeroed(PIECE_BYTES, LINE_BYTES);
                    }
                    continue;
                }
                Err(error) => return Err(self.of_io(&error)),
            }
            let opened = tls.session.open(&mut records[start..filled], &mut content);
            let opened = opened.map_err(|error| self.of_tls(&error))?;
            self.write(&content[..opened.content], opened.is_over)?;
            if opened.is_over {
                return self.end_inward();
            }
            // Move the incomplete record so that it ends, and the next read begins, at the start of
            // a cache line.
            let rest = start + opened.taken..filled;
            start = rest.len().next_multiple_of(LINE_BYTES) - rest.len();
            filled = start + rest.len();
            records.copy_within(rest, start);
            self.send_pending(tls)?;
        }
    }

    /// Waits until there is something to read, without a timeout.
    fn wait(&self, socket: &impl AsFd) {
        let interest = Interest::read(&socket);
        // The next read reports the error.
        let _ = poll(&[interest], None);
    }
}
