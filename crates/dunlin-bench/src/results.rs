//! Measurements, grouped by their conditions.

use serde_json::{Map, Value, json};

/// All measurements of a benchmark, in the order in which their conditions first occurred.
#[derive(Debug, Default)]
pub struct Results {
    pub(crate) rows: Vec<Row>,
    round: usize,
}

/// The measurements under the same conditions.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) conditions: Map<String, Value>,
    pub(crate) figures: Vec<Figure>,
    pub(crate) details: Map<String, Value>,
}

/// The values of a figure, each with the round in which it was measured.
#[derive(Debug)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    values: Vec<(usize, f64)>,
}

/// A comparison of variants with a peer. The peer can have several lines, such as one for each
/// number of connections; the best of them is compared.
#[derive(Clone, Copy, Debug)]
pub struct Comparison<'a> {
    /// The scenario of the lines that are compared.
    pub scenario: &'a str,
    /// The variant to compare with.
    pub peer: &'a str,
    /// The conditions that a line has in common with the peer's line.
    pub same: &'a [&'a str],
    /// The figure that is divided by the peer's.
    pub figure: &'a str,
    /// Whether a larger value of the figure is better.
    pub is_rate: bool,
    /// The name of the ratio.
    pub ratio: &'static str,
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

    /// Starts a round. The values that are added afterwards belong to it.
    pub fn begin_round(&mut self) {
        self.round += 1;
    }

    /// Adds a ratio to the lines of the variants for which `is_compared` is true. It has a value for
    /// each round in which both the line and the peer's best line have one. The best line is the one
    /// with the best median.
    pub fn compare(&mut self, comparison: &Comparison<'_>, is_compared: impl Fn(&str) -> bool) {
        let of_scenario = |row: &Row| row.condition("scenario") == comparison.scenario;
        let mut ratios = Vec::new();
        for (at, row) in self.rows.iter().enumerate() {
            if !of_scenario(row) || !is_compared(&row.condition("variant")) {
                continue;
            }
            let is_peer = |other: &&Row| {
                let same = |name: &&str| other.condition(name) == row.condition(name);
                of_scenario(other)
                    && other.condition("variant") == comparison.peer
                    && comparison.same.iter().all(same)
            };
            let median = |figure: &Figure| {
                let Spread { median, .. } = figure.spread();
                if comparison.is_rate { -median } else { median }
            };
            let peers = self.rows.iter().filter(is_peer);
            let best = peers
                .filter_map(|peer| peer.values(comparison.figure))
                .min_by(|a, b| median(a).total_cmp(&median(b)));
            if let (Some(own), Some(best)) = (row.values(comparison.figure), best) {
                ratios.push((at, own.divided_by(best, comparison.ratio)));
            }
        }
        for (at, ratio) in ratios {
            if !ratio.values.is_empty() {
                self.rows[at].figures.push(ratio);
            }
        }
    }

    /// Returns one object for each set of conditions. It contains the conditions, each figure as
    /// `NAME`, `NAME_min` and `NAME_max`, the number of rounds, and the details of the last run.
    #[must_use]
    pub fn json(&self) -> Vec<Value> {
        self.rows.iter().map(Row::json).collect()
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
        let values = vec![(self.results.round, value)];
        self.row.figures.push(Figure { name, values });
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
        let Some(known) = results.rows.iter_mut().find(same) else {
            return results.rows.push(row);
        };
        known.details = row.details;
        for figure in row.figures {
            let same = |other: &&mut Figure| other.name == figure.name;
            match known.figures.iter_mut().find(same) {
                Some(all) => all.values.extend(figure.values),
                None => known.figures.push(figure),
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
        self.values(name).map(Figure::spread)
    }

    fn values(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }

    pub(crate) fn rounds(&self) -> usize {
        let counts = self.figures.iter().map(|figure| figure.values.len());
        counts.max().unwrap_or(0)
    }

    fn json(&self) -> Value {
        let mut line = self.conditions.clone();
        for figure in &self.figures {
            let (name, Spread { median, min, max }) = (figure.name, figure.spread());
            for (suffix, value) in [("", median), ("_min", min), ("_max", max)] {
                line.insert(format!("{name}{suffix}"), rounded(value));
            }
        }
        line.insert("rounds".to_owned(), self.rounds().into());
        line.extend(self.details.clone());
        Value::Object(line)
    }
}

impl Figure {
    fn spread(&self) -> Spread {
        let values: Vec<f64> = self.values.iter().map(|(_, value)| *value).collect();
        Spread::of(&values)
    }

    /// The ratios to `other` in the rounds that both have.
    fn divided_by(&self, other: &Self, name: &'static str) -> Self {
        let ratio = |&(round, value): &(usize, f64)| {
            let same = |(other, _): &&(usize, f64)| *other == round;
            let &(_, other) = other.values.iter().find(same)?;
            (other > 0.0).then_some((round, value / other))
        };
        let values = self.values.iter().filter_map(ratio).collect();
        Self { name, values }
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
#[allow(clippy::unwrap_used)]
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
    fn lines_are_compared_with_the_best_line_of_a_peer_round_by_round() {
        let mut results = Results::default();
        let turns = [
            [("ours", 1, 4.0), ("peer", 1, 1.0), ("peer", 2, 2.0)],
            // The peer's best line failed in this round.
            [("ours", 1, 5.0), ("peer", 1, 1.0), ("idle", 2, 2.0)],
            [("ours", 1, 3.0), ("peer", 1, 1.5), ("peer", 2, 3.0)],
        ];
        for round in turns {
            results.begin_round();
            for (variant, lanes, value) in round {
                let line = results.line("whole", variant).with("guest", "idle");
                line.with("lanes", lanes).figure("rate", value).add();
            }
        }
        let comparison = Comparison {
            scenario: "whole",
            peer: "peer",
            same: &["guest"],
            figure: "rate",
            is_rate: true,
            ratio: "against_peer",
        };
        results.compare(&comparison, |variant| variant == "ours");
        let Spread { median, min, max } = results.rows[0].figure("against_peer").unwrap();
        assert_eq!((median, min, max), (1.5, 1.0, 2.0));
        let ratios = results
            .rows
            .iter()
            .filter_map(|row| row.figure("against_peer"));
        assert_eq!(ratios.count(), 1);

        let least = Comparison {
            is_rate: false,
            ratio: "against_least",
            ..comparison
        };
        results.compare(&least, |variant| variant == "ours");
        let Spread { median, min, max } = results.rows[0].figure("against_least").unwrap();
        assert_eq!((median, min, max), (4.0, 2.0, 5.0));
        let elsewhere = Comparison {
            scenario: "tunnel",
            ratio: "elsewhere",
            ..comparison
        };
        results.compare(&elsewhere, |_| true);
        assert!(results.rows[0].figure("elsewhere").is_none());
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
