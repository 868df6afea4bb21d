//! The book: checks the links of all pages and builds `docs/` with mdBook.
//!
//! mdBook does not check links, so this task does. Each relative link must lead to a file. A link
//! with `#` must lead to a heading of that file. A page of the book must link only to files of the
//! book, and `docs/SUMMARY.md` must list each page.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

use crate::words::collect;

/// The folder of the book's pages, and its table of contents.
const BOOK: &str = "docs";
const SUMMARY: &str = "docs/SUMMARY.md";
/// The decisions, which [`collect`] leaves out.
const DECISIONS: &str = "docs/decisions";

/// Checks the links, then builds the book into `target/book`. Fails if there is a broken link or a
/// warning from mdBook.
pub(crate) fn command() -> Result<ExitCode> {
    let mut files = Vec::new();
    for folder in [".", DECISIONS] {
        collect(Path::new(folder), &mut files)?;
    }
    let mut pages = Pages::default();
    for file in files {
        if file.extension().is_some_and(|extension| extension == "md") {
            let text = fs::read_to_string(&file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let text = included(&file, &text)?;
            pages.add(&normal(&file), &text);
        }
    }
    let broken = pages.broken(|path| path.exists());
    for text in &broken {
        println!("{text}");
    }
    println!("{} broken links in {} pages", broken.len(), pages.0.len());
    if !broken.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    build()?;
    Ok(ExitCode::SUCCESS)
}

/// Runs mdBook.
fn build() -> Result<()> {
    let built = Command::new("mdbook").arg("build").output();
    let built = built.context("mdbook is missing: `make book` installs it")?;
    let text = String::from_utf8_lossy(&built.stderr);
    eprint!("{text}");
    ensure!(
        built.status.success() && !text.contains("WARN") && !text.contains("ERROR"),
        "mdBook reported a warning or an error"
    );
    Ok(())
}

/// A page's text, in which each include directive of mdBook is replaced with the included
/// file.
fn included(file: &Path, text: &str) -> Result<String> {
    let mut whole = String::new();
    for line in text.lines() {
        let path = line
            .strip_prefix("{{#include ")
            .and_then(|rest| rest.strip_suffix("}}"));
        match path {
            Some(path) => {
                let path = file.with_file_name(path);
                whole += &fs::read_to_string(&path).with_context(|| {
                    format!("{}: cannot read {}", file.display(), path.display())
                })?;
            }
            None => whole += line,
        }
        whole.push('\n');
    }
    Ok(whole)
}

/// All pages, by their paths.
#[derive(Debug, Default)]
struct Pages(BTreeMap<PathBuf, Page>);

#[derive(Debug, Default)]
struct Page {
    /// The ids of the headings.
    anchors: BTreeSet<String>,
    /// Line numbers, counted from 1, and targets.
    links: Vec<(usize, String)>,
}

impl Pages {
    fn add(&mut self, path: &Path, text: &str) {
        self.0.insert(path.to_owned(), Page::parse(text));
    }

    /// The broken links, and the pages of the book that its table of contents does not list.
    fn broken(&self, exists: impl Fn(&Path) -> bool) -> Vec<String> {
        let mut broken = Vec::new();
        let mut listed = BTreeSet::from([PathBuf::from(SUMMARY)]);
        for (path, page) in &self.0 {
            for (line, target) in &page.links {
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
                let to = match file {
                    "" => path.clone(),
                    file => normal(&path.with_file_name(file)),
                };
                let known = self.0.get(&to);
                let why = if !exists(&to) {
                    "no such file"
                } else if !anchor.is_empty() && known.is_none_or(|to| !to.anchors.contains(anchor))
                {
                    "no such heading"
                } else if path.starts_with(BOOK) && !to.starts_with(BOOK) {
                    "leads out of the book"
                } else {
                    if path == Path::new(SUMMARY) {
                        listed.insert(to);
                    }
                    continue;
                };
                broken.push(format!("{}:{line}: {target}: {why}", path.display()));
            }
        }
        let pages = self.0.keys().filter(|path| path.starts_with(BOOK));
        for path in pages.filter(|&path| !listed.contains(path)) {
            broken.push(format!("{}: not listed in {SUMMARY}", path.display()));
        }
        broken
    }
}

impl Page {
    fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let mut is_code = false;
        for (number, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                is_code = !is_code;
            } else if is_code {
            } else if let Some(heading) = line.strip_prefix('#') {
                page.add_anchor(heading.trim_start_matches('#').trim());
            } else {
                // Skip every second part, because it is a code span.
                for prose in line.split('`').step_by(2) {
                    let targets = prose.split("](").skip(1);
                    let targets = targets.filter_map(|rest| rest.split_once(')'));
                    page.links
                        .extend(targets.map(|(target, _)| (number + 1, target.to_owned())));
                }
            }
        }
        page
    }

    /// Adds a heading's id in the form that mdBook and code hosting sites generate: a
    /// repeated heading gets a number.
    fn add_anchor(&mut self, heading: &str) {
        let id: String = heading
            .chars()
            .filter_map(|character| match character {
                ' ' => Some('-'),
                '-' | '_' => Some(character),
                _ if character.is_alphanumeric() => Some(character.to_ascii_lowercase()),
                _ => None,
            })
            .collect();
        let numbered = (1..).map(|number| format!("{id}-{number}"));
        let mut free = [id.clone()].into_iter().chain(numbered);
        let free = free.find(|id| !self.anchors.contains(id));
        self.anchors.extend(free);
    }
}

/// The path without `.` and `..`, relative to the workspace.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            other => normal.push(other),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(pages: &[(&str, &str)]) -> Vec<String> {
        let mut all = Pages::default();
        for (path, text) in pages {
            all.add(Path::new(path), text);
        }
        all.broken(|path| pages.iter().any(|&(page, _)| path == Path::new(page)))
    }

    #[test]
    fn links_lead_to_files_and_headings_of_the_book() {
        let summary = ("docs/SUMMARY.md", "- [A](a.md)\n- [B](b/b.md)\n");
        let b = (
            "docs/b/b.md",
            "# B\n## What `--x` does, and why\n## Twice\n## Twice\n[a](../a.md)\n",
        );
        let page = |line: &'static str| [summary, b, ("docs/a.md", line), ("README.md", "# R\n")];
        for good in [
            "[b](b/b.md), `[no](none.md)`, [c](https://example.com/x)\n```\n[no](none.md)\n```\n",
            "[b](b/b.md#what---x-does-and-why) and [b](b/b.md#twice-1)\n",
            "# Here\n[x](#here)\n",
        ] {
            assert_eq!(broken(&page(good)), [""; 0], "{good}");
        }
        for (bad, why) in [
            ("[b](b.md)\n", "docs/a.md:1: b.md: no such file"),
            (
                "\n[b](b/b.md#none)\n",
                "docs/a.md:2: b/b.md#none: no such heading",
            ),
            ("[x](#here)\n", "docs/a.md:1: #here: no such heading"),
            (
                "[r](../README.md)\n",
                "docs/a.md:1: ../README.md: leads out of the book",
            ),
        ] {
            assert_eq!(broken(&page(bad)), [why]);
        }
    }

    #[test]
    fn each_page_is_listed() {
        let pages = [
            ("docs/SUMMARY.md", "[A](a.md)\n"),
            ("docs/a.md", "[b](b.md)\n"),
            ("docs/b.md", "# B\n"),
        ];
        assert_eq!(broken(&pages), ["docs/b.md: not listed in docs/SUMMARY.md"]);
    }
}
