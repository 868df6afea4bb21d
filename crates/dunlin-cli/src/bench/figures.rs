//! Figures of several rounds, and their output lines.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// One figure over all rounds.
#[derive(Clone, Debug, Default)]
pub(super) struct Figure(Vec<f64>);

impl Figure {
    pub(super) fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    /// The median, which is the mean of the two middle values for an even number of rounds; 0
    /// without rounds.
    pub(super) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let upper = sorted.len() / 2;
        match sorted.len() {
            0 => 0.0,
            odd if odd % 2 == 1 => sorted[upper],
            _ => f64::midpoint(sorted[upper - 1], sorted[upper]),
        }
    }

    fn rounds(&self) -> usize {
        self.0.len()
    }

    fn smallest(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn largest(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

/// The figures of one variant, by name.
#[derive(Default)]
pub(super) struct Figures(BTreeMap<&'static str, Figure>);

impl Figures {
    /// Adds a round's measurements.
    pub(super) fn add<const N: usize>(&mut self, measured: [(&'static str, f64); N]) {
        for (name, value) in measured {
            self.0.entry(name).or_default().add(value);
        }
    }

    /// The median of one figure; 0 without rounds.
    pub(super) fn median(&self, name: &str) -> f64 {
        self.0.get(name).map_or(0.0, Figure::median)
    }
}

/// One line of output.
pub(super) struct Record(Map<String, Value>);

impl Record {
    pub(super) fn new(scenario: &str, variant: &str) -> Self {
        let mut map = Map::new();
        map.insert("scenario".into(), scenario.into());
        map.insert("variant".into(), variant.into());
        Self(map)
    }

    pub(super) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.insert(name.into(), value.into());
        self
    }

    /// Adds each figure, and the number of rounds.
    pub(super) fn figures(self, figures: &Figures) -> Self {
        let rounds = figures.0.values().map(Figure::rounds).max();
        let all = figures.0.iter();
        let record = all.fold(self, |record, (name, figure)| record.figure(name, figure));
        record.with("rounds", rounds)
    }

    /// A figure as `name`, `name_min` and `name_max`.
    fn figure(self, name: &str, figure: &Figure) -> Self {
        self.with(name, rounded(figure.median()))
            .with(&format!("{name}_min"), rounded(figure.smallest()))
            .with(&format!("{name}_max"), rounded(figure.largest()))
    }

    /// Prints the line on standard output. A closed output is not an error: the bench continues.
    pub(super) fn print(self) {
        use std::io::Write;
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{}", Value::Object(self.0));
        let _ = out.flush();
    }
}

/// Rounds to four decimal places: more would be noise.
pub(super) fn rounded(value: f64) -> Value {
    json!((value * 1e4).round() / 1e4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_its_median_and_its_extremes() {
        let mut figure = Figure::default();
        for value in [9.0, 1.0, 5.0] {
            figure.add(value);
        }
        assert!((figure.median() - 5.0).abs() < 1e-9);
        figure.add(6.0);
        assert!((figure.median() - 5.5).abs() < 1e-9);
        let line = Record::new("s", "v").figure("x", &figure).0;
        assert_eq!(
            Value::Object(line),
            json!({"scenario": "s", "variant": "v", "x": 5.5, "x_min": 1.0, "x_max": 9.0})
        );
    }
}
