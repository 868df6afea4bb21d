//! AES-GCM on guest memory: sealing reads the pages in place, opening writes them in place, and
//! neither uses an intermediate copy.
//!
//! Guest memory may change at any time, so this module never forms a Rust reference to it; aws-lc
//! (C and assembly) gets addresses. If a page changes while it is sealed, the record holds a
//! mixture of old and new bytes, as after any other read of a changing page. The record still
//! opens, because the tag covers the ciphertext, and aws-lc reads each byte of the page only once
//! (`CRYPTO_gcm128_encrypt` and its siblings in aws-lc's crypto/fipsmodule/modes/gcm.c).

use std::ptr::{NonNull, null, null_mut};

use aws_lc_sys::{
    EVP_CIPHER_CTX, EVP_CIPHER_CTX_ctrl, EVP_CIPHER_CTX_free, EVP_CIPHER_CTX_new,
    EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG, EVP_CipherFinal_ex, EVP_CipherInit_ex,
    EVP_CipherUpdate, EVP_aes_128_gcm, EVP_aes_256_gcm,
};
use vm_memory::VolatileSlice;

/// Bytes of an AES-GCM tag.
pub const TAG_BYTES: usize = 16;
/// Bytes of an AES-GCM nonce.
pub const NONCE_BYTES: usize = 12;

/// Seals guest memory with one key.
pub struct GuestSealer(Context);

/// Opens sealed bytes into guest memory with one key.
pub struct GuestOpener(Context);

impl GuestSealer {
    /// Takes a key of 16 or 32 bytes. Returns `None` for another length, or if aws-lc fails.
    #[must_use]
    pub fn new(key: &[u8]) -> Option<Self> {
        Context::new(key, Direction::Seal).map(Self)
    }

    /// Seals the bytes of `pages` in order, followed by the byte `last`. Writes the ciphertext to
    /// `body`, followed by the tag over the ciphertext and `aad`. The length of `body` must be that
    /// of the pages plus 1 plus [`TAG_BYTES`]. No two calls with the same key may use the same
    /// `nonce`.
    ///
    /// Returns `None` if `body` has another length, or if aws-lc fails. `body` must then not be
    /// sent.
    #[must_use]
    pub fn seal(
        &mut self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        pages: &[VolatileSlice<'_>],
        last: u8,
        body: &mut [u8],
    ) -> Option<()> {
        let content = content_bytes(pages);
        if body.len() != content.checked_add(1 + TAG_BYTES)? {
            return None;
        }
        let (sealed, rest) = body.split_at_mut(content);
        let (end, tag) = rest.split_first_mut()?;
        self.0.begin(nonce, aad)?;
        let mut at = 0;
        for (address, length) in joined(pages) {
            let out = sealed.get_mut(at..at + length)?;
            // SAFETY: `joined` yields addresses that are mapped and readable for their length while
            // `pages` lives. `out` is a unique reference to `length` bytes. Guest memory is only
            // accessed through volatile slices, never through references, so the two do not
            // overlap.
            unsafe { self.0.update(address, out.as_mut_ptr(), length) }?;
            at += length;
        }
        // SAFETY: the call reads one byte on the stack and writes one byte of `body`; they do not
        // overlap.
        unsafe { self.0.update(&raw const last, end, 1) }?;
        self.0.finish()?;
        self.0.tag(tag.try_into().ok()?)
    }
}

impl GuestOpener {
    /// Takes a key of 16 or 32 bytes. Returns `None` for another length, or if aws-lc fails.
    #[must_use]
    pub fn new(key: &[u8]) -> Option<Self> {
        Context::new(key, Direction::Open).map(Self)
    }

    /// Opens the output of [`GuestSealer::seal`] directly into `pages` and returns the last byte.
    ///
    /// Returns `None` if the tag does not match `body` and `aad`, if the length of `body` is not
    /// that of the pages plus 1 plus [`TAG_BYTES`], or if aws-lc fails. The pages may then
    /// hold unauthenticated bytes, which the caller must not use as content.
    #[must_use]
    pub fn open(
        &mut self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        body: &[u8],
        pages: &[VolatileSlice<'_>],
    ) -> Option<u8> {
        let content = content_bytes(pages);
        if body.len() != content.checked_add(1 + TAG_BYTES)? {
            return None;
        }
        let (sealed, rest) = body.split_at(content);
        let (end, tag) = rest.split_first()?;
        self.0.begin(nonce, aad)?;
        let mut at = 0;
        for (address, length) in joined(pages) {
            let part = sealed.get(at..at + length)?;
            // SAFETY: `joined` yields addresses that are mapped and writable for their length while
            // `pages` lives. `part` is a reference to `length` bytes. Guest memory is only accessed
            // through volatile slices, never through references, so the two do not overlap.
            unsafe { self.0.update(part.as_ptr(), address, length) }?;
            at += length;
        }
        let mut last = 0;
        // SAFETY: the call reads one byte of `body` and writes one byte on the stack; they do not
        // overlap.
        unsafe { self.0.update(end, &raw mut last, 1) }?;
        self.0.expect_tag(tag.try_into().ok()?)?;
        self.0.finish()?;
        Some(last)
    }
}

fn content_bytes(pages: &[VolatileSlice<'_>]) -> usize {
    pages
        .iter()
        .fold(0, |sum, page| sum.saturating_add(page.len()))
}

/// The pages' addresses and lengths. Adjacent pages are joined, because each call of aws-lc has a
/// fixed cost, which is about the cost of sealing half a page.
fn joined(pages: &[VolatileSlice<'_>]) -> impl Iterator<Item = (*mut u8, usize)> {
    let mut rest = pages.iter();
    let mut pending: Option<(*mut u8, usize)> = None;
    std::iter::from_fn(move || {
        loop {
            let next = rest
                .next()
                .map(|page| (page.ptr_guard_mut().as_ptr(), page.len()));
            match (pending, next) {
                (Some((start, length)), Some((address, more)))
                    if start.wrapping_add(length) == address =>
                {
                    pending = Some((start, length + more));
                }
                (None, Some(first)) => pending = Some(first),
                (before, next) => {
                    pending = next;
                    return before;
                }
            }
        }
    })
}

#[derive(Clone, Copy)]
enum Direction {
    Seal,
    Open,
}

/// The aws-lc context for one key and direction. Dropping the context frees it and wipes the key.
struct Context(NonNull<EVP_CIPHER_CTX>);

// SAFETY: aws-lc does not bind a context to a thread, and every use requires `&mut`.
unsafe impl Send for Context {}

impl Context {
    fn new(key: &[u8], direction: Direction) -> Option<Self> {
        // SAFETY: both functions take no arguments and return the address of a constant.
        let cipher = unsafe {
            match key.len() {
                16 => EVP_aes_128_gcm(),
                32 => EVP_aes_256_gcm(),
                _ => return None,
            }
        };
        // SAFETY: the function takes no arguments; a null result is handled.
        let context = Self(NonNull::new(unsafe { EVP_CIPHER_CTX_new() })?);
        let encrypts = i32::from(matches!(direction, Direction::Seal));
        // SAFETY: the context is new and valid, the cipher is a constant of aws-lc, and `key` has
        // that cipher's key length. Null is allowed for the engine and for the nonce, which `begin`
        // sets.
        let result = unsafe {
            EVP_CipherInit_ex(
                context.0.as_ptr(),
                cipher,
                null_mut(),
                key.as_ptr(),
                null(),
                encrypts,
            )
        };
        (result == 1).then_some(context)
    }

    /// Starts a message. The argument -1 keeps the direction, and null keeps the cipher and the
    /// key.
    fn begin(&mut self, nonce: &[u8; NONCE_BYTES], aad: &[u8]) -> Option<()> {
        // SAFETY: the context is valid and has a key, and `nonce` has the 12 bytes that GCM reads
        // by default. Null keeps the cipher and the key.
        let result = unsafe {
            EVP_CipherInit_ex(
                self.0.as_ptr(),
                null(),
                null_mut(),
                null(),
                nonce.as_ptr(),
                -1,
            )
        };
        if result != 1 {
            return None;
        }
        // SAFETY: `aad` is readable for its length. A null output marks the input as associated
        // data, and nothing is written.
        unsafe { self.update(aad.as_ptr(), null_mut(), aad.len()) }
    }

    /// Encrypts or decrypts `length` bytes. If `to` is null, the bytes are associated data.
    ///
    /// # Safety
    /// `from` must be readable for `length` bytes. `to` must be null or writable for `length`
    /// bytes. The two must not overlap.
    unsafe fn update(&mut self, from: *const u8, to: *mut u8, length: usize) -> Option<()> {
        let length = i32::try_from(length).ok()?;
        let mut done = 0;
        // SAFETY: the context is valid. GCM is a stream mode, so the call writes exactly as many
        // bytes as it reads; the caller guarantees both ranges.
        let result = unsafe { EVP_CipherUpdate(self.0.as_ptr(), to, &raw mut done, from, length) };
        (result == 1 && done == length).then_some(())
    }

    /// Ends the message: computes the tag, or compares it with the expected one.
    fn finish(&mut self) -> Option<()> {
        let mut unused = [0; TAG_BYTES];
        let mut done = 0;
        // SAFETY: the context is valid. GCM writes no final block, but the output has room for a
        // block.
        let result =
            unsafe { EVP_CipherFinal_ex(self.0.as_ptr(), unused.as_mut_ptr(), &raw mut done) };
        (result == 1).then_some(())
    }

    fn tag(&mut self, tag: &mut [u8; TAG_BYTES]) -> Option<()> {
        // SAFETY: the context is valid, and `tag` has room for the 16 bytes requested.
        let result = unsafe {
            EVP_CIPHER_CTX_ctrl(
                self.0.as_ptr(),
                EVP_CTRL_AEAD_GET_TAG,
                TAG_BYTES as i32,
                tag.as_mut_ptr().cast(),
            )
        };
        (result == 1).then_some(())
    }

    fn expect_tag(&mut self, tag: &[u8; TAG_BYTES]) -> Option<()> {
        // SAFETY: the context is valid. aws-lc copies 16 bytes from `tag` and does not write to
        // it, although the signature takes a mutable pointer.
        let result = unsafe {
            EVP_CIPHER_CTX_ctrl(
                self.0.as_ptr(),
                EVP_CTRL_AEAD_SET_TAG,
                TAG_BYTES as i32,
                tag.as_ptr().cast_mut().cast(),
            )
        };
        (result == 1).then_some(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: EVP_CIPHER_CTX_new returned the context, and only this call frees it.
        unsafe { EVP_CIPHER_CTX_free(self.0.as_ptr()) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

    use super::*;

    const PAGE: usize = 4096;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 64 * PAGE)]).unwrap()
    }

    fn pages(memory: &GuestMemoryMmap, numbers: &[usize]) -> Vec<VolatileSlice<'static>> {
        numbers
            .iter()
            .map(|number| {
                let at = GuestAddress((number * PAGE) as u64);
                let slice = memory.get_slice(at, PAGE).unwrap();
                // SAFETY: the tests keep the memory mapped longer than its slices.
                unsafe { VolatileSlice::new(slice.ptr_guard_mut().as_ptr(), PAGE) }
            })
            .collect()
    }

    fn fill(pages: &[VolatileSlice<'_>]) -> Vec<u8> {
        let mut all = Vec::new();
        for (number, page) in pages.iter().enumerate() {
            let bytes: Vec<u8> = (0..PAGE)
                .map(|at| (at * 7 + number * 13 + 1) as u8)
                .collect();
            page.copy_from(&bytes);
            all.extend(bytes);
        }
        all
    }

    fn read(pages: &[VolatileSlice<'_>]) -> Vec<u8> {
        let mut all = Vec::new();
        for page in pages {
            let mut bytes = vec![0; PAGE];
            page.copy_to(&mut bytes);
            all.extend(bytes);
        }
        all
    }

    #[test]
    fn scattered_and_adjacent_pages_are_opened_and_no_other_page_changes() {
        let (source, target) = (memory(), memory());
        for key in [vec![3; 16], vec![4; 32]] {
            for (from, to) in [
                (vec![1, 2, 3, 4], vec![9, 10, 11, 12]),
                (vec![9, 2, 3, 30], vec![1, 2, 40, 3]),
                (vec![5], vec![63]),
                (vec![], vec![]),
            ] {
                let (from, all) = (pages(&source, &from), pages(&target, &to));
                let content = fill(&from);
                let everything = pages(&target, &(0..64).collect::<Vec<_>>());
                for page in &everything {
                    page.copy_from(&[0xee_u8; PAGE]);
                }
                let mut body = vec![0; content.len() + 1 + TAG_BYTES];
                let mut sealer = GuestSealer::new(&key).unwrap();
                let mut opener = GuestOpener::new(&key).unwrap();
                for nonce in [[1; 12], [2; 12]] {
                    sealer.seal(&nonce, b"aad", &from, 23, &mut body).unwrap();
                    assert_eq!(opener.open(&nonce, b"aad", &body, &all), Some(23));
                    assert_eq!(read(&all), content);
                }
                for (number, page) in everything.iter().enumerate() {
                    if !to.contains(&number) {
                        assert_eq!(read(&[*page]), [0xee; PAGE]);
                    }
                }
            }
        }
    }

    #[test]
    fn a_flipped_bit_or_a_wrong_length_is_rejected_and_the_key_remains_usable() {
        let (source, target) = (memory(), memory());
        let (from, to) = (pages(&source, &[1, 2]), pages(&target, &[1, 2]));
        let content = fill(&from);
        let mut body = vec![0; content.len() + 1 + TAG_BYTES];
        let mut sealer = GuestSealer::new(&[1; 32]).unwrap();
        let mut opener = GuestOpener::new(&[1; 32]).unwrap();
        sealer.seal(&[1; 12], b"aad", &from, 23, &mut body).unwrap();
        for at in [0, PAGE, content.len(), content.len() + 1, body.len() - 1] {
            body[at] ^= 1;
            assert_eq!(opener.open(&[1; 12], b"aad", &body, &to), None, "byte {at}");
            body[at] ^= 1;
        }
        assert_eq!(opener.open(&[1; 12], b"axd", &body, &to), None);
        assert_eq!(opener.open(&[2; 12], b"aad", &body, &to), None);
        assert_eq!(opener.open(&[1; 12], b"aad", &body[1..], &to), None);
        assert_eq!(opener.open(&[1; 12], b"aad", &body, &to[1..]), None);
        assert!(
            sealer
                .seal(&[3; 12], b"aad", &from, 23, &mut body[1..])
                .is_none()
        );
        assert_eq!(opener.open(&[1; 12], b"aad", &body, &to), Some(23));
        assert!(GuestSealer::new(&[1; 24]).is_none());
    }

    #[test]
    fn pages_that_change_while_they_are_sealed_still_open() {
        let (source, target) = (memory(), memory());
        let numbers: Vec<usize> = (0..4).collect();
        let (from, to) = (pages(&source, &numbers), pages(&target, &numbers));
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 0_u8;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    value = value.wrapping_add(1);
                    for number in &numbers {
                        let at = GuestAddress((number * PAGE) as u64);
                        source
                            .get_slice(at, PAGE)
                            .unwrap()
                            .copy_from(&[value; PAGE]);
                    }
                }
            });
            let mut sealer = GuestSealer::new(&[1; 32]).unwrap();
            let mut opener = GuestOpener::new(&[1; 32]).unwrap();
            let mut body = vec![0; 4 * PAGE + 1 + TAG_BYTES];
            for turn in 0..2000_u64 {
                let mut nonce = [0; 12];
                nonce[..8].copy_from_slice(&turn.to_le_bytes());
                sealer.seal(&nonce, b"", &from, 23, &mut body).unwrap();
                assert_eq!(opener.open(&nonce, b"", &body, &to), Some(23));
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
