//! Kept results: files of JSON lines in `docs/benchmarking/results/`.
//!
//! The first line of a file describes the run. The other lines are the unchanged output of a
//! benchmark's `--json`: one object for each set of conditions. A figure has the fields `NAME`,
//! `NAME_min` and `NAME_max`. A figure without a range has only `NAME`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The folder of the files, relative to the workspace.
pub(super) const FOLDER: &str = "docs/benchmarking/results";

/// The description of a run, from the first line of its file.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Run {
    /// The day of the run, as in 2026-11-25.
    pub(super) date: String,
    /// Dunlin's commit, if it was recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) commit: Option<String>,
    pub(super) machine: String,
    /// Size of the guest, other load, and everything else that is not in the lines.
    pub(super) conditions: String,
    pub(super) command: String,
    /// A remark for readers of the file; not in the pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<String>,
}

/// The first line of a file.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub(super) run: Run,
}

/// One file.
#[derive(Debug)]
pub(super) struct Kept {
    /// The file's name without folder and extension.
    pub(super) name: String,
    pub(super) run: Run,
    pub(super) rows: Vec<Row>,
}

/// A line with measurements.
#[derive(Debug)]
pub(super) struct Row {
    /// The file and the number of the line.
    pub(super) place: String,
    pub(super) fields: Map<String, Value>,
}

/// A figure of a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) median: f64,
    /// The smallest and the largest value of all rounds, if the line has them.
    pub(super) range: Option<(f64, f64)>,
}

/// The path of the file with this name.
pub(super) fn path(name: &str) -> String {
    format!("{FOLDER}/{name}.jsonl")
}

impl Kept {
    /// Reads the file with this name from the folder of results of the workspace at `root`.
    pub(super) fn read(root: &Path, name: &str) -> Result<Self> {
        let path = path(name);
        let text =
            fs::read_to_string(root.join(&path)).with_context(|| format!("cannot read {path}"))?;
        Self::parse(name, &text)
    }

    /// Parses the text of the file with this name.
    pub(super) fn parse(name: &str, text: &str) -> Result<Self> {
        let path = path(name);
        let first = text.lines().next().unwrap_or_default();
        let Header { run } = serde_json::from_str(first).with_context(|| {
            format!("{path}:1: no description of the run, which `cargo xtask keep` writes")
        })?;
        let rows = rows(&path, text, 1)?;
        ensure!(!rows.is_empty(), "{path}: no measurements");
        let name = name.to_owned();
        Ok(Self { name, run, rows })
    }

    /// The only line with these conditions.
    pub(super) fn row(&self, conditions: &[(&str, Value)]) -> Result<&Row> {
        let mut found = self.rows.iter().filter(|row| row.has(conditions));
        match (found.next(), found.next()) {
            (Some(row), None) => Ok(row),
            (None, _) => bail!("{}: no line has {}", path(&self.name), listed(conditions)),
            (Some(first), Some(second)) => bail!(
                "{} and {} both have {}",
                first.place,
                second.place,
                listed(conditions)
            ),
        }
    }

    /// The lines with these conditions.
    pub(super) fn select<'a>(&'a self, conditions: &[(&str, Value)]) -> Vec<&'a Row> {
        let rows = self.rows.iter();
        rows.filter(|row| row.has(conditions)).collect()
    }

    /// The number of rounds, as a range if the lines differ.
    pub(super) fn rounds(&self) -> Result<String> {
        let counts = self
            .rows
            .iter()
            .map(|row| match row.fields.contains_key("round") {
                // A line with the field `round` has the results of only that round. Below, the
                // largest round of all lines is the number of rounds.
                true => row.number("round"),
                false => row.number("rounds"),
            });
        let mut counts = counts.collect::<Result<Vec<_>>>()?;
        if self.rows.iter().any(|row| row.fields.contains_key("round")) {
            counts = counts.into_iter().max().into_iter().collect();
        }
        Ok(match (counts.iter().min(), counts.iter().max()) {
            (Some(least), Some(most)) if least != most => format!("{least}–{most} rounds"),
            (Some(1), _) => "1 round".to_owned(),
            (Some(count), _) => format!("{count} rounds"),
            (None, _) => String::new(),
        })
    }
}

/// The lines of a benchmark's output, after the first `skipped` lines of the text.
pub(super) fn rows(path: &str, text: &str, skipped: usize) -> Result<Vec<Row>> {
    let lines = text.lines().enumerate().skip(skipped);
    let mut rows = Vec::new();
    for (number, line) in lines {
        let place = format!("{path}:{}", number + 1);
        let fields: Map<String, Value> =
            serde_json::from_str(line).with_context(|| format!("{place}: not a JSON object"))?;
        let row = Row { place, fields };
        row.check()?;
        rows.push(row);
    }
    Ok(rows)
}

fn listed(conditions: &[(&str, Value)]) -> String {
    let conditions = conditions.iter();
    let conditions: Vec<_> = conditions
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    conditions.join(", ")
}

impl Row {
    /// Checks the fields that every line of the harness has, and the ranges of the figures.
    fn check(&self) -> Result<()> {
        self.text("scenario")?;
        self.text("variant")?;
        ensure!(self.number("rounds")? > 0, "{}: rounds is 0", self.place);
        for name in self.fields.keys() {
            for suffix in ["_min", "_max"] {
                if let Some(figure) = name.strip_suffix(suffix) {
                    self.figure(figure)?
                        .with_context(|| format!("{}: has {name} but no {figure}", self.place))?;
                }
            }
        }
        Ok(())
    }

    fn has(&self, conditions: &[(&str, Value)]) -> bool {
        let mut conditions = conditions.iter();
        conditions.all(|(name, value)| self.fields.get(*name) == Some(value))
    }

    /// The value of a condition that is a text.
    pub(super) fn text(&self, name: &str) -> Result<&str> {
        let text = self.fields.get(name).and_then(Value::as_str);
        text.with_context(|| format!("{}: {name} is missing or not a text", self.place))
    }

    /// The value of a condition that is a whole number.
    pub(super) fn number(&self, name: &str) -> Result<u64> {
        let number = self.fields.get(name).and_then(Value::as_u64);
        number.with_context(|| format!("{}: {name} is missing or not a whole number", self.place))
    }

    /// A figure; `None` if the line does not have it.
    pub(super) fn figure(&self, name: &str) -> Result<Option<Figure>> {
        let part = |suffix: &str| -> Result<Option<f64>> {
            let name = format!("{name}{suffix}");
            let Some(value) = self.fields.get(&name) else {
                return Ok(None);
            };
            let value = value.as_f64();
            let value = value.with_context(|| format!("{}: {name} is not a number", self.place));
            value.map(Some)
        };
        let Some(median) = part("")? else {
            return Ok(None);
        };
        let range = match (part("_min")?, part("_max")?) {
            (None, None) => None,
            (Some(min), Some(max)) => {
                ensure!(
                    min <= median && median <= max,
                    "{}: {name} {median} is not between its minimum {min} and its maximum {max}",
                    self.place
                );
                Some((min, max))
            }
            _ => bail!("{}: {name} has only one end of its range", self.place),
        };
        Ok(Some(Figure { median, range }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    const RUN: &str =
        r#"{"run":{"date":"2026-11-25","machine":"m","conditions":"c","command":"d"}}"#;
    const GOOD: &str = r#"{"scenario":"lanes","variant":"tls","lanes":2,"rounds":5,"gib_per_s":2.5,"gib_per_s_min":2.0,"gib_per_s_max":3.0,"cpu_s_per_gib":0.7}"#;

    fn error(lines: &[&str]) -> String {
        let parsed = Kept::parse("name", &lines.join("\n"));
        format!("{:#}", parsed.unwrap_err())
    }

    #[test]
    fn lines_of_the_harness_are_read_as_they_are() {
        let mut results = dunlin_bench::Results::default();
        for value in [3.0, 1.0, 2.5] {
            let line = results.line("lanes", "tls").with("lanes", 2);
            line.figure("gib_per_s", value).add();
        }
        let text = format!("{RUN}\n{}\n", results.json()[0]);
        let kept = Kept::parse("name", &text).unwrap();
        let row = kept.row(&[("variant", json!("tls")), ("lanes", json!(2))]);
        let figure = row.unwrap().figure("gib_per_s").unwrap();
        let range = Some((1.0, 3.0));
        assert_eq!(figure, Some(Figure { median: 2.5, range }));
        assert_eq!(kept.rounds().unwrap(), "3 rounds");
    }

    #[test]
    fn a_malformed_line_is_named_by_its_file_and_number() {
        let at = |line: &str| error(&[RUN, GOOD, line]);
        for (bad, reason) in [
            ("{", "not a JSON object"),
            ("\n", "not a JSON object"),
            ("[1]", "not a JSON object"),
            (
                &GOOD.replace("\"variant\":\"tls\",", ""),
                "variant is missing",
            ),
            (&GOOD.replace("\"rounds\":5", "\"rounds\":0"), "rounds is 0"),
            (
                &GOOD.replace("\"rounds\":5", "\"rounds\":1.5"),
                "rounds is missing or not",
            ),
            (&GOOD.replace("_min\":2.0", "_min\":2.6"), "is not between"),
            (&GOOD.replace(",\"gib_per_s_max\":3.0", ""), "only one end"),
            (&GOOD.replace("\"gib_per_s\":2.5,", ""), "no gib_per_s"),
            (
                &GOOD.replace("\"gib_per_s\":2.5", "\"gib_per_s\":\"2.5\""),
                "not a number",
            ),
        ] {
            let error = at(bad);
            assert!(
                error.starts_with("docs/benchmarking/results/name.jsonl:3"),
                "{error}"
            );
            assert!(error.contains(reason), "{error}");
        }
        assert!(
            error(&[GOOD]).starts_with("docs/benchmarking/results/name.jsonl:1: no description")
        );
        assert!(error(&[RUN]).contains("no measurements"));
    }

    #[test]
    fn a_lookup_needs_exactly_one_line() {
        let kept = Kept::parse("name", &[RUN, GOOD, GOOD].join("\n")).unwrap();
        let error = |lanes: u64| {
            kept.row(&[("lanes", json!(lanes))])
                .unwrap_err()
                .to_string()
        };
        assert!(error(2).contains("name.jsonl:2 and docs/benchmarking/results/name.jsonl:3 both"));
        assert!(error(3).ends_with("name.jsonl: no line has lanes 3"));
    }
}
