//! Views of guest memory: slices without a dirty bitmap, and the test for pages that are all zero.
//!
//! Guest memory changes while the guest runs, so no Rust reference to it is formed: it is copied
//! through `vm_memory::VolatileSlice`, or passed by address to aws-lc (`aead`) or the kernel
//! (`ktls`). The zero test examines a copy. If a page changes right after the test, it is in the
//! dirty log and is sent again.

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// Returns the same memory without its dirty bitmap. At the destination the engine writes through
/// this slice, because the engine's writes are not the VMM's own and must not mark pages dirty.
#[must_use]
pub fn untracked<'a, B: BitmapSlice>(slice: &VolatileSlice<'a, B>) -> VolatileSlice<'a> {
    let guard = slice.ptr_guard_mut();
    // SAFETY: `slice` proves that `len` bytes from this address are mapped for 'a. Volatile slices
    // may overlap each other, because they assume nothing about the bytes. On Linux the guard does
    // nothing (on Xen it maps pages), so the address stays valid after the guard is dropped.
    unsafe { VolatileSlice::new(guard.as_ptr(), slice.len()) }
}

/// Whether a mapping with these flags of mmap(2) is private, so that no other mapping of the file
/// sees its writes.
#[must_use]
pub const fn is_private(flags: i32) -> bool {
    flags & libc::MAP_TYPE == libc::MAP_PRIVATE
}

/// Whether all bytes are zero. Uses AVX-512 or AVX2 if this CPU has it.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most non-zero pages have a non-zero byte near the start, so the scalar test of the first
    // bytes usually suffices.
    let (head, rest) = bytes.split_at(bytes.len().min(32));
    is_zero_scalar(head) && is_zero_wide(rest)
}

/// Whether a page of guest memory, at most [`TESTED_BYTES`] long, was all zero when it was read.
/// `false` for a longer page.
#[must_use]
pub fn is_zero_page(page: &VolatileSlice<'_>) -> bool {
    // Most non-zero pages have a non-zero byte in the first cache line. For these pages, only that
    // line is read.
    let mut head = [0_u8; 64];
    let head_bytes = page.copy_to(&mut head);
    if !is_zero(&head[..head_bytes]) || page.len() > TESTED_BYTES {
        return false;
    }
    let mut copy = [0_u8; TESTED_BYTES];
    let bytes = page.copy_to(&mut copy);
    is_zero(&copy[..bytes])
}

/// The longest page that [`is_zero_page`] tests.
pub const TESTED_BYTES: usize = 4096;

/// The scalar version of [`is_zero`], which every CPU can run.
#[must_use]
pub fn is_zero_scalar(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && rest.iter().all(|&byte| byte == 0)
}

#[cfg(target_arch = "x86_64")]
fn is_zero_wide(bytes: &[u8]) -> bool {
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the enclosing `if` has checked that the CPU has AVX-512F.
        return unsafe { x86::is_zero_avx512(bytes) };
    }
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the enclosing `if` has checked that the CPU has AVX2.
        return unsafe { x86::is_zero_avx2(bytes) };
    }
    is_zero_scalar(bytes)
}

#[cfg(not(target_arch = "x86_64"))]
fn is_zero_wide(bytes: &[u8]) -> bool {
    is_zero_scalar(bytes)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm256_loadu_si256, _mm256_or_si256, _mm256_testz_si256,
        _mm512_loadu_si512, _mm512_or_si512, _mm512_test_epi64_mask,
    };

    use super::is_zero_scalar;

    /// The number of bytes that are loaded into four registers before each test.
    const STRIDE_AVX2: usize = 128;
    const STRIDE_AVX512: usize = 256;

    #[target_feature(enable = "avx2")]
    pub(super) fn is_zero_avx2(bytes: &[u8]) -> bool {
        let (strides, rest) = bytes.as_chunks::<STRIDE_AVX2>();
        for stride in strides {
            let at = stride.as_ptr().cast::<__m256i>();
            // SAFETY: the four loads of 32 bytes are within the 128 bytes of `stride`, and loadu
            // requires no alignment.
            let [a, b, c, d] = unsafe {
                [
                    _mm256_loadu_si256(at),
                    _mm256_loadu_si256(at.add(1)),
                    _mm256_loadu_si256(at.add(2)),
                    _mm256_loadu_si256(at.add(3)),
                ]
            };
            let any = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
            if _mm256_testz_si256(any, any) == 0 {
                return false;
            }
        }
        is_zero_scalar(rest)
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn is_zero_avx512(bytes: &[u8]) -> bool {
        let (strides, rest) = bytes.as_chunks::<STRIDE_AVX512>();
        for stride in strides {
            let at = stride.as_ptr().cast::<__m512i>();
            // SAFETY: the four loads of 64 bytes are within the 256 bytes of `stride`, and loadu
            // requires no alignment.
            let [a, b, c, d] = unsafe {
                [
                    _mm512_loadu_si512(at),
                    _mm512_loadu_si512(at.add(1)),
                    _mm512_loadu_si512(at.add(2)),
                    _mm512_loadu_si512(at.add(3)),
                ]
            };
            let any = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
            if _mm512_test_epi64_mask(any, any) != 0 {
                return false;
            }
        }
        is_zero_scalar(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type ZeroTest = fn(&[u8]) -> bool;

    /// Every zero test that this CPU can run.
    fn tests() -> Vec<(&'static str, ZeroTest)> {
        let mut all: Vec<(&'static str, ZeroTest)> =
            vec![("scalar", is_zero_scalar), ("chosen", is_zero)];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the CPU has AVX2.
                all.push(("avx2", |b| unsafe { x86::is_zero_avx2(b) }));
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                // SAFETY: the CPU has AVX-512F.
                all.push(("avx512", |b| unsafe { x86::is_zero_avx512(b) }));
            }
        }
        all
    }

    #[test]
    fn i3_the_zero_test_detects_every_byte_of_a_page() {
        let mut page = vec![0_u8; 4096];
        for (name, test) in tests() {
            assert!(test(&page), "{name}");
            for index in 0..page.len() {
                page[index] = 1 << (index % 8);
                assert!(!test(&page), "{name} misses byte {index}");
                page[index] = 0;
            }
        }
    }

    #[test]
    fn i3_the_zero_test_detects_every_byte_of_a_guest_page() {
        let mut page = vec![0_u8; TESTED_BYTES];
        assert!(is_zero_page(&VolatileSlice::from(&mut page[..])));
        for index in 0..page.len() {
            page[index] = 1;
            assert!(
                !is_zero_page(&VolatileSlice::from(&mut page[..])),
                "{index}"
            );
            page[index] = 0;
        }
        let mut long = vec![0_u8; TESTED_BYTES + 1];
        assert!(!is_zero_page(&VolatileSlice::from(&mut long[..])));
    }

    #[test]
    fn the_zero_test_covers_exactly_its_bytes_at_every_length_and_alignment() {
        let mut bytes = vec![0_u8; 1100];
        for (name, test) in tests() {
            for start in [0, 1, 7, 33] {
                for length in (0..700).step_by(13).chain([31, 32, 33, 255, 256, 257]) {
                    bytes[start + length] = 1;
                    assert!(
                        test(&bytes[start..start + length]),
                        "{name} {start} {length}"
                    );
                    bytes[start + length] = 0;
                    if length > 0 {
                        bytes[start + length - 1] = 1;
                        assert!(
                            !test(&bytes[start..start + length]),
                            "{name} {start} {length}"
                        );
                        bytes[start + length - 1] = 0;
                    }
                }
            }
        }
    }
}
