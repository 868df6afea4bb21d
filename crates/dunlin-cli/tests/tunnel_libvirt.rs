//! Two hosts with libvirt, a tunnel and a redirect on each: the usual commands migrate VMs through
//! the tunnels, and if a part is missing, they fail and the VMs run on.
//!
//! Three sources show the result of each migration: the VM, which checks its own memory; virsh; and
//! the wire, where every packet between the hosts is counted by port and searched for the VM's
//! memory.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "support/libvirt.rs"]
mod libvirt;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::process::Command;

use dunlin_rig::hosts::Family;
use dunlin_rig::libvirt::{PORTS, QEMU_USER, Side, TIMEOUT, Vm};
use dunlin_rig::need;
use libvirt::{Scene, TUNNEL_PORT, soak};
use support::finish;

#[test]
fn the_usual_command_migrates_a_machine_through_the_tunnels_and_back() {
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    assert_eq!(scene.moves(Side::A, &[&vm], ""), 1);
    let flags = "--parallel --parallel-connections 2";
    assert_eq!(scene.moves(Side::B, &[&vm], flags), 3);
}

/// The rules stay when a tunnel ends. Either host's rules alone prevent a migration in the clear.
#[test]
fn if_a_tunnel_or_a_hosts_rules_are_gone_nothing_leaves_in_the_clear() {
    let _turn = need::turn();
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();

    let parallel = "--parallel --parallel-connections 2";
    for side in [Side::A, Side::B] {
        scene.stop(side);
        let tried = scene.fails(Side::A, &vm, "");
        // The rules of the source redirect the connection to the tunnel, so none of its packets
        // leaves the host.
        assert!(!tried.keys().any(|port| PORTS.contains(port)), "{tried:?}");
        // While A's tunnel cannot reach B's, it refuses connections. If it accepted and then reset
        // them, QEMU 10.0 would crash in one of four cases (util/yank.c).
        scene.fails(Side::A, &vm, parallel);
        scene.start(side);
    }

    // Without the source's rules, the connection leaves in the clear, and the target rejects it.
    scene.run(Side::A, "nft flush ruleset").expect(0);
    let tried = scene.fails(Side::A, &vm, "");
    assert!(tried.keys().any(|port| PORTS.contains(port)), "{tried:?}");
    scene.redirect(Side::A, "apply").expect(0);

    // Without the target's rules, those of the source still redirect connections to the tunnel.
    scene.run(Side::B, "nft flush ruleset").expect(0);
    scene.moves(Side::A, &[&vm], "");
    scene.redirect(Side::B, "apply").expect(0);
    scene.moves(Side::B, &[&vm], "");
}

/// What Dunlin cannot prevent: if the rules of both hosts are removed, the memory is sent in the
/// clear. On each host, `show` reports that the rules are missing.
#[test]
fn without_the_rules_of_both_hosts_the_memory_is_in_the_clear_and_show_reports_it() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    for side in [Side::A, Side::B] {
        scene.redirect(side, "show").expect(0);
        scene.run(side, "nft flush ruleset").expect(0);
        assert_ne!(scene.redirect(side, "show").code, 0);
    }
    let wire = scene.count(&[&vm]);
    let ended = scene.begin(Side::A, &vm, "").wait(TIMEOUT).unwrap();
    assert!(ended.is_ok(), "{}", ended.said);
    let traffic = wire.stop().unwrap();
    assert!(!traffic.found.is_empty(), "{traffic:?}");
    // The tunnels keep their trunk up, with some bytes per second.
    let idle = traffic.bytes.get(&TUNNEL_PORT).copied();
    assert!(idle.unwrap_or(0) < 64 << 10, "{traffic:?}");
}

#[test]
fn a_peer_without_a_tunnel_gets_nothing_and_sends_nothing() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(mut scene) = Scene::bare() else {
        return;
    };
    let vm = Vm::new("web");
    let peer = scene.address(Side::B, Family::V4);
    scene.enable(Side::A, &peer, "");
    scene.pair.create(Side::A, &vm).unwrap();
    scene.fails(Side::A, &vm, "");
    scene.fails(Side::A, &vm, "--parallel --parallel-connections 2");

    // The other direction: A rejects what B sends in the clear.
    let other = Vm::new("db");
    scene.pair.create(Side::B, &other).unwrap();
    scene.fails(Side::B, &other, "");
}

/// Another user's connection to the ports does not leave the host.
#[test]
fn a_user_without_the_redirect_reaches_no_port_of_the_range() {
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let wire = scene.count(&[]);
    let to = scene.address(Side::B, Family::V4);
    let dial = |user: u32, address: &str, port: u16| {
        let line = format!("exec 3<>/dev/tcp/{address}/{port}");
        let mut command = Command::new("setpriv");
        command
            .args([format!("--reuid={user}"), format!("--regid={user}")])
            .args(["--clear-groups", "bash", "-c", &line]);
        finish(scene.pair.a.enter(&command)).code
    };
    assert_eq!(dial(1000, &to, *PORTS.start()), 1);
    let traffic = wire.stop().unwrap();
    assert_eq!(traffic.tried.get(PORTS.start()), None, "{traffic:?}");
    // If a user of the redirect runs the same command, it reaches the tunnel.
    assert_eq!(dial(QEMU_USER, &to, *PORTS.start()), 0);
}

#[test]
fn every_kind_of_migration_goes_through_the_tunnels() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let mut vm = Vm::new("web");
    vm.disk = Some(16 << 20);
    scene.pair.create(Side::A, &vm).unwrap();
    let parallel = |connections: u32| format!("--parallel --parallel-connections {connections}");
    let nova = "--p2p --undefinesource --persistent --migrateuri tcp://TO";
    let mut from = Side::A;
    // For each list of flags, the number of connections that carry memory. One more carries the
    // disk.
    for (flags, connections) in [
        (String::new(), 1),
        ("--p2p".to_owned(), 1),
        (parallel(2), 3),
        (parallel(4), 5),
        ("--tls".to_owned(), 1),
        (format!("--tls {}", parallel(4)), 5),
        ("--tls --p2p".to_owned(), 1),
        (nova.to_owned(), 1),
        (format!("{nova} --auto-converge --postcopy"), 1),
    ] {
        let flags = flags.replace("TO", from.other().name()) + " --copy-storage-all";
        let carried = scene.moves(from, &[&vm], &flags);
        assert_eq!(carried, connections + 1, "{flags}");
        let disk = scene.pair.disk(from.other(), &vm).unwrap();
        assert!(disk == vm.disk_content(), "{flags}: the disk differs");
        from = from.other();
    }
}

/// The guest writes faster than the memory is sent, so that virsh switches to post-copy. QEMU then
/// opens a second connection, over which the target fetches pages.
#[test]
fn postcopy_fetches_pages_through_the_tunnels() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let mut vm = Vm::new("web");
    vm.workload.hot = vm.workload.pages / 2;
    vm.workload.rate = Some(20_000);
    scene.pair.create(Side::A, &vm).unwrap();
    for from in [Side::A, Side::B] {
        let flags = "--postcopy --postcopy-after-precopy --bandwidth 16";
        assert_eq!(scene.moves(from, &[&vm], flags), 2);
    }
}

#[test]
fn two_machines_at_once_and_a_cancelled_migration() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let (web, db) = (Vm::new("web"), Vm::new("db"));
    scene.pair.create(Side::A, &web).unwrap();
    scene.pair.create(Side::A, &db).unwrap();
    scene.moves(Side::A, &[&web, &db], "");
    scene.moves(Side::B, &[&web, &db], "--parallel --parallel-connections 2");

    for flags in [
        "--bandwidth 2",
        "--bandwidth 2 --parallel --parallel-connections 2",
    ] {
        let abort = || drop(scene.pair.must(Side::A, "domjobabort web").unwrap());
        scene.interrupted(Side::A, &web, flags, abort);
    }
    scene.moves(Side::A, &[&web, &db], "");
}
