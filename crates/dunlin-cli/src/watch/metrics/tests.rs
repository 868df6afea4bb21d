#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{from_value, json};

use super::super::snapshot::{Held, Session};
use super::*;
use crate::published::history::Finished;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The names of the samples of a metric.
fn samples_of(metric: &Metric) -> Vec<String> {
    let suffixes: &[&str] = match metric.kind {
        Kind::Counter => &["_total"],
        Kind::Gauge => &[""],
        Kind::Distribution => &["_bucket", "_sum", "_count"],
    };
    let names = suffixes.iter();
    names
        .map(|suffix| format!("{}{suffix}", metric.name))
        .collect()
}

/// The page of metrics, regenerated if `DUNLIN_BLESS` is set.
#[test]
fn the_page_of_metrics_is_generated_from_the_code() {
    let mut page = "# Names of metrics\n\nThis page is for operators. It lists every metric that \
                    `dunlin serve-status` serves; [Metrics](../operate/metrics.md) explains them. \
                    A histogram has the samples `_bucket`, `_sum` and `_count`.\n\n\
                    | name | type | labels | meaning |\n| --- | --- | --- | --- |\n"
        .to_owned();
    for metric in METRICS {
        let (name, kind) = match metric.kind {
            Kind::Counter => (format!("{}_total", metric.name), "counter"),
            Kind::Gauge => (metric.name.to_owned(), "gauge"),
            Kind::Distribution => (metric.name.to_owned(), "histogram"),
        };
        let labels = metric.labels.replace(' ', ", ");
        page += &format!("| `{name}` | {kind} | {labels} | {} |\n", metric.help);
    }
    let path = repository().join("docs/reference/metrics.md");
    if std::env::var_os("DUNLIN_BLESS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap();
    assert!(
        page == written,
        "docs/reference/metrics.md differs from the code; write it anew with DUNLIN_BLESS=1"
    );
}

#[test]
fn the_names_follow_the_conventions_of_openmetrics() {
    let mut names = BTreeSet::new();
    for metric in METRICS {
        let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
        assert!(metric.name.starts_with("dunlin_"), "{}", metric.name);
        assert!(metric.name.bytes().all(is_valid), "{}", metric.name);
        assert!(names.insert(metric.name), "{} is there twice", metric.name);
        // Reserved suffixes.
        for suffix in ["_total", "_bucket", "_sum", "_count", "_created", "_info"] {
            let is_info = metric.name == "dunlin_build_info";
            assert!(is_info || !metric.name.ends_with(suffix), "{}", metric.name);
        }
        if metric.kind == Kind::Distribution {
            assert!(metric.name.ends_with("_seconds"), "{}", metric.name);
        }
        assert!(metric.help.ends_with('.'), "{}", metric.name);
        assert!(
            metric
                .labels
                .bytes()
                .all(|byte| is_valid(byte) || byte == b' ')
        );
    }
}

/// All words in a text that have the prefix `dunlin_`.
fn names_in(text: &str) -> BTreeSet<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let words = text.split(|character| !is_part(character));
    let names = words.filter(|word| word.starts_with("dunlin_"));
    names.map(str::to_owned).collect()
}

#[test]
fn the_dashboard_the_alerts_and_the_page_use_only_names_that_exist() {
    let known: BTreeSet<String> = METRICS.iter().flat_map(samples_of).collect();
    for (file, least) in [
        ("dist/grafana/dunlin.json", 20),
        ("dist/prometheus/alerts.yaml", 12),
        ("docs/operate/metrics.md", 6),
    ] {
        let text = fs::read_to_string(repository().join(file)).unwrap();
        let used = names_in(&text);
        assert!(used.len() >= least, "{file}: {}", used.len());
        for name in used {
            // The page also mentions a group of metrics by the common beginning of their names.
            let is_group = name == "dunlin_migration" && file.starts_with("docs/");
            assert!(is_group || known.contains(&name), "{file}: {name}");
        }
    }
}

/// The labels that an expression names: in braces before an operator, and after `by`.
fn labels_in(expression: &str) -> BTreeSet<String> {
    let after = |text: &'static str, end: char| {
        let parts = expression.split(text).skip(1);
        parts.filter_map(move |part| part.split(end).next())
    };
    let matchers = after("{", '}').flat_map(|part| part.split(','));
    let matchers = matchers.filter_map(|one| one.split(['=', '!']).next());
    let groups = after(" by (", ')').flat_map(|part| part.split(", "));
    matchers.chain(groups).map(str::to_owned).collect()
}

/// The labels that a text of a legend or of an alert inserts.
fn inserted(text: &str) -> BTreeSet<String> {
    let parts = text.split("{{").skip(1);
    let parts = parts.filter_map(|part| part.split("}}").next());
    let names = parts.map(|part| part.trim().trim_start_matches("$labels."));
    names.map(str::to_owned).collect()
}

/// Asserts that the metrics of the expression have these labels. Prometheus adds `instance`, and
/// `le` is the label of buckets.
fn assert_labels(expression: &str, used: impl IntoIterator<Item = String>) {
    let names = names_in(expression);
    let metrics = METRICS.iter();
    let metrics = metrics.filter(|one| samples_of(one).iter().any(|name| names.contains(name)));
    let known: BTreeSet<&str> = metrics
        .flat_map(|one| one.labels.split(' '))
        .chain(["instance", "le"])
        .collect();
    for label in used {
        assert!(known.contains(&*label), "no label {label}: {expression}");
    }
}

#[test]
fn the_dashboard_and_the_alerts_use_only_labels_that_the_metrics_have() {
    let read = |file: &str| fs::read_to_string(repository().join(file)).unwrap();
    let dashboard: serde_json::Value =
        serde_json::from_str(&read("dist/grafana/dunlin.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut expressions = 0;
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        let legend = target["legendFormat"].as_str().unwrap();
        assert_labels(
            expression,
            labels_in(expression).into_iter().chain(inserted(legend)),
        );
        expressions += 1;
    }
    assert!(expressions >= 25, "{expressions}");

    let alerts = read("dist/prometheus/alerts.yaml");
    let mut expressions = 0;
    for alert in alerts.split("- alert: ").skip(1) {
        let of = |key: &str| {
            let value = alert.lines().find_map(|line| line.trim().strip_prefix(key));
            value.unwrap_or_else(|| panic!("no {key} in {alert}"))
        };
        let expression = of("expr: ");
        let summary = of("summary: ");
        assert_labels(
            expression,
            labels_in(expression).into_iter().chain(inserted(summary)),
        );
        expressions += 1;
    }
    assert!(expressions >= 13, "{expressions}");
}

#[test]
fn every_alert_has_its_reason() {
    let text = fs::read_to_string(repository().join("dist/prometheus/alerts.yaml")).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut alerts = 0;
    for (at, line) in lines.iter().enumerate() {
        if line.starts_with("- alert: ") {
            assert!(lines[at - 1].starts_with("# "), "{line}");
            alerts += 1;
        }
    }
    assert!(alerts >= 12, "{alerts}");
}

/// A snapshot with an object of every kind, each with this name, which a hostile peer may have
/// chosen.
fn snapshot(name: &str) -> Snapshot {
    let rules = json!({"state": "missing", "difference": "x"});
    let route = json!({"route": name, "channels": 1, "closed": 2, "failed": 3, "read_bytes": 4,
        "written_bytes": 5, "read_bytes_per_s": 0.0, "written_bytes_per_s": 0.0, "trouble": "x"});
    let lane = json!({"lane": 7, "direction": "sent", "bytes": 8, "retransmits": 9});
    let peer = json!({"peer": name, "at": "192.0.2.1:1", "channels": 1, "lanes": 1,
        "held_bytes": 10, "unacknowledged_bytes": 11, "by_lane": [lane]});
    let certificate = json!({"item": "certificate", "path": name, "position": 0,
        "not_after_unix_s": 12});
    let tunnel = json!({"name": name, "pid": 1, "control": "", "address": "", "running_s": 1.0,
        "over_ms": 0.0, "routes": [route], "listeners": [], "peers": [peer, peer],
        "redirect": {"refused": 1, "rules": rules}, "lanes_lost": 13,
        "certificates": [certificate]});
    let association = json!({"direction": "out", "cpu": 3, "spi": 1, "epoch": 1, "bytes": 14,
        "packets": 15, "replayed": 16, "outside_window": 17, "not_authentic": 18});
    let ipsec = json!({"peer": name, "ports": "1-2", "up": true, "kept": true,
        "associations": [association]});
    let progress = json!({"iteration": 2, "bytes_per_s": 1, "remaining_bytes": 19,
        "dirty_pages_per_s": 20, "predicted_downtime_ms": 21.0, "lanes": [[1, 22]],
        "retransmits": [[1, 30]]});
    let migration = json!({"role": "source", "peer": name, "phase": "pre-copy", "seconds": 1.0,
        "rate": null, "throttle": 50, "progress": progress, "lanes_lost": 23});
    let status = json!({"name": name, "uuid": "00", "pid": 2, "state": "running",
        "memory_bytes": 1, "pages_checked": 0, "beats": 0, "full_passes": 0, "downtime_ms": null,
        "largest_gap_ms": 0.0, "migration": migration});
    let mut in_doubt = status.clone();
    in_doubt["state"] = "in-doubt".into();
    in_doubt["migration"] = serde_json::Value::Null;
    let expiring = |not_after_unix_s: u64| {
        json!([{"item": "certificate", "path": "own", "position": 0,
            "not_after_unix_s": not_after_unix_s}])
    };
    let handoff = json!({"pid": 3, "address": "192.0.2.1:443", "handed_over": {"pool": 24},
        "forwarded": 25, "refused": {"malformed": 26}, "certificates": expiring(27)});
    // Processes with the same file, of which one has not loaded the newer version yet.
    let identities = [29, 28, 29].map(|at| Held {
        kind: "vm".to_owned(),
        name: String::new(),
        certificates: from_value(expiring(at)).unwrap(),
    });
    Snapshot {
        sessions: [status, in_doubt]
            .into_iter()
            .filter_map(|status| Session::reported(from_value(status).unwrap()))
            .collect(),
        tunnels: vec![from_value(tunnel).unwrap()],
        ipsec: vec![from_value(ipsec).unwrap()],
        handoffs: vec![from_value(handoff).unwrap()],
        identities: identities.into(),
        ..Snapshot::empty()
    }
}

fn moved(ended_ms: u64) -> (String, Finished) {
    let finished = Finished::now("source", "web", "b.test", 2.0);
    let downtime = json!({"guest_ms": 30.0, "total_ms": 30.0, "pause_ms": 1.0,
        "last_pages_ms": 20.0, "state_ms": 5.0, "ready_ms": 6.0, "resume_ms": 3.0});
    let finished = Finished {
        ended_ms,
        wire_bytes: Some(100),
        downtime: Some(from_value(downtime).unwrap()),
        guest_downtime_ms: Some(30.0),
        ..finished
    };
    (ended_ms.to_string(), finished)
}

/// The lines of the text, each with its name, its labels and its value.
fn parsed(text: &str) -> Vec<(String, String, f64)> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let parts = samples.map(|line| {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let labels = labels.strip_suffix('}').unwrap();
        (name.to_owned(), labels.to_owned(), value.parse().unwrap())
    });
    parts.collect()
}

#[test]
fn every_metric_has_a_sample_with_its_labels() {
    let snapshot = snapshot("t");
    let mut totals = Totals::after(&[]);
    totals.add(&[moved(1)]);
    let text = text(&View {
        snapshot: &snapshot,
        totals: &totals,
    });
    assert!(text.ends_with("# EOF\n"), "{text}");
    let samples = parsed(&text);
    for metric in METRICS {
        for name in samples_of(metric) {
            let of_name: Vec<_> = samples.iter().filter(|one| one.0 == name).collect();
            assert!(!of_name.is_empty(), "no {name} in {text}");
            for (_, labels, _) in of_name {
                for label in metric.labels.split_whitespace() {
                    assert!(labels.contains(&format!("{label}=\"")), "{name}: {labels}");
                }
            }
        }
    }
    let value = |name: &str| samples.iter().find(|one| one.0 == name).unwrap().2;
    let expiry = |of: &str| {
        let mut found = samples.iter().filter(|(name, labels, _)| {
            name == "dunlin_certificate_expiry_timestamp_seconds" && labels.contains(of)
        });
        let (_, _, at) = found.next().unwrap();
        assert!(found.next().is_none(), "{of}");
        *at
    };
    assert_eq!(expiry("kind=\"tunnel\",name=\"t\""), 12.0);
    assert_eq!(expiry("kind=\"handoff\",name=\"192.0.2.1:443\""), 27.0);
    assert_eq!(expiry("kind=\"vm\",name=\"\""), 28.0);
    assert_eq!(value("dunlin_migration_lane_retransmits_total"), 30.0);
    assert_eq!(value("dunlin_tunnel_redirect_rules_applied"), 0.0);
    assert_eq!(value("dunlin_tunnel_route_trouble"), 1.0);
    assert_eq!(value("dunlin_migrations_in_doubt"), 1.0);
    assert_eq!(value("dunlin_migration_throttle_ratio"), 0.5);
    // Two connections to the same peer are one series.
    assert_eq!(value("dunlin_tunnel_lane_bytes_total"), 16.0);
    assert!(
        text.contains("# UNIT dunlin_tunnel_lane_bytes bytes\n"),
        "{text}"
    );
    assert!(
        text.contains("# TYPE dunlin_tunnel_lane_bytes counter\n"),
        "{text}"
    );
}

#[test]
fn i7_names_from_peers_stay_inside_their_labels() {
    let name = "a\"} 1\ndunlin_forged{x=\"\\";
    let snapshot = snapshot(name);
    let totals = Totals::after(&[]);
    let text = text(&View {
        snapshot: &snapshot,
        totals: &totals,
    });
    assert!(
        !text.lines().any(|line| line.starts_with("dunlin_forged")),
        "{text}"
    );
    assert!(
        text.contains(r#"peer="a\"} 1\ndunlin_forged{x=\"\\""#),
        "{text}"
    );
}

#[test]
fn only_migrations_that_end_after_the_start_are_counted_and_each_once() {
    let mut totals = Totals::after(&[moved(1)]);
    totals.add(&[moved(1), moved(2)]);
    totals.add(&[moved(2), moved(3)]);
    let mut unknown = moved(4);
    unknown.1.result = "x".repeat(9);
    totals.add(&[moved(3), unknown]);
    assert_eq!(totals.migrations[&("source", "moved")], 2);
    assert_eq!(totals.migrations.len(), 1);
    assert_eq!(totals.sent_bytes, 200);
    assert_eq!(totals.downtime.count(), 2);
    let part = &totals.parts["last-pages"];
    assert!(part.buckets.contains(&(0.025, 2)), "{part:?}");
    assert!((part.sum - 0.04).abs() < 1e-9, "{part:?}");
    let ready = &totals.parts["ready"];
    assert!((ready.sum - 0.012).abs() < 1e-9, "{ready:?}");
}
