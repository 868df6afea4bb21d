//! The tables of docs/benchmarking/growth.md: larger guests and more lanes.

use anyhow::Result;
use serde_json::json;

use super::cells::Digits::Places;
use super::cells::{cell, header, median};
use super::kept::Kept;
use super::layout::Cells;

/// One row for each guest and size of its memory.
pub(super) fn memory(kept: &[Kept]) -> Result<Cells> {
    filled(kept, 100)
}

/// The same for guests with memory that is half zero.
pub(super) fn half(kept: &[Kept]) -> Result<Cells> {
    filled(kept, 50)
}

/// `percent` is the part of the guest's memory that is not zero.
fn filled(kept: &[Kept], percent: u64) -> Result<Cells> {
    let mut table = vec![header(&[
        "guest, memory",
        "total, s",
        "GiB/s",
        "CPU-s/GiB",
        "floor, CPU-s/GiB",
        "downtime, ms",
        "destination's peak beyond the filled memory, MiB",
    ])];
    for guest in ["idle", "writing"] {
        let rows = kept[0].select(&[("variant", json!("dunlin")), ("guest", json!(guest))]);
        for row in rows {
            let bytes = row.number("guest_bytes")?;
            let mib = bytes >> 20;
            let floor =
                kept[0].row(&[("variant", json!("floor")), ("guest_bytes", json!(bytes))])?;
            let beyond = median(row, "destination_peak_mib")? - (mib * percent / 100) as f64;
            table.push(vec![
                format!("{guest}, {} GiB", mib >> 10),
                cell(row, "total_s", Places(2))?,
                cell(row, "gib_per_s", Places(2))?,
                cell(row, "cpu_s_per_gib", Places(2))?,
                cell(floor, "cpu_s_per_gib", Places(2))?,
                cell(row, "downtime_ms", Places(1))?,
                format!("{beyond:.0}"),
            ]);
        }
    }
    Ok(table)
}

/// One row for each number of TLS lanes.
pub(super) fn lanes(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&["lanes", "GiB/s", "CPU-s/GiB"])];
    for row in kept[0].select(&[("variant", json!("tls"))]) {
        table.push(vec![
            row.number("lanes")?.to_string(),
            cell(row, "gib_per_s", Places(2))?,
            cell(row, "cpu_s_per_gib", Places(2))?,
        ]);
    }
    Ok(table)
}
