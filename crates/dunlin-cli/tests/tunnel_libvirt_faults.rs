//! Tunnels that end or fall silent during a migration of libvirt, and the less usual configurations
//! of a redirect.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "support/libvirt.rs"]
mod libvirt;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::time::{Duration, Instant};

use dunlin_rig::hosts::Family;
use dunlin_rig::libvirt::{PORTS, Side, TIMEOUT, Vm};
use dunlin_rig::need;
use libvirt::{Scene, soak};

/// Longer than a tunnel waits for a silent peer (10 s).
const SILENCE: Duration = Duration::from_secs(20);
/// How long virsh may take to fail after a tunnel was killed, or after its drain.
const SOON: Duration = Duration::from_secs(3);
/// How long a tunnel waits for its connections after SIGTERM.
const DRAIN: Duration = Duration::from_secs(1);
const SIDES: [Side; 2] = [Side::A, Side::B];

/// A bandwidth limit, in MiB/s. It makes the migration so slow that a test can act while it runs.
const SLOW: &str = "--bandwidth 4";

/// On either host, the tunnel is killed, or an operator ends it (SIGTERM, and the end of its
/// drain). In one case, the tunnel on the target is stopped (SIGSTOP).
#[test]
fn a_tunnel_that_ends_during_a_migration_leaves_the_machine_running() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(mut scene) = Scene::new() else {
        return;
    };
    for side in SIDES {
        let file = scene.config(side);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, format!("drain = \"{}s\"\n{text}", DRAIN.as_secs())).unwrap();
        scene.stop(side);
        scene.start(side);
    }
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    // Migrate over one connection, because a reset during a parallel migration sometimes crashes
    // QEMU 10.0 (util/yank.c), also without a tunnel.
    for (side, signal, limit) in [
        (Side::A, "KILL", SOON),
        (Side::B, "KILL", SOON),
        (Side::A, "TERM", DRAIN + SOON),
        (Side::B, "TERM", DRAIN + SOON),
        (Side::B, "STOP", SILENCE),
    ] {
        let end = || {
            let since = Instant::now();
            scene.tunnels[side as usize]
                .as_ref()
                .unwrap()
                .signal(signal);
            if signal == "STOP" {
                // The log of the source has the cause long before virsh fails.
                let source = scene.tunnels[Side::A as usize].as_ref().unwrap();
                let line = source.wait_for(" fault=control-lost ");
                assert!(since.elapsed() < SOON, "{:?}: {line}", since.elapsed());
                assert!(line.contains(" host_answers=true"), "{line}");
            }
        };
        let took = scene.interrupted(Side::A, &vm, SLOW, end);
        println!("{side:?} {signal}: {took:?}");
        assert!(took < limit, "{side:?} {signal}: {took:?}");
        scene.stop(side);
        scene.start(side);
        scene.moves(Side::A, &[&vm], "");
        scene.moves(Side::B, &[&vm], "");
    }
}

/// IPv6, and a peer that the configuration names by its host name.
#[test]
fn peers_are_addresses_of_both_families_and_names() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(mut scene) = Scene::bare() else {
        return;
    };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    for side in [Side::A, Side::B] {
        let peer = scene.address(side.other(), Family::V6);
        scene.enable(side, &peer, "");
    }
    let mut from = Side::A;
    for more in ["", "", "--parallel --parallel-connections 2"] {
        let to = scene.address(from.other(), Family::V6);
        scene.moves(from, &[&vm], &format!("--migrateuri tcp://[{to}] {more}"));
        from = from.other();
    }
    for side in [Side::A, Side::B] {
        scene.stop(side);
        scene.enable(side, side.other().name(), "");
    }
    // Three migrations have left the VM on B.
    scene.moves(Side::B, &[&vm], "");
    scene.moves(Side::A, &[&vm], "");
}

/// QEMU on the target listens at one address, so the tunnel must connect to that address.
#[test]
fn a_target_that_listens_at_one_address_needs_local() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    let address = scene.address(Side::B, Family::V4);
    let flags = format!("--listen-address {address}");
    scene.fails(Side::A, &vm, &flags);
    scene.stop(Side::B);
    let peer = scene.address(Side::A, Family::V4);
    scene.enable(Side::B, &peer, &format!("local = [{address:?}]\n"));
    scene.moves(Side::A, &[&vm], &flags);
}

/// During a rollout a host admits peers without Dunlin. Their connections are in the clear, and the
/// host counts them.
#[test]
fn a_peer_of_plain_from_is_admitted_in_the_clear() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(mut scene) = Scene::bare() else {
        return;
    };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    let plain = scene.address(Side::A, Family::V4);
    let until = (time::OffsetDateTime::now_utc() + time::Duration::days(2)).date();
    let more = format!("plain_from = [{plain:?}]\nplain_until = \"{until}\"\n");
    scene.enable(Side::B, "10.77.255.1", &more);
    let wire = scene.count(&[&vm]);
    let ended = scene.begin(Side::A, &vm, "").wait(TIMEOUT).unwrap();
    assert!(ended.is_ok(), "{}", ended.said);
    let traffic = wire.stop().unwrap();
    assert!(
        PORTS.clone().any(|port| traffic.found.contains_key(&port)),
        "{traffic:?}"
    );
    let shown = scene.redirect(Side::B, "show --json").expect(0);
    let counters = &shown.last()["counters"]["libvirt"];
    assert!(counters["plain"][&plain].as_u64() >= Some(1), "{counters}");
    assert_eq!(counters["rejected_input"], 0, "{counters}");
}
