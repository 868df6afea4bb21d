//! Measurements of several rounds, printed as lines of JSON or as a table.

use serde_json::{Map, Value, json};

/// All measurements, in the order of their first occurrence.
#[derive(Debug, Default)]
pub(super) struct Table(Vec<Row>);

#[derive(Debug)]
struct Row {
    conditions: Map<String, Value>,
    figures: Vec<(&'static str, Vec<f64>)>,
}

/// The measurements of one turn for a row.
pub(super) struct Line<'a> {
    table: &'a mut Table,
    row: Row,
}

impl Table {
    pub(super) fn line(&mut self, scenario: &str, variant: &str) -> Line<'_> {
        let mut conditions = Map::new();
        conditions.insert("scenario".to_owned(), scenario.into());
        conditions.insert("variant".to_owned(), variant.into());
        Line {
            table: self,
            row: Row {
                conditions,
                figures: Vec::new(),
            },
        }
    }

    /// Prints all rows.
    pub(super) fn print(&self, json: bool) {
        let mut scenario = Value::Null;
        for row in &self.0 {
            if json {
                println!("{}", row.json());
                continue;
            }
            if row.conditions["scenario"] != scenario {
                scenario = row.conditions["scenario"].clone();
                println!("\n{}", scenario.as_str().unwrap_or_default());
            }
            println!("{}", row.text());
        }
    }
}

impl Line<'_> {
    /// Adds a condition of the measurement.
    pub(super) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.row.conditions.insert(name.to_owned(), value.into());
        self
    }

    pub(super) fn figure(mut self, name: &'static str, value: f64) -> Self {
        self.row.figures.push((name, vec![value]));
        self
    }

    /// Adds the measurement to those of other turns under the same conditions.
    pub(super) fn add(self) {
        let same = |row: &&mut Row| row.conditions == self.row.conditions;
        let Some(row) = self.table.0.iter_mut().find(same) else {
            return self.table.0.push(self.row);
        };
        for (name, values) in self.row.figures {
            match row.figures.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => known.extend(values),
                None => row.figures.push((name, values)),
            }
        }
    }
}

impl Row {
    fn json(&self) -> Value {
        let mut line = self.conditions.clone();
        let rounds = self.figures.iter().map(|(_, values)| values.len()).max();
        for (name, values) in &self.figures {
            let (median, least, most) = spread(values);
            line.insert((*name).to_owned(), rounded(median));
            line.insert(format!("{name}_min"), rounded(least));
            line.insert(format!("{name}_max"), rounded(most));
        }
        line.insert("rounds".to_owned(), rounds.unwrap_or(0).into());
        Value::Object(line)
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.conditions {
            text += &match (name.as_str(), value) {
                ("scenario", _) => continue,
                ("variant", Value::String(variant)) => format!("{variant:>10}"),
                (_, Value::String(value)) => format!("  {value:>4}"),
                (name, value) => format!("  {value:>4} {name}"),
            };
        }
        for (name, values) in &self.figures {
            let (median, least, most) = spread(values);
            text += &format!("  {name} {median:.3} [{least:.3}–{most:.3}]");
        }
        text
    }
}

/// The median (the mean of the two middle values for an even count), the minimum and the maximum.
fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else {
        return (0.0, 0.0, 0.0);
    };
    let upper = sorted.len() / 2;
    let lower = (sorted.len() - 1) / 2;
    (f64::midpoint(sorted[lower], sorted[upper]), least, most)
}

/// Rounds to four decimal places; more would be noise.
fn rounded(value: f64) -> Value {
    json!((value * 1e4).round() / 1e4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_under_the_same_conditions_make_one_line_with_the_middle_of_their_figures() {
        let mut table = Table::default();
        for (ends, value) in [("unix", 3.0), ("tcp", 9.0), ("unix", 1.0), ("unix", 2.5)] {
            let line = table.line("tunnel-bulk", "relay").with("ends", ends);
            line.figure("gib_per_s", value).add();
        }
        assert_eq!(table.0.len(), 2);
        let line = table.0[0].json();
        assert_eq!(line["ends"], "unix");
        assert_eq!(line["gib_per_s"], 2.5);
        assert_eq!(line["gib_per_s_min"], 1.0);
        assert_eq!(line["gib_per_s_max"], 3.0);
        assert_eq!(line["rounds"], 3);
        assert_eq!(spread(&[1.0, 2.0]), (1.5, 1.0, 2.0));
    }
}
