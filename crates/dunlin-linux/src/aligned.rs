//! Heap memory at an aligned address, for copies between a process and the kernel.
//!
//! The kernel copies between sockets and memory with `rep movsb`. The speed of this instruction
//! depends on the difference of the addresses, destination minus source, modulo 4096. On AMD Zen 4
//! processors, it copies up to 15 times more slowly if the difference is 1 to 15, and up to 2 times
//! more slowly if it is 16 to 31. A socket's buffers often begin at a page, so what counts is the
//! address of the memory in the process. If it is a multiple of 64, the copy is fast in both
//! directions.

use std::ops::{Deref, DerefMut};

/// The length of a cache line, in bytes.
pub const LINE_BYTES: usize = 64;

/// Bytes on the heap. The address of the first one is a multiple of the alignment.
#[derive(Debug, Default)]
pub struct AlignedBytes {
    bytes: Box<[u8]>,
    start: usize,
    length: usize,
}

impl AlignedBytes {
    /// Returns `length` bytes, all zero. The allocator may return fresh memory, which uses physical
    /// memory only after it is written.
    ///
    /// # Panics
    /// `alignment` is not a power of two.
    pub fn zeroed(length: usize, alignment: usize) -> Self {
        assert!(alignment.is_power_of_two(), "{alignment}");
        let bytes: Box<[u8]> = vec![0; length + alignment - 1].into();
        let start = bytes.as_ptr().addr().wrapping_neg() % alignment;
        Self {
            bytes,
            start,
            length,
        }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.length]
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_is_aligned_and_all_bytes_are_there() {
        for length in [0, 1, 63, 64, 100_000, 1 << 20] {
            for alignment in [1, LINE_BYTES, 4096] {
                let mut all = AlignedBytes::zeroed(length, alignment);
                assert_eq!(all.len(), length);
                assert_eq!(all.as_ptr().addr() % alignment, 0);
                assert!(all.iter().all(|&byte| byte == 0));
                all.fill(1);
            }
        }
        assert!(AlignedBytes::default().is_empty());
    }
}
