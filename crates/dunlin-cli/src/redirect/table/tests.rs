//! Tests of the table as nft lists it.
#![allow(clippy::unwrap_used)]

use serde_json::json;

use super::*;

fn rule(chain: &str, comment: &str, packets: u64, handle: u64) -> Value {
    json!({"rule": {"chain": chain, "handle": handle, "comment": comment, "expr": [
        {"match": {"left": {"meta": {"key": "skuid"}}, "right": {"set": [handle, 0]}}},
        {"counter": {"packets": packets, "bytes": 60 * packets}},
        {"redirect": {"port": 18301}},
    ]}})
}

fn list(version: &str, rules: &[Value]) -> Table {
    let mut objects = vec![
        json!({"metainfo": {"version": version}}),
        json!({"table": {"name": "dunlin", "handle": 7}}),
        json!({"chain": {"name": "output", "handle": 8}}),
    ];
    objects.extend_from_slice(rules);
    Table::of(&json!({"nftables": objects}))
}

#[test]
fn counters_are_those_of_the_rules_comments() {
    let table = list(
        "1",
        &[
            rule("input", "dunlin redirect 00ff", 0, 9),
            rule("nat_output", "vm redirected", 1, 9),
            rule("nat_output", "vm redirected", 2, 9),
            rule("output", "vm rejected", 4, 9),
            rule("forward", "vm rejected", 8, 9),
            rule("input", "vm rejected", 16, 9),
            rule("input", "vm plain 192.0.2.9", 32, 9),
            rule("input", "vm plain 2001:db8::9", 64, 9),
            rule("output", "pve rejected", 128, 9),
        ],
    );
    assert_eq!(table.digest(), Some("00ff"));
    assert_eq!(table.redirect_ports(), [18301].into());
    let counters = table.counters();
    let plain = [("192.0.2.9", 32), ("2001:db8::9", 64)];
    let expected = Counters {
        redirected: 3,
        rejected_output: 4,
        rejected_forward: 8,
        rejected_input: 16,
        plain: plain.map(|(at, count)| (at.to_owned(), count)).into(),
    };
    assert_eq!(counters["vm"], expected);
    assert_eq!(counters["pve"].rejected_output, 128);
    assert!(list("1", &[]).counters().is_empty());
}

#[test]
fn counters_handles_and_the_order_in_sets_are_no_difference() {
    let before = list("1", &[rule("output", "vm rejected", 1, 3)]);
    let mut after = list("1", &[rule("output", "vm rejected", 9, 4)]);
    let set = &mut after.objects[2]["rule"]["expr"][0]["match"]["right"]["set"];
    *set = json!([0, 3]);
    assert_eq!(before.record().difference(&after.record()), None);
    *after.objects[2]
        .pointer_mut("/rule/expr/0/match/right/set/1")
        .unwrap() = json!(5);
    assert!(before.record().difference(&after.record()).is_some());
}

#[test]
fn a_difference_names_the_chain_or_the_program() {
    let [one, two] = ["one", "two"].map(|name| rule("output", name, 0, 1));
    let record = |rules: &[Value]| list("1", rules).record();
    let both = record(&[one.clone(), two.clone()]);
    for (live, part) in [
        (
            record(std::slice::from_ref(&one)),
            "rule \"two\" of chain output is missing",
        ),
        (record(&[]), "rule \"one\""),
        (record(&[two.clone(), one.clone()]), "order"),
        (
            record(&[one.clone(), two.clone(), json!({"chain": {"name": "x"}})]),
            "chain x was added",
        ),
        (list("2", &[one, two]).record(), "from version 1 to 2"),
    ] {
        let difference = both.difference(&live).unwrap();
        assert!(difference.contains(part), "{part}: {difference}");
    }
}
