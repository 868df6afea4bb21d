//! The table of docs/benchmarking/evacuate.md.

use anyhow::Result;

use super::cells::Digits::{Places, Short};
use super::cells::{cell, counted, header, median, order, title};
use super::kept::Kept;
use super::layout::Cells;

/// One row for each kind of guest and variant.
pub(super) fn table(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "guests, variant",
        "total, s",
        "times as fast as stunnel",
        "GiB sent",
        "CPU-s/GiB",
        "longest downtime, ms",
        "VMs over the limit",
        "throttled by",
    ])];
    let mut rows = Vec::new();
    for row in &kept[0].rows {
        let variant = row.text("variant")?;
        rows.push(((row.text("guest")?, order(variant)), variant, row));
    }
    rows.sort_by_key(|(key, ..)| *key);
    for ((guest, _), variant, row) in rows {
        let lanes = counted(row.number("lanes")?, "lane");
        table.push(vec![
            format!("{guest}, {}, {lanes}", title(variant)),
            cell(row, "total_s", Places(1))?,
            cell(row, "against_stunnel", Places(2))?,
            cell(row, "wire_gib", Places(1))?,
            cell(row, "cpu_s_per_gib", Places(2))?,
            cell(row, "downtime_ms", Short)?,
            cell(row, "vms_over_limit", Places(0))?,
            match median(row, "throttle_percent")? {
                0.0 => "–".to_owned(),
                percent => format!("{percent:.0} %"),
            },
        ]);
    }
    Ok(table)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_by_kind_and_stunnel_comes_first() {
        let mut results = dunlin_bench::Results::default();
        for (guest, variant, ratio) in [
            ("thrashing", "dunlin", Some(1.7)),
            ("idle", "dunlin-in-turn", Some(1.25)),
            ("idle", "stunnel", None),
        ] {
            let line = results.line("evacuate", variant).with("guest", guest);
            let mut line = line.with("lanes", 2).figure("total_s", 4.0);
            line = line.figure("throttle_percent", if guest == "idle" { 0.0 } else { 40.0 });
            if let Some(ratio) = ratio {
                line = line.figure("against_stunnel", ratio);
            }
            line.add();
        }
        let run = r#"{"run":{"date":"","machine":"","conditions":"","command":""}}"#.to_owned();
        let lines = results.json().into_iter().map(|line| format!("\n{line}"));
        let kept = Kept::parse("evacuate", &(run + &lines.collect::<String>())).unwrap();
        let table = table(&[kept]).unwrap();
        let cells = |row: usize| [0, 2, 7].map(|column| table[row][column].clone());
        assert_eq!(cells(1), ["idle, stunnel, 2 lanes", "", "–"]);
        assert_eq!(cells(2), ["idle, Dunlin, in turn, 2 lanes", "1.25", "–"]);
        assert_eq!(cells(3), ["thrashing, Dunlin, 2 lanes", "1.70", "40 %"]);
    }
}
