//! The pages that define the wire format and the journal, and the vectors in them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// docs/wire.md, then the pages of docs/wire/.
pub(crate) static WIRE: LazyLock<String> = LazyLock::new(|| pages("wire"));
/// docs/journal.md, then the pages of docs/journal/.
pub(crate) static JOURNAL: LazyLock<String> = LazyLock::new(|| pages("journal"));

/// The text of an overview, then of each page in its folder.
fn pages(name: &str) -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut pages = vec![docs.join(name).with_extension("md")];
    let folder = fs::read_dir(docs.join(name)).unwrap();
    pages.extend(folder.map(|page| page.unwrap().path()));
    pages[1..].sort();
    let text = pages.iter().map(|page| fs::read_to_string(page).unwrap());
    text.collect::<Vec<_>>().join("\n\n")
}

/// Whether a document contains `words`, on one line or across line ends.
pub(crate) fn contains(document: &str, words: &str) -> bool {
    let flowing: Vec<&str> = document.split_whitespace().collect();
    flowing.join(" ").contains(words.trim())
}

/// Returns the vectors for which the name begins with `prefix`. The key of each is the part of the
/// name after `prefix`.
pub(crate) fn vectors_of(prefix: &str) -> BTreeMap<&'static str, Vec<u8>> {
    let mut vectors = BTreeMap::new();
    for block in WIRE.split("```vector\n").skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        let (name, rows) = block.split_once('\n').unwrap();
        let name = name.strip_prefix("name: ").unwrap();
        let Some(name) = name.strip_prefix(prefix) else {
            continue;
        };
        let bytes = rows
            .lines()
            .map(|row| row.split('#').next().unwrap())
            .flat_map(str::split_whitespace)
            .map(|byte| u8::from_str_radix(byte, 16).unwrap());
        let earlier = vectors.insert(name, bytes.collect());
        assert_eq!(earlier, None, "{name} occurs twice");
    }
    vectors
}

/// Asserts that each vector is refused if it is truncated, or extended by a byte.
pub(crate) fn assert_exact(
    vectors: BTreeMap<&'static str, Vec<u8>>,
    decodes: impl Fn(&str, &[u8]) -> bool,
) {
    for (name, bytes) in vectors {
        for length in 0..bytes.len() {
            assert!(!decodes(name, &bytes[..length]), "{name} cut to {length}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(!decodes(name, &longer), "{name} with one more byte");
    }
}
