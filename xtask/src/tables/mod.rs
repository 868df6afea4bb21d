//! `cargo xtask tables`: writes the tables with measurements into README and `docs/`.
//!
//! - `kept`: the results, files of JSON lines.
//! - `keep`: `cargo xtask keep`, which makes a file of results from the output of a benchmark.
//! - `layout`: the tables of each page; `evacuate`, `growth`, `scaling`, `status` and `tunnel`
//!   compute some of them, and `cells` writes their cells.
//! - `report`: `cargo xtask report`, which plots JSON lines.
//!
//! Each table lies between two comments, which name the table and its files. This command replaces
//! the lines between the comments, or only compares them if `--check` is given.

mod cells;
mod evacuate;
mod growth;
pub mod keep;
mod kept;
mod layout;
pub mod report;
mod scaling;
mod status;
mod tunnel;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;

use self::kept::Kept;
use self::layout::{Cells, TABLES, Table};

/// The maximum length of the lines that precede a table.
const WIDTH: usize = 110;
/// The beginning of a comment before a table.
const BEGIN: &str = "<!-- table ";

/// What to do with the tables.
#[derive(Args, Debug)]
pub struct TablesOptions {
    /// Changes no page, and fails if a page differs from the kept results.
    #[arg(long)]
    check: bool,
}

/// Writes or checks the tables of all pages.
pub(crate) fn command(options: &TablesOptions) -> Result<ExitCode> {
    let root = Path::new(".");
    let mut outdated = 0;
    for page in pages() {
        let text =
            fs::read_to_string(root.join(page)).with_context(|| format!("cannot read {page}"))?;
        let (new, differences) = updated(root, page, &text)?;
        outdated += differences.len();
        for difference in &differences {
            print!("{difference}");
        }
        if new != text && !options.check {
            fs::write(root.join(page), new).with_context(|| format!("cannot write {page}"))?;
        }
    }
    println!(
        "{outdated} of {} tables differed from the kept results",
        TABLES.len()
    );
    Ok(match options.check && outdated > 0 {
        true => {
            println!("`cargo xtask tables` writes them from the kept results");
            ExitCode::FAILURE
        }
        false => ExitCode::SUCCESS,
    })
}

/// The pages with tables, each once.
fn pages() -> Vec<&'static str> {
    let mut pages: Vec<_> = TABLES.iter().map(|table| table.page).collect();
    pages.dedup();
    pages
}

/// Returns the page's text with the tables for the kept results, and the differences of each
/// outdated table.
fn updated(root: &Path, page: &str, text: &str) -> Result<(String, Vec<String>)> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let mut differences = Vec::new();
    let tables: Vec<_> = TABLES.iter().filter(|table| table.page == page).collect();
    for (at, line) in lines.iter().enumerate() {
        if let Some(name) = line.strip_prefix(BEGIN) {
            let name = name.split(':').next().unwrap_or_default();
            ensure!(
                tables.iter().any(|table| table.name == name),
                "{page}:{}: no table has the name {name}",
                at + 1
            );
        }
    }
    for table in tables {
        let wanted = block(root, table)?;
        let (begin, end) = (format!("{BEGIN}{}:", table.name), end(table));
        let place = |comment: &str| -> Result<usize> {
            let found = |line: &String| line.starts_with(comment);
            let at = lines.iter().position(found);
            at.with_context(|| format!("{page}: the line `{comment}` is missing"))
        };
        let (first, last) = (place(&begin)?, place(&end)?);
        ensure!(
            first < last,
            "{page}:{}: the line `{end}` must be below this line",
            first + 1
        );
        let present = &lines[first..=last];
        if present != wanted {
            let difference = difference(first + 1, present, &wanted);
            differences.push(format!("{page}: table {}\n{difference}", table.name));
            lines.splice(first..=last, wanted);
        }
    }
    let mut new = lines.join("\n");
    new.push('\n');
    Ok((new, differences))
}

fn end(table: &Table) -> String {
    format!("<!-- end of table {} -->", table.name)
}

/// The lines of a table, including the comments around it.
fn block(root: &Path, table: &Table) -> Result<Vec<String>> {
    let kept = table.results.iter().map(|name| Kept::read(root, name));
    let kept = kept.collect::<Result<Vec<_>>>()?;
    let cells = (table.cells)(&kept).with_context(|| format!("table {}", table.name))?;
    let files = match table.results {
        [file] => kept::path(file),
        files => kept::path(&format!("{{{}}}", files.join(","))),
    };
    let mut lines = vec![
        format!(
            "{BEGIN}{}: from {files}, by `cargo xtask tables` -->",
            table.name
        ),
        String::new(),
    ];
    if table.has_conditions {
        for run in &kept {
            // If there are several runs, their conditions are a list.
            let (first, next) = match kept.len() {
                1 => ("", ""),
                _ => ("- ", "  "),
            };
            lines.extend(wrapped(&conditions(run)?, first, next));
        }
        lines.push(String::new());
    }
    lines.extend(markdown(&cells));
    lines.extend([String::new(), end(table)]);
    Ok(lines)
}

/// A text with the command, the host, the date, the conditions and the number of rounds of a run.
fn conditions(kept: &Kept) -> Result<String> {
    let run = &kept.run;
    let commit = run.commit.as_ref();
    let commit = commit.map_or_else(String::new, |commit| format!(", commit {commit}"));
    Ok(format!(
        "`{}` on {}, {}{commit}: {}, {}.",
        run.command,
        run.machine,
        run.date,
        run.conditions,
        kept.rounds()?
    ))
}

/// Breaks a text into lines.
fn wrapped(text: &str, first: &str, next: &str) -> Vec<String> {
    let mut lines = vec![first.to_owned()];
    let mut is_empty = true;
    for word in text.split(' ') {
        let line = lines
            .last_mut()
            .filter(|line| is_empty || line.chars().count() + 1 + word.chars().count() <= WIDTH);
        match line {
            Some(line) => {
                if !is_empty {
                    line.push(' ');
                }
                line.push_str(word);
            }
            None => lines.push(format!("{next}{word}")),
        }
        is_empty = false;
    }
    lines
}

fn markdown(cells: &Cells) -> Vec<String> {
    let line = |cells: &[String]| {
        let cells = cells.iter().map(|cell| match cell.as_str() {
            "" => " ".to_owned(),
            cell => format!(" {cell} "),
        });
        format!("|{}|", cells.collect::<Vec<_>>().join("|"))
    };
    let mut lines: Vec<_> = cells.iter().map(|cells| line(cells)).collect();
    let columns = cells.first().map_or(0, Vec::len);
    lines.insert(1, line(&vec!["---".to_owned(); columns]));
    lines
}

/// The lines that differ, with the number of the first one in the page.
fn difference(from: usize, present: &[String], wanted: &[String]) -> String {
    let both = present.iter().zip(wanted);
    let before = both.take_while(|(one, other)| one == other).count();
    let (present, wanted) = (&present[before..], &wanted[before..]);
    let both = present.iter().rev().zip(wanted.iter().rev());
    let after = both.take_while(|(one, other)| one == other).count();
    let mut text = format!("@@ line {} @@\n", from + before);
    for (mark, lines) in [('-', present), ('+', wanted)] {
        for line in &lines[..lines.len() - after] {
            text += &format!("{mark}{line}\n");
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
    }

    fn read(page: &str) -> String {
        fs::read_to_string(root().join(page)).unwrap()
    }

    #[test]
    fn the_pages_are_what_the_kept_results_give() {
        for page in pages() {
            let text = read(page);
            let (new, differences) = updated(root(), page, &text).unwrap();
            assert_eq!(differences, [""; 0]);
            assert_eq!(new, text);
        }
    }

    #[test]
    fn a_wrong_figure_is_found_in_every_table_and_replaced() {
        for table in &TABLES {
            let text = read(table.page);
            let wanted = block(root(), table).unwrap();
            // The last row of the table.
            let row = &wanted[wanted.len() - 3];
            let at = row.rfind(|one: char| one.is_ascii_digit()).unwrap();
            let digit = if &row[at..=at] == "7" { "8" } else { "7" };
            let wrong = format!("{}{digit}{}", &row[..at], &row[at + 1..]);
            let changed = text.replacen(row, &wrong, 1);
            assert_ne!(changed, text, "{}", table.name);
            let (new, differences) = updated(root(), table.page, &changed).unwrap();
            assert_eq!(new, text);
            let line = 1 + text.lines().position(|line| line == row).unwrap();
            let (page, name) = (table.page, table.name);
            let difference = format!("{page}: table {name}\n@@ line {line} @@\n-{wrong}\n+{row}\n");
            assert_eq!(differences, [difference]);
        }
    }

    #[test]
    fn a_page_without_the_comments_of_its_table_is_an_error() {
        let page = "docs/benchmarking/connections.md";
        let text = read(page);
        let error = |text: &str| updated(root(), page, text).unwrap_err().to_string();
        let other = text.replace("<!-- table connections:", "<!-- table other:");
        assert!(error(&other).ends_with("no table has the name other"));
        let none = text.replace("<!-- table connections:", "<!-- connections:");
        assert!(error(&none).contains("`<!-- table connections:` is missing"));
        let endless = text.replace("<!-- end of table", "<!-- ends: table");
        assert!(error(&endless).contains("`<!-- end of table connections -->` is missing"));
    }

    #[test]
    fn a_difference_has_only_the_lines_that_differ() {
        let lines = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let text = difference(10, &lines("a b c d"), &lines("a x d"));
        assert_eq!(text, "@@ line 11 @@\n-b\n-c\n+x\n");
        let text = difference(10, &lines("a a"), &lines("a a a"));
        assert_eq!(text, "@@ line 12 @@\n+a\n");
    }
}
