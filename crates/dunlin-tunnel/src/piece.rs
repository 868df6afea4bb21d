//! Buffers for the bytes of channels between two sockets.
//!
//! The pool provides buffers. A piece is read into a buffer, sealed from that buffer, and kept
//! there until it is acknowledged. The other side opens the piece into a buffer and writes it from
//! that buffer. When the pool has enough buffers, a piece costs no allocation. A buffer is at most
//! twice as long as its content, or has the smallest size. That size is so small that the maximum
//! number of chunks of a channel still fits into the smallest window. The windows therefore limit
//! the memory use (I8).

use std::array;
use std::sync::{Arc, Mutex};

use dunlin_lane::sync::lock;
use dunlin_linux::aligned::{AlignedBytes, LINE_BYTES};
use dunlin_proto::limits::{LEAST_WINDOW_BYTES, MAX_CHANNEL_CHUNKS, MAX_STRIPE_CHUNK_BYTES};

/// The longest piece, in bytes.
pub(super) const PIECE_BYTES: usize = MAX_STRIPE_CHUNK_BYTES as usize;
/// The smallest buffer size. If each chunk of a channel is in such a buffer, the maximum number of
/// chunks fills the smallest window.
const SMALLEST_BYTES: usize = LEAST_WINDOW_BYTES as usize / MAX_CHANNEL_CHUNKS;
/// The number of buffer sizes. Each size is twice the previous one.
const SIZES: usize = (PIECE_BYTES / SMALLEST_BYTES).ilog2() as usize + 1;
/// Buffers that are smaller than this are not aligned.
const SMALL_BYTES: usize = 4096;
/// The maximum size of the unused buffers that the pool keeps, in bytes: about the bytes that a few
/// lanes have in flight. Other unused buffers return to the allocator.
const KEPT_BYTES: usize = 16 << 20;

const _: () = assert!(SMALLEST_BYTES << (SIZES - 1) == PIECE_BYTES);

/// Unused buffers.
#[derive(Debug)]
pub(super) struct Pool(Mutex<Free>);

#[derive(Debug)]
struct Free {
    by_size: [Vec<Arc<Memory>>; SIZES],
    bytes: usize,
}

/// A buffer. Readers lock it too, because a cipher needs memory that no other thread can write.
#[derive(Debug)]
struct Memory {
    size: usize,
    bytes: Mutex<AlignedBytes>,
}

/// A part of a buffer with bytes of a channel. Clones share the buffer.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    memory: Arc<Memory>,
    pool: Arc<Pool>,
    start: usize,
    end: usize,
}

impl Pool {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Free {
            by_size: array::from_fn(|_| Vec::new()),
            bytes: 0,
        })))
    }

    /// A buffer for `bytes` bytes, at most [`PIECE_BYTES`], with undefined content.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Piece {
        let size = (0..SIZES - 1)
            .find(|size| SMALLEST_BYTES << size >= bytes)
            .unwrap_or(SIZES - 1);
        let mut free = lock(&self.0);
        let memory = free.by_size[size].pop();
        if memory.is_some() {
            free.bytes -= SMALLEST_BYTES << size;
        }
        drop(free);
        let length = SMALLEST_BYTES << size;
        let memory = memory.unwrap_or_else(|| {
            Arc::new(Memory {
                size,
                bytes: Mutex::new(AlignedBytes::zeroed(length, alignment(length))),
            })
        });
        Piece {
            memory,
            pool: Arc::clone(self),
            start: 0,
            end: bytes.min(PIECE_BYTES),
        }
    }
}

/// The alignment of a buffer. Small buffers are not aligned: that would cost up to a quarter more
/// memory, and the cost of a short copy does not matter.
fn alignment(length: usize) -> usize {
    if length < SMALL_BYTES { 1 } else { LINE_BYTES }
}

impl Piece {
    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    /// Calls `use_bytes` with the piece's bytes while holding the buffer's lock.
    pub(super) fn with<R>(&self, use_bytes: impl FnOnce(&mut [u8]) -> R) -> R {
        use_bytes(&mut lock(&self.memory.bytes)[self.start..self.end])
    }

    /// The piece without its first `bytes` bytes; `None` if no bytes are left.
    pub(super) fn behind(mut self, bytes: usize) -> Option<Self> {
        self.start += bytes.min(self.len());
        (self.start < self.end).then_some(self)
    }

    /// The first `bytes` bytes, in a buffer that is not much longer.
    pub(super) fn fitted(mut self, bytes: usize) -> Self {
        self.end = self.start + bytes.min(self.len());
        if self.len() * 2 > SMALLEST_BYTES << self.memory.size {
            return self;
        }
        let other = self.pool.take(self.len());
        self.with(|from| other.with(|to| to.copy_from_slice(from)));
        other
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // If two threads drop the last two pieces of a buffer at the same time, each may see two
        // references. The buffer then returns to the allocator, not to the pool, which is harmless.
        if Arc::strong_count(&self.memory) > 1 {
            return;
        }
        let bytes = SMALLEST_BYTES << self.memory.size;
        let mut free = lock(&self.pool.0);
        if free.bytes + bytes <= KEPT_BYTES {
            free.bytes += bytes;
            free.by_size[self.memory.size].push(Arc::clone(&self.memory));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i8_a_buffer_is_at_most_twice_as_long_as_what_lies_in_it() {
        let pool = Pool::new();
        for bytes in [1, 4096, 4097, 70_000, 131_072, 131_073, PIECE_BYTES] {
            let piece = pool.take(PIECE_BYTES);
            piece.with(|all| all.fill(7));
            let piece = piece.fitted(bytes);
            assert_eq!(piece.len(), bytes);
            piece.with(|part| assert!(part.iter().all(|&byte| byte == 7)));
            let whole = SMALLEST_BYTES << piece.memory.size;
            assert!(whole <= (bytes * 2).max(SMALLEST_BYTES), "{bytes}: {whole}");
        }
    }

    #[test]
    fn a_buffer_is_used_again_when_its_last_piece_is_gone() {
        let pool = Pool::new();
        let first = pool.take(100);
        let address = Arc::as_ptr(&first.memory);
        let same = first.clone();
        drop(first);
        assert_ne!(Arc::as_ptr(&pool.take(100).memory), address);
        drop(same);
        let (one, other) = (pool.take(100), pool.take(100));
        assert!(
            [one, other]
                .iter()
                .any(|piece| Arc::as_ptr(&piece.memory) == address)
        );
    }

    #[test]
    fn i8_what_the_pool_keeps_is_bounded() {
        let pool = Pool::new();
        let all: Vec<_> = (0..2 * KEPT_BYTES / PIECE_BYTES)
            .map(|_| pool.take(PIECE_BYTES))
            .collect();
        drop(all);
        assert_eq!(lock(&pool.0).bytes, KEPT_BYTES);
    }

    #[test]
    fn what_is_behind_the_end_is_nothing() {
        let pool = Pool::new();
        let piece = pool.take(10);
        piece.with(|all| all.copy_from_slice(b"0123456789"));
        let rest = piece.clone().behind(4);
        assert_eq!(
            rest.map(|rest| rest.with(|all| all.to_vec())),
            Some(b"456789".to_vec())
        );
        assert!(piece.behind(10).is_none());
    }
}
