//! The units of `dunlin handoff accept` in `dist/systemd`. The tests of sockets that a service
//! manager passes are in `handoff_accept.rs`.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/units.rs"]
mod units;

use support::{Hosts, finish, words};
use units::Units;

#[test]
fn the_units_are_valid() {
    let units = Units::new();
    units.verify(&["dunlin-accept.service", "dunlin-accept.socket"]);
}

#[test]
fn the_service_drops_what_it_does_not_need() {
    Units::new().weigh("dunlin-accept.service");
}

#[test]
fn k11_the_service_may_query_the_kernels_choice() {
    let text = Units::new().text("dunlin-accept.service");
    let families = text
        .lines()
        .find(|line| line.starts_with("RestrictAddressFamilies="));
    assert!(families.unwrap().contains("AF_NETLINK"), "{text}");
    assert!(!text.lines().any(|line| line == "ProcSubset=pid"), "{text}");
}

/// The command accepts the example configuration in the unit. It fails only because the test passes
/// it no socket.
#[test]
fn the_units_example_configuration_is_accepted() {
    let text = Units::new().text("dunlin-accept.service");
    let example = text
        .lines()
        .find_map(|line| line.strip_prefix("#   ACCEPT="));
    let start = text
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let (_, arguments) = start.unwrap().split_once(' ').unwrap();
    let hosts = Hosts::new();
    let of = |name: &str| hosts.scratch.join("a").join(name).display().to_string();
    let line = arguments
        .replace("$ACCEPT", example.unwrap())
        .replace("/etc/dunlin/pool.pem", &of("cert.pem"))
        .replace("/etc/dunlin/pool.key", &of("key.pem"));
    let done = finish(words(&line)).expect(1);
    // The first error is that the service manager has passed no socket.
    assert!(done.err.contains("systemd:clients"), "{done:?}");
}
