//! Checks docs/security.md and the pages of docs/security/. Every test that they name exists. Each
//! claim is a table row that has a number, and that names either its tests or the reason why it has
//! none. The comments of these tests name the claim.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use support::Hosts;

/// The text of docs/security.md, followed by the text of the pages in docs/security/.
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

/// The lines above a test's declaration: its attributes and comment.
fn head_of(file: &str, test: &str) -> Vec<String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let code = fs::read_to_string(crates.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let declared = format!("fn {test}()");
    let at = code.find(&declared);
    let at = at.unwrap_or_else(|| panic!("no {declared} in {file}"));
    let above = code[..at].lines().rev().map(|line| line.trim().to_owned());
    let head: Vec<_> = above
        .skip(usize::from(!code[..at].ends_with('\n')))
        .take_while(|line| line.starts_with("///") || line.starts_with("#["))
        .collect();
    assert!(
        head.iter().any(|line| line == "#[test]"),
        "{test} in {file} is not a test"
    );
    head
}

/// The numbers of the claims that a test's comment names.
fn claims_of(head: &[String]) -> Vec<String> {
    let named = head.iter().find_map(|line| {
        let text = line.strip_prefix("/// Claim")?;
        let text = text.trim_start_matches('s').trim();
        text.strip_suffix(" of docs/security.")
    });
    let numbers = named.map(|numbers| numbers.split(", ").map(str::to_owned));
    numbers.into_iter().flatten().collect()
}

/// The rows of the tables: the number of the claim, and the cell with its tests.
fn claims() -> Vec<(String, String)> {
    let text = document();
    let rows = text.lines().filter(|line| line.starts_with('|'));
    let cells = rows.map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [number, _, _, tests] = cells[..] else {
            panic!("{} cells: {row}", cells.len());
        };
        (number.to_owned(), tests.to_owned())
    });
    let is_head = |number: &str| number == "claim" || number.starts_with("---");
    cells.filter(|(number, _)| !is_head(number)).collect()
}

/// The number of comments that name claims, in all Rust files of a directory.
fn comments_with_claims(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let counts = paths.map(|path| {
        if path.is_dir() {
            return comments_with_claims(&path);
        }
        if path.extension().is_none_or(|kind| kind != "rs") {
            return 0;
        }
        let code = fs::read_to_string(&path).unwrap();
        let lines = code.lines().map(str::trim);
        lines
            .filter(|line| !claims_of(&[line.to_string()]).is_empty())
            .count()
    });
    counts.sum()
}

#[test]
fn every_test_named_in_the_document_exists() {
    let mut named = 0;
    for part in document().split("\n\n") {
        // In a table, each row names the file of its tests, so read each row separately.
        let rows: Vec<&str> = if part.contains("\n| --- |") {
            part.lines().collect()
        } else {
            vec![part]
        };
        for (file, test) in rows.into_iter().flat_map(tests_in) {
            head_of(file, test);
            named += 1;
        }
    }
    println!("{named} tests are named");
    assert!(named > 90, "{named}");
}

#[test]
fn every_claim_has_its_own_number_and_a_test_or_a_reason() {
    let claims = claims();
    let mut before = (String::new(), 0);
    for (number, tests) in &claims {
        let (page, position) = number.split_at(1);
        let position: u32 = position.parse().unwrap();
        let expected = if page == before.0 { before.1 + 1 } else { 1 };
        assert_eq!(position, expected, "{number} is out of order");
        before = (page.to_owned(), position);
        let why = tests
            .strip_prefix("not shown: ")
            .is_some_and(|why| !why.is_empty());
        assert!(why || !tests_in(tests).is_empty(), "{number}: {tests}");
    }
    assert!(claims.len() > 70, "{}", claims.len());
}

#[test]
fn a_test_and_the_claims_that_it_shows_name_each_other() {
    let mut shown = BTreeMap::<_, Vec<String>>::new();
    for (number, tests) in claims() {
        for (file, test) in tests_in(&tests) {
            let test = (file.to_owned(), test.to_owned());
            shown.entry(test).or_default().push(number.clone());
        }
    }
    for ((file, test), numbers) in &mut shown {
        let mut named = claims_of(&head_of(file, test));
        named.sort();
        numbers.sort();
        assert_eq!(&named, numbers, "{file} {test}");
    }
    // No other comments name claims: there are as many as tests that the claims name, and each of
    // those tests has one.
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let comments = comments_with_claims(crates);
    assert_eq!(comments, shown.len());
}

/// Claim H1 of docs/security.
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
    assert_eq!(journals.len(), 2, "expected one journal of each side");
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
