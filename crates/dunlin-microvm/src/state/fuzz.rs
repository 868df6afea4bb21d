//! The fuzz entry for the sections `vmm` and `vcpu.tsc`.

use super::Own;
use super::tsc::Tsc;

/// Decodes arbitrary bytes as the section `vmm` and as the section `vcpu.tsc`.
pub fn fuzz_state_sections(bytes: &[u8]) {
    if let Ok(own) = Own::decode(bytes) {
        assert!(own.throttle_percent <= 99);
        assert_eq!(bytes.len(), 9);
    }
    if Tsc::decode(bytes).is_ok() {
        assert!(bytes.len() > 20);
    }
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut own = vec![20];
    own.extend(u64::MAX.to_le_bytes());
    vec![("own", own), ("tsc", vec![1; 36])]
}
