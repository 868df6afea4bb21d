//! The results as a table for people.

use std::fmt::Write;

use crate::results::{Results, Row};

/// Returns one table for each scenario. It has a column for each condition that differs between its
/// rows, and a column for each figure. Conditions that all rows share follow the scenario in the
/// title.
pub(crate) fn tables(results: &Results) -> String {
    let mut text = String::new();
    for (title, rows) in scenarios(results) {
        let _ = writeln!(text, "{title}{}", shared(&rows));
        let table = cells(&rows);
        let widths: Vec<usize> = (0..table[0].len())
            .map(|column| {
                let cells = table.iter().map(|row| row[column].chars().count());
                cells.max().unwrap_or(0)
            })
            .collect();
        for row in &table {
            let line = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"));
            let line = line.collect::<Vec<_>>().join("  ");
            let _ = writeln!(text, "  {}", line.trim_end());
        }
        text.push('\n');
    }
    text
}

/// Groups the rows by scenario. Scenarios and rows keep their order.
pub(crate) fn scenarios(results: &Results) -> Vec<(String, Vec<&Row>)> {
    let mut all: Vec<(String, Vec<&Row>)> = Vec::new();
    for row in &results.rows {
        let scenario = row.condition("scenario");
        match all.iter_mut().find(|(known, _)| *known == scenario) {
            Some((_, rows)) => rows.push(row),
            None => all.push((scenario, vec![row])),
        }
    }
    all
}

/// Names of conditions in which the rows differ, except scenario and variant.
pub(crate) fn differing(rows: &[&Row]) -> Vec<String> {
    let mut names = Vec::new();
    for name in rows.iter().flat_map(|row| row.conditions.keys()) {
        let first = rows[0].condition(name);
        let differs = rows.iter().any(|row| row.condition(name) != first);
        if differs && !["scenario", "variant"].contains(&&**name) && !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

/// The header and the cells of one scenario.
pub(crate) fn cells(rows: &[&Row]) -> Vec<Vec<String>> {
    let conditions = differing(rows);
    let figures = figures(rows);
    let mut header = vec!["variant".to_owned()];
    header.extend(conditions.iter().chain(&figures).cloned());
    let mut table = vec![header];
    for row in rows {
        let mut cells = vec![row.condition("variant")];
        cells.extend(conditions.iter().map(|name| row.condition(name)));
        cells.extend(figures.iter().map(|name| match row.figure(name) {
            None => String::new(),
            Some(spread) if spread.min >= spread.max => number(spread.median),
            Some(spread) => format!(
                "{} [{}–{}]",
                number(spread.median),
                number(spread.min),
                number(spread.max)
            ),
        }));
        table.push(cells);
    }
    table
}

/// Names of the figures, in the order of their first occurrence.
pub(crate) fn figures(rows: &[&Row]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for figure in rows.iter().flat_map(|row| &row.figures) {
        if !names.iter().any(|known| known == figure.name) {
            names.push(figure.name.to_owned());
        }
    }
    names
}

/// Conditions that all rows share.
pub(crate) fn shared(rows: &[&Row]) -> String {
    let differing = differing(rows);
    let mut text = String::new();
    for name in rows[0].conditions.keys() {
        if !["scenario", "variant"].contains(&&**name) && !differing.contains(name) {
            let _ = write!(text, ", {name} {}", rows[0].condition(name));
        }
    }
    // Kept results have their number of rounds as a condition.
    if !rows[0].conditions.contains_key("rounds") {
        let rounds = rows.iter().map(|row| row.rounds()).max();
        let _ = write!(text, ", rounds {}", rounds.unwrap_or(0));
    }
    text.replacen(", ", ": ", 1)
}

/// Formats a value with three significant digits, but with all digits before the decimal point and
/// at most three after it.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || size == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::relays;

    #[test]
    fn a_table_has_a_column_for_each_condition_that_differs() {
        let text = tables(&relays());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "tunnel-bulk: content random, rounds 3");
        assert_eq!(lines[1], "  variant  ends  gib_per_s");
        assert_eq!(lines[2], "  relay    unix  2.50 [1.00–3.00]");
        assert_eq!(lines[3], "  relay    tcp   9.00");
    }
}
