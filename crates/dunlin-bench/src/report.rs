//! The results as one HTML page with plots. The page contains no scripts and loads nothing from a
//! network.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::Value;

use crate::results::{Results, Row, Spread};
use crate::table::{cells, differing, figures, number, scenarios, shared};

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #ccc }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181c; --line: #444 } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap }
svg { width: 100%; max-width: 49rem; height: auto; display: block }
svg text { fill: var(--ink); font-size: 12px }
figure { margin: 1rem 0 }
figcaption { font-weight: 600 }
";
/// Colours that people with colour blindness can distinguish (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999933",
];
const WIDTH: f64 = 780.0;
const LEFT: f64 = 290.0;
const RIGHT: f64 = 40.0;
const ROW: f64 = 22.0;

/// Returns the page as HTML.
#[must_use]
pub fn page(results: &Results) -> String {
    let mut body = String::new();
    for (scenario, rows) in scenarios(results) {
        let conditions = format!("{scenario}{}", shared(&rows));
        let _ = writeln!(
            body,
            "<h2>{}</h2>\n<p>{}</p>",
            escaped(&scenario),
            escaped(&conditions)
        );
        for figure in figures(&rows) {
            if ["gib_per_s", "cpu_s_per_gib"].contains(&&*figure) {
                by_lanes(&mut body, &figure, &rows);
            }
            ranges(&mut body, &figure, &rows);
        }
        for row in &rows {
            iterations(&mut body, row);
        }
        table(&mut body, &rows);
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>Dunlin benchmark</title>\n<style>{STYLE}</style>\n<h1>Dunlin benchmark</h1>\n\
         <p>Medians, with the smallest and the largest of the rounds. The variants ran in turn in each \
         round. Compare figures only within this page.</p>\n{body}</html>\n"
    )
}

fn table(body: &mut String, rows: &[&Row]) {
    let table = cells(rows);
    body.push_str("<table>\n");
    for (at, row) in table.iter().enumerate() {
        let cell = if at == 0 { "th" } else { "td" };
        body.push_str("<tr>");
        for text in row {
            let _ = write!(body, "<{cell}>{}</{cell}>", escaped(text));
        }
        body.push_str("</tr>\n");
    }
    body.push_str("</table>\n");
}

/// The name of a row: its variant, and the values of `conditions`. A version, which belongs to the
/// variant, is only in the table.
fn name(row: &Row, conditions: &[String]) -> String {
    let mut text = row.condition("variant");
    for condition in conditions.iter().filter(|name| *name != "version") {
        let value = row.condition(condition);
        if !value.is_empty() {
            let _ = write!(text, ", {condition} {value}");
        }
    }
    text
}

/// The colour of a row's variant, in all plots of the rows of a scenario.
fn colour(row: &Row, rows: &[&Row]) -> &'static str {
    let variant = row.condition("variant");
    let variants = rows.iter().map(|row| row.condition("variant"));
    let before: BTreeSet<_> = variants.take_while(|one| *one != variant).collect();
    COLOURS[before.len() % COLOURS.len()]
}

/// Round figures from 0 to at least `largest`, which is positive, with equal steps.
fn marks(largest: f64) -> Vec<f64> {
    let power = 10_f64.powf((largest / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    let step = steps.into_iter().find(|step| step * 5.0 >= largest);
    let step = step.unwrap_or(10.0 * power);
    let count = (largest / step).ceil() as u32;
    (0..=count).map(|mark| f64::from(mark) * step).collect()
}

/// Plots one line for each row that has the figure, from the minimum to the maximum, with a dot at
/// the median. Plots nothing for fewer than two rows, or if no value is positive.
fn ranges(body: &mut String, figure: &str, rows: &[&Row]) {
    let conditions = differing(rows);
    let mut lines: Vec<(String, &str, Spread)> = Vec::new();
    for row in rows {
        if let Some(spread) = row.figure(figure) {
            lines.push((name(row, &conditions), colour(row, rows), spread));
        }
    }
    let largest = lines
        .iter()
        .fold(0.0_f64, |most, (.., one)| most.max(one.max));
    if lines.len() < 2 || largest <= 0.0 {
        return;
    }
    let marks = marks(largest);
    let scale = (WIDTH - LEFT - RIGHT) / marks[marks.len() - 1];
    let height = ROW * lines.len() as f64 + 30.0;
    let _ = writeln!(
        body,
        "<figure><figcaption>{figure}</figcaption>\n\
         <svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{figure} by variant\">"
    );
    let bottom = ROW * lines.len() as f64 + 6.0;
    axis(body, bottom, &marks, scale);
    let is_ratio = figure.contains("against") || figure.ends_with("_ratio");
    if is_ratio && largest >= 1.0 {
        let x = LEFT + scale;
        let _ = writeln!(
            body,
            "<line x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{bottom:.1}\" stroke=\"currentColor\" \
             stroke-dasharray=\"2 3\"/>"
        );
    }
    for (at, (name, colour, spread)) in lines.iter().enumerate() {
        let y = ROW * (at as f64 + 0.5);
        let x = |value: f64| LEFT + value * scale;
        let _ = writeln!(
            body,
            "<g><title>{} [{}–{}]</title><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <line x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\" \
             stroke-width=\"4\"/><circle cx=\"{:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{colour}\"/></g>",
            number(spread.median),
            number(spread.min),
            number(spread.max),
            LEFT - 10.0,
            y + 4.0,
            escaped(name),
            x(spread.min),
            x(spread.max),
            x(spread.median),
        );
    }
    body.push_str("</svg></figure>\n");
}

/// Plots the medians over the number of lanes: a line for the rows that differ in nothing else.
/// Plots nothing if there are no such rows.
fn by_lanes(body: &mut String, figure: &str, rows: &[&Row]) {
    let mut conditions = differing(rows);
    conditions.retain(|name| name != "lanes");
    let mut lines: Vec<(String, &str, Vec<_>)> = Vec::new();
    for row in rows {
        let lanes = row.conditions.get("lanes").and_then(Value::as_u64);
        let (Some(lanes), Some(spread)) = (lanes, row.figure(figure)) else {
            continue;
        };
        let name = name(row, &conditions);
        match lines.iter_mut().find(|(known, ..)| *known == name) {
            Some((.., points)) => points.push((lanes, spread.median)),
            None => lines.push((name, colour(row, rows), vec![(lanes, spread.median)])),
        }
    }
    if lines.iter().all(|(.., points)| points.len() < 2) {
        return;
    }
    let points = || lines.iter().flat_map(|(.., points)| points);
    let largest = points().fold(0.0_f64, |most, (_, median)| most.max(*median));
    if largest <= 0.0 {
        return;
    }
    let height = 260_f64.max(60.0 + 18.0 * lines.len() as f64);
    let bottom = height - 40.0;
    let counts: BTreeSet<u64> = points().map(|(lanes, _)| *lanes).collect();
    let gap = (WIDTH - LEFT - RIGHT) / (counts.len().max(2) - 1) as f64;
    let x = |lanes: u64| LEFT + counts.range(..lanes).count() as f64 * gap;
    let marks = marks(largest);
    let y = |median: f64| bottom - median / marks[marks.len() - 1] * (bottom - 20.0);
    let _ = writeln!(
        body,
        "<figure><figcaption>{figure} by lanes</figcaption>\n\
         <svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{figure} by lanes\">\
         <text x=\"{LEFT}\" y=\"{height}\" dy=\"-4\">lanes (not to scale)</text>"
    );
    for value in &marks {
        let (end, y) = (WIDTH - RIGHT, y(*value));
        let _ = writeln!(
            body,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{end}\" y2=\"{y:.1}\" stroke=\"var(--line)\"/>\
             <text x=\"{}\" y=\"{:.1}\">{}</text>",
            end + 4.0,
            y + 4.0,
            number(*value)
        );
    }
    for lanes in &counts {
        let (x, y) = (x(*lanes), bottom + 18.0);
        let _ = write!(
            body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{lanes}</text>"
        );
    }
    let mut colours = Vec::new();
    for (at, (name, colour, points)) in lines.iter_mut().enumerate() {
        let y_of_name = 20.0 + 18.0 * at as f64;
        points.sort_unstable_by_key(|(lanes, _)| *lanes);
        let is_again = colours.contains(colour);
        colours.push(*colour);
        let mut corners = Vec::new();
        for (lanes, median) in points {
            let (x, y) = (x(*lanes), y(*median));
            corners.push(format!("{x:.1},{y:.1}"));
            let _ = write!(
                body,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\">\
                 <title>{}: {}</title></circle>",
                escaped(name),
                number(*median)
            );
        }
        let _ = writeln!(
            body,
            "<g stroke=\"{colour}\" stroke-width=\"3\" stroke-dasharray=\"{}\">\
             <polyline points=\"{}\" fill=\"none\"/><line x1=\"0\" y1=\"{y_of_name}\" x2=\"24\" y2=\"{y_of_name}\"/></g>\
             <text x=\"32\" y=\"{y_of_name}\" dy=\"4\">{}</text>",
            // A line with the colour of one before it has dashes.
            ["none", "6 3"][usize::from(is_again)],
            corners.join(" "),
            escaped(name)
        );
    }
    body.push_str("</svg></figure>\n");
}

/// A horizontal axis with marks.
fn axis(body: &mut String, y: f64, marks: &[f64], scale: f64) {
    let _ = writeln!(
        body,
        "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"currentColor\"/>",
        WIDTH - RIGHT
    );
    for value in marks {
        let _ = writeln!(
            body,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            LEFT + value * scale,
            y + 18.0,
            number(*value)
        );
    }
}

/// Plots how many pages were sent and how many were dirtied in each iteration of the last round,
/// over the time of the migration.
fn iterations(body: &mut String, row: &Row) {
    const HEIGHT: f64 = 180.0;
    let Some(Value::Array(passes)) = row.details.get("last_round") else {
        return;
    };
    let number_of = |pass: &Value, name: &str| pass[name].as_f64().unwrap_or(0.0);
    let total: f64 = passes
        .iter()
        .map(|pass| number_of(pass, "duration_ms"))
        .sum();
    let most = passes.iter().fold(0.0_f64, |most, pass| {
        most.max(number_of(pass, "pages"))
            .max(number_of(pass, "dirtied_pages"))
    });
    if total <= 0.0 || most <= 0.0 {
        return;
    }
    let width = WIDTH - 60.0 - RIGHT;
    let title = format!("{}: pages per iteration over time", name(row, &[]));
    let _ = writeln!(
        body,
        "<figure><figcaption>{} (sent: filled, dirtied: outlined; {} ms, at most {} pages)\
         </figcaption>\n<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
        escaped(&title),
        number(total),
        number(most),
        escaped(&title)
    );
    let mut at = 60.0;
    for pass in passes {
        let wide = number_of(pass, "duration_ms") / total * width;
        for (name, style) in [
            ("pages", "fill=\"#0072b2\" fill-opacity=\".6\""),
            ("dirtied_pages", "fill=\"none\" stroke=\"#d55e00\""),
        ] {
            let tall = number_of(pass, name) / most * (HEIGHT - 20.0);
            let _ = write!(
                body,
                "<rect x=\"{at:.1}\" y=\"{:.1}\" width=\"{wide:.1}\" height=\"{tall:.1}\" {style}/>",
                HEIGHT - tall
            );
        }
        at += wide;
    }
    body.push_str("\n</svg></figure>\n");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::relays;

    #[test]
    fn a_page_has_a_line_over_the_number_of_lanes_for_each_variant() {
        let mut results = Results::default();
        for (lanes, rate) in [(4, 3.0), (1, 1.0), (2, 2.0)] {
            let line = results.line("lanes", "tls").with("lanes", lanes);
            line.figure("gib_per_s", rate).add();
        }
        let line = results.line("lanes", "floor").with("lanes", 2);
        line.figure("gib_per_s", 2.0).add();
        let page = page(&results);
        let lines: Vec<_> = page.split("<polyline points=").skip(1).collect();
        assert_eq!((lines.len(), page.matches("r=\"4\"").count()), (2, 4));
        // The medians in the order of the numbers of lanes, up to the largest.
        assert!(lines[0].starts_with("\"290.0,153.3 515.0,86.7 740.0,20.0\""));
    }

    #[test]
    fn marks_are_round_and_reach_the_largest_value() {
        assert_eq!(marks(2.3), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
        assert_eq!(marks(1000.0), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        assert_eq!(marks(0.07), [0.0, 0.02, 0.04, 0.06, 0.08]);
    }

    #[test]
    fn a_variant_has_one_colour_and_a_plot_of_ratios_has_a_line_at_one() {
        let mut results = Results::default();
        for (variant, lanes) in [("floor", 1), ("tls", 1), ("floor", 2), ("tls", 2)] {
            let line = results.line("lanes", variant).with("lanes", lanes);
            line.figure("cpu_s_per_gib", 0.5)
                .figure("cpu_against_floor", 1.5)
                .add();
        }
        let page = page(&results);
        // A dot for each row in both plots of ranges and in the plot over the lanes.
        let dots = |at: usize| page.matches(&format!("fill=\"{}\">", COLOURS[at])).count();
        let ranges = |at: usize| page.matches(&format!("fill=\"{}\"/>", COLOURS[at])).count();
        assert_eq!([dots(0), dots(1), dots(2)], [2, 2, 0]);
        assert_eq!([ranges(0), ranges(1), ranges(2)], [4, 4, 0]);
        // The marks are 0, 0.5, 1 and 1.5, over 450 units.
        assert_eq!(page.matches("x1=\"590.0\" y1=\"0\"").count(), 1);
    }

    #[test]
    fn a_page_has_a_table_and_a_plot_with_every_row_and_refers_to_nothing_outside() {
        let mut results = relays();
        let line = results.line("whole", "<dunlin>").figure("total_s", 2.0);
        let pass = serde_json::json!({"duration_ms": 5.0, "pages": 10, "dirtied_pages": 4});
        line.detail("last_round", Value::Array(vec![pass])).add();
        let page = page(&results);
        assert_eq!(page.matches("<h2>").count(), 2);
        assert_eq!(
            page.matches("<circle").count(),
            2,
            "a dot for each row of tunnel-bulk"
        );
        assert_eq!(
            page.matches("<rect").count(),
            2,
            "sent and dirtied pages of one iteration"
        );
        assert!(page.contains("2.50 [1.00–3.00]") && page.contains("&lt;dunlin&gt;"));
        for outside in ["http:", "https:", "<script", "<link", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }
}
