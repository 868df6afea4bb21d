/// Pseudo-random bytes that `seed` determines. An even seed and the next odd seed give the same
/// bytes.
#[must_use]
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}
