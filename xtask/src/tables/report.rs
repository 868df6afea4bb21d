//! `cargo xtask report`: writes a page with plots from JSON lines, as a benchmark's
//! `--report` does.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use dunlin_bench::{Results, report};
use serde_json::Value;

use super::kept::{self, Header, Row, Run};

/// What to plot.
#[derive(Args, Debug)]
pub struct ReportOptions {
    /// JSON lines: kept results, or the output of a benchmark's `--json`.
    results: PathBuf,
    /// The page to write.
    file: PathBuf,
}

/// Writes the page.
pub(crate) fn command(options: &ReportOptions) -> Result<ExitCode> {
    let path = options.results.display().to_string();
    let text =
        fs::read_to_string(&options.results).with_context(|| format!("cannot read {path}"))?;
    let page = page(&path, &text)?;
    fs::write(&options.file, page)
        .with_context(|| format!("cannot write {}", options.file.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// The page of a file. The description of the run, if the file has one, precedes the plots.
fn page(path: &str, text: &str) -> Result<String> {
    let first = text.lines().next().unwrap_or_default();
    let header = serde_json::from_str::<Header>(first).ok();
    let rows = kept::rows(path, text, usize::from(header.is_some()))?;
    ensure!(!rows.is_empty(), "{path} has no results");
    let mut results = Results::default();
    for row in &rows {
        add(row, &mut results)?;
    }
    let page = report::page(&results);
    Ok(match header {
        None => page,
        Some(Header { run }) => {
            page.replacen("</h1>\n", &format!("</h1>\n{}", description(&run)), 1)
        }
    })
}

/// Adds a row to the results, which compute medians and ranges from single measurements. If a
/// figure of the row has a range, adds three measurements: the medians, the minima and the maxima.
/// The results then have the row's medians and ranges.
fn add(row: &Row, results: &mut Results) -> Result<()> {
    let mut figures = Vec::new();
    for (name, value) in &row.fields {
        let is_range = name.ends_with("_min") || name.ends_with("_max");
        if value.is_f64() && !is_range {
            figures.extend(row.figure(name)?.map(|figure| (name, figure)));
        }
    }
    let has_range = figures.iter().any(|(_, figure)| figure.range.is_some());
    for turn in 0..if has_range { 3 } else { 1 } {
        let mut line = results.line(row.text("scenario")?, row.text("variant")?);
        for (name, value) in &row.fields {
            line = match value {
                Value::Array(_) | Value::Object(_) => line.detail(name, value.clone()),
                Value::Number(number) if number.is_f64() => line,
                condition => line.with(name, condition.clone()),
            };
        }
        for (name, figure) in &figures {
            let value = match (turn, figure.range) {
                (0, _) => figure.median,
                (1, Some((min, _))) => min,
                (2, Some((_, max))) => max,
                _ => continue,
            };
            // Leak the name, which is harmless: this program ends soon, and there are few names.
            line = line.figure(name.to_string().leak(), value);
        }
        line.add();
    }
    Ok(())
}

fn description(run: &Run) -> String {
    let commit = run.commit.as_deref().unwrap_or("not recorded");
    let text = [
        ("Date", run.date.as_str()),
        ("Commit", commit),
        ("Machine", &run.machine),
        ("Conditions", &run.conditions),
        ("Command", &run.command),
        ("Note", run.note.as_deref().unwrap_or_default()),
    ];
    let lines = text.into_iter().filter(|(_, text)| !text.is_empty());
    let lines = lines.map(|(name, text)| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        format!("<li>{name}: {text}</li>\n")
    });
    format!("<ul>\n{}</ul>\n", lines.collect::<String>())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tables::kept::Kept;
    use std::collections::BTreeMap;
    use std::path::Path;

    /// An element's start tag.
    #[derive(Debug)]
    struct Tag {
        name: String,
        attributes: BTreeMap<String, String>,
        /// The names of the elements around it.
        within: Vec<String>,
    }

    impl Tag {
        fn number(&self, name: &str) -> f64 {
            self.attributes[name].parse().unwrap()
        }
    }

    /// Parses a page. All its elements must be closed, except those that HTML never closes.
    fn parse(page: &str) -> Vec<Tag> {
        let page = page.strip_prefix("<!doctype html>\n").unwrap();
        let (mut tags, mut open) = (Vec::new(), Vec::<String>::new());
        for piece in page.split('<').skip(1) {
            let (tag, text) = piece.split_once('>').unwrap();
            assert!(!text.contains('>'), "{piece}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "{piece}");
                continue;
            }
            let is_closed = tag.ends_with('/');
            let tag = tag.trim_end_matches('/');
            let (name, mut rest) = tag.split_once(' ').unwrap_or((tag, ""));
            let mut attributes = BTreeMap::new();
            while let Some((attribute, value)) = rest.trim_start().split_once("=\"") {
                let (value, after) = value.split_once('"').unwrap();
                let twice = attributes.insert(attribute.to_owned(), value.to_owned());
                assert_eq!(twice, None, "{piece}");
                rest = after;
            }
            assert_eq!(rest.trim(), "", "{piece}");
            tags.push(Tag {
                name: name.to_owned(),
                attributes,
                within: open.clone(),
            });
            if !is_closed && name != "meta" {
                open.push(name.to_owned());
            }
        }
        assert_eq!(open, [""; 0]);
        tags
    }

    fn kept(name: &str) -> (String, String) {
        let path = kept::path(name);
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let text = fs::read_to_string(root.join(&path)).unwrap();
        (path, text)
    }

    #[test]
    fn a_page_has_a_plot_of_each_figure_with_every_range_in_it() {
        let (path, text) = kept("whole");
        let page = page(&path, &text).unwrap();
        let tags = parse(&page);
        let rows = Kept::parse("whole", &text).unwrap().rows;
        for figure in ["gib_per_s", "cpu_s_per_gib", "total_s", "downtime_ms"] {
            let label = format!("{figure} by variant");
            let is_plot = |tag: &Tag| tag.attributes.get("aria-label") == Some(&label);
            let begin = tags.iter().position(is_plot).unwrap();
            let plot = tags[begin + 1..].iter();
            let plot: Vec<_> = plot
                .take_while(|tag| tag.within.contains(&"svg".to_owned()))
                .collect();
            let dots: Vec<_> = plot.iter().filter(|tag| tag.name == "circle").collect();
            let ranges: Vec<_> = plot
                .iter()
                .filter(|tag| tag.attributes.contains_key("stroke-width"))
                .collect();
            let figures: Vec<_> = rows
                .iter()
                .filter_map(|row| row.figure(figure).unwrap())
                .collect();
            assert_eq!((dots.len(), ranges.len()), (figures.len(), figures.len()));
            // Derive the scale of the plot from the largest median.
            let most = figures.iter().max_by(|a, b| a.median.total_cmp(&b.median));
            let most = figures.iter().position(|one| Some(one) == most).unwrap();
            let is_axis =
                |tag: &&&Tag| tag.attributes.get("stroke") == Some(&"currentColor".into());
            let start = plot.iter().find(is_axis).unwrap().number("x1");
            let scale = (dots[most].number("cx") - start) / figures[most].median;
            for ((dot, range), figure) in dots.iter().zip(ranges).zip(figures) {
                let at = |value: f64| start + scale * value;
                let (min, max) = figure.range.unwrap_or((figure.median, figure.median));
                for (is, wanted) in [
                    (dot.number("cx"), figure.median),
                    (range.number("x1"), min),
                    (range.number("x2"), max),
                ] {
                    assert!((is - at(wanted)).abs() < 0.5, "{is} {wanted} {figure:?}");
                }
            }
        }
    }

    #[test]
    fn a_page_has_the_command_and_the_range_of_each_figure_that_has_one() {
        let (path, text) = kept("thrash");
        let page = page(&path, &text).unwrap();
        assert!(page.contains("<li>Command: dunlin bench thrash --rounds 2</li>"));
        assert!(page.contains("<td>0.240 [0.170–0.310]</td>"));
        // A figure without a range is only its median.
        assert!(page.contains("<td>6.90</td>"));
    }

    #[test]
    fn the_pages_of_all_kept_results_parse_and_need_no_network() {
        for table in &crate::tables::TABLES {
            for name in table.results {
                let (path, text) = kept(name);
                let page = page(&path, &text).unwrap();
                let tags = parse(&page);
                assert!(tags.iter().any(|tag| tag.name == "td"), "{name}");
                for tag in tags {
                    assert!(!["script", "link", "img"].contains(&&*tag.name), "{name}");
                    let refers = |name: &str| tag.attributes.contains_key(name);
                    assert!(!refers("href") && !refers("src"), "{name}: {tag:?}");
                }
            }
        }
    }

    #[test]
    fn the_output_of_a_benchmark_makes_its_own_report_again() {
        let mut results = Results::default();
        for value in [1.0, 2.0, 4.0] {
            let line = results.line("whole", "<dunlin>").with("lanes", 2);
            let line = line.figure("total_s", value);
            let pass = serde_json::json!({"duration_ms": 5.0, "pages": 10, "dirtied_pages": 4});
            line.detail("last_round", vec![pass]).add();
        }
        let lines = format!("{}\n", results.json()[0]);
        assert_eq!(page("lines", &lines).unwrap(), report::page(&results));
        let error = page("lines", "no\n").unwrap_err();
        assert!(format!("{error:#}").starts_with("lines:1: not a JSON object"));
    }
}
