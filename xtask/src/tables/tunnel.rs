//! The tables of the tunnel's benchmark.

use anyhow::Result;
use serde_json::json;

use super::cells::Digits::Places;
use super::cells::{cell, counted, header, optional, title, values, variant_key};
use super::kept::{Kept, Row};
use super::layout::Cells;

pub(super) fn bulk(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "ends, streams",
        "variant",
        "GiB/s",
        "against stunnel",
        "CPU-s/GiB",
        "against stunnel",
    ])];
    let mut rows = kept[0].select(&[("scenario", json!("tunnel-bulk"))]);
    // Older results do not contain the floor; the table then has no column for it.
    let mut has_floor = false;
    for row in &rows {
        has_floor |= row.figure("floor_ratio")?.is_some();
    }
    if has_floor {
        table[0].push("against the floor".to_owned());
    }
    // The order in the pages: unix sockets before TCP.
    rows.sort_by_cached_key(|row| {
        (
            row.text("ends").ok() == Some("tcp"),
            row.number("streams").ok(),
        )
    });
    let mut group = String::new();
    for row in rows {
        let this = format!("{}, {}", row.text("ends")?, row.number("streams")?);
        let mut cells = vec![
            match this == group {
                true => String::new(),
                false => this.clone(),
            },
            title(row.text("variant")?).to_owned(),
            cell(row, "gib_per_s", Places(2))?,
            cell(row, "against_stunnel", Places(1))?,
            cell(row, "cpu_s_per_gib", Places(2))?,
            cell(row, "cpu_against_stunnel", Places(2))?,
        ];
        if has_floor {
            cells.push(cell(row, "floor_ratio", Places(2))?);
        }
        table.push(cells);
        group = this;
    }
    Ok(table)
}

pub(super) fn round_trips(kept: &[Kept]) -> Result<Cells> {
    let scenario = ("scenario", json!("tunnel-pingpong"));
    let rows = kept[0].select(std::slice::from_ref(&scenario));
    let variants = values(&rows, variant_key)?;
    let mut table = vec![vec!["a round trip, µs, median".to_owned()]];
    table[0].extend(
        variants
            .iter()
            .map(|(_, variant)| title(variant).to_owned()),
    );
    for bytes in values(&rows, |row| row.number("bytes"))? {
        let size = match bytes {
            bytes if bytes >= 1024 && bytes % 1024 == 0 => format!("{} KiB", bytes / 1024),
            bytes => counted(bytes, "byte"),
        };
        let mut cells = vec![size];
        for (_, variant) in &variants {
            let same = [
                scenario.clone(),
                ("variant", json!(variant)),
                ("bytes", json!(bytes)),
            ];
            cells.push(optional(&kept[0], &same, "latency_us_median", Places(0))?);
        }
        table.push(cells);
    }
    Ok(table)
}

/// One row for each path of Cloud Hypervisor's single stream: through each tunnel, and without a
/// tunnel.
pub(super) fn cloud_hypervisor(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "path",
        "total, s",
        "downtime, ms",
        "the tunnel's CPU-s/GiB",
    ])];
    for row in kept[0].select(&[("scenario", json!("tunnel-cloud-hypervisor"))]) {
        let cpu = match row.text("variant")? {
            "bare" => String::new(),
            _ => cell(row, "cpu_s_per_gib", Places(2))?,
        };
        table.push(vec![
            match row.text("variant")? {
                "bare" => "no tunnel".to_owned(),
                variant => title(variant).to_owned(),
            },
            cell(row, "total_s", Places(2))?,
            cell(row, "guest_downtime_ms", Places(0))?,
            cpu,
        ]);
    }
    Ok(table)
}

/// The tunnels against QEMU without a tunnel, in the same rounds: one row for each tunnel, number of
/// connections and limit on the downtime.
pub(super) fn qemu_ratios(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "connections, limit",
        "through",
        "total against plain",
        "total against TLS",
        "downtime against TLS",
    ])];
    let mut rows = kept[0].select(&[("scenario", json!("tunnel-qemu"))]);
    rows.sort_by_cached_key(|row| {
        let number = |name| row.number(name).ok();
        (number("streams"), number("downtime_limit_ms"))
    });
    let mut group = String::new();
    for row in rows {
        if row.figure("total_against_plain")?.is_none() {
            continue;
        }
        let streams = match row.number("streams")? {
            1 => "one stream".to_owned(),
            channels => format!("multifd {channels}"),
        };
        let this = format!("{streams}, {} ms", row.number("downtime_limit_ms")?);
        table.push(vec![
            match this == group {
                true => String::new(),
                false => this.clone(),
            },
            title(row.text("variant")?).to_owned(),
            cell(row, "total_against_plain", Places(2))?,
            cell(row, "total_against_tls", Places(2))?,
            cell(row, "downtime_against_tls", Places(2))?,
        ]);
        group = this;
    }
    Ok(table)
}

/// One row for each path and number of connections, with the total time and the downtime for each
/// limit on the downtime.
pub(super) fn qemu(kept: &[Kept]) -> Result<Cells> {
    let run = &kept[0];
    let scenario = ("scenario", json!("tunnel-qemu"));
    let rows = run.select(std::slice::from_ref(&scenario));
    let limits = values(&rows, |row| row.number("downtime_limit_ms"))?;
    let mut table = vec![header(&["path"])];
    for limit in &limits {
        table[0].push(format!("limit {limit} ms: total, s"));
        table[0].push("downtime, ms".to_owned());
    }
    let key = |row: &Row| Ok((row.number("streams")?, variant_key(row)?));
    for (streams, (_, variant)) in values(&rows, key)? {
        let name = match variant.as_str() {
            "bare" => "QEMU, plain",
            variant => title(variant),
        };
        let mut cells = vec![match streams {
            1 => name.to_owned(),
            channels => format!("{name}, multifd {channels}"),
        }];
        for limit in &limits {
            let same = [
                scenario.clone(),
                ("variant", json!(variant)),
                ("streams", json!(streams)),
                ("downtime_limit_ms", json!(limit)),
            ];
            let row = run.row(&same)?;
            let ended = row.figure("ended")?;
            cells.extend(match ended {
                Some(ended) if ended.median < 0.5 => ["does not end".to_owned(), String::new()],
                _ => [
                    cell(row, "total_s", Places(2))?,
                    cell(row, "downtime_ms", Places(0))?,
                ],
            });
        }
        table.push(cells);
    }
    Ok(table)
}
