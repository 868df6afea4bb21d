//! The table of docs/benchmarking/status.md.

use anyhow::Result;

use super::cells::Digits::Places;
use super::cells::{cell, header};
use super::kept::Kept;
use super::layout::Cells;

/// One row for each variant.
pub(super) fn table(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "variant",
        "GiB/s",
        "against none",
        "CPU-s/GiB",
        "against none",
        "observers, % of the host",
        "observed, % of the host",
        "more than none",
    ])];
    for row in &kept[0].rows {
        table.push(vec![
            row.text("variant")?.to_owned(),
            cell(row, "gib_per_s", Places(2))?,
            cell(row, "against_none", Places(3))?,
            cell(row, "cpu_s_per_gib", Places(3))?,
            cell(row, "cpu_against_none", Places(3))?,
            cell(row, "observers_percent", Places(2))?,
            cell(row, "observed_percent", Places(2))?,
            cell(row, "observed_more_percent", Places(2))?,
        ]);
    }
    Ok(table)
}
