//! `dunlin ipsec plan`: prints what a session would install, and changes nothing.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::process::{Command, Output};

use serde_json::Value;

fn plan(words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dunlin"))
        .args(["ipsec", "plan"])
        .args(words.split_whitespace())
        .output()
        .unwrap()
}

fn lines(words: &str) -> Vec<Value> {
    let done = plan(&format!("--json {words}"));
    assert!(done.status.success(), "{done:?}");
    let text = String::from_utf8(done.stdout).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The CPUs of the SAs of a direction, in order.
fn cpus(lines: &[Value], direction: &str) -> Vec<Option<u64>> {
    let of = lines
        .iter()
        .filter(|one| one["kind"] == "sa" && one["direction"] == direction);
    of.map(|one| one["cpu"].as_u64()).collect()
}

const ENDS: &str = "--local 192.0.2.1 --peer 192.0.2.2";

#[test]
fn p14_each_side_has_a_fallback_and_an_sa_for_each_of_its_cpus_that_carries_a_lane() {
    let lines = lines(&format!(
        "--lanes 3 --local-cpus 1,4-7 --peer-cpus 0-1 {ENDS}"
    ));
    assert_eq!(cpus(&lines, "out"), [None, Some(1), Some(4), Some(5)]);
    assert_eq!(cpus(&lines, "in"), [None, Some(0), Some(1)]);
    let spis: HashSet<u64> = lines.iter().filter_map(|one| one["spi"].as_u64()).collect();
    assert_eq!(spis.len(), 7, "two SAs have the same SPI");
    assert!(spis.iter().all(|spi| *spi >= 256));
    for line in &lines {
        let fields: Vec<&str> = line
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        for field in ["kind", "direction", "cpu", "spi", "selector", "action"] {
            assert!(fields.contains(&field), "{line}");
        }
        assert!(
            line["selector"].as_str().unwrap().contains("192.0.2."),
            "{line}"
        );
        assert!(!line.to_string().contains("key"), "{line}");
    }
}

#[test]
fn i6_outgoing_packets_are_blocked_before_any_sa_and_protected_after_the_last() {
    let lines = lines(&format!("--lanes 2 --local-cpus 0-1 --peer-cpus 0 {ENDS}"));
    let at = |wanted: &dyn Fn(&Value) -> bool| -> Vec<usize> {
        let numbered = lines.iter().enumerate().filter(|(_, one)| wanted(one));
        numbered.map(|(at, _)| at).collect()
    };
    let policy = |direction: &'static str, action: &'static str| {
        at(&move |one: &Value| {
            one["kind"] == "policy" && one["direction"] == direction && one["action"] == action
        })
    };
    let sas = at(&|one: &Value| one["kind"] == "sa");
    let (blocking, protecting) = (policy("out", "block"), policy("out", "protect"));
    assert!(blocking.iter().all(|one| one < sas.first().unwrap()));
    assert!(protecting.iter().all(|one| one > sas.last().unwrap()));
    assert_eq!(blocking.len(), protecting.len());
    let required = policy("in", "protect");
    assert!(!required.is_empty() && required.iter().all(|one| one < sas.first().unwrap()));
}

#[test]
fn a_range_of_ports_is_covered_by_blocks_for_either_end() {
    let lines = lines(&format!(
        "--lanes 1 --local-cpus 0 --peer-cpus 0 --ports 4444-4447 {ENDS}"
    ));
    let blocked: Vec<&str> = lines
        .iter()
        .filter(|one| one["action"] == "block")
        .map(|one| one["selector"].as_str().unwrap())
        .collect();
    assert_eq!(
        blocked,
        [
            "tcp 192.0.2.1 192.0.2.2 ports 0/0x0000 4444/0xfffc",
            "tcp 192.0.2.1 192.0.2.2 ports 4444/0xfffc 0/0x0000",
        ]
    );
}

#[test]
fn connections_have_an_sa_and_a_policy_each_and_udp_a_listener() {
    let words = "--lanes 2 --local-cpus 0 --peer-cpus 0 --mode connection --udp 4500 \
                 --local fd00::1 --peer fd00::2";
    let lines = lines(words);
    assert_eq!(cpus(&lines, "out"), [None, None, None]);
    let connections = lines.iter().filter(|one| !one["connection"].is_null());
    assert_eq!(connections.count(), 4);
    let listeners: Vec<&Value> = lines
        .iter()
        .filter(|one| one["kind"] == "listener")
        .collect();
    assert_eq!(listeners.len(), 1);
    assert_eq!(listeners[0]["direction"], "in");
    let protecting = lines
        .iter()
        .filter(|one| one["direction"] == "out" && one["action"] == "protect");
    assert_eq!(
        protecting.count(),
        4,
        "two for the connections and two for the ports"
    );
}

#[test]
fn impossible_plans_are_errors() {
    for (words, says) in [
        ("--local 192.0.2.1 --peer fd00::2", "different families"),
        ("--local 192.0.2.1 --peer 192.0.2.1", "both ends"),
    ] {
        let done = plan(&format!("--lanes 1 --local-cpus 0 --peer-cpus 0 {words}"));
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains(says), "{said}");
    }
    let done = plan(&format!("--lanes 0 --local-cpus 0 --peer-cpus 0 {ENDS}"));
    assert_eq!(done.status.code(), Some(2));
}
