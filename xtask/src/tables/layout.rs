//! The tables: the page of each, the kept results that it shows, and how its cells are written.
//!
//! In most tables, the rows follow from the lines of the results, so a run with more variants adds
//! rows.

use anyhow::{Context, Result};
use serde_json::json;

use super::cells::Digits::{All, Places, Short};
use super::cells::{Digits, cell, counted, header, median, order, title, values};
use super::kept::{Kept, Row};
use super::scaling::{self, GBIT_PER_GIB};
use super::{evacuate, growth, status, tunnel};

/// A table in a page of the documentation.
pub(super) struct Table {
    /// The table's name, as in the comments that enclose the table in the page.
    pub(super) name: &'static str,
    /// The path of the page, relative to the workspace.
    pub(super) page: &'static str,
    /// The names of the kept results, in the order in which `cells` gets them.
    pub(super) results: &'static [&'static str],
    /// Whether the commands and conditions of the runs precede the table.
    pub(super) has_conditions: bool,
    /// Computes the rows. The first row is the header.
    pub(super) cells: fn(&[Kept]) -> Result<Cells>,
}

/// Rows of cells.
pub(super) type Cells = Vec<Vec<String>>;

/// All tables.
pub(super) const TABLES: [Table; 24] = [
    Table {
        name: "measured",
        page: "README.md",
        results: &["lanes", "whole", "tunnel", "tunnel-qemu", "thrash"],
        has_conditions: false,
        cells: measured,
    },
    Table {
        name: "connections",
        page: "docs/benchmarking/connections.md",
        results: &["connections"],
        has_conditions: true,
        cells: connections,
    },
    Table {
        name: "tunnel-qemu",
        page: "docs/benchmarking/downtime.md",
        results: &["tunnel-qemu"],
        has_conditions: true,
        cells: tunnel::qemu,
    },
    Table {
        name: "tunnel-qemu-ratios",
        page: "docs/benchmarking/downtime.md",
        results: &["tunnel-qemu"],
        has_conditions: false,
        cells: tunnel::qemu_ratios,
    },
    Table {
        name: "growth",
        page: "docs/benchmarking/growth.md",
        results: &["growth"],
        has_conditions: true,
        cells: growth::memory,
    },
    Table {
        name: "growth-half",
        page: "docs/benchmarking/growth.md",
        results: &["growth-half"],
        has_conditions: true,
        cells: growth::half,
    },
    Table {
        name: "growth-lanes",
        page: "docs/benchmarking/growth.md",
        results: &["growth-lanes"],
        has_conditions: true,
        cells: growth::lanes,
    },
    Table {
        name: "evacuate",
        page: "docs/benchmarking/evacuate.md",
        results: &["evacuate"],
        has_conditions: true,
        cells: evacuate::table,
    },
    Table {
        name: "lanes",
        page: "docs/benchmarking/lanes.md",
        results: &["lanes"],
        has_conditions: true,
        cells: lanes,
    },
    Table {
        name: "lanes-second-host",
        page: "docs/benchmarking/lanes.md",
        results: &["lanes-second-host"],
        has_conditions: true,
        cells: lanes,
    },
    Table {
        name: "long-line",
        page: "docs/benchmarking/long-line.md",
        results: &["long-line"],
        has_conditions: true,
        cells: long_line,
    },
    Table {
        name: "scaling",
        page: "docs/scaling.md",
        results: &["whole", "lanes"],
        has_conditions: true,
        cells: scaling::table,
    },
    Table {
        name: "status",
        page: "docs/benchmarking/status.md",
        results: &["status"],
        has_conditions: true,
        cells: status::table,
    },
    Table {
        name: "thrash",
        page: "docs/benchmarking/thrash.md",
        results: &["thrash"],
        has_conditions: true,
        cells: thrash,
    },
    Table {
        name: "tunnel-bulk",
        page: "docs/benchmarking/tunnel.md",
        results: &["tunnel"],
        has_conditions: true,
        cells: tunnel::bulk,
    },
    Table {
        name: "tunnel-pingpong",
        page: "docs/benchmarking/tunnel.md",
        results: &["tunnel"],
        has_conditions: false,
        cells: tunnel::round_trips,
    },
    Table {
        name: "tunnel-cloud-hypervisor",
        page: "docs/benchmarking/tunnel.md",
        results: &["tunnel"],
        has_conditions: false,
        cells: tunnel::cloud_hypervisor,
    },
    Table {
        name: "whole",
        page: "docs/benchmarking/whole.md",
        results: &["whole"],
        has_conditions: true,
        cells: whole,
    },
    Table {
        name: "whole-slow-rounds",
        page: "docs/benchmarking/whole.md",
        results: &["whole-slow-rounds"],
        has_conditions: true,
        cells: slow_rounds,
    },
    Table {
        name: "whole-second-host",
        page: "docs/benchmarking/whole.md",
        results: &["whole-second-host"],
        has_conditions: true,
        cells: whole,
    },
    Table {
        name: "whole-ratios",
        page: "docs/benchmarking/whole.md",
        results: &["whole"],
        has_conditions: false,
        cells: whole_ratios,
    },
    Table {
        name: "whole-ratios-second-host",
        page: "docs/benchmarking/whole.md",
        results: &["whole-second-host"],
        has_conditions: false,
        cells: whole_ratios,
    },
    Table {
        name: "huge-pages-epyc",
        page: "docs/benchmarking/whole.md",
        results: &["huge-pages-epyc"],
        has_conditions: true,
        cells: huge_pages,
    },
    Table {
        name: "huge-pages-xeon",
        page: "docs/benchmarking/whole.md",
        results: &["huge-pages-xeon"],
        has_conditions: true,
        cells: huge_pages,
    },
];

/// The table of README.
fn measured(kept: &[Kept]) -> Result<Cells> {
    let [lanes, whole, tunnel, qemu, thrash] = kept else {
        unreachable!("the table has five files");
    };
    let lane = |variant: &str| -> Result<String> {
        let row = lanes.row(&[
            ("variant", json!(variant)),
            ("provider", json!("aws-lc-rs")),
            ("lanes", json!(2)),
        ])?;
        Ok(Places(2).write(median(row, "cpu_s_per_gib")?))
    };
    let dunlin = whole.row(&[
        ("variant", json!("dunlin")),
        ("guest", json!("idle")),
        ("lanes", json!(2)),
    ])?;
    // Each figure is the best result over all numbers of connections.
    let peer = |variant: &str, name: &str, best: fn(f64, f64) -> f64| -> Result<String> {
        let idle = [("variant", json!(variant)), ("guest", json!("idle"))];
        let rows = whole.select(&idle).into_iter();
        let medians = rows.map(|row| median(row, name));
        let medians = medians.collect::<Result<Vec<_>>>()?;
        let best = medians.into_iter().reduce(best);
        let best = best
            .with_context(|| format!("{}: no line for {variant} with an idle guest", whole.name))?;
        Ok(Places(2).write(best))
    };
    let peers = |name: &str, unit: &str, best: fn(f64, f64) -> f64| -> Result<String> {
        let both = |vmm: &str| -> Result<String> {
            let tls = peer(&format!("{vmm}-tls"), name, best)?;
            let plain = peer(&format!("{vmm}-plain"), name, best)?;
            Ok(format!("TLS {tls}, plain {plain} {unit}"))
        };
        let (cloud_hypervisor, qemu) = (both("cloud-hypervisor")?, both("qemu")?);
        Ok(format!(
            "Cloud Hypervisor: {cloud_hypervisor}; QEMU: {qemu}"
        ))
    };
    let through = |variant: &str, ends: &str| -> Result<String> {
        let row = tunnel.row(&[
            ("scenario", json!("tunnel-bulk")),
            ("variant", json!(variant)),
            ("ends", json!(ends)),
            ("streams", json!(1)),
        ])?;
        Ok(Places(2).write(median(row, "gib_per_s")?))
    };
    let migrated = |variant: &str| -> Result<String> {
        let over = |streams: u64| -> Result<String> {
            let row = qemu.row(&[
                ("scenario", json!("tunnel-qemu")),
                ("variant", json!(variant)),
                ("streams", json!(streams)),
                ("downtime_limit_ms", json!(50)),
            ])?;
            let total = Places(1).write(median(row, "total_s")?);
            Ok(format!("{total} s, {:.0} ms", median(row, "downtime_ms")?))
        };
        Ok(format!("{} (multifd {})", over(1)?, over(4)?))
    };
    let writing = |lanes: u64| -> Result<String> {
        let row = thrash.row(&[
            ("dirty_rate", json!(350 * PAGES_PER_MIB)),
            ("lane_bytes_per_s", json!(300 << 20)),
            ("lanes", json!(lanes)),
        ])?;
        let total = Places(1).write(median(row, "total_s")?);
        Ok(match median(row, "throttle_percent")? {
            0.0 => format!("{total} s, guest not throttled"),
            percent => format!("{total} s, guest throttled by {percent:.0} %"),
        })
    };
    let row = |what: &str, dunlin: String, others: String| vec![what.to_owned(), dunlin, others];
    Ok(vec![
        header(&["measurement", "Dunlin", "compared with"]),
        row(
            "two plain lanes alone, CPU time per GiB",
            format!("{} s", lane("plain")?),
            format!("plain TCP: {} s", lane("plain-floor")?),
        ),
        row(
            "two TLS lanes alone, CPU time per GiB",
            format!("{} s", lane("tls")?),
            format!(
                "floor: plain TCP and the cipher, measured apart and added: {} s",
                lane("floor")?
            ),
        ),
        row(
            "whole migration of an idle guest, two TLS lanes",
            with_bits(median(dunlin, "gib_per_s")?),
            peers("gib_per_s", "GiB/s", f64::max)?,
        ),
        row(
            "the same, CPU time per GiB",
            format!("{} s", Places(2).write(median(dunlin, "cpu_s_per_gib")?)),
            peers("cpu_s_per_gib", "s", f64::min)?,
        ),
        row(
            "tunnel, two lanes, unix sockets",
            format!("{} GiB/s", through("stripe-2", "unix")?),
            format!("a pair of stunnels: {} GiB/s", through("stunnel", "unix")?),
        ),
        row(
            "tunnel, two lanes, TCP sockets",
            format!("{} GiB/s", through("stripe-2", "tcp")?),
            format!("a pair of stunnels: {} GiB/s", through("stunnel", "tcp")?),
        ),
        row(
            "QEMU guest of 2 GiB that writes, one stream, downtime limit of 50 ms: total, downtime",
            format!("through a tunnel with two lanes: {}", migrated("stripe-2")?),
            format!(
                "no tunnel: QEMU's TLS {}; plain {}",
                migrated("qemu-tls")?,
                migrated("bare")?
            ),
        ),
        row(
            "guest that writes 350 MiB/s, lanes limited to 300 MiB/s, total time",
            format!("two lanes: {}", writing(2)?),
            format!("Dunlin with one lane: {}", writing(1)?),
        ),
    ])
}

/// A rate in GiB/s and in Gbit/s, the unit of network cards.
fn with_bits(gib_per_s: f64) -> String {
    format!(
        "{} GiB/s ({} Gbit/s)",
        Places(2).write(gib_per_s),
        Places(1).write(gib_per_s * GBIT_PER_GIB)
    )
}

fn connections(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "lanes",
        "GiB/s",
        "against one lane",
        "stop and wait, GiB/s",
        "`cpu_busy`",
    ])];
    for row in &kept[0].rows {
        table.push(vec![
            row.number("lanes")?.to_string(),
            cell(row, "gib_per_s", Places(3))?,
            cell(row, "one_lane_ratio", Places(2))?,
            cell(row, "stop_and_wait_gib_per_s", Places(3))?,
            cell(row, "cpu_busy", Places(2))?,
        ]);
    }
    Ok(table)
}

fn lanes(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "lanes, provider",
        "variant",
        "CPU-s/GiB",
        "GiB/s",
        "CPU time against the floor",
        "against the cache floor",
        "against plain TCP",
    ])];
    let run = kept[0].rows.iter().collect::<Vec<_>>();
    let key = |row: &Row| Ok((row.text("provider")?.to_owned(), row.number("lanes")?));
    for (provider, lanes) in values(&run, key)? {
        let same = [("provider", json!(provider)), ("lanes", json!(lanes))];
        for (at, row) in kept[0].select(&same).into_iter().enumerate() {
            let configuration = match at {
                0 => format!("{lanes}, {provider}"),
                _ => String::new(),
            };
            let name = match row.text("variant")? {
                "plain-floor" => "plain TCP",
                "tls" => "TLS",
                variant => title(variant),
            };
            table.push(vec![
                configuration,
                name.to_owned(),
                cell(row, "cpu_s_per_gib", Places(2))?,
                cell(row, "gib_per_s", Places(2))?,
                cell(row, "floor_ratio", Places(2))?,
                cell(row, "cache_floor_ratio", Places(2))?,
                cell(row, "plain_floor_ratio", Places(2))?,
            ]);
        }
    }
    Ok(table)
}

fn long_line(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "socket buffers",
        "congestion control",
        "round trip, ms",
        "first pass, GiB/s",
        "total, s",
        "held by the receive window, %",
        "held by the send buffer, %",
    ])];
    for row in &kept[0].rows {
        table.push(vec![
            row.text("variant")?.to_owned(),
            row.text("congestion_control")?.to_uppercase(),
            row.number("rtt_ms")?.to_string(),
            cell(row, "gib_per_s", Places(3))?,
            cell(row, "total_s", Places(1))?,
            cell(row, "rwnd_limited_percent", Places(0))?,
            cell(row, "sndbuf_limited_percent", Places(0))?,
        ]);
    }
    Ok(table)
}

/// The number of pages of 4 KiB in a MiB.
const PAGES_PER_MIB: u64 = 256;

fn thrash(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "asked",
        "seen",
        "lanes",
        "total, s",
        "passes",
        "throttled by",
        "downtime, ms",
        "against one lane",
    ])];
    for row in &kept[0].rows {
        let seen = median(row, "dirty_rate_seen")? / PAGES_PER_MIB as f64;
        let passes = median(row, "iterations")?;
        table.push(vec![
            (row.number("dirty_rate")? / PAGES_PER_MIB).to_string(),
            Places(0).write(seen),
            row.number("lanes")?.to_string(),
            cell(row, "total_s", Places(1))?,
            // The median of an even number of rounds can lie between two whole numbers.
            Places(usize::from(passes.fract() != 0.0)).write(passes),
            match median(row, "throttle_percent")? {
                0.0 => "–".to_owned(),
                percent => format!("{percent:.0} %"),
            },
            cell(row, "downtime_ms", Places(0))?,
            cell(row, "one_lane_ratio", Places(2))?,
        ]);
    }
    Ok(table)
}

fn whole(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "guest, variant",
        "total, s",
        "GiB/s",
        "CPU-s/GiB",
        "downtime, ms",
        "destination's peak, MiB",
    ])];
    for (name, row) in whole_rows(&kept[0])? {
        table.push(vec![
            name,
            cell(row, "total_s", Places(2))?,
            cell(row, "gib_per_s", Places(2))?,
            cell(row, "cpu_s_per_gib", Places(2))?,
            cell(row, "downtime_ms", Short)?,
            cell(row, "destination_peak_mib", Places(0))?,
        ]);
    }
    Ok(table)
}

/// The rows of a run of whole migrations in the order of the tables, with their names.
fn whole_rows(kept: &Kept) -> Result<Vec<(String, &Row)>> {
    let mut rows = Vec::new();
    for row in &kept.rows {
        let guest = match row.text("guest")? {
            "none" => "",
            guest => guest,
        };
        let key = (guest, order(row.text("variant")?), row.number("lanes")?);
        rows.push((key, row));
    }
    rows.sort_by_key(|(key, _)| *key);
    let named = rows.into_iter().map(|((guest, _, lanes), row)| {
        let variant = row.text("variant")?;
        let connections = match variant {
            "floor" => counted(lanes, "lane"),
            "dunlin" => counted(lanes, "TLS lane"),
            variant if variant.starts_with("qemu") => format!("multifd {lanes}"),
            _ => counted(lanes, "connection"),
        };
        let parts = [guest, title(variant), &connections];
        let parts = parts.into_iter().filter(|part| !part.is_empty());
        Ok((parts.collect::<Vec<_>>().join(", "), row))
    });
    named.collect()
}

/// Whole migrations with the time that the hypervisor took during them.
fn slow_rounds(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "guest, variant",
        "total, s",
        "CPU-s/GiB",
        "CPU time taken by the hypervisor, s",
    ])];
    for (name, row) in whole_rows(&kept[0])? {
        table.push(vec![
            name,
            cell(row, "total_s", Places(2))?,
            cell(row, "cpu_s_per_gib", Places(2))?,
            cell(row, "stolen_s", Places(2))?,
        ]);
    }
    Ok(table)
}

/// Dunlin against the floor and against the best line of each peer with TLS, in the same rounds.
fn whole_ratios(kept: &[Kept]) -> Result<Cells> {
    let mut table = vec![header(&[
        "guest, lanes",
        "rate against Cloud Hypervisor",
        "CPU time against Cloud Hypervisor",
        "rate against QEMU",
        "CPU time against QEMU",
        "CPU time against the floor",
    ])];
    for row in kept[0].select(&[("variant", json!("dunlin"))]) {
        let lanes = row.number("lanes")?;
        table.push(vec![
            format!("{}, {}", row.text("guest")?, counted(lanes, "lane")),
            cell(row, "against_cloud_hypervisor", Places(2))?,
            cell(row, "cpu_against_cloud_hypervisor", Places(2))?,
            cell(row, "against_qemu", Places(1))?,
            cell(row, "cpu_against_qemu", Places(2))?,
            cell(row, "floor_ratio", Places(2))?,
        ]);
    }
    Ok(table)
}

/// A table with the figures of each round, because there are few rounds.
fn huge_pages(kept: &[Kept]) -> Result<Cells> {
    let variants = [
        (
            "`--no-huge-pages` at both ends",
            vec![("huge_pages", json!(false))],
        ),
        (
            "huge pages advised, the default",
            vec![("huge_pages", json!(true))],
        ),
        (
            "Cloud Hypervisor, 2 connections",
            vec![
                ("variant", json!("cloud-hypervisor-tls")),
                ("lanes", json!(2)),
            ],
        ),
    ];
    let mut table = vec![header(&["", "GiB/s", "CPU-s/GiB"])];
    for (name, conditions) in variants {
        let rows = kept[0].select(&conditions);
        if rows.is_empty() {
            continue;
        }
        let rounds = |figure: &str, digits: Digits| -> Result<String> {
            let rounds = rows.iter().map(|row| cell(row, figure, digits));
            Ok(rounds.collect::<Result<Vec<_>>>()?.join(", "))
        };
        table.push(vec![
            name.to_owned(),
            rounds("gib_per_s", Places(2))?,
            rounds("cpu_s_per_gib", All)?,
        ]);
    }
    Ok(table)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_tunnel_has_a_column_for_its_floor_if_that_was_measured() {
        let table = |figures: &[&'static str]| {
            let mut results = dunlin_bench::Results::default();
            let line = results.line("tunnel-bulk", "go-proxy");
            let mut line = line.with("ends", "unix").with("streams", 1);
            for figure in figures {
                line = line.figure(figure, 1.5);
            }
            line.add();
            let run = r#"{"run":{"date":"","machine":"","conditions":"","command":""}}"#;
            let text = format!("{run}\n{}", results.json()[0]);
            tunnel::bulk(&[Kept::parse("tunnel", &text).unwrap()]).unwrap()
        };
        let with = table(&["gib_per_s", "floor_ratio"]);
        assert_eq!(with[0][6], "against the floor");
        let row = ["unix, 1", "Go proxy", "1.50", "", "", "", "1.50"];
        assert_eq!(with[1..], [row]);
        let without = table(&["gib_per_s"]);
        assert_eq!((without[0].len(), without[1].len()), (6, 6));
    }

    #[test]
    fn a_new_run_with_other_variants_needs_no_edit() {
        let mut results = dunlin_bench::Results::default();
        for (total_s, downtime_ms) in [(0.5, 1.7), (0.7, 12.0)] {
            let line = results.line("whole", "floor").with("guest", "none");
            line.with("lanes", 1).figure("total_s", total_s).add();
            let line = results.line("whole", "new-peer").with("guest", "idle");
            let line = line.with("lanes", 3).figure("downtime_ms", downtime_ms);
            line.detail("last_round", vec![json!({"pages": 4})]).add();
        }
        let run = r#"{"run":{"date":"2026-11-25","machine":"","conditions":"","command":""}}"#;
        let lines = results.json().into_iter().map(|line| format!("\n{line}"));
        let text = run.to_owned() + &lines.collect::<String>();
        let table = whole(&[Kept::parse("whole", &text).unwrap()]).unwrap();
        let floor = ["floor, 1 lane", "0.60 [0.50–0.70]", "", "", "", ""];
        let peer = [
            "idle, new-peer, 3 connections",
            "",
            "",
            "",
            "6.8 [1.7–12]",
            "",
        ];
        assert_eq!(table[1..], [floor, peer]);
    }
}
