//! Two hosts with libvirt: a VM migrates in the clear, and the counted packets show that.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::time::Instant;

use dunlin_rig::libvirt::{CONTROL_PORT, PORTS, Side, Vm};
use dunlin_rig::need;

#[test]
fn a_machine_migrates_in_the_clear_and_the_count_shows_it() {
    let start = Instant::now();
    let Some(pair) = need::libvirt() else { return };
    println!("two hosts after {:?}", start.elapsed());
    let vm = Vm::new("web");
    pair.create(Side::A, &vm).unwrap();
    println!("a guest after {:?}", start.elapsed());
    let before = pair.visits(Side::A, &vm).unwrap();
    let wire = pair.link.count(pair.a.host(), vm.words()).unwrap();
    let done = pair.must(Side::A, "migrate --live web qemu+tcp://b.example/system");
    let traffic = wire.stop().unwrap();
    println!("migrated after {:?}: {traffic:?}", start.elapsed());
    done.unwrap_or_else(|error| panic!("{error}\n{}\n{}", pair.a.journal(), pair.b.journal()));
    let after = pair.visits(Side::B, &vm).unwrap();
    assert!(after > before, "{before} {after}");
    pair.check(Side::B, &vm).unwrap();
    println!("checked after {:?}", start.elapsed());

    let clear: u64 = traffic
        .found
        .iter()
        .filter(|(port, _)| PORTS.contains(port))
        .map(|(_, found)| found)
        .sum();
    assert!(clear >= vm.workload.pages * 9 / 10, "{traffic:?}");
    assert!(
        traffic
            .ports()
            .iter()
            .all(|port| PORTS.contains(port) || *port == CONTROL_PORT)
    );
}
