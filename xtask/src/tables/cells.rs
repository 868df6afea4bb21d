//! Cells of the tables, and the names and the order of variants.

use anyhow::{Context, Result};
use serde_json::Value;

use super::kept::{Figure, Kept, Row};

/// Variants of the benchmarks in the order of the tables, with their names in the pages.
const VARIANTS: [(&str, &str); 23] = [
    ("bare", "bare"),
    ("stunnel", "stunnel"),
    ("stunnel-in-turn", "stunnel, in turn"),
    ("openssh", "OpenSSH"),
    ("go-proxy", "Go proxy"),
    ("pipeline", "pipeline"),
    ("relay", "relay"),
    ("stripe-1", "stripe-1"),
    ("stripe-2", "stripe-2"),
    ("stripe-4", "stripe-4"),
    ("plain-floor", "plain floor"),
    ("floor", "floor"),
    ("cache-floor", "cache floor"),
    ("plain", "plain"),
    ("tls", "tls"),
    ("dunlin", "Dunlin"),
    ("dunlin-in-turn", "Dunlin, in turn"),
    ("cloud-hypervisor-tls", "Cloud Hypervisor, TLS"),
    ("cloud-hypervisor-plain", "Cloud Hypervisor, plain"),
    ("qemu-tls", "QEMU, TLS"),
    ("qemu-plain", "QEMU, plain"),
    ("aws-lc-rs", "aws-lc-rs"),
    ("ring", "ring"),
];

/// How many digits of a number are written.
#[derive(Clone, Copy)]
pub(super) enum Digits {
    /// This many decimal places.
    Places(usize),
    /// One decimal place below 10, and none above.
    Short,
    /// All decimal places of the file, but at least one.
    All,
}

use Digits::{All, Places, Short};

impl Digits {
    pub(super) fn write(self, value: f64) -> String {
        match self {
            Places(places) => format!("{value:.places$}"),
            Short if value < 9.95 => format!("{value:.1}"),
            Short => format!("{value:.0}"),
            All => format!("{value:?}"),
        }
    }

    /// The median and the range. The range is omitted if all rounds gave the same result.
    fn write_figure(self, figure: Figure) -> String {
        let median = self.write(figure.median);
        match figure.range {
            Some((min, max)) if min < max => {
                format!("{median} [{}–{}]", self.write(min), self.write(max))
            }
            _ => median,
        }
    }
}

/// The cell with the figure `name` of a result line; empty if the line has no such figure.
pub(super) fn cell(row: &Row, name: &str, digits: Digits) -> Result<String> {
    let figure = row.figure(name)?;
    Ok(figure.map_or_else(String::new, |figure| digits.write_figure(figure)))
}

/// The median of a figure that the line must have.
pub(super) fn median(row: &Row, name: &str) -> Result<f64> {
    let figure = row.figure(name)?;
    let figure = figure.with_context(|| format!("{}: the line has no {name}", row.place))?;
    Ok(figure.median)
}

pub(super) fn header(titles: &[&str]) -> Vec<String> {
    titles.iter().map(|&title| title.to_owned()).collect()
}

/// The place of a variant in the tables. It is the variant's place in [`VARIANTS`]; a variant that
/// is not in the list comes last.
pub(super) fn order(variant: &str) -> usize {
    let known = VARIANTS.iter().position(|(known, _)| *known == variant);
    known.unwrap_or(VARIANTS.len())
}

pub(super) fn title(variant: &str) -> &str {
    let known = VARIANTS.iter().find(|(known, _)| *known == variant);
    known.map_or(variant, |(_, title)| title)
}

/// The different values of a key, sorted.
pub(super) fn values<K: Ord>(rows: &[&Row], key: impl Fn(&Row) -> Result<K>) -> Result<Vec<K>> {
    let mut values = rows
        .iter()
        .map(|row| key(row))
        .collect::<Result<Vec<_>>>()?;
    values.sort();
    values.dedup();
    Ok(values)
}

pub(super) fn counted(count: u64, one: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        _ => format!("{count} {one}s"),
    }
}

pub(super) fn variant_key(row: &Row) -> Result<(usize, String)> {
    let variant = row.text("variant")?;
    Ok((order(variant), variant.to_owned()))
}

/// The cell of the line with these conditions; empty if there is no such line.
pub(super) fn optional(
    run: &Kept,
    conditions: &[(&str, Value)],
    name: &str,
    digits: Digits,
) -> Result<String> {
    match run.select(conditions).is_empty() {
        true => Ok(String::new()),
        false => cell(run.row(conditions)?, name, digits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_of_their_column() {
        for (digits, value, text) in [
            (Places(2), 0.946, "0.95"),
            (Places(0), 147.4, "147"),
            (Short, 1.66, "1.7"),
            (Short, 9.96, "10"),
            (Short, 48.2, "48"),
            (All, 2.0, "2.0"),
            (All, 0.95, "0.95"),
        ] {
            assert_eq!(digits.write(value), text);
        }
        let figure = |range| Figure { median: 1.0, range };
        let text = |range| Places(1).write_figure(figure(range));
        assert_eq!(text(Some((0.5, 1.5))), "1.0 [0.5–1.5]");
        assert_eq!(text(Some((1.0, 1.0))), "1.0");
        assert_eq!(text(None), "1.0");
    }
}
