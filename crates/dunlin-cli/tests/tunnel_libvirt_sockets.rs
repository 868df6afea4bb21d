//! Two hosts with libvirt and a tunnel on each, and no rules of a packet filter: `dunlin libvirt
//! migrate` moves VMs over unix sockets that `dunlin libvirt enable --sockets` has prepared.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "support/libvirt.rs"]
mod libvirt;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use dunlin_rig::libvirt::{QEMU_USER, Running, Side, TIMEOUT, Vm};
use dunlin_rig::need;
use libvirt::{FAST, Scene, assert_no_clear, assert_tunnelled, soak};
use support::{Done, finish, words};
use tunnel::Tunnel;

const SIDES: [Side; 2] = [Side::A, Side::B];

/// Hosts after `enable --sockets`, with a running tunnel on each.
fn enabled() -> Option<Scene> {
    let mut scene = Scene::bare()?;
    for side in SIDES {
        let daemon = scene.pair.on(side);
        // Programs on this host see the host's own /etc, and a virsh that runs in the root
        // directory of the host's libvirt.
        let etc = daemon.path_inside("etc");
        let mut mount = Command::new("mount");
        mount.arg("--bind").args([etc.as_path(), "/etc".as_ref()]);
        finish(daemon.enter(&mount)).expect(0);
        let script = format!(
            "#!/bin/sh\nexec chroot {} /usr/bin/virsh \"$@\"\n",
            daemon.path_inside("").display()
        );
        let folder = scene.scratch.join(side.name());
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("virsh"), script).unwrap();
        fs::set_permissions(folder.join("virsh"), fs::Permissions::from_mode(0o755)).unwrap();
    }
    for side in SIDES {
        let done = enable(&scene, side, "");
        // B's tunnel does not run yet when A is enabled, which is not an error.
        assert_eq!(done.code, 0, "{done:?}");
        start(&mut scene, side);
    }
    Some(scene)
}

fn dunlin(scene: &Scene, side: Side, line: &str) -> Command {
    let mut command = words(line);
    let own = scene.scratch.join(side.name());
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", own.display()));
    scene.pair.on(side).enter(&command)
}

fn enable(scene: &Scene, side: Side, more: &str) -> Done {
    let line = format!(
        "libvirt enable --sockets --peer {} {more}",
        side.other().name()
    );
    finish(dunlin(scene, side, &line))
}

fn start(scene: &mut Scene, side: Side) {
    let command = dunlin(scene, side, "tunnel run --config /etc/dunlin/tunnel.toml");
    let file = scene.pair.on(side).path("etc/dunlin/tunnel.toml");
    scene.tunnels[side as usize] = Some(Tunnel::follow(command, file));
}

fn begin(scene: &Scene, from: Side, vm: &Vm, flags: &str) -> Running {
    let to = from.other().name();
    let line = format!(
        "libvirt migrate --to qemu+tcp://{to}/system {} {to} {flags}",
        vm.name
    );
    Running::start(dunlin(scene, from, &line)).unwrap()
}

/// The sockets of the tunnel on a host.
fn listeners(scene: &Scene, side: Side) -> Vec<serde_json::Value> {
    let status = finish(dunlin(scene, side, "status --json"))
        .expect(0)
        .lines();
    let tunnel = status.iter().find(|one| one["event"] == "tunnel").unwrap();
    tunnel["listeners"].as_array().unwrap().clone()
}

/// Migrates VMs at the same time. Expects that they arrive, through the tunnels, and that
/// their sockets are closed.
fn moves(scene: &Scene, from: Side, vms: &[&Vm], flags: &str) {
    let wire = scene.count(vms);
    let running: Vec<_> = vms.iter().map(|vm| begin(scene, from, vm, flags)).collect();
    for one in running {
        let ended = one.wait(TIMEOUT).unwrap();
        assert!(ended.is_ok(), "{flags}: {}\n{}", ended.said, scene.logs());
    }
    let traffic = wire.stop().unwrap();
    println!("{from:?} {} {flags}: {traffic:?}", vms.len());
    assert_tunnelled(&traffic, vms);
    for vm in vms {
        scene.runs_on(from.other(), vm);
    }
    assert_eq!(
        listeners(scene, from),
        [] as [serde_json::Value; 0],
        "{flags}"
    );
}

#[test]
fn without_the_packet_filter_one_command_migrates_a_machine_and_back() {
    let _turn = need::turn();
    let Some(mut scene) = enabled() else { return };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    moves(&scene, Side::A, &[&vm], "");
    moves(
        &scene,
        Side::B,
        &[&vm],
        "--parallel --parallel-connections 2",
    );
    for side in SIDES {
        let rules = scene.run(side, "nft list ruleset").expect(0);
        assert_eq!(rules.out.trim(), "");
        let directory = fs::metadata(scene.pair.on(side).path("run/dunlin/vm")).unwrap();
        assert_eq!(
            (directory.uid(), directory.mode() & 0o7777),
            (QEMU_USER, 0o2770)
        );
    }

    // Without B's tunnel a migration fails after B's host has refused connections for a second. The
    // VM stays, and no socket is left.
    scene.tunnels[Side::B as usize] = None;
    let wire = scene.count(&[&vm]);
    let ended = begin(&scene, Side::A, &vm, "").wait(TIMEOUT).unwrap();
    assert_eq!(ended.code, Some(1), "{}", ended.said);
    assert!(ended.took < FAST, "{:?}: {}", ended.took, ended.said);
    assert_no_clear(&wire.stop().unwrap());
    scene.runs_on(Side::A, &vm);
    assert_eq!(listeners(&scene, Side::A), [] as [serde_json::Value; 0]);
    start(&mut scene, Side::B);
    moves(&scene, Side::A, &[&vm], "");
}

#[test]
fn enable_writes_what_libvirt_needs_and_disable_removes_it() {
    let _turn = need::turn();
    let Some(scene) = enabled() else { return };
    let a = &scene.pair.a;
    let files = [
        "etc/dunlin/tunnel.toml",
        "etc/tmpfiles.d/dunlin-libvirt.conf",
        "etc/apparmor.d/abstractions/libvirt-qemu.d/dunlin",
    ];
    let read = |file: &str| fs::read_to_string(a.path(file)).unwrap();
    assert!(
        read(files[1]).contains("d /run/dunlin/vm 2770 libvirt-qemu "),
        "{}",
        read(files[1])
    );
    assert!(
        read(files[2]).contains("\n/run/dunlin/vm/** rw,\n"),
        "{}",
        read(files[2])
    );
    // A second `enable` with another peer keeps the first peer.
    let before = read(files[0]);
    let third = "--peer 192.0.2.9=c.example";
    assert_eq!(enable(&scene, Side::A, third).code, 0);
    let after = read(files[0]);
    assert!(
        after.contains("libvirt-c.example") && after.contains("libvirt-b.example"),
        "{after}"
    );
    // A dry run prints the routes and changes nothing.
    let shown = enable(&scene, Side::B, "--dry-run").expect(0);
    assert!(
        shown.out.contains("[route.\"libvirt-a.example\"]"),
        "{}",
        shown.out
    );
    // There is no route to d.example.
    let refused = finish(dunlin(&scene, Side::A, "libvirt migrate web d.example"));
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("b.example"), "{}", refused.err);

    let config = a.path(files[0]);
    let more = before.replacen("identity =", "drain = \"5s\"\nidentity =", 1);
    fs::write(&config, more).unwrap();
    finish(dunlin(&scene, Side::A, "libvirt disable")).expect(0);
    assert!(read(files[0]).contains("drain") && !read(files[0]).contains("libvirt-"));
    finish(dunlin(&scene, Side::B, "libvirt disable")).expect(0);
    assert!(!scene.pair.b.path(files[0]).exists());
    for side in SIDES {
        for file in &files[1..] {
            assert!(!scene.pair.on(side).path(file).exists(), "{file}");
        }
        assert!(!scene.pair.on(side).path("run/dunlin/vm").exists());
    }
}

#[test]
fn every_kind_of_migration_goes_over_unix_sockets() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = enabled() else { return };
    let mut vm = Vm::new("web");
    vm.disk = Some(16 << 20);
    scene.pair.create(Side::A, &vm).unwrap();
    let mut from = Side::A;
    for flags in [
        "--copy-storage-all",
        "--copy-storage-all --p2p",
        "--copy-storage-all --parallel --parallel-connections 4",
    ] {
        moves(&scene, from, &[&vm], flags);
        let disk = scene.pair.disk(from.other(), &vm).unwrap();
        assert!(disk == vm.disk_content(), "{flags}: the disk differs");
        from = from.other();
    }
    let (db, ci) = (Vm::new("db"), Vm::new("ci"));
    scene.pair.create(Side::A, &db).unwrap();
    scene.pair.create(Side::A, &ci).unwrap();
    for flags in ["", "--postcopy --postcopy-after-precopy", "--tls"] {
        moves(&scene, Side::A, &[&db, &ci], flags);
        moves(&scene, Side::B, &[&db, &ci], flags);
    }
    // libvirt has no TLS for disks over unix sockets, so the command fails before the migration
    // begins.
    let refused = begin(&scene, from, &vm, "--copy-storage-all --tls")
        .wait(TIMEOUT)
        .unwrap();
    assert_eq!(refused.code, Some(1), "{}", refused.said);
    scene.runs_on(from, &vm);
}
