//! The table of docs/scaling.md: what faster links need, computed from measured CPU time.

use anyhow::Result;
use serde_json::json;

use super::cells::{header, median};
use super::kept::Kept;
use super::layout::Cells;

/// The rates of links, in Gbit/s.
const LINKS: [f64; 4] = [25.0, 100.0, 200.0, 400.0];
/// Gbit/s in one GiB/s.
pub(super) const GBIT_PER_GIB: f64 = 8.0 * 1.073_741_824;
/// The round trips for which the table has socket buffers, in ms.
const ROUND_TRIPS_MS: [f64; 2] = [1.0, 10.0];
/// The memory of the guest in the last column, in GiB.
const GUEST_GIB: f64 = 64.0;

/// One row for each link. The first file has whole migrations, the second the rate of one lane.
pub(super) fn table(kept: &[Kept]) -> Result<Cells> {
    let [whole, lanes] = kept else {
        unreachable!("the table has two files");
    };
    let migration = whole.row(&[
        ("variant", json!("dunlin")),
        ("guest", json!("idle")),
        ("lanes", json!(2)),
    ])?;
    let lane = lanes.row(&[
        ("variant", json!("tls")),
        ("provider", json!("aws-lc-rs")),
        ("lanes", json!(1)),
    ])?;
    let cpu = median(migration, "cpu_s_per_gib")?;
    let lane = median(lane, "gib_per_s")?;
    let mut table = vec![header(&[
        "link, Gbit/s",
        "GiB/s",
        "cores, both hosts together",
        "lanes, at least",
        "socket buffer of a lane at 1 ms, 10 ms",
        "64 GiB take, s",
    ])];
    for link in LINKS {
        let rate = link / GBIT_PER_GIB;
        let lanes = (rate / lane).ceil();
        let buffers = ROUND_TRIPS_MS.map(|round_trip| {
            let mib = rate * 1024.0 / lanes * round_trip / 1000.0;
            format!("{mib:.1} MiB")
        });
        table.push(vec![
            format!("{link:.0}"),
            format!("{rate:.1}"),
            format!("{:.1}", rate * cpu),
            format!("{lanes:.0}"),
            buffers.join(", "),
            format!("{:.1}", GUEST_GIB / rate),
        ]);
    }
    Ok(table)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cores_and_lanes_grow_with_the_link_and_the_buffer_of_a_lane_does_not() {
        let kept = |name: &str, row: &str| {
            let run = r#"{"run":{"date":"","machine":"","conditions":"","command":""}}"#;
            Kept::parse(name, &format!("{run}\n{row}")).unwrap()
        };
        let whole = r#"{"scenario":"whole","variant":"dunlin","guest":"idle","lanes":2,"rounds":1,"cpu_s_per_gib":0.75}"#;
        let lanes = r#"{"scenario":"lanes","variant":"tls","provider":"aws-lc-rs","lanes":1,"rounds":1,"gib_per_s":2.0}"#;
        let table = table(&[kept("whole", whole), kept("lanes", lanes)]).unwrap();
        let first = ["25", "2.9", "2.2", "2", "1.5 MiB, 14.9 MiB", "22.0"];
        assert_eq!(table[1], first);
        let last = ["400", "46.6", "34.9", "24", "2.0 MiB, 19.9 MiB", "1.4"];
        assert_eq!(table[4], last);
    }
}
