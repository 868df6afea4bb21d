//! Checks docs/security.md and the pages of docs/security/: every named test exists, and every
//! table row names a test or the reason why there is none.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use support::Hosts;

/// The overview, then the pages of its folder.
fn document() -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut pages = vec![docs.join("security.md")];
    let folder = fs::read_dir(docs.join("security")).unwrap();
    pages.extend(folder.map(|page| page.unwrap().path()));
    pages[1..].sort();
    let text = pages.iter().map(|page| fs::read_to_string(page).unwrap());
    text.collect::<Vec<_>>().join("\n\n")
}

/// Words in backquotes, in order.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The tests named in a part of the document, each with its file.
fn tests_in(text: &str) -> Vec<(&str, &str)> {
    let mut file = None;
    let mut found = Vec::new();
    for word in quoted(text) {
        if word.ends_with(".rs") && word.contains('/') {
            file = Some(word);
        } else if let Some(file) = file
            && word.contains('_')
            && word
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || b"_0123456789".contains(&byte))
        {
            found.push((file, word));
        }
    }
    found
}

fn assert_there(file: &str, test: &str) {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let path = crates.join(file);
    let code = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
    let declared = format!("fn {test}()");
    let at = code.find(&declared);
    let at = at.unwrap_or_else(|| panic!("no {declared} in {file}"));
    let before: Vec<_> = code[..at].lines().rev().take(4).collect();
    assert!(
        before.iter().any(|line| line.trim() == "#[test]"),
        "{test} in {file} is not a test"
    );
}

#[test]
fn every_test_named_in_the_document_exists() {
    let mut named = 0;
    for part in document().split("\n\n") {
        // Each row names its own file.
        let rows: Vec<&str> = if part.contains("\n| --- |") {
            part.lines().collect()
        } else {
            vec![part]
        };
        for (file, test) in rows.into_iter().flat_map(tests_in) {
            assert_there(file, test);
            named += 1;
        }
    }
    println!("{named} tests are named");
    assert!(named > 90, "{named}");
}

#[test]
fn every_table_row_has_a_test_or_a_reason() {
    let mut lines = 0;
    for row in document().lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [_, _, tests] = cells[..] else {
            panic!("{} cells: {row}", cells.len());
        };
        if tests == "tests" || tests.starts_with("---") {
            continue;
        }
        lines += 1;
        let why = tests
            .strip_prefix("not shown: ")
            .is_some_and(|why| !why.is_empty());
        assert!(why || !tests_in(tests).is_empty(), "{row}");
    }
    assert!(lines > 70, "{lines}");
}

#[test]
fn files_and_sockets_of_a_process_are_private() {
    let hosts = Hosts::new();
    let guest = "--guest process --memory 64M --fill-size 8M";
    let source = hosts.run("from", guest);
    let destination = hosts.receive("b", "to", "");
    let migration = hosts.begin(&source, &destination, "a", "--peer b.test --rate 2M");
    migration.wait_for("progress");
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    for control in ["from", "to"] {
        let socket = hosts.scratch.join(control).join("vm.sock");
        assert_eq!(mode(&socket), 0o600, "{}", socket.display());
    }
    let state = hosts.scratch.join("state");
    assert_eq!(mode(&state), 0o700);
    let journals: Vec<_> = fs::read_dir(&state).unwrap().map(Result::unwrap).collect();
    assert_eq!(journals.len(), 2, "one of each side");
    for journal in journals {
        assert_eq!(mode(&journal.path()), 0o600, "{journal:?}");
    }
    hosts.cancel(&source).expect(0);
    assert_eq!(migration.code(), 4);
    // Of all files that `pki issue` writes, only the key must have mode 0600.
    for host in ["a", "b", "ca"] {
        for file in fs::read_dir(hosts.scratch.join(host)).unwrap() {
            let path = file.unwrap().path();
            let is_key = path.to_string_lossy().ends_with("key.pem");
            assert!(!is_key || mode(&path) == 0o600, "{}", path.display());
        }
    }
}
