//! The word check: searches comments, string literals and identifiers of sources, and the whole
//! text of other files for the retired names and phrases in `tools/words`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

/// The list, relative to the workspace.
const LIST: &str = "tools/words";
/// Files and folders that are not searched: the list itself, the licence, build output, generated
/// test inputs, the interface lists in `api`, recorded sessions, and decisions. The names in the
/// interface lists come from the sources, which are searched. Decisions keep the words that were
/// used when they were made.
const SKIPPED: [&str; 11] = [
    "words",
    "LICENSE",
    "target",
    ".git",
    "api",
    "artifacts",
    "corpus",
    "coverage",
    "decisions",
    "recorded",
    "seeds",
];
/// Extensions of sources, which have comments, string literals and identifiers as in Rust.
const SOURCES: [&str; 3] = ["rs", "c", "h"];
/// Extensions of texts. A file without an extension is a text too: a script or a Makefile.
const TEXTS: [&str; 10] = [
    "md", "toml", "txt", "sh", "py", "S", "ld", "css", "service", "socket",
];

/// What to search.
#[derive(Debug, Args)]
pub struct WordOptions {
    /// Files and folders to search [default: the whole workspace].
    paths: Vec<PathBuf>,
}

/// A word or phrase of the list.
#[derive(Debug)]
struct Entry {
    /// Lower case, split as [`words`] splits a text.
    words: Vec<String>,
    /// Longer phrases that contain the word and are allowed.
    allowed: Vec<Vec<String>>,
    /// The suggested replacement.
    instead: String,
    /// Whether identifiers are searched too.
    in_names: bool,
}

/// The parsed list.
#[derive(Debug, Default)]
struct List {
    entries: Vec<Entry>,
}

/// The offset in a text, in bytes, and what is there: a word in lower case, or one character of
/// punctuation.
type Word = (usize, String);

/// An occurrence of an entry.
#[derive(Debug, PartialEq, Eq)]
struct Hit {
    line: usize,
    found: String,
    instead: String,
}

/// Searches, prints each occurrence, and fails if there is one.
pub(crate) fn command(options: &WordOptions) -> Result<ExitCode> {
    let list =
        List::parse(&fs::read_to_string(LIST).with_context(|| format!("cannot read {LIST}"))?)?;
    let workspace = [PathBuf::from(".")];
    let paths = match options.paths.as_slice() {
        [] => &workspace[..],
        paths => paths,
    };
    let mut files = Vec::new();
    for path in paths {
        collect(path, &mut files)?;
    }
    let mut hits = 0;
    for file in &files {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        for hit in list.search(&text, has_extension(file, &SOURCES)) {
            hits += 1;
            let (
                file,
                Hit {
                    line,
                    found,
                    instead,
                },
            ) = (file.display(), hit);
            println!("{file}:{line}: \"{found}\" (write: {instead})");
        }
    }
    println!("{hits} retired words in {} files", files.len());
    Ok(match hits {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Whether the file's extension is one of these.
fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension();
    extension.is_some_and(|extension| extensions.iter().any(|&one| extension == one))
}

/// Adds the sources and texts at or under `path`, in order.
pub(crate) fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let metadata =
        fs::metadata(path).with_context(|| format!("cannot examine {}", path.display()))?;
    if metadata.is_file() {
        files.push(path.to_owned());
        return Ok(());
    }
    let mut entries = fs::read_dir(path)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let is_skipped = SKIPPED.iter().any(|&name| entry.file_name() == name);
        let is_text = path.extension().is_none()
            || has_extension(&path, &SOURCES)
            || has_extension(&path, &TEXTS);
        if !is_skipped && (entry.file_type()?.is_dir() || is_text) {
            collect(&path, files)?;
        }
    }
    Ok(())
}

impl List {
    fn parse(text: &str) -> Result<Self> {
        let mut list = Self::default();
        let mut section = "";
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            let at = || format!("{LIST}:{}: {line:?}", number + 1);
            match line {
                "" => {}
                _ if line.starts_with('#') => {}
                "[prose]" | "[names]" => section = line,
                _ => {
                    ensure!(
                        !section.is_empty(),
                        "{}: the word precedes the first section",
                        at()
                    );
                    let entry = Entry::parse(line, section == "[names]");
                    list.entries.push(entry.with_context(at)?);
                }
            }
        }
        Ok(list)
    }

    /// Occurrences in a source or another text, in order.
    fn search(&self, text: &str, is_source: bool) -> Vec<Hit> {
        let mut found = Vec::new();
        if !is_source {
            let prose = without_quotations(text);
            self.search_words(&words(&prose, 0), &mut found);
        } else {
            for (at, kind, part) in tokens(text) {
                match kind {
                    Kind::Name => self.search_name(at, part, &mut found),
                    _ => self.search_words(&words(part, at), &mut found),
                }
            }
        }
        let line = |at: usize| 1 + text[..at].bytes().filter(|&byte| byte == b'\n').count();
        found
            .into_iter()
            .map(|(at, entry, found)| Hit {
                line: line(at),
                found,
                instead: entry.instead.clone(),
            })
            .collect()
    }

    fn search_words<'a>(&'a self, text: &[Word], found: &mut Vec<(usize, &'a Entry, String)>) {
        for start in 0..text.len() {
            for entry in &self.entries {
                if matches(text, start, &entry.words) && !entry.is_allowed(text, start) {
                    found.push((text[start].0, entry, entry.words.join(" ")));
                }
            }
        }
    }

    fn search_name<'a>(
        &'a self,
        at: usize,
        name: &str,
        found: &mut Vec<(usize, &'a Entry, String)>,
    ) {
        let parts = name_parts(name);
        for start in 0..parts.len() {
            for entry in self.entries.iter().filter(|entry| entry.in_names) {
                if matches(&parts, start, &entry.words) && !entry.is_allowed(&parts, start) {
                    found.push((at, entry, name.to_owned()));
                }
            }
        }
    }
}

impl Entry {
    fn parse(line: &str, in_names: bool) -> Result<Self> {
        let (phrase, instead) = line.split_once('=').context("the line has no `=`")?;
        let (phrase, allowed) = match phrase.split_once('[') {
            Some((phrase, rest)) => (phrase, rest.trim().strip_suffix(']').context("no `]`")?),
            None => (phrase, ""),
        };
        let plain = |text: &str| words(text, 0).into_iter().map(|(_, word)| word).collect();
        let entry = Self {
            words: plain(phrase),
            allowed: allowed
                .split(';')
                .filter(|phrase| !phrase.is_empty())
                .map(plain)
                .collect(),
            instead: instead.trim().to_owned(),
            in_names,
        };
        if entry.words.is_empty() || entry.instead.is_empty() {
            bail!("the word or its replacement is missing");
        }
        Ok(entry)
    }

    /// Whether the occurrence at `start` is part of an allowed phrase.
    fn is_allowed(&self, text: &[Word], start: usize) -> bool {
        self.allowed.iter().any(|phrase| {
            (0..phrase.len()).any(|before| {
                phrase[before..].starts_with(&self.words)
                    && before <= start
                    && matches(text, start - before, phrase)
            })
        })
    }
}

fn matches(text: &[Word], start: usize, phrase: &[String]) -> bool {
    text.len() - start >= phrase.len()
        && phrase
            .iter()
            .zip(&text[start..])
            .all(|(word, (_, other))| word == other)
}

/// Splits a text. Line breaks and comment marks separate words, so that a phrase is found across
/// lines.
fn words(text: &str, offset: usize) -> Vec<Word> {
    let mut list: Vec<Word> = Vec::new();
    let mut end = 0;
    for (at, character) in text.char_indices() {
        if character.is_alphanumeric() || character == '\'' || character == '_' {
            let lower = character.to_lowercase();
            match list.last_mut() {
                Some((_, word)) if end == at => word.extend(lower),
                _ => list.push((offset + at, lower.collect())),
            }
            end = at + character.len_utf8();
        } else if !character.is_whitespace() && !['/', '!', '#', '*'].contains(&character) {
            list.push((offset + at, character.to_string()));
        }
    }
    list
}

/// The parts of `snake_case`, `CamelCase` and `UPPER_CASE`, in lower case.
fn name_parts(name: &str) -> Vec<Word> {
    let mut parts: Vec<Word> = Vec::new();
    let mut previous = '_';
    for (at, character) in name.char_indices() {
        if character != '_' {
            let starts = previous == '_' || (character.is_uppercase() && previous.is_lowercase());
            let lower = character.to_lowercase();
            match parts.last_mut() {
                Some((_, part)) if !starts => part.extend(lower),
                _ => parts.push((at, lower.collect())),
            }
        }
        previous = character;
    }
    parts
}

/// Returns a text of the same length in which Markdown quotations are replaced with spaces.
fn without_quotations(text: &str) -> String {
    text.split_inclusive('\n')
        .map(|line| match line.trim_start().starts_with('>') {
            true => line
                .bytes()
                .map(|byte| if byte == b'\n' { '\n' } else { ' ' })
                .collect(),
            false => line.to_owned(),
        })
        .collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A run of line comments, a block comment, or a string literal.
    Prose,
    Name,
    /// Text that is not searched.
    Code,
}

/// The comments, string literals and identifiers of a source, with their offsets.
fn tokens(source: &str) -> Vec<(usize, Kind, &str)> {
    let mut list = Vec::new();
    let mut at = 0;
    while let Some(first) = source[at..].chars().next() {
        let rest = &source[at..];
        let (length, kind) = if rest.starts_with("//") {
            (comments(rest), Kind::Prose)
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
            (end, Kind::Prose)
        } else if first == '"' {
            (string(rest), Kind::Prose)
        } else if let Some(length) = raw_string(rest) {
            (length, Kind::Prose)
        } else if first == '\'' {
            (character(rest), Kind::Code)
        } else if first.is_alphabetic() || first == '_' {
            let is_part = |other: char| other.is_alphanumeric() || other == '_';
            let length = rest.find(|other| !is_part(other)).unwrap_or(rest.len());
            (length, Kind::Name)
        } else {
            (first.len_utf8(), Kind::Code)
        };
        if kind != Kind::Code {
            list.push((at, kind, &rest[..length]));
        }
        at += length;
    }
    list
}

/// The length of a line comment and of the line comments that directly follow it.
fn comments(rest: &str) -> usize {
    let mut length = 0;
    for line in rest.split_inclusive('\n') {
        if !line.trim_start().starts_with("//") {
            break;
        }
        length += line.len();
    }
    length
}

/// The length of a string literal, its quotes included.
fn string(rest: &str) -> usize {
    let mut escaped = true;
    for (at, character) in rest.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// The length of a raw string literal, if one begins at this position.
fn raw_string(rest: &str) -> Option<usize> {
    let body = rest.strip_prefix('b').unwrap_or(rest).strip_prefix('r')?;
    let hashes = body.bytes().take_while(|&byte| byte == b'#').count();
    let content = body[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let prefix = rest.len() - content.len();
    Some(match content.find(&close) {
        Some(end) => prefix + end + close.len(),
        None => rest.len(),
    })
}

/// The length of a character literal, or of the quote that begins a lifetime.
fn character(rest: &str) -> usize {
    let mut characters = rest.char_indices().skip(1);
    match (characters.next(), characters.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            let from = at + escaped.len_utf8();
            rest[from..]
                .find('\'')
                .map_or(rest.len(), |end| from + end + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const WORDS: &str = "[prose]\nat all [not at all] = delete it\n[names]\ngadget = device\n\
        idle [idle timeout] = unused";

    fn found(text: &str, is_source: bool) -> Vec<(usize, String)> {
        let list = List::parse(WORDS).unwrap();
        let hits = list.search(text, is_source).into_iter();
        hits.map(|hit| (hit.line, hit.found)).collect()
    }

    #[test]
    fn phrases_are_found_across_lines_of_comments_and_of_texts() {
        let source = "fn a() {}\n// Lanes at\n/// all.\n";
        assert_eq!(found(source, true), [(2, "at all".into())]);
        let source = "int a;\n/* Lanes at\n * all. */\n";
        assert_eq!(found(source, true), [(2, "at all".into())]);
        assert_eq!(found("Lanes at\nall.\n", false), [(1, "at all".into())]);
        let script = "run\n# Lanes at\n# all.\n";
        assert_eq!(found(script, false), [(2, "at all".into())]);
    }

    #[test]
    fn names_are_found_in_every_spelling_and_inside_of_strings() {
        let source =
            "struct WorkGadget;\nlet my_gadget = GADGET_SIZE;\nlet gadgets = \"a Gadget\";\n";
        let names = ["WorkGadget", "my_gadget", "GADGET_SIZE", "gadget"];
        assert_eq!(
            found(source, true),
            [(1, names[0]), (2, names[1]), (2, names[2]), (3, names[3])]
                .map(|(line, name)| (line, name.to_owned()))
        );
    }

    #[test]
    fn allowed_phrases_quotations_and_code_are_not_found() {
        assert!(found("// Not at all, and the idle timeout is short.", true).is_empty());
        assert!(found("let idle_timeout = at.all();", true).is_empty());
        assert!(found("> Lanes at all.\n", false).is_empty());
        assert_eq!(found("// An idle lane.", true).len(), 1);
    }

    #[test]
    fn literals_end_where_rust_ends_them() {
        let source = "let a = ['\"', '\\'', '\\\\']; let b: &'a str = r#\"gadget \" at all\"#; let c = b\"\\\"gadget\"; // at all";
        let found: Vec<_> = found(source, true)
            .into_iter()
            .map(|(_, hit)| hit)
            .collect();
        assert_eq!(found, ["gadget", "at all", "gadget", "at all"]);
    }

    #[test]
    fn a_line_that_is_not_an_entry_is_refused() {
        for text in [
            "gadget = device",
            "[prose]\ngadget",
            "[prose]\n= device",
            "[names]\ngadget [a = b",
        ] {
            assert!(List::parse(text).is_err(), "{text}");
        }
    }
}
