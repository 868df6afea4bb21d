//! Fuzz target: the list of denied keys.

use std::path::Path;

use super::super::identity::error::IdentityErrorKind;
use super::Denied;

/// Parses any text. Each line that contains more than a comment must either deny the key that it
/// contains, or make parsing fail with the number of that line.
pub fn fuzz_denied(bytes: &[u8]) {
    let path = Path::new("denied");
    let without_comment = |line: &str| line.split('#').next().unwrap_or_default().trim().to_owned();
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<String> = text.lines().map(without_comment).collect();
    match Denied::parse(path, bytes) {
        Ok(denied) => {
            let lowercase = text.to_ascii_lowercase().replace(':', "");
            for key in &denied.keys {
                assert!(
                    lowercase.contains(&key.to_string().replace(':', "")),
                    "{key}"
                );
            }
            for line in lines.iter().filter(|line| !line.is_empty()) {
                let alone = Denied::parse(path, line.as_bytes()).map(|alone| alone.keys);
                let is_denied =
                    alone.is_ok_and(|one| one.len() == 1 && one.is_subset(&denied.keys));
                assert!(is_denied, "{line:?} denies nothing");
            }
        }
        Err(IdentityErrorKind::BadDenied { line, reason, .. }) => {
            let is_text = std::str::from_utf8(bytes).is_ok();
            assert!(!is_text || !lines[line - 1].is_empty(), "{line}: {reason}");
        }
        Err(other) => panic!("{other}"),
    }
}
