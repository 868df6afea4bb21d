//! Measurements, grouped by their conditions.

use serde_json::{Map, Value, json};

/// All measurements of a benchmark, in the order in which their conditions first occurred.
#[derive(Debug, Default)]
pub struct Results(pub(crate) Vec<Row>);

/// The measurements under the same conditions.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) conditions: Map<String, Value>,
    pub(crate) figures: Vec<(&'static str, Vec<f64>)>,
    pub(crate) details: Map<String, Value>,
}

/// The measurements of one run of a variant, to be added to the results.
#[derive(Debug)]
#[must_use = "a line is part of the results only after `add`"]
pub struct Line<'a> {
    results: &'a mut Results,
    row: Row,
}

/// The median of a figure and its range. For an even number of values, the median is the mean of
/// the two middle values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Results {
    /// Starts a line for one run of `variant` in `scenario`.
    pub fn line(&mut self, scenario: &str, variant: &str) -> Line<'_> {
        let row = Row {
            conditions: Map::new(),
            figures: Vec::new(),
            details: Map::new(),
        };
        let line = Line { results: self, row };
        line.with("scenario", scenario).with("variant", variant)
    }

    /// Returns one object for each set of conditions. It contains the conditions, each figure as
    /// `NAME`, `NAME_min` and `NAME_max`, the number of rounds, and the details of the last run.
    #[must_use]
    pub fn json(&self) -> Vec<Value> {
        self.0.iter().map(Row::json).collect()
    }
}

impl Line<'_> {
    /// Adds a condition of the measurement.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.row.conditions.insert(name.to_owned(), value.into());
        self
    }

    /// Adds a measured figure.
    pub fn figure(mut self, name: &'static str, value: f64) -> Self {
        self.row.figures.push((name, vec![value]));
        self
    }

    /// Adds a value that is reported only for the last run, such as the list of this run's
    /// iterations.
    pub fn detail(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.row.details.insert(name.to_owned(), value.into());
        self
    }

    /// Adds the line to the lines of other runs under the same conditions.
    pub fn add(self) {
        let Self { results, row } = self;
        let same = |known: &&mut Row| known.conditions == row.conditions;
        let Some(known) = results.0.iter_mut().find(same) else {
            return results.0.push(row);
        };
        known.details = row.details;
        for (name, values) in row.figures {
            match known.figures.iter_mut().find(|(other, _)| *other == name) {
                Some((_, all)) => all.extend(values),
                None => known.figures.push((name, values)),
            }
        }
    }
}

impl Row {
    /// The value of a condition as text; empty if the row does not have it.
    pub(crate) fn condition(&self, name: &str) -> String {
        match self.conditions.get(name) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        }
    }

    pub(crate) fn figure(&self, name: &str) -> Option<Spread> {
        let (_, values) = self.figures.iter().find(|(known, _)| *known == name)?;
        Some(Spread::of(values))
    }

    pub(crate) fn rounds(&self) -> usize {
        let counts = self.figures.iter().map(|(_, values)| values.len());
        counts.max().unwrap_or(0)
    }

    fn json(&self) -> Value {
        let mut line = self.conditions.clone();
        for (name, values) in &self.figures {
            let Spread { median, min, max } = Spread::of(values);
            for (suffix, value) in [("", median), ("_min", min), ("_max", max)] {
                line.insert(format!("{name}{suffix}"), rounded(value));
            }
        }
        line.insert("rounds".to_owned(), self.rounds().into());
        line.extend(self.details.clone());
        Value::Object(line)
    }
}

impl Spread {
    /// Returns the spread of `values`. If there are no values, all fields are zero.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else {
            return Self::default();
        };
        let (lower, upper) = ((sorted.len() - 1) / 2, sorted.len() / 2);
        let median = f64::midpoint(sorted[lower], sorted[upper]);
        Self { median, min, max }
    }
}

/// Rounds to four decimal places, because the measurements are not more exact.
fn rounded(value: f64) -> Value {
    json!((value * 1e4).round() / 1e4)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn relays() -> Results {
        let mut results = Results::default();
        for (ends, value) in [("unix", 3.0), ("tcp", 9.0), ("unix", 1.0), ("unix", 2.5)] {
            let line = results.line("tunnel-bulk", "relay").with("ends", ends);
            let line = line.with("content", "random").detail("last", value);
            line.figure("gib_per_s", value).add();
        }
        results
    }

    #[test]
    fn turns_under_the_same_conditions_make_one_line_with_the_median_of_their_figures() {
        let lines = relays().json();
        assert_eq!(lines.len(), 2);
        let unix = json!({
            "scenario": "tunnel-bulk", "variant": "relay", "ends": "unix", "content": "random",
            "gib_per_s": 2.5, "gib_per_s_min": 1.0, "gib_per_s_max": 3.0, "rounds": 3, "last": 2.5,
        });
        assert_eq!(lines[0], unix);
    }

    #[test]
    fn a_spread_has_the_middle_and_the_extremes() {
        let spread = |values: &[f64]| {
            let Spread { median, min, max } = Spread::of(values);
            (median, min, max)
        };
        assert_eq!(spread(&[9.0, 1.0, 5.0]), (5.0, 1.0, 9.0));
        assert_eq!(spread(&[2.0, 1.0]), (1.5, 1.0, 2.0));
        assert_eq!(spread(&[]), (0.0, 0.0, 0.0));
    }
}
